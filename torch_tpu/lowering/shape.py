"""Joining, padding, flipping, repeating; copies and gradients of views."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._prims_common import suggest_memory_format
from torch.utils._pytree import tree_map_only

from torch_tpu.lowering import meta
from torch_tpu.lowering.common import Scalar, as_value, compute_dtype, tracer
from torch_tpu.lowering.registry import lower
from torch_tpu.lowering.scatter import place_at, widened
from torch_tpu.lowering.view import index_dtype, span
from torch_tpu.stablehlo import Type, Value
from torch_tpu.stablehlo import ops as hlo


# ---- joining --------------------------------------------------------------------------------------------------------
@lower("cat")
def cat(tensors: list[Value], dim: int = 0, *, result: list[Type]) -> Value:
    """Concatenation with promotion; one-dimensional empty tensors join anything, as they always did."""
    out = result[0]
    parts = [hlo.convert(t, out.dtype) for t in tensors if t.ndim == len(out.shape) and t.numel]
    return hlo.concatenate(parts, dim % len(out.shape)) if parts else hlo.constant(0, out.dtype, out.shape)


@lower("stack")
def stack(tensors: list[Value], dim: int = 0, *, result: list[Type]) -> Value:
    dim %= len(result[0].shape)
    return hlo.concatenate([hlo.expand_dims(hlo.convert(t, result[0].dtype), [dim]) for t in tensors], dim)


# ---- constant padding, repetition, reversal -------------------------------------------------------------------------
def _amounts(padding: Sequence[int], rank: int) -> list[tuple[int, int]]:
    """PyTorch's padding list, last dimension first, as (low, high) per dimension."""
    pairs = [(padding[i], padding[i + 1]) for i in range(0, len(padding), 2)]
    return [(0, 0)] * (rank - len(pairs)) + pairs[::-1]


@lower("constant_pad_nd")
def constant_pad_nd(x: Value, padding: list[int], value: Scalar = 0) -> Value:
    low, high = zip(*_amounts(padding, x.ndim), strict=True) if x.ndim else ((), ())
    return hlo.pad(x, as_value(value, x.dtype), low, high)


@lower("flip")
def flip(x: Value, dims: list[int]) -> Value:
    return hlo.reverse(x, sorted({d % x.ndim for d in dims}) if x.ndim else [])


@lower("roll")
def roll(x: Value, shifts: list[int], dims: list[int] = ()) -> Value:  # type: ignore[assignment]
    if not dims:
        return hlo.reshape(_roll(hlo.reshape(x, (x.numel,)), shifts[0], 0), x.shape)
    for shift, dim in zip(shifts, dims, strict=True):
        x = _roll(x, shift, dim % x.ndim)
    return x


def _roll(x: Value, shift: int, dim: int) -> Value:
    n = x.shape[dim]
    cut = -shift % n if n else 0
    return hlo.concatenate([hlo.slice_dim(x, dim, cut, n), hlo.slice_dim(x, dim, 0, cut)], dim) if cut else x


@lower("repeat")
def repeat(x: Value, repeats: list[int]) -> Value:
    sizes = (*[1] * (len(repeats) - x.ndim), *x.shape)
    tiled = hlo.broadcast_in_dim(
        hlo.reshape(x, sizes),
        [k for pair in zip(repeats, sizes, strict=True) for k in pair],
        range(1, 2 * len(sizes), 2),
    )
    return hlo.reshape(tiled, [r * n for r, n in zip(repeats, sizes, strict=True)])


def _below(x: Value) -> Value:
    """Column less row of every element of a batch of matrices."""
    rows, columns = (hlo.iota(x.shape, x.ndim - k, torch.int32) for k in (2, 1))
    return columns - rows


@lower("tril", runtime=("diagonal",))
def tril(x: Value, diagonal: Scalar = 0) -> Value:
    return hlo.select(_below(x) <= _as_int32(diagonal, x), x, 0)


@lower("triu", runtime=("diagonal",))
def triu(x: Value, diagonal: Scalar = 0) -> Value:
    return hlo.select(_below(x) >= _as_int32(diagonal, x), x, 0)


def _as_int32(n: Scalar, like: Value) -> Value:
    """A 64-bit number clamped to int32 and spread over the shape of ``like``."""
    clamped = hlo.clamp(-(2**31), as_value(n, torch.int64), 2**31 - 1)
    return hlo.broadcast_to(hlo.convert(clamped, torch.int32), like.shape)


# ---- reflection and replication -------------------------------------------------------------------------------------
# A border is a linear map of the input along one dimension: a strip of the input, and its transpose for the gradient.
def _reflect(x: Value, dim: int, lo: int, hi: int) -> tuple[Value | None, Value | None]:
    n = x.shape[dim]
    return (
        hlo.reverse(hlo.slice_dim(x, dim, 1, lo + 1), [dim]) if lo > 0 else None,
        hlo.reverse(hlo.slice_dim(x, dim, n - 1 - hi, n - 1), [dim]) if hi > 0 else None,
    )


