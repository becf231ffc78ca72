"""Random numbers: every draw is a function of the generator's seed and of the offset at which the draw starts.

The bits come from :meth:`Tracer.random_bits`. A uniform number of a dtype with ``d`` digits (24 for float32, 53 for
float64) is ``k / 2^d`` for ``d`` random bits ``k``, as in ATen's ``uniform_real``; where a logarithm or a tangent
follows, it is an odd multiple of ``2^-d``, which is neither 0 nor 1. Distributions whose number of draws depends on the
data are in ``rejection.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_tpu.lowering import meta
from torch_tpu.lowering.common import Number, Scalar, ScalarOperand, as_value, compute_dtype, highest, tracer
from torch_tpu.lowering.registry import lower
from torch_tpu.stablehlo import Type, Value
from torch_tpu.stablehlo import ops as hlo

# ---- checks of numbers ----------------------------------------------------------------------------------------------
#: Operators whose numbers are operands of the program and must be checked on every call: the in-place form whose CPU
#: kernel checks them, and their positions among the operator's arguments.
CHECKED: dict[str, tuple[str, tuple[int, ...]]] = {
    "uniform": ("uniform_", (1, 2)),
    "normal_functional": ("normal_", (1, 2)),
    "normal.Tensor_float": ("normal_", (1,)),
    "normal.float_float": ("normal_", (0, 1)),
    "log_normal": ("log_normal_", (1, 2)),
    "exponential": ("exponential_", (1,)),
    "geometric": ("geometric_", (1,)),
    "cauchy": ("cauchy_", (1, 2)),
    "bernoulli.p": ("bernoulli_", (1,)),
    "native_dropout": ("bernoulli_", (1,)),
}
_check_generator = torch.Generator()


def check_numbers(name: str, dtype: torch.dtype, *numbers: Number | None) -> None:
    """Raises what PyTorch raises for bad ``numbers``: its CPU kernel checks them on one element of ``dtype``.

    Args:
        name: A functional overload of :data:`CHECKED`.
        dtype: Of the tensor to be filled.
        numbers: The arguments at the positions that the table gives.
    """
    _fill_one(CHECKED[name][0], dtype, *((0.0, *numbers) if name == "normal.Tensor_float" else numbers))


def _fill_one(in_place: str, dtype: torch.dtype, *numbers: Number | None) -> None:
    with torch.utils._python_dispatch._disable_current_modes():
        getattr(torch.empty(1, dtype=dtype, device="cpu"), in_place)(*numbers, generator=_check_generator)


def _check(name: str, dtype: torch.dtype, *numbers: Scalar) -> None:
    samples: list[Any] = [n.sample if isinstance(n, ScalarOperand) else n for n in numbers]
    check_numbers(name, dtype, *samples)


# ---- uniform numbers ------------------------------------------------------------------------------------------------
def digits(dtype: torch.dtype) -> int:
    """Binary digits of a floating dtype's significand: 24 for float32."""
    return 1 - int(math.log2(torch.finfo(dtype).eps))


def _random_integer(shape: Sequence[int], bits: int) -> Value:
    """Uniform on ``[0, 2^bits)``, as the narrower of uint32 and uint64 that holds it."""
    word = torch.uint32 if bits <= 32 else torch.uint64
    return hlo.shift_right_logical(tracer().random_bits(shape, word), 8 * word.itemsize - bits)


def unit(shape: Sequence[int], dtype: torch.dtype) -> Value:
    """Uniform on [0, 1) with ``dtype``'s digits, in its compute dtype: rounding to ``dtype`` is exact."""
    d = digits(dtype)
    return hlo.convert(_random_integer(shape, d), compute_dtype(dtype)) * 2.0**-d


def open_unit(shape: Sequence[int], dtype: torch.dtype) -> Value:
    """Uniform on (0, 1), symmetric about 1/2: odd multiples of ``2^-d``. ``dtype`` is float32 or float64."""
    d = digits(dtype)
    return odd_multiple(_random_integer(shape, d - 1), dtype)


def odd_multiple(k: Value, dtype: torch.dtype) -> Value:
    """``(2 k + 1) 2^-d``."""
    d = digits(dtype)
    return hlo.convert(hlo.or_(hlo.shift_left(k, 1), 1), dtype) * 2.0**-d


def gauss(shape: Sequence[int], dtype: torch.dtype) -> Value:
    """Standard normal numbers, by the inverse of the distribution function. ``dtype`` is float32 or float64."""
    return gauss_of(_random_integer(shape, digits(dtype)), dtype)


