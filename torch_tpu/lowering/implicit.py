"""Gradients of gamma and Dirichlet samples with respect to their shapes.

A sample ``x`` of a distribution function ``F(x; a)`` moves with ``a`` by ``dx/da = -(dF/da) / (dF/dx)`` (Figurnov et
al. 2018). ATen approximates it by regions (``aten/src/ATen/native/Distributions.h``): Taylor series, Rice's saddle
point, and rational functions. The same approximations are used here; the saddle points are computed in float64, since
they cancel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from torch_tpu.lowering.common import compute_dtype
from torch_tpu.lowering.registry import lower
from torch_tpu.stablehlo import Value
from torch_tpu.stablehlo import ops as hlo


def _polynomial(x: Value, coefficients: Sequence[float | Value]) -> Value:
    """Horner's scheme, constant term first."""
    total = coefficients[-1]
    for c in reversed(coefficients[:-1]):
        total = x * total + c
    return total  # type: ignore[return-value]


def _number(x: Value) -> Value:
    """Zero for NaN."""
    return hlo.select(hlo.compare(x, x, "EQ"), x, hlo.full_like(x, 0.0))


def _wide(function: Callable[..., Value], *xs: Value) -> Value:
    """``function`` in float64."""
    return hlo.convert(function(*(hlo.convert(x, torch.float64) for x in xs)), xs[0].dtype)


def _inverse_three_halves(x: Value) -> Value:
    """``x^(-3/2)``."""
    return 1.0 / (x * hlo.sqrt(x))


# ---- gamma ----------------------------------------------------------------------------------------------------------
#: exp(p/q) approximates the gradient; rows are powers of log(x/alpha), columns the coefficients of p, then of q.
_GAMMA = (
    (0.16009398, -0.094634809, 0.025146376, -0.0030648343, 1.0, 0.32668115, 0.10406089, 0.0014179084),
    (0.53487893, 0.1298071, 0.065735949, -0.0015649758, 0.16639465, 0.020070113, -0.0035938915, -0.00058392623),
    (0.040121004, -0.0065914022, -0.0026286047, -0.0013441777, 0.017050642, -0.0021309326, 8.5092367e-4, -1.5247877e-7),
)  # fmt: skip


def _gamma_small(alpha: Value, x: Value) -> Value:
    """The series of the incomplete gamma function, for small ``x``."""
    term, below = hlo.full_like(x, 1.0), alpha
    series, slope = 1.0 / below, 1.0 / (below * below)
    for i in range(1, 6):
        term, below = term * x * (-1 / i), below + 1.0
        series, slope = series + term / below, slope + term / (below * below)
    power = hlo.power(x, alpha)
    density = hlo.power(x, alpha - 1.0) * hlo.exponential(-x)
    moved = (hlo.log(x) - hlo.digamma(alpha)) * power * series - power * slope
    return _number(-moved / density)


def _gamma_large(alpha: Value, x: Value) -> Value:
    """Rice's saddle point, for large ``alpha``; near the mean, where it is singular, its expansion."""
    square = alpha * alpha
    first = 1.0 + 24.0 * alpha * (1.0 + 12.0 * alpha)
    second = 1440.0 * square + 6.0 * x * (53.0 - 120.0 * x) - 65.0 * x * x / alpha + alpha * (107.0 + 3600.0 * x)
    near = first * second / (1244160.0 * square * square)
    root, ratio, gap = hlo.sqrt(8.0 * alpha), hlo.log(x / alpha), alpha - x
    third = _inverse_three_halves(x - alpha - alpha * ratio)
    both = root / gap + hlo.select(x < alpha, -third, third)
    total = ratio * both - hlo.sqrt(2.0 / alpha) * (alpha + x) / (gap * gap)
    stirling = 1.0 + (1.0 + (1 / 24) / alpha) * (1 / 12) / alpha
    far = -stirling * x * total / root
    return hlo.select(hlo.and_(hlo.compare(x, 0.9 * alpha, "GE"), x <= 1.1 * alpha), near, far)


