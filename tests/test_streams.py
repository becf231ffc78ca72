"""A device has one compute stream, in program order, and says honestly when it is busy."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

from tests.support import matmul_precision

N = 1024


drops_work = pytest.mark.skipif(
    torch.tpu.eager_mode is torch.tpu.EagerMode.DEFER_AND_FUSE, reason="Fused mode does not begin what nobody keeps"
)
_kept: list[torch.Tensor] = []


def long_work(*, keep: bool = True) -> torch.Tensor:
    """Some tenths of a second of matrix products, enqueued. Fused mode does only work whose result somebody keeps."""
    x = torch.full((N, N), 1.0 / N, device="tpu")
    y = x
    with matmul_precision("highest"):
        for _ in range(10):
            y = y @ x
    _kept[:] = [y] if keep else []
    return y


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    long_work()
    torch.tpu.synchronize()


def test_every_stream_is_the_devices_stream() -> None:
    stream = torch.tpu.current_stream()
    assert isinstance(stream, torch.Stream)
    assert (
        stream == torch.tpu.default_stream() == torch.accelerator.current_stream() == torch.tpu.current_stream("tpu:0")
    )
    assert stream.device == torch.device("tpu", 0)
    for made in (torch.Stream("tpu"), torch.Stream(device="tpu:0"), torch.tpu.Stream(), torch.tpu.Stream(priority=-1)):
        assert made == stream and hash(made) == hash(stream)
    assert isinstance(torch.tpu.Stream(), torch.tpu.Stream)


def test_streams_are_entered_and_set() -> None:
    stream = torch.tpu.Stream()
    with torch.tpu.stream(stream), stream:
        assert torch.tpu.current_stream() == stream
        x = torch.ones(2, device="tpu") + 1
    with torch.tpu.stream(None):
        x += 1
    torch.tpu.set_stream(stream)
    torch.accelerator.set_stream(stream)
    assert x.tolist() == [3, 3]


def test_query_is_false_while_work_is_outstanding_and_true_after_synchronize() -> None:
    stream = torch.tpu.current_stream()
    y = long_work()
    busy = not stream.query()
    stream.synchronize()
    assert busy and stream.query()
    assert torch.allclose(y[0, 0].cpu(), torch.tensor(1.0 / N))


@drops_work
def test_dropping_a_result_does_not_make_the_stream_idle() -> None:
    stream = torch.tpu.current_stream()
    long_work(keep=False)
    assert not stream.query()
    torch.accelerator.synchronize()
    assert stream.query()


def test_dispatch_does_not_wait_for_results() -> None:
    stream = torch.tpu.current_stream()
    y = torch.ones(N, N, device="tpu")
    (y + 1).t()[:3].clone()  # compiles
    y = long_work()
    z = (y + 1).t()[:3].clone()
    assert not stream.query()
    assert z.shape == (3, N)
    torch.tpu.synchronize()


def test_waiting_orders_nothing_that_was_not_ordered() -> None:
    stream, event = torch.tpu.Stream(), torch.tpu.Event()
    x = torch.ones(4, device="tpu") * 3
    event.record(stream)
    stream.wait_event(event)
    stream.wait_stream(torch.tpu.current_stream())
    event.wait(stream)
    x.record_stream(stream)
    assert stream.record_event().query() in (True, False)
    assert (x + 1).tolist() == [4, 4, 4, 4]


@drops_work
def test_synchronize_waits_for_a_small_result_that_was_dropped() -> None:
    x = torch.randn(1 << 23).tpu()
    x.argmax().item()  # compiles

    def seconds(finish: Callable[[], object]) -> float:
        start = time.perf_counter()
        finish()
        return time.perf_counter() - start

    def dropped() -> None:
        x.argmax()
        torch.tpu.synchronize()

    # The result is 8 bytes; the work behind it is not. Not waiting for it takes about a hundredth of the time.
    whole = min(seconds(lambda: x.argmax().item()) for _ in range(5))
    assert min(seconds(dropped) for _ in range(5)) > whole / 10


def test_synchronize_waits_when_the_first_of_several_results_was_dropped() -> None:
    x = torch.randn(1 << 22).tpu()
    x.sort()[1][0].item()  # compiles

    def seconds(finish: Callable[[], object]) -> float:
        start = time.perf_counter()
        finish()
        return time.perf_counter() - start

    def one_kept() -> None:
        kept = x.sort()[1]
        torch.tpu.synchronize()
        assert kept.shape == x.shape

    whole = min(seconds(lambda: x.sort()[1][0].item()) for _ in range(3))
    assert min(seconds(one_kept) for _ in range(3)) > whole / 10


def test_writes_in_place_do_not_wait_for_one_another() -> None:
    x = torch.randn(1 << 22).tpu()
    x.mul_(0.9).add_(1)  # compiles
    torch.tpu.synchronize()

    def enqueued_and_done() -> tuple[float, float]:
        start = time.perf_counter()
        for _ in range(4):
            x.mul_(0.9).add_(1)
        enqueued = time.perf_counter() - start
        torch.tpu.synchronize()
        return enqueued, time.perf_counter() - start

    # Letting go of an overwritten buffer must not wait for the program that overwrites it.
    assert min(enqueued / done for enqueued, done in (enqueued_and_done() for _ in range(5))) < 0.5


def test_a_small_write_does_not_wait_for_what_it_writes() -> None:
    x = torch.randn(2000, 2000).tpu()

    def enqueued_and_done() -> tuple[float, float]:
        start = time.perf_counter()
        total = (x @ x).sum()
        total += 1
        enqueued = time.perf_counter() - start
        torch.tpu.synchronize()
        return enqueued, time.perf_counter() - start

    enqueued_and_done()  # compiles
    assert min(enqueued / done for enqueued, done in (enqueued_and_done() for _ in range(5))) < 0.5
