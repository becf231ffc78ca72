"""Compiled functions against the same models written in JAX, and against Inductor on the CPU: ratios in one run.

    python benchmarks/graphs.py [--models mlp,gpt2,llama,resnet] [--rounds 15]

Every row is a median over rounds in which the peers take turns. All are float32 at precision ``highest``. A training
step is forward, loss, backward and the update (AdamW without decay, or plain SGD for the ResNet); JAX's is jitted with
donated parameters and state. Needs the package ``jax`` for its rows.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # PyTorch's threads would look for work while others' run

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

LAYERS, WIDTH, HEADS, BATCH, LENGTH, WORDS = 4, 256, 4, 4, 128, 1024
RATE = 1e-3
#: Seconds between runs: the threads of one peer's pool still look for work when the next one starts.
PAUSE = 0.05


# ---- models ---------------------------------------------------------------------------------------------------------
class Block(nn.Module):
    """A decoder layer: GPT-2's, or Llama's with rotary positions, RMSNorm and a gated MLP."""

    def __init__(self, llama: bool) -> None:
        super().__init__()
        self.llama = llama
        norm = nn.RMSNorm if llama else nn.LayerNorm
        self.norm1, self.norm2 = norm(WIDTH), norm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=not llama)
        self.out = nn.Linear(WIDTH, WIDTH, bias=not llama)
        hidden = 4 * WIDTH
        self.up = nn.Linear(WIDTH, hidden * (2 if llama else 1), bias=not llama)
        self.down = nn.Linear(hidden, WIDTH, bias=not llama)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        b, n, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, n, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        if self.llama:
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(a.transpose(1, 2).reshape(b, n, -1))
        h = self.up(self.norm2(x))
        if self.llama:
            gate, h = h.chunk(2, -1)
            h = F.silu(gate) * h
        else:
            h = F.gelu(h, approximate="tanh")
        return x + self.down(h)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


class Decoder(nn.Module):
    """A causal language model; ``forward`` is the loss of its next words."""

    def __init__(self, llama: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = None if llama else nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList([Block(llama) for _ in range(LAYERS)])
        self.norm = nn.RMSNorm(WIDTH) if llama else nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        angles = np.outer(np.arange(LENGTH), 1e4 ** -(np.arange(0, WIDTH // HEADS, 2) / (WIDTH // HEADS)))
        angles = np.concatenate([angles, angles], -1)
        self.register_buffer("cos", torch.tensor(np.cos(angles), dtype=torch.float32))
        self.register_buffer("sin", torch.tensor(np.sin(angles), dtype=torch.float32))

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        if self.places is not None:
            x = x + self.places.weight
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
        )

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.layers(x), targets)


class Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        self.short = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if stride > 1 or inputs != outputs else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(y + (x if self.short is None else self.short(x)))


class ResNet18(nn.Module):
    """ResNet-18 (He et al. 2015) on 64x64 images."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64)
        widths = [64, 64, 64, 128, 128, 256, 256, 512, 512]
        self.blocks = nn.Sequential(*[Residual(a, b, 2 if b > a else 1) for a, b in itertools.pairwise(widths)])
        self.head = nn.Linear(512, 10)

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.stem(x))), 3, 2, 1)
        return F.cross_entropy(self.head(self.blocks(x).mean((2, 3))), targets)


class Case(NamedTuple):
    model: Callable[[], nn.Module]
    data: Callable[[], tuple[torch.Tensor, torch.Tensor]]


def _words() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(0, WORDS, (BATCH, LENGTH)), torch.randint(0, WORDS, (BATCH, LENGTH))


CASES = {
    "mlp": Case(MLP, lambda: (torch.randn(128, 784), torch.randint(0, 10, (128,)))),
    "gpt2": Case(lambda: Decoder(llama=False), _words),
    "llama": Case(lambda: Decoder(llama=True), _words),
    "resnet": Case(ResNet18, lambda: (torch.randn(8, 3, 64, 64), torch.randint(0, 10, (8,)))),
}


