"""Discrete Fourier transforms over any dimensions, from StableHLO ``fft`` over trailing ones.

A TPU's compiler has ``fft`` of complex64 only. There transforms of complex128 are written out as products with matrices
of roots of unity, split at the factors of the length (Cooley and Tukey); a large prime factor becomes a convolution, of
a length that is a power of two (Bluestein).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_tpu.lowering import meta
from torch_tpu.lowering.common import for_cpu
from torch_tpu.lowering.precision import product
from torch_tpu.lowering.registry import lower
from torch_tpu.stablehlo import Type, Value
from torch_tpu.stablehlo import ops as hlo

#: XLA transforms at most this many dimensions at a time.
MOST_DIMS = 3
#: The longest transform that is written out as one product.
_DIRECT = 64
#: So many roots stand in the program; more are computed, which a TPU's compiler takes a second or two for.
_LISTED = 4096


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


def _written_out(dtype: torch.dtype) -> bool:
    """Whether the compiler has no ``fft`` of a dtype."""
    return dtype in (torch.complex128, torch.float64) and not for_cpu()


def _roots(shape: Sequence[int], exponent: Callable[..., Any], n: int, sign: int) -> Value:
    """``exp(sign 2 pi i k / n)``, where an integer function of the indices, exact for all of them, gives ``k``."""
    turn = sign * 2 * math.pi / n
    if math.prod(shape) <= _LISTED:
        angles = [exponent(*at) % n * turn for at in itertools.product(*map(range, shape))]
        parts = [hlo.constant_list([f(a) for a in angles], torch.float64) for f in (math.cos, math.sin)]
        return hlo.reshape(hlo.complex_(*parts), shape)
    k = exponent(*(hlo.iota(tuple(shape), d, torch.int64) for d in range(len(shape))))
    angle = hlo.convert(hlo.remainder(k, n), torch.float64) * turn
    return hlo.complex_(hlo.cosine(angle), hlo.sine(angle))


def _table(rows: int, columns: int, n: int, sign: int) -> Value:
    return _roots((rows, columns), lambda j, k: j * k, n, sign)


def _row(x: Value, sign: int) -> Value:
    """The unnormalised transform of complex128 over the last dimension."""
    n = x.shape[-1]
    if n <= _DIRECT:
        return product(x, _table(n, n, n, sign), contract=([x.ndim - 1], [0]))
    a = next((f for f in range(_DIRECT, 1, -1) if n % f == 0), 0)
    if a == 0:
        return _chirp(x, sign)
    # The input's index is j b + l, the output's k + a m: transform over j, turn, transform over l.
    b, outer, last = n // a, x.shape[:-1], x.ndim - 1
    y = hlo.move_dim(_row(hlo.move_dim(hlo.reshape(x, (*outer, a, b)), last, last + 1), sign), last + 1, last)
    y = _row(y * hlo.broadcast_to(_table(a, b, n, sign), y.shape), sign)
    return hlo.reshape(hlo.move_dim(y, last, last + 1), x.shape)


def _chirp(x: Value, sign: int) -> Value:
    """:func:`_row` by way of ``2 j k = j^2 + k^2 - (k - j)^2``, which makes it a convolution."""
    n = x.shape[-1]
    size = 1 << (2 * n - 2).bit_length()
    turn, back = (_roots((n,), lambda k: k * k, 2 * n, s) for s in (sign, -sign))
    zeros = [0] * (x.ndim - 1)
    kernel = hlo.concatenate(
        [back, hlo.constant(0, back.dtype, (size - 2 * n + 1,)), hlo.reverse(hlo.slice_dim(back, 0, 1, n), [0])], 0
    )
    y = _row(hlo.pad(x * hlo.broadcast_to(turn, x.shape), 0, [*zeros, 0], [*zeros, size - n]), 1)
    y = _row(y * hlo.broadcast_to(_row(kernel, 1), y.shape), -1)
    return hlo.slice_dim(y, x.ndim - 1, 0, n) * hlo.broadcast_to(turn, x.shape) / size


def _fft(x: Value, kind: str, sizes: Sequence[int], result: Type) -> Value:
    """StableHLO's ``fft`` on every platform."""
    if not _written_out(x.dtype):
        return hlo.fft(x, kind, sizes, result)
    sign = 1 if kind in ("IFFT", "IRFFT") else -1
    if kind == "IRFFT":  # the other half is the mirrored conjugate, and the ends are real
        n, last = sizes[0], x.ndim - 1
        real, imaginary = hlo.real(x), hlo.imag(x)
        more = (n - 1) // 2
        tail = [hlo.reverse(hlo.slice_dim(v, last, 1, 1 + more), [last]) for v in (real, -imaginary)]
        whole = hlo.complex_(
            hlo.concatenate([real, tail[0]], last), hlo.concatenate([_without_ends(imaginary, n), tail[1]], last)
        )
        return hlo.real(_row(whole, sign)) / n
    x = hlo.convert(x, torch.complex128)
    for d in range(x.ndim - len(sizes), x.ndim):
        x = hlo.move_dim(_row(hlo.move_dim(x, d, x.ndim - 1), sign), x.ndim - 1, d)
    if kind == "RFFT":
        return hlo.slice_dim(x, x.ndim - 1, 0, result.shape[-1])
    return x / math.prod(sizes) if kind == "IFFT" else x


def _without_ends(x: Value, n: int) -> Value:
    """Zeros for the frequencies 0 and n / 2 of half a spectrum, in the last dimension."""
    k = hlo.iota(x.shape, x.ndim - 1, torch.int32)
    ends = hlo.compare(hlo.remainder(k * 2, n), 0, "EQ")
    return hlo.select(ends, 0.0, x)


def _complex(x: Value, dims: Sequence[int], forward: bool) -> Value:
    """Unnormalised transform over ``dims``, a few at a time."""
    dims = [d % x.ndim for d in dims]
    while dims:
        group, dims = dims[-MOST_DIMS:], dims[:-MOST_DIMS]
        order = _order(x.ndim, group)
        moved = hlo.transpose(x, order)
        sizes = moved.shape[-len(group) :]
        moved = _fft(moved, "FFT" if forward else "IFFT", sizes, moved.type)
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
    y = _fft(moved, "RFFT", [n], Type((*moved.shape[:-1], n // 2 + 1), result[0].dtype))
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
    y = _fft(moved, "IRFFT", [size], Type((*moved.shape[:-1], size), result[0].dtype))
    return _scaled(hlo.transpose(y, _inverse(order)), factor * size)
