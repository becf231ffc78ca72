"""What several test files need."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import torch

#: The minor version, for details in which PyTorch's own versions differ.
TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])


def python(
    code: str, *, fails: bool = False, timeout: float = 300, **environment: str | None
) -> subprocess.CompletedProcess[str]:
    """Runs ``code`` in a fresh interpreter; an environment value of None removes the variable."""
    env = dict(os.environ)
    for name, value in environment.items():
        if value is None:
            env.pop(name, None)
        else:
            env[name] = value
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=env,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    if fails == (done.returncode == 0):
        raise AssertionError(f"exit status {done.returncode}\n--- stdout\n{done.stdout}\n--- stderr\n{done.stderr}")
    return done


def outcome(function: Callable[[], Any]) -> tuple[str, Any]:
    """("value", result) or ("raised", (type, message)), to compare two devices."""
    try:
        return "value", function()
    except Exception as error:  # any exception is a result to compare
        return "raised", (type(error), str(error))


def assert_same(actual: torch.Tensor, expected: torch.Tensor, **tolerances: float) -> None:
    """``actual`` on the device is what ``expected`` is on the CPU: values, dtype, shape and strides."""
    assert actual.device.type == "tpu" and expected.device.type == "cpu"
    torch.testing.assert_close(actual.detach().cpu(), expected.detach(), equal_nan=True, **tolerances)
    assert actual.stride() == expected.stride()


def matmul_precision(level: str) -> contextlib.AbstractContextManager[None]:
    """Float32 matrix products of this thread as on the CPU (``highest``), or at a TPU's ``high`` or ``medium``.

    Scoped: ``torch.set_float32_matmul_precision`` has no way back to "nobody has set it".
    """
    names = {"medium": "DEFAULT", "high": "HIGH", "highest": "HIGHEST"}
    return torch.tpu.precision(torch.tpu.Precision[names[level]])
