"""Checkpoints are PyTorch's: saved on either device, loaded on either."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support import assert_same, matmul_precision, python


def save_and_load(value: Any, **options: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, **options)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 2))


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int8,
        torch.bool,
        torch.complex64,
        torch.float8_e4m3fn,
    ],
)
def test_tensors_of_every_dtype_come_back(dtype: torch.dtype) -> None:
    x = torch.tensor([[0.0, 1.0, 2.0], [3.0, 0.5, 1.0]]).to(dtype)
    loaded = save_and_load(x.tpu())
    assert loaded.device == torch.device("tpu:0")
    assert torch.equal(loaded.cpu().view(torch.uint8), x.view(torch.uint8)) and loaded.dtype == dtype


@pytest.mark.parametrize("source", ["cpu", "tpu"])
@pytest.mark.parametrize("target", ["cpu", "tpu", "tpu:0", torch.device("tpu"), torch.device("cpu")])
def test_map_location_goes_both_ways(source: str, target: str | torch.device) -> None:
    loaded = save_and_load({"x": torch.arange(4.0, device=source)}, map_location=target)
    assert loaded["x"].device.type == torch.device(target).type and loaded["x"].tolist() == [0, 1, 2, 3]


def test_map_location_may_be_a_table_or_a_function() -> None:
    x = torch.arange(4.0, device="tpu")
    assert save_and_load(x, map_location={"tpu:0": "cpu"}).device.type == "cpu"
    assert save_and_load(x, map_location=lambda storage, location: storage).device.type == "cpu"
    assert save_and_load(x.cpu(), map_location=lambda storage, location: storage.tpu()).is_tpu


def test_aliasing_strides_and_gradients_survive() -> None:
    base = torch.arange(12.0, device="tpu").view(3, 4)
    row, transposed, leaf = save_and_load((base[1], base.t(), base.clone().requires_grad_()))
    row.zero_()
    assert transposed[:, 1].count_nonzero().item() == 0
    assert transposed.stride() == (1, 4) and row.storage_offset() == 4 and leaf.requires_grad


def test_files_are_read_by_a_process_without_the_device(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    trained = model().tpu()
    torch.save(trained.state_dict(), path)
    done = python(
        f"""
        import torch
        state = torch.load({str(path)!r}, map_location="cpu", weights_only=True)
        assert all(t.device.type == "cpu" for t in state.values())
        print(sum(t.double().sum().item() for t in state.values()))
        """,
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
    )
    assert float(done.stdout) == pytest.approx(sum(t.double().sum().item() for t in model().state_dict().values()))


def test_memory_mapped_and_old_format_files_load(tmp_path: Path) -> None:
    x = torch.arange(6.0).view(2, 3)
    torch.save(x, tmp_path / "x.pt")
    torch.save(x.tpu(), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert torch.load(tmp_path / "x.pt", mmap=True, map_location="tpu").tolist() == x.tolist()
    assert (
        torch.load(tmp_path / "old.pt").is_tpu
        and torch.load(tmp_path / "old.pt", map_location="cpu").tolist() == x.tolist()
    )


def test_a_file_of_a_missing_device_says_so() -> None:
    file = io.BytesIO()
    torch.save(torch.ones(1, device="tpu"), file)
    file = io.BytesIO(file.getvalue().replace(b"tpu:0", b"tpu:5"))
    with pytest.raises(RuntimeError, match="TPU device 5 but"):
        torch.load(file, weights_only=True)


def test_state_dicts_load_across_devices() -> None:
    on_cpu, on_tpu = model(), model().tpu()
    for parameter in on_tpu.parameters():
        parameter.data.add_(1)
    on_cpu.load_state_dict(on_tpu.state_dict())
    for a, b in zip(on_cpu.state_dict().values(), on_tpu.state_dict().values(), strict=True):
        assert torch.equal(a, b.cpu()) and a.device.type == "cpu"
    on_tpu.load_state_dict(save_and_load(model().state_dict()))
    assert torch.equal(on_tpu[0].weight.cpu(), model()[0].weight)
    fresh = nn.Linear(4, 5, device="meta")
    fresh.load_state_dict(on_tpu[0].state_dict(), assign=True)
    assert fresh.weight.is_tpu


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW], ids=lambda o: o.__name__)
@pytest.mark.parametrize("target", ["cpu", "tpu"])
def test_training_resumes_on_either_device(optimizer: type[torch.optim.Optimizer], target: str) -> None:
    options = {"momentum": 0.9} if optimizer is torch.optim.SGD else {}

    def network() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))

    def steps(net: nn.Module, opt: torch.optim.Optimizer, device: str, count: int) -> None:
        x = torch.linspace(-1, 1, 32).view(8, 4).to(device)
        for _ in range(count):
            opt.zero_grad()
            net(x).square().sum().backward()
            opt.step()

    with matmul_precision("highest"):
        first = network().tpu()
        opt = optimizer(first.parameters(), lr=0.01, **options)
        steps(first, opt, "tpu", 3)
        checkpoint = save_and_load({"net": first.state_dict(), "opt": opt.state_dict()}, map_location=target)
        second = network().to(target)
        resumed = optimizer(second.parameters(), lr=0.5, **options)
        second.load_state_dict(checkpoint["net"])
        resumed.load_state_dict(checkpoint["opt"])
        assert {
            v.device.type for s in resumed.state.values() for k, v in s.items() if k != "step" and v is not None
        } == {target}
        steps(first, opt, "tpu", 3)
        steps(second, resumed, target, 3)
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(a.cpu(), b.cpu(), rtol=1e-4, atol=1e-5)


def test_an_optimizer_made_before_the_move_keeps_its_parameters() -> None:
    net = model()
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    before = list(net.parameters())
    net.tpu()
    assert all(a is b for a, b in zip(before, net.parameters(), strict=True))
    net(torch.ones(8, 4, device="tpu")).sum().backward()
    opt.step()
    assert not torch.equal(net[3].bias.cpu(), model()[3].bias)


def test_modules_copy_deeply() -> None:
    net = model().tpu()
    twin = copy.deepcopy(net)
    net[0].weight.data.zero_()
    assert_same(twin[0].weight, model()[0].weight)
    assert twin[0].weight.is_leaf and twin[0].weight.requires_grad


@pytest.mark.parametrize(
    "value", [torch.arange(4.0), torch.ones(2, 3).t(), nn.Parameter(torch.ones(2)), torch.tensor(3), torch.empty(0)]
)
def test_tensors_pickle(value: torch.Tensor) -> None:
    loaded = pickle.loads(
        pickle.dumps(value.tpu() if not isinstance(value, nn.Parameter) else nn.Parameter(value.data.tpu()))
    )
    assert type(loaded) is type(value) and loaded.requires_grad == value.requires_grad
    assert_same(loaded, value)


def test_whole_modules_pickle() -> None:
    net = model().tpu().eval()
    x = torch.rand(3, 4).tpu()
    assert torch.equal(pickle.loads(pickle.dumps(net))(x), net(x))


def test_safetensors_go_both_ways(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    state = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(3, dtype=torch.bfloat16)}
    path = str(tmp_path / "x.safetensors")
    safetensors.save_file({k: v.tpu() for k, v in state.items()}, path)
    loaded = safetensors.load_file(path)  # its device= is a fixed list of names
    for name, value in state.items():
        assert torch.equal(loaded[name], value)
        assert_same(loaded[name].tpu(), value)
    module = nn.Linear(3, 2).tpu()
    safetensors.save_model(module, path)
    twin = nn.Linear(3, 2).tpu()
    safetensors.load_model(twin, path)
    assert torch.equal(twin.weight, module.weight)


def test_generator_states_are_saved() -> None:
    state = save_and_load(torch.tpu.get_rng_state())
    first = torch.rand(3, device="tpu")
    torch.tpu.set_rng_state(state)
    assert torch.equal(torch.rand(3, device="tpu"), first)