def gauss_of(k: Value, dtype: torch.dtype) -> Value:
    """Standard normal numbers from ``d`` random bits each: ``sqrt(2) erfinv(u)``, u odd multiples of 2^-d."""
    d = digits(dtype)
    signed = hlo.convert(k, torch.int32 if dtype == torch.float32 else torch.int64)
    u = hlo.convert(signed * 2 + (1 - 2**d), dtype) * 2.0**-d
    return hlo.erf_inv(u) * math.sqrt(2.0)


def exponential_unit(shape: Sequence[int], dtype: torch.dtype) -> Value:
    """Exponential numbers of rate one, all of them positive and finite."""
    return -hlo.log(open_unit(shape, dtype))


def flips(shape: Sequence[int], p: Scalar, dtype: torch.dtype = torch.float32) -> Value:
    """True with probability ``p``: 32 random bits below ``p 2^32``."""
    threshold = as_value(p, dtype, shape) * 2.0**32
    always = hlo.compare(threshold, 2.0**32, "GE")
    threshold = hlo.convert(hlo.clamp(0.0, threshold, float(2**32 - 2 ** (32 - min(digits(dtype), 32)))), torch.uint32)
    return hlo.or_(always, tracer().random_bits(shape, torch.uint32) < threshold)


def _parts(draw: Callable[[Sequence[int], torch.dtype], Value], kind: Type) -> Value:
    """``draw`` for a real dtype; independent real and imaginary parts for a complex one."""
    if not kind.dtype.is_complex:
        return hlo.convert(draw(kind.shape, kind.dtype), kind.dtype)
    part = kind.dtype.to_real()
    return hlo.complex_(draw(kind.shape, part), draw(kind.shape, part))


# ---- distributions --------------------------------------------------------------------------------------------------
@lower("uniform")
def uniform(x: Value, low: Scalar = 0.0, high: Scalar = 1.0, *, result: list[Type]) -> Value:
    _check("uniform", x.dtype, low, high)

    def draw(shape: Sequence[int], dtype: torch.dtype) -> Value:
        u = unit(shape, dtype)
        if low == 0.0 and high == 1.0:
            return hlo.convert(u, dtype)
        a, b = as_value(low, u.dtype), as_value(high, u.dtype)
        y = hlo.convert(u * hlo.broadcast_to(b - a, shape) + hlo.broadcast_to(a, shape), dtype)
        # The sum may round up to the excluded end.
        return hlo.select(y >= as_value(high, dtype, shape), as_value(low, dtype, shape), y)

    return _parts(draw, result[0])


@lower("rand", "rand.generator", "rand_like", "rand_like.generator")
def rand(*_: Any, result: list[Type]) -> Value:
    return _parts(unit, result[0])


def _float_of(dtype: torch.dtype) -> torch.dtype:
    """The dtype to compute in where the result may be an integer."""
    return compute_dtype(dtype) if dtype.is_floating_point else torch.float32 if dtype.itemsize < 4 else torch.float64


def _normal(mean: Scalar, std: Scalar, kind: Type) -> Value:
    """The variance of a complex number is shared between its parts."""
    share = math.sqrt(0.5) if kind.dtype.is_complex else 1.0

    def draw(shape: Sequence[int], dtype: torch.dtype) -> Value:
        c = compute_dtype(dtype)
        z = gauss(shape, c)
        if not (isinstance(std, float) and std * share == 1.0):
            z = z * (as_value(std, c, shape) * share if share != 1.0 else as_value(std, c, shape))
        return z if isinstance(mean, float) and mean == 0.0 else z + as_value(mean, c, shape)

    return _parts(draw, kind)


@lower("normal_functional")
def normal(x: Value, mean: Scalar = 0.0, std: Scalar = 1.0, *, result: list[Type]) -> Value:
    _check("normal_functional", x.dtype, mean, std)
    return _normal(mean, std, result[0])


@lower("normal.Tensor_float", meta=meta.contiguous("normal.Tensor_float"))
def normal_mean(mean: Value, std: Scalar = 1.0, *, result: list[Type]) -> Value:
    _check("normal.Tensor_float", mean.dtype, std)
    return _normal(mean, std, result[0])


@lower("normal.float_Tensor", meta=meta.contiguous("normal.float_Tensor"))
@lower("normal.Tensor_Tensor", meta=meta.contiguous("normal.Tensor_Tensor"))
def normal_std(mean: Scalar, std: Value, *, result: list[Type]) -> Value:
    tracer().check(~(std >= 0.0), "normal expects all elements of std >= 0.0")
    return _normal(mean, std, result[0])


