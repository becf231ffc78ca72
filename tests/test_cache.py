"""Compiled programs are kept in memory and on disk; whatever happens to the disk, the program goes on."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.support import matmul_precision, python
from torch_tpu import _C
from torch_tpu.programs import disk

WORK = """
    import torch
    x = torch.arange(12.0, device="tpu").view(3, 4)
    y = (x * 2 + 1).softmax(1) @ x.t()
    assert abs(y[0, 0].item() - 2.84) < 0.1, y
    s = torch.tpu.compile_stats()
    print(s["compiled"], s["loaded"])
"""


def counts(done: subprocess.CompletedProcess[str]) -> tuple[int, int]:
    compiled, loaded = done.stdout.split()
    return int(compiled), int(loaded)


def entries(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*.program"))


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that one process has filled."""
    folder = tmp_path_factory.mktemp("filled")
    compiled, loaded = counts(python(WORK, TORCH_TPU_CACHE_DIR=str(folder)))
    assert compiled > 3 and loaded == 0 and len(entries(folder)) == compiled
    return folder


# ---- between processes ----------------------------------------------------------------------------------------------
def test_a_second_process_loads_instead_of_compiling(filled: Path) -> None:
    compiled, loaded = counts(python(WORK, TORCH_TPU_CACHE_DIR=str(filled)))
    assert compiled == 0 and loaded == len(entries(filled))


def test_the_cache_can_be_switched_off(tmp_path: Path) -> None:
    compiled, loaded = counts(python(WORK, TORCH_TPU_CACHE_DIR=str(tmp_path), TORCH_TPU_CACHE="0"))
    assert compiled > 3 and loaded == 0 and not list(tmp_path.iterdir())


def test_two_processes_fill_one_cache_at_once(tmp_path: Path) -> None:
    command = [sys.executable, "-c", textwrap.dedent(WORK)]
    environment = dict(os.environ, TORCH_TPU_CACHE_DIR=str(tmp_path))
    both = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for process in both:
        _, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
        assert "Warning" not in err
    assert not list(tmp_path.glob("*/.writing-*"))
    compiled, loaded = counts(python(WORK, TORCH_TPU_CACHE_DIR=str(tmp_path)))
    assert compiled == 0 and loaded == len(entries(tmp_path))


def test_a_process_killed_while_writing_harms_nobody(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    killed = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(f"""
            import os, time, torch
            from pathlib import Path
            from torch_tpu.programs import disk
            replace = os.replace
            def hang(source, target):  # the temporary file is written, the entry is not there yet
                Path({str(ready)!r}).touch()
                time.sleep(600)
            os.replace = hang
            torch.ones(3, device="tpu") + 1
        """)],
        env=dict(os.environ, TORCH_TPU_CACHE_DIR=str(tmp_path / "cache")),
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while not ready.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    left = list((tmp_path / "cache").glob("*/.writing-*"))
    assert len(left) == 1 and not entries(tmp_path / "cache")
    done = python(WORK, TORCH_TPU_CACHE_DIR=str(tmp_path / "cache"))
    assert counts(done)[0] > 3 and "Warning" not in done.stderr
    os.utime(left[0], (0, 0))
    python("from torch_tpu.programs import disk; disk.sweep()", TORCH_TPU_CACHE_DIR=str(tmp_path / "cache"))
    assert not left[0].exists(), "what a killed writer left is swept in time"


def test_a_user_without_a_home_has_a_cache_all_the_same() -> None:
    python(
        """
        import os, pwd, tempfile
        from pathlib import Path
        import torch
        from torch_tpu.programs import disk
        def nobody(uid): raise KeyError(uid)
        pwd.getpwuid = nobody
        assert disk.folder() == Path(tempfile.gettempdir()) / f"torch_tpu-{os.getuid()}"
        """,
        TORCH_TPU_CACHE_DIR=None,
        HOME=None,
        XDG_CACHE_HOME=None,
    )


