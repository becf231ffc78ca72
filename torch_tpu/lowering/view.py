"""Strided views of a base array, read and written inside a program.

A storage holds one row-major *base* array. A tensor is a window on it: sizes, strides and an offset, in elements of its
dtype. :func:`read_view` rebuilds the window from the base, :func:`write_view` computes the base after a write through it.
The offset may be a run-time value, so that ``x[0]``, ``x[1]``, ... are one program.

Most windows follow a *chain*: after dropping broadcast dimensions and sorting by stride, each stride divides the one before
it and no dimension reaches into the next. Such a window is a slice of the base reshaped to the chain's dimensions; slices,
selections, steps, transposes and diagonals are all of this kind. What is left (overlapping windows) is a gather.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torch_tpu.stablehlo import Value, ops as hlo

Offset = int | Value


@dataclass(frozen=True)
class Chain:
    """A window as a slice of the base reshaped to ``dims``; ``order`` lists the window's dimensions by falling stride."""

    order: tuple[int, ...]
    dims: tuple[int, ...]
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    padded: int  # elements of the base after padding up to a whole number of the largest stride

    def coordinates(self, offset: int) -> tuple[int, ...]:
        out = []
        for stride in self.strides:
            out.append(offset // stride)
            offset %= stride
        return (*out, offset) if self.strides and self.strides[-1] > 1 else tuple(out)

    def fits(self, offset: int) -> bool:
        """True if the slice at ``offset`` stays inside ``dims``."""
        return all(c + s <= d for c, s, d in zip(self.coordinates(offset), self.sizes, self.dims, strict=True))


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


def chain_of(numel: int, sizes: Sequence[int], strides: Sequence[int]) -> Chain | None:
    """The chain of a window on a base of ``numel`` elements, or None where there is none."""
    order = memory_order(sizes, strides)
    kept = [(sizes[i], strides[i]) for i in order]
    if not kept:
        kept = [(1, 1)]
    dims = []
    for (_, t), (n_next, t_next) in zip(kept, kept[1:], strict=False):
        if t % t_next or n_next * t_next > t:
            return None
        dims.append(t // t_next)
    first, last = kept[0][1], kept[-1][1]
    padded = -(-numel // first) * first
    dims = [padded // first, *dims] + ([last] if last > 1 else [])
    extent = [n for n, _ in kept] + ([1] if last > 1 else [])
    return Chain(order, tuple(dims), tuple(extent), tuple(t for _, t in kept), padded)


def _run_time_coordinates(chain: Chain, offset: Value) -> list[Value]:
    out = []
    for stride in chain.strides:
        out.append(hlo.divide(offset, stride) if stride != 1 else offset)
        offset = hlo.remainder(offset, stride)
    return [*out, offset] if chain.strides[-1] > 1 else out


def _flat(base: Value) -> Value:
    return hlo.reshape(base, (base.numel,))


def _chained_base(base: Value, chain: Chain) -> Value:
    if chain.padded != base.numel:
        base = hlo.pad(_flat(base), 0, [0], [chain.padded - base.numel])
    return hlo.reshape(base, chain.dims)


def _flat_indices(sizes: Sequence[int], strides: Sequence[int], offset: Offset, dtype: torch.dtype) -> Value:
    """The base position of every element of the window, shape ``sizes``."""
    total = hlo.constant(offset, dtype, tuple(sizes)) if isinstance(offset, int) else hlo.broadcast_in_dim(
        hlo.convert(offset, dtype), sizes, ()
    )
    for i, t in enumerate(strides):
        if t and sizes[i] > 1:
            total = total + hlo.iota(tuple(sizes), i, dtype) * t
    return total


def index_dtype(numel: int) -> torch.dtype:
    """int32 where it can address ``numel`` elements: a TPU has no 64-bit integers in hardware."""
    return torch.int32 if numel < 2**31 else torch.int64


def as_dtype(base: Value, dtype: torch.dtype) -> Value:
    """The bytes of a row-major array as another dtype, the last dimension growing or shrinking (``Tensor.view(dtype)``)."""
    if base.dtype == dtype:
        return base
    if torch.bool in (base.dtype, dtype):
        return as_dtype(hlo.convert(base, torch.uint8), dtype) if base.dtype == torch.bool else hlo.convert(
            as_dtype(base, torch.uint8), torch.bool
        )
    if base.dtype.is_complex:
        parts = [hlo.expand_dims(p, [base.ndim]) for p in (hlo.real(base), hlo.imag(base))]
        pairs = hlo.concatenate(parts, base.ndim)
        return as_dtype(hlo.reshape(pairs, (*base.shape[:-1], base.shape[-1] * 2) if base.ndim else (2,)), dtype)
    if dtype.is_complex:
        pairs = as_dtype(base, torch.float32 if dtype == torch.complex64 else torch.float64)
        pairs = hlo.reshape(pairs, (*pairs.shape[:-1], -(-pairs.shape[-1] // 2), 2))
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
    base: Value, sizes: Sequence[int], strides: Sequence[int], offset: Offset, dtype: torch.dtype, fits: bool | None = None
) -> Value:
    """The window as a row-major value of shape ``sizes``.

    Args:
        base: The base array, any shape; its row-major order is the memory order.
        sizes, strides, offset: The window in elements of ``dtype``. A run-time ``offset`` is a 0-d integer value.
        fits: For a run-time offset, whether the chain's slice stays inside its dimensions at that offset.
    """
    sizes, strides = tuple(sizes), tuple(strides)
    if 0 in sizes:
        return hlo.constant(0, dtype, sizes)
    base = as_dtype(base, dtype)
    if isinstance(offset, int) and offset == 0 and sizes == base.shape and strides == contiguous_strides(sizes):
        return base
    chain = chain_of(base.numel, sizes, strides)
    if chain is not None and (chain.fits(offset) if isinstance(offset, int) else fits):
        x = _chained_base(base, chain)
        if isinstance(offset, int):
            starts = chain.coordinates(offset)
            x = hlo.slice_(x, starts, [a + n for a, n in zip(starts, chain.sizes, strict=True)])
        elif x.shape != chain.sizes:
            x = hlo.dynamic_slice(x, _run_time_coordinates(chain, offset), chain.sizes)
        return _expand(x, sizes, chain.order)
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
    chain = chain_of(base.numel, sizes, strides)
    if chain is not None and (chain.fits(offset) if isinstance(offset, int) else fits):
        update = hlo.reshape(to_memory_order(value, sizes, strides), chain.sizes)
        x = _chained_base(base, chain)
        if x.shape == update.shape:
            x = update
        else:
            itype = index_dtype(chain.padded)
            starts = (
                [hlo.constant(c, itype) for c in chain.coordinates(offset)]
                if isinstance(offset, int)
                else _run_time_coordinates(chain, offset)
            )
            x = hlo.dynamic_update_slice(x, update, starts)
        return hlo.reshape(hlo.slice_dim(hlo.reshape(x, (chain.padded,)), 0, 0, base.numel), base.shape)
    flat = _flat(base)
    writes = [1 if t == 0 else n for n, t in zip(sizes, strides, strict=True)]
    value = hlo.slice_(value, [0] * value.ndim, writes)
    indices = _flat_indices(writes, strides, offset, index_dtype(flat.numel))
    flat = hlo.scatter(
        flat, hlo.reshape(indices, (math.prod(writes), 1)), hlo.reshape(value, (math.prod(writes),)),
        update_window_dims=[], inserted_dims=[0], index_map=[0],
    )
    return hlo.reshape(flat, base.shape)
