"""``python -m torch_tpu``: what this machine offers, the program cache, and programs for TPUs that are not here."""

from __future__ import annotations

import argparse
import sys

from torch_tpu.cli import cache, check, doctor, estimate


def main(arguments: list[str] | None = None) -> int:
    """Runs one command; returns the exit status: 0 if all is well, 1 if not. A usage error exits with 2."""
    parser = argparse.ArgumentParser(prog="python -m torch_tpu", description="Device 'tpu' of PyTorch.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    doctor.add_parser(commands)
    cache.add_parser(commands)
    check.add_parser(commands)
    estimate.add_parser(commands)
    chosen = parser.parse_args(arguments)
    return chosen.run(chosen)


if __name__ == "__main__":
    sys.exit(main())
