"""``python -m torch_tpu doctor``: what the device ``tpu`` runs on here, and what is wrong."""

from __future__ import annotations

import argparse
import difflib
import importlib.metadata
import json
import logging
import os
import platform as host
import site
import tempfile
from pathlib import Path
from typing import Any

import torch

import torch_tpu
from torch_tpu import _C, config, platform, tpu
from torch_tpu.cli import cache
from torch_tpu.programs import disk

_PACKAGES = ("torch", "torch_tpu", "xla-cpu-pjrt", "libtpu", "jax", "jaxlib", "numpy")


def add_parser(commands: Any) -> None:
    """Adds the command ``doctor`` to the program's parser."""
    text = "platform, versions, plugins, devices, cache, and what is wrong; exits with 1 if something is"
    parser = commands.add_parser("doctor", help=text, description=text)
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    parser.set_defaults(run=_run)


class Findings:
    """What the examination found: problems need a hand, notes are good to know."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.notes: list[str] = []


def examine() -> dict[str, Any]:
    """Starts the platform and examines everything; see the keys of the result.

    Returns:
        ``platform``, ``versions``, ``plugins``, ``devices``, ``cache``, ``environment``, and the sentences ``problems``
        and ``notes``.
    """
    findings = Findings()
    report: dict[str, Any] = {
        "versions": _versions(findings),
        "environment": _environment(findings),
        "plugins": _plugins(),
        "platform": _platform(findings),
        "cache": _cache(findings),
    }
    report["devices"] = _devices(findings) if "error" not in report["platform"] else []
    return {**report, "problems": findings.problems, "notes": findings.notes}


# ---- the parts ------------------------------------------------------------------------------------------------------
def _installed_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _versions(findings: Findings) -> dict[str, str | None]:
    versions: dict[str, str | None] = {"python": host.python_version()}
    versions.update({name: _installed_version(name) for name in _PACKAGES})
    versions["torch"] = torch.__version__
    built = torch_tpu.built_for()
    versions["torch_tpu was built for torch"] = built
    if built is not None and built.partition("+")[0] != torch.__version__.partition("+")[0]:
        findings.notes.append(f"torch_tpu was built against torch {built} and runs with torch {torch.__version__}.")
    folder = Path(torch_tpu.__file__).parent.parent
    if versions["torch_tpu"] is None:
        findings.problems.append(
            f"torch_tpu is imported from {folder} but is not installed, so `import torch` does not load it and "
            f"libraries do not see it: run `pip install .` there."
        )
    paths = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    for path in paths:
        for package in ("torch", "torch_tpu"):
            if (Path(path) / package).is_dir() and Path(path).resolve() not in _site_folders():
                findings.problems.append(
                    f"PYTHONPATH brings in {Path(path) / package} before the installed {package}: unset PYTHONPATH."
                )
    return versions


def _site_folders() -> set[Path]:
    return {Path(p).resolve() for p in site.getsitepackages()}


def _environment(findings: Findings) -> dict[str, str]:
    for variable in config.VARIABLES.values():
        try:
            variable.read()
        except ValueError as error:
            findings.problems.append(str(error))
    for name in os.environ:
        if name.startswith("TORCH_TPU_") and name not in config.VARIABLES:
            near = difflib.get_close_matches(name, config.VARIABLES, n=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            findings.problems.append(f"{name} is set, but torch_tpu has no such variable.{hint}")
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
        findings.notes.append("TORCH_DEVICE_BACKEND_AUTOLOAD is 0: programs must import torch_tpu themselves.")
    return {name: os.environ[name] for name in config.VARIABLES if name in os.environ}


def _plugins() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in dict.fromkeys(("cpu", "tpu", platform.name())):
        try:
            found[name] = platform.plugin_path(name)
        except RuntimeError:
            found[name] = None
    return found


def _platform(findings: Findings) -> dict[str, Any]:
    name, why = platform.choice()
    report: dict[str, Any] = {"name": name, "why": why, "tpu_chips": platform.scan_pci()}
    try:
        _C._init()
    except Exception as error:  # whatever keeps the platform from starting is what the user wants to know
        report["error"] = str(error)
        findings.problems.append(str(error))
        return report
    info = _C._platform_info()
    report |= {"plugin": info["plugin"], "api": ".".join(map(str, info["api"])), "version": info["version"]}
    if platform.kind() == "cpu":
        chips = report["tpu_chips"]
        findings.notes.append(
            f"This machine has a TPU {chips[0]}, but the platform is {name} because {why}."
            if chips
            else "This machine has no TPU. Device 'tpu' runs on XLA's CPU backend with a TPU's numerics: right for "
            "development and tests, not for speed."
        )
    return report


def _devices(findings: Findings) -> list[dict[str, Any]]:
    devices: list[dict[str, Any]] = []
    for i in range(tpu.device_count()):
        devices.append({"device": f"tpu:{i}", "name": tpu.get_device_name(i), "memory": _C._capacity(i)})
        try:
            works = (torch.ones(2, device=f"tpu:{i}") + 1).tolist() == [2.0, 2.0]
        except Exception as error:  # as above
            findings.problems.append(f"tpu:{i} cannot run `torch.ones(2) + 1`: {error}")
            continue
        if not works:
            findings.problems.append(f"tpu:{i} gives a wrong result for `torch.ones(2) + 1`.")
    return devices


def _cache(findings: Findings) -> dict[str, Any]:
    report = cache.stats()
    report["writable"] = _writable(disk.folder())
    if not report["enabled"]:
        findings.notes.append("The disk cache is off: every process compiles its programs again.")
    elif not report["writable"]:
        findings.problems.append(
            f"The cache folder {disk.folder()} cannot be written: set TORCH_TPU_CACHE_DIR to one that can."
        )
    return report


def _writable(folder: Path) -> bool:
    """True if a file can be made in ``folder``, or the folder can be made: tried, for permissions do not tell all."""
    there = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())
    try:
        os.rmdir(tempfile.mkdtemp(dir=there))
    except OSError:
        return False
    return True


# ---- printing -------------------------------------------------------------------------------------------------------
def _section(title: str, rows: dict[str, Any]) -> None:
    print(title)
    width = max(map(len, rows), default=0)
    for key, value in rows.items():
        print(f"  {key:{width}}  {'not installed' if value is None else value}")


def _print(report: dict[str, Any]) -> None:
    chosen = report["platform"]
    rows = {"name": chosen["name"], "why": chosen["why"]}
    if "error" not in chosen:
        rows |= {"plugin": chosen["plugin"], "PJRT C API": chosen["api"], "version": chosen["version"]}
    _section("platform", rows)
    _section("versions", report["versions"])
    _section("plugins", report["plugins"])
    _section(
        "devices", {d["device"]: f"{d['name']}, {cache.size(d['memory'])}" for d in report["devices"]} or {"none": ""}
    )
    stored = report["cache"]
    _section(
        "program cache",
        {
            "folder": stored["folder"],
            "in use": "yes" if stored["enabled"] else "no",
            "writable": "yes" if stored["writable"] else "no",
            "entries": stored["entries"],
            "size": f"{cache.size(stored['bytes'])} of at most {cache.size(stored['bound'])}",
        },
    )
    _section("environment", report["environment"] or {"none of torch_tpu's variables is set": ""})
    for note in report["notes"]:
        print(f"note: {note}")
    for problem in report["problems"]:
        print(f"PROBLEM: {problem}")
    if not report["problems"]:
        print("Nothing is wrong.")


def _run(arguments: argparse.Namespace) -> int:
    logging.getLogger("torch_tpu").setLevel(logging.ERROR)  # the report says it better
    report = examine()
    if arguments.json:
        print(json.dumps(report, indent=2))
    else:
        _print(report)
    return 1 if report["problems"] else 0
