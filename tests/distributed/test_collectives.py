"""Every collective of c10d on device tensors gives what Gloo gives on CPU tensors, or what its definition says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed.harness import run

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.int8,
]
MOVED = [*DTYPES, torch.bool, torch.int16, torch.complex64, torch.float8_e4m3fn]


def values(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    g = torch.Generator().manual_seed(100 + rank)
    return torch.randint(0, 5, shape, generator=g).to(dtype)


def same(ours: torch.Tensor, expected: torch.Tensor) -> None:
    assert ours.device.type == "tpu", ours.device
    ours = ours.cpu()
    if ours.dtype == torch.float8_e4m3fn:
        ours, expected = ours.view(torch.uint8), expected.view(torch.uint8)
    torch.testing.assert_close(ours, expected, rtol=0, atol=0)


def parts(world: int, shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    return [values(r, shape, dtype) for r in range(world)]


# ---- reductions -----------------------------------------------------------------------------------------------------
OPS: dict[str, Any] = {
    "SUM": lambda xs: sum(xs[1:], xs[0]),
    "PRODUCT": lambda xs: torch.stack([x.double() for x in xs]).prod(0),
    "MIN": lambda xs: torch.stack([x.double() for x in xs]).amin(0),
    "MAX": lambda xs: torch.stack([x.double() for x in xs]).amax(0),
}


def all_reduce(rank: int, world: int, dtype: torch.dtype) -> None:
    for name, definition in OPS.items():
        x = values(rank, (3, 5), dtype).to("tpu")
        dist.all_reduce(x, op=getattr(dist.ReduceOp, name))
        same(x, definition(parts(world, (3, 5), dtype)).to(dtype))
    x = values(rank, (3, 5), dtype).to("tpu")
    dist.all_reduce(x, op=dist.ReduceOp.AVG)
    total = OPS["SUM"](parts(world, (3, 5), dtype))
    same(x, total.div(world, rounding_mode=None if dtype.is_floating_point else "trunc").to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_reduce(dtype: torch.dtype) -> None:
    run(2, all_reduce, dtype)


def bits_and_others(rank: int, world: int) -> None:
    for name, fold in [("BAND", torch.bitwise_and), ("BOR", torch.bitwise_or), ("BXOR", torch.bitwise_xor)]:
        x = values(rank, (7,), torch.int32).to("tpu")
        dist.all_reduce(x, op=getattr(dist.ReduceOp, name))
        xs = parts(world, (7,), torch.int32)
        expected = xs[0]
        for other in xs[1:]:
            expected = fold(expected, other)
        same(x, expected)
    z = torch.complex(torch.full((3,), float(rank)), torch.ones(3)).to("tpu")
    dist.all_reduce(z)
    same(z, torch.complex(torch.full((3,), float(sum(range(world)))), torch.full((3,), float(world))))
    flags = torch.tensor([rank == 0, True, False], device="tpu")
    dist.all_reduce(flags)
    same(flags, torch.tensor([True, True, False]))
    # PREMUL_SUM: each rank scales its own contribution.
    x = values(rank, (4,), torch.float32).to("tpu")
    dist.all_reduce(x, op=dist._make_nccl_premul_sum(0.5 + rank))
    xs = parts(world, (4,), torch.float32)
    same(x, sum((v * (0.5 + r) for r, v in enumerate(xs[1:], 1)), xs[0] * 0.5))
    x = values(rank, (4,), torch.float32).to("tpu")
    dist.all_reduce(x, op=dist._make_nccl_premul_sum(torch.tensor([2.0], device="tpu")))
    same(x, 2 * sum(xs[1:], xs[0]))


def test_bitwise_complex_bool_and_scaled_sums() -> None:
    run(2, bits_and_others)


def reduce_(rank: int, world: int) -> None:
    for root in range(world):
        mine = values(rank, (6,), torch.float32)
        x = mine.to("tpu")
        dist.reduce(x, root)
        same(x, OPS["SUM"](parts(world, (6,), torch.float32)) if rank == root else mine)
        x = mine.to("tpu")
        dist.reduce(x, root, op=dist.ReduceOp.AVG)
        same(x, OPS["SUM"](parts(world, (6,), torch.float32)) / world if rank == root else mine)


def test_reduce_leaves_other_ranks_alone() -> None:
    run(2, reduce_)


def reduce_scatter(rank: int, world: int) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        whole = parts(world, (2 * world, 3), dtype)
        source = whole[rank].to("tpu")
        out = torch.empty(2, 3, dtype=dtype, device="tpu")
        dist.reduce_scatter_tensor(out, source)
        same(out, OPS["SUM"](whole)[2 * rank : 2 * rank + 2])
        same(source, whole[rank])
        dist.reduce_scatter_tensor(out, source, op=dist.ReduceOp.MAX)
        same(out, OPS["MAX"](whole)[2 * rank : 2 * rank + 2].to(dtype))
        dist.reduce_scatter(out, list(source.chunk(world)))
        same(out, OPS["SUM"](whole)[2 * rank : 2 * rank + 2])
    dist.reduce_scatter_tensor(out.float(), source.float(), op=dist.ReduceOp.AVG)
    sizes = [r + 1 for r in range(world)]  # unequal
    xs = [[values(10 * r + i, (n,), torch.float32) for i, n in enumerate(sizes)] for r in range(world)]
    out = torch.zeros(sizes[rank], device="tpu")
    dist.reduce_scatter(out, [x.to("tpu") for x in xs[rank]])
    same(out, sum((xs[r][rank] for r in range(1, world)), xs[0][rank]))


def test_reduce_scatter() -> None:
    run(2, reduce_scatter)


# ---- moves ----------------------------------------------------------------------------------------------------------
def broadcast_and_gathers(rank: int, world: int, dtype: torch.dtype) -> None:
    xs = parts(world, (2, 3), dtype)
    for root in range(world):
        x = xs[rank].to("tpu")
        dist.broadcast(x, root)
        same(x, xs[root])
    mine = xs[rank].to("tpu")
    outs = [torch.zeros(2, 3).to(dtype).to("tpu") for _ in range(world)]
    dist.all_gather(outs, mine)
    for out, x in zip(outs, xs, strict=True):
        same(out, x)
    whole = torch.empty(2 * world, 3, dtype=dtype, device="tpu")
    dist.all_gather_into_tensor(whole, mine)
    same(whole, torch.cat(xs))
    dist.gather(mine, outs if rank == 0 else None, dst=0)
    if rank == 0:
        for out, x in zip(outs, xs, strict=True):
            same(out, x)
    target = torch.empty(2, 3, dtype=dtype, device="tpu")
    sources = [values(20 + r, (2, 3), dtype) for r in range(world)]
    dist.scatter(target, [s.to("tpu") for s in sources] if rank == 1 else None, src=1)
    same(target, sources[rank])


@pytest.mark.parametrize("dtype", MOVED, ids=str)
def test_moves(dtype: torch.dtype) -> None:
    run(2, broadcast_and_gathers, dtype)


def unequal_all_gather(rank: int, world: int) -> None:
    sizes = [3, 1, 0, 2][:world]
    xs = [values(r, (n, 2), torch.float32) for r, n in enumerate(sizes)]
    outs = [torch.zeros(n, 2, device="tpu") for n in sizes]
    dist.all_gather(outs, xs[rank].to("tpu"))
    for out, x in zip(outs, xs, strict=True):
        same(out, x)


def test_all_gather_of_unequal_sizes() -> None:
    run(2, unequal_all_gather)
    run(4, unequal_all_gather)


def exchange(rank: int, world: int) -> None:
    xs = parts(world, (2 * world, 3), torch.float32)
    out = torch.empty(2 * world, 3, device="tpu")
    dist.all_to_all_single(out, xs[rank].to("tpu"))
    same(out, torch.cat([x.chunk(world)[rank] for x in xs]))
    # rank r sends r + c + 1 rows to rank c
    counts = [[r + c + 1 for c in range(world)] for r in range(world)]
    data = [values(30 + r, (sum(counts[r]), 2), torch.int64) for r in range(world)]
    received = [counts[r][rank] for r in range(world)]
    out = torch.empty(sum(received), 2, dtype=torch.int64, device="tpu")
    dist.all_to_all_single(out, data[rank].to("tpu"), received, counts[rank])
    same(out, torch.cat([data[r].split(counts[r])[rank] for r in range(world)]))
    outs = [torch.empty(n, 2, dtype=torch.int64, device="tpu") for n in received]
    dist.all_to_all(outs, [t.to("tpu") for t in data[rank].split(counts[rank])])
    for r, piece in enumerate(outs):
        same(piece, data[r].split(counts[r])[rank])


def test_all_to_all() -> None:
    run(2, exchange)
    run(4, exchange)


def point_to_point(rank: int, world: int) -> None:
    x = values(rank, (5,), torch.float32).to("tpu")
    if rank == 0:
        dist.send(x, 1, tag=3)
        y = torch.empty(5, device="tpu")
        assert dist.recv(y) == 1
        same(y, values(1, (5,), torch.float32))
    else:
        y = torch.empty(5, device="tpu")
        dist.recv(y, 0, tag=3)
        same(y, values(0, (5,), torch.float32))
        dist.send(x, 0)
    a, b = torch.zeros(4, 4, device="tpu"), values(rank, (4,), torch.float32).to("tpu")
    other = 1 - rank
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, b, other), dist.P2POp(dist.irecv, a.T[1], other)]  # a column, which is strided
    )
    for work in works:
        work.wait()
    expected = torch.zeros(4, 4)
    expected[:, 1] = values(other, (4,), torch.float32)
    same(a, expected)


def test_send_and_receive() -> None:
    run(2, point_to_point)


# ---- memory ---------------------------------------------------------------------------------------------------------
def aliases(rank: int, world: int) -> None:
    x = torch.arange(6.0, device="tpu").reshape(2, 3)
    kept, copy, row = x.T, x.clone(), x[1]
    dist.all_reduce(row)
    same(x, torch.tensor([[0.0, 1, 2], [3.0 * world, 4.0 * world, 5.0 * world]]))
    same(kept, x.cpu().T)
    same(copy, torch.arange(6.0).reshape(2, 3))  # shared x's memory until then
    column = x[:, 1]
    dist.all_reduce(column)
    same(x[:, 1], torch.tensor([1.0 * world, 4.0 * world * world]))
    rows = torch.zeros(world, 4, device="tpu")
    dist.all_gather(list(rows), torch.full((4,), float(rank), device="tpu"))
    same(rows, torch.arange(float(world))[:, None].expand(world, 4))
    whole = torch.full((world * 2,), -1.0, device="tpu")
    own = whole[2 * rank : 2 * rank + 2]
    own.fill_(rank)
    dist.all_gather_into_tensor(whole, own)  # the input is a part of the output
    same(whole, torch.arange(float(world)).repeat_interleave(2))
    fresh = torch.empty(3, device="tpu")  # nobody has written it
    fresh[1:].fill_(1.0)
    dist.all_reduce(fresh[1:])
    same(fresh[1:], torch.full((2,), float(world)))
    big = torch.ones(1 << 16, device="tpu")
    for _ in range(20):  # programs are in flight when the memory changes
        half = big * 0.5
        dist.all_reduce(big)
        big *= 0.5
        half += 1
    same(big, torch.full((1 << 16,), (world / 2) ** 20))
    same(half, torch.full((1 << 16,), 0.5 * (world / 2) ** 19 + 1))


def test_views_and_copies_keep_their_values() -> None:
    run(2, aliases)


def asynchronous(rank: int, world: int) -> None:
    xs = [torch.full((100,), float(i + rank), device="tpu") for i in range(20)]
    works = [dist.all_reduce(x, async_op=True) for x in xs]
    for work in works:
        work.wait()
        assert work.is_completed() and work.is_success()
    for i, x in enumerate(xs):
        same(x, torch.full((100,), float(sum(i + r for r in range(world)))))
    y = torch.ones(3, device="tpu")
    work = dist.all_reduce(y, async_op=True)
    then = work.get_future().then(lambda f: f.value()[0] * 2)
    same(then.wait(), torch.full((3,), 2.0 * world))
    with dist._coalescing_manager(async_ops=True) as manager:
        for x in xs[:3]:
            dist.all_reduce(x)
    manager.wait()
    same(xs[0], torch.full((100,), float(world * sum(range(world)))))


def test_asynchronous_work() -> None:
    run(2, asynchronous)


# ---- groups ---------------------------------------------------------------------------------------------------------
def groups(rank: int, world: int) -> None:
    overlapping = [dist.new_group([0, 1, 2]), dist.new_group([1, 2, 3]), dist.new_group([3, 0])]
    for members, group in zip([[0, 1, 2], [1, 2, 3], [0, 3]], overlapping, strict=True):
        if rank in members:
            x = torch.tensor([float(rank)], device="tpu")
            dist.all_reduce(x, group=group)
            same(x, torch.tensor([float(sum(members))]))
    mesh = dist.init_device_mesh("tpu", (2, 2), mesh_dim_names=("dp", "tp"))
    x = torch.tensor([float(rank)], device="tpu")
    dist.all_reduce(x, group=mesh.get_group("tp"))
    same(x, torch.tensor([float(rank // 2 * 4 + 1)]))
    dist.barrier()
    dist.monitored_barrier(group=dist.new_group([0, 1, 2, 3], backend="gloo"))


def test_groups_that_overlap() -> None:
    run(4, groups)


def objects(rank: int, world: int) -> None:
    got: list[Any] = [None] * world
    dist.all_gather_object(got, {"rank": rank, "text": "x" * rank})
    assert got == [{"rank": r, "text": "x" * r} for r in range(world)]
    box = [("a", 1) if rank == 0 else None]
    dist.broadcast_object_list(box, 0)
    assert box == [("a", 1)]
    out: list[Any] = [None]
    dist.scatter_object_list(out, [f"for {r}" for r in range(world)] if rank == 0 else None, 0)
    assert out == [f"for {rank}"]


def test_objects() -> None:
    run(2, objects)


def functional(rank: int, world: int) -> None:
    import torch.distributed._functional_collectives as funcol

    x = values(rank, (2, 3), torch.float32).to("tpu")
    xs = parts(world, (2, 3), torch.float32)
    same(funcol.all_reduce(x, "sum", dist.group.WORLD) + 0, sum(xs[1:], xs[0]))
    same(funcol.all_gather_tensor(x, 0, dist.group.WORLD) + 0, torch.cat(xs))
    same(x, xs[rank])
    ys = parts(world, (2 * world,), torch.float32)
    scattered = funcol.reduce_scatter_tensor(ys[rank].to("tpu"), "sum", 0, dist.group.WORLD)
    same(scattered + 0, sum(ys[1:], ys[0]).chunk(world)[rank])


def test_functional_collectives() -> None:
    run(2, functional)


# ---- wrong calls ----------------------------------------------------------------------------------------------------
def wrong(rank: int, world: int) -> None:
    with pytest.raises(RuntimeError, match=r"on 'tpu'|No backend type"):
        dist.distributed_c10d._get_default_group()._get_backend(torch.device("tpu")).allreduce([torch.ones(3)])
    with pytest.raises(ValueError, match="2 times the elements"):
        dist.all_gather_into_tensor(torch.empty(3, device="tpu"), torch.ones(2, device="tpu"))
    with pytest.raises(ValueError, match="do not divide among 2 ranks"):
        dist.all_to_all_single(torch.empty(3, device="tpu"), torch.ones(3, device="tpu"))
    x = torch.ones(2, device="tpu")
    dist.all_reduce(x)  # nothing is lost
    same(x, torch.full((2,), float(world)))


def test_wrong_calls_are_errors_and_change_nothing() -> None:
    run(2, wrong)
