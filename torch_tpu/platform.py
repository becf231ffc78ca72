"""Which device platform this process uses: libtpu on a TPU machine, XLA's CPU plugin elsewhere, or a plugin by path."""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch_tpu import config

log = logging.getLogger("torch_tpu")

#: PCI device ids of Google's TPUs (vendor 0x1ae0) and the number of PyTorch devices per PCI function.
_TPU_PCI_IDS = {"0x005e": "v4", "0x0062": "v5p", "0x0063": "v5e", "0x006f": "v6e", "0x0076": "v7"}
_PCI = Path("/sys/bus/pci/devices")


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # the function vanished, or is not ours to read: not a TPU that we can use
        return ""


def scan_pci() -> list[str]:
    """Generations of the TPU chips of this machine, one entry per chip; empty without a TPU. Reads sysfs, nothing else."""
    if not _PCI.is_dir():
        return []
    functions: Iterator[Path] = _PCI.iterdir()
    return [_TPU_PCI_IDS[_read(f / "device")] for f in functions if _read(f / "vendor") == "0x1ae0" and _read(f / "device") in _TPU_PCI_IDS]


@functools.cache
def name() -> str:
    """``cpu``, ``tpu`` or a plugin's path."""
    chosen = config.get("TORCH_TPU_PLATFORM")
    if chosen:
        return str(chosen)
    return "tpu" if scan_pci() else "cpu"


def _package_file(package: str, file: str, install: str) -> str:
    spec = importlib.util.find_spec(package)
    folders = list(spec.submodule_search_locations or []) if spec is not None else []
    for folder in folders:
        path = Path(folder) / file
        if path.exists():
            return str(path)
    raise RuntimeError(f"The package {package.split('.')[0]}, which carries {file}, is not installed: {install}.")


def plugin_path(platform: str | None = None) -> str:
    """The PJRT plugin's file for ``platform`` (default: the chosen one).

    Raises:
        RuntimeError: The plugin is not installed, or ``TORCH_TPU_PLATFORM`` names no file.
    """
    platform = platform or name()
    if platform == "cpu":
        return _package_file("xla_plugins.xla_cpu_pjrt", "xla_cpu_pjrt.so", "run `pip install xla-cpu-pjrt==0.0.1`")
    if platform == "tpu":
        path = config.get("TPU_LIBRARY_PATH")
        return str(path) if path else _package_file("libtpu", "libtpu.so", "run `pip install torch_tpu[tpu]`")
    if not Path(platform).is_file():
        raise RuntimeError(
            f"TORCH_TPU_PLATFORM is {platform!r}: it must be 'cpu', 'tpu', or the path of a PJRT plugin, and there is no such file."
        )
    return platform


def host_memory() -> int:
    """Bytes of memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def device_count() -> int:
    """Devices that this process will have, without starting the platform."""
    if name() == "cpu":
        return int(config.get("TORCH_TPU_NUM_CPU_DEVICES"))
    if name() == "tpu":
        return len(scan_pci())
    return 1


def resolve() -> tuple[str, str, dict[str, Any], int]:
    """(name, plugin path, client options, bytes per device where the plugin does not say); called once, at first use."""
    platform = name()
    path = plugin_path()
    options: dict[str, Any] = {}
    capacity = 0
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")  # the plugin's own informational lines
    if platform == "cpu":
        count = int(config.get("TORCH_TPU_NUM_CPU_DEVICES"))
        if count < 1:
            raise ValueError(f"TORCH_TPU_NUM_CPU_DEVICES must be at least 1, got {count}.")
        options["cpu_device_count"] = count
        capacity = int(config.get("TORCH_TPU_CPU_DEVICE_BYTES")) or host_memory()
        if not config.get("TORCH_TPU_QUIET"):
            log.warning("torch_tpu: no TPU in use; device 'tpu' runs on XLA's CPU backend with the TPU's numerics.")
    return platform, path, options, capacity


def emulates_precision() -> bool:
    """True where the matrix unit's float32 passes are reproduced in software: everywhere but on a TPU."""
    return name() != "tpu"
