"""Losses that PyTorch computes in one kernel; the others are decomposed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_tpu.lowering import meta
from torch_tpu.lowering.common import Scalar, as_value, compute_dtype, for_cpu, tracer
from torch_tpu.lowering.indexing import read_along
from torch_tpu.lowering.reduction import average, spread, total
from torch_tpu.lowering.registry import lower
from torch_tpu.lowering.scan import scan
from torch_tpu.lowering.softmax import LogSoftmax, OneHot
from torch_tpu.stablehlo import Type, Value
from torch_tpu.stablehlo import ops as hlo

_NONE, _MEAN, _SUM = 0, 1, 2  # at::Reduction


def _reduced(per_sample: Value, reduction: int, result: Type) -> Value:
    if reduction == _MEAN:
        per_sample = average(per_sample, [0])
    elif reduction == _SUM:
        per_sample = total(per_sample, [0])
    return hlo.reshape(hlo.convert(per_sample, result.dtype), result.shape)


@lower("binary_cross_entropy")
def binary_cross_entropy(
    x: Value, target: Value, weight: Value | None = None, reduction: int = _MEAN, *, result: list[Type]
) -> Value:
    """``-w (y log x + (1 - y) log(1 - x))``, logarithms not below -100."""
    c = compute_dtype(x.dtype)
    p, y = hlo.convert(x, c), hlo.convert(target, c)
    tracer().check(~hlo.and_(p >= 0.0, p <= 1.0), "all elements of input should be between 0 and 1")
    tracer().check(~hlo.and_(y >= 0.0, y <= 1.0), "all elements of target should be between 0 and 1")
    low = hlo.full_like(p, -100.0)
    loss = (y - 1.0) * hlo.maximum(hlo.log_plus_one(-p), low) - y * hlo.maximum(hlo.log(p), low)
    if weight is not None:
        loss = loss * hlo.broadcast_to(hlo.convert(weight, c), loss.shape)
    return _reduced(hlo.reshape(loss, (loss.numel,)), reduction, result[0])


# ---- quadratic near zero, linear beyond -----------------------------------------------------------------------------
def _distances(x: Value, target: Value, limit: Scalar, dtype: torch.dtype) -> tuple[Value, Value]:
    """``x - target``, and the distance up to which the loss is quadratic, both as far as ``dtype`` computes."""
    shape, dtype = hlo.broadcast_shapes(x.shape, target.shape), compute_dtype(dtype)
    x, target = (hlo.broadcast_to(hlo.convert(v, dtype), shape) for v in (x, target))
    return x - target, as_value(limit, dtype, shape)


def _over_all(loss: Value, reduction: int, result: Type) -> Value:
    return _reduced(hlo.reshape(loss, (loss.numel,)), reduction, result)


def _gradient(grad: Value, slope: Value, reduction: int, result: Type) -> Value:
    share = 1.0 / max(slope.numel, 1) if reduction == _MEAN else 1.0
    return hlo.convert(hlo.broadcast_to(hlo.convert(grad, slope.dtype), slope.shape) * share * slope, result.dtype)


@lower("huber_loss", classes=True)
def huber_loss(x: Value, target: Value, reduction: int = _MEAN, delta: Scalar = 1.0, *, result: list[Type]) -> Value:
    d, delta = _distances(x, target, delta, result[0].dtype)
    d = hlo.abs_(d)
    return _over_all(hlo.select(d <= delta, d * d * 0.5, (d - delta * 0.5) * delta), reduction, result[0])


@lower("huber_loss_backward", classes=True)
def huber_loss_backward(
    grad: Value, x: Value, target: Value, reduction: int, delta: Scalar, *, result: list[Type]
) -> Value:
    d, delta = _distances(x, target, delta, result[0].dtype)
    slope = hlo.select(d < -delta, -delta, hlo.select(d > delta, delta, d))
    return _gradient(grad, slope, reduction, result[0])


@lower("smooth_l1_loss", classes=True)
def smooth_l1_loss(x: Value, target: Value, reduction: int = _MEAN, beta: Scalar = 1.0, *, result: list[Type]) -> Value:
    d, beta = _distances(x, target, beta, result[0].dtype)
    d = hlo.abs_(d)
    return _over_all(hlo.select(d < beta, d * d * 0.5 / beta, d - beta * 0.5), reduction, result[0])


@lower("smooth_l1_loss_backward", classes=True)
def smooth_l1_loss_backward(
    grad: Value, x: Value, target: Value, reduction: int, beta: Scalar, *, result: list[Type]
) -> Value:
    d, beta = _distances(x, target, beta, result[0].dtype)
    return _gradient(grad, hlo.select(hlo.abs_(d) < beta, d / beta, hlo.sign(d)), reduction, result[0])


# ---- negative log-likelihood ----------------------------------------------------------------------------------------
def _classes(x: Value) -> int:
    """The class dimension of [C], [N, C] or [N, C, H, W]."""
    return 0 if x.ndim == 1 else 1


def _is_class(index: Value, shape: Sequence[int], c: int) -> Value:
    """One-hot of ``index``, which has one class, over dimension ``c`` of ``shape``."""
    return hlo.compare(hlo.iota(tuple(shape), c, torch.int32), hlo.broadcast_to(index, shape), "EQ")


def _chosen(x: Value, index: Value, c: int) -> Value:
    """The entry of ``x`` at ``index``, which has one class, of dimension ``c``. What is no class gives any number.

    By a mask, a TPU reads ``x`` once, where a gather of single elements costs four passes in re-layout. Of a
    log-softmax the difference is taken afterwards: the sum of exponentials, which reads the same, is made in this pass.
    """
    if for_cpu():
        return read_along(x, c, hlo.clamp(0, index, max(x.shape[c] - 1, 0)))
    fact = x.fact
    if isinstance(fact, LogSoftmax) and fact.dims == [c]:
        return _chosen(fact.shifted, index, c) - fact.log_mass
    return total(hlo.select(_is_class(index, x.shape, c), x, 0), [c], keepdim=True)


def _out_of_range(target: Value, classes: int) -> Value:
    over = hlo.compare(target, classes, "GE")
    return over | hlo.compare(target, 0, "LT") if target.dtype.is_signed else over


def _is_counted(target: Value, ignore_index: Scalar) -> Value:
    if isinstance(ignore_index, int):
        return hlo.compare(target, ignore_index, "NE")
    return hlo.compare(hlo.convert(target, torch.int64), as_value(ignore_index, torch.int64, target.shape), "NE")


def _weights(x: Value, target: Value, weight: Value | None, ignore_index: Scalar) -> tuple[Value, Value]:
    """(target, its weight), both with one class; the weight of ``ignore_index`` is 0.

    A target that is neither a class nor ``ignore_index`` is reported at the next synchronisation.
    """
    c = _classes(x)
    used = _is_counted(target, ignore_index)
    tracer().check(used & _out_of_range(target, x.shape[c]), "Target is out of bounds", IndexError)
    one_class = [1 if i == c else n for i, n in enumerate(x.shape)]
    index = hlo.reshape(hlo.convert(target, torch.int32), one_class)
    used = hlo.reshape(used, one_class)
    if weight is None:
        return index, hlo.convert(used, x.dtype)
    weight = hlo.broadcast_in_dim(hlo.convert(weight, x.dtype), x.shape, [c])
    return index, hlo.select(used, _chosen(weight, index, c), 0)


def _with_classes(name: str) -> Callable[..., Any]:
    """PyTorch's meta kernel of an overload, which does not take targets of uint8 though the CPU does."""
    kernel = meta.contiguous(name)
    return lambda x, target, *args: kernel(x, target.long() if target.dtype == torch.uint8 else target, *args)


