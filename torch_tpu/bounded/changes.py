"""Which sizes of an operator's calls change, for eager mode.

A call is split into a *pattern*, what two calls must share to be the same program for other sizes, and *columns*, the
whole numbers that may differ: sizes, strides of windows that are not dense, integer arguments. Columns that keep
changing are open.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from torch_tpu import config
from torch_tpu.lowering.view import contiguous_strides
from torch_tpu.tracing.program import HostScalar, NumberArgument, NumbersArgument, TensorArgument

#: How many different values make a size one that changes, by how many sizes change apart from each other. The layers of
#: a network have different sizes, too, which stay.
SEEN = {0: 3, 1: 8, 2: 12, 3: 16}
_REMEMBERED = 32

SIZE, STRIDE, INTEGER = "size", "stride", "integer"


class Closed(Exception):
    """A call that cannot have open sizes."""


class Window(NamedTuple):
    """How a tensor lies in its base array.

    ``form`` is ``whole`` (row-major, from the beginning), ``permuted`` (that, its dimensions in memory order being
    ``order``), ``strided`` (anything else), or ``blank`` (memory that nobody has written). ``columns`` are the places
    of its sizes, then of its strides if it is strided.
    """

    argument: TensorArgument
    form: str
    order: tuple[int, ...]
    columns: tuple[int, ...]


@dataclass
class Outline:
    """A call's pattern and columns.

    Attributes:
        pattern: Equal for calls that differ in columns only.
        values: The columns' values.
        kinds: ``size``, ``stride`` or ``integer`` of each.
        arguments: The arguments, with :class:`Window` for tensors and :class:`Column` for integers.
        windows: All tensors, by position.
    """

    pattern: Hashable
    values: tuple[int, ...]
    kinds: tuple[str, ...]
    arguments: list[Any]
    windows: list[Window]


class Column(NamedTuple):
    """An integer argument: its place among the columns."""

    at: int


def outline(described: Sequence[Any]) -> Outline:
    """The outline of a call.

    Raises:
        Closed: An argument is of a kind that never comes with open sizes.
    """
    values: list[int] = []
    kinds: list[str] = []
    windows: list[Window] = []

    def columns(numbers: Sequence[int], kind: str) -> tuple[int, ...]:
        start = len(values)
        values.extend(numbers)
        kinds.extend([kind] * len(numbers))
        return tuple(range(start, len(values)))

    def walk(item: Any) -> tuple[Hashable, Any]:
        if isinstance(item, TensorArgument):
            if item.conjugate or item.negative or (item.base is not None and item.base.dtype != item.dtype):
                raise Closed
            form, order, strides = _form(item)
            at = columns(item.sizes, SIZE) + (columns(strides, STRIDE) if form == "strided" else ())
            windows.append(Window(item, form, order, at))
            return ("tensor", item.slot, item.dtype, len(item.sizes), form, order), windows[-1]
        if isinstance(item, NumberArgument):
            return ("number", item.index, item.kind, type(item.value)), item
        if isinstance(item, HostScalar):
            return ("host", item.index, item.dtype, item.wrapped), item
        if isinstance(item, NumbersArgument | complex):
            raise Closed
        if isinstance(item, list):
            inner = [walk(x) for x in item]
            return ("list", *(p for p, _ in inner)), [x for _, x in inner]
        if isinstance(item, int) and not isinstance(item, bool):
            return ("integer",), Column(columns([item], INTEGER)[0])
        return item, item

    walked = [walk(item) for item in described]
    return Outline(tuple(p for p, _ in walked), tuple(values), tuple(kinds), [x for _, x in walked], windows)


def _form(t: TensorArgument) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    order = tuple(sorted(range(len(t.sizes)), key=lambda d: (-t.strides[d], t.sizes[d] == 1, d)))
    strides = contiguous_strides([t.sizes[d] for d in order])
    dense = all(t.strides[d] == s for d, s in zip(order, strides, strict=True))
    if t.base is None:
        dense = all(t.sizes[d] == 1 or t.strides[d] == s for d, s in zip(order, strides, strict=True))
        if t.offset or not dense or math.prod(t.sizes) * t.dtype.itemsize != t.storage:
            raise Closed
        return "blank", order if order != tuple(range(len(order))) else (), ()
    if 0 in t.sizes:
        raise Closed
    if dense and t.offset == 0:
        plain = order == tuple(range(len(order)))
        return ("whole" if plain else "permuted"), (() if plain else order), ()
    return "strided", (), t.strides


class Open(NamedTuple):
    """The open columns of one call: classes of equal ones, and the largest value of each class that is known."""

    classes: tuple[tuple[int, ...], ...]
    upper: tuple[int | None, ...]


@dataclass
class History:
    """The calls of one pattern."""

    seen: list[tuple[int, ...]] = field(default_factory=list)
    classes: tuple[tuple[int, ...], ...] = ()  # of the columns that are open
    failed: set[Hashable] = field(default_factory=set)  # classes that some rule refuses

    def look(self, call: Outline) -> None:
        """Notes a call, and opens columns that have changed often enough."""
        values = call.values
        if values in self.seen:
            return
        clusters: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
        for other in self.seen:
            differs = tuple(i for i, (a, b) in enumerate(zip(values, other, strict=True)) if a != b)
            clusters.setdefault(differs, []).append(other)
        self.seen.append(values)
        del self.seen[:-_REMEMBERED]
        known = {i for group in self.classes for i in group}
        for differs, others in sorted(clusters.items(), key=lambda item: len(item[0])):
            if set(differs) <= known:
                continue
            groups = _equal([*others, values], differs)
            sizes = sum(any(call.kinds[i] != STRIDE for i in group) for group in groups)
            if 1 + len(others) >= SEEN.get(sizes, math.inf):
                columns = sorted(known | set(differs))
                self.classes = _equal([v for v in self.seen], columns)
                return


def _equal(vectors: Sequence[Sequence[int]], columns: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Columns in classes: those whose values are equal in all vectors."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for i in columns:
        groups.setdefault(tuple(v[i] for v in vectors), []).append(i)
    return tuple(map(tuple, groups.values()))


class Shape(NamedTuple):
    """What is known of a flat array that is longer than the tensors on it: their largest shape."""

    bounds: tuple[int, ...]
    is_open: tuple[bool, ...]
    marked: bool  # the bounds are the user's


class Changes:
    """What this process has seen of sizes that change."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._histories: dict[Hashable, History] = {}
        self._shapes: dict[tuple[torch.dtype, int], list[Shape]] = {}

    def clear(self) -> None:
        """Forgets everything."""
        with self._lock:
            self._histories.clear()
            self._shapes.clear()

    def shape_is(self, dtype: torch.dtype, shape: Shape) -> None:
        """Notes that flat arrays of ``prod(shape.bounds)`` elements hold tensors of at most these sizes."""
        with self._lock:
            known = self._shapes.setdefault((dtype, math.prod(shape.bounds)), [])
            if shape not in known:
                known.append(shape)

    def history(self, name: str, call: Outline) -> History:
        """The history of a call's pattern."""
        return self._histories.setdefault((name, call.pattern), History())

    def opened(self, name: str, call: Outline, automatic: bool) -> list[Open]:
        """Which columns of a call may be open, the likeliest choice first.

        Args:
            name: The operator's.
            call: The call.
            automatic: Whether sizes are open because they have changed; if not, only those that the user has marked,
                and what comes of them.
        """
        with self._lock:
            history = self.history(name, call)
            upper = self._told(call, automatic)
            if automatic:
                history.look(call)
            known = {i for group in history.classes for i in group}
            told = {call.values[i] for i in upper}
            # Another tensor's size that is the same at this call may be the same size, or equal by chance.
            same = [
                i
                for i, (value, kind) in enumerate(zip(call.values, call.kinds, strict=True))
                if i not in known and i not in upper and kind == SIZE and value in told
            ]
            found = []
            for more in [[*upper], [*upper, *same]] if same else [[*upper]]:
                classes = _joined(
                    _split(history.classes, call.values), [i for i in more if i not in known], call, upper
                )
                zero_or_one = any(
                    call.values[group[0]] < 2 and any(call.kinds[i] != STRIDE for i in group) for group in classes
                )  # PyTorch treats them apart
                if classes and classes not in history.failed and not zero_or_one:
                    found.append(Open(classes, tuple(_least(upper.get(i) for i in group) for group in classes)))
            return found

    def _told(self, call: Outline, automatic: bool) -> dict[int, int | None]:
        """Columns that the arrays of the call tell to be open, and their largest values where the user gave them."""
        found: dict[int, int | None] = {}
        for w in call.windows:
            base = w.argument.base
            if base is None or len(base.shape) != 1 or w.form not in ("whole", "permuted"):
                continue
            order = [d for d in w.order or range(len(w.argument.sizes)) if w.argument.sizes[d] != 1]
            sizes = [w.argument.sizes[d] for d in order]
            for shape in self._shapes.get((base.dtype, base.shape[0]), ()):
                told = [(m, is_open) for m, is_open in zip(shape.bounds, shape.is_open, strict=True) if m != 1]
                if not (shape.marked or automatic) or len(told) != len(sizes):
                    continue
                triples = [(n, m, is_open) for n, (m, is_open) in zip(sizes, told, strict=True)]
                if all(n <= m if is_open else n == m for n, m, is_open in triples):
                    for d, (_, m, is_open) in zip(order, triples, strict=True):
                        if is_open:
                            found[w.columns[d]] = m if shape.marked else None
                    break
        return found


