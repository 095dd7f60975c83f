"""Records what the caches have evicted, as keys cut to 8 bytes, by which a router tracks the caches of several
engines.
"""

from __future__ import annotations

from hashlib import sha256

SIZE = 8
"""Bytes of a key in the log. Keys only guide routing, so that a collision costs time but no correctness."""


def image_key(key: str) -> bytes:
    """Returns the 8-byte key of an image in the arena, from its ``Sequence.key_of``."""
    return sha256(key.encode()).digest()[:SIZE]


class EvictionLog:
    """Keys of evicted blocks and images, written by ``BlockPool`` and ``EncoderCache`` if the engine is one of
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
        """Returns the keys of blocks and of images evicted since the last call, ``SIZE`` bytes each."""
        taken = bytes(self._blocks), bytes(self._images)
        self._blocks.clear()
        self._images.clear()
        return taken
