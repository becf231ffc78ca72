"""The process group ``tpu_dist`` against Gloo on CPU tensors, as ratios in one run.

Two processes each. Bounds: all_reduce at most 1.15x; a training step at most 1.0x compiled and 1.3x eager. With
``--local`` four devices of one process, in one program, against four processes: at most 1.0x.
"""

from __future__ import annotations

import argparse
import datetime
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn


def _median(function: Callable[[], Any], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        dist.barrier(group=_sync)
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


_sync: Any = None


def pairs(ours: Callable[[], Any], peer: Callable[[], Any], rounds: int, repeats: int) -> tuple[float, float]:
    """Medians of both in seconds, taken in turns."""
    a, b = [], []
    for _ in range(rounds):
        a.append(_median(ours, repeats))
        b.append(_median(peer, repeats))
    return statistics.median(a), statistics.median(b)


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, s, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, d)
        x = x + self.out(y)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    """GPT-2-like: 4 layers, d 256."""

    def __init__(self, vocabulary: int = 1024, width: int = 256, layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList([Block(width, 4) for _ in range(layers)])
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def step_of(kind: str, device: str, compiled: bool) -> Callable[[], Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model: nn.Module = Model().to(device)
    if kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    else:
        mesh = init_device_mesh(device, (dist.get_world_size(),))
        for block in model.blocks:  # type: ignore[union-attr]
            fully_shard(block, mesh=mesh)  # type: ignore[arg-type]
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(0, 1024, (4, 129)).to(device)
    forward = torch.compile(loss_of) if compiled else loss_of

    def step() -> None:
        loss = forward(model, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()

    return step


def worker(rank: int, world: int, port: int, options: argparse.Namespace) -> None:
    global _sync
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.update(address, RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))  # as torchrun does
    torch.set_num_threads(1)
    dist.init_process_group("cpu:gloo,tpu:tpu_dist", timeout=datetime.timedelta(minutes=10))
    _sync = dist.new_group(backend="gloo")
    torch.set_float32_matmul_precision("highest")

    def show(name: str, ours: float, peer: float, bound: float) -> None:
        if rank == 0:
            print(
                f"{name:<44} {ours * 1e3:9.2f} ms {peer * 1e3:9.2f} ms {ours / peer:6.2f}x  (at most {bound})",
                flush=True,
            )

    if rank == 0:
        print(f"{'':<44} {'tpu_dist':>12} {'Gloo, CPU':>12}")
    for size, repeats in ((1 << 20, 60), (64 << 20, 5)):
        a, b = torch.ones(size // 4, device="tpu"), torch.ones(size // 4)
        for _ in range(3):
            dist.all_reduce(a)
            dist.all_reduce(b)
        result = pairs(lambda a=a: dist.all_reduce(a), lambda b=b: dist.all_reduce(b), options.rounds, repeats)
        show(f"all_reduce of {size >> 20} MiB", *result, 1.15)
    for kind in options.kinds:
        for compiled in (False, True):
            ours, peer = step_of(kind, "tpu", compiled), step_of(kind, "cpu", compiled)
            for _ in range(3):
                ours()
                peer()
            result = pairs(ours, peer, options.rounds, 3)
            show(f"{kind} step, {'compiled' if compiled else 'eager'}", *result, 1.0 if compiled else 1.3)
    dist.destroy_process_group()


# ---- four devices of one process, or four processes -----------------------------------------------------------------
def local_devices(rounds: int) -> float:
    """Seconds of a fully sharded step on four devices of this process."""
    from torch_tpu import aot

    torch.set_float32_matmul_precision("highest")
    torch.manual_seed(0)
    model, count = Model(), 4
    step, _ = aot.sharded_step(model, loss_of, {"fsdp": count}, lr=1e-4)
    run = torch.tpu.distributed.spmd({"fsdp": count})(step)  # type: ignore[attr-defined]
    states = []
    for i in range(count):
        parts = {n: _part(p.detach(), i, count).to(f"tpu:{i}") for n, p in model.named_parameters()}
        moments = [{n: torch.zeros_like(p) for n, p in parts.items()} for _ in range(2)]
        steps = {n: torch.zeros((), device=f"tpu:{i}") for n in parts}
        tokens = torch.randint(0, 1024, (4, 129)).to(f"tpu:{i}")
        states.append(({n: p.requires_grad_() for n, p in parts.items()}, {}, *moments, steps, tokens))
    times = []
    for _ in range(3 + rounds * 3):
        start = time.perf_counter()
        [loss.item() for loss in run(states)]
        times.append(time.perf_counter() - start)
    return statistics.median(times[3:])


def _part(whole: torch.Tensor, at: int, count: int) -> torch.Tensor:
    return whole.chunk(count)[at].clone()


def processes(rank: int, world: int, port: int, rounds: int) -> None:
    global _sync
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.update(address, RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    dist.init_process_group("cpu:gloo,tpu:tpu_dist", timeout=datetime.timedelta(minutes=10))
    _sync = dist.new_group(backend="gloo")
    torch.set_float32_matmul_precision("highest")
    step = step_of("fsdp2", "tpu", True)
    for _ in range(3):
        step()
    seconds = _median(step, rounds * 3)
    if rank == 0:
        print(f"seconds {seconds}", flush=True)
    dist.destroy_process_group()


def compare_local(rounds: int) -> None:
    """Runs both in processes of their own, and prints the ratio."""
    seconds = []
    for part in ("devices", "processes"):
        environment = {**os.environ, "TORCH_TPU_NUM_CPU_DEVICES": "4" if part == "devices" else "1"}
        command = [sys.executable, __file__, "--part", part, "--rounds", str(rounds)]
        text = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
        seconds.append(float(text.rpartition("seconds ")[2].split()[0]))
    print(f"{'':<44} {'4 devices':>12} {'4 processes':>12}")
    ours, peer = seconds
    print(f"{'fully sharded step':<44} {ours * 1e3:9.2f} ms {peer * 1e3:9.2f} ms {ours / peer:6.2f}x  (at most 1.0)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each measure (%(default)s)")
    parser.add_argument("--kinds", nargs="*", default=["ddp", "fsdp2"], help="training steps (%(default)s)")
    parser.add_argument("--local", action="store_true", help="devices of one process against processes")
    parser.add_argument("--part", choices=("devices", "processes"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part == "devices":
        print(f"seconds {local_devices(options.rounds)}")
        return
    if options.local:
        compare_local(options.rounds)
        return
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    if options.part == "processes":
        mp.spawn(processes, args=(4, port, options.rounds), nprocs=4)
        return
    mp.spawn(worker, args=(2, port, options), nprocs=2)


if __name__ == "__main__":
    main()
