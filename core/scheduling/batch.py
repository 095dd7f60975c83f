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
from trencadis.core.scheduling.sequence import Filled, Sequence
from trencadis.core.scheduling.uniform import AHEAD, numbers
from trencadis.core.step import PENDING, BatchChange, Draw, Float32, Int32, Joining

NEVER = 1 << 62
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

    A seat has dates: steps at which its blocks are full, and at which it has drawn its last output. So a step looks at
    the seats only if one of them has come to a date, and changes none of them where none has.

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
        self._age = 0  # steps that seats have gone through
        self._last = np.zeros(rows, np.int32)  # its last block
        self._full_at = np.zeros(rows, np.int64)  # the age at which its blocks have no room
        self._spent_at = np.zeros(rows, np.int64)  # the age at which it has drawn its last output
        self._next_full = self._next_spent = NEVER  # no seat comes to either before
        self._numbers = np.full((rows, AHEAD), 0.5, np.float32)  # column age % AHEAD is drawn; 0.5: the argmax
        self._turn = np.full(rows, -1, np.int32)  # the column in which a batch of its numbers begins; -1: argmax
        self._turns = [0] * AHEAD  # seats by their turn
        self._drawing = 0  # seats that draw at random
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
        self._count_turn(seat, -1)
        moved = self.sequences.pop()
        if seat != last:
            self._move(moved, last, seat)
        seq.seat = -1

    def _move(self, seq: Sequence, old: int, seat: int) -> None:
        """Gives ``seq``, which had seat ``old``, another one."""
        self.sequences[seat] = seq
        seq.seat = seat
        for values in (self._last, self._full_at, self._spent_at, self._turn, self._numbers):
            values[seat] = values[old]

    def leave_all(self, sequences: list[Sequence]) -> None:
        """Takes their seats."""
        for seq in sequences:
            self.leave(seq)

    def leave_spent(self) -> None:
        """Takes the seats of sequences that have drawn their last output."""
        if self._age >= self._next_spent:
            spent = np.flatnonzero(self._spent_at[: len(self.sequences)] <= self._age)
            self.leave_all([self.sequences[i] for i in spent])
            self._next_spent = int(self._spent_at[: len(self.sequences)].min(initial=NEVER))

    def full(self) -> list[Sequence]:
        """Sequences whose next token needs another block."""
        return self._full() if self._age >= self._next_full else []

    def _full(self) -> list[Sequence]:
        return [self.sequences[i] for i in self._full_seats().tolist()]

    def _full_seats(self) -> NDArray[np.int64]:
        dates = self._full_at[: len(self.sequences)]
        self._next_full = int(dates.min(initial=NEVER))
        return np.flatnonzero(dates <= self._age)

    def _filled(self) -> list[Filled]:
        """Sequences that have come to the end of a block, with that block."""
        seats = self._full_seats()
        return [(self.sequences[i], block) for i, block in zip(seats.tolist(), self._last[seats].tolist(), strict=True)]

    # One step

    def serve(self, builder: StepBuilder, unseated: list[Sequence], limits: SchedulerLimits, pool: BlockPool) -> bool:
        """Gives each sequence that has a seat its token of the budget, and a block where it needs one.

        Only if all that run, with a seat or ``unseated``, can get the tokens and blocks that they could take. Then
        order decides nothing between those that have a seat and the others, and True is returned.
        """
        count, full = len(self.sequences), self.full()
        if count + len(unseated) > limits.max_tokens or (unseated and not limits.chunked):
            return False
        need = len(full) + sum(_blocks_for(seq, limits) for seq in unseated) if full or unseated else 0
        if need and need > pool.free:
            return False
        builder.tokens -= count
        builder.decoding -= count
        if full:
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

    def advance(self, grown: list[Sequence], number: int) -> tuple[Int32, list[Filled]]:
        """Takes every sequence that has a seat one token further; step ``number`` computes it.

        Args:
            grown: those that got a block for it.

        Returns:
            ``BatchChange.grown``, and the sequences that come to the end of a block, with that block.
        """
        count, blocks = len(self.sequences), NO_BLOCKS
        if not count:
            return blocks, []
        grown = [seq for seq in grown if seq.seat >= 0]  # the others gave way to images
        if grown:
            blocks = np.array(([seq.seat for seq in grown], [seq.blocks[-1] for seq in grown]), np.int32)
            self._full_at[blocks[0]] += self._size
            self._last[blocks[0]] = blocks[1]
        self._age += 1
        if self._told:
            self._tokens = self._last_tokens()
        token = PENDING
        for seq in self.sequences:
            seq.tokens.append(token)
            seq.computed += 1
            seq.pending += 1
            seq.inflight += 1
            seq.scheduled = number
        return blocks, self._filled() if self._age >= self._next_full else []

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
        room, draws = len(seq.blocks) * self._size - seq.computed, seq.limit - seq.outputs
        assert room < self._size, "a seat begins with a block more than it needs"
        self._last[seat] = seq.blocks[-1]
        self._full_at[seat], self._spent_at[seat] = self._age + room, self._age + draws
        self._next_full = min(self._next_full, self._age + room)
        self._next_spent = min(self._next_spent, self._age + draws)
        if seq.request.params.greedy:
            self._turn[seat], self._numbers[seat] = -1, 0.5
        else:
            self._turn[seat] = (self._age + 1 - seq.outputs) % AHEAD  # its next output is drawn at the next age
            self._put_numbers(seat, seq.outputs)
        self._count_turn(seat, 1)

    def _count_turn(self, seat: int, by: int) -> None:
        """Counts a seat that comes or goes by its turn."""
        turn = int(self._turn[seat])
        if turn >= 0:
            self._turns[turn] += by
            self._drawing += by

    def _put_numbers(self, seat: int, output: int) -> None:
        """Puts the batch of numbers that holds the one of ``output`` into its columns."""
        seq, turn = self.sequences[seat], int(self._turn[seat])
        made = numbers(seq.seed, seq.index, output // AHEAD)
        self._numbers[seat, turn:], self._numbers[seat, :turn] = made[: AHEAD - turn], made[AHEAD - turn :]

    def _drawn_numbers(self, count: int) -> Float32:
        """float32 [count]: the number of each draw of this step; none where all take the argmax."""
        if not (self._drawing and count):
            return NO_NUMBERS
        column = self._age % AHEAD
        if self._turns[column]:
            for seat in np.flatnonzero(self._turn[:count] == column).tolist():
                self._put_numbers(seat, self.sequences[seat].outputs - 1)  # the draw of this step is its last output
        return self._numbers[:count, column].copy()

    def check(self, running: list[Sequence]) -> None:
        """Asserts that seats and sequences know each other, and that the arrays say what the sequences say."""
        assert {seq.key for seq in running if seq.seat >= 0} == {seq.key for seq in self.sequences}
        for seat, seq in enumerate(self.sequences):
            assert seq.seat == seat and seq.computed + 1 == len(seq.tokens), "a seat holds another sequence"
            room, draws = len(seq.blocks) * self._size - seq.computed, seq.limit - seq.outputs
            assert self._full_at[seat] - self._age == room and self._spent_at[seat] - self._age == draws
            assert self._last[seat] == seq.blocks[-1]
            assert self._next_full <= self._full_at[seat] and self._next_spent <= self._spent_at[seat]
        assert self._drawing == sum(not seq.request.params.greedy for seq in self.sequences) == sum(self._turns)

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
        self.short = [False] * count
        """Of each lane whether a sequence waits for blocks: who begins to run, in any lane, must not take them."""
        self.now = 0

    def __len__(self) -> int:
        return len(self.batches)

    @property
    def batch(self) -> RunningBatch:
        """The seats of the lane whose step is being built."""
        return self.batches[self.now]

    @property
    def all_seated(self) -> bool:
        """Whether everything that runs in this lane has a seat."""
        return len(self.batch.sequences) == self.sizes[self.now]

    def free(self, busy: Iterable[int]) -> list[int]:
        """The lanes that may have a step now, the one that waited longest first; ``busy``: those of steps in flight."""
        count = len(self.batches)
        if count == 1:
            return [0]
        taken = set(busy)
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

    def begin(self, running: Iterable[Sequence]) -> None:
        """Begins a step of this lane. Sequences that it has too many of go to the lane with the fewest."""
        self.short[self.now] = False
        more = self.sizes[self.now] - min(self.sizes)
        if more >= 2:
            self._deal(running, more)

    def _deal(self, running: Iterable[Sequence], more: int) -> None:
        """``begin`` where this lane has ``more`` sequences than another."""
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
