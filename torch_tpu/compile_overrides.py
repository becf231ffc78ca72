"""``torch.compile`` without a backend's name: tpu for graphs on tpu, Inductor for the others.

PyTorch's default is Inductor whatever the device, and Inductor has no code generator for tpu. Which device a graph is
on is known when it has been captured, so Inductor's entry is where the way forks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def install() -> None:
    wrapper = torch._TorchCompileInductorWrapper
    call = wrapper.__call__

    def route(self: Any, model_: Any, inputs_: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        if type(self) is wrapper and on_tpu(model_, inputs_):
            from torch_tpu.compile.backend import tpu

            return tpu(model_, inputs_)
        return call(self, model_, inputs_, *args, **kwargs)

    wrapper.__call__ = route


def on_tpu(module: Any, inputs: Sequence[Any]) -> bool:
    """Whether a captured graph takes or makes a tensor on tpu."""
    values = [*inputs, *(node.meta.get("example_value") for node in module.graph.nodes)]
    return any(isinstance(t, torch.Tensor) and t.device.type == "tpu" for t in values)
