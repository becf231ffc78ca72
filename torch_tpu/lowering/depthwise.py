"""Convolutions whose groups have one input channel, as element-wise sums: XLA's CPU backend has no kernel for them.

Arguments follow :func:`torch_tpu.stablehlo.ops.convolution` with dimensions ``[b, f, ...]x[o, i, ...]->[b, f, ...]``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import torch

from torch_tpu.stablehlo import Shape, Value
from torch_tpu.stablehlo import ops as hlo


def _windows(x: Value, kernel: Shape, size: Shape, strides: Sequence[int], dilation: Sequence[int]) -> Iterator[Value]:
    """For every kernel position, row by row, the ``size`` elements that it sees of ``x``'s last dimensions."""
    for position in itertools.product(*map(range, kernel)):
        starts = [j * d for j, d in zip(position, dilation, strict=True)]
        limits = [a + (n - 1) * s + 1 for a, n, s in zip(starts, size, strides, strict=True)]
        yield hlo.slice_(x, [0, 0, *starts], [*x.shape[:2], *limits], [1, 1, *strides])


def _padded(x: Value, padding: Sequence[tuple[int, int]], dilation: Sequence[int]) -> Value:
    lead = [0] * (x.ndim - len(padding))
    low, high = zip(*padding, strict=True)
    return hlo.pad(x, 0, [*lead, *low], [*lead, *high], [*lead, *(d - 1 for d in dilation)])


def convolution(
    x: Value, w: Value, *, strides: Sequence[int], padding: Sequence[tuple[int, int]], lhs_dilation: Sequence[int],
    rhs_dilation: Sequence[int], shape: Shape, dtype: torch.dtype,
) -> Value:  # fmt: skip
    """The sum over the kernel's positions of its weights there times what they see of ``x``."""
    x, w = hlo.convert(_padded(x, padding, lhs_dilation), dtype), hlo.convert(w, dtype)
    groups, kernel, size = x.shape[1], w.shape[2:], shape[2:]
    full = (shape[0], groups, w.shape[0] // groups, *size)
    taps = hlo.reshape(w, (*full[1:3], math.prod(kernel)))
    y = hlo.constant(0, dtype, full)
    for k, seen in enumerate(_windows(x, kernel, size, strides, rhs_dilation)):
        tap = hlo.broadcast_in_dim(hlo.squeeze(hlo.slice_dim(taps, 2, k, k + 1), [2]), full, [1, 2])
        y = y + tap * hlo.broadcast_in_dim(seen, full, [0, 1, *range(3, len(full))])
    return hlo.reshape(y, shape)


def kernel_gradient(
    x: Value, y: Value, *, strides: Sequence[int], padding: Sequence[tuple[int, int]], rhs_dilation: Sequence[int],
    kernel: Shape, dtype: torch.dtype,
) -> Value:  # fmt: skip
    """The sum over samples and positions of the output's gradient ``y`` times what the kernel's positions see."""
    x, y = hlo.convert(_padded(x, padding, [1] * len(kernel)), dtype), hlo.convert(y, dtype)
    groups, size = x.shape[1], y.shape[2:]
    full = (x.shape[0], groups, y.shape[1] // groups, *size)
    y, over, sums = hlo.reshape(y, full), [0, *range(3, len(full))], []
    for seen in _windows(x, kernel, size, strides, rhs_dilation):
        product = y * hlo.broadcast_in_dim(seen, full, [0, 1, *range(3, len(full))])
        sums.append(hlo.expand_dims(hlo.reduce_one(product, 0, over, hlo.add), [2]))
    return hlo.reshape(hlo.concatenate(sums, 2), (groups * full[2], 1, *kernel))
