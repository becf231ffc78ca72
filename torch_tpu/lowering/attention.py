"""Scaled dot-product attention, ``nn.MultiheadAttention`` and ``nn.TransformerEncoderLayer`` without gradients.

Scores, softmax and sums are float32 for the half types. With grouped queries (more query heads than key heads) each
group counts as rows of its key head, so that keys and values are never repeated.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_tpu.lowering.common import Scalar, as_value, compute_dtype, for_cpu, tracer
from torch_tpu.lowering.precision import product
from torch_tpu.lowering.reduction import largest, total_of_stored
from torch_tpu.lowering.registry import lower
from torch_tpu.stablehlo import Shape, Value
from torch_tpu.stablehlo import ops as hlo

_NEGATIVE_INFINITY = float("-inf")


def _product(x: Value, y: Value, over: int, dtype: torch.dtype | None = None) -> Value:
    """Sums the last dimension of ``x`` with dimension ``over`` of ``y``, for each batch and head; unrounded."""
    dtype = dtype or compute_dtype(x.dtype)
    return product(x, y, contract=((x.ndim - 1,), (over,)), batch=((0, 1), (0, 1)), dtype=dtype)


def _over_rows(x: Value, y: Value) -> Value:
    """Sums the rows of folded ``x`` and ``y``, for each batch and head; unrounded."""
    rows = range(2, x.ndim - 1)
    return product(x, y, contract=(rows, rows), batch=((0, 1), (0, 1)), dtype=compute_dtype(x.dtype))


def _sum(v: Value) -> Value:
    """Of the last dimension, which stays as a size of one."""
    return total_of_stored(v, [v.ndim - 1])


def _exponentials(s: Value) -> Value:
    """``exp(s - top)`` for the greatest score of each row; a row of nothing but -inf gives zeros.

    ``top`` is finite because the maximum starts from a finite number. A select behind it would do the same, but keep
    XLA from fusing the product, the maximum and the exponentials: on TPU the scores would be computed twice.
    """
    top = largest(s, [s.ndim - 1], keepdim=True, least=torch.finfo(s.dtype).min)
    return hlo.exponential(s - hlo.broadcast_to(top, s.shape))


@dataclass(frozen=True)
class Dropout:
    """Drops attention weights with probability ``p``; ``state`` is the generator's (seed, offset), ui64[2]."""

    p: Scalar
    state: Value

    def __call__(self, x: Value) -> Value:
        bits = hlo.rng_bit_generator(self.state, x.shape, torch.uint32)[1]
        uniform = hlo.convert(hlo.shift_right_logical(bits, 8), torch.float32) * 2.0**-24
        p = as_value(self.p, torch.float32)
        keep = hlo.compare(uniform, hlo.broadcast_to(p, x.shape), "GE")
        return hlo.select(keep, x * as_value(hlo.divide(1.0, 1.0 - p), x.dtype, x.shape), 0)


@dataclass(frozen=True)
class Weights:
    """A fact about the logarithm of the sums: the softmax that they belong to, before dropout."""

    value: Value


@dataclass(frozen=True)
class Attention:
    """One attention problem with queries as :func:`fold` gives them, keys and values ``[B, H, S, E]``."""

    query: Value
    key: Value
    value: Value
    bias: Value | None
    scale: Scalar
    causal: bool
    full: Shape  # of the scores: [B, G H, L, S]

    @staticmethod
    def of(query: Value, key: Value, value: Value, bias: Value | None, scale: Scalar | None, causal: bool) -> Attention:
        query, key, value = (_four(v) for v in (query, key, value))
        groups = max(key.shape[1], value.shape[1])
        key, value = _repeated(key, groups), _repeated(value, groups)
        batch, heads, length, width = query.shape
        full = (batch, heads, length, key.shape[2])
        scale = 1 / math.sqrt(width) if scale is None else scale
        return Attention(fold(query, key.shape[1]), key, value, bias, scale, causal, full)

    def scores(self) -> Value:
        s = _product(self.query, self.key, 3)
        s = hlo.reshape(self.scaled(s), self.full)
        if self.bias is not None:
            s = self.masked(s, self.bias)
        if self.causal:
            i, j = (hlo.iota(self.full, d, torch.int32) for d in (2, 3))
            s = hlo.select(hlo.compare(j, i, "LE"), s, _NEGATIVE_INFINITY)
        return s

    def scaled(self, x: Value) -> Value:
        return x * as_value(self.scale, x.dtype, x.shape)

    def masked(self, s: Value, bias: Value) -> Value:
        if bias.dtype == torch.bool:  # true takes part
            return hlo.select(hlo.broadcast_to(bias, s.shape), s, _NEGATIVE_INFINITY)
        return s + hlo.broadcast_to(hlo.convert(bias, s.dtype), s.shape)

    def folded(self, x: Value) -> Value:
        return fold(x, self.key.shape[1])


