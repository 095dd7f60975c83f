"""Builds the CPU's kernels as a plain library beside their Python; all else stands in pyproject.toml.

A file of kernels that the compiler refuses is left out: the others serve, the library knows what it lacks, and this
build says so. Without a C compiler, or for a CPU that the kernels know nothing of, the package is built without them,
and torch's serve.
"""

from __future__ import annotations

import os
import platform
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.errors import CompileError
from setuptools.modified import newer_group

FOLDER = "backends/cpu/native"
PACKAGE = "trencadis.backends.cpu.native"
OPTIONAL = (
    "panels_avx512_bf16", "dense_avx2", "dense_avx512",
    "panels_avx2", "panels_avx_vnni", "panels_avx512", "panels_avx512_vnni", "panels_amx", "panels_amx_emulated",
)  # fmt: skip
"""Files for one kind of instructions each, in the order of compilation: later ones and NEEDED know what is missing."""
NEEDED = (
    "panels",
    "thread_pool",
    "dense",
    "tiles",
    "flash",
    "rotary",
    "recurrent",
    "adapters",
    "experts",
    "replay",
    "layouts",
)
SOURCES = [f"{FOLDER}/{name}.c" for name in (*OPTIONAL, *NEEDED)]
FLAGS = ["-O2", "-g0", "-std=c11", "-fvisibility=hidden", "-ffp-contract=off", "-Wall", "-Wextra"]
"""Products and sums are contracted where the sources say so alone, whatever a compiler does by itself."""


TEMPLATES, ASSETS = Path("examples", "templates"), Path("trencadis", "assets", "templates")
"""Chat templates, and where an installation has them."""


class Modules(build_py):
    """Python files, and the chat templates of the examples."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        for file in TEMPLATES.glob("*.jinja"):
            self.mkpath(str(Path(self.build_lib, ASSETS)))
            self.copy_file(str(file), str(Path(self.build_lib, ASSETS, file.name)))


class Library(build_ext):
    """A library that ctypes loads: no module of Python's, so its name says nothing of a version."""

    def get_ext_filename(self, ext_name: str) -> str:
        return str(Path(*ext_name.split("."))) + ".so"

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return []

    def build_extension(self, ext: Extension) -> None:
        """Compiles file by file, as many at a time as there are cores."""
        made = self.get_ext_fullpath(ext.name)
        if not (self.force or newer_group([*ext.sources, *ext.depends], made, "newer")):
            return
        missing = list[str]()
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            try:
                objects = list(pool.map(lambda name: self._compiled(ext, name, []), OPTIONAL))
            except CompileError:  # again in order, since later files are told what is missing
                objects = []
                for name in OPTIONAL:
                    try:
                        objects.append(self._compiled(ext, name, missing))
                    except CompileError:
                        missing.append(name)
            objects += pool.map(lambda name: self._compiled(ext, name, missing), NEEDED)
        self.compiler.link_shared_object(
            list(chain(*objects)), made, libraries=["m"], build_temp=self.build_temp, target_lang="c"
        )
        if missing:
            names = ", ".join(f"{name}.c" for name in missing)
            print(f"warning: kernels are left out, since the C compiler refuses them: {names}", file=sys.stderr)

    def _compiled(self, ext: Extension, name: str, missing: list[str]) -> list[str]:
        """Objects of one file, which is told what is missing."""
        macros: list[tuple[str, str | None]] = [(f"WITHOUT_{each.upper()}", None) for each in missing]
        macros.append(("LEFT_OUT", '"' + " ".join(missing) + '"'))
        sources, flags = [f"{FOLDER}/{name}.c"], ext.extra_compile_args
        objects: list[str] = self.compiler.compile(sources, self.build_temp, macros, extra_postargs=flags)
        return objects


class Wheel(bdist_wheel):
    """For this kind of machine, and any Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


kernels = Extension(
    f"{PACKAGE}._panels",
    SOURCES,
    depends=["setup.py", *(str(path) for end in ("h", "inc") for path in sorted(Path(FOLDER).glob(f"*.{end}")))],
    extra_compile_args=FLAGS,
    optional=True,
)

x86 = platform.machine().lower() in ("x86_64", "amd64")
setup(
    ext_modules=[kernels] if x86 and platform.system() != "Windows" else [],
    cmdclass={"build_ext": Library, "build_py": Modules, "bdist_wheel": Wheel},
)
