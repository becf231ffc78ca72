"""Operators at the shapes of real models on the CPU platform, against torch CPU in the same run.

``python benchmarks/ops.py [PATTERN] [--dtype float32] [--save FILE]`` runs the cases whose names hold PATTERN. Every
call is waited for. Products are compared at precision ``highest``, the same mathematics; a few cases also run at
``medium``. Cases with gradients count the forward and the backward pass. On a busy machine, ``--processor-time`` gives
both one core and counts the time that they work instead of the time that passes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["TORCH_TPU_CACHE"] = "0"  # every program is compiled here: its time is part of the report
if "--processor-time" in sys.argv:
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # before either library counts the cores

import torch
import torch.nn.functional as F
from common import row, together

TARGETS = {torch.float32: 1.0, torch.bfloat16: 0.5}
WORST = 3.0
COMPILE_MS = 30.0
#: Why a case may be worse than WORST, by the beginning of its name.
HANDOVER = "XLA hands all but the smallest programs to a thread: 8 us"
EIGEN = "XLA's convolution is Eigen's, which has no bfloat16 and is slow with few channels in a group"
REASONS = {
    "conv2d small CNN 64x1": EIGEN,
    "conv2d ResNet stem": EIGEN,
    "conv2d groups": EIGEN,
    "conv2d depthwise": "XLA has no kernel for it: sums of products, one element of the kernel after the other",
    "cross_entropy 64x10": HANDOVER,
    "sigmoid 64x64": HANDOVER,
    "add 64x64": HANDOVER,
    "argmax 64x10": HANDOVER,
    "cumsum int64": HANDOVER,
    "gather 512x32000": HANDOVER,
    "embedding 1000x64": HANDOVER,
    "index_select": "XLA copies element by element what torch copies row by row",
    "embedding 32000x512": "the sum is float32: twice the memory to clear, then rounded; torch sums in bfloat16",
    "amax": "rows are reduced eight elements at a time",
    "cat 4 of": "XLA joins bfloat16 arrays element by element",
    "max_pool2d 16x64x56x56": "nine passes, none of which scatters: what a TPU wants",
}

Make = Callable[[torch.dtype], torch.Tensor]


def values(*shape: int) -> Make:
    return lambda dtype: torch.randn(shape).to(dtype)


def weights(*shape: int) -> Make:
    """Scaled so that a product keeps its operand's size."""
    return lambda dtype: (torch.randn(shape) / shape[-1] ** 0.5).to(dtype)


def positive(*shape: int) -> Make:
    return lambda dtype: torch.rand(shape).add(0.1).to(dtype)


def index(high: int, *shape: int) -> Make:
    return lambda _: torch.randint(high, shape)


def mask(*shape: int) -> Make:
    return lambda _: torch.rand(shape) < 0.3


@dataclass(frozen=True)
class Case:
    """``function(*inputs)``; with ``grad`` also its gradients by the floating inputs."""

    name: str
    function: Callable[..., torch.Tensor]
    inputs: tuple[Make, ...]
    grad: bool = False
    precision: str = "HIGHEST"

    def bound(self, tensors: list[torch.Tensor]) -> Callable[[], object]:
        if not self.grad:
            return lambda: self.function(*tensors)
        leaves = [t for t in tensors if t.is_floating_point()]
        for t in leaves:
            t.requires_grad_()
        out = torch.ones_like(self.function(*tensors)).to(tensors[0].device)
        return lambda: torch.autograd.grad(self.function(*tensors), leaves, out)


CASES: list[Case] = []


def case(
    name: str, function: Callable[..., Any], *inputs: Make, both: bool = False, grad: bool = False, **more: Any
) -> None:
    """Adds a case; ``both`` adds it without and with gradients."""
    if both or not grad:
        CASES.append(Case(name, function, inputs, **more))
    if both or grad:
        CASES.append(Case(f"{name}, forward and backward", function, inputs, grad=True, **more))


