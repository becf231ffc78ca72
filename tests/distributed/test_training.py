"""Stock distributed training on the device: the loss curve is that of the same run with Gloo on CPU tensors."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests.distributed.harness import run

STEPS = 4


class Block(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Token classifier: embedding, two blocks, head. [batch, 8] int64 -> [batch, 8, 32]."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(16, 32)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make_model() -> Model:
    torch.manual_seed(1)
    return Model()


def batch(step: int, rank: int, size: int = 4) -> torch.Tensor:
    g = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(0, 32, (size, 9), generator=g)


def loss_of(model: nn.Module, data: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(data[:, :-1]).flatten(0, 1), data[:, 1:].flatten())


def train(model: nn.Module, device: str, rank: int, optimizer: Any = None, compiled: bool = False) -> list[float]:
    """Losses of some steps, averaged over the ranks."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2)
    forward = torch.compile(loss_of) if compiled else loss_of
    losses = []
    with torch.tpu.precision(torch.tpu.Precision.HIGHEST):
        for step in range(STEPS):
            loss = forward(model, batch(step, rank).to(device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total = loss.detach().clone()
            dist.all_reduce(total, op=dist.ReduceOp.AVG)
            losses.append(total.item())
    return losses


def close(ours: list[float], reference: list[float]) -> None:
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(reference), rtol=2e-5, atol=2e-6)


# ---- DDP ------------------------------------------------------------------------------------------------------------
def ddp(rank: int, world: int, compiled: bool, bucket_view: bool) -> None:
    curves = []
    for device in ("cpu", "tpu"):
        wrapped = nn.parallel.DistributedDataParallel(make_model().to(device), gradient_as_bucket_view=bucket_view)
        curves.append(train(wrapped, device, rank, compiled=compiled and device == "tpu"))
    close(curves[1], curves[0])
    assert curves[1][-1] < curves[1][0]


@pytest.mark.parametrize("bucket_view", [False, True])
def test_ddp(bucket_view: bool) -> None:
    run(2, ddp, False, bucket_view)


def test_ddp_compiled() -> None:
    run(2, ddp, True, False)


def ddp_details(rank: int, world: int) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)).to("tpu")
    wrapped = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    with wrapped.no_sync():
        wrapped(torch.ones(2, 4, device="tpu") * rank).sum().backward()
    local = model[0].weight.grad.clone()
    wrapped(torch.randn(2, 4, device="tpu")).sum().backward()
    gathered = [torch.empty_like(local) for _ in range(world)]
    dist.all_gather(gathered, model[0].weight.grad)
    torch.testing.assert_close(gathered[0].cpu(), gathered[1].cpu())
    sync = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    assert isinstance(sync[1], nn.SyncBatchNorm)


def test_ddp_no_sync_and_unused_parameters() -> None:
    run(2, ddp_details)


def hooks(rank: int, world: int) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    curves = []
    for device in ("cpu", "tpu"):
        wrapped = nn.parallel.DistributedDataParallel(make_model().to(device))
        wrapped.register_comm_hook(dist.group.WORLD, default_hooks.fp16_compress_hook)
        curves.append(train(wrapped, device, rank))
    torch.testing.assert_close(torch.tensor(curves[1]), torch.tensor(curves[0]), rtol=1e-3, atol=1e-3)


def test_ddp_communication_hook() -> None:
    run(2, hooks)


# ---- FSDP2 ----------------------------------------------------------------------------------------------------------
def shard(model: Model, mesh: Any, **options: Any) -> Model:
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def fsdp(rank: int, world: int, kind: str) -> None:
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

    options: dict[str, Any] = {}
    if kind == "mixed":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if kind == "keep":
        options["reshard_after_forward"] = False
    curves = []
    for device in ("cpu", "tpu"):
        if kind == "offload" and device == "tpu":
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
        if kind == "hybrid":
            mesh = init_device_mesh(device, (2, 2), mesh_dim_names=("replicate", "shard"))
        else:
            mesh = init_device_mesh(device, (world,))
        model = shard(make_model().to(device), mesh, **options)
        curves.append(train(model, device, rank, compiled=kind == "compiled" and device == "tpu"))
    if kind == "mixed":
        torch.testing.assert_close(torch.tensor(curves[1]), torch.tensor(curves[0]), rtol=1e-2, atol=1e-2)
    else:
        close(curves[1], curves[0])
    assert curves[1][-1] < curves[1][0]


@pytest.mark.parametrize("kind", ["plain", "keep", "mixed", "offload", "compiled"])
def test_fsdp2(kind: str) -> None:
    run(2, fsdp, kind)


def test_hsdp() -> None:
    run(4, fsdp, "hybrid")


def checkpointed(rank: int, world: int) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    curves = []
    for device in ("cpu", "tpu"):
        model = make_model().to(device)
        for i, block in enumerate(model.blocks):
            model.blocks[i] = checkpoint_wrapper(block)
        curves.append(train(shard(model, init_device_mesh(device, (world,))), device, rank))
    close(curves[1], curves[0])


def test_activation_checkpointing_with_fsdp2() -> None:
    run(2, checkpointed)


