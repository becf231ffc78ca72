"""``torch.linalg``: solvers, determinants and factorisations over :mod:`torch_tpu.lowering.factorization`.

A singular or indefinite matrix cannot raise on the device: ``info`` says so, and PyTorch's checked forms read it.
"""

from __future__ import annotations

import math

import torch

from torch_tpu.lowering import meta
from torch_tpu.lowering.common import compute_dtype
from torch_tpu.lowering.factorization import (
    at,
    diagonal,
    eigh,
    eye,
    flat_batch,
    householder_qr,
    lu_factor,
    lu_solve,
    mH,
    mT,
    permutation,
    qr,
    real_dtype,
    reflectors,
    singular_values,
    solve_triangular,
    svd,
    triangle,
)  # fmt: skip
from torch_tpu.lowering.precision import exact_matmul
from torch_tpu.lowering.registry import lower
from torch_tpu.stablehlo import Shape, Type, Value
from torch_tpu.stablehlo import ops as hlo

_INT = torch.int32


def _shaped(x: Value | None, result: Type) -> Value:
    """A batch result in the shape and dtype that the operator promises; zeros for what was not asked for."""
    if x is None:
        return hlo.constant(0, result.dtype, result.shape)
    return hlo.reshape(hlo.convert(x, result.dtype), result.shape)


def _batched(x: Value, batch: Shape, core: int = 2) -> Value:
    """``x`` broadcast to the leading dimensions ``batch``, those flattened."""
    return flat_batch(hlo.broadcast_to(x, (*batch, *x.shape[x.ndim - core :])), core)


def _first_true(bad: Value) -> Value:
    """1 + the position of the first true of ``[B, n]``, or 0."""
    n = bad.shape[1]
    index = hlo.select(bad, hlo.iota(bad.shape, 1, _INT) + 1, hlo.constant(n + 1, _INT, bad.shape))
    first = hlo.reduce_one(index, n + 1, [1], hlo.minimum)
    return hlo.select(hlo.compare(first, n + 1, "EQ"), hlo.full_like(first, 0), first)


# ---- Cholesky ------------------------------------------------------------------------------------------------------
def _cholesky(a: Value, upper: bool) -> tuple[Value, Value]:
    """(factor, info) of ``[B, n, n]``; like LAPACK only one triangle is read."""
    if 0 in a.shape:
        return a, hlo.constant(0, _INT, (a.shape[0],))
    lower = mH(a) if upper else a
    factor = triangle(hlo.cholesky(lower), lower=True)
    return (mH(factor) if upper else factor), _first_indefinite(lower, _real(diagonal(factor)))


def _real(x: Value) -> Value:
    return hlo.real(x) if x.dtype.is_complex else x


def _first_indefinite(a: Value, main: Value) -> Value:
    """The order of the first leading minor that is not positive, or 0.

    XLA fills a failed factor with NaN: a failed batch is eliminated once more, column by column, to see where.
    """
    batch, n, _ = a.shape
    good = hlo.reduce_one(hlo.compare(main, 0, "GT"), True, [0, 1], hlo.and_)
    steps = hlo.select(good, hlo.constant(0, _INT), hlo.constant(n, _INT))

    def more(k: Value, steps: Value, *_: Value) -> Value:
        return hlo.compare(k, steps, "LT")

    def eliminate(k: Value, steps: Value, info: Value, a: Value) -> list[Value]:
        column = at(a, k, 2)
        pivot = at(column, k, 1)
        bad = hlo.reshape(hlo.not_(hlo.compare(_real(pivot), 0, "GT")), (batch,))
        new = hlo.and_(bad, hlo.compare(info, 0, "EQ"))
        info = hlo.select(new, hlo.broadcast_to(k + 1, info.shape), info)
        outer = hlo.broadcast_to(hlo.divide(column, hlo.broadcast_to(pivot, column.shape)), a.shape)
        return [k + 1, steps, info, a - outer * hlo.broadcast_to(mH(column), a.shape)]

    start = [hlo.constant(0, _INT), steps, hlo.constant(0, _INT, (batch,)), a]
    return hlo.while_(start, more, eliminate)[2]


