"""The beams of one request as sequences of the scheduler: they sample together, and the best continue.

A beam has no PENDING token: it rests until all beams of its request have their top next tokens. The first child of a
beam continues in its sequence; another child takes over the sequence of a dropped beam, shares the full blocks of its
parent and recomputes the rest, at most one block. While a beam waits in the queue, resting ones give up their blocks
and slots (``Scheduler.park``), so that beams cannot block each other; they get the blocks back from the prefix cache.
"""

from __future__ import annotations

from collections.abc import Sequence as Series
from dataclasses import dataclass
from typing import NamedTuple

from trencadis.core.kv.block_hash import BlockHashChain
from trencadis.core.request import BeamRule
from trencadis.core.scheduling.beam_search import Beam, BeamSearch, BestTokens, FoundBeam
from trencadis.core.scheduling.scheduler import Scheduler
from trencadis.core.scheduling.sequence import Sequence, SequenceStatus
from trencadis.core.step import HeadOutput


class BeamPrefix(NamedTuple):
    """The state that all children of one beam share: tokens, full blocks and block hashes."""

    tokens: list[int]
    blocks: list[int] | None
    block_hashes: BlockHashChain
    long: bool


@dataclass(frozen=True, slots=True)
class BeamEnd:
    """One answer of a beam search, and the sequence under whose number it is returned."""

    sequence: Sequence
    found: FoundBeam | None


class BeamGroup:
    """The sequences of one request, one per beam."""

    def __init__(self, rule: BeamRule, sequences: Series[Sequence]) -> None:
        first = sequences[0]
        params = first.request.params
        self.sequences = list(sequences)
        top, banned = params.logprobs or 0, frozenset(first.banned)
        self.search = BeamSearch(rule, len(sequences), first.limit, first.stops, params.min_tokens, banned, top)
        self._best: dict[int, BestTokens] = {}
        for seq in sequences:
            seq.mates = self.sequences
        for seq in sequences[1:]:
            seq.status = SequenceStatus.DONE  # until the prompt is computed

    def take(self, seq: Sequence, head: HeadOutput, row: int) -> None:
        """Records the top tokens that a beam has sampled."""
        assert head.top_id is not None and head.top_logprob is not None
        self._best[seq.index] = BestTokens(head.top_id[row].tolist(), head.top_logprob[row].tolist())
        seq.drawn, seq.requeue = True, False

    def advance(self, scheduler: Scheduler) -> bool:
        """Advances the search by one token once all beams have drawn; returns False when the search is over."""
        if len(self._best) < len(self.search.running):
            if any(seq.requeue or seq.status is SequenceStatus.WAITING for seq in self.sequences):
                scheduler.park(self.sequences[0])
            return True
        goes_on = self.search.step(self._best)
        self._best = {}
        if goes_on:
            self._assign_sequences(scheduler)
        return goes_on

    def ends(self) -> list[BeamEnd]:
        """Returns the answers, best first."""
        found: list[FoundBeam | None] = [*self.search.best_beams()]
        found += [None] * (len(self.sequences) - len(found))
        return [BeamEnd(seq, one) for seq, one in zip(self.sequences, found, strict=True)]

    def _assign_sequences(self, scheduler: Scheduler) -> None:
        """Assigns a sequence to each surviving beam: its parent's, or that of a beam without children."""
        parents = [beam.parent.index for beam in self.search.running if beam.parent is not None]
        prefixes = {i: self._make_prefix(i, scheduler) for i in parents if parents.count(i) > 1}
        kept: set[int] = set()
        others: list[tuple[Beam, int]] = []
        for beam, parent in zip(self.search.running, parents, strict=True):
            if parent in kept:
                others.append((beam, parent))
                continue
            kept.add(parent)
            beam.index = parent
            self._go_on(self.sequences[parent], _token(beam), scheduler)
        free = [seq for seq in self.sequences if seq.index not in kept]
        for (beam, parent), seq in zip(others, free, strict=False):
            beam.index = seq.index
            self._branch(seq, prefixes[parent], _token(beam), scheduler)
        for seq in free[len(others) :]:
            if seq.status is SequenceStatus.RUNNING:
                scheduler.leave(seq)

    def _make_prefix(self, index: int, scheduler: Scheduler) -> BeamPrefix:
        seq, size = self.sequences[index], scheduler.limits.block_size
        # A recurrent state cannot be shared in the middle of a block: children begin with a snapshot of the prompt.
        running = seq.status is SequenceStatus.RUNNING and scheduler.states is None
        return BeamPrefix(
            [*seq.tokens],
            seq.blocks[: len(seq.tokens) // size] if running else None,
            seq.block_hashes.branch(),
            seq.long,
        )

    def _go_on(self, seq: Sequence, token: int, scheduler: Scheduler) -> None:
        seq.tokens.append(token)
        seq.drawn = False
        if seq.status is not SequenceStatus.RUNNING:
            scheduler.enqueue(seq)

    def _branch(self, seq: Sequence, prefix: BeamPrefix, token: int, scheduler: Scheduler) -> None:
        """Assigns a child of ``prefix`` to a free sequence."""
        runs = seq.status is SequenceStatus.RUNNING
        if runs and prefix.blocks is None:
            scheduler.leave(seq)
        seq.tokens, seq.block_hashes, seq.drawn = [*prefix.tokens, token], prefix.block_hashes.branch(), False
        seq.long = prefix.long
        can_run = scheduler.slots and len(scheduler.running) < scheduler.limits.max_rows
        if prefix.blocks is None or not (runs or can_run):
            scheduler.enqueue(seq)
            return
        scheduler.pool.share(prefix.blocks)
        scheduler.pool.drop(seq.blocks)
        seq.blocks = [*prefix.blocks]
        seq.computed, seq.published = len(seq.blocks) * scheduler.limits.block_size, len(seq.blocks)
        if not runs:
            seq.slot, seq.fresh_state = scheduler.slots.pop(), True
            scheduler.start_running(seq)


def _token(beam: Beam) -> int:
    assert beam.last is not None
    return beam.last.token
