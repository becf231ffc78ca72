"""Runs one operator's program on the CPU plugin without the device, and compares it with PyTorch on CPU.

For tests of rules alone: the call is traced exactly as the eager kernel would trace it.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_map

from torch_tpu import _C
from torch_tpu.lowering import view
from torch_tpu.stablehlo import Type
from torch_tpu.tracing.program import HostScalar, NumberArgument, NumbersArgument, Plan, TensorArgument, build
from torch_tpu.tracing.schema import op_info

FLAGS = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_enable_fast_min_max": False,
}


@functools.cache
def client() -> Any:
    spec = importlib.util.find_spec("xla_plugins.xla_cpu_pjrt")
    assert spec is not None and spec.origin is not None
    return _C.PjrtClient(str(Path(spec.origin).parent / "xla_cpu_pjrt.so"), {})


def _to_numpy(t: torch.Tensor) -> np.ndarray:
    if t.dtype == torch.bfloat16:
        return t.view(torch.uint16).numpy()
    return t.numpy()


def _exact(number: Any) -> torch.Tensor:
    wide = {float: torch.float64, complex: torch.complex128}
    return torch.tensor(number, dtype=wide.get(type(number)))


class Call:
    """One call of ``op`` on CPU tensors, described as the eager kernel describes it."""

    def __init__(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.op = op
        self.bases: list[torch.Tensor] = []
        self.offsets: list[int] = []
        self.lazy_bits: list[tuple[bool, bool]] = []
        self.numbers: list[Any] = []
        self.lists: list[list[Any]] = []
        rule = op_info(op).rule
        self.static = None if rule is None else rule.static
        self.runtime = frozenset() if rule is None else rule.runtime
        self.arguments = []
        for i, a in enumerate(op._schema.arguments):
            value = args[i] if i < len(args) else kwargs.get(a.name, a.default_value)
            self.arguments.append(self._describe(value, a))

    def _describe(self, value: Any, argument: Any) -> Any:
        kind = str(argument.type)
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, list | tuple) and any(isinstance(v, torch.Tensor) for v in value):
            return [self._describe(v, argument) for v in value]
        number = isinstance(value, bool | int | float | complex)
        if kind == "Tensor" and number:
            self.numbers.append(value)
            return HostScalar(len(self.numbers) - 1, torch.tensor(value).dtype, True, value)
        is_default = argument.default_value is not None and value == argument.default_value
        scalar = kind in ("number", "float", "Optional[number]", "Optional[float]") or argument.name in self.runtime
        is_operand = self.static is not None and argument.name not in self.static and not is_default
        if number and scalar and is_operand:
            self.numbers.append(value)
            return NumberArgument(len(self.numbers) - 1, value)
        if kind == "List[number]" and self.static is not None and argument.name not in self.static:
            self.lists.append(list(value))
            return NumbersArgument(len(self.lists) - 1, list(value))
        return value

    def _tensor(self, t: torch.Tensor) -> TensorArgument:
        conjugate, negative = t.is_conj(), t.is_neg()
        t = t.conj() if conjugate else t  # a second time gives back the memory
        t = torch._neg_view(t) if negative else t
        sizes, strides = tuple(t.shape), tuple(t.stride())
        count = t.untyped_storage().nbytes() // t.itemsize
        flat = torch.as_strided(t, (count,), (1,), 0)
        shape = (count,)
        if view.is_dense(sizes, strides) and t.numel() == count:
            order = [*view.memory_order(sizes, strides)]
            shape = sizes if strides == view.contiguous_strides(sizes) else tuple(sizes[i] for i in order)
        chain = view.chain_of(sizes, strides)
        fits = chain is not None and 0 not in sizes and chain.fits(t.storage_offset())
        self.bases.append(flat.reshape(shape))
        self.offsets.append(t.storage_offset())
        self.lazy_bits.append((conjugate, negative))
        i = len(self.bases) - 1
        return TensorArgument(
            i,
            i,
            t.dtype,
            sizes,
            strides,
            t.storage_offset(),
            fits,
            t.untyped_storage().nbytes(),
            Type(shape, t.dtype),
            conjugate,
            negative,
        )


@functools.cache
def _compiled(text: str) -> Any:
    return client().compile(text, FLAGS)


def run(
    op: OpOverload,
    *args: Any,
    seed: tuple[int, int] = (0, 0),
    precision: str = "highest",
    for_tpu: bool = False,
    **kwargs: Any,
) -> tuple[Any, Plan, list]:
    """Runs ``op``; returns (results as CPU tensors, the plan, all program outputs).

    With ``for_tpu`` the program is the one that a TPU would get, as far as XLA's CPU backend can run it.
    """
    call = Call(op, args, kwargs)
    name = op._schema.name + (f".{op._overloadname}" if op._overloadname != "default" else "")
    with torch._C._AutoDispatchBelowAutograd():  # where the eager kernel runs: composites reach the tracer undecomposed
        plan = build(name, call.arguments, precision=precision, emulate_precision=not for_tpu)
    inputs = []
    for kind, index, dtype in plan.operands:
        value = {
            "base": lambda: call.bases[index],
            "offset": lambda: torch.tensor(call.offsets[index], dtype=dtype),
            "scalar": lambda: _exact(call.numbers[index]).to(dtype),
            "scalars": lambda: torch.tensor(call.lists[index], dtype=dtype),
            "rng": lambda: torch.tensor(seed, dtype=torch.uint64),
            "flag": lambda: torch.tensor(0, dtype=dtype),
            "code": lambda: torch.tensor(7, dtype=dtype),
        }[kind]()
        inputs.append(_to_numpy(value.contiguous()))
    raw = _compiled(plan.text).run(inputs)
    outputs = []
    for array, output in zip(raw, plan.outputs, strict=True):
        array = np.array(array, copy=True)
        if array.dtype.kind == "V":  # NumPy knows bfloat16 by name where ml_dtypes is installed; PyTorch does not
            array = array.view(f"uint{8 * array.itemsize}")
        t = torch.from_numpy(array)
        outputs.append(t.view(torch.bfloat16) if output.type.dtype == torch.bfloat16 else t)

    def result(r: Any) -> Any:
        if r is None or isinstance(r, int):
            return r
        if isinstance(r, list):
            return [result(x) for x in r]
        if r.output < 0:
            slot = next(i for i, o in enumerate(plan.outputs) if o.slot == r.position)
            source = outputs[slot]
        else:
            source = outputs[r.output]
        if math.prod(r.sizes) == 0:
            return torch.empty_strided(r.sizes, r.strides, dtype=r.dtype)
        t = torch.as_strided(
            source.reshape(-1).view(r.dtype) if source.dtype != r.dtype else source.reshape(-1),
            r.sizes,
            r.strides,
            r.offset,
        )
        conjugate, negative = call.lazy_bits[r.position] if r.output < 0 else (False, False)
        t = t.conj() if conjugate else t
        return torch._neg_view(t) if negative else t

    return [result(r) for r in plan.results], plan, outputs


def check(
    op: OpOverload,
    *args: Any,
    rtol: float | None = None,
    atol: float | None = None,
    strides: bool = True,
    **kwargs: Any,
) -> Plan:
    """Asserts that the program gives CPU PyTorch's values, dtypes, shapes and strides; returns the plan."""
    expected = op(
        *tree_map(lambda t: t.clone() if isinstance(t, torch.Tensor) and op_info(op).written else t, args), **kwargs
    )
    got, plan, _ = run(op, *args, **kwargs)
    returns = op._schema.returns
    expected = (
        list(expected)
        if len(returns) > 1
        else [list(expected) if isinstance(expected, tuple) else expected][: len(returns)]
    )
    torch.testing.assert_close(got, expected, rtol=rtol, atol=atol, equal_nan=True, check_stride=strides)
    return plan
