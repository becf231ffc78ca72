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


def main(phase_file: str, limit: int) -> None:
    """Serves cases from standard input until it ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what PyTorch prints must not mix with the answers
    warnings.simplefilter("ignore")
    import torch

    from tests.conformance import cases

    torch.set_num_threads(1)
    phase = os.open(phase_file, os.O_WRONLY | os.O_CREAT)
    last_op = ""
    for line in sys.stdin:
        case = cases.Case(*json.loads(line))
        if case.op != last_op:
            torch.tpu._clear_cache()
            last_op = case.op
        start = time.perf_counter()
        outcome = cases.run(case, limit, lambda name: os.pwrite(phase, name.encode(), 0))
        answer = {"case": case, **outcome._asdict(), "seconds": round(time.perf_counter() - start, 3)}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
