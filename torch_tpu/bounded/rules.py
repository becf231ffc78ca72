"""How operators work on padded arrays. What has no rule here is compiled for each size.

Element-wise operators may compute garbage from garbage. Where an operator lets elements of an open dimension meet, its
rule first puts the neutral element in place of what is not real.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves, tree_map_only

from torch_tpu.bounded import layout as lay
from torch_tpu.bounded.interpreter import Context, Size, give, layout_of, rule
from torch_tpu.bounded.layout import Dim, Layout, Unbounded
from torch_tpu.lowering.common import highest, lowest
from torch_tpu.stablehlo import ops as hlo

aten = torch.ops.aten
ONE: Dim = (sympy.Integer(1),)


def _static(t: Tensor, *dims: int) -> None:
    """Refuses a tensor some of whose ``dims`` are open."""
    layout = layout_of(t)
    for d in dims:
        if not lay.is_static(layout[d]):
            raise Unbounded(f"a size of {lay.total(layout[d])} where the operator needs a known one")


def _no_sizes(*values: Any) -> None:
    if any(isinstance(x, Size) for x in tree_leaves(values)):
        raise Unbounded("a size among the operator's numbers")


def _dims(t: Tensor, dim: Any) -> list[int]:
    if dim is None or dim == []:
        return [*range(t.ndim)]
    return [d % max(t.ndim, 1) for d in ([dim] if isinstance(dim, int) else dim)]


def _reduced(layout: Layout, dims: Sequence[int], keepdim: bool) -> Layout:
    if keepdim:
        return tuple(ONE if d in dims else dim for d, dim in enumerate(layout))
    return tuple(dim for d, dim in enumerate(layout) if d not in dims)


def _bind(op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    bound = {a.name: a.default_value for a in op._schema.arguments}
    bound.update(zip(bound, args, strict=False))
    return {**bound, **kwargs}


def _simple(c: Context, t: Tensor, index: int | None = None) -> Tensor:
    """A result whose real elements are a prefix of each dimension."""
    return give(t, lay.simple(c.expected(index).shape))


# ---- element by element ---------------------------------------------------------------------------------------------
@rule(
    aten.add.Tensor, aten.clone.default, aten._to_copy.default, aten.detach.default, aten.alias.default,
    aten.copy.default, aten.where.self, aten.lift_fresh_copy.default, aten.contiguous.default,
    aten.zeros_like.default, aten.ones_like.default, aten.empty_like.default, aten.full_like.default,
    aten.rand_like.default, aten.randn_like.default, aten.bernoulli.default, aten.bernoulli.p,
    aten.tril.default, aten.triu.default, aten.masked_fill.Tensor, aten.masked_fill.Scalar, aten.fill.Scalar,
    aten.fill.Tensor, aten.zero.default,
)  # fmt: skip
def pointwise(c: Context, op: OpOverload, *args: Any, **kwargs: Any) -> Tensor:
    """Sizes among the operands are 0-d tensors."""
    layout = lay.broadcast([layout_of(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)])
    if any(isinstance(x, Size) for x in tree_leaves(args)):
        op = getattr(op.overloadpacket, "Tensor", op)
        args = tree_map_only(Size, lambda s: _number(c, s), args)
    out = c.run(op, *args, **kwargs)
    if layout and out.shape != lay.padded(layout, c.bounds):
        return _simple(c, out)
    return give(out, layout)


def _number(c: Context, size: Size) -> Any:
    """A size among numbers: it takes the dtype of a floating result, as numbers do."""
    value = c.value(size)
    dtype = c.expected().dtype
    return value.to(dtype) if isinstance(value, Tensor) and dtype.is_floating_point else value


@rule(aten.native_dropout.default)
def native_dropout(c: Context, op: OpOverload, x: Tensor, *args: Any) -> tuple[Tensor, ...]:
    return tuple(give(t, layout_of(x)) for t in c.run(op, x, *args))


# ---- made from sizes ------------------------------------------------------------------------------------------------
@rule(
    aten.full.default, aten.zeros.default, aten.ones.default, aten.empty.memory_format, aten.rand.default,
    aten.randn.default,
)  # fmt: skip
def filled(c: Context, op: OpOverload, size: Sequence[Any], *args: Any, **kwargs: Any) -> Tensor:
    if args and isinstance(args[0], Size):
        value = c.value(args[0])
        zeros = torch.zeros(c.bounded(size), dtype=c.expected().dtype, device="meta")
        return _simple(c, zeros + value)
    out = c.run(op, c.bounded(size), *args, **_on_meta(kwargs))
    equal = op not in (aten.rand.default, aten.randn.default)
    return give(out, tuple(map(lay.Uniform, lay.simple(c.expected().shape)))) if equal else _simple(c, out)


def _on_meta(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {k: torch.device("meta") if k == "device" else v for k, v in kwargs.items()}


@rule(aten.new_zeros.default, aten.new_ones.default, aten.new_empty.default, aten.new_full.default)
def new(c: Context, op: OpOverload, x: Tensor, size: Sequence[Any], *args: Any, **kwargs: Any) -> Tensor:
    _no_sizes(args)
    return _simple(c, c.run(op, x, c.bounded(size), *args, **_on_meta(kwargs)))


@rule(aten.scalar_tensor.default)
def scalar_tensor(c: Context, op: OpOverload, value: Any, **kwargs: Any) -> Tensor:
    return give(torch.zeros((), dtype=c.expected().dtype, device="meta") + c.value(value), ())


@rule(aten.arange.default, aten.arange.start, aten.arange.start_step)
def arange(c: Context, op: OpOverload, *args: Any, **kwargs: Any) -> Tensor:
    start, step = (0, 1) if len(args) == 1 else (args[0], args[2] if len(args) > 2 else 1)
    expected = c.expected()
    if not expected.dtype.is_floating_point or all(isinstance(x, int | Size) for x in (start, step)):
        count = lay.value_of(lay.expression(expected.shape[0]), c.bounds)
        steps = torch.arange(count, device="meta") * c.value(step) + c.value(start)
        return _simple(c, steps.to(expected.dtype))
    raise Unbounded("arange with fractions")


@rule(torch.ops.tpu.counted_.default)
def counted(c: Context, op: OpOverload, x: Tensor, *args: Any) -> Tensor:
    return _simple(c, c.run(op, x, *args))


# ---- shapes ---------------------------------------------------------------------------------------------------------
@rule(aten.view.default, aten._unsafe_view.default, aten.reshape.default)
def view(c: Context, op: OpOverload, x: Tensor, size: Any) -> Tensor:
    layout = lay.viewed(layout_of(x), [lay.expression(n) for n in c.expected().shape])
    return give(x.reshape(lay.padded(layout, c.bounds)), layout)


@rule(aten.permute.default)
def permute(c: Context, op: OpOverload, x: Tensor, dims: Sequence[int]) -> Tensor:
    return give(c.run(op, x, dims), tuple(layout_of(x)[d] for d in dims))


@rule(aten.transpose.int)
def transpose(c: Context, op: OpOverload, x: Tensor, a: int, b: int) -> Tensor:
    layout = [*layout_of(x)]
    layout[a], layout[b] = layout[b], layout[a]
    return give(c.run(op, x, a, b), tuple(layout))


@rule(aten.t.default)
def t(c: Context, op: OpOverload, x: Tensor) -> Tensor:
    return give(c.run(op, x), layout_of(x)[::-1])


@rule(aten.unsqueeze.default)
def unsqueeze(c: Context, op: OpOverload, x: Tensor, dim: int) -> Tensor:
    layout = [*layout_of(x)]
    layout.insert(dim % (x.ndim + 1), ONE)
    return give(c.run(op, x, dim), tuple(layout))


@rule(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
def squeeze(c: Context, op: OpOverload, x: Tensor, dim: Any = None) -> Tensor:
    layout = layout_of(x)
    gone = [d for d in _dims(x, dim) if lay.total(layout[d]) == 1]
    return give(aten.squeeze.dims(x, gone), tuple(dim for d, dim in enumerate(layout) if d not in gone))


@rule(aten.expand.default)
def expand(c: Context, op: OpOverload, x: Tensor, size: Sequence[Any], **kwargs: Any) -> Tensor:
    shape = c.expected().shape
    have = layout_of(x)
    lead = len(shape) - x.ndim
    layout = tuple(
        lay.Uniform((lay.expression(n),)) if d < lead or lay.total(have[d - lead]) == 1 else have[d - lead]
        for d, n in enumerate(shape)
    )
    return give(x.expand(lay.padded(layout, c.bounds)), layout)


@rule(aten.select.int)
def select(c: Context, op: OpOverload, x: Tensor, dim: int, index: Any) -> Tensor:
    dim %= x.ndim
    layout = layout_of(x)
    rest = tuple(d for i, d in enumerate(layout) if i != dim)
    if isinstance(index, int) and (index >= 0 or lay.is_static(layout[dim])):
        return give(c.run(op, x, dim, index), rest)
    where = c.value(index)
    if isinstance(index, int) and index < 0:
        where = c.value(lay.total(layout[dim])) + index
    return give(x.index_select(dim, _as_index(where)).squeeze(dim), rest)


def _as_index(x: Any) -> Tensor:
    return x.reshape(1) if isinstance(x, Tensor) else torch.full((1,), x, dtype=torch.int64, device="meta")


@rule(aten.slice.Tensor)
def slice_(
    c: Context, op: OpOverload, x: Tensor, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Tensor:
    dim %= x.ndim
    have = layout_of(x)
    size = lay.expression(c.expected().shape[dim])
    if lay.is_static(have[dim]) and not any(isinstance(s, Size) for s in (start, end)):
        return give(c.run(op, x, dim, start, end, step), (*have[:dim], (size,), *have[dim + 1 :]))
    if lay.same(size, lay.total(have[dim])):  # all of it
        return give(c.run(op, x), have)
    if len(lay.without_ones(have[dim])) > 1:
        raise Unbounded("a slice of sizes joined by a view")
    count = lay.value_of(size, c.bounds)
    first: Any = 0 if start is None else c.value(start)
    if isinstance(start, int) and start < 0:
        first = c.value(lay.total(have[dim])) + start
    if isinstance(first, int) and step == 1 and first + count <= x.shape[dim]:
        taken = c.run(op, x, dim, first, first + count)
    else:
        index = (torch.arange(count, device="meta") * step + first).clamp(0, x.shape[dim] - 1)
        taken = x.index_select(dim, index)
    return give(taken, (*have[:dim], (size,), *have[dim + 1 :]))


@rule(aten.slice_backward.default)
def slice_backward(
    c: Context, op: OpOverload, g: Tensor, sizes: Any, dim: int, start: Any, end: Any, step: int
) -> Tensor:
    dim %= g.ndim
    have = layout_of(g)
    size = (lay.expression(c.expected().shape[dim]),)
    layout = (*have[:dim], size, *have[dim + 1 :])
    if lay.is_static(size) and lay.is_static(have[dim]):
        return give(c.run(op, g, lay.padded(layout, c.bounds), dim, start, end, step), layout)
    first: Any = c.value(start)
    if isinstance(start, int) and start < 0:
        first = c.value(size[0]) + start
    zeros = torch.zeros(lay.padded(layout, c.bounds), dtype=g.dtype, device="meta")
    index = (torch.arange(g.shape[dim], device="meta") * step + first).clamp(0, zeros.shape[dim] - 1)
    return give(zeros.index_add(dim, index, c.masked(g, 0, [dim])), layout)


@rule(aten.select_backward.default)
def select_backward(c: Context, op: OpOverload, g: Tensor, sizes: Any, dim: int, index: Any) -> Tensor:
    have = layout_of(g)
    dim %= g.ndim + 1
    layout = (*have[:dim], (lay.expression(c.expected().shape[dim]),), *have[dim:])
    shape = lay.padded(layout, c.bounds)
    if isinstance(index, int) and (index >= 0 or lay.is_static(layout[dim])):
        return give(c.run(op, g, shape, dim, index), layout)
    where = c.value(lay.total(layout[dim])) + index if isinstance(index, int) else c.value(index)
    zeros = torch.zeros(shape, dtype=g.dtype, device="meta")
    return give(zeros.index_add(dim, _as_index(where), g.unsqueeze(dim)), layout)


@rule(aten.cat.default)
def cat(c: Context, op: OpOverload, tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Each part is written where the real elements of those before it end."""
    tensors = [t for t in tensors if t.shape != (0,)]
    dim %= tensors[0].ndim
    layouts = [layout_of(t) for t in tensors]
    for other in layouts[1:]:
        for d, (a, b) in enumerate(zip(layouts[0], other, strict=True)):
            if d != dim and not lay.agree(a, b):
                raise Unbounded("a concatenation of sizes joined in different ways")
    layout = (*layouts[0][:dim], (lay.expression(c.expected().shape[dim]),), *layouts[0][dim + 1 :])
    joined = c.run(op, tensors, dim)
    if all(lay.is_static(one[dim]) for one in layouts[:-1]):  # only the last has an end that moves
        return give(joined, layout)
    value = c.trace.read(joined)
    at: Any = 0
    for part, one in zip(tensors, layouts, strict=True):
        if isinstance(at, Tensor):
            start = c.trace.read(at)
            zero = hlo.constant(0, start.dtype)
            starts = [start if d == dim else zero for d in range(part.ndim)]
            value = hlo.dynamic_update_slice(value, hlo.convert(c.trace.read(part), value.dtype), starts)
        at = at + c.value(lay.total(one[dim]))
    out = torch.empty(value.shape, dtype=value.dtype, device="meta")
    c.trace.bind(out, value)
    return give(out, layout)


