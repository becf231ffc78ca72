"""What a compile ahead of time found out: as text, as JSON, and as one HTML page."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch_tpu.aot.chips import Chip, peak
from torch_tpu.aot.cost import Cost
from torch_tpu.aot.ici import Collective
from torch_tpu.aot.topology import Topology
from torch_tpu.aot.trace import Traced
from torch_tpu.cli.cache import size
from torch_tpu.distributed.partition import Partition

#: Of the JSON form; a new number says that a field has gone or changed its meaning.
SCHEMA = 1
_HEAVIEST = 12


@dataclass
class Memory:
    """Bytes on a device: of code, arguments, results, results in the memory of arguments, and temporaries.

    ``peak`` is the most that the compiler has in use at a time, ``capacity`` what the device has.
    """

    code: int
    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    peak: int
    capacity: int

    @property
    def needed(self) -> int:
        """What the program needs to run."""
        return self.code + self.arguments + self.outputs - self.aliased + self.temporaries

    @property
    def fits(self) -> bool:
        """Whether the device has that."""
        return self.needed <= self.capacity


@dataclass
class Estimate:
    """A program on one topology."""

    topology: Topology
    chip: Chip
    memory: Memory
    cost: Cost
    findings: list[str]
    compile_seconds: float
    price_per_call: float | None
    executable: Any = field(repr=False)
    mesh: Partition | None = None
    collectives: list[Collective] = field(default_factory=list)

    @property
    def communication(self) -> float:
        """Seconds of the collectives, see :mod:`torch_tpu.aot.ici`."""
        return sum(c.seconds for c in self.collectives)

    @property
    def seconds(self) -> tuple[float, float]:
        """Between what and what the time of a call lies: all communication hidden behind computation, or none."""
        alone = max(self.cost.cycles, self.cost.bound)
        return max(alone, self.communication), alone + self.communication


@dataclass
class Report:
    """A function, compiled for one or more topologies."""

    traced: Traced
    estimates: list[Estimate]

    # ---- text
    def __str__(self) -> str:
        title = self._title()
        rows = [("", *(e.topology.name for e in self.estimates))]
        rows += [(label, *(show(e) for e in self.estimates)) for label, show in _ROWS if _any(show, self.estimates)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = [title, ""]
        lines += [
            "  ".join(
                cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]
        for e in self.estimates:
            if e.collectives:
                lines += ["", f"Collectives on {e.topology.name}:"]
                lines += [f"  {' '.join(cells)}" for cells in _collective_cells(e)]
            lines += ["", f"Heaviest operations on {e.topology.name}:"]
            lines += [f"  {share:>5}  {time:>9}  {name}" for share, time, name in _heaviest(e)]
            lines += [f"  - {sentence}" for sentence in e.findings]
        return "\n".join(lines)

    def _title(self) -> str:
        mesh = self.traced.mesh
        where = "one device" if mesh is None else "each of " + " x ".join(f"{n} {k}" for n, k in mesh.sizes.items())
        return f"{self.traced.name}, {self.traced.precision} precision, {where}"

    # ---- JSON
    def to_dict(self) -> dict[str, Any]:
        """The report as plain data; docs/aot.md says what the fields are."""
        return {
            "schema": SCHEMA,
            "name": self.traced.name,
            "precision": self.traced.precision,
            "inputs": [
                {"name": i.name, "kind": i.kind, "dtype": str(i.type.dtype).removeprefix("torch."),
                 "shape": list(i.type.shape), "written": i.is_written}
                for i in self.traced.inputs
            ],
            "estimates": [_plain(e) for e in self.estimates],
        }  # fmt: skip

    # ---- HTML
    def to_html(self) -> str:
        """One page that needs nothing else: the table, a roofline plot, bars of the memory, the heaviest operations."""
        head = "".join(f"<th>{html.escape(e.topology.name)}</th>" for e in self.estimates)
        body = "".join(
            f"<tr><td>{label}</td>" + "".join(f"<td>{html.escape(show(e))}</td>" for e in self.estimates) + "</tr>"
            for label, show in _ROWS
            if _any(show, self.estimates)
        )
        parts = [f"<h1>{html.escape(self.traced.name)}</h1><p>{html.escape(self._title())}</p>"]
        parts.append(f"<table><tr><th></th>{head}</tr>{body}</table>")
        parts.append("<h2>Roofline</h2>" + _roofline(self.estimates))
        for e in self.estimates:
            parts.append(f"<h2>{html.escape(e.topology.name)}</h2>" + _memory_bar(e.memory))
            rows = "".join(
                f"<tr><td>{share}</td><td>{time}</td><td>{html.escape(name)}</td></tr>"
                for share, time, name in _heaviest(e)
            )
            parts.append(f"<table>{rows}</table>")
            if e.collectives:
                cells = ["".join(f"<td>{c}</td>" for c in row) for row in _collective_cells(e)]
                rows = "".join(f"<tr>{row}</tr>" for row in cells)
                parts.append(f"<table>{rows}</table>")
            if e.findings:
                parts.append("<ul>" + "".join(f"<li>{html.escape(f)}</li>" for f in e.findings) + "</ul>")
        return _PAGE.format(title=html.escape(self.traced.name), body="\n".join(parts))


def seconds_text(s: float) -> str:
    """A time in s, ms or us."""
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if s * scale >= 1 or unit == "us":
            return f"{s * scale:.2f} {unit}"
    raise AssertionError


def _count(n: float) -> str:
    for unit in ("", "K", "M", "G", "T", "P"):
        if abs(n) < 1000 or unit == "P":
            return f"{n:.3g} {unit}".rstrip()
        n /= 1000
    raise AssertionError


def _price(e: Estimate) -> str:
    return "" if e.price_per_call is None else f"{e.price_per_call:.3g}"


_ROWS = [
    ("fits", lambda e: "yes" if e.memory.fits else f"no: {e.memory.needed / e.memory.capacity:.2f} of the device"),
    ("memory needed", lambda e: f"{size(e.memory.needed)} of {size(e.memory.capacity)}"),
    ("  arguments", lambda e: size(e.memory.arguments)),
    ("  results", lambda e: size(e.memory.outputs)),
    ("  in the memory of arguments", lambda e: size(e.memory.aliased)),
    ("  temporaries", lambda e: size(e.memory.temporaries)),
    ("  code", lambda e: size(e.memory.code)),
    ("lower bound of the time", lambda e: seconds_text(e.cost.bound)),
    ("  set by the", lambda e: e.cost.binds),
    ("as compiled, at full rates", lambda e: seconds_text(e.cost.compiled)),
    ("the compiler's cycles", lambda e: seconds_text(e.cost.cycles)),
    ("communication", lambda e: seconds_text(e.communication) if e.collectives else ""),
    ("time of a call", lambda e: " to ".join(map(seconds_text, e.seconds)) if e.collectives else ""),
    ("XLA's optimal_seconds", lambda e: "" if e.cost.optimal is None else seconds_text(e.cost.optimal)),
    ("FLOPs", lambda e: _count(e.cost.flops)),
    ("  with float32's passes", lambda e: _count(e.cost.work) if e.cost.work != e.cost.flops else ""),
    ("bytes that have to move", lambda e: size(e.cost.traffic)),
    ("bytes that do move", lambda e: size(e.cost.accessed)),
    ("FLOPs per byte", lambda e: f"{e.cost.intensity:.0f}"),
    ("model FLOPs utilisation", lambda e: f"{e.cost.utilisation(e.chip):.0%}"),
    ("cost of a call", _price),
    ("compiled in", lambda e: seconds_text(e.compile_seconds)),
]  # fmt: skip


def _any(show: Any, estimates: Sequence[Estimate]) -> bool:
    return any(show(e) for e in estimates)


def _heaviest(e: Estimate) -> list[tuple[str, str, str]]:
    total = max(sum(o.cycles for o in e.cost.operations), 1)
    rows = []
    for o in e.cost.operations[:_HEAVIEST]:
        if not o.cycles:
            break
        times = f" x{o.runs}" if o.runs > 1 else ""
        rows.append(
            (
                f"{o.cycles / total:.0%}",
                seconds_text(o.cycles / e.chip.clock),
                f"{o.opcode} {o.shape}{times}  {o.origin}",
            )
        )
    return rows


def _collective_cells(e: Estimate) -> list[tuple[str, ...]]:
    return [
        (
            f"{c.kind:<15}",
            f"{c.dimension:<5}",
            f"of {c.group} chips",
            f"x{c.count}",
            size(c.bytes),
            seconds_text(c.seconds),
        )
        for c in e.collectives
    ]


def _plain(e: Estimate) -> dict[str, Any]:
    m, c = e.memory, e.cost
    return {
        "topology": e.topology.name,
        "fits": m.fits,
        "memory": {**vars(m), "needed": m.needed},
        "seconds": {"bound": c.bound, "compiled": c.compiled, "cycles": c.cycles, "optimal_seconds": c.optimal},
        "binds": c.binds,
        "flops": c.flops,
        "flops_with_passes": c.work,
        "transcendentals": c.transcendentals,
        "bytes": {"least": c.traffic, "accessed": c.accessed},
        "intensity": c.intensity,
        "utilisation": c.utilisation(e.chip),
        "price_per_call": e.price_per_call,
        "compile_seconds": e.compile_seconds,
        "findings": e.findings,
        "operations": [
            {"name": o.name, "opcode": o.opcode, "shape": o.shape, "origin": o.origin, "cycles": o.cycles,
             "bytes": o.bytes, "runs": o.runs}
            for o in c.operations[:100]
        ],
        "mesh": None if e.mesh is None else dict(e.mesh.sizes),
        "collectives": [vars(c) for c in e.collectives],
        "seconds_per_call": list(e.seconds),
        "chip": {"source": e.chip.source, "peak": peak(e.chip, "bf16"), "bandwidth": e.chip.bandwidth / e.chip.devices},
    }  # fmt: skip


# ---- pictures -------------------------------------------------------------------------------------------------------
_COLOURS = ("#1a73e8", "#d93025", "#188038", "#f29900", "#9334e6")
_WIDTH, _HEIGHT, _MARGIN = 640, 360, 56


def _roofline(estimates: Sequence[Estimate]) -> str:
    """Attainable FLOP/s over FLOPs per byte, both logarithmic, a roof per chip and a point per program."""
    low, high = 0.1, 1e5
    top = max(peak(e.chip, "bf16") for e in estimates) * 2
    bottom = top / 1e5

    def x(value: float) -> float:
        at = (math.log10(min(max(value, low), high)) - math.log10(low)) / (math.log10(high) - math.log10(low))
        return _MARGIN + at * (_WIDTH - 2 * _MARGIN)

    def y(value: float) -> float:
        at = (math.log10(min(max(value, bottom), top)) - math.log10(bottom)) / (math.log10(top) - math.log10(bottom))
        return _HEIGHT - _MARGIN - at * (_HEIGHT - 2 * _MARGIN)

    drawn = []
    for power in range(-1, 6):
        drawn.append(
            f'<text x="{x(10.0**power):.0f}" y="{_HEIGHT - _MARGIN + 18}" text-anchor="middle">{10.0**power:g}</text>'
        )
    for k, e in enumerate(estimates):
        colour = _COLOURS[k % len(_COLOURS)]
        limit, bandwidth = peak(e.chip, "bf16"), e.chip.bandwidth / e.chip.devices
        ridge = limit / bandwidth
        points = f"{x(low):.0f},{y(low * bandwidth):.0f} {x(ridge):.0f},{y(limit):.0f} {x(high):.0f},{y(limit):.0f}"
        drawn.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        done = e.cost.flops / max(e.cost.cycles, e.cost.bound, 1e-12)
        at = e.cost.flops / max(e.cost.accessed, 1)
        drawn.append(f'<circle cx="{x(at):.0f}" cy="{y(done):.0f}" r="5" fill="{colour}"/>')
        drawn.append(
            f'<text x="{_WIDTH - _MARGIN + 4}" y="{y(limit) + 4 + 14 * k:.0f}" fill="{colour}">{e.topology.name}</text>'
        )
    return (
        f'<svg viewBox="0 0 {_WIDTH + 60} {_HEIGHT}" role="img"><g font-size="12">{"".join(drawn)}'
        f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 12}" text-anchor="middle">FLOPs per byte moved; lines: what the chip '
        f"allows, points: the compiler's cycles</text></g></svg>"
    )


def _memory_bar(m: Memory) -> str:
    parts = [
        ("arguments", m.arguments), ("results", m.outputs - m.aliased), ("temporaries", m.temporaries),
        ("code", m.code),
    ]  # fmt: skip
    scale = (_WIDTH - 20) / max(m.capacity, m.needed, 1)
    at, drawn, words = 10.0, [], []
    for (name, count), colour in zip(parts, _COLOURS, strict=False):
        width = max(count, 0) * scale
        drawn.append(f'<rect x="{at:.1f}" y="8" width="{width:.1f}" height="24" fill="{colour}"/>')
        words.append(f'<span style="color:{colour}">{name} {size(max(count, 0))}</span>')
        at += width
    drawn.append(
        f'<line x1="{10 + m.capacity * scale:.1f}" x2="{10 + m.capacity * scale:.1f}" y1="2" y2="38" stroke="#000"/>'
    )
    return (
        f'<svg viewBox="0 0 {_WIDTH} 40" role="img"><rect x="10" y="8" width="{m.capacity * scale:.1f}" height="24" '
        f'fill="#eee"/>{"".join(drawn)}</svg><p>{", ".join(words)}, of {size(m.capacity)}</p>'
    )


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }}
table {{ border-collapse: collapse; }} td, th {{ padding: 0.2rem 0.8rem; text-align: right; }}
tr {{ border-bottom: 1px solid #ddd; }}
td:first-child, td:last-child {{ text-align: left; }} svg {{ max-width: 44rem; width: 100%; }}
</style></head><body>
{body}
</body></html>
"""
