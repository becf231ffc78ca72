"""What the benchmarks share: medians of many, ratios in one run, and a table."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable


def microseconds(function: Callable[[], object], calls: int = 1000, repeats: int = 21) -> float:
    """Median over ``repeats`` of the mean time of ``calls`` calls."""
    for _ in range(calls // 4):
        function()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(calls):
            function()
        times.append((time.perf_counter() - start) / calls * 1e6)
    return statistics.median(times)


def together(
    *functions: Callable[[], object],
    calls: int = 1000,
    repeats: int = 21,
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """As :func:`microseconds` for several functions that take turns, so that noise meets all; ``clock`` in seconds."""
    for function in functions:
        for _ in range(calls // 4):
            function()
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(repeats):
        for function, record in zip(functions, times, strict=True):
            start = clock()
            for _ in range(calls):
                function()
            record.append((clock() - start) / calls * 1e6)
    return [statistics.median(t) for t in times]


def row(name: str, value: str, ratio: float | None = None, target: float | None = None) -> None:
    """Prints one line of a benchmark's table."""
    verdict = "" if ratio is None or target is None else ("within" if ratio <= target else "MISSES") + f" {target:g}"
    shown = "" if ratio is None else f"{ratio:8.2f}x"
    print(f"{name:<58} {value:>28} {shown:>9}  {verdict}")
