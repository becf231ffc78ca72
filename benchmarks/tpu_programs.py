"""What libtpu makes of this project's programs, against its programs for the same models written in JAX: no TPU needed.

    python benchmarks/tpu_programs.py [--models gpt2,llama,resnet] [--kinds forward,train] [--dtypes bfloat16,float32]
                                      [--topologies v6e] [--layers 2] [--operations]

The mathematics is the same on both sides: parameters, activations and the optimizer's state have the dtype of the row;
norms, softmax, activation functions, the loss and the update of AdamW are computed in float32 and rounded once. JAX's
programs are compiled with JAX's options, ours with ours. Every row gives our number, JAX's and the ratio:

    flops       XLA's count, element-wise operations included
    bytes       XLA's ``bytes accessed``
    temporary   bytes of temporaries
    cycles      the compiler's ``estimated_cycles``, loops as often as they run

``--operations`` compares the cycles of the optimised programs by kind of operation, to see where a difference comes
from. Numbers are kept in ``build/tpu_programs`` with both texts of the program, so what was compiled once, also by a
run that was stopped, is not compiled again. A training step of a whole model takes minutes on each side: layers repeat,
so ``--layers 2`` tells most of it. Needs the packages libtpu and jax.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import itertools
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from common import row
from torch import nn

from torch_tpu import aot
from torch_tpu.aot import hlo, topology
from torch_tpu.aot.chips import CHIPS
from torch_tpu.aot.cost import operations
from torch_tpu.programs import options as xla_options

RATE, DECAY = 1e-3, 0.01
CACHE = Path(__file__).resolve().parents[1] / "build" / "tpu_programs"
MOST = {"flops": 1.01, "bytes": 1.02, "temporary": 1.02, "cycles": 1.02}


# ---- models ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Sizes:
    """Of a decoder."""

    layers: int
    width: int
    heads: int
    groups: int  # heads of keys and values
    hidden: int
    words: int
    length: int
    batch: int
    llama: bool

    @property
    def head(self) -> int:
        return self.width // self.heads


DECODERS = {
    "gpt2": Sizes(12, 768, 12, 12, 3072, 50304, 1024, 8, False),
    "llama": Sizes(16, 2048, 32, 8, 8192, 128256, 2048, 4, True),
}
IMAGES, WIDE = 64, 224


def sizes(name: str, layers: int | None) -> Sizes:
    return DECODERS[name] if layers is None else replace(DECODERS[name], layers=layers)


class Attention(nn.Module):
    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.s = s
        self.q = nn.Linear(s.width, s.width, bias=not s.llama)
        self.k = nn.Linear(s.width, s.groups * s.head, bias=not s.llama)
        self.v = nn.Linear(s.width, s.groups * s.head, bias=not s.llama)
        self.out = nn.Linear(s.width, s.width, bias=not s.llama)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        b, n, _ = x.shape
        q, k, v = (f(x).view(b, n, -1, self.s.head).transpose(1, 2) for f in (self.q, self.k, self.v))
        if self.s.llama:
            q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.s.groups != self.s.heads)
        return self.out(a.transpose(1, 2).reshape(b, n, -1))


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


class Block(nn.Module):
    def __init__(self, s: Sizes) -> None:
        super().__init__()
        norm = (lambda: nn.RMSNorm(s.width, eps=1e-5)) if s.llama else (lambda: nn.LayerNorm(s.width))
        self.norm1, self.attention, self.norm2 = norm(), Attention(s), norm()
        self.gate = nn.Linear(s.width, s.hidden, bias=False) if s.llama else None
        self.up = nn.Linear(s.width, s.hidden, bias=not s.llama)
        self.down = nn.Linear(s.hidden, s.width, bias=not s.llama)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x), cos, sin)
        h = self.norm2(x)
        h = F.gelu(self.up(h), approximate="tanh") if self.gate is None else F.silu(self.gate(h)) * self.up(h)
        return x + self.down(h)


class Decoder(nn.Module):
    """A causal language model; ``forward`` gives logits."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.words = nn.Embedding(s.words, s.width)
        self.places = None if s.llama else nn.Embedding(s.length, s.width)
        self.blocks = nn.ModuleList([Block(s) for _ in range(s.layers)])
        self.norm = nn.RMSNorm(s.width, eps=1e-5) if s.llama else nn.LayerNorm(s.width)
        self.register_buffer("cos", torch.empty(s.length, s.head // 2))
        self.register_buffer("sin", torch.empty(s.length, s.head // 2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        if self.places is not None:
            x = x + self.places.weight
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return F.linear(self.norm(x), self.words.weight)


class Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        self.short = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if stride > 1 else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(y + (x if self.short is None else self.short(x)))


class ResNet18(nn.Module):
    """ResNet-18 (He et al. 2015), with the statistics of the batch and no running ones."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64)
        widths = [64, 64, 64, 128, 128, 256, 256, 512, 512]
        self.blocks = nn.Sequential(*[Residual(a, b, 2 if b > a else 1) for a, b in itertools.pairwise(widths)])
        self.head = nn.Linear(512, 1000)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.track_running_stats = False
                module.running_mean = module.running_var = module.num_batches_tracked = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.stem(x))), 3, 2, 1)
        return self.head(self.blocks(x).mean((2, 3)))


def torch_model(name: str, dtype: torch.dtype, layers: int | None) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """The model, its input and the targets, without memory."""
    with torch.device("meta"):
        if name == "resnet":
            images = torch.empty(IMAGES, 3, WIDE, WIDE, dtype=dtype)
            return ResNet18().to(dtype), images, torch.empty(IMAGES, dtype=torch.int64)
        s = sizes(name, layers)
        model = Decoder(s).to(dtype)
        model.cos, model.sin = model.cos.float(), model.sin.float()
        ids = torch.empty(s.batch, s.length, dtype=torch.int64)
        return model, ids, ids


def torch_loss(model: nn.Module, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    logits = model(x)
    return F.cross_entropy(logits.float().flatten(0, -2), targets.flatten())


# ---- the same in JAX ------------------------------------------------------------------------------------------------
def jax_model(name: str, layers: int | None) -> Callable[..., Any]:
    """``logits(parameters, x)`` on a dict of arrays with PyTorch's names."""
    import jax
    import jax.numpy as jnp

    def linear(p: Any, at: str, x: Any) -> Any:
        y = x @ p[f"{at}.weight"].T
        return y + p[f"{at}.bias"] if f"{at}.bias" in p else y

    def norm(p: Any, at: str, x: Any) -> Any:
        wide, weight = x.astype(jnp.float32), p[f"{at}.weight"].astype(jnp.float32)
        if f"{at}.bias" not in p:
            y = wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + 1e-5) * weight
        else:
            center = wide - wide.mean(-1, keepdims=True)
            y = center * jax.lax.rsqrt((center * center).mean(-1, keepdims=True) + 1e-5) * weight
            y = y + p[f"{at}.bias"].astype(jnp.float32)
        return y.astype(x.dtype)

    def turned(x: Any, p: Any) -> Any:
        a, b = jnp.split(x.astype(jnp.float32), 2, -1)
        cos, sin = p["cos"][:, None], p["sin"][:, None]
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)

    def decoder(p: Any, ids: Any) -> Any:
        s = sizes(name, layers)
        x = p["words.weight"][ids]
        x = x if s.llama else x + p["places.weight"]
        b, n, _ = x.shape
        for i in range(s.layers):
            at = f"blocks.{i}"
            h = norm(p, f"{at}.norm1", x)
            q, k, v = (linear(p, f"{at}.attention.{j}", h).reshape(b, n, -1, s.head) for j in "qkv")
            if s.llama:
                q, k = turned(q, p), turned(k, p)
            a = jax.nn.dot_product_attention(q, k, v, is_causal=True)
            x = x + linear(p, f"{at}.attention.out", a.reshape(b, n, -1))
            h = norm(p, f"{at}.norm2", x)
            if s.llama:
                gate = jax.nn.silu(linear(p, f"{at}.gate", h).astype(jnp.float32)).astype(x.dtype)
                h = gate * linear(p, f"{at}.up", h)
            else:
                h = jax.nn.gelu(linear(p, f"{at}.up", h).astype(jnp.float32), approximate=True).astype(x.dtype)
            x = x + linear(p, f"{at}.down", h)
        return norm(p, "norm", x) @ p["words.weight"].T

    def conv(p: Any, at: str, x: Any, stride: int, pad: int) -> Any:
        return jax.lax.conv_general_dilated(x, p[f"{at}.weight"], (stride, stride), [(pad, pad)] * 2)

    def batch_norm(p: Any, at: str, x: Any) -> Any:
        wide = x.astype(jnp.float32)
        mean = wide.mean((0, 2, 3), keepdims=True)
        var = ((wide - mean) ** 2).mean((0, 2, 3), keepdims=True)
        weight, bias = (p[f"{at}.{k}"].astype(jnp.float32)[:, None, None] for k in ("weight", "bias"))
        return ((wide - mean) * jax.lax.rsqrt(var + 1e-5) * weight + bias).astype(x.dtype)

    def resnet(p: Any, x: Any) -> Any:
        x = jax.nn.relu(batch_norm(p, "norm", conv(p, "stem", x, 2, 3)))
        least = np.array(-np.inf, x.dtype)
        x = jax.lax.reduce_window(x, least, jax.lax.max, (1, 1, 3, 3), (1, 1, 2, 2), [(0, 0)] * 2 + [(1, 1)] * 2)
        for i in range(8):
            at = f"blocks.{i}"
            short = f"{at}.short.weight" in p
            y = jax.nn.relu(batch_norm(p, f"{at}.norm1", conv(p, f"{at}.conv1", x, 2 if short else 1, 1)))
            y = batch_norm(p, f"{at}.norm2", conv(p, f"{at}.conv2", y, 1, 1))
            x = jax.nn.relu(y + (conv(p, f"{at}.short", x, 2, 0) if short else x))
        return linear(p, "head", x.astype(jnp.float32).mean((2, 3)).astype(x.dtype))

    return resnet if name == "resnet" else decoder


def jax_function(name: str, kind: str, layers: int | None) -> Callable[..., Any]:
    """``forward(parameters, constants, x, targets)``, or a step that donates parameters and state."""
    import jax
    import jax.numpy as jnp

    logits = jax_model(name, layers)

    def loss(p: Any, constants: Any, x: Any, targets: Any) -> Any:
        out = logits({**p, **constants}, x).astype(jnp.float32)
        out = out.reshape(-1, out.shape[-1])
        return -jnp.take_along_axis(jax.nn.log_softmax(out), targets.reshape(-1, 1), 1).mean()

    def updated(p: Any, g: Any, m: Any, v: Any, count: Any) -> Any:
        wide, g = p.astype(jnp.float32), g.astype(jnp.float32)
        m32 = 0.9 * m.astype(jnp.float32) + 0.1 * g
        v32 = 0.999 * v.astype(jnp.float32) + 0.001 * g * g
        size, spread = RATE / (1 - 0.9**count), jnp.sqrt(1 - 0.999**count)
        wide = wide - RATE * DECAY * wide - size * m32 / (jnp.sqrt(v32) / spread + 1e-8)
        return wide.astype(p.dtype), m32.astype(m.dtype), v32.astype(v.dtype)

    def step(p: Any, state: Any, constants: Any, x: Any, targets: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(p, constants, x, targets)
        count, first, second = state
        count = count + 1
        new = {k: updated(p[k], grads[k], first[k], second[k], count) for k in p}
        pick = lambda i: {k: t[i] for k, t in new.items()}  # noqa: E731
        return pick(0), (count, pick(1), pick(2)), value

    if kind == "forward":
        return jax.jit(lambda p, constants, x: logits({**p, **constants}, x))
    return jax.jit(step, donate_argnums=(0, 1))


def jax_text(name: str, kind: str, dtype: torch.dtype, layers: int | None) -> str:
    """JAX's StableHLO for a TPU, with its donations."""
    import jax
    import jax.numpy as jnp

    model, x, targets = torch_model(name, dtype, layers)
    names = {torch.bfloat16: jnp.bfloat16, torch.float32: jnp.float32, torch.int64: jnp.int32}
    spell = lambda t: jax.ShapeDtypeStruct(tuple(t.shape), names[t.dtype])  # noqa: E731
    p = {k: spell(t) for k, t in model.named_parameters()}
    constants = {k: spell(t) for k, t in model.named_buffers()}
    function = jax_function(name, kind, layers)
    args: tuple[Any, ...] = (p, constants, spell(x))
    if kind == "train":
        count = jax.ShapeDtypeStruct((), jnp.float32)
        args = (p, (count, p, p), constants, spell(x), spell(targets))
    return function.trace(*args).lower(lowering_platforms=("tpu",)).as_text(debug_info=True)


def our_text(name: str, kind: str, dtype: torch.dtype, layers: int | None) -> str:
    model, x, targets = torch_model(name, dtype, layers)
    if kind == "forward":
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        return aot.trace(model, (x,)).plan.text
    step, state = aot.training_step(model, torch_loss, lr=RATE, weight_decay=DECAY)
    return aot.trace(step, (*state, x, targets)).plan.text


# ---- measures -------------------------------------------------------------------------------------------------------
def cached(text: str, place: str, flags: dict[str, Any]) -> Path:
    """Where the numbers of a program lie: their name depends on the program, its options and libtpu's version."""
    key = json.dumps([text, place, flags, metadata.version("libtpu")])
    return CACHE / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}"


def measures(text: str, place: str, flags: dict[str, Any]) -> dict[str, Any]:
    """The numbers of a program, and the cycles and bytes of each of its operations; from the cache if it has them."""
    kept = cached(text, place, flags)
    if (kept / "numbers.json").exists():
        return json.loads((kept / "numbers.json").read_text())
    slice_ = topology.parse(place)
    start = time.perf_counter()
    compiled = topology.describe(slice_).compile(text, flags)
    seconds = time.perf_counter() - start
    stats, xla = compiled.memory_stats(), compiled.cost_analysis()
    optimised = compiled.optimized_program()
    found = operations(hlo.read(optimised), CHIPS[slice_.generation])
    numbers = {
        "flops": xla["flops"],
        "bytes": xla["bytes accessed"],
        "temporary": stats["temporaries"],
        "cycles": sum(o.cycles for o in found),
        "aliased": stats["aliased"],
        "arguments": stats["arguments"],
        "seconds": seconds,
        "operations": [[o.opcode, o.origin.split(" (")[0], o.shape, o.cycles, o.bytes] for o in found],
    }
    kept.mkdir(parents=True, exist_ok=True)
    (kept / "program.mlir.gz").write_bytes(gzip.compress(text.encode(), 3))
    (kept / "optimised.pb.gz").write_bytes(gzip.compress(optimised, 3))
    (kept / "numbers.json").write_text(json.dumps(numbers))
    return numbers


def kinds(numbers: dict[str, Any]) -> Counter[str]:
    """Cycles by kind of operation."""
    found: Counter[str] = Counter()
    for opcode, origin, _, cycles, _ in numbers["operations"]:
        found[f"{opcode} of {origin.split('/')[-1]}"] += cycles
    return found


def compare(name: str, kind: str, dtype: str, place: str, layers: int | None, listed: bool) -> None:
    numeric = getattr(torch, dtype)
    title = f"{name} {kind} {dtype} {place}" + (f" {layers} layers" if layers and name in DECODERS else "")
    sides = []
    for side, write, flags in (("ours", our_text, dict(xla_options.full_flags())), ("JAX's", jax_text, {})):
        text = write(name, kind, numeric, layers)
        sides.append(measures(text, place, flags))
        shown = f"{sides[-1]['seconds']:.0f} s, {cached(text, place, flags).name}"
        print(f"== {title}: {side} compiled in {shown}", flush=True)
    ours, theirs = sides
    for key, most in MOST.items():
        a, b = ours[key], theirs[key]
        row(f"{title} {key}", f"{a:.4g} / {b:.4g}", a / b if b else math.nan, most)
    row(f"{title} aliased", f"{ours['aliased']:.4g} / {theirs['aliased']:.4g}")
    if listed:
        for side, numbers in (("ours", ours), ("JAX's", theirs)):
            for label, cycles in kinds(numbers).most_common(25):
                print(f"    {side:6} {cycles / theirs['cycles']:7.2%}  {label}")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="gpt2,llama,resnet")
    parser.add_argument("--kinds", default="forward,train")
    parser.add_argument("--dtypes", default="bfloat16,float32")
    parser.add_argument("--topologies", default="v6e")
    parser.add_argument("--layers", type=int, help="of the decoders, instead of 12 and 16: layers repeat")
    parser.add_argument("--operations", action="store_true", help="cycles by kind of operation")
    chosen = parser.parse_args()
    for place, name, dtype, kind in itertools.product(
        *(getattr(chosen, part).split(",") for part in ("topologies", "models", "dtypes", "kinds"))
    ):
        if name != "llama" or dtype == "bfloat16":
            compare(name, kind, dtype, place, chosen.layers, chosen.operations)


if __name__ == "__main__":
    main()
