"""Runs the draft model or the EAGLE-3 head of one rank.

A draft model reads what the target model reads, and continues texts when it is asked to. A head reads each step's
hidden states once its tokens are drawn, and drafts from them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trencadis.core.bucket_plan import Plan
from trencadis.core.buckets import Bucket, Stage
from trencadis.core.checkpoint.model_config import ModelConfig
from trencadis.core.device.backend import Backend, Body
from trencadis.core.graphs.graph_manager import GraphManager
from trencadis.core.launches import host_inputs as host
from trencadis.core.launches.launch_splitter import sample_bucket
from trencadis.core.launches.persistent_tensors import kv_cache, sampler_state
from trencadis.core.models.eagle3 import Eagle3Head, HeadState
from trencadis.core.models.interface import Model, Persistent
from trencadis.core.shared_constants import RESERVED_ROWS
from trencadis.core.step import DraftRow, HeadOutput, Int32, Row, Sample, Step, StepInputs


def allocate_draft(model: Model, backend: Backend, target: Persistent, blocks: int, block_size: int) -> Persistent:
    """Allocates a draft model's tensors: KV of its own in as many blocks, hidden rows, and state that nothing reads.

    Sampled tokens of the target are read from the target's state.
    """
    text = model.config.text
    state = sampler_state(model.config, backend, 0)
    return Persistent(
        kv=kv_cache(model.config, backend, blocks, block_size),
        hidden=backend.zeros((len(target.hidden), text.width), backend.dtype),
        arena=backend.zeros((RESERVED_ROWS, text.width), backend.dtype),
        state=state._replace(last=target.state.last),
    )


class DraftRunner:
    """A draft model with KV of its own over the target's block tables.

    It computes every token that the target computes, in the same step, so that a block holds the keys of both.
    """

    def __init__(self, backend: Backend, model: Model, plan: Plan) -> None:
        self.backend, self.model, self.plan = backend, model, plan
        bodies: dict[str, Body] = {
            "text": model.text,
            "greedy": lambda t: model.head(t, False),
            "full": lambda t: model.head(t, True),
        }
        self.graphs = GraphManager(backend, bodies, plan)
        self._plain = model.config.text.mrope_section is None
        """True if the model takes a token's index as its position, also after images."""

    def read(self, bucket: Bucket, inputs: StepInputs) -> None:
        """Computes the tokens of one of the target's text launches, before the step samples.

        Images are read as the ids of their placeholders.
        """
        positions = inputs.positions
        if self._plain:
            own = host.own_positions(inputs.row_start, inputs.context)
            positions = np.broadcast_to(own, (3, len(own))).astype(np.int32)
        own_rows = bool(inputs.image_row.any() or inputs.adapter.any())
        if positions is not inputs.positions or own_rows or inputs.upto is not None:
            inputs = StepInputs(
                tokens=inputs.tokens,
                from_slot=inputs.from_slot,
                positions=positions,
                image_row=np.zeros_like(inputs.image_row),
                out_row=inputs.out_row,
                row_start=inputs.row_start,
                context=inputs.context,
                blocks=inputs.blocks,
                slot=inputs.slot,
                adapter=np.zeros_like(inputs.slot),
                table=inputs.table,
                last=inputs.last,
            )
        self.graphs.run(bucket, inputs, len(inputs.tokens))

    def propose(self, rows: Sequence[DraftRow]) -> list[tuple[int, ...]]:
        """Returns the drafts of each row, one after another; every launch continues all rows that need more."""
        found: list[list[int]] = [[] for _ in rows]
        for place in range(max(len(row.samples) for row in rows)):
            live = [i for i, row in enumerate(rows) if len(row.samples) > place]
            launched = [self._row_at(rows[i], place, found[i]) for i in live]
            inputs = host.text_inputs(launched)
            self.graphs.run(self.plan.fit(Stage.DECODE, (len(live),)), inputs, len(live))
            samples = [host.SampleRow(at, 0, rows[i].samples[place]) for at, i in enumerate(live, 1)]
            bucket = sample_bucket(len(live), any(one.sample.full for one in samples), self.plan)
            out, _ = self.graphs.run(bucket, host.head_inputs(samples, self.model.config.text.vocab), len(live))
            tokens = self.backend.fetch(out, len(live)).result().token.tolist()
            for i, token in zip(live, tokens, strict=True):
                found[i].append(token)
        return [tuple(ids) for ids in found]

    def _row_at(self, row: DraftRow, place: int, drafts: Sequence[int]) -> Row:
        """Returns the row that computes the token before draft number ``place``."""
        context = row.context + place
        positions = np.full((3, 1), context, np.int32) if self._plain else row.positions[:, place : place + 1]
        return Row(0, 0, context, (drafts[-1] if place else row.token,), row.blocks, positions)


def allocate_head(
    model: ModelConfig, backend: Backend, target: Persistent, blocks: int, block_size: int
) -> HeadState:  # fmt: skip
    """Allocates the tensors of a head, with KV in as many blocks as the target's; ``model``: its sizes."""
    (kv,) = kv_cache(model, backend, blocks, block_size)
    rows = (len(target.hidden), model.text.hidden)
    return HeadState(kv, backend.zeros(rows, backend.dtype), backend.zeros(rows, backend.dtype))