@lower("linalg_cholesky_ex")
def cholesky_ex(a: Value, *, upper: bool = False, result: list[Type]) -> list[Value]:
    factor, info = _cholesky(flat_batch(a), upper)
    return [_shaped(factor, result[0]), _shaped(info, result[1])]


@lower("cholesky.out", meta=meta.contiguous("cholesky"))
@lower("cholesky")
def cholesky(a: Value, upper: bool = False, *, result: list[Type]) -> Value:
    return _shaped(_cholesky(flat_batch(a), upper)[0], result[0])


def _cholesky_solve(b: Value, factor: Value, upper: bool) -> Value:
    first, second = ("ADJOINT", "NO_TRANSPOSE") if upper else ("NO_TRANSPOSE", "ADJOINT")
    y = solve_triangular(factor, b, lower=not upper, adjoint=first)
    return solve_triangular(factor, y, lower=not upper, adjoint=second)


@lower("cholesky_solve.out", meta=meta.contiguous("cholesky_solve"))
@lower("cholesky_solve")
def cholesky_solve(b: Value, factor: Value, upper: bool = False, *, result: list[Type]) -> Value:
    batch = result[0].shape[:-2]
    return _shaped(_cholesky_solve(_batched(b, batch), _batched(factor, batch), upper), result[0])


@lower("cholesky_inverse")
def cholesky_inverse(factor: Value, upper: bool = False, *, result: list[Type]) -> Value:
    factor = flat_batch(factor)
    return _shaped(_cholesky_solve(eye(factor.shape, factor.dtype), factor, upper), result[0])


# ---- triangular ----------------------------------------------------------------------------------------------------
@lower("linalg_solve_triangular")
def linalg_solve_triangular(
    a: Value, b: Value, *, upper: bool, left: bool = True, unitriangular: bool = False, result: list[Type]
) -> Value:
    batch = result[0].shape[:-2]
    a, b = _batched(a, batch), _batched(b, batch)
    return _shaped(solve_triangular(a, b, lower=not upper, unit=unitriangular, left=left), result[0])


@lower("triangular_solve")
def triangular_solve(
    b: Value, a: Value, upper: bool = True, transpose: bool = False, unitriangular: bool = False, *, result: list[Type]
) -> list[Value]:
    batch = result[0].shape[:-2]
    flag = "TRANSPOSE" if transpose else "NO_TRANSPOSE"
    x = solve_triangular(_batched(a, batch), _batched(b, batch), lower=not upper, unit=unitriangular, adjoint=flag)
    return [_shaped(x, result[0]), hlo.broadcast_to(a, result[1].shape)]


# ---- LU, systems, determinants -------------------------------------------------------------------------------------
def _factored(a: Value, layout: torch.Tensor) -> tuple[Value, Value]:
    """Packed factors and 0-based pivots for a determinant.

    PyTorch factors the transpose of a row-major real matrix, as LAPACK sees it, and its gradients count on that.
    """
    flipped = layout.is_contiguous() and not a.dtype.is_complex
    return lu_factor(mT(flat_batch(a)) if flipped else flat_batch(a))


def _singular(lu: Value) -> Value:
    main = diagonal(lu)
    return _first_true(hlo.compare(main, 0, "EQ"))


@lower("linalg_lu_factor_ex")
def lu_factor_ex(a: Value, *, pivot: bool = True, result: list[Type]) -> list[Value]:
    lu, pivots = lu_factor(flat_batch(a), pivot)
    return [_shaped(x, r) for x, r in zip((lu, pivots + 1, _singular(lu)), result, strict=True)]


def _unpacked(lu: Value, pivots: Value) -> tuple[Value, Value, Value]:
    """(P, L, U) of packed factors ``[B, m, n]``."""
    batch, m, n = lu.shape
    k = min(m, n)
    left = triangle(hlo.slice_dim(lu, 2, 0, k), True, -1) + eye((batch, m, k), lu.dtype)
    place = hlo.broadcast_in_dim(permutation(pivots, m), (batch, m, m), [0, 2])
    p = hlo.convert(hlo.compare(place, hlo.iota((batch, m, m), 1, _INT), "EQ"), lu.dtype)
    return p, left, triangle(hlo.slice_dim(lu, 1, 0, k), False)


