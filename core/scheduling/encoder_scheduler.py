"""Decides which images are resident in the arena, and which share the step's one VISION launch. Torch-free.

Only sequences that hold KV blocks pin rows. An image may also be encoded ahead, for a sequence that is waiting or has
not reached it yet; it then takes free rows, or rows of images that no sequence in the order needs.

Pixels for the encoder: which to request, and which have arrived.

The engine pulls pixels about one VISION launch ahead, so that those of images in the arena or in cached blocks are
never sent. Requested and waiting pixels together stay within ``bound`` slots; the first image in order is always
requested.

A step has at most one VISION launch, so that other rows wait for no more than one. For each planned bucket, the waiting
images are packed first-fit, oldest first; the bucket with the lowest cost per needed slot wins. The cost of a launch
includes that of a decode step, because images that are left over wait for another step.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, Protocol

from trencadis.core.bucket_lookup import Plan
from trencadis.core.buckets import ENCODER_SLOTS, Stage
from trencadis.core.cross_attention_inputs import CrossAttentionSpans, compute_cross_attention
from trencadis.core.engine_stats import EngineStats
from trencadis.core.media_spans import MediaSpan
from trencadis.core.scheduling.encoder_cache import EncoderCache, rows_of_run
from trencadis.core.scheduling.scheduler_limits import SchedulerLimits
from trencadis.core.scheduling.sequence import MediaStart, Sequence
from trencadis.core.step import BidirectionalSpan, Encode, ImageRows, PixelNeed, UInt8


@dataclass(frozen=True)
class ImagePacker:
    """Chooses the images of a launch.

    Args:
        plan: buckets and their costs; None: every size is its own bucket.
        budget: slots of one launch. A larger image gets a launch of its own, whose padding smaller images may use.
    """

    plan: Plan | None = None
    budget: int = ENCODER_SLOTS

    def choose(self, needs: abc.Sequence[int]) -> list[int]:
        """Returns the indices of the images to launch together; the oldest, ``needs[0]``, is always included.

        Args:
            needs: slots of each waiting image, the oldest first.
        """
        if not needs:
            return []
        options = [first_fit(needs, size) for size in self._capacities(needs[0])]
        return min(options, key=lambda chosen: self._per_slot(sum(needs[i] for i in chosen)))

    def _capacities(self, oldest: int) -> list[int]:
        """Returns the slots of the launches to compare, the largest first, so that it wins ties."""
        if self.plan is None:
            return [max(self.budget, oldest)]
        sizes = self._sizes
        unplanned = oldest > sizes[-1] if sizes else self.plan.policy.captures
        if unplanned:
            # The oldest image needs an unplanned shape; launched alone, it causes only one.
            return [oldest]
        most = max(self.budget, self.plan.fit(Stage.VISION, (oldest,)).dims[0])
        fitting = [s for s in sizes if oldest <= s <= most]
        return list(reversed(fitting or [most]))

    @cached_property
    def _sizes(self) -> tuple[int, ...]:
        """Ascending sizes of the plan or of the policy's own list; empty if every size is its own bucket."""
        if self.plan is None:
            return ()
        boundaries = self.plan.policy.boundaries.get(Stage.VISION, ((),))[0]
        return self.plan.sizes(Stage.VISION) or tuple(boundaries)

    def _per_slot(self, need: int) -> float:
        if self.plan is None:
            return 1.0
        return (self.plan.policy.cost(self.plan.fit(Stage.VISION, (need,))) + self._step) / need

    @cached_property
    def _step(self) -> float:
        """Cost of the rest of a step: that of the cheapest decode launch."""
        if self.plan is None:
            return 0.0
        return min((self.plan.policy.cost(b) for b in self.plan.of(Stage.DECODE)), default=0.0)


def first_fit(needs: abc.Sequence[int], capacity: int) -> list[int]:
    """Returns the indices, in order, of needs that fit into ``capacity`` together; each is taken if it still fits."""
    chosen: list[int] = []
    for i, need in enumerate(needs):
        if need <= capacity:
            chosen.append(i)
            capacity -= need
    return chosen


class PixelQueue:
    """Requests pixels in the scheduler's order and keeps them until they are encoded."""

    def __init__(self, arena: EncoderCache, bound: int) -> None:
        self.arena = arena
        self.bound = bound
        self.pixels: dict[str, UInt8] = {}
        self._slots: dict[str, int] = {}  # slots of requested or received images, by arena key
        self._requested: dict[str, PixelNeed] = {}
        self.outbox: list[PixelNeed] = []
        """Pixels to request, each once; emptied by the engine."""

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
                    self.outbox.append(need)
                first = False

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


