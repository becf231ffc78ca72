"""A text builder for StableHLO: types, values, a thin op vocabulary, modules. Independent of PyTorch operators."""

from torch_tpu.stablehlo.builder import Function, Work, current
from torch_tpu.stablehlo.types import ELEMENT_TYPE, Shape, Type, Value, tensor_type

__all__ = ["ELEMENT_TYPE", "Function", "Shape", "Type", "Value", "Work", "current", "tensor_type"]
