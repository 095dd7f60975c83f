"""The step that the scheduler is building, and what a starting sequence brings into it. Torch-free.

A sequence starts with prefix cache hits, blocks on the device or copied back from host memory, and with the slot of its
adapter. Of adapters it is known which each slot of the device holds, and which the ranks hold in host memory. Ranks
copy an adapter to its slot before the launches of a step (``Step.uploads``), in the order of steps, so that launches in
flight still see the slot's earlier contents.

Decisions of the scheduler that an operator asks about have one DEBUG line each; with DEBUG off each call is a test.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from trencadis.core.engine_stats import EngineStats
from trencadis.core.kv.block_pool import BlockPool
from trencadis.core.kv.recurrent_state_pool import PendingSnapshot
from trencadis.core.request import AdapterRef, TokenLogprob
from trencadis.core.scheduling.encoder_scheduler import VisionBuilder
from trencadis.core.scheduling.scheduler_limits import SchedulerLimits
from trencadis.core.scheduling.sequence import NOTHING_FOUND, Filled, PrefixFound, Sequence, SequenceStatus
from trencadis.core.shapes.step_times_and_chunk_budget import ChunkBudget, StepTimes, StepWork
from trencadis.core.step import PENDING, AdapterUpload, Bias, Draw, Opening, Reset, Row
from trencadis.core.step_output import HeadOutput, TargetScores

if TYPE_CHECKING:
    from trencadis.core.step_output import StepStats


ON_HOST = 0
"""Stands for a block whose content is in host memory; block 0 is never allocated."""


def cached_blocks(seq: Sequence, limits: SchedulerLimits, pool: BlockPool) -> list[int]:
    """Returns the cached blocks of the start of ``seq``, ON_HOST for those in host memory.

    At least one token is left to compute.
    """
    if not limits.caching or not seq.reads_prefix:
        return []
    limit = (seq.count_known() - 1) // limits.block_size
    keys = seq.block_hashes.extend(seq.tokens, limit * limits.block_size)
    if seq.found.version != pool.version:
        seq.found = PrefixFound(pool.version)
    hits = seq.found.blocks
    while len(hits) < limit and (block := pool.find(keys[len(hits)])) is not None:
        hits.append(block)
    return hits if pool.host is None else _with_host([*hits], keys[:limit], pool)


def _with_host(hits: list[int], keys: list[bytes], pool: BlockPool) -> list[int]:
    """Returns ``hits`` extended by the following blocks on the device or in host memory."""
    for key in keys[len(hits) :]:
        block = pool.find(key)
        if block is None:
            if not pool.on_host(key):
                break
            block = ON_HOST
        hits.append(block)
    return hits


def count_spared_blocks(seq: Sequence, hits: list[int], pool: BlockPool) -> int:
    """Returns by how many free blocks the prefix hits reduce the need of ``seq``."""
    found = seq.found
    new = [block for block in hits[found.counted :] if block != ON_HOST]
    used = found.used + len(new) - pool.idle(new)
    if pool.host is None:  # with host memory the count is not cached
        found.counted, found.used = len(hits), used
    return used


def claim(
    seq: Sequence, hits: list[int], size: int, pool: BlockPool, totals: EngineStats, own: tuple[int, bytes] = (0, b"")
) -> None:
    """Starts ``seq`` after ``hits``, or where its ``own`` state is (``KeptState``); ``size``: tokens of a block.

    Hits are shared, the block in which its own state ends is not. What is in host memory is copied to new blocks.
    """
    keys, (tokens, last), seq.published = seq.block_hashes.keys[: len(hits)], own, len(hits)
    if tokens % size:
        hits, keys = [*hits, pool.find(last) or ON_HOST], [*keys, last]
    pool.share([block for block in hits if block != ON_HOST])
    absent = [keys[i] for i, block in enumerate(hits) if block == ON_HOST]
    back = iter(pool.restore(absent) if absent else ())
    seq.blocks = [block if block != ON_HOST else next(back) for block in hits]
    if tokens % size:
        pool.withdraw(seq.blocks[-1])
    seq.computed = tokens or len(hits) * size
    seq.found = NOTHING_FOUND
    if not seq.outputs:
        seq.stats.cached_tokens = max(seq.stats.cached_tokens, seq.computed)
    totals.host_hits += len(absent) * size
    totals.prefix_hits += seq.computed


def publish(seq: Sequence, pool: BlockPool, size: int) -> None:
    """Adds the full blocks of ``seq`` to the prefix cache; ``size``: tokens of a block."""
    end = min(seq.computed, seq.count_known()) // size
    for i in range(seq.published, end):
        pool.publish(seq.blocks[i], seq.block_hashes.key(seq.tokens, i))
    seq.published = max(seq.published, end)


def publish_filled(filled: Iterable[Filled], limits: SchedulerLimits, pool: BlockPool) -> None:
    """Does the same as ``publish`` for sequences whose last block is full and given, avoiding list look-ups."""
    size = limits.block_size
    for seq, block in filled if limits.caching else ():
        if seq.status is not SequenceStatus.RUNNING:
            continue
        if seq.count_known() == (seq.published + 1) * size:
            pool.publish(block, seq.block_hashes.key(seq.tokens, seq.published))
            seq.published = seq.block_hashes.at  # share one int object, since each costs a memory access
        else:
            publish(seq, pool, size)


if TYPE_CHECKING:
    from trencadis.core.device.backend import Pending

    LoadAdapter = Callable[[AdapterRef, tuple[str, ...]], Pending[str]]

MOST_OVERTAKES = 32
"""Sequences with adapters that may start before one that waits for a slot; then all of them wait for it."""


class AdapterSlots:
    """Slots 1 to ``count``; a slot whose adapter no running sequence uses is given to another, least recent first."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.digests: list[str] = [""] * (count + 1)
        """The adapter of each slot; slot 0 is the base model."""
        self._users = [0] * (count + 1)
        self._used_at = [0] * (count + 1)
        self._clock = 0
        self._uploads: list[AdapterUpload] = []
        self._held: set[int] = set()  # slots that the step which is built encodes images with
        self._first_denied = 0  # the first sequence of this pass that got no slot
        self._waiting_key = 0  # the first sequence that waits for a slot
        self._overtakes = 0

    def begin_admission(self) -> None:
        """Begins a pass over the waiting sequences, in order."""
        self._first_denied = 0

    def admits(self, seq: Sequence) -> bool:
        """Returns True if ``seq`` may start: it has no adapter, or its adapter has a slot or can get one.

        While a sequence waits for a slot, at most ``MOST_OVERTAKES`` later ones with an adapter start before it, so
        that the slots which they use become free.
        """
        if seq.request.adapter is None:
            return True
        if self._first_denied and self._overtakes >= MOST_OVERTAKES:
            return False
        if self._find(seq.request.adapter.digest) or self._free():
            return True
        self._deny(seq)
        return False

    def _deny(self, seq: Sequence) -> None:
        """Records the first sequence of a pass that waits for a slot."""
        if self._first_denied:
            return
        self._first_denied = seq.key
        if self._waiting_key != seq.key:
            self._waiting_key, self._overtakes = seq.key, 0

    def start(self, seq: Sequence) -> None:
        """Gives a starting sequence the slot of its adapter, which is uploaded if it is not there yet."""
        if seq.request.adapter is None:
            return
        digest = seq.request.adapter.digest
        slot = self._find(digest)
        if not slot:
            slot = self._free()
            assert slot, "a sequence starts without a slot for its adapter"
            self.digests[slot] = digest
            self._uploads.append(AdapterUpload(slot, digest))
        self._overtakes += 1
        self._users[slot] += 1
        seq.adapter_slot = slot

    def stop(self, seq: Sequence) -> None:
        """Releases the slot of a sequence that no longer runs."""
        if seq.adapter_slot:
            self._clock += 1
            self._users[seq.adapter_slot] -= 1
            self._used_at[seq.adapter_slot] = self._clock
            seq.adapter_slot = 0

    def encodes(self, seq: Sequence) -> bool:
        """Implements ``encoder_scheduler.TowerAdapters``."""
        return self.tower_slot(seq) >= 0 or bool(self._free())

    def tower_slot(self, seq: Sequence) -> int:
        """Implements ``encoder_scheduler.TowerAdapters``."""
        adapter = seq.request.adapter
        if adapter is None or not adapter.tower:
            return 0
        return self._find(adapter.digest) or -1

    def hold(self, slot: int) -> None:
        """Implements ``encoder_scheduler.TowerAdapters``."""
        self._held.add(slot)

    def take_uploads(self) -> tuple[AdapterUpload, ...]:
        """Returns the uploads of the step that is built, which ends what ``hold`` began."""
        self._held.clear()
        if not self._uploads:
            return ()
        made, self._uploads = tuple(self._uploads), []
        return made

    def _find(self, digest: str) -> int:
        """Returns the slot of an adapter; 0: it has none."""
        return self.digests.index(digest) if digest in self.digests else 0

    def _free(self) -> int:
        """Returns the slot that an adapter can get: one that was never used, or else the least recent; 0: none."""
        unused = (slot for slot in range(1, self.count + 1) if not self._users[slot] and slot not in self._held)
        return min(unused, key=lambda slot: (self.digests[slot] != "", self._used_at[slot]), default=0)

    def check(self, running: list[Sequence]) -> None:
        """Asserts that each running sequence has the slot of its adapter, and that users are counted."""
        users = [0] * (self.count + 1)
        for seq in running:
            digest = "" if seq.request.adapter is None else seq.request.adapter.digest
            assert self.digests[seq.adapter_slot] == digest, "a sequence runs with another adapter"
            users[seq.adapter_slot] += seq.adapter_slot > 0
        assert users == self._users, "users of a slot are miscounted"


