"""PyTorch on Google TPUs as an ordinary device, ``tpu``.

Importing this package (``import torch`` does it through the ``torch.backends`` entry point) registers the device and
loads nothing else: the plugin is loaded on first use.
"""

from __future__ import annotations

import atexit
import importlib
import sys
from typing import Any

import torch

__version__ = "0.1.0"


def built_for() -> str | None:
    """The version of PyTorch that the compiled core was built against; None if setup.py did not build it."""
    try:
        from torch_tpu._build import TORCH_VERSION
    except ImportError:
        return None
    return TORCH_VERSION


def _check_build() -> None:
    """Finds out about a compiled core of another PyTorch before its symbols do.

    Raises:
        ImportError: The core is missing, cannot be loaded, or was built against another minor version of PyTorch.
    """
    running = torch.__version__
    built = built_for() or running
    advice = "Install a torch_tpu built for it: run `pip install --no-build-isolation .` in torch_tpu's sources"
    if built.split(".")[:2] != running.split(".")[:2]:
        raise ImportError(
            f"torch_tpu {__version__} was built against torch {built}, and torch {running} is installed. {advice}, or "
            f"`pip install torch=={built.partition('+')[0]}`."
        )
    try:
        from torch_tpu import _C  # noqa: F401
    except ImportError as error:
        raise ImportError(f"torch_tpu's compiled core cannot be loaded ({error}). {advice}.") from error


def _register() -> None:
    from torch_tpu import (
        _C,
        attention_overrides,
        autocast_overrides,
        backends,
        compile_overrides,
        distributed,
        dlpack_overrides,
        meta_overrides,
        nested_overrides,
        platform,
        sharing_overrides,
        shutdown,
        tpu,
    )

    torch.utils.rename_privateuse1_backend("tpu")
    torch._register_device_module("tpu", tpu)
    sys.modules["torch.tpu.compiler"] = tpu.compiler
    sys.modules["torch.tpu.dynamism"] = tpu.dynamism
    sys.modules["torch.tpu.distributed"] = tpu.distributed
    torch.backends.tpu = sys.modules["torch.backends.tpu"] = backends  # type: ignore[attr-defined]
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    lazy = vars(torch.nn.parameter)["UninitializedTensorMixin"]
    lazy._allowed_methods.append(vars(torch.Tensor)["tpu"])  # as it has Tensor.cuda
    _C._set_platform_resolver(platform.resolve, platform.device_count)
    _C._register_kernels()
    dlpack_overrides.install()
    autocast_overrides.install()
    nested_overrides.install()
    sharing_overrides.install()
    meta_overrides.install()
    compile_overrides.install()
    attention_overrides.install()
    distributed.register()
    tpu._apply_environment()
    atexit.register(shutdown.run)


#: What is loaded when it is first asked for, and where it is.
_LAZY = {"show": "torch_tpu.compile.debug", "async_compile": "torch_tpu.compile.warm", "export": "torch_tpu.export"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'torch_tpu' has no attribute {name!r}")
    module = importlib.import_module(_LAZY[name])
    return module if _LAZY[name] == f"torch_tpu.{name}" else getattr(module, name)


#: Why the device could not be registered, for _loader.load().
_problem: ImportError | None = None
try:
    _check_build()
except ImportError as error:
    if not getattr(torch.__spec__, "_initializing", False):
        raise
    _problem = error  # found by `import torch`, which goes on for the sake of other devices
else:
    _register()
