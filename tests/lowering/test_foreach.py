"""``_foreach_*`` and gradient scaling: every overload against the CPU, in both forms, with numbers as operands."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_flatten, tree_map

from tests.lowering.harness import run
from torch_tpu.lowering import foreach, registry

aten = torch.ops.aten
SHAPES = [(3,), (), (2, 3), (0,)]
OVERLOADS = list(foreach._functional_overloads())
REPEATED = [op for op in OVERLOADS if foreach._single(op) is not None]


def clones(tree: Any) -> Any:
    return tree_map(lambda t: t.clone() if isinstance(t, torch.Tensor) else t, tree)


def written(op: OpOverload, *args: Any, **kwargs: Any) -> list[torch.Tensor]:
    """The tensors among the arguments after the program ran; those that it did not write are as before."""
    _, plan, outputs = run(op, *args, **kwargs)
    tensors = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)]
    place = {output.slot: i for i, output in enumerate(plan.outputs)}
    return [outputs[place[i]].reshape(t.shape) if i in place else t for i, t in enumerate(tensors)]


def check_written(op: OpOverload, *args: Any, **kwargs: Any) -> None:
    expected = clones((args, kwargs))
    op(*expected[0], **expected[1])
    flat = [t for t in tree_flatten(expected)[0] if isinstance(t, torch.Tensor)]
    torch.testing.assert_close(written(op, *args, **kwargs), flat, equal_nan=True)


def tensors(dtype: torch.dtype, seed: int, shapes: list[tuple[int, ...]] = SHAPES) -> list[torch.Tensor]:
    """Numbers in (0, 1), where every function of the family is defined, or small integers."""
    g = torch.Generator().manual_seed(seed)
    if dtype.is_complex or dtype.is_floating_point:
        return [(torch.rand(s, generator=g) * 0.8 + 0.1).to(dtype) for s in shapes]
    return [torch.randint(1, 2 if dtype == torch.bool else 9, s, generator=g).to(dtype) for s in shapes]


def arguments(op: OpOverload, dtype: torch.dtype) -> tuple[list[Any], dict[str, Any]]:
    """Arguments for any overload of the family, chosen by the types in its schema."""
    name = op._schema.name.removeprefix("aten::_foreach_")
    shapes = [(3, 3), (3, 3)] if name == "mm" else SHAPES[:3] if name == "max" else SHAPES
    made: dict[str, Any] = {}
    for i, a in enumerate(op._schema.arguments):
        kind = str(a.type)
        if kind == "List[Tensor]":
            made[a.name] = tensors(dtype, i, shapes)
        elif kind == "List[number]":
            made[a.name] = [2.5, 0.5, 1.5, 3.0] if dtype.is_floating_point else [2, 3, 1, 5]
        elif kind == "number":
            made[a.name] = 2 if a.name in ("alpha", "ord") else 2.5 if dtype.is_floating_point else 3
        elif kind == "Tensor":
            made[a.name] = torch.tensor(3).to(dtype)
    positional = [made[a.name] for a in op._schema.arguments if a.name in made and not a.kwarg_only]
    return positional, {a.name: made[a.name] for a in op._schema.arguments if a.name in made and a.kwarg_only}


def in_place(op: OpOverload) -> OpOverload | None:
    packet = getattr(aten, op._schema.name.removeprefix("aten::") + "_", None)
    return getattr(packet, op._overloadname, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.complex64])
@pytest.mark.parametrize("op", REPEATED, ids=lambda op: str(op).removeprefix("aten._foreach_"))
def test_overload(op: OpOverload, dtype: torch.dtype) -> None:
    args, kwargs = arguments(op, dtype)
    try:
        expected = op(*args, **kwargs)
    except Exception:
        pytest.skip(f"{op} has no {dtype} kernel on the CPU")
    got, _, _ = run(op, *args, **kwargs)
    torch.testing.assert_close(got[0], expected, equal_nan=True)
    if (mutating := in_place(op)) is None:
        return
    try:
        mutating(*clones(args), **kwargs)
    except RuntimeError:  # a result that the argument's dtype cannot hold; meta kernels have their own words for it
        with pytest.raises((RuntimeError, TypeError)):
            run(mutating, *args, **kwargs)
        return
    check_written(mutating, *args, **kwargs)


def test_every_overload_has_a_meaning() -> None:
    """All but the packed CPU tensor of scalars, which PyTorch's own kernel unpacks, and the sums of powers."""
    left = {str(op) for op in OVERLOADS if registry.lookup(foreach.registry_name(op)) is None}
    assert left == {
        "aten._foreach_addcdiv.Tensor",
        "aten._foreach_addcmul.Tensor",
        "aten._foreach_powsum.Scalar",
    }


