"""The two workers of :mod:`tests.conformance.tpu`.

``collect`` runs cases and keeps the programs that a TPU would be given, ``compile`` gives them to libtpu.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.conformance.worker import Answer, serve

#: Characters of a compiler's refusal that are kept: the sentence, not the dump of the program after it.
_MESSAGE = 600


def path_of(folder: Path, key: str) -> Path:
    """The file of a program."""
    return folder / key[:2] / f"{key}.mlir.gz"


def keep(folder: Path, text: str) -> str:
    """Writes a program unless it is there, and gives its key, a hash of its text."""
    key = hashlib.sha256(text.encode()).hexdigest()[:16]
    path = path_of(folder, key)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}")
        unfinished.write_bytes(gzip.compress(text.encode(), mtime=0))
        unfinished.replace(path)
    return key


def collect(phase_file: str, folder: Path, limit: int) -> None:
    """Runs cases on the CPU plugin with the programs of a TPU: nothing is emulated."""
    import torch

    from tests.conformance import cases
    from torch_tpu import platform
    from torch_tpu.programs import options

    torch.set_num_threads(1)
    texts: dict[str, None] = {}
    compile_text = options.compile_text

    def noted(text: str, *arguments: Any) -> Any:
        texts[text] = None
        return compile_text(text, *arguments)

    platform.emulates_precision = lambda: False
    options.compile_text = noted

    def run(item: list[str], phase: Callable[[str], None]) -> Answer:
        texts.clear()
        torch.tpu._clear_cache()  # else programs of the case before would not be asked for again
        outcome = cases.run(cases.Case(*item), limit, phase, precision=torch.tpu.Precision.DEFAULT)
        return {**outcome._asdict(), "programs": [keep(folder, text) for text in texts]}

    serve(phase_file, run)


def compile(phase_file: str, folder: Path, target: str) -> None:
    """Compiles programs for one chip, with the options that they would have on it."""
    os.environ["TORCH_TPU_PLATFORM"] = "tpu"  # decides the options; nothing starts it

    from torch_tpu import _C
    from torch_tpu.aot import topology
    from torch_tpu.programs import options

    compiler = topology.describe(topology.parse(target))
    flags = options.full_flags()

    def run(item: list[str], phase: Callable[[str], None]) -> Answer:
        phase("tpu")
        text = gzip.decompress(path_of(folder, item[1]).read_bytes()).decode()
        try:
            compiler.compile(text, flags)
        except _C.PjrtError as error:
            return {"status": "fail", "message": str(error)[:_MESSAGE]}
        return {"status": "pass", "message": ""}

    serve(phase_file, run)


if __name__ == "__main__":
    _phase_file, _what, _folder, _setting = sys.argv[1:]
    if _what == "collect":
        collect(_phase_file, Path(_folder), int(_setting))
    else:
        compile(_phase_file, Path(_folder), _setting)
