"""Reductions: sums, products, extrema and their positions, variances, norms, histograms.

Half types are summed in float32 and rounded once. The helpers ``total``, ``average``, ``largest`` and ``moments`` serve
the normalisations, the softmax family and the losses too; with ``keepdim`` their results broadcast to the operand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_tpu.lowering import meta
from torch_tpu.lowering.common import (
    Number,
    Scalar,
    as_value,
    canonical_dims,
    compute_dtype,
    for_cpu,
    highest,
    lowest,
    magnitude,
    unmerged,
)  # fmt: skip
from torch_tpu.lowering.registry import lower
from torch_tpu.stablehlo import Type, Value
from torch_tpu.stablehlo import ops as hlo

Dims = int | Sequence[int] | None
Reduction = Callable[[Value, Sequence[int]], Value]
Combine = Callable[[Value, Value], Value]


# ---- helpers --------------------------------------------------------------------------------------------------------
def count(x: Value, dims: Sequence[int]) -> int:
    """The number of elements that a reduction over ``dims`` combines."""
    return math.prod(x.shape[d] for d in dims)


def kept(y: Value, x: Value, dims: Sequence[int]) -> Value:
    """The result ``y`` of a reduction of ``x``, with sizes of one where ``dims`` were."""
    return hlo.reshape(y, [1 if i in set(dims) else n for i, n in enumerate(x.shape)])


def spread(y: Value, x: Value) -> Value:
    """``y`` broadcast to the shape of ``x``."""
    return hlo.broadcast_to(y, x.shape)


#: Parts into which a CPU cuts a reduced row, to combine them side by side: in a row, each element waits for the last.
#: XLA computes what has more than 15 parts once and stores it, and what has fewer wherever it is used.
_PARTS, _STORED_PARTS = 8, 16
_SHORT = 1 << 12  # elements that are not worth it
_ROW = 1 << 10  # elements: parts of longer rows may lie where a cache has no room for all of them


def _cut(x: Value, dims: Sequence[int], combine: Combine, most: int) -> tuple[Value, list[int]]:
    """``x`` with its last reduced dimensions as rows, and these as short as ``most`` parts combined make them."""
    first = x.ndim
    while first and first - 1 in dims:
        first -= 1
    n = math.prod(x.shape[first:])
    row = _ROW if n % _ROW == 0 else n
    parts = next((k for k in range(min(most, row // 4), 1, -1) if row % k == 0), 1)
    x = hlo.reshape(x, (*x.shape[:first], n // row, row))
    cut = [hlo.slice_dim(x, first + 1, i * row // parts, (i + 1) * row // parts) for i in range(parts)]
    while len(cut) > 1:
        cut = [*map(combine, cut[::2], cut[1::2]), *cut[len(cut) & ~1 :]]
    return cut[0], [*(d for d in dims if d < first), first, first + 1]


def _fold(x: Value, init: Number, dims: Sequence[int], combine: Combine, keepdim: bool, parts: int = _PARTS) -> Value:
    y, over = x, list(dims)
    if for_cpu() and x.ndim - 1 in dims and x.numel > _SHORT:
        y, over = _cut(x, dims, combine, parts)
    y = hlo.reduce_one(y, init, over, combine) if over else y
    return kept(y, x, dims) if keepdim else y


def greater(x: Value, y: Value) -> Value:
    """The maximum of two; NaN wins. XLA's CPU backend reduces fast by a comparison, and slowly by ``maximum``."""
    if not (for_cpu() and x.dtype.is_floating_point):
        return hlo.maximum(x, y)
    return hlo.select(hlo.compare(x, y, "GT") | is_nan(x), x, y)


def less(x: Value, y: Value) -> Value:
    """The minimum of two, as :func:`greater`."""
    if not (for_cpu() and x.dtype.is_floating_point):
        return hlo.minimum(x, y)
    return hlo.select(hlo.compare(x, y, "LT") | is_nan(x), x, y)


def total(x: Value, dims: Sequence[int], keepdim: bool = False) -> Value:
    """Sum in the dtype of ``x``; bool counts as int64."""
    return _fold(hlo.convert(x, torch.int64) if x.dtype == torch.bool else x, 0, dims, hlo.add, keepdim)


