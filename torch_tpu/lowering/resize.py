"""Resizing (``upsample_*``, ``interpolate``) and sampling at run-time positions (``grid_sample``).

Every resize is separable: along each dimension an output element is a weighted sum of a few input elements, at
positions and with weights that the sizes alone decide. They are computed here in ATen's own arithmetic (float32 but
for float64 inputs, ``aten/src/ATen/native/UpSample.h``), so that no position falls on the other side of a rounding.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from torch_tpu.lowering import meta
from torch_tpu.lowering.common import compute_dtype
from torch_tpu.lowering.registry import lower
from torch_tpu.lowering.taps import Row, as_rows, resample, scatter_sum, transposed
from torch_tpu.stablehlo import Type, Value
from torch_tpu.stablehlo import ops as hlo

Float = Any  # np.float32 or np.float64

# ---- weights -------------------------------------------------------------------------------------------------------


def _step(size: int, out: int, align: bool, scale: float | None, real: Float) -> Any:
    """The distance between neighbouring outputs in input elements."""
    if align:
        return real(size - 1) / real(out - 1) if out > 1 else real(0)
    return real(1.0 / scale) if scale is not None and scale > 0 else real(size) / real(out)


def _source(step: Any, i: int, align: bool, real: Float) -> Any:
    return step * real(i) if align else step * (real(i) + real(0.5)) - real(0.5)


def nearest(size: int, out: int, align: bool, scale: float | None, real: Float) -> list[Row]:
    if out in (size, 2 * size):
        return [[(i * size // out, 1.0)] for i in range(out)]
    step = _step(size, out, False, scale, np.float32)
    return [[(min(int(np.floor(np.float32(i) * step)), size - 1), 1.0)] for i in range(out)]


def nearest_exact(size: int, out: int, align: bool, scale: float | None, real: Float) -> list[Row]:
    step = float(_step(size, out, False, scale, np.float32))
    return [[(min(int(np.floor(np.float32((i + 0.5) * step))), size - 1), 1.0)] for i in range(out)]


def linear(size: int, out: int, align: bool, scale: float | None, real: Float) -> list[Row]:
    if size == out:
        return [[(i, 1.0)] for i in range(out)]
    step, rows = _step(size, out, align, scale, real), []
    for i in range(out):
        at = max(_source(step, i, align, real), real(0))
        first = min(int(at), size - 1)
        weight = min(max(at - real(first), real(0)), real(1))
        rows.append([(first, float(real(1) - weight)), (min(first + 1, size - 1), float(weight))])
    return rows


def _cubic_near(x: Any, a: float) -> Any:
    return ((a + 2) * x - (a + 3)) * x * x + 1


def _cubic_far(x: Any, a: float) -> Any:
    return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a


def cubic(size: int, out: int, align: bool, scale: float | None, real: Float) -> list[Row]:
    """Keys 1981 with a = -0.75, border positions repeated."""
    step, rows, a = _step(size, out, align, scale, real), [], real(-0.75)
    for i in range(out):
        at = _source(step, i, align, real)
        first = min(math.floor(at), size - 1)
        t = min(max(at - real(first), real(0)), real(1))
        weights = (_cubic_far(t + 1, a), _cubic_near(t, a), _cubic_near(1 - t, a), _cubic_far(2 - t, a))
        rows.append([(min(max(first - 1 + j, 0), size - 1), float(w)) for j, w in enumerate(weights)])
    return rows


def _triangle(x: float) -> float:
    return max(0.0, 1.0 - abs(x))


def _keys(x: float) -> float:
    x = abs(x)
    return _cubic_near(x, -0.5) if x < 1 else _cubic_far(x, -0.5) if x < 2 else 0.0


def _lanczos(x: float) -> float:
    return float(np.sinc(x) * np.sinc(x / 3)) if abs(x) < 3 else 0.0


def antialiased(kernel: Callable[[float], float], support: float) -> Callable[..., list[Row]]:
    """Weights of a filter that widens with the step, so that shrinking averages; normalised to a sum of one.

    PyTorch measures from the middle of elements even with ``align_corners``.
    """

    def rows(size: int, out: int, align: bool, scale: float | None, real: Float) -> list[Row]:
        step, result = float(_step(size, out, align, scale, real)), []
        wide, narrow = max(step, 1.0) * support, min(1.0, 1.0 / step) if step else 1.0
        for i in range(out):
            center = step * (i + 0.5)
            first, last = max(int(center - wide + 0.5), 0), min(int(center + wide + 0.5), size)
            weights = [kernel((j - center + 0.5) * narrow) for j in range(first, last)]
            total = sum(weights) or 1.0
            result.append([(first + j, w / total) for j, w in enumerate(weights)])
        return result

    return rows


def _resample_bytes(x: Value, dim: int, rows: list[Row]) -> Value:
    """One dimension of an image of bytes in ATen's fixed point: 16-bit weights, each pass rounded to bytes."""
    largest = max((w for row in rows for _, w in row), default=0.0)
    if x.shape[dim] == len(rows) and all(row[0] == (i, 1.0) for i, row in enumerate(rows)):
        return x
    bits = next(b for b in range(22) if int(0.5 + largest * (1 << (b + 1))) >= 1 << 15)
    whole = [
        [(p, float(math.floor(abs(w) * (1 << bits) + 0.5)) * (1 if w >= 0 else -1)) for p, w in row] for row in rows
    ]
    total = resample(hlo.convert(x, torch.int32), dim, whole)
    rounded = hlo.shift_right_arithmetic(total + (1 << (bits - 1)), bits)
    return hlo.convert(hlo.clamp(0, rounded, 255), torch.uint8)


