"""Activation functions and their derivatives.

The derivatives take the incoming gradient ``g`` first and follow ATen's names and conventions at the kinks. At NaN
they are what ATen's vectors give: 0 for clamped functions, where its scalars let ``g`` through.
"""

from __future__ import annotations

import math

from torch_tpu.lowering.common import Number, Scalar, as_value, compute_dtype
from torch_tpu.lowering.complex import conjugate
from torch_tpu.lowering.pointwise import is_nan
from torch_tpu.lowering.registry import Promotion, lower
from torch_tpu.stablehlo import Type, Value
from torch_tpu.stablehlo import ops as hlo

Factor = Value | Number


def _zero(x: Value) -> Value:
    return hlo.full_like(x, 0)


# ---- rectifiers -----------------------------------------------------------------------------------------------------
@lower("relu", promote=Promotion.DEFAULT)
def relu(x: Value) -> Value:
    return hlo.maximum(x, 0)


@lower("threshold", promote=Promotion.DEFAULT, promoted=("self",))
def threshold(x: Value, limit: Value, value: Value) -> Value:
    return hlo.select(x <= limit, value, x)


@lower("threshold_backward", promote=Promotion.DEFAULT, promoted=("grad_output", "self"))
def threshold_backward(g: Value, x: Value, limit: Value | Number) -> Value:
    return hlo.select(hlo.compare(x, limit, "LE"), _zero(x), g)


@lower("leaky_relu", promote=Promotion.DEFAULT)
def leaky_relu(x: Value, slope: Factor = 0.01) -> Value:
    return hlo.select(x > 0, x, x * slope)


@lower("leaky_relu_backward", promote=Promotion.DEFAULT)
def leaky_relu_backward(g: Value, x: Value, slope: Factor, is_result: bool) -> Value:
    return hlo.select(x > 0, g, g * slope)


@lower("_prelu_kernel", promote=Promotion.DEFAULT)
def prelu(x: Value, slope: Value) -> Value:
    return hlo.select(x > 0, x, slope * x)


@lower("_prelu_kernel_backward", promote=Promotion.DEFAULT)
def prelu_backward(g: Value, x: Value, slope: Value, *, result: list[Type]) -> list[Value]:
    gradients = hlo.select(x > 0, g, slope * g), hlo.select(x > 0, _zero(x), x * g)
    return [hlo.convert(v, t.dtype) for v, t in zip(gradients, result, strict=True)]


@lower("hardtanh", promote=Promotion.DEFAULT, promoted=("self",))
def hardtanh(x: Value, low: Factor = -1, high: Factor = 1) -> Value:
    return hlo.minimum(hlo.maximum(x, low), high)


@lower("hardtanh_backward", promote=Promotion.DEFAULT)
def hardtanh_backward(g: Value, x: Value, low: Factor, high: Factor) -> Value:
    return hlo.select(hlo.and_(hlo.compare(x, low, "GT"), hlo.compare(x, high, "LT")), g, _zero(g))


@lower("hardsigmoid", promote=Promotion.DEFAULT)
def hardsigmoid(x: Value) -> Value:
    return hardtanh(x + 3.0, 0.0, 6.0) / 6.0


@lower("hardsigmoid_backward", promote=Promotion.DEFAULT)
def hardsigmoid_backward(g: Value, x: Value) -> Value:
    return hlo.select(hlo.and_(x > -3.0, x < 3.0), g / 6.0, _zero(g))


@lower("hardswish", promote=Promotion.DEFAULT)
def hardswish(x: Value) -> Value:
    return x * hardtanh(x + 3.0, 0.0, 6.0) / 6.0


@lower("hardswish_backward", promote=Promotion.DEFAULT)
def hardswish_backward(g: Value, x: Value) -> Value:
    return hlo.select(x <= -3.0, _zero(g), hlo.select(x >= 3.0, g, g * (x / 3.0 + 0.5)))


def _within(x: Value, bound: Factor) -> Value:
    return hlo.and_(hlo.compare(x, -bound, "GE"), hlo.compare(x, bound, "LE"))