class AdapterLoads:
    """Adapters that the ranks have read or are reading; the least recently used are forgotten.

    Args:
        load: has every rank read an adapter and forget those with the given digests; its result is an error message.
        capacity: adapters in host memory, unless requests use more of them.
        in_use: returns the digests that requests or slots of the device use.
    """

    def __init__(self, load: LoadAdapter, capacity: int, in_use: Callable[[], set[str]]) -> None:
        self._load, self._capacity, self._in_use = load, capacity, in_use
        self._loads: dict[str, Pending[str]] = {}  # by digest, the most recently used last

    def load(self, ref: AdapterRef) -> Pending[str]:
        """Has every rank read an adapter while Steps continue; the result is an error message, or empty."""
        pending = self._loads.pop(ref.digest, None)
        if pending is None or (pending.done() and pending.result()):
            pending = self._load(ref, self._evict())
        self._loads[ref.digest] = pending
        return pending

    def _evict(self) -> tuple[str, ...]:
        """Returns the digests that the ranks forget so that one more adapter fits."""
        surplus = len(self._loads) + 1 - self._capacity
        if surplus <= 0:
            return ()
        used = self._in_use()
        gone = [digest for digest, one in self._loads.items() if digest not in used and one.done()][:surplus]
        for digest in gone:
            del self._loads[digest]
        return tuple(gone)

    @property
    def count(self) -> int:
        """Number of adapters in host memory."""
        return len(self._loads)


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
        if (blocks, images) == (self._blocks, self._images):
            return
        log.debug(
            "eviction: step %d takes %d KV blocks and %d images out of the caches", step, blocks - self._blocks,
            images - self._images,
        )  # fmt: skip
        self._blocks, self._images = blocks, images


