"""Compiling for TPUs that are not here."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torch_tpu import _C, __version__
from torch_tpu.aot import hlo, topology
from torch_tpu.aot.chips import CHIPS
from torch_tpu.aot.cost import analyse
from torch_tpu.aot.findings import findings
from torch_tpu.aot.ici import collectives
from torch_tpu.aot.layout import mesh_on
from torch_tpu.aot.report import Estimate, Memory, Report
from torch_tpu.aot.trace import Traced, trace
from torch_tpu.programs import options
from torch_tpu.tracing.graph import CompileError

_FORMAT = 1
_STATISTICS = ("code", "arguments", "outputs", "aliased", "temporaries", "peak")


def compile(
    function: Callable[..., Any] | nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    topology: str | Sequence[str] = "v6e",
    precision: str = "medium",
    mesh: Mapping[str, int] | None = None,
    prices: Mapping[str, float] | None = None,
    compiler_options: Mapping[str, bool | int | float | str] | None = None,
) -> Report:
    """Compiles a function for TPUs with libtpu, without a TPU, and says what it costs there.

    Args:
        function: A function or a module; a training step is a function that changes parameters where they are
            (:func:`training_step` makes one).
        args: Its arguments, modules among them. Of tensors only dtype, sizes and strides count: with
            ``torch.device("meta")`` a model of any size needs no memory.
        kwargs: Its keyword arguments.
        topology: A name, or several, as :func:`torch_tpu.aot.topology.parse` takes them. Without ``mesh`` the program
            is for one device.
        precision: Of float32 products: ``medium``, ``high`` or ``highest``.
        mesh: Sizes of the dimensions ``dp``, ``fsdp`` and ``tp`` over all devices of the slice: the function is that of
            one device, and functional collectives name dimensions. :func:`sharded_step` makes such functions.
        prices: Per chip and hour, by generation (``{"v6e": 2.7}``): then the report has the cost of each call.
        compiler_options: XLA's, by name.

    Returns:
        The report; its estimates hold the executables.

    Raises:
        ValueError: An unknown topology or precision.
        RuntimeError: libtpu is missing or in use.
        CompileError: An operator cannot be compiled; the text has the operator and the line first.
        MemoryError: The compiler ran out of this machine's memory.
    """
    names = [topology] if isinstance(topology, str) else [*topology]
    slices = [_parse(name) for name in names]
    if mesh is None:
        traced = trace(function, args, kwargs, precision)
        return Report(traced, [_estimate(traced, s, prices or {}, compiler_options or {}) for s in slices])
    meshes = [mesh_on(s, mesh) for s in slices]  # groups of device numbers differ from slice to slice
    traces = [trace(function, args, kwargs, precision, m) for m in meshes]
    found = [_estimate(t, s, prices or {}, compiler_options or {}) for t, s in zip(traces, slices, strict=True)]
    return Report(traces[0], found)


_parse = topology.parse


def _estimate(
    traced: Traced, place: topology.Topology, prices: Mapping[str, float], compiler_options: Mapping[str, Any]
) -> Estimate:
    compiler = topology.describe(place)
    chip = CHIPS[place.generation]
    start = time.perf_counter()
    with _progress(f"{traced.name} for {place.name}"):
        try:
            count = traced.mesh.count if traced.mesh is not None else 1
            flags = {**options.full_flags(), **compiler_options}
            compiled = compiler.compile(traced.plan.text, flags, 1, count)
        except _C.PjrtError as error:
            raise _explained(traced, place, error) from error
    seconds = time.perf_counter() - start
    stats = compiled.memory_stats()
    memory = Memory(**{name: int(stats[name]) for name in _STATISTICS}, capacity=chip.hbm // chip.devices)
    traffic = memory.arguments + memory.outputs
    cost = analyse(hlo.read(compiled.optimized_program()), traced.plan, chip, compiled.cost_analysis(), traffic)
    price = prices.get(place.generation)
    return Estimate(
        topology=place,
        chip=chip,
        memory=memory,
        cost=cost,
        findings=findings(traced, cost, chip),
        compile_seconds=seconds,
        price_per_call=None if price is None else price / 3600 / chip.devices * max(cost.cycles, cost.bound),
        executable=compiled,
        mesh=traced.mesh,
        collectives=[] if traced.mesh is None else collectives(traced.plan.text, traced.mesh, place, chip),
    )


def _explained(traced: Traced, place: topology.Topology, error: Exception) -> Exception:
    """The compiler's refusal, with the operator and the line first."""
    text = str(error)
    if "RESOURCE_EXHAUSTED" in text and "HBM" not in text and "vmem" not in text.lower():
        return MemoryError(f"This machine's memory does not suffice to compile {traced.name} for {place.name}: {text}")
    if "hbm" in text.lower() and ("exceeds" in text or "exhausted" in text.lower()):
        return CompileError(f"{traced.name} does not fit on {place.name}. libtpu says: {text}")
    where = _origin(traced, text)
    return CompileError(f"{where or traced.name} cannot be compiled for {place.name}. libtpu says: {text}")


