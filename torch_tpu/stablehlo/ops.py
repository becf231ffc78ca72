"""The StableHLO vocabulary as plain functions on :class:`Value`.

One function per operation, named as in the specification, with shapes and dtypes inferred and checked. Nothing here
knows PyTorch's promotion or broadcasting; helpers that combine several operations stand at the end.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_tpu.stablehlo.builder import current
from torch_tpu.stablehlo.types import Shape, Type, Value, tensor_type

Number = bool | int | float | complex
_COMPLEX_PART = {torch.complex64: torch.float32, torch.complex128: torch.float64}
_COMPLEX_OF = {part: whole for whole, part in _COMPLEX_PART.items()}


# ---- constants and conversion ---------------------------------------------------------------------------------------
def _int_list(values: Sequence[int]) -> str:
    return f"array<i64: {', '.join(map(str, values))}>" if len(values) else "array<i64>"


def _bool_list(values: Sequence[bool]) -> str:
    return f"array<i1: {', '.join('true' if v else 'false' for v in values)}>" if len(values) else "array<i1>"


def _float_literal(value: float, dtype: torch.dtype) -> str:
    if dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        return _float_bits(repr(float(value)), dtype)
    return repr(float(value))


@functools.cache
def _float_bits(text: str, dtype: torch.dtype) -> str:
    """The bits of a float in hexadecimal; keyed by its text, in which 0.0 and -0.0 differ."""
    size = torch.finfo(dtype).bits // 8
    bits = torch.tensor(float(text), dtype=torch.float64, device="cpu").to(dtype)
    bits = bits.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[size])
    return f"0x{int(bits) & ((1 << 8 * size) - 1):0{2 * size}X}"


def _literal(value: Number, dtype: torch.dtype) -> str:
    if dtype == torch.bool:
        return "true" if value else "false"
    if dtype.is_complex:
        z, part = complex(value), _COMPLEX_PART[dtype]
        return f"({_float_literal(z.real, part)}, {_float_literal(z.imag, part)})"
    if dtype.is_floating_point:
        return _float_literal(float(value), dtype)  # type: ignore[arg-type]
    info = torch.iinfo(dtype)
    n = int(value)  # type: ignore[arg-type]
    return str((n - info.min) % (1 << info.bits) + info.min)


def constant(value: Number, dtype: torch.dtype, shape: Shape = ()) -> Value:
    """A splat of one number. Integers wrap to ``dtype`` as a C cast does."""
    if dtype.itemsize == 1 and dtype.is_floating_point:
        return convert(constant(value, torch.float32, shape), dtype)
    return current().emit(
        f"stablehlo.constant dense<{_literal(value, dtype)}> : {tensor_type(shape, dtype)}", Type(shape, dtype)
    )[0]


def constant_list(values: Sequence[Number], dtype: torch.dtype) -> Value:
    """A one-dimensional constant, shape ``[len(values)]``."""
    if not values:
        return constant(0, dtype, (0,))
    body = ", ".join(_literal(v, dtype) for v in values)
    return current().emit(
        f"stablehlo.constant dense<[{body}]> : {tensor_type((len(values),), dtype)}", Type((len(values),), dtype)
    )[0]


def full_like(x: Value, value: Number) -> Value:
    return constant(value, x.dtype, x.shape)


def iota(shape: Shape, dim: int, dtype: torch.dtype) -> Value:
    """Counts 0, 1, 2, ... along ``dim``."""
    if dtype == torch.bool:
        return convert(iota(shape, dim, torch.int32), torch.bool)
    return current().emit(f"stablehlo.iota dim = {dim} : {tensor_type(shape, dtype)}", Type(tuple(shape), dtype))[0]


def convert(x: Value, dtype: torch.dtype) -> Value:
    """Element conversion with PyTorch's meaning: to bool is ``!= 0``, complex to real keeps the real part."""
    if x.dtype == dtype:
        return x
    if x.dtype.is_complex and not dtype.is_complex and dtype != torch.bool:
        x = real(x)
        if x.dtype == dtype:
            return x
    if _is_float8(dtype):
        return _to_float8(x, dtype)
    if _is_float8(x.dtype) and (dtype not in _HALVES or x.dtype == torch.float8_e8m0fnu) and dtype != torch.float32:
        return convert(convert(x, torch.float32), dtype)
    if dtype.is_complex and not x.dtype.is_complex:
        part = convert(x, _COMPLEX_PART[dtype])
        return complex_(part, full_like(part, 0))
    if dtype == torch.bool:
        return compare(x, constant(0, x.dtype, x.shape), "NE")
    if x.dtype == torch.bool and dtype.is_floating_point:
        # XLA takes a product with a converted bool for a choice between the factor and 0: NaN and infinities are lost.
        return current().op("convert", [convert(x, torch.uint8)], Type(x.shape, dtype))
    if x.dtype.is_floating_point and dtype in (torch.uint8, torch.int8, torch.int16, torch.uint16):
        # Out-of-range floats wrap through a wide integer on the CPU backend of PyTorch; XLA would saturate.
        x = convert(x, torch.int64 if x.dtype == torch.float64 else torch.int32)
    return current().op("convert", [x], Type(x.shape, dtype))


