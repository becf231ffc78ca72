"""Views, and writes to views, are exactly the CPU's: every alias sees every write, whatever made it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support import assert_same, outcome

EXAMPLES = int(os.environ.get("TORCH_TPU_VIEW_EXAMPLES", "40"))


# ---- random programs ------------------------------------------------------------------------------------------------
@dataclass
class Alias:
    """One tensor on both devices."""

    cpu: torch.Tensor
    tpu: torch.Tensor


class Programs:
    """Draws one step at a time, so that every step fits the tensors that are alive."""

    VIEWS = (
        "transpose", "permute", "slice", "select", "expand", "unsqueeze", "squeeze", "diagonal", "unfold", "flatten",
        "as_strided", "dtype", "real", "detach", "data", "flip_matrix",
    )  # fmt: skip
    WRITES = ("add_", "mul_", "fill_", "zero_", "copy_", "out", "assign", "add_other", "masked", "abs_")

    def __init__(self, data: st.DataObject) -> None:
        self._data = data

    def draw(self, strategy: st.SearchStrategy[Any]) -> Any:
        return self._data.draw(strategy)

    def integer(self, low: int, high: int) -> int:
        return self.draw(st.integers(low, high))

    def view(self, x: torch.Tensor) -> tuple[str, Callable[[torch.Tensor], torch.Tensor]] | None:
        """A view operator that ``x`` allows, or None if the drawn one does not apply."""
        kind, n = self.draw(st.sampled_from(self.VIEWS)), x.dim()
        dim = self.integer(0, n - 1) if n else 0
        if kind == "transpose" and n >= 2:
            other = self.integer(0, n - 1)
            return f"transpose({dim}, {other})", lambda t: t.transpose(dim, other)
        if kind == "permute" and n >= 2:
            order = self.draw(st.permutations(range(n)))
            return f"permute{order}", lambda t: t.permute(order)
        if kind == "slice" and n and x.shape[dim]:
            start = self.integer(0, x.shape[dim] - 1)
            stop, step = self.integer(start, x.shape[dim]), self.integer(1, 3)
            index = (slice(None),) * dim + (slice(start, stop, step),)
            return f"[{start}:{stop}:{step}] in {dim}", lambda t: t[index]
        if kind == "select" and n and x.shape[dim]:
            i = self.integer(-x.shape[dim], x.shape[dim] - 1)
            return f"select({dim}, {i})", lambda t: t.select(dim, i)
        if kind == "expand" and n < 4:
            sizes = (self.integer(1, 3), *x.shape)
            return f"expand{sizes}", lambda t: t.expand(sizes)
        if kind == "unsqueeze" and n < 4:
            return f"unsqueeze({dim})", lambda t: t.unsqueeze(dim)
        if kind == "squeeze":
            return "squeeze()", lambda t: t.squeeze()
        if kind == "diagonal" and n >= 2:
            offset = self.integer(-1, 2)
            return f"diagonal({offset})", lambda t: t.diagonal(offset, n - 2, n - 1)
        if kind == "unfold" and n and n < 4 and x.shape[dim] >= 2:
            size, step = self.integer(1, 2), self.integer(1, 2)
            return f"unfold({dim}, {size}, {step})", lambda t: t.unfold(dim, size, step)
        if kind == "flatten" and x.is_contiguous():
            return "view(-1)", lambda t: t.view(-1)
        if kind == "as_strided":
            return self.as_strided(x)
        if kind == "dtype" and not x.is_complex():
            to = torch.float32 if x.dtype == torch.int32 else torch.int32
            return f"view({to})", lambda t: t.view(to)
        if kind == "real" and x.is_complex():
            return "view_as_real()", torch.view_as_real
        if kind == "detach":
            return "detach()", lambda t: t.detach()
        if kind == "data":
            return ".data", lambda t: t.data
        if kind == "flip_matrix" and n == 2:
            return ".mT", lambda t: t.mT
        return None

    def as_strided(self, x: torch.Tensor) -> tuple[str, Callable[[torch.Tensor], torch.Tensor]]:
        """Any window of the storage, overlapping ones included."""
        count = x.untyped_storage().nbytes() // x.itemsize
        sizes, strides, left = [], [], count - 1
        for _ in range(self.integer(0, 3)):
            stride = self.integer(0, 7)
            size = self.integer(1, min(4, left // stride + 1) if stride else 3)
            sizes.append(size)
            strides.append(stride)
            left -= (size - 1) * stride
        offset = self.integer(0, left)
        return f"as_strided({sizes}, {strides}, {offset})", lambda t: t.as_strided(sizes, strides, offset)

    def write(self, x: torch.Tensor, aliases: list[Alias]) -> tuple[str, Callable[[Alias, str], Any]] | None:
        """An in-place operator on ``x``; the callable gets the alias and which side of it to write."""
        kind, value = self.draw(st.sampled_from(self.WRITES)), self.integer(-3, 3)
        reinterpreted = x.dtype == torch.float32 and any(not a.cpu.is_floating_point() for a in aliases)
        if reinterpreted and kind not in ("fill_", "zero_", "copy_", "assign"):
            return None  # integers as floats are NaNs and subnormals, which a TPU flushes to zero
        if reads_what_it_writes(x) and 0 not in x.stride() and kind not in ("fill_", "zero_"):
            return None
        if kind == "mul_":
            value = abs(value) + 1  # the sign of a zero is not part of the promise
        if kind in ("fill_", "add_", "mul_"):
            return f"{kind}({value})", lambda a, side: getattr(getattr(a, side), kind)(value)
        if kind == "zero_":
            return "zero_()", lambda a, side: getattr(a, side).zero_()
        if kind == "abs_" and not x.is_complex():
            return "abs_()", lambda a, side: getattr(a, side).abs_()
        if kind == "copy_":
            source = torch.arange(x.numel()).reshape(x.shape).to(x.dtype) + value
            return "copy_(fresh)", lambda a, side: getattr(a, side).copy_(source.to(getattr(a, side).device))
        if kind == "out":
            source = torch.full(x.shape, value, dtype=x.dtype)
            return "add(out=)", lambda a, side: torch.add(source.to(getattr(a, side).device), 1, out=getattr(a, side))
        if kind == "assign" and x.dim() and x.shape[0]:
            row = self.integer(0, x.shape[0] - 1)
            return f"[{row}] = {value}", lambda a, side: getattr(a, side).__setitem__(row, value)
        if kind == "masked" and x.dtype == torch.float32 and not reads_what_it_writes(x):
            return "masked_fill_", lambda a, side: getattr(a, side).masked_fill_(getattr(a, side) > 1, value)
        if kind == "add_other":
            other = aliases[self.integer(0, len(aliases) - 1)]
            dense = (
                x.is_contiguous() and other.cpu.is_contiguous()
            )  # else PyTorch does not look, and the result is undefined
            if overlap_partly(x, other.cpu) and not dense:
                return None
            return "add_(alias)", lambda a, side: getattr(a, side).add_(getattr(other, side))
        return None


BASES = {
    "f32[4, 6]": lambda: torch.arange(24.0).view(4, 6) - 5,
    "f32[3, 2, 4]": lambda: torch.arange(24.0).view(3, 2, 4) - 5,
    "i32[5, 5]": lambda: torch.arange(25, dtype=torch.int32).view(5, 5) - 7,
    "c64[3, 4]": lambda: torch.complex(torch.arange(12.0), torch.arange(12.0) - 6).view(3, 4),
}


def compare(aliases: list[Alias], log: list[str]) -> None:
    for alias in aliases:
        assert alias.tpu.stride() == alias.cpu.stride() and alias.tpu.storage_offset() == alias.cpu.storage_offset(), (
            log
        )
        actual, expected = alias.tpu.cpu(), alias.cpu
        assert actual.dtype == expected.dtype and actual.shape == expected.shape, log
        np.testing.assert_array_equal(actual.numpy(), expected.numpy(), str(log))


def reads_what_it_writes(x: torch.Tensor) -> bool:
    """True if elements of ``x`` share memory: where PyTorch does not refuse to write them, the result is undefined."""
    positions = torch.arange(x.untyped_storage().nbytes() // x.itemsize).as_strided(
        x.shape, x.stride(), x.storage_offset()
    )
    return positions.unique().numel() < positions.numel()


def overlap_partly(x: torch.Tensor, y: torch.Tensor) -> bool:
    """True if an element of ``x`` has memory that another element of ``y`` has too."""
    same = (
        x.shape == y.shape
        and x.stride() == y.stride()
        and x.storage_offset() == y.storage_offset()
        and x.dtype == y.dtype
    )
    return not same and x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()


@settings(
    max_examples=EXAMPLES, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)
@given(base=st.sampled_from(sorted(BASES)), data=st.data())
def test_random_programs_of_views_and_writes_agree_with_cpu(base: str, data: st.DataObject) -> None:
    programs, log = Programs(data), [base]
    first = BASES[base]()
    aliases = [Alias(first, first.tpu())]
    for _ in range(data.draw(st.integers(2, 7))):
        alias = aliases[programs.integer(0, len(aliases) - 1)]
        if programs.draw(st.booleans()) and len(aliases) < 5:
            if (step := programs.view(alias.cpu)) is None:
                continue
            log.append(step[0])
            expected, actual = (outcome(lambda s=side: step[1](getattr(alias, s))) for side in ("cpu", "tpu"))
            assert actual[0] == expected[0], (log, expected, actual)
            if expected[0] == "value":
                aliases.append(Alias(expected[1], actual[1]))
            else:
                assert actual[1] == expected[1], log
        else:
            if (write := programs.write(alias.cpu, aliases)) is None:
                continue
            log.append(write[0])
            expected, actual = (outcome(lambda s=side: write[1](alias, s)) for side in ("cpu", "tpu"))
            assert actual[0] == expected[0], (log, expected, actual)
            if expected[0] == "raised":
                assert actual[1] == expected[1], log
        compare(aliases, log)


# ---- one promise each -----------------------------------------------------------------------------------------------
def both(program: Callable[[Callable[[torch.Tensor], torch.Tensor]], Any]) -> tuple[Any, Any]:
    """The program's result on the device and on the CPU."""
    return program(lambda t: t.clone().tpu()), program(lambda t: t.clone())


