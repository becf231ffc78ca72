"""Sorting and what follows from it: top-k, order statistics, binary search.

NaN is the greatest value, and equal values keep their order.
"""

from __future__ import annotations

import torch
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND, elementwise_dtypes

from torch_tpu.lowering.common import Scalar, ScalarOperand, as_value, for_cpu
from torch_tpu.lowering.reduction import extreme_with_index, is_nan, total
from torch_tpu.lowering.registry import lower
from torch_tpu.lowering.scan import scan
from torch_tpu.stablehlo import Type, Value
from torch_tpu.stablehlo import ops as hlo

_INDEX = torch.int32


def take_along(x: Value, index: Value, dim: int) -> Value:
    """``torch.gather`` for in-range ``index``: the other dimensions of ``x`` and ``index`` agree."""
    others = [i for i in range(x.ndim) if i != dim]
    return hlo.gather(
        x, hlo.expand_dims(index, [index.ndim]), offset_dims=[], collapsed_dims=[dim], index_map=[dim],
        slice_sizes=[1] * x.ndim, operand_batching_dims=others, indices_batching_dims=others,
    )  # fmt: skip


def _before(a: Value, b: Value, descending: bool) -> Value:
    strictly = hlo.compare(a, b, "GT" if descending else "LT")
    if not a.dtype.is_floating_point:
        return strictly
    return strictly | (is_nan(a) & ~is_nan(b) if descending else is_nan(b) & ~is_nan(a))


def _packed_sort(x: Value, dim: int, descending: bool) -> tuple[Value, Value]:
    """A stable sort of numbers of at most 32 bits as one sort of int64 without a comparator of its own.

    From the top: 32 bits that order as the numbers do, 31 bits of position, one bit that tells -0 from 0.
    """
    negative_zero = hlo.constant(False, torch.bool, x.shape)
    wide = hlo.convert(x, torch.int64)
    if x.dtype.is_floating_point:
        y = hlo.convert(x, torch.float32)
        bits = hlo.bitcast_convert(hlo.select(is_nan(y), float("nan"), y), torch.int32)
        negative_zero = hlo.compare(bits, torch.iinfo(torch.int32).min, "EQ")
        bits = hlo.select(negative_zero, 0, hlo.select(bits < 0, hlo.xor(bits, torch.iinfo(torch.int32).max), bits))
        wide = hlo.convert(bits, torch.int64)
    wide = hlo.not_(wide) if descending else wide
    low = hlo.iota(x.shape, dim, torch.int64) * 2 + hlo.convert(negative_zero, torch.int64)
    packed = hlo.sort([hlo.shift_left(wide, 32) + low], dim, lambda a, b: a[0] < b[0], stable=False)[0]
    positions = hlo.convert(hlo.shift_right_logical(hlo.shift_left(packed, 32), 33), _INDEX)
    wide = hlo.shift_right_arithmetic(packed, 32)
    wide = hlo.not_(wide) if descending else wide
    if not x.dtype.is_floating_point:
        return hlo.convert(wide, x.dtype), positions
    bits = hlo.convert(wide, torch.int32)
    bits = hlo.select(bits < 0, hlo.xor(bits, torch.iinfo(torch.int32).max), bits)
    y = hlo.bitcast_convert(bits, torch.float32)
    return hlo.convert(hlo.select(hlo.compare(hlo.and_(packed, 1), 1, "EQ"), -0.0, y), x.dtype), positions


def sorted_with_positions(x: Value, dim: int, descending: bool = False) -> tuple[Value, Value]:
    """Stable sort of one dimension and the int32 positions where its values stood."""
    if x.dtype.is_complex:
        raise NotImplementedError(f"Complex numbers have no order: {x.dtype} cannot be sorted.")
    if for_cpu() and not x.dtype.is_complex and (x.dtype.itemsize < 4 or x.dtype in (torch.float32, torch.int32)):
        return _packed_sort(x, dim, descending)
    positions = hlo.iota(x.shape, dim, _INDEX)
    values, order = hlo.sort([x, positions], dim, lambda left, right: _before(left[0], right[0], descending))
    return values, order


