"""``torch.autocast("tpu")`` is bfloat16 unless told otherwise, on every thread.

PyTorch keeps the default dtype of autocasting per thread, and starts a thread of a renamed backend with float16
(pytorch/pytorch#132715), which overflows where bfloat16 does not.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

import torch

_init = torch.autocast.__init__
_thread = threading.local()


def set_thread_default() -> None:
    """Makes bfloat16 this thread's default, once; a later choice of the user's stands."""
    if not hasattr(_thread, "ready"):
        _thread.ready = True
        if not torch.is_autocast_enabled("tpu"):  # else the dtype is that of the region which this thread works for
            torch.set_autocast_dtype("tpu", torch.bfloat16)


@functools.wraps(_init)
def _init_with_default(self: torch.autocast, device_type: str, *args: Any, **kwargs: Any) -> None:
    if device_type == "tpu":
        set_thread_default()
    _init(self, device_type, *args, **kwargs)


def install() -> None:
    """Sets the default of this thread, and of others when they first use autocast."""
    set_thread_default()
    torch.autocast.__init__ = _init_with_default  # type: ignore[method-assign]
