"""Recognises out-of-memory errors by their text, because each backend raises its own error types."""

from __future__ import annotations

OOM_PHRASES = (
    "out of memory", "outofdevicememory", "allocation failed", "alloc failed", "failed to allocate",
    "not enough memory", "no enough memory", "workspace allocation of size",
)  # fmt: skip
"""Phrases in lower case. Underscores in the error text, as in names of status codes, count as spaces."""


def is_out_of_memory(error: BaseException) -> bool:
    """Returns True if the error means that the device ran out of memory."""
    text = f"{type(error).__name__} {error}".lower().replace("outofmemory", "out of memory").replace("_", " ")
    return isinstance(error, MemoryError) or any(s in text for s in OOM_PHRASES)


def format_error(error: BaseException) -> str:
    """Returns an error as one short line."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]