_changes = Changes()


def opened(name: str, described: Sequence[Any]) -> tuple[Outline, list[Open]] | None:
    """A call with the choices of open columns that it has; None: it has none."""
    try:
        call = outline(described)
    except Closed:
        return None
    found = _changes.opened(name, call, config.get("TORCH_TPU_DYNAMIC_SIZES"))
    return (call, found) if found else None


def shape_is(dtype: torch.dtype, shape: Shape) -> None:
    """Notes how tensors lie on flat arrays of ``prod(shape.bounds)`` elements."""
    _changes.shape_is(dtype, shape)


def is_known(dtype: torch.dtype, count: int) -> bool:
    """Whether flat arrays of ``count`` elements are those of open sizes."""
    return (dtype, count) in _changes._shapes


def refuse(name: str, call: Outline, found: Open) -> None:
    """The columns of a call cannot be open."""
    _changes.history(name, call).failed.add(found.classes)


def clear() -> None:
    """Forgets everything."""
    _changes.clear()


def _split(classes: Sequence[tuple[int, ...]], values: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Classes within which the values are equal."""
    return tuple(itertools.chain.from_iterable(_equal([values], group) for group in classes))


def _joined(
    classes: tuple[tuple[int, ...], ...], more: Sequence[int], call: Outline, upper: dict[int, int | None]
) -> tuple[tuple[int, ...], ...]:
    """Classes with more columns, each in the class of those that the arrays tell to be equal."""
    for i in more:
        for k, group in enumerate(classes):
            if call.values[group[0]] == call.values[i] and any(j in upper for j in (*group, i)):
                classes = (*classes[:k], (*group, i), *classes[k + 1 :])
                break
        else:
            classes = (*classes, (i,))
    return classes


def _least(bounds: Any) -> int | None:
    return min((b for b in bounds if b is not None), default=None)
