"""Windows on a base array, read and written inside a program, against torch.as_strided."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import pytest
import torch

from tests.lowering.harness import FLAGS, client
from torch_tpu.lowering import view
from torch_tpu.stablehlo import Function, Value


class Window(NamedTuple):
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    def of(self, base: torch.Tensor) -> torch.Tensor:
        return base.as_strided(self.sizes, self.strides, self.offset)


def to_numpy(t: torch.Tensor) -> np.ndarray:
    return t.view(torch.uint16).numpy() if t.dtype == torch.bfloat16 else t.numpy()


def from_numpy(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    array = np.array(array, copy=True)
    if array.dtype.kind == "V":  # NumPy knows bfloat16 by name where ml_dtypes is installed; PyTorch does not
        array = array.view(f"uint{8 * array.itemsize}")
    t = torch.from_numpy(array)
    return t.view(torch.bfloat16) if dtype == torch.bfloat16 else t


def execute(build: Callable[..., Sequence[Value]], *inputs: torch.Tensor) -> list[torch.Tensor]:
    """Compiles ``build`` on values of the inputs' types and runs it."""
    function = Function()
    arguments = [function.argument(tuple(t.shape), t.dtype) for t in inputs]
    with function.building():
        results = build(*arguments)
    program = client().compile(function.module_text(results), FLAGS)
    raw = program.run([to_numpy(t.contiguous()) for t in inputs])
    return [from_numpy(a, r.dtype) for a, r in zip(raw, results, strict=True)]


def windows_of_views(rng: random.Random, shape: tuple[int, ...], count: int) -> list[Window]:
    """Windows that chains of view operators give on a contiguous tensor of ``shape``."""

    def step(t: torch.Tensor) -> torch.Tensor:
        dims = t.dim()
        d = rng.randrange(dims) if dims else 0
        choice = rng.choice(
            ["slice", "select", "permute", "diagonal", "unsqueeze", "expand", "unfold", "reshape", "step"]
        )
        if choice == "unsqueeze" and dims < 6:
            return t.unsqueeze(rng.randrange(dims + 1))
        if not dims or 0 in t.shape:
            return t
        n = t.shape[d]
        match choice:
            case "slice":
                start = rng.randrange(n)
                return t.narrow(d, start, rng.randrange(n - start + 1) or 1)
            case "step":
                return t[(slice(None),) * d + (slice(rng.randrange(n), None, rng.randint(2, 3)),)]
            case "select":
                return t.select(d, rng.randrange(n))
            case "permute":
                return t.permute(rng.sample(range(dims), dims))
            case "diagonal" if dims > 1:
                a, b = rng.sample(range(dims), 2)
                return t.diagonal(rng.randint(-1, 1), a, b)
            case "expand":
                return t.unsqueeze(d).expand(*t.shape[:d], rng.randint(1, 3), *t.shape[d:])
            case "unfold":
                size = rng.randint(1, n)
                return t.unfold(d, size, rng.randint(1, size + 1))
            case "reshape" if t.is_contiguous():
                return t.view(-1) if rng.random() < 0.5 else t.view(*t.shape[:d], n, 1, *t.shape[d + 1 :])
        return t

    out = []
    while len(out) < count:
        t = torch.empty(shape)
        for _ in range(rng.randint(0, 5)):
            t = step(t)
        if t.numel() <= 4000:
            out.append(Window(tuple(t.shape), tuple(t.stride()), t.storage_offset()))
    return out


def windows_at_random(rng: random.Random, numel: int, count: int) -> list[Window]:
    """Any sizes and strides that stay inside ``numel`` elements: overlapping, broadcast, in any order."""
    out = []
    while len(out) < count:
        rank = rng.randint(0, 4)
        sizes = tuple(rng.choice([0, 1, 1, 2, 3, 4, 5] if rng.random() < 0.1 else [1, 2, 3, 4, 5]) for _ in range(rank))
        strides = tuple(rng.choice([0, 1, 2, 3, 4, 5, 6, 8, 12, 20]) for _ in range(rank))
        reach = view.span(sizes, strides)
        if reach <= numel:
            out.append(Window(sizes, strides, rng.randint(0, numel - reach)))
    return out


