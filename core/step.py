"""The data that the scheduler sends to the ranks in one step. Torch-free; arrays are numpy.

``Step`` is small and equal on every rank; ranks build ``StepInputs`` from it (``core/launches/host_inputs.py``) and
return a ``StepOutput``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trencadis.core.cross_attention_inputs import NO_CROSS_ATTENTION, CrossAttentionSpans
from trencadis.core.output_constraints import Rule

PENDING = -1
"""Stands for a token that has been sampled but not fetched: the device reads it from its sampler slot."""

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]
UInt8 = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Sample:
    """Sampling parameters of one row; the defaults are neutral.

    Args:
        uniform: the host's random number in (0, 1).
        banned: ids that must not be sampled now (min_tokens), possibly none.
        logprobs: number of top ids to report; -1: no logprobs, so that the launch may omit them.
        full: True if the row needs more than the argmax.
        best: True if a ``full`` row needs only the argmax over the ids that its mask allows.
        handle: the choice in the rank's matcher manager whose mask applies to the row (``Opening.key``); 0: none.
        scored: ids whose log-probabilities are requested in addition to the token's.
        wide: number of top ids to report if that is more than MAX_LOGPROBS, else 0.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    uniform: float = 0.5
    banned: tuple[int, ...] = ()
    logprobs: int = -1
    full: bool = False
    best: bool = False
    handle: int = 0
    scored: tuple[int, ...] = ()
    wide: int = 0


class Draw(NamedTuple):
    """One sample: the scheduler's key of the sequence, its sampler slot, and how to sample.

    ``tokens_after``: tokens of the row after the one whose hidden row is sampled; they are drafts. A sequence with k
    drafts has k + 1 draws, one after another: from its last known token on, then from each draft.
    """

    key: int
    slot: int
    sample: Sample
    tokens_after: int = 0


@dataclass(frozen=True, slots=True)
class ImageRows:
    """Arena rows that replace token embeddings: chunk tokens [start, start + len(rows)) use ``rows``."""

    start: int
    rows: Int32


class PoolSpan(NamedTuple):
    """Tokens [start, stop) of a chunk whose hidden rows are summed; ``each``: every row is returned separately."""

    start: int
    stop: int
    each: bool = False


class BidirectionalSpan(NamedTuple):
    """Tokens [start, stop) of a chunk that attend to each other, also to later ones."""

    start: int
    stop: int


