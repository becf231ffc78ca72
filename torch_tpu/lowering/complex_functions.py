"""Elementary functions of complex numbers, with C's values (Annex G) at infinities, NaN and on both sides of a cut.

XLA's expansions are right inside the plane. What they lose is the sign of a zero, which says on which side of a branch
cut a number lies, and what infinity times zero means. Symmetry gives the former: each of these functions is known by
its values where both parts are positive.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from torch_tpu.stablehlo import Value
from torch_tpu.stablehlo import ops as hlo

Unary = Callable[[Value], Value]


def _is(x: Value, number: float) -> Value:
    return hlo.compare(x, number, "EQ")


def _negative(x: Value) -> Value:
    """True for negative numbers and -0."""
    if x.dtype == torch.float64:
        return hlo.or_(x < 0.0, hlo.and_(_is(x, 0.0), (1.0 / x) < 0.0))
    return hlo.bitcast_convert(x, torch.int32) < 0


def _signed(size: Value, sign: Value) -> Value:
    return hlo.select(_negative(sign), -size, size)


def mirrored(f: Unary) -> Unary:
    """``f`` by its values in the upper half plane: the conjugate number has the conjugate value."""

    def function(z: Value) -> Value:
        w = f(hlo.complex_(hlo.real(z), hlo.abs_(hlo.imag(z))))
        return hlo.complex_(hlo.real(w), _signed(hlo.imag(w), hlo.imag(z)))

    return function


def odd(f: Unary) -> Unary:
    """``f`` by its values in the first quadrant: odd besides."""

    def function(z: Value) -> Value:
        w = f(hlo.complex_(hlo.abs_(hlo.real(z)), hlo.abs_(hlo.imag(z))))
        return hlo.complex_(_signed(hlo.real(w), hlo.real(z)), _signed(hlo.imag(w), hlo.imag(z)))

    return function


def _times_i(z: Value) -> Value:
    return hlo.complex_(-hlo.imag(z), hlo.real(z))


def _by_i(z: Value) -> Value:
    return hlo.complex_(hlo.imag(z), -hlo.real(z))


def _endless(z: Value) -> Value:
    """True where the real part is infinite and the imaginary part has no direction."""
    return hlo.and_(_is(hlo.abs_(hlo.real(z)), math.inf), hlo.not_(hlo.is_finite(hlo.imag(z))))


def exponential(z: Value) -> Value:
    """A real number stays real; e^-inf is 0 in every direction."""
    w, x, y = hlo.exponential(z), hlo.real(z), hlo.imag(z)
    size = hlo.exponential(x)
    re = hlo.select(_endless(z), size, hlo.real(w))
    im = hlo.select(hlo.and_(_endless(z), x < 0.0), 0.0, hlo.select(_is(y, 0.0), y, hlo.imag(w)))
    return hlo.complex_(re, im)


def exponential_minus_one(z: Value) -> Value:
    w, y = hlo.exponential_minus_one(z), hlo.imag(z)
    return hlo.complex_(hlo.real(w), hlo.select(_is(y, 0.0), y, hlo.imag(w)))


def log(z: Value) -> Value:
    """The magnitude is infinite if one part is, whatever the other."""
    w = hlo.log(z)
    infinite = hlo.or_(_is(hlo.abs_(hlo.real(z)), math.inf), _is(hlo.abs_(hlo.imag(z)), math.inf))
    return hlo.complex_(hlo.select(infinite, math.inf, hlo.real(w)), hlo.imag(w))


@mirrored
def sqrt(z: Value) -> Value:
    w, x, y = hlo.sqrt(z), hlo.real(z), hlo.imag(z)
    above = _is(y, math.inf)
    re = hlo.select(hlo.or_(above, _is(x, math.inf)), math.inf, hlo.real(w))
    return hlo.complex_(re, hlo.select(hlo.or_(above, _is(x, -math.inf)), math.inf, hlo.imag(w)))


def rsqrt(z: Value) -> Value:
    return hlo.divide(1, sqrt(z))


def sinh(z: Value) -> Value:
    x, y = hlo.real(z), hlo.imag(z)
    still = hlo.or_(hlo.and_(_is(x, 0.0), hlo.not_(hlo.is_finite(y))), _endless(z))
    re = hlo.select(still, x, hlo.sinh(x) * hlo.cosine(y))
    return hlo.complex_(re, hlo.select(_is(y, 0.0), y, hlo.cosh(x) * hlo.sine(y)))


def cosh(z: Value) -> Value:
    x, y = hlo.real(z), hlo.imag(z)
    re = hlo.select(_endless(z), hlo.abs_(x), hlo.cosh(x) * hlo.cosine(y))
    zero = _signed(_signed(hlo.full_like(x, 0), x), y)
    flat = hlo.or_(_is(x, 0.0), _is(y, 0.0))
    return hlo.complex_(re, hlo.select(flat, zero, hlo.sinh(x) * hlo.sine(y)))


@odd
def tanh(z: Value) -> Value:
    w, x, y = hlo.tanh(z), hlo.real(z), hlo.imag(z)
    far = _is(x, math.inf)
    re = hlo.select(far, 1.0, hlo.select(_is(x, 0.0), x, hlo.real(w)))
    flat = hlo.or_(_is(y, 0.0), hlo.and_(far, hlo.not_(hlo.is_finite(y))))
    return hlo.complex_(re, hlo.select(flat, 0.0, hlo.imag(w)))


def sine(z: Value) -> Value:
    return _by_i(sinh(_times_i(z)))


def cosine(z: Value) -> Value:
    return cosh(_times_i(z))


def tan(z: Value) -> Value:
    return _by_i(tanh(_times_i(z)))


def _lost(z: Value) -> Value:
    """True where a part is NaN and no part is infinite."""
    x, y = hlo.real(z), hlo.imag(z)
    nan = hlo.or_(hlo.compare(x, x, "NE"), hlo.compare(y, y, "NE"))
    return hlo.and_(nan, hlo.not_(hlo.or_(_is(hlo.abs_(x), math.inf), _is(hlo.abs_(y), math.inf))))


@mirrored
def acos(z: Value) -> Value:
    """Above the real axis the imaginary part is not positive."""
    w = hlo.acos(z)
    re = hlo.select(_is(hlo.real(z), 0.0), math.pi / 2, hlo.real(w))
    return hlo.complex_(re, hlo.select(_lost(z), math.nan, -hlo.abs_(hlo.imag(w))))


@mirrored
def acosh(z: Value) -> Value:
    """As i acos(z) above the real axis: there its real part is not negative."""
    return _times_i(acos(z))


@odd
def asin(z: Value) -> Value:
    w, x = hlo.asin(z), hlo.real(z)
    return hlo.complex_(hlo.select(_is(x, 0.0), x, hlo.real(w)), hlo.select(_lost(z), math.nan, hlo.imag(w)))


def asinh(z: Value) -> Value:
    return _by_i(asin(_times_i(z)))


@odd
def atanh(z: Value) -> Value:
    w, x, y = hlo.atanh(z), hlo.real(z), hlo.imag(z)
    im = hlo.select(_lost(z) | hlo.compare(y, y, "NE"), math.nan, hlo.imag(w))
    return hlo.complex_(hlo.select(_is(x, 0.0), x, hlo.real(w)), im)


def atan(z: Value) -> Value:
    return _by_i(atanh(_times_i(z)))


def sgn(z: Value, size: Value) -> Value:
    """``z / size``, part by part; 0 at 0."""
    parts = [hlo.select(_is(size, 0.0), v, v / size) for v in (hlo.real(z), hlo.imag(z))]
    return hlo.complex_(*parts)
