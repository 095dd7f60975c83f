"""Builds the host arrays of a launch from the Step. numpy only; ``Backend.fill`` pads and copies them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import NamedTuple, Protocol

import numpy as np

from trencadis.core.cross_attention_inputs import make_cross_attention_inputs
from trencadis.core.launch_inputs import HeadInputs, PoolInputs, ResetInputs, StepInputs, VisionInputs
from trencadis.core.launches.rank_input_batch import FLOATS
from trencadis.core.request import MAX_BIAS, NO_LOGPROB
from trencadis.core.step import PENDING, Encode, Int32, Reset, Row, Sample, UInt8
from trencadis.core.vision_config import SlotForm


def text_inputs(rows: Sequence[Row], first_out: Sequence[int] = ()) -> StepInputs:
    """Builds the inputs of one text launch: the rows concatenated.

    Args:
        first_out: for each row, the index in the persistent hidden tensor at which its first token's hidden state is
            stored; those of its other tokens follow. Empty: all of them from index 1 on, row by row.
    """
    lengths = [len(r.tokens) for r in rows]
    n = sum(lengths)
    tokens = np.fromiter((t for r in rows for t in r.tokens), np.int32, n)
    slots = np.fromiter((r.slot for r in rows), np.int32, len(rows))
    pending = tokens == PENDING
    from_slot = np.where(pending, np.repeat(slots, lengths), 0).astype(np.int32)
    tokens[pending] = 0
    row_start = np.zeros(len(rows) + 1, np.int32)
    np.cumsum(lengths, out=row_start[1:])
    first = np.asarray(first_out, np.int32) if len(first_out) else row_start[:-1] + 1
    blocks = np.zeros((len(rows), max(len(r.blocks) for r in rows)), np.int32)
    for i, row in enumerate(rows):
        blocks[i, : len(row.blocks)] = row.blocks
    return StepInputs(
        tokens=tokens,
        from_slot=from_slot,
        positions=np.concatenate([r.positions for r in rows], axis=1, dtype=np.int32),
        image_row=_image_rows(rows, row_start) if any(r.images for r in rows) else np.zeros(n, np.int32),
        out_row=(np.repeat(first - row_start[:-1], lengths) + np.arange(n)).astype(np.int32),
        row_start=row_start,
        context=np.fromiter((r.context for r in rows), np.int32, len(rows)),
        blocks=blocks,
        slot=slots,
        adapter=np.fromiter((r.adapter for r in rows), np.int32, len(rows)),
        upto=_upto(rows, row_start) if any(r.spans for r in rows) else None,
        cross_attention=make_cross_attention_inputs([r.cross_attention for r in rows], lengths)
        if any(r.cross_attention.images for r in rows)
        else None,
        states=None if rows[0].state is None else np.array([r.state for r in rows], np.int32).T,
    )


def _image_rows(rows: Sequence[Row], row_start: Int32) -> Int32:
    """Returns int32 [n]: the arena row of each image token, 0 for other tokens."""
    found = np.zeros(int(row_start[-1]), np.int32)
    for first, row in zip(row_start.tolist(), rows, strict=False):
        for image in row.images:
            found[first + image.start : first + image.start + len(image.rows)] = image.rows
    return found


def _upto(rows: Sequence[Row], row_start: Int32) -> Int32:
    """Returns int32 [n]: for each token, the sequence index of the last key it attends to: its own, or the end of
    its span.
    """
    upto = own_positions(row_start, np.fromiter((r.context for r in rows), np.int32, len(rows)))
    for i, row in enumerate(rows):
        for span in row.spans:
            first = int(row_start[i])
            upto[first + span.start : first + span.stop] = row.context + span.stop - 1
    return upto


def own_positions(row_start: Int32, context: Int32) -> Int32:
    """Returns int32 [n]: each token's index in its sequence; the arguments are fields of ``StepInputs``."""
    lengths = np.diff(row_start[: len(context) + 1])
    within = np.arange(int(lengths.sum()), dtype=np.int32) - np.repeat(row_start[: len(context)], lengths)
    return (np.repeat(context, lengths) + within).astype(np.int32)


def token_adapters(inputs: StepInputs) -> Int32:
    """Returns int32 [n]: the slot of each token's adapter, 0: none."""
    lengths = np.diff(inputs.row_start[: len(inputs.context) + 1])
    return np.repeat(inputs.adapter, lengths).astype(np.int32, copy=False)


