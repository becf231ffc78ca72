"""Around ``torch.compile`` on tpu: what was compiled and why, options, compiling ahead, what a failure says."""

from __future__ import annotations

import itertools
import json
import logging
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torch_tpu
from tests.support import python
from torch_tpu import _C
from torch_tpu.compile.debug import ProgramView
from torch_tpu.lowering.registry import lower
from torch_tpu.stablehlo import Value
from torch_tpu.stablehlo import ops as hlo
from torch_tpu.stablehlo.builder import current
from torch_tpu.tracing.graph import CompileError

HERE = Path(__file__).name


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch.tpu.reset_compile_stats()
    yield


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(4, 8, device="tpu")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 6), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x).relu())


def compiles() -> list[dict[str, Any]]:
    return torch.tpu.compile_stats()["compiles"]


def named(prefix: str) -> list[dict[str, Any]]:
    return [c for c in compiles() if c["op"].startswith(prefix)]


# ---- the debug view -------------------------------------------------------------------------------------------------
def test_show_has_forward_and_backward_with_the_users_lines(x: torch.Tensor) -> None:
    shown = torch_tpu.show(Model().to("tpu"), x)
    assert [p.name.partition(".")[2] for p in shown] == ["forward", "backward"]
    for program in shown:
        operations = [line for line in program.stablehlo.splitlines() if " = " in line and not line.endswith("({")]
        located = re.findall(rf'loc\("aten::\w+(?:\.\w+)?"\(".*{HERE}":\d+:0\)\)$', program.stablehlo, re.MULTILINE)
        assert len(located) >= len(operations) - 2  # the last reshape of an output is nobody's
        _C._compile(program.stablehlo, {})
    assert "float32[4, 8]" in shown[0].inputs and shown.result.shape == (4, 2)


def test_show_has_what_xla_makes_of_it(x: torch.Tensor) -> None:
    shown = torch_tpu.show(lambda x: x.sin() + x.cos(), x)
    assert shown.hlo.startswith("HloModule") and "fusion" in shown[0].hlo
    assert re.search(rf'op_name="aten::sin".* source_file=".*{HERE}"', shown.hlo)


def test_show_prints_each_program_with_its_inputs(x: torch.Tensor) -> None:
    text = str(torch_tpu.show(lambda x: x * 2, x))
    assert re.match(r"// ==== graph_\d+\.inference\(float32\[4, 8\]\), precision \w+ =+\nmodule @program", text)
    assert "def forward" in torch_tpu.show(lambda x: x * 3, x).fx


def test_show_of_a_compiled_function_and_of_one_with_breaks(x: torch.Tensor) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        torch._dynamo.graph_break()
        return y.cos()

    compiled = torch.compile(f)
    compiled(x)
    shown = torch_tpu.show(compiled, x)
    assert ["stablehlo.sine" in p.stablehlo for p in shown] == [True, False]
    assert ["stablehlo.cosine" in p.stablehlo for p in shown] == [False, True]


def test_show_of_sizes_that_change(x: torch.Tensor) -> None:
    compiled = torch.compile(lambda x: x.sum(0), dynamic=True)
    compiled(x)
    compiled(torch.randn(20, 8, device="tpu"))
    shown = torch_tpu.show(compiled, x)
    assert len(shown) == 2 and all("<=" in p.name for p in shown)


def test_a_module_without_lines_of_the_users_is_named_by_its_path(x: torch.Tensor) -> None:
    shown = torch_tpu.show(nn.Sequential(nn.Linear(8, 2)).to("tpu"), x)
    assert 'loc("aten::addmm in Linear 0")' in shown[0].stablehlo


