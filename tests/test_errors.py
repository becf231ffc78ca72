"""Bad arguments raise what the CPU raises: the same type, the same message, at the same call."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support import outcome

ones, zeros = torch.ones, torch.zeros

SHAPES: dict[str, Callable[[str], object]] = {
    "add": lambda d: ones(2, 3, device=d) + ones(2, 4, device=d),
    "add_": lambda d: ones(3, device=d).add_(ones(2, 3, device=d)),
    "mm": lambda d: torch.mm(ones(2, 3, device=d), ones(2, 3, device=d)),
    "mm of a vector": lambda d: torch.mm(ones(3, device=d), ones(3, 3, device=d)),
    "matmul": lambda d: ones(2, 3, device=d) @ ones(4, device=d),
    "bmm": lambda d: torch.bmm(ones(2, 3, 4, device=d), ones(3, 4, 5, device=d)),
    "addmm": lambda d: torch.addmm(ones(7, device=d), ones(2, 3, device=d), ones(3, 4, device=d)),
    "linear": lambda d: F.linear(ones(2, 3, device=d), ones(4, 5, device=d)),
    "conv2d channels": lambda d: F.conv2d(ones(1, 3, 5, 5, device=d), ones(4, 2, 3, 3, device=d)),
    "conv2d kernel": lambda d: F.conv2d(ones(1, 3, 2, 2, device=d), ones(4, 3, 3, 3, device=d)),
    "cat": lambda d: torch.cat([ones(2, 3, device=d), ones(2, 4, device=d)]),
    "cat of nothing": lambda d: torch.cat([]),
    "stack": lambda d: torch.stack([ones(2, device=d), ones(3, device=d)]),
    "view": lambda d: ones(6, device=d).view(4, 2),
    "reshape": lambda d: ones(6, device=d).reshape(4, -1),
    "expand": lambda d: ones(2, 3, device=d).expand(2, 4),
    "copy_": lambda d: ones(2, device=d).copy_(ones(3, device=d)),
    "copy_ that would broadcast the target": lambda d: ones(3, device=d).copy_(ones(2, 3, device=d)),
    "where": lambda d: torch.where(ones(2, dtype=torch.bool, device=d), ones(3, device=d), ones(2, device=d)),
    "sum over a missing dimension": lambda d: ones(2, device=d).sum(3),
    "softmax over a missing dimension": lambda d: ones(2, device=d).softmax(1),
    "argmax of nothing": lambda d: ones(0, device=d).argmax(),
    "max over an empty dimension": lambda d: ones(2, 0, device=d).max(1),
    "index of too many dimensions": lambda d: ones(2, device=d)[0, 0],
    "index out of range": lambda d: ones(2, device=d)[5],
    "masks": lambda d: ones(2, 3, device=d)[ones(3, 3, dtype=torch.bool, device=d)],
    "item": lambda d: ones(2, device=d).item(),
    "bool": lambda d: bool(ones(2, device=d)),
    "topk": lambda d: ones(3, device=d).topk(4),
    "gather": lambda d: ones(2, 3, device=d).gather(0, zeros(3, 4, dtype=torch.int64, device=d)),
    "layer_norm": lambda d: F.layer_norm(ones(2, 3, device=d), (4,)),
    "batch_norm": lambda d: F.batch_norm(ones(1, 3, device=d), None, None, training=True),
    "group_norm": lambda d: F.group_norm(ones(2, 3, 4, device=d), 2),
    "cross_entropy": lambda d: F.cross_entropy(ones(2, 3, device=d), zeros(3, dtype=torch.int64, device=d)),
    "max_pool2d": lambda d: F.max_pool2d(ones(1, 1, 2, 2, device=d), 5),
    "roll": lambda d: torch.roll(ones(2, 3, device=d), (1, 2), (0,)),
    "out= of another shape that cannot be resized": lambda d: torch.add(
        ones(2, device=d), 1, out=ones(3, device=d).expand(2, 3)
    ),
    "dot": lambda d: torch.dot(ones(2, device=d), ones(3, device=d)),
    "negative size": lambda d: torch.empty(-1, device=d),
    "repeat": lambda d: ones(2, 3, device=d).repeat(2),
    "split": lambda d: ones(4, device=d).split([1, 2]),
    "tril of a vector": lambda d: ones(3, device=d).tril(),
    "cholesky": lambda d: torch.linalg.cholesky(ones(2, 3, device=d)),
    "one_hot": lambda d: F.one_hot(torch.tensor([1.5], device=d)),
}

DTYPES: dict[str, Callable[[str], object]] = {
    "mm": lambda d: torch.mm(ones(2, 2, device=d), ones(2, 2, dtype=torch.float64, device=d)),
    "matmul of bool and float": lambda d: ones(2, 2, dtype=torch.bool, device=d) @ ones(2, 2, device=d),
    "in-place float into int": lambda d: ones(2, dtype=torch.int64, device=d).add_(1.5),
    "in-place complex into float": lambda d: ones(2, device=d).mul_(1j),
    "out= of a narrower kind": lambda d: torch.add(ones(2, device=d), 1.5, out=zeros(2, dtype=torch.int64, device=d)),
    "subtraction of bools": lambda d: ones(2, dtype=torch.bool, device=d) - ones(2, dtype=torch.bool, device=d),
    "negation of bool": lambda d: -ones(2, dtype=torch.bool, device=d),
    "bitwise and of floats": lambda d: ones(2, device=d) & ones(2, device=d),
    "shift of floats": lambda d: torch.bitwise_left_shift(ones(2, device=d), 1),
    "mean of integers": lambda d: ones(2, dtype=torch.int64, device=d).mean(),
    "softmax of integers": lambda d: ones(2, dtype=torch.int64, device=d).softmax(0),
    "max of complex": lambda d: ones(2, dtype=torch.complex64, device=d).max(),
    "sort of complex": lambda d: ones(2, dtype=torch.complex64, device=d).sort(),
    "comparison of complex": lambda d: ones(2, dtype=torch.complex64, device=d) < 1,
    "floor of complex": lambda d: ones(2, dtype=torch.complex64, device=d).floor(),
    "clamp of complex": lambda d: ones(2, dtype=torch.complex64, device=d).clamp(0),
    "float indices": lambda d: ones(2, device=d)[ones(1, device=d)],
    "embedding of floats": lambda d: F.embedding(ones(2, device=d), ones(2, 2, device=d)),
    "index_select with floats": lambda d: ones(2, device=d).index_select(0, ones(1, device=d)),
    "masked_fill with a float mask": lambda d: ones(2, device=d).masked_fill(ones(2, device=d), 0),
    "index_put of another dtype": lambda d: ones(2, device=d).index_put_(
        (zeros(1, dtype=torch.int64, device=d),), ones(1, dtype=torch.float64, device=d)
    ),
    "scatter of another dtype": lambda d: ones(2, device=d).scatter_(
        0, zeros(1, dtype=torch.int64, device=d), ones(1, dtype=torch.float64, device=d)
    ),
    "view_as_complex of integers": lambda d: torch.view_as_complex(ones(2, 2, dtype=torch.int64, device=d)),
    "nll_loss with float targets": lambda d: F.nll_loss(ones(2, 3, device=d), ones(2, device=d)),
    "arange without bounds": lambda d: torch.arange(0, float("inf"), device=d),
    "arange against its step": lambda d: torch.arange(3, 0, 1, device=d),
    "randint without a range": lambda d: torch.randint(3, 3, (2,), device=d),
    "normal with a negative deviation": lambda d: ones(2, device=d).normal_(0, -1),
    "bernoulli of 2": lambda d: ones(2, device=d).bernoulli_(2),
    "dropout of 2": lambda d: F.dropout(ones(2, device=d), 2.0),
    "where of three dtypes": lambda d: torch.where(ones(2, device=d), 1, 2),
    "linspace without steps": lambda d: torch.linspace(0, 1, -1, device=d),
    "result_type of a float exponent": lambda d: ones(2, dtype=torch.int64, device=d) ** -1,
    "requires_grad of integers": lambda d: ones(2, dtype=torch.int64, device=d, requires_grad=True),
    "binary_cross_entropy targets": lambda d: F.binary_cross_entropy_with_logits(ones(2, device=d), ones(3, device=d)),
}

half, double = torch.float16, torch.float64
int32, int64, boolean = torch.int32, torch.int64, torch.bool

#: Calls whose dtypes the CPU does not bring together, or whose operator it does not have for them.
TOGETHER: dict[str, Callable[[str], object]] = {
    "conv2d": lambda d: F.conv2d(ones(1, 3, 5, 5, device=d), ones(4, 3, 3, 3, dtype=half, device=d)),
    "conv2d bias": lambda d: F.conv2d(
        ones(1, 3, 5, 5, device=d), ones(4, 3, 3, 3, device=d), ones(4, dtype=double, device=d)
    ),
    "conv_transpose1d": lambda d: F.conv_transpose1d(ones(1, 3, 5, device=d), ones(3, 4, 3, dtype=double, device=d)),
    "layer_norm": lambda d: F.layer_norm(ones(2, 3, device=d), (3,), ones(3, dtype=double, device=d)),
    "layer_norm of half parameters": lambda d: F.layer_norm(ones(2, 3, device=d), (3,), ones(3, dtype=half, device=d)),
    "batch_norm": lambda d: F.batch_norm(ones(2, 3, device=d), *ones(2, 3, dtype=double, device=d)),
    "group_norm": lambda d: F.group_norm(ones(2, 4, device=d), 2, ones(4, dtype=double, device=d)),
    "instance_norm": lambda d: F.instance_norm(ones(2, 4, 3, device=d), weight=ones(4, dtype=double, device=d)),
    "cross_entropy weight": lambda d: F.cross_entropy(
        ones(2, 3, device=d), ones(2, dtype=int64, device=d), ones(3, dtype=double, device=d)
    ),
    "cross_entropy int32": lambda d: F.cross_entropy(ones(2, 3, device=d), ones(2, dtype=int32, device=d)),
    "nll_loss bool": lambda d: F.nll_loss(ones(2, 3, device=d), ones(2, dtype=boolean, device=d)),
    "nll_loss 2d": lambda d: F.nll_loss(ones(2, 3, 2, 2, device=d), ones(2, 2, 2, dtype=int32, device=d)),
    "multi_margin_loss": lambda d: F.multi_margin_loss(ones(2, 3, device=d), ones(2, dtype=int32, device=d)),
    "multilabel_margin": lambda d: F.multilabel_margin_loss(ones(2, 3, device=d), ones(2, 3, dtype=int32, device=d)),
    "binary_cross_entropy": lambda d: F.binary_cross_entropy(ones(2, device=d), ones(2, dtype=double, device=d)),
    "smooth_l1_loss beta": lambda d: F.smooth_l1_loss(ones(2, device=d), ones(2, device=d), beta=-1.0),
    "cdist": lambda d: torch.cdist(ones(2, 3, device=d), ones(2, 3, dtype=double, device=d)),
    "cross": lambda d: torch.linalg.cross(ones(3, device=d), ones(3, dtype=double, device=d)),
    "polar": lambda d: torch.polar(ones(2, device=d), ones(2, dtype=double, device=d)),
    "heaviside": lambda d: torch.heaviside(ones(2, device=d), ones(2, dtype=double, device=d)),
    "lerp": lambda d: torch.lerp(ones(2, device=d), ones(2, dtype=double, device=d), 0.5),
    "index_add_": lambda d: ones(2, device=d).index_add_(
        0, ones(1, dtype=int64, device=d), ones(1, dtype=double, device=d)
    ),
    "index_reduce": lambda d: ones(2, device=d).index_reduce(
        0, ones(1, dtype=int64, device=d), ones(1, dtype=double, device=d), "amax"
    ),
    "embedding_bag": lambda d: F.embedding_bag(
        ones(1, 2, dtype=int64, device=d), ones(3, 2, device=d),
        per_sample_weights=ones(1, 2, dtype=double, device=d), mode="sum",
    ),
    "relu of bool": lambda d: F.relu(ones(2, dtype=boolean, device=d)),
    "argmax of bool": lambda d: ones(2, dtype=boolean, device=d).argmax(),
    "topk of bool": lambda d: ones(2, dtype=boolean, device=d).topk(1),
    "mm of bool": lambda d: torch.mm(ones(2, 2, dtype=boolean, device=d), ones(2, 2, dtype=boolean, device=d)),
    "abs of bool": lambda d: ones(2, dtype=boolean, device=d).abs(),
    "var of integers": lambda d: ones(2, dtype=int64, device=d).var(),
    "gcd of floats": lambda d: torch.gcd(ones(2, device=d), ones(2, device=d)),
    "atan2 of complex": lambda d: torch.atan2(ones(2, dtype=torch.complex64, device=d), ones(2, device=d)),
    "interpolation of integers": lambda d: F.interpolate(ones(1, 1, 2, 2, dtype=int64, device=d), 4),
}  # fmt: skip


def normal(text: str) -> str:
    """Messages without what names a device or a kernel of one."""
    return re.sub(r"tpu:0|\btpu\b|cpu:0|\bcpu\b|TPU|CPU|_tpu|_cpu", "DEVICE", text.split("\n")[0])


@pytest.mark.parametrize("name", SHAPES)
def test_wrong_shapes_are_cpus_error(name: str) -> None:
    compare(SHAPES[name])


@pytest.mark.parametrize("name", DTYPES)
def test_wrong_dtypes_and_values_are_cpus_error(name: str) -> None:
    compare(DTYPES[name])


@pytest.mark.parametrize("name", TOGETHER)
def test_dtypes_that_do_not_go_together_are_cpus_error(name: str) -> None:
    compare(TOGETHER[name])
    compare(TOGETHER[name])  # nothing of the first was kept


def test_mixed_dtypes_that_the_cpu_takes_are_taken() -> None:
    bf16 = torch.bfloat16
    calls: list[Callable[[str], torch.Tensor]] = [
        lambda d: F.layer_norm(ones(2, 3, dtype=bf16, device=d), (3,), ones(3, device=d), ones(3, device=d)),
        lambda d: F.batch_norm(ones(2, 3, dtype=bf16, device=d), *ones(4, 3, device=d), training=True),
        lambda d: F.group_norm(ones(2, 4, dtype=bf16, device=d), 2, ones(4, device=d), ones(4, device=d)),
        lambda d: F.mse_loss(ones(2, device=d), ones(2, dtype=double, device=d)),
        lambda d: torch.cat([ones(2, device=d), ones(2, dtype=double, device=d)]),
        lambda d: F.nll_loss(-ones(2, 3, device=d), ones(2, dtype=torch.uint8, device=d)),
    ]
    for call in calls:
        expected, actual = call("cpu"), call("tpu")
        assert actual.dtype == expected.dtype and actual.tolist() == expected.tolist()


def compare(call: Callable[[str], object]) -> None:
    expected, actual = outcome(lambda: call("cpu")), outcome(lambda: call("tpu"))
    assert expected[0] == "raised", "the call is not wrong"
    assert actual[0] == "raised", f"the device gave {actual[1]}, the CPU {expected[1]}"
    assert actual[1][0] is expected[1][0], (actual[1], expected[1])
    assert normal(actual[1][1]) == normal(expected[1][1])


MIXED: dict[str, Callable[[], object]] = {
    "add": lambda: ones(2, device="tpu") + ones(2),
    "add the other way round": lambda: ones(2) + ones(2, device="tpu"),
    "add_": lambda: ones(2).add_(ones(2, device="tpu")),
    "mm": lambda: torch.mm(ones(2, 2, device="tpu"), ones(2, 2)),
    "linear": lambda: nn.Linear(2, 2)(ones(1, 2, device="tpu")),
    "linear of a host tensor": lambda: nn.Linear(2, 2).tpu()(ones(1, 2)),
    "conv": lambda: nn.Conv2d(1, 1, 1).tpu()(ones(1, 1, 2, 2)),
    "embedding": lambda: nn.Embedding(2, 2).tpu()(torch.tensor([0])),
    "cat": lambda: torch.cat([ones(2, device="tpu"), ones(2)]),
    "where": lambda: torch.where(ones(2, device="tpu") > 0, ones(2), ones(2)),
    "out=": lambda: torch.add(ones(2, device="tpu"), 1, out=ones(2)),
    "equal": lambda: torch.equal(ones(2, device="tpu"), ones(2)),
    "gather": lambda: ones(2, device="tpu").gather(0, torch.tensor([0])),
    "loss": lambda: F.mse_loss(ones(2, device="tpu"), ones(2)),
    "layer_norm": lambda: nn.LayerNorm(2)(ones(2, device="tpu")),
}


@pytest.mark.parametrize("name", MIXED)
def test_tensors_of_two_devices_are_an_error_that_names_both(name: str) -> None:
    with pytest.raises(RuntimeError, match="(?=.*tpu)(?=.*cpu)"):
        MIXED[name]()


def test_host_scalars_mix_with_device_tensors() -> None:
    x = ones(2, device="tpu")
    assert (x + torch.tensor(2.0)).tolist() == (torch.tensor(2.0) + x).tolist() == [3, 3]
    assert (x * torch.tensor(2)).dtype == torch.float32 and (x > torch.tensor(0)).tolist() == [True, True]
    assert torch.where(x > 0, torch.tensor(5.0), x).tolist() == [5, 5]
    assert x.add_(torch.tensor(1)).tolist() == [2, 2] and x.fill_(torch.tensor(4)).tolist() == [4, 4]
    assert x[torch.tensor([1])].tolist() == [4], "host indices serve device tensors"
    x[torch.tensor([True, False])] = 7
    assert x.tolist() == [7, 4]


def test_an_operator_without_a_rule_is_named() -> None:
    library = torch.library.Library("tpu_test_errors", "DEF")
    library.define("mystery(Tensor x) -> Tensor")
    library.impl("mystery", lambda x: torch.empty_like(x), "Meta")
    with pytest.raises(NotImplementedError, match=r"tpu_test_errors::mystery.*no lowering rule"):
        torch.ops.tpu_test_errors.mystery(ones(2, device="tpu"))
    library.define("composite(Tensor x) -> Tensor")
    library.impl("composite", lambda x: x * 2 + 1, "CompositeImplicitAutograd")
    assert torch.ops.tpu_test_errors.composite(ones(2, device="tpu")).tolist() == [3, 3]
    library.define("own(Tensor x) -> Tensor")
    library.impl("own", lambda x: x.cpu().add(1).tpu(), "PrivateUse1")
    assert torch.ops.tpu_test_errors.own(ones(2, device="tpu")).tolist() == [2, 2]


def test_an_error_leaves_tensors_and_counters_as_they_were() -> None:
    x = torch.arange(4.0, device="tpu")
    programs = torch.tpu.compile_stats()["programs"]
    for _ in range(3):
        with pytest.raises(RuntimeError):
            x.add_(ones(3, device="tpu"))
        with pytest.raises(RuntimeError):
            torch.mm(x, x)
    assert x.tolist() == [0, 1, 2, 3]
    assert torch.tpu.compile_stats()["programs"] - programs <= 2


@pytest.mark.parametrize("dtype", [torch.complex32, torch.qint8])
def test_dtypes_that_the_device_has_not_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises((TypeError, NotImplementedError), match="(?i)tpu"):
        torch.empty(2, dtype=dtype, device="tpu")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.uint32])
def test_what_cpu_kernels_lack_is_no_error_of_the_device(dtype: torch.dtype) -> None:
    """An empty call is tried on the CPU first; a kernel that only the CPU lacks must not speak for the device."""
    empty = torch.empty(0, 3, device="tpu").to(dtype)
    assert (empty.t() == empty.t()).shape == (3, 0)
    assert empty.view(-1).clone().shape == (0,)
    assert torch.cat([empty, empty]).shape == (0, 3)


@pytest.mark.parametrize(
    "write",
    [
        lambda t, x: t.add_(x),
        lambda t, x: torch.mul(x, x, out=t),
        lambda t, x: torch.sum(x, 0, out=t),
        lambda t, x: torch._foreach_add_([t], [x]),
        lambda t, x: t.masked_fill_(x.bool(), 1.0),
        lambda t, x: t.addcmul_(x, x),
    ],
)
def test_a_cpu_scalar_is_read_as_a_number_and_never_written_in_vain(write: Any) -> None:
    t, x = torch.tensor(0.0), torch.ones((), device="tpu")
    with pytest.raises(RuntimeError, match="on the same device.*tpu:0 and cpu"):
        write(t, x)
    assert t.item() == 0 and (x + t).item() == 1


@pytest.mark.parametrize(
    "call",
    [
        lambda x, m: x - m,
        lambda x, m: m - x,
        lambda x, m: m - 1,
        lambda x, m: 1 - m,
        lambda x, m: x - True,
        lambda x, m: x.sub_(m),
        lambda x, m: torch._foreach_sub([x], [m]),
        lambda x, m: torch.add(x, x, alpha=True),
        lambda x, m: x.add_(x, alpha=True),
    ],
)
def test_bools_are_not_subtracted_and_scale_nothing(call: Any) -> None:
    x, m = torch.ones(2), torch.ones(2, dtype=torch.bool)
    with pytest.raises(RuntimeError) as cpu:
        call(x, m)
    with pytest.raises(RuntimeError, match=re.escape(str(cpu.value))):
        call(x.tpu(), m.tpu())
    assert (m.tpu() + m.tpu()).tolist() == [True, True] and (x.tpu() + m.tpu()).tolist() == [2, 2]
