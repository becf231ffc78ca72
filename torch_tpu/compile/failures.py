"""What happens when a graph cannot be compiled: whose fault it is, and the way round."""

from __future__ import annotations

import operator
import re
import time
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Graph, GraphModule, Node

from torch_tpu import _C
from torch_tpu.programs import options
from torch_tpu.tracing.graph import CompileError, label, origin
from torch_tpu.tracing.program import Argument, Plan

if TYPE_CHECKING:
    from torch_tpu.bounded.graph import Pair
    from torch_tpu.compile.graph import Programs, Runnable
    from torch_tpu.compile.settings import Settings

#: How long the search for an operator that XLA refuses may take.
SEARCH_SECONDS = 60.0

_LOCATION = re.compile(r'loc\("([^"]*)"(?:\("((?:[^"\\]|\\.)*)":(\d+):\d+\))?\)')
_NAMED = re.compile(r'op_name="([^"]*)"(?:.*?source_file="([^"]*)" source_line=(\d+))?')


# ---- which operator -------------------------------------------------------------------------------------------------
def explained(
    programs: Programs, plan: Plan, arguments: Sequence[Argument], level: str, error: Exception
) -> CompileError:
    """XLA's error with the operator and the user's line, as far as they can be found."""
    place = _place(programs, plan, arguments, level, error)
    return CompileError(f"torch.compile on tpu: XLA cannot compile {place or programs.name}: {error}")


def _place(programs: Programs, plan: Plan, arguments: Sequence[Argument], level: str, error: Exception) -> str:
    try:
        located = programs.build(arguments, level, locations=True)
    except Exception:  # it did not fail before: the error at hand is what counts
        return ""
    if " loc(" in plan.text:  # where XLA finds the error in the text is what tells its operator
        error = _refused(programs.build(arguments, level), programs.options) or error
    if line := re.search(r"^-:(\d+):", _message(error), re.MULTILINE):
        return _at_line(located.text, int(line[1]))
    if found := _in_message(located, programs.options):
        return found
    return _searched(programs, arguments, level)


def _message(error: Exception) -> str:
    return str(error).partition("Compiling a program: ")[2] or str(error)


def _at_line(text: str, number: int) -> str:
    """The operator of a line of the text; that of a region is behind its end."""
    for line in text.splitlines()[number - 1 :]:
        if found := _LOCATION.search(line):
            return _spelled(*found.groups())
    return ""


def _spelled(operator: str, path: str | None, line: str | None) -> str:
    return f"{operator} ({path}:{line})" if path else operator


def _in_message(located: Plan, scope: options.Scope) -> str:
    """What the same error says of a text with locations."""
    error = str(_refused(located, scope) or "")
    found = _LOCATION.search(error) or _NAMED.search(error)
    return _spelled(*found.groups()) if found is not None else ""


def _refused(plan: Plan, scope: options.Scope) -> Exception | None:
    try:
        options.compile(plan, scope)
    except _C.PjrtError as error:
        return error
    return None


def _searched(programs: Programs, arguments: Sequence[Argument], level: str) -> str:
    """The first operator with which the graph up to it does not compile, by halving."""
    if programs.bounds:  # its parts have no layouts of their own
        return ""
    nodes = [n for n in programs.module.graph.nodes if n.op == "call_function"]
    low, high = 0, len(nodes) - 1  # the first culprit is in between
    deadline = time.monotonic() + SEARCH_SECONDS
    while low < high and time.monotonic() < deadline:
        middle = (low + high) // 2
        if _compiles(programs, nodes[: middle + 1], arguments, level):
            low = middle + 1
        else:
            high = middle
    if low < high or not nodes:
        return ""
    culprit = nodes[low]
    if culprit.target is operator.getitem:  # what made the tuple was not used before
        culprit = culprit.all_input_nodes[0]
    line = origin(culprit)
    return label(culprit) + (f" ({line})" if line else "")


def _compiles(programs: Programs, nodes: Sequence[Node], arguments: Sequence[Argument], level: str) -> bool:
    from torch_tpu.compile.graph import Programs as Fresh

    part = Fresh("part", _beginning(programs.module, nodes))
    return _refused(part.build(arguments, level), programs.options) is None


def _beginning(module: GraphModule, nodes: Sequence[Node]) -> GraphModule:
    """The graph of some of the first operators, which returns what no other of them uses."""
    graph = Graph()
    copies: dict[Node, Node] = {}
    taken = set(nodes)
    for node in module.graph.nodes:
        if node.op in ("placeholder", "get_attr") or node in taken:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    last = [n for n in nodes if not any(user in taken for user in n.users)]
    graph.output([copies[n] for n in last if isinstance(n.meta.get("val"), torch.Tensor)])
    return GraphModule(module, graph)


# ---- operator by operator -------------------------------------------------------------------------------------------
class _Eager(torch.fx.Interpreter):
    """Runs a graph on the device without compiling it."""

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        value = super().get_attr(target, args, kwargs)
        return value.to("tpu") if isinstance(value, torch.Tensor) and target in self._on_device else value

    def __init__(self, module: GraphModule) -> None:
        super().__init__(module)
        made = ((n.target, n.meta.get("val")) for n in module.graph.nodes if n.op == "get_attr")
        self._on_device = {name for name, t in made if isinstance(t, torch.Tensor) and t.device.type == "tpu"}


def eagerly(module: GraphModule) -> Runnable:
    """What runs a graph operator by operator."""

    def run(inputs: list[Any]) -> list[Any]:
        given = [*inputs]
        inputs.clear()
        with torch.no_grad():
            outputs = _Eager(module).run(*given)
        return [*outputs] if isinstance(outputs, tuple | list) else [outputs]

    return run


def warn(error: Exception) -> None:
    """Says that a graph runs eagerly, and why."""
    warnings.warn(f"torch_tpu: a compiled graph runs operator by operator, because of: {error}", stacklevel=2)


def guarded(run: Runnable, module: GraphModule, settings: Settings, pair: Pair, is_backward: bool) -> Runnable:
    """``run``, or operator by operator from its first failure to compile on, with ``fallback="eager"``."""
    if settings.fallback != "eager":
        return run
    instead: list[Callable[[list[Any]], list[Any]]] = []

    def call(inputs: list[Any]) -> list[Any]:
        if instead:
            return instead[0](inputs)
        kept = [*inputs]
        try:
            return run(inputs)
        except CompileError as error:
            if pair.buckets is not None:
                if is_backward:  # what the forward pass saved is padded
                    raise
                pair.give_up(str(error))
            warn(error)
            instead.append(eagerly(module))
            return instead[0](kept)

    return call
