"""Reductions of consecutive segments (``torch.segment_reduce``), forward and backward: ATen's ``SegmentReduce.cpp``."""

from __future__ import annotations

import math

from torch_tpu.lowering.common import Scalar, as_value, compute_dtype
from torch_tpu.lowering.reduction import is_nan, total
from torch_tpu.lowering.registry import lower
from torch_tpu.lowering.scan import scan
from torch_tpu.stablehlo import Type, Value
from torch_tpu.stablehlo import ops as hlo

_START = {"max": -math.inf, "min": math.inf, "sum": 0.0, "mean": 0.0, "prod": 1.0}
_COMBINE = {"max": hlo.maximum, "min": hlo.minimum, "sum": hlo.add, "mean": hlo.add, "prod": hlo.multiply}


class _Segments:
    """The data as ``[batch, elements, rest]`` and which of the elements each segment has.

    Attributes:
        data: ``[batch, segments, elements, rest]``, the data once for each segment; XLA fuses it into what follows.
        inside: Where the element belongs to the segment, of the same shape.
        lengths: ``[batch, segments, rest]``, of the data's dtype.
    """

    def __init__(self, data: Value, lengths: Value | None, offsets: Value | None, axis: int) -> None:
        batch, n = math.prod(data.shape[:axis]), data.shape[axis]
        rest = math.prod(data.shape[axis + 1 :])
        if offsets is not None:
            bounds = hlo.reshape(offsets, (batch, offsets.shape[-1]))
            count = bounds.shape[1] - 1
            first, last = hlo.slice_dim(bounds, 1, 0, count), hlo.slice_dim(bounds, 1, 1, count + 1)
        else:
            assert lengths is not None
            sizes = hlo.reshape(lengths, (batch, lengths.shape[-1]))
            count = sizes.shape[1]
            last = scan(sizes, 1, 0, hlo.add)
            first = last - sizes
        self.shape = (batch, count, n, rest)
        self.flat = (batch, count, rest)
        self.data = self.of_elements(hlo.reshape(hlo.convert(data, compute_dtype(data.dtype)), (batch, n, rest)))
        place = hlo.iota(self.shape, 2, first.dtype)
        low, high = (hlo.broadcast_in_dim(v, self.shape, [0, 1]) for v in (first, last))
        self.inside = hlo.compare(place, low, "GE") & hlo.compare(place, high, "LT")
        self.lengths = hlo.convert(hlo.broadcast_in_dim(last - first, self.flat, [0, 1]), self.data.dtype)

    def of_elements(self, x: Value) -> Value:
        """``[batch, elements, rest]`` once for each segment."""
        return hlo.broadcast_in_dim(x, self.shape, [0, 2, 3])

    def of_segments(self, x: Value) -> Value:
        """A result of the operator once for each element."""
        return hlo.broadcast_in_dim(hlo.reshape(hlo.convert(x, self.data.dtype), self.flat), self.shape, [0, 1, 3])


@lower("segment_reduce", static=("initial",))
def segment_reduce(
    data: Value, reduce: str, *, lengths: Value | None, indices: Value | None, offsets: Value | None, axis: int,
    unsafe: bool, initial: float | None, result: list[Type],
) -> Value:  # fmt: skip
    s = _Segments(data, lengths, offsets, axis % data.ndim)
    start = _START[reduce] if initial is None else float(initial)
    combine = _COMBINE[reduce]
    values = hlo.select(s.inside, s.data, _START[reduce])
    out = combine(hlo.reduce_one(values, _START[reduce], [2], combine), start)
    if reduce == "mean":
        empty = hlo.compare(s.lengths, 0, "EQ")
        nothing = math.nan if initial is None else start
        out = hlo.select(empty, nothing, hlo.divide(out, hlo.maximum(s.lengths, 1)))
    return hlo.reshape(hlo.convert(out, result[0].dtype), result[0].shape)


@lower("_segment_reduce_backward", static=("initial",))
def segment_reduce_backward(
    grad: Value, output: Value, data: Value, reduce: str, *, lengths: Value | None, offsets: Value | None, axis: int,
    initial: Scalar | None, result: list[Type],
) -> Value:  # fmt: skip
    s = _Segments(data, lengths, offsets, axis % data.ndim)
    g, y, x = s.of_segments(grad), s.of_segments(output), s.data
    if reduce in ("max", "min"):
        chosen = s.inside & (hlo.compare(x, y, "EQ") | is_nan(x))
        count = total(hlo.convert(chosen, x.dtype), [2], keepdim=True)
        # Several extrema share their gradient, as on the CPU only if it is positive.
        shared = hlo.divide(g, hlo.maximum(hlo.broadcast_to(count, s.shape), 1))
        g = hlo.select(chosen, hlo.select(g > 0, shared, g), 0)
    elif reduce == "mean":
        g = hlo.divide(g, hlo.broadcast_in_dim(hlo.maximum(s.lengths, 1), s.shape, [0, 1, 3]))
    elif reduce == "prod":
        zero = hlo.compare(x, 0, "EQ") & s.inside
        zeros = hlo.broadcast_to(total(hlo.convert(zero, x.dtype), [2], keepdim=True), s.shape)
        others = hlo.reduce_one(hlo.select(s.inside & ~zero, x, 1.0), 1.0, [2], hlo.multiply)
        others = hlo.broadcast_in_dim(others, s.shape, [0, 1, 3])
        others = others * as_value(1.0 if initial is None else initial, x.dtype, s.shape)
        alone = hlo.select(hlo.compare(zeros, 1, "EQ"), others, 0)
        g = g * hlo.select(zero, alone, hlo.divide(y, x))
    out = total(hlo.select(s.inside, g, 0), [1])
    return hlo.reshape(hlo.convert(out, result[0].dtype), result[0].shape)
