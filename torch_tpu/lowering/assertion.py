"""Assertions about data: raised at the next synchronisation."""

from __future__ import annotations

import torch

from torch_tpu.lowering.common import tracer
from torch_tpu.lowering.registry import lower
from torch_tpu.stablehlo import Value
from torch_tpu.stablehlo import ops as hlo


def _check(x: Value, text: str) -> None:
    if x.numel != 1:
        raise RuntimeError(
            "Boolean value of Tensor with "
            + ("more than one value is ambiguous" if x.numel else "no values is ambiguous")
        )
    tracer().check(~hlo.convert(hlo.reshape(x, ()), torch.bool), text)


@lower("_assert_async", meta=lambda x: None)
def assert_async(x: Value) -> list[Value]:
    _check(x, "Expected Tensor with single nonzero value, but got zero")
    return []


@lower("_assert_async.msg", meta=lambda x, text: None)
def assert_async_message(x: Value, assert_msg: str) -> list[Value]:
    _check(x, assert_msg)
    return []
