"""Runs the draft model or the EAGLE-3 head of one rank.

A draft model reads what the target model reads, and continues texts when it is asked to. A head reads the states that a
step leaves once its tokens are drawn, and drafts from them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from trencadis.core.bucket_lookup import Plan
from trencadis.core.buckets import LORA, Bucket, drafting_bucket
from trencadis.core.device.backend import HeadTensorsOut, Inputs, Pending
from trencadis.core.graphs.graph_manager import GraphManager
from trencadis.core.launch_inputs import StepInputs
from trencadis.core.launches import host_inputs as host
from trencadis.core.launches.draft_loading import DraftingModel, list_bodies
from trencadis.core.launches.launch_splitter import sample_bucket, split_step
from trencadis.core.models.decoder import Decoder
from trencadis.core.models.eagle3 import FROM_TARGET, Eagle3Head
from trencadis.core.step import DraftRow, Int32, Row, Sample, Step
from trencadis.core.step_output import HeadOutput, StepStats


class DraftLaunches:
    """The launches of what drafts.

    Args:
        graphs: programs of the whole plan, which has buckets for it; None: every size is a bucket.
    """

    def __init__(self, model: DraftingModel, plan: Plan, graphs: GraphManager | None = None) -> None:
        self.backend, self.plan = model.backend, plan
        self._planned, self._stats = graphs is not None, list[StepStats]()
        self.graphs = graphs or GraphManager(model.backend, list_bodies(model), plan)
        self.plain = model.config.text.mrope_section is None
        """True if the model takes a token's index as its position, also after images."""

    def positions_of(self, inputs: StepInputs) -> Int32:
        """Returns int32 [3, n]: rotary positions for the model of the tokens of a launch of the target."""
        if not self.plain:
            return inputs.positions
        own = host.own_positions(inputs.row_start, inputs.context)
        return np.broadcast_to(own, (3, len(own))).astype(np.int32)

    def row_at(self, row: DraftRow, place: int, token: int) -> Row:
        """Returns the row of one token that follows ``place`` others of a row of drafts."""
        context = row.context + place
        positions = np.full((3, 1), context, np.int32) if self.plain else row.positions[:, place : place + 1]
        return Row(row.key, 0, context, (token,), row.blocks, positions)

    def run(self, bucket: Bucket, inputs: Inputs, real: int) -> HeadTensorsOut | None:
        """Runs a launch that the target would run in ``bucket``; returns the outputs of SAMPLE."""
        if self._planned:
            own = drafting_bucket(bucket)
            bucket = self.plan.fit(own.stage, own.dims, own.variant)
        out: HeadTensorsOut | None
        out, stats = self.graphs.run(bucket, inputs, real)
        if self._planned:
            self._stats.append(stats)
        return out

    def sample(self, samples: Sequence[host.SampleRow], vocab: int) -> list[int]:
        """Returns the id of each row of SAMPLE."""
        count, full = len(samples), any(one.sample.full for one in samples)
        out = self.run(sample_bucket(count, full, self.plan), host.head_inputs(samples, vocab), count)
        assert out is not None
        tokens: list[int] = self.backend.fetch(out, count).result().token.tolist()
        return tokens

    def take_stats(self) -> list[StepStats]:
        """Returns what is known of the launches since the last call, on devices with planned shapes."""
        found, self._stats = self._stats, []
        return found


class DraftRunner:
    """A draft model with KV of its own over the target's block tables.

    It computes every token that the target computes, in the same step, so that a block holds the keys of both.

    Args:
        graphs: as for ``DraftLaunches``.
    """

    def __init__(self, model: Decoder, plan: Plan, graphs: GraphManager | None = None) -> None:
        self.model, self.plan = model, plan
        self.launches = DraftLaunches(model, plan, graphs)

    def read(self, bucket: Bucket, inputs: StepInputs) -> list[StepStats]:
        """Computes the tokens of one of the target's text launches, before the step samples.

        Images are read as the ids of their placeholders. Returns what is known of the launches since the last call, on
        devices with planned shapes.
        """
        positions = self.launches.positions_of(inputs)
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
        if bucket.variant == LORA:  # the draft model has no adapters
            bucket = dataclasses.replace(bucket, variant="")
        self.launches.run(bucket, inputs, len(inputs.tokens))
        return self.launches.take_stats()

    def propose(self, rows: Sequence[DraftRow]) -> list[tuple[int, ...]]:
        """Returns the drafts of each row, one after another; every launch continues all rows that need more."""
        found: list[list[int]] = [[] for _ in rows]
        for place in range(max(len(row.samples) for row in rows)):
            live = [i for i, row in enumerate(rows) if len(row.samples) > place]
            tokens = [found[i][-1] if place else rows[i].token for i in live]
            self._compute([self.launches.row_at(rows[i], place, t) for i, t in zip(live, tokens, strict=True)])
            samples = [host.SampleRow(at, 0, rows[i].samples[place]) for at, i in enumerate(live, 1)]
            for i, token in zip(live, self.launches.sample(samples, self.model.config.text.vocab), strict=True):
                found[i].append(token)
        return [tuple(ids) for ids in found]

    def _compute(self, rows: Sequence[Row]) -> None:
        """Computes rows of one token; the hidden row of the first is 1, those of the others follow."""
        for launch in split_step(Step(0, tuple(rows)), self.plan):
            inputs = host.text_inputs([rows[i] for i in launch.items], [i + 1 for i in launch.items])
            self.launches.run(launch.bucket, inputs, len(inputs.tokens))


