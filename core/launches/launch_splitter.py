"""Splits a Step into launches, each with its bucket. Pure: all ranks split the same Step the same way."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from trencadis.core.bucket_lookup import Plan
from trencadis.core.buckets import LORA, POOL_ROWS, Bucket, Stage, ahead_variant, verify_variant, wide_variant
from trencadis.core.cross_attention_inputs import count_units, variant_of
from trencadis.core.device_shape_policy import Policy
from trencadis.core.request import MAX_LOGPROBS
from trencadis.core.shapes.rectangular_launches import RowNeed, split_rows
from trencadis.core.shapes.shape_need_recorder import NeedRecorder
from trencadis.core.step import BidirectionalSpan, ImageRows, Row, StateSlots, Step

HEAD_ROWS = 64
"""Rows of one SAMPLE launch for prompt_logprobs, which bounds the logits in memory."""


class TokenRange(NamedTuple):
    """Tokens [start, stop) of a row."""

    start: int
    stop: int


class RowPart(NamedTuple):
    """Tokens [start, stop) of row ``row`` of a Step."""

    row: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Launch:
    """One bucket and the indices of the Step's rows, images or resets that run in it.

    Args:
        ranges: the tokens of each row that this launch computes; empty: all of them. If several launches share a row,
            they run in order, so that the tokens of the earlier ones are context for the later ones.
    """

    bucket: Bucket
    items: tuple[int, ...]
    ranges: tuple[TokenRange, ...] = ()

    def parts(self, step: Step) -> list[RowPart]:
        """Returns the tokens of each row that a text launch computes."""
        ranges = self.ranges or tuple(TokenRange(0, len(step.rows[i].tokens)) for i in self.items)
        return [RowPart(i, *tokens) for i, tokens in zip(self.items, ranges, strict=True)]

    def tokens(self, step: Step) -> int:
        """Returns the number of real tokens of a text launch."""
        return sum(p.stop - p.start for p in self.parts(step))


def split_step(
    step: Step, plan: Plan, adapters: bool = False, needs: Sequence[RowNeed] | None = None
) -> tuple[Launch, ...]:
    """Returns the launches of ``step`` in device order: RESET, VISION, text. The runner adds SAMPLE (``head_bucket``)
    or POOL.

    A ragged launch also computes the persistent rows, which its items do not list. Rectangular launches are built from
    rows only, so the runner converts the persistent batch to plain rows before.

    Args:
        adapters: some persistent row has an adapter.
        needs: those of all rows where launches are rectangular; None: they are listed here.
    """
    launches = _resets(step, plan) if step.resets else []
    if step.images:
        launches.append(_vision(step, plan))
    if (step.rows or step.persistent_count) and plan.policy.mixed:
        if step.rows and not adapters:
            adapters = any(row.adapter for row in step.rows)
        bucket = _ragged_bucket(step, plan, LORA if adapters else "")
        if step.rows:
            bucket = _with_image_units(bucket, plan, step.rows)
        launches.append(Launch(bucket, tuple(range(len(step.rows)))))
    elif step.rows:
        launches += _rectangles(step, plan, list_row_needs(step) if needs is None else needs)
    return tuple(launches)


def _resets(step: Step, plan: Plan) -> list[Launch]:
    """Returns RESET launches of as many rows as the largest bucket holds."""
    count = len(step.resets)
    most = max(plan.sizes(Stage.RESET), default=count) or 1
    found = []
    for at in range(0, count, most):
        items = tuple(range(at, min(at + most, count)))
        found.append(Launch(plan.fit(Stage.RESET, (len(items),)), items))
    return found


def _vision(step: Step, plan: Plan) -> Launch:
    """Returns one launch for all images; ``ImagePacker`` has chosen images that fit."""
    need = sum(i.slots for i in step.images)
    return Launch(plan.fit(Stage.VISION, (need,), _vision_variant(step)), tuple(range(len(step.images))))


def _vision_variant(step: Step) -> str:
    """Returns the variant of the Step's VISION launch."""
    return LORA if any(image.adapter for image in step.images) else ""


