"""Softmax, log-softmax and what their backward passes call; half types are computed in float32."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from torch_tpu.lowering.common import compute_dtype
from torch_tpu.lowering.reduction import largest, spread, total, total_of_stored
from torch_tpu.lowering.registry import lower
from torch_tpu.stablehlo import Type, Value
from torch_tpu.stablehlo import ops as hlo


def _axis(x: Value, dim: int) -> list[int]:
    return [dim % x.ndim] if x.ndim else []


def softmax_of(x: Value, dims: list[int]) -> Value:
    e = hlo.exponential(x - spread(largest(x, dims, keepdim=True), x))
    return hlo.divide(e, spread(total_of_stored(e, dims), x))


@dataclass(frozen=True)
class LogSoftmax:
    """A fact: the value is ``shifted - log_mass`` along ``dims``."""

    shifted: Value
    log_mass: Value
    dims: list[int]


@dataclass(frozen=True)
class OneHot:
    """A fact: along ``dims`` the value is zero but for one element, which is ``height``."""

    height: Value
    dims: list[int]


def log_softmax_of(x: Value, dims: list[int]) -> Value:
    shifted = x - spread(largest(x, dims, keepdim=True), x)
    log_mass = hlo.log(total(hlo.exponential(shifted), dims, keepdim=True))
    y = shifted - spread(log_mass, x)
    y.fact = LogSoftmax(shifted, log_mass, dims)
    return y


@lower("_softmax")
def softmax(x: Value, dim: int, half_to_float: bool, *, result: list[Type]) -> Value:
    x = hlo.convert(x, compute_dtype(x.dtype))
    return hlo.convert(softmax_of(x, _axis(x, dim)), result[0].dtype)


@lower("_log_softmax")
def log_softmax(x: Value, dim: int, half_to_float: bool, *, result: list[Type]) -> Value:
    x = hlo.convert(x, compute_dtype(x.dtype))
    return hlo.convert(log_softmax_of(x, _axis(x, dim)), result[0].dtype)


@lower("_safe_softmax")
def safe_softmax(x: Value, dim: int, dtype: torch.dtype | None = None, *, result: list[Type]) -> Value:
    """Softmax whose rows of nothing but -inf are 0."""
    x = hlo.convert(x, compute_dtype(result[0].dtype))
    dims = _axis(x, dim)
    e = hlo.exponential(x - spread(largest(x, dims, keepdim=True, least=torch.finfo(x.dtype).min), x))
    mass = hlo.maximum(total_of_stored(e, dims), 1)  # the greatest adds exp(0) = 1, where there is one
    return hlo.convert(hlo.divide(e, spread(mass, x)), result[0].dtype)


def _softmax_gradient(g: Value, y: Value, dims: list[int]) -> Value:
    gy = g * y
    return gy - y * spread(total(gy, dims, keepdim=True), y)


@lower("_softmax_backward_data")
def softmax_backward(grad: Value, output: Value, dim: int, input_dtype: torch.dtype, *, result: list[Type]) -> Value:
    dtype = compute_dtype(grad.dtype)
    grad, output = hlo.convert(grad, dtype), hlo.convert(output, dtype)
    return hlo.convert(_softmax_gradient(grad, output, _axis(output, dim)), result[0].dtype)


@lower("_log_softmax_backward_data")
def log_softmax_backward(
    grad: Value, output: Value, dim: int, input_dtype: torch.dtype, *, result: list[Type]
) -> Value:
    dtype = compute_dtype(grad.dtype)
    grad, output = hlo.convert(grad, dtype), hlo.convert(output, dtype)
    dims = _axis(output, dim)
    known = grad.fact.height if isinstance(grad.fact, OneHot) and grad.fact.dims == dims else None
    sum_ = total(grad, dims, keepdim=True) if known is None else known
    return hlo.convert(grad - hlo.exponential(output) * spread(sum_, output), result[0].dtype)


def _mask_like(mask: Value, x: Value, mask_type: int | None) -> Value:
    """True where an entry is left out; mask type 0 is [L, L], 1 is [B, L] (padded keys), 2 has the shape of ``x``."""
    if mask_type == 1 and mask.ndim == 2:
        return hlo.broadcast_in_dim(hlo.convert(mask, torch.bool), x.shape, [0, x.ndim - 1])
    return spread(hlo.convert(mask, torch.bool), x)


@lower("_masked_softmax")
def masked_softmax(
    x: Value, mask: Value, dim: int | None = None, mask_type: int | None = None, *, result: list[Type]
) -> Value:
    left_out = _mask_like(mask, x, mask_type)
    x = hlo.select(left_out, float("-inf"), hlo.convert(x, compute_dtype(x.dtype)))
    return hlo.convert(softmax_of(x, _axis(x, -1 if dim is None else dim)), result[0].dtype)


@lower("_masked_softmax_backward")
def masked_softmax_backward(
    grad: Value, output: Value, mask: Value, dim: int | None = None, *, result: list[Type]
) -> Value:
    dtype = compute_dtype(grad.dtype)
    output = hlo.select(_mask_like(mask, output, None), 0, hlo.convert(output, dtype))
    gradient = _softmax_gradient(hlo.convert(grad, dtype), output, _axis(output, -1 if dim is None else dim))
    return hlo.convert(gradient, result[0].dtype)
