"""The texts of the plug-in's errors that mean a lack of memory on the card."""

from __future__ import annotations

TEXTS = (
    "allocation failed for size::",  # the pool (device_memory.cpp); also for a graph that is captured
    "workspace allocation of size ::",  # the workspace of recipes, where a card runs out first (device.cpp)
    "destination_pointer_ allocation failed",  # while memory is moved together (device_memory.cpp)
    "no enough memory for defragment",  # the same, in later releases
    "synoutofdevicememory",
    "out of memory",  # the pool's extension, and HCCL's buffers
)
"""In lower case. An error of the thread that launches recipes holds one of them behind its own text."""


def is_out_of_memory(error: BaseException) -> bool:
    """Returns True if an error of the plug-in, or of the emulator, means a lack of memory on the card."""
    text = str(error).lower()
    return any(part in text for part in TEXTS)
