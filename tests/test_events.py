"""An event is done when the work before it is done, and the time between two of them is the time that work took."""

from __future__ import annotations

import time

import pytest
import torch

from tests.test_streams import compiled, long_work  # noqa: F401 (a fixture)


def test_an_event_that_was_not_recorded_is_done() -> None:
    event = torch.Event("tpu")
    assert event.query()
    event.synchronize()
    event.wait()


def test_query_and_synchronize_follow_the_work_before_the_event() -> None:
    event = torch.tpu.Event()
    long_work()
    event.record()
    assert not event.query()
    event.synchronize()
    assert event.query()


def test_later_work_does_not_delay_an_event() -> None:
    torch.tpu.synchronize()
    event = torch.tpu.Event()
    event.record()
    long_work()
    assert event.query()
    torch.tpu.synchronize()


def test_recording_again_moves_the_event() -> None:
    event = torch.Event("tpu")
    event.record()
    assert event.query()
    long_work()
    event.record(torch.tpu.current_stream())
    assert not event.query()
    event.synchronize()
    assert event.query()


def test_elapsed_time_is_the_time_of_the_work() -> None:
    start, end = (torch.Event("tpu", enable_timing=True) for _ in range(2))
    torch.tpu.synchronize()
    began = time.perf_counter()
    start.record()
    long_work()
    end.record()
    end.synchronize()
    wall = 1e3 * (time.perf_counter() - began)
    assert 0.5 * wall < start.elapsed_time(end) <= wall * 1.01 + 1
    assert wall > 10, "the work of this test is too short to measure"


def test_elapsed_time_does_not_count_idle_time_before_the_work() -> None:
    first, second = (torch.tpu.Event(enable_timing=True) for _ in range(2))
    first.record()
    second.record()
    first.synchronize()
    second.synchronize()
    time.sleep(0.1)
    assert 0 <= first.elapsed_time(second) < 50


def test_elapsed_time_needs_two_finished_events() -> None:
    start, end = (torch.Event("tpu", enable_timing=True) for _ in range(2))
    with pytest.raises(ValueError, match="Both events must be recorded"):
        start.elapsed_time(end)
    start.record()
    long_work()
    end.record()
    with pytest.raises(RuntimeError, match="Both events must be completed"):
        start.elapsed_time(end)
    torch.tpu.synchronize()


def test_an_event_does_not_take_work_away_from_synchronize() -> None:
    stream = torch.tpu.current_stream()
    long_work()
    torch.tpu.Event().record()
    assert not stream.query()
    torch.tpu.synchronize()
    assert stream.query()


def test_events_of_other_kinds_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="cannot be shared between processes"):
        torch.tpu.Event(interprocess=True)
    with pytest.raises((NotImplementedError, RuntimeError)):
        torch.tpu.Event().ipc_handle()
