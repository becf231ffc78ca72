"""Matrix factorisations on batches ``[B, m, n]`` as loops that compile for every platform.

XLA brings Cholesky, Householder QR and the Hermitian eigenproblem (``@Qr``, ``@Eigh``: expanded by its compiler on
CPU and TPU alike). LU and the SVD are written here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from torch_tpu.lowering.precision import exact_matmul
from torch_tpu.stablehlo import Shape, Type, Value
from torch_tpu.stablehlo import ops as hlo

_INT = torch.int32


# ---- small matrix vocabulary ---------------------------------------------------------------------------------------
def real_dtype(dtype: torch.dtype) -> torch.dtype:
    return {torch.complex64: torch.float32, torch.complex128: torch.float64}.get(dtype, dtype)


def conj(x: Value) -> Value:
    return hlo.conj(x) if x.dtype.is_complex else x


def mT(x: Value) -> Value:
    return hlo.transpose(x, [*range(x.ndim - 2), x.ndim - 1, x.ndim - 2])


def mH(x: Value) -> Value:
    return conj(mT(x))


def flat_batch(x: Value, core: int = 2) -> Value:
    """Leading dimensions as one."""
    return hlo.reshape(x, (math.prod(x.shape[: x.ndim - core]), *x.shape[x.ndim - core :]))


def eye(shape: Shape, dtype: torch.dtype) -> Value:
    rows, columns = (hlo.iota(shape, d, _INT) for d in (len(shape) - 2, len(shape) - 1))
    return hlo.convert(hlo.compare(rows, columns, "EQ"), dtype)


def triangle(x: Value, lower: bool, offset: int = 0) -> Value:
    """``tril`` or ``triu`` with a diagonal offset."""
    rows, columns = (hlo.iota(x.shape, d, _INT) for d in (x.ndim - 2, x.ndim - 1))
    kept = hlo.compare(columns, rows + offset, "LE" if lower else "GE")
    return hlo.select(kept, x, hlo.full_like(x, 0))


def diagonal(x: Value) -> Value:
    """``[..., k]`` of ``[..., m, n]``: the sum of a row of which one element is kept."""
    k = min(x.shape[-2:])
    lead = [0] * (x.ndim - 2)
    x = hlo.slice_(x, [*lead, 0, 0], [*x.shape[:-2], k, k])
    kept = hlo.select(eye(x.shape, torch.bool), x, hlo.full_like(x, 0))
    return hlo.reduce_one(kept, 0, [x.ndim - 1], hlo.add)


def picked(x: Value, index: Value, dim: int) -> Value:
    """``x[b, index[b, i], :]`` (dim 1) or ``x[b, :, index[b, j]]`` (dim 2) of ``[B, m, n]``."""
    batch, n = index.shape
    other = x.shape[3 - dim]
    return hlo.gather(
        x, hlo.reshape(index, (batch, n, 1)), offset_dims=[3 - dim], collapsed_dims=[dim], index_map=[dim],
        slice_sizes=[1, other, 1] if dim == 2 else [1, 1, other], operand_batching_dims=[0], indices_batching_dims=[0],
    )  # fmt: skip


def at(x: Value, index: Value, dim: int) -> Value:
    """The slice of size one at a run-time position of one dimension."""
    zero = hlo.constant(0, _INT)
    starts = [index if d == dim else zero for d in range(x.ndim)]
    return hlo.dynamic_slice(x, starts, [1 if d == dim else n for d, n in enumerate(x.shape)])


# ---- LU ------------------------------------------------------------------------------------------------------------
def lu_factor(a: Value, pivot: bool = True) -> tuple[Value, Value]:
    """LU with partial pivoting of ``[B, m, n]``: the packed factors and 0-based int32 pivots ``[B, min(m, n)]``.

    Column by column as LAPACK's ``getf2``: exchange rows, divide the column, subtract an outer product.
    """
    batch, m, n = a.shape
    steps = min(m, n)
    pivots = hlo.constant(0, _INT, (batch, steps))
    if 0 in a.shape:
        return a, pivots
    k = hlo.constant(0, _INT)

    def condition(k: Value, *_: Value) -> Value:
        return hlo.compare(k, steps, "LT")

    def body(k: Value, lu: Value, pivots: Value) -> Sequence[Value]:
        rows, columns = (hlo.iota((batch, m, n), d, _INT) for d in (1, 2))
        kk = hlo.broadcast_to(k, (batch, m, n))
        if pivot:
            chosen = _pivot_row(hlo.reshape(at(lu, k, 2), (batch, m)), k)
            lu = _exchanged(lu, k, chosen)
        else:
            chosen = hlo.broadcast_to(k, (batch,))
        column, row = at(lu, k, 2), at(lu, k, 1)
        head = at(column, k, 1)
        safe = hlo.select(hlo.compare(head, 0, "EQ"), hlo.full_like(head, 1), head)
        factors = hlo.broadcast_to(hlo.divide(column, hlo.broadcast_to(safe, column.shape)), lu.shape)
        below, right = hlo.compare(rows, kk, "GT"), hlo.compare(columns, kk, "GT")
        here = hlo.compare(columns, kk, "EQ")
        trailing = lu - factors * hlo.broadcast_to(row, lu.shape)
        lu = hlo.select(hlo.and_(below, right), trailing, hlo.select(hlo.and_(below, here), factors, lu))
        return k + 1, lu, hlo.dynamic_update_slice(pivots, hlo.reshape(chosen, (batch, 1)), [hlo.constant(0, _INT), k])

    _, lu, pivots = hlo.while_([k, a, pivots], condition, body)
    return lu, pivots


def _pivot_row(column: Value, k: Value) -> Value:
    """The row, from ``k`` on, of the largest magnitude in ``[B, m]``; of equals the first."""
    index = hlo.iota(column.shape, 1, _INT)
    size = hlo.abs_(column)
    if column.dtype.is_complex:  # LAPACK compares |re| + |im|
        size = hlo.abs_(hlo.real(column)) + hlo.abs_(hlo.imag(column))
    size = hlo.select(hlo.compare(index, hlo.broadcast_to(k, index.shape), "GE"), size, hlo.full_like(size, -1))

    def larger(old: Sequence[Value], new: Sequence[Value]) -> list[Value]:
        better = hlo.compare(new[0], old[0], "GT")
        earlier = hlo.and_(hlo.compare(new[0], old[0], "EQ"), hlo.compare(new[1], old[1], "LT"))
        take = hlo.or_(better, earlier)
        return [hlo.select(take, new[0], old[0]), hlo.select(take, new[1], old[1])]

    found = hlo.reduce([size, index], [-1.0, column.shape[1]], [1], larger)[1]
    return hlo.select(
        hlo.compare(found, column.shape[1], "LT"), found, hlo.broadcast_to(k, found.shape)
    )  # a column of NaN


def _exchanged(x: Value, k: Value, other: Value) -> Value:
    """Rows ``k`` and ``other[b]`` of ``[B, m, n]`` exchanged."""
    rows = hlo.iota(x.shape, 1, _INT)
    other_row = hlo.broadcast_to(picked(x, hlo.reshape(other, (x.shape[0], 1)), 1), x.shape)
    row = hlo.broadcast_to(at(x, k, 1), x.shape)
    is_k = hlo.compare(rows, hlo.broadcast_to(k, x.shape), "EQ")
    is_other = hlo.compare(rows, hlo.broadcast_in_dim(other, x.shape, [0]), "EQ")
    return hlo.select(is_k, other_row, hlo.select(is_other, row, x))


def permutation(pivots: Value, size: int) -> Value:
    """Row exchanges ``[B, k]`` (0-based) as one permutation: row i of P^T A is row ``result[b, i]`` of A."""
    batch, steps = pivots.shape
    order = hlo.iota((batch, size, 1), 1, _INT)
    if 0 in (batch, steps, size):
        return hlo.reshape(order, (batch, size))

    def condition(k: Value, *_: Value) -> Value:
        return hlo.compare(k, steps, "LT")

    def body(k: Value, order: Value, pivots: Value) -> Sequence[Value]:
        return k + 1, _exchanged(order, k, hlo.reshape(at(pivots, k, 1), (batch,))), pivots

    _, order, _ = hlo.while_([hlo.constant(0, _INT), order, pivots], condition, body)
    return hlo.reshape(order, (batch, size))


def inverse_permutation(order: Value) -> Value:
    index = hlo.iota(order.shape, 1, _INT)
    return hlo.sort([order, index], 1, lambda a, b: hlo.compare(a[0], b[0], "LT"))[1]


def solve_triangular(
    a: Value, b: Value, *, lower: bool, unit: bool = False, adjoint: str = "NO_TRANSPOSE", left: bool = True
) -> Value:
    """``op(a)^-1 b`` or ``b op(a)^-1``; ``lower`` speaks of ``a`` itself."""
    if 0 in b.shape or 0 in a.shape:
        return b
    return hlo.triangular_solve(a, b, left=left, lower=lower, unit_diagonal=unit, transpose_a=adjoint)


def lu_solve(lu: Value, pivots: Value, b: Value, adjoint: bool) -> Value:
    """``A x = b`` or ``A^H x = b`` for the factors of A (0-based pivots)."""
    if 0 in b.shape:
        return b
    order = permutation(pivots, lu.shape[1])
    if adjoint:
        x = solve_triangular(lu, b, lower=False, adjoint="ADJOINT")
        x = solve_triangular(lu, x, lower=True, unit=True, adjoint="ADJOINT")
        return picked(x, inverse_permutation(order), 1)
    x = solve_triangular(lu, picked(b, order, 1), lower=True, unit=True)
    return solve_triangular(lu, x, lower=False)


# ---- QR ------------------------------------------------------------------------------------------------------------
def householder_qr(a: Value) -> tuple[Value, Value]:
    """R above the diagonal, reflectors below, and their scales, as LAPACK's ``geqrf``; ``[B, m, n]``."""
    batch, m, n = a.shape
    scales = Type((batch, min(m, n)), a.dtype)
    if 0 in a.shape:
        return a, hlo.constant(0, scales.dtype, scales.shape)
    return hlo.custom_call("Qr", [a], [a.type, scales])  # type: ignore[return-value]


