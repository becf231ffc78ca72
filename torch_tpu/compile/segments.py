"""A graph that is not all for the device: cut into programs and steps that run as they stand.

AOTAutograd's graphs may hold CPU tensors (an optimizer's step counters), copies between devices, and operators of the
user's that are opaque (``torch.library.custom_op``). Each node gets a level, even for steps and odd for programs, not
lower than those of its inputs; the nodes of a level are one segment, and segments run in order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx import Graph, GraphModule, Node

from torch_tpu.distributed import partition
from torch_tpu.lowering.data_dependent import HOST_COMPOSITES
from torch_tpu.programs import fallback
from torch_tpu.tracing.graph import has_rule
from torch_tpu.tracing.schema import op_info

#: Elements up to which a CPU tensor may be a constant of a program.
CONSTANT_ELEMENTS = 4096


class Segment(NamedTuple):
    """Part of a graph: ``module`` takes the values of ``inputs`` and gives those of ``outputs``."""

    module: GraphModule
    is_program: bool
    inputs: list[Node]
    outputs: list[Node]


def split(module: GraphModule) -> list[Segment] | None:
    """The segments of a graph; None if it is one program as it is."""
    levels = _levels(module.graph)
    if all(level == 1 for node, level in levels.items() if node.op == "call_function"):
        return None
    return [_segment(module, levels, level) for level in sorted(set(levels.values()))]


def _levels(graph: Graph) -> dict[Node, int]:
    """The level of each operator, constants left out: they are made where they are used."""
    levels: dict[Node, int] = {}
    floor: dict[Node, int] = {}  # of a tensor's readers, after a write
    constant: set[Node] = set()
    for node in graph.nodes:
        if node.op == "get_attr" or _is_constant(node, constant):
            constant.add(node)
        if node.op != "call_function" or node in constant:
            continue
        inputs = node.all_input_nodes
        level = max([0, *(levels.get(i, 0) for i in inputs), *(floor.get(i, 0) for i in inputs)])
        written = _written(node)
        for target in written:
            level = max([level, *(levels[user] for user in target.users if user in levels)])
        if level % 2 != _is_program(node):
            level += 1
        levels[node] = level
        for target in written:
            floor[target] = level
    return levels


def _value(node: Node) -> Any:
    return node.meta.get("val")


def _tensors(node: Node) -> list[torch.Tensor]:
    flat = torch.utils._pytree.tree_leaves(_value(node))
    return [t for t in flat if isinstance(t, torch.Tensor)]


def _is_constant(node: Node, constant: set[Node]) -> bool:
    """Whether a CPU value depends on nothing and is small: a program can have it as a constant."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return False
    if not all(i in constant for i in node.all_input_nodes) or torch.Tag.nondeterministic_seeded in node.target.tags:
        return False
    tensors = _tensors(node)
    return bool(tensors) and all(t.device.type == "cpu" and t.numel() <= CONSTANT_ELEMENTS for t in tensors)


