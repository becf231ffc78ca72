"""From a function and descriptions of its arguments to StableHLO, without memory for any of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.utils.stateless import _reparametrize_module
from torch.optim.adamw import adamw
from torch.utils._pytree import tree_flatten, tree_unflatten

from torch_tpu.compile.graph import geometry
from torch_tpu.distributed.partition import Partition
from torch_tpu.stablehlo import Type
from torch_tpu.tracing.graph import Interpreter, build_graph
from torch_tpu.tracing.program import Plan

LEVELS = ("medium", "high", "highest")


@dataclass
class Input:
    """An array that the program takes: where it comes from, and whether the program gives it a new value."""

    name: str
    type: Type
    kind: str  # parameter, buffer or argument
    is_written: bool = False


@dataclass
class Traced:
    """A function as a program for a TPU.

    Attributes:
        name: The function's.
        graph: Its operators, PyTorch's.
        plan: The StableHLO and its calling convention.
        inputs: In the order of the graph's.
        results: What the function returns, as a pytree of None and indices of the results that are tensors.
        precision: Of float32 products.
        mesh: The devices that run it together; None: one.
    """

    name: str
    graph: GraphModule
    plan: Plan
    inputs: list[Input]
    results: Any
    precision: str
    mesh: Partition | None = None


def trace(
    function: Callable[..., Any] | nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    precision: str = "medium",
    mesh: Partition | None = None,
) -> Traced:
    """Traces a function for a TPU.

    Args:
        function: A function or a module. Tensors that it captures become constants, unless they are a module's that is
            the function, its owner, or an argument.
        args: Its arguments. Of tensors, on whatever device, only dtype, sizes and strides count: ``meta`` ones will do.
            Modules may be arguments: their parameters and buffers become inputs.
        kwargs: Its keyword arguments.
        precision: ``medium``, ``high`` or ``highest``, for products of float32.
        mesh: The devices that run the program together, which functional collectives name dimensions of.

    Raises:
        CompileError: An operator has no program; the text names it and the line.
        ValueError: The precision is none of the three.
        Exception: What the function raises for these arguments.
    """
    if precision not in LEVELS:
        raise ValueError(f"The precision must be one of {', '.join(LEVELS)}, got {precision!r}.")
    with FakeTensorMode(allow_non_fake_inputs=True):
        call = _Call(function, args, dict(kwargs or {}))
        with torch.random.fork_rng(devices=[]):
            graph = make_fx(call.run, tracing_mode="fake", record_module_stack=True, record_stack_traces=True)(
                *call.fakes
            )
        arguments = geometry(call.fakes)
    name = getattr(function, "__name__", type(function).__name__)
    with mesh.active() if mesh is not None else contextlib.nullcontext():
        plan = build_graph(
            name, graph, arguments, precision=precision, emulate_precision=False,
            interpreter=lambda tracer: Interpreter(tracer, locations=True),
        )  # fmt: skip
    written = {o.slot for o in plan.outputs if o.slot >= 0}
    for i, a in enumerate(arguments):
        call.inputs[i].is_written = a.slot in written  # type: ignore[union-attr]
    return Traced(name, graph, plan, call.inputs, call.results, precision, mesh)


def fake_call(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], mode: Any) -> None:
    """Calls a function with tensors on tpu that have no memory; ``mode``, a dispatch mode, sees its operators."""
    environment = ShapeEnv(allow_scalar_outputs=True, allow_dynamic_output_shape_ops=True)
    with FakeTensorMode(allow_non_fake_inputs=True, shape_env=environment):
        call = _Call(function, args, dict(kwargs))
        with torch.random.fork_rng(devices=[]), mode:
            call.run(*call.fakes)


class _Call:
    """A call whose tensors are fake ones on tpu: those of the arguments, and of modules among them.

    Attributes:
        inputs: What the tensors are.
        fakes: The tensors.
        results: After :meth:`run`: what the function returns, with the number of each tensor in its place.
    """

    def __init__(self, function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self.function = function
        self.leaves, self._spec = tree_flatten((tuple(args), kwargs))
        owner = function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
        self.modules = [m for m in (owner, *self.leaves) if isinstance(m, nn.Module)]
        self.inputs: list[Input] = []
        self.fakes: list[Tensor] = []
        self.results: Any = None
        self._seen: dict[int, int] = {}
        self._states = [self._state(k, module) for k, module in enumerate(self.modules)]
        self._given = [
            self._place(f"argument {i}", x, "argument") if isinstance(x, Tensor) else None
            for i, x in enumerate(self.leaves)
        ]

    def _state(self, k: int, module: nn.Module) -> dict[str, int]:
        prefix = "" if len(self.modules) == 1 else f"{k}."
        named: list[tuple[str, Tensor, str]] = [
            (n, p, "parameter") for n, p in module.named_parameters(remove_duplicate=False)
        ]
        named += [(n, b, "buffer") for n, b in module.named_buffers(remove_duplicate=False)]
        return {n: self._place(prefix + n, t, kind) for n, t, kind in named}

    def _place(self, name: str, t: Tensor, kind: str) -> int:
        if id(t) not in self._seen:
            self._seen[id(t)] = len(self.fakes)
            self.fakes.append(_fake(t))
            self.inputs.append(Input(name, Type(tuple(t.shape), t.dtype), kind))
        return self._seen[id(t)]

    def run(self, *tensors: Tensor) -> list[Tensor]:
        """Calls the function with ``tensors`` for its own; returns those of its results."""
        values = [x if at is None else tensors[at] for x, at in zip(self.leaves, self._given, strict=True)]
        positional, named = tree_unflatten(values, self._spec)
        with _swapped(self.modules, [{n: tensors[i] for n, i in s.items()} for s in self._states]):
            returned = self.function(*positional, **named)
        out, spec = tree_flatten(returned)
        found = [x for x in out if isinstance(x, Tensor)]
        numbers = iter(range(len(found)))
        self.results = tree_unflatten([next(numbers) if isinstance(x, Tensor) else None for x in out], spec)
        return found


def _fake(t: Tensor) -> Tensor:
    made = torch.empty_strided(tuple(t.shape), t.stride(), dtype=t.dtype, device="tpu")
    return made.requires_grad_(t.requires_grad and (t.is_floating_point() or t.is_complex()))


@contextlib.contextmanager
def _swapped(modules: Sequence[nn.Module], states: Sequence[dict[str, Tensor]]) -> Iterator[None]:
    """The modules with other tensors."""
    with contextlib.ExitStack() as stack:
        for module, state in zip(modules, states, strict=True):
            stack.enter_context(_reparametrize_module(module, state, tie_weights=True))
        yield


def update(
    names: Sequence[str],
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    exp_avg: Mapping[str, Tensor],
    exp_avg_sq: Mapping[str, Tensor],
    steps: Mapping[str, Tensor],
    lr: float,
    weight_decay: float,
) -> None:
    """AdamW's step, parameters and state changed where they are; the state by the names of the parameters."""
    adamw(
        [*parameters], [*gradients], [exp_avg[n] for n in names], [exp_avg_sq[n] for n in names], [],
        [steps[n] for n in names], foreach=False, capturable=True, differentiable=False, fused=False,
        grad_scale=None, found_inf=None, has_complex=False, amsgrad=False, beta1=0.9, beta2=0.999, lr=lr,
        weight_decay=weight_decay, eps=1e-8, maximize=False,
    )  # fmt: skip