THIS_STEP = -1
"""The owner that pins an image during the step that encodes it, even if the requesting sequence ends."""


WORTH_A_ROW = 128
"""A waiting sequence starts before its next image is encoded only if more tokens than this precede the image."""


@dataclass(frozen=True, slots=True)
class WantedImage:
    """Image ``index`` of the first sequence in order that needs it."""

    sequence: Sequence
    index: int
    span: MediaSpan


class Pin(NamedTuple):
    """An image of the arena and the key of the sequence that pins it."""

    key: str
    owner: int


@dataclass(slots=True)
class VisionBuilder:
    """The VISION launch of the step that is being built."""

    chosen: dict[str, WantedImage] = field(default_factory=dict)  # by arena key; not encoded yet
    kept: set[str] = field(default_factory=set)  # resident and needed: not evicted for an image encoded ahead
    early: set[str] = field(default_factory=set)
    """Keys that may be encoded ahead: they fit into the arena together with all images needed earlier."""
    images: list[Encode] = field(default_factory=list)
    owners: list[Sequence] = field(default_factory=list)
    unpins: list[Pin] = field(default_factory=list)
    """Pins that end once the step is built: VISION runs before the text launches, so rows that this step reads must
    not be given to another image of the same step.
    """


class TowerAdapters(Protocol):
    """Which slots of the device hold the adapters that images are encoded with."""

    def encodes(self, seq: Sequence) -> bool:
        """Returns True if images of ``seq`` may be encoded once it runs: its adapter has a slot, or can get one."""
        ...

    def tower_slot(self, seq: Sequence) -> int:
        """Returns the slot of the adapter that images of ``seq`` are encoded with, 0: none; -1: it has no slot yet."""
        ...

    def hold(self, slot: int) -> None:
        """Keeps the adapter of a slot until the step that is built has been sent."""
        ...


