"""From one operator call to a program: module text, operands, results.

The eager kernel calls :func:`build` when its program table has no entry for a call. The description of the arguments
comes from C++ as plain tuples (see :data:`Argument`), the answer goes back as a :class:`Plan`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from torch_tpu.lowering import view
from torch_tpu.stablehlo import Type, Value, Work
from torch_tpu.stablehlo import ops as hlo
from torch_tpu.tracing.schema import OpInfo, op_info, resolve
from torch_tpu.tracing.tracer import ListedScalar, ScalarOperand, Tracer


class TensorArgument(NamedTuple):
    """A device tensor: a window on the base array of storage slot ``slot``.

    ``offset`` is the window's offset at this call; the program takes it as an operand. ``fits`` says whether the
    window's slice stays inside its chain (:mod:`torch_tpu.lowering.view`). ``base`` is None for memory that was never
    written. ``position`` is the tensor's place among the call's tensor arguments, ``storage`` its storage's size in
    bytes. ``conjugate`` and ``negative`` are PyTorch's lazy bits: the tensor means that of its memory.
    """

    position: int
    slot: int
    dtype: torch.dtype
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    fits: bool
    storage: int
    base: Type | None
    conjugate: bool = False
    negative: bool = False


class HostScalar(NamedTuple):
    """A 0-d CPU tensor; a ``wrapped`` one came from a Python number and promotes as such."""

    index: int  # type: ignore[assignment]
    dtype: torch.dtype
    wrapped: bool
    value: Any


class NumberArgument(NamedTuple):
    """A Scalar or float argument whose value is an operand; ``kind`` is what the program knows of it all the same."""

    index: int  # type: ignore[assignment]
    value: Any
    kind: str = ""


class NumbersArgument(NamedTuple):
    """A list of Scalars whose values are one packed operand, shape ``[len(values)]``."""

    index: int  # type: ignore[assignment]
    values: list[Any]


Argument = TensorArgument | NumbersArgument | HostScalar | NumberArgument | list[Any] | None | Any


class Operand(NamedTuple):
    """A program argument. ``kind``: base, offset, scalar, scalars, rng, flag or code; ``index`` counts in its kind."""

    kind: str
    index: int  # type: ignore[assignment]
    dtype: torch.dtype


class Output(NamedTuple):
    """One program result. ``slot`` is the storage slot it replaces, -1 for a fresh storage, -2 for the index flag."""

    slot: int
    type: Type


class Result(NamedTuple):
    """One returned tensor: ``output`` of the program seen through a window, or argument ``position``'s storage."""

    output: int  # -1: not a program output
    position: int  # -1: not an argument
    same: bool  # the argument itself, not a window on it
    dtype: torch.dtype
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


#: Elements of the largest value of a brief program.
BRIEF_ELEMENTS = 1 << 9


