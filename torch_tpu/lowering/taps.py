"""Reading an array at positions known when the program is built: the shared part of adaptive pooling and resizing.

A *row* lists the ``(position, weight)`` taps of one output element along one dimension. A list of rows is a sparse
matrix; its transpose is the gradient, again read position by position, so that nothing is scattered.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from torch_tpu.lowering.common import Number
from torch_tpu.lowering.view import index_dtype
from torch_tpu.stablehlo import Value
from torch_tpu.stablehlo import ops as hlo

Row = list[tuple[int, float]]


def take(x: Value, dim: int, positions: Sequence[int]) -> Value:
    """``x[..., positions, ...]`` along ``dim``: a slice or a broadcast where they are regular, else a gather."""
    n, size = len(positions), x.shape[dim]
    if n and list(positions) == list(range(positions[0], positions[0] + n)):
        return hlo.slice_dim(x, dim, positions[0], positions[0] + n)
    step = positions[1] - positions[0] if n > 1 else 0
    if step > 0 and list(positions) == list(range(positions[0], positions[-1] + 1, step)):
        return hlo.slice_dim(x, dim, positions[0], positions[-1] + 1, step)
    if n and n % size == 0 and list(positions) == [i // (n // size) for i in range(n)]:
        spread = (*x.shape[: dim + 1], n // size, *x.shape[dim + 1 :])
        kept = [i for i in range(len(spread)) if i != dim + 1]
        return hlo.reshape(hlo.broadcast_in_dim(x, spread, kept), (*x.shape[:dim], n, *x.shape[dim + 1 :]))
    indices = hlo.reshape(hlo.constant_list(list(positions), torch.int32), (n, 1))
    sizes = [1 if i == dim else d for i, d in enumerate(x.shape)]
    offsets = [i for i in range(x.ndim) if i != dim]
    return hlo.gather(x, indices, offset_dims=offsets, collapsed_dims=[dim], index_map=[dim], slice_sizes=sizes)


def windows(x: Value, dim: int, rows: Sequence[Sequence[int]], fill: Number | Value) -> Value:
    """Dimension ``dim`` as two: one entry per row, and the row's positions filled up to the longest with ``fill``."""
    longest = max(map(len, rows), default=0)
    ragged = any(len(row) != longest for row in rows)
    padded = [[*row, *[row[-1] if row else 0] * (longest - len(row))] for row in rows]
    shape = (*x.shape[:dim], len(rows), longest, *x.shape[dim + 1 :])
    picked = hlo.reshape(take(x, dim, [p for row in padded for p in row]), shape)
    if not ragged:
        return picked
    counts = hlo.broadcast_in_dim(hlo.constant_list([len(row) for row in rows], torch.int32), shape, [dim])
    inside = hlo.compare(hlo.iota(shape, dim + 1, torch.int32), counts, "LT")
    return hlo.select(inside, picked, fill)


def resample(x: Value, dim: int, rows: list[Row]) -> Value:
    """``y[..., o, ...] = sum of weight * x[..., position, ...]`` over the taps of ``rows[o]``, in ``x``'s dtype."""
    longest = max(map(len, rows), default=0)
    if longest == 0 or 0 in x.shape:
        return hlo.constant(0, x.dtype, (*x.shape[:dim], len(rows), *x.shape[dim + 1 :]))
    picked = windows(x, dim, [[p for p, _ in row] for row in rows], 0)
    weights = [w for row in rows for w in [*(w for _, w in row), *[0.0] * (longest - len(row))]]
    if any(w != 1 for row in rows for _, w in row):
        table = hlo.reshape(hlo.constant_list(weights, x.dtype), (len(rows), longest))
        picked = picked * hlo.broadcast_in_dim(table, picked.shape, [dim, dim + 1])
    if longest == 1:
        return hlo.reshape(picked, (*x.shape[:dim], len(rows), *x.shape[dim + 1 :]))
    return hlo.reduce_one(picked, 0, [dim + 1], hlo.add)


def transposed(rows: list[Row], size: int) -> list[Row]:
    """The transpose of a sparse matrix with ``size`` columns."""
    out: list[Row] = [[] for _ in range(size)]
    for o, row in enumerate(rows):
        for position, weight in row:
            out[position].append((o, weight))
    return out


def scatter_sum(values: Value, positions: Value, size: int) -> Value:
    """``y[b, positions[b, i]] += values[b, i]`` on zeros ``[b, size]``; ``values`` and ``positions`` are ``[b, i]``."""
    batch, n = values.shape
    itype = index_dtype(batch * size)
    flat = hlo.convert(positions, itype) + hlo.iota(positions.shape, 0, itype) * size
    total = hlo.scatter(
        hlo.constant(0, values.dtype, (batch * size,)), hlo.reshape(flat, (batch * n, 1)),
        hlo.reshape(values, (batch * n,)), hlo.add, update_window_dims=[], inserted_dims=[0], index_map=[0],
    )  # fmt: skip
    return hlo.reshape(total, (batch, size))


def as_rows(x: Value, spatial: int) -> Value:
    """``[batch, positions]``: leading dimensions together, the last ``spatial`` ones together."""
    split = x.ndim - spatial
    return hlo.reshape(x, (math.prod(x.shape[:split]), math.prod(x.shape[split:])))
