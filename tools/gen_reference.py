"""Writes reference pages of the site from the code itself: Python API, and the root's pages.

    python tools/gen_reference.py [FOLDER]

``docs/conf.py`` runs this at each build, into a folder that git ignores; nobody edits what it writes.
"""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import trencadis  # noqa: E402

FOLDER = ROOT / "docs" / "reference"
OWN_PAGES = {"changelog": "CHANGELOG.md", "contributing": "CONTRIBUTING.md", "reporting": "SECURITY.md"}
"""Pages of the site that are files of the repository's root."""


def python_api() -> str:
    """What ``from trencadis import ...`` offers, for autodoc to fill in."""
    lines = ["# Python API", "", "`from trencadis import ...` offers these names; anything else may move.", ""]
    lines += ["```{eval-rst}", ".. currentmodule:: trencadis", ""]
    for name in sorted(n for n in trencadis.__all__ if not n.startswith("_")):
        found = getattr(trencadis, name)
        kind = "data"
        if inspect.isclass(found):
            kind = "autoexception" if issubclass(found, BaseException) else "autoclass"
        elif callable(found):
            kind = "autofunction"
        lines.append(f".. {kind}:: {name}")
        lines += ["   :members:", ""] if kind.startswith(("autoclass", "autoexc")) else [""]
    return "\n".join([*lines, "```", ""])


def own_page(name: str) -> str:
    """A page of the root as one of the site: its links start from another folder."""
    text = (ROOT / name).read_text(encoding="utf-8")
    text = text.replace("](docs/", "](../").replace("](SECURITY.md)", "](reporting.md)")
    text = text.replace("](CONTRIBUTING.md)", "](contributing.md)").replace("](CHANGELOG.md)", "](changelog.md)")
    # What the site does not hold is named and not linked: it does not know the repository's address.
    return re.sub(r"\[([^\]]+)\]\((?!https?:|\.\./|#|\w+\.md)[^)]+\)", r"\1", text)


def pages() -> dict[str, str]:
    """Every generated page by its name."""
    made = {"python-api": python_api()}
    return made | {name: own_page(file) for name, file in OWN_PAGES.items()}


def write(folder: Path = FOLDER) -> None:
    """Writes the pages that changed; the others keep their times, so that a build does not repeat them."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        file = folder / f"{name}.md"
        if not file.is_file() or file.read_text(encoding="utf-8") != text:
            file.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(*map(Path, sys.argv[1:2]))
