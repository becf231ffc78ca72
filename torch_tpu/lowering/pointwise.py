"""Element-wise operators."""

from __future__ import annotations

from torch_tpu.lowering.registry import Promotion, lower
from torch_tpu.stablehlo import Value, ops as hlo


@lower("add.Tensor", "add.Scalar", promote=Promotion.DEFAULT)
def add(x: Value, y: Value, alpha: Value | int = 1) -> Value:
    return hlo.add(x, y if isinstance(alpha, int) and alpha == 1 else y * alpha)
