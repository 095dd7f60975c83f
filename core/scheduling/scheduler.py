"""Decides which tokens run next.

The scheduler has no phases: each step brings ``computed`` of a sequence closer to ``len(tokens)``, so that chunked
prefill, prefix hits, resumed sequences and forks are not special cases. One total order (priority, arrival, key)
determines admission, packing, preemption (last first) and arena rows. The first running sequence always makes progress:
it may take blocks and rows from any later one, and the pool holds one request of full length. Sequences that advance by
one token a step have rows of the persistent batch (``persistent_batch.py``), and advance together while tokens and
blocks suffice for all: the order is irrelevant then.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from itertools import chain

from trencadis.core.cross_attention_inputs import NO_CROSS_ATTENTION
from trencadis.core.engine_stats import EngineStats
from trencadis.core.kv.block_pool import BlockHashChain, BlockPool
from trencadis.core.kv.recurrent_state_pool import StatePool
from trencadis.core.media_spans import MediaSpan
from trencadis.core.scheduling import encoder_scheduler, step_builder_and_adapter_slots
from trencadis.core.scheduling.draft_scheduler import DraftScheduler
from trencadis.core.scheduling.encoder_cache import EncoderCache
from trencadis.core.scheduling.encoder_scheduler import EncoderScheduler, ImagePacker, VisionBuilder, count_uncut
from trencadis.core.scheduling.fair_order import TotalOrder, media_order
from trencadis.core.scheduling.persistent_batch import MicroBatches, can_persist
from trencadis.core.scheduling.recurrent_state_scheduler import StateScheduler
from trencadis.core.scheduling.scheduler_limits import SchedulerLimits
from trencadis.core.scheduling.sequence import Filled, MediaStart, Sequence, SequenceStatus, check_holders
from trencadis.core.scheduling.step_builder_and_adapter_slots import AdapterSlots, InFlightStep, StepBuilder
from trencadis.core.shapes.step_times_and_chunk_budget import StepTimes
from trencadis.core.step import Draw, Int32, Row, Step


class Scheduler:
    """Manages queues, blocks, slots and arena rows of one engine; builds Steps, whose results go to ``Lifecycle``."""

    def __init__(
        self,
        limits: SchedulerLimits,
        pool: BlockPool,
        arena: EncoderCache,
        slots: int,
        clock: Callable[[], float] = time.monotonic,
        packer: ImagePacker | None = None,
        times: StepTimes | None = None,
        states: StatePool | None = None,
    ) -> None:
        self.limits, self.times = limits, times
        self.states = None if states is None else StateScheduler(states, limits, pool)
        """Set if the model keeps a recurrent state for each sequence."""
        self.pool, self.arena, self.clock = pool, arena, clock
        self.totals = EngineStats(kv_total=pool.size, arena_total=arena.capacity)
        """Counters since the start; lists hold the events since the last report."""
        self.adapters = AdapterSlots(limits.adapters)
        packer = packer or ImagePacker(budget=limits.encoder_slots)
        self.encoder = EncoderScheduler(arena, packer, self.totals, self.adapters)
        self.pixel_queue = self.encoder.pixel_queue
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.leaving: list[Sequence] = []
        self.micro_batches = MicroBatches(limits.stages, limits.max_rows, limits.block_size)
        self.with_media = 0  # number of live requests with media
        self.slots = list(range(slots, 0, -1))
        self.in_flight: deque[InFlightStep] = deque()
        self.steps = 0
        self.first_draws = 0
        """First tokens of choices that the Steps since the last report draw."""
        self.held_back = 0
        self.order = TotalOrder(limits, clock)
        self.fair = self.order.fair
        self._closings: list[int] = []  # keys of choices that have left since the last step
        self._biased: set[int] = set()  # slots whose sampler state holds a bias
        self._had_vision = self._starved_text = False  # last step: had VISION; starved a text-only request
        self.drafting: DraftScheduler | None = None
        """Set if sequences are drafted."""

    # The queue

    def enqueue(self, seq: Sequence) -> None:
        """Inserts a sequence into the queue."""
        seq.wait()
        self.order.enqueue(seq, self.waiting)

    @property
    def admits(self) -> bool:
        """True if a row and a slot are free, and a slot for its state if there are such."""
        free = bool(self.slots) and len(self.running) < self.limits.max_rows
        return free and (self.states is None or self.states.pool.free > 0)

    # One step

    def schedule(self) -> Step | None:
        """Returns the next Step, or None if nothing can run. Every Step encodes or advances something."""
        if self.drafting is not None and self.in_flight and self.drafting.waits(self.in_flight, self.running):
            return None
        for seq in self.order.choose_displaced(self.running) if self.fair is not None else ():
            self.leave(seq)
        if self.order.moves and (self.with_media or self.admits):
            self.order.sort(self.waiting)
        if len(self.micro_batches.batches) == 1:
            return self._schedule()
        for micro_batch in self.micro_batches.list_free(self.in_flight):
            before = self.micro_batches.current
            self.micro_batches.select(micro_batch)
            step = self._schedule()
            if step is not None:
                return step
            self.micro_batches.select(before)
        return None

    def _schedule(self) -> Step | None:
        """Returns the next Step of the current micro-batch."""
        micro_batches, batch = self.micro_batches, self.micro_batches.batch
        micro_batches.begin_step(self.running)
        if batch.age >= batch.next_spent:
            batch.leave_spent()
        if self.states is not None:
            self.states.pool.begin_step()
        if self.drafting is not None:
            mine = self.running if len(micro_batches.batches) == 1 else micro_batches.members(self.running)
            self.drafting.prepare(mine, batch, self.pool)
        persistent = len(batch.sequences)
        others = [] if persistent == micro_batches.sizes[micro_batches.current] else self._list_unbatched()
        vision = VisionBuilder()
        if self.with_media:
            vision = self.encoder.begin(self._media_in_order(), self._skips_vision())
        scored = self.order.scored.tokens()
        builder = StepBuilder(self.steps + 1, self.limits.max_tokens, scored, vision, most_scored=scored)
        builder.decoding = persistent + sum(seq.due == 1 for seq in others)
        if self.times is not None:
            builder.bound_prompts(self.times)
        if batch.grant_all(builder, others, self.limits, self.pool):
            if others:
                self._advance_sequences(others, builder)
        else:
            self._advance_all_in_order(builder)
        grown, filled = batch.advance(builder.grown, builder.number)
        if filled:  # those with several pending tokens await some of the block
            step_builder_and_adapter_slots.publish_filled(
                (f for f in filled if f[0].pending == 1), self.limits, self.pool
            )
        if not builder.preempted and not any(micro_batches.lacks_blocks):
            self.held_back = 0
            if self.waiting and len(self.running) < self.limits.max_rows:
                self._admit(builder)
        if self.drafting is not None and self.drafting.proposed:
            self.drafting.extend_rows(builder, self.pool, len(batch.sequences))
        self._had_vision = self._starved_text = False
        if self.with_media:
            self._end_vision(builder)
        return self._step(builder, grown, filled)

    def _step(self, builder: StepBuilder, grown: Int32, filled: list[Filled]) -> Step | None:
        """Returns the Step that ``builder`` describes, which is now in flight."""
        images, persistent = tuple(builder.vision.images), [*self.micro_batches.batch.sequences]
        if not (builder.rows or images or persistent):
            return None
        self.steps += 1
        micro_batch, chunk_budget, owners = self.micro_batches.current, builder.chunk_budget, builder.vision.owners
        work = None if chunk_budget is None else builder.work(chunk_budget, self.clock())
        for seq in builder.scheduled:
            seq.inflight += 1
        flying = InFlightStep(self.steps, persistent, filled, builder.scheduled, owners, micro_batch, work)
        flying.snapshots = builder.snapshots
        self.in_flight.append(flying)
        closings, self._closings = tuple(self._closings), []
        moves = () if self.pool.host is None else self.pool.host.take_moves()
        swaps = () if self.states is None else self.states.take_moves()
        change = self.micro_batches.batch.take_change(grown)
        rows, resets, openings = tuple(builder.rows), tuple(builder.resets), tuple(builder.openings)
        uploads = self.adapters.take_uploads() if self.limits.adapters else ()
        step = Step(self.steps, rows, images, resets, openings, closings, moves, change, micro_batch, uploads, swaps)
        if self.drafting is not None:
            flying.drafted, flying.began = builder.drafted, self.clock()
            flying.tokens = 0 if builder.prompts or images else step.tokens
        return step

    def _advance_sequences(self, sequences: Iterable[Sequence], builder: StepBuilder) -> None:
        """Advances running sequences, in order, while tokens are left."""
        for seq in sequences:
            if builder.tokens == 0:
                break
            if seq.status is SequenceStatus.RUNNING:
                builder.decoding -= seq.due == 1
                self._advance(seq, builder)

    def _advance_all_in_order(self, builder: StepBuilder) -> None:
        """Advances the running sequences of this micro-batch in order, as far as tokens and blocks suffice.

        Sequences that are not reached leave the persistent batch.
        """
        self.order.sort(self.running)
        self._advance_sequences(self.micro_batches.members(self.running), builder)
        batch = self.micro_batches.batch
        batch.leave_all([seq for seq in batch.sequences if seq.scheduled != builder.number])

    def _list_unbatched(self) -> list[Sequence]:
        """Returns the running sequences outside the persistent batch, in order."""
        self.order.sort(self.running)
        return [seq for seq in self.micro_batches.members(self.running) if seq.batch_row < 0]

    def _skips_vision(self) -> bool:
        """Returns True if this step has no VISION launch, so that a text-only request waits for at most one."""
        had = self._had_vision and self.admits
        return self._starved_text or (had and any(not seq.request.spans for seq in self.waiting))

    def _end_vision(self, builder: StepBuilder) -> None:
        """Encodes images ahead, requests pixels, and records the facts that the next step needs."""
        self.encoder.end(builder.vision, self._media_in_order())
        mine = self.micro_batches.members(self.running)
        self._had_vision, self._starved_text = bool(builder.vision.images), builder.starves(chain(mine, self.waiting))

    def _media_in_order(self) -> Iterable[MediaStart]:
        """Yields sequences with media in the total order; those in the persistent batch have passed theirs."""
        running = (seq for seq in self.running if seq.batch_row < 0)
        return media_order(running, self.waiting[: self.limits.max_rows], self.limits, self.pool, self._prefix_hits)

    def _prefix_hits(self, seq: Sequence) -> list[int]:
        """Returns the cached blocks that a sequence would begin with, up to a snapshot of its state if it has one."""
        hits = step_builder_and_adapter_slots.cached_blocks(seq, self.limits, self.pool)
        return hits if self.states is None else self.states.shorten(seq, hits)

    def _advance(self, seq: Sequence, builder: StepBuilder) -> None:
        if self.limits.long_from and seq.due and seq.outgrows(self.limits.long_from):
            self._preempt(seq, builder)  # its keys use the rotary table for short requests and must be recomputed
            return
        most = builder.most(seq, self.limits)
        count = self._up_to_image(seq, most, builder) if seq.request.spans else most
        if count > 0 and self.states is not None:
            count = self.states.cut(seq, count, builder, forced=count < most)
        if count > 0:
            count = self._allocate_blocks(seq, count, builder)
            if count > 0 and self.states is not None:
                count = self.states.cut(seq, count, builder, forced=True)
            count = count_uncut(seq, count) if self.limits.bidirectional_images else count
        if count > 0 and not (self.limits.whole and count < seq.due):
            if seq.batch_row < 0:
                self._add_row(seq, count, builder)
            else:
                self.micro_batches.batch.grant_one(seq, builder)

    def _up_to_image(self, seq: Sequence, count: int, builder: StepBuilder) -> int:
        """Returns how many of the next ``count`` tokens come before an image that is not resident."""
        start = seq.computed
        for index, span in enumerate(seq.request.spans):
            if span.offset >= start + count:
                break
            if span.end > start and not self._resident(seq, index, span, builder):
                return max(span.offset - start, 0)
        return count

    def _allocate_blocks(self, seq: Sequence, count: int, builder: StepBuilder) -> int:
        """Allocates blocks for ``count`` more tokens of ``seq``, preempting later sequences.

        Returns the number of tokens that fit.
        """
        size = self.limits.block_size
        need = -(-(seq.computed + count) // size) - len(seq.blocks)
        free = max(self.pool.free - builder.reserved, 0)
        have = need if need <= free else self._preempt_for_blocks(seq, need, builder)
        self.micro_batches.lacks_blocks[self.micro_batches.current] |= have < need
        if have < min(need, 0):
            return 0
        if have > 0:
            seq.blocks += self.pool.take(have) or []
        return min(count, len(seq.blocks) * size - seq.computed)

    def _preempt_for_blocks(self, seq: Sequence, need: int, builder: StepBuilder) -> int:
        """Preempts later sequences; returns how many of ``need`` blocks are free.

        Returns -1 if they will be free soon and ``seq`` waits.
        """
        while need > self.pool.free - builder.reserved:
            # Blocks held only by leaving sequences become free once their last launch is fetched.
            pending = sum(self.pool.references(b) == 1 for gone in self.leaving for b in gone.blocks)
            if pending and need <= self.pool.free - builder.reserved + pending:
                builder.reserved += need
                return -1
            if self.running[-1] is seq or self.running[-1].scheduled == builder.number:
                if not self.park(seq):
                    break
                continue
            self._preempt(self.running[-1], builder)
        return min(need, max(self.pool.free - builder.reserved, 0))

    def _add_row(self, seq: Sequence, count: int, builder: StepBuilder) -> None:
        """Adds the Row of ``seq`` and marks its tokens computed; a row that reaches the end samples the next token."""
        seq.scheduled = builder.number
        start, end = seq.computed, seq.computed + count
        if builder.chunk_budget is not None and seq.due > 1:
            builder.chunk_budget.take(start, count)
        seq.entered = seq.entered or self.clock()
        if seq.fresh_state:
            builder.reset(seq, self._biased)
        images = self.encoder.rows_of(seq, start, end, builder.vision) if seq.request.spans else ()
        targets = None if seq.prompt_scores is None else seq.targets(start, count)
        seq.computed = end
        builder.tokens -= count
        builder.scored -= 0 if targets is None else count
        builder.image_prompts |= count > 1 and bool(seq.request.spans)
        builder.prompts |= start < seq.prompt
        builder.scheduled.append(seq)
        draws: list[Draw] = []
        first = not seq.outputs
        state = None if self.states is None else self.states.place(seq, start, builder)
        if end == len(seq.tokens) and seq.outputs < seq.limit:
            draws = [builder.draw(seq)]
            if seq.siblings and self.states is None:
                draws += self._fork(seq, builder)
            self.first_draws += len(draws) if first else 0
            # The length is checked in each step where there is another rotary table for longer texts.
            settled = seq.source == seq.state and not self.limits.long_from and not seq.proposal
            if settled and can_persist(seq, draws):
                self.micro_batches.batch.join(seq, len(builder.rows))
        tokens, blocks, positions = tuple(seq.tokens[start:end]), tuple(seq.blocks), seq.positions_of(start, count)
        pool = seq.pool_of(start, count) if seq.request.pool else None
        spans = (
            encoder_scheduler.bidirectional_spans(seq, start, end, self.limits)
            if self.limits.whole or self.limits.bidirectional_images
            else ()
        )
        cross_attention = (
            self.encoder.cross_attention_of(seq, start, end)
            if any(s.cross_attention_rows for s in seq.request.spans)
            else NO_CROSS_ATTENTION
        )
        wide = 0 if targets is None else seq.prompt_width
        following = seq.tokens[end] if end < len(seq.tokens) else -1
        some = images, tuple(draws), targets, seq.adapter_slot, pool, spans, cross_attention, wide, following, state
        builder.rows.append(Row(seq.key, seq.slot, start, tokens, blocks, positions, *some))
        self.publish(seq)

    def publish(self, seq: Sequence) -> None:
        """Adds the full blocks of ``seq`` to the prefix cache: their KV is submitted and their tokens are known."""
        if self.limits.caching:
            step_builder_and_adapter_slots.publish(seq, self.pool, self.limits.block_size)

    # Forks

    def _fork(self, seq: Sequence, builder: StepBuilder) -> list[Draw]:
        """Samples the first tokens of siblings from the same hidden row while slots last; the rest are queued.

        Queued siblings use the prefix cache.
        """
        drawn = []
        full = seq.prompt // self.limits.block_size
        for sibling in (s for s in seq.siblings if not s.ended):
            if not self.admits:
                self.enqueue(sibling)
                continue
            sibling.slot = self.slots.pop()
            # Each sibling writes into the block with the prompt's end, so it recomputes that block.
            sibling.branch(seq, full, self.limits.block_size)
            self.pool.share(sibling.blocks)
            builder.reset(sibling, self._biased)
            self.start_running(sibling, seq.micro_batch)
            drawn.append(builder.draw(sibling))
            builder.scheduled.append(sibling)
            sibling.scheduled = builder.number
        seq.siblings = []
        return drawn

    # Admission

    def _admit(self, builder: StepBuilder) -> None:
        """Starts waiting sequences in order, each only if blocks for all its known tokens are free: no thrashing.

        A sequence that can compute only little before an image is encoded stays in the queue, and others overtake it.
        """
        size, at = self.limits.block_size, 0
        self.adapters.begin_admission()
        while at < len(self.waiting) and builder.open and self.admits:
            if not self.micro_batches.can_admit(len(self.waiting) - at):
                break
            seq = self.waiting[at]
            if self.fair is not None and self.fair.keeps_rows_from(seq):
                at = self.fair.find_other(self.waiting, at)
                continue
            if not builder.can_score(seq, self.limits) or not self.adapters.admits(seq):
                at += 1
                continue
            if self.limits.long_from and seq.outgrows(self.limits.long_from):
                seq.long, seq.block_hashes = True, BlockHashChain(seq.request, size, long=True)
            hits = self._prefix_hits(seq)
            if hits and self.states is not None and self.states.pool.free < 2:  # a snapshot, and a slot to go on in
                return
            # If nothing runs there is nothing to preempt, so the queue's head must not need more images at a time than
            # fit into the arena.
            first, start = not self.running and at == 0, len(hits) * size
            if seq.request.spans and self.encoder.holds_back(seq, start, builder.vision, first):
                self.held_back, at = self.held_back + 1, at + 1
                continue
            need = -(-len(seq.tokens) // size) - (
                step_builder_and_adapter_slots.count_spared_blocks(seq, hits, self.pool) if hits else 0
            )
            if need > self.pool.free - builder.reserved:
                return
            if not self.limits.chunked and len(seq.tokens) - start > builder.tokens:
                return
            self.waiting.pop(at)
            if self.states is not None:
                self.states.begin(seq, hits, self.totals)
            elif hits:
                step_builder_and_adapter_slots.claim(seq, hits, size, self.pool, self.totals)
            seq.slot = self.slots.pop()
            seq.fresh_state = True
            self.totals.prefix_queries += len(seq.tokens)
            self.start_running(seq, self.micro_batches.current)
            step_builder_and_adapter_slots.log_admission(seq, self.pool.free, len(self.waiting))
            self._advance(seq, builder)

    def start_running(self, seq: Sequence, micro_batch: int | None = None) -> None:
        """Adds a sequence with a slot to the running ones; no ``micro_batch``: to the smallest one."""
        seq.status = SequenceStatus.RUNNING
        self.adapters.start(seq)
        self.micro_batches.add(seq, self.micro_batches.smallest if micro_batch is None else micro_batch)
        self.order.start(seq, self.running)

    # Images

    def _resident(self, seq: Sequence, index: int, span: MediaSpan, builder: StepBuilder) -> bool:
        """Pins an image of ``seq``, encoding it in this step if it was chosen and rows can be freed."""
        if self.encoder.pin(seq, index, span):
            return True
        key = seq.key_of(span)
        if key not in builder.vision.chosen:
            return False
        while not self.arena.fits(span.arena_rows) and self._yields_rows(seq, builder):
            self._preempt(self.running[-1], builder)
        return self.encoder.encode(key, builder.vision, seq.key)

    def _yields_rows(self, seq: Sequence, builder: StepBuilder) -> bool:
        """Returns True if the last running sequence, not scheduled yet, must give its rows to ``seq``, the first
        running one.
        """
        last = self.running[-1]
        return self.running[0] is seq and last is not seq and last.scheduled != builder.number

    # Leaving and preemption

    def _preempt(self, victim: Sequence, builder: StepBuilder) -> None:
        builder.preempted = True
        step_builder_and_adapter_slots.log_preemption(victim, self.pool.free)
        victim.requeue = waits = not victim.drawn
        self.leave(victim)
        if waits:
            self.park(victim)

    def park(self, seq: Sequence) -> bool:
        """Preempts waiting beams so that ``seq`` can run; returns whether any was preempted."""
        resting = [mate for mate in seq.mates if mate.resting]
        for mate in resting:
            self.leave(mate)
        return bool(resting)

    def leave(self, seq: Sequence) -> None:
        """Removes a sequence from ``running``; its blocks and slot are freed when no launch in flight uses them."""
        self.totals.preemptions += seq.requeue
        seq.stats.preemptions += seq.requeue
        self.order.stop(seq, self.running)
        self.adapters.stop(seq)
        self.micro_batches.remove(seq)
        if seq.request.spans:
            self.arena.unpin_all(seq.key)
        if seq.opened:
            self._closings.append(seq.key)
            seq.opened = False
        seq.status, seq.proposal = SequenceStatus.LEAVING, ()
        self.leaving.append(seq)
        if seq.inflight == 0:
            self.release(seq)

    def release(self, seq: Sequence) -> None:
        """Frees blocks and slot; a preempted sequence, whose PENDING token has arrived, is queued again."""
        assert seq.inflight == 0 and (seq.pending == 0 or not seq.requeue)
        self.leaving.remove(seq)
        if self.states is not None:
            self.states.end(seq)
        self.pool.drop(seq.blocks)
        self.slots.append(seq.slot)
        seq.blocks, seq.slot, seq.computed, seq.published, seq.pooled = [], 0, 0, 0, None
        seq.status = SequenceStatus.DONE
        if seq.requeue:
            self.enqueue(seq)

    def check(self) -> None:
        """Asserts that blocks, slots and rows are all accounted for; may be called between any two steps."""
        holders = [*self.running, *self.leaving]
        self.pool.check([seq.blocks for seq in holders])
        self.arena.check()
        self.micro_batches.check(self.running)
        if self.states is not None:
            self.states.check(holders)
        self.adapters.check(self.running)
        check_holders(holders, self.waiting, self.slots, self.limits.block_size)
