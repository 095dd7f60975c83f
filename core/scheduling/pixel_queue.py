"""Pixels for the encoder: which to request, and which have arrived. Torch-free.

The engine pulls pixels about one VISION launch ahead, so that those of images in the arena or in cached blocks are
never sent. Requested and waiting pixels together stay within ``bound`` slots; the first image in order is always
requested.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

from trencadis.core.kv.encoder_cache import EncoderCache
from trencadis.core.scheduling.sequence import MediaStart
from trencadis.core.step import PixelNeed, UInt8


class PixelQueue:
    """Requests pixels in the scheduler's order and keeps them until they are encoded."""

    def __init__(self, arena: EncoderCache, bound: int) -> None:
        self.arena = arena
        self.bound = bound
        self.pixels: dict[str, UInt8] = {}
        self._slots: dict[str, int] = {}  # slots of requested or received images, by arena key
        self._requested: dict[str, PixelNeed] = {}
        self._outbox: list[PixelNeed] = []

    def ask(self, order: Iterable[MediaStart]) -> None:
        """Requests the pixels needed next, in ``order``."""
        first = True
        for seq, start in order:
            for index, span in enumerate(seq.request.spans):
                if span.end <= start or (key := seq.key_of(span)) in self.arena:
                    continue
                if key not in self._slots:
                    if not first and sum(self._slots.values()) + span.slots > self.bound:
                        return
                    self._slots[key] = span.slots
                    self._requested[key] = need = PixelNeed(seq.request.id, index)
                    self._outbox.append(need)
                first = False

    def take_outbox(self) -> list[PixelNeed]:
        """Returns the pixels to request, each once."""
        out, self._outbox = self._outbox, []
        return out

    def receive(self, key: str, pixels: UInt8) -> None:
        """Stores received pixels, uint8 [patches, values]; drops unrequested ones and those of cached images."""
        if key in self._slots and key not in self.arena:
            self.pixels[key] = pixels
            self._requested.pop(key, None)
        else:
            self.forget(key)

    def forget(self, key: str) -> None:
        """Drops an image, because its pixels went into a Step or are no longer needed."""
        self.pixels.pop(key, None)
        self._slots.pop(key, None)
        self._requested.pop(key, None)

    def forget_request(self, request_id: str, keys: Iterable[str], wanted: Container[str]) -> None:
        """Forgets the requested and received pixels of an ended request that no other request needs."""
        for key in keys:
            asked = self._requested.get(key)
            if (asked is not None and asked.request_id == request_id) or (key in self.pixels and key not in wanted):
                self.forget(key)
