"""Element-wise rules against CPU PyTorch: ordinary and special values, dtype families, promotion, aliasing forms."""

from __future__ import annotations

import math

import pytest
import torch

from tests.lowering.harness import check

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
I8, I32, I64, U8, BOOL, C64 = torch.int8, torch.int32, torch.int64, torch.uint8, torch.bool, torch.complex64
INF, NAN = math.inf, math.nan

SPECIAL = [
    -1e4,
    -60,
    -20.5,
    -6,
    -3,
    -2.5,
    -1.5,
    -1,
    -0.5,
    -1e-3,
    -0.0,
    0.0,
    1e-3,
    0.5,
    1,
    1.5,
    2.5,
    3,
    6,
    19.9,
    60,
    1e4,
    INF,
    -INF,
    NAN,
]
#: approximate digits of the half types: PyTorch's CPU kernels round in the middle of some of them
HALF = {"rtol": 3e-2, "atol": 1e-2}


def words(text: str) -> list[str]:
    return text.split()


def overload(name: str) -> torch._ops.OpOverload:
    packet, _, rest = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), rest or "default")


def floats(dtype: torch.dtype, values: list[float] = SPECIAL) -> torch.Tensor:
    return torch.tensor(values, dtype=F64).to(dtype)


def complexes() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(4, 5, dtype=C64, generator=generator) * 1.5


