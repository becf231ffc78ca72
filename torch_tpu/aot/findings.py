"""What holds a program back, in words, with what to do about it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator

from torch_tpu.aot.chips import Chip
from torch_tpu.aot.cost import Cost
from torch_tpu.aot.trace import Traced

_LEAST_SHARE = 0.02  # of the compiler's cycles, from which an operation is worth a word


def findings(traced: Traced, cost: Cost, chip: Chip) -> list[str]:
    """Sentences, the weightiest kinds first; none if nothing stands out."""
    checks: list[Callable[[Traced, Cost, Chip], Iterator[str]]] = [
        _passes, _emulated, _narrow, _padding, _layouts, _gathers, _convolutions,
    ]  # fmt: skip
    return [sentence for check in checks for sentence in check(traced, cost, chip)]


def _passes(traced: Traced, cost: Cost, chip: Chip) -> Iterator[str]:
    slow = [p for p in cost.products if p.passes > 1]
    if slow:
        share = sum(p.flops * p.passes for p in slow) / max(cost.work, 1)
        passes = max(p.passes for p in slow)
        yield (
            f"{len(slow)} products of float32 take {passes} passes of the matrix unit each ({share:.0%} of its work): "
            f"bfloat16 operands (autocast), or a lower precision (torch.set_float32_matmul_precision), take one."
        )


def _emulated(traced: Traced, cost: Cost, chip: Chip) -> Iterator[str]:
    used = Counter(re.findall(r"-> \(?tensor<(?:\d+x)*(f64|i64|complex<f64>)>", traced.plan.text))
    for kind, what in (("f64", "float64"), ("i64", "int64"), ("complex<f64>", "complex128")):
        if used[kind] > (16 if kind == "i64" else 0):
            yield (
                f"{used[kind]} operations work on {what}, which the chip computes in software: "
                + ("int32 is enough for indices below two billion." if kind == "i64" else "float32 is native.")
            )


def _narrow(traced: Traced, cost: Cost, chip: Chip) -> Iterator[str]:
    """Attention whose head dimension does not fill the matrix unit."""
    narrow = Counter(
        p.contracted[0]
        for p in cost.products
        if len(p.shapes[0]) >= 3 and len(p.contracted) == 1 and p.contracted[0] in (16, 32, 64, 80, 96)
    )
    for size, count in narrow.items():
        if size < chip.matrix:
            yield (
                f"{count} batched products sum over {size} elements (a head dimension of {size}?), and the matrix unit "
                f"has {chip.matrix} rows: {size / chip.matrix:.0%} of it works. Head dimensions of 128 or 256 fill it."
            )


def _padding(traced: Traced, cost: Cost, chip: Chip) -> Iterator[str]:
    wasteful: dict[str, float] = {}
    for p in cost.products:
        for shape in p.shapes:
            if len(shape) < 2 or shape[-1] * shape[-2] < 4096:
                continue
            rows, columns = -(-shape[-2] // 8) * 8, -(-shape[-1] // 128) * 128
            waste = rows * columns / (shape[-2] * shape[-1])
            if waste >= 1.25:
                wasteful["x".join(map(str, shape))] = waste
    if wasteful:
        worst = sorted(wasteful.items(), key=lambda item: -item[1])[:3]
        listed = ", ".join(f"{shape} ({waste:.2f}x)" for shape, waste in worst)
        yield (
            f"{len(wasteful)} shapes of products pad badly to the chip's tiles of 8 by 128: {listed}. Last dimensions "
            f"that are multiples of 128 waste nothing."
        )


def _layouts(traced: Traced, cost: Cost, chip: Chip) -> Iterator[str]:
    moves = [o for o in cost.operations if o.opcode in ("copy", "transpose")]
    moved, total = sum(o.bytes for o in moves), max(cost.accessed, 1)
    if moved > 0.05 * total:
        named = next((o.origin for o in moves if o.origin), "")
        yield (
            f"{len(moves)} copies and transposes change layouts, {moved / total:.0%} of the bytes that are moved"
            + (f"; the largest comes from {named}." if named else ".")
        )


def _gathers(traced: Traced, cost: Cost, chip: Chip) -> Iterator[str]:
    cycles = max(sum(o.cycles for o in cost.operations), 1)
    for o in cost.operations:
        if o.opcode in ("gather", "scatter", "sort", "dynamic-slice") and o.cycles > _LEAST_SHARE * cycles:
            yield f"{o.opcode} {o.name} from {o.origin or 'the program'} takes {o.cycles / cycles:.0%} of the cycles."


def _convolutions(traced: Traced, cost: Cost, chip: Chip) -> Iterator[str]:
    if cost.bound > 0 and cost.cycles > 4 * cost.bound:
        yield f"The compiler expects {cost.cycles / cost.bound:.1f} times the bound: look at the heaviest operations."
