"""Seconds of launches from measurements: a few factors for the terms of the policy's cost. Torch-free, deterministic.

Until ``LEAST_LAUNCHES`` launches have been measured the policy's cost stands alone. Then each term of a stage's cost
(launch, tokens, pairs, blocks) gets a factor of at least 0, by least squares of the relative errors. Terms about which
the launches say nothing get the factor of the stage as a whole (a weak prior).
"""

from __future__ import annotations

import itertools
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from trencadis.core.buckets import Bucket, Stage
from trencadis.core.json_types import JsonMapping, JsonObject
from trencadis.core.shapes.launch_costs import Costs

LEAST_LAUNCHES = 200
KEPT_TIMES = 16
"""Newest seconds of a bucket that are kept; their median counts."""

KEPT_BUCKETS = 1024
PRIOR = 0.01
"""Weight of equal factors beside that of one well measured bucket."""

LEAST_FACTOR = 0.01
"""Least factor of a stage's term, of its largest one, from which the factors of a variant are sought."""

OUTLIER = 4.0
"""Buckets whose relative error is this many times the median one, and above a quarter, are left out of a second fit."""

Floats: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True)
class MeasuredCosts:
    """Seconds of one launch of a bucket, for the planner and the search.

    Args:
        paper: the policy's cost.
        scale: seconds of one unit of ``paper``.
        factors: by stage and variant, the factor of each term of ``paper``. Variants that were not measured have the
            factors of "", the stage as a whole; other stages have none.
    """

    paper: Costs
    scale: float = 1.0
    factors: Mapping[tuple[Stage, str], tuple[float, ...]] = field(default_factory=dict)

    def __call__(self, bucket: Bucket) -> float:
        """Returns the seconds of one launch of ``bucket``."""
        terms = self.paper.terms(bucket)
        factors = self.factors.get((bucket.stage, bucket.variant)) or self.factors.get((bucket.stage, ""))
        return self.scale * (sum(terms) if factors is None else sum(f * t for f, t in zip(factors, terms, strict=True)))


Cost: TypeAlias = Costs | MeasuredCosts
"""A cost that can be sent to another process."""


def describe_cost(cost: Cost) -> JsonObject:
    """Returns a cost as JSON."""
    if isinstance(cost, Costs):
        return {"paper": asdict(cost)}
    factors = [[stage.name, variant, list(found)] for (stage, variant), found in sorted(cost.factors.items())]
    return {"paper": asdict(cost.paper), "scale": cost.scale, "factors": factors}


def parse_cost(record: JsonMapping) -> Cost:
    """Returns the cost that ``describe_cost`` has described."""
    paper = Costs(**record["paper"])
    if "scale" not in record:
        return paper
    factors = {(Stage[stage], variant): tuple(found) for stage, variant, found in record["factors"]}
    return MeasuredCosts(paper, record["scale"], factors)


class LaunchTime(NamedTuple):
    """Measured seconds of one launch on the device."""

    bucket: Bucket
    seconds: float


class BucketTimes(NamedTuple):
    """Measured seconds of launches of one bucket, the newest last."""

    bucket: Bucket
    seconds: list[float]


class Residual(NamedTuple):
    """Relative errors of predicted seconds over buckets: how many there are, the median, the 95th percentile."""

    buckets: int
    median: float
    high: float


class LaunchTimes:
    """Measured seconds of launches by bucket, bounded: the newest ``KEPT_TIMES`` of ``KEPT_BUCKETS`` buckets."""

    def __init__(self, paper: Costs) -> None:
        self.paper = paper
        self.count = 0
        self._seconds: dict[Bucket, deque[float]] = {}

    def add(self, bucket: Bucket, seconds: float) -> None:
        """Adds one launch."""
        if not seconds > 0:
            return
        self.count += 1
        kept = self._seconds.pop(bucket, None)
        kept = deque(maxlen=KEPT_TIMES) if kept is None else kept
        kept.append(seconds)
        self._seconds[bucket] = kept
        if len(self._seconds) > KEPT_BUCKETS:
            self._seconds.pop(next(iter(self._seconds)))

    def list_seconds(self) -> list[BucketTimes]:
        """Returns the kept seconds of each bucket."""
        return [BucketTimes(bucket, list(found)) for bucket, found in self._seconds.items()]

    def restore(self, count: int, times: Iterable[BucketTimes]) -> LaunchTimes:
        """Takes over what another one has measured; returns itself."""
        self.count = count
        self._seconds = {bucket: deque(found, KEPT_TIMES) for bucket, found in times}
        return self

    def medians(self) -> dict[Bucket, float]:
        """Returns the median seconds of each bucket."""
        return {bucket: statistics.median(found) for bucket, found in sorted(self._seconds.items())}

    def fit(self) -> MeasuredCosts | None:
        """Returns the seconds of launches as a function of the bucket; None: too few have been measured."""
        if self.count < LEAST_LAUNCHES:
            return None
        medians = self.medians()
        scale = statistics.median(seconds / (self.paper(bucket) or 1.0) for bucket, seconds in medians.items())
        factors = dict[tuple[Stage, str], Floats]()
        for stage in sorted({b.stage for b in medians}):
            every = [b for b in medians if b.stage is stage]
            whole = factors[stage, ""] = self._fit_buckets(every, medians, scale)
            for variant in sorted({b.variant for b in every if len({o.variant for o in every}) > 1}):
                own = [b for b in every if b.variant == variant]
                near = np.maximum(whole, LEAST_FACTOR * whole.max())  # a term that the stage lacks may be the variant's
                factors[stage, variant] = self._fit_buckets(own, medians, scale * near) * near
        return MeasuredCosts(self.paper, scale, {key: tuple(map(float, found)) for key, found in factors.items()})

    def _fit_buckets(self, buckets: Sequence[Bucket], medians: Mapping[Bucket, float], scale: float | Floats) -> Floats:
        """Returns the factors of the terms of some buckets, times ``scale`` [terms]."""
        terms = np.array([self.paper.terms(b) for b in buckets]) * scale
        counts = np.array([len(self._seconds[b]) for b in buckets]) / KEPT_TIMES
        return _fit_stage(terms, np.array([medians[b] for b in buckets]), counts)

    def residuals(self, cost: MeasuredCosts) -> dict[Stage, Residual]:
        """Returns by how much ``cost`` misses the measured medians, by stage."""
        return residuals_of(cost, [LaunchTime(*pair) for pair in self.medians().items()])


