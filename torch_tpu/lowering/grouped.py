"""Convolutions in groups as one product per kernel position: XLA's CPU backend has fast kernels for one group only.

Arguments follow :func:`torch_tpu.stablehlo.ops.convolution` with dimensions ``[b, f, ...]x[o, i, ...]->[b, f, ...]``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import torch

from torch_tpu.lowering.reduction import total
from torch_tpu.stablehlo import Shape, Value
from torch_tpu.stablehlo import ops as hlo


def _by_group(x: Value, groups: int) -> Value:
    """``[N, groups * c, ...]`` as ``[groups, c, N, ...]``."""
    x = hlo.reshape(x, (x.shape[0], groups, x.shape[1] // groups, *x.shape[2:]))
    return hlo.transpose(x, (1, 2, 0, *range(3, x.ndim)))


def _windows(x: Value, kernel: Shape, size: Shape, strides: Sequence[int], dilation: Sequence[int]) -> Iterator[Value]:
    """For every kernel position, row by row, what it sees of ``x``: ``size`` elements of the last dimensions."""
    lead = x.ndim - len(size)
    for position in itertools.product(*map(range, kernel)):
        starts = [j * d for j, d in zip(position, dilation, strict=True)]
        limits = [a + (n - 1) * s + 1 for a, n, s in zip(starts, size, strides, strict=True)]
        yield hlo.slice_(x, [0] * lead + starts, [*x.shape[:lead], *limits], [1] * lead + [*strides])


def _padded(x: Value, padding: Sequence[tuple[int, int]], dilation: Sequence[int]) -> Value:
    lead = [0] * (x.ndim - len(padding))
    low, high = zip(*padding, strict=True)
    return hlo.pad(x, 0, [*lead, *low], [*lead, *high], [*lead, *(d - 1 for d in dilation)])


def _columns(x: Value, kernel: Shape, size: Shape, strides: Sequence[int], dilation: Sequence[int]) -> Value:
    """Every kernel position's window of ``x`` ``[groups, c, N, ...]``, as ``[groups, c * positions, N * size]``."""
    seen = _windows(x, kernel, size, strides, dilation)
    flat = (*x.shape[:2], 1, x.shape[2] * math.prod(size))
    columns = hlo.concatenate([hlo.reshape(v, flat) for v in seen], 2)
    return hlo.reshape(columns, (x.shape[0], x.shape[1] * math.prod(kernel), flat[3]))


def convolution(
    x: Value, w: Value, *, strides: Sequence[int], padding: Sequence[tuple[int, int]], lhs_dilation: Sequence[int],
    rhs_dilation: Sequence[int], groups: int, shape: Shape, dtype: torch.dtype,
) -> Value:  # fmt: skip
    """One matrix product per group of what the kernel's positions see; without channels to sum, a sum of products."""
    x, w = hlo.convert(_padded(x, padding, lhs_dilation), dtype), hlo.convert(w, dtype)
    kernel, size, inner, outer = w.shape[2:], shape[2:], w.shape[1], w.shape[0] // groups
    if inner == 1:
        full = (shape[0], groups, outer, *size)
        taps = hlo.reshape(w, (groups, outer, math.prod(kernel)))
        y = hlo.constant(0, dtype, full)
        for k, seen in enumerate(_windows(x, kernel, size, strides, rhs_dilation)):
            tap = hlo.broadcast_in_dim(hlo.squeeze(hlo.slice_dim(taps, 2, k, k + 1), [2]), full, [1, 2])
            y = y + tap * hlo.broadcast_in_dim(seen, full, [0, 1, *range(3, len(full))])
        return hlo.reshape(y, shape)
    columns = _columns(_by_group(x, groups), kernel, size, strides, rhs_dilation)
    taps = hlo.reshape(w, (groups, outer, columns.shape[1]))
    y = hlo.dot_general(taps, columns, contract=((2,), (1,)), batch=((0,), (0,)), precision="HIGHEST")
    return hlo.move_dim(hlo.reshape(y, (groups * outer, shape[0], *size)), 1, 0)


def kernel_gradient(
    x: Value, y: Value, *, strides: Sequence[int], padding: Sequence[tuple[int, int]], rhs_dilation: Sequence[int],
    groups: int, kernel: Shape, dtype: torch.dtype,
) -> Value:  # fmt: skip
    """The products of the output's gradient ``y`` with what the kernel's positions see of ``x``."""
    x, y = hlo.convert(_padded(x, padding, [1] * len(kernel)), dtype), hlo.convert(y, dtype)
    size, (n, inner, outer) = y.shape[2:], (y.shape[0], x.shape[1] // groups, y.shape[1] // groups)
    columns = _columns(_by_group(x, groups), kernel, size, strides, rhs_dilation)
    y = hlo.reshape(_by_group(y, groups), (groups, outer, n * math.prod(size)))
    if inner == 1:
        full = (groups, outer, *columns.shape[1:])
        sums = total(hlo.broadcast_in_dim(y, full, [0, 1, 3]) * hlo.broadcast_in_dim(columns, full, [0, 2, 3]), [3])
    else:
        sums = hlo.dot_general(y, columns, contract=((2,), (2,)), batch=((0,), (0,)), precision="HIGHEST")
    return hlo.reshape(sums, (groups * outer, inner, *kernel))
