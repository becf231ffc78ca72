"""Fused eager mode's Python half: several recorded operators become one module.

Each distinct plan is a private function of the module, and ``@main`` calls them in order. C++ (``csrc/eager/fuse.h``)
says which operand comes from where, which results somebody waits for, and which operands give their memory away.
"""

from __future__ import annotations

import collections
import functools
import logging
import os
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torch_tpu import _C, platform
from torch_tpu.programs import disk, options, stats
from torch_tpu.stablehlo import Type
from torch_tpu.stablehlo.types import ELEMENT_TYPE
from torch_tpu.tracing.program import Plan

log = logging.getLogger("torch_tpu")

_LEAF, _NODE, _NUMBER = 0, 1, 2  # csrc/eager/graph.h: Source::Kind
Source = tuple[int, int, int]
Node = tuple[int, list[Source]]

_FUSED_MODE = 2  # csrc/eager/kernel.h: Mode

_ALIASING = re.compile(r" \{tf\.aliasing_output = \d+ : i32\}")
_DEFINITION = re.compile(r'    (%\w+)(?::\d+)? = "?(?:stablehlo\.)?([\w.]+)"?(.*)')
#: Operations that hand the elements of their operands on.
_CARRIES = frozenset(
    "reshape transpose broadcast_in_dim slice dynamic_slice dynamic_update_slice concatenate select pad reverse gather "
    "negate convert".split()
)
#: Of the dtypes that some processor multiplies and adds in one operation.
_BITS = {torch.float16: torch.int16, torch.float32: torch.int32, torch.float64: torch.int64}


# ---- one operator ---------------------------------------------------------------------------------------------------
@dataclass
class Part:
    """A plan as a private function."""

    plan: Plan
    text: str  # of the function and those that it calls
    arguments: list[str]  # their types
    uses: list[int]  # how often the function names each of them
    products: list[bool]  # results that a multiplication gave

    @classmethod
    def of(cls, plan: Plan, name: str) -> Part:
        body = plan.text[plan.text.index("{\n") + 2 : plan.text.rindex("}")].rstrip("\n")
        body = _ALIASING.sub("", body).replace("func.func public @main(", f"func.func private @{name}(", 1)
        for inner in re.findall(r"func\.func private @([\w.]+)\(", body):
            if inner != name:
                body = re.sub(rf"@{re.escape(inner)}\b", f"@{name}_{inner}", body)
        header = body[body.index("(") + 1 : body.index(") -> (")]
        arguments = [a.partition(": ")[2] for a in header.split(", %")] if header else []
        used = collections.Counter(re.findall(r"%arg\d+\b", body.partition(") -> (")[2]))
        return cls(plan, body, arguments, [used[f"%arg{i}"] for i in range(len(arguments))], _products(body))


def _products(body: str) -> list[bool]:
    """For each result of a function: whether its elements are products as they are."""
    made: dict[str, bool] = {}
    for line in body.split("\n"):
        if line.startswith("    return"):
            names, _, _ = line.removeprefix("    return").partition(" : ")
            return [made.get(n.partition("#")[0].strip(), False) for n in names.split(",") if n.strip()]
        if (found := _DEFINITION.match(line)) is not None:
            name, operation, rest = found.groups()
            operands = re.findall(r"%\w+", rest.partition(" : ")[0])
            made[name] = operation == "multiply" or (
                operation in _CARRIES and any(made.get(o, False) for o in operands)
            )
    raise ValueError("the function has no return")


# ---- the module -----------------------------------------------------------------------------------------------------
class _Numbers:
    """The numbers of all nodes, packed by element type; ``Numbers`` in csrc/eager/fuse.h packs in the same order."""

    def __init__(self, plans: list[Plan], nodes: list[Node]) -> None:
        self.counts: dict[str, int] = {}  # by argument
        self.types: dict[str, str] = {}  # element types
        self._at: list[list[tuple[str, int] | None]] = []
        for place, sources in nodes:
            row: list[tuple[str, int] | None] = []
            for (kind, _, _), operand in zip(sources, plans[place].operands, strict=True):
                if kind != _NUMBER:
                    row.append(None)
                    continue
                element = "ui64" if operand.kind == "rng" else ELEMENT_TYPE[operand.dtype]
                label = "random" if operand.kind == "rng" else element
                argument = "%numbers_" + re.sub(r"\W", "_", label)
                self.types[argument] = element
                start = self.counts.get(argument, 0)
                self.counts[argument] = start + (2 if operand.kind == "rng" else 1)
                row.append((argument, start))
            self._at.append(row)

    def arguments(self) -> list[str]:
        return [f"{name}: {self._type(name)}" for name in self.counts]

    def _type(self, name: str) -> str:
        return f"tensor<{self.counts[name]}x{self.types[name]}>"

    def read(self, node: int, operand: int, name: str, lines: list[str]) -> None:
        """Emits the operand's value as ``name``."""
        found = self._at[node][operand]
        assert found is not None
        argument, start = found
        size, element = 2 if argument == "%numbers_random" else 1, self.types[argument]
        part = name if size == 2 else f"{name}_at"
        lines.append(
            f"    {part} = stablehlo.slice {argument} [{start}:{start + size}] : ({self._type(argument)}) -> "
            f"tensor<{size}x{element}>"
        )
        if size == 1:
            lines.append(f"    {name} = stablehlo.reshape {part} : (tensor<1x{element}>) -> tensor<{element}>")


