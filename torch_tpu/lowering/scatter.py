"""Writing by position: index_put, index_add, scatter and their relatives."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from torch_tpu.lowering.common import Number, Scalar, as_value, compute_dtype, highest, lowest, tracer
from torch_tpu.lowering.indexing import (
    Error,
    as_mask,
    at_least_1d,
    checked,
    coordinates,
    count_true,
    index_vectors,
    indexed_place,
    prefix_sum,
    read_at,
    true_positions,
)
from torch_tpu.lowering.registry import lower
from torch_tpu.lowering.view import index_dtype
from torch_tpu.stablehlo import Value
from torch_tpu.stablehlo import ops as hlo

Combine = Callable[[Value, Value], Value]
#: ``place(base, updates, combine)`` is ``base`` after ``updates`` were combined into the positions that it stands for.
Place = Callable[[Value, Value, Combine | None], Value]


# ---- three shapes of scatter ----------------------------------------------------------------------------------------
def place_at(dims: Sequence[int], indices: Sequence[Value], at: int) -> Place:
    """Positions ``indices`` of ``dims``; updates are laid out as :func:`indexing.read_at` lays out its result."""
    rank = indices[0].ndim

    def place(base: Value, updates: Value, combine: Combine | None) -> Value:
        if 0 in (*updates.shape, *base.shape):
            return base
        return hlo.scatter(
            base,
            index_vectors(indices),
            updates,
            combine,
            update_window_dims=[i for i in range(updates.ndim) if not at <= i < at + rank],
            inserted_dims=dims,
            index_map=dims,
        )

    return place


def place_along(dim: int, position: Value) -> Place:
    """``base[..., position[..., i, ...], ...]`` takes ``updates[..., i, ...]``; other coordinates are unchanged."""

    def place(base: Value, updates: Value, combine: Combine | None) -> Value:
        if 0 in (*position.shape, *base.shape):
            return base
        others = [i for i in range(base.ndim) if i != dim]
        corner = hlo.slice_(
            base, [0] * base.ndim, [n if i == dim else position.shape[i] for i, n in enumerate(base.shape)]
        )
        written = hlo.scatter(
            corner,
            hlo.expand_dims(position, [position.ndim]),
            hlo.slice_(updates, [0] * updates.ndim, position.shape),
            combine,
            update_window_dims=[],
            inserted_dims=[dim],
            index_map=[dim],
            input_batching_dims=others,
            indices_batching_dims=others,
        )
        if written.shape == base.shape:
            return written
        return hlo.dynamic_update_slice(base, written, [hlo.constant(0, torch.int32)] * base.ndim)

    return place


def widened(place: Place) -> Place:
    """``place`` with half types combined in float32 and rounded once."""

    def wide(base: Value, updates: Value, combine: Combine | None) -> Value:
        if combine is None:
            return place(base, updates, None)
        dtype = compute_dtype(base.dtype)
        return hlo.convert(place(hlo.convert(base, dtype), hlo.convert(updates, dtype), combine), base.dtype)

    return wide


# ---- reductions -----------------------------------------------------------------------------------------------------
_REDUCTIONS: dict[str, tuple[Combine, Callable[[torch.dtype], Number]]] = {
    "sum": (hlo.add, lambda _: 0),
    "mean": (hlo.add, lambda _: 0),
    "prod": (hlo.multiply, lambda _: 1),
    "amax": (hlo.maximum, lowest),
    "amin": (hlo.minimum, highest),
}


def _mean(total: Value, count: Value) -> Value:
    """``total / count``, rounded down for integers; a zero count counts as one."""
    count = hlo.select(hlo.compare(count, 0, "EQ"), 1, count)
    quotient = hlo.divide(total, count)
    if total.dtype.is_floating_point or total.dtype.is_complex:
        return quotient
    exact = hlo.compare(quotient * count, total, "EQ")
    down = hlo.or_(exact, hlo.compare(hlo.compare(total, 0, "LT"), hlo.compare(count, 0, "LT"), "EQ"))
    return hlo.select(down, quotient, quotient - 1)


def reduce_into(place: Place, x: Value, source: Value, reduce: str, include_self: bool) -> Value:
    """``scatter_reduce``: positions that are written hold the reduction of all that meets there."""
    combine, identity = _REDUCTIONS[reduce]
    total = hlo.convert(x, compute_dtype(x.dtype))
    if not include_self:
        untouched = hlo.constant(False, torch.bool, x.shape)
        touched = place(untouched, hlo.constant(True, torch.bool, source.shape), hlo.or_)
        total = hlo.select(touched, identity(total.dtype), total)
    total = place(total, hlo.convert(source, total.dtype), combine)
    if reduce == "mean":
        start = hlo.full_like(total, int(include_self))
        total = _mean(total, place(start, hlo.constant(1, total.dtype, source.shape), hlo.add))
    return hlo.convert(total, x.dtype)


# ---- scatter along a dimension --------------------------------------------------------------------------------------
def _along(x: Value, dim: int, index: Value) -> tuple[Value, Value, Place]:
    """``x`` and ``index`` with at least one dimension, and where ``index`` points to."""
    flat, index = at_least_1d(x), at_least_1d(index)
    dim %= flat.ndim
    return flat, index, place_along(dim, checked(index, flat.shape[dim], drop=True, error=RuntimeError))


@lower("scatter.src", "scatter.value")
def scatter(x: Value, dim: int, index: Value, source: Value | Scalar) -> Value:
    flat, index, place = _along(x, dim, index)
    source = at_least_1d(source) if isinstance(source, Value) else as_value(source, x.dtype, index.shape)
    return hlo.reshape(place(flat, source, None), x.shape)


@lower("scatter.reduce", "scatter.value_reduce")
def scatter_combine(x: Value, dim: int, index: Value, source: Value | Scalar, *, reduce: str) -> Value:
    flat, index, place = _along(x, dim, index)
    source = at_least_1d(source) if isinstance(source, Value) else as_value(source, compute_dtype(x.dtype), index.shape)
    combine = {"add": hlo.add, "multiply": hlo.multiply}[reduce]
    return hlo.reshape(widened(place)(flat, source, combine), x.shape)


@lower("scatter_add")
def scatter_add(x: Value, dim: int, index: Value, source: Value) -> Value:
    flat, _, place = _along(x, dim, index)
    return hlo.reshape(widened(place)(flat, at_least_1d(source), hlo.add), x.shape)


@lower("scatter_reduce.two")
def scatter_reduce(x: Value, dim: int, index: Value, source: Value, reduce: str, *, include_self: bool = True) -> Value:
    flat, index, place = _along(x, dim, index)
    source = hlo.slice_(at_least_1d(source), [0] * flat.ndim, index.shape)
    return hlo.reshape(reduce_into(place, flat, source, reduce, include_self), x.shape)


# ---- whole slices ---------------------------------------------------------------------------------------------------
def _slices(x: Value, dim: int, index: Value, error: Error = IndexError) -> tuple[Value, int, Value, Place]:
    """``x`` with at least one dimension, ``dim``, the positions, and the slices that they name."""
    flat = at_least_1d(x)
    dim %= flat.ndim
    positions = checked(at_least_1d(index), flat.shape[dim], drop=True, error=error)
    return flat, dim, positions, place_at([dim], [positions], dim)


def _source_slices(source: Value, flat: Value, dim: int, count: int) -> Value:
    return hlo.reshape(source, [count if i == dim else n for i, n in enumerate(flat.shape)])


@lower("index_add")
def index_add(x: Value, dim: int, index: Value, source: Value, *, alpha: Scalar = 1) -> Value:
    flat, dim, positions, place = _slices(x, dim, index, IndexError if x.ndim <= 1 else RuntimeError)
    source = hlo.convert(_source_slices(source, flat, dim, positions.numel), compute_dtype(x.dtype))
    if not (isinstance(alpha, int) and alpha == 1):
        source = hlo.multiply(source, as_value(alpha, source.dtype, source.shape))
    return hlo.reshape(widened(place)(flat, source, hlo.add), x.shape)


@lower("index_copy")
def index_copy(x: Value, dim: int, index: Value, source: Value) -> Value:
    flat, dim, positions, place = _slices(x, dim, index)
    return hlo.reshape(place(flat, _source_slices(source, flat, dim, positions.numel), None), x.shape)


@lower("index_fill.int_Scalar", "index_fill.int_Tensor")
def index_fill(x: Value, dim: int, index: Value, value: Scalar) -> Value:
    """Negative positions count from the end, alone among the ``index_*`` family."""
    flat = at_least_1d(x)
    dim %= flat.ndim
    index = at_least_1d(index)
    positions = checked(index, flat.shape[dim], wrap=True, drop=True)
    shape = [positions.numel if i == dim else n for i, n in enumerate(flat.shape)]
    filled = place_at([dim], [positions], dim)(flat, as_value(value, x.dtype, shape), None)
    return hlo.reshape(filled, x.shape)


@lower("index_reduce")
def index_reduce(x: Value, dim: int, index: Value, source: Value, reduce: str, *, include_self: bool = True) -> Value:
    flat, dim, positions, place = _slices(x, dim, index)
    source = _source_slices(source, flat, dim, positions.numel)
    return hlo.reshape(reduce_into(place, flat, source, reduce, include_self), x.shape)


@lower("put")
def put(x: Value, index: Value, source: Value, accumulate: bool = False) -> Value:
    positions = checked(hlo.reshape(index, (index.numel,)), x.numel, wrap=True, drop=True)
    place = widened(place_at([0], [positions], 0))
    written = place(hlo.reshape(x, (x.numel,)), hlo.reshape(source, (source.numel,)), hlo.add if accumulate else None)
    return hlo.reshape(written, x.shape)


# ---- advanced indexing ----------------------------------------------------------------------------------------------
def _width(index: Value | None) -> int:
    """How many dimensions of the indexed tensor an index stands for."""
    return index.ndim if index is not None and index.dtype == torch.bool else 1


def _placed(x: Value, indices: list[Value | None]) -> list[tuple[int, Value]]:
    """Each index with the first dimension that it stands for."""
    out, dim = [], 0
    for i, index in enumerate(indices):
        width = _width(index)
        if index is not None:
            if index.dtype == torch.bool and index.shape != x.shape[dim : dim + width]:
                raise IndexError(
                    f"The shape of the mask {list(index.shape)} at index {i} does not match the shape of the indexed "
                    f"tensor {list(x.shape)} at dimension {dim}."
                )
            out.append((dim, index))
        dim += width
    return out


def _update_extent(values: Value, at_end: int, rank: int) -> int:
    """The largest size among the last ``rank`` index dimensions of ``values``; ``at_end`` dimensions follow them."""
    stop = values.ndim - at_end
    return max([1, *values.shape[max(stop - rank, 0) : max(stop, 0)]])


def _from_masks(masks: list[Value], length: int, exact: bool, alone: bool) -> list[list[Value]]:
    """The coordinates of each mask's true elements, ``length`` of each, padded past the end.

    With ``exact`` they must be ``length`` many, else as many as the fullest mask has. A mask with one true element
    broadcasts, like an index of length one, unless it is ``alone``. Other numbers are reported.
    """
    counts = [count_true(m, torch.int32) for m in masks]
    if exact:
        number = hlo.constant(length, torch.int32)
    else:
        number, empty = functools.reduce(hlo.maximum, counts), functools.reduce(hlo.minimum, counts)
        number = hlo.select(hlo.compare(empty, 0, "EQ"), 0, number)
    used = hlo.iota((length,), 0, torch.int32) < hlo.broadcast_in_dim(number, (length,), ())
    out = []
    for mask, count in zip(masks, counts, strict=True):
        found = hlo.pad(true_positions(mask), mask.numel, [0], [length - mask.numel])
        fits, one = hlo.compare(count, number, "EQ"), hlo.compare(count, 1, "EQ")
        if not alone and length:
            first = hlo.broadcast_in_dim(hlo.slice_(found, [0], [1]), found.shape, [0])
            found, fits = hlo.select(one, first, found), hlo.or_(fits, one)
        if exact or len(masks) > 1:
            tracer().check(
                hlo.not_(fits),
                "shape mismatch: a mask has another number of true elements",
                RuntimeError if exact else IndexError,
            )
        out.append(coordinates(hlo.select(used, found, mask.numel), mask.shape))
    return out


def _select_masked(x: Value, dim: int, mask: Value, values: Value, accumulate: bool) -> Value:
    """``x[..., mask, ...] = values`` where ``values`` do not vary along the true elements."""
    if 0 in values.shape:
        return x
    behind = x.ndim - dim - mask.ndim
    values = hlo.broadcast_to(values, [1] * max(behind + 1 - values.ndim, 0) + list(values.shape))
    lead = values.shape[: values.ndim - behind - 1]
    values = hlo.reshape(values, [*lead, *[1] * mask.ndim, *values.shape[values.ndim - behind :]])
    values = hlo.broadcast_to(values, x.shape)
    mask = hlo.broadcast_in_dim(mask, x.shape, range(dim, dim + mask.ndim))
    return hlo.select(mask, hlo.add(x, values) if accumulate else values, x)


def _index_put(x: Value, indices: list[Value | None], values: Value, accumulate: bool, error: Error) -> Value:
    values = hlo.convert(values, x.dtype)
    named = _placed(x, [None if i is None else as_mask(i) for i in indices])
    if not named:
        values = hlo.broadcast_to(values, x.shape)
        return hlo.add(x, values) if accumulate else values
    dims = [d for dim, index in named for d in range(dim, dim + _width(index))]
    at = indexed_place(dims)
    masks = [index for _, index in named if index.dtype == torch.bool]
    shape = hlo.broadcast_shapes(*([1] if index.dtype == torch.bool else index.shape for _, index in named))
    length, exact = (shape[-1] if shape else 1), True
    if masks:
        following = x.ndim - len(dims) - at
        length = max(length, _update_extent(values, following, 1))
        if length == 1:
            if len(named) == 1:
                return _select_masked(x, named[0][0], masks[0], values, accumulate)
            length, exact = max(m.numel for m in masks), False
        shape = (*shape[:-1], length)
    found = iter(_from_masks(masks, length, exact, len(named) == 1) if masks else ())
    given = []
    for dim, index in named:
        if index.dtype == torch.bool:
            given += [checked(i, n, drop=True, error=None) for i, n in zip(next(found), index.shape, strict=True)]
        else:
            given.append(checked(index, x.shape[dim], wrap=True, drop=True, error=error))
    place = widened(place_at(dims, [hlo.broadcast_to(i, shape) for i in given], at))
    rest = [n for i, n in enumerate(x.shape) if i not in dims]
    return place(x, hlo.broadcast_to(values, [*rest[:at], *shape, *rest[at:]]), hlo.add if accumulate else None)


@lower("index_put")
def index_put(x: Value, indices: list[Value | None], values: Value, accumulate: bool = False) -> Value:
    """``x[indices] = values`` (or ``+=``) with integer indices and masks; no size depends on the data."""
    return _index_put(x, indices, values, accumulate, IndexError)


@lower("_unsafe_index_put")
def unsafe_index_put(x: Value, indices: list[Value | None], values: Value, accumulate: bool = False) -> Value:
    return _index_put(x, indices, values, accumulate, error=None)


@lower("_index_put_impl")
def index_put_impl(
    x: Value, indices: list[Value | None], values: Value, accumulate: bool = False, unsafe: bool = False
) -> Value:
    return _index_put(x, indices, values, accumulate, None if unsafe else IndexError)


# ---- masks ----------------------------------------------------------------------------------------------------------
@lower("masked_scatter")
def masked_scatter(x: Value, mask: Value, source: Value) -> Value:
    """The k-th true element takes ``source[k]``; more true elements than ``source`` has are reported."""
    shape = hlo.broadcast_shapes(x.shape, mask.shape)
    x, mask = hlo.broadcast_to(x, shape), hlo.convert(hlo.broadcast_to(mask, shape), torch.bool)
    if x.numel == 0:
        return x
    rank = _ordinal(mask)
    short = hlo.compare(hlo.slice_(rank, [x.numel - 1], [x.numel]), source.numel, "GE")
    tracer().check(short, "Number of elements of source < number of ones in mask")
    if source.numel == 0:
        return x
    values = read_at(hlo.reshape(source, (source.numel,)), [0], [hlo.clamp(0, rank, source.numel - 1)], 0)
    return hlo.select(mask, hlo.reshape(values, shape), x)


def _ordinal(mask: Value) -> Value:
    """How many elements before each one are true, itself included, less one; flat."""
    return prefix_sum(hlo.convert(hlo.reshape(mask, (mask.numel,)), index_dtype(mask.numel))) - 1


@lower("masked_scatter_backward")
def masked_scatter_backward(grad: Value, mask: Value, sizes: list[int]) -> Value:
    """The gradient of ``source``: the elements of ``grad`` under the mask, in order, then zeros."""
    mask = hlo.broadcast_to(hlo.convert(mask, torch.bool), grad.shape)
    result = hlo.constant(0, grad.dtype, tuple(sizes))
    if 0 in (grad.numel, result.numel):
        return result
    found = hlo.pad(true_positions(mask), grad.numel, [0], [result.numel - grad.numel])
    flat = hlo.reshape(grad, (grad.numel,))
    values = read_at(flat, [0], [hlo.clamp(0, found, grad.numel - 1)], 0)
    return hlo.reshape(hlo.select(found < grad.numel, values, 0), result.shape)
