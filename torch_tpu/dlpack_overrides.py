"""DLPack for device tensors, between holders of ``tpu`` memory in this process.

``Tensor.__dlpack_device__`` of PyTorch 2.13 compares the device type with the literal ``"privateuse1"``, which no
renamed backend has (pytorch/pytorch#195815). And ATen exports the address of the first element, while a device storage
has one address, that of its cell: a view with an offset has no address of its own to export.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.utils.dlpack

_device = torch.Tensor.__dlpack_device__
_export = torch.Tensor.__dlpack__
_capsule = torch._C._to_dlpack


def _dlpack_device(self: torch.Tensor) -> tuple[Any, int]:
    if self.device.type != "tpu":
        return _device(self)
    return torch.utils.dlpack.DLDeviceType.kDLExtDev, self.device.index


def _check(tensor: torch.Tensor) -> None:
    if tensor.device.type == "tpu" and tensor.storage_offset() != 0:
        raise BufferError(
            f"DLPack cannot share a tpu view that starts inside its storage (storage offset "
            f"{tensor.storage_offset()}): device "
            f"memory has no addresses. Export the tensor that it is a view of, or a clone()."
        )


def _dlpack(self: torch.Tensor, **options: Any) -> Any:
    _check(self)
    return _export(self, **options)


def _to_dlpack(tensor: torch.Tensor, **options: Any) -> Any:
    _check(tensor)
    return _capsule(tensor, **options)


def install() -> None:
    """Puts the functions in the place of PyTorch's, which still do the work."""
    torch.Tensor.__dlpack_device__ = _dlpack_device  # type: ignore[method-assign]
    torch.Tensor.__dlpack__ = _dlpack  # type: ignore[method-assign]
    torch.to_dlpack = torch.utils.dlpack.to_dlpack = _to_dlpack  # type: ignore[assignment]