class EagleRunner:
    """A head beside its target model on one rank.

    Its keys at a token are made of that token's hidden states and of the token after it, so that it reads a step when
    this is known.
    """

    def __init__(self, backend: Backend, head: Eagle3Head, plan: Plan) -> None:
        self.backend, self.head, self.plan = backend, head, plan
        self._read = GraphManager(backend, {"text": head.read}, plan)
        self._draft = GraphManager(backend, {"text": head.draft, **head.bodies()}, plan)
        self._plain = head.config.mrope_section is None
        self._rows: dict[int, int] = {}
        """Key of a sequence -> the row of its last read token."""

    def read(self, step: Step, persistent: Sequence[int], inputs: StepInputs, samples: dict[int, int],
             output: HeadOutput | None) -> None:  # fmt: skip
        """Reads the tokens of a step.

        Args:
            persistent: keys of the persistent rows; ``samples``: row in ``output`` of each other sequence.
            inputs: of the step's launch of the target.
        """
        drawn = None if output is None else output.token
        following = np.zeros(len(inputs.tokens), np.int32)
        self._rows = {}
        for at, key in enumerate(persistent):
            if drawn is not None:
                following[at] = drawn[at]
                self._rows[key] = at + 1
        for index, row in enumerate(step.rows, len(persistent)):
            start, stop = int(inputs.row_start[index]), int(inputs.row_start[index + 1])
            first = samples.get(row.key) if row.samples else None
            tokens = None if drawn is None or first is None else drawn[first:]
            following[start:stop], accepted = follow(row, tokens)
            if tokens is not None:
                self._rows[row.key] = stop - (row.samples[0].tokens_after - accepted)
        count = len(inputs.tokens)
        number = np.arange(1, count + 1, dtype=np.int32)
        read = self._inputs(inputs, following, number, number)
        stage, need = (Stage.DECODE, (count,)) if count == len(inputs.context) else (
            Stage.PREFILL, (count, len(inputs.context)))  # fmt: skip
        self._read.run(self.plan.fit(stage, need), read, count)

    def _inputs(self, x: StepInputs, tokens: Int32, source: Int32, out: Int32) -> StepInputs:
        """Returns the inputs of a launch of the head over the rows of ``x``."""
        positions = x.positions
        if self._plain:
            own = host.own_positions(x.row_start, x.context)
            positions = np.broadcast_to(own, (3, len(own))).astype(np.int32)
        return StepInputs(
            tokens=tokens, from_slot=np.zeros_like(tokens), positions=positions, image_row=source, out_row=out,
            row_start=x.row_start, context=x.context, blocks=x.blocks, slot=np.zeros_like(x.slot),
            adapter=np.zeros_like(x.slot), table=x.table,
        )  # fmt: skip

    def propose(self, rows: Sequence[DraftRow]) -> list[tuple[int, ...]]:
        """Returns the drafts of each row; none of a sequence that the last step has not computed."""
        found: list[list[int]] = [[] for _ in rows]
        at = {i: self._rows[row.key] for i, row in enumerate(rows) if row.key in self._rows}
        for place in range(max(len(row.samples) for row in rows)):
            live = [i for i in at if len(rows[i].samples) > place]
            if not live:
                break
            if place:
                launched = [self._row_at(rows[i], place - 1, found[i][-1]) for i in live]
                inputs, number = host.text_inputs(launched), np.arange(1, len(live) + 1, dtype=np.int32)
                source = np.fromiter((at[i] for i in live), np.int32, len(live))
                inputs = self._inputs(inputs, inputs.tokens, source, number)
                self._draft.run(self.plan.fit(Stage.DECODE, (len(live),)), inputs, len(live))
                at = dict(zip(live, number.tolist(), strict=True))
            samples = [host.SampleRow(at[i], 0, Sample()) for i in live]
            bucket = self.plan.fit(Stage.SAMPLE, (len(live),), "greedy")
            out, _ = self._draft.run(bucket, host.head_inputs(samples, self.head.vocab), len(live))
            for i, token in zip(live, self.backend.fetch(out, len(live)).result().token.tolist(), strict=True):
                found[i].append(token)
        self._rows = {}
        return [tuple(ids) for ids in found]

    @staticmethod
    def _row_at(row: DraftRow, place: int, token: int) -> Row:
        context = row.context + place
        return Row(row.key, 0, context, (token,), row.blocks, row.positions[:, place : place + 1])


def follow(row: Row, drawn: Int32 | None) -> tuple[list[int], int]:
    """Returns the id after each token of a row, and how many of its drafts were accepted.

    ``drawn``: ids that were drawn from the row's first draw on; None: it has none. Ids after a rejected draft do not
    matter.
    """
    if drawn is None:
        return [*row.tokens[1:], max(row.following, 0)], 0
    drafts = row.samples[0].tokens_after
    known = len(row.tokens) - drafts
    ids = [*row.tokens[1:known], *drawn[: drafts + 1].tolist()]
    accepted = 0
    while accepted < drafts and row.tokens[known + accepted] == int(drawn[accepted]):
        accepted += 1
    return ids, accepted
