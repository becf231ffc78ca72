"""From a graph of operators, as AOTAutograd leaves it, to a program.

The nodes of a graph (torch.fx) run one after the other through the :class:`Tracer`, as the operators of a
decomposition do, so a compiled function means what its operators mean one by one.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx import GraphModule, Node
from torch.utils._python_dispatch import _disable_current_modes

from torch_tpu.tracing.program import Argument, Call, Plan, finish
from torch_tpu.tracing.tracer import LoweringError, Tracer

#: The key of ``torch.fx.traceback.annotate`` under which ``torch.tpu.precision`` leaves its level.
PRECISION = "torch_tpu.precision"

#: Rules of higher-order operators by name: called with the interpreter that runs subgraphs, and the arguments.
HigherOrderRule = Callable[..., Any]
_higher_order: dict[str, HigherOrderRule] = {}


_TORCH = os.path.dirname(torch.__file__) + os.sep


class CompileError(RuntimeError):
    """An operator of a graph has no program; the text names it and the user's line."""


def higher_order(name: str) -> Callable[[HigherOrderRule], HigherOrderRule]:
    """Registers the rule of a higher-order operator (``cond``, ``while_loop``, ...)."""

    def register(rule: HigherOrderRule) -> HigherOrderRule:
        _higher_order[name] = rule
        return rule

    return register


def has_rule(op: HigherOrderOperator) -> bool:
    """Whether a higher-order operator can be part of a program."""
    _load_higher_order()
    return op.name() in _higher_order


def _load_higher_order() -> None:
    from torch_tpu.lowering import control_flow, flex_attention  # noqa: F401


def user_line(node: Node) -> str:
    """``model.py:12`` of the innermost line of the user's that made a node, or nothing."""
    frames = [line.strip() for line in (node.stack_trace or "").splitlines() if line.strip().startswith("File ")]
    if not frames:
        return ""
    frames = [frame for frame in frames if _TORCH not in frame] or frames  # torch.export has PyTorch's modules too
    path, _, rest = frames[-1].removeprefix('File "').partition('", line ')
    return f"{path}:{rest.partition(',')[0]}"


def label(node: Node) -> str:
    """The operator of a node as an error names it."""
    target = node.target
    if isinstance(target, OpOverload):
        return target.name()
    if isinstance(target, HigherOrderOperator):
        return target.name()
    return getattr(target, "__name__", str(target))


def origin(node: Node) -> str:
    """Where a node comes from: the user's line, else the module of PyTorch's whose operator it is, or nothing."""
    if line := user_line(node):
        return line
    stack: dict[str, Any] = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    path, kind = [("", None), *stack.values()][-1]
    name = re.sub(r"\['?(\w+)'?\]", r".\1", re.sub(r"^L\['\w+'\]|\._modules", "", str(path))).strip(".")
    return f"{getattr(kind, '__name__', kind)} {name}".strip() if kind is not None else ""


def location(node: Node) -> str:
    """The operator and the user's line of a node as MLIR spells them: ``"aten::sin"("model.py":12:0)``."""
    path, _, line = user_line(node).rpartition(":")
    name = label(node) if line.isdigit() or not origin(node) else f"{label(node)} in {origin(node)}"
    place = f"({_quoted(path)}:{line}:0)" if line.isdigit() else ""
    return _quoted(name) + place


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def build_graph(
    name: str,
    module: GraphModule,
    arguments: Sequence[Argument],
    *,
    precision: str,
    emulate_precision: bool,
    interpreter: Callable[[Tracer], Interpreter] | None = None,
    as_predicted: bool = True,
) -> Plan:
    """Traces a graph.

    Args:
        name: For messages.
        module: Operators of ``aten`` and others that have rules or definitions, and higher-order ones.
        arguments: One per placeholder, described as for :func:`torch_tpu.tracing.program.build`.
        precision: ``medium``, ``high`` or ``highest``, where the graph does not say otherwise.
        emulate_precision: See :class:`Tracer`.
        interpreter: Makes what runs the graph; default: :class:`Interpreter`.
        as_predicted: See :func:`torch_tpu.tracing.program.finish`.

    Raises:
        CompileError: An operator cannot be part of a program.
    """
    trace = Tracer(precision, emulate_precision)
    call = Call(trace)
    with outside_of_modes(), trace.active():
        inputs = [call.argument(a) for a in arguments]
        outputs = (interpreter or Interpreter)(trace).run(module, inputs)
        plan = finish(name, trace, call, [(t, True) for t in outputs], as_predicted)
    plan.is_graph = True
    return plan


