"""Writes docs/api.md by asking an application what it does with each field.

    python tools/gen_api.py [--check]

``--check`` writes nothing and fails where the page is not what the code does.
"""

import difflib
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ["PYTHONPATH"] = str(ROOT)  # of worker processes

from tests.compat.page import page  # noqa: E402

PAGE = ROOT / "docs" / "api.md"


def main() -> int:
    """Writes the page, or compares it."""
    made = page()
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(made, encoding="utf-8")
        return 0
    old = PAGE.read_text(encoding="utf-8")
    print(*difflib.unified_diff(old.splitlines(), made.splitlines(), "docs/api.md", "the code", lineterm=""), sep="\n")
    return int(made != old)


if __name__ == "__main__":
    sys.exit(main())
