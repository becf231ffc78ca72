"""What a run found: totals, the list of failures, and the table in ``docs/ops.md``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tests.conformance.cases import DTYPES, KINDS, NO_DTYPE, Case
from tests.conformance.gaps import GAPS, declared

Result = dict[str, Any]
#: How a kind is written in the table's cells.
_LETTERS = dict(zip(KINDS, "fioleb2x", strict=True))
_SHORT = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "float64": "f64", "complex64": "c64"}
_GRADIENTS = ("backward", "double_backward")


def case_of(result: Result) -> Case:
    return Case(*result["case"])


def counted(results: Iterable[Result]) -> list[Result]:
    """Those of which CPU PyTorch passes a sample."""
    return [r for r in results if r["status"] != "none"]


def unexpected(results: Iterable[Result]) -> list[Result]:
    """Failures that no gap declares, and passes that one does."""
    return [r for r in counted(results) if (r["status"] == "pass") == (declared(case_of(r)) is not None)]


def _share(results: Sequence[Result]) -> str:
    passed = sum(r["status"] == "pass" for r in results)
    return f"{passed}/{len(results)} ({100 * passed / len(results):.2f}%)" if results else "-"


def totals(results: Iterable[Result]) -> list[tuple[str, str]]:
    """(what, passed/all) for all forward pairs, all gradients, each kind and each dtype."""
    found = counted(results)

    def rows(name: str, key: Callable[[Case], bool]) -> tuple[str, str]:
        return name, _share([r for r in found if key(case_of(r))])

    lines = [
        rows("all", lambda c: True),
        rows("forward in every form", lambda c: c.kind not in (*_GRADIENTS, "errors")),
        rows("gradients", lambda c: c.kind in _GRADIENTS),
        *(rows(kind, lambda c, kind=kind: c.kind == kind) for kind in KINDS),
        *(rows(f"forward {dtype}", lambda c, dtype=dtype: (c.dtype, c.kind) == (dtype, "forward")) for dtype in DTYPES),
    ]
    return [line for line in lines if line[1] != "-"]


def summary(results: Sequence[Result]) -> str:
    """Totals, then everything that should not be so, one line each."""
    lines = [f"{what:24} {share}" for what, share in totals(results)]
    status = Counter(r["status"] for r in results)
    lines.append("status: " + ", ".join(f"{name} {count}" for name, count in sorted(status.items())))
    seconds = sum(r["seconds"] for r in results)
    lines.append(f"time in cases: {seconds / 60:.1f} min; declared gaps: {len(GAPS)}")
    for r in unexpected(results):
        failed = f"{r['failed']}/{r['samples']} {r['message']}"
        note = "declared as a gap, but passes" if r["status"] == "pass" else failed
        lines.append(f"{r['status'].upper():8}{case_of(r).id}: {note}")
    return "\n".join(lines)


def table(results: Sequence[Result], samples: int) -> str:
    """The Markdown text of ``docs/ops.md``, for a run of at most ``samples`` samples a case."""
    by_case = {case_of(r): r for r in counted(results)}
    names = list(dict.fromkeys(c.op for c in by_case))
    columns = (*DTYPES, NO_DTYPE)
    legend = ", ".join(f"{letter} {kind.replace('_', ' ')}" for kind, letter in _LETTERS.items())
    lines = [
        "# Operators on device `tpu`, against CPU PyTorch",
        "",
        "Written by `make conformance`; do not edit. A pair is an operator, a dtype and a kind of test for which CPU",
        "PyTorch passes a sample of PyTorch's own descriptions. Pairs that the device fails stand in bold.",
        f"This run took at most {samples} samples of each description.",
        "",
        "| | passed |",
        "|---|---|",
        *(f"| {what} | {share} |" for what, share in totals(results)),
        "",
        f"Kinds: {legend}. `out` are three forms of `out=` (right size, empty, strided), `layout` non-contiguous,",
        "transposed, shifted and channels-last arguments, `edge` arguments without rows, without columns and without",
        "dimensions.",
        "",
    ]
    if GAPS:
        lines += ["Declared gaps:", "", *(f"- `{gap.pattern}`: {gap.reason}" for gap in GAPS), ""]
    lines += ["| operator | " + " | ".join([_SHORT.get(c, c) for c in DTYPES] + ["errors"]) + " |"]
    lines += ["|---" * (len(columns) + 1) + "|"]
    for name in names:
        cells = [_cell([by_case.get(Case(name, dtype, kind)) for kind in KINDS]) for dtype in columns]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _cell(results: list[Result | None]) -> str:
    letters = []
    for r in results:
        if r is not None:
            letter = _LETTERS[case_of(r).kind]
            letters.append(letter if r["status"] == "pass" else f"**{letter}**")
    return "".join(letters)
