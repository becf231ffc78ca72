"""Precision of float32 products: three levels, who decides, and where the decision reaches."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch.tpu import Precision

from tests.support import python

torch.manual_seed(0)
A, B, G = torch.randn(96, 128), torch.randn(128, 80), torch.randn(96, 80)
X, W = torch.randn(2, 8, 12, 12), torch.randn(16, 8, 3, 3)

PRODUCTS: dict[str, Callable[[str], torch.Tensor]] = {
    "mm": lambda d: A.to(d) @ B.to(d),
    "addmm": lambda d: torch.addmm(G.to(d), A.to(d), B.to(d)),
    "bmm": lambda d: torch.bmm(A.to(d).expand(3, -1, -1), B.to(d).expand(3, -1, -1)),
    "mv": lambda d: A.to(d) @ B.to(d)[:, 0],
    "einsum": lambda d: torch.einsum("ij,jk->ki", A.to(d), B.to(d)),
    "conv2d": lambda d: F.conv2d(X.to(d), W.to(d)),
}
#: Relative to the largest element of the exact result: (at least, at most).
SIZES = {Precision.DEFAULT: (2e-4, 2e-2), Precision.HIGH: (2e-8, 1e-4), Precision.HIGHEST: (0.0, 2e-6)}


def error(product: Callable[[str], torch.Tensor]) -> float:
    """The largest difference from float64, relative to the largest element."""
    with torch.device("cpu"):
        exact = exact_of(product)
    return float((product("tpu").cpu().double() - exact).abs().max() / exact.abs().max())


def exact_of(product: Callable[[str], torch.Tensor]) -> torch.Tensor:
    global A, B, G, X, W
    saved = A, B, G, X, W
    try:
        A, B, G, X, W = (t.double() for t in saved)
        return product("cpu")
    finally:
        A, B, G, X, W = saved


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("level", Precision)
def test_the_size_of_the_error(name: str, level: Precision) -> None:
    low, high = SIZES[level]
    with torch.tpu.precision(level):
        assert low <= error(PRODUCTS[name]) <= high


def mm_error() -> float:
    return error(PRODUCTS["mm"])


def is_at(level: Precision, measured: float) -> bool:
    low, high = SIZES[level]
    return low <= measured <= high


def test_the_scope_ends_where_its_block_ends() -> None:
    outside = mm_error()
    with torch.tpu.precision(Precision.HIGHEST):
        assert is_at(Precision.HIGHEST, mm_error())
        with torch.tpu.precision(Precision.HIGH):
            assert is_at(Precision.HIGH, mm_error())
        assert is_at(Precision.HIGHEST, mm_error())
        with pytest.raises(ZeroDivisionError), torch.tpu.precision(Precision.DEFAULT):
            raise ZeroDivisionError
        assert is_at(Precision.HIGHEST, mm_error())
    assert mm_error() == outside


def test_the_scope_reaches_the_backward_pass() -> None:
    a = A.to("tpu").requires_grad_()
    exact = G.double() @ B.double().T
    with torch.tpu.precision(Precision.HIGHEST):
        (a @ B.to("tpu")).backward(G.to("tpu"))
    assert is_at(Precision.HIGHEST, float((a.grad.cpu() - exact).abs().max() / exact.abs().max()))


def test_the_scope_is_the_threads_own() -> None:
    measured: list[float] = []
    outside = mm_error()
    with torch.tpu.precision(Precision.HIGHEST):
        thread = threading.Thread(target=lambda: measured.append(mm_error()))
        thread.start()
        thread.join()
    assert measured == [outside]


@pytest.mark.parametrize("wrong", ["highest", 2, None, torch.float32])
def test_anything_else_is_a_value_error(wrong: object) -> None:
    with pytest.raises(ValueError, match=r"Expected a torch.tpu.Precision \(DEFAULT, HIGH or HIGHEST\)"):
        with torch.tpu.precision(wrong):  # type: ignore[arg-type]
            pass


# PyTorch's own setting is the process's: fresh interpreters, so that no test sees another's.
PROGRAM = """
import torch
torch.manual_seed(0)
a, b = torch.randn(96, 128), torch.randn(128, 80)
exact = a.double() @ b.double()
def level():
    error = float(((a.to("tpu") @ b.to("tpu")).cpu() - exact).abs().max() / exact.abs().max())
    return "medium" if error > 2e-4 else "high" if error > 2e-6 else "highest"
"""


def levels(code: str) -> list[str]:
    return python(PROGRAM + code).stdout.split()


def test_medium_is_the_default_and_the_getter_is_pytorchs_own() -> None:
    assert levels("print(level(), torch.get_float32_matmul_precision())") == ["medium", "highest"]


def test_an_explicit_call_wins() -> None:
    code = """
for name in ("highest", "high", "medium", "highest"):
    torch.set_float32_matmul_precision(name)
    print(level(), torch.get_float32_matmul_precision())
"""
    assert levels(code) == ["highest", "highest", "high", "high", "medium", "medium", "highest", "highest"]


def test_a_scope_beats_an_explicit_call() -> None:
    code = """
torch.set_float32_matmul_precision("highest")
with torch.tpu.precision(torch.tpu.Precision.DEFAULT):
    print(level())
    torch.set_float32_matmul_precision("high")
    print(level())
print(level())
"""
    assert levels(code) == ["medium", "medium", "high"]


def test_the_newer_setting_of_all_backends_counts_too() -> None:
    code = """
for value in ("ieee", "tf32", "bf16", "none"):
    torch.backends.fp32_precision = value
    print(level())
"""
    assert levels(code) == ["highest", "high", "medium", "medium"]


def test_a_setting_for_cuda_is_not_for_tpu() -> None:
    assert levels("torch.backends.cuda.matmul.allow_tf32 = False; print(level())") == ["medium"]


def test_wider_types_are_exact_at_every_level() -> None:
    a, b = A.double(), B.double()
    assert torch.allclose((a.to("tpu") @ b.to("tpu")).cpu(), a @ b, rtol=1e-14, atol=1e-12)
    i, j = (10 * A).long(), (10 * B).long()
    assert torch.equal((i.to("tpu") @ j.to("tpu")).cpu(), i @ j)


# ---- excess precision -----------------------------------------------------------------------------------------------
def test_allow_excess_precision() -> None:
    from torch_tpu.programs import disk, options

    assert torch.tpu.allow_excess_precision is False
    key = disk.key_of("aten::relu", [], "medium")
    torch.relu(torch.ones(3, device="tpu"))
    assert torch.tpu.compile_stats()["programs"] > 0
    try:
        torch.tpu.allow_excess_precision = True
        assert torch.backends.tpu.allow_excess_precision is True and options.allow_excess_precision() is True
        assert disk.key_of("aten::relu", [], "medium") != key
        assert torch.tpu.compile_stats()["programs"] == 0  # they belong to the other setting
        assert torch.relu(torch.ones(3, device="tpu")).tolist() == [1.0] * 3
        torch.backends.tpu.allow_excess_precision = False
        assert torch.tpu.allow_excess_precision is False and disk.key_of("aten::relu", [], "medium") == key
    finally:
        torch.tpu.allow_excess_precision = False
    with pytest.raises(TypeError, match="must be True or False, got 'yes'"):
        torch.tpu.allow_excess_precision = "yes"
