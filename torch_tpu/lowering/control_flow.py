"""Higher-order operators: control flow as StableHLO regions, and what wraps one operator.

A branch or a body is a graph of its own. Its operators run through the same rules, inside a region; what it takes from
outside are arguments of the operator. Loop-carried values are row-major arrays: strides are not carried.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from torch_tpu.stablehlo import Type, Value
from torch_tpu.stablehlo import ops as hlo
from torch_tpu.stablehlo.builder import current
from torch_tpu.tracing.graph import Interpreter, higher_order
from torch_tpu.tracing.tracer import LoweringError


def _traced(interpreter: Interpreter, value: Value) -> torch.Tensor:
    """A fresh row-major tensor that holds ``value``."""
    t = torch.empty(value.shape, dtype=value.dtype, device="meta")
    interpreter.trace.bind(t, value)
    return t


def _values(interpreter: Interpreter, tensors: Sequence[Any]) -> list[Value]:
    return [interpreter.trace.read(_as_tensor(t)) for t in tensors]


def _as_tensor(x: Any) -> torch.Tensor:
    return x if isinstance(x, torch.Tensor) else torch.tensor(x)


Faults = tuple[tuple[str, str], ...]  # the checks that a region returns the outcome of, after its results
Body = Callable[[Sequence[Value]], Sequence[Value]]


def _region(
    interpreter: Interpreter, types: Sequence[Type], body: Body, faults: Faults = ()
) -> tuple[str, list[Value], Faults]:
    """The text of a region that computes ``body``, what it returns, and all checks in it."""
    with current().region(*types) as (arguments, out), interpreter.trace.inside_region() as found:
        returned = [*body(arguments), *(found.get(f, hlo.constant(False, torch.bool)) for f in faults)]
        current().return_(*returned)
    return out[0], returned, tuple(found)


@higher_order("cond")
def cond(
    interpreter: Interpreter, predicate: Any, true: GraphModule, false: GraphModule, operands: Sequence[Any]
) -> list[torch.Tensor]:
    """``stablehlo.if``: both branches see the operands as they are before it."""
    if not isinstance(predicate, torch.Tensor):
        return interpreter.run(true if predicate else false, operands)
    trace = interpreter.trace
    choice = hlo.reshape(hlo.convert(trace.read(predicate), torch.bool), ())
    values = _values(interpreter, [t for t in operands if isinstance(t, torch.Tensor)])

    def branch(module: GraphModule, faults: Faults = ()) -> tuple[str, list[Value], Faults]:
        def body(_: Sequence[Value]) -> Sequence[Value]:
            given = iter(values)
            inputs = [_traced(interpreter, next(given)) if isinstance(t, torch.Tensor) else t for t in operands]
            return _values(interpreter, interpreter.run(module, inputs))

        return _region(interpreter, [], body, faults)

    branches = [branch(true), branch(false)]
    if faults := tuple(dict.fromkeys(f for _, _, found in branches for f in found)):
        branches = [branch(true, faults), branch(false, faults)]
    (yes, results, _), (no, _, _) = branches
    types = [v.type for v in results]
    outs = ", ".join(map(str, types))
    text = f'"stablehlo.if"({choice.name}) ({yes}, {no}) : ({choice.type}) -> ({outs})'
    made = current().emit(text, *types, pure=False)
    _note(interpreter, faults, made)
    return [_traced(interpreter, v) for v in made[: len(made) - len(faults)]]


def _note(interpreter: Interpreter, faults: Faults, made: Sequence[Value]) -> None:
    """Hands on the outcomes of checks, which are the last of ``made``."""
    for fault, outcome in zip(faults, made[len(made) - len(faults) :], strict=True):
        interpreter.trace.add_fault(fault, outcome)


def loop(
    interpreter: Interpreter, carried: Sequence[Value], condition: Callable[[Sequence[Value]], Value], body: Body
) -> list[Value]:
    """``stablehlo.while`` over values of unchanging types."""
    n = len(carried)
    types = [v.type for v in carried]
    step, results, faults = _region(interpreter, types, body)
    for before, after in zip(types, results, strict=True):
        if before != after.type:
            raise LoweringError(f"a loop-carried value changes from {before} to {after.type}")
    if faults:
        types += [Type((), torch.bool)] * len(faults)

        def checked(given: Sequence[Value]) -> Sequence[Value]:
            with interpreter.trace.inside_region() as found:
                after = body(given[:n])
            so_far = zip(faults, given[n:], strict=True)
            return [*after, *(hlo.or_(bad, found[f]) for f, bad in so_far)]

        step, _, _ = _region(interpreter, types, checked)
    test, _, _ = _region(interpreter, types, lambda given: [condition(given[:n])])
    start = [*carried, *(hlo.constant(False, torch.bool) for _ in faults)]
    spelled = ", ".join(map(str, types))
    names = ", ".join(v.name for v in start)
    text = f'"stablehlo.while"({names}) ({test}, {step}) : ({spelled}) -> ({spelled})'
    made = current().emit(text, *types, pure=False)
    _note(interpreter, faults, made)
    return [*made[:n]]


@higher_order("while_loop")
def while_loop(
    interpreter: Interpreter,
    condition: GraphModule,
    body: GraphModule,
    carried: Sequence[Any],
    additional: Sequence[Any] = (),
) -> list[Any]:
    """PyTorch's ``while_loop``; ``additional`` inputs do not change."""
    extra = _values(interpreter, [t for t in additional if isinstance(t, torch.Tensor)])
    start = _values(interpreter, carried)
    extended = [*start, *extra]
    n = len(start)

    def inputs(given: Sequence[Value]) -> list[Any]:
        tensors = iter([_traced(interpreter, v) for v in given])
        first = [next(tensors) for _ in range(n)]
        return [*first, *(next(tensors) if isinstance(t, torch.Tensor) else t for t in additional)]

    def test(given: Sequence[Value]) -> Value:
        (answer,) = _values(interpreter, interpreter.run(condition, inputs(given)))
        return hlo.reshape(answer, ())

    def step(given: Sequence[Value]) -> list[Value]:
        after = _values(interpreter, interpreter.run(body, inputs(given)))
        return [*(hlo.convert(a, s.dtype) for a, s in zip(after, start, strict=True)), *given[n:]]

    return [_traced(interpreter, v) for v in loop(interpreter, extended, test, step)[:n]]


