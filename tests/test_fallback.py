"""Operators on the host: only those that the user names, counted, with one warning."""

from __future__ import annotations

import pytest
import torch

from tests.support import python


def test_the_default_is_an_error_that_names_the_operator() -> None:
    x = torch.ones(2, device="tpu")
    with pytest.raises(NotImplementedError, match=r"aten::_add_relu.Tensor.*TORCH_TPU_CPU_FALLBACK"):
        torch.ops.aten._add_relu(x, x)


def test_functional_inplace_out_and_several_results() -> None:
    code = """
    import warnings, torch
    x = torch.tensor([[3.0, 1.0], [2.0, 5.0]], device="tpu")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert torch.equal(x.exp().cpu(), x.cpu().exp())
        assert x.exp().device == x.device
        y = x.clone()
        assert y.t()[0].exp_().device == x.device
        assert torch.equal(y[:, 0].cpu(), x[:, 0].cpu().exp()) and torch.equal(y[:, 1].cpu(), x[:, 1].cpu())
        out = torch.empty(0, device="tpu")
        assert torch.exp(x, out=out) is out and torch.equal(out.cpu(), x.cpu().exp())
        values, indices = x.sort()
        assert torch.equal(values.cpu(), x.cpu().sort()[0]) and indices.device == x.device
    said = [str(w.message) for w in caught if "runs on the host" in str(w.message)]
    assert len(said) == len(set(said)), said
    counts = torch.tpu.compile_stats()["fallbacks"]
    assert sum(counts[name] for name in counts if name.startswith("aten::exp")) == 4, counts
    assert any(name.startswith("aten::sort") for name in counts), counts
    w = torch.ones(2, device="tpu", requires_grad=True)
    w.exp().sum().backward()
    assert torch.allclose(w.grad.cpu(), torch.ones(2).exp())
    """
    python(code, TORCH_TPU_CPU_FALLBACK="exp, exp_, aten::sort.stable, aten::sort")


def test_an_operator_without_a_rule() -> None:
    code = """
    import torch
    x = torch.tensor([-2.0, 3.0], device="tpu")
    assert torch.ops.aten._add_relu(x, x).cpu().tolist() == [0.0, 6.0]
    assert torch.ops.aten._add_relu_(x, x) is x and x.tolist() == [0.0, 6.0]
    assert torch.tpu.compile_stats()["fallbacks"] == {"aten::_add_relu.Tensor": 1, "aten::_add_relu_.Tensor": 1}
    """
    python(code, TORCH_TPU_CPU_FALLBACK="_add_relu,_add_relu_")


def test_general_eigenvalues_are_the_host_s_and_say_so() -> None:
    code = """
    import warnings, torch
    a = torch.tensor([[0.0, 1.0], [-4.0, 0.0]], device="tpu")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            values, vectors = torch.linalg.eig(a)
        torch.testing.assert_close((a.cfloat() @ vectors).cpu(), (vectors * values).cpu())
        assert torch.linalg.eigvals(a).device == a.device
    said = [str(w.message) for w in caught if "runs on the host" in str(w.message)]
    assert len(said) == 2 and all("eigenvalues" in text for text in said), said
    assert torch.tpu.compile_stats()["fallbacks"] == {"aten::linalg_eig": 2, "aten::_linalg_eigvals": 1}
    """
    python(code)


def test_a_name_that_is_no_operator_is_a_warning() -> None:
    code = """
    import warnings, torch
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.ones(2, device="tpu").exp()
    said = sorted(str(w.message) for w in caught if "is no operator" in str(w.message))
    assert len(said) == 2 and "aten::bogus" in said[0] and "aten::mode.nix" in said[1], said
    """
    python(code, TORCH_TPU_CPU_FALLBACK="bogus,mode.values,mode.nix,mode")
