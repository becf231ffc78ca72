"""DLPack shares device memory within the process; what cannot be shared is refused in a sentence."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch.utils.dlpack import from_dlpack, to_dlpack

EXCHANGES = {
    "torch.from_dlpack": torch.from_dlpack,
    "capsule": lambda x: from_dlpack(to_dlpack(x)),
    "unversioned capsule": lambda x: torch.from_dlpack(x.__dlpack__()),
    "versioned capsule": lambda x: torch.from_dlpack(x.__dlpack__(max_version=(1, 0))),
}


@pytest.mark.parametrize("exchange", EXCHANGES.values(), ids=EXCHANGES)
@pytest.mark.parametrize(
    "view", [lambda x: x, lambda x: x.t(), lambda x: x[:2, ::3], lambda x: x.view(-1), lambda x: x.view(torch.int32)]
)
def test_a_round_trip_shares_memory(exchange: Callable, view: Callable) -> None:
    x = torch.arange(24.0, device="tpu").view(4, 6)
    source = view(x)
    received = exchange(source)
    assert received.device == x.device and received.dtype == source.dtype
    assert received.shape == source.shape and received.stride() == source.stride()
    assert received.data_ptr() == x.data_ptr()
    received.add_(1)
    assert torch.equal(source.cpu(), received.cpu())
    x.zero_()
    assert received.count_nonzero().item() == 0


@pytest.mark.parametrize("exchange", EXCHANGES.values(), ids=EXCHANGES)
def test_a_received_tensor_outlives_its_source(exchange: Callable) -> None:
    x = torch.arange(3.0, device="tpu")
    received = exchange(x)
    del x
    assert (received * 2).tolist() == [0, 2, 4]


@pytest.mark.parametrize(
    "dtype",
    [torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.int64, torch.uint8, torch.bool, torch.complex64],
)
def test_every_dtype_of_dlpack_passes(dtype: torch.dtype) -> None:
    x = torch.tensor([0, 1, 1], device="tpu").to(dtype)
    assert torch.equal(torch.from_dlpack(x).cpu(), x.cpu())


@pytest.mark.parametrize("exchange", EXCHANGES.values(), ids=EXCHANGES)
def test_a_view_inside_its_storage_is_refused(exchange: Callable) -> None:
    x = torch.arange(6.0, device="tpu")
    with pytest.raises(BufferError, match=r"storage offset 2.*clone"):
        exchange(x[2:])
    assert exchange(x[2:].clone()).tolist() == [2, 3, 4, 5]


def test_the_device_is_an_extension_device() -> None:
    kind, index = torch.ones(1, device="tpu").__dlpack_device__()
    assert (kind.name, index) == ("kDLExtDev", 0)
    assert torch.ones(1).__dlpack_device__()[0].name == "kDLCPU"


def test_a_copy_is_made_when_asked_for() -> None:
    x = torch.arange(3.0, device="tpu")
    copied = torch.from_dlpack(x, copy=True)
    copied.zero_()
    assert x.tolist() == [0, 1, 2]


def test_tensors_that_need_gradients_are_refused_as_elsewhere() -> None:
    with pytest.raises(BufferError, match="require gradient"):
        torch.from_dlpack(torch.ones(2, device="tpu", requires_grad=True))


def test_numpy_cannot_take_device_memory() -> None:
    x = torch.arange(3.0, device="tpu")
    with pytest.raises((RuntimeError, BufferError), match="[Uu]nsupported device"):
        np.from_dlpack(x)
    with pytest.raises(TypeError, match=r"can't convert tpu:0 device type tensor to numpy. Use Tensor.cpu\(\)"):
        x.numpy()
    with pytest.raises(TypeError, match=r"Use Tensor.cpu\(\)"):
        np.asarray(x)
    assert np.asarray(x.cpu()).tolist() == x.numpy(force=True).tolist() == [0, 1, 2]


def test_host_arrays_arrive_by_copy() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    for x in (
        torch.from_numpy(array).tpu(),
        torch.as_tensor(array, device="tpu"),
        torch.from_dlpack(array).tpu(),
        torch.tensor(array, device="tpu"),
    ):
        x.add_(1)
        assert x.tolist() == [[1, 2, 3], [4, 5, 6]]
    assert array.tolist() == [[0, 1, 2], [3, 4, 5]]
