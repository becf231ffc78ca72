"""What is published of the chips, per device as PyTorch sees it. Each figure has its source."""

from __future__ import annotations

from typing import NamedTuple

_DOCS = "https://cloud.google.com/tpu/docs/"


class Chip(NamedTuple):
    """One generation.

    Attributes:
        flops: Peak of the matrix units of a chip, 1/s, by element type.
        hbm: Bytes of memory of a chip.
        bandwidth: Of that memory, bytes/s.
        ici: Of all links of a chip together, in one direction, bytes/s.
        devices: How many devices a chip is.
        matrix: Rows and columns of a matrix unit.
        units: Matrix units of a device.
        source: Where the figures are published.
    """

    flops: dict[str, float]
    hbm: int
    bandwidth: float
    ici: float
    devices: int
    matrix: int
    units: int
    source: str

    @property
    def clock(self) -> float:
        """Cycles/s: where the matrix units reach the published peak, with a product and a sum per cell and cycle.

        That is 1.05, 1.5, 1.75, 1.75 and 2.2 GHz for the five generations. The compiler's own cycles of a product of
        8192 in each dimension then take 1.1 to 1.4 times what the peak allows, and never less.
        """
        return self.flops["bf16"] / self.devices / (2 * self.units * self.matrix**2)


_GIB = 1 << 30

CHIPS = {
    "v4": Chip(
        {"bf16": 275e12, "s8": 275e12}, 32 * _GIB, 1228e9, 300e9 / 2, 2, 128, 4, _DOCS + "v4",
    ),
    "v5e": Chip(
        {"bf16": 197e12, "s8": 393e12}, 16 * _GIB, 819e9, 200e9 / 2, 1, 128, 4, _DOCS + "v5e",
    ),
    "v5p": Chip(
        {"bf16": 459e12, "s8": 918e12}, 95 * _GIB, 2765e9, 600e9 / 2, 1, 128, 8, _DOCS + "v5p",
    ),
    "v6e": Chip(
        {"bf16": 918e12, "s8": 1836e12, "f8": 918e12}, 32 * _GIB, 1638e9, 400e9 / 2, 1, 256, 4, _DOCS + "v6e",
    ),
    "tpu7x": Chip(
        {"bf16": 2307e12, "f8": 4614e12, "s8": 2307e12}, 192 * _GIB, 7380e9, 1200e9 / 2, 2, 256, 4,
        _DOCS + "tpu7x",
    ),
}  # fmt: skip


def peak(chip: Chip, dtype: str) -> float:
    """Peak of one device for products of an element type as StableHLO spells it, 1/s."""
    kind = "f8" if dtype.startswith("f8") else "s8" if dtype in ("i8", "ui8") else "bf16"
    return chip.flops.get(kind, chip.flops["bf16"]) / chip.devices