@pytest.mark.parametrize("ord", [0, 1, 2, float("inf"), 3.5])
def test_norm(ord: float) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.complex64):
        xs = tensors(dtype, 1, SHAPES[:3])
        got, _, _ = run(aten._foreach_norm.Scalar, xs, ord)
        torch.testing.assert_close(got[0], aten._foreach_norm.Scalar(xs, ord))
    got, _, _ = run(aten._foreach_powsum.Scalar, tensors(torch.float32, 1), 2)
    torch.testing.assert_close(got[0], aten._foreach_powsum.Scalar(tensors(torch.float32, 1), 2))


def test_elements_promote_apart() -> None:
    """Each element is promoted as the single operator would, with its own number of the list."""
    xs = [torch.tensor([1, 2]), torch.tensor([1.5]), torch.tensor([True]), torch.tensor([1.5], dtype=torch.bfloat16)]
    numbers = [2, 2.5, 3, 1]
    for op in (aten._foreach_add.ScalarList, aten._foreach_mul.ScalarList, aten._foreach_div.ScalarList):
        got, _, _ = run(op, xs, numbers)
        torch.testing.assert_close(got[0], op(xs, numbers))
    other = [torch.tensor([0.5]), torch.tensor([3]), torch.tensor([2], dtype=torch.uint8), torch.tensor([[1.0], [2.0]])]
    got, _, _ = run(aten._foreach_mul.List, xs, other)
    torch.testing.assert_close(got[0], aten._foreach_mul.List(xs, other))


def test_large_integers_and_complex_numbers_stay_exact() -> None:
    xs = [torch.tensor([2**62, 1]), torch.tensor([3])]
    numbers = [2**61 + 1, -(2**53) - 1]
    got, plan, _ = run(aten._foreach_add.ScalarList, xs, numbers)
    assert [o.dtype for o in plan.operands if o.kind == "scalars"] == [torch.int64]
    torch.testing.assert_close(got[0], aten._foreach_add.ScalarList(xs, numbers), rtol=0, atol=0)
    zs = [torch.tensor([1 + 2j]), torch.tensor([2.0])]
    got, plan, _ = run(aten._foreach_mul.ScalarList, zs, [2j, 3.0])
    torch.testing.assert_close(got[0], aten._foreach_mul.ScalarList(zs, [2j, 3.0]))


@pytest.mark.parametrize(
    ("op", "before", "after"),
    [
        (aten._foreach_addcdiv_.ScalarList, [1.0, 2.0, 3.0, 4.0], [0.5, 7.0, -1.0, 1.0]),
        (aten._foreach_add_.Scalar, 0.5, -3.0),
        (aten._foreach_lerp_.Scalar, 0.25, 0.75),
        (aten._foreach_maximum_.ScalarList, [0.0, 1.0, 2.0, 3.0], [5.0, 5.0, 5.0, 5.0]),
    ],
    ids=str,
)
def test_new_numbers_are_the_same_program(op: OpOverload, before: Any, after: Any) -> None:
    lists = [tensors(torch.float32, i) for i, a in enumerate(op._schema.arguments) if str(a.type) == "List[Tensor]"]
    first, second = (run(op, *lists, numbers)[1] for numbers in (before, after))
    assert first.text == second.text
    assert len([o for o in first.operands if o.kind in ("scalar", "scalars")]) == 1
    check_written(op, *lists, after)


