"""What there is to run: one case is an operator, module or optimizer, a dtype and a kind of test."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from tests.conformance import modules, operators
from tests.conformance.operators import Phase

DTYPES = ("float32", "bfloat16", "float16", "float64", "complex64", "int64", "int32", "int8", "uint8", "bool")
KINDS = ("forward", "inplace", "out", "layout", "edge", "backward", "double_backward", "errors")
_OPTIMIZER_DTYPES = ("float32", "bfloat16", "float64", "complex64")
#: The dtype of cases that have none.
NO_DTYPE = "any"


class Case(NamedTuple):
    """One pair of the conformance totals."""

    op: str
    dtype: str
    kind: str

    @property
    def id(self) -> str:
        return f"{self.op}/{self.dtype}/{self.kind}"


def names() -> list[str]:
    """Operators, modules and optimizers, in the order in which they run."""
    return [*operators.operators(), *modules.modules(), *modules.optimizers()]


def cases_of(name: str) -> Iterator[Case]:
    """The cases of one operator, module or optimizer."""
    for dtype in DTYPES:
        if (op := operators.operators().get(name)) is not None:
            kinds = operators.kinds(op, getattr(torch, dtype))
        elif (module := modules.modules().get(name)) is not None:
            kinds = modules.module_kinds(module, getattr(torch, dtype))
        else:
            kinds = ["forward"] if dtype in _OPTIMIZER_DTYPES else []
        yield from (Case(name, dtype, kind) for kind in kinds)
    if name in operators.operators() and operators.has_errors(operators.operators()[name]):
        yield Case(name, NO_DTYPE, "errors")


def select(ops: Sequence[str] = (), dtypes: Sequence[str] = (), kinds: Sequence[str] = ()) -> list[Case]:
    """The cases whose operator matches one of the patterns ``ops``, in ``dtypes`` and of ``kinds``; empty means all."""
    wanted = [n for n in names() if not ops or any(fnmatch.fnmatchcase(n, pattern) for pattern in ops)]
    return [
        case
        for name in wanted
        for case in cases_of(name)
        if (not dtypes or case.dtype in (*dtypes, NO_DTYPE)) and (not kinds or case.kind in kinds)
    ]


class Outcome(NamedTuple):
    """What a case gave.

    Attributes:
        status: ``pass``, ``fail``, ``crash``, ``timeout``, or ``none``: CPU PyTorch passes no sample.
        samples: How many samples CPU PyTorch passes.
        failed: How many of these the device fails.
        message: The first failure.
    """

    status: str
    samples: int = 0
    failed: int = 0
    message: str = ""


def run(
    case: Case,
    limit: int,
    phase: Phase = lambda name: None,
    largest: int | None = None,
    precision: torch.tpu.Precision = torch.tpu.Precision.HIGHEST,
) -> Outcome:
    """Runs one case in this process, float32 matrix products by default at the CPU's own precision."""
    dtype = torch.float32 if case.dtype == NO_DTYPE else getattr(torch, case.dtype)
    try:
        with torch.tpu.precision(precision):
            if case.op in operators.operators():
                op = operators.operators()[case.op]
                samples, failures = operators.check(op, dtype, case.kind, limit, phase, largest)
            elif case.op in modules.modules():
                samples, failures = modules.check_module(case.op, dtype, case.kind, limit, phase)
            else:
                samples, failures = modules.check_optimizer(case.op, dtype, limit, phase)
    except Exception as error:  # the description itself does not work on the CPU
        return Outcome("none", message=f"{type(error).__name__}: {error}"[:300])
    status = "fail" if failures else "pass" if samples else "none"
    return Outcome(status, samples, len(failures), failures[0] if failures else "")
