"""Modules that users write as for CUDA, and that reach operators of their own."""

from __future__ import annotations

import copy

import torch
from torch import nn


def test_padded_sequences_pack_with_lengths_on_the_cpu() -> None:
    x = torch.randn(3, 4, 5)
    for lengths, in_order in (([4, 3, 2], True), ([2, 4, 3], False)):
        want = nn.utils.rnn.pack_padded_sequence(x, torch.tensor(lengths), batch_first=True, enforce_sorted=in_order)
        got = nn.utils.rnn.pack_padded_sequence(
            x.tpu(), torch.tensor(lengths), batch_first=True, enforce_sorted=in_order
        )
        torch.testing.assert_close(got.data.cpu(), want.data)
        torch.testing.assert_close(got.batch_sizes, want.batch_sizes)
        padded, _ = nn.utils.rnn.pad_packed_sequence(got, batch_first=True)
        torch.testing.assert_close(padded.cpu(), nn.utils.rnn.pad_packed_sequence(want, batch_first=True)[0])


def test_an_encoder_in_evaluation_takes_a_padding_mask() -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2).eval()
    on_tpu = copy.deepcopy(encoder).tpu()
    x, mask = torch.rand(2, 3, 8), torch.tensor([[False, False, True]] * 2)
    with torch.tpu.precision(torch.tpu.Precision.HIGHEST), torch.no_grad():
        got = on_tpu(x.tpu(), src_key_padding_mask=mask.tpu()).cpu()
    torch.testing.assert_close(got[:, :2], encoder(x, src_key_padding_mask=mask)[:, :2])


def test_weight_norm_trains() -> None:
    x = torch.arange(8.0).reshape(2, 4)
    linear = nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))
    on_tpu = copy.deepcopy(linear).tpu()
    linear(x).square().sum().backward()
    with torch.tpu.precision(torch.tpu.Precision.HIGHEST):
        on_tpu(x.tpu()).square().sum().backward()
    for a, b in zip(on_tpu.parameters(), linear.parameters(), strict=True):
        torch.testing.assert_close(a.grad.cpu(), b.grad)


def test_a_lazy_module_moves_before_it_knows_its_shapes() -> None:
    layer = torch.nn.LazyLinear(3).tpu()
    assert layer(torch.ones(2, 4, device="tpu")).shape == (2, 3)
    assert layer.weight.device.type == "tpu"
