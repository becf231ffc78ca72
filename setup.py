"""Builds torch_tpu._C for the PyTorch that is installed here; the rest about the package is in pyproject.toml."""

import importlib.util
import os
import tomllib
from pathlib import Path

# An installed torch_tpu must not be loaded by the very build that replaces it.
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
os.environ.setdefault("MAX_JOBS", "2")

import torch
from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

PACKAGE = Path("torch_tpu")
CSRC = PACKAGE / "csrc"
SUPPORTED = ((2, 11), (2, 14))

major, minor = (int(part) for part in torch.__version__.split(".")[:2])
if not SUPPORTED[0] <= (major, minor) <= SUPPORTED[1]:
    raise SystemExit(f"torch_tpu builds against torch 2.11 to 2.14, and torch {torch.__version__} is installed.")


def requirements() -> list[str]:
    """What the built package needs. Its C++ core fits the minor version of PyTorch that it was compiled against."""
    static = tomllib.loads(Path("pyproject.toml").read_text())["tool"]["torch_tpu"]["requirements"]
    return [f"torch=={major}.{minor}.*", *static]


def pjrt_include_dir() -> str:
    """The folder of pjrt_c_api.h, which the package xla-cpu-pjrt carries."""
    spec = importlib.util.find_spec("xla_plugins.xla_cpu_pjrt")
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError("pjrt_c_api.h is missing: run `pip install xla-cpu-pjrt==0.0.1`, which carries it.")
    return str(Path(spec.submodule_search_locations[0], "include"))


class BuildExt(BuildExtension):
    """Notes the version of PyTorch beside the extension, and keeps the objects of a working copy in one place."""

    def finalize_options(self) -> None:
        super().finalize_options()
        if self.inplace or self.editable_mode:
            self.build_temp = str(Path("build", "objects"))

    def run(self) -> None:
        super().run()
        folder = PACKAGE if self.inplace or self.editable_mode else Path(self.build_lib) / PACKAGE
        folder.joinpath("_build.py").write_text(
            f'"""Written by setup.py."""\n\nTORCH_VERSION = "{torch.__version__}"\n'
        )


setup(
    install_requires=requirements(),
    ext_modules=[
        CppExtension(
            "torch_tpu._C",
            sources=sorted(str(path) for path in CSRC.rglob("*.cc")),
            depends=sorted(str(path) for path in CSRC.rglob("*.h")),
            include_dirs=[str(CSRC.resolve()), pjrt_include_dir()],
            extra_compile_args=["-O2", "-std=c++20", "-fvisibility=hidden", "-Wall", "-g0"],
            libraries=["dl"],
        )
    ],
    cmdclass={"build_ext": BuildExt},
)
