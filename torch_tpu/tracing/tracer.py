"""Runs PyTorch operators on meta tensors and records what they mean as StableHLO.

A traced tensor is a plain meta tensor. Its storage has a :class:`TraceCell` here, as a device tensor's storage has a
cell in the runtime: the current base array as a value. View operators run on the meta tensors alone; reading a window
rebuilds it from the base; writing one computes the new base. So decompositions may use views, in-place operators and
``out=`` freely, and everything in one trace becomes one program.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch._prims_common import elementwise_dtypes
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from torch_tpu.lowering import view
from torch_tpu.lowering.registry import Promotion, Rule
from torch_tpu.stablehlo import Function, Type, Value
from torch_tpu.stablehlo import ops as hlo
from torch_tpu.tracing.schema import OpInfo, op_info

Geometry = tuple[tuple[int, ...], tuple[int, ...], int, torch.dtype]

_local = threading.local()


class LoweringError(RuntimeError):
    """A rule and PyTorch's meta kernel disagree: a bug in the rule, never the user's."""


def tracer() -> Tracer:
    """The trace that is running on this thread; rules use it for random bits, precision and index checks."""
    return _local.stack[-1]


def is_tracing() -> bool:
    """Whether a trace is running on this thread."""
    return bool(getattr(_local, "stack", None))


class ScalarOperand:
    """A run-time number: a Scalar or float argument whose value is not part of the program."""

    def __init__(self, trace: Tracer, index: int, sample: Any) -> None:
        self.index = index
        self.sample = sample
        self._trace = trace

    def to(self, dtype: torch.dtype) -> Value:
        """The number as a 0-d value of ``dtype``, converted on the host; to a dtype of eight bits on the device."""
        if dtype.itemsize == 1 and dtype.is_floating_point:
            return hlo.convert(self.to(torch.float32), dtype)
        return self._trace.operand("scalar", self.index, (), dtype)


class ListedScalar(ScalarOperand):
    """One number of a list of run-time numbers, which is one packed operand of the widest kind in the list."""

    def __init__(self, trace: Tracer, index: int, values: Sequence[Any], position: int) -> None:
        super().__init__(trace, index, values[position])
        self.position = position
        self.count = len(values)
        kinds = {type(v) for v in values}
        self.dtype = torch.complex128 if complex in kinds else torch.float64 if float in kinds else torch.int64

    def to(self, dtype: torch.dtype) -> Value:
        """The number as a 0-d value of ``dtype``, converted on the device."""
        packed = hlo.convert(self._trace.operand("scalars", self.index, (self.count,), self.dtype), dtype)
        return hlo.reshape(hlo.slice_dim(packed, 0, self.position, self.position + 1), ())


class TraceCell:
    """The storage of a traced tensor: its base array, and windows already read."""

    def __init__(self, load: Callable[[], Value] | None = None) -> None:
        self.base: Value | None = None
        self.load = load
        self.windows: dict[Geometry, Value] = {}
        self.full: Geometry | None = None  # a window in `windows` that covers the storage
        self.written = False


def _lazy_bits(t: torch.Tensor, value: Value) -> Value:
    """The memory of ``t`` as ``t`` means it, or back: conjugate and negative views are lazy in PyTorch."""
    if t.is_conj():
        value = hlo.complex_(hlo.real(value), hlo.negate(hlo.imag(value)))
    return hlo.negate(value) if t.is_neg() else value


def _advanced(state: Value, blocks: int) -> Value:
    return state + hlo.constant_list([0, blocks], torch.uint64)


def geometry(t: torch.Tensor) -> Geometry:
    return tuple(t.shape), tuple(t.stride()), int(t.storage_offset()), t.dtype


class Tracer:
    """One program under construction.

    Args:
        precision: Of float32 matrix products: ``medium``, ``high`` or ``highest``.
        emulate_precision: Reproduce the TPU's passes with ``reduce_precision`` (XLA on CPU ignores the attribute).
    """

    def __init__(self, precision: str = "highest", emulate_precision: bool = True) -> None:
        self.function = Function()
        self._precision = precision
        self.uses_precision = False
        self.emulate_precision = emulate_precision
        self.operands: dict[tuple[str, int, torch.dtype], Value] = {}
        self.rng_used = 0
        self._given_state: Value | None = None
        self._regions = 0
        self.faults: dict[tuple[str, str], Value] = {}  # (exception, text): whether it is so
        self.op_names: list[str] = []
        self.origin = ""  # which operator of a graph is traced, for the texts of checks
        self._cells: dict[int, TraceCell] = {}
        self._alive: list[Any] = []
        self._mode = _TracingMode(self)

    @property
    def precision(self) -> str:
        """The float32 precision; a program that asks depends on it."""
        self.uses_precision = True
        return self._precision

    @contextlib.contextmanager
    def scoped_precision(self, level: str | None) -> Iterator[None]:
        """What is traced meanwhile has another precision; None: the same."""
        previous, self._precision = self._precision, level or self._precision
        try:
            yield
        finally:
            self._precision = previous

    # ---- operands
    # -----------------------------------------------------------------------------------------------------
    def operand(self, kind: str, index: int, shape: Sequence[int], dtype: torch.dtype) -> Value:
        """The program argument for run-time quantity ``index`` of ``kind``, as ``dtype``; created on first use."""
        key = (kind, index, dtype)
        if key not in self.operands:
            self.operands[key] = self.function.argument(tuple(shape), dtype)
        return self.operands[key]

    def random_state(self, blocks: int) -> Value:
        """The generator's state, ui64[2] = (seed, offset), at a draw that uses ``blocks`` blocks of 128 bits.

        XLA spreads the seed over Philox's key and the high word of its counter, and counts blocks upwards from the
        offset: the bits of a draw depend on its seed and offset alone, and draws that reserve their blocks do not
        overlap.
        """
        if self._given_state is not None:
            state, self._given_state = self._given_state, _advanced(self._given_state, blocks)
            return state
        if self._regions:
            raise NotImplementedError("random numbers inside of a branch or a loop of a compiled function")
        state = self.operand("rng", 0, (2,), torch.uint64)
        if self.rng_used:
            state = _advanced(state, self.rng_used)
        self.rng_used += blocks
        return state

    @contextlib.contextmanager
    def inside_region(self) -> Iterator[dict[tuple[str, str], Value]]:
        """What is traced meanwhile is in a region of the program: values made there are not known outside of it.

        Yields the region's own checks, which it must return.
        """
        before = {key: (c.base, c.load, c.full, dict(c.windows)) for key, c in self._cells.items()}
        faults, self.faults = self.faults, {}
        self._regions += 1
        try:
            yield self.faults
        finally:
            self._regions -= 1
            self.faults = faults
            for key, state in before.items():
                cell = self._cells[key]
                cell.base, cell.load, cell.full, cell.windows = state

    @contextlib.contextmanager
    def random_state_from(self, state: Value) -> Iterator[None]:
        """Draws start at ``state``, ui64[2], and leave the generator's alone."""
        previous, self._given_state = self._given_state, state
        try:
            yield
        finally:
            self._given_state = previous

    def random_bits(self, shape: Sequence[int], dtype: torch.dtype) -> Value:
        """Uniform bits (Philox 4x32, Salmon et al. 2011). ``dtype`` is uint32 or uint64: XLA spends 32 bits on less."""
        if 0 in shape:
            return hlo.constant(0, dtype, tuple(shape))
        state = self.random_state(-(-math.prod(shape) * dtype.itemsize // 16))
        return hlo.rng_bit_generator(state, tuple(shape), dtype)[1]

    def check(self, bad: Value, text: str, error: type[Exception] = RuntimeError) -> None:
        """Raises ``error`` with ``text`` at the next synchronisation if any element of ``bad``, bool, is true.

        ``error`` is RuntimeError or IndexError. The operator's name is added to the text.
        """
        any_bad = hlo.reduce_one(bad, False, range(bad.ndim), hlo.or_) if bad.ndim else bad
        self.add_fault((error.__name__, text + self.origin), any_bad)

    def add_fault(self, key: tuple[str, str], any_bad: Value) -> None:
        """A check, by exception and text, whose outcome is known: a 0-d bool."""
        self.faults[key] = hlo.or_(self.faults[key], any_bad) if key in self.faults else any_bad

    # ---- cells
    # --------------------------------------------------------------------------------------------------------
    def cell(self, t: torch.Tensor) -> TraceCell:
        key = t.untyped_storage()._cdata
        if key not in self._cells:
            self._cells[key] = TraceCell()
            self._alive.append(t.untyped_storage())
        return self._cells[key]

    def has_cell(self, t: torch.Tensor) -> bool:
        return t.untyped_storage()._cdata in self._cells

    def bind(self, t: torch.Tensor, value: Value) -> None:
        """Makes ``value`` the contents of a fresh tensor."""
        if value.shape != tuple(t.shape) or value.dtype != t.dtype:
            raise LoweringError(f"expected {Type(tuple(t.shape), t.dtype)}, the rule gave {value.type}")
        self._store(self.cell(t), t, _lazy_bits(t, value))

    def forget(self, t: torch.Tensor) -> None:
        """Leaves nothing in the storage of ``t``, which got another size."""
        self._cells[t.untyped_storage()._cdata] = TraceCell()

    def bind_lazy(self, t: torch.Tensor, load: Callable[[], Value]) -> None:
        """As :meth:`bind`, with a value that is only computed when somebody reads it."""
        cell = self.cell(t)
        cell.load, cell.full = load, geometry(t)

    def read(self, t: torch.Tensor) -> Value:
        """The contents of a traced tensor as a row-major value."""
        return self._embed(t) if t.device.type != "meta" else _lazy_bits(t, self.memory(t))

    def memory(self, t: torch.Tensor) -> Value:
        """What lies in a traced tensor's memory: its contents, but for lazy conjugation and negation."""
        cell, key = self.cell(t), geometry(t)
        if cell.load is not None and cell.full is not None and cell.full not in cell.windows:
            cell.windows[cell.full] = cell.load()
        if key not in cell.windows:
            sizes, strides, offset, dtype = key
            cell.windows[key] = view.read_view(self._base(cell, t), sizes, strides, offset, dtype)
        return cell.windows[key]

    def write(self, t: torch.Tensor, value: Value) -> None:
        """``t`` = ``value``, seen by every alias. ``value`` has ``t``'s shape and dtype."""
        cell = self.cell(t)
        if value.shape != tuple(t.shape) or value.dtype != t.dtype:
            raise LoweringError(f"expected {Type(tuple(t.shape), t.dtype)}, the rule gave {value.type}")
        value = _lazy_bits(t, value)
        if cell.windows.get(geometry(t)) is value:
            return
        cell.written = True
        self._store(cell, t, value)

    def base(self, t: torch.Tensor) -> Value:
        """The base array of ``t``'s storage."""
        return self._base(self.cell(t), t)

    def _store(self, cell: TraceCell, t: torch.Tensor, value: Value) -> None:
        key = sizes, strides, offset, _ = geometry(t)
        if t.numel() * t.itemsize == t.untyped_storage().nbytes() and view.is_dense(sizes, strides):
            cell.base, cell.full = None, key
        else:
            cell.base = view.write_view(self._base(cell, t), sizes, strides, offset, value)
            cell.full = None
        cell.load = None
        cell.windows = {key: value}

    def _base(self, cell: TraceCell, t: torch.Tensor) -> Value:
        if cell.base is None:
            if cell.full is not None:
                sizes, strides, offset, dtype = cell.full
                if cell.full not in cell.windows:
                    assert cell.load is not None
                    cell.windows[cell.full] = cell.load()
                value = cell.windows[cell.full]
                if offset == 0 and view.is_compact(sizes, strides):
                    cell.base = view.to_memory_order(value, sizes, strides)
                else:
                    blank = hlo.constant(0, dtype, (offset + view.span(sizes, strides),))
                    cell.base = view.write_view(blank, sizes, strides, offset, value)
            else:  # memory that nobody has written: zeros stand for "undefined"
                count = t.untyped_storage().nbytes() // t.itemsize
                cell.base = hlo.constant(0, t.dtype, (count,))
        return cell.base

    def _embed(self, t: torch.Tensor) -> Value:
        """A CPU tensor that a decomposition made becomes a constant; one without elements holds nothing to read."""
        if t.numel() == 0:
            return hlo.constant(0, t.dtype, tuple(t.shape))
        if t.device.type != "cpu" or t.numel() > 4096:
            raise LoweringError(f"a {t.device.type} tensor of {t.numel()} elements inside a decomposition")
        flat = t.detach().resolve_conj().resolve_neg().reshape(-1).tolist()
        if t.numel() == 1 or len(set(map(repr, flat))) == 1:
            return hlo.constant(flat[0], t.dtype, tuple(t.shape))
        return hlo.reshape(hlo.constant_list(flat, t.dtype), tuple(t.shape))

    # ---- operators
    # ----------------------------------------------------------------------------------------------------
    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Makes this the thread's trace."""
        stack = getattr(_local, "stack", None)
        if stack is None:
            stack = _local.stack = []
        stack.append(self)
        try:
            with self.function.building(), torch._C.DisableTorchFunction():
                yield
        finally:
            stack.pop()

    def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Runs PyTorch code on traced tensors inside this trace."""
        with self._mode:
            return function(*args, **kwargs)

    def call(self, op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """One operator on traced tensors: meta kernel, rule or decomposition, then results bound or written back."""
        info = op_info(op)
        kwargs = {k: _to_meta(v) for k, v in kwargs.items()}
        if info.name == "aten::resize_":
            return self._resize(op, args, kwargs)
        if info.name == "aten::lift_fresh" and args[0].device.type == "meta" and not self.has_cell(args[0]):
            raise LoweringError("a decomposition makes a tensor of numbers on the device: a trace does not see them")
        if info.rule is None and (info.is_view or _changes_view(info)):
            return op(*_numbers(args), **_numbers(kwargs))
        bound = _bind(op, args, kwargs)
        if info.rule is not None:
            return self._apply(info, info.rule, bound, args, kwargs)
        return self._decompose(info, bound, args, kwargs)

    def _resize(self, op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor:
        """``resize_``: what a larger storage had before stays at its beginning."""
        t, cell = args[0], self.cell(args[0])
        before = t.untyped_storage().nbytes() // t.itemsize
        base = self._base(cell, t) if before else None
        op(*args, **kwargs)
        more = t.untyped_storage().nbytes() // t.itemsize - before
        if more:
            cell.base = hlo.constant(0, t.dtype, (more,))
            if base is not None:
                cell.base = hlo.concatenate([hlo.reshape(hlo.convert(base, t.dtype), (before,)), cell.base], 0)
            cell.load, cell.full, cell.windows = None, None, {}
        return t

    def _apply(
        self, info: OpInfo, rule: Rule, bound: dict[str, Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        values = tree_map_only(torch.Tensor, self.read, {k: v for k, v in bound.items() if k not in info.out})
        if rule.promote is None:
            values.update(_wrapped_numbers(info, values))
        outs = _described(info, rule, _numbers(args), _numbers(kwargs))
        targets = self._targets(info, bound, outs)
        self.op_names.append(info.name)
        results = _call_rule(info, rule, values, [_type_of(t) for t in targets], bound)
        extra = [bound[name] for name in rule.mutates if bound[name] is not None]
        self._bind_results(info, [*targets, *extra], results)
        return outs

    def apply(self, op: OpOverload, arguments: Sequence[Any], result: Type) -> Value:
        """What ``op``, with one result, gives for ``arguments`` in schema order: values, numbers, plain objects."""
        info = op_info(op)
        given = {a.name: a.default_value for a in info.inputs}
        given.update(zip(given, arguments, strict=False))
        if info.rule is not None:
            return _call_rule(info, info.rule, given, [result], {})
        tensors = {n: self._tensor_of(v) if isinstance(v, Value) else v for n, v in given.items()}
        positional = [tensors[a.name] for a in info.inputs if not a.kwarg_only]
        return self.read(self.call(op, positional, {a.name: tensors[a.name] for a in info.inputs if a.kwarg_only}))

    def _tensor_of(self, value: Value) -> torch.Tensor:
        t = torch.empty(value.shape, dtype=value.dtype, device="meta")
        self.bind(t, value)
        return t

    @staticmethod
    def _targets(info: OpInfo, bound: dict[str, Any], outs: Any) -> list[torch.Tensor | None]:
        """The tensors that a rule's results go to: written arguments, then fresh results."""
        written = [t for name in info.written for t in tree_flatten(bound[name])[0] if isinstance(t, torch.Tensor)]
        known = {id(t) for t in written}
        fresh = tree_flatten(outs, is_leaf=lambda x: x is None)[0] if info.op._schema.returns else []
        return [*written, *(t for t in fresh if id(t) not in known)]

    def _bind_results(self, info: OpInfo, targets: list[torch.Tensor | None], results: Any) -> None:
        flat = tree_flatten(results, is_leaf=lambda x: x is None or isinstance(x, Value))[0]
        if len(flat) != len(targets):
            raise LoweringError(f"{info.name}: the operator has {len(targets)} results, the rule gave {len(flat)}.")
        for target, value in zip(targets, flat, strict=True):
            if target is None or value is None:
                continue
            try:
                if self.has_cell(target):
                    value = hlo.convert(value, target.dtype)
                    self.write(target, hlo.broadcast_to(value, target.shape))
                else:
                    self.bind(target, value)
            except LoweringError as error:
                raise LoweringError(
                    f"{info.name}: PyTorch's meta kernel and the lowering rule disagree: {error}."
                ) from None

    def _decompose(self, info: OpInfo, bound: dict[str, Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Traces PyTorch's own definition: of the overload, or of the functional one whose results are then written."""
        args, kwargs = _numbers(args), _numbers(kwargs)
        if not info.written and info.name.split("::")[1].startswith("empty"):
            return info.op(*args, **kwargs)  # undefined contents
        target = info.functional
        for definition in (_decomposition, _composite):
            if body := definition(info.op):
                return self.run(body, *args, **kwargs)
            if target is not None and target is not info.op and (body := definition(target)):
                outs = info.op(*args, **kwargs)
                results = self.run(body, *_positional(target, bound), **_keywords(target, bound))
                values = [self.read(t) for t in tree_flatten(results)[0]]
                self._bind_results(info, self._targets(info, bound, outs), values)
                return outs
        raise NotImplementedError(missing(info.name))


def _described(info: OpInfo, rule: Rule, args: Any, kwargs: dict[str, Any]) -> Any:
    """The results without their values: from PyTorch's meta kernel, or the rule's own."""
    targets = [kwargs[a.name] for a in info.op._schema.arguments if a.is_out]
    if not targets or not all(isinstance(t, torch.Tensor) for t in targets):
        if rule.meta is not None and not any(r.alias_info for r in info.op._schema.returns):
            return rule.meta(*args, **kwargs)
        made = info.op(*args, **kwargs)
        return _laid_out(made, args) if rule.promote is not None and not info.written else made
    layouts = [(t.shape, t.stride()) for t in targets]
    if rule.meta is None:
        info.op(*args, **kwargs)
    describe = rule.meta
    if describe is None and any(t.shape != shape for t, (shape, _) in zip(targets, layouts, strict=True)):
        describe = info.functional
    fresh: Any = targets
    if describe is not None:
        made = describe(*args, **{k: v for k, v in kwargs.items() if k not in info.out})
        fresh = made if isinstance(made, tuple | list) else [made]
    for target, (shape, strides), t in zip(targets, layouts, fresh, strict=True):
        if t is not target and t.shape != shape:
            _lay_out_anew(target, t)
        elif target.shape == shape and target.stride() != strides:  # some of PyTorch's meta kernels lay it out anew
            target.as_strided_(shape, strides)
    return tuple(targets) if len(targets) > 1 else targets[0]


def _lay_out_anew(target: torch.Tensor, like: torch.Tensor) -> None:
    """Gives an ``out=`` tensor another size, with the layout of a fresh result, as C++'s structured kernels do."""
    like = torch.empty_like(like) if 0 in like.stride() else like
    target.resize_(like.untyped_storage().nbytes() // like.itemsize)
    target.as_strided_(like.shape, like.stride())
    tracer().forget(target)


def _laid_out(made: Any, args: Any) -> Any:
    """An element-wise result of two tensors as C++'s TensorIterator lays it out: PyTorch's references differ."""
    given = [a for a in args if isinstance(a, torch.Tensor)]
    if len(given) != 2 or not isinstance(made, torch.Tensor) or made.device.type != "meta":
        return made
    a, b = (torch.empty_strided(t.shape, t.stride(), device="meta") for t in given)
    strides = torch.add(a, b).stride()
    return (
        made if strides == made.stride() else torch.empty_strided(made.shape, strides, dtype=made.dtype, device="meta")
    )


def _decomposition(op: OpOverload) -> Callable[..., Any] | None:
    """PyTorch's Python decomposition, without its references of losses: they want the reduction by name."""
    from torch._decomp import decomposition_table

    function = decomposition_table.get(op)
    by_name = getattr(function, "__module__", None) == "torch._refs.nn.functional"
    return (
        None if by_name and op.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd) else function
    )


def _changes_view(info: OpInfo) -> bool:
    """``transpose_``, ``unsqueeze_``, ...: another window on the same storage, nothing is written."""
    return torch.Tag.inplace_view in info.op.tags and info.functional is not None and op_info(info.functional).is_view


def _composite(op: OpOverload) -> Callable[..., Any] | None:
    """The C++ kernel that defines the operator by others."""
    keys = torch._C.DispatchKey
    if op.has_kernel_for_dispatch_key(keys.CompositeImplicitAutograd):
        return op.decompose
    if op.has_kernel_for_dispatch_key(keys.CompositeExplicitAutograd):
        return lambda *args, **kwargs: op._op_dk(keys.CompositeExplicitAutograd, *args, **kwargs)
    return None


def is_supported(op: OpOverload) -> bool:
    """Whether an operator can be part of a program: it has a rule or a definition, or only changes a view."""
    info = op_info(op)
    if info.rule is not None or info.is_view or _changes_view(info):
        return True
    if info.name in ("aten::resize_", "aten::lift_fresh") or info.name.split("::")[1].startswith("empty"):
        return True
    targets = [op, *([info.functional] if info.functional is not None else [])]
    return any(definition(target) for target in targets for definition in (_decomposition, _composite))


def missing(name: str) -> str:
    """The sentence for an operator that has neither a rule nor a decomposition."""
    return (
        f"The operator '{name}' has no lowering rule and no decomposition on tpu. Move its inputs to the CPU for "
        f"this call, "
        f"name it in TORCH_TPU_CPU_FALLBACK to have that done, or add a rule (see docs/operators.md)."
    )


class _TracingMode(TorchDispatchMode):
    def __init__(self, trace: Tracer) -> None:
        super().__init__()
        self._trace = trace

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._trace.call(func, args, kwargs or {})


# ---- arguments ------------------------------------------------------------------------------------------------------
def _type_of(t: Any) -> Type | None:
    return Type(tuple(t.shape), t.dtype) if isinstance(t, torch.Tensor) else None


def _to_meta(value: Any) -> Any:
    return torch.device("meta") if isinstance(value, torch.device) else value


_WRAPPED = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}


def _wrapped_numbers(info: OpInfo, values: dict[str, Any]) -> dict[str, Value]:
    """Numbers that stand where the schema has a tensor: PyTorch's dispatcher unwraps its 0-d tensors of numbers."""
    return {
        a.name: hlo.constant(values[a.name], _WRAPPED[type(values[a.name])])
        for a in info.op._schema.arguments
        if type(values.get(a.name)) in _WRAPPED and isinstance(a.type, torch.TensorType)
    }


def _numbers(tree: Any) -> Any:
    """Run-time numbers replaced by the value of the call at hand, for meta kernels."""
    return tree_map_only(ScalarOperand, lambda s: s.sample, tree)


def _bind(op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by name, defaults filled in, in schema order."""
    bound: dict[str, Any] = {}
    for i, argument in enumerate(op._schema.arguments):
        if i < len(args) and not argument.kwarg_only:
            bound[argument.name] = args[i]
        elif argument.name in kwargs:
            bound[argument.name] = kwargs[argument.name]
        else:
            bound[argument.name] = argument.default_value
    return bound


def _positional(op: OpOverload, bound: dict[str, Any]) -> list[Any]:
    """``bound`` as ``op``'s positional arguments: decompositions name theirs as they like."""
    return [_numbers(bound[a.name]) for a in op._schema.arguments if not a.kwarg_only and a.name in bound]


def _keywords(op: OpOverload, bound: dict[str, Any]) -> dict[str, Any]:
    return {a.name: _numbers(bound[a.name]) for a in op._schema.arguments if a.kwarg_only and a.name in bound}


def _call_rule(
    info: OpInfo, rule: Rule, values: dict[str, Any], result_types: list[Type | None], bound: dict[str, Any]
) -> Any:
    """Promotes and broadcasts ``values`` as the rule declares, calls it, and converts what it gives."""
    if rule.promote is None:
        return _invoke(rule, info.inputs, values, result_types, bound)
    promoted = rule.promoted or info.promotable
    inputs = tuple(_promotion_kind(values[n]) for n in promoted if values[n] is not None)
    compute = torch.bfloat16 if _stays_bfloat16(rule, values, promoted) else _compute_dtype(rule.promote, inputs)
    shape = hlo.broadcast_shapes(*(v.shape for v in values.values() if isinstance(v, Value)))
    for a in info.inputs:
        v = values[a.name]
        if a.name in rule.single:
            continue
        if isinstance(v, ScalarOperand):
            v = v.to(compute)
            values[a.name] = v if a.kwarg_only else hlo.broadcast_to(v, shape)
        elif isinstance(v, bool | int | float | complex) and a.name in promoted and not a.kwarg_only:
            values[a.name] = hlo.constant(v, compute, shape)
        elif isinstance(v, Value):
            values[a.name] = hlo.broadcast_to(hlo.convert(v, compute) if a.name in promoted else v, shape)
    result = _invoke(rule, info.inputs, values, result_types, bound)
    if isinstance(result, Value) and result_types and result_types[0] is not None:
        return _narrowed(result, result_types[0].dtype)
    return result


def _stays_bfloat16(rule: Rule, values: dict[str, Any], promoted: Sequence[str]) -> bool:
    """Whether an operation on bfloat16 need not go by float32, in which a TPU would keep its operands for others."""
    alpha = values.get("alpha", 1)
    if not rule.once or tracer().emulate_precision or not (isinstance(alpha, int) and alpha == 1):
        return False
    return all(isinstance(values[n], Value) and values[n].dtype == torch.bfloat16 for n in promoted)


def _narrowed(x: Value, dtype: torch.dtype) -> Value:
    """A conversion; to bfloat16 by way of the bits: behind a ``convert``, XLA's CPU backend halves its vectors."""
    if not (tracer().emulate_precision and x.dtype == torch.float32 and dtype == torch.bfloat16):
        return hlo.convert(x, dtype)
    bits = hlo.bitcast_convert(hlo.reduce_precision(x, exponent_bits=8, mantissa_bits=7), torch.uint32)
    return hlo.bitcast_convert(hlo.convert(hlo.shift_right_logical(bits, 16), torch.uint16), dtype)


def _promotion_kind(x: Any) -> Any:
    """What of an operand decides promotion: a tensor's dtype and whether it is 0-d, a number's type."""
    if isinstance(x, Value):
        return x.dtype, x.ndim == 0
    return type(x.sample if isinstance(x, ScalarOperand) else x)


@functools.cache
def _compute_dtype(kind: Promotion, inputs: tuple[Any, ...]) -> torch.dtype:
    samples = [
        torch.empty(() if x[1] else (1,), dtype=x[0], device="meta") if isinstance(x, tuple) else x(1) for x in inputs
    ]
    return elementwise_dtypes(*samples, type_promotion_kind=kind)[0]


def _invoke(
    rule: Rule, schema: Sequence[Any], values: dict[str, Any], result_types: list[Type | None], bound: dict[str, Any]
) -> Any:
    positional = [values[a.name] for a in schema if not a.kwarg_only]
    keywords = {a.name: values[a.name] for a in schema if a.kwarg_only and a.name in rule.keywords}
    if "result" in rule.keywords:
        keywords["result"] = result_types
    if "tensors" in rule.keywords:  # the arguments as meta tensors, for the few results that depend on strides
        keywords["tensors"] = bound
    return rule.function(*positional, **keywords)
