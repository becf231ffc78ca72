"""Reductions, variances, norms and distances against PyTorch on CPU."""

from __future__ import annotations

import math

import pytest
import torch

from tests.lowering.harness import check, run

aten = torch.ops.aten
INF, NAN = math.inf, math.nan
FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
INTS = [torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool]

#: Rows: a NaN among infinities, ties with both zeros, nothing but NaN, nothing but -inf, plain numbers.
HARD = torch.tensor(
    [
        [1.0, NAN, -0.0, 0.0, INF, NAN, -INF, 1.0],
        [3.0, 3.0, 3.0, -0.0, 0.0, 2.0, 2.0, 2.0],
        [NAN] * 8,
        [-INF] * 8,
        [0.5, -1.25, 2.0, 7.0, -7.0, 0.25, 1.5, -3.0],
    ]
)


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    if not dtype.is_floating_point and not dtype.is_complex:
        return {}
    return {
        torch.bfloat16: {"rtol": 1e-2, "atol": 1e-2},
        torch.float16: {"rtol": 2e-3, "atol": 2e-3},
        torch.float64: {"rtol": 1e-12, "atol": 1e-12},
    }.get(dtype, {"rtol": 1e-5, "atol": 1e-5})


def numbers(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    if dtype == torch.bool:
        return torch.rand(shape) > 0.4
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, dtype=dtype)
    return torch.randint(0, 9, shape).to(dtype) - (0 if dtype == torch.uint8 else 4)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("dim", [0, 1])
def test_nan_infinities_and_ties(dtype: torch.dtype, dim: int) -> None:
    x, close = HARD.to(dtype), tolerance(dtype)
    for op in (aten.max.dim, aten.min.dim, aten.argmax.default, aten.argmin.default, aten.all.dim, aten.any.dim):
        check(op, x, dim, **close)
    for op in (aten.amax.default, aten.amin.default, aten.sum.dim_IntList, aten.mean.dim, aten.nansum.default):
        check(op, x, [dim], **close)
    check(aten.aminmax.default, x, dim=dim, **close)
    check(aten.logsumexp.default, x, [dim], **close)
    for p in (0.0, 1.0, 2.0, 3.0, 0.5, -1.0, INF, -INF):
        check(aten.linalg_vector_norm.default, x, p, [dim], **close)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_nan_wins_whole_reductions(dtype: torch.dtype) -> None:
    for op in (aten.max.default, aten.min.default, aten.argmax.default, aten.argmin.default, aten.aminmax.default):
        check(op, HARD.to(dtype))
        check(op, HARD[4:].to(dtype))


@pytest.mark.parametrize("dtype", [*FLOATS, *INTS, torch.complex64], ids=str)
def test_sums(dtype: torch.dtype) -> None:
    x, close = numbers(dtype, 3, 4, 5), tolerance(dtype)
    for op in (aten.sum.default, aten.prod.default, aten.any.default, aten.all.default, aten.count_nonzero.default):
        check(op, x, **close)
    check(aten.sum.dim_IntList, x, [0, -1], True, **close)
    check(aten.sum.dim_IntList, x, None, **close)
    check(aten.sum.dim_IntList, x, [], **close)
    check(aten.prod.dim_int, x, 1, **close)
    check(aten.all.dims, x, [])
    check(aten.any.dims, x, [0, 2], True)
    if dtype.is_floating_point or dtype.is_complex:
        check(aten.mean.default, x, **close)
        check(aten.mean.dim, x, [1], **close)


@pytest.mark.parametrize("dtype", INTS, ids=str)
def test_extrema_of_integers(dtype: torch.dtype) -> None:
    x = numbers(dtype, 4, 6)
    for op in (aten.max.dim, aten.min.dim):
        check(op, x, 1)
        check(op, x, 0, True)
    for op in (aten.amax.default, aten.amin.default, aten.aminmax.default):
        check(op, x)
    if dtype != torch.bool:
        check(aten.argmax.default, x)
        check(aten.argmin.default, x, -1, True)


def test_requested_dtypes() -> None:
    check(aten.sum.dim_IntList, numbers(torch.float32, 3, 4), [1], dtype=torch.float64)
    check(aten.sum.default, numbers(torch.float16, 3, 4), dtype=torch.float32)
    check(aten.sum.default, torch.tensor([200, 200], dtype=torch.uint8), dtype=torch.uint8)
    check(aten.mean.default, numbers(torch.int64, 5), dtype=torch.float32)
    check(aten.prod.dim_int, numbers(torch.int32, 2, 3), 1, dtype=torch.float64)


def test_int64_is_exact_and_wraps() -> None:
    x = torch.tensor([[2**62, -(2**63), 2**63 - 1, 5], [5, 2**62, 2**62, 2**62]])
    check(aten.sum.dim_IntList, x, [1])
    check(aten.sum.default, x)
    check(aten.prod.dim_int, x, 1)
    check(aten.max.dim, x, 1)
    check(aten.argmin.default, x)


def test_long_float32_sum_keeps_its_digits() -> None:
    assert run(aten.sum.default, torch.ones(2**25))[0][0] == 2**25
    check(aten.mean.default, torch.rand(2**20) + 1000, rtol=1e-6, atol=0)


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0)])
def test_empty(shape: tuple[int, ...]) -> None:
    x = torch.empty(shape)
    for op in (aten.sum.default, aten.mean.default, aten.prod.default, aten.all.default, aten.any.default):
        check(op, x)
    check(aten.linalg_vector_norm.default, x)
    check(aten.max.dim, torch.empty(3, 0), 0)
    with pytest.raises((RuntimeError, IndexError), match=r"dim|elements|numel"):
        run(aten.amax.default, x)


