"""Reads an optimised HLO module: ``HloModuleProtoWithConfig`` of ``xla/service/hlo.proto``, as far as costs need it.

A protocol buffer is a sequence of (field number, wire type, value); the numbers below are those of the files
``hlo.proto`` and ``xla_data.proto`` of OpenXLA, where a field never changes its number.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

#: ``xla_data.proto``: PrimitiveType, as HLO text spells it.
_TYPES = (
    "invalid pred s8 s16 s32 s64 u8 u16 u32 u64 f16 f32 f64 tuple opaque c64 bf16 token c128 f8e5m2 f8e4m3fn s4 u4 "
    "f8e4m3b11fnuz f8e5m2fnuz f8e4m3fnuz s2 u2 f8e4m3 f8e3m4 s1 u1 f4e2m1fn f8e8m0fnu"
).split()
_BITS = {"pred": 8, "bf16": 16, "c64": 64, "c128": 128}


def _bits(kind: str) -> int:
    if kind in _BITS:
        return _BITS[kind]
    digits = kind.lstrip("sufc")
    number = ""
    for c in digits:
        if not c.isdigit():
            break
        number += c
    return int(number) if number else 0


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """(number, value) of a message: integers, and bytes of what has a length."""
    i, end = 0, len(data)
    value: Any
    while i < end:
        tag, i = _varint(data, i)
        kind = tag & 7
        if kind == 0:
            value, i = _varint(data, i)
        elif kind == 1:
            value, i = struct.unpack_from("<q", data, i)[0], i + 8
        elif kind == 2:
            size, i = _varint(data, i)
            value, i = data[i : i + size], i + size
        elif kind == 5:
            value, i = struct.unpack_from("<i", data, i)[0], i + 4
        else:
            raise ValueError(f"The optimised program is no protocol buffer that this version reads (wire type {kind}).")
        yield tag >> 3, value


def _varint(data: bytes, i: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[i]
        value |= (byte & 0x7F) << shift
        i += 1
        if byte < 0x80:
            return value, i
        shift += 7


def _packed(value: Any) -> list[int]:
    """A repeated integer, packed or a single one."""
    if isinstance(value, int):
        return [value]
    out, i = [], 0
    while i < len(value):
        n, i = _varint(value, i)
        out.append(n)
    return out


@dataclass
class Shape:
    """Element type, sizes and layout of an array, or the parts of a tuple.

    Attributes:
        space: The memory space: 0 is HBM; others are on the chip.
        tiles: Sizes of the tiles of its layout, outermost tiling first.
    """

    kind: str = "invalid"
    dims: list[int] = field(default_factory=list)
    parts: list[Shape] = field(default_factory=list)
    minor_to_major: list[int] = field(default_factory=list)
    tiles: list[list[int]] = field(default_factory=list)
    space: int = 0

    @property
    def elements(self) -> int:
        """Number of elements."""
        n = 1
        for d in self.dims:
            n *= d
        return n

    def bytes(self, hbm_only: bool = False) -> int:
        """Bytes without padding, of all parts; ``hbm_only``: of those in HBM."""
        if self.parts:
            return sum(p.bytes(hbm_only) for p in self.parts)
        if self.kind in ("tuple", "token", "opaque", "invalid") or (hbm_only and self.space):
            return 0
        return (self.elements * _bits(self.kind) + 7) // 8

    def padded_bytes(self) -> int:
        """Bytes with the padding of the first tiling."""
        if self.parts:
            return sum(p.padded_bytes() for p in self.parts)
        if not self.tiles or not self.dims:
            return self.bytes()
        physical = [self.dims[d] for d in reversed(self.minor_to_major or range(len(self.dims) - 1, -1, -1))]
        tile = self.tiles[0]
        n = 1
        for i, d in enumerate(physical):
            t = tile[i - len(physical) + len(tile)] if i >= len(physical) - len(tile) else 1
            n *= -(-d // t) * t if t > 0 else d
        return (n * _bits(self.kind) + 7) // 8

    def __str__(self) -> str:
        if self.parts:
            return f"({', '.join(map(str, self.parts))})"
        return f"{self.kind}[{','.join(map(str, self.dims))}]"


@dataclass
class Instruction:
    """One operation of a computation."""

    name: str = ""
    opcode: str = ""
    shape: Shape = field(default_factory=Shape)
    id: int = 0
    operands: list[int] = field(default_factory=list)
    called: list[int] = field(default_factory=list)
    op_name: str = ""
    file: str = ""
    line: int = 0
    frame: int = 0
    target: str = ""  # of a custom call
    config: dict[str, Any] = field(default_factory=dict)  # the backend's

    def number(self, key: str) -> int | None:
        """A whole number somewhere in the backend's configuration."""
        found = _search(self.config, key)
        return int(found) if found is not None else None


