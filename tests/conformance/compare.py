"""When two results are the same: structure, dtype, shape, strides, and values within what the dtype allows."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.testing._comparison import default_tolerances
from torch.utils._pytree import tree_flatten, tree_map

#: The next wider dtype: what CPU PyTorch gives there stands for the true value.
WIDER = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}
#: Units in the last place that a result may be off the true value, of the largest element.
_ULPS = {torch.float16: 1, torch.bfloat16: 1}
_DEFAULT_ULPS = 16
#: How much worse than the CPU's own error against the true value a result may be.
_SLACK = 4
#: Random numbers of which so many are not negative are taken to be never negative.
_SIGN_ELEMENTS = 32


class Mismatch(AssertionError):
    """Results differ. The message begins with the kind of difference: ``value``, ``stride``, ..."""


def widened(tree: Any) -> Any:
    """The arguments in the next wider dtype."""

    def leaf(x: Any) -> Any:
        if isinstance(x, torch.dtype):
            return WIDER.get(x, x)
        if isinstance(x, torch.Tensor) and x.dtype in WIDER:
            return x.detach().to(WIDER[x.dtype]).requires_grad_(x.requires_grad)
        return x

    return tree_map(leaf, tree)


def assert_same(
    actual: Any,
    expected: Any,
    *,
    truth: Callable[[], Any] | None = None,
    strides: bool = True,
    values: str = "close",
    device: str = "tpu",
    like: torch.dtype | None = None,
) -> None:
    """``actual`` on ``device`` is what ``expected`` is on the CPU.

    Args:
        actual: Any tree of tensors and plain objects.
        expected: The same tree from the CPU.
        truth: Gives the tree computed in a wider dtype. A value outside of the dtype's tolerance still counts as right
            if it is about as near to that as the CPU's is.
        strides: Compare strides (of dimensions with more than one element).
        values: ``close``; ``range`` for random results: finite, and of one sign where the CPU's are; ``none``.
        device: The device type on which every tensor must be.
        like: A dtype in which part of the work is done: wider results are no more exact than it.

    Raises:
        Mismatch: They are not.
    """
    got, got_tree = tree_flatten(actual)
    want, want_tree = tree_flatten(expected)
    if len(got) != len(want):
        raise Mismatch(f"structure: {got_tree} != {want_tree}")
    for i, (a, e) in enumerate(zip(got, want, strict=True)):
        if isinstance(e, torch.Tensor) and isinstance(a, torch.Tensor):
            true = None if truth is None else lambda i=i: tree_flatten(truth())[0][i]
            _assert_same_tensor(a, e, i, true, strides, values, device, like or e.dtype)
        elif isinstance(e, torch.Tensor) or isinstance(a, torch.Tensor):
            raise Mismatch(f"structure: {type(a).__name__} != {type(e).__name__}")
        elif values == "close":
            _assert_same_object(a, e)


def _assert_same_object(a: Any, e: Any) -> None:
    if isinstance(e, torch.device | torch.Generator | torch.dtype | str) or callable(e):
        return
    same = math.isclose(a, e, rel_tol=1e-5) or a == e or (a != a and e != e) if isinstance(e, float) else a == e
    if not same:
        raise Mismatch(f"value: {a!r} != {e!r}")


def _significant(t: torch.Tensor) -> tuple[int, ...]:
    return tuple(step for size, step in zip(t.shape, t.stride(), strict=True) if size != 1)


def _assert_same_tensor(
    a: torch.Tensor,
    e: torch.Tensor,
    i: int,
    truth: Callable[[], Any] | None,
    strides: bool,
    values: str,
    device: str,
    like: torch.dtype,
) -> None:
    which = f" (result {i})" if i else ""
    for name, x, y in (
        ("device", a.device.type, device if e.device.type == "cpu" else e.device.type),
        ("dtype", a.dtype, e.dtype),
        ("layout", a.layout, e.layout),
        ("shape", tuple(a.shape), tuple(e.shape)),
    ):
        if x != y:
            raise Mismatch(f"{name}: {x} != {y}{which}")
    if strides and e.layout == torch.strided and e.numel() and _significant(a) != _significant(e):
        raise Mismatch(f"stride: {a.stride()} != {e.stride()} of shape {tuple(e.shape)}{which}")
    if values == "none":
        return
    a, e = _plain(a), _plain(e)
    if values == "range":
        _assert_same_range(a, e, which)
        return
    try:
        rtol, atol = default_tolerances(e.dtype, like)
        torch.testing.assert_close(a, e, equal_nan=True, rtol=rtol, atol=atol)
    except AssertionError as error:
        inexact = e.dtype.is_floating_point or e.dtype.is_complex
        if truth is None or not inexact or not _near_truth(a, e, truth):
            raise Mismatch(f"value: {_difference(a, e)}{which}: {str(error).splitlines()[0]}") from None


def _plain(t: torch.Tensor) -> torch.Tensor:
    t = t.detach().cpu()
    return (t.to_dense() if t.layout != torch.strided else t).resolve_conj().resolve_neg()


def _assert_same_range(a: torch.Tensor, e: torch.Tensor, which: str) -> None:
    if a.dtype.is_complex or not a.numel():
        return
    if bool(e.isfinite().all()) and not bool(a.isfinite().all()):
        raise Mismatch(f"range: not finite{which}")
    if e.numel() >= _SIGN_ELEMENTS and bool((e >= 0).all()) and bool((a < 0).any()):
        raise Mismatch(f"range: negative{which}")


def _near_truth(a: torch.Tensor, e: torch.Tensor, truth: Callable[[], Any]) -> bool:
    """Whether ``a`` is about as near to the true value as the CPU's own result."""
    try:
        t = truth()
    except Exception:  # the operator has no wider form
        return False
    if not isinstance(t, torch.Tensor) or t.shape != a.shape:
        return False
    t = _plain(t)
    dtype, scale = e.dtype, torch.finfo(e.dtype)
    a, e = a.to(t.dtype), e.to(t.dtype)
    finite = t.isfinite() & a.isfinite()
    settled = finite | (a == t) | (a == e) | (a.isnan() & (t.isnan() | e.isnan())) | (t.abs() > scale.max)
    if not bool(settled.all()):
        return False
    if not bool(finite.any()):
        return True
    cpu = (e - t).abs()[finite & e.isfinite()]
    allowed = _SLACK * float(cpu.max()) if cpu.numel() else 0.0
    allowed += _ULPS.get(dtype, _DEFAULT_ULPS) * scale.eps * float(t[finite].abs().max())
    return float((a - t).abs()[finite].max()) <= allowed


def _difference(a: torch.Tensor, e: torch.Tensor) -> str:
    """How much of it is wrong and by how much, in a few words."""
    if a.dtype == torch.bool or not a.numel():
        return f"{int((a != e).sum())}/{e.numel()} differ"
    wide = torch.complex128 if a.dtype.is_complex else torch.float64
    d = (a.to(wide) - e.to(wide)).abs()
    largest = float(d[d.isfinite()].max()) if bool(d.isfinite().any()) else math.nan
    special = int((a.isfinite() != e.isfinite()).sum()) if e.dtype.is_floating_point or e.dtype.is_complex else 0
    note = f", {special} not finite on one side" if special else ""
    return f"off by {largest:.2g} at most, of {float(e.to(wide).abs().nan_to_num(0, 0, 0).max()):.2g}{note}"