MATRIX = torch.arange(24.0).view(4, 6)

READS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transpose": lambda x: x.t(),
    "steps": lambda x: x[::2, 1::3],
    "negative index": lambda x: x[-1],
    "narrow": lambda x: x.narrow(1, 2, 3),
    "diagonal": lambda x: x.diagonal(1),
    "expand": lambda x: x[:, :1].expand(4, 5),
    "unfold": lambda x: x.unfold(1, 3, 2),
    "overlapping as_strided": lambda x: x.as_strided((3, 4), (2, 1), 3),
    "as_strided with stride 0": lambda x: x.as_strided((2, 3), (0, 4), 1),
    "view of another dtype": lambda x: x.view(torch.int32),
    "view of a wider dtype": lambda x: x.view(torch.float64),
    "view of a narrower dtype": lambda x: x.view(torch.int16),
    "movedim": lambda x: x.view(2, 2, 6).movedim(0, 2),
    "unflatten": lambda x: x.unflatten(1, (2, 3)),
    "chunk": lambda x: x.chunk(3, 1)[1],
    "split": lambda x: x.split([1, 5], 1)[1],
    "unbind": lambda x: x.unbind(1)[4],
    "hsplit": lambda x: x.hsplit(2)[1],
    "squeeze": lambda x: x[:, 2:3].squeeze(1),
    "select twice": lambda x: x[1][2],
    "empty slice": lambda x: x[2:2],
    "ellipsis and None": lambda x: x[..., None, 2],
    "real view": lambda x: torch.view_as_complex(x.view(4, 3, 2)),
}


