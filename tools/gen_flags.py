"""Writes docs/flags.md and docs/vllm-flags.md from tables, and the table of docs/models.md from the families."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from trencadis.server.cli import list_models  # noqa: E402
from trencadis.server.config.flag_docs import make_flags_page, vllm_flags_page  # noqa: E402

if __name__ == "__main__":
    (ROOT / "docs" / "flags.md").write_text(make_flags_page())
    (ROOT / "docs" / "vllm-flags.md").write_text(vllm_flags_page())
    page = ROOT / "docs" / "models.md"
    page.write_text(list_models.make_docs_page(page.read_text(encoding="utf-8")), encoding="utf-8")
