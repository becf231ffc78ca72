"""Builds StableHLO text: modules, functions and regions. Knows nothing of PyTorch operators.

The text follows the StableHLO specification (openxla/stablehlo, docs/spec.md) in MLIR's generic form for operations
with regions and in the pretty form where that is as clear.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from torch_tpu.stablehlo.types import Shape, Type, Value, tensor_type

_local = threading.local()
_LOOPS = ('"stablehlo.while"', '"stablehlo.custom_call"', '"stablehlo.sort"')


def current() -> Function:
    """The function that receives new operations on this thread."""
    stack = getattr(_local, "stack", None)
    if not stack:
        raise RuntimeError("No StableHLO function is being built on this thread.")
    return stack[-1]


@dataclass
class Work:
    """What a function does, as far as compile options depend on it. Sizes are of the largest array of each kind."""

    largest: int = 0  # elements of any value, arguments included
    joined: int = 0  # elements of results that are put together: concatenate, scatter
    summed_down: int = 0  # elements of operands that are reduced, but not along their last dimension
    loops: bool = False  # something is repeated as often as data or a library say


class Function:
    """One function of a module: arguments, a body, results.

    Pure operations are value-numbered: emitting the same operation on the same operands twice gives the same value.
    """

    def __init__(self, name: str = "main") -> None:
        self.name = name
        self.arguments: list[Value] = []
        self.argument_attributes: dict[int, str] = {}
        self._lines: list[str] = []
        self._known: list[dict[str, tuple[Value, ...]]] = [{}]
        self._counter = 0
        self._indent = 4
        #: Stands behind operations as ``loc(...)``: MLIR's spelling of where the user's program asks for them.
        self.location: str | None = None
        self.work = Work()
        #: text of further private functions of the module, by name
        self.private: dict[str, str] = {}

    # ---- construction
    # -------------------------------------------------------------------------------------------------
    def argument(self, shape: Shape, dtype: torch.dtype) -> Value:
        """Adds an argument and returns it."""
        value = Value(f"%arg{len(self.arguments)}", tuple(shape), dtype, self)
        self.work.largest = max(self.work.largest, value.numel)
        self.arguments.append(value)
        return value

    def fresh(self, prefix: str = "%") -> str:
        self._counter += 1
        return f"{prefix}{self._counter}"

    def emit(self, text: str, *types: Type, pure: bool = True) -> tuple[Value, ...]:
        """Appends ``text`` (an operation without its results) producing values of ``types``."""
        # Only the innermost region's values are reused: XLA refuses most regions that capture values from outside.
        if pure and (hit := self._known[-1].get(text)) is not None:
            return hit
        name = self.fresh()
        self.work.largest = max(self.work.largest, *(t.numel for t in types), 0)
        self.work.loops |= text.startswith(_LOOPS)
        if len(types) == 1:
            results: tuple[Value, ...] = (Value(name, types[0].shape, types[0].dtype, self),)
            left = name
        else:
            results = tuple(Value(f"{name}#{i}", t.shape, t.dtype, self) for i, t in enumerate(types))
            left = f"{name}:{len(types)}"
        place = f" loc({self.location})" if self.location else ""
        self._lines.append(" " * self._indent + f"{left} = {text}{place}")
        if pure:
            self._known[-1][text] = results
        return results

    def op(self, name: str, operands: Sequence[Value], result: Type, attributes: str = "", pure: bool = True) -> Value:
        """Emits ``stablehlo.<name>`` in generic form with one result."""
        return self.op_multi(name, operands, [result], attributes, pure)[0]

    def op_multi(
        self, name: str, operands: Sequence[Value], results: Sequence[Type], attributes: str = "", pure: bool = True
    ) -> tuple[Value, ...]:
        dialect = name if "." in name else f"stablehlo.{name}"
        ins = ", ".join(tensor_type(v.shape, v.dtype) for v in operands)
        outs = ", ".join(map(str, results))
        attributes = f" {{{attributes}}}" if attributes else ""
        text = f'"{dialect}"({", ".join(v.name for v in operands)}){attributes} : ({ins}) -> ({outs})'
        return self.emit(text, *results, pure=pure)

    @contextlib.contextmanager
    def region(self, *types: Type) -> Iterator[tuple[tuple[Value, ...], list[str]]]:
        """Collects a region with block arguments of ``types``.

        Yields ``(arguments, out)``; the body must end with ``return_``. On exit ``out[0]`` is the region's text.
        """
        arguments = tuple(Value(self.fresh("%r"), t.shape, t.dtype, self) for t in types)
        saved, self._lines = self._lines, []
        self._known.append({})
        self._indent += 4
        out: list[str] = []
        try:
            yield arguments, out
        finally:
            self._indent -= 4
            lines, self._lines = self._lines, saved
            self._known.pop()
        head = ", ".join(f"{v.name}: {v.type}" for v in arguments)
        pad = " " * (self._indent + 2)
        block = f"{pad}^bb0({head}):\n" if types else ""
        out.append("{\n" + block + "\n".join(lines) + "\n" + " " * self._indent + "}")

    def return_(self, *values: Value) -> None:
        """Ends the current region."""
        names = ", ".join(v.name for v in values)
        types = ", ".join(str(v.type) for v in values)
        self._lines.append(" " * self._indent + f"stablehlo.return {names} : {types}")

    # ---- use
    # ----------------------------------------------------------------------------------------------------------
    @contextlib.contextmanager
    def building(self) -> Iterator[Function]:
        """Makes this the current function of the thread."""
        stack = getattr(_local, "stack", None)
        if stack is None:
            stack = _local.stack = []
        stack.append(self)
        try:
            yield self
        finally:
            stack.pop()

    def module_text(self, results: Sequence[Value], module_name: str = "program") -> str:
        """The whole module, with this function as ``@main`` returning ``results``."""
        arguments = ", ".join(
            f"{v.name}: {v.type}" + (f" {{{a}}}" if (a := self.argument_attributes.get(i)) else "")
            for i, v in enumerate(self.arguments)
        )
        types = ", ".join(str(v.type) for v in results)
        names = ", ".join(v.name for v in results)
        end = f"    return {names} : {types}" if results else "    return"
        body = "\n".join([*self._lines, end])
        private = "".join("\n" + text for text in self.private.values())
        return (
            f"module @{module_name} {{\n  func.func public @main({arguments}) -> ({types}) {{\n{body}\n  "
            f"}}{private}\n}}\n"
        )
