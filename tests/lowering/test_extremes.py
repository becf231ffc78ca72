"""Element-wise operators at the ends of their dtypes: zeros of both signs, the least and the largest number, inf, NaN.

Every function is compared with the CPU on a grid of such numbers, forward in all floating dtypes and complex64, and
backward in float32. What is left is declared in :data:`EXCEPTIONS`, with the reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

special = torch.special
Function = Callable[..., Any]
inf, nan = math.inf, math.nan


def _of(module: Any, names: str) -> dict[str, Function]:
    return {name: getattr(module, name) for name in names.split()}


UNARY: dict[str, Function] = {
    **_of(
        torch,
        "abs acos acosh angle asin asinh atan atanh ceil cos cosh deg2rad digamma erf erfc erfinv exp exp2 expm1 floor "
        "frac frexp i0 isfinite isinf isnan isneginf isposinf lgamma log log10 log1p log2 logical_not logit nan_to_num "
        "neg positive rad2deg reciprocal relu round rsqrt sgn sigmoid sign signbit sin sinc sinh sqrt square tan tanh "
        "trunc",
    ),
    **_of(
        special,
        "airy_ai bessel_j0 bessel_j1 bessel_y0 bessel_y1 entr erfcx i0e i1 i1e log_ndtr modified_bessel_i0 "
        "modified_bessel_i1 modified_bessel_k0 modified_bessel_k1 ndtr ndtri scaled_modified_bessel_k0 "
        "scaled_modified_bessel_k1 spherical_bessel_j0",
    ),
    **_of(
        F,
        "celu elu gelu hardshrink hardsigmoid hardswish hardtanh leaky_relu logsigmoid mish relu6 selu silu softplus "
        "softshrink softsign tanhshrink",
    ),
    "gelu of tanh": lambda x: F.gelu(x, approximate="tanh"),
    "threshold": lambda x: F.threshold(x, 0.5, 2.0),
    "prelu": lambda x: F.prelu(x, torch.full((1,), 0.25, dtype=x.dtype, device=x.device)),
    "glu": lambda x: F.glu(torch.stack([x, x]), 0),
    "trigamma": lambda x: torch.polygamma(1, x),
    "polygamma 2": lambda x: torch.polygamma(2, x),
    "polygamma 3": lambda x: torch.polygamma(3, x),
    "x ** 0.5": lambda x: x**0.5,
    "x ** -0.5": lambda x: x**-0.5,
    "x ** -1": lambda x: x**-1,
    "x ** 3": lambda x: x**3,
    "x ** 2.5": lambda x: x**2.5,
    "x ** -3": lambda x: x**-3,
    "2 ** x": lambda x: 2**x,
    "clamp": lambda x: x.clamp(-1, 1),
    "round to tenths": lambda x: x.round(decimals=1),
    "round to tens": lambda x: x.round(decimals=-1),
    "logit of clamped": lambda x: torch.logit(x, 1e-3),
    "x // 2": lambda x: x // 2,
    "x % 2": lambda x: x % 2,
}
BINARY: dict[str, Function] = {
    **_of(
        torch,
        "add atan2 copysign div eq float_power floor_divide fmax fmin fmod ge gt heaviside hypot igamma igammac "
        "isclose ldexp le logaddexp logaddexp2 logical_and lt maximum minimum mul ne nextafter pow remainder sub xlogy",
    ),
    **_of(
        special,
        "chebyshev_polynomial_t chebyshev_polynomial_u hermite_polynomial_h hermite_polynomial_he "
        "laguerre_polynomial_l legendre_polynomial_p xlog1py zeta",
    ),
    "div down": lambda x, y: torch.div(x, y, rounding_mode="floor"),
    "div to zero": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
}
TERNARY: dict[str, Function] = {
    **_of(torch, "addcdiv addcmul clamp lerp"),
    "where": lambda c, x, y: torch.where(c > 0, x, y),
}
FUNCTIONS = {**{n: (f, 1) for n, f in UNARY.items()}, **{n: (f, 2) for n, f in BINARY.items()}}
FUNCTIONS |= {f"{n} of three": (f, 3) for n, f in TERNARY.items()}

#: By function, or function and kind (a dtype, or "gradient"): elements that may differ, and why.
Differs = Callable[..., torch.Tensor]


def _subnormal(*xs: torch.Tensor) -> torch.Tensor:
    """Where an argument is so small or so large that a subnormal number comes up, which counts as zero here."""
    info = torch.finfo(xs[0].dtype)
    return torch.stack([((x.abs() <= info.tiny) & (x != 0)) | (x.abs() >= info.max / 4) for x in xs]).any(0)


def _finite_quotient(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The CPU's vectors give NaN for the rest of a large quotient, its scalars what the device gives."""
    return (x / y).abs() > 2.0**23