def log_launches(step: int, launches: Iterable[StepStats]) -> None:
    """The launches of a step that has ended: shape, how they ran, real and padded sizes, seconds."""
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
    scored: int  # of these, remaining budget of prompt tokens with log-probabilities
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
    most_scored: int = 0  # ``scored`` before any sequence has taken of it

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
        if seq.awaits_scores:
            count = self._fit_scored(seq, count, limits)
        if not limits.chunked and seq.computed < seq.prompt and count < seq.due:
            return 0
        if self.chunk_budget is None or seq.due == 1:
            return count
        return self._within(self.chunk_budget, seq, count, limits.bidirectional_images)

    def can_score(self, seq: Sequence, limits: SchedulerLimits) -> bool:
        """Returns False if ``seq``, which waits, needs log-probabilities of its prompt and this step has no more of
        them.
        """
        return seq.prompt_scores is None or self._fit_scored(seq, seq.due, limits) > 0

    def _fit_scored(self, seq: Sequence, count: int, limits: SchedulerLimits) -> int:
        """Returns how many of ``count`` tokens of a prompt with log-probabilities the step can compute.

        The first such prompt of a step gets at least what cannot be split: a whole prompt, or an image whose tokens
        attend to each other.
        """
        if count <= self.scored:
            return count
        first, start = self.scored == self.most_scored, seq.computed
        if not limits.chunked:
            return count if first else 0
        split = (s.end - start for s in seq.request.spans if limits.bidirectional_images and s.offset <= start < s.end)
        return min(count, max(self.scored, next(split, 0) if first else 0))

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
        """Adds a RESET if ``seq`` uses sampler state, or if its slot is in ``biased``, which is kept up to date: the
        last owner left a bias, which any full SAMPLE adds.
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
        """Adds sampling of the next token of ``seq``, PENDING until its step is fetched; beams are their group's."""
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
