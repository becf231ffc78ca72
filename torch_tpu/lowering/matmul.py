"""Matrix products: ``mm``, ``bmm``, ``addmm`` and their kin, into which ``matmul`` and ``einsum`` decompose."""

from __future__ import annotations

import torch

from torch_tpu.lowering.common import Scalar, as_value, compute_dtype, unmerged
from torch_tpu.lowering.precision import matmul, product
from torch_tpu.lowering.registry import lower
from torch_tpu.stablehlo import Type, Value
from torch_tpu.stablehlo import ops as hlo


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return compute_dtype(dtype)


def _is_number(x: Scalar, value: int) -> bool:
    return isinstance(x, int | float) and x == value


def blend(base: Value, update: Value, beta: Scalar, alpha: Scalar, dtype: torch.dtype) -> Value:
    """``beta * base + alpha * update`` in the accumulator's dtype, rounded once to ``dtype``.

    ``beta == 0`` ignores ``base``, NaN included, as BLAS does.
    """
    compute = update.dtype
    if not _is_number(alpha, 1):
        update = update * as_value(alpha, compute, update.shape)
    base = hlo.broadcast_to(hlo.convert(base, compute), update.shape)
    if not _is_number(beta, 1):
        factor = as_value(beta, compute)
        scaled = base * hlo.broadcast_to(factor, base.shape)
        base = hlo.select(hlo.compare(factor, 0, "EQ"), hlo.full_like(base, 0), scaled)
    return hlo.convert(base + update, dtype)


@lower("mm", "bmm")
def mm(x: Value, y: Value) -> Value:
    if x.transpose_of is not None and x.ndim == 2:  # the gradient of a linear layer's weight sums over its rows
        left, right = unmerged(x.transpose_of[0]), unmerged(y)
        if left.ndim == right.ndim > 2 and left.shape[:-1] == right.shape[:-1]:
            return product(left, right, contract=(range(left.ndim - 1), range(left.ndim - 1)))
    rows = unmerged(x)
    if rows is x:
        return matmul(x, y)
    return hlo.reshape(product(rows, y, contract=((rows.ndim - 1,), (0,))), (x.shape[0], y.shape[1]))


@lower("mm.dtype", "bmm.dtype")
def mm_dtype(x: Value, y: Value, dtype: torch.dtype) -> Value:
    return matmul(x, y, dtype)


@lower("addmm", "baddbmm")
def addmm(base: Value, x: Value, y: Value, *, beta: Scalar = 1, alpha: Scalar = 1) -> Value:
    if base.ndim == 1 and y.ndim == 2:  # a linear layer
        rows = unmerged(x)
        # The product is rounded before the bias is added: a TPU's compiler moves what follows a product into the next
        # one, and what is left between them in memory would be float32. The numbers are the same everywhere.
        rounded = x.dtype == torch.bfloat16 and _is_number(alpha, 1) and _is_number(beta, 1)
        dtype = x.dtype if rounded else _accumulator(x.dtype)
        z = product(rows, y, contract=((rows.ndim - 1,), (0,)), dtype=dtype)
        return hlo.reshape(blend(base, z, beta, alpha, x.dtype), (x.shape[0], y.shape[1]))
    return blend(base, matmul(x, y, _accumulator(x.dtype)), beta, alpha, x.dtype)


@lower("addmm.dtype", "baddbmm.dtype")
def addmm_dtype(base: Value, x: Value, y: Value, dtype: torch.dtype, *, beta: Scalar = 1, alpha: Scalar = 1) -> Value:
    return blend(base, matmul(x, y, _accumulator(dtype)), beta, alpha, dtype)


@lower("_addmm_activation")
def addmm_activation(
    base: Value, x: Value, y: Value, *, beta: Scalar = 1, alpha: Scalar = 1, use_gelu: bool = False
) -> Value:
    z = blend(base, matmul(x, y, _accumulator(x.dtype)), beta, alpha, x.dtype)
    if not use_gelu:
        return hlo.maximum(z, 0)
    z = hlo.convert(z, compute_dtype(z.dtype))
    return hlo.convert(z * 0.5 * (hlo.erf(z * 0.5**0.5) + 1), x.dtype)


