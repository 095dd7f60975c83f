"""Fetches the sdist of vLLM with pip and keeps its tests, in a folder that git ignores.

    python -m tests.compat.vllm_suite.download FOLDER PYTHON

pip builds the metadata of every sdist that it downloads, for which vLLM needs torch, Rust and more. A build backend of
a few lines stands in their place: it copies the metadata that the sdist has. PYTHON is that of the environment which
runs the tests.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

VERSION = "0.33.0"
NAME = f"vllm-{VERSION}"
BACKEND = """\
from pathlib import Path


def prepare_metadata_for_build_wheel(folder, config_settings=None):
    made = Path(folder) / "NAME.dist-info"
    made.mkdir()
    (made / "METADATA").write_bytes(Path("PKG-INFO").read_bytes())
    return made.name
"""


def fetch_tests(folder: Path) -> Path:
    """Returns ``folder / "tests"``, downloaded if it is not there."""
    found = folder / "tests"
    if (folder / NAME).exists():
        return found
    with tempfile.TemporaryDirectory() as made:
        backend = Path(made) / "backend" / "setuptools"
        backend.mkdir(parents=True)
        (backend / "__init__.py").touch()
        (backend / "build_meta.py").write_text(BACKEND.replace("NAME", NAME))
        command = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps",
                   "--no-build-isolation", "--no-binary", "vllm", "-d", made, f"vllm=={VERSION}"]  # fmt: skip
        subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(backend.parent)})
        folder.mkdir(parents=True, exist_ok=True)
        with tarfile.open(Path(made) / f"{NAME}.tar.gz") as archive:
            wanted = [m for m in archive if m.name.startswith((f"{NAME}/tests/", f"{NAME}/examples/"))]
            archive.extractall(made, wanted, filter="data")
        for name in ("tests", "examples"):
            (Path(made) / NAME / name).rename(folder / name)
    (found / "conftest.py").unlink()  # it imports the whole of vLLM; the plugin has what server tests take from it
    (folder / NAME).touch()
    return found


def share_packages(python: str) -> None:
    """Lets the environment of ``python`` import the packages of this one, after its own."""
    show = "import site; print(site.getsitepackages()[0])"
    theirs = subprocess.run([python, "-c", show], check=True, capture_output=True, text=True).stdout.strip()
    ours = [path for path in sys.path if path.endswith("site-packages")]
    (Path(theirs) / "shared.pth").write_text("\n".join(ours) + "\n")


if __name__ == "__main__":
    fetch_tests(Path(sys.argv[1]))
    share_packages(sys.argv[2])
