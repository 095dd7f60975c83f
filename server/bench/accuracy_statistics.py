"""Scores of ``trencadis check-accuracy``: shares with their confidence, and whether runs differ by more than chance.

Both runs answer the same items, so that only items on which they differ count: under the same accuracy either run is
as likely as the other to be the right one of an item on which one is right and one is wrong.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from trencadis.core.checkpoint.json_fields import read_json
from trencadis.core.errors import StartupError
from trencadis.core.json_types import JsonObject

Z = 1.959964
"""Quantile of the normal distribution for 95 %."""

LIMIT = 0.05
"""A difference is taken as real below this probability under chance."""


class Interval(NamedTuple):
    """A share of right answers with its 95 % confidence interval."""

    share: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{100 * self.share:5.1f} % ({100 * self.low:.1f} to {100 * self.high:.1f})"


def wilson_interval(right: int, count: int) -> Interval:
    """Returns the share ``right`` / ``count`` with Wilson's interval."""
    if not count:
        return Interval(0.0, 0.0, 1.0)
    share = right / count
    middle = (share + Z * Z / (2 * count)) / (1 + Z * Z / count)
    half = Z * math.sqrt(share * (1 - share) / count + Z * Z / (4 * count * count)) / (1 + Z * Z / count)
    return Interval(share, max(middle - half, 0.0), min(middle + half, 1.0))


class PairedDifference(NamedTuple):
    """How two runs differ over the same items.

    Args:
        worse: items that only the other run answers rightly; ``better``: those that only this run does.
        chance: probability under chance of a difference as large, in either direction.
    """

    worse: int
    better: int
    chance: float

    @property
    def is_below(self) -> bool:
        """True if this run is less accurate by more than chance explains."""
        return self.worse > self.better and self.chance < LIMIT


def paired_difference(ours: Mapping[str, bool], theirs: Mapping[str, bool]) -> PairedDifference:
    """Compares runs over the items that both have answered, by an exact test of the signs."""
    both = [name for name in ours if name in theirs]
    worse = sum(theirs[name] and not ours[name] for name in both)
    better = sum(ours[name] and not theirs[name] for name in both)
    count = worse + better
    tail = sum(math.comb(count, i) for i in range(min(worse, better) + 1)) / 2**count
    return PairedDifference(worse, better, min(2 * tail, 1.0))


@dataclass(frozen=True)
class AccuracyRun:
    """The results of one run: for each item whether its answer was right, and the answer."""

    model: str
    label: str
    seed: int
    right: Mapping[str, bool]
    answers: Mapping[str, str]

    def save(self, path: Path) -> None:
        """Writes the run for a later ``--baseline``."""
        try:
            path.write_text(json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        except OSError as error:
            raise StartupError(f"--save {path}: {error.strerror}.") from None


def load_run(path: Path, seed: int) -> AccuracyRun:
    """Reads a run that ``AccuracyRun.save`` wrote; raises StartupError if it is none, or one of another seed."""
    held = read_json(path)
    if held is None:
        raise StartupError(f"--baseline {path}: there is no such file; --save writes one.")
    right, answers = held.get("right"), held.get("answers")
    if not isinstance(right, dict) or not isinstance(answers, dict) or not all(type(v) is bool for v in right.values()):
        raise StartupError(f"--baseline {path} holds no run of check-accuracy; --save writes one.")
    if held.get("seed") != seed:
        raise StartupError(f"--baseline {path} has items of seed {held.get('seed')}; add --seed {held.get('seed')}.")
    return AccuracyRun(str(held.get("model")), str(held.get("label")), seed, right, answers)


class ScoreRow(NamedTuple):
    """The items of a kind and a size, and the shares that each run answers rightly; ``size`` 0: of all sizes."""

    kind: str
    size: int
    items: int
    shares: tuple[Interval, ...]


def score_rows(groups: Sequence[tuple[str, str, int]], runs: Sequence[AccuracyRun]) -> list[ScoreRow]:
    """Returns a row for each kind and size, for each kind if there are several sizes, and for all.

    ``groups``: (name, kind, size) of each item.
    """
    kinds, sizes = list(dict.fromkeys(k for _, k, _ in groups)), sorted({s for _, _, s in groups})
    keys = [(kind, size) for kind in kinds for size in (*sizes, *((0,) if len(sizes) > 1 else ()))]
    rows = []
    for kind, size in (*keys, *(("all", size) for size in sizes if len(sizes) > 1), ("all", 0)):
        names = [name for name, k, s in groups if kind in (k, "all") and size in (s, 0)]
        shares = tuple(_share_of(names, run) for run in runs)
        rows.append(ScoreRow(kind, size, len(names), shares))
    return rows


def _share_of(names: Sequence[str], run: AccuracyRun) -> Interval:
    held = [run.right[name] for name in names if name in run.right]
    return wilson_interval(sum(held), len(held))


def as_json(rows: Sequence[ScoreRow], labels: Sequence[str]) -> list[JsonObject]:
    """Returns the rows as JSON objects."""
    return [
        {"kind": row.kind, "size": row.size or None, "items": row.items}
        | {label: share._asdict() for label, share in zip(labels, row.shares, strict=True)}
        for row in rows
    ]
