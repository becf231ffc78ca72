"""A training step laid out over a mesh of chips: data, fully sharded and tensor parallelism, as one program.

The program is that of each chip. Parameters lie in shards: those of the dimension ``fsdp`` along dimension 0, gathered
where they are used, again in the backward pass, and their gradients reduced and scattered (ZeRO stage 3, Rajbhandari
et al. 2020, arXiv:1910.02054, which FSDP2 implements); those of the dimension ``tp`` by columns or rows (Shoeybi et
al. 2019, arXiv:1909.08053). Gradients are averaged over ``dp``. The optimizer works on shards.
"""

from __future__ import annotations

import contextlib
import fnmatch
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module

from torch_tpu.aot.topology import Topology
from torch_tpu.aot.trace import update
from torch_tpu.distributed.mesh import topology_aware_mesh
from torch_tpu.distributed.partition import Partition

_functional = torch.ops._c10d_functional
_DIMENSIONS = ("dp", "fsdp", "tp")

_library = torch.library.Library("tpu", "FRAGMENT")
_library.define("optimization_barrier(Tensor x) -> Tensor")
_library.impl("optimization_barrier", lambda x: x.clone(), "CompositeExplicitAutograd")


def mesh_on(place: Topology, sizes: Mapping[str, int]) -> Partition:
    """The mesh on a slice's chips, its dimensions on axes of the slice where that is possible.

    Args:
        place: The slice.
        sizes: Of the dimensions ``dp``, ``fsdp`` and ``tp``, the outermost first; those that are left out are 1.

    Raises:
        ValueError: There is no such dimension, or the sizes do not multiply to the slice's devices.
    """
    if unknown := [n for n in sizes if n not in _DIMENSIONS]:
        raise ValueError(f"A mesh has the dimensions dp, fsdp and tp, not {', '.join(unknown)}.")
    if math.prod(sizes.values()) != place.chips:
        text = " x ".join(f"{n} {k}" for n, k in sizes.items())
        raise ValueError(
            f"The mesh {text} has {math.prod(sizes.values())} places, and {place.name} {place.chips} chips."
        )
    try:
        ids = topology_aware_mesh(
            [*sizes.values()], topology=place.shape[::-1], allow_split_physical_axes=True
        )  # device numbers count the first axis fastest
    except ValueError:
        ids = torch.arange(place.chips)
    return Partition(dict(sizes), tuple(ids.flatten().tolist()))


# ---- collectives that gradients pass ---------------------------------------------------------------------------------
def _wait(x: Tensor) -> Tensor:
    return _functional.wait_tensor(x)


class _Gather(torch.autograd.Function):
    """The whole of a shard; the gradient is averaged and scattered."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, rows: int, count: int) -> Tensor:
        ctx.count, ctx.padded = count, shard.shape[0] * count
        return _wait(_functional.all_gather_into_tensor(shard, count, "fsdp"))[:rows]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        if ctx.padded != grad.shape[0]:
            grad = torch.cat([grad, grad.new_zeros(ctx.padded - grad.shape[0], *grad.shape[1:])])
        return _wait(_functional.reduce_scatter_tensor(grad, "avg", ctx.count, "fsdp")), None, None


class _Enter(torch.autograd.Function):
    """Into a tensor-parallel region: every chip has the input, and its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _wait(_functional.all_reduce(grad, "sum", "tp"))