# ---- products -------------------------------------------------------------------------------------------------------
case("mm 256^3", torch.mm, values(256, 256), weights(256, 256))
case("mm 1024^3", torch.mm, values(1024, 1024), weights(1024, 1024))
case("mm 1024^3, medium", torch.mm, values(1024, 1024), weights(1024, 1024), precision="DEFAULT")
case("linear GPT-2 qkv 512x768 -> 2304", F.linear, values(512, 768), weights(2304, 768), values(2304), both=True)
case("linear GPT-2 mlp 512x768 -> 3072, medium", F.linear, values(512, 768), weights(3072, 768), precision="DEFAULT")
case("linear MiniLM 8x64x384 -> 1536", F.linear, values(8, 64, 384), weights(1536, 384), values(1536), both=True)
case("linear Llama-small down 128x2816 -> 1024", F.linear, values(128, 2816), weights(1024, 2816))
case("linear decode 1x1024 -> 2816", F.linear, values(1, 1024), weights(2816, 1024))
case("linear head 64x768 -> 32000", F.linear, values(64, 768), weights(32000, 768))
case("bmm 48x128x64x128", torch.bmm, values(48, 128, 64), values(48, 64, 128))
case("bmm 96x64x64x32, transposed", lambda a, b: torch.bmm(a, b.mT), values(96, 64, 32), values(96, 64, 32))
case("einsum bhld,bhsd->bhls", lambda q, k: torch.einsum("bhld,bhsd->bhls", q, k), *[values(4, 12, 128, 64)] * 2)
case("mv 2816x1024", torch.mv, weights(2816, 1024), values(1024))


# ---- convolutions ---------------------------------------------------------------------------------------------------
def conv(stride: int = 1, padding: int = 1, groups: int = 1) -> Callable[..., torch.Tensor]:
    return lambda x, w: F.conv2d(x, w, stride=stride, padding=padding, groups=groups)


case("conv2d small CNN 64x1x28x28, 32 of 3x3", conv(), values(64, 1, 28, 28), weights(32, 1, 3, 3), both=True)
case("conv2d small CNN 64x32x14x14, 64 of 3x3", conv(), values(64, 32, 14, 14), weights(64, 32, 3, 3), both=True)
case("conv2d ResNet stem 4x3x224x224, 64 of 7x7 /2", conv(2, 3), values(4, 3, 224, 224), weights(64, 3, 7, 7))
case("conv2d ResNet 4x64x56x56, 64 of 3x3", conv(), values(4, 64, 56, 56), weights(64, 64, 3, 3), both=True)
case("conv2d ResNet 4x128x56x56, 128 of 3x3 /2", conv(2), values(4, 128, 56, 56), weights(128, 128, 3, 3), both=True)
case("conv2d ResNet 4x256x14x14, 1024 of 1x1", conv(1, 0), values(4, 256, 14, 14), weights(1024, 256, 1, 1), both=True)
case("conv2d depthwise 4x96x28x28, 3x3", conv(1, 1, 96), values(4, 96, 28, 28), weights(96, 1, 3, 3), both=True)
case(
    "conv2d groups 4x128x28x28, 3x3, 4 groups", conv(1, 1, 4), values(4, 128, 28, 28), weights(128, 32, 3, 3), both=True
)
case("conv2d ViT patches 4x3x224x224, 192 of 16x16 /16",
     lambda x, w: F.conv2d(x, w, stride=16), values(4, 3, 224, 224), weights(192, 3, 16, 16))  # fmt: skip
case(
    "conv1d speech 4x80x500, 256 of 3", lambda x, w: F.conv1d(x, w, padding=1), values(4, 80, 500), weights(256, 80, 3)
)
case(
    "conv_transpose2d 4x64x16x16, 4x4 /2",
    lambda x, w: F.conv_transpose2d(x, w, stride=2, padding=1),
    values(4, 64, 16, 16),
    weights(64, 32, 4, 4),
)
case("max_pool2d 16x64x56x56, 3x3 /2", lambda x: F.max_pool2d(x, 3, 2, 1), values(16, 64, 56, 56), both=True)
case("max_pool2d 64x32x28x28, 2x2", lambda x: F.max_pool2d(x, 2), values(64, 32, 28, 28), both=True)
case("avg_pool2d 16x64x28x28, 2x2", lambda x: F.avg_pool2d(x, 2), values(16, 64, 28, 28), both=True)
case("adaptive_avg_pool2d 16x512x7x7 -> 1", lambda x: F.adaptive_avg_pool2d(x, 1), values(16, 512, 7, 7))
case("interpolate bilinear 4x64x28x28 -> 56",
     lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), values(4, 64, 28, 28))  # fmt: skip