def _four(x: Value) -> Value:
    return hlo.expand_dims(x, [0]) if x.ndim == 3 else x


def _repeated(x: Value, heads: int) -> Value:
    """Each head as often as it takes: keys may have fewer heads than values, or values fewer than keys."""
    batch, own, *rest = x.shape
    if own in (0, heads):
        return x
    spread = hlo.broadcast_in_dim(x, (batch, own, heads // own, *rest), [0, 1, 3, 4])
    return hlo.reshape(spread, (batch, heads, *rest))


def _summed(x: Value, heads: int) -> Value:
    """The gradient of :func:`_repeated`."""
    batch, repeated, *rest = x.shape
    if heads in (0, repeated):
        return x
    return hlo.reduce_one(hlo.reshape(x, (batch, heads, repeated // heads, *rest)), 0, [2], hlo.add)


def fold(x: Value, heads: int) -> Value:
    """``[B, G H, L, E]`` as ``[B, H, G, L, E]``, of which a CPU's kernels want ``[B, H, G L, E]``.

    To make one dimension of two costs a TPU a copy where the two are apart in memory, as heads and rows are.
    """
    batch, all_heads, length, width = x.shape
    if for_cpu() or heads in (0, all_heads):
        return hlo.reshape(x, (batch, heads, all_heads * length // max(heads, 1), width))
    parts = (heads, all_heads // heads)
    if x.transpose_of is not None and x.transpose_of[1] == (0, 2, 1, 3):  # a product takes the operand of a transpose
        return hlo.transpose(hlo.reshape(x.transpose_of[0], (batch, length, *parts, width)), (0, 2, 3, 1, 4))
    return hlo.reshape(x, (batch, *parts, length, width))


def _attention_meta(query: Tensor, key: Tensor, value: Tensor, bias: Any = None, *rest: Any, **named: Any) -> Any:
    """PyTorch's, but row-major where the CPU has no fused kernel: with dropout, or rows that are apart in memory."""
    op = torch.ops.aten._scaled_dot_product_fused_attention_overrideable
    out, *others = op(query, key, value, bias, *rest, **named)
    dropout = rest[0] if rest else named.get("dropout_p", 0.0)
    if dropout != 0 or any(t.stride(-1) != 1 for t in (query, key, value)):
        out = torch.empty_like(out, memory_format=torch.contiguous_format)
    return out, *others


@lower("_scaled_dot_product_fused_attention_overrideable", meta=_attention_meta)
def attention(
    query: Value, key: Value, value: Value, bias: Value | None = None, dropout_p: Scalar = 0.0, causal: bool = False,
    return_mask: bool = False, *, scale: Scalar | None = None,
) -> list[Value | None]:  # fmt: skip
    """Output, and the log of each row's sum of exponentials for the backward pass. A row without keys gives zeros."""
    a = Attention.of(query, key, value, bias, scale, causal)
    s = a.scores()
    e = _exponentials(s)
    mass = hlo.maximum(_sum(e), 1)  # the greatest score adds exp(0) = 1
    # Another maximum than that of the exponentials, which XLA would not fuse with them if it had another use.
    top = hlo.maximum(largest(s, [s.ndim - 1], keepdim=True), torch.finfo(s.dtype).min)
    logsumexp = hlo.convert(hlo.squeeze(top + hlo.log(mass), [-1]), torch.float32)
    weights = hlo.divide(e, hlo.broadcast_to(mass, e.shape))
    logsumexp.fact = Weights(weights)
    zero = hlo.constant(0, torch.int64)
    seed, offset = zero, zero
    if not (isinstance(dropout_p, int | float) and dropout_p == 0):
        dropout = Dropout(dropout_p, _reserve(weights.shape))
        weights = dropout(weights)
        seed, offset = (
            hlo.bitcast_convert(hlo.reshape(hlo.slice_dim(dropout.state, 0, i, i + 1), ()), torch.int64)
            for i in range(2)
        )
    out = _product(a.folded(hlo.convert(weights, value.dtype)), a.value, 2, query.dtype)
    out = hlo.reshape(out, (*query.shape[:-1], value.shape[-1]))
    return [out, logsumexp, None, None, None, None, seed, offset, None]


def _reserve(shape: Shape) -> Value:
    """The generator's state for ``shape`` 32-bit numbers, which it then skips."""
    trace = tracer()
    state = trace.operand("rng", 0, (2,), torch.uint64)
    if trace.rng_used:
        state = state + hlo.constant_list([0, trace.rng_used], torch.uint64)
    trace.random_bits(shape, torch.uint32)
    return state


def _state(seed: Value, offset: Value) -> Value:
    parts = [hlo.reshape(hlo.bitcast_convert(v, torch.uint64), (1,)) for v in (seed, offset)]
    return hlo.concatenate(parts, 0)


@lower("_scaled_dot_product_fused_attention_overrideable_backward")
def attention_backward(
    grad: Value, query: Value, key: Value, value: Value, bias: Value | None, mask: list[bool], out: Value,
    logsumexp: Value, cum_q: None, cum_k: None, max_q: int, max_k: int, dropout_p: Scalar, causal: bool, seed: Value,
    offset: Value, *, scale: Scalar | None = None,
) -> list[Value | None]:  # fmt: skip
    """The weights are those of the forward pass if the program has it.

    Else they are computed again from ``logsumexp`` (Dao et al. 2022, arXiv:2205.14135, appendix B).
    """
    a = Attention.of(query, key, value, bias, scale, causal)
    go = a.folded(_four(grad))
    if isinstance(logsumexp.fact, Weights) and not for_cpu():
        weights = logsumexp.fact.value
    else:
        s = a.scores()
        lse = hlo.expand_dims(hlo.convert(logsumexp, s.dtype), [-1])
        weights = hlo.exponential(s - hlo.broadcast_to(lse, s.shape))
    by_weight = hlo.reshape(_product(go, a.value, 3), a.full)
    dropped = weights
    if not (isinstance(dropout_p, int | float) and dropout_p == 0):
        dropout = Dropout(dropout_p, _state(seed, offset))
        dropped, by_weight = dropout(weights), dropout(by_weight)
    mean = _sum(hlo.convert(_four(grad), weights.dtype) * hlo.convert(_four(out), weights.dtype))
    by_score = weights * (by_weight - hlo.broadcast_to(mean, weights.shape))
    narrow = a.folded(hlo.convert(by_score, query.dtype))
    finish = lambda x, like: hlo.reshape(hlo.convert(x, like.dtype), like.shape)  # noqa: E731
    per_head = lambda x, like: finish(_summed(x, _four(like).shape[1]), like)  # noqa: E731
    grads: list[Value | None] = [None] * 4
    if mask[0]:
        grads[0] = finish(a.scaled(_product(narrow, a.key, 2)), query)
    if mask[1]:
        grads[1] = per_head(a.scaled(_over_rows(narrow, a.query)), key)
    if mask[2]:
        grads[2] = per_head(_over_rows(a.folded(hlo.convert(dropped, value.dtype)), go), value)
    if mask[3] and bias is not None:
        grads[3] = hlo.convert(_sum_to(by_score, bias.shape), bias.dtype)
    return grads


def _sum_to(x: Value, shape: Shape) -> Value:
    """The gradient of broadcasting from ``shape``."""
    padded = (1,) * (x.ndim - len(shape)) + shape
    dims = [i for i, (n, m) in enumerate(zip(x.shape, padded, strict=True)) if m == 1 and n != 1]
    return hlo.reshape(hlo.reduce_one(x, 0, dims, hlo.add) if dims else x, shape)


# ---- nn.MultiheadAttention and nn.TransformerEncoderLayer without gradients ----------------------------------------
SOURCE_MASK, PADDING_MASK = 0, 1


def _linear(x: Value, weight: Value, bias: Value | None) -> Value:
    y = product(x, weight, contract=((x.ndim - 1,), (1,)), dtype=compute_dtype(x.dtype))
    if bias is not None:
        y = y + hlo.broadcast_to(hlo.convert(bias, y.dtype), y.shape)
    return hlo.convert(y, x.dtype)


def _heads(x: Value, heads: int) -> Value:
    batch, length, width = x.shape
    return hlo.transpose(hlo.reshape(x, (batch, length, heads, width // heads)), (0, 2, 1, 3))


def _hidden(mask: Value, mask_type: int | None, shape: Shape) -> Value:
    """Where a mask of ``nn.MultiheadAttention`` (true hides) hides scores of ``shape``."""
    mask = hlo.convert(mask, torch.bool)
    if mask_type == PADDING_MASK:
        return hlo.broadcast_in_dim(mask, shape, [0, 3])
    return hlo.broadcast_to(mask, shape)


@lower("_native_multi_head_attention")
def multi_head_attention(
    query: Value, key: Value, value: Value, width: int, heads: int, qkv_weight: Value, qkv_bias: Value,
    out_weight: Value, out_bias: Value, mask: Value | None = None, need_weights: bool = True, average: bool = True,
    mask_type: int | None = None,
) -> list[Value | None]:  # fmt: skip
    """Projection, attention and output projection; the weights ``[B, L, S]`` or ``[B, H, L, S]`` if asked for."""
    part = lambda v, i: hlo.slice_dim(v, 0, i * width, (i + 1) * width)  # noqa: E731
    q, k, v = (
        _heads(_linear(x, part(qkv_weight, i), part(qkv_bias, i)), heads) for i, x in enumerate((query, key, value))
    )
    a = Attention.of(q, k, v, None, None, False)
    s = a.scores()
    if mask is not None:
        s = hlo.select(_hidden(mask, mask_type, s.shape), _NEGATIVE_INFINITY, s)
    e = _exponentials(s)
    weights = hlo.convert(hlo.divide(e, hlo.broadcast_to(_sum(e), e.shape)), query.dtype)
    context = _product(weights, v, 2, query.dtype)
    context = hlo.reshape(hlo.transpose(context, (0, 2, 1, 3)), query.shape)
    out = _linear(context, out_weight, out_bias)
    if not need_weights:
        return [out, None]
    if average:
        wide = hlo.convert(weights, compute_dtype(weights.dtype))
        weights = hlo.convert(hlo.divide(hlo.reduce_one(wide, 0, [1], hlo.add), heads), query.dtype)
    return [out, weights]


def _layer_norm(x: Value, weight: Value, bias: Value, eps: Scalar) -> Value:
    wide = hlo.convert(x, compute_dtype(x.dtype))
    centered = wide - hlo.broadcast_to(_sum(wide) * (1 / x.shape[-1]), x.shape)
    variance = _sum(centered * centered) * (1 / x.shape[-1])
    y = centered * hlo.broadcast_to(hlo.rsqrt(variance + as_value(eps, variance.dtype, variance.shape)), x.shape)
    weight, bias = (hlo.broadcast_to(hlo.convert(v, y.dtype), y.shape) for v in (weight, bias))
    return hlo.convert(y * weight + bias, x.dtype)


def _gelu(x: Value) -> Value:
    wide = hlo.convert(x, compute_dtype(x.dtype))
    return hlo.convert(wide * 0.5 * (hlo.erf(wide * 0.5**0.5) + 1), x.dtype)


@lower("_transformer_encoder_layer_fwd")
def transformer_encoder_layer(
    x: Value, width: int, heads: int, qkv_weight: Value, qkv_bias: Value, out_weight: Value, out_bias: Value,
    use_gelu: bool, norm_first: bool, eps: Scalar, weight_1: Value, bias_1: Value, weight_2: Value, bias_2: Value,
    ffn_weight_1: Value, ffn_bias_1: Value, ffn_weight_2: Value, ffn_bias_2: Value, mask: Value | None = None,
    mask_type: int | None = None,
) -> Value:  # fmt: skip
    def attend(y: Value) -> Value:
        projections = (qkv_weight, qkv_bias, out_weight, out_bias)
        out = multi_head_attention(y, y, y, width, heads, *projections, mask, False, True, mask_type)[0]
        assert out is not None
        return out

    def feed_forward(y: Value) -> Value:
        hidden = _linear(y, ffn_weight_1, ffn_bias_1)
        return _linear(_gelu(hidden) if use_gelu else hlo.maximum(hidden, 0), ffn_weight_2, ffn_bias_2)

    for block, weight, bias in ((attend, weight_1, bias_1), (feed_forward, weight_2, bias_2)):
        norm = functools.partial(_layer_norm, weight=weight, bias=bias, eps=eps)
        x = x + block(norm(x)) if norm_first else norm(x + block(x))
    return x
