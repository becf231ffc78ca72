"""Compiling for TPUs on a machine that has none: whether a program fits, how fast it can be, and why not faster.

``docs/aot.md`` shows its use.
"""

from torch_tpu.aot.compile import Saved, compile, load, save
from torch_tpu.aot.layout import sharded_step
from torch_tpu.aot.meshes import Candidate, compare_meshes
from torch_tpu.aot.report import Estimate, Memory, Report
from torch_tpu.aot.trace import Traced, trace, training_step

__all__ = [
    "Candidate",
    "Estimate",
    "Memory",
    "Report",
    "Saved",
    "Traced",
    "compare_meshes",
    "compile",
    "load",
    "save",
    "sharded_step",
    "trace",
    "training_step",
]
