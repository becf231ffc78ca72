"""Memory is counted by storage, freed with the last tensor, and a request that does not fit is an error that helps."""

from __future__ import annotations

import gc

import torch

from tests.support import python

MIB = 1 << 20


def live() -> int:
    gc.collect()
    return torch.tpu.memory_allocated()


def test_a_tensor_takes_its_bytes_and_gives_them_back() -> None:
    before = live()
    x = torch.empty(MIB, dtype=torch.float32, device="tpu")
    assert live() - before == 4 * MIB
    del x
    assert live() == before


def test_views_share_their_bytes() -> None:
    before = live()
    x = torch.zeros(1024, 256, device="tpu")
    views = [x.t(), x[3:], x.view(-1), x.expand(4, 1024, 256), x.detach(), x.view(torch.int32)]
    assert live() - before == MIB
    del x
    assert live() - before == MIB
    del views
    assert live() == before


def test_a_clone_counts_as_its_own_storage() -> None:
    before = live()
    x = torch.zeros(1024, 256, device="tpu")
    y = x.clone()
    assert live() - before == 2 * MIB
    del x, y


def test_in_place_work_allocates_nothing() -> None:
    x = torch.zeros(1024, 256, device="tpu")
    x.add_(1)
    before = live()
    torch.tpu.reset_peak_memory_stats()
    for _ in range(10):
        x.add_(1).mul_(2)
    assert live() == before
    assert torch.tpu.max_memory_allocated() == before


def test_the_peak_is_remembered_until_reset() -> None:
    torch.tpu.reset_peak_memory_stats()
    before = live()
    x = torch.empty(2 * MIB, dtype=torch.uint8, device="tpu")
    del x
    assert torch.tpu.max_memory_allocated() >= before + 2 * MIB
    torch.tpu.reset_peak_memory_stats()
    assert torch.tpu.max_memory_allocated() == live()


def test_the_accelerator_interface_reports_the_same_numbers() -> None:
    keep = torch.empty(MIB, dtype=torch.uint8, device="tpu")
    assert torch.accelerator.memory_allocated() == torch.tpu.memory_allocated() >= keep.nbytes
    assert torch.accelerator.max_memory_allocated() == torch.tpu.max_memory_allocated()
    assert torch.accelerator.memory_reserved() == torch.tpu.memory_reserved()
    free, total = torch.accelerator.get_memory_info()
    assert (free, total) == torch.tpu.mem_get_info()
    assert total - free == torch.tpu.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    assert torch.accelerator.max_memory_allocated() == torch.accelerator.memory_allocated()


def test_statistics_count_allocations_and_frees() -> None:
    def counters() -> tuple[int, int, int, int]:
        stats = torch.tpu.memory_stats()
        names = (
            "allocation.all.allocated",
            "allocation.all.freed",
            "allocated_bytes.all.allocated",
            "allocated_bytes.all.freed",
        )
        return tuple(stats[name] for name in names)  # type: ignore[return-value]

    gc.collect()
    before = counters()
    x = torch.empty(1000, dtype=torch.uint8, device="tpu")
    after_making = counters()
    del x
    after_freeing = counters()
    assert [b - a for a, b in zip(before, after_making, strict=True)] == [1, 0, 1000, 0]
    assert [b - a for a, b in zip(after_making, after_freeing, strict=True)] == [0, 1, 0, 1000]
    assert torch.tpu.memory_stats()["num_ooms"] == 0
    torch.accelerator.reset_accumulated_memory_stats()
    stats = torch.tpu.memory_stats()
    assert stats["allocated_bytes.all.allocated"] == stats["allocated_bytes.all.current"]


def test_empty_cache_keeps_live_tensors() -> None:
    x = torch.full((4,), 3.0, device="tpu") + 1
    torch.tpu.empty_cache()
    torch.accelerator.empty_cache()
    assert (x + 1).tolist() == [5, 5, 5, 5]


def test_autograd_frees_its_saved_tensors() -> None:
    w = torch.ones(1024, 256, device="tpu", requires_grad=True)
    (w * w).exp().sum().backward()
    w.grad = None
    before = live()
    (w * w).exp().sum().backward()
    w.grad = None
    assert live() == before


OUT_OF_MEMORY = """
    import gc, torch
    MIB = 1 << 20
    small = torch.zeros(1000, device="tpu")
    weights = torch.zeros(8, MIB // 4, device="tpu")           # 8 MiB
    image = torch.zeros(3, 512, 1024, dtype=torch.uint8, device="tpu")  # 1.5 MiB
    for request in (lambda: torch.zeros(16 * MIB, dtype=torch.uint8, device="tpu"), lambda: weights.repeat(2, 1),
                    lambda: torch.ones(16 * MIB, dtype=torch.uint8).tpu()):
        try:
            request()
        except torch.OutOfMemoryError as error:
            text = str(error)
            assert "Tried to allocate 16.00 MiB" in text, text
            assert "The device has 16.00 MiB" in text and "9.50 MiB" in text, text
            assert text.index("8.00 MiB (f32[8, 262144])") < text.index("1.50 MiB (ui8[3, 512, 1024])"), text
            assert "tpu:0" in text
        else:
            raise AssertionError("32 MiB fitted into 16 MiB")
    assert torch.tpu.memory_stats()["num_ooms"] == 3
    assert torch.tpu.mem_get_info()[1] == 16 * MIB

    # The process goes on: what was live is intact, and freeing makes room.
    assert weights.sum().item() == 0 and (small + 1).sum().item() == 1000
    del weights, image
    gc.collect()
    assert torch.zeros(15 * MIB, dtype=torch.uint8, device="tpu").sum().item() == 0
"""


def test_an_allocation_that_does_not_fit_names_request_live_bytes_and_largest_holders() -> None:
    python(OUT_OF_MEMORY, TORCH_TPU_CPU_DEVICE_BYTES=str(16 * MIB))


def test_memory_does_not_grow_over_ten_thousand_training_steps() -> None:
    def rss() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)).tpu()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    x, y = torch.rand(16, 4).tpu(), torch.rand(16, 1).tpu()

    def train(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        torch.tpu.synchronize()

    train(1000)
    live_before, rss_before, programs = live(), rss(), torch.tpu.compile_stats()["programs"]
    train(9000)
    assert live() == live_before
    assert torch.tpu.compile_stats()["programs"] == programs
    assert rss() < rss_before * 1.02 + 4 * MIB
