"""Element-wise arithmetic and elementary functions.

Comparisons, logic and selection are in ``comparison.py``, activations in ``activation.py``, the special functions in
``special.py``, complex numbers in ``complex.py``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch

from torch_tpu.lowering import complex_functions, meta
from torch_tpu.lowering.common import (
    Number,
    Scalar,
    ScalarOperand,
    as_value,
    by_number,
    compute_dtype,
    for_cpu,
    magnitude,
)
from torch_tpu.lowering.registry import Promotion, lower
from torch_tpu.stablehlo import Type, Value
from torch_tpu.stablehlo import ops as hlo

Unary = Callable[[Value], Value]
Binary = Callable[[Value, Value], Value]


# ---- shared definitions ---------------------------------------------------------------------------------------------
def is_inexact(x: Value) -> bool:
    return x.dtype.is_floating_point or x.dtype.is_complex


def is_unsigned(x: Value) -> bool:
    return x.dtype == torch.bool or (not is_inexact(x) and not x.dtype.is_signed)


def equals(x: Value, y: Value | float) -> Value:
    return hlo.compare(x, y, "EQ")


def differs(x: Value, y: Value | float) -> Value:
    return hlo.compare(x, y, "NE")


def is_nan(x: Value) -> Value:
    return differs(x, x)


def signbit(x: Value) -> Value:
    """True for negative numbers and -0.0."""
    if x.dtype == torch.float64:  # a TPU has no bit pattern of a double
        return hlo.or_(x < 0.0, hlo.and_(equals(x, 0.0), (1.0 / x) < 0.0))
    if x.dtype.is_floating_point:
        return hlo.bitcast_convert(x, {4: torch.int32, 2: torch.int16, 1: torch.int8}[x.dtype.itemsize]) < 0
    return hlo.full_like(hlo.compare(x, x, "EQ"), False) if is_unsigned(x) else x < 0


def square(x: Value) -> Value:
    return x * x


def copysign(x: Value, y: Value) -> Value:
    return hlo.select(differs(signbit(x), signbit(y)), -x, x)


def polynomial(x: Value, coefficients: tuple[float, ...] | list[float]) -> Value:
    """Horner's rule, highest power first."""
    total = hlo.full_like(x, coefficients[0])
    for c in coefficients[1:]:
        total = total * x + c
    return total


# ---- unary ----------------------------------------------------------------------------------------------------------
def erfinv(x: Value) -> Value:
    """XLA's of float32 is off by 50 roundings where ``x * x`` rounds to almost 1; on CPU it is rounded once."""
    if x.dtype != torch.float32 or not for_cpu():
        return hlo.erf_inv(x)
    return hlo.convert(hlo.erf_inv(hlo.convert(x, torch.float64)), torch.float32)


def absolute(x: Value) -> Value:
    return x if is_unsigned(x) else magnitude(x)


def sign(x: Value) -> Value:
    """-1, 0 or 1. PyTorch's sign of NaN is 0, XLA's is NaN."""
    if x.dtype == torch.bool:
        return x
    positive = hlo.select(x > 0, hlo.full_like(x, 1), hlo.full_like(x, 0))
    return positive if is_unsigned(x) else hlo.select(x < 0, hlo.full_like(x, -1), positive)


def sgn(x: Value) -> Value:
    """``z / |z|``, 0 at 0; :func:`sign` for real numbers."""
    return complex_functions.sgn(x, magnitude(x)) if x.dtype.is_complex else sign(x)


def trunc(x: Value) -> Value:
    return hlo.select(x < 0.0, hlo.ceil(x), hlo.floor(x))


def _on_floats(f: Unary) -> Unary:
    """``f`` of floats; integers are left alone."""
    return lambda x: f(x) if is_inexact(x) else x


def _power_of_two(n: Value) -> Value:
    """2**n for whole ``n`` in the normal exponents of float32, without rounding."""
    bits = hlo.shift_left(hlo.convert(n, torch.int32) + 127, hlo.constant(23, torch.int32, n.shape))
    return hlo.bitcast_convert(bits, torch.float32)


def _scaled_parts(z: Value, factor: float) -> Value:
    """A complex number times a real one, part by part: no NaN from 0 times infinity."""
    return hlo.complex_(hlo.real(z) * factor, hlo.imag(z) * factor)


