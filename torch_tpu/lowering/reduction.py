"""Reductions: sums, products, extrema and their positions, variances, norms, histograms.

Half types are summed in float32 and rounded once. The helpers ``total``, ``average``, ``largest`` and ``moments`` serve
the normalisations, the softmax family and the losses too; with ``keepdim`` their results broadcast to the operand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from torch_tpu.lowering.common import Scalar, as_value, canonical_dims, compute_dtype, for_cpu, highest, lowest
from torch_tpu.lowering.registry import lower
from torch_tpu.stablehlo import Type, Value
from torch_tpu.stablehlo import ops as hlo

Dims = int | Sequence[int] | None
Reduction = Callable[[Value, Sequence[int], bool, "Map"], Value]
Combine = Callable[[Value, Value], Value]
Map = Callable[[Value], Value]  # element-wise


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
_PARTS = 16
_SHORT = 1 << 12  # elements that are not worth it


def _cut(x: Value, dims: Sequence[int], combine: Combine, each: Map) -> tuple[Value, list[int]]:
    """``each(x)`` with the last reduced dimensions as one, and that as short as parts combined element by element make it.

    Parts are taken before ``each``: what many of them share, XLA would keep in memory.
    """
    first = x.ndim
    while first and first - 1 in dims:
        first -= 1
    n = math.prod(x.shape[first:])
    parts = next((k for k in range(min(_PARTS, n // 4), 1, -1) if n % k == 0), 1)
    x = hlo.reshape(x, (*x.shape[:first], n))
    cut = [each(hlo.slice_dim(x, first, i * n // parts, (i + 1) * n // parts)) for i in range(parts)]
    while len(cut) > 1:
        cut = [*map(combine, cut[::2], cut[1::2]), *cut[len(cut) & ~1 :]]
    return cut[0], [*(d for d in dims if d < first), first]


def over(statistic: Value, part: Value) -> Value:
    """A statistic, its dimensions kept, broadcast to what ``each`` sees of its operand: last dimensions may be one there."""
    lead = statistic.shape[: part.ndim - 1]
    return hlo.broadcast_to(hlo.reshape(statistic, (*lead, statistic.numel // max(math.prod(lead), 1))), part.shape)


def _fold(
    x: Value, init: Scalar, dims: Sequence[int], combine: Combine, keepdim: bool, each: Map = lambda x: x
) -> Value:
    if for_cpu() and x.ndim - 1 in dims and x.numel > _SHORT:
        y, over = _cut(x, dims, combine, each)
    else:
        y, over = each(x), list(dims)
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


def total(x: Value, dims: Sequence[int], keepdim: bool = False, each: Map = lambda x: x) -> Value:
    """Sum of ``each(x)``; bool counts as int64."""
    counted = lambda v: hlo.convert(v, torch.int64) if v.dtype == torch.bool else v  # noqa: E731
    return _fold(x, 0, dims, hlo.add, keepdim, lambda v: counted(each(v)))


def average(x: Value, dims: Sequence[int], keepdim: bool = False, each: Map = lambda x: x) -> Value:
    return hlo.divide(total(x, dims, keepdim, each), count(x, dims))


def product(x: Value, dims: Sequence[int], keepdim: bool = False, each: Map = lambda x: x) -> Value:
    return _fold(x, 1, dims, hlo.multiply, keepdim, each)


def largest(x: Value, dims: Sequence[int], keepdim: bool = False, each: Map = lambda x: x) -> Value:
    """Maximum; NaN wins."""
    return _fold(x, lowest(x.dtype), dims, greater, keepdim, each)


def smallest(x: Value, dims: Sequence[int], keepdim: bool = False, each: Map = lambda x: x) -> Value:
    """Minimum; NaN wins."""
    return _fold(x, highest(x.dtype), dims, less, keepdim, each)


def is_nan(x: Value) -> Value:
    return hlo.compare(x, x, "NE")


def squared(x: Value) -> Value:
    """``|x|²``, real."""
    if x.dtype.is_complex:
        re, im = hlo.real(x), hlo.imag(x)
        return re * re + im * im
    return x * x


def moments(x: Value, dims: Sequence[int], correction: float = 0) -> tuple[Value, Value]:
    """(variance, mean) over ``dims`` with sizes of one kept: two passes, so that no digits cancel."""
    mean = average(x, dims, keepdim=True)
    deviations = total(x, dims, keepdim=True, each=lambda v: squared(v - over(mean, v)))
    return hlo.divide(deviations, max(count(x, dims) - correction, 0)), mean


def _shaped(y: Value, result: Type) -> Value:
    return hlo.reshape(hlo.convert(y, result.dtype), result.shape)


def _reduced(x: Value, dims: Dims, result: Type, reduction: Reduction) -> Value:
    """``reduction`` computed in the opmath of the result's dtype."""
    wide = lambda v: hlo.convert(v, compute_dtype(result.dtype))  # noqa: E731
    return _shaped(reduction(x, canonical_dims(dims, x.ndim), False, wide), result)


# ---- sums, products, extrema ----------------------------------------------------------------------------------------
def _without_nan(x: Value, dims: Sequence[int], keepdim: bool, each: Map) -> Value:
    may_be = x.dtype.is_floating_point or x.dtype.is_complex
    return total(x, dims, keepdim, lambda v: hlo.select(is_nan(v), 0, each(v)) if may_be else each(v))


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


@lower("linalg_vector_norm", static=("ord",))
def vector_norm(x: Value, ord: float = 2, dim: Dims = None, keepdim: bool = False, *, result: list[Type]) -> Value:
    dtype = compute_dtype(result[0].dtype)
    if x.dtype.is_complex:
        x = hlo.convert(x, torch.complex128 if dtype == torch.float64 else torch.complex64)
    else:
        x = hlo.convert(x, dtype)
    return _shaped(p_norm(hlo.abs_(x), ord, canonical_dims(dim, x.ndim)), result[0])


@lower("_foreach_norm.Scalar", static=("ord",))
def foreach_norm(
    xs: list[Value], ord: float = 2, dtype: torch.dtype | None = None, *, result: list[Type]
) -> list[Value]:
    return [vector_norm(x, ord, result=[t]) for x, t in zip(xs, result, strict=True)]


# ---- histogram ------------------------------------------------------------------------------------------------------
@lower("histc")
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
