"""How many programs a snippet compiles when it is run again with other numbers.

Each row runs its snippet for ``k`` = 0 and 1, then for ``k`` = 2 .. 9, and states how many new programs the second part
may need: none where only numbers change, one per call or one per power of two where shapes do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

WARM, CALLS = 2, 8
Step = Callable[[int], Any]


def new_programs(step: Step) -> int:
    """Programs that ``step(k)`` needs for eight further values of ``k``, after two."""
    torch.tpu._clear_cache()  # what other tests compiled would hide a miss
    for k in range(WARM):
        step(k)
    before = torch.tpu.compile_stats()["misses"]
    for k in range(WARM, WARM + CALLS):
        step(k)
    return torch.tpu.compile_stats()["misses"] - before


class World:
    """Tensors that the snippets use, made once per test."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        make = lambda *shape: torch.randn(*shape, generator=generator).to("tpu")  # noqa: E731
        self.x, self.y, self.z, self.square = make(64, 8), make(64, 8), make(64), make(64, 64)
        self.leaf = make(64, 8).requires_grad_()
        self.cache, self.entry, self.entries = torch.zeros(2, 32, 8, device="tpu"), make(2, 8), make(2, 1, 8)
        self.masks = [(torch.arange(64) < 5 * (k + 1)).to("tpu") for k in range(WARM + CALLS)]
        self.indices = [(torch.arange(6) + k).to("tpu") for k in range(WARM + CALLS)]
        self.targets = torch.arange(64, device="tpu") % 8
        self.longer = [make(1, 8)]

    def gradient(self, loss: torch.Tensor) -> torch.Tensor:
        self.leaf.grad = None
        loss.sum().backward()
        return self.leaf.grad

    def changed(self, t: torch.Tensor, index: Any, value: Any) -> torch.Tensor:
        t = t.clone()
        t[index] = value
        return t

    def grow(self) -> None:
        self.longer[0] = torch.cat([self.longer[0], self.x[:1]])