def integers(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """All pairs of interesting integers, wrapped to ``dtype``."""
    values = torch.tensor([-128, -127, -50, -7, -3, -2, -1, 0, 1, 2, 3, 7, 8, 31, 50, 126, 127])
    a, b = torch.meshgrid(values, values, indexing="ij")
    return a.reshape(-1).to(dtype), b.reshape(-1).to(dtype)


def pairs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    values = floats(dtype, [-8, -2.0, -1, -0.5, -0.0, 0.0, 0.5, 1, 2, 3, 1e20, INF, -INF, NAN])
    a, b = torch.meshgrid(values, values, indexing="ij")
    return a.reshape(-1), b.reshape(-1)


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    return HALF if dtype in (BF16, F16) else {"rtol": 2e-6, "atol": 1e-5} if dtype == F32 else {}


# ---- unary ----------------------------------------------------------------------------------------------------------
UNARY = words(
    """
        abs acos acosh angle asin asinh atan atanh celu ceil cos cosh deg2rad digamma elu erf erfc erfinv exp
        exp2 expm1 floor frac hardshrink hardsigmoid hardswish hardtanh i0 isinf isnan isneginf isposinf
        leaky_relu lgamma log log10 log1p log2 log_sigmoid_forward logical_not logit mish nan_to_num neg rad2deg
        reciprocal relu relu6 round rsqrt selu sgn sigmoid sign signbit silu sin sinc sinh softplus softshrink
        special_entr special_i0e special_i1 special_i1e sqrt tan tanh trunc isfinite square
        """
)
FULL_PRECISION = words(
    """
        special_airy_ai special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1 special_erfcx
        special_log_ndtr special_modified_bessel_i0 special_modified_bessel_i1 special_modified_bessel_k0
        special_modified_bessel_k1 special_ndtri special_scaled_modified_bessel_k0
        special_scaled_modified_bessel_k1 special_spherical_bessel_j0
        """
)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("name", [*UNARY, *FULL_PRECISION])
def test_unary(name: str, dtype: torch.dtype) -> None:
    if name in FULL_PRECISION and dtype == BF16:
        dtype = F64
    check(overload(name), floats(dtype), **tolerance(dtype))


@pytest.mark.parametrize("name", ["gelu", "gelu tanh"])
def test_gelu(name: str) -> None:
    x = torch.linspace(-6, 6, 40)
    kwargs = {"approximate": "tanh"} if " " in name else {}
    check(torch.ops.aten.gelu.default, x, **kwargs)
    check(torch.ops.aten.gelu_backward.default, torch.linspace(-1, 2, 40), x, **kwargs)


@pytest.mark.parametrize(
    "name", words("abs neg sign sgn bitwise_not isnan floor ceil trunc round relu signbit square nan_to_num")
)
def test_unary_integers(name: str) -> None:
    for dtype in (I8, I32, I64, U8):
        check(overload(name), integers(dtype)[0])


@pytest.mark.parametrize("name", words("sin sigmoid sqrt reciprocal exp log2 angle special_i0e lgamma rsqrt"))
def test_integers_become_floats(name: str) -> None:
    for dtype in (I64, U8, BOOL):
        check(overload(name), torch.arange(1, 7).to(dtype))


@pytest.mark.parametrize(
    "name",
    words(
        """
        abs acos acosh angle asin asinh atan atanh cos cosh exp exp2 expm1 isfinite isinf isnan log log10 log1p
        log2 neg reciprocal rsqrt sgn sigmoid silu sin sinc sinh sqrt square tan tanh _conj_physical nan_to_num
        """
    ),
)
def test_unary_complex(name: str) -> None:
    check(overload(name), complexes(), rtol=1e-5, atol=1e-5)


def test_exact_powers() -> None:
    """floor(log2(8)) is 3, and 2**10 is 1024."""
    whole = torch.arange(-100.0, 100.0)
    for op, x in ((torch.ops.aten.log2.default, 2.0**whole), (torch.ops.aten.exp2.default, whole)):
        check(op, x, rtol=0, atol=0)
    check(torch.ops.aten.log10.default, 10.0 ** torch.arange(0, 11), rtol=0, atol=0)


def test_signed_zeros() -> None:
    from tests.lowering.harness import run

    x = torch.tensor([-0.0, -0.4, 0.0, 0.4])
    for name in ("ceil", "trunc", "round", "neg", "sin", "tanh"):
        got = run(overload(name), x)[0][0]
        assert torch.signbit(got).equal(torch.signbit(overload(name)(x))), name
    got = run(torch.ops.aten.div.Tensor_mode, x, -torch.ones(4), rounding_mode="floor")[0][0]
    assert torch.signbit(got).equal(torch.signbit(torch.div(x, -torch.ones(4), rounding_mode="floor")))


@pytest.mark.parametrize("decimals", [-2, 0, 3])
def test_round_decimals(decimals: int) -> None:
    check(torch.ops.aten.round.decimals, torch.linspace(-999, 999, 77), decimals=decimals)


def test_frexp() -> None:
    for dtype in (F32, BF16, F64):
        check(torch.ops.aten.frexp.Tensor, floats(dtype)[:-3])


def test_polygamma_and_mvlgamma() -> None:
    x = torch.tensor([-8.5, -2.7, -0.3, 0.3, 1.0, 2.0, 30.0], dtype=F64)
    for n in range(5):
        check(torch.ops.aten.polygamma.default, n, x)
    check(torch.ops.aten.mvlgamma.default, x[-2:].float(), 2)


# ---- binary ---------------------------------------------------------------------------------------------------------
BINARY = words(
    """
        add.Tensor sub.Tensor rsub.Tensor mul.Tensor div.Tensor atan2 copysign.Tensor eq.Tensor ne.Tensor
        lt.Tensor le.Tensor gt.Tensor ge.Tensor floor_divide fmax fmin fmod.Tensor heaviside hypot logaddexp
        logaddexp2 logical_and logical_or logical_xor maximum minimum nextafter pow.Tensor_Tensor
        remainder.Tensor xlogy.Tensor clamp_min.Tensor clamp_max.Tensor special_xlog1py ldexp.Tensor
        sigmoid_backward tanh_backward
        """
)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("name", BINARY)
def test_binary(name: str, dtype: torch.dtype) -> None:
    if name in ("logaddexp2", "special_xlog1py") and dtype == BF16:
        dtype = F64
    check(overload(name), *pairs(dtype), **tolerance(dtype))


@pytest.mark.parametrize("dtype", [I8, I64, U8], ids=str)
@pytest.mark.parametrize(
    "name",
    words(
        """
        add.Tensor sub.Tensor mul.Tensor div.Tensor floor_divide fmod.Tensor remainder.Tensor bitwise_and.Tensor
        gcd lcm bitwise_or.Tensor bitwise_xor.Tensor bitwise_left_shift.Tensor bitwise_right_shift.Tensor
        __lshift__.Tensor maximum __rshift__.Tensor minimum fmax lt.Tensor logical_and atan2 copysign.Tensor
        heaviside pow.Tensor_Tensor
        """
    ),
)
def test_binary_integers(name: str, dtype: torch.dtype) -> None:
    a, b = integers(dtype)
    if name in ("floor_divide", "fmod.Tensor", "remainder.Tensor", "gcd", "lcm"):
        b = torch.where(b == 0, torch.ones_like(b), b)
    check(overload(name), a, b)


@pytest.mark.parametrize("name", words("add mul bitwise_and bitwise_or bitwise_xor logical_xor eq lt maximum minimum"))
def test_binary_bool(name: str) -> None:
    a, b = torch.tensor([False, False, True, True]), torch.tensor([False, True, False, True])
    check(overload(name if name in ("logical_xor", "maximum", "minimum") else f"{name}.Tensor"), a, b)


@pytest.mark.parametrize(
    "name", words("add.Tensor sub.Tensor mul.Tensor div.Tensor pow.Tensor_Tensor eq.Tensor ne.Tensor")
)
def test_binary_complex(name: str) -> None:
    x = complexes()
    check(overload(name), x, x.flip(0), rtol=1e-5, atol=1e-5)
    check(overload(name), x, x.real.contiguous(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", ["floor", "trunc", None])
@pytest.mark.parametrize("dtype", [F32, BF16, I32, U8], ids=str)
def test_rounding_mode(mode: str | None, dtype: torch.dtype) -> None:
    a, b = integers(dtype)
    check(torch.ops.aten.div.Tensor_mode, a, torch.where(b == 0, torch.ones_like(b), b), rounding_mode=mode)
    check(torch.ops.aten.div.Scalar_mode, a, -3, rounding_mode=mode) if dtype.is_signed else None
    check(torch.ops.aten.div.Scalar_mode, a, 2.5, rounding_mode=mode)


@pytest.mark.parametrize("exponent", [0, 1, 2, 3, 5, 0.5, -0.5, -1, -2, 1.7, -1.5])
def test_power_scalar(exponent: float) -> None:
    for dtype in (F32, BF16):
        check(torch.ops.aten.pow.Tensor_Scalar, floats(dtype), exponent, **tolerance(dtype))
    check(torch.ops.aten.pow.Scalar, exponent, floats(F32))
    if exponent >= 0:
        for dtype in (I8, I64, U8):
            check(torch.ops.aten.pow.Tensor_Scalar, integers(dtype)[0], exponent)


def test_zeta_and_incomplete_gamma() -> None:
    grid = torch.cartesian_prod(
        torch.tensor([0.0, 0.1, 0.5, 1.0, 3.0, 25.0, 60.0, INF, NAN]),
        torch.tensor([0.0, 1e-3, 0.4, 2.0, 20.0, 55.0, INF, NAN]),
    )
    for dtype, rtol in ((F32, 2e-5), (F64, 1e-9)):
        for name in ("igamma", "igammac"):
            check(overload(name), *grid.to(dtype).unbind(1), rtol=rtol, atol=1e-6)
    x = torch.tensor([-12.2, -8.5, -2.0, -0.3, 0.3, 2.0, 40.0], dtype=F64)
    for s in (0.5, 1.0, 2.0, 2.5, 5.0):
        check(torch.ops.aten.special_zeta.self_scalar, s, x)


@pytest.mark.parametrize(
    "name",
    [f"{s}chebyshev_polynomial_{k}" for s in ("", "shifted_") for k in "tuvw"]
    + ["hermite_polynomial_h", "hermite_polynomial_he", "laguerre_polynomial_l", "legendre_polynomial_p"],
)
def test_orthogonal_polynomials(name: str) -> None:
    x = torch.tensor([-1.5, -1.0, -0.7, 0.0, 0.3, 1.0, 1.2], dtype=F64)
    n = torch.tensor([-1.0, 0.0, 1.0, 2.0, 5.0, 9.0, 20.0], dtype=F64)
    check(overload(f"special_{name}"), x[:, None], n)
    check(overload(f"special_{name}.n_scalar"), x, 4.0)


# ---- scalars, promotion, three operands -----------------------------------------------------------------------------
@pytest.mark.parametrize("number", [2, -3, 0.1, True])
@pytest.mark.parametrize("name", words("add mul sub rsub eq lt remainder fmod"))
def test_scalars(name: str, number: float) -> None:
    if name in ("sub", "rsub") and number is True:
        pytest.skip("PyTorch refuses to subtract a bool")
    for dtype in (F32, BF16, I64, F64):
        check(overload(f"{name}.Scalar"), torch.arange(-3, 4).to(dtype), number, **tolerance(dtype))


def test_a_number_is_rounded_before_it_is_compared() -> None:
    check(torch.ops.aten.eq.Scalar, torch.tensor([0.1, 0.2], dtype=BF16), 0.1)


@pytest.mark.parametrize("name", ["add", "sub", "rsub"])
def test_alpha(name: str) -> None:
    x, y = torch.tensor([[1.5], [-2.0]]), torch.tensor([3.0, 0.25, -1.0])
    for alpha in (2.5, -1):
        check(overload(f"{name}.Tensor"), x, y, alpha=alpha)
        check(overload(f"{name}.Scalar"), x, 1.5, alpha)
    check(overload(f"{name}.Tensor"), x.long(), y.long(), alpha=3)


def test_promotion() -> None:
    add, mul = torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor
    tensors = [torch.tensor([1, 2]), torch.tensor([1.5, 2.5], dtype=BF16), torch.tensor([0.1, 0.2]),
               torch.tensor(0.1, dtype=F64),
               torch.tensor([True, False]), torch.tensor([3, 250], dtype=U8), torch.tensor([1j, 2 + 1j])]  # fmt: skip
    for x in tensors:
        for y in tensors:
            check(add, x, y)
            check(mul, y, x)
    check(torch.ops.aten.where.self, torch.tensor([True, False]), torch.tensor([1, 2]), torch.tensor(2.5))
    check(torch.ops.aten.lt.Tensor, torch.tensor([1, 3]), torch.tensor([1.5, 2.5], dtype=BF16))


def test_three_operands() -> None:
    x, y, z = (torch.linspace(-2, 3, 12).roll(i).reshape(3, 4) for i in (0, 3, 7))
    for value in (1, 0.5):
        check(torch.ops.aten.addcmul.default, x, y, z[:1], value=value)
        check(torch.ops.aten.addcdiv.default, x, y, z[:, :1], value=value)
    for weight in (0.0, 0.3, 0.5, 1.0):
        check(torch.ops.aten.lerp.Scalar, x, y, weight)
    check(torch.ops.aten.lerp.Tensor, x, y, z)
    check(torch.ops.aten.addcmul.default, x.long(), y.long(), z.long(), value=3)


@pytest.mark.parametrize("bounds", [(None, 1.5), (-0.5, None), (-0.5, 1.5), (2.0, 1.0), (NAN, 1.0)])
def test_clamp(bounds: tuple) -> None:
    check(torch.ops.aten.clamp.default, floats(F32), *bounds)
    check(torch.ops.aten.clamp.default, torch.arange(-3, 4), *bounds)
    tensors = [None if b is None else torch.tensor([[b], [0.5]]) for b in bounds]
    check(torch.ops.aten.clamp.Tensor, floats(F32), *tensors)


# ---- activations and their derivatives ------------------------------------------------------------------------------
BACKWARD = {
    "silu_backward": (), "mish_backward": (), "hardswish_backward": (), "hardsigmoid_backward": (),
    "logit_backward": (),
    "hardtanh_backward": (-1.0, 1.5), "softplus_backward": (2.0, 10.0), "softshrink_backward": (1.5,),
    "hardshrink_backward": (1.5,), "threshold_backward": (0.5,), "leaky_relu_backward": (0.2, False),
}  # fmt: skip


@pytest.mark.parametrize("name", BACKWARD)
def test_backward(name: str) -> None:
    for dtype in (F32, BF16):
        x = floats(dtype, [v for v in SPECIAL if v != 0 or name != "logit_backward"])
        x = x.repeat(64)  # in whole vectors: what the CPU computes one by one is not the same at NaN
        check(overload(name), torch.linspace(-2, 2, x.numel()).to(dtype), x, *BACKWARD[name], **tolerance(dtype))


def test_activations_with_arguments() -> None:
    x, g = floats(F32).repeat(64), torch.linspace(-2, 2, 64 * len(SPECIAL))
    aten = torch.ops.aten
    for is_result in (False, True):
        check(aten.elu_backward.default, g, 1.5, 1.2, 0.7, is_result, x)
    check(aten.elu.default, x, 1.5, 1.2, 0.7)
    check(aten.celu.default, x, 1.5)
    check(aten.softplus.default, x, 2.0, 10.0)
    check(aten.threshold.default, x, 0.5, 20.0)
    check(aten.hardtanh.default, x, -0.5, 2.0)
    check(aten.logit.default, x, 0.1)
    check(aten.logit_backward.default, g, x, 0.1)
    buffer = aten.log_sigmoid_forward.default(x)[1]
    check(aten.log_sigmoid_backward.default, g, x, buffer)
    slope = torch.tensor([0.3])
    check(aten._prelu_kernel.default, x, slope)
    check(aten._prelu_kernel_backward.default, g, x, slope)
    y = x[:24].reshape(4, 6)
    check(aten.glu.default, y, 1)
    check(aten.glu_backward.default, g[:12].reshape(2, 6), y, 0)


# ---- selection, copies, complex -------------------------------------------------------------------------------------
def test_selection() -> None:
    x, mask = torch.arange(6.0).reshape(2, 3), torch.tensor([[True], [False]])
    aten = torch.ops.aten
    check(aten.masked_fill.Scalar, x, mask, -INF)
    check(aten.masked_fill.Tensor, x.to(BF16), mask, torch.tensor(2.5))
    check(aten.where.self, mask, x, -x[0])
    check(aten.nan_to_num.default, floats(F32), 1.0, 2.0, 3.0)
    check(aten.nan_to_num.default, floats(BF16))
    check(aten.isclose.default, floats(F32), floats(F32) + 1e-6, 1e-5, 1e-8, True)
    check(aten.fill.Scalar, x, 7)
    check(aten.fill.Tensor, x.long(), torch.tensor(2.0))
    check(aten.zero.default, x)


DTYPES = [F32, F64, BF16, F16, I8, torch.int16, I32, I64, U8, BOOL, C64, torch.complex128]


@pytest.mark.parametrize("source", DTYPES, ids=str)
def test_conversions(source: torch.dtype) -> None:
    values = torch.tensor([0.0, 0.5, 1.0, 1.49, 2.5, 3.5, 100.7]).to(source)
    for target in DTYPES:
        x = -values if source.is_signed and target.is_signed and source != BOOL else values
        check(torch.ops.aten._to_copy.default, x, dtype=target)
        check(torch.ops.aten.copy.default, torch.zeros(2, 7, dtype=target), x)


def test_complex_construction() -> None:
    x, y = torch.tensor([1.0, -2.0, 0.0]), torch.tensor([0.5, 3.0, -1.0])
    check(torch.ops.aten.complex.default, x, y)
    check(torch.ops.aten.polar.default, x, y)
    check(torch.ops.aten.clone.default, torch.complex(x, y))


@pytest.mark.parametrize("name", ["sigmoid_backward", "tanh_backward"])
def test_complex_derivatives_conjugate(name: str) -> None:
    check(overload(name), complexes(), complexes().flip(1) * 0.5, rtol=1e-5, atol=1e-5)


# ---- the other forms of an operator ---------------------------------------------------------------------------------
def test_in_place_and_out() -> None:
    aten = torch.ops.aten
    x, y = torch.arange(6.0).reshape(2, 3), torch.tensor([1.0, 2.0, 3.0])
    check(aten.add_.Tensor, x.clone(), y, alpha=2)
    check(aten.mul_.Scalar, torch.arange(3), 2)
    check(aten.relu_.default, (x - 2).t())
    check(aten.masked_fill_.Scalar, x.clone(), x > 2, 9.0)
    check(aten.pow_.Scalar, x.clone(), 2)
    check(aten.copy_.default, x.t().clone(), y[:, None].to(BF16))
    check(aten.exp.out, x, out=torch.empty(2, 3))
    check(aten.eq.Tensor_out, x, y, out=torch.empty(2, 3, dtype=BOOL))


def test_views_and_empty() -> None:
    x = torch.arange(24.0).reshape(2, 3, 4)
    check(torch.ops.aten.add.Tensor, x[:, 1], x[0, :2, ::1])
    check(torch.ops.aten.mul.Tensor, x.permute(2, 0, 1), x[0, 0].view(4, 1, 1))
    check(torch.ops.aten.add.Tensor, torch.empty(0, 3), torch.ones(3))
    check(torch.ops.aten.exp.default, x[..., ::2])
    check(torch.ops.aten.gcd.default, torch.tensor(12), torch.tensor(18))


def test_lazy_conjugation() -> None:
    """Conjugate and negative views share their memory with the original: reading and writing must not forget it."""
    aten, z = torch.ops.aten, complexes()
    for x in (z.conj(), z.mH, z.conj().imag):
        check(aten.clone.default, x)
        check(aten.mul.Tensor, x, x)
        check(aten.copy_.default, torch.zeros_like(x), x)
    target = torch.zeros(4, 5, dtype=C64)
    check(aten.copy_.default, target.conj(), z)
    check(aten.copy_.default, target.conj(), z.conj())
    check(aten.add_.Tensor, z.conj().clone().conj(), z)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_mask_does_not_hide_what_is_not_finite(dtype: torch.dtype) -> None:
    x = torch.tensor([math.inf, math.nan, -2.0], dtype=dtype)
    no = torch.zeros(3, dtype=torch.bool)
    for function in (lambda x, m: x * m, lambda x, m: m * x, lambda x, m: x.clone().mul_(m), lambda x, m: x * m.to(x)):
        got, want = function(x.tpu(), no.tpu()).cpu(), function(x, no)
        torch.testing.assert_close(got, want, equal_nan=True)
        assert torch.equal(got.signbit()[2], want.signbit()[2])
    z = torch.tensor([[math.nan, 1.0], [2.0, 1.0]], dtype=dtype)
    got, want = (t.requires_grad_() for t in (z.tpu(), z))
    got.amax(1).sum().backward()
    want.amax(1).sum().backward()
    torch.testing.assert_close(got.grad.cpu(), want.grad, equal_nan=True)


def test_erfinv_near_one() -> None:
    x = torch.tensor([0.99, 0.999, 0.9999, -0.99999])
    check(torch.ops.aten.erfinv.default, x, rtol=2e-7, atol=0)