class EncoderScheduler:
    """Manages encoder cache, pixels and counters of one engine's images."""

    def __init__(self, arena: EncoderCache, packer: ImagePacker, totals: EngineStats, adapters: TowerAdapters) -> None:
        self.arena = arena
        self.packer = packer
        self.adapters = adapters
        self.pixel_queue = PixelQueue(arena, 2 * packer.budget)
        self._totals = totals

    def begin(self, order: Iterable[MediaStart], closed: bool) -> VisionBuilder:
        """Chooses images for this step among those whose pixels have arrived.

        Args:
            order: sequences with the token from which their media are needed.
            closed: True if this step must not have a VISION launch.
        """
        vision, waiting = VisionBuilder(), dict[str, WantedImage]()
        free_rows = self.arena.capacity
        for seq, start in order:
            encodes = self.adapters.encodes(seq)
            for index, span in enumerate(seq.request.spans):
                if span.end <= start:
                    continue
                key = seq.key_of(span)
                if key not in vision.early and free_rows >= 0:
                    free_rows -= span.arena_rows
                    if free_rows >= 0:
                        vision.early.add(key)
                if key in self.arena:
                    vision.kept.add(key)
                elif encodes and key in self.pixel_queue.pixels and key not in waiting:
                    waiting[key] = WantedImage(seq, index, span)
        if waiting and not closed:
            found = list(waiting.items())
            vision.chosen = dict(found[i] for i in self.packer.choose([w.span.slots for _, w in found]))
        return vision

    def pin(self, seq: Sequence, index: int, span: MediaSpan) -> bool:
        """Pins a resident image for ``seq``; returns False if it is not resident."""
        if self.arena.pin(seq.key_of(span), seq.key) is None:
            return False
        self._count(seq, index, hit=True)
        return True

    def encode(self, key: str, vision: VisionBuilder, owner: int = THIS_STEP) -> bool:
        """Adds a chosen image to the VISION launch, pinned for ``owner``.

        Returns False if the arena has no rows for it, or its adapter no slot.
        """
        wanted = vision.chosen[key]
        span, adapter = wanted.span, self.adapters.tower_slot(wanted.sequence)
        if adapter < 0:
            return False
        rows = self.arena.put(key, span.arena_rows, owner, vision.kept)
        if rows is None and owner != THIS_STEP:
            # This image is needed now; the kept ones are needed later.
            rows = self.arena.put(key, span.arena_rows, owner)
        if rows is None:
            return False
        del vision.chosen[key]
        self.adapters.hold(adapter)
        vision.kept.add(key)
        self.arena.pin(key, THIS_STEP)
        vision.unpins.append(Pin(key, THIS_STEP))
        vision.images.append(Encode(key, span.grid, span.slots, self.pixel_queue.pixels[key], rows, adapter))
        vision.owners.append(wanted.sequence)
        self._totals.images_encoded += 1
        self.pixel_queue.forget(key)
        self._count(wanted.sequence, wanted.index, hit=False)
        return True

    def holds_back(self, seq: Sequence, start: int, vision: VisionBuilder, first: bool) -> bool:
        """True if ``seq`` would stop within ``WORTH_A_ROW`` tokens at an image that is neither cached nor chosen for
        this step.

        ``first``: check only its first image, because running it frees rows for the others.
        """
        for span in seq.request.spans:
            if span.offset > start + WORTH_A_ROW:
                return False
            if span.end > start:
                key = seq.key_of(span)
                if key not in self.arena and key not in vision.chosen:
                    return True
                if first:
                    return False
        return False

    def rows_of(self, seq: Sequence, start: int, end: int, vision: VisionBuilder) -> tuple[ImageRows, ...]:
        """Returns the arena rows of the chunk; an image whose last token is in it loses its pin after this step."""
        found = []
        ended, going = set[str](), set[str]()
        for span in seq.request.spans:
            if span.offset < end and span.end > start:
                key = seq.key_of(span)
                (ended if span.end <= end else going).add(key)
                rows = self.arena.pin(key, seq.key)
                assert rows is not None, "a chunk reached into an image that is not resident"
                for run in () if span.cross_attention_rows else span.list_runs():
                    first, last = max(run.offset, start), min(run.offset + run.length, end)
                    if first < last:
                        taken = rows_of_run(run, rows)[first - run.offset : last - run.offset]
                        found.append(ImageRows(first - start, taken))
        # Equal tiles of one image are one item; the first that ends must not end the pin of the others.
        vision.unpins += (Pin(key, seq.key) for key in ended - going)
        return tuple(found)

    def cross_attention_of(self, seq: Sequence, start: int, end: int) -> CrossAttentionSpans:
        """Returns the images that the chunk's tokens attend to; they stay pinned until the sequence leaves."""
        first = []
        for span in seq.request.spans:
            rows = self.arena.pin(seq.key_of(span), seq.key)
            assert rows is not None
            first.append(int(rows[0]))
        return compute_cross_attention(seq.request.spans, first, start, end)

    def end(self, vision: VisionBuilder, order: Iterable[MediaStart]) -> None:
        """Encodes the other chosen images ahead, ends the pins of this step, and requests the next pixels."""
        for key in list(vision.chosen):
            if key in vision.early:
                self.encode(key, vision)
        for pin in vision.unpins:
            self.arena.unpin(pin.key, pin.owner)
        self.pixel_queue.ask(order)

    def _count(self, seq: Sequence, index: int, hit: bool) -> None:
        """Counts each image of a sequence once: found in the arena, or encoded for it."""
        if index not in seq.images_counted:
            seq.images_counted.add(index)
            self._totals.mm_queries += 1
            self._totals.mm_hits += hit
            seq.stats.images += 1
            seq.stats.image_hits += hit


def count_uncut(seq: Sequence, count: int) -> int:
    """Returns how many of ``count`` tokens can run without splitting an image whose tokens attend to each other.

    The result is 0 if the split image begins at the first of these tokens or before: it then waits for a step with room
    for all of it. A prefix hit may end inside an image, since block keys do not depend on chunk boundaries.
    """
    start, end = seq.computed, seq.computed + count
    cut = (span.offset for span in seq.request.spans if span.offset < end < span.end)
    return max(next(cut, end) - start, 0)


def bidirectional_spans(seq: Sequence, start: int, end: int, limits: SchedulerLimits) -> tuple[BidirectionalSpan, ...]:
    """Returns which tokens of the chunk [start, end) attend to each other; output tokens attend only to earlier
    ones.
    """
    if limits.whole:
        prompt = min(end, len(seq.request.tokens))
        return (BidirectionalSpan(0, prompt - start),) if start < prompt else ()
    inside = (span for span in seq.request.spans if span.offset < end and span.end > start)
    return tuple(BidirectionalSpan(max(span.offset - start, 0), span.end - start) for span in inside)
