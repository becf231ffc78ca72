"""``python -m torch_tpu check``: whether a port runs on tpu, whether its numbers are right, and whether it fits."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from torch_tpu.cli import target


def add_parser(commands: Any) -> None:
    """Adds the command ``check`` to the program's parser."""
    text = "look at a function or model: operators, graph breaks, dtypes, numbers, memory, and what to change next"
    parser = commands.add_parser("check", help=text, description=text)
    target.add_arguments(parser)
    parser.add_argument("--topology", default="v5e,v6e,v5p,tpu7x", help="for which to compile (%(default)s)")
    parser.add_argument("--no-compile", action="store_true", help="do not compile, so that memory stays unknown")
    parser.add_argument("--no-numbers", action="store_true", help="do not run it; classes are made on meta then")
    parser.add_argument("--json", action="store_true", help="print a JSON object (docs/aot.md)")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from torch_tpu.aot.check import check

    try:
        chosen = target.load(arguments.target, arguments.input, "meta" if arguments.no_numbers else "cpu")
        found = check(
            chosen.function,
            chosen.args,
            chosen.kwargs,
            topologies=[] if arguments.no_compile else arguments.topology.split(","),
            numbers=not arguments.no_numbers,
        )
    except ValueError as error:
        print(f"check: {error}", file=sys.stderr)
        return 2
    except RuntimeError as error:  # libtpu is missing or in use
        print(f"check: {error}", file=sys.stderr)
        return 3
    print(json.dumps(found.to_dict(), indent=1) if arguments.json else found)
    return 0 if found.runs else 1
