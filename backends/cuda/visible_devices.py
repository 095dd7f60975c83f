"""``CUDA_VISIBLE_DEVICES``: cards by index, UUID or MIG instance, checked and shown before CUDA reads it. Torch-free.

CUDA uses the entries up to the first unknown one and ignores the others silently; so a list that it would cut is
refused here. UUIDs may be shortened as long as they name one card, which only the driver knows.

Detects NVIDIA cards, whether or not its software can use them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from trencadis.core.devices import DeviceEnv
from trencadis.core.errors import StartupError


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


VISIBLE = "CUDA_VISIBLE_DEVICES"
KINDS = {
    "index": re.compile(r"\d+"),
    "UUID": re.compile(r"GPU-[0-9a-fA-F-]+"),
    "MIG instance": re.compile(r"MIG-(?:GPU-)?[0-9a-fA-F-]+(?:/\d+/\d+)?"),
}


def visible(environ: Mapping[str, str]) -> tuple[str, ...] | None:
    """Returns the entries of ``CUDA_VISIBLE_DEVICES``; None: it is unset and all cards are visible; (): it hides all.

    Raises:
        StartupError: an entry names no card, is repeated, or is of another kind than the first.
    """
    text = environ.get(VISIBLE)
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if parts in ([""], ["-1"]):
        return ()
    kinds = [kind_of(part) for part in parts]
    form = "indices (0,1), UUIDs (GPU-...) or MIG instances (MIG-...), with commas between"
    if "" in kinds:
        raise StartupError(f"{VISIBLE}={text!r}: {parts[kinds.index('')]!r} names no card; it takes {form}")
    if len(set(kinds)) > 1:
        raise StartupError(
            f"{VISIBLE}={text!r} mixes kinds, and CUDA would stop at the first other one; it takes {form}"
        )
    if len(set(parts)) < len(parts):
        raise StartupError(f"{VISIBLE}={text!r} names a card twice, and CUDA would then show none")
    if kinds[0] == "MIG instance" and len(parts) > 1:
        raise StartupError(f"{VISIBLE}={text!r}: CUDA gives a process one MIG instance; name one")
    return tuple(parts)


def kind_of(entry: str) -> str:
    """Returns ``index``, ``UUID`` or ``MIG instance``; "" for any other entry."""
    return next((kind for kind, pattern in KINDS.items() if pattern.fullmatch(entry)), "")


def describe(environ: Mapping[str, str]) -> str:
    """Describes the variable: ``CUDA_VISIBLE_DEVICES=GPU-1b2c...: one card by UUID``; "" if it is unset."""
    entries = visible(environ)
    if entries is None:
        return ""
    if not entries:
        return f"{VISIBLE}={environ[VISIBLE]!r} hides all cards"
    count = "one card" if len(entries) == 1 else f"{len(entries)} cards"
    return f"{VISIBLE}={environ[VISIBLE]}: {count} by {kind_of(entries[0])}, counted from 0 here"


def settle(environ: Mapping[str, str], index: int = 0, rank: int = 0, world: int = 1) -> DeviceEnv:
    """Checks the variable for card ``index`` and ``world`` ranks (``core.devices.SETTLERS``).

    Raises:
        StartupError: it cannot be parsed, or shows fewer cards than are needed.
    """
    entries = visible(environ)
    if entries is not None and entries and not environ.get("TRENCADIS_CUDA_TWIN"):
        if world > len(entries):
            raise StartupError(
                f"--tensor-parallel-size {world} needs {world} cards, and {VISIBLE}={environ[VISIBLE]} shows "
                f"{len(entries)}"
            )
        if index >= len(entries):
            raise StartupError(f"--device cuda:{index}: {VISIBLE}={environ[VISIBLE]} shows {len(entries)}, from 0 on")
    line = describe(environ)
    return DeviceEnv({}, (f"cuda: {line}",) if line else ())
