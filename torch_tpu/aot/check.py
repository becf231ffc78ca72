"""Whether a port runs: operators, graph breaks, dtypes, numbers, memory. What ``python -m torch_tpu check`` says."""

from __future__ import annotations

import contextlib
import copy
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.utils import graph_break_reasons
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

from torch_tpu import tpu
from torch_tpu.aot.compile import compile as compile_ahead
from torch_tpu.aot.trace import LEVELS, fake_call
from torch_tpu.lowering.data_dependent import HOST_COMPOSITES
from torch_tpu.tracing.graph import CompileError
from torch_tpu.tracing.schema import op_info
from torch_tpu.tracing.tracer import is_supported

SCHEMA = 1
#: Elements of parameters up to which numbers are compared.
_LARGEST = 200_000_000
_MASKS = (torch.bool, torch.uint8)
_EMULATED = (torch.float64, torch.complex128, torch.int64)


@dataclass
class Operator:
    """An operator that the function calls: how often, where from first, and what tpu has for it.

    ``support`` is ``program`` (it is part of programs), ``data`` (its result's size depends on data, so it ends a
    program and waits for a number), or ``missing``.
    """

    name: str
    count: int
    support: str
    line: str


@dataclass
class Errors:
    """Relative errors against the CPU at float32, for one precision: of the results, and of each layer."""

    results: float
    layers: list[tuple[str, float]]

    @property
    def grows_at(self) -> str:
        """The first layer whose error is four times that of all before it, or nothing."""
        most = 0.0
        for name, error in self.layers:
            if most and error > 4 * most and error > 1e-5:
                return name
            most = max(most, error)
        return ""


@dataclass
class Check:
    """What was found.

    Attributes:
        operators: All, by name.
        raised: What the function raised, if it did.
        stopped: Where it looks at numbers of the device, so that what it calls afterwards is not known.
        graph_breaks: Reasons why ``torch.compile`` makes several graphs, with lines.
        emulated: How many operators have results of a dtype that a TPU computes in software, by dtype.
        errors: By precision; empty if numbers were not compared.
        not_compared: Why not.
        memory: For each topology: whether it fits, bytes that are needed, bytes that there are, and words if it cannot
            be compiled.
        findings: Of the program for the first topology.
    """

    operators: list[Operator] = field(default_factory=list)
    raised: str = ""
    stopped: str = ""
    graph_breaks: list[str] = field(default_factory=list)
    emulated: dict[str, int] = field(default_factory=dict)
    errors: dict[str, Errors] = field(default_factory=dict)
    not_compared: str = ""
    memory: list[dict[str, Any]] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)

    @property
    def runs(self) -> bool:
        """Whether nothing is missing and some topology has the memory, if any was asked for."""
        missing = any(o.support == "missing" for o in self.operators)
        return not self.raised and not missing and not self._is_too_large

    @property
    def _is_too_large(self) -> bool:
        known = [m for m in self.memory if not m["problem"] or "does not fit" in m["problem"]]
        return bool(known) and not any(m["fits"] for m in known)

    @property
    def next(self) -> str:
        """The one thing to change first, or that there is none."""
        missing = [o for o in self.operators if o.support == "missing"]
        if self.raised:
            return f"The function does not run: {self.raised}"
        if self.stopped:
            return f"It looks at numbers of the device, and waits for them: {self.stopped}"
        if missing:
            return f"Replace {missing[0].name} ({missing[0].line}): tpu has no program for it."
        if self._is_too_large:
            return "It fits on no single device: use a smaller batch, checkpointing, or shard it over several."
        if self.graph_breaks:
            return f"Remove the graph break: {self.graph_breaks[0]}"
        data = [o for o in self.operators if o.support == "data"]
        if data:
            return (
                f"{data[0].name} ({data[0].line}) waits for the device to learn a size: a mask of fixed size does not."
            )
        for name in ("float64", "complex128"):
            if self.emulated.get(name):
                return f"{self.emulated[name]} operators compute {name}, in software on a TPU: float32 is native."
        return self.findings[0] if self.findings else "Nothing."

    def to_dict(self) -> dict[str, Any]:
        """As plain data; docs/aot.md says what the fields are."""
        return {
            "schema": SCHEMA,
            "runs": self.runs,
            "next": self.next,
            "raised": self.raised,
            "stopped": self.stopped,
            "operators": [vars(o) for o in self.operators],
            "graph_breaks": self.graph_breaks,
            "emulated": self.emulated,
            "errors": {
                level: {"results": e.results, "layers": [list(pair) for pair in e.layers], "grows_at": e.grows_at}
                for level, e in self.errors.items()
            },
            "not_compared": self.not_compared,
            "memory": self.memory,
            "findings": self.findings,
        }

    def __str__(self) -> str:
        counts = {kind: sum(o.support == kind for o in self.operators) for kind in ("program", "data", "missing")}
        lines = [
            f"operators: {len(self.operators)} different ones, {counts['missing']} missing, {counts['data']} with "
            f"sizes that depend on data"
        ]
        lines += [f"  {o.support}: {o.name} x{o.count}  {o.line}" for o in self.operators if o.support != "program"]
        if self.stopped:
            lines.append(f"what comes after this is not known, for it depends on numbers: {self.stopped}")
        lines.append(f"graph breaks of torch.compile: {len(self.graph_breaks)}")
        lines += [f"  {reason}" for reason in self.graph_breaks]
        if self.emulated:
            listed = ", ".join(f"{name} in {count}" for name, count in self.emulated.items())
            lines.append(f"dtypes computed in software: {listed} operators")
        if self.errors:
            lines.append("relative error of the results against the CPU at float32:")
            for level, e in self.errors.items():
                where = f", grows at {e.grows_at}" if e.grows_at else ""
                lines.append(f"  {level:8} {e.results:.1e}{where}")
        else:
            lines.append(f"numbers were not compared: {self.not_compared}")
        for m in self.memory:
            used = f"{m['needed'] / 2**30:.2f} of {m['capacity'] / 2**30:.0f} GiB" if m["needed"] else m["problem"]
            lines.append(f"memory on {m['topology']}: {'fits' if m['fits'] else 'does not fit'}, {used}")
        lines += [f"- {sentence}" for sentence in self.findings]
        lines.append(f"next: {self.next}")
        return "\n".join(lines)


