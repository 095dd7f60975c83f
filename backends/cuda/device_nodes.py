"""Whether a machine has an NVIDIA card, whatever its software can do with it. Torch-free."""

from __future__ import annotations

from pathlib import Path


def card_nodes() -> bool:
    """Looks for the driver's device nodes."""
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/proc/driver/nvidia/version").exists()


def count_cards(root: Path = Path("/")) -> int | None:
    """How many cards the driver shows, device nodes or not: they are made when a card is first used. None: unknown."""
    nodes, known = root.glob("dev/nvidia[0-9]*"), root.glob("proc/driver/nvidia/gpus/*")
    count = max(len(list(nodes)), len(list(known)))
    if count or not any((root / path).exists() for path in OTHERS):
        return count
    return None


OTHERS = ("proc/driver/nvidia/version", "dev/dxg", "dev/nvmap")
"""What speaks for cards without nodes of their own: a driver without more, Windows' subsystem, an integrated one."""
