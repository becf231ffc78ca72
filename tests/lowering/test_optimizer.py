"""Optimizers: the fused kernels as programs, and every optimizer of ``torch.optim`` on the device against the CPU."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import OneCycleLR

from tests.lowering.harness import run
from tests.lowering.test_foreach import check_written, tensors
from tests.support import matmul_precision
from torch_tpu.programs import stats

aten = torch.ops.aten
SHAPES = [(3, 4), (5,), ()]


def signed(dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    return [t - 0.5 for t in tensors(dtype, seed, SHAPES)]


def positive(dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    return tensors(dtype, seed, SHAPES)


def steps() -> list[torch.Tensor]:
    return [torch.tensor(float(i)) for i in (1, 2, 1000)]


#: (grad_scale, found_inf)
SCALING = [(None, None), (4.0, 0.0), (4.0, 1.0)]


def scaling(scale: float | None, found: float | None) -> dict[str, torch.Tensor | None]:
    def value(x: float | None) -> torch.Tensor | None:
        return None if x is None else torch.tensor(x)

    return {"grad_scale": value(scale), "found_inf": value(found)}


# ---- the kernels ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("scale", SCALING)
@pytest.mark.parametrize("op", [aten._fused_adam_, aten._fused_adamw_], ids=str)
def test_fused_adam(op: Any, scale: tuple[float | None, float | None], dtype: torch.dtype) -> None:
    for amsgrad, maximize, decay in itertools.product((False, True), (False, True), (0.0, 0.1)):
        lists = [signed(dtype, 0), signed(dtype, 1), signed(dtype, 2), positive(dtype, 3)]
        largest = positive(dtype, 4) if amsgrad else []
        flags = {"weight_decay": decay, "eps": 1e-8, "amsgrad": amsgrad, "maximize": maximize, **scaling(*scale)}
        overload, lr = (op.tensor_lr, torch.tensor(0.01)) if maximize else (op.default, 0.01)
        check_written(overload, *lists, largest, steps(), lr=lr, beta1=0.9, beta2=0.999, **flags)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("scale", SCALING)
def test_fused_sgd(scale: tuple[float | None, float | None], dtype: torch.dtype) -> None:
    for (momentum, nesterov, first), maximize in itertools.product(
        [(0.0, False, False), (0.9, False, True), (0.9, False, False), (0.9, True, False)], (False, True)
    ):
        buffers = signed(dtype, 2) if momentum else []
        flags = {"nesterov": nesterov, "maximize": maximize, "is_first_step": first, **scaling(*scale)}
        overload, lr = (aten._fused_sgd_.tensor_lr, torch.tensor(0.1)) if maximize else (aten._fused_sgd_.default, 0.1)
        check_written(
            overload, signed(dtype, 0), signed(dtype, 1), buffers,
            weight_decay=0.1, momentum=momentum, lr=lr, dampening=0.0 if nesterov else 0.2, **flags,
        )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("scale", SCALING)
def test_fused_adagrad(scale: tuple[float | None, float | None], dtype: torch.dtype) -> None:
    for maximize in (False, True):
        op = aten._fused_adagrad_
        overload, lr = (op.tensor_lr, torch.tensor(0.1)) if maximize else (op.default, 0.1)
        check_written(
            overload, signed(dtype, 0), signed(dtype, 1), positive(dtype, 2), steps(),
            lr=lr, lr_decay=0.1, weight_decay=0.1, eps=1e-10, maximize=maximize, **scaling(*scale),
        )  # fmt: skip


def test_early_bias_corrections_are_exact() -> None:
    """``1 - beta^step`` for a beta near one, in float32, as if in float64."""
    one = torch.ones(1)
    lists = [[torch.zeros(1)], [one.clone()], [torch.zeros(1)], [torch.zeros(1)], [], [torch.tensor(1.0)]]
    _, _, outputs = run(
        aten._fused_adam_.default, *lists,
        lr=1.0, beta1=0.999999, beta2=0.999999, weight_decay=0.0, eps=0.0, amsgrad=False, maximize=False,
    )  # fmt: skip
    torch.testing.assert_close(outputs[0], -one, rtol=1e-6, atol=0)


def test_schedules_do_not_make_programs() -> None:
    texts = set()
    for lr, beta1, decay in ((0.1, 0.9, 0.0), (0.2, 0.85, 0.1)):
        lists = [signed(torch.float32, i) for i in range(4)]
        flags = {"weight_decay": decay, "eps": 1e-8, "amsgrad": False, "maximize": False}
        _, plan, _ = run(aten._fused_adamw_.default, *lists, [], steps(), lr=lr, beta1=beta1, beta2=0.999, **flags)
        texts.add(plan.text)
    assert len(texts) == 1


# ---- torch.optim ------------------------------------------------------------------------------------------------
OPTIMIZERS: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"lr": 0.1}), ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "maximize": True}),
    ("Adam", {}), ("Adam", {"amsgrad": True, "weight_decay": 0.1}), ("Adam", {"maximize": True}),
    ("AdamW", {}), ("AdamW", {"amsgrad": True}), ("NAdam", {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    ("RAdam", {"weight_decay": 0.1}), ("Adamax", {}), ("Adagrad", {"lr_decay": 0.1, "weight_decay": 0.1}),
    ("Adadelta", {"lr": 0.5}), ("RMSprop", {"centered": True, "momentum": 0.9}), ("Rprop", {}), ("ASGD", {}),
    ("Adafactor", {}), ("Muon", {}), ("LBFGS", {}),
]  # fmt: skip
FUSED = ("SGD", "Adam", "AdamW", "Adagrad")
CAPTURABLE = ("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adadelta", "RMSprop", "Rprop", "ASGD")


def forms(name: str) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = [{}]
    if name not in ("LBFGS", "Muon"):
        out += [{"foreach": False}, {"foreach": True}]
    if name in FUSED:
        out.append({"fused": True})
    if name in CAPTURABLE:
        out += [{"foreach": True, "capturable": True}, {"foreach": False, "capturable": True}]
    return out


def train(make: Callable[..., torch.optim.Optimizer], device: str, shapes: list[tuple[int, ...]]) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(s, generator=g).to(device)) for s in shapes]
    optimizer = make(params)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        total = sum(((p - 1) ** 2).sum() * (i + 1) for i, p in enumerate(params))
        assert isinstance(total, torch.Tensor)
        total.backward()
        return total

    for _ in range(4):
        optimizer.step(loss)
        schedule.step()
    return [p.detach().cpu() for p in params]


@pytest.mark.parametrize(("name", "settings"), OPTIMIZERS, ids=str)
def test_optimizer(name: str, settings: dict[str, Any]) -> None:
    cls = getattr(torch.optim, name)
    shapes = [(4, 3), (3, 3)] if name == "Muon" else SHAPES
    plain = {} if name in ("LBFGS", "Muon") else {"foreach": False}
    expected = train(lambda p: cls(p, **settings, **plain), "cpu", shapes)
    with matmul_precision("highest"):
        for form in forms(name):
            got = train(lambda p, form=form: cls(p, **settings, **form), "tpu", shapes)
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-3 if name == "Muon" else 1e-6)


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "RMSprop", "NAdam", "RAdam", "Adagrad", "Adamax"])
def test_steps_after_the_first_compile_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Learning rates, momenta, betas and bias corrections change from step to step."""
    compiled: list[str] = []
    monkeypatch.setattr(stats, "record", lambda op, *_: compiled.append(op))
    for form in [{}, {"fused": True}] if name in FUSED else [{}]:
        params = [torch.nn.Parameter(torch.randn(s, device="tpu")) for s in SHAPES]
        momentum = {"momentum": 0.9} if name in ("SGD", "RMSprop") else {}
        optimizer = getattr(torch.optim, name)(params, **{"lr": 0.01, **momentum, **form})
        cycles = name in ("SGD", "Adam", "AdamW")
        schedule = OneCycleLR(optimizer, 0.1, total_steps=50, cycle_momentum=cycles)
        for i in range(10):
            optimizer.zero_grad()
            sum((p * p).sum() for p in params).backward()  # type: ignore[union-attr]
            optimizer.step()
            schedule.step()
            if i == 6:  # RAdam rectifies from the sixth step on
                compiled.clear()
        assert compiled == []


@pytest.mark.parametrize("fused", [False, True])
def test_gradient_scaler(fused: bool) -> None:
    """The scale shrinks after an infinity, whose step is skipped, and grows after two steps without one."""
    results = []
    for device in ("cpu", "tpu"):
        scaler = torch.amp.GradScaler(device, init_scale=1024.0, growth_interval=2)
        p = torch.nn.Parameter(torch.ones(3, device=device))
        optimizer = torch.optim.Adam([p], lr=0.1, fused=fused)
        seen = []
        for k in range(5):
            optimizer.zero_grad()
            loss = (p * p).sum() * (float("inf") if k == 2 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            seen.append((scaler.get_scale(), p.detach().clone().cpu()))
        results.append(seen)
    torch.testing.assert_close(results[1], results[0])
    assert [scale for scale, _ in results[1]] == [1024, 2048, 1024, 1024, 2048]
