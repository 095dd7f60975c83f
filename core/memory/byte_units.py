"""Formats byte counts for messages."""

from __future__ import annotations


def gib(count: int) -> str:
    """Formats ``count`` bytes as "1.50 GiB" or "12.0 MiB"."""
    return f"{count / 2**30:.2f} GiB" if count >= 1 << 28 else f"{count / 2**20:.1f} MiB"
