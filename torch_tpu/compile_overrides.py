"""``torch.compile`` without a backend's name: tpu for graphs on tpu, Inductor for the others.

PyTorch's default is Inductor whatever the device, and Inductor has no code generator for tpu. Which device a graph is
on is known when it has been captured, so Inductor's entry is where the way forks. It refuses options that are not its
own when ``torch.compile`` is called, before anybody knows the device: those of the tpu backend are kept aside here.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch


def install() -> None:
    wrapper: Any = torch._TorchCompileInductorWrapper
    call, initialise, apply, equal = wrapper.__call__, wrapper.__init__, wrapper.apply_options, wrapper.__eq__

    def __init__(self: Any, mode: Any, options: Any, *args: Any, **kwargs: Any) -> None:
        self._tpu_mode, self._tpu_options = mode, {}
        initialise(self, mode, options, *args, **kwargs)
        self._inductor_options = sorted(set(options or ()) - set(self._tpu_options))

    def apply_options(self: Any, options: dict[str, Any] | None) -> None:
        ours, others = _divided(options or {})
        self._tpu_options.update(ours)
        try:
            apply(self, others)
        except RuntimeError as error:
            if "Unexpected optimization option" not in str(error):
                raise
            raise RuntimeError(f"{error}. For graphs on tpu these are known too: {', '.join(_known())}.") from None

    def route(self: Any, model_: Any, inputs_: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        if type(self) is wrapper and on_tpu(model_, inputs_):
            from torch_tpu.compile.backend import tpu

            if self._inductor_options:
                warnings.warn(
                    f"torch_tpu: Inductor's options {', '.join(self._inductor_options)} have no effect on tpu.",
                    stacklevel=2,
                )
            return tpu(model_, inputs_, mode=self._tpu_mode, options=self._tpu_options)
        return call(self, model_, inputs_, *args, **kwargs)

    def __eq__(self: Any, other: Any) -> bool:
        return equal(self, other) and self._tpu_options == other._tpu_options

    wrapper.__init__ = __init__
    wrapper.apply_options = apply_options
    wrapper.__call__ = route
    wrapper.__eq__ = __eq__


def _known() -> list[str]:
    from torch_tpu.compile.settings import known

    return known()


def _divided(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options that are the tpu backend's, and those that are Inductor's."""
    if not options:
        return {}, {}
    names = _known()
    return {k: v for k, v in options.items() if k in names}, {k: v for k, v in options.items() if k not in names}


def on_tpu(module: Any, inputs: Sequence[Any]) -> bool:
    """Whether a captured graph takes or makes a tensor on tpu."""
    values = [*inputs, *(node.meta.get("example_value") for node in module.graph.nodes)]
    return any(isinstance(t, torch.Tensor) and t.device.type == "tpu" for t in values)
