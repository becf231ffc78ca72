"""Operators with open sizes in eager mode.

A call whose sizes keep changing (:mod:`torch_tpu.bounded.changes`) becomes a graph of one operator, which is traced on
padded arrays like any graph with open sizes. What is compiled serves all sizes up to its bounds; for each choice of
sizes only a calling convention is made, which says what the sizes are and how the results lie in the padded arrays.
"""

from __future__ import annotations

import logging
import math
import operator
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from torch_tpu import _C, platform
from torch_tpu.bounded import changes
from torch_tpu.bounded import layout as lay
from torch_tpu.bounded.buckets import Buckets
from torch_tpu.bounded.changes import STRIDE, Closed, Column, Open, Outline, Shape, Window
from torch_tpu.bounded.graph import Exact, memory_order
from torch_tpu.bounded.interpreter import Context, fitted, give, spread
from torch_tpu.bounded.layout import Unbounded
from torch_tpu.compile.graph import graph_identity
from torch_tpu.programs import disk, options, stats
from torch_tpu.stablehlo import Type
from torch_tpu.stablehlo import ops as hlo
from torch_tpu.tracing.graph import CompileError, Interpreter, build_graph, outside_of_modes
from torch_tpu.tracing.program import HostScalar, NumberArgument, Plan, Result, TensorArgument
from torch_tpu.tracing.schema import op_info, resolve
from torch_tpu.tracing.tracer import Tracer

log = logging.getLogger("torch_tpu")

#: Bounds of small sizes; above them, powers of two.
_SMALL = (64, 256, 1024)

#: Lengths of arrays that get programs of their own before they are rounded.
_LENGTHS = 2

# Indices of numbers in the trace of a graph, beyond those of the call's own: symbols, and offsets of windows.
_SYMBOLS, _OFFSETS = 1 << 20, 1 << 21


class _Buckets(Buckets):
    def _bound(self, n: int, top: int | None) -> int:
        if top is not None and n <= top:
            return top
        return next((b for b in _SMALL if n <= b), 1 << (n - 1).bit_length())


def find(name: str, call: Outline, opened: list[Open], precision: str, record: bool, make: Callable[..., Any]) -> Any:
    """The program of a call whose sizes change; None: the call is to have a program for its sizes.

    Args:
        name: The operator's dispatcher name.
        call: Its arguments.
        opened: Choices of its columns that are open.
        precision: The precision of matrix products.
        record: Whether the program is to be a part of others, and is not compiled.
        make: Makes a program of a cache key, a plan and an executable.
    """
    for choice in opened:
        try:
            with outside_of_modes(), torch.no_grad():
                return _family(name, call, choice).program(call, precision, record, make)
        except (Unbounded, CompileError, Closed) as problem:
            changes.refuse(name, call, choice)
            log.info("torch_tpu: %s is compiled for each size: %s", name, problem.__cause__ or problem)
    return None


_families: dict[Hashable, list[Family]] = {}


def _family(name: str, call: Outline, opened: Open) -> Family:
    """The family of a call, whose assumptions it meets."""
    statics = tuple(v for i, v in enumerate(call.values) if not any(i in group for group in opened.classes))
    families = _families.setdefault((name, call.pattern, statics, opened.classes, opened.upper), [])
    for known in families:
        if known.holds(call):
            return known
    try:
        families.append(Family(name, call, opened))
    except (Unbounded, Closed):
        raise
    except Exception as error:  # PyTorch's, about sizes that are not numbers: the call itself may be right or wrong
        raise Unbounded(str(error).partition("\n")[0]) from error
    return families[-1]


def clear() -> None:
    """Forgets what has been made."""
    _families.clear()


@dataclass
class _Returned:
    """One of the operator's results: a tensor's sizes and memory order, or a number, or nothing."""

    sizes: tuple[sympy.Expr, ...] | None = None
    strides: tuple[sympy.Expr, ...] = ()
    order: tuple[int, ...] = ()  # the dimensions as they lie in memory, outermost first
    dtype: torch.dtype = torch.float32
    number: sympy.Expr | None = None


