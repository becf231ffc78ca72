"""Comparison, extrema, logic, classification, selection, and the operators that only move values."""

from __future__ import annotations

import math

import torch

from torch_tpu.lowering.common import Scalar, as_value, for_cpu, row_major
from torch_tpu.lowering.pointwise import equals, is_nan, signbit
from torch_tpu.lowering.registry import Promotion, lower
from torch_tpu.stablehlo import Type, Value
from torch_tpu.stablehlo import ops as hlo

# No detour through float32: a number is rounded to a half dtype before it is compared, so bfloat16(0.1) == 0.1.
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    lower(f"{_name}.Tensor", f"{_name}.Scalar", promote=Promotion.NO_OPMATH)(
        lambda x, y, _name=_name: hlo.compare(x, y, _name.upper())
    )


# ---- extrema --------------------------------------------------------------------------------------------------------
@lower("maximum", "max.other", promote=Promotion.DEFAULT)
def maximum(x: Value, y: Value) -> Value:
    return hlo.maximum(x, y)


@lower("minimum", "min.other", promote=Promotion.DEFAULT)
def minimum(x: Value, y: Value) -> Value:
    return hlo.minimum(x, y)


@lower("fmax", promote=Promotion.DEFAULT)
def fmax(x: Value, y: Value) -> Value:
    """The larger; a NaN only where both are."""
    return hlo.select(is_nan(y), x, hlo.select(is_nan(x), y, hlo.maximum(x, y)))


@lower("fmin", promote=Promotion.DEFAULT)
def fmin(x: Value, y: Value) -> Value:
    return hlo.select(is_nan(y), x, hlo.select(is_nan(x), y, hlo.minimum(x, y)))


@lower("clamp", "clamp.Tensor", promote=Promotion.DEFAULT)
def clamp(x: Value, low: Value | None, high: Value | None) -> Value:
    """min(max(x, low), high): where the bounds cross, ``high`` wins; NaN anywhere gives NaN."""
    x = x if low is None else hlo.maximum(x, low)
    return x if high is None else hlo.minimum(x, high)


lower("clamp_min", "clamp_min.Tensor", promote=Promotion.DEFAULT)(lambda x, low: hlo.maximum(x, low))
lower("clamp_max", "clamp_max.Tensor", promote=Promotion.DEFAULT)(lambda x, high: hlo.minimum(x, high))


@lower("heaviside", promote=Promotion.DEFAULT)
def heaviside(x: Value, at_zero: Value) -> Value:
    return hlo.select(equals(x, 0), at_zero, hlo.convert(x > 0, x.dtype))


# ---- logic and classification ---------------------------------------------------------------------------------------
def _truth(x: Value) -> Value:
    return hlo.convert(x, torch.bool)


lower("logical_and", promote=Promotion.ALWAYS_BOOL)(lambda x, y: hlo.and_(_truth(x), _truth(y)))
lower("logical_or", promote=Promotion.ALWAYS_BOOL)(lambda x, y: hlo.or_(_truth(x), _truth(y)))
lower("logical_xor", promote=Promotion.ALWAYS_BOOL)(lambda x, y: hlo.xor(_truth(x), _truth(y)))
lower("logical_not", promote=Promotion.ALWAYS_BOOL)(lambda x: hlo.not_(_truth(x)))


def _never(x: Value) -> Value:
    return hlo.constant(False, torch.bool, x.shape)


@lower("isnan", promote=Promotion.ALWAYS_BOOL)
def isnan(x: Value) -> Value:
    return is_nan(x) if x.dtype.is_floating_point or x.dtype.is_complex else _never(x)


@lower("isinf", promote=Promotion.ALWAYS_BOOL)
def isinf(x: Value) -> Value:
    if x.dtype.is_complex:
        return hlo.or_(isinf(hlo.real(x)), isinf(hlo.imag(x)))
    return equals(hlo.abs_(x), math.inf) if x.dtype.is_floating_point else _never(x)


@lower("isfinite", promote=Promotion.ALWAYS_BOOL)
def isfinite(x: Value) -> Value:
    if x.dtype.is_complex:
        return hlo.and_(hlo.is_finite(hlo.real(x)), hlo.is_finite(hlo.imag(x)))
    return hlo.is_finite(x) if x.dtype.is_floating_point else hlo.not_(_never(x))


@lower("isposinf", promote=Promotion.ALWAYS_BOOL)
def isposinf(x: Value) -> Value:
    return equals(x, math.inf) if x.dtype.is_floating_point else _never(x)


@lower("isneginf", promote=Promotion.ALWAYS_BOOL)
def isneginf(x: Value) -> Value:
    return equals(x, -math.inf) if x.dtype.is_floating_point else _never(x)


lower("signbit")(signbit)


# ---- selection ------------------------------------------------------------------------------------------------------
@lower("where.self", promote=Promotion.NO_OPMATH, promoted=("self", "other"))
def where(condition: Value, x: Value, y: Value) -> Value:
    return hlo.select(_truth(condition), x, y)


@lower("masked_fill.Scalar", "masked_fill.Tensor")
def masked_fill(x: Value, mask: Value, value: Scalar, *, result: list[Type]) -> Value:
    shape = result[0].shape
    x, mask = hlo.broadcast_to(x, shape), hlo.broadcast_to(_truth(mask), shape)
    return hlo.select(mask, as_value(value, x.dtype, shape), x)


# ---- values that only move ------------------------------------------------------------------------------------------
@lower("fill.Scalar", "fill.Tensor")
def fill(x: Value, value: Scalar) -> Value:
    return as_value(value, x.dtype, x.shape)


@lower("zero")
def zero(x: Value) -> Value:
    return hlo.full_like(x, 0)


@lower("_efficientzerotensor")
def zeros(size: list[int], *, result: list[Type]) -> Value:
    return hlo.constant(0, result[0].dtype, result[0].shape)


@lower("copy")
def copy(x: Value, source: Value, non_blocking: bool = False) -> Value:
    return hlo.broadcast_to(hlo.convert(_by_tiles(source), x.dtype), x.shape)


@lower("_to_copy")
def to_copy(x: Value, *, result: list[Type]) -> Value:
    return hlo.convert(x, result[0].dtype)


@lower("clone", "lift_fresh_copy", "lift")
def clone(x: Value) -> Value:
    return _by_tiles(x)


def _by_tiles(x: Value, tile: int = 8) -> Value:
    """A large transposed matrix, its tiles first: a CPU's cache has room for few rows that are a power of two apart."""
    source = x.transpose_of
    if source is None or x.ndim != 2 or x.numel < 2**18 or not for_cpu():
        return x
    rows, columns = x.shape
    if rows % tile or columns % tile or rows * x.dtype.itemsize % 1024:
        return x
    tiles = hlo.reshape(source[0], (columns // tile, tile, rows // tile, tile))
    moved = hlo.transpose(row_major(hlo.transpose(tiles, (0, 2, 3, 1))), (1, 2, 0, 3))
    y = hlo.reshape(moved, x.shape)
    y.transpose_of = source
    return y
