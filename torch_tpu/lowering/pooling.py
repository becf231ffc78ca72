"""Pooling: windows of the last one to three dimensions reduced to a maximum or a mean."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._prims_common import suggest_memory_format

from torch_tpu.lowering.common import compute_dtype, for_cpu, lowest, tracer
from torch_tpu.lowering.registry import lower
from torch_tpu.lowering.taps import Row, as_rows, resample, scatter_sum, transposed, windows
from torch_tpu.stablehlo import Shape, Type, Value
from torch_tpu.stablehlo import ops as hlo

#: Gradients of larger windows scatter instead of visiting every window position.
MOST_TAPS = 32
_LAST_INDEX = torch.iinfo(torch.int32).max


@dataclass(frozen=True)
class Window:
    """The sliding window of the last dimensions: one entry per dimension."""

    kernel: Shape
    stride: Shape
    padding: Shape
    dilation: Shape
    size: Shape  # of the input
    out: Shape

    @staticmethod
    def of(
        rank: int,
        kernel: Sequence[int],
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        size: Shape,
        out: Shape,
    ) -> Window:
        kernel, stride, padding, dilation = (
            tuple(v) * rank if len(v) == 1 else tuple(v) for v in (kernel, stride or kernel, padding, dilation)
        )
        return Window(kernel, stride, padding, dilation, size[-rank:], out[-rank:])

    @property
    def rank(self) -> int:
        return len(self.kernel)

    def pads(self) -> list[tuple[int, int]]:
        """Padding so that exactly ``out`` windows fit; ``ceil_mode`` lets the last one hang over."""
        spans = (d * (k - 1) + 1 for k, d in zip(self.kernel, self.dilation, strict=True))
        return [
            (p, max(0, (o - 1) * s + span - n - p))
            for p, o, s, span, n in zip(self.padding, self.out, self.stride, spans, self.size, strict=True)
        ]

    def reduce(self, xs: list[Value], inits: list[Any], body: Callable[..., Sequence[Value]]) -> tuple[Value, ...]:
        lead = xs[0].ndim - self.rank
        ones, none = (1,) * lead, ((0, 0),) * lead
        return hlo.reduce_window(
            xs, inits, body, window=(*ones, *self.kernel), strides=(*ones, *self.stride), padding=(*none, *self.pads()),
            window_dilation=(*ones, *self.dilation),
        )  # fmt: skip


# ---- maximum -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Maxima:
    """A fact: the value says where the greatest elements of the windows of ``x`` are."""

    x: Value
    window: Window


def _larger(left: Sequence[Value], right: Sequence[Value]) -> list[Value]:
    """The larger of two (value, position) pairs: of equals the first in memory, of NaN the last, as PyTorch scans."""
    (a, i), (b, j) = left, right
    take_right = hlo.or_(hlo.compare(b, a, "GT"), hlo.and_(hlo.compare(b, a, "EQ"), hlo.compare(j, i, "LT")))
    if a.dtype.is_floating_point:
        nan_a, nan_b = hlo.compare(a, a, "NE"), hlo.compare(b, b, "NE")
        later = hlo.or_(hlo.not_(nan_a), hlo.compare(j, i, "GT"))
        take_right = hlo.or_(take_right, hlo.and_(nan_b, later))
    return [hlo.select(take_right, b, a), hlo.select(take_right, j, i)]


def _positions(shape: Shape, rank: int) -> Value:
    """The flat position of every element within its last ``rank`` dimensions, int32 of ``shape``."""
    total, step = hlo.constant(0, torch.int32, shape), 1
    for dim in reversed(range(len(shape) - rank, len(shape))):
        total = total + hlo.iota(shape, dim, torch.int32) * step
        step *= shape[dim]
    return total


def max_pool(
    rank: int, x: Value, kernel: list[int], stride: list[int], padding: list[int], dilation: list[int], out: Shape
) -> list[Value]:
    if 0 in out:
        return [hlo.constant(0, x.dtype, out), hlo.constant(0, torch.int64, out)]
    window = Window.of(rank, kernel, stride, padding, dilation, x.shape, out)
    wide = hlo.convert(x, compute_dtype(x.dtype))
    values, at = window.reduce([wide, _positions(x.shape, rank)], [lowest(x.dtype), _LAST_INDEX], _larger)
    values, at = hlo.convert(values, x.dtype), hlo.convert(at, torch.int64)
    if not for_cpu():  # two reductions: of a compiled model nobody reads the positions, and the pairs are dear
        values = window.reduce([x], [lowest(x.dtype)], lambda a, b: [hlo.maximum(a[0], b[0])])[0]
        at.fact = Maxima(x, window)
    return [values, at]


def max_pool_backward(grad: Value, x: Value, window: Window, at: Value) -> Value:
    """Each window's gradient goes to the position that ``at`` names."""
    wide = hlo.convert(grad, compute_dtype(grad.dtype))
    if 0 in grad.shape or 0 in x.shape:
        return hlo.full_like(x, 0)
    if at.fact == Maxima(x, window) and set(window.dilation) == {1}:
        return _selected(grad, x, window)
    if math.prod(window.kernel) > MOST_TAPS:
        return _scattered(grad, x, window.rank, at)
    rest, lead, tap = hlo.convert(at, torch.int32), x.ndim - window.rank, hlo.constant(0, torch.int32, at.shape)
    step = 1
    for i in reversed(range(window.rank)):  # the window's position that was chosen, counted row by row
        start = hlo.iota(at.shape, lead + i, torch.int32) * window.stride[i] - window.padding[i]
        place = hlo.remainder(rest, window.size[i]) - start
        tap = tap + hlo.divide(place, window.dilation[i]) * step
        rest, step = hlo.divide(rest, window.size[i]), step * window.kernel[i]
    total = None
    for number, offsets in enumerate(itertools.product(*map(range, window.kernel))):
        part = _spread(hlo.select(hlo.compare(tap, number, "EQ"), wide, 0), window, offsets)
        total = part if total is None else total + part
    assert total is not None
    return hlo.convert(total, x.dtype)


