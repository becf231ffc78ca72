"""Operators whose result size depends on the data, and others that run outside of a trace.

Each has a padded form, an operator of namespace ``tpu`` with static shapes: results as large as they can be, and a
count. What PyTorch asks for is then a view of the first rows, so another count is not another program. The functions in
:data:`HOST_COMPOSITES` have the signatures of the ATen operators; the eager kernel calls them outside of a trace.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_tpu.lowering.creation import arange_end_out, arange_out
from torch_tpu.lowering.indexing import coordinates, count_true, prefix_sum, read_at, true_positions
from torch_tpu.lowering.random import random_from
from torch_tpu.lowering.registry import lower
from torch_tpu.lowering.scatter import place_at
from torch_tpu.lowering.view import index_dtype
from torch_tpu.stablehlo import Value
from torch_tpu.stablehlo import ops as hlo

_library = torch.library.Library("tpu", "FRAGMENT")
_MASKS = (torch.bool, torch.uint8)


def _define(schema: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Defines ``tpu::<schema>`` with the decorated function as its meta kernel."""
    _library.define(schema)
    return lambda meta: _library.impl(schema.partition("(")[0], meta, "Meta") or meta


def _long(x: Value) -> Value:
    return hlo.convert(x, torch.int64)


# ---- padded forms ---------------------------------------------------------------------------------------------------
@_define("nonzero_padded(Tensor self) -> (Tensor indices, Tensor count)")
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty((x.numel() * x.ndim,), dtype=torch.int64), x.new_empty((), dtype=torch.int64)


@lower("tpu::nonzero_padded")
def nonzero_padded(x: Value) -> tuple[Value, Value]:
    """The coordinates of the elements that are not zero, dimension after dimension; and how many elements these are.

    The CPU lays its result out so. Each dimension begins where the count puts it, over the padding of the one before.
    """
    mask = hlo.convert(x, torch.bool)
    count = count_true(mask, index_dtype(x.numel * max(x.ndim, 1)))
    indices = hlo.constant(0, torch.int64, (x.numel * x.ndim,))
    for i, column in enumerate(coordinates(true_positions(mask), x.shape)):
        indices = hlo.dynamic_update_slice(indices, _long(column), [count * i]) if x.ndim > 1 else _long(column)
    return indices, _long(count)


