"""What was compiled, as text: the graph, its StableHLO with the user's lines, XLA's optimised HLO."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from torch_tpu.compile.graph import CompiledGraph, Programs, Watcher, readable
from torch_tpu.programs import options
from torch_tpu.tracing.program import Argument, NumberArgument, Plan, TensorArgument

_TITLE = 100  # columns


class ProgramView:
    """One program of a compiled graph. Its texts are made when they are asked for.

    Attributes:
        name: Of the graph, with its part if it was cut and the bounds of its open sizes.
        precision: Of float32 products where the function does not say: ``medium``, ``high`` or ``highest``.
        compiler_options: XLA options of the user's, by name.
    """

    def __init__(self, programs: Programs, arguments: Sequence[Argument], precision: str) -> None:
        self._programs, self._arguments = programs, [*arguments]
        self.name = programs.name
        self.precision = precision
        self.compiler_options = dict(programs.options)

    @property
    def graph(self) -> GraphModule:
        """The operators, as AOTAutograd leaves them."""
        return self._programs.module

    @property
    def fx(self) -> str:
        """The graph as Python."""
        return readable(self.graph)

    @property
    def inputs(self) -> list[str]:
        """What each input is: ``float32[4, 8]``, or a number."""
        return [_spelled(a) for a in self._arguments]

    @cached_property
    def _plan(self) -> Plan:
        return self._programs.build(self._arguments, self.precision, locations=True)

    @property
    def stablehlo(self) -> str:
        """The program as StableHLO. Each operation names the operator and the line of the user's that it is for."""
        return self._plan.text

    @cached_property
    def hlo(self) -> str:
        """What XLA makes of it: the optimised module. The program is compiled once more for it.

        Raises:
            RuntimeError: The plugin does not write its modules down.
        """
        return optimized(self._plan, self._programs.options)

    def __str__(self) -> str:
        header = f"{self.name}({', '.join(self.inputs)}), precision {self.precision}"
        if self.compiler_options:
            header += f", {self.compiler_options}"
        return f"// ==== {header} ".ljust(_TITLE, "=") + f"\n{self.stablehlo}"

    def __repr__(self) -> str:
        return f"<program {self.name}({', '.join(self.inputs)})>"


def _spelled(a: Any) -> str:
    if isinstance(a, TensorArgument):
        return f"{str(a.dtype).removeprefix('torch.')}{[*a.sizes]}"
    return "a size" if isinstance(a, NumberArgument) else str(a)


def optimized(plan: Plan, scope: options.Scope = ()) -> str:
    """The text of the module that XLA makes of a plan.

    Raises:
        RuntimeError: The plugin does not write its modules down.
    """
    with tempfile.TemporaryDirectory(prefix="torch_tpu-") as folder:
        dump = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        options.compile(plan, tuple(sorted({**dict(scope), **dump}.items())))
        found = sorted(Path(folder).glob("*after_optimizations.txt"), key=lambda path: path.stat().st_size)
        if not found:
            raise RuntimeError("This plugin does not write optimised modules down (its option xla_dump_to).")
        return found[-1].read_text()


class View(Sequence[ProgramView]):
    """The programs of a function, in the order in which its graphs were compiled; ``print`` shows their StableHLO.

    Attributes:
        result: What the call returned.
        eager: Names of graphs that run operator by operator (``fallback="eager"``).
    """

    def __init__(self, graphs: Sequence[CompiledGraph], result: Any) -> None:
        self.result = result
        self.eager = [g.name for g in graphs if not any(parts.all() for parts in g.parts.values())]
        self._programs = [
            ProgramView(programs, arguments, level)
            for graph in graphs
            for parts in graph.parts.values()
            for programs in parts.all()
            for arguments, level in programs.known.values()
        ]

    def __getitem__(self, i: Any) -> Any:
        return self._programs[i]

    def __len__(self) -> int:
        return len(self._programs)

    def __iter__(self) -> Iterator[ProgramView]:
        return iter(self._programs)

    @property
    def stablehlo(self) -> str:
        """The StableHLO of all programs, one module after the other."""
        return "\n".join(p.stablehlo for p in self)

    @property
    def hlo(self) -> str:
        """The optimised HLO of all programs."""
        return "\n".join(p.hlo for p in self)

    @property
    def fx(self) -> str:
        """The graphs as Python."""
        return "\n".join(p.fx for p in self)

    def __str__(self) -> str:
        return "\n".join([*map(str, self), *(f"// ==== {name} runs operator by operator" for name in self.eager)])

    def __repr__(self) -> str:
        return f"<{len(self)} compiled program{'s' * (len(self) != 1)}: {', '.join(p.name for p in self)}>"


class _Collector(Watcher):
    def __init__(self) -> None:
        self.graphs: list[CompiledGraph] = []

    def created(self, graph: CompiledGraph) -> None:
        self._add(graph)

    def called(self, graph: CompiledGraph, inputs: list[Any]) -> None:
        self._add(graph)
        if (other := graph.other_pass()) is not None:
            self._add(other)

    def _add(self, graph: CompiledGraph) -> None:
        if not any(g is graph for g in self.graphs):  # dataclasses compare by value
            self.graphs.append(graph)


def show(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> View:
    """What ``torch.compile`` makes of a function or module on tpu.

    The function is called once with these arguments, which is what compiles it, so it does what it does to them.

    Args:
        fn: A function or module, or what ``torch.compile`` returned for one.
        args: Its arguments.
        kwargs: Its keyword arguments.

    Returns:
        The programs of all graphs that the call needs: the forward pass, the backward pass if the result has one, and
        one graph after each break.

    Raises:
        CompileError, or Dynamo's error around it: The function cannot be compiled.
    """
    collector = _Collector()
    with collector.watching():
        result = (fn if _is_compiled(fn) else torch.compile(fn, backend="tpu"))(*args, **kwargs)
    graphs = sorted(collector.graphs, key=lambda g: g.is_backward)
    return View(graphs, result)


def _is_compiled(fn: Any) -> bool:
    wrapped = isinstance(fn, torch._dynamo.eval_frame.OptimizedModule) or hasattr(fn, "_torchdynamo_orig_callable")
    return wrapped or getattr(fn, "_compiled_call_impl", None) is not None
