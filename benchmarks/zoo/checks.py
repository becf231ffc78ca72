"""The checks of one model: it runs on the CPU, then on tpu, and the two are compared."""

from __future__ import annotations

import copy
import json
import os
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from zoo import inputs as making
from zoo.entries import Entry
from zoo.tiny import SCALES, Scale, configuration

CHECKS = ("forward", "backward", "generate", "compiled", "compiled_backward")
_MOST_PARAMETERS = 60_000_000
#: Differences relative to the largest value that count as the same.
_TOLERANCE = {"forward": 2e-4, "backward": 2e-3}


#: Where the CPU's float32 is this far from its float64, the latter is no judge: other queries were chosen, for one.
_UNRELATED = 0.5


class NotOnCpu(Exception):
    """The model cannot be made or run on the CPU; says nothing about tpu."""


_DRAWN = {torch.rand, torch.randn, torch.randint, torch.randperm, torch.normal, torch.bernoulli, torch.multinomial}
_LIKE = {torch.rand_like: torch.rand, torch.randn_like: torch.randn}
_FILL = {getattr(torch.Tensor, name) for name in "normal_ uniform_ random_ exponential_ bernoulli_".split()}


class SameRandom(TorchFunctionMode):
    """Random numbers come from the CPU's generator, so that a model that draws some draws the same anywhere."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Draws on the CPU and moves the numbers."""
        kwargs = kwargs or {}
        if func in _LIKE:
            x = args[0]
            return _LIKE[func](x.shape).to(kwargs.get("device") or x.device, kwargs.get("dtype") or x.dtype)
        if func in _FILL:
            # In float32 for the run in float64 too: another dtype is another sequence.
            dtype = torch.float32 if args[0].is_floating_point() else args[0].dtype
            return args[0].copy_(func(torch.empty(args[0].shape, dtype=dtype), *args[1:], **kwargs))
        if func in _DRAWN:
            device = kwargs.pop("device", None)
            tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
            device = device or (tensors[0].device if tensors else torch.get_default_device())
            move = lambda a: a.cpu() if isinstance(a, torch.Tensor) else a  # noqa: E731
            generator = kwargs.get("generator")
            if generator is None or generator.device.type == "cpu":
                return func(*tree_map(move, args), **tree_map(move, kwargs)).to(device)
            kwargs["device"] = device
        return func(*args, **kwargs)


def _lively(model: torch.nn.Module) -> torch.nn.Module:
    """Moves the parameters off the zeros and ones of their initialisation, and replaces what was left uninitialised."""
    torch.manual_seed(2)
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            if not tensor.is_floating_point():
                continue
            if not bool(tensor.isfinite().all()) or float(tensor.abs().max() if tensor.numel() else 0) > 1e4:
                tensor.copy_(torch.randn(tensor.shape) * 0.02)
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.add_(torch.randn(parameter.shape) * 0.02)
        for name, buffer in model.named_buffers():
            if name.endswith("running_var"):
                buffer.fill_(1.0)
    return model


def _build(entry: Entry, scale: Scale) -> tuple[torch.nn.Module, dict[str, Any]]:
    import transformers

    cls = getattr(transformers, entry.cls)
    config = configuration(entry.architecture, scale)
    with torch.device("meta"):
        size = sum(p.numel() for p in cls._from_config(copy.deepcopy(config)).parameters())
    if size > _MOST_PARAMETERS:
        raise NotOnCpu(f"{size / 1e6:.0f} million parameters are left")
    torch.manual_seed(0)
    model = _lively(cls._from_config(config).float()).eval()
    return model, making.inputs(model, entry.architecture)


