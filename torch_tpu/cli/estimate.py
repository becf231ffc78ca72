"""``python -m torch_tpu estimate``: what a program would cost on TPUs, from libtpu, without one."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from torch_tpu.cli import target


def add_parser(commands: Any) -> None:
    """Adds the command ``estimate`` to the program's parser."""
    text = "compile a function for TPUs that are not here: whether it fits, how fast it can be, what holds it back"
    parser = commands.add_parser("estimate", help=text, description=text)
    target.add_arguments(parser)
    parser.add_argument("--topology", default="v6e", help="one or more, separated by commas (%(default)s)")
    parser.add_argument("--precision", default="medium", choices=("medium", "high", "highest"))
    parser.add_argument("--price", action="append", default=[], metavar="GENERATION=N", help="per chip and hour")
    parser.add_argument(
        "--compare-meshes", action="store_true",
        help="rank the ways to lay a training step over the slice; NAME returns (model, loss, a chip's batch[, plan])",
    )  # fmt: skip
    parser.add_argument("--mesh", action="append", default=[], metavar="dp=2,fsdp=8,tp=4", help="with --compare-meshes")
    parser.add_argument("--json", action="store_true", help="print a JSON object (docs/aot.md)")
    parser.add_argument("--html", metavar="FILE", help="write the report as a page")
    parser.add_argument("--save", metavar="FILE", help="write the executables, for torch_tpu.aot.load")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from torch_tpu import aot

    if arguments.compare_meshes:
        return _compare(arguments)
    try:
        prices = {name: float(value) for name, _, value in (p.partition("=") for p in arguments.price)}
        chosen = target.load(arguments.target, arguments.input)
        report = aot.compile(
            chosen.function,
            chosen.args,
            chosen.kwargs,
            topology=arguments.topology.split(","),
            precision=arguments.precision,
            prices=prices,
        )
    except ValueError as error:
        print(f"estimate: {error}", file=sys.stderr)
        return 2
    except (RuntimeError, NotImplementedError, MemoryError) as error:
        print(f"estimate: {error}", file=sys.stderr)
        return 1
    print(json.dumps(report.to_dict(), indent=1) if arguments.json else report)
    if arguments.html:
        Path(arguments.html).write_text(report.to_html())
    if arguments.save:
        aot.save(report, arguments.save)
    return 0 if all(e.memory.fits for e in report.estimates) else 1


def _compare(arguments: argparse.Namespace) -> int:
    from torch_tpu import aot
    from torch_tpu.aot import meshes

    try:
        made = target.place(arguments.target)()
        if not isinstance(made, tuple) or len(made) not in (3, 4):
            raise ValueError(f"{arguments.target} has to return (model, loss, a chip's batch[, plan of tp]).")
        model, loss, batch, *plan = made
        given = [_mesh(text) for text in arguments.mesh] or None
        found = aot.compare_meshes(
            model, loss, batch, topology=arguments.topology, plan=plan[0] if plan else None, meshes=given,
            precision=arguments.precision,
        )  # fmt: skip
    except ValueError as error:
        print(f"estimate: {error}", file=sys.stderr)
        return 2
    except (RuntimeError, NotImplementedError, MemoryError) as error:
        print(f"estimate: {error}", file=sys.stderr)
        return 1
    if arguments.json:
        plain = [
            {"mesh": c.mesh, "problem": c.problem, "fits": c.estimate is not None and c.estimate.memory.fits,
             "seconds_per_call": None if c.estimate is None else list(c.estimate.seconds)}
            for c in found
        ]  # fmt: skip
        print(json.dumps(plain, indent=1))
    else:
        print(meshes.table(found))
    return 0 if any(c.estimate is not None and c.estimate.memory.fits for c in found) else 1


def _mesh(text: str) -> dict[str, int]:
    try:
        return {name: int(value) for name, _, value in (part.partition("=") for part in text.split(","))}
    except ValueError:
        raise ValueError(f"{text!r} is no mesh: write sizes as dp=2,fsdp=8,tp=4.") from None
