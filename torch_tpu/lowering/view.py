"""Strided views of a base array, read and written inside a program.

A storage holds one row-major *base* array. A tensor is a window on it: sizes, strides and an offset, in elements of its
dtype. :func:`read_view` rebuilds the window from the base, :func:`write_view` computes the base after a write through
it. The offset may be a run-time value, so that ``x[0]``, ``x[1]``, ... are one program.

Most windows follow a *chain*: after dropping broadcast dimensions and sorting by falling stride, what lies inside one
step of a dimension stays inside that step. Such a window is found by cutting the base into rows as long as the largest
stride, taking some of them, and doing the same within each row; slices, steps, selections, transposes and diagonals are
all of this kind. Where rows cut at the offset's phase would break the window, the elements that it reaches over are
taken first. What is left (overlapping windows) is a gather.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torch_tpu.stablehlo import Value
from torch_tpu.stablehlo import ops as hlo

Offset = int | Value


@dataclass(frozen=True)
class Chain:
    """A window whose dimensions lie inside one another.

    Attributes:
        order: The window's dimensions by falling stride, without broadcast dimensions and sizes of one.
        sizes: Their sizes; a window of one element has the one dimension of size 1, stride 1.
        strides: Their strides.
        reaches: Elements from the first to one past the last of each dimension with all those inside it.
    """

    order: tuple[int, ...]
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    reaches: tuple[int, ...]

    def fits(self, offset: int) -> bool:
        """True if, starting at ``offset``, what lies inside one step of a dimension does not run into the next step."""
        for stride, reach in zip(self.strides, self.reaches[1:], strict=False):
            offset %= stride
            if offset + reach > stride:
                return False
        return True


def contiguous_strides(sizes: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(sizes):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def memory_order(sizes: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """Dimensions by falling stride, without broadcast dimensions and sizes of one."""
    kept = [i for i, (n, t) in enumerate(zip(sizes, strides, strict=True)) if n != 1 and t != 0]
    return tuple(sorted(kept, key=lambda i: (-strides[i], i)))


def is_compact(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """True if the window, broadcast dimensions aside, covers one gap-free block exactly once."""
    expected = 1
    for i in reversed(memory_order(sizes, strides)):
        if strides[i] != expected:
            return False
        expected *= sizes[i]
    return True


def is_dense(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """True if the window is compact and has no broadcast dimension."""
    return is_compact(sizes, strides) and all(t != 0 or n == 1 for n, t in zip(sizes, strides, strict=True))


def span(sizes: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first to one past the last; 0 for an empty window."""
    if 0 in sizes:
        return 0
    return 1 + sum((n - 1) * t for n, t in zip(sizes, strides, strict=True))


def chain_of(sizes: Sequence[int], strides: Sequence[int]) -> Chain | None:
    """The chain of a window, or None where there is none at any offset."""
    order = memory_order(sizes, strides)
    kept = [(sizes[i], strides[i]) for i in order] or [(1, 1)]
    reaches = [1 + sum((n - 1) * t for n, t in kept[i:]) for i in range(len(kept))]
    if any(reach > t for (_, t), reach in zip(kept, reaches[1:], strict=False)):
        return None
    return Chain(order, tuple(n for n, _ in kept), tuple(t for _, t in kept), tuple(reaches))


def natural_base(sizes: Sequence[int], strides: Sequence[int], count: int) -> tuple[int, ...] | None:
    """The shape of the base of a storage of ``count`` elements that a dense window covers; None if it does not."""
    if math.prod(sizes) != count or not is_dense(sizes, strides):
        return None
    return (
        tuple(sizes)
        if contiguous_strides(sizes) == tuple(strides)
        else tuple(sizes[i] for i in memory_order(sizes, strides))
    )


def _flat(base: Value) -> Value:
    return hlo.reshape(base, (base.numel,))


