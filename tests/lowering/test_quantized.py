"""Quantised products, fake quantisation and 8-bit floats, against the CPU's kernels or what they are defined to be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_map

from tests.support import matmul_precision

FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
aten = torch.ops.aten


@pytest.fixture(autouse=True)
def _exact() -> Any:
    torch.manual_seed(0)
    with matmul_precision("highest"):
        yield


def on_tpu(tree: Any) -> Any:
    return tree_map(lambda t: t.detach().to("tpu") if isinstance(t, torch.Tensor) else t, tree)


def check(
    op: Callable[..., Any], *args: Any, rtol: float | None = None, atol: float | None = None, **kwargs: Any
) -> None:
    """The device gives what the CPU gives."""
    expected = op(*args, **kwargs)
    got = op(*on_tpu(args), **on_tpu(kwargs))
    as_cpu = tree_map(lambda t: t.cpu(), got)
    torch.testing.assert_close(as_cpu, expected, rtol=rtol, atol=atol, equal_nan=True, check_stride=True)


def close(got: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """``got`` is ``expected``, a float32 reference, to the accuracy of ``dtype`` and of its largest element."""
    assert got.device.type == "tpu" and got.dtype == dtype
    bound = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}[dtype] * expected.abs().max().item()
    torch.testing.assert_close(got.cpu().float(), expected, rtol=0, atol=bound)


# ---- 8-bit floats ----------------------------------------------------------------------------------------------------
def bits(t: torch.Tensor) -> torch.Tensor:
    """The bytes, with one NaN for all."""
    t = t.cpu()
    return torch.where(t.float().isnan(), 255, t.view(torch.uint8).int())


@pytest.mark.parametrize(
    "source", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool]
)
@pytest.mark.parametrize("dtype", [*FLOAT8, E8M0], ids=str)
def test_conversion_to_eight_bits(dtype: torch.dtype, source: torch.dtype) -> None:
    """Bit for bit, over all half-precision numbers and many others; ties, subnormals and overflow among them."""
    halves = torch.arange(-(2**15), 2**15).to(torch.int16)
    x = torch.cat([halves.view(torch.float16).float(), halves.view(torch.bfloat16).float(), torch.randn(10000) * 100])
    x = x.nan_to_num(0, 1e9, -1e9).clamp(-1e9, 1e9) if source == torch.int64 else x
    x = x[x.abs().gt(1e-35) | x.eq(0)].to(source)  # float32's own subnormals are zero to XLA
    assert torch.equal(bits(x.to("tpu").to(dtype)), bits(x.to(dtype)))


@pytest.mark.parametrize("result", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.bool])
@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_conversion_from_eight_bits(dtype: torch.dtype, result: torch.dtype) -> None:
    check(lambda t: t.to(result), torch.arange(256).to(torch.uint8).view(dtype))


_MOVES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "clone": lambda t: t.clone(),
    "transpose": lambda t: t.t().contiguous(),
    "slice": lambda t: t[1:, 1].clone(),
    "index": lambda t: t[torch.tensor([1, 0], device=t.device)],
    "cat": lambda t: torch.cat([t, t]),
    "expand": lambda t: t[None].expand(3, 2, 2).contiguous(),
    "copy_": lambda t: torch.empty(2, 2, dtype=t.dtype, device=t.device).copy_(t.float() * 2),
    "fill_": lambda t: torch.empty(2, dtype=t.dtype, device=t.device).fill_(0.5),
    "full": lambda t: torch.full((2,), 2.0, dtype=t.dtype, device=t.device),
    "zeros and ones": lambda t: torch.cat([torch.zeros_like(t), torch.ones(2, 2, dtype=t.dtype, device=t.device)]),
    "pad": lambda t: F.pad(t, (1, 1)),
    "bytes": lambda t: t.view(torch.uint8).view(t.dtype),
}


@pytest.mark.parametrize("move", _MOVES)
@pytest.mark.parametrize("dtype", [*FLOAT8, E8M0], ids=str)
def test_moving_eight_bit_floats(dtype: torch.dtype, move: str) -> None:
    t = torch.tensor([[1.0, 2.0], [0.5, 4.0]]).to(dtype)
    try:
        expected = _MOVES[move](t)
    except RuntimeError:
        pytest.skip("the CPU has no kernel")
    assert torch.equal(bits(_MOVES[move](t.to("tpu"))), bits(expected))


@pytest.mark.parametrize("dtype", [*FLOAT8, E8M0], ids=str)
def test_printing_and_reading_eight_bit_floats(dtype: torch.dtype) -> None:
    t = torch.tensor([1.0, 2.0, 0.5]).to(dtype)
    assert "2.0000, 0.5000" in repr(t.to("tpu"))
    assert t.to("tpu").tolist() == t.tolist() and t.to("tpu")[1].item() == 2.0 and t[:1].clone().to("tpu").item() == 1.0


# ---- integers --------------------------------------------------------------------------------------------------------
def test_int_mm() -> None:
    x, y = (torch.randint(-128, 128, s, dtype=torch.int8) for s in ((32, 64), (64, 40)))
    check(torch._int_mm, x, y)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_weight_int8pack_mm(dtype: torch.dtype) -> None:
    weight = torch.randint(-128, 128, (48, 64), dtype=torch.int8)
    x, scales = torch.randn(5, 64).to(dtype), torch.rand(48).to(dtype)
    check(torch._weight_int8pack_mm, x, weight, scales, rtol=1e-4, atol=1e-3)


def int4_bytes(q: torch.Tensor) -> torch.Tensor:
    return (q[:, ::2] << 4 | q[:, 1::2]).to(torch.uint8)


@pytest.mark.parametrize("tiles", [2, 4, 8])
def test_int4_packing_is_cudas(tiles: int) -> None:
    """One word against the definition of the layout, for every lane of two tiles."""
    q = torch.randint(0, 16, (16, 256), dtype=torch.int32)
    packed = torch._convert_weight_to_int4pack(int4_bytes(q).to("tpu"), tiles).cpu()
    assert packed.shape == (2, 256 // (16 * tiles), 32, tiles // 2) and packed.dtype == torch.int32
    for lane in range(32):
        row, column = 8 + lane // 4, 16 * tiles + lane % 4 * 2  # the second tile of rows, the second outer tile
        places = [0, 8, 16, 24, 1, 9, 17, 25]
        word = sum(int(q[row, column + p]) << 4 * i for i, p in enumerate(places))
        assert int(packed[1, 1, lane, 0]) & 0xFFFFFFFF == word


@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_weight_int4pack_mm(dtype: torch.dtype, group: int) -> None:
    n, k = 48, 256
    q, x = torch.randint(0, 16, (n, k), dtype=torch.int32), torch.randn(5, k).to(dtype)
    scales = torch.randn(k // group, n, 2).to(dtype)
    on_cpu = aten._weight_int4pack_mm_for_cpu(x, aten._convert_weight_to_int4pack_for_cpu(q, 4), group, scales)
    packed = torch._convert_weight_to_int4pack(int4_bytes(q).to("tpu"), 4)
    close(torch._weight_int4pack_mm(x.to("tpu"), packed, group, scales.to("tpu")), on_cpu.float(), dtype)


# ---- scaled products -------------------------------------------------------------------------------------------------
def operands(m: int, k: int, n: int, dtype: torch.dtype = E4M3) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(m, k).to(dtype), torch.randn(n, k).to(E4M3).t()


def spread(scale: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """A grid of scales over ``shape``: each covers 1, 32 or 128 places, or all, of a dimension."""
    for dim, size in enumerate(shape):
        count = scale.shape[dim]
        block = 1 if count == size else size if count == 1 else 128 if -(-size // 128) == count else 32
        scale = scale.repeat_interleave(block, dim).narrow(dim, 0, size)
    return scale


def scaled_reference(x: torch.Tensor, y: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (x.float() * spread(a.float(), x.shape)) @ (y.float() * spread(b.float(), y.shape))


@pytest.mark.parametrize("out", [torch.float32, torch.bfloat16, torch.float16, None, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("kind", ["tensor", "row"])
def test_scaled_mm(kind: str, out: torch.dtype | None) -> None:
    """Against float32, rounded once: what the CPU's kernels give depends on the processor."""
    x, y = operands(32, 64, 48)
    a, b = (torch.tensor(0.5), torch.tensor(2.0)) if kind == "tensor" else (torch.rand(32, 1), torch.rand(1, 48))
    if kind == "row" and out not in (torch.bfloat16, torch.float32):
        out = torch.bfloat16
    expected = (x.float() @ y.float() * a * b).to(out or x.dtype)
    got = torch._scaled_mm(*on_tpu((x, y, a, b)), out_dtype=out)
    assert got.dtype == expected.dtype
    if got.dtype.itemsize == 1:
        assert torch.equal(bits(got), bits(expected))
    else:
        torch.testing.assert_close(got.cpu(), expected, rtol=1e-2, atol=1e-4)


