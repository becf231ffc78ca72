"""One compiled graph: what AOTAutograd calls, and what its cache stores."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch._inductor.output_code import OutputCode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.utils._python_dispatch import _disable_current_modes

if TYPE_CHECKING:
    from torch_tpu.bounded.graph import BoundedGraph, Pair

from torch_tpu import _C, config, platform
from torch_tpu.compile.failures import explained, guarded
from torch_tpu.compile.segments import CONSTANT_ELEMENTS, Runner, split
from torch_tpu.compile.settings import Settings
from torch_tpu.lowering import view
from torch_tpu.programs import disk, options, stats
from torch_tpu.programs.eager import PRECISIONS, describe, make_program
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


@dataclasses.dataclass(eq=False)
class Notes:
    """What the programs of a graph are told of it.

    Attributes:
        group: Whose programs they are compared with, to say why one was needed; default: their graph's.
        stored: Whether the disk cache has them.
        callback: Gets each program that is compiled: see the option ``debug_callback``.
        saved: Programs that were compiled before, from a file (:mod:`torch_tpu.export`), by :meth:`Programs.mark`.
    """

    group: str = ""
    stored: bool = True
    callback: Callable[[Any], None] | None = None
    saved: dict[str, tuple[Plan, Any]] = dataclasses.field(default_factory=dict)


_notes: weakref.WeakKeyDictionary[GraphModule, Notes] = weakref.WeakKeyDictionary()


def notes_of(module: GraphModule) -> Notes:
    """The notes on a graph, which may be changed until its programs are made."""
    return _notes.setdefault(module, Notes())


def compiled(
    name: str, module: GraphModule, inputs: Sequence[Any] | None = None, made: list[Programs] | None = None
) -> Runnable:
    """What runs a graph: one program, or several with steps between them.

    Args:
        name: Stands in logs.
        module: The graph.
        inputs: Fake tensors; if given, what their sizes tell is compiled in the background from now on.
        made: Gets what has the programs.

    Raises:
        CompileError: An operator has no program, as far as ``inputs`` tell.
    """
    with _disable_current_modes():  # constants are real tensors
        return _compiled(name, module, inputs, [] if made is None else made)


def _compiled(name: str, module: GraphModule, inputs: Sequence[Any] | None, made: list[Programs]) -> Runnable:
    number = itertools.count()

    def program(part: GraphModule) -> Runnable:
        notes = notes_of(module)
        part, constants = _lift(part)
        _notes[part] = notes
        programs = Programs(f"{name}.{next(number)}" if segments else name, part)
        made.append(programs)
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
    #: How large open sizes are in the programs.
    bounds: Mapping[Any, int] = MappingProxyType({})

    def __init__(self, name: str, module: GraphModule, identity: str = "") -> None:
        self.name = name
        self.module = module
        self.options = options.scope()
        self.identity = f"{identity or graph_identity(module)}{self.options or ''}"
        self.notes = notes_of(module)
        self.known: dict[str, tuple[list[Argument], str]] = {}  # inputs and precision of each program, by key
        self._ahead: dict[str, Future[tuple[Plan, Any]]] = {}  # by key
        self._lock = threading.Lock()
        self.run = _C._Graph(name, self.obtain, self.run_time_integers)

    def key(self, arguments: Sequence[Argument], precision: str) -> str:
        """The name of a program in the disk cache."""
        return disk.key_of(f"graph:{self.identity}", [*arguments], precision)

    def mark(self, arguments: Sequence[Argument], precision: str) -> str:
        """What tells a program from others of its graph, whatever the version of this package."""
        spelled = sorted((str(s), n) for s, n in self.bounds.items())
        stable = [disk.stable(a) for a in arguments]
        return hashlib.sha256(repr((spelled, precision, self.options, stable)).encode()).hexdigest()

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

    def started(self) -> list[Future[tuple[Plan, Any]]]:
        """Programs that are being compiled, or are compiled and not used yet."""
        with self._lock:
            return [*self._ahead.values()]

    def _make(self, arguments: list[Argument], level: str) -> tuple[Plan, Any]:
        return self._start(arguments, level, self.key(arguments, level)).result()

    def _start(self, arguments: list[Argument], level: str, key: str) -> Future[tuple[Plan, Any]]:
        why = self._reason(arguments, level)
        start = time.perf_counter()
        if (entry := self._found(arguments, level, key)) is not None:
            self.known[key] = arguments, level
            stats.record(self.name, "disk", 0.0, time.perf_counter() - start, why)
            self._tell(arguments, level)
            done: Future[tuple[Plan, Any]] = Future()
            done.set_result(entry)
            return done
        plan = self.build(arguments, level, locations=traces())
        traced = time.perf_counter()
        self.known[key] = arguments, level
        self._tell(arguments, level, plan.text)

        def compile_() -> tuple[Plan, Any]:
            begin = time.perf_counter()
            try:
                executable = options.compile(plan, self.options)
            except _C.PjrtError as error:
                raise explained(self, plan, arguments, level, error) from error
            if self.notes.stored:
                disk.store(key, plan, executable)
            stats.record(self.name, "compiled", traced - start, time.perf_counter() - begin, why)
            return plan, executable

        return _pool().submit(compile_)

    def _found(self, arguments: list[Argument], level: str, key: str) -> tuple[Plan, Any] | None:
        """A program that need not be compiled."""
        if self.notes.saved and (saved := self.notes.saved.get(self.mark(arguments, level))) is not None:
            return saved
        return disk.load(key) if self.notes.stored else None

    def _reason(self, arguments: list[Argument], level: str) -> str:
        state: dict[str, Any] = {f"bound of {s}": n for s, n in self.bounds.items()}
        state |= {"graph": self.identity, "precision": level}
        if self.options:
            state["compiler options"] = dict(self.options)
        return stats.graph_reason(self.notes.group or self.name.partition("[")[0], state, arguments)

    def _tell(self, arguments: list[Argument], level: str, text: str | None = None) -> None:
        """Hands a new program to those who asked for it: the trace of ``TORCH_TRACE``, the user's callback."""
        if traces():
            shown = text if text is not None else self.build(arguments, level, locations=True).text
            artifact("torchtpu_stablehlo_graph", f"// {self.name}\n{shown}")
        if self.notes.callback is not None:
            from torch_tpu.compile.debug import ProgramView

            self.notes.callback(ProgramView(self, arguments, level))

    def build(self, arguments: Sequence[Argument], level: str, locations: bool = False) -> Plan:
        """The plan for inputs of a geometry; nothing is compiled.

        Args:
            arguments: The inputs.
            level: The precision: ``medium``, ``high`` or ``highest``.
            locations: Whether the text has the user's lines.
        """

        def interpreter(trace: Tracer) -> Interpreter:
            made = self.interpreter(trace)
            made.locations = locations
            return made

        return build_graph(
            self.name,
            self.module,
            arguments,
            precision=level,
            emulate_precision=platform.emulates_precision(),
            interpreter=interpreter,
        )

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


