"""Strict runs ahead and reports later; Debug waits and reports at the line; tests/test_fused.py has Fused."""

from __future__ import annotations

import re
import threading

import pytest
import torch
import torch.nn.functional as F

from tests.support import python

EagerMode = torch.tpu.EagerMode
STRICT, DEBUG = EagerMode.DEFER_NEVER, EagerMode.DEFER_NEVER_AND_LAUNCH_BLOCKING


@pytest.fixture(autouse=True)
def nothing_outstanding():
    torch.tpu.synchronize()
    yield
    torch.tpu.eager_mode = STRICT


def table() -> torch.Tensor:
    return torch.arange(12.0, device="tpu").view(4, 3)


def index(*values: int) -> torch.Tensor:
    return torch.tensor(values, device="tpu")


# The operator's name in the message, and a call with an index that is out of range. The exception is the CPU's.
BAD_INDICES = {
    "aten::index.Tensor": lambda: table()[index(1, 9)],
    "aten::index_put": lambda: table().index_put_((index(9),), torch.ones(3, device="tpu")),
    "aten::embedding": lambda: F.embedding(index(0, -1), table()),
    "aten::gather": lambda: table().gather(0, index(4, 0, 0).view(1, 3)),
    "aten::scatter": lambda: table().scatter_(0, index(0, 7, 0).view(1, 3), 1.0),
    "aten::scatter_add": lambda: table().scatter_add_(0, index(0, 7, 0).view(1, 3), torch.ones(1, 3, device="tpu")),
    "aten::index_select": lambda: table().index_select(0, index(5)),
    "aten::index_add": lambda: table().index_add_(0, index(5), torch.ones(1, 3, device="tpu")),
    "aten::index_copy": lambda: table().index_copy_(0, index(5), torch.ones(1, 3, device="tpu")),
    "aten::index_fill": lambda: table().index_fill_(0, index(5), 1.0),
    "aten::take": lambda: table().take(index(12)),
    "aten::nll_loss": lambda: F.nll_loss(table(), index(0, 1, 2, 3)),
}


ERRORS = dict.fromkeys(("aten::gather", "aten::scatter", "aten::scatter_add", "aten::index_add"), RuntimeError)


@pytest.mark.parametrize("op", BAD_INDICES)
def test_a_bad_index_is_raised_at_the_next_synchronisation_with_the_operators_name(op: str) -> None:
    BAD_INDICES[op]()
    with pytest.raises(ERRORS.get(op, IndexError), match=rf"(index out of range|out of bounds) in {op}.*Debug mode"):
        torch.tpu.synchronize()
    torch.tpu.synchronize()


@pytest.mark.parametrize("op", BAD_INDICES)
def test_a_bad_index_is_raised_at_its_line_in_debug_mode(op: str) -> None:
    with (
        torch.tpu.set_eager_mode(DEBUG),
        pytest.raises(ERRORS.get(op, IndexError), match=f"(index out of range|out of bounds) in {op}"),
    ):
        BAD_INDICES[op]()
    torch.tpu.synchronize()


# What the CPU raises at the line; the device's text begins with the CPU's.
BAD_VALUES = {
    "multinomial with a negative weight": lambda d: torch.multinomial(torch.tensor([1.0, -1.0], device=d), 1),
    "multinomial without weight": lambda d: torch.multinomial(torch.zeros(2, device=d), 1),
    "bernoulli": lambda d: torch.bernoulli(torch.tensor([0.5, 1.5], device=d)),
    "bernoulli_": lambda d: torch.zeros(2, device=d).bernoulli_(torch.tensor([0.5, float("nan")], device=d)),
    "normal": lambda d: torch.normal(0.0, torch.tensor([1.0, -1.0], device=d)),
    "poisson": lambda d: torch.poisson(torch.tensor([-1.0], device=d)),
    "binary_cross_entropy": lambda d: F.binary_cross_entropy(torch.tensor([2.0], device=d), torch.ones(1, device=d)),
    "multi_margin_loss": lambda d: F.multi_margin_loss(torch.ones(1, 3, device=d), torch.tensor([3], device=d)),
    "masked_scatter": lambda d: torch.ones(2, device=d).masked_scatter(
        torch.ones(2, dtype=torch.bool, device=d), torch.ones(1, device=d)
    ),
    "_assert_async": lambda d: torch._assert_async(torch.tensor(0.0, device=d)),
    "_assert_async with a text": lambda d: torch._assert_async(torch.tensor(False, device=d), "no more tokens"),
}


@pytest.mark.parametrize("name", BAD_VALUES)
def test_a_bad_value_is_raised_at_the_next_synchronisation_with_the_cpus_text(name: str) -> None:
    with pytest.raises(RuntimeError) as cpu:
        BAD_VALUES[name]("cpu")
    text = re.escape(str(cpu.value).partition(".  (Could")[0])
    BAD_VALUES[name]("tpu")
    with pytest.raises(RuntimeError, match=rf"^{text} in aten::.*Debug mode"):
        torch.tpu.synchronize()
    torch.tpu.synchronize()
    with torch.tpu.set_eager_mode(DEBUG), pytest.raises(RuntimeError, match=f"^{text}"):
        BAD_VALUES[name]("tpu")