# ---- softmax, losses, normalisations --------------------------------------------------------------------------------
case("softmax scores 4x12x128x128", lambda x: x.softmax(-1), values(4, 12, 128, 128), both=True)
case("softmax 64x10", lambda x: x.softmax(-1), values(64, 10))
case("log_softmax 512x32000", lambda x: x.log_softmax(-1), values(512, 32000))
case("cross_entropy 64x10", F.cross_entropy, values(64, 10), index(10, 64), both=True)
case("cross_entropy 512x32000", F.cross_entropy, values(512, 32000), index(32000, 512), both=True)
case("mse_loss 64x1024", F.mse_loss, values(64, 1024), values(64, 1024), both=True)
case(
    "layer_norm 512x768", lambda x, w, b: F.layer_norm(x, (768,), w, b), values(512, 768), *[values(768)] * 2, both=True
)
case("layer_norm 8x64x384", lambda x, w, b: F.layer_norm(x, (384,), w, b), values(8, 64, 384), *[values(384)] * 2)
case("rms_norm 512x1024", lambda x, w: F.rms_norm(x, (1024,), w), values(512, 1024), values(1024), both=True)
case("group_norm 4x64x32x32, 32 groups", lambda x: F.group_norm(x, 32), values(4, 64, 32, 32), both=True)
case("batch_norm train 16x64x28x28", lambda x, w, b: F.batch_norm(x, None, None, w, b, True),
     values(16, 64, 28, 28), values(64), values(64), both=True)  # fmt: skip
case("batch_norm eval 16x64x28x28", F.batch_norm, values(16, 64, 28, 28), *[positive(64)] * 4)

# ---- activations, attention -----------------------------------------------------------------------------------------
case("gelu 512x3072", F.gelu, values(512, 3072), both=True)
case("gelu tanh 512x3072", lambda x: F.gelu(x, approximate="tanh"), values(512, 3072))
case("silu 512x2816", F.silu, values(512, 2816), both=True)
case("relu 64x32x28x28", F.relu, values(64, 32, 28, 28), both=True)
case("sigmoid 64x64", torch.sigmoid, values(64, 64))
case("tanh 512x768", torch.tanh, values(512, 768))
case(
    "attention GPT-2 2x12x256x64, causal",
    lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    *[values(2, 12, 256, 64)] * 3,
    both=True,
)
case("attention MiniLM 8x12x64x32", F.scaled_dot_product_attention, *[values(8, 12, 64, 32)] * 3)
case(
    "attention decode 1x12x1x64 on 512",
    F.scaled_dot_product_attention,
    values(1, 12, 1, 64),
    *[values(1, 12, 512, 64)] * 2,
)

# ---- lookups, positions ---------------------------------------------------------------------------------------------
case("embedding 32000x512, 8x128", lambda w, i: F.embedding(i, w), weights(32000, 512), index(32000, 8, 128), both=True)
case("embedding 1000x64, 64x16", lambda w, i: F.embedding(i, w), weights(1000, 64), index(1000, 64, 16), both=True)
case("index_select 4096x256, 1024 rows", lambda x, i: x.index_select(0, i), values(4096, 256), index(4096, 1024))
case("gather 512x32000, one each", lambda x, i: x.gather(1, i), values(512, 32000), index(32000, 512, 1))
case("gather 256x256", lambda x, i: x.gather(1, i), values(256, 256), index(256, 256, 256))
case("x[i, j] 64x128x256", lambda x, i, j: x[i, j], values(64, 128, 256), index(64, 512), index(128, 512))
case(
    "scatter_add 4096x64",
    lambda x, i, y: x.scatter_add(0, i, y),
    values(4096, 64),
    index(4096, 2048, 64),
    values(2048, 64),
)
case(
    "index_add 4096x256, 1024 rows",
    lambda x, i, y: x.index_add(0, i, y),
    values(4096, 256),
    index(4096, 1024),
    values(1024, 256),
)
case(
    "index_put 2048x256, 512 rows",
    lambda x, i, y: x.index_put([i], y),
    values(2048, 256),
    index(2048, 512),
    values(512, 256),
)
case("index_put accumulate 2048x256, 512 rows", lambda x, i, y: x.index_put([i], y, True),
     values(2048, 256), index(2048, 512), values(512, 256))  # fmt: skip

