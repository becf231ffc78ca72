"""What the commands ``estimate`` and ``check`` work on: a function or model of the user's, by its place."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

_HELP = (
    "FILE.py:NAME or MODULE:NAME. Without --input, NAME is a function without arguments that returns (function or "
    "module, arguments) or (function or module, arguments, keyword arguments); with it, NAME is the function, module "
    "or class itself, and each --input describes one argument, as float32[8,128]"
)


class Target(NamedTuple):
    """A function or module with its arguments."""

    function: Callable[..., Any] | nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that say what to work on."""
    parser.add_argument("target", help=_HELP)
    parser.add_argument(
        "--input", action="append", default=[], metavar="DTYPE[SIZES]", help="an argument's description"
    )


def load(place: str, inputs: Sequence[str], device: str = "meta") -> Target:
    """The target at a place.

    Args:
        place: ``FILE.py:NAME`` or ``MODULE:NAME``.
        inputs: Descriptions of arguments, or none.
        device: Where a class is made, and tensors that are described: ``meta`` takes no memory.

    Raises:
        ValueError: There is no such place, or what is there is not what it should be.
    """
    found, name = _found(place)
    if inputs:
        with torch.device(device):
            function = found() if isinstance(found, type) else found
        return Target(function, tuple(_tensor(text, device) for text in inputs), {})
    returned = found()
    if isinstance(returned, tuple) and len(returned) in (2, 3) and callable(returned[0]):
        args = returned[1] if isinstance(returned[1], tuple | list) else (returned[1],)
        return Target(returned[0], tuple(args), returned[2] if len(returned) == 3 else {})
    raise ValueError(
        f"{place} returned {type(returned).__name__}; it has to return (function or module, arguments), or say with "
        f"--input what the arguments of {name} are."
    )


def place(text: str) -> Any:
    """What is at a place, ``FILE.py:NAME`` or ``MODULE:NAME``.

    Raises:
        ValueError: There is nothing.
    """
    return _found(text)[0]


def _found(text: str) -> tuple[Any, str]:
    path, _, name = text.rpartition(":")
    if not path or not name:
        raise ValueError(f"{text!r} is no place: give FILE.py:NAME or MODULE:NAME.")
    found = _import(path)
    for part in name.split("."):
        if not hasattr(found, part):
            raise ValueError(f"{path} has nothing that is called {name!r}.")
        found = getattr(found, part)
    return found, name


def _import(path: str) -> Any:
    if not path.endswith(".py"):
        sys.path.insert(0, "")
        try:
            return importlib.import_module(path)
        except ModuleNotFoundError as error:
            raise ValueError(f"There is no module {path!r}: {error}.") from None
        finally:
            sys.path.pop(0)
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"There is no file {path!r}.")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    sys.path.insert(0, str(file.parent.resolve()))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.pop(0)
    return module


def _tensor(text: str, device: str) -> torch.Tensor:
    match = re.fullmatch(r"(\w+)\[([\d, ]*)\]", text.strip())
    dtype = getattr(torch, match[1], None) if match else None
    if match is None or not isinstance(dtype, torch.dtype):
        raise ValueError(f"{text!r} describes no tensor: give a dtype and sizes, as float32[8,128].")
    sizes = [int(n) for n in match[2].split(",") if n.strip()]
    if device == "meta":
        return torch.empty(sizes, dtype=dtype, device=device)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(sizes, device=device).to(dtype)
    return torch.zeros(sizes, dtype=dtype, device=device)
