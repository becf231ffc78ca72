"""Totals and the table of ``docs/models.md``."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from typing import Any

from zoo.checks import CHECKS

Found = dict[str, dict[str, dict[str, Any]]]

_TITLES = {
    "forward": "forward",
    "backward": "gradients",
    "generate": "generate",
    "compiled": "compiled",
    "compiled_backward": "compiled gradients",
}
_SHOWN = {"same": "same", "differs": "**differs**", "none": "-"}
_BAD = ("differs", "fails", "crash", "timeout")

_INTRODUCTION = """# Models

Other people's architectures on `tpu`: Transformers 5.18, a few models of timm and Diffusers. Written by
`benchmarks/models.py` (`make models`); how to run a part of it stands at its top.

Each model is built at random from its architecture's configuration, made small (hidden size 32, two layers, four
heads, a short vocabulary, small images), and run on the CPU and on `tpu` (XLA's CPU backend), in float32, with
`torch.set_float32_matmul_precision("highest")`. Parameters are moved off their initial zeros and ones; random numbers
that a model draws are the same on both devices; dropout is off. The checks:

- **forward**: every tensor of the result, within 2e-4 of its largest value.
- **gradients**: those of all parameters in training mode, within 2e-3 of each one's largest value.
- **generate**: greedy decoding of 8 tokens after prompts of 12 and 7 tokens gives the same tokens.
- **compiled**, **compiled gradients**: the first two under `torch.compile`.

Where a difference is larger, the model is run in float64 on the CPU: if `tpu` is within four times the error of the
CPU's own float32, it counts as the same, unless the CPU's float32 and float64 have nothing in common (0.5 apart). A
model that the CPU does not run, because this way of making it small does not fit it or a library that it needs is
missing, does not count; they are listed at the end. A dash means: no such check, or not run yet.
"""


def _counts(found: Found, check: str) -> Counter[str]:
    return Counter(checks[check]["status"] for checks in found.values() if check in checks)


def _totals(found: Found, check: str) -> tuple[int, int, int, Counter[str]]:
    """How many models count, run and give the same."""
    counts = _counts(found, check)
    total = sum(counts.values()) - counts["none"]
    return total, counts["same"] + counts["differs"], counts["same"], counts


def _architectures(found: Found) -> tuple[int, int]:
    """How many architectures have a model that runs on the CPU, and how many there are."""
    names = {name.partition("/")[0] for name in found}
    return len({n.partition("/")[0] for n, checks in found.items() if _built(checks)}), len(names)


def _built(checks: dict[str, dict[str, Any]]) -> bool:
    return checks.get("build", {}).get("status") == "same"


def summary(found: Found) -> str:
    """A line per check."""
    built = _counts(found, "build")
    lines = [f"models: {built['same']} run on the CPU, {built['none']} do not"]
    for check in CHECKS:
        total, runs, same, counts = _totals(found, check)
        if total:
            rest = ", ".join(f"{counts[s]} {s}" for s in _BAD if counts[s])
            lines.append(f"{check}: {total}; run {runs / total:.2%}, same {same / total:.2%} {rest}")
    return "\n".join(lines)


def _total_rows(found: Found) -> list[str]:
    rows = ["| check | models | run | same |", "|---|---|---|---|"]
    for check in CHECKS:
        total, runs, same, _ = _totals(found, check)
        if total:
            rows.append(f"| {_TITLES[check]} | {total} | {runs} ({runs / total:.1%}) | {same} ({same / total:.1%}) |")
    return rows


def _cell(result: dict[str, Any] | None) -> str:
    return "-" if result is None else _SHOWN.get(result["status"], f"**{result['status']}**")


def _model_rows(found: Found) -> list[str]:
    rows = [
        "| architecture | class | " + " | ".join(_TITLES[c] for c in CHECKS) + " |",
        "|---" * (len(CHECKS) + 2) + "|",
    ]
    for name, checks in sorted(found.items()):
        if _built(checks):
            cells = " | ".join(_cell(checks.get(check)) for check in CHECKS)
            rows.append(f"| {name.replace('/', ' | ')} | {cells} |")
    return rows


def _short(detail: str) -> str:
    """One line without paths and addresses, in which Markdown finds nothing."""
    detail = re.sub(r"0x[0-9a-f]+|/[^ ]*/", "", detail.split(" Set TORCHDYNAMO_VERBOSE")[0])
    return re.sub(r"\s+", " ", detail).replace("|", "\\|").replace("`", "'")[:240]


def _problems(found: Found) -> list[str]:
    rows = []
    for name, checks in sorted(found.items()):
        for check in CHECKS:
            if (result := checks.get(check)) is not None and result["status"] in _BAD:
                rows.append(f"- {name}, {_TITLES[check]}: {result['status']}: `{_short(result.get('detail', ''))}`")
    return rows or ["Nothing."]


def _imprecise(found: Found) -> list[str]:
    """Models whose float32 is off by more than the tolerance on either device."""
    rows = []
    for name, checks in sorted(found.items()):
        for check in CHECKS:
            if (result := checks.get(check)) is not None and result["status"] == "same" and result.get("detail"):
                rows.append(f"- {name}, {_TITLES[check]}: {_short(result['detail'])}")
    return rows or ["None."]


def _absent(found: Found) -> list[str]:
    """Classes per reason."""
    reasons: dict[str, list[str]] = defaultdict(list)
    for name, checks in sorted(found.items()):
        if not _built(checks):
            detail = checks.get("build", {}).get("detail", "")
            missing = re.search(r"requires the (\w+) library|million parameters|huggingface.co", detail)
            kind = "the small configuration or its inputs do not fit"
            if missing:
                kind = f"needs {missing[1]}" if missing[1] else "too large when made small"
                kind = "needs a download" if "huggingface.co" in missing[0] else kind
            reasons[kind].append(name)
    return [f"- {reason}: " + ", ".join(names) for reason, names in sorted(reasons.items())]


def table(found: Found) -> str:
    """The whole page."""
    running, architectures = _architectures(found)
    built = _counts(found, "build")
    sections = [
        _INTRODUCTION,
        f"{running} of {architectures} architectures and {built['same']} of {built.total()} classes were run.\n",
        *_total_rows(found),
        "\n## What differs\n",
        *_problems(found),
        "\n## Imprecise on both devices\n",
        *_imprecise(found),
        "\n## Every model\n",
        *_model_rows(found),
        "\n## Not run on the CPU\n",
        *_absent(found),
    ]
    return "\n".join(sections) + "\n"
