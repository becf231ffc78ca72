"""Names of TPU slices, and libtpu's compiler for them, on a machine that has none."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch_tpu import _C, platform

#: Slices by their number of chips. Source: the "Configurations" tables of
#: https://cloud.google.com/tpu/docs/v5e, .../v6e, .../v4, .../v5p and .../tpu7x.
_FLAT = {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
_SOLID = {
    1: "1x1x1", 4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4", 128: "4x4x8", 256: "4x8x8",
    512: "8x8x8", 1024: "8x8x16", 2048: "8x16x16", 4096: "16x16x16", 6144: "16x16x24", 8960: "16x20x28",
}  # fmt: skip


class _Generation(NamedTuple):
    aliases: tuple[str, ...]
    slices: dict[int, str]
    cores: int  # by which the numbers in Google's names count, per chip


_GENERATIONS = {
    "v4": _Generation((), _SOLID, 2),
    "v5e": _Generation(("v5litepod", "v5lite"), _FLAT, 1),
    "v5p": _Generation((), _SOLID, 2),
    "v6e": _Generation(("trillium",), _FLAT, 1),
    "tpu7x": _Generation(("v7x", "ironwood"), _SOLID, 2),
}


class Topology(NamedTuple):
    """A slice: libtpu's name of it, its generation, and how its chips are arranged."""

    name: str
    generation: str
    shape: tuple[int, ...]

    @property
    def chips(self) -> int:
        """How many chips the slice has."""
        return math.prod(self.shape)


def parse(name: str) -> Topology:
    """The slice of a name.

    Args:
        name: ``v6e``, one chip; ``v6e-8``, ``v5litepod-16`` or ``v5p-8``, Google's names, whose numbers count chips,
            and TensorCores (two a chip) for v4, v5p and tpu7x; ``v5p:2x2x1``, an arrangement of chips.

    Raises:
        ValueError: There is no such slice; the text lists those that there are.
    """
    match = re.fullmatch(r"([a-z0-9]+?)(?:-(\d+)|:(\d+(?:x\d+)*))?", name.strip().lower())
    generation = _generation(match[1]) if match else None
    if match is None or generation is None:
        raise ValueError(
            f"{name!r} is no TPU topology: give a generation ({', '.join(_GENERATIONS)}), with a number as in 'v6e-8', "
            f"or with an arrangement of chips as in 'v5p:2x2x1'."
        )
    known = _GENERATIONS[generation]
    if match[3]:
        text = match[3]
    else:
        cores = 1 if match[2] is None else int(match[2])
        per_chip = known.cores if match[2] is not None else 1
        text = known.slices.get(cores // per_chip, "") if cores % per_chip == 0 else ""
        if not text:
            sizes = ", ".join(f"{generation}-{n * known.cores}" for n in known.slices)
            raise ValueError(f"There is no slice {name!r}; those of {generation} are {sizes}.")
    return Topology(f"{generation}:{text}", generation, tuple(map(int, text.split("x"))))


def _generation(word: str) -> str | None:
    return next((g for g, known in _GENERATIONS.items() if word == g or word in known.aliases), None)


def libtpu() -> str:
    """The path of libtpu.

    Raises:
        RuntimeError: It is not installed.
    """
    try:
        return platform.plugin_path("tpu")
    except RuntimeError as error:
        if "TPU_LIBRARY_PATH" in str(error):
            raise
        raise RuntimeError(
            "Compiling ahead of time needs the package libtpu, which is not installed: run `pip install "
            "'torch_tpu[tpu]'`. It needs no TPU."
        ) from None


@contextlib.contextmanager
def _shared() -> Iterator[None]:
    """Lets several processes load libtpu: without chips there is nothing that they could take from each other.

    Processes that are started later do not inherit that.
    """
    name = "ALLOW_MULTIPLE_LIBTPU_LOAD"
    if platform.has_tpu() or name in os.environ:
        yield
        return
    os.environ[name] = "1"
    try:
        yield
    finally:
        os.environ.pop(name, None)


@functools.cache
def describe(topology: Topology) -> Any:
    """The compiler of libtpu for a slice.

    Raises:
        RuntimeError: libtpu is missing, or another process keeps it.
        ValueError: libtpu knows no such slice.
    """
    path = libtpu()
    platform.prepare_libtpu()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
    try:
        with _shared():
            return _C.PjrtTopology(path, topology.name)
    except _C.PjrtError as error:
        text = str(error)
        if "lockfile" in text or "already in use" in text:
            raise RuntimeError(
                f"Another process uses libtpu, which may be used by one at a time: end it, or set "
                f"ALLOW_MULTIPLE_LIBTPU_LOAD=1. libtpu says: {text}"
            ) from None
        shapes = ", ".join(
            f"{topology.generation}:{shape}" for shape in _GENERATIONS[topology.generation].slices.values()
        )
        raise ValueError(f"libtpu knows no slice {topology.name!r}; usual ones are {shapes}. It says: {text}") from None
