"""Lookup tables: embedding, embedding_bag, one_hot, and their gradients."""

from __future__ import annotations

import torch

from torch_tpu.lowering.common import Scalar, as_value, compute_dtype, lowest, tracer
from torch_tpu.lowering.indexing import checked, prefix_sum, read_at
from torch_tpu.lowering.registry import lower
from torch_tpu.lowering.scatter import place_at, widened
from torch_tpu.stablehlo import Type, Value
from torch_tpu.stablehlo import ops as hlo

SUM, MEAN, MAX = range(3)  # torch.nn.functional.embedding_bag's modes


def _flat(x: Value) -> Value:
    return hlo.reshape(x, (x.numel,))


def _add_rows(rows: int, positions: Value, updates: Value) -> Value:
    """``rows`` rows, each the sum of the ``updates`` at its position; positions out of range are left out."""
    blank = hlo.constant(0, updates.dtype, (rows, *updates.shape[1:]))
    return widened(place_at([0], [positions], 0))(blank, updates, hlo.add)


def _per_row(x: Value, like: Value) -> Value:
    """One number per row, spread over ``like``'s shape and dtype."""
    return hlo.broadcast_in_dim(hlo.convert(x, like.dtype), like.shape, [0])


def _without(positions: Value, excluded: int, rows: int) -> Value:
    """Positions equal to ``excluded`` are moved out of range."""
    return hlo.select(hlo.compare(positions, excluded, "EQ"), rows, positions) if 0 <= excluded < rows else positions