def reflectors(a: Value, scales: Value, columns: int) -> Value:
    """The first ``columns`` columns of the product of elementary reflectors stored below ``a``'s diagonal."""
    batch, m, n = a.shape
    if 0 in (batch, m, columns):
        return hlo.constant(0, a.dtype, (batch, m, columns))
    if columns < n:
        a = hlo.slice_dim(a, 2, 0, columns)
        scales = hlo.slice_dim(scales, 1, 0, min(columns, scales.shape[1]))
    a = hlo.pad(a, 0, [0, 0, 0], [0, 0, max(0, columns - n)])
    if scales.shape[1] == 0:
        return eye((batch, m, columns), a.dtype)
    return hlo.custom_call("ProductOfElementaryHouseholderReflectors", [a, scales], [a.type])[0]


def qr(a: Value, full: bool) -> tuple[Value, Value]:
    """``(q, r)``, reduced or with a square q."""
    _, m, n = a.shape
    k = m if full else min(m, n)
    packed, scales = householder_qr(a)
    r = triangle(hlo.slice_dim(packed, 1, 0, min(k, m)), lower=False)
    return reflectors(packed, scales, k), r


# ---- eigenvalues ---------------------------------------------------------------------------------------------------
def hermitian(a: Value, lower: bool) -> Value:
    """The Hermitian matrix that one triangle describes."""
    strict = triangle(a, lower, -1 if lower else 1)
    main = hlo.select(eye(a.shape, torch.bool), a, hlo.full_like(a, 0))
    if a.dtype.is_complex:
        main = hlo.convert(hlo.real(main), a.dtype)
    return strict + mH(strict) + main


