"""Writes docs/flags.md and docs/vllm-flags.md from tables, and the table of docs/models.md from the families."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from trencadis.server.cli import models  # noqa: E402
from trencadis.server.config.reference import flags_page, foreign_page  # noqa: E402

if __name__ == "__main__":
    (ROOT / "docs" / "flags.md").write_text(flags_page())
    (ROOT / "docs" / "vllm-flags.md").write_text(foreign_page())
    page = ROOT / "docs" / "models.md"
    page.write_text(models.page(page.read_text(encoding="utf-8")), encoding="utf-8")
