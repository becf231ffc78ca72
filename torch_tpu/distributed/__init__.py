"""What becomes ``torch.tpu.distributed``, and the process group ``tpu_dist``.

Importing this package registers the backend with ``torch.distributed``; no group is made and no device is touched.
"""

from __future__ import annotations

from torch_tpu.distributed.launch import set_tpu_launch_env
from torch_tpu.distributed.mesh import topology_aware_mesh
from torch_tpu.distributed.process_group import register

__all__ = ["register", "set_tpu_launch_env", "topology_aware_mesh"]
