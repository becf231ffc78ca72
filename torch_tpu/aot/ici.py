"""What collectives cost on the links between chips: a bound from published bandwidths.

A group that has whole axes of the slice moves its bytes on the rings of those axes, in both directions: the bandwidth
of a chip for it is the chip's total (``Chip.ici``, one direction) times the part of the slice's axes that it spans. A
ring of ``g`` chips sends ``(g - 1) / g`` of the whole array through each chip for an all-gather or reduce-scatter, and
twice that for an all-reduce (Patarasuk and Yuan 2009, doi:10.1016/j.jpdc.2008.09.002); an all-to-all sends ``g / 8`` of
the chip's array through each link of a ring of more than four chips.

Assumptions: axes are rings (a slice has the wrap-around links where an axis has a multiple of four chips, so smaller
ones take up to twice as long); no two collectives share links; nothing overlaps with computation, which libtpu does
try to do: the step's time lies between the larger of computation and communication and their sum.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from torch_tpu.aot.chips import Chip
from torch_tpu.aot.topology import Topology
from torch_tpu.distributed.partition import Partition

_KIND = re.compile(r'"stablehlo\.(all_reduce|all_gather|reduce_scatter|all_to_all)"')
_BYTES = {"f64": 8, "i64": 8, "f32": 4, "i32": 4, "bf16": 2, "f16": 2, "i16": 2}


@dataclass
class Collective:
    """Collectives of one kind, mesh dimension and size, all together.

    Attributes:
        kind: ``all_gather`` and so on.
        dimension: The mesh's.
        group: How many chips take part in each.
        count: How many there are in a call.
        bytes: Of the whole array (all-gather: of the result; else of the operand), all of them together.
        seconds: All of them together.
    """

    kind: str
    dimension: str
    group: int
    count: int
    bytes: int
    seconds: float


def collectives(text: str, mesh: Partition, place: Topology, chip: Chip) -> list[Collective]:
    """The collectives of a traced program, those that take longest first.

    Args:
        text: Its StableHLO.
        mesh: The devices that run it.
        place: The slice.
        chip: Its chips.
    """
    by_group = {str(mesh.groups(name)[0]): name for name in mesh.sizes}
    found: dict[tuple[str, str], Collective] = {}
    waiting = ""  # a reduction's types stand after its region
    for line in text.splitlines():
        if match := _KIND.search(line):
            kind, waiting = match[1], match[1] if "({" in line.replace(" ", "") and ") -> (" not in line else ""
            if kind in ("all_reduce", "reduce_scatter"):
                waiting = kind
                continue
        elif not (waiting and "replica_groups" in line):
            continue
        else:
            kind, waiting = waiting, ""
        first = re.search(r"dense<\[(\[[^\]]*\])", line)
        dimension = by_group.get(first[1] if first else "", "?")
        group = mesh.sizes.get(dimension, 1)
        types = re.findall(r"tensor<((?:\d+x)*)(\w+)>", line[line.rindex(" : (") :])
        size = max(_size(dims, element) for dims, element in types)
        seconds = _seconds(kind, size, group, _bandwidth(dimension, mesh, place, chip))
        entry = found.setdefault((kind, dimension), Collective(kind, dimension, group, 0, 0, 0.0))
        entry.count += 1
        entry.bytes += size
        entry.seconds += seconds
    return sorted(found.values(), key=lambda c: -c.seconds)


def _size(dims: str, element: str) -> int:
    count = 1
    for n in dims.split("x"):
        count *= int(n) if n else 1
    return count * _BYTES.get(element, 1)


def _bandwidth(dimension: str, mesh: Partition, place: Topology, chip: Chip) -> float:
    """Bytes/s that a chip can send to others of its group."""
    axes = [n for n in place.shape if n > 1]
    groups = mesh.groups(dimension) if dimension in mesh.sizes else [[0]]
    spanned = _axes_spanned(groups[0], place.shape)
    return chip.ici / chip.devices * max(spanned, 1) / max(len(axes), 1)


def _axes_spanned(devices: Sequence[int], shape: Sequence[int]) -> int:
    """Along how many axes of the slice the devices of a group differ; numbers count the first axis fastest."""
    coordinates = []
    for d in devices:
        place = []
        for n in shape:
            place.append(d % n)
            d //= n
        coordinates.append(place)
    return sum(len({c[i] for c in coordinates}) > 1 for i in range(len(shape)))


def _seconds(kind: str, size: int, group: int, bandwidth: float) -> float:
    if group < 2:
        return 0.0
    ring = size * (group - 1) / group / bandwidth
    if kind == "all_reduce":
        return 2 * ring
    if kind == "all_to_all":
        return max(ring, size * group / 8 / bandwidth)
    return ring
