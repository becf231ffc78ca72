"""Normalisation, softmax and losses, forward and backward, against PyTorch on CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.lowering.harness import check, run
from tests.lowering.test_reduction import HARD, INF, tolerance

aten = torch.ops.aten
DTYPES = [torch.float32, torch.float64, torch.bfloat16]
NONE, MEAN, SUM = 0, 1, 2


def agrees(op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> None:
    """Values only: statistics of half types stay float32 on the device; bfloat16 is compared with float64 on CPU."""
    dtype = next(a.dtype for a in args if isinstance(a, torch.Tensor) and a.is_floating_point())
    reference = torch.float64 if dtype == torch.bfloat16 else None
    expected = op(
        *(
            a.to(reference if a.is_floating_point() else None, copy=True) if isinstance(a, torch.Tensor) else a
            for a in args
        ),
        **kwargs,
    )
    got = run(op, *args, **kwargs)[0]
    expected = [expected] if isinstance(expected, torch.Tensor) else list(expected)
    assert len(got) == len(expected)
    for g, e in zip(got, expected, strict=True):
        if e is not None and e.numel():
            torch.testing.assert_close(g.to(e.dtype), e, equal_nan=True, **tolerance(dtype))


# ---- normalisation --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("shape", [(6, 4), (3, 4, 5), (2, 4, 3, 5)])
def test_batch_norm(dtype: torch.dtype, training: bool, shape: tuple[int, ...]) -> None:
    x, grad = torch.randn(shape).to(dtype) * 2 + 1, torch.randn(shape).to(dtype)
    weight, bias, mean, var = torch.rand(4), torch.randn(4), torch.randn(4), torch.rand(4) + 0.5
    if dtype != torch.float32:
        weight, bias, mean, var = (t.to(torch.promote_types(dtype, torch.float32)) for t in (weight, bias, mean, var))
    old = mean.clone(), var.clone()
    agrees(aten.native_batch_norm.default, x, weight, bias, mean, var, training, 0.3, 1e-5)
    agrees(aten._native_batch_norm_legit_functional.default, x, weight, bias, *old, training, 0.3, 1e-5)
    agrees(aten._native_batch_norm_legit_no_training.default, x, weight, None, *old, 0.3, 1e-5)
    _, save_mean, rstd = aten.native_batch_norm(x, weight, bias, *(t.clone() for t in old), training, 0.3, 1e-5)
    stats = (*old, save_mean, rstd, training, 1e-5)
    agrees(aten.native_batch_norm_backward.default, grad, x, weight, *stats, [True, True, True])
    agrees(aten.native_batch_norm_backward.default, grad, x, None, *stats, [True, False, False])


def test_batch_norm_updates_its_statistics() -> None:
    x, mean, var = torch.randn(5, 4, 3) + 2, torch.randn(4), torch.rand(4)
    expected = mean.clone(), var.clone()
    aten.native_batch_norm(x, None, None, *expected, True, 0.3, 1e-5)
    weight, bias = torch.ones(4), torch.zeros(4)
    for op in (aten.native_batch_norm.default, aten._native_batch_norm_legit.default):
        _, plan, outputs = run(op, x, weight, bias, mean, var, True, 0.3, 1e-5)
        written = [t for t, o in zip(outputs, plan.outputs, strict=True) if o.slot >= 0]
        torch.testing.assert_close(written, list(expected))
    _, plan, _ = run(aten._batch_norm_with_update.default, x, weight, bias, mean, var, 0.3, 1e-5)
    assert [o.slot for o in plan.outputs if o.slot >= 0] == [3, 4]
    _, plan, _ = run(aten.native_batch_norm.default, x, None, None, mean, var, False, 0.3, 1e-5)
    assert not [o for o in plan.outputs if o.slot >= 0]


def test_momentum_is_an_operand() -> None:
    x, mean, var = torch.randn(5, 4, 3), torch.zeros(4), torch.ones(4)
    texts = {run(aten.native_batch_norm.default, x, None, None, mean, var, True, m, 1e-5)[1].text for m in (0.1, 0.5)}
    assert len(texts) == 1


def test_batch_norm_without_statistics() -> None:
    x = torch.randn(5, 4, 3)
    agrees(aten._native_batch_norm_legit.no_stats, x, torch.rand(4), torch.randn(4), True, 0.1, 1e-5)
    agrees(aten.native_batch_norm.default, x, None, None, None, None, True, 0.1, 1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("affine", [True, False])
def test_layer_norm(dtype: torch.dtype, affine: bool) -> None:
    x, grad = torch.randn(3, 4, 5).to(dtype), torch.randn(3, 4, 5).to(dtype)
    for shape in ([5], [4, 5]):
        weight, bias = (torch.randn(shape).to(dtype) for _ in range(2)) if affine else (None, None)
        agrees(aten.native_layer_norm.default, x, shape, weight, bias, 1e-5)
        _, mean, rstd = aten.native_layer_norm(x, shape, weight, bias, 1e-5)
        mask = [True, affine, affine]
        agrees(aten.native_layer_norm_backward.default, grad, x, shape, mean, rstd, weight, bias, mask)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("eps", [1e-5, None])
def test_rms_norm(dtype: torch.dtype, affine: bool, eps: float | None) -> None:
    x, grad = torch.randn(3, 4, 5).to(dtype), torch.randn(3, 4, 5).to(dtype)
    weight = torch.randn(4, 5).to(dtype) if affine else None
    (y, rstd), _, _ = run(aten._fused_rms_norm.default, x, [4, 5], weight, eps)
    wide = x.to(torch.float64, copy=True).requires_grad_()
    w = None if weight is None else weight.to(torch.float64, copy=True).requires_grad_()
    expected = torch.rms_norm(wide, [4, 5], w, torch.finfo(rstd.dtype).eps if eps is None else eps)
    torch.testing.assert_close(y.double(), expected.detach(), **tolerance(dtype))
    expected.backward(grad.double())
    args = (grad, x, [4, 5], rstd, weight, [True, affine])
    for got, leaf in zip(run(aten._fused_rms_norm_backward.default, *args)[0], (wide, w), strict=True):
        if leaf is not None:
            torch.testing.assert_close(got.double(), leaf.grad, **tolerance(dtype))


def test_layer_norm_far_from_zero() -> None:
    x = torch.randn(3, 64)
    got = run(aten.native_layer_norm.default, x + 4096.0, [64], None, None, 1e-5)[0][0]
    exact = torch.nn.functional.layer_norm((x + 4096.0).double(), [64]).float()
    torch.testing.assert_close(got, exact, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_group_norm(dtype: torch.dtype) -> None:
    x, grad = torch.randn(2, 6, 3, 5).to(dtype), torch.randn(2, 6, 3, 5).to(dtype)
    weight, bias = torch.randn(6).to(dtype), torch.randn(6).to(dtype)
    for w, b in ((weight, bias), (None, None)):
        agrees(aten.native_group_norm.default, x, w, b, 2, 6, 15, 3, 1e-5)
        _, mean, rstd = aten.native_group_norm(x, w, b, 2, 6, 15, 3, 1e-5)
        if dtype != torch.bfloat16:
            mask = [True, w is not None, b is not None]
            agrees(aten.native_group_norm_backward.default, grad, x, mean, rstd, w, 2, 6, 15, 3, mask)


# ---- softmax --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16], ids=str)
@pytest.mark.parametrize("dim", [0, -1])
def test_softmax(dtype: torch.dtype, dim: int) -> None:
    close = tolerance(dtype)
    for x in (torch.randn(4, 6).to(dtype) * 30, HARD.to(dtype)):
        for op, backward in (
            (aten._softmax.default, aten._softmax_backward_data.default),
            (aten._log_softmax.default, aten._log_softmax_backward_data.default),
        ):
            check(op, x, dim, False, **close)
            check(backward, torch.randn(x.shape).to(dtype), op(x, dim, False), dim, dtype, **close)
        check(aten._safe_softmax.default, x, dim, **close)
    check(aten._softmax.default, torch.tensor(2.0).to(dtype), dim, False)


def test_softmax_edges() -> None:
    check(aten._softmax.default, torch.empty(0, 3), 0, False)
    check(aten._log_softmax.default, torch.empty(3, 0), 0, False)
    half = torch.randn(3, 4).half()
    got = run(aten._softmax.default, half, 1, True)[0][0]
    torch.testing.assert_close(got, half.float().softmax(1))


@pytest.mark.parametrize("mask_type", [0, 1, 2])
def test_masked_softmax(mask_type: int) -> None:
    x = torch.randn(2, 3, 4, 4)
    mask = {0: torch.eye(4) > 0, 1: torch.eye(2, 4) > 0, 2: torch.rand(2, 3, 4, 4) > 0.5}[mask_type]
    if mask_type == 2:
        mask[0, 0, 0] = True  # nothing left: NaN, as on the CPU
    check(aten._masked_softmax.default, x, mask, 3, mask_type)
    if mask_type == 2:
        output = aten._masked_softmax(x, mask, 3, 2)
        check(aten._masked_softmax_backward.default, torch.randn_like(x), output, mask, 3)


# ---- negative log-likelihood ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reduction", [NONE, MEAN, SUM])
@pytest.mark.parametrize("weighted", [False, True])
def test_nll_loss(dtype: torch.dtype, reduction: int, weighted: bool) -> None:
    weight = torch.rand(5).to(dtype) if weighted else None
    cases = [
        (aten.nll_loss_forward.default, aten.nll_loss_backward.default, (5,), ()),
        (aten.nll_loss_forward.default, aten.nll_loss_backward.default, (7, 5), (7,)),
        (aten.nll_loss2d_forward.default, aten.nll_loss2d_backward.default, (2, 5, 3, 4), (2, 3, 4)),
    ]
    for forward, backward, shape, places in cases:
        x, target = torch.randn(shape).to(dtype), torch.randint(0, 5, places)
        if places:
            target.view(-1)[1] = -100
        agrees(forward, x, target, weight, reduction, -100)
        loss, total_weight = forward(x, target, weight, reduction, -100)
        agrees(backward, torch.randn_like(loss), x, target, weight, reduction, -100, total_weight)


def test_nll_loss_ignores_everything_or_an_infinity() -> None:
    x = torch.randn(3, 4)
    for reduction in (NONE, MEAN, SUM):
        check(aten.nll_loss_forward.default, x, torch.full((3,), -100), None, reduction, -100)
        check(aten.nll_loss_forward.default, x, torch.tensor([1, 2, 1]), None, reduction, 1)
        check(aten.nll_loss_forward.default, x.log(), torch.tensor([1, 2, 1]), None, reduction, 1)
    x[0, 2] = -INF
    check(aten.nll_loss_forward.default, x, torch.tensor([0, 2, 3]), None, MEAN, 2)


@pytest.mark.parametrize("target", [-1, 5, 2**40])
def test_nll_loss_flags_a_target_out_of_range(target: int) -> None:
    def flag(t: int, ignore_index: int) -> int:
        args = (torch.randn(2, 5), torch.tensor([1, t]), None, MEAN, ignore_index)
        _, plan, outputs = run(aten.nll_loss_forward.default, *args)
        return int(next(v for v, o in zip(outputs, plan.outputs, strict=True) if o.slot == -2))

    assert flag(target, -100) != 0
    assert flag(target, target) == 0
    assert flag(4, -100) == 0


# ---- other losses ---------------------------------------------------------------------------------------------------
POINTWISE: list[tuple[str, tuple[Any, ...], str | None]] = [
    ("mse_loss", (), "mse_loss_backward"),
    ("smooth_l1_loss", (0.7,), "smooth_l1_loss_backward"),
    ("huber_loss", (0.7,), "huber_loss_backward"),
    ("soft_margin_loss", (), "soft_margin_loss_backward"),
    ("l1_loss", (), None),
    ("kl_div", (), None),
    ("margin_ranking_loss", (), None),
    ("hinge_embedding_loss", (), None),
    ("cosine_embedding_loss", (), None),
]


@pytest.mark.parametrize("reduction", [NONE, MEAN, SUM])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("name", "extra", "backward"), POINTWISE, ids=[p[0] for p in POINTWISE])
def test_pointwise_losses(
    name: str, extra: tuple[Any, ...], backward: str | None, dtype: torch.dtype, reduction: int
) -> None:
    x, y = torch.randn(4, 5).to(dtype), torch.randn(4, 5).to(dtype)
    args: tuple[Any, ...] = (x, y, reduction, *extra)
    if name == "margin_ranking_loss":
        args = (x, y, torch.randn(4, 5).sign().to(dtype), 0.3, reduction)
    elif name == "hinge_embedding_loss":
        args = (x, y.sign(), 0.5, reduction)
    elif name == "cosine_embedding_loss":
        args = (x, y, torch.tensor([1, -1, 1, -1]), 0.1, reduction)
    agrees(getattr(aten, name).default, *args)
    if backward is not None:
        grad = torch.randn(4, 5).to(dtype) if reduction == NONE else torch.tensor(0.7, dtype=dtype)
        agrees(getattr(aten, backward).default, grad, *args)


@pytest.mark.parametrize("reduction", [NONE, MEAN, SUM])
def test_cross_entropies(reduction: int) -> None:
    x, y, weight = torch.rand(4, 5), torch.rand(4, 5), torch.rand(5)
    x[0, :2] = torch.tensor([0.0, 1.0])
    grad = torch.randn(4, 5) if reduction == NONE else torch.tensor(0.7)
    for w in (weight, None):
        agrees(aten.binary_cross_entropy.default, x, y, w, reduction)
        agrees(aten.binary_cross_entropy_backward.default, grad, x, y, w, reduction)
        agrees(aten.binary_cross_entropy_with_logits.default, x * 100 - 50, y, w, weight, reduction)
    target = torch.tensor([0, 4, -100, 2])
    for smoothing in (0.0, 0.1):
        agrees(aten.cross_entropy_loss.default, x, target, weight, reduction, -100, smoothing)
        agrees(aten.cross_entropy_loss.default, x, y.softmax(1), weight, reduction, -100, smoothing)


@pytest.mark.parametrize("reduction", [NONE, MEAN, SUM])
def test_margin_losses(reduction: int) -> None:
    x, target = torch.randn(4, 5), torch.tensor([0, 4, 2, 1])
    for p in (1, 2):
        for weight in (None, torch.rand(5)):
            args = (x, target, p, 0.8, weight, reduction)
            agrees(aten.multi_margin_loss.default, *args)
            agrees(aten.multi_margin_loss_backward.default, torch.randn_like(aten.multi_margin_loss(*args)), *args)
    labels = torch.tensor([[3, 0, -1, 2, 1], [-1, 0, 0, 0, 0], [4, 3, 2, 1, 0], [2, -1, 3, -1, 0]])
    for x_, labels_ in ((x, labels), (x[0], labels[0])):
        if x_.ndim == 2 or reduction != NONE:  # for one sample PyTorch's meta kernel says [1] where the CPU says []
            agrees(aten.multilabel_margin_loss_forward.default, x_, labels_, reduction)
        loss, is_target = aten.multilabel_margin_loss_forward(x_, labels_, reduction)
        grad = torch.randn_like(loss)
        agrees(aten.multilabel_margin_loss_backward.default, grad, x_, labels_, reduction, is_target)


# ---- CTC ------------------------------------------------------------------------------------------------------------
LENGTHS = {
    "full": ([12, 12, 12], [4, 4, 4]),
    "ragged": ([12, 9, 7], [4, 3, 1]),
    "empty target": ([12, 5, 1], [4, 0, 0]),
    "impossible": ([3, 12, 2], [4, 3, 2]),
}


@pytest.mark.parametrize("concatenated", [False, True])
@pytest.mark.parametrize("case", LENGTHS)
def test_ctc_loss(case: str, concatenated: bool) -> None:
    inputs, lengths = LENGTHS[case]
    log_probs = torch.randn(12, 3, 6, dtype=torch.float64).log_softmax(2)
    targets = torch.randint(1, 6, (sum(lengths),) if concatenated else (3, max(lengths)))
    if case == "full":
        targets.view(-1)[1] = targets.view(-1)[0]  # a repeated label needs a blank between
    for zero_infinity in (True, False) if case == "impossible" else (False,):
        args = (log_probs, targets, inputs, lengths, 0, zero_infinity)
        expected = aten._ctc_loss(*args)[0]
        (nll, log_alpha), _, _ = run(aten._ctc_loss.default, *args)
        torch.testing.assert_close(nll, expected)
        x = log_probs.clone().requires_grad_()
        loss = aten._ctc_loss(x, *args[1:])[0]
        grad = torch.rand(3, dtype=torch.float64)
        loss.backward(grad)
        backward = (grad, log_probs, targets, inputs, lengths, nll, log_alpha, 0, zero_infinity)
        torch.testing.assert_close(run(aten._ctc_loss_backward.default, *backward)[0][0], x.grad, equal_nan=True)


def test_ctc_lengths_on_the_device() -> None:
    log_probs, targets = torch.randn(12, 3, 6).log_softmax(2), torch.randint(1, 6, (3, 4))
    inputs, lengths = torch.tensor([12, 9, 7]), torch.tensor([3, 2, 1])
    (nll, log_alpha), _, _ = run(aten._ctc_loss.Tensor, log_probs, targets, inputs, lengths)
    torch.testing.assert_close(nll, aten._ctc_loss(log_probs, targets, [12, 9, 7], [3, 2, 1])[0])
    assert log_alpha.shape == (3, 12, 9)


NORMS = {
    "layer": (lambda: torch.nn.LayerNorm(16), (4, 16)),
    "group": (lambda: torch.nn.GroupNorm(4, 16), (4, 16)),
    "batch": (lambda: torch.nn.BatchNorm1d(16), (4, 16)),
    "batch, evaluated": (lambda: torch.nn.BatchNorm1d(16).eval(), (4, 16)),
    "instance": (lambda: torch.nn.InstanceNorm1d(16, affine=True), (4, 16, 5)),
    "rms": (lambda: torch.nn.RMSNorm(16), (4, 16)),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("low_weights", [True, False])
@pytest.mark.parametrize("name", NORMS)
def test_small_norms_train_in_low_precision(name: str, low_weights: bool, dtype: torch.dtype) -> None:
    """Their statistics are float32, which the CPU's backward kernels would refuse."""
    make, shape = NORMS[name]
    x = torch.randn(*shape)
    gradients = []
    for device, kind in (("cpu", torch.float32), ("tpu", dtype)):
        module = make().to(device)
        if low_weights:
            module = module.to(kind)
        leaf = x.clone().to(device, kind).requires_grad_()
        module(leaf).float().square().sum().backward()
        gradients.append([leaf.grad.float().cpu(), *(p.grad.float().cpu() for p in module.parameters())])
    for ours, expected in zip(gradients[1], gradients[0], strict=True):
        torch.testing.assert_close(ours, expected, rtol=0.05, atol=0.15)