@dataclass
class Module:
    """Computations by id, and which is the entry."""

    computations: dict[int, list[Instruction]]
    entry: int


def _search(tree: Any, key: str) -> Any:
    if isinstance(tree, dict):
        if key in tree and not isinstance(tree[key], dict | list):
            return tree[key]
        for value in tree.values():
            if (found := _search(value, key)) is not None:
                return found
    return None


def read(data: bytes) -> Module:
    """The module of ``PJRT_Executable_OptimizedProgram``, format ``hlo_with_config`` or ``hlo``.

    Raises:
        ValueError: It is neither.
    """
    try:
        inner = [value for number, value in _fields(data) if number == 1 and isinstance(value, bytes)]
        # HloModuleProto's field 1 is its name, HloModuleProtoWithConfig's is the module.
        with_config = not any(number == 3 for number, _ in _fields(data))
        return _module(inner[0] if with_config and inner else data)
    except (struct.error, IndexError) as error:
        raise ValueError(f"The optimised program is no protocol buffer that this version reads ({error}).") from None


def _module(data: bytes) -> Module:
    computations: dict[int, list[Instruction]] = {}
    entry = 0
    places: list[tuple[str, int]] = []
    for number, value in _fields(data):
        if number == 3:
            id_, instructions = _computation(value)
            computations[id_] = instructions
        elif number == 6:
            entry = value
        elif number == 17:
            places = _places(value)
    for instructions in computations.values():
        for made in instructions:
            if 0 < made.frame <= len(places):
                made.file, made.line = places[made.frame - 1]
    if entry not in computations:
        raise ValueError("The optimised program has no entry computation.")
    return Module(computations, entry)


def _computation(data: bytes) -> tuple[int, list[Instruction]]:
    id_, instructions = 0, []
    for number, value in _fields(data):
        if number == 2:
            instructions.append(_instruction(value))
        elif number == 5:
            id_ = value
    return id_, instructions


def _instruction(data: bytes) -> Instruction:
    made = Instruction()
    for number, value in _fields(data):
        if number == 1:
            made.name = value.decode()
        elif number == 2:
            made.opcode = value.decode()
        elif number == 3:
            made.shape = _shape(value)
        elif number == 7:
            _metadata(made, value)
        elif number == 28:
            made.target = value.decode()
        elif number == 35:
            made.id = value
        elif number == 36:
            made.operands += _packed(value)
        elif number == 38:
            made.called += _packed(value)
        elif number == 43 and value[:1] == b"{":
            made.config = json.loads(value)
    return made


def _metadata(made: Instruction, data: bytes) -> None:
    for number, value in _fields(data):
        if number == 2:
            made.op_name = value.decode()
        elif number == 3:
            made.file = value.decode()
        elif number == 4:
            made.line = value
        elif number == 15:
            made.frame = value


def _places(data: bytes) -> list[tuple[str, int]]:
    """File and line of each stack frame: ``StackFrameIndexProto``, whose references count from 1."""
    files: list[str] = []
    locations: list[dict[int, int]] = []
    frames: list[dict[int, int]] = []
    for number, value in _fields(data):
        if number == 1:
            files.append(value.decode())
        elif number == 3:
            locations.append(dict(_fields(value)))
        elif number == 4:
            frames.append(dict(_fields(value)))
    found = []
    for frame in frames:
        at = locations[frame[1] - 1] if 0 < frame.get(1, 0) <= len(locations) else {}
        file = files[at[1] - 1] if 0 < at.get(1, 0) <= len(files) else ""
        found.append((file, at.get(3, 0)))
    return found


def _shape(data: bytes) -> Shape:
    made = Shape()
    for number, value in _fields(data):
        if number == 2:
            made.kind = _TYPES[value] if value < len(_TYPES) else f"type {value}"
        elif number == 3:
            made.dims += _packed(value)
        elif number == 4:
            made.parts.append(_shape(value))
        elif number == 5:
            _layout(made, value)
    return made


def _layout(made: Shape, data: bytes) -> None:
    for number, value in _fields(data):
        if number == 1:
            made.minor_to_major += _packed(value)
        elif number == 6:
            made.tiles.append([d for n, v in _fields(value) if n == 1 for d in _packed(v)])
        elif number == 8:
            made.space = value
