"""Data-parallel training under torchrun that goes on after a rank has died.

``torchrun --standalone --nproc-per-node 2 --max-restarts 2 examples/train_ddp.py --checkpoints FOLDER`` trains a
network on the digits of scikit-learn, each rank on its part, and saves after each epoch with
torch.distributed.checkpoint. When a rank dies, torchrun starts all of them anew, and they go on from the last whole
checkpoint. Without torchrun it is one process.
"""

from __future__ import annotations

import argparse
import datetime
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def newest(folder: Path) -> Path | None:
    """The last checkpoint that was written to its end: its metadata come last."""
    whole = [p for p in sorted(folder.glob("epoch-*")) if (p / ".metadata").exists()]
    return whole[-1] if whole else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="tpu")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--checkpoints", type=Path, required=True, help="folder of the checkpoints")
    parser.add_argument("--die-in-epoch", type=int, help="rank 1 ends in the middle of this epoch, the first time")
    options = parser.parse_args()

    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}.items():
        os.environ.setdefault(name, value)
    backend = "tpu_dist" if options.device == "tpu" else "gloo"
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=60))
    rank = dist.get_rank()

    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    data = TensorDataset(images[:1500], labels[:1500])
    sampler = DistributedSampler(data)
    batches = DataLoader(data, batch_size=50, sampler=sampler, drop_last=True)

    torch.manual_seed(0)
    model = DistributedDataParallel(network().to(options.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    first = 0
    if (checkpoint := newest(options.checkpoints)) is not None:
        weights, state = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": state}, checkpoint_id=str(checkpoint))
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
        first = int(checkpoint.name.removeprefix("epoch-")) + 1

    for epoch in range(first, options.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros((), device=options.device)
        for i, (x, y) in enumerate(batches):
            if (epoch, rank, i) == (options.die_in_epoch, 1, 3) and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
                os._exit(1)
            loss = F.cross_entropy(model(x.to(options.device)), y.to(options.device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total, op=dist.ReduceOp.AVG)
        weights, state = get_state_dict(model, optimizer)
        path = options.checkpoints / f"epoch-{epoch:03d}"
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=str(path))
        if rank == 0:
            print(f"epoch {epoch}: loss {total.item() / len(batches):.4f}", flush=True)

    with torch.no_grad():
        right = model(images[1500:].to(options.device)).argmax(1).cpu() == labels[1500:]
    if rank == 0:
        print(f"accuracy {right.float().mean().item():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