def exp2(x: Value) -> Value:
    """2**x, exact for whole ``x``: a power of two scales exp of the rest, which is at most 1/2."""
    if x.dtype.is_complex:
        return complex_functions.exponential(_scaled_parts(x, math.log(2)))
    n = hlo.clamp(-1076.0, hlo.round_nearest_even(x), 1026.0)
    rest = hlo.exponential((x - n) * math.log(2))
    # Half of the exponent at a time, so that neither factor overflows before the product does.
    part = hlo.clamp(-250.0, n, 250.0) if x.dtype == torch.float32 else n
    steps = 2 if x.dtype == torch.float32 else 9
    for i in range(steps):
        take = hlo.floor(part / float(steps - i))
        rest = rest * hlo.convert(_power_of_two(take), x.dtype)
        part = part - take
    return hlo.select(is_nan(x), x, rest)


def _exact_log(base: int, exact: int) -> Unary:
    """Logarithm in ``base`` that is exact at the powers of ``base`` up to ``base**exact``: floor(log2(8)) must be 3."""

    def log(x: Value) -> Value:
        if x.dtype.is_complex:
            return _scaled_parts(complex_functions.log(x), 1 / math.log(base))
        y = hlo.log(x) / math.log(base)
        n = hlo.round_nearest_even(y)
        inside = hlo.clamp(-126.0, n, 126.0)
        if base == 2:
            return hlo.select(equals(hlo.convert(_power_of_two(inside), x.dtype), x), n, y)
        power = hlo.full_like(x, 1)
        for i in range(exact.bit_length()):  # base**n by the bits of n
            bit = hlo.remainder(hlo.floor(n / float(1 << i)), 2.0)
            power = hlo.select(equals(bit, 1.0), power * float(base ** (1 << i)), power)
        whole = hlo.and_(hlo.and_(n > 0.0, n < float(exact + 1)), equals(power, x))
        return hlo.select(whole, n, y)

    return log


def _elementary(name: str) -> Unary:
    """StableHLO's function ``name`` of real numbers, and that of :mod:`complex_functions` of complex ones."""
    of_real, of_complex = getattr(hlo, name), getattr(complex_functions, name)
    return lambda x: of_complex(x) if x.dtype.is_complex else of_real(x)


_sine = _elementary("sine")


def sinc(x: Value) -> Value:
    """sin(pi x) / (pi x), 1 at 0."""
    angle = x * math.pi
    return hlo.select(equals(x, 0.0), hlo.full_like(x, 1), _sine(angle) / angle)


#: Functions of floats and complex numbers; integers are converted to the default dtype.
FLOAT_UNARY: dict[str, Unary] = {
    "acos": _elementary("acos"),
    "acosh": _elementary("acosh"),
    "asin": _elementary("asin"),
    "asinh": _elementary("asinh"),
    "atan": _elementary("atan"),
    "atanh": _elementary("atanh"),
    "cos": _elementary("cosine"),
    "cosh": _elementary("cosh"),
    "deg2rad": lambda x: x * (math.pi / 180),
    "erf": hlo.erf,
    "erfc": hlo.erfc,
    "erfinv": erfinv,
    "exp": _elementary("exponential"),
    "exp2": exp2,
    "expm1": _elementary("exponential_minus_one"),
    "log": _elementary("log"),
    "log10": _exact_log(10, 10),
    "log1p": hlo.log_plus_one,
    "log2": _exact_log(2, 126),
    "rad2deg": lambda x: x * (180 / math.pi),
    "reciprocal": lambda x: hlo.divide(1, x),
    "rsqrt": _elementary("rsqrt"),
    "sigmoid": hlo.logistic,
    "sin": _sine,
    "sinc": sinc,
    "sinh": _elementary("sinh"),
    "sqrt": _elementary("sqrt"),
    "tan": _elementary("tan"),
    "tanh": _elementary("tanh"),
}

#: Functions that keep the dtype.
UNARY: dict[str, Unary] = {
    "ceil": _on_floats(hlo.ceil),
    "floor": _on_floats(hlo.floor),
    "frac": lambda x: x - trunc(x),
    "neg": hlo.negate,
    "round": _on_floats(hlo.round_nearest_even),
    "sgn": sgn,
    "sign": sign,
    "square": square,
    "trunc": _on_floats(trunc),
}

