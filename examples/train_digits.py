"""Trains a small convolutional network on scikit-learn's handwritten digits: an ordinary PyTorch program.

    python examples/train_digits.py --device tpu

Only ``--device`` differs between CPU, GPU and TPU. With a device other than the CPU, the same run is repeated on the
CPU and the largest difference is printed.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    """Two convolutions with batch normalisation, a hidden layer, ten classes. Input: [N, 1, 8, 8] float32."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2),
        )  # fmt: skip
        self.classifier = nn.Sequential(
            nn.Flatten(), nn.Linear(256, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 10)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.features(x))


@dataclass
class Run:
    """What one run leaves behind."""

    accuracy: float
    losses: list[float]
    step_ms: list[float]
    model: nn.Module


def data() -> tuple[TensorDataset, TensorDataset]:
    """1,797 digits: four fifths to train on, one fifth to test."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    cut = len(labels) * 4 // 5
    train, test = order[:cut], order[cut:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def evaluate(model: nn.Module, loader: DataLoader, device: str) -> float:
    """The share of right answers."""
    model.eval()
    right = total = 0
    with torch.no_grad():
        for images, labels in loader:
            predicted = model(images.to(device)).argmax(dim=1)
            right += (predicted == labels.to(device)).sum().item()
            total += len(labels)
    return right / total


def train(device: str, epochs: int, dropout: bool = True) -> Run:
    """Trains from seed 0 on ``device``."""
    train_set, test_set = data()
    loader = DataLoader(
        train_set, batch_size=64, shuffle=True, drop_last=True, generator=torch.Generator().manual_seed(0)
    )
    test_loader = DataLoader(test_set, batch_size=180)
    torch.manual_seed(0)
    model = Net()
    if not dropout:
        model.classifier[3].p = 0.0
    model = model.to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loss_of = nn.CrossEntropyLoss()
    losses, times = [], []
    for epoch in range(epochs):
        model.train()
        for images, labels in loader:
            start = time.perf_counter()
            images, labels = images.to(device), labels.to(device)
            optimizer.zero_grad()
            loss = loss_of(model(images), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            times.append(1e3 * (time.perf_counter() - start))
        print(f"epoch {epoch + 1}: loss {losses[-1]:.4f}, accuracy {evaluate(model, test_loader, device):.2%}")
    return Run(evaluate(model, test_loader, device), losses, times, model)


def check_checkpoint(run: Run) -> float:
    """Saves the model, loads it on the CPU, and returns the largest difference between the two models' outputs."""
    images = data()[1].tensors[0]
    run.model.eval()
    device = next(run.model.parameters()).device
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        path = Path(folder) / "digits.pt"
        torch.save(run.model.state_dict(), path)
        reloaded = Net()
        reloaded.load_state_dict(torch.load(path, map_location="cpu"))
        reloaded.eval()
        return (run.model(images.to(device)).cpu() - reloaded(images)).abs().max().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="cpu, tpu, cuda, ... (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument(
        "--no-dropout", action="store_true", help="makes runs on different devices comparable step by step"
    )
    args = parser.parse_args()

    run = train(args.device, args.epochs, not args.no_dropout)
    first, rest = run.step_ms[0], statistics.median(run.step_ms[len(run.step_ms) // 2 :])
    print(f"accuracy {run.accuracy:.2%}; first step {first:.0f} ms, then {rest:.2f} ms per step")
    print(f"checkpoint reloaded on the CPU: largest difference of the outputs {check_checkpoint(run):.2e}")
    if args.device.startswith("tpu"):
        stats = torch.tpu.compile_stats()
        print(
            f"{torch.tpu.get_device_name()}: {stats['compiled']} programs compiled in {stats['compile_seconds']:.1f} "
            f"s, "
            f"{stats['loaded']} loaded from the disk cache in {stats['load_seconds']:.1f} s, {stats['hits']} calls "
            f"reused one"
        )
    if args.device != "cpu":
        print("the same run on the CPU:")
        other = train("cpu", args.epochs, not args.no_dropout)
        difference = max(abs(a - b) for a, b in zip(run.losses, other.losses, strict=True))
        print(
            f"largest difference of the loss over {len(run.losses)} steps {difference:.2e}, at the first step "
            f"{abs(run.losses[0] - other.losses[0]):.2e}; accuracy {run.accuracy:.2%} against {other.accuracy:.2%}"
        )


if __name__ == "__main__":
    main()