EXCEPTIONS: dict[str, Differs] = {
    "gelu": lambda x: (x == inf) | (x == -3),  # NaN in a vector of the CPU, inf in its scalars; 1 + erf(x) cancels
    "fmod": _finite_quotient,
    "remainder": _finite_quotient,
    "ldexp/float16": lambda x, y: y.float() >= 16,  # the CPU rounds 2**y to float16, which is inf
    "igamma": lambda a, x: _subnormal(a),  # the CPU gives NaN for a large a; scipy what the device gives
    "igammac": lambda a, x: _subnormal(a),
    "logaddexp2": lambda x, y: (x == -1) & (y == -1),  # 0; the CPU rounds to 1e-8
    "zeta": lambda x, q: x >= 1e30,  # 0 here and in scipy; the CPU multiplies infinity by it
    "laguerre_polynomial_l": lambda x, n: x.isnan(),  # NaN; the CPU ends its recurrence with what it began with
    "legendre_polynomial_p": lambda x, n: x.isnan(),
    "chebyshev_polynomial_u": lambda x, n: x.isnan() | (x == 0.5),  # and a cosine of pi n / 3 that is nearly 0
    "addcmul of three": lambda x, a, b: x.isinf(),  # the order of three factors, of which two overflow
    "log2/gradient": _subnormal,
    "pow/gradient": _subnormal,
    "tanh/gradient": lambda x: x.abs() > 5,  # XLA's tanh is up to one rounding short of 1
    "polygamma 3/gradient": lambda x: x < 0,  # right to three digits: a sum of large terms
    "gelu/gradient": lambda x: x < -9,  # 0 on the CPU, 1e-24 here
    "erfcx/gradient": lambda x: x >= 100,  # a difference of nearly equal numbers
}
#: Complex functions whose values at infinities and NaN are not the CPU's: products of infinite parts, which the CPU
#: itself evaluates differently in vectors and scalars. They are compared where both parts are finite.
FINITE = frozenset(
    "reciprocal rsqrt sigmoid silu square tanhshrink expm1 log1p add sub mul div pow float_power logaddexp".split()
) | {"ldexp", "x ** -1", "x ** 3", "x ** 2.5", "x ** -3", "x ** -0.5", "2 ** x"}
FINITE |= {"addcmul of three", "addcdiv of three"}
#: Elements of complex functions at which XLA has lost the digits: at a pole of atanh and of atan, and below.
ZERO = frozenset(("pow", "float_power", "x ** -3"))  # powers of 0: NaN in a vector of the CPU
POLES = frozenset("atan atanh log1p".split())
#: The sign of a zero is not compared: the CPU's own depends on the place in memory, or IEEE 754 leaves it open.
UNSIGNED = frozenset("relu relu6 hardtanh softshrink logsigmoid maximum minimum fmax fmin clamp logaddexp2".split()) | {
    "clamp of three",
    "lerp of three",
    "addcmul of three",
}

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64)
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float64: 1e-8}


