"""Meta kernels that PyTorch lacks: shapes, dtypes and strides of a few results, for operators that have rules here."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._meta_registrations import meta_conv

aten = torch.ops.aten

_library = torch.library.Library("aten", "IMPL", "Meta")


def convolution_overrideable(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: list[int], padding: list[int], dilation: list[int],
    transposed: bool, output_padding: list[int], groups: int,
) -> Tensor:  # fmt: skip
    return meta_conv(x, weight, bias, stride, padding, dilation, transposed, output_padding, groups)


def convolution_backward_overrideable(
    grad: Tensor, x: Tensor, weight: Tensor, stride: list[int], padding: list[int], dilation: list[int], transposed: bool,
    output_padding: list[int], groups: int, output_mask: list[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    shapes = (x.shape, weight.shape, (grad.shape[1],))
    made = [grad.new_empty(shape) if wanted else None for shape, wanted in zip(shapes, output_mask, strict=True)]
    return made[0], made[1], made[2]


def fractional_max_pool3d_backward(grad: Tensor, x: Tensor, kernel: list[int], size: list[int], indices: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _register() -> None:
    for function in (convolution_overrideable, convolution_backward_overrideable, fractional_max_pool3d_backward):
        op = getattr(aten, function.__name__).default
        if not torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "Meta"):
            _library.impl(function.__name__, function)


_register()
