"""Nested tensors of jagged layout, as far as attention and models that pack their sequences use them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support import matmul_precision

aten = torch.ops.aten
OFFSETS = torch.tensor([0, 2, 7, 10])
LENGTHS = (2, 5, 3)


@pytest.fixture(autouse=True)
def _exact() -> Any:
    with matmul_precision("highest"):
        yield


def rows(*shape: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(n, *shape, generator=generator) for n in LENGTHS]


def jagged(device: str, *, requires_grad: bool = False) -> Tensor:
    return torch.nested.nested_tensor(
        [r.to(device) for r in rows(8)], layout=torch.jagged, device=device, requires_grad=requires_grad
    )


def flat(x: Any) -> list[Any]:
    """The dense tensors on the CPU that a result is made of."""
    if isinstance(x, tuple | list):
        return [y for item in x for y in flat(item)]
    if not isinstance(x, Tensor):
        return [x]
    return [t.detach().cpu() for t in x.unbind()] if x.is_nested else [x.detach().cpu()]


def check(function: Callable[[str], Any]) -> None:
    """``function`` gives the same on both devices."""
    torch.testing.assert_close(flat(function("tpu")), flat(function("cpu")))


WEIGHT, BIAS = torch.linspace(-1, 1, 48).view(6, 8), torch.linspace(-1, 1, 6)
OPERATIONS: dict[str, Callable[[Tensor], Any]] = {
    "itself": lambda x: x,
    "values and offsets": lambda x: (x.values(), x.offsets()),
    "shape": lambda x: (x.ndim, x.size(0), x.size(2)),
    "arithmetic": lambda x: (x + x) * 2 - x / 3 + 1,
    "broadcast": lambda x: x * torch.arange(8.0, device=x.device),
    "activation": lambda x: F.gelu(x).relu(),
    "where": lambda x: torch.where(x > 0, x, torch.zeros_like(x)),
    "linear": lambda x: F.linear(x, WEIGHT.to(x.device), BIAS.to(x.device)),
    "matmul": lambda x: x @ WEIGHT.t().to(x.device),
    "layer_norm": lambda x: F.layer_norm(x, (8,)),
    "softmax": lambda x: torch.softmax(x, -1),
    "reductions": lambda x: (x.sum(-1), x.sum(1), x.mean(1), x.amax(1)),
    "padded": lambda x: (x.to_padded_tensor(5.0), torch.nested.to_padded_tensor(x, 0.0, (3, 7, 8))),
    "heads": lambda x: x.unflatten(-1, (2, 4)).transpose(1, 2).transpose(1, 2),
    "chunk": lambda x: x.chunk(2, -1)[1],
    "dtype": lambda x: x.bfloat16().float(),
    "clone and detach": lambda x: (x.clone(), x.detach()),
    "to the CPU and back": lambda x: x.cpu().to(x.device),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operation(name: str) -> None:
    check(lambda device: OPERATIONS[name](jagged(device)))


def test_ways_to_make_one() -> None:
    check(lambda d: torch.nested.as_nested_tensor([r.to(d) for r in rows(8)], layout=torch.jagged))
    check(lambda d: torch.nested.nested_tensor_from_jagged(torch.cat(rows(8)).to(d), OFFSETS.to(d)))
    check(lambda d: torch.nested.narrow(torch.ones(3, 8).to(d), 1, 0, torch.tensor(LENGTHS).to(d), layout=torch.jagged))
    check(
        lambda d: torch.nested.masked_select(torch.arange(12.0).view(3, 4).to(d), (torch.ones(3, 4) > 0).tril().to(d))
    )
    assert jagged("cpu").to("tpu").device.type == "tpu" and "NestedTensor" in repr(jagged("tpu"))


@pytest.mark.parametrize("length", [3, 5, 7])
def test_padding_and_joining(length: int) -> None:
    """Cut, exact and roomy."""
    padded = lambda d: aten._jagged_to_padded_dense_forward(torch.cat(rows(8)).to(d), [OFFSETS.to(d)], [length], 1.5)  # noqa: E731
    check(padded)
    total = None if length == 5 else 10
    check(
        lambda d: aten._padded_dense_to_jagged_forward(padded(d)[:, :5], [OFFSETS.to(d)], total) if length >= 5 else 0
    )


def test_gradients() -> None:
    def run(device: str) -> list[Tensor]:
        x = jagged(device, requires_grad=True)
        w = WEIGHT.clone().to(device).requires_grad_()
        (torch.nested.to_padded_tensor(F.linear(x, w), 0.0) ** 2).sum().backward()
        return [x.grad, w.grad]

    check(run)


def attention(device: str, is_causal: bool, grad: bool) -> Any:
    x = jagged(device, requires_grad=grad)
    q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in (x, x * 0.5, x * 0.3))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal).transpose(1, 2).flatten(-2)
    if not grad:
        return out
    (out.values() ** 2).sum().backward()
    return x.grad


@pytest.mark.parametrize("grad", [False, True])
def test_attention_is_the_cpus(grad: bool) -> None:
    check(lambda device: attention(device, False, grad))


@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_is_that_of_each_row(is_causal: bool) -> None:
    """The CPU has no causal form for jagged tensors."""
    out = attention("tpu", is_causal, False)
    for got, x in zip(out.unbind(), rows(8), strict=True):
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(0, 1) for t in (x, x * 0.5, x * 0.3))
        want = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal).transpose(0, 1).flatten(-2)
        torch.testing.assert_close(got.cpu(), want)


def test_causal_attention_has_gradients() -> None:
    want = []
    for x in rows(8):
        x.requires_grad_()
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(0, 1) for t in (x, x * 0.5, x * 0.3))
        (F.scaled_dot_product_attention(q, k, v, is_causal=True) ** 2).sum().backward()
        want.append(x.grad)
    torch.testing.assert_close(flat(attention("tpu", True, True)), want)


def test_strided_layout_is_refused() -> None:
    """With advice, and without ending the process, gradients or not."""
    for requires_grad in (False, True):
        leaves = [r.to("tpu").requires_grad_(requires_grad) for r in rows(8)]
        with pytest.raises(NotImplementedError, match=r"layout=torch\.jagged"):
            torch.nested.to_padded_tensor(torch.nested.as_nested_tensor(leaves), 0.0)
