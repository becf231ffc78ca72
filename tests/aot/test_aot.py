"""Programs for TPUs that are not here: libtpu compiles them on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from torch_tpu import aot
from torch_tpu.aot import chips, hlo, topology
from torch_tpu.tracing.graph import CompileError

pytest.importorskip("libtpu")


def mlp() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256))


X = torch.empty(64, 256, device="meta")


@pytest.fixture(scope="module")
def report() -> aot.Report:
    """A small model for four generations."""
    return aot.compile(mlp(), (X,), topology=["v5e", "v5p-8", "v6e-1", "tpu7x:1x1x1"], prices={"v6e": 3.6})


# ---- names ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "expected", "number"),
    [
        ("v6e", "v6e:1x1", 1),
        ("v6e-8", "v6e:2x4", 8),
        ("v5litepod-16", "v5e:4x4", 16),
        ("v5p-8", "v5p:2x2x1", 4),
        ("v5p:16x16x24", "v5p:16x16x24", 6144),
        ("tpu7x-8", "tpu7x:2x2x1", 4),
        ("Ironwood", "tpu7x:1x1x1", 1),
        ("v4-64", "v4:2x4x4", 32),
    ],
)
def test_names_of_slices(name: str, expected: str, number: int) -> None:
    found = topology.parse(name)
    assert found.name == expected and found.chips == number


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("h100", "give a generation .v4, v5e, v5p, v6e, tpu7x."),
        ("v6e-7", "those of v6e are v6e-1, v6e-4, v6e-8"),
        ("v5p-7", "those of v5p are v5p-2, v5p-8"),
        ("", "is no TPU topology"),
    ],
)
def test_wrong_names_list_the_right_ones(name: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        topology.parse(name)


def test_an_arrangement_that_libtpu_refuses() -> None:
    with pytest.raises(ValueError, match=r"no slice 'v6e:3x3'; usual ones are v6e:1x1, v6e:2x2.*It says"):
        aot.compile(mlp(), (X,), topology="v6e:3x3")


def test_every_generation_has_published_figures() -> None:
    for name, chip in chips.CHIPS.items():
        assert topology.describe(topology.parse(name)).device_kinds()
        assert chip.source.startswith("https://") and 1e9 < chip.clock < 3e9
        assert len(topology.describe(topology.parse(name)).device_kinds()) == chip.devices


def test_without_libtpu_the_sentence_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(platform: str) -> str:
        raise RuntimeError("not installed")

    monkeypatch.setattr("torch_tpu.platform.plugin_path", missing)
    with pytest.raises(RuntimeError, match=r"pip install 'torch_tpu\[tpu\]'"):
        topology.libtpu()


# ---- reports --------------------------------------------------------------------------------------------------------
def test_four_generations(report: aot.Report) -> None:
    flops = 2 * 64 * 256 * 512 * 2
    parameters = 4 * (256 * 512 * 2 + 512 + 256)
    for e in report.estimates:
        assert e.cost.flops == e.cost.work == flops
        assert e.memory.fits and e.memory.aliased == 0
        assert parameters <= e.memory.arguments - 4 * 64 * 256 <= 1.1 * parameters
        assert e.cost.cycles > 0 and e.cost.bound == pytest.approx(
            max(flops / chips.peak(e.chip, "f32"), e.cost.traffic / e.chip.bandwidth * e.chip.devices)
        )
        assert sum(o.cycles for o in e.cost.operations) == pytest.approx(e.cost.cycles * e.chip.clock)
    v6e = report.estimates[2]
    assert v6e.price_per_call == pytest.approx(max(v6e.cost.cycles, v6e.cost.bound) * 3.6 / 3600)


def test_operations_name_their_origin(report: aot.Report) -> None:
    origins = [o.origin for e in report.estimates for o in e.cost.operations]
    assert any("aten::addmm" in o and "linear.py" in o for o in origins)


def test_text_json_and_html(report: aot.Report) -> None:
    text = str(report)
    for word in ("v5e:1x1", "v5p:2x2x1", "fits", "lower bound of the time", "Heaviest operations on tpu7x:1x1x1"):
        assert word in text
    plain = json.loads(json.dumps(report.to_dict()))
    assert plain["schema"] == 1 and [e["topology"] for e in plain["estimates"]] == [
        e.topology.name for e in report.estimates
    ]
    assert plain["inputs"][0] == {
        "name": "0.weight",
        "kind": "parameter",
        "dtype": "float32",
        "shape": [512, 256],
        "written": False,
    }
    page = report.to_html()
    assert page.count("<svg") == 5 and "http" not in page.replace("http://www.w3.org", "")


def test_precision_reaches_the_program() -> None:
    for level, passes in (("medium", 1), ("high", 3), ("highest", 6)):
        report = aot.compile(mlp(), (X,), topology="v6e", precision=level)
        (e,) = report.estimates
        assert report.traced.plan.text.count(f"precision {'DEFAULT' if level == 'medium' else level.upper()}>") == 4
        assert e.cost.work == passes * e.cost.flops
        assert any("passes of the matrix unit" in f for f in e.findings) == (passes > 1)


def test_bfloat16_is_counted_as_such() -> None:
    (e,) = aot.compile(mlp().bfloat16(), (X.bfloat16(),), topology="v6e").estimates
    assert {p.dtype for p in e.cost.products} == {"bf16"} and e.cost.work == e.cost.flops


def test_a_training_step_updates_in_place() -> None:
    step, state = aot.training_step(mlp(), lambda m, x, y: F.mse_loss(m(x), y))
    report = aot.compile(step, (*state, X, X), topology="v6e")
    (e,) = report.estimates
    written = [i for i in report.traced.inputs if i.is_written]
    assert len(written) == 4 * 4  # parameters, two moments, steps
    assert e.memory.aliased >= 3 * 4 * (256 * 512 * 2 + 512 + 256)
    assert e.cost.flops == 5 * 2 * 64 * 256 * 512  # the first layer's input needs no gradient


def test_a_model_of_eight_billion_parameters_is_traced_without_memory() -> None:
    with torch.device("meta"):
        layer = nn.Linear(65536, 65536, bias=False, dtype=torch.bfloat16)  # 8.6 GB
        x = torch.empty(8, 65536, dtype=torch.bfloat16)
    (e,) = aot.compile(layer, (x,), topology="v5p").estimates
    assert e.memory.arguments > 8 << 30 and e.memory.fits and e.cost.binds == "memory"


def test_what_does_not_fit() -> None:
    with torch.device("meta"):
        layer = nn.Linear(65536, 2 * 65536, bias=False, dtype=torch.bfloat16)
        x = torch.empty(8, 65536, dtype=torch.bfloat16)
    try:
        (e,) = aot.compile(layer, (x,), topology="v5e").estimates
    except CompileError as error:
        assert "does not fit on v5e:1x1" in str(error)
    else:
        assert not e.memory.fits and "no: " in str(aot.Report(aot.trace(layer, (x,)), [e]))


def test_loops_count_as_often_as_they_run() -> None:
    def loop(x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.cholesky(x)

    (e,) = aot.compile(loop, (torch.empty(64, 64, device="meta"),), topology="v6e").estimates
    assert any(o.runs > 1 for o in e.cost.operations) or e.cost.cycles > 0


def test_findings() -> None:
    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, big: torch.Tensor) -> Any:
        return F.scaled_dot_product_attention(q, k, v), big.cumsum(0).double() * 2

    q = torch.empty(2, 4, 256, 64, dtype=torch.bfloat16, device="meta")
    (e,) = aot.compile(attention, (q, q, q, torch.empty(64, 8, device="meta")), topology="v6e").estimates
    assert any("head dimension of 64" in f for f in e.findings)
    assert any("float64" in f for f in e.findings)


# ---- what goes wrong ------------------------------------------------------------------------------------------------
def test_an_operator_without_a_program() -> None:
    def bad(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten._fft_c2c.default(x.to(torch.complex64), [0], 0, True).nonzero()

    with pytest.raises(Exception, match="nonzero"):
        aot.compile(bad, (torch.empty(8, device="meta"),), topology="v6e")


def test_errors_of_the_function_come_as_they_are() -> None:
    with pytest.raises(RuntimeError, match="same reduction dim"):
        aot.compile(lambda a, b: a @ b, (torch.empty(2, 3), torch.empty(2, 3)), topology="v6e")


def test_a_wrong_precision() -> None:
    with pytest.raises(ValueError, match="must be one of medium, high, highest, got 'best'"):
        aot.compile(mlp(), (X,), precision="best")


def test_garbage_is_no_program() -> None:
    with pytest.raises(ValueError):
        hlo.read(b"\x0a\x03abc")


# ---- files ----------------------------------------------------------------------------------------------------------
def test_files(report: aot.Report, tmp_path: Path) -> None:
    path = tmp_path / "model.zip"
    aot.save(report, path)
    saved = aot.load(path)
    assert saved.topologies == ["v5e:1x1", "v5p:2x2x1", "v6e:1x1", "tpu7x:1x1x1"]
    assert saved.executable("v6e") == report.estimates[2].executable.serialize()
    assert [i["name"] for i in saved.manifest["inputs"]] == ["0.weight", "0.bias", "2.weight", "2.bias", "argument 0"]
    with pytest.raises(ValueError, match="has no executable for v4:1x1x1, only for v5e:1x1"):
        saved.executable("v4")
    with pytest.raises(RuntimeError, match="compiled by another libtpu"):
        saved.executable("v6e", version="of yesterday")


def test_damaged_files(report: aot.Report, tmp_path: Path) -> None:
    path = tmp_path / "model.zip"
    path.write_text("nothing")
    with pytest.raises(ValueError, match="is no file of torch_tpu.aot.save"):
        aot.load(path)
    with pytest.raises(FileNotFoundError):
        aot.load(tmp_path / "missing")
    aot.save(report, path)
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in entries.items():
            archive.writestr(name, data if name.endswith("json") else data[:-1] + b"x")
    with pytest.raises(ValueError, match="is damaged"):
        aot.load(path).executable("v6e")


# ---- the command ----------------------------------------------------------------------------------------------------
def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch_tpu", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, timeout=300)


def test_estimate(tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text("import torch\ndef f():\n    return torch.nn.Linear(8, 8, device='meta'), (torch.empty(4, 8),)\n")
    page = tmp_path / "report.html"
    done = run("estimate", f"{file}:f", "--json", "--html", str(page), "--save", str(tmp_path / "x.zip"))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["estimates"][0]["topology"] == "v6e:1x1"
    assert page.read_text().startswith("<!doctype html>") and aot.load(tmp_path / "x.zip").topologies == ["v6e:1x1"]
    done = run("estimate", "torch.nn:ReLU", "--input", "float32[8,128]", "--topology", "v9")
    assert done.returncode == 2 and "is no TPU topology" in done.stderr
    done = run("estimate", f"{file}:g")
    assert done.returncode == 2 and "has nothing that is called 'g'" in done.stderr
