"""Autograd on device tensors: gradients, hooks, checkpoints, custom functions, and its errors, as on the CPU."""

from __future__ import annotations

import re
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.support import assert_same, matmul_precision, outcome


@pytest.fixture(autouse=True)
def exact_products():
    with matmul_precision("highest"):
        yield


FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "pointwise": lambda x: (x.sin() * x.exp() / (1 + x * x)).sum(),
    "reductions": lambda x: x.mean(0).var() + x.amax(1).sum() + x.logsumexp(0).sum(),
    "matmul": lambda x: (x @ x.t()).tanh().sum(),
    "views": lambda x: (x.t()[1:, ::2] * x[::2, 1:].t()).sum() + x.diagonal().prod() + x.unfold(1, 2, 1).square().sum(),
    "in-place on a view": lambda x: _write_row(x).square().sum(),
    "indexing": lambda x: x[torch.tensor([0, 2, 0], device=x.device)].square().sum() + x[x > 0.5].sum(),
    "softmax": lambda x: F.cross_entropy(x, torch.tensor([0, 1, 2, 3], device=x.device)),
    "cat and stack": lambda x: torch.cat([x, x * 2], 1).square().sum() + torch.stack([x, x.exp()]).prod(0).sum(),
    "expand": lambda x: (x[:, :1].expand(4, 3) * x[:1, :3]).sum(),
    "norms": lambda x: F.layer_norm(x, (4,)).pow(3).sum() + x.norm(),
    "where and clamp": lambda x: torch.where(x > 0.3, x * 2, x * x).clamp(max=1).sum(),
    "cumsum and sort": lambda x: (x.cumsum(1) * x.sort(0).values).sum(),
}


def _write_row(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    y[1].mul_(3)
    y[:, 0] = x[:, 1] ** 2
    return y


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_are_cpus(name: str) -> None:
    x = torch.linspace(0.1, 0.9, 16).view(4, 4)
    on_cpu, on_tpu = x.clone().requires_grad_(), x.tpu().requires_grad_()
    expected, actual = FUNCTIONS[name](on_cpu), FUNCTIONS[name](on_tpu)
    expected.backward()
    actual.backward()
    assert_same(actual, expected, rtol=1e-5, atol=1e-6)
    assert on_cpu.grad is not None and on_tpu.grad is not None
    assert_same(on_tpu.grad, on_cpu.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "function",
    [lambda x, w: torch.tanh(x @ w), lambda x, w: F.softmax(x @ w, 1), lambda x, w: (x[:, :2] * w[0, :2]).exp()],
)
def test_numerical_gradients_agree_twice(function: Callable) -> None:
    x = torch.rand(2, 3, dtype=torch.float64, device="tpu", requires_grad=True)
    w = torch.rand(3, 2, dtype=torch.float64, device="tpu", requires_grad=True)
    assert torch.autograd.gradcheck(function, (x, w))
    assert torch.autograd.gradgradcheck(function, (x, w))


def test_double_backward() -> None:
    x = torch.tensor([1.0, 2.0, 3.0], device="tpu", requires_grad=True)
    (first,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
    (third,) = torch.autograd.grad(second.sum(), x)
    assert first.tolist() == [3, 12, 27] and second.tolist() == [6, 12, 18] and third.tolist() == [6, 6, 6]


def test_jacobians_and_forward_mode() -> None:
    x = torch.tensor([1.0, 2.0], device="tpu")
    assert torch.autograd.functional.jacobian(lambda t: t**2, x).tolist() == [[2, 0], [0, 4]]
    assert torch.func.grad(lambda t: (t**3).sum())(x).tolist() == [3, 12]
    assert torch.func.vmap(lambda t: t * 2)(x).tolist() == [2, 4]
    assert torch.func.jvp(lambda t: t**2, (x,), (torch.ones_like(x),))[1].tolist() == [2, 4]
    assert torch.func.hessian(lambda t: (t**3).sum())(x).tolist() == [[6, 0], [0, 12]]


def test_gradients_accumulate_in_place() -> None:
    x = torch.ones(3, device="tpu", requires_grad=True)
    (x * 2).sum().backward()
    first = x.grad
    (x * 3).sum().backward()
    assert x.grad is first and first is not None and first.tolist() == [5, 5, 5]


def test_hooks_see_and_change_gradients() -> None:
    def run(device: str) -> list[Any]:
        seen: list[Any] = []
        x = torch.ones(2, device=device, requires_grad=True)
        x.register_hook(lambda g: seen.append(g.tolist()) or g * 10)
        x.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.tolist()))
        layer = nn.Linear(2, 1, bias=False).to(device)
        layer.weight.data.fill_(1)
        layer.register_forward_hook(lambda m, inputs, output: output * 2)
        layer.register_full_backward_hook(lambda m, grad_in, grad_out: seen.append(grad_out[0].item()))
        layer.register_full_backward_pre_hook(lambda m, grad_out: (grad_out[0] * 3,))
        layer(x).sum().backward()
        return seen

    assert run("tpu") == run("cpu") != []


