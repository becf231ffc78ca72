"""Runs one operator description in one dtype on the CPU and on the device.

Values, in-place and ``out=`` forms, layouts of arguments, gradients, errors.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.testing._internal import common_methods_invocations as descriptions
from torch.testing._internal.opinfo.core import OpInfo
from torch.utils._pytree import tree_leaves, tree_map

from tests.conformance.compare import Mismatch, assert_same, widened
from tests.conformance.devices import Draws, HostWork, Transfer
from tests.conformance.variants import EDGES, LAYOUTS, changed, elements

Phase = Callable[[str], None]
Result = tuple[int, list[str]]

GRADIENT_DTYPES = (torch.float32, torch.complex64)

#: Results are random: compared by dtype, shape, strides and range only.
RANDOM = frozenset(
    f"{family}{name}"
    for family, members in {
        "": "bernoulli cauchy exponential geometric log_normal multinomial normal normal.in_place normal.number_mean "
        "rand_like randint randint_like randn randn_like randperm uniform svd_lowrank pca_lowrank",
        "nn.functional.": "alpha_dropout dropout dropout2d dropout3d feature_alpha_dropout.with_train "
        "fractional_max_pool2d fractional_max_pool3d rrelu",
    }.items()
    for name in members.split()
)
#: Results have undefined contents: compared by dtype, shape and strides only.
UNDEFINED = frozenset(
    ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided", "resize_")
)
#: (operator, argument): tensors that PyTorch wants on the CPU on every device.
_ON_HOST = frozenset({("tensor_split", 1)})
#: Where only small samples are wanted, the number of samples to choose from: some descriptions have over a thousand.
_FIRST = 40


@dataclass(frozen=True)
class Sample:
    """One call: ``function(input, *args, **kwargs)``, and what the gradient tests take of its result."""

    input: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    process: Callable[[Any], Any] = lambda out: out
    label: str = ""
    broadcasts: bool = False

    @property
    def arguments(self) -> tuple[Any, ...]:
        return self.input, self.args, self.kwargs

    def with_arguments(self, arguments: tuple[Any, ...], label: str = "") -> Sample:
        return replace(self, input=arguments[0], args=arguments[1], kwargs=arguments[2], label=label or self.label)


def _as_gradients(sample: Sample, out: Any) -> Any:
    """Without signs and phases, as the description's own gradient tests take the result."""
    return sample.process(out)


def _at_positions(sample: Sample, out: Any, place: int = 0) -> Any:
    """Positions of equal values may differ: the values, and the values at the positions.

    Args:
        sample: The call.
        out: Values and positions, or positions alone.
        place: Where ``dim`` stands among the arguments after the first.
    """
    if sample.kwargs.get("stable"):
        return out
    dim = sample.args[place] if len(sample.args) > place else sample.kwargs.get("dim", -1)
    values, at = ([], out) if isinstance(out, torch.Tensor) else (out[0], out[1])
    at = at if at.ndim == sample.input.ndim else at.unsqueeze(dim)
    return values, sample.input.gather(dim, at)


#: Operators whose results are not determined: what of them is.
DETERMINED: dict[str, Callable[[Sample, Any], Any]] = {
    **dict.fromkeys(("linalg.eig", "linalg.eigh", "linalg.svd", "svd"), _as_gradients),
    **dict.fromkeys(("sort", "argsort", "mode"), _at_positions),
    **dict.fromkeys(("kthvalue", "topk"), functools.partial(_at_positions, place=1)),
}


@functools.cache
def operators() -> dict[str, OpInfo]:
    """Every operator description by its full name."""
    foreach = [name for name in dir(descriptions) if name.startswith("foreach_") and name.endswith("_db")]
    return {op.full_name: op for table in ("op_db", *foreach) for op in getattr(descriptions, table)}


