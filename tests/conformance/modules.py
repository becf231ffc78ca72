"""Runs module and optimizer descriptions on the CPU and on the device."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.testing._internal.common_modules import ModuleInfo, module_db
from torch.testing._internal.common_optimizers import OptimizerInfo, OptimizerInput, optim_db
from torch.utils._pytree import tree_leaves

from tests.conformance.compare import assert_same, widened
from tests.conformance.devices import Transfer
from tests.conformance.operators import GRADIENT_DTYPES, Phase, Result, cotangent, first_line, spread

#: Modules that draw random numbers when they train.
_RANDOM = ("Dropout", "RReLU", "FractionalMaxPool", "Transformer", "MultiheadAttention", "RNN", "LSTM", "GRU")
_STEPS = 3


@functools.cache
def modules() -> dict[str, ModuleInfo]:
    """Every module description that CPU PyTorch runs, by ``nn.Name.train`` and ``nn.Name.eval``."""
    out = {}
    for info in module_db:
        for mode in ("train", "eval") if info.train_and_eval_differ else ("train",):
            out[f"{info.name}.{mode}"] = info
    return out


@functools.cache
def optimizers() -> dict[str, OptimizerInfo]:
    """Every optimizer description, by ``optim.Name.implementation``."""
    out = {}
    for info in optim_db:
        for implementation in ("forloop", *info.supported_impls):
            if implementation != "fused" or "cpu" in info.supports_fused_on:
                out[f"optim.{info.name}.{implementation}"] = info
    return out


def module_kinds(info: ModuleInfo, dtype: torch.dtype) -> list[str]:
    """The kinds of test that the description asks for in ``dtype``."""
    if dtype not in info.supported_dtypes("cpu"):
        return []
    return ["forward", "backward"] if dtype in GRADIENT_DTYPES else ["forward"]


def check_module(name: str, dtype: torch.dtype, kind: str, limit: int, phase: Phase) -> Result:
    """Runs a module's samples; arguments and answer as :func:`tests.conformance.operators.check`."""
    info, training, gradient = modules()[name], name.endswith(".train"), kind == "backward"
    phase("cpu")
    torch.manual_seed(0)
    given = info.module_inputs_func(info, device="cpu", dtype=dtype, requires_grad=gradient, training=training)
    given = [x for x in given if x.forward_input is not None]
    random = training and any(word in name for word in _RANDOM)
    run = functools.partial(_run_module, info, dtype, gradient, training, random)
    return _count([(f"module {i} {x.desc}".strip(), x) for i, x in enumerate(given)], run, limit, phase)


def _count(samples: list[tuple[str, Any]], run: Callable[[Any, Phase], bool], limit: int, phase: Phase) -> Result:
    count, failures = 0, []
    for label, sample in spread(samples, limit):
        try:
            count += run(sample, phase)
        except Exception as error:
            count += 1
            failures.append(f"{label}: {first_line(error)}")
    return count, failures


def _run_module(
    info: ModuleInfo, dtype: torch.dtype, gradient: bool, training: bool, random: bool, sample: Any, phase: Phase
) -> bool:
    phase("cpu")
    try:
        torch.manual_seed(0)
        module = info.module_cls(*sample.constructor_input.args, **sample.constructor_input.kwargs)
        module = module.to(dtype).train(training)
        inputs = sample.forward_input.args, sample.forward_input.kwargs
        if info.is_lazy:  # its parameters are made by a first call
            _pass(module, Transfer("cpu")(inputs), False)
        there, there_inputs = copy.deepcopy(module), Transfer("tpu")(inputs)
        truth, wide_inputs = copy.deepcopy(module), inputs
        torch.manual_seed(0)
        expected = _pass(module, Transfer("cpu")(inputs), gradient)
    except Exception:  # CPU PyTorch refuses the sample
        return False
    phase("tpu")
    there = there.to("tpu")
    torch.manual_seed(0)
    actual = _pass(there, there_inputs, gradient)
    wide = functools.cache(lambda: _pass(truth.double(), widened(wide_inputs), gradient))
    assert_same(actual, expected, truth=wide, values="range" if random else "close", strides=not gradient)
    return True


def _pass(module: torch.nn.Module, inputs: tuple[Any, Any], gradient: bool) -> Any:
    args, kwargs = inputs
    result = module(*args, **kwargs)
    if not gradient:
        return result, dict(module.state_dict())
    leaves = [
        t for t in (*module.parameters(), *tree_leaves(inputs)) if isinstance(t, torch.Tensor) and t.requires_grad
    ]
    outputs = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor) and t.requires_grad]
    if not outputs or not leaves:
        return []
    return list(torch.autograd.grad(outputs, leaves, [cotangent(t, 0) for t in outputs], allow_unused=True))


def check_optimizer(name: str, dtype: torch.dtype, limit: int, phase: Phase) -> Result:
    """Runs a few steps under each configuration; arguments and answer as :func:`tests.conformance.operators.check`."""
    info, implementation = optimizers()[name], name.rpartition(".")[2]
    flags = {flag: flag == implementation for flag in info.supported_impls}
    phase("cpu")
    given = [
        OptimizerInput(params=None, kwargs=x.kwargs | flags, desc=x.desc) for x in info.optim_inputs_func(device="cpu")
    ]
    run = functools.partial(_run_optimizer, info, dtype)
    return _count([(f"configuration {i} {x.desc}", x) for i, x in enumerate(given)], run, limit, phase)


def _run_optimizer(info: OptimizerInfo, dtype: torch.dtype, sample: OptimizerInput, phase: Phase) -> bool:
    phase("cpu")
    try:
        expected = _train(info, dtype, sample.kwargs, "cpu")
    except Exception:
        return False
    phase("tpu")
    actual = _train(info, dtype, sample.kwargs, "tpu")
    wide = functools.cache(lambda: _train(info, torch.float64, sample.kwargs, "cpu", dtype))
    assert_same(actual, expected, truth=wide)
    return True


def _train(
    info: OptimizerInfo, dtype: torch.dtype, kwargs: dict[str, Any], device: str, made_in: torch.dtype | None = None
) -> Any:
    """Parameters and state after a few steps with gradients that are the same on every device."""
    generator = torch.Generator().manual_seed(3)

    def random(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(made_in or dtype).to(dtype).to(device)

    shapes = [(4, 3), (5, 2)] if info.name == "Muon" else [(4, 3), (5,), ()]
    parameters = [torch.nn.Parameter(random(shape)) for shape in shapes]
    kwargs = {
        k: v.to(device) if isinstance(v, torch.Tensor) and v.ndim == 0 else v for k, v in copy.deepcopy(kwargs).items()
    }
    optimizer = info.optim_cls(parameters, **kwargs)
    for _ in range(_STEPS):
        gradients = [random(p.shape) for p in parameters]
        if info.only_supports_sparse_grads:
            gradients = [g.to_sparse() for g in gradients]

        def closure(gradients: list[torch.Tensor] = gradients) -> torch.Tensor:
            for p, g in zip(parameters, gradients, strict=True):
                p.grad = g
            return sum((p.detach() * p.detach()).sum() for p in parameters)

        optimizer.step(closure)
    # Numbers such as `step` stay on the CPU on every device.
    state = [
        {k: v for k, v in optimizer.state[p].items() if isinstance(v, torch.Tensor) and v.ndim} for p in parameters
    ]
    return [p.detach() for p in parameters], state
