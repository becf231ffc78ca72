"""Fake quantisation: floats rounded to the grid that integers of a scale and a zero point give, and its gradients.

After ATen's ``FakeQuantizeCore.cpp``: numbers are multiplied by the inverse of the scale, rounded to nearest even,
moved by the zero point, and clamped. Scales and zero points are operands.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torch_tpu.lowering.common import Scalar, as_value
from torch_tpu.lowering.registry import lower
from torch_tpu.stablehlo import Value
from torch_tpu.stablehlo import ops as hlo

_FLOAT = torch.float32


class Grid:
    """Scale and zero point of every element of an array, and the range of its integers.

    Args:
        shape: Of the array.
        scale: One for all, or one per channel of dimension ``axis``.
        zero: As many zero points.
        axis: The dimension of channels, or None.
        low: The least integer.
        high: The greatest.
        whole: False for zero points between integers: they are added before the rounding.
    """

    def __init__(
        self, shape: Sequence[int], scale: Value, zero: Value, axis: int | None, low: int, high: int, whole: bool = True
    ) -> None:
        # XLA would turn the product with an inverse into a quotient, and break ties elsewhere.
        inverse = hlo.optimization_barrier(hlo.divide(1.0, _float(scale)))[0]
        self.scale, self.inverse, self.zero = (_over(v, shape, axis) for v in (scale, inverse, zero))
        self.low, self.high, self.whole = low, high, whole

    def __call__(self, x: Value) -> tuple[Value, Value]:
        """The integers of ``x`` before they are clamped, as floats, and whether the range holds them."""
        steps = x * self.inverse
        round_ = hlo.round_nearest_even
        level = round_(steps) + self.zero if self.whole else round_(steps + self.zero)
        return level, hlo.and_(level >= float(self.low), level <= float(self.high))

    def clamped(self, level: Value) -> Value:
        return hlo.minimum(hlo.maximum(level, float(self.low)), float(self.high))

    def number(self, level: Value) -> Value:
        """What an integer stands for; NaN becomes the lowest, as ``fmax`` makes it."""
        level = hlo.select(hlo.compare(level, level, "NE"), float(self.low), level)
        return (self.clamped(level) - self.zero) * self.scale


def _over(parameter: Value, shape: Sequence[int], axis: int | None) -> Value:
    """A parameter per channel of ``axis``, or one for all, over ``shape``, float32."""
    parameter = hlo.convert(parameter, _FLOAT)
    if axis is None:
        return hlo.broadcast_to(hlo.reshape(parameter, ()), shape)
    return hlo.broadcast_in_dim(parameter, shape, [axis % len(shape)])


def _float(x: Value) -> Value:
    return hlo.convert(x, _FLOAT)


# ---- scale and zero point given --------------------------------------------------------------------------------------
def _cachemask(x: Value, grid: Grid, enabled: Value | None = None) -> list[Value]:
    """``x`` on the grid, and where its gradient passes; ``x`` itself, everywhere, if a run-time flag is zero."""
    level, inside = grid(_float(x))
    out = hlo.convert(grid.number(level), x.dtype)
    if enabled is not None:
        off = hlo.compare(hlo.broadcast_to(hlo.reshape(enabled, ()), x.shape), 0, "EQ")
        out, inside = hlo.select(off, x, out), hlo.or_(off, inside)
    return [out, inside]


@lower("fake_quantize_per_tensor_affine_cachemask", runtime=("zero_point",))
def per_tensor(x: Value, scale: Scalar, zero: Scalar, low: int, high: int) -> list[Value]:
    return _cachemask(x, Grid(x.shape, as_value(scale, _FLOAT), as_value(zero, _FLOAT), None, low, high))


@lower("_fake_quantize_per_tensor_affine_cachemask_tensor_qparams")
def per_tensor_qparams(x: Value, scale: Value, zero: Value, enabled: Value, low: int, high: int) -> list[Value]:
    return _cachemask(x, Grid(x.shape, scale, zero, None, low, high), enabled)


@lower("fake_quantize_per_channel_affine_cachemask")
def per_channel(x: Value, scale: Value, zero: Value, axis: int, low: int, high: int) -> list[Value]:
    return _cachemask(x, Grid(x.shape, scale, zero, axis, low, high, not zero.dtype.is_floating_point))


# ---- scale and zero point learned ------------------------------------------------------------------------------------
def _learnable(x: Value, scale: Value, zero: Value, axis: int | None, low: int, high: int) -> Value:
    zero = hlo.minimum(hlo.maximum(hlo.round_nearest_even(_float(zero)), float(low)), float(high))
    grid = Grid(x.shape, scale, zero, axis, low, high)
    return hlo.convert(grid.number(grid(_float(x))[0]), x.dtype)


@lower("_fake_quantize_learnable_per_tensor_affine")
def learnable_per_tensor(x: Value, scale: Value, zero: Value, low: int, high: int, factor: Scalar = 1.0) -> Value:
    return _learnable(x, scale, zero, None, low, high)


@lower("_fake_quantize_learnable_per_channel_affine")
def learnable_per_channel(
    x: Value, scale: Value, zero: Value, axis: int, low: int, high: int, factor: Scalar = 1.0
) -> Value:
    return _learnable(x, scale, zero, axis, low, high)


def _learnable_backward(
    grad: Value, x: Value, scale: Value, zero: Value, axis: int | None, low: int, high: int, factor: Scalar
) -> list[Value]:
    """Gradients of the input, the scale and the zero point (Esser et al. 2020; Jain et al. 2020)."""
    zero = hlo.minimum(hlo.maximum(_rounded_back(zero, axis), float(low)), float(high))
    grid = Grid(x.shape, scale, zero, axis, low, high, whole=False)  # here ATen adds first
    dy, x32 = _float(grad), _float(x)
    level, inside = grid(x32)
    error = (grid.number(level) - x32) * grid.inverse
    edge = grid.clamped(level) - grid.zero
    gradient = as_value(factor, _FLOAT, x.shape)
    d_scale = hlo.select(inside, error, edge) * dy * gradient
    d_zero = hlo.select(inside, 0.0, -(dy * grid.scale)) * gradient
    dims = [i for i in range(x.ndim) if axis is None or i != axis % x.ndim]
    sums = [hlo.reduce_one(v, 0, dims, hlo.add) for v in (d_scale, d_zero)]
    shape = (1,) if axis is None else scale.shape
    d_parameters = [hlo.reshape(hlo.convert(v, p.dtype), shape) for v, p in zip(sums, (scale, zero), strict=True)]
    d_x = hlo.select(inside, grad, 0)
    return [_float(d_x) if x.dtype == torch.bfloat16 else d_x, *d_parameters]  # float32 is ATen's choice


def _rounded_back(zero: Value, axis: int | None) -> Value:
    """The backward pass rounds one zero point half up, and those of channels to even, as ATen does."""
    zero = _float(zero)
    return hlo.round_nearest_even(zero) if axis is not None else hlo.floor(zero + 0.5)


@lower("_fake_quantize_learnable_per_tensor_affine_backward")
def learnable_per_tensor_backward(
    grad: Value, x: Value, scale: Value, zero: Value, low: int, high: int, factor: Scalar = 1.0
) -> list[Value]:
    return _learnable_backward(grad, x, scale, zero, None, low, high, factor)


@lower("_fake_quantize_learnable_per_channel_affine_backward")
def learnable_per_channel_backward(
    grad: Value, x: Value, scale: Value, zero: Value, axis: int, low: int, high: int, factor: Scalar = 1.0
) -> list[Value]:
    return _learnable_backward(grad, x, scale, zero, axis, low, high, factor)