def numbers(dtype: torch.dtype, count: int) -> tuple[torch.Tensor, ...]:
    """A grid of special numbers for each of ``count`` arguments, coarser for more of them."""
    if dtype.is_complex:
        parts = [0.0, -0.0, 1.0, -1.0, 0.5, 2.0, -3.0, 1e-30, 3e38, -3e38, inf, -inf, nan][
            : 13 if count == 1 else 6 // count
        ]
        re, im = torch.meshgrid(torch.tensor(parts), torch.tensor(parts), indexing="ij")
        line = torch.complex(re.contiguous(), im.contiguous()).flatten()
    else:
        info = torch.finfo(dtype)
        wide = [-0.5, -2.0, -3.0, 6.0, 10.0, -10.5, 30.0, -30.0, 100.0, -100.0, info.eps, info.max / 4]
        medium = [-1.0, 0.5, 2.0, 3.0, -3.0, 20.0, info.tiny, -info.tiny, info.min]
        few = [0.0, -0.0, 1.0, -2.5, info.max, inf, -inf, nan]
        chosen = few + (medium if count < 3 else []) + (wide if count < 2 else [])
        line = torch.tensor(chosen, dtype=torch.float64).to(dtype)
    return tuple(x.contiguous() for x in torch.meshgrid(*[line] * count, indexing="ij"))


def values(function: Function, arguments: tuple[torch.Tensor, ...], backward: bool) -> list[torch.Tensor]:
    """The results, or the gradients of their sum; complex ones in parts."""
    if backward:
        arguments = tuple(x.detach().requires_grad_() for x in arguments)
    made = function(*arguments)
    outputs = list(made) if isinstance(made, tuple) else [made]
    if backward:
        if not outputs[0].requires_grad:
            return []
        outputs[0].backward(torch.ones_like(outputs[0]))
        outputs = [x.grad for x in arguments if x.grad is not None]
    host = [x.detach().cpu() for x in outputs]
    return [part.contiguous() for x in host for part in ([x.real, x.imag] if x.is_complex() else [x])]


def differing(actual: torch.Tensor, expected: torch.Tensor, signed: bool) -> torch.Tensor:
    if not expected.is_floating_point():
        return actual != expected
    a, e = actual.double(), expected.double()
    close = (a - e).abs() <= TOLERANCE[expected.dtype] * e.abs() + 2 * torch.finfo(expected.dtype).tiny
    zeros = (a == 0) & (e == 0) & (actual.signbit() != expected.signbit())
    wrong = ~((a == e) | (a.isnan() & e.isnan()) | close)
    return wrong | zeros if signed else wrong


def compare(name: str, dtype: torch.dtype, backward: bool) -> None:
    function, count = FUNCTIONS[name]
    kind = "gradient" if backward else str(dtype).removeprefix("torch.")
    arguments = numbers(dtype, count)
    if backward:  # in whole vectors: what the CPU computes one by one is not the same at NaN
        arguments = tuple(x.flatten().repeat(64) for x in arguments)
    try:
        expected = values(function, tuple(x.clone() for x in arguments), backward)
    except (RuntimeError, NotImplementedError, TypeError):
        return  # not an operator of this dtype
    actual = values(function, tuple(x.tpu() for x in arguments), backward)
    assert [(x.dtype, x.shape) for x in actual] == [(x.dtype, x.shape) for x in expected]
    excused = torch.zeros(arguments[0].shape, dtype=torch.bool)
    for key in (name, f"{name}/{kind}"):
        if key in EXCEPTIONS and not (dtype.is_complex and key == name):
            excused |= EXCEPTIONS[key](*arguments)
    if dtype.is_complex and name in FINITE:
        excused |= torch.stack([~x.isfinite() | (x.real.abs() > 1e18) | (x.imag.abs() > 1e18) for x in arguments]).any(
            0
        )
    if dtype.is_complex and name in ZERO:
        excused |= arguments[0].abs() < 1e-20
    if dtype.is_complex and name in POLES:
        excused |= ~arguments[0].isfinite() | (arguments[0].abs() - 1).abs().lt(1e-6)
    for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
        wrong = differing(a, e, name not in UNSIGNED and not dtype.is_complex) & ~excused
        where = [tuple(x[at].item() for x in arguments) for at in map(tuple, wrong.nonzero()[:5].tolist())]
        assert not where, f"{name} {kind}, result {i}: at {where} {a[wrong][:5].tolist()}, CPU {e[wrong][:5].tolist()}"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_ends_of_the_dtypes_are_the_cpus(name: str) -> None:
    for dtype in DTYPES:
        compare(name, dtype, backward=False)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_at_the_ends_are_the_cpus(name: str) -> None:
    compare(name, torch.float32, backward=True)