def _ragged_bucket(step: Step, plan: Plan, variant: str) -> Bucket:
    """Returns the bucket of one ragged launch for all rows, prefill and decode mixed."""
    rows, tokens = step.persistent_count + len(step.rows), step.tokens
    if tokens == rows:
        return plan.fit(Stage.DECODE, (rows,), variant)
    if plan.drafts and not variant and max(len(row.tokens) for row in step.rows) <= plan.drafts + 1:
        verify = plan.find(Stage.VERIFY, (rows,), verify_variant(plan.drafts + 1))
        mixed = plan.find(Stage.PREFILL, (tokens, rows))
        cost = plan.policy.cost
        if verify is not None and (mixed is None or cost(verify) <= cost(mixed)):
            return verify
    return plan.fit(Stage.PREFILL, (tokens, rows), variant)


def is_drafted(row: Row) -> bool:
    """Returns True if the row verifies drafts."""
    return bool(row.samples) and row.samples[0].tokens_after > 0


def list_row_needs(step: Step) -> list[RowNeed]:
    """Returns the needs of the Step's rows, for ``split_step`` on a device with rectangular launches."""
    return [RowNeed(i, row.context, len(row.tokens), row.spans, is_drafted(row)) for i, row in enumerate(step.rows)]


def record_step(recorder: NeedRecorder, step: Step, needs: Sequence[RowNeed], adapters: bool = False) -> None:
    """Counts the needs of a Step.

    Args:
        needs: those of all rows (``list_row_needs``); ragged launches need none.
        adapters: some persistent row has an adapter. One row with an adapter makes all needs of the Step count to the
            variant for adapters; one image with an adapter, those of all its images.
    """
    variant = LORA if adapters or any(row.adapter for row in step.rows) else ""
    images, image_variant = [image.slots for image in step.images], _vision_variant(step)
    if recorder.plan.policy.mixed:
        if not any(map(is_drafted, step.rows)):
            rows = step.persistent_count + len(step.rows)
            recorder.count_ragged(step.tokens, rows, images, variant, image_variant)
        return
    recorder.count(needs, images, variant, image_variant)


def _rectangles(step: Step, plan: Plan, needs: Sequence[RowNeed]) -> list[Launch]:
    """Returns rectangular launches. The rows of a group may run in any order, so each group is split by cost alone."""
    found = []
    for group in _groups(step, plan.block_size):
        of_group = [needs[i] for i in group]
        for cut in (one for half in _split_by_adapter(of_group, step) for one in split_rows(half, plan)):
            items = tuple(p.row for p in cut.pieces)
            whole = all(p.start == 0 and p.stop == len(step.rows[p.row].tokens) for p in cut.pieces)
            bucket = _with_image_units(cut.bucket, plan, [step.rows[p.row] for p in cut.pieces], cut.pieces)
            if any(step.rows[p.row].adapter for p in cut.pieces):
                bucket = plan.fit(bucket.stage, bucket.dims, LORA)
            found.append(Launch(bucket, items, () if whole else tuple(TokenRange(p.start, p.stop) for p in cut.pieces)))
    return found


def _split_by_adapter(needs: list[RowNeed], step: Step) -> list[list[RowNeed]]:
    """Returns the rows as one list; as two if some verify drafts and others have adapters, since launches that verify
    have no variant for adapters.
    """
    with_adapter = [need for need in needs if step.rows[need.row].adapter]
    if not with_adapter or not any(need.drafted for need in needs):
        return [needs]
    return [[need for need in needs if not step.rows[need.row].adapter], with_adapter]


def _with_image_units(bucket: Bucket, plan: Plan, rows: Sequence[Row], pieces: Sequence[Any] = ()) -> Bucket:
    """Returns the variant of ``bucket`` that holds the images which the rows, or these pieces of them, attend to."""
    if not any(row.cross_attention.images for row in rows):
        return bucket
    cut = (row.cross_attention.restrict(p.start, p.stop) for row, p in zip(rows, pieces, strict=True))
    need = count_units(cut if pieces else (row.cross_attention for row in rows))
    return dataclasses.replace(bucket, variant=variant_of(need, plan.units)) if need else bucket