@lower("hardshrink", promote=Promotion.DEFAULT)
def hardshrink(x: Value, bound: Factor = 0.5) -> Value:
    return hlo.select(_within(x, bound), _zero(x), x)


@lower("softshrink", promote=Promotion.DEFAULT)
def softshrink(x: Value, bound: Factor = 0.5) -> Value:
    """Towards zero by ``bound``; NaN stays NaN."""
    rest = hlo.select(is_nan(x), x, _zero(x))
    return hlo.select(hlo.compare(x, bound, "GT"), x - bound, hlo.select(hlo.compare(x, -bound, "LT"), x + bound, rest))


@lower("hardshrink_backward", "softshrink_backward", promote=Promotion.DEFAULT)
def shrink_backward(g: Value, x: Value, bound: Factor) -> Value:
    return hlo.select(hlo.or_(hlo.compare(x, bound, "GT"), hlo.compare(x, -bound, "LT")), g, _zero(g))


# ---- exponential units ----------------------------------------------------------------------------------------------
@lower("elu", promote=Promotion.DEFAULT)
def elu(x: Value, alpha: Factor = 1, scale: Factor = 1, input_scale: Factor = 1) -> Value:
    below = hlo.exponential_minus_one(x * input_scale) * (alpha * scale)
    return hlo.select(x < 0.0, below, x * scale)


@lower("elu_backward", promote=Promotion.DEFAULT)
def elu_backward(g: Value, alpha: Factor, scale: Factor, input_scale: Factor, is_result: bool, x: Value) -> Value:
    """``x`` is the result of the forward call if ``is_result``, else its input."""
    slope = x + alpha * scale if is_result else hlo.exponential(x * input_scale) * (alpha * scale)
    return hlo.select(x > 0.0, g * scale, g * input_scale * slope)


@lower("celu", promote=Promotion.DEFAULT)
def celu(x: Value, alpha: Factor = 1.0) -> Value:
    return elu(x, alpha, 1, 1.0 / alpha)


@lower("softplus", promote=Promotion.DEFAULT)
def softplus(x: Value, beta: Factor = 1, limit: Factor = 20) -> Value:
    """log(1 + exp(beta x)) / beta, and ``x`` itself beyond ``limit``."""
    scaled = x * beta
    return hlo.select(hlo.compare(scaled, limit, "GT"), x, hlo.log_plus_one(hlo.exponential(scaled)) / beta)


@lower("softplus_backward", promote=Promotion.DEFAULT)
def softplus_backward(g: Value, x: Value, beta: Factor, limit: Factor) -> Value:
    scaled = x * beta
    return hlo.select(hlo.compare(scaled, limit, "GT"), g, g * hlo.logistic(scaled))


@lower("log_sigmoid_forward", promote=Promotion.DEFAULT)
def log_sigmoid(x: Value, *, result: list[Type]) -> list[Value]:
    """-log(1 + exp(-x)), and exp(-|x|) for the derivative where PyTorch asks for it."""
    decay = hlo.exponential(-hlo.abs_(x))
    value = hlo.minimum(x, 0.0) - hlo.log_plus_one(decay)
    buffer = decay if result[1].shape == x.shape else hlo.constant(0, x.dtype, result[1].shape)
    return [hlo.convert(v, t.dtype) for v, t in zip((value, buffer), result, strict=True)]


@lower("log_sigmoid_backward")
def log_sigmoid_backward(g: Value, x: Value, buffer: Value) -> Value:
    wide = compute_dtype(x.dtype)
    return hlo.convert(hlo.convert(g, wide) * hlo.logistic(-hlo.convert(x, wide)), x.dtype)


# ---- smooth gates ---------------------------------------------------------------------------------------------------
@lower("silu", promote=Promotion.DEFAULT)
def silu(x: Value) -> Value:
    return x * hlo.logistic(x)


@lower("silu_backward", promote=Promotion.DEFAULT)
def silu_backward(g: Value, x: Value) -> Value:
    s = hlo.logistic(x)
    return g * conjugate(s * (1.0 + x * (1.0 - s)))


