"""What several families share. Anything used by one family only belongs in its file."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch

from torch_tpu.stablehlo import Value
from torch_tpu.stablehlo import ops as hlo
from torch_tpu.tracing.tracer import ScalarOperand, tracer

Number = bool | int | float | complex
Scalar = Number | ScalarOperand | Value

#: The dtype in which PyTorch accumulates and computes transcendental functions, by storage dtype.
_COMPUTE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 for the half types, else the dtype itself (ATen's ``opmath_type``)."""
    return _COMPUTE.get(dtype, dtype)


def for_cpu() -> bool:
    """Whether XLA's CPU backend will compile the trace: it has fast kernels for other forms than a TPU."""
    return tracer().emulate_precision


def row_major(x: Value) -> Value:
    """``x``, which XLA may not lay out in another order, as it does to make the transpose of a result free."""
    order = f"[dense<[{', '.join(map(str, reversed(range(x.ndim))))}]> : tensor<{x.ndim}xindex>]"
    attributes = f'backend_config = "", operand_layouts = {order}, result_layouts = {order}'
    return hlo.custom_call("LayoutConstraint", [x], [x.type], attributes)[0]


def unmerged(x: Value) -> Value:
    """The rows of a matrix in the dimensions that they had before a reshape made them one; else ``x``.

    XLA lays such dimensions out as their neighbours want them. To merge two that are apart in memory costs a copy.
    """
    source = x.reshape_of
    if source is None or x.ndim != 2 or for_cpu() or not x.numel:
        return x
    lead = next((k for k in range(2, source.ndim) if math.prod(source.shape[:k]) == x.shape[0]), 0)
    return hlo.reshape(source, (*source.shape[:lead], x.shape[1])) if lead else x


def as_value(x: Scalar, dtype: torch.dtype, shape: Sequence[int] = ()) -> Value:
    """A number, run-time scalar or value as ``dtype``, broadcast to ``shape``."""
    if isinstance(x, ScalarOperand):
        x = x.to(dtype)
    if isinstance(x, Value):
        return hlo.broadcast_to(hlo.convert(x, dtype), shape)
    return hlo.constant(x, dtype, tuple(shape))


def by_number(n: Value, cases: Mapping[Number, Callable[[], Value]], otherwise: Callable[[], Value]) -> Value:
    """What the case of the run-time number ``n``, 0-d, gives; the others are not computed."""
    branches = [otherwise, *cases.values()]
    index = hlo.constant(0, torch.int32)
    for i, number in enumerate(cases):
        index = hlo.select(hlo.compare(n, number, "EQ"), i + 1, index)
    if len(branches) == 2:  # XLA's simplifier would compute both
        branches.append(otherwise)
    return hlo.case(index, branches)


def magnitude(x: Value) -> Value:
    """``|x|``. XLA's of complex64 is off by a digit, and differently in every program; on CPU it is rounded once.

    The backward passes of maximum norms look for the elements whose magnitude is the norm: one that misses it by a
    rounding gets no gradient.
    """
    if x.dtype != torch.complex64 or not for_cpu():
        return hlo.abs_(x)
    re, im = (hlo.convert(v, torch.float64) for v in (hlo.real(x), hlo.imag(x)))
    size = hlo.convert(hlo.sqrt(re * re + im * im), torch.float32)
    either = [hlo.compare(hlo.abs_(v), float("inf"), "EQ") for v in (hlo.real(x), hlo.imag(x))]
    return hlo.select(hlo.or_(*either), hlo.full_like(size, float("inf")), size)  # whatever the other part is


def canonical_dims(dims: int | Sequence[int] | None, rank: int) -> tuple[int, ...]:
    """Sorted non-negative dimensions; None or empty means all."""
    if dims is None:
        return tuple(range(rank))
    if isinstance(dims, int):
        dims = [dims]
    if not dims:
        return tuple(range(rank))
    return tuple(sorted({d % max(rank, 1) for d in dims})) if rank else ()


def lowest(dtype: torch.dtype) -> Number:
    """The smallest value: -inf for floats."""
    if dtype.is_floating_point:
        return float("-inf")
    return False if dtype == torch.bool else torch.iinfo(dtype).min


def highest(dtype: torch.dtype) -> Number:
    """The largest value: inf for floats."""
    if dtype.is_floating_point:
        return float("inf")
    return True if dtype == torch.bool else torch.iinfo(dtype).max


__all__ = [
    "Number",
    "Scalar",
    "ScalarOperand",
    "as_value",
    "by_number",
    "canonical_dims",
    "compute_dtype",
    "highest",
    "lowest",
    "magnitude",
    "tracer",
    "unmerged",
]
