"""The module that becomes ``torch.tpu.compiler``: what concerns compiled functions."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from torch_tpu.programs import options


def custom_compiler_options(chosen: Mapping[str, bool | int | float | str]) -> AbstractContextManager[None]:
    """Further XLA options for a block, by name: ``{"xla_cpu_enable_fast_math": True}``.

    Functions under ``torch.compile`` that are called in the block, and their backward passes, run programs that were
    compiled with these options; outside of it they run others. Of nested blocks the inner one counts first. Operators
    in eager mode are not concerned.

    Args:
        chosen: Names of XLA's options for one program, without dashes, and their values.

    Raises:
        TypeError: A name is no string, or a value no bool, int, float or string.
        RuntimeError: It is called inside of a compiled function.
        UnknownOption: When something is compiled: the plugin has no such option. It is a ValueError.
    """
    if torch.compiler.is_compiling():
        raise RuntimeError("Compiler options cannot change inside of a compiled function.")
    return options.scoped(chosen)


def __getattr__(name: str) -> Any:
    if name == "async_compile":
        from torch_tpu.compile.warm import async_compile

        return async_compile
    raise AttributeError(f"module 'torch.tpu.compiler' has no attribute {name!r}")