@lower("normal.float_float", "normal.float_float_out")
def normal_numbers(mean: Scalar, std: Scalar, size: list[int], *, result: list[Type]) -> Value:
    _check("normal.float_float", result[0].dtype, mean, std)
    return _normal(mean, std, result[0])


@lower("randn", "randn.generator", "randn_like", "randn_like.generator")
def randn(*_: Any, result: list[Type]) -> Value:
    return _normal(0.0, 1.0, result[0])


@lower("log_normal")
def log_normal(x: Value, mean: Scalar = 1.0, std: Scalar = 2.0, *, result: list[Type]) -> Value:
    _check("log_normal", x.dtype, mean, std)
    c = compute_dtype(x.dtype)
    z = gauss(x.shape, c) * as_value(std, c, x.shape) + as_value(mean, c, x.shape)
    return hlo.convert(hlo.exponential(z), x.dtype)


@lower("exponential")
def exponential(x: Value, rate: Scalar = 1.0) -> Value:
    _check("exponential", x.dtype, rate)
    c = compute_dtype(x.dtype)
    return hlo.convert(exponential_unit(x.shape, c) / as_value(rate, c, x.shape), x.dtype)


@lower("geometric")
def geometric(x: Value, p: Scalar) -> Value:
    """The number of trials up to the first success: ``ceil(log(u) / log(1 - p))``."""
    _check("geometric", x.dtype, p)
    c = _float_of(x.dtype)
    trials = hlo.ceil(hlo.log(open_unit(x.shape, c)) / hlo.log_plus_one(-as_value(p, c, x.shape)))
    return hlo.convert(hlo.maximum(trials, 1.0), x.dtype)


@lower("cauchy")
def cauchy(x: Value, median: Scalar = 0.0, sigma: Scalar = 1.0) -> Value:
    _check("cauchy", x.dtype, median, sigma)
    c = compute_dtype(x.dtype)
    t = hlo.tan((open_unit(x.shape, c) - 0.5) * math.pi)
    return hlo.convert(as_value(median, c, x.shape) + as_value(sigma, c, x.shape) * t, x.dtype)


# ---- coins ----------------------------------------------------------------------------------------------------------
def _probability_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


@lower("bernoulli.p")
def bernoulli_number(x: Value, p: Scalar = 0.5) -> Value:
    _check("bernoulli.p", x.dtype, p)
    return hlo.convert(flips(x.shape, p), x.dtype)


def _check_probabilities(p: Value) -> None:
    if p.dtype.is_floating_point:
        tracer().check(~hlo.and_(p >= 0.0, p <= 1.0), "Expected p_in >= 0 && p_in <= 1 to be true, but got false")


@lower("bernoulli.Tensor")
def bernoulli_tensor(x: Value, p: Value) -> Value:
    _check_probabilities(p)
    return hlo.convert(flips(x.shape, p, _probability_dtype(p.dtype)), x.dtype)


@lower("bernoulli")
def bernoulli(p: Value, *, result: list[Type]) -> Value:
    _check_probabilities(p)
    return hlo.convert(flips(p.shape, p, _probability_dtype(p.dtype)), result[0].dtype)


@lower("native_dropout")
def native_dropout(x: Value, p: Scalar, train: bool | None) -> list[Value]:
    """``x`` where a coin of probability ``1 - p`` fell, scaled by ``1 / (1 - p)``; all zeros for ``p = 1``."""
    if train is False:
        return [x, hlo.constant(True, torch.bool, x.shape)]
    _check("native_dropout", x.dtype, p)
    c = compute_dtype(x.dtype)
    real = c.to_real() if c.is_complex else c
    keep = 1.0 - as_value(p, real)
    mask = flips(x.shape, keep, _probability_dtype(real))
    scale = hlo.select(hlo.compare(keep, 0.0, "EQ"), hlo.full_like(keep, 0.0), 1.0 / keep)
    return [hlo.convert(_masked(x, mask, scale, c), x.dtype), mask]


def _masked(x: Value, mask: Value, scale: Scalar, dtype: torch.dtype) -> Value:
    """A product with the mask, not a selection: an infinity that is dropped becomes NaN, as in PyTorch."""
    return hlo.convert(x, dtype) * hlo.convert(mask, dtype) * as_value(scale, dtype, x.shape)


