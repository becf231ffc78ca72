"""Fused mode records operators and runs what is needed of them together: the same tensors, in fewer programs."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support import assert_same, python
from torch_tpu import _C

EagerMode = torch.tpu.EagerMode
STRICT, DEBUG, FUSED = EagerMode.DEFER_NEVER, EagerMode.DEFER_NEVER_AND_LAUNCH_BLOCKING, EagerMode.DEFER_AND_FUSE
LIMIT = 512


@pytest.fixture(autouse=True)
def fused() -> Iterator[None]:
    torch.tpu.synchronize()
    torch.tpu.eager_mode = FUSED
    yield
    torch.tpu.eager_mode = STRICT
    torch.tpu.synchronize()


def programs() -> list[dict[str, Any]]:
    """The programs that were compiled or loaded since the last reset; those only traced do not count."""
    return torch.tpu.compile_stats()["compiles"]


def counted(function: Callable[[], Any]) -> int:
    """How many programs ``function`` needs."""
    torch.tpu.reset_compile_stats()
    function()
    return len(programs())


def in_modes(program: Callable[[], Any]) -> list[Any]:
    """What a program returns in each of the three modes, from the same random state."""
    results = []
    for mode in (STRICT, DEBUG, FUSED):
        with torch.tpu.set_eager_mode(mode):
            torch.tpu.manual_seed(7)
            results.append([t.cpu() for t in program()])
    return results


# ---- values ---------------------------------------------------------------------------------------------------------
def pointwise(n: int) -> list[torch.Tensor]:
    x, y = torch.linspace(-3, 3, n, device="tpu"), torch.linspace(0.1, 5, n, device="tpu")
    z = x * y + y  # one rounding more than a fused multiply-add
    z = z * 1.7 - x * x
    w = (x * y).sub(z, alpha=1) / y / 3.1
    big = (y * 100).exp().log()  # infinity stays infinity
    near = ((z + 1e8) + 1.0) - 1e8
    return [z, w, big, near, z.clamp(-1, 1), torch.where(z > w, z, w).abs(), -(x * x) + 0.5, (x * y).neg() + z]


@pytest.mark.parametrize("n", [64, 3000, 40000])
def test_float32_arithmetic_is_bit_for_bit_that_of_the_other_modes(n: int) -> None:
    strict, debug, fused = in_modes(lambda: pointwise(n))
    for a, b, c in zip(strict, debug, fused, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)


def integers() -> list[torch.Tensor]:
    x = torch.arange(-500, 500, device="tpu", dtype=torch.int32).view(20, 50)
    y = (x * 31 + 7) ^ (x >> 2)
    z = torch.div(y, 7, rounding_mode="floor") % 5
    s = (y.long() * 1234567).sum(0)
    return [y, z, s, y.cumsum(1), y.sort(1)[0], (y > z).sum(), y.float().to(torch.uint8), y.view(torch.int16)]


def test_integer_work_is_exact() -> None:
    strict, debug, fused = in_modes(integers)
    for a, b, c in zip(strict, debug, fused, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)


def functions() -> list[torch.Tensor]:
    x = torch.linspace(-3, 3, 3000, device="tpu").view(60, 50)
    y = F.gelu(x).softmax(1) @ torch.tanh(x).t()
    return [y, y.var(0), F.layer_norm(y, (60,)), torch.sin(y).exp().mean(1), y.norm(), y.double().cumsum(0)]


def test_the_rest_is_within_rounding() -> None:
    strict, _, fused = in_modes(functions)
    for a, c in zip(strict, fused, strict=True):
        torch.testing.assert_close(a, c, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rounds_after_each_operator(dtype: torch.dtype) -> None:
    def program() -> list[torch.Tensor]:
        x = torch.linspace(-3, 3, 5000, device="tpu").to(dtype)
        return [x * x + x, (x * 3 - 1) * x, (x + 1) + 1]

    strict, _, fused = in_modes(program)
    for a, c in zip(strict, fused, strict=True):
        assert torch.equal(a, c)


def test_random_numbers_are_the_same_bits_in_every_mode() -> None:
    def program() -> list[torch.Tensor]:
        a = torch.rand(100, device="tpu")
        torch.randn(50, device="tpu")  # dropped, and drawn all the same
        b = torch.randint(1000, (100,), device="tpu")
        generator = torch.Generator("tpu").manual_seed(3)
        own = torch.rand(9, device="tpu", generator=generator)
        return [a, b, torch.bernoulli(a), torch.randperm(50, device="tpu"), own, torch.rand(9, device="tpu")]

    strict, debug, fused = in_modes(program)
    for a, b, c in zip(strict, debug, fused, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)


# ---- what is recorded, and what runs --------------------------------------------------------------------------------
def test_a_chain_is_one_program_and_is_known_the_second_time() -> None:
    x = torch.ones(4, 3, device="tpu")
    torch.tpu.synchronize()

    def chain() -> list[list[float]]:
        y = (x + 1) * 2
        return (y - x).relu().tolist()

    assert counted(lambda: chain()) == 1
    assert (
        programs()[0]["op"] == "fused"
        and "first graph of 4 operators: add.Tensor, mul.Tensor" in programs()[0]["reason"]
    )
    assert counted(lambda: chain()) == 0
    assert chain() == [[3.0] * 3] * 4


def test_the_reason_says_how_a_graph_differs() -> None:
    def chain(n: int) -> None:
        ((torch.ones(n, device="tpu").cosh() + 41) * 2).cpu()

    chain(3)
    torch.tpu.reset_compile_stats()
    chain(4)
    assert "other shapes or dtypes" in programs()[-1]["reason"]
    y = torch.ones(3, device="tpu").cosh() + 41
    (y * 2).cpu()
    assert programs()[-1]["reason"].endswith("other results that are needed")
    del y


def test_numbers_and_offsets_are_operands() -> None:
    x = torch.arange(12.0, device="tpu").view(4, 3)
    torch.tpu.synchronize()

    def row(i: int, k: float) -> list[float]:
        return (x[i] * k + 1).tolist()

    row(0, 2.0)
    assert counted(lambda: [row(i, float(k)) for i in range(1, 4) for k in range(5)]) == 0
    assert row(2, 3.0) == [19.0, 22.0, 25.0]


def test_dropped_results_cost_nothing() -> None:
    x = torch.ones(2048, 2048, device="tpu")
    (x + 1).sum().item()

    def dropped() -> None:
        for _ in range(20):
            x @ x
        torch.tpu.synchronize()

    assert counted(dropped) == 0, "nothing of it ran"


def test_overwritten_values_are_not_results() -> None:
    x = torch.zeros(5, device="tpu")
    for i in range(5):
        x += i
    y = x * 2
    x.copy_(y)
    del y
    assert x.tolist() == [20.0] * 5
    assert "5 operators" not in programs()[-1]["reason"]


def test_a_clone_shares_what_is_pending() -> None:
    x = torch.ones(3, device="tpu") + 1
    y, z = x.clone(), torch.empty(3, device="tpu").copy_(x)
    x.add_(5)
    y.mul_(3)
    assert (x.tolist(), y.tolist(), z.tolist()) == ([7.0] * 3, [6.0] * 3, [2.0] * 3)


FLUSHES: dict[str, Callable[[torch.Tensor], Any]] = {
    "cpu": lambda x: x.cpu(),
    "item": lambda x: x[0].item(),
    "synchronize": lambda x: torch.tpu.synchronize(),
    "accelerator": lambda x: torch.accelerator.synchronize(),
    "stream": lambda x: torch.tpu.current_stream().synchronize(),
    "query": lambda x: torch.tpu.current_stream().query(),
    "event": lambda x: torch.Event("tpu").record(),
    "nonzero": lambda x: x.nonzero(),
    "equal": lambda x: torch.equal(x, x),
    "print": lambda x: str(x),
    "mode": lambda x: setattr(torch.tpu, "eager_mode", STRICT),
    "strict": lambda x: strictly(lambda: x + 1),
}


def strictly(function: Callable[[], Any]) -> Any:
    with torch.tpu.set_eager_mode(STRICT):
        return function()


@pytest.mark.parametrize("name", FLUSHES)
def test_what_needs_a_value_runs_the_graph(name: str) -> None:
    torch.tpu.synchronize()
    x = torch.arange(6.0, device="tpu") * 3 + 1
    torch.tpu.reset_compile_stats()
    before = _C._table_stats()
    FLUSHES[name](x)
    ran = len(programs()) + _C._table_stats()["hits"] - before["hits"]
    assert ran > 0
    assert x.tolist() == [1.0, 4.0, 7.0, 10.0, 13.0, 16.0]


def test_the_end_of_a_block_runs_the_graph() -> None:
    torch.tpu.eager_mode = STRICT
    x = torch.ones(3, device="tpu")
    with torch.tpu.set_eager_mode(FUSED):
        y = (x + 1.25) * 4.5
        torch.tpu.reset_compile_stats()
    assert [p["op"] for p in programs()] == ["fused"]
    with pytest.raises(KeyError), torch.tpu.set_eager_mode(FUSED):
        z = (x + 1.25) * 4.5
        raise KeyError
    assert y.tolist() == z.tolist() == [10.125] * 3


# ---- loops ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("body", [1, 2, 3, 7, 100])
def test_a_loop_that_nobody_reads_compiles_few_programs(body: int) -> None:
    steps = [lambda x: x + 1, lambda x: x * 0.5, torch.relu, torch.abs, lambda x: x - 1, torch.neg, lambda x: x + x]
    iterations = 5000 if body < 100 else 200
    x = torch.ones(4, device="tpu")
    torch.tpu.reset_compile_stats()
    for _ in range(iterations // 2):
        for i in range(body):
            x = steps[i % 7](x)
    middle = len(programs())
    for _ in range(iterations // 2):
        for i in range(body):
            x = steps[i % 7](x)
    assert middle <= 6 and len(programs()) == middle
    y = torch.ones(4)
    for _ in range(iterations):
        for i in range(body):
            y = steps[i % 7](y)
    assert torch.equal(x.cpu(), y)


def test_a_body_longer_than_the_limit_settles_too() -> None:
    x = torch.ones(4, device="tpu")
    counts = []
    for _ in range(12):
        torch.tpu.reset_compile_stats()
        for i in range(LIMIT + 200):
            x = x + 1 if i % 31 else x.abs()
        counts.append(len(programs()))
    assert counts[-4:] == [0] * 4


def test_an_update_in_place_gives_its_memory_on() -> None:
    x = torch.zeros(1 << 18, device="tpu")
    y = torch.ones(1 << 18, device="tpu")
    torch.tpu.synchronize()
    for _ in range(3):
        x.add_(y).mul_(0.5)
        torch.tpu.synchronize()
    assert counted(lambda: (x.add_(y).mul_(0.5), torch.tpu.synchronize())) == 0
    held = x.clone()
    x.add_(1)
    y.add_(1)
    torch.tpu.synchronize()
    assert (x - held).unique().tolist() == [1.0] and y.unique().tolist() == [2.0]


def test_memory_counts_what_is_pending() -> None:
    gc.collect()
    torch.tpu.synchronize()
    before = torch.tpu.memory_allocated()
    x = torch.ones(1024, device="tpu")
    y = x + 1
    assert torch.tpu.memory_allocated() == before + 8192
    del x
    assert torch.tpu.memory_allocated() == before + 4096
    y.cpu()
    del y
    assert torch.tpu.memory_allocated() == before


# ---- autograd and optimizers ----------------------------------------------------------------------------------------
def test_gradients_are_those_of_strict_mode() -> None:
    def program() -> list[torch.Tensor]:
        w = torch.linspace(-1, 1, 48, device="tpu").view(6, 8).requires_grad_()
        x = torch.linspace(0, 1, 30, device="tpu").view(5, 6)
        loss = F.cross_entropy(torch.tanh(x @ w), torch.tensor([0, 1, 2, 3, 4], device="tpu"))
        (first,) = torch.autograd.grad(loss, w, retain_graph=True, create_graph=True)
        first.square().sum().backward(retain_graph=True)
        loss.backward(retain_graph=True)
        loss.backward()
        assert w.grad is not None
        return [loss, first, w.grad]

    strict, _, fused = in_modes(program)
    for a, c in zip(strict, fused, strict=True):
        torch.testing.assert_close(a, c, rtol=1e-5, atol=1e-7)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "plain": lambda p: torch.optim.Adam(p, lr=0.01, foreach=False),
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_training_loop_without_reads_reaches_zero_compiles(name: str) -> None:
    torch.manual_seed(0)
    cpu = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    x, target = torch.randn(10, 8), torch.randint(3, (10,))

    def train(model: nn.Module, x: torch.Tensor, target: torch.Tensor, steps: int, optimizer: Any) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            F.cross_entropy(model(x), target).backward()
            optimizer.step()

    with torch.tpu.precision(torch.tpu.Precision.HIGHEST):
        tpu = copy.deepcopy(cpu).to("tpu")
        on_tpu, on_cpu = OPTIMIZERS[name](tpu.parameters()), OPTIMIZERS[name](cpu.parameters())
        train(tpu, x.tpu(), target.tpu(), 3, on_tpu)
        assert counted(lambda: train(tpu, x.tpu(), target.tpu(), 5, on_tpu)) == 0
        train(cpu, x, target, 8, on_cpu)
        for a, b in zip(tpu.parameters(), cpu.parameters(), strict=True):
            torch.testing.assert_close(a.detach().cpu(), b.detach(), rtol=1e-4, atol=1e-5)


# ---- other forms of operators ---------------------------------------------------------------------------------------
def test_out_arguments_and_resizes() -> None:
    x, out = torch.arange(6.0, device="tpu"), torch.empty(0, device="tpu")
    assert torch.add(x * 2, 1, out=out) is out
    kept = torch.zeros(3, 6, device="tpu")
    torch.mul(out, 2, out=kept[1])
    assert_same(out, torch.arange(6.0) * 2 + 1)
    assert kept.sum(1).tolist() == [0.0, 72.0, 0.0]
    x.resize_(8)[6:].fill_(9)
    assert x.tolist() == [0, 1, 2, 3, 4, 5, 9, 9]


def test_foreach_and_operators_with_several_results() -> None:
    xs = [torch.full((i + 1,), float(i), device="tpu") for i in range(5)]
    ys = torch._foreach_add(xs, 1)
    torch._foreach_mul_(ys, [1.0, 2.0, 3.0, 4.0, 5.0])
    torch._foreach_addcmul_(xs, ys, ys, value=0.5)
    assert [y[0].item() for y in ys] == [1, 4, 9, 16, 25]
    assert [x[0].item() for x in xs] == [0.5, 9, 42.5, 131, 316.5]
    values, places = (torch.arange(6.0, device="tpu").view(2, 3) * -1).max(1)
    parts = torch.arange(6.0, device="tpu").mul(2).split(2)
    assert values.tolist() == [0, -3] and places.tolist() == [0, 0] and parts[2].tolist() == [8, 10]


def test_views_of_pending_values_and_writes_through_them() -> None:
    x = torch.zeros(4, 3, device="tpu") + 1
    x[1].mul_(5)
    x.t()[2] += x[:, 0]
    x.view(-1)[-1] = 100
    x.data.diagonal()[:2].zero_()
    y = torch.ones(4, 3)
    y[1].mul_(5)
    y.t()[2] += y[:, 0]
    y.view(-1)[-1] = 100
    y.data.diagonal()[:2].zero_()
    assert_same(x, y)


def test_copies_between_devices() -> None:
    done = python(
        """
        import torch
        x = torch.arange(4.0, device="tpu:0") * 2
        y = x.to("tpu:1") + 1
        z = torch.ones(4, device="tpu:1") * 3
        x.copy_(y * z)
        print(x.tolist(), y.device, (y + z).tolist())
        try:
            x + y
        except RuntimeError as error:
            print(error)
        """,
        TORCH_TPU_DEFER_AND_FUSE="1",
        TORCH_TPU_NUM_CPU_DEVICES="2",
    )
    assert done.stdout.startswith(
        "[3.0, 9.0, 15.0, 21.0] tpu:1 [4.0, 6.0, 8.0, 10.0]\nExpected all tensors to be on the same"
    )


def test_host_composites_and_sizes_that_depend_on_data() -> None:
    x = torch.tensor([3, 0, 1, 0, 3], device="tpu") * 2
    assert (x.nonzero().view(-1) + 1).tolist() == [1, 3, 5]
    assert torch.unique(x).tolist() == [0, 2, 6] and x[x > 1].tolist() == [6, 2, 6]
