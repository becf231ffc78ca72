"""Processes that stay: each test sends them a function, which runs on every rank."""

from __future__ import annotations

import contextlib
import datetime
import os
import queue
import socket
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

#: Seconds in which a test's function must end on all ranks.
LIMIT = 180


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _serve(rank: int, world: int, port: int, backend: str, tasks: Any, results: Any) -> None:
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank)
    )
    torch.set_num_threads(1)
    if backend:
        dist.init_process_group(backend, timeout=datetime.timedelta(seconds=LIMIT // 2))
    while (task := tasks.get()) is not None:
        function, args = task
        try:
            torch.manual_seed(0)
            results.put((rank, True, function(rank, world, *args)))
        except BaseException:  # whatever it is, the test shall show it
            results.put((rank, False, traceback.format_exc()))
    if dist.is_initialized():
        dist.destroy_process_group()


class Pool:
    """``world`` processes in one group of ``tpu_dist``.

    Args:
        world: How many.
        backend: Of the group; empty: each test makes its own.
    """

    def __init__(self, world: int, backend: str = "cpu:gloo,tpu:tpu_dist") -> None:
        self.world = world
        context = mp.get_context("spawn")
        self._results = context.Queue()
        self._tasks = [context.Queue() for _ in range(world)]
        port = free_port()
        self._processes = [
            context.Process(target=_serve, args=(r, world, port, backend, self._tasks[r], self._results), daemon=True)
            for r in range(world)
        ]
        for process in self._processes:
            process.start()
        self.killed = False

    def run(
        self, function: Callable[..., Any], *args: Any, ranks: int | None = None, limit: float = LIMIT
    ) -> list[Any]:
        """What ``function(rank, world, *args)`` returned on each rank.

        Args:
            function: Defined at the top of a module.
            args: What it gets besides.
            ranks: How many ranks answer, if some are going to die; the others' results are None.
            limit: Seconds.

        Raises:
            AssertionError: It raised on some rank, or did not end.
        """
        for tasks in self._tasks:
            tasks.put((function, args))
        answers: list[Any] = [None] * self.world
        for _ in range(self.world if ranks is None else ranks):
            try:
                rank, passed, answer = self._results.get(timeout=limit)
            except queue.Empty:
                self.kill()
                raise AssertionError(f"{function.__name__} did not end on all ranks in {limit} s.") from None
            if not passed:
                self.kill()
                raise AssertionError(f"On rank {rank}:\n{answer}")
            answers[rank] = answer
        return answers

    @property
    def alive(self) -> bool:
        return not self.killed and all(p.is_alive() for p in self._processes)

    def kill(self) -> None:
        self.killed = True
        for process in self._processes:
            process.kill()

    def close(self) -> None:
        for tasks in self._tasks:
            tasks.put(None)
        for process in self._processes:
            process.join(10)
        self.kill()


_pools: dict[int, Pool] = {}


def run(world: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """``function`` on the standing pool of this size."""
    pool = _pools.get(world)
    if pool is None or not pool.alive:
        pool = _pools[world] = Pool(world)
    return pool.run(function, *args)


def close_all() -> None:
    for pool in _pools.values():
        pool.close()
    _pools.clear()


@contextlib.contextmanager
def fresh(world: int) -> Iterator[Pool]:
    """Processes of a test's own, which may die; the test makes the groups."""
    pool = Pool(world, backend="")
    try:
        yield pool
    finally:
        pool.kill()
