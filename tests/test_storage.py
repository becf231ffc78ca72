"""A device storage behaves as any other: it is shared, resized, replaced, copied and saved."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support import TORCH, assert_same


@pytest.fixture(params=["cpu", "tpu"])
def device(request: pytest.FixtureRequest) -> str:
    """Every promise of this file holds on both devices, in the same words."""
    return request.param


def save_and_load(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file)


def test_views_share_one_storage(device: str) -> None:
    x = torch.arange(6.0, device=device)
    views = [x[2:], x.view(2, 3).t(), x.detach(), x.view(torch.int32), x.as_strided((2,), (3,))]
    assert {v.untyped_storage().data_ptr() for v in views} == {x.untyped_storage().data_ptr()}
    assert x.clone().untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
    assert [v.storage_offset() for v in views] == [2, 0, 0, 0, 0]


def test_data_pointers_are_stable_and_offset_by_bytes(device: str) -> None:
    x = torch.arange(6.0, device=device)
    before = x.data_ptr()
    x.add_(1)
    x.mul_(2)
    assert x.data_ptr() == before != 0
    assert x[2:].data_ptr() == before + 8
    assert torch.empty(0, device=device).data_ptr() == 0


def test_a_storage_knows_its_size_and_device(device: str) -> None:
    storage = torch.arange(6, dtype=torch.int16, device=device).untyped_storage()
    assert storage.nbytes() == storage.size() == len(storage) == 12
    assert storage.device.type == device
    assert storage.resizable()
    assert storage.tolist() == [0, 0, 1, 0, 2, 0, 3, 0, 4, 0, 5, 0]


def test_a_tensor_grows_and_keeps_its_contents(device: str) -> None:
    x = torch.arange(6.0, device=device)
    x.resize_(2, 4)
    assert x.shape == (2, 4) and x.untyped_storage().nbytes() == 32
    assert x.flatten()[:6].tolist() == [0, 1, 2, 3, 4, 5]
    x[1] = 7
    assert x.tolist() == [[0, 1, 2, 3], [7, 7, 7, 7]]


def test_a_tensor_shrinks_without_losing_its_storage(device: str) -> None:
    x = torch.arange(6.0, device=device)
    x.resize_(3)
    assert x.tolist() == [0, 1, 2] and x.untyped_storage().nbytes() == 24
    x.resize_(6)
    assert x.tolist() == [0, 1, 2, 3, 4, 5]
    x.resize_(0)
    assert x.shape == (0,) and x.tolist() == []


def test_resize_as_and_memory_formats(device: str) -> None:
    x = torch.arange(24.0, device=device).resize_as_(torch.empty(2, 3, 2, 2, device=device))
    assert x.shape == (2, 3, 2, 2)
    x.resize_(2, 3, 2, 2, memory_format=torch.channels_last)
    assert x.is_contiguous(memory_format=torch.channels_last)


def test_a_storage_resizes_in_bytes_and_every_alias_sees_it(device: str) -> None:
    x = torch.arange(6.0, device=device)
    y = x[1:3]
    x.untyped_storage().resize_(12)
    assert y.untyped_storage().nbytes() == 12 and y.tolist() == [1, 2]
    x.untyped_storage().resize_(0)
    assert x.untyped_storage().nbytes() == 0
    x.untyped_storage().resize_(24)
    x.copy_(torch.arange(6.0))
    assert y.tolist() == [1, 2]


def test_set_rebinds_a_tensor_to_another_storage(device: str) -> None:
    source = torch.arange(12.0, device=device)
    x = torch.empty(0, device=device)
    x.set_(source)
    assert x.is_set_to(source) and x.data_ptr() == source.data_ptr()
    x.set_(source.untyped_storage(), 2, (2, 3), (5, 1))
    assert x.tolist() == [[2, 3, 4], [7, 8, 9]]
    x.fill_(0)
    assert source.tolist() == [0, 1, 0, 0, 0, 5, 6, 0, 0, 0, 10, 11]
    x.set_(source.untyped_storage())
    assert x.shape == (12,)
    x.set_()
    assert x.shape == (0,) and x.untyped_storage().nbytes() == 0
    assert source[1].item() == 1


def test_set_grows_a_storage_that_is_too_small(device: str) -> None:
    x = torch.arange(4.0, device=device)
    x.set_(x.untyped_storage(), 0, (8,), (1,))
    assert x.untyped_storage().nbytes() == 32 and x[:4].tolist() == [0, 1, 2, 3]


def test_assigning_data_rebinds_and_shares(device: str) -> None:
    x, y = torch.zeros(3, device=device, requires_grad=True), torch.ones(2, device=device)
    alias = x.detach()
    x.data = y
    assert x.tolist() == [1, 1] and x.data_ptr() == y.data_ptr() and alias.tolist() == [0, 0, 0]
    y.add_(1)
    assert x.tolist() == [2, 2]
    x.data.mul_(5)
    assert y.tolist() == [10, 10] and x.requires_grad


def test_swapping_data_is_how_modules_move(device: str) -> None:
    module = torch.nn.Linear(2, 2)
    weight = module.weight
    module.to(device)
    assert module.weight is weight and weight.device.type == device
    module.half()
    assert module.weight is weight and weight.dtype == torch.float16


def test_storages_copy(device: str) -> None:
    x = torch.arange(4.0, device=device)
    storage = x.untyped_storage()
    clone = storage.clone()
    x.zero_()
    assert torch.empty(0, device=device).set_(clone).tolist() == [0, 1, 2, 3]
    clone.copy_(storage)
    assert set(clone.tolist()) == {0}
    storage.fill_(1)
    assert x.view(torch.uint8).unique().tolist() == [1]
    on_cpu = storage.cpu()
    assert on_cpu.device.type == "cpu" and on_cpu.tolist() == storage.tolist()
    other = torch.UntypedStorage(16, device=device)
    other.copy_(on_cpu)
    assert other.tolist() == storage.tolist() and other.nbytes() == 16


def test_storages_move_between_devices() -> None:
    storage = torch.arange(4.0).untyped_storage()
    moved = storage.tpu()
    assert moved.device.type == "tpu" and moved.tolist() == storage.tolist()
    assert moved.to(device="cpu").tolist() == storage.tolist()
    assert moved.tpu() is moved


def test_typed_storages_move_and_index(device: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        storage = torch.arange(4.0, device=device).storage()
        assert storage.dtype == torch.float32 and storage.device.type == device and len(storage) == 4
        assert storage.tolist() == [0, 1, 2, 3] and storage[2] == 2
        storage[1] = 9
        assert storage.tolist() == [0, 9, 2, 3]
        assert storage.cpu().tolist() == [0, 9, 2, 3]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, save_and_load], ids=["deepcopy", "save and load"])
def test_duplicates_keep_aliasing_and_geometry(device: str, duplicate: Callable) -> None:
    base = torch.arange(12.0, device=device)
    x, y = duplicate((base.view(3, 4).t(), base[5:]))
    assert x.device == base.device and x.stride() == (1, 4) and y.storage_offset() == 5
    y[0] = 100
    assert x[1, 1].item() == 100, "views of one storage stay views of one storage"
    assert base[5].item() == 5


def test_a_storage_pickles(device: str) -> None:
    file = io.BytesIO()
    torch.save(torch.arange(4, device=device).untyped_storage(), file)
    file.seek(0)
    loaded = torch.load(file)
    assert loaded.device.type == device and loaded.tolist()[::8] == [0, 1, 2, 3]


def test_sharing_memory_is_a_no_op_on_the_device() -> None:
    x = torch.arange(3.0, device="tpu")
    assert x.share_memory_() is x
    assert x.is_shared() == (TORCH >= (2, 13))  # before, PyTorch says so of CUDA only
    assert x.tolist() == [0, 1, 2]


def test_a_clone_shares_nothing_once_either_is_written() -> None:
    x = torch.arange(4.0, device="tpu")
    y = x.clone()
    z = y.clone()
    y.add_(10)
    assert x.tolist() == z.tolist() == [0, 1, 2, 3] and y.tolist() == [10, 11, 12, 13]
    x.zero_()
    assert z.tolist() == [0, 1, 2, 3]
    z.t_() if z.dim() == 2 else z.mul_(2)
    assert x.tolist() == [0, 0, 0, 0] and y.tolist() == [10, 11, 12, 13]


def test_a_buffer_is_given_up_only_when_nobody_else_holds_it() -> None:
    x = torch.arange(6.0, device="tpu")
    view, copied = x.view(2, 3), torch.empty(6, device="tpu").copy_(x)
    detached = x.detach()
    for step in range(3):
        x.mul_(2).add_(1)
        expected = [(v + 1) * 2.0 ** (step + 1) - 1 for v in range(6)]
        assert x.tolist() == detached.tolist() == view.flatten().tolist() == expected
        assert copied.tolist() == [0, 1, 2, 3, 4, 5]
    view[0].zero_()
    assert x.tolist()[:3] == [0, 0, 0]


def test_an_operand_used_twice_survives_its_own_update() -> None:
    x = torch.arange(4.0, device="tpu")
    x.add_(x)
    assert x.tolist() == [0, 2, 4, 6]
    x.mul_(x.clone()).sub_(x)
    assert x.tolist() == [0, 0, 0, 0]
    y = torch.arange(4.0, device="tpu")
    torch.add(y, y, out=y)
    assert y.tolist() == [0, 2, 4, 6]


def test_saved_tensors_survive_the_update_of_a_copy() -> None:
    w = torch.full((4,), 3.0, device="tpu", requires_grad=True)
    saved = w.detach().clone()
    loss = (w * w).sum()
    saved.zero_()
    loss.backward()
    assert w.grad is not None and w.grad.tolist() == [6, 6, 6, 6]


def test_loading_a_byte_copy_costs_no_program_per_operator() -> None:
    """What torch.load and deepcopy make is bytes; using it must not need other programs than the original."""
    x = torch.arange(12.0, device="tpu").view(3, 4)
    (x + 1, x.t() * 2)
    y = copy.deepcopy(x)
    torch.tpu.reset_compile_stats()
    assert_same(y + 1, torch.arange(12.0).view(3, 4) + 1)
    assert torch.tpu.compile_stats()["misses"] == 0
