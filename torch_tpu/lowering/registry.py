"""The table of rules: what each ATen operator means as StableHLO.

A rule is a function from :class:`Value` to :class:`Value`, registered under the functional overloads that it covers
(``"add.Tensor"``; the default overload is the bare name). It never mentions mutation, ``out=``, views or strides:
tracing serves those from the operator's schema. Promotion and broadcasting are declared here.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import inspect
import marshal
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND as Promotion

__all__ = ["Promotion", "Rule", "fingerprint", "load", "lookup", "lower"]


@dataclass(frozen=True)
class Rule:
    """A registered rule.

    Attributes:
        function: Called with the operator's arguments in schema order: ``Value`` for tensors, ``Value`` or a number for
            scalars, plain Python objects for the rest.
        promote: PyTorch's element-wise promotion kind, or None: the rule then gets operands as they are.
        promoted: Names of the arguments that take part in promotion; by default every positional tensor and Scalar.
        static: Names of Scalar and float arguments that are part of the program instead of run-time operands.
        runtime: Names of integer arguments that are run-time operands instead of part of the program.
        single: Names of numbers that an element-wise rule gets as they are, where it gets others as operands.
        classes: Which of its numbers are NaN, negative, zero, below one, one, above one is part of the program: it
            refuses some of them, or has another form for them.
        once: A sum, difference or product of two operands: bfloat16 ones give what rounding the float32 result gives.
        mutates: Arguments that the operator changes though its schema does not say so (running statistics); their new
            values follow the results.
        meta: In place of PyTorch's meta kernel where that speaks for another device alone; called without ``out=``.
    """

    function: Callable[..., Any]
    promote: Promotion | None = None
    promoted: tuple[str, ...] | None = None
    static: frozenset[str] = frozenset()
    runtime: frozenset[str] = frozenset()
    single: frozenset[str] = frozenset()
    classes: bool = False
    once: bool = False
    mutates: tuple[str, ...] = ()
    meta: Callable[..., Any] | None = None
    keywords: frozenset[str] = field(default_factory=frozenset)


_rules: dict[str, Rule] = {}
_foreign = hashlib.sha256()  # the code of rules that other packages registered
_loaded = False


def lower(
    *names: str,
    promote: Promotion | None = None,
    promoted: tuple[str, ...] | None = None,
    static: tuple[str, ...] = (),
    runtime: tuple[str, ...] = (),
    single: tuple[str, ...] = (),
    classes: bool = False,
    once: bool = False,
    mutates: tuple[str, ...] = (),
    meta: Callable[..., Any] | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a rule for the ATen overloads ``names`` (``"ns::op.overload"`` for another namespace)."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        parameters = inspect.signature(function).parameters.values()
        keywords = frozenset(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)
        if not str(getattr(function, "__module__", "")).startswith("torch_tpu."):
            _foreign.update(marshal.dumps(getattr(function, "__code__", None)))
        rule = Rule(
            function, promote, promoted, frozenset(static), frozenset(runtime), frozenset(single), classes, once,
            mutates, meta, keywords,
        )  # fmt: skip
        for name in names:
            if name in _rules:
                raise ValueError(f"The operator {name} has two lowering rules: {_rules[name].function} and {function}.")
            _rules[name] = rule
        return function

    return register


def load() -> None:
    """Imports every family of rules, once."""
    global _loaded
    if _loaded:
        return
    import torch_tpu.lowering as families

    for module in sorted(m.name for m in pkgutil.iter_modules(families.__path__)):
        importlib.import_module(f"torch_tpu.lowering.{module}")
    _loaded = True


def lookup(name: str) -> Rule | None:
    """The rule of a functional overload, written ``op``, ``op.overload`` or ``ns::op.overload``."""
    load()
    return _rules.get(name)


def registered(name: str) -> Rule:
    """The rule of an overload from the families imported so far; for families that build on another's rules."""
    return _rules[name]


def names() -> list[str]:
    load()
    return sorted(_rules)


@functools.cache
def _sources() -> str:
    digest = hashlib.sha256()
    root = Path(__file__).parent.parent
    for folder in ("stablehlo", "lowering", "tracing", "bounded"):
        for path in sorted((root / folder).glob("*.py")):
            digest.update(path.name.encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:32]


def fingerprint() -> str:
    """A hash of what decides what a program is: a changed rule never meets an old cache entry.

    Covers the sources of this package, and of rules that others registered the functions themselves.
    """
    return f"{_sources()}{_foreign.hexdigest()[:16]}"
