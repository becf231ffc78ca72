"""Results lie in memory as the CPU's do, also where PyTorch's meta kernels follow another device, and in ``out=``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

from tests.lowering.harness import run

aten = torch.ops.aten


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


def columns_first(*shape: int) -> torch.Tensor:
    return randn(*shape[:-2], shape[-1], shape[-2]).mT


def channels_last(*shape: int) -> torch.Tensor:
    return randn(*shape).contiguous(memory_format=torch.channels_last)


def geometry(results: Any) -> list[tuple[Any, ...]]:
    tensors = [t for t in tree_leaves(results) if isinstance(t, torch.Tensor)]
    return [(tuple(t.shape), t.stride() if t.numel() else (), t.dtype) for t in tensors]


CALLS: list[tuple[OpOverload, tuple[Any, ...]]] = [
    (aten._linalg_svd.default, (randn(2, 5, 3), True)),
    (aten.linalg_lstsq.default, (randn(4, 3), randn(4, 2))),
    (aten.linalg_lstsq.default, (randn(2, 4, 3), randn(2, 4))),
    (aten._fft_r2c.default, (randn(5, 6, 7), [0, 2], 0, True)),
    (aten._fft_c2c.default, (randn(5, 6, 7, 2).view(35, 6, 2).to(torch.complex64), [1], 0, True)),
    (aten.nonzero_static.default, (torch.eye(4),)),
    (aten.reflection_pad2d.default, (channels_last(2, 3, 4, 5), [1, 1, 1, 1])),
    (aten.replication_pad3d.default, (channels_last(2, 3, 4, 5), [1] * 6)),
    (aten.channel_shuffle.default, (channels_last(2, 4, 3, 3), 2)),
    (aten.pow.Scalar, (2.0, columns_first(4, 5))),
    (aten.ldexp.Tensor, (randn(10, 1, 5), columns_first(10, 5))),
    (aten.nll_loss2d_forward.default, (columns_first(2, 3, 4, 5), torch.ones(2, 4, 5).long(), None, 0, -100)),
    (aten.native_dropout_backward.default, (columns_first(3, 4), torch.ones(3, 4).bool(), 2.0)),
    (aten.normal.Tensor_float, (columns_first(3, 4),)),
    (aten.view_copy.default, (columns_first(3, 4), [12])),
    (aten.native_batch_norm.default, (columns_first(2, 3, 4), None, None, randn(3), randn(3).abs(), False, 0.1, 1e-5)),
    (aten.native_batch_norm.default, (randn(0, 3), None, None, randn(3), randn(3).abs(), False, 0.1, 1e-5)),
    (aten.upsample_nearest2d.default, (randn(0, 2, 3, 3), [4, 4])),
]


@pytest.mark.parametrize("op, args", CALLS, ids=lambda x: str(x) if isinstance(x, OpOverload) else "")
def test_result_lies_as_on_the_cpu(op: OpOverload, args: tuple[Any, ...]) -> None:
    options = {"size": 5} if op is aten.nonzero_static.default else {}
    assert geometry(run(op, *args, **options)[0]) == geometry(op(*args, **options))


RESIZED: list[tuple[OpOverload, tuple[Any, ...], tuple[str, ...]]] = [
    (aten.linalg_qr.out, (randn(5, 3),), ("Q", "R")),
    (aten.linalg_lstsq.out, (randn(4, 3), randn(4, 2)), ("solution", "residuals", "rank", "singular_values")),
    (aten.geqrf.a, (randn(5, 3),), ("a", "tau")),
    (aten.cat.out, ([channels_last(1, 2, 3, 3), channels_last(1, 2, 3, 3)],), ("out",)),
    (aten._fft_c2c.out, (columns_first(4, 5).to(torch.complex64), [0], 0, True), ("out",)),
    (aten.cholesky_inverse.out, (torch.eye(4),), ("out",)),
    (aten.cholesky_solve.out, (columns_first(4, 4), torch.eye(4)), ("out",)),
    (aten.zeros.out, ([2, 3],), ("out",)),
]


@pytest.mark.parametrize("op, args, names", RESIZED, ids=lambda x: str(x) if isinstance(x, OpOverload) else "")
def test_resized_out_lies_as_on_the_cpu(op: OpOverload, args: tuple[Any, ...], names: tuple[str, ...]) -> None:
    def empty() -> dict[str, torch.Tensor]:
        dtypes = {"rank": torch.int64, "out": args[0].dtype if isinstance(args[0], torch.Tensor) else torch.float32}
        return {name: torch.empty(0, dtype=dtypes.get(name, torch.float32)) for name in names}

    expected = empty()
    op(*args, **expected)
    got, _, _ = run(op, *args, **empty())
    assert geometry(got) == geometry(list(expected.values()))
    torch.testing.assert_close([t.abs() for t in got], [t.abs() for t in expected.values()])


def test_out_of_the_right_size_keeps_its_layout() -> None:
    out = torch.zeros(3, 3, 2)[..., 0]
    got, plan, _ = run(aten.cholesky_inverse.out, torch.eye(3), out=out)
    assert plan.resizes == [] and got[0].stride() == out.stride()