def test_show_of_graphs_from_autograds_cache_has_the_lines(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch, torch_tpu\n"
        "f = torch.compile(lambda x: x.sin().sum())\n"
        "x = torch.ones(3, device='tpu', requires_grad=True)\n"
        "shown = torch_tpu.show(f, x)\n"
        "f(x).backward()\n"  # its program is there then
        "print([c['source'] for c in torch.tpu.compile_stats()['compiles'] if c['op'].startswith('graph')])\n"
        "print([p.stablehlo.count('mine.py') > 0 for p in shown])\n"
    )
    run = f"import runpy; runpy.run_path({str(tmp_path / 'mine.py')!r})"
    first, second = (python(run).stdout.splitlines() for _ in range(2))
    assert first == ["['compiled', 'compiled']", "[True, True]"]
    assert second[0] == "['disk', 'disk']" and "False" not in second[1]


# ---- the structured trace -------------------------------------------------------------------------------------------
def test_the_structured_trace_has_graphs_and_programs(tmp_path: Path) -> None:
    python(
        "import torch; torch.compile(lambda x: x.sin() * 2)(torch.ones(3, device='tpu'))",
        TORCH_TRACE=str(tmp_path),
    )
    records = [json.loads(line[line.index("{") :]) for line in _log(tmp_path) if line[:1] == "V" and "{" in line]
    found = [r["artifact"]["name"] for r in records if "artifact" in r]
    assert found.count("torchtpu_fx_graph") == 1 and found.count("torchtpu_stablehlo_graph") == 1
    text = "\n".join(_log(tmp_path))
    assert "stablehlo.sine" in text and 'loc("aten::sin"' in text


def _log(folder: Path) -> list[str]:
    (file,) = folder.iterdir()
    return file.read_text().splitlines()


# ---- compiling ahead ------------------------------------------------------------------------------------------------
def test_async_compile_leaves_nothing_to_compile() -> None:
    shapes = [torch.randn(n, 8, device="tpu") for n in range(1, 12)]
    compiled = torch_tpu.async_compile(lambda x: x.softmax(0) @ x.t(), [(x,) for x in shapes])
    assert len(named("graph")) == len(shapes)
    torch.tpu.reset_compile_stats()
    for x in shapes:
        torch.testing.assert_close(compiled(x).cpu(), (x.softmax(0) @ x.t()).cpu())
    assert named("graph") == []


def test_async_compile_starts_all_before_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch_tpu.compile import graph

    log: list[str] = []
    start, obtain = graph.Programs._start, graph.Programs.obtain

    def started(self: Any, *args: Any) -> Any:
        log.append("start")
        return start(self, *args)

    def obtained(self: Any, *args: Any) -> Any:
        log.append("obtain")
        return obtain(self, *args)

    monkeypatch.setattr(graph.Programs, "_start", started)
    monkeypatch.setattr(graph.Programs, "obtain", obtained)
    torch_tpu.async_compile(torch.tanh, [torch.randn(n, device="tpu") for n in (2, 3, 4)])
    assert log == ["start"] * 3 + ["obtain"] * 3


def test_async_compile_of_a_training_model_compiles_both_passes(x: torch.Tensor) -> None:
    model = Model().to("tpu")
    compiled = torch.tpu.compiler.async_compile(model, [(x,), {"x": x[:2]}], no_grad=False)
    torch.tpu.reset_compile_stats()
    compiled(x).sum().backward()
    assert named("graph") == [] and model.first.weight.grad is not None


def test_async_compile_names_the_shape() -> None:
    given = [torch.randn(4, 8, device="tpu"), torch.randn(4, 7, device="tpu")]
    with pytest.raises(RuntimeError, match=r"async_compile: the inputs \(float32\[4, 7\]\) cannot be compiled"):
        torch_tpu.async_compile(lambda x: x @ torch.ones(8, 2, device="tpu"), given)


# ---- options --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("backend", [{}, {"backend": "tpu"}])
def test_options_with_and_without_the_backends_name(backend: dict[str, str], x: torch.Tensor) -> None:
    torch.compile(lambda x: x.sin(), options={"name": "mine"}, **backend)(x)
    assert len(named("mine_")) == 1
    torch.compile(lambda x: x.cos(), options={"custom_module_name": "yours"}, **backend)(x)
    assert len(named("yours_")) == 1


