"""What an operator's schema says: what it writes, what it returns, which functional overload it stands for."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload

from torch_tpu.lowering.registry import Rule, lookup


class Input(NamedTuple):
    """An argument that is read: what rules need of it, without a trip into the schema."""

    name: str
    kwarg_only: bool
    default_value: Any


@dataclass(frozen=True)
class OpInfo:
    """An overload, read once.

    Attributes:
        written: Names of the arguments that the schema says are written, in order.
        functional: The overload without mutation that computes the same values, or None.
        rule: The rule of ``functional``, or of the overload itself.
        is_view: The results are windows on an argument and nothing is written.
        out: Names of the ``out=`` arguments.
        inputs: The schema's arguments without those.
        promotable: The inputs that take part in promotion unless the rule names them: positional tensors and Scalars.
    """

    op: OpOverload
    name: str
    written: tuple[str, ...]
    functional: OpOverload | None
    rule: Rule | None
    is_view: bool
    out: frozenset[str]
    inputs: tuple[Input, ...]
    promotable: tuple[str, ...]


def registry_name(op: OpOverload) -> str:
    """``add.Tensor``, ``relu``, ``tpu::foo``: the name under which rules are registered."""
    namespace, name = op._schema.name.split("::")
    full = name if op._overloadname == "default" else f"{name}.{op._overloadname}"
    return full if namespace == "aten" else f"{namespace}::{full}"


def _writes(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _plain(arguments: Any) -> list[tuple[str, str]]:
    return [(a.name, str(a.type)) for a in arguments if not a.is_out]


def _functional_of(op: OpOverload) -> OpOverload | None:
    schema = op._schema
    if not any(_writes(a) for a in schema.arguments):
        return op
    namespace, name = schema.name.split("::")
    candidates = [name]
    if name.endswith("_"):
        candidates += [name[:-1], name[:-1] + "_functional", name + "functional"]
    want = _plain(schema.arguments)
    for candidate in candidates:
        packet = getattr(getattr(torch.ops, namespace), candidate, None)
        if packet is None:
            continue
        for overload in packet.overloads():
            other = getattr(packet, overload)
            if any(_writes(a) for a in other._schema.arguments):
                continue
            have = _plain(other._schema.arguments)
            if [t for _, t in have] == [t for _, t in want] or have == [p for p in want if p in have] == want:
                return other
    return None


_PROMOTABLE = ("Tensor", "Optional[Tensor]", "number", "Optional[number]")


@functools.cache
def op_info(op: OpOverload) -> OpInfo:
    schema = op._schema
    written = tuple(a.name for a in schema.arguments if _writes(a))
    functional = _functional_of(op)
    rule = lookup(registry_name(op))
    if rule is None and functional is not None:
        rule = lookup(registry_name(functional))
    aliases = any(r.alias_info is not None for r in schema.returns)
    composite = op.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)
    return OpInfo(
        op=op,
        name=f"{schema.name}" + ("" if op._overloadname == "default" else f".{op._overloadname}"),
        written=written,
        functional=functional,
        rule=rule,
        is_view=aliases and not written and not composite,  # reshape, contiguous, to, ... may copy
        out=frozenset(a.name for a in schema.arguments if a.is_out),
        inputs=tuple(Input(a.name, a.kwarg_only, a.default_value) for a in schema.arguments if not a.is_out),
        promotable=tuple(a.name for a in schema.arguments if not a.kwarg_only and str(a.type) in _PROMOTABLE),
    )


def resolve(name: str) -> OpOverload:
    """The overload of a dispatcher name such as ``aten::add.Tensor``."""
    namespace, rest = name.split("::")
    base, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), base), overload or "default")
