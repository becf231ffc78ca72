"""The device and the process: forks, workers, threads, the interpreter's end, programs that never name the device."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from tests.support import python


# ---- forks and workers ----------------------------------------------------------------------------------------------
def in_child(work: Callable[[], Any]) -> tuple[str, str]:
    """What ``work`` did in a forked child: ("value", repr) or ("raised", message)."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        try:
            text = "value\0" + repr(work())
        except BaseException as error:
            text = "raised\0" + f"{type(error).__name__}: {error}"
        os.write(write, text.encode()[:4000])
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        kind, text = pipe.read().decode().split("\0")
    assert os.waitpid(child, 0)[1] == 0
    return kind, text


@pytest.mark.parametrize(
    "touch",
    [
        lambda x: torch.ones(2, device="tpu"),
        lambda x: x + 1,
        lambda x: x.cpu(),
        lambda x: x[0].item(),
        lambda x: repr(x),
        lambda x: torch.ones(2).tpu(),
        lambda x: torch.tpu.synchronize(),
        lambda x: x.add_(1),
        lambda x: torch.rand(2, device="tpu"),
        lambda x: torch.tpu.mem_get_info(),
        lambda x: torch.ones(2).pin_memory().tpu(),
    ],
)
def test_a_forked_child_that_touches_the_device_gets_one_clear_error(touch: Callable) -> None:
    x = torch.arange(4.0, device="tpu")
    x + 1
    kind, text = in_child(lambda: touch(x))
    assert kind == "raised"
    assert text.startswith("RuntimeError: Cannot re-initialize tpu in forked subprocess") and "spawn" in text


def test_a_forked_child_may_compute_on_the_cpu_and_drop_device_tensors() -> None:
    x = [torch.arange(4.0, device="tpu")]

    def work() -> Any:
        torch.manual_seed(3)
        x.clear()
        assert not torch.tpu.is_initialized()
        return torch.rand(2).shape, (torch.ones(3, 3) @ torch.ones(3, 3)).sum().item(), torch.tpu.device_count()

    assert in_child(work) == ("value", "(torch.Size([2]), 27.0, 1)")
    assert x[0].tolist() == [0, 1, 2, 3], "the parent is as it was"


def test_a_fork_before_first_use_leaves_the_child_free() -> None:
    python("""
        import os, torch
        child = os.fork()
        x = torch.arange(3.0, device="tpu") + 1
        assert x.tolist() == [1, 2, 3]
        if child == 0:
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    """)


class HostData(Dataset):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.full((3,), float(i))


class DeviceData(HostData):
    def __getitem__(self, i: int) -> torch.Tensor:
        return super().__getitem__(i).tpu()


def test_workers_that_leave_the_device_alone_work() -> None:
    weight = torch.ones(3, device="tpu")
    total = 0.0
    for batch in DataLoader(HostData(), batch_size=4, num_workers=2):
        total += (batch.tpu() * weight).sum().item()
    assert total == 3 * sum(range(12))


def test_workers_that_touch_the_device_fail_with_the_error() -> None:
    torch.ones(1, device="tpu")
    with pytest.raises(RuntimeError, match="Cannot re-initialize tpu in forked subprocess"):
        list(DataLoader(DeviceData(), batch_size=4, num_workers=1))


def _spawned(value: float, queue: Any) -> None:
    queue.put((torch.full((2,), value, device="tpu") + 1).tolist())


def test_spawned_processes_have_a_device_of_their_own() -> None:
    torch.ones(1, device="tpu")
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=_spawned, args=(4.0, queue))
    process.start()
    assert queue.get(timeout=120) == [5, 5]
    process.join(60)
    assert process.exitcode == 0


