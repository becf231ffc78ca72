"""``flex_attention`` with score modifications and block masks, eager and compiled, against plain attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from tests.support import matmul_precision

L, HEADS, WIDTH = 128, 4, 16


@pytest.fixture(autouse=True)
def _exact() -> Iterator[None]:
    torch._dynamo.reset()
    with matmul_precision("highest"):
        yield


def _inputs(kv_heads: int = HEADS, batch: int = 2) -> list[torch.Tensor]:
    return [
        torch.randn(batch, heads, L, WIDTH, device="tpu", requires_grad=True) for heads in (HEADS, kv_heads, kv_heads)
    ]


def _close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got.detach().cpu(), want.detach().cpu(), rtol=1e-4, atol=1e-4)


def _agree(
    function: Callable[..., torch.Tensor], plain: Callable[..., torch.Tensor], inputs: list[torch.Tensor]
) -> None:
    got, want = function(*inputs), plain(*inputs)
    _close(got, want)
    for a, b in zip(
        torch.autograd.grad(got.square().sum(), inputs), torch.autograd.grad(want.square().sum(), inputs), strict=True
    ):
        _close(a, b)


def _positions() -> tuple[torch.Tensor, torch.Tensor]:
    i = torch.arange(L, device="tpu")
    return i[:, None], i[None]


@pytest.mark.parametrize("compiled", [False, True])
def test_a_relative_bias_with_a_causal_block_mask(compiled: bool) -> None:
    def bias(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return score + (i - j) * 0.1 * (h + 1)

    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, L, L, device="tpu")
    run = torch.compile(flex_attention, fullgraph=True) if compiled else flex_attention
    i, j = _positions()
    slopes = torch.arange(1, HEADS + 1, device="tpu")[:, None, None]
    plain_bias = ((i - j) * 0.1 * slopes).masked_fill(i < j, float("-inf"))
    _agree(
        lambda q, k, v: run(q, k, v, score_mod=bias, block_mask=mask),
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=plain_bias),
        _inputs(),
    )


def test_sliding_windows_and_documents() -> None:
    document = torch.arange(L, device="tpu") // 48

    def mask_mod(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (document[i] == document[j]) & (i - j < 20) & (i >= j)

    mask = create_block_mask(mask_mod, None, None, L, L, device="tpu")
    i, j = _positions()
    allowed = (document[:, None] == document[None]) & (i - j < 20) & (i >= j)
    run = torch.compile(flex_attention, fullgraph=True)
    _agree(
        lambda q, k, v: run(q, k, v, block_mask=mask),
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=allowed),
        _inputs(),
    )


def test_captured_tensors_have_gradients() -> None:
    table = torch.randn(HEADS, device="tpu", requires_grad=True)
    q, k, v = _inputs()
    run = torch.compile(
        lambda q, k, v, t: flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s.tanh() * t[h]), fullgraph=True
    )

    def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return ((q @ k.mT / WIDTH**0.5).tanh() * t[:, None, None]).softmax(-1) @ v

    _agree(run, plain, [q, k, v, table])


def test_grouped_queries_and_the_logarithm_of_the_sum() -> None:
    q, k, v = _inputs(kv_heads=2)

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return flex_attention(q, k, v, enable_gqa=True, return_aux=AuxRequest(lse=True))

    out, aux = torch.compile(run, fullgraph=True)(q, k, v)
    _close(out, F.scaled_dot_product_attention(q, k, v, enable_gqa=True))
    scores = q @ k.repeat_interleave(2, 1).mT / WIDTH**0.5
    _close(aux.lse, scores.logsumexp(-1))
