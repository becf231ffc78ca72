"""Sizes that will change, told beforehand: ``torch.tpu.dynamism``.

What changes without being told is noticed after a few sizes; see ``docs/dynamic-shapes.md``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from torch_tpu import _C
from torch_tpu.bounded import changes


class Dynamism(NamedTuple):
    """What was said of one dimension: its smallest and largest size."""

    lower_bound: int
    upper_bound: int


_ATTRIBUTE = "_torch_tpu_dynamism"


def mark_dynamic(
    tensor: torch.Tensor,
    dimension: int | Sequence[int],
    lower_bound: int | Sequence[int],
    upper_bound: int | Sequence[int],
) -> None:
    """Says that sizes of a tensor change from call to call, within bounds.

    Operators that get the tensor, and those that get what comes of it, are compiled once for all sizes up to the
    bounds: the tensor's memory becomes as large as ``upper_bound`` takes, and its sizes are numbers that programs get
    when they run. Results are those of the true sizes. ``torch.compile`` is told, too
    (``torch._dynamo.mark_dynamic``). Each new tensor has to be marked; one tensor may be marked again for others of its
    dimensions.

    Args:
        tensor: A dense tensor on tpu, which begins where its memory does.
        dimension: One dimension, or several.
        lower_bound: The smallest size of each; sizes 0 and 1 have programs of their own.
        upper_bound: The largest size of each.

    Raises:
        TypeError: The tensor is not a strided tensor on tpu.
        IndexError: The tensor has no such dimension.
        ValueError: The bounds are not such that ``0 <= lower_bound <= size <= upper_bound``, or the tensor is a window
            on the memory of another one.
    """
    if not isinstance(tensor, torch.Tensor) or tensor.device.type != "tpu" or tensor.layout != torch.strided:
        what = f"one on {tensor.device}" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise TypeError(f"mark_dynamic takes a strided tensor on tpu, got {what}.")
    dimensions = [dimension] if isinstance(dimension, int) else [*dimension]
    lower, upper = (_each(bound, len(dimensions)) for bound in (lower_bound, upper_bound))
    told: dict[int, Dynamism] = dict(getattr(tensor, _ATTRIBUTE, {}))
    for d, low, high in zip(dimensions, lower, upper, strict=True):
        if not -tensor.ndim <= d < tensor.ndim:
            raise IndexError(f"mark_dynamic: a tensor of {tensor.ndim} dimensions has no dimension {d}.")
        size = tensor.shape[d]
        if not 0 <= low <= size <= high:
            raise ValueError(
                f"mark_dynamic: dimension {d} has size {size}, which the bounds {low} and {high} do not include."
            )
        told[d % tensor.ndim] = Dynamism(low, high)
    order = sorted(range(tensor.ndim), key=lambda d: (-tensor.stride()[d], tensor.shape[d] == 1, d))
    bounds = tuple(told[d].upper_bound if d in told else tensor.shape[d] for d in order)
    dense = tensor.storage_offset() == 0 and tensor.permute(order).is_contiguous()
    owned = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize
    if (
        not dense
        or tensor.is_conj()
        or tensor.is_neg()
        or not (owned or _C._array_shape(tensor) == [math.prod(bounds)])
    ):
        raise ValueError("mark_dynamic takes a tensor with memory of its own; make one with clone() first.")
    if tensor.numel() > 0:
        if _C._array_shape(tensor) is None:
            tensor.detach().zero_()
        _C._lengthen(tensor, math.prod(bounds))
        changes.shape_is(tensor.dtype, changes.Shape(bounds, tuple(d in told for d in order), True))
    setattr(tensor, _ATTRIBUTE, told)
    for d in dimensions:
        bound = told[d % tensor.ndim]
        torch._dynamo.mark_dynamic(tensor, d % tensor.ndim, min=max(bound.lower_bound, 2), max=bound.upper_bound)


def get_dynamism_info(tensor: torch.Tensor) -> dict[int, Dynamism]:
    """The marks on a tensor, by dimension; those that its results have are not among them."""
    return dict(getattr(tensor, _ATTRIBUTE, {}))


def _each(bound: int | Sequence[int], count: int) -> list[int]:
    bounds = [bound] * count if isinstance(bound, int) else [*bound]
    if len(bounds) != count:
        raise ValueError(f"mark_dynamic: {count} dimensions need {count} bounds, or one, and got {len(bounds)}.")
    return bounds
