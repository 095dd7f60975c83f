"""Whether a machine has an NVIDIA card, whatever its software can do with it. Torch-free."""

from __future__ import annotations

from pathlib import Path


def card_nodes() -> bool:
    """Looks for the driver's device nodes."""
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/proc/driver/nvidia/version").exists()
