"""Which tokens run next. It hands out tokens, not phases: every choice lets ``computed`` catch up with ``tokens``.

Chunked prefill, prefix hits, resumed choices and forks need no case of their own. One total order (priority, arrival,
id) serves admission, packing, preemption (last first) and arena rows; progress is proved for its first running choice:
it may take blocks and rows from any later one, and the pool holds one request of the full model length.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from trencadis.core.buckets import ENCODER_SLOTS
from trencadis.core.kv.arena import Arena
from trencadis.core.kv.pool import BlockPool
from trencadis.core.request import MediaSpan
from trencadis.core.scheduling.encoder import Encoder, VisionTurn
from trencadis.core.scheduling.packer import Packer
from trencadis.core.scheduling.sequence import Sequence, SequenceStatus
from trencadis.core.step import PENDING, ImageRows, Reset, Row, Sample, Step

WORTH_A_ROW = 128
"""Tokens before an image that is not resident for which a waiting choice is admitted already."""


@dataclass(frozen=True)
class SchedulerLimits:
    """What bounds a step and a request; sizes in tokens unless named otherwise."""

    max_tokens: int = 2048
    max_rows: int = 128
    max_model_len: int = 32768
    block_size: int = 16
    encoder_slots: int = ENCODER_SLOTS
    vocab: int = 0
    eos: tuple[int, ...] = ()
    chunked: bool = True
    caching: bool = True
    by_priority: bool = False
    aging: float = 30.0
    seed: int = 0
    chunk: int = 0  # tests: at most this many tokens of one choice in a step


@dataclass(slots=True)
class StepBuilder:
    """What one call of ``schedule`` has handed out so far."""

    tokens: int
    vision: VisionTurn
    decoding: int = 0  # running choices, not yet reached, that want one token
    pictures: bool = False  # a prompt with images took tokens
    held: int = 0  # blocks promised to choices that wait for blocks on their way back
    preempted: bool = False
    rows: list[Row] = field(default_factory=list)
    named: list[Sequence] = field(default_factory=list)
    resets: list[Reset] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class InFlightStep:
    """A Step on its way: the choices that it names, and those that it encodes images for."""

    number: int
    named: list[Sequence]
    encoded: list[Sequence]


class Scheduler:
    """Queues, blocks, slots and arena rows of one engine. ``schedule`` issues Steps, ``Updater`` takes results in."""

    def __init__(
        self,
        limits: SchedulerLimits,
        pool: BlockPool,
        arena: Arena,
        slots: int,
        clock: Callable[[], float] = time.monotonic,
        packer: Packer | None = None,
    ) -> None:
        self.limits = limits
        self.pool = pool
        self.arena = arena
        self.clock = clock
        self.encoder = Encoder(arena, packer or Packer(budget=limits.encoder_slots))
        self.desk = self.encoder.desk
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.leaving: list[Sequence] = []
        self.slots = list(range(slots, 0, -1))
        self.flights: deque[InFlightStep] = deque()
        self.steps = 0
        self.preemptions = 0
        self.prefix_queries = 0
        self.prefix_hits = 0
        self._biased: set[int] = set()  # slots whose sampler state holds a bias
        self._saw_vision = False  # the last turn had a VISION launch
        self._held_up = False  # the last turn left a text without tokens

    # The total order

    def rank(self, c: Sequence) -> tuple[float, float, int]:
        """Sort key of the total order; under ``priority`` waiting lifts a choice one level every ``aging`` seconds."""
        level = 0.0
        if self.limits.by_priority:
            level = c.request.priority - (self.clock() - c.arrived) // self.limits.aging
        return (level, c.request.arrival, c.seq)

    def enqueue(self, c: Sequence) -> None:
        """Puts a choice into the queue at its place."""
        c.where = SequenceStatus.WAITING
        self.waiting.append(c)
        self.waiting.sort(key=self.rank)

    # One step

    def schedule(self) -> Step | None:
        """The next Step, or None where nothing can run. Every Step encodes or advances something."""
        if self.limits.by_priority:
            self.running.sort(key=self.rank)
            self.waiting.sort(key=self.rank)
        turn = StepBuilder(self.limits.max_tokens, self.encoder.begin(self._in_order(), self._no_vision()))
        turn.decoding = sum(c.due == 1 for c in self.running)
        for c in tuple(self.running):
            if turn.tokens == 0:
                break
            if c.where is SequenceStatus.RUNNING:
                turn.decoding -= c.due == 1
                self._advance(c, turn)
        if not turn.preempted:
            self._admit(turn)
        self.encoder.ahead(turn.vision)
        self.encoder.end(turn.vision, self._in_order())
        images = tuple(turn.vision.images)
        self._saw_vision, self._held_up = bool(images), self._holds_up(turn)
        if not turn.rows and not images:
            return None
        self.steps += 1
        self.flights.append(InFlightStep(self.steps, turn.named, turn.vision.owners))
        for c in turn.named:
            c.inflight += 1
        return Step(self.steps, tuple(turn.rows), images, tuple(turn.resets))

    def _no_vision(self) -> bool:
        """Whether this turn goes without a VISION launch, so that no text waits for two before its first step."""
        if self._held_up:
            return True
        room = self.slots and len(self.running) < self.limits.max_rows
        return bool(self._saw_vision and room and any(not c.request.spans for c in self.waiting))

    def _holds_up(self, turn: StepBuilder) -> bool:
        """Whether prompts with pictures left no tokens to a text. They end: no more pictures come in meanwhile."""
        if turn.tokens or not turn.pictures:
            return False
        named = {c.key for c in turn.named}
        return any(not c.request.spans and c.key not in named for c in (*self.running, *self.waiting))

    def _in_order(self) -> Iterator[tuple[Sequence, int]]:
        """Choices with the token from which their media matter."""
        for c in self.running:
            if c.request.spans:
                yield c, c.computed
        for c in self.waiting[: self.limits.max_rows]:
            if c.request.spans:
                yield c, self._media_from(c)

    def _media_from(self, c: Sequence) -> int:
        """The token from which the media of a waiting choice matter: 0, or the end of the blocks that it would share.

        Asked of the whole queue in every step: where the block that its first image ends in is not there, all its media
        matter, and one look-up tells.
        """
        size, first = self.limits.block_size, c.request.spans[0]
        at = (first.offset + first.length - 1) // size
        if not self.limits.caching or at >= (c.known() - 1) // size:
            return 0
        c.chain.extend(c.tokens, (at + 1) * size)
        return len(self._match(c)) * size if self.pool.find(c.chain.keys[at]) is not None else 0

    def _advance(self, c: Sequence, turn: StepBuilder) -> None:
        count = self._chunk(c, turn)
        if count > 0:
            count = self._room(c, count, turn)
        if count > 0:
            self._issue(c, count, turn)

    def _chunk(self, c: Sequence, turn: StepBuilder) -> int:
        """How many tokens of ``c`` could run: its due ones, the budget, and up to an image that is not resident."""
        # Prompts leave every decoding choice its token, so none of them waits for a second VISION launch.
        left = turn.tokens if c.due == 1 or not self.limits.chunked else max(turn.tokens - turn.decoding, 1)
        count = min(c.due, left)
        if self.limits.chunk:
            count = min(count, self.limits.chunk)
        if not self.limits.chunked and c.computed < c.prompt and count < c.due:
            return 0
        start = c.computed
        for index, span in enumerate(c.request.spans):
            if span.offset >= start + count:
                break
            if span.offset + span.length > start and not self._resident(c, index, span, turn):
                return max(span.offset - start, 0)
        return count

    def _room(self, c: Sequence, count: int, turn: StepBuilder) -> int:
        """Gives ``c`` blocks for ``count`` more tokens, taking them from later choices; returns what fits."""
        size = self.limits.block_size
        need = -(-(c.computed + count) // size) - len(c.blocks)
        while need > self.pool.free - turn.held:
            if self._coming() and need <= self.pool.free - turn.held + self._coming():
                turn.held += need
                return 0
            if self.running[-1] is c or self.running[-1] in turn.named:
                break
            self._preempt(self.running[-1], turn)
        need = min(need, max(self.pool.free - turn.held, 0))
        if need > 0:
            c.blocks += self.pool.take(need) or []
        return min(count, len(c.blocks) * size - c.computed)

    def _coming(self) -> int:
        """Blocks that leaving choices alone hold: free once their last launch is fetched."""
        return sum(self.pool.references(b) == 1 for c in self.leaving for b in c.blocks)

    def _issue(self, c: Sequence, count: int, turn: StepBuilder) -> None:
        """Adds the Row of ``c`` and marks its tokens computed; a row that reaches the end draws the next token."""
        start, end = c.computed, c.computed + count
        if not c.entered:
            c.entered = self.clock()
        if c.fresh_state:
            self._reset(c, turn)
        images = self._images(c, start, end, turn)
        tokens = tuple(c.tokens[start:end])
        targets = c.targets(start, count)
        c.computed = end
        turn.tokens -= count
        turn.pictures |= count > 1 and bool(c.request.spans)
        turn.named.append(c)
        samples: list[tuple[int, int, Sample]] = []
        if end == len(c.tokens) and c.outputs < c.limit:
            samples.append((c.key, c.slot, self._draw(c)))
            samples += self._fork(c, turn)
        positions = c.positions_of(start, count)
        turn.rows.append(Row(c.key, c.slot, start, tokens, tuple(c.blocks), positions, images, tuple(samples), targets))
        self.publish(c)

    def _draw(self, c: Sequence) -> Sample:
        sample = c.sample()
        c.tokens.append(PENDING)
        c.pending += 1
        return sample

    def _reset(self, c: Sequence, turn: StepBuilder) -> None:
        """RESET where ``c`` reads its slot's state, or an earlier choice left a bias in it for any full SAMPLE."""
        params = c.request.params
        if params.needs_state or c.slot in self._biased:
            bias = tuple((params.logit_bias or {}).items())
            turn.resets.append(Reset(c.slot, tuple(c.request.tokens), tuple(c.tokens[c.prompt : c.known()]), bias))
            (self._biased.add if bias else self._biased.discard)(c.slot)
        c.fresh_state = False

    def _images(self, c: Sequence, start: int, end: int, turn: StepBuilder) -> tuple[ImageRows, ...]:
        """Arena rows of the chunk; an image whose last token it holds is no longer pinned."""
        found = []
        for span in c.request.spans:
            first, last = max(span.offset, start), min(span.offset + span.length, end)
            if first < last:
                rows = self.arena.pin(c.key_of(span), c.key)
                assert rows is not None, "a chunk reached into an image that is not resident"
                found.append(ImageRows(first - start, rows[first - span.offset : last - span.offset]))
            if start < span.offset + span.length <= end:
                turn.vision.unpins.append((c.key_of(span), c.key))
        return tuple(found)

    def publish(self, c: Sequence) -> None:
        """Makes the full blocks of ``c`` findable: their KV is issued and all their tokens are known."""
        if not self.limits.caching:
            return
        c.chain.extend(c.tokens, min(c.computed, c.known()))
        full = min(len(c.chain.keys), min(c.computed, c.known()) // self.limits.block_size)
        for i in range(c.published, full):
            self.pool.publish(c.blocks[i], c.chain.keys[i])
        c.published = max(c.published, full)

    # Choices that branch off

    def _fork(self, c: Sequence, turn: StepBuilder) -> list[tuple[int, int, Sample]]:
        """Lets siblings draw from the same hidden row while slots last; the rest queue (prefix cache)."""
        drawn = []
        full = c.prompt // self.limits.block_size
        for child in (x for x in c.family if not x.ended):
            if not self.slots or len(self.running) >= self.limits.max_rows:
                self.enqueue(child)
                continue
            child.slot = self.slots.pop()
            child.blocks = c.blocks[:full]
            self.pool.share(child.blocks)
            # The block that the prompt ends in would be written by each of them: its tokens are computed again.
            child.computed, child.published = full * self.limits.block_size, full
            child.entered = c.entered
            child.stats.cached_tokens = child.computed
            self._reset(child, turn)
            self._enter(child)
            drawn.append((child.key, child.slot, self._draw(child)))
            turn.named.append(child)
        c.family = []
        return drawn

    # Admission

    def _admit(self, turn: StepBuilder) -> None:
        """Starts waiting choices in order, each only if blocks for all its known tokens are free (no thrashing).

        One that could do little before an image is encoded keeps its place in the queue, and others pass it.
        """
        size = self.limits.block_size
        at = 0
        while at < len(self.waiting) and turn.tokens and self.slots and len(self.running) < self.limits.max_rows:
            c = self.waiting[at]
            hits = self._match(c)
            # Where nobody runs, nobody gives up rows either: the first in order may not wait for more images at a time
            # than the arena has left.
            if self._awaits_image(c, len(hits) * size, turn, first=not self.running and at == 0):
                at += 1
                continue
            need = -(-len(c.tokens) // size) - len(hits) + self.pool.idle(hits)
            if need > self.pool.free - turn.held:
                return
            if not self.limits.chunked and len(c.tokens) - len(hits) * size > turn.tokens:
                return
            self.waiting.pop(at)
            self.pool.share(hits)
            c.blocks, c.computed, c.published = list(hits), len(hits) * size, len(hits)
            c.slot = self.slots.pop()
            c.fresh_state = True
            c.stats.cached_tokens = max(c.stats.cached_tokens, c.computed if not c.outputs else 0)
            self.prefix_queries += len(c.tokens)
            self.prefix_hits += c.computed
            self._enter(c)
            self._advance(c, turn)

    def _enter(self, c: Sequence) -> None:
        c.where = SequenceStatus.RUNNING
        self.running.append(c)
        self.running.sort(key=self.rank)

    def _match(self, c: Sequence) -> list[int]:
        """Blocks that already hold the start of ``c``; at least one token is left to compute."""
        if not self.limits.caching or c.prompt_scores is not None:
            return []
        limit = (c.known() - 1) // self.limits.block_size
        c.chain.extend(c.tokens, limit * self.limits.block_size)
        hits: list[int] = []
        for key in c.chain.keys[:limit]:
            block = self.pool.find(key)
            if block is None:
                break
            hits.append(block)
        return hits

    # Images

    def _awaits_image(self, c: Sequence, start: int, turn: StepBuilder, first: bool) -> bool:
        """Whether ``c`` could compute next to nothing, because an image is not resident and not chosen either.

        ``first``: only its first image counts, since it makes room for the others.
        """
        for span in c.request.spans:
            if span.offset > start + WORTH_A_ROW:
                return False
            if span.offset + span.length > start:
                key = c.key_of(span)
                if key not in self.arena and key not in turn.vision.chosen:
                    return True
                if first:
                    return False
        return False

    def _resident(self, c: Sequence, index: int, span: MediaSpan, turn: StepBuilder) -> bool:
        """Pins an image of ``c``, encoding it in this turn where it was chosen and rows can be had."""
        if self.encoder.pin(c, index, span):
            return True
        key = c.key_of(span)
        if key not in turn.vision.chosen:
            return False
        while not self.arena.fits(span.length) and self._yields_rows(c, turn):
            self._preempt(self.running[-1], turn)
        return self.encoder.encode(key, turn.vision, c.key)

    def _yields_rows(self, c: Sequence, turn: StepBuilder) -> bool:
        """Only the first running choice takes rows from later ones, and only from those not yet in this turn."""
        return self.running[0] is c and self.running[-1] is not c and self.running[-1] not in turn.named

    # Leaving

    def _preempt(self, victim: Sequence, turn: StepBuilder) -> None:
        turn.preempted = True
        self.preemptions += 1
        victim.stats.preemptions += 1
        victim.requeue = True
        self.leave(victim)

    def leave(self, c: Sequence) -> None:
        """Takes a running choice out; blocks and slot come back when no launch names it any more."""
        self.running.remove(c)
        for key in self.arena.pinned_by(c.key):
            self.arena.unpin(key, c.key)
        c.where = SequenceStatus.LEAVING
        self.leaving.append(c)
        if c.inflight == 0:
            self.release(c)

    def release(self, c: Sequence) -> None:
        """Blocks and slot go back; a preempted choice queues again, its PENDING token having arrived."""
        assert c.inflight == 0 and (c.pending == 0 or not c.requeue)
        self.leaving.remove(c)
        self.pool.drop(c.blocks)
        self.slots.append(c.slot)
        c.blocks, c.slot, c.computed, c.published = [], 0, 0, 0
        if c.requeue:
            c.requeue = False
            self.enqueue(c)
        else:
            c.where = SequenceStatus.DONE

    def check(self) -> None:
        """Asserts that blocks, slots and rows are all accounted for; callable between any two steps."""
        holders = [*self.running, *self.leaving]
        self.pool.check([c.blocks for c in holders])
        self.arena.check()
        assert len({c.slot for c in holders}) == len(holders) and not {c.slot for c in holders} & set(self.slots)
        assert all(c.where is SequenceStatus.WAITING and not c.blocks for c in self.waiting)
        assert all(len(c.blocks) * self.limits.block_size >= c.computed for c in holders)
