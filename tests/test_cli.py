"""``python -m torch_tpu``: doctor and cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support import python
from torch_tpu.__main__ import main
from torch_tpu.cli import cache, doctor
from torch_tpu.programs import disk


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "torch_tpu", *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


# ---- doctor ---------------------------------------------------------------------------------------------------------
def test_doctor_finds_nothing_wrong_with_a_good_machine() -> None:
    done = run("doctor", TORCH_TPU_PLATFORM="cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    for part in ("platform", "versions", "plugins", "devices", "program cache", "environment", "Nothing is wrong."):
        assert part in done.stdout
    assert "TORCH_TPU_PLATFORM is 'cpu'" in done.stdout and "PJRT C API" in done.stdout
    assert "tpu:0" in done.stdout and "GiB" in done.stdout
    assert "xla_cpu_pjrt.so" in done.stdout
    assert done.stderr == ""


def test_doctor_says_plainly_that_there_is_no_tpu() -> None:
    from torch_tpu import platform

    if platform.has_tpu():
        pytest.skip("this machine has a TPU")
    done = run("doctor")
    assert "This machine has no TPU." in done.stdout and done.returncode == 0


def test_doctor_json_has_the_same_facts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report) == {
        "platform", "versions", "plugins", "devices", "cache", "environment", "problems", "notes",
    }  # fmt: skip
    assert report["platform"]["name"] == "cpu" and report["platform"]["api"].startswith("0.")
    assert report["devices"][0]["device"] == "tpu:0" and report["devices"][0]["memory"] > 1 << 28
    assert report["cache"]["writable"] is True and report["problems"] == []


def test_doctor_reports_a_platform_that_cannot_start() -> None:
    done = run("doctor", TORCH_TPU_PLATFORM="/nowhere/plugin.so")
    assert done.returncode == 1
    assert "PROBLEM: TORCH_TPU_PLATFORM is '/nowhere/plugin.so'" in done.stdout and "no such file" in done.stdout
    assert "Traceback" not in done.stderr


def test_doctor_reports_mistaken_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_TPU_PLATFROM", "cpu")
    monkeypatch.setenv("TORCH_TPU_CACHE", "perhaps")
    problems = doctor.examine()["problems"]
    assert any("no such variable. Did you mean TORCH_TPU_PLATFORM?" in p for p in problems)
    assert any("TORCH_TPU_CACHE must be 0 or 1, got 'perhaps'" in p for p in problems)


def test_doctor_reports_a_cache_folder_that_cannot_be_written(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    done = run("doctor", TORCH_TPU_CACHE_DIR=str(blocked / "cache"))
    assert done.returncode == 1
    assert "cannot be written: set TORCH_TPU_CACHE_DIR" in done.stdout


def test_doctor_reports_a_forgotten_pythonpath(tmp_path: Path) -> None:
    (tmp_path / "torch_tpu").mkdir()  # no package, but it would be one with an __init__.py
    code = "import sys; from torch_tpu.cli import doctor; print(*doctor.examine()['problems'])"
    done = python(code, PYTHONPATH=str(tmp_path))
    assert "unset PYTHONPATH" in done.stdout


# ---- cache ----------------------------------------------------------------------------------------------------------
@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The disk cache of this test, for commands that run in this process."""
    monkeypatch.setattr(disk, "folder", lambda: tmp_path / "cache")
    return tmp_path / "cache"


def test_cache_ls_stats_and_clear(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    python("import torch; (torch.ones(3, device='tpu') * 2).exp().sum().item()", TORCH_TPU_CACHE_DIR=str(folder))
    assert main(["cache", "ls"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("aten::exp ") and "KiB" in line and line.endswith(" s") for line in lines)
    assert main(["cache", "stats", "--json"]) == 0
    stats = json.loads(capsys.readouterr().out)
    assert stats["entries"] == len(lines) - 1 == sum(1 for _ in folder.rglob("*.program"))
    assert stats["bytes"] == sum(p.stat().st_size for p in folder.rglob("*.program"))
    assert stats["folder"] == str(folder) and stats["bound"] == 4 << 30 and stats["enabled"] is True
    assert main(["cache", "stats"]) == 0
    assert f"entries  {stats['entries']}" in capsys.readouterr().out
    assert main(["cache", "clear"]) == 0
    assert capsys.readouterr().out.startswith(f"removed {stats['entries']} programs")
    assert not list(folder.rglob("*.program"))


def test_cache_ls_shows_a_damaged_entry(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "ab").mkdir(parents=True)
    (folder / "ab" / "abcd.program").write_bytes(b"\0" * 100)
    assert main(["cache", "ls"]) == 0
    assert "damaged: it is not an entry of this version" in capsys.readouterr().out


def test_cache_of_a_folder_that_does_not_exist_is_empty(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "ls"]) == 0
    assert capsys.readouterr().out.startswith("0 programs")
    assert not folder.exists()


def test_the_cache_commands_start_no_platform(tmp_path: Path) -> None:
    done = run("cache", "stats", TORCH_TPU_PLATFORM="/nowhere/plugin.so", TORCH_TPU_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0 and "entries  0" in done.stdout


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (1536, "1.5 KiB"), (4 << 30, "4.0 GiB"), (1 << 50, "1024.0 TiB")],
)
def test_sizes_are_readable(count: int, text: str) -> None:
    assert cache.size(count) == text


def test_ages_are_readable() -> None:
    assert [cache._age(s) for s in (5, 90, 7200, 200000)] == ["5 s", "2 min", "2 h", "2 d"]
    assert cache._age(-time.time()) == "0 s"


# ---- usage ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["cashe"], "invalid choice: 'cashe'"),
        (["cache"], "the following arguments are required: ACTION"),
        (["cache", "list"], "invalid choice: 'list'"),
        (["doctor", "--jason"], "unrecognized arguments: --jason"),
    ],
)
def test_usage_errors(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert message in error and "usage: python -m torch_tpu" in error
