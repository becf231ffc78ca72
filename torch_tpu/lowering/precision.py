"""Products and convolutions at the precision that the user asked for.

A TPU multiplies in bfloat16 and accumulates in float32. A float32 product takes one such pass (``medium``), three
passes on the high and low halves of the operands (``high``), or as many as float32 needs (``highest``). XLA is told
by the precision attribute; its CPU backend ignores that, so there the passes are written out: as products of bfloat16,
for which many processors have instructions, or with ``reduce_precision``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_tpu.lowering.common import for_cpu, row_major, tracer
from torch_tpu.stablehlo import Value
from torch_tpu.stablehlo import ops as hlo

#: PyTorch's name of a float32 precision -> StableHLO's.
ATTRIBUTE = {"medium": "DEFAULT", "high": "HIGH", "highest": "HIGHEST"}

Contract = tuple[Sequence[int], Sequence[int]]


def _to_bfloat16(x: Value) -> Value:
    return hlo.reduce_precision(x, exponent_bits=8, mantissa_bits=7)


def _passes(x: Value, y: Value, multiply: Callable[[Value, Value], Value], precision: str) -> Value:
    """The float32 product as a TPU's bfloat16 passes give it (Henry et al. 2019, arXiv:1904.06376, for three)."""
    x_high, y_high = _to_bfloat16(x), _to_bfloat16(y)
    product = multiply(x_high, y_high)
    if precision == "medium":
        return product
    x_low, y_low = (_to_bfloat16(v - high) for v, high in ((x, x_high), (y, y_high)))
    correction = multiply(x_high, y_low) + multiply(x_low, y_high)
    # An infinity leaves NaN in its low half; the first pass has the answer there already.
    return product + hlo.select(hlo.is_finite(correction), correction, 0.0)


def served(x: Value, y: Value, multiply: Callable[..., Value], dtype: torch.dtype | None) -> Value:
    """``multiply`` with the accumulator, precision attribute and rounding that the operands' dtype asks for."""
    result = dtype or x.dtype
    if x.dtype == torch.float32:
        precision = tracer().precision
        run = lambda a, b: multiply(a, b, dtype=torch.float32, precision=ATTRIBUTE[precision])  # noqa: E731
        product = _passes(x, y, run, precision) if precision != "highest" and tracer().emulate_precision else run(x, y)
        return hlo.convert(product, result)
    if x.dtype == result == torch.bfloat16 and not for_cpu():
        # A TPU accumulates in float32 whatever the result; what feeds a product that is rounded apart is not fused.
        return multiply(x, y, dtype=result, precision="DEFAULT")
    if x.dtype.itemsize < 4 and x.dtype.is_floating_point:
        return hlo.convert(multiply(x, y, dtype=torch.float32, precision="DEFAULT"), result)
    if x.dtype.itemsize < 4 and not x.dtype.is_complex:  # small integers: a wider sum wraps to the same residue
        if x.dtype != torch.int8:
            x, y = hlo.convert(x, torch.int32), hlo.convert(y, torch.int32)
        return hlo.convert(multiply(x, y, dtype=torch.int32, precision="HIGHEST"), result)
    return hlo.convert(multiply(x, y, dtype=x.dtype, precision="HIGHEST"), result)


def product(
    x: Value, y: Value, *, contract: Contract, batch: Contract = ((), ()), dtype: torch.dtype | None = None
) -> Value:
    """Generalised matrix product: batch, then ``x``'s, then ``y``'s free dimensions.

    float32 follows ``tracer().precision``, half types accumulate in float32, all others keep to their own arithmetic.

    Args:
        x: Left operand.
        y: Right operand, of the same dtype.
        contract: Summed dimensions of ``x`` and of ``y``, paired.
        batch: Common dimensions of ``x`` and of ``y``, paired.
        dtype: Of the result; by default the operands'. float32 keeps a half product's accumulator unrounded.
    """

    def multiply(a: Value, b: Value, dtype: torch.dtype, precision: str) -> Value:
        if dtype == torch.int64 and not for_cpu():
            return _integer_product(a, b, contract, batch)
        if for_cpu() and dtype == torch.float32:
            if a.dtype == torch.bfloat16 or (a.dtype == torch.float32 and precision != "HIGHEST"):
                return _bfloat16_product(a, b, contract, batch, precision)
            a, b = _apart(hlo.convert(a, dtype), hlo.convert(b, dtype), contract)
        return hlo.dot_general(a, b, contract=contract, batch=batch, dtype=dtype, precision=precision)

    x, contract_x, batch_x = _untransposed(x, contract[0], batch[0])
    y, contract_y, batch_y = _untransposed(y, contract[1], batch[1])
    contract, batch = (contract_x, contract_y), (batch_x, batch_y)
    return served(x, y, multiply, dtype)


#: Bytes of a row after which XLA's CPU backend finds all rows of an operand in the same few lines of the cache.
_CONFLICT = 4096