def test_zero_dimensional() -> None:
    x = torch.tensor(3.0)
    for op in (aten.sum.default, aten.mean.default, aten.max.default, aten.argmax.default):
        check(op, x)
    check(aten.max.dim, x, 0)
    check(aten.all.dim, x, 0)


# ---- variance -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "op", [aten.var.correction, aten.std.correction, aten.var_mean.correction, aten.std_mean.correction]
)
@pytest.mark.parametrize("dtype", [*FLOATS, torch.complex64], ids=str)
def test_variance(op: torch._ops.OpOverload, dtype: torch.dtype) -> None:
    x, close = numbers(dtype, 4, 5, 6), tolerance(dtype)
    check(op, x, **close)
    check(op, x, [0, 2], correction=0, keepdim=True, **close)
    check(op, x, [1], correction=1.5, **close)


def test_variance_does_not_cancel() -> None:
    # A mean rounded to half an ulp of 1e4 moves a variance of 1e-4 by up to 2e-3 of itself; cancellation would lose all
    # digits.
    check(aten.var.correction, torch.randn(1000) * 1e-2 + 1e4, correction=1, rtol=2e-3, atol=0)


def test_variance_without_degrees_of_freedom() -> None:
    for n, correction in ((1, 1), (3, 5), (0, 1), (0, -1)):
        check(aten.var.correction, torch.randn(n), correction=correction)


# ---- norms and distances --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("p", [0.0, 1.0, 2.0, 3.5, INF, -INF])
@pytest.mark.parametrize("dtype", [*FLOATS, torch.complex64], ids=str)
def test_vector_norm(p: float, dtype: torch.dtype) -> None:
    x, close = numbers(dtype, 3, 4, 5), tolerance(dtype)
    check(aten.linalg_vector_norm.default, x, p, **close)
    check(aten.linalg_vector_norm.default, x, p, [1, 2], True, **close)
    check(aten.norm.ScalarOpt_dim, x, p, [1], **close)


def test_norm_of_half_does_not_overflow() -> None:
    check(aten.linalg_vector_norm.default, torch.full((5,), 300.0).half(), 2)
    check(aten.linalg_vector_norm.default, torch.full((500,), 300.0).half(), 2, dtype=torch.float32)


def test_variance_of_nothing() -> None:
    check(aten.var.correction, torch.ones(0), correction=-2)
    check(aten.std_mean.correction, torch.ones(2, 0), [1], correction=-2)


def test_complex_magnitudes_are_rounded_once() -> None:
    """The backward pass of a maximum norm compares them with the norm, made by another program in another dtype."""
    x = torch.randn(1000, dtype=torch.complex64)
    x[:3] = torch.tensor([complex(math.inf, math.nan), complex(0, 0), complex(1e-30, -1e30)])
    check(aten.abs.default, x, rtol=0, atol=0)
    check(aten.linalg_vector_norm.default, x[1:], math.inf, rtol=0, atol=0)


def test_foreach_norm() -> None:
    check(aten._foreach_norm.Scalar, [torch.randn(3), torch.randn(2, 4).bfloat16()], 2, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("p", [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, INF])
def test_distances(p: float) -> None:
    x, y, grad = torch.randn(2, 5, 3), torch.randn(2, 4, 3), torch.randn(2, 5, 4)
    y[0, 0] = x[0, 0]
    close = {"rtol": 1e-4, "atol": 1e-4}
    check(aten._cdist_forward.default, x, y, p, None, **close)
    check(aten._cdist_backward.default, grad, x, y, p, aten._cdist_forward(x, y, p, None), **close)
    x = torch.cat([x[0], x[0, :1]])
    distance = aten._pdist_forward(x, p)
    check(aten._pdist_forward.default, x, p, **close)
    check(aten._pdist_backward.default, torch.randn_like(distance), x, p, distance, **close)


def test_distances_by_matrix_product() -> None:
    x, y = torch.randn(30, 8), torch.randn(28, 8)
    check(aten._cdist_forward.default, x, y, 2.0, None, rtol=1e-4, atol=1e-4)
    check(aten._euclidean_dist.default, x, y, rtol=1e-4, atol=1e-4)
    assert "dot_general" not in check(aten._cdist_forward.default, x, y, 2.0, 2, rtol=1e-4, atol=1e-4).text


def test_pairs_of_many_rows() -> None:
    x = torch.arange(300.0)[:, None] ** 1.5
    check(aten._pdist_forward.default, x, 1.0, rtol=1e-5, atol=1e-3)


def test_small_reductions_by_decomposition() -> None:
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    check(aten.trace.default, x)
    check(aten.dist.default, x, y, 3)
    check(aten.renorm.default, x, 2, 0, 1.0)
    check(aten.count_nonzero.dim_IntList, x > 0, [1])
    check(aten.logsumexp.default, x, [0, 1])


@pytest.mark.parametrize("bounds", [(-1, 1), (-1.5, 2), (0, 0)])
def test_histogram(bounds: tuple[float, float]) -> None:
    for dtype in (torch.float32, torch.float64):
        check(aten.histc.default, torch.randn(100).to(dtype), 10, *bounds)
    check(aten.histc.default, torch.ones(3), 4, *bounds)
    check(aten.histc.default, torch.tensor([1.0, NAN, 2.0, 3.0]), 4, 1, 3)


def test_histc_counts_integers_as_cuda_does() -> None:
    x = torch.tensor([0, 1, 1, 3], dtype=torch.int32, device="tpu")
    assert torch.histc(x, 4, 0, 3).tolist() == [1, 2, 0, 1] and torch.histc(x, 4, 0, 3).dtype == torch.int32
    assert torch.compile(lambda x: torch.histc(x, 4, 0, 3) * 2)(x).tolist() == [2, 4, 0, 2]
