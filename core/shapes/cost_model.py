"""Learns the seconds of launches from measured ones: the terms of ``Costs``, weighted anew for each stage. Torch-free.

Non-negative least squares of relative errors, with the polynomial on paper as a prior, so that a term that few
launches show keeps its share. Launches that took far longer than their like are left out: they waited for something.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from trencadis.core.buckets import Bucket, Stage, padded_tokens, verified_width
from trencadis.core.shapes.launch_costs import Costs

Floats: TypeAlias = NDArray[np.float64]

LEAST_LAUNCHES = 200
"""Measured launches of a stage below which the polynomial on paper is used alone."""

KEPT = 16
"""Latest measurements kept of each bucket."""

PRIOR_WEIGHT = 0.02
"""Weight of the prior, in relative errors of one term, beside the mean relative error of the launches."""

OUTLIER = 4.0
"""Launches that are so many median errors off are left out."""

ROUNDS = 4


def list_terms(bucket: Bucket, costs: Costs) -> Floats:
    """Returns what each term of ``costs`` amounts to for one launch: their sum is ``costs(bucket)``."""
    stage, dims = bucket.stage, bucket.dims
    if stage is Stage.FRESH:
        rows, tokens = dims
        return np.array([costs.launch, rows * tokens, costs.pair * rows * tokens * (tokens + 1) / 2])
    if stage is Stage.CONTEXT:
        tokens, blocks = dims
        pairs = tokens * (blocks * costs.block_size + tokens)
        return np.array([costs.launch, tokens, costs.pair * pairs, costs.block * blocks])
    if stage is Stage.DECODE and len(dims) == 2:
        return np.array([costs.launch, dims[0], (costs.pair * costs.block_size + costs.block) * dims[1]])
    if stage is Stage.VERIFY:
        blocks = dims[1] if len(dims) == 2 else 0
        pairs = verified_width(bucket) * costs.block_size * blocks
        return np.array([costs.launch, padded_tokens(bucket), costs.pair * pairs, costs.block * blocks])
    if stage is Stage.VISION:
        return np.array([costs.vision_launch, costs.slot * dims[0], costs.slot_pair * dims[0] ** 2])
    if stage in (Stage.SAMPLE, Stage.RESET, Stage.POOL):
        return np.array([costs.launch * costs.head, costs.head * dims[0]])
    return np.array([costs.launch, float(dims[0])])


class StageFit(NamedTuple):
    """Seconds of each term of a stage, in units of the term on paper, and the relative errors of its launches."""

    seconds: Floats
    launches: int
    median_error: float
    worst_error: float


@dataclass
class LaunchTimes:
    """The latest measured seconds of each bucket."""

    kept: dict[Bucket, deque[float]] = field(default_factory=dict)
    counts: dict[Stage, int] = field(default_factory=dict)

    def add(self, bucket: Bucket, seconds: float) -> None:
        """Adds one launch; those without a positive duration are ignored."""
        if not 0 < seconds < float("inf"):
            return
        self.kept.setdefault(bucket, deque(maxlen=KEPT)).append(seconds)
        self.counts[bucket.stage] = self.counts.get(bucket.stage, 0) + 1

    def of(self, stage: Stage) -> list[tuple[Bucket, float]]:
        """Returns the launches of one stage."""
        return [(b, s) for b, found in self.kept.items() if b.stage is stage for s in found]


@dataclass(frozen=True)
class CostModel:
    """The seconds of launches: fitted for stages with enough of them, else on paper, scaled to the fitted ones."""

    paper: Costs
    fits: Mapping[Stage, StageFit]
    unit: float

    def __call__(self, bucket: Bucket) -> float:
        """Returns the expected seconds of one launch of ``bucket``."""
        fit = self.fits.get(bucket.stage)
        if fit is None:
            return self.unit * self.paper(bucket)
        return float(list_terms(bucket, self.paper) @ fit.seconds)


def fit_costs(times: LaunchTimes, paper: Costs) -> CostModel:
    """Returns the model of the measured launches."""
    fits = {
        stage: fit_stage(times.of(stage), paper, times.counts[stage])
        for stage in sorted(times.counts)
        if times.counts[stage] >= LEAST_LAUNCHES
    }
    known = [s / paper(b) for stage in fits for b, s in times.of(stage)]
    return CostModel(paper, fits, float(np.median(known)) if known else 1.0)


def fit_stage(launches: Iterable[tuple[Bucket, float]], paper: Costs, count: int = 0) -> StageFit:
    """Fits one stage; launches that are outliers of the fit are left out in the next round."""
    found = list(launches)
    terms = np.stack([list_terms(b, paper) for b, _ in found])
    seconds = np.array([s for _, s in found])
    kept = np.ones(len(found), bool)
    for _ in range(ROUNDS):
        fitted = _solve(terms[kept], seconds[kept])
        errors = np.abs(terms @ fitted / seconds - 1)
        middle = max(float(np.median(errors)), 1e-3)
        kept = (errors <= OUTLIER * middle) | (errors <= 0.05)
    errors = np.abs(terms[kept] @ fitted / seconds[kept] - 1)
    return StageFit(fitted, count or len(found), float(np.median(errors)), float(np.quantile(errors, 0.95)))


def _solve(terms: Floats, seconds: Floats) -> Floats:
    """Returns the non-negative weights of the terms with the least squares of relative errors.

    There are at most four terms, so every set of terms above 0 is tried.
    """
    prior = float(np.median(seconds / terms.sum(axis=1)))
    scaled = terms / seconds[:, None] / np.sqrt(len(seconds))
    own = PRIOR_WEIGHT / max(prior, 1e-30) * np.eye(terms.shape[1]) / np.sqrt(terms.shape[1])
    matrix = np.vstack([scaled, own])
    target = np.concatenate([np.full(len(seconds), 1 / np.sqrt(len(seconds))), own.sum(axis=1) * prior])
    best, least = np.full(terms.shape[1], prior), np.inf
    for size in range(1, terms.shape[1] + 1):
        for some in itertools.combinations(range(terms.shape[1]), size):
            found = np.zeros(terms.shape[1])
            found[list(some)] = np.linalg.lstsq(matrix[:, some], target, rcond=None)[0]
            error = float(((matrix @ found - target) ** 2).sum())
            if (found >= 0).all() and error < least:
                best, least = found, error
    return best
