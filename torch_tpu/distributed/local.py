"""One process, several devices: a function as one program that runs on all of them, with XLA's own collectives.

The program is the one that a slice would run: ahead of time the same function compiles for thousands of chips
(``torch_tpu.aot.compile(..., mesh=...)``).
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_unflatten

from torch_tpu import _C, platform
from torch_tpu.distributed.partition import Partition
from torch_tpu.programs import options, stats
from torch_tpu.programs.eager import PRECISIONS, describe, make_program
from torch_tpu.tracing.graph import build_graph


class SpmdFunction:
    """A function of one device that runs on all devices of a mesh; :func:`spmd` makes it.

    Args:
        function: Takes and returns pytrees of tensors. Functional collectives
            (``torch.ops._c10d_functional``) name dimensions of the mesh.
        mesh: Sizes of the dimensions, the outermost first. Device numbers count through it row-major.
    """

    def __init__(self, function: Callable[..., Any], mesh: Mapping[str, int]) -> None:
        self.function = function
        self.partition = Partition(dict(mesh))
        self._made: dict[Any, tuple[Any, Any]] = {}

    def __call__(self, arguments: Sequence[Sequence[Any]]) -> list[Any]:
        """What the function returns on each device.

        Args:
            arguments: For each device its arguments, tensors on that device; of one geometry. What the function writes
                is written where it is.

        Raises:
            ValueError: There are not as many as devices, or they differ from device to device.
        """
        count = self.partition.count
        if count > _C._device_count():
            raise ValueError(
                f"The mesh has {count} devices and this process {_C._device_count()}: set TORCH_TPU_NUM_CPU_DEVICES."
            )
        if len(arguments) != count:
            raise ValueError(f"The mesh has {count} devices, and there are arguments for {len(arguments)}.")
        flat = [tree_flatten(tuple(a)) for a in arguments]
        if any(spec != flat[0][1] for _, spec in flat):
            raise ValueError("The arguments of all devices must have the structure of the first's.")
        key = (flat[0][1], *((x.dtype, x.shape, x.requires_grad) if isinstance(x, Tensor) else x for x in flat[0][0]))
        if key not in self._made:
            self._made[key] = self._make(*flat[0])
        graph, results = self._made[key]
        returned = graph.run_on_all([[x for x in leaves if isinstance(x, Tensor)] for leaves, _ in flat])
        return [tree_unflatten([r if i is None else out[i] for r, i in results[0]], results[1]) for out in returned]

    def _make(self, leaves: list[Any], spec: Any) -> tuple[Any, Any]:
        """The graph for arguments like these, and what the function returns: constants, or outputs' numbers."""
        name = getattr(self.function, "__name__", type(self.function).__name__)
        results: Any = None

        def run(*tensors: Tensor) -> list[Tensor]:
            nonlocal results
            given = iter(tensors)
            args = tree_unflatten([next(given) if isinstance(x, Tensor) else x for x in leaves], spec)
            out, out_spec = tree_flatten(self.function(*args))
            found = [x for x in out if isinstance(x, Tensor)]
            numbers = iter(range(len(found)))
            results = ([(None, next(numbers)) if isinstance(x, Tensor) else (x, None) for x in out], out_spec)
            return found

        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fakes = [mode.from_tensor(x) for x in leaves if isinstance(x, Tensor)]
            module = make_fx(run, tracing_mode="fake", record_stack_traces=True)(*fakes)

        def obtain(arguments: list[Any], precision: int) -> Any:
            start = time.perf_counter()
            with self.partition.active():
                plan = build_graph(
                    name, module, [describe(a) for a in arguments], precision=PRECISIONS[precision],
                    emulate_precision=platform.emulates_precision(),
                )  # fmt: skip
            if any(o.kind in ("rng", "scalar", "scalars", "offset") for o in plan.operands):
                raise NotImplementedError(
                    f"{name} draws random numbers or takes numbers at run time, which programs on several devices "
                    f"cannot do yet."
                )
            traced = time.perf_counter()
            executable = options.compile_text(
                plan.text, options.full_flags(), False, options.scope() or (), self.partition.count
            )
            where = " x ".join(f"{n} {k}" for n, k in self.partition.sizes.items())
            stats.record(name, "compiled", traced - start, time.perf_counter() - traced, f"a program for {where}")
            return make_program(plan, executable)

        return _C._Graph(name, obtain), results


def spmd(mesh: Mapping[str, int]) -> Callable[[Callable[..., Any]], SpmdFunction]:
    """Makes a function of one device a program on all devices of a mesh in this process.

    ``step = spmd({"dp": 4})(f)``; then ``step([args of tpu:0, args of tpu:1, ...])``. Functions of
    :func:`torch_tpu.aot.sharded_step` are such functions.

    Args:
        mesh: Sizes of the dimensions, the outermost first.
    """
    return functools.partial(SpmdFunction, mesh=mesh)
