"""The disk cache: compiled programs of earlier processes, on by default.

An entry is one file, named by the hash of everything that decides its contents: the call, the rules' sources, the
plugin and its version. It is written to a temporary file and renamed, carries a checksum, and is dropped with a warning
if damaged. Several processes may share the folder. When it outgrows its bound, the entries read longest ago leave
first.
"""

from __future__ import annotations

import functools
import hashlib
import os
import pickle
import platform as host
import tempfile
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from torch_tpu import _C, config
from torch_tpu.lowering import registry
from torch_tpu.programs import options
from torch_tpu.stablehlo import Type
from torch_tpu.tracing.program import Operand, Output, Plan, Result, TensorArgument

_MAGIC = b"torch_tpu program 4\n"
_SUFFIX = ".program"
_SWEEP_EVERY = 256  # stores between checks of the folder's size

_lock = threading.Lock()
_stores = 0
_disabled = False  # neither read nor written any more
_read_only = False  # not written any more


def folder() -> Path:
    """``TORCH_TPU_CACHE_DIR``, else ``torch_tpu`` under the user's cache folder."""
    chosen = config.get("TORCH_TPU_CACHE_DIR")
    if chosen:
        return Path(chosen)
    caches = os.environ.get("XDG_CACHE_HOME")
    if caches:
        return Path(caches) / "torch_tpu"
    try:
        return Path.home() / ".cache" / "torch_tpu"
    except RuntimeError:  # a user without a home, as in some containers
        return Path(tempfile.gettempdir()) / f"torch_tpu-{os.getuid()}"


def enabled() -> bool:
    return bool(config.get("TORCH_TPU_CACHE")) and not _disabled


@functools.cache
def _foundation() -> bytes:
    """What all entries of this process depend on."""
    from torch_tpu import __version__

    info = _C._platform_info()
    xla = f"{os.environ.get('XLA_FLAGS', '')}|{os.environ.get('LIBTPU_INIT_ARGS', '')}"
    parts = [__version__, torch.__version__, info["platform"], info["version"], str(info["api"]), xla]
    parts += [_plugin_identity(info["plugin"]), *info["device_kinds"][:1], host.machine(), _cpu_features()]
    return "\0".join(parts).encode()


def _plugin_identity(path: str) -> str:
    stat = os.stat(path)
    return f"{stat.st_size}:{Path(path).name}"


def _cpu_features() -> str:
    """XLA's CPU programs are machine code for the host that compiled them."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return host.processor()
    return next((line for line in text.splitlines() if line.startswith("flags")), "")


def stable(item: Any) -> Any:
    """A call's description without what is an operand: offsets and numbers."""
    if isinstance(item, TensorArgument):
        return tuple("" if f == "offset" else v for f, v in zip(item._fields, item, strict=True))
    if isinstance(item, tuple) and hasattr(item, "_fields"):
        if "values" in item._fields:
            return (type(item).__name__, item[0], len(item[1]), _kind(item[1]))
        return (
            type(item).__name__,
            *(_kind(v) if f == "value" else v for f, v in zip(item._fields, item, strict=True)),
        )
    if isinstance(item, list):
        return [stable(x) for x in item]
    return (type(item).__name__, item)


def _kind(value: Any) -> str:
    return "/".join(sorted({type(v).__name__ for v in value})) if isinstance(value, list) else type(value).__name__


def key_of(name: str, description: list[Any], precision: str) -> str:
    """The entry's name for one call."""
    digest = hashlib.sha256(_foundation())
    digest.update(registry.fingerprint().encode())
    digest.update(repr((name, precision, options.identity(), [stable(x) for x in description])).encode())
    return digest.hexdigest()


def key_of_module(text: str) -> str:
    """The entry's name for a module that is compiled as it is."""
    digest = hashlib.sha256(_foundation())
    digest.update(f"{options.identity()}\0{text}".encode())
    return digest.hexdigest()


def _path(key: str) -> Path:
    return folder() / key[:2] / (key + _SUFFIX)


def pack_plan(plan: Plan) -> bytes:
    """A plan as bytes; it keeps its text."""
    from torch_tpu.programs.eager import CODE_OF_DTYPE as codes

    def result(r: Any) -> Any:
        if r is None or isinstance(r, int):
            return r
        if isinstance(r, list):
            return [result(x) for x in r]
        return (*r[:2], r.same, codes[r.dtype], r.sizes, r.strides, r.offset)

    return pickle.dumps(
        (
            plan.name,
            plan.text,
            [(o.kind, o.index, codes[o.dtype]) for o in plan.operands],
            [(o.slot, o.type.shape, codes[o.type.dtype]) for o in plan.outputs],
            [result(r) for r in plan.results],
            plan.resizes,
            plan.donations,
            plan.rng_used,
            plan.uses_precision,
            plan.brief,
            plan.faults,
            plan.largest_operand,
            plan.work,
        )
    )


def _pack(plan: bytes, executable: bytes) -> bytes:
    payload = pickle.dumps((plan, executable))
    return _MAGIC + hashlib.sha256(payload).digest() + payload


