"""The images of an engine turn by turn: which are resident, which share the turn's one VISION launch. Torch-free.

Only choices that hold KV blocks pin rows. An image may also be encoded ahead, for a choice that still waits or whose
tokens have not come that far; it then takes free rows, or rows that nobody in the order wants.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from trencadis.core.kv.arena import Arena
from trencadis.core.request import MediaSpan
from trencadis.core.scheduling.packer import Packer
from trencadis.core.scheduling.pixels import PixelQueue
from trencadis.core.scheduling.sequence import Sequence
from trencadis.core.step import Encode

THIS_TURN = -1
"""Pins an image for the turn that encodes it, whatever becomes of the choice that asked."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Image ``index`` of a choice, the first in order that asked for it."""

    choice: Sequence
    index: int
    span: MediaSpan


@dataclass(slots=True)
class VisionTurn:
    """What one turn may encode, and what it does."""

    chosen: dict[str, Wanted] = field(default_factory=dict)  # by arena key; not yet encoded
    kept: set[str] = field(default_factory=set)  # resident and wanted: not to be evicted for an image ahead of its turn
    early: set[str] = field(default_factory=set)
    """Keys that fit into the arena with all that is wanted sooner; others would be evicted before their use."""
    images: list[Encode] = field(default_factory=list)
    owners: list[Sequence] = field(default_factory=list)
    unpins: list[tuple[str, int]] = field(default_factory=list)
    """Pins that end with the turn: VISION runs before the text launches, so no row that this turn reads or encodes may
    be given to another image of the same turn."""


class Encoder:
    """Arena, pixels and counters of one engine's images."""

    def __init__(self, arena: Arena, packer: Packer) -> None:
        self.arena = arena
        self.packer = packer
        self.desk = PixelQueue(arena, 2 * packer.budget)
        self.encoded = 0
        self.queries = 0
        self.hits = 0

    def begin(self, order: Iterable[tuple[Sequence, int]], closed: bool) -> VisionTurn:
        """Chooses the turn's images among those whose pixels are here.

        Args:
            order: choices with the token from which their media matter.
            closed: whether this turn has no VISION launch.
        """
        turn, waiting = VisionTurn(), dict[str, Wanted]()
        room = self.arena.capacity
        for choice, start in order:
            for index, span in enumerate(choice.request.spans):
                if span.offset + span.length <= start:
                    continue
                key = choice.key_of(span)
                if key not in turn.early and room >= 0:
                    room -= span.length
                    if room >= 0:
                        turn.early.add(key)
                if key in self.arena:
                    turn.kept.add(key)
                elif key in self.desk.pixels and key not in waiting:
                    waiting[key] = Wanted(choice, index, span)
        if waiting and not closed:
            found = list(waiting.items())
            turn.chosen = dict(found[i] for i in self.packer.choose([w.span.slots for _, w in found]))
        return turn

    def pin(self, c: Sequence, index: int, span: MediaSpan) -> bool:
        """Pins a resident image for ``c``; False where it is not resident."""
        if self.arena.pin(c.key_of(span), c.key) is None:
            return False
        self._count(c, index, hit=True)
        return True

    def encode(self, key: str, turn: VisionTurn, owner: int = THIS_TURN) -> bool:
        """Puts a chosen image into the turn's launch, pinned for ``owner``; False where it finds no rows."""
        ahead = owner == THIS_TURN
        wanted = turn.chosen[key]
        span = wanted.span
        rows = self.arena.put(key, span.length, owner, turn.kept)
        if rows is None and not ahead:
            # It is wanted now; the others later.
            rows = self.arena.put(key, span.length, owner)
        if rows is None:
            return False
        del turn.chosen[key]
        turn.kept.add(key)
        self.arena.pin(key, THIS_TURN)
        turn.unpins.append((key, THIS_TURN))
        turn.images.append(Encode(key, span.grid, span.slots, self.desk.pixels[key], rows))
        turn.owners.append(wanted.choice)
        self.encoded += 1
        self.desk.encoded(key)
        self._count(wanted.choice, wanted.index, hit=False)
        return True

    def ahead(self, turn: VisionTurn) -> None:
        """Encodes what else was chosen, before the turn of the choices that want it."""
        for key in list(turn.chosen):
            if key in turn.early:
                self.encode(key, turn)

    def end(self, turn: VisionTurn, order: Iterable[tuple[Sequence, int]]) -> None:
        """Ends the turn's pins and asks for the pixels that come next."""
        for key, owner in turn.unpins:
            self.arena.unpin(key, owner)
        self.desk.ask(order)

    def _count(self, c: Sequence, index: int, hit: bool) -> None:
        """Counts each image of a choice once: found in the arena, or encoded for it."""
        if index not in c.images_seen:
            c.images_seen.add(index)
            self.queries += 1
            self.hits += hit
            c.stats.images += 1
            c.stats.image_hits += hit