def test_listed_exponents_are_part_of_the_program() -> None:
    xs = tensors(torch.float32, 0)
    assert run(aten._foreach_pow.Scalar, xs, 2.0)[1].text == run(aten._foreach_pow.Scalar, xs, 3.3)[1].text
    got, _, _ = run(aten._foreach_pow.ScalarList, xs, [2.0, 0.5, -1.0, 3.3])
    torch.testing.assert_close(got[0], aten._foreach_pow.ScalarList(xs, [2.0, 0.5, -1.0, 3.3]))


def test_powers_of_bools() -> None:
    xs = [torch.tensor([True, False])]
    for op, exponent in (
        *((aten._foreach_pow.Scalar, n) for n in (True, False, 1, 2)),
        (aten._foreach_pow.ScalarList, [True]),
    ):
        assert torch.equal(run(op, xs, exponent)[0][0][0], op(xs, exponent)[0])


def test_errors_are_pytorchs() -> None:
    x = tensors(torch.float32, 0)
    with pytest.raises(RuntimeError, match=r"same number of tensors|same length"):
        run(aten._foreach_add.List, x, x[:2])
    with pytest.raises(RuntimeError, match=r"can't be cast|not possible"):
        run(aten._foreach_add_.Scalar, [torch.tensor([1])], 0.5)
    with pytest.raises(RuntimeError, match=r"size of tensor|broadcast"):
        run(aten._foreach_add.List, [torch.ones(2)], [torch.ones(3)])


# ---- gradient scaling --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bad", [None, float("nan"), float("inf"), float("-inf")])
def test_unscale(dtype: torch.dtype, bad: float | None) -> None:
    grads = tensors(dtype, 0)
    if bad is not None:
        grads[2][1, 1] = bad
    for found in (0.0, 1.0):
        check_written(
            aten._amp_foreach_non_finite_check_and_unscale_.default, grads, torch.tensor(found), torch.tensor(0.25)
        )


@pytest.mark.parametrize(("found", "tracker", "scale"), [(0, 3, 8), (1, 3, 8), (2, 4, 8), (0, 4, 8), (0, 4, 3e38)])
def test_update_scale(found: float, tracker: int, scale: float) -> None:
    state = torch.tensor(float(scale)), torch.tensor(tracker, dtype=torch.int32), torch.tensor(float(found))
    check_written(aten._amp_update_scale_.default, *state, 2.0, 0.5, 5)


# ---- lists that name memory twice -----------------------------------------------------------------------------------
def _twice(d: str) -> list[Any]:
    a = torch.ones(3, device=d)
    torch._foreach_add_([a, a], 1)
    return [a]


def _overlapping(d: str) -> list[Any]:
    a = torch.ones(3, device=d)
    torch._foreach_mul_([a[:2], a[1:]], 3)
    return [a]


def _crossed(d: str) -> list[Any]:
    a, b = torch.ones(2, device=d), torch.full((2,), 2.0, device=d)
    torch._foreach_add_([a, b], [b, a])
    return [a, b]


def _transposed(d: str) -> list[Any]:
    a = torch.ones(2, 2, device=d)
    torch._foreach_add_([a, a.t()], 1)
    return [a]


def _disjoint(d: str) -> list[Any]:
    a = torch.arange(6.0, device=d)
    torch._foreach_mul_([a[:3], a[3:]], [a[:3], a[3:]])
    return [a]


def _clipped(d: str) -> list[Any]:
    p = torch.nn.Parameter(torch.ones(3, device=d))
    p.grad = torch.full((3,), 10.0, device=d)
    torch.nn.utils.clip_grad_norm_([p, p], 1.0)
    return [p.grad]


@pytest.mark.parametrize("case", [_twice, _overlapping, _crossed, _transposed, _disjoint, _clipped])
def test_items_of_a_list_are_written_in_order(case: Any) -> None:
    for got, want in zip(case("tpu"), case("cpu"), strict=True):
        torch.testing.assert_close(got.cpu(), want)


def test_a_number_among_the_items_does_not_hide_their_order() -> None:
    def run_on(d: str) -> list[list[float]]:
        a, b = torch.ones(2, device=d), torch.ones(2, device=d)
        torch._foreach_add_([a, b], [torch.tensor(1.0), a])
        return [a.tolist(), b.tolist()]

    assert run_on("tpu") == run_on("cpu") == [[2, 2], [3, 3]]