for _name, _function in FLOAT_UNARY.items():
    lower(_name, promote=Promotion.INT_TO_FLOAT)(_function)
for _name, _function in UNARY.items():
    lower(_name, promote=Promotion.DEFAULT)(_function)
lower("abs", promote=Promotion.COMPLEX_TO_FLOAT)(absolute)


@lower("round.decimals", promote=Promotion.DEFAULT)
def round_decimals(x: Value, *, decimals: int) -> Value:
    if not is_inexact(x):
        return x
    scale = 10.0 ** abs(decimals)
    if decimals < 0:
        return hlo.round_nearest_even(x / scale) * scale
    return hlo.round_nearest_even(x * scale) / scale


@lower("nan_to_num", promote=Promotion.NO_OPMATH)
def nan_to_num(x: Value, nan: Value | None, posinf: Value | None, neginf: Value | None) -> Value:
    """NaN to ``nan`` or 0, infinities to ``posinf`` and ``neginf`` or the largest finite numbers."""
    if x.dtype.is_complex:
        numbers = [None if v is None else hlo.real(v) for v in (nan, posinf, neginf)]
        return hlo.complex_(nan_to_num(hlo.real(x), *numbers), nan_to_num(hlo.imag(x), *numbers))
    if not x.dtype.is_floating_point:
        return x
    limit = torch.finfo(x.dtype).max
    defaults = (0.0, limit, -limit)
    zero, high, low = (d if v is None else v for v, d in zip((nan, posinf, neginf), defaults, strict=True))
    finite = hlo.select(equals(x, math.inf), *_pair(high, x))
    finite = hlo.select(equals(x, -math.inf), *_pair(low, finite))
    return hlo.select(is_nan(x), *_pair(zero, finite))


def _pair(chosen: Value | float, other: Value) -> tuple[Value, Value]:
    return chosen if isinstance(chosen, Value) else hlo.full_like(other, chosen), other


@lower("frexp.Tensor")
def frexp(x: Value) -> tuple[Value, Value]:
    """Mantissa in [1/2, 1) and exponent, from the bits; 0, inf and NaN are their own mantissa with exponent 0."""
    y = hlo.convert(x, torch.float32) if x.dtype.itemsize == 2 else x
    integer, fraction, bias = (torch.int32, 23, 126) if y.dtype == torch.float32 else (torch.int64, 52, 1022)
    tiny = hlo.abs_(y) < torch.finfo(y.dtype).tiny
    bits = hlo.bitcast_convert(hlo.select(tiny, y * 2.0**64, y), integer)
    width = hlo.constant(fraction, integer, y.shape)
    field = (1 << (y.dtype.itemsize * 8 - 1 - fraction)) - 1
    raised = hlo.shift_right_logical(bits, width) & field
    exponent = raised - bias - hlo.select(tiny, hlo.full_like(raised, 64), hlo.full_like(raised, 0))
    half = hlo.constant(bias << fraction, integer, y.shape)
    mantissa = hlo.bitcast_convert((bits & ~(field << fraction)) | half, y.dtype)
    plain = hlo.or_(equals(y, 0.0), hlo.not_(hlo.is_finite(y)))
    exponent = hlo.select(plain, hlo.full_like(exponent, 0), exponent)
    return hlo.convert(hlo.select(plain, y, mantissa), x.dtype), hlo.convert(exponent, torch.int32)


# ---- arithmetic -----------------------------------------------------------------------------------------------------
def scaled(x: Value, factor: Scalar) -> Value:
    """``factor * x`` for a number, a run-time scalar or a 0-d value."""
    if not isinstance(factor, Value) and factor == 1:
        return x
    return x * as_value(factor, x.dtype, x.shape)


@lower("add.Tensor", promote=Promotion.DEFAULT, once=True)
def add(x: Value, y: Value, *, alpha: Scalar = 1) -> Value:
    return hlo.add(x, scaled(y, alpha))


@lower("sub.Tensor", promote=Promotion.DEFAULT, once=True)
def sub(x: Value, y: Value, *, alpha: Scalar = 1) -> Value:
    return hlo.subtract(x, scaled(y, alpha))


@lower("rsub.Tensor", promote=Promotion.DEFAULT, once=True)
def rsub(x: Value, y: Value, *, alpha: Scalar = 1) -> Value:
    return hlo.subtract(y, scaled(x, alpha))


