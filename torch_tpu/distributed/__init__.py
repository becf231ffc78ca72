"""What becomes ``torch.tpu.distributed``, and the process group ``tpu_dist``.

Importing this package registers the backend with ``torch.distributed``; no group is made and no device is touched.
"""

from __future__ import annotations

from typing import Any

from torch_tpu.distributed.launch import set_tpu_launch_env
from torch_tpu.distributed.mesh import topology_aware_mesh
from torch_tpu.distributed.process_group import register

__all__ = ["register", "set_tpu_launch_env", "spmd", "topology_aware_mesh"]


def __getattr__(name: str) -> Any:  # what traces programs is loaded when it is asked for
    if name == "spmd":
        import importlib

        return importlib.import_module("torch_tpu.distributed.local").spmd
    raise AttributeError(f"module 'torch_tpu.distributed' has no attribute {name!r}")
