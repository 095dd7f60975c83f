"""Decides which sequences a step drafts, adds the drafts to their rows, and takes back what was not accepted.

Drafts are no tokens of a sequence: they are neither hashed nor published nor counted, and the KV cells of rejected ones
are written again by the next step. A sequence is drafted only while all its tokens are known, and no step is built
while drafts of its micro-batch are in flight: two halves of a batch that wait for each other's results would take twice
as many launches. For drafts that a model makes, the rank is asked before a step is built, with no step in flight.
"""

from __future__ import annotations

import dataclasses
import time
from collections import abc
from collections.abc import Callable, Iterable
from typing import NamedTuple

from trencadis.core.buckets import DRAFTED_ROWS
from trencadis.core.engine_stats import EngineStats
from trencadis.core.kv.block_pool import BlockPool
from trencadis.core.scheduling.persistent_batch import PersistentBatch
from trencadis.core.scheduling.scheduler_limits import SchedulerLimits
from trencadis.core.scheduling.sequence import Sequence, SequenceDrafter, SequenceStatus
from trencadis.core.scheduling.step_builder_and_adapter_slots import InFlightStep, StepBuilder
from trencadis.core.spec.draft_count import (
    RETRY,
    AcceptanceRates,
    DraftModes,
    StepSeconds,
    VerifyShapes,
    choose_count,
    pays_together,
)
from trencadis.core.spec.draft_proposer_interface import DraftProposer, FirstProposal
from trencadis.core.spec.ngram_proposer import NgramProposer
from trencadis.core.spec.predicted_text import PredictionProposer
from trencadis.core.spec.spec_config import DRAFT_MODEL, SpeculationConfig
from trencadis.core.spec.suffix_proposer import AnswerCounts, Owner, SuffixProposer
from trencadis.core.step import DraftRow, Draw, Row, Sample

Propose = Callable[[abc.Sequence[DraftRow]], list[tuple[int, ...]]]
"""Returns what the draft model expects to follow each row."""

WEIGHT = 0.2
"""Weight of a new duration in the mean."""


class WantedDrafts(NamedTuple):
    """A sequence whose tokens are all known, and how many drafts it should get."""

    seq: Sequence
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

    def draft(self, wanted: abc.Sequence[WantedDrafts], pool: BlockPool, reserved: int) -> None:
        """Sets ``proposal`` of the sequences; ``reserved``: blocks that must stay free."""
        rows: list[DraftRow] = []
        asked: list[Sequence] = []
        taken: list[tuple[Sequence, int]] = []
        for seq, most in wanted:
            held = len(seq.blocks)
            count = min(most, take_blocks(seq, most, self._size, pool, reserved))
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

    def _row_of(self, seq: Sequence, count: int) -> DraftRow:
        drawn = seq.drafter is not None and seq.drafter.modes is not None and seq.drafter.modes.choose()
        samples = tuple(draw_alone(seq.sample(place)) if drawn else Sample() for place in range(count))
        positions = seq.positions_of(seq.computed, count)
        return DraftRow(seq.key, seq.tokens[-1], seq.computed, tuple(seq.blocks), positions, samples)

    def _learn(self, seconds: float) -> None:
        self.seconds += (WEIGHT if self.seconds else 1.0) * (seconds - self.seconds)