@lower("nll_loss_forward", runtime=("ignore_index",), meta=_with_classes("nll_loss_forward"))
@lower("nll_loss2d_forward", runtime=("ignore_index",), meta=_with_classes("nll_loss2d_forward"))
def nll_loss(
    x: Value, target: Value, weight: Value | None, reduction: int, ignore_index: Scalar, *, result: list[Type]
) -> list[Value]:
    """(loss, sum of weights): ``-weight[t] * x[t]`` averaged by weight; 0/0 where every target is ignored."""
    x = hlo.convert(x, compute_dtype(x.dtype))
    index, w = _weights(x, target, weight, ignore_index)
    loss = hlo.select(hlo.compare(w, 0, "EQ"), 0, -(_chosen(x, index, _classes(x)) * w))
    everywhere = range(x.ndim)
    weights = hlo.constant(0, x.dtype) if reduction == _NONE and x.ndim > 1 else total(w, everywhere)
    if reduction != _NONE:
        loss = total(loss, everywhere)
    if reduction == _MEAN:
        loss = hlo.divide(loss, weights)
    return [hlo.reshape(hlo.convert(v, t.dtype), t.shape) for v, t in zip((loss, weights), result, strict=True)]


@lower("nll_loss_backward", "nll_loss2d_backward", runtime=("ignore_index",))
def nll_loss_backward(
    grad: Value, x: Value, target: Value, weight: Value | None, reduction: int, ignore_index: Scalar,
    total_weight: Value, *, result: list[Type],
) -> Value:  # fmt: skip
    dtype = compute_dtype(x.dtype)
    grad, x, total_weight = (hlo.convert(v, dtype) for v in (grad, x, total_weight))
    index, w = _weights(x, target, weight, ignore_index)
    if reduction == _MEAN:
        grad = hlo.divide(grad, total_weight)
    grad = hlo.reshape(grad, w.shape if grad.numel == w.numel else (1,) * x.ndim)
    scale = hlo.select(hlo.compare(w, 0, "EQ"), 0, -(w * spread(grad, w)))
    c = _classes(x)
    gradient = hlo.select(_is_class(index, x.shape, c), spread(scale, x), 0)
    gradient.fact = OneHot(scale, [c])
    return hlo.convert(gradient, result[0].dtype)


