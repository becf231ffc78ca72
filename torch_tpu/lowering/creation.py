"""Tensors made from numbers: fills, ranges, identity. Shapes are static; fill values and endpoints are not."""

from __future__ import annotations

import torch

from torch_tpu.lowering import special
from torch_tpu.lowering.common import Scalar, as_value, compute_dtype
from torch_tpu.lowering.indexing import prefix_sum, run_of
from torch_tpu.lowering.registry import lower, registered
from torch_tpu.stablehlo import Shape, Type, Value
from torch_tpu.stablehlo import ops as hlo

assert special  # the family of the Bessel function below


# ---- fills ----------------------------------------------------------------------------------------------------------
@lower("full", "full.out", "full_like", "full_like.out", "new_full", "new_full.out")
def full(*args: object, result: list[Type]) -> Value:
    """The last positional argument everywhere."""
    return as_value(args[-1], result[0].dtype, result[0].shape)  # type: ignore[arg-type]


@lower("scalar_tensor", "scalar_tensor.out")
def scalar_tensor(value: Scalar, *, result: list[Type]) -> Value:
    return as_value(value, result[0].dtype)


def _register_constant(word: str, number: int) -> None:
    names = [word, f"{word}_like", f"new_{word}"]

    @lower(*names, *(f"{name}.out" for name in names))
    def constant(*args: object, result: list[Type]) -> Value:
        return hlo.constant(number, result[0].dtype, result[0].shape)


_register_constant("zeros", 0)
_register_constant("ones", 1)


# ---- ranges ---------------------------------------------------------------------------------------------------------
def _counted(start: float, step: float, count: int, dtype: torch.dtype) -> Value:
    """``start + i * step``: exact in integers; floats are computed in float64 and rounded once, as on the CPU."""
    integral = all(float(v).is_integer() for v in (start, step))
    last = start + (count - 1) * step
    if integral and max(abs(start), abs(last)) < 2**31:
        values = hlo.iota((count,), 0, torch.int32) * int(step) + int(start)
        return hlo.convert(values, dtype)
    compute = torch.float64 if dtype.is_floating_point else torch.int64
    if compute == torch.int64:
        start, step = int(start), int(step)
    return hlo.convert(hlo.iota((count,), 0, compute) * step + start, dtype)


@lower(
    "arange", "arange.start", "arange.start_step", "arange.out", "arange.start_out", "range", "range.step", "range.out",
    "range.out_", static=("start", "end", "step"),
)  # fmt: skip
def arange(*bounds: float, result: list[Type]) -> Value:
    """``arange(end)``, ``arange(start, end)``, ``arange(start, end, step)``; PyTorch has worked out the length."""
    start, step = (bounds[0] if len(bounds) > 1 else 0), (bounds[2] if len(bounds) > 2 else 1)
    (count,) = result[0].shape
    return _counted(start, step, count, result[0].dtype) if count else hlo.constant(0, result[0].dtype, (0,))


_library = torch.library.Library("tpu", "FRAGMENT")
_library.define("counted_(Tensor(a!) self, Scalar start, Scalar step, bool short) -> Tensor(a!)")
_library.impl("counted_", lambda x, start, step, short: x, "Meta")


@lower("tpu::counted_")
def counted(x: Value, start: Scalar, step: Scalar, short: bool) -> Value:
    """``start + i * step`` for the ``i``-th element; ``short`` says that all of them are integers of 32 bits."""
    floating = x.dtype.is_floating_point
    compute = torch.int32 if short else torch.float64 if floating else torch.int64
    shape = (x.numel,)
    i = hlo.iota(shape, 0, compute)
    values = i * as_value(step, compute, shape) + as_value(start, compute, shape)
    return hlo.reshape(hlo.convert(values, x.dtype), x.shape)


def arange_out(start: float, end: float, step: float = 1, *, out: torch.Tensor) -> torch.Tensor:
    """``arange`` outside of a trace: its length is PyTorch's to work out, its numbers are operands of the program."""
    shape = torch.arange(start, end, step, out=torch.empty_like(out, device="meta")).shape
    if shape != out.shape:
        out.resize_(shape)
    if not out.dtype.is_floating_point:
        start, step = int(start), int(step)
    reach = max(abs(start), abs(start + max(out.numel() - 1, 0) * step), abs(step))
    short = float(start).is_integer() and float(step).is_integer() and reach < 2**31
    return torch.ops.tpu.counted_(out, start, step, short)


def arange_end_out(end: float, *, out: torch.Tensor) -> torch.Tensor:
    return arange_out(0, end, out=out)


_ENDPOINTS = ("", ".Tensor_Tensor", ".Tensor_Scalar", ".Scalar_Tensor")
_ENDPOINTS_OUT = (".out", ".Tensor_Tensor_out", ".Tensor_Scalar_out", ".Scalar_Tensor_out")


