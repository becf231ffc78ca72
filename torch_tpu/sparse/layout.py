"""What sparse tensors are made of, and the ways from one layout to another."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_BY_ROW, _BY_COLUMN = torch.sparse_csr, torch.sparse_csc


def coo_tensor(indices: Tensor, values: Tensor, shape: Sequence[int], is_coalesced: bool | None = None) -> Tensor:
    """A COO tensor of parts that are known to fit."""
    return torch.ops.aten._sparse_coo_tensor_unsafe(indices, values, shape, is_coalesced=is_coalesced)


def compressed_tensor(
    compressed: Tensor, plain: Tensor, values: Tensor, shape: Sequence[int], layout: torch.layout
) -> Tensor:
    """A CSR or CSC tensor of parts that are known to fit."""
    return torch.ops.aten._sparse_compressed_tensor_unsafe(
        compressed, plain, values, shape, dtype=values.dtype, layout=layout, device=values.device
    )


def is_sparse(x: Any) -> bool:
    return isinstance(x, Tensor) and x.layout != torch.strided


def compressed(x: Tensor) -> tuple[Tensor, Tensor]:
    """The compressed and the plain indices of a CSR or CSC tensor.

    Raises:
        NotImplementedError: ``x`` is of a block layout.
    """
    if x.layout == _BY_ROW:
        return x.crow_indices(), x.col_indices()
    if x.layout == _BY_COLUMN:
        return x.ccol_indices(), x.row_indices()
    raise NotImplementedError(f"Tensors of layout {x.layout} do not take part in arithmetic on tpu. Call to_dense().")


def with_values(x: Tensor, values: Tensor) -> Tensor:
    """A sparse tensor with ``x``'s indices."""
    if x.layout == torch.sparse_coo:
        return coo_tensor(x._indices(), values, x.shape, is_coalesced=x.is_coalesced())
    return compressed_tensor(*compressed(x), values, x.shape, x.layout)


def values_of(x: Tensor) -> Tensor:
    return x._values() if x.layout == torch.sparse_coo else x.values()


def strides_of(shape: Sequence[int]) -> list[int]:
    """Row-major strides of the sparse dimensions."""
    return [math.prod(shape[i + 1 :]) for i in range(len(shape))]


def coordinates(x: Tensor) -> tuple[Tensor, Tensor]:
    """Indices ``[sparse dims, nnz]`` and values ``[nnz, ...]`` of a COO, CSR or CSC tensor, not coalesced."""
    if x.layout == torch.sparse_coo:
        return x._indices(), x._values()
    pair = torch._convert_indices_from_csr_to_coo(*compressed(x), out_int32=False, transpose=x.layout == _BY_COLUMN)
    return pair, x.values()


def positions(indices: Tensor, shape: Sequence[int]) -> Tensor:
    """Each entry's row-major position among the sparse dimensions ``shape``."""
    if not len(shape):
        return indices.new_zeros(indices.shape[1])
    weights = torch.tensor(strides_of(shape), device=indices.device)
    return (indices * weights[:, None]).sum(0)


