"""The scheduler's state of one sequence (a choice of a request): known tokens, computed tokens, blocks and slot.

Random numbers for sampling, one per token, are generated on the host by a counter-based generator, Philox 4x64 (Salmon
et al., SC'11), with key = (seed, choice) and counter = index of the output token. There is no state that a preemption
could lose, and every rank and device gets the same number. Torch-free.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from trencadis.core.buckets import Bucket, Stage
from trencadis.core.checkpoint.pooling_description import ALL, FIRST, LAST, MEAN
from trencadis.core.kv.block_pool import BlockHashChain
from trencadis.core.media_spans import MediaSpan
from trencadis.core.output_constraints import Repetition, repeats
from trencadis.core.request import MAX_LOGPROBS, Delta, Request, RequestStats, TokenLogprob
from trencadis.core.spec.draft_count import AcceptanceRates, DraftModes
from trencadis.core.spec.draft_proposer_interface import DraftProposer
from trencadis.core.step import PENDING, Float32, Int32, Opening, PoolSpan, Sample
from trencadis.core.step_output import Pooled

_MASK = (1 << 64) - 1
AHEAD = 128
"""Numbers generated at a time: setting up a generator takes as long as some hundred numbers."""

KEPT = 384
"""Number of cached batches of numbers; a dropped batch is generated again."""


class _Generator(threading.local):
    """One generator per thread, set up for each batch: creating one takes twice as long as everything else."""

    def __init__(self) -> None:
        self._philox = np.random.Philox(0)
        self._state: Any = self._philox.state

    def words(self, seed: int, choice: int, counter: int, count: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
        """Returns uint64 [count]: the words from ``counter`` on, under the key (seed, choice)."""
        inner = self._state["state"]
        inner["key"][0], inner["key"][1], inner["counter"][0] = seed, choice, counter
        self._philox.state = self._state
        drawn: np.ndarray[Any, np.dtype[np.uint64]] = self._philox.random_raw(count)
        return drawn


_generator = _Generator()


def uniform(seed: int, choice: int, index: int) -> float:
    """Returns a float32-exact number in (0, 1): 23 random bits, centred in their interval."""
    return float(numbers(seed, choice, index // AHEAD)[index % AHEAD])


def numbers(seed: int, choice: int, part: int) -> Float32:
    """Returns float32 [AHEAD], read-only: the numbers of the output tokens from ``part * AHEAD`` on."""
    return _numbers(seed & _MASK, choice & _MASK, part)


@lru_cache(maxsize=KEPT)
def _numbers(seed: int, choice: int, part: int) -> Float32:
    """Generates AHEAD numbers, each from the first of the four words of its counter."""
    words = _generator.words(seed, choice, part * AHEAD, 4 * AHEAD)
    made: Float32 = (((words[::4] >> np.uint64(41)) + 0.5) / (1 << 23)).astype(np.float32)
    return made


SHAPING = (Stage.PREFILL, Stage.DECODE, Stage.FRESH, Stage.CONTEXT, Stage.VISION, Stage.VERIFY)
BEST = Sample(best=True)
"""Sampling parameters of a plain greedy choice: the argmax, regardless of filters."""


class SequenceStatus(Enum):
    """State of a sequence. LEAVING: its blocks are freed once its last launch is fetched."""

    WAITING = 0
    RUNNING = 1
    LEAVING = 2
    DONE = 3


@dataclass(slots=True, eq=False)
class PrefixFound:
    """Cached prefix look-up of a waiting sequence, which is made in each step; valid while ``BlockPool.version`` is
    unchanged.

    Args:
        counted: number of ``blocks`` that have been counted; ``used`` of them are in use.
    """

    version: int
    blocks: list[int] = field(default_factory=list)
    counted: int = 0
    used: int = 0


NOTHING_FOUND = PrefixFound(-1)


class KeptState(NamedTuple):
    """The recurrent state of a preempted sequence in host memory: the tokens that it has read, and its key."""

    tokens: int = 0
    key: bytes = b""


NOTHING_KEPT = KeptState()


@dataclass(slots=True, eq=False)
class SequenceDrafter:
    """What is kept for each sequence that is drafted: its source, and how often drafts were accepted."""

    source: DraftProposer
    rates: AcceptanceRates
    modes: DraftModes | None = None  # None: a model's likeliest ids are drafted


@dataclass(slots=True, eq=False)
class Sequence:
    """One sequence; ``index`` is its number among the choices of the request.

    ``tokens`` holds prompt and output; the last ``pending`` of them are PENDING (sampled, not fetched). ``computed``
    tokens have their KV in ``blocks``; ``inflight`` counts the submitted steps that compute this sequence.
    """

    key: int
    request: Request
    index: int
    seed: int
    tokens: list[int]
    limit: int  # outputs at most
    stops: frozenset[int]  # ids that end it
    banned: tuple[int, ...]  # ids masked until min_tokens
    block_hashes: BlockHashChain
    eos: tuple[int, ...] = ()  # ids that end a text
    unending: bool = False  # EOS is sampled only if the grammar allows nothing else
    most: int = 0  # total tokens after its last output
    plain: bool = False  # its tokens are reported only by id, and no rule applies
    positions: Int32 | None = None  # [3, prompt]
    long: bool = False  # its keys are rotated by the table of long requests
    siblings: list[Sequence] = field(default_factory=list)  # they fork when the prompt is computed
    mates: list[Sequence] = field(default_factory=list)  # beam search: all beams of the request, including this one
    drawn: bool = False  # a beam whose top next tokens are known; waits for its group
    status: SequenceStatus = SequenceStatus.WAITING
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    slot: int = 0
    adapter_slot: int = 0  # while it runs: the slot of its adapter; 0: it has none
    pending: int = 0
    inflight: int = 0
    scheduled: int = 0  # number of the last Step that computes it
    batch_row: int = -1  # its row in ``PersistentBatch``; -1: none, so that a Step describes it by a Row
    micro_batch: int = 0  # while it runs: the micro-batch that it belongs to
    requeue: bool = False
    ended: bool = False
    published: int = 0
    found: PrefixFound = NOTHING_FOUND
    opened: bool = False  # the ranks' matchers follow it
    fresh_state: bool = True  # sampler state must be (re)built before its next sample
    images_counted: set[int] = field(default_factory=set)
    entered: float = 0.0
    first: float = 0.0
    arrived: float = 0.0
    virtual_start: float | None = None  # in virtual time, under fair scheduling
    charged: float = 0.0  # tokens that its virtual start was computed with
    stats: RequestStats = field(default_factory=RequestStats)
    first_buckets: tuple[Bucket, ...] = ()
    last_buckets: tuple[Bucket, ...] = ()
    prompt_scores: list[TokenLogprob | None] | None = None
    pooled: Pooled | None = None  # of the chunks fetched so far
    delta: Delta | None = None  # outgoing; filled by ``update``
    drafter: SequenceDrafter | None = None
    proposal: tuple[int, ...] = ()  # drafts for the step that is being built
    drafts: tuple[int, ...] = ()  # drafts that the step in flight verifies
    forces: int = 0  # most ids that its masks may force after a sampled one
    state: int = 0  # slot that its next launch writes its recurrent state to; 0: it holds none
    source: int = 0  # slot that its next launch reads it from: ``state``, a snapshot that it has claimed, or 0 (zeros)
    last_snapshot: bytes = b""  # key of the last one that it left, unless other prompts branch there
    branch_at: int = 0  # tokens of its prompt after which a snapshot is taken, because other prompts branch there
    kept: KeptState = NOTHING_KEPT

    prompt: int = field(init=False)  # number of prompt tokens

    def __post_init__(self) -> None:
        self.prompt = len(self.request.tokens)

    @property
    def outputs(self) -> int:
        """Number of output tokens so far, including PENDING ones."""
        return len(self.tokens) - self.prompt

    @property
    def due(self) -> int:
        """Number of tokens whose KV must still be computed; 0 once the last output has been sampled."""
        if self.outputs >= self.limit and self.outputs > 0:
            return 0
        return len(self.tokens) - self.computed

    @property
    def runs(self) -> bool:
        """True if it is running."""
        return self.status is SequenceStatus.RUNNING

    @property
    def scored(self) -> bool:
        """True if a request for prompt_logprobs without any output has all its scores."""
        running = self.status is SequenceStatus.RUNNING
        return running and self.limit == 0 and self.computed == self.prompt and self.inflight == 0

    @property
    def awaits_scores(self) -> bool:
        """True if its next chunk has tokens of a prompt with prompt_logprobs."""
        return self.prompt_scores is not None and self.computed < self.prompt - 1

    @property
    def resting(self) -> bool:
        """True if it is a beam that holds blocks and a slot while it waits for its group."""
        return self.drawn and self.status is SequenceStatus.RUNNING

    def key_of(self, span: MediaSpan) -> str:
        """See ``Request``."""
        return self.request.key_of(span)

    def outgrows(self, limit: int) -> bool:
        """Returns True if the sequence is too long for the rotary table of its keys.

        ``limit`` 0: there is one table.
        """
        return 0 < limit < len(self.tokens) and not self.long

    def positions_of(self, start: int, count: int) -> Int32:
        """Returns rotary positions int32 [3, count] of tokens [start, start + count)."""
        if self.positions is None:
            found = _on_all_axes(np.arange(start, start + count, dtype=np.int32))
            if self.long:  # core/models/rotary_embedding.py
                found[0] = 0
            return found
        return self._positions_from(self.positions, start, start + count)

    def _positions_from(self, prompt: Int32, start: int, end: int) -> Int32:
        """Returns ``positions_of`` if the prompt has the positions ``prompt``."""
        if end <= self.prompt:
            return prompt[:, start:end]
        tail = np.arange(max(start, self.prompt), end, dtype=np.int32) + np.int32(self.request.delta)
        rest = _on_all_axes(tail)
        return rest if start >= self.prompt else np.concatenate([prompt[:, start:], rest], axis=1)

    @property
    def masked(self) -> bool:
        """True if the request's rule masks its samples."""
        return self.request.rule is not None and self.request.rule.masks

    def opening(self) -> Opening:
        """Returns the state that the ranks' matchers need to follow it from here on."""
        assert self.request.rule is not None and self.pending == 0
        stops = tuple(sorted(t for t in self.request.params.stop_token_ids if t in self.banned and t not in self.eos))
        endless = self.request.params.ignore_eos and not self.unending
        output = tuple(self.tokens[self.prompt :])
        return Opening(self.key, self.request.rule, output, stops, endless, self.forces)

    def sample(self, ahead: int = 0) -> Sample:
        """Returns the sampling parameters of the next output token, or of the one ``ahead`` tokens after it."""
        p = self.request.params
        banned = self.banned if self.outputs + ahead < p.min_tokens else self.eos if self.unending else ()
        best = p.greedy and not p.needs_state and not p.reports and not self.mates
        return BEST if best and not banned and not self.masked else self._sample(banned, best, self.outputs + ahead)

    def _sample(self, banned: tuple[int, ...], best: bool, output: int) -> Sample:
        """Returns ``sample`` of a choice that samples at random or needs more than the token; ``output``: its index."""
        p = self.request.params
        return Sample(
            temperature=0.0 if p.greedy else p.temperature,
            top_k=max(p.top_k, 0),
            top_p=p.top_p,
            min_p=p.min_p,
            presence=p.presence_penalty,
            frequency=p.frequency_penalty,
            repetition=p.repetition_penalty,
            uniform=0.5 if p.greedy else uniform(self.seed, self.index, output),
            banned=banned,
            logprobs=p.logprobs or 0 if p.reports or self.mates else -1,
            full=not best or bool(banned) or self.masked,
            best=best,
            handle=self.key if self.masked else 0,
            scored=() if p.logprob_token_ids is None else tuple(p.logprob_token_ids),
            wide=_width(p.logprobs) if p.logprob_token_ids is None and not self.mates else 0,
        )

    @property
    def prompt_width(self) -> int:
        """``Row.wide`` of its chunks."""
        return _width(self.request.params.prompt_logprobs)

    def targets(self, start: int, count: int) -> Int32 | None:
        """Returns int32 [count] for prompt_logprobs: the id after each token of the chunk, -1 after the prompt.

        None: not needed.
        """
        if start >= self.prompt - 1:
            return None
        following = np.full(count, -1, np.int32)
        stop = min(start + count, self.prompt - 1)
        following[: stop - start] = self.tokens[start + 1 : stop + 1]
        return following

    @property
    def reads_prefix(self) -> bool:
        """True if cached blocks may be used.

        Scores and pooling over the whole prompt need each token's hidden state.
        """
        whole = self.prompt_scores is not None or self.request.params.skip_reading_prefix_cache
        return not whole and self.request.pool in ("", LAST)

    def pool_of(self, start: int, count: int) -> PoolSpan | None:
        """Returns the part of the chunk [start, start + count) that a pooling request pools."""
        kind, end = self.request.pool, start + count
        if kind in (MEAN, ALL):
            return PoolSpan(0, count, each=kind == ALL)
        if kind == FIRST and start == 0:
            return PoolSpan(0, 1)
        return PoolSpan(count - 1, count) if kind == LAST and end == self.prompt else None

    def branch(self, seq: Sequence, count: int, size: int) -> None:
        """Starts after the first ``count`` blocks, of ``size`` tokens, of another choice of the same request."""
        self.blocks = seq.blocks[:count]
        self.computed, self.published = count * size, count
        self.entered = seq.entered
        self.long, self.block_hashes = seq.long, seq.block_hashes.branch() if seq.long else self.block_hashes
        self.block_hashes.continue_from(seq.block_hashes, seq.tokens, count)
        self.stats.cached_tokens = self.computed

    def repeats(self, pattern: Repetition | None) -> bool:
        """Returns True if its output ends in repetitions of a pattern; never before min_tokens."""
        end = self.count_known()
        if pattern is None or end - self.prompt < self.request.params.min_tokens:
            return False
        return repeats(self.tokens[max(self.prompt, end - pattern.most * pattern.count) : end], pattern)

    def ended_at(self, now: float) -> RequestStats:
        """Returns the statistics for its request, with the durations of its stages."""
        entered, first = self.entered or now, self.first or now
        self.stats.queue, self.stats.prefill, self.stats.decode = entered - self.arrived, first - entered, now - first
        self.stats.ended = time.time()
        self.stats.first_buckets, self.stats.last_buckets = _names(self.first_buckets), _names(self.last_buckets)
        return self.stats

    def wait(self) -> None:
        """Resets the cached prefix lookup when the sequence starts to wait."""
        self.status, self.requeue, self.found = SequenceStatus.WAITING, False, NOTHING_FOUND

    def accept_draft(self) -> None:
        """Counts the draft after its last token as computed: it equals that token. Another token is PENDING."""
        self.computed += 1
        self.tokens.append(PENDING)
        self.pending += 1

    def append_forced(self, token: int) -> None:
        """Appends an output token that was not sampled, because no other was allowed."""
        assert not self.pending
        self.tokens.append(token)
        self.fresh_state |= self.request.params.needs_state  # sampler state lacks it

    def count_known(self) -> int:
        """Number of tokens whose ids are known on the host."""
        return len(self.tokens) - self.pending

    def resolve(self, token: int) -> None:
        """Replaces the oldest PENDING token by its id."""
        at = len(self.tokens) - self.pending
        assert self.tokens[at] == PENDING
        self.tokens[at] = token
        self.pending -= 1