def check(
    function: Callable[..., Any] | nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    topologies: Sequence[str] = ("v5e", "v6e", "v5p", "tpu7x"),
    numbers: bool = True,
) -> Check:
    """Looks at a function as a port to tpu: nothing of it is changed.

    Args:
        function: A function or a module.
        args: Its arguments. On ``meta``, numbers cannot be compared.
        kwargs: Its keyword arguments.
        topologies: For which to compile it, to learn the memory; none: it is not compiled.
        numbers: Whether to run it, on the CPU and on tpu at each precision.
    """
    kwargs = dict(kwargs or {})
    found = Check()
    collector = _Collector()
    try:
        fake_call(function, args, kwargs, collector)
    except (GuardOnDataDependentSymNode, DataDependentOutputException, DynamicOutputShapeException) as error:
        found.stopped = f"{_first(error)} ({_where(error)})"
    except Exception as error:  # the user's function may raise anything
        found.raised = f"{type(error).__name__}: {_first(error)}"
    found.operators = sorted(collector.operators.values(), key=lambda o: o.name)
    found.emulated = dict(sorted(collector.emulated.items()))
    if found.raised:
        found.not_compared = "the function does not run"
        return found
    found.graph_breaks = _graph_breaks(function, args, kwargs)
    _compare(found, function, args, kwargs, numbers)
    for name in topologies:
        _fit(found, function, args, kwargs, name)
    return found


def _first(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _where(error: Exception) -> str:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if _is_users(f.filename)]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "in PyTorch"


def _is_users(path: str) -> bool:
    path = path.replace("\\", "/")
    return "/torch/" not in path and "/torch_tpu/" not in path and not path.startswith("<")


class _Collector(TorchDispatchMode):
    """Notes the operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: dict[str, Operator] = {}
        self.emulated: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, OpOverload) and func.namespace == "prim":  # what a fake tensor is asked about itself
            return func(*args, **(kwargs or {}))
        name = func.name() if isinstance(func, OpOverload) else str(func)
        if name not in self.operators:
            self.operators[name] = Operator(name, 0, _support(func, args), _line())
        self.operators[name].count += 1
        out = func(*args, **(kwargs or {}))
        for dtype in {t.dtype for t in tree_leaves(out) if isinstance(t, Tensor)} & {*_EMULATED}:
            word = str(dtype).removeprefix("torch.")
            self.emulated[word] = self.emulated.get(word, 0) + 1
        return out


def _support(func: Any, args: Sequence[Any]) -> str:
    if not isinstance(func, OpOverload):
        return "missing"
    if func is torch.ops.aten.index.Tensor and any(t is not None and t.dtype in _MASKS for t in args[1]):
        return "data"
    if op_info(func).name.removeprefix("aten::") in HOST_COMPOSITES or func.name() == "aten::_local_scalar_dense":
        return "data"
    return "program" if is_supported(func) else "missing"


def _line() -> str:
    """The user's line that is running: the innermost one outside of PyTorch and of this package."""
    for frame in reversed(traceback.extract_stack()):
        if _is_users(frame.filename):
            return f"{frame.filename}:{frame.lineno}"
    return ""