#: Elements from which it matters whether a value is computed once or by each of its users.
SHARED_ELEMENTS = 1 << 12


def _hand_on(name: str, value: str, of: Type, product: bool, uses: int, lines: list[str]) -> None:
    """Emits a floating ``value`` again as ``name``, so that what follows cannot change its bits, nor compute it twice.

    XLA rearranges what it sees: ``(x + 1) + 1`` becomes ``x + 2``, ``log(exp(x))`` becomes ``x``. A barrier hides that.
    Its CPU backend drops the barrier before it fuses. Then it contracts a multiplication and the addition of its
    product to one operation with one rounding, where the operators' own programs round twice: an "or" with a zero that
    the compiler does not know keeps them apart. And it computes what it thinks cheap in each of its users again, chains
    of any length: a division is not cheap, and one by 1.0 changes nothing.
    """
    if of.dtype.is_floating_point and uses > 1 and of.numel >= SHARED_ELEMENTS:
        element = ELEMENT_TYPE[of.dtype]
        lines += [
            f"    {name}_unit = stablehlo.convert %one : (tensor<f32>) -> tensor<{element}>",
            f"    {name}_one = stablehlo.broadcast_in_dim {name}_unit, dims = [] : (tensor<{element}>) -> {of}",
            f"    {name} = stablehlo.divide {value}, {name}_one : {of}",
        ]
    elif product and of.dtype in _BITS:
        bits = Type(of.shape, _BITS[of.dtype])
        element = ELEMENT_TYPE[bits.dtype]
        lines += [
            f"    {name}_bits = stablehlo.bitcast_convert {value} : ({of}) -> {bits}",
            f"    {name}_nil = stablehlo.convert %zero : (tensor<i32>) -> tensor<{element}>",
            f"    {name}_zero = stablehlo.broadcast_in_dim {name}_nil, dims = [] : (tensor<{element}>) -> {bits}",
            f"    {name}_same = stablehlo.or {name}_bits, {name}_zero : {bits}",
            f"    {name} = stablehlo.bitcast_convert {name}_same : ({bits}) -> {of}",
        ]
    else:
        lines.append(f"    {name} = stablehlo.optimization_barrier {value} : {of}")


def compose(plans: list[Plan], nodes: list[Node], live: list[tuple[int, int]], donations: list[tuple[int, int]]) -> str:
    """The text of the module.

    Its arguments are the leaves, the packed numbers, and a zero and a one that the compiler does not know.
    """
    contracts = largest_array(plans) > options.TINY_ELEMENTS  # smaller ones are compiled without optimisation
    parts = [Part.of(plan, f"op_{i}") for i, plan in enumerate(plans)]
    numbers = _Numbers(plans, nodes)
    leaves: dict[int, str] = {}
    uses = collections.Counter(live)
    for place, sources in nodes:
        for (kind, index, output), count in zip(sources, parts[place].uses, strict=True):
            if kind == _NODE:
                uses[index, output] += count
    emulated = platform.kind() == "cpu"
    lines: list[str] = []
    results: list[list[str]] = []  # per node and output: as the program returns it
    operands: list[list[str]] = []  # as later nodes read it
    for i, (place, sources) in enumerate(nodes):
        part = parts[place]
        names = []
        for j, ((kind, index, output), type_) in enumerate(zip(sources, part.arguments, strict=True)):
            if kind == _LEAF:
                leaves[index] = type_
                names.append(f"%leaf{index}")
            elif kind == _NODE:
                names.append(operands[index][output])
            else:
                names.append(f"%n{i}_{j}")
                numbers.read(i, j, names[-1], lines)
        outputs = part.plan.outputs
        count = len(outputs)
        types = ", ".join(str(o.type) for o in outputs)
        name = f"%v{i}"
        lines.append(
            f"    {name}{f':{count}' if count > 1 else ''} = func.call @op_{place}({', '.join(names)}) : "
            f"({', '.join(part.arguments)}) -> ({types})"
        )
        results.append([f"{name}#{o}" if count > 1 else name for o in range(count)])
        operands.append(list(results[-1]))
        for o, out in enumerate(outputs):
            if (
                not emulated
                or uses[i, o] == ((i, o) in live)
                or not (out.type.dtype.is_floating_point or out.type.dtype.is_complex)
            ):
                continue
            operands[-1][o] = f"%g{i}_{o}"
            _hand_on(operands[-1][o], results[-1][o], out.type, contracts and part.products[o], uses[i, o], lines)
    aliases = dict(donations)
    arguments = [
        f"%leaf{i}: {leaves[i]}" + (f" {{tf.aliasing_output = {aliases[i]} : i32}}" if i in aliases else "")
        for i in range(len(leaves))
    ]
    arguments += [*numbers.arguments(), "%zero: tensor<i32>", "%one: tensor<f32>"]
    returned = [results[n][o] for n, o in live]
    types = ", ".join(str(plans[nodes[n][0]].outputs[o].type) for n, o in live)
    body = "\n".join([*lines, f"    return {', '.join(returned)} : {types}"])
    functions = "\n".join(part.text for part in parts)
    return (
        f"module @fused {{\n  func.func public @main({', '.join(arguments)}) -> ({types}) {{\n{body}\n  }}\n"
        f"{functions}\n}}\n"
    )


