"""A Transformers model from the port check to a saved program for TPUs, on a machine that has none.

    python examples/aot_transformers.py [--topology v6e,v5e] [--out build/aot]

The same from the command line, for the first two steps:

    python -m torch_tpu check examples/aot_transformers.py:small
    python -m torch_tpu estimate examples/aot_transformers.py:training --topology v6e,v5p --html report.html

Needs the packages transformers and libtpu (`pip install 'torch_tpu[tpu]'`).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from torch_tpu import aot
from torch_tpu.aot.check import check


class Logits(nn.Module):
    """A decoder that gives its logits alone."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.model = LlamaForCausalLM(config)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(ids, use_cache=False).logits


def small() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A Llama of four layers with numbers in it: small enough to run here."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    return Logits(config).eval(), (torch.randint(0, 512, (2, 32)),)


def training() -> tuple[Any, tuple[Any, ...]]:
    """A training step of a Llama of one billion parameters in bfloat16; on meta, so it takes no memory."""
    config = LlamaConfig(
        vocab_size=32000, hidden_size=2048, intermediate_size=5632, num_hidden_layers=16, num_attention_heads=16,
        num_key_value_heads=4,
    )  # fmt: skip
    with torch.device("meta"):
        model = Logits(config).bfloat16()
        ids = torch.empty(4, 1024, dtype=torch.int64)

    def loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        logits = model(ids)[:, :-1].float()
        return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), ids[:, 1:].reshape(-1))

    step, state = aot.training_step(model, loss)
    return step, (*state, ids)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", default="v6e,v5p")
    parser.add_argument("--out", type=Path, default=Path("build") / "aot")
    options = parser.parse_args()
    topologies = options.topology.split(",")

    print("== does it run, and with which numbers?\n")
    model, args = small()
    print(check(model, args, topologies=topologies))

    print("\n== does a billion parameters fit, and how fast can a step be?\n")
    step, args = training()
    report = aot.compile(step, args, topology=topologies)
    print(report)

    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "report.html").write_text(report.to_html())
    aot.save(report, options.out / "step.zip")
    saved = aot.load(options.out / "step.zip")
    print(f"\nsaved: {options.out / 'step.zip'} for {', '.join(saved.topologies)}; {options.out / 'report.html'}")


if __name__ == "__main__":
    main()
