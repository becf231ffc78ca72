"""Convolutions and their gradients, each as one StableHLO ``convolution``.

With stride s, dilation d, padding p and kernel size k per dimension, ``y[i]`` is the sum of ``w[j] x[s i + d j -
p]`` over j. Its gradient by x, and the transposed convolution, exchange the stride for a dilation of the input and
reverse the kernel; its gradient by w is a convolution of x by the output's gradient with stride and dilation
exchanged (Dumoulin and Visin 2016, arXiv:1603.07285).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from torch_tpu.lowering import depthwise, meta
from torch_tpu.lowering.common import compute_dtype, for_cpu
from torch_tpu.lowering.precision import convolve, product, served
from torch_tpu.lowering.reduction import total
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


def _is_product(w: Value, g: Geometry) -> bool:
    """Whether a kernel of one element per channel makes a matrix product, for which a CPU has the faster kernels."""
    return for_cpu() and w.dtype.is_floating_point and g.groups == 1 and set(w.shape[2:]) == {1} and not any(g.padding)


def _convolve(
    x: Value, w: Value, size: tuple[int, ...], *, strides: tuple[int, ...], padding: list[tuple[int, int]],
    lhs_dilation: tuple[int, ...], rhs_dilation: tuple[int, ...], groups: int, kernel: str, dtype: torch.dtype,
) -> Value:  # fmt: skip
    """The convolution with ``size`` results; ``kernel`` names the first dimensions of ``w``: ``oi`` or ``io``."""
    window: dict[str, Any] = {
        "strides": strides,
        "padding": padding,
        "lhs_dilation": lhs_dilation,
        "rhs_dilation": rhs_dilation,
    }
    shape = (x.shape[0], w.shape[kernel.index("o")], *size)
    if w.dtype == torch.int64 and not for_cpu():
        w = w if kernel == "oi" else hlo.move_dim(w, 0, 1)
        return hlo.reshape(_of_windows(_windows(x, w.shape[2:], size, **window), w, groups), shape)
    if x.shape[1] == groups > 1 and for_cpu():

        def multiply(a: Value, b: Value, dtype: torch.dtype, precision: str) -> Value:
            return depthwise.convolution(a, b, **window, shape=shape, dtype=dtype)

        return served(x, w, multiply, dtype)
    dims = _numbers("bf", kernel, "bf", len(size))
    return convolve(x, w, dims=dims, **window, feature_groups=groups, shape=shape, dtype=dtype)


def _windows(
    x: Value, kernel: tuple[int, ...], size: tuple[int, ...], *, strides: tuple[int, ...],
    padding: list[tuple[int, int]], lhs_dilation: tuple[int, ...], rhs_dilation: tuple[int, ...],
) -> Value:  # fmt: skip
    """``[n, c, *size, *kernel]``: what the kernel sees at each position."""
    low, high = zip(*padding, strict=True)
    x = hlo.pad(x, 0, (0, 0, *low), (0, 0, *high), (0, 0, *(d - 1 for d in lhs_dilation)))
    for i, (n, k, s, d) in enumerate(zip(size, kernel, strides, rhs_dilation, strict=True)):
        seen = [hlo.slice_dim(x, 2 + i, d * j, d * j + (n - 1) * s + 1, s) for j in range(k)]
        x = hlo.concatenate([hlo.expand_dims(v, [-1]) for v in seen], x.ndim)
    return x


def _of_windows(x: Value, w: Value, groups: int) -> Value:
    """The convolution as one product: a TPU's compiler refuses those of 64-bit integers."""
    rank = w.ndim - 2
    x = hlo.reshape(x, (x.shape[0], groups, x.shape[1] // groups, *x.shape[2:]))
    w = hlo.reshape(w, (groups, w.shape[0] // groups, *w.shape[1:]))
    summed = [2, *range(3 + rank, 3 + 2 * rank)], [2, *range(3, 3 + rank)]
    y = product(x, w, contract=summed, batch=([1], [0]))  # [groups, n, *size, out]
    return hlo.transpose(y, (1, 0, y.ndim - 1, *range(2, 2 + rank)))


def correlate(x: Value, w: Value, g: Geometry, size: tuple[int, ...], dtype: torch.dtype) -> Value:
    """``y[n, o, i] = sum w[o, c, j] x[n, c, s i + d j - p]`` with ``size`` positions i; x counts as zero outside."""
    rank, kernel = len(size), w.shape[2:]
    if _is_product(w, g):
        limits = [(n - 1) * s + 1 for n, s in zip(size, g.stride, strict=True)]
        seen = hlo.slice_(x, [0] * x.ndim, [*x.shape[:2], *limits], [1, 1, *g.stride])
        return hlo.move_dim(product(hlo.reshape(w, w.shape[:2]), seen, contract=((1,), (1,)), dtype=dtype), 1, 0)
    pads = [
        (p, (n - 1) * s + d * (k - 1) + 1 - have - p)
        for n, s, d, k, have, p in zip(size, g.stride, g.dilation, kernel, x.shape[2:], g.padding, strict=True)
    ]
    return _convolve(
        x, w, size, strides=g.stride, padding=pads, lhs_dilation=(1,) * rank, rhs_dilation=g.dilation, groups=g.groups,
        kernel="oi", dtype=dtype,
    )  # fmt: skip


def adjoint(y: Value, w: Value, g: Geometry, size: tuple[int, ...], dtype: torch.dtype) -> Value:
    """The transpose of :func:`correlate` as a map of x: spreads ``y`` over ``size`` positions."""
    rank, kernel = len(size), w.shape[2:]
    if _is_product(w, g):
        z = hlo.move_dim(product(hlo.reshape(w, w.shape[:2]), y, contract=((0,), (1,)), dtype=dtype), 1, 0)
        rest = [n - ((have - 1) * s + 1) for n, have, s in zip(size, y.shape[2:], g.stride, strict=True)]
        return hlo.pad(z, 0, [0] * z.ndim, [0, 0, *rest], [0, 0, *(s - 1 for s in g.stride)])
    if g.groups > 1:  # [groups * out, in, ...] -> [groups * in, out, ...]
        out, inner = w.shape[0] // g.groups, w.shape[1]
        w = hlo.reshape(w, (g.groups, out, inner, *kernel))
        w = hlo.reshape(hlo.transpose(w, (0, 2, 1, *range(3, 3 + rank))), (g.groups * inner, out, *kernel))
    # Reversed as data: XLA's CPU backend leaves its fast kernels for a reversed window.
    w = hlo.reverse(w, range(2, 2 + rank))
    pads = []
    for n, s, d, k, have, p in zip(size, g.stride, g.dilation, kernel, y.shape[2:], g.padding, strict=True):
        low = d * (k - 1) - p
        pads.append((low, n + d * (k - 1) - ((have - 1) * s + 1) - low))
    return _convolve(
        y, w, size, strides=(1,) * rank, padding=pads, lhs_dilation=g.stride, rhs_dilation=g.dilation, groups=g.groups,
        kernel="oi" if g.groups > 1 else "io", dtype=dtype,
    )  # fmt: skip


def kernel_gradient(x: Value, y: Value, g: Geometry, kernel: tuple[int, ...], dtype: torch.dtype) -> Value:
    """``dw[o, c, j] = sum_{n, i} y[n, o, i] x[n, c, s i + d j - p]``."""
    rank = len(kernel)
    pads = [
        (p, (k - 1) * d + (n - 1) * s + 1 - have - p)
        for k, d, n, s, have, p in zip(kernel, g.dilation, y.shape[2:], g.stride, x.shape[2:], g.padding, strict=True)
    ]
    if x.shape[1] == g.groups > 1 and for_cpu():
        window: dict[str, Any] = {"strides": g.stride, "padding": pads, "rhs_dilation": g.dilation, "kernel": kernel}

        def multiply(a: Value, b: Value, dtype: torch.dtype, precision: str) -> Value:
            return depthwise.kernel_gradient(a, b, **window, dtype=dtype)

        return served(x, y, multiply, dtype)
    shape = (y.shape[1], x.shape[1] // g.groups, *kernel)
    window = {
        "dims": _numbers("fb", "io", "fb", rank), "strides": g.dilation, "padding": pads, "lhs_dilation": (1,) * rank,
        "rhs_dilation": g.stride, "shape": shape, "dtype": dtype,
    }  # fmt: skip
    if g.groups > 1 and for_cpu():  # XLA has a fast kernel there for groups of features, not of samples
        x = hlo.reshape(x, (x.shape[0], g.groups, shape[1], *x.shape[2:]))
        x = hlo.move_dim(x, 0, 1)
        x = hlo.reshape(x, (g.groups * x.shape[1], *x.shape[2:]))
        return convolve(x, y, **window, feature_groups=g.groups)
    return convolve(x, y, **window, batch_groups=g.groups)


@lower("convolution", "convolution_overrideable", "_convolution", meta=meta.convolution_overrideable)
def convolution(
    x: Value, w: Value, bias: Value | None, stride: list[int], padding: list[int], dilation: list[int],
    transposed: bool, output_padding: list[int], groups: int, *_cudnn: bool, result: list[Type],
) -> Value:  # fmt: skip
    torch._check(min(padding, default=0) >= 0, lambda: "negative padding is not supported")
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
        grads[2] = hlo.convert(total(wide, [i for i in range(grad.ndim) if i != 1]), grad.dtype)
    return grads


@lower("convolution_backward")
def convolution_backward_with_bias(
    grad: Value, x: Value, w: Value, bias_sizes: list[int] | None, *geometry: object
) -> list[Value | None]:  # fmt: skip
    return convolution_backward(grad, x, w, *geometry)