def eigh(a: Value, lower: bool) -> tuple[Value, Value]:
    """Eigenvalues, ascending, and eigenvectors in columns."""
    real = real_dtype(a.dtype)
    if 0 in a.shape:
        return hlo.constant(0, real, a.shape[:2]), a
    if a.shape[1] == 1:
        return hlo.reshape(hlo.real(a) if a.dtype.is_complex else a, a.shape[:2]), hlo.full_like(a, 1)
    # lower, sort, most sweeps, tolerance
    config, a = 'backend_config = "1,1,100,1e-6"', hermitian(a, lower)
    vectors, values = hlo.custom_call("Eigh", [a], [a.type, Type(a.shape[:2], real)], config)
    return _refined(a, values, vectors) if real == torch.float64 else (values, vectors)


def _refined(a: Value, values: Value, x: Value) -> tuple[Value, Value]:
    """One step of Ogita and Aishima 2018: XLA's Jacobi sweeps stop short of float64, this doubles the digits."""
    r = eye(a.shape, a.dtype) - exact_matmul(mH(x), x)
    s = exact_matmul(mH(x), exact_matmul(a, x))
    real = lambda v: hlo.real(v) if v.dtype.is_complex else v  # noqa: E731
    values = hlo.divide(real(diagonal(s)), 1.0 - real(diagonal(r)))
    gap = hlo.broadcast_in_dim(values, a.shape, [0, 2]) - hlo.broadcast_in_dim(values, a.shape, [0, 1])
    off = hlo.select(eye(a.shape, torch.bool), hlo.full_like(s, 0), s)
    largest = lambda v: hlo.reduce_one(hlo.abs_(v), 0, [1, 2], hlo.maximum)  # noqa: E731
    delta = (largest(off) + largest(a) * largest(r)) * float(2 * a.shape[1])
    apart = hlo.compare(hlo.abs_(gap), hlo.broadcast_in_dim(delta, gap.shape, [0]), "GT")
    safe = hlo.convert(hlo.select(apart, gap, hlo.full_like(gap, 1)), a.dtype)
    weighted = s + r * hlo.broadcast_in_dim(hlo.convert(values, a.dtype), r.shape, [0, 2])
    e = hlo.select(apart, hlo.divide(weighted, safe), r * 0.5)
    return values, x + exact_matmul(x, e)


