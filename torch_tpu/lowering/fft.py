"""Discrete Fourier transforms over any dimensions, from StableHLO ``fft`` over trailing ones."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch_tpu.lowering import meta
from torch_tpu.lowering.registry import lower
from torch_tpu.stablehlo import Type, Value
from torch_tpu.stablehlo import ops as hlo

#: XLA transforms at most this many dimensions at a time.
MOST_DIMS = 3


def _factor(normalization: int, sizes: Sequence[int]) -> float:
    """ATen's ``fft_norm_mode``: none, by the square root of the number of points, by the number of points."""
    n = math.prod(sizes)
    return (1.0, 1 / math.sqrt(n), 1 / n)[normalization]


def _scaled(x: Value, factor: float) -> Value:
    return x if factor == 1 else x * factor


def _order(rank: int, dims: Sequence[int]) -> list[int]:
    """A permutation that puts ``dims`` last."""
    return [i for i in range(rank) if i not in dims] + list(dims)


def _inverse(order: Sequence[int]) -> list[int]:
    return [list(order).index(i) for i in range(len(order))]


def _complex(x: Value, dims: Sequence[int], forward: bool) -> Value:
    """Unnormalised transform over ``dims``, a few at a time."""
    dims = [d % x.ndim for d in dims]
    while dims:
        group, dims = dims[-MOST_DIMS:], dims[:-MOST_DIMS]
        order = _order(x.ndim, group)
        moved = hlo.transpose(x, order)
        sizes = moved.shape[-len(group) :]
        moved = hlo.fft(moved, "FFT" if forward else "IFFT", sizes, moved.type)
        if not forward:  # XLA's inverse divides by the number of points
            moved = moved * float(math.prod(sizes))
        x = hlo.transpose(moved, _inverse(order))
    return x


@lower("_fft_c2c.out", meta=meta.contiguous("_fft_c2c"))
@lower("_fft_c2c")
def c2c(x: Value, dims: list[int], normalization: int, forward: bool) -> Value:
    if 0 in x.shape:
        return x
    return _scaled(_complex(x, dims, forward), _factor(normalization, [x.shape[d] for d in dims]))


@lower("_fft_r2c.out", meta=meta.contiguous("_fft_r2c"))
@lower("_fft_r2c")
def r2c(x: Value, dims: list[int], normalization: int, onesided: bool, *, result: list[Type]) -> Value:
    """The last of ``dims`` from real numbers, the others after it; without ``onesided`` the mirrored half as well."""
    dims = [d % x.ndim for d in dims]
    factor, last = _factor(normalization, [x.shape[d] for d in dims]), dims[-1]
    if not onesided:
        y = _complex(hlo.convert(x, result[0].dtype), dims, True)
        return _scaled(y, factor)
    order = _order(x.ndim, [last])
    moved = hlo.transpose(x, order)
    n = moved.shape[-1]
    y = hlo.fft(moved, "RFFT", [n], Type((*moved.shape[:-1], n // 2 + 1), result[0].dtype))
    return _scaled(_complex(hlo.transpose(y, _inverse(order)), dims[:-1], True), factor)


@lower("_fft_c2r.out", meta=meta.contiguous("_fft_c2r"))
@lower("_fft_c2r")
def c2r(x: Value, dims: list[int], normalization: int, size: int, *, result: list[Type]) -> Value:
    """The inverse of :func:`r2c`, unnormalised but for ``normalization``; ``size`` is the last dimension's."""
    dims = [d % x.ndim for d in dims]
    factor = _factor(normalization, [result[0].shape[d] for d in dims])
    y, last = _complex(x, dims[:-1], False), dims[-1]
    order = _order(x.ndim, [last])
    moved = hlo.transpose(y, order)
    half = size // 2 + 1
    if moved.shape[-1] < half:
        moved = hlo.pad(moved, 0, [0] * moved.ndim, [*[0] * (moved.ndim - 1), half - moved.shape[-1]])
    moved = hlo.slice_dim(moved, moved.ndim - 1, 0, half)
    y = hlo.fft(moved, "IRFFT", [size], Type((*moved.shape[:-1], size), result[0].dtype))
    return _scaled(hlo.transpose(y, _inverse(order)), factor * size)
