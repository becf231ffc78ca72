"""Index arithmetic of compressed sparse layouts; the tensors themselves are composites (torch_tpu/sparse)."""

from __future__ import annotations

import torch

from torch_tpu.lowering.indexing import checked, prefix_sum, run_of
from torch_tpu.lowering.registry import lower
from torch_tpu.stablehlo import Type, Value
from torch_tpu.stablehlo import ops as hlo


@lower("_convert_indices_from_csr_to_coo")
def csr_to_coo(
    compressed: Value, plain: Value, *, out_int32: bool = False, transpose: bool = False, result: list[Type]
) -> Value:
    """Row and column of every entry, ``[2, nnz]``: a compressed index counts the entries before each row."""
    if compressed.ndim != 1:
        raise NotImplementedError("Batches of compressed sparse matrices are not supported on tpu; call to_dense().")
    (_, nnz), dtype = result[0]
    rows = compressed.shape[0] - 1
    lengths = hlo.slice_dim(compressed, 0, 1, rows + 1) - hlo.slice_dim(compressed, 0, 0, rows)
    pair = [hlo.convert(run_of(lengths, nnz), dtype), hlo.convert(plain, dtype)]
    return hlo.concatenate([hlo.reshape(v, (1, nnz)) for v in (pair[::-1] if transpose else pair)], 0)


@lower("_convert_indices_from_coo_to_csr")
def coo_to_csr(rows: Value, size: int, *, out_int32: bool = False, result: list[Type]) -> Value:
    """For every row, and behind the last, how many of the sorted ``rows`` come before it."""
    (count,), dtype = result[0]
    zeros = hlo.constant(0, torch.int32, (count,))
    if rows.numel == 0:
        return hlo.convert(zeros, dtype)
    after = hlo.expand_dims(checked(rows, size), [1]) + 1
    one_each = hlo.constant(1, torch.int32, rows.shape)
    counted = hlo.scatter(
        zeros, after, one_each, hlo.add, update_window_dims=[], inserted_dims=[0], index_map=[0], sorted_indices=True
    )
    return hlo.convert(prefix_sum(counted), dtype)
