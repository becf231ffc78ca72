"""What goes wrong in Fused mode, and threads and processes: errors name their operator, the rest is sound."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import python
from torch_tpu import _C
from torch_tpu.programs import options

EagerMode = torch.tpu.EagerMode


@pytest.fixture(autouse=True)
def fused() -> Iterator[None]:
    torch.tpu.synchronize()
    torch.tpu.eager_mode = EagerMode.DEFER_AND_FUSE
    yield
    torch.tpu.eager_mode = EagerMode.DEFER_NEVER
    torch.tpu.synchronize()


# ---- errors ---------------------------------------------------------------------------------------------------------
def test_bad_arguments_are_raised_at_the_line_that_records() -> None:
    x, y = torch.ones(3, device="tpu") + 1, torch.ones(4, device="tpu")
    with pytest.raises(RuntimeError, match=r"must match the size of tensor b \(4\)"):
        x + y
    assert x.tolist() == [2.0] * 3


def test_what_a_program_finds_in_its_data_is_raised_though_its_result_is_dropped() -> None:
    x = torch.arange(12.0, device="tpu").view(4, 3)
    x[torch.tensor([9], device="tpu")]
    y = x + 1
    with pytest.raises(IndexError, match=r"aten::index.Tensor"):
        torch.tpu.synchronize()
    assert y[0].tolist() == [1.0, 2.0, 3.0]
    torch._assert_async((y > 0).all())
    torch._assert_async((y > 5).all(), "all above five")
    with pytest.raises(RuntimeError, match="all above five"):
        y.cpu()


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plugin that compiles nothing with a tangent in it."""
    real = options.compile_text

    def compile_text(text: str, *rest: Any) -> Any:
        if "stablehlo.tan" in text and "stablehlo.tanh" not in text:
            raise _C.PjrtError("Compiling a program: no tangents today")
        return real(text, *rest)

    monkeypatch.setattr(options, "compile_text", compile_text)


def test_an_operator_that_cannot_be_compiled_is_named_with_its_line(refused: None) -> None:
    x = torch.full((11,), 0.5, device="tpu")
    before = x * 2
    bad = torch.tan(before)  # here
    after, other = bad + 1, before + 1
    where = rf'File ".*test_fused_errors.py", line {bad_line()}, in .*'
    with pytest.raises(RuntimeError, match=rf"aten::tan \({where}\) failed: .*no tangents"):
        other.cpu()
    assert before.tolist() == [1.0] * 11 and other.tolist() == [2.0] * 11
    for tensor in (bad, after):
        with pytest.raises(RuntimeError, match="aten::tan"):
            tensor.cpu()
        with pytest.raises(RuntimeError, match="aten::tan"):
            tensor + 1
    bad.copy_(other)
    assert bad.tolist() == [2.0] * 11


def bad_line() -> int:
    lines = Path(__file__).read_text().split("\n")
    return 1 + lines.index("    bad = torch.tan(before)  # here")


def test_a_graph_that_only_fails_as_a_whole_runs_operator_by_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    real = options.compile_text

    def compile_text(text: str, *rest: Any) -> Any:
        if "module @fused" in text:
            raise _C.PjrtError("Compiling a program: too large")
        return real(text, *rest)

    monkeypatch.setattr(options, "compile_text", compile_text)
    x = torch.full((13,), 0.5, device="tpu")
    for _ in range(2):
        y = (x * 2 + 1).sinh()
        torch.testing.assert_close(y.cpu(), torch.full((13,), 2.0).sinh())


def test_running_out_of_memory_is_raised_at_the_line() -> None:
    done = python(
        """
        import torch
        x = torch.ones(1 << 20, device="tpu")
        y = x + 1
        try:
            z = torch.cat([y] * 8)
        except torch.OutOfMemoryError as error:
            print("refused", y.sum().item())
        """,
        TORCH_TPU_DEFER_AND_FUSE="1",
        TORCH_TPU_PLATFORM="cpu",
        TORCH_TPU_CPU_DEVICE_BYTES=str(20 << 20),
    )
    assert done.stdout.split() == ["refused", str(float(2 << 20))]


# ---- threads and processes ------------------------------------------------------------------------------------------
def test_threads_record_into_one_graph() -> None:
    x, failures = torch.ones(16, device="tpu"), []

    def work(k: int) -> None:
        try:
            for i in range(30):
                y = x * k
                for _ in range(5):
                    y = y + 1
                if i % 7 == k % 7:
                    assert y.tolist() == [k + 5.0] * 16
            assert y.tolist() == [k + 5.0] * 16
        except BaseException as error:  # reported below
            failures.append(error)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(120)
    assert not failures and not any(t.is_alive() for t in threads)


def test_threads_that_read_what_another_is_running() -> None:
    x = torch.ones(64, device="tpu")
    for n in range(5):
        y = x
        for i in range(20 + n):
            y = y + i
        seen: list[float] = []
        threads = [threading.Thread(target=lambda: seen.append(y[0].item())) for _ in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(120)
        assert seen == [1.0 + sum(range(20 + n))] * 4


def test_a_process_ends_with_work_that_nobody_has_read() -> None:
    start = time.perf_counter()
    done = python(
        """
        import torch
        x = torch.ones(8, 8, device="tpu", requires_grad=True)
        y = (x @ x + 1).relu()
        y.sum().backward()
        print("end")
        """,
        TORCH_TPU_DEFER_AND_FUSE="1",
    )
    assert done.stdout.strip() == "end" and not done.stderr.strip() and time.perf_counter() - start < 100


def test_a_forked_child_gets_a_sentence_for_what_is_pending() -> None:
    done = python(
        """
        import os, torch
        x = torch.ones(3, device="tpu") + 1
        if os.fork() == 0:
            try:
                x.tolist()
            except RuntimeError as error:
                print("child:", str(error)[:37], flush=True)
            os._exit(0)
        os.wait()
        print("parent:", x.tolist())
        """,
        TORCH_TPU_DEFER_AND_FUSE="1",
    )
    assert done.stdout.split("\n")[:2] == ["child: Cannot re-initialize tpu in forked su", "parent: [2.0, 2.0, 2.0]"]


def test_the_second_process_loads_what_the_first_has_compiled(tmp_path: Any) -> None:
    code = """
        import torch
        x = torch.arange(6.0, device="tpu") * 3 + 1
        x.cos().cpu()
        s = torch.tpu.compile_stats()
        print(s["compiled"], s["loaded"], s["traced"])
        """
    environment = {"TORCH_TPU_DEFER_AND_FUSE": "1", "TORCH_TPU_CACHE_DIR": str(tmp_path)}
    assert python(code, **environment).stdout.split() == ["1", "0", "4"]
    assert python(code, **environment).stdout.split() == ["0", "1", "0"]
    strict = python(code.replace("s = ", "torch.tpu.synchronize(); s = "), TORCH_TPU_CACHE_DIR=str(tmp_path))
    assert strict.stdout.split() == ["4", "0", "0"]
