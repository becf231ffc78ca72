"""Linear algebra and Fourier transforms against CPU PyTorch; factors that are not unique by what they must satisfy."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.lowering.harness import check, run

aten = torch.ops.aten
DTYPES = (torch.float32, torch.float64, torch.complex64)
SHAPES = ((3, 5, 5), (2, 4, 6), (6, 4), (1, 1), (2, 0, 3))

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def tolerance(dtype: torch.dtype) -> dict[str, Any]:
    t = 1e-3 if dtype in (torch.float32, torch.complex64) else 1e-9
    return {"rtol": t, "atol": t}


def same(op: Any, *args: Any, **options: Any) -> None:
    check(op.default, *args, strides=False, **tolerance(args[0].dtype), **options)


def near(x: torch.Tensor, y: torch.Tensor) -> None:
    torch.testing.assert_close(x, y, **tolerance(x.dtype if x.dtype.is_complex else y.dtype))


def make(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype)


def positive(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    a = make(dtype, *shape)
    return a @ a.mH + torch.eye(shape[-1], dtype=dtype)


def orthonormal(q: torch.Tensor) -> None:
    gram = q.mH @ q
    near(gram, torch.eye(gram.shape[-1], dtype=q.dtype).expand_as(gram))


@every_dtype
def test_cholesky(dtype: torch.dtype) -> None:
    same(aten.linalg_cholesky_ex, positive(dtype, 2, 3, 5, 5))
    same(aten.linalg_cholesky_ex, positive(dtype, 5, 5), upper=True)
    if hasattr(aten, "cholesky"):  # until torch 2.13
        same(aten.cholesky, positive(dtype, 5, 5))
    factor = torch.linalg.cholesky(positive(dtype, 3, 5, 5))
    same(aten.cholesky_solve, make(dtype, 5, 2), factor)
    same(aten.cholesky_solve, make(dtype, 5, 2), factor.mH.contiguous(), True)
    same(aten.cholesky_inverse, factor)


def test_cholesky_names_the_first_bad_minor() -> None:
    a = positive(torch.float64, 3, 5, 5)
    a[0, 2, 2], a[2, 0, 0] = -3, 0
    assert (
        run(aten.linalg_cholesky_ex.default, a)[0][1].tolist() == torch.linalg.cholesky_ex(a)[1].tolist() == [3, 0, 1]
    )


@every_dtype
def test_triangular_solve(dtype: torch.dtype) -> None:
    a = torch.linalg.cholesky(positive(dtype, 3, 5, 5))
    same(aten.linalg_solve_triangular, a, make(dtype, 5, 2), upper=False)
    same(aten.linalg_solve_triangular, a.mT, make(dtype, 2, 5), upper=True, left=False, unitriangular=True)
    same(aten.triangular_solve, make(dtype, 5, 2), a, False, True)


@every_dtype
@every_shape
def test_lu(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    a = make(dtype, *shape)
    same(aten.linalg_lu_factor_ex, a)
    same(aten.linalg_lu, a)
    same(aten.lu_unpack, *torch.linalg.lu_factor(a))


@every_dtype
def test_systems(dtype: torch.dtype) -> None:
    a = make(dtype, 3, 5, 5)
    for matrix in (a, a.mT):
        same(aten._linalg_solve_ex, matrix, make(dtype, 3, 5, 2))
        same(aten._linalg_det, matrix)
        same(aten._linalg_slogdet, matrix)
    same(aten._linalg_solve_ex, a[0], make(dtype, 3, 5, 2))
    same(aten._linalg_solve_ex, a, make(dtype, 3, 5))
    same(aten._linalg_solve_ex, a, make(dtype, 3, 2, 5), left=False)
    same(aten.linalg_inv_ex, a)
    lu, pivots, _ = torch.linalg.lu_factor_ex(a)
    for left in (True, False):
        for adjoint in (True, False):
            same(
                aten.linalg_lu_solve, lu, pivots, make(dtype, *((5, 2) if left else (2, 5))), left=left, adjoint=adjoint
            )


def test_singular_systems_are_reported() -> None:
    a = torch.tensor([[[1.0, 2.0], [2.0, 4.0]], [[1.0, 2.0], [3.0, 4.0]]])
    assert run(aten.linalg_inv_ex.default, a)[0][1].tolist() == [2, 0]
    assert run(aten._linalg_det.default, a)[0][0].tolist() == pytest.approx([0, -2])
    same(aten._linalg_slogdet, a)


@every_dtype
@every_shape
def test_qr(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    a = make(dtype, *shape)
    for mode in ("reduced", "complete", "r"):
        same(aten.linalg_qr, a, mode)
    same(aten.geqrf, a)


@every_dtype
def test_reflectors(dtype: torch.dtype) -> None:
    packed = torch.geqrf(make(dtype, 5, 3))
    same(aten.linalg_householder_product, *packed)
    same(aten.ormqr, *packed, make(dtype, 5, 2), True, True)
    same(aten.ormqr, *packed, make(dtype, 2, 5), False, False)


@every_dtype
@pytest.mark.parametrize("triangle", ["L", "U"])
def test_eigh(triangle: str, dtype: torch.dtype) -> None:
    a = make(dtype, 3, 6, 6)
    a = a + a.mH
    w, v = run(aten._linalg_eigh.default, a.triu() if triangle == "U" else a.tril(), triangle)[0]
    near(w, torch.linalg.eigvalsh(a))
    near(v * w[..., None, :].to(dtype) @ v.mH, a)
    orthonormal(v)
    repeated = torch.eye(4, dtype=dtype) * 2
    w, v = run(aten._linalg_eigh.default, repeated)[0]
    near(v * w.to(dtype) @ v.mH, repeated)


def _check_svd(a: torch.Tensor, full: bool) -> None:
    u, s, vh = run(aten._linalg_svd.default, a, full)[0]
    k = s.shape[-1]
    near(s, torch.linalg.svdvals(a))
    near(u[..., :k] * s[..., None, :].to(a.dtype) @ vh[..., :k, :], a)
    orthonormal(u)
    orthonormal(vh.mH)


@every_dtype
@every_shape
@pytest.mark.parametrize("full", [False, True])
def test_svd(full: bool, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    _check_svd(make(dtype, *shape), full)


@every_dtype
def test_svd_of_hard_matrices(dtype: torch.dtype) -> None:
    _check_svd(make(dtype, 2, 6, 2) @ make(dtype, 2, 2, 5), True)  # rank 2
    _check_svd(torch.zeros(3, 3, dtype=dtype), False)
    _check_svd(make(dtype, 40, 33), False)
    twos = torch.full((4, 3), 2.0, dtype=dtype)
    near(run(aten._linalg_svd.default, twos, False, False)[0][1], torch.linalg.svdvals(twos))


@every_dtype
def test_matrix_exp(dtype: torch.dtype) -> None:
    same(aten.linalg_matrix_exp, make(dtype, 3, 5, 5) * torch.tensor([0.0, 1, 4]).to(dtype)[:, None, None])


@every_dtype
def test_pinv(dtype: torch.dtype) -> None:
    low = make(dtype, 5, 2) @ make(dtype, 2, 4)
    limits: list[tuple[torch.Tensor, dict[str, Any]]] = [
        (make(dtype, 2, 5, 3), {}), (low, {"rtol": torch.tensor(1e-4)}),
        (make(dtype, 3, 5), {"atol": torch.tensor(0.9)}),
    ]  # fmt: skip
    for a, options in [*limits, (positive(dtype, 4, 4), {"hermitian": True})]:
        near(run(aten.linalg_pinv.atol_rtol_tensor, a, **options)[0][0], torch.linalg.pinv(a, **options))


@every_dtype
@pytest.mark.parametrize("driver", [None, "gels", "gelsd"])
def test_lstsq(driver: str | None, dtype: torch.dtype) -> None:
    for a, b in (((2, 5, 3), (2, 5, 4)), ((3, 5), (3, 2)), ((2, 5, 3), (2, 5))):
        same(aten.linalg_lstsq, make(dtype, *a), make(dtype, *b), driver=driver)


@every_dtype
def test_products_of_matrices(dtype: torch.dtype) -> None:
    same(aten.matrix_power, make(dtype, 4, 4), 3)
    same(aten.linalg_cross, make(dtype, 4, 3), make(dtype, 1, 3))
    same(aten.linalg_cross, make(dtype, 3, 4), make(dtype, 3, 4), dim=0)


# ---- LDL ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("hermitian", [False, True])
@every_dtype
def test_ldl(dtype: torch.dtype, hermitian: bool) -> None:
    """A small diagonal makes LAPACK take pivots of two rows, which negative pivot numbers say."""
    for shape in ((5, 5), (2, 3, 7, 7), (1, 1), (0, 0), (2, 0, 0)):
        a = make(dtype, *shape)
        a = a + (a.mH if hermitian else a.mT)
        a.diagonal(dim1=-2, dim2=-1).mul_(0.1)
        same(aten.linalg_ldl_factor_ex, a, hermitian=hermitian)
        factors, pivots, _ = torch.linalg.ldl_factor_ex(a, hermitian=hermitian)
        assert bool((pivots < 0).any()) or shape[-1] < 5
        same(aten.linalg_ldl_solve, factors, pivots, make(dtype, *shape[:-1], 2), hermitian=hermitian)


def test_ldl_of_zeros_says_where() -> None:
    same(aten.linalg_ldl_factor_ex, torch.zeros(3, 3))
    same(aten.linalg_ldl_factor_ex, torch.diag(torch.tensor([2.0, 0.0, 1.0])))


# ---- fft ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
@pytest.mark.parametrize("dims", [[0], [3], [1, 3], [0, 2], [3, 1, 0], [0, 1, 2, 3]], ids=str)
def test_fft(dims: list[int], dtype: torch.dtype) -> None:
    x = make(dtype, 3, 4, 5, 6)
    real = x.real.contiguous()
    half = torch.fft.rfftn(real, dim=dims)
    for normalization in range(3):
        same(aten._fft_c2c, x, dims, normalization, True)
        same(aten._fft_c2c, x, dims, normalization, False)
        same(aten._fft_r2c, real, dims, normalization, True)
        same(aten._fft_r2c, real, dims, normalization, False)
        same(aten._fft_c2r, half, dims, normalization, real.shape[dims[-1]])
