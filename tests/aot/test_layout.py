"""Training steps over a mesh: XLA's CPU devices run the program of each chip, and it is the step of one device."""

from __future__ import annotations

import functools
import importlib.util
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_tpu import _C, aot
from torch_tpu.aot import ici, topology
from torch_tpu.aot.chips import CHIPS
from torch_tpu.aot.layout import mesh_on
from torch_tpu.aot.meshes import table, usual_meshes
from torch_tpu.aot.trace import trace
from torch_tpu.distributed.partition import Partition

WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """[rows, WIDTH] -> [rows, 3]; three rows do not divide among two or four chips."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x)) * self.scale


PLAN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


@functools.cache
def client() -> Any:
    spec = importlib.util.find_spec("xla_plugins.xla_cpu_pjrt")
    assert spec is not None and spec.origin is not None
    return _C.PjrtClient(str(Path(spec.origin).parent / "xla_cpu_pjrt.so"), {"cpu_device_count": 4})


def tp_part(name: str, whole: Tensor, at: int, count: int) -> Tensor:
    """A chip's columns or rows of a parameter."""
    if ".up." in name:
        return whole.chunk(count, 0)[at]
    if name.endswith("down.weight"):
        return whole.chunk(count, 1)[at]
    return whole


def shard(whole: Tensor, at: int, count: int) -> Tensor:
    rows = whole.reshape(-1, *whole.shape[1:]) if whole.ndim else whole.reshape(1)
    if count == 1:
        return whole
    size = -(-rows.shape[0] // count)
    padded = torch.cat([rows, rows.new_zeros(size * count - rows.shape[0], *rows.shape[1:])])
    return padded[at * size : (at + 1) * size]


def reference(model: Model, batches: list[Tensor]) -> tuple[float, dict[str, Tensor]]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    value = torch.stack([loss(model, b) for b in batches]).mean()
    value.backward()
    optimizer.step()
    return value.item(), {n: p.detach() for n, p in model.named_parameters()}


@pytest.mark.parametrize(
    "mesh",
    [{"dp": 4}, {"fsdp": 4}, {"tp": 4}, {"dp": 2, "fsdp": 2}, {"fsdp": 2, "tp": 2}, {"dp": 2, "tp": 2}],
    ids=lambda m: "x".join(f"{k}{v}" for k, v in m.items()),
)
def test_a_sharded_step_is_the_step_of_one_device(mesh: dict[str, int]) -> None:
    torch.manual_seed(0)
    model = Model()
    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    dp, fsdp, tp = (mesh.get(n, 1) for n in ("dp", "fsdp", "tp"))
    batches = [torch.randn(4, WIDTH) for _ in range(dp * fsdp)]
    step, state = aot.sharded_step(model, loss, mesh, PLAN, lr=1e-2)
    partition = Partition(mesh)
    traced = trace(step, (*state, torch.empty(4, WIDTH, device="meta")), None, "highest", partition)
    program = client().compile(traced.plan.text, {}, num_partitions=4, portable=False)

    arguments, places = [], []
    for device in range(4):
        at = dict(zip(mesh, np.unravel_index(device, tuple(mesh.values())), strict=True))
        d, f, t = (int(at.get(n, 0)) for n in ("dp", "fsdp", "tp"))
        places.append((f, t))
        local = [shard(tp_part(n, p, t, tp), f, fsdp) for n, p in start.items()]
        zeros = [torch.zeros_like(p) for p in local]
        steps = [torch.zeros(()) for _ in local]
        values = [*local, *zeros, *zeros, *steps, batches[d * fsdp + f]]
        arguments.append([np.asarray(values[o.index]) for o in traced.plan.operands])
    results = program.run_on_all(arguments)

    expected_loss, expected = reference(model, batches)
    outputs = traced.plan.outputs
    written = {o.slot: j for j, o in enumerate(outputs) if o.slot >= 0}
    losses = [r[next(j for j, o in enumerate(outputs) if o.slot < 0)] for r in results]
    assert np.mean(losses) == pytest.approx(expected_loss, rel=1e-5)
    for i, (name, value) in enumerate(expected.items()):
        for device, (f, t) in enumerate(places):
            ours = torch.from_numpy(np.array(results[device][written[i]]))
            theirs = shard(tp_part(name, value, t, tp), f, fsdp)
            rows = (
                min(theirs.shape[0], max(0, (tp_part(name, value, t, tp).shape or (1,))[0] - f * theirs.shape[0]))
                if fsdp > 1
                else None
            )
            torch.testing.assert_close(ours[:rows] if rows is not None else ours,
                                       theirs[:rows] if rows is not None else theirs, rtol=2e-4, atol=2e-5)  # fmt: skip


def test_gathered_parameters_are_gathered_again_and_not_kept() -> None:
    step, state = aot.sharded_step(Model(), loss, {"fsdp": 4})
    text = trace(step, (*state, torch.empty(4, WIDTH, device="meta")), None, "medium", Partition({"fsdp": 4})).plan.text
    assert text.count('"stablehlo.all_gather"') > len(list(Model().parameters()))
    assert text.count('"stablehlo.reduce_scatter"') == len(list(Model().parameters()))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, 16), nn.Linear(WIDTH, 16)
        self.down = nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x.sin()
        return self.down(F.silu(self.gate(x)) * self.up(x))


