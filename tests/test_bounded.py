"""Compiled functions whose sizes change: one program for a range of sizes, with the results of the unpadded run."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_map

from tests.support import matmul_precision
from torch_tpu.bounded.buckets import Buckets


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    with matmul_precision("highest"):
        yield


def _close(a: Any, b: Any) -> None:
    a, b = (tree_map(lambda t: t.detach().cpu() if isinstance(t, torch.Tensor) else t, x) for x in (a, b))
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def compiled_graphs() -> list[str]:
    return [c["op"] for c in torch.tpu.compile_stats()["compiles"] if c["op"].startswith("graph")]


def _row(n: int) -> torch.Tensor:
    """n rows of 6, of which the number of rows changes."""
    x = torch.randn(n, 6, device="tpu")
    torch._dynamo.mark_dynamic(x, 0)
    torch._dynamo.mark_static(x, 1)
    return x


#: Functions of one array of n rows, and how many programs may run them for n of 2 to 16.
FUNCTIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "element-wise": lambda x: x.sin() * 2 + x,
    "sizes as numbers": lambda x: x / x.shape[0] + x.shape[0] * 2,
    "sum": lambda x: (x.sum(), x.sum(0), x.sum(1)),
    "mean": lambda x: (x.mean(), x.mean(0), x.mean(1, keepdim=True)),
    "variance": lambda x: (x.var(0), x.std(0, correction=0), x.var(1)),
    "extremes": lambda x: (x.amax(0), x.amin(), x.max(0), x.argmin(0)),
    "any and all": lambda x: ((x > 0).any(0), (x > -9).all(), (x > 0).all(1)),
    "norms": lambda x: (x.norm(), x.norm(dim=0), F.layer_norm(x, (6,)), F.rms_norm(x, (6,))),
    "softmax": lambda x: (x.softmax(0), x.log_softmax(0), x.softmax(1), x.logsumexp(0)),
    "product": lambda x: (x @ x.t(), x.t() @ x, x.t().exp() @ (1 / x)),
    "linear": lambda x: F.linear(x, torch.ones(6, 6, device="tpu").tril(), torch.arange(6.0, device="tpu")),
    "views": lambda x: (x.view(-1), x.view(-1, 2, 3).transpose(0, 1).sum(2), x.t().reshape(-1), x.unsqueeze(1)),
    "rows of pairs": lambda x: x.view(-1, 3).sum(0),
    "slices": lambda x: (x[1:], x[-1:], x[:-1], x[:, 2:4], x[-1], x[0], x[:1]),
    "concatenation": lambda x: (torch.cat([x, x * 2]), torch.cat([x, x[:1], x]), torch.stack([x, x])),
    "made": lambda x: (torch.zeros_like(x), torch.arange(x.shape[0], device="tpu"), x.new_ones(x.shape[0])),
    "expanded": lambda x: x[:, None].expand(-1, 3, -1) + torch.arange(3.0, device="tpu")[:, None],
    "masks": lambda x: (torch.tril(x @ x.t()), x.masked_fill(x > 0, 0.0), torch.where(x > 0, x, -x)),
    "scans": lambda x: (x.cumsum(0), x.cumsum(1)),
    "largest": lambda x: (x.topk(2, 0).values, x.topk(3, 1)),
    "gathered": lambda x: (x[torch.arange(x.shape[0], device="tpu") % 2], x.gather(1, (x > 0).long())),
    "padded": lambda x: (F.pad(x, (1, 2), value=3.0), F.pad(x, (0, 0, 2, 1), value=-1.0).sum(0)),
    "loss": lambda x: (F.mse_loss(x, x * 2), F.smooth_l1_loss(x, x * 2), F.cross_entropy(x, (x[:, 0] > 0).long())),
    "repeated": lambda x: x.repeat(1, 3),
    "index add": lambda x: torch.zeros(4, 6, device="tpu").index_put(
        (torch.arange(x.shape[0], device="tpu") % 4,), x, accumulate=True
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_one_program_for_a_range_of_sizes(name: str) -> None:
    function = FUNCTIONS[name]
    compiled = torch.compile(function, fullgraph=True)
    torch.tpu.reset_compile_stats()
    with torch.no_grad():
        for n in (5, 8, 3, 7, 4):
            x = _row(n)
            _close(compiled(x), function(x))
    assert len(compiled_graphs()) == 1 and "<=8" in compiled_graphs()[0]


@pytest.mark.parametrize("name", ["mean", "variance", "norms", "softmax", "product", "linear", "loss", "slices",
                                  "concatenation", "gathered", "views", "expanded"])  # fmt: skip
def test_gradients_are_those_of_the_unpadded_run(name: str) -> None:
    def loss(x: torch.Tensor) -> torch.Tensor:
        out = FUNCTIONS[name](x)
        parts = [t for t in (out if isinstance(out, tuple) else (out,)) if isinstance(t, torch.Tensor)]
        return sum((t.float() * 0.5).square().sum() for t in parts)  # type: ignore[return-value]

    compiled = torch.compile(loss, fullgraph=True)
    torch.tpu.reset_compile_stats()
    for n in (5, 8, 3):
        x = torch.randn(n, 6, device="tpu", requires_grad=True)
        torch._dynamo.mark_dynamic(x, 0)
        torch._dynamo.mark_static(x, 1)
        got, want = (torch.autograd.grad(f(x), x)[0] for f in (compiled, loss))
        _close(got, want)
        assert got.stride() == want.stride()
    assert len(compiled_graphs()) == 2


def test_two_sizes_that_change() -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> Any:
        flat = x.view(-1)
        return x @ y, flat.sum(), x.mean(), torch.cat([x, x], 1), x.transpose(0, 1).reshape(-1), flat

    compiled = torch.compile(f, dynamic=True, fullgraph=True)
    torch.tpu.reset_compile_stats()
    with torch.no_grad():
        for n, m in ((5, 7), (8, 3), (3, 8), (4, 4)):
            x, y = torch.randn(n, m, device="tpu"), torch.randn(m, 3, device="tpu")
            torch._dynamo.mark_static(y, 1)
            _close(compiled(x, y), f(x, y))
    assert len(compiled_graphs()) == 1


class Decoder(nn.Module):
    """A small causal language model."""

    def __init__(self, width: int = 32, heads: int = 4, words: int = 50) -> None:
        super().__init__()
        self.words, self.heads = nn.Embedding(words, width), heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        b, n = ids.shape
        x = self.words(ids)
        q, k, v = self.qkv(self.norm(x)).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        logits = self.head(x + self.out(a.transpose(1, 2).reshape(b, n, -1)))
        return logits if targets is None else F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


def test_a_model_over_fifty_shapes_compiles_eight_programs() -> None:
    model = Decoder().to("tpu")
    compiled = torch.compile(model)
    shapes = [(1 + (7 * i) % 8, 1 + (13 * i) % 61) for i in range(50)]
    torch.tpu.reset_compile_stats()
    with torch.no_grad():
        for b, n in shapes:
            ids = torch.randint(0, 50, (b, n)).to("tpu")
            _close(compiled(ids), model(ids))
    assert len(compiled_graphs()) <= 8, compiled_graphs()


def test_training_over_many_shapes() -> None:
    model = Decoder().to("tpu")
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, dynamic=True)
    for b, n in ((2, 9), (3, 16), (5, 12), (2, 30)):
        ids = torch.randint(0, 50, (b, n)).to("tpu")
        for m in (compiled, twin):
            m.zero_grad()
            m(ids, ids).backward()
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            _close(p.grad, q.grad)


def test_a_padding_mask_and_keys_that_grow() -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, k, attn_mask=mask)

    compiled = torch.compile(attend, fullgraph=True)
    q = torch.randn(2, 2, 3, 8, device="tpu")
    torch.tpu.reset_compile_stats()
    for n in range(4, 16):
        k = torch.randn(2, 2, n, 8, device="tpu")
        mask = torch.rand(2, 1, 3, n, device="tpu") > 0.3
        mask[..., 0] = True
        _close(compiled(q, k, mask), attend(q, k, mask))
    assert len(compiled_graphs()) <= 3


def test_batch_norm_counts_real_rows() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1)).to("tpu")
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, dynamic=True, fullgraph=True)
    torch.tpu.reset_compile_stats()
    for n in (5, 3, 8):
        x = torch.randn(n, 3, 6, 6, device="tpu")
        torch._dynamo.mark_static(x, 2)
        torch._dynamo.mark_static(x, 3)
        for m in (compiled, twin):
            m.zero_grad()
            m(x).square().mean().backward()
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            _close(p.grad, q.grad)
    _close([*model.buffers()], [*twin.buffers()])


def test_marked_dimensions_have_their_own_bounds() -> None:
    compiled = torch.compile(lambda x, y: (x @ y).softmax(-1), fullgraph=True)
    torch.tpu.reset_compile_stats()
    for rows, columns in ((3, 5), (17, 40), (64, 64), (20, 2)):
        x, y = torch.randn(rows, 4, device="tpu"), torch.randn(4, columns, device="tpu")
        torch._dynamo.mark_dynamic(x, 0, min=2, max=64)
        torch._dynamo.mark_dynamic(y, 1, min=2, max=64)
        _close(compiled(x, y), (x @ y).softmax(-1))
    assert compiled_graphs() == [compiled_graphs()[0]] and compiled_graphs()[0].count("<=64") == 2


def test_what_has_no_bounded_form_is_compiled_for_each_size() -> None:
    compiled = torch.compile(lambda x: x.sort(0).values, dynamic=True, fullgraph=True)
    for n in (5, 3, 8):
        x = _row(n)
        _close(compiled(x), x.sort(0).values)


def test_infinities_and_nan_beyond_the_end_stay_there() -> None:
    compiled = torch.compile(lambda x: ((1 / x).sum(0), x.log().mean(), (x / x).t() @ x), dynamic=True, fullgraph=True)
    for n in (3, 7):
        x = torch.rand(n, 6, device="tpu") + 0.5
        _close(compiled(x), ((1 / x).sum(0), x.log().mean(), (x / x).t() @ x))


def test_buckets_are_reused_unless_they_waste() -> None:
    import sympy

    buckets = Buckets([sympy.Symbol("a"), sympy.Symbol("b")], [None, None])
    assert buckets.choose((3, 60)) == (8, 64)
    assert buckets.choose((5, 40)) == (8, 64)
    assert buckets.choose((2, 9)) == (8, 16)
    assert Buckets([sympy.Symbol("n")], [100], count=4).choose((30,)) == (50,)


def test_sizes_that_are_equal_by_chance_are_compiled_for_each_size() -> None:
    def attend(q: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, q, q, attn_mask=mask)

    q, mask = torch.randn(2, 2, 12, 8, device="tpu"), torch.zeros(2, 1, 1, 12, device="tpu")
    torch._dynamo.mark_dynamic(mask, 3)
    _close(torch.compile(attend)(q, mask), attend(q, mask))


VIEWS: dict[str, Callable[[torch.Tensor], Any]] = {
    "the second half": lambda x: x[x.shape[0] // 2 :],
    "a row in the middle": lambda x: x[x.shape[0] // 2],
    "both ends": lambda x: (x[:1], x[-1:], x[-1]),
    "halves": lambda x: x.chunk(2),
    "transposed": lambda x: (x.t()[1:], x[1:].t()),
    "columns": lambda x: x[:, 1:3],
}


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("of_a_window", [False, True])
def test_views_of_inputs_are_where_they_are(name: str, of_a_window: bool) -> None:
    function = VIEWS[name]
    compiled = torch.compile(function, dynamic=True)
    for n in (5, 10, 7, 8):
        x = torch.randn(n + 3, 6, device="tpu")[2 : n + 2] if of_a_window else torch.randn(n, 6, device="tpu")
        _close(compiled(x), function(x))
        for a, b in zip(*(r if isinstance(r, tuple) else (r,) for r in (compiled(x), function(x))), strict=True):
            assert a.untyped_storage()._cdata == x.untyped_storage()._cdata
            assert (a.stride(), a.storage_offset()) == (b.stride(), b.storage_offset())


def test_constants_on_the_device_are_part_of_the_program() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.bucketize(x, torch.tensor([-1.0, 0.0, 1.0], device=x.device))

    compiled = torch.compile(f, dynamic=True)
    for n in (5, 9):
        x = torch.randn(n, 3, device="tpu")
        _close(compiled(x), f(x))


def test_sizes_of_zero_and_halves_with_gradients() -> None:
    def f(x: torch.Tensor) -> Any:
        return x.sum(0), x.cumsum(0), x.t() @ x, torch.cat([x, x])

    compiled = torch.compile(f, dynamic=True)
    for n in (2, 5, 0, 1, 8):
        x = torch.randn(n, 3, device="tpu")
        _close(compiled(x), f(x))
    halves = torch.compile(lambda x: x.chunk(2, 0))
    for n in (6, 7, 10, 2):
        x = torch.randn(n, 4, device="tpu", requires_grad=True)
        _close(halves(x), x.chunk(2, 0))


def test_keys_and_values_of_a_growing_cache_have_sizes_of_their_own() -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, new: torch.Tensor) -> tuple[torch.Tensor, ...]:
        k, v = torch.cat([k, new], 2), torch.cat([v, new * 2], 2)
        return F.scaled_dot_product_attention(q, k, v), k, v

    compiled = torch.compile(attend, fullgraph=True)
    k, v = torch.randn(1, 2, 4, 8, device="tpu"), torch.randn(1, 2, 4, 8, device="tpu")
    torch.tpu.reset_compile_stats()
    for _ in range(10):
        q, new = torch.randn(1, 2, 1, 8, device="tpu"), torch.randn(1, 2, 1, 8, device="tpu")
        want = attend(q, k, v, new)
        got = compiled(q, k, v, new)
        _close(got, want)
        _, k, v = got
    assert len(compiled_graphs()) <= 3, compiled_graphs()
