"""The element-wise ``prims`` operators, into which PyTorch's reference decompositions bottom out.

They mean what the ATen operators of the table mean, on operands that are promoted and broadcast already.
"""

from __future__ import annotations

import torch

from torch_tpu.lowering import activation, comparison, complex, pointwise, special
from torch_tpu.lowering.common import Scalar, as_value
from torch_tpu.lowering.registry import Promotion, lower, registered
from torch_tpu.stablehlo import Type, Value
from torch_tpu.stablehlo import ops as hlo

assert all((activation, comparison, complex, pointwise, special))  # the families whose rules are named below

_SAME_NAME = """
    abs acos acosh asin asinh atan atanh atan2 bitwise_not ceil conj_physical cos cosh digamma erf erfc exp exp2 expm1
    floor fmax fmin gcd hypot igamma igammac isfinite lgamma log log10 log1p log2 maximum minimum neg nextafter
    reciprocal round rsqrt sign sin sinh sqrt tan tanh trunc
"""

#: prims operator -> ATen overload
ALIASES: dict[str, str] = {
    **{name: name for name in _SAME_NAME.split()},
    **{name: f"{name}.Tensor" for name in ("add", "sub", "mul", "fmod", "remainder")},
    **{name: f"{name}.Tensor" for name in ("bitwise_and", "bitwise_or", "bitwise_xor")},
    **{name: f"{name}.Tensor" for name in ("eq", "ne", "lt", "le", "gt", "ge", "frexp")},
    "bessel_i0": "i0",
    "bessel_i0e": "special_i0e",
    "bessel_i1": "special_i1",
    "bessel_i1e": "special_i1e",
    "bessel_j0": "special_bessel_j0",
    "bessel_j1": "special_bessel_j1",
    "erf_inv": "erfinv",
    "erfcx": "special_erfcx",
    "ndtri": "special_ndtri",
    "pow": "pow.Tensor_Tensor",
    "shift_left": "bitwise_left_shift.Tensor",
    "shift_right_arithmetic": "bitwise_right_shift.Tensor",
    "spherical_bessel_j0": "special_spherical_bessel_j0",
    "zeta": "special_zeta",
}

for _prim, _aten in ALIASES.items():
    _rule = registered(_aten)
    lower(f"prims::{_prim}", promote=_rule.promote, promoted=_rule.promoted)(_rule.function)

lower("prims::div", promote=Promotion.DEFAULT)(hlo.divide)
lower("prims::cbrt", promote=Promotion.DEFAULT)(hlo.cbrt)
lower("prims::where", promote=Promotion.NO_OPMATH, promoted=("a", "b"))(comparison.where)


@lower("prims::convert_element_type")
def convert_element_type(x: Value, dtype: torch.dtype) -> Value:
    return hlo.convert(x, dtype)


@lower("prims::device_put")
def device_put(x: Value, device: torch.device, non_blocking: bool = False) -> Value:
    return x


@lower("prims::clone", "prims::copy_strided")
def clone(x: Value, strides: object = None) -> Value:
    return x


@lower("prims::fill")
def fill(x: Value, value: Scalar) -> Value:
    return as_value(value, x.dtype, x.shape)


@lower("prims::copy_to")
def copy_to(x: Value, source: Value, *, result: list[Type]) -> Value:
    return hlo.broadcast_to(hlo.convert(source, x.dtype), x.shape)