def _levels(chain: Chain, base: Value) -> list[tuple[int, int]]:
    """(size, stride) of every cut. Columns of the base's own rows are taken as such, other steps by strided slices.

    Dimensions that lie in memory as one are cut as one, unless the base has those rows itself: a TPU would have to lay
    it out anew, and a flat base seen in rows is not updated in place by XLA's CPU backend.
    """
    own = contiguous_strides(base.shape)
    levels: list[tuple[int, int]] = []
    for n, stride in zip(chain.sizes, chain.strides, strict=True):
        if levels and levels[-1][1] == n * stride and levels[-1][1] not in own:
            levels[-1] = (levels[-1][0] * n, stride)
        else:
            levels.append((n, stride))
    innermost = chain.strides[-1]
    return [*levels, (1, 1)] if innermost > 1 and innermost in own else levels


def _rows(x: Value, lead: Sequence[int], length: int) -> Value:
    """``x``, seen as ``[*lead, n]``, cut into rows of ``length``, the last one padded: ``[*lead, rows, length]``."""
    lead, n = tuple(lead), x.numel // math.prod(lead)
    if n % length:
        x = hlo.pad(hlo.reshape(x, (*lead, n)), 0, [0] * (len(lead) + 1), [*[0] * len(lead), -n % length])
    return hlo.reshape(x, (*lead, -(-n // length), length))


def _split(offset: Offset, stride: int) -> tuple[Offset, Offset]:
    """Quotient and remainder."""
    if isinstance(offset, int):
        return divmod(offset, stride)
    return hlo.divide(offset, stride), hlo.remainder(offset, stride)


def _take(x: Value, dim: int, start: Offset, count: int) -> Value:
    if count == x.shape[dim]:
        return x
    if isinstance(start, int):
        return hlo.slice_dim(x, dim, start, start + count)
    sizes = [count if i == dim else n for i, n in enumerate(x.shape)]
    return hlo.dynamic_slice(x, _starts(x.ndim, dim, start), sizes)


def _put(x: Value, dim: int, start: Offset, update: Value) -> Value:
    if update.shape == x.shape:
        return update
    if isinstance(start, int):
        start = hlo.constant(start, index_dtype(x.shape[dim]))
    return hlo.dynamic_update_slice(x, update, _starts(x.ndim, dim, start))


def _starts(rank: int, dim: int, start: Value) -> list[Value]:
    zero = hlo.constant(0, start.dtype)
    return [start if i == dim else zero for i in range(rank)]


def _read_chain(x: Value, levels: list[tuple[int, int]], offset: Offset) -> Value:
    """The window in memory order, shape: the sizes of ``levels``."""
    for i, (n, stride) in enumerate(levels[:-1]):
        row, offset = _split(offset, stride)
        x = _take(_rows(x, x.shape[:i] if i else (), stride), i, row, n)
    lead, (n, stride) = len(levels) - 1, levels[-1]
    x = _take(x if lead else _flat(x), lead, offset, (n - 1) * stride + 1)
    return hlo.slice_dim(x, lead, 0, x.shape[lead], stride)


def _write_chain(x: Value, levels: list[tuple[int, int]], offset: Offset, update: Value, depth: int = 0) -> Value:
    """``x`` after the window of ``levels[depth:]`` in each of its last-dimension arrays became ``update``."""
    n, stride = levels[depth]
    if depth == len(levels) - 1:
        if stride > 1:
            update = _spread(update, stride, _take(x, depth, offset, (n - 1) * stride + 1))
        return _put(x, depth, offset, update)
    lead, length = x.shape[:depth], x.shape[depth]
    rows = _rows(x, lead, stride)
    row, inside = _split(offset, stride)
    written = _write_chain(_take(rows, depth, row, n), levels, inside, update, depth + 1)
    rows = _put(rows, depth, row, written)
    return hlo.slice_dim(hlo.reshape(rows, (*lead, rows.shape[depth] * stride)), depth, 0, length)


def _spread(update: Value, stride: int, old: Value) -> Value:
    """``old`` with every ``stride``-th entry of its last dimension replaced."""
    apart = [*[0] * (update.ndim - 1), stride - 1]
    none = [0] * update.ndim
    new = hlo.pad(update, 0, none, none, apart)
    here = hlo.pad(hlo.constant(True, torch.bool, update.shape), False, none, none, apart)
    return hlo.select(here, new, old)


def _flat_indices(sizes: Sequence[int], strides: Sequence[int], offset: Offset, dtype: torch.dtype) -> Value:
    """The base position of every element of the window, shape ``sizes``."""
    total = (
        hlo.constant(offset, dtype, tuple(sizes))
        if isinstance(offset, int)
        else hlo.broadcast_in_dim(hlo.convert(offset, dtype), sizes, ())
    )
    for i, t in enumerate(strides):
        if t and sizes[i] > 1:
            total = total + hlo.iota(tuple(sizes), i, dtype) * t
    return total


def index_dtype(numel: int) -> torch.dtype:
    """int32 where it can address ``numel`` elements: a TPU has no 64-bit integers in hardware."""
    return torch.int32 if numel < 2**31 else torch.int64


def as_dtype(base: Value, dtype: torch.dtype) -> Value:
    """The bytes of a row-major array as another dtype; the last dimension grows or shrinks (``Tensor.view(dtype)``)."""
    if base.dtype == dtype:
        return base
    if torch.bool in (base.dtype, dtype):
        return (
            as_dtype(hlo.convert(base, torch.uint8), dtype)
            if base.dtype == torch.bool
            else hlo.convert(as_dtype(base, torch.uint8), torch.bool)
        )
    if base.dtype.is_complex:
        parts = [hlo.expand_dims(p, [base.ndim]) for p in (hlo.real(base), hlo.imag(base))]
        pairs = hlo.concatenate(parts, base.ndim)
        return as_dtype(hlo.reshape(pairs, (*base.shape[:-1], base.shape[-1] * 2) if base.ndim else (2,)), dtype)
    if dtype.is_complex:
        pairs = as_dtype(base, torch.float32 if dtype == torch.complex64 else torch.float64)
        if not pairs.ndim or pairs.shape[-1] % 2:
            pairs = hlo.pad(_flat(pairs), 0, [0], [pairs.numel % 2])
        pairs = hlo.reshape(pairs, (*pairs.shape[:-1], pairs.shape[-1] // 2, 2))
        re, im = (hlo.squeeze(hlo.slice_dim(pairs, pairs.ndim - 1, i, i + 1), [-1]) for i in range(2))
        return hlo.complex_(re, im)
    a, b = base.dtype.itemsize, dtype.itemsize
    if a == b:
        return hlo.bitcast_convert(base, dtype)
    if base.ndim == 0:
        base = hlo.reshape(base, (1,))
    if a > b:
        wide = hlo.bitcast_convert(base, dtype)
        return hlo.reshape(wide, (*base.shape[:-1], base.shape[-1] * (a // b)))
    ratio = b // a
    if base.shape[-1] % ratio:
        base = _flat(base)
        base = hlo.pad(base, 0, [0], [-base.numel % ratio])
    return hlo.bitcast_convert(hlo.reshape(base, (*base.shape[:-1], base.shape[-1] // ratio, ratio)), dtype)


def read_view(
    base: Value,
    sizes: Sequence[int],
    strides: Sequence[int],
    offset: Offset,
    dtype: torch.dtype,
    fits: bool | None = None,
) -> Value:
    """The window as a row-major value of shape ``sizes``.

    Args:
        base: The base array, any shape; its row-major order is the memory order.
        sizes: The window's shape.
        strides: Its strides in elements of ``dtype``.
        offset: Its first element. A run-time offset is a 0-d integer value.
        dtype: The element type to see the memory as.
        fits: For a run-time offset, :meth:`Chain.fits` of its value; False is always right.
    """
    sizes, strides = tuple(sizes), tuple(strides)
    if 0 in sizes:
        return hlo.constant(0, dtype, sizes)
    base = as_dtype(base, dtype)
    if isinstance(offset, int) and offset == 0 and sizes == base.shape and strides == contiguous_strides(sizes):
        return base
    chain = chain_of(sizes, strides)
    if chain is not None:
        if not (chain.fits(offset) if isinstance(offset, int) else fits):
            base, offset = _take(_flat(base), 0, offset, chain.reaches[0]), 0
        return _expand(_read_chain(base, _levels(chain, base), offset), sizes, chain.order)
    flat = _flat(base)
    reads = [1 if t == 0 else n for n, t in zip(sizes, strides, strict=True)]
    indices = _flat_indices(reads, strides, offset, index_dtype(flat.numel))
    picked = hlo.gather(
        flat, hlo.reshape(indices, (*reads, 1)), offset_dims=[], collapsed_dims=[0], index_map=[0], slice_sizes=[1]
    )
    return hlo.broadcast_in_dim(picked, sizes, range(len(sizes)))


def _expand(x: Value, sizes: tuple[int, ...], order: tuple[int, ...]) -> Value:
    """From memory order to the window's order, with its sizes of one and broadcast dimensions."""
    x = hlo.reshape(x, [sizes[i] for i in order])
    ascending = sorted(order)
    x = hlo.transpose(x, [order.index(i) for i in ascending])
    if all(sizes[i] == 1 for i in range(len(sizes)) if i not in order):
        return hlo.reshape(x, sizes)
    return hlo.broadcast_in_dim(x, sizes, ascending)


def to_memory_order(value: Value, sizes: Sequence[int], strides: Sequence[int]) -> Value:
    """A value of shape ``sizes`` as the row-major array that a dense window with ``strides`` has in memory.

    Broadcast dimensions are reduced to their first entry; sizes of one are kept where strides leave their place free.
    """
    if 0 in sizes and 0 in strides:
        return hlo.reshape(value, (0,))
    value = hlo.slice_(value, [0] * value.ndim, [1 if t == 0 else n for n, t in zip(sizes, strides, strict=True)])
    if tuple(strides) == contiguous_strides(value.shape):
        return value
    order = memory_order(sizes, strides)
    rest = [i for i in range(len(sizes)) if i not in order]
    return hlo.reshape(hlo.transpose(value, [*order, *rest]), [value.shape[i] for i in order])


def write_view(
    base: Value, sizes: Sequence[int], strides: Sequence[int], offset: Offset, value: Value, fits: bool | None = None
) -> Value:
    """The base after ``window = value``; arguments as in :func:`read_view`. Keeps the base's shape and dtype."""
    sizes, strides = tuple(sizes), tuple(strides)
    if 0 in sizes:
        return base
    if base.dtype != value.dtype:
        typed = as_dtype(base, value.dtype)
        written = as_dtype(write_view(typed, sizes, strides, offset, value, fits), base.dtype)
        flat = _flat(written)
        return hlo.reshape(hlo.slice_dim(flat, 0, 0, base.numel), base.shape)
    chain = chain_of(sizes, strides)
    flat = _flat(base)
    if chain is not None:
        levels = _levels(chain, base)
        update = hlo.reshape(to_memory_order(value, sizes, strides), [n for n, _ in levels])
        if chain.fits(offset) if isinstance(offset, int) else fits:
            return hlo.reshape(_write_chain(flat, levels, offset, update), base.shape)
        reached = _write_chain(_take(flat, 0, offset, chain.reaches[0]), levels, 0, update)
        return hlo.reshape(_put(flat, 0, offset, reached), base.shape)
    writes = [1 if t == 0 else n for n, t in zip(sizes, strides, strict=True)]
    value = hlo.slice_(value, [0] * value.ndim, writes)
    indices = _flat_indices(writes, strides, offset, index_dtype(flat.numel))
    flat = hlo.scatter(
        flat,
        hlo.reshape(indices, (math.prod(writes), 1)),
        hlo.reshape(value, (math.prod(writes),)),
        update_window_dims=[],
        inserted_dims=[0],
        index_map=[0],
    )
    return hlo.reshape(flat, base.shape)
