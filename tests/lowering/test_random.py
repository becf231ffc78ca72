"""Random numbers: streams, exact ranges, distributions against SciPy, and PyTorch's errors."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from tests.lowering.harness import check, run
from torch_tpu.lowering.random import CHECKED, check_numbers

aten = torch.ops.aten
N = 100_000
REAL = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INT64 = torch.iinfo(torch.int64)


def draw(op: Any, *args: Any, seed: tuple[int, int] = (11, 0), **kwargs: Any) -> torch.Tensor:
    results, _, _ = run(op, *args, seed=seed, **kwargs)
    return results[0]


def fill(
    name: str, *args: Any, n: int = N, dtype: torch.dtype = torch.float32, seed: tuple[int, int] = (11, 0)
) -> torch.Tensor:
    name, _, overload = name.partition(".")
    return draw(getattr(getattr(aten, name), overload or "default"), torch.empty(n, dtype=dtype), *args, seed=seed)


def counts(x: torch.Tensor, first: int, last: int) -> np.ndarray:
    x = x.double().numpy()
    return np.array([(x == k).sum() for k in range(first, last + 1)])


def fits(observed: np.ndarray, probabilities: np.ndarray) -> None:
    """Pearson's test over the cells that expect at least ten."""
    expected = probabilities * observed.sum()
    keep = expected >= 10
    chi2 = ((observed - expected)[keep] ** 2 / expected[keep]).sum()
    assert stats.chi2.sf(chi2, max(keep.sum() - 1, 1)) > 1e-3


