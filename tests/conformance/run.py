"""The whole suite: ``python -m tests.conformance``, or ``make conformance ARGS="--ops add,nn.* --dtypes float32"``.

Operators are dealt to worker processes. A worker that dies or hangs costs the case at hand; the rest goes on in a
new one. Every result is a line in ``build/conformance/results.jsonl`` with a fingerprint of the sources, and a case
that has a result for the present sources is not run again.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import select as selecting
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from tests.conformance import cases, report
from tests.conformance.cases import Case

ROOT = Path(__file__).resolve().parents[2]
#: Cases after which a worker is replaced, so that what PyTorch and XLA keep does not add up.
_CASES_PER_WORKER = 600


class Item(Protocol):
    """What workers are given, a NamedTuple: a :class:`Case`, or a program (:mod:`tests.conformance.tpu`)."""

    @property
    def op(self) -> str:
        """The operator: items of one are run by one worker."""


ItemT = TypeVar("ItemT", bound=Item)


def fingerprint(settings: object, *others: str) -> str:
    """A hash of everything that decides a result: the package, this suite and ``others`` of it, the run's settings."""
    digest = hashlib.sha256(str(settings).encode())
    own = ("cases", "compare", "devices", "modules", "operators", "variants", "worker", *others)
    files = [*(ROOT / "torch_tpu").rglob("*.py"), *(ROOT / "torch_tpu" / "csrc").rglob("*.*")]
    for path in sorted([*files, *(Path(__file__).with_name(f"{name}.py") for name in own)]):
        digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return digest.hexdigest()[:16]


class Results(Generic[ItemT]):
    """The file of results; ``kind`` makes an item of its fields."""

    def __init__(self, path: Path, fingerprint: str, any_version: bool, kind: Callable[..., ItemT]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._fingerprint = fingerprint
        self._kind = kind
        self._lock = threading.Lock()
        self.known: dict[ItemT, dict[str, Any]] = {}
        if self.path.exists():
            for line in self.path.read_text().splitlines():
                with contextlib.suppress(json.JSONDecodeError):  # a line that was being written when the run ended
                    result = json.loads(line)
                    if any_version or result["fingerprint"] == fingerprint:
                        self.known[self._kind(*result["case"])] = result

    def add(self, result: dict[str, Any]) -> None:
        """Keeps a result, in memory and in the file."""
        result = {**result, "fingerprint": self._fingerprint}
        with self._lock:
            self.known[self._kind(*result["case"])] = result
            with self.path.open("a") as file:
                file.write(json.dumps(result) + "\n")


class Worker:
    """One worker process, started again when it ends.

    Args:
        command: A module that serves (:func:`tests.conformance.worker.serve`), and its arguments.
        timeout: Seconds for one item.
    """

    def __init__(self, command: Sequence[str], timeout: float) -> None:
        self._command, self._timeout = command, timeout
        self._phase = tempfile.NamedTemporaryFile(prefix="torch_tpu-conformance-")  # noqa: SIM115
        self._process: subprocess.Popen[str] | None = None
        self._served = 0

    def run(self, case: Item) -> dict[str, Any]:
        """The result of one item, also if it ends the process."""
        start = time.perf_counter()
        process = self._ready()
        assert process.stdin is not None and process.stdout is not None
        line = ""
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(case), file=process.stdin, flush=True)
            if selecting.select([process.stdout], [], [], self._timeout)[0]:
                line = process.stdout.readline()
                if line:
                    return json.loads(line)
        status, message = self._ended(process)
        seconds = round(time.perf_counter() - start, 3)
        return {"case": case, "status": status, "samples": 1, "failed": 1, "message": message, "seconds": seconds}

    def _ended(self, process: subprocess.Popen[str]) -> tuple[str, str]:
        hung = False
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            hung = True
        self.close()
        if not hung and process.returncode == 1:  # an exception outside of any case; CONFORMANCE_STDERR=1 shows it
            raise RuntimeError(f"{' '.join(self._command)} ended with a Python error.")
        if Path(self._phase.name).read_text() != "tpu":
            return "none", f"the CPU {'hangs' if hung else 'crashes'}"
        if hung:
            return "timeout", f"no result after {self._timeout:g} s"
        code = process.returncode
        return "crash", f"the process ended with {signal.Signals(-code).name if code < 0 else f'status {code}'}"

    def _ready(self) -> subprocess.Popen[str]:
        if self._process is not None and self._served >= _CASES_PER_WORKER:
            self.close()
        if self._process is None:
            self._served = 0
            environment = os.environ | {"TORCH_TPU_CACHE": "0", "TORCH_TPU_QUIET": "1", "OMP_NUM_THREADS": "1"}
            environment["TORCH_TPU_CPU_FALLBACK"] = ""
            module, *arguments = self._command
            command = [sys.executable, "-m", module, self._phase.name, *arguments]
            log = subprocess.DEVNULL if "CONFORMANCE_STDERR" not in os.environ else None
            self._process = subprocess.Popen(
                command, cwd=ROOT, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log
            )
        self._served += 1
        return self._process

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