@contextlib.contextmanager
def outside_of_modes() -> Iterator[None]:
    """Neither autograd nor autocast nor the modes of the code that compiles see the operators of a trace."""
    with _disable_current_modes(), torch._C._AutoDispatchBelowAutograd(), torch._C._DisableAutocast():
        yield


class Interpreter:
    """Runs graphs, one within another, inside a trace.

    Args:
        trace: The trace.
        locations: Whether the text says of each operation which operator and line of the user's it is for.
    """

    def __init__(self, trace: Tracer, locations: bool = False) -> None:
        self.trace = trace
        self.locations = locations
        self.node: Node  # the one at hand

    def run(self, module: GraphModule, inputs: Sequence[Any]) -> list[Any]:
        """The outputs of ``module`` for ``inputs``: traced tensors and plain objects."""
        values: dict[Node, Any] = {}
        given = iter(inputs)
        for node in module.graph.nodes:
            if node.op == "placeholder":
                values[node] = next(given)
            elif node.op == "get_attr":
                values[node] = self._constant(_attribute(module, node.target))
            elif node.op == "output":
                outputs = torch.fx.node.map_arg(node.args[0], values.__getitem__)
                return [*outputs] if isinstance(outputs, tuple | list) else [outputs]
            else:
                args = torch.fx.node.map_arg(node.args, values.__getitem__)
                kwargs = torch.fx.node.map_arg(node.kwargs, values.__getitem__)
                values[node] = self._node(node, args, kwargs)
        raise LoweringError("a graph without an output node")

    def _constant(self, value: Any) -> Any:
        """A small tensor on the host as a traced one; a subgraph as it is."""
        if not isinstance(value, torch.Tensor):
            return value
        t = torch.empty(value.shape, dtype=value.dtype, device="meta")
        self.trace.bind(t, self.trace.read(value))
        return t

    def _node(self, node: Node, args: Any, kwargs: Any) -> Any:
        before, self.node = self.trace.origin, node
        place = self.trace.function.location
        line = origin(node)
        self.trace.origin = f" in {label(node)}" + (f" ({line})" if line else "")
        if self.locations:
            self.trace.function.location = location(node) if line or place is None else place
        try:
            with self.trace.scoped_precision(_precision(node)):
                return self.execute(node.target, args, kwargs)
        except CompileError:
            raise
        except Exception as error:
            raise CompileError(f"torch.compile on tpu: {error}{self._where(error)}") from error
        finally:
            self.trace.origin, self.trace.function.location = before, place

    def _where(self, error: Exception) -> str:
        """The origin, unless the text has it."""
        return "" if self.trace.origin and self.trace.origin in str(error) else f"; {self.trace.origin.strip()}"

    def execute(self, target: Any, args: Any, kwargs: Any) -> Any:
        """What one node's target gives for traced tensors."""
        if isinstance(target, OpOverload):
            return self.trace.call(target, args, kwargs)
        if isinstance(target, HigherOrderOperator):
            if not has_rule(target):
                raise NotImplementedError(
                    f"the higher-order operator '{target.name()}' has no rule on tpu; leave it out of the compiled "
                    f"function (torch.compiler.disable)"
                )
            return _higher_order[target.name()](self, *args, **kwargs)
        return target(*args, **kwargs)


def _precision(node: Node) -> str | None:
    """The level of ``torch.tpu.precision`` around a node of the forward pass: backward passes run outside of it."""
    if node.meta.get("partitioner_tag") == "is_backward":
        return None
    return (node.meta.get("custom") or {}).get(PRECISION)


def _attribute(module: GraphModule, path: Any) -> Any:
    value: Any = module
    for name in str(path).split("."):
        value = getattr(value, name)
    return value