@pytest.mark.parametrize("name", READS)
def test_a_view_has_cpus_geometry_and_values(name: str) -> None:
    actual, expected = both(lambda move: READS[name](move(MATRIX)))
    assert_same(actual, expected, rtol=0, atol=0)
    assert actual.storage_offset() == expected.storage_offset() and actual._is_view() == expected._is_view()
    assert_same(actual + actual, expected + expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    "name", [n for n in READS if "stride 0" not in n and n not in ("expand", "overlapping as_strided", "unfold")]
)
def test_a_write_to_a_view_is_seen_by_the_base(name: str) -> None:
    def program(move: Callable) -> torch.Tensor:
        x = move(MATRIX)
        READS[name](x).fill_(3)
        READS[name](x).mul_(-1)
        return x

    actual, expected = both(program)
    assert_same(actual, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x[0].expand(3, 6).add_(1),
        lambda x: x.as_strided((3, 4), (2, 1)).fill_(2),
        lambda x: x[:, :1].expand(4, 5).copy_(torch.ones(4, 5, device=x.device)),
        lambda x: torch.add(x[:, :1], 1, out=x[:, :1].expand(4, 5)),
        lambda x: x[1:].add_(x[:-1]),
        lambda x: torch.mul(x[:, 1:], 2, out=x[:, :-1]),
        lambda x: x[0].expand(4, 6).masked_fill_(x[:1] > 3, 0),
        lambda x: x[0].expand(4, 6).uniform_(),
        lambda x: x[0].expand(4, 6).scatter_(0, torch.zeros(1, 6, dtype=torch.int64, device=x.device), 1.0),
        lambda x: x[0].expand(4, 6).cumsum_(0),
        lambda x: x[1:].copy_(x[:-1]),
        lambda x: x[1:].copy_(x[1:]),
        lambda x: x.view(-1)[1:].addcmul_(x.view(-1)[:-1], x.view(-1)[1:]),
        lambda x: x.view(-1)[:4].add_(x.view(-1)[4:8]),
        lambda x: x[0].expand(4, 6).index_fill_(0, torch.tensor([0], device=x.device), 1.0),
        lambda x: x[0].expand(4, 6).zero_(),
        lambda x: x[0].expand(4, 6).fill_(2),
        lambda x: x[0].expand(4, 6).relu_(),
    ],
)
def test_a_write_through_overlapping_memory_does_what_cpu_does(write: Callable) -> None:
    """Where CPU PyTorch refuses it, or defines it; masks on expanded tensors are deprecated and undefined."""
    x, y = MATRIX.clone(), MATRIX.tpu()
    expected, actual = outcome(lambda: write(x)), outcome(lambda: write(y))
    assert actual[0] == expected[0]
    if expected[0] == "raised":
        assert actual[1] == expected[1]
    assert_same(y, x, rtol=0, atol=0)


