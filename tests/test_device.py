"""Device "tpu" is an ordinary PyTorch device: it counts, it has a current one, it moves tensors and modules."""

from __future__ import annotations

import copy
import pickle
import threading

import pytest
import torch
from torch import nn

from tests.support import python


def test_the_device_module_is_torch_tpu() -> None:
    assert torch.get_device_module("tpu") is torch.tpu
    assert torch._C._get_privateuse1_backend_name() == "tpu"
    assert torch._C._get_accelerator().type == "tpu"


def test_one_device_is_available_and_current() -> None:
    assert torch.tpu.is_available()
    assert torch.tpu.device_count() == 1
    assert torch.tpu.current_device() == 0


def test_the_accelerator_interface_names_the_same_device() -> None:
    assert torch.accelerator.is_available()
    assert torch.accelerator.current_accelerator() == torch.device("tpu")
    assert torch.accelerator.device_count() == torch.tpu.device_count()
    assert torch.accelerator.current_device_index() == 0
    torch.accelerator.set_device_index(0)
    torch.accelerator.synchronize()
    with torch.accelerator.device_index(0):
        assert torch.accelerator.current_device_index() == 0


def test_the_accelerator_interface_lists_dtypes() -> None:
    dtypes = torch.accelerator.get_device_capability()["supported_dtypes"]
    assert {torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64} <= dtypes
    assert not {torch.complex32, torch.qint8} & dtypes


def test_the_name_says_what_the_device_is() -> None:
    name = torch.tpu.get_device_name()
    assert "TPU" in name and "emulated" in name
    assert torch.tpu.get_device_name("tpu:0") == torch.tpu.get_device_name(torch.device("tpu")) == name


def test_properties_have_name_memory_and_processor_count() -> None:
    properties = torch.tpu.get_device_properties()
    assert properties.name == torch.tpu.get_device_name()
    assert properties.total_memory == torch.tpu.mem_get_info()[1] > 1 << 28
    assert properties.multi_processor_count == 1
    assert properties.name in repr(properties)


def test_first_use_initialises_and_queries_do_not() -> None:
    python("""
        import torch
        assert torch.tpu.is_available() and torch.tpu.device_count() == 1 and torch.accelerator.device_count() == 1
        assert torch.accelerator.current_accelerator().type == "tpu"
        torch.tpu.manual_seed(3); torch.manual_seed(3); torch.tpu.synchronize()
        assert torch.tpu.memory_allocated() == 0
        assert not torch.tpu.is_initialized()
        torch.ones(1, device="tpu")
        assert torch.tpu.is_initialized()
    """)


@pytest.mark.parametrize("device", ["tpu", "tpu:0", torch.device("tpu"), torch.device("tpu", 0)])
def test_tensors_are_made_on_every_spelling_of_the_device(device: str | torch.device) -> None:
    x = torch.ones(2, 3, device=device)
    assert x.device == torch.device("tpu", 0)
    assert x.is_tpu and not x.is_cpu
    assert x.get_device() == 0


@pytest.mark.parametrize(
    "make",
    [
        lambda d: torch.tensor([[1, 2], [3, 4]], device=d),
        lambda d: torch.as_tensor([1.5, 2.5], device=d),
        lambda d: torch.zeros(3, device=d),
        lambda d: torch.ones(2, 2, dtype=torch.int64, device=d),
        lambda d: torch.full((2,), 7, device=d),
        lambda d: torch.arange(2, 11, 3, device=d),
        lambda d: torch.linspace(0, 1, 5, device=d),
        lambda d: torch.eye(3, device=d),
        lambda d: torch.zeros_like(torch.empty(2, device=d)),
        lambda d: torch.empty(2, device=d).new_full((2,), 3.0),
        lambda d: torch.tensor(True, device=d),
        lambda d: torch.tensor([], device=d),
    ],
)
def test_factories_give_cpus_values(make) -> None:
    torch.testing.assert_close(make("tpu").cpu(), make("cpu"), rtol=0, atol=0)


def test_a_default_device_serves_factories() -> None:
    with torch.device("tpu"):
        assert torch.zeros(2).device.type == "tpu"
        assert nn.Linear(2, 2).weight.device.type == "tpu"
    assert torch.zeros(2).device.type == "cpu"