def _gamma_between(alpha: Value, x: Value) -> Value:
    u, v = hlo.log(x / alpha), hlo.log(alpha)
    c = [_polynomial(u, column) for column in zip(*_GAMMA, strict=True)]
    return hlo.exponential(_polynomial(v, c[:4]) / _polynomial(v, c[4:]))


@lower("_standard_gamma_grad")
def standard_gamma_grad(alpha: Value, sample: Value) -> Value:
    a, x = (hlo.convert(v, compute_dtype(v.dtype)) for v in (alpha, sample))
    rest = hlo.select(a > 8.0, _wide(_gamma_large, a, x), _gamma_between(a, x))
    return hlo.convert(hlo.select(x < 0.8, _gamma_small(a, x), rest), alpha.dtype)


# ---- Dirichlet ------------------------------------------------------------------------------------------------------
#: p (first) and q as polynomials in log(x), log(alpha/x) and log(total) - log(alpha/x), in this order of nesting.
_BETA = (
    (((1.003668233, -0.01061107488, -0.0657888334, 0.01201642863),
      (0.6336835991, -0.3557432599, 0.05486251648, -0.001465281033),
      (-0.03276231906, 0.004474107445, 0.002429354597, -0.0001557569013)),
     ((0.221950385, -0.3187676331, 0.01799915743, 0.01074823814),
      (-0.2951249643, 0.06219954479, 0.01535556598, 0.001550077057),
      (0.02155310298, 0.004170831599, 0.001292462449, 6.976601077e-05)),
     ((-0.05980841433, 0.008441916499, 0.01085618172, 0.002319392565),
      (0.02911413504, 0.01400243777, -0.002721828457, 0.000751041181),
      (0.005900514878, -0.001936558688, -9.495446725e-06, 5.385558597e-05))),
    (((1.0, -0.02924021934, -0.04438342661, 0.007285809825),
      (0.6357567472, -0.3473456711, 0.05454656494, -0.002407477521),
      (-0.03301322327, 0.004845219414, 0.00231480583, -0.0002307248149)),
     ((0.5925320577, -0.1757678135, 0.01505928619, 0.000564515273),
      (0.1014815858, -0.06589186703, 0.01272886114, -0.0007316646956),
      (-0.007258481865, 0.001096195486, 0.0003934994223, -4.12701925e-05)),
     ((0.06469649321, -0.0236701437, 0.002902096474, -5.896963079e-05),
      (0.001925008108, -0.002869809258, 0.0008000589141, -6.063713228e-05),
      (-0.0003477407336, 6.959756487e-05, 1.097287507e-05, -1.650964693e-06))),
)  # fmt: skip


def _beta_alpha_small(x: Value, alpha: Value, beta: Value) -> Value:
    """The gradient of a beta sample by ``alpha``, by a series in ``x``."""
    factor = hlo.digamma(alpha) - hlo.digamma(alpha + beta) - hlo.log(x)
    term = hlo.full_like(x, 1.0)
    series = (factor + 1.0 / alpha) / alpha
    for i in range(1, 11):
        term, below = term * (float(i) - beta) * x * (1 / i), alpha + float(i)
        series = series + term / below * (factor + 1.0 / below)
    return _number(x * hlo.power(1.0 - x, -beta) * series)


def _beta_beta_small(x: Value, alpha: Value, beta: Value) -> Value:
    """The gradient of a beta sample by ``beta``, by a series in ``x``."""
    factor = hlo.digamma(alpha + beta) - hlo.digamma(beta)
    one = hlo.full_like(x, 1.0)
    term, product, derivative, series = one, one, hlo.full_like(x, 0.0), factor / alpha
    for i in range(1, 9):
        term = term * x * (-1 / i)
        derivative = derivative * (beta - float(i)) + product
        product = product * (beta - float(i))
        series = series + term / (alpha + float(i)) * (derivative + factor * product)
    return _number(-hlo.power(1.0 - x, 1.0 - beta) * series)


