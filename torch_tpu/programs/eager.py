"""The eager kernel's Python half: called on a program miss, with the call described as plain tuples."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from torch_tpu import _C, platform
from torch_tpu.bounded import changes
from torch_tpu.lowering.data_dependent import HOST_COMPOSITES
from torch_tpu.lowering.random import CHECKED
from torch_tpu.programs import disk, errors, fallback, fused, options, stats
from torch_tpu.stablehlo import Type
from torch_tpu.tracing.program import HostScalar, NumberArgument, NumbersArgument, Plan, Result, TensorArgument, build
from torch_tpu.tracing.schema import op_info, registry_name, resolve

PRECISIONS = ("medium", "high", "highest")

# c10/core/ScalarType.h, AT_FORALL_SCALAR_TYPES_WITH_COMPLEX_AND_QINTS, in order.
_ORDER = (
    "uint8 int8 int16 int32 int64 float16 float32 float64 complex32 complex64 complex128 bool qint8 quint8 qint32 "
    "bfloat16 quint4x2 quint2x4 bits1x8 bits2x4 bits4x2 bits8 bits16 float8_e5m2 float8_e4m3fn float8_e5m2fnuz "
    "float8_e4m3fnuz "
    "uint16 uint32 uint64 uint1 uint2 uint3 uint4 uint5 uint6 uint7 int1 int2 int3 int4 int5 int6 int7 float8_e8m0fnu "
    "float4_e2m1fn_x2"
).split()
DTYPE_OF_CODE: dict[int, torch.dtype] = {i: getattr(torch, n) for i, n in enumerate(_ORDER) if hasattr(torch, n)}
CODE_OF_DTYPE = {dtype: code for code, dtype in DTYPE_OF_CODE.items()}
_MEMORY_FORMATS = {
    0: torch.contiguous_format,
    1: torch.preserve_format,
    2: torch.channels_last,
    3: torch.channels_last_3d,
}


# What PyTorch lets write to a tensor whose elements share memory (``x.expand(...)``): the order of writes does not
# matter.
_IDEMPOTENT = ("fill_", "zero_", "masked_fill_", "index_fill_")


class OperatorSpec(NamedTuple):
    """What the kernel must know of an operator before its first call; C++ reads it by these names.

    Attributes:
        static: Scalar and float arguments that are part of the program.
        run_time_integers: Integer arguments that are not.
        all_static: All numbers are part of the program: there is no rule, and decompositions see numbers.
        checks_numbers: The operator refuses some numbers, or has another form for them.
        allows_overlap: It may write a tensor whose elements share memory.
        elementwise: It refuses operands that partly overlap a written tensor.
        composite: It is a Python function that runs outside of any program.
    """

    static: tuple[str, ...] = ()
    run_time_integers: tuple[str, ...] = ()
    all_static: bool = False
    checks_numbers: bool = False
    allows_overlap: bool = False
    elementwise: bool = False
    composite: bool = False


def operator_spec(name: str) -> OperatorSpec:
    """The spec of a dispatcher name."""
    overload = name.removeprefix("aten::")
    if overload in HOST_COMPOSITES or fallback.allowed(name):
        return OperatorSpec(all_static=True, composite=True)
    info = op_info(resolve(name))
    overlap = overload.partition(".")[0] in _IDEMPOTENT
    if (rule := info.rule) is None:
        return OperatorSpec(all_static=True, allows_overlap=overlap)
    return OperatorSpec(
        static=tuple(rule.static),
        run_time_integers=tuple(rule.runtime),
        checks_numbers=rule.classes or registry_name(info.functional or info.op) in CHECKED,
        allows_overlap=overlap,
        elementwise=rule.promote is not None and not overlap,
    )


def composite(name: str) -> Callable[..., Any]:
    """The Python function of an operator that runs outside of any program.

    Its result sizes depend on data, or the user wants it on the host.
    """
    return fallback.function(name) if fallback.allowed(name) else HOST_COMPOSITES[name.removeprefix("aten::")]


@functools.cache
def _argument_types(name: str) -> tuple[str, ...]:
    return tuple(str(a.real_type) for a in resolve(name)._schema.arguments)


def describe(item: Any, kind: str = "") -> Any:
    """A C++ description as the NamedTuples of :mod:`torch_tpu.tracing.program`."""
    if isinstance(item, tuple):
        tag, *rest = item
        if tag == "tensor":
            position, slot, dtype, sizes, strides, offset, fits, storage, base, *lazy_bits = rest
            base = None if base is None else Type(base[1], DTYPE_OF_CODE[base[0]])
            return TensorArgument(
                position, slot, DTYPE_OF_CODE[dtype], sizes, strides, offset, fits, storage, base, *lazy_bits
            )
        if tag == "host":
            index, dtype, wrapped, value = rest
            return HostScalar(index, DTYPE_OF_CODE[dtype], wrapped, value)
        if tag == "number":
            return NumberArgument(*rest)
        if tag == "numbers":
            return NumbersArgument(*rest)
        return torch.device(rest[0])
    if isinstance(item, list):
        return [describe(x) for x in item]
    if isinstance(item, int) and "ScalarType" in kind:
        return DTYPE_OF_CODE[item]
    if isinstance(item, int) and "MemoryFormat" in kind:
        return _MEMORY_FORMATS[item]
    if isinstance(item, int) and "Layout" in kind:
        return torch.strided
    return item


def _with_kinds(description: list[Any]) -> list[Any]:
    """The description with the classes of numbers that C++ put into the key, in words."""
    out: list[Any] = []
    last: Any = None
    for item in description:
        if isinstance(item, NumberArgument):
            x = 0.0 if isinstance(item.value, complex) else item.value
            is_so = {"negative": x < 0, "0": x == 0, "below 1": x < 1, "1": x == 1, "above 1": x > 1}
            size = next((word for word, so in is_so.items() if so), "NaN")
            order = "" if last is None else ", more" if last < x else ", as much" if last == x else ", not more"
            last, item = x, item._replace(kind=size + order)
        out.append(item)
    return out


_keeps_plans = False  # Fused mode has been used: programs carry what they are made of


def compile_call(name: str, arguments: list[Any], precision: int, record: bool, exact: bool) -> Any:
    """The program for one call of operator ``name``: from the disk cache, or traced and compiled.

    With ``record`` it is not compiled: Fused mode makes it a part of other programs. Unless it is to be ``exact``, it
    may be one that is padded, for all sizes of a range (:mod:`torch_tpu.bounded.eager`).
    """
    global _keeps_plans
    _keeps_plans |= record
    described = [describe(a, kind) for a, kind in zip(arguments, _argument_types(name), strict=True)]
    if operator_spec(name).checks_numbers:
        described = _with_kinds(described)
    level = PRECISIONS[precision]
    if not exact and (opened := changes.opened(name, described)) is not None:
        from torch_tpu.bounded import eager as bounded  # sympy and what else graphs need: only when sizes change

        if (program := bounded.find(name, *opened, level, record, _program)) is not None:
            return program
    why = stats.reason(name, described)
    start = time.perf_counter()
    key = disk.key_of(name, described, level)
    entry = disk.load(key, executable=not record)
    if entry is not None and (record or entry[1] is not None):
        plan, executable = entry
        if not record:
            stats.record(name, "disk", 0.0, time.perf_counter() - start, why)
        return _program(key, plan, executable)
    known = None if entry is None else entry[0]

    def build_and_compile() -> tuple[Plan, float, Any]:
        emulate = platform.emulates_precision()
        plan = known or build(name, described, precision=level, emulate_precision=emulate)
        return plan, time.perf_counter(), None if record else options.compile(plan)

    plan, traced, executable = errors.checked(name, described, build_and_compile)
    compiled = time.perf_counter()
    disk.store(key, plan, executable)
    if record:
        stats.record_trace(traced - start)
    else:
        stats.record(name, "compiled", traced - start, compiled - traced, why)
    return _program(key, plan, executable)


def compile_plan(described: bytes) -> Any:
    """The executable of a program that had only been recorded; ``described`` is what :func:`_program` gave to C++."""
    key, plan = described[:_KEY].decode(), disk.unpack_plan(described[_KEY:])
    start = time.perf_counter()
    entry = disk.load(key)
    why = "recorded before, and now run on its own"
    if entry is not None and entry[1] is not None:
        stats.record(plan.name, "disk", 0.0, time.perf_counter() - start, why)
        return entry[1]
    executable = options.compile(plan)
    stats.record(plan.name, "compiled", 0.0, time.perf_counter() - start, why)
    disk.store(key, plan, executable)
    return executable


def _result(item: Any) -> Any:
    if item is None or isinstance(item, int):
        return item
    if isinstance(item, list):
        return [_result(x) for x in item]
    assert isinstance(item, Result)
    kind = "output" if item.output >= 0 else "argument" if item.same else "window"
    index = item.output if item.output >= 0 else item.position
    return kind, index, CODE_OF_DTYPE[item.dtype], list(item.sizes), list(item.strides), item.offset


_KEY = 64  # characters of a disk cache key


def make_program(plan: Plan, executable: Any) -> Any:
    """The C++ program of a graph's plan and its executable."""
    return _program("", plan, executable)


def _program(key: str, plan: Plan, executable: Any) -> Any:
    return _C._make_program(
        executable,
        plan.name,
        [(o.kind, o.index, CODE_OF_DTYPE[o.dtype]) for o in plan.operands],
        [(o.slot, CODE_OF_DTYPE[o.type.dtype], list(o.type.shape)) for o in plan.outputs],
        [_result(r) for r in plan.results],
        [(p, list(s), list(t)) for p, s, t in plan.resizes],
        plan.donations,
        plan.rng_used,
        plan.uses_precision,
        plan.brief,
        plan.faults,
        key.encode() + disk.pack_plan(plan) if _keeps_plans else b"",
        fused.user_line() if executable is None else "",
    )
