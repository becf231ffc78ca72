"""Distributions whose number of random draws depends on the data, and the gradients of their samples.

Rejection samplers run all elements in one ``while`` loop until each has accepted. Iteration ``i`` draws from the
generator's counter at ``offset + i * blocks``; the draw reserves the blocks of every iteration that the loop may run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_tpu.lowering.common import compute_dtype, tracer
from torch_tpu.lowering.random import digits, exponential_unit, gauss_of, odd_multiple, open_unit, unit
from torch_tpu.lowering.registry import lower
from torch_tpu.lowering.scan import scan
from torch_tpu.stablehlo import Type, Value
from torch_tpu.stablehlo import ops as hlo

_ITERATIONS = 1024  # every sampler here accepts with probability 1/2 or more, or ends after a few dozen steps
Draws = list[Value]
Step = Callable[[list[Value], Draws], tuple[Value, list[Value]]]


def _accept(
    parameters: Sequence[Value], carried: Sequence[Value], active: Value, draws: int, step: Step
) -> list[Value]:
    """Repeats ``step`` until every active element is done, and returns what is carried.

    Args:
        parameters: Passed to each step unchanged, before what is carried.
        carried: Values that a step computes anew; an element keeps its values once it is done.
        active: Where there is anything to do.
        draws: The number of random integers per element that a step uses, with one bit less than the dtype's digits.
        step: From parameters and carried values, and the draws, to (done, new carried values).
    """
    shape, dtype = active.shape, carried[0].dtype
    if 0 in shape:
        return list(carried)
    word = torch.uint64 if dtype == torch.float64 else torch.uint32
    blocks = -(-draws * math.prod(shape) * word.itemsize // 16)
    state = tracer().random_state(blocks * _ITERATIONS)
    n = len(parameters)

    def condition(count: Value, state: Value, active: Value, *rest: Value) -> Value:
        return hlo.and_(count < _ITERATIONS, hlo.reduce_one(active, False, range(active.ndim), hlo.or_))

    def body(count: Value, state: Value, active: Value, *rest: Value) -> list[Value]:
        bits = hlo.rng_bit_generator(state, (draws, *shape), word)[1]
        bits = hlo.shift_right_logical(bits, 8 * word.itemsize - digits(dtype) + 1)
        each = [hlo.reshape(hlo.slice_dim(bits, 0, i, i + 1), shape) for i in range(draws)]
        done, new = step(list(rest), each)
        kept = [hlo.select(active, a, b) for a, b in zip(new, rest[n:], strict=True)]
        state = state + hlo.constant_list([0, blocks], torch.uint64)
        return [count + 1, state, hlo.and_(active, ~done), *rest[:n], *kept]

    carries = [hlo.constant(0, torch.int32), state, active, *parameters, *carried]
    return list(hlo.while_(carries, condition, body)[3 + n :])


def _stirling(k: Value) -> Value:
    """``log(k!)`` less Stirling's formula: within 3e-4 at 1 and to rounding from 10 on; tabulated at 0."""
    m = hlo.maximum(k, 1.0)
    r = 1.0 / (m * m)
    series = (1 / 12 - (1 / 360 - (1 / 1260 - r * (1 / 1680)) * r) * r) / m
    return hlo.select(k < 1.0, hlo.full_like(k, 0.08106146679532726), series)


# ---- counts ---------------------------------------------------------------------------------------------------------
@lower("poisson")
def poisson(rate: Value, generator: Any = None) -> Value:
    """Below a rate of 10, arrivals are counted (Knuth); above, transformed rejection (PTRS, Hörmann 1993)."""
    c = compute_dtype(rate.dtype)
    lam = hlo.convert(rate, c)
    tracer().check(~(lam >= 0.0), "invalid Poisson rate, expected rate to be non-negative")
    zero = hlo.full_like(lam, 0.0)
    sure = ~(lam > 0.0)  # nothing to draw for 0 and NaN

    def step(values: list[Value], draws: Draws) -> tuple[Value, list[Value]]:
        lam, k, time = values
        u, v = (odd_multiple(d, c) for d in draws)
        later = time - hlo.log(v)
        arrived = ~(later > lam)
        big = lam >= 10.0
        proposal, accepted = _ptrs(hlo.maximum(lam, 10.0), u - 0.5, v)
        count = hlo.select(arrived, k + 1.0, k)
        return hlo.select(big, accepted, ~arrived), [hlo.select(big, proposal, count), later]

    k, _ = _accept([lam], [zero, zero], ~sure, 2, step)
    return hlo.convert(hlo.select(sure, lam, k), rate.dtype)


def _ptrs(lam: Value, u: Value, v: Value) -> tuple[Value, Value]:
    """One proposal of the Poisson sampler, and whether it is accepted."""
    b = 0.931 + 2.53 * hlo.sqrt(lam)
    a = -0.059 + 0.02483 * b
    room = 0.5 - hlo.abs_(u)
    k = hlo.floor((2.0 * a / room + b) * u + lam + 0.43)
    inverse_alpha = 1.1239 + 1.1328 / (b - 3.4)
    quick = hlo.and_(room >= 0.07, v <= 0.9277 - 3.6224 / (b - 2.0))
    outside = hlo.or_(k < 0.0, hlo.and_(room < 0.013, v > room))
    left = hlo.log(v * inverse_alpha / (a / (room * room) + b))
    return k, hlo.or_(quick, hlo.and_(~outside, left <= _log_poisson(k, lam)))


