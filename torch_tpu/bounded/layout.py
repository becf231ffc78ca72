"""Which elements of a padded array are real.

A dimension is a product of factors, outermost first, as ``view`` joins dimensions. A factor is an expression over the
open sizes: its value for the true sizes is how many of its steps are real, and its value for the bounds is how many
there are in the padded array.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import sympy
import torch

Dim = tuple[sympy.Expr, ...]
Layout = tuple[Dim, ...]
Sizes = Mapping[sympy.Symbol, int]


class Unbounded(Exception):
    """A graph cannot be traced with bounds: it is compiled for each size instead. The text says why."""


class Uniform(tuple[sympy.Expr, ...]):
    """A dimension along which all elements are equal, real or not: it agrees with any way to join its size."""


def expression(size: Any) -> sympy.Expr:
    """The expression of an int or SymInt; itself, if it is one."""
    if isinstance(size, sympy.Expr):
        return size
    if isinstance(size, torch.SymInt):
        return size.node.expr
    return sympy.Integer(int(size))


def is_static(dim: Dim) -> bool:
    return not any(e.free_symbols for e in dim)


def is_open(layout: Layout) -> bool:
    """Whether some dimension has a size that changes."""
    return not all(map(is_static, layout))


def simple(shape: Sequence[Any]) -> Layout:
    """The layout of an array whose real elements are a prefix of each dimension."""
    return tuple((expression(n),) for n in shape)


def value_of(expr: sympy.Expr, sizes: Sizes) -> int:
    """An expression for given sizes."""
    result = expr.xreplace({s: sympy.Integer(n) for s, n in sizes.items()})
    if not result.is_integer or result.free_symbols:
        result = sympy.sympify(result)
    if result.free_symbols:
        raise Unbounded(f"the size {expr} has no bound")
    return int(result)


def total(dim: Dim) -> sympy.Expr:
    return sympy.Mul(*dim)


def same(a: sympy.Expr, b: sympy.Expr) -> bool:
    return a == b or sympy.expand(a - b) == 0


def without_ones(dim: Dim) -> Dim:
    return tuple(e for e in dim if e != 1)


def agree(a: Dim, b: Dim) -> bool:
    """Whether two dimensions have their real elements in the same places."""
    if isinstance(a, Uniform) or isinstance(b, Uniform):
        return same(total(a), total(b))
    a, b = _joined(a), _joined(b)
    return len(a) == len(b) and all(map(same, a, b))


def _joined(dim: Dim) -> Dim:
    """A factor followed by static ones is one factor: real elements stay a prefix."""
    out: list[sympy.Expr] = []
    for e in without_ones(dim):
        if out and not e.free_symbols:
            out[-1] = out[-1] * e
        else:
            out.append(e)
    return tuple(out)


def met(dims: Sequence[Dim]) -> Dim:
    """The dimension of elements that come from all of ``dims``."""
    first = next((dim for dim in dims if not isinstance(dim, Uniform)), dims[0])
    if any(not agree(first, dim) for dim in dims):
        raise Unbounded(f"sizes {total(first)} joined in different ways meet")
    return first


def broadcast(layouts: Sequence[Layout]) -> Layout:
    """The layout of an element-wise result."""
    rank = max((len(layout) for layout in layouts), default=0)
    out: list[Dim] = []
    for d in range(rank):
        dims = [layout[d - rank + len(layout)] for layout in layouts if d - rank + len(layout) >= 0]
        wide = [dim for dim in dims if total(dim) != 1]
        out.append(met(wide) if wide else dims[0])
    return tuple(out)


class _Piece(NamedTuple):
    expr: sympy.Expr
    is_open: bool


def viewed(layout: Layout, shape: Sequence[sympy.Expr]) -> Layout:
    """The layout after ``view`` to sizes ``shape``: factors are joined and split, their order stays."""
    pieces = [_Piece(e, bool(e.free_symbols)) for dim in layout for e in dim if e != 1]
    out: list[Dim] = []
    for size in shape:
        taken: list[sympy.Expr] = []
        while not same(sympy.Mul(*taken), size):
            if not pieces:
                raise Unbounded(f"a view to a size of {size}")
            piece = pieces.pop(0)
            rest = sympy.cancel(size / sympy.Mul(*taken))
            over = sympy.cancel(piece.expr / rest)
            if same(piece.expr, rest) or _is_whole(sympy.cancel(rest / piece.expr)):
                taken.append(piece.expr)
            elif over.is_Integer and over > 1:  # the inner part of the piece belongs to the next dimension
                taken.append(rest)
                pieces.insert(0, _Piece(over, False))
            else:
                raise Unbounded(f"a view that splits a size of {piece.expr} into {size}")
        out.append(tuple(taken) or (sympy.Integer(1),))
    if any(not same(p.expr, sympy.Integer(1)) for p in pieces):
        raise Unbounded("a view that drops elements")
    return tuple(out)


def _is_whole(quotient: sympy.Expr) -> bool:
    """Whether a quotient of sizes is a size: nothing is divided by an open one."""
    return sympy.denom(sympy.together(quotient)) == 1


def padded(layout: Layout, bounds: Sizes) -> tuple[int, ...]:
    """The shape of the padded array."""
    return tuple(math.prod(value_of(e, bounds) for e in dim) for dim in layout)