# ---- margin losses --------------------------------------------------------------------------------------------------
def _per_sample(grad: Value, n: int, c: int, reduction: int) -> Value:
    """The gradient of each entry of [n, c] before the loss: the mean over classes, and over samples if asked."""
    grad = hlo.divide(grad, c * n if reduction == _MEAN else c)
    if grad.numel == 1:
        return hlo.broadcast_to(hlo.reshape(grad, (1, 1)), (n, c))
    return hlo.broadcast_in_dim(grad, (n, c), [0])


def _samples(v: Value, dtype: torch.dtype | None = None) -> Value:
    """[C] or a 0-d value as one sample of a batch."""
    v = v if dtype is None else hlo.convert(v, dtype)
    return v if v.ndim == 2 else hlo.reshape(v, (1, v.numel))


def _margins(x: Value, target: Value, margin: float, weight: Value | None) -> tuple[Value, Value, Value]:
    """(``margin - x[t] + x``, one-hot of t, weight[t]) of a [N, C] batch."""
    tracer().check(_out_of_range(target, x.shape[1]), "target out of range")
    index = hlo.reshape(hlo.convert(target, torch.int32), (x.shape[0], 1))
    hot = _is_class(index, x.shape, 1)
    z = x - spread(_chosen(x, index, 1), x) + margin
    if weight is None:
        return z, hot, hlo.full_like(x, 1)
    weight = hlo.broadcast_in_dim(hlo.convert(weight, x.dtype), x.shape, [1])
    return z, hot, spread(_chosen(weight, index, 1), x)


@lower("multi_margin_loss", static=("p", "margin"))
def multi_margin_loss(
    x: Value, target: Value, p: float = 1, margin: float = 1, weight: Value | None = None, reduction: int = 1,
    *, result: list[Type],
) -> Value:  # fmt: skip
    """Mean over the other classes of ``weight[t] * max(0, margin - x[t] + x)^p``."""
    x = _samples(x, compute_dtype(x.dtype))
    z, own, w = _margins(x, target, margin, weight)
    z = hlo.maximum(z, 0)
    loss = hlo.select(own, 0, w * (z if p == 1 else z * z))
    return _reduced(average(loss, [1]), reduction, result[0])


