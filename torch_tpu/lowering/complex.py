"""Complex numbers: construction, parts, conjugation. Views of their parts (``view_as_real``) are views, not rules."""

from __future__ import annotations

import math

import torch

from torch_tpu.lowering.pointwise import is_nan, is_unsigned
from torch_tpu.lowering.registry import Promotion, lower
from torch_tpu.stablehlo import Type, Value
from torch_tpu.stablehlo import ops as hlo


def conjugate(x: Value) -> Value:
    return hlo.complex_(hlo.real(x), -hlo.imag(x)) if x.dtype.is_complex else x


lower("_conj_physical", "conj_physical")(conjugate)


@lower("complex", promote=Promotion.NO_OPMATH)
def complex_(re: Value, im: Value) -> Value:
    if re.dtype == torch.float16:
        raise TypeError("torch.complex32 is not supported on tpu; convert the parts to float32 first.")
    return hlo.complex_(re, im)


@lower("polar", promote=Promotion.NO_OPMATH)
def polar(size: Value, angle: Value) -> Value:
    return hlo.complex_(size * hlo.cosine(angle), size * hlo.sine(angle))


@lower("angle", promote=Promotion.COMPLEX_TO_FLOAT)
def angle(x: Value, *, result: list[Type]) -> Value:
    """The argument; 0 or pi for real numbers, NaN for NaN."""
    if x.dtype.is_complex:
        return hlo.atan2(hlo.imag(x), hlo.real(x))
    if x.dtype.is_floating_point:
        half_turn = hlo.select(x < 0, hlo.full_like(x, math.pi), hlo.full_like(x, 0))
        return hlo.select(is_nan(x), x, half_turn)
    numbers = [hlo.constant(v, result[0].dtype, x.shape) for v in (math.pi, 0)]
    return numbers[1] if is_unsigned(x) else hlo.select(x < 0, *numbers)