_HALVES = (torch.float16, torch.bfloat16)


#: Stored digits of the significand and exponent of the least normal number (torch.finfo is wrong on one of them).
_FLOAT8_FORMAT = {
    torch.float8_e4m3fn: (3, -6), torch.float8_e5m2: (2, -14),
    torch.float8_e4m3fnuz: (3, -7), torch.float8_e5m2fnuz: (2, -15),
}  # fmt: skip


def _is_float8(dtype: torch.dtype) -> bool:
    return dtype.itemsize == 1 and dtype.is_floating_point


def _to_float8(x: Value, dtype: torch.dtype) -> Value:
    """PyTorch's conversions (c10's ``Float8_*.h``), which start from float32."""
    x = convert(x, torch.float32)
    if dtype == torch.float8_e8m0fnu:  # the exponent, rounded to nearest; 2^-127 for less; the sign is dropped
        bits = and_(bitcast_convert(x, torch.int32), 0x7FFFFFFF)
        exponent = shift_right_arithmetic(bits, 23)
        up = and_(compare(and_(bits, 0x400000), 0, "NE"), compare(bits, 0x400000, "NE"))
        special = compare(exponent, 0xFF, "EQ")
        exponent = select(special, exponent, exponent + convert(up, torch.int32))
        return bitcast_convert(convert(exponent, torch.uint8), dtype)
    if dtype == torch.float8_e4m3fn:  # saturates, infinities too
        x = clamp(-448.0, x, 448.0)
    # XLA's CPU backend goes by way of float16 and rounds twice: what it is given is exact.
    digits, smallest = _FLOAT8_FORMAT[dtype]
    step = 2.0 ** (smallest - digits)
    fixed = round_nearest_even(x * (1 / step)) * step
    floating = reduce_precision(x, exponent_bits=8, mantissa_bits=digits)
    exact = select(abs_(x) < 2.0**smallest, fixed, floating)
    return current().op("convert", [exact], Type(x.shape, dtype))


