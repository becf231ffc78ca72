"""Sizes that change in eager mode: exact results, and programs for ranges of sizes instead of one for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support import matmul_precision
from torch_tpu.bounded import changes

SIZES = [*range(3, 45)]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.tpu._clear_cache()
    with matmul_precision("highest"):
        yield


def compiled() -> int:
    stats = torch.tpu.compile_stats()
    return stats["compiled"] + stats["loaded"]


def check(make: Callable[[int, torch.device], Any], sizes: list[Any], at_most: int) -> None:
    """``make`` gives on tpu what it gives on the CPU, and compiles few programs for all sizes."""
    before = compiled()
    for n in sizes:
        torch.manual_seed(0)
        expected = make(n, torch.device("cpu"))
        torch.manual_seed(0)
        got = make(n, torch.device("tpu"))
        for a, b in zip(_tensors(got), _tensors(expected), strict=True):
            torch.testing.assert_close(a.cpu(), b, rtol=1e-5, atol=1e-5)
            assert a.stride() == b.stride()
    assert compiled() - before <= at_most


def _tensors(value: Any) -> list[torch.Tensor]:
    return list(value) if isinstance(value, tuple | list) else [value]


def rand(*shape: int, device: torch.device) -> torch.Tensor:
    return torch.randn(*shape).to(device)


# Eight sizes have programs of their own, then there is one for sizes up to 64. Windows have some for the lengths of the
# arrays that they lie on.
OPERATORS: dict[str, tuple[Callable[[int, torch.device], Any], int]] = {
    "numbers": (lambda n, d: rand(n, 4, device=d) + n, 9),
    "softmax over it": (lambda n, d: rand(n, 4, device=d).softmax(0), 9),
    "sum": (lambda n, d: rand(2, n, device=d).sum(1), 9),
    "mean": (lambda n, d: rand(2, n, 3, device=d).mean(1), 9),
    "largest": (lambda n, d: rand(n, 4, device=d).max(0), 9),
    "cumsum": (lambda n, d: rand(n, 3, device=d).cumsum(0), 9),
    "cat in the middle": (lambda n, d: torch.cat([rand(2, n, 3, device=d), rand(2, 1, 3, device=d)], 1), 9),
    "layer norm": (lambda n, d: F.layer_norm(rand(2, n, 8, device=d), (8,)), 9),
    "linear": (lambda n, d: F.linear(rand(n, 8, device=d), rand(5, 8, device=d), rand(5, device=d)), 9),
    "product over it": (lambda n, d: rand(3, n, device=d) @ rand(n, 5, device=d), 9),
    "square": (lambda n, d: rand(n, n, device=d).tril(), 9),
    "attention": (lambda n, d: F.scaled_dot_product_attention(*(rand(1, 2, k, 8, device=d) for k in (1, n, n))), 9),
    "embedding": (lambda n, d: F.embedding(torch.arange(n).remainder(7).to(d), rand(7, 4, device=d)), 9),
    "arange": (lambda n, d: torch.arange(n, device=d), 9),
    "filled": (lambda n, d: torch.full((n, 2), 3.0, device=d), 9),
    "transposed": (lambda n, d: rand(2, n, 4, device=d).transpose(1, 2) * 2, 11),
    "copied": (lambda n, d: rand(2, n, 4, device=d).transpose(1, 2).contiguous(), 9),
    "converted": (lambda n, d: rand(n, 4, device=d).to(torch.bfloat16).float(), 18),
    "last": (lambda n, d: rand(2, n, 4, device=d)[:, -1] * 2, 9),
    "last, kept": (lambda n, d: rand(1, n, device=d)[:, -1:].clone(), 5),
    "expanded": (lambda n, d: rand(2, 1, n, device=d).expand(2, 3, n).clone(), 12),
    "in place": (lambda n, d: rand(n, 4, device=d).add_(1).mul_(3), 18),
    "frames, their strides changing": (
        lambda n, d: rand(3, 10 * n, device=d).as_strided((3, 4, 7), (10 * n, n, n)) * 2,
        9,
    ),
    "permuted, of a fixed size": (lambda n, d: rand(2, 3, 4 * n, device=d)[:, :, ::n].permute(2, 0, 1) + 1, 9),
    "permuted, open": (lambda n, d: (rand(n, 3, 4, device=d).permute(2, 0, 1) + 1) * 2, 20),
    "several results": (lambda n, d: [t * 2 for t in rand(n, 4, device=d).split(2, 1)], 12),
    "cross entropy": (lambda n, d: F.cross_entropy(rand(n, 5, device=d), torch.arange(n).remainder(5).to(d)), 20),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_a_size_that_changes(name: str) -> None:
    make, programs = OPERATORS[name]
    check(make, SIZES, programs)
    check(make, [3, 44, 20], 0)


def test_an_operator_without_a_form_for_ranges_is_right(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "torch_tpu"):
        check(lambda n, d: rand(n, 3, device=d).sort(0).values, SIZES[:12], 12)
    assert "aten::sort is compiled for each size: aten.sort.default over a size that changes" in caplog.text


def test_two_sizes_that_change() -> None:
    shapes = [(b, n) for b in range(2, 8) for n in range(3, 40, 7)]
    check(lambda s, d: F.gelu(rand(*s, 4, device=d)) * 2, [*shapes, *shapes], 40)
    check(lambda s, d: F.gelu(rand(*s, 4, device=d)) * 2, [(7, 33), (6, 5), (3, 29)], 0)


def test_gradients() -> None:
    def step(n: int, d: torch.device) -> tuple[torch.Tensor, ...]:
        x, w = rand(n, 8, device=d).requires_grad_(), rand(8, 4, device=d).requires_grad_()
        F.layer_norm(x @ w, (4,)).relu().mean().backward()
        assert x.grad is not None and w.grad is not None
        return x.grad, w.grad

    check(step, [*range(3, 15)], 200)
    check(step, [*range(15, 40)], 12)


def test_what_lies_behind_a_window_that_is_written_stays() -> None:
    whole = torch.arange(100.0).to("tpu")
    for n in range(2, 40):
        whole[:n].add_(1)
    expected = torch.arange(100.0)
    for n in range(2, 40):
        expected[:n].add_(1)
    assert torch.equal(whole.cpu(), expected)


def test_out_arguments_are_given_their_size() -> None:
    out = torch.empty(0, device="tpu")
    for n in SIZES[:20]:
        x = rand(n, 3, device=torch.device("tpu"))
        torch.add(x, 1, out=out.resize_(0))
        assert torch.equal(out.cpu(), x.cpu() + 1) and out.shape == (n, 3)


def test_aliases_see_writes() -> None:
    for n in SIZES[:20]:
        x = torch.zeros(n, 4, device="tpu")
        view = x.view(-1)
        x += torch.arange(4.0, device="tpu")
        view.mul_(2)
        assert torch.equal(x.cpu(), 2 * torch.arange(4.0).expand(n, 4))


def test_an_index_out_of_range_is_an_error() -> None:
    table = torch.ones(5, 2, device="tpu")
    for n in SIZES[:12]:
        F.embedding(torch.zeros(n, dtype=torch.int64, device="tpu"), table)
    with pytest.raises(IndexError):
        F.embedding(torch.full((20,), 5, device="tpu"), table).cpu()


def test_random_numbers_are_those_of_each_size() -> None:
    def draw(n: int) -> torch.Tensor:
        torch.manual_seed(n)
        return F.dropout(torch.ones(n, 8, device="tpu"), 0.5).cpu()

    first = [draw(n) for n in SIZES[:20]]
    torch.tpu._clear_cache()
    for n, expected in reversed([*zip(SIZES[:20], first, strict=True)]):
        assert torch.equal(draw(n), expected)


def test_sizes_that_come_back_get_programs_of_their_own() -> None:
    """The layers of a network are not padded for ever."""
    xs = [torch.ones(n, device="tpu") for n in range(2, 14)]
    for _ in range(12):
        for x in xs:
            x + 1
    assert all(_base(x + 1) == [x.numel()] for x in xs)
    before = compiled()
    for x in xs:
        x + 1
    assert compiled() == before


def _base(t: torch.Tensor) -> list[int] | None:
    from torch_tpu import _C

    return _C._array_shape(t)


def test_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch_tpu import config

    get = config.get
    monkeypatch.setattr(config, "get", lambda name: False if name == "TORCH_TPU_DYNAMIC_SIZES" else get(name))
    before = compiled()
    for n in range(3, 20):
        torch.ones(n, 1, device="tpu").cumsum(0)
    assert compiled() - before >= 17


def test_fused_graphs_serve_ranges_of_sizes() -> None:
    def program(n: int, d: torch.device) -> torch.Tensor:
        x = rand(n, 4, device=d)
        return (F.softmax(x * 2 + 1, 0) - x).sum(1)

    with torch.tpu.set_eager_mode(torch.tpu.EagerMode.DEFER_AND_FUSE):
        check(program, SIZES, 12)
        check(program, [5, 44, 17], 0)


# ---- told beforehand ------------------------------------------------------------------------------------------------
def test_a_mark_makes_one_program_for_all_sizes() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.LayerNorm(8), nn.Linear(8, 2))
    on_tpu = nn.Sequential(*model).to("tpu")
    counts = []
    with torch.no_grad():
        for n in (5, 17, 30, 2, 64):
            torch.manual_seed(n)
            x = torch.randn(n, 4)
            model.cpu()
            expected = model(x)
            marked = x.to("tpu")
            torch.tpu.dynamism.mark_dynamic(marked, 0, 2, 64)
            before = compiled()
            got = on_tpu.to("tpu")(marked)
            counts.append(compiled() - before)
            torch.testing.assert_close(got.cpu(), expected, rtol=1e-5, atol=1e-5)
    assert counts[0] <= 4 and counts[1:] == [0, 0, 0, 0]


def test_marks_on_several_dimensions_of_several_inputs() -> None:
    counts = []
    for b, n in ((2, 5), (3, 9), (4, 16)):
        x, y = torch.randn(b, n, 4), torch.randn(b, n)
        tx, ty = x.to("tpu"), y.to("tpu")
        torch.tpu.dynamism.mark_dynamic(tx, (0, 1), 2, (4, 16))
        torch.tpu.dynamism.mark_dynamic(ty, [0, 1], [2, 2], [4, 16])
        before = compiled()
        got = (tx * ty[..., None]).sum(1)
        counts.append(compiled() - before)
        torch.testing.assert_close(got.cpu(), (x * y[..., None]).sum(1), rtol=1e-5, atol=1e-5)
    assert counts[1:] == [0, 0]


def test_what_was_marked_can_be_asked() -> None:
    x = torch.zeros(3, 5, device="tpu")
    torch.tpu.dynamism.mark_dynamic(x, 1, 2, 9)
    torch.tpu.dynamism.mark_dynamic(x, -2, 1, 4)
    assert torch.tpu.dynamism.get_dynamism_info(x) == {1: (2, 9), 0: (1, 4)}
    assert torch.tpu.dynamism.get_dynamism_info(x + 1) == {}
    assert torch.equal(x.cpu(), torch.zeros(3, 5)) and x.shape == (3, 5)


@pytest.mark.parametrize(
    ("error", "text", "call"),
    [
        (TypeError, "takes a strided tensor on tpu, got one on cpu", lambda m, x: m(x.cpu(), 0, 2, 9)),
        (TypeError, "got list", lambda m, x: m([1], 0, 2, 9)),
        (IndexError, "a tensor of 2 dimensions has no dimension 2", lambda m, x: m(x, 2, 2, 9)),
        (ValueError, "dimension 0 has size 4, which the bounds 2 and 3", lambda m, x: m(x, 0, 2, 3)),
        (ValueError, "2 dimensions need 2 bounds, or one, and got 3", lambda m, x: m(x, (0, 1), (1, 1, 1), 9)),
        (ValueError, "memory of its own", lambda m, x: m(x[1:], 0, 2, 9)),
    ],
)
def test_wrong_marks(error: type[Exception], text: str, call: Callable[..., Any]) -> None:
    x = torch.ones(4, 3, device="tpu")
    with pytest.raises(error, match=text):
        call(torch.tpu.dynamism.mark_dynamic, x)
    assert torch.equal(x.cpu(), torch.ones(4, 3))


# ---- which sizes change ---------------------------------------------------------------------------------------------
def test_layers_of_different_sizes_are_no_sizes_that_change() -> None:
    layers = nn.Sequential(*(nn.Linear(a, b) for a, b in [(4, 8), (8, 16), (16, 12), (12, 10), (10, 6)])).to("tpu")
    layers(torch.ones(3, 4, device="tpu")).sum().backward()
    histories = changes._changes._histories.values()
    assert not any(h.classes for h in histories)
