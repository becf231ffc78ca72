"""Builds torch_tpu._C: everything else about the package is in pyproject.toml."""

import importlib.util
import os
from pathlib import Path

# An installed torch_tpu must not be loaded by the very build that replaces it.
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
os.environ.setdefault("MAX_JOBS", "2")

from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

CSRC = Path("torch_tpu", "csrc")


def pjrt_include_dir() -> str:
    """The folder of pjrt_c_api.h, which the package xla-cpu-pjrt carries."""
    spec = importlib.util.find_spec("xla_plugins.xla_cpu_pjrt")
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError("pjrt_c_api.h is missing: run `pip install xla-cpu-pjrt==0.0.1`, which carries it.")
    return str(Path(spec.submodule_search_locations[0], "include"))


class BuildExt(BuildExtension):
    """Keeps the objects of a working copy in one place, so that editable installs build incrementally too."""

    def finalize_options(self) -> None:
        super().finalize_options()
        if self.inplace or self.editable_mode:
            self.build_temp = str(Path("build", "objects"))


setup(
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