def _width(logprobs: int | None) -> int:
    """Returns the number of top ids if it is more than every SAMPLE launch reports, else 0."""
    return logprobs if logprobs is not None and logprobs > MAX_LOGPROBS else 0


def _names(buckets: tuple[Bucket, ...]) -> list[str]:
    """Returns the names of buckets with text or images; pure sampling launches are implied by them."""
    return [str(bucket) for bucket in buckets if bucket.stage in SHAPING]


Filled = tuple[Sequence, int]
"""A sequence that has filled its last block, and that block."""


class MediaStart(NamedTuple):
    """A sequence with media, and the token from which they are needed."""

    sequence: Sequence
    start: int


def check_holders(holders: list[Sequence], waiting: list[Sequence], free: list[int], size: int) -> None:
    """Asserts that sequences with blocks have distinct slots that are not ``free``, and that waiting ones have no
    blocks.

    ``size``: tokens of a KV block.
    """
    slots = {seq.slot for seq in holders}
    assert len(slots) == len(holders) and not slots & set(free)
    assert all(seq.status is SequenceStatus.WAITING and not seq.blocks for seq in waiting)
    assert all(len(seq.blocks) * size >= seq.computed for seq in holders)


def positions_in(data: bytes) -> Int32:
    """Returns ``Request.positions`` as int32 [3, prompt]."""
    return np.frombuffer(data, "<i4").reshape(3, -1).astype(np.int32, copy=False)


def _on_all_axes(positions: Int32) -> Int32:
    """Expands int32 [n] to [3, n]. It runs for each row of each step; ``np.broadcast_to`` takes ten times as long."""
    out = np.empty((3, positions.size), np.int32)
    out[:] = positions
    return out


@lru_cache(maxsize=64)
def shared_union(ids: tuple[int, ...], more: tuple[int, ...]) -> frozenset[int]:
    """Returns the union of both as one cached set; a step looks into the set of each row."""
    return frozenset(ids) | frozenset(more)
