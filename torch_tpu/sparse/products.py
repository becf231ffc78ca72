"""Products of sparse and dense matrices: the dense rows that entries name, weighted, added to the rows they belong to.

Sums of half types are made in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_tpu.sparse.layout import as_coo, coalesce, coo_tensor, coordinates, in_layout, is_sparse, with_values

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


def _by_row(x: Tensor, name: str) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, columns and values of a CSR matrix, the one layout that these operators take on the CPU too."""
    if x.layout != torch.sparse_csr or x.ndim != 2:
        raise RuntimeError(f"{name}: Expected a two-dimensional tensor of layout SparseCsr, but got {x.layout}")
    (rows, columns), values = _entries(x)
    return rows, columns, values


def sampled_addmm(self: Tensor, mat1: Tensor, mat2: Tensor, *, beta: complex = 1, alpha: complex = 1) -> Tensor:
    """``beta * self + alpha * mat1 @ mat2`` where ``self`` has entries: a row times a column for each."""
    rows, columns, values = _by_row(self, "sampled_addmm")
    if mat1.ndim != 2 or mat2.ndim != 2 or mat1.shape[1] != mat2.shape[0]:
        raise RuntimeError(
            f"sampled_addmm: mat1 and mat2 shapes cannot be multiplied ({_size(mat1)} and {_size(mat2)})"
        )
    if self.shape != (mat1.shape[0], mat2.shape[1]):
        raise RuntimeError(f"sampled_addmm: self.shape must match the product's, got {_size(self)}")
    if mat1.dtype != self.dtype or mat2.dtype != self.dtype:
        raise RuntimeError(f"sampled_addmm: Expected mat1 and mat2 to have the dtype of self, {self.dtype}")
    products = (mat1[rows] * mat2.t()[columns]).sum(1) * alpha
    return with_values(self, products if beta == 0 else values * beta + products)


_REDUCTIONS = ("sum", "mean", "amax", "amin")


def mm_reduce(self: Tensor, other: Tensor, reduce: str) -> tuple[Tensor, Tensor]:
    """Each row of ``self`` reduces, instead of adding, the rows of ``other`` that its entries weigh.

    The second result says for ``amax`` and ``amin`` which entry every element comes from: the first of equals, and
    ``nnz`` where a row has none.
    """
    rows, columns, values = _by_row(self, "sparse_mm_reduce")
    if reduce not in _REDUCTIONS:
        raise RuntimeError(f"reduce argument must be either sum, mean, amax or amin, got {reduce}")
    shape = (self.shape[0], other.shape[1])
    compute = torch.float32 if values.dtype in _HALVES else values.dtype
    terms = values.to(compute)[:, None] * other.to(compute)[columns]
    place = rows[:, None].expand_as(terms)
    zeros = torch.zeros(shape, dtype=compute, device=other.device)
    out = zeros.scatter_reduce(0, place, terms, reduce, include_self=False)
    if reduce in ("sum", "mean"):
        return out.to(self.dtype), torch.empty(0, dtype=torch.int64, device=other.device)
    nnz = values.shape[0]
    entry = torch.arange(nnz, device=other.device)[:, None]
    found = torch.where((terms == out[rows]) | terms.isnan(), entry, nnz)
    chosen = torch.full(shape, nnz, device=other.device).scatter_reduce(0, place, found, "amin")
    return out.to(self.dtype), chosen


def mm_reduce_backward(
    self: Tensor, grad_out: Tensor, weight: Tensor, reduce: str, arg_out: Tensor, output_mask: list[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """What reaches an entry of ``self`` in every column, then times the other factor."""
    rows, columns, values = _by_row(self, "sparse_mm_reduce")
    reached = grad_out[rows]
    if reduce == "mean":
        reached = reached / self.crow_indices().diff()[rows][:, None]
    elif reduce != "sum":
        reached = reached * (arg_out[rows] == torch.arange(rows.numel(), device=rows.device)[:, None])
    to_self = with_values(self, (reached * weight[columns]).sum(1)) if output_mask[0] else None
    to_weight = torch.zeros_like(weight).index_add_(0, columns, reached * values[:, None]) if output_mask[1] else None
    return to_self, to_weight


KERNELS: dict[str, Callable[..., Any]] = {
    "sparse_sampled_addmm": sampled_addmm,
    "_sparse_mm_reduce_impl": mm_reduce,
    "_sparse_mm_reduce_impl_backward": mm_reduce_backward,
    "mm": mm,
    "addmm": addmm,
    "mv": mv,
    "addmv": addmv,
    "bmm": bmm,
    "_sparse_sparse_matmul": sparse_sparse_matmul,
}