def kinds(op: OpInfo, dtype: torch.dtype) -> list[str]:
    """The kinds of test that the description asks for in ``dtype``."""
    if dtype not in op.supported_dtypes("cpu"):
        return []
    out = ["forward"]
    if op.inplace_variant is not None:
        out.append("inplace")
    if op.supports_out and not op.name.startswith("_foreach"):
        out.append("out")
    out += ["layout", "edge"]
    if dtype in GRADIENT_DTYPES and op.supports_autograd and dtype in op.supported_backward_dtypes("cpu"):
        out += ["backward", "double_backward"] if op.supports_gradgrad else ["backward"]
    return out


def has_errors(op: OpInfo) -> bool:
    return op.error_inputs_func is not None


def check(op: OpInfo, dtype: torch.dtype, kind: str, limit: int, phase: Phase, largest: int | None = None) -> Result:
    """Runs a test of ``kind``.

    Args:
        op: The description.
        dtype: Of its samples.
        kind: One of :func:`kinds`, or ``errors``.
        limit: The most samples to run, spread over those there are.
        phase: Told ``cpu`` or ``tpu`` before code runs that could end the process.
        largest: Look at the first samples only, and leave out those with more elements.

    Returns:
        How many samples CPU PyTorch passes, and for each that the device fails the first line of what is wrong.
    """
    runner = _Runner(op, dtype, kind, phase)
    count, failures = 0, []
    for sample in runner.samples(limit, largest):
        try:
            torch.manual_seed(0)
            if not runner.run(sample):
                continue
            count += 1
        except Exception as error:  # a failure of the device, or a mismatch
            count += 1
            failures.append(f"{sample.label}: {first_line(error)}")
    return count, failures


def first_line(error: Exception) -> str:
    name = "" if isinstance(error, Mismatch) else f"{type(error).__name__}: "
    return name + (str(error).strip().splitlines() or [""])[0][:300]


