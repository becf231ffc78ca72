"""Compiling for several shapes at a time, before they are needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch.utils._pytree import tree_map

from torch_tpu.compile.graph import CompiledGraph, Watcher


class _Submitted(Exception):
    """Ends a call whose first graph is being compiled."""


class _Submitter(Watcher):
    def __init__(self) -> None:
        self.started: list[Future[Any]] = []

    def called(self, graph: CompiledGraph, inputs: list[Any]) -> None:
        self.started += graph.ahead(inputs)
        raise _Submitted


def async_compile(
    fn: Callable[..., Any],
    warmup_inputs: Sequence[Any],
    *,
    no_grad: bool = True,
    **backend_kwargs: Any,
) -> Callable[..., Any]:
    """Compiles a function for several shapes, side by side.

    All graphs are traced first, and XLA compiles them in its threads meanwhile. Then the function is called once with
    each of the inputs, which compiles what comes after a graph break, and does what the function does to them.

    Args:
        fn: A function or module.
        warmup_inputs: One entry per shape: a tuple of arguments, a dict of keyword arguments, or a single argument.
        no_grad: Whether the calls run under ``torch.no_grad()``; if not, backward passes are compiled too.
        backend_kwargs: As ``torch.compile``'s. Unless ``dynamic`` is given, each shape gets a program of its own.

    Returns:
        The compiled function.

    Raises:
        RuntimeError: A shape cannot be compiled, or the function refuses it; the text says which. Its cause is the
            error itself.
    """
    compiled = torch.compile(fn, **{"backend": "tpu", "dynamic": False, **backend_kwargs})
    calls = [_arguments(given) for given in warmup_inputs]
    started: list[list[Future[Any]]] = []
    with _room_for(len(calls)), torch.set_grad_enabled(torch.is_grad_enabled() and not no_grad):
        for args, kwargs in calls:
            submitter = _Submitter()
            with _naming(args, kwargs), submitter.watching(), suppress(_Submitted):
                compiled(*args, **kwargs)
            started.append(submitter.started)
        for (args, kwargs), futures in zip(calls, started, strict=True):
            with _naming(args, kwargs):
                for future in futures:
                    future.result()
                compiled(*args, **kwargs)
    return compiled


def _arguments(given: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(given, dict):
        return (), given
    return (tuple(given) if isinstance(given, tuple | list) else (given,)), {}


@contextmanager
def _room_for(shapes: int) -> Iterator[None]:
    """Dynamo keeps a graph for each shape, beyond its usual limit."""
    config = torch._dynamo.config
    limit = max(config.recompile_limit, 2 * shapes + 8)
    with config.patch(
        recompile_limit=limit, accumulated_recompile_limit=max(config.accumulated_recompile_limit, limit)
    ):
        yield


@contextmanager
def _naming(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
    """Errors say for which inputs."""
    try:
        yield
    except Exception as error:
        shapes = [*map(_shape, args), *(f"{k}={_shape(v)}" for k, v in kwargs.items())]
        raise RuntimeError(f"async_compile: the inputs ({', '.join(shapes)}) cannot be compiled: {error}") from error


def _shape(value: Any) -> str:
    def spelled(x: Any) -> Any:
        return f"{str(x.dtype).removeprefix('torch.')}{[*x.shape]}" if isinstance(x, torch.Tensor) else x

    return str(tree_map(spelled, value)).replace("'", "")
