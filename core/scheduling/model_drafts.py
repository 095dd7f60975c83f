"""Drafts that a model makes: asks the rank for them before a step is built, with no step in flight."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from trencadis.core.kv.block_pool import BlockPool
from trencadis.core.scheduling import sequence
from trencadis.core.spec.draft_source import cut_at
from trencadis.core.step import DraftRow, Sample

Propose = Callable[[Sequence[DraftRow]], list[tuple[int, ...]]]
"""Returns what the draft model expects to follow each row."""

WEIGHT = 0.2
"""Weight of a new duration in the mean."""


class WantedDrafts(NamedTuple):
    """A sequence whose tokens are all known, and how many drafts it should get."""

    seq: sequence.Sequence
    most: int


class ModelDrafts:
    """Asks a draft model for the proposals of sequences.

    Its keys of drafts lie in blocks that are taken for the call alone: the step that verifies them computes the tokens
    anew, for both models.

    Args:
        propose: runs the model; ``vocab``: ids from there on are no drafts; ``block_size``: tokens of a KV block.
    """

    def __init__(self, propose: Propose, vocab: int, block_size: int) -> None:
        self._propose, self._vocab, self._size = propose, vocab, block_size
        self.seconds = 0.0
        """Mean seconds of one launch of the model; 0: it has not run yet."""

    def draft(self, wanted: Sequence[WantedDrafts], pool: BlockPool, reserved: int) -> None:
        """Sets ``proposal`` of the sequences; ``reserved``: blocks that must stay free."""
        rows: list[DraftRow] = []
        asked: list[sequence.Sequence] = []
        taken: list[tuple[sequence.Sequence, int]] = []
        for seq, most in wanted:
            held = len(seq.blocks)
            count = self._hold_blocks(seq, most, pool, reserved)
            if count > 0:
                asked.append(seq)
                rows.append(self._row_of(seq, count))
            taken.append((seq, held))
        if rows:
            begun = time.perf_counter()
            for seq, ids in zip(asked, self._propose(rows), strict=True):
                seq.proposal = cut_at(ids, seq.stops, self._vocab)
            self._learn((time.perf_counter() - begun) / max(len(row.samples) for row in rows))
        for seq, held in taken:
            pool.drop(seq.blocks[held:])
            del seq.blocks[held:]

    def _hold_blocks(self, seq: sequence.Sequence, count: int, pool: BlockPool, reserved: int) -> int:
        """Takes blocks for ``count`` further tokens; returns for how many there are."""
        need = -(-(seq.computed + count) // self._size) - len(seq.blocks)
        have = min(need, max(pool.free - reserved, 0))
        if have > 0:
            seq.blocks += pool.take(have) or []
        return min(count, len(seq.blocks) * self._size - seq.computed)

    def _row_of(self, seq: sequence.Sequence, count: int) -> DraftRow:
        drawn = seq.drafter is not None and seq.drafter.modes is not None and seq.drafter.modes.choose()
        samples = tuple(draw_alone(seq.sample(place)) if drawn else Sample() for place in range(count))
        positions = seq.positions_of(seq.computed, count)
        return DraftRow(seq.key, seq.tokens[-1], seq.computed, tuple(seq.blocks), positions, samples)

    def _learn(self, seconds: float) -> None:
        self.seconds += (WEIGHT if self.seconds else 1.0) * (seconds - self.seconds)


def draw_alone(sample: Sample) -> Sample:
    """Returns the parameters of a draft that is drawn with a token's random number, without penalties and masks."""
    return Sample(
        temperature=sample.temperature,
        top_k=sample.top_k,
        top_p=sample.top_p,
        min_p=sample.min_p,
        uniform=sample.uniform,
        full=True,
    )
