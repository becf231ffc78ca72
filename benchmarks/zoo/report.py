"""Totals and the table of ``docs/models.md``."""

from __future__ import annotations

from collections import Counter
from typing import Any

from zoo.checks import CHECKS

Found = dict[str, dict[str, dict[str, Any]]]


def _counts(found: Found, check: str) -> Counter[str]:
    return Counter(checks[check]["status"] for checks in found.values() if check in checks)


def summary(found: Found) -> str:
    """A line per check."""
    built = _counts(found, "build")
    lines = [f"models: {built['same']} run on the CPU, {built['none']} do not"]
    for check in CHECKS:
        counts = _counts(found, check)
        total = sum(counts.values()) - counts["none"]
        if total:
            runs = counts["same"] + counts["differs"]
            rest = ", ".join(f"{counts[s]} {s}" for s in ("differs", "fails", "crash", "timeout") if counts[s])
            lines.append(f"{check}: {total}; run {runs / total:.2%}, same {counts['same'] / total:.2%} {rest}")
    return "\n".join(lines)


def table(found: Found) -> str:
    return summary(found)