def _unpack(data: bytes) -> tuple[bytes, bytes]:
    """(packed plan, serialised executable) of an entry; the latter is empty where nobody has compiled the plan."""
    size = len(_MAGIC)
    if not data.startswith(_MAGIC):
        raise ValueError("it is not an entry of this version")
    if hashlib.sha256(data[size + 32 :]).digest() != data[size : size + 32]:
        raise ValueError("its checksum is wrong")
    plan, executable = pickle.loads(data[size + 32 :])
    return plan, executable


def unpack_plan(data: bytes) -> Plan:
    """The plan of :func:`pack_plan`."""
    from torch_tpu.programs.eager import DTYPE_OF_CODE as dtypes

    def result(r: Any) -> Any:
        if r is None or isinstance(r, int):
            return r
        if isinstance(r, list):
            return [result(x) for x in r]
        output, position, same, dtype, sizes, strides, offset = r
        return Result(output, position, same, dtypes[dtype], sizes, strides, offset)

    name, text, operands, outputs, results, *rest = pickle.loads(data)
    return Plan(
        name,
        text,
        [Operand(kind, index, dtypes[code]) for kind, index, code in operands],
        [Output(slot, Type(shape, dtypes[code])) for slot, shape, code in outputs],
        [result(r) for r in results],
        *rest,
    )


def load(key: str, *, executable: bool = True) -> tuple[Plan, Any] | None:
    """(plan, loaded executable) of an entry, or None. A damaged entry is removed with a warning.

    The executable is None if the entry has none, or if none is asked for.
    """
    if not enabled():
        return None
    path = _path(key)
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        _give_up(f"cannot be read ({error}); this process goes on without it")
        return None
    try:
        packed, code = _unpack(data)
        loaded = _C._load(code) if executable and code else None
        plan = unpack_plan(packed)
    except Exception as error:  # whatever is wrong with the entry, compiling again is right
        warnings.warn(f"torch_tpu: dropped the cache entry {path.name}: {error}.", stacklevel=2)
        _remove_if_possible(path)
        return None
    _touch(path)
    return plan, loaded


def store(key: str, plan: Plan, executable: Any | None) -> None:
    """Writes an entry, of a plan alone if there is no executable.

    A folder that cannot be written is a warning, once; its entries are still read.
    """
    global _stores
    if not enabled() or _read_only:
        return
    path = _path(key)
    try:
        data = _pack(pack_plan(plan), b"" if executable is None else executable.serialize())
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=".writing-", dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            os.replace(temporary, path)
        except BaseException:
            _remove(Path(temporary))
            raise
        with _lock:
            _stores += 1
            due = _stores % _SWEEP_EVERY == 1
        if due:
            sweep()
    except OSError as error:
        _give_up(f"cannot be written ({error}); this process adds nothing to it", reading=False)


def _give_up(what: str, *, reading: bool = True) -> None:
    """Stops using the cache, or only writing to it, with one warning however many threads find out."""
    global _disabled, _read_only
    with _lock:
        known = _disabled if reading else _disabled or _read_only
        _disabled, _read_only = _disabled or reading, True
    if not known:
        warnings.warn(
            f"torch_tpu: the program cache {folder()} {what}. Set TORCH_TPU_CACHE_DIR to a folder that you can write, "
            f"or TORCH_TPU_CACHE=0.",
            stacklevel=3,
        )


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)


def _remove_if_possible(path: Path) -> None:
    try:
        _remove(path)
    except OSError as error:
        _give_up(f"cannot be written ({error}); this process adds nothing to it", reading=False)


def _touch(path: Path) -> None:
    """The modification time is the time of the last use, to the hour."""
    try:
        if time.time() - path.stat().st_mtime > 3600:
            os.utime(path)
    except OSError:  # a read-only cache keeps the old time; another process may have removed the entry
        return


def entries() -> list[tuple[Path, int, float]]:
    """(path, bytes, time of last use) of every entry."""
    found = []
    for path in folder().glob(f"*/*{_SUFFIX}"):
        try:
            stat = path.stat()
        except FileNotFoundError:  # another process removed it
            continue
        found.append((path, stat.st_size, stat.st_mtime))
    return found


def operator_of(path: Path) -> str:
    """The operator of an entry, or what is wrong with it."""
    try:
        return unpack_plan(_unpack(path.read_bytes())[0]).name
    except Exception as error:  # whatever is wrong with the entry is the answer
        return f"damaged: {error}"


def sweep(limit: int | None = None) -> int:
    """Removes entries read longest ago until the folder is within ``limit`` bytes, and what killed writers left behind.

    Returns:
        The number of entries removed.
    """
    limit = int(config.get("TORCH_TPU_CACHE_BYTES")) if limit is None else limit
    for path in folder().glob("*/.writing-*"):
        try:
            if time.time() - path.stat().st_mtime > 3600:
                _remove(path)
        except FileNotFoundError:  # its writer finished or another process removed it
            continue
    found = sorted(entries(), key=lambda e: e[2])
    total, removed = sum(size for _, size, _ in found), 0
    for path, size, _ in found:
        if total <= limit:
            break
        _remove(path)
        total -= size
        removed += 1
    return removed


def clear() -> int:
    """Removes every entry; returns how many there were."""
    found = entries()
    for path, _, _ in found:
        _remove(path)
    return len(found)
