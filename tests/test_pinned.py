"""Pinned host memory: it is allocated, recognised and freed, and transfers from and to it are asynchronous."""

from __future__ import annotations

import gc

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.support import python


def test_tensors_are_pinned_and_recognised() -> None:
    x = torch.arange(6.0)
    pinned = x.pin_memory()
    assert pinned.is_pinned() and not x.is_pinned()
    assert torch.equal(pinned, x) and pinned.device.type == "cpu"
    assert pinned[2:].is_pinned() and pinned.view(2, 3).t().is_pinned()
    assert pinned.pin_memory() is pinned
    assert not pinned.clone().is_pinned()
    assert pinned.data_ptr() % 4096 == 0


def test_factories_and_storages_pin() -> None:
    assert torch.empty(3, pin_memory=True).is_pinned()
    assert torch.zeros(3, pin_memory=True).tolist() == [0, 0, 0]
    assert torch.empty(0).pin_memory().numel() == 0
    assert torch.arange(3).untyped_storage().pin_memory().is_pinned()


def test_device_tensors_cannot_be_pinned() -> None:
    with pytest.raises(RuntimeError, match="only dense CPU tensors can be pinned"):
        torch.ones(2, device="tpu").pin_memory()
    with pytest.raises(RuntimeError, match="Only dense CPU tensors can be pinned"):
        torch.empty(2, device="tpu", pin_memory=True)
    assert not torch.ones(2, device="tpu").is_pinned()


def test_freed_memory_is_no_longer_pinned() -> None:
    pointers = []
    for _ in range(100):
        x = torch.empty(1 << 16, pin_memory=True)
        pointers.append(x.data_ptr())
        del x
    gc.collect()
    assert len(set(pointers)) < 100, "freed blocks are used again"


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("non_blocking", [False, True])
def test_copies_to_the_device_arrive(pinned: bool, non_blocking: bool) -> None:
    for make in (
        lambda: torch.arange(1 << 16, dtype=torch.float32),
        lambda: torch.arange(12.0).view(3, 4).t(),
        lambda: torch.arange(6),
    ):
        x = make().pin_memory() if pinned else make()
        y = x.to("tpu", non_blocking=non_blocking)
        z = torch.empty_like(x, device="tpu").copy_(x, non_blocking=non_blocking)
        torch.tpu.synchronize()
        x.zero_()  # after a synchronisation the source may change
        assert torch.equal(y.cpu(), make()) and torch.equal(z.cpu(), make())


def test_an_unpinned_source_may_change_at_once() -> None:
    x = torch.arange(1 << 18, dtype=torch.float32)
    y = x.to("tpu", non_blocking=True)
    x.zero_()
    assert torch.equal(y.cpu(), torch.arange(1 << 18, dtype=torch.float32))


def test_the_source_of_a_copy_may_be_dropped() -> None:
    results = [torch.full((1 << 16,), float(i)).pin_memory().to("tpu", non_blocking=True) for i in range(20)]
    gc.collect()
    assert [r[-1].item() for r in results] == list(range(20))


@pytest.mark.parametrize("pinned", [False, True])
def test_copies_to_the_host_arrive_after_synchronisation(pinned: bool) -> None:
    x = torch.arange(1 << 18, dtype=torch.float32, device="tpu") * 2
    target = torch.empty(1 << 18, pin_memory=pinned)
    target.copy_(x, non_blocking=True)
    event = torch.Event("tpu")
    event.record()
    event.synchronize()
    assert torch.equal(target, torch.arange(1 << 18, dtype=torch.float32) * 2)


def test_the_device_side_of_a_copy_may_be_dropped_or_overwritten() -> None:
    targets = [torch.empty(1 << 16, pin_memory=True) for _ in range(10)]
    x = torch.zeros(1 << 16, device="tpu")
    for i, target in enumerate(targets):
        target.copy_(x, non_blocking=True)
        x.add_(1)
        if i == 5:
            x = x.clone()
    del x
    torch.tpu.synchronize()
    assert [t[0].item() for t in targets] == [t[-1].item() for t in targets] == list(range(10))


def test_an_unpinned_target_is_filled_at_once() -> None:
    x = torch.full((1 << 18,), 3.0, device="tpu") + 1
    target = torch.zeros(1 << 18)
    target.copy_(x, non_blocking=True)
    assert target.unique().tolist() == [4]


def test_a_non_blocking_move_to_the_host_is_pinned_and_complete_after_synchronisation() -> None:
    moved = (torch.full((1 << 18,), 3.0, device="tpu") + 1).to("cpu", non_blocking=True)
    assert moved.is_pinned()
    torch.tpu.synchronize()
    assert moved.unique().tolist() == [4]


def test_data_loaders_pin_their_batches() -> None:
    data = TensorDataset(torch.arange(20.0).view(10, 2), torch.arange(10))
    for x, y in DataLoader(data, batch_size=5, pin_memory=True):
        assert x.is_pinned() and y.is_pinned()
        assert torch.equal(x.to("tpu", non_blocking=True).cpu(), x)


def test_data_loaders_pin_what_their_workers_make() -> None:
    python("""
        import torch
        from torch.utils.data import DataLoader, TensorDataset
        torch.ones(1, device="tpu")
        data = TensorDataset(torch.arange(64.0).view(32, 2), torch.arange(32))
        seen = []
        for epoch in range(2):
            for x, y in DataLoader(data, batch_size=8, num_workers=2, pin_memory=True, shuffle=True):
                assert x.is_pinned() and y.is_pinned()
                assert (x.tpu(non_blocking=True)[:, 0] == 2 * y.tpu(non_blocking=True)).all().item()
                seen += y.tolist()
        assert sorted(seen) == sorted(2 * list(range(32)))
    """)