Snippet = Callable[[World, int], Any]
#: Only numbers change: one program, whatever the number.
ONE_PROGRAM: dict[str, Snippet] = {
    # views: an offset is an operand
    "x[k]": lambda w, k: w.x[k] + 1,
    "x[-k]": lambda w, k: w.x[-k - 1] + 1,
    "x[k, j]": lambda w, k: w.x[k, k % 3] + 1,
    "x[k].item()": lambda w, k: w.z[k].item(),
    "x[k:k+4]": lambda w, k: w.x[k : k + 4].sum(),
    "x[:, k:k+3]": lambda w, k: w.x[:, k % 5 : k % 5 + 3] * 2,
    "x[k:k+8:2]": lambda w, k: w.x[k : k + 8 : 2] * 2,
    "x.narrow": lambda w, k: w.x.narrow(0, k, 3).clone(),
    "as_strided": lambda w, k: torch.as_strided(w.x, (4,), (1,), k) * 2,
    "x[k] = 1": lambda w, k: w.x.__setitem__(k, 1.0),
    "x[k] = y": lambda w, k: w.x.__setitem__(k, w.y[k + 1]),
    "x[k] += 1": lambda w, k: w.x[k].add_(1),
    "x[k:k+4] = number": lambda w, k: w.x.__setitem__(slice(k, k + 4), k + 0.5),
    "cache[:, k] = kv": lambda w, k: w.cache.__setitem__((slice(None), k), w.entry),
    "cache[:, k:k+1] = kv": lambda w, k: w.cache.__setitem__((slice(None), slice(k, k + 1)), w.entries),
    "cache[:, index] = kv": lambda w, k: w.cache.__setitem__((slice(None), torch.tensor([k], device="tpu")), w.entries),
    "cache.index_copy_": lambda w, k: w.cache.index_copy_(1, torch.tensor([k], device="tpu"), w.entries),
    # gradients of views
    "grad of x[k]": lambda w, k: w.gradient(w.leaf[k]),
    "grad of x[k:k+4]": lambda w, k: w.gradient(w.leaf[k : k + 4]),
    "grad of x[k:k+8:2]": lambda w, k: w.gradient(w.leaf[k : k + 8 : 2]),
    "grad of a recurrence": lambda w, k: w.gradient(torch.tanh(w.leaf[k + 1] * torch.tanh(w.leaf[k] * w.y[0]))),
    # Python numbers are operands
    "x + k": lambda w, k: w.x + k,
    "x + float": lambda w, k: w.x + (0.5 * k + 0.25),
    "k - x": lambda w, k: k - w.x,
    "x * k": lambda w, k: w.x * k,
    "x // k": lambda w, k: w.x // (k + 1),
    "x % k": lambda w, k: w.x % (k + 1),
    "x ** k": lambda w, k: w.x ** (k + 2),
    "x ** float": lambda w, k: w.x ** (k + 1.5),
    "x ** -k": lambda w, k: w.x ** (-k - 1),
    "index ** k": lambda w, k: w.indices[0] ** (k + 2),
    "foreach x ** float": lambda w, k: torch._foreach_pow([w.x, w.y], k + 1.5),
    "grad of x ** float": lambda w, k: w.gradient(w.leaf ** (k + 2.5)),
    "k ** x": lambda w, k: (k + 1.5) ** w.x,
    "x > k": lambda w, k: w.x > k,
    "add alpha": lambda w, k: torch.add(w.x, w.y, alpha=k + 2),
    "addcmul value": lambda w, k: torch.addcmul(w.x, w.x, w.y, value=k + 2),
    "addmm beta alpha": lambda w, k: torch.addmm(w.x, w.square, w.x, beta=0.1 * k + 0.5, alpha=k + 0.5),
    "lerp": lambda w, k: torch.lerp(w.x, w.y, 0.01 * k),
    "clamp": lambda w, k: w.x.clamp(-k, k),
    "clamp min": lambda w, k: w.x.clamp(min=0.1 * k),
    "where": lambda w, k: torch.where(w.x > 0, w.x, float(k)),
    "full": lambda w, k: torch.full((3, 3), k, device="tpu"),
    "full_like": lambda w, k: torch.full_like(w.x, 0.5 * k),
    "fill_": lambda w, k: torch.empty(3, device="tpu").fill_(k),
    "pad value": lambda w, k: F.pad(w.x, (1, 1), value=float(k)),
    "masked_fill": lambda w, k: w.x.masked_fill(w.y > 0, float(k)),
    "leaky_relu": lambda w, k: F.leaky_relu(w.x, 0.1 * (k + 1)),
    "attention scale": lambda w, k: w.gradient(
        F.scaled_dot_product_attention(*[w.leaf.view(1, 2, 32, 8)] * 3, scale=0.1 * (k + 1))
    ),
    "layer_norm eps": lambda w, k: w.gradient(F.layer_norm(w.leaf, (8,), eps=1e-4 * (k + 1))),
    "rms_norm eps": lambda w, k: w.gradient(F.rms_norm(w.leaf, (8,), eps=1e-4 * (k + 1))),
    "group_norm eps": lambda w, k: w.gradient(F.group_norm(w.leaf, 2, eps=1e-4 * (k + 1))),
    "batch_norm eps": lambda w, k: w.gradient(F.batch_norm(w.leaf, w.y[0], w.y[1] ** 2, eps=1e-4 * (k + 1))),
    "batch_norm eps and momentum": lambda w, k: w.gradient(
        F.batch_norm(w.leaf, w.y[0], w.y[1], training=True, momentum=0.05 + 0.1 * k, eps=1e-4 * (k + 1))
    ),
    "huber_loss delta": lambda w, k: w.gradient(F.huber_loss(w.leaf, w.y, delta=k + 1.5)),
    "smooth_l1_loss beta": lambda w, k: w.gradient(F.smooth_l1_loss(w.leaf, w.y, beta=k + 1.5)),
    "ignore_index": lambda w, k: w.gradient(F.cross_entropy(w.leaf, w.targets, ignore_index=k)),
    "renorm": lambda w, k: w.gradient(torch.renorm(w.leaf, 2, 0, 0.5 * k + 1.5)),
    "foreach": lambda w, k: torch._foreach_add([w.x, w.y], [k + 0.5, k + 1.0]),
    "tensor from a number": lambda w, k: torch.tensor([k, k + 1], device="tpu") * 2,
    "arange of one length": lambda w, k: torch.arange(k, k + 5, device="tpu"),
    "arange with a step": lambda w, k: torch.arange(0.0, 5.0 * (k + 1), k + 1.0, device="tpu"),
    "linspace": lambda w, k: torch.linspace(0, k + 1, 7, device="tpu"),
    "tril": lambda w, k: torch.tril(w.square, k + 1),
    "triu": lambda w, k: torch.triu(w.square, k + 1),
    # random numbers: seed and offset are operands, and so are a distribution's parameters
    "dropout": lambda w, k: F.dropout(w.x, 0.1),
    "dropout rate": lambda w, k: F.dropout(w.x, 0.05 * (k + 1)),
    "randn": lambda w, k: torch.randn(4, 4, device="tpu"),
    "manual_seed": lambda w, k: torch.manual_seed(k) and torch.rand(4, device="tpu"),
    "normal_": lambda w, k: torch.empty(4, device="tpu").normal_(k + 1, k + 2),
    "uniform_": lambda w, k: torch.empty(4, device="tpu").uniform_(-k - 1, k + 2),
    "randint": lambda w, k: torch.randint(k, 10 * k + 5, (4,), device="tpu"),
    "randperm": lambda w, k: torch.randperm(16, device="tpu"),
    "multinomial": lambda w, k: torch.multinomial(torch.softmax(w.z / (k + 1), 0), 3),
    # values of index tensors and masks are data
    "embedding": lambda w, k: F.embedding(w.indices[k], w.x),
    "gather": lambda w, k: w.z.gather(0, w.indices[k]),
    "x[index]": lambda w, k: w.x[w.indices[k]],
    "x[index] = k": lambda w, k: w.changed(w.x, w.indices[k], float(k)),
    "scatter": lambda w, k: w.z.scatter(0, w.indices[k], float(k)),
    "one_hot": lambda w, k: F.one_hot(w.indices[k], 20),
    "x[mask] = k": lambda w, k: w.changed(w.x, w.masks[k], float(k)),
    "masked_select": lambda w, k: torch.masked_select(w.z, w.masks[k]),
    "nonzero": lambda w, k: w.masks[k].nonzero(),
    # reading
    "print": lambda w, k: repr(w.x[:3] * 10.0**k),
    "print integers": lambda w, k: repr(torch.arange(6, device="tpu") * 10**k),
    "print a number": lambda w, k: repr(w.z[0] * k),
    "print a mask": lambda w, k: repr(w.masks[k]),
    "item": lambda w, k: (w.z.sum() * k).item(),
    "tolist": lambda w, k: (w.z * k).tolist(),
    "bool": lambda w, k: bool(w.z.sum() > k),
    "nonzero().tolist()": lambda w, k: w.masks[k].nonzero().tolist(),
    "masked_select().cpu()": lambda w, k: torch.masked_select(w.z, w.masks[k]).cpu(),
    "x[:k].cpu()": lambda w, k: w.x[: 30 + k].cpu(),
    "to and back": lambda w, k: (torch.full((3,), float(k)).to("tpu") * 2).cpu(),
}

