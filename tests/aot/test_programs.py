"""What torch_tpu hands to libtpu is no worse than need be: one test for each cause that once made it so.

The programs are those for a TPU; the CPU plugin runs them where their numbers are in question.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.lowering.harness import FLAGS, client
from torch_tpu import aot


def text_of(function: Callable[..., Any], *args: Tensor) -> str:
    """The StableHLO without the places that it comes from."""
    return re.sub(r" loc\(.*", "", aot.trace(function, args).plan.text)


def numbers(function: Callable[..., Any], *args: Tensor) -> list[Tensor]:
    """The float results of the program for a TPU, run by the CPU plugin."""
    plan = aot.trace(function, args).plan
    inputs: list[np.ndarray] = []
    for operand in plan.operands:
        value = args[operand.index] if operand.kind == "base" else torch.tensor(0, dtype=operand.dtype)
        inputs.append(value.detach().numpy())
    made = client().compile(plan.text, FLAGS).run(inputs)
    return [torch.from_numpy(np.array(m, copy=True)) for m in made if np.asarray(m).dtype == np.float32]


def gradients(function: Callable[..., Tensor]) -> Callable[..., Sequence[Tensor]]:
    """The results and the gradients by the first argument of their sum of squares."""

    def both(x: Tensor, *rest: Tensor) -> Sequence[Tensor]:
        x = x.detach().requires_grad_()
        y = function(x, *rest)
        return y.detach(), *torch.autograd.grad(y.square().sum(), x)

    return both


# ---- attention ------------------------------------------------------------------------------------------------------
def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


def test_causal_attention_has_no_mask_tensor() -> None:
    q = torch.empty(2, 4, 128, 64, device="meta")
    for text in (text_of(causal, q, q, q), text_of(gradients(lambda q: causal(q, q, q)), q)):
        assert not re.search(r"%arg\d+: tensor<[^>]*xi1>", text)
        assert not re.search(r"constant dense<[^>]{16,}> : tensor<[^>]*xi1>", text)


def test_grouped_queries_do_not_repeat_keys() -> None:
    q, k = torch.empty(2, 8, 128, 64, device="meta"), torch.empty(2, 2, 128, 64, device="meta")
    for text in (text_of(causal, q, k, k), text_of(gradients(causal), q, k, k)):
        broadcasts = [line for line in text.splitlines() if "broadcast_in_dim" in line]
        assert not any(re.search(r"\(tensor<2x2x128x64x", line) for line in broadcasts)


def test_nothing_stands_between_the_scores_maximum_and_its_use() -> None:
    q = torch.empty(2, 4, 128, 64, device="meta")
    lines = text_of(causal, q, q, q).splitlines()
    # The mask's select apart, there is none: of rows without keys the maximum is finite.
    assert sum("stablehlo.select" in line for line in lines) == 1


def test_a_training_step_keeps_the_weights_of_attention() -> None:
    """Scores, output and four gradients: the scores are not computed again, nor is the sum's logarithm."""
    q = torch.empty(2, 4, 128, 64, device="meta")

    def step(q: Tensor, k: Tensor, v: Tensor) -> Sequence[Tensor]:
        q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
        return torch.autograd.grad(causal(q, k, v).square().sum(), (q, k, v))

    text = text_of(step, q, q, q)
    assert text.count("stablehlo.dot_general") == 6 and text.count("stablehlo.exponential") == 1


@pytest.mark.parametrize("groups", [4, 2])
def test_attention_for_a_tpu_gives_the_numbers(groups: int) -> None:
    q, k, v = torch.randn(2, 4, 16, 8), torch.randn(2, groups, 16, 8), torch.randn(2, groups, 16, 8)
    function = gradients(causal)
    torch.testing.assert_close(numbers(function, q, k, v), list(function(q, k, v)), rtol=1e-4, atol=1e-4)


def test_rows_without_keys_are_zero() -> None:
    q = torch.randn(1, 2, 4, 8)
    mask = torch.tensor([[True] * 4, [False] * 4, [True, False] * 2, [True] * 4])
    function = gradients(lambda q, mask: F.scaled_dot_product_attention(q, q, q, attn_mask=mask))
    got = numbers(function, q, mask)
    assert got[0][0, :, 1].abs().max() == 0
    torch.testing.assert_close(got, list(function(q, mask)), rtol=1e-4, atol=1e-4)


# ---- products -------------------------------------------------------------------------------------------------------
def test_products_of_bfloat16_give_bfloat16() -> None:
    """XLA fuses what feeds a product only if the product is not rounded by an operation of its own."""
    x = torch.empty(64, 128, dtype=torch.bfloat16, device="meta")
    dots = [line for line in text_of(lambda x: x @ x.t(), x).splitlines() if "dot_general" in line]
    assert len(dots) == 1 and dots[0].endswith("-> (tensor<64x64xbf16>)")


