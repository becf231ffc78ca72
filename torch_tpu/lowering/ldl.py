"""``linalg.ldl_factor`` and ``ldl_solve``: symmetric indefinite matrices, pivots as LAPACK chooses them.

The trailing block is kept as a full matrix, so an interchange is one permutation of rows and columns. The matrices of a
batch advance by one or two columns each: every one has its own column, and what it does not touch is masked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from torch_tpu.lowering.factorization import (
    at,
    conj,
    diagonal,
    eye,
    flat_batch,
    hermitian,
    inverse_permutation,
    mT,
    picked,
    solve_triangular,
    triangle,
)
from torch_tpu.lowering.registry import lower
from torch_tpu.stablehlo import Type, Value
from torch_tpu.stablehlo import ops as hlo

_INT = torch.int32
#: Bunch and Kaufman's bound on growth (1977): how much smaller than its column a pivot may be.
_ALPHA = (1 + math.sqrt(17)) / 8


def _symmetric(a: Value, as_hermitian: bool) -> Value:
    """The matrix that the lower triangle describes."""
    if as_hermitian:
        return hermitian(a, lower=True)
    return triangle(a, lower=True) + mT(triangle(a, lower=True, offset=-1))


def _magnitude(x: Value) -> Value:
    """LAPACK's: |re| + |im|."""
    return hlo.abs_(hlo.real(x)) + hlo.abs_(hlo.imag(x)) if x.dtype.is_complex else hlo.abs_(x)


def _along(v: Value, like: Value, dim: int = 0) -> Value:
    return hlo.broadcast_in_dim(v, like.shape, [dim])


def _column(a: Value, k: Value) -> Value:
    """``a[b, :, k[b]]`` of ``[B, n, n]``."""
    batch, n, _ = a.shape
    return hlo.reshape(picked(a, hlo.reshape(hlo.clamp(0, k, n - 1), (batch, 1)), 2), (batch, n))


def _element(v: Value, k: Value) -> Value:
    """``v[b, k[b]]`` of ``[B, n]``; 0 outside."""
    here = hlo.compare(hlo.iota(v.shape, 1, _INT), _along(k, v), "EQ")
    return hlo.reduce_one(hlo.select(here, v, hlo.full_like(v, 0)), 0, [1], hlo.add)


def _largest(size: Value, among: Value) -> tuple[Value, Value]:
    """The largest of ``[B, n]`` where ``among`` is true (0 if nowhere), and the first place of it."""
    n = size.shape[1]
    size = hlo.select(among, size, hlo.full_like(size, 0))
    most = hlo.reduce_one(size, 0, [1], hlo.maximum)
    place = hlo.iota(size.shape, 1, _INT)
    found = hlo.and_(among, hlo.compare(size, _along(most, size), "EQ"))
    return most, hlo.reduce_one(hlo.select(found, place, hlo.full_like(place, n)), n, [1], hlo.minimum)


def _factor(a: Value, as_hermitian: bool) -> tuple[Value, Value, Value]:
    """(factors, 1-based pivots, info) of ``[B, n, n]`` as LAPACK's ``sytf2`` and ``hetf2`` for lower triangles."""
    batch, n, _ = a.shape
    zeros = hlo.constant(0, _INT, (batch,))
    pivots = hlo.constant(0, _INT, (batch, n))
    if 0 in a.shape:
        return a, pivots, zeros

    def more(k: Value, *_: Value) -> Value:
        return hlo.compare(hlo.reduce_one(k, n, [0], hlo.minimum), n, "LT")

    def step(k: Value, a: Value, pivots: Value, info: Value) -> Sequence[Value]:
        other, double, singular = _chosen(a, k)
        active = hlo.compare(k, n, "LT")
        last = k + hlo.convert(double, _INT)  # the last column of this step; the one exchanged
        index = hlo.iota((batch, n), 1, _INT)
        order = hlo.select(
            hlo.compare(index, _along(last, index), "EQ"),
            _along(other, index),
            hlo.select(hlo.compare(index, _along(other, index), "EQ"), _along(last, index), index),
        )
        rows, columns = (hlo.iota(a.shape, d, _INT) for d in (1, 2))
        trailing = hlo.and_(hlo.compare(rows, _along(k, rows), "GE"), hlo.compare(columns, _along(k, rows), "GE"))
        a = hlo.select(trailing, picked(picked(a, order, 1), order, 2), a)
        idle = hlo.or_(singular, hlo.not_(active))
        a = _eliminated(a, k, double, idle, as_hermitian)
        name = hlo.select(double, hlo.negate(other + 1), other + 1)
        here = hlo.and_(hlo.compare(index, _along(k, index), "GE"), hlo.compare(index, _along(last, index), "LE"))
        pivots = hlo.select(here, _along(name, index), pivots)
        new = hlo.and_(hlo.and_(singular, active), hlo.compare(info, 0, "EQ"))
        info = hlo.select(new, k + 1, info)
        return hlo.select(active, last + 1, k), a, pivots, info

    _, a, pivots, info = hlo.while_([zeros, _symmetric(a, as_hermitian), pivots, zeros], more, step)
    return triangle(a, lower=True), pivots, info