def spread(items: list[Any], limit: int) -> list[Any]:
    """At most ``limit`` of the items, evenly spread, the first among them."""
    return items if len(items) <= limit else [items[i * len(items) // limit] for i in range(limit)]


class _OnCpu(Exception):
    """The CPU refuses the sample: it does not count."""


class _Runner:
    def __init__(self, op: OpInfo, dtype: torch.dtype, kind: str, phase: Phase) -> None:
        self.op, self.dtype, self.kind, self.phase = op, dtype, kind, phase
        self.grad = kind in ("backward", "double_backward")
        self.run = getattr(self, f"_{kind}")
        self.values = "range" if op.full_name in RANDOM else "none" if op.full_name in UNDEFINED else "close"

    # ---- samples -------------------------------------------------------------------------------------------------
    def samples(self, limit: int, largest: int | None) -> Iterator[Sample]:
        self.phase("cpu")
        if self.kind == "errors":
            given = (error.sample_input for error in self.op.error_inputs("cpu"))
        else:
            given = self.op.sample_inputs("cpu", self.dtype, requires_grad=self.grad)
        given = list(given if largest is None else itertools.islice(given, _FIRST))
        samples = [
            Sample(s.input, tuple(s.args), dict(s.kwargs), s.output_process_fn_grad, f"sample {i}", s.broadcasts_input)
            for i, s in enumerate(given)
        ]
        if largest is not None:
            samples = [s for s in samples if elements(s.arguments) <= largest]
        changes = {"layout": LAYOUTS, "edge": EDGES}.get(self.kind)
        for sample in spread(samples, limit):
            if changes is None:
                yield sample
                continue
            for label, arguments in changed(sample.arguments, changes):
                yield sample.with_arguments(arguments, f"{sample.label}, {label}")

    def _transfer(self, device: str, sample: Sample) -> Sample:
        on_host = [a for i, a in enumerate((sample.input, *sample.args)) if (self.op.name, i) in _ON_HOST]
        transfer = Transfer(device, lambda t: any(t is a for a in on_host))
        return sample.with_arguments(transfer(sample.arguments))

    def _call(self, sample: Sample, function: Callable[..., Any] | None = None, **extra: Any) -> Any:
        return (function or self.op)(sample.input, *sample.args, **sample.kwargs, **extra)

    def _on_cpu(self, function: Callable[[], Any]) -> Any:
        self.phase("cpu")
        try:
            return function()
        except Exception as error:
            raise _OnCpu from error
        finally:
            self.phase("tpu")

    # ---- kinds: True if the sample counts, an exception if the device fails it -----------------------------------
    def _forward(self, sample: Sample) -> bool:
        here, there = self._transfer("cpu", sample), self._transfer("tpu", sample)
        try:
            expected = self._on_cpu(lambda: self._call(here))
        except _OnCpu:
            return False
        with HostWork() as host, _named_device(there):
            actual = self._call(there)
        self._compare(actual, expected, there, here)
        if host.found:
            raise Mismatch(f"host: {', '.join(sorted(set(host.found)))} moved a tensor to the CPU")
        if _aliases(actual, there) != _aliases(expected, here):
            raise Mismatch("alias: the result shares its storage with other arguments than on the CPU")
        return True

    def _compare(self, actual: Any, expected: Any, there: Sample, here: Sample) -> None:
        determined = DETERMINED.get(self.op.full_name)
        if determined is not None:
            assert_same(actual, expected, values="none")
            actual, expected = determined(there, actual), determined(here, expected)

        @functools.cache
        def wide() -> Any:
            sample = here.with_arguments(widened(here.arguments))
            out = self._call(sample)
            return out if determined is None else determined(sample, out)

        try:
            assert_same(actual, expected, truth=wide, values=self.values)
        except Mismatch as error:
            if not str(error).startswith("value") or not self._is_random(here):
                raise
            assert_same(actual, expected, values="range")

    def _is_random(self, sample: Sample) -> bool:
        """Whether this sample has random results though not all of the operator have: attention with dropout."""
        with Draws() as draws:
            self._call(self._transfer("cpu", sample))
        return draws.found

    _layout = _edge = _forward

    def _inplace(self, sample: Sample) -> bool:
        if sample.broadcasts:  # in-place forms cannot; some of the CPU's resize their operand instead of saying so
            return False
        here, there = self._transfer("cpu", sample), self._transfer("tpu", sample)
        try:
            expected = self._on_cpu(lambda: self._call(here, self.op.inplace_variant))
        except _OnCpu:
            return False
        actual = self._call(there, self.op.inplace_variant)
        if (actual is there.input) != (expected is here.input):
            raise Mismatch("alias: the in-place form does not return its operand")

        def wide() -> Any:
            copy = sample.with_arguments(widened(sample.arguments))
            self._call(copy, self.op.inplace_variant)
            return copy.arguments

        assert_same(there.arguments, here.arguments, truth=functools.cache(wide), values=self.values)
        return True

    def _out(self, sample: Sample) -> bool:
        here, there = self._transfer("cpu", sample), self._transfer("tpu", sample)
        try:
            result = self._on_cpu(lambda: self._call(here))
        except _OnCpu:
            return False
        counted = False
        for shape in (_same, _empty, _strided):
            out = tree_map(shape, tuple(result) if isinstance(result, tuple | list) else result)
            out_there = Transfer("tpu")(out)
            try:
                expected = self._on_cpu(lambda out=out: self._call(here, out=out))
                if self.values == "close":  # a few of the CPU's kernels take a strided out= for a contiguous one
                    assert_same(out, tuple(result) if isinstance(out, tuple) else result, strides=False, device="cpu")
            except (_OnCpu, Mismatch):
                continue
            counted = True
            actual = self._call(there, out=out_there)
            try:
                if _identities(actual, out_there) != _identities(expected, out):
                    raise Mismatch("alias: the results are not the out= tensors")
                self._compare(out_there, out, there, here)
            except Mismatch as error:
                raise Mismatch(f"{error} (out= {shape.__name__.strip('_')})") from None
        return counted

    def _backward(self, sample: Sample) -> bool:
        return self._gradients(sample, 1)

    def _double_backward(self, sample: Sample) -> bool:
        return self._gradients(sample, 2)

    def _gradients(self, sample: Sample, order: int) -> bool:
        there = self._transfer("tpu", sample)
        try:
            expected = self._on_cpu(lambda: self._differentiate(self._transfer("cpu", sample), order))
        except _OnCpu:
            return False
        if expected is None:
            return False
        actual = self._differentiate(there, order)
        wide = functools.cache(lambda: self._differentiate(sample.with_arguments(widened(sample.arguments)), order))
        random = self.values != "close" or self._is_random(sample)
        assert_same(actual, expected, truth=wide, values="range" if random else "close", strides=False, like=self.dtype)
        return True

    def _differentiate(self, sample: Sample, order: int) -> list[torch.Tensor | None] | None:
        """Gradients of ``order`` with cotangents that depend on nothing but shapes; None if there is none."""
        inputs = [t for t in tree_leaves(sample.arguments) if isinstance(t, torch.Tensor) and t.requires_grad]
        result = self.op.gradcheck_wrapper(self.op.get_op(), sample.input, *sample.args, **sample.kwargs)
        outputs = tree_leaves(sample.process(result))
        grads: list[torch.Tensor | None] | None = None
        for step in range(order):
            outputs = [t for t in outputs if isinstance(t, torch.Tensor) and t.requires_grad]
            if not outputs or not inputs:
                return None
            cotangents = [cotangent(t, step) for t in outputs]
            again = step + 1 < order
            if again:
                cotangents = [c.requires_grad_() for c in cotangents]
            grads = list(torch.autograd.grad(outputs, inputs, cotangents, create_graph=again, allow_unused=True))
            outputs = [g for g in grads if g is not None]
            inputs = inputs + cotangents
        return grads

    def _errors(self, sample: Sample) -> bool:
        there = self._transfer("tpu", sample)
        self.phase("cpu")
        try:
            self._call(self._transfer("cpu", sample))
            return False
        except Exception as error:
            expected = error
        self.phase("tpu")
        try:
            self._call(there)
            torch.tpu.synchronize()
        except Exception as error:
            if type(error) is not type(expected):
                raise Mismatch(f"exception: {_named(error)} instead of {_named(expected)}") from None
            return True
        raise Mismatch(f"exception: none instead of {_named(expected)}")


def _named_device(sample: Sample) -> contextlib.AbstractContextManager[Any]:
    """Makes the device the default one for a call that names none, neither by itself nor with a tensor."""
    named = any(isinstance(x, torch.Tensor | torch.device) for x in tree_leaves(sample.arguments))
    return contextlib.nullcontext() if named or "device" in sample.kwargs else torch.device("tpu")


def _named(error: Exception) -> str:
    return f"{type(error).__name__}({(str(error).splitlines() or [''])[0][:120]})"


def _aliases(result: Any, sample: Sample) -> list[list[int]]:
    """For each tensor of the result the numbers of the arguments with which it shares its storage."""
    given = [t for t in tree_leaves(sample.arguments) if isinstance(t, torch.Tensor) and t.layout == torch.strided]
    return [
        [i for i, x in enumerate(given) if x.untyped_storage()._cdata == t.untyped_storage()._cdata]
        for t in tree_leaves(result)
        if isinstance(t, torch.Tensor) and t.layout == torch.strided
    ]


def cotangent(t: torch.Tensor, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(17 + step)
    dtype = torch.complex64 if t.dtype.is_complex else torch.float32
    return torch.randn(t.shape, generator=generator, dtype=dtype).to(t.dtype).to(t.device)


def _identities(results: Any, given: Any) -> list[bool]:
    """Which results are the tensors that were given; some ``out=`` forms return nothing."""
    return [] if results is None else [a is b for a, b in zip(tree_leaves(results), tree_leaves(given), strict=True)]


def _same(t: Any) -> Any:
    return torch.full_like(t, 1) if isinstance(t, torch.Tensor) else t


def _empty(t: Any) -> Any:
    return t.new_empty(0) if isinstance(t, torch.Tensor) else t


def _strided(t: Any) -> Any:
    if not isinstance(t, torch.Tensor):
        return t
    return torch.full((*t.shape, 2), 1, dtype=t.dtype)[..., 0]
