"""``_foreach_*``: a single-tensor operator, repeated over lists inside one program.

Nothing here says what an operator means. Each functional overload of the family is paired with the single-tensor
overload that takes an element where it takes a list, and that operator's own rule is applied to each element. A list of
Scalars is one packed operand, so new numbers are not a new program.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch._ops import OpOverload

from torch_tpu.lowering.common import tracer
from torch_tpu.lowering.registry import lower
from torch_tpu.stablehlo import Type, Value
from torch_tpu.tracing.schema import op_info, registry_name

#: Single-tensor operators of another name.
_SINGLE: dict[str, tuple[str, ...]] = {
    "maximum": ("maximum", "clamp_min"),
    "minimum": ("minimum", "clamp_max"),
    "norm": (),  # its rule is in reduction.py
}
_ELEMENT = {"List[Tensor]": "Tensor", "List[number]": "number"}
_NUMBERS = ("number", "List[number]", "Optional[number]")


def _single_overload(name: str, types: list[str]) -> OpOverload | None:
    """The overload of ``name`` whose first arguments have ``types`` and whose other arguments have defaults."""
    packet = getattr(torch.ops.aten, name, None)
    for overload in [] if packet is None else packet.overloads():
        arguments = getattr(packet, overload)._schema.arguments
        have = [str(a.type) for a in arguments]
        rest = arguments[len(types) :]
        if have[: len(types)] == types and all(a.has_default_value() and not a.is_out for a in rest):
            return getattr(packet, overload)
    return None


def _single(op: OpOverload) -> OpOverload | None:
    """The single-tensor operator that ``op`` repeats."""
    types = [_ELEMENT.get(str(a.type), str(a.type)) for a in op._schema.arguments]
    name = op._schema.name.removeprefix("aten::_foreach_")
    found = (_single_overload(n, types) for n in _SINGLE.get(name, (name,)))
    return next((s for s in found if s is not None), None)


def _functional_overloads() -> Iterator[OpOverload]:
    names = {s.name for s in torch._C._jit_get_all_schemas() if s.name.startswith("aten::_foreach_")}
    for name in sorted(names):
        packet = getattr(torch.ops.aten, name.removeprefix("aten::"))
        for overload in packet.overloads():
            op = getattr(packet, overload)
            if not any(a.alias_info is not None and a.alias_info.is_write for a in op._schema.arguments):
                yield op


def _static(op: OpOverload, single: OpOverload) -> tuple[str, ...]:
    """The numbers of ``op`` that are static in ``single``; all of them if ``single`` has no rule.

    Lists of numbers have no classes in the key: they are static too where the rule asks for these.
    """
    rule = op_info(single).rule
    pairs = zip(op._schema.arguments, single._schema.arguments, strict=False)
    return tuple(
        a.name
        for a, b in pairs
        if str(a.type) in _NUMBERS
        and (rule is None or b.name in rule.static or (rule.classes and str(a.type) == "List[number]"))
    )


def _repeat(op: OpOverload, single: OpOverload) -> None:
    is_list = [str(a.type) in _ELEMENT for a in op._schema.arguments]
    one = op_info(single).rule
    described = None if one is None else one.meta

    def meta(*arguments: Any) -> list[Any]:
        assert described is not None
        count = len(next(a for a, several in zip(arguments, is_list, strict=False) if several))
        items = (a if several else [a] * count for a, several in zip(arguments, is_list, strict=False))
        return [described(*item) for item in zip(*items, strict=True)]

    @lower(
        registry_name(op),
        static=_static(op, single),
        classes=one is not None and one.classes,
        meta=None if described is None else meta,
    )
    def rule(*arguments: Any, alpha: Any = None, memory_format: Any = None, result: list[Type]) -> list[Value]:
        if alpha is not None:
            arguments = (*arguments, alpha)
        trace = tracer()
        return [
            trace.apply(single, [a[i] if several else a for a, several in zip(arguments, is_list, strict=False)], kind)
            for i, kind in enumerate(result)
        ]


def _register() -> None:
    for op in _functional_overloads():
        if (single := _single(op)) is not None:
            _repeat(op, single)


_register()
