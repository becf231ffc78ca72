"""``torch.export`` programs on tpu: as StableHLO text, and as compiled files that run without tracing or compiling.

A file of :func:`save` is a zip archive: the exported program (``torch.export.save``), executables of the plugin, and a
manifest with their calling convention and what they were compiled for.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
import os
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import IO, Any

import sympy
import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import tree_flatten, tree_unflatten

from torch_tpu import _C, __version__
from torch_tpu.bounded.buckets import Buckets
from torch_tpu.bounded.graph import BoundedGraph, Pair
from torch_tpu.bounded.layout import Unbounded
from torch_tpu.compile.graph import Programs, Runnable, compiled, geometry, notes_of
from torch_tpu.compile.segments import split
from torch_tpu.programs import disk
from torch_tpu.programs.eager import CODE_OF_DTYPE, DTYPE_OF_CODE, PRECISIONS
from torch_tpu.stablehlo import Type
from torch_tpu.tracing.graph import Interpreter, build_graph
from torch_tpu.tracing.program import Operand, Output, Plan, Result
from torch_tpu.tracing.tracer import ScalarOperand, Tracer

_FORMAT = 1
_LIFTED = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
_WRITTEN = (OutputKind.BUFFER_MUTATION, OutputKind.USER_INPUT_MUTATION)


@dataclass
class _Prepared:
    """The graph of an exported program in the form in which it is compiled.

    Its inputs are the sizes that change, then parameters, buffers and constants, then the user's; its outputs are the
    new values of what is written, then the user's tensors and sizes.

    Attributes:
        module: The graph.
        exported: The program after decomposition to functional operators.
        inputs: What each input is, in words.
        sizes: For each symbol of a size that changes, the placeholder and the dimension that tell it.
    """

    module: GraphModule
    exported: ExportedProgram
    inputs: list[str]
    sizes: dict[sympy.Symbol, tuple[str, int]]


@functools.cache
def _composites() -> dict[Any, Any]:
    """PyTorch's definitions of operators such as ``linear`` by others: compiled graphs have none of them."""
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    known = torch.export.default_decompositions().materialize()
    return {op: body for op, body in known.items() if op.has_kernel_for_dispatch_key(composite)}


def _prepare(ep: ExportedProgram) -> _Prepared:
    exported = ep.run_decompositions(_composites())
    for spec in exported.graph_signature.input_specs:
        if spec.kind not in (*_LIFTED, InputKind.USER_INPUT):
            raise NotImplementedError(f"An exported program with an input of the kind {spec.kind.name} ({spec.arg}).")
    placeholders = [n for n in exported.graph.nodes if n.op == "placeholder"]
    sizes = _sizes(placeholders)
    graph = Graph()
    copies: dict[Node, Node] = {}
    values = {n.name: n.meta["val"] for n in placeholders}
    for symbol, (name, dim) in sizes.items():
        graph.placeholder(f"size_{symbol}").meta["val"] = values[name].shape[dim] if dim >= 0 else values[name]
    for node in exported.graph.nodes:
        if node.op == "output":
            returned = [copies[r] for r in node.args[0] if isinstance(r, Node)]
            graph.output(returned).meta = dict(node.meta)
        elif node.op != "placeholder" or not isinstance(node.meta["val"], torch.SymInt):
            copies[node] = graph.node_copy(node, copies.__getitem__)
        else:
            copies[node] = next(n for n in graph.nodes if n.name == f"size_{node.meta['val'].node.expr}")
    specs = zip(exported.graph_signature.input_specs, placeholders, strict=True)
    inputs = [f"size {s} of {name}" + (f", dimension {d}" if d >= 0 else "") for s, (name, d) in sizes.items()]
    inputs += [_words(spec, n) for spec, n in specs if not isinstance(n.meta["val"], torch.SymInt)]
    return _Prepared(GraphModule(exported.graph_module, graph), exported, inputs, sizes)


def _words(spec: Any, node: Node) -> str:
    kind = spec.kind.name.lower().replace("_", " ")
    return f"{kind} {spec.target or node.name}"


