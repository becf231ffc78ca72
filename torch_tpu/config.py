"""Every environment variable and knob, in one table.

A variable is read once, when it is first asked for. A Python setting beats the environment; a context manager beats
both.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Variable:
    """One environment variable: its default, and what it means."""

    name: str
    default: Any
    help: str

    def read(self) -> Any:
        text = os.environ.get(self.name)
        if text is None:
            return self.default
        try:
            if isinstance(self.default, bool):
                return {"1": True, "true": True, "0": False, "false": False, "": False}[text.lower()]
            if isinstance(self.default, int):
                return int(text)
        except (KeyError, ValueError):
            kind = "0 or 1" if isinstance(self.default, bool) else "a whole number"
            raise ValueError(f"The environment variable {self.name} must be {kind}, got {text!r}.") from None
        return text


VARIABLES = {
    v.name: v
    for v in [
        Variable(
            "TORCH_TPU_PLATFORM",
            "",
            "cpu, tpu, or the path of a PJRT plugin; default: libtpu if a TPU is present, else cpu",
        ),
        Variable("TORCH_TPU_NUM_CPU_DEVICES", 1, "devices of the cpu platform in one process"),
        Variable(
            "TORCH_TPU_CPU_DEVICE_BYTES", 0, "memory of a device of the cpu platform; default: the machine's memory"
        ),
        Variable("TPU_LIBRARY_PATH", "", "path of libtpu.so; default: the installed libtpu package"),
        Variable(
            "TORCH_TPU_LAUNCH_BLOCKING", False, "Debug eager mode: wait after each operator and raise at its line"
        ),
        Variable("TPU_LAUNCH_BLOCKING", False, "older name of TORCH_TPU_LAUNCH_BLOCKING"),
        Variable("TORCH_TPU_DEFER_AND_FUSE", False, "Fused eager mode: record operators, run several as one program"),
        Variable("TPU_DEFER_AND_FUSE", False, "older name of TORCH_TPU_DEFER_AND_FUSE"),
        Variable("TORCH_TPU_FUSE_LIMIT", 512, "the most operators that Fused eager mode makes one program of"),
        Variable(
            "TORCH_TPU_DYNAMIC_SIZES", True, "eager programs for ranges of sizes, where an operator's sizes change"
        ),
        Variable("TORCH_TPU_CACHE", True, "keep compiled programs on disk"),
        Variable("TORCH_TPU_CACHE_DIR", "", "folder of the disk cache; default: the user's cache folder"),
        Variable("TORCH_TPU_CACHE_BYTES", 4 << 30, "size bound of the disk cache"),
        Variable("TORCH_TPU_MAX_PROGRAMS", 16384, "programs kept in memory"),
        Variable("TORCH_TPU_COMPILE_THREADS", 0, "graphs compiled at a time; default: the processors"),
        Variable("TORCH_TPU_QUIET", False, "no line on first use without a TPU, no progress line while compiling"),
        Variable("TORCH_TPU_LOG_COMPILES", False, "print a line for each compiled program and why it was compiled"),
        Variable("TORCH_TPU_CPU_FALLBACK", "", "comma-separated operators that may run on the host; default: none"),
    ]
}


@functools.cache
def get(name: str) -> Any:
    """The value of an environment variable of the table, read once.

    Raises:
        KeyError: The table has no such variable.
        ValueError: The variable is set to something that it cannot be.
    """
    return VARIABLES[name].read()
