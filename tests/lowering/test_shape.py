"""Joining, padding, flipping, repeating, copies and gradients of views, against CPU PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.lowering.harness import check, run

aten = torch.ops.aten
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]


def make(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64).to(dtype)
    return torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)


def f32(*shape: int) -> torch.Tensor:
    return make(torch.float32, *shape)


# ---- joining --------------------------------------------------------------------------------------------------------
JOINED = {
    "rows": ([f32(2, 3), f32(1, 3)], 0),
    "columns": ([f32(2, 3), f32(2, 0), f32(2, 4)], -1),
    "legacy empty": ([f32(0), f32(2, 3), f32(2, 1)], 1),
    "all empty": ([f32(0), f32(0)], 0),
    "promoted": ([make(torch.int64, 3), make(torch.bool, 2), make(torch.bfloat16, 1)], 0),
    "one": ([f32(3, 2)], 1),
    "channels last": ([f32(2, 3, 4, 5).to(memory_format=torch.channels_last)] * 2, 1),
}


@pytest.mark.parametrize("tensors, dim", JOINED.values(), ids=JOINED)
def test_cat(tensors: list[torch.Tensor], dim: int) -> None:
    check(aten.cat.default, tensors, dim)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_stack(dim: int) -> None:
    check(aten.stack.default, [f32(2, 3), make(torch.float64, 2, 3), make(torch.int32, 2, 3)], dim)
    check(aten.stack.default, [f32(0, 3), f32(0, 3)], dim)


# ---- one-to-one and repetition --------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_moves(dtype: torch.dtype) -> None:
    x = make(dtype, 3, 4, 5)
    check(aten.flip.default, x, [0, -1])
    check(aten.flip.default, make(dtype), [])
    for shifts, dims in (([1], []), ([2, -6], [0, -1]), ([4, 1], [1, 1]), ([0], [2]), ([3], [-3])):
        check(aten.roll.default, x, shifts, dims)
    check(aten.roll.default, make(dtype, 0, 3), [1], [0])
    check(aten.rot90.default, x, 3, [0, 2])
    check(aten.repeat.default, x, [2, 1, 3, 2])
    check(aten.repeat.default, x, [1, 0, 1])
    check(aten.repeat.default, make(dtype), [3, 2])
    for diagonal in (-2, 0, 3, 2**40):
        check(aten.tril.default, x, diagonal)
        check(aten.triu.default, x, -diagonal)
    check(aten.channel_shuffle.default, make(dtype, 2, 6, 2, 2), 3)
    check(aten.block_diag.default, [x[0], make(dtype), x[0, 0]])


def test_in_place_and_out() -> None:
    check(aten.tril_.default, f32(4, 4).t(), 1)
    check(aten.constant_pad_nd.default, f32(3, 4).t(), [1, -1, 0, 2], 2.5)
    check(aten.cat.out, [f32(2), f32(3)], 0, out=torch.empty(5))


# ---- padding --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("padding", [[1, 2], [-1, 2, 0, 3], [2, -3, -1, -1, 4, 0], [0, 0]], ids=str)
def test_constant_pad(padding: list[int], dtype: torch.dtype) -> None:
    check(aten.constant_pad_nd.default, make(dtype, 3, 4, 5), padding, 3)


BORDERS = {
    1: [[2, 1], [0, 3], [-1, 2]],
    2: [[1, 2, 3, 0], [-1, 1, 0, -2]],
    3: [[1, 2, 0, 3, 1, 1], [2, -1, 1, 0, -1, 2]],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.complex64], ids=str)
@pytest.mark.parametrize("rank", BORDERS)
@pytest.mark.parametrize("kind", ["reflection", "replication"])
def test_border(kind: str, rank: int, dtype: torch.dtype) -> None:
    forward, backward = (
        getattr(aten, f"{kind}_pad{rank}d").default,
        getattr(aten, f"{kind}_pad{rank}d_backward").default,
    )
    for padding in BORDERS[rank]:
        for lead in ((2,), (2, 3)):
            x = make(dtype, *lead, *(6, 5, 4)[:rank])
            check(forward, x, padding)
            if dtype.is_floating_point:
                close = {"rtol": 0.1, "atol": 0.1} if dtype == torch.bfloat16 else {}  # the CPU rounds every sum
                check(backward, make(dtype, *forward(x, padding).shape), x, padding, **close)


# ---- views as values ------------------------------------------------------------------------------------------------
X = f32(4, 5, 6)
COPIES: list[tuple[Any, ...]] = [
    (aten.slice_copy.Tensor, X, 1, -4, 5, 2),
    (aten.slice_copy.Tensor, X, 2, None, 100),
    (aten.select_copy.int, X, -1, -2),
    (aten.split_copy.Tensor, X, 2, 1),
    (aten.split_with_sizes_copy.default, X, [1, 4], 1),
    (aten.unbind_copy.int, X, 1),
    (aten.narrow_copy.default, X, 0, 1, 2),
    (aten.permute_copy.default, X, [2, 0, 1]),
    (aten.transpose_copy.int, X, 0, -1),
    (aten.expand_copy.default, f32(5, 1), [4, -1, 3]),
    (aten.view_copy.default, X, [-1, 10]),
    (aten._reshape_copy.default, X.transpose(0, 1), [-1, 10]),
    (aten.unfold_copy.default, X, 1, 3, 1),
    (aten.diagonal_copy.default, X, 1, 0, 2),
    (aten.as_strided_copy.default, X, [3, 2], [7, 0], 5),
    (aten.squeeze_copy.default, f32(1, 3, 1)),
    (aten.unsqueeze_copy.default, X, 1),
    (aten.detach_copy.default, X),
    (aten.alias_copy.default, X),
    (aten.view_as_real_copy.default, make(torch.complex64, 3, 2)),
    (aten.view_as_complex_copy.default, f32(3, 4, 2)),
    (aten._unsafe_view.default, X, [20, 6]),
    (aten.unsafe_split.Tensor, X, 4, 2),
    (aten.diag_embed.default, X, -1, 0, 2),
    (aten.slice_scatter.default, X, f32(4, 2, 6), 1, 1, 5, 2),
    (aten.slice_scatter.default, X, f32(4, 5, 6) + 1),
    (aten.select_scatter.default, X, f32(4, 6), 1, -2),
    (aten.diagonal_scatter.default, X, f32(6, 4) + 1, -1, 0, 1),
    (aten.as_strided_scatter.default, X, f32(2, 3) + 1, [2, 3], [30, 2], 1),
    (aten.as_strided_scatter.default, X.transpose(0, 2), f32(2, 3) + 1, [2, 3], [30, 2], 1),
]


@pytest.mark.parametrize("case", COPIES, ids=lambda c: f"{c[0].__name__}")
def test_copies(case: tuple[Any, ...]) -> None:
    op, x, *rest = case
    if op is aten.diagonal_scatter.default:
        rest[0] = f32(*x.diagonal(*rest[1:]).shape) + 1
    check(op, x, *rest)


# ---- gradients of views ---------------------------------------------------------------------------------------------
def grad_of(view: Any, x: torch.Tensor, *args: Any) -> torch.Tensor:
    return f32(*view(x, *args).shape)


GRADIENTS: list[tuple[Any, Any, tuple[Any, ...]]] = [
    *(
        (aten.slice_backward, torch.ops.aten.slice.Tensor, a)
        for a in ((1, 1, 5, 2), (0, -3, 4, 1), (2, 0, 2**60, 4), (1, 2, 2, 1))
    ),
    *((aten.select_backward, torch.select, a) for a in ((1, -2), (-1, 0))),
    *((aten.diagonal_backward, torch.diagonal, a) for a in ((0, 0, 1), (-2, 2, 0), (1, -1, -2))),
    *((aten.unfold_backward, torch.Tensor.unfold, a) for a in ((1, 3, 1), (2, 2, 2), (2, 2, 3), (0, 4, 1), (-1, 1, 5))),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
@pytest.mark.parametrize("backward, view, args", GRADIENTS, ids=lambda v: v if isinstance(v, tuple) else None)
def test_gradients(backward: Any, view: Any, args: tuple[Any, ...], dtype: torch.dtype) -> None:
    grad = grad_of(view, X, *args).to(dtype)
    close = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {}
    check(backward.default, grad, list(X.shape), *args, **close)


def test_a_view_copy_is_no_gather() -> None:
    """Slices, steps and diagonals are slices of the base, whatever the step."""
    x = f32(8, 9)[1:, ::2]
    _, plan, _ = run(aten.permute_copy.default, x.diagonal(), [0])
    assert "gather" not in plan.text


def test_a_decomposition_may_reshape_what_is_no_view() -> None:
    """im2col ends in a reshape that copies: a composite, though its schema says view."""
    check(aten.im2col.default, f32(1, 1, 6, 8), [3, 3], [1, 1], [0, 0], [1, 1])