def test_scaled_mm_options() -> None:
    x, y = operands(5, 7, 9, torch.float8_e5m2)  # no size is a multiple of 16
    a, b, bias = torch.tensor(0.5), torch.tensor(2.0), torch.randn(9).bfloat16()
    check(torch._scaled_mm, x, y, a, b, bias=bias, out_dtype=torch.bfloat16)
    out = torch.empty(0, device="tpu")
    assert torch._scaled_mm(*on_tpu((x, y, a, b)), out_dtype=torch.float32, out=out) is out
    close(out, x.float() @ y.float(), torch.float32)
    # a scale of the result counts for 8-bit results alone
    quarter = torch.tensor(0.25)
    got = torch._scaled_mm(*on_tpu((x, y, a, b)), scale_result=quarter.to("tpu"))
    assert torch.equal(bits(got), bits((x.float() @ y.float() / 4).to(torch.float8_e5m2)))


@pytest.mark.parametrize(
    "grids",
    [((200, 2), (2, 3)), ((200, 2), (2, 384)), ((2, 2), (2, 384)), ((200, 2), (1, 384)), ((200, 1), (2, 3))],
    ids=str,
)
def test_scaled_mm_by_blocks(grids: tuple[tuple[int, int], tuple[int, int]]) -> None:
    x, y = operands(200, 256, 384)
    a, b = (torch.rand(shape) for shape in grids)
    close(torch._scaled_mm(*on_tpu((x, y, a, b)), out_dtype=torch.float32), scaled_reference(x, y, a, b), torch.float32)


