"""Matrix products of quantised operands: 8-bit floats with scales, 8- and 4-bit integers, groups of a ragged dimension.

Scales of whole rows or tensors multiply the product, so that the operands stay in eight bits until the matrix unit;
scales that change along the summed dimension multiply the operands.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_tpu.lowering.precision import exact_matmul, matmul, product
from torch_tpu.lowering.registry import lower
from torch_tpu.stablehlo import Shape, Type, Value
from torch_tpu.stablehlo import ops as hlo

_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def _float(x: Value) -> Value:
    return hlo.convert(x, torch.float32)


# ---- 8-bit integers --------------------------------------------------------------------------------------------------
@lower("_int_mm")
def int_mm(x: Value, y: Value) -> Value:
    return matmul(x, y, torch.int32)


@lower("_weight_int8pack_mm")
def weight_int8pack_mm(x: Value, weight: Value, scales: Value) -> Value:
    """``x @ weight.T * scales``: int8 rows of weights, one scale for each."""
    z = product(x, hlo.convert(weight, x.dtype), contract=((1,), (1,)), dtype=torch.float32)
    return hlo.convert(z * hlo.broadcast_to(_float(scales), z.shape), x.dtype)


# ---- 4-bit integers --------------------------------------------------------------------------------------------------
# CUDA's layout, so that packed checkpoints keep their meaning: [n / 8][k / (16 tiles)][32 lanes][tiles / 2] words. Lane
# t of a tile holds row t / 4 and, of two neighbouring 16-column tiles, columns 2 (t % 4) + {0, 1, 8, 9}. A word's
# nibbles, from the least, are the even columns of both tiles and then the odd ones.
def _check_int4(condition: bool, what: str) -> None:
    torch._check(condition, lambda: f"_convert_weight_to_int4pack on tpu: {what}")


def _int4pack_meta(weight: Tensor, tiles: int) -> Tensor:
    _check_int4(weight.ndim == 2 and weight.dtype == torch.uint8, "the weight must be a 2D tensor of uint8")
    n, k = weight.shape[0], 2 * weight.shape[1]
    _check_int4(tiles in (2, 4, 8), f"innerKTiles must be 2, 4 or 8, not {tiles}")
    _check_int4(n % 8 == 0 and k % (16 * tiles) == 0, f"[{n}, {k}] must be a multiple of [8, {16 * tiles}]")
    return weight.new_empty((n // 8, k // (16 * tiles), 32, tiles // 2), dtype=torch.int32)


@lower("_convert_weight_to_int4pack", meta=_int4pack_meta)
def convert_weight_to_int4pack(weight: Value, tiles: int) -> Value:
    """Packs ``[n, k / 2]`` bytes, the even column in the high nibble."""
    n, k = weight.shape[0], 2 * weight.shape[1]
    bytes_ = hlo.convert(weight, torch.int32)
    pairs = [hlo.shift_right_logical(bytes_, 4), hlo.and_(bytes_, 15)]
    columns = hlo.concatenate([hlo.expand_dims(v, [2]) for v in pairs], 2)
    # row tile, row, outer tile, word, tile of the word, high column, column pair, parity
    split = hlo.reshape(columns, (n // 8, 8, k // (16 * tiles), tiles // 2, 2, 2, 4, 2))
    lanes = hlo.transpose(split, (0, 2, 1, 6, 3, 7, 4, 5))
    nibbles = hlo.reshape(lanes, (n // 8, k // (16 * tiles), 32, tiles // 2, 8))
    places = hlo.iota(nibbles.shape, 4, torch.int32) * 4
    return hlo.reduce_one(hlo.shift_left(nibbles, places), 0, [4], hlo.or_)


def _unpacked_int4(packed: Value) -> Value:
    """The ``[n, k]`` unsigned nibbles of packed weights, int32."""
    row_tiles, outer, _, words = packed.shape
    spread = hlo.broadcast_in_dim(packed, (*packed.shape, 8), range(4))
    nibbles = hlo.and_(hlo.shift_right_logical(spread, hlo.iota(spread.shape, 4, torch.int32) * 4), 15)
    lanes = hlo.reshape(nibbles, (row_tiles, outer, 8, 4, words, 2, 2, 2))
    return hlo.reshape(hlo.transpose(lanes, (0, 2, 1, 4, 6, 7, 3, 5)), (row_tiles * 8, outer * words * 32))


def _int4_mm_meta(x: Tensor, packed: Tensor, group: int, scale_and_zeros: Tensor) -> Tensor:
    check = torch._check
    check(x.ndim == 2 and x.dtype in _FLOATS, lambda: f"expected x to be a 2D tensor of f32/f16/bf16, got {x.dtype}")
    check(packed.ndim == 4 and packed.dtype == torch.int32, lambda: "w must be a 4D tensor of int32")
    n, k = packed.shape[0] * 8, packed.shape[1] * packed.shape[3] * 32
    check(x.shape[1] == k, lambda: f"x has {x.shape[1]} columns, and w was packed from {k}")
    check(
        group in (32, 64, 128, 256) and k % group == 0,
        lambda: f"qGroupSize {group} must be 32, 64, 128 or 256 and divide {k}",
    )
    want = (k // group, n, 2)
    check(
        tuple(scale_and_zeros.shape) == want,
        lambda: f"qScaleAndZeros must have shape {want}, got {tuple(scale_and_zeros.shape)}",
    )
    return x.new_empty((x.shape[0], n))


@lower("_weight_int4pack_mm", meta=_int4_mm_meta)
def weight_int4pack_mm(x: Value, packed: Value, group: int, scale_and_zeros: Value) -> Value:
    """``x @ w.T`` with ``w = (nibble - 8) * scale + zero``, a scale and a zero for each group of columns of a row."""
    w = _unpacked_int4(packed)
    n, k = w.shape
    spread = hlo.broadcast_in_dim(_float(scale_and_zeros), (k // group, group, n, 2), [0, 2, 3])
    both = hlo.reshape(spread, (k, n, 2))
    scale, zero = (hlo.squeeze(hlo.slice_dim(both, 2, i, i + 1), [2]) for i in range(2))
    dequantised = _float(hlo.transpose(w, (1, 0)) - 8) * scale + zero
    return matmul(x, hlo.convert(dequantised, x.dtype))


# ---- 8-bit floats with scales ----------------------------------------------------------------------------------------
_TENSOR, _ROW, _BLOCK_1X16, _BLOCK_1X32, _BLOCK_1X128, _BLOCK_128X128 = range(6)  # torch.nn.functional.ScalingType
_NO_SWIZZLE, _SWIZZLE_32_4_4 = range(2)  # torch.nn.functional.SwizzleType


def _product_meta(x: Tensor, y: Tensor, dtype: torch.dtype | None) -> Tensor:
    torch._check(
        x.ndim == 2 and y.ndim == 2 and x.shape[1] == y.shape[0],
        lambda: f"mat1 and mat2 shapes cannot be multiplied ({tuple(x.shape)} and {tuple(y.shape)})",
    )
    torch._check(
        x.dtype in _FLOAT8 and y.dtype in _FLOAT8,
        lambda: f"Expected both inputs to be fp8 types but got self.dtype={x.dtype} and mat2.dtype={y.dtype}",
    )
    return x.new_empty((x.shape[0], y.shape[1]), dtype=dtype or x.dtype)


def _mx_size(rows: int, k: int) -> int:
    """Elements of the padded, swizzled scales of 1x32 blocks of a ``[rows, k]`` operand."""
    return _ceil(rows, 128) * 128 * _ceil(_ceil(k, 32), 4) * 4


def _grid(scale: tuple[int, ...], m: int, k: int) -> bool:
    """Whether ``scale`` holds a float for the tensor, each row, or each block of 1 or 128 rows and 128 columns."""
    return scale in ((m, 1), (m, _ceil(k, 128)), (_ceil(m, 128), _ceil(k, 128)))


def _scaled_mm_meta(
    x: Tensor, y: Tensor, scale_x: Tensor, scale_y: Tensor, bias: Tensor | None = None,
    scale_result: Tensor | None = None, out_dtype: torch.dtype | None = None, use_fast_accum: bool = False,
) -> Tensor:  # fmt: skip
    out = _product_meta(x, y, out_dtype)
    (m, k), n = x.shape, y.shape[1]
    if scale_x.dtype == scale_y.dtype == torch.float8_e8m0fnu:
        valid = scale_x.numel() == _mx_size(m, k) and scale_y.numel() == _mx_size(n, k)
    else:
        both = scale_x.numel() == scale_y.numel() == 1
        valid = scale_x.dtype == scale_y.dtype == torch.float32 and (
            both or (_grid(tuple(scale_x.shape), m, k) and _grid(tuple(scale_y.shape[::-1]), n, k))
        )
    torch._check(
        valid,
        lambda: (
            f"Invalid scaling configuration. Both scales must be float32 and have one element, or shapes ({m}, 1) "
            f"and (1, {n}), or one per block of 1 or 128 rows and 128 columns ({m}, {_ceil(k, 128)}), "
            f"({_ceil(m, 128)}, {_ceil(k, 128)}) and ({_ceil(k, 128)}, {n}), ({_ceil(k, 128)}, {_ceil(n, 128)}); "
            f"or both must be float8_e8m0fnu and have {_mx_size(m, k)} and {_mx_size(n, k)} elements. "
            f"Got {scale_x.dtype} {tuple(scale_x.shape)} and {scale_y.dtype} {tuple(scale_y.shape)}."
        ),
    )
    return out


def _spread(scale: Value, shape: Shape) -> Value:
    """A grid of scales over the ``shape`` that it covers in equal blocks, the last ones perhaps cut."""
    for dim in range(2):
        count, size = scale.shape[dim], shape[dim]
        if count in (1, size):
            continue
        block = 128 if _ceil(size, 128) == count else 32
        repeated = hlo.broadcast_in_dim(
            scale, (*scale.shape[: dim + 1], block, *scale.shape[dim + 1 :]), [i + (i > dim) for i in range(2)]
        )
        merged = hlo.reshape(repeated, [block * n if i == dim else n for i, n in enumerate(scale.shape)])
        scale = hlo.slice_dim(merged, dim, 0, size)
    return hlo.broadcast_in_dim(scale, shape, [0, 1])


def _unswizzled(scale: Value, rows: int, k: int) -> Value:
    """Scales ``[rows, k / 32]`` from blocks of 128 rows and 4 columns stored as [32][4 quarters of the rows][4]."""
    row_blocks, column_blocks = _ceil(rows, 128), _ceil(_ceil(k, 32), 4)
    blocks = hlo.reshape(scale, (row_blocks, column_blocks, 32, 4, 4))
    grid = hlo.reshape(hlo.transpose(blocks, (0, 3, 2, 1, 4)), (row_blocks * 128, column_blocks * 4))
    return hlo.slice_(grid, (0, 0), (rows, _ceil(k, 32)))


def _scaled(x: Value, y: Value, scale_x: Value, scale_y: Value) -> Value:
    """``(x * scale_x) @ (y * scale_y)`` in float32; scales are grids over their operands."""
    if scale_x.shape[1] == scale_y.shape[0] == 1:
        # bfloat16 holds every float8 exactly and is what every TPU multiplies.
        z = matmul(hlo.convert(x, torch.bfloat16), hlo.convert(y, torch.bfloat16), torch.float32)
        return z * _spread(_float(scale_x), z.shape) * _spread(_float(scale_y), z.shape)
    a, b = (_float(v) * _spread(_float(scale), v.shape) for v, scale in ((x, scale_x), (y, scale_y)))
    if scale_x.dtype == scale_y.dtype == torch.float8_e8m0fnu:  # powers of two: bfloat16 holds the products too
        return matmul(hlo.convert(a, torch.bfloat16), hlo.convert(b, torch.bfloat16), torch.float32)
    return exact_matmul(a, b)


def _finished(z: Value, bias: Value | None, dtype: torch.dtype, scale_result: Value | None = None) -> Value:
    if bias is not None:
        z = z + hlo.broadcast_to(_float(bias), z.shape)
    if scale_result is not None and dtype in _FLOAT8:  # of no effect on others, as in CUDA
        z = z * hlo.broadcast_to(hlo.reshape(_float(scale_result), ()), z.shape)
    return hlo.convert(z, dtype)


@lower("_scaled_mm", meta=_scaled_mm_meta)
def scaled_mm(
    x: Value, y: Value, scale_x: Value, scale_y: Value, bias: Value | None = None, scale_result: Value | None = None,
    dtype: torch.dtype | None = None, fast: bool = False, *, result: list[Type],
) -> Value:  # fmt: skip
    """``(x * scale_x) @ (y * scale_y) + bias``; the shapes of the scales say what each of them covers."""
    (m, k), n = x.shape, y.shape[1]
    if scale_x.dtype == torch.float8_e8m0fnu:
        scale_x = _unswizzled(scale_x, m, k)
        scale_y = hlo.transpose(_unswizzled(scale_y, n, k), (1, 0))
    elif scale_x.numel == 1 and scale_y.numel == 1:
        scale_x, scale_y = hlo.reshape(scale_x, (1, 1)), hlo.reshape(scale_y, (1, 1))
    return _finished(_scaled(x, y, scale_x, scale_y), bias, result[0].dtype, scale_result)


def _scaled_mm_v2_meta(
    x: Tensor, y: Tensor, scale_x: list[Tensor], recipe_x: list[int], swizzle_x: list[int], scale_y: list[Tensor],
    recipe_y: list[int], swizzle_y: list[int], bias: Tensor | None, out_dtype: torch.dtype | None,
    contraction_dim: Sequence[int] = (), use_fast_accum: bool = False,
) -> Tensor:  # fmt: skip
    out = _product_meta(x, y, out_dtype)
    for name, scales, recipes, swizzles, rows in (
        ("a", scale_x, recipe_x, swizzle_x, x.shape[0]), ("b", scale_y, recipe_y, swizzle_y, y.shape[1]),
    ):  # fmt: skip
        if len(scales) != 1 or len(recipes) != 1 or recipes[0] == _BLOCK_1X16:
            raise NotImplementedError(f"_scaled_mm_v2 on tpu takes one scale without 1x16 blocks as scale_{name}.")
        _check_scale(name, scales[0], recipes[0], swizzles, rows, x.shape[1])
    return out


def _check_scale(name: str, scale: Tensor, recipe: int, swizzles: list[int], rows: int, k: int) -> None:
    swizzled = list(swizzles) == [_SWIZZLE_32_4_4]
    want = {
        _TENSOR: 1, _ROW: rows, _BLOCK_1X32: _mx_size(rows, k) if swizzled else rows * _ceil(k, 32),
        _BLOCK_1X128: rows * _ceil(k, 128), _BLOCK_128X128: _ceil(rows, 128) * _ceil(k, 128),
    }[recipe]  # fmt: skip
    dtype = torch.float8_e8m0fnu if recipe == _BLOCK_1X32 else torch.float32
    torch._check_value(
        scale.numel() == want and scale.dtype == dtype,
        lambda: f"scale_{name} must have {want} elements of {dtype}, got {scale.numel()} of {scale.dtype}",
    )


def _scale_grid(scale: Value, recipe: int, swizzles: list[int], rows: int, k: int, is_y: bool) -> Value:
    """The scale of an operand as a grid over its ``[rows, k]``, or over ``[k, rows]`` for the right one."""
    if list(swizzles) == [_SWIZZLE_32_4_4]:
        grid = _unswizzled(scale, rows, k)
        return hlo.transpose(grid, (1, 0)) if is_y else grid
    shape = {
        _TENSOR: (1, 1), _ROW: (rows, 1), _BLOCK_1X32: (rows, _ceil(k, 32)), _BLOCK_1X128: (rows, _ceil(k, 128)),
        _BLOCK_128X128: (_ceil(rows, 128), _ceil(k, 128)),
    }[recipe]  # fmt: skip
    return hlo.reshape(scale, shape[::-1] if is_y else shape)


@lower("_scaled_mm_v2", meta=_scaled_mm_v2_meta)
def scaled_mm_v2(
    x: Value, y: Value, scale_x: list[Value], recipe_x: list[int], swizzle_x: list[int], scale_y: list[Value],
    recipe_y: list[int], swizzle_y: list[int], bias: Value | None, dtype: torch.dtype | None,
    contraction_dim: Sequence[int] = (), fast: bool = False, *, result: list[Type],
) -> Value:  # fmt: skip
    """``_scaled_mm`` with the coverage of the scales said in so many words."""
    (m, k), n = x.shape, y.shape[1]
    grids = (
        _scale_grid(scale_x[0], recipe_x[0], swizzle_x, m, k, False),
        _scale_grid(scale_y[0], recipe_y[0], swizzle_y, n, k, True),
    )
    return _finished(_scaled(x, y, *grids), bias, result[0].dtype)


# ---- groups ----------------------------------------------------------------------------------------------------------
def _grouped_shape(x: Tensor, y: Tensor, offs: Tensor | None) -> tuple[int, ...]:
    """The result's shape; raises what is wrong with the operands'."""
    check = torch._check
    check(
        x.ndim in (2, 3) and y.ndim in (2, 3),
        lambda: f"Multiplicands must be 2D or 3D but got mat_a.dim()={x.ndim} and mat_b.dim()={y.ndim}",
    )
    check(
        x.shape[-1] == y.shape[-2],
        lambda: f"contraction dimension of mat_a and mat_b must match, got {tuple(x.shape)} and {tuple(y.shape)}",
    )
    check(
        (offs is not None) == (x.ndim == 2 or y.ndim == 2),
        lambda: "Have to provide offsets if there is a 2d matrix, and none otherwise",
    )
    if offs is None:
        check(x.shape[0] == y.shape[0], lambda: "batched dimension has to match")
        return x.shape[0], x.shape[1], y.shape[2]
    check(offs.ndim == 1 and offs.dtype == torch.int32, lambda: "Offsets have to be a 1D tensor of int32")
    groups = offs.shape[0]
    if x.ndim == 2 and y.ndim == 2:
        return groups, x.shape[0], y.shape[1]
    check(groups == (y if x.ndim == 2 else x).shape[0], lambda: "matrix batch sizes have to match")
    return x.shape[-2], y.shape[-1]


def grouped_mm_meta(
    x: Tensor, y: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    torch._check(
        x.dtype == y.dtype and x.dtype in _FLOATS,
        lambda: f"Expected inputs of one type, Float32, BFloat16 or Float16, but got {x.dtype} and {y.dtype}.",
    )
    torch._check(bias is None, lambda: "Bias not supported yet")
    return x.new_empty(_grouped_shape(x, y, offs), dtype=out_dtype or x.dtype)


def _membership(offs: Value, size: int) -> Value:
    """``[groups, size]``: whether a place of the ragged dimension lies in a group; behind the last, in none."""
    shape = (offs.shape[0], size)
    ends = hlo.broadcast_in_dim(offs, shape, [0])
    starts = hlo.broadcast_in_dim(hlo.pad(offs, 0, [1], [-1]), shape, [0])
    place = hlo.iota(shape, 1, torch.int32)
    return hlo.and_(place >= starts, place < ends)


def _grouped(x: Value, y: Value, offs: Value | None) -> Value:
    """The product of each group, float32; a ragged dimension is masked, so another division is not another program."""
    if offs is None:
        return matmul(x, y, torch.float32)
    ragged = x.shape[1] if x.ndim == 2 and y.ndim == 2 else x.shape[0] if x.ndim == 2 else y.shape[1]
    member = _membership(offs, ragged)
    groups = offs.shape[0]
    if x.ndim == 2 and y.ndim == 2:  # the summed dimension is ragged
        mine = hlo.broadcast_in_dim(member, (groups, *x.shape), [0, 2])
        masked = hlo.select(mine, hlo.broadcast_in_dim(x, mine.shape, [1, 2]), hlo.constant(0, x.dtype, mine.shape))
        return product(masked, y, contract=((2,), (0,)), dtype=torch.float32)
    left = x.ndim == 2
    shape = (x.shape[0], y.shape[2]) if left else (x.shape[1], y.shape[1])
    total = hlo.constant(0, torch.float32, shape)
    for g in range(groups):
        own = hlo.squeeze(hlo.slice_dim(y if left else x, 0, g, g + 1), [0])
        part = matmul(x, own, torch.float32) if left else matmul(own, y, torch.float32)
        mine = hlo.squeeze(hlo.slice_dim(member, 0, g, g + 1), [0])
        total = hlo.select(hlo.broadcast_in_dim(mine, shape, [0 if left else 1]), part, total)
    return total


@lower("_grouped_mm", meta=grouped_mm_meta)
def grouped_mm(
    x: Value, y: Value, offs: Value | None = None, bias: Value | None = None, dtype: torch.dtype | None = None, *,
    result: list[Type],
) -> Value:  # fmt: skip
    """A product per group: group ``i`` ends at ``offs[i]`` of the rows of ``x``, the columns of ``y``, or the sum."""
    return hlo.convert(_grouped(x, y, offs), result[0].dtype)


def _scaled_grouped_mm_meta(
    x: Tensor, y: Tensor, scale_x: Tensor, scale_y: Tensor, offs: Tensor | None = None, bias: Tensor | None = None,
    scale_result: Tensor | None = None, out_dtype: torch.dtype | None = None, use_fast_accum: bool = False,
) -> Tensor:  # fmt: skip
    torch._check(
        x.dtype in _FLOAT8 and y.dtype in _FLOAT8,
        lambda: f"Expected inputs of fp8 types but got mat_a.dtype={x.dtype} and mat_b.dtype={y.dtype}.",
    )
    torch._check(bias is None and scale_result is None, lambda: "Bias and scale_result are not supported yet")
    shape = _grouped_shape(x, y, offs)
    groups = shape[0] if x.ndim == y.ndim == 2 else 1
    for name, scale, want in (
        ("scale_a", scale_x, (groups * x.shape[0],) if x.ndim == 2 else tuple(x.shape[:2])),
        ("scale_b", scale_y, (groups * y.shape[1],) if y.ndim == 2 else (y.shape[0], y.shape[2])),
    ):
        torch._check(
            scale.dtype == torch.float32 and tuple(scale.shape) == want,
            lambda: f"Expected {name} to be float32 of shape {want}, got {scale.dtype} of {tuple(scale.shape)}.",  # noqa: B023
        )
    return x.new_empty(shape, dtype=out_dtype or torch.bfloat16)


@lower("_scaled_grouped_mm", meta=_scaled_grouped_mm_meta)
def scaled_grouped_mm(
    x: Value, y: Value, scale_x: Value, scale_y: Value, offs: Value | None = None, bias: Value | None = None,
    scale_result: Value | None = None, dtype: torch.dtype | None = None, fast: bool = False, *, result: list[Type],
) -> Value:  # fmt: skip
    """``_grouped_mm`` of float8 operands with a scale for each row of ``x`` and each column of ``y``."""
    both = x.ndim == y.ndim == 2
    z = _grouped(hlo.convert(x, torch.bfloat16), hlo.convert(y, torch.bfloat16), offs)
    if z.ndim == 3:
        rows, columns = hlo.reshape(scale_x, z.shape[:2]), hlo.reshape(scale_y, (z.shape[0], z.shape[2]))
        z = z * hlo.broadcast_in_dim(rows, z.shape, [0, 1]) * hlo.broadcast_in_dim(columns, z.shape, [0, 2])
        return hlo.convert(z, result[0].dtype)
    assert offs is not None and not both
    left = x.ndim == 2  # the other operand has a scale per group: each place of the ragged dimension takes its group's
    member = hlo.convert(_membership(offs, z.shape[0 if left else 1]), torch.float32)
    whole, grouped = (scale_x, scale_y) if left else (scale_y, scale_x)
    own = hlo.dot_general(member, grouped, contract=((0,), (0,)), dtype=torch.float32, precision="HIGHEST")
    own = own if left else hlo.transpose(own, (1, 0))
    return hlo.convert(z * hlo.broadcast_in_dim(whole, z.shape, [0 if left else 1]) * own, result[0].dtype)