def _axis(x: Value, dim: int) -> tuple[Value, int]:
    n = max(x.ndim, 1)
    if not -n <= dim < n:  # some of PyTorch's meta kernels do not look
        raise IndexError(f"Dimension out of range (expected to be in range of [{-n}, {n - 1}], but got {dim})")
    return (hlo.reshape(x, (1,)), 0) if x.ndim == 0 else (x, dim % x.ndim)


def _shaped(values: tuple[Value, ...] | list[Value], result: list[Type]) -> list[Value]:
    return [hlo.reshape(hlo.convert(v, t.dtype), t.shape) for v, t in zip(values, result, strict=True)]


@lower("sort")
def sort(x: Value, dim: int = -1, descending: bool = False, *, result: list[Type]) -> list[Value]:
    x, dim = _axis(x, dim)
    return _shaped(sorted_with_positions(x, dim, descending), result)


@lower("sort.stable")
def sort_stable(x: Value, *, stable: bool | None, dim: int, descending: bool, result: list[Type]) -> list[Value]:
    return sort(x, dim, descending, result=result)


@lower("topk")
def topk(
    x: Value, k: int, dim: int = -1, largest: bool = True, sorted: bool = True, *, result: list[Type]
) -> list[Value]:
    x, dim = _axis(x, dim)
    halves = (torch.bfloat16, torch.float16)
    if largest and dim == x.ndim - 1 and x.dtype in (torch.float32, *halves) and 0 < k < x.shape[dim]:
        # XLA's TopK compares in total order, where only a positive NaN is above infinity.
        clean = hlo.convert(hlo.select(is_nan(x), float("nan"), x), torch.float32)
        return _shaped(hlo.top_k(clean, k), result)
    values, order = sorted_with_positions(x, dim, descending=largest)
    if not result[0].shape:  # all of a number, for a k of 0 too
        k = 1
    return _shaped([hlo.slice_dim(values, dim, 0, k), hlo.slice_dim(order, dim, 0, k)], result)


# ---- order statistics -----------------------------------------------------------------------------------------------
@lower("kthvalue")
def kthvalue(x: Value, k: int, dim: int = -1, keepdim: bool = False, *, result: list[Type]) -> list[Value]:
    x, dim = _axis(x, dim)
    return _shaped([hlo.slice_dim(v, dim, k - 1, k) for v in sorted_with_positions(x, dim)], result)


