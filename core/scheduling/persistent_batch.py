"""The persistent batch: sequences that decode one token in every step. numpy only.

A sequence that decodes with unchanging parameters joins the persistent batch: it gets a row of arrays that a step
advances together. Rows are dense, so that ranks read the first ``count`` rows of theirs; the last row moves into a
freed row.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from trencadis.core.kv.block_pool import BlockPool
from trencadis.core.scheduling.scheduler_limits import SchedulerLimits
from trencadis.core.scheduling.sequence import AHEAD, Filled, Sequence, numbers
from trencadis.core.scheduling.step_builder_and_adapter_slots import InFlightStep, StepBuilder
from trencadis.core.step import PENDING, BatchChange, Draw, Float32, Int32, Joining

NEVER = 1 << 62
NO_NUMBERS = np.zeros(0, np.float32)
NO_TOKENS = np.zeros(0, np.int32)
NO_BLOCKS = np.zeros((2, 0), np.int32)


def can_persist(seq: Sequence, draws: list[Draw]) -> bool:
    """Returns True if every later token of ``seq`` uses the same sampling parameters.

    Only then may it stay in the persistent batch.

    Masks, bans until min_tokens, beams, ``logprob_token_ids`` and more than MAX_LOGPROBS top ids change from token to
    token or need the host. Rows with cross-attention list their images in each step.
    """
    spans = seq.request.spans
    if not draws or seq.mates or seq.outputs >= seq.limit or (spans and spans[0].cross_attention_rows):
        return False
    sample = draws[0].sample
    return not (sample.banned or sample.handle or sample.scored or sample.wide)


def _blocks_for(seq: Sequence, limits: SchedulerLimits) -> int:
    """Returns the number of blocks that a step may allocate for ``seq``."""
    end = seq.computed + min(seq.due, limits.max_tokens)
    return max(-(-end // limits.block_size) - len(seq.blocks), 0)


class PersistentBatch:
    """The persistent batch of the scheduler.

    For each row it stores the step at which its blocks are full, and the step of its last output. So a step examines
    the rows only if one of them has reached such a step; otherwise no row changes.

    Args:
        rows: largest number of concurrently running sequences.
        block_size: tokens of a KV block.
        names_tokens: True if a step contains the token of each row, because the first pipeline stage samples none.
    """

    def __init__(self, rows: int, block_size: int, names_tokens: bool = False) -> None:
        self._names_tokens = names_tokens
        self._tokens = NO_TOKENS
        self.sequences: list[Sequence] = []
        self._size = block_size
        self.age = 0
        """Number of steps of the batch."""
        self._last = np.zeros(rows, np.int32)  # the row's last block
        self._full_at = np.zeros(rows, np.int64)  # the age at which the row's blocks are full
        self._spent_at = np.zeros(rows, np.int64)  # the age at which the row has sampled its last output
        self._next_full = NEVER  # minimum over the rows, as is ``next_spent``
        self.next_spent = NEVER
        """The age from which on some row has sampled its last output."""
        self._numbers = np.full((rows, AHEAD), 0.5, np.float32)  # column age % AHEAD is used; 0.5: argmax
        self._phase = np.full(rows, -1, np.int32)  # the column in which the row's numbers begin; -1: argmax
        self._phase_counts = [0] * AHEAD  # rows by their phase
        self._drawing = 0  # number of rows that sample at random
        self._version = 0
        self._left: list[int] = []
        self._joining: list[Sequence] = []
        self._joins: list[Joining] = []

    # Membership

    def join(self, seq: Sequence, row: int) -> None:
        """Adds ``seq``, which is row ``row`` of this step, to the batch, starting with the next step."""
        self._joining.append(seq)
        self._joins.append(Joining(row, 0 if seq.positions is None else seq.request.delta))

    def leave(self, seq: Sequence) -> None:
        """Removes ``seq`` from the batch; the last row moves into the freed one."""
        index, last = seq.batch_row, len(self.sequences) - 1
        assert self.sequences[index] is seq
        self._left.append(index)
        self._count_phase(index, -1)
        moved = self.sequences.pop()
        if index != last:
            self._move(moved, last, index)
        seq.batch_row = -1

    def _move(self, seq: Sequence, old: int, index: int) -> None:
        """Moves ``seq`` from row ``old`` of the batch to another row."""
        self.sequences[index] = seq
        seq.batch_row = index
        for values in (self._last, self._full_at, self._spent_at, self._phase, self._numbers):
            values[index] = values[old]

    def leave_all(self, sequences: list[Sequence]) -> None:
        """Removes each of ``sequences`` from the batch."""
        for seq in sequences:
            self.leave(seq)

    def leave_spent(self) -> None:
        """Removes the sequences that have sampled their last output token; does nothing before ``next_spent``."""
        spent = np.flatnonzero(self._spent_at[: len(self.sequences)] <= self.age)
        self.leave_all([self.sequences[i] for i in spent])
        self.next_spent = int(self._spent_at[: len(self.sequences)].min(initial=NEVER))

    def _list_needing_block(self) -> list[Sequence]:
        """Returns the sequences whose next token needs another block."""
        return [self.sequences[i] for i in self._full_rows().tolist()]

    def _full_rows(self) -> NDArray[np.int64]:
        dates = self._full_at[: len(self.sequences)]
        self._next_full = int(dates.min(initial=NEVER))
        return np.flatnonzero(dates <= self.age)

    def _list_filled(self) -> list[Filled]:
        """Returns the sequences that have filled a block, with that block."""
        rows = self._full_rows()
        return [(self.sequences[i], block) for i, block in zip(rows.tolist(), self._last[rows].tolist(), strict=True)]

    # One step

    def grant_all(self, builder: StepBuilder, others: list[Sequence], limits: SchedulerLimits, pool: BlockPool) -> bool:
        """Reserves one token of the step's budget for each row of the batch, and a block if one is full.

        This happens only if all running sequences, in the batch or in ``others``, can get the tokens and blocks that
        they could use. Then the order is irrelevant, and True is returned; otherwise nothing is reserved, and False is
        returned.
        """
        count, full = len(self.sequences), self._list_needing_block() if self.age >= self._next_full else []
        if count + len(others) > limits.max_tokens or (others and not limits.chunked):
            return False
        need = len(full) + sum(_blocks_for(seq, limits) for seq in others) if full or others else 0
        if need and need > pool.free:
            return False
        builder.tokens -= count
        builder.decoding -= count
        if full:
            builder.grown = full
            for seq, block in zip(full, pool.take(len(full)) or (), strict=True):
                seq.blocks.append(block)
        return True

    def grant_one(self, seq: Sequence, builder: StepBuilder) -> None:
        """Reserves one token for a single row, whose block is already allocated."""
        seq.scheduled = builder.number
        builder.tokens -= 1
        if len(seq.blocks) * self._size - seq.computed == self._size:
            builder.grown.append(seq)

    def advance(self, grown: list[Sequence], number: int) -> tuple[Int32, list[Filled]]:
        """Advances every sequence of the batch by one token, which step ``number`` computes.

        Args:
            grown: the sequences that got a block for it.

        Returns:
            ``BatchChange.grown``, and the sequences that fill a block, with that block.
        """
        count, blocks = len(self.sequences), NO_BLOCKS
        if not count:
            return blocks, []
        grown = [seq for seq in grown if seq.batch_row >= 0]  # the others have left the batch
        if grown:
            blocks = np.array(([seq.batch_row for seq in grown], [seq.blocks[-1] for seq in grown]), np.int32)
            self._full_at[blocks[0]] += self._size
            self._last[blocks[0]] = blocks[1]
        self.age += 1
        if self._names_tokens:
            self._tokens = self._last_tokens()
        token = PENDING
        for seq in self.sequences:
            seq.tokens.append(token)
            seq.computed += 1
            seq.pending += 1
            seq.inflight += 1
            seq.scheduled = number
        return blocks, self._list_filled() if self.age >= self._next_full else []

    def _last_tokens(self) -> Int32:
        """Returns int32 [count]: the token that each row computes now."""
        tokens = np.fromiter((seq.tokens[-1] for seq in self.sequences), np.int32, len(self.sequences))
        assert (tokens >= 0).all(), "a choice in flight is named again"
        return tokens

    def take_change(self, grown: Int32) -> BatchChange | None:
        """Returns the changes of this step, or None; joining sequences get their rows now."""
        count = len(self.sequences)
        if not (count or self._left or self._joins):
            return None
        self._version += 1
        change = BatchChange(
            self._version,
            count,
            tuple(self._left),
            grown,
            self._numbers_of_step(count) if self._drawing and count else NO_NUMBERS,
            tuple(self._joins),
            self._tokens,
        )
        self._tokens = NO_TOKENS
        for seq in self._joining:
            self._add_row(seq)
        self._left, self._joins, self._joining = [], [], []
        return change

    def _add_row(self, seq: Sequence) -> None:
        index = seq.batch_row = len(self.sequences)
        self.sequences.append(seq)
        free_tokens, draws = len(seq.blocks) * self._size - seq.computed, seq.limit - seq.outputs
        assert free_tokens < self._size, "a row begins with a block more than it needs"
        self._last[index] = seq.blocks[-1]
        self._full_at[index], self._spent_at[index] = self.age + free_tokens, self.age + draws
        self._next_full = min(self._next_full, self.age + free_tokens)
        self.next_spent = min(self.next_spent, self.age + draws)
        if seq.request.params.greedy:
            self._phase[index], self._numbers[index] = -1, 0.5
        else:
            self._phase[index] = (self.age + 1 - seq.outputs) % AHEAD  # its next output is sampled at the next age
            self._put_numbers(index, seq.outputs)
        self._count_phase(index, 1)

    def _count_phase(self, index: int, by: int) -> None:
        """Adds ``by`` to the number of rows that share this row's phase."""
        phase = int(self._phase[index])
        if phase >= 0:
            self._phase_counts[phase] += by
            self._drawing += by

    def _put_numbers(self, index: int, output: int) -> None:
        """Writes the random numbers of a row around output ``output`` into the columns of the steps that use them."""
        seq, phase = self.sequences[index], int(self._phase[index])
        made = numbers(seq.seed, seq.index, output // AHEAD)
        self._numbers[index, phase:], self._numbers[index, :phase] = made[: AHEAD - phase], made[AHEAD - phase :]

    def _numbers_of_step(self, count: int) -> Float32:
        """Returns float32 [count]: the random number of each row in this step."""
        column = self.age % AHEAD
        if self._phase_counts[column]:
            for index in np.flatnonzero(self._phase[:count] == column).tolist():
                self._put_numbers(index, self.sequences[index].outputs - 1)  # this step samples its last output
        return self._numbers[:count, column].copy()

    def check(self, running: list[Sequence]) -> None:
        """Asserts that rows and sequences refer to each other, and that the arrays match the sequences."""
        assert {seq.key for seq in running if seq.batch_row >= 0} == {seq.key for seq in self.sequences}
        for index, seq in enumerate(self.sequences):
            assert seq.batch_row == index and seq.computed + 1 == len(seq.tokens), "a row holds another sequence"
            free_tokens, draws = len(seq.blocks) * self._size - seq.computed, seq.limit - seq.outputs
            assert self._full_at[index] - self.age == free_tokens and self._spent_at[index] - self.age == draws
            assert self._last[index] == seq.blocks[-1]
            assert self._next_full <= self._full_at[index] and self.next_spent <= self._spent_at[index]
        assert self._drawing == sum(not seq.request.params.greedy for seq in self.sequences) == sum(self._phase_counts)


class MicroBatches:
    """Running sequences split into micro-batches, so that steps in flight share no sequence; one per pipeline stage.

    One device runs one step after the other and has one micro-batch with all sequences. With several pipeline stages
    there is one for each, and a micro-batch whose step is in flight waits for its results.

    Args:
        count: number of micro-batches.
        rows: largest number of concurrently running sequences; ``block_size``: tokens of a KV block.
    """

    def __init__(self, count: int, rows: int, block_size: int) -> None:
        self.batches = [PersistentBatch(rows, block_size, names_tokens=count > 1) for _ in range(count)]
        self.sizes = [0] * count
        self.lacks_blocks = [False] * count
        """Per micro-batch: True if a sequence waits for blocks. New sequences must not take those blocks."""
        self.current = 0
        """The micro-batch whose step is being built."""
        self.batch = self.batches[0]
        """The persistent batch of ``current``."""

    def __len__(self) -> int:
        return len(self.batches)

    def select(self, micro_batch: int) -> None:
        """Sets the micro-batch whose step is built next."""
        self.current, self.batch = micro_batch, self.batches[micro_batch]

    def members(self, running: Iterable[Sequence]) -> list[Sequence]:
        """Returns those of the ``running`` sequences that are in the current micro-batch."""
        return [seq for seq in running if seq.micro_batch == self.current]

    def list_free(self, in_flight: Iterable[InFlightStep]) -> list[int]:
        """Returns the micro-batches that have no step in flight, longest waiting first."""
        count = len(self.batches)
        taken = {step.micro_batch for step in in_flight}
        return [
            micro_batch
            for micro_batch in ((self.current + 1 + i) % count for i in range(count))
            if micro_batch not in taken
        ]

    def add(self, seq: Sequence, micro_batch: int) -> None:
        """Adds a sequence that starts running to a micro-batch."""
        seq.micro_batch = micro_batch
        self.sizes[micro_batch] += 1

    def remove(self, seq: Sequence) -> None:
        """Removes a sequence that no longer runs from its micro-batch and from the persistent batch."""
        if seq.batch_row >= 0:
            self.batches[seq.micro_batch].leave(seq)
        self.sizes[seq.micro_batch] -= 1

    @property
    def smallest(self) -> int:
        """The micro-batch with the fewest sequences."""
        return self.sizes.index(min(self.sizes))

    def can_admit(self, waiting: int) -> bool:
        """True if the current micro-batch may admit another sequence when ``waiting`` ones are spread evenly."""
        return self.sizes[self.current] * len(self.sizes) < sum(self.sizes) + waiting

    def begin_step(self, running: Iterable[Sequence]) -> None:
        """Begins a step of the current micro-batch; moves surplus sequences to the smallest one."""
        self.lacks_blocks[self.current] = False
        more = self.sizes[self.current] - min(self.sizes)
        if more >= 2:
            self._rebalance(running, more)

    def _rebalance(self, running: Iterable[Sequence], more: int) -> None:
        """Moves half of the ``more`` surplus sequences of this micro-batch to the smallest ones."""
        mine = [seq for seq in self.members(running) if seq.inflight == 0 and not seq.resting]
        for seq in mine[len(mine) - more // 2 :]:
            micro_batch = self.smallest
            self.remove(seq)
            self.add(seq, micro_batch)

    def check(self, running: list[Sequence]) -> None:
        """Asserts that micro-batches, rows and sequences refer to each other."""
        for micro_batch, batch in enumerate(self.batches):
            mine = [seq for seq in running if seq.micro_batch == micro_batch]
            batch.check(mine)
            assert len(mine) == self.sizes[micro_batch], "a micro-batch lost count"
