"""``torch.histogram`` and ``torch.histogramdd`` (ATen's ``Histogram.cpp``)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from torch_tpu.lowering.reduction import largest, smallest, spread, total
from torch_tpu.lowering.registry import lower
from torch_tpu.stablehlo import Value
from torch_tpu.stablehlo import ops as hlo


def _edges(x: Value, bins: int, bounds: Sequence[float] | None) -> Value:
    """``bins + 1`` evenly spaced edges over the bounds or all of ``x`` (shape [n]), as ``torch.linspace`` has them."""
    if bounds is not None:
        low, high = (hlo.constant(v, x.dtype) for v in bounds)
    elif x.numel:
        low, high = smallest(x, [0]), largest(x, [0])
    else:
        low, high = hlo.constant(0, x.dtype), hlo.constant(1, x.dtype)
    same = hlo.compare(low, high, "EQ")
    low, high = hlo.select(same, low - 0.5, low), hlo.select(same, high + 0.5, high)
    place = hlo.iota((bins + 1,), 0, x.dtype)
    low, high = (hlo.broadcast_to(v, place.shape) for v in (low, high))
    step = hlo.divide(high - low, bins)
    return hlo.select(place < (bins + 1) // 2, low + step * place, high - step * (bins - place))


def _bins(x: Value, edges: Value) -> Value:
    """The bin of each element of ``x``, int32 [n]: left edges belong to bins, and the last right one; -1 outside."""
    bins = edges.numel - 1
    shape = (x.numel, bins + 1)
    reached = hlo.compare(hlo.broadcast_in_dim(x, shape, [0]), hlo.broadcast_in_dim(edges, shape, [1]), "GE")
    count = total(hlo.convert(reached, torch.int32), [1])
    last = spread(hlo.reshape(hlo.slice_dim(edges, 0, bins, bins + 1), ()), x)
    place = hlo.minimum(count - 1, bins - 1)
    return hlo.select(hlo.compare(x, last, "LE"), place, -1)


def _counts(places: Value, size: int, weight: Value | None, dtype: torch.dtype) -> Value:
    """How often, or with what weight, each of ``size`` places occurs."""
    shape = (places.numel, size)
    hit = hlo.compare(hlo.broadcast_in_dim(places, shape, [0]), hlo.iota(shape, 1, torch.int32), "EQ")
    if weight is None:
        return hlo.convert(total(hlo.convert(hit, torch.int32), [0]), dtype)
    weight = hlo.broadcast_in_dim(hlo.reshape(hlo.convert(weight, dtype), (places.numel,)), shape, [0])
    return total(hlo.select(hit, weight, 0), [0])


def _histogram(x: Value, edges: list[Value], weight: Value | None, density: bool) -> Value:
    """The histogram of the rows of ``x``, shape [n, len(edges)]."""
    sizes = [e.numel - 1 for e in edges]
    places = hlo.constant(0, torch.int32, (x.shape[0],))
    outside = hlo.constant(False, torch.bool, places.shape)
    for i, e in enumerate(edges):
        at = _bins(hlo.reshape(hlo.slice_dim(x, 1, i, i + 1), places.shape), e)
        outside = outside | (at < 0)
        places = places * sizes[i] + at
    counts = _counts(hlo.select(outside, -1, places), math.prod(sizes), weight, x.dtype)
    counts = hlo.reshape(counts, sizes)
    if density:
        counts = hlo.divide(counts, spread(total(counts, range(counts.ndim)), counts))
        for i, e in enumerate(edges):
            width = hlo.slice_dim(e, 0, 1, sizes[i] + 1) - hlo.slice_dim(e, 0, 0, sizes[i])
            counts = hlo.divide(counts, hlo.broadcast_in_dim(width, counts.shape, [i]))
    return counts


def _count_meta(x: Tensor, bins: int = 100, **_: object) -> tuple[Tensor, Tensor]:
    return x.new_empty((bins,)), x.new_empty((bins + 1,))


def _edges_meta(x: Tensor, bins: Tensor, **_: object) -> tuple[Tensor, Tensor]:
    return x.new_empty((bins.numel() - 1,)), torch.empty_like(bins)


@lower("histogram.bin_ct", meta=_count_meta)
def histogram(
    x: Value, bins: int, *, range: Sequence[float] | None, weight: Value | None, density: bool
) -> list[Value]:
    rows = hlo.reshape(x, (x.numel, 1))
    edges = _edges(hlo.reshape(x, (x.numel,)), bins, range)
    return [_histogram(rows, [edges], weight, density), edges]


@lower("histogram.bins_tensor", meta=_edges_meta)
def histogram_of_edges(x: Value, bins: Value, *, weight: Value | None, density: bool) -> list[Value]:
    return [_histogram(hlo.reshape(x, (x.numel, 1)), [bins], weight, density), bins]


def _check_bins(x: Tensor, bins: Sequence[int | Tensor]) -> None:
    torch._check(
        x.ndim > 0 and x.shape[-1] == len(bins),
        lambda: "histogramdd: The size of bins must be equal to the innermost dimension of the input.",
    )


def _all_edges_meta(x: Tensor, bins: Sequence[int], **_: object) -> list[Tensor]:
    _check_bins(x, bins)
    return [x.new_empty((n + 1,)) for n in bins]


def _all_counts_meta(x: Tensor, bins: Sequence[int | Tensor], **_: object) -> Tensor:
    _check_bins(x, bins)
    return x.new_empty(tuple(b if isinstance(b, int) else b.numel() - 1 for b in bins))


def _rows(x: Value) -> Value:
    return hlo.reshape(x, (x.numel // max(x.shape[-1], 1), x.shape[-1]))


def _all_edges(x: Value, bins: Sequence[int], bounds: Sequence[float] | None) -> list[Value]:
    x = _rows(x)
    columns = [hlo.reshape(hlo.slice_dim(x, 1, i, i + 1), (x.shape[0],)) for i, _ in enumerate(bins)]
    pairs = [None if bounds is None else bounds[2 * i : 2 * i + 2] for i, _ in enumerate(bins)]
    return [_edges(c, n, b) for c, n, b in zip(columns, bins, pairs, strict=True)]


@lower("_histogramdd_bin_edges", meta=_all_edges_meta)
def histogramdd_edges(
    x: Value, bins: Sequence[int], *, range: Sequence[float] | None, weight: Value | None, density: bool
) -> list[Value]:
    return _all_edges(x, bins, range)


@lower("_histogramdd_from_bin_cts", meta=_all_counts_meta)
def histogramdd(
    x: Value, bins: Sequence[int], *, range: Sequence[float] | None, weight: Value | None, density: bool
) -> Value:
    return _histogram(_rows(x), _all_edges(x, bins, range), weight, density)


@lower("_histogramdd_from_bin_tensors", meta=_all_counts_meta)
def histogramdd_of_edges(x: Value, bins: Sequence[Value], *, weight: Value | None, density: bool) -> Value:
    return _histogram(_rows(x), list(bins), weight, density)