for _name, _rule in {"add.Scalar": add, "sub.Scalar": sub, "rsub.Scalar": rsub}.items():
    lower(_name, promote=Promotion.DEFAULT, promoted=("self", "other"))(
        lambda x, y, alpha=1, _rule=_rule: _rule(x, _number(y, x), alpha=alpha)
    )


def _number(y: Scalar, like: Value) -> Value:
    return as_value(y, like.dtype, like.shape)


@lower("mul.Tensor", "mul.Scalar", promote=Promotion.DEFAULT, once=True)
def mul(x: Value, y: Value) -> Value:
    return hlo.multiply(x, y)


def _by_nonzero(operation: Binary) -> Binary:
    """Whole numbers are divided by 1 in place of 0: XLA dies of a division by 0 that it folds while it compiles."""

    def divided(x: Value, y: Value) -> Value:
        safe = y if y.dtype.is_floating_point else hlo.select(equals(y, 0), hlo.full_like(y, 1), y)
        return operation(x, safe)

    return divided


_quotient, _rest = _by_nonzero(hlo.divide), _by_nonzero(hlo.remainder)


@lower("div.Tensor", "div.Scalar", "true_divide.Tensor", "true_divide.Scalar", promote=Promotion.INT_TO_FLOAT)
def div(x: Value, y: Value) -> Value:
    return hlo.divide(x, y)


@lower("div.Tensor_mode", "div.Scalar_mode", promote=Promotion.DEFAULT)
def div_mode(x: Value, y: Value, *, rounding_mode: str | None, result: list[Type]) -> Value:
    if rounding_mode is None:
        compute = x.dtype if is_inexact(x) else result[0].dtype
        return hlo.divide(hlo.convert(x, compute), hlo.convert(y, compute))
    return div_floor(x, y) if rounding_mode == "floor" else div_trunc(x, y)


def div_trunc(x: Value, y: Value) -> Value:
    quotient = _quotient(x, y)
    return trunc(quotient) if x.dtype.is_floating_point else quotient


@lower("floor_divide", "floor_divide.Scalar", promote=Promotion.DEFAULT)
def div_floor(x: Value, y: Value) -> Value:
    """Division rounded down. Floats as CPython's ``float_floor_div``, which ATen's ``div_floor_floating`` follows."""
    if is_unsigned(x):
        return _quotient(x, y)
    rest = _rest(x, y)
    below = hlo.and_(differs(rest, 0), differs(rest < 0, y < 0))
    if not x.dtype.is_floating_point:
        quotient = _quotient(x, y)
        return hlo.select(below, quotient - 1, quotient)
    exact = (x - rest) / y
    exact = hlo.select(below, exact - 1.0, exact)
    floor = hlo.floor(exact)
    floor = hlo.select((exact - floor) > 0.5, floor + 1.0, floor)
    signed_zero = copysign(hlo.full_like(x, 0.0), x / y)
    return hlo.select(equals(y, 0.0), x / y, hlo.select(equals(exact, 0.0), signed_zero, floor))


def in_storage_dtype(rule: Binary) -> Binary:
    """For operators whose ATen kernels round a number to a half dtype before they compute in float32."""
    return lambda x, y: rule(hlo.convert(x, compute_dtype(x.dtype)), hlo.convert(y, compute_dtype(y.dtype)))


def remainder(x: Value, y: Value) -> Value:
    """The remainder with the divisor's sign (XLA's has the dividend's)."""
    rest = _rest(x, y)
    if is_unsigned(x):
        return rest
    return hlo.select(hlo.and_(differs(rest, 0), differs(rest < 0, y < 0)), rest + y, rest)


lower("remainder.Tensor", "remainder.Scalar", "remainder.Scalar_Tensor", promote=Promotion.NO_OPMATH)(
    in_storage_dtype(remainder)
)
lower("fmod.Tensor", "fmod.Scalar", promote=Promotion.NO_OPMATH)(in_storage_dtype(_rest))


@lower("addcmul", promote=Promotion.DEFAULT)
def addcmul(x: Value, a: Value, b: Value, *, value: Scalar = 1) -> Value:
    return x + scaled(a, value) * b


@lower("addcdiv", promote=Promotion.DEFAULT)
def addcdiv(x: Value, a: Value, b: Value, *, value: Scalar = 1) -> Value:
    return x + scaled(a, value) / b