def total_of_stored(x: Value, dims: Sequence[int]) -> Value:
    """Sum with ``dims`` kept of an ``x`` that is dear and has other uses."""
    return _fold(x, 0, dims, hlo.add, True, parts=_STORED_PARTS)


def average(x: Value, dims: Sequence[int], keepdim: bool = False) -> Value:
    return hlo.divide(total(x, dims, keepdim), count(x, dims))


def product(x: Value, dims: Sequence[int]) -> Value:
    return _fold(x, 1, dims, hlo.multiply, False)


def largest(x: Value, dims: Sequence[int], keepdim: bool = False, least: Number | None = None) -> Value:
    """Maximum, of ``least`` as well; NaN wins."""
    return _fold(x, lowest(x.dtype) if least is None else least, dims, greater, keepdim)


def smallest(x: Value, dims: Sequence[int], keepdim: bool = False) -> Value:
    """Minimum; NaN wins."""
    return _fold(x, highest(x.dtype), dims, less, keepdim)


def is_nan(x: Value) -> Value:
    return hlo.compare(x, x, "NE")


def squared(x: Value) -> Value:
    """``|x|²``, real."""
    if x.dtype.is_complex:
        re, im = hlo.real(x), hlo.imag(x)
        return re * re + im * im
    return x * x


def moments(x: Value, dims: Sequence[int], correction: float = 0) -> tuple[Value, Value]:
    """(variance, mean) over ``dims`` with sizes of one kept: two passes, so that no digits cancel. NaN of nothing."""
    mean = average(x, dims, keepdim=True)
    deviation = squared(x - spread(mean, x))
    n = count(x, dims)
    return hlo.divide(total(deviation, dims, keepdim=True), max(n - correction, 0) if n else 0), mean


def _shaped(y: Value, result: Type) -> Value:
    return hlo.reshape(hlo.convert(y, result.dtype), result.shape)


def _reduced(x: Value, dims: Dims, result: Type, reduction: Reduction) -> Value:
    """``reduction`` computed in the opmath of the result's dtype."""
    over: Sequence[int] = canonical_dims(dims, x.ndim)
    rows = unmerged(x)
    if rows is not x and tuple(over) == (0,):
        x, over = rows, range(rows.ndim - 1)
    x = hlo.convert(x, compute_dtype(result.dtype))
    return _shaped(reduction(x, over), result)


# ---- sums, products, extrema ----------------------------------------------------------------------------------------
def _without_nan(x: Value, dims: Sequence[int]) -> Value:
    return total(hlo.select(is_nan(x), 0, x) if x.dtype.is_floating_point or x.dtype.is_complex else x, dims)


_REDUCTIONS: dict[tuple[str, ...], Reduction] = {
    ("sum", "sum.dim_IntList"): total,
    ("mean", "mean.dim"): average,
    ("prod", "prod.dim_int"): product,
    ("nansum",): _without_nan,
    ("amax", "max"): largest,
    ("amin", "min"): smallest,
}


def _register(names: tuple[str, ...], reduction: Reduction) -> None:
    @lower(*names)
    def rule(x: Value, dims: Dims = None, keepdim: bool = False, *, result: list[Type]) -> Value:
        return _reduced(x, dims, result[0], reduction)


for _names, _reduction in _REDUCTIONS.items():
    _register(_names, _reduction)


@lower("aminmax")
def aminmax(x: Value, *, dim: int | None, result: list[Type]) -> list[Value]:
    return [_reduced(x, dim, result[0], smallest), _reduced(x, dim, result[1], largest)]


@lower("all", "all.dim", "all.dims")
def all_(x: Value, dims: Dims = None, keepdim: bool = False, *, result: list[Type]) -> Value:
    return _quantified(x, dims, result[0], True, hlo.and_)


@lower("any", "any.dim", "any.dims")
def any_(x: Value, dims: Dims = None, keepdim: bool = False, *, result: list[Type]) -> Value:
    return _quantified(x, dims, result[0], False, hlo.or_)


def _quantified(x: Value, dims: Dims, result: Type, init: bool, combine: Combine) -> Value:
    over = () if dims == [] else canonical_dims(dims, x.ndim)  # unlike the sums, an empty list reduces nothing
    return _shaped(_fold(hlo.convert(x, torch.bool), init, over, combine, False), result)