def _sizes(placeholders: Sequence[Node]) -> dict[sympy.Symbol, tuple[str, int]]:
    found: dict[sympy.Symbol, tuple[str, int]] = {}
    symbols: set[sympy.Symbol] = set()
    for node in placeholders:
        value = node.meta["val"]
        dims = enumerate(value.shape) if isinstance(value, torch.Tensor) else [(-1, value)]
        for d, n in dims:
            if isinstance(n, torch.SymInt):
                symbols |= n.node.expr.free_symbols
                if isinstance(n.node.expr, sympy.Symbol):
                    found.setdefault(n.node.expr, (node.name, d))
    if missing := sorted(map(str, symbols - set(found))):
        raise NotImplementedError(f"No input has the size {missing[0]} itself, only sizes that are computed from it.")
    return found


class Program:
    """An exported program on the device. Called with the arguments of the exported module, it gives its results.

    It has no gradients. Buffers that the module writes are written here too; they are copies of the program's.

    Args:
        ep: The program, whatever device it was exported on.
        saved: Programs that are compiled already, by :meth:`torch_tpu.compile.graph.Programs.mark`.

    Attributes:
        exported: The exported program that is run.
        state: Parameters, buffers and constants on the device, by name.
    """

    def __init__(self, ep: ExportedProgram, saved: dict[str, tuple[Plan, Any]] | None = None) -> None:
        self._prepared = prepared = _prepare(ep)
        self.exported = prepared.exported
        notes_of(prepared.module).saved = saved or {}
        held = {**self.exported.constants, **self.exported.state_dict}
        self.state: dict[str, torch.Tensor] = {
            str(spec.target): _copied(held[str(spec.target)])
            for spec in self.exported.graph_signature.input_specs
            if spec.kind in _LIFTED
        }
        self._programs: list[Programs] = []
        self._bounded: BoundedGraph | None = None
        self._run = self._runnable()

    def _runnable(self) -> Runnable:
        module = self._prepared.module
        if self._prepared.sizes and split(module) is None:
            upper = [_upper(self.exported, s) for s in self._prepared.sizes]
            pair = Pair(Buckets([*self._prepared.sizes], upper)).known()
            self._pair = pair
            self._bounded = BoundedGraph("exported", module, pair, _results(module), False)
            try:
                self._bounded.check(self._largest())
            except Unbounded as problem:
                pair.give_up(str(problem))
                self._bounded = None
        return self._bounded or compiled("exported", module, made=self._programs)

    def _largest(self) -> tuple[int, ...]:
        """The largest sizes that the program is for, as far as it says; else those of the example."""
        return tuple(_upper(self.exported, s) or _hint(self._prepared, s) for s in self._prepared.sizes)

    def compile(self) -> list[tuple[str, Plan, Any]]:
        """Compiles the program, if it is not: for its sizes, or for the largest of those that change.

        Returns:
            The mark, the plan and the executable of each program.

        Raises:
            NotImplementedError: Parts of it run on the host, or it has no form for sizes that change.
            CompileError: An operator has no program.
        """
        if split(self._prepared.module) is not None:
            raise NotImplementedError("Parts of this exported program run outside of the device, so it is no program.")
        if self._bounded is not None:
            future = self._bounded.check(self._largest())
            programs: Programs = next(iter(self._bounded.programs.values()))
        elif self._prepared.sizes:
            raise NotImplementedError(f"This exported program is compiled for each size: {self._pair.problem}.")
        else:
            programs = self._programs[0]
            future = programs.ahead(geometry(_examples(self._prepared)))
        plan, executable = future.result()
        ((arguments, level),) = programs.known.values()
        return [(programs.mark(arguments, level), plan, executable)]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The results of the exported module.

        Raises:
            TypeError: The arguments are not of the structure that was exported.
            ValueError: A tensor has a dtype or a size that the program is not for.
        """
        given = self._flat(args, kwargs)
        nodes = [n for n in self.exported.graph.nodes if n.op == "placeholder"]
        specs = self.exported.graph_signature.input_specs
        user = iter(given)
        values: dict[str, Any] = {n.name: next(user) if s.kind is InputKind.USER_INPUT else self.state[str(s.target)]
                  for n, s in zip(nodes, specs, strict=True)}  # fmt: skip
        sizes = {s: values[name].shape[d] if d >= 0 else values[name] for s, (name, d) in self._prepared.sizes.items()}
        self._check(nodes, values, sizes)
        tensors = [values[n.name] for n in nodes if not isinstance(n.meta["val"], torch.SymInt)]
        with torch.no_grad():
            return self._finish(iter(self._run([*sizes.values(), *tensors])), values)

    def _flat(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        spec = self.exported.call_spec.in_spec
        names = spec.children()[1].context or []
        ordered = {name: kwargs[name] for name in names if name in kwargs} | kwargs
        flat, found = tree_flatten((args, ordered))
        if found != spec:
            raise TypeError(f"The exported program takes arguments of the structure {spec}, got {found}.")
        return flat

    def _check(self, nodes: Sequence[Node], values: dict[str, Any], sizes: dict[sympy.Symbol, int]) -> None:
        for symbol, n in sizes.items():
            bounds = self.exported.range_constraints.get(symbol)
            if bounds is not None and not bounds.lower <= n <= bounds.upper:
                raise ValueError(f"The size {symbol} must be {bounds.lower} to {bounds.upper}, got {n}.")
        for node in nodes:
            want, have = node.meta["val"], values[node.name]
            if not isinstance(want, torch.Tensor):
                continue
            if not isinstance(have, torch.Tensor) or have.device.type != "tpu" or have.dtype != want.dtype:
                raise ValueError(f"The input {node.name} must be a {want.dtype} tensor on tpu, got {_described(have)}.")
            expected = [_at(n, sizes) for n in want.shape]
            if [*have.shape] != expected:
                raise ValueError(f"The input {node.name} must have the sizes {expected}, got {[*have.shape]}.")

    def _finish(self, made: Any, values: dict[str, Any]) -> Any:
        """Writes what the program writes and puts the user's results together."""
        results = []
        returned = self.exported.graph.output_node().args[0]
        for spec, r in zip(self.exported.graph_signature.output_specs, returned, strict=True):
            value = next(made) if isinstance(r, Node) else r
            if spec.kind is OutputKind.BUFFER_MUTATION:
                self.state[str(spec.target)].copy_(value)
            elif spec.kind is OutputKind.USER_INPUT_MUTATION:
                values[str(spec.target)].copy_(value)
            elif spec.kind is OutputKind.USER_OUTPUT:
                results.append(value)
        return tree_unflatten(results, self.exported.call_spec.out_spec)


