"""``flex_attention`` with ``score_mod`` and ``block_mask``, forward and backward (Dong et al. 2024).

Written with PyTorch's operators, which become part of the program as those of any decomposition do. The two functions
of the user's are vectorised over batch, head, query and key. It is exact for every mask; blocks that a mask leaves
empty are computed and masked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter
from torch.nn.attention.flex_attention import _vmap_for_bhqkv

from torch_tpu.tracing.graph import Interpreter as GraphInterpreter
from torch_tpu.tracing.graph import higher_order

_LN2 = math.log(2)


def _vectorised(module: GraphModule, prefix: tuple[Any, ...], suffix: tuple[Any, ...], **options: Any) -> Any:
    """A subgraph of single scores as a function of ``[B, H, L, S]`` scores; its operators meet the dispatcher."""

    def run(*args: Any) -> Any:
        out = Interpreter(module).run(*args)
        return [*out] if isinstance(out, list | tuple) else out

    return _vmap_for_bhqkv(run, prefix=prefix, suffix=suffix, **options)


class _Problem:
    """Queries ``[B, H, L, E]`` against keys and values ``[B or 1, H / groups, S, E]``, in float32 or float64."""

    def __init__(self, query: Tensor, key: Tensor, value: Tensor, block_mask: Sequence[Any], scale: float) -> None:
        self.dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
        self.query, self.scale = query.to(self.dtype), scale
        self.groups = query.shape[1] // key.shape[1]
        self.batches = query.shape[0]
        self.key, self.value = (self._repeated(t.to(self.dtype)) for t in (key, value))
        self.mask_mod = block_mask[-1]

    def _repeated(self, t: Tensor) -> Tensor:
        return t.repeat_interleave(self.groups, 1).expand(self.batches, -1, -1, -1)

    def summed(self, gradient: Tensor, like: Tensor) -> Tensor:
        """The gradient of a key or value from that of its repeated form, laid out like it."""
        batch, heads, length, width = gradient.shape
        total = gradient.view(batch, heads // self.groups, self.groups, length, width).sum(2)
        total = total if like.shape[0] == batch else total.sum(0, keepdim=True)
        return torch.empty_like(like).copy_(total)

    def scores(self) -> Tensor:
        return (self.query @ self.key.transpose(-2, -1)) * self.scale

    def indices(self) -> list[Tensor]:
        """Batch, head, query and key."""
        sizes = (*self.query.shape[:3], self.key.shape[2])
        return [torch.arange(n, device=self.query.device, dtype=torch.int32) for n in sizes]

    def allowed(self, buffers: Sequence[Any]) -> Tensor:
        return _vectorised(self.mask_mod, (), (None,) * len(buffers))(*self.indices(), *buffers)

    def modified(self, score_mod: GraphModule, scores: Tensor, buffers: Sequence[Any]) -> Tensor:
        return _vectorised(score_mod, (0,), (None,) * len(buffers))(scores, *self.indices(), *buffers)


@higher_order("flex_attention")
def flex_attention(
    interpreter: GraphInterpreter,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: GraphModule,
    block_mask: Sequence[Any],
    scale: float,
    kernel_options: dict[str, Any],
    score_buffers: Sequence[Any] = (),
    mask_buffers: Sequence[Any] = (),
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, logarithm of the sum of exponentials and largest score, these two to base 2. Rows without keys are 0."""

    def define() -> tuple[Tensor, Tensor, Tensor]:
        problem = _Problem(query, key, value, block_mask, scale)
        scores = problem.modified(score_mod, problem.scores(), score_buffers).to(problem.dtype)
        scores = scores.masked_fill(~problem.allowed(mask_buffers), -math.inf)
        largest = scores.amax(-1)
        lse = torch.logsumexp(scores, -1)
        weights = torch.exp(scores - _finite(lse).unsqueeze(-1))
        out = torch.empty_like(query, memory_format=torch.preserve_format)
        if out.shape[-1] != value.shape[-1]:
            out = query.new_empty((*query.shape[:-1], value.shape[-1]))
        return out.copy_(weights @ problem.value), lse / _LN2, largest / _LN2

    return interpreter.trace.run(define)


def _finite(lse: Tensor) -> Tensor:
    """Zero for rows that no key takes part in: their weights are exp(-inf)."""
    return lse.masked_fill(lse == -math.inf, 0.0)


@higher_order("flex_attention_backward")
def flex_attention_backward(
    interpreter: GraphInterpreter,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    grad_out: Tensor | None,
    grad_logsumexp: Tensor | None,
    score_mod: GraphModule,
    joint: GraphModule,
    block_mask: Sequence[Any],
    scale: float,
    kernel_options: dict[str, Any],
    score_buffers: Sequence[Any] = (),
    mask_buffers: Sequence[Any] = (),
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor | None, ...]]:
    """Gradients of query, key and value, and of those captured tensors that have one."""
    wanted = interpreter.node.meta["val"][3]

    def define() -> tuple[Tensor, Tensor, Tensor, tuple[Tensor | None, ...]]:
        problem = _Problem(query, key, value, block_mask, scale)
        above = torch.zeros_like(out) if grad_out is None else grad_out
        above = above.to(problem.dtype)
        scores = problem.scores()
        allowed = problem.allowed(mask_buffers)
        modified = problem.modified(score_mod, scores, score_buffers).to(problem.dtype).masked_fill(~allowed, -math.inf)
        weights = torch.exp(modified - _finite(logsumexp * _LN2).unsqueeze(-1))
        inner = (out.to(problem.dtype) * above).sum(-1, keepdim=True)
        if grad_logsumexp is not None:
            inner = inner - (grad_logsumexp / _LN2).unsqueeze(-1)
        slope = weights * (above @ problem.value.transpose(-2, -1) - inner)
        captured = (None,) * len(score_buffers)
        differentiate = _vectorised(joint, (0,), (0, *captured), out_dims=[0, None, None, None, None, *captured])
        slope, _, _, _, _, *extra = differentiate(scores, *problem.indices(), slope, *score_buffers)
        slope = (slope * scale).to(problem.dtype).masked_fill(~allowed, 0.0)
        return (
            torch.empty_like(query).copy_(slope @ problem.key),
            problem.summed(slope.transpose(-2, -1) @ problem.query, key),
            problem.summed(weights.transpose(-2, -1) @ above, value),
            tuple(g if w is not None else None for g, w in zip(extra, wanted, strict=True)),
        )

    return interpreter.trace.run(define)
