"""Sparse tensors on the device: COO, hybrid COO and CSR against the CPU; sparse gradients of embeddings."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support import python

INDICES = torch.tensor([[0, 2, 1, 0], [1, 0, 2, 1]])  # one place twice, out of order
VALUES = torch.tensor([1.0, 2.0, 3.0, 4.0])


def coo(device: str) -> Tensor:
    return torch.sparse_coo_tensor(INDICES.to(device), VALUES.to(device), (3, 4))


def hybrid(device: str) -> Tensor:
    return torch.sparse_coo_tensor(torch.tensor([[0, 2, 0]]), torch.arange(6.0).view(3, 2), (3, 2)).to(device)


def csr(device: str) -> Tensor:
    parts = (torch.tensor([0, 2, 3, 4]), torch.tensor([0, 1, 2, 3]), VALUES)
    return torch.sparse_csr_tensor(*(p.to(device) for p in parts), (3, 4))


def other(device: str) -> Tensor:
    return torch.sparse_coo_tensor(torch.tensor([[0, 1], [1, 3]]), torch.tensor([5.0, -6.0]), (3, 4)).to(device)


MAKERS = {"coo": coo, "hybrid": hybrid, "csr": csr}


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # "Sparse CSR tensor support is in beta state"
        yield


def same(actual: Any, expected: Any) -> None:
    """Layout, dtype, shape and dense value; a sparse result on the device."""
    if isinstance(expected, tuple | list):
        assert len(actual) == len(expected)
        for a, e in zip(actual, expected, strict=True):
            same(a, e)
    elif isinstance(expected, Tensor):
        assert actual.device.type == "tpu" and expected.device.type == "cpu"
        assert (actual.layout, actual.dtype, actual.shape) == (expected.layout, expected.dtype, expected.shape)
        dense = [t if t.layout == torch.strided else t.to_dense() for t in (actual.detach().cpu(), expected.detach())]
        torch.testing.assert_close(*dense, equal_nan=True)
    else:
        assert actual == expected


def check(function: Callable[[str], Any]) -> None:
    same(function("tpu"), function("cpu"))


def dense_like(x: Tensor) -> Tensor:
    return torch.arange(float(x.numel()), device=x.device).view(x.shape)


# ---- making and taking apart -----------------------------------------------------------------------------------------
def test_parts() -> None:
    check(lambda d: (coo(d)._indices(), coo(d)._values(), coo(d)._nnz(), coo(d).is_coalesced()))
    check(lambda d: (coo(d).coalesce().indices(), coo(d).coalesce().values(), coo(d).coalesce().is_coalesced()))
    check(lambda d: (hybrid(d).sparse_dim(), hybrid(d).dense_dim(), hybrid(d).coalesce()._nnz()))
    check(lambda d: (csr(d).crow_indices(), csr(d).col_indices(), csr(d).values(), csr(d)._nnz()))
    with pytest.raises(RuntimeError, match="uncoalesced"):
        coo("tpu").indices()


def test_ways_to_make_one() -> None:
    check(lambda d: torch.sparse_coo_tensor(INDICES.to(d), VALUES.to(d)))  # its size from the indices
    check(lambda d: torch.sparse_coo_tensor([[0, 1], [1, 0]], [1.0, 2.0], (2, 2), device=d))
    check(lambda d: torch.sparse_csr_tensor([0, 1, 2], [1, 0], [1.0, 2.0], (2, 2), device=d))
    check(lambda d: torch.sparse_csc_tensor([0, 1, 2], [1, 0], [1.0, 2.0], (2, 2), device=d))
    check(lambda d: torch.sparse_coo_tensor((3, 4), device=d))
    check(lambda d: torch.zeros(3, 4, layout=torch.sparse_coo, device=d))
    check(lambda d: torch.zeros_like(coo(d)))
    assert coo("tpu").is_sparse and coo("tpu").device.type == "tpu" and csr("tpu").is_sparse_csr


@pytest.mark.parametrize("to", ["to_sparse", "to_sparse_csr", "to_sparse_csc"])
@pytest.mark.parametrize("value", ["numbers", "zeros"])
def test_from_dense_and_back(to: str, value: str) -> None:
    x = torch.arange(12.0).view(3, 4) * (value == "numbers")
    check(lambda d: getattr(x.to(d), to)())
    check(lambda d: getattr(x.to(d), to)().to_dense())


def test_other_layouts() -> None:
    x = torch.arange(16.0).view(4, 4)
    check(lambda d: x.to(d).to_sparse(1))
    check(lambda d: x.to(d).to_sparse_bsr((2, 2)).to_dense())
    check(lambda d: x.to(d).to_sparse_bsc((2, 2)).to_dense())
    check(lambda d: coo(d).coalesce().to_sparse_csr())
    check(lambda d: csr(d).to_sparse())


def test_bad_indices() -> None:
    with pytest.raises(RuntimeError, match="found index 5"):
        torch.sparse_coo_tensor(
            torch.tensor([[5]], device="tpu"), torch.ones(1, device="tpu"), (3,), check_invariants=True
        )
    with pytest.raises(RuntimeError, match="crow_indices"):
        torch.sparse_csr_tensor([0, 5, 2], [0, 1], [1.0, 1.0], (2, 2), device="tpu", check_invariants=True)


@pytest.mark.parametrize("maker", MAKERS)
def test_printing_is_the_cpus(maker: str) -> None:
    text = lambda d: "".join(repr(MAKERS[maker](d)).replace("device='tpu:0',", "").split())  # noqa: E731
    assert text("tpu") == text("cpu")


# ---- operators -------------------------------------------------------------------------------------------------------
OPERATIONS: dict[str, Callable[[Tensor], Any]] = {
    "itself": lambda x: x,
    "to_dense": lambda x: x.to_dense(),
    "clone": lambda x: x.clone(),
    "detach": lambda x: x.detach(),
    "there and back": lambda x: x.cpu().to(x.device),
    "dtype": lambda x: (x.to(torch.float64), x.to(torch.int32)),
    "zero_": lambda x: x.clone().zero_(),
    "negate": lambda x: -x,
    "neg_": lambda x: x.clone().neg_(),
    "times a number": lambda x: (x * 2, 2 * x),
    "times a 0-d tensor": lambda x: x * torch.tensor(2.0, device=x.device),
    "mul_": lambda x: x.clone().mul_(3),
    "sum of two": lambda x: x + x,
    "add_": lambda x: x.clone().add_(x),
    "product of two": lambda x: x * x,
    "dense plus sparse": lambda x: torch.ones(x.shape, device=x.device) + x,
    "dense add_ sparse": lambda x: torch.ones(x.shape, device=x.device).add_(x, alpha=0.5),
    "times dense": lambda x: x * dense_like(x),
    "sparse_mask": lambda x: dense_like(x).sparse_mask(x.coalesce() if x.layout == torch.sparse_coo else x),
    "abs": lambda x: (x * -1).abs(),
    "functions": lambda x: (x.sqrt(), x.sin(), x.tanh(), x.relu(), x.expm1()),
    "sum": lambda x: x.sum(),
}
COO_ONLY: dict[str, Callable[[Tensor], Any]] = {
    "divided by a number": lambda x: (x / 2, torch.div(x, 2, rounding_mode="floor")),
    "difference": lambda x: x - x * 0.5,
    "sub_": lambda x: x.clone().sub_(x, alpha=2),
    "out=": lambda x: torch.neg(x, out=torch.zeros_like(x)),
    "copy_": lambda x: torch.zeros_like(x).copy_(x),
    "power": lambda x: x**2,
    "norm": lambda x: x.norm(),
    "sum over a dimension": lambda x: torch.sparse.sum(x, 0),
    "cat": lambda x: torch.cat([x, x]),
    "index_select": lambda x: x.index_select(0, torch.tensor([2, 0, 0], device=x.device)),
    "unsqueeze": lambda x: x.unsqueeze(0),
    "select": lambda x: x[0],
    "resize": lambda x: x.clone().sparse_resize_((4, *x.shape[1:]), x.sparse_dim(), x.dense_dim()),
}


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("maker", MAKERS)
def test_operation(maker: str, name: str) -> None:
    check(lambda d: OPERATIONS[name](MAKERS[maker](d)))


@pytest.mark.parametrize("name", COO_ONLY)
@pytest.mark.parametrize("maker", ["coo", "hybrid"])
def test_operation_of_coordinates(maker: str, name: str) -> None:
    check(lambda d: COO_ONLY[name](MAKERS[maker](d)))


def test_two_different_patterns() -> None:
    check(lambda d: coo(d) + other(d))
    check(lambda d: coo(d).coalesce() + other(d).coalesce())
    check(lambda d: coo(d) * other(d))
    check(lambda d: csr(d) + other(d).coalesce().to_sparse_csr())


# ---- products --------------------------------------------------------------------------------------------------------
RIGHT, LEFT = torch.arange(20.0).view(4, 5), torch.arange(15.0).view(5, 3)
PRODUCTS: dict[str, Callable[[Tensor, Callable[[Tensor], Tensor]], Tensor]] = {
    "mm": lambda x, to: x @ to(RIGHT),
    "dense first": lambda x, to: to(LEFT) @ x,
    "mv": lambda x, to: x @ to(RIGHT[:, 0]),
    "addmm": lambda x, to: torch.addmm(to(torch.ones(3, 5)), x, to(RIGHT), beta=0.5, alpha=2),
    "addmm of nothing": lambda x, to: torch.addmm(to(torch.full((3, 5), float("nan"))), x, to(RIGHT), beta=0),
    "sparse.mm": lambda x, to: torch.sparse.mm(x, to(RIGHT)),
    "sparse.addmm": lambda x, to: torch.sparse.addmm(to(torch.ones(3, 5)), x, to(RIGHT)),
    "two sparse ones": lambda x, to: x @ x.t(),
}


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("maker", ["coo", "csr"])
def test_product(maker: str, name: str) -> None:
    check(lambda d: PRODUCTS[name](MAKERS[maker](d), lambda t: t.to(d)))


def test_product_of_batches() -> None:
    x = torch.stack([torch.arange(12.0).view(3, 4), torch.eye(3, 4)])
    check(lambda d: torch.bmm(x.to_sparse().to(d), torch.arange(40.0).view(2, 4, 5).to(d)))


def test_half_precision_sums_in_float32() -> None:
    x, y = torch.ones(1, 3000).bfloat16().to_sparse().to("tpu"), torch.ones(3000, 1).bfloat16().to("tpu")
    assert (x @ y).item() == 3008  # 3000 to eight bits; a bfloat16 sum would stop at 256


# ---- gradients -------------------------------------------------------------------------------------------------------
def test_gradients() -> None:
    def of_product(d: str) -> Any:
        x, y = coo(d).coalesce().detach().requires_grad_(), RIGHT.clone().to(d).requires_grad_()
        (torch.sparse.mm(x, y) ** 2).sum().backward()
        return x.grad, y.grad

    def of_csr_product(d: str) -> Any:
        x, y = csr(d).requires_grad_(), RIGHT.clone().to(d).requires_grad_()
        ((x @ y) ** 2).sum().backward()
        return x.grad, y.grad

    def of_values(d: str) -> Any:
        v = VALUES.clone().to(d).requires_grad_()
        (torch.sparse_coo_tensor(INDICES.to(d), v, (3, 4)).to_dense() ** 2).sum().backward()
        return v.grad

    def of_dense(d: str) -> Any:
        x = torch.arange(12.0).view(3, 4).to(d).requires_grad_()
        (x.to_sparse().to_dense() ** 2).sum().backward()
        return x.grad

    for function in (of_product, of_csr_product, of_values, of_dense):
        check(function)


def trained(device: str, make: Callable[..., torch.optim.Optimizer]) -> Any:
    """Three steps on sparse gradients; every batch names a row twice."""
    table = nn.Embedding(10, 3, sparse=True)
    table.weight.data = torch.arange(30.0).view(10, 3) / 10
    table = table.to(device)
    optimizer = make(table.parameters())
    for i in range(3):
        optimizer.zero_grad()
        (table(torch.tensor([[1, 2, 1], [5, i, 9]], device=device)) ** 2).sum().backward()
        optimizer.step()
    return table.weight, table.weight.grad


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.SparseAdam(p, lr=0.1),
        lambda p: torch.optim.Adagrad(p, lr=0.1),
    ],
    ids=["SGD", "SGD with momentum", "SparseAdam", "Adagrad"],
)
def test_sparse_embedding(make: Callable[..., torch.optim.Optimizer]) -> None:
    check(lambda d: trained(d, make))


def test_sparse_gradients_add_up() -> None:
    def run(device: str) -> Tensor:
        table = nn.Embedding(10, 3, sparse=True).to(device)
        for rows in ([1, 2], [1, 3]):
            table(torch.tensor(rows, device=device)).sum().backward()
        return table.weight.grad

    check(run)


@pytest.mark.parametrize("reduce", ["sum", "mean", "amax", "amin"])
def test_products_that_reduce(reduce: str) -> None:
    """Row 1 has no entry; row 2 has two equal terms, of which the first gets the gradient."""

    def run(device: str) -> Any:
        entries = torch.tensor([[1.0, -2.0, 0.0], [0.0, 0.0, 0.0], [3.0, 0.0, 3.0]]).to_sparse_csr().to(device)
        entries = entries.detach().requires_grad_()
        dense = torch.tensor([[1.0, 2.0], [3.0, -4.0], [1.0, 5.0]], device=device, requires_grad=True)
        out = torch.sparse.mm(entries, dense, reduce)
        (out * out).sum().backward()
        return out, entries.grad, dense.grad

    check(run)


def test_sampled_product() -> None:
    def run(device: str) -> Any:
        entries = torch.tensor([[1.0, -2.0, 0.0], [0.0, 0.0, 0.0], [3.0, 0.0, 3.0]]).to_sparse_csr().to(device)
        a, b = (torch.arange(6.0, device=device).view(s).requires_grad_() for s in ((3, 2), (2, 3)))
        out = torch.sparse.sampled_addmm(entries, a, b, beta=0.5, alpha=2.0)
        out.values().sum().backward()
        return out, a.grad, b.grad

    check(run)


def test_masks() -> None:
    """A 0-d mask takes a copy, not the tensor itself; a projection keeps the entries that the mask has too."""

    def run(device: str) -> Any:
        number, one = torch.tensor(3.0, device=device), torch.tensor(1.0, device=device).to_sparse()
        taken = number.sparse_mask(one)._values()
        number.add_(1)
        t = torch.sparse_coo_tensor([[0, 1, 1, 3]], [1.0, 2.0, 3.0, 4.0], (6,), device=device)
        mask = torch.sparse_coo_tensor([[1, 1, 3, 5]], [1.0, 1.0, 1.0, 1.0], (6,), device=device)
        project = torch.ops.aten._sparse_mask_projection
        return taken, [project(x, mask, a)._values() for x in (t, t.coalesce()) for a in (False, True)]

    check(run)


# ---- limits ----------------------------------------------------------------------------------------------------------
def test_what_is_missing_says_so() -> None:
    with pytest.raises(NotImplementedError, match=r"aten::sort.*to_dense\(\)"):
        coo("tpu").sort()
    with pytest.raises(NotImplementedError, match=r"aten::exp.*to_dense\(\)"):
        coo("tpu").exp()
    with pytest.raises(RuntimeError, match=r"add\(sparse, dense\)"):
        coo("tpu") + torch.ones(3, 4, device="tpu")


def test_import_does_not_load_the_composites() -> None:
    done = python("import sys, torch; torch.ones(2, device='tpu') + 1; print('torch_tpu.sparse' in sys.modules)")
    assert done.stdout.split() == ["False"]
