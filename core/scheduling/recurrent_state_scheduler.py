"""Recurrent state of sequences: slots, where chunks of a prompt end, and snapshots that later requests begin with.

A prompt that is cut at multiples of CHUNK gives the same bits as the whole, so all chunks but the last end there where
the token budget allows. A snapshot is taken every INTERVAL tokens of a prompt, at its end, and where another prompt
branches off: always at such a multiple that also ends a KV block. Beams leave one at the end of each block of their
answers, so that the beams that follow them compute at most a block anew.

The state of a preempted sequence goes to host memory if blocks may (``--kv-offloading-size``). The sequence goes on
from there if all its blocks are still cached, also the one in which the state ends. Torch-free.
"""

from __future__ import annotations

from math import lcm

from trencadis.core.checkpoint.decoder_layer_config import CHUNK
from trencadis.core.engine_stats import EngineStats
from trencadis.core.kv.block_pool import BlockPool
from trencadis.core.kv.recurrent_state_pool import StatePool
from trencadis.core.scheduling.scheduler_limits import SchedulerLimits
from trencadis.core.scheduling.sequence import KeptState, Sequence
from trencadis.core.scheduling.step_builder_and_adapter_slots import StepBuilder, claim, publish
from trencadis.core.step import BlockMove, StateSlots

INTERVAL = 512
"""Tokens of a prompt between two snapshots."""

TAIL = 128
"""Fewest tokens between a snapshot at the end of a prompt and the one before: it costs the prompt another launch."""


