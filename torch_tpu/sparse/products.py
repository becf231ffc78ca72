"""Products of sparse and dense matrices: the dense rows that entries name, weighted, added to the rows they belong to.

Sums of half types are made in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_tpu.sparse.layout import as_coo, coalesce, coo_tensor, coordinates, in_layout, is_sparse

_HALVES = (torch.float16, torch.bfloat16)


def _gathered(rows: Tensor, columns: Tensor, values: Tensor, count: int, dense: Tensor) -> Tensor:
    """``out[rows[i]] += values[i] * dense[columns[i]]`` with ``count`` rows, in the accumulator's dtype."""
    compute = torch.float32 if values.dtype in _HALVES else values.dtype
    terms = values.to(compute)[:, None] * dense[columns].to(compute)
    return torch.zeros(count, dense.shape[1], dtype=compute, device=dense.device).index_add_(0, rows, terms)


def _matrix_product(sparse: Tensor, dense: Tensor) -> Tensor:
    if sparse.ndim != 2 or dense.ndim != 2 or sparse.shape[1] != dense.shape[0]:
        raise RuntimeError(f"mat1 and mat2 shapes cannot be multiplied ({_size(sparse)} and {_size(dense)})")
    if sparse.dtype != dense.dtype:
        raise RuntimeError(f"Expected both matrices to have the same dtype, got {sparse.dtype} and {dense.dtype}.")
    (rows, columns), values = _entries(sparse)
    return _gathered(rows, columns, values, sparse.shape[0], dense)


def _entries(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and columns ``[2, nnz]`` and values ``[nnz]`` of a sparse matrix."""
    indices, values = coordinates(x)
    if indices.shape[0] != 2 or values.ndim > 1:
        raise RuntimeError(f"addmm: matrices expected, got {indices.shape[0]}D tensor")
    return indices, values


def _size(x: Tensor) -> str:
    return "x".join(map(str, x.shape))


def _product(left: Tensor, right: Tensor) -> Tensor:
    if is_sparse(left) and is_sparse(right):
        return sparse_sparse_matmul(left, right)
    if is_sparse(left):
        return _matrix_product(left, right)
    (rows, columns), values = _entries(right)  # (right.T @ left.T).T
    if left.ndim != 2 or left.shape[1] != right.shape[0]:
        raise RuntimeError(f"mat1 and mat2 shapes cannot be multiplied ({_size(left)} and {_size(right)})")
    return _gathered(columns, rows, values, right.shape[1], left.t()).t()


def sparse_sparse_matmul(self: Tensor, other: Tensor) -> Tensor:
    """Every entry of ``self`` times every entry of the row of ``other`` that its column names; a sparse result."""
    if self.ndim != 2 or other.ndim != 2 or self.shape[1] != other.shape[0]:
        raise RuntimeError(f"mat1 and mat2 shapes cannot be multiplied ({_size(self)} and {_size(other)})")
    (rows, middle), values = _entries(self)
    (other_rows, columns), other_values = _entries(as_coo(other).coalesce())
    starts = torch._convert_indices_from_coo_to_csr(other_rows, other.shape[0])
    lengths = starts.diff()[middle]
    entry = torch.repeat_interleave(torch.arange(rows.numel(), device=rows.device), lengths)
    within = torch.arange(entry.numel(), device=rows.device) - (lengths.cumsum(0) - lengths)[entry]
    place = starts[middle[entry]] + within
    pair = torch.stack([rows[entry], columns[place]])
    out = coo_tensor(pair, values[entry] * other_values[place], (self.shape[0], other.shape[1]))
    return in_layout(self, coalesce(out))


def mm(self: Tensor, mat2: Tensor) -> Tensor:
    return _product(self, mat2).to(self.dtype)


def addmm(self: Tensor, mat1: Tensor, mat2: Tensor, *, beta: complex = 1, alpha: complex = 1) -> Tensor:
    """``beta * self + alpha * mat1 @ mat2`` with a dense ``self``; ``beta == 0`` ignores it, NaN included."""
    if is_sparse(self):
        raise NotImplementedError("addmm onto a sparse tensor is not supported on tpu. Call to_dense() on it.")
    product = _product(mat1, mat2) * alpha
    if beta != 0:
        product = product + self.to(product.dtype) * beta
    return product.to(self.dtype)


def mv(self: Tensor, vec: Tensor) -> Tensor:
    if self.ndim != 2 or vec.ndim != 1 or self.shape[1] != vec.shape[0]:
        raise RuntimeError(f"mv: expected a matrix and a vector of its width, got {_size(self)} and {_size(vec)}")
    return mm(self, vec[:, None]).squeeze(1)


def addmv(self: Tensor, mat: Tensor, vec: Tensor, *, beta: complex = 1, alpha: complex = 1) -> Tensor:
    out = mv(mat, vec) * alpha
    return out if beta == 0 else out + self * beta


def bmm(self: Tensor, mat2: Tensor) -> Tensor:
    """A batch of sparse matrices: one block-diagonal product."""
    if not is_sparse(self) or is_sparse(mat2) or self.ndim != 3 or mat2.ndim != 3:
        raise NotImplementedError("bmm on tpu takes a sparse batch of matrices and a dense one. Call to_dense().")
    batch, n, k = self.shape
    if mat2.shape[:2] != (batch, k):
        raise RuntimeError(f"bmm: batch and inner sizes do not match, got {_size(self)} and {_size(mat2)}")
    (which, rows, columns), values = coordinates(self)
    out = _gathered(which * n + rows, which * k + columns, values, batch * n, mat2.reshape(batch * k, mat2.shape[2]))
    return out.view(batch, n, mat2.shape[2]).to(self.dtype)


KERNELS: dict[str, Callable[..., Any]] = {
    "mm": mm,
    "addmm": addmm,
    "mv": mv,
    "addmv": addmv,
    "bmm": bmm,
    "_sparse_sparse_matmul": sparse_sparse_matmul,
}