def localize(module: GraphModule) -> bool:
    """Brings the small constants of a graph to the host, where a trace can see them. Whether there are large ones."""
    large = False
    with _disable_current_modes():  # constants are real tensors
        for name, value in _constants(module).items():
            large |= value.numel() > CONSTANT_ELEMENTS
            if value.device.type == "tpu" and value.numel() <= CONSTANT_ELEMENTS:
                for part in module.modules():
                    if hasattr(part, name):
                        setattr(part, name, value.detach().cpu())
    return large


def _lift(module: GraphModule) -> tuple[GraphModule, list[torch.Tensor]]:
    """The graph with its large constants as further inputs, and those; small ones stay, on the host."""
    lifted: dict[str, torch.Tensor] = {}
    for name, value in _constants(module).items():
        if value.numel() > CONSTANT_ELEMENTS and hasattr(module, name):
            lifted[name] = value.detach().to("tpu")
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
        natural = getattr(t, "_torch_tpu_base", None) or view.natural_base(t.shape, t.stride(), count)
        if natural is not None and storage._cdata not in bases:
            bases[storage._cdata] = Type(natural, t.dtype)
    for t in tensors:
        bases.setdefault(t.untyped_storage()._cdata, Type((t.untyped_storage().nbytes() // t.itemsize,), t.dtype))
    positions = itertools.count()
    return [_argument(t, next(positions), slots, bases) if isinstance(t, torch.Tensor) else t for t in inputs]


def _is_known(t: torch.Tensor) -> bool:
    sizes = (*t.shape, *t.stride(), t.storage_offset(), t.untyped_storage().nbytes())
    return not any(isinstance(n, torch.SymInt) for n in sizes)


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


def traces() -> bool:
    """Whether PyTorch writes a structured trace (``TORCH_TRACE``)."""
    return bool(torch._logging._internal.trace_log.handlers)


def artifact(name: str, text: str) -> None:
    """Adds a text to the structured trace, where ``tlparse`` finds it."""
    torch._logging.trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": "string"},
        payload_fn=lambda: text,
        expect_trace_id=False,
    )


def readable(module: GraphModule) -> str:
    """A graph as Python, with shapes, strides and devices."""
    return module.print_readable(print_output=False, include_stride=True, include_device=True)


def wait(parts: Parts) -> None:
    """Waits for what is being compiled, and raises what is wrong with it."""
    for programs in parts.all():
        for started in programs.started():
            started.result()


@dataclasses.dataclass(eq=False)
class Parts:
    """What runs a graph under certain compiler options.

    Attributes:
        run: Takes the inputs and gives the outputs.
        programs: Those by size, one entry per segment of the graph.
        bounded: The graph with bounds, if it has open sizes.
    """

    run: Runnable
    programs: list[Programs]
    bounded: BoundedGraph | None = None

    def all(self) -> list[Programs]:
        """All that has programs."""
        return [*self.programs, *(self.bounded.programs.values() if self.bounded is not None else ())]


class Watcher:
    """Sees the graphs that are compiled or called while it watches."""

    def created(self, graph: CompiledGraph) -> None:
        """A graph was compiled, or came from AOTAutograd's cache."""

    def called(self, graph: CompiledGraph, inputs: list[Any]) -> None:
        """A graph is about to run."""

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        _watchers.append(self)
        try:
            yield
        finally:
            _watchers.remove(self)


_watchers: list[Watcher] = []
_graphs: weakref.WeakValueDictionary[tuple[str, bool], CompiledGraph] = weakref.WeakValueDictionary()


@dataclasses.dataclass(eq=False)
class CompiledGraph(OutputCode):
    """What AOTAutograd calls with a list of inputs, which is emptied; it can be stored in AOTAutograd's cache.

    Attributes:
        name: Stands in logs.
        module: The graph; None while it is stored.
        parts: What runs it, by compiler options; empty while it is stored.
        settings: The backend's options.
        pair: What it shares with the graph of the other pass.
        visible: How many of its outputs, from the first, the user sees.
        is_backward: Whether it takes what the other graph saved.
        pickled: The graph, while it is stored.
    """

    name: str
    module: GraphModule | None
    parts: dict[options.Scope, Parts]
    settings: Settings
    pair: Pair
    visible: int = 0
    is_backward: bool = False
    pickled: bytes | None = None

    def __post_init__(self) -> None:
        self._boxed_call = True  # on the object: AOTAutograd's wrappers copy its attributes
        self._announce()

    def _announce(self) -> None:
        (self.options, first), *_ = self.parts.items()
        self.run = first.run
        _graphs[self.pair.uid, self.is_backward] = self
        for watcher in _watchers:
            watcher.created(self)

    def __call__(self, inputs: Sequence[Any]) -> Any:
        given = inputs if isinstance(inputs, list) else [*inputs]
        for watcher in _watchers:
            watcher.called(self, given)
        if options.scopes_open or self.options:
            return self._under(options.scope()).run(given)
        return self.run(given)

    def _under(self, scope: options.Scope) -> Parts:
        """What runs the graph under the compiler options of the calling thread."""
        if scope not in self.parts:
            assert self.module is not None
            self.parts[scope] = runnable(
                self.name, self.module, self.settings, self.pair, self.visible, self.is_backward
            )
        return self.parts[scope]

    def ahead(self, inputs: list[Any]) -> list[Future[Any]]:
        """Starts to compile what a call with these inputs needs, as far as that is known before it runs."""
        parts = self._under(options.scope())
        if parts.bounded is not None and self.pair.buckets is not None:
            return [parts.bounded.check(parts.bounded.sizes_of(inputs))]
        assert self.module is not None
        if split(self.module) is not None:
            return []
        constants = parts.programs[0].module  # large ones are further inputs
        if len(inputs) != sum(n.op == "placeholder" for n in constants.graph.nodes):
            return []
        return [parts.programs[0].ahead(geometry(inputs))]

    def other_pass(self) -> CompiledGraph | None:
        """The backward graph of a forward graph, and the other way round."""
        return _graphs.get((self.pair.uid, not self.is_backward))

    def prepare_for_serialization(self) -> None:
        from torch.fx._graph_pickler import GraphPickler, Options

        kept = ("val", "stack_trace", "custom", "partitioner_tag")
        lines = Options(ops_filter=None, node_metadata_key_filter=lambda key: key in kept)
        self.pickled = GraphPickler.dumps(self.module, lines)
        self.module, self.parts, self.run, self.options = None, {}, _stored, ()

    def post_compile(self, example_inputs: Sequence[Any], constants: Any, graph_kwargs: Any) -> None:
        if not self.parts:
            from torch.fx._graph_pickler import GraphPickler

            assert self.pickled is not None
            mode = next((t.fake_mode for t in example_inputs if isinstance(t, FakeTensor)), None) or FakeTensorMode()
            module = GraphPickler.loads(self.pickled, mode)
            assert isinstance(module, GraphModule)
            self.module = module
            self.pair = self.pair.known()
            if self.pair.problem and not self.is_backward:
                self.pair.give_up(self.pair.problem)  # says it in this process too
            known = [n.meta.get("val") for n in module.graph.nodes if n.op == "placeholder"]
            made = runnable(self.name, module, self.settings, self.pair, self.visible, self.is_backward, inputs=known)
            self.parts = {options.scope(): made}
            self._announce()

    def set_triton_bundle(self, triton_bundle: Any) -> None:
        pass


def _stored(_: list[Any]) -> list[Any]:
    raise RuntimeError("This graph is as AOTAutograd's cache stores it; it was not made to run again.")


def runnable(
    name: str,
    module: GraphModule,
    settings: Settings,
    pair: Pair,
    visible: int,
    is_backward: bool,
    checked: BoundedGraph | None = None,
    inputs: Sequence[Any] | None = None,
) -> Parts:
    """What runs a graph of which some sizes may be open. See :class:`CompiledGraph` and :func:`compiled`."""
    note(module, settings, is_backward)
    programs: list[Programs] = []
    by_size = compiled(name, module, inputs, programs)
    if pair.buckets is None:
        return Parts(guarded(by_size, module, settings, pair, is_backward), programs)
    from torch_tpu.bounded.graph import BoundedGraph

    bounded = checked or BoundedGraph(name, module, pair, visible, is_backward)

    def run(given: list[Any]) -> list[Any]:
        return (bounded if pair.buckets is not None else by_size)(given)

    return Parts(guarded(run, module, settings, pair, is_backward), programs, bounded)


def note(module: GraphModule, settings: Settings, is_backward: bool) -> None:
    """Notes on a graph what its programs must know."""
    notes = notes_of(module)
    notes.stored, notes.callback = settings.serializable, settings.debug_callback
    if (function := _captured_function()) is not None:
        notes.group = f"{function}, {'backward' if is_backward else 'forward'}, {settings.name}"


def _captured_function() -> str | None:
    """The function that Dynamo is capturing on this thread, or the part of it after a graph break."""
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase, tls

    translator = getattr(tls, "current_tx", None)
    if not isinstance(translator, InstructionTranslatorBase):
        return None
    code = translator.f_code
    return f"{code.co_filename}:{code.co_firstlineno} {code.co_name}"
