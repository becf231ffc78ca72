"""The module that becomes ``torch.tpu``: devices, streams, random state, precision, eager modes, statistics.

The generic calls (``torch.accelerator``) work too; these are the same things under the device's own name.
"""

from __future__ import annotations

import enum
import sys
import types
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from torch_tpu import _C, config, platform
from torch_tpu import compiler as compiler
from torch_tpu import distributed as distributed
from torch_tpu import dynamism as dynamism
from torch_tpu.bounded import changes
from torch_tpu.programs import fused
from torch_tpu.programs.options import (
    allow_excess_precision as excess_precision_allowed,
)
from torch_tpu.programs.options import (
    set_allow_excess_precision as set_excess_precision,
)
from torch_tpu.programs.stats import compile_stats
from torch_tpu.programs.stats import reset as reset_compile_stats

_Device = torch.device | str | int | None


def _index(device: _Device) -> int:
    """The device's index; None means the current one.

    Raises:
        ValueError: ``device`` is not a tpu device.
    """
    if device is None:
        return current_device()
    if isinstance(device, int):
        return device if device >= 0 else current_device()
    device = torch.device(device)
    if device.type != "tpu":
        raise ValueError(f"Expected a tpu device, got {device}.")
    return current_device() if device.index is None else device.index


def _known(device: _Device) -> int:
    """As :func:`_index`, for a device of this process.

    Raises:
        RuntimeError: There is no such device.
    """
    index = _index(device)
    if index >= device_count():
        raise RuntimeError(f"invalid device ordinal: tpu:{index} of {device_count()} tpu device(s).")
    return index


# ---- devices --------------------------------------------------------------------------------------------------------
def is_available() -> bool:
    """True if there is a device to use: a TPU, or the CPU platform. Starts nothing."""
    return device_count() > 0


def is_initialized() -> bool:
    """True once the platform has been started by a first use."""
    return _C._is_initialized() and not _C._is_in_bad_fork()


def init() -> None:
    """Starts the platform now instead of on first use.

    Raises:
        RuntimeError: The platform cannot be used; the message says why.
    """
    _C._init()


def _lazy_init() -> None:
    """PyTorch calls this before all that names the device. What needs the platform starts it itself; much does not."""


def _is_in_bad_fork() -> bool:
    return _C._is_in_bad_fork()


def device_count() -> int:
    """Devices of this process. Starts nothing."""
    return _C._device_count()


def current_device() -> int:
    """The index of the calling thread's current device."""
    return _C._current_device()


def set_device(device: _Device) -> None:
    """Makes ``device`` the calling thread's current device."""
    _C._exchange_device(_index(device))


class device:
    """Context manager that changes the current device; None or a negative index changes nothing."""

    def __init__(self, device: _Device) -> None:
        self.idx = -1 if device is None else _index(device)
        self.prev_idx = -1

    def __enter__(self) -> None:
        self.prev_idx = _C._exchange_device(self.idx)

    def __exit__(self, *_: Any) -> None:
        _C._exchange_device(self.prev_idx)


class device_of(device):
    """As :class:`device`, with the device of a tensor or storage; others change nothing."""

    def __init__(self, obj: Any) -> None:
        super().__init__(obj.device if obj.device.type == "tpu" else None)


def _exchange_device(index: int) -> int:
    return _C._exchange_device(index)


_maybe_exchange_device = _exchange_device


def get_device_name(device: _Device = None) -> str:
    """What the device is: ``TPU v6 lite``, or ``TPU (emulated on cpu)`` on the CPU platform."""
    kind = _C._platform_info()["device_kinds"][_known(device)]
    return kind if "TPU" in kind else f"TPU (emulated on {kind})"


class _DeviceProperties:
    """Properties of a device.

    Attributes:
        name: As :func:`get_device_name`.
        total_memory: Bytes.
        multi_processor_count: 1.
    """

    def __init__(self, name: str, total_memory: int) -> None:
        self.name = name
        self.total_memory = total_memory
        self.multi_processor_count = 1

    def __repr__(self) -> str:
        return (
            f"_DeviceProperties(name={self.name!r}, total_memory={self.total_memory >> 20}MB, multi_processor_count=1)"
        )


def get_device_properties(device: _Device = None) -> _DeviceProperties:
    """Name, memory in bytes and processor count of a device."""
    return _DeviceProperties(get_device_name(device), _C._capacity(_index(device)))