def _chosen(a: Value, k: Value) -> tuple[Value, Value, Value]:
    """The row to exchange, whether two columns go at once, and whether column ``k`` has no pivot."""
    column = _magnitude(_column(a, k))
    index = hlo.iota(column.shape, 1, _INT)
    own = _element(column, k)
    most, place = _largest(column, hlo.compare(index, _along(k, index), "GT"))
    there = _magnitude(_column(a, place))
    outside = hlo.and_(hlo.compare(index, _along(k, index), "GE"), hlo.compare(index, _along(place, index), "NE"))
    row_most = _largest(there, outside)[0]
    bound = most * _ALPHA
    # own >= alpha most^2 / row_most, without a division by zero
    stays = hlo.or_(hlo.compare(own, bound, "GE"), hlo.compare(own * row_most, bound * most, "GE"))
    single = hlo.or_(stays, hlo.compare(_element(there, place), row_most * _ALPHA, "GE"))
    usable = hlo.compare(hlo.maximum(own, most), 0, "GT")  # false for NaN
    other = hlo.select(hlo.or_(stays, hlo.not_(usable)), k, place)
    return other, hlo.and_(usable, hlo.not_(single)), hlo.not_(usable)


def _eliminated(a: Value, k: Value, double: Value, idle: Value, as_hermitian: bool) -> Value:
    """Columns ``k``, and ``k + 1`` where ``double``, divided by their pivot block; the rest less what they explain."""
    batch, n, _ = a.shape
    turned = conj if as_hermitian else lambda v: v
    index = hlo.iota((batch, n), 1, _INT)
    last = k + hlo.convert(double, _INT)
    below = hlo.compare(index, _along(last, index), "GT")
    zero = hlo.constant(0, a.dtype, (batch, n))
    first, second = _column(a, k), _column(a, k + 1)
    p, c, q = _element(first, k), _element(first, k + 1), _element(second, k + 1)
    if as_hermitian and a.dtype.is_complex:
        p, q = (hlo.convert(hlo.real(v), a.dtype) for v in (p, q))
    one = hlo.full_like(p, 1)
    pivot = hlo.select(hlo.or_(idle, double), one, p)
    cross = hlo.select(double, c, one)
    ratio_p, ratio_q = hlo.divide(p, turned(cross)), hlo.divide(q, cross)
    rest = hlo.select(double, ratio_p * ratio_q - one, one)
    x, y = hlo.select(below, first, zero), hlo.select(below, second, zero)
    # [left right] = [x y] D^-1, each quotient divided through by the cross element so that none overflows
    left = hlo.divide(_along(ratio_q, x) * x - y, _along(turned(cross) * rest, x))
    right = hlo.divide(_along(ratio_p, y) * y - x, _along(cross * rest, y))
    wide = _along(double, x)
    left = hlo.select(wide, left, hlo.divide(x, _along(pivot, x)))
    right = hlo.select(wide, right, zero)
    three = (batch, n, n)
    by_row = lambda v: hlo.broadcast_in_dim(v, three, [0, 1])  # noqa: E731
    by_column = lambda v: hlo.broadcast_in_dim(v, three, [0, 2])  # noqa: E731
    explained = by_row(left) * by_column(turned(x)) + by_row(right) * by_column(turned(y))
    columns = by_column(index)
    here = hlo.compare(columns, _along(k, columns), "EQ")
    following = hlo.and_(hlo.compare(columns, _along(k + 1, columns), "EQ"), _along(double, columns))
    factors = hlo.select(here, by_row(left), by_row(right))
    solved = hlo.and_(by_row(below), hlo.or_(here, following))
    trailing = hlo.and_(by_row(below), by_column(below))
    out = hlo.select(trailing, a - explained, hlo.select(solved, factors, a))
    return hlo.select(_along(idle, a), a, out)


@lower("linalg_ldl_factor_ex")
def ldl_factor_ex(a: Value, *, hermitian: bool = False, result: list[Type]) -> list[Value]:
    parts = _factor(flat_batch(a), hermitian)
    return [hlo.reshape(hlo.convert(x, t.dtype), t.shape) for x, t in zip(parts, result, strict=True)]