def test_linear_layers_keep_the_dimensions_of_their_rows() -> None:
    """To merge batch and place, which may be apart in memory, would cost a copy on either side of the product."""
    x, w, b = (torch.empty(*n, dtype=torch.bfloat16, device="meta") for n in ((4, 32, 64), (128, 64), (128,)))

    def step(x: Tensor, w: Tensor, b: Tensor) -> Sequence[Tensor]:
        x, w, b = (t.detach().requires_grad_() for t in (x, w, b))
        return torch.autograd.grad(F.linear(x, w, b).square().sum(), (x, w, b))

    lines = text_of(step, x, w, b).splitlines()
    assert not any(re.search(r"tensor<128x", line) for line in lines if "dot_general" in line and "4x32" not in line)
    sums = [line for line in lines if "dimensions = array" in line and line.endswith("-> (tensor<128xf32>)")]
    assert len(sums) == 1 and "tensor<4x32x128xf32>" in sums[0]


def test_linear_layers_for_a_tpu_give_the_numbers() -> None:
    x, w, b = torch.randn(2, 3, 4), torch.randn(5, 4), torch.randn(5)

    def step(x: Tensor, w: Tensor, b: Tensor) -> Sequence[Tensor]:
        x, w, b = (t.detach().requires_grad_() for t in (x, w, b))
        y = F.linear(x, w, b)
        return y.detach(), *torch.autograd.grad(y.square().sum(), (x, w, b))

    torch.testing.assert_close(numbers(step, x, w, b), list(step(x, w, b)), rtol=1e-5, atol=1e-5)


def test_sums_of_bfloat16_stay_bfloat16() -> None:
    """A float32 copy of an operand would be kept for all who read it. Twice the product would be rounded twice."""
    x = torch.empty(64, 128, dtype=torch.bfloat16, device="meta")
    assert "f32" not in text_of(lambda x: (x + x) * x - x, x)
    assert "f32" in text_of(lambda x: torch.add(x, x, alpha=2), x)
    assert "f32" in text_of(lambda x: x * 0.1, x)


# ---- cross-entropy --------------------------------------------------------------------------------------------------
def cross_entropy(x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    x = x.detach().requires_grad_()
    loss = F.cross_entropy(x.float(), target)
    return loss.detach(), torch.autograd.grad(loss, x)[0]


def test_cross_entropy_reads_the_logits_as_often_as_it_must() -> None:
    """The maximum, the sum of exponentials, the chosen logit: the sum of the gradients is known, not computed."""
    x, target = torch.empty(64, 512, device="meta"), torch.empty(64, dtype=torch.int64, device="meta")
    reductions = re.findall(r"dimensions = array<i64: 1>} : \(tensor<64x512xf32>", text_of(cross_entropy, x, target))
    assert len(reductions) == 3


def test_cross_entropy_has_no_second_copy_of_the_logits() -> None:
    rows, classes, width = 4096, 8192, 256

    def head(x: Tensor, w: Tensor, target: Tensor) -> Sequence[Tensor]:
        x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
        loss = F.cross_entropy(F.linear(x, w).float(), target)
        return loss.detach(), *torch.autograd.grad(loss, (x, w))

    x, w = (torch.empty(n, width, dtype=torch.bfloat16, device="meta") for n in (rows, classes))
    made = aot.compile(head, (x, w, torch.empty(rows, dtype=torch.int64, device="meta")), topology="v6e")
    assert made.estimates[0].memory.temporaries < 1.2 * rows * classes * 2


@pytest.mark.parametrize("ignored", [False, True])
def test_cross_entropy_for_a_tpu_gives_the_numbers(ignored: bool) -> None:
    x, target = torch.randn(12, 9), torch.randint(9, (12,))
    if ignored:
        target[::3] = -100
    expected = [*cross_entropy(x, target)]
    torch.testing.assert_close(numbers(cross_entropy, x, target), expected, rtol=1e-5, atol=1e-6)


# ---- pooling --------------------------------------------------------------------------------------------------------
def pooled(x: Tensor) -> Tensor:
    return F.max_pool2d(x, 3, 2, 1)


def test_maxima_are_found_without_their_positions() -> None:
    x = torch.empty(2, 4, 16, 16, device="meta")
    text = text_of(gradients(pooled), x)
    assert "select_and_scatter" in text and not re.search(r"stablehlo.pad", text)


@pytest.mark.parametrize("values", ["random", "equal", "nan"])
def test_max_pool_for_a_tpu_gives_the_numbers(values: str) -> None:
    x = torch.randn(2, 3, 9, 8)
    if values == "equal":
        x = x.round().clamp(-1, 1)
    if values == "nan":
        x[:, :, 4, 3:5] = float("nan")
    function = gradients(pooled)
    torch.testing.assert_close(numbers(function, x), list(function(x)), equal_nan=True)