def test_tensors_move_both_ways() -> None:
    x = torch.arange(6.0).reshape(2, 3)
    assert x.tpu().device.type == x.to("tpu").device.type == x.to(torch.empty(0, device="tpu")).device.type == "tpu"
    for back in (x.tpu().cpu(), x.tpu().to("cpu"), x.tpu(non_blocking=True).cpu()):
        assert torch.equal(back, x)
    on_device = x.tpu()
    assert on_device.tpu() is on_device and on_device.to("tpu") is on_device
    assert on_device.to("tpu", copy=True).data_ptr() != on_device.data_ptr()


def test_moving_keeps_strides_and_changes_dtype_as_cpu_does() -> None:
    x = torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1)
    assert x.tpu().stride() == x.stride()
    y = x.to("tpu", torch.int32)
    assert y.dtype == torch.int32 and torch.equal(y.cpu(), x.int())
    image = torch.rand(2, 3, 4, 5)
    assert (
        image.to("tpu", memory_format=torch.channels_last).stride()
        == image.to(memory_format=torch.channels_last).stride()
    )


def test_modules_move_both_ways() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    assert module.tpu() is module
    assert {t.device.type for t in [*module.parameters(), *module.buffers()]} == {"tpu"}
    assert module[0].weight.is_tpu and isinstance(module[0].weight, nn.Parameter)
    module.cpu()
    assert {t.device.type for t in module.state_dict().values()} == {"cpu"}


def test_rnn_and_packed_sequences_move() -> None:
    packed = nn.utils.rnn.pack_padded_sequence(torch.rand(3, 2, 4), [3, 2])
    assert packed.to("tpu").data.is_tpu
    assert packed.tpu().is_tpu


def test_storages_move_both_ways() -> None:
    storage = torch.arange(4, dtype=torch.int32).untyped_storage()
    moved = storage.tpu()
    assert moved.device == torch.device("tpu:0") and moved.is_tpu
    assert moved.cpu().tolist() == storage.tolist()


def test_current_device_changes_within_blocks() -> None:
    with torch.tpu.device(0), torch.tpu.device(None), torch.tpu.device(-1), torch.tpu.device_of(torch.ones(1)):
        assert torch.tpu.current_device() == 0
    with torch.tpu.device_of(torch.ones(1, device="tpu")):
        assert torch.tpu.current_device() == 0


@pytest.mark.parametrize(
    "use",
    [
        lambda: torch.ones(1, device="tpu:7"),
        lambda: torch.ones(1).tpu(7),
        lambda: torch.ones(1).to("tpu:7"),
        lambda: torch.tpu.set_device(7),
        lambda: torch.accelerator.set_device_index(7),
        lambda: torch.tpu.synchronize(7),
        lambda: torch.tpu.get_device_name(7),
        lambda: torch.tpu.get_device_properties("tpu:7"),
        lambda: torch.tpu.device(7).__enter__(),
        lambda: torch.tpu.memory_allocated(7),
        lambda: torch.tpu.mem_get_info(7),
        lambda: torch.Generator("tpu:7").manual_seed(1) and torch.rand(1, device="tpu:7"),
        lambda: torch.empty(1, device="tpu").to("tpu:7"),
    ],
)
def test_a_wrong_ordinal_is_refused_in_a_sentence(use) -> None:
    torch.ones(1, device="tpu")
    with pytest.raises(RuntimeError, match=r"tpu:7.*1 tpu device"):
        use()
    assert torch.tpu.current_device() == 0


def test_a_wrong_device_type_is_refused() -> None:
    with pytest.raises(ValueError, match="Expected a tpu device, got cpu"):
        torch.tpu.set_device("cpu")
    with pytest.raises(ValueError, match="Expected a tpu device, got cuda:1"):
        torch.tpu.get_device_properties("cuda:1")


def test_current_device_is_per_thread() -> None:
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.append(torch.tpu.current_device()))
    thread.start()
    thread.join()
    assert seen == [0]


def test_devices_and_tensors_copy_and_pickle() -> None:
    device = torch.device("tpu", 0)
    assert pickle.loads(pickle.dumps(device)) == copy.deepcopy(device) == device


