"""The results of a Step, as ranks return them to the engine: samples, scores, pooled rows and statistics of launches.

Torch-free; arrays are numpy.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from trencadis.core.buckets import Bucket
from trencadis.core.step import Float32, Float64, Int32


@dataclass(slots=True)
class StepStats:
    """Statistics of one launch for metrics.

    Args:
        planned: False if its need exceeded the plan.
        items: images of a VISION launch; ``needed``: slots that they need.
        miss: why it had no graph (core/graph_and_bucket_learning_report.py); empty: it had one, or the device
            captures none.
    """

    bucket: Bucket
    real: int
    padded: int
    state: str
    seconds: float
    planned: bool = True
    miss: str = ""
    items: int = 0
    needed: int = 0


@dataclass(slots=True)
class HeadOutput:
    """Fetched result of SAMPLE over r rows; the logprob arrays are None in the greedy variant."""

    token: Int32  # [r]
    logprob: Float32 | None = None  # [r] of the token (or of the target)
    rank: Int32 | None = None  # [r] 1 is the best
    top_id: Int32 | None = None  # [r, MAX_LOGPROBS, or the width of the launch]
    top_logprob: Float32 | None = None  # like ``top_id``


@dataclass(slots=True)
class PoolOutput:
    """Fetched result of POOL: float32 [groups, width], the sum of each group's rows or a class head's scores of it."""

    values: Float32


Pooled = Float64 | Float32
"""Values [rows, width]: one row in float64 if rows are summed, else a float32 row per token."""


def append_pooled(held: Pooled | None, more: Pooled, each: bool) -> Pooled:
    """Returns ``held`` combined with the rows of later tokens: summed, or appended if ``each`` token has a row."""
    if held is None:
        return more
    return np.concatenate([held, more]) if each else np.asarray(held + more, np.float64)


@dataclass(slots=True)
class TargetScores:
    """Log-probabilities of prompt tokens; ``positions`` are their indices in the prompt, one per row of ``head``."""

    positions: list[int]
    head: HeadOutput


@dataclass(slots=True)
class StepOutput:
    """The results of a Step.

    Args:
        samples: the row in ``head`` of each sequence that a ``Row`` sampled, by its key; persistent rows come first.
            Draws from drafts have the rows after it.
        scored: log-probabilities of the ids in ``Sample.scored``, or of the ``Sample.wide`` top ids.
        failures: key -> why a choice cannot continue under its rule, in one line; its token is ignored.
        failed_at: key -> which of its draws failed, from 0; a key that is missing failed at its first.
        text: (key, draw) of choices that sampled a stop id as text, because their grammar may not end there.
        forced: key -> the ids after its last token that the masks forced (``Opening.forces``). They count as its next
            draws in ``text``.
        plan: version of the plan from which the launches took their shapes.
    """

    number: int
    samples: dict[int, int] = field(default_factory=dict)
    head: HeadOutput | None = None
    targets: dict[int, TargetScores] = field(default_factory=dict)  # by key of the row
    scored: dict[int, TargetScores] = field(default_factory=dict)  # by key of the sequence; positions are those of ids
    pooled: dict[int, Pooled] = field(default_factory=dict)  # by key of the row: [1, width] float64, or of each token
    stats: list[StepStats] = field(default_factory=list)
    failures: dict[int, str] = field(default_factory=dict)
    failed_at: dict[int, int] = field(default_factory=dict)
    text: set[tuple[int, int]] = field(default_factory=set)
    forced: dict[int, tuple[int, ...]] = field(default_factory=dict)
    plan: int = 1