def largest_array(plans: list[Plan]) -> int:
    """Elements of the largest array that goes into a plan or comes out of one."""
    return max(max(p.largest_operand, *(o.type.numel for o in p.outputs)) for p in plans)


# ---- compiling ------------------------------------------------------------------------------------------------------
_seen: dict[tuple[str, ...], list[Any]] = {}  # operators -> graphs of them


def _reason(plans: list[Plan], nodes: list[Node], live: Any, donations: Any) -> str:
    """Why a graph needed a program: how it differs from the graphs of the same operators before."""
    names = tuple(plans[place].name for place, _ in nodes)
    graph = ([plans[place].text for place, _ in nodes], [s for _, s in nodes], live, donations)
    earlier = _seen.setdefault(names, [])
    if len(_seen) > 1000:
        _seen.clear()
    what = ("other shapes or dtypes", "operands from elsewhere", "other results that are needed", "other donations")
    nearest = max(earlier, key=lambda e: sum(x == y for x, y in zip(graph, e, strict=True)), default=None)
    earlier.append(graph)
    del earlier[:-8]
    if nearest is None:
        shown = ", ".join(n.removeprefix("aten::") for n in names[:6]) + (", ..." if len(names) > 6 else "")
        return f"first graph of {len(names)} operators: {shown}"
    differences = [w for w, x, y in zip(what, graph, nearest, strict=True) if x != y]
    return f"graph of {len(names)} operators: {', '.join(differences) or 'evicted from the memory table'}"


def compile_graph(
    described: list[bytes], nodes: list[Node], live: list[tuple[int, int]], donations: list[tuple[int, int]]
) -> Any:
    """The executable of a graph, from the disk cache or compiled; None if the plugin does not take it."""
    start = time.perf_counter()
    plans = [disk.unpack_plan(d[64:]) for d in described]
    why = _reason(plans, nodes, live, donations)
    text = compose(plans, nodes, live, donations)
    key = disk.key_of_module(text)
    composed = time.perf_counter()
    if (entry := disk.load(key)) is not None and entry[1] is not None:
        stats.record("fused", "disk", composed - start, time.perf_counter() - composed, why)
        return entry[1]
    largest = largest_array(plans)
    reload = platform.kind() == "cpu" and largest <= options.LARGE_ELEMENTS
    try:
        executable = options.compile_text(text, options.fused_flags(largest), reload)
    except _C.PjrtError as error:
        log.warning(
            "torch_tpu: %d operators could not be compiled as one program and run one by one: %s", len(nodes), error
        )
        return None
    stats.record("fused", "compiled", composed - start, time.perf_counter() - composed, why)
    disk.store(key, Plan("fused", "", [], [], []), executable)
    return executable


# ---- where graphs end -----------------------------------------------------------------------------------------------
@functools.cache
def install() -> None:
    """Makes an optimizer's step the end of a graph: the device begins, and each iteration is the same graph."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    register_optimizer_step_post_hook(_after_step)


def _after_step(*_: Any) -> None:
    if _C._mode() == _FUSED_MODE:
        _C._flush()


# ---- the user's line ------------------------------------------------------------------------------------------------
_INTERNAL = (str(Path(torch.__file__).parent) + os.sep, str(Path(__file__).parents[1]) + os.sep)


def user_line() -> str:
    """Where the user's program is: its innermost frame outside of PyTorch."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith(_INTERNAL):
            return f'File "{code.co_filename}", line {frame.f_lineno}, in {code.co_name}'
        frame = frame.f_back  # type: ignore[assignment]
    return "in a backward pass"