def test_good_values_raise_nothing() -> None:
    torch._assert_async(torch.tensor(True, device="tpu"), "never")
    F.binary_cross_entropy(torch.tensor([0.0, 1.0], device="tpu"), torch.tensor([1.0, 0.0], device="tpu"))
    torch.bernoulli(torch.tensor([0.0, 1.0], device="tpu"))
    torch.tpu.synchronize()


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.cpu(),
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: print(x),
        lambda x: bool((x > 0).any()),
        lambda x: torch.accelerator.synchronize(),
        lambda x: torch.tpu.current_stream().synchronize(),
        lambda x: torch.equal(x, x),
    ],
)
def test_no_read_gets_past_a_bad_index(read) -> None:
    x = table()[index(4)]
    with pytest.raises(IndexError, match="aten::index.Tensor"):
        read(x)


def test_the_first_of_several_bad_indices_is_named_and_later_work_is_sound() -> None:
    table().gather(0, index(4, 0, 0).view(1, 3))
    table()[index(4)]
    with pytest.raises(RuntimeError, match="aten::gather"):
        torch.tpu.synchronize()
    assert table()[index(3, 0)].tolist() == [[9, 10, 11], [0, 1, 2]]
    table()[index(4)]
    with pytest.raises(IndexError, match="aten::index.Tensor"):
        torch.tpu.synchronize()


def test_negative_and_boundary_indices_are_good() -> None:
    x = table()
    assert x[index(-4, 3, -1)].tolist() == [[0, 1, 2], [9, 10, 11], [9, 10, 11]]
    assert x.take(index(-12, 11)).tolist() == [0, 11]
    assert x.index_select(0, index(3)).tolist() == [[9, 10, 11]]
    torch.tpu.synchronize()


def test_a_bad_index_on_one_thread_is_not_lost_by_work_on_another() -> None:
    good, stop = index(0, 1), threading.Event()
    table()[good]
    table()[index(4)]
    with pytest.raises(IndexError):
        torch.tpu.synchronize()

    def work() -> None:
        while not stop.is_set():
            table()[good]

    threads = [threading.Thread(target=work) for _ in range(2)]
    for t in threads:
        t.start()
    try:
        for _ in range(20):
            table()[index(4)]
            with pytest.raises(IndexError):
                torch.tpu.synchronize()
    finally:
        stop.set()
        for t in threads:
            t.join()


def test_the_mode_is_set_for_the_process_or_a_block() -> None:
    assert torch.tpu.eager_mode is STRICT
    torch.tpu.eager_mode = DEBUG
    assert torch.tpu.eager_mode is DEBUG
    with torch.tpu.set_eager_mode(STRICT):
        assert torch.tpu.eager_mode is STRICT
        with torch.tpu.set_eager_mode(DEBUG):
            assert torch.tpu.eager_mode is DEBUG
        assert torch.tpu.eager_mode is STRICT
    seen = []
    with torch.tpu.set_eager_mode(STRICT):
        thread = threading.Thread(target=lambda: seen.append(torch.tpu.eager_mode))
        thread.start()
        thread.join()
    assert seen == [DEBUG], "a block is one thread's, the attribute is the process's"


def test_a_block_is_left_by_an_exception_too() -> None:
    with pytest.raises(KeyError), torch.tpu.set_eager_mode(DEBUG):
        raise KeyError
    assert torch.tpu.eager_mode is STRICT


def test_a_mode_must_be_a_mode() -> None:
    with pytest.raises(ValueError, match=r"Expected a torch.tpu.EagerMode, got 'Debug'"):
        torch.tpu.eager_mode = "Debug"


def test_debug_mode_computes_the_same_numbers() -> None:
    def program() -> list[float]:
        torch.tpu.manual_seed(0)
        x = torch.rand(8, 8, device="tpu", requires_grad=True)
        F.dropout(x @ x.t(), 0.5).softmax(0).square().sum().backward()
        assert x.grad is not None
        return x.grad.flatten().tolist()

    strict = program()
    with torch.tpu.set_eager_mode(DEBUG):
        assert program() == strict


def test_environment_variables_choose_the_mode() -> None:
    code = "import torch; print(torch.tpu.eager_mode.name)"
    assert python(code).stdout.strip() == "DEFER_NEVER"
    for name in ("TORCH_TPU_LAUNCH_BLOCKING", "TPU_LAUNCH_BLOCKING"):
        done = python(
            f"""
            {code}
            torch.tpu.eager_mode = torch.tpu.EagerMode.DEFER_NEVER
            print(torch.tpu.eager_mode.name)
            """,
            **{name: "1"},
        )
        assert done.stdout.split() == ["DEFER_NEVER_AND_LAUNCH_BLOCKING", "DEFER_NEVER"]
    for name in ("TORCH_TPU_DEFER_AND_FUSE", "TPU_DEFER_AND_FUSE"):
        assert python(code, **{name: "1"}).stdout.strip() == "DEFER_AND_FUSE"
    done = python(code, TORCH_TPU_DEFER_AND_FUSE="1", TORCH_TPU_LAUNCH_BLOCKING="1")
    assert done.stdout.strip() == "DEFER_NEVER_AND_LAUNCH_BLOCKING"


def test_a_variable_that_makes_no_sense_is_refused_by_name() -> None:
    done = python("import torch", fails=True, TORCH_TPU_LAUNCH_BLOCKING="maybe")
    assert "The environment variable TORCH_TPU_LAUNCH_BLOCKING must be 0 or 1, got 'maybe'" in done.stderr