def test_every_alias_sees_every_write() -> None:
    x = torch.zeros(2, 3, 4, device="tpu")
    aliases = [
        x.view(-1),
        x.permute(2, 0, 1),
        x[1],
        x[:, :, 1:3],
        x.detach(),
        x.data,
        x.view(torch.int32),
        x.as_strided((4,), (7,)),
    ]
    x[1, 2, 3] = 5
    aliases[0][0] = 1
    aliases[1].add_(1)
    aliases[3].mul_(2)
    host = x.cpu()
    expected = [
        host.view(-1),
        host.permute(2, 0, 1),
        host[1],
        host[:, :, 1:3],
        host,
        host,
        host.view(torch.int32),
        host.as_strided((4,), (7,)),
    ]
    for alias, want in zip(aliases, expected, strict=True):
        assert torch.equal(alias.cpu(), want)
    assert host[1, 2, 3] == 6 and host[0, 0, 0] == 2 and host[0, 0, 1] == 2


def test_a_complex_view_and_its_real_parts_are_one_memory() -> None:
    z = torch.zeros(3, dtype=torch.complex64, device="tpu")
    parts = torch.view_as_real(z)
    parts[:, 1] = 2
    z.real.add_(1)
    z.imag[0] = 7
    assert z.tolist() == [1 + 7j, 1 + 2j, 1 + 2j]
    assert parts.tolist() == [[1, 7], [1, 2], [1, 2]]
    assert torch.view_as_complex(parts).data_ptr() == z.data_ptr()