class SampleRow(NamedTuple):
    """One row of SAMPLE: its row of the persistent hidden tensor, its sampler slot, how to sample, and the drafts of
    its sequence that come before it.
    """

    hidden_row: int
    slot: int
    sample: Sample
    ahead: tuple[int, ...] = ()


class FillMask(Protocol):
    """Writes masks of rows that have a handle."""

    def __call__(self, handle: int, row: UInt8, banned: Sequence[int], ahead: Sequence[int] = ()) -> None:
        """Writes the mask of the handle's next token, after the drafts ``ahead``, to ``row``, uint8 [ceil(vocabulary /
        8)], without the banned ids.
        """
        ...


def head_inputs(rows: Sequence[SampleRow], vocab: int, fill: FillMask | None = None) -> HeadInputs:
    """Builds the inputs of one SAMPLE launch; ``fill`` writes the masks of rows that have a handle."""
    samples = [r.sample for r in rows]
    masks, mask_row = np.full((1, -(-vocab // 8)), 255, np.uint8), np.zeros(len(rows), np.int32)
    if any(s.banned or s.handle for s in samples):
        masks, mask_row = _masks(rows, vocab, fill)
    made = HeadInputs(
        hidden_row=np.fromiter((r.hidden_row for r in rows), np.int32, len(rows)),
        slot=np.fromiter((r.slot for r in rows), np.int32, len(rows)),
        top_k=np.fromiter((s.top_k for s in samples), np.int32, len(samples)),
        target=np.fromiter((-1 if s.logprobs >= 0 else NO_LOGPROB for s in samples), np.int32, len(samples)),
        mask_row=mask_row,
        masks=masks,
        place=None,
        ahead=None,
        **{name: np.fromiter((getattr(s, name) for s in samples), np.float32, len(samples)) for name in FLOATS},
    )
    if any(r.ahead and counts_matter(r.sample) for r in rows):
        made.place, made.ahead = _drafts_ahead(rows)
    return made


def counts_matter(sample: Sample) -> bool:
    """Returns True if the ids that were sampled before change how the next one is sampled."""
    return bool(sample.presence or sample.frequency or sample.repetition != 1.0)


def _drafts_ahead(rows: Sequence[SampleRow]) -> tuple[Int32, Int32]:
    """Returns ``HeadInputs.place`` and ``HeadInputs.ahead``; rows without penalties need neither."""
    ahead = [r.ahead if counts_matter(r.sample) else () for r in rows]
    table = np.full((len(rows), max(map(len, ahead))), -1, np.int32)
    for i, ids in enumerate(ahead):
        table[i, : len(ids)] = ids
    return np.fromiter(map(len, ahead), np.int32, len(rows)), table


JOINED_APART = ("masks", "place", "ahead")


def join_head_inputs(first: HeadInputs, then: HeadInputs) -> HeadInputs:
    """Concatenates two inputs; the masks and drafts are those of ``then``, so rows of ``first`` must have none."""
    names = [f.name for f in fields(HeadInputs) if f.name not in JOINED_APART]
    made = HeadInputs(**{n: np.concatenate([getattr(first, n), getattr(then, n)]) for n in names}, masks=then.masks)
    if then.place is not None and then.ahead is not None:
        count = len(first.slot)
        made.place = np.concatenate([np.zeros(count, np.int32), then.place])
        made.ahead = np.concatenate([np.full((count, then.ahead.shape[1]), -1, np.int32), then.ahead])
    return made


def target_inputs(hidden_rows: Sequence[int], targets: Sequence[int], vocab: int) -> HeadInputs:
    """Builds a SAMPLE launch that scores given ids instead of sampling; it updates only the sink's sampler state."""
    inputs = head_inputs([SampleRow(row, 0, Sample(full=True)) for row in hidden_rows], vocab)
    inputs.target = np.asarray(targets, np.int32)
    return inputs


def _masks(
    sample_rows: Sequence[SampleRow], vocab: int, fill: FillMask | None
) -> tuple[np.ndarray[tuple[int, int], np.dtype[np.uint8]], np.ndarray[tuple[int], np.dtype[np.int32]]]:
    """Returns bit masks of allowed ids, uint8 [m, ceil(vocab / 8)] with row 0 all ones, and the mask row of each
    sample, int32.

    ``fill`` writes one additional mask for each sample that has a handle.
    """
    samples = [r.sample for r in sample_rows]
    rows: dict[tuple[int, ...], int] = {(): 0}
    early = (() if s.handle else s.banned for s in samples)
    index = np.fromiter((rows.setdefault(banned, len(rows)) for banned in early), np.int32, len(samples))
    masks = np.full((len(rows), -(-vocab // 8)), 255, np.uint8)
    for banned, row in rows.items():
        for token in banned:
            masks[row, token >> 3] &= 255 ^ (1 << (token & 7))
    return (masks, index) if fill is None else _late_masks(sample_rows, masks, index, fill)


def _late_masks(
    rows: Sequence[SampleRow],
    masks: np.ndarray[tuple[int, int], np.dtype[np.uint8]],
    mask_row: np.ndarray[tuple[int], np.dtype[np.int32]],
    fill: FillMask,
) -> tuple[np.ndarray[tuple[int, int], np.dtype[np.uint8]], np.ndarray[tuple[int], np.dtype[np.int32]]]:
    """Returns ``masks`` with one additional mask for each row that has a handle, and the mask rows."""
    late = [i for i, r in enumerate(rows) if r.sample.handle]
    more = np.empty((len(late), masks.shape[1]), np.uint8)
    for number, i in enumerate(late):
        _, _, sample, ahead = rows[i]
        if ahead:
            fill(sample.handle, more[number], sample.banned, ahead)
        else:
            fill(sample.handle, more[number], sample.banned)
        mask_row[i] = len(masks) + number
    return np.concatenate([masks, more]), mask_row


def padding_vision_inputs(slot: SlotForm) -> VisionInputs:
    """Builds the inputs of a VISION launch that holds only padding."""
    ids, pixels = np.zeros(0, np.int32), np.zeros((0, slot.values), np.uint8)
    made = VisionInputs(pixels, np.zeros((0, 2), np.int32), ids, ids, ids)
    if slot.position_neighbours:
        made.position_rows, made.position_weights = (
            np.zeros((0, slot.position_neighbours), np.int32),
            np.zeros((0, slot.position_neighbours), np.float32),
        )
    made.padding_window = ids if slot.padding_windows else None
    return made


def add_image_adapters(made: VisionInputs, images: Sequence[Encode]) -> VisionInputs:
    """Adds to the packed inputs of ``images`` which adapter each slot and each cell has."""
    slots, size = np.zeros(len(made.pixels), np.int32), 1 + max((int(i.rows.max()) for i in images), default=0)
    cells, start = np.zeros(max(size, int(made.rows.max(initial=0)) + 1), np.int32), 0
    for image in images:
        slots[start : start + image.slots] = cells[image.rows] = image.adapter
        start += image.slots
    made.adapter, made.cell_adapter = slots, cells[made.rows]
    return made


def pool_inputs(hidden_rows: Sequence[int], groups: Sequence[int]) -> PoolInputs:
    """Builds the inputs of one POOL launch; ``groups``: each row's group, counted from 1."""
    return PoolInputs(np.asarray(hidden_rows, np.int32), np.asarray(groups, np.int32))


def reset_inputs(resets: Sequence[Reset], vocab: int) -> ResetInputs:
    """Builds the inputs of one RESET launch: whole rows of sampler state."""
    r = len(resets)
    counts = np.zeros((r, vocab), np.int32)
    prompt_mask = np.zeros((r, -(-vocab // 8) * 8), bool)
    bias_id = np.zeros((r, MAX_BIAS), np.int32)
    bias_value = np.zeros((r, MAX_BIAS), np.float32)
    for i, reset in enumerate(resets):
        np.add.at(counts[i], np.asarray(reset.output, np.int64), 1)
        ids = np.asarray(reset.prompt, np.int64)
        prompt_mask[i, ids[ids < vocab]] = True  # others are never sampled
        for j, bias in enumerate(b for b in reset.bias if b.value):
            bias_id[i, j], bias_value[i, j] = bias
    return ResetInputs(
        slot=np.fromiter((x.slot for x in resets), np.int32, r),
        counts=counts,
        prompt_mask=np.packbits(prompt_mask, axis=1, bitorder="little"),
        bias_id=bias_id,
        bias_value=bias_value,
    )