# ---- sorting, scans -------------------------------------------------------------------------------------------------
case("sort 64x1000", lambda x: x.sort(-1)[0], values(64, 1000))
case("sort 100000", lambda x: x.sort()[0], values(100000))
case("argsort 256x64", lambda x: x.argsort(-1), values(256, 64))
case("topk 8x32000, 50", lambda x: x.topk(50)[0], values(8, 32000))
case("topk 512x64, 2", lambda x: x.topk(2)[0], values(512, 64))
case("argmax 64x32000", lambda x: x.argmax(-1), values(64, 32000))
case("argmax 64x10", lambda x: x.argmax(-1), values(64, 10))
case("max.dim 256x1024", lambda x: x.max(-1)[0], values(256, 1024))
case("cumsum 64x4096", lambda x: x.cumsum(-1), values(64, 4096))
case("cumsum 8x32000", lambda x: x.cumsum(-1), values(8, 32000))
case("cumsum int64 8x512", lambda i: i.cumsum(-1), index(2, 8, 512))

# ---- masks, joining, copies -----------------------------------------------------------------------------------------
case("where 512x1024", torch.where, mask(512, 1024), values(512, 1024), values(512, 1024))
case(
    "masked_fill 4x12x128x128",
    lambda x, m: x.masked_fill(m, float("-inf")),
    values(4, 12, 128, 128),
    mask(4, 1, 128, 128),
)
case("tril 512x512", torch.tril, values(512, 512))
case("cat 4 of 8x128x512", lambda *xs: torch.cat(xs, -1), *[values(8, 128, 512)] * 4)
case(
    "cat key-value cache 2x12x511x64 + 1",
    lambda a, b: torch.cat([a, b], 2),
    values(2, 12, 511, 64),
    values(2, 12, 1, 64),
)
case("stack 8 of 64x512", lambda *xs: torch.stack(xs), *[values(64, 512)] * 8)
case("pad 16x64x28x28 by 1", lambda x: F.pad(x, (1, 1, 1, 1)), values(16, 64, 28, 28))
case("transpose copy 1024x1024", lambda x: x.t().contiguous(), values(1024, 1024))
case("heads copy 8x128x12x64", lambda x: x.transpose(1, 2).contiguous(), values(8, 128, 12, 64))
case(
    "channels_last copy 16x64x28x28", lambda x: x.contiguous(memory_format=torch.channels_last), values(16, 64, 28, 28)
)
case("clone 1024x1024", torch.clone, values(1024, 1024))
case("roll 4x56x56x96", lambda x: x.roll((3, 3), (1, 2)), values(4, 56, 56, 96))
case("to float32 / bfloat16 1024x1024",
     lambda x: x.to(torch.bfloat16 if x.dtype == torch.float32 else torch.float32), values(1024, 1024))  # fmt: skip
case("to int64 1024x256", lambda x: x.to(torch.int64), values(1024, 256))

# ---- reductions, element-wise ---------------------------------------------------------------------------------------
case("sum 1024x1024", torch.sum, values(1024, 1024))
case("sum rows 1024x1024", lambda x: x.sum(1), values(1024, 1024))
case("sum columns 1024x1024", lambda x: x.sum(0), values(1024, 1024))
case("sum to bias 16x64x28x28", lambda x: x.sum((0, 2, 3)), values(16, 64, 28, 28))
case("mean 8x128x384 over tokens", lambda x: x.mean(1), values(8, 128, 384))
case("var 512x768", lambda x: x.var(-1), values(512, 768))
case("amax 512x1024", lambda x: x.amax(-1), values(512, 1024))
case("amax columns 512x1024", lambda x: x.amax(0), values(512, 1024))
case("norm 1024x1024", torch.linalg.vector_norm, values(1024, 1024))
case("any 1024x1024", torch.any, mask(1024, 1024))
case("add 64x64", torch.add, values(64, 64), values(64, 64))
case("add 1024x1024", torch.add, values(1024, 1024), values(1024, 1024))
case("add bias 512x3072", torch.add, values(512, 3072), values(3072))
case("mul by a number 512x768", lambda x: x * 0.5, values(512, 768))
case("residual chain 512x768", lambda x, y, z: (x * y + z) * 0.5 - x, *[values(512, 768)] * 3)
case("rotary 4x12x128x64", lambda x, c, s: x * c + torch.cat((-x[..., 32:], x[..., :32]), -1) * s,
     values(4, 12, 128, 64), values(128, 64), values(128, 64))  # fmt: skip
