"""How other people's models do on tpu: tiny random models of Transformers' architectures against the CPU in float32.

    benchmarks/models.py                                   everything, going on where it was stopped
    benchmarks/models.py --models 'bert*,*ForCausalLM' --checks forward,generate
    benchmarks/models.py --report-only --table docs/models.md

Each model is built at random from its architecture's configuration, made small, and run with float32 products at the
precision ``highest`` on both devices: a forward pass, the gradients of a step, the same two compiled, and for models
that write text the tokens of ``generate``. Results are lines of ``build/models/results.jsonl``.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "models"


def _options() -> argparse.Namespace:
    def words(text: str) -> list[str]:
        return [word for word in text.split(",") if word]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=words, default=[], help="patterns of architectures, classes or libraries")
    parser.add_argument(
        "--checks", type=words, help="forward, backward, generate, compiled, compiled_backward; or build"
    )
    parser.add_argument("--jobs", type=int, default=2, help="processes (%(default)s)")
    parser.add_argument("--timeout", type=float, default=120, help="seconds for one check (%(default)s)")
    parser.add_argument("--results", type=Path, default=FOLDER, help="folder of the results")
    parser.add_argument(
        "--again",
        choices=("failed", "none", "all"),
        help="run again what failed, also what did not run on the CPU, or all",
    )
    parser.add_argument("--shard", default="0/1", help="I/N: the I-th of N parts")
    parser.add_argument("--log", type=Path, help="a file for what the models print")
    parser.add_argument("--list", action="store_true", help="print the entries and run nothing")
    parser.add_argument("--report-only", action="store_true", help="run nothing")
    parser.add_argument("--table", type=Path, help="write the table of all models (docs/models.md) there")
    return parser.parse_args()


def main() -> None:
    """Runs what the command line selects and prints the totals."""
    options = _options()
    os.environ.setdefault("TORCH_TPU_CACHE_DIR", str(FOLDER / "cache"))
    os.environ |= {"HF_HUB_OFFLINE": "1", "TORCH_TPU_QUIET": "1", "OMP_NUM_THREADS": "1"}

    from zoo import report, sweep
    from zoo.checks import CHECKS
    from zoo.entries import entries

    part, parts = map(int, options.shard.split("/"))
    chosen = entries(options.models)[part::parts]
    results = sweep.Results(options.results)
    if options.list:
        print(*(entry.name for entry in chosen), sep="\n")
        return
    if not options.report_only:
        checks = [c for c in options.checks or CHECKS if c != "build"]
        todo = [(entry, results.due(entry, checks, options.again)) for entry in chosen]
        if options.checks == ["build"]:
            todo = [(entry, []) for entry in chosen if options.again or entry.name not in results.known]
        else:
            todo = [(entry, due) for entry, due in todo if due]
        sweep.sweep(todo, results, options.jobs, options.timeout, options.log)
    found = {entry.name: results.known[entry.name] for entry in chosen if entry.name in results.known}
    print(report.summary(found))
    if options.table is not None:
        options.table.write_text(report.table(found))


if __name__ == "__main__":
    main()
