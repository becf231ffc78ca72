"""Programs of operators, compiled by libtpu; all of them are for ``make tpu-compile``."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._ops import OpOverload

from tests.conformance import report, tpu
from tests.conformance.cases import Case
from tests.conformance.run import Worker
from tests.conformance.tpu_worker import keep
from tests.lowering.harness import run
from torch_tpu.aot import topology

pytest.importorskip("libtpu")
aten = torch.ops.aten


def compiles(op: OpOverload, *args: Any) -> None:
    """Asserts that libtpu compiles the program for a TPU, and that has the values of PyTorch."""
    got, plan, _ = run(op, *args, for_tpu=True)
    torch.testing.assert_close(got[0], op(*args), check_stride=False)
    topology.describe(topology.parse("v6e")).compile(plan.text)


# ---- the sweep ------------------------------------------------------------------------------------------------------
def test_a_program_that_libtpu_refuses_is_a_failure(tmp_path: Path) -> None:
    text = """func.func public @main(%a: tensor<4xcomplex<f64>>) -> tensor<4xcomplex<f64>> {
      %0 = "stablehlo.fft"(%a) {fft_type = #stablehlo<fft_type FFT>, fft_length = array<i64: 4>}
        : (tensor<4xcomplex<f64>>) -> tensor<4xcomplex<f64>>
      return %0 : tensor<4xcomplex<f64>>
    }"""
    worker = Worker(("tests.conformance.tpu_worker", "compile", str(tmp_path), "v6e"), 60)
    try:
        result = worker.run(tpu.Program("fft.fft", keep(tmp_path, text)))
    finally:
        worker.close()
    assert result["status"] == "fail" and "Unexpected operand type for FFT" in result["message"]


def test_the_sweep_collects_compiles_and_resumes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    written = tmp_path / "summary.json"
    arguments = ["--ops", "mm", "--dtypes", "float32,int64", "--results", str(tmp_path), "--summary", str(written)]
    assert tpu.main(arguments) == 0
    first = json.loads(written.read_text())
    row = first["operators"]["mm"]
    assert [*row] == ["float32", "int64"] and all(compiled == needed > 0 for compiled, needed in row.values())
    assert first["programs"] == first["compiled"] > 2 and not first["failures"]
    texts = [gzip.decompress(path.read_bytes()).decode() for path in (tmp_path / "programs").rglob("*.mlir.gz")]
    assert any("precision DEFAULT" in t for t in texts) and not any("reduce_precision" in t for t in texts)
    capfd.readouterr()
    assert tpu.main(arguments) == 0
    assert "left:" not in capfd.readouterr().err  # nothing is done twice
    assert json.loads(written.read_text()) == first


def test_a_worker_that_cannot_start_is_no_result() -> None:
    worker = Worker(("tests.conformance.no_such_module",), 60)
    with pytest.raises(RuntimeError, match="no_such_module ended with a Python error"):
        worker.run(Case("mm", "float32", "forward"))


def test_a_refused_program_fails_its_case_and_stands_in_the_table() -> None:
    found = [
        {"case": ["mm", "float32", "forward"], "status": "pass", "programs": ["a", "b"]},
        {"case": ["mm", "int64", "forward"], "status": "pass", "programs": ["a"]},
        {"case": ["nop", "int64", "forward"], "status": "crash", "message": "the process ended"},
    ]
    answers = {"a": {"status": "pass", "message": ""}, "b": {"status": "fail", "message": "No.\nmore"}}
    outcome = tpu.summary(found, answers, "1.2", 2)
    assert outcome["failures"] == {
        Case("mm", "float32", "forward").id: "program b: No.",
        Case("nop", "int64", "forward").id: "not collected: the process ended",
    }
    forward = {"case": ["mm", "float32", "forward"], "status": "pass"}
    text = report.table([forward], 2, outcome)
    assert "| **f32** i64 |" in text and "| compiles for TPU v6e | 1/2 (50.00%) |" in text


def test_the_checked_in_results_are_complete() -> None:
    kept = json.loads(report.TPU_SUMMARY.read_text())
    assert len(kept["operators"]) > 850 and kept["compiled"] == kept["programs"] > 5000 and not kept["failures"]


# ---- kinds of program that a TPU's compiler does not take as the CPU's does -----------------------------------------
@pytest.mark.parametrize("n", [1, 6, 64, 65, 67, 134, 1000])
def test_double_precision_transforms(n: int) -> None:
    """A TPU has no fft of complex128: products with roots of unity, for every kind of length."""
    torch.manual_seed(0)
    x = torch.randn(2, n, dtype=torch.complex128)
    real = torch.randn(2, n, dtype=torch.float64)
    calls = [
        (aten._fft_c2c.default, x, [1], 0, True),
        (aten._fft_c2c.default, x, [0, 1], 1, False),
        (aten._fft_r2c.default, real, [1], 0, True),
        (aten._fft_c2r.default, x[:, : n // 2 + 1].contiguous(), [1], 2, n),
    ]
    for op, *args in calls:
        got, plan, _ = run(op, *args, for_tpu=True)
        torch.testing.assert_close(got[0], op(*args), check_stride=False)
        assert "stablehlo.fft" not in plan.text


def test_double_precision_transforms_compile() -> None:
    compiles(aten._fft_c2c.default, torch.randn(2, 67, dtype=torch.complex128), [1], 0, True)
    compiles(aten._fft_c2r.default, torch.randn(2, 4, dtype=torch.complex128), [1], 0, 6)


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_scans_of_functions_that_the_compiler_cannot_price(dtype: torch.dtype, dim: int) -> None:
    """As windows they ended the compiler's process, where it fused a conversion with one."""
    torch.manual_seed(0)
    x = torch.randn(5, 4, 3, dtype=dtype)
    x[0, 0, 0] = float("-inf")
    got, plan, _ = run(aten.logcumsumexp.default, x, dim, for_tpu=True)
    torch.testing.assert_close(got[0], x.logcumsumexp(dim))
    assert "reduce_window" not in plan.text
    topology.describe(topology.parse("v6e")).compile(plan.text)


@pytest.mark.parametrize("transposed", [False, True])
def test_convolutions_of_64_bit_integers(transposed: bool) -> None:
    def numbers(*shape: int) -> torch.Tensor:
        return torch.randint(-(1 << 40), 1 << 40, shape)

    weight = numbers(4, 3, 2, 3) if transposed else numbers(6, 2, 2, 3)
    arguments = numbers(2, 4, 7, 9), weight, numbers(6), [2, 1], [1, 0], [1, 2], transposed
    compiles(aten.convolution.default, *arguments, [1 if transposed else 0, 0], 2)
    if transposed:  # without groups the kernel's dimensions stand in another order
        compiles(aten.convolution.default, numbers(1, 4, 5), numbers(4, 3, 2), None, [3], [1], [1], True, [2], 1)
