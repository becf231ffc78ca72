"""XLA options per program.

XLA's CPU backend has two code generators. The older one, without fusion emitters, compiles single operators in two
thirds of the time to code that is as fast or faster, but for a few kinds of large programs: :func:`_needs_emitters`.
Tiny arrays need no optimisation.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import re
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from torch_tpu import _C, platform

if TYPE_CHECKING:
    from torch_tpu.tracing.program import Plan

Flags = dict[str, bool | int | float | str]

log = logging.getLogger("torch_tpu")

#: Elements up to which an operator is compiled without optimisation: its run time is launch overhead anyway.
TINY_ELEMENTS = 1 << 9
#: Elements from which it matters which code generator a program is for.
LARGE_ELEMENTS = 1 << 14
#: Program arguments up to which light compiles are quicker: without fusion emitters every result is a kernel of its
#: own.
LIGHT_ARGUMENTS = 24

#: Compiler options in force on a thread: (name, value), sorted by name.
Scope = tuple[tuple[str, Any], ...]

#: Scopes that are open, on any thread: while there are none, nobody has to ask.
scopes_open = 0
_scopes_lock = threading.Lock()
_SCOPE = "torch_tpu.compiler_options"  # in PyTorch's thread-local state, which backward passes get

_excess_precision = False
_unknown: set[str] = set()  # options that this process's plugin does not have


def allow_excess_precision() -> bool:
    """Whether XLA may keep intermediate results in a wider dtype than the program says."""
    return _excess_precision


def set_allow_excess_precision(allowed: bool) -> None:
    """Programs compiled under the other setting leave the memory table; the disk cache keeps both."""
    global _excess_precision
    if not isinstance(allowed, bool):
        raise TypeError(f"allow_excess_precision must be True or False, got {allowed!r}.")
    if allowed != _excess_precision:
        _excess_precision = allowed
        _C._clear_table()


class UnknownOption(ValueError):
    """The plugin does not have a compiler option that the user has set."""


def scope() -> Scope:
    """The compiler options that the user has set on this thread."""
    return torch._C._get_obj_in_tls(_SCOPE) if torch._C._is_key_in_tls(_SCOPE) else ()


@contextlib.contextmanager
def scoped(chosen: Mapping[str, bool | int | float | str]) -> Iterator[None]:
    """Compiler options for what is compiled meanwhile on this thread; those of inner scopes count first."""
    global scopes_open
    for name, value in chosen.items():
        if not isinstance(name, str) or not name:
            raise TypeError(f"The name of a compiler option must be a string, got {name!r}.")
        if not isinstance(value, bool | int | float | str):
            raise TypeError(f"The compiler option {name!r} must be a bool, int, float or str, got {value!r}.")
    before = scope()
    with _scopes_lock:
        scopes_open += 1
    torch._C._stash_obj_in_tls(_SCOPE, tuple(sorted({**dict(before), **chosen}.items())))
    try:
        yield
    finally:
        torch._C._stash_obj_in_tls(_SCOPE, before)
        with _scopes_lock:
            scopes_open -= 1


def flags(plan: Plan) -> Flags:
    """The XLA flags for one program."""
    full = full_flags()
    if platform.kind() != "cpu":
        return full
    elements = _elements(plan)
    if plan.is_graph or len(plan.operands) > LIGHT_ARGUMENTS or (elements > LARGE_ELEMENTS and _needs_emitters(plan)):
        return full
    return _light(full, elements)


def _light(full: Flags, elements: int) -> Flags:
    """Those of the older code generator."""
    light: Flags = {**full, "xla_cpu_use_fusion_emitters": False, "xla_cpu_parallel_codegen_split_count": 1}
    return {**light, "xla_backend_optimization_level": 0 if elements <= TINY_ELEMENTS else 1}


def _elements(plan: Plan) -> int:
    """Elements of the largest array that the program reads or makes."""
    return max([plan.largest_operand, *(o.type.numel for o in plan.outputs)])


def _needs_emitters(plan: Plan) -> bool:
    """Whether the older code generator makes slow code of a large program.

    It vectorises no operator that writes where it reads, and is slow at joining arrays and at sums down their columns.
    """
    if any(plan.outputs[output].type.numel > LARGE_ELEMENTS for _, output in plan.donations):
        return True
    return max(plan.work.joined, plan.work.summed_down) > LARGE_ELEMENTS


@functools.cache
def _source() -> str:
    return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]


def identity() -> str:
    """What a disk cache entry depends on here: the text of this file and the settings in force."""
    return f"{_source()}:{_excess_precision}"


def full_flags() -> Flags:
    """The XLA flags for full optimisation, and on the CPU platform for the code generator that fuses."""
    common: Flags = {"xla_allow_excess_precision": _excess_precision}
    if platform.kind() != "cpu":
        return common
    # Fast min and max drop NaN. The vectors are those of the processor, not half as long.
    return {**common, "xla_cpu_enable_fast_min_max": False, "xla_cpu_prefer_vector_width": 512}


def fused_flags(elements: int) -> Flags:
    """The XLA flags for a program of several operators whose largest array has so many elements."""
    full = full_flags()
    return full if platform.kind() != "cpu" or elements > TINY_ELEMENTS else _light(full, elements)


def compile(plan: Plan, custom: Scope = ()) -> Any:
    """Compiles a plan with its flags.

    Args:
        plan: What to compile.
        custom: Options of the user's, which count before those that are chosen here.

    Raises:
        UnknownOption: The plugin does not have one of ``custom``.
        PjrtError: XLA refuses the program.
    """
    reload = platform.kind() == "cpu" and _elements(plan) <= LARGE_ELEMENTS  # it sheds its flags: cheaper to launch
    return compile_text(plan.text, flags(plan), reload, custom)


def compile_text(text: str, wanted: Flags, reload: bool, custom: Scope = (), partitions: int = 1) -> Any:
    """Compiles a module with flags, without those that the plugin does not have. See :func:`compile`."""
    chosen = {name: value for name, value in wanted.items() if name not in _unknown} | dict(custom)
    while True:
        try:
            return _C._compile(text, chosen, reload=reload, partitions=partitions)
        except _C.PjrtError as error:
            refused = re.search(r"No such compile option: '(\w+)'", str(error))
            if refused is None or refused[1] not in chosen:
                raise
            if refused[1] in dict(custom):
                raise UnknownOption(
                    f"The compiler option {refused[1]!r} is not known to this plugin ({platform.kind()})."
                ) from None
            _unknown.add(refused[1])
            del chosen[refused[1]]
            log.info("torch_tpu: the plugin has no compile option %s; programs are compiled without it.", refused[1])