def _apart(x: Value, y: Value, contract: Contract) -> tuple[Value, Value]:
    """The operands of a product that walks down the rows of ``y``, with rows that are not a power of two apart.

    Zeros are added to the sums: the result is the same, three to five times sooner.
    """
    length = y.shape[-1] if y.ndim else 0
    if y.ndim != 2 or tuple(contract[1]) != (1,) or length * y.dtype.itemsize % _CONFLICT or not length:
        return x, y
    if y.shape[0] < 64 or x.numel // length < 16:
        return x, y
    more = 64 // y.dtype.itemsize

    def longer(v: Value, d: int) -> Value:
        return hlo.pad(v, 0, [0] * v.ndim, [more if i == d else 0 for i in range(v.ndim)])

    return longer(x, contract[0][0]), longer(y, 1)


def _bfloat16_product(x: Value, y: Value, contract: Contract, batch: Contract, precision: str) -> Value:
    """The float32 product of operands that are bfloat16 or rounded to it, as XLA's CPU backend has a kernel for it.

    It wants rows of summed elements on the left, and row-major arrays everywhere.
    """
    free = [i for i in range(x.ndim) if i not in contract[0] and i not in batch[0]]
    order, (nb, nf) = [*batch[0], *free, *contract[0]], (len(batch[0]), len(free))
    x = row_major(hlo.transpose(hlo.convert(x, torch.bfloat16), order))
    y = row_major(hlo.convert(y, torch.bfloat16))
    contract, batch = (range(nb + nf, x.ndim), contract[1]), (range(nb), batch[1])
    return row_major(hlo.dot_general(x, y, contract=contract, batch=batch, dtype=torch.float32, precision=precision))


Side = tuple[Value, Sequence[int], Sequence[int]]  # an operand, its summed dimensions, its batch dimensions


def _untransposed(x: Value, contract: Sequence[int], batch: Sequence[int]) -> Side:
    """The operand of the transpose that gave ``x``, if the product is the same: XLA finds more of its kernels so."""
    if x.transpose_of is None:
        return x, contract, batch
    source, order = x.transpose_of
    free = [order[i] for i in range(x.ndim) if i not in contract and i not in batch]
    if free != sorted(free):
        return x, contract, batch
    return source, [order[i] for i in contract], [order[i] for i in batch]


def _integer_product(x: Value, y: Value, contract: Contract, batch: Contract) -> Value:
    """64-bit integers: the TPU compiler refuses their ``dot_general`` but fuses a multiplication into its sum."""
    free_x = [i for i in range(x.ndim) if i not in contract[0] and i not in batch[0]]
    free_y = [i for i in range(y.ndim) if i not in contract[1] and i not in batch[1]]
    order_x, order_y = [*batch[0], *free_x, *contract[0]], [*batch[1], *free_y, *contract[1]]
    shape = (
        [x.shape[i] for i in [*batch[0], *free_x]] + [y.shape[i] for i in free_y] + [x.shape[i] for i in contract[0]]
    )
    nb, nx, ny, nc = len(batch[0]), len(free_x), len(free_y), len(contract[0])
    last = range(nb + nx + ny, nb + nx + ny + nc)
    a = hlo.broadcast_in_dim(hlo.transpose(x, order_x), shape, [*range(nb + nx), *last])
    b = hlo.broadcast_in_dim(hlo.transpose(y, order_y), shape, [*range(nb), *range(nb + nx, nb + nx + ny), *last])
    return hlo.reduce_one(a * b, 0, last, hlo.add)


def matmul(x: Value, y: Value, dtype: torch.dtype | None = None) -> Value:
    """``x @ y`` over equal leading batch dimensions."""
    lead = tuple(range(x.ndim - 2))
    return product(x, y, contract=((x.ndim - 1,), (y.ndim - 2,)), batch=(lead, lead), dtype=dtype)


def exact_matmul(x: Value, y: Value) -> Value:
    """``x @ y`` in full float32 whatever the user's precision: for factorisations and transforms."""
    lead = tuple(range(x.ndim - 2))
    contract = ((x.ndim - 1,), (y.ndim - 2,))
    return hlo.dot_general(x, y, contract=contract, batch=(lead, lead), dtype=x.dtype, precision="HIGHEST")


def convolve(x: Value, kernel: Value, *, dtype: torch.dtype | None = None, **window: Any) -> Value:
    """:func:`torch_tpu.stablehlo.ops.convolution` at the precision of :func:`product`."""

    def multiply(a: Value, b: Value, dtype: torch.dtype, precision: str) -> Value:
        if for_cpu() and dtype == torch.float32:  # XLA's CPU backend has no kernel for some half products
            a, b = hlo.convert(a, dtype), hlo.convert(b, dtype)
        return hlo.convolution(a, b, dtype=dtype, precision=precision, **window)

    return served(x, kernel, multiply, dtype)


__all__ = ["ATTRIBUTE", "convolve", "exact_matmul", "matmul", "product", "served"]
