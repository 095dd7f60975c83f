"""Writes docs/environment.md from the table in core/envs.py."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from trencadis.core.envs import markdown  # noqa: E402

if __name__ == "__main__":
    (ROOT / "docs" / "environment.md").write_text(markdown())