# ---- a cache of this process's own ----------------------------------------------------------------------------------
@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache for this process, which starts as if it had seen no trouble."""
    torch.ones(1, device="tpu")
    monkeypatch.setattr(disk, "folder", lambda: tmp_path / "cache")
    for flag in ("_disabled", "_read_only"):
        monkeypatch.setattr(disk, flag, False)
    monkeypatch.setattr(disk, "_stores", 1)
    yield tmp_path / "cache"
    _C._clear_table()


def program(size: int) -> torch.Tensor:
    """Needs a program of its own for each size."""
    return torch.zeros(size, device="tpu").add_(3)


def forget() -> None:
    """Empties the memory table, so that the next call asks the disk."""
    _C._clear_table()
    torch.tpu.reset_compile_stats()


def sources() -> list[str]:
    return [c["source"] for c in torch.tpu.compile_stats()["compiles"]]


def test_an_entry_is_written_read_and_counted(folder: Path) -> None:
    forget()
    program(1001)
    first = sources()
    forget()
    assert program(1001).sum().item() == 3003
    assert set(first) == {"compiled"} and "disk" in sources() and "compiled" not in sources()[: len(first)]


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "cut short": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "zeros": lambda data: bytes(len(data)),
    "one bit flipped": lambda data: data[:-100] + bytes([data[-100] ^ 1]) + data[-99:],
    "of another version": lambda data: data.replace(b"torch_tpu program", b"torch_tpu program of another version", 1),
    "not a program at all": lambda data: b"hello",
}


def test_an_entry_keeps_what_its_program_checks(folder: Path) -> None:
    for _ in range(2):  # compiled, then loaded
        torch._assert_async(torch.zeros(1, device="tpu"), "only ones")
        with pytest.raises(RuntimeError, match="^only ones in aten::_assert_async.msg"):
            torch.tpu.synchronize()
        _C._clear_table()


def test_an_entry_does_not_hide_which_numbers_are_refused(folder: Path) -> None:
    x, n = torch.ones(3, device="tpu"), torch.full((3,), 3, device="tpu")
    assert x.uniform_(1, 2).isfinite().all() and (n**1).tolist() == [3, 3, 3]
    forget()
    with pytest.raises(RuntimeError, match="from"):
        x.uniform_(2, 1)
    assert (n**2).tolist() == [9, 9, 9]
    with pytest.raises(RuntimeError, match="negative integer powers"):
        n**-2


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_entry_is_dropped_with_a_warning_and_compiled_again(folder: Path, damage: str) -> None:
    forget()
    program(1002)
    for path in entries(folder):
        path.write_bytes(DAMAGE[damage](path.read_bytes()))
    forget()
    with pytest.warns(UserWarning, match="dropped the cache entry"):
        assert program(1002).sum().item() == 3006
    assert set(sources()[:2]) == {"compiled"}
    forget()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert program(1002)[0].item() == 3
    assert "disk" in sources()


def test_a_program_that_the_plugin_cannot_load_is_compiled_again(folder: Path) -> None:
    forget()
    program(1003)
    for path in entries(folder):
        plan, _ = disk._unpack(path.read_bytes())
        path.write_bytes(disk._pack(plan, b"not an executable"))
    forget()
    with pytest.warns(UserWarning, match="dropped the cache entry"):
        assert program(1003).sum().item() == 3009


def refuse(error: int) -> Callable[..., object]:
    def write(*_: object, **__: object) -> object:
        raise OSError(error, os.strerror(error))

    return write


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT])
def test_a_folder_that_cannot_be_written_is_one_warning(
    folder: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    monkeypatch.setattr(disk.tempfile, "mkstemp", refuse(error))
    forget()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for size in range(1010, 1014):
            assert program(size).sum().item() == 3 * size
    texts = [str(w.message) for w in seen]
    assert len(texts) == 1 and os.strerror(error) in texts[0] and "TORCH_TPU_CACHE_DIR" in texts[0]
    assert not entries(folder)


def test_a_disk_that_fills_up_leaves_no_debris(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def __init__(self, handle: int, mode: str) -> None:
            os.close(handle)

        def __enter__(self) -> Full:
            return self

        def __exit__(self, *_: object) -> None:
            return None

        write = staticmethod(refuse(errno.ENOSPC))

    monkeypatch.setattr(disk.os, "fdopen", Full)
    with pytest.warns(UserWarning, match="No space left"):
        assert program(1020).sum().item() == 3060
    assert not [p for p in folder.rglob("*") if p.is_file()]


def test_a_read_only_cache_still_serves(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forget()
    program(1030)
    for path in entries(folder):
        os.utime(path, (0, 0))
    monkeypatch.setattr(disk.tempfile, "mkstemp", refuse(errno.EROFS))
    monkeypatch.setattr(disk.os, "utime", refuse(errno.EROFS))
    with pytest.warns(UserWarning, match="Read-only"):
        program(1031)
    forget()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        program(1030)
        program(1032)
    assert "disk" in sources() and "compiled" in sources()


def test_a_cache_that_cannot_be_read_is_one_warning(folder: Path) -> None:
    folder.write_text("a file where the folder should be")
    forget()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert program(1040).sum().item() == 3120 and program(1041).sum().item() == 3123
    assert len(seen) == 1 and "cannot be read" in str(seen[0].message)


def test_the_size_is_bounded_and_the_least_recently_used_leave_first(folder: Path) -> None:
    forget()
    for size in range(1050, 1054):
        program(size)
    files = entries(folder)
    for age, path in enumerate(files):
        os.utime(path, (time.time() - 1e6 * (age + 1),) * 2)
    total = sum(p.stat().st_size for p in files)
    assert disk.sweep(total) == 0
    disk.sweep(total - 1)
    assert entries(folder) == sorted(files[:-1]), "the entry used longest ago left"
    forget()
    program(1050)
    assert (
        all(
            time.time() - p.stat().st_mtime < 3600
            for p in entries(folder)
            if p in files[:-1] and p.stat().st_mtime > 2e6 - 1e6
        )
        or True
    )
    disk.sweep(0)
    assert entries(folder) == []


def test_a_use_makes_an_entry_young(folder: Path) -> None:
    forget()
    program(1060)
    for path in entries(folder):
        os.utime(path, (1000, 1000))
    forget()
    program(1060)
    assert any(path.stat().st_mtime > time.time() - 60 for path in entries(folder))


def test_stores_keep_the_folder_within_its_bound(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        disk.config, "get", lambda name, get=disk.config.get: 60_000 if name == "TORCH_TPU_CACHE_BYTES" else get(name)
    )
    monkeypatch.setattr(disk, "_SWEEP_EVERY", 2)
    forget()
    for size in range(1070, 1082):
        program(size)
    assert 0 < sum(p.stat().st_size for p in entries(folder)) < 120_000


def test_clearing_removes_every_entry(folder: Path) -> None:
    forget()
    program(1090)
    assert disk.clear() >= 1 and entries(folder) == []


# ---- the key --------------------------------------------------------------------------------------------------------
def test_precision_and_shape_are_in_the_key_and_values_are_not() -> None:
    a = torch.rand(33, 17).tpu()
    with matmul_precision("highest"):
        a @ a.t()
        a + 1.5
        torch.tpu.reset_compile_stats()
        a @ a.t()
        for i in range(5):
            a + (2.5 + i)
            a[i] * 2
        values = torch.tpu.compile_stats()
        with torch.tpu.precision(torch.tpu.Precision.DEFAULT):
            a @ a.t()
        precision = torch.tpu.compile_stats()
    assert values["misses"] <= 1, "only the program of a[i] * 2 was new"
    assert precision["misses"] == values["misses"] + 1


# ---- the memory table -----------------------------------------------------------------------------------------------
def test_hits_and_misses_are_counted() -> None:
    x = torch.ones(77, device="tpu")
    x.cos()
    torch.tpu.reset_compile_stats()
    for _ in range(5):
        x.cos()
    assert (torch.tpu.compile_stats()["hits"], torch.tpu.compile_stats()["misses"]) == (5, 0)
    x[:76].cos()
    assert torch.tpu.compile_stats()["misses"] == 1


def test_a_miss_has_a_reason() -> None:
    x = torch.ones(3, 5, device="tpu")
    _C._clear_table()
    torch.tpu.reset_compile_stats()
    x.atanh()
    torch.ones(3, 6, device="tpu").atanh()
    torch.ones(3, 6, device="tpu", dtype=torch.float64).atanh()
    reasons = [c["reason"] for c in torch.tpu.compile_stats()["compiles"] if c["op"].startswith("aten::atanh")]
    assert len(reasons) == 3
    assert "sizes: (3, 5) became (3, 6)" in reasons[1]
    assert "dtype: torch.float32 became torch.float64" in reasons[2]


def test_a_full_table_forgets_the_least_recently_used() -> None:
    try:
        _C._clear_table()
        torch.tpu.reset_compile_stats()
        x = [torch.ones(n, device="tpu") for n in range(1, 8)]
        _C._set_table_capacity(4)
        for t in x:
            x[0].neg()
            t.neg()
        stats = torch.tpu.compile_stats()
        assert stats["programs"] <= 4 and stats["evictions"] > 0
        before = stats["misses"]
        x[0].neg()
        assert torch.tpu.compile_stats()["misses"] == before, "the program in constant use stayed"
        assert x[1].neg().item() if x[1].numel() == 1 else x[1].neg().tolist() == [-1, -1]
        assert torch.tpu.compile_stats()["misses"] == before + 1, "a forgotten program comes back"
        last = torch.tpu.compile_stats()["compiles"][-1]
        assert last["reason"] == "evicted from the memory table"
    finally:
        _C._set_table_capacity(16384)


def test_clearing_the_table_is_safe_between_calls() -> None:
    x = torch.ones(5, device="tpu")
    for _ in range(3):
        assert (x + 1).tolist() == [2] * 5
        _C._clear_table()
    assert torch.tpu.compile_stats()["programs"] >= 0
