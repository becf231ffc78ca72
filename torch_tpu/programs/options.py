"""XLA options per program. Two tiers on the CPU plugin: cheap compiles for small single operators, full ones for the rest."""

from __future__ import annotations

from torch_tpu import platform
from torch_tpu.tracing.program import Plan

Flags = dict[str, bool | int | float | str]

#: Elements up to which a single operator is compiled cheaply: its run time is launch overhead anyway.
CHEAP_ELEMENTS = 1 << 16
#: Program arguments up to which cheap compiles are quicker: without fusion emitters every result is a kernel to compile.
CHEAP_ARGUMENTS = 24


def flags(plan: Plan) -> Flags:
    """The XLA flags for one eager program."""
    if platform.name() == "tpu":
        return {}
    # Fast min and max drop NaN.
    full: Flags = {"xla_cpu_enable_fast_min_max": False}
    small = all(_numel(o.type.shape) <= CHEAP_ELEMENTS for o in plan.outputs) and plan.largest_operand <= CHEAP_ELEMENTS
    if small and len(plan.operands) <= CHEAP_ARGUMENTS:
        return {**full, "xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}
    return full


def _numel(shape: tuple[int, ...]) -> int:
    n = 1
    for d in shape:
        n *= d
    return n