SHAPES = [(60,), (6, 10), (3, 4, 5), (2, 3, 2, 5), (1, 7, 1), (61,), ()]


def windows(shape: tuple[int, ...], count: int) -> list[Window]:
    rng = random.Random(repr(shape))
    numel = int(np.prod(shape))
    return [*windows_of_views(rng, shape, count), *windows_at_random(rng, numel, count)]


def overlaps(w: Window) -> bool:
    """Two of the window's places, broadcast dimensions aside, are one element."""
    sizes = [1 if t == 0 else n for n, t in zip(w.sizes, w.strides, strict=True)]
    places = torch.arange(10_000).as_strided(sizes, w.strides, w.offset).flatten()
    return len(places.unique()) < len(places)


def fits(w: Window) -> bool:
    """What the eager kernel knows of a run-time offset."""
    chain = view.chain_of(w.sizes, w.strides)
    return chain is not None and 0 not in w.sizes and chain.fits(w.offset)


@pytest.mark.parametrize("run_time", [False, True], ids=["static", "run_time_offset"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_read(shape: tuple[int, ...], run_time: bool) -> None:
    base = torch.randn(shape)
    cases = windows(shape, 30)

    def build(x: Value, *offsets: Value) -> list[Value]:
        return [
            view.read_view(x, w.sizes, w.strides, offsets[i] if run_time else w.offset, x.dtype, fits(w))
            for i, w in enumerate(cases)
        ]

    offsets = [torch.tensor(w.offset, dtype=torch.int32) for w in cases] if run_time else []
    for w, got in zip(cases, execute(build, base, *offsets), strict=True):
        assert torch.equal(got, w.of(base)), w


@pytest.mark.parametrize("run_time", [False, True], ids=["static", "run_time_offset"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_write(shape: tuple[int, ...], run_time: bool) -> None:
    base = torch.randn(shape)
    cases = [w for w in windows(shape, 20) if not overlaps(w)]
    # What lies under a broadcast dimension is one element: the values written there must agree.
    values = [w.of(torch.randn(10_000)).contiguous() for w in cases]

    def build(x: Value, *rest: Value) -> list[Value]:
        new, offsets = rest[: len(cases)], rest[len(cases) :]
        return [
            view.write_view(x, w.sizes, w.strides, offsets[i] if run_time else w.offset, new[i], fits(w))
            for i, w in enumerate(cases)
        ]

    offsets = [torch.tensor(w.offset, dtype=torch.int32) for w in cases] if run_time else []
    for w, value, got in zip(cases, values, execute(build, base, *values, *offsets), strict=True):
        want = base.clone()
        one = Window(tuple(1 if t == 0 else n for n, t in zip(w.sizes, w.strides, strict=True)), w.strides, w.offset)
        if value.numel():
            one.of(want).copy_(value[tuple(slice(0, n) for n in one.sizes)])
        assert torch.equal(got, want), w


@pytest.mark.parametrize("shape", [(6, 10), (3, 4, 5)], ids=str)
def test_one_program_serves_every_offset(shape: tuple[int, ...]) -> None:
    """A chain's program is compiled for a window, not for its place."""
    base = torch.randn(shape)
    rows = [Window(shape[1:], base.stride()[1:], i * base.stride(0)) for i in range(shape[0])]
    assert all(fits(w) for w in rows)
    function = Function()
    x, offset = function.argument(shape, torch.float32), function.argument((), torch.int32)
    with function.building():
        out = view.read_view(x, rows[0].sizes, rows[0].strides, offset, x.dtype, True)
    text = function.module_text([out])
    assert "gather" not in text
    program = client().compile(text, FLAGS)
    for i, w in enumerate(rows):
        (got,) = program.run([base.numpy(), np.array(w.offset, dtype=np.int32)])
        assert torch.equal(torch.from_numpy(np.array(got)), base[i])


DTYPES = [
    torch.uint8,
    torch.int16,
    torch.bfloat16,
    torch.float32,
    torch.int32,
    torch.int64,
    torch.float64,
    torch.complex64,
]


@pytest.mark.parametrize("target", [*DTYPES, torch.bool], ids=str)
@pytest.mark.parametrize("source", DTYPES, ids=str)
def test_read_as_another_dtype(source: torch.dtype, target: torch.dtype) -> None:
    """The same bytes seen as another dtype, whole and through a window."""
    base = torch.arange(1, 97, dtype=torch.uint8).view(source).reshape(2, -1)
    if target == torch.bool:
        base = (torch.arange(96) % 2).to(torch.uint8).view(source).reshape(2, -1)
    flat = base.flatten().view(target)
    whole = Window((flat.numel(),), (1,), 0)
    part = Window((2, flat.numel() // 4), (flat.numel() // 2, 2), 1)
    cases = [whole, part]
    got = execute(lambda x: [view.read_view(x, w.sizes, w.strides, w.offset, target) for w in cases], base)
    for w, out in zip(cases, got, strict=True):
        assert out.dtype == target
        assert torch.equal(out.contiguous().view(torch.uint8), w.of(flat).contiguous().view(torch.uint8)), w


@pytest.mark.parametrize("target", DTYPES, ids=str)
@pytest.mark.parametrize("source", DTYPES, ids=str)
def test_write_as_another_dtype(source: torch.dtype, target: torch.dtype) -> None:
    base = torch.arange(1, 97, dtype=torch.uint8).view(source).reshape(2, -1)
    numel = 96 // target.itemsize
    w = Window((numel // 4,), (2,), 1)
    value = torch.arange(101, 101 + 96, dtype=torch.uint8).view(target)[: numel // 4]
    want = base.flatten().view(target).clone()
    w.of(want).copy_(value)
    (got,) = execute(lambda x, v: [view.write_view(x, w.sizes, w.strides, w.offset, v)], base, value)
    assert got.shape == base.shape and got.dtype == source
    assert torch.equal(got.flatten().view(torch.uint8), want.view(torch.uint8))


def test_bytes_that_do_not_fill_an_element() -> None:
    """Five bytes hold one int32 and the beginning of another, which no window reaches."""
    base = torch.arange(1, 6, dtype=torch.uint8)
    (got,) = execute(lambda x: [view.read_view(x, (1,), (1,), 0, torch.int32)], base)
    assert torch.equal(got, base[:4].view(torch.int32))
    (got,) = execute(lambda x, v: [view.write_view(x, (1,), (1,), 0, v)], base, torch.tensor([-1], dtype=torch.int32))
    assert torch.equal(got, torch.tensor([255, 255, 255, 255, 5], dtype=torch.uint8))


@pytest.mark.parametrize("shape", [(7,), (3, 3), ()], ids=str)
def test_complex_window_on_an_odd_number_of_floats(shape: tuple[int, ...]) -> None:
    base = torch.randn(shape)
    pairs = base.numel() // 2
    want = base.flatten()[: 2 * pairs].view(torch.complex64)
    (got,) = execute(lambda x: [view.read_view(x, (pairs,), (1,), 0, torch.complex64)], base)
    assert torch.equal(got, want)


@pytest.mark.parametrize("offset", [0, 5, 64, 69, 75, 80, 140])
def test_strides_that_do_not_divide_one_another(offset: int) -> None:
    x = torch.arange(300.0)
    window = ((2, 2, 2), (75, 10, 3), offset)
    torch.testing.assert_close(x.to("tpu").as_strided(*window).clone().cpu(), x.as_strided(*window))
