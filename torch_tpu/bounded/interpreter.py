"""Runs a graph with open sizes on padded arrays."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils._sympy.functions import FloatTrueDiv, FloorDiv, IntTrueDiv, Max, Min, Mod, PythonMod, ToFloat

from torch_tpu.bounded import layout as lay
from torch_tpu.bounded.layout import Dim, Layout, Sizes, Unbounded
from torch_tpu.tracing.graph import Interpreter
from torch_tpu.tracing.tracer import ScalarOperand, Tracer


class Size:
    """A size, or what is computed from sizes, inside of a graph."""

    def __init__(self, expr: sympy.Expr) -> None:
        self.expr = expr


Rule = Callable[..., Any]
_RULES: dict[OpOverload, Rule] = {}


def rule(*ops: OpOverload) -> Callable[[Rule], Rule]:
    """Registers how operators work on padded arrays: called with the context, the operator, and bound arguments."""

    def register(function: Rule) -> Rule:
        for op in ops:
            _RULES[op] = function
        return function

    return register


def layout_of(t: Tensor) -> Layout:
    """The layout of a traced tensor: static unless it was given one."""
    return getattr(t, "_torch_tpu_layout", None) or lay.simple(t.shape)


def give(t: Tensor, layout: Layout) -> Tensor:
    """Notes the layout of a fresh result."""
    t._torch_tpu_layout = layout  # type: ignore[attr-defined]
    return t


class Context:
    """What rules use: bounds, run-time sizes, masks. All of it inside the trace."""

    def __init__(self, trace: Tracer, bounds: Sizes, operands: dict[sympy.Symbol, ScalarOperand]) -> None:
        self.trace = trace
        self.bounds = bounds
        self._operands = operands
        self._values: dict[sympy.Expr, Any] = {}
        self._masks: dict[Dim, Tensor] = {}
        self.node: Node

    # ---- sizes
    def bound(self, size: Any) -> Any:
        """How large a size is in the padded program."""
        if isinstance(size, ScalarOperand):
            return size
        return lay.value_of(size.expr, self.bounds) if isinstance(size, Size) else int(size)

    def bounded(self, tree: Any) -> Any:
        return tree_map_only(Size, self.bound, tree)

    def value(self, size: Any) -> Any:
        """A size at run time: a 0-d tensor, int64 or float64, or the number that it always is."""
        expr = size.expr if isinstance(size, Size) else size
        if isinstance(expr, int):
            return expr
        if expr.is_Integer:
            return int(expr)
        if expr.is_Float or expr.is_Rational:
            return float(expr)
        if expr not in self._values:
            self._values[expr] = self._evaluated(expr)
        return self._values[expr]

    def _evaluated(self, expr: sympy.Expr) -> Tensor | float:
        if isinstance(expr, sympy.Symbol):
            if expr not in self._operands:
                raise Unbounded(f"the size {expr} is not known when the program runs")
            t = torch.empty((), dtype=torch.int64, device="meta")
            self.trace.bind(t, self._operands[expr].to(torch.int64))
            return t
        arguments: list[Any] = [self.value(a) for a in expr.args]
        if isinstance(expr, sympy.Add | sympy.Mul):
            combine = operator.add if isinstance(expr, sympy.Add) else operator.mul
            result = arguments[0]
            for a in arguments[1:]:
                result = combine(result, a)
            return result
        if isinstance(expr, sympy.Pow) and expr.exp.is_Integer and expr.exp > 0:
            result = arguments[0]
            for _ in range(int(expr.exp) - 1):
                result = result * arguments[0]
            return result
        if isinstance(expr, ToFloat):
            return arguments[0].double() if isinstance(arguments[0], Tensor) else float(arguments[0])
        if isinstance(expr, IntTrueDiv | FloatTrueDiv):
            a, b = (x.double() if isinstance(x, Tensor) else float(x) for x in arguments)
            return a / b
        binary = {FloorDiv: operator.floordiv, Mod: operator.mod, PythonMod: operator.mod}
        if type(expr) in binary:
            return binary[type(expr)](*arguments)
        if isinstance(expr, Max | Min):
            choose = torch.maximum if isinstance(expr, Max) else torch.minimum
            result = self._tensor(arguments[0])
            for a in arguments[1:]:
                result = choose(result, self._tensor(a))
            return result
        raise Unbounded(f"the size {expr} cannot be computed in a program")

    @staticmethod
    def _tensor(x: Any) -> Tensor:
        return x if isinstance(x, Tensor) else torch.full((), x, dtype=torch.int64, device="meta")

    # ---- operators
    def run(self, op: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Calls an operator, some of whose numbers may be known only when the program runs."""
        if any(isinstance(x, ScalarOperand) for x in tree_leaves((args, kwargs))):
            return self.trace.call(op, args, kwargs)
        return op(*args, **kwargs)

    # ---- masks
    def mask(self, dim: Dim) -> Tensor:
        """Which steps of a dimension are real: bool, as long as the padded dimension."""
        if dim not in self._masks:
            sizes = [lay.value_of(e, self.bounds) for e in dim]
            n = 1
            for s in sizes:
                n *= s
            steps = torch.arange(n, device="meta")
            real: Tensor | None = None
            inner = n
            for e, size in zip(dim, sizes, strict=True):
                inner //= size
                if e.free_symbols:
                    here = (steps // inner) % size < self.value(e)
                    real = here if real is None else real & here
            assert real is not None
            self._masks[dim] = real
        return self._masks[dim]

    def masked(self, t: Tensor, fill: Any, dims: Sequence[int] | None = None) -> Tensor:
        """``t`` with ``fill`` where it is not real along ``dims``, all of them by default."""
        layout = layout_of(t)
        for d in range(t.ndim) if dims is None else {d % t.ndim for d in dims}:
            if not lay.is_static(layout[d]):
                shape = [-1 if i == d else 1 for i in range(t.ndim)]
                t = self.run(torch.ops.aten.masked_fill.Scalar, t, ~self.mask(layout[d]).view(shape), fill)
        return give(t, layout)

    def zeroed(self, tree: Any) -> Any:
        """All tensors of ``tree`` with zeros where they are not real."""
        return tree_map_only(Tensor, lambda t: self.masked(t, 0) if lay.is_open(layout_of(t)) else t, tree)

    def count(self, layout: Layout, dims: Sequence[int]) -> Tensor | int:
        """How many real elements a reduction over ``dims`` sees."""
        n: Any = 1
        for d in dims:
            n = n * self.value(lay.total(layout[d]))
        return n

    def expected(self, index: int | None = None) -> Tensor:
        """The fake tensor that says what the node at hand gives."""
        value = self.node.meta["val"]
        return value if index is None else value[index]


def _rows(c: Context, factors: Sequence[sympy.Expr]) -> tuple[list[sympy.Expr], list[int], int]:
    """The factors up to the last open one, their bounds, and how many rows they make."""
    opened = [i for i, e in enumerate(factors) if e.free_symbols]
    outer = [*factors[: opened[-1] + 1]] if opened else []
    bounds = [lay.value_of(e, c.bounds) for e in outer]
    return outer, bounds, math.prod(bounds)


def _moved(at: Tensor, by: Sequence[Any], to: Sequence[Any]) -> Tensor:
    """Positions counted in the mixed radix ``by``, counted in ``to``; both outermost first."""
    result: Any = 0
    stride: Any = 1
    for have, want in zip(reversed(by[1:]), reversed(to[1:]), strict=True):
        result = result + (at % have) * stride
        at = at // have
        stride = stride * want
    return result + at * stride


def compacted(c: Context, t: Tensor, factors: Sequence[sympy.Expr]) -> Tensor:
    """The real elements of a padded array, whose dimensions are ``factors``, flat, and garbage after them."""
    outer, bounds, rows = _rows(c, factors)
    if all(e == 1 for e in outer[:-1]) or t.numel() == 0:  # a prefix already
        return t.reshape(-1)
    real = [c.value(e) for e in outer]
    source = _moved(torch.arange(rows, device="meta"), real, bounds).clamp(0, rows - 1)
    return t.reshape(rows, -1).index_select(0, source).reshape(-1)


def fitted(flat: Tensor, count: int) -> Tensor:
    """The first ``count`` elements of a flat array, with zeros after its end."""
    if flat.numel() >= count:
        return flat.narrow(0, 0, count)
    return torch.cat([flat, torch.zeros(count - flat.numel(), dtype=flat.dtype, device="meta")])


def spread(c: Context, flat: Tensor, layout: Layout) -> Tensor:
    """The padded array of what :func:`compacted` gave, perhaps with other bounds."""
    factors = [e for dim in layout for e in dim]
    shape = lay.padded(layout, c.bounds)
    flat = fitted(flat, math.prod(shape))
    outer, bounds, rows = _rows(c, factors)
    if all(e == 1 for e in outer[:-1]) or flat.numel() == 0:
        return flat.view(shape)
    real = [c.value(e) for e in outer]
    source = _moved(torch.arange(rows, device="meta"), bounds, real).clamp(0, rows - 1)
    return flat.view(rows, -1).index_select(0, source).view(shape)


class BoundedInterpreter(Interpreter):
    """The interpreter of graphs with open sizes. Integers among the inputs are :class:`ScalarOperand`.

    Args:
        trace: The trace.
        bounds: How large each open size is in the padded program.
        layouts: Of inputs that are padded already, by the name of the placeholder.
    """

    def __init__(self, trace: Tracer, bounds: Sizes, layouts: dict[str, Layout]) -> None:
        super().__init__(trace)
        self.bounds = bounds
        self.given = layouts
        self.outputs: list[Any] = []
        self.flat: set[int] = set()  # the storages of inputs that are flat

    def run(self, module: GraphModule, inputs: Sequence[Any]) -> list[Any]:
        from torch_tpu.bounded import rules  # noqa: F401

        placeholders = self.placeholders = [n for n in module.graph.nodes if n.op == "placeholder"]
        operands: dict[sympy.Symbol, ScalarOperand] = {}
        converted: list[Any] = []
        for node, value in zip(placeholders, inputs, strict=True):
            expected = node.meta.get("val")
            if isinstance(expected, torch.SymInt):
                if isinstance(expected.node.expr, sympy.Symbol):
                    operands[expected.node.expr] = value
                value = Size(expected.node.expr)
            converted.append(value)
        self.context = Context(self.trace, self.bounds, operands)
        for i, node in enumerate(placeholders):
            expected = node.meta.get("val")
            if isinstance(converted[i], Tensor) and isinstance(expected, Tensor):
                converted[i] = self.load(node, converted[i], expected)
        self.outputs = super().run(module, converted)
        return self.outputs

    def load(self, node: Node, value: Tensor, expected: Tensor) -> Tensor:
        """The padded array of an input."""
        layout = self.given.get(node.name) or lay.simple(expected.shape)
        if value.shape != lay.padded(layout, self.bounds):
            self.flat.add(value.untyped_storage()._cdata)
            value = self.trace.run(spread, self.context, value, layout)
        return give(value, layout)

    def execute(self, target: Any, args: Any, kwargs: Any) -> Any:
        expected = self.node.meta.get("val")
        if isinstance(expected, torch.SymInt | torch.SymBool | torch.SymFloat):
            return Size(expected.node.expr)
        if isinstance(expected, int | float | bool):
            return expected
        given = tree_leaves((args, kwargs))
        tensors = [t for t in given if isinstance(t, Tensor)]
        made = [t for t in tree_leaves(expected) if isinstance(t, Tensor)]
        closed = not any(lay.is_open(layout_of(t)) for t in tensors) and not any(isinstance(x, Size) for x in given)
        if target is operator.getitem or (closed and not any(lay.is_open(lay.simple(t.shape)) for t in made)):
            return super().execute(target, args, kwargs)
        if isinstance(target, HigherOrderOperator) or not isinstance(target, OpOverload):
            raise Unbounded(f"{target} over a size that changes")
        self.context.node = self.node
        function = _RULES.get(target) or (_RULES.get(_POINTWISE) if torch.Tag.pointwise in target.tags else None)
        if function is None:
            raise Unbounded(f"{target} over a size that changes")
        result = self.trace.run(function, self.context, target, *args, **kwargs)
        self._check(target, result, expected)
        return result

    def _check(self, target: OpOverload, result: Any, expected: Any) -> None:
        """The layouts that a rule gave mean what the graph says."""
        pairs = zip(tree_leaves(result), tree_leaves(expected), strict=False)
        for t, want in pairs:
            if not isinstance(t, Tensor) or not isinstance(want, Tensor):
                continue
            have = layout_of(t)
            fits = len(have) == want.ndim and all(
                lay.same(lay.total(d), lay.expression(n)) for d, n in zip(have, want.shape, strict=True)
            )
            if not fits or tuple(t.shape) != lay.padded(have, self.bounds) or t.dtype != want.dtype:
                raise Unbounded(f"{target} gives {tuple(t.shape)} of {have} where the graph has {tuple(want.shape)}")


#: Stands for all element-wise operators among the rules.
_POINTWISE = torch.ops.aten.add.Tensor
