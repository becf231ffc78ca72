"""The public names: those that user code and libraries call on TorchTPU exist here with the same signatures."""

from __future__ import annotations

import importlib
import inspect
import pickle

import pytest
import torch

from tests.support import python

#: Name -> parameters, for the names that this version offers.
SIGNATURES = {
    "current_device": "",
    "current_stream": "device",
    "default_stream": "device",
    "device_count": "",
    "get_amp_supported_dtype": "",
    "get_device_name": "device",
    "get_device_properties": "device",
    "get_rng_state": "device",
    "initial_seed": "",
    "is_available": "",
    "is_bf16_supported": "including_emulation",
    "is_initialized": "",
    "manual_seed": "seed",
    "manual_seed_all": "seed",
    "precision": "level",
    "set_device": "device",
    "set_eager_mode": "mode",
    "set_rng_state": "new_state device",
    "set_stream": "stream",
    "stream": "stream",
    "synchronize": "device",
    "empty_cache": "",
    "init": "",
    "mem_get_info": "device",
    "memory_allocated": "device",
    "max_memory_allocated": "device",
    "memory_reserved": "device",
    "memory_stats": "device",
    "reset_peak_memory_stats": "device",
    "seed": "",
    "seed_all": "",
    "get_rng_state_all": "",
    "set_rng_state_all": "new_states",
    "_get_cache_stats": "",
    "_get_cache_requests": "",
    "_get_cache_hits": "",
    "_get_cache_misses": "",
    "_clear_cache": "",
    "_hbm_usage_summary": "",
    "_shutdown_runtime": "",
    "compile_stats": "",
    "reset_compile_stats": "",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_functions_have_their_parameters(name: str) -> None:
    assert " ".join(inspect.signature(getattr(torch.tpu, name)).parameters) == SIGNATURES[name]


@pytest.mark.parametrize("name", [n for n in SIGNATURES if not n.startswith("_")])
def test_public_functions_say_what_they_do(name: str) -> None:
    assert inspect.getdoc(getattr(torch.tpu, name))


@pytest.mark.parametrize("name", torch.tpu.__all__)
def test_all_lists_what_is_there(name: str) -> None:
    assert hasattr(torch.tpu, name)


def test_enumerations() -> None:
    assert [m.name for m in torch.tpu.EagerMode] == ["DEFER_NEVER", "DEFER_NEVER_AND_LAUNCH_BLOCKING", "DEFER_AND_FUSE"]
    assert [p.name for p in torch.tpu.Precision] == ["DEFAULT", "HIGH", "HIGHEST"]
    assert pickle.loads(pickle.dumps(torch.tpu.EagerMode.DEFER_NEVER)) is torch.tpu.EagerMode.DEFER_NEVER


def test_torch_tpu_is_the_module_that_the_package_registers() -> None:
    import torch_tpu

    assert torch.tpu is torch_tpu.tpu is importlib.import_module("torch_tpu.tpu")
    assert torch.get_device_module("tpu") is torch.tpu and torch.accelerator.current_accelerator().type == "tpu"


def test_torch_backends_tpu() -> None:
    module = importlib.import_module("torch.backends.tpu")
    assert module is torch.backends.tpu
    assert torch.backends.tpu.is_built() is True and torch.backends.tpu.is_available() is True
    assert "PJRT C API 0." in torch.backends.tpu.version()
    assert torch.backends.tpu.allow_excess_precision is False


def test_tensors_modules_and_storages_have_the_device_methods() -> None:
    x = torch.ones(2)
    assert not x.is_tpu and x.tpu().is_tpu and x.tpu(0).device == torch.device("tpu:0")
    assert torch.nn.Linear(2, 2).tpu().weight.device.type == "tpu"
    assert torch.nn.utils.rnn.pack_padded_sequence(torch.ones(2, 1, 3), torch.tensor([2])).tpu().data.is_tpu
    assert x.untyped_storage().tpu().device.type == "tpu"


def test_eager_mode_is_a_property_and_a_context() -> None:
    mode = torch.tpu.EagerMode
    assert torch.tpu.eager_mode is mode.DEFER_NEVER
    with torch.tpu.set_eager_mode(mode.DEFER_NEVER_AND_LAUNCH_BLOCKING):
        assert torch.tpu.eager_mode is mode.DEFER_NEVER_AND_LAUNCH_BLOCKING
    torch.tpu.eager_mode = mode.DEFER_NEVER_AND_LAUNCH_BLOCKING
    try:
        assert torch.tpu.eager_mode is mode.DEFER_NEVER_AND_LAUNCH_BLOCKING
    finally:
        torch.tpu.eager_mode = mode.DEFER_NEVER
    with pytest.raises(ValueError, match=r"Expected a torch.tpu.EagerMode, got 'strict'"):
        torch.tpu.eager_mode = "strict"


def test_debug_mode_reaches_the_backward_pass() -> None:
    """A scope holds for the threads that work for it: the index error is raised by ``backward`` itself."""
    weight = torch.randn(4, 3, device="tpu", requires_grad=True)
    rows = weight[torch.tensor([0, 1], device="tpu")]
    seen: list[torch.tpu.EagerMode] = []
    rows.register_hook(lambda grad: seen.append(torch.tpu.eager_mode))
    with torch.tpu.set_eager_mode(torch.tpu.EagerMode.DEFER_NEVER_AND_LAUNCH_BLOCKING):
        rows.sum().backward()
    assert seen == [torch.tpu.EagerMode.DEFER_NEVER_AND_LAUNCH_BLOCKING]


def test_seeding_before_the_first_use_starts_nothing_and_counts() -> None:
    code = """
    import torch
    torch.tpu.manual_seed(7); state = torch.tpu.get_rng_state(); assert torch.tpu.initial_seed() == 7
    assert not torch.tpu.is_initialized()
    a = torch.randn(4, device="tpu")
    torch.manual_seed(7)
    assert torch.equal(torch.randn(4, device="tpu").cpu(), a.cpu())
    torch.tpu.set_rng_state(state)
    assert torch.equal(torch.randn(4, device="tpu").cpu(), a.cpu())
    """
    python(code)


def test_cache_statistics_under_torchtpus_names() -> None:
    torch.tpu.reset_compile_stats()
    x = torch.ones(5, device="tpu")
    for _ in range(3):
        x = x + 1
    stats = torch.tpu._get_cache_stats()
    assert stats == torch.tpu.compile_stats()
    assert torch.tpu._get_cache_requests() == torch.tpu._get_cache_hits() + torch.tpu._get_cache_misses() >= 3
    torch.tpu._clear_cache()
    assert torch.tpu.compile_stats()["programs"] == 0
    assert (x + 1).tolist() == [5.0] * 5
    assert "tpu:0:" in torch.tpu._hbm_usage_summary() and "MiB in use" in torch.tpu._hbm_usage_summary()


# ---- installations that do not fit ----------------------------------------------------------------------------------
def test_a_core_built_for_another_pytorch_is_one_sentence_and_other_devices_go_on() -> None:
    code = """
    import sys, types, warnings
    other = sys.modules["torch_tpu._build"] = types.SimpleNamespace(TORCH_VERSION="2.9.1+cpu")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        import torch
    assert torch.ones(2).sum().item() == 2
    said = [str(w.message) for w in caught if "tpu" in str(w.message)]
    assert len(said) == 1 and said[0].startswith("The device 'tpu' is not available. torch_tpu "), said
    sys.modules["torch_tpu._build"] = other
    try:
        import torch_tpu
    except ImportError as error:
        print(error)
    """
    said = python(code).stdout
    assert "was built against torch 2.9.1+cpu, and torch 2." in said and "pip install torch==2.9.1" in said


def test_a_core_that_cannot_be_loaded_is_one_sentence() -> None:
    code = """
    import os
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    import sys, torch
    sys.modules["torch_tpu._C"] = None
    try:
        import torch_tpu
    except ImportError as error:
        print(error)
    """
    assert "torch_tpu's compiled core cannot be loaded" in python(code).stdout