def _origin(traced: Traced, text: str) -> str:
    """The operator and line of what an error names: a location, or an operation by its position in the text."""
    if named := re.search(r'loc\("?([^")]+)"?\("?([^")]+)"?:(\d+)', text):
        return f"{named[1]} ({named[2]}:{named[3]})"
    if at := re.search(r"-:(\d+):\d+", text):
        lines = traced.plan.text.splitlines()
        number = int(at[1]) - 1
        if number < len(lines) and (
            found := re.search(r'loc\("((?:[^"\\]|\\.)*)"(?:\("((?:[^"\\]|\\.)*)":(\d+)', lines[number])
        ):
            return f"{found[1]} ({found[2]}:{found[3]})"
    return ""


@contextlib.contextmanager
def _progress(what: str) -> Iterator[None]:
    """A line on a terminal with the time that a compile has taken so far, once that is two seconds."""
    if not sys.stderr.isatty():
        yield
        return
    done = threading.Event()
    start = time.monotonic()

    def show() -> None:
        if done.wait(2):
            return
        while not done.wait(1):
            print(
                f"\r\033[Ktorch_tpu: compiling {what}, {time.monotonic() - start:.0f} s",
                end="",
                file=sys.stderr,
                flush=True,
            )
        print("\r\033[K", end="", file=sys.stderr, flush=True)

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


# ---- programs as files ----------------------------------------------------------------------------------------------
def save(report: Report, path: str | Path) -> None:
    """Writes the executables of a report, each with its calling convention, for :func:`load`.

    Args:
        report: From :func:`compile`.
        path: The file, a zip archive.
    """
    entries = []
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for k, estimate in enumerate(report.estimates):
            data = estimate.executable.serialize()
            archive.writestr(f"{k}.bin", data)
            entries.append(
                {
                    "topology": estimate.topology.name,
                    "file": f"{k}.bin",
                    "sha256": hashlib.sha256(data).hexdigest(),
                    "libtpu": topology.describe(estimate.topology).platform_version,
                }
            )
        plan = report.traced.plan
        manifest = {
            "format": _FORMAT,
            "torch_tpu": __version__,
            "torch": torch.__version__,
            "name": report.traced.name,
            "precision": report.traced.precision,
            "inputs": [
                {
                    "name": i.name,
                    "kind": i.kind,
                    "dtype": _dtype(i.type.dtype),
                    "shape": list(i.type.shape),
                    "written": i.is_written,
                }
                for i in report.traced.inputs
            ],
            "operands": [
                {"input": o.index, "dtype": _dtype(o.dtype)}
                if o.kind == "base"
                else {"kind": o.kind, "dtype": _dtype(o.dtype)}
                for o in plan.operands
            ],
            "outputs": [
                {"writes": o.slot if o.slot >= 0 else None, "dtype": _dtype(o.type.dtype), "shape": list(o.type.shape)}
                for o in plan.outputs
            ],
            "donated": [list(pair) for pair in plan.donations],
            "executables": entries,
        }
        archive.writestr("manifest.json", json.dumps(manifest, indent=1))


def _dtype(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


class Saved:
    """A file of :func:`save`: a calling convention, and executables by topology.

    Attributes:
        manifest: Inputs, operands, outputs, and what the executables were compiled for.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            with zipfile.ZipFile(self.path) as archive:
                self.manifest: dict[str, Any] = json.loads(archive.read("manifest.json"))
        except (zipfile.BadZipFile, KeyError, json.JSONDecodeError) as error:
            raise ValueError(f"{self.path} is no file of torch_tpu.aot.save: {error}.") from None
        if self.manifest.get("format") != _FORMAT:
            raise ValueError(f"{self.path} has format {self.manifest.get('format')}, and this version reads {_FORMAT}.")

    @property
    def topologies(self) -> list[str]:
        """What there are executables for."""
        return [e["topology"] for e in self.manifest["executables"]]

    def executable(self, place: str, version: str | None = None) -> bytes:
        """The serialised executable for a topology.

        Args:
            place: The topology's name.
            version: libtpu's version where it is to run; default: the installed one's.

        Raises:
            ValueError: There is none for that topology, or it is damaged.
            RuntimeError: It was compiled by another libtpu.
        """
        wanted = topology.parse(place)
        entry = next((e for e in self.manifest["executables"] if e["topology"] == wanted.name), None)
        if entry is None:
            raise ValueError(f"{self.path} has no executable for {wanted.name}, only for {', '.join(self.topologies)}.")
        found = version if version is not None else topology.describe(wanted).platform_version
        if entry["libtpu"] != found:
            raise RuntimeError(
                f"The executable for {wanted.name} was compiled by another libtpu and has to be compiled again.\n"
                f"compiled by: {_first(entry['libtpu'])}\nthis one is: {_first(found)}"
            )
        with zipfile.ZipFile(self.path) as archive:
            data = archive.read(entry["file"])
        if hashlib.sha256(data).hexdigest() != entry["sha256"]:
            raise ValueError(f"The executable for {wanted.name} in {self.path} is damaged.")
        return data


def _first(version: str) -> str:
    return " ".join(version.split())


def load(path: str | Path) -> Saved:
    """Opens a file of :func:`save`.

    Raises:
        FileNotFoundError: There is none.
        ValueError: It is something else, or of another format.
    """
    return Saved(path)