# ---- positions of extrema -------------------------------------------------------------------------------------------
def extreme_with_index(x: Value, dim: int, greatest: bool) -> tuple[Value, Value]:
    """The extreme of ``dim``, which is dropped, and its first position (int32 where it fits). NaN is the extreme."""
    itype = torch.int32 if x.shape[dim] < 2**31 else torch.int64
    beyond = torch.iinfo(itype).max
    if for_cpu():  # two plain reductions are ten times as fast as one of pairs
        values = (largest if greatest else smallest)(x, [dim], keepdim=True)
        here = hlo.compare(x, spread(values, x), "EQ")
        here = here | is_nan(x) if x.dtype.is_floating_point else here
        places = hlo.select(here, hlo.iota(x.shape, dim, itype), beyond)
        return hlo.squeeze(values, [dim]), smallest(places, [dim])
    direction = "GT" if greatest else "LT"

    def body(acc: tuple[Value, ...], new: tuple[Value, ...]) -> list[Value]:
        (a, i), (b, j) = acc, new
        better, tie = hlo.compare(b, a, direction), hlo.compare(a, b, "EQ")
        if x.dtype.is_floating_point:
            better = better | (is_nan(b) & ~is_nan(a))
            tie = tie | (is_nan(a) & is_nan(b))
        take = better | (tie & (j < i))
        return [hlo.select(take, b, a), hlo.select(take, j, i)]

    worst = lowest(x.dtype) if greatest else highest(x.dtype)
    values, indices = hlo.reduce([x, hlo.iota(x.shape, dim, itype)], [worst, beyond], [dim], body)
    return values, indices


def _line(x: Value, dim: int | None) -> tuple[Value, int]:
    """The operand and dimension of an indexed reduction; None means all elements in order."""
    if dim is None or x.ndim == 0:
        return hlo.reshape(x, (x.numel,)), 0
    return x, dim % x.ndim


@lower("max.dim")
def max_dim(x: Value, dim: int, keepdim: bool = False, *, result: list[Type]) -> list[Value]:
    return [_shaped(y, t) for y, t in zip(extreme_with_index(*_line(x, dim), True), result, strict=True)]


@lower("min.dim")
def min_dim(x: Value, dim: int, keepdim: bool = False, *, result: list[Type]) -> list[Value]:
    return [_shaped(y, t) for y, t in zip(extreme_with_index(*_line(x, dim), False), result, strict=True)]


@lower("argmax")
def argmax(x: Value, dim: int | None = None, keepdim: bool = False, *, result: list[Type]) -> Value:
    return _shaped(extreme_with_index(*_line(x, dim), True)[1], result[0])


@lower("argmin")
def argmin(x: Value, dim: int | None = None, keepdim: bool = False, *, result: list[Type]) -> Value:
    return _shaped(extreme_with_index(*_line(x, dim), False)[1], result[0])


# ---- variance -------------------------------------------------------------------------------------------------------
def _register_variance(name: str, root: bool, with_mean: bool) -> None:
    @lower(f"{name}.correction", static=("correction",))
    def rule(
        x: Value, dims: Dims = None, *, correction: float | None = None, result: list[Type]
    ) -> Value | list[Value]:
        over = canonical_dims(dims, x.ndim)
        variance, mean = moments(hlo.convert(x, compute_dtype(x.dtype)), over, 1 if correction is None else correction)
        spread_ = _shaped(hlo.sqrt(variance) if root else variance, result[0])
        return [spread_, _shaped(mean, result[1])] if with_mean else spread_


for _name in ("var", "std", "var_mean", "std_mean"):
    _register_variance(_name, root=_name.startswith("std"), with_mean=_name.endswith("mean"))


# ---- norms ----------------------------------------------------------------------------------------------------------
def p_norm(a: Value, p: float, dims: Sequence[int], keepdim: bool = False) -> Value:
    """``(sum a^p)^(1/p)`` of non-negative ``a``, with the limits for 0 (counts what is not zero), inf and -inf."""
    if p == 0:
        return total(hlo.convert(hlo.compare(a, 0, "NE"), a.dtype), dims, keepdim)
    if p == 1:
        return total(a, dims, keepdim)
    if p == 2:
        return hlo.sqrt(total(a * a, dims, keepdim))
    if math.isinf(p):
        return _fold(a, 0 if p > 0 else math.inf, dims, greater if p > 0 else less, keepdim)
    sum_ = total(hlo.power(a, p), dims, keepdim)
    return hlo.power(sum_, 1 / p)