#: Shapes change: this many programs for the eight calls.
STATED: dict[str, tuple[int, Snippet]] = {
    # the result of x[mask] is a view of one that is a power of two long: 16, 32 and 64 here, 16 of them known
    "x[mask]": (2, lambda w, k: w.x[w.masks[k]]),
    "x[mask].cpu()": (2, lambda w, k: w.x[w.masks[k]].cpu()),
    "x[mask, j]": (2, lambda w, k: w.x[w.masks[k], 0]),
    # ... and what is computed from it has the shape that it has
    "x[mask].sum()": (2 + 8, lambda w, k: w.x[w.masks[k]].sum()),
    "x[:k].sum()": (8, lambda w, k: w.x[: k + 1].sum()),
    "arange of k": (8, lambda w, k: torch.arange(k + 5, device="tpu")),
    "cat in a growing loop": (8, lambda w, k: w.grow()),
    "topk of k": (8, lambda w, k: torch.topk(w.z, k + 1)),
    # shifts are a list of integers
    "roll": (8, lambda w, k: torch.roll(w.x, k + 1, 0)),
}


@pytest.mark.parametrize("name", ONE_PROGRAM)
def test_only_numbers_change(name: str) -> None:
    world = World()
    assert new_programs(lambda k: ONE_PROGRAM[name](world, k)) == 0


@pytest.mark.parametrize("name", STATED)
def test_shapes_change(name: str) -> None:
    world, (programs, snippet) = World(), STATED[name]
    assert new_programs(lambda k: snippet(world, k)) <= programs


@pytest.mark.parametrize("implementation", ["plain", "foreach", "fused"])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad])
def test_an_optimizer_step(optimizer: type[torch.optim.Optimizer], implementation: str) -> None:
    """Another learning rate and another step count."""
    parameters = [torch.nn.Parameter(torch.randn(4, 4, device="tpu")) for _ in range(3)]
    options = {"foreach": False} if implementation == "plain" else {implementation: True}
    running = optimizer(parameters, lr=0.1, **options)

    def step(k: int) -> None:
        for p in parameters:
            p.grad = torch.full_like(p, 0.5)
        for group in running.param_groups:
            group["lr"] = 0.1 / (k + 1)
        running.step()

    assert new_programs(step) == 0


def test_a_training_loop_with_a_schedule() -> None:
    """Momentum, clipping, a schedule, a loss that is read: nothing compiles after two steps."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3)).to("tpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    x, target = torch.randn(32, 8, device="tpu"), torch.arange(32, device="tpu") % 3

    def step(k: int) -> float:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), target)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0 / (k + 1))
        optimizer.step()
        schedule.step()
        return loss.item()

    assert new_programs(step) == 0


def test_generation_with_a_static_cache() -> None:
    """Positions, the cache's next entry, a mask and a sample: one program each, at any position."""
    cache, table = torch.zeros(1, 2, 32, 8, device="tpu"), torch.randn(50, 16, device="tpu")
    token = torch.zeros(1, 1, dtype=torch.int64, device="tpu")

    def step(k: int) -> torch.Tensor:
        position = torch.arange(k, k + 1, device="tpu")
        q = F.embedding(token, table).view(1, 1, 2, 8).transpose(1, 2)
        cache[:, :, position] = q
        mask = torch.arange(32, device="tpu")[None] <= position[:, None]
        out = F.scaled_dot_product_attention(q, cache, cache, attn_mask=mask)
        logits = out.transpose(1, 2).reshape(1, 16) @ table.T
        token.copy_(torch.multinomial(torch.softmax(logits / (0.5 + k), -1), 1))
        return token

    assert new_programs(step) == 0
