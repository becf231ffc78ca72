"""Calls of graphs with open sizes: bounds are chosen, inputs padded, outputs cut to size."""

from __future__ import annotations

import itertools
import logging
import math
import uuid
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Node

from torch_tpu import _C
from torch_tpu.bounded import layout as lay
from torch_tpu.bounded.buckets import Buckets
from torch_tpu.bounded.interpreter import BoundedInterpreter, Context, compacted, layout_of
from torch_tpu.bounded.layout import Layout, Unbounded
from torch_tpu.compile.graph import Programs, geometry, graph_identity
from torch_tpu.tracing.graph import CompileError, Interpreter
from torch_tpu.tracing.program import NumberArgument
from torch_tpu.tracing.tracer import Tracer

#: Bytes of an input up to which it gets its room on the host, which compiles nothing.
HOST_BYTES = 1 << 20


#: Makes of a program's output what the call returns, with the call's sizes and inputs.
Finish = Callable[[Any, lay.Sizes, Sequence[Any]], Any]


@dataclass(eq=False)
class Pair:
    """What the graphs that come from one captured graph share.

    Attributes:
        buckets: The bounds of their sizes; None: nothing is open, or the graph cannot be traced with bounds.
        layouts: Of what the forward pass saves for the backward pass, by node: it stays padded in between.
        traced: What the forward pass saved when it was traced last, as meta tensors.
        problem: Why there are no bounds.
    """

    buckets: Buckets | None = None
    layouts: dict[str, Layout] = field(default_factory=dict)
    traced: dict[str, Tensor] = field(default_factory=dict)
    problem: str = ""
    uid: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "traced": {}}

    def known(self) -> Pair:
        """This pair, or the one that another graph of its has brought into the process."""
        return _pairs.setdefault(self.uid, self)

    def give_up(self, problem: str) -> None:
        """Both graphs are compiled for each size from now on."""
        self.buckets, self.problem = None, problem
        log.info("torch_tpu: a graph with open sizes is compiled for each size: %s", problem)


_pairs: weakref.WeakValueDictionary[str, Pair] = weakref.WeakValueDictionary()
log = logging.getLogger("torch_tpu")


def open_sizes(module: GraphModule) -> list[tuple[int, sympy.Symbol]]:
    """The inputs that are open sizes: position and symbol."""
    found = []
    for i, node in enumerate(n for n in module.graph.nodes if n.op == "placeholder"):
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt) and isinstance(value.node.expr, sympy.Symbol):
            found.append((i, value.node.expr))
    return found


def make_buckets(module: GraphModule, count: int) -> Buckets | None:
    """The bounds of a graph's open sizes, from what is known of them."""
    sizes = open_sizes(module)
    if not sizes:
        return None
    placeholders = [n for n in module.graph.nodes if n.op == "placeholder"]
    env = placeholders[sizes[0][0]].meta["val"].node.shape_env
    upper: list[int | None] = []
    for _, symbol in sizes:
        known = env.var_to_range.get(symbol)
        top = known.upper if known is not None else None
        upper.append(int(top) if isinstance(top, sympy.Integer) and top < 1 << 31 else None)
    return Buckets([s for _, s in sizes], upper, [g.expr for g in env.guards], count)


