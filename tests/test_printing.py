"""A device tensor prints as the CPU's does, with its device."""

from __future__ import annotations

import pytest
import torch
from torch import nn

TENSORS = {
    "float": torch.tensor([[1.5, -2.25], [1e-9, 3e7]]),
    "integers": torch.arange(6).view(2, 3),
    "integral floats": torch.arange(4.0),
    "bool": torch.tensor([True, False]),
    "scalar": torch.tensor(3.25),
    "empty": torch.empty(0, 3),
    "no dimensions, integer": torch.tensor(7),
    "infinite": torch.tensor([float("inf"), float("-inf"), float("nan"), 1.0]),
    "complex": torch.tensor([1 + 2j, -0.5j]),
    "half": torch.tensor([0.1, 2.5], dtype=torch.float16),
    "bfloat16": torch.tensor([0.1, 2.5], dtype=torch.bfloat16),
    "uint8": torch.tensor([0, 255], dtype=torch.uint8),
    "float64": torch.tensor([1 / 3], dtype=torch.float64),
    "summarised": torch.arange(3000.0).view(50, 60),
    "three dimensions": torch.arange(8.0).view(2, 2, 2),
}


@pytest.mark.parametrize("name", TENSORS)
def test_the_text_is_cpus_plus_the_device(name: str) -> None:
    x = TENSORS[name]
    text = repr(x.tpu())
    assert "device='tpu:0'" in text
    squeezed = "".join(text.split()).replace(",device='tpu:0'", "").replace("device='tpu:0',", "")
    assert squeezed == "".join(repr(x).split())


@pytest.mark.parametrize(
    "view", [lambda x: x.t(), lambda x: x[1:, ::2], lambda x: x[0].expand(3, 3), lambda x: x.view(-1)]
)
def test_views_print(view) -> None:
    x = torch.arange(9.0).view(3, 3)
    assert "".join(repr(view(x.tpu())).replace(", device='tpu:0'", "").split()) == "".join(repr(view(x)).split())


def test_gradients_and_parameters_show() -> None:
    x = torch.ones(2, device="tpu", requires_grad=True)
    assert repr(x) == "tensor([1., 1.], device='tpu:0', requires_grad=True)"
    assert repr(x * 2) == "tensor([2., 2.], device='tpu:0', grad_fn=<MulBackward0>)"
    assert (
        repr(nn.Parameter(x.detach())) == "Parameter containing:\ntensor([1., 1.], device='tpu:0', requires_grad=True)"
    )


def test_print_options_apply() -> None:
    torch.set_printoptions(precision=2, sci_mode=True)
    try:
        assert repr(torch.tensor([1.23456], device="tpu")) == "tensor([1.23e+00], device='tpu:0')"
    finally:
        torch.set_printoptions(profile="default")


def test_formatting_reads_numbers() -> None:
    x = torch.tensor(3.14159, device="tpu")
    assert f"{x:.2f}" == "3.14" and f"{torch.tensor([1, 2], device='tpu')}" == "tensor([1, 2], device='tpu:0')"
    assert str(x.item())[:6] == "3.1415" and int(x) == 3 and float(x) == x.item() and bool(x)
    assert [10, 20, 30][torch.tensor(1, device="tpu")] == 20
    assert len(torch.ones(4, 2, device="tpu")) == 4 and torch.tensor([1, 2], device="tpu").tolist() == [1, 2]
    assert list(torch.arange(3, device="tpu")) == [0, 1, 2] and 2 in torch.arange(3, device="tpu")


def test_types_have_the_devices_name() -> None:
    assert torch.ones(1, device="tpu").type() == "torch.tpu.FloatTensor"
    assert torch.ones(1, device="tpu", dtype=torch.int64).type() == "torch.tpu.LongTensor"


def test_devices_storages_streams_and_generators_print() -> None:
    assert repr(torch.device("tpu:0")) == "device(type='tpu', index=0)"
    assert "device=tpu:0" in repr(torch.ones(2, device="tpu").untyped_storage())
    assert "device_type=tpu" in repr(torch.tpu.current_stream())
    assert "tpu" in repr(torch.tpu.get_device_properties()).lower()
