"""Pairwise p-norm distances, forward and backward (ATen's ``DistanceOpsKernel``)."""

from __future__ import annotations

import math

import torch

from torch_tpu.lowering.common import compute_dtype
from torch_tpu.lowering.reduction import p_norm, squared, total
from torch_tpu.lowering.registry import lower
from torch_tpu.stablehlo import Type, Value
from torch_tpu.stablehlo import ops as hlo

#: Above this many rows PyTorch multiplies matrices for p = 2 (``cdist``'s compute mode 0).
_MATMUL_ROWS = 25


def _euclidean(x: Value, y: Value) -> Value:
    """``sqrt(|x|² + |y|² - 2xy)`` of [..., P, M] and [..., R, M]. The terms cancel, so the product is full float32."""
    batch, last = list(range(x.ndim - 2)), x.ndim - 1
    product = hlo.dot_general(x, y, contract=([last], [last]), batch=(batch, batch), precision="HIGHEST")
    xx = hlo.broadcast_in_dim(total(squared(x), [last]), product.shape, [*batch, last - 1])
    yy = hlo.broadcast_in_dim(total(squared(y), [last]), product.shape, [*batch, last])
    return hlo.sqrt(hlo.maximum(xx + yy - product * 2, 0))


def _differences(x: Value, y: Value) -> Value:
    """``x[..., i, m] - y[..., j, m]`` with shape [..., P, R, M]; XLA fuses it into the reduction that follows."""
    shape = (*x.shape[:-1], *y.shape[-2:])
    batch, n = list(range(x.ndim - 2)), len(shape)
    rows = hlo.broadcast_in_dim(x, shape, [*batch, n - 3, n - 1])
    return rows - hlo.broadcast_in_dim(y, shape, [*batch, n - 2, n - 1])


def _batched(x: Value, batch: tuple[int, ...], dtype: torch.dtype) -> Value:
    return hlo.broadcast_to(hlo.convert(x, dtype), (*batch, *x.shape[-2:]))


@lower("_cdist_forward", static=("p",))
def cdist(x: Value, y: Value, p: float, compute_mode: int | None, *, result: list[Type]) -> Value:
    batch, dtype = result[0].shape[:-2], compute_dtype(x.dtype)
    x, y = _batched(x, batch, dtype), _batched(y, batch, dtype)
    many = max(x.shape[-2], y.shape[-2]) > _MATMUL_ROWS
    if p == 2 and (compute_mode == 1 or (not compute_mode and many)):
        return hlo.convert(_euclidean(x, y), result[0].dtype)
    distances = p_norm(hlo.abs_(_differences(x, y)), p, [len(batch) + 2])
    return hlo.convert(distances, result[0].dtype)


@lower("_euclidean_dist")
def euclidean(x: Value, y: Value, *, result: list[Type]) -> Value:
    batch, dtype = result[0].shape[:-2], compute_dtype(x.dtype)
    return hlo.convert(_euclidean(_batched(x, batch, dtype), _batched(y, batch, dtype)), result[0].dtype)


def _slope(difference: Value, distance: Value, p: float) -> Value:
    """The derivative of ``(sum |d|^p)^(1/p)`` by ``d``; 0 where it does not exist."""
    if p == 0:
        return hlo.full_like(difference, 0)
    if p == 1:
        return hlo.sign(difference)
    size = hlo.abs_(difference)
    if math.isinf(p):
        return hlo.select(hlo.compare(size, distance, "EQ"), hlo.sign(difference), 0)
    undefined = hlo.compare(distance, 0, "EQ")
    if p < 2:
        undefined = undefined | hlo.compare(difference, 0, "EQ")
    if p == 2:
        return hlo.select(undefined, 0, difference / distance)
    share = hlo.sign(difference) * hlo.power(size, p - 1) / hlo.power(distance, p - 1)
    return hlo.select(undefined, 0, share)


def _distance_gradient(grad: Value, x: Value, y: Value, p: float, distance: Value) -> Value:
    """``sum_j grad[..., i, j] * d distance[..., i, j] / d x[..., i, :]``."""
    difference = _differences(x, y)
    axes = list(range(difference.ndim - 1))
    wide = lambda v: hlo.broadcast_in_dim(v, difference.shape, axes)  # noqa: E731
    return total(wide(grad) * _slope(difference, wide(distance), p), [difference.ndim - 2])


@lower("_cdist_backward", static=("p",))
def cdist_backward(grad: Value, x: Value, y: Value, p: float, distance: Value, *, result: list[Type]) -> Value:
    if 0 in grad.shape:
        return hlo.constant(0, result[0].dtype, result[0].shape)
    batch, dtype = distance.shape[:-2], compute_dtype(x.dtype)
    grad, x, y, distance = (_batched(v, batch, dtype) for v in (grad, x, y, distance))
    return hlo.convert(_distance_gradient(grad, x, y, p, distance), result[0].dtype)


# ---- distances within one set: the upper triangle, row by row -------------------------------------------------------
def _pairs(n: int) -> tuple[Value, Value]:
    """Rows ``i`` and ``j`` of every pair ``i < j``, int32 [n (n - 1) / 2], by solving a quadratic equation."""
    k = hlo.iota((n * (n - 1) // 2,), 0, torch.float64)
    half = n - 0.5
    i = hlo.convert(half - hlo.sqrt(half * half - 1 - k * 2), torch.int32)
    k = hlo.convert(k, torch.int32)
    return i, k - hlo.divide(i * (2 * n - i - 1), 2) + i + 1


def _rows(x: Value, index: Value) -> Value:
    return hlo.gather(
        x,
        hlo.reshape(index, (index.numel, 1)),
        offset_dims=[1],
        collapsed_dims=[0],
        index_map=[0],
        slice_sizes=[1, x.shape[1]],
    )


@lower("_pdist_forward", static=("p",))
def pdist(x: Value, p: float = 2, *, result: list[Type]) -> Value:
    if result[0].shape == (0,):
        return hlo.constant(0, result[0].dtype, (0,))
    x = hlo.convert(x, compute_dtype(x.dtype))
    i, j = _pairs(x.shape[0])
    return hlo.convert(p_norm(hlo.abs_(_rows(x, i) - _rows(x, j)), p, [1]), result[0].dtype)


@lower("_pdist_backward", static=("p",))
def pdist_backward(grad: Value, x: Value, p: float, distance: Value, *, result: list[Type]) -> Value:
    n, dtype = x.shape[0], compute_dtype(x.dtype)
    if grad.numel == 0:
        return hlo.constant(0, result[0].dtype, result[0].shape)
    grad, x, distance = (hlo.convert(v, dtype) for v in (grad, x, distance))
    i, j = _pairs(n)
    place = hlo.concatenate([hlo.reshape(v, (v.numel, 1)) for v in (i, j)], 1)
    zeros = hlo.constant(0, dtype, (n, n))

    def square(v: Value) -> Value:
        upper = hlo.scatter(
            zeros, place, v, update_window_dims=[], inserted_dims=[0, 1], index_map=[0, 1], unique_indices=True
        )
        return upper + hlo.transpose(upper, [1, 0])

    return hlo.convert(_distance_gradient(square(grad), x, x, p, square(distance)), result[0].dtype)
