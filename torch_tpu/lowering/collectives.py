"""Functional collectives as StableHLO, in a program that runs on all devices of a partition.

Where processes run programs of their own, graphs are cut at collectives (``compile/segments.py``) and none of this is
used.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

from torch_tpu.distributed import partition
from torch_tpu.lowering.registry import lower
from torch_tpu.stablehlo import Type, Value
from torch_tpu.stablehlo import ops as hlo
from torch_tpu.stablehlo.builder import current

_COMBINE: dict[str, Callable[[Value, Value], Value]] = {
    "sum": hlo.add, "avg": hlo.add, "product": hlo.multiply, "min": hlo.minimum, "max": hlo.maximum, "band": hlo.and_,
    "bor": hlo.or_, "bxor": hlo.xor,
}  # fmt: skip

_channels = itertools.count(1)


def _groups(name: str) -> tuple[str, int]:
    """The attributes that say which devices take part, and how many do."""
    mesh = partition.current()
    if mesh is None:
        raise NotImplementedError("A collective can be part of a program only where that runs on a mesh of devices.")
    rows = mesh.groups(name)
    text = ", ".join("[" + ", ".join(map(str, row)) + "]" for row in rows)
    return (
        f"channel_handle = #stablehlo.channel_handle<handle = {next(_channels)}, type = 1>, "
        f"replica_groups = dense<[{text}]> : tensor<{len(rows)}x{len(rows[0])}xi64>, use_global_device_ids"
    ), len(rows[0])


def _reducing(name: str, x: Value, result: Type, op: str, attributes: str) -> Value:
    if op not in _COMBINE:
        raise NotImplementedError(f"There is no reduction {op!r}; there are {', '.join(_COMBINE)}.")
    scalar = Type((), x.dtype)
    with current().region(scalar, scalar) as ((a, b), region):
        current().return_(_COMBINE[op](a, b))
    text = f'"stablehlo.{name}"({x.name}) ({region[0]}) {{{attributes}}} : ({x.type}) -> ({result})'
    return current().emit(text, result, pure=False)[0]


def _mean(x: Value, op: str, count: int) -> Value:
    return hlo.divide(x, count) if op == "avg" else x


@lower("_c10d_functional::wait_tensor")
def wait_tensor(tensor: Value) -> Value:
    return tensor


@lower("_c10d_functional::all_reduce")
def all_reduce(x: Value, reduce_op: str, group_name: str) -> Value:
    attributes, count = _groups(group_name)
    return _mean(_reducing("all_reduce", x, x.type, reduce_op, attributes), reduce_op, count)


@lower("_c10d_functional::all_gather_into_tensor")
def all_gather_into_tensor(x: Value, group_size: int, group_name: str) -> Value:
    attributes, count = _groups(group_name)
    result = Type((x.shape[0] * count, *x.shape[1:]), x.dtype)
    return current().op("all_gather", [x], result, f"all_gather_dim = 0 : i64, {attributes}", pure=False)


@lower("_c10d_functional::reduce_scatter_tensor")
def reduce_scatter_tensor(x: Value, reduce_op: str, group_size: int, group_name: str) -> Value:
    attributes, count = _groups(group_name)
    result = Type((x.shape[0] // count, *x.shape[1:]), x.dtype)
    scattered = _reducing("reduce_scatter", x, result, reduce_op, f"scatter_dimension = 0 : i64, {attributes}")
    return _mean(scattered, reduce_op, count)


@lower("_c10d_functional::all_to_all_single")
def all_to_all_single(x: Value, output_splits: list[int], input_splits: list[int], group_name: str) -> Value:
    attributes, count = _groups(group_name)
    if len({*output_splits, *input_splits}) > 1:
        raise NotImplementedError("all_to_all_single with unequal parts cannot be part of a program.")
    dims = f"split_dimension = 0 : i64, concat_dimension = 0 : i64, split_count = {count} : i64"
    attributes = attributes.removesuffix(", use_global_device_ids")
    return current().op("all_to_all", [x], x.type, f"{dims}, {attributes}", pure=False)


@lower("tpu::optimization_barrier")
def optimization_barrier(x: Value) -> Value:
    return hlo.optimization_barrier(x)[0]
