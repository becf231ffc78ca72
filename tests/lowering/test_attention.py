"""Attention: forward and backward against CPU PyTorch's math, dropout against its own mask."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from tests.lowering.harness import check, run

aten = torch.ops.aten
FORWARD = aten._scaled_dot_product_fused_attention_overrideable.default
BACKWARD = aten._scaled_dot_product_fused_attention_overrideable_backward.default
ALL = [True] * 4

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "causal, more keys": {"causal": True, "length": 9},
    "grouped": {"kv_heads": 2},
    "one key head": {"kv_heads": 1, "causal": True},
    "bias": {"bias": (5, 7)},
    "bias per batch": {"bias": (2, 1, 5, 7)},
    "bias, one row": {"bias": (2, 4, 1, 7)},
    "scale and value width": {"scale": 0.3, "value_width": 6},
    "float64": {"dtype": torch.float64},
    "bfloat16": {"dtype": torch.bfloat16, "tolerance": 5e-2},
    "float16": {"dtype": torch.float16, "tolerance": 5e-3, "causal": True},
}


@pytest.mark.parametrize("name", CASES)
def test_attention(name: str) -> None:
    torch.manual_seed(0)
    case = {
        "dtype": torch.float32, "kv_heads": 4, "length": 5, "bias": None, "causal": False, "scale": None,
        "value_width": 8, "tolerance": 1e-4, **CASES[name],
    }  # fmt: skip
    make = lambda *s: torch.randn(s).to(case["dtype"]).requires_grad_()  # noqa: E731
    q, k, v = (
        make(2, 4, case["length"], 8),
        make(2, case["kv_heads"], 7, 8),
        make(2, case["kv_heads"], 7, case["value_width"]),
    )
    leaves, bias = [q, k, v], None
    if case["bias"] is not None:
        bias = torch.randn(case["bias"]).to(case["dtype"])
        if case["bias"][-2] > 1:
            bias[..., 0, :] = -math.inf  # a row that sees nothing
        leaves.append(bias.requires_grad_())
    causal, options = case["causal"], {} if case["scale"] is None else {"scale": case["scale"]}
    expected = scaled_dot_product_attention(q, k, v, bias, 0.0, causal, enable_gqa=True, **options)
    grad = torch.randn_like(expected)
    gradients = torch.autograd.grad(expected, leaves, grad)
    close = {"rtol": case["tolerance"], "atol": case["tolerance"]}
    plain = [t.detach() for t in (q, k, v)]
    hidden = None if bias is None else bias.detach()
    out = run(FORWARD, *plain, hidden, 0.0, causal, **options)[0]
    torch.testing.assert_close(out[0], expected.detach(), **close)
    assert out[4:6] == [case["length"], 7]
    back = run(BACKWARD, grad, *plain, hidden, ALL, *out[:8][:6], 0.0, causal, *out[6:8], **options)[0]
    for got, want in zip(back, gradients, strict=False):
        torch.testing.assert_close(got, want, **close)


@pytest.mark.parametrize(("keys", "values"), [(2, 4), (4, 2), (1, 2), (2, 2)])
def test_keys_and_values_may_have_other_numbers_of_heads(keys: int, values: int) -> None:
    made = [torch.randn(2, 4, 5, 8), torch.randn(2, keys, 7, 8), torch.randn(2, values, 7, 6)]
    results = []
    for device in ("cpu", "tpu"):
        leaves = [t.detach().to(device).requires_grad_() for t in made]
        with torch.tpu.precision(torch.tpu.Precision.HIGHEST):
            out = scaled_dot_product_attention(*leaves, enable_gqa=True)
            out.pow(2).sum().backward()
        results.append([out.detach().cpu(), *(t.grad.cpu() for t in leaves)])
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)


def test_dropout_and_its_gradient() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 2, 16, 8), torch.randn(2, 2, 64, 8), torch.eye(64).expand(2, 2, 64, 64).contiguous()
    out = run(FORWARD, q, k, v, None, 0.25, seed=(5, 3))[0]
    weights = torch.softmax(q @ k.mT / 8**0.5, -1)
    keep = out[0] != 0  # the value is the identity: the output is the weights
    assert abs(keep.float().mean() - 0.75) < 0.05
    torch.testing.assert_close(out[0], torch.where(keep, weights / 0.75, 0), rtol=1e-4, atol=1e-5)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    expected = (torch.softmax(leaves[0] @ leaves[1].mT / 8**0.5, -1) * keep / 0.75) @ leaves[2]
    grad = torch.randn_like(expected)
    back = run(BACKWARD, grad, q, k, v, None, ALL, *out[:6], 0.25, False, *out[6:8], seed=(9, 9))[0]
    torch.testing.assert_close(back[:3], list(torch.autograd.grad(expected, leaves, grad)), rtol=1e-4, atol=1e-4)


def test_composite_attention() -> None:
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 4, 7, 8)
    check(aten.scaled_dot_product_attention.default, q, k, k, rtol=1e-4, atol=1e-5)
    check(aten.scaled_dot_product_attention.default, q, k, k, torch.rand(5, 7) > 0.5, rtol=1e-4, atol=1e-5)


WIDTH, HEADS, HIDDEN = 16, 4, 32
PADDING = torch.zeros(2, 5, dtype=torch.bool).index_fill(1, torch.tensor([3, 4]), True)
FUTURE = torch.ones(5, 5).triu(1).bool()


def projections() -> tuple[torch.Tensor, ...]:
    return torch.randn(3 * WIDTH, WIDTH) * 0.3, torch.randn(3 * WIDTH), torch.randn(WIDTH, WIDTH), torch.randn(WIDTH)


@pytest.mark.parametrize(("mask", "kind"), [(None, None), (PADDING, 1), (FUTURE, 0)], ids=["none", "padding", "source"])
def test_multi_head_attention(mask: torch.Tensor | None, kind: int | None) -> None:
    torch.manual_seed(0)
    x, weights = torch.randn(2, 5, WIDTH), projections()
    op, head = aten._native_multi_head_attention.default, (x, x, x, WIDTH, HEADS)
    for average in (True, False):
        check(op, *head, *weights, mask, True, average, kind, rtol=1e-4, atol=1e-4)
    got = run(op, *head, *weights, mask, False, True, kind)[0]
    torch.testing.assert_close(got[0], op(*head, *weights, mask, False, True, kind)[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("use_gelu", [False, True])
def test_transformer_encoder_layer(use_gelu: bool, norm_first: bool) -> None:
    torch.manual_seed(0)
    norms = [torch.randn(WIDTH) for _ in range(4)]
    forward = (torch.randn(HIDDEN, WIDTH), torch.randn(HIDDEN), torch.randn(WIDTH, HIDDEN), torch.randn(WIDTH))
    args = (torch.randn(2, 5, WIDTH), WIDTH, HEADS, *projections(), use_gelu, norm_first, 1e-5, *norms, *forward)
    check(aten._transformer_encoder_layer_fwd.default, *args, rtol=1e-4, atol=1e-4)