# ---- streams --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("dtype", "per_block"), [(torch.float32, 4), (torch.float64, 2), (torch.bfloat16, 4)])
def test_a_draw_depends_on_seed_and_offset_alone(dtype: torch.dtype, per_block: int) -> None:
    whole = fill("uniform_", n=256, dtype=dtype, seed=(5, 100))
    tail = fill("uniform_", n=128, dtype=dtype, seed=(5, 100 + 128 // per_block))
    assert torch.equal(whole[128:], tail)
    assert torch.equal(whole[:7], fill("uniform_", n=7, dtype=dtype, seed=(5, 100)))
    assert not torch.equal(whole, fill("uniform_", n=256, dtype=dtype, seed=(6, 100)))


@pytest.mark.parametrize("op", ["uniform_", "random_", "bernoulli_.float"])
@pytest.mark.parametrize("n", [1, 4, 5, 1000])
def test_a_draw_reserves_what_it_uses(op: str, n: int) -> None:
    name, _, overload = op.partition(".")
    _, plan, _ = run(getattr(getattr(aten, name), overload or "default"), torch.empty(n, dtype=torch.float32))
    bits = 64 if op == "random_" else 32
    assert plan.rng_used == math.ceil(n * bits / 128)


def test_two_draws_of_one_program_are_the_draws_of_two() -> None:
    x = torch.ones(64)
    real, imaginary = fill("uniform_", n=64, seed=(3, 0)), fill("uniform_", n=64, seed=(3, 16))
    assert torch.equal(fill("uniform_", n=64, dtype=torch.complex64, seed=(3, 0)), torch.complex(real, imaginary))
    assert run(aten.uniform_.default, torch.empty(0))[1].rng_used == 0
    assert x.sum() == 64


def test_neighbouring_offsets_and_seeds_do_not_correlate() -> None:
    a = fill("normal_", seed=(0, 0)).double()
    for seed in ((1, 0), (0, N // 4), (2**63, 0), (2**32, 0)):
        b = fill("normal_", seed=seed).double()
        assert abs(torch.corrcoef(torch.stack([a, b]))[0, 1]) < 5 / math.sqrt(N)


# ---- continuous distributions ---------------------------------------------------------------------------------------
CONTINUOUS = [
    ("uniform_", (), "uniform", (0, 1)),
    ("uniform_", (-2.0, 5.0), "uniform", (-2, 7)),
    ("normal_", (), "norm", (0, 1)),
    ("normal_", (3.0, 0.5), "norm", (3, 0.5)),
    ("log_normal_", (0.5, 0.25), "lognorm", (0.25, 0, math.exp(0.5))),
    ("exponential_", (), "expon", (0, 1)),
    ("exponential_", (4.0,), "expon", (0, 0.25)),
    ("cauchy_", (1.0, 2.0), "cauchy", (1, 2)),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("name", "args", "law", "shape"), CONTINUOUS)
def test_continuous(name: str, args: tuple[float, ...], law: str, shape: tuple[float, ...], dtype: torch.dtype) -> None:
    x = fill(name, *args, dtype=dtype)
    assert x.dtype == dtype
    assert torch.isfinite(x).all()
    assert stats.kstest(x.double().numpy(), law, args=shape).pvalue > 1e-3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "args"), [("normal_", (1.0, 2.0)), ("exponential_", (2.0,)), ("uniform_", (-1.0, 1.0))]
)
def test_half_types_are_rounded_float32(name: str, args: tuple[float, ...], dtype: torch.dtype) -> None:
    half, single = fill(name, *args, dtype=dtype), fill(name, *args)
    if name == "uniform_":  # fewer digits
        assert (half.float() - single).abs().max() <= 2 * torch.finfo(dtype).eps
    else:
        torch.testing.assert_close(half, single.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("dtype", REAL)
def test_uniform_is_half_open_with_all_digits(dtype: torch.dtype) -> None:
    x = fill("uniform_", dtype=dtype)
    assert x.min() >= 0
    assert x.max() < 1
    digits = 1 - int(math.log2(torch.finfo(dtype).eps))
    scaled = x.double() * 2**digits
    assert torch.equal(scaled, scaled.round())
    assert (scaled.long() & 1).double().mean().item() == pytest.approx(0.5, abs=0.01)
    narrow = fill("uniform_", 1.0, 1.0 + torch.finfo(dtype).eps, dtype=dtype)
    assert set(narrow.tolist()) == {1.0}
    assert fill("uniform_", 0.25, 0.25, n=8, dtype=dtype).unique().tolist() == [0.25]


def test_uniform_float64_has_53_digits() -> None:
    x = fill("uniform_", dtype=torch.float64)
    assert (x * 2**32 != (x * 2**32).floor()).double().mean() > 0.99


def test_complex_normal_shares_the_variance() -> None:
    z = fill("normal_", 1.0, 2.0, dtype=torch.complex64)
    for part in (z.real, z.imag):
        assert stats.kstest(part.numpy(), "norm", args=(1, math.sqrt(2))).pvalue > 1e-3
    assert abs(np.corrcoef(z.real.numpy(), z.imag.numpy())[0, 1]) < 0.02


def test_normal_of_tensors() -> None:
    mean, std = torch.tensor([0.0, 100.0]), torch.tensor([[1.0], [10.0]])
    x = draw(aten.normal.Tensor_Tensor, mean.expand(N, 2, 2).contiguous(), std.expand(N, 2, 2).contiguous())
    torch.testing.assert_close(x.mean(0), mean.expand(2, 2), atol=0.2, rtol=0)
    torch.testing.assert_close(x.std(0), std.expand(2, 2), rtol=0.02, atol=0)
    assert draw(aten.normal.Tensor_float, torch.full((N,), 7.0), 2.0).mean().item() == pytest.approx(7, abs=0.05)
    assert draw(aten.normal.float_Tensor, 7.0, torch.full((N,), 2.0)).std().item() == pytest.approx(2, abs=0.05)
    assert draw(aten.normal.float_float, 7.0, 2.0, [N]).std().item() == pytest.approx(2, abs=0.05)


# ---- counts and coins -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.uint8, torch.bfloat16])
@pytest.mark.parametrize("p", [0.3, 0.9])
def test_geometric(p: float, dtype: torch.dtype) -> None:
    x = fill("geometric_", p, dtype=dtype)
    fits(counts(x, 1, 20), stats.geom.pmf(np.arange(1, 21), p))


@pytest.mark.parametrize("p", [0.0, 1e-3, 0.25, 1.0])
def test_bernoulli(p: float) -> None:
    for x in (
        fill("bernoulli_.float", p),
        fill("bernoulli_.float", p, dtype=torch.int8),
        fill("bernoulli_.Tensor", torch.tensor(p, dtype=torch.float64)),
        draw(aten.bernoulli.out, torch.full((N,), p), out=torch.empty(0)),
        draw(aten.bernoulli.p, torch.empty(N), p),
    ):
        assert set(x.tolist()) <= {0, 1}
        assert abs(x.double().mean().item() - p) <= 5 * math.sqrt(p * (1 - p) / N)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rate", [0.2, 3.0, 9.9, 10.0, 80.0])
def test_poisson(rate: float, dtype: torch.dtype) -> None:
    x = draw(aten.poisson.default, torch.full((N,), rate, dtype=dtype))
    ks = np.arange(0, int(3 * rate + 20))
    fits(counts(x, 0, len(ks) - 1), stats.poisson.pmf(ks, rate))


def test_poisson_of_large_rates_and_zero() -> None:
    rate = torch.tensor([0.0, 1e6]).expand(N // 10, 2).contiguous()
    x = draw(aten.poisson.default, rate).double().numpy()
    assert (x[:, 0] == 0).all()
    assert stats.kstest((x[:, 1] - 1e6) / 1e3, "norm").pvalue > 1e-3


@pytest.mark.parametrize(
    ("n", "p"), [(10, 0.3), (100, 0.05), (100, 0.25), (40, 0.5), (300, 0.9), (5, 0.0), (5, 1.0), (0, 0.5)]
)
def test_binomial(n: int, p: float) -> None:
    x = draw(aten.binomial.default, torch.full((N,), float(n)), torch.full((N,), p))
    fits(counts(x, 0, n), stats.binom.pmf(np.arange(n + 1), n, p))


@pytest.mark.parametrize("alpha", [0.3, 1.0, 2.5, 60.0])
def test_gamma(alpha: float) -> None:
    for dtype in (torch.float32, torch.float64):
        x = draw(aten._standard_gamma.default, torch.full((N,), alpha, dtype=dtype))
        assert stats.kstest(x.double().numpy(), "gamma", args=(alpha,)).pvalue > 1e-3


def test_dirichlet() -> None:
    alpha = torch.tensor([0.01, 0.5, 2.0])
    x = draw(aten._sample_dirichlet.default, alpha.expand(N, 3).contiguous())
    torch.testing.assert_close(x.sum(-1), torch.ones(N))
    for i in (1, 2):
        law = (alpha[i].item(), (alpha.sum() - alpha[i]).item())
        assert stats.kstest(x[:, i].double().numpy(), "beta", args=law).pvalue > 1e-3


@pytest.mark.parametrize("replacement", [False, True])
def test_multinomial(replacement: bool) -> None:
    weights = torch.tensor([1.0, 0.0, 3.0, 6.0])
    x = draw(aten.multinomial.default, weights.expand(N, 4).contiguous(), 2, replacement)
    fits(np.bincount(x[:, 0], minlength=4), weights.numpy() / 10)
    second = weights / 10
    if not replacement:
        second = sum(weights[i] / 10 * weights.where(torch.arange(4) != i, 0) / (10 - weights[i]) for i in range(4))
        assert (x[:, 0] != x[:, 1]).all()
    fits(np.bincount(x[:, 1], minlength=4), second.numpy())
    assert sorted(draw(aten.multinomial.default, weights.half() + 1, 4).tolist()) == [0, 1, 2, 3]
    many = draw(aten.multinomial.default, torch.ones(1000), N, True)
    fits(np.bincount(many, minlength=1000), np.full(1000, 1e-3))


def test_multinomial_reports_bad_weights() -> None:
    for bad in ([1.0, math.nan], [1.0, -1.0], [math.inf, 1.0], [0.0, 0.0]):
        _, _, outputs = run(aten.multinomial.default, torch.tensor(bad), 1)
        assert outputs[-1].item() != 0
    _, _, outputs = run(aten.multinomial.default, torch.tensor([0.0, 1.0]), 1)
    assert outputs[-1].item() == 0


# ---- integers -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8, torch.uint8, torch.float32, torch.bfloat16])
def test_random_range(dtype: torch.dtype) -> None:
    low = 0 if dtype == torch.uint8 else -5
    x = fill("random_.from", low, low + 12, dtype=dtype)
    fits(counts(x, low, low + 11), np.full(12, 1 / 12))
    fits(counts(fill("random_.to", 3, dtype=dtype), 0, 2), np.full(3, 1 / 3))


def test_random_of_whole_dtypes() -> None:
    fits(counts(fill("random_", dtype=torch.uint8), 0, 255), np.full(256, 1 / 256))
    fits(counts(fill("random_", dtype=torch.bool), 0, 1), np.full(2, 1 / 2))
    fits(counts(fill("random_.from", -128, None, dtype=torch.int8), -128, 127), np.full(256, 1 / 256))
    for x, low, high in (
        (fill("random_", dtype=torch.int64), 0, INT64.max),
        (fill("random_.from", INT64.min, None, dtype=torch.int64), INT64.min, INT64.max),
        (fill("random_.from", INT64.min, INT64.max, dtype=torch.int64), INT64.min, INT64.max),
        (fill("random_.from", -(2**40), 2**40 + 3, dtype=torch.int64), -(2**40), 2**40 + 2),
        (fill("random_.to", 2**32, dtype=torch.int64), 0, 2**32 - 1),
        (fill("random_.to", 10**9 + 7, dtype=torch.int64), 0, 10**9 + 6),
        (fill("random_"), 0, 2**24),
    ):
        assert low <= x.min() <= x.max() <= high
        scaled = (x.double().numpy() - low) / (float(high) - low)
        assert stats.kstest(scaled, "uniform").pvalue > 1e-3
        if x.dtype == torch.int64:
            assert abs((x & 1).double().mean().item() - 0.5) < 0.01


@pytest.mark.filterwarnings("ignore:.*precision limitations")
@pytest.mark.parametrize(
    ("dtype", "low", "high"),
    [(torch.bfloat16, 0, 1023), (torch.float16, 2049, 4001), (torch.float32, 2**24 + 1, 2**24 + 9)],
)
def test_random_on_floats_gives_the_values_that_the_cpu_gives(dtype: torch.dtype, low: int, high: int) -> None:
    x, expected = fill("random_.from", low, high, dtype=dtype), torch.empty(N, dtype=dtype).random_(low, high)
    assert torch.equal(x.unique(), expected.unique())
    assert x.double().max() < high


def test_randint_and_permutations() -> None:
    fits(counts(draw(aten.randint.low, -3, 4, [N]), -3, 3), np.full(7, 1 / 7))
    fits(counts(draw(aten.randint.default, 4, [N]), 0, 3), np.full(4, 1 / 4))
    fits(counts(draw(aten.randint_like.default, torch.empty(N), 4), 0, 3), np.full(4, 1 / 4))
    for dtype in (torch.int64, torch.int32, torch.float32):
        out = torch.empty(0, dtype=dtype)
        x = draw(aten.randperm.generator_out, 1000, generator=None, out=out)
        assert x.dtype == dtype
        assert torch.equal(x.sort().values, torch.arange(1000, dtype=dtype))
    orders = [tuple(draw(aten.randperm.default, 3, seed=(i, 0)).tolist()) for i in range(300)]
    assert len(set(orders)) == 6
    assert draw(aten.randperm.default, 0).numel() == 0


@pytest.mark.parametrize("op", [aten.rand, aten.randn])
def test_factories(op: Any) -> None:
    x = draw(op.default, [N], dtype=torch.float64)
    assert stats.kstest(x.numpy(), "uniform" if op is aten.rand else "norm").pvalue > 1e-3
    like = aten.rand_like if op is aten.rand else aten.randn_like
    assert torch.equal(draw(like.default, torch.empty(9)), draw(op.default, [9]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_of_gamma_and_dirichlet_samples(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    alpha, beta = (torch.exp(6 * torch.rand(2, 5000, dtype=dtype) - 2)).unbind()
    x = torch._standard_gamma(alpha) * (0.6 + torch.rand(5000, dtype=dtype))
    check(aten._standard_gamma_grad.default, alpha, x, rtol=1e-5, atol=1e-8)
    x = torch.distributions.Beta(alpha, beta).sample().clamp(1e-3, 1 - 1e-3)
    check(aten._dirichlet_grad.default, x, alpha, alpha + beta, rtol=1e-3, atol=1e-6)


# ---- dropout --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 1.0])
def test_native_dropout(p: float, dtype: torch.dtype) -> None:
    x = torch.randn(N).to(dtype)
    (y, mask), _, _ = run(aten.native_dropout.default, x, p, True)
    assert abs(mask.double().mean().item() - (1 - p)) <= 5 * math.sqrt(p * (1 - p) / N)
    scale = 0.0 if p == 1 else 1 / (1 - p)
    torch.testing.assert_close(y, (x.float() * mask * scale).to(dtype))
    (back,), _, _ = run(aten.native_dropout_backward.default, x, mask, scale)
    torch.testing.assert_close(back, aten.native_dropout_backward(x, mask, scale))
    (y, mask), _, _ = run(aten.native_dropout.default, x, p, False)
    assert torch.equal(y, x)
    assert mask.all()


def test_rrelu_with_noise() -> None:
    x = torch.randn(N)
    _, _, outputs = run(aten.rrelu_with_noise.default, x, torch.zeros(N), 0.1, 0.4, True, None)
    noise, y = outputs
    assert torch.equal(y, x * noise)
    assert (noise[x > 0] == 1).all()
    assert stats.kstest(noise[x <= 0].numpy(), "uniform", args=(0.1, 0.3)).pvalue > 1e-3
    (y,), _, _ = run(aten.rrelu_with_noise.default, x, torch.zeros(N), 0.1, 0.4, False, None)
    torch.testing.assert_close(y, torch.where(x <= 0, x * 0.25, x))


# ---- errors ---------------------------------------------------------------------------------------------------------
BAD = [
    ("uniform_", (2.0, 1.0), torch.float32),
    ("uniform_", (), torch.int64),
    ("normal_", (0.0, -1.0), torch.float32),
    ("log_normal_", (0.0, 0.0), torch.float32),
    ("exponential_", (-1.0,), torch.float64),
    ("geometric_", (1.5,), torch.float32),
    ("geometric_", (0.0,), torch.int64),
    ("cauchy_", (0.0, -1.0), torch.float32),
    ("bernoulli_.float", (1.5,), torch.float32),
    ("random_.from", (5, 5), torch.int64),
    ("random_.to", (0,), torch.int64),
    ("random_.to", (300,), torch.uint8),
    ("random_.from", (-1, 5), torch.bool),
    ("random_.from", (2**25, None), torch.float32),
    ("random_", (), torch.complex64),
]


@pytest.mark.parametrize(("name", "args", "dtype"), BAD)
def test_bad_numbers_raise_as_on_cpu(name: str, args: tuple[Any, ...], dtype: torch.dtype) -> None:
    base, _, overload = name.partition(".")
    with pytest.raises(Exception) as expected:
        getattr(getattr(aten, base), overload or "default")(torch.empty(3, dtype=dtype), *args)
    with pytest.raises(type(expected.value)) as got:
        fill(name, *args, n=3, dtype=dtype)
    # Python's meta kernels write 1.0 where C++ writes 1.
    assert str(got.value).split("found")[0].split("got")[0] == str(expected.value).split("found")[0].split("got")[0]


def test_other_errors() -> None:
    with pytest.raises(RuntimeError, match="without replacement"):
        draw(aten.multinomial.default, torch.ones(3), 4)
    with pytest.raises(RuntimeError, match="floating-point"):
        draw(aten.multinomial.default, torch.ones(3, dtype=torch.int32), 1)
    with pytest.raises(RuntimeError, match="p to be in"):
        draw(aten.native_dropout.default, torch.ones(3), 1.5, True)
    with pytest.raises(RuntimeError, match="without overflow"):
        draw(aten.randperm.generator_out, 300, generator=None, out=torch.empty(0, dtype=torch.uint8))
    with pytest.raises(RuntimeError, match="n cannot be greater than 2049 for Half type"):
        draw(aten.randperm.generator_out, 3000, generator=None, out=torch.empty(0, dtype=torch.float16))


def test_numbers_can_be_checked_on_every_call() -> None:
    bad = {
        "uniform": (1.0, 0.0),
        "normal_functional": (0.0, -1.0),
        "normal.Tensor_float": (-1.0,),
        "normal.float_float": (0.0, -1.0),
        "log_normal": (0.0, -1.0),
        "exponential": (0.0,),
        "geometric": (2.0,),
        "cauchy": (0.0, 0.0),
        "bernoulli.p": (-0.5,),
        "native_dropout": (1.5,),
    }
    assert bad.keys() == CHECKED.keys()
    state = torch.get_rng_state()
    for name, numbers in bad.items():
        with pytest.raises(RuntimeError):
            check_numbers(name, torch.float32, *numbers)
        check_numbers(name, torch.float32, *(0.5 for _ in numbers))
    assert torch.equal(state, torch.get_rng_state())
