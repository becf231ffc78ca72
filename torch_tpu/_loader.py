"""The ``torch.backends`` entry point: ``import torch`` calls :func:`load`, so that ``device="tpu"`` needs no import."""

from __future__ import annotations


def load() -> None:
    """Registers device ``tpu``. Quick and silent: no plugin is loaded before a tensor or a device call needs one."""
    import torch_tpu  # noqa: F401