class EagleRunner:
    """A head beside its target model on one rank.

    Its keys at a token are made of that token's hidden states and of the token after it, so that it reads a step when
    this is drawn. A token that follows no drafts is read from its sampler slot; what follows drafts depends on how many
    of them were drawn, so that the host waits for them.

    Args:
        graphs: as for ``DraftLaunches``.
    """

    def __init__(self, head: Eagle3Head, plan: Plan, graphs: GraphManager | None = None) -> None:
        self.head, self.plan = head, plan
        self.launches = DraftLaunches(head, plan, graphs)
        self._rows: dict[int, int] = {}
        """Key of a sequence -> the row of its last read token in the head's tensors."""

    def read(self, step: Step, persistent: Sequence[int], launched: Sequence[tuple[Bucket, StepInputs]],
             samples: dict[int, int], output: Pending[HeadOutput] | None) -> list[StepStats]:  # fmt: skip
        """Reads the tokens of a step; returns what is known of the launches, on devices with planned shapes.

        Args:
            persistent: keys of the persistent rows; ``samples``: row in ``output`` of each other sequence.
            launched: the step's launches of the target.
        """
        following, slots = self._follow_rows(step, persistent, launched[0][1].slot, samples, output)
        for bucket, x in launched:
            if bucket.variant == LORA:  # the head has no adapters
                bucket = dataclasses.replace(bucket, variant="")
            read = self._inputs(x, following[x.out_row], slots[x.out_row], x.out_row + np.int32(FROM_TARGET))
            self.launches.run(bucket, read, len(x.tokens))
        return self.launches.take_stats()

    def _follow_rows(
        self, step: Step, persistent: Sequence[int], slot: Int32, samples: dict[int, int],
        output: Pending[HeadOutput] | None,
    ) -> tuple[Int32, Int32]:  # fmt: skip
        """Returns the id that follows each token of a step, by the token's number from 1 on, and the sampler slot that
        holds it, or 0.
        """
        drafted = any(row.samples and row.samples[0].tokens_after for row in step.rows)
        drawn = output.result().token if output is not None and drafted else None
        end = len(persistent)
        count = end + sum(len(row.tokens) for row in step.rows)
        following, slots = np.zeros(count + 1, np.int32), np.zeros(count + 1, np.int32)
        slots[1 : end + 1] = slot[:end]
        self._rows = {key: at for at, key in enumerate(persistent, 1)}
        for row in step.rows:
            start, end = end + 1, end + len(row.tokens)
            first = samples.get(row.key) if row.samples else None
            drafts = row.samples[0].tokens_after if row.samples else 0
            tokens = drawn[first:] if drawn is not None and first is not None and drafts else None
            ids, accepted = follow(row, tokens)
            following[start : end + 1] = np.maximum(ids, 0)
            if first is None:
                continue
            self._rows[row.key] = end - (drafts - accepted)
            if not drafts:
                slots[end] = row.slot
        return following, slots

    def _inputs(self, x: StepInputs, tokens: Int32, from_slot: Int32, source: Int32) -> StepInputs:
        """Returns the inputs of a launch of the head over the rows of ``x``, which reads rows ``source`` of states."""
        return StepInputs(
            tokens=tokens, from_slot=from_slot, positions=self.launches.positions_of(x), image_row=source,
            out_row=x.out_row, row_start=x.row_start, context=x.context, blocks=x.blocks, slot=np.zeros_like(x.slot),
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
                self._continue(
                    [self.launches.row_at(rows[i], place - 1, found[i][-1]) for i in live], [at[i] for i in live]
                )
            samples = [host.SampleRow(at[i], 0, Sample()) for i in live]
            for i, token in zip(live, self.launches.sample(samples, self.head.config.text.vocab), strict=True):
                found[i].append(token)
        self._rows = {}
        return [tuple(ids) for ids in found]

    def _continue(self, rows: Sequence[Row], at: Sequence[int]) -> None:
        """Computes rows of one token, each from its row ``at`` of the head's tensors, which its outputs replace."""
        own = self.head.state.own
        for launch in split_step(Step(0, tuple(rows)), self.plan):
            x = host.text_inputs([rows[i] for i in launch.items], [at[i] for i in launch.items])
            inputs = self._inputs(x, x.tokens, np.zeros_like(x.tokens), x.out_row + np.int32(own))
            self.launches.run(launch.bucket, inputs, len(x.tokens))


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
