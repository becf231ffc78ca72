"""Which platform a process uses, and what it says when it cannot."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from tests.support import python
from torch_tpu import platform

USE = """
import torch
try:
    (torch.ones(2, device="tpu") + 1).cpu()
except Exception as error:
    print(f"{type(error).__name__}: {error}")
else:
    print("ran on", torch.tpu.get_device_name())
"""
NO_TPU = pytest.mark.skipif(platform.has_tpu(), reason="for machines without a TPU")


def first_use(**environment: str | None) -> str:
    return python(USE, **environment).stdout.strip()


# ---- the choice -----------------------------------------------------------------------------------------------------
@NO_TPU
def test_the_cpu_plugin_is_the_default_without_a_tpu() -> None:
    code = """
    import torch, torch_tpu
    torch.tpu.init()
    print(torch_tpu._C._platform_info()["name"], torch.tpu.get_device_name())
    """
    done = python(code, TORCH_TPU_PLATFORM=None, TORCH_TPU_QUIET=None)
    assert done.stdout.strip() == "cpu TPU (emulated on cpu)"
    assert done.stderr.count("\n") == 1 and "no TPU in use" in done.stderr  # one line says so


@pytest.mark.parametrize("name", ["cpu", "CPU"])
def test_the_cpu_plugin_by_name(name: str) -> None:
    assert first_use(TORCH_TPU_PLATFORM=name) == "ran on TPU (emulated on cpu)"


def test_a_plugin_by_path(tmp_path: Path) -> None:
    copy = tmp_path / "some_plugin.so"
    copy.symlink_to(platform.plugin_path("cpu"))
    assert first_use(TORCH_TPU_PLATFORM=str(copy)) == "ran on TPU (emulated on cpu)"


def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *devices: tuple[str, str]) -> None:
    """A machine with these PCI functions, (vendor, device) each."""
    for i, (vendor, device) in enumerate(devices):
        function = tmp_path / f"0000:00:{i:02x}.0"
        function.mkdir()
        (function / "vendor").write_text(vendor + "\n")
        (function / "device").write_text(device + "\n")
    monkeypatch.setattr(platform, "_PCI", tmp_path)
    monkeypatch.setattr(platform, "_DEV", tmp_path / "dev")
    monkeypatch.setattr(platform.config, "get", lambda name: platform.config.VARIABLES[name].read())
    for function in (platform.choice, platform.kind, platform.device_count):
        function.cache_clear()
        monkeypatch.setattr(platform, function.__name__, function.__wrapped__)


NIC, V5E, V7 = ("0x1ae0", "0x0042"), ("0x1ae0", "0x0063"), ("0x1ae0", "0x0076")


def test_a_tpu_is_found_by_its_pci_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_TPU_PLATFORM", raising=False)
    machine(tmp_path, monkeypatch, ("0x8086", "0x0063"), NIC, V5E, V5E)
    assert platform.scan_pci() == ["v5e", "v5e"] and platform.has_tpu()
    assert platform.choice() == ("tpu", "this machine has 2 TPU v5e chip(s)")


def test_a_network_card_of_google_is_no_tpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_TPU_PLATFORM", raising=False)
    machine(tmp_path, monkeypatch, NIC)
    assert platform.scan_pci() == [] and not platform.has_tpu() and platform.name() == "cpu"


def test_the_variable_beats_the_scan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(tmp_path, monkeypatch, V5E)
    monkeypatch.setenv("TORCH_TPU_PLATFORM", "cpu")
    assert platform.choice() == ("cpu", "TORCH_TPU_PLATFORM is 'cpu'")


@pytest.mark.parametrize(
    ("chips", "visible", "count"), [([V5E] * 4, None, 4), ([V5E] * 4, "2", 1), ([V7] * 4, None, 8)]
)
def test_devices_are_counted_without_starting(
    chips: list[tuple[str, str]], visible: str | None, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCH_TPU_PLATFORM", raising=False)
    monkeypatch.setenv("TPU_LIBRARY_PATH", __file__)  # any file: nothing loads it
    if visible:
        monkeypatch.setenv("TPU_VISIBLE_DEVICES", visible)
    machine(tmp_path, monkeypatch, *chips)
    assert platform.device_count() == count


def test_libtpu_keeps_its_metadata_on_a_machine_with_a_tpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    variables = ("TPU_SKIP_MDS_QUERY", "TPU_WORKER_HOSTNAMES", "TPU_ACCELERATOR_TYPE")
    for variable in variables:
        monkeypatch.delenv(variable, raising=False)
    machine(tmp_path, monkeypatch, V5E)
    platform.prepare_libtpu()
    assert not any(v in platform.os.environ for v in variables)


def test_libtpu_without_a_tpu_asks_no_metadata_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(tmp_path, monkeypatch)
    monkeypatch.setattr(platform.os, "environ", {"TPU_ACCELERATOR_TYPE": "v6e-8"})
    platform.prepare_libtpu()
    assert platform.os.environ == {
        "TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost", "TPU_ACCELERATOR_TYPE": "v6e-8",
    }  # fmt: skip


# ---- what can be wrong ----------------------------------------------------------------------------------------------
def sentence(said: str) -> str:
    """The message, which must be one line that ends as a sentence, without C++ noise."""
    assert "\n" not in said and re.search(r"[.)`]$", said) and "Exception raised from" not in said, said
    return said


def test_a_wrong_path(tmp_path: Path) -> None:
    said = sentence(first_use(TORCH_TPU_PLATFORM=str(tmp_path / "plugin.so")))
    assert said.startswith("RuntimeError: TORCH_TPU_PLATFORM is") and "there is no such file" in said
    assert "it must be 'cpu', 'tpu', or the path of a PJRT plugin" in said


def test_a_file_that_is_no_library(tmp_path: Path) -> None:
    text = tmp_path / "plugin.so"
    text.write_text("not a library")
    assert "cannot be loaded as a shared library" in sentence(first_use(TORCH_TPU_PLATFORM=str(text)))


def library(folder: Path, source: str) -> str:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    (folder / "plugin.cc").write_text(source)
    path = folder / "plugin.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(path), str(folder / "plugin.cc")], check=True)
    return str(path)


def test_a_library_that_is_no_plugin(tmp_path: Path) -> None:
    said = sentence(first_use(TORCH_TPU_PLATFORM=library(tmp_path, "int answer() { return 42; }")))
    assert "has no function GetPjrtApi, so it is not a PJRT plugin" in said


def test_a_plugin_of_another_api_major_version(tmp_path: Path) -> None:
    source = """
    #include <cstddef>
    struct Version { size_t size; void* extension; int major, minor; };  // the head of PJRT_Api (pjrt_c_api.h)
    struct Api { size_t size; void* extension; Version version; void* functions[200]; };
    static Api api = {sizeof(Api), nullptr, {sizeof(Version), nullptr, 9, 3}, {}};
    extern "C" const Api* GetPjrtApi() { return &api; }
    """
    said = sentence(first_use(TORCH_TPU_PLATFORM=library(tmp_path, source)))
    assert "speaks PJRT C API 9.3, and torch_tpu was built for 0." in said and "API major version 0" in said


def test_a_plugin_without_a_function_table(tmp_path: Path) -> None:
    said = sentence(
        first_use(TORCH_TPU_PLATFORM=library(tmp_path, 'extern "C" void* GetPjrtApi() { return nullptr; }'))
    )
    assert "GetPjrtApi returned null" in said


@pytest.mark.parametrize(
    ("name", "package", "advice"),
    [
        ("cpu", "xla_plugins", "run `pip install xla-cpu-pjrt==0.0.1`"),
        ("tpu", "libtpu", "run `pip install torch_tpu[tpu]`"),
    ],
)
def test_a_missing_plugin_package(name: str, package: str, advice: str) -> None:
    code = (
        f"import sys; sys.modules[{package!r}] = None\n"
        + USE
        + "print(torch.tpu.is_available(), torch.accelerator.device_count())"
    )
    said, available = python(code, TORCH_TPU_PLATFORM=name, TPU_LIBRARY_PATH=None).stdout.strip().splitlines()
    assert "is not installed" in sentence(said) and advice in said
    assert available == "False 0"


def test_a_libtpu_path_that_does_not_exist(tmp_path: Path) -> None:
    said = sentence(first_use(TORCH_TPU_PLATFORM="tpu", TPU_LIBRARY_PATH=str(tmp_path / "libtpu.so")))
    assert said.startswith("RuntimeError: TPU_LIBRARY_PATH is") and "there is no such file" in said


def test_a_count_of_devices_that_cannot_be() -> None:
    assert "TORCH_TPU_NUM_CPU_DEVICES must be at least 1, got 0" in first_use(
        TORCH_TPU_PLATFORM="cpu", TORCH_TPU_NUM_CPU_DEVICES="0"
    )


# libtpu on a machine without a TPU
LIBTPU = pytest.mark.skipif(platform._installed("libtpu", "libtpu.so") is None, reason="needs the package libtpu")
BARE = {
    "TPU_SKIP_MDS_QUERY": None,
    "TPU_WORKER_HOSTNAMES": None,
    "TPU_ACCELERATOR_TYPE": None,
    "TORCH_TPU_PLATFORM": "tpu",
}


@NO_TPU
@LIBTPU
def test_libtpu_without_a_tpu_says_so_and_soon() -> None:
    start = time.monotonic()
    said = sentence(first_use(**BARE))
    if "in use by another process" in said:
        pytest.skip("another process of this machine holds libtpu's lock")
    assert said.startswith("RuntimeError: libtpu found no TPU on this machine") and "TORCH_TPU_PLATFORM=cpu" in said
    assert (
        time.monotonic() - start < 120
    )  # a loaded machine; it takes three seconds, and eight minutes with metadata look-ups


@NO_TPU
@LIBTPU
def test_a_tpu_held_by_another_process() -> None:
    code = f"""
    import fcntl, os, subprocess, sys
    held = open("/tmp/libtpu_lockfile", "a+")
    try:
        fcntl.lockf(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        print(-1, "busy")
    else:
        print(os.getpid(), subprocess.run([sys.executable, "-c", {USE!r}], capture_output=True, text=True).stdout)
    """
    lock = Path("/tmp/libtpu_lockfile")
    there = lock.exists()
    try:
        pid, said = python(code, **BARE).stdout.strip().split(" ", 1)
    finally:
        if not there:
            lock.unlink(missing_ok=True)
    if said == "busy":
        pytest.skip("another process of this machine holds libtpu's lock")
    assert sentence(said).startswith(f"RuntimeError: The TPU of this machine is in use by another process (pid {pid})")


# ---- programs that never name tpu -----------------------------------------------------------------------------------
CPU_PROGRAM = """
import torch
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
torch.accelerator.is_available(); torch.accelerator.current_accelerator()
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.AdamW(model.parameters())
data = TensorDataset(torch.randn(32, 4), torch.randn(32, 2))
for x, y in DataLoader(data, batch_size=8, num_workers=1):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = torch.nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad(); loss.backward(); optimizer.step()
state = torch.get_rng_state(); torch.set_rng_state(state)
torch.save(model.state_dict(), "/dev/null")
import torch_tpu
assert not torch.tpu.is_initialized()
maps = open("/proc/self/maps").read()
assert "libtpu" not in maps and "xla_cpu_pjrt.so" not in maps, maps
print("done")
"""


@pytest.mark.parametrize("name", ["cpu", "tpu", "/nowhere/plugin.so"])
def test_a_program_that_never_names_tpu_loads_no_plugin(name: str) -> None:
    start = time.monotonic()
    done = python(CPU_PROGRAM, TORCH_TPU_PLATFORM=name, TORCH_TPU_QUIET=None)
    assert done.stdout.strip() == "done" and done.stderr == ""
    assert time.monotonic() - start < 120


def test_pinning_memory_for_nobody_loads_no_plugin() -> None:
    code = """
    import torch
    from torch.utils.data import DataLoader, TensorDataset
    for (x,) in DataLoader(TensorDataset(torch.randn(32, 4)), batch_size=8, pin_memory=True):
        assert x.is_pinned()
    assert not torch.tpu.is_initialized()
    """
    python(code, TORCH_TPU_PLATFORM="cpu")


def test_importing_changes_no_environment_variable() -> None:
    code = "import os; before = dict(os.environ); import torch, torch_tpu; print(before == dict(os.environ))"
    assert python(code, TORCH_TPU_PLATFORM="tpu", TORCHINDUCTOR_CACHE_DIR="/tmp").stdout.strip() == "True"
