"""``torch.autocast("tpu")`` casts by CUDA's lists, to bfloat16 unless told otherwise."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support import assert_same

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def ones(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype, device="tpu")


LOWER: dict[str, Callable[[], torch.Tensor]] = {
    "matmul": lambda: ones(2, 3) @ ones(3, 4),
    "mm": lambda: torch.mm(ones(2, 3), ones(3, 4)),
    "mv": lambda: torch.mv(ones(2, 3), ones(3)),
    "bmm": lambda: torch.bmm(ones(2, 3, 4), ones(2, 4, 5)),
    "addmm": lambda: torch.addmm(ones(4), ones(2, 3), ones(3, 4)),
    "baddbmm": lambda: torch.baddbmm(ones(2, 3, 5), ones(2, 3, 4), ones(2, 4, 5)),
    "linear": lambda: F.linear(ones(2, 3), ones(4, 3), ones(4)),
    "conv1d": lambda: F.conv1d(ones(1, 2, 5), ones(3, 2, 3)),
    "conv2d": lambda: F.conv2d(ones(1, 2, 5, 5), ones(3, 2, 3, 3), ones(3)),
    "conv_transpose2d": lambda: F.conv_transpose2d(ones(1, 2, 5, 5), ones(2, 3, 3, 3)),
    "einsum": lambda: torch.einsum("ij,jk->ik", ones(2, 3), ones(3, 4)),
    "prelu": lambda: F.prelu(ones(2, 3), ones(3)),
    "attention": lambda: F.scaled_dot_product_attention(*(ones(1, 2, 4, 8) for _ in range(3))),
    "gru_cell": lambda: nn.GRUCell(3, 4).tpu()(ones(2, 3)),
}

FLOAT32: dict[str, Callable[[], torch.Tensor]] = {
    "exp": lambda: ones(3, dtype=BF16).exp(),
    "log": lambda: ones(3, dtype=F16).log(),
    "pow": lambda: ones(3, dtype=BF16) ** 2,
    "rsqrt": lambda: torch.rsqrt(ones(3, dtype=BF16)),
    "softplus": lambda: F.softplus(ones(3, dtype=BF16)),
    "layer_norm": lambda: F.layer_norm(ones(2, 3, dtype=BF16), (3,)),
    "group_norm": lambda: F.group_norm(ones(2, 4, 3, dtype=BF16), 2),
    "mse_loss": lambda: F.mse_loss(ones(3, dtype=BF16), ones(3, dtype=BF16)),
    "l1_loss": lambda: F.l1_loss(ones(3, dtype=BF16), ones(3, dtype=BF16)),
    "nll_loss": lambda: F.nll_loss(ones(2, 3, dtype=BF16), torch.zeros(2, dtype=torch.int64, device="tpu")),
    "cross_entropy": lambda: F.cross_entropy(ones(2, 3, dtype=BF16), torch.zeros(2, dtype=torch.int64, device="tpu")),
    "binary_cross_entropy_with_logits": lambda: F.binary_cross_entropy_with_logits(
        ones(3, dtype=BF16), ones(3, dtype=BF16)
    ),
    "binary_cross_entropy": lambda: F.binary_cross_entropy(ones(3, dtype=BF16), ones(3, dtype=BF16)),
    "softmax": lambda: ones(2, 3, dtype=BF16).softmax(-1),
    "log_softmax": lambda: F.log_softmax(ones(2, 3, dtype=BF16), -1),
    "sum": lambda: ones(3, dtype=BF16).sum(),
    "sum over a dimension": lambda: ones(2, 3, dtype=BF16).sum(0),
    "prod": lambda: ones(3, dtype=BF16).prod(),
    "cumsum": lambda: ones(3, dtype=BF16).cumsum(0),
    "norm": lambda: torch.norm(ones(3, dtype=BF16)),
    "vector_norm": lambda: torch.linalg.vector_norm(ones(3, dtype=BF16)),
    "upsample": lambda: F.interpolate(ones(1, 1, 2, 2, dtype=BF16), scale_factor=2),
}

WIDEST: dict[str, Callable[[], torch.Tensor]] = {
    "addcmul": lambda: torch.addcmul(ones(3), ones(3, dtype=BF16), ones(3, dtype=BF16)),
    "cat": lambda: torch.cat([ones(3), ones(3, dtype=BF16)]),
    "stack": lambda: torch.stack([ones(3, dtype=BF16), ones(3)]),
    "atan2": lambda: torch.atan2(ones(3), ones(3, dtype=BF16)),
    "dot": lambda: torch.dot(ones(3), ones(3, dtype=BF16)),
    "index_put": lambda: torch.index_put(ones(3), [torch.tensor([1], device="tpu")], ones(1, dtype=BF16)),
}


@pytest.mark.parametrize("name", LOWER)
def test_matrix_products_run_in_bfloat16(name: str) -> None:
    with torch.autocast("tpu"):
        assert LOWER[name]().dtype == BF16
    assert LOWER[name]().dtype == F32


@pytest.mark.parametrize("name", FLOAT32)
def test_sensitive_operators_run_in_float32(name: str) -> None:
    with torch.autocast("tpu"):
        assert FLOAT32[name]().dtype == F32


@pytest.mark.parametrize("name", WIDEST)
def test_mixed_operands_take_the_widest_dtype(name: str) -> None:
    with torch.autocast("tpu"):
        assert WIDEST[name]().dtype == F32


def test_other_operators_are_left_alone() -> None:
    with torch.autocast("tpu"):
        assert (ones(3, dtype=BF16) + 1).dtype == BF16
        assert ones(3).relu().dtype == F32
        assert torch.rand(3, device="tpu").dtype == F32
        assert torch.arange(3, device="tpu").dtype == torch.int64
        assert ones(3).t().view(-1)[0:2].dtype == F32


def test_float64_integers_and_explicit_outputs_are_not_cast() -> None:
    with torch.autocast("tpu"):
        assert (ones(2, 2, dtype=torch.float64) @ ones(2, 2, dtype=torch.float64)).dtype == torch.float64
        out = torch.empty(2, 2, device="tpu")
        torch.mm(ones(2, 2), ones(2, 2), out=out)
        assert out.dtype == F32
        x = ones(2, 2)
        x.addmm_(ones(2, 2), ones(2, 2))
        assert x.dtype == F32


def test_cpu_tensors_are_not_cast() -> None:
    with torch.autocast("tpu"):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == F32
    with torch.autocast("cpu"):
        assert (ones(2, 2) @ ones(2, 2)).dtype == F32


def test_the_default_is_bfloat16_on_every_thread() -> None:
    seen = []

    def work() -> None:
        with torch.autocast("tpu"):
            seen.append((LOWER["mm"]().dtype, torch.get_autocast_dtype("tpu")))

    work()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(BF16, BF16), (BF16, BF16)]


def test_float16_is_used_when_asked_for() -> None:
    with torch.autocast("tpu", dtype=F16):
        assert LOWER["mm"]().dtype == F16
    assert torch.tpu.get_amp_supported_dtype() == [BF16, F16]
    with pytest.warns(UserWarning, match="target dtype is not supported"), torch.autocast("tpu", dtype=torch.float64):
        assert LOWER["mm"]().dtype == F32


def test_regions_nest_and_switch_off() -> None:
    with torch.autocast("tpu"):
        assert torch.is_autocast_enabled("tpu")
        with torch.autocast("tpu", enabled=False):
            assert LOWER["mm"]().dtype == F32
        assert LOWER["mm"]().dtype == BF16
    assert not torch.is_autocast_enabled("tpu")


def test_values_are_those_of_an_explicit_cast() -> None:
    a, b = torch.rand(8, 16), torch.rand(16, 4)
    with torch.autocast("tpu"):
        product = a.tpu() @ b.tpu()
    assert_same(product, a.to(BF16) @ b.to(BF16), rtol=1e-2, atol=1e-2)


def test_training_keeps_parameters_and_gradients_in_float32() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 2)).tpu()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.rand(16, 4).tpu(), torch.randint(0, 2, (16,)).tpu()
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        with torch.autocast("tpu"):
            output = model(x)
            loss = F.cross_entropy(output, y)
        assert output.dtype == BF16 and loss.dtype == F32
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert all(p.dtype == F32 and p.grad is not None and p.grad.dtype == F32 for p in model.parameters())
    assert losses[-1] < losses[0]


def test_weights_are_cast_once_per_region() -> None:
    weight = nn.Parameter(ones(3, 3))
    with torch.autocast("tpu"):
        before = torch.tpu.memory_allocated()
        first = F.linear(ones(2, 3), weight)
        kept = torch.tpu.memory_allocated() - before
        second = F.linear(ones(2, 3), weight)
        assert torch.tpu.memory_allocated() - before < 2 * kept
    assert torch.equal(first, second)


def test_custom_functions_cast_their_inputs() -> None:
    class Product(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="tpu", cast_inputs=F32)
        def forward(ctx, a, b):
            ctx.save_for_backward(a, b)
            assert not torch.is_autocast_enabled("tpu")
            return a @ b

        @staticmethod
        @torch.amp.custom_bwd(device_type="tpu")
        def backward(ctx, grad):
            a, b = ctx.saved_tensors
            return grad @ b.t(), a.t() @ grad

    a = ones(2, 3, dtype=BF16).requires_grad_()
    with torch.autocast("tpu"):
        out = Product.apply(a, ones(3, 4))
    assert out.dtype == F32
    out.sum().backward()
    assert a.grad is not None and a.grad.dtype == BF16


def test_backward_inside_a_region_uses_its_dtype() -> None:
    seen = []

    class Spy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            seen.append((ones(2, 2) @ ones(2, 2)).dtype)
            return grad

    x = ones(2).requires_grad_()
    with torch.autocast("tpu"):
        Spy.apply(x).sum().backward()
    assert seen == [BF16]


def test_gradients_are_scaled_checked_and_unscaled() -> None:
    parameter = nn.Parameter(ones(3))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = torch.amp.GradScaler("tpu", init_scale=8.0, growth_interval=1)
    scaler.scale((parameter * 2).sum()).backward()
    assert parameter.grad is not None and parameter.grad.tolist() == [16, 16, 16]
    scaler.step(optimizer)
    scaler.update()
    assert parameter.tolist() == [-1, -1, -1] and scaler.get_scale() == 16.0
    optimizer.zero_grad()
    scaler.scale((parameter * float("inf")).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert parameter.tolist() == [-1, -1, -1], "a step with an infinite gradient is skipped"
    assert scaler.get_scale() == 8.0
    state = scaler.state_dict()
    assert (state["scale"], state["growth_interval"]) == (8.0, 1)