# ---- singular values -----------------------------------------------------------------------------------------------
_MOST_SWEEPS = 24


def svd(a: Value, full: bool) -> tuple[Value, Value, Value]:
    """``(u, s, v^H)`` of ``[B, m, n]`` with descending s; u and v^H are square with ``full``.

    One-sided Jacobi (Demmel and Veselic 1992) on R of a QR factorisation: small values keep their relative accuracy.
    """
    batch, m, n = a.shape
    if m < n:
        u, s, vh = svd(mH(a), full)
        return mH(vh), s, mH(u)
    if 0 in a.shape:
        s = hlo.constant(0, real_dtype(a.dtype), (batch, n))
        return eye((batch, m, m if full else n), a.dtype), s, eye((batch, n, n), a.dtype)
    q, r = qr(a, False) if m > n else (None, a)
    columns, v = _orthogonal_columns([r, eye((batch, n, n), a.dtype)])
    s, order = _descending(hlo.sqrt(_square_sum(columns)))
    columns, v = (picked(x, order, 2) for x in (columns, v))
    columns = columns if q is None else exact_matmul(q, columns)
    return _left_vectors(columns, s, m if full else n), s, mH(v)


def singular_values(a: Value) -> Value:
    """The ``s`` of :func:`svd` alone."""
    batch, m, n = a.shape
    if m < n:
        return singular_values(mH(a))
    if 0 in a.shape:
        return hlo.constant(0, real_dtype(a.dtype), (batch, n))
    r = qr(a, False)[1] if m > n else a
    return _descending(hlo.sqrt(_square_sum(_orthogonal_columns([r])[0])))[0]


def _descending(s: Value) -> tuple[Value, Value]:
    """The rows of ``[B, n]`` from large to small, and where each element was."""
    pair = hlo.sort([s, hlo.iota(s.shape, 1, _INT)], 1, lambda x, y: hlo.compare(x[0], y[0], "GT"))
    return pair[0], pair[1]


def _square_sum(x: Value) -> Value:
    size = hlo.abs_(x)
    return hlo.reduce_one(size * size, 0, [1], hlo.add)


def _left_vectors(columns: Value, s: Value, count: int) -> Value:
    """Normalised columns, completed to ``count`` orthonormal ones (where s is 0 any will do) by a QR factorisation."""
    largest = hlo.reduce_one(s, 0, [1], hlo.maximum) * (torch.finfo(s.dtype).eps * columns.shape[1])
    positive = hlo.compare(s, hlo.broadcast_in_dim(largest, s.shape, [0]), "GT")  # the others are rounding noise
    inverse = hlo.select(positive, hlo.divide(1.0, hlo.select(positive, s, hlo.full_like(s, 1))), hlo.full_like(s, 0))
    unit = columns * hlo.broadcast_in_dim(hlo.convert(inverse, columns.dtype), columns.shape, [0, 2])
    q, r = qr(hlo.pad(unit, 0, [0, 0, 0], [0, 0, count - unit.shape[2]]), False)
    phase = diagonal(r)
    keep = hlo.pad(positive, False, [0, 0], [0, count - s.shape[1]])
    phase = hlo.select(keep, phase, hlo.full_like(phase, 1))
    return q * hlo.broadcast_in_dim(phase, q.shape, [0, 2])


