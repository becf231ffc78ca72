"""The environment of a program that runs as several processes: ``torch.tpu.distributed.set_tpu_launch_env``.

``torchrun`` sets all of it but what libtpu needs to know about the other processes of a slice, and where the program
runs under a scheduler that only names the hosts.
"""

from __future__ import annotations

import os

#: As torchrun's default.
MASTER_PORT = 29500
#: The first of the ports on which the processes of a host talk to those of others. Source: libtpu's
#: ``TPU_PROCESS_ADDRESSES``, as Cloud TPU's and JAX's documentation of several processes per host describe it.
PROCESS_PORT = 8476


def launch_env(*, nnodes: int | None = None, nproc_per_node: int | None = None) -> dict[str, str]:
    """What :func:`set_tpu_launch_env` sets.

    Args:
        nnodes: Hosts; default: ``NNODES``, else the number of names in ``TPU_WORKER_HOSTNAMES``, else 1.
        nproc_per_node: Processes on each host; default: ``LOCAL_WORLD_SIZE``, else the host's devices.

    Raises:
        ValueError: The numbers do not fit the host names, or are not positive.
    """
    hosts = [name.strip() for name in os.environ.get("TPU_WORKER_HOSTNAMES", "").split(",") if name.strip()]
    nodes = nnodes if nnodes is not None else int(os.environ.get("NNODES", len(hosts) or 1))
    if nproc_per_node is None:
        nproc_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", 0)) or _devices()
    if nodes < 1 or nproc_per_node < 1:
        raise ValueError(
            f"There must be at least one host and one process on each, got nnodes={nodes} and "
            f"nproc_per_node={nproc_per_node}."
        )
    if hosts and len(hosts) < nodes:
        raise ValueError(f"nnodes is {nodes}, and TPU_WORKER_HOSTNAMES names {len(hosts)} hosts: {', '.join(hosts)}.")
    hosts = hosts[:nodes] or ["localhost"]
    node = int(os.environ.get("NODE_RANK", os.environ.get("TPU_WORKER_ID", os.environ.get("JOB_COMPLETION_INDEX", 0))))
    if not 0 <= node < nodes:
        raise ValueError(f"This host's number is {node} (NODE_RANK, TPU_WORKER_ID or JOB_COMPLETION_INDEX) of {nodes}.")
    addresses = [f"{host}:{PROCESS_PORT + i}" for host in hosts for i in range(nproc_per_node)]
    return {
        "NNODES": str(nodes),
        "NODE_RANK": str(node),
        "NPROC_PER_NODE": str(nproc_per_node),
        "MASTER_ADDR": os.environ.get("MASTER_ADDR", hosts[0]),
        "MASTER_PORT": os.environ.get("MASTER_PORT", str(MASTER_PORT)),
        "TPU_PROCESS_ADDRESSES": ",".join(addresses),
    }


def set_tpu_launch_env(*, nnodes: int | None = None, nproc_per_node: int | None = None) -> dict[str, str]:
    """Sets the environment variables that the processes of a program on a TPU slice share; call it before they start.

    Args:
        nnodes: Hosts; default: ``NNODES``, else the number of names in ``TPU_WORKER_HOSTNAMES``, else 1.
        nproc_per_node: Processes on each host; default: ``LOCAL_WORLD_SIZE``, else the host's devices.

    Returns:
        What was set: ``NNODES``, ``NODE_RANK``, ``NPROC_PER_NODE``, ``MASTER_ADDR``, ``MASTER_PORT`` and
        ``TPU_PROCESS_ADDRESSES`` (``host:port`` of each process, for libtpu).

    Raises:
        ValueError: The numbers do not fit the host names, or are not positive.
    """
    env = launch_env(nnodes=nnodes, nproc_per_node=nproc_per_node)
    os.environ.update(env)
    return env


def _devices() -> int:
    from torch_tpu import platform

    return max(platform.device_count(), 1)