class Progress:
    """A line with what is done, what failed and how long the rest takes."""

    def __init__(self, total: int) -> None:
        self._total, self._done, self._bad = total, 0, 0
        self._start = time.monotonic()
        self._last = 0.0

    def add(self, result: dict[str, Any]) -> None:
        """Counts a result and redraws now and then."""
        self._done += 1
        self._bad += result["status"] not in ("pass", "none")
        now = time.monotonic()
        terminal = sys.stderr.isatty()
        if now - self._last < (0.5 if terminal else 30) and self._done < self._total:
            return
        self._last = now
        left = (now - self._start) / self._done * (self._total - self._done)
        bar = "#" * (30 * self._done // self._total)
        text = f"[{bar:<30}] {self._done}/{self._total}, {self._bad} failing, {left / 60:.0f} min left: "
        text += result["case"][0]
        print(f"\r\033[K{text[:118]}" if terminal else text, end="" if terminal else "\n", file=sys.stderr, flush=True)

    def finish(self) -> None:
        """Ends the line."""
        if sys.stderr.isatty():
            print(file=sys.stderr)


def run_all(todo: Sequence[ItemT], results: Results[ItemT], jobs: int, timeout: float, command: Sequence[str]) -> None:
    """Runs the items in ``jobs`` processes of ``command``, each operator's in one."""
    queue: dict[str, list[ItemT]] = {}
    for case in todo:
        queue.setdefault(case.op, []).append(case)
    shards = iter(queue.values())
    lock, progress = threading.Lock(), Progress(len(todo))
    broken: list[RuntimeError] = []

    def serve() -> None:
        worker = Worker(command, timeout)
        try:
            while True:
                with lock:
                    shard = next(shards, None)
                if shard is None:
                    return
                for case in shard:
                    result = worker.run(case)
                    results.add(result)
                    with lock:
                        progress.add(result)
        except RuntimeError as error:
            broken.append(error)
        finally:
            worker.close()

    threads = [threading.Thread(target=serve, daemon=True) for _ in range(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    progress.finish()
    for error in broken:
        raise error


def _options(arguments: list[str] | None) -> argparse.Namespace:
    def words(text: str) -> list[str]:
        return [word for word in text.split(",") if word]

    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    parser.add_argument(
        "--ops", type=words, default=[], help="names or patterns of operators, nn.* modules and optim.*"
    )
    parser.add_argument("--dtypes", type=words, default=[], help=", ".join(cases.DTYPES))
    parser.add_argument("--kinds", type=words, default=[], help=", ".join(cases.KINDS))
    parser.add_argument(
        "--samples", type=int, default=40, help="the most samples of a case, spread over all (%(default)s)"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (%(default)s)")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one case (%(default)s)")
    parser.add_argument("--results", type=Path, default=ROOT / "build" / "conformance", help="folder of the results")
    parser.add_argument("--again", choices=("failed", "all"), help="run cases again that have a result")
    parser.add_argument("--any-version", action="store_true", help="results of other sources count too")
    parser.add_argument("--report-only", action="store_true", help="run nothing")
    parser.add_argument("--table", type=Path, help="write the table of all operators (docs/ops.md) there")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Runs what the command line selects; 0 if nothing failed that is not declared, and nothing passed that is."""
    options = _options(arguments)
    wanted = cases.select(options.ops, options.dtypes, options.kinds)
    path = options.results / "results.jsonl"
    results = Results(path, fingerprint(options.samples), options.any_version, Case)
    if not options.report_only:

        def due(case: Case) -> bool:
            known = results.known.get(case)
            if known is None or options.again == "all":
                return True
            return options.again == "failed" and known["status"] not in ("pass", "none")

        todo = [case for case in wanted if due(case)]
        command = ("tests.conformance.worker", str(options.samples))
        run_all(todo, results, options.jobs, options.timeout, command)
    found = [results.known[case] for case in wanted if case in results.known]
    print(report.summary(found))
    if options.table is not None:
        options.table.write_text(report.table(found, options.samples))
    return 1 if report.unexpected(found) else 0
