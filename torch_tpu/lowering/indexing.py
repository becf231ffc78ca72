"""Reading by position, and what every indexed family shares: checked positions, positions of true elements."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torch_tpu.lowering.common import tracer
from torch_tpu.lowering.registry import lower
from torch_tpu.lowering.scan import scan
from torch_tpu.lowering.view import contiguous_strides, index_dtype
from torch_tpu.stablehlo import Shape, Type, Value
from torch_tpu.stablehlo import ops as hlo

# ---- positions ------------------------------------------------------------------------------------------------------
Error = type[Exception] | None


def checked(index: Value, size: int, *, wrap: bool = False, drop: bool = False, error: Error = IndexError) -> Value:
    """The positions that ``index`` names in a dimension of ``size``, as int32 where that reaches.

    Entries outside ``[0, size)`` (``[-size, size)`` with ``wrap``) raise ``error``, the CPU's exception for the
    operator at hand, at the next synchronisation. They are clamped into range, or with ``drop`` moved to -1
    and ``size``, which a StableHLO scatter leaves out.
    """
    low, beyond = -size if wrap else 0, int(drop)
    if error is not None and index.numel:
        tracer().check(hlo.or_(index < low, index >= size), "index out of range", error)
    index = hlo.clamp(low - beyond, index, max(size - 1, low) + beyond)
    index = hlo.convert(index, index_dtype(size))
    return hlo.select(index < 0, index + size, index) if wrap else index


def at_least_1d(x: Value) -> Value:
    return x if x.ndim else hlo.reshape(x, (1,))


def prefix_sum(x: Value) -> Value:
    """Inclusive sums of a one-dimensional value, in its dtype."""
    return scan(x, 0, 0, hlo.add)


def true_positions(mask: Value) -> Value:
    """Row-major positions of the true elements in rising order, then ``numel`` in every place that is left.

    One sort of one integer array: on a TPU, sorting is fast and scattering is not.
    """
    n = mask.numel
    dtype = index_dtype(n)
    key = hlo.select(hlo.reshape(mask, (n,)), hlo.iota((n,), 0, dtype), hlo.constant(n, dtype, (n,)))
    return hlo.sort([key], 0, lambda a, b: a[0] < b[0], stable=False)[0] if n else key


def count_true(mask: Value, dtype: torch.dtype | None = None) -> Value:
    """How many elements are true, 0-d."""
    ones = hlo.convert(mask, dtype or index_dtype(mask.numel))
    return hlo.reduce_one(ones, 0, range(mask.ndim), hlo.add)


def coordinates(position: Value, shape: Shape) -> list[Value]:
    """The coordinates of row-major positions in an array of ``shape``, one value per dimension.

    A position past the end has a first coordinate past the end.
    """
    out = []
    for stride in contiguous_strides(shape):
        out.append(hlo.divide(position, stride) if stride != 1 else position)
        position = hlo.remainder(position, stride)
    return out


def as_mask(index: Value) -> Value:
    """``index`` as bool if it is a mask (uint8 is one, as ever in PyTorch), else unchanged."""
    return hlo.convert(index, torch.bool) if index.dtype == torch.uint8 else index


# ---- gathers --------------------------------------------------------------------------------------------------------
def index_vectors(indices: Sequence[Value]) -> Value:
    """Indices of one shape stacked along a new last dimension."""
    dtype = torch.int64 if any(i.dtype == torch.int64 for i in indices) else torch.int32
    return hlo.concatenate([hlo.expand_dims(hlo.convert(i, dtype), [i.ndim]) for i in indices], indices[0].ndim)


def read_at(x: Value, dims: Sequence[int], indices: Sequence[Value], at: int) -> Value:
    """``x`` at positions ``indices`` of ``dims``, all of one shape, which stands at dimension ``at`` of the result."""
    shape, rest = indices[0].shape, [n for i, n in enumerate(x.shape) if i not in dims]
    result = (*rest[:at], *shape, *rest[at:])
    if 0 in (*result, *x.shape):
        return hlo.constant(0, x.dtype, result)
    return hlo.gather(
        x,
        index_vectors(indices),
        offset_dims=[i for i in range(len(result)) if not at <= i < at + len(shape)],
        collapsed_dims=dims,
        index_map=dims,
        slice_sizes=[1 if i in dims else n for i, n in enumerate(x.shape)],
    )


def read_along(x: Value, dim: int, position: Value) -> Value:
    """``out[..., i, ...] = x[..., position[..., i, ...], ...]`` with the other coordinates unchanged."""
    if 0 in (*position.shape, *x.shape):
        return hlo.constant(0, x.dtype, position.shape)
    others = [i for i in range(x.ndim) if i != dim]
    x = hlo.slice_(x, [0] * x.ndim, [n if i == dim else position.shape[i] for i, n in enumerate(x.shape)])
    return hlo.gather(
        x,
        hlo.expand_dims(position, [position.ndim]),
        offset_dims=[],
        collapsed_dims=[dim],
        index_map=[dim],
        slice_sizes=[1] * x.ndim,
        operand_batching_dims=others,
        indices_batching_dims=others,
    )


# ---- rules ----------------------------------------------------------------------------------------------------------
def indexed_place(dims: Sequence[int]) -> int:
    """Where the broadcast index shape stands in ``x[indices]``: in place if ``dims`` adjoin, else in front."""
    return dims[0] if dims and dims[-1] - dims[0] == len(dims) - 1 else 0


def _index(x: Value, indices: list[Value | None], error: Error) -> Value:
    present = [(i, index) for i, index in enumerate(indices) if index is not None]
    if not present:
        return x
    dims = [i for i, _ in present]
    given = [checked(index, x.shape[i], wrap=True, error=error) for i, index in present]
    shape = hlo.broadcast_shapes(*(i.shape for i in given))
    return read_at(x, dims, [hlo.broadcast_to(i, shape) for i in given], indexed_place(dims))


@lower("index.Tensor")
def index(x: Value, indices: list[Value | None]) -> Value:
    """NumPy's advanced indexing with integer indices. The eager kernel turns masks into positions."""
    return _index(x, indices, IndexError)