def test_saved_tensors_can_be_packed_to_the_host() -> None:
    x = torch.arange(4.0, device="tpu", requires_grad=True)
    with torch.autograd.graph.save_on_cpu():
        y = (x * x).exp()
    y.sum().backward()
    z = torch.arange(4.0, requires_grad=True)
    (z * z).exp().sum().backward()
    assert x.grad is not None and z.grad is not None
    assert_same(x.grad, z.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_recomputes_the_same(reentrant: bool) -> None:
    block = nn.Sequential(nn.Linear(3, 8), nn.GELU(), nn.Linear(8, 3)).tpu()
    x = torch.rand(2, 3).tpu().requires_grad_()
    block(x).sum().backward()
    expected = [p.grad.clone() for p in [x, *block.parameters()] if p.grad is not None]
    for p in [x, *block.parameters()]:
        p.grad = None
    checkpoint(block, x, use_reentrant=reentrant).sum().backward()
    for a, b in zip([p.grad for p in [x, *block.parameters()]], expected, strict=True):
        assert a is not None and torch.equal(a, b)


def test_custom_functions() -> None:
    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, factor):
            ctx.factor = factor
            ctx.save_for_backward(x)
            return x * factor

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            assert x.is_tpu and grad.is_tpu
            return grad * ctx.factor, None

    x = torch.ones(3, device="tpu", requires_grad=True)
    Scale.apply(x, 4.0).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [4, 4, 4]


def test_gradients_cross_devices() -> None:
    x = torch.ones(3, requires_grad=True)
    (x.tpu() * 2).cpu().exp().sum().backward()
    assert x.grad is not None and x.grad.device.type == "cpu"
    torch.testing.assert_close(x.grad, 2 * torch.full((3,), 2.0).exp())


@pytest.mark.parametrize(
    "program",
    [
        lambda x: _change_saved(x),
        lambda x: x.add_(1),
        lambda x: x[0].add_(1),
        lambda x: (x * 2).sum().backward() or (s := (x * 2).exp().sum()).backward() or s.backward(),
        lambda x: (x * 2).backward(),
        lambda x: x.detach().sum().backward(),
        lambda x: torch.autograd.grad(x.sum(), torch.ones(1, device=x.device, requires_grad=True)),
        lambda x: (x > 0).requires_grad_(),
        lambda x: (x * 2).requires_grad_(False),
        lambda x: x.view(-1).unbind(0)[0].mul_(2),
        lambda x: (x * 2).backward(torch.ones(3, device=x.device)),
        lambda x: setattr(x, "grad", torch.ones(7, device=x.device)),
    ],
)
def test_autograds_own_errors_are_cpus(program: Callable) -> None:
    expected, actual = (
        outcome(lambda d=d: program(torch.ones(2, 2, device=d, requires_grad=True))) for d in ("cpu", "tpu")
    )
    assert expected[0] == actual[0] == "raised"
    text = actual[1][1].replace("tpu:0", "cpu").replace("tpuFloatType", "torch.FloatTensor")
    assert (actual[1][0], text) == expected[1]


