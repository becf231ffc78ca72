"""Random programs over sizes that change: what tpu gives is what the CPU gives, layout and all."""

from __future__ import annotations

import os
import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from tests.support import matmul_precision

PROGRAMS = int(os.environ.get("TORCH_TPU_SIZE_PROGRAMS", "12"))
Step = Callable[[torch.Tensor, int], torch.Tensor]


def _windows(rng: random.Random) -> list[Step]:
    steps: list[Step] = [
        lambda x, n: x.transpose(0, -1),
        lambda x, n: x[..., 1:],
        lambda x, n: x[:, ::2] if x.ndim > 1 else x[::2],
        lambda x, n: x.movedim(0, -1),
        lambda x, n: x.unsqueeze(1),
        lambda x, n: x.unsqueeze(0).expand(2, *x.shape),
        lambda x, n: x.flip(0),
        lambda x, n: x[-1:],
        lambda x, n: x.select(-1, -1).unsqueeze(-1),
        lambda x, n: x.contiguous(),
    ]
    return rng.sample(steps, rng.randint(0, 3))


def _operators(rng: random.Random) -> list[Step]:
    k = rng.randint(0, 5)
    steps: list[Step] = [
        lambda x, n: x + k,
        lambda x, n: x * x,
        lambda x, n: x * n,
        lambda x, n: x.sin(),
        lambda x, n: x.sum(0, keepdim=True) + x,
        lambda x, n: x.softmax(-1),
        lambda x, n: x.cumsum(0),
        lambda x, n: torch.cat([x, x[:1]], 0),
        lambda x, n: torch.where(x > 0, x, x.mean(-1, keepdim=True)),
        lambda x, n: x - x.amax(-1, keepdim=True),
        lambda x, n: F.layer_norm(x, x.shape[-1:]) if x.shape[-1] < 3 else x.relu(),
        lambda x, n: x.clone().mul_(2).add_(x),
        lambda x, n: x.masked_fill(x < 0, 0.5),
        lambda x, n: torch.stack([x, -x]),
        lambda x, n: x.to(torch.bfloat16).float(),
        lambda x, n: x @ x.mT if x.ndim > 1 else x,
        lambda x, n: x[torch.arange(x.shape[0] - 1, -1, -1, device=x.device)],
        lambda x, n: x + torch.arange(x.shape[-1], device=x.device),
        lambda x, n: x.sort(-1).values,
        lambda x, n: x.new_zeros(x.shape).copy_(x),
    ]
    return rng.sample(steps, rng.randint(1, 3))


def _program(seed: int) -> tuple[list[Step], Callable[[int, int], tuple[int, ...]]]:
    rng = random.Random(seed)
    steps = [*_windows(rng), *_operators(rng), *_windows(rng), *_operators(rng)]
    form = rng.randint(0, 4)
    a, b = rng.randint(2, 5), rng.randint(3, 6)

    def shape(n: int, m: int) -> tuple[int, ...]:
        return ((n, a), (a, n, b), (b, n), (n, n), (n, m, b))[form]

    return steps, shape


def _meant(t: torch.Tensor) -> list[int]:
    """Strides, where they mean something: PyTorch's own kernels differ in the others."""
    return [s for n, s in zip(t.shape, t.stride(), strict=True) if n > 1 and t.numel()]


@pytest.mark.parametrize("fused", [False, True], ids=["strict", "fused"])
@pytest.mark.parametrize("seed", range(PROGRAMS))
def test_random_programs(seed: int, fused: bool) -> None:
    torch.tpu._clear_cache()
    steps, shape = _program(seed)
    rng = random.Random(seed)
    sizes = [(n, rng.randint(2, 9)) for n in rng.sample(range(2, 40), 15)]
    mode = torch.tpu.EagerMode.DEFER_AND_FUSE if fused else torch.tpu.EagerMode.DEFER_NEVER
    with matmul_precision("highest"), torch.tpu.set_eager_mode(mode):
        for n, m in sizes:
            x = torch.randn(shape(n, m), generator=torch.Generator().manual_seed(n))
            y = x.to("tpu")
            for step in steps:
                if x.numel() == 0:
                    break
                x, y = step(x, n), step(y, n)
                assert y.shape == x.shape and _meant(y) == _meant(x), (seed, n, m)
            largest = float(x.abs().max()) if x.numel() else 0.0
            torch.testing.assert_close(y.cpu(), x, rtol=1e-3, atol=1e-3 * max(largest, 1.0))