def _log_poisson(k: Value, lam: Value) -> Value:
    """The log probability of ``k``, by Loader's deviance (2000), which does not cancel for large rates."""
    x = (k - lam) / lam
    deviance = lam * ((1.0 + x) * hlo.log_plus_one(hlo.maximum(x, -0.999999)) - x)
    dense = -deviance - 0.5 * hlo.log(hlo.maximum(k, 1.0) * (2 * math.pi)) - _stirling(k)
    return hlo.select(k < 1.0, -lam, dense)


@lower("binomial")
def binomial(count: Value, prob: Value, generator: Any = None, *, result: list[Type]) -> Value:
    """Below a mean of 10, waits are summed (Devroye 1986); above, transformed rejection (BTRS, Hörmann 1993)."""
    kind = result[0]
    c = compute_dtype(kind.dtype)
    n, p = (hlo.broadcast_to(hlo.convert(x, c), kind.shape) for x in (count, prob))
    few = hlo.minimum(p, 1.0 - p)  # successes or failures, whichever are fewer
    zero = hlo.full_like(n, 0.0)
    active = hlo.and_(n > 0.0, few > 0.0)

    def step(values: list[Value], draws: Draws) -> tuple[Value, list[Value]]:
        n, q, k, used = values
        u, v = (odd_multiple(d, c) for d in draws)
        wait = hlo.maximum(hlo.ceil(hlo.log(u) / hlo.log_plus_one(-q)), 1.0)
        later = used + wait
        fits = later <= n
        big = n * q >= 10.0
        proposal, accepted = _btrs(hlo.maximum(n, 20.0), hlo.select(big, q, hlo.full_like(q, 0.5)), u - 0.5, v)
        return hlo.select(big, accepted, ~fits), [hlo.select(big, proposal, hlo.select(fits, k + 1.0, k)), later]

    k, _ = _accept([n, few], [zero, zero], active, 2, step)
    k = hlo.select(hlo.compare(few, p, "EQ"), k, n - k)
    invalid = hlo.compare(n + p, n + p, "NE")
    return hlo.convert(hlo.select(invalid, n + p, hlo.select(n > 0.0, k, zero)), kind.dtype)


def _btrs(n: Value, p: Value, u: Value, v: Value) -> tuple[Value, Value]:
    """One proposal of the binomial sampler for ``n p >= 10`` and ``p <= 1/2``, and whether it is accepted."""
    spread = hlo.sqrt(n * p * (1.0 - p))
    b = 1.15 + 2.53 * spread
    a = -0.0873 + 0.0248 * b + 0.01 * p
    room = 0.5 - hlo.abs_(u)
    k = hlo.floor((2.0 * a / room + b) * u + n * p + 0.5)
    quick = hlo.and_(room >= 0.07, v <= 0.92 - 4.2 / b)
    outside = hlo.or_(k < 0.0, k > n)
    j = hlo.clamp(hlo.constant(0.0, n.dtype, n.shape), k, n)
    odds = p / (1.0 - p)
    mode = hlo.floor((n + 1.0) * p)
    bound = (
        (mode + 0.5) * hlo.log((mode + 1.0) / (odds * (n - mode + 1.0)))
        + (n + 1.0) * hlo.log((n - mode + 1.0) / (n - j + 1.0))
        + (j + 0.5) * hlo.log(odds * (n - j + 1.0) / (j + 1.0))
        + _tail(mode) + _tail(n - mode) - _tail(j) - _tail(n - j)
    )  # fmt: skip
    left = hlo.log(v * (2.83 + 5.1 / b) * spread / (a / (room * room) + b))
    return k, hlo.or_(quick, hlo.and_(~outside, left <= bound))


def _tail(k: Value) -> Value:
    """Stirling's remainder in Hörmann's form: ``log(k!) - [(k + 1/2) log(k + 1) - (k + 1) + log(2 pi) / 2]``."""
    return _stirling(k + 1.0)


# ---- gamma and Dirichlet --------------------------------------------------------------------------------------------
def _gamma(alpha: Value) -> tuple[Value, Value]:
    """A standard gamma sample as ``(x, log(y))`` with the sample ``x y`` (Marsaglia and Tsang 2000).

    For shapes below one, ``y = u^(1/alpha)`` boosts a sample of shape ``alpha + 1``; it may be too small for the dtype.
    """
    c = alpha.dtype
    boost = hlo.log(open_unit(alpha.shape, c)) / alpha
    small = alpha < 1.0
    boost = hlo.select(small, boost, hlo.full_like(boost, 0.0))
    d = hlo.select(small, alpha + 1.0, alpha) - 1 / 3

    def step(values: list[Value], draws: Draws) -> tuple[Value, list[Value]]:
        d, _ = values
        half = hlo.shift_left(draws[0], 1)
        x, u = gauss_of(half, c), odd_multiple(draws[1], c)
        y = 1.0 + x * hlo.rsqrt(9.0 * d)
        v = y * y * y
        safe = hlo.select(y > 0.0, v, hlo.full_like(v, 1.0))
        accepted = hlo.and_(y > 0.0, hlo.log(u) < 0.5 * x * x + d * (1.0 - safe + hlo.log(safe)))
        return accepted, [v]

    (v,) = _accept([d], [hlo.full_like(d, 1.0)], alpha > 0.0, 2, step)
    return d * v, boost


