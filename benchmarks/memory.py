"""Host memory after many training steps against after few: nothing may grow with the number of steps."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import torch
from common import row

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import train_digits


def resident_mib() -> float:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


def main(first: int = 1000, last: int = 10000) -> None:
    torch.manual_seed(0)
    model = train_digits.Net().to("tpu")
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    dataset = train_digits.data()[0]
    images, labels = (t[:64] for t in dataset.tensors)
    early = 0.0
    for step in range(1, last + 1):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(images.to("tpu")), labels.to("tpu"))
        loss.backward()
        optimizer.step()
        if step % 100 == 0:
            loss.item()
        if step == first:
            early = resident_mib()
    late = resident_mib()
    row(f"host memory after {last} training steps against {first}", f"{late:.0f} / {early:.0f} MiB", late / early, 1.02)


if __name__ == "__main__":
    main()
