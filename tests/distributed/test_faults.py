"""Ranks that die, stay away or disagree: an error on every survivor that says which and where, within the timeout."""

from __future__ import annotations

import datetime
import os
import tempfile
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.distributed.harness import fresh


def init(timeout: float = 8) -> None:
    dist.init_process_group("tpu_dist", timeout=datetime.timedelta(seconds=timeout))


def message(operation: object, *args: object, **options: object) -> str:
    """The text of the error that a call raises."""
    with pytest.raises(dist.DistBackendError) as caught:
        operation(*args, **options)  # type: ignore[operator]
    return str(caught.value)


# ---- a rank dies ----------------------------------------------------------------------------------------------------
def dies(rank: int, world: int) -> tuple[str, float]:
    init()
    x = torch.ones(1000, device="tpu")
    dist.all_reduce(x)
    if rank == 1:
        os._exit(9)  # in the middle of a step
    start = time.monotonic()
    text = message(dist.all_reduce, x)
    return text, time.monotonic() - start


def test_a_rank_that_dies_is_named_on_every_survivor() -> None:
    with fresh(3) as pool:
        answers = pool.run(dies, ranks=2)
        for rank in (0, 2):
            text, seconds = answers[rank]
            assert f"all_reduce of 1000 float32 elements (sum), number 2 of group '0', failed on rank {rank}" in text
            assert "Missing: rank 1" in text
            assert seconds < 20


# ---- a rank never comes ---------------------------------------------------------------------------------------------
def stays_away(rank: int, world: int) -> str:
    init(3)
    x = torch.ones(4, device="tpu")
    if rank == 1:
        time.sleep(9)
        return ""
    return message(dist.broadcast, x, 0)


def test_a_rank_that_does_not_come_is_named_after_the_timeout() -> None:
    with fresh(2) as pool:
        text = pool.run(stays_away)[0]
    assert "broadcast of 4 float32 elements (root 0), number 1" in text and "Missing: rank 1" in text


def never_joins(rank: int, world: int) -> str:
    if rank == 1:
        return ""
    with pytest.raises(RuntimeError) as caught:
        init(2)
    return str(caught.value)


def test_a_rank_that_never_joins_is_a_timeout() -> None:
    with fresh(2) as pool:
        text = pool.run(never_joins)[0]
    assert "1/2 clients joined" in text or "imed out" in text


# ---- ranks disagree -------------------------------------------------------------------------------------------------
def other_size(rank: int, world: int) -> str:
    init()
    text = message(dist.all_reduce, torch.ones(2 + 2 * rank, device="tpu"))
    x = torch.ones(2, device="tpu")
    dist.all_reduce(x)  # the group goes on
    assert x.tolist() == [2.0, 2.0]
    return text


def test_ranks_with_other_sizes() -> None:
    with fresh(2) as pool:
        for text in pool.run(other_size):
            assert "all_reduce of 2 float32 elements" in text and "all_reduce of 4 float32 elements" in text
            assert "rank 0 calls" in text and "rank 1 calls" in text


def other_order(rank: int, world: int) -> str:
    init()
    x = torch.ones(4, device="tpu")
    if rank == 0:
        return message(dist.all_reduce, x)
    return message(dist.broadcast, x, 0)


def test_ranks_with_other_operations() -> None:
    with fresh(2) as pool:
        for text in pool.run(other_order):
            assert "calls all_reduce of 4 float32" in text and "calls broadcast of 4 float32" in text


# ---- the store ------------------------------------------------------------------------------------------------------
def store_goes(rank: int, world: int) -> str:
    init(5)
    x = torch.ones(4, device="tpu")
    dist.all_reduce(x)
    if rank == 0:  # it has the store
        os._exit(9)
    return message(dist.all_reduce, x)


def test_a_store_that_goes_away() -> None:
    with fresh(2) as pool:
        text = pool.run(store_goes, ranks=1)[1]
    assert "number 2" in text and "The store does not answer" in text


# ---- point to point -------------------------------------------------------------------------------------------------
def no_sender(rank: int, world: int) -> str:
    init(3)
    if rank == 1:
        time.sleep(8)
        return ""
    return message(dist.recv, torch.ones(4, device="tpu"), 1)


def test_a_receive_without_a_sender() -> None:
    with fresh(2) as pool:
        text = pool.run(no_sender)[0]
    assert "receive from rank 1, number 1" in text


# ---- a checkpoint that was cut off ----------------------------------------------------------------------------------


def cut_off(rank: int, world: int, folder: str) -> None:
    import torch.distributed.checkpoint as dcp

    init()
    state = {"w": torch.full((64,), 1.0, device="tpu")}
    dcp.save(state, checkpoint_id=str(Path(folder, "step1")))
    state = {"w": torch.full((64,), 2.0, device="tpu")}
    if rank == 1:
        os._exit(9)
    with pytest.raises((RuntimeError, dcp.api.CheckpointException)):
        dcp.save(state, checkpoint_id=str(Path(folder, "step2")))


def goes_on(rank: int, world: int, folder: str) -> float:
    import torch.distributed.checkpoint as dcp

    init()
    whole = [p for p in sorted(Path(folder).iterdir()) if (p / ".metadata").exists()]
    state = {"w": torch.zeros(64, device="tpu")}
    dcp.load(state, checkpoint_id=str(whole[-1]))
    return state["w"][0].item()


def test_after_a_save_that_was_cut_off_the_last_whole_one_loads() -> None:
    with tempfile.TemporaryDirectory() as folder:
        with fresh(2) as pool:
            pool.run(cut_off, folder, ranks=1)
        with fresh(2) as pool:
            assert pool.run(goes_on, folder) == [1.0, 1.0]
