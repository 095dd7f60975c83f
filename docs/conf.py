"""Settings of the documentation site: ``make docs`` builds it from these pages, offline, and a warning is an error."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import trencadis  # noqa: E402
from tools.gen_reference import write  # noqa: E402

write()

project = "Trencadis"
author = "The Trencadis developers"
copyright = "The Trencadis developers, Apache-2.0"
version = release = trencadis.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["**/.*"]
nitpicky = False
myst_heading_anchors = 4
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_preserve_defaults = True

html_theme = "furo"
html_title = f"Trencadis {release}"
html_copy_source = False
html_show_sphinx = False


def _unlink(app: Any, name: str, source: list[str]) -> None:
    """Links to files of the repository beside ``docs/`` become their text: the site does not hold what they lead to."""
    if "/" not in name:
        source[0] = re.sub(r"(?<!!)\[([^\]]+)\]\(\.\./[^)]+\)", r"\1", source[0])


def setup(app: Any) -> None:
    app.connect("source-read", _unlink)