class StateSlots(NamedTuple):
    """The slots of a row's recurrent state: the one that its new state is written to, and the one it is read from.

    ``source`` 0: the state counts as zero, because the sequence begins.
    """

    slot: int
    source: int


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence's share of a Step.

    Args:
        key: the scheduler's key of the sequence, by which outputs are matched.
        slot: sampler slot, from 1.
        context: tokens already in the KV cache, which is the absolute index of ``tokens[0]``.
        tokens: ids to compute, at least one; the last may be PENDING. Drafts follow the last known token.
        blocks: ids of the KV blocks that hold [0, context + len(tokens)).
        positions: int32 [3, len(tokens)].
        images: arena rows inside this chunk.
        samples: one entry per sequence that samples from the last token's hidden row, or one for the last known token
            and each draft after it; possibly none.
        targets: prompt_logprobs: int32 [len(tokens)], the id to score at each token; -1: none.
        wide: number of top ids to report with each target if that is more than MAX_LOGPROBS, else 0.
        state: slots of the row's recurrent state; None: the model keeps none.
        pool: the tokens of this chunk that a pooling request pools, possibly none.
        spans: tokens that attend to each other, each span in one launch (``TextConfig.upto``). cross_attention: images
            that the tokens attend to.
        following: the id after the row's last token, if it is known; else -1.
        adapter: slot of its adapter, from 1; 0: the base model.
    """

    key: int
    slot: int
    context: int
    tokens: tuple[int, ...]
    blocks: tuple[int, ...]
    positions: Int32
    images: tuple[ImageRows, ...] = ()
    samples: tuple[Draw, ...] = ()
    targets: Int32 | None = None
    adapter: int = 0
    pool: PoolSpan | None = None
    spans: tuple[BidirectionalSpan, ...] = ()
    cross_attention: CrossAttentionSpans = NO_CROSS_ATTENTION
    wide: int = 0
    following: int = -1
    state: StateSlots | None = None


class AdapterUpload(NamedTuple):
    """An adapter that is copied to a slot of the device, from 1, before the launches of a Step."""

    slot: int
    digest: str


class PixelNeed(NamedTuple):
    """A request by the engine for the pixels of image number ``image`` of a request."""

    request_id: str
    image: int


@dataclass(frozen=True, slots=True)
class Encode:
    """One image to encode."""

    digest: str
    grid: tuple[int, int, int]  # patches (t, h, w)
    slots: int
    pixels: UInt8  # [real slots, values of a slot] in the processor's order
    rows: Int32  # [tokens] arena rows in token order
    adapter: int = 0  # slot of the adapter that changes the tower for it, from 1; 0: none


class Bias(NamedTuple):
    """The logit_bias of one id."""

    token: int
    value: float


@dataclass(frozen=True, slots=True)
class Reset:
    """Sampler state of a slot, built completely on the host: prompt ids, output ids so far, bias pairs."""

    slot: int
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    bias: tuple[Bias, ...] = ()


@dataclass(frozen=True, slots=True)
class Opening:
    """A choice whose samples follow a rule from this Step on.

    Args:
        key: the scheduler's key of the sequence; its samples use it as their handle.
        output: ids that it has sampled so far, none of them PENDING.
        stops: ids besides EOS that end it.
        endless: True if EOS does not end it (ignore_eos, without a grammar).
        forces: most ids that a step adds after a sampled one, where the masks hold one id alone; 0: none.
    """

    key: int
    rule: Rule
    output: tuple[int, ...] = ()
    stops: tuple[int, ...] = ()
    endless: bool = False
    forces: int = 0


class DraftRow(NamedTuple):
    """One sequence that a draft model continues: its last known token, whose KV that model does not hold yet.

    Args:
        key: the scheduler's key of the sequence.
        context: tokens before it, which both models have read.
        blocks: ids of the KV blocks that hold them, that token and all drafts but the last.
        positions: int32 [3, drafts]: rotary positions of that token and of all drafts but the last.
        samples: how each draft is chosen.
    """

    key: int
    token: int
    context: int
    blocks: tuple[int, ...]
    positions: Int32
    samples: tuple[Sample, ...]


class BlockMove(NamedTuple):
    """A copy of a KV block, or of a sequence's recurrent state, to host memory (``out``) or back.

    ``block``: the block, or the slot of the state; ``slot``: a place in host memory, from 0.
    """

    block: int
    slot: int
    out: bool


class Joining(NamedTuple):
    """Row number ``row`` of this Step joins the persistent batch, starting with the next Step.

    ``delta``: rotary position of a sampled token minus the token's index.
    """

    row: int
    delta: int


@dataclass(frozen=True, slots=True)
class BatchChange:
    """Changes of the persistent batch in one Step; its rows are not in ``Step.rows``.

    A row in the persistent batch (``core/launches/rank_input_batch.py``) computes the token that the previous Step
    sampled for it, and samples the next one with the same parameters. Order of application: ``left``, ``grown``, the
    launches, ``joins``.

    Args:
        version: number of the change, from 1; a rank that missed one must not continue.
        count: rows of the persistent batch while the Step runs.
        left: rows that are freed, one after another; the last row moves into each.
        grown: int32 [2, k]: rows, and the block that is appended to each.
        uniform: float32 [count]: the host's random numbers; empty if all rows take the argmax.
        joins: rows of this Step that become the next rows of the batch, in order.
        tokens: int32 [count]: the token that each row computes, if the host knows it (with several pipeline stages, as
            the first has no sampler slots); else empty.
    """

    version: int
    count: int
    left: tuple[int, ...]
    grown: Int32
    uniform: Float32
    joins: tuple[Joining, ...] = ()
    tokens: Int32 = field(default_factory=lambda: np.zeros(0, np.int32))


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the engine. Order on the device: moves, uploads, resets, images, text launches, one SAMPLE, or POOL.

    Each rank's matcher manager (``core.token_masks.matcher_manager``) closes the choices ``closings``, then opens the
    ``openings``. Hidden rows and samples of the persistent rows come first, in their order. With several pipeline
    stages, Steps in flight belong to different micro-batches, which share no row; each has its own persistent batch.
    """

    number: int
    rows: tuple[Row, ...]
    images: tuple[Encode, ...] = ()
    resets: tuple[Reset, ...] = ()
    openings: tuple[Opening, ...] = ()
    closings: tuple[int, ...] = ()
    moves: tuple[BlockMove, ...] = ()
    batch: BatchChange | None = None  # None: the persistent batch is empty and stays empty
    micro_batch: int = 0
    uploads: tuple[AdapterUpload, ...] = ()
    state_moves: tuple[BlockMove, ...] = ()

    @property
    def persistent_count(self) -> int:
        """Number of rows in the persistent batch during this step."""
        return 0 if self.batch is None else self.batch.count

    @property
    def tokens(self) -> int:
        """Number of real text tokens computed in this step."""
        count = self.persistent_count
        return count + sum(len(r.tokens) for r in self.rows) if self.rows else count