def _product_meta(grad: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    return grad * mask * scale  # as the CPU computes it, which decides the layout


@lower("native_dropout_backward", meta=_product_meta)
def native_dropout_backward(grad: Value, mask: Value, scale: Scalar, *, result: list[Type]) -> Value:
    return hlo.convert(_masked(grad, mask, scale, compute_dtype(result[0].dtype)), result[0].dtype)


def _rrelu(x: Value, noise: Value, low: Scalar, high: Scalar, training: bool) -> list[Value]:
    """``[noise, output]``: a slope for each negative element, drawn anew in training and recorded in ``noise``."""
    c = compute_dtype(x.dtype)
    negative, wide = x <= 0, hlo.convert(x, c)
    a, b = as_value(low, c), as_value(high, c)
    if not training:
        slope = hlo.broadcast_to((a + b) * 0.5, x.shape)
        return [noise, hlo.convert(hlo.select(negative, wide * slope, wide), x.dtype)]
    u = unit(x.shape, c) * hlo.broadcast_to(b - a, x.shape) + hlo.broadcast_to(a, x.shape)
    slope = hlo.convert(hlo.select(negative, u, 1.0), x.dtype)
    return [hlo.convert(slope, noise.dtype), hlo.convert(wide * hlo.convert(slope, c), x.dtype)]


@lower("rrelu_with_noise")
def rrelu_with_noise(
    x: Value, noise: Value, lower: Scalar = 0.125, upper: Scalar = 1 / 3, training: bool = False, generator: Any = None
) -> list[Value]:
    return _rrelu(x, noise, lower, upper, training)


@lower("rrelu_with_noise_functional")
def rrelu_with_noise_functional(
    x: Value, noise: Value, lower: Scalar = 0.125, upper: Scalar = 1 / 3, training: bool = False, generator: Any = None
) -> list[Value]:
    return _rrelu(x, noise, lower, upper, training)[::-1]


# ---- integers -------------------------------------------------------------------------------------------------------
def integers(shape: Sequence[int], base: Scalar, count: Scalar, dtype: torch.dtype) -> Value:
    """Uniform on ``[base, base + count)``, ``1 <= count <= 2^64``; run-time numbers are int64, 2^64 is then 0.

    The high word of 64 random bits times ``count`` (Lemire 2019): no value is favoured by more than ``count / 2^64``.
    """
    bits = tracer().random_bits(shape, torch.uint64)
    if isinstance(count, int):
        count = (count + 2**63) % 2**64 - 2**63
    span = hlo.bitcast_convert(as_value(count, torch.int64, shape), torch.uint64)
    drawn = hlo.select(hlo.compare(span, 0, "EQ"), bits, _high_product(bits, span))
    return hlo.convert(hlo.convert(drawn, torch.int64) + as_value(base, torch.int64, shape), dtype)


def _high_product(a: Value, b: Value) -> Value:
    """The high 64 bits of the product of two uint64, from its four partial products of 32-bit halves."""
    (a1, a0), (b1, b0) = ((hlo.shift_right_logical(v, 32), hlo.and_(v, 2**32 - 1)) for v in (a, b))
    cross = a1 * b0 + hlo.shift_right_logical(a0 * b0, 32)
    carry = a0 * b1 + hlo.and_(cross, 2**32 - 1)
    return a1 * b1 + hlo.shift_right_logical(cross, 32) + hlo.shift_right_logical(carry, 32)


def _top(dtype: torch.dtype) -> int:
    """The largest value that ``random_`` draws: all integers up to it are values of ``dtype``."""
    return 2 ** digits(dtype) if dtype.is_floating_point else int(highest(dtype))  # type: ignore[arg-type]


@lower("random")
def random(x: Value) -> Value:
    _fill_one("random_", x.dtype)
    return integers(x.shape, 0, _top(x.dtype) + 1, x.dtype)


@lower("random.to")
def random_to(x: Value, stop: int) -> Value:
    return integers(x.shape, *_bounds(x.dtype, 0, stop), x.dtype)


@lower("random.from")
def random_between(x: Value, start: int, stop: int | None) -> Value:
    return integers(x.shape, *_bounds(x.dtype, start, stop), x.dtype)


_library = torch.library.Library("tpu", "FRAGMENT")
_library.define("integers_(Tensor(a!) self, Scalar base, Scalar count, *, Generator? generator) -> Tensor(a!)")
_library.impl("integers_", lambda x, base, count, *, generator: x, "Meta")


@lower("tpu::integers_")
def integers_(x: Value, base: Scalar, count: Scalar) -> Value:
    return integers(x.shape, base, count, x.dtype)


def random_from(
    self: torch.Tensor, start: int, stop: int | None, *, generator: torch.Generator | None = None
) -> torch.Tensor:
    """``random_.from`` outside of a trace: its bounds are checked on every call and operands of the program."""
    base, count = _bounds(self.dtype, start, stop)
    signed = (count + 2**63) % 2**64 - 2**63
    return torch.ops.tpu.integers_(self, base, signed, generator=generator)


def _bounds(dtype: torch.dtype, start: int, stop: int | None) -> tuple[int, int]:
    """The least value of ``[start, stop)`` and how many there are.

    No ``stop`` means to the top of the dtype, included, and from the lowest ``start`` all of int64.
    """
    if stop is None and start == torch.iinfo(torch.int64).min:
        return start, 2**64
    top = min(_top(dtype), 2**63 - 1)
    if stop is not None or start <= top:  # beyond it, ATen's check loops for ever
        _fill_one("random_", dtype, start, stop)
    elif start > top:
        raise RuntimeError(
            f"random_ expects 'from' casted to dtype to be less than or equal to 'to_inc' casted to dtype, "
            f"but got from={start} > to_inc={top}"
        )
    if dtype.is_floating_point:
        start, stop = _inwards(start, dtype, 1), None if stop is None else _inwards(stop, dtype, -1)
    return start, (top + 1 if stop is None else stop) - start


def _inwards(bound: int, dtype: torch.dtype, direction: int) -> int:
    """A bound moved so that no draw rounds to a value beyond it (ATen's ``update_from`` and ``update_to``)."""
    inner = bound + direction
    rounded = int(torch.tensor(inner, dtype=torch.int64).to(dtype).double().item())
    if rounded < bound if direction > 0 else rounded >= bound:
        return rounded + direction * 2 ** (abs(inner).bit_length() - digits(dtype))
    return bound


@lower("randint", "randint.generator", "randint_like", "randint_like.generator")
def randint(first: Any, *rest: Any, result: list[Type]) -> Value:
    high = rest[0] if isinstance(first, Value) else first
    return integers(result[0].shape, *_bounds(result[0].dtype, 0, high), result[0].dtype)


@lower("randint.low", "randint.low_generator", "randint_like.low_dtype", "randint_like.low_generator_dtype")
def randint_low(first: Any, second: int, third: Any, *_: Any, result: list[Type]) -> Value:
    low, high = (second, third) if isinstance(first, Value) else (first, second)
    return integers(result[0].shape, *_bounds(result[0].dtype, low, high), result[0].dtype)


@lower("randperm", "randperm.generator", "randperm.generator_out", "randperm.out")
def randperm(n: int, *, result: list[Type]) -> Value:
    """Positions sorted by random keys: 32 bits, or two words of 32 above 2^16 positions.

    Two equal keys leave their positions in order; that has probability ``n^2 / 2^33``, or ``n^2 / 2^65``.
    """
    dtype = result[0].dtype
    _check_permutation(n, dtype)
    if n == 0:
        return hlo.constant(0, dtype, (0,))
    words = 1 if n <= 2**16 else 2
    bits = tracer().random_bits((words, n), torch.uint32)
    keys = [hlo.reshape(hlo.slice_dim(bits, 0, i, i + 1), (n,)) for i in range(words)]
    positions = hlo.iota((n,), 0, torch.int32 if n < 2**31 else torch.int64)

    def less(a: tuple[Value, ...], b: tuple[Value, ...]) -> Value:
        if words == 1:
            return a[0] < b[0]
        return hlo.or_(a[0] < b[0], hlo.and_(hlo.compare(a[0], b[0], "EQ"), a[1] < b[1]))

    return hlo.convert(hlo.sort([*keys, positions], 0, less)[-1], dtype)


def _check_permutation(n: int, dtype: torch.dtype) -> None:
    if not dtype.is_floating_point:
        torch.scalar_tensor(n, dtype=dtype, device="cpu")  # raises PyTorch's overflow error
    elif n > 2 ** digits(dtype) + 1:
        names = {torch.float16: "Half", torch.bfloat16: "BFloat16", torch.float32: "Float", torch.float64: "Double"}
        raise RuntimeError(f"n cannot be greater than {2 ** digits(dtype) + 1} for {names[dtype]} type.")
