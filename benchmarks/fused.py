"""Fused eager mode against Strict on the CPU platform, as ratios measured in the same run."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from common import row
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
EagerMode = torch.tpu.EagerMode


def both(function: Callable[[], object], calls: int, repeats: int = 31) -> list[float]:
    """Microseconds of a call in Fused and in Strict mode, in turns: medians over blocks of ``calls``."""
    modes = (EagerMode.DEFER_AND_FUSE, EagerMode.DEFER_NEVER)
    times: list[list[float]] = [[], []]
    for i in range(repeats + 1):
        for mode, record in zip(modes, times, strict=True):
            torch.tpu.eager_mode = mode
            function()
            start = time.perf_counter()
            for _ in range(calls):
                function()
            if i:  # the first block compiles
                record.append((time.perf_counter() - start) / calls * 1e6)
    return [statistics.median(t) for t in times]


def chain(size: int) -> Callable[[], None]:
    """Ten pointwise operators on a square matrix, and a wait for the result."""
    x = torch.randn(size, size, device="tpu")

    def run() -> None:
        y = x
        for _ in range(2):
            y = ((y * 1.5 + x).relu() - 0.5).abs()
        torch.tpu.synchronize()

    return run


def recording() -> Callable[[], None]:
    """A hundred operators without the wait."""
    x = torch.randn(8, 8, device="tpu")

    def run() -> None:
        y = x
        for _ in range(100):
            y = y + 1

    return run


def training_step(batch: int) -> Callable[[], float]:
    """One step of the digits example's network: forward, backward, Adam, and the loss read."""
    from train_digits import Net

    torch.manual_seed(0)
    model = Net().to("tpu")
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loss_of = nn.CrossEntropyLoss()
    images, labels = torch.rand(batch, 1, 8, 8).to("tpu"), torch.randint(10, (batch,)).to("tpu")

    def step() -> float:
        optimizer.zero_grad()
        loss = loss_of(model(images), labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def main() -> None:
    for size, calls in ((8, 500), (1024, 10)):
        fused, strict = both(chain(size), calls)
        name = f"10 pointwise operators, {size}x{size}, against Strict"
        row(name, f"{fused:.1f} / {strict:.1f} us", fused / strict, 0.4)
    fused, strict = both(recording(), 20)
    row(
        "recording an operator, 8x8, against launching it",
        f"{fused / 100:.2f} / {strict / 100:.2f} us",
        fused / strict,
        1,
    )
    for batch in (8, 64):
        fused, strict = both(training_step(batch), 5)
        name = f"training step of the digits network, batch {batch}"
        row(name, f"{fused / 1e3:.2f} / {strict / 1e3:.2f} ms", fused / strict, 0.67)
    stats = torch.tpu.compile_stats()
    row("compile time of all of the above", f"{stats['compile_seconds'] + stats['trace_seconds']:.1f} s")


if __name__ == "__main__":
    main()
