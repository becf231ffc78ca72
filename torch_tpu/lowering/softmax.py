"""Softmax, log-softmax and what their backward passes call; half types are computed in float32."""

from __future__ import annotations

import torch

from torch_tpu.lowering.common import compute_dtype
from torch_tpu.lowering.reduction import largest, spread, total
from torch_tpu.lowering.registry import lower
from torch_tpu.stablehlo import Type, Value, ops as hlo


def _axis(x: Value, dim: int) -> list[int]:
    return [dim % x.ndim] if x.ndim else []


def softmax_of(x: Value, dims: list[int]) -> Value:
    e = hlo.exponential(x - spread(largest(x, dims, keepdim=True), x))
    return hlo.divide(e, spread(total(e, dims, keepdim=True), x))


def log_softmax_of(x: Value, dims: list[int]) -> Value:
    shifted = x - spread(largest(x, dims, keepdim=True), x)
    return shifted - spread(hlo.log(total(hlo.exponential(shifted), dims, keepdim=True)), x)


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
    empty = hlo.compare(largest(x, dims, keepdim=True), float("-inf"), "EQ")
    return hlo.convert(hlo.select(spread(empty, x), 0, softmax_of(x, dims)), result[0].dtype)


def _softmax_gradient(g: Value, y: Value, dims: list[int]) -> Value:
    gy = g * y
    return gy - y * spread(total(gy, dims, keepdim=True), y)


@lower("_softmax_backward_data")
def softmax_backward(grad: Value, output: Value, dim: int, input_dtype: torch.dtype, *, result: list[Type]) -> Value:
    dtype = compute_dtype(grad.dtype)
    grad, output = hlo.convert(grad, dtype), hlo.convert(output, dtype)
    return hlo.convert(_softmax_gradient(grad, output, _axis(output, dim)), result[0].dtype)


@lower("_log_softmax_backward_data")
def log_softmax_backward(grad: Value, output: Value, dim: int, input_dtype: torch.dtype, *, result: list[Type]) -> Value:
    dtype = compute_dtype(grad.dtype)
    grad, output = hlo.convert(grad, dtype), hlo.convert(output, dtype)
    sum_ = spread(total(grad, _axis(output, dim), keepdim=True), output)
    return hlo.convert(grad - hlo.exponential(output) * sum_, result[0].dtype)