case("exp 512x768", torch.exp, values(512, 768))
case("pow 2 512x768", lambda x: x.pow(2), values(512, 768))
case("rsqrt 512x768", torch.rsqrt, positive(512, 768))
case("div 512x1024", torch.div, values(512, 1024), positive(512, 1024))
case("clamp 512x1024", lambda x: x.clamp(-1, 1), values(512, 1024))

# ---- random numbers -------------------------------------------------------------------------------------------------
case("uniform_ 512x768", lambda x: x.clone().uniform_(), values(512, 768))
case("normal_ 512x768", lambda x: x.clone().normal_(), values(512, 768))
case("dropout 512x768", lambda x: F.dropout(x, 0.1), values(512, 768), both=True)
case("multinomial 8x32000, 1", lambda p: p.multinomial(1), positive(8, 32000))
case("multinomial 64x100, 4", lambda p: p.multinomial(4), positive(64, 100))


# ---- measuring ------------------------------------------------------------------------------------------------------
def waited(function: Callable[[], object]) -> Callable[[], object]:
    def call() -> object:
        result = function()  # alive until it is there: nothing waits for a result that nobody holds
        torch.tpu.synchronize()
        return result

    return call


def measure(c: Case, dtype: torch.dtype, repeats: int, clock: Callable[[], float]) -> tuple[float, float, list[float]]:
    """Microseconds on torch CPU and on the backend, and seconds to trace and compile each of the case's programs."""
    tensors = [make(dtype) for make in c.inputs]
    with torch.tpu.precision(torch.tpu.Precision[c.precision]):
        cpu, tpu = c.bound(tensors), waited(c.bound([t.detach().to("tpu") for t in tensors]))
        before = len(torch.tpu.compile_stats()["compiles"])
        tpu()
        compiles = [c["seconds"] for c in torch.tpu.compile_stats()["compiles"][before:] if c["source"] == "compiled"]
        cpu(), tpu()
        start = clock()
        cpu()
        one = clock() - start
        calls = max(1, min(200, int(0.005 / max(one, 1e-6))))
        times = together(cpu, tpu, calls=calls, repeats=repeats if one < 0.3 else 3, clock=clock)
    return *times, compiles


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pattern", nargs="?", default="", help="run the cases whose names hold this")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="only this one; default: both")
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--processor-time", action="store_true", help="one core each, and the time that it works")
    parser.add_argument("--save", type=Path, help="write the ratios to a JSON file")
    options = parser.parse_args()
    clock = time.process_time if options.processor_time else time.perf_counter
    if not options.processor_time and os.getloadavg()[0] > 0.5:
        print("The machine is busy: the ratios below mean little, --processor-time gives better ones.")
    torch.manual_seed(0)
    chosen = [c for c in CASES if options.pattern in c.name]
    dtypes = [torch.float32, torch.bfloat16] if options.dtype is None else [getattr(torch, options.dtype)]
    ratios: dict[str, dict[str, float]] = {}
    compiles: list[float] = []
    for dtype in dtypes:
        name = str(dtype).removeprefix("torch.")
        print(f"-- {name}: microseconds on the backend / on torch CPU", flush=True)
        found = ratios[name] = {}
        for c in chosen:
            cpu, tpu, seconds = measure(c, dtype, options.repeats, clock)
            compiles += seconds
            found[c.name] = tpu / cpu
            row(c.name, f"{tpu:.0f} / {cpu:.0f} us", tpu / cpu, None if tpu / cpu <= WORST else WORST)
            if tpu / cpu > WORST:
                print(f"    {next((why for n, why in REASONS.items() if c.name.startswith(n)), 'no reason known')}")
    print("-- summary")
    for dtype in dtypes:
        found = ratios[str(dtype).removeprefix("torch.")]
        mean = statistics.geometric_mean(found.values())
        row(f"geometric mean of {len(found)} cases, {dtype}", "", mean, TARGETS[dtype])
        slow = [f"{n} {r:.1f}x" for n, r in found.items() if r > WORST]
        row(f"cases worse than {WORST:g}x, {dtype}", str(len(slow)))
    middle = 1e3 * statistics.median(compiles or [0.0])
    row(
        f"median time to trace and compile one of {len(compiles)} programs",
        f"{middle:.1f} ms",
        middle / COMPILE_MS,
        1.0,
    )
    if options.save:
        options.save.write_text(json.dumps(ratios, indent=1))


if __name__ == "__main__":
    main()