@lower("lerp.Scalar", "lerp.Tensor", promote=Promotion.DEFAULT)
def lerp(x: Value, end: Value, weight: Value) -> Value:
    """``x + weight (end - x)``, written from the nearer end so that weight 1 gives ``end`` exactly."""
    weight = _number(weight, x)
    near = hlo.abs_(weight) < 0.5
    step = end - x
    return hlo.select(near, x + weight * step, end - step * (1 - weight))


# ---- powers ---------------------------------------------------------------------------------------------------------
def _integer_power(x: Value, y: Value) -> Value:
    """x**y by repeated squaring, wrapping on overflow. XLA's integer power looks at the exponent's low bits only.

    A negative exponent gives 0 but for the bases 1 and -1.
    """

    def unfinished(base: Value, rest: Value, product: Value) -> Value:
        return hlo.reduce_one(differs(rest, 0), False, range(rest.ndim), hlo.or_)

    def step(base: Value, rest: Value, product: Value) -> list[Value]:
        odd = differs(rest & 1, 0)
        halved = hlo.shift_right_logical(rest, hlo.full_like(rest, 1))
        return [base * base, halved, hlo.select(odd, product * base, product)]

    one = hlo.full_like(x, 1)
    if is_unsigned(y):
        return hlo.while_([x, y, one], unfinished, step)[2]
    unit = hlo.or_(equals(x, 1), equals(x, -1))
    negative = y < 0
    # The parity decides for the bases 1 and -1; the other bases with a negative exponent are 0.
    result = hlo.while_([x, hlo.select(negative, y & 1, y), one], unfinished, step)[2]
    return hlo.select(hlo.and_(negative, hlo.not_(unit)), hlo.full_like(x, 0), result)


def power(x: Value, y: Value) -> Value:
    if not is_inexact(x):
        return _integer_power(x, y)
    if x.dtype.is_complex:
        zero = hlo.and_(equals(x, 0), equals(y, 0))
        return hlo.select(zero, hlo.full_like(x, 1), hlo.power(x, y))
    return hlo.power(x, y)


lower("pow.Tensor_Tensor", promote=Promotion.NO_OPMATH)(in_storage_dtype(power))
lower("pow.Scalar", promote=Promotion.NO_OPMATH, meta=meta.contiguous("pow.Scalar"))(in_storage_dtype(power))


#: The exponents that ATen's CPU kernel treats apart, as they are below zero, below one, and above.
_ROOTS: dict[Number, Unary] = {0.5: _elementary("sqrt")}
_RECIPROCALS: dict[Number, Unary] = {-0.5: _elementary("rsqrt"), -1: lambda x: 1 / x, -2: lambda x: 1 / (x * x)}
_PRODUCTS: dict[Number, Unary] = {2: square, 3: lambda x: x * x * x}


def _power_meta(x: torch.Tensor, exponent: Number) -> torch.Tensor:
    """PyTorch's, which has int64 for a bool to the power of a bool."""
    both = x.dtype == torch.bool and isinstance(exponent, bool)
    return torch.empty_like(x) if both else torch.ops.aten.pow.Tensor_Scalar(x, exponent)


@lower("pow.Tensor_Scalar", promote=Promotion.DEFAULT, single=("exponent",), classes=True, meta=_power_meta)
def power_scalar(x: Value, exponent: Number | ScalarOperand, *, result: list[Type]) -> Value:
    """A power of one exponent. One that is 0 or 1 is known to be."""
    sample = exponent.sample if isinstance(exponent, ScalarOperand) else exponent
    if sample in (0, 1) and not (isinstance(sample, complex) and isinstance(exponent, ScalarOperand)):
        return x if sample == 1 else hlo.full_like(x, 1)
    if not is_inexact(x):
        return _whole_power(x, exponent)
    # Of float16 the CPU takes no roots: they differ from powers at -0 and -inf.
    roots = {} if result[0].dtype == torch.float16 else _ROOTS
    apart = roots | {n: f for n, f in _RECIPROCALS.items() if roots or n != -0.5} | _PRODUCTS
    if not isinstance(exponent, ScalarOperand):
        if exponent in apart:
            return apart[exponent](x)
        return power(x, hlo.convert(hlo.constant(exponent, result[0].dtype, x.shape), x.dtype))
    if not isinstance(sample, complex):
        kind = _RECIPROCALS if sample < 0 else _ROOTS if sample < 1 else _PRODUCTS
        apart = {n: f for n, f in apart.items() if n in kind}
    n = _rounded(exponent.to(x.dtype), result[0].dtype)
    cases: dict[Number, Callable[[], Value]] = {value: functools.partial(case, x) for value, case in apart.items()}
    return by_number(n, cases, lambda: power(x, hlo.broadcast_to(n, x.shape)))


