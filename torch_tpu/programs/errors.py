"""PyTorch's own error for a call that is wrong.

The Python meta kernels that PyTorch puts in front of its C++ ones word their errors differently, raise other types, and
leave checks out. So where a call fails, or looks as if it should, it is made once more on the CPU, on zeros (and ones)
of the same geometry: what the CPU raises is what the user gets. None of this happens for a program that is known.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import torch

from torch_tpu.tracing.program import HostScalar, NumberArgument, NumbersArgument, TensorArgument
from torch_tpu.tracing.schema import op_info, resolve

#: Bytes up to which a call is repeated on the CPU.
_LARGEST = 64 << 20

#: What CPU kernels may lack without the call being wrong.
_NARROW = re.compile(r"not implemented for '(Half|BFloat16|Float8.*|UInt(16|32|64)|ComplexHalf)'")

_RAISED = (RuntimeError, IndexError, TypeError, ValueError, NotImplementedError)


def cpu_error(name: str, description: list[Any]) -> Exception | None:
    """What the CPU raises for a call, or None if it does not, or cannot say without real data."""
    if sum(a.storage for a in _tensors(description)) > _LARGEST:
        return None
    error = _raised(name, description, 0)
    # What is wrong with zeros but not with ones (a matrix, pivots, weights) is wrong with the data, not with the call.
    return error if error is None or type(_raised(name, description, 1)) is type(error) else None


def _raised(name: str, description: list[Any], fill: int) -> Exception | None:
    op = resolve(name)
    storages: dict[int, torch.Tensor] = {}

    def argument(item: Any) -> Any:
        if isinstance(item, TensorArgument):
            return _filled(item, storages, fill)
        if isinstance(item, HostScalar):
            return item.value if item.wrapped else torch.tensor(item.value, dtype=item.dtype)
        if isinstance(item, NumberArgument):
            return item.value
        if isinstance(item, NumbersArgument):
            return item.values
        if isinstance(item, torch.device):
            return torch.device("cpu")
        return [argument(x) for x in item] if isinstance(item, list) else item

    values = [argument(item) for item in description]
    schema = op._schema.arguments
    positional = [v for v, a in zip(values, schema, strict=True) if not a.kwarg_only]
    keywords = {a.name: v for v, a in zip(values, schema, strict=True) if a.kwarg_only}
    try:
        with torch.random.fork_rng(devices=[]):
            op(*positional, **keywords)
    except torch.linalg.LinAlgError:  # zeros are a singular matrix
        return None
    except _RAISED as error:
        if "Could not run" in str(error) or _NARROW.search(str(error)):
            return None
        kind = next(k for k in (NotImplementedError, *_RAISED) if isinstance(error, k))
        return kind(re.sub(r"\bCPU\b|cpu", "tpu", str(error)))
    return None


def _filled(a: TensorArgument, storages: dict[int, torch.Tensor], fill: int) -> torch.Tensor:
    if a.slot not in storages:
        storages[a.slot] = torch.zeros(a.storage, dtype=torch.uint8)
    memory = storages[a.slot]
    flat = memory[: memory.numel() // a.dtype.itemsize * a.dtype.itemsize].view(a.dtype)
    if fill:
        flat.fill_(fill)
    tensor = flat.as_strided(a.sizes, a.strides, a.offset)
    tensor = tensor.conj() if a.conjugate else tensor
    return torch._neg_view(tensor) if a.negative else tensor


# ---- calls that the meta kernels let pass and that may be wrong -----------------------------------------------------
_SAME_DTYPE = frozenset(
    "mm bmm addmm baddbmm addbmm mv addmv addr dot vdot index_put _index_put_impl_ linalg_vecdot".split()
)
_UNCHECKED = frozenset("aminmax bucketize complex masked_scatter multinomial".split())
_NOT_OF_BOOL = frozenset("sub rsub _foreach_sub add _foreach_add".split())  # operands of sub, alpha of both
_WHOLE_NUMBERS = frozenset("bitwise_left_shift bitwise_right_shift __lshift__ __rshift__ index_select".split())


def looks_wrong(name: str, description: list[Any]) -> bool:
    """True for the few calls that are worth asking the CPU about although nothing has failed."""
    tensors = list(_tensors(description))
    base = name.removeprefix("aten::").partition(".")[0]
    functional = base if base in _SAME_DTYPE or base.endswith("__") else base.removesuffix("_")
    if functional in _UNCHECKED or any(0 in t.sizes for t in tensors):
        return True
    if functional in _SAME_DTYPE:
        return (
            len({t.dtype for t in tensors if t.dtype not in (torch.int64, torch.bool) or functional not in _INDEXING})
            > 1
        )
    if functional in _WHOLE_NUMBERS:
        return any(t.dtype.is_floating_point for t in tensors)
    if functional in _NOT_OF_BOOL:
        return 0 in _kinds(description)
    if functional == "pow":
        return any(_is_negative_integer(item) for item in description)
    if functional in ("_softmax", "_log_softmax"):
        return not tensors[0].dtype.is_floating_point or not -len(tensors[0].sizes) <= description[1] < len(
            tensors[0].sizes
        )
    return _narrows(name, description)


_INDEXING = frozenset(("index_put", "_index_put_impl_"))


def _is_negative_integer(item: Any) -> bool:
    value = item.value if isinstance(item, NumberArgument | HostScalar) else item
    return isinstance(value, int) and value < 0


def _narrows(name: str, description: list[Any]) -> bool:
    """True if a written tensor is of a lesser kind (bool, integer, real, complex) than another operand."""
    info = op_info(resolve(name))
    if not info.written or info.rule is None or info.rule.promote is None:
        return False
    written: list[int] = []
    others = [0]
    for item, argument in zip(description, info.op._schema.arguments, strict=True):
        (written if argument.name in info.written else others).extend(_kinds(item))
    return bool(written) and min(written) < max(others)


def _kinds(item: Any) -> Iterator[int]:
    if isinstance(item, TensorArgument | HostScalar):
        yield 3 if item.dtype.is_complex else 2 if item.dtype.is_floating_point else int(item.dtype != torch.bool)
    elif isinstance(item, NumberArgument):
        yield from _kinds(item.value)
    elif isinstance(item, bool | int | float | complex):
        yield (bool, int, float, complex).index(type(item))
    elif isinstance(item, list):
        for x in item:
            yield from _kinds(x)


def _tensors(item: Any) -> Iterator[TensorArgument]:
    if isinstance(item, TensorArgument):
        yield item
    elif isinstance(item, list):
        for x in item:
            yield from _tensors(x)


def checked(name: str, description: list[Any], build: Callable[[], Any]) -> Any:
    """Runs ``build``; a call that is wrong raises what it raises on the CPU.

    Raises:
        NotImplementedError: The operator has neither rule nor decomposition.
        Exception: The CPU's error, or that of ``build`` where the CPU has none.
    """
    if looks_wrong(name, description) and (error := cpu_error(name, description)) is not None:
        raise error
    try:
        return build()
    except NotImplementedError:
        raise
    except Exception:
        if (error := cpu_error(name, description)) is None:
            raise
    raise error