def test_several_devices_in_one_process() -> None:
    python(
        """
        import threading, torch
        assert torch.tpu.device_count() == torch.accelerator.device_count() == 3
        torch.tpu.set_device(1)
        assert torch.tpu.current_device() == torch.accelerator.current_device_index() == 1
        x = torch.arange(6.0, device="tpu")
        assert x.device == torch.device("tpu:1"), "a tensor is made on the current device"

        with torch.tpu.device(2):
            assert torch.ones(1, device="tpu").device.index == 2
        with torch.accelerator.device_index(0):
            assert torch.ones(1).tpu().device.index == 0
        assert torch.tpu.current_device() == 1

        y = (x * 2).to("tpu:0")
        assert y.device.index == 0 and torch.equal(y.cpu(), torch.arange(6.0) * 2)
        y += 1
        assert (y + 1).device.index == 0, "results stay on the device of the operands, whatever the current one"
        z = torch.empty(2, 3, device="tpu:2").copy_(y.view(2, 3).t().reshape(2, 3))
        assert torch.equal(z.cpu(), (torch.arange(6.0) * 2 + 1).view(2, 3).t().reshape(2, 3))
        strided = torch.zeros(6, 2, device="tpu:2")
        strided[:, 1].copy_(x)
        assert torch.equal(strided.cpu()[:, 1], torch.arange(6.0))

        try:
            x + y
        except RuntimeError as error:
            text = str(error)
            assert "Expected all tensors to be on the same device" in text and "tpu:1" in text and "tpu:0" in text
        else:
            raise AssertionError("tensors of two devices were added")

        w = torch.ones(3, device="tpu:2", requires_grad=True)
        (w.to("tpu:0") * 3).sum().backward()
        assert w.grad.device.index == 2 and w.grad.tolist() == [3, 3, 3]

        torch.tpu.manual_seed_all(5)
        a, b = torch.rand(4, device="tpu:0"), torch.rand(4, device="tpu:2")
        assert torch.equal(a.cpu(), b.cpu()), "devices with one seed draw the same numbers"
        torch.tpu.set_rng_state(torch.tpu.get_rng_state(0), 1)
        assert torch.equal(torch.rand(4, device="tpu:1").cpu(), torch.rand(4, device="tpu:0").cpu())

        before = [torch.tpu.memory_allocated(i) for i in range(3)]
        big = torch.empty(1 << 20, dtype=torch.uint8, device="tpu:2")
        after = [torch.tpu.memory_allocated(i) for i in range(3)]
        assert [q - p for p, q in zip(before, after)] == [0, 0, 1 << 20]

        assert torch.tpu.current_stream(2).device.index == 2
        with torch.tpu.stream(torch.tpu.current_stream(2)):
            assert torch.tpu.current_device() == 2
        assert torch.tpu.current_device() == 1

        seen = []
        thread = threading.Thread(target=lambda: seen.append(torch.tpu.current_device())); thread.start(); thread.join()
        assert seen == [0], "a new thread starts on device 0"

        def work(i, out):
            t = torch.full((64,), float(i), device=f"tpu:{i}")
            for _ in range(50):
                t = t + 1
            out[i] = t.sum().item()
        out = {}
        threads = [threading.Thread(target=work, args=(i, out)) for i in range(3)]
        [t.start() for t in threads]; [t.join() for t in threads]
        assert out == {i: 64.0 * (i + 50) for i in range(3)}

        index = torch.tensor([9], device="tpu:2")
        torch.arange(3.0, device="tpu:2")[index]
        torch.tpu.synchronize(0)
        try:
            torch.tpu.synchronize(2)
        except IndexError as error:
            assert "tpu:2" in str(error)
        else:
            raise AssertionError("the bad index passed")
        """,
        TORCH_TPU_NUM_CPU_DEVICES="3",
    )


def test_the_number_of_cpu_devices_must_be_a_number() -> None:
    done = python("import torch; torch.ones(1, device='tpu')", fails=True, TORCH_TPU_NUM_CPU_DEVICES="0")
    assert "TORCH_TPU_NUM_CPU_DEVICES must be at least 1, got 0" in done.stderr


@pytest.mark.parametrize(
    ("platform", "sentence"),
    [
        ("/no/such/plugin.so", "there is no such file"),
        ("/bin/true", "/bin/true"),
    ],
)
def test_a_platform_that_cannot_be_used_is_one_clear_sentence(platform: str, sentence: str) -> None:
    done = python("import torch; torch.ones(1, device='tpu')", fails=True, TORCH_TPU_PLATFORM=platform)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("RuntimeError: ") and sentence in last