def training_step(
    module: nn.Module, loss: Callable[..., Tensor], *, lr: float = 1e-3, weight_decay: float = 0.01
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A whole training step with AdamW as one function, for :func:`torch_tpu.aot.compile`.

    Args:
        module: The model.
        loss: Called with the module and the batch; returns a scalar.
        lr: The learning rate.
        weight_decay: AdamW's.

    Returns:
        The function, and the arguments that come before the batch: the module, and the state of the optimizer as
        tensors without memory. It gives the loss; parameters and state are updated where they are.
    """
    names = [n for n, p in module.named_parameters() if p.requires_grad]
    parameters = dict(module.named_parameters())

    def state() -> dict[str, Tensor]:
        return {n: torch.empty_like(parameters[n], device="meta", requires_grad=False) for n in names}

    steps = {n: torch.empty((), device="meta") for n in names}

    def step(
        module: nn.Module,
        exp_avg: dict[str, Tensor],
        exp_avg_sq: dict[str, Tensor],
        steps: dict[str, Tensor],
        *batch: Any,
    ) -> Tensor:
        value = loss(module, *batch)
        now = dict(module.named_parameters())
        params: list[Tensor] = [now[n] for n in names]
        grads = torch.autograd.grad(value, params)
        with torch.no_grad():
            update(names, params, grads, exp_avg, exp_avg_sq, steps, lr, weight_decay)
        return value.detach()

    return step, (module, state(), state(), steps)
