"""What one program that runs on many devices knows of the others: how many there are, and who talks to whom."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class Partition:
    """A mesh of devices, and the groups of its dimensions.

    Attributes:
        sizes: The mesh's dimensions by name, the outermost first.
        devices: Device numbers in the mesh's shape, flattened row-major; default: 0, 1, 2, ...
    """

    sizes: Mapping[str, int]
    devices: Sequence[int] = field(default=())

    @property
    def count(self) -> int:
        """How many devices there are."""
        return math.prod(self.sizes.values())

    def groups(self, name: str) -> list[list[int]]:
        """The device numbers of each group of a dimension, or of several joined by ``+``; in the order of the mesh.

        Raises:
            ValueError: The mesh has no such dimension.
        """
        wanted = name.split("+")
        names = [*self.sizes]
        if missing := [n for n in wanted if n not in names]:
            raise ValueError(f"The mesh has no dimension {', '.join(missing)}; it has {', '.join(names)}.")
        devices = torch.tensor(self.devices) if self.devices else torch.arange(self.count)
        axes = [i for i, n in enumerate(names) if n not in wanted] + [i for i, n in enumerate(names) if n in wanted]
        group = math.prod(self.sizes[n] for n in wanted)
        return devices.reshape([*self.sizes.values()]).permute(axes).reshape(-1, group).tolist()

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Functional collectives that are traced meanwhile are in the program; their groups are named as dimensions."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)


_current: ContextVar[Partition | None] = ContextVar("torch_tpu.partition", default=None)


def current() -> Partition | None:
    """The partition that programs are traced for; None: they run on one device."""
    return _current.get()
