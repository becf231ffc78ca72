"""Batch, layer, group and root-mean-square normalisation, forward and backward.

Statistics are two-pass in float32 or wider. Every backward pass is the same formula: with ``y = (x - mean) * rstd`` and
``g`` the gradient of ``y``, ``dx = rstd * (g - mean(g) - y * mean(g * y))``, means over the normalised dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

from torch_tpu.lowering.common import Scalar, as_value, compute_dtype
from torch_tpu.lowering.reduction import average, moments, spread, squared, total
from torch_tpu.lowering.registry import lower
from torch_tpu.stablehlo import Type, Value
from torch_tpu.stablehlo import ops as hlo


def _affine(y: Value, weight: Value | None, bias: Value | None, dims: Sequence[int]) -> Value:
    """``y * weight + bias``, whose dimensions are ``dims`` of ``y``."""
    if weight is not None:
        y = y * hlo.broadcast_in_dim(hlo.convert(weight, y.dtype), y.shape, dims)
    if bias is not None:
        y = y + hlo.broadcast_in_dim(hlo.convert(bias, y.dtype), y.shape, dims)
    return y


def _inverse_root(variance: Value, eps: Scalar) -> Value:
    return hlo.rsqrt(variance + as_value(eps, variance.dtype, variance.shape))


def _input_gradient(g: Value, y: Value, rstd: Value, dims: Sequence[int], centred: bool = True) -> Value:
    """``dx`` as in the module's text; ``rstd`` broadcasts against ``g``."""
    inner = g - y * spread(average(g * y, dims, keepdim=True), g)
    if centred:
        inner = inner - spread(average(g, dims, keepdim=True), g)
    return spread(rstd, g) * inner


def _fit(values: Sequence[Value | None], types: Sequence[Type | None]) -> list[Value | None]:
    """The results in the shapes and dtypes that PyTorch expects; None where it wants none."""
    return [
        None if v is None or t is None else hlo.reshape(hlo.convert(v, t.dtype), t.shape)
        for v, t in zip(values, types, strict=True)
    ]


# ---- batch normalisation --------------------------------------------------------------------------------------------
def _batch_dims(x: Value) -> list[int]:
    return [i for i in range(x.ndim) if i != 1]


def _batch_norm(
    x: Value, weight: Value | None, bias: Value | None, running_mean: Value | None, running_var: Value | None,
    training: bool, momentum: Scalar, eps: Scalar,
) -> tuple[list[Value], list[Value | None]]:  # fmt: skip
    """([output, mean, 1/std], [running mean, running variance]), all per-channel statistics of shape [C]."""
    dtype = compute_dtype(x.dtype)
    x = hlo.convert(x, dtype)
    old = [None if v is None else hlo.convert(v, dtype) for v in (running_mean, running_var)]
    new = old
    if training:
        dims = _batch_dims(x)
        var, mean = (hlo.reshape(v, (x.shape[1],)) for v in moments(x, dims))
        n = x.numel // max(x.shape[1], 1)
        unbiased = hlo.divide(var * n, n - 1)
        share = as_value(momentum, dtype, mean.shape)
        new = [None if o is None else s * share + o * (1 - share) for o, s in zip(old, (mean, unbiased), strict=True)]
    elif 0 in x.shape:  # nothing to normalise, whatever sizes the statistics have
        return [x, x, x], new
    else:
        mean, var = old  # type: ignore[assignment]
    rstd = _inverse_root(var, eps)
    y = (x - hlo.broadcast_in_dim(mean, x.shape, [1])) * hlo.broadcast_in_dim(rstd, x.shape, [1])
    return [_affine(y, weight, bias, [1]), mean, rstd], new


def _batch_results(outs: list[Value], types: Sequence[Type]) -> list[Value | None]:
    """The outputs; PyTorch has empty statistics and an empty reserve where nothing is saved."""
    outs = [v if t.shape == v.shape else hlo.constant(0, t.dtype, t.shape) for v, t in zip(outs, types, strict=False)]
    reserve = [hlo.constant(0, t.dtype, t.shape) for t in types[len(outs) :]]
    return _fit([*outs, *reserve], types)