def _spaced(start: Scalar, end: Scalar, steps: int, dtype: torch.dtype) -> Value:
    """``steps`` numbers from ``start`` to ``end``, counted from the nearer end so that both are met exactly.

    Endpoints are of ``dtype`` first; integers are spaced in float64 and truncated.
    """
    inner = torch.float64 if not (dtype.is_floating_point or dtype.is_complex) else compute_dtype(dtype)
    first, last = (hlo.convert(as_value(v, dtype), inner) for v in (start, end))
    if steps == 1:
        return hlo.reshape(first, (1,))
    # XLA multiplies by the reciprocal of a constant it can see, and 98 / 49 would fall short of 2.
    intervals = hlo.optimization_barrier(hlo.constant(steps - 1, inner))[0]
    step = hlo.divide(last - first, intervals)
    shape = (steps,)
    i = hlo.iota(shape, 0, torch.int32)
    first, last, step = (hlo.broadcast_to(v, shape) for v in (first, last, step))
    ahead, behind = hlo.convert(i, inner), hlo.convert(steps - 1 - i, inner)
    return hlo.select(i < steps // 2, first + step * ahead, last - step * behind)


@lower(*(f"linspace{o}" for o in (*_ENDPOINTS, *_ENDPOINTS_OUT)))
def linspace(start: Scalar, end: Scalar, steps: int, *, result: list[Type]) -> Value:
    dtype = result[0].dtype
    return hlo.convert(_spaced(start, end, steps, dtype), dtype) if steps else hlo.constant(0, dtype, (0,))


@lower(*(f"logspace{o}" for o in (*_ENDPOINTS, *_ENDPOINTS_OUT)), static=("base",))
def logspace(start: Scalar, end: Scalar, steps: int, base: float = 10.0, *, result: list[Type]) -> Value:
    dtype = result[0].dtype
    if steps == 0:
        return hlo.constant(0, dtype, (0,))
    exponents = _spaced(start, end, steps, dtype)
    return hlo.convert(hlo.power(hlo.full_like(exponents, base), exponents), dtype)


# ---- matrices -------------------------------------------------------------------------------------------------------
@lower("eye", "eye.m", "eye.out", "eye.m_out")
def eye(*sizes: int, result: list[Type]) -> Value:
    shape: Shape = result[0].shape
    same = hlo.compare(hlo.iota(shape, 0, torch.int32), hlo.iota(shape, 1, torch.int32), "EQ")
    return hlo.convert(same, result[0].dtype)


def _triangle(starts: Value, lengths: Value, total: int, dtype: torch.dtype) -> Value:
    """Row and column of every element, when row ``r`` holds ``lengths[r]`` of them from column ``starts[r]`` on."""
    if total == 0:
        return hlo.constant(0, dtype, (2, 0))
    row = run_of(lengths, total)
    index = hlo.reshape(row, (total, 1))
    before = hlo.pad(prefix_sum(lengths), 0, [1], [-1])
    shift = hlo.gather(
        starts - before, index, offset_dims=[], collapsed_dims=[0], index_map=[0], slice_sizes=[1], sorted_indices=True
    )
    column = hlo.iota((total,), 0, torch.int32) + shift
    return hlo.convert(hlo.concatenate([hlo.reshape(v, (1, total)) for v in (row, column)], 0), dtype)


@lower("tril_indices")
def tril_indices(rows: int, columns: int, offset: int = 0, *, result: list[Type]) -> Value:
    (_, total), dtype = result[0]
    r = hlo.iota((rows,), 0, torch.int32)
    return _triangle(hlo.full_like(r, 0), hlo.clamp(0, r + (offset + 1), columns), total, dtype)


@lower("triu_indices")
def triu_indices(rows: int, columns: int, offset: int = 0, *, result: list[Type]) -> Value:
    (_, total), dtype = result[0]
    starts = hlo.clamp(0, hlo.iota((rows,), 0, torch.int32) + offset, columns)
    return _triangle(starts, columns - starts, total, dtype)


# ---- windows --------------------------------------------------------------------------------------------------------
@lower("kaiser_window", "kaiser_window.periodic", "kaiser_window.beta")
def kaiser_window(length: int, periodic: bool = True, beta: Scalar = 12.0, *, result: list[Type]) -> Value:
    """``I0(beta sqrt(1 - r^2)) / I0(beta)`` for ``r`` from -1 to 1 (the other windows decompose)."""
    dtype, inner = result[0].dtype, compute_dtype(result[0].dtype)
    if length < 2:
        return hlo.constant(1, dtype, (length,))
    half = (length - 1 + int(periodic)) / 2
    r = (hlo.iota((length,), 0, inner) - half) * (1 / half)
    bessel = registered("i0").function
    beta = as_value(beta, inner, (length,))
    window = hlo.divide(bessel(beta * hlo.sqrt(hlo.maximum(1 - r * r, 0))), bessel(beta))
    return hlo.convert(window, dtype)
