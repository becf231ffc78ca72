"""The fused optimizer steps: one program updates every parameter and its state.

The arithmetic is that of ATen's fused kernels (``aten/src/ATen/native/cpu/Fused*Kernel.cpp``). Hyperparameters are run-
time operands, since schedulers change any of them; what is static is what decides which terms exist.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from torch_tpu.lowering.common import Scalar, as_value, compute_dtype
from torch_tpu.lowering.registry import lower
from torch_tpu.stablehlo import Value
from torch_tpu.stablehlo import ops as hlo

Values = list[Value]


def _spread(x: Value, like: Value) -> Value:
    """A number, in whatever shape it came, over ``like``."""
    return hlo.broadcast_to(hlo.convert(hlo.reshape(x, ()), like.dtype), like.shape)


def _complement(x: Scalar, dtype: torch.dtype) -> Value:
    """``1 - x``, without what float32 would lose of an ``x`` near one."""
    return hlo.convert(1.0 - as_value(x, torch.float64), dtype)


def _step_all(
    update: Callable[..., Sequence[Value]], lists: Sequence[Values], grads: Values, *, maximize: bool,
    scale: Value | None, found_inf: Value | None,
) -> list[Values]:  # fmt: skip
    """Applies ``update`` to each parameter and its state, and leaves all as it was where an infinity was found.

    Args:
        update: From (gradient, parameter, state...) in the compute dtype to the new (parameter, state...); further
        arguments
            may follow in ``lists`` as long as ``update`` does not return them.
        lists: Parameters, then states; a list may be empty.
        grads: Gradients, multiplied by ``scale``.
        maximize: Follow the gradient upwards.
        scale: What the gradients must be divided by, or None.
        found_inf: 1 if a gradient is not finite, or None.

    Returns:
        The new parameters, the unscaled gradients, the new states.
    """
    news: list[Values] = []
    lists = [v for v in lists if v]
    for grad, *olds in zip(grads, *lists, strict=True):
        c = torch.float64 if torch.float64 in {v.dtype for v in olds} else compute_dtype(olds[0].dtype)
        g = hlo.convert(grad, c)
        unscaled = grad
        if scale is not None:
            g = g / _spread(scale, g)
            unscaled = hlo.convert(g, grad.dtype)
        new = update(-g if maximize else g, *(hlo.convert(v, c) for v in olds))
        pairs = [(grad, unscaled), *((old, hlo.convert(v, old.dtype)) for old, v in zip(olds, new, strict=False))]
        if found_inf is not None:
            skip = hlo.compare(hlo.reshape(found_inf, ()), 1.0, "EQ")
            pairs = [(old, old if v is old else hlo.select(skip, old, v)) for old, v in pairs]
        news.append([v for _, v in pairs])
    grads_new, params, *states = ([list(v) for v in zip(*news, strict=True)]) if news else [[], []]
    return [params, grads_new, *states]


# ---- Adam -----------------------------------------------------------------------------------------------------------
def _bias(one_minus_beta: Value, step: Value) -> Value:
    """``1 - beta^step``."""
    return -hlo.exponential_minus_one(step * hlo.log_plus_one(-one_minus_beta))


def _lerp(x: Value, end: Value, weight: Value) -> Value:
    step = end - x
    return hlo.select(hlo.abs_(weight) < 0.5, x + weight * step, end - step * (1.0 - weight))


def _adam(decoupled: bool) -> Callable[..., list[Values]]:
    """Adam (Kingma and Ba 2015); ``decoupled`` decays weights apart from the gradient (Loshchilov and Hutter 2019)."""

    def rule(
        params: Values, grads: Values, exp_avgs: Values, exp_avg_sqs: Values, max_exp_avg_sqs: Values, steps: Values, *,
        lr: Scalar, beta1: Scalar, beta2: Scalar, weight_decay: Scalar, eps: Scalar, amsgrad: bool, maximize: bool,
        grad_scale: Value | None = None, found_inf: Value | None = None,
    ) -> list[Values]:  # fmt: skip
        def update(g: Value, param: Value, avg: Value, square: Value, *rest: Value) -> list[Value]:
            c, shape = g.dtype, g.shape
            rate, decay = as_value(lr, c), as_value(weight_decay, c)
            one, two = _complement(beta1, c), _complement(beta2, c)
            step = hlo.reshape(rest[-1], ())
            if decoupled:
                param = param - param * _spread(rate * decay, param)
            else:
                g = g + param * _spread(decay, param)
            avg = _lerp(avg, g, _spread(one, g))
            square = square * as_value(beta2, c, shape) + g * g * _spread(two, g)
            largest = [hlo.maximum(rest[0], square)] if amsgrad else []
            root = hlo.sqrt(largest[0] if amsgrad else square) / _spread(hlo.sqrt(_bias(two, step)), g)
            size = _spread(rate / _bias(one, step), g)
            return [param - size * avg / (root + as_value(eps, c, shape)), avg, square, *largest]

        lists = [params, exp_avgs, exp_avg_sqs, max_exp_avg_sqs if amsgrad else [], steps]
        made = _step_all(update, lists, grads, maximize=maximize, scale=grad_scale, found_inf=found_inf)
        return made if amsgrad else [*made, max_exp_avg_sqs]

    return rule


lower("_fused_adam", "_fused_adam.tensor_lr")(_adam(False))
lower("_fused_adamw", "_fused_adamw.tensor_lr")(_adam(True))


# ---- SGD and Adagrad ------------------------------------------------------------------------------------------------
@lower("_fused_sgd", "_fused_sgd.tensor_lr")
def sgd(
    params: Values, grads: Values, buffers: Values, *, weight_decay: Scalar, momentum: Scalar, lr: Scalar,
    dampening: Scalar, nesterov: bool, maximize: bool, is_first_step: bool, grad_scale: Value | None = None,
    found_inf: Value | None = None,
) -> list[Values]:  # fmt: skip
    """Gradient descent; with momentum where there are buffers (Sutskever et al. 2013)."""

    def update(g: Value, param: Value, *buffer: Value) -> list[Value]:
        c, shape = g.dtype, g.shape
        g = g + param * as_value(weight_decay, c, shape)
        new = []
        if buffer:
            m = as_value(momentum, c, shape)
            b = g if is_first_step else buffer[0] * m + g * _spread(_complement(dampening, c), g)
            g, new = g + b * m if nesterov else b, [b]
        return [param - g * as_value(lr, c, shape), *new]

    return _step_all(update, [params, buffers], grads, maximize=maximize, scale=grad_scale, found_inf=found_inf)


def _adagrad(returns_steps: bool) -> Callable[..., list[Values]]:
    """Adagrad (Duchi, Hazan and Singer 2011). One schema has the steps among the results, though they do not change."""

    def rule(
        params: Values, grads: Values, sums: Values, steps: Values, *, lr: Scalar, lr_decay: Scalar,
        weight_decay: Scalar, eps: Scalar, maximize: bool, grad_scale: Value | None = None,
        found_inf: Value | None = None,
    ) -> list[Values]:  # fmt: skip
        def update(g: Value, param: Value, total: Value, step: Value) -> list[Value]:
            c, shape = g.dtype, g.shape
            g = g + param * as_value(weight_decay, c, shape)
            rate = as_value(lr, c) / (1.0 + (hlo.reshape(step, ()) - 1.0) * as_value(lr_decay, c))
            total = total + g * g
            return [param - _spread(rate, g) * g / (hlo.sqrt(total) + as_value(eps, c, shape)), total]

        flags = {"maximize": maximize, "scale": grad_scale, "found_inf": found_inf}
        made = _step_all(update, [params, sums, steps], grads, **flags)  # type: ignore[arg-type]
        return [*made, steps] if returns_steps else made

    return rule


lower("_fused_adagrad")(_adagrad(True))
lower("_fused_adagrad.tensor_lr")(_adagrad(False))