# ---- DTensor and tensor parallelism ---------------------------------------------------------------------------------
def dtensors(rank: int, world: int) -> None:
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("tpu", (world,))
    whole = torch.arange(24.0).reshape(6, 4)
    for placement in (Shard(0), Shard(1), Replicate()):
        d = distribute_tensor(whole.to("tpu"), mesh, [placement])
        torch.testing.assert_close(d.full_tensor().cpu(), whole)
        for other in (Shard(0), Shard(1), Replicate()):
            torch.testing.assert_close(d.redistribute(mesh, [other]).full_tensor().cpu(), whole)
        torch.testing.assert_close((d @ d.T).full_tensor().cpu(), whole @ whole.T, rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(d.sum().full_tensor().cpu(), whole.sum())
    odd = torch.arange(5.0)  # does not divide
    torch.testing.assert_close(distribute_tensor(odd.to("tpu"), mesh, [Shard(0)]).full_tensor().cpu(), odd)
    assert Partial() == Partial()


def test_dtensor() -> None:
    run(2, dtensors)


def tensor_parallel(rank: int, world: int, sequence: bool) -> None:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        PrepareModuleOutput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    curves = []
    for device in ("cpu", "tpu"):
        model = make_model().to(device)
        mesh = init_device_mesh(device, (world,))
        for block in model.blocks:
            plan: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            if sequence:
                plan = {
                    "norm": SequenceParallel(),
                    "up": ColwiseParallel(input_layouts=Shard(1)),
                    "down": RowwiseParallel(output_layouts=Shard(1)),
                }
            parallelize_module(block, mesh, plan)
            if sequence:
                enter = PrepareModuleInput(
                    input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=True
                )
                leave = PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Replicate())
                parallelize_module(parallelize_module(block, mesh, enter), mesh, leave)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
        curves.append(train(model, device, 0, optimizer))  # the same data on all ranks
    close(curves[1], curves[0])


@pytest.mark.parametrize("sequence", [False, True], ids=["tensor", "sequence"])
def test_tensor_and_sequence_parallelism(sequence: bool) -> None:
    run(2, tensor_parallel, sequence)


def two_dimensions(rank: int, world: int) -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    curves = []
    for device in ("cpu", "tpu"):
        mesh = init_device_mesh(device, (2, 2), mesh_dim_names=("dp", "tp"))
        model = make_model().to(device)
        for block in model.blocks:
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
        curves.append(train(model, device, rank // 2, optimizer))
    close(curves[1], curves[0])


def test_fsdp2_with_tensor_parallelism() -> None:
    run(4, two_dimensions)


# ---- pipelines ------------------------------------------------------------------------------------------------------
def pipeline(rank: int, world: int) -> None:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    curves = []
    for device in ("cpu", "tpu"):
        whole = make_model()
        part = nn.Sequential(whole.embed, whole.blocks[0]) if rank == 0 else nn.Sequential(whole.blocks[1], whole.head)
        part = part.to(device)
        stage = PipelineStage(part, rank, world, torch.device(device))
        schedule = Schedule1F1B(
            stage, n_microbatches=2, loss_fn=lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten())
        )
        optimizer = torch.optim.SGD(part.parameters(), lr=0.1)
        curve = []
        with torch.tpu.precision(torch.tpu.Precision.HIGHEST):
            for step in range(STEPS):
                data = batch(step, 0).to(device)
                losses: list[Any] = []
                if rank == 0:
                    schedule.step(data[:, :-1])
                else:
                    schedule.step(target=data[:, 1:], losses=losses)
                    curve.append(torch.stack(losses).mean().item())
                optimizer.step()
                optimizer.zero_grad()
        curves.append(curve)
    if rank == 1:
        close(curves[1], curves[0])


def test_pipeline() -> None:
    run(2, pipeline)


# ---- checkpoints ----------------------------------------------------------------------------------------------------
def save(rank: int, world: int, folder: str) -> list[float]:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model = shard(make_model().to("tpu"), init_device_mesh("tpu", (world,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, "tpu", 0, optimizer)
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)
    return train(model, "tpu", 0, optimizer)


def load(rank: int, world: int, folder: str) -> list[float]:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model = shard(make_model().to("tpu"), init_device_mesh("tpu", (world,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    weights, state = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    return train(model, "tpu", 0, optimizer)


def test_a_checkpoint_goes_on_with_another_number_of_processes() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "checkpoint"))
        expected = run(4, save, path)[0]
        close(run(2, load, path)[0], expected)


# ---- compiled -------------------------------------------------------------------------------------------------------
def compiled_collectives(rank: int, world: int) -> None:
    import torch.distributed._functional_collectives as funcol

    def f(x: torch.Tensor) -> torch.Tensor:
        y = funcol.all_reduce(x * 2, "sum", dist.group.WORLD)
        z = funcol.all_gather_tensor(y + 1, 0, dist.group.WORLD)
        return z.sin() + funcol.reduce_scatter_tensor(z, "sum", 0, dist.group.WORLD).sum()

    x = torch.arange(4.0).reshape(2, 2) + rank
    expected = f(x)
    ours = torch.compile(f, fullgraph=True)(x.to("tpu"))
    assert ours.device.type == "tpu"
    torch.testing.assert_close(ours.cpu(), expected)

    def in_place(x: torch.Tensor) -> torch.Tensor:
        y = x * 3
        dist.all_reduce(y)
        return y + 1

    torch.testing.assert_close(torch.compile(in_place)(x.to("tpu")).cpu(), in_place(x))


def test_functional_collectives_in_compiled_functions() -> None:
    run(2, compiled_collectives)