# ---- upsample_* ----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Resize:
    """One ``upsample`` operator: its weights, its spatial rank, whether its schema has ``align_corners``."""

    weights: Callable[..., list[Row]]
    rank: int
    aligns: bool

    def matrices(
        self, size: Sequence[int], out: Sequence[int], rest: Sequence[Any], dtype: torch.dtype
    ) -> list[list[Row]]:
        align, scales = (rest[0], rest[1:]) if self.aligns else (False, rest)
        real = np.float64 if dtype in (torch.float64, torch.uint8) else np.float32
        return [self.weights(n, o, align, s, real) for n, o, s in zip(size, out, scales, strict=True)]

    def forward(self, x: Value, out: Sequence[int], rest: Sequence[Any]) -> Value:
        matrices = self.matrices(x.shape[2:], out, rest, x.dtype)
        copies = self.weights in (nearest, nearest_exact)
        y = x if copies else hlo.convert(x, compute_dtype(x.dtype))
        for dim in reversed(range(self.rank)):
            if y.dtype == torch.uint8 and not copies:
                y = _resample_bytes(y, dim + 2, matrices[dim])
            else:
                y = resample(y, dim + 2, matrices[dim])
        return hlo.convert(y, x.dtype)

    def backward(self, grad: Value, size: Sequence[int], rest: Sequence[Any]) -> Value:
        y = hlo.convert(grad, compute_dtype(grad.dtype))
        for dim, rows in enumerate(self.matrices(size[2:], grad.shape[2:], rest, grad.dtype)):
            y = resample(y, dim + 2, transposed(rows, size[dim + 2]))
        return hlo.convert(y, grad.dtype)


RESIZES = {
    **{f"upsample_nearest{r}d": Resize(nearest, r, False) for r in (1, 2, 3)},
    **{f"_upsample_nearest_exact{r}d": Resize(nearest_exact, r, False) for r in (1, 2, 3)},
    "upsample_linear1d": Resize(linear, 1, True),
    "upsample_bilinear2d": Resize(linear, 2, True),
    "upsample_trilinear3d": Resize(linear, 3, True),
    "upsample_bicubic2d": Resize(cubic, 2, True),
    "_upsample_bilinear2d_aa": Resize(antialiased(_triangle, 1.0), 2, True),
    "_upsample_bicubic2d_aa": Resize(antialiased(_keys, 2.0), 2, True),
    "_upsample_lanczos2d_aa": Resize(antialiased(_lanczos, 3.0), 2, True),
}


def _register(name: str, resize: Resize) -> None:
    static = ("scales", "scales_d", "scales_h", "scales_w")

    @lower(name, static=static, meta=meta.without_rows(name))
    def forward(x: Value, size: Any, *rest: Any, result: list[Type]) -> Value:
        return resize.forward(x, result[0].shape[2:], rest)

    @lower(f"{name}.vec", static=static, meta=meta.without_rows(f"{name}.vec"))
    def forward_by_factors(x: Value, size: Any, *rest: Any, result: list[Type]) -> Value:
        factors = rest[-1] or [None] * resize.rank
        return resize.forward(x, result[0].shape[2:], [*rest[:-1], *factors])

    if hasattr(torch.ops.aten, f"{name}_backward"):

        @lower(f"{name}_backward", static=static)
        def backward(grad: Value, out_size: Any, size: Sequence[int], *rest: Any) -> Value:
            return resize.backward(grad, size, rest)


