"""PyTorch's own error for a call that is wrong.

The Python meta kernels that PyTorch puts in front of its C++ ones word their errors differently, raise other types, and
leave checks out. So where a call fails, or looks as if it should, it is made once more on the CPU, on zeros (and ones)
of the same geometry: what the CPU raises is what the user gets. An operator that meets new dtypes is tried there too,
once, for most of what the meta kernels leave out is which dtypes go together. None of this happens for a program that
is known.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch

from torch_tpu.lowering.view import contiguous_strides
from torch_tpu.tracing.program import HostScalar, NumberArgument, NumbersArgument, TensorArgument
from torch_tpu.tracing.schema import op_info, resolve

#: Bytes up to which a call is repeated on the CPU.
_LARGEST = 64 << 20

#: Bytes up to which an operator is tried with new dtypes: where it takes them, it runs.
_LARGEST_TRIAL = 4 << 20

#: What CPU kernels may lack without the call being wrong.
_NARROW = re.compile(r"not implemented for '(Half|BFloat16|Float8.*|UInt(16|32|64)|ComplexHalf)'")

#: What it says of operators that it does not have.
_ABSENT = re.compile(r"Could not run|overrideable not implemented")

_RAISED = (RuntimeError, IndexError, TypeError, ValueError, NotImplementedError)


#: Operators that the CPU knows by another name.
_ON_CPU = {"aten::convolution_overrideable": "aten::convolution"}


def cpu_error(name: str, description: list[Any]) -> Exception | None:
    """What the CPU raises for a call, or None if it does not, or cannot say without real data."""
    if sum(a.storage for a in _tensors(description)) > _LARGEST:
        return None
    error = _raised(name, description, 0)
    # What is wrong with zeros but not with ones (a matrix, pivots, weights) is wrong with the data, not with the call.
    return error if error is None or type(_raised(name, description, 1)) is type(error) else None


def _raised(name: str, description: list[Any], fill: int) -> Exception | None:
    op = resolve(_ON_CPU.get(name, name))
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
        if _ABSENT.search(str(error)) or _NARROW.search(str(error)):
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
_UNCHECKED = frozenset("aminmax bucketize masked_scatter multinomial".split())


#: Operators that take dtypes here that the CPU refuses, as they do on CUDA; their rules check what they need. Norms
#: keep statistics in float32, and their backward passes get those beside operands of lower precision.
_BEYOND_CPU = frozenset(
    f"aten::{name}{suffix}"
    for name in (
        "histc",
        "_scaled_mm",
        "_scaled_mm_v2",
        "_scaled_grouped_mm",
        "_scaled_grouped_mm_v2",
        "native_layer_norm_backward",
        "native_group_norm_backward",
        "native_batch_norm_backward",
    )
    for suffix in ("", ".out")
)


def looks_wrong(name: str, description: list[Any]) -> bool:
    """True for the few calls that are worth asking the CPU about although nothing has failed."""
    tensors = list(_tensors(description))
    functional = name.removeprefix("aten::").partition(".")[0].removesuffix("_")
    if functional in _UNCHECKED or (any(0 in t.sizes for t in tensors) and name not in _BEYOND_CPU):
        return True
    if functional == "pow":
        return any(_is_negative(item, int) for item in description)
    if functional in ("_softmax", "_log_softmax"):
        return not -len(tensors[0].sizes) <= description[1] < len(tensors[0].sizes)
    # Whether a number is negative is part of these programs, and neither decompositions nor meta kernels look.
    rule = op_info(resolve(name)).rule
    return (rule is None or rule.classes) and any(_is_negative(item, float) for item in description)


def _is_negative(item: Any, kind: type) -> bool:
    value = item.value if isinstance(item, NumberArgument | HostScalar) else item
    return isinstance(value, kind) and value < 0  # type: ignore[operator]


# ---- dtypes that do not go together ---------------------------------------------------------------------------------
_accepted: set[Any] = set()  # operators with the dtypes that the CPU did not refuse

#: An error that is of the dtypes, whatever the data and the shapes are.
_OF_DTYPES = re.compile(r"type|support|implemented|bool|complex|integer|float", re.IGNORECASE)


def dtype_error(name: str, description: list[Any]) -> Exception | None:
    """What the CPU raises for the dtypes of a call, asked once per operator and dtypes.

    An element-wise operator is asked about a few elements. Others take the call's geometry, so they are asked only
    about calls that are small, or will be refused before any work is done, and that have more than one floating dtype
    beside int64, which is what nearly all calls have and nearly all operators take.
    """
    tensors = list(_tensors(description))
    if not tensors or not name.startswith("aten::") or name in _BEYOND_CPU:
        return None
    rule = op_info(resolve(name)).rule
    if rule is not None and rule.promote is not None:
        trial = [_small(item) for item in description]
    else:
        dtypes = {t.dtype for t in tensors}
        floats = {d for d in dtypes if d.is_floating_point}
        casts = any(isinstance(item, torch.dtype) for item in description)
        usual = len(floats) == 1 and dtypes <= {*floats, torch.int64} and not casts
        if usual and not _has_float_index(name, description):
            return None
        if sum(t.storage for t in tensors) > (_LARGEST if len(floats) > 1 else _LARGEST_TRIAL):
            return None
        trial = [_with_one(item) for item in description]
    key = (name, *map(_kind, description))
    if key in _accepted:
        return None
    error = _raised(name, trial, 0)
    if error is not None and _OF_DTYPES.search(str(error)) and type(_raised(name, trial, 1)) is type(error):
        return error
    _accepted.add(key)
    return None


def _has_float_index(name: str, description: list[Any]) -> bool:
    named = zip(description, resolve(name)._schema.arguments, strict=True)
    return any(a.name in ("index", "indices") and any(_floats(item)) for item, a in named)


def _floats(item: Any) -> Iterator[bool]:
    return (t.dtype.is_floating_point for t in _tensors(item))


def _with_one(item: Any) -> Any:
    """A number whose value is not part of the program, as one that fits every dtype."""
    return item._replace(value=type(item.value)(1)) if isinstance(item, NumberArgument | HostScalar) else item


def _small(item: Any) -> Any:
    """The argument of an element-wise operator with sizes of at most two."""
    if isinstance(item, TensorArgument):
        sizes = tuple(min(n, 2) for n in item.sizes)
        storage = math.prod(sizes) * item.dtype.itemsize
        strides = contiguous_strides(sizes)
        return item._replace(slot=item.position, sizes=sizes, strides=strides, offset=0, storage=storage)
    return [_small(x) for x in item] if isinstance(item, list) else _with_one(item)


def _kind(item: Any) -> Any:
    """What PyTorch's kernels can tell of an argument by its dtype."""
    if isinstance(item, TensorArgument):
        return item.dtype, not item.sizes
    if isinstance(item, HostScalar):
        return item.dtype, item.wrapped
    if isinstance(item, NumberArgument):
        return type(item.value)
    if isinstance(item, NumbersArgument):
        return frozenset(map(type, item.values))
    if isinstance(item, list):
        return frozenset(map(_kind, item))
    return item if isinstance(item, torch.dtype | str) else type(item)


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
    if (error := dtype_error(name, description)) is not None:
        raise error
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