def swizzled(scale: torch.Tensor) -> torch.Tensor:
    """Blocks of 128 rows and 4 columns as [32][4][4], flat: what PyTorch's ``to_blocked`` makes."""
    rows, columns = -(-scale.shape[0] // 128), -(-scale.shape[1] // 4)
    padded = torch.zeros(rows * 128, columns * 4, dtype=torch.uint8)
    padded[: scale.shape[0], : scale.shape[1]] = scale
    blocks = padded.view(rows, 128, columns, 4).permute(0, 2, 1, 3).reshape(-1, 4, 32, 4)
    return blocks.transpose(1, 2).reshape(-1).view(E8M0)


def test_scaled_mm_of_microscaled_operands() -> None:
    x, y = operands(200, 288, 136)
    a, b = (torch.randint(120, 134, (n, 9)).to(torch.uint8) for n in (200, 136))
    expected = scaled_reference(x, y, a.view(E8M0).float(), b.view(E8M0).float().t())
    scales = on_tpu((swizzled(a), swizzled(b)))
    close(torch._scaled_mm(*on_tpu((x, y)), *scales, out_dtype=torch.float32), expected, torch.float32)
    kind, order = F.ScalingType.BlockWise1x32, F.SwizzleType.SWIZZLE_32_4_4
    got = F.scaled_mm(*on_tpu((x, y)), scales[0], kind, scales[1], kind, order, order, output_dtype=torch.float32)
    close(got, expected, torch.float32)


@pytest.mark.parametrize(
    ("kinds", "grids"),
    [((0, 0), ((1, 1), (1, 1))), ((1, 1), ((200, 1), (1, 384))), ((4, 5), ((200, 2), (2, 3)))],
    ids=str,
)
def test_scaled_mm_v2(kinds: tuple[int, int], grids: tuple[tuple[int, int], tuple[int, int]]) -> None:
    x, y = operands(200, 256, 384)
    a, b = (torch.rand(shape) for shape in grids)
    recipe = [F.ScalingType(kind) for kind in kinds]
    got = F.scaled_mm(*on_tpu((x, y)), a.to("tpu"), recipe[0], b.to("tpu"), recipe[1], output_dtype=torch.float32)
    close(got, scaled_reference(x, y, a, b), torch.float32)


def test_scaled_mm_refuses() -> None:
    x, y = on_tpu(operands(32, 64, 48))
    one = torch.ones((), device="tpu")
    with pytest.raises((RuntimeError, ValueError), match=r"(?s)Invalid scaling configuration.*\(32, 1\)"):
        torch._scaled_mm(x, y, torch.ones(31, 1, device="tpu"), torch.ones(1, 48, device="tpu"))
    with pytest.raises((RuntimeError, ValueError), match="fp8|float8"):
        torch._scaled_mm(x.float(), y, one, one)
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        torch._scaled_mm(x, x, one, one)


# ---- grouped products ------------------------------------------------------------------------------------------------
OFFSETS = torch.tensor([3, 3, 14], dtype=torch.int32)  # an empty group; the last two places are in none
RANGES = ((0, 3), (3, 3), (3, 14))
GROUPED = {
    "2x3": ((16, 32), (3, 32, 24)),
    "3x2": ((3, 24, 32), (32, 16)),
    "2x2": ((24, 16), (16, 32)),
    "3x3": ((3, 8, 32), (3, 32, 24)),
}


def grouped_reference(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Float32; zeros where no group reaches."""
    if x.ndim == y.ndim == 3:
        return x @ y
    if x.ndim == y.ndim == 2:
        return torch.stack([x[:, a:b] @ y[a:b] for a, b in RANGES])
    out = torch.zeros(x.shape[-2], y.shape[-1])
    for i, (a, b) in enumerate(RANGES):
        if x.ndim == 2:
            out[a:b] = x[a:b] @ y[i]
        else:
            out[:, a:b] = x[i] @ y[:, a:b]
    return out


@pytest.mark.parametrize("case", GROUPED)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_grouped_mm(dtype: torch.dtype, case: str) -> None:
    x, y = (torch.randn(shape).to(dtype) for shape in GROUPED[case])
    offs = None if case == "3x3" else OFFSETS
    close(torch._grouped_mm(*on_tpu((x, y)), offs=on_tpu(offs)), grouped_reference(x.float(), y.float()), dtype)


def test_grouped_mm_compiles_in_float32() -> None:
    x, y = torch.randn(8, 4), torch.randn(3, 4, 8)
    offs = torch.tensor([2, 5, 8], dtype=torch.int32)
    results = []
    for device, wrap in (("cpu", lambda f: f), ("tpu", torch.compile)):
        leaves = [t.detach().to(device).requires_grad_() for t in (x, y)]
        result = wrap(lambda x, y, offs: torch._grouped_mm(x, y, offs=offs).pow(2))(*leaves, offs.to(device))
        result.sum().backward()
        results.append([result.detach().cpu(), *(t.grad.cpu() for t in leaves)])
    torch.testing.assert_close(results[1], results[0], rtol=0.02, atol=0.1)


def test_grouped_mm_gradients_are_the_cpus() -> None:
    offs = torch.tensor([3, 3, 16], dtype=torch.int32)
    x, y = (torch.randn(shape).bfloat16() for shape in GROUPED["2x3"])
    grads = []
    for device in ("cpu", "tpu"):
        leaves = [t.detach().to(device).requires_grad_() for t in (x, y)]
        torch._grouped_mm(*leaves, offs=offs.to(device)).float().pow(2).sum().backward()
        grads.append([leaf.grad.cpu() for leaf in leaves])
    torch.testing.assert_close(grads[1], grads[0])


def test_another_division_into_groups_is_no_new_program() -> None:
    x, y = on_tpu([torch.randn(shape).bfloat16() for shape in GROUPED["2x3"]])
    torch._grouped_mm(x, y, offs=OFFSETS.to("tpu"))
    before = torch.tpu.compile_stats()["misses"]
    torch._grouped_mm(x, y, offs=torch.tensor([1, 8, 9], dtype=torch.int32).to("tpu"))
    assert torch.tpu.compile_stats()["misses"] == before


@pytest.mark.parametrize("case", GROUPED)
def test_scaled_grouped_mm(case: str) -> None:
    x, y = torch.randn(GROUPED[case][0]).to(E4M3), torch.randn(GROUPED[case][1]).mT.contiguous().to(E4M3).mT
    offs = None if case == "3x3" else OFFSETS
    if case == "2x2":
        a, b = torch.rand(3 * 24), torch.rand(3 * 32)
        expected = grouped_reference(x.float(), y.float()) * a.view(3, 24, 1) * b.view(3, 1, 32)
    else:
        a, b = torch.rand(x.shape[:-1]), torch.rand((*y.shape[:-2], y.shape[-1]))
        expected = grouped_reference(x.float() * a[..., None], y.float() * b[..., None, :])
    got = torch._scaled_grouped_mm(*on_tpu((x, y, a, b)), offs=on_tpu(offs), out_dtype=torch.float32)
    close(got, expected, torch.float32)


# ---- fake quantisation -----------------------------------------------------------------------------------------------
RANGES_OF_INTEGERS = [(0, 255), (-128, 127)]
NUMBERS = torch.cat([torch.tensor([0.0, -0.0, 0.25, 0.15, -0.25, 30.0, -1e9, 5e4]), torch.arange(-80, 80) / 4]).view(
    7, 24
)
ONE, ZERO = torch.tensor([0.1]), torch.tensor([3], dtype=torch.int32)
SCALES = torch.linspace(0.05, 0.4, 7)


@pytest.mark.parametrize("limits", RANGES_OF_INTEGERS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_fake_quantize(dtype: torch.dtype, limits: tuple[int, int]) -> None:
    x = NUMBERS.to(dtype)
    check(aten.fake_quantize_per_tensor_affine_cachemask, x, 0.1, 3, *limits)
    for enabled in (0, 1):
        flag = torch.tensor([enabled])
        check(aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams, x, ONE, ZERO, flag, *limits)
    check(aten.fake_quantize_per_channel_affine_cachemask, x, SCALES, torch.arange(7, dtype=torch.int32), 0, *limits)
    check(aten.fake_quantize_per_channel_affine_cachemask, x.t(), SCALES, torch.arange(7) / 3, 1, *limits)
    check(torch._fake_quantize_learnable_per_tensor_affine, x, ONE, torch.tensor([2.5]), *limits, 0.5)
    check(torch._fake_quantize_learnable_per_channel_affine, x, SCALES, torch.arange(7) / 2, 0, *limits, 0.5)


@pytest.mark.parametrize("limits", RANGES_OF_INTEGERS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_of_learnable_fake_quantize(dtype: torch.dtype, limits: tuple[int, int]) -> None:
    x, grad = NUMBERS.clamp(-60, 60).to(dtype), torch.randn(7, 24).to(dtype)
    one = aten._fake_quantize_learnable_per_tensor_affine_backward
    check(one, grad, x, ONE, torch.tensor([2.5]), *limits, 0.5, rtol=1e-4, atol=1e-3)
    zeros = torch.tensor([0, 0.5, 1.5, 2.5, 3.4, 300, -300])
    channels = aten._fake_quantize_learnable_per_channel_affine_backward
    check(channels, grad, x, SCALES, zeros, 0, *limits, 0.5, rtol=1e-4, atol=1e-3)


def test_fake_quantize_in_autograd() -> None:
    def run(x: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> list[torch.Tensor]:
        x, scale, zero = (t.detach().requires_grad_(t.is_floating_point()) for t in (x, scale, zero))
        total = torch.fake_quantize_per_tensor_affine(x, 0.01, 0, 0, 255).sum()
        total = total + torch._fake_quantize_learnable_per_channel_affine(x, scale, zero, 0, 0, 255, 0.1).cos().sum()
        total.backward()
        return [x.grad, scale.grad, zero.grad]

    check(run, NUMBERS.clamp(-60, 60), SCALES, torch.arange(7) / 2, rtol=1e-4, atol=1e-3)


def test_another_scale_is_no_new_program() -> None:
    x = NUMBERS.to("tpu")
    torch.fake_quantize_per_tensor_affine(x, 0.1, 3, 0, 255)
    before = torch.tpu.compile_stats()["misses"]
    torch.fake_quantize_per_tensor_affine(x, 0.2, 5, 0, 255)
    assert torch.tpu.compile_stats()["misses"] == before
