"""What starting costs: the import, and the first training step with an empty and with a filled disk cache."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import row

# As a user's shell: Python keeps the byte code of what it imports.
ENVIRONMENT = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
ROOT = Path(__file__).resolve().parent.parent
FIRST_STEP = """
import sys
sys.path.insert(0, {examples!r})
import contextlib, io
import train_digits
with contextlib.redirect_stdout(io.StringIO()):
    run = train_digits.train("tpu", 1)
print(run.step_ms[0])
"""

CPU_PROGRAM = """
import time, torch
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
optimizer = torch.optim.Adam(model.parameters())
x, y = torch.randn(64, 64), torch.randint(10, (64,))
start = time.perf_counter()
for _ in range(1000):
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
print(time.perf_counter() - start)
"""


def seconds_to_import(autoload: bool) -> float:
    environment = {**ENVIRONMENT, "TORCH_DEVICE_BACKEND_AUTOLOAD": "1" if autoload else "0"}
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], env=environment, check=True)
    return time.perf_counter() - start


def cpu_program_seconds(autoload: bool) -> float:
    """A program that trains on the CPU and never names the device."""
    environment = {**ENVIRONMENT, "TORCH_DEVICE_BACKEND_AUTOLOAD": "1" if autoload else "0", "OMP_NUM_THREADS": "1"}
    answer = subprocess.run([sys.executable, "-c", CPU_PROGRAM], env=environment, check=True, capture_output=True)
    return float(answer.stdout)


def first_step_ms(cache: str) -> float:
    environment = {**ENVIRONMENT, "TORCH_TPU_CACHE_DIR": cache, "TORCH_TPU_QUIET": "1"}
    script = FIRST_STEP.format(examples=str(ROOT / "examples"))
    answer = subprocess.run([sys.executable, "-c", script], env=environment, check=True, capture_output=True, text=True)
    return float(answer.stdout.split()[-1])


def main() -> None:
    pairs = [(seconds_to_import(False), seconds_to_import(True)) for _ in range(7)]
    without, with_ = (statistics.median(side) for side in zip(*pairs, strict=True))
    row(
        "import torch, autoload against none: seconds more, of 0.25",
        f"{with_:.2f} / {without:.2f} s",
        (with_ - without) / 0.25,
        1.0,
    )
    pairs = [(cpu_program_seconds(False), cpu_program_seconds(True)) for _ in range(7)]
    without, with_ = (statistics.median(side) for side in zip(*pairs, strict=True))
    row("training on the CPU, autoload against none", f"{with_:.2f} / {without:.2f} s", with_ / without, 1.05)
    ratios, shown = [], ""
    for _ in range(3):
        with tempfile.TemporaryDirectory() as cache:
            cold, warm = first_step_ms(cache), first_step_ms(cache)
        ratios.append(warm / cold)
        shown = f"{warm:.0f} / {cold:.0f} ms"
    row("first step of the digits example, warm against cold", shown, statistics.median(ratios), 0.15)


if __name__ == "__main__":
    main()
