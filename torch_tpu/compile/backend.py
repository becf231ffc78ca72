"""The Dynamo backend ``"tpu"``."""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd.schemas import SerializableAOTDispatchCompiler
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.fx import GraphModule

from torch_tpu.bounded.graph import BoundedGraph, Pair, hinted, make_buckets, open_sizes
from torch_tpu.bounded.layout import Unbounded
from torch_tpu.compile.failures import eagerly, guarded, warn
from torch_tpu.compile.graph import (
    CompiledGraph,
    Parts,
    Programs,
    artifact,
    compiled,
    localize,
    note,
    readable,
    runnable,
    traces,
    wait,
)
from torch_tpu.compile.segments import split
from torch_tpu.compile.settings import Settings
from torch_tpu.lowering import registry
from torch_tpu.programs.options import scope
from torch_tpu.tracing.graph import CompileError

_numbers = itertools.count()

#: How AOTAutograd works for this backend: the backward pass is compiled while the forward pass is, and its cache keeps
#: the graphs themselves.
_AOT = {"unlift_effect_tokens": True, "bundled_autograd_cache": True, "force_non_lazy_backward_lowering": True}


def tpu(
    module: GraphModule,
    inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Callable[..., Any]:
    """Compiles what Dynamo captured; ``torch.compile(..., backend="tpu")`` ends here.

    Args:
        module: The captured graph.
        inputs: Its inputs, as fake tensors.
        mode: As ``torch.compile``'s; see ``docs/compile.md``.
        options: See :class:`torch_tpu.compile.settings.Settings`.
        kwargs: Options too.

    Raises:
        ValueError: An option is unknown or cannot be what it is set to.
        CompileError: An operator has no program; the text names it and the user's line.
    """
    settings = Settings.read(mode, options, kwargs)
    number, pair = next(_numbers), Pair().known()
    compilers = {
        role: SerializableAOTDispatchCompiler(CompiledGraph, _Compiler(settings, role, number, pair))
        for role in ("forward", "backward", "inference")
    }
    backend = aot_autograd(
        fw_compiler=compilers["forward"],
        bw_compiler=compilers["backward"],
        inference_compiler=compilers["inference"],
        partition_fn=min_cut_rematerialization_partition,
        keep_inference_input_mutations=True,
    )
    caches = settings.serializable and settings.debug_callback is None
    always = {} if caches else {"enable_autograd_cache": False, "strict_autograd_cache": False}
    compiler_config: Any = torch.compiler.config
    with functorch_config.patch({**_AOT, **always}), compiler_config.patch(cache_key_tag=_cache_tag(settings)):
        return backend(module, inputs)


def _cache_tag(settings: Settings) -> str:
    """Keeps what is in AOTAutograd's cache apart from what other sources or options of this package put there."""
    return f"{torch.compiler.config.cache_key_tag}:torch_tpu:{registry.fingerprint()}:{_sources()}:{settings}"


@functools.cache
def _sources() -> str:
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


class _Compiler:
    """Compiles one of the graphs that AOTAutograd makes of a captured one."""

    def __init__(self, settings: Settings, role: str, number: int, pair: Pair) -> None:
        self.settings = settings
        self.role = role
        self.number = number
        self.pair = pair

    def __call__(self, module: GraphModule, inputs: Sequence[Any]) -> CompiledGraph:
        name = f"{self.settings.name or 'graph'}_{self.number}.{self.role}"
        if localize(module):
            self.pair.problem = "a large constant is part of it"
        visible, is_backward = self._visible(module), self.role == "backward"
        note(module, self.settings, is_backward)
        if traces():
            artifact("torchtpu_fx_graph", f"# {name}\n{readable(module)}")
        try:
            parts = self._parts(name, module, inputs, visible)
            if not self.settings.async_compile:
                wait(parts)
        except CompileError as error:
            if self.settings.fallback != "eager":
                raise
            warn(error)
            self.pair.give_up(str(error))
            parts = Parts(eagerly(module), [])
        return CompiledGraph(name, module, {scope(): parts}, self.settings, self.pair, visible, is_backward)

    def _parts(self, name: str, module: GraphModule, inputs: Sequence[Any], visible: int) -> Parts:
        """What runs the graph; it starts to be compiled."""
        is_backward = self.role == "backward"
        if open_sizes(module):
            checked = self._bounded(name, module, visible)
            return runnable(name, module, self.settings, self.pair, visible, is_backward, checked)
        programs: list[Programs] = []
        run = compiled(name, module, inputs, programs)
        return Parts(guarded(run, module, self.settings, self.pair, is_backward), programs)

    def _visible(self, module: GraphModule) -> int:
        """How many outputs the user sees; those after them are kept for the backward pass."""
        context = torch._guards.TracingContext.try_get()
        if self.role == "forward" and context is not None and context.fw_metadata is not None:
            return context.fw_metadata.num_forward
        returned: Any = module.graph.output_node().args[0]
        return len(returned)

    def _bounded(self, name: str, module: GraphModule, visible: int) -> BoundedGraph | None:
        """The graph with bounds, which starts to be compiled; None if it is compiled for each size."""
        pair, is_backward = self.pair, self.role == "backward"
        if not is_backward and not pair.problem and split(module) is None:
            pair.buckets = make_buckets(module, self.settings.num_dynamic_buckets)
            if pair.buckets is not None:
                pair.buckets.step = self.settings.bucket_size
        sizes = hinted(module)
        if pair.buckets is None or sizes is None:
            pair.give_up(pair.problem or "it leaves the device")
            return None
        try:
            made = BoundedGraph(name, module, pair, visible, is_backward)
            made.check(sizes)
        except Unbounded as problem:
            pair.give_up(str(problem))
            return None
        return made