# ---- the same in JAX ------------------------------------------------------------------------------------------------
def jax_loss(name: str) -> Callable[..., Any]:
    """``loss(parameters, x, targets)`` on a dict of arrays with PyTorch's names."""
    import jax
    import jax.numpy as jnp

    def linear(p: Any, name: str, x: Any) -> Any:
        y = x @ p[f"{name}.weight"].T
        return y + p[f"{name}.bias"] if f"{name}.bias" in p else y

    def cross_entropy(logits: Any, targets: Any) -> Any:
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[:, None], 1).mean()

    def norm(p: Any, name: str, x: Any, llama: bool) -> Any:
        if llama:
            return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1.1920929e-07) * p[f"{name}.weight"]
        center = x - x.mean(-1, keepdims=True)
        y = center * jax.lax.rsqrt((center * center).mean(-1, keepdims=True) + 1e-5)
        return y * p[f"{name}.weight"] + p[f"{name}.bias"]

    def turned(x: Any, p: Any) -> Any:
        a, b = jnp.split(x, 2, -1)
        return x * p["cos"] + jnp.concatenate([-b, a], -1) * p["sin"]

    def decoder(p: Any, ids: Any, targets: Any) -> Any:
        llama = name == "llama"
        x = p["words.weight"][ids]
        x = x if llama else x + p["places.weight"]
        b, n, _ = x.shape
        causal = jnp.tril(jnp.ones((n, n), bool))
        for i in range(LAYERS):
            at = f"blocks.{i}"
            qkv = linear(p, f"{at}.qkv", norm(p, f"{at}.norm1", x, llama))
            q, k, v = qkv.reshape(b, n, 3, HEADS, -1).transpose(2, 0, 3, 1, 4)
            if llama:
                q, k = turned(q, p), turned(k, p)
            scores = jnp.einsum("bhqd,bhkd->bhqk", q, k) / np.sqrt(WIDTH // HEADS)
            weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf))
            a = jnp.einsum("bhqk,bhkd->bhqd", weights, v).transpose(0, 2, 1, 3).reshape(b, n, -1)
            x = x + linear(p, f"{at}.out", a)
            h = linear(p, f"{at}.up", norm(p, f"{at}.norm2", x, llama))
            if llama:
                gate, h = jnp.split(h, 2, -1)
                h = jax.nn.silu(gate) * h
            else:
                h = jax.nn.gelu(h, approximate=True)
            x = x + linear(p, f"{at}.down", h)
        return cross_entropy(linear(p, "head", norm(p, "norm", x, llama)).reshape(b * n, -1), targets.reshape(-1))

    def mlp(p: Any, x: Any, targets: Any) -> Any:
        for i in (0, 2):
            x = jax.nn.relu(linear(p, f"layers.{i}", x))
        return cross_entropy(linear(p, "layers.4", x), targets)

    def conv(p: Any, at: str, x: Any, stride: int, pad: int) -> Any:
        return jax.lax.conv_general_dilated(x, p[f"{at}.weight"], (stride, stride), [(pad, pad)] * 2)

    def batch_norm(p: Any, at: str, x: Any) -> Any:
        mean = x.mean((0, 2, 3), keepdims=True)
        var = ((x - mean) ** 2).mean((0, 2, 3), keepdims=True)
        y = (x - mean) * jax.lax.rsqrt(var + 1e-5)
        return y * p[f"{at}.weight"][:, None, None] + p[f"{at}.bias"][:, None, None]

    def resnet(p: Any, x: Any, targets: Any) -> Any:
        x = jax.nn.relu(batch_norm(p, "norm", conv(p, "stem", x, 2, 3)))
        x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 1, 3, 3), (1, 1, 2, 2), [(0, 0)] * 2 + [(1, 1)] * 2)
        for i in range(8):
            at = f"blocks.{i}"
            short = f"{at}.short.weight" in p
            y = jax.nn.relu(batch_norm(p, f"{at}.norm1", conv(p, f"{at}.conv1", x, 2 if short else 1, 1)))
            y = batch_norm(p, f"{at}.norm2", conv(p, f"{at}.conv2", y, 1, 1))
            x = jax.nn.relu(y + (conv(p, f"{at}.short", x, 2, 0) if short else x))
        return cross_entropy(linear(p, "head", x.mean((2, 3))), targets)

    return {"mlp": mlp, "resnet": resnet}.get(name, decoder)


def jax_step(name: str) -> Callable[..., Any]:
    """``step(parameters, state, constants, x, targets)``, jitted, that donates parameters and state."""
    import jax
    import jax.numpy as jnp

    loss = jax_loss(name)

    def step(p: Any, state: Any, constants: Any, x: Any, targets: Any) -> Any:
        value, grads = jax.value_and_grad(lambda p: loss({**p, **constants}, x, targets))(p)
        if name == "resnet":
            return {k: v - RATE * grads[k] for k, v in p.items()}, state, value
        count, first, second = state
        count = count + 1
        first = {k: 0.9 * m + 0.1 * grads[k] for k, m in first.items()}
        second = {k: 0.999 * v + 0.001 * grads[k] ** 2 for k, v in second.items()}
        size, spread = RATE / (1 - 0.9**count), 1 - 0.999**count
        p = {k: v - size * first[k] / (jnp.sqrt(second[k] / spread) + 1e-8) for k, v in p.items()}
        return p, (count, first, second), value

    return jax.jit(step, donate_argnums=(0, 1))


# ---- steps ----------------------------------------------------------------------------------------------------------
def optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name == "resnet":
        return torch.optim.SGD(model.parameters(), lr=RATE)
    return torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0, capturable=_on_tpu(model))


def _on_tpu(model: nn.Module) -> bool:
    return next(model.parameters()).device.type == "tpu"


def torch_train(name: str, model: nn.Module, data: Any) -> Callable[[], Any]:
    """A step as users write it: a compiled model, ``backward``, a compiled optimizer."""
    update = optimizer(name, model)
    compiled, advance = torch.compile(model), torch.compile(update.step)

    def step() -> float:
        loss = compiled(*data)
        loss.backward()
        advance()
        update.zero_grad()
        return loss.item()

    return step