def _groups(step: Step, block_size: int) -> list[list[int]]:
    """Groups rows in step order; a row that reads a block which a decoding row of the group completes starts a new
    group.

    Prompts run first within a group. A full block enters the prefix cache when it is scheduled, so that a prompt of the
    same step may begin with a block that a decoding row is about to complete.
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
    """Returns the SAMPLE bucket of ``rows`` rows; ``full`` if any of them needs more than the argmax."""
    return plan.fit(Stage.SAMPLE, (rows,), "full" if full else "greedy")


def head_bucket(rows: int, full: bool, best: bool, plan: Plan, logprobs: bool = True, cold: bool = False) -> Bucket:
    """Returns the cheapest SAMPLE bucket of ``rows`` rows that covers everything they request.

    Args:
        full: True if any row is ``Sample.full``.
        best: True if all ``full`` rows are ``Sample.best``.
        logprobs: True if any row requests log-probabilities.
        cold: True if all ``full`` rows have temperature 0.
    """
    if full and best and plan.policy.masked_head:
        return plan.fit(Stage.SAMPLE, (rows,), "masked")
    if full and cold and not logprobs and plan.policy.penalised_head:
        return plan.fit(Stage.SAMPLE, (rows,), "penalised")
    if full and not logprobs and plan.policy.drawn_head:
        return plan.fit(Stage.SAMPLE, (rows,), "draw")
    return plan.fit(Stage.SAMPLE, (rows,), "full" if full else "greedy")


def ahead_bucket(rows: int, plan: Plan) -> Bucket:
    """Returns the SAMPLE bucket of ``rows`` rows, some of which have penalties and drafts before them."""
    return plan.fit(Stage.SAMPLE, (rows,), ahead_variant(plan.drafts) if plan.drafts else "full")


def score_rows(plan: Plan) -> int:
    """Returns the rows of one SAMPLE launch for prompt_logprobs, at most those of the largest planned bucket."""
    return min(HEAD_ROWS, max(plan.sizes(Stage.SAMPLE), default=HEAD_ROWS))


def list_wide_variants(vocab: int) -> dict[str, int]:
    """Returns the variants of SAMPLE that report more than MAX_LOGPROBS top ids, each with its number of ids.

    The numbers are powers of two and the whole vocabulary, so that a device compiles few variants.
    """
    sizes, size = [vocab], 2 * MAX_LOGPROBS
    while size < vocab:
        sizes.append(size)
        size *= 2
    return {wide_variant(size): size for size in sorted(sizes)}


def plan_wide_variants(vocab: int, most: int, policy: Policy) -> tuple[str, ...]:
    """Returns the variants of SAMPLE that a plan holds beside those which draw.

    Args:
        most: most top ids that a request may ask for (``EngineConfig.max_logprobs``); -1: the whole vocabulary.
    """
    if not policy.wide_head or 0 <= most <= MAX_LOGPROBS:
        return ()
    sizes = list_wide_variants(vocab)
    largest = min(size for size in sizes.values() if size >= (vocab if most < 0 else min(most, vocab)))
    return tuple(name for name, size in sizes.items() if size <= largest)


def wide_bucket(rows: int, wide: int, vocab: int, plan: Plan) -> Bucket:
    """Returns the SAMPLE bucket of ``rows`` rows that reports ``wide`` top ids, more than MAX_LOGPROBS."""
    variant = next(name for name, size in list_wide_variants(vocab).items() if size >= min(wide, vocab))
    return plan.fit(Stage.SAMPLE, (rows,), variant)


def pool_rows(plan: Plan) -> int:
    """Returns the rows of the largest POOL launch."""
    return max(plan.sizes(Stage.POOL), default=POOL_ROWS)


def part_of(row: Row, start: int, stop: int, block_size: int = 0) -> Row:
    """Returns ``row`` restricted to its tokens [start, stop); earlier tokens become context.

    If ``block_size`` is given, blocks after the last token are dropped. Samples stay with the row's last token.
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
        spans=_spans(row, start, stop),
        cross_attention=row.cross_attention.restrict(start, stop)
        if row.cross_attention.images
        else row.cross_attention,
        state=row.state if start == 0 or row.state is None else StateSlots(row.state.slot, row.state.slot),
    )


def _spans(row: Row, start: int, stop: int) -> tuple[BidirectionalSpan, ...]:
    """Returns the row's bidirectional spans inside [start, stop); a span is never split."""
    found = tuple(s for s in row.spans if s.start < stop and s.stop > start)
    assert all(start <= s.start and s.stop <= stop for s in found), "a span lies in one launch"
    return tuple(BidirectionalSpan(s.start - start, s.stop - start) for s in found)


def _images(images: Sequence[ImageRows], start: int, stop: int) -> tuple[ImageRows, ...]:
    found = []
    for image in images:
        first, last = max(image.start, start), min(image.start + len(image.rows), stop)
        if first < last:
            found.append(ImageRows(first - start, image.rows[first - image.start : last - image.start]))
    return tuple(found)
