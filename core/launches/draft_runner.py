"""Runs the draft model of one rank: it reads what the target model reads, and continues texts when it is asked to."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trencadis.core.buckets import Bucket, Plan, Stage
from trencadis.core.device.backend import Backend, Body
from trencadis.core.graphs.graph_manager import GraphManager
from trencadis.core.launches import host_inputs as host
from trencadis.core.launches.launch_splitter import sample_bucket
from trencadis.core.launches.persistent_tensors import kv_cache, sampler_state
from trencadis.core.models.interface import Model, Persistent
from trencadis.core.shared_constants import RESERVED_ROWS
from trencadis.core.step import DraftRow, Row, StepInputs


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