def test_device_tensors_cannot_be_sent_to_another_process_by_reference() -> None:
    import torch.multiprocessing  # registers how tensors are sent

    assert torch.multiprocessing
    with pytest.raises(RuntimeError, match="cannot be sent to another process.*tensor.cpu()"):
        ForkingPickler.dumps(torch.ones(2, device="tpu"))
    assert ForkingPickler.dumps(torch.ones(2, device="tpu").cpu())


# ---- threads --------------------------------------------------------------------------------------------------------
def run_in_threads(work: Callable[[int], None], count: int) -> None:
    errors: list[BaseException] = []

    def guarded(i: int) -> None:
        try:
            work(i)
        except BaseException as error:  # reported below, on the test's thread
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(i,)) for i in range(count)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(120)
        assert not t.is_alive(), "a thread hangs"
    if errors:
        raise errors[0]


def test_threads_compile_and_run_at_the_same_time() -> None:
    def work(i: int) -> None:
        for n in range(1, 12):
            x = torch.full((n, 3), float(i), device="tpu")
            assert (x.exp().log() * 2).round().tolist() == [[2.0 * i] * 3] * n

    run_in_threads(work, 6)


def test_threads_share_tensors_that_they_read() -> None:
    shared = torch.arange(64.0, device="tpu").view(8, 8)
    expected = shared.cpu().t().softmax(0).sum(1)

    def work(i: int) -> None:
        for _ in range(50):
            torch.testing.assert_close(shared.t().softmax(0).sum(1).cpu(), expected)

    run_in_threads(work, 4)


def test_threads_write_tensors_of_their_own() -> None:
    base = torch.zeros(64, device="tpu")
    clones = [base.clone() for _ in range(4)]

    def work(i: int) -> None:
        for _ in range(100):
            clones[i].add_(i)

    run_in_threads(work, 4)
    assert base.count_nonzero().item() == 0
    assert [c.unique().tolist() for c in clones] == [[100.0 * i] for i in range(4)]


def test_threads_that_write_one_tensor_lose_updates_at_most() -> None:
    """As on any device: an addition may be lost, but all numbers are of one write and nothing breaks."""
    x, seen = torch.zeros(1000, device="tpu"), []

    def work(i: int) -> None:
        for step in range(300):
            x.add_(1)
            if step % 50 == 0:
                seen.append(x.cpu().unique().numel())
                x.clone().mul_(0)

    run_in_threads(work, 4)
    assert set(seen) == {1} and x.unique().numel() == 1
    assert 300 <= x[0].item() <= 1200


def test_threads_draw_different_numbers_from_one_generator() -> None:
    draws: list[torch.Tensor] = []

    def work(i: int) -> None:
        for _ in range(20):
            draws.append(torch.rand(8, device="tpu").cpu())

    run_in_threads(work, 4)
    assert torch.cat(draws).unique().numel() > 4 * 20 * 8 - 10


def test_python_runs_while_the_device_works() -> None:
    x = torch.ones(1024, 1024, device="tpu")
    ticks, stop = 0, threading.Event()

    def work() -> None:
        y = x
        for _ in range(8):
            y = y @ x / 1024
        y.cpu()
        stop.set()

    thread = threading.Thread(target=work)
    thread.start()
    while not stop.wait(0.001):
        ticks += 1
    thread.join()
    assert ticks > 3