def _change_saved(x: torch.Tensor) -> None:
    y = x.sigmoid()
    y.view(-1)[0] = 5
    y.sum().backward()


def test_versions_count_in_place_writes_through_every_alias() -> None:
    x = torch.zeros(4, device="tpu")
    view = x[1:]
    start = x._version
    x.add_(1)
    view.mul_(2)
    torch.add(x, 1, out=x)
    assert x._version == view._version == start + 3
    x.detach().zero_()
    assert x._version == start + 4
    x.data.zero_()
    assert x._version == start + 4


def test_grad_modes() -> None:
    x = torch.ones(2, device="tpu", requires_grad=True)
    with torch.no_grad():
        assert not (x * 2).requires_grad
        x.mul_(2)
    with torch.inference_mode():
        y = x * 2
        assert y.is_inference() and y.tolist() == [4, 4]
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        (x * y).sum().backward()


def test_anomaly_mode_names_the_forward_operator() -> None:
    x = torch.tensor([-1.0], device="tpu", requires_grad=True)
    with pytest.raises(RuntimeError, match="SqrtBackward0.*nan"), torch.autograd.detect_anomaly(check_nan=True):
        with pytest.warns(UserWarning, match="SqrtBackward0|Anomaly"):
            torch.sqrt(x).sum().backward()


def test_backward_frees_its_graph() -> None:
    x = torch.ones(4, device="tpu", requires_grad=True)
    saved = x.exp()
    reference = weakref.ref(saved)
    saved.square().sum().backward()
    del saved
    assert reference() is None


def test_threads_run_backward_at_the_same_time() -> None:
    torch.manual_seed(0)
    shared = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1)).tpu()
    inputs = [torch.rand(8, 4).tpu() for _ in range(4)]
    expected = [torch.autograd.grad(shared(x).sum(), list(shared.parameters())) for x in inputs]
    results: dict[int, Any] = {}

    def work(i: int) -> None:
        with matmul_precision("highest"):
            for _ in range(10):
                results[i] = torch.autograd.grad(shared(inputs[i]).sum(), list(shared.parameters()))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for i in range(4):
        for a, b in zip(results[i], expected[i], strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize(
    "optimizer", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop], ids=lambda o: o.__name__
)
def test_training_follows_cpu(optimizer: type[torch.optim.Optimizer]) -> None:
    def train(device: str) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).to(device)
        opt = optimizer(model.parameters(), lr=0.01)
        x, y = torch.linspace(-1, 1, 32).view(8, 4).to(device), torch.tensor([0, 1] * 4).to(device)
        losses = []
        for _ in range(5):
            opt.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            losses.append(loss.item())
        return losses

    assert train("tpu") == pytest.approx(train("cpu"), rel=1e-4)


def test_attention_in_its_math_form_has_second_gradients() -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def second(device: str) -> torch.Tensor:
        q = torch.linspace(-1, 1, 64).view(1, 2, 4, 8).to(device).requires_grad_()
        with sdpa_kernel(SDPBackend.MATH):
            out = F.scaled_dot_product_attention(q, q, q).square().sum()
            (grad,) = torch.autograd.grad(out, q, create_graph=True)
            grad.square().sum().backward()
        assert q.grad is not None
        return q.grad.cpu()

    torch.testing.assert_close(second("tpu"), second("cpu"), rtol=1e-4, atol=1e-5)


def test_attention_takes_the_forms_that_the_user_allows() -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q = torch.ones(1, 2, 4, 8, device="tpu", requires_grad=True)
    for allowed, node in (
        (SDPBackend.FLASH_ATTENTION, "Overrideable"),
        (SDPBackend.MATH, "Squeeze|Unsafe|Bmm|View|Mul"),
    ):
        with sdpa_kernel(allowed):
            out = F.scaled_dot_product_attention(q, q, q)
        assert out.grad_fn is not None and re.search(node, out.grad_fn.name()), out.grad_fn
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), pytest.raises(RuntimeError, match="No viable backend"):
        F.scaled_dot_product_attention(q[0], q[0], q[0])