def _rounded(n: Value, dtype: torch.dtype) -> Value:
    """``n`` to the precision of ``dtype``, where that is a half type and ``n`` is not."""
    if dtype not in (torch.float16, torch.bfloat16) or n.dtype == dtype:
        return n
    return hlo.reduce_precision(n, *((5, 10) if dtype == torch.float16 else (8, 7)))


def _whole_power(x: Value, exponent: Number | ScalarOperand) -> Value:
    """Repeated squaring by the bits of a natural number."""
    if isinstance(exponent, ScalarOperand):

        def step(product: Value, x: Value, bits: Value) -> list[Value]:
            odd = hlo.broadcast_to(differs(hlo.and_(bits, 1), 0), x.shape)
            return [hlo.select(odd, product * x, product), x * x, hlo.shift_right_logical(bits, 1)]

        start = [hlo.full_like(x, 1), x, exponent.to(torch.int64)]
        return hlo.while_(start, lambda product, x, bits: differs(bits, 0), step)[0]
    product, bits = hlo.full_like(x, 1), int(exponent)  # type: ignore[arg-type]
    while bits:
        product, x, bits = (product * x if bits & 1 else product), x * x, bits >> 1
    return product


@lower("atan2", promote=Promotion.INT_TO_FLOAT)
def atan2(y: Value, x: Value) -> Value:
    return hlo.atan2(y, x)


@lower("hypot", promote=Promotion.DEFAULT)
def hypot(x: Value, y: Value) -> Value:
    """sqrt(x^2 + y^2) without overflow on the way."""
    x, y = hlo.abs_(x), hlo.abs_(y)
    long, short = hlo.maximum(x, y), hlo.minimum(x, y)
    ratio = hlo.select(equals(long, 0.0), hlo.full_like(x, 0.0), short / long)
    size = hlo.select(equals(short, long), long * math.sqrt(2), long * hlo.sqrt(1.0 + ratio * ratio))
    infinite = hlo.or_(equals(x, math.inf), equals(y, math.inf))
    return hlo.select(infinite, hlo.full_like(x, math.inf), size)


@lower("copysign.Tensor", "copysign.Scalar", promote=Promotion.INT_TO_FLOAT)
def copysign_rule(x: Value, y: Value) -> Value:
    return copysign(x, y)


@lower("nextafter", promote=Promotion.NO_OPMATH)
def nextafter(x: Value, y: Value) -> Value:
    return hlo.next_after(x, y)


def _ldexp_meta(x: torch.Tensor, exponent: torch.Tensor) -> torch.Tensor:
    """As the CPU computes it: in float32 by the power of a number, which is row-major there."""
    power = torch.pow(2.0, exponent)
    made = x * power
    return x * power.contiguous() if made.dtype == torch.float32 else made


@lower("ldexp.Tensor", promote=Promotion.INT_TO_FLOAT, meta=_ldexp_meta)
def ldexp(x: Value, exponent: Value) -> Value:
    return x * exp2(exponent)


@lower("logaddexp", promote=Promotion.INT_TO_FLOAT)
def logaddexp(x: Value, y: Value) -> Value:
    """The logarithm of e^x + e^y."""
    if x.dtype.is_complex:
        first = hlo.real(x) >= hlo.real(y)
        high, low = hlo.select(first, x, y), hlo.select(first, y, x)
        same = hlo.and_(hlo.not_(hlo.is_finite(hlo.real(x))), equals(hlo.real(x), hlo.real(y)))
        return hlo.select(same, high, high + hlo.log_plus_one(hlo.exponential(low - high)))
    tail = hlo.log_plus_one(hlo.exponential(-hlo.abs_(x - y)))
    return hlo.select(_same_infinity(x, y), x, hlo.maximum(x, y) + tail)


