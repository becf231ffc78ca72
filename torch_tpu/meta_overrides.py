"""PyTorch's Python meta kernels lay results out as its CPU kernels do, not as CUDA's.

A few ask ``torch._meta_registrations.device_hint`` whose layout and shapes to give, and a plain meta tensor, which is
what a trace works on, counts as CUDA's there: factors of the SVD, transforms, paddings, positions then have other
strides than those that a user of the CPU knows. That of ``histc`` asks in order to refuse integers, which are taken
here as on CUDA: mixtures of experts count their tokens so. That of ``_grouped_mm``, their product, knows CUDA's dtype
alone, where the CPU and this device take others.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import _meta_registrations

_device_hint = _meta_registrations.device_hint
_grouped_mm = _meta_registrations._meta_grouped_mm_common

#: Meta kernels that ask for the device only to refuse what the CPU does not have.
_REFUSING = frozenset({"meta_histc"})


def _hint(tensor: Any) -> str:
    from torch_tpu.tracing.tracer import is_tracing  # not yet needed where PyTorch is imported

    hint = _device_hint(tensor)
    if hint == "tpu" and sys._getframe(1).f_code.co_name in _REFUSING:
        return hint
    unknown = hint == "cuda" and tensor.device.type == "meta"
    return "cpu" if hint == "tpu" or (unknown and is_tracing()) else hint


def _grouped(x: Any, y: Any, scale_a: Any, scale_b: Any, **options: Any) -> Any:
    if scale_a is None and _device_hint(x) == "tpu":
        from torch_tpu.lowering.quantized import grouped_mm_meta  # not yet needed where PyTorch is imported

        return grouped_mm_meta(x, y, options.get("offs"), options.get("bias"), options.get("out_dtype"))
    return _grouped_mm(x, y, scale_a=scale_a, scale_b=scale_b, **options)


def install() -> None:
    """Puts the functions in the place of PyTorch's, for tensors of this device and for traces."""
    _meta_registrations.device_hint = _hint
    _meta_registrations._meta_grouped_mm_common = _grouped  # type: ignore[assignment]
