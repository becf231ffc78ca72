"""Sorting, order statistics, binary search and scans against PyTorch on CPU."""

from __future__ import annotations

import re

import pytest
import torch

from tests.lowering.harness import check, run
from tests.lowering.test_reduction import FLOATS, HARD, INF, INTS, NAN, numbers, tolerance

aten = torch.ops.aten


# ---- sorting --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [*FLOATS, *INTS], ids=str)
@pytest.mark.parametrize("descending", [False, True])
def test_stable_sort(dtype: torch.dtype, descending: bool) -> None:
    x = HARD.to(dtype) if dtype.is_floating_point else numbers(dtype, 5, 9)
    for dim in (0, 1):
        check(aten.sort.stable, x, stable=True, dim=dim, descending=descending)


def test_sort_edges() -> None:
    check(aten.sort.default, torch.tensor(3.0))
    check(aten.sort.default, torch.empty(0))
    check(aten.sort.default, torch.randn(2, 3, 4), 1, True)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.uint8], ids=str)
@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("dim", [0, 1])
def test_topk(dtype: torch.dtype, largest: bool, dim: int) -> None:
    x = HARD.to(dtype) if dtype.is_floating_point else numbers(dtype, 5, 9)
    for k in (1, 3, x.shape[dim]):
        (values, indices), _, _ = run(aten.topk.default, x, k, dim, largest)
        expected = torch.topk(x, k, dim, largest)
        torch.testing.assert_close(values, expected.values, equal_nan=True)
        torch.testing.assert_close(x.gather(dim, indices), values, equal_nan=True)
        assert all(len(set(row.tolist())) == k for row in indices.movedim(dim, -1))
    assert run(aten.topk.default, x, 0, dim)[0][0].numel() == 0


def test_topk_of_distinct_values_has_the_same_indices() -> None:
    x = torch.randperm(60).reshape(3, 20)
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int64):
        check(aten.topk.default, x.to(dtype), 5)
        check(aten.topk.default, x.to(dtype), 2, 0, False)
    check(aten.topk.default, torch.tensor(2.0), 1)


def test_topk_knows_a_negative_nan() -> None:
    x = torch.tensor([1.0, -NAN, 3.0]).copysign(torch.tensor(-1.0))
    assert run(aten.topk.default, x, 1)[0][1] == 1


# ---- order statistics -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.uint8], ids=str)
def test_order_statistics(dtype: torch.dtype) -> None:
    x = torch.stack([torch.randperm(9) for _ in range(4)]).to(dtype)
    for dim in (0, 1):
        for op in (aten.median.dim, aten.nanmedian.dim):
            check(op, x, dim, True) if dim else run(op, x, dim)
        check(aten.kthvalue.default, x, 3, 1)
    check(aten.median.default, x)
    check(aten.nanmedian.default, x)


def test_median_of_nan() -> None:
    check(aten.median.default, HARD)
    check(aten.nanmedian.default, HARD)
    for op, reference in ((aten.median.dim, torch.median), (aten.nanmedian.dim, torch.nanmedian)):
        (values, indices), _, _ = run(op, HARD, 1)
        torch.testing.assert_close(values, reference(HARD, 1).values, equal_nan=True)
        torch.testing.assert_close(HARD.gather(1, indices[:, None])[:, 0], values, equal_nan=True)
    check(aten.median.default, torch.empty(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool], ids=str)
def test_mode(dtype: torch.dtype) -> None:
    check(aten.mode.default, torch.randint(0, 4, (6, 9)).to(dtype))
    check(aten.mode.default, torch.tensor([[3, 1, 3, 1, 2]]).to(dtype), 0)


# ---- binary search --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("right", [False, True])
def test_searchsorted(right: bool) -> None:
    rows, x = torch.sort(torch.randn(3, 9).round(decimals=1))[0], torch.randn(3, 5).round(decimals=1)
    x[0] = torch.tensor([NAN, INF, -INF, rows[0, 0], rows[0, -1]])
    for out_int32 in (False, True):
        check(aten.searchsorted.Tensor, rows, x, right=right, out_int32=out_int32)
        check(aten.searchsorted.Tensor, rows[0], x, right=right, out_int32=out_int32)
    check(aten.searchsorted.Scalar, rows[0], 0.3, right=right)
    check(aten.searchsorted.Scalar, torch.tensor([1, 3, 5]), 3, right=right)
    check(aten.bucketize.Tensor, x, rows[1], right=right)
    check(aten.bucketize.Scalar, 3, torch.tensor([1, 3, 5]), right=right)
    check(aten.searchsorted.Tensor, torch.empty(0), x, right=right)