def test_layers_that_share_an_input_sum_its_gradient_once() -> None:
    plan = {"gate": "colwise", "up": "colwise", "down": "rowwise"}
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), Gated())
    step, state = aot.sharded_step(module, loss, {"tp": 4}, {f"1.{n}": style for n, style in plan.items()})
    text = trace(step, (*state, torch.empty(4, WIDTH, device="meta")), None, "medium", Partition({"tp": 4})).plan.text
    assert text.count('"stablehlo.all_reduce"') == 2  # forward: the sum of the rows' parts; backward: of the input


def test_programs_for_slices_and_what_their_collectives_cost() -> None:
    with torch.device("meta"):
        model = Model()
    mesh = {"fsdp": 4, "tp": 2}
    step, state = aot.sharded_step(model, loss, mesh, PLAN)
    report = aot.compile(step, (*state, torch.empty(4, WIDTH, device="meta")), topology="v5p:2x2x2", mesh=mesh)
    (estimate,) = report.estimates
    kinds = {(c.kind, c.dimension, c.group) for c in estimate.collectives}
    assert kinds == {("all_gather", "fsdp", 4), ("reduce_scatter", "fsdp", 4), ("all_reduce", "tp", 2)}
    assert estimate.communication > 0
    assert estimate.seconds[0] <= estimate.seconds[1]
    assert "each of fsdp 4 x tp 2" in str(report) and "all_gather" in report.to_html()
    assert report.to_dict()["estimates"][0]["mesh"] == mesh


def test_bytes_and_seconds_of_an_all_gather() -> None:
    text = (
        '%1 = "stablehlo.all_gather"(%0) {all_gather_dim = 0 : i64, replica_groups = dense<[[0, 1, 2, 3]]> : '
        "tensor<1x4xi64>, use_global_device_ids} : (tensor<256x1024xbf16>) -> (tensor<1024x1024xbf16>)"
    )
    place = topology.parse("v6e:2x2")
    (found,) = ici.collectives(text, Partition({"fsdp": 4}), place, CHIPS["v6e"])
    assert (found.kind, found.dimension, found.bytes) == ("all_gather", "fsdp", 2 * 1024 * 1024)
    assert found.seconds == pytest.approx(2 * 1024 * 1024 * 3 / 4 / CHIPS["v6e"].ici)


def test_meshes_lie_on_the_axes_of_a_slice() -> None:
    mesh = mesh_on(topology.parse("v5p:2x2x4"), {"dp": 4, "tp": 4})
    assert sorted(d for g in mesh.groups("tp") for d in g) == list(range(16))
    for group in mesh.groups("dp"):  # the long axis, whose number counts slowest
        assert [b - a for a, b in itertools.pairwise(group)] == [4, 4, 4]


def test_wrong_meshes_and_plans() -> None:
    with pytest.raises(ValueError, match="dimensions dp, fsdp and tp, not pp"):
        mesh_on(topology.parse("v6e:2x2"), {"pp": 4})
    with pytest.raises(ValueError, match="has 8 places, and v6e:2x2 4 chips"):
        mesh_on(topology.parse("v6e:2x2"), {"dp": 8})
    with pytest.raises(ValueError, match="needs a plan"):
        aot.sharded_step(Model(), loss, {"tp": 2})
    with pytest.raises(ValueError, match=r"'nothing' fits no module"):
        aot.sharded_step(Model(), loss, {"tp": 2}, {**PLAN, "nothing": "colwise"})
    with pytest.raises(ValueError, match="does not divide among 3 chips"):
        aot.sharded_step(Model(), loss, {"tp": 3}, PLAN)


def test_meshes_are_ranked() -> None:
    with torch.device("meta"):
        model, x = Model(), torch.empty(4, WIDTH)
    found = aot.compare_meshes(
        model, loss, (x,), topology="v6e:2x2", plan=PLAN, meshes=[{"dp": 4}, {"fsdp": 4}, {"fsdp": 2, "tp": 2}]
    )
    times = [sum(c.estimate.seconds) / c.batch for c in found if c.estimate is not None]
    assert len(times) == 3 and times == sorted(times)
    shown = table(found)
    assert "fsdp 2 x tp 2" in shown and "communication" in shown
    assert {"dp": 24, "fsdp": 256, "tp": 1} in usual_meshes(6144, tensor=True)
