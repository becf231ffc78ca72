"""Convolutions and their gradients, each as one StableHLO ``convolution``.

With stride s, dilation d, padding p and kernel size k per dimension, ``y[i]`` is the sum of ``w[j] x[s i + d j -
p]`` over j. Its gradient by x, and the transposed convolution, exchange the stride for a dilation of the input and
reverse the kernel; its gradient by w is a convolution of x by the output's gradient with stride and dilation
exchanged (Dumoulin and Visin 2016, arXiv:1603.07285).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from torch_tpu.lowering.common import compute_dtype
from torch_tpu.lowering.precision import convolve
from torch_tpu.lowering.registry import lower
from torch_tpu.stablehlo import Type, Value
from torch_tpu.stablehlo import ops as hlo


@dataclass(frozen=True)
class Geometry:
    """One entry per spatial dimension; ``groups`` divides the channels."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    @staticmethod
    def of(rank: int, stride: list[int], padding: list[int], dilation: list[int], groups: int) -> Geometry:
        s, p, d = (tuple(v) * rank if len(v) == 1 else tuple(v) for v in (stride, padding, dilation))
        return Geometry(s, p, d, groups)


def _numbers(lhs: str, rhs: str, out: str, rank: int) -> str:
    """The dimension string, e.g. ``bf``, ``oi``, ``bf`` -> ``[b, f, 0, 1]x[o, i, 0, 1]->[b, f, 0, 1]``."""
    spatial = [str(i) for i in range(rank)]
    lhs, rhs, out = (f"[{', '.join([*letters, *spatial])}]" for letters in (lhs, rhs, out))
    return f"{lhs}x{rhs}->{out}"


def correlate(x: Value, w: Value, g: Geometry, size: tuple[int, ...], dtype: torch.dtype) -> Value:
    """``y[n, o, i] = sum w[o, c, j] x[n, c, s i + d j - p]`` with ``size`` positions i; x counts as zero outside."""
    rank, kernel = len(size), w.shape[2:]
    pads = [
        (p, (n - 1) * s + d * (k - 1) + 1 - have - p)
        for n, s, d, k, have, p in zip(size, g.stride, g.dilation, kernel, x.shape[2:], g.padding, strict=True)
    ]
    return convolve(
        x, w, dims=_numbers("bf", "oi", "bf", rank), strides=g.stride, padding=pads, lhs_dilation=(1,) * rank,
        rhs_dilation=g.dilation, feature_groups=g.groups, shape=(x.shape[0], w.shape[0], *size), dtype=dtype,
    )  # fmt: skip


def adjoint(y: Value, w: Value, g: Geometry, size: tuple[int, ...], dtype: torch.dtype) -> Value:
    """The transpose of :func:`correlate` as a map of x: spreads ``y`` over ``size`` positions."""
    rank, kernel = len(size), w.shape[2:]
    if g.groups > 1:  # [groups * out, in, ...] -> [groups * in, out, ...]
        out, inner = w.shape[0] // g.groups, w.shape[1]
        w = hlo.reshape(w, (g.groups, out, inner, *kernel))
        w = hlo.reshape(hlo.transpose(w, (0, 2, 1, *range(3, 3 + rank))), (g.groups * inner, out, *kernel))
    channels = w.shape[0] if g.groups > 1 else w.shape[1]
    # Reversed as data: XLA's CPU backend leaves its fast kernels for a reversed window.
    w = hlo.reverse(w, range(2, 2 + rank))
    pads = []
    for n, s, d, k, have, p in zip(size, g.stride, g.dilation, kernel, y.shape[2:], g.padding, strict=True):
        low = d * (k - 1) - p
        pads.append((low, n + d * (k - 1) - ((have - 1) * s + 1) - low))
    return convolve(
        y, w, dims=_numbers("bf", "oi" if g.groups > 1 else "io", "bf", rank), strides=(1,) * rank, padding=pads,
        lhs_dilation=g.stride, rhs_dilation=g.dilation, feature_groups=g.groups,
        shape=(y.shape[0], channels, *size), dtype=dtype,
    )  # fmt: skip


def kernel_gradient(x: Value, y: Value, g: Geometry, kernel: tuple[int, ...], dtype: torch.dtype) -> Value:
    """``dw[o, c, j] = sum_{n, i} y[n, o, i] x[n, c, s i + d j - p]``."""
    rank = len(kernel)
    pads = [
        (p, (k - 1) * d + (n - 1) * s + 1 - have - p)
        for k, d, n, s, have, p in zip(kernel, g.dilation, y.shape[2:], g.stride, x.shape[2:], g.padding, strict=True)
    ]
    return convolve(
        x, y, dims=_numbers("fb", "io", "fb", rank), strides=g.dilation, padding=pads, lhs_dilation=(1,) * rank,
        rhs_dilation=g.stride, batch_groups=g.groups, shape=(y.shape[1], x.shape[1] // g.groups, *kernel), dtype=dtype,
    )  # fmt: skip


@lower("convolution", "convolution_overrideable", "_convolution")
def convolution(
    x: Value, w: Value, bias: Value | None, stride: list[int], padding: list[int], dilation: list[int],
    transposed: bool, output_padding: list[int], groups: int, *_cudnn: bool, result: list[Type],
) -> Value:  # fmt: skip
    shape, dtype = result[0]
    if 0 in shape or 0 in x.shape or 0 in w.shape:
        y = hlo.constant(0, compute_dtype(dtype), shape)
    else:
        g = Geometry.of(x.ndim - 2, stride, padding, dilation, groups)
        y = (adjoint if transposed else correlate)(x, w, g, shape[2:], compute_dtype(dtype))
    if bias is not None:
        y = y + hlo.broadcast_in_dim(hlo.convert(bias, y.dtype), y.shape, [1])
    return hlo.convert(y, dtype)


@lower("convolution_backward_overrideable")
def convolution_backward(
    grad: Value, x: Value, w: Value, stride: list[int], padding: list[int], dilation: list[int], transposed: bool,
    output_padding: list[int], groups: int, mask: list[bool],
) -> list[Value | None]:  # fmt: skip
    """Gradients by input, weight and bias, those that ``mask`` asks for."""
    g = Geometry.of(x.ndim - 2, stride, padding, dilation, groups)
    empty = 0 in grad.shape or 0 in x.shape or 0 in w.shape
    grads: list[Value | None] = [None, None, None]
    if mask[0]:
        back = correlate if transposed else adjoint
        grads[0] = hlo.full_like(x, 0) if empty else back(grad, w, g, x.shape[2:], x.dtype)
    if mask[1]:
        pair = (grad, x) if transposed else (x, grad)
        grads[1] = hlo.full_like(w, 0) if empty else kernel_gradient(*pair, g, w.shape[2:], w.dtype)
    if mask[2]:
        wide = hlo.convert(grad, compute_dtype(grad.dtype))
        total = hlo.reduce_one(wide, 0, [i for i in range(grad.ndim) if i != 1], hlo.add)
        grads[2] = hlo.convert(total, grad.dtype)
    return grads


@lower("convolution_backward")
def convolution_backward_with_bias(
    grad: Value, x: Value, w: Value, bias_sizes: list[int] | None, *geometry: object
) -> list[Value | None]:  # fmt: skip
    return convolution_backward(grad, x, w, *geometry)
