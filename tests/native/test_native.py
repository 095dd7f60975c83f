"""The build of the CPU's kernels file by file, and their sanitizers."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from trencadis.backends.cpu.native import kernel_choice_by_cpu, kernel_library
from trencadis.backends.cpu.native.kernel_choice_by_cpu import VARIABLE

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "backends" / "cpu" / "native"
BUILT = kernel_library.load_library().library is not None
COMPILERS = [name for name in ("gcc", "clang", "cc") if shutil.which(name)][:2]
COMPILER = COMPILERS[0] if COMPILERS else None


def optional_files() -> list[str]:
    """Names of the files that setup.py leaves out if a compiler refuses them."""
    for node in ast.parse((ROOT / "setup.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "OPTIONAL":
            return list(ast.literal_eval(node.value))
    raise AssertionError("setup.py has no OPTIONAL")


REFUSES = """#!/bin/sh
for word in "$@"; do
  case "$word" in *REFUSED.c) echo "error: unknown target" >&2; exit 1;; esac
done
exec COMPILER "$@" -O0
"""

ASKS = """
import ctypes, sys
from pathlib import Path
from trencadis.backends.cpu.native import kernel_library
have = kernel_library.open_library(Path(sys.argv[1]))
print(*have.left_out, *sorted(have.features), have.why)
"""


@pytest.mark.skipif(not BUILT, reason="own kernels are not built here")
def test_what_a_compiler_refused_is_named_where_kernels_are(monkeypatch: pytest.MonkeyPatch) -> None:
    have = kernel_library.load_library()._replace(left_out=("panels_avx_vnni.c",))
    monkeypatch.setattr(kernel_library, "load_library", lambda: have)
    monkeypatch.delenv(VARIABLE, raising=False)
    kernel_choice_by_cpu._chosen.cache_clear()
    said = "kernels are left out, since the C compiler refused panels_avx_vnni.c"
    assert kernel_library.report_left_out() == said and said in kernel_choice_by_cpu.line()
    kernel_choice_by_cpu._chosen.cache_clear()


@pytest.mark.skipif(not BUILT, reason="own kernels are not built here")
def test_a_library_with_another_structure_does_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(kernel_library.__file__).parent
    assert kernel_library.open_library(folder).library is not None
    monkeypatch.setattr(kernel_library, "find_difference", lambda made: "DenseLayout")
    assert "has another DenseLayout than this Python" in kernel_library.open_library(folder).why


def build_refusing(refused: str, compiler: str, home: Path) -> tuple[subprocess.CompletedProcess[str], Path]:
    """Builds a copy of the kernels with a compiler that refuses one file; returns the run and the library's folder."""
    copy, wrapper = home / "copy", home / "cc"
    copy.mkdir()
    for name in ("backends/cpu/native", "trencadis"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, copy / name)
    wrapper.write_text(REFUSES.replace("REFUSED", refused).replace("COMPILER", str(shutil.which(compiler))))
    wrapper.chmod(0o755)
    words = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", str(home / "lib")]
    built = subprocess.run(words, cwd=copy, env={**os.environ, "CC": str(wrapper)}, capture_output=True, text=True)
    made = next((home / "lib").rglob("_panels.so"), None)
    return built, home if made is None else made.parent


@pytest.mark.long
@pytest.mark.skipif(not BUILT or COMPILER is None, reason="no C compiler for an x86 CPU")
@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("refused", optional_files())
def test_a_compiler_that_refuses_one_file_leaves_the_other_kernels_in(
    refused: str, compiler: str, tmp_path: Path
) -> None:
    built, folder = build_refusing(refused, compiler, tmp_path)
    assert built.returncode == 0 and f"the C compiler refuses them: {refused}.c" in built.stderr, built.stderr
    said = subprocess.run(
        [sys.executable, "-c", ASKS, str(folder)], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    features = {name for name, sources in kernel_library.NEEDS.items() if refused in sources}
    assert said[0] == f"{refused}.c" and set(said[1:]) == kernel_library.load_library().features - features


@pytest.mark.long
@pytest.mark.skipif(not BUILT or COMPILER is None, reason="no C compiler for an x86 CPU")
def test_without_a_file_that_all_kernels_need_there_is_no_library(tmp_path: Path) -> None:
    """The installation goes on, and says that torch's kernels serve."""
    built, folder = build_refusing("thread_pool", str(COMPILER), tmp_path)
    assert built.returncode == 0 and "thread_pool" in built.stderr, built.stderr
    assert kernel_library.open_library(folder).why.startswith("they are not built")


NO_KERNELS = re.compile(r"trencadis_(pool_\w+|panels_version|left_out|layout|cpu_features|features_of|launches)")
"""Exported functions that say or set something, and multiply nothing."""


def test_every_exported_kernel_has_a_case_that_the_sanitizers_run() -> None:
    cases = {path.name: path.read_text() for path in Path(__file__).parent.glob("fuzz*.c")}
    exported = set(re.findall(r"\b(trencadis_\w+)\(", (SOURCES / "exports.h").read_text()))
    kernels = {name for name in exported if not NO_KERNELS.fullmatch(name)}
    called = set(re.findall(r"\b(trencadis_\w+)\(", "".join(cases.values())))
    assert len(kernels) >= 16 and not kernels - called, kernels - called
    recorded = set(re.findall(r"\b(CALL_\w+)", (SOURCES / "replay.h").read_text()))
    assert len(recorded) >= 10 and not recorded - set(re.findall(r"RECORDED\((CALL_\w+)", cases["fuzz_calls.c"]))
    written = set(re.findall(r"^(?:static )?void (fuzz_\w+)\(void\)", "".join(cases.values()), re.MULTILINE))
    assert written == set(re.findall(r"(?:CASE|TILED)\((fuzz_\w+)\)", cases["fuzz.c"]))


@pytest.mark.long
@pytest.mark.skipif(not BUILT or COMPILER is None, reason="no C compiler for an x86 CPU")
def test_sanitizers_find_nothing() -> None:
    subprocess.run([sys.executable, "-m", "tests.native.sanitizers", "--cases", "3000"], cwd=ROOT, check=True)