def _selected(grad: Value, x: Value, window: Window) -> Value:
    """The same without positions: XLA looks for the maxima again."""
    lead = x.ndim - window.rank
    return hlo.select_and_scatter(
        x, grad, 0, lambda a, b: hlo.not_(hlo.or_(hlo.compare(b, a, "GT"), hlo.compare(b, b, "NE"))), hlo.add,
        window=(*(1,) * lead, *window.kernel), strides=(*(1,) * lead, *window.stride),
        padding=(*((0, 0),) * lead, *window.pads()),
    )  # fmt: skip


def _spread(part: Value, window: Window, offsets: Sequence[int]) -> Value:
    """One value per window placed at ``offsets`` within the window, on zeros of the input's size."""
    lead = [0] * (part.ndim - window.rank)
    low = [t * d - p for t, d, p in zip(offsets, window.dilation, window.padding, strict=True)]
    high = [n - ((o - 1) * s + 1) - lo for n, o, s, lo in zip(window.size, window.out, window.stride, low, strict=True)]
    return hlo.pad(part, 0, [*lead, *low], [*lead, *high], [*lead, *(s - 1 for s in window.stride)])


def _scattered(grad: Value, x: Value, rank: int, at: Value) -> Value:
    wide = hlo.convert(grad, compute_dtype(grad.dtype))
    total = scatter_sum(as_rows(wide, rank), as_rows(at, rank), math.prod(x.shape[-rank:]))
    return hlo.convert(hlo.reshape(total, x.shape), x.dtype)


# ---- mean ----------------------------------------------------------------------------------------------------------
def _divisor(window: Window, shape: Shape, dtype: torch.dtype, include_pad: bool, override: int | None) -> Value:
    """The count that each window's sum is divided by, broadcast to ``shape``."""
    if override:
        return hlo.constant(override, dtype, shape)
    total, lead = hlo.constant(1, dtype, shape), len(shape) - window.rank
    for i, (k, s, p, n, o) in enumerate(
        zip(window.kernel, window.stride, window.padding, window.size, window.out, strict=True)
    ):
        bounds = [(j * s - p, min(j * s - p + k, n + p)) for j in range(o)]
        counts = [b - a if include_pad else min(b, n) - max(a, 0) for a, b in bounds]
        total = total * hlo.broadcast_in_dim(hlo.constant_list(counts, dtype), shape, [lead + i])
    return total


def _avg_window(rank: int, kernel: list[int], stride: list[int], padding: list[int], size: Shape, out: Shape) -> Window:
    return Window.of(rank, kernel, stride, padding, [1], size, out)


def avg_pool(
    rank: int,
    x: Value,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    include_pad: bool,
    override: int | None,
    out: Shape,
) -> Value:
    if 0 in out:
        return hlo.constant(0, x.dtype, out)
    window = _avg_window(rank, kernel, stride, padding, x.shape, out)
    wide = hlo.convert(x, compute_dtype(x.dtype))
    total = window.reduce([wide], [0], lambda a, b: [a[0] + b[0]])[0]
    return hlo.convert(hlo.divide(total, _divisor(window, out, wide.dtype, include_pad, override)), x.dtype)


