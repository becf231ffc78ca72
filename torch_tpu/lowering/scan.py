"""Scans along one dimension: running sums, products, extrema.

A scan is one ``reduce_window`` whose window reaches from the first element to the current one. XLA makes a tree of
short windows of it on every platform (ReduceWindowRewriter), so the work is linear in the size. The TPU's compiler
knows what a window of sums, products or extrema costs; any other function in a window that it fuses with a conversion
ends its process ("Reduction Function not modeled", libtpu 0.0.52). There such a scan is written in steps.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from torch_tpu.lowering.common import Number, compute_dtype, for_cpu, highest, lowest
from torch_tpu.lowering.reduction import is_nan
from torch_tpu.lowering.registry import lower
from torch_tpu.stablehlo import Type, Value
from torch_tpu.stablehlo import ops as hlo

Combine = Callable[[Value, Value], Value]


def scan(x: Value, dim: int, init: Number, combine: Combine) -> Value:
    """``y[i] = combine(x[0], ..., x[i])`` along ``dim`` for an associative ``combine`` with identity ``init``."""
    if x.ndim == 0 or x.numel == 0:
        return x
    dim %= x.ndim
    window, padding = [1] * x.ndim, [(0, 0)] * x.ndim
    window[dim], padding[dim] = x.shape[dim], (x.shape[dim] - 1, 0)
    return hlo.reduce_window([x], [init], lambda a, b: [combine(a[0], b[0])], window=window, padding=padding)[0]


def _stepwise(x: Value, dim: int, init: Number, combine: Combine) -> Value:
    """:func:`scan` in steps that double how far each element has seen, for functions that a TPU has no window for.

    Not of complex numbers: their whole turns depend on the order, and nothing is converted to or from them.
    """
    if x.ndim == 0 or x.numel == 0 or x.dtype.is_complex or for_cpu():
        return scan(x, dim, init, combine)
    dim %= x.ndim
    n, step = x.shape[dim], 1
    while step < n:
        room = [step if d == dim else 0 for d in range(x.ndim)]
        x = combine(hlo.pad(hlo.slice_dim(x, dim, 0, n - step), init, room, [0] * x.ndim), x)
        step *= 2
    return x


def _log_add(a: Value, b: Value) -> Value:
    """``log(exp(a) + exp(b))``, right at both infinities."""
    if a.dtype.is_complex:  # the larger term keeps its phase, whole turns included
        first = hlo.real(a) >= hlo.real(b)
        top, low = hlo.select(first, a, b), hlo.select(first, b, a)
        return top + hlo.log_plus_one(hlo.exponential(low - top))
    top, low = hlo.maximum(a, b), hlo.minimum(a, b)
    same_infinity = hlo.compare(a, b, "EQ") & ~hlo.is_finite(a)
    return hlo.select(same_infinity, a, top + hlo.log_plus_one(hlo.exponential(low - top)))


def _register(name: str, init: int | float, combine: Combine, scan: Callable[..., Value] = scan) -> None:
    @lower(name)
    def rule(x: Value, dim: int, *, result: list[Type]) -> Value:
        dtype = result[0].dtype
        return hlo.convert(scan(hlo.convert(x, compute_dtype(dtype)), dim, init, combine), dtype)


_register("cumsum", 0, hlo.add)
_register("cumprod", 1, hlo.multiply)
_register("logcumsumexp", float("-inf"), _log_add, _stepwise)
_register("_logcumsumexp", float("-inf"), _log_add, _stepwise)


def _running_extreme(x: Value, dim: int, init: Number, combine: Combine) -> list[Value]:
    """Running extreme and the *last* position that holds it, as PyTorch counts ties; NaN stays once met.

    Values and positions are two scans: XLA's rewriter refuses a window over operands of different dtypes.
    """
    values = scan(x, dim, init, combine)
    if x.ndim == 0:
        return [values, hlo.constant(0, torch.int64)]
    here = hlo.compare(x, values, "EQ")
    if x.dtype.is_floating_point:
        here = here | is_nan(x)
    positions = hlo.select(here, hlo.iota(x.shape, dim % x.ndim, torch.int32), -1)
    return [values, hlo.convert(scan(positions, dim, -1, hlo.maximum), torch.int64)]


@lower("cummax")
def cummax(x: Value, dim: int) -> list[Value]:
    return _running_extreme(x, dim, lowest(x.dtype), hlo.maximum)


@lower("cummin")
def cummin(x: Value, dim: int) -> list[Value]:
    return _running_extreme(x, dim, highest(x.dtype), hlo.minimum)
