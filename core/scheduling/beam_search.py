"""Beam search over one request: which continuations are kept and which have ended, and beams as sequences.

It gives the sequences of transformers' ``generate(num_beams=w, do_sample=False)``: a step keeps the ``w`` best
continuations that have not ended, by their sum of log-probabilities; a continuation that ends counts if it is among the
``w`` best of its step, by that sum over length ** length_penalty. Sum and length cover only the output.

In the scheduler a beam has no PENDING token: it rests until all beams of its request have their top next tokens. The
first child of a beam continues in its sequence; another child takes over the sequence of a dropped beam, shares the
full blocks of its parent and recomputes the rest, at most one block. While a beam waits in the queue, resting ones give
up their blocks and slots (``Scheduler.park``), so that beams cannot block each other; they get the blocks back from the
prefix cache.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Collection, Mapping
from collections.abc import Sequence as Series
from dataclasses import dataclass
from typing import NamedTuple

from trencadis.core.kv.block_pool import BlockHashChain
from trencadis.core.request import BeamRule, TokenLogprob
from trencadis.core.scheduling.scheduler import Scheduler
from trencadis.core.scheduling.sequence import Sequence, SequenceStatus
from trencadis.core.step_output import HeadOutput


class BestTokens(NamedTuple):
    """The most likely next ids of one beam, best first, and their log-probabilities (natural log, raw logits)."""

    ids: abc.Sequence[int]
    logprobs: abc.Sequence[float]


@dataclass(slots=True, eq=False)
class Beam:
    """One output sequence, as a linked list of steps.

    Args:
        score: sum of the log-probabilities of its tokens.
        index: number of the sequence that computes it, once assigned.
    """

    score: float = 0.0
    last: TokenLogprob | None = None
    parent: Beam | None = None
    index: int = 0

    def items(self) -> list[TokenLogprob]:
        """Returns its tokens, first to last."""
        found: list[TokenLogprob] = []
        beam: Beam | None = self
        while beam is not None and beam.last is not None:
            found.append(beam.last)
            beam = beam.parent
        return found[::-1]


class FoundBeam(NamedTuple):
    """A beam that has ended: its ranking score, and the token that ended it (None: its length)."""

    score: float
    beam: Beam
    stop: int | None


class Continuation(NamedTuple):
    """A beam with one more token, which has ``rank`` among the beam's next tokens (from 0)."""

    score: float
    beam: Beam
    rank: int
    token: int


class BeamSearch:
    """The beams of one request.

    Args:
        width: number of beams.
        limit: largest number of output tokens.
        stops: ids that end a beam.
        least: number of tokens before which ``banned`` ids are excluded.
        top: number of top ids reported with each token.
    """

    def __init__(
        self,
        rule: BeamRule,
        width: int,
        limit: int,
        stops: Collection[int],
        least: int = 0,
        banned: Collection[int] = (),
        top: int = 0,
    ) -> None:
        self._rule, self._width, self._limit = rule, width, limit
        self._stops, self._least, self._banned, self._top = stops, least, banned, top
        self._length = 0
        self._found: list[FoundBeam] = []
        self.running = [Beam()]

    def step(self, best: Mapping[int, BestTokens]) -> bool:
        """Takes the top next tokens of each running beam, by its sequence index.

        Returns False if the search is over.
        """
        banned = self._banned if self._length < self._least else ()
        pool = [
            Continuation(beam.score + logprob, beam, rank, token)
            for beam in self.running
            for rank, (token, logprob) in enumerate(zip(*best[beam.index], strict=True))
            if token not in banned
        ]
        pool.sort(key=lambda c: -c.score)
        self._length += 1
        full = self._length >= self._limit
        ended = [c for c in pool[: self._width] if full or c.token in self._stops]
        scale = self._length**self._rule.length_penalty
        for c in ended:
            stop = c.token if c.token in self._stops else None
            self._found.append(FoundBeam(c.score / scale, self._extend_beam(c, best), stop))
        self._found = sorted(self._found, key=lambda f: -f.score)[: self._width]
        alive = [] if full else [c for c in pool if c.token not in self._stops][: self._width]
        self.running = [self._extend_beam(c, best) for c in alive]
        return self._can_improve()

    def best_beams(self) -> list[FoundBeam]:
        """Returns the outputs, best first; ``width`` of them once the search is over."""
        return list(self._found)

    def _can_improve(self) -> bool:
        """Returns True if a running beam can still become better than the worst one that has ended."""
        if not self.running:
            return False
        if len(self._found) < self._width:
            return True
        early, penalty = self._rule.early_stopping, self._rule.length_penalty
        if early:
            return False
        reach = self._limit if early is None and penalty > 0 else self._length
        return bool(self.running[0].score / reach**penalty > self._found[-1].score)

    def _extend_beam(self, c: Continuation, best: Mapping[int, BestTokens]) -> Beam:
        ids, logprobs = best[c.beam.index]
        item = TokenLogprob(
            c.token, logprobs[c.rank], c.rank + 1, list(ids[: self._top]), list(logprobs[: self._top])
        )  # fmt: skip
        return Beam(c.score, item, c.beam)


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