def _copied(t: torch.Tensor) -> torch.Tensor:
    """A copy on the device that lies in memory as programs expect it, which what came from a file does not."""
    return t.detach().cpu().to("tpu")


def _results(module: GraphModule) -> int:
    returned: Any = module.graph.output_node().args[0]
    return len(returned)


def _described(x: Any) -> str:
    return f"a {x.dtype} tensor on {x.device.type}" if isinstance(x, torch.Tensor) else repr(x)


def _at(n: Any, sizes: dict[sympy.Symbol, int]) -> int:
    return int(n.node.expr.xreplace(sizes)) if isinstance(n, torch.SymInt) else int(n)


def _upper(ep: ExportedProgram, symbol: sympy.Symbol) -> int | None:
    bounds = ep.range_constraints.get(symbol)
    return int(bounds.upper) if bounds is not None and isinstance(bounds.upper, sympy.Integer) else None


def _hint(prepared: _Prepared, symbol: sympy.Symbol) -> int:
    nodes = (n for n in prepared.module.graph.nodes if n.op == "placeholder")
    value = next(n.meta["val"] for n in nodes if getattr(n.meta["val"], "node", None) is not None)
    env = value.node.shape_env
    return int(env.var_to_val.get(symbol) or env.var_to_range[symbol].lower)


def _examples(prepared: _Prepared) -> list[Any]:
    return [n.meta["val"] for n in prepared.module.graph.nodes if n.op == "placeholder"]