for _name, _resize in RESIZES.items():
    _register(_name, _resize)


# ---- grid_sample ---------------------------------------------------------------------------------------------------
BILINEAR, NEAREST, BICUBIC = range(3)
ZEROS, BORDER, REFLECTION = range(3)


@dataclass(frozen=True)
class Tap:
    """One input position along one dimension, ``[batch, points]``; ``slope`` is the weight's derivative by the grid."""

    index: Value
    inside: Value
    weight: Value
    slope: Value


def _reflect(x: Value, slope: Value, size: int, align: bool) -> tuple[Value, Value]:
    low, span = (0.0, size - 1.0) if align else (-0.5, float(size))
    if span <= 0:
        return hlo.full_like(x, 0), hlo.full_like(slope, 0)
    slope = hlo.select(hlo.compare(x, low, "LT"), hlo.negate(slope), slope)
    x = hlo.abs_(x - low)
    extra, flips = hlo.remainder(x, span), hlo.floor(hlo.divide(x, span))
    odd = hlo.compare(hlo.remainder(flips, 2.0), 0.0, "NE")
    return hlo.select(odd, (span + low) - extra, extra + low), hlo.select(odd, hlo.negate(slope), slope)


def _inside_input(x: Value, slope: Value, size: int, padding: int, align: bool) -> tuple[Value, Value]:
    """A coordinate and its derivative after the padding mode; outside for ZEROS stays outside."""
    if padding == ZEROS:
        return x, slope
    if padding == REFLECTION:
        x, slope = _reflect(x, slope, size, align)
    free = hlo.and_(hlo.compare(x, 0.0, "GT"), hlo.compare(x, size - 1.0, "LT"))
    return hlo.minimum(hlo.maximum(x, 0.0), size - 1.0), hlo.select(free, slope, 0.0)


def _tap(at: Value, weight: Value, slope: Value, size: int) -> Tap:
    inside = hlo.and_(hlo.compare(at, 0.0, "GE"), hlo.compare(at, size - 1.0, "LE"))
    return Tap(hlo.convert(hlo.select(inside, at, 0.0), torch.int32), inside, weight, slope)


def _taps(coordinate: Value, size: int, mode: int, padding: int, align: bool) -> list[Tap]:
    """The positions along one dimension that a normalised coordinate reads (``aten/src/ATen/native/GridSampler.h``)."""
    factor = (size - 1) / 2 if align else size / 2
    x = (coordinate + 1.0) * factor - (0.0 if align else 0.5)
    slope, one, zero = hlo.full_like(x, factor), hlo.full_like(x, 1), hlo.full_like(x, 0)
    if mode != BICUBIC:
        x, slope = _inside_input(x, slope, size, padding, align)
    if mode == NEAREST:
        return [_tap(hlo.round_nearest_even(x), one, zero, size)]
    low = hlo.floor(x)
    t = x - low
    if mode == BILINEAR:
        return [_tap(low, one - t, hlo.negate(slope), size), _tap(low + 1.0, t, slope, size)]
    a = -0.75
    far = lambda v: ((v * a - 5 * a) * v + 8 * a) * v - 4 * a  # noqa: E731
    near = lambda v: (v * (a + 2) - (a + 3)) * v * v + 1.0  # noqa: E731
    far_slope = lambda v: (v * (3 * a) - 10 * a) * v + 8 * a  # noqa: E731
    near_slope = lambda v: (v * (3 * (a + 2)) - 2 * (a + 3)) * v  # noqa: E731
    weights = [far(t + 1.0), near(t), near(one - t), far(2.0 - t)]
    slopes = [far_slope(t + 1.0), near_slope(t), hlo.negate(near_slope(one - t)), hlo.negate(far_slope(2.0 - t))]
    places = [_inside_input(low + float(j - 1), slope, size, padding, align)[0] for j in range(4)]
    return [_tap(p, w, s * slope, size) for p, w, s in zip(places, weights, slopes, strict=True)]


def _grid_taps(x: Value, grid: Value, mode: int, padding: int, align: bool) -> list[list[Tap]]:
    """Taps per spatial dimension of ``x``; the grid's last dimension lists them innermost first."""
    rank, batch = x.ndim - 2, grid.shape[0]
    points = math.prod(grid.shape[1:-1])
    flat = hlo.reshape(hlo.convert(grid, compute_dtype(grid.dtype)), (batch, points, rank))
    columns = [hlo.reshape(hlo.slice_dim(flat, 2, rank - 1 - i, rank - i), (batch, points)) for i in range(rank)]
    return [_taps(c, n, mode, padding, align) for c, n in zip(columns, x.shape[2:], strict=True)]