def test_searchsorted_side_sorter_and_promotion() -> None:
    unsorted, order = torch.tensor([5, 1, 3]), torch.tensor([1, 2, 0])
    check(aten.searchsorted.Tensor, unsorted, torch.tensor([1, 2, 3, 4, 6]), sorter=order)
    check(aten.searchsorted.Tensor, torch.tensor([1.0, 2.0, 2.0, 3.0]), torch.tensor([2.0]), side="right")
    check(aten.bucketize.Tensor, torch.tensor([1.5, 2.5]), torch.tensor([1, 2, 3]))


# ---- scans ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [*FLOATS, *INTS, torch.complex64], ids=str)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_sums_and_products(dtype: torch.dtype, dim: int) -> None:
    x, close = numbers(dtype, 3, 6, 5), tolerance(dtype)
    check(aten.cumsum.default, x, dim, **close)
    check(aten.cumprod.default, x, dim, **close)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.uint8], ids=str)
@pytest.mark.parametrize("dim", [0, 1])
def test_running_extrema(dtype: torch.dtype, dim: int) -> None:
    x = HARD.to(dtype) if dtype.is_floating_point else numbers(dtype, 5, 9)
    check(aten.cummax.default, x, dim)
    check(aten.cummin.default, x, dim)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64], ids=str)
def test_logcumsumexp(dtype: torch.dtype) -> None:
    x, close = numbers(dtype, 4, 7) * 3, tolerance(dtype)
    check(aten.logcumsumexp.default, x, 1, **close)
    if dtype.is_floating_point:
        check(aten.logcumsumexp.default, HARD.to(dtype), 1, **close)
        check(aten.logcumsumexp.default, HARD.to(dtype), 0, **close)


def test_long_scans_cross_the_tree() -> None:
    x = torch.randint(-9, 9, (70001,))
    check(aten.cumsum.default, x, 0)
    check(aten.cummax.default, x.cumsum(0), 0)
    check(aten.cumsum.default, torch.rand(70001), 0, rtol=1e-5, atol=0)


def test_scan_edges() -> None:
    for op in (
        aten.cumsum.default,
        aten.cumprod.default,
        aten.cummax.default,
        aten.cummin.default,
        aten.logcumsumexp.default,
    ):
        check(op, torch.tensor(3.0), 0)
        check(op, torch.empty(3, 0), 0)
    check(aten.cumsum.default, torch.tensor([200, 200], dtype=torch.uint8), 0, dtype=torch.uint8)
    check(aten.cumsum.default, numbers(torch.int32, 4), 0, dtype=torch.float64)
    check(aten.cumsum.default, torch.tensor([2**62, 2**62, 2**62]), 0)
    check(aten.cumsum_.default, torch.randn(4, 3), 0)


def test_backward_of_cumulative_products() -> None:
    x = torch.tensor([[1.0, 2.0, -3.0], [0.0, 2.0, 0.0]])
    check(aten.cumprod_backward.default, torch.randn(2, 3), x, 1, x.cumprod(1), rtol=1e-4, atol=1e-4)
    check(aten.diff.default, x)


@pytest.mark.parametrize("dim, shape", [(1, (3,)), (-3, (2, 2)), (1, ()), (2, (2, 2))])
def test_a_dimension_that_is_not_there_is_the_cpus_error(dim: int, shape: tuple[int, ...]) -> None:
    x = torch.ones(shape)
    with pytest.raises(IndexError) as cpu:
        x.sort(dim)
    with pytest.raises(IndexError, match=re.escape(str(cpu.value))):
        x.tpu().sort(dim)
    with pytest.raises(IndexError):
        x.tpu().argsort(dim)
