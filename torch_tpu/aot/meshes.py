"""Which way to lay a training step over a slice: several meshes, compiled and ranked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from torch_tpu.aot import topology
from torch_tpu.aot.compile import compile
from torch_tpu.aot.layout import sharded_step
from torch_tpu.aot.report import Estimate, seconds_text
from torch_tpu.cli.cache import size

#: Chips of ``tp`` that are tried: more than a host's ring seldom pays.
_TENSOR = (1, 2, 4, 8)


@dataclass
class Candidate:
    """A mesh, and what became of it: an estimate, or why there is none."""

    mesh: dict[str, int]
    estimate: Estimate | None
    problem: str = ""

    def _order(self) -> tuple[int, float]:
        if self.estimate is None:
            return 2, 0.0
        return (0 if self.estimate.memory.fits else 1), sum(self.estimate.seconds) / self.batch

    #: Samples that the whole slice takes in a call, as a multiple of a chip's batch.
    @property
    def batch(self) -> int:
        return self.mesh.get("dp", 1) * self.mesh.get("fsdp", 1)


def usual_meshes(chips: int, tensor: bool) -> list[dict[str, int]]:
    """Meshes worth trying: all sharded, or replicas of at most 256 sharded chips, with and without ``tp``."""
    found: list[dict[str, int]] = []
    for tp in _TENSOR if tensor else (1,):
        if chips % tp:
            continue
        rest = chips // tp
        for fsdp in {rest, 256 // tp if rest > 256 // tp and rest % (256 // tp) == 0 else rest}:
            found.append({"dp": rest // fsdp, "fsdp": fsdp, "tp": tp})
    return found


def compare_meshes(
    module: nn.Module,
    loss: Callable[..., Tensor],
    batch: Sequence[Any],
    *,
    topology: str,
    plan: Mapping[str, str] | None = None,
    meshes: Sequence[Mapping[str, int]] | None = None,
    **options: Any,
) -> list[Candidate]:
    """Compiles a training step for each mesh, the best first: those that fit, by time for each sample.

    Args:
        module: The model, whole, on the ``meta`` device.
        loss: Called with the module and a chip's batch; returns a scalar.
        batch: What a chip gets.
        topology: The slice.
        plan: Which linear layers are ``colwise`` and which ``rowwise``; without one no mesh has ``tp``.
        meshes: Sizes of ``dp``, ``fsdp`` and ``tp``; default: :func:`usual_meshes`.
        options: Of :func:`torch_tpu.aot.compile`.

    Raises:
        ValueError: There is no such slice, or a mesh that was given does not fit it.
    """
    chips = _parse(topology).chips
    found = []
    for mesh in meshes if meshes is not None else usual_meshes(chips, plan is not None):
        try:
            step, state = sharded_step(module, loss, mesh, plan)
        except ValueError as problem:
            if meshes is not None:
                raise
            found.append(Candidate(dict(mesh), None, str(problem)))
            continue
        report = compile(step, (*state, *batch), topology=topology, mesh=mesh, **options)
        found.append(Candidate(dict(mesh), report.estimates[0]))
    return sorted(found, key=Candidate._order)


_parse = topology.parse


def table(candidates: Sequence[Candidate]) -> str:
    """The candidates as lines of text."""
    rows = [("mesh", "fits", "memory", "computation", "communication", "time of a call", "batch")]
    for c in candidates:
        name = " x ".join(f"{n} {k}" for n, k in c.mesh.items() if k > 1) or "one chip"
        if c.estimate is None:
            rows.append((name, c.problem, "", "", "", "", ""))
            continue
        e, (least, most) = c.estimate, c.estimate.seconds
        alone = seconds_text(max(e.cost.cycles, e.cost.bound))
        rows.append(
            (name, "yes" if e.memory.fits else "no", size(e.memory.needed), alone, seconds_text(e.communication),
             f"{seconds_text(least)} to {seconds_text(most)}", f"x{c.batch}")
        )  # fmt: skip
    widths = [max(len(r[i]) for r in rows if r[2] or r is rows[0]) for i in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)