class Family:
    """An operator for one choice of columns that are open, and values of the others.

    Args:
        name: The operator's dispatcher name.
        call: The first call, whose values are hints.
        opened: The open columns.
    """

    def __init__(self, name: str, call: Outline, opened: Open) -> None:
        self.name = name
        self.opened = opened
        info = op_info(resolve(name))
        self.op = info.functional or info.op
        self.environment = ShapeEnv()
        self.symbols: list[sympy.Symbol] = []
        self.variety = _C._Variety()
        self.lengths: dict[int, set[int]] = {}  # of the arrays of strided windows, by position
        self.bodies: dict[Hashable, tuple[Any, Plan, dict[int, Type]]] = {}
        self._sizes = {i: k for k, group in enumerate(opened.classes) for i in group}
        with FakeTensorMode(shape_env=self.environment, allow_non_fake_inputs=True) as fake:
            ints = [self._symbol(k, call.values[group[0]]) for k, group in enumerate(opened.classes)]
            columns = [ints[self._sizes[i]] if i in self._sizes else v for i, v in enumerate(call.values)]
            self._graph(info, call, ints, columns, fake)
        self.guards = [g.expr for g in self.environment.guards]
        padded = [k for k, group in enumerate(opened.classes) if any(call.kinds[i] != STRIDE for i in group)]
        self.padded = padded
        self.buckets = _Buckets([self.symbols[k] for k in padded], [opened.upper[k] for k in padded], self.guards)

    def _symbol(self, k: int, hint: int) -> torch.SymInt:
        from torch._dynamo.source import ConstantSource

        source = ConstantSource(f"_torch_tpu_{k}")
        symbol = self.environment.create_symbol(
            hint, source, dynamic_dim=DimDynamic.DYNAMIC, do_not_specialize_zero_one=True
        )
        if not isinstance(symbol, sympy.Symbol):
            raise Unbounded(f"a size of {hint}")
        self.symbols.append(symbol)
        made = self.environment.create_symintnode(symbol, hint=hint, source=source)
        assert isinstance(made, torch.SymInt)
        return made

    # ---- the graph
    def _graph(
        self, info: Any, call: Outline, ints: list[torch.SymInt], columns: list[Any], fake: FakeTensorMode
    ) -> None:
        graph = Graph()
        self.inputs: list[tuple[str, Any]] = []  # what each placeholder is

        def placeholder(name: str, value: Any, what: tuple[str, Any]) -> tuple[Node, Any]:
            node = graph.placeholder(name)
            node.meta["val"] = value
            self.inputs.append(what)
            return node, value

        sizes = [placeholder(f"s{k}", s, ("symbol", k)) for k, s in enumerate(ints)]

        def made(item: Any, is_read: bool = True) -> tuple[Any, Any]:
            if isinstance(item, Window):
                value = _fake(item, columns)
                if item.form == "blank" and item.argument.sizes != (0,):
                    shape = [made(Column(i)) for i in item.columns]
                    node = graph.call_function(torch.ops.aten.full.default, ([n for n, _ in shape], 0))
                    node.kwargs = {"dtype": item.argument.dtype, "device": torch.device("tpu")}
                    node.meta["val"] = value
                    return node, value
                return placeholder(f"t{item.argument.position}", value, ("window", item.argument.position))
            if isinstance(item, Column):
                return sizes[self._sizes[item.at]] if item.at in self._sizes else (columns[item.at],) * 2
            if isinstance(item, NumberArgument):
                return placeholder(f"n{item.index}", item.value, ("number", item))
            if isinstance(item, HostScalar):
                value = item.value if item.wrapped else torch.empty((), dtype=item.dtype)
                return placeholder(f"h{item.index}", value, ("number", item))
            if isinstance(item, list):
                pairs = [made(x) for x in item]
                return [n for n, _ in pairs], [v for _, v in pairs]
            return item, item

        schema = info.op._schema.arguments
        wanted = {a.name: a for a in self.op._schema.arguments}
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        values: list[Any] = []
        keywords: dict[str, Any] = {}
        self.written: list[int] = []  # positions
        for a, item in zip(schema, call.arguments, strict=True):
            if a.name in info.written:
                if not isinstance(item, Window):
                    raise Closed
                self.written.append(item.argument.position)
            if a.name not in wanted:
                continue
            node, value = made(item)
            if wanted[a.name].kwarg_only:
                kwargs[a.name], keywords[a.name] = node, value
            else:
                args.append(node)
                values.append(value)
        if "dtype" in wanted and "dtype" not in kwargs and self.written:
            kwargs["dtype"] = keywords["dtype"] = call.windows[self.written[0]].argument.dtype
        if "device" in wanted:
            kwargs["device"] = keywords["device"] = torch.device("tpu")
        node = graph.call_function(self.op, tuple(args), kwargs)
        result = self.op(*values, **keywords)
        node.meta["val"] = result
        several = isinstance(result, tuple | list)
        self.nested = isinstance(result, list)
        returned = []
        for i, value in enumerate(result if several else (result,)):
            part = node
            if several:
                part = graph.call_function(operator.getitem, (node, i))
                part.meta["val"] = value
            returned.append(part if isinstance(value, Tensor) else None)
        graph.output(tuple(returned))
        hints = self._known(call)
        self.returned = [_returned(v, hints) for v in (result if several else (result,))]
        self.module = GraphModule(torch.nn.Module(), graph)
        self.identity = graph_identity(self.module)
        self._check_written(call)

    def _check_written(self, call: Outline) -> None:
        if self.written and len(self.written) != len(self.returned):
            raise Unbounded("other results than what is written")
        for position, out in zip(self.written, self.returned, strict=False):
            window = call.windows[position]
            a = window.argument
            if out.sizes is None or out.dtype != a.dtype or window.form not in ("whole", "blank") or window.order:
                raise Unbounded("the result is written to a tensor that is not dense")
            if a.sizes != (0,):  # the tensor keeps its strides
                out.order = tuple(range(len(out.sizes)))

    # ---- calls
    def _known(self, call: Outline) -> dict[sympy.Symbol, int]:
        return {s: call.values[group[0]] for s, group in zip(self.symbols, self.opened.classes, strict=True)}

    def holds(self, call: Outline) -> bool:
        """Whether what was assumed of the hints is true of a call."""
        known = {s: sympy.Integer(n) for s, n in self._known(call).items()}
        return all(guard.xreplace(known) == sympy.true for guard in self.guards)

    def program(self, call: Outline, precision: str, record: bool, make: Callable[..., Any]) -> Any:
        """The program of a call: what is compiled for its bounds, with the call's sizes."""
        known = self._known(call)
        chosen = self.buckets.choose(tuple(known[s] for s in self.buckets.symbols))
        bounds = dict(zip(self.buckets.symbols, chosen, strict=True))
        bases = self._bases(call, bounds)
        whole = tuple(_is_all(call.windows[p]) for p in self.written)
        key = (chosen, precision, record, whole, tuple(sorted((slot, t.shape) for slot, t in bases.items())))
        if key not in self.bodies:
            self.bodies[key] = self._body(call, bounds, bases, precision, record, make)
        padded, plan, _ = self.bodies[key]
        return self._variant(call, known, bounds, bases, padded, plan)

    def _bases(self, call: Outline, bounds: lay.Sizes) -> dict[int, Type]:
        """The arrays that a call reads, by slot: those of open sizes are as long as the bounds take them."""
        found: dict[int, Type] = {}
        for w in call.windows:
            a = w.argument
            if a.base is None:
                continue
            length = a.base.numel
            if self._opens(w) and not (len(a.base.shape) == 1 and changes.is_known(a.dtype, length)):
                if w.form == "strided":  # an array of a length that changes, too, or one that stays
                    self.lengths.setdefault(a.position, set()).add(length)
                    length = _room(length) if len(self.lengths[a.position]) > _LENGTHS else length
                elif math.prod(a.sizes) == length:
                    length = math.prod(self._bound(w, d, bounds) for d in range(len(a.sizes)))
            wanted = a.base if length <= a.base.numel else Type((length,), a.dtype)
            if a.slot not in found or found[a.slot].numel < wanted.numel:
                found[a.slot] = wanted
        return found

    def _opens(self, w: Window) -> bool:
        return any(i in self._sizes for i in w.columns)

    def _bound(self, w: Window, d: int, bounds: lay.Sizes) -> int:
        i = w.columns[d]
        return bounds[self.symbols[self._sizes[i]]] if i in self._sizes else w.argument.sizes[d]

    def _body(
        self, call: Outline, bounds: lay.Sizes, bases: dict[int, Type], precision: str, record: bool, make: Any
    ) -> tuple[Any, Plan, dict[int, Type]]:
        start = time.perf_counter()
        arguments: list[Any] = []
        for kind, what in self.inputs:
            if kind == "symbol":
                arguments.append(NumberArgument(_SYMBOLS + what, call.values[self.opened.classes[what][0]]))
            elif kind == "number":
                arguments.append(what)
            else:
                a = call.windows[what].argument
                base = bases.get(a.slot) or Type((1,), a.dtype)
                flat = (base.numel,)
                arguments.append(
                    TensorArgument(what, a.slot, a.dtype, flat, (1,), 0, True, base.numel * a.dtype.itemsize, base)
                )
        spelled = ",".join(f"{s}<={n}" for s, n in bounds.items())

        def interpreter(trace: Tracer) -> Interpreter:
            return _Operator(self, call, trace, bounds)

        plan = build_graph(
            self.name, self.module, arguments, precision=precision, emulate_precision=platform.emulates_precision(),
            interpreter=interpreter, as_predicted=False,
        )  # fmt: skip
        plan.is_graph = False
        if plan.rng_used:
            raise Unbounded("random numbers")
        if any(not isinstance(r, Result) or r.output < 0 for r in plan.results):
            raise Unbounded("a result that is an argument's memory")
        key = disk.key_of_module(plan.text)
        traced = time.perf_counter()
        why = f"sizes that change: {spelled} is new"
        executable = None
        if record:
            stats.record_trace(traced - start)
        elif (entry := disk.load(key)) is not None and entry[1] is not None:
            executable = entry[1]
            stats.record(f"{self.name}[{spelled}]", "disk", traced - start, time.perf_counter() - traced, why)
        else:
            executable = options.compile(plan)
            stats.record(f"{self.name}[{spelled}]", "compiled", traced - start, time.perf_counter() - traced, why)
            disk.store(key, plan, executable)
        self._note_shapes(bounds)
        return make(key, plan, executable), plan, bases

    def _note_shapes(self, bounds: lay.Sizes) -> None:
        marked = {s: self.opened.upper[k] is not None for s, k in zip(self.buckets.symbols, self.padded, strict=True)}
        for out in self.returned:
            if out.sizes is None or not any(e.free_symbols for e in out.sizes):
                continue
            used = {s for e in out.sizes for s in e.free_symbols}
            if not used <= set(bounds):
                continue
            order = out.order
            shape = tuple(lay.value_of(out.sizes[d], bounds) for d in order)
            is_open = tuple(bool(out.sizes[d].free_symbols) for d in order)
            changes.shape_is(out.dtype, Shape(shape, is_open, all(marked[s] for s in used)))

    def _variant(
        self,
        call: Outline,
        known: dict[sympy.Symbol, int],
        bounds: lay.Sizes,
        bases: dict[int, Type],
        padded: Any,
        plan: Plan,
    ) -> Any:
        from torch_tpu.programs.eager import CODE_OF_DTYPE as codes

        operands = []
        for o in plan.operands:
            kind, index = o.kind, o.index
            if kind == "scalar" and index >= _OFFSETS:
                kind, index = "offset", index - _OFFSETS
            elif kind == "scalar" and index >= _SYMBOLS:
                kind, index = "size", known[self.symbols[index - _SYMBOLS]]
                if abs(index) >= 1 << 31:
                    raise Unbounded("a size of 2**31 or more")
            operands.append((kind, index, codes[o.dtype]))
        results: list[Any] = []
        resizes = []
        outputs = [(o.slot, codes[o.type.dtype], list(o.type.shape)) for o in plan.outputs]
        tensors = iter(plan.results)
        for i, out in enumerate(self.returned):
            if out.sizes is None:
                results.append(None if out.number is None else lay.value_of(out.number, known))
                continue
            r = next(tensors)
            sizes = [lay.value_of(e, known) for e in out.sizes]
            strides = _strides(out, sizes, known)
            if self.written:
                a = call.windows[self.written[i]].argument
                _, code, shape = outputs[r.output]
                outputs[r.output] = (a.slot, code, shape)
                if tuple(sizes) != a.sizes:
                    if a.sizes != (0,):
                        raise Closed
                    resizes.append((a.position, sizes, strides))
                results.append(("argument", a.position, codes[out.dtype], sizes, strides, 0))
            else:
                results.append(("output", r.output, codes[out.dtype], sizes, strides, 0))
        given = {w.argument.slot: w.argument.base for w in call.windows}
        rooms = [(slot, codes[t.dtype], list(t.shape)) for slot, t in bases.items() if given[slot] != t]
        return _C._make_variant(
            padded, self.variety, operands, outputs, [results] if self.nested else results, resizes, rooms
        )


