"""The port check: what runs, whose numbers, whether it fits, and what to change first."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.aot.test_aot import run
from torch_tpu.aot.check import check

pytest.importorskip("libtpu")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 128)
        self.norm = nn.LayerNorm(128)
        self.last = nn.Linear(128, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)).relu())


def test_a_model_that_is_ready() -> None:
    torch.manual_seed(0)
    found = check(Net(), (torch.randn(8, 64),), topologies=["v6e", "v5e"])
    assert found.runs and not found.raised and not found.graph_breaks and not found.stopped
    assert {o.support for o in found.operators} == {"program"}
    assert {"aten::addmm", "aten::native_layer_norm"} <= {o.name for o in found.operators}
    errors = [found.errors[level].results for level in ("medium", "high", "highest")]
    assert 1e-4 < errors[0] < 2e-2 and errors[1] < 1e-4 and errors[2] < 2e-6
    assert [name for name, _ in found.errors["medium"].layers] == ["first", "norm", "last"]
    assert [(m["topology"], m["fits"]) for m in found.memory] == [("v6e", True), ("v5e", True)]
    assert "0 missing" in str(found) and "next: " in str(found)
    assert json.loads(json.dumps(found.to_dict()))["runs"] is True


def test_what_depends_on_data_is_named_with_its_line() -> None:
    def select(x: torch.Tensor) -> torch.Tensor:
        return x[x > 0].sum()

    found = check(select, (torch.randn(8),), topologies=["v6e"])
    (op,) = [o for o in found.operators if o.support == "data"]
    assert op.name == "aten::index.Tensor" and "test_check.py:" in op.line
    assert found.graph_breaks and "no single program" in found.memory[0]["problem"]


def test_graph_breaks_are_named_with_their_line() -> None:
    def talk(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x + 1

    found = check(talk, (torch.ones(2),), topologies=[])
    assert len(found.graph_breaks) == 1 and "test_check.py:" in found.graph_breaks[0]
    assert found.next.startswith("Remove the graph break") and found.runs


def test_dtypes_that_are_computed_in_software() -> None:
    found = check(lambda x: x.double().sin(), (torch.ones(2),), topologies=[])
    assert found.emulated == {"float64": 2} and "2 operators compute float64" in found.next


def test_an_operator_that_is_missing() -> None:
    library = torch.library.Library("check_test", "DEF")
    library.define("odd(Tensor x) -> Tensor")
    library.impl("odd", lambda x: torch.empty_like(x), "Meta")
    library.impl("odd", lambda x: x.clone(), "CPU")
    found = check(lambda x: torch.ops.check_test.odd(x), (torch.ones(2),), topologies=[], numbers=False)
    assert not found.runs and "Replace check_test::odd" in found.next


def test_a_function_that_raises() -> None:
    found = check(lambda x: x @ x, (torch.ones(2, 3),))
    assert not found.runs and found.raised.startswith("RuntimeError") and "does not run" in found.next


def test_what_does_not_fit() -> None:
    with torch.device("meta"):
        layer = nn.Linear(65536, 2 * 65536, bias=False, dtype=torch.bfloat16)
        x = torch.empty(8, 65536, dtype=torch.bfloat16)
    found = check(layer, (x,), topologies=["v5e"])
    assert not found.runs and "fits on no single device" in found.next
    assert "on meta" in found.not_compared


def test_the_command(tmp_path: Path) -> None:
    file = tmp_path / "port.py"
    file.write_text("import torch\ndef f():\n    return torch.nn.Linear(8, 8), torch.randn(4, 8)\n")
    done = run("check", f"{file}:f", "--topology", "v6e", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["schema"] == 1
    done = run("check", "torch.nn:Softmax", "--input", "float32[8", "--no-compile")
    assert done.returncode == 2 and "describes no tensor" in done.stderr