@lower("lu_unpack")
def lu_unpack(lu: Value, pivots: Value, data: bool = True, permute: bool = True, *, result: list[Type]) -> list[Value]:
    p, left, right = _unpacked(flat_batch(lu), flat_batch(pivots, 1) - 1)
    wanted = (p if permute else None, left if data else None, right if data else None)
    return [_shaped(x, r) for x, r in zip(wanted, result, strict=True)]


@lower("linalg_lu")
def linalg_lu(a: Value, *, pivot: bool = True, result: list[Type]) -> list[Value]:
    p, left, right = _unpacked(*lu_factor(flat_batch(a), pivot))
    return [_shaped(x, r) for x, r in zip((p if pivot else None, left, right), result, strict=True)]


def _solve(lu: Value, pivots: Value, b: Value, left: bool, adjoint: bool) -> Value:
    return lu_solve(lu, pivots, b, adjoint) if left else mH(lu_solve(lu, pivots, mH(b), not adjoint))


@lower("linalg_lu_solve")
def linalg_lu_solve(
    lu: Value, pivots: Value, b: Value, *, left: bool = True, adjoint: bool = False, result: list[Type]
) -> Value:
    batch = result[0].shape[:-2]
    return _shaped(
        _solve(_batched(lu, batch), _batched(pivots, batch, 1) - 1, _batched(b, batch), left, adjoint), result[0]
    )


@lower("_linalg_solve_ex")
def solve_ex(a: Value, b: Value, *, left: bool = True, result: list[Type]) -> list[Value]:
    lu, pivots = lu_factor(flat_batch(a))
    batch = a.shape[:-2]
    is_vector = b.ndim == 1 or (b.ndim == a.ndim - 1 and b.shape == a.shape[:-1])
    if is_vector:
        b = hlo.expand_dims(b, [-1])
        shape = (*batch, *b.shape[-2:])
    else:
        shape = result[0].shape
    whole = shape[:-2]
    factors = _batched(hlo.reshape(lu, a.shape), whole), _batched(hlo.reshape(pivots, a.shape[:-1]), whole, 1)
    x = _solve(*factors, _batched(b, whole), left or is_vector, False)
    return [_shaped(v, r) for v, r in zip((x, lu, pivots + 1, _singular(lu)), result, strict=True)]


@lower("linalg_inv_ex")
def inv_ex(a: Value, *, result: list[Type]) -> list[Value]:
    lu, pivots = lu_factor(flat_batch(a))
    x = lu_solve(lu, pivots, eye(lu.shape, lu.dtype), False)
    return [_shaped(v, r) for v, r in zip((x, _singular(lu)), result, strict=True)]


def _exchange_sign(pivots: Value, dtype: torch.dtype) -> Value:
    """-1 to the number of rows that moved, ``[B]``."""
    moved = hlo.convert(hlo.compare(pivots, hlo.iota(pivots.shape, 1, _INT), "NE"), _INT)
    odd = hlo.and_(hlo.reduce_one(moved, 0, [1], hlo.add), hlo.constant(1, _INT, (pivots.shape[0],)))
    return hlo.convert(1 - odd * 2, dtype)


@lower("_linalg_det")
def det(a: Value, *, tensors: dict, result: list[Type]) -> list[Value]:
    lu, pivots = _factored(a, tensors["A"])
    value = hlo.reduce_one(diagonal(lu), 1, [1], hlo.multiply) * _exchange_sign(pivots, a.dtype)
    return [_shaped(v, r) for v, r in zip((value, lu, pivots + 1), result, strict=True)]


@lower("_linalg_slogdet")
def slogdet(a: Value, *, tensors: dict, result: list[Type]) -> list[Value]:
    lu, pivots = _factored(a, tensors["A"])
    main = diagonal(lu)
    size = hlo.abs_(main)
    sign = hlo.reduce_one(hlo.sign(main), 1, [1], hlo.multiply) * _exchange_sign(pivots, a.dtype)
    logarithm = hlo.reduce_one(hlo.log(size), 0, [1], hlo.add)
    return [_shaped(v, r) for v, r in zip((sign, logarithm, lu, pivots + 1), result, strict=True)]