def bitcast_convert(x: Value, dtype: torch.dtype) -> Value:
    """Same bits, another type. A wider source adds a minor dimension, a narrower one consumes it."""
    a, b = x.dtype.itemsize, dtype.itemsize
    shape = x.shape if a == b else (*x.shape, a // b) if a > b else x.shape[:-1]
    return current().op("bitcast_convert", [x], Type(shape, dtype))


# ---- element-wise ---------------------------------------------------------------------------------------------------
def _unary(name: str, result: Callable[[torch.dtype], torch.dtype] = lambda d: d) -> Callable[[Value], Value]:
    def operation(x: Value) -> Value:
        return current().op(name, [x], Type(x.shape, result(x.dtype)))

    operation.__name__ = name
    operation.__doc__ = f"StableHLO ``{name}``."
    return operation


def _operands(name: str, x: Value | Number, y: Value | Number) -> tuple[Value, Value]:
    if not isinstance(x, Value):
        assert isinstance(y, Value)
        x = full_like(y, x)
    if not isinstance(y, Value):
        y = full_like(x, y)
    if x.shape != y.shape or x.dtype != y.dtype:
        raise TypeError(f"{name} needs equal types, got {x.type} and {y.type}.")
    return x, y


def _binary(name: str) -> Callable[[Value | Number, Value | Number], Value]:
    def operation(x: Value | Number, y: Value | Number) -> Value:
        x, y = _operands(name, x, y)
        return current().op(name, [x, y], x.type)

    operation.__name__ = name
    operation.__doc__ = f"StableHLO ``{name}``; a Python number becomes a constant of the other operand's type."
    return operation


abs_ = _unary("abs", lambda d: _COMPLEX_PART.get(d, d))
cbrt, ceil, cosine, exponential, exponential_minus_one = map(
    _unary, ("cbrt", "ceil", "cosine", "exponential", "exponential_minus_one")
)
floor, log, log_plus_one, logistic, negate, not_ = map(
    _unary, ("floor", "log", "log_plus_one", "logistic", "negate", "not")
)
popcnt, round_nearest_afz, round_nearest_even = map(_unary, ("popcnt", "round_nearest_afz", "round_nearest_even"))
rsqrt, sign, sine, sqrt, tan, tanh = map(_unary, ("rsqrt", "sign", "sine", "sqrt", "tan", "tanh"))
count_leading_zeros = _unary("count_leading_zeros")
real = _unary("real", lambda d: _COMPLEX_PART[d])
imag = _unary("imag", lambda d: _COMPLEX_PART[d])
is_finite = _unary("is_finite", lambda d: torch.bool)

# CHLO: expanded by XLA into StableHLO on every platform.
erf, erf_inv, erfc, lgamma, digamma = map(
    _unary, ("chlo.erf", "chlo.erf_inv", "chlo.erfc", "chlo.lgamma", "chlo.digamma")
)
acos, acosh, asin, asinh, atan, atanh = map(
    _unary, ("chlo.acos", "chlo.acosh", "chlo.asin", "chlo.asinh", "chlo.atan", "chlo.atanh")
)
cosh, sinh, bessel_i1e, conj = map(_unary, ("chlo.cosh", "chlo.sinh", "chlo.bessel_i1e", "chlo.conj"))
next_after, polygamma, zeta = map(_binary, ("chlo.next_after", "chlo.polygamma", "chlo.zeta"))

add, and_, atan2, divide, maximum, minimum = map(_binary, ("add", "and", "atan2", "divide", "maximum", "minimum"))
multiply, or_, power, remainder, subtract, xor = map(
    _binary, ("multiply", "or", "power", "remainder", "subtract", "xor")
)
shift_left, shift_right_arithmetic, shift_right_logical = map(
    _binary, ("shift_left", "shift_right_arithmetic", "shift_right_logical")
)


def complex_(re: Value, im: Value) -> Value:
    return current().op("complex", [re, im], Type(re.shape, _COMPLEX_OF[re.dtype]))


def compare(x: Value | Number, y: Value | Number, direction: str, total_order: bool = False) -> Value:
    """``direction`` is EQ, NE, LT, LE, GT or GE. ``total_order`` puts NaN last (floats only)."""
    x, y = _operands("compare", x, y)
    kind = (
        "TOTALORDER"
        if total_order and x.dtype.is_floating_point
        else (
            "FLOAT"
            if x.dtype.is_floating_point or x.dtype.is_complex
            else "UNSIGNED"
            if x.dtype == torch.bool or not x.dtype.is_signed
            else "SIGNED"
        )
    )
    text = (
        f"stablehlo.compare {direction}, {x.name}, {y.name}, {kind} : ({x.type}, {y.type}) -> "
        f"{tensor_type(x.shape, torch.bool)}"
    )
    return current().emit(text, Type(x.shape, torch.bool))[0]


def select(predicate: Value, on_true: Value | Number, on_false: Value | Number) -> Value:
    """Element-wise choice; ``predicate`` is i1 of the operands' shape, or 0-d."""
    x, y = _operands("select", on_true, on_false)
    return current().op("select", [predicate, x, y], x.type)


def clamp(low: Value | Number, x: Value, high: Value | Number) -> Value:
    low, high = (v if isinstance(v, Value) else constant(v, x.dtype) for v in (low, high))
    return current().op("clamp", [low, x, high], x.type)


def reduce_precision(x: Value, exponent_bits: int, mantissa_bits: int) -> Value:
    """Rounds a float to fewer bits and keeps its type."""
    attributes = f"exponent_bits = {exponent_bits} : i32, mantissa_bits = {mantissa_bits} : i32"
    return current().op("reduce_precision", [x], x.type, attributes)


def optimization_barrier(*xs: Value) -> tuple[Value, ...]:
    return current().op_multi("optimization_barrier", xs, [x.type for x in xs], pure=False)


# ---- shape ----------------------------------------------------------------------------------------------------------
def reshape(x: Value, shape: Sequence[int]) -> Value:
    shape = tuple(shape)
    if shape == x.shape:
        return x
    if math.prod(shape) != x.numel:
        raise TypeError(f"reshape from {x.type} to {shape} changes the number of elements.")
    source = x if x.reshape_of is None else x.reshape_of
    if shape == source.shape:
        return source
    y = current().op("reshape", [source], Type(shape, x.dtype))
    y.reshape_of = source
    return y


def transpose(x: Value, permutation: Sequence[int]) -> Value:
    permutation = tuple(p % x.ndim for p in permutation)
    if permutation == tuple(range(x.ndim)):
        return x
    if x.transpose_of is not None and all(x.transpose_of[1][p] == i for i, p in enumerate(permutation)):
        return x.transpose_of[0]
    result = Type(tuple(x.shape[p] for p in permutation), x.dtype)
    y = current().op("transpose", [x], result, f"permutation = {_int_list(permutation)}")
    y.transpose_of = x, permutation
    return y


def broadcast_in_dim(x: Value, shape: Sequence[int], dims: Sequence[int]) -> Value:
    """Dimension ``i`` of ``x`` becomes dimension ``dims[i]`` of the result; sizes of one expand."""
    shape, dims = tuple(shape), tuple(dims)
    if shape == x.shape and dims == tuple(range(x.ndim)):
        return x
    return current().op("broadcast_in_dim", [x], Type(shape, x.dtype), f"broadcast_dimensions = {_int_list(dims)}")


def slice_(x: Value, start: Sequence[int], limit: Sequence[int], step: Sequence[int] | None = None) -> Value:
    step = tuple(step) if step is not None else (1,) * x.ndim
    shape = tuple(max(0, -(-(b - a) // s)) for a, b, s in zip(start, limit, step, strict=True))
    if shape == x.shape and not any(start):
        return x
    attributes = f"start_indices = {_int_list(start)}, limit_indices = {_int_list(limit)}, strides = {_int_list(step)}"
    return current().op("slice", [x], Type(shape, x.dtype), attributes)


def slice_dim(x: Value, dim: int, start: int, limit: int, step: int = 1) -> Value:
    """``x[..., start:limit:step, ...]`` along ``dim`` with in-range bounds."""
    starts, limits, steps = [0] * x.ndim, list(x.shape), [1] * x.ndim
    starts[dim], limits[dim], steps[dim] = start, limit, step
    return slice_(x, starts, limits, steps)


def dynamic_slice(x: Value, starts: Sequence[Value], sizes: Sequence[int]) -> Value:
    """Slices at run-time ``starts`` (0-d integers of one dtype), clamped to stay inside ``x``."""
    return current().op("dynamic_slice", [x, *starts], Type(tuple(sizes), x.dtype), f"slice_sizes = {_int_list(sizes)}")


def dynamic_update_slice(x: Value, update: Value, starts: Sequence[Value]) -> Value:
    return current().op("dynamic_update_slice", [x, update, *starts], x.type)


def pad(
    x: Value, value: Value | Number, low: Sequence[int], high: Sequence[int], interior: Sequence[int] | None = None
) -> Value:
    """Pads with a 0-d ``value``; negative amounts crop."""
    interior = tuple(interior) if interior is not None else (0,) * x.ndim
    if not any((*low, *high, *interior)):
        return x
    if not isinstance(value, Value):
        value = constant(value, x.dtype)
    shape = tuple(lo + d + max(0, d - 1) * n + hi for d, lo, hi, n in zip(x.shape, low, high, interior, strict=True))
    attributes = (
        f"edge_padding_low = {_int_list(low)}, edge_padding_high = {_int_list(high)}, interior_padding = "
        f"{_int_list(interior)}"
    )
    return current().op("pad", [x, value], Type(shape, x.dtype), attributes)


def concatenate(xs: Sequence[Value], dim: int) -> Value:
    if len(xs) == 1:
        return xs[0]
    shape = list(xs[0].shape)
    shape[dim] = sum(x.shape[dim] for x in xs)
    current().work.joined = max(current().work.joined, math.prod(shape))
    return current().op("concatenate", xs, Type(tuple(shape), xs[0].dtype), f"dimension = {dim} : i64")


def reverse(x: Value, dims: Sequence[int]) -> Value:
    return current().op("reverse", [x], x.type, f"dimensions = {_int_list(dims)}") if dims else x


# ---- gather and scatter ---------------------------------------------------------------------------------------------
def gather(
    x: Value,
    indices: Value,
    *,
    offset_dims: Sequence[int],
    collapsed_dims: Sequence[int],
    index_map: Sequence[int],
    slice_sizes: Sequence[int],
    index_vector_dim: int | None = None,
    operand_batching_dims: Sequence[int] = (),
    indices_batching_dims: Sequence[int] = (),
    sorted_indices: bool = False,
) -> Value:
    """StableHLO ``gather``; ``index_vector_dim`` defaults to the last dimension of ``indices``."""
    vector_dim = indices.ndim - 1 if index_vector_dim is None else index_vector_dim
    batch = [d for i, d in enumerate(indices.shape) if i != vector_dim]
    dropped = {*collapsed_dims, *operand_batching_dims}
    window = [s for i, s in enumerate(slice_sizes) if i not in dropped]
    shape, b, w = [], iter(batch), iter(window)
    for i in range(len(batch) + len(window)):
        shape.append(next(w) if i in offset_dims else next(b))
    numbers = (
        f"#stablehlo.gather<offset_dims = {list(offset_dims)}, collapsed_slice_dims = {list(collapsed_dims)}, "
        f"operand_batching_dims = {list(operand_batching_dims)}, start_indices_batching_dims = "
        f"{list(indices_batching_dims)}, "
        f"start_index_map = {list(index_map)}, index_vector_dim = {vector_dim}>"
    )
    attributes = (
        f"dimension_numbers = {numbers}, slice_sizes = {_int_list(slice_sizes)}, "
        f"indices_are_sorted = {'true' if sorted_indices else 'false'}"
    )
    return current().op("gather", [x, indices], Type(tuple(shape), x.dtype), attributes)


Combine = Callable[[Value, Value], Value]


def scatter(
    x: Value,
    indices: Value,
    updates: Value,
    combine: Combine | None = None,
    *,
    update_window_dims: Sequence[int],
    inserted_dims: Sequence[int],
    index_map: Sequence[int],
    index_vector_dim: int | None = None,
    input_batching_dims: Sequence[int] = (),
    indices_batching_dims: Sequence[int] = (),
    unique_indices: bool = False,
    sorted_indices: bool = False,
) -> Value:
    """StableHLO ``scatter`` of one operand; without ``combine`` updates replace. Indices out of range are dropped."""
    vector_dim = indices.ndim - 1 if index_vector_dim is None else index_vector_dim
    function = current()
    function.work.joined = max(function.work.joined, x.numel)
    scalar = Type((), x.dtype)
    with function.region(scalar, scalar) as ((old, new), region):
        function.return_(combine(old, new) if combine else new)
    numbers = (
        f"#stablehlo.scatter<update_window_dims = {list(update_window_dims)}, inserted_window_dims = "
        f"{list(inserted_dims)}, "
        f"input_batching_dims = {list(input_batching_dims)}, scatter_indices_batching_dims = "
        f"{list(indices_batching_dims)}, "
        f"scatter_dims_to_operand_dims = {list(index_map)}, index_vector_dim = {vector_dim}>"
    )
    flags = (
        f"indices_are_sorted = {'true' if sorted_indices else 'false'}, unique_indices = "
        f"{'true' if unique_indices else 'false'}"
    )
    text = (
        f'"stablehlo.scatter"({x.name}, {indices.name}, {updates.name}) ({region[0]}) '
        f"{{scatter_dimension_numbers = {numbers}, {flags}}} : ({x.type}, {indices.type}, {updates.type}) -> {x.type}"
    )
    return function.emit(text, x.type)[0]


# ---- reductions, windows, sorting -----------------------------------------------------------------------------------
def reduce(
    xs: Sequence[Value],
    inits: Sequence[Value | Number],
    dims: Sequence[int],
    body: Callable[[tuple[Value, ...], tuple[Value, ...]], Sequence[Value]],
) -> tuple[Value, ...]:
    """StableHLO ``reduce`` of several operands together; ``body(accumulators, elements)`` returns new accumulators."""
    function = current()
    initial = [i if isinstance(i, Value) else constant(i, x.dtype) for i, x in zip(inits, xs, strict=True)]
    scalars = [Type((), x.dtype) for x in xs]
    n = len(xs)
    with function.region(*scalars, *scalars) as (args, region):
        function.return_(*body(args[:n], args[n:]))
    gone = set(dims)
    if xs[0].ndim - 1 not in gone:
        function.work.summed_down = max(function.work.summed_down, xs[0].numel)
    results = [Type(tuple(d for i, d in enumerate(x.shape) if i not in gone), x.dtype) for x in xs]
    operands = [*xs, *initial]
    text = (
        f'"stablehlo.reduce"({", ".join(v.name for v in operands)}) ({region[0]}) {{dimensions = '
        f"{_int_list(sorted(gone))}}} : "
        f"({', '.join(str(v.type) for v in operands)}) -> ({', '.join(map(str, results))})"
    )
    return function.emit(text, *results)


def reduce_one(x: Value, init: Value | Number, dims: Sequence[int], combine: Combine) -> Value:
    """Reduces one operand with a binary ``combine``."""
    return reduce([x], [init], dims, lambda acc, new: [combine(acc[0], new[0])])[0]


def reduce_window(
    xs: Sequence[Value],
    inits: Sequence[Value | Number],
    body: Callable[[tuple[Value, ...], tuple[Value, ...]], Sequence[Value]],
    *,
    window: Sequence[int],
    strides: Sequence[int] | None = None,
    padding: Sequence[tuple[int, int]] | None = None,
    base_dilation: Sequence[int] | None = None,
    window_dilation: Sequence[int] | None = None,
) -> tuple[Value, ...]:
    """StableHLO ``reduce_window``; every list has one entry per dimension of the operands."""
    function, rank, n = current(), xs[0].ndim, len(xs)
    strides = strides or (1,) * rank
    padding = padding or ((0, 0),) * rank
    base_dilation = base_dilation or (1,) * rank
    window_dilation = window_dilation or (1,) * rank
    initial = [i if isinstance(i, Value) else constant(i, x.dtype) for i, x in zip(inits, xs, strict=True)]
    scalars = [Type((), x.dtype) for x in xs]
    with function.region(*scalars, *scalars) as (args, region):
        function.return_(*body(args[:n], args[n:]))
    shape = []
    for i, d in enumerate(xs[0].shape):
        padded = (0 if d == 0 else (d - 1) * base_dilation[i] + 1) + sum(padding[i])
        span = (window[i] - 1) * window_dilation[i] + 1
        shape.append(0 if padded < span else (padded - span) // strides[i] + 1)
    results = [Type(tuple(shape), x.dtype) for x in xs]
    operands = [*xs, *initial]
    pads = ", ".join(f"[{a}, {b}]" for a, b in padding)
    attributes = (
        f"window_dimensions = {_int_list(window)}, window_strides = {_int_list(strides)}, base_dilations = "
        f"{_int_list(base_dilation)}, "
        f"window_dilations = {_int_list(window_dilation)}, padding = dense<[{pads}]> : tensor<{rank}x2xi64>"
    )
    text = (
        f'"stablehlo.reduce_window"({", ".join(v.name for v in operands)}) ({region[0]}) {{{attributes}}} : '
        f"({', '.join(str(v.type) for v in operands)}) -> ({', '.join(map(str, results))})"
    )
    return function.emit(text, *results)


def select_and_scatter(
    x: Value,
    source: Value,
    init: Value | Number,
    select_: Callable[[Value, Value], Value],
    combine: Combine,
    *,
    window: Sequence[int],
    strides: Sequence[int],
    padding: Sequence[tuple[int, int]],
) -> Value:
    function, scalar = current(), Type((), x.dtype)
    initial = init if isinstance(init, Value) else constant(init, x.dtype)
    with function.region(scalar, scalar) as ((a, b), chooser):
        function.return_(select_(a, b))
    with function.region(scalar, scalar) as ((a, b), combiner):
        function.return_(combine(a, b))
    pads = ", ".join(f"[{a}, {b}]" for a, b in padding)
    attributes = (
        f"window_dimensions = {_int_list(window)}, window_strides = {_int_list(strides)}, "
        f"padding = dense<[{pads}]> : tensor<{x.ndim}x2xi64>"
    )
    text = (
        f'"stablehlo.select_and_scatter"({x.name}, {source.name}, {initial.name}) ({chooser[0]}, {combiner[0]}) '
        f"{{{attributes}}} : "
        f"({x.type}, {source.type}, {initial.type}) -> {x.type}"
    )
    return function.emit(text, x.type)[0]


def sort(
    xs: Sequence[Value], dim: int, less: Callable[[tuple[Value, ...], tuple[Value, ...]], Value], stable: bool = True
) -> tuple[Value, ...]:
    """Sorts several operands together along ``dim``; ``less(left, right)`` is the comparator on scalars."""
    function = current()
    pairs = [Type((), x.dtype) for x in xs for _ in range(2)]
    with function.region(*pairs) as (args, region):
        function.return_(less(args[0::2], args[1::2]))
    types = ", ".join(str(x.type) for x in xs)
    text = (
        f'"stablehlo.sort"({", ".join(x.name for x in xs)}) ({region[0]}) '
        f"{{dimension = {dim} : i64, is_stable = {'true' if stable else 'false'}}} : ({types}) -> ({types})"
    )
    return function.emit(text, *(x.type for x in xs))


def top_k(x: Value, k: int) -> tuple[Value, Value]:
    """The ``k`` largest of the last dimension, sorted, with their int32 positions (CHLO)."""
    shape = (*x.shape[:-1], k)
    values, indices = Type(shape, x.dtype), Type(shape, torch.int32)
    text = f"chlo.top_k({x.name}, k = {k}) : {x.type} -> ({values}, {indices})"
    result = current().emit(text, values, indices)
    return result[0], result[1]


# ---- control flow ---------------------------------------------------------------------------------------------------
def while_(
    carries: Sequence[Value], condition: Callable[..., Value], body: Callable[..., Sequence[Value]]
) -> tuple[Value, ...]:
    """``while condition(*carries): carries = body(*carries)``. Regions must use only their own arguments."""
    function = current()
    types = [c.type for c in carries]
    with function.region(*types) as (args, test):
        function.return_(condition(*args))
    with function.region(*types) as (args, step):
        function.return_(*body(*args))
    listed = ", ".join(map(str, types))
    text = f'"stablehlo.while"({", ".join(c.name for c in carries)}) ({test[0]}, {step[0]}) : ({listed}) -> ({listed})'
    return function.emit(text, *types)


def case(index: Value, branches: Sequence[Callable[[], Value]]) -> Value:
    """What branch ``index``, int32, gives; of others, nothing is computed. XLA computes both of two cheap branches."""
    function = current()
    regions = []
    for branch in branches:
        with function.region() as (_, region):
            result = branch()
            function.return_(result)
        regions.append(region[0])
    text = f'"stablehlo.case"({index.name}) ({", ".join(regions)}) : ({index.type}) -> {result.type}'
    return function.emit(text, result.type, pure=False)[0]


# ---- contractions ---------------------------------------------------------------------------------------------------
def dot_general(
    x: Value,
    y: Value,
    *,
    contract: tuple[Sequence[int], Sequence[int]],
    batch: tuple[Sequence[int], Sequence[int]] = ((), ()),
    dtype: torch.dtype | None = None,
    precision: str = "DEFAULT",
) -> Value:
    """Generalised matrix product; the result has batch, then ``x``'s, then ``y``'s free dimensions, in ``dtype``."""
    (cx, cy), (bx, by) = contract, batch
    shape = [x.shape[i] for i in bx]
    shape += [d for i, d in enumerate(x.shape) if i not in cx and i not in bx]
    shape += [d for i, d in enumerate(y.shape) if i not in cy and i not in by]
    result = Type(tuple(shape), dtype or x.dtype)
    batching = f"lhs_batching_dimensions = {list(bx)}, rhs_batching_dimensions = {list(by)}, " if bx else ""
    attributes = (
        f"dot_dimension_numbers = #stablehlo.dot<{batching}lhs_contracting_dimensions = {list(cx)}, "
        f"rhs_contracting_dimensions = {list(cy)}>, "
        f"precision_config = [#stablehlo<precision {precision}>, #stablehlo<precision {precision}>]"
    )
    return current().op("dot_general", [x, y], result, attributes)


def convolution(
    x: Value,
    kernel: Value,
    *,
    dims: str,
    strides: Sequence[int],
    padding: Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int],
    rhs_dilation: Sequence[int],
    feature_groups: int = 1,
    batch_groups: int = 1,
    reversal: Sequence[bool] | None = None,
    shape: Shape,
    dtype: torch.dtype | None = None,
    precision: str = "DEFAULT",
) -> Value:
    """StableHLO ``convolution``; ``dims`` is the dimension string, e.g. ``[b, f, 0, 1]x[o, i, 0, 1]->[b, f, 0, 1]``."""
    pads = ", ".join(f"[{a}, {b}]" for a, b in padding)
    rank = len(strides)
    padding_text = f"dense<[{pads}]> : tensor<{rank}x2xi64>" if rank else "dense<> : tensor<0x2xi64>"
    attributes = (
        f"dimension_numbers = #stablehlo.conv<{dims}>, window_strides = {_int_list(strides)}, padding = "
        f"{padding_text}, "
        f"lhs_dilation = {_int_list(lhs_dilation)}, rhs_dilation = {_int_list(rhs_dilation)}, "
        f"window_reversal = {_bool_list(reversal or [False] * rank)}, "
        f"feature_group_count = {feature_groups} : i64, batch_group_count = {batch_groups} : i64, "
        f"precision_config = [#stablehlo<precision {precision}>, #stablehlo<precision {precision}>]"
    )
    return current().op("convolution", [x, kernel], Type(tuple(shape), dtype or x.dtype), attributes)


# ---- linear algebra, transforms, random bits, escape hatches --------------------------------------------------------
def cholesky(x: Value, lower: bool = True) -> Value:
    return current().op("cholesky", [x], x.type, f"lower = {'true' if lower else 'false'}")


def triangular_solve(
    a: Value, b: Value, *, left: bool, lower: bool, unit_diagonal: bool, transpose_a: str = "NO_TRANSPOSE"
) -> Value:
    flags = {"left_side": left, "lower": lower, "unit_diagonal": unit_diagonal}
    attributes = ", ".join(f"{k} = {'true' if v else 'false'}" for k, v in flags.items())
    attributes += f", transpose_a = #stablehlo<transpose {transpose_a}>"
    return current().op("triangular_solve", [a, b], b.type, attributes)


def fft(x: Value, kind: str, lengths: Sequence[int], result: Type) -> Value:
    """``kind`` is FFT, IFFT, RFFT or IRFFT over the last ``len(lengths)`` dimensions."""
    return current().op(
        "fft", [x], result, f"fft_type = #stablehlo<fft_type {kind}>, fft_length = {_int_list(lengths)}"
    )


def rng_bit_generator(state: Value, shape: Shape, dtype: torch.dtype, algorithm: str = "PHILOX") -> tuple[Value, Value]:
    """(new state, uniform bits); the state is ui64[2] or ui64[3] for PHILOX."""
    out = Type(tuple(shape), dtype)
    attributes = f"rng_algorithm = #stablehlo<rng_algorithm {algorithm}>"
    a, b = current().op_multi("rng_bit_generator", [state], [state.type, out], attributes)
    return a, b


def custom_call(
    target: str, operands: Sequence[Value], results: Sequence[Type], attributes: str = ""
) -> tuple[Value, ...]:
    """A call by name. ``attributes`` holds further attribute text, e.g. ``backend_config`` or ``api_version``."""
    attributes = f'call_target_name = "{target}"' + (f", {attributes}" if attributes else "")
    return current().op_multi("custom_call", operands, results, attributes)


# ---- combinations ---------------------------------------------------------------------------------------------------
def broadcast_to(x: Value, shape: Sequence[int]) -> Value:
    """NumPy broadcasting of ``x`` to ``shape`` (trailing dimensions align)."""
    shape = tuple(shape)
    lead = len(shape) - x.ndim
    return broadcast_in_dim(x, shape, range(lead, len(shape)))


def broadcast_shapes(*shapes: Sequence[int]) -> Shape:
    if len(distinct := {tuple(s) for s in shapes if s}) <= 1:
        return next(iter(distinct), ())
    return tuple(torch.broadcast_shapes(*(tuple(s) for s in shapes)))


def expand_dims(x: Value, dims: Sequence[int]) -> Value:
    """Inserts sizes of one so that they stand at ``dims`` of the result."""
    rank = x.ndim + len(dims)
    at, sizes = {d % rank for d in dims}, iter(x.shape)
    return reshape(x, [1 if i in at else next(sizes) for i in range(rank)])


def squeeze(x: Value, dims: Sequence[int]) -> Value:
    gone = {d % x.ndim for d in dims}
    return reshape(x, [d for i, d in enumerate(x.shape) if i not in gone])


def move_dim(x: Value, source: int, destination: int) -> Value:
    order = [i for i in range(x.ndim) if i != source % x.ndim]
    order.insert(destination % x.ndim, source % x.ndim)
    return transpose(x, order)


def _reflected(operation: Callable[[Any, Any], Value]) -> Callable[[Value, Any], Value]:
    return lambda self, other: operation(other, self)


for _name, _operation in {
    "add": add,
    "sub": subtract,
    "mul": multiply,
    "truediv": divide,
    "and": and_,
    "or": or_,
    "xor": xor,
}.items():
    setattr(Value, f"__{_name}__", _operation)
    setattr(Value, f"__r{_name}__", _reflected(_operation))
for _name, _direction in {"lt": "LT", "le": "LE", "gt": "GT", "ge": "GE"}.items():
    setattr(Value, f"__{_name}__", lambda x, y, _d=_direction: compare(x, y, _d))
Value.__neg__ = lambda self: negate(self)  # type: ignore[method-assign]
Value.__invert__ = lambda self: not_(self)  # type: ignore[method-assign]
