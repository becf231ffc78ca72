"""The end of the interpreter, while Python still runs."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.autograd import Variable

from torch_tpu import _C, tpu


def _autograd_has_run() -> bool:
    """True if PyTorch's backward threads exist; they are named after it."""
    return any(f.read_text().startswith("pt_autograd") for f in Path("/proc/self/task").glob("*/comm"))


def _settle_autograd() -> None:
    """Waits until the backward threads of the devices have dropped all that they held.

    ``torch.autograd.backward`` leaves a Python object to the thread of the device (pytorch/pytorch#173568; see
    #180701), which drops it after the call has returned. If the interpreter ends before that, the thread's wait for the
    GIL becomes its end, in a destructor, and the process aborts. A thread finishes one backward pass before it begins
    the next: here one without work and without Python objects, for the engine is called directly.
    """
    if not tpu.is_initialized() or not _autograd_has_run():
        return
    for i in range(tpu.device_count()):
        with torch.enable_grad():
            leaf = torch.empty(0, device=f"tpu:{i}", requires_grad=True)
            end = leaf.view(0)
        Variable._execution_engine.run_backward(
            (end,), (torch.empty(0, device=f"tpu:{i}"),), False, False, (), allow_unreachable=True, accumulate_grad=True
        )


def run() -> None:
    """Lets the device finish and go."""
    try:
        _settle_autograd()
    finally:
        _C._shutdown()