def _written(node: Node) -> list[Node]:
    """The inputs that an operator writes."""
    if not isinstance(node.target, OpOverload):
        return []
    found: list[Node] = []
    for i, argument in enumerate(node.target._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = node.kwargs.get(argument.name, node.args[i] if i < len(node.args) else None)
        found += [x for x in torch.utils._pytree.tree_leaves(value) if isinstance(x, Node)]
    return found


def _is_program(node: Node) -> bool:
    """Whether the device runs a node as part of a program."""
    target = node.target
    if isinstance(target, HigherOrderOperator):
        return has_rule(target)
    if not isinstance(target, OpOverload):  # arithmetic on sizes, a part of a tuple: where its inputs are
        made_by = [i for i in node.all_input_nodes if i.op == "call_function"]
        return all(_is_program(i) for i in made_by)
    if any(t.device.type != "tpu" for t in _tensors(node)) or _uploads(node):
        return False
    return not _is_opaque(target)


def _uploads(node: Node) -> bool:
    """Whether a node copies a CPU tensor with dimensions to the device."""
    given = [t for i in node.all_input_nodes for t in _tensors(i)]
    return any(t.device.type != "tpu" and (t.ndim > 0 or t.numel() != 1) for t in given)


def _is_opaque(op: OpOverload) -> bool:
    """Whether an operator runs by itself: a custom one that has a kernel and no rule, or one of the host's."""
    name = op.name()
    if name.removeprefix("aten::") in HOST_COMPOSITES or fallback.allowed(name):
        return True
    if op.namespace in ("aten", "prims", "prim", "torchvision"):
        return False
    if op.namespace == "_c10d_functional":  # each process runs programs of its own
        return partition.current() is None
    keys = torch._C.DispatchKey
    if op_info(op).rule is not None or op.has_kernel_for_dispatch_key(keys.CompositeImplicitAutograd):
        return False
    kernels = (keys.PrivateUse1, keys.AutogradPrivateUse1, keys.CompositeExplicitAutograd, keys.BackendSelect)
    return any(map(op.has_kernel_for_dispatch_key, kernels))  # without one it is refused when it is traced


def _segment(module: GraphModule, levels: dict[Node, int], level: int) -> Segment:
    graph = Graph()
    copies: dict[Node, Node] = {}
    inputs: list[Node] = []

    def copy_of(node: Node) -> Node:
        if node not in copies:
            copies[node] = graph.node_copy(node, copy_of)
        return copies[node]

    own = [n for n in module.graph.nodes if levels.get(n) == level]
    for node in own:
        for needed in _needed(node, levels, level):
            if needed not in copies:
                inputs.append(needed)
                copies[needed] = graph.placeholder(needed.name)
                copies[needed].meta = dict(needed.meta)
    for node in own:
        copy_of(node)
    outputs = [n for n in own if any(levels.get(user) != level for user in n.users)]
    graph.output([copies[n] for n in outputs])
    return Segment(GraphModule(module, graph), level % 2 == 1, inputs, outputs)


def _needed(node: Node, levels: dict[Node, int], level: int) -> list[Node]:
    """The values from outside that a node of a level takes, through constants."""
    found: list[Node] = []
    for i in node.all_input_nodes:
        if i.op == "placeholder" or levels.get(i, level) != level:
            found.append(i)
        elif i not in levels and i.op != "get_attr":
            found += _needed(i, levels, level)
    return found


class Runner:
    """Runs the segments of a graph in order."""

    def __init__(
        self, module: GraphModule, segments: Sequence[Segment], compile_: Callable[[GraphModule], Any]
    ) -> None:
        nodes = [*module.graph.nodes]
        self._number = {node: i for i, node in enumerate(nodes)}
        self._placeholders = [self._number[n] for n in nodes if n.op == "placeholder"]
        self._steps: list[tuple[Callable[[list[Any]], Any], list[int], list[int], list[int]]] = []
        results = nodes[-1].args[0]
        self._results = [*results] if isinstance(results, list | tuple) else [results]
        last: dict[int, int] = {}  # value -> the step that uses it last
        for i, segment in enumerate(segments):
            last.update((self._number[n], i) for n in (*segment.inputs, *segment.outputs))
        last.update((self._number[n], len(segments)) for n in self._results if isinstance(n, Node))
        for i, segment in enumerate(segments):
            run = compile_(segment.module) if segment.is_program else _as_it_stands(segment.module)
            takes, gives = ([self._number[n] for n in side] for side in (segment.inputs, segment.outputs))
            self._steps.append((run, takes, gives, [v for v, step in last.items() if step == i]))
        self._constants = {
            self._number[n]: _constant(module, n)
            for n in self._results
            if isinstance(n, Node) and self._number[n] not in self._placeholders and not _is_made(n, segments)
        }

    def __call__(self, inputs: list[Any]) -> list[Any]:
        values = dict(zip(self._placeholders, inputs, strict=True))
        inputs.clear()
        for run, takes, gives, dead in self._steps:
            taken = [values[i] for i in takes]
            for i in dead:
                values.pop(i, None)
            values.update(zip(gives, run(taken), strict=True))
        values.update((i, make()) for i, make in self._constants.items())
        return [values[self._number[r]] if isinstance(r, Node) else r for r in self._results]


def _is_made(node: Node, segments: Sequence[Segment]) -> bool:
    return any(node in segment.outputs for segment in segments)


def _constant(module: GraphModule, node: Node) -> Callable[[], Any]:
    """Makes a constant that the graph returns: fresh each time, as its operators say."""
    graph = Graph()
    copies: dict[Node, Node] = {}

    def copy_of(n: Node) -> Node:
        if n not in copies:
            copies[n] = graph.node_copy(n, copy_of)
        return copies[n]

    graph.output(copy_of(node))
    return GraphModule(module, graph).forward


def _as_it_stands(module: GraphModule) -> Callable[[list[Any]], Any]:
    def run(inputs: list[Any]) -> Any:
        return module(*inputs)

    return run
