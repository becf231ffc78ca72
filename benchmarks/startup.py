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


def seconds_to_import(autoload: bool) -> float:
    environment = {**ENVIRONMENT, "TORCH_DEVICE_BACKEND_AUTOLOAD": "1" if autoload else "0"}
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], env=environment, check=True)
    return time.perf_counter() - start


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
    ratios, shown = [], ""
    for _ in range(3):
        with tempfile.TemporaryDirectory() as cache:
            cold, warm = first_step_ms(cache), first_step_ms(cache)
        ratios.append(warm / cold)
        shown = f"{warm:.0f} / {cold:.0f} ms"
    row("first step of the digits example, warm against cold", shown, statistics.median(ratios), 0.15)


if __name__ == "__main__":
    main()
