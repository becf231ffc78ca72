"""What a program costs on a chip: lower bounds from arithmetic and memory, and the compiler's own cycles.

Three times, none of which is measured:

``bound``: no execution can be faster. The larger of two: the products' arithmetic at the published peak of the matrix
units, with the passes that float32 takes (one at ``medium``, three at ``high``, six at ``highest``), and the bytes that
have to cross the memory's interface, which are the arguments and the results, once.

``compiled``: as this executable does it: the larger of that arithmetic and of the bytes that its operations read and
write in HBM, one operation after the other, at full bandwidth.

``cycles``: what libtpu's cost model expects (``estimated_cycles`` in the optimised program), over the clock. Loops
count as often as they run where the compiler knows that; of a conditional's branches the longest counts. The model is
about the cores: of a program that waits for memory it may be below the bound, and then the bound is the better guess.

Assumptions: operations do not overlap, except that copies which the compiler started early (``copy-start``) cost
nothing of their own; element-wise arithmetic costs no more than its memory traffic; memory runs at full bandwidth.
XLA's ``optimal_seconds`` is kept beside them, where it is positive: it ignores passes and collectives.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch_tpu.aot import hlo
from torch_tpu.aot.chips import Chip, peak
from torch_tpu.tracing.program import Plan

#: Passes of the matrix unit over float32 operands.
PASSES = {"DEFAULT": 1, "HIGH": 3, "HIGHEST": 6}

_SKIPPED = frozenset(
    "parameter constant tuple get-tuple-element bitcast after-all copy-start copy-done partition-id replica-id".split()
)


@dataclass
class Product:
    """A matrix product or convolution of the traced program.

    Attributes:
        flops: Multiplications and additions.
        passes: How often the matrix unit goes over the operands.
        dtype: The operands' element type, as StableHLO spells it.
        shapes: Of the operands and the result.
        line: Where it comes from.
        contracted: Sizes of the summed dimensions.
    """

    flops: float
    passes: int
    dtype: str
    shapes: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
    line: str
    contracted: tuple[int, ...]


@dataclass
class Operation:
    """One operation of the optimised program, all of its runs together."""

    name: str
    opcode: str
    shape: str
    origin: str
    seconds: float
    cycles: int
    bytes: int
    padded: int  # bytes of the result with the padding of its layout
    runs: int


@dataclass
class Cost:
    """Of one call, on one device.

    Attributes:
        flops: Of the products, as the mathematics has them.
        work: The same with the passes of float32.
        transcendentals: Of element-wise functions, as XLA counts.
        traffic: Bytes of arguments and results.
        accessed: Bytes that the operations of the executable read and write in HBM.
        bound: Seconds; see the module's text for this and the next two.
        compiled: Seconds.
        cycles: Seconds of the compiler's cycles.
        optimal: XLA's ``optimal_seconds``, None if it is not positive.
        binds: ``matrix unit`` or ``memory``: which of the two sets the bound.
        products: The products.
        operations: Of the optimised program, the longest first.
    """

    flops: float
    work: float
    transcendentals: float
    traffic: int
    accessed: int
    bound: float
    compiled: float
    cycles: float
    optimal: float | None
    binds: str
    products: list[Product]
    operations: list[Operation]

    @property
    def intensity(self) -> float:
        """FLOPs per byte that has to move."""
        return self.flops / max(self.traffic, 1)

    def utilisation(self, chip: Chip) -> float:
        """Model FLOPs utilisation in the time of the compiler's cycles, or the bound: FLOPs over bfloat16's peak."""
        return self.flops / max(self.cycles, self.bound) / peak(chip, "bf16") if self.cycles else 0.0


_TENSOR = re.compile(r"tensor<((?:\d+x)*)([a-z]\w*)>")
_DOT = re.compile(r'"?stablehlo\.(dot_general|convolution)"?\(')


def products(plan: Plan) -> list[Product]:
    """The products of a traced program, in order; those in loops count once."""
    found = []
    for line in plan.text.splitlines():
        match = _DOT.search(line)
        if match is None:
            continue
        types = _TENSOR.findall(line[line.rindex(" : (") :])
        if len(types) < 3:
            continue
        shapes = [tuple(int(n) for n in dims.split("x") if n) for dims, _ in types[:3]]
        element = types[0][1]
        precision = re.findall(r"precision (\w+)>", line) or ["DEFAULT"]
        passes = max(PASSES.get(p, 1) for p in precision) if element == "f32" else 1
        contracted = _contracted(match[1], line, shapes)
        flops = 2.0
        for n in (*shapes[2], *contracted):
            flops *= n
        found.append(Product(flops, passes, element, (shapes[0], shapes[1], shapes[2]), _location(line), contracted))
    return found


def _contracted(kind: str, line: str, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    if kind == "dot_general":
        dims = re.search(r"lhs_contracting_dimensions = \[([\d, ]*)\]", line)
        return tuple(shapes[0][int(d)] for d in dims[1].split(",") if d.strip()) if dims else ()
    # The kernel has what a result element sums over, and its own output features: dim_numbers [..]x[..o..]->[..].
    labels = re.search(r"x\[([^\]]*)\]->", line)
    names = [n.strip() for n in labels[1].split(",")] if labels else []
    return tuple(n for n, name in zip(shapes[1], names, strict=False) if name != "o")


def _location(line: str) -> str:
    at = line.rfind(" loc(")
    if at < 0:
        return ""
    names = re.findall(r'"((?:[^"\\]|\\.)*)"', line[at:])
    place = re.search(r'":(\d+):\d+\)', line[at:])
    return f"{names[0]} ({names[1]}:{place[1]})" if len(names) > 1 and place else (names[0] if names else "")


def analyse(module: hlo.Module, plan: Plan, chip: Chip, xla: dict[str, float], traffic: int) -> Cost:
    """The cost of a program.

    Args:
        module: The optimised program.
        plan: The traced one.
        chip: What it is for.
        xla: XLA's own analysis.
        traffic: Bytes of arguments and results.
    """
    found = products(plan)
    flops = sum(p.flops for p in found)
    work = sum(p.flops * p.passes for p in found)
    arithmetic = sum(p.flops * p.passes / peak(chip, p.dtype) for p in found)
    bandwidth = chip.bandwidth / chip.devices
    done = operations(module, chip)
    memory = traffic / bandwidth
    optimal = xla.get("optimal_seconds", 0.0)
    return Cost(
        flops=flops,
        work=work,
        transcendentals=xla.get("transcendentals", 0.0),
        traffic=traffic,
        accessed=sum(o.bytes for o in done),
        bound=max(arithmetic, memory),
        compiled=max(arithmetic, sum(o.seconds for o in done)),
        cycles=sum(o.cycles for o in done) / chip.clock,
        optimal=optimal if optimal > 0 else None,
        binds="matrix unit" if arithmetic >= memory else "memory",
        products=found,
        operations=done,
    )


def operations(module: hlo.Module, chip: Chip) -> list[Operation]:
    """What the optimised program does, the longest first."""
    return sorted(_operations(module, module.entry, 1, chip), key=lambda o: (-o.cycles, -o.bytes, o.name))


def _operations(module: hlo.Module, computation: int, runs: int, chip: Chip) -> Iterator[Operation]:
    instructions = module.computations[computation]
    by_id = {i.id: i for i in instructions}
    for made in instructions:
        if made.opcode in _SKIPPED:
            continue
        if made.opcode == "while":
            trips = made.number("n") or 1
            for called in made.called:
                yield from _operations(module, called, runs * trips, chip)
            continue
        if made.opcode == "conditional":
            branches = [[*_operations(module, called, runs, chip)] for called in made.called]
            yield from max(branches, key=lambda b: sum(o.cycles for o in b), default=[])
            continue
        if made.opcode in ("call", "async-start"):
            for called in made.called:
                yield from _operations(module, called, runs, chip)
            continue
        operands = [by_id[i].shape for i in made.operands if i in by_id]
        moved = made.shape.bytes(hbm_only=True) + sum(s.bytes(hbm_only=True) for s in operands)
        where = f" ({made.file}:{made.line})" if made.file and made.line else ""
        yield Operation(
            name=made.name,
            opcode=made.opcode if made.opcode != "custom-call" else f"custom-call {made.target}",
            shape=str(made.shape),
            origin=made.op_name + where,
            seconds=runs * moved / (chip.bandwidth / chip.devices),
            cycles=runs * (made.number("estimated_cycles") or 0),
            bytes=runs * moved,
            padded=made.shape.padded_bytes(),
            runs=runs,
        )
