"""Sequences that go one token further in each step, as the scheduler keeps them. numpy only.

A sequence that decodes by unchanging parameters gets a seat: a place in arrays that a step advances together. Seats are
dense, so that ranks read the first ``count`` rows of theirs; the last row moves into a seat that is given up.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from trencadis.core.kv.pool import BlockPool
from trencadis.core.scheduling.builder import StepBuilder
from trencadis.core.scheduling.limits import SchedulerLimits
from trencadis.core.scheduling.sequence import Sequence
from trencadis.core.scheduling.uniform import AHEAD, numbers
from trencadis.core.step import PENDING, BatchChange, Draw, Float32, Int32, Joining

NO_NUMBERS = np.zeros(0, np.float32)
NO_TOKENS = np.zeros(0, np.int32)
NO_BLOCKS = np.zeros((2, 0), np.int32)


def settles(seq: Sequence, draws: list[Draw]) -> bool:
    """Whether ``seq``, which has just drawn the first of ``draws``, will draw all others as this one.

    A mask, a ban until min_tokens, beams and ``logprob_token_ids`` change from token to token or need the host. Rows
    that attend to pictures name them in each step.
    """
    spans = seq.request.spans
    if not draws or seq.mates or seq.outputs >= seq.limit or (spans and spans[0].shown):
        return False
    sample = draws[0].sample
    return not (sample.banned or sample.handle or sample.scored)


def _blocks_for(seq: Sequence, limits: SchedulerLimits) -> int:
    """Blocks that a step may take for ``seq``."""
    end = seq.computed + min(seq.due, limits.max_tokens)
    return max(-(-end // limits.block_size) - len(seq.blocks), 0)


class RunningBatch:
    """The seats of one engine.

    Args:
        rows: sequences that may run at a time.
        block_size: tokens of a KV block.
        told: whether a step says which token each row computes, because the first pipeline stage draws none.
    """

    def __init__(self, rows: int, block_size: int, told: bool = False) -> None:
        self._told = told
        self._tokens = NO_TOKENS
        self.sequences: list[Sequence] = []
        self._size = block_size
        self._room = np.zeros(rows, np.int32)  # tokens that its blocks still have room for
        self._draws = np.zeros(rows, np.int64)  # outputs that it may still draw
        self._place = np.zeros(rows, np.int32)  # of the next number in ``_numbers``
        self._random = np.zeros(rows, bool)
        self._numbers = np.full((rows, AHEAD), 0.5, np.float32)
        self._version = 0
        self._left: list[int] = []
        self._joining: list[Sequence] = []
        self._joins: list[Joining] = []

    # Who has a seat

    def join(self, seq: Sequence, row: int) -> None:
        """Gives ``seq`` a seat behind this step, of which it is row ``row``."""
        self._joining.append(seq)
        self._joins.append(Joining(row, 0 if seq.positions is None else seq.request.delta))

    def leave(self, seq: Sequence) -> None:
        """Takes its seat."""
        seat, last = seq.seat, len(self.sequences) - 1
        assert self.sequences[seat] is seq
        self._left.append(seat)
        moved = self.sequences.pop()
        if seat != last:
            self._move(moved, last, seat)
        seq.seat = -1

    def _move(self, seq: Sequence, old: int, seat: int) -> None:
        """Gives ``seq``, which had seat ``old``, another one."""
        self.sequences[seat] = seq
        seq.seat = seat
        for values in (self._room, self._draws, self._place, self._random, self._numbers):
            values[seat] = values[old]

    def leave_all(self, sequences: list[Sequence]) -> None:
        """Takes their seats."""
        for seq in sequences:
            self.leave(seq)

    def leave_spent(self) -> None:
        """Takes the seats of sequences that have drawn their last output."""
        spent = np.flatnonzero(self._draws[: len(self.sequences)] <= 0)
        if len(spent):
            self.leave_all([self.sequences[i] for i in spent])

    def full(self) -> list[Sequence]:
        """Sequences whose next token needs another block."""
        count = len(self.sequences)
        return [self.sequences[i] for i in np.flatnonzero(self._room[:count] <= 0)] if count else []

    # One step

    def serve(self, builder: StepBuilder, unseated: list[Sequence], limits: SchedulerLimits, pool: BlockPool) -> bool:
        """Gives each sequence that has a seat its token of the budget, and a block where it needs one.

        Only if all that run, with a seat or ``unseated``, can get the tokens and blocks that they could take. Then
        order decides nothing between those that have a seat and the others, and True is returned.
        """
        count, full = len(self.sequences), self.full()
        if count + len(unseated) > limits.max_tokens or (unseated and not limits.chunked):
            return False
        if len(full) + sum(_blocks_for(seq, limits) for seq in unseated) > pool.free:
            return False
        builder.tokens -= count
        builder.decoding -= count
        builder.grown = full
        for seq, block in zip(full, pool.take(len(full)) or (), strict=True):
            seq.blocks.append(block)
        return True

    def serve_one(self, seq: Sequence, builder: StepBuilder) -> None:
        """As ``serve`` for one of them, which has its block already."""
        seq.scheduled = builder.number
        builder.tokens -= 1
        if len(seq.blocks) * self._size - seq.computed == self._size:
            builder.grown.append(seq)

    def advance(self, grown: list[Sequence], number: int) -> tuple[Int32, list[Sequence]]:
        """Takes every sequence that has a seat one token further; step ``number`` computes it.

        Args:
            grown: those that got a block for it.

        Returns:
            ``BatchChange.grown``, and the sequences that come to the end of a block.
        """
        count, blocks = len(self.sequences), NO_BLOCKS
        if not count:
            return blocks, []
        grown = [seq for seq in grown if seq.seat >= 0]  # the others gave way to images
        if grown:
            blocks = np.array(([seq.seat for seq in grown], [seq.blocks[-1] for seq in grown]), np.int32)
            self._room[blocks[0]] += self._size
        self._room[:count] -= 1
        self._draws[:count] -= 1
        if self._told:
            self._tokens = self._last_tokens()
        for seq in self.sequences:
            seq.tokens.append(PENDING)
            seq.computed += 1
            seq.pending += 1
            seq.inflight += 1
            seq.scheduled = number
        return blocks, self.full()

    def _last_tokens(self) -> Int32:
        """int32 [count]: the token that each computes now."""
        tokens = np.fromiter((seq.tokens[-1] for seq in self.sequences), np.int32, len(self.sequences))
        assert (tokens >= 0).all(), "a choice in flight is named again"
        return tokens

    def change(self, grown: Int32) -> BatchChange | None:
        """What this step changes; those that join have their seats from now on. None if nothing does."""
        count = len(self.sequences)
        if not (count or self._left or self._joins):
            return None
        self._version += 1
        change = BatchChange(
            self._version, count, tuple(self._left), grown, self._drawn_numbers(count), tuple(self._joins), self._tokens
        )
        self._tokens = NO_TOKENS
        for seq in self._joining:
            self._seat(seq)
        self._left, self._joins, self._joining = [], [], []
        return change

    def _seat(self, seq: Sequence) -> None:
        seat = seq.seat = len(self.sequences)
        self.sequences.append(seq)
        self._room[seat] = len(seq.blocks) * self._size - seq.computed
        assert self._room[seat] < self._size, "a seat begins with a block more than it needs"
        self._draws[seat] = seq.limit - seq.outputs
        self._random[seat] = not seq.request.params.greedy
        if self._random[seat]:
            self._place[seat] = seq.outputs % AHEAD
            self._numbers[seat] = numbers(seq.seed, seq.index, seq.outputs // AHEAD)
        else:
            self._numbers[seat] = 0.5

    def _drawn_numbers(self, count: int) -> Float32:
        """float32 [count]: the number of each draw of this step; none where all take the argmax."""
        random = self._random[:count]
        return self._next_numbers(count, random) if random.any() else NO_NUMBERS

    def _next_numbers(self, count: int, random: NDArray[np.bool_]) -> Float32:
        """A number for each of the rows that are ``random``, and anything for the others."""
        place = self._place[:count]
        for seat in np.flatnonzero(random & (place >= AHEAD)).tolist():
            seq = self.sequences[seat]
            # The draw of this step is the last of the outputs by now.
            self._numbers[seat] = numbers(seq.seed, seq.index, (seq.outputs - 1) // AHEAD)
            place[seat] = 0
        drawn = self._numbers[np.arange(count), np.where(random, place, 0)]
        place += 1
        return drawn

    def check(self, running: list[Sequence]) -> None:
        """Asserts that seats and sequences know each other, and that the arrays say what the sequences say."""
        assert {seq.key for seq in running if seq.seat >= 0} == {seq.key for seq in self.sequences}
        for seat, seq in enumerate(self.sequences):
            assert seq.seat == seat and seq.computed + 1 == len(seq.tokens), "a seat holds another sequence"
            assert self._room[seat] == len(seq.blocks) * self._size - seq.computed
            assert self._draws[seat] == seq.limit - seq.outputs

    def checksum(self) -> int:
        """Of what ranks must know of each seat (``RankBatch.checksum``)."""
        total = 0
        for seq in self.sequences:
            known = (seq.key, seq.slot, seq.computed, *seq.blocks)
            total = zlib.crc32(np.array(known, np.int64).tobytes(), total)
        return total


class Lanes:
    """The sequences that run, parted so that steps in flight share none; a step names those of one lane.

    One device computes one step after the other and has one lane, of which each step may name all. With several
    pipeline stages there is a lane for each, and a lane whose step is in flight waits for its results.

    Args:
        count: lanes.
        rows: sequences that may run at a time; ``block_size``: tokens of a KV block.
    """

    def __init__(self, count: int, rows: int, block_size: int) -> None:
        self.batches = [RunningBatch(rows, block_size, told=count > 1) for _ in range(count)]
        self.sizes = [0] * count
        self.now = 0

    def __len__(self) -> int:
        return len(self.batches)

    @property
    def batch(self) -> RunningBatch:
        """The seats of the lane whose step is being built."""
        return self.batches[self.now]

    def free(self, busy: Iterable[int]) -> list[int]:
        """The lanes that may have a step now, the one that waited longest first; ``busy``: those of steps in flight."""
        count, taken = len(self.batches), set(busy) if len(self.batches) > 1 else set()
        return [lane for lane in ((self.now + 1 + i) % count for i in range(count)) if lane not in taken]

    def enter(self, seq: Sequence, lane: int) -> None:
        """Puts a sequence that begins to run into a lane."""
        seq.lane = lane
        self.sizes[lane] += 1

    def gone(self, seq: Sequence) -> None:
        """Takes out a sequence that runs no more, with its seat."""
        if seq.seat >= 0:
            self.batches[seq.lane].leave(seq)
        self.sizes[seq.lane] -= 1

    @property
    def least(self) -> int:
        """The lane with the fewest sequences."""
        return self.sizes.index(min(self.sizes))

    def room(self, waiting: int) -> bool:
        """Whether this lane may take another sequence, if ``waiting`` ones are dealt evenly among all."""
        return self.sizes[self.now] * len(self.sizes) < sum(self.sizes) + waiting

    def deal(self, running: Iterable[Sequence]) -> None:
        """Hands sequences that this lane has too many of to the lane with the fewest."""
        more = self.sizes[self.now] - min(self.sizes)
        if more >= 2:
            self._deal(running, more)

    def _deal(self, running: Iterable[Sequence], more: int) -> None:
        """``deal`` where this lane has ``more`` sequences than another."""
        mine = [seq for seq in running if seq.lane == self.now and seq.inflight == 0 and not seq.resting]
        for seq in mine[len(mine) - more // 2 :]:
            lane = self.least
            self.gone(seq)
            self.enter(seq, lane)

    def check(self, running: list[Sequence]) -> None:
        """Asserts that lanes, seats and sequences know each other."""
        for lane, batch in enumerate(self.batches):
            mine = [seq for seq in running if seq.lane == lane]
            batch.check(mine)
            assert len(mine) == self.sizes[lane], "a lane lost count"