def build(entry: Entry) -> tuple[torch.nn.Module, dict[str, Any]]:
    """The tiny model on the CPU, and inputs that it takes.

    Raises:
        NotOnCpu: No way of making it small gives a model that runs on the CPU.
    """
    if entry.library != "transformers":
        from zoo.others import build as other

        try:
            model, given = other(entry.library, entry.cls)
            return _lively(model).eval(), given
        except Exception as error:
            raise NotOnCpu(f"{type(error).__name__}: {error}" + _where(error)) from error
    complaints = []
    for scale in SCALES:
        try:
            with SameRandom():
                return _build(entry, scale)
        except Exception as error:
            complaints.append(f"{type(error).__name__}: {error}" + _where(error))
    raise NotOnCpu(complaints[0])


def _where(error: BaseException) -> str:
    """The last line of a model's own code in an error's traceback."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "site-packages" in f.filename]
    own = [f for f in frames if "modeling_" in f.filename or "/timm/" in f.filename or "/diffusers/" in f.filename]
    last = (own or frames)[-1:]
    return "".join(f" [{os.path.basename(f.filename)}:{f.lineno}]" for f in last)


def tensors(result: Any) -> list[torch.Tensor]:
    """The tensors of a model's result, in order; caches of keys and values are not looked into."""
    if isinstance(result, torch.Tensor):
        return [result]
    if isinstance(result, dict):
        return [
            t for key, value in result.items() if "past_key" not in key and "cache" not in key for t in tensors(value)
        ]
    if isinstance(result, (list, tuple)):
        return [t for value in result for t in tensors(value)]
    return []


def _loss(result: Any) -> torch.Tensor:
    """A number that depends on each element of the result."""
    total: Any = 0.0
    for tensor in tensors(result):
        if tensor.is_floating_point() and tensor.requires_grad:
            weights = torch.cos(torch.arange(tensor.numel(), dtype=torch.float32) * 0.7).reshape(tensor.shape)
            finite = torch.where(tensor.abs() < 1e6, tensor, 0)
            total = total + (finite * weights.to(tensor.device, tensor.dtype)).mean()
    if not isinstance(total, torch.Tensor):
        raise NotOnCpu("nothing in the result has a gradient")
    return total


def _moved(model: torch.nn.Module, target: Any) -> torch.nn.Module:
    """A copy of the model on another device or in another dtype, with tensors that it kept from its run here."""
    model = copy.deepcopy(model).to(target)
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor) and (value.is_floating_point() or not isinstance(target, torch.dtype)):
                setattr(module, name, value.to(target))
    return model


class Run:
    """One model on one device and in one way."""

    def __init__(self, model: torch.nn.Module, given: dict[str, Any], device: str, compiled: bool = False) -> None:
        self.model = model
        self._given = tree_map(lambda t: t.to(device) if isinstance(t, torch.Tensor) else t, given)
        self._device = device
        self._call: Callable[..., Any] = model
        if compiled:
            self._call = model.compiled() if hasattr(model, "compiled") else torch.compile(model)

    def forward(self) -> list[torch.Tensor]:
        """The result of a call without gradients."""
        torch.manual_seed(3)
        self.model.eval()
        with torch.no_grad(), SameRandom():
            return [t.detach().cpu() for t in tensors(self._call(**self._given))]

    def backward(self, training: bool) -> dict[str, torch.Tensor]:
        """The gradients of all parameters after one step."""
        torch.manual_seed(3)
        self.model.train(training)
        self.model.zero_grad()
        with SameRandom():
            _loss(self._call(**self._given)).backward()
        return {n: p.grad.cpu() for n, p in self.model.named_parameters() if p.grad is not None}

    def generate(self, length: int) -> list[torch.Tensor]:
        """New tokens after a prompt of this length, and the scores they were chosen by."""
        torch.manual_seed(3)
        self.model.eval()
        prompt = {
            k: v[:, -length:] if k in ("input_ids", "attention_mask") and "pixel_values" not in self._given else v
            for k, v in self._given.items()
            if k not in ("decoder_input_ids", "mm_token_type_ids") or "pixel_values" in self._given
        }
        with torch.no_grad(), SameRandom():
            out = self.model.generate(
                **prompt, max_new_tokens=8, min_new_tokens=8, do_sample=False, num_beams=1, output_scores=True,
                return_dict_in_generate=True,
            )  # fmt: skip
        return [out.sequences.cpu(), *(s.detach().cpu() for s in out.scores or ())]


