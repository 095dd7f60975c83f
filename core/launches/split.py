"""Cuts a Step into launches, each naming its bucket. Pure: all ranks run it on the same Step and agree."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from trencadis.core.buckets import Bucket, Plan, Stage
from trencadis.core.shapes.rectangles import Need, cut_rows
from trencadis.core.step import ImageRows, Row, Step

HEAD_ROWS = 64
"""Rows of one SAMPLE launch over prompt_logprobs: bounds the logits that exist at a time."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One bucket and the indices of what runs in it: rows of the Step, or its images, or its resets.

    Args:
        ranges: of each row the tokens [start, stop) that this launch computes; empty: all of them. A row cut over
            several launches is computed in their order, so a later launch's context holds the earlier one's tokens.
    """

    bucket: Bucket
    items: tuple[int, ...]
    ranges: tuple[tuple[int, int], ...] = ()

    def parts(self, step: Step) -> list[tuple[int, int, int]]:
        """(row, start, stop) of a text launch."""
        spans = self.ranges or tuple((0, len(step.rows[i].tokens)) for i in self.items)
        return [(i, start, stop) for i, (start, stop) in zip(self.items, spans, strict=True)]

    def tokens(self, step: Step) -> int:
        """Real tokens of a text launch."""
        return sum(stop - start for _, start, stop in self.parts(step))


def split(step: Step, plan: Plan) -> tuple[Launch, ...]:
    """Launches of ``step`` in device order: RESET, VISION, text. SAMPLE follows by ``sample_bucket``."""
    launches = [*_resets(step, plan), *_vision(step, plan)]
    if step.rows and plan.policy.mixed:
        launches.append(Launch(_ragged(step, plan), tuple(range(len(step.rows)))))
    elif step.rows:
        launches += _rectangles(step, plan)
    return tuple(launches)


def _resets(step: Step, plan: Plan) -> list[Launch]:
    """RESET takes as many rows as its largest bucket has."""
    count = len(step.resets)
    most = max(plan.sizes(Stage.RESET), default=count) or 1
    found = []
    for at in range(0, count, most):
        items = tuple(range(at, min(at + most, count)))
        found.append(Launch(plan.fit(Stage.RESET, (len(items),)), items))
    return found


def _vision(step: Step, plan: Plan) -> list[Launch]:
    """One launch: ``Packer`` has chosen images that belong together."""
    if not step.images:
        return []
    need = sum(i.slots for i in step.images)
    return [Launch(plan.fit(Stage.VISION, (need,)), tuple(range(len(step.images))))]


def _ragged(step: Step, plan: Plan) -> Bucket:
    """One ragged launch for all rows, prefill and decode mixed."""
    rows = len(step.rows)
    if step.tokens == rows:
        return plan.fit(Stage.DECODE, (rows,))
    return plan.fit(Stage.PREFILL, (step.tokens, rows))


def _rectangles(step: Step, plan: Plan) -> list[Launch]:
    """Rows in groups that may run in any order inside, each group cut by cost."""
    found = []
    for group in _groups(step, plan.block_size):
        for cut in cut_rows([Need(i, step.rows[i].context, len(step.rows[i].tokens)) for i in group], plan):
            items = tuple(p.row for p in cut.pieces)
            whole = all(p.start == 0 and p.stop == len(step.rows[p.row].tokens) for p in cut.pieces)
            found.append(Launch(cut.bucket, items, () if whole else tuple((p.start, p.stop) for p in cut.pieces)))
    return found


def _groups(step: Step, block_size: int) -> list[list[int]]:
    """Rows in step order, a new group where one reads a block that an earlier row of the group writes too late.

    A full block is published as soon as it is scheduled, so a prompt may begin in the same step with a block that a
    decoding row completes there; within a group prompts run first.
    """
    groups: list[list[int]] = [[]]
    late: set[int] = set()
    for i, row in enumerate(step.rows):
        end = row.context + len(row.tokens)
        if len(row.tokens) > 1:
            read = row.blocks[: -(-row.context // block_size)]
            if not late.isdisjoint(read):
                groups.append([])
                late = set()
        else:
            late.update(row.blocks[row.context // block_size : -(-end // block_size)])
        groups[-1].append(i)
    return groups


def sample_bucket(rows: int, full: bool, plan: Plan) -> Bucket:
    """The SAMPLE bucket of ``rows`` rows; ``full`` where any of them asks for more than the argmax."""
    return plan.fit(Stage.SAMPLE, (rows,), "full" if full else "greedy")


def score_rows(plan: Plan) -> int:
    """Rows of one SAMPLE launch over prompt_logprobs: never more than the plan holds."""
    return min(HEAD_ROWS, max(plan.sizes(Stage.SAMPLE), default=HEAD_ROWS))


def part_of(row: Row, start: int, stop: int, block_size: int = 0) -> Row:
    """``row`` restricted to its tokens [start, stop), as a launch of their own sees it.

    Blocks are cut to what the part can reach where ``block_size`` is given; draws stay with the last token.
    """
    if start == 0 and stop == len(row.tokens):
        return row
    reach = -(-(row.context + stop) // block_size) if block_size else len(row.blocks)
    return dataclasses.replace(
        row,
        context=row.context + start,
        tokens=row.tokens[start:stop],
        blocks=row.blocks[:reach],
        positions=row.positions[:, start:stop],
        images=_images(row.images, start, stop),
        samples=row.samples if stop == len(row.tokens) else (),
        targets=None if row.targets is None else row.targets[start:stop],
    )


def _images(images: Sequence[ImageRows], start: int, stop: int) -> tuple[ImageRows, ...]:
    found = []
    for image in images:
        first, last = max(image.start, start), min(image.start + len(image.rows), stop)
        if first < last:
            found.append(ImageRows(first - start, image.rows[first - image.start : last - image.start]))
    return tuple(found)