# ---- QR ------------------------------------------------------------------------------------------------------------
@lower("linalg_qr")
def linalg_qr(a: Value, mode: str = "reduced", *, result: list[Type]) -> list[Value]:
    if mode == "r":
        rows = result[1].shape[-2]
        r = triangle(hlo.slice_dim(householder_qr(flat_batch(a))[0], 1, 0, rows), lower=False)
        return [_shaped(None, result[0]), _shaped(r, result[1])]
    return [_shaped(v, t) for v, t in zip(qr(flat_batch(a), mode == "complete"), result, strict=True)]


@lower("geqrf", meta=meta.geqrf)
def geqrf(a: Value, *, result: list[Type]) -> list[Value]:
    return [_shaped(v, t) for v, t in zip(householder_qr(flat_batch(a)), result, strict=True)]


@lower("linalg_householder_product")
def householder_product(a: Value, scales: Value, *, result: list[Type]) -> Value:
    return _shaped(reflectors(flat_batch(a), flat_batch(scales, 1), a.shape[-1]), result[0])


@lower("ormqr")
def ormqr(
    a: Value, scales: Value, c: Value, left: bool = True, transpose: bool = False, *, result: list[Type]
) -> Value:
    q = reflectors(flat_batch(a), flat_batch(scales, 1), a.shape[-2])
    q = mH(q) if transpose else q
    c = flat_batch(c)
    if 0 in result[0].shape:
        return _shaped(c, result[0])
    return _shaped(exact_matmul(q, c) if left else exact_matmul(c, q), result[0])


# ---- eigenvalues and singular values -------------------------------------------------------------------------------
@lower("_linalg_eigh")
def linalg_eigh(a: Value, uplo: str = "L", vectors: bool = True, *, result: list[Type]) -> list[Value]:
    w, v = eigh(flat_batch(a), uplo.upper() == "L")
    return [_shaped(w, result[0]), _shaped(v if vectors else None, result[1])]


@lower("_linalg_svd")
def linalg_svd(a: Value, full: bool = False, vectors: bool = True, *, result: list[Type]) -> list[Value]:
    x = flat_batch(a)
    factors = svd(x, full) if vectors else (None, singular_values(x), None)
    return [_shaped(v, t) for v, t in zip(factors, result, strict=True)]


def _pseudo_inverse(u: Value, s: Value, vh: Value, cutoff: Value) -> tuple[Value, Value]:
    """``v s^+ u^H`` and the number of values above ``cutoff`` ``[B]``, from any diagonalisation by unitary factors."""
    kept = hlo.compare(hlo.abs_(s), hlo.broadcast_in_dim(cutoff, s.shape, [0]), "GT")
    zero = hlo.full_like(s, 0)
    inverse = hlo.select(kept, hlo.divide(1.0, hlo.select(kept, s, hlo.full_like(s, 1))), zero)
    v = mH(vh)
    scaled = v * hlo.broadcast_in_dim(hlo.convert(inverse, v.dtype), v.shape, [0, 2])
    return exact_matmul(scaled, mH(u)), hlo.reduce_one(hlo.convert(kept, torch.int64), 0, [1], hlo.add)


def _largest(s: Value) -> Value:
    return hlo.reduce_one(hlo.abs_(s), 0, [1], hlo.maximum)


@lower("linalg_pinv.atol_rtol_tensor")
def pinv(
    a: Value, *, atol: Value | None = None, rtol: Value | None = None, hermitian: bool = False, result: list[Type]
) -> Value:
    """Through the SVD or, if Hermitian, the eigenvalues; those up to ``max(atol, rtol * largest)`` count as 0."""
    if 0 in a.shape:
        return _shaped(None, result[0])
    x = flat_batch(a)
    if hermitian:
        s, u = eigh(x, True)
        vh = mH(u)
    else:
        u, s, vh = svd(x, False)
    each = lambda t: hlo.reshape(hlo.broadcast_to(hlo.convert(t, s.dtype), a.shape[:-2]), (x.shape[0],))  # noqa: E731
    zero = hlo.constant(0, s.dtype, (x.shape[0],))
    least = zero if atol is None else each(atol)
    usual = hlo.full_like(zero, torch.finfo(s.dtype).eps * max(a.shape[-2:]))
    factor = hlo.select(hlo.compare(least, 0, "GT"), zero, usual) if rtol is None else each(rtol)
    return _shaped(_pseudo_inverse(u, s, vh, hlo.maximum(least, factor * _largest(s)))[0], result[0])