# ---- embedding ------------------------------------------------------------------------------------------------------
@lower("embedding")
def embedding(
    weight: Value, indices: Value, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> Value:
    return read_at(weight, [0], [checked(indices, weight.shape[0])], 0)


@lower("embedding_dense_backward")
def embedding_dense_backward(
    grad: Value, indices: Value, num_weights: int, padding_idx: int, scale_grad_by_freq: bool
) -> Value:
    positions = _without(checked(_flat(indices), num_weights, drop=True), padding_idx, num_weights)
    grad = hlo.reshape(grad, (positions.numel, *grad.shape[indices.ndim :]))
    if scale_grad_by_freq:
        grad = hlo.convert(_divided_by_frequency(grad, positions, num_weights), grad.dtype)
    return _add_rows(num_weights, positions, grad)


def _divided_by_frequency(grad: Value, positions: Value, num_weights: int) -> Value:
    """Rows of ``grad`` over how often their position occurs, in the compute dtype."""
    grad = hlo.convert(grad, compute_dtype(grad.dtype))
    if 0 in grad.shape:
        return grad
    counts = _add_rows(num_weights, positions, hlo.constant(1, torch.int32, positions.shape))
    seen = read_at(counts, [0], [hlo.clamp(0, positions, num_weights - 1)], 0)
    return hlo.divide(grad, _per_row(hlo.maximum(seen, 1), grad))


@lower("embedding_renorm", static=("norm_type",))
def embedding_renorm(weight: Value, indices: Value, max_norm: Scalar, norm_type: float) -> Value:
    """Rows that are looked up are scaled down to ``max_norm``; a row named twice is scaled once."""
    positions = checked(_flat(indices), weight.shape[0], drop=True)
    rows = read_at(weight, [0], [hlo.clamp(0, positions, weight.shape[0] - 1)], 0)
    wide = hlo.convert(rows, compute_dtype(rows.dtype))
    norm = _norm(hlo.abs_(wide), norm_type)
    limit = as_value(max_norm, norm.dtype, norm.shape)
    scale = hlo.select(norm > limit, hlo.divide(limit, norm + 1e-7), 1)
    return place_at([0], [positions], 0)(weight, hlo.convert(wide * _per_row(scale, wide), weight.dtype), None)


def _norm(rows: Value, p: float) -> Value:
    """The p-norm of each row of non-negative numbers."""
    dims = range(1, rows.ndim)
    if p == float("inf"):
        return hlo.reduce_one(rows, 0, dims, hlo.maximum)
    if p == 2:
        return hlo.sqrt(hlo.reduce_one(rows * rows, 0, dims, hlo.add))
    powers = rows if p == 1 else hlo.power(rows, p)
    total = hlo.reduce_one(powers, 0, dims, hlo.add)
    return total if p == 1 else hlo.power(total, 1 / p)


@lower("one_hot")
def one_hot(index: Value, num_classes: int = -1) -> Value:
    tracer().check(index < 0, "Class values must be non-negative.")
    tracer().check(index >= num_classes, "Class values must be smaller than num_classes.")
    shape = (*index.shape, num_classes)
    classes = hlo.iota(shape, index.ndim, index.dtype)
    chosen = hlo.broadcast_in_dim(index, shape, range(index.ndim))
    return hlo.convert(hlo.compare(classes, chosen, "EQ"), torch.int64)


# ---- embedding_bag --------------------------------------------------------------------------------------------------
def _bag_of(offsets: Value, count: int, bags: int) -> Value:
    """The bag of each of ``count`` entries: the last one that starts at or before it. int32, shape ``[count]``."""
    starts = hlo.convert(hlo.clamp(0, offsets, count), torch.int32)
    begun = _add_rows(count, hlo.slice_(starts, [0], [bags]), hlo.constant(1, torch.int32, (bags,)))
    return prefix_sum(begun) - 1


def _embedding_bag(
    weight: Value, indices: Value, offsets: Value, mode: int, per_sample_weights: Value | None,
    include_last_offset: bool, padding_idx: int,
) -> tuple[Value, Value, Value, Value | None]:  # fmt: skip
    """(bags, the bag of each entry, entries per bag without padding, for ``max`` the winning index of each number)."""
    count, rows = indices.numel, weight.shape[0]
    bags = offsets.shape[0] - int(include_last_offset)
    positions = checked(indices, rows, error=RuntimeError)
    bag = _bag_of(offsets, count, bags)
    used = hlo.select(hlo.compare(positions, padding_idx % rows, "EQ"), bags, bag) if padding_idx >= 0 else bag
    entries = read_at(weight, [0], [positions], 0)
    wide = hlo.convert(entries, compute_dtype(weight.dtype))
    if per_sample_weights is not None:
        wide = wide * _per_row(per_sample_weights, wide)
    sizes = _add_rows(bags, used, hlo.constant(1, torch.int32, (count,)))
    if mode == MAX:
        out, winner = _bag_maximum(wide, used, sizes, indices)
    else:
        out, winner = _add_rows(bags, used, wide), None
        if mode == MEAN:
            out = hlo.divide(out, _per_row(hlo.maximum(sizes, 1), out))
    return hlo.convert(out, weight.dtype), bag, sizes, winner


def _bag_maximum(entries: Value, bag: Value, sizes: Value, indices: Value) -> tuple[Value, Value]:
    """The largest number of each bag and column, and the index it was looked up with (the first of equals)."""
    bags, (count, width) = sizes.numel, entries.shape
    if 0 in (bags, count, width):
        return hlo.constant(0, entries.dtype, (bags, width)), hlo.constant(0, indices.dtype, (bags, width))
    place = place_at([0], [bag], 0)
    top = place(hlo.constant(lowest(entries.dtype), entries.dtype, (bags, width)), entries, hlo.maximum)
    own_top = read_at(top, [0], [hlo.clamp(0, bag, bags - 1)], 0)
    order = hlo.select(hlo.compare(entries, own_top, "EQ"), hlo.iota((count, width), 0, torch.int32), count)
    first = place(hlo.constant(count, torch.int32, (bags, width)), order, hlo.minimum)
    winner = read_at(indices, [0], [hlo.clamp(0, first, count - 1)], 0)
    filled = _per_row(sizes, top) > 0
    return hlo.select(filled, top, 0), hlo.select(filled, winner, 0)


@lower("_embedding_bag", "_embedding_bag_forward_only")
def embedding_bag(
    weight: Value, indices: Value, offsets: Value, scale_grad_by_freq: bool = False, mode: int = 0,
    sparse: bool = False, per_sample_weights: Value | None = None, include_last_offset: bool = False,
    padding_idx: int = -1, *, result: list[Type],
) -> tuple[Value, ...]:  # fmt: skip
    """Rows looked up and reduced in bags; the three further results are what the gradient needs."""
    out, bag, sizes, winner = _embedding_bag(
        weight, indices, offsets, mode, per_sample_weights, include_last_offset, padding_idx
    )
    return out, *(_fitted(v, t) for v, t in zip((bag, sizes, winner), result[1:], strict=True))


def _fitted(x: Value | None, like: Type) -> Value:
    """``x`` in the shape that PyTorch gives the result: cut or padded with zeros; zeros for None."""
    if x is None:
        return hlo.constant(0, like.dtype, like.shape)
    x = hlo.convert(x, like.dtype)
    if x.ndim != len(like.shape):
        return hlo.constant(0, like.dtype, like.shape)
    return hlo.pad(x, 0, [0] * x.ndim, [b - a for a, b in zip(x.shape, like.shape, strict=True)])


@lower("_embedding_bag_dense_backward")
def embedding_bag_dense_backward(
    grad: Value, indices: Value, offset2bag: Value, bag_size: Value, maximum_indices: Value, num_weights: int,
    scale_grad_by_freq: bool, mode: int, per_sample_weights: Value | None, padding_idx: int = -1,
) -> Value:  # fmt: skip
    """Each entry of a bag gets the bag's gradient; for ``max`` only the winner of each number does."""
    bags, width = grad.shape
    wide = hlo.convert(grad, compute_dtype(grad.dtype))
    if mode == MAX:
        columns = hlo.iota((bags, width), 1, torch.int32)
        positions = checked(maximum_indices, num_weights, drop=True, error=None)
        empty = _per_row(hlo.slice_(bag_size, [0], [bags]), hlo.constant(0, torch.int32, grad.shape)) <= 0
        positions = hlo.select(empty, num_weights, positions)
        blank = hlo.constant(0, wide.dtype, (num_weights, width))
        return hlo.convert(place_at([0, 1], [positions, columns], 0)(blank, wide, hlo.add), grad.dtype)
    positions = _without(checked(indices, num_weights, drop=True), padding_idx, num_weights)
    if bags == 0 or indices.numel == 0:
        return hlo.constant(0, grad.dtype, (num_weights, width))
    entries = read_at(wide, [0], [checked(offset2bag, bags, error=None)], 0)
    if mode == MEAN:
        sizes = read_at(bag_size, [0], [checked(offset2bag, bags, error=None)], 0)
        entries = hlo.divide(entries, _per_row(hlo.maximum(sizes, 1), entries))
    if per_sample_weights is not None:
        entries = entries * _per_row(per_sample_weights, entries)
    if scale_grad_by_freq:
        entries = _divided_by_frequency(entries, positions, num_weights)
    return hlo.convert(_add_rows(num_weights, positions, entries), grad.dtype)


@lower("_embedding_bag_backward")
def embedding_bag_backward(
    grad: Value, indices: Value, offsets: Value, offset2bag: Value, bag_size: Value, maximum_indices: Value,
    num_weights: int, scale_grad_by_freq: bool, mode: int, sparse: bool, per_sample_weights: Value | None,
    padding_idx: int = -1,
) -> Value:  # fmt: skip
    if sparse:
        raise NotImplementedError("embedding_bag with sparse=True is not supported on tpu: use sparse=False.")
    if offset2bag.numel != indices.numel:
        offset2bag = _bag_of(offsets, indices.numel, grad.shape[0])
    return embedding_bag_dense_backward(
        grad, indices, offset2bag, bag_size, maximum_indices, num_weights, scale_grad_by_freq, mode, per_sample_weights,
        padding_idx,
    )  # fmt: skip


@lower("_embedding_bag_per_sample_weights_backward")
def embedding_bag_per_sample_weights_backward(
    grad: Value, weight: Value, indices: Value, offsets: Value, offset2bag: Value, mode: int, padding_idx: int = -1
) -> Value:
    """The scalar product of each looked-up row with its bag's gradient; zero for padding."""
    if 0 in (grad.shape[0], indices.numel):
        return hlo.constant(0, grad.dtype, (indices.numel,))
    if offset2bag.numel != indices.numel:
        offset2bag = _bag_of(offsets, indices.numel, grad.shape[0])
    dtype = compute_dtype(grad.dtype)
    positions = checked(indices, weight.shape[0])
    rows = hlo.convert(read_at(weight, [0], [positions], 0), dtype)
    bags = hlo.convert(read_at(grad, [0], [checked(offset2bag, grad.shape[0], error=None)], 0), dtype)
    product = hlo.reduce_one(rows * bags, 0, [1], hlo.add)
    if padding_idx >= 0:
        product = hlo.select(hlo.compare(positions, padding_idx, "EQ"), 0, product)
    return hlo.convert(product, grad.dtype)
