"""A rank's copy of the persistent batch; each Step sends only what has changed. numpy only.

A row is filled from the ``Row`` that described it last. From then on it advances by one token in each Step: the token
to compute is in its sampler slot, its context grows by one, its parameters stay the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from trencadis.core.launch_inputs import HeadInputs, StepInputs
from trencadis.core.request import GREEDY_BELOW, NO_LOGPROB
from trencadis.core.step import PENDING, BatchChange, Draw, Int32, Joining, Row, Sample, StateSlots, Step, UInt8

FLOATS = ("temperature", "top_p", "min_p", "presence", "frequency", "repetition", "uniform")
UNIFORM = FLOATS.index("uniform")
NUMBERS = ("slot", "context", "delta", "adapter", "held", "last", "top_k", "full", "best", "logprobs", "state")
SLOT, CONTEXT, DELTA, ADAPTER, HELD, LAST, TOP_K, FULL, BEST, LOGPROBS, STATE = range(len(NUMBERS))


NO_TOKENS = np.zeros(0, np.int32)

InputsType = TypeVar("InputsType", bound=StepInputs)


class PersistentTextInputs(StepInputs):
    """Text inputs of the persistent rows; the same object is returned until a row joins or leaves.

    Between such changes only ``positions``, ``context``, ``blocks`` and ``last`` change, so that cached tensors of the
    other fields stay valid.
    """

    __slots__ = ()


class PersistentHeadInputs(HeadInputs):
    """Sampling inputs of the persistent rows.

    The same object is returned until a row joins or leaves; meanwhile only ``uniform`` changes.
    """

    __slots__ = ()


class HeadNeeds(NamedTuple):
    """The outputs of SAMPLE that the rows need.

    Args:
        full: some row needs more than the argmax; ``every``: all rows do.
        best: the ``full`` rows need only the argmax over the ids that their masks allow.
        logprobs: some row requests log-probabilities.
        cold: the ``full`` rows have temperature 0.
    """

    full: bool = False
    best: bool = True
    logprobs: bool = False
    every: bool = True
    cold: bool = True

    def add(self, samples: Sequence[Sample]) -> HeadNeeds:
        """Returns what these rows and further ones with ``samples`` need."""
        full = [sample for sample in samples if sample.full]
        return HeadNeeds(
            self.full or bool(full),
            self.best and all(sample.best for sample in full),
            self.logprobs or any(sample.logprobs >= 0 for sample in samples),
            self.every and len(full) == len(samples),
            self.cold and all(sample.temperature < GREEDY_BELOW for sample in full),
        )


class BatchOutOfStep(RuntimeError):
    """Raised if a rank missed a Step, so that its copy of the batch is invalid."""


class RankInputBatch:
    """Rows [0, count) of the persistent batch on one rank; ``BatchChange`` describes each update."""

    def __init__(self) -> None:
        self.count = 0
        self.version = 0
        self._keys: list[int] = []
        self._samples: list[Sample] = []
        self._numbers = np.zeros((len(NUMBERS), 1), np.int32)
        self._floats = np.zeros((len(FLOATS), 1), np.float32)
        self._table = np.zeros((1, 1), np.int32)
        """Rows from ``count`` on are ZERO blocks, except for rows borrowed by the last launch."""
        self._width = 1
        """At least the number of blocks of the longest row; it is not reduced when that row leaves."""
        self._borrowed_rows = self._borrowed_width = 0  # rows lent to the step's own rows, and how many blocks of each
        self._tokens = NO_TOKENS  # int32 [count] if the host knows them
        self._text: PersistentTextInputs | None = None
        self._head: PersistentHeadInputs | None = None
        self._needs: HeadNeeds | None = None
        self.has_adapters = False
        """True if a row has an adapter."""

    @property
    def keys(self) -> tuple[int, ...]:
        """The scheduler's keys of the rows, in order."""
        return tuple(self._keys)

    # Changes by a Step

    def apply(self, change: BatchChange | None) -> None:
        """Applies a Step's change before its launches: removes rows, appends blocks, stores the random numbers.

        Raises:
            BatchOutOfStep: a change is missing.
        """
        if self._borrowed_rows:
            self._release_borrowed_rows()
        if change is None:
            return
        if change.version != self.version + 1:
            raise BatchOutOfStep(f"change {change.version} of the batch came after change {self.version}")
        self.version = change.version
        for index in change.left:
            self._leave(index)
        if change.count != self.count:
            raise BatchOutOfStep(f"the batch has {self.count} rows, the engine counts {change.count}")
        if change.grown.size:
            self._grow(*change.grown)
        self._tokens = change.tokens
        if len(change.uniform):
            self._floats[UNIFORM, : self.count] = change.uniform

    def _grow(self, rows: Int32, blocks: Int32) -> None:
        """Appends one block to each of ``rows``."""
        held = self._numbers[HELD]
        self._width = max(self._width, int(held[rows].max()) + 1)
        self._reserve(0, self._width)
        held = self._numbers[HELD]
        self._table[rows, held[rows]] = blocks
        held[rows] += 1
        self._numbers[LAST, rows] = blocks

    def advance(self, rows: Sequence[Row], joins: Sequence[Joining]) -> None:
        """Advances every row by one token after a Step's launches, then adds the rows of ``joins``."""
        if self._borrowed_rows:
            self._release_borrowed_rows()
        self._numbers[CONTEXT, : self.count] += 1
        for join in joins:
            self._join(rows[join.row], join.delta)

    def _invalidate_inputs(self) -> None:
        """Discards cached inputs because the rows of the batch change."""
        self._text = self._head = self._needs = None

    def _leave(self, index: int) -> None:
        self._invalidate_inputs()
        last, held = self.count - 1, self._numbers[HELD]
        self._table[index, : held[index]] = 0  # the table is zero beyond the blocks that a row holds
        if index != last:
            self._table[index, : held[last]] = self._table[last, : held[last]]
            self._table[last, : held[last]] = 0
            self._move(last, index)
        self._keys.pop()
        self._samples.pop()
        self.count = last
        self.has_adapters = self.has_adapters and bool(self._numbers[ADAPTER, :last].any())

    def _move(self, old: int, index: int) -> None:
        """Moves row ``old`` to ``index``, whose block table has already been written."""
        self._numbers[:, index] = self._numbers[:, old]
        self._floats[:, index] = self._floats[:, old]
        self._keys[index], self._samples[index] = self._keys[old], self._samples[old]

    def _join(self, row: Row, delta: int) -> None:
        self._invalidate_inputs()
        index, draw = self.count, row.samples[0]
        self.has_adapters |= row.adapter > 0
        self._width = max(self._width, len(row.blocks))
        self._reserve(index + 1, len(row.blocks))
        sample, context = draw.sample, row.context + len(row.tokens)
        numbers = (row.slot, context, delta, row.adapter, len(row.blocks), row.blocks[-1])
        state = 0 if row.state is None else row.state.slot
        self._numbers[:, index] = (*numbers, sample.top_k, sample.full, sample.best, sample.logprobs >= 0, state)
        self._floats[:, index] = [getattr(sample, name) for name in FLOATS]
        self._table[index, : len(row.blocks)] = row.blocks
        self._keys.append(row.key)
        self._samples.append(sample)
        self.count += 1

    def _reserve(self, rows: int, width: int) -> None:
        """Ensures room for ``rows`` rows and one more of ZERO blocks, each of ``width`` blocks."""
        have = self._table.shape
        if rows + 1 > have[0] or width > have[1]:
            self._grow_table(rows, width)

    def _grow_table(self, rows: int, width: int) -> None:
        """Allocates more than needed, so that reallocation is rare."""
        self._invalidate_inputs()
        have = self._table.shape
        rows = 2 * rows + 1 if rows + 1 > have[0] else have[0]
        table = np.zeros((rows, width + width // 8 + 64 if width > have[1] else have[1]), np.int32)
        table[: self._table.shape[0], : self._table.shape[1]] = self._table
        self._table = table
        self._numbers = _wider(self._numbers, rows)
        self._floats = _wider(self._floats, rows)

    # Inputs of launches

    def inputs(self) -> StepInputs:
        """Returns the inputs of the persistent rows, one token each; hidden rows count from 1.

        ``blocks`` is a view that changes with the next Step.
        """
        if len(self._tokens):
            return self._make_inputs(StepInputs)
        if self._text is None:
            self._text = self._make_inputs(PersistentTextInputs)
            return self._text
        text, numbers = self._text, self._numbers
        text.positions[:] = numbers[CONTEXT, : self.count] + numbers[DELTA, : self.count]
        if text.blocks.shape[1] < self._width:
            text.blocks = self._table[: self.count, : self._width]
        return text

    def _make_inputs(self, form: type[InputsType]) -> InputsType:
        """Builds the result of ``inputs``."""
        count = self.count
        numbers = self._numbers[:, :count]
        index = np.arange(count + 1, dtype=np.int32)
        nothing = np.zeros(count, np.int32)
        known = len(self._tokens) > 0
        positions = np.empty((3, count), np.int32)
        positions[:] = numbers[CONTEXT] + numbers[DELTA]
        self._width = int(numbers[HELD].max(initial=1))
        return form(
            tokens=self._tokens.astype(np.int32, copy=False) if known else nothing,
            from_slot=nothing if known else numbers[SLOT],
            positions=positions,
            image_row=nothing,
            out_row=index[1:],
            row_start=index,
            context=numbers[CONTEXT],
            blocks=self._table[:count, : self._width],
            slot=numbers[SLOT],
            adapter=numbers[ADAPTER],
            table=self._table,
            last=numbers[LAST],  # a row's last block is the one that its next token is written to
            states=numbers[[STATE, STATE]] if count and numbers[STATE, 0] else None,
        )

    def inputs_with_borrowed_rows(self, step_rows: StepInputs) -> StepInputs:
        """Returns the inputs of the persistent rows followed by those of the Step's own rows, whose block tables
        borrow rows of this table.
        """
        count, more = self.count, len(step_rows.context)
        width = step_rows.blocks.shape[1]
        self._reserve(count + more, width)
        self._table[count : count + more, :width] = step_rows.blocks
        self._borrowed_rows, self._borrowed_width = more, width
        own = self.inputs()
        return StepInputs(
            tokens=np.concatenate([own.tokens, step_rows.tokens]),
            from_slot=np.concatenate([own.from_slot, step_rows.from_slot]),
            positions=np.concatenate([own.positions, step_rows.positions], axis=1),
            image_row=np.concatenate([own.image_row, step_rows.image_row]),
            out_row=np.concatenate([own.out_row, step_rows.out_row + count]),
            row_start=np.concatenate([own.row_start, step_rows.row_start[1:] + count], dtype=np.int32),
            context=np.concatenate([own.context, step_rows.context]),
            blocks=self._table[: count + more, : max(width, own.blocks.shape[1])],
            slot=np.concatenate([own.slot, step_rows.slot]),
            adapter=np.concatenate([own.adapter, step_rows.adapter]),
            table=self._table,
            upto=None if step_rows.upto is None else np.concatenate([own.context, step_rows.upto]),
            cross_attention=None if step_rows.cross_attention is None else step_rows.cross_attention.shifted(count),
            states=None if step_rows.states is None else np.concatenate([_states(own), step_rows.states], axis=1),
        )

    def _release_borrowed_rows(self) -> None:
        """Clears the block-table rows that the last launch borrowed."""
        self._table[self.count : self.count + self._borrowed_rows, : self._borrowed_width] = 0
        self._borrowed_rows = 0

    def head(self, everything: UInt8) -> HeadInputs:
        """Returns the sampling inputs of the rows, as views; hidden rows count from 1.

        ``everything``: the mask [1, n] that allows all ids.
        """
        if self._head is None or self._head.masks is not everything:
            self._head = self._make_head(everything)
        return self._head

    def _make_head(self, everything: UInt8) -> PersistentHeadInputs:
        """Builds the result of ``head``."""
        count = self.count
        floats, numbers = self._floats[:, :count], self._numbers[:, :count]
        return PersistentHeadInputs(
            hidden_row=np.arange(1, count + 1, dtype=np.int32),
            slot=numbers[SLOT],
            top_k=numbers[TOP_K],
            target=np.where(numbers[LOGPROBS] > 0, np.int32(-1), np.int32(NO_LOGPROB)),
            mask_row=np.zeros(count, np.int32),
            masks=everything,
            place=None,
            ahead=None,
            **dict(zip(FLOATS, floats, strict=True)),
        )

    @property
    def rows_needing_full(self) -> list[bool]:
        """For each row, True if it needs more than the argmax."""
        wanting: list[bool] = (self._numbers[FULL, : self.count] > 0).tolist()
        return wanting

    def head_needs(self) -> HeadNeeds:
        """Returns the outputs of SAMPLE that the rows need."""
        if self._needs is None:
            flags = self._numbers[:, : self.count]
            full, best = flags[FULL], bool((flags[BEST] >= flags[FULL]).all())
            warm = self._floats[FLOATS.index("temperature"), : self.count] >= GREEDY_BELOW
            cold = not bool((warm & (full > 0)).any())
            self._needs = HeadNeeds(bool(full.any()), best, bool(flags[LOGPROBS].any()), bool(full.all()), cold)
        return self._needs

    # Conversion to rows

    def with_all_rows(self, step: Step) -> Step:
        """Returns ``step`` with the persistent rows as plain ``Row`` objects in front of its own rows."""
        return dataclasses.replace(step, rows=(*self.rows(), *step.rows), batch=None) if step.persistent_count else step

    def rows(self) -> tuple[Row, ...]:
        """Returns each persistent row as a ``Row`` of this Step, for launches that are split by rows."""
        slots, context, delta, adapter, blocks_held = self._numbers[:5, : self.count].tolist()
        uniform = self._floats[UNIFORM, : self.count].tolist()
        made = []
        for i, key in enumerate(self._keys):
            position = np.full((3, 1), context[i] + delta[i], np.int32)
            draw = Draw(key, slots[i], dataclasses.replace(self._samples[i], uniform=uniform[i]))
            blocks = tuple(self._table[i, : blocks_held[i]].tolist())
            token = int(self._tokens[i]) if len(self._tokens) else PENDING
            held = int(self._numbers[STATE, i])
            made.append(
                Row(
                    key, slots[i], context[i], (token,), blocks, position, (), (draw,), adapter=adapter[i],
                    state=StateSlots(held, held) if held else None,
                )
            )  # fmt: skip
        return tuple(made)


def _states(own: StepInputs) -> Int32:
    """Returns ``StepInputs.states`` of the persistent rows, possibly none."""
    return own.states if own.states is not None else np.zeros((2, 0), np.int32)


def _wider(values: NDArray[Any], columns: int) -> NDArray[Any]:
    """Returns a copy with more columns, filled with zeros."""
    out: NDArray[Any] = np.zeros((len(values), columns), values.dtype)
    out[:, : values.shape[1]] = values
    return out
