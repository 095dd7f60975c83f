"""Writes docs/environment.md from the table in core/envs.py and the table of flags."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from trencadis.server.config.flag_docs import make_environment_page  # noqa: E402

if __name__ == "__main__":
    (ROOT / "docs" / "environment.md").write_text(make_environment_page())
