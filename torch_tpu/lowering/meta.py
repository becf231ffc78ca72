"""Meta kernels that PyTorch lacks: shapes, dtypes and strides of a few results, for operators that have rules here."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._meta_registrations import meta_conv
from torch._ops import OpOverload
from torch._prims_common import suggest_memory_format
from torch.utils._pytree import tree_map_only

from torch_tpu.tracing.schema import resolve

_library = torch.library.Library("aten", "IMPL", "Meta")


def convolution_overrideable(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: list[int], padding: list[int], dilation: list[int],
    transposed: bool, output_padding: list[int], groups: int, *_cudnn: bool,
) -> Tensor:  # fmt: skip
    """In the memory format that the input or the weight has, as on the CPU: in three dimensions, if oneDNN does it."""
    out = meta_conv(x, weight, bias, stride, padding, dilation, transposed, output_padding, groups)
    flat = x.ndim == 3  # the CPU computes it with another dimension of size 1
    shaped = [x.contiguous().unsqueeze(2), weight.unsqueeze(2)] if flat else [x, weight]
    formats = {suggest_memory_format(t) for t in shaped} - {torch.contiguous_format}
    stepped = any(n != 1 for n in (*stride, *dilation))
    padded = any(p >= s for p, s in zip(output_padding, stride, strict=False))
    if not formats or (x.ndim == 5 and ((transposed and padded) or not _by_onednn(x, weight, stepped, groups))):
        return out
    out = torch.empty_like(out.unsqueeze(2) if flat else out, memory_format=formats.pop())
    return out.squeeze(2) if flat else out


def _by_onednn(x: Tensor, weight: Tensor, stepped: bool, groups: int) -> bool:
    """Whether the CPU has oneDNN convolve: ``ConvParams::use_mkldnn`` in ATen's Convolution.cpp."""
    if not torch.backends.mkldnn.is_available():
        return False
    if x.dtype in (torch.bfloat16, torch.float16):
        ops = torch.ops.mkldnn
        return (ops._is_mkldnn_bf16_supported if x.dtype == torch.bfloat16 else ops._is_mkldnn_fp16_supported)()
    n, kernel = x.shape[0], weight.shape[-2:]
    worth_it = stepped or n >= 16 or tuple(kernel) != (1, 1) or torch.get_num_threads() > 1
    large = groups > 1 or min(kernel) > 3 or n > 1 or math.prod(x.shape[:4]) > 20480
    return x.dtype in (torch.float32, torch.complex64) and worth_it and large


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


def contiguous(name: str) -> Callable[..., Any]:
    """PyTorch's meta kernel of an overload, its results row-major as the CPU's are."""

    def row_major(t: Tensor) -> Tensor:
        return torch.empty_like(t, memory_format=torch.contiguous_format)

    return lambda *args, **kwargs: tree_map_only(Tensor, row_major, _overload(name)(*args, **kwargs))


def in_format_of_input(name: str) -> Callable[..., Any]:
    """PyTorch's meta kernel of an overload, its result in the memory format that the input suggests, as on the CPU."""
    return lambda x, *args: torch.empty_like(_overload(name)(x, *args), memory_format=suggest_memory_format(x))


def without_rows(name: str) -> Callable[..., Any]:
    """PyTorch's meta kernel of an overload, for those that trip over a batch of none."""

    def kernel(x: Tensor, *args: Any) -> Tensor:
        if tuple(x.shape[:1]) != (0,):
            return _overload(name)(x, *args)
        made = _overload(name)(x.new_empty((1, *x.shape[1:])), *args)
        return made.new_empty((0, *made.shape[1:]))

    return kernel


def _overload(name: str) -> OpOverload:
    """The overload of a rule's name; looked up late, for not every version of PyTorch has every operator."""
    return resolve(f"aten::{name}")


def _like(position: int) -> Callable[..., Tensor]:
    return lambda *args, **_: torch.empty_like(args[position], memory_format=torch.contiguous_format)


def geqrf(a: Tensor) -> tuple[Tensor, Tensor]:
    packed = torch.empty_like(a.mT, memory_format=torch.contiguous_format).mT
    return packed, a.new_empty((*a.shape[:-2], min(a.shape[-2:])))