def _room(n: int) -> int:
    """The length of an array of which a window reads ``n`` elements: few different ones."""
    bits = max((n - 1).bit_length(), 6)
    return 1 << (bits + bits % 2 if bits < 20 else bits)


def _is_all(w: Window) -> bool:
    """Whether a written tensor is all of its memory, or is given memory of its own."""
    a = w.argument
    return math.prod(a.sizes) * a.dtype.itemsize == a.storage or a.sizes == (0,)


def _fake(w: Window, columns: Sequence[Any]) -> Tensor:
    """A tensor of a window's sizes and strides."""
    a = w.argument
    rank = len(a.sizes)
    sizes = [columns[i] for i in w.columns[:rank]]
    if w.form == "strided":
        return torch.empty_strided(sizes, [columns[i] for i in w.columns[rank:]], dtype=a.dtype, device="tpu")
    if not w.order:
        return torch.empty(sizes, dtype=a.dtype, device="tpu")
    back = [w.order.index(d) for d in range(rank)]
    return torch.empty([sizes[d] for d in w.order], dtype=a.dtype, device="tpu").permute(back)


def _returned(value: Any, hints: lay.Sizes) -> _Returned:
    if isinstance(value, Tensor):
        strides = tuple(map(lay.expression, value.stride()))
        order = memory_order(strides, hints)
        return _Returned(tuple(map(lay.expression, value.shape)), strides, order, value.dtype)
    if value is None:
        return _Returned()
    if isinstance(value, int | torch.SymInt) and not isinstance(value, bool):
        return _Returned(number=lay.expression(value))
    raise Unbounded(f"a result of type {type(value).__name__}")


