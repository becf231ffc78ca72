"""Element types and the typed SSA values that rules compute with."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from torch_tpu.stablehlo.builder import Function

Shape = tuple[int, ...]

#: torch dtype -> StableHLO element type (the specification's names).
ELEMENT_TYPE: dict[torch.dtype, str] = {
    torch.bool: "i1",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "ui8",
    torch.uint16: "ui16",
    torch.uint32: "ui32",
    torch.uint64: "ui64",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float32: "f32",
    torch.float64: "f64",
    torch.complex64: "complex<f32>",
    torch.complex128: "complex<f64>",
    torch.float8_e4m3fn: "f8E4M3FN",
    torch.float8_e5m2: "f8E5M2",
    torch.float8_e4m3fnuz: "f8E4M3FNUZ",
    torch.float8_e5m2fnuz: "f8E5M2FNUZ",
    torch.float8_e8m0fnu: "f8E8M0FNU",
}


class Type(NamedTuple):
    """The type of an array: static shape and torch dtype."""

    shape: Shape
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def __str__(self) -> str:
        return tensor_type(self.shape, self.dtype)


def tensor_type(shape: Shape, dtype: torch.dtype) -> str:
    """``tensor<2x3xf32>``.

    Raises:
        TypeError: ``dtype`` has no StableHLO element type.
    """
    return _tensor_type(tuple(shape), dtype)


@functools.cache
def _tensor_type(shape: Shape, dtype: torch.dtype) -> str:
    element = ELEMENT_TYPE.get(dtype)
    if element is None:
        raise TypeError(f"{dtype} is not supported on tpu; the supported dtypes are {sorted(map(str, ELEMENT_TYPE))}.")
    return "tensor<" + "".join(f"{d}x" for d in shape) + element + ">"


class Value:
    """One SSA value of a function under construction.

    Arithmetic operators require equal types, as StableHLO does; Python numbers become constants of the value's type.
    Rules that need PyTorch's promotion and broadcasting declare it at registration instead.
    """

    __slots__ = ("dtype", "fact", "function", "name", "reshape_of", "shape", "transpose_of")

    def __init__(self, name: str, shape: Shape, dtype: torch.dtype, function: Function) -> None:
        self.name = name
        self.shape = shape
        self.dtype = dtype
        self.function = function
        #: the operand and permutation, if a transpose gave this value
        self.transpose_of: tuple[Value, tuple[int, ...]] | None = None
        #: the operand, if a reshape gave this value
        self.reshape_of: Value | None = None
        #: what the rule that made this value lets other rules of the program know
        self.fact: object = None

    @property
    def type(self) -> Type:
        return Type(self.shape, self.dtype)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def __repr__(self) -> str:
        return f"{self.name}: {tensor_type(self.shape, self.dtype)}"

    def __bool__(self) -> bool:
        raise TypeError("A traced value has no truth value: use select(), or make the argument static in the rule.")

    if TYPE_CHECKING:  # the operators are bound by ops.py, which owns the vocabulary

        def _operator(self, other: Value | complex) -> Value: ...

        __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __and__ = _operator
        __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = __lt__ = __le__ = __gt__ = __ge__ = _operator

        def __neg__(self) -> Value: ...

        def __invert__(self) -> Value: ...