class Exact(BoundedInterpreter):
    """Lays out what the user sees of the outputs for the true sizes, at the beginning of a flat array."""

    def __init__(self, trace: Tracer, bounds: lay.Sizes, layouts: dict[str, Layout], visible: int) -> None:
        super().__init__(trace, bounds, layouts)
        self.visible = visible
        self.saved: dict[str, Tensor] = {}

    def run(self, module: GraphModule, inputs: Sequence[Any]) -> list[Any]:
        outputs = super().run(module, inputs)
        nodes = _results(module)
        returned: list[Any] = []
        for i, (node, value) in enumerate(zip(nodes, outputs, strict=True)):
            if not isinstance(value, Tensor):
                returned.append(None)
            elif not lay.is_open(layout_of(value)):
                returned.append(value)
            elif i < self.visible:
                returned.append(self.trace.run(_compact, self.context, value, self.order(i, node)))
            else:
                if value.untyped_storage()._cdata in self.flat:  # a window on an input
                    value._torch_tpu_base = (value.untyped_storage().nbytes() // value.itemsize,)  # type: ignore[attr-defined]
                self.saved[node.name] = value
                returned.append(value)
        return returned

    def order(self, i: int, node: Node) -> tuple[int, ...]:
        """The dimensions of output ``i`` as they lie in memory, outermost first."""
        return memory_order(node.meta["val"].stride(), self.bounds)


def _results(module: GraphModule) -> list[Any]:
    (output,) = (n for n in module.graph.nodes if n.op == "output")
    result = output.args[0]
    return [*result] if isinstance(result, tuple | list) else [result]


def memory_order(stride: Sequence[Any], sizes: lay.Sizes) -> tuple[int, ...]:
    """Dimensions by falling stride."""
    strides = [lay.value_of(lay.expression(s), sizes) for s in stride]
    return tuple(sorted(range(len(strides)), key=lambda d: (-strides[d], d)))


def _compact(c: Context, t: Tensor, order: Sequence[int]) -> Tensor:
    """The real elements of ``t``, its dimensions in memory order, flat, and garbage after them."""
    factors = [e for d in order for e in layout_of(t)[d]]
    return compacted(c, t.permute(tuple(order)), factors)


class _Padded(Programs):
    """The programs of a graph for one choice of bounds."""

    run_time_integers = True

    def __init__(
        self, name: str, module: GraphModule, identity: str, bounds: lay.Sizes, given: dict[str, Layout], visible: int
    ) -> None:
        self.bounds, self.given, self.visible = bounds, given, visible
        self.saved: dict[str, Tensor] = {}
        spelled = ",".join(f"{s}<={n}" for s, n in bounds.items())
        layouts = sorted((k, str(v)) for k, v in given.items())
        super().__init__(f"{name}[{spelled}]", module, f"{identity}:{spelled}:{visible}:{layouts}")

    def traced(self, arguments: Sequence[Any]) -> dict[str, Tensor]:
        """What the graph saves, of a program that came from the disk cache."""
        self.build(arguments, "highest")
        return self.saved

    def interpreter(self, trace: Tracer) -> Interpreter:
        made = Exact(trace, self.bounds, self.given, self.visible)
        self.saved = made.saved
        return made


def hinted(module: GraphModule) -> tuple[int, ...] | None:
    """The open sizes of the call for which a graph was captured."""
    placeholders = [n for n in module.graph.nodes if n.op == "placeholder"]
    hints = [placeholders[i].meta["val"].node.hint for i, _ in open_sizes(module)]
    return None if any(h is None for h in hints) else tuple(map(int, hints))


class BoundedGraph:
    """A graph with open sizes. Called with a list of inputs, which it empties, it returns the outputs."""

    def __init__(self, name: str, module: GraphModule, pair: Pair, visible: int, is_backward: bool) -> None:
        self.name, self.module, self.pair, self.visible = name, module, pair, visible
        self.given = pair.layouts if is_backward else {}  # how inputs are laid out that are padded already
        self.identity = graph_identity(module)
        self._sizes = open_sizes(module)
        self.programs: dict[tuple[int, ...], _Padded] = {}  # by bounds
        nodes = [n for n in module.graph.nodes if n.op == "placeholder"]
        self._inputs = [node.meta.get("val") for node in nodes]
        self._open_inputs = [
            (i, node.name, node.meta["val"])
            for i, node in enumerate(nodes)
            if isinstance(node.meta.get("val"), Tensor) and _opens(node.meta["val"])
        ]
        owners = {
            node.meta["val"].untyped_storage()._cdata: i
            for i, node in reversed([*enumerate(nodes)])
            if isinstance(node.meta.get("val"), Tensor) and node.name not in self.given
        }
        self._outputs = [self._output(i, r, owners) for i, r in enumerate(_results(module))]

    def _output(self, i: int, result: Any, owners: dict[int, int]) -> Finish | None:
        """What is done with an output: nothing, a window on it or on an input, or a number."""
        value = result.meta.get("val") if isinstance(result, Node) else result
        if isinstance(value, torch.SymInt):
            return lambda _, sizes, __: lay.value_of(value.node.expr, sizes)
        if isinstance(value, Tensor) and i < self.visible:
            # Noted, for a graph that is stored and loaded again.
            owner = result.meta.setdefault("torch_tpu_alias", owners.get(value.untyped_storage()._cdata))
            if owner is not None:
                return _window(value, owner, self._inputs[owner])
        if isinstance(value, Tensor) and _opens(value) and i < self.visible:
            shape = [lay.expression(n) for n in value.shape]

            def cut(flat: Tensor, sizes: lay.Sizes, _: Sequence[Any]) -> Tensor:
                exact = [lay.value_of(e, sizes) for e in shape]
                strides = [1] * len(exact)
                step = 1
                for d in reversed(memory_order(value.stride(), sizes)):
                    strides[d], step = step, step * max(exact[d], 1)
                return flat.as_strided(exact, strides, 0)

            return cut
        return None if value is None or isinstance(value, Tensor) else lambda *_: value

    def sizes_of(self, inputs: Sequence[Any]) -> tuple[int, ...]:
        """The open sizes of a call."""
        return tuple(inputs[i] for i, _ in self._sizes)

    def check(self, sizes: tuple[int, ...]) -> Future[Any]:
        """Traces the graph for sizes and compiles it in the background; notes how what it saves is laid out.

        Returns:
            The compile.

        Raises:
            Unbounded: Some operator has no bounded form.
        """
        programs = self._programs_for(sizes)
        arguments = self._described(dict(zip((s for _, s in self._sizes), sizes, strict=True)), programs.bounds)
        try:
            started = programs.ahead(arguments)
        except CompileError as error:
            # Sizes that are equal by chance, perhaps: compiled for each size it is right, or really wrong.
            raise Unbounded(str(error.__cause__ or error)) from None
        if self.visible < len(self._outputs):
            self.pair.traced = programs.saved or programs.traced(arguments)
            self.pair.layouts.update({name: layout_of(t) for name, t in self.pair.traced.items()})
        return started

    def _described(self, sizes: lay.Sizes, bounds: lay.Sizes) -> list[Any]:
        """The inputs of a call, as far as the graph tells."""
        inputs: list[Any] = []
        for node in (n for n in self.module.graph.nodes if n.op == "placeholder"):
            value = node.meta.get("val")
            if isinstance(value, Tensor):
                layout = self.given.get(node.name) or lay.simple(value.shape)
                shape = lay.padded(layout, bounds)
                if node.name not in self.given and _opens(value):
                    shape = (math.prod(shape),)
                saved = self.pair.traced.get(node.name) if node.name in self.given else None
                value = saved if saved is not None else torch.empty(shape, dtype=value.dtype, device="meta")
            inputs.append(value)
        numbers = itertools.count()
        return [
            NumberArgument(next(numbers), lay.value_of(a.node.expr, sizes)) if isinstance(a, torch.SymInt) else a
            for a in geometry(inputs)
        ]

    def _programs_for(self, sizes: tuple[int, ...]) -> _Padded:
        buckets = self.pair.buckets
        assert buckets is not None
        order = {str(s): i for i, (_, s) in enumerate(self._sizes)}
        asked = tuple(sizes[order[str(s)]] for s in buckets.symbols)
        chosen = buckets.choose(asked)
        if chosen not in self.programs:
            known = dict(zip(map(str, buckets.symbols), chosen, strict=True))
            bounds = {s: known[str(s)] for _, s in self._sizes}
            self.programs[chosen] = _Padded(self.name, self.module, self.identity, bounds, self.given, self.visible)
        return self.programs[chosen]

    def __call__(self, inputs: list[Any]) -> list[Any]:
        asked = self.sizes_of(inputs)
        programs = self._programs_for(asked)
        sizes = dict(zip((s for _, s in self._sizes), asked, strict=True))
        originals = [*inputs]
        for i, name, value in self._open_inputs:
            if name not in self.given:
                inputs[i] = _flat(inputs[i], math.prod(lay.padded(lay.simple(value.shape), programs.bounds)))
        outputs = programs.run(inputs)
        return [
            value if finish is None else finish(value, sizes, originals)
            for value, finish in zip(outputs, self._outputs, strict=True)
        ]


def _window(value: Tensor, owner: int, of: Tensor) -> Finish:
    """An output that is a view of an input: AOTAutograd looks at its sizes, strides and offset to make it anew."""
    shape, stride = ([lay.expression(n) for n in side] for side in (value.shape, value.stride()))
    offset = lay.expression(value.storage_offset())
    steps = [lay.expression(n) for n in (*of.stride(), of.storage_offset())]  # what only the input tells

    def window(_: Any, sizes: lay.Sizes, inputs: Sequence[Any]) -> Tensor:
        given = inputs[owner].detach()
        told = zip(steps, (*given.stride(), given.storage_offset()), strict=True)
        known = {**sizes, **{e: n for e, n in told if isinstance(e, sympy.Symbol)}}
        exact, strides = ([lay.value_of(e, known) for e in side] for side in (shape, stride))
        return given.as_strided(exact, strides, lay.value_of(offset, known))

    return window


def _opens(t: Tensor) -> bool:
    return any(isinstance(n, torch.SymInt) for n in t.shape)


def _flat(t: Tensor, count: int) -> Tensor:
    """The elements of ``t``, which nobody will write, at the beginning of a flat array of ``count``.

    That is how the outputs of other programs with the same bounds lie in memory.
    """
    if t.is_contiguous() and t.storage_offset() == 0 and _C._array_shape(t) == [count]:
        return t.detach().as_strided((count,), (1,))
    with torch.no_grad():
        if t.numel() * t.itemsize <= HOST_BYTES:
            return F.pad(t.detach().cpu().reshape(-1), (0, count - t.numel())).to(t.device)
        return F.pad(t.detach().reshape(-1), (0, count - t.numel()))