def histc(x: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    """Also of integers, as on CUDA: mixtures of experts count their tokens so."""
    torch._check(bins > 0, lambda: f"bins must be > 0, but got {bins}")
    torch._check(max >= min, lambda: "max must be larger than min")
    return x.new_empty((bins,))


def linalg_lstsq(
    a: Tensor, b: Tensor, rcond: float | None = None, *, driver: str | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Solution, residuals, ranks and singular values; which of the last three a driver gives is LAPACK's choice.

    The solution is what LAPACK leaves in the memory of ``b``, column-major: its first ``n`` rows.
    """
    torch._check(a.ndim >= 2, lambda: "torch.linalg.lstsq: input must have at least 2 dimensions.")
    m, n = a.shape[-2:]
    vector = b.ndim == a.ndim - 1 and b.shape == a.shape[:-1]
    columns = [] if vector else [b.shape[-1]]
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[: b.ndim - (1 if vector else 2)])
    real = a.new_empty(0).real.dtype if a.dtype.is_complex else a.dtype
    residuals = (*batch, *(columns or [1])) if m > n and driver in ("gels", "gelsd", "gelss") else (0,)
    solution = a.new_empty((*batch, *columns, max(m, n)))[..., :n]
    return (
        solution if vector else solution.mT,
        a.new_empty(residuals, dtype=real),
        a.new_empty((0,) if driver == "gels" else a.shape[:-2], dtype=torch.int64),
        a.new_empty((*a.shape[:-2], min(m, n)) if driver in ("gelsd", "gelss") else (0,), dtype=real),
    )


def wide_product(x: Tensor, a: Tensor, b: Tensor, dtype: torch.dtype, **_: Any) -> Tensor:
    return a.new_empty((*a.shape[:-1], b.shape[-1]), dtype=dtype)


def fft_r2c(x: Tensor, dims: list[int], normalization: int, onesided: bool) -> Tensor:
    sizes = list(x.shape)
    if onesided:
        sizes[dims[-1]] = sizes[dims[-1]] // 2 + 1
    return x.new_empty(sizes, dtype=x.dtype.to_complex())


def fft_c2r(x: Tensor, dims: list[int], normalization: int, size: int) -> Tensor:
    sizes = list(x.shape)
    sizes[dims[-1]] = size
    return x.new_empty(sizes, dtype=x.dtype.to_real())


def thnn_fused_lstm_cell(
    input_gates: Tensor,
    hidden_gates: Tensor,
    cx: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    hy, cy, workspace = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (cx, cx, input_gates))
    return hy, cy, workspace


def thnn_fused_gru_cell(
    input_gates: Tensor,
    hidden_gates: Tensor,
    hx: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    hy = torch.empty_like(hx, memory_format=torch.contiguous_format)
    return hy, hx.new_empty((hx.shape[0], 5 * hx.shape[1]))


def thnn_fused_gru_cell_backward(
    grad: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    n, hidden = grad.shape
    gates = [workspace.new_empty((n, 3 * hidden)) for _ in range(2)]
    biases = [workspace.new_empty((3 * hidden,)) if has_bias else None for _ in range(2)]
    return gates[0], gates[1], torch.empty_like(grad, memory_format=torch.contiguous_format), biases[0], biases[1]


def fused_attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, *_: Any, **__: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    return tuple(None if t is None else torch.empty_like(t) for t in (query, key, value, bias))  # type: ignore[return-value]


def _quantised_and_mask(x: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)


def _quantisation_gradients(
    grad: Tensor, x: Tensor, scale: Tensor, zero_point: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return _as_float_if_bfloat16(x), torch.empty_like(scale), torch.empty_like(zero_point)


def _quantisation_gradients_of_one(
    grad: Tensor, x: Tensor, scale: Tensor, zero_point: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return _as_float_if_bfloat16(x), scale.new_empty((1,)), zero_point.new_empty((1,))


def _as_float_if_bfloat16(x: Tensor) -> Tensor:
    return torch.empty_like(x, dtype=torch.float32 if x.dtype == torch.bfloat16 else x.dtype)


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
    "_thnn_fused_gru_cell": thnn_fused_gru_cell,
    "_thnn_fused_gru_cell_backward": thnn_fused_gru_cell_backward,
    "fake_quantize_per_tensor_affine_cachemask": _quantised_and_mask,
    "fake_quantize_per_channel_affine_cachemask": _quantised_and_mask,
    "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams": _quantised_and_mask,
    "_fake_quantize_learnable_per_tensor_affine": lambda x, *_: torch.empty_like(x),
    "_fake_quantize_learnable_per_channel_affine": lambda x, *_: torch.empty_like(x),
    "_fake_quantize_learnable_per_tensor_affine_backward": _quantisation_gradients_of_one,
    "_fake_quantize_learnable_per_channel_affine_backward": _quantisation_gradients,
    "_padded_dense_to_jagged_forward": lambda dense, offsets, total: dense.new_empty((total, *dense.shape[2:])),
    "_fused_sgd_": _nothing,
    "_fused_sgd_.tensor_lr": _nothing,
    "_fused_adam_.tensor_lr": _nothing,
    "_fused_adamw_.tensor_lr": _nothing,
    "_fused_adagrad_": _nothing,
    "_fused_adagrad_.tensor_lr": _nothing,
    # PyTorch has these from 2.13 on.
    "_scaled_dot_product_fused_attention_overrideable_backward": fused_attention_backward,
    "_standard_gamma": _like(0),
    "_transformer_encoder_layer_fwd": lambda x, *_: torch.empty_like(x),
}

# PyTorch's own fail on arguments that it passes itself.
_REPLACED: dict[str, Callable[..., Any]] = {
    "_thnn_fused_lstm_cell": thnn_fused_lstm_cell,  # "'NoneType' object has no attribute 'device'" without biases
}
_TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
if _TORCH < (2, 13):  # take the dtype for beta
    _REPLACED |= {"addmm.dtype": wide_product, "baddbmm.dtype": wide_product}
if _TORCH < (2, 12):  # strides by which elements overlap, for some orders of the dimensions
    _REPLACED |= {"_fft_c2c": _like(0), "_fft_r2c": fft_r2c, "_fft_c2r": fft_c2r}


def _register() -> None:
    for name, kernel in _REPLACED.items():
        _library.impl(name, kernel, allow_override=True)  # the default from torch 2.13 on only
    for name, kernel in _KERNELS.items():
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "Meta"):
            _library.impl(name, kernel)


_register()