def test_functions_with_other_options_are_compiled_anew(x: torch.Tensor) -> None:
    for name in ("one", "two"):
        torch.compile(torch.sin, options={"name": name})(x)
    assert len(named("one_")) == len(named("two_")) == 1


def test_unknown_options_are_refused_with_the_known_ones(x: torch.Tensor) -> None:
    with pytest.raises(RuntimeError, match="Unexpected optimization option colour.* For graphs on tpu .*bucket_size"):
        torch.compile(torch.sin, options={"colour": "red"})
    with pytest.raises(Exception, match="Unknown option 'colour' of the tpu backend; its options are .*bucket_size"):
        torch.compile(torch.sin, backend="tpu", options={"colour": "red"})(x)


@pytest.mark.parametrize("option", [{"num_dynamic_buckets": 9}, {"bucket_size": 0}, {"fallback": "cpu"}, {"name": 3},
                                    {"serializable": 1}, {"debug_callback": 3}, {"async_compile": None}])  # fmt: skip
def test_options_of_wrong_values_are_refused(option: dict[str, Any], x: torch.Tensor) -> None:
    with pytest.raises(Exception, match=f"The option '{next(iter(option))}' must be"):
        torch.compile(torch.sin, options=option)(x)


def test_what_has_no_effect_on_tpu_warns(x: torch.Tensor) -> None:
    with pytest.warns(UserWarning, match="Inductor's options max_autotune have no effect on tpu"):
        torch.compile(lambda x: x.sin(), options={"max_autotune": True, "name": "a"})(x)
    with pytest.warns(UserWarning, match="mode='max-autotune' has no effect on tpu"):
        torch.compile(lambda x: x.cos(), mode="max-autotune")(x)


def test_bounds_are_multiples_of_the_bucket_size(x: torch.Tensor) -> None:
    torch.compile(lambda x: x.sum(0), dynamic=True, options={"bucket_size": 6})(x)
    assert "<=6" in named("graph")[0]["op"]


def test_a_range_is_divided_into_buckets() -> None:
    f = torch.compile(lambda x: x.sum(0), options={"num_dynamic_buckets": 4})
    for n in (9, 20, 31, 5, 3):  # 5 rows fit well enough into 16
        x = torch.randn(n, 3, device="tpu")
        torch._dynamo.mark_dynamic(x, 0, min=2, max=32)
        torch.testing.assert_close(f(x).cpu(), x.sum(0).cpu())
    assert [c["op"].partition("<=")[2] for c in named("graph")] == ["16]", "24]", "32]", "8]"]


def test_the_debug_callback_gets_each_program(x: torch.Tensor) -> None:
    seen: list[ProgramView] = []
    compiled = torch.compile(Model().to("tpu"), options={"debug_callback": seen.append})
    compiled(x).sum().backward()
    assert [p.name.partition(".")[2] for p in seen] == ["forward", "backward"]
    assert "stablehlo.dot_general" in seen[0].stablehlo


def test_programs_that_are_not_serializable_are_not_stored(x: torch.Tensor) -> None:
    for number in range(2):
        torch._dynamo.reset()
        torch.compile(lambda x: x.sin() * 0.123, options={"serializable": False})(x)
        assert [c["source"] for c in named("graph")] == ["compiled"] * (number + 1)


def test_without_async_compile_xlas_errors_are_raised_while_compiling(x: torch.Tensor) -> None:
    broken = _operator(lambda x: _mistyped(x))
    with pytest.raises(Exception, match="XLA cannot compile") as raised:
        torch.compile(lambda x: broken(x), backend="tpu", options={"async_compile": False})(x)
    assert type(raised.value).__name__ == "BackendCompilerFailed"


