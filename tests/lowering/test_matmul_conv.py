"""Products and convolutions: values on every dtype, and the error of every float32 precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.lowering.harness import check, run
from tests.support import matmul_precision

aten = torch.ops.aten
DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.complex64,
    torch.int64,
    torch.int8,
    torch.uint8,
)
HALF = {torch.bfloat16: {"rtol": 2e-2, "atol": 5e-2}, torch.float16: {"rtol": 3e-3, "atol": 1e-2}}


def make(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, dtype=torch.promote_types(dtype, torch.float32)).to(dtype)
    return torch.randint(0, 100, shape).to(dtype)


PRODUCTS: list[tuple[Any, tuple[tuple[int, ...], ...], dict[str, Any]]] = [
    (aten.mm.default, ((3, 5), (5, 4)), {}),
    (aten.mm.default, ((3, 0), (0, 4)), {}),
    (aten.mm.default, ((0, 3), (3, 4)), {}),
    (aten.bmm.default, ((2, 3, 5), (2, 5, 4)), {}),
    (aten.addmm.default, ((4,), (3, 5), (5, 4)), {"beta": 2, "alpha": 3}),
    (aten.addmm.default, ((3, 1), (3, 0), (0, 4)), {}),
    (aten.baddbmm.default, ((2, 3, 4), (2, 3, 5), (2, 5, 4)), {}),
    (aten.addbmm.default, ((3, 4), (2, 3, 5), (2, 5, 4)), {"beta": 0, "alpha": 2}),
    (aten.mv.default, ((3, 5), (5,)), {}),
    (aten.addmv.default, ((3,), (3, 5), (5,)), {"alpha": 2}),
    (aten.addr.default, ((3, 5), (3,), (5,)), {"beta": 3}),
    (aten.dot.default, ((5,), (5,)), {}),
    (aten.vdot.default, ((5,), (5,)), {}),
    (aten.linear.default, ((2, 3, 5), (4, 5), (4,)), {}),
    (aten.matmul.default, ((2, 1, 3, 5), (6, 5, 4)), {}),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("op", "shapes", "options"), PRODUCTS, ids=lambda v: str(v) if callable(v) else "")
def test_product(op: Any, shapes: tuple[tuple[int, ...], ...], options: dict[str, Any], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    check(op, *(make(dtype, *s) for s in shapes), **options, **HALF.get(dtype, {}))


def test_product_forms() -> None:
    torch.manual_seed(0)
    r = torch.randn
    check(aten.addr.default, r(3, 5) > 0, r(3) > 0, r(5) > 0)
    bytes_ = [torch.randint(-128, 128, (32, 32), dtype=torch.int8) for _ in range(2)]
    check(aten._int_mm.default, *bytes_)
    check(aten._addmm_activation.default, r(4), r(3, 5), r(5, 4))
    check(aten._addmm_activation.default, r(4), r(3, 5), r(5, 4), use_gelu=True)
    check(aten.mm.out, r(3, 2), r(2, 4), out=torch.empty(3, 4))
    check(aten.addmm_.default, r(3, 4), r(3, 5), r(5, 4), beta=0.5)
    check(aten.bmm.default, r(2, 5, 3).mT, r(2, 4, 5).mT)
    check(aten.einsum.default, "bij,kjb->bik", [r(2, 3, 5), r(6, 5, 2)])
    check(aten.tensordot.default, r(2, 3, 5), r(5, 3, 4), [1, 2], [1, 0])
    check(aten.bilinear.default, r(6, 3), r(6, 5), r(4, 3, 5), r(4))
    check(
        aten.bilinear.default,
        r(6, 3).bfloat16(),
        r(6, 5).bfloat16(),
        r(4, 3, 5).bfloat16(),
        None,
        **HALF[torch.bfloat16],
    )


def test_zero_beta_ignores_nan() -> None:
    nan = torch.full((3, 4), float("nan"))
    plan = check(aten.addmm.default, nan, torch.randn(3, 5), torch.randn(5, 4), beta=0.0)
    assert any(operand.kind == "scalar" for operand in plan.operands), "beta is an operand"
    got, _, _ = run(aten.addmm.default, nan, torch.randn(3, 5), torch.randn(5, 4), beta=1.0)
    assert got[0].isnan().all()


def test_wide_results() -> None:
    x, y = torch.randn(8, 64).bfloat16(), torch.randn(64, 8).bfloat16()
    for got in (
        run(aten.mm.dtype, x, y, torch.float32)[0][0],
        run(aten.addmm.dtype, torch.zeros(8, 8), x, y, torch.float32)[0][0],
        run(aten.bmm.dtype, x[None], y[None], torch.float32)[0][0][0],
    ):
        torch.testing.assert_close(got, x.float() @ y.float(), rtol=1e-6, atol=1e-5)


def test_int64_is_exact() -> None:
    x = torch.full((2, 3), 2**40 + 1)
    check(aten.mm.default, x, torch.full((3, 2), 2**20 + 7))
    check(aten.mm.default, x, torch.full((3, 2), 2**62 + 3))  # wraps


# ---- precision ------------------------------------------------------------------------------------------------------
def relative_error(op: Any, args: tuple[Any, ...], precision: str) -> float:
    wide = op(*(a.double() if isinstance(a, torch.Tensor) else a for a in args))
    got = run(op, *args, precision=precision)[0][0]
    assert got.dtype == torch.float32
    return float((got.double() - wide).norm() / wide.norm())


CASES = {
    "mm": (aten.mm.default, (torch.randn(64, 256), torch.randn(256, 64))),
    "conv": (
        aten.convolution.default,
        (torch.randn(2, 16, 12, 12), torch.randn(8, 16, 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1),
    ),
}
#: Of one operand: 2^-9 at most from rounding to bfloat16, 2^-17 from a high and a low half.
BOUNDS = {"medium": (2.0**-10, 2.0**-7), "high": (2.0**-19, 2.0**-15), "highest": (0.0, 2.0**-20)}


@pytest.mark.parametrize("precision", BOUNDS)
@pytest.mark.parametrize("case", CASES)
def test_precision_of_float32(case: str, precision: str) -> None:
    low, high = BOUNDS[precision]
    assert low <= relative_error(*CASES[case], precision) <= high


@pytest.mark.parametrize(("precision", "attribute"), [("medium", "DEFAULT"), ("high", "HIGH"), ("highest", "HIGHEST")])
def test_precision_attribute(precision: str, attribute: str) -> None:
    _, plan, _ = run(aten.mm.default, torch.randn(4, 4), torch.randn(4, 4), precision=precision)
    assert f"precision {attribute}>" in plan.text


def test_precision_leaves_exact_types_and_infinities_alone() -> None:
    x, y = torch.randn(4, 64, dtype=torch.float64), torch.randn(64, 4, dtype=torch.float64)
    torch.testing.assert_close(run(aten.mm.default, x, y, precision="medium")[0][0], x @ y)
    z = x + 1j * x
    torch.testing.assert_close(run(aten.mm.default, z, z.mT, precision="medium")[0][0], z @ z.mT)
    x32, y32 = x.float(), y.float()
    x32[0, 0] = float("inf")
    got = run(aten.mm.default, x32, y32, precision="high")[0][0]
    torch.testing.assert_close(got, x32 @ y32, rtol=1e-4, atol=1e-4)


# ---- convolution ----------------------------------------------------------------------------------------------------
# input, weight, stride, padding, dilation, transposed, output_padding, groups
CONVOLUTIONS = [
    ((2, 4, 9), (6, 4, 3), [2], [1], [1], False, [0], 1),
    ((2, 4, 9, 8), (6, 4, 3, 2), [2, 1], [1, 0], [1, 2], False, [0, 0], 1),
    ((2, 4, 9, 8), (6, 2, 3, 3), [2, 3], [2, 1], [2, 1], False, [0, 0], 2),
    ((2, 4, 9, 8), (8, 1, 3, 3), [2, 1], [1, 1], [1, 1], False, [0, 0], 4),
    ((2, 3, 5, 6, 7), (4, 3, 2, 3, 3), [1, 2, 1], [0, 1, 1], [1, 1, 2], False, [0, 0, 0], 1),
    ((2, 4, 5), (4, 3, 3), [2], [1], [1], True, [1], 1),
    ((2, 4, 5, 6), (4, 2, 3, 3), [2, 1], [1, 3], [2, 1], True, [1, 0], 2),
    ((2, 4, 5, 6), (4, 1, 3, 3), [2, 2], [1, 1], [1, 1], True, [0, 0], 4),
    ((1, 2, 3, 4, 3), (2, 3, 2, 3, 2), [2, 1, 2], [1, 1, 0], [1, 1, 1], True, [1, 0, 1], 1),
    ((0, 4, 9, 8), (6, 4, 1, 1), [1, 1], [0, 0], [1, 1], False, [0, 0], 1),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CONVOLUTIONS, ids=str)
def test_convolution(case: tuple[Any, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    tolerance = {"rtol": 3e-2, "atol": 1e-1} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-4}
    transposed, groups = case[5], case[7]
    out = case[1][1] * groups if transposed else case[1][0]
    x, w, b = make(dtype, *case[0]), make(dtype, *case[1]), make(dtype, out)
    check(aten.convolution.default, x, w, b, *case[2:], **tolerance)
    y = aten.convolution(x, w, b, *case[2:])
    grad = make(dtype, *y.shape)
    everything = [True, True, True]
    check(aten.convolution_backward.default, grad, x, w, [out], *case[2:], everything, strides=False, **tolerance)
    # What at::convolution calls on a PrivateUse1 device.
    got = run(aten.convolution_overrideable.default, x, w, b, *case[2:])[0][0]
    torch.testing.assert_close(got, y, **tolerance)
    expected = aten.convolution_backward(grad, x, w, [out], *case[2:], [True, False, True])
    got = run(aten.convolution_backward_overrideable.default, grad, x, w, *case[2:], [True, False, True])[0]
    assert got[1] is None
    torch.testing.assert_close([got[0], got[2]], [expected[0], expected[2]], **tolerance)


def test_convolution_forms() -> None:
    r, ints = torch.randn, lambda *s: torch.randint(-9, 9, s)
    check(aten.convolution.default, ints(2, 3, 5, 5), ints(4, 3, 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    check(aten.conv2d.default, r(3, 5, 5), r(4, 3, 3, 3), r(4), rtol=1e-4, atol=1e-4)
    check(aten.conv2d.default, r(2, 3, 5, 5) + 1j, r(4, 3, 3, 3) + 2j, None, rtol=1e-4, atol=1e-4)
    check(aten.conv2d.padding, r(2, 3, 5, 5), r(4, 3, 3, 3), None, [1, 1], "same", rtol=1e-4, atol=1e-4)
    x = r(2, 3, 5, 5).to(memory_format=torch.channels_last)
    check(aten.conv2d.default, x, r(4, 3, 3, 3), r(4), rtol=1e-4, atol=1e-4, strides=False)


def test_gradient_of_bias_is_summed_in_parts() -> None:
    """Added one by one, 16000 complex numbers lose two digits."""
    grad = torch.randn(2, 2, 80, 100, dtype=torch.complex64) + 1
    x, w = torch.randn(2, 1, 80, 100, dtype=torch.complex64), torch.randn(2, 1, 1, 1, dtype=torch.complex64)
    geometry = ([2], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [False, False, True])
    got = run(aten.convolution_backward.default, grad, x, w, *geometry)[0][2]
    torch.testing.assert_close(got, grad.to(torch.complex128).sum((0, 2, 3)).to(grad.dtype), rtol=4e-7, atol=0)


def test_the_layout_of_a_convolution() -> None:
    """Row-major in one dimension, whatever the input is; in three, channels last where oneDNN convolves."""
    for shape, weight, step in (((2, 3, 8), (4, 3, 3), 1), ((2, 3, 6, 6, 6), (3, 2, 3, 3, 3), 2)):
        last = torch.channels_last_3d if len(shape) == 5 else torch.contiguous_format
        x = torch.randn(shape).contiguous(memory_format=last)
        x = x.mT.contiguous().mT if len(shape) == 3 else x
        rank = len(shape) - 2
        args = (x, torch.randn(weight), None, [step] * rank, [0] * rank, [1] * rank, rank == 3, [0] * rank, 1)
        got, _, _ = run(torch.ops.aten.convolution.default, *args)
        assert got[0].stride() == torch.ops.aten.convolution.default(*args).stride()


def test_rows_a_power_of_two_apart_are_multiplied_exactly() -> None:
    x, y = torch.randn(32, 1024), torch.randn(70, 1024)
    with matmul_precision("highest"):
        torch.testing.assert_close((x.tpu() @ y.tpu().t()).cpu(), x @ y.t(), rtol=1e-5, atol=1e-4)
        torch.testing.assert_close((x.tpu().t().contiguous().t() @ y.tpu().t()).cpu(), x @ y.t(), rtol=1e-5, atol=1e-4)


def test_a_linear_layer_in_bfloat16_rounds_the_product_and_then_the_sum() -> None:
    """On every platform: what a TPU's program does is what a laptop shows."""
    x, w, b = torch.randn(64, 32), torch.randn(16, 32), torch.randn(16)
    x, w, b = (t.to(torch.bfloat16) for t in (x, w, b))
    ours = torch.nn.functional.linear(x.to("tpu"), w.to("tpu"), b.to("tpu")).cpu()
    exact = (x.double() @ w.double().T).to(torch.bfloat16)
    torch.testing.assert_close(ours, exact + b, rtol=0, atol=0.0079 * exact.abs().max().item())
    assert (ours == exact + b).float().mean() > 0.98  # all but sums on the edge between two numbers