def test_conjugate_and_negative_views_are_lazy_and_exact() -> None:
    z = torch.tensor([1 + 2j, 3 - 4j])
    actual, expected = z.tpu(), z.clone()
    assert actual.conj().is_conj() and actual.conj().imag.is_neg()
    for operation in (
        lambda t: t.conj() * t, lambda t: t.conj().imag, lambda t: t.conj().resolve_conj(), lambda t: t.conj().clone(),
        lambda t: t.conj().imag + 1, lambda t: t.mT if t.dim() == 2 else t.conj().conj(),
    ):  # fmt: skip
        assert torch.equal(operation(actual).cpu(), operation(expected))
    for t in (actual, expected):
        t.conj().mul_(1j)
        t.conj().imag.add_(1)
        t.conj()[0] = 5 + 6j
    assert torch.equal(actual.cpu(), expected)


def test_views_of_a_view_of_another_dtype_write_through() -> None:
    x = torch.tensor([1.0, -2.0, 3.0], device="tpu")
    x.view(torch.int32).bitwise_and_(0x7FFFFFFF)
    assert x.tolist() == [1, 2, 3]
    x.view(torch.uint8)[3] = 0xBF
    assert x.tolist() == [-1, 2, 3]
    flags = torch.tensor([True, False], device="tpu")
    flags.view(torch.uint8).bitwise_xor_(1)
    assert flags.tolist() == [False, True]


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.view(5, 5),
        lambda x: x.t().view(-1),
        lambda x: x.view(-1, -1),
        lambda x: x.as_strided((4, 7), (7, 1)),
        lambda x: x.as_strided((2,), (1,), -1),
        lambda x: x.as_strided((2,), (-1,)),
        lambda x: x.select(0, 4),
        lambda x: x[5],
        lambda x: x.narrow(0, 3, 2),
        lambda x: x.expand(3, 6),
        lambda x: x.t().view(torch.float64),
        lambda x: x[:, :5].view(torch.float64),
        lambda x: x.diagonal(0, 0, 0),
        lambda x: x.permute(0, 0),
        lambda x: x.unfold(0, 9, 1),
        lambda x: torch.view_as_complex(x),
        lambda x: torch.view_as_real(x),
        lambda x: x.squeeze(3),
    ],
)
def test_a_view_that_cannot_be_is_cpus_error(make: Callable) -> None:
    expected, actual = outcome(lambda: make(MATRIX.clone())), outcome(lambda: make(MATRIX.tpu()))
    assert expected[0] == "raised" and actual == expected


def test_offsets_are_operands_so_a_loop_over_rows_compiles_once() -> None:
    x = torch.arange(60.0, device="tpu").view(20, 3)
    x[0] * 2
    x[0].add_(1)
    torch.tpu.reset_compile_stats()
    for i in range(20):
        x[i] * 2
        x[i].add_(1)
    assert torch.tpu.compile_stats()["misses"] == 0
    assert torch.equal(x.cpu()[1:], torch.arange(60.0).view(20, 3)[1:] + 1)


def test_views_cost_no_program() -> None:
    x = torch.zeros(4, 6, device="tpu")
    torch.tpu.reset_compile_stats()
    x.t()[1:3].unsqueeze(0).expand(5, 2, 4).permute(2, 0, 1).detach().view(torch.int32).select(0, 1)
    assert torch.tpu.compile_stats()["hits"] == torch.tpu.compile_stats()["misses"] == 0


def test_functions_that_view_and_write_in_one_call() -> None:
    def program(move: Callable) -> torch.Tensor:
        x = move(MATRIX)
        x[:, 0], x[1] = 1, 2
        x[1:3, ::2] = x[:2, ::2].clone()
        x[[0, 2]] = x[[2, 0]]
        x[x > 20] = -1
        x.diagonal()[:] = 9
        x.t()[2].index_fill_(0, move(torch.tensor([1])), 8)
        x[:, 5].swapaxes(0, 0).clamp_(max=4)
        return x

    actual, expected = both(program)
    assert_same(actual, expected, rtol=0, atol=0)