def get_device_capability(device: _Device = None) -> tuple[int, int]:
    """Always (0, 0): TPUs have no compute capability number."""
    _known(device)
    return 0, 0


def synchronize(device: _Device = None) -> None:
    """Waits for all work of the device.

    Raises:
        IndexError, RuntimeError: An operator met an index out of range, or a value that it refuses, since the last
            synchronisation.
    """
    _C._synchronize(_known(device))


# ---- memory ---------------------------------------------------------------------------------------------------------
def empty_cache() -> None:
    """Drops cached copies of scalars; storages are freed as soon as their last tensor goes."""
    torch.accelerator.empty_cache()


def memory_allocated(device: _Device = None) -> int:
    """Bytes of live storages."""
    index = _known(device)
    return torch.accelerator.memory_allocated(index) if is_initialized() else 0


def max_memory_allocated(device: _Device = None) -> int:
    """The most bytes that were live at once since the start or :func:`reset_peak_memory_stats`."""
    index = _known(device)
    return torch.accelerator.max_memory_allocated(index) if is_initialized() else 0


memory_reserved = memory_allocated
max_memory_reserved = max_memory_allocated


def reset_peak_memory_stats(device: _Device = None) -> None:
    """Restarts the peaks at the present values."""
    init()
    torch.accelerator.reset_peak_memory_stats(_known(device))


def memory_stats(device: _Device = None) -> dict[str, Any]:
    """All counters, by the names of ``torch.accelerator.memory_stats``."""
    index = _known(device)
    return dict(torch.accelerator.memory_stats(index)) if is_initialized() else {}


def mem_get_info(device: _Device = None) -> tuple[int, int]:
    """(free, total) bytes of the device."""
    init()
    return torch.accelerator.get_memory_info(_known(device))


# ---- streams and events ---------------------------------------------------------------------------------------------
class _OfTheDevice(type):
    """Makes instances of the generic class, and counts those of the device as its own.

    PyTorch's methods check for the exact classes ``torch.Stream`` and ``torch.Event``.
    """

    def __instancecheck__(cls, instance: Any) -> bool:
        generic: Any = cls.__base__
        return isinstance(instance, generic) and instance.device.type == "tpu"


class Stream(torch.Stream, metaclass=_OfTheDevice):
    """The device's compute stream. There is one; every Stream object names it."""

    def __new__(cls, device: _Device = None, priority: int = 0, **kwargs: Any) -> torch.Stream:  # type: ignore[misc]
        if "stream_id" in kwargs:
            return torch.Stream(priority=priority, **kwargs)
        return torch.Stream(device=torch.device("tpu", _known(device)), priority=priority)


