"""Sparse tensors on the device, as composites over dense operators on their indices and values.

``csrc/eager/sparse.cc`` sends here every operator with a sparse operand that is more than an arrangement of indices and
values. The table :data:`KERNELS` has the functional forms; in-place and ``out=`` forms follow from the schema. Nothing
of this is imported before the first such call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_tpu.programs.eager import DTYPE_OF_CODE
from torch_tpu.sparse.arithmetic import KERNELS as _ARITHMETIC
from torch_tpu.sparse.layout import KERNELS as _LAYOUT
from torch_tpu.sparse.products import KERNELS as _PRODUCTS
from torch_tpu.tracing.schema import op_info, registry_name, resolve

Kernel = Callable[..., Any]

#: Functional overload -> the function that computes it for COO and CSR operands.
KERNELS: dict[str, Kernel] = {**_LAYOUT, **_ARITHMETIC, **_PRODUCTS}


@functools.cache
def composite(name: str) -> Kernel:
    """The function of a dispatcher name.

    Raises:
        NotImplementedError: There is none.
    """
    op = resolve(name)
    exact = KERNELS.get(registry_name(op))
    if exact is not None:
        return _decoding(op, exact)
    info = op_info(op)
    functional = None if info.functional is None else KERNELS.get(registry_name(info.functional))
    if functional is None or len(info.written) != 1:
        raise NotImplementedError(
            f"The operator '{name}' does not support sparse tensors on tpu. Call to_dense() on them first."
        )
    return _decoding(op, _writing(functional, info.written[0], is_out=bool(info.out)))


def _decoding(op: torch._ops.OpOverload, kernel: Kernel) -> Kernel:
    """``kernel`` with dtypes as dtypes: C++ passes them as numbers."""
    arguments = op._schema.arguments
    dtypes = {a.name: i for i, a in enumerate(arguments) if "ScalarType" in str(a.real_type)}
    if not dtypes:
        return kernel

    @functools.wraps(kernel)
    def decoded(*args: Any, **kwargs: Any) -> Any:
        positional = [DTYPE_OF_CODE[a] if i in dtypes.values() and a is not None else a for i, a in enumerate(args)]
        named = {k: DTYPE_OF_CODE[v] if k in dtypes and v is not None else v for k, v in kwargs.items()}
        return kernel(*positional, **named)

    return decoded


def _writing(functional: Kernel, written: str, is_out: bool) -> Kernel:
    """The in-place or ``out=`` form of a functional kernel."""

    def in_place(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return _write(self, functional(self, *args, **kwargs))

    def into(*args: Any, **kwargs: Any) -> Tensor:
        out = kwargs.pop(written)
        return _write(out, functional(*args, **kwargs))

    return into if is_out else in_place


def _write(target: Tensor, result: Tensor) -> Tensor:
    """Makes ``target`` what ``result`` is."""
    if target.layout == torch.strided:
        return target.resize_(result.shape).copy_(result)
    if target.layout != result.layout:
        raise RuntimeError(f"Expected an output of layout {result.layout}, got {target.layout}.")
    if target.layout == torch.sparse_coo:
        if target.shape != result.shape:
            target.sparse_resize_and_clear_(result.shape, result.sparse_dim(), result.dense_dim())
        return torch.ops.aten.copy_sparse_to_sparse_(target, result)
    return target.copy_(result)