@lower("_standard_gamma")
def standard_gamma(alpha: Value, generator: Any = None) -> Value:
    x, log_y = _gamma(hlo.convert(alpha, compute_dtype(alpha.dtype)))
    tiny = torch.finfo(alpha.dtype).tiny
    return hlo.convert(hlo.maximum(x * hlo.exponential(log_y), tiny), alpha.dtype)


@lower("_sample_dirichlet")
def sample_dirichlet(alpha: Value, generator: Any = None) -> Value:
    """Gamma samples over their sum, with logarithms, since samples of a small shape underflow."""
    x, log_y = _gamma(hlo.convert(alpha, compute_dtype(alpha.dtype)))
    logits = hlo.log(x) + log_y
    last = [alpha.ndim - 1]

    def over_last(v: Value, init: float, combine: Callable[[Value, Value], Value]) -> Value:
        return hlo.broadcast_to(hlo.expand_dims(hlo.reduce_one(v, init, last, combine), [-1]), alpha.shape)

    weights = hlo.exponential(logits - over_last(logits, float("-inf"), hlo.maximum))
    share = weights / over_last(weights, 0.0, hlo.add)
    info = torch.finfo(alpha.dtype)
    return hlo.convert(hlo.clamp(info.tiny, share, 1.0 - info.eps / 2), alpha.dtype)


# ---- categories -----------------------------------------------------------------------------------------------------
@lower("multinomial")
def multinomial(weights: Value, count: int, replacement: bool = False, *, result: list[Type]) -> Value:
    """Rows of category indices.

    Without replacement, or for one sample, those of the ``count`` largest ratios of weight to an exponential number
    (Efraimidis and Spirakis 2006), as in ATen; else by the inverse of the distribution function.
    """
    if not weights.dtype.is_floating_point:
        raise RuntimeError(f"multinomial only supports floating-point dtypes for input, got: {_NAMES[weights.dtype]}")
    categories = weights.shape[-1]
    if count > categories and not replacement:
        raise RuntimeError("cannot sample n_sample > prob_dist.size(-1) samples without replacement")
    p = hlo.convert(weights, compute_dtype(weights.dtype))
    _check_weights(p)
    if 0 in result[0].shape:
        return hlo.constant(0, torch.int64, result[0].shape)
    rows = hlo.reshape(p, (p.numel // categories, categories))
    if not replacement or count == 1:
        chosen = hlo.top_k(rows / exponential_unit(rows.shape, p.dtype), count)[1]
    else:
        chosen = _inverse(rows, count)
    return hlo.convert(hlo.reshape(chosen, result[0].shape), torch.int64)


def _check_weights(p: Value) -> None:
    """Reports weights that are negative, infinite or NaN, and rows that sum to zero: they have no category to give."""
    total = hlo.reduce_one(p, 0.0, [p.ndim - 1], hlo.add)
    bad = hlo.reduce_one(~hlo.and_(p >= 0.0, hlo.is_finite(p)), False, [p.ndim - 1], hlo.or_)
    tracer().check(bad, "probability tensor contains either `inf`, `nan` or element < 0")
    tracer().check(~(total > 0.0), "invalid multinomial distribution (sum of probabilities <= 0)")


_NAMES = {
    torch.int64: "Long", torch.int32: "Int", torch.int16: "Short", torch.int8: "Char", torch.uint8: "Byte",
    torch.bool: "Bool",
}  # fmt: skip


def _inverse(p: Value, count: int) -> Value:
    """For each of ``count`` uniform numbers a row, how many partial sums do not exceed its share of the total."""
    rows, categories = p.shape
    sums = scan(p, 1, 0.0, hlo.add)
    total = hlo.slice_dim(sums, 1, categories - 1, categories)
    goal = unit((rows, count), p.dtype) * hlo.broadcast_to(total, (rows, count))
    found = hlo.constant(0, torch.int32, (rows, count))
    step = 1 << max(categories.bit_length() - 1, 0)
    while step:  # a binary search, from the largest power of two down
        there = found + step
        at = hlo.clamp(0, there - 1, categories - 1)
        reached = hlo.gather(
            sums, hlo.reshape(at, (rows, count, 1)), offset_dims=[], collapsed_dims=[1], index_map=[1],
            slice_sizes=[1, 1], operand_batching_dims=[0], indices_batching_dims=[0],
        )  # fmt: skip
        found = hlo.select(hlo.and_(there < categories, reached <= goal), there, found)
        step //= 2
    return found
