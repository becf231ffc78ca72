"""A few models of timm and Diffusers."""

from __future__ import annotations

from typing import Any

MODELS: list[tuple[str, str]] = []


def build(library: str, name: str) -> tuple[Any, dict[str, Any]]:
    raise NotImplementedError