# ---- XLA's options --------------------------------------------------------------------------------------------------
def test_compiler_options_are_scoped_and_nested(x: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch_tpu.programs import options

    used = []
    original = _C._compile
    monkeypatch.setattr(
        options._C, "_compile", lambda text, flags, **k: used.append(flags) or original(text, flags, **k)
    )
    f = torch.compile(lambda x: x.sin() * 0.456)
    custom = torch.tpu.compiler.custom_compiler_options
    f(x)
    with custom({"xla_cpu_enable_fast_math": True, "xla_backend_optimization_level": 1}):
        f(x)
        with custom({"xla_backend_optimization_level": 2}):
            f(x)
        f(x)
    f(x)
    levels = [u.get("xla_backend_optimization_level") for u in used]
    assert levels == [None, 1, 2] and [u.get("xla_cpu_enable_fast_math") for u in used] == [None, True, True]
    assert named("graph")[1]["reason"].startswith("compiler options: ")


def test_compiler_options_reach_the_backward_pass(x: torch.Tensor) -> None:
    f = torch.compile(lambda x: x.sin().sum())
    with torch.tpu.compiler.custom_compiler_options({"xla_backend_optimization_level": 1}):
        f(x.clone().requires_grad_()).backward()
        assert len(named("graph")) == 2
    f(x.clone().requires_grad_()).backward()
    assert len(named("graph")) == 4


def test_compiler_options_that_xla_does_not_have_are_refused(x: torch.Tensor) -> None:
    with torch.tpu.compiler.custom_compiler_options({"xla_no_such_thing": True}):
        with pytest.raises(ValueError, match="'xla_no_such_thing' is not known to this plugin"):
            torch.compile(lambda x: x.sin())(x)
    with pytest.raises(TypeError, match="must be a bool, int, float or str"):
        with torch.tpu.compiler.custom_compiler_options({"xla_backend_optimization_level": None}):
            pass


def test_compiler_options_cannot_change_inside(x: torch.Tensor) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        with torch.tpu.compiler.custom_compiler_options({}):
            return x + 1

    with pytest.raises(Exception, match="(?s)cannot change inside|custom_compiler_options"):
        torch.compile(f, fullgraph=True)(x)


# ---- failures -------------------------------------------------------------------------------------------------------
_numbers = itertools.count()
_library = torch.library.Library("torch_tpu_surface", "FRAGMENT")


def _operator(rule: Callable[[Value], Value] | None) -> Any:
    """A fresh operator of one tensor; None: without a rule."""
    name = f"op{next(_numbers)}"
    _library.define(f"{name}(Tensor x) -> Tensor")
    _library.impl(name, lambda x: torch.empty_like(x), "Meta")
    if rule is not None:
        lower(f"torch_tpu_surface::{name}")(lambda x: rule(x))
    return getattr(torch.ops.torch_tpu_surface, name).default


def _refuses(x: Value) -> Value:
    raise ValueError("this rule always fails")


def _mistyped(x: Value) -> Value:
    return current().op("add", [x, hlo.constant(1, torch.int32, x.shape)], x.type)


def _unknown_call(x: Value) -> Value:
    return current().op("custom_call", [x], x.type, 'call_target_name = "nowhere", api_version = 1 : i32', pure=False)


RULES: dict[str, tuple[Callable[[Value], Value] | None, str]] = {
    "no rule": (None, "has no lowering rule"),
    "rule's error": (_refuses, "this rule always fails"),
    "text refused": (_mistyped, "XLA cannot compile .*same element type"),
    "program refused": (_unknown_call, "XLA cannot compile .*custom call to nowhere"),
}


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, op: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        ctx.op = op
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.op(g), None


def _forward(op: Any, x: torch.Tensor) -> None:
    torch.compile(lambda x: op(x.sin()).cos())(x)


def _dynamic(op: Any, x: torch.Tensor) -> None:
    torch.compile(lambda x: op(x.sin()).cos(), dynamic=True)(x)


def _branch(op: Any, x: torch.Tensor) -> None:
    with torch.no_grad():
        torch.compile(lambda x: torch.cond(x.sum() > 0, lambda x: op(x) + 1, lambda x: x.cos(), (x,)))(x)


def _backward(op: Any, x: torch.Tensor) -> None:
    torch.compile(lambda x: _Backward.apply(x.sin(), op).sum())(x.clone().requires_grad_()).backward()


@pytest.mark.parametrize("where", [_forward, _dynamic, _branch, _backward])
@pytest.mark.parametrize("what", RULES)
def test_a_failure_names_the_operator_and_the_line(what: str, where: Callable[..., None], x: torch.Tensor) -> None:
    rule, text = RULES[what]
    op = _operator(rule)
    with pytest.raises(Exception, match=f"(?s){text}") as raised:
        where(op, x)
    searched = what == "program refused" and where is _branch  # found by compiling parts: the branch as a whole
    name = "cond" if searched else op.name()
    assert re.search(rf"{name}\S* \(\S*{HERE}:\d+\)", str(raised.value)), str(raised.value)
    causes = [raised.value, raised.value.__cause__, raised.value.__context__]
    assert any(isinstance(c, CompileError) or "CompileError" in str(c) for c in causes)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("what", ["rule's error", "text refused"])
def test_the_eager_fallback_runs_operator_by_operator_with_one_warning(
    what: str, dynamic: bool, x: torch.Tensor
) -> None:
    op = _operator(RULES[what][0])
    _library.impl(op.name().partition("::")[2], lambda x: x * 3, "PrivateUse1")
    f = torch.compile(lambda x: op(x.sin()) + 1, options={"fallback": "eager"}, dynamic=dynamic)
    with pytest.warns(UserWarning, match=rf"(?s)operator by operator, because of: .*{op.name()} .*{HERE}:\d+"):
        first = f(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second = f(x)
    for got in (first, second):
        torch.testing.assert_close(got.cpu(), (x.sin() * 3 + 1).cpu())


@pytest.mark.parametrize("what", ["rule's error", "text refused"])
def test_a_backward_pass_falls_back_too(what: str, x: torch.Tensor) -> None:
    op = _operator(RULES[what][0])
    _library.impl(op.name().partition("::")[2], lambda x: x * 3, "PrivateUse1")
    leaf = x.clone().requires_grad_()
    with pytest.warns(UserWarning, match=f"(?s)operator by operator.*{op.name()}"):
        f = torch.compile(lambda x: _Backward.apply(x.sin(), op).sum(), options={"fallback": "eager"})
        f(leaf).backward()
    torch.testing.assert_close(leaf.grad.cpu(), (3 * x.cos()).cpu())


def test_without_the_fallback_nothing_runs_eagerly(x: torch.Tensor) -> None:
    op = _operator(_refuses)
    with pytest.raises(Exception, match="this rule always fails"):
        torch.compile(lambda x: op(x), options={"fallback": "raise"})(x)


# ---- why it was compiled --------------------------------------------------------------------------------------------
def reasons() -> list[str]:
    return [c["reason"] for c in named("graph")]


def test_reasons_say_what_differs(x: torch.Tensor) -> None:
    f = torch.compile(lambda x: x.exp(), dynamic=False)
    for t in (x, torch.randn(2, 8, device="tpu"), x.double()):
        f(t)
    first, second, third = reasons()
    assert first == "first call of the function"
    assert second == "argument 0 sizes: (4, 8) became (2, 8)"
    assert third.startswith("argument 0 dtype: torch.float32 became torch.float64")


def test_reasons_name_bounds(x: torch.Tensor) -> None:
    f = torch.compile(lambda x: x.exp())
    for n in (4, 5, 40):
        f(torch.randn(n, 8, device="tpu"))
    first, second, third = reasons()
    assert first == "first call of the function"
    assert re.fullmatch(r"bound of s\d+: 8 is new", second)
    assert re.fullmatch(r"bound of s\d+: 8 became 64", third)


def test_reasons_name_the_precision(x: torch.Tensor) -> None:
    f = torch.compile(lambda x: x @ x.t())
    for level in (torch.tpu.Precision.HIGHEST, torch.tpu.Precision.DEFAULT):
        with torch.tpu.precision(level):
            f(x)
    assert reasons()[1] == "precision: highest became medium"


def test_a_graph_without_bounds_says_why(x: torch.Tensor, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="torch_tpu"):
        torch.compile(lambda x: x.sort(0).values, dynamic=True)(x)
    assert "is compiled for each size: aten.sort" in caplog.text
