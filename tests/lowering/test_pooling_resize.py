"""Pooling, resizing and grid sampling against CPU PyTorch, forward and backward."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from tests.lowering.harness import check

aten = torch.ops.aten
NAN = float("nan")


def image(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape).to(dtype) if dtype.is_floating_point else torch.randint(-50, 50, shape).to(dtype)


# ---- maximum --------------------------------------------------------------------------------------------------------
MAX_POOLS = [
    ((2, 3, 7, 8), [3, 2], [2, 1], [1, 1], [1, 1], False),
    ((2, 3, 7, 8), [3], [], [0], [2], True),
    ((3, 7, 9), [2, 2], [3, 2], [1, 0], [1, 2], True),
    ((2, 3, 9, 8), [7, 6], [2, 2], [2, 3], [1, 1], False),  # more taps than the gradient visits one by one
    ((0, 3, 7, 8), [2, 2], [2, 2], [0, 0], [1, 1], False),
    ((2, 3, 5, 6, 4), [2, 3, 2], [2, 2, 1], [1, 1, 0], [1, 1, 1], True),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
@pytest.mark.parametrize("case", MAX_POOLS, ids=str)
def test_max_pool(case: tuple[Any, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    shape, geometry = case[0], case[1:]
    rank = 3 if len(shape) == 5 else 2
    op = getattr(aten, f"max_pool{rank}d_with_indices")
    x = image(*shape, dtype=dtype).clamp(-1, 1)  # many equal maxima
    check(op.default, x, *geometry)
    if dtype.is_floating_point:
        y, at = op(x, *geometry)
        backward = getattr(aten, f"max_pool{rank}d_with_indices_backward").default
        check(backward, image(*y.shape, dtype=dtype), x, *geometry, at, rtol=1e-2, atol=5e-2, strides=False)


def test_max_pool_nan_and_infinity() -> None:
    x = torch.tensor([[[1.0, NAN, 3.0, NAN], [NAN, 2.0, -1.0, 0.0], [0.0, 1.0, 2.0, 3.0], [4.0, 4.0, 4.0, 4.0]]])
    check(aten.max_pool2d_with_indices.default, x, [3, 3], [1, 1])
    check(aten.max_pool2d_with_indices.default, torch.full((1, 4, 4), -float("inf")), [2, 2], [1, 1], [1, 1])
    check(aten.adaptive_max_pool2d.default, x, [3, 2])


@pytest.mark.parametrize("rank", [2, 3])
def test_max_unpool_and_fractional(rank: int) -> None:
    torch.manual_seed(0)
    x = image(2, 3, *(8, 6, 4)[:rank])
    y, at = getattr(aten, f"max_pool{rank}d_with_indices")(x, [2] * rank, [2] * rank)
    geometry = ([2] * rank, [0] * rank) if rank == 3 else ()
    check(getattr(aten, f"max_unpool{rank}d").default, y, at, list(x.shape[2:]), *geometry)
    x, samples, out = image(2, 3, 9, 8, 7)[..., *([slice(None)] * rank)], torch.rand(2, 3, rank), [4, 3, 2][:rank]
    x = x if rank == 3 else x[:, :, 0].contiguous()
    forward = getattr(aten, f"fractional_max_pool{rank}d")
    check(forward.default, x, [2] * rank, out, samples)
    y, at = forward(x, [2] * rank, out, samples)
    backward = getattr(aten, f"fractional_max_pool{rank}d_backward").default
    check(backward, image(*y.shape), x, [2] * rank, out, at)


# ---- mean -----------------------------------------------------------------------------------------------------------
AVG_POOLS = [
    ((2, 3, 7, 8), [3, 2], [2, 1], [1, 1], False, True, None),
    ((2, 3, 7, 8), [3, 2], [2, 3], [1, 1], True, False, None),
    ((3, 7, 8), [3], [], [1], True, True, None),
    ((2, 3, 7, 8), [3, 3], [2, 2], [1, 0], False, True, 5),
    ((2, 3, 5, 6, 4), [2, 3, 2], [2, 2, 1], [1, 1, 0], True, False, None),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", AVG_POOLS, ids=str)
def test_avg_pool(case: tuple[Any, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    shape, geometry = case[0], case[1:]
    rank = 3 if len(shape) == 5 else 2
    if rank == 3 and dtype == torch.bfloat16:
        pytest.skip("PyTorch has no bfloat16 avg_pool3d on CPU to compare with")
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {}
    x = image(*shape, dtype=dtype)
    op = getattr(aten, f"avg_pool{rank}d")
    check(op.default, x, *geometry, **tolerance)
    grad = image(*op(x, *geometry).shape, dtype=dtype)
    check(getattr(aten, f"avg_pool{rank}d_backward").default, grad, x, *geometry, **tolerance)


def test_avg_pool_of_integers() -> None:
    check(aten.avg_pool2d.default, image(2, 3, 6, 6, dtype=torch.int64), [2, 2])


@pytest.mark.parametrize("size", [[3, 4], [7, 8], [1, 1], [9, 5]], ids=str)
def test_adaptive_pool(size: list[int]) -> None:
    torch.manual_seed(0)
    x = image(2, 3, 7, 8)
    check(aten._adaptive_avg_pool2d.default, x, size)
    check(aten._adaptive_avg_pool2d_backward.default, image(2, 3, *size), x)
    check(aten.adaptive_max_pool2d.default, x, size)
    at = aten.adaptive_max_pool2d(x, size)[1]
    check(aten.adaptive_max_pool2d_backward.default, image(2, 3, *size), x, at)
    x = image(2, 3, 5, 7, 8)
    check(aten._adaptive_avg_pool3d.default, x, [2, *size])
    check(aten._adaptive_avg_pool3d_backward.default, image(2, 3, 2, *size), x)
    check(aten.adaptive_max_pool3d.default, x, [2, *size])


# ---- resize ---------------------------------------------------------------------------------------------------------
RESIZES = {
    "upsample_nearest1d": 1, "_upsample_nearest_exact1d": 1, "upsample_linear1d": 1,
    "upsample_nearest2d": 2, "_upsample_nearest_exact2d": 2, "upsample_bilinear2d": 2, "upsample_bicubic2d": 2,
    "_upsample_bilinear2d_aa": 2, "_upsample_bicubic2d_aa": 2, "_upsample_lanczos2d_aa": 2,
    "upsample_nearest3d": 3, "_upsample_nearest_exact3d": 3, "upsample_trilinear3d": 3,
}  # fmt: skip
SIZES = [[13, 10, 4], [6, 4, 12], [12, 27, 2]]  # of 6, 9, 4


@pytest.mark.parametrize("name", RESIZES)
def test_resize(name: str) -> None:
    torch.manual_seed(0)
    rank = RESIZES[name]
    x, op = image(2, 3, *(6, 9, 4)[:rank]), getattr(aten, name)
    aligns = [()] if "nearest" in name else [(False,), (True,)]
    tolerance = {"rtol": 1e-4, "atol": 1e-5}
    for size, align in itertools.product(SIZES, aligns):
        check(op.default, x, size[:rank], *align, **tolerance)
        if hasattr(aten, f"{name}_backward"):
            grad = image(2, 3, *size[:rank])
            backward = getattr(aten, f"{name}_backward").default
            check(backward, grad, size[:rank], list(x.shape), *align, **tolerance)
    check(op.vec, x, None, *aligns[0], [1.7, 0.6, 2.0][:rank], **tolerance)
    check(op.vec, x.double(), None, *aligns[0], [1.7, 0.6, 2.0][:rank])
    if not name.endswith("aa"):  # which PyTorch has for float32 and float64 alone
        check(op.default, x.bfloat16(), SIZES[0][:rank], *aligns[0], rtol=2e-2, atol=5e-2)


@pytest.mark.parametrize(
    "name", ["upsample_nearest2d", "upsample_bilinear2d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"]
)
def test_resize_bytes(name: str) -> None:
    """PyTorch resizes bytes in fixed point; so does the rule, to the bit."""
    torch.manual_seed(0)
    x = torch.randint(0, 256, (2, 3, 40, 50), dtype=torch.uint8)
    align = () if "nearest" in name else (False,)
    for size in ([20, 17], [80, 66], [40, 3]):
        check(getattr(aten, name).default, x, size, *align)


@pytest.mark.parametrize("align", [False, True])
@pytest.mark.parametrize("padding", range(3))
@pytest.mark.parametrize("mode", range(3))
def test_grid_sampler(mode: int, padding: int, align: bool) -> None:
    torch.manual_seed(0)
    x, grid, grad = image(2, 3, 5, 6), torch.rand(2, 4, 7, 2) * 3 - 1.5, image(2, 3, 4, 7)
    tolerance = {"rtol": 1e-4, "atol": 1e-4}
    check(aten.grid_sampler_2d.default, x, grid, mode, padding, align, **tolerance)
    check(aten.grid_sampler_2d_backward.default, grad, x, grid, mode, padding, align, [True, True], **tolerance)
    if mode == 2:
        return
    x, grid, grad = image(2, 3, 5, 6, 4), torch.rand(2, 4, 2, 3, 3) * 3 - 1.5, image(2, 3, 4, 2, 3)
    check(aten.grid_sampler_3d.default, x, grid, mode, padding, align, **tolerance)
    check(aten.grid_sampler_3d_backward.default, grad, x, grid, mode, padding, align, [False, True], **tolerance)


def test_rearrangements() -> None:
    check(aten.pixel_shuffle.default, image(2, 8, 3, 4), 2)
    check(aten.pixel_unshuffle.default, image(2, 2, 6, 4), 2)
    check(aten.channel_shuffle.default, image(2, 6, 3, 4), 3)
    check(aten.im2col.default, image(2, 3, 6, 7), [3, 2], [1, 2], [1, 0], [2, 1])
    check(aten.col2im.default, image(2, 3 * 6, 30), [7, 7], [3, 2], [1, 1], [0, 0], [1, 1])
    check(aten.affine_grid_generator.default, image(2, 2, 3), [2, 3, 4, 5], True, rtol=1e-4, atol=1e-5)