@lower("linalg_lstsq", static=("rcond",), meta=meta.linalg_lstsq)
def lstsq(
    a: Value, b: Value, rcond: float | None = None, *, driver: str | None = None, result: list[Type]
) -> list[Value]:
    """The solution of least norm through the SVD, whichever driver is named."""
    vector = b.ndim == a.ndim - 1 and b.shape == a.shape[:-1]
    b = hlo.expand_dims(b, [-1]) if vector else b
    x, batch = flat_batch(a), hlo.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    u, s, vh = svd(x, False)
    factor = torch.finfo(s.dtype).eps * max(a.shape[-2:]) if rcond is None or rcond < 0 else rcond
    inverse, rank = _pseudo_inverse(u, s, vh, _largest(s) * factor)
    inverse = hlo.reshape(inverse, (*a.shape[:-2], *inverse.shape[-2:]))
    whole = _batched(b, batch)
    y = exact_matmul(_batched(inverse, batch), whole)
    size = hlo.abs_(whole - exact_matmul(_batched(a, batch), y))
    values = (y, hlo.reduce_one(size * size, 0, [1], hlo.add), rank, s)
    return [_shaped(v if 0 not in t.shape else None, t) for v, t in zip(values, result, strict=True)]


# ---- vectors and functions of matrices -----------------------------------------------------------------------------
@lower("linalg_cross")
def cross(x: Value, y: Value, *, dim: int = -1, result: list[Type]) -> Value:
    shape, dtype = result[0]
    dim %= len(shape)
    x, y = (hlo.broadcast_to(hlo.convert(v, dtype), shape) for v in (x, y))
    part = lambda v, i: hlo.slice_dim(v, dim, i % 3, i % 3 + 1)  # noqa: E731
    turned = lambda v, by: hlo.concatenate([part(v, by + i) for i in range(3)], dim)  # noqa: E731
    return turned(x, 1) * turned(y, 2) - turned(x, 2) * turned(y, 1)


@lower("linalg_matrix_exp")
def matrix_exp(a: Value, *, result: list[Type]) -> Value:
    """Scaling and squaring of a Taylor polynomial of degree 18 by Horner's rule (Bader, Blanes and Casas 2019)."""
    if 0 in a.shape:
        return a
    x = hlo.convert(flat_batch(a), compute_dtype(a.dtype))
    norm = hlo.reduce_one(hlo.reduce_one(hlo.abs_(x), 0, [1], hlo.add), 0, [1], hlo.maximum)
    halvings = hlo.clamp(0.0, hlo.ceil(hlo.log(norm) * (1 / math.log(2))), 1100.0)
    scale = hlo.convert(hlo.power(hlo.full_like(norm, 0.5), halvings), x.dtype)
    scaled = x * hlo.broadcast_in_dim(scale, x.shape, [0])

    def unfinished(degree: Value, *_: Value) -> Value:
        return hlo.compare(degree, 0, "GT")

    def next_degree(degree: Value, scaled: Value, y: Value) -> list[Value]:
        factor = hlo.divide(1.0, hlo.convert(degree, real_dtype(y.dtype)))
        term = exact_matmul(scaled, y) * hlo.broadcast_to(hlo.convert(factor, y.dtype), y.shape)
        return [degree - 1, scaled, term + eye(y.shape, y.dtype)]

    y = hlo.while_([hlo.constant(18, _INT), scaled, eye(x.shape, x.dtype)], unfinished, next_degree)[2]
    count = hlo.convert(halvings, _INT)
    most = hlo.reduce_one(count, 0, [0], hlo.maximum)

    def more(i: Value, most: Value, *_: Value) -> Value:
        return hlo.compare(i, most, "LT")

    def square(i: Value, most: Value, count: Value, y: Value) -> list[Value]:
        again = hlo.compare(hlo.broadcast_to(i, count.shape), count, "LT")
        return [i + 1, most, count, hlo.select(hlo.broadcast_in_dim(again, y.shape, [0]), exact_matmul(y, y), y)]

    return _shaped(hlo.while_([hlo.constant(0, _INT), most, count, y], more, square)[3], result[0])