class StateScheduler:
    """Gives sequences slots of state, and takes snapshots. Exists only for models with recurrent layers."""

    def __init__(self, pool: StatePool, limits: SchedulerLimits, blocks: BlockPool) -> None:
        self.pool, self.limits, self.blocks = pool, limits, blocks
        self.unit = lcm(CHUNK, limits.block_size)
        self.interval = -(-INTERVAL // self.unit) * self.unit

    @property
    def takes_snapshots(self) -> bool:
        """True if requests may begin with the state of earlier ones."""
        return self.limits.caching and self.limits.chunked and self.pool.most > 0

    # Admission and leaving

    def shorten(self, seq: Sequence, hits: list[int]) -> list[int]:
        """Returns the cached blocks that a sequence can begin with: up to its own state in host memory, or up to the
        last one that ends with a snapshot.
        """
        size, count = self.limits.block_size, 0
        seq.found.counted = seq.found.used = 0
        if hits and self.takes_snapshots:
            count = self.pool.longest(seq.block_hashes.keys[: len(hits)])
            branch = len(hits) * size // self.unit * self.unit
            seq.branch_at = branch if branch > count * size else 0
        if seq.kept.tokens > count * size and self._resumes(seq, hits):
            return hits[: seq.kept.tokens // size]
        return hits[:count]

    def _resumes(self, seq: Sequence, hits: list[int]) -> bool:
        """Returns True if a preempted sequence can go on with its own state: all its blocks and the state are there."""
        (tokens, key), size, host = seq.kept, self.limits.block_size, self.pool.host
        if host is None or key not in host or len(hits) < tokens // size:
            return False
        return tokens % size == 0 or self.blocks.find(key) is not None or self.blocks.on_host(key)

    def begin(self, seq: Sequence, hits: list[int], totals: EngineStats) -> None:
        """Gives a sequence that starts a slot and the cached blocks ``hits`` (``shorten``), with the state after them:
        its own, or a snapshot.
        """
        size, kept, host = self.limits.block_size, seq.kept, self.pool.host
        resumes = len(hits) == kept.tokens // size and self._resumes(seq, hits)
        if hits and not resumes:
            seq.source = self.pool.claim(seq.block_hashes.keys[len(hits) - 1])
        slot = self.pool.take()
        assert slot is not None, "a sequence was admitted without a slot for its state"
        seq.state = slot
        if resumes and host is not None:
            claim(seq, hits, size, self.blocks, totals, kept)
            (place,) = host.pull([kept.key])
            host.restore(kept.key, place, slot)
            host.discard(kept.key)
            seq.source = slot
        elif hits:
            claim(seq, hits, size, self.blocks, totals)
        else:
            self.pool.misses += 1

    def _keep(self, seq: Sequence) -> None:
        """Copies the state of a preempted sequence to host memory and publishes its blocks, also the one that the state
        ends in; no other sequence writes to that one.
        """
        host, size = self.pool.host, self.limits.block_size
        if host is None or not seq.source or not seq.reads_prefix or not self.limits.caching or self.limits.long_from:
            return
        publish(seq, self.blocks, size)
        seq.kept = KeptState(seq.computed, seq.block_hashes.key_within_block(seq.tokens, seq.computed))
        host.keep(seq.kept.key, seq.source)
        if seq.computed % size and self.blocks.references(last := seq.blocks[seq.computed // size]) == 1:
            self.blocks.publish(last, seq.kept.key)

    def take_moves(self) -> tuple[BlockMove, ...]:
        """Returns the copies of states to and from host memory that the next Step begins with."""
        return () if self.pool.host is None else self.pool.host.take_moves()

    def end(self, seq: Sequence) -> None:
        """Takes back what a sequence holds; none of its launches is in flight. A preempted one still has its blocks."""
        if seq.requeue:
            self._keep(seq)
        if seq.source not in (0, seq.state):
            self.pool.release(seq.source, read=False)
        self.pool.drop(seq.state)
        seq.state = seq.source = seq.branch_at = 0
        seq.last_snapshot = b""

    # Chunks

    def cut(self, seq: Sequence, count: int, builder: StepBuilder, forced: bool) -> int:
        """Returns how many of the next ``count`` tokens of a sequence run, so that chunks end where states can be kept.

        Args:
            forced: True if something other than the budget limits ``count``, so that waiting would not help.
        """
        start, end = seq.computed, seq.computed + count
        mark = self._next_mark(seq, start)
        if start < mark <= end:
            return mark - start
        if end >= len(seq.tokens):
            return count
        aligned = end // CHUNK * CHUNK - start
        if aligned > 0:
            return aligned
        waits = not forced and not self.limits.chunk and builder.chunk_budget is None
        return 0 if waits and self.limits.max_tokens >= CHUNK + self.limits.max_rows else count

    def _next_mark(self, seq: Sequence, start: int) -> int:
        """Returns the next token after ``start`` at which a snapshot is due; 0: there is none."""
        if not self.takes_snapshots or start >= seq.prompt or not seq.reads_prefix:
            return 0
        last = seq.prompt // self.unit * self.unit
        next_one = (start // self.interval + 1) * self.interval
        marks = [next_one if next_one <= last else 0, seq.branch_at]
        least = self.unit if seq.siblings or seq.mates else TAIL
        if last - max(start // self.interval * self.interval, seq.branch_at) >= least:
            marks.append(last)
        return min((mark for mark in marks if mark > start), default=0)

    def place(self, seq: Sequence, start: int, builder: StepBuilder) -> StateSlots:
        """Returns the slots of the row of ``seq`` in this step, whose tokens are those from ``start`` on.

        If a snapshot is due at its end, the sequence goes on in another slot.
        """
        slots = StateSlots(seq.state, seq.source)
        if seq.source not in (0, seq.state):
            self.pool.release(seq.source, read=True)
        seq.source = seq.state
        if seq.computed == self._next_mark(seq, start) or self._ends_block(seq):
            key = seq.block_hashes.key(seq.tokens, seq.computed // self.limits.block_size - 1)
            found = self.pool.exchange(seq.state, key, seq.last_snapshot)
            if found is not None:
                seq.last_snapshot = key if seq.computed != seq.branch_at else b""
                seq.state, pending = found
                builder.snapshots.append(pending)
        return slots

    def _ends_block(self, seq: Sequence) -> bool:
        """Returns True if the answer of a beam fills a block, whose end other beams may begin with."""
        fills = seq.computed > seq.prompt and seq.computed % self.limits.block_size == 0
        return bool(seq.mates) and fills and self.takes_snapshots and seq.reads_prefix

    def check(self, holders: list[Sequence]) -> None:
        """Asserts that the slots of all sequences with blocks, and of the pool, are accounted for."""
        self.pool.check([seq.state for seq in holders], [s.source for s in holders if s.source not in (0, s.state)])
