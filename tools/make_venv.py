"""Makes the virtual environment of ``make serve``, with a container's torch in it where there is one.

python3 tools/make_venv.py .venv

A Gaudi's or NVIDIA's container brings a torch that belongs to its drivers. An environment of its own would hide it, and
pip would then fetch another. It runs under any Python, so that one that is too old can be told from a broken one.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

LEAST_PYTHON = (3, 11)
LEAST_TORCH, TORCH_BELOW = (2, 6), (2, 14)
PLUGIN = "habana_frameworks"

TOO_OLD = (
    "trencadis: Python {have} is older than 3.11. Gaudi's ubuntu22.04 images carry 3.10: take the ubuntu24.04 image of "
    "the same release, which carries 3.12 (docs/hpu.md); elsewhere name a newer one: make serve PY=python3.12"
)


def folder_of(name: str) -> str:
    """Folder of an importable package, without importing it; "" where there is none."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return ""
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    return places[0] if places else ""


def kept(torch: str, plugin: str) -> str:
    """Why a torch in folder ``torch`` is to be kept, in words; "" where a fresh one is as good."""
    if not torch:
        return ""
    try:
        text = Path(torch, "version.py").read_text(encoding="utf-8")
    except OSError:
        text = ""
    said = re.search(r"""^__version__\s*(?::[^=]*)?=\s*["']([^"']+)["']""", text, re.MULTILINE)
    version = said.group(1) if said else "of an unknown version"
    if plugin or re.search(r"\+(hpu|git)", version):
        return f"torch {version} belongs to Gaudi's plug-in"
    numbers = re.match(r"(\d+)\.(\d+)", version)
    card = re.search(r"""^cuda\s*(?::[^=]*)?=\s*["']""", text, re.MULTILINE)
    if card and numbers and LEAST_TORCH <= (int(numbers.group(1)), int(numbers.group(2))) < TORCH_BELOW:
        return f"torch {version} is built for NVIDIA cards"
    return ""


def see(python: str, name: str) -> str:
    """Folder of a package as another Python finds it."""
    code = f"import importlib.util as u; s = u.find_spec({name!r}); print(s.origin if s else '')"
    done = subprocess.run([python, "-c", code], stdout=subprocess.PIPE, text=True)
    return os.path.dirname(done.stdout.strip()) if done.stdout.strip() else ""


def main() -> int:
    """Makes the environment; returns the exit code."""
    if sys.version_info[:2] < LEAST_PYTHON:
        print(TOO_OLD.format(have="{}.{}.{}".format(*sys.version_info[:3])), file=sys.stderr)
        return 2
    target = Path(sys.argv[1])
    torch, plugin = folder_of("torch"), folder_of(PLUGIN)
    why = kept(torch, plugin)
    flags = ["--system-site-packages"] if why else []
    if subprocess.run([sys.executable, "-m", "venv", *flags, str(target)]).returncode:
        return 1
    if why:
        print(f"trencadis: {why}: the environment keeps it", flush=True)
        keep_path(target, [os.path.dirname(p) for p in (torch, plugin) if p])
    return 0


def keep_path(target: Path, folders: list[str]) -> None:
    """Adds folders to the environment's path where it does not see their torch: the Python may be one itself."""
    python = str(target / "bin" / "python")
    if os.path.dirname(see(python, "torch")) in folders:
        return
    code = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    site = subprocess.run([python, "-c", code], stdout=subprocess.PIPE, text=True).stdout.strip()
    Path(site, "container.pth").write_text("".join(f"{f}\n" for f in dict.fromkeys(folders)), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