def difference(actual: list[torch.Tensor], expected: list[torch.Tensor], floors: list[float] | None = None) -> float:
    """The largest difference relative to the largest value of each tensor; infinite if they are not comparable."""
    if [a.shape for a in actual] != [e.shape for e in expected]:
        return float("inf")
    worst = 0.0
    for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
        if e.numel() == 0:
            continue
        if not e.is_floating_point():
            # Indices and masks: a place or two may fall to the other side of a tie.
            wrong = (a != e).float().mean().item() if not e.is_complex() else (a - e).abs().max().item()
            worst = max(worst, wrong)
            continue
        a, e = a.double(), e.double()
        same = (a == e) | (a.isnan() & e.isnan())
        gap = torch.where(same, 0.0, (a - e).abs())
        scale = e[e.isfinite() & (e.abs() < 1e30)].abs()
        largest = max(scale.max().item() if scale.numel() else 0.0, floors[i] if floors else 1e-6, 1e-12)
        gap = gap.nan_to_num(nan=float("inf"))
        worst = max(worst, gap.max().item() / largest)
    return worst


def _completed(gradients: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """With zeros for those that only the other has."""
    return {**{n: torch.zeros_like(g) for n, g in other.items()}, **gradients}


class Checker:
    """Runs the checks of one entry and reports each as it is done."""

    def __init__(self, entry: Entry, report: Callable[[dict[str, Any]], None]) -> None:
        self._entry, self._report = entry, report
        self._model, self._inputs = build(entry)
        self._cpu = Run(self._model, self._inputs, "cpu")
        self._wide: Run | None = None
        self._device: torch.nn.Module | None = None

    def check(self, name: str) -> None:
        """Runs one check."""
        start = time.perf_counter()
        try:
            outcome = getattr(self, "_" + name)()
        except NotOnCpu as error:
            outcome = {"status": "none", "detail": str(error)[:300]}
        except Exception as error:
            text = f"{type(error).__name__}: {error}".replace("\n", " ")[:500] + _where(error)
            outcome = {"status": "fails", "detail": text}
        self._report({"check": name, "seconds": round(time.perf_counter() - start, 2), **outcome})

    def _on_cpu(self, function: Callable[[], Any]) -> Any:
        try:
            return function()
        except NotOnCpu:
            raise
        except Exception as error:
            raise NotOnCpu(f"{type(error).__name__}: {error}{_where(error)}") from error

    def _tpu(self, compiled: bool = False) -> Run:
        if self._device is None:
            self._device = _moved(self._model, "tpu")
        return Run(self._device, self._inputs, "tpu", compiled)

    def _double(self) -> Run:
        """The model in float64 on the CPU, the judge where two float32 results differ."""
        if self._wide is None:
            wide = tree_map(
                lambda t: t.double() if isinstance(t, torch.Tensor) and t.is_floating_point() else t, self._inputs
            )
            self._wide = Run(_moved(self._model, torch.float64), wide, "cpu")
        return self._wide

    def _judged(self, kind: str, call: Callable[[Run], Any], compiled: bool) -> dict[str, Any]:
        expected = self._on_cpu(lambda: call(self._cpu))
        actual = call(self._tpu(compiled))
        floors = names = None
        if isinstance(expected, dict):
            # A compiled graph gives zeros where eager mode gives no gradient.
            actual, expected = _completed(actual, expected), _completed(expected, actual)
            largest = max((float(g.abs().max()) for g in expected.values() if g.numel()), default=0.0)
            floors = [largest * 1e-3] * len(expected)
            names = list(expected)
            expected, actual = [expected[n] for n in names], [actual[n] for n in names]
        error = difference(actual, expected, floors)
        if error <= _TOLERANCE[kind]:
            return {"status": "same", "error": error}
        return self._against_double(call, actual, expected, floors, names, error)

    def _against_double(
        self,
        call: Callable[[Run], Any],
        actual: list[torch.Tensor],
        expected: list[torch.Tensor],
        floors: list[float] | None,
        names: list[str] | None,
        error: float,
    ) -> dict[str, Any]:
        """Whether tpu is as near to float64 as the CPU's float32 is: then the model is what is imprecise."""
        try:
            exact = call(self._double())
            if names is not None:
                exact = [exact[n] if n in exact else torch.zeros_like(e) for n, e in zip(names, expected, strict=True)]
            own, cpu = difference(actual, exact, floors), difference(expected, exact, floors)
        except Exception as problem:
            return {"status": "differs", "error": error, "detail": f"by {error:.1e}; no float64: {problem}"[:300]}
        detail = f"by {error:.1e}; from float64 tpu {own:.1e}, CPU {cpu:.1e}"
        return {
            "status": "same" if own <= 4 * cpu and cpu < _UNRELATED else "differs",
            "error": error,
            "detail": detail,
        }

    def _forward(self, compiled: bool = False) -> dict[str, Any]:
        return self._judged("forward", Run.forward, compiled)

    def _backward(self, compiled: bool = False) -> dict[str, Any]:
        training = True
        try:
            self._cpu.backward(True)
        except NotOnCpu:
            raise
        except Exception:
            training = False
        return self._judged("backward", lambda run: run.backward(training), compiled)

    def _compiled(self) -> dict[str, Any]:
        return self._forward(compiled=True)

    def _compiled_backward(self) -> dict[str, Any]:
        return self._backward(compiled=True)

    def _generate(self) -> dict[str, Any]:
        worst = 0.0
        for length in (making.TOKENS, making.TOKENS - 5):
            expected = self._on_cpu(lambda length=length: self._cpu.generate(length))
            actual = self._tpu().generate(length)
            if not torch.equal(actual[0], expected[0]):
                return _other_tokens(actual, expected)
        return {"status": "same", "error": worst}


def _other_tokens(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> dict[str, Any]:
    """Says where the tokens part; two that were a tie on the CPU are the same."""
    if actual[0].shape != expected[0].shape:
        return {"status": "differs", "detail": f"shape {tuple(actual[0].shape)}, not {tuple(expected[0].shape)}"}
    steps = len(expected) - 1
    columns = (actual[0] != expected[0]).flatten(0, -2).any(0).nonzero()
    first = int(columns[0]) - (expected[0].shape[-1] - steps)
    rows = (actual[0] != expected[0]).any(-1) if actual[0].dim() == 2 else None
    if not 0 <= first < steps or rows is None:
        return {"status": "differs", "detail": "other tokens"}
    scores = expected[1 + first][rows]
    top = scores.topk(2).values
    margin = float((top[:, 0] - top[:, 1]).min() / scores[scores.isfinite()].abs().max())
    detail = f"token {first} of {steps}; the two best differ by {margin:.1e} of the largest score"
    return {"status": "same" if margin < 1e-5 else "differs", "detail": detail}


def run(entry: Entry, checks: list[str], report: Callable[[dict[str, Any]], None]) -> None:
    """Runs the checks of an entry in this process; ``report`` gets a dictionary for each."""
    torch.set_float32_matmul_precision("highest")
    try:
        start = time.perf_counter()
        checker = Checker(entry, report)
        report({"check": "build", "status": "same", "seconds": round(time.perf_counter() - start, 2)})
    except NotOnCpu as error:
        report({"check": "build", "status": "none", "detail": str(error).replace("\n", " ")[:500]})
        return
    except Exception as error:
        text = f"{type(error).__name__}: {error}".replace("\n", " ")[:500] + _where(error)
        report({"check": "build", "status": "none", "detail": text})
        return
    for name in checks:
        checker.check(name)


def write(stream: Any) -> Callable[[dict[str, Any]], None]:
    """A report that goes to a file, a line each."""

    def report(result: dict[str, Any]) -> None:
        stream.write(json.dumps(result) + "\n")
        stream.flush()

    return report