class _Leave(torch.autograd.Function):
    """Out of it: the sum of the chips' parts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _wait(_functional.all_reduce(x, "sum", "tp"))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


# ---- where the parameters are ----------------------------------------------------------------------------------------
def _style(plan: Mapping[str, str], module_name: str) -> str | None:
    return next((style for pattern, style in plan.items() if fnmatch.fnmatchcase(module_name, pattern)), None)


def _styles(module: nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
    """The style of each linear layer that the plan names.

    Raises:
        ValueError: A pattern fits no layer, or a style is neither ``colwise`` nor ``rowwise``.
    """
    found: dict[str, str] = {}
    for name, part in module.named_modules():
        style = _style(plan, name)
        if style is None:
            continue
        if style not in ("colwise", "rowwise") or not isinstance(part, nn.Linear):
            raise ValueError(
                f"{name}, a {type(part).__name__}, is planned as {style!r}: linear layers can be colwise or rowwise."
            )
        found[name] = style
    if idle := [p for p in plan if not any(fnmatch.fnmatchcase(n, p) for n in found)]:
        raise ValueError(f"The plan's pattern {idle[0]!r} fits no module.")
    return found


def _local_shape(name: str, shape: Sequence[int], styles: Mapping[str, str], tp: int) -> list[int]:
    """The shape of a parameter on a chip, before it is sharded over ``fsdp``."""
    layer, _, kind = name.rpartition(".")
    style, local = styles.get(layer), list(shape)
    axis = 0 if style == "colwise" else 1 if style == "rowwise" and kind == "weight" else None
    if axis is not None:
        if local[axis] % tp:
            raise ValueError(f"{name} {tuple(shape)} does not divide among {tp} chips along dimension {axis}.")
        local[axis] //= tp
    return local


@contextlib.contextmanager
def _parallel_layers(module: nn.Module, styles: Mapping[str, str]) -> Iterator[None]:
    """The linear layers with their collectives around them; those that share an input enter with it together."""
    last: list[Tensor] = []  # an input, and the same inside of the region

    def enter(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if not last or last[0] is not args[0]:
            last[:] = [args[0], _Enter.apply(args[0])]
        return (last[1], *args[1:])

    with contextlib.ExitStack() as stack:
        for name, style in styles.items():
            layer = module.get_submodule(name)
            if style == "colwise":
                handle = layer.register_forward_pre_hook(enter)
            else:
                handle = layer.register_forward_hook(_leave)
            stack.callback(handle.remove)
        yield


def _leave(layer: nn.Module, _: Any, out: Tensor) -> Tensor:
    bias: Tensor | None = layer.bias  # type: ignore[assignment]
    return _Leave.apply(out) if bias is None else _Leave.apply(out - bias) + bias


@contextlib.contextmanager
def _gathered_again(shards: Mapping[int, tuple[Tensor, int]], count: int) -> Iterator[None]:
    """What the backward pass needs of a gathered parameter is gathered again there instead of being kept.

    Args:
        shards: Of each gathered parameter, by its storage: the shard, and how many rows it stands for.
        count: Chips of ``fsdp``.
    """

    def pack(t: Tensor) -> Any:
        found = shards.get(t.untyped_storage()._cdata)
        return t if found is None else (*found, t.shape, t.stride(), t.storage_offset())

    def unpack(saved: Any) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        shard, _, sizes, strides, offset = saved
        again = torch.ops.tpu.optimization_barrier(shard.detach())  # else XLA would keep the first
        whole = _wait(_functional.all_gather_into_tensor(again, count, "fsdp"))
        return whole.as_strided(sizes, strides, offset)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def sharded_step(
    module: nn.Module,
    loss: Callable[..., Tensor],
    mesh: Mapping[str, int],
    plan: Mapping[str, str] | None = None,
    *,
    lr: float = 1e-3,
    weight_decay: float = 0.01,
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A training step with AdamW over a mesh, as the function of one chip, for :func:`torch_tpu.aot.compile`.

    Args:
        module: The model, whole; on the ``meta`` device it needs no memory. Attention must take its number of heads
            from the sizes that it gets, as Transformers' models do.
        loss: Called with the module and the chip's batch; returns a scalar.
        mesh: Sizes of the dimensions ``dp``, ``fsdp`` and ``tp``.
        plan: For ``tp``: patterns of module names with ``colwise`` or ``rowwise``, as Transformers' ``tp_plan``.
        lr: The learning rate.
        weight_decay: AdamW's.

    Returns:
        The function, and its arguments before the chip's batch: shards of the parameters, buffers, and the optimizer's
        state, as tensors without memory. It gives the loss; parameters and state are updated where they are.

    Raises:
        ValueError: The plan does not fit the module or the mesh.
    """
    dp, fsdp, tp = (mesh.get(name, 1) for name in _DIMENSIONS)
    styles = _styles(module, plan or {}) if tp > 1 else {}
    if tp > 1 and not styles:
        raise ValueError("A mesh with tp needs a plan: which linear layers are colwise and which rowwise.")
    whole = {n: p for n, p in module.named_parameters() if p.requires_grad}
    local = {n: _local_shape(n, p.shape, styles, tp) for n, p in whole.items()}
    names = [*whole]

    def shard_of(n: str) -> Tensor:
        rows, *rest = local[n] or [1]
        shape = [-(-rows // fsdp), *rest] if fsdp > 1 else local[n]
        return torch.empty(shape, dtype=whole[n].dtype, device="meta")

    def fresh() -> dict[str, Tensor]:
        return {n: shard_of(n) for n in names}

    steps = {n: torch.empty((), device="meta") for n in names}
    buffers = {n: b for n, b in module.named_buffers()}
    parameters = {n: p.requires_grad_() for n, p in fresh().items()}

    def step(
        shards: dict[str, Tensor],
        buffers: dict[str, Tensor],
        exp_avg: dict[str, Tensor],
        exp_avg_sq: dict[str, Tensor],
        steps: dict[str, Tensor],
        *batch: Any,
    ) -> Tensor:
        used, sources = dict(shards), {}
        if fsdp > 1:
            for n in names:
                used[n] = _Gather.apply(shards[n], local[n][0] if local[n] else 1, fsdp).reshape(local[n])
                sources[used[n].untyped_storage()._cdata] = (shards[n], used[n].shape[0] if local[n] else 1)
        with (
            _reparametrize_module(module, {**used, **buffers}, tie_weights=True),
            _parallel_layers(module, styles),
            _gathered_again(sources, fsdp),
        ):
            value = loss(module, *batch)
        grads = list(torch.autograd.grad(value, [shards[n] for n in names]))
        with torch.no_grad():
            if dp > 1:
                grads = [_wait(_functional.all_reduce(g, "avg", "dp")) for g in grads]
            update(names, [shards[n] for n in names], grads, exp_avg, exp_avg_sq, steps, lr, weight_decay)
        return value.detach()

    return step, (parameters, buffers, fresh(), fresh(), steps)
