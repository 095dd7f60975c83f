"""Files that ship with the package."""

from __future__ import annotations

from pathlib import Path


def demo_path() -> Path:
    """The folder of the bundled demo checkpoint."""
    return Path(__file__).resolve().parent / "demo"