def torch_train_whole(name: str, model: nn.Module, data: Any) -> Callable[[], Any]:
    """The whole step as one graph, with the functional forms of gradients and optimizer."""
    from torch.optim.adamw import adamw
    from torch.optim.sgd import sgd

    params = [*model.parameters()]
    first, second = ([torch.zeros_like(p) for p in params] for _ in range(2))
    counts = [torch.zeros((), device=params[0].device) for _ in params]

    def step(x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = model(x, targets)
        grads = [*torch.autograd.grad(loss, params)]
        with torch.no_grad():
            if name == "resnet":
                sgd(params, grads, [None] * len(params), foreach=True, weight_decay=0.0, momentum=0.0, lr=RATE,
                    dampening=0.0, nesterov=False, maximize=False)  # fmt: skip
            else:
                adamw(params, grads, first, second, [], counts, foreach=True, capturable=True, amsgrad=False,
                      beta1=0.9, beta2=0.999, lr=RATE, weight_decay=0.0, eps=1e-8, maximize=False)  # fmt: skip
        return loss.detach()

    compiled = torch.compile(step, fullgraph=True)
    return lambda: compiled(*data).item()


def torch_forward(model: nn.Module, data: Any) -> Callable[[], Any]:
    compiled = torch.compile(model)

    def run() -> float:
        with torch.no_grad():
            return compiled(*data).item()

    return run


def jax_runs(name: str, model: nn.Module, data: Any) -> tuple[Callable[[], Any], Callable[[], Any]]:
    import jax
    import jax.numpy as jnp

    learned = {k: jnp.array(v.detach().numpy()) for k, v in model.named_parameters()}
    constants = {k: jnp.array(v.numpy()) for k, v in model.named_buffers() if k in ("cos", "sin")}
    x, targets = (jnp.array(t.numpy()) for t in data)
    zeros = {k: jnp.zeros_like(v) for k, v in learned.items()}
    state = [learned, (jnp.zeros(()), zeros, {k: jnp.zeros_like(v) for k, v in learned.items()})]
    step = jax_step(name)
    loss = jax_loss(name)
    fixed = {k: jnp.array(v.detach().numpy()) for k, v in model.named_parameters()}
    forward = jax.jit(lambda p, x, targets: loss({**p, **constants}, x, targets))

    def train() -> float:
        state[0], state[1], value = step(*state, constants, x, targets)
        return float(value)

    return train, lambda: float(forward(fixed, x, targets))


def timed(run: Callable[[], Any]) -> float:
    """Seconds until all of the work is done, not only the loss."""
    start = time.perf_counter()
    run()
    torch.accelerator.synchronize()
    return time.perf_counter() - start


def measure(name: str, rounds: int, peers: set[str]) -> None:
    case = CASES[name]
    torch.manual_seed(0)
    reference, data = case.model(), case.data()

    def copy_on(device: str) -> nn.Module:
        model = case.model()
        model.load_state_dict(reference.state_dict())
        return model.to(device)

    on_tpu = tuple(t.to("tpu") for t in data)
    train = {
        "tpu": torch_train_whole(name, copy_on("tpu"), on_tpu),
        "tpu, three programs": torch_train(name, copy_on("tpu"), on_tpu),
    }
    forward = {"tpu": torch_forward(copy_on("tpu"), on_tpu)}
    if "jax" in peers:
        train["jax"], forward["jax"] = jax_runs(name, reference, data)
    if "inductor" in peers:
        train["inductor"] = torch_train(name, copy_on("cpu"), data)
        forward["inductor"] = torch_forward(copy_on("cpu"), data)
    for kind, runs in (("train", train), ("forward", forward)):
        first = {peer: timed(run) for peer, run in runs.items()}
        losses = {peer: run() for peer, run in runs.items()}
        times: dict[str, list[float]] = {peer: [] for peer in runs}
        for _ in range(rounds):
            for peer, run in runs.items():
                time.sleep(PAUSE)
                times[peer].append(timed(run))
        middle = {peer: statistics.median(t) for peer, t in times.items()}
        for peer in runs:
            ratios = ", ".join(
                f"{middle[peer] / middle[other]:.2f}x {other}" for other in ("jax", "inductor") if other in middle
            )
            print(
                f"{name:7} {kind:8} {peer:20} {1e3 * middle[peer]:9.2f} ms   first call {first[peer]:6.2f} s   "
                f"loss {losses[peer]:.5f}   {ratios if peer.startswith('tpu') else ''}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(CASES))
    parser.add_argument("--peers", default="jax,inductor")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_float32_matmul_precision("highest")
    torch._dynamo.config.trace_autograd_ops = True
    peers = set(options.peers.split(","))
    try:
        import jax  # noqa: F401
    except ImportError:
        print("jax is not installed: its rows are left out", file=sys.stderr)
        peers.discard("jax")
    for name in options.models.split(","):
        measure(name, options.rounds, peers)


if __name__ == "__main__":
    main()
