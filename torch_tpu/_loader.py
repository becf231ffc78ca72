"""The ``torch.backends`` entry point: ``import torch`` calls :func:`load`, so that ``device="tpu"`` needs no import."""

from __future__ import annotations

import sys
import warnings


def load() -> None:
    """Registers device ``tpu``. Quick and silent: no plugin is loaded before a tensor or a device call needs one.

    An installation that does not fit the running PyTorch is a warning here, so that programs for other devices go on; a
    later ``import torch_tpu`` raises it.
    """
    import torch_tpu

    problem = getattr(
        torch_tpu, "_problem", None
    )  # not there yet when `import torch_tpu` came first: it raises by itself
    if problem is not None:
        for name in [n for n in sys.modules if n.partition(".")[0] == "torch_tpu"]:
            del sys.modules[name]
        warnings.warn(f"The device 'tpu' is not available. {problem}", stacklevel=2)
