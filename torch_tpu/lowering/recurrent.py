"""The cells of LSTM and GRU, forward and backward, as PyTorch fuses them on an accelerator (ATen's ``RNN.cu``).

Gates stand side by side along the last dimension: input, forget, cell, output for LSTM (Hochreiter and Schmidhuber,
1997); reset, update, new for GRU (Cho et al., 2014). A cell keeps what its gradient needs in a workspace.
"""

from __future__ import annotations

import torch

from torch_tpu.lowering.common import compute_dtype
from torch_tpu.lowering.reduction import total
from torch_tpu.lowering.registry import lower
from torch_tpu.stablehlo import Value
from torch_tpu.stablehlo import ops as hlo


def _wide(x: Value) -> Value:
    return hlo.convert(x, compute_dtype(x.dtype))


def _gates(packed: Value, bias: Value | None, count: int) -> list[Value]:
    """The gates of [batch, count * hidden], each [batch, hidden], the bias added."""
    packed = _wide(packed)
    if bias is not None:
        packed = packed + hlo.broadcast_to(_wide(bias), packed.shape)
    return _split(packed, count)


def _split(packed: Value, count: int) -> list[Value]:
    packed = _wide(packed)
    n = packed.shape[1] // count
    return [hlo.slice_dim(packed, 1, i * n, (i + 1) * n) for i in range(count)]


def _packed(parts: list[Value], dtype: torch.dtype) -> Value:
    return hlo.convert(hlo.concatenate(parts, 1), dtype)


def _bias_gradient(gates: Value) -> Value:
    return hlo.convert(total(_wide(gates), [0]), gates.dtype)


@lower("_thnn_fused_lstm_cell")
def lstm_cell(
    input_gates: Value, hidden_gates: Value, cx: Value, input_bias: Value | None, hidden_bias: Value | None
) -> tuple[Value, Value, Value]:
    pairs = zip(_gates(input_gates, input_bias, 4), _gates(hidden_gates, hidden_bias, 4), strict=True)
    i, f, c, o = (a + b for a, b in pairs)
    i, f, c, o = hlo.logistic(i), hlo.logistic(f), hlo.tanh(c), hlo.logistic(o)
    cy = f * _wide(cx) + i * c
    hy = o * hlo.tanh(cy)
    return hlo.convert(hy, cx.dtype), hlo.convert(cy, cx.dtype), _packed([i, f, c, o], input_gates.dtype)


@lower("_thnn_fused_lstm_cell_backward_impl")
def lstm_cell_backward(
    grad_hy: Value | None, grad_cy: Value | None, cx: Value, cy: Value, workspace: Value, has_bias: bool
) -> tuple[Value | None, Value | None, Value | None]:
    if grad_hy is None and grad_cy is None:
        return None, None, None
    i, f, c, o = _split(workspace, 4)
    squashed = hlo.tanh(_wide(cy))
    dh = hlo.full_like(i, 0) if grad_hy is None else _wide(grad_hy)
    dc = dh * o * (1 - squashed * squashed)
    if grad_cy is not None:
        dc = dc + _wide(grad_cy)
    parts = [
        dc * c * (1 - i) * i,
        dc * _wide(cx) * (1 - f) * f,
        dc * i * (1 - c * c),
        dh * squashed * (1 - o) * o,
    ]
    gates = _packed(parts, workspace.dtype)
    return gates, hlo.convert(dc * f, cx.dtype), _bias_gradient(gates) if has_bias else None


@lower("_thnn_fused_gru_cell")
def gru_cell(
    input_gates: Value, hidden_gates: Value, hx: Value, input_bias: Value | None, hidden_bias: Value | None
) -> tuple[Value, Value]:
    ir, iz, i_new = _gates(input_gates, input_bias, 3)
    hr, hz, h_new = _gates(hidden_gates, hidden_bias, 3)
    r, z = hlo.logistic(ir + hr), hlo.logistic(iz + hz)
    n = hlo.tanh(i_new + r * h_new)
    h = _wide(hx)
    hy = n + z * (h - n)
    return hlo.convert(hy, hx.dtype), _packed([r, z, n, h, h_new], input_gates.dtype)


@lower("_thnn_fused_gru_cell_backward")
def gru_cell_backward(
    grad_hy: Value, workspace: Value, has_bias: bool
) -> tuple[Value, Value, Value, Value | None, Value | None]:
    r, z, n, h, h_new = _split(workspace, 5)
    g = _wide(grad_hy)
    dz = g * (h - n) * (1 - z) * z
    dn = g * (1 - z) * (1 - n * n)
    dr = dn * h_new * (1 - r) * r
    dtype = workspace.dtype
    of_input, of_hidden = _packed([dr, dz, dn], dtype), _packed([dr, dz, dn * r], dtype)
    biases = (_bias_gradient(of_input), _bias_gradient(of_hidden)) if has_bias else (None, None)
    return of_input, of_hidden, hlo.convert(g * z, grad_hy.dtype), *biases
