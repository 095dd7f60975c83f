"""The step that the scheduler is building, a submitted step, and the results of sampling. Torch-free.

Decisions of the scheduler that an operator asks about have one DEBUG line each; with DEBUG off each call is a test.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from trencadis.core.kv.state_pool import PendingSnapshot
from trencadis.core.request import TokenLogprob
from trencadis.core.scheduling.encoder_scheduler import VisionBuilder
from trencadis.core.scheduling.scheduler_limits import SchedulerLimits
from trencadis.core.scheduling.sequence import Filled, Sequence
from trencadis.core.shapes.step_times import ChunkBudget, StepTimes, StepWork
from trencadis.core.step import PENDING, Bias, Draw, HeadOutput, Opening, Reset, Row, TargetScores

if TYPE_CHECKING:
    from trencadis.core.step import StepStats


log = logging.getLogger("trencadis.engine.decisions")


def log_admission(seq: Sequence, blocks_free: int, waiting: int) -> None:
    """A sequence starts to run, the first ``computed`` tokens out of the prefix cache."""
    if log.isEnabledFor(logging.DEBUG):
        name = f"request {seq.request.id} choice {seq.index}"
        log.debug(
            "admission: %s starts with %d tokens; %d blocks are free, %d sequences wait", name, len(seq.tokens),
            blocks_free, waiting,
        )  # fmt: skip
        if seq.computed:
            log.debug("cache hit: %s reuses %d of %d tokens", name, seq.computed, len(seq.tokens))


def log_preemption(seq: Sequence, blocks_free: int) -> None:
    """A running sequence gives up its blocks, and is computed again later."""
    if log.isEnabledFor(logging.DEBUG):
        log.debug(
            "preemption: request %s choice %d gives up %d blocks after %d tokens; %d are free", seq.request.id,
            seq.index, len(seq.blocks), seq.computed, blocks_free,
        )  # fmt: skip


class EvictionCounts:
    """The evictions that were logged so far."""

    def __init__(self) -> None:
        self._blocks = self._images = 0

    def log(self, step: int, blocks: int, images: int) -> None:
        """The caches have evicted so many ``blocks`` and ``images`` in all; logs what ``step`` added."""
        if not log.isEnabledFor(logging.DEBUG) or (blocks, images) == (self._blocks, self._images):
            return
        log.debug(
            "eviction: step %d takes %d KV blocks and %d images out of the caches", step, blocks - self._blocks,
            images - self._images,
        )  # fmt: skip
        self._blocks, self._images = blocks, images


def log_launches(step: int, launches: Iterable[StepStats]) -> None:
    """The launches of a step that has ended: shape, how they ran, real and padded sizes, seconds."""
    if log.isEnabledFor(logging.DEBUG):
        for one in launches:
            log.debug(
                "launch: step %d %s, %s, %d of %d, %.2f ms%s", step, one.bucket, one.state, one.real, one.padded,
                1000 * one.seconds, f", miss: {one.miss}" if one.miss else "",
            )  # fmt: skip


@dataclass(slots=True)
class StepBuilder:
    """The step that ``schedule`` is building."""

    number: int  # number of the step
    tokens: int  # remaining budget
    vision: VisionBuilder
    decoding: int = 0  # running sequences, not reached yet, that need one token
    image_prompts: bool = False  # a prompt with images took tokens
    prompts: bool = False  # tokens of prompts are computed
    drafted: int = 0  # drafts that rows verify
    reserved: int = 0  # blocks reserved for sequences that wait for pending frees
    preempted: bool = False
    chunk_budget: ChunkBudget | None = None  # limit for prompts, if decoding rows have a latency bound
    rows: list[Row] = field(default_factory=list)
    scheduled: list[Sequence] = field(default_factory=list)
    grown: list[Sequence] = field(default_factory=list)  # rows of the persistent batch that got a block
    resets: list[Reset] = field(default_factory=list)
    openings: list[Opening] = field(default_factory=list)
    snapshots: list[PendingSnapshot] = field(default_factory=list)  # states that the step leaves behind

    def bound_prompts(self, times: StepTimes) -> None:
        """Limits prompts in this step so that decoding rows keep the latency bound of ``times``."""
        self.chunk_budget = times.chunk_budget(self.decoding, sum(w.span.slots for w in self.vision.chosen.values()))

    @property
    def open(self) -> bool:
        """True if another sequence could start in this step."""
        return self.tokens > 0 and (self.chunk_budget is None or self.chunk_budget.open)

    def most(self, seq: Sequence, limits: SchedulerLimits) -> int:
        """Returns how many tokens of ``seq`` could run: those due, within the budget and the latency bound of
        decoding rows.
        """
        # Prompts leave one token for each decoding sequence, so that none waits for a second VISION launch.
        left = self.tokens if seq.due == 1 or not limits.chunked else max(self.tokens - self.decoding, 1)
        count = min(seq.due, left, limits.chunk or left)
        if not limits.chunked and seq.computed < seq.prompt and count < seq.due:
            return 0
        return (
            count
            if self.chunk_budget is None or seq.due == 1
            else self._within(self.chunk_budget, seq, count, limits.bidirectional_images)
        )

    def _within(self, chunk_budget: ChunkBudget, seq: Sequence, count: int, joined: bool) -> int:
        """Returns how many of ``count`` tokens the latency bound of decoding rows allows."""
        start = seq.computed
        whole = (s.end - start for s in seq.request.spans if joined and s.end > start)  # images are not split
        return chunk_budget.fits(start, count, next(whole, 0))

    def work(self, chunk_budget: ChunkBudget, now: float) -> StepWork:
        """Returns the work of the step, for learning its duration."""
        return StepWork(
            chunk_budget.rows,
            chunk_budget.tokens,
            chunk_budget.work,
            sum(image.slots for image in self.vision.images),
            now,
        )

    def reset(self, seq: Sequence, biased: set[int]) -> None:
        """Adds a RESET if ``seq`` uses sampler state, or if the slot's last owner left a bias, which any full SAMPLE
        adds.

        ``biased``: slots whose sampler state holds a bias, kept up to date.
        """
        if seq.request.params.needs_state or seq.slot in biased:
            self._reset(seq, biased)
        seq.fresh_state = False

    def _reset(self, seq: Sequence, biased: set[int]) -> None:
        bias = tuple(Bias(*pair) for pair in (seq.request.params.logit_bias or {}).items())
        output = tuple(seq.tokens[seq.prompt : seq.count_known()])
        self.resets.append(Reset(seq.slot, tuple(seq.request.tokens), output, bias))
        (biased.add if bias else biased.discard)(seq.slot)

    def draw(self, seq: Sequence) -> Draw:
        """Adds sampling of the next token of ``seq``, PENDING until its step is fetched.

        Beams are chosen by their group.
        """
        if seq.masked and not seq.opened:
            self.openings.append(seq.opening())
            seq.opened = True
        draw = Draw(seq.key, seq.slot, seq.sample())
        if not seq.mates:
            seq.tokens.append(PENDING)
            seq.pending += 1
        return draw

    def starves(self, sequences: Iterable[Sequence]) -> bool:
        """Returns True if prompts with images left no tokens for some of ``sequences`` without images.

        This is temporary: no new images are admitted meanwhile.
        """
        if self.open or not self.image_prompts:
            return False
        return any(not seq.request.spans for seq in sequences if seq.scheduled != self.number)


@dataclass(slots=True)
class InFlightStep:
    """A submitted Step: the sequences that it computes or samples, and those whose images it encodes.

    ``persistent``: those of the persistent batch, in the order of their samples; ``filled``: those whose last block it
    fills. ``micro_batch``: the micro-batch of its sequences. ``work``: its work, if its duration is learned.
    ``drafted``: number of drafts that it verifies; ``tokens``: all its tokens, if none is of a prompt, else 0.
    ``snapshots``: snapshots of recurrent state, which exist once it has completed.
    """

    number: int
    persistent: list[Sequence]
    filled: list[Filled]
    scheduled: list[Sequence]
    encoded: list[Sequence]
    micro_batch: int = 0
    work: StepWork | None = None
    drafted: int = 0
    tokens: int = 0
    began: float = 0.0
    snapshots: list[PendingSnapshot] = field(default_factory=list)


def logprob_of(head: HeadOutput, row: int, token: int, wanted: int) -> TokenLogprob:
    """Returns the log-probability of a row's ``token``, with the ``wanted`` top ids."""
    assert head.logprob is not None and head.rank is not None
    assert head.top_id is not None and head.top_logprob is not None
    return TokenLogprob(
        token,
        float(head.logprob[row]),
        int(head.rank[row]),
        head.top_id[row, :wanted].tolist(),
        head.top_logprob[row, :wanted].tolist(),
    )


def report_token(seq: Sequence, head: HeadOutput, row: int, token: int, scored: TargetScores | None) -> TokenLogprob:
    """Returns the log-probability of a token with the top ids, or with those of ``logprob_token_ids``.

    ``scored`` holds the latter, or more top ids than ``head``.
    """
    wanted = seq.request.params.logprobs or 0
    if scored is None:
        return logprob_of(head, row, token, wanted)
    item, others = logprob_of(head, row, token, 0), scored.head
    if seq.request.params.logprob_token_ids is None:
        top = logprob_of(others, 0, token, wanted)
        item.top_ids, item.top_logprobs = top.top_ids, top.top_logprobs
        return item
    assert others.logprob is not None and others.rank is not None
    item.top_ids, item.top_logprobs = others.token.tolist(), others.logprob.tolist()
    item.top_ranks = others.rank.tolist()
    return item