@lower("logaddexp2", promote=Promotion.INT_TO_FLOAT)
def logaddexp2(x: Value, y: Value) -> Value:
    """The base-2 logarithm of 2^x + 2^y."""
    tail = hlo.log_plus_one(exp2(-hlo.abs_(x - y))) / math.log(2)
    return hlo.select(_same_infinity(x, y), x, hlo.maximum(x, y) + tail)


def _same_infinity(x: Value, y: Value) -> Value:
    return hlo.and_(equals(hlo.abs_(x), math.inf), equals(x, y))


# ---- integers -------------------------------------------------------------------------------------------------------
@lower("gcd", promote=Promotion.DEFAULT)
def gcd(x: Value, y: Value) -> Value:
    """Euclid's algorithm on all elements at once."""

    def step(a: Value, b: Value) -> tuple[Value, Value]:
        done = equals(b, 0)
        rest = hlo.remainder(a, hlo.select(done, hlo.full_like(b, 1), b))
        return hlo.select(done, a, b), hlo.select(done, b, rest)

    def unfinished(a: Value, b: Value) -> Value:
        return hlo.reduce_one(differs(b, 0), False, range(b.ndim), hlo.or_)

    return hlo.while_([absolute(x), absolute(y)], unfinished, step)[0]


@lower("lcm", promote=Promotion.DEFAULT)
def lcm(x: Value, y: Value) -> Value:
    if x.dtype.itemsize < 4:  # as C, which takes the absolute value before the product wraps
        x, y = hlo.convert(x, torch.int32), hlo.convert(y, torch.int32)
    divisor = gcd(x, y)
    none = equals(divisor, 0)
    quotient = hlo.divide(x, hlo.select(none, hlo.full_like(x, 1), divisor))
    return hlo.select(none, hlo.full_like(x, 0), absolute(quotient * y))


def bitwise(name: str) -> list[str]:
    """The overloads of a binary bitwise operator."""
    return [f"bitwise_{name}.{o}" for o in ("Tensor", "Scalar", "Scalar_Tensor")]


lower(*bitwise("and"), promote=Promotion.DEFAULT)(lambda x, y: hlo.and_(x, y))
lower(*bitwise("or"), promote=Promotion.DEFAULT)(lambda x, y: hlo.or_(x, y))
lower(*bitwise("xor"), promote=Promotion.DEFAULT)(lambda x, y: hlo.xor(x, y))
lower("bitwise_not", promote=Promotion.DEFAULT)(hlo.not_)


def _shift_meta(x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """PyTorch's refuses bools, which the CPU promotes with the count."""
    return torch.add(x, count)


def _shift_overflows(x: Value, count: Value) -> Value:
    too_far = count >= x.dtype.itemsize * 8
    return too_far if is_unsigned(count) else hlo.or_(too_far, count < 0)


@lower(
    "bitwise_left_shift.Tensor",
    "bitwise_left_shift.Tensor_Scalar",
    "bitwise_left_shift.Scalar_Tensor",
    "__lshift__.Tensor",
    "__lshift__.Scalar",
    promote=Promotion.DEFAULT,
    meta=_shift_meta,
)
def shift_left(x: Value, count: Value) -> Value:
    """0 for a negative count and for one beyond the width; a product with 2**count for floats."""
    if is_inexact(x):
        return x * exp2(count)
    return hlo.select(_shift_overflows(x, count), hlo.full_like(x, 0), hlo.shift_left(x, count))


@lower(
    "bitwise_right_shift.Tensor",
    "bitwise_right_shift.Tensor_Scalar",
    "bitwise_right_shift.Scalar_Tensor",
    "__rshift__.Tensor",
    "__rshift__.Scalar",
    promote=Promotion.DEFAULT,
    meta=_shift_meta,
)
def shift_right(x: Value, count: Value) -> Value:
    """Keeps the sign; all sign bits for a negative count and for one beyond the width."""
    if is_inexact(x):
        return x / exp2(count)
    if is_unsigned(x):
        return hlo.select(_shift_overflows(x, count), hlo.full_like(x, 0), hlo.shift_right_logical(x, count))
    most = hlo.full_like(x, x.dtype.itemsize * 8 - 1)
    return hlo.shift_right_arithmetic(x, hlo.select(_shift_overflows(x, count), most, count))
