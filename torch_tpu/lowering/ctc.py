"""Connectionist temporal classification (Graves et al., 2006): the forward-backward recursion in log space.

A target ``l`` of S labels becomes ``l'`` = blank, l1, blank, l2, ..., blank with U = 2S + 1 places. ``alpha[t, u]`` is
the log-probability of all prefixes that stand at ``l'[u]`` after time ``t``, ``beta[t, u]`` that of all suffixes from
there; both include time ``t``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torch_tpu.lowering.reduction import total
from torch_tpu.lowering.registry import lower
from torch_tpu.lowering.sort import take_along
from torch_tpu.stablehlo import Type, Value
from torch_tpu.stablehlo import ops as hlo

_NEVER = float("-inf")
_INDEX = torch.int32
Lengths = Sequence[int] | Value


def _lengths(lengths: Lengths) -> Value:
    return hlo.convert(lengths, _INDEX) if isinstance(lengths, Value) else hlo.constant_list(list(lengths), _INDEX)


def _columns(v: Value, shape: tuple[int, int]) -> Value:
    """One number per sample, for all places."""
    return hlo.broadcast_in_dim(v, shape, [0])


def _padded_targets(targets: Value, lengths: Value, width: int) -> Value:
    """Targets as [N, width]: one-dimensional targets stand one after the other."""
    if targets.ndim == 2:
        return hlo.slice_dim(targets, 1, 0, width)
    n = lengths.shape[0]
    earlier = hlo.compare(hlo.iota((n, n), 1, _INDEX), hlo.iota((n, n), 0, _INDEX), "LT")
    starts = total(hlo.select(earlier, hlo.broadcast_in_dim(lengths, (n, n), [1]), 0), [1])
    place = hlo.iota((n, width), 1, _INDEX) + _columns(starts, (n, width))
    place = hlo.reshape(hlo.minimum(place, max(targets.numel - 1, 0)), (n * width,))
    return hlo.reshape(take_along(targets, place, 0), (n, width))


def _labels(targets: Value, lengths: Value, places: int, blank: int) -> Value:
    """``l'`` of every sample, int32 [N, U]; places past a target are blank."""
    n, width = lengths.shape[0], places // 2
    if width == 0:
        return hlo.constant(blank, _INDEX, (n, 1))
    labels = _padded_targets(hlo.convert(targets, _INDEX), lengths, width)
    used = hlo.iota((n, width), 1, _INDEX) < _columns(lengths, (n, width))
    return hlo.pad(hlo.select(used, labels, blank), blank, [0, 1], [0, 1], [0, 1])


def _shift(x: Value, by: int, fill: float) -> Value:
    """``y[:, u] = x[:, u - by]``."""
    return hlo.pad(x, fill, [0, by], [0, -by])


def _log_sum(*terms: Value) -> Value:
    top = terms[0]
    for term in terms[1:]:
        top = hlo.maximum(top, term)
    base = hlo.select(hlo.is_finite(top), top, 0)
    sum_ = hlo.full_like(base, 0)
    for term in terms:
        sum_ = sum_ + hlo.exponential(term - base)
    return hlo.log(sum_) + base


def _recursion(emitted: Value, skip: Value, first: Value, entry: Value, step: int) -> Value:
    """Alpha (``step`` 1) or beta (-1) at all times, [T, N, U].

    Args:
        emitted: Log-probability of ``l'[u]`` at every time, [T, N, U].
        skip: Whether a path may come from two places away, bool [N, U].
        first: The time at which the recursion of a sample begins, int32 [N, U].
        entry: Log-probabilities just before ``first``: 0 at the place where paths begin, [N, U].
        step: Direction of time and of places.
    """
    times, n, u = emitted.shape

    def body(
        i: Value, last: Value, done: Value, emitted: Value, skip: Value, first: Value, entry: Value
    ) -> list[Value]:
        t = i if step == 1 else times - 1 - i
        origin = [t, hlo.constant(0, _INDEX), hlo.constant(0, _INDEX)]
        now = hlo.reshape(hlo.dynamic_slice(emitted, origin, (1, n, u)), (n, u))
        last = hlo.select(hlo.compare(first, hlo.broadcast_to(t, first.shape), "EQ"), entry, last)
        jump = hlo.select(skip, _shift(last, 2 * step, _NEVER), _NEVER)
        last = _log_sum(last, _shift(last, step, _NEVER), jump) + now
        done = hlo.dynamic_update_slice(done, hlo.reshape(last, (1, n, u)), origin)
        return [i + 1, last, done, emitted, skip, first, entry]

    never = hlo.full_like(entry, _NEVER), hlo.full_like(emitted, _NEVER)
    start = [hlo.constant(0, _INDEX), *never, emitted, skip, first, entry]
    return hlo.while_(start, lambda i, *_: hlo.compare(i, times, "LT"), body)[2]


