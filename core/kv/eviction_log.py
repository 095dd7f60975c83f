"""What caches evicted since somebody asked: keys cut to 8 bytes, by which a router of several engines knows content."""

from __future__ import annotations

from hashlib import sha256

SIZE = 8
"""Bytes of a key in the log. They only guide a choice, so that two equal ones would cost time and nothing else."""


def image_key(key: str) -> bytes:
    """The 8 bytes that stand for an image of the arena (``Sequence.key_of``)."""
    return sha256(key.encode()).digest()[:SIZE]


class EvictionLog:
    """Keys of evicted blocks and images; ``BlockPool`` and ``EncoderCache`` write it where an engine is one of
    several.
    """

    def __init__(self) -> None:
        self._blocks = bytearray()
        self._images = bytearray()

    def block(self, key: bytes) -> None:
        """Records the eviction of a KV block."""
        self._blocks += key[:SIZE]

    def image(self, key: str) -> None:
        """Records the eviction of an image from the encoder cache."""
        self._images += image_key(key)

    def take(self) -> tuple[bytes, bytes]:
        """Blocks and images since the last call, ``SIZE`` bytes each."""
        taken = bytes(self._blocks), bytes(self._images)
        self._blocks.clear()
        self._images.clear()
        return taken
