"""The ``torch.backends`` entry point: ``import torch`` calls :func:`load`, so that ``device="tpu"`` needs no import."""

from __future__ import annotations

import warnings


def load() -> None:
    """Registers device ``tpu``. Quick and silent: no plugin is loaded before a tensor or a device call needs one.

    An installation that does not fit the running PyTorch is a warning here, so that programs for other devices go on;
    ``import torch_tpu`` raises it.
    """
    try:
        import torch_tpu  # noqa: F401
    except ImportError as error:
        warnings.warn(f"The device 'tpu' is not available. {error}", stacklevel=2)
