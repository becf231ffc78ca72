"""Reading and writing by position against CPU PyTorch: index, gather, scatter, embedding, data-dependent sizes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.lowering.harness import check, run
from torch_tpu.lowering import data_dependent
from torch_tpu.tracing.schema import resolve

aten = torch.ops.aten
NAN, INF = math.nan, math.inf
REAL = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.uint8]
DTYPES = [*REAL, torch.bool, torch.complex64]
NUMBERS = [torch.float32, torch.float16, torch.int64, torch.int32, torch.uint8]
HALF_TOLERANCE = {torch.float16: {"rtol": 2e-3, "atol": 2e-3}, torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2}}


def make(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    if dtype.is_floating_point or dtype.is_complex:
        wide = torch.complex128 if dtype.is_complex else torch.float64
        return torch.randn(shape, generator=generator, dtype=wide).to(dtype)
    return torch.randint(0, 2 if dtype == torch.bool else 100, shape, generator=generator).to(dtype)


def i64(*values: Any) -> torch.Tensor:
    return torch.tensor(*values)


def mask(*shape: int) -> torch.Tensor:
    return make(torch.bool, *shape)


def reported(op: Any, *args: Any, **kwargs: Any) -> bool:
    """Whether the program raises the flag for an index out of range."""
    _, plan, outputs = run(op, *args, **kwargs)
    flags = [int(v) for v, o in zip(outputs, plan.outputs, strict=True) if o.slot == -2]
    return flags[0] in range(7, 7 + len(plan.faults))


# ---- index ----------------------------------------------------------------------------------------------------------
V, M = i64([2, 0, -1]), i64([[1, 0], [-2, 1]])
INDICES = {
    "first": [V],
    "second": [None, V],
    "last": [None, None, i64([0, -5, 4])],
    "adjacent": [None, V, i64([1, 2, 3])],
    "separated": [V, None, i64([0, 4, 2])],
    "matrix": [None, M],
    "broadcast": [M, i64([1, 3])],
    "broadcast separated": [M, None, i64([[4], [0]])],
    "all": [V, V, V],
    "one": [i64([1])],
    "scalar": [None, i64(-1)],
    "scalars": [i64(0), None, i64(2)],
    "int32": [V.int(), None],
    "none chosen": [None, torch.zeros(0, dtype=torch.int64)],
}


@pytest.mark.parametrize("indices", INDICES.values(), ids=INDICES)
def test_index(indices: list[Any]) -> None:
    check(aten.index.Tensor, make(torch.float32, 3, 4, 5), indices)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_index_dtypes(dtype: torch.dtype) -> None:
    check(aten.index.Tensor, make(dtype, 3, 4, 5), INDICES["separated"])
    check(aten._unsafe_index.Tensor, make(dtype, 3, 4, 5).permute(2, 0, 1), [None, V])


@pytest.mark.parametrize("shape", [(3, 0, 4), (0, 3), (3, 4, 0)], ids=str)
def test_index_empty(shape: tuple[int, ...]) -> None:
    none = torch.zeros(0, dtype=torch.int64)
    check(aten.index.Tensor, torch.zeros(shape), [none] if shape[0] == 0 else [i64([0, 1])])


# ---- index_put ------------------------------------------------------------------------------------------------------
UNIQUE = {
    "first": ([i64([2, 0, -2])], (3, 4, 5)),
    "second, one row": ([None, i64([2, 0])], (5,)),
    "separated": ([i64([1, 0, 2]), None, i64([0, 0, -1])], (3, 4)),
    "broadcast": ([i64([[0], [2]]), i64([1, 3])], (2, 2, 5)),
    "scalar value": ([None, None, i64([1, 4])], ()),
    "empty": ([torch.zeros(0, dtype=torch.int64)], (4, 5)),
}
MASKED = {
    "one value": ([mask(3)], ()),
    "one row": ([mask(3)], (4, 5)),
    "one leading": ([mask(3)], (1, 4, 5)),
    "middle": ([None, mask(4)], (3, 1, 5)),
    "middle, trailing": ([None, mask(4)], (5,)),
    "matrix": ([mask(3, 4)], (5,)),
    "cube": ([mask(3, 4, 5)], ()),
    "last two": ([None, mask(4, 5)], (3, 1)),
    "uint8": ([mask(3).byte()], (4, 5)),
    "with an index": ([mask(3), i64(1)], (5,)),
    "with an index of one": ([mask(3), i64([1])], ()),
    "two masks": ([i64([True, False, True]), i64([False, True, True, False])], (5,)),
    "two masks, one single": ([i64([False, False, True]), i64([False, True, True, False])], ()),
    "none true": ([torch.zeros(3, dtype=torch.bool)], ()),
}
COUNTED = {
    "rows": ([i64([True, False, True])], (2, 4, 5)),
    "elements": ([mask(3, 4, 5)], (int(mask(3, 4, 5).sum()),)),
    "with indices": ([i64([True, False, True]), i64([1, 3])], (2, 5)),
    "single with indices": ([i64([False, False, True]), i64([1, 3])], (2, 5)),
    "middle": ([None, i64([True, False, True, False])], (3, 2, 5)),
}


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(
    "case", [*UNIQUE.values(), *MASKED.values(), *COUNTED.values()], ids=[*UNIQUE, *MASKED, *COUNTED]
)
def test_index_put(case: tuple[list[Any], tuple[int, ...]], accumulate: bool) -> None:
    indices, shape = case
    check(aten.index_put.default, make(torch.float32, 3, 4, 5), indices, make(torch.float32, *shape), accumulate)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_index_put_dtypes(dtype: torch.dtype) -> None:
    x, again = make(dtype, 4, 3), i64([1, 1, -1, 1, 0])
    check(aten.index_put.default, x, [again], make(dtype, 5, 3), True, **HALF_TOLERANCE.get(dtype, {}))
    check(aten.index_put_.default, x, [i64([3, 0])], make(dtype, 2, 3))
    check(aten._index_put_impl_.default, x, [mask(4)], make(dtype), False, True)


def test_index_put_into_permuted_memory() -> None:
    check(aten.index_put_.default, make(torch.float32, 5, 3, 4).permute(1, 2, 0), [i64([0, 2])], make(torch.float32, 5))


def test_a_mask_of_another_shape_is_an_index_error() -> None:
    with pytest.raises(IndexError, match="shape of the mask"):
        run(aten.index_put.default, torch.zeros(3, 4), [mask(4)], torch.ones(()))


def test_half_sums_round_once() -> None:
    """4096 ones added one by one stop at 256 in bfloat16."""
    got, _, _ = run(
        aten.index_put.default, torch.zeros(1, dtype=torch.bfloat16), [torch.zeros(4096, dtype=torch.int64)],
        torch.ones(4096, dtype=torch.bfloat16), True,
    )  # fmt: skip
    assert got[0].item() == 4096


# ---- along a dimension ----------------------------------------------------------------------------------------------
ALONG = {  # index, dim: into shape (3, 4, 5)
    "full": (torch.arange(60).reshape(3, 4, 5) * 7 % 4, 1),
    "smaller": (i64([[[0, 3], [2, 2]]]), -1),
    "smaller first": (i64([[[2], [0]], [[0], [1]]]), 0),
    "empty": (torch.zeros(3, 0, 5, dtype=torch.int64), 1),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("index, dim", ALONG.values(), ids=ALONG)
def test_gather_and_scatter(index: torch.Tensor, dim: int, dtype: torch.dtype) -> None:
    x, src, close = make(dtype, 3, 4, 5), make(dtype, 4, 4, 6), HALF_TOLERANCE.get(dtype, {})
    check(aten.gather.default, x, dim, index)
    check(aten.scatter_add.default, x, dim, index, src, **close)
    once = index.clamp(max=0)  # the order of several writes to one place is not defined
    check(aten.scatter.value, x, dim, index, 3)
    check(aten.scatter.src, x, dim, once[:, :1, :1], src)
    if dtype.itemsize > 1 and not dtype.is_complex:
        check(aten.scatter.reduce, x, dim, index, src, reduce="multiply", **close)
        check(aten.scatter.value_reduce, x, dim, index, 2, reduce="add", **close)


@pytest.mark.parametrize("index", [i64(0), i64([0])], ids=["0-d", "1-d"])
def test_scalar_along(index: torch.Tensor) -> None:
    x = make(torch.float32)
    check(aten.gather.default, x, 0, index)
    check(aten.scatter_add.default, x, 0, index, torch.ones(index.shape))
    check(aten.index_select.default, x, 0, index)
    check(aten.index_add.default, x, 0, index, torch.ones(()), alpha=2)
    check(aten.index_copy.default, x, 0, index, torch.ones(()))
    check(aten.index_fill.int_Scalar, x, 0, index, 4)


REDUCED = make(torch.float32, 4, 3)
SPECIAL = torch.tensor([NAN, -INF, INF, 0.0, -0.0, 2.0])


@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("reduce", ["sum", "prod", "mean", "amax", "amin"])
@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
def test_scatter_reduce(dtype: torch.dtype, reduce: str, include_self: bool) -> None:
    x, src = make(dtype, 4, 3), make(dtype, 5, 3)
    if dtype in (torch.int64, torch.int32):
        x, src = x - 50, src - 50
    close = HALF_TOLERANCE.get(dtype, {})
    index = i64([[0, 1, 2], [0, 0, 3], [2, 1, 3], [0, 1, 2], [0, 0, 0]])
    check(aten.scatter_reduce.two, x, 0, index, src, reduce, include_self=include_self, **close)
    if reduce != "sum":
        check(aten.index_reduce.default, x, 0, i64([1, 1, 3, 1, 0]), src, reduce, include_self=include_self, **close)


@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("reduce", ["sum", "prod", "mean", "amax", "amin"])
def test_scatter_reduce_special_values(reduce: str, include_self: bool) -> None:
    x = torch.tensor([1.0, NAN, -INF, 3.0])
    check(aten.scatter_reduce.two, x, 0, i64([0, 2, 2, 0, 1, 1]), SPECIAL, reduce, include_self=include_self)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_slices(dim: int, dtype: torch.dtype) -> None:
    x, index = make(dtype, 3, 4, 5), i64([2, 0, 2, 2])
    source = make(dtype, *(4 if i == dim % 3 else n for i, n in enumerate(x.shape)))
    close = HALF_TOLERANCE.get(dtype, {})
    check(aten.index_select.default, x, dim, index)
    check(aten.index_select.default, x, dim, index.int())
    check(aten.index_add.default, x, dim, index, source, alpha=1 if dtype == torch.bool else 3, **close)
    check(aten.index_copy.default, x, dim, i64([2, 0]), source.narrow(dim, 0, 2))
    check(aten.index_fill.int_Scalar, x, dim, i64([-1, 0]), 1)
    check(aten.index_fill.int_Tensor, x, dim, index, make(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_flat(dtype: torch.dtype) -> None:
    x, index = make(dtype, 3, 4), i64([[-1, 0], [5, -12]])
    check(aten.take.default, x, index)
    check(aten.put.default, x, index, make(dtype, 4))
    check(aten.put_.default, x.t(), i64([1, 1, 2]), make(dtype, 3), True, **HALF_TOLERANCE.get(dtype, {}))


# ---- masks ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("shape", [(3, 4), (4,), (2, 3, 4), ()], ids=str)
def test_masked_scatter(shape: tuple[int, ...]) -> None:
    x, m = make(torch.float32, 3, 4), mask(*shape)
    source = make(torch.float32, 5, 7)
    check(aten.masked_scatter.default, x, m, source)
    if m.ndim < 3:
        check(aten.masked_scatter_.default, x.t().contiguous().t(), m, source)


def test_masked_scatter_backward() -> None:
    grad, m = make(torch.float32, 3, 4), mask(3, 4)
    (got,), _, _ = run(aten.masked_scatter_backward.default, grad, m, [5, 3])
    want = torch.zeros(15)
    want[: int(m.sum())] = grad[m]
    assert torch.equal(got, want.reshape(5, 3))


# ---- out of range ---------------------------------------------------------------------------------------------------
X = make(torch.float32, 3, 4)
OUT_OF_RANGE = {  # operator, arguments with {} for the index; in range; out of range
    "index": (aten.index.Tensor, lambda i: (X, [i]), [-3, 2], [3, -4, 2**40]),
    "index_put": (aten.index_put.default, lambda i: (X, [i], torch.ones(())), [-3, 2], [3, -4, 2**32]),
    "index_select": (aten.index_select.default, lambda i: (X, 0, i), [0, 2], [3, -1]),
    "index_add": (aten.index_add.default, lambda i: (X, 0, i, X[:1]), [0, 2], [3, -1]),
    "index_fill": (aten.index_fill.int_Scalar, lambda i: (X, 0, i, 1), [-3, 2], [3, -4]),
    "gather": (aten.gather.default, lambda i: (X, 0, i[None]), [0, 2], [3, -1, 2**32]),
    "scatter": (aten.scatter_add.default, lambda i: (X, 0, i[None], X), [0, 2], [3, -1]),
    "take": (aten.take.default, lambda i: (X, i), [-12, 11], [12, -13]),
    "embedding": (aten.embedding.default, lambda i: (X, i), [0, 2], [3, -1]),
    "one_hot": (aten.one_hot.default, lambda i: (i, 4), [0, 3], [4, -1]),
}


@pytest.mark.parametrize("op, arguments, good, bad", OUT_OF_RANGE.values(), ids=OUT_OF_RANGE)
def test_out_of_range_is_reported(op: Any, arguments: Any, good: list[int], bad: list[int]) -> None:
    assert [reported(op, *arguments(i64([v]))) for v in good] == [False] * len(good)
    assert [reported(op, *arguments(i64([v]))) for v in bad] == [True] * len(bad)


def test_writes_out_of_range_write_nothing() -> None:
    for bad in (3, -4, 2**32 + 1):
        (got,), _, _ = run(aten.index_put.default, X, [i64([bad])], torch.ones(()))
        assert torch.equal(got, X)


def test_masks_and_values_that_do_not_match_are_reported() -> None:
    put = aten.index_put.default
    assert reported(put, X, [i64([True, True, True])], torch.ones(2, 4))
    assert not reported(put, X, [i64([True, False, True])], torch.ones(2, 4))
    assert reported(aten.masked_scatter.default, X, torch.ones(3, 4, dtype=torch.bool), torch.ones(11))


# ---- embedding ------------------------------------------------------------------------------------------------------
WORDS = i64([[1, 2, 2], [2, 0, 6]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("padding", [-1, 2, 0])
def test_embedding(padding: int, dtype: torch.dtype) -> None:
    check(aten.embedding.default, make(dtype, 7, 4), WORDS, padding)
    for scaled in (False, True):
        close = HALF_TOLERANCE.get(dtype, {})
        check(aten.embedding_dense_backward.default, make(dtype, 2, 3, 4), WORDS, 7, padding, scaled, **close)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, INF])
def test_embedding_renorm(norm_type: float) -> None:
    check(aten.embedding_renorm_.default, make(torch.float32, 7, 4) * 2, i64([1, 2, 2, 6]), 1.5, norm_type)


def test_one_hot() -> None:
    check(aten.one_hot.default, i64([[1, 0], [3, 2]]), 5)
    check(aten.one_hot.default, torch.zeros(2, 0, dtype=torch.int64), 3)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("padding", [-1, 2])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("mode", [0, 1, 2], ids=["sum", "mean", "max"])
def test_embedding_bag(mode: int, last: bool, padding: int, weighted: bool) -> None:
    """Values and gradients; one bag is empty. The further results have other shapes on the CPU."""
    if weighted and mode:
        pytest.skip("weights are for sums")
    weight, indices = make(torch.float32, 10, 5).requires_grad_(), i64([1, 2, 2, 9, 0, 2, 1, 3, 3])
    offsets = i64([0, 3, 3, 5] + ([9] if last else []))
    weights = make(torch.float32, 9).requires_grad_() if weighted else None
    want = torch.nn.functional.embedding_bag(
        indices, weight, offsets, mode=["sum", "mean", "max"][mode], per_sample_weights=weights,
        include_last_offset=last, padding_idx=None if padding < 0 else padding,
    )  # fmt: skip
    grad = make(torch.float32, *want.shape)
    want.backward(grad)
    w, p = weight.detach(), None if weights is None else weights.detach()
    got, _, _ = run(aten._embedding_bag.default, w, indices, offsets, False, mode, False, p, last, padding)
    torch.testing.assert_close(got[0], want.detach())
    back, _, _ = run(
        aten._embedding_bag_backward.default, grad, indices, offsets, *got[1:], 10, False, mode, False, p, padding
    )
    torch.testing.assert_close(back[0], weight.grad)
    if weights is not None:
        back, _, _ = run(
            aten._embedding_bag_per_sample_weights_backward.default, grad, w, indices, offsets, got[1], mode, padding
        )
        torch.testing.assert_close(back[0], weights.grad)


# ---- sizes that depend on data --------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def padded_on_cpu() -> Iterator[None]:
    """The padded operators on CPU tensors run their programs: the composites can be compared without the device."""
    library = torch.library.Library("tpu", "IMPL", "CPU")

    def through(name: str) -> Any:
        op = resolve(f"tpu::{name}")

        def kernel(*args: Any, **kwargs: Any) -> Any:
            got, _, _ = run(op, *args, **kwargs)
            return got[0] if len(op._schema.returns) == 1 else tuple(got)

        return kernel

    for name in ("nonzero_padded", "masked_select_padded", "unique_padded", "repeat_interleave"):
        library.impl(name, through(name))
    yield
    library._destroy()


def same(name: str, *args: Any, **kwargs: Any) -> None:
    """The composite gives what the CPU operator gives."""
    want = resolve(f"aten::{name}")(*args, **kwargs)
    got = data_dependent.HOST_COMPOSITES[name](*args, **kwargs)
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True, check_stride=True)


VALUES = {
    "float": torch.tensor([3.0, NAN, -0.0, 0.0, NAN, -INF, 3.0, 1.0]),
    "int": i64([5, 5, -2, 7, 7, 5, 0]),
    "bool": mask(9),
    "uint8": make(torch.uint8, 20) % 5,
    "bfloat16": (make(torch.float32, 20) * 2).round().bfloat16(),
    "matrix": make(torch.int64, 4, 6) % 5,
    "zeros": torch.zeros(3, 2),
    "empty": torch.zeros(0),
    "scalar": torch.tensor(2.5),
}


@pytest.mark.usefixtures("padded_on_cpu")
@pytest.mark.parametrize("x", VALUES.values(), ids=VALUES)
def test_data_dependent(x: torch.Tensor) -> None:
    same("nonzero", x)
    same("masked_select", x, mask(*x.shape))
    same("_unique2", x, True, True, True)
    same("_unique2", x, True, False, False)
    same("unique_consecutive", x, True, True)
    same("_unique", x, True, True)


@pytest.mark.usefixtures("padded_on_cpu")
def test_masked_select_broadcasts() -> None:
    same("masked_select", make(torch.float32, 3, 1), mask(4))


ROWS = i64([[1, 2, 0], [0, 9, 9], [1, 2, 0], [1, 1, 5], [0, 9, 9]])


@pytest.mark.usefixtures("padded_on_cpu")
@pytest.mark.parametrize(
    "x, dim", [(ROWS, 0), (ROWS.t(), 1), (ROWS[:, None, :], 0), (ROWS.flatten(), 0), (ROWS[:1], -2)]
)
def test_unique_slices(x: torch.Tensor, dim: int) -> None:
    same("unique_dim", x.contiguous(), dim, True, True, True)
    same("unique_consecutive", x.contiguous(), True, True, dim)


@pytest.mark.usefixtures("padded_on_cpu")
def test_bincount_and_repeats() -> None:
    x = i64([1, 3, 3, 0, 1])
    same("bincount", x)
    same("bincount", x, torch.tensor([0.5, 1, 2, 3, 4]), 7)
    same("bincount", x.int(), i64([1, 2, 3, 4, 5]))
    same("bincount", torch.zeros(0, dtype=torch.int64), None, 3)
    same("repeat_interleave.Tensor", i64([2, 0, 0, 3, 1]))
    same("repeat_interleave.Tensor", i64([2, 0, 3]).int(), output_size=5)
    same("repeat_interleave.Tensor", i64([0, 0]))
    with pytest.raises(RuntimeError, match="non-negative"):
        data_dependent.bincount(i64([1, -1]))
    with pytest.raises(RuntimeError, match="negative"):
        data_dependent.repeat_interleave(i64([1, -1]))


@pytest.mark.parametrize("size", [0, 2, 20])
def test_nonzero_static(size: int) -> None:
    check(aten.nonzero_static.default, mask(3, 4), size=size, fill_value=-7, strides=False)