@_define("masked_select_padded(Tensor self, Tensor mask) -> (Tensor values, Tensor count)")
def _(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    torch._check(mask.dtype in _MASKS, lambda: "masked_select: expected BoolTensor for mask")
    count = torch.broadcast_shapes(x.shape, mask.shape).numel()
    return x.new_empty((count,)), x.new_empty((), dtype=torch.int64)


@lower("tpu::masked_select_padded")
def masked_select_padded(x: Value, mask: Value) -> tuple[Value, Value]:
    """The elements under the mask in row-major order, padded to all; and how many there are."""
    shape = hlo.broadcast_shapes(x.shape, mask.shape)
    x, mask = hlo.broadcast_to(x, shape), hlo.broadcast_to(hlo.convert(mask, torch.bool), shape)
    return _compacted(hlo.reshape(x, (x.numel,)), true_positions(mask)), _long(count_true(mask))


def _compacted(rows: Value, found: Value) -> Value:
    """The rows that were ``found``, the last one in the places left."""
    n = rows.shape[0]
    return read_at(rows, [0], [hlo.clamp(0, found, max(n - 1, 0))], 0)


@_define(
    "unique_padded(Tensor self, int? dim, bool sort) -> (Tensor values, Tensor inverse, Tensor counts, Tensor count)"
)
def _(x: Tensor, dim: int | None, sort: bool) -> tuple[Tensor, ...]:
    n, shape = (x.numel(), x.shape) if dim is None else (x.shape[dim], (x.shape[dim],))
    values = x.new_empty((n,) if dim is None else x.movedim(dim, 0).shape)
    places = [x.new_empty(size, dtype=torch.int64) for size in (shape, (n,), ())]
    return values, *places


@lower("tpu::unique_padded")
def unique_padded(x: Value, dim: int | None, sort: bool) -> tuple[Value, ...]:
    """The distinct elements, or slices along ``dim``; without ``sort`` only neighbours are compared.

    Returns the values padded to all, ``dim`` in front; for each input its place among them; how often each occurs; and
    their number.
    """
    if dim is None:
        rows = hlo.reshape(x, (x.numel, 1))
    else:
        dim %= x.ndim
        front = hlo.move_dim(x, dim, 0)
        rows = hlo.reshape(front, (front.shape[0], front.numel // max(front.shape[0], 1)))
    n = rows.shape[0]
    order = hlo.iota((n,), 0, index_dtype(n))
    if sort and n:
        order = _lexicographic_order(rows)
        rows = read_at(rows, [0], [order], 0)
    starts = _starts(rows)
    found = true_positions(starts)
    values = _compacted(rows, found)
    ends = hlo.concatenate([hlo.slice_dim(found, 0, min(n, 1), n), hlo.constant(n, found.dtype, (min(n, 1),))], 0)
    group = prefix_sum(hlo.convert(starts, order.dtype)) - 1
    inverse = place_at([0], [order], 0)(hlo.full_like(order, 0), group, None) if sort else group
    if dim is None:
        values, inverse = hlo.reshape(values, (n,)), hlo.reshape(inverse, x.shape)
    else:
        values = hlo.reshape(values, front.shape)
    return values, _long(inverse), _long(ends - found), _long(count_true(starts))


def _starts(rows: Value) -> Value:
    """True where a row differs from the one before it (NaN differs from NaN), and at the first."""
    n = rows.shape[0]
    if n < 2:
        return hlo.constant(True, torch.bool, (n,))
    differs = hlo.compare(hlo.slice_dim(rows, 0, 1, n), hlo.slice_dim(rows, 0, 0, n - 1), "NE")
    return hlo.pad(hlo.reduce_one(differs, False, [1], hlo.or_), True, [1], [0])


def _before(a: Value, b: Value) -> Value:
    """``a < b`` with NaN last."""
    less = a < b
    if not a.dtype.is_floating_point:
        return less
    return hlo.or_(less, hlo.and_(hlo.compare(b, b, "NE"), hlo.compare(a, a, "EQ")))


def _lexicographic_order(rows: Value) -> Value:
    """The stable order of rows by their first column, then the second, ...: one stable sort each, the last first."""
    n, width = rows.shape
    order = hlo.iota((n,), 0, index_dtype(n))

    def by_column(rows: Value, column: Value, order: Value) -> Value:
        key = hlo.reshape(hlo.dynamic_slice(rows, [hlo.constant(0, column.dtype), column], (n, 1)), (n,))
        key = read_at(key, [0], [order], 0)
        return hlo.sort([key, order], 0, lambda a, b: _before(a[0], b[0]))[1]

    if width <= 1:
        return by_column(rows, hlo.constant(0, torch.int32), order) if width else order
    start = (hlo.constant(width - 1, torch.int32), order, rows)
    return hlo.while_(
        start, lambda c, o, r: c >= 0, lambda c, o, r: (c - 1, by_column(r, c, o), r)
    )[1]  # fmt: skip


@_define("repeat_interleave(Tensor repeats, *, int output_size) -> Tensor")
def _(repeats: Tensor, *, output_size: int) -> Tensor:
    return torch.ops.aten.repeat_interleave.Tensor(repeats, output_size=output_size)


@_define("padded_to_jagged(Tensor dense, Tensor[] offsets, int total) -> Tensor")
def _(dense: Tensor, offsets: list[Tensor], total: int) -> Tensor:
    return dense.new_empty((total, *dense.shape[2:]))


# ---- ATen operators -------------------------------------------------------------------------------------------------
_padded = torch.ops.tpu


def _bucket(size: int) -> int:
    """The next power of two: sizes that depend on the data share few programs."""
    return 1 << max(size - 1, 0).bit_length() if size else 0


def _first(rows: Tensor, count: int) -> Tensor:
    """A view of the first ``count`` rows; of a copy where it would keep four times the memory alive."""
    if 4 * _bucket(count) <= rows.shape[0]:
        rows = rows[: _bucket(count)].clone(memory_format=torch.contiguous_format)
    return rows[:count]


def nonzero(self: Tensor) -> Tensor:
    indices, count = _padded.nonzero_padded(self)
    n = int(count.item())
    return _first(indices, n * self.ndim).as_strided((n, self.ndim), (1, n))


def masked_select(self: Tensor, mask: Tensor) -> Tensor:
    values, count = _padded.masked_select_padded(self, mask)
    return _first(values, int(count.item()))


def _unique(
    self: Tensor, dim: int | None, sort: bool, return_inverse: bool, return_counts: bool
) -> tuple[Tensor, Tensor, Tensor]:
    values, inverse, counts, count = _padded.unique_padded(self, dim, sort)
    n = int(count.item())
    none = self.new_empty((0,), dtype=torch.int64)
    values, counts = _first(values, n).movedim(0, dim or 0), _first(counts, n)
    return values, inverse if return_inverse else none, counts if return_counts else none


def unique(self: Tensor, sorted: bool = True, return_inverse: bool = False) -> tuple[Tensor, Tensor]:
    return _unique(self, None, True, return_inverse, False)[:2]


def unique2(
    self: Tensor, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Sorted whether asked for or not, as on the CPU."""
    return _unique(self, None, True, return_inverse, return_counts)


def unique_dim(
    self: Tensor, dim: int, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """PyTorch returns inverse and counts here whether asked for or not."""
    return _slices(self, dim, True)


def unique_consecutive(
    self: Tensor, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    if dim is not None:
        return _slices(self, dim, False)
    return _unique(self, None, False, return_inverse, return_counts)


def _slices(self: Tensor, dim: int, sort: bool) -> tuple[Tensor, Tensor, Tensor]:
    dim %= max(self.ndim, 1)
    torch._check(
        self.numel() > 0 or (self.shape[dim] == 0 and 0 not in (*self.shape[:dim], *self.shape[dim + 1 :])),
        lambda: "There are 0 sized dimensions, and they aren't selected, so unique cannot be applied",
    )
    return _unique(self, dim, sort, True, True)


def bincount(self: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    torch._check(minlength >= 0, lambda: "minlength should be >= 0")
    torch._check(
        self.ndim == 1 and not self.is_floating_point() and not self.is_complex(),
        lambda: "bincount only supports 1-d non-negative integral inputs.",
    )
    torch._check(
        weights is None or (weights.ndim == 1 and weights.shape == self.shape),
        lambda: "weights should be 1-d and have the same length as input",
    )
    dtype = torch.int64 if weights is None else torch.float32 if weights.dtype == torch.float32 else torch.float64
    if self.numel() == 0:
        return torch.zeros((minlength,), dtype=torch.int64, device=self.device)
    low, high = torch.stack(torch.aminmax(self.long())).tolist()
    torch._check(low >= 0, lambda: "bincount only supports 1-d non-negative integral inputs.")
    size = max(high + 1, minlength)
    ones = torch.ones_like(self, dtype=dtype) if weights is None else weights.to(dtype)
    return torch.zeros((_bucket(size),), dtype=dtype, device=self.device).scatter_add(0, self.long(), ones)[:size]


def repeat_interleave(repeats: Tensor, *, output_size: int | None = None) -> Tensor:
    torch._check(repeats.ndim == 1, lambda: "repeat_interleave only accept 1D vector as repeat")
    torch._check(repeats.dtype in (torch.int32, torch.int64), lambda: "repeats has to be Long or Int tensor")
    if repeats.numel() == 0:
        return torch.empty_like(repeats)
    if output_size is not None:
        return _padded.repeat_interleave(repeats, output_size=output_size)
    low, total = torch.stack((repeats.min().long(), repeats.sum())).tolist()
    torch._check(low >= 0, lambda: "repeats can not be negative")
    return _padded.repeat_interleave(repeats, output_size=_bucket(total))[:total]


# ---- operators on a tensor's memory, for which a storage offset is not a run-time operand ---------------------------
def as_strided_copy(self: Tensor, size: list[int], stride: list[int], storage_offset: int | None = None) -> Tensor:
    return self.as_strided(size, stride, storage_offset).clone(memory_format=torch.contiguous_format)


def as_strided_scatter(
    self: Tensor, src: Tensor, size: list[int], stride: list[int], storage_offset: int | None = None
) -> Tensor:
    """Also behind what ``self`` shows of its memory, as on the CPU."""
    count = self.untyped_storage().nbytes() // self.element_size()
    memory = self.as_strided((count,), (1,), 0).clone()
    memory.as_strided(size, stride, self.storage_offset() if storage_offset is None else storage_offset).copy_(src)
    return memory.as_strided(self.shape, self.stride(), self.storage_offset())


def validate_compressed_sparse_indices(
    is_crow: bool, compressed: Tensor, plain: Tensor, cdim: int, dim: int, nnz: int
) -> tuple[()]:
    """The invariants of a compressed layout, checked by PyTorch's CPU kernel: their answer is an exception, now."""
    torch._validate_compressed_sparse_indices(is_crow, compressed.cpu(), plain.cpu(), cdim, dim, nnz)
    return ()


def padded_dense_to_jagged_forward(dense: Tensor, offsets: list[Tensor], total: int | None = None) -> Tensor:
    """All the rows' lengths added are data if nobody says them."""
    return _padded.padded_to_jagged(dense, offsets, int(offsets[-1][-1].item()) if total is None else total)


#: ATen overload -> the function that computes it outside of a trace.
def _with_listed_scalars(op: Any) -> Callable[..., Any]:
    """A foreach operator whose scalars come packed in a CPU tensor, as the overload that takes a list of them."""

    def composite(self: list[Tensor], tensor1: list[Tensor], tensor2: list[Tensor], scalars: Tensor) -> Any:
        results = op.ScalarList(self, tensor1, tensor2, scalars.tolist())
        return () if results is None else results

    return composite


def _written_out(composite: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The ``out=`` form of a composite."""

    def written(*args: Any, out: Tensor) -> Tensor:
        result = composite(*args)
        torch._check(
            out.dtype == result.dtype,
            lambda: f"Expected out tensor to have dtype {result.dtype}, but got {out.dtype} instead",
        )
        if out.shape != result.shape:
            out.resize_(result.shape).as_strided_(result.shape, result.stride())
        return out.copy_(result)

    return written


_PACKED = ("_foreach_addcdiv", "_foreach_addcdiv_", "_foreach_addcmul", "_foreach_addcmul_")

HOST_COMPOSITES: dict[str, Callable[..., Any]] = {
    **{f"{name}.Tensor": _with_listed_scalars(getattr(torch.ops.aten, name)) for name in _PACKED},
    "nonzero": nonzero,
    "masked_select": masked_select,
    "nonzero.out": _written_out(nonzero),
    "masked_select.out": _written_out(masked_select),
    "_unique": unique,
    "_unique2": unique2,
    "unique_dim": unique_dim,
    "unique_consecutive": unique_consecutive,
    "bincount": bincount,
    "repeat_interleave.Tensor": repeat_interleave,
    "as_strided_copy": as_strided_copy,
    "as_strided_scatter": as_strided_scatter,
    "_validate_compressed_sparse_indices": validate_compressed_sparse_indices,
    "_padded_dense_to_jagged_forward": padded_dense_to_jagged_forward,
    "arange.out": arange_end_out,
    "arange.start_out": arange_out,
    "random_.from": random_from,
}