def _reflect_transposed(low: Value | None, high: Value | None, dim: int, n: int) -> list[Value]:
    out = []
    if low is not None:
        out.append(_pad_dim(hlo.reverse(low, [dim]), dim, 1, n - 1 - low.shape[dim]))
    if high is not None:
        out.append(_pad_dim(hlo.reverse(high, [dim]), dim, n - 1 - high.shape[dim], 1))
    return out


def _replicate(x: Value, dim: int, lo: int, hi: int) -> tuple[Value | None, Value | None]:
    n = x.shape[dim]

    def strip(at: int, count: int) -> Value | None:
        if count <= 0:
            return None
        shape = [count if i == dim else d for i, d in enumerate(x.shape)]
        return hlo.broadcast_in_dim(hlo.slice_dim(x, dim, at, at + 1), shape, range(x.ndim))

    return strip(0, lo), strip(n - 1, hi)


def _replicate_transposed(low: Value | None, high: Value | None, dim: int, n: int) -> list[Value]:
    def edge(strip: Value, before: int) -> Value:
        total = hlo.expand_dims(hlo.reduce_one(strip, 0, [dim], hlo.add), [dim])
        return _pad_dim(total, dim, before, n - 1 - before)

    return ([] if low is None else [edge(low, 0)]) + ([] if high is None else [edge(high, n - 1)])


def _pad_dim(x: Value, dim: int, low: int, high: int) -> Value:
    return hlo.pad(
        x, 0, [low if i == dim else 0 for i in range(x.ndim)], [high if i == dim else 0 for i in range(x.ndim)]
    )


def _register_border(name: str, strips: Callable[..., Any], transposed: Callable[..., list[Value]]) -> None:
    """The padding operators ``<name>1d..3d`` and their gradients. Negative amounts crop."""

    def pad(x: Value, padding: list[int]) -> Value:
        for dim, (lo, hi) in enumerate(_amounts(padding, x.ndim)):
            low, high = strips(x, dim, lo, hi)
            middle = hlo.slice_dim(x, dim, max(-lo, 0), x.shape[dim] - max(-hi, 0))
            x = hlo.concatenate([v for v in (low, middle, high) if v is not None], dim)
        return x

    for k in (1, 2, 3):
        lower(f"{name}{k}d", meta=meta.in_format_of_input(f"{name}{k}d"))(pad)

    @lower(*(f"{name}{k}d_backward" for k in (1, 2, 3)))
    def pad_backward(grad: Value, x: Value, padding: list[int]) -> Value:
        dtype, grad = grad.dtype, hlo.convert(grad, compute_dtype(grad.dtype))
        for dim, (lo, hi) in enumerate(_amounts(padding, x.ndim)):
            end = grad.shape[dim]
            low = hlo.slice_dim(grad, dim, 0, lo) if lo > 0 else None
            high = hlo.slice_dim(grad, dim, end - hi, end) if hi > 0 else None
            middle = hlo.slice_dim(grad, dim, max(lo, 0), end - max(hi, 0))
            total = _pad_dim(middle, dim, max(-lo, 0), max(-hi, 0))
            for strip in transposed(low, high, dim, x.shape[dim]):
                total = total + strip
            grad = total
        return hlo.convert(grad, dtype)


_register_border("reflection_pad", _reflect, _reflect_transposed)
_register_border("replication_pad", _replicate, _replicate_transposed)


def _shuffled_meta(x: torch.Tensor, groups: int) -> torch.Tensor:
    torch._check(x.ndim > 2, lambda: f"channel_shuffle expects input with > 2 dims, but got {x.ndim}")
    torch._check(groups > 0 and x.shape[1] % groups == 0, lambda: "Number of channels must be divisible by groups.")
    return torch.empty_like(x, memory_format=suggest_memory_format(x))


