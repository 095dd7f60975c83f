"""Builds the CPU's kernels as a plain library beside their Python; all else stands in pyproject.toml.

Without a C compiler, or for a CPU that they know nothing of, the package is built without them, and torch's serve.
"""

from __future__ import annotations

import platform
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

FOLDER = "backends/cpu/native"
PACKAGE = "trencadis.backends.cpu.native"
KINDS = ("avx2", "avx_vnni", "avx512", "avx512_vnni")
SOURCES = [
    *(f"{FOLDER}/{name}.c" for name in ("panels", "thread_pool", "dense", "pack", "flash", "turn")),
    *(f"{FOLDER}/panels_{kind}.c" for kind in KINDS),
]
HEADERS = [
    *(f"{FOLDER}/{name}.h" for name in ("panels", "thread_pool", "dense", "flash")),
    *(f"{FOLDER}/{name}.inc" for name in ("panels", "panels_256", "panels_512", "rows", "attend", "flash", "turn")),
]


class Library(build_ext):
    """A library that ctypes loads: no module of Python's, so its name says nothing of a version."""

    def get_ext_filename(self, ext_name: str) -> str:
        return str(Path(*ext_name.split("."))) + ".so"

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return []


class Wheel(bdist_wheel):
    """For this kind of machine, and any Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


kernels = Extension(
    f"{PACKAGE}._panels",
    SOURCES,
    depends=["setup.py", *HEADERS],
    extra_compile_args=["-O2", "-g0", "-std=c11", "-fvisibility=hidden"],
    optional=True,
)

x86 = platform.machine().lower() in ("x86_64", "amd64")
setup(
    ext_modules=[kernels] if x86 and platform.system() != "Windows" else [],
    cmdclass={"build_ext": Library, "bdist_wheel": Wheel},
)
