"""Losses that PyTorch computes in one kernel; the others are decomposed."""

from __future__ import annotations

from torch_tpu.lowering.common import compute_dtype, tracer
from torch_tpu.lowering.reduction import spread, total
from torch_tpu.lowering.registry import lower
from torch_tpu.lowering.scan import scan
from torch_tpu.lowering.sort import take_along
from torch_tpu.stablehlo import Type, Value, ops as hlo
import torch

_NONE, _MEAN, _SUM = 0, 1, 2  # at::Reduction


# ---- negative log-likelihood ----------------------------------------------------------------------------------------------
def _classes(x: Value) -> int:
    """The class dimension of [C], [N, C] or [N, C, H, W]."""
    return 0 if x.ndim == 1 else 1


def _weights(x: Value, target: Value, weight: Value | None, ignore_index: int) -> tuple[Value, Value]:
    """(class indices, weights), both in the shape of ``x`` with one class; the weight of ``ignore_index`` is 0.

    A target that is neither a class nor ``ignore_index`` is reported at the next synchronisation.
    """
    c = _classes(x)
    used = hlo.compare(target, ignore_index, "NE")
    bad = hlo.compare(target, 0, "LT") | hlo.compare(target, x.shape[c], "GE") if target.dtype.is_signed else hlo.compare(
        target, x.shape[c], "GE"
    )
    tracer().check_index(used & bad)
    index = hlo.select(used & ~bad, hlo.convert(target, torch.int32), 0)
    index = hlo.reshape(index, [1 if i == c else n for i, n in enumerate(x.shape)])
    used = hlo.convert(hlo.reshape(used, index.shape), x.dtype)
    if weight is None:
        return index, used
    weight = hlo.broadcast_in_dim(hlo.convert(weight, x.dtype), x.shape, [c])
    return index, hlo.select(hlo.compare(used, 0, "NE"), take_along(weight, index, c), 0)


@lower("nll_loss_forward", "nll_loss2d_forward")
def nll_loss(
    x: Value, target: Value, weight: Value | None, reduction: int, ignore_index: int, *, result: list[Type]
) -> list[Value]:
    """(loss, sum of weights): ``-weight[t] * x[t]`` averaged by weight; 0/0 where every target is ignored."""
    x = hlo.convert(x, compute_dtype(x.dtype))
    index, w = _weights(x, target, weight, ignore_index)
    loss = hlo.select(hlo.compare(w, 0, "EQ"), 0, -(take_along(x, index, _classes(x)) * w))
    everywhere = range(x.ndim)
    weights = total(w, everywhere) if reduction != _NONE else hlo.constant(0, x.dtype)
    if reduction != _NONE:
        loss = total(loss, everywhere)
    if reduction == _MEAN:
        loss = hlo.divide(loss, weights)
    return [hlo.reshape(hlo.convert(v, t.dtype), t.shape) for v, t in zip((loss, weights), result, strict=True)]


@lower("nll_loss_backward", "nll_loss2d_backward")
def nll_loss_backward(
    grad: Value, x: Value, target: Value, weight: Value | None, reduction: int, ignore_index: int, total_weight: Value,
    *, result: list[Type],
) -> Value:  # fmt: skip
    dtype = compute_dtype(x.dtype)
    grad, x, total_weight = (hlo.convert(v, dtype) for v in (grad, x, total_weight))
    index, w = _weights(x, target, weight, ignore_index)
    if reduction == _MEAN:
        grad = hlo.divide(grad, total_weight)
    grad = hlo.reshape(grad, index.shape if grad.numel == index.numel else (1,) * x.ndim)
    scale = hlo.select(hlo.compare(w, 0, "EQ"), 0, -(w * spread(grad, w)))
    chosen = hlo.compare(hlo.iota(x.shape, _classes(x), torch.int32), spread(index, x), "EQ")
    return hlo.convert(hlo.select(chosen, spread(scale, x), 0), result[0].dtype)
