"""Pixels on their way to the encoder: who must send them, and those that wait. Torch-free.

Pixels are pulled, about one VISION launch ahead, so that an image found in the arena or behind a prefix hit never
crosses; what is pulled and not yet encoded stays under ``bound`` slots, except that the first in order always may.
"""

from __future__ import annotations

from collections.abc import Iterable

from trencadis.core.kv.arena import Arena
from trencadis.core.scheduling.sequence import Sequence
from trencadis.core.step import UInt8


class PixelQueue:
    """Asks for pixels in the scheduler's order and keeps them until they are encoded."""

    def __init__(self, arena: Arena, bound: int) -> None:
        self.arena = arena
        self.bound = bound
        self.pixels: dict[str, UInt8] = {}
        self._slots: dict[str, int] = {}  # asked or here, by arena key
        self._asked: dict[str, tuple[str, int]] = {}
        self._outbox: list[tuple[str, int]] = []

    def ask(self, order: Iterable[tuple[Sequence, int]]) -> None:
        """Notes what is wanted next: ``order`` gives choices with the token from which their media matter."""
        first = True
        for choice, start in order:
            for index, span in enumerate(choice.request.spans):
                if span.offset + span.length <= start or (key := choice.key_of(span)) in self.arena:
                    continue
                if key not in self._slots:
                    if not first and sum(self._slots.values()) + span.slots > self.bound:
                        return
                    self._slots[key] = span.slots
                    self._asked[key] = (choice.request.id, index)
                    self._outbox.append((choice.request.id, index))
                first = False

    def take_outbox(self) -> list[tuple[str, int]]:
        """(request id, media index) pairs to ask for, each once."""
        out, self._outbox = self._outbox, []
        return out

    def arrived(self, key: str, pixels: UInt8) -> None:
        """Pixels came; dropped where nobody asked or the image is resident by now."""
        if key in self._slots and key not in self.arena:
            self.pixels[key] = pixels
            self._asked.pop(key, None)
        else:
            self._forget(key)

    def encoded(self, key: str) -> None:
        """The pixels went into a Step."""
        self._forget(key)

    def _forget(self, key: str) -> None:
        self.pixels.pop(key, None)
        self._slots.pop(key, None)
        self._asked.pop(key, None)

    def gone(self, request_id: str, keys: Iterable[str], wanted: set[str]) -> None:
        """A request ended: its unanswered questions are void, pixels that nobody else wants are dropped."""
        for key in keys:
            asked = self._asked.get(key)
            if (asked is not None and asked[0] == request_id) or (key in self.pixels and key not in wanted):
                self._forget(key)