def avg_pool_backward(grad: Value, x: Value, window: Window, include_pad: bool, override: int | None) -> Value:
    if 0 in grad.shape or 0 in x.shape:
        return hlo.full_like(x, 0)
    wide = hlo.convert(grad, compute_dtype(grad.dtype))
    share = hlo.divide(wide, _divisor(window, grad.shape, wide.dtype, include_pad, override))
    lead = [0] * (x.ndim - window.rank)
    low = [k - 1 - p for k, p in zip(window.kernel, window.padding, strict=True)]
    sizes = zip(window.size, window.kernel, window.out, window.stride, low, strict=True)
    high = [n + k - 1 - ((o - 1) * s + 1) - lo for n, k, o, s, lo in sizes]
    share = hlo.pad(share, 0, [*lead, *low], [*lead, *high], [*lead, *(s - 1 for s in window.stride)])
    ones = [1] * len(lead)
    total = hlo.reduce_window([share], [0], lambda a, b: [a[0] + b[0]], window=[*ones, *window.kernel])[0]
    return hlo.convert(total, x.dtype)


# ---- adaptive ------------------------------------------------------------------------------------------------------
def adaptive_rows(size: int, out: int) -> list[list[int]]:
    """The positions of each of ``out`` windows that cover ``size`` positions as evenly as possible."""
    return [list(range(i * size // out, -(-(i + 1) * size // out))) for i in range(out)]


def _mean_rows(size: int, out: int) -> list[Row]:
    return [[(p, 1 / len(row)) for p in row] for row in adaptive_rows(size, out)]


def adaptive_avg_pool(rank: int, x: Value, out: Shape) -> Value:
    if 0 in out:
        return hlo.constant(0, x.dtype, out)
    y = hlo.convert(x, compute_dtype(x.dtype))
    for dim in range(x.ndim - rank, x.ndim):
        y = resample(y, dim, _mean_rows(x.shape[dim], out[dim]))
    return hlo.convert(y, x.dtype)


def adaptive_avg_pool_backward(rank: int, grad: Value, x: Value) -> Value:
    y = hlo.convert(grad, compute_dtype(grad.dtype))
    for dim in range(x.ndim - rank, x.ndim):
        y = resample(y, dim, transposed(_mean_rows(x.shape[dim], grad.shape[dim]), x.shape[dim]))
    return hlo.convert(y, x.dtype)


def adaptive_max_pool(rank: int, x: Value, out: Shape) -> list[Value]:
    if 0 in out:
        return [hlo.constant(0, x.dtype, out), hlo.constant(0, torch.int64, out)]
    values, at = hlo.convert(x, compute_dtype(x.dtype)), _positions(x.shape, rank)
    fill = lowest(x.dtype)
    for dim in reversed(range(x.ndim - rank, x.ndim)):
        rows = adaptive_rows(x.shape[dim], out[dim])
        pair = [windows(values, dim, rows, fill), windows(at, dim, rows, _LAST_INDEX)]
        values, at = hlo.reduce(pair, [fill, _LAST_INDEX], [dim + 1], _larger)
    return [hlo.convert(values, x.dtype), hlo.convert(at, torch.int64)]


# ---- fractional ----------------------------------------------------------------------------------------------------
def _fractional_starts(sample: Value, size: int, out: int, kernel: int) -> Value:
    """First positions ``[batch, out]`` of the windows (Graham 2014, arXiv:1412.6071), from one number per row."""
    shape = (sample.shape[0], out)
    if out == 1:
        return hlo.constant(size - kernel, torch.int32, shape)
    alpha = hlo.constant((size - kernel) / (out - 1), sample.dtype, shape)
    u = hlo.broadcast_in_dim(sample, shape, [0])
    whole = lambda v: hlo.convert(hlo.floor(v), torch.int32)  # noqa: E731
    starts = whole((hlo.iota(shape, 1, sample.dtype) + u) * alpha) - whole(u * alpha)
    last = hlo.compare(hlo.iota(shape, 1, torch.int32), out - 1, "EQ")
    return hlo.select(last, hlo.constant(size - kernel, torch.int32, shape), starts)


def fractional_max_pool(rank: int, x: Value, kernel: list[int], samples: Value, out: Shape) -> list[Value]:
    """Windows start at run-time positions: every window position is one gather of the flat input."""
    lead, sizes, outs = x.shape[:-rank], x.shape[-rank:], out[-rank:]
    kernel = list(kernel) * rank if len(kernel) == 1 else list(kernel)
    flat, batch = as_rows(x, rank), math.prod(lead)
    if not batch:
        return [hlo.constant(0, x.dtype, out), hlo.constant(0, torch.int64, out)]
    # An input without a batch dimension takes the first of what may be more samples.
    samples = hlo.slice_dim(hlo.reshape(samples, (samples.numel // rank, rank)), 0, 0, batch)
    shape, pair = (batch, *outs), None
    # The last random number belongs to the outermost dimension but for 3-D, whose order is depth, height, width.
    order = range(rank) if rank == 3 else reversed(range(rank))
    columns = [hlo.reshape(hlo.slice_dim(samples, 1, i, i + 1), (batch,)) for i in order]
    starts = [
        hlo.broadcast_in_dim(_fractional_starts(column, n, o, k), shape, [0, i + 1])
        for i, (column, n, o, k) in enumerate(zip(columns, sizes, outs, kernel, strict=True))
    ]
    for offsets in itertools.product(*map(range, kernel)):
        at = hlo.constant(0, torch.int32, shape)
        for start, t, n in zip(starts, offsets, sizes, strict=True):
            at = at * n + start + t
        picked = hlo.gather(
            flat, hlo.reshape(at, (batch, math.prod(outs), 1)), offset_dims=[], collapsed_dims=[1], index_map=[1],
            slice_sizes=[1, 1], operand_batching_dims=[0], indices_batching_dims=[0],
        )  # fmt: skip
        new = [hlo.reshape(picked, shape), at]
        pair = new if pair is None else _larger(pair, new)
    assert pair is not None
    return [hlo.reshape(pair[0], out), hlo.convert(hlo.reshape(pair[1], out), torch.int64)]


# ---- registration --------------------------------------------------------------------------------------------------
def _unpool2d_meta(x: torch.Tensor, at: torch.Tensor, size: list[int]) -> torch.Tensor:
    """As PyTorch's, in the input's memory format."""
    out = torch.ops.aten.max_unpool2d(x, at, size)
    return out.contiguous(memory_format=suggest_memory_format(x)) if x.ndim == 4 else out


def _register(rank: int) -> None:
    """The operators of one spatial rank (PyTorch serves 1-D as 2-D)."""
    nd = f"{rank}d"

    @lower(f"max_pool{nd}_with_indices")
    def forward(x, kernel, stride, padding, dilation, ceil_mode, *, result):
        return max_pool(rank, x, kernel, stride, padding, dilation, result[0].shape)

    @lower(f"max_pool{nd}_with_indices_backward")
    def backward(grad, x, kernel, stride, padding, dilation, ceil_mode, at):
        return max_pool_backward(grad, x, Window.of(rank, kernel, stride, padding, dilation, x.shape, grad.shape), at)

    @lower(f"avg_pool{nd}")
    def mean(x, kernel, stride, padding, ceil_mode, include_pad, override, *, result):
        return avg_pool(rank, x, kernel, stride, padding, include_pad, override, result[0].shape)

    @lower(f"avg_pool{nd}_backward")
    def mean_backward(grad, x, kernel, stride, padding, ceil_mode, include_pad, override):
        return avg_pool_backward(
            grad, x, _avg_window(rank, kernel, stride, padding, x.shape, grad.shape), include_pad, override
        )

    @lower(f"_adaptive_avg_pool{nd}")
    def adaptive_mean(x, size, *, result):
        return adaptive_avg_pool(rank, x, result[0].shape)

    @lower(f"_adaptive_avg_pool{nd}_backward")
    def adaptive_mean_backward(grad, x):
        return adaptive_avg_pool_backward(rank, grad, x)

    @lower(f"adaptive_max_pool{nd}")
    def adaptive_max(x, size, *, result):
        return adaptive_max_pool(rank, x, result[0].shape)

    @lower(f"adaptive_max_pool{nd}_backward")
    def adaptive_max_backward(grad, x, at):
        return _scattered(grad, x, rank, at)

    @lower(f"fractional_max_pool{nd}")
    def fractional(x, kernel, size, samples, *, result):
        return fractional_max_pool(rank, x, kernel, samples, result[0].shape)

    @lower(f"fractional_max_pool{nd}_backward")
    def fractional_backward(grad, x, kernel, size, at):
        return _scattered(grad, x, rank, at)

    @lower(f"max_unpool{nd}", meta=_unpool2d_meta if rank == 2 else None)
    def unpool(x: Value, at: Value, size: list[int], *geometry: Any, result: list[Type]) -> Value:
        return _placed(x, at, rank, result[0].shape)


def _placed(x: Value, at: Value, rank: int, out: Shape) -> Value:
    """``max_unpool``: values at the positions that they were taken from, zeros elsewhere; equal positions keep one."""
    flat, at = as_rows(x, rank), as_rows(at, rank)
    batch, n = flat.shape
    size = math.prod(out[-rank:])
    if 0 in (batch, n, size):
        return hlo.constant(0, x.dtype, out)
    tracer().check(hlo.or_(at < 0, at >= size), "Found an invalid max index")
    rows = hlo.convert(at, torch.int32)
    blank = hlo.constant(0, x.dtype, (batch, size))
    y = hlo.scatter(
        blank, hlo.reshape(rows, (batch, n, 1)), flat, update_window_dims=[], inserted_dims=[1], index_map=[1],
        input_batching_dims=[0], indices_batching_dims=[0],
    )  # fmt: skip
    return hlo.reshape(y, out)


for _rank in (2, 3):
    _register(_rank)