# ---- the end of the interpreter -------------------------------------------------------------------------------------
ENDINGS = {
    "live tensors": "import torch; x = torch.ones(1000, device='tpu'); y = x + 1; z = x.clone().view(10, 100).t()",
    "work in flight": "import torch; x = torch.ones(1024, 1024, device='tpu')\nfor _ in range(10): y = x @ x",
    "a transfer in flight": """
        import torch
        x = torch.ones(1 << 20, device="tpu") * 2
        target = torch.empty(1 << 20, pin_memory=True)
        target.copy_(x, non_blocking=True)
    """,
    "a graph that holds itself": """
        import torch
        x = torch.ones(10, device="tpu", requires_grad=True)
        y = (x * x).exp(); y.self = y; module = torch.nn.Linear(2, 2).tpu(); module.me = module
    """,
    "tensors in module globals and atexit handlers": """
        import atexit, sys, torch
        sys.keep = torch.ones(5, device="tpu")
        torch.keep = torch.ones(5, device="tpu").pow(2)
        atexit.register(lambda: print((sys.keep + 1).sum().item()))
    """,
    "generators, events and pinned memory": """
        import torch
        g = torch.Generator("tpu"); torch.rand(3, device="tpu", generator=g)
        e = torch.Event("tpu", enable_timing=True); e.record()
        p = torch.empty(100, pin_memory=True)
    """,
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_the_interpreter_ends_cleanly_with(ending: str) -> None:
    done = python(ENDINGS[ending], timeout=120)
    assert done.stderr == ""
    assert done.stdout == ("10.0\n" if "atexit" in ending else "")


def test_the_interpreter_ends_cleanly_after_a_bad_index_that_nobody_saw() -> None:
    done = python("import torch; torch.arange(3, device='tpu')[torch.tensor([5], device='tpu')]")
    assert "index out of range in aten::index.Tensor" in done.stderr


# ---- programs that never name the device ----------------------------------------------------------------------------
def test_a_program_that_never_names_the_device_loads_no_plugin() -> None:
    python("""
        import sys, time, torch
        import torch.nn as nn
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.rand(4, 8)).sum().backward()
        optimizer.step()
        torch.save(model.state_dict(), "/dev/null")
        next(iter(torch.utils.data.DataLoader(torch.arange(4.0), num_workers=0)))
        torch.get_rng_state(); torch.random.fork_rng; torch.accelerator.is_available()
        maps = open("/proc/self/maps").read()
        assert "pjrt" not in maps and "libtpu" not in maps, [l for l in maps.splitlines() if "pjrt" in l]
        assert "jax" not in sys.modules
        assert not torch.tpu.is_initialized()
    """)


def test_pinned_memory_is_the_only_thing_that_a_host_program_can_ask_of_the_device() -> None:
    python("""
        import torch
        assert not torch.ones(2).is_pinned()
        assert "pjrt" not in open("/proc/self/maps").read()
    """)


def test_importing_is_silent_and_light() -> None:
    done = python("""
        import sys, torch
        assert "torch_tpu" in sys.modules
        heavy = {"torch._inductor", "jax", "transformers", "torch_tpu.lowering.pointwise"} & set(sys.modules)
        assert not heavy, heavy
    """)
    assert done.stderr == "" and done.stdout == ""


def test_autoload_can_be_switched_off() -> None:
    python(
        """
        import sys, torch
        assert "torch_tpu" not in sys.modules and not hasattr(torch, "tpu")
        try:
            torch.ones(1, device="tpu")
        except RuntimeError as error:
            assert "tpu" in str(error)
        else:
            raise AssertionError("a device that is not there was used")
        import torch_tpu
        assert torch.ones(2, device="tpu").sum().item() == 2
        """,
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
    )


def test_importing_the_package_first_works_too() -> None:
    python("import torch_tpu, torch; assert torch.ones(2, device='tpu').sum().item() == 2")


def test_a_model_moves_between_threads_and_devices_without_leaks() -> None:
    before = torch.tpu.memory_allocated()

    def work(i: int) -> None:
        model = nn.Linear(16, 16).tpu()
        model(torch.ones(2, 16, device="tpu")).sum().backward()
        model.cpu()

    run_in_threads(work, 4)
    assert torch.tpu.memory_allocated() == before


def test_a_program_may_end_right_after_a_backward_pass() -> None:
    """The thread of the device still holds a Python object then; see torch_tpu/shutdown.py."""
    code = """
    import torch
    w = torch.ones(2, device="tpu", requires_grad=True)
    w.exp().sum().backward()
    """
    for _ in range(3):
        assert python(code).stderr == ""
