"""Meta kernels that PyTorch lacks: shapes, dtypes and strides of a few results, for operators that have rules here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._meta_registrations import meta_conv

_library = torch.library.Library("aten", "IMPL", "Meta")


def convolution_overrideable(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: list[int], padding: list[int], dilation: list[int],
    transposed: bool, output_padding: list[int], groups: int,
) -> Tensor:  # fmt: skip
    return meta_conv(x, weight, bias, stride, padding, dilation, transposed, output_padding, groups)


def convolution_backward_overrideable(
    grad: Tensor, x: Tensor, weight: Tensor, stride: list[int], padding: list[int], dilation: list[int],
    transposed: bool, output_padding: list[int], groups: int, output_mask: list[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    shapes = (x.shape, weight.shape, (grad.shape[1],))
    made = [grad.new_empty(shape) if wanted else None for shape, wanted in zip(shapes, output_mask, strict=True)]
    return made[0], made[1], made[2]


def fractional_max_pool3d_backward(
    grad: Tensor, x: Tensor, kernel: list[int], size: list[int], indices: Tensor
) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def ctc_loss_tensor(
    log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int = 0,
    zero_infinity: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The longest target is data, so alpha has room for the most that ``targets`` can hold."""
    times, n, _ = log_probs.shape
    return log_probs.new_empty((n,)), log_probs.new_empty((n, times, 2 * targets.shape[-1] + 1))


def _like(position: int) -> Callable[..., Tensor]:
    return lambda *args, **_: torch.empty_like(args[position], memory_format=torch.contiguous_format)


def geqrf(a: Tensor) -> tuple[Tensor, Tensor]:
    packed = torch.empty_like(a.mT, memory_format=torch.contiguous_format).mT
    return packed, a.new_empty((*a.shape[:-2], min(a.shape[-2:])))


def linalg_lstsq(
    a: Tensor, b: Tensor, rcond: float | None = None, *, driver: str | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Solution, residuals, ranks and singular values; which of the last three a driver gives is LAPACK's choice."""
    m, n = a.shape[-2:]
    vector = b.ndim == a.ndim - 1 and b.shape == a.shape[:-1]
    columns = [] if vector else [b.shape[-1]]
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[: b.ndim - (1 if vector else 2)])
    real = a.new_empty(0).real.dtype if a.dtype.is_complex else a.dtype
    residuals = (*batch, *(columns or [1])) if m > n and driver in ("gels", "gelsd", "gelss") else (0,)
    return (
        a.new_empty((*batch, n, *columns)),
        a.new_empty(residuals, dtype=real),
        a.new_empty((0,) if driver == "gels" else a.shape[:-2], dtype=torch.int64),
        a.new_empty((*a.shape[:-2], min(m, n)) if driver in ("gelsd", "gelss") else (0,), dtype=real),
    )


def _nothing(*_: Any, **__: Any) -> None:
    """For operators that write their arguments and return nothing."""


_KERNELS: dict[str, Callable[..., Any]] = {
    "convolution_overrideable": convolution_overrideable,
    "convolution_backward_overrideable": convolution_backward_overrideable,
    "fractional_max_pool3d_backward": fractional_max_pool3d_backward,
    "geqrf": geqrf,
    "linalg_lstsq": linalg_lstsq,
    "multi_margin_loss_backward": _like(1),
    "multilabel_margin_loss_backward": _like(1),
    "_ctc_loss.Tensor": ctc_loss_tensor,
    "_ctc_loss_backward": _like(1),
    "_ctc_loss_backward.Tensor": _like(1),
    "_masked_softmax": _like(0),
    "_masked_softmax_backward": _like(0),
    "binomial": _like(0),
    "_sample_dirichlet": _like(0),
    "_standard_gamma_grad": _like(0),
    "_dirichlet_grad": _like(0),
    "_fused_sgd_": _nothing,
    "_fused_sgd_.tensor_lr": _nothing,
    "_fused_adam_.tensor_lr": _nothing,
    "_fused_adamw_.tensor_lr": _nothing,
    "_fused_adagrad_": _nothing,
    "_fused_adagrad_.tensor_lr": _nothing,
}


def _register() -> None:
    for name, kernel in _KERNELS.items():
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "Meta"):
            _library.impl(name, kernel)


_register()
