"""Runs entries in processes of their own, so that a crash or a hang costs one check."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from zoo import checks as checking
from zoo.entries import Entry
from zoo.others import import_timm


class Results:
    """The file of results: a line per entry and check; the last one counts."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "results.jsonl"
        self.known: dict[str, dict[str, dict[str, Any]]] = {}
        if self.path.exists():
            for line in self.path.read_text().splitlines():
                with contextlib.suppress(json.JSONDecodeError):  # a line that was being written when the run ended
                    self._keep(json.loads(line))

    def _keep(self, result: dict[str, Any]) -> None:
        self.known.setdefault(result["name"], {})[result["check"]] = result

    def add(self, entry: Entry, result: dict[str, Any]) -> None:
        """Keeps a result, in memory and in the file."""
        result = {"name": entry.name, "writes": entry.writes, **result}
        self._keep(result)
        with self.path.open("a") as file:
            file.write(json.dumps(result) + "\n")

    def due(self, entry: Entry, wanted: list[str], again: str | None) -> list[str]:
        """The checks of the entry that have no result yet, or that are to be run again."""
        known = self.known.get(entry.name, {})
        if not entry.writes:
            wanted = [c for c in wanted if c != "generate"]
        if again == "all":
            return wanted
        if again is None and known.get("build", {}).get("status") == "none":
            return []
        bad = ("fails", "differs", "crash", "timeout") + (("none",) if again == "none" else ())
        return [c for c in wanted if c not in known or (again is not None and known[c]["status"] in bad)] or (
            wanted if again == "none" and known.get("build", {}).get("status") == "none" else []
        )


class Child:
    """A forked process that runs the checks of one entry. The parent has imported the libraries and used no device."""

    def __init__(self, entry: Entry, checks: list[str], log: Path | None) -> None:
        self.entry, self.left = entry, list(checks)
        self._file = tempfile.NamedTemporaryFile(prefix="torch_tpu-models-", mode="r")  # noqa: SIM115
        self.last = time.monotonic()
        self.pid = os.fork()
        if self.pid == 0:
            self._run(log)

    def _run(self, log: Path | None) -> None:
        try:
            target = os.open(log or os.devnull, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(target, 1)
            os.dup2(target, 2)
            with open(self._file.name, "w") as stream:
                checking.run(self.entry, self.left, checking.write(stream))
        finally:
            os._exit(0)

    def results(self) -> list[dict[str, Any]]:
        """What has been reported since the last question."""
        found = [json.loads(line) for line in self._file.readlines()]
        if found:
            self.last = time.monotonic()
        for result in found:
            with contextlib.suppress(ValueError):
                self.left.remove(result["check"])
            if result["check"] == "build" and result["status"] == "none":
                self.left = []
        return found

    def ended(self) -> int | None:
        """The wait status of the process if it has ended."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        return status if pid else None

    def kill(self) -> None:
        """Ends the process."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


class Progress:
    """A line with what is done, what failed and how long the rest takes."""

    def __init__(self, total: int) -> None:
        self._total, self._done, self._bad = total, 0, 0
        self._start, self._last = time.monotonic(), 0.0

    def bad(self, status: str) -> None:
        """Counts a result that is no success."""
        self._bad += status not in ("same", "none")

    def done(self, name: str) -> None:
        """Counts an entry and redraws now and then."""
        self._done += 1
        now, terminal = time.monotonic(), sys.stderr.isatty()
        if now - self._last < (0.5 if terminal else 20) and self._done < self._total:
            return
        self._last = now
        left = (now - self._start) / self._done * (self._total - self._done)
        bar = "#" * (30 * self._done // self._total)
        text = f"[{bar:<30}] {self._done}/{self._total}, {self._bad} checks failing, {left / 60:.0f} min left: {name}"[
            :118
        ]
        print(f"\r\033[K{text}" if terminal else text, end="" if terminal else "\n", file=sys.stderr, flush=True)


def _preload() -> None:
    """Imports what every child would, most of what its run would take; none of it starts the device."""
    import torch._decomp
    import torch._dynamo
    import torch._inductor
    import torch._refs  # noqa: F401
    from transformers import BertModel, CLIPModel, GenerationMixin, LlamaForCausalLM, T5ForConditionalGeneration  # noqa: F401

    import torch_tpu.programs.eager
    import torch_tpu.tracing.program  # noqa: F401
    from torch_tpu.lowering import registry

    registry.load()
    with contextlib.suppress(ImportError):
        import_timm()


def sweep(
    todo: list[tuple[Entry, list[str]]], results: Results, jobs: int, timeout: float, log: Path | None = None
) -> None:
    """Runs the entries, ``jobs`` at a time."""
    queue = list(reversed(todo))
    running: list[Child] = []
    progress = Progress(len(todo))
    _preload()
    while queue or running:
        while queue and len(running) < jobs:
            running.append(Child(*queue.pop(), log))
        time.sleep(0.05)
        for child in list(running):
            status = child.ended()
            for result in child.results():
                progress.bad(result["status"])
                results.add(child.entry, result)
            hung = status is None and time.monotonic() - child.last > timeout
            if status is None and not hung:
                continue
            running.remove(child)
            if hung:
                child.kill()
            if child.left:
                lost = child.left.pop(0)
                ended = f"no result after {timeout:g} s" if hung else f"the process ended with wait status {status}"
                results.add(child.entry, {"check": lost, "status": "timeout" if hung else "crash", "detail": ended})
                progress.bad("crash")
            if child.left:
                queue.append((child.entry, child.left))
            else:
                progress.done(child.entry.name)