def test_branch_cuts_have_two_sides() -> None:
    z = torch.tensor([complex(-1.0, 0.0), complex(-1.0, -0.0), complex(2.0, 0.0), complex(2.0, -0.0)])
    for f in (torch.sqrt, torch.log, torch.acos, torch.asin, torch.acosh, torch.atanh):
        torch.testing.assert_close(f(z.tpu()).cpu(), f(z))
    i = torch.complex(-z.imag, z.real)
    for f in (torch.asinh, torch.atan):
        torch.testing.assert_close(f(i.tpu()).cpu(), f(i))
    assert torch.sqrt(z.tpu())[1].item() == -1j


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64])
def test_ends_of_the_integers_are_the_cpus(dtype: torch.dtype) -> None:
    info = torch.iinfo(dtype)
    some = {info.min, info.min + 1, 0, 1, 2, 3, 5, 7, 8, 15, 31, 63, 64, 100, info.max - 1, info.max}
    x = torch.tensor(sorted(some | ({-7, -3, -1} if info.min else set())), dtype=dtype)
    unary: list[Function] = [
        torch.abs, torch.neg, torch.sign, torch.bitwise_not, torch.square,
        lambda x: x**2, lambda x: 2**x, lambda x: (-1) ** x, lambda x: x // -3, lambda x: x % -3,
        lambda x: x << 70, lambda x: x >> 70, lambda x: x << -1, lambda x: x >> -1,
    ]  # fmt: skip
    for f in unary:
        if not info.min and f is torch.neg:
            continue
        torch.testing.assert_close(f(x.tpu()).cpu(), f(x))
    pairs = [v.contiguous() for v in torch.meshgrid(x, x, indexing="ij")]
    whole = _of(torch, "add mul bitwise_and bitwise_or bitwise_left_shift bitwise_right_shift pow maximum fmin")
    for f in whole.values():
        torch.testing.assert_close(f(*(v.tpu() for v in pairs)).cpu(), f(*pairs))
    keep = (pairs[1] != 0) & ~((pairs[0] == info.min) & (pairs[1] == -1))  # which end a process on some CPUs
    for f in (torch.floor_divide, torch.remainder, torch.fmod, torch.gcd):
        a, b = (v[keep] for v in pairs)
        torch.testing.assert_close(f(a.tpu(), b.tpu()).cpu(), f(a, b))


def test_bools_shift_and_combine_as_on_the_cpu() -> None:
    b = torch.tensor([True, False])
    pairs = [v.contiguous() for v in torch.meshgrid(b, b, indexing="ij")]
    for f in _of(torch, "bitwise_and bitwise_or bitwise_xor").values():
        torch.testing.assert_close(f(*(v.tpu() for v in pairs)).cpu(), f(*pairs))
    for shift in (lambda x: x << 1, lambda x: x >> 1, lambda x: ~x):
        torch.testing.assert_close(shift(b.tpu()).cpu(), shift(b))


def test_large_arguments_of_the_incomplete_gamma_function() -> None:
    a = torch.tensor([1e6, 3e6, 1e8, 1e8, 1e10, 5.0], dtype=torch.float64)
    x = torch.tensor([1.001e6, 2.999e6, 1e8, 1.0001e8, 1e10, 1e5], dtype=torch.float64)
    for f in (torch.igamma, torch.igammac):
        torch.testing.assert_close(f(a.tpu(), x.tpu()).cpu(), f(a, x), rtol=1e-6, atol=1e-12)


def test_polynomials_of_degrees_that_float32_cannot_count_end() -> None:
    n, x = torch.tensor([3e38, inf, nan, -1.0]), torch.full((4,), 2.0)
    for f in (special.laguerre_polynomial_l, special.legendre_polynomial_p, special.chebyshev_polynomial_t):
        assert f(x.tpu(), n.tpu()).tolist() == f(x, n).tolist() == [0, 0, 0, 0]


def test_topk_of_a_number() -> None:
    x = torch.tensor(3.0)
    for k in (0, 1):
        assert [v.tolist() for v in x.tpu().topk(k)] == [v.tolist() for v in x.topk(k)] == [3, 0]