def _orthogonal_columns(parts: list[Value]) -> list[Value]:
    """Rotates pairs of columns of ``parts[0]`` until all are orthogonal; the other parts take the same rotations."""
    a = parts[0]
    batch, _, n = a.shape
    half = (n + 1) // 2
    padded = [hlo.pad(x, 0, [0, 0, 0], [0, 0, 2 * half - n]) for x in parts]
    carried = [hlo.slice_dim(x, 2, i * half, (i + 1) * half) for x in padded for i in range(2)]
    real = real_dtype(a.dtype)
    eps = torch.finfo(real).eps
    scale = hlo.reduce_one(_square_sum(a), 0, [1], hlo.add) * (eps * eps)  # columns below this are zero
    scale = hlo.broadcast_in_dim(scale, (batch, half), [0])
    start = [hlo.constant(0, _INT), hlo.constant(1, real), scale, *carried]

    def unfinished(sweep: Value, off: Value, *_: Value) -> Value:
        return hlo.and_(hlo.compare(sweep, _MOST_SWEEPS, "LT"), hlo.compare(off, 4 * eps, "GT"))

    def one_sweep(sweep: Value, off: Value, scale: Value, *pairs: Value) -> Sequence[Value]:
        def more(i: Value, *_: Value) -> Value:
            return hlo.compare(i, 2 * half - 1, "LT")

        def one_round(i: Value, off: Value, scale: Value, *pairs: Value) -> Sequence[Value]:
            rotated, size = _rotated(list(pairs), scale)
            return i + 1, hlo.maximum(off, size), scale, *_next_pairs(rotated)

        rounds = [hlo.constant(0, _INT), hlo.full_like(off, 0), scale, *pairs]
        _, off, scale, *turned = hlo.while_(rounds, more, one_round)
        return sweep + 1, off, scale, *turned

    _, _, _, *carried = hlo.while_(start, unfinished, one_sweep)
    # 2 half - 1 rounds bring every column back to its place.
    return [hlo.slice_dim(hlo.concatenate(carried[i : i + 2], 2), 2, 0, n) for i in range(0, len(carried), 2)]


def _rotated(pairs: list[Value], scale: Value) -> tuple[list[Value], Value]:
    """Each left column rotated against its right one; also the largest cosine that was between them."""
    left, right = pairs[:2]
    alpha, beta = _square_sum(left), _square_sum(right)
    gamma = hlo.reduce_one(conj(left) * right, 0, [1], hlo.add)
    size = hlo.abs_(gamma)
    active = hlo.and_(hlo.compare(hlo.minimum(alpha, beta), scale, "GT"), hlo.compare(size, 0, "GT"))
    one = hlo.full_like(size, 1)
    safe = hlo.select(active, size, one)
    zeta = hlo.divide(beta - alpha, safe * 2.0)
    tangent = hlo.divide(
        hlo.select(hlo.compare(zeta, 0, "LT"), hlo.negate(one), one), hlo.abs_(zeta) + hlo.sqrt(zeta * zeta + 1.0)
    )
    tangent = hlo.select(active, tangent, hlo.full_like(tangent, 0))
    cosine = hlo.rsqrt(tangent * tangent + 1.0)
    phase = hlo.divide(gamma, hlo.convert(safe, gamma.dtype))
    phase = hlo.select(active, phase, hlo.full_like(phase, 1))
    rotated = []
    for a, b in zip(pairs[0::2], pairs[1::2], strict=True):
        c, s, turn = (
            hlo.broadcast_in_dim(hlo.convert(v, a.dtype), a.shape, [0, 2])
            for v in (cosine, cosine * tangent, conj(phase))
        )
        b = b * turn
        rotated += [c * a - s * b, s * a + c * b]
    cosines = hlo.select(active, hlo.divide(size, hlo.sqrt(alpha) * hlo.sqrt(beta)), hlo.full_like(size, 0))
    return rotated, hlo.reduce_one(cosines, 0, [0, 1], hlo.maximum)


def _next_pairs(pairs: list[Value]) -> list[Value]:
    """The next round of a tournament in which every column meets every other: all but the first column move on."""
    out = []
    for left, right in zip(pairs[0::2], pairs[1::2], strict=True):
        h = left.shape[2]
        if h == 1:
            out += [left, right]
            continue
        part = lambda x, a, b: hlo.slice_dim(x, 2, a, b)  # noqa: E731
        out.append(
            hlo.concatenate([part(left, 0, 1), part(right, 0, 1), *([part(left, 1, h - 1)] if h > 2 else [])], 2)
        )
        out.append(hlo.concatenate([part(right, 1, h), part(left, h - 1, h)], 2))
    return out