@rule(aten.stack.default)
def stack(c: Context, op: OpOverload, tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    layout = [*lay.broadcast([layout_of(t) for t in tensors])]
    layout.insert(dim % (tensors[0].ndim + 1), (sympy.Integer(len(tensors)),))
    return give(c.run(op, tensors, dim), tuple(layout))


@rule(aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int)
def split(c: Context, op: OpOverload, x: Tensor, *args: Any) -> list[Tensor]:
    dim = (args[0] if args else 0) if op is aten.unbind.int else (args[1] if len(args) > 1 else 0)
    dim %= x.ndim
    _static(x, dim)
    _no_sizes(args)
    have = layout_of(x)
    parts = c.run(op, x, *args)
    if op is aten.unbind.int:
        return [give(p, (*have[:dim], *have[dim + 1 :])) for p in parts]
    return [give(p, (*have[:dim], (sympy.Integer(p.shape[dim]),), *have[dim + 1 :])) for p in parts]


@rule(aten.constant_pad_nd.default)
def constant_pad_nd(c: Context, op: OpOverload, x: Tensor, pad: Sequence[Any], value: Any = 0) -> Tensor:
    _no_sizes(pad)
    have = layout_of(x)
    touched = [x.ndim - 1 - i // 2 for i, n in enumerate(pad) if n]
    if any(n < 0 for n in pad) or any(len(lay.without_ones(have[d])) > 1 for d in touched):
        raise Unbounded("padding of a size that changes")
    shape = c.expected().shape
    layout = tuple((lay.expression(shape[d]),) if d in touched else have[d] for d in range(x.ndim))
    return give(c.run(op, c.masked(x, value, touched), pad, value), layout)


@rule(aten.flip.default)
def flip(c: Context, op: OpOverload, x: Tensor, dims: Sequence[int]) -> Tensor:
    _static(x, *dims)
    return give(c.run(op, x, dims), layout_of(x))


@rule(aten.repeat.default)
def repeat(c: Context, op: OpOverload, x: Tensor, repeats: Sequence[Any]) -> Tensor:
    lead = len(repeats) - x.ndim
    have = (*[ONE] * lead, *layout_of(x))
    shape = c.expected().shape
    layout = []
    for d, (dim, n) in enumerate(zip(have, repeats, strict=True)):
        whole = isinstance(n, int) and n == 1
        if not (whole or lay.is_static(dim) or lay.total(dim) == 1):
            raise Unbounded("repeats of a size that changes")
        layout.append(dim if whole else (lay.expression(shape[d]),))
    return give(c.run(op, x, c.bounded(repeats)), tuple(layout))


# ---- reductions -----------------------------------------------------------------------------------------------------
def _fill(kind: str, dtype: torch.dtype) -> Any:
    return {"sum": 0, "prod": 1, "max": lowest(dtype), "min": highest(dtype), "any": False, "all": True}[kind]


_REDUCTIONS = {
    aten.sum.default: "sum", aten.sum.dim_IntList: "sum", aten.prod.default: "prod", aten.prod.dim_int: "prod",
    aten.amax.default: "max", aten.amin.default: "min", aten.any.default: "any", aten.any.dim: "any",
    aten.any.dims: "any", aten.all.default: "all", aten.all.dim: "all", aten.all.dims: "all",
    aten.logsumexp.default: "max", aten.max.default: "max", aten.min.default: "min", aten.max.dim: "max",
    aten.min.dim: "min", aten.argmax.default: "max", aten.argmin.default: "min", aten.linalg_vector_norm.default: "sum",
    aten.count_nonzero.dim_IntList: "sum",
}  # fmt: skip


@rule(*_REDUCTIONS)
def reduction(c: Context, op: OpOverload, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    bound = _bind(op, (x, *args), kwargs)
    dims = _dims(x, bound.get("dim"))
    if op in (aten.argmax.default, aten.argmin.default) and bound.get("dim") is None and x.ndim > 1:
        raise Unbounded("a position among all elements")
    if op is aten.linalg_vector_norm.default and bound["ord"] <= 0:
        raise Unbounded("a norm that counts zeros")
    layout = layout_of(x)
    if op in (aten.max.dim, aten.min.dim, aten.argmax.default, aten.argmin.default):
        _prefix(layout[dims[0]])
    out = c.run(op, c.masked(x, _fill(_REDUCTIONS[op], x.dtype), dims), *args, **kwargs)
    kept = _reduced(layout, dims, bool(bound.get("keepdim")))
    return tree_map_only(Tensor, lambda t: give(t, kept), tuple(out) if isinstance(out, tuple) else out)


def _prefix(dim: Dim) -> None:
    if len(lay.without_ones(dim)) > 1:
        raise Unbounded("a position along sizes joined by a view")


def _accumulated(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


@rule(aten.mean.default, aten.mean.dim)
def mean(c: Context, op: OpOverload, x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    dims = _dims(x, dim)
    total = c.masked(x, 0, dims).to(_accumulated(dtype or x.dtype)).sum(dims, keepdim)
    out = (total / c.count(layout_of(x), dims)).to(c.expected().dtype)
    return give(out, _reduced(layout_of(x), dims, keepdim))


def _moments(c: Context, x: Tensor, dims: list[int]) -> tuple[Tensor, Tensor, Any]:
    """Mean and sum of squared distances, kept dimensions, and the count."""
    layout = layout_of(x)
    count = c.count(layout, dims)
    wide = give(x.to(_accumulated(x.dtype)), layout)
    center = c.masked(wide, 0, dims).sum(dims, True) / count
    apart = c.masked(give(wide - center, layout), 0, dims)
    return center, (apart * apart).sum(dims, True), count


@rule(aten.var.correction, aten.std.correction, aten.var_mean.correction, aten.std_mean.correction)
def variance(
    c: Context, op: OpOverload, x: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False
) -> Any:
    dims = _dims(x, dim)
    center, squares, count = _moments(c, x, dims)
    out = squares / (count - (1 if correction is None else correction))
    out = out.sqrt() if op in (aten.std.correction, aten.std_mean.correction) else out
    layout = _reduced(layout_of(x), dims, keepdim)
    results = [give((v if keepdim else aten.squeeze.dims(v, dims)).to(x.dtype), layout) for v in (out, center)]
    return tuple(results) if op in (aten.var_mean.correction, aten.std_mean.correction) else results[0]


@rule(aten.cumsum.default, aten.cumprod.default, aten.cummax.default, aten.cummin.default, aten.logcumsumexp.default)
def scan(c: Context, op: OpOverload, x: Tensor, dim: int, **kwargs: Any) -> Any:
    _prefix(layout_of(x)[dim])
    return tree_map_only(Tensor, lambda t: give(t, layout_of(x)), c.run(op, x, dim, **kwargs))


@rule(aten.topk.default)
def topk(
    c: Context, op: OpOverload, x: Tensor, k: Any, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[Tensor, ...]:
    _no_sizes(k)
    dim %= x.ndim
    have = layout_of(x)
    _prefix(have[dim])
    layout = (*have[:dim], (sympy.Integer(k),), *have[dim + 1 :])
    filled_ = c.masked(x, _fill("max" if largest else "min", x.dtype), [dim])
    return tuple(give(t, layout) for t in c.run(op, filled_, k, dim, largest, sorted))


# ---- softmax and norms ----------------------------------------------------------------------------------------------
@rule(aten._softmax.default, aten._log_softmax.default, aten._safe_softmax.default)
def softmax(c: Context, op: OpOverload, x: Tensor, dim: int, *args: Any) -> Tensor:
    return give(c.run(op, c.masked(x, -math.inf, [dim]), dim, *args), layout_of(x))


@rule(aten._softmax_backward_data.default, aten._log_softmax_backward_data.default)
def softmax_backward(c: Context, op: OpOverload, g: Tensor, out: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    return give(c.run(op, c.masked(g, 0, [dim]), c.masked(out, 0, [dim]), dim, dtype), layout_of(g))


@rule(aten.native_layer_norm.default, aten._fused_rms_norm.default)
def layer_norm(c: Context, op: OpOverload, x: Tensor, shape: Sequence[Any], *args: Any) -> tuple[Tensor, ...]:
    n = len(shape)
    _static(x, *range(x.ndim - n, x.ndim))
    have = layout_of(x)
    statistics = (*have[: x.ndim - n], *[ONE] * n)
    first, *rest = c.run(op, x, c.bounded(shape), *args)
    return give(first, have), *(give(t, statistics) for t in rest)


@rule(aten.native_layer_norm_backward.default, aten._fused_rms_norm_backward.default)
def layer_norm_backward(
    c: Context, op: OpOverload, g: Tensor, x: Tensor, shape: Sequence[Any], *args: Any
) -> tuple[Any, ...]:
    _static(x, *range(x.ndim - len(shape), x.ndim))
    first, *rest = c.run(op, c.zeroed(g), c.zeroed(x), c.bounded(shape), *c.zeroed(args))
    return (None if first is None else give(first, layout_of(x))), *rest


# ---- products -------------------------------------------------------------------------------------------------------
@rule(aten.mm.default, aten.bmm.default)
def matmul(c: Context, op: OpOverload, a: Tensor, b: Tensor) -> Tensor:
    layout, a, b = _factors(c, a, b)
    return give(c.run(op, a, b), layout)


def _factors(c: Context, a: Tensor, b: Tensor) -> tuple[Layout, Tensor, Tensor]:
    """The layout of a product, and its factors with zeros where the sum meets what is not real."""
    left, right = layout_of(a), layout_of(b)
    shared = lay.met([left[-1], right[-2]])
    a = give(a.view(a.shape), (*left[:-1], shared))
    b = give(b.view(b.shape), (*right[:-2], shared, right[-1]))
    layout = (*(lay.broadcast([left[:-2], right[:-2]])), left[-2], right[-1])
    return layout, c.masked(a, 0, [-1]), c.masked(b, 0, [-2])


@rule(aten.addmm.default, aten.baddbmm.default)
def addmm(c: Context, op: OpOverload, bias: Tensor, a: Tensor, b: Tensor, **kwargs: Any) -> Tensor:
    _no_sizes(kwargs)
    layout, a, b = _factors(c, a, b)
    lay.broadcast([layout, layout_of(bias)])
    return give(c.run(op, bias, a, b, **kwargs), layout)


@rule(aten.convolution.default)
def convolution(c: Context, op: OpOverload, x: Tensor, weight: Tensor, bias: Any, *args: Any) -> Tensor:
    _no_sizes(args)
    _static(x, *range(1, x.ndim))
    out = c.run(op, x, weight, bias, *args)
    return give(out, (layout_of(x)[0], *lay.simple(out.shape[1:])))


@rule(aten.convolution_backward.default)
def convolution_backward(c: Context, op: OpOverload, g: Tensor, x: Tensor, weight: Tensor, *args: Any) -> Any:
    _no_sizes(args)
    _static(x, *range(1, x.ndim))
    first, *rest = c.run(op, c.zeroed(g), c.zeroed(x), weight, *args)
    return (None if first is None else give(first, layout_of(x))), *rest


@rule(aten.max_pool2d_with_indices.default, aten.avg_pool2d.default, aten._adaptive_avg_pool2d.default)
def pool(c: Context, op: OpOverload, x: Tensor, *args: Any) -> Any:
    _no_sizes(args)
    _static(x, *range(1, x.ndim))
    batch = layout_of(x)[0]
    return tree_map_only(Tensor, lambda t: give(t, (batch, *lay.simple(t.shape[1:]))), c.run(op, x, *args))


@rule(
    aten.max_pool2d_with_indices_backward.default, aten.avg_pool2d_backward.default,
    aten._adaptive_avg_pool2d_backward.default,
)  # fmt: skip
def pool_backward(c: Context, op: OpOverload, g: Tensor, x: Tensor, *args: Any) -> Tensor:
    _static(x, *range(1, x.ndim))
    return give(c.run(op, c.zeroed(g), x, *c.zeroed(args)), layout_of(x))


@rule(aten._native_batch_norm_legit_functional.default)
def batch_norm(
    c: Context, op: OpOverload, x: Tensor, weight: Any, bias: Any, running_mean: Tensor, running_var: Tensor,
    training: bool, momentum: float, eps: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    if not training:
        first, *rest = c.run(op, x, weight, bias, running_mean, running_var, training, momentum, eps)
        return give(first, layout_of(x)), *rest
    dims = [d for d in range(x.ndim) if d != 1]
    center, squares, count = _moments(c, x, dims)
    scale = torch.rsqrt(squares / count + eps)
    shape = [-1 if d == 1 else 1 for d in range(x.ndim)]
    out = (x.to(center.dtype) - center) * scale
    out = out * weight.view(shape) if weight is not None else out
    out = out + bias.view(shape) if bias is not None else out
    new_mean = running_mean * (1 - momentum) + center.flatten() * momentum
    new_var = running_var * (1 - momentum) + (squares.flatten() / (count - 1)) * momentum
    statistics = (center.flatten(), scale.flatten(), new_mean.to(running_mean.dtype), new_var.to(running_var.dtype))
    return give(out.to(x.dtype), layout_of(x)), *statistics


@rule(aten.native_batch_norm_backward.default)
def batch_norm_backward(
    c: Context, op: OpOverload, g: Tensor, x: Tensor, weight: Any, running_mean: Any, running_var: Any, mean_: Any,
    invstd: Any, train: bool, eps: float, output_mask: Sequence[bool],
) -> tuple[Any, ...]:  # fmt: skip
    """The gradient of :func:`batch_norm`: sums over real elements, divided by their count."""
    dims = [d for d in range(x.ndim) if d != 1]
    shape = [-1 if d == 1 else 1 for d in range(x.ndim)]
    wide = _accumulated(x.dtype)
    if not train:
        mean_, invstd = running_mean, torch.rsqrt(running_var + eps)
    g_, x_ = c.masked(g, 0, dims).to(wide), c.masked(x, 0, dims).to(wide)
    normal = (x_ - mean_.view(shape)) * invstd.view(shape)
    total, projected = g_.sum(dims), (g_ * normal).sum(dims)
    scale = invstd if weight is None else invstd * weight
    inner = g_
    if train:
        count = c.count(layout_of(x), dims)
        inner = g_ - (total / count).view(shape) - normal * (projected / count).view(shape)
    grad = give((inner * scale.view(shape)).to(x.dtype), layout_of(x))
    return tuple(v if wanted else None for v, wanted in zip((grad, projected, total), output_mask, strict=True))


# ---- attention ------------------------------------------------------------------------------------------------------
def _equal(c: Context, have: Dim, want: Dim) -> None:
    """A size of attention's values or bias is that of its scores: PyTorch's fake kernels do not ask."""
    if lay.total(have) == 1 or lay.agree(have, want):
        return
    sizes = [lay.padded((dim,), c.bounds) for dim in (have, want)]
    if sizes[0] != sizes[1] or any(lay.is_static(dim) or len(lay.without_ones(dim)) > 1 for dim in (have, want)):
        raise Unbounded(f"attention's sizes {lay.total(have)} and {lay.total(want)} are equal by chance")
    differ = c.value(lay.total(have)) != c.value(lay.total(want))
    c.trace.check(c.trace.read(differ), "the sizes of attention's keys, values or bias differ")


def _bias(c: Context, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool) -> Tensor | None:
    """The bias that also leaves out keys which are not real."""
    keys = layout_of(k)[-2]
    _equal(c, layout_of(v)[-2], keys)
    if bias is not None:
        for have, want in zip(layout_of(bias)[-2:], (layout_of(q)[-2], keys), strict=True):
            _equal(c, have, want)
    if lay.is_static(keys) or (causal and bias is None and lay.agree(layout_of(q)[-2], keys)):
        return bias
    real = c.mask(keys).view(1, 1, 1, -1)
    if bias is None:
        return torch.zeros((1, 1, 1, k.shape[-2]), dtype=q.dtype, device="meta").masked_fill(~real, -math.inf)
    return bias & real if bias.dtype == torch.bool else bias.masked_fill(~real, -math.inf)


@rule(aten._scaled_dot_product_fused_attention_overrideable.default)
def attention(
    c: Context, op: OpOverload, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, dropout: float = 0.0,
    causal: bool = False, debug: bool = False, **kwargs: Any,
) -> tuple[Any, ...]:  # fmt: skip
    keys = layout_of(k)[-2]
    out, lse, *rest = c.run(
        op,
        q,
        c.masked(k, 0, [-2]),
        c.masked(v, 0, [-2]),
        _bias(c, q, k, v, bias, causal),
        dropout,
        causal,
        debug,
        **kwargs,
    )
    have = layout_of(q)
    sizes = (c.bound(Size(lay.total(d))) for d in (have[-2], keys))
    rest[2:4] = sizes  # the longest query and key, which only this operator's backward pass reads
    return give(out, (*have[:-1], layout_of(v)[-1])), give(lse, have[:-1]), *rest


@rule(aten._scaled_dot_product_fused_attention_overrideable_backward.default)
def attention_backward(
    c: Context, op: OpOverload, g: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None,
    mask: Sequence[bool], out: Tensor, lse: Tensor, cum_q: Any, cum_k: Any, max_q: Any, max_k: Any, dropout: float,
    causal: bool, seed: Tensor, offset: Tensor, **kwargs: Any,
) -> tuple[Any, ...]:  # fmt: skip
    if mask[3] and bias is not None:
        raise Unbounded("the gradient of an attention bias over a size that changes")
    full = _bias(c, q, k, v, bias, causal)
    if bias is None and full is None:
        zeroed = [c.zeroed(t) for t in (g, q, k, v)]
    else:
        zeroed = [c.zeroed(t) for t in (g, q, k, v)]
    results = c.run(op,
        *zeroed, full, [*mask[:3], False], c.zeroed(out), c.zeroed(lse), cum_q, cum_k, c.bound(max_q), c.bound(max_k),
        dropout, causal, seed, offset, **kwargs,
    )  # fmt: skip
    given = (layout_of(q), layout_of(k), layout_of(v))
    return *(None if r is None else give(r, one) for r, one in zip(results[:3], given, strict=True)), None


# ---- indices --------------------------------------------------------------------------------------------------------
@rule(aten.embedding.default)
def embedding(c: Context, op: OpOverload, weight: Tensor, indices: Tensor, *args: Any) -> Tensor:
    _static(weight, 0, 1)
    layout = (*layout_of(indices), *lay.simple(weight.shape[1:]))
    return give(c.run(op, weight, c.zeroed(indices), *args[:1]), layout)


@rule(aten.embedding_dense_backward.default)
def embedding_dense_backward(
    c: Context, op: OpOverload, g: Tensor, indices: Tensor, rows: int, padding: int, scale: bool
) -> Tensor:
    if scale:
        raise Unbounded("gradients scaled by how often an index occurs")
    return c.run(op, c.zeroed(g), c.zeroed(indices), c.bound(rows), c.bound(padding), scale)


def _indices(c: Context, x: Tensor, indices: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Indices that are not real become 0; negative ones count from the true end."""
    out: list[Tensor | None] = []
    for d, index in enumerate(indices):
        if index is None:
            out.append(None)
            continue
        if index.dtype in (torch.bool, torch.uint8):
            raise Unbounded("a boolean index over a size that changes")
        layout = layout_of(index)
        index = c.zeroed(index)
        dim = layout_of(x)[d]
        if not lay.is_static(dim):
            _prefix(dim)
            size = c.value(lay.total(dim))
            index = torch.where(index < 0, index + size, index)
            index = index.masked_fill((index < 0) | (index >= size), x.shape[d])  # found by the operator's check
        out.append(give(index, layout))
    return out


@rule(aten.index.Tensor)
def index_(c: Context, op: OpOverload, x: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    given = [layout_of(i) for i in indices if i is not None]
    lay.broadcast(given)
    for t in (x, *(i for i in indices if i is not None)):
        for dim in layout_of(t):
            _prefix(dim)
    return _simple(c, c.run(op, x, _indices(c, x, indices)))


@rule(aten.index_put.default)
def index_put(
    c: Context, op: OpOverload, x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False
) -> Tensor:
    given = [i for i in indices if i is not None]
    if not accumulate or len(given) < len(indices):
        raise Unbounded("writes at indices of a number that changes")
    written = (*lay.broadcast([layout_of(i) for i in given]), *layout_of(x)[len(given) :])
    if values.ndim != len(written):
        raise Unbounded("one value for indices of a number that changes")
    lay.broadcast([written, layout_of(values)])
    return give(c.run(op, x, _indices(c, x, indices), c.zeroed(values), True), layout_of(x))


@rule(aten.index_select.default)
def index_select(c: Context, op: OpOverload, x: Tensor, dim: int, index: Tensor) -> Tensor:
    dim %= x.ndim
    have = layout_of(x)
    _prefix(have[dim])
    return give(c.run(op, x, dim, c.zeroed(index)), (*have[:dim], layout_of(index)[0], *have[dim + 1 :]))


@rule(aten.gather.default)
def gather(c: Context, op: OpOverload, x: Tensor, dim: int, index: Tensor, **kwargs: Any) -> Tensor:
    _prefix(layout_of(x)[dim])
    return give(c.run(op, x, dim, c.zeroed(index), **kwargs), layout_of(index))


@rule(aten.scatter_add.default)
def scatter_add(c: Context, op: OpOverload, x: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    return give(c.run(op, x, dim, c.zeroed(index), c.zeroed(source)), layout_of(x))


# ---- losses ---------------------------------------------------------------------------------------------------------
@rule(aten.nll_loss_forward.default)
def nll_loss(
    c: Context, op: OpOverload, x: Tensor, target: Tensor, weight: Any, reduction: int, ignore: int
) -> tuple[Tensor, ...]:
    _static(x, x.ndim - 1)
    loss, count = c.run(op, x, c.masked(target, c.bound(ignore)), weight, reduction, c.bound(ignore))
    return (loss if reduction else give(loss, layout_of(target))), count


@rule(aten.nll_loss_backward.default)
def nll_loss_backward(
    c: Context, op: OpOverload, g: Tensor, x: Tensor, target: Tensor, weight: Any, reduction: int, ignore: int,
    count: Tensor,
) -> Tensor:  # fmt: skip
    ignored = c.bound(ignore)
    return give(c.run(op, c.zeroed(g), x, c.masked(target, ignored), weight, reduction, ignored, count), layout_of(x))


_LOSSES = (
    aten.mse_loss, aten.smooth_l1_loss, aten.huber_loss, aten.binary_cross_entropy,
    aten.binary_cross_entropy_with_logits,
)  # fmt: skip


@rule(*(packet.default for packet in _LOSSES))
def loss(c: Context, op: OpOverload, x: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The loss of each element, then its sum or mean over real ones."""
    bound = _bind(op, (x, target, *args), kwargs)
    reduction = bound["reduction"]
    each = give(c.run(op, **{**bound, "reduction": 0}), lay.broadcast([layout_of(x), layout_of(target)]))
    if reduction == 0:
        return each
    dims = [*range(each.ndim)]
    total = c.masked(each, 0).to(_accumulated(each.dtype)).sum()
    return (total / c.count(layout_of(each), dims) if reduction == 1 else total).to(each.dtype)


@rule(aten.mse_loss_backward.default, aten.smooth_l1_loss_backward.default, aten.huber_loss_backward.default)
def loss_backward(
    c: Context, op: OpOverload, g: Tensor, x: Tensor, target: Tensor, reduction: int, *args: Any
) -> Tensor:
    layout = lay.broadcast([layout_of(x), layout_of(target)])
    if reduction == 1:
        g = g / c.count(layout, [*range(len(layout))])
    return give(c.run(op, g, x, target, 2 if reduction else 0, *args), layout)