@lower("addbmm")
def addbmm(base: Value, x: Value, y: Value, *, beta: Scalar = 1, alpha: Scalar = 1) -> Value:
    total = product(hlo.transpose(x, (1, 0, 2)), y, contract=((1, 2), (0, 1)), dtype=_accumulator(x.dtype))
    return blend(base, total, beta, alpha, x.dtype)


@lower("mv")
def mv(x: Value, y: Value) -> Value:
    return product(x, y, contract=((1,), (0,)))


@lower("addmv")
def addmv(base: Value, x: Value, y: Value, *, beta: Scalar = 1, alpha: Scalar = 1) -> Value:
    return blend(base, product(x, y, contract=((1,), (0,)), dtype=_accumulator(x.dtype)), beta, alpha, x.dtype)


@lower("addr")
def addr(base: Value, x: Value, y: Value, *, beta: Scalar = 1, alpha: Scalar = 1, result: list[Type]) -> Value:
    shape, dtype = result[0]
    compute = compute_dtype(dtype)
    x, y = hlo.convert(x, compute), hlo.convert(y, compute)
    outer = hlo.broadcast_in_dim(x, shape, [0]), hlo.broadcast_in_dim(y, shape, [1])
    if dtype == torch.bool:
        base, on = hlo.broadcast_to(base, shape), as_value(beta, dtype, shape)
        return hlo.or_(hlo.and_(base, on), hlo.and_(hlo.and_(*outer), as_value(alpha, dtype, shape)))
    return blend(base, hlo.multiply(*outer), beta, alpha, dtype)


@lower("dot")
def dot(x: Value, y: Value) -> Value:
    return product(x, y, contract=((0,), (0,)))


@lower("vdot")
def vdot(x: Value, y: Value) -> Value:
    return product(hlo.conj(x) if x.dtype.is_complex else x, y, contract=((0,), (0,)))


@lower("_trilinear")
def trilinear(
    x: Value,
    y: Value,
    z: Value,
    expand_x: list[int],
    expand_y: list[int],
    expand_z: list[int],
    sums: list[int],
    unroll: int = 1,
) -> Value:
    """``sum(x * y * z)`` over ``sums`` after inserting the expanded dimensions: the product behind ``bilinear``.

    The two operands that share the largest summed extent are multiplied first, as one matrix product.
    """
    rank = x.ndim + len(expand_x)
    letters = {i: chr(97 + i) for i in range(rank)}
    terms = ["".join(letters[i] for i in range(rank) if i not in expand) for expand in (expand_x, expand_y, expand_z)]
    out = "".join(letters[i] for i in range(rank) if i not in sums)
    middle = "".join(c for c in letters.values() if c in terms[0] + terms[1] and c in terms[2] + out)
    return einsum(terms[2] + "," + middle + "->" + out, z, einsum(f"{terms[0]},{terms[1]}->{middle}", x, y))


def einsum(equation: str, x: Value, y: Value) -> Value:
    """Two operands, each letter at most once per operand, every summed letter in both or in one."""
    left, out = equation.split("->")
    a, b = left.split(",")
    for letters in (a, b):  # summed in one operand alone
        other = b if letters is a else a
        alone = [i for i, c in enumerate(letters) if c not in other and c not in out]
        if alone:
            kept = "".join(c for i, c in enumerate(letters) if i not in alone)
            if letters is a:
                return einsum(f"{kept},{b}->{out}", hlo.reduce_one(x, 0, alone, hlo.add), y)
            return einsum(f"{a},{kept}->{out}", x, hlo.reduce_one(y, 0, alone, hlo.add))
    batch = [c for c in a if c in b and c in out]
    summed = [c for c in a if c in b and c not in out]
    both = lambda letters: ([a.index(c) for c in letters], [b.index(c) for c in letters])  # noqa: E731
    z = product(x, y, contract=both(summed), batch=both(batch))
    have = batch + [c for c in a if c not in batch + summed] + [c for c in b if c not in batch + summed]
    return hlo.transpose(z, [have.index(c) for c in out])