class Event(torch.Event, metaclass=_OfTheDevice):
    """A point of the stream, with the time at which all work before it had finished."""

    def __new__(  # type: ignore[misc]
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> torch.Event:
        if interprocess:
            raise NotImplementedError("tpu events cannot be shared between processes.")
        return torch.Event(device="tpu", enable_timing=enable_timing, blocking=blocking)


def current_stream(device: _Device = None) -> torch.Stream:
    """The compute stream of the device."""
    return torch.accelerator.current_stream(_known(device))


def default_stream(device: _Device = None) -> torch.Stream:
    """The compute stream of the device."""
    return current_stream(device)


def set_stream(stream: torch.Stream) -> None:
    """Makes ``stream``'s device current; there is one stream per device."""
    torch.accelerator.set_stream(stream)


@contextmanager
def stream(stream: torch.Stream | None) -> Iterator[None]:
    """Runs a block on ``stream``; with one stream per device it changes the current device only."""
    with device(None if stream is None else stream.device):
        yield


# ---- random numbers -------------------------------------------------------------------------------------------------
class _Generators:
    """The devices' default generators, by index."""

    def __getitem__(self, index: int) -> torch.Generator:
        if not 0 <= index < device_count():
            raise IndexError(f"There are {device_count()} tpu devices, so no default generator {index}.")
        return _C._default_generator(index)

    def __len__(self) -> int:
        return device_count()


default_generators = _Generators()


def manual_seed(seed: int) -> None:
    """Seeds the current device's generator. Starts nothing."""
    if is_available():
        default_generators[current_device()].manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    """Seeds the generators of all devices. Starts nothing."""
    for i in range(device_count()):
        default_generators[i].manual_seed(int(seed))


def seed() -> None:
    """Seeds the current device's generator from the machine's entropy."""
    default_generators[current_device()].seed()


def seed_all() -> None:
    """Gives all devices one seed from the machine's entropy."""
    seed()
    manual_seed_all(initial_seed())


def initial_seed() -> int:
    """The seed of the current device's generator."""
    return default_generators[current_device()].initial_seed()


def get_rng_state(device: _Device = None) -> torch.Tensor:
    """The generator's state: 16 bytes, seed and offset (``torch.uint8``, shape [16])."""
    return default_generators[_index(device)].get_state()


def set_rng_state(new_state: torch.Tensor, device: _Device = None) -> None:
    """Restores a state of :func:`get_rng_state`."""
    default_generators[_index(device)].set_state(new_state)


def get_rng_state_all() -> list[torch.Tensor]:
    """The states of all devices' generators."""
    return [get_rng_state(i) for i in range(device_count())]


def set_rng_state_all(new_states: list[torch.Tensor]) -> None:
    """Restores states of :func:`get_rng_state_all`."""
    for i, state in enumerate(new_states):
        set_rng_state(state, i)


# ---- precision ------------------------------------------------------------------------------------------------------
class Precision(enum.Enum):
    """Precision of float32 matrix products: one, three or six BF16 passes."""

    DEFAULT = 0
    HIGH = 1
    HIGHEST = 2


def precision(level: Precision) -> AbstractContextManager[None]:
    """Runs a block with another precision, whatever ``torch.set_float32_matmul_precision`` says.

    Inside of a compiled function it marks the block's operators and breaks no graph. Backward passes are outside of
    it, as in eager mode, unless ``backward()`` is called inside.

    Raises:
        ValueError: ``level`` is not a :class:`Precision`.
    """
    if not isinstance(level, Precision):
        raise ValueError(f"Expected a torch.tpu.Precision (DEFAULT, HIGH or HIGHEST), got {level!r}.")
    if torch.compiler.is_dynamo_compiling():
        return torch.fx.traceback.annotate({"torch_tpu.precision": _PRECISION_NAMES[level.value]})
    return _scoped_precision(level)


_PRECISION_NAMES = ("medium", "high", "highest")


@contextmanager
def _scoped_precision(level: Precision) -> Iterator[None]:
    previous = _C._exchange_scoped_precision(level.value)
    try:
        yield
    finally:
        _C._exchange_scoped_precision(previous)


def is_bf16_supported(including_emulation: bool = True) -> bool:
    """Always True: bfloat16 is the matrix unit's own input type; the CPU platform computes with the same rounding."""
    return including_emulation or platform.name() != "cpu"


def get_amp_supported_dtype() -> list[torch.dtype]:
    """The dtypes that ``torch.autocast("tpu")`` accepts; the first is the default."""
    return [torch.bfloat16, torch.float16]


# ---- eager modes ----------------------------------------------------------------------------------------------------
class EagerMode(enum.Enum):
    """How operators run outside ``torch.compile``.

    ``DEFER_NEVER`` (Strict, the default) runs each operator asynchronously as its own program;
    ``DEFER_NEVER_AND_LAUNCH_BLOCKING`` (Debug) also waits for each and raises at its line; ``DEFER_AND_FUSE`` (Fused)
    records operators, and when a value is read, the device is synchronised, an optimizer has made its step, or
    ``TORCH_TPU_FUSE_LIMIT`` operators have been recorded, runs what of them is needed as one program.
    """

    DEFER_NEVER = 0
    DEFER_NEVER_AND_LAUNCH_BLOCKING = 1
    DEFER_AND_FUSE = 2


def _mode_number(mode: EagerMode) -> int:
    if not isinstance(mode, EagerMode):
        raise ValueError(f"Expected a torch.tpu.EagerMode, got {mode!r}.")
    if mode is EagerMode.DEFER_AND_FUSE:
        fused.install()
    return mode.value


@contextmanager
def set_eager_mode(mode: EagerMode) -> Iterator[None]:
    """Runs a block of this thread in another eager mode. What a Fused block has recorded runs at its end.

    Raises:
        RuntimeError: It is called inside of a compiled function, whose operators have no eager mode.
    """
    if torch.compiler.is_compiling():
        raise RuntimeError("The eager mode cannot change inside of a compiled function.")
    previous = _C._exchange_scoped_mode(_mode_number(mode))
    try:
        yield
    except BaseException:
        _C._exchange_scoped_mode(previous)
        raise
    _C._exchange_scoped_mode(previous)
    if mode is EagerMode.DEFER_AND_FUSE:
        _C._flush()


class _Module(types.ModuleType):
    """Gives the module its properties."""

    @property
    def _initialized(self) -> bool:
        """What ``torch.utils.checkpoint`` asks before it saves random state."""
        return is_initialized()

    @property
    def eager_mode(self) -> EagerMode:
        """The eager mode in force on this thread; assigning sets it for the process."""
        return EagerMode(_C._mode())

    @eager_mode.setter
    def eager_mode(self, mode: EagerMode) -> None:
        leaves = self.eager_mode is EagerMode.DEFER_AND_FUSE
        _C._set_mode(_mode_number(mode))
        if leaves:
            _C._flush()

    @property
    def allow_excess_precision(self) -> bool:
        """Whether XLA may keep intermediate results in a wider dtype than the program says; False by default."""
        return excess_precision_allowed()

    @allow_excess_precision.setter
    def allow_excess_precision(self, allowed: bool) -> None:
        set_excess_precision(allowed)


sys.modules[__name__].__class__ = _Module


# ---- names of TorchTPU that its users call, though they are private -------------------------------------------------
def _get_cache_stats() -> dict[str, Any]:
    return compile_stats()


def _get_cache_requests() -> int:
    stats = _C._table_stats()
    return stats["hits"] + stats["misses"]


def _get_cache_hits() -> int:
    return _C._table_stats()["hits"]


def _get_cache_misses() -> int:
    return _C._table_stats()["misses"]


def _clear_cache() -> None:
    """Empties the memory table of programs; the disk cache stays (``python -m torch_tpu cache clear``)."""
    _C._clear_table()
    changes.clear()
    if (bounded := sys.modules.get("torch_tpu.bounded.eager")) is not None:
        bounded.clear()


def _hbm_usage_summary() -> str:
    """One line per device: bytes of live storages, their peak, and the device's memory."""
    init()
    lines = []
    for i in range(device_count()):
        used, peak, total = memory_allocated(i), max_memory_allocated(i), _C._capacity(i)
        lines.append(
            f"tpu:{i}: {used / 2**20:.1f} MiB in use, {peak / 2**20:.1f} MiB at most, of {total / 2**20:.1f} MiB"
        )
    return "\n".join(lines)


def _shutdown_runtime() -> None:
    """Waits for all work and lets go of the device, as at the interpreter's exit."""
    _C._shutdown()


def _apply_environment() -> None:
    """The knobs that environment variables set for the whole process."""
    if config.get("TORCH_TPU_LAUNCH_BLOCKING") or config.get("TPU_LAUNCH_BLOCKING"):
        _C._set_mode(EagerMode.DEFER_NEVER_AND_LAUNCH_BLOCKING.value)
    elif config.get("TORCH_TPU_DEFER_AND_FUSE") or config.get("TPU_DEFER_AND_FUSE"):
        _C._set_mode(_mode_number(EagerMode.DEFER_AND_FUSE))
    _C._set_fuse_limit(config.get("TORCH_TPU_FUSE_LIMIT"))
    _C._set_table_capacity(config.get("TORCH_TPU_MAX_PROGRAMS"))


__all__ = [
    "EagerMode", "Event", "Precision", "Stream", "compile_stats", "current_device", "current_stream",
    "default_generators", "default_stream", "device", "device_count", "device_of", "empty_cache",
    "get_amp_supported_dtype", "get_device_name", "get_device_properties", "get_rng_state", "get_rng_state_all",
    "init", "initial_seed", "is_available", "is_bf16_supported", "is_initialized", "manual_seed", "manual_seed_all",
    "max_memory_allocated", "mem_get_info", "memory_allocated", "memory_stats", "precision", "reset_compile_stats",
    "reset_peak_memory_stats", "seed", "seed_all", "set_device", "set_eager_mode", "set_rng_state",
    "set_rng_state_all", "set_stream", "stream", "synchronize",
]  # fmt: skip
