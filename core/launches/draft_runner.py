"""Runs the draft model or the EAGLE-3 head of one rank.

A draft model reads what the target model reads, and continues texts when it is asked to. A head reads each step's
hidden states once its tokens are drawn, and drafts from them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol, cast

import numpy as np

from trencadis.core.bucket_plan import Plan
from trencadis.core.buckets import LORA, Bucket, Stage, drafting_bucket
from trencadis.core.checkpoint import registry
from trencadis.core.checkpoint.model_config import ModelConfig
from trencadis.core.config import EngineConfig
from trencadis.core.device.backend import Backend, BackendConfig, Body, HeadTensorsOut, Inputs
from trencadis.core.graphs.graph_manager import GraphManager
from trencadis.core.launches import host_inputs as host
from trencadis.core.launches.launch_splitter import sample_bucket, split_step
from trencadis.core.launches.persistent_tensors import kv_cache, sampler_state
from trencadis.core.memory.estimate import row_blocks
from trencadis.core.models import model_loader
from trencadis.core.models.decoder import Decoder
from trencadis.core.models.eagle3 import Eagle3Head, HeadState
from trencadis.core.models.interface import Model, Persistent
from trencadis.core.shared_constants import RESERVED_ROWS
from trencadis.core.step import DraftRow, HeadOutput, Int32, Row, Sample, Step, StepInputs, StepStats


class SharedDevice(Protocol):
    """Additional attributes of a backend with planned shapes, on whose device a second model can run."""

    cfg: BackendConfig

    def beside(self, cfg: BackendConfig) -> Backend:
        """Returns a backend for a second model, which shares the device's memory, its order of launches and its count
        of compilations.
        """
        ...


def open_beside(backend: Backend, draft: ModelConfig) -> Backend:
    """Returns a backend for a draft model on the device of the target's ``backend``."""
    shared, text = cast(SharedDevice, backend), draft.text
    full = text.full_heads
    return shared.beside(dataclasses.replace(
        shared.cfg,
        max_blocks_per_row=row_blocks(text, shared.cfg.block_size),
        vocab_size=text.vocab,
        heads=text.heads,
        kv_heads=text.kv_heads,
        head_dim=text.head_dim,
        full_kv_heads=full.kv_heads if full is not None else 0,
        full_head_dim=full.head_dim if full is not None else 0,
        vision_head_dim=0,
        windows=text.windows,
        upto=text.upto,
        recurrent=False,
        sinks=text.sinks,
        options={**(shared.cfg.options or {}), **registry.family_options(draft.architecture)},
    ))  # fmt: skip


def load_draft(config: EngineConfig, draft: ModelConfig, backend: Backend) -> Decoder:
    """Loads the weights of a draft model."""
    own = dataclasses.replace(config, model=str(draft.path), packed_weights_dir="")
    model = Decoder(draft, backend)
    model_loader.load_model(draft, backend, own, model)
    return model


def allocate_draft(
    model: Model, backend: Backend, target: Persistent, blocks: int, block_size: int,
    charge: Callable[[str], object] = lambda row: None,
) -> Persistent:  # fmt: skip
    """Allocates a draft model's tensors: KV of its own in as many blocks, hidden rows, and state that nothing reads.

    Sampled tokens of the target are read from the target's state. ``charge`` is called after each allocation with the
    ledger's row for it.
    """
    text = model.config.text
    kv = kv_cache(model.config, backend, blocks, block_size)
    charge("profile")
    hidden = backend.zeros((len(target.hidden), text.width), backend.dtype)
    charge("hidden")
    arena = backend.zeros((RESERVED_ROWS, text.width), backend.dtype)
    charge("arena")
    state = sampler_state(model.config, backend, 0)._replace(last=target.state.last)
    charge("state")
    return Persistent(kv=kv, hidden=hidden, arena=arena, state=state)


def list_bodies(model: Model, end: str = "") -> dict[str, Body]:
    """Returns the bodies of a draft model's launches by their keys, which get ``end``."""
    return {
        f"text{end}": model.text,
        f"greedy{end}": lambda t: model.head(t, False),
        f"full{end}": lambda t: model.head(t, True),
    }


class DraftRunner:
    """A draft model with KV of its own over the target's block tables.

    It computes every token that the target computes, in the same step, so that a block holds the keys of both.

    Args:
        graphs: programs of the whole plan, which has buckets for the draft model; None: every size is a bucket.
    """

    def __init__(self, backend: Backend, model: Model, plan: Plan, graphs: GraphManager | None = None) -> None:
        self.backend, self.model, self.plan = backend, model, plan
        self._planned = graphs is not None
        self._stats: list[StepStats] = []
        self.graphs = graphs or GraphManager(backend, list_bodies(model), plan)
        self._plain = model.config.text.mrope_section is None
        """True if the model takes a token's index as its position, also after images."""

    def read(self, bucket: Bucket, inputs: StepInputs) -> list[StepStats]:
        """Computes the tokens of one of the target's text launches, before the step samples.

        Images are read as the ids of their placeholders. Returns what is known of the launches since the last call, on
        devices with planned shapes.
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
        if bucket.variant == LORA:  # the draft model has no adapters
            bucket = dataclasses.replace(bucket, variant="")
        self._run(bucket, inputs, len(inputs.tokens))
        found, self._stats = self._stats, []
        return found

    def _run(self, bucket: Bucket, inputs: Inputs, real: int) -> HeadTensorsOut | None:
        """Runs a launch that the target would run in ``bucket``; returns the outputs of SAMPLE."""
        if self._planned:
            own = drafting_bucket(bucket)
            bucket = self.plan.fit(own.stage, own.dims, own.variant)
        out: HeadTensorsOut | None
        out, stats = self.graphs.run(bucket, inputs, real)
        if self._planned:
            self._stats.append(stats)
        return out

    def propose(self, rows: Sequence[DraftRow]) -> list[tuple[int, ...]]:
        """Returns the drafts of each row, one after another; every launch continues all rows that need more."""
        found: list[list[int]] = [[] for _ in rows]
        for place in range(max(len(row.samples) for row in rows)):
            live = [i for i, row in enumerate(rows) if len(row.samples) > place]
            self._compute([self._row_at(rows[i], place, found[i]) for i in live])
            samples = [host.SampleRow(at, 0, rows[i].samples[place]) for at, i in enumerate(live, 1)]
            bucket = sample_bucket(len(live), any(one.sample.full for one in samples), self.plan)
            out = self._run(bucket, host.head_inputs(samples, self.model.config.text.vocab), len(live))
            assert out is not None
            tokens = self.backend.fetch(out, len(live)).result().token.tolist()
            for i, token in zip(live, tokens, strict=True):
                found[i].append(token)
        return [tuple(ids) for ids in found]

    def _compute(self, rows: Sequence[Row]) -> None:
        """Computes rows of one token; the hidden row of the first is 1, those of the others follow."""
        for launch in split_step(Step(0, tuple(rows)), self.plan):
            inputs = host.text_inputs([rows[i] for i in launch.items], [i + 1 for i in launch.items])
            self._run(launch.bucket, inputs, len(inputs.tokens))

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
