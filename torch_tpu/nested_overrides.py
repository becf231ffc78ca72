"""Attention over jagged tensors.

``torch.nested._internal.sdpa`` (pytorch/pytorch#114164) knows CUDA's kernels by name and has no hook for other devices
(intel/torch-xpu-ops#3546); without them it needs nested tensors of strided layout. Here the rows are padded, attended
to under a mask, and joined again.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


class _Padded(torch.autograd.Function):
    """Rows ``[total, D]`` as ``[B, length, D]``, zeros behind each; PyTorch has no derivative for either way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, offsets: Tensor, length: int) -> Tensor:
        ctx.save_for_backward(offsets)
        ctx.total = rows.shape[0]
        return aten._jagged_to_padded_dense_forward(rows, [offsets], [length])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _Joined.apply(grad, *ctx.saved_tensors, ctx.total), None, None


class _Joined(torch.autograd.Function):
    """The rows of ``[B, L, D]`` side by side again."""

    @staticmethod
    def forward(ctx: Any, dense: Tensor, offsets: Tensor, total: int) -> Tensor:
        ctx.save_for_backward(offsets)
        ctx.length = dense.shape[1]
        return aten._padded_dense_to_jagged_forward(dense, [offsets], total)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _Padded.apply(grad, *ctx.saved_tensors, ctx.length), None, None


def _padded(x: Any) -> Tensor:
    """A jagged ``[B, H, j, D]`` as ``[B, H, L, D]``, zeros behind each row."""
    rows = x.transpose(1, 2)
    if rows.lengths() is not None:
        raise NotImplementedError("Attention over jagged tensors with holes is not supported; call contiguous().")
    dense = _Padded.apply(rows.values().flatten(1), rows.offsets(), x._get_max_seqlen())
    return dense.unflatten(2, rows.values().shape[1:]).transpose(1, 2)


def _mask(query: Any, key: Any, is_causal: bool) -> Tensor:
    """``[B, 1, Lq or 1, Lk]``: the places of each row of keys, up to the query's own if causal."""
    places = torch.arange(key._get_max_seqlen(), device=key.device)
    mask = (places < key.offsets().diff()[:, None])[:, None, None]
    if is_causal:
        mask = mask & (places <= torch.arange(query._get_max_seqlen(), device=query.device)[:, None])
    return mask


def _attend(
    query: Any, key: Any, value: Any, attn_mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    from torch.nested._internal.nested_tensor import nested_view_from_values_offsets_lengths

    if attn_mask is not None:
        raise RuntimeError("Masks are not yet supported!")
    out = torch.nn.functional.scaled_dot_product_attention(
        _padded(query), _padded(key), _padded(value), _mask(query, key, is_causal), dropout_p, scale=scale,
        enable_gqa=enable_gqa,
    )  # fmt: skip
    rows = query.transpose(1, 2)
    flat = _Joined.apply(out.transpose(1, 2).flatten(2), rows.offsets(), rows.values().shape[0])
    joined = nested_view_from_values_offsets_lengths(
        flat.unflatten(1, (out.shape[1], out.shape[3])), rows.offsets(), None,
        min_seqlen=query._maybe_min_seqlen, max_seqlen=query._maybe_max_seqlen,
    )  # fmt: skip
    return joined.transpose(1, 2)


def install() -> None:
    """Sends attention over jagged tensors of the device here; others go where they went."""
    import torch.nested._internal.sdpa as upstream

    original = upstream.jagged_scaled_dot_product_attention

    @functools.wraps(original)
    def jagged_scaled_dot_product_attention(query: Any, *args: Any, **kwargs: Any) -> Any:
        on_device = query.device.type == "tpu" and query.is_nested and query._ragged_idx == 2
        return (_attend if on_device else original)(query, *args, **kwargs)

    upstream.jagged_scaled_dot_product_attention = jagged_scaled_dot_product_attention
    if (operators := sys.modules.get("torch.nested._internal.ops")) is not None:
        operators.jagged_scaled_dot_product_attention = jagged_scaled_dot_product_attention  # type: ignore[attr-defined]
