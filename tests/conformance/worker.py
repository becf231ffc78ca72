"""Runs cases in a process of its own: reads one a line, answers each with a line of JSON.

Before code that could end the process it notes in a file on which device it runs, so that a crash of CPU PyTorch on an
odd sample is not counted against the device.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

Answer = dict[str, Any]


def serve(phase_file: str, run: Callable[[list[Any], Callable[[str], None]], Answer]) -> None:
    """Answers what comes from standard input until it ends.

    Args:
        phase_file: Where to note on which device it runs.
        run: Takes an item's fields, and what notes the device; gives what there is to say.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what PyTorch prints must not mix with the answers
    warnings.simplefilter("ignore")
    phase = os.open(phase_file, os.O_WRONLY | os.O_CREAT)
    for line in sys.stdin:
        item = json.loads(line)
        start = time.perf_counter()
        answer = run(item, lambda name: os.pwrite(phase, name.encode(), 0))
        answer = {"case": item, **answer, "seconds": round(time.perf_counter() - start, 3)}
        print(json.dumps(answer), file=answers, flush=True)


def main(phase_file: str, limit: int) -> None:
    """Serves cases."""
    import torch

    from tests.conformance import cases

    torch.set_num_threads(1)
    last_op = ""

    def run(item: list[str], phase: Callable[[str], None]) -> Answer:
        nonlocal last_op
        case = cases.Case(*item)
        if case.op != last_op:
            torch.tpu._clear_cache()
            last_op = case.op
        return cases.run(case, limit, phase)._asdict()

    serve(phase_file, run)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