def _graph_breaks(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[str]:
    torch._dynamo.reset()
    try:
        torch.compile(function, backend="eager")(*args, **kwargs)
        breaks = [*graph_break_reasons]  # explain() has none for what comes before the first operator
    except Exception as error:  # Dynamo's own, or of meta tensors that have no numbers
        return [f"torch.compile cannot trace it: {_first(error)}"]
    finally:
        torch._dynamo.reset()
    reasons = []
    for reason in breaks:
        frame = reason.user_stack[-1] if reason.user_stack else None
        where = f" ({frame.filename}:{frame.lineno})" if frame is not None else ""
        reasons.append(f"{str(reason.reason).splitlines()[0]}{where}")
    return reasons


# ---- numbers --------------------------------------------------------------------------------------------------------
def _compare(found: Check, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], wanted: bool) -> None:
    modules = [m for m in (function, *tree_flatten((args, kwargs))[0]) if isinstance(m, nn.Module)]
    tensors = [t for m in modules for t in (*m.parameters(), *m.buffers())]
    tensors += [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    if not wanted:
        found.not_compared = "it was not asked for"
    elif any(t.device.type == "meta" for t in tensors):
        found.not_compared = "some of its tensors are on meta and have no numbers"
    elif sum(t.numel() for t in tensors) > _LARGEST:
        found.not_compared = f"it has more than {_LARGEST:,} elements"
    else:
        expected, layers = _run(function, args, kwargs, "cpu")
        for level in LEVELS:
            precision = tpu.Precision[{"medium": "DEFAULT", "high": "HIGH", "highest": "HIGHEST"}[level]]
            with tpu.precision(precision):
                got, got_layers = _run(function, args, kwargs, "tpu")
            pairs = [(name, _error(got_layers[name], layers[name])) for name in layers if name in got_layers]
            found.errors[level] = Errors(max(map(_error, got, expected), default=0.0), pairs)


def _run(
    function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], device: str
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The results as float64 on the CPU, and those of each layer."""

    def moved(x: Any) -> Any:
        return copy.deepcopy(x).to(device).float() if isinstance(x, nn.Module) else x

    def placed(t: Tensor) -> Tensor:
        t = t.detach().to(device)
        return t.float() if t.is_floating_point() else t

    layers: dict[str, Tensor] = {}
    function = moved(function)
    values = tree_map_only(nn.Module, moved, (tuple(args), dict(kwargs)))
    positional, named = tree_map_only(Tensor, placed, values)
    torch.manual_seed(0)
    modules = [m for m in (function, *tree_leaves((positional, named))) if isinstance(m, nn.Module)]
    with torch.no_grad(), contextlib.ExitStack() as stack:
        for module in modules:
            stack.enter_context(_watched(module.eval(), layers))
        out = function(*positional, **named)
        return [_plain(t) for t in tree_leaves(out) if isinstance(t, Tensor)], {n: _plain(t) for n, t in layers.items()}


@contextlib.contextmanager
def _watched(module: nn.Module, layers: dict[str, Tensor]) -> Iterator[None]:
    def hook(name: str) -> Callable[..., None]:
        def note(_: Any, __: Any, out: Any) -> None:
            first = next((t for t in tree_leaves(out) if isinstance(t, Tensor)), None)
            if first is not None:
                layers[name] = first

        return note

    handles = [m.register_forward_hook(hook(n)) for n, m in module.named_modules() if n and not [*m.children()]]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _plain(t: Tensor) -> Tensor:
    t = t.detach().cpu()
    return t.to(torch.complex128) if t.is_complex() else t.double()


def _error(a: Tensor, b: Tensor) -> float:
    """The norm of the difference over the norm."""
    if a.shape != b.shape:
        return float("inf")
    return float((a - b).norm() / b.norm().clamp_min(1e-30)) if b.numel() else 0.0


# ---- memory ---------------------------------------------------------------------------------------------------------
def _fit(found: Check, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], name: str) -> None:
    entry: dict[str, Any] = {"topology": name, "fits": False, "needed": 0, "capacity": 0, "problem": ""}
    try:
        (estimate,) = compile_ahead(function, args, kwargs, topology=name).estimates
    except ValueError:  # the topology
        raise
    except CompileError as error:
        entry["problem"] = _first(error)
    except Exception as error:  # a function that looks at numbers is no program
        entry["problem"] = f"it is no single program: {_first(error)}"
    else:
        memory = estimate.memory
        entry |= {"fits": memory.fits, "needed": memory.needed, "capacity": memory.capacity}
        found.findings = found.findings or estimate.findings
    found.memory.append(entry)
