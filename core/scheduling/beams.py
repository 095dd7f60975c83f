"""The beams of one request as sequences of the scheduler: they draw together, and the best go on.

A beam has no PENDING token: it rests until all beams of its request have their best next tokens. The first child of a
beam goes on in its sequence; another child takes over the sequence of a beam that died, shares the full blocks of its
parent and computes the rest again, at most one block. While a beam waits in the queue, those that rest give up their
blocks and slots (``Scheduler.park``), so that beams cannot keep each other from running; the prefix cache gives the
blocks back.
"""

from __future__ import annotations

from collections.abc import Sequence as Series
from dataclasses import dataclass
from typing import NamedTuple

from trencadis.core.kv.prefix import Chain
from trencadis.core.request import BeamRule
from trencadis.core.scheduling.beam_search import Beam, BeamSearch, BestTokens, FoundBeam
from trencadis.core.scheduling.scheduler import Scheduler
from trencadis.core.scheduling.sequence import Sequence, SequenceStatus
from trencadis.core.step import HeadOutput


class Stem(NamedTuple):
    """What the children of a beam share: its tokens and, where it holds any, its full blocks and their keys."""

    tokens: list[int]
    blocks: list[int] | None
    chain: Chain


@dataclass(frozen=True, slots=True)
class BeamEnd:
    """One answer of a beam search and the sequence under whose number it goes out."""

    lane: Sequence
    found: FoundBeam | None


class BeamGroup:
    """The sequences (lanes) of one request, as many as beams are kept."""

    def __init__(self, rule: BeamRule, lanes: Series[Sequence]) -> None:
        first = lanes[0]
        params = first.request.params
        self.lanes = list(lanes)
        self.search = BeamSearch(
            rule, len(lanes), first.limit, first.stops, params.min_tokens, frozenset(first.banned), params.logprobs or 0
        )
        self._best: dict[int, BestTokens] = {}
        for lane in lanes:
            lane.mates = self.lanes
        for lane in lanes[1:]:
            lane.status = SequenceStatus.DONE  # until the prompt is computed

    def take(self, lane: Sequence, head: HeadOutput, row: int) -> None:
        """Takes what a beam has drawn."""
        assert head.top_id is not None and head.top_logprob is not None
        self._best[lane.index] = BestTokens(head.top_id[row].tolist(), head.top_logprob[row].tolist())
        lane.drawn, lane.requeue = True, False

    def turn(self, scheduler: Scheduler) -> bool:
        """Goes one token further if all beams have drawn; False: the search is over."""
        if len(self._best) < len(self.search.running):
            if any(lane.requeue or lane.status is SequenceStatus.WAITING for lane in self.lanes):
                scheduler.park(self.lanes[0])
            return True
        goes_on = self.search.step(self._best)
        self._best = {}
        if goes_on:
            self._place(scheduler)
        return goes_on

    def ends(self) -> list[BeamEnd]:
        """The answers, best first."""
        found: list[FoundBeam | None] = [*self.search.found()]
        found += [None] * (len(self.lanes) - len(found))
        return [BeamEnd(lane, one) for lane, one in zip(self.lanes, found, strict=True)]

    def _place(self, scheduler: Scheduler) -> None:
        """Gives each running beam a lane: its parent's, or that of a beam that has no children."""
        parents = [beam.before.lane for beam in self.search.running if beam.before is not None]
        stems = {i: self._stem(i, scheduler) for i in parents if parents.count(i) > 1}
        kept: set[int] = set()
        others: list[tuple[Beam, int]] = []
        for beam, parent in zip(self.search.running, parents, strict=True):
            if parent in kept:
                others.append((beam, parent))
                continue
            kept.add(parent)
            beam.lane = parent
            self._go_on(self.lanes[parent], _token(beam), scheduler)
        free = [lane for lane in self.lanes if lane.index not in kept]
        for (beam, parent), lane in zip(others, free, strict=False):
            beam.lane = lane.index
            self._branch(lane, stems[parent], _token(beam), scheduler)
        for lane in free[len(others) :]:
            if lane.status is SequenceStatus.RUNNING:
                scheduler.leave(lane)

    def _stem(self, index: int, scheduler: Scheduler) -> Stem:
        lane, size = self.lanes[index], scheduler.limits.block_size
        running = lane.status is SequenceStatus.RUNNING
        return Stem([*lane.tokens], lane.blocks[: len(lane.tokens) // size] if running else None, lane.chain.branch())

    def _go_on(self, lane: Sequence, token: int, scheduler: Scheduler) -> None:
        lane.tokens.append(token)
        lane.drawn = False
        if lane.status is not SequenceStatus.RUNNING:
            scheduler.enqueue(lane)

    def _branch(self, lane: Sequence, stem: Stem, token: int, scheduler: Scheduler) -> None:
        """Lets a lane that is free compute a child of ``stem``."""
        runs = lane.status is SequenceStatus.RUNNING
        if runs and stem.blocks is None:
            scheduler.leave(lane)
        lane.tokens, lane.chain, lane.drawn = [*stem.tokens, token], stem.chain.branch(), False
        room = scheduler.slots and len(scheduler.running) < scheduler.limits.max_rows
        if stem.blocks is None or not (runs or room):
            scheduler.enqueue(lane)
            return
        scheduler.pool.share(stem.blocks)
        scheduler.pool.drop(lane.blocks)
        lane.blocks = [*stem.blocks]
        lane.computed, lane.published = len(lane.blocks) * scheduler.limits.block_size, len(lane.blocks)
        if not runs:
            lane.slot, lane.fresh_state = scheduler.slots.pop(), True
            scheduler.start_running(lane)


def _token(beam: Beam) -> int:
    assert beam.last is not None
    return beam.last.token
