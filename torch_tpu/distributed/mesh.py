"""Which rank goes where in a mesh: neighbours in the mesh should be neighbours in the slice."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Sequence

import torch

#: The arrangement of the chips that the ranks count through, as ``4x4x8``; default: a line.
TOPOLOGY = "TORCH_TPU_TOPOLOGY"


def topology_aware_mesh(
    mesh_shape: Sequence[int],
    *,
    dcn_mesh_shape: Sequence[int] | None = None,
    allow_split_physical_axes: bool = False,
    contiguous_submeshes: bool = False,
    topology: Sequence[int] | None = None,
) -> torch.Tensor:
    """Ranks in the shape of a mesh, for ``DeviceMesh("tpu", ...)``.

    Each dimension of the mesh gets whole axes of the slice, so that its collectives run on rings of ICI links. The
    last dimension, which usually communicates most (tensor parallelism), chooses first.

    Args:
        mesh_shape: Sizes of the mesh within a slice.
        dcn_mesh_shape: As many sizes: over how many slices each dimension extends. Ranks count slice by slice.
        allow_split_physical_axes: Whether a dimension may take part of an axis of the slice.
        contiguous_submeshes: Whether the ranks of each trailing submesh must be consecutive, as they count; the
            arrangement is row-major then.
        topology: The slice's shape in chips, which ranks count through row-major; default: the environment variable
            ``TORCH_TPU_TOPOLOGY`` (``4x4x8``), else a line.

    Returns:
        int64 tensor of the shape ``dcn_mesh_shape[i] * mesh_shape[i]``.

    Raises:
        ValueError: The sizes do not multiply to the slice's, or no assignment of whole axes exists.
    """
    shape = [int(n) for n in mesh_shape]
    if not shape or any(n < 1 for n in shape):
        raise ValueError(f"mesh_shape must have positive sizes, got {tuple(mesh_shape)}.")
    outer = [1] * len(shape) if dcn_mesh_shape is None else [int(n) for n in dcn_mesh_shape]
    if len(outer) != len(shape) or any(n < 1 for n in outer):
        raise ValueError(
            f"dcn_mesh_shape must have a positive size for each of the {len(shape)} dimensions of mesh_shape, "
            f"got {tuple(outer)}."
        )
    chips = math.prod(shape)
    physical = _physical(chips, topology)
    if contiguous_submeshes:
        inner = torch.arange(chips).reshape(shape)
    else:
        inner = _assign(shape, physical, allow_split_physical_axes)
    slices = torch.arange(math.prod(outer)).reshape(outer)
    # [o0, o1, ..., i0, i1, ...] -> [o0, i0, o1, i1, ...]
    whole = slices.reshape(outer + [1] * len(shape)) * chips + inner.reshape([1] * len(shape) + shape)
    order = [axis for pair in zip(range(len(shape)), range(len(shape), 2 * len(shape)), strict=True) for axis in pair]
    return whole.permute(order).reshape([o * i for o, i in zip(outer, shape, strict=True)]).contiguous()


def _physical(chips: int, topology: Sequence[int] | None) -> list[int]:
    if topology is None:
        text = os.environ.get(TOPOLOGY, "")
        try:
            topology = [int(n) for n in text.split("x")] if text else [chips]
        except ValueError:
            raise ValueError(f"{TOPOLOGY} must be sizes like 4x4x8, got {text!r}.") from None
    if math.prod(topology) != chips:
        name = "x".join(map(str, topology))
        raise ValueError(f"The mesh has {chips} places and the slice {name} has {math.prod(topology)} chips.")
    return list(topology)


def _assign(shape: list[int], physical: list[int], split: bool) -> torch.Tensor:
    """Ranks arranged so that each dimension has axes of its own."""
    axes = [[n] for n in physical]
    found = _whole_axes(shape, physical)
    if found is None and split:
        axes = [_factors(n) for n in physical]  # as many axes as there are prime factors
        found = _whole_axes(shape, [n for axis in axes for n in axis])
    if found is None:
        sizes, given = "x".join(map(str, shape)), "x".join(map(str, physical))
        advice = "" if split else " Set allow_split_physical_axes=True, or choose sizes that are products of its axes."
        raise ValueError(f"A mesh {sizes} cannot be laid on the axes of a slice {given}.{advice}")
    ranks = torch.arange(math.prod(physical)).reshape([n for axis in axes for n in axis])
    return ranks.permute([axis for dim in found for axis in dim]).reshape(shape)


def _whole_axes(shape: list[int], axes: list[int]) -> list[tuple[int, ...]] | None:
    """For each dimension the axes whose sizes multiply to its own, or None.

    The last dimension chooses first, and many axes before few: each is a ring in two directions.
    """

    def assign(dim: int, free: frozenset[int]) -> list[tuple[int, ...]] | None:
        if dim < 0:
            return [] if all(axes[i] == 1 for i in free) else None
        for count in range(len(free), -1, -1):
            for chosen in itertools.combinations(sorted(free), count):
                if math.prod(axes[i] for i in chosen) == shape[dim]:
                    rest = assign(dim - 1, free - set(chosen))
                    if rest is not None:
                        return [*rest, chosen]
        return None

    found = assign(len(shape) - 1, frozenset(range(len(axes))))
    if found is None:
        return None
    left = set(range(len(axes))) - {i for dim in found for i in dim}  # axes of size 1
    found[0] = (*sorted(left), *found[0])
    return found


def _factors(n: int) -> list[int]:
    found, p = [], 2
    while n > 1:
        while n % p == 0:
            found.append(p)
            n //= p
        p += 1
    return found or [1]
