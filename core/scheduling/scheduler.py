"""Which tokens run next. The scheduler knows no phases: each step brings ``computed`` of a sequence closer to
``len(tokens)``, so that chunked prefill, prefix hits, resumed sequences and forks need no case of their own.

One total order (priority, arrival, key) serves admission, packing, preemption (last first) and arena rows. The first
running sequence always makes progress: it may take blocks and rows from any later one, and the pool holds one request
of the full model length.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator

from trencadis.core.kv.arena import Arena
from trencadis.core.kv.pool import BlockPool
from trencadis.core.request import MediaSpan
from trencadis.core.scheduling.builder import InFlightStep, StepBuilder
from trencadis.core.scheduling.encoder import Encoder
from trencadis.core.scheduling.fairness import FairQueue
from trencadis.core.scheduling.limits import SchedulerLimits
from trencadis.core.scheduling.packer import Packer
from trencadis.core.scheduling.prefix_hits import ON_HOST, cached_blocks, claimed
from trencadis.core.scheduling.sequence import MediaStart, Sequence, SequenceStatus
from trencadis.core.step import PENDING, Bias, Draw, Reset, Row, SeenSpan, Step


class Scheduler:
    """Queues, blocks, slots and arena rows of one engine; makes Steps, whose results ``Lifecycle`` takes."""

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
        self.pixel_queue = self.encoder.pixel_queue
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.leaving: list[Sequence] = []
        self.slots = list(range(slots, 0, -1))
        self.in_flight: deque[InFlightStep] = deque()
        self.steps = 0
        self.preemptions = 0
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.held_back = 0
        self.host_hits = 0  # of them, tokens that came back from host memory
        self.fair = FairQueue() if limits.fair else None
        self._closings: list[int] = []  # keys of choices that left since the last step
        self._biased: set[int] = set()  # slots whose sampler state holds a bias
        self._had_vision = False  # the last step had a VISION launch
        self._starved_text = False  # the last step left a text-only request without tokens

    # The total order

    def order_key(self, seq: Sequence) -> tuple[float, float, int]:
        """Sort key of the total order; by priority, a sequence rises one level for every ``aging`` seconds of age."""
        level = 0.0 if self.fair is None else self.fair.place(seq)
        if self.limits.by_priority:
            level = seq.request.priority - (self.clock() - seq.arrived) // self.limits.aging
        return (level, seq.request.arrival, seq.key)

    def enqueue(self, seq: Sequence) -> None:
        """Puts a sequence into the queue at its place."""
        seq.status = SequenceStatus.WAITING
        self.waiting.append(seq)
        self.waiting.sort(key=self.order_key)

    # One step

    def schedule(self) -> Step | None:
        """The next Step, or None where nothing can run. Every Step encodes or advances something."""
        if self.limits.by_priority:
            self.running.sort(key=self.order_key)
            self.waiting.sort(key=self.order_key)
        builder = StepBuilder(self.limits.max_tokens, self.encoder.begin(self._in_order(), self._skips_vision()))
        builder.decoding = sum(seq.due == 1 for seq in self.running)
        for seq in tuple(self.running):
            if builder.tokens == 0:
                break
            if seq.status is SequenceStatus.RUNNING:
                builder.decoding -= seq.due == 1
                self._advance(seq, builder)
        if not builder.preempted:
            self._admit(builder)
        self.encoder.ahead(builder.vision)
        self.encoder.end(builder.vision, self._in_order())
        images = tuple(builder.vision.images)
        self._had_vision, self._starved_text = bool(images), self._starves_text(builder)
        if not builder.rows and not images:
            return None
        self.steps += 1
        self.in_flight.append(InFlightStep(self.steps, builder.scheduled, builder.vision.owners))
        for seq in builder.scheduled:
            seq.inflight += 1
        closings, self._closings = tuple(self._closings), []
        openings = tuple(builder.openings)
        moves = () if self.pool.host is None else self.pool.host.take_moves()
        return Step(self.steps, tuple(builder.rows), images, tuple(builder.resets), openings, closings, moves)

    def _skips_vision(self) -> bool:
        """Whether this step has no VISION launch, so that a text-only request waits for at most one of them."""
        if self._starved_text:
            return True
        may_admit = self.slots and len(self.running) < self.limits.max_rows
        return bool(self._had_vision and may_admit and any(not seq.request.spans for seq in self.waiting))

    def _starves_text(self, builder: StepBuilder) -> bool:
        """Whether prompts with images left no tokens to a text-only request.

        This is temporary: no new images are admitted meanwhile.
        """
        if builder.tokens or not builder.image_prompts:
            return False
        scheduled = {seq.key for seq in builder.scheduled}
        return any(not seq.request.spans and seq.key not in scheduled for seq in (*self.running, *self.waiting))

    def _in_order(self) -> Iterator[MediaStart]:
        """Sequences that have media, in the total order."""
        for seq in self.running:
            if seq.request.spans:
                yield MediaStart(seq, seq.computed)
        for seq in self.waiting[: self.limits.max_rows]:
            if seq.request.spans:
                yield MediaStart(seq, self._media_start(seq))

    def _media_start(self, seq: Sequence) -> int:
        """The token from which the media of a waiting sequence matter: 0, or the end of its prefix hits.

        This runs for the whole queue in every step, so one look-up decides most cases: unless the block in which the
        first image ends is cached, all media matter.
        """
        size, first = self.limits.block_size, seq.request.spans[0]
        at = (first.offset + first.length - 1) // size
        if not self.limits.caching or at >= (seq.known() - 1) // size:
            return 0
        seq.chain.extend(seq.tokens, (at + 1) * size)
        key = seq.chain.keys[at]
        cached = self.pool.find(key) is not None or self.pool.on_host(key)
        return len(cached_blocks(seq, self.limits, self.pool)) * size if cached else 0

    def _advance(self, seq: Sequence, builder: StepBuilder) -> None:
        count = self._chunk_size(seq, builder)
        if count > 0:
            count = self._allocate_blocks(seq, count, builder)
        if count > 0 and not (self.limits.whole and count < seq.due):
            self._add_row(seq, count, builder)

    def _chunk_size(self, seq: Sequence, builder: StepBuilder) -> int:
        """How many tokens of ``seq`` could run: its due ones, the budget, and up to an image that is not resident."""
        # Prompts leave each decoding sequence its token, so that none waits for a second VISION launch.
        left = builder.tokens if seq.due == 1 or not self.limits.chunked else max(builder.tokens - builder.decoding, 1)
        count = min(seq.due, left)
        if self.limits.chunk:
            count = min(count, self.limits.chunk)
        if not self.limits.chunked and seq.computed < seq.prompt and count < seq.due:
            return 0
        start = seq.computed
        for index, span in enumerate(seq.request.spans):
            if span.offset >= start + count:
                break
            if span.offset + span.length > start and not self._resident(seq, index, span, builder):
                return max(span.offset - start, 0)
        return count

    def _allocate_blocks(self, seq: Sequence, count: int, builder: StepBuilder) -> int:
        """Gives ``seq`` blocks for ``count`` more tokens, preempting later sequences; returns the tokens that fit."""
        size = self.limits.block_size
        need = -(-(seq.computed + count) // size) - len(seq.blocks)
        while need > self.pool.free - builder.reserved:
            if self._pending_frees() and need <= self.pool.free - builder.reserved + self._pending_frees():
                builder.reserved += need
                return 0
            if self.running[-1] is seq or self.running[-1] in builder.scheduled:
                if not self.park(seq):
                    break
                continue
            self._preempt(self.running[-1], builder)
        need = min(need, max(self.pool.free - builder.reserved, 0))
        if need > 0:
            seq.blocks += self.pool.take(need) or []
        return min(count, len(seq.blocks) * size - seq.computed)

    def _pending_frees(self) -> int:
        """Blocks that only leaving sequences hold: free once their last launch is fetched."""
        return sum(self.pool.references(b) == 1 for seq in self.leaving for b in seq.blocks)

    def _add_row(self, seq: Sequence, count: int, builder: StepBuilder) -> None:
        """Adds the Row of ``seq`` and marks its tokens computed; a row that reaches the end draws the next token."""
        start, end = seq.computed, seq.computed + count
        if not seq.entered:
            seq.entered = self.clock()
        if seq.fresh_state:
            self._reset(seq, builder)
        images = self.encoder.rows_of(seq, start, end, builder.vision)
        tokens = tuple(seq.tokens[start:end])
        targets = seq.targets(start, count)
        seq.computed = end
        builder.tokens -= count
        builder.image_prompts |= count > 1 and bool(seq.request.spans)
        builder.scheduled.append(seq)
        draws: list[Draw] = []
        if end == len(seq.tokens) and seq.outputs < seq.limit:
            draws = [self._draw(seq, builder), *self._fork(seq, builder)]
        positions = seq.positions_of(start, count)
        blocks, pool = tuple(seq.blocks), seq.pool_of(start, count)
        spans = (SeenSpan(0, count),) if self.limits.whole else ()
        builder.rows.append(
            Row(seq.key, seq.slot, start, tokens, blocks, positions, images, tuple(draws), targets, 0, pool, spans)
        )
        self.publish(seq)

    def _draw(self, seq: Sequence, builder: StepBuilder) -> Draw:
        """Draws the next token of ``seq``, PENDING until its step is fetched; a beam's is chosen by its group."""
        if seq.masked and not seq.opened:
            builder.openings.append(seq.opening())
            seq.opened = True
        draw = Draw(seq.key, seq.slot, seq.sample())
        if not seq.mates:
            seq.tokens.append(PENDING)
            seq.pending += 1
        return draw

    def _reset(self, seq: Sequence, builder: StepBuilder) -> None:
        """RESET if ``seq`` uses sampler state, or if the slot's last owner left a bias, which any full SAMPLE adds."""
        params = seq.request.params
        if params.needs_state or seq.slot in self._biased:
            bias = tuple(Bias(*pair) for pair in (params.logit_bias or {}).items())
            builder.resets.append(
                Reset(seq.slot, tuple(seq.request.tokens), tuple(seq.tokens[seq.prompt : seq.known()]), bias)
            )
            (self._biased.add if bias else self._biased.discard)(seq.slot)
        seq.fresh_state = False

    def publish(self, seq: Sequence) -> None:
        """Enters the full blocks of ``seq`` in the prefix cache: their KV is submitted and their tokens are known."""
        if not self.limits.caching:
            return
        seq.chain.extend(seq.tokens, min(seq.computed, seq.known()))
        full = min(len(seq.chain.keys), min(seq.computed, seq.known()) // self.limits.block_size)
        for i in range(seq.published, full):
            self.pool.publish(seq.blocks[i], seq.chain.keys[i])
        seq.published = max(seq.published, full)

    # Sequences that branch off

    def _fork(self, seq: Sequence, builder: StepBuilder) -> list[Draw]:
        """Lets siblings draw from the same hidden row while slots last; the rest queue and use the prefix cache."""
        drawn = []
        full = seq.prompt // self.limits.block_size
        for sibling in (s for s in seq.siblings if not s.ended):
            if not self.slots or len(self.running) >= self.limits.max_rows:
                self.enqueue(sibling)
                continue
            sibling.slot = self.slots.pop()
            sibling.blocks = seq.blocks[:full]
            self.pool.share(sibling.blocks)
            # Each sibling writes into the block that holds the prompt's end, so it computes that block itself.
            sibling.computed, sibling.published = full * self.limits.block_size, full
            sibling.entered = seq.entered
            sibling.stats.cached_tokens = sibling.computed
            self._reset(sibling, builder)
            self.start_running(sibling)
            drawn.append(self._draw(sibling, builder))
            builder.scheduled.append(sibling)
        seq.siblings = []
        return drawn

    # Admission

    def _admit(self, builder: StepBuilder) -> None:
        """Starts waiting sequences in order, each only if blocks for all its known tokens are free (no thrashing).

        A sequence that can compute little before an image is encoded stays in the queue, and others pass it.
        """
        size = self.limits.block_size
        at = self.held_back = 0
        while at < len(self.waiting) and builder.tokens and self.slots and len(self.running) < self.limits.max_rows:
            seq = self.waiting[at]
            hits = cached_blocks(seq, self.limits, self.pool)
            # With nothing running there is nothing to preempt, so the queue's head must not need more images at a time
            # than fit into the arena.
            if self.encoder.holds_back(seq, len(hits) * size, builder.vision, first=not self.running and at == 0):
                self.held_back = at = at + 1
                continue
            held = [block for block in hits if block != ON_HOST]
            need = -(-len(seq.tokens) // size) - len(held) + self.pool.idle(held)
            if need > self.pool.free - builder.reserved:
                return
            if not self.limits.chunked and len(seq.tokens) - len(hits) * size > builder.tokens:
                return
            self.waiting.pop(at)
            seq.blocks, seq.computed, seq.published = claimed(seq, hits, self.pool), len(hits) * size, len(hits)
            self.host_hits += (len(hits) - len(held)) * size
            seq.slot = self.slots.pop()
            seq.fresh_state = True
            seq.stats.cached_tokens = max(seq.stats.cached_tokens, seq.computed if not seq.outputs else 0)
            self.prefix_queries += len(seq.tokens)
            self.prefix_hits += seq.computed
            self.start_running(seq)
            self._advance(seq, builder)

    def start_running(self, seq: Sequence) -> None:
        """Puts a sequence that has its slot among those that run."""
        seq.status = SequenceStatus.RUNNING
        if self.fair is not None:
            self.fair.started(seq)
        self.running.append(seq)
        self.running.sort(key=self.order_key)

    # Images

    def _resident(self, seq: Sequence, index: int, span: MediaSpan, builder: StepBuilder) -> bool:
        """Pins an image of ``seq``, encoding it in this step if it was chosen and rows can be freed."""
        if self.encoder.pin(seq, index, span):
            return True
        key = seq.key_of(span)
        if key not in builder.vision.chosen:
            return False
        while not self.arena.fits(span.length) and self._yields_rows(seq, builder):
            self._preempt(self.running[-1], builder)
        return self.encoder.encode(key, builder.vision, seq.key)

    def _yields_rows(self, seq: Sequence, builder: StepBuilder) -> bool:
        """Whether the last running sequence, not scheduled yet, gives its rows to ``seq``, the first running one."""
        return self.running[0] is seq and self.running[-1] is not seq and self.running[-1] not in builder.scheduled

    # Leaving

    def _preempt(self, victim: Sequence, builder: StepBuilder) -> None:
        builder.preempted = True
        self.preemptions += 1
        victim.stats.preemptions += 1
        victim.requeue = waits = not victim.drawn
        self.leave(victim)
        if waits:
            self.park(victim)

    def park(self, seq: Sequence) -> bool:
        """Takes blocks and slots from the beams that wait for ``seq``: they must not keep it from running."""
        resting = [mate for mate in seq.mates if mate.resting]
        for mate in resting:
            self.leave(mate)
        return bool(resting)

    def leave(self, seq: Sequence) -> None:
        """Takes a sequence out of ``running``; its blocks and slot come back when no launch in flight uses them."""
        self.running.remove(seq)
        for key in self.arena.pinned_by(seq.key):
            self.arena.unpin(key, seq.key)
        if seq.opened:
            self._closings.append(seq.key)
            seq.opened = False
        seq.status = SequenceStatus.LEAVING
        self.leaving.append(seq)
        if seq.inflight == 0:
            self.release(seq)

    def release(self, seq: Sequence) -> None:
        """Frees blocks and slot; a preempted sequence queues again, its PENDING token having arrived."""
        assert seq.inflight == 0 and (seq.pending == 0 or not seq.requeue)
        self.leaving.remove(seq)
        self.pool.drop(seq.blocks)
        self.slots.append(seq.slot)
        seq.blocks, seq.slot, seq.computed, seq.published, seq.pooled = [], 0, 0, 0, None
        if seq.requeue:
            seq.requeue = False
            self.enqueue(seq)
        else:
            seq.status = SequenceStatus.DONE

    def check(self) -> None:
        """Asserts that blocks, slots and rows are all accounted for; callable between any two steps."""
        holders = [*self.running, *self.leaving]
        self.pool.check([seq.blocks for seq in holders])
        self.arena.check()
        assert len({seq.slot for seq in holders}) == len(holders) and not {seq.slot for seq in holders} & set(
            self.slots
        )
        assert all(seq.status is SequenceStatus.WAITING and not seq.blocks for seq in self.waiting)
        assert all(len(seq.blocks) * self.limits.block_size >= seq.computed for seq in holders)