def _norm_meta(x: torch.Tensor, ord: float = 2, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """PyTorch's, which also refuses to take no maximum at all: a row of none of many."""
    dims = canonical_dims(dim, x.ndim)
    nothing = x.numel() == 0 and dim and all(x.shape[d] for d in dims)
    return torch.ops.aten.linalg_vector_norm(x, 2 if nothing else ord, dim, keepdim, dtype=dtype)


@lower("linalg_vector_norm", static=("ord",), meta=_norm_meta)
def vector_norm(x: Value, ord: float = 2, dim: Dims = None, keepdim: bool = False, *, result: list[Type]) -> Value:
    dtype = compute_dtype(result[0].dtype)
    if x.dtype.is_complex:
        x = hlo.convert(x, torch.complex128 if dtype == torch.float64 else torch.complex64)
    else:
        x = hlo.convert(x, dtype)
    return _shaped(p_norm(magnitude(x), ord, canonical_dims(dim, x.ndim)), result[0])


@lower("_foreach_norm.Scalar", static=("ord",))
def foreach_norm(
    xs: list[Value], ord: float = 2, dtype: torch.dtype | None = None, *, result: list[Type]
) -> list[Value]:
    return [vector_norm(x, ord, result=[t]) for x, t in zip(xs, result, strict=True)]


@lower("renorm", static=("p",), classes=True)
def renorm(x: Value, p: float, dim: int, maxnorm: Scalar, *, result: list[Type]) -> Value:
    """``x`` with those of its slices along ``dim`` scaled down to ``maxnorm`` whose p-norm is greater."""
    over = [i for i in range(x.ndim) if i != dim % x.ndim]
    norm = p_norm(magnitude(hlo.convert(x, compute_dtype(x.dtype))), p, over, keepdim=True)
    limit = as_value(maxnorm, norm.dtype, norm.shape)
    factor = hlo.select(norm > limit, limit / (norm + 1e-7), 1)
    return x * spread(hlo.convert(factor, x.dtype), x)


# ---- hash -----------------------------------------------------------------------------------------------------------
@lower("hash_tensor")
def hash_tensor(x: Value, dim: Sequence[int], *, keepdim: bool, mode: int, result: list[Type]) -> Value:
    """The exclusive or of the elements' bits as float64 or int64 (``mode`` 0, the only one)."""
    dims = canonical_dims(dim, x.ndim)
    wide = hlo.convert(x, torch.float64 if x.dtype.is_floating_point else torch.int64)
    bits = hlo.bitcast_convert(wide, torch.uint64)
    return hlo.reshape(hlo.reduce_one(bits, 0, dims, hlo.xor), result[0].shape)


# ---- histogram ------------------------------------------------------------------------------------------------------
@lower("histc", meta=meta.histc)
def histc(x: Value, bins: int = 100, min: Scalar = 0, max: Scalar = 0, *, result: list[Type]) -> Value:
    """Counts per bin of equal width; equal bounds mean the data's own, and a range of no width is widened by one."""
    dtype = compute_dtype(x.dtype)
    if not dtype.is_floating_point:
        dtype = torch.float64
    x = hlo.reshape(hlo.convert(x, dtype), (x.numel,))
    low, high = as_value(min, dtype), as_value(max, dtype)
    if x.numel:
        same = hlo.compare(low, high, "EQ")
        low, high = hlo.select(same, smallest(x, [0]), low), hlo.select(same, largest(x, [0]), high)
    same = hlo.compare(low, high, "EQ")
    low, high = hlo.select(same, low - 1, low), hlo.select(same, high + 1, high)
    low, high = spread(low, x), spread(high, x)
    inside = hlo.compare(x, low, "GE") & hlo.compare(x, high, "LE")
    position = hlo.convert(hlo.select(inside, (x - low) * bins / (high - low), 0), torch.int32)
    position = hlo.select(inside, hlo.minimum(position, bins - 1), bins)  # index `bins` is out of range: dropped
    counts = hlo.scatter(
        hlo.constant(0, torch.int32, (bins,)), hlo.reshape(position, (x.numel, 1)), hlo.full_like(position, 1), hlo.add,
        update_window_dims=[], inserted_dims=[0], index_map=[0],
    )  # fmt: skip
    return hlo.convert(counts, result[0].dtype)
