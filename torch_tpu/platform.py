"""Which device platform this process uses: libtpu on a TPU machine, XLA's CPU plugin elsewhere, or a plugin by path."""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
from pathlib import Path
from typing import Any

from torch_tpu import config

log = logging.getLogger("torch_tpu")

#: PCI device ids of Google's TPUs (vendor 0x1ae0).
_TPU_PCI_IDS = {"0x005e": "v4", "0x0062": "v5p", "0x0063": "v5e", "0x006f": "v6e", "0x0076": "v7"}
_DEVICES_PER_CHIP = {"v7": 2}  # one on the other generations
_PCI = Path("/sys/bus/pci/devices")
_DEV = Path("/dev")


# ---- the machine ----------------------------------------------------------------------------------------------------
def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # the function vanished, or is not ours to read: not a TPU that we can use
        return ""


def scan_pci() -> list[str]:
    """Generations of the TPU chips of this machine, one entry per chip; empty without a TPU. Reads only sysfs."""
    if not _PCI.is_dir():
        return []
    ids = [_read(f / "device") for f in sorted(_PCI.iterdir()) if _read(f / "vendor") == "0x1ae0"]
    return [_TPU_PCI_IDS[i] for i in ids if i in _TPU_PCI_IDS]


def has_tpu() -> bool:
    """True if this machine shows any sign of a TPU: a known PCI id, or the device file of Google's driver."""
    return bool(scan_pci()) or any(_DEV.glob("accel[0-9]*"))


def _visible_chips() -> int | None:
    """How many chips the launcher left to this process; None means all."""
    for variable in ("TPU_VISIBLE_CHIPS", "TPU_VISIBLE_DEVICES"):
        if chosen := os.environ.get(variable):
            return len(chosen.split(","))
    return None


def host_memory() -> int:
    """Bytes of memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


# ---- the choice -----------------------------------------------------------------------------------------------------
@functools.cache
def choice() -> tuple[str, str]:
    """(platform, why): the platform is ``cpu``, ``tpu`` or a plugin's path."""
    chosen = str(config.get("TORCH_TPU_PLATFORM")).strip()
    if chosen:
        return (chosen.lower() if chosen.lower() in ("cpu", "tpu") else chosen), f"TORCH_TPU_PLATFORM is {chosen!r}"
    chips = scan_pci()
    if chips:
        return "tpu", f"this machine has {len(chips)} TPU {chips[0]} chip(s)"
    return "cpu", "this machine has no TPU (by its PCI devices), and TORCH_TPU_PLATFORM is not set"


def name() -> str:
    """``cpu``, ``tpu`` or a plugin's path."""
    return choice()[0]


@functools.cache
def kind() -> str:
    """What the started platform is, whatever its path: ``cpu``, ``tpu``, or the plugin's own name."""
    from torch_tpu import _C

    return name() if name() in ("cpu", "tpu") else str(_C._platform_info()["platform"]).lower()


def _installed(package: str, file: str) -> str | None:
    """The path of ``file`` in an installed package. The package is not imported, only its parents are."""
    try:
        spec = importlib.util.find_spec(package)
    except ModuleNotFoundError:  # the parent package is missing
        return None
    folders = list(spec.submodule_search_locations or []) if spec is not None else []
    return next((str(path) for folder in folders if (path := Path(folder) / file).is_file()), None)


def plugin_path(platform: str | None = None) -> str:
    """The PJRT plugin's file for ``platform`` (default: the chosen one).

    Raises:
        RuntimeError: The plugin is not installed, or a variable names a file that does not exist.
    """
    platform = platform or name()
    if platform == "cpu":
        if path := _installed("xla_plugins.xla_cpu_pjrt", "xla_cpu_pjrt.so"):
            return path
        raise RuntimeError(
            "The package xla-cpu-pjrt, which carries XLA's CPU plugin, is not installed: run "
            "`pip install xla-cpu-pjrt==0.0.1`."
        )
    if platform == "tpu":
        path = str(config.get("TPU_LIBRARY_PATH"))
        if path and not Path(path).is_file():
            raise RuntimeError(
                f"TPU_LIBRARY_PATH is {path!r}, and there is no such file: give the path of a libtpu.so, or unset it."
            )
        if path := path or _installed("libtpu", "libtpu.so") or "":
            return path
        raise RuntimeError(
            f"The platform is tpu because {choice()[1]}, but the package libtpu is not installed: run "
            f"`pip install torch_tpu[tpu]`, or set TORCH_TPU_PLATFORM=cpu."
        )
    if not Path(platform).is_file():
        raise RuntimeError(
            f"TORCH_TPU_PLATFORM is {platform!r}: it must be 'cpu', 'tpu', or the path of a PJRT plugin, and there "
            f"is no "
            f"such file."
        )
    return platform


@functools.cache
def device_count() -> int:
    """Devices that this process will have, without starting the platform; 0 if the platform has no plugin.

    A plugin given by its path is asked only when it is started; until then it counts as one device.
    """
    try:
        plugin_path()
    except RuntimeError:  # the first use of the device raises it
        return 0
    if name() == "cpu":
        return int(config.get("TORCH_TPU_NUM_CPU_DEVICES"))
    if name() == "tpu":
        chips = scan_pci()
        visible = _visible_chips()
        return sum(_DEVICES_PER_CHIP.get(c, 1) for c in chips[:visible])
    return 1


# ---- the start ------------------------------------------------------------------------------------------------------
def prepare_libtpu() -> None:
    """Keeps libtpu from asking a metadata server that is not there, which takes it eight minutes.

    On a machine with a TPU nothing is changed. Without one (ahead-of-time compilation, or a mistake) any valid
    description of a slice will do, and what the user has set stays.
    """
    if not has_tpu():
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
        os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
        os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")


def share_processors() -> None:
    """Gives this process its share of the machine where ``torchrun`` has started several.

    XLA's CPU backend makes a thread for each processor that ``NPROC`` tells (default: all), and the processes' threads
    would wait for each other in the middle of each operator. What the user has set stays.
    """
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    if local.isdigit() and int(local) > 1:
        os.environ.setdefault("NPROC", str(max(len(os.sched_getaffinity(0)) // int(local), 1)))


def resolve() -> tuple[str, str, dict[str, Any], int]:
    """(name, plugin path, client options, bytes per device if the plugin does not say); called once, at first use."""
    platform = name()
    path = plugin_path()
    options: dict[str, Any] = {}
    capacity = 0
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")  # the plugin's own informational lines
    if platform == "tpu" or Path(path).name == "libtpu.so":
        prepare_libtpu()
    if platform == "cpu":
        count = int(config.get("TORCH_TPU_NUM_CPU_DEVICES"))
        if count < 1:
            raise ValueError(f"TORCH_TPU_NUM_CPU_DEVICES must be at least 1, got {count}.")
        options["cpu_device_count"] = count
        share_processors()
        capacity = int(config.get("TORCH_TPU_CPU_DEVICE_BYTES")) or host_memory()
        if not config.get("TORCH_TPU_QUIET"):
            log.warning("torch_tpu: no TPU in use; device 'tpu' runs on XLA's CPU backend with the TPU's numerics.")
    return platform, path, options, capacity


def emulates_precision() -> bool:
    """True where the matrix unit's float32 passes are reproduced in software: everywhere but on a TPU."""
    return kind() != "tpu"