def _stirling(a: Value) -> Value:
    return 1.0 + (1 / 12) / a + (1 / 288) / (a * a)


def _beta_near_mean(x: Value, alpha: Value, beta: Value) -> Value:
    total, b2, y = alpha + beta, beta * beta, 1.0 - x
    inner = 8.0 * y * (135.0 * beta - 11.0)
    inner = (453.0 + 1620.0 * beta * y - 455.0 * x) * beta + alpha * inner
    inner = 3.0 * (59.0 + 180.0 * beta - 90.0 * x) * b2 + alpha * inner
    inner = (43.0 + 20.0 * (16.0 + 27.0 * beta) * x) * b2 * beta + alpha * inner
    inner = 47.0 * x * b2 * b2 + alpha * inner
    scale = (1.0 + 12.0 * alpha) * (1.0 + 12.0 * beta) / (total * total)
    return scale / y * inner / (12960.0 * alpha * alpha * alpha * b2 * (1.0 + 12.0 * total))


def _beta_large(x: Value, alpha: Value, beta: Value) -> Value:
    """Rice's saddle point, for large ``alpha`` and ``beta``; near the mean, where it is singular, its expansion."""
    total = alpha + beta
    mean = alpha / total
    spread = 0.1 * hlo.sqrt(alpha * beta / (total + 1.0)) / total
    rice = _stirling(alpha) * _stirling(beta) / _stirling(total)
    off = alpha * (x - 1.0) + beta * x
    one = 2.0 * alpha * alpha * (x - 1.0) + alpha * beta * (x - 1.0) - x * beta * beta
    one = one / (hlo.sqrt(2.0 * alpha / beta) * total * hlo.sqrt(total) * off * off)
    two = 0.5 * hlo.log(alpha / (total * x))
    three = hlo.sqrt(8.0 * alpha * beta / total) / off
    four = _inverse_three_halves(beta * hlo.log(beta / (total * (1.0 - x))) + alpha * hlo.log(alpha / (total * x)))
    sum_ = one + two * (three + hlo.select(x < mean, four, -four))
    far = -rice * x / hlo.sqrt(2.0 * alpha * beta / total) * sum_
    near = hlo.and_(hlo.compare(x, mean - spread, "GE"), x <= mean + spread)
    return hlo.select(near, _beta_near_mean(x, alpha, beta), far)


def _beta_between(x: Value, alpha: Value, total: Value) -> Value:
    """A rational correction of an analytic approximation."""
    u = hlo.log(x)
    a = hlo.log(alpha) - u
    b = hlo.log(total) - a
    p, q = (
        _polynomial(u, [_polynomial(a, [_polynomial(b, c) for c in row]) for row in table]) for table in _BETA
    )  # fmt: skip
    return p / q * x * (hlo.digamma(total) - hlo.digamma(alpha)) / (total - alpha)


@lower("_dirichlet_grad")
def dirichlet_grad(x: Value, alpha: Value, total: Value) -> Value:
    dtype = x.dtype
    x, alpha, total = (hlo.convert(v, compute_dtype(dtype)) for v in (x, alpha, total))
    beta = total - alpha
    edge = total * x * (1.0 - x)
    low = hlo.and_(x <= 0.5, edge < 2.5)
    high = hlo.and_(hlo.compare(x, 0.5, "GE"), edge < 0.75)
    large = hlo.and_(alpha > 6.0, beta > 6.0)
    result = hlo.select(large, _wide(_beta_large, x, alpha, beta), _beta_between(x, alpha, total))
    result = hlo.select(high, -_beta_beta_small(1.0 - x, beta, alpha), result)
    return hlo.convert(hlo.select(low, _beta_alpha_small(x, alpha, beta), result), dtype)