def take_blocks(seq: Sequence, count: int, size: int, pool: BlockPool, reserved: int) -> int:
    """Takes blocks of ``size`` tokens for ``count`` further tokens, ``reserved`` ones left alone; returns how many
    tokens fit in the sequence's blocks now.
    """
    need = -(-(seq.computed + count) // size) - len(seq.blocks)
    have = min(need, max(pool.free - reserved, 0))
    if have > 0:
        seq.blocks += pool.take(have) or []
    return len(seq.blocks) * size - seq.computed


def cut_at(ids: abc.Sequence[int], ends: frozenset[int], vocab: int) -> tuple[int, ...]:
    """Returns ``ids`` up to the first that ends a text or is outside the vocabulary: nothing after it can count."""
    for at, token in enumerate(ids):
        if token in ends or not 0 <= token < vocab:
            return tuple(ids[:at])
    return tuple(ids)


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


MakeProposer = Callable[[Sequence], DraftProposer]


def can_draft(seq: Sequence, limits: SchedulerLimits) -> bool:
    """Returns True if drafts of ``seq`` may be verified.

    Beams, scores of prompts and of chosen ids read one hidden row at a time, and images that are attended to are listed
    for each token. A text must not grow past the rotary table of its keys.
    """
    request = seq.request
    if seq.mates or seq.prompt_scores is not None or request.params.logprob_token_ids is not None or request.pool:
        return False
    if request.spans and request.spans[0].cross_attention_rows:
        return False
    return not limits.whole


class DraftScheduler:
    """Drafts the sequences of one engine.

    Args:
        config: what is drafted; ``limits``: those of the scheduler.
        totals: the engine's counters, which get those of drafts.
        make_source: makes the source of a sequence; None: the one of ``config.method``.
    """

    def __init__(
        self,
        config: SpeculationConfig,
        limits: SchedulerLimits,
        totals: EngineStats,
        make_source: MakeProposer | None = None,
    ) -> None:
        self.config, self._limits, self._stats = config, limits, totals
        self._make = make_source or self._make_source
        self._counts = AnswerCounts(shortest=config.shortest, longest=config.longest)
        self.seconds = StepSeconds()
        self.model: ModelDrafts | None = None
        """Set if a model drafts."""
        self.shapes: VerifyShapes | None = None
        """Set on devices with planned shapes: there all drafts of a step pay together, or none does."""
        self._skipped = 0
        """Steps without drafts since they did not pay; 0: they did, or a sequence has not been tried yet."""
        self._last = 0.0
        self.proposed = False
        """True if ``prepare`` has proposed drafts for the step that is being built."""
        totals.spec_accepted_at = [0] * config.drafts

    def _make_source(self, seq: Sequence) -> DraftProposer:
        """Returns the source that the configuration names, after the request's own prediction."""
        config, request = self.config, seq.request
        sources: list[DraftProposer] = []
        if request.prediction:
            sources.append(PredictionProposer(request.prediction, seq.prompt))
        if config.method == "suffix":
            owner = Owner(request.tenant, request.salt)
            sources.append(SuffixProposer(self._counts, owner, seq.prompt, config.skipped))
        elif config.method == "ngram":
            sources.append(NgramProposer(config.shortest, config.longest, config.skipped))
        return sources[0] if len(sources) == 1 else FirstProposal(sources)

    # Before a step

    def waits(self, in_flight: Iterable[InFlightStep], running: list[Sequence]) -> bool:
        """Returns True if the next step waits for the steps in flight: they verify drafts, or what they sample can be
        drafted or forced on.
        """
        if any(step.drafted for step in in_flight):
            return True
        if self._limits.stages > 1:
            return False  # micro-batches in flight are not scheduled
        if self._weighs_together and 0 < self._skipped < RETRY:
            self._skipped += 1
            return any(seq.pending and seq.outputs and self.count_forced(seq) for seq in running)
        return any(seq.pending and self._gains_by_waiting(seq, len(running)) for seq in running)

    @property
    def _weighs_together(self) -> bool:
        return self.shapes is not None and not self.config.always

    def _gains_by_waiting(self, seq: Sequence, running: int) -> bool:
        """Returns True if ``seq``, one of ``running``, could be drafted or forced on once its token is known."""
        if not seq.outputs or not can_draft(seq, self._limits):
            return False
        if self.count_forced(seq) or self._propose(seq, running, running, float(running)):
            return True
        return self.model is not None and self._count_of_model(seq, running, running, float(running)) > 0

    def count_forced(self, seq: Sequence) -> int:
        """Returns how many ids the masks of ``seq`` may force after a sampled one.

        Log-probabilities are those of sampled ids, so that a choice that reports them samples each.
        """
        return self.config.forced if seq.masked and not seq.request.params.reports and not seq.mates else 0

    def prepare(self, running: list[Sequence], batch: PersistentBatch, pool: BlockPool) -> None:
        """Proposes drafts for the ``running`` sequences of a micro-batch; those with drafts leave its batch."""
        tokens = len(running)
        expected = float(tokens)
        wanted: list[WantedDrafts] = []
        drafted: list[WantedDrafts] = []
        for seq in running:
            seq.proposal = ()
            if seq.pending or not seq.outputs or seq.due == 0 or not can_draft(seq, self._limits):
                continue
            seq.proposal = self._propose(seq, len(running), tokens, expected)
            count = len(seq.proposal)
            if not count and self.model is not None and seq.due == 1:
                count = self._count_of_model(seq, len(running), tokens, expected)
                if count:
                    wanted.append(WantedDrafts(seq, count))
            if count:
                drafted.append(WantedDrafts(seq, count))
                tokens += count
                if seq.drafter is not None:
                    expected += seq.drafter.rates.gains(count)[-1]
        if drafted and self._weighs_together and not self._pays(drafted, wanted, len(running)):
            for seq, _ in drafted:
                seq.proposal = ()
            drafted, wanted = [], []
        self.proposed = bool(drafted)
        for seq, _ in drafted:
            if seq.batch_row >= 0:
                batch.leave(seq)
        if wanted and self.model is not None:
            self.model.draft(wanted, pool, len(running))

    def _pays(self, drafted: list[WantedDrafts], wanted: list[WantedDrafts], rows: int) -> bool:
        """Returns True if a step of ``rows`` rows should verify the drafts of all ``drafted`` sequences, of which a
        model has yet to make those of ``wanted``. After ``RETRY`` steps without drafts one verifies them as a trial.
        """
        assert self.shapes is not None
        gains = sum(seq.drafter.rates.gains(most)[-1] for seq, most in drafted if seq.drafter is not None)
        plain, verified = self.shapes.count_tokens(rows, 0), self.shapes.count_tokens(rows, len(drafted))
        made = max((most for _, most in wanted), default=0) * (self.model.seconds if self.model is not None else 0.0)
        pays = pays_together(self.seconds, plain, verified, float(rows), gains, made)
        if pays or self._skipped >= RETRY:
            self._skipped = 0
            return True
        self._skipped += 1
        return False

    def _count_of_model(self, seq: Sequence, running: int, tokens: int, expected: float) -> int:
        """Returns how many drafts of the model for ``seq`` pay in a step of ``tokens`` other tokens."""
        assert self.model is not None
        config, most = self.config, self._most(seq, seq.count_known())
        if most <= 0 or (config.rows and running > config.rows):
            return 0
        rates = (seq.drafter or self._make_drafter(seq)).rates
        if config.always or self.shapes is not None:
            return most
        return choose_count(rates, self.seconds, most, tokens, expected, self.model.seconds)

    def _most(self, seq: Sequence, known: int) -> int:
        """Returns how many drafts may follow the ``known`` tokens of ``seq``."""
        if seq.request.adapter is not None and not self._limits.drafts_adapters:
            return 0
        # One draw follows the last draft, and the text fits the rotary table of its keys.
        most = min(self.config.drafts, seq.limit - (known - seq.prompt) - 1)
        if self._limits.long_from and not seq.long:
            most = min(most, self._limits.long_from - len(seq.tokens))
        return most

    def _make_drafter(self, seq: Sequence) -> SequenceDrafter:
        """Sets and returns the drafter of ``seq``."""
        draws = self.config.method == DRAFT_MODEL and not seq.request.params.greedy
        modes = DraftModes() if draws else None
        self._skipped = 0
        seq.drafter = SequenceDrafter(self._make(seq), AcceptanceRates(self.config.drafts), modes)
        return seq.drafter

    def _propose(self, seq: Sequence, running: int, tokens: int, expected: float) -> tuple[int, ...]:
        """Returns the drafts of ``seq`` that pay in a step of ``tokens`` other tokens."""
        config, known = self.config, seq.count_known()
        if config.rows and running > config.rows and not seq.request.prediction:
            return ()
        if not config.method and not seq.request.prediction and self._make == self._make_source:
            return ()
        most = self._most(seq, known)
        if most <= 0:
            return ()
        drafter = seq.drafter or self._make_drafter(seq)
        ids = drafter.source.propose(seq.tokens, known, most).ids
        if ids:
            ids = cut_at(ids, seq.stops, self._limits.vocab)
        if not ids or config.always or self.shapes is not None:
            return ids
        return ids[: choose_count(drafter.rates, self.seconds, len(ids), tokens, expected)]

    # While a step is built

    def extend_rows(self, builder: StepBuilder, pool: BlockPool, persistent: int) -> None:
        """Adds drafts to the rows of the step, as far as tokens, blocks and rows of SAMPLE are left.

        ``persistent``: rows of the persistent batch.
        """
        drawn = persistent + sum(len(row.samples) for row in builder.rows)
        free = max(self._limits.max_rows, DRAFTED_ROWS) - drawn
        rows = {row.key: at for at, row in enumerate(builder.rows)}
        for seq in builder.scheduled:
            if not seq.proposal or seq.key not in rows:
                continue
            row = builder.rows[rows[seq.key]]
            count = min(len(seq.proposal), builder.tokens, free)
            if not row.samples or len(row.samples) > 1 or count <= 0:
                continue
            count = min(count, take_blocks(seq, count, self._limits.block_size, pool, builder.reserved))
            if count > 0:
                seq.drafts = seq.proposal[:count]
                builder.rows[rows[seq.key]] = self._with_drafts(seq, row)
                builder.tokens -= count
                free -= count
                builder.drafted += count
        for seq in builder.scheduled:
            seq.proposal = ()

    def _with_drafts(self, seq: Sequence, row: Row) -> Row:
        """Returns the row with the drafts of ``seq`` after its last token, and a draw for each."""
        count = len(seq.drafts)
        first = row.samples[0]._replace(tokens_after=count)
        draws = [Draw(seq.key, seq.slot, seq.sample(place), count - 1 - place) for place in range(count)]
        return dataclasses.replace(
            row,
            tokens=(*row.tokens, *seq.drafts),
            blocks=tuple(seq.blocks),
            positions=seq.positions_of(row.context, len(row.tokens) + count),
            samples=(first, *draws),
        )

    # After a step

    def learn(self, step: InFlightStep, now: float) -> None:
        """Records the duration of a step without prompts or images."""
        seconds, self._last = now - max(step.began, self._last), now
        if not step.tokens:
            return
        tokens = step.tokens
        if self.shapes is not None:
            verified = sum(bool(seq.drafts) for seq in step.scheduled)
            tokens = self.shapes.count_tokens(len(step.persistent) + len(step.scheduled), verified)
        self.seconds.learn(tokens, seconds)

    def note(self, seq: Sequence, drafted: int, accepted: int) -> None:
        """Counts the drafts of a sequence that a step verified."""
        totals = self._stats
        totals.spec_drafts += 1
        totals.spec_draft_tokens += drafted
        totals.spec_accepted += accepted
        for place in range(accepted):
            totals.spec_accepted_at[place] += 1
        seq.stats.drafted += drafted
        seq.stats.accepted += accepted
        if seq.drafter is not None:
            seq.drafter.rates.learn(drafted, accepted)
            if seq.drafter.modes is not None:
                seq.drafter.modes.learn(drafted, accepted)


def drop_surplus_blocks(seq: Sequence, pool: BlockPool, size: int) -> None:
    """Gives back the blocks of rejected drafts. No launch in flight may write them."""
    need = -(-seq.computed // size)
    if seq.status is SequenceStatus.RUNNING and len(seq.blocks) > need:
        pool.drop(seq.blocks[need:])
        del seq.blocks[need:]
