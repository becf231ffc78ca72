"""PyTorch on Google TPUs as an ordinary device, ``tpu``.

Importing this package (``import torch`` does it through the ``torch.backends`` entry point) registers the device and loads
nothing else: the plugin is loaded on first use.
"""

from __future__ import annotations

import atexit

import torch

__version__ = "0.1.0"


def _register() -> None:
    from torch_tpu import _C, autocast_overrides, dlpack_overrides, platform, tpu

    torch.utils.rename_privateuse1_backend("tpu")
    torch._register_device_module("tpu", tpu)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    _C._set_platform_resolver(platform.resolve, platform.device_count)
    _C._register_kernels()
    dlpack_overrides.install()
    autocast_overrides.install()
    tpu._apply_environment()
    atexit.register(_C._shutdown)


_register()
