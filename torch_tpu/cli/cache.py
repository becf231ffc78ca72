"""``python -m torch_tpu cache``: the disk cache of compiled programs. Starts no platform."""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from typing import Any

from torch_tpu import config
from torch_tpu.programs import disk


def add_parser(commands: Any) -> None:
    """Adds the command ``cache`` to the program's parser."""
    parser = commands.add_parser("cache", help="list, count or remove the compiled programs on disk")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, run, text in (
        ("ls", _list, "one line per program: operator, bytes, time since the last use"),
        ("stats", _stats, "number of programs, bytes, bound"),
        ("clear", _clear, "remove all programs"),
    ):
        action = actions.add_parser(name, help=text, description=text)
        action.set_defaults(run=run)
        if name == "stats":
            action.add_argument("--json", action="store_true", help="print a JSON object")


def size(count: int) -> str:
    """``1.5 MiB``."""
    value, unit = float(count), "bytes"
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "bytes" else f"{value:.1f} {unit}"


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def stats() -> dict[str, Any]:
    """The cache's folder, whether it is in use, its entries, bytes and bound."""
    found = disk.entries()
    return {
        "folder": str(disk.folder()),
        "enabled": disk.enabled(),
        "entries": len(found),
        "bytes": sum(count for _, count, _ in found),
        "bound": int(config.get("TORCH_TPU_CACHE_BYTES")),
    }


def _list(arguments: argparse.Namespace) -> int:
    now = time.time()
    found = sorted(disk.entries(), key=lambda entry: -entry[2])
    for path, count, used in found:
        print(f"{disk.operator_of(path):40} {size(count):>12} {_age(now - used):>8}")
    names = Counter(disk.operator_of(path) for path, _, _ in found)
    print(f"{len(found)} programs of {len(names)} operators in {disk.folder()}")
    return 0


def _stats(arguments: argparse.Namespace) -> int:
    report = stats()
    if arguments.json:
        print(json.dumps(report, indent=2))
        return 0
    used = "" if report["enabled"] else " (not in use: TORCH_TPU_CACHE=0)"
    print(f"folder   {report['folder']}{used}")
    print(f"entries  {report['entries']}")
    print(f"bytes    {report['bytes']} ({size(report['bytes'])})")
    print(f"bound    {report['bound']} ({size(report['bound'])})")
    return 0


def _clear(arguments: argparse.Namespace) -> int:
    count = sum(n for _, n, _ in disk.entries())
    try:
        removed = disk.clear()
    except OSError as error:
        print(f"The cache {disk.folder()} cannot be cleared: {error}.")
        return 1
    print(f"removed {removed} programs ({size(count)}) from {disk.folder()}")
    return 0