# ---- text -----------------------------------------------------------------------------------------------------------
def stablehlo(ep: ExportedProgram, precision: str | None = None) -> str:
    """The exported program as one StableHLO module, in the form for a TPU.

    The arguments of ``@main`` are, in order: one int64 for each size that changes, then parameters, buffers and
    constants, then the user's inputs; comments at the beginning name them. The results are the new values of what the
    program writes, then the user's. Arrays whose sizes change are flat, as long as for their bounds, with the real
    elements first.

    Args:
        ep: The program, whatever device it was exported on.
        precision: Of float32 products: ``medium``, ``high`` or ``highest``; None: what is in force.

    Raises:
        CompileError: An operator has no form in StableHLO.
        NotImplementedError: A size changes over which an operator has no form with bounds.
    """
    program = Program(ep)
    prepared = program._prepared
    level = precision or PRECISIONS[_C._precision()]
    if prepared.sizes:
        if program._bounded is None:
            raise NotImplementedError("This program has sizes that change and cannot be bounded, so it is no one text.")
        (programs,) = program._bounded.programs.values()
        sizes = dict(zip(prepared.sizes, program._largest(), strict=True))
        arguments = program._bounded._described(sizes, programs.bounds)
        interpreter: Callable[[Tracer], Interpreter] = programs.interpreter
    else:
        arguments, interpreter = geometry(_examples(prepared)), Interpreter

    def ordered(trace: Tracer) -> Interpreter:
        made = interpreter(trace)
        made.locations = True
        return _InOrder.around(made)

    plan = build_graph("exported", prepared.module, arguments, precision=level, emulate_precision=False,
                       interpreter=ordered)  # fmt: skip
    header = "".join(f"// %arg{i}: {words}\n" for i, words in enumerate(prepared.inputs))
    return header + plan.text


class _InOrder:
    """Makes all inputs of a graph arguments of the program, in their order, before it runs."""

    @staticmethod
    def around(interpreter: Interpreter) -> Interpreter:
        run = interpreter.run

        def run_in_order(module: GraphModule, inputs: Sequence[Any]) -> list[Any]:
            interpreter.run = run  # type: ignore[method-assign]  # subgraphs run as they are
            for x in inputs:
                if isinstance(x, ScalarOperand):
                    x.to(torch.int64)
                elif isinstance(x, torch.Tensor):
                    interpreter.trace.read(x)
            return run(module, inputs)

        interpreter.run = run_in_order  # type: ignore[method-assign]
        return interpreter


def exported_to_mlir(ep: ExportedProgram, format: str = "text") -> str:
    """As :func:`stablehlo`.

    Raises:
        NotImplementedError: ``format`` is not ``"text"``: plugins take StableHLO and give none back, so nothing here
            makes MLIR bytecode. ``stablehlo-translate --serialize`` does, from the text.
    """
    if format != "text":
        raise NotImplementedError(
            f"exported_to_mlir gives text, not {format!r}: PJRT plugins read StableHLO and do not write it. "
            f"`stablehlo-translate --serialize --target=VERSION` makes a portable artifact of the text."
        )
    return stablehlo(ep)


# ---- files ----------------------------------------------------------------------------------------------------------
def save(ep: ExportedProgram, path: str | os.PathLike[str] | IO[bytes]) -> None:
    """Compiles an exported program and writes it with its executable.

    Args:
        ep: The program, whatever device it was exported on. With sizes that change it is compiled for their largest
            values.
        path: The file.

    Raises:
        NotImplementedError: Parts of it run on the host, or an operator has no form for sizes that change.
        CompileError: An operator has no program.
    """
    program = Program(ep)
    made = program.compile()
    manifest = {
        "format": _FORMAT,
        "compiled for": _identity(),
        "inputs": program._prepared.inputs,
        "programs": [{"mark": mark, "plan": _spell(plan)} for mark, plan, _ in made],
    }
    exported = io.BytesIO()
    torch.export.save(ep, exported)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("manifest.json", json.dumps(manifest, indent=1))
        archive.writestr("exported.pt2", exported.getvalue())
        for mark, _, executable in made:
            archive.writestr(f"{mark}.executable", executable.serialize())