@lower("multi_margin_loss_backward", static=("p", "margin"))
def multi_margin_loss_backward(
    grad: Value, x: Value, target: Value, p: float, margin: float, weight: Value | None = None, reduction: int = 1,
    *, result: list[Type],
) -> Value:  # fmt: skip
    x = _samples(x, compute_dtype(x.dtype))
    z, own, w = _margins(x, target, margin, weight)
    slope = w * _per_sample(hlo.convert(grad, x.dtype), x.shape[0], x.shape[1], reduction)
    others = hlo.select(hlo.compare(z, 0, "GT") & ~own, slope if p == 1 else slope * z * 2, 0)
    gradient = hlo.select(own, -spread(total(others, [1], keepdim=True), x), others)
    return hlo.reshape(hlo.convert(gradient, result[0].dtype), result[0].shape)


def _label_margins(x: Value, target: Value) -> tuple[Value, Value, Value, Value]:
    """Every label against every class that is no label, [N, labels, C]; labels end at the first -1.

    Returns ``1 - x[label] + x``, whether the pair counts, the one-hot of the labels, and which classes are labels.
    """
    n, c = x.shape
    target = _samples(hlo.convert(target, torch.int32))
    ended = scan(hlo.compare(target, -1, "EQ"), 1, False, hlo.or_)
    tracer().check(~ended & _out_of_range(target, c), "argument #2 'target' is out of range")
    cube = (n, target.shape[1], c)
    used = hlo.broadcast_in_dim(~ended, cube, [0, 1])
    index = hlo.expand_dims(target, [2])
    hot = _is_class(index, cube, 2) & used
    is_label = hlo.reduce_one(hot, False, [1], hlo.or_)
    wide = hlo.broadcast_in_dim(x, cube, [0, 2])
    z = wide - spread(_chosen(wide, index, 2), wide) + 1
    return z, used & ~hlo.broadcast_in_dim(is_label, cube, [0, 2]), hot, is_label


def _multilabel_margin_meta(x: torch.Tensor, target: torch.Tensor, reduction: int) -> tuple[torch.Tensor, torch.Tensor]:
    """PyTorch's decomposition has a dimension too many for one sample without a batch."""
    return x.new_empty(() if reduction else x.shape[:-1]), x.new_empty(target.shape)


@lower("multilabel_margin_loss_forward", meta=_multilabel_margin_meta)
def multilabel_margin_loss(x: Value, target: Value, reduction: int, *, result: list[Type]) -> list[Value]:
    """(loss, 1 where a class is a label). PyTorch's decomposition also counts what follows the first -1."""
    x = _samples(x, compute_dtype(x.dtype))
    z, counts, _, is_label = _label_margins(x, target)
    loss = hlo.divide(total(hlo.select(counts, hlo.maximum(z, 0), 0), [1, 2]), x.shape[1])
    is_label = hlo.reshape(hlo.convert(is_label, result[1].dtype), result[1].shape)
    return [_reduced(loss, reduction, result[0]), is_label]


@lower("multilabel_margin_loss_backward")
def multilabel_margin_loss_backward(
    grad: Value, x: Value, target: Value, reduction: int, is_target: Value, *, result: list[Type]
) -> Value:
    x = _samples(x, compute_dtype(x.dtype))
    z, counts, hot, _ = _label_margins(x, target)
    active = hlo.convert(counts & hlo.compare(z, 0, "GT"), x.dtype)
    pulled = hlo.broadcast_in_dim(total(active, [2]), z.shape, [0, 1])
    pairs = total(active, [1]) - total(hlo.select(hot, pulled, 0), [1])
    gradient = pairs * _per_sample(hlo.convert(grad, x.dtype), x.shape[0], x.shape[1], reduction)
    return hlo.reshape(hlo.convert(gradient, result[0].dtype), result[0].shape)
