"""A container's torch survives: the environment of ``make serve`` keeps it, and nothing that pip is told names it."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.stubs import gaudi_container
from tools import make_venv
from trencadis.core.process import torch_detection

pytestmark = pytest.mark.part("gaudi")

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def needed(names: set[str]) -> set[str]:
    """Every package that installing ``names`` brings, as the installed ones say."""
    found: set[str] = set()
    queue = list(names)
    while queue:
        name = queue.pop().lower().replace("_", "-")
        if name in found:
            continue
        found.add(name)
        try:
            wanted = [Requirement(text) for text in metadata.requires(name) or ()]
        except metadata.PackageNotFoundError:
            continue
        queue += [r.name for r in wanted if r.marker is None or r.marker.evaluate({"extra": ""})]
    return found


def test_no_dependency_brings_a_torch() -> None:
    """So ``pip install .`` has no reason to replace the one that is there, whatever its version."""
    own = {Requirement(text).name for text in PROJECT["dependencies"]}
    assert {"fastapi", "transformers", "numpy"} <= own
    assert not {n for n in needed(own) if n in ("torch", "triton", "torchvision") or n.startswith("nvidia-")}


def test_a_laptop_gets_torch_by_an_extra_with_the_bounds_of_the_check() -> None:
    for extra in ("cpu", "cuda"):
        (torch,) = (Requirement(t) for t in PROJECT["optional-dependencies"][extra] if Requirement(t).name == "torch")
        assert str(torch.specifier).endswith(">=2.6") or str(torch.specifier).endswith(">=2.11")
    (cpu,) = (Requirement(text).specifier for text in PROJECT["optional-dependencies"]["cpu"])
    least, newest = (".".join(map(str, v)) for v in (torch_detection.LEAST, torch_detection.NEWEST))
    assert f"{least}.0" in cpu and f"{newest}.9" in cpu and "2.5.9" not in cpu and "2.14.0" not in cpu
    assert "hpu" not in PROJECT["optional-dependencies"], "a plug-in that pip chooses belongs to no torch"
    assert (torch_detection.LEAST, (2, torch_detection.NEWEST[1] + 1)) == (make_venv.LEAST_TORCH, make_venv.TORCH_BELOW)


@pytest.mark.parametrize("version", gaudi_container.PUBLISHED)
def test_a_torch_beside_a_plug_in_is_kept(version: str, tmp_path: Path) -> None:
    (tmp_path / "version.py").write_text(f"__version__ = '{version}'\ncuda: Optional[str] = None\n")
    assert "belongs to Gaudi's plug-in" in make_venv.kept(str(tmp_path), "habana_frameworks")


@pytest.mark.parametrize(
    ("version", "cuda", "keeps"),
    [("2.13.0+cpu", "None", False), ("2.11.0+cu128", "'12.8'", True), ("2.4.0+cu121", "'12.1'", False),
     ("2.9.0+hpu_1.23.1-25.git8598e6d", "None", True)],
)  # fmt: skip
def test_a_laptops_torch_is_not_the_environments(version: str, cuda: str, keeps: bool, tmp_path: Path) -> None:
    (tmp_path / "version.py").write_text(f"__version__ = '{version}'\ncuda: Optional[str] = {cuda}\n")
    assert bool(make_venv.kept(str(tmp_path), "")) is keeps
    assert make_venv.kept("", "") == ""


PYTHON = """#!/bin/sh
case "$*" in
  *"-c import torch") exit {importable} ;;
  *find_spec*) echo "{outside}" ;;
  *pip*) echo "$*" >> {log} ;;
esac
"""


def installed(folder: Path, importable: bool = False, outside: str = "", **machine: int) -> tuple[int, str, str]:
    """(exit code, what pip was asked for, what was said) of ``install_torch.sh`` on a machine."""
    log, python, root = folder / "pip.log", folder / "python", folder / "root"
    python.write_text(PYTHON.format(importable=0 if importable else 1, outside=outside, log=log))
    python.chmod(0o755)
    gaudi_container.put_cards(root, machine.get("gaudis", 0), driver="")
    for number in range(machine.get("nvidia", 0)):
        gaudi_container.put(root / f"dev/nvidia{number}", "")
    gaudi_container.put(root / "dev/accel/accel0", "")  # of any kind: laptops have one for their NPU
    env = {**os.environ, "TRENCADIS_MACHINE_ROOT": str(root)}
    script = ["sh", str(ROOT / "tools" / "install_torch.sh"), str(python)]
    done = subprocess.run(script, env=env, capture_output=True, text=True)
    return done.returncode, log.read_text() if log.exists() else "", done.stderr


def test_which_torch_is_installed(tmp_path: Path) -> None:
    made = [tmp_path / name for name in ("kept", "laptop", "nvidia", "gaudi", "broken")]
    for folder in made:
        folder.mkdir()
    assert installed(made[0], importable=True, gaudis=1) == (0, "", "")
    code, requested, said = installed(made[1])
    assert code == 0 and "torch==2.13.0 --extra-index-url" in requested and not said
    code, requested, said = installed(made[2], nvidia=1)
    assert "torch>=2.11,<2.14" in requested and "extra-index" not in requested
    code, requested, said = installed(made[3], gaudis=1)
    assert "--extra-index-url" in requested and "start from Gaudi's container" in said, "never CUDA's"
    code, requested, said = installed(made[4], outside="/usr/lib/torch/__init__.py", gaudis=1)
    assert code == 1 and not requested and "is not replaced" in said and said.count("\n") == 1


def older_python() -> str:
    for place in (Path.home() / ".pyenv" / "versions").glob("3.10.*/bin/python3.10"):
        return str(place)
    return ""


@pytest.mark.parametrize("words", [["tools/make_venv.py", "unmade"], ["-m", "trencadis.server", "--version"]])
def test_python_3_10_is_refused_with_the_name_of_another_image(words: list[str], tmp_path: Path) -> None:
    python = older_python()
    if not python:
        pytest.skip("there is no Python 3.10 here")
    words = [str(ROOT / words[0]), str(tmp_path / words[1])] if words[0].endswith(".py") else words
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([python, *words], env=env, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert "Python 3.10" in done.stderr and "ubuntu24.04" in done.stderr and not list(tmp_path.iterdir())


def test_the_makefile_goes_through_both() -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert "$(PY) tools/make_venv.py $(VENV)" in text and "sh tools/install_torch.sh $(BIN)/python" in text
    assert sys.version_info >= make_venv.LEAST_PYTHON and "-m venv $(VENV)" not in text
