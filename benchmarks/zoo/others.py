"""A few models of timm and Diffusers."""

from __future__ import annotations

import importlib.machinery
import sys
import types
from typing import Any

import torch


class _Constants(type):
    """Classes that have whatever constant is asked of them."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


class _Anything(types.ModuleType):
    """A module with whatever class is asked of it."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__spec__ = importlib.machinery.ModuleSpec(name, None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return sys.modules.get(f"{self.__name__}.{name}") or _Constants(name, (torch.nn.Module,), {})


def import_timm() -> Any:
    """timm without torchvision, of which its models need no part, and which does not always exist for a PyTorch."""
    names = [
        "torchvision" + end for end in ("", ".ops", ".ops.misc", ".transforms", ".transforms.functional", ".datasets")
    ]
    missing = [name for name in names if "torchvision" not in sys.modules]
    sys.modules.update((name, _Anything(name)) for name in missing)
    try:
        import timm

        return timm
    finally:
        for name in missing:
            del sys.modules[name]


MODELS: list[tuple[str, str]] = []


def build(library: str, name: str) -> tuple[Any, dict[str, Any]]:
    raise NotImplementedError
