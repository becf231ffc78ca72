"""What was compiled, from where it came, how long it took, and why it was needed."""

from __future__ import annotations

import re
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from torch_tpu import config


@dataclass
class Compile:
    """One program that the memory table did not have."""

    op: str
    source: str  # "compiled" or "disk"
    seconds: float
    reason: str


@dataclass
class Statistics:
    compiles: list[Compile] = field(default_factory=list)
    trace_seconds: float = 0.0
    compile_seconds: float = 0.0
    load_seconds: float = 0.0
    compiled: int = 0
    loaded: int = 0
    traced: int = 0


_lock = threading.Lock()
_statistics = Statistics()
_seen: dict[str, list[Any]] = {}  # operator -> descriptions of its earlier calls, newest last
_KEPT = 1000  # compiles remembered one by one
_NEAREST = 16  # earlier calls compared for the reason
_last_progress = 0.0


def reset() -> None:
    """Forgets all counters; what is compiled stays."""
    global _statistics
    from torch_tpu import _C

    with _lock:
        _statistics = Statistics()
    _C._reset_table_stats()


def reason(op: str, description: list[Any]) -> str:
    """Why ``description`` needed a program: what differs from the nearest earlier call of the operator."""
    with _lock:
        earlier = _seen.setdefault(op, [])
        best: tuple[int, str] | None = None
        for other in reversed(earlier[-_NEAREST:]):
            differences = _differences(description, other)
            if best is None or len(differences) < best[0]:
                best = len(differences), "; ".join(differences)
        earlier.append(description)
        del earlier[: -4 * _NEAREST]
    if best is None:
        return "first call of the operator"
    return best[1] or "evicted from the memory table"


def graph_reason(group: str, state: dict[str, Any], arguments: list[Any]) -> str:
    """Why a compiled graph needed a program: what differs from the nearest one of the same function.

    Args:
        group: Programs of one group are compared: those of a captured function, or of its backward pass.
        state: What else than the inputs decides: the graph, bounds of open sizes, precision, compiler options.
        arguments: The inputs.
    """
    with _lock:
        earlier = _seen.setdefault(group, [])
        best: list[str] | None = None
        for other_state, other_arguments in reversed(earlier[-_NEAREST:]):
            found = _state_differences(state, other_state)
            if not found or found == ["another graph of the function"]:
                found = _input_differences(arguments, other_arguments) or found
            if best is None or len(found) < len(best):
                best = found
        earlier.append((state, arguments))
        del earlier[: -4 * _NEAREST]
    if best is None:
        return "first call of the function"
    return "; ".join(best) or "the same again: it was evicted from the memory table, or its function captured anew"


def _state_differences(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    found = []
    for name in dict.fromkeys((*a, *b)):
        if name == "graph" or a.get(name) == b.get(name):
            continue
        if name in a and name in b:
            found.append(f"{name}: {_short(b[name])} became {_short(a[name])}")
        else:
            found.append(f"{name}: {_short(a[name])} is new" if name in a else f"{name}: {_short(b[name])} is gone")
    return found or (["another graph of the function"] if a["graph"] != b["graph"] else [])


def _input_differences(a: list[Any], b: list[Any]) -> list[str]:
    """How the inputs differ: of each tensor what the user sees of it, its memory only if that is all."""
    if len(a) != len(b):
        return [f"number of inputs: {len(b)} became {len(a)}"]
    found = []
    for i, (x, y) in enumerate(zip(a, b, strict=True)):
        of_one = _differences(x, y, f"argument {i}")
        seen = [d for d in of_one if re.match(r"argument \d+ (dtype|sizes):", d)]
        found += seen or of_one
    return found


def _differences(a: Any, b: Any, path: str = "argument") -> list[str]:
    if type(a) is not type(b) or (isinstance(a, list | tuple) and len(a) != len(b)):
        return [f"{path}: {_short(b)} became {_short(a)}"]
    if isinstance(a, tuple) and hasattr(a, "_fields"):
        return [
            f"{path} {name}: {_short(y)} became {_short(x)}"
            for name, x, y in zip(a._fields, a, b, strict=True)
            if x != y and name not in ("offset", "value", "values")
        ]
    if isinstance(a, list):
        return [d for i, (x, y) in enumerate(zip(a, b, strict=True)) for d in _differences(x, y, f"argument {i}")]
    return [f"{path}: {_short(b)} became {_short(a)}"] if a != b else []


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def record(op: str, source: str, trace: float, compile_: float, why: str) -> None:
    """Counts one program."""
    global _last_progress
    s = _statistics
    with _lock:
        s.trace_seconds += trace
        if source == "disk":
            s.loaded += 1
            s.load_seconds += compile_
        else:
            s.compiled += 1
            s.compile_seconds += compile_
        s.compiles.append(Compile(op, source, trace + compile_, why))
        del s.compiles[:-_KEPT]
    if config.get("TORCH_TPU_LOG_COMPILES"):
        print(f"torch_tpu: {source} {op} in {1e3 * (trace + compile_):.1f} ms: {why}", file=sys.stderr)
    now = time.monotonic()
    if s.compile_seconds > 2 and now - _last_progress > 1 and sys.stderr.isatty() and not config.get("TORCH_TPU_QUIET"):
        _last_progress = now
        print(f"\rtorch_tpu: {s.compiled} programs compiled in {s.compile_seconds:.1f} s", end="\r", file=sys.stderr)


def record_trace(seconds: float) -> None:
    """Counts the tracing of a program that Fused mode makes a part of others."""
    with _lock:
        _statistics.traced += 1
        _statistics.trace_seconds += seconds


def compile_stats() -> dict[str, Any]:
    """Counters of this process's programs since the start or the last :func:`reset`.

    Returns:
        A dict: ``hits``, ``misses`` and ``evictions`` of the memory table and the number of ``programs`` in it; how
        many programs were ``compiled``, how many ``loaded`` from the disk cache, and how many only ``traced`` to be
        parts of others (Fused mode), with ``compile_seconds``, ``load_seconds`` and ``trace_seconds``; ``compiles``,
        the newest 1000 of them as dicts of ``op``, ``source``, ``seconds`` and ``reason``; and ``fallbacks``, how
        often each operator of ``TORCH_TPU_CPU_FALLBACK`` ran on the host.
    """
    from torch_tpu import _C
    from torch_tpu.programs import fallback

    with _lock:
        s = _statistics
        return {
            **_C._table_stats(),
            "compiled": s.compiled,
            "loaded": s.loaded,
            "traced": s.traced,
            "compile_seconds": s.compile_seconds,
            "load_seconds": s.load_seconds,
            "trace_seconds": s.trace_seconds,
            "compiles": [vars(c).copy() for c in s.compiles],
            "fallbacks": fallback.counts(),
        }
