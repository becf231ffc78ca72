"""One program cache per test run, so that a run depends on no other and leaves nothing behind."""

import os
import shutil
import tempfile

import pytest

# Set before torch is imported; the workers of pytest-xdist and the subprocesses of tests inherit it.
_own = None
if "TORCH_TPU_CACHE_DIR" not in os.environ:
    _own = os.environ["TORCH_TPU_CACHE_DIR"] = tempfile.mkdtemp(prefix="torch_tpu-tests-")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(_own, "inductor")  # AOTAutograd's cache is there
os.environ.setdefault("TORCH_TPU_QUIET", "1")


@pytest.fixture(autouse=True)
def _seed() -> None:
    """The same random inputs whatever ran before, on whichever worker, and no sizes that are known to change."""
    import torch

    from torch_tpu.bounded import changes

    torch.manual_seed(0)
    changes.clear()


def pytest_unconfigure() -> None:
    if _own is not None:
        shutil.rmtree(_own, ignore_errors=True)
