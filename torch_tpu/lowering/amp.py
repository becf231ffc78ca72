"""Gradient scaling for mixed precision (``torch.amp.GradScaler``)."""

from __future__ import annotations

import torch

from torch_tpu.lowering.common import Scalar, as_value, compute_dtype
from torch_tpu.lowering.registry import lower
from torch_tpu.stablehlo import Value
from torch_tpu.stablehlo import ops as hlo


@lower("_amp_foreach_non_finite_check_and_unscale")
def unscale(grads: list[Value], found_inf: Value, inv_scale: Value) -> list[Value | list[Value]]:
    """Each gradient times ``inv_scale``; and ``found_inf``, set to 1 if any of their elements was not finite."""
    scaled, bad = [], hlo.constant(False, torch.bool)
    for grad in grads:
        x = hlo.convert(grad, compute_dtype(grad.dtype))
        bad = hlo.or_(bad, hlo.reduce_one(~hlo.is_finite(x), False, range(x.ndim), hlo.or_))
        factor = hlo.convert(hlo.reshape(inv_scale, ()), x.dtype)
        scaled.append(hlo.convert(x * hlo.broadcast_to(factor, x.shape), grad.dtype))
    return [scaled, hlo.select(bad, hlo.full_like(found_inf, 1.0), found_inf)]


@lower("_amp_update_scale")
def update_scale(
    scale: Value, tracker: Value, found_inf: Value, growth: Scalar, backoff: Scalar, interval: int
) -> list[Value]:
    """The scale shrinks after a step with an infinity, and grows after ``interval`` steps in a row without one."""
    bad = hlo.compare(hlo.reshape(found_inf, scale.shape), 0.0, "NE")
    count = tracker + 1
    full = hlo.compare(count, interval, "EQ")
    grown = scale * as_value(growth, scale.dtype, scale.shape)
    grows = hlo.and_(hlo.reshape(full, scale.shape), hlo.is_finite(grown))
    shrunk = scale * as_value(backoff, scale.dtype, scale.shape)
    restart = hlo.or_(hlo.reshape(bad, tracker.shape), full)
    return [
        hlo.select(bad, shrunk, hlo.select(grows, grown, scale)),
        hlo.select(restart, hlo.full_like(tracker, 0), count),
    ]