def _strides(out: _Returned, sizes: Sequence[int], known: lay.Sizes) -> list[int]:
    """Strides of a dense result; those of dimensions of one step, which mean nothing, are as PyTorch has them."""
    strides = [lay.value_of(e, known) for e in out.strides]
    step = 1
    for d in reversed(out.order):
        if sizes[d] != 1:
            strides[d], step = step, step * sizes[d]
    return strides


class _Operator(Exact):
    """Runs the graph of one operator: tensors are windows on flat arrays."""

    def __init__(self, family: Family, call: Outline, trace: Tracer, bounds: lay.Sizes) -> None:
        super().__init__(trace, bounds, {}, len(family.returned))
        self.family, self.call = family, call
        self.bases: dict[int, Tensor] = {}  # of slots that are written in part

    def load(self, node: Node, value: Tensor, expected: Tensor) -> Tensor:
        index = next(what for (kind, what), p in zip(self.family.inputs, self.placeholders, strict=True) if p is node)
        w = self.call.windows[index]
        self.bases[w.argument.slot] = value
        return self.trace.run(self._window, self.context, value, w, expected)

    def _window(self, c: Context, flat: Tensor, w: Window, expected: Tensor) -> Tensor:
        sizes = lay.simple(expected.shape)
        if w.form == "strided":
            return give(self._gathered(c, flat, w, expected), sizes)
        if not w.order:
            return give(spread(c, flat, sizes), sizes)
        back = [w.order.index(d) for d in range(len(sizes))]
        return give(spread(c, flat, tuple(sizes[d] for d in w.order)).permute(back), sizes)

    def _gathered(self, c: Context, flat: Tensor, w: Window, expected: Tensor) -> Tensor:
        shape = lay.padded(lay.simple(expected.shape), c.bounds)
        offset = torch.empty((), dtype=torch.int64, device="meta")
        number = self.trace.operand("scalar", _OFFSETS + w.argument.position, (), torch.int64)
        self.trace.bind(offset, number)
        at: Any = offset
        for d, (n, stride) in enumerate(zip(shape, expected.stride(), strict=True)):
            step = c.value(lay.expression(stride))
            if n > 1 and not (isinstance(step, int) and step == 0):
                at = at + (torch.arange(n, device="meta") * step).view([-1 if i == d else 1 for i in range(len(shape))])
        at = at.expand(shape).reshape(-1).clamp(0, flat.numel() - 1)
        return flat.index_select(0, at).view(shape)

    def run(self, module: GraphModule, inputs: Sequence[Any]) -> list[Any]:
        tensors = [t for t in super().run(module, inputs) if t is not None]
        outputs = [self._flat(t, out) for t, out in zip(tensors, self._results(), strict=True)]
        if not (written := self.family.written):
            return outputs
        return [self._kept(self.call.windows[p], t) for p, t in zip(written, outputs, strict=True)]

    def _results(self) -> list[_Returned]:
        return [out for out in self.family.returned if out.sizes is not None]

    def _flat(self, t: Tensor, out: _Returned) -> Tensor:
        """An output of an open size has a flat array, one of fixed sizes an array in its memory order."""
        value = self.trace.read(t)
        if any(e.free_symbols for e in out.sizes or ()):
            value = hlo.reshape(value, (t.numel(),))
        else:
            value = hlo.transpose(value, out.order)
        laid = torch.empty(value.shape, dtype=t.dtype, device="meta")
        self.trace.bind(laid, value)
        return laid

    def order(self, i: int, node: Node) -> tuple[int, ...]:
        """As the family has it."""
        return self.family.returned[i].order

    def _kept(self, w: Window, result: Tensor) -> Tensor:
        """A written storage: the result, and what lies behind the window."""
        a = w.argument
        if _is_all(w):
            return result
        if a.base is None:
            raise Unbounded("a part of memory that nobody has written")
        return self.trace.run(self._joined, self.context, self.bases[a.slot], result, w)

    def _joined(self, c: Context, base: Tensor, result: Tensor, w: Window) -> Tensor:
        count: Any = 1
        for i in w.columns:
            symbol = self.family._sizes.get(i)
            count = count * (self.call.values[i] if symbol is None else c.value(self.family.symbols[symbol]))
        behind = torch.arange(base.numel(), device="meta") >= count
        return torch.where(behind, base, fitted(result.reshape(-1), base.numel()))
