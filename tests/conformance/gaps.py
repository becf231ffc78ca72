"""Cases that are declared to fail, with the reason. They run all the same, and one that passes fails the suite."""

from __future__ import annotations

import fnmatch
from typing import NamedTuple

from tests.conformance.cases import Case


class Gap(NamedTuple):
    """Every case whose id ``operator/dtype/kind`` matches ``pattern`` (as file names do) fails for ``reason``."""

    pattern: str
    reason: str


GAPS: list[Gap] = []


def declared(case: Case) -> Gap | None:
    """The declaration of a case, if there is one."""
    return next((gap for gap in GAPS if fnmatch.fnmatchcase(case.id, gap.pattern)), None)