@higher_order("scan")
def scan(
    interpreter: Interpreter,
    combine: GraphModule,
    init: Sequence[torch.Tensor],
    xs: Sequence[torch.Tensor],
    additional: Sequence[Any] = (),
) -> list[torch.Tensor]:
    """A loop over the first dimension of ``xs``: carries first, then each step's outputs, stacked."""
    start, rows = _values(interpreter, init), _values(interpreter, xs)
    extra = _values(interpreter, [t for t in additional if isinstance(t, torch.Tensor)])
    length = rows[0].shape[0]
    n = len(start)

    def combined(carried: Sequence[Value], each: Sequence[Value], more: Sequence[Value]) -> list[Value]:
        tensors = iter([_traced(interpreter, v) for v in more])
        rest = [next(tensors) if isinstance(t, torch.Tensor) else t for t in additional]
        given = [_traced(interpreter, v) for v in (*carried, *each)]
        return _values(interpreter, interpreter.run(combine, [*given, *rest]))

    kinds: list[Type] = []

    def shapes(given: Sequence[Value]) -> list[Value]:
        out = combined(given[:n], given[n : n + len(rows)], given[n + len(rows) :])
        kinds.extend(v.type for v in out[n:])
        return out

    _region(interpreter, [*(v.type for v in start), *(Type(v.shape[1:], v.dtype) for v in rows),
                          *(v.type for v in extra)], shapes)  # fmt: skip
    stacks = [hlo.constant(0, kind.dtype, (length, *kind.shape)) for kind in kinds]
    index = hlo.constant(0, torch.int32)
    state = [index, *start, *stacks, *rows, *extra]
    first_stack, first_row = 1 + n, 1 + n + len(stacks)

    def step(given: Sequence[Value]) -> list[Value]:
        i = given[0]
        carried, stacked = given[1:first_stack], given[first_stack:first_row]
        whole, more = given[first_row : first_row + len(rows)], given[first_row + len(rows) :]
        out = combined(carried, [_row(x, i) for x in whole], more)
        after = [hlo.convert(a, c.dtype) for a, c in zip(out[:n], carried, strict=True)]
        filled = [_with_row(s, i, y) for s, y in zip(stacked, out[n:], strict=True)]
        return [i + 1, *after, *filled, *whole, *more]

    results = loop(interpreter, state, lambda given: hlo.compare(given[0], length, "LT"), step)
    return [_traced(interpreter, v) for v in results[1:first_row]]


def _starts(rank: int, i: Value) -> list[Value]:
    return [i, *[hlo.constant(0, i.dtype)] * (rank - 1)]


def _row(x: Value, i: Value) -> Value:
    return hlo.reshape(hlo.dynamic_slice(x, _starts(x.ndim, i), [1, *x.shape[1:]]), x.shape[1:])


def _with_row(stack: Value, i: Value, row: Value) -> Value:
    row = hlo.reshape(hlo.convert(row, stack.dtype), (1, *stack.shape[1:]))
    return hlo.dynamic_update_slice(stack, row, _starts(stack.ndim, i))


@higher_order("map_impl")
def map_(
    interpreter: Interpreter, body: GraphModule, xs: Sequence[torch.Tensor], additional: Sequence[Any] = ()
) -> list[torch.Tensor]:
    """A scan that carries nothing."""
    return scan(interpreter, body, [], xs, additional)


@higher_order("invoke_subgraph")
def invoke_subgraph(interpreter: Interpreter, module: GraphModule, _name: str, *operands: Any) -> list[Any]:
    """A subgraph where it is called: XLA finds what is alike."""
    return interpreter.run(module, operands)


@higher_order("with_effects")
def with_effects(interpreter: Interpreter, token: Any, op: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """An operator whose order is kept by a token: here all operators are in order."""
    out = interpreter.execute(op, args, kwargs)
    return (token, *out) if isinstance(out, tuple | list) else (token, out)


@higher_order("out_dtype")
def out_dtype(interpreter: Interpreter, op: Any, dtype: torch.dtype, *args: Any) -> Any:
    """An operator on operands of a wider dtype."""
    wide = [a.to(dtype) if isinstance(a, torch.Tensor) else a for a in args]
    return interpreter.trace.run(op, *wide)


# ---- random numbers that a recompute draws again --------------------------------------------------------------------
@higher_order("run_and_save_rng_state")
def run_and_save_rng_state(interpreter: Interpreter, op: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """An operator, and the generator's state before it: ui64[2]."""
    state = _traced(interpreter, interpreter.trace.random_state(0))
    return state, interpreter.execute(op, args, kwargs)


@higher_order("run_with_rng_state")
def run_with_rng_state(interpreter: Interpreter, state: torch.Tensor, op: Any, *args: Any, **kwargs: Any) -> Any:
    """An operator that draws from a saved state."""
    with interpreter.trace.random_state_from(interpreter.trace.read(state)):
        return interpreter.execute(op, args, kwargs)
