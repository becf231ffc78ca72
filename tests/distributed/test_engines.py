"""Programs that others start: torchrun, and its restarts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "train_ddp.py"


def torchrun(folder: str, *options: str, restarts: int = 0) -> str:
    """What the example prints under torchrun with two processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", str(restarts), str(EXAMPLE), "--checkpoints", folder, "--epochs", "4", *options]
    done = subprocess.run(
        command, env={**os.environ, "TORCH_TPU_QUIET": "1"}, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return done.stdout


def losses(text: str) -> dict[int, list[float]]:
    """The losses that were printed for each epoch."""
    found: dict[int, list[float]] = {}
    for epoch, loss in re.findall(r"epoch (\d+): loss ([\d.]+)", text):
        found.setdefault(int(epoch), []).append(float(loss))
    return found


def test_after_a_restart_training_goes_on_from_the_last_checkpoint() -> None:
    with tempfile.TemporaryDirectory() as folder:
        whole = losses(torchrun(str(Path(folder, "a"))))
        broken = losses(torchrun(str(Path(folder, "b")), "--die-in-epoch", "2", restarts=1))
    assert {epoch: len(found) for epoch, found in broken.items()} == {0: 1, 1: 1, 2: 1, 3: 1}  # nothing done twice
    for epoch, (loss,) in whole.items():
        assert abs(broken[epoch][0] - loss) < 2e-3, (broken, whole)