@lower("_unsafe_index.Tensor")
def unsafe_index(x: Value, indices: list[Value | None]) -> Value:
    return _index(x, indices, None)


@lower("index_select")
def index_select(x: Value, dim: int, index: Value) -> Value:
    flat = at_least_1d(x)
    dim %= flat.ndim
    picked = read_at(flat, [dim], [checked(at_least_1d(index), flat.shape[dim])], dim)
    return picked if x.ndim else hlo.reshape(picked, ())


@lower("gather")
def gather(x: Value, dim: int, index: Value) -> Value:
    flat, positions = at_least_1d(x), at_least_1d(index)
    dim %= flat.ndim
    return hlo.reshape(read_along(flat, dim, checked(positions, flat.shape[dim], error=RuntimeError)), index.shape)


@lower("take")
def take(x: Value, index: Value) -> Value:
    flat = hlo.reshape(x, (x.numel,))
    return read_at(flat, [0], [checked(index, x.numel, wrap=True)], 0)


@lower("nonzero_static")
def nonzero_static(x: Value, *, size: int, fill_value: int = -1) -> Value:
    found = true_positions(hlo.convert(x, torch.bool))
    found = hlo.pad(found, x.numel, [0], [size - x.numel])
    columns = [hlo.select(found < x.numel, c, fill_value) for c in map(_as_int64, coordinates(found, x.shape))]
    return hlo.transpose(_rows(columns, size), [1, 0])


def _as_int64(x: Value) -> Value:
    return hlo.convert(x, torch.int64)


def _rows(columns: Sequence[Value], length: int) -> Value:
    if not columns:
        return hlo.constant(0, torch.int64, (0, length))
    return hlo.concatenate([hlo.reshape(c, (1, length)) for c in columns], 0)


@lower("repeat_interleave.Tensor", "tpu::repeat_interleave")
def repeat_interleave(repeats: Value, *, output_size: int, result: list[Type]) -> Value:
    """Index ``i`` repeated ``repeats[i]`` times: entry ``k`` counts the runs that end at or before ``k``."""
    return hlo.convert(run_of(repeats, output_size), result[0].dtype)


def run_of(lengths: Value, size: int) -> Value:
    """For every ``k < size`` the run that it falls in, when runs of ``lengths`` stand one after the other."""
    if lengths.numel == 0 or size == 0:
        return hlo.constant(0, torch.int32, (size,))
    ends = prefix_sum(lengths)
    ends = hlo.convert(hlo.clamp(0, ends, size) if lengths.dtype == torch.int64 else ends, index_dtype(size))
    starts_after = hlo.scatter(
        hlo.constant(0, torch.int32, (size,)),
        hlo.expand_dims(ends, [1]),
        hlo.constant(1, torch.int32, ends.shape),
        hlo.add,
        update_window_dims=[],
        inserted_dims=[0],
        index_map=[0],
        sorted_indices=True,
    )
    return prefix_sum(starts_after)