# ---- solutions -------------------------------------------------------------------------------------------------------
def _expanded(factors: Value, pivots: Value) -> tuple[Value, Value, Value]:
    """L with the interchanges of later columns in its earlier ones, their permutation, and where pairs begin."""
    batch, n, _ = factors.shape
    rows, columns = (hlo.iota(factors.shape, d, _INT) for d in (1, 2))
    order, index = (hlo.iota((batch, n), 1, _INT) for _ in range(2))
    none = hlo.constant(False, torch.bool, (batch,))

    def more(k: Value, *_: Value) -> Value:
        return hlo.compare(k, n, "LT")

    def step(k: Value, pivots: Value, l: Value, order: Value, begun: Value, begins: Value) -> Sequence[Value]:
        pivot = hlo.reshape(at(pivots, k, 1), (batch,))
        begin = hlo.and_(hlo.compare(pivot, 0, "LT"), hlo.not_(begun))
        kk = hlo.broadcast_to(k, (batch,))
        other = hlo.select(begin, kk, hlo.abs_(pivot) - 1)  # a pair's one interchange is that of its second column
        swap = hlo.select(
            hlo.compare(index, _along(kk, index), "EQ"),
            _along(other, index),
            hlo.select(hlo.compare(index, _along(other, index), "EQ"), _along(kk, index), index),
        )
        done = hlo.compare(columns, _along(kk - hlo.convert(begun, _INT), columns), "LT")
        l = hlo.select(done, picked(l, swap, 1), l)
        order = hlo.reshape(picked(hlo.reshape(order, (batch, n, 1)), swap, 1), (batch, n))
        begins = hlo.dynamic_update_slice(begins, hlo.reshape(begin, (batch, 1)), [hlo.constant(0, _INT), k])
        return k + 1, pivots, l, order, begin, begins

    start = [hlo.constant(0, _INT), pivots, factors, order, none, hlo.constant(False, torch.bool, (batch, n))]
    _, _, factors, order, _, begins = hlo.while_(start, more, step)
    unit = triangle(factors, lower=True, offset=-1)
    inside = hlo.and_(hlo.broadcast_in_dim(begins, rows.shape, [0, 2]), hlo.compare(rows, columns + 1, "EQ"))
    return hlo.select(inside, hlo.full_like(unit, 0), unit) + eye(unit.shape, unit.dtype), order, begins


def _shifted(x: Value, by: int) -> Value:
    """``x[:, i - by]``, zeros from outside."""
    return hlo.pad(x, 0, [0, by, *[0] * (x.ndim - 2)], [0, -by, *[0] * (x.ndim - 2)])


def _block_solve(factors: Value, begins: Value, b: Value, as_hermitian: bool) -> Value:
    """``D^-1 b`` for the blocks of one and two on the diagonal."""
    turned = conj if as_hermitian else lambda v: v
    main = diagonal(factors)
    if as_hermitian and main.dtype.is_complex:
        main = hlo.convert(hlo.real(main), main.dtype)
    one = hlo.full_like(main, 1)
    n = main.shape[1]
    below = diagonal(hlo.pad(hlo.slice_dim(factors, 1, min(1, n), n), 0, [0, 0, 0], [0, 1, 0]))
    c = hlo.select(begins, below, one)
    p, q = main, _shifted(main, -1)
    ends = hlo.convert(_shifted(hlo.convert(begins, _INT), 1), torch.bool)
    ratio_p, ratio_q = hlo.divide(p, turned(c)), hlo.divide(q, c)
    rest = hlo.select(begins, ratio_p * ratio_q - one, one)
    wide = lambda v: hlo.broadcast_in_dim(v, b.shape, [0, 1])  # noqa: E731
    following = _shifted(b, -1)
    # the pair (x, y) of D [x y] = [b, following], written at its first row
    x = hlo.divide(wide(ratio_q) * hlo.divide(b, wide(turned(c))) - hlo.divide(following, wide(c)), wide(rest))
    y = hlo.divide(wide(ratio_p) * hlo.divide(following, wide(c)) - hlo.divide(b, wide(turned(c))), wide(rest))
    single = hlo.divide(b, wide(main))
    return hlo.select(wide(begins), x, hlo.select(wide(ends), _shifted(y, 1), single))


@lower("linalg_ldl_solve")
def ldl_solve(factors: Value, pivots: Value, b: Value, *, hermitian: bool = False, result: list[Type]) -> Value:
    """``P L D L^H P^T x = b``."""
    if 0 in result[0].shape:
        return hlo.constant(0, result[0].dtype, result[0].shape)
    batch = result[0].shape[:-2]
    factors, b = (flat_batch(hlo.broadcast_to(x, (*batch, *x.shape[-2:]))) for x in (factors, b))
    pivots = flat_batch(hlo.broadcast_to(pivots, (*batch, pivots.shape[-1])), 1)
    unit, order, begins = _expanded(factors, hlo.convert(pivots, _INT))
    x = solve_triangular(unit, picked(b, order, 1), lower=True, unit=True)
    x = _block_solve(factors, begins, x, hermitian)
    x = solve_triangular(unit, x, lower=True, unit=True, adjoint="ADJOINT" if hermitian else "TRANSPOSE")
    return hlo.reshape(picked(x, inverse_permutation(order), 1), result[0].shape)
