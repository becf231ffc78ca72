"""Tensors made from numbers, against CPU PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.lowering.harness import check, run

aten = torch.ops.aten
REAL = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.uint8]
DTYPES = [*REAL, torch.bool, torch.complex64]
X = torch.randn(3, 4).t()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fills(dtype: torch.dtype) -> None:
    check(aten.full.default, [2, 3], 1.5, dtype=dtype)
    check(aten.full_like.default, X, 200, dtype=dtype)
    check(aten.new_full.default, X, [0, 2], 1, dtype=dtype)
    check(aten.scalar_tensor.default, -3 if dtype.is_signed else 3, dtype=dtype)
    for word in ("zeros", "ones"):
        check(getattr(aten, word).default, [2, 3], dtype=dtype)
        check(getattr(aten, f"{word}_like").default, X, dtype=dtype)
        check(getattr(aten, f"new_{word}").default, X, [2], dtype=dtype)
    check(aten.eye.default, 3, dtype=dtype)
    check(aten.eye.m, 2, 4, dtype=dtype)


def test_fill_values_share_one_program() -> None:
    texts = {run(aten.full.default, [2], value)[1].text for value in (1.5, -2.0, float("nan"))}
    assert len(texts) == 1


@pytest.mark.parametrize("op, args", [
    (aten.full.out, ([3], 2.5)), (aten.zeros.out, ([3],)), (aten.ones.out, ([3],)), (aten.eye.out, (3,)),
    (aten.eye.m_out, (2, 3)), (aten.arange.out, (4,)), (aten.arange.start_out, (1, 9, 3)),
    (aten.linspace.out, (0, 1, 5)), (aten.logspace.out, (0, 1, 5)), (aten.range.out, (1, 4, 1.5)),
])  # fmt: skip
def test_out(op: Any, args: tuple[Any, ...]) -> None:
    check(op, *args, out=torch.empty(op(*args, out=torch.empty(0)).shape))


# ---- ranges ---------------------------------------------------------------------------------------------------------
RANGES = [
    (0, 10, 1), (5, -5, -2), (0, 1, 0.1), (-1.5, 2.5, 0.5), (3, 3, 1), (0, 2000, 7), (1, 0, -0.3),
    (2**40, 2**40 + 5, 2), (16777216, 16777222, 1),
]  # fmt: skip


@pytest.mark.parametrize("bounds", RANGES, ids=str)
@pytest.mark.parametrize(
    "dtype", [None, torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int32], ids=str
)
def test_arange(bounds: tuple[Any, ...], dtype: torch.dtype | None) -> None:
    if dtype == torch.int32 and abs(bounds[0]) > 2**31:
        pytest.skip("does not fit")
    if dtype is not None and not dtype.is_floating_point and abs(bounds[2]) < 1:
        pytest.skip("a step of zero")
    # The CPU adds steps in the dtype within a vector of eight; here every element is rounded once.
    check(aten.arange.start_step, *bounds, dtype=dtype, rtol=2e-2 if dtype == torch.bfloat16 else 1e-6, atol=1e-6)


def test_short_forms() -> None:
    check(aten.arange.default, 7)
    check(aten.arange.default, 6.5)
    check(aten.arange.start, 2, 7, dtype=torch.uint8)
    check(aten.range.default, 1, 4)
    check(aten.range.step, 0, 5, 0.5, dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.uint8, torch.complex64], ids=str)
@pytest.mark.parametrize("steps", [0, 1, 2, 7, 50])
def test_linspace(steps: int, dtype: torch.dtype) -> None:
    start, end = (2, 100) if dtype == torch.uint8 else (-3.5, 10.25)
    check(aten.linspace.default, start, end, steps, dtype=dtype)
    check(aten.linspace.Tensor_Tensor, torch.tensor(float(start)), torch.tensor(end), steps, dtype=dtype)
    check(aten.linspace.Tensor_Scalar, torch.tensor(start), end, steps, dtype=dtype)
    check(aten.linspace.Scalar_Tensor, end, torch.tensor(start), steps, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64], ids=str)
@pytest.mark.parametrize("base", [10.0, 2.0, 0.5])
def test_logspace(base: float, dtype: torch.dtype) -> None:
    check(aten.logspace.default, 0, 4, 5, base, dtype=dtype)
    if dtype.is_floating_point:
        check(aten.logspace.default, -1.5, 2, 10, base, dtype=dtype)
        check(aten.logspace.Tensor_Tensor, torch.tensor(-1.0), torch.tensor(2.0), 4, base, dtype=dtype)


# ---- triangles, windows ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("offset", [-7, -2, 0, 1, 3, 9])
@pytest.mark.parametrize("rows, columns", [(3, 3), (2, 5), (5, 2), (1, 1), (0, 3), (4, 0)])
def test_triangle_indices(rows: int, columns: int, offset: int) -> None:
    check(aten.tril_indices.default, rows, columns, offset)
    check(aten.triu_indices.default, rows, columns, offset, dtype=torch.int32)


@pytest.mark.parametrize("name", ["hann", "hamming", "bartlett", "blackman", "kaiser"])
@pytest.mark.parametrize("length", [0, 1, 6])
def test_windows(name: str, length: int) -> None:
    for periodic in (True, False):
        check(getattr(aten, f"{name}_window").periodic, length, periodic, rtol=1e-5, atol=1e-6)
    check(aten.kaiser_window.beta, length, False, 5.0, dtype=torch.float64)


def test_uninitialised_memory_reads_nothing() -> None:
    """An ``empty_like`` inside a larger operator depends on no operand."""
    _, plan, _ = run(aten.empty_like.default, X)
    assert plan.operands == []