def _emitted(log_probs: Value, labels: Value) -> Value:
    times, n, _ = log_probs.shape
    return take_along(log_probs, hlo.broadcast_in_dim(labels, (times, n, labels.shape[1]), [1, 2]), 2)


def _entry(like: Value, place: Value) -> Value:
    here = hlo.compare(hlo.iota(like.shape, 1, _INDEX), place, "EQ")
    return hlo.select(here, hlo.full_like(like, 0), _NEVER)


def _skips(labels: Value, step: int) -> Value:
    return hlo.compare(labels, _shift(labels, 2 * step, -1), "NE")


@lower("_ctc_loss", "_ctc_loss.Tensor")
def ctc_loss(
    log_probs: Value, targets: Value, input_lengths: Lengths, target_lengths: Lengths, blank: int = 0,
    zero_infinity: bool = False, *, result: list[Type],
) -> list[Value]:  # fmt: skip
    """(negative log-likelihood [N], alpha [N, T, U])."""
    inputs, lengths = _lengths(input_lengths), _lengths(target_lengths)
    n = log_probs.shape[1]
    u = result[1].shape[2]
    labels = _labels(targets, lengths, u, blank)
    emitted = _emitted(log_probs, labels)
    plain = hlo.constant(0, emitted.dtype, (n, u))
    zeros = hlo.constant(0, _INDEX, (n, u))
    alpha = _recursion(emitted, _skips(labels, 1), zeros, _entry(plain, zeros), 1)
    final = hlo.broadcast_in_dim(hlo.maximum(inputs - 1, 0), (1, n, u), [1])
    final = hlo.reshape(take_along(alpha, final, 0), (n, u))
    none = hlo.compare(inputs, 0, "EQ")  # no time: only the empty target is possible
    final = hlo.select(_columns(none, (n, u)), _entry(plain, zeros), final)
    place = hlo.iota((n, u), 1, _INDEX)
    end = _columns(lengths * 2, (n, u))
    ends = hlo.compare(place, end, "EQ") | hlo.compare(place, end - 1, "EQ")
    final = hlo.select(ends, final, _NEVER)
    top = hlo.reduce_one(final, _NEVER, [1], hlo.maximum)
    base = hlo.select(hlo.is_finite(top), top, 0)
    nll = -(hlo.log(total(hlo.exponential(final - _columns(base, (n, u))), [1])) + base)
    return [nll, hlo.transpose(alpha, [1, 0, 2])]


@lower("_ctc_loss_backward", "_ctc_loss_backward.Tensor")
def ctc_loss_backward(
    grad: Value, log_probs: Value, targets: Value, input_lengths: Lengths, target_lengths: Lengths, nll: Value,
    log_alpha: Value, blank: int, zero_infinity: bool = False, *, result: list[Type],
) -> Value:  # fmt: skip
    """``grad * (p - posterior)``; a class's posterior sums ``exp(alpha + beta - emitted + nll)`` over its places."""
    inputs, lengths = _lengths(input_lengths), _lengths(target_lengths)
    times, n, c = log_probs.shape
    u = log_alpha.shape[2]
    labels = _labels(targets, lengths, u, blank)
    emitted = _emitted(log_probs, labels)
    entry = _entry(hlo.constant(0, emitted.dtype, (n, u)), _columns(lengths * 2, (n, u)))
    beta = _recursion(emitted, _skips(labels, -1), _columns(inputs - 1, (n, u)), entry, -1)
    alpha = hlo.transpose(log_alpha, [1, 0, 2])
    samples = lambda v: hlo.broadcast_in_dim(v, (times, n, c), [1])  # noqa: E731
    log_posterior = alpha + beta - emitted + hlo.broadcast_in_dim(nll, alpha.shape, [1])
    possible = hlo.is_finite(alpha) & hlo.is_finite(beta)
    posterior = hlo.select(possible, hlo.exponential(log_posterior), 0)
    hot = hlo.compare(hlo.broadcast_in_dim(labels, (n, u, c), [0, 1]), hlo.iota((n, u, c), 2, _INDEX), "EQ")
    by_class = hlo.dot_general(
        posterior, hlo.convert(hot, posterior.dtype), contract=([2], [1]), batch=([1], [0]), precision="HIGHEST"
    )
    gradient = hlo.exponential(log_probs) - hlo.transpose(by_class, [1, 0, 2])
    impossible = samples(hlo.compare(nll, float("inf"), "EQ"))
    gradient = hlo.select(impossible, 0 if zero_infinity else float("nan"), gradient * samples(grad))
    inside = hlo.iota((times, n, c), 0, _INDEX) < samples(inputs)
    return hlo.convert(hlo.select(inside, gradient, 0), result[0].dtype)