@lower("mish", promote=Promotion.DEFAULT)
def mish(x: Value) -> Value:
    return x * hlo.tanh(hlo.log_plus_one(hlo.exponential(x)))


@lower("mish_backward", promote=Promotion.DEFAULT)
def mish_backward(g: Value, x: Value) -> Value:
    t = hlo.tanh(hlo.log_plus_one(hlo.exponential(x)))
    return g * (t + x * hlo.logistic(x) * (1.0 - t * t))


_CUBE = 0.044715  # of the tanh approximation, Hendrycks and Gimpel 2016


@lower("gelu", promote=Promotion.DEFAULT)
def gelu(x: Value, *, approximate: str = "none") -> Value:
    if approximate == "tanh":
        inner = math.sqrt(2 / math.pi) * (x + _CUBE * x * x * x)
        return 0.5 * x * (1.0 + hlo.tanh(inner))
    return x * 0.5 * (1.0 + hlo.erf(x * math.sqrt(0.5)))


@lower("gelu_backward", promote=Promotion.DEFAULT)
def gelu_backward(g: Value, x: Value, *, approximate: str = "none") -> Value:
    if approximate == "tanh":
        t = hlo.tanh(math.sqrt(2 / math.pi) * (x + _CUBE * x * x * x))
        inner = math.sqrt(2 / math.pi) * (1.0 + 3 * _CUBE * x * x)
        return g * (0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * inner)
    cdf = 0.5 * (1.0 + hlo.erf(x * math.sqrt(0.5)))
    density = hlo.exponential(x * x * -0.5) / math.sqrt(2 * math.pi)
    return g * (cdf + x * density)


def _halves(x: Value, dim: int) -> tuple[Value, Value]:
    dim %= x.ndim
    middle = x.shape[dim] // 2
    return hlo.slice_dim(x, dim, 0, middle), hlo.slice_dim(x, dim, middle, x.shape[dim])


@lower("glu", promote=Promotion.DEFAULT)
def glu(x: Value, dim: int = -1) -> Value:
    value, gate = _halves(x, dim)
    return value * hlo.logistic(gate)


@lower("glu_backward")
def glu_backward(g: Value, x: Value, dim: int) -> Value:
    wide = compute_dtype(x.dtype)
    value, gate = _halves(hlo.convert(x, wide), dim)
    s = hlo.logistic(gate)
    g = hlo.convert(g, wide)
    return hlo.convert(hlo.concatenate([g * s, g * value * s * (1.0 - s)], dim % x.ndim), x.dtype)


# ---- sigmoid, tanh, logit -------------------------------------------------------------------------------------------
@lower("sigmoid_backward", promote=Promotion.DEFAULT)
def sigmoid_backward(g: Value, y: Value) -> Value:
    return g * conjugate((1 - y) * y) if y.dtype.is_complex else g * (1 - y) * y


@lower("tanh_backward", promote=Promotion.DEFAULT)
def tanh_backward(g: Value, y: Value) -> Value:
    return g * conjugate(1 - y * y)


@lower("logit", promote=Promotion.INT_TO_FLOAT)
def logit(x: Value, eps: Scalar | None = None) -> Value:
    """log(x / (1 - x)), with ``x`` first clamped to [eps, 1 - eps]."""
    if eps is not None:
        eps = as_value(eps, x.dtype, x.shape)
        x = hlo.select(x < eps, eps, hlo.select(x > 1.0 - eps, 1.0 - eps, x))
    return hlo.log(x / (1.0 - x))


@lower("logit_backward", promote=Promotion.DEFAULT)
def logit_backward(g: Value, x: Value, eps: Scalar | None = None) -> Value:
    low = hlo.full_like(x, 0) if eps is None else as_value(eps, x.dtype, x.shape)
    inside = hlo.and_(x >= low, x <= 1.0 - low)
    return hlo.select(inside, g / (x * (1.0 - x)), hlo.full_like(x, math.nan if eps is None else 0.0))