def _corners(x: Value, taps: list[list[Tap]]) -> list[tuple[tuple[Tap, ...], Value, Value]]:
    """Every combination of one tap per dimension: (taps, flat position, whether inside), ``[batch, points]``."""
    corners = []
    for corner in itertools.product(*taps):
        position, inside = corner[0].index, corner[0].inside
        for tap, size in zip(corner[1:], x.shape[3:], strict=True):
            position, inside = position * size + tap.index, hlo.and_(inside, tap.inside)
        corners.append((corner, position, inside))
    return corners


def _product(values: Sequence[Value]) -> Value:
    total = values[0]
    for v in values[1:]:
        total = total * v
    return total


def _pick(x: Value, position: Value, inside: Value) -> Value:
    """``x[n, :, position[n, i]]`` as ``[batch, channels, points]``, zero outside."""
    batch, channels = x.shape[:2]
    points = position.shape[1]
    flat = hlo.reshape(x, (batch, channels, math.prod(x.shape[2:])))
    picked = hlo.gather(
        flat, hlo.reshape(position, (batch, points, 1)), offset_dims=[1], collapsed_dims=[2], index_map=[2],
        slice_sizes=[1, channels, 1], operand_batching_dims=[0], indices_batching_dims=[0],
    )  # fmt: skip
    return hlo.select(_per_channel(inside, channels), picked, 0)


def _per_channel(v: Value, channels: int) -> Value:
    return hlo.broadcast_in_dim(v, (v.shape[0], channels, v.shape[1]), [0, 2])


@lower("grid_sampler_2d", "grid_sampler_3d")
def grid_sampler(x: Value, grid: Value, mode: int, padding: int, align: bool, *, result: list[Type]) -> Value:
    wide = hlo.convert(x, compute_dtype(x.dtype))
    if 0 in result[0].shape:
        return hlo.constant(0, x.dtype, result[0].shape)
    total, channels = None, x.shape[1]
    for corner, position, inside in _corners(x, _grid_taps(x, grid, mode, padding, align)):
        part = _pick(wide, position, inside) * _per_channel(_product([t.weight for t in corner]), channels)
        total = part if total is None else total + part
    assert total is not None
    return hlo.convert(hlo.reshape(total, result[0].shape), x.dtype)


@lower("grid_sampler_2d_backward", "grid_sampler_3d_backward")
def grid_sampler_backward(
    grad: Value, x: Value, grid: Value, mode: int, padding: int, align: bool, mask: list[bool]
) -> list[Value | None]:
    if 0 in grad.shape:
        return [hlo.full_like(x, 0) if mask[0] else None, hlo.full_like(grid, 0)]
    batch, channels, rank = *x.shape[:2], x.ndim - 2
    wide, incoming = (hlo.convert(v, compute_dtype(x.dtype)) for v in (x, grad))
    incoming = hlo.reshape(incoming, (batch, channels, math.prod(grad.shape[2:])))
    slopes: list[Value] = [hlo.constant(0, wide.dtype, (batch, incoming.shape[2]))] * rank
    spread, positions = [], []
    for corner, position, inside in _corners(x, _grid_taps(x, grid, mode, padding, align)):
        if mask[0]:
            share = incoming * _per_channel(_product([t.weight for t in corner]), channels)
            spread.append(hlo.select(_per_channel(inside, channels), share, 0))
            positions.append(_per_channel(position, channels))
        dot = hlo.reduce_one(incoming * _pick(wide, position, inside), 0, [1], hlo.add)
        for d in range(rank if mode != NEAREST else 0):
            slopes[d] = slopes[d] + dot * _product([t.slope if i == d else t.weight for i, t in enumerate(corner)])
    grad_grid = hlo.concatenate([hlo.expand_dims(s, [-1]) for s in reversed(slopes)], 2)
    grad_grid = hlo.convert(hlo.reshape(grad_grid, grid.shape), grid.dtype)
    if not mask[0]:
        return [None, grad_grid]
    values, at = (as_rows(hlo.concatenate(v, 2), 1) for v in (spread, positions))
    grad_x = hlo.reshape(scatter_sum(values, at, math.prod(x.shape[2:])), x.shape)
    return [hlo.convert(grad_x, x.dtype), grad_grid]
