"""``python -m torch.tpu.distributed``: the ``export`` lines of :func:`set_tpu_launch_env`, for a shell's eval."""

from __future__ import annotations

import argparse
import shlex

from torch_tpu.distributed.launch import launch_env


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m torch.tpu.distributed", description=__doc__)
    parser.add_argument("--nnodes", type=int, help="hosts")
    parser.add_argument("--nproc-per-node", type=int, help="processes on each host")
    options = parser.parse_args()
    try:
        env = launch_env(nnodes=options.nnodes, nproc_per_node=options.nproc_per_node)
    except ValueError as error:
        parser.error(str(error))
    for name, value in env.items():
        print(f"export {name}={shlex.quote(value)}")


if __name__ == "__main__":
    main()
