"""``torch.compile`` on tpu gives what eager mode gives: each test runs a function both ways."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
from torch.utils._pytree import tree_map

from tests.support import matmul_precision


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    with matmul_precision("highest"):
        yield


def _copied(tree: Any) -> Any:
    return tree_map(lambda t: t.detach().clone() if isinstance(t, torch.Tensor) else t, tree)


def _close(a: Any, b: Any, **tolerances: float) -> None:
    torch.testing.assert_close(
        tree_map(lambda t: t.detach().cpu() if isinstance(t, torch.Tensor) else t, a),
        tree_map(lambda t: t.detach().cpu() if isinstance(t, torch.Tensor) else t, b),
        **tolerances,
    )


def same(function: Callable[..., Any], *args: Any, exact: bool = False, **options: Any) -> Any:
    """Runs ``function`` compiled, without graph breaks, and eager; results and written arguments must agree."""
    options.setdefault("fullgraph", True)
    first, second = _copied(args), _copied(args)
    torch.manual_seed(7)
    got = torch.compile(function, **options)(*first)
    torch.manual_seed(7)
    want = function(*second)
    tolerances = {"rtol": 0.0, "atol": 0.0} if exact else {}
    _close(got, want, **tolerances)
    _close(first, second, **tolerances)
    return got


def grads(function: Callable[..., torch.Tensor], *args: torch.Tensor) -> list[torch.Tensor]:
    leaves = [a.detach().clone().requires_grad_(a.is_floating_point()) for a in args]
    return [*torch.autograd.grad(function(*leaves), [t for t in leaves if t.requires_grad])]


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(4, 8, device="tpu")


def graphs() -> list[str]:
    """The graphs compiled since the counters were reset."""
    return [c["op"] for c in torch.tpu.compile_stats()["compiles"] if c["op"].startswith("graph")]


# ---- which backend --------------------------------------------------------------------------------------------------
def test_a_function_of_tensors_on_tpu_is_one_program(x: torch.Tensor) -> None:
    compiled = torch.compile(lambda x: (x.sin() @ x.t()).softmax(-1))
    torch.tpu.reset_compile_stats()
    compiled(x)
    assert len(graphs()) == 1 and torch.tpu.compile_stats()["compiled"] + torch.tpu.compile_stats()["loaded"] == 1


def test_the_backend_can_be_named(x: torch.Tensor) -> None:
    same(lambda x: x.sin() + 1, x, backend="tpu")
    assert "tpu" in torch._dynamo.list_backends()


def test_cpu_functions_stay_with_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._inductor.compile_fx as inductor

    seen = []
    monkeypatch.setattr(inductor, "compile_fx", lambda module, *_args, **_kwargs: seen.append(module) or module)
    torch.compile(lambda x: x + 1)(torch.ones(2))
    assert len(seen) == 1


def test_unknown_options_and_modes_are_refused(x: torch.Tensor) -> None:
    with pytest.raises(Exception, match="Unknown option 'colour' of the tpu backend; its options are"):
        torch.compile(torch.sin, backend="tpu", options={"colour": "red"})(x)
    with pytest.raises(Exception, match="Unknown mode 'fast'"):
        torch.compile(torch.sin, backend="tpu", mode="fast")(x)
    with pytest.warns(UserWarning, match="mode='max-autotune' has no effect"):
        torch.compile(torch.sin, backend="tpu", mode="max-autotune")(x)


# ---- inference ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_inference(context: Callable[[], Any]) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4)).to("tpu")
    with context():
        x = torch.randn(3, 8, device="tpu")
        _close(torch.compile(model, fullgraph=True)(x), model(x))


def test_autocast(x: torch.Tensor) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("tpu"):
            return x @ x.t()

    assert same(f, x).dtype == torch.bfloat16


def test_the_precision_context_breaks_no_graph(x: torch.Tensor) -> None:
    def f(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.tpu.precision(torch.tpu.Precision.DEFAULT):
            fast = x @ x.t()
        return fast, x @ x.t()

    fast, exact = same(f, x, exact=True)
    assert (fast - exact).abs().max() > 0


def test_the_precision_around_a_compiled_function_counts(x: torch.Tensor) -> None:
    f = torch.compile(lambda x: x @ x.t(), fullgraph=True)
    results = []
    for level in ("highest", "medium", "highest"):
        with matmul_precision(level):
            results.append(f(x).cpu())
            _close(results[-1], x @ x.t(), rtol=0, atol=0)
    assert torch.equal(results[0], results[2]) and not torch.equal(results[0], results[1])


def test_float64_int64_bool_and_complex(x: torch.Tensor) -> None:
    same(lambda x: (x.double().exp(), x.long() * 2**40, x > 0, torch.fft.rfft(x).abs()), x)


# ---- random numbers -------------------------------------------------------------------------------------------------
def test_random_numbers_are_those_of_eager_mode(x: torch.Tensor) -> None:
    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        dropped = F.dropout(x, 0.3)
        return dropped, torch.rand(3, device="tpu"), torch.randint(0, 9, (3,), device="tpu")

    same(f, x, exact=True)
    same(lambda x: torch.randn_like(x) + torch.empty_like(x).exponential_(), x)  # functions of bits: to a rounding


def test_the_generator_moves_on_as_in_eager_mode(x: torch.Tensor) -> None:
    compiled = torch.compile(lambda x: F.dropout(x, 0.5), fullgraph=True)
    torch.manual_seed(3)
    got = [compiled(x), compiled(x), torch.rand(2, device="tpu")]
    torch.manual_seed(3)
    want = [F.dropout(x, 0.5), F.dropout(x, 0.5), torch.rand(2, device="tpu")]
    _close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize("preserve", [True, False])
def test_activation_checkpointing_recomputes_the_same_dropout(x: torch.Tensor, preserve: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    linear = nn.Linear(8, 8).to("tpu")

    def block(t: torch.Tensor) -> torch.Tensor:
        t = linear(t).relu()
        return F.dropout(t, 0.5) if preserve else t

    def f(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(block, x, use_reentrant=False, preserve_rng_state=preserve).sum()

    results = []
    for function in (torch.compile(f, fullgraph=True), f):
        torch.manual_seed(3)
        linear.zero_grad()
        function(x).backward()
        results.append(linear.weight.grad.clone())
    _close(*results)


# ---- writes, views, aliases -----------------------------------------------------------------------------------------
def test_writes_to_inputs(x: torch.Tensor) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        x[1].mul_(2)
        return x * 2

    same(f, x)


def test_views_of_inputs_are_views(x: torch.Tensor) -> None:
    def f(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        view = x.t()
        view[0].fill_(3)
        return view, x[0]

    first, second = x.clone(), x.clone()
    got, want = torch.compile(f, fullgraph=True)(first), f(second)
    _close((got, first), (want, second))
    got[1].fill_(5)
    assert (first[0] == 5).all() and got[0].untyped_storage()._cdata == first.untyped_storage()._cdata


def test_outputs_that_alias_one_another(x: torch.Tensor) -> None:
    def f(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x + 1
        return y, y[1]

    whole, row = torch.compile(f, fullgraph=True)(x)
    row.zero_()
    assert (whole[1] == 0).all()


def test_inputs_that_share_memory(x: torch.Tensor) -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(y)
        return x + y

    first, second = x.clone(), x.clone()
    got, want = torch.compile(f, fullgraph=True)(first, first[0:4]), f(second, second[0:4])
    _close((got, first), (want, second))


def test_windows_at_other_offsets_are_no_new_program(x: torch.Tensor) -> None:
    compiled = torch.compile(lambda t: t.sin() + 1, fullgraph=True, dynamic=False)
    compiled(x[0])
    torch.tpu.reset_compile_stats()
    for row in (1, 2, 3):
        _close(compiled(x[row]), x[row].sin() + 1)
    assert graphs() == []


def test_a_large_constant_and_small_ones(x: torch.Tensor) -> None:
    large = torch.arange(8192.0, device="tpu")
    small = torch.arange(8.0, device="tpu")
    same(lambda x: (x * small + torch.tensor([1.0, 2.0] * 4, device="tpu"), large[:8] + x), x)


# ---- training -------------------------------------------------------------------------------------------------------
def _models(*layers: nn.Module) -> tuple[nn.Module, nn.Module]:
    model = nn.Sequential(*layers).to("tpu")
    return model, copy.deepcopy(model)


def test_training_a_convolutional_network_with_batch_norm() -> None:
    one, two = _models(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))
    x = torch.randn(2, 3, 8, 8, device="tpu")
    for model in (torch.compile(one, fullgraph=True), two):
        for _ in range(2):
            model(x).square().sum().backward()
    for p, q in zip(one.parameters(), two.parameters(), strict=True):
        _close(p.grad, q.grad, rtol=1e-3, atol=1e-3)
    _close([*one.buffers()], [*two.buffers()])


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "adamw capturable": lambda p: torch.optim.AdamW(p, lr=1e-2, capturable=True),
    "adamw one by one": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_compiled_optimizer_step(name: str, x: torch.Tensor) -> None:
    one, two = _models(nn.Linear(8, 8), nn.Linear(8, 3))
    first, second = OPTIMIZERS[name](one.parameters()), OPTIMIZERS[name](two.parameters())
    steps = torch.compile(first.step), second.step
    for _ in range(3):
        for model, optimizer, step in zip((one, two), (first, second), steps, strict=True):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            step()
    _close([*one.parameters()], [*two.parameters()], rtol=1e-4, atol=1e-5)


def test_a_whole_training_step_is_one_program(x: torch.Tensor) -> None:
    from torch.optim.adamw import adamw

    one, two = _models(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    params = [*one.parameters()]
    first, second = ([torch.zeros_like(p) for p in params] for _ in range(2))
    counts = [torch.zeros((), device="tpu") for _ in params]

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = one(x).square().sum()
        gradients = [*torch.autograd.grad(loss, params)]
        with torch.no_grad():
            adamw(params, gradients, first, second, [], counts, foreach=True, capturable=True, amsgrad=False,
                  beta1=0.9, beta2=0.999, lr=1e-2, weight_decay=0.01, eps=1e-8, maximize=False)  # fmt: skip
        return loss.detach()

    optimizer = torch.optim.AdamW(two.parameters(), lr=1e-2, weight_decay=0.01)
    torch.tpu.reset_compile_stats()
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        compiled = torch.compile(step, fullgraph=True)
        for _ in range(3):
            loss = two(x).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            _close(compiled(x), loss, rtol=1e-4, atol=1e-5)
    assert len(graphs()) == 1
    _close(params, [*two.parameters()], rtol=1e-4, atol=1e-5)


def test_written_parameters_are_donated() -> None:
    weight = torch.zeros(1 << 16, device="tpu")
    update = torch.compile(lambda w, g: w.sub_(g, alpha=0.1), fullgraph=True)
    update(weight, torch.ones_like(weight))
    torch.accelerator.synchronize()
    before = torch.tpu.memory_allocated()
    torch.tpu.reset_peak_memory_stats()
    gradient = torch.ones_like(weight)
    for _ in range(3):
        update(weight, gradient)
    assert torch.tpu.max_memory_allocated() <= before + gradient.nbytes
    _close(weight, torch.full((1 << 16,), -0.4))


def test_recurrent_layers(x: torch.Tensor) -> None:
    model = nn.LSTM(8, 8, batch_first=True).to("tpu")
    with torch.no_grad():
        _close(torch.compile(model)(x[None])[0], model(x[None])[0])


# ---- other devices, other operators ---------------------------------------------------------------------------------
def test_cpu_scalars_among_device_tensors(x: torch.Tensor) -> None:
    got = same(lambda x, s: (x * s + torch.tensor(2.0), s + 1), x, torch.tensor(3.0))
    assert got[1].device.type == "cpu"


def test_written_cpu_scalars(x: torch.Tensor) -> None:
    def f(x: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        step += 1
        return x / (1 - 0.9**step)

    same(f, x, torch.tensor(3.0))


def test_copies_between_devices_inside(x: torch.Tensor) -> None:
    same(lambda t: t.to("tpu") * 2, x.cpu())
    assert same(lambda x: (x * 2).cpu() + 1, x).device.type == "cpu"


def test_a_custom_operator_runs_as_it_is(x: torch.Tensor) -> None:
    @torch.library.custom_op("torch_tpu_tests::doubled", mutates_args=())
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(np.asarray(x.cpu()) * 2).to(x.device)

    @doubled.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    same(lambda x: doubled(x.sin()) + 1, x)


def test_a_custom_operator_that_writes(x: torch.Tensor) -> None:
    @torch.library.custom_op("torch_tpu_tests::increase", mutates_args=("x",))
    def increase(x: torch.Tensor) -> None:
        x.add_(1)

    def f(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        increase(y)
        increase(x)
        return y * 2

    same(f, x)


def test_functional_transforms(x: torch.Tensor) -> None:
    same(lambda x: torch.func.grad(lambda t: t.sin().sum())(x), x)
    same(lambda x: torch.func.vmap(lambda t: t.sin().sum())(x), x)
    same(lambda x: torch.func.jacrev(lambda t: t.sin())(x[0]), x)
    same(lambda x: torch.func.hessian(lambda t: (t**3).sum())(x[0]), x)


def test_graph_breaks(x: torch.Tensor) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        return y if y.sum().item() > 1e9 else x[x > 0].sum() + y

    same(f, x, fullgraph=False)


# ---- errors ---------------------------------------------------------------------------------------------------------
def test_an_index_out_of_range_names_the_line_and_the_operator(x: torch.Tensor) -> None:
    compiled = torch.compile(lambda x, i: x[i], fullgraph=True)
    compiled(x, torch.tensor([9], device="tpu"))
    with pytest.raises(IndexError, match=r"index out of range in aten::index.Tensor \(.*test_compile.py:\d+\)"):
        torch.accelerator.synchronize()


def test_what_cannot_be_compiled_raises_with_operator_and_line(x: torch.Tensor) -> None:
    with torch.library._scoped_library("torch_tpu_tests", "FRAGMENT") as library:
        library.define("broken(Tensor x) -> Tensor")
        library.impl("broken", lambda x: x.clone(), "Meta")
        with pytest.raises(Exception, match=r"torch_tpu_tests::broken"):
            torch.compile(lambda x: torch.ops.torch_tpu_tests.broken(x), fullgraph=True)(x)


def test_an_eager_mode_cannot_change_inside(x: torch.Tensor) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        with torch.tpu.set_eager_mode(torch.tpu.EagerMode.DEFER_NEVER):
            return x + 1

    with pytest.raises(Exception, match="(?s)eager mode"):
        torch.compile(f, fullgraph=True)(x)


# ---- control flow ---------------------------------------------------------------------------------------------------
def test_cond_is_part_of_the_program(x: torch.Tensor) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos() * 2, (x,))

    with torch.no_grad():
        same(f, x)
        same(f, -x)


def test_cond_has_gradients(x: torch.Tensor) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos() * 2, (x,)).square().sum()

    for t in (x, -x):
        _close(grads(torch.compile(f, fullgraph=True), t), grads(f, t))


def test_while_loop(x: torch.Tensor) -> None:
    from torch._higher_order_ops.while_loop import while_loop

    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        i = torch.zeros((), dtype=torch.int64, device="tpu")
        return while_loop(lambda i, x: (i < 5) & (x.abs().sum() < 1e6), lambda i, x: (i + 1, x * 2), (i, x))

    with torch.no_grad():
        i, y = torch.compile(f, fullgraph=True)(x)
    assert i.item() == 5
    _close(y, x * 32)


def test_scan(x: torch.Tensor) -> None:
    from torch._higher_order_ops.scan import scan

    def f(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return scan(lambda c, y: (c + y, c * y), torch.zeros(8, device="tpu"), x)

    total, products = torch.compile(f, fullgraph=True)(x)
    _close(total, x.sum(0))
    _close(products, (x.cumsum(0) - x) * x)


def test_scan_has_gradients(x: torch.Tensor) -> None:
    from torch._higher_order_ops.scan import scan

    def f(x: torch.Tensor) -> torch.Tensor:
        return scan(lambda c, y: ((c + y).sin(), c * y), torch.zeros(8, device="tpu"), x)[1].sum()

    def by_hand(x: torch.Tensor) -> torch.Tensor:
        c, total = torch.zeros(8, device="tpu"), torch.zeros((), device="tpu")
        for y in x:
            c, total = (c + y).sin(), total + (c * y).sum()
        return total

    _close(grads(torch.compile(f, fullgraph=True), x), grads(by_hand, x))


def test_associative_scan(x: torch.Tensor) -> None:
    from torch._higher_order_ops.associative_scan import associative_scan

    def f(x: torch.Tensor) -> torch.Tensor:
        return associative_scan(lambda a, b: a + b, x, dim=0, combine_mode="generic")

    _close(torch.compile(f, fullgraph=True)(x), x.cumsum(0))


def test_a_check_inside_a_loop_is_reported(x: torch.Tensor) -> None:
    from torch._higher_order_ops.while_loop import while_loop

    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        i = torch.zeros((), dtype=torch.int64, device="tpu")
        return while_loop(lambda i, _: i < 6, lambda i, y: (i + 1, y + x[i.view(1)].sum()), (i, x.sum()))

    with torch.no_grad():
        torch.compile(f, fullgraph=True)(x)
        with pytest.raises(IndexError, match="index out of range in aten::index"):
            torch.accelerator.synchronize()


def test_a_tensor_of_no_elements_in_a_graph() -> None:
    """As caches of keys and values begin, in graphs with gradients and open sizes."""

    @torch.compile
    def joined(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([torch.tensor([], dtype=x.dtype, device=x.device), x * 2])

    for size in (3, 4, 5):
        x = torch.ones(size, device="tpu", requires_grad=True)
        y = joined(x)
        y.sum().backward()
        assert y.tolist() == [2.0] * size and x.grad is not None and x.grad.tolist() == [2.0] * size
