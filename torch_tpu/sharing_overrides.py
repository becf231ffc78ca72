"""A device tensor that is sent to another process says so, and what to do.

PyTorch hands the storage of any tensor it does not know to the CPU's shared memory, which fails with "_share_fd_: only
available on CPU".
"""

from __future__ import annotations

from multiprocessing.reduction import register
from typing import Any

import torch
from torch.multiprocessing.reductions import reduce_storage


def _reduce(storage: torch.UntypedStorage) -> tuple[Any, ...]:
    if storage.device.type == "tpu":
        raise RuntimeError(
            "A tpu tensor cannot be sent to another process: device memory belongs to the process that allocated it. "
            "Send tensor.cpu(), and move it to the device there."
        )
    return reduce_storage(storage)


def install() -> None:
    """Puts the check in front of PyTorch's own reduction, which still does the work."""
    register(torch.UntypedStorage, _reduce)
