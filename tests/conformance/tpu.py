"""Which programs libtpu compiles for a TPU: ``python -m tests.conformance.tpu``, or ``make tpu-compile``.

Two passes, both in worker processes that may crash or hang, and both resumable (:mod:`tests.conformance.run`). The
first runs the cases on the CPU plugin, traced as for a TPU, and keeps every distinct program. The second compiles each
for one chip, ahead of time; a program that has an answer of this libtpu is not compiled again, whatever changed in the
sources.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tests.conformance import cases, report, run
from tests.conformance.cases import Case
from tests.conformance.gaps import declared

#: What a run is about unless it is told otherwise.
DTYPES = ("float32", "bfloat16", "int64", "bool", "complex64")
KINDS = ("forward", "backward")
TARGET = "v6e"


class Program(NamedTuple):
    """A program, and an operator that needs it."""

    op: str
    key: str


Answers = Mapping[str, dict[str, Any]]  # of the compiler, by a program's key


def failures(found: Iterable[dict[str, Any]], answers: Answers) -> dict[str, str]:
    """What is wrong with a case, by its id: no declared gap makes its run end early, or a program is not compiled."""
    out: dict[str, str] = {}
    for result in found:
        case = Case(*result["case"])
        name = case.id
        if result["status"] not in ("pass", "none") and not declared(case):
            out[name] = f"not collected: {result['message']}"
        for key in result.get("programs", ()):
            if key in answers and answers[key]["status"] != "pass":
                out[name] = f"program {key}: {answers[key]['message'] or answers[key]['status']}"
    return out


def summary(found: Iterable[dict[str, Any]], answers: Answers, libtpu: str, samples: int) -> dict[str, Any]:
    """What is kept of a run: for each operator and dtype how many of its programs compile, and of how many."""
    found = [r for r in found if r["status"] != "none"]
    programs: dict[str, dict[str, dict[str, bool]]] = {}
    for result in found:
        case = Case(*result["case"])
        cell = programs.setdefault(case.op, {}).setdefault(case.dtype, {})
        cell.update((k, answers[k]["status"] == "pass") for k in result.get("programs", ()) if k in answers)
    return {
        "target": TARGET,
        "libtpu": libtpu,
        "samples": samples,
        "programs": len(keys := {k for row in programs.values() for cell in row.values() for k in cell}),
        "compiled": sum(answers[k]["status"] == "pass" for k in keys),
        "operators": {
            op: {dtype: [sum(cell.values()), len(cell)] for dtype, cell in row.items() if cell}
            for op, row in programs.items()
        },
        "failures": {name: text.splitlines()[0][:300] for name, text in failures(found, answers).items()},
    }


def write(path: Path, what: dict[str, Any]) -> None:
    """JSON with a line for each operator, so that a change of one is a change of one line."""
    lines = []
    for name, value in what.items():
        text = json.dumps(value)
        if isinstance(value, dict) and value:
            rows = (f"{json.dumps(k)}: {json.dumps(v)}" for k, v in value.items())
            text = "{\n  " + ",\n  ".join(rows) + "\n }"
        lines.append(f" {json.dumps(name)}: {text}")
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def _options(arguments: list[str] | None) -> argparse.Namespace:
    def words(text: str) -> list[str]:
        return [word for word in text.split(",") if word]

    parser = argparse.ArgumentParser(prog="python -m tests.conformance.tpu", description=__doc__)
    parser.add_argument("--ops", type=words, default=[], help="names or patterns of operators, nn.* and optim.*")
    parser.add_argument("--dtypes", type=words, default=[*DTYPES], help=f"(default: {','.join(DTYPES)})")
    parser.add_argument("--kinds", type=words, default=[*KINDS], help=f"(default: {','.join(KINDS)})")
    parser.add_argument("--samples", type=int, default=2, help="the most samples of a case (%(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="processes (%(default)s)")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one case or program (%(default)s)")
    parser.add_argument(
        "--results", type=Path, default=run.ROOT / "build" / "tpu_compile", help="folder of the results"
    )
    parser.add_argument("--again", action="store_true", help="do again what failed")
    parser.add_argument("--any-version", action="store_true", help="programs of other sources count too")
    parser.add_argument("--report-only", action="store_true", help="run nothing")
    parser.add_argument(
        "--summary", type=Path, help=f"write the results there ({report.TPU_SUMMARY.name}, for docs/ops.md)"
    )
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Collects and compiles what the command line selects; 0 if everything compiles."""
    options = _options(arguments)
    libtpu = importlib.metadata.version("libtpu")
    wanted = [c for c in cases.select(options.ops, options.dtypes, options.kinds) if c.dtype in options.dtypes]
    wanted.sort(key=lambda c: options.dtypes.index(c.dtype))
    folder = options.results / "programs"

    def due(known: dict[str, Any] | None) -> bool:
        return known is None or (options.again and known["status"] not in ("pass", "none"))

    version = run.fingerprint(options.samples, "tpu_worker")
    ran = run.Results(options.results / "cases.jsonl", version, options.any_version, Case)
    compiled = run.Results(options.results / f"{TARGET}.jsonl", libtpu, False, Program)
    for dtype in () if options.report_only else options.dtypes:
        of_dtype = [c for c in wanted if c.dtype == dtype]
        command = "tests.conformance.tpu_worker", "collect", str(folder), str(options.samples)
        run.run_all([c for c in of_dtype if due(ran.known.get(c))], ran, options.jobs, options.timeout, command)
        answers = {p.key: result for p, result in compiled.known.items()}
        todo = {
            key: Program(c.op, key)
            for c in of_dtype
            for key in ran.known[c].get("programs", ())
            if due(answers.get(key))
        }
        command = "tests.conformance.tpu_worker", "compile", str(folder), TARGET
        run.run_all([*todo.values()], compiled, options.jobs, options.timeout, command)
    answers = {p.key: result for p, result in compiled.known.items()}
    found = [ran.known[c] for c in wanted if c in ran.known]
    outcome = summary(found, answers, libtpu, options.samples)
    for name, text in outcome["failures"].items():
        print(f"{name}: {text}")
    pairs = [cell for row in outcome["operators"].values() for cell in row.values()]
    print(f"programs: {outcome['compiled']} of {outcome['programs']} compile for {TARGET} (libtpu {libtpu})")
    print(f"operators x dtypes: {sum(a == b for a, b in pairs)} of {len(pairs)}")
    if options.summary is not None:
        write(options.summary, outcome)
    return 1 if outcome["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
