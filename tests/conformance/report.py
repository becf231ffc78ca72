"""What a run found: totals, the list of failures, and the table in ``docs/ops.md``."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from tests.conformance.cases import DTYPES, KINDS, NO_DTYPE, Case
from tests.conformance.gaps import GAPS, declared

Result = dict[str, Any]
#: How a kind is written in the table's cells.
_LETTERS = dict(zip(KINDS, "fioleb2x", strict=True))
_SHORT = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "float64": "f64", "complex64": "c64"}
_SHORTER = {**_SHORT, "int64": "i64"}
_GRADIENTS = ("backward", "double_backward")
#: What ``make tpu-compile`` found (:mod:`tests.conformance.tpu`), checked in.
TPU_SUMMARY = Path(__file__).with_name("tpu_compile.json")


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


def table(results: Sequence[Result], samples: int, tpu: dict[str, Any] | None = None) -> str:
    """The Markdown text of ``docs/ops.md``.

    Args:
        results: Of the run.
        samples: The most of a case in this run.
        tpu: What compiles for a TPU, by default what is checked in.
    """
    tpu = json.loads(TPU_SUMMARY.read_text()) if tpu is None else tpu
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
        *(f"| {what} | {share} |" for what, share in tpu_totals(tpu)),
        "",
        f"Kinds: {legend}. `out` are three forms of `out=` (right size, empty, strided), `layout` non-contiguous,",
        "transposed, shifted and channels-last arguments, `edge` arguments without rows, without columns and without",
        "dimensions.",
        "",
        "`compiles for TPU` (`make tpu-compile`): the dtypes for which libtpu compiles every program that the operator",
        f"and its backward pass need (libtpu {tpu['libtpu']}, {tpu['target']}, up to {tpu['samples']} samples",
        "of each description; nothing is run there); in bold those of which it refuses one. Operators that need no",
        "program have no dtype.",
        "",
    ]
    if GAPS:
        lines += ["Declared gaps:", "", *(f"- `{gap.pattern}`: {gap.reason}" for gap in GAPS), ""]
    lines += ["| operator | " + " | ".join([_SHORT.get(c, c) for c in DTYPES] + ["errors", "compiles for TPU"]) + " |"]
    lines += ["|---" * (len(columns) + 2) + "|"]
    for name in names:
        cells = [_cell([by_case.get(Case(name, dtype, kind)) for kind in KINDS]) for dtype in columns]
        cells.append(_tpu_cell(tpu["operators"].get(name, {})))
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _cell(results: list[Result | None]) -> str:
    letters = []
    for r in results:
        if r is not None:
            letter = _LETTERS[case_of(r).kind]
            letters.append(letter if r["status"] == "pass" else f"**{letter}**")
    return "".join(letters)


def tpu_totals(tpu: dict[str, Any]) -> list[tuple[str, str]]:
    """(what, compiled/all) of pairs of operator and dtype: all, and each dtype."""
    pairs = [(dtype, *counts) for row in tpu["operators"].values() for dtype, counts in row.items()]

    def share(of: Sequence[tuple[str, int, int]]) -> str:
        good = sum(compiled == needed for _, compiled, needed in of)
        return f"{good}/{len(of)} ({100 * good / len(of):.2f}%)"

    dtypes = dict.fromkeys(dtype for dtype, *_ in pairs)
    return [
        (f"compiles for TPU {tpu['target']}", share(pairs)),
        *((f"compiles for TPU {dtype}", share([p for p in pairs if p[0] == dtype])) for dtype in dtypes),
        ("distinct programs", f"{tpu['compiled']}/{tpu['programs']}"),
    ]


def _tpu_cell(row: dict[str, list[int]]) -> str:
    names = [(_SHORTER.get(dtype, dtype), compiled == needed) for dtype, (compiled, needed) in row.items()]
    return " ".join(name if good else f"**{name}**" for name, good in names)