def residuals_of(cost: MeasuredCosts, launches: Iterable[LaunchTime]) -> dict[Stage, Residual]:
    """Returns the relative errors of ``cost`` over launches, by stage."""
    errors: dict[Stage, list[float]] = {}
    for bucket, seconds in launches:
        errors.setdefault(bucket.stage, []).append(abs(cost(bucket) / seconds - 1))
    return {
        stage: Residual(len(found), float(np.median(found)), float(np.quantile(found, 0.95)))
        for stage, found in sorted(errors.items())
    }


@dataclass(frozen=True)
class FittedBytes:
    """Bytes of graphs as a function of the bucket: by stage, factors of 1, the sizes of its axes and their product."""

    factors: Mapping[Stage, tuple[float, ...]]

    def __call__(self, bucket: Bucket) -> float:
        """Returns the bytes of the graph of a bucket; 0 for a stage of which no graph is known."""
        factors = self.factors.get(bucket.stage)
        return 0.0 if factors is None else sum(f * t for f, t in zip(factors, _size_terms(bucket), strict=True))


def _size_terms(bucket: Bucket) -> tuple[float, ...]:
    dims = bucket.dims
    return (1.0, dims[0], dims[1], dims[0] * dims[1]) if len(dims) == 2 else (1.0, dims[0])


def fit_bytes(known: Mapping[Bucket, int]) -> FittedBytes:
    """Returns the bytes of graphs, of which some are known."""
    stages: dict[Stage, list[Bucket]] = {}
    for bucket, count in sorted(known.items()):
        if count > 0:
            stages.setdefault(bucket.stage, []).append(bucket)
    return FittedBytes(
        {stage: _fit_sizes(found, np.array([known[b] for b in found])) for stage, found in stages.items()}
    )


def _fit_sizes(buckets: Sequence[Bucket], counts: NDArray[np.int64]) -> tuple[float, ...]:
    """Returns the factors of ``FittedBytes`` of one stage."""
    terms = np.array([_size_terms(b) for b in buckets])
    typical = np.median(counts[:, None] / terms, axis=0) / terms.shape[1]
    found = _fit_stage(terms * typical, counts.astype(np.float64), np.ones(len(buckets)))
    return tuple(map(float, found * typical))


def _fit_stage(terms: Floats, seconds: Floats, weights: Floats) -> Floats:
    """Returns the factors of [buckets, terms] that come nearest to ``seconds`` [buckets], without outliers."""
    whole = float(np.median(seconds / terms.sum(axis=1)))
    terms = terms * whole
    factors = _solve(terms, seconds, weights)
    errors = np.abs(terms @ factors / seconds - 1)
    kept = errors <= max(OUTLIER * float(np.median(errors)), 0.25)
    if kept.sum() > terms.shape[1] and not kept.all():
        factors = _solve(terms[kept], seconds[kept], weights[kept])
    return whole * factors


def _solve(terms: Floats, seconds: Floats, weights: Floats) -> Floats:
    """Returns the non-negative factors with the least squares of relative errors; every set of zeros is tried."""
    scaled = np.sqrt(weights)[:, None] * terms / seconds[:, None]
    count = terms.shape[1]
    rows = np.vstack([scaled, PRIOR * np.eye(count)])
    wanted = np.concatenate([np.sqrt(weights), np.full(count, PRIOR)])
    best, least = np.zeros(count), float(wanted @ wanted)
    for used in _subsets(range(count)):
        found = np.linalg.lstsq(rows[:, used], wanted, rcond=None)[0]
        if (found < 0).any():
            continue
        error = rows[:, used] @ found - wanted
        if (total := float(error @ error)) < least:
            best, least = np.zeros(count), total
            best[list(used)] = found
    return best


def _subsets(numbers: Sequence[int]) -> Iterable[tuple[int, ...]]:
    for size in range(1, len(numbers) + 1):
        yield from itertools.combinations(numbers, size)
