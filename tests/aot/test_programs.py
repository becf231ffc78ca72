"""Programs of operators, compiled by libtpu; all of them are for ``make tpu-compile``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conformance import report, tpu
from tests.conformance.cases import Case

pytest.importorskip("libtpu")


def test_the_sweep_collects_compiles_and_resumes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    written = tmp_path / "summary.json"
    arguments = ["--ops", "mm", "--dtypes", "float32,int64", "--results", str(tmp_path), "--summary", str(written)]
    assert tpu.main(arguments) == 0
    first = json.loads(written.read_text())
    row = first["operators"]["mm"]
    assert [*row] == ["float32", "int64"] and all(compiled == needed > 0 for compiled, needed in row.values())
    assert first["programs"] == first["compiled"] > 2 and not first["failures"]
    capfd.readouterr()
    assert tpu.main(arguments) == 0
    assert "left:" not in capfd.readouterr().err  # nothing is done twice
    assert json.loads(written.read_text()) == first


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
    assert len(kept["operators"]) > 900 and kept["compiled"] == kept["programs"] > 5000 and not kept["failures"]
