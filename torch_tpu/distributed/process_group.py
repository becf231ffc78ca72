"""Registers the backend ``tpu_dist`` and makes its process groups.

On a platform whose device memory is the host's (XLA's CPU backend) the bytes move through Gloo, which reads and writes
the devices' arrays in place (``csrc/distributed/``).
"""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist

from torch_tpu import _C

#: The backend's name, and the one that the device's own name stands for.
NAMES = ("tpu_dist", "tpu")


def _create(options: Any, _: Any) -> Any:
    """The c10d backend of one group; called by ``torch.distributed`` on each rank that is in it.

    Args:
        options: c10d's ``DistributedBackendOptions``: store, rank and size in the group, timeout, global ranks.
    """
    if _C._platform_info()["name"] != "cpu":
        raise NotImplementedError(
            "The process group 'tpu_dist' moves bytes through host memory, on the 'cpu' platform. Set "
            "TORCH_TPU_PLATFORM=cpu, or use one process and a mesh of its local devices."
        )
    seconds = options.timeout.total_seconds()
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    # torchrun starts processes anew with the store of those that died: what they left must not be found.
    store = dist.PrefixStore(f"start-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/", options.store)
    host = dist.ProcessGroupGloo(
        dist.PrefixStore("host/", store), options.group_rank, options.group_size, options.timeout
    )
    return _C._host_process_group(
        host,
        dist.PrefixStore("tpu/", store),
        options.group_id or "default",
        ranks,
        options.group_rank,
        options.group_size,
        seconds,
    )


def register() -> None:
    """Makes ``tpu_dist`` (or ``tpu``) a name that ``init_process_group`` knows, and the default of the device."""
    if not dist.is_available():
        return
    for name in NAMES:
        dist.Backend.register_backend(name, _create, extended_api=True, devices=["tpu"])