def load(path: str | os.PathLike[str] | IO[bytes], recompile: bool = False) -> Program:
    """Reads a file of :func:`save`. Nothing is compiled when it is called as it was compiled.

    Args:
        path: The file. As with ``torch.export.load``, it must come from somebody you trust.
        recompile: Whether the executables are made anew, for this machine.

    Raises:
        ValueError: It is no file of :func:`save`, or of another version of its format.
        RuntimeError: It was compiled for another platform, another version of it, or another processor; the text says
            what differs.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            manifest = json.loads(archive.read("manifest.json"))
            exported = torch.export.load(io.BytesIO(archive.read("exported.pt2")))
            executables = {p["mark"]: archive.read(f"{p['mark']}.executable") for p in manifest["programs"]}
    except (zipfile.BadZipFile, KeyError) as error:
        raise ValueError(f"{path} is not a file of torch_tpu.export.save: {error}.") from None
    if manifest["format"] != _FORMAT:
        raise ValueError(f"{path} has the format {manifest['format']}; this version reads {_FORMAT}.")
    if recompile:
        return Program(exported)
    ours, theirs = _identity(), manifest["compiled for"]
    if differs := [f"{k} {theirs.get(k)} (here {ours[k]})" for k in ours if theirs.get(k) != ours[k]]:
        raise RuntimeError(
            f"{path} was compiled for {', '.join(differs)}. Save it again here, or load it with recompile=True."
        )
    plans = {p["mark"]: _read(p["plan"]) for p in manifest["programs"]}
    return Program(exported, {mark: (plan, _C._load(executables[mark])) for mark, plan in plans.items()})


def _identity() -> dict[str, str]:
    """What an executable and its plan depend on."""
    info = _C._platform_info()
    return {
        "torch_tpu": __version__,
        "platform": str(info["platform"]),
        "version": f"{info['version']}, PJRT {info['api']}",
        "device": str(info["device_kinds"][0]),
        "processor": hashlib.sha256(disk._cpu_features().encode()).hexdigest()[:16],
    }


def _spell(plan: Plan) -> dict[str, Any]:
    """A plan as JSON."""

    def result(r: Any) -> Any:
        if isinstance(r, list):
            return [result(x) for x in r]
        return {**r._asdict(), "dtype": CODE_OF_DTYPE[r.dtype]} if isinstance(r, Result) else r

    return {
        "name": plan.name,
        "operands": [(o.kind, o.index, CODE_OF_DTYPE[o.dtype]) for o in plan.operands],
        "outputs": [(o.slot, o.type.shape, CODE_OF_DTYPE[o.type.dtype]) for o in plan.outputs],
        "results": [result(r) for r in plan.results],
        "donations": plan.donations,
        "rng_used": plan.rng_used,
        "uses_precision": plan.uses_precision,
        "brief": plan.brief,
        "faults": plan.faults,
    }


def _read(spelled: dict[str, Any]) -> Plan:
    """A plan from JSON."""

    def result(r: Any) -> Any:
        if isinstance(r, list):
            return [result(x) for x in r]
        if not isinstance(r, dict):
            return r
        shape = {name: tuple(r[name]) for name in ("sizes", "strides")}
        return Result(**{**r, **shape, "dtype": DTYPE_OF_CODE[r["dtype"]]})

    return Plan(
        spelled["name"],
        "",
        [Operand(kind, index, DTYPE_OF_CODE[code]) for kind, index, code in spelled["operands"]],
        [Output(slot, Type(tuple(shape), DTYPE_OF_CODE[code])) for slot, shape, code in spelled["outputs"]],
        [result(r) for r in spelled["results"]],
        donations=[(i, j) for i, j in spelled["donations"]],
        rng_used=spelled["rng_used"],
        uses_precision=spelled["uses_precision"],
        brief=spelled["brief"],
        faults=[(kind, text) for kind, text in spelled["faults"]],
        is_graph=True,
    )
