"""The slice of the conformance suite that ``make test`` runs: every operator, module and optimizer, on small samples.

Each runs forward in float32 and in one other dtype, which goes round from operator to operator; every third also runs
one of its other kinds of test, in turn. The rest is for ``make conformance``.
"""

from __future__ import annotations

import warnings

import pytest

from tests.conformance import cases
from tests.conformance.cases import Case
from tests.conformance.gaps import declared

NAMES = cases.names()
SAMPLES = 2
ELEMENTS = 3000  # of a sample's arguments; larger ones take their time


def _slice(name: str) -> list[Case]:
    place, every = NAMES.index(name), list(cases.cases_of(name))
    forward = [c for c in every if c.kind == "forward"]
    chosen = forward[:1]
    if len(forward) > 1:
        chosen.append(forward[1 + place % (len(forward) - 1)])
    others = [c for c in every if c.kind != "forward" and c.dtype == every[0].dtype]
    if others and place % 3 == 0:
        chosen.append(others[place // 3 % len(others)])
    return chosen


@pytest.mark.parametrize("name", NAMES)
def test_matches_cpu(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outcomes = {case: cases.run(case, SAMPLES, largest=ELEMENTS) for case in _slice(name) if declared(case) is None}
    failures = [f"{case.id}: {outcome.message}" for case, outcome in outcomes.items() if outcome.status == "fail"]
    assert not failures, "\n".join(failures)
