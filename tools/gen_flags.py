"""Writes docs/configuration.md, and the tables of docs/migrating-from-vllm.md and docs/models.md, from the code."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools.pages.reference_pages import make_configuration_page, make_migration_page, make_models_page  # noqa: E402

if __name__ == "__main__":
    (ROOT / "docs" / "configuration.md").write_text(make_configuration_page())
    for name, update in (("migrating-from-vllm", make_migration_page), ("models", make_models_page)):
        page = ROOT / "docs" / f"{name}.md"
        page.write_text(update(page.read_text(encoding="utf-8")), encoding="utf-8")
