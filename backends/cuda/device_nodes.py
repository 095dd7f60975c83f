"""Detects NVIDIA cards, whether or not its software can use them. Torch-free."""

from __future__ import annotations

from pathlib import Path


def card_nodes() -> bool:
    """Returns True if the driver has device nodes or a version file."""
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/proc/driver/nvidia/version").exists()


def count_cards(root: Path = Path("/")) -> int | None:
    """Returns how many cards the driver lists, with or without device nodes; None: unknown.

    Device nodes are made when a card is first used.
    """
    nodes, known = root.glob("dev/nvidia[0-9]*"), root.glob("proc/driver/nvidia/gpus/*")
    count = max(len(list(nodes)), len(list(known)))
    if count or not any((root / path).exists() for path in OTHERS):
        return count
    return None


OTHERS = ("proc/driver/nvidia/version", "dev/dxg", "dev/nvmap")
"""Paths that indicate cards without nodes of their own: a bare driver, Windows' subsystem, an integrated card."""