def _median(x: Value, dim: int, ignore_nan: bool) -> list[Value]:
    """The lower median of ``dim``, its size kept as one. Any NaN is the answer, unless NaN is ignored and not alone."""
    values, order = sorted_with_positions(x, dim)
    n = x.shape[dim]
    at = hlo.constant((n - 1) // 2, _INDEX, tuple(1 if i == dim else d for i, d in enumerate(x.shape)))
    if x.dtype.is_floating_point:
        missing = total(hlo.convert(is_nan(x), _INDEX), [dim], keepdim=True)
        if ignore_nan:
            at = hlo.maximum(hlo.divide(n - 1 - missing, 2), 0)
        else:  # the first NaN follows the numbers
            at = hlo.select(hlo.compare(missing, 0, "GT"), n - missing, at)
    return [take_along(values, at, dim), take_along(order, at, dim)]


def _register_median(name: str, ignore_nan: bool) -> None:
    @lower(name)
    def whole(x: Value, *, result: list[Type]) -> Value:
        if x.numel == 0:  # NaN; for integers what the CPU makes of it
            return hlo.constant(torch.empty(0, dtype=x.dtype, device="cpu").median().item(), x.dtype)
        return _shaped(_median(hlo.reshape(x, (x.numel,)), 0, ignore_nan)[:1], result)[0]

    @lower(f"{name}.dim")
    def along(x: Value, dim: int, keepdim: bool = False, *, result: list[Type]) -> list[Value]:
        if x.numel == 0:
            return [hlo.constant(0, t.dtype, t.shape) for t in result]
        return _shaped(_median(*_axis(x, dim), ignore_nan), result)


_register_median("median", False)
_register_median("nanmedian", True)


@lower("mode")
def mode(x: Value, dim: int = -1, keepdim: bool = False, *, result: list[Type]) -> list[Value]:
    """The smallest of the most frequent values, and the last position that holds it."""
    if x.numel == 0:
        return [hlo.constant(0, t.dtype, t.shape) for t in result]
    x, dim = _axis(x, dim)
    values, order = sorted_with_positions(x, dim)
    place = hlo.iota(x.shape, dim, _INDEX)
    n = x.shape[dim]
    changes = hlo.compare(hlo.slice_dim(values, dim, 1, n), hlo.slice_dim(values, dim, 0, n - 1), "NE")
    low = [1 if i == dim else 0 for i in range(x.ndim)]
    starts = hlo.pad(changes, True, low, [0] * x.ndim)
    run = place - scan(hlo.select(starts, place, 0), dim, 0, hlo.maximum)  # how often the value came before
    at = hlo.expand_dims(extreme_with_index(run, dim, True)[1], [dim])
    return _shaped([take_along(values, at, dim), take_along(order, at, dim)], result)


# ---- binary search --------------------------------------------------------------------------------------------------
def _search(sequence: Value, x: Value, right: bool, sorter: Value | None) -> Value:
    """Insertion points (int32) of ``x`` [..., m] in the sorted last dimension of ``sequence`` [..., n]."""
    n, dim = sequence.shape[-1], sequence.ndim - 1
    low, high = hlo.constant(0, _INDEX, x.shape), hlo.constant(n, _INDEX, x.shape)
    for _ in range(n.bit_length()):
        middle = hlo.divide(low + high, 2)
        at = hlo.minimum(middle, n - 1)
        if sorter is not None:
            at = take_along(sorter, at, dim)
        here = take_along(sequence, at, dim)
        passed = ~hlo.compare(here, x, "GT" if right else "GE")
        searching = low < high
        low, high = hlo.select(searching & passed, middle + 1, low), hlo.select(searching & ~passed, middle, high)
    return low


def _searched(sequence: Value, x: Scalar, right: bool, sorter: Value | None, result: Type) -> Value:
    """Compares in the promoted dtype; a one-dimensional sequence serves values of every shape."""
    sample = x.sample if isinstance(x, ScalarOperand) else x
    kinds = [
        v if not isinstance(v, Value) else torch.empty(v.shape, dtype=v.dtype, device="meta")
        for v in (sequence, sample)
    ]
    dtype, _ = elementwise_dtypes(*kinds, type_promotion_kind=ELEMENTWISE_TYPE_PROMOTION_KIND.NO_OPMATH)
    values = as_value(x, dtype, x.shape if isinstance(x, Value) else ())
    if 0 in result.shape or sequence.shape[-1] == 0:
        return hlo.constant(0, result.dtype, result.shape)
    if sequence.ndim == 1:
        values = hlo.reshape(values, (values.numel,))
    sorter = None if sorter is None else hlo.convert(sorter, _INDEX)
    found = _search(hlo.convert(sequence, dtype), values, right, sorter)
    return hlo.reshape(hlo.convert(found, result.dtype), result.shape)


@lower("searchsorted.Tensor", "searchsorted.Scalar")
def searchsorted(
    sequence: Value, x: Scalar, *, right: bool, side: str | None, sorter: Value | None, result: list[Type]
) -> Value:
    return _searched(sequence, x, right or side == "right", sorter, result[0])


@lower("bucketize.Tensor", "bucketize.Scalar")
def bucketize(x: Scalar, boundaries: Value, *, right: bool, result: list[Type]) -> Value:
    return _searched(boundaries, x, right, None, result[0])
