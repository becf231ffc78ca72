"""The module that becomes ``torch.backends.tpu``: what was built, and the knobs of the compiler."""

from __future__ import annotations

import sys
import types

from torch_tpu import _C, tpu

__all__ = ["allow_excess_precision", "is_available", "is_built", "version"]  # noqa: F822  (a property of the module)


def is_built() -> bool:
    """True: the module exists only where the device's kernels were built."""
    return True


def is_available() -> bool:
    """As :func:`torch.tpu.is_available`. Starts nothing."""
    return tpu.is_available()


def version() -> str:
    """The plugin's platform, PJRT C API and version, such as ``"tpu, PJRT C API 0.117, ..."``. Starts the platform."""
    info = _C._platform_info()
    return f"{info['platform']}, PJRT C API {info['api'][0]}.{info['api'][1]}, {info['version']}"


class _Module(types.ModuleType):
    """Gives the module its property."""

    @property
    def allow_excess_precision(self) -> bool:
        """As ``torch.tpu.allow_excess_precision``."""
        return tpu.allow_excess_precision  # type: ignore[attr-defined]

    @allow_excess_precision.setter
    def allow_excess_precision(self, allowed: bool) -> None:
        tpu.allow_excess_precision = allowed  # type: ignore[attr-defined]


sys.modules[__name__].__class__ = _Module