def _batch_norm_meta(x: Tensor, training: bool) -> tuple[Tensor, Tensor, Tensor]:
    """As the CPU has them: contiguous or channels last, and statistics for the backward pass in training alone."""
    y = torch.empty_like(x, memory_format=suggest_memory_format(x))
    shape = (x.shape[1] if training else 0,)
    mean, rstd = (x.new_empty(shape, dtype=compute_dtype(x.dtype)) for _ in range(2))
    return y, mean, rstd


def _meta(x: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _batch_norm_meta(x, next(a for a in arguments if isinstance(a, bool)))


def _with_update_meta(x: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return *_batch_norm_meta(x, True), x.new_empty((0,), dtype=torch.uint8)


@lower("native_batch_norm", mutates=("running_mean", "running_var"), meta=_meta)
def native_batch_norm(
    x: Value, weight: Value | None, bias: Value | None, running_mean: Value | None, running_var: Value | None,
    training: bool, momentum: Scalar, eps: Scalar, *, result: list[Type],
) -> list[Value | None]:  # fmt: skip
    outs, new = _batch_norm(x, weight, bias, running_mean, running_var, training, momentum, eps)
    changed = new if training else [running_mean, running_var]
    return [*_batch_results(outs, result), *(v for v in changed if v is not None)]


@lower("_native_batch_norm_legit", "_native_batch_norm_legit.out", meta=_meta)
def batch_norm_legit(
    x: Value, weight: Value | None, bias: Value | None, running_mean: Value, running_var: Value,
    training: bool, momentum: Scalar, eps: Scalar, *, result: list[Type],
) -> list[Value | None]:  # fmt: skip
    outs, new = _batch_norm(x, weight, bias, running_mean, running_var, training, momentum, eps)
    return [*(new if training else [running_mean, running_var]), *_batch_results(outs, result[2:])]


@lower("_native_batch_norm_legit.no_stats", meta=_meta)
def batch_norm_no_stats(
    x: Value,
    weight: Value | None,
    bias: Value | None,
    training: bool,
    momentum: Scalar,
    eps: Scalar,
    *,
    result: list[Type],
) -> list[Value | None]:
    outs, _ = _batch_norm(x, weight, bias, None, None, True, momentum, eps)
    return _batch_results(outs, result)


@lower("_native_batch_norm_legit_no_training", meta=lambda x, *_: _batch_norm_meta(x, False))
def batch_norm_no_training(
    x: Value, weight: Value | None, bias: Value | None, running_mean: Value, running_var: Value,
    momentum: Scalar, eps: Scalar, *, result: list[Type],
) -> list[Value | None]:  # fmt: skip
    outs, _ = _batch_norm(x, weight, bias, running_mean, running_var, False, momentum, eps)
    return _batch_results(outs, result)


@lower("_native_batch_norm_legit_functional")
def batch_norm_functional(
    x: Value, weight: Value | None, bias: Value | None, running_mean: Value, running_var: Value,
    training: bool, momentum: Scalar, eps: Scalar, *, result: list[Type],
) -> list[Value | None]:  # fmt: skip
    outs, new = _batch_norm(x, weight, bias, running_mean, running_var, training, momentum, eps)
    return [*_batch_results(outs, result[:3]), *_fit(new, result[3:])]


@lower("_batch_norm_with_update", meta=_with_update_meta)
def batch_norm_with_update(
    x: Value, weight: Value | None, bias: Value | None, running_mean: Value, running_var: Value,
    momentum: Scalar, eps: Scalar, *, result: list[Type],
) -> list[Value | None]:  # fmt: skip
    outs, new = _batch_norm(x, weight, bias, running_mean, running_var, True, momentum, eps)
    return [*new, *_batch_results(outs, result[2:])]


@lower("_batch_norm_with_update_functional")
def batch_norm_with_update_functional(
    x: Value, weight: Value | None, bias: Value | None, running_mean: Value, running_var: Value,
    momentum: Scalar, eps: Scalar, *, result: list[Type],
) -> list[Value | None]:  # fmt: skip
    outs, new = _batch_norm(x, weight, bias, running_mean, running_var, True, momentum, eps)
    return [*_batch_results(outs, result[:4]), *_fit(new, result[4:])]


@lower("_batch_norm_no_update")
def batch_norm_no_update(
    x: Value, weight: Value | None, bias: Value | None, running_mean: Value | None, running_var: Value | None,
    momentum: Scalar, eps: Scalar, *, result: list[Type],
) -> list[Value | None]:  # fmt: skip
    outs, _ = _batch_norm(x, weight, bias, running_mean, running_var, running_mean is None, momentum, eps)
    return _batch_results(outs, result)


@lower("native_batch_norm_backward", "batch_norm_backward")
def batch_norm_backward(
    grad: Value, x: Value, weight: Value | None, running_mean: Value | None, running_var: Value | None,
    save_mean: Value | None, save_invstd: Value | None, train: bool, eps: Scalar, output_mask: list[bool],
    reserve: Value | None = None, *, result: list[Type | None],
) -> list[Value | None]:  # fmt: skip
    dtype = compute_dtype(x.dtype)
    dims = _batch_dims(x)
    grad, x = hlo.convert(grad, dtype), hlo.convert(x, dtype)
    if train:
        assert save_mean is not None and save_invstd is not None
        mean, rstd = hlo.convert(save_mean, dtype), hlo.convert(save_invstd, dtype)
    else:
        assert running_mean is not None and running_var is not None
        mean, rstd = hlo.convert(running_mean, dtype), _inverse_root(hlo.convert(running_var, dtype), eps)
    rstd = hlo.broadcast_in_dim(rstd, x.shape, [1])
    y = (x - hlo.broadcast_in_dim(mean, x.shape, [1])) * rstd
    g = _affine(grad, weight, None, [1])
    dx = _input_gradient(g, y, rstd, dims) if train else g * rstd
    return _fit([dx, total(grad * y, dims), total(grad, dims)], result)


# ---- layer and root-mean-square normalisation -----------------------------------------------------------------------
def _split(x: Value, normalized_shape: Sequence[int]) -> tuple[list[int], list[int]]:
    """(outer, normalised) dimensions."""
    axis = x.ndim - len(normalized_shape)
    return list(range(axis)), list(range(axis, x.ndim))


def _over(x: Value, statistic: Value, inner: Sequence[int]) -> Value:
    """A statistic of the outer dimensions, broadcast to ``x``."""
    shape = [1 if i in inner else n for i, n in enumerate(x.shape)]
    return spread(hlo.reshape(hlo.convert(statistic, x.dtype), shape), x)


@lower("native_layer_norm")
def layer_norm(
    x: Value, normalized_shape: list[int], weight: Value | None, bias: Value | None, eps: Scalar, *, result: list[Type]
) -> list[Value | None]:
    x = hlo.convert(x, compute_dtype(x.dtype))
    _, inner = _split(x, normalized_shape)
    var, mean = moments(x, inner)
    rstd = _inverse_root(var, eps)
    y = (x - spread(mean, x)) * spread(rstd, x)
    return _fit([_affine(y, weight, bias, inner), mean, rstd], result)


@lower("native_layer_norm_backward")
def layer_norm_backward(
    grad: Value, x: Value, normalized_shape: list[int], mean: Value, rstd: Value, weight: Value | None,
    bias: Value | None, output_mask: list[bool], *, result: list[Type | None],
) -> list[Value | None]:  # fmt: skip
    grad, x = (hlo.convert(v, compute_dtype(x.dtype)) for v in (grad, x))
    outer, inner = _split(x, normalized_shape)
    rstd = _over(x, rstd, inner)
    y = (x - _over(x, mean, inner)) * rstd
    dx = _input_gradient(_affine(grad, weight, None, inner), y, rstd, inner)
    return _fit([dx, total(grad * y, outer), total(grad, outer)], result)


@lower("_fused_rms_norm")
def rms_norm(
    x: Value, normalized_shape: list[int], weight: Value | None, eps: Scalar | None, *, result: list[Type]
) -> list[Value | None]:
    x = hlo.convert(x, compute_dtype(x.dtype))
    _, inner = _split(x, normalized_shape)
    rstd = _inverse_root(average(squared(x), inner, keepdim=True), torch.finfo(x.dtype).eps if eps is None else eps)
    return _fit([_affine(x * spread(rstd, x), weight, None, inner), rstd], result)


@lower("_fused_rms_norm_backward")
def rms_norm_backward(
    grad: Value, x: Value, normalized_shape: list[int], rstd: Value, weight: Value | None, output_mask: list[bool],
    *, result: list[Type | None],
) -> list[Value | None]:  # fmt: skip
    grad, x = (hlo.convert(v, compute_dtype(x.dtype)) for v in (grad, x))
    outer, inner = _split(x, normalized_shape)
    rstd = _over(x, rstd, inner)
    y = x * rstd
    dx = _input_gradient(_affine(grad, weight, None, inner), y, rstd, inner, centred=False)
    return _fit([dx, total(grad * y, outer)], result)


# ---- group normalisation --------------------------------------------------------------------------------------------
_GROUP_DIMS = [2, 3]  # of [N, groups, channels per group, positions]


def _grouped(x: Value, n: int, c: int, hw: int, group: int) -> Value:
    return hlo.reshape(hlo.convert(x, compute_dtype(x.dtype)), (n, group, c // group, hw))


def _by_group(v: Value | None, group: int) -> Value | None:
    return None if v is None else hlo.reshape(v, (group, v.numel // group))


@lower("native_group_norm")
def group_norm(
    x: Value,
    weight: Value | None,
    bias: Value | None,
    N: int,
    C: int,
    HxW: int,
    group: int,
    eps: Scalar,
    *,
    result: list[Type],
) -> list[Value | None]:
    x = _grouped(x, N, C, HxW, group)
    var, mean = moments(x, _GROUP_DIMS)
    rstd = _inverse_root(var, eps)
    y = (x - spread(mean, x)) * spread(rstd, x)
    return _fit([_affine(y, _by_group(weight, group), _by_group(bias, group), [1, 2]), mean, rstd], result)


@lower("native_group_norm_backward")
def group_norm_backward(
    grad: Value, x: Value, mean: Value, rstd: Value, weight: Value | None, N: int, C: int, HxW: int, group: int,
    output_mask: list[bool], *, result: list[Type | None],
) -> list[Value | None]:  # fmt: skip
    grad, x = (_grouped(v, N, C, HxW, group) for v in (grad, x))
    rstd = _over(x, rstd, _GROUP_DIMS)
    y = (x - _over(x, mean, _GROUP_DIMS)) * rstd
    dx = _input_gradient(_affine(grad, _by_group(weight, group), None, [1, 2]), y, rstd, _GROUP_DIMS)
    return _fit([dx, total(grad * y, [0, 3]), total(grad, [0, 3])], result)


# ---- weight normalisation -------------------------------------------------------------------------------------------
@lower("_weight_norm_interface_backward")
def weight_norm_backward(grad: Value, v: Value, g: Value, norms: Value, dim: int) -> tuple[Value, Value]:
    """Gradients of ``w = g v / |v|`` by v and g, norms over all dimensions but ``dim`` (Salimans and Kingma 2016)."""
    compute = compute_dtype(v.dtype)
    over = [i for i in range(v.ndim) if i != dim % v.ndim]
    wide = lambda x: hlo.broadcast_to(hlo.convert(x, compute), v.shape)  # noqa: E731
    dw, x, scale, norm = hlo.convert(grad, compute), hlo.convert(v, compute), wide(g), wide(norms)
    along = hlo.reshape(hlo.reduce_one(dw * x, 0, over, hlo.add), g.shape)  # the part of the gradient along v
    by_v = scale / norm * (dw - x * (wide(along) / (norm * norm)))
    by_g = along / hlo.convert(norms, compute)
    return hlo.convert(by_v, v.dtype), hlo.convert(by_g, g.dtype)