@dataclass
class Plan:
    """What C++ needs to run a program and to build the call's results from its outputs.

    A brief program takes microseconds wherever it runs: its values are small, and it does not loop.
    """

    name: str
    text: str
    operands: list[Operand]
    outputs: list[Output]
    results: list[Any]  # per schema return: Result, None (undefined), an int, or a list of them
    resizes: list[tuple[int, tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)
    donations: list[tuple[int, int]] = field(default_factory=list)  # (operand, output)
    rng_used: int = 0
    uses_precision: bool = False
    brief: bool = False
    faults: list[tuple[str, str]] = field(default_factory=list)  # what it checks: exception and text, by code
    largest_operand: int = 0  # elements
    work: Work = field(default_factory=Work)  # of a plan that is to be compiled
    is_graph: bool = False  # many operators: worth a thorough compile


class Call:
    """The arguments of one call, of an operator or a graph, as traced tensors."""

    def __init__(self, trace: Tracer) -> None:
        self.trace = trace
        self.tensors: dict[int, tuple[TensorArgument, torch.Tensor]] = {}  # by id of the meta tensor

    def argument(self, a: Argument) -> Any:
        if isinstance(a, TensorArgument):
            return self._tensor(a)
        if isinstance(a, HostScalar):
            return self._host_scalar(a)
        if isinstance(a, NumberArgument):
            return ScalarOperand(self.trace, a.index, a.value)
        if isinstance(a, NumbersArgument):
            return [ListedScalar(self.trace, a.index, a.values, i) for i in range(len(a.values))]
        if isinstance(a, list):
            return [self.argument(x) for x in a]
        return a

    def _tensor(self, a: TensorArgument) -> torch.Tensor:
        t = torch.empty_strided(a.sizes, a.strides, dtype=a.dtype, device="meta")
        t = t.conj() if a.conjugate else t
        t = torch._neg_view(t) if a.negative else t
        self.tensors[id(t)] = (a, t)
        self.trace.bind_lazy(t, lambda: self._read(a))
        return t

    def _host_scalar(self, a: HostScalar) -> Any:
        if a.wrapped:
            return ScalarOperand(self.trace, a.index, a.value)
        t = torch.empty((), dtype=a.dtype, device="meta")
        self.trace.bind_lazy(t, lambda: self.trace.operand("scalar", a.index, (), a.dtype))
        return t

    def _base(self, a: TensorArgument) -> Value:
        if a.base is None:
            return hlo.constant(0, a.dtype, (a.storage // a.dtype.itemsize,))
        return self.trace.operand("base", a.slot, a.base.shape, a.base.dtype)

    def _offset(self, a: TensorArgument, base: Value) -> int | Value:
        """Run-time, unless the window reaches over all of its base: then it can only be 0."""
        count = a.storage // a.dtype.itemsize
        if view.span(a.sizes, a.strides) == count:
            return 0
        return self.trace.operand("offset", a.position, (), view.index_dtype(count))

    def _read(self, a: TensorArgument) -> Value:
        base = self._base(a)
        return view.read_view(base, a.sizes, a.strides, self._offset(a, base), a.dtype, a.fits)

    def write_back(self, plan_outputs: dict[int, Value]) -> list[tuple[int, tuple[int, ...], tuple[int, ...]]]:
        """New bases for every storage whose window was written; returns the arguments that were resized."""
        resizes = []
        for a, t in self.tensors.values():
            sizes, strides = tuple(t.shape), tuple(t.stride())
            resized = sizes != a.sizes or (strides != a.strides and t.numel() > 0)
            if resized:
                resizes.append((a.position, sizes, strides))
            if not self.trace.cell(t).written:
                continue
            value = self.trace.memory(t)
            if view.is_dense(sizes, strides) and (resized or t.numel() * t.itemsize == a.storage):
                plan_outputs[a.slot] = view.to_memory_order(value, sizes, strides)
                continue
            if resized:
                blank = hlo.constant(0, t.dtype, (view.span(sizes, strides),))
                plan_outputs[a.slot] = view.write_view(blank, sizes, strides, 0, value)
                continue
            base = plan_outputs.get(a.slot)
            base = self._base(a) if base is None else base
            plan_outputs[a.slot] = view.write_view(base, sizes, strides, self._offset(a, base), value, a.fits)
        return resizes


def build(name: str, arguments: list[Argument], *, precision: str, emulate_precision: bool) -> Plan:
    """Traces one call of the operator ``name``.

    Args:
        name: Dispatcher name, e.g. ``aten::add.Tensor``.
        arguments: One entry per schema argument.
        precision: ``medium``, ``high`` or ``highest``.
        emulate_precision: See :class:`Tracer`.

    Raises:
        NotImplementedError: The operator has neither rule nor decomposition.
        Exception: Whatever PyTorch's meta kernel raises for bad arguments, unchanged.
    """
    op = resolve(name)
    info = op_info(op)
    trace = Tracer(precision, emulate_precision)
    call = Call(trace)
    with trace.active():
        values = [call.argument(a) for a in arguments]
        schema = op._schema.arguments
        args = [v for v, a in zip(values, schema, strict=True) if not a.kwarg_only]
        kwargs = {a.name: v for v, a in zip(values, schema, strict=True) if a.kwarg_only}
        return finish(name, trace, call, _returned(info, trace.call(op, args, kwargs)))


def _returned(info: OpInfo, outs: Any) -> list[tuple[Any, bool]]:
    """What an operator gave, one entry per schema return, and whether it may alias an argument."""
    returns = info.op._schema.returns
    outs = outs if len(returns) > 1 else (outs,) if returns else ()  # one return of type Tensor[] is one list
    return [(out, r.alias_info is not None) for out, r in zip(outs, returns, strict=True)]


def _natural(storage: int, base: Value, returned: list[tuple[Any, bool]]) -> tuple[int, ...]:
    """The shape of an output that several results may share, as who knows only the results would predict it."""
    for t, _ in returned:
        if isinstance(t, torch.Tensor) and t.untyped_storage()._cdata == storage and t.dtype == base.dtype:
            natural = view.natural_base(t.shape, t.stride(), base.numel)
            if natural is not None:
                return natural
    return (base.numel,)


def finish(name: str, trace: Tracer, call: Call, returned: list[tuple[Any, bool]], as_predicted: bool = False) -> Plan:
    """The plan of a trace that is complete.

    Args:
        name: Of the operator or graph.
        trace: What was traced.
        call: The arguments it was traced with.
        returned: What the call returns: tensors, integers, None or lists of them, and whether they may alias arguments.
        as_predicted: Outputs get the shape that is expected of the inputs of a graph that is compiled ahead.
    """
    written: dict[int, Value] = {}
    resizes = call.write_back(written)
    outputs = [Output(slot, value.type) for slot, value in written.items()]
    values = list(written.values())
    fresh: dict[int, int] = {}  # storage -> output
    keep: list[torch.Tensor] = []
    owners: dict[int, tuple[int, torch.Tensor]] = {}  # storage -> the argument that has it, and its position
    for a, argument in call.tensors.values():
        owners.setdefault(argument.untyped_storage()._cdata, (a.position, argument))

    def result(t: torch.Tensor | int | None, aliases: bool) -> Result | int | None:
        if t is None or isinstance(t, int):
            return t
        window = (t.dtype, tuple(t.shape), tuple(t.stride()), int(t.storage_offset()))
        storage = t.untyped_storage()._cdata
        owner = owners.get(storage)
        if owner is not None and aliases:
            return Result(-1, owner[0], owner[1] is t, *window)
        if not aliases and (owner is not None or t.is_conj() or t.is_neg()):
            # The decomposition returned a view, of an argument or a lazy one, where the schema promises a fresh tensor.
            fresh_copy = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
            trace.bind(fresh_copy, trace.read(t))
            keep.append(fresh_copy)
            return result(fresh_copy, False)
        if storage not in fresh:
            fresh[storage] = len(values)
            base = trace.base(t)
            if as_predicted:
                base = hlo.reshape(base, _natural(storage, base, returned))
            outputs.append(Output(-1, base.type))
            values.append(base)
        return Result(fresh[storage], -1, False, *window)

    results = [
        [result(t, aliases) for t in out] if isinstance(out, list | tuple) else result(out, aliases)
        for out, aliases in returned
    ]
    if trace.faults:
        flag = trace.operand("flag", 0, (), torch.int32)
        code = trace.operand("code", 0, (), torch.int32)
        raised = hlo.constant(0, torch.int32)
        for i, bad in reversed([*enumerate(trace.faults.values())]):
            raised = hlo.select(bad, code + i if i else code, raised)
        values.append(hlo.select(hlo.compare(flag, 0, "NE"), flag, raised))
        outputs.append(Output(-2, values[-1].type))
    operands = [Operand(*key) for key in trace.operands]
    work = trace.function.work
    brief = work.largest <= BRIEF_ELEMENTS and not work.loops
    # XLA's CPU client waits for an input that it runs a small program in place of.
    donations = [] if brief else _donations(operands, outputs, trace)
    for operand, output in donations:
        trace.function.argument_attributes[operand] = f"tf.aliasing_output = {output} : i32"
    function = trace.function
    return Plan(
        name,
        function.module_text(values),
        operands,
        outputs,
        results,
        resizes,
        donations,
        trace.rng_used,
        trace.uses_precision,
        brief=brief,
        faults=list(trace.faults),
        largest_operand=max((v.numel for v in function.arguments), default=0),
        work=work,
    )


def _donations(operands: list[Operand], outputs: list[Output], trace: Tracer) -> list[tuple[int, int]]:
    """Written storages give their old base to the result that replaces it, where the types agree."""
    if trace.rng_used and trace.emulate_precision:  # XLA's CPU backend makes slow code of random fills that overwrite
        return []
    place = {output.slot: (j, output.type) for j, output in enumerate(outputs) if output.slot != -1}
    pairs = []
    for i, operand in enumerate(operands):
        slot = operand.index if operand.kind == "base" else -2 if operand.kind == "flag" else -1
        if slot in place and trace.function.arguments[i].type == place[slot][1]:
            pairs.append((i, place[slot][0]))
    return pairs
