"""``torch.export`` on tpu: exported programs run, become StableHLO, and are saved with their executable."""

from __future__ import annotations

import io
import json
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim, export

import torch_tpu
from tests.support import python
from torch_tpu import _C
from torch_tpu.export import exported_to_mlir, load, save, stablehlo


class Model(nn.Module):
    """Parameters, a constant, a buffer that is written, results of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 4), nn.LayerNorm(4)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scale", torch.full((4,), 0.5), persistent=False)

    def forward(self, x: torch.Tensor, *, shift: torch.Tensor | None = None) -> dict[str, Any]:
        self.calls.add_(1)
        h = self.norm(self.linear(x)) * self.scale
        return {"h": h if shift is None else h + shift, "mean": h.softmax(-1).mean(0), "three": 3}


@pytest.fixture
def model() -> nn.Module:
    return Model().to("tpu").eval()


def _x(n: int = 5) -> torch.Tensor:
    return torch.randn(n, 8, device="tpu")


ROWS = ({0: Dim("rows", min=2, max=32)},)


def _close(a: Any, b: Any) -> None:
    assert a.keys() == b.keys()
    for name in a:
        if isinstance(a[name], torch.Tensor):
            torch.testing.assert_close(a[name].cpu(), b[name].detach().cpu(), rtol=1e-4, atol=1e-5)
        else:
            assert a[name] == b[name]


def _graphs() -> list[dict[str, Any]]:
    return [c for c in torch.tpu.compile_stats()["compiles"] if c["op"].startswith("exported")]


# ---- PyTorch's own ways to run it -----------------------------------------------------------------------------------
@pytest.mark.parametrize("run", [lambda m: m, torch.compile], ids=["eager", "compiled"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_the_module_of_an_exported_program_runs(dynamic: bool, run: Callable[..., Any], model: nn.Module) -> None:
    torch._dynamo.reset()
    ep = export(model, (_x(),), dynamic_shapes={"x": ROWS[0]} if dynamic else None)
    x = _x(7 if dynamic else 5)
    _close(run(ep.module())(x), model(x))


def test_a_module_exported_on_the_cpu_moves_to_the_device(model: nn.Module) -> None:
    from torch.export.passes import move_to_device_pass

    ep = move_to_device_pass(export(model.cpu(), (_x().cpu(),)), "tpu")
    x = _x()
    _close(ep.module()(x), model.tpu()(x))


def test_torchs_own_files(model: nn.Module) -> None:
    file = io.BytesIO()
    torch.export.save(export(model, (_x(),)), file)
    file.seek(0)
    x = _x()
    _close(torch.export.load(file).module()(x), model(x))


# ---- text -----------------------------------------------------------------------------------------------------------
def test_the_text_has_the_calling_convention_and_the_users_lines(model: nn.Module) -> None:
    text = stablehlo(export(model, (_x(),)))
    named = re.findall(r"^// %arg(\d+): (.+)$", text, re.MULTILINE)
    assert ("0", "parameter linear.weight") in named and named[-1][1] == "user input x"
    arguments = re.search(r"@main\((.*?)\) ->", text)[1]  # type: ignore[index]
    assert arguments.count("%arg") == len(named) and f"%arg{len(named) - 1}: tensor<5x8xf32>" in arguments
    assert 'loc("aten::addmm"("' in text and "test_export.py" in text and "linear.py" not in text
    assert "reduce_precision" not in text
    _C._compile(text, {})
    assert exported_to_mlir(export(model, (_x(),))).startswith("// %arg0")


def test_the_text_of_sizes_that_change_takes_them(model: nn.Module) -> None:
    text = stablehlo(export(model, (_x(),), dynamic_shapes={"x": ROWS[0]}))
    assert re.match(r"// %arg0: size s\d+ of x, dimension 0\n", text)
    assert "%arg0: tensor<i64>" in text and "tensor<32x8xf32>" in text
    _C._compile(text, {})


def test_a_program_exported_on_the_cpu_has_a_text(model: nn.Module) -> None:
    assert "stablehlo.dot_general" in stablehlo(export(model.cpu(), (_x().cpu(),)), precision="highest")


def test_there_is_no_bytecode(model: nn.Module) -> None:
    with pytest.raises(NotImplementedError, match="stablehlo-translate --serialize"):
        exported_to_mlir(export(model, (_x(),)), "portable_artifact")


# ---- files ----------------------------------------------------------------------------------------------------------
def test_a_saved_program_runs_without_compiling(model: nn.Module, tmp_path: Path) -> None:
    save(export(model, (_x(),)), tmp_path / "m.tpu")
    torch.tpu.reset_compile_stats()
    loaded = load(tmp_path / "m.tpu")
    for calls in (1, 2):
        x = _x()
        _close(loaded(x), model(x))
        assert loaded.state["calls"].item() == calls
    assert [c["source"] for c in _graphs()] == ["disk"]
    assert model.calls.item() == 2


def test_a_saved_program_runs_in_another_process(model: nn.Module, tmp_path: Path) -> None:
    x = _x()
    save(export(model, (x,)), tmp_path / "m.tpu")
    torch.save((x.cpu(), model(x)["h"].detach().cpu()), tmp_path / "x.pt")
    python(
        f"""
        import torch, torch_tpu
        x, want = torch.load({str(tmp_path / "x.pt")!r})
        loaded = torch_tpu.export.load({str(tmp_path / "m.tpu")!r})
        torch.testing.assert_close(loaded(x.to("tpu"))["h"].cpu(), want)
        graphs = [c for c in torch.tpu.compile_stats()["compiles"] if c["op"].startswith("exported")]
        assert [c["source"] for c in graphs] == ["disk"], graphs
        """,
        TORCH_TPU_CACHE="0",
    )


def test_one_saved_program_serves_all_sizes_of_its_range(model: nn.Module, tmp_path: Path) -> None:
    save(export(model, (_x(),), dynamic_shapes={"x": ROWS[0]}), tmp_path / "m.tpu")
    loaded = load(tmp_path / "m.tpu")
    torch.tpu.reset_compile_stats()
    for n in (2, 5, 17, 32):
        x = _x(n)
        _close(loaded(x), model(x))
    assert _graphs() == []  # it was loaded before the counters were reset
    with pytest.raises(ValueError, match=r"The size s\d+ must be 2 to 32, got 33"):
        loaded(_x(33))


def test_keyword_arguments_and_views(model: nn.Module, tmp_path: Path) -> None:
    shift = torch.randn(4, device="tpu")
    save(export(model, (_x(),), {"shift": shift}), tmp_path / "m.tpu")
    loaded = load(tmp_path / "m.tpu")
    x = _x(9)[2:7]
    _close(loaded(x, shift=shift), model(x, shift=shift))
    x = torch.randn(8, 5, device="tpu").t()
    _close(loaded(x, shift=shift), model(x, shift=shift))


def test_wrong_arguments_are_refused(model: nn.Module) -> None:
    program = torch_tpu.export.Program(export(model, (_x(),)))
    with pytest.raises(TypeError, match="takes arguments of the structure"):
        program(_x(), _x())
    with pytest.raises(ValueError, match=r"The input x must have the sizes \[5, 8\], got \[6, 8\]"):
        program(_x(6))
    with pytest.raises(ValueError, match=r"The input x must be a torch.float32 tensor on tpu, got a torch.float64"):
        program(_x().double())
    with pytest.raises(ValueError, match=r"on tpu, got a torch.float32 tensor on cpu"):
        program(_x().cpu())


def test_written_inputs_are_written(tmp_path: Path) -> None:
    class Adds(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            x.add_(y)
            return x * 2

    save(export(Adds(), (_x(), _x())), tmp_path / "m.tpu")
    x, y = _x(), _x()
    want = x + y
    got = load(tmp_path / "m.tpu")(x, y)
    torch.testing.assert_close(x.cpu(), want.cpu())
    torch.testing.assert_close(got.cpu(), (want * 2).cpu())


def test_files_for_other_platforms_are_refused(model: nn.Module, tmp_path: Path) -> None:
    path = tmp_path / "m.tpu"
    save(export(model, (_x(),)), path)
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    manifest = json.loads(parts["manifest.json"])
    manifest["compiled for"]["version"] = "XLA of another day"
    parts["manifest.json"] = json.dumps(manifest).encode()
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in parts.items():
            archive.writestr(name, data)
    with pytest.raises(RuntimeError, match=r"compiled for version XLA of another day \(here .*recompile=True"):
        load(path)
    x = _x()
    _close(load(path, recompile=True)(x), model(x))


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("not a program")
    with pytest.raises(ValueError, match="is not a file of torch_tpu.export.save"):
        load(tmp_path / "text")


def test_a_program_that_leaves_the_device_cannot_be_saved(tmp_path: Path) -> None:
    class OnTheHost(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * 2).cpu() + 1

    ep = export(OnTheHost(), (_x(),))
    with pytest.raises(NotImplementedError, match="run outside of the device"):
        save(ep, tmp_path / "m.tpu")
    x = _x()
    torch.testing.assert_close(torch_tpu.export.Program(ep)(x), (x * 2).cpu() + 1)


def test_sizes_without_a_bounded_form_cannot_be_saved(tmp_path: Path) -> None:
    class Sorts(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sort(0).values

    ep = export(Sorts(), (_x(),), dynamic_shapes={"x": ROWS[0]})
    with pytest.raises(NotImplementedError, match="compiled for each size: aten.sort"):
        save(ep, tmp_path / "m.tpu")
    x = _x(9)
    torch.testing.assert_close(torch_tpu.export.Program(ep)(x).cpu(), x.sort(0).values.cpu())
