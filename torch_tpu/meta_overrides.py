"""PyTorch's Python meta kernels lay results out as its CPU kernels do, not as CUDA's.

A few ask ``torch._meta_registrations.device_hint`` whose layout and shapes to give, and a plain meta tensor, which is
what a trace works on, counts as CUDA's there: factors of the SVD, transforms, paddings, positions then have other
strides than those that a user of the CPU knows.
"""

from __future__ import annotations

from typing import Any

from torch import _meta_registrations

_device_hint = _meta_registrations.device_hint


def _hint(tensor: Any) -> str:
    from torch_tpu.tracing.tracer import is_tracing  # not yet needed where PyTorch is imported

    hint = _device_hint(tensor)
    unknown = hint == "cuda" and tensor.device.type == "meta"
    return "cpu" if hint == "tpu" or (unknown and is_tracing()) else hint


def install() -> None:
    """Puts the function in the place of PyTorch's, for tensors of this device and for traces."""
    _meta_registrations.device_hint = _hint