@lower("channel_shuffle", "native_channel_shuffle", meta=_shuffled_meta)
def channel_shuffle(x: Value, groups: int) -> Value:
    """Channel ``(g, c)`` of ``groups`` equal groups becomes channel ``(c, g)``."""
    split = hlo.reshape(x, (x.shape[0], groups, x.shape[1] // groups, *x.shape[2:]))
    return hlo.reshape(hlo.transpose(split, (0, 2, 1, *range(3, split.ndim))), x.shape)


# ---- views as values ------------------------------------------------------------------------------------------------
def _traced(x: Value) -> torch.Tensor:
    """``x`` as a contiguous tensor of this trace, for a view operator to work on."""
    t = torch.empty(x.shape, dtype=x.dtype, device="meta")
    tracer().bind(t, x)
    return t


def _register_copy(view: str, overload: str = "default") -> None:
    """``<view>_copy``: the view, read. For those that PyTorch does not decompose itself."""
    op = getattr(getattr(torch.ops.aten, view), overload)

    @lower(f"{view}_copy" if overload == "default" else f"{view}_copy.{overload}")
    def copy(x: Value, *args: Any) -> Any:
        return tree_map_only(torch.Tensor, tracer().read, op(_traced(x), *args))


for _view, _overload in {
    "slice": "Tensor",
    "select": "int",
    "split": "Tensor",
    "detach": "default",
    "view_as_real": "default",
    "view_as_complex": "default",
}.items():
    _register_copy(_view, _overload)


def _viewed_meta(x: torch.Tensor, size: list[int]) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device="meta").view(size)


@lower("view_copy", meta=_viewed_meta)
def view_copy(x: Value, size: list[int], *, result: list[Type]) -> Value:
    """Of any strides: there is no view where none can be."""
    return hlo.reshape(x, result[0].shape)


@lower("_conj_copy")
def conj_copy(x: Value) -> Value:
    return hlo.conj(x) if x.dtype.is_complex else x


@lower("_neg_view_copy")
def neg_view_copy(x: Value) -> Value:
    return hlo.negate(x)


def _register_scatter(view: str, overload: str = "default") -> None:
    """``<view>_scatter``: a copy whose view is overwritten."""
    op = getattr(getattr(torch.ops.aten, view), overload)

    @lower(f"{view}_scatter")
    def scatter(x: Value, source: Value, *args: Any) -> Value:
        t = _traced(x)
        window = op(t, *args)
        tracer().write(window, hlo.broadcast_to(hlo.convert(source, x.dtype), tuple(window.shape)))
        return tracer().read(t)


for _view, _overload in {"slice": "Tensor", "select": "int", "diagonal": "default"}.items():
    _register_scatter(_view, _overload)


@lower("as_strided_scatter")
def as_strided_scatter(
    x: Value, source: Value, size: list[int], stride: list[int], storage_offset: int | None = None, *,
    tensors: dict[str, torch.Tensor],
) -> Value:  # fmt: skip
    """The window lies on ``x``'s memory, not on its logical order: both are windows on one blank storage here."""
    shape, strides, offset = tensors["self"].shape, tensors["self"].stride(), int(tensors["self"].storage_offset())
    at = offset if storage_offset is None else storage_offset
    room = max(offset + span(shape, strides), at + span(size, stride))
    storage = torch.empty(room, dtype=x.dtype, device="meta")
    mine = storage.as_strided(shape, strides, offset)
    tracer().write(mine, x)
    tracer().write(storage.as_strided(size, stride, at), hlo.convert(source, x.dtype))
    return tracer().read(mine)


# ---- gradients of views ---------------------------------------------------------------------------------------------
@lower("slice_backward", runtime=("start", "end"))
def slice_backward(grad: Value, input_sizes: list[int], dim: int, start: Scalar, end: Scalar, step: int) -> Value:
    dim %= len(input_sizes)
    if 0 in grad.shape:
        return hlo.constant(0, grad.dtype, tuple(input_sizes))
    zeros = [0] * grad.ndim
    spread = hlo.pad(grad, 0, zeros, zeros, [step - 1 if i == dim else 0 for i in range(grad.ndim)])
    return _at(spread, input_sizes, dim, start)


@lower("select_backward", runtime=("index",))
def select_backward(grad: Value, input_sizes: list[int], dim: int, index: Scalar) -> Value:
    dim %= len(input_sizes)
    return _at(hlo.expand_dims(grad, [dim]), input_sizes, dim, index)


def _at(block: Value, shape: Sequence[int], dim: int, start: Scalar) -> Value:
    """Zeros of ``shape`` but for ``block``, which begins at ``start`` of ``dim``; negative ones count from the end."""
    n = shape[dim]
    if isinstance(start, int):
        start = max(start + n, 0) if start < 0 else start
        return _pad_dim(block, dim, start, n - start - block.shape[dim])
    index = as_value(start, index_dtype(n))
    index = hlo.select(index < 0, index + n, index)
    zero = hlo.full_like(index, 0)
    starts = [index if i == dim else zero for i in range(len(shape))]
    return hlo.dynamic_update_slice(hlo.constant(0, block.dtype, tuple(shape)), block, starts)


@lower("diagonal_backward")
def diagonal_backward(grad: Value, input_sizes: list[int], offset: int, dim1: int, dim2: int) -> Value:
    t = _traced(hlo.constant(0, grad.dtype, tuple(input_sizes)))
    tracer().write(torch.diagonal(t, offset, dim1, dim2), grad)
    return tracer().read(t)


@lower("unfold_backward")
def unfold_backward(grad: Value, input_sizes: list[int], dim: int, size: int, step: int) -> Value:
    """Every window's gradient added where the window stood; windows that do not overlap are only padded apart."""
    shape = tuple(input_sizes)
    if not shape or 0 in grad.shape:
        return hlo.reshape(grad, shape) if grad.numel else hlo.constant(0, grad.dtype, shape)
    dim %= len(shape)
    windows = grad.shape[dim]
    grad = hlo.move_dim(grad, grad.ndim - 1, dim + 1)
    if step >= size:
        spaced = hlo.reshape(_pad_dim(grad, dim + 1, 0, step - size), (*shape[:dim], windows * step, *shape[dim + 1 :]))
        return _pad_dim(spaced, dim, 0, shape[dim] - windows * step)
    at = hlo.iota((windows, size), 0, torch.int32) * step + hlo.iota((windows, size), 1, torch.int32)
    return widened(place_at([dim], [at], dim))(hlo.constant(0, grad.dtype, shape), grad, hlo.add)
