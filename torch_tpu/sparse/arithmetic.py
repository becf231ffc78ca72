"""Element-wise operators of sparse tensors: those that keep zeros act on the values alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_tpu.sparse.layout import (
    add_into,
    as_coo,
    coo_tensor,
    coordinates,
    in_layout,
    is_sparse,
    positions,
    values_of,
    with_values,
)
from torch_tpu.tracing.schema import resolve


# ---- one operand -----------------------------------------------------------------------------------------------------
def _map(op: Callable[..., Tensor], self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """``op`` of every entry; entries of one place are added first."""
    return _map_linear(op, self.coalesce() if self.layout == torch.sparse_coo else self, *args, **kwargs)


def _map_linear(op: Callable[..., Tensor], self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """``op`` of every entry as it stands."""
    return with_values(self, op(values_of(self), *args, **kwargs))


#: Operators with ``f(0) == 0``, and those of them with ``f(x + y) == f(x) + f(y)``.
_KEEP_ZERO = (
    "abs angle asin asinh atan atanh ceil conj_physical deg2rad erf erfinv expm1 floor frac isinf isnan isneginf "
    "isposinf log1p nan_to_num neg rad2deg relu round sgn sign signbit sin sinh sqrt tan tanh trunc"
).split()
_LINEAR = ("conj_physical", "deg2rad", "neg", "rad2deg")
_UNARY = {
    name: functools.partial(_map_linear if name in _LINEAR else _map, resolve(f"aten::{name}")) for name in _KEEP_ZERO
}


# ---- two operands ----------------------------------------------------------------------------------------------------
def add(self: Tensor, other: Tensor, *, alpha: complex = 1) -> Tensor:
    """A dense ``self`` gives a dense sum; two sparse ones give their entries side by side, added where both are so."""
    if not is_sparse(self):
        dtype = torch.result_type(self, other)
        shape = torch.broadcast_shapes(self.shape, other.shape)
        return add_into(self.to(dtype).expand(shape).clone(memory_format=torch.contiguous_format), other, alpha)
    if not is_sparse(other) and self.layout != torch.sparse_coo:
        return add_into(other * alpha, self)
    if not is_sparse(other):
        raise RuntimeError("add(sparse, dense) is not supported. Use add(dense, sparse) instead.")
    if self.shape != other.shape:
        raise RuntimeError(
            f"add: expected sizes of 'self' and 'other' to match, but {list(self.shape)} != {list(other.shape)}"
        )
    if self.layout != torch.sparse_coo or other.layout != torch.sparse_coo:
        return in_layout(self, add(as_coo(self), as_coo(other), alpha=alpha))
    if self.sparse_dim() != other.sparse_dim():
        raise RuntimeError("add: expected 'self' and 'other' to have the same number of sparse dimensions")
    dtype = torch.result_type(self, other)
    right = other._values() if alpha == 1 else other._values() * alpha
    indices = torch.cat([self._indices(), other._indices()], 1)
    values = torch.cat([self._values().to(dtype), right.to(dtype)])
    out = coo_tensor(indices, values, self.shape)
    return out.coalesce() if self.is_coalesced() and other.is_coalesced() else out


def add_(self: Tensor, other: Tensor, *, alpha: complex = 1) -> Tensor:
    """A dense ``self`` takes the entries where they belong; that is what an optimizer's step does."""
    if not is_sparse(self):
        return add_into(self, other, alpha)
    out = add(self, other, alpha=alpha).to(self.dtype)
    return self.copy_(out) if self.layout != torch.sparse_coo else torch.ops.aten.copy_sparse_to_sparse_(self, out)


def sub(self: Tensor, other: Tensor, *, alpha: complex = 1) -> Tensor:
    return add(self, other, alpha=-alpha)


def sub_(self: Tensor, other: Tensor, *, alpha: complex = 1) -> Tensor:
    return add_(self, other, alpha=-alpha)


def _is_number(x: Any) -> bool:
    """A 0-d tensor, or the number that one stands for."""
    return not isinstance(x, Tensor) or (x.ndim == 0 and not is_sparse(x))


def mul(self: Tensor, other: Tensor) -> Tensor:
    """By a number; by a dense tensor at the sparse one's entries; by a sparse one where both have entries."""
    if not is_sparse(self):
        self, other = other, self
    if _is_number(other):
        return with_values(self, values_of(self) * other)
    if not is_sparse(other):
        indices, values = coordinates(self)
        return with_values(self, values * other.expand(self.shape)[tuple(indices.unbind(0))])
    if self.shape != other.shape:
        raise RuntimeError(
            f"mul operands have incompatible sizes {list(self.shape)} and {list(other.shape)}; sparse ones are not "
            f"broadcast"
        )
    return in_layout(self, _common(as_coo(self).coalesce(), as_coo(other).coalesce()))


def _common(a: Tensor, b: Tensor) -> Tensor:
    """The product of two coalesced tensors: an entry for every place that both have."""
    shape = a.shape[: a.sparse_dim()]
    left, right = positions(a._indices(), shape), positions(b._indices(), shape)
    if 0 in (left.numel(), right.numel()):
        at = torch.zeros(0, dtype=torch.int64, device=a.device)
        keep = at
    else:
        place = torch.searchsorted(right, left).clamp(max=right.numel() - 1)
        keep = (right[place] == left).nonzero().squeeze(1)
        at = place[keep]
    values = a._values()[keep] * b._values()[at]
    return coo_tensor(a._indices()[:, keep], values, a.shape, is_coalesced=True)


def div(self: Tensor, other: Tensor, *, rounding_mode: str | None = None) -> Tensor:
    if not is_sparse(self) or not _is_number(other):
        raise RuntimeError("Sparse division requires a scalar or zero-dim dense tensor divisor")
    return (_map if rounding_mode else _map_linear)(torch.div, self, other, rounding_mode=rounding_mode)


def floor_divide(self: Tensor, other: Tensor) -> Tensor:
    return div(self, other, rounding_mode="floor")


def power(self: Tensor, exponent: complex) -> Tensor:
    if exponent == 0:
        raise RuntimeError("cannot raise to zeroth power on sparse tensor; it would make the result tensor dense")
    return _map(torch.pow, self, exponent)


KERNELS: dict[str, Callable[..., Any]] = {
    **_UNARY,
    "add.Tensor": add,
    "add_.Tensor": add_,
    "sub.Tensor": sub,
    "sub_.Tensor": sub_,
    "mul.Tensor": mul,
    "mul.Scalar": lambda self, other: with_values(self, values_of(self) * other),
    "div.Tensor": div,
    "div.Tensor_mode": div,
    "floor_divide": floor_divide,
    "pow.Tensor_Scalar": power,
}
