"""Telling failures of a device apart by what they say: backends raise errors of their own types."""

from __future__ import annotations

OOM_PHRASES = ("out of memory", "outofdevicememory", "allocation failed", "failed to allocate", "not enough memory")


def ran_out(error: BaseException) -> bool:
    """Whether the device had no memory left."""
    text = f"{type(error).__name__} {error}".lower().replace("outofmemory", "out of memory")
    return isinstance(error, MemoryError) or any(s in text for s in OOM_PHRASES)


def line(error: BaseException) -> str:
    """An error as one short line."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]
