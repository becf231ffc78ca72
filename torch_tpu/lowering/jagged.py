"""Rows of different lengths, side by side or padded: the two ways between them."""

from __future__ import annotations

import torch

from torch_tpu.lowering.common import Scalar, as_value
from torch_tpu.lowering.indexing import read_at, run_of
from torch_tpu.lowering.registry import lower
from torch_tpu.stablehlo import Type, Value
from torch_tpu.stablehlo import ops as hlo


def _only(offsets: list[Value]) -> Value:
    """The offsets of the one jagged dimension."""
    if len(offsets) != 1:
        raise NotImplementedError(f"Tensors with {len(offsets)} jagged dimensions are not supported on tpu; use one.")
    return hlo.convert(offsets[0], torch.int32)


@lower("_jagged_to_padded_dense_forward")
def to_padded(
    values: Value, offsets: list[Value], max_lengths: list[int], padding: Scalar = 0.0, *, result: list[Type]
) -> Value:
    """Row ``b`` is ``values[offsets[b] : offsets[b + 1]]``, cut or padded to the greatest length."""
    offset = _only(offsets)
    shape, dtype = result[0]
    batch, length = shape[:2]
    fill = as_value(padding, dtype, shape)
    if 0 in (*shape, *values.shape):
        return fill
    starts, ends = (
        hlo.broadcast_in_dim(hlo.slice_dim(offset, 0, i, i + batch), (batch, length), [0]) for i in range(2)
    )
    place = starts + hlo.iota((batch, length), 1, torch.int32)
    rows = read_at(values, [0], [hlo.clamp(0, place, values.shape[0] - 1)], 0)
    return hlo.select(hlo.broadcast_in_dim(place < ends, shape, [0, 1]), rows, fill)


@lower("tpu::padded_to_jagged", "_padded_dense_to_jagged_forward")
def to_jagged(dense: Value, offsets: list[Value], total: int, *, result: list[Type]) -> Value:
    """The rows side by side; zeros for what ``dense`` has no room for."""
    offset = _only(offsets)
    shape, dtype = result[0]
    if 0 in (*shape, *dense.shape):
        return hlo.constant(0, dtype, shape)
    batch, length = dense.shape[:2]
    starts = hlo.slice_dim(offset, 0, 0, batch)
    row = hlo.clamp(0, run_of(hlo.slice_dim(offset, 0, 1, batch + 1) - starts, shape[0]), batch - 1)
    place = hlo.iota((shape[0],), 0, torch.int32) - read_at(starts, [0], [row], 0)
    found = read_at(dense, [0, 1], [row, hlo.clamp(0, place, length - 1)], 0)
    inside = hlo.broadcast_in_dim(place < length, shape, [0])
    return hlo.select(inside, found, hlo.constant(0, dtype, shape))