def coalesce(x: Tensor) -> Tensor:
    """Entries in row-major order, those of one place added."""
    indices, values = x._indices(), x._values()
    if x._nnz() < 2:
        return coo_tensor(indices.clone(), values.clone(), x.shape, is_coalesced=True)
    shape = x.shape[: x.sparse_dim()]
    places, group = torch.unique(positions(indices, shape), return_inverse=True)
    boolean = values.dtype == torch.bool
    total = torch.zeros(
        (places.shape[0], *values.shape[1:]), dtype=torch.uint8 if boolean else values.dtype, device=values.device
    )
    total.index_add_(0, group, values.to(total.dtype))
    columns = [places // stride % size for stride, size in zip(strides_of(shape), shape, strict=True)]
    merged = torch.stack(columns) if columns else indices[:, :1]
    return coo_tensor(merged, total.bool() if boolean else total, x.shape, is_coalesced=True)


def as_coo(x: Tensor) -> Tensor:
    """Of a compressed tensor, whose entries are in order and one to a place."""
    if x.layout == torch.sparse_coo:
        return x
    indices, values = coordinates(x)
    return coo_tensor(indices, values, x.shape, is_coalesced=x.layout == torch.sparse_csr)


def in_layout(like: Tensor, x: Tensor) -> Tensor:
    if like.layout == torch.sparse_coo:
        return x
    if like.layout != torch.sparse_csr:
        raise NotImplementedError(f"This result would have the layout {like.layout}, which tpu cannot make; use CSR.")
    return x.to_sparse_csr()


def to_dense(x: Tensor, dtype: torch.dtype | None = None, masked_grad: bool | None = None) -> Tensor:
    if dtype is not None and dtype != x.dtype:
        raise RuntimeError("dtype argument is not supported by to_dense of a sparse tensor")
    if x.layout in (torch.sparse_bsr, torch.sparse_bsc):
        return _blocks_to_dense(x)
    return add_into(torch.zeros(x.shape, dtype=x.dtype, device=x.device), x)


def _blocks_to_dense(x: Tensor) -> Tensor:
    by_row = x.layout == torch.sparse_bsr
    pair = (x.crow_indices(), x.col_indices()) if by_row else (x.ccol_indices(), x.row_indices())
    rows, columns = torch._convert_indices_from_csr_to_coo(*pair, out_int32=False, transpose=not by_row)
    height, width = x.values().shape[1:3]
    blocks = x.values().new_zeros((x.shape[0] // height, x.shape[1] // width, height, width))
    blocks[rows, columns] = x.values()
    return blocks.transpose(1, 2).reshape(x.shape)


def add_into(out: Tensor, x: Tensor, alpha: complex = 1) -> Tensor:
    """``out += alpha * x`` for a dense ``out``; entries of one place are added."""
    indices, values = coordinates(x)
    if x._nnz() == 0:
        return out
    values = (values if alpha == 1 else values * alpha).to(out.dtype)
    if indices.shape[0] == 0:
        return out.add_(values.sum(0))
    return out.index_put_(tuple(indices.unbind(0)), values, accumulate=True)


def sparse_mask(self: Tensor, mask: Tensor) -> Tensor:
    """The entries of ``self`` where ``mask`` has some."""
    if self.shape != mask.shape:
        raise ValueError(
            f"sparse_mask(): operands have incompatible sizes; self has size {tuple(self.shape)} but mask has size "
            f"{tuple(mask.shape)}"
        )
    indices, _ = coordinates(mask)
    dense = self.to_dense() if is_sparse(self) else self
    if not indices.shape[0]:  # indexing by nothing would be a view
        return with_values(mask, dense.expand(indices.shape[1], *dense.shape).clone())
    return with_values(mask, dense[tuple(indices.unbind(0))])


def mask_projection(self: Tensor, mask: Tensor, accumulate_matches: bool = False) -> Tensor:
    """Every entry of ``self`` where ``mask`` has one too, else zero; times their number with ``accumulate_matches``."""
    found, places = coordinates(mask)[0], coordinates(self)[0]
    shape = mask.shape[: found.shape[0]]
    counts = torch.zeros(math.prod(shape), dtype=torch.int64, device=mask.device)
    counts.index_add_(0, positions(found, shape), counts.new_ones(found.shape[1]))
    count = counts[positions(places, shape)]
    values = values_of(self)
    factor = count if accumulate_matches else count > 0
    return with_values(self, values * factor.to(values.dtype).view(-1, *[1] * (values.ndim - 1)))


def cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Along a sparse dimension."""
    first = tensors[0]
    if any(t.layout != torch.sparse_coo for t in tensors):
        raise RuntimeError("Concatenating sparse tensors, but a dense or compressed tensor was found among them.")
    dim %= first.ndim
    if dim >= first.sparse_dim():
        raise NotImplementedError("cat of sparse tensors along a dense dimension is not supported; call to_dense().")
    shift = torch.zeros(first.sparse_dim(), 1, dtype=torch.int64)
    shape, parts = list(first.shape), []
    shape[dim] = 0
    for t in tensors:
        shift[dim] = shape[dim]
        parts.append(t._indices() + shift.to(first.device))
        shape[dim] += t.shape[dim]
    return coo_tensor(torch.cat(parts, 1), torch.cat([t._values() for t in tensors]), shape)


def index_select(self: Tensor, dim: int, index: Tensor) -> Tensor:
    if self.layout != torch.sparse_coo:
        raise NotImplementedError(f"index_select of layout {self.layout} is not supported on tpu; call to_dense().")
    dim %= self.ndim
    indices, values = self._indices(), self._values()
    shape = [index.numel() if i == dim else n for i, n in enumerate(self.shape)]
    if dim >= self.sparse_dim():
        values = values.index_select(dim - self.sparse_dim() + 1, index)
        return coo_tensor(indices, values, shape, is_coalesced=self.is_coalesced())
    entry, place = (indices[dim][:, None] == index.reshape(1, -1)).nonzero().unbind(1)
    rows = [place if i == dim else indices[i][entry] for i in range(self.sparse_dim())]
    return coo_tensor(torch.stack(rows), values[entry], shape)


def norm(self: Tensor, p: float = 2) -> Tensor:
    """Of all entries together."""
    x = self.coalesce() if self.layout == torch.sparse_coo else self
    return values_of(x).norm(p)


def norm_of_dims(
    self: Tensor, p: float | None, dim: Sequence[int], keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    if keepdim or len(dim) not in (0, self.ndim):
        raise RuntimeError(
            "norm_sparse currently only supports full reductions, so 'dim' must be empty or all dimensions"
        )
    return norm(self if dtype is None else self.to(dtype), 2 if p is None else p)


def total(self: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    return values_of(self).sum(dtype=dtype)


def total_of_dims(
    self: Tensor, dim: Sequence[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    if self.layout != torch.sparse_coo:
        raise NotImplementedError(f"sum over dimensions of layout {self.layout} is not supported; call to_dense().")
    dims = sorted({d % self.ndim for d in dim or range(self.ndim)})
    out = torch._sparse_sum(self if dtype is None else self.to(dtype), dims)
    for d in dims if keepdim else ():
        out = out.unsqueeze(d)
    return out


KERNELS: dict[str, Callable[..., Any]] = {
    "_coalesce": coalesce,
    "_to_dense": to_dense,
    "sparse_mask": sparse_mask,
    "_sparse_mask_projection": mask_projection,
    "cat": cat,
    "index_select": index_select,
    "any": lambda self: values_of(self).any(),
    "native_norm": norm,
    "norm.ScalarOpt_dim": norm_of_dims,
    "norm.ScalarOpt_dim_dtype": norm_of_dims,
    "sum": total,
    "sum.dim_IntList": total_of_dims,
}
