"""One compiled graph: what AOTAutograd calls, and what its cache stores."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch._inductor.output_code import OutputCode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.utils._python_dispatch import _disable_current_modes

if TYPE_CHECKING:
    from torch_tpu.bounded.graph import BoundedGraph, Pair

from torch_tpu import _C, config, platform
from torch_tpu.compile.segments import CONSTANT_ELEMENTS, Runner, split
from torch_tpu.lowering import view
from torch_tpu.programs import disk, options, stats
from torch_tpu.programs.eager import CODE_OF_DTYPE, PRECISIONS, describe, make_program
from torch_tpu.stablehlo import Type
from torch_tpu.tracing.graph import Interpreter, build_graph
from torch_tpu.tracing.program import Argument, Plan, TensorArgument
from torch_tpu.tracing.tracer import Tracer

#: Takes a list of inputs, which it empties, and returns a list of outputs.
Runnable = Callable[[list[Any]], list[Any]]


@cache
def _pool() -> ThreadPoolExecutor:
    """XLA compiles without the GIL, so several programs are compiled at a time."""
    return ThreadPoolExecutor(config.get("TORCH_TPU_COMPILE_THREADS") or None, "torch_tpu compile")


def compiled(name: str, module: GraphModule, inputs: Sequence[Any] | None = None) -> Runnable:
    """What runs a graph: one program, or several with steps between them.

    Args:
        name: Stands in logs.
        module: The graph.
        inputs: Fake tensors; if given, what their sizes tell is compiled in the background from now on.

    Raises:
        CompileError: An operator has no program, as far as ``inputs`` tell.
    """
    with _disable_current_modes():  # constants are real tensors
        return _compiled(name, module, inputs)


def _compiled(name: str, module: GraphModule, inputs: Sequence[Any] | None) -> Runnable:
    number = itertools.count()

    def program(part: GraphModule) -> Runnable:
        part, constants = _lift(part)
        programs = Programs(f"{name}.{next(number)}" if segments else name, part)
        fakes = [n.meta.get("val") for n in part.graph.nodes if n.op == "placeholder"]
        arguments = predicted(fakes) if inputs is not None else None
        if arguments is not None:
            programs.ahead(arguments)
        return _with_constants(programs.run, constants) if constants else programs.run

    segments = split(module)
    return program(module) if segments is None else Runner(module, segments, program)


def _with_constants(run: Runnable, constants: list[torch.Tensor]) -> Runnable:
    def call(inputs: list[Any]) -> list[Any]:
        inputs += constants
        return run(inputs)

    return call


class Programs:
    """The programs of one graph, by the geometry of its inputs.

    C++ (``csrc/compile/graph.cc``) keeps them in a table and calls :meth:`obtain` for what it does not have.
    """

    #: Whether integers among the inputs are operands; else they are part of a program.
    run_time_integers = False

    def __init__(self, name: str, module: GraphModule, identity: str = "") -> None:
        self.name = name
        self.module = module
        self.identity = identity or graph_identity(module)
        self.plans: list[Plan] = []
        self._ahead: dict[str, Future[tuple[Plan, Any]]] = {}  # by disk key
        self._lock = threading.Lock()
        self.run = _C._Graph(name, self.obtain, self.run_time_integers)

    def key(self, arguments: Sequence[Argument], precision: str) -> str:
        return disk.key_of(f"graph:{self.identity}", [*arguments], precision)

    def obtain(self, arguments: list[Any], precision: int) -> Any:
        """The program for inputs of a new geometry: compiled ahead, from the disk cache, or compiled now."""
        described = [describe(a) for a in arguments]
        level = PRECISIONS[precision]
        with self._lock:
            ahead = self._ahead.pop(self.key(described, level), None)
        plan, executable = ahead.result() if ahead is not None else self._make(described, level)
        return make_program(plan, executable)

    def ahead(self, arguments: Sequence[Argument]) -> Future[tuple[Plan, Any]]:
        """Traces the graph for inputs of this geometry, which finds what it cannot do, and compiles in the pool."""
        level = PRECISIONS[_C._precision()]
        key = self.key(arguments, level)
        with self._lock:
            if key not in self._ahead:
                self._ahead[key] = self._start([*arguments], level, key)
            return self._ahead[key]

    def _make(self, arguments: list[Argument], level: str) -> tuple[Plan, Any]:
        return self._start(arguments, level, self.key(arguments, level)).result()

    def _start(self, arguments: list[Argument], level: str, key: str) -> Future[tuple[Plan, Any]]:
        why = stats.reason(self.name, arguments)
        start = time.perf_counter()
        if (entry := disk.load(key)) is not None:
            stats.record(self.name, "disk", 0.0, time.perf_counter() - start, why)
            done: Future[tuple[Plan, Any]] = Future()
            done.set_result(entry)
            return done
        plan = self.build(arguments, level)
        traced = time.perf_counter()

        def compile_() -> tuple[Plan, Any]:
            begin = time.perf_counter()
            executable = options.compile(plan)
            disk.store(key, plan, executable)
            stats.record(self.name, "compiled", traced - start, time.perf_counter() - begin, why)
            return plan, executable

        return _pool().submit(compile_)

    def build(self, arguments: Sequence[Argument], level: str) -> Plan:
        """The plan for inputs of a geometry; nothing is compiled."""
        plan = build_graph(
            self.name,
            self.module,
            arguments,
            precision=level,
            emulate_precision=platform.emulates_precision(),
            interpreter=self.interpreter,
        )
        self.plans.append(plan)
        return plan

    def interpreter(self, trace: Tracer) -> Interpreter:
        """What runs the graph in a trace."""
        return Interpreter(trace)


def graph_identity(module: GraphModule) -> str:
    """A hash of what a graph computes: its code, and that of its subgraphs, with the scopes of precision in it."""
    digest = hashlib.sha256()
    for path, part in module.named_modules():
        if isinstance(part, GraphModule):
            digest.update(path.encode())
            digest.update(part.code.encode())
            for node in part.graph.nodes:
                if custom := node.meta.get("custom"):
                    digest.update(f"{node.name}:{custom}:{node.meta.get('partitioner_tag')}".encode())
    for name, value in _constants(module).items():
        digest.update(f"{name}{value.dtype}{value.tolist()}".encode())
    return digest.hexdigest()[:32]


def _constants(module: GraphModule) -> dict[str, torch.Tensor]:
    """The tensors that are part of a graph, by the names that its nodes have for them."""
    found = {}
    for part in module.modules():
        if isinstance(part, GraphModule):
            for node in part.graph.nodes:
                value = getattr(part, node.target, None) if node.op == "get_attr" else None
                if isinstance(value, torch.Tensor):
                    found[node.target] = value
    return found


def _lift(module: GraphModule) -> tuple[GraphModule, list[torch.Tensor]]:
    """The graph with its large constants as further inputs, and those; small ones stay, on the host."""
    lifted: dict[str, torch.Tensor] = {}
    for name, value in _constants(module).items():
        if value.numel() > CONSTANT_ELEMENTS and hasattr(module, name):
            lifted[name] = value.detach().to("tpu")
        elif value.device.type == "tpu":
            for part in module.modules():
                if hasattr(part, name):
                    setattr(part, name, value.detach().cpu())
    if not lifted:
        return module, []
    graph = Graph()
    copies: dict[Node, Node] = {}
    for node in module.graph.nodes:
        if node.op == "placeholder":
            copies[node] = graph.node_copy(node)
    inputs = {name: graph.placeholder(f"constant_{name}") for name in lifted}
    for name, node in inputs.items():
        node.meta["val"] = lifted[name]
    for node in module.graph.nodes:
        if node.op == "get_attr" and node.target in inputs:
            copies[node] = inputs[node.target]
        elif node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    return GraphModule(module, graph), [*lifted.values()]


def predicted(inputs: Sequence[Any]) -> list[Argument] | None:
    """The geometry that inputs known as fake tensors will have, if each covers its memory; None if sizes are open."""
    tensors = [t for t in inputs if isinstance(t, torch.Tensor)]
    if any(t.device.type != "tpu" or not _is_known(t) for t in tensors):
        return None
    if not all(isinstance(i, torch.Tensor | int | None) for i in inputs):
        return None
    return geometry(inputs)


def geometry(inputs: Sequence[Any]) -> list[Argument]:
    """Descriptions of inputs: of fake or meta tensors as if each storage was the output of a program."""
    tensors = [t for t in inputs if isinstance(t, torch.Tensor)]
    slots: dict[int, int] = {}
    bases: dict[int, Type] = {}
    for t in tensors:
        storage = t.untyped_storage()
        slots.setdefault(storage._cdata, len(slots))
        count = storage.nbytes() // t.itemsize
        natural = view.natural_base(t.shape, t.stride(), count)
        if natural is not None and storage._cdata not in bases:
            bases[storage._cdata] = Type(natural, t.dtype)
    for t in tensors:
        bases.setdefault(t.untyped_storage()._cdata, Type((t.untyped_storage().nbytes() // t.itemsize,), t.dtype))
    positions = itertools.count()
    return [_argument(t, next(positions), slots, bases) if isinstance(t, torch.Tensor) else t for t in inputs]


def _is_known(t: torch.Tensor) -> bool:
    return not any(isinstance(n, torch.SymInt) for n in (*t.shape, *t.stride(), t.storage_offset()))


def _argument(t: torch.Tensor, position: int, slots: dict[int, int], bases: dict[int, Type]) -> TensorArgument:
    storage = t.untyped_storage()
    sizes, strides, offset = tuple(t.shape), tuple(t.stride()), int(t.storage_offset())
    base = bases[storage._cdata]
    whole = t.is_contiguous() and sizes == base.shape and t.dtype == base.dtype
    chain = view.chain_of(sizes, strides)
    fits = whole or (chain is not None and 0 not in sizes and chain.fits(offset))
    return TensorArgument(
        position, slots[storage._cdata], t.dtype, sizes, strides, offset, fits, storage.nbytes(), base, t.is_conj(),
        t.is_neg(),
    )  # fmt: skip


@dataclasses.dataclass
class CompiledGraph(OutputCode):
    """What AOTAutograd calls with a list of inputs, which is emptied; it can be stored in AOTAutograd's cache.

    Attributes:
        name: Stands in logs.
        module: The graph; None while it is stored.
        run: What runs it; None while it is stored.
        pair: What it shares with the graph of the other pass, if it has open sizes.
        visible: How many of its outputs, from the first, the user sees.
        is_backward: Whether it takes what the other graph saved.
        pickled: The graph, while it is stored.
    """

    name: str
    module: GraphModule | None
    run: Runnable | None
    pair: Pair | None = None
    visible: int = 0
    is_backward: bool = False
    pickled: bytes | None = None

    def __post_init__(self) -> None:
        self._boxed_call = True  # on the object: AOTAutograd's wrappers copy its attributes

    def __call__(self, inputs: Sequence[Any]) -> Any:
        assert self.run is not None
        return self.run(inputs if isinstance(inputs, list) else [*inputs])

    def prepare_for_serialization(self) -> None:
        from torch.fx._graph_pickler import GraphPickler, Options

        self.pickled = GraphPickler.dumps(self.module, Options(ops_filter=None))
        self.module = self.run = None

    def post_compile(self, example_inputs: Sequence[Any], constants: Any, graph_kwargs: Any) -> None:
        if self.run is None:
            from torch.fx._graph_pickler import GraphPickler

            assert self.pickled is not None
            mode = next((t.fake_mode for t in example_inputs if isinstance(t, FakeTensor)), None) or FakeTensorMode()
            module = GraphPickler.loads(self.pickled, mode)
            assert isinstance(module, GraphModule)
            self.module = module
            if self.pair is not None:
                self.pair = self.pair.known()
            self.run = runnable(self.name, module, self.pair, self.visible, self.is_backward)

    def set_triton_bundle(self, triton_bundle: Any) -> None:
        pass


def runnable(
    name: str,
    module: GraphModule,
    pair: Pair | None,
    visible: int,
    is_backward: bool,
    checked: BoundedGraph | None = None,
) -> Runnable:
    """What runs a graph of which some sizes may be open. See :class:`CompiledGraph`."""
    by_size = compiled(name, module)
    if pair is None or pair.buckets is None:
        return by_size
    from torch_tpu.bounded.graph import BoundedGraph

    bounded = checked or BoundedGraph(name, module, pair, visible, is_backward)
    return lambda given: (bounded if pair.buckets is not None else by_size)(given)
