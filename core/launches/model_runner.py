"""Runs one rank: takes a Step, splits it into launches, runs their programs in device order, returns a StepOutput."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np

from trencadis.core.bucket_lookup import Plan
from trencadis.core.buckets import DRAFT, WIDE_ROWS, Bucket, Stage, ahead_variant
from trencadis.core.device.backend import Backend, Inputs, Pending, Pipe, VisionTensors
from trencadis.core.device.communicators_and_rank_agreement import RankAgreement
from trencadis.core.graphs.graph_manager import GraphManager, GraphObserver
from trencadis.core.graphs.live_plan_change import PlanChanges
from trencadis.core.graphs.warmup import Warmup
from trencadis.core.launch_inputs import HeadInputs, StepInputs
from trencadis.core.launches import host_inputs as host
from trencadis.core.launches.draft_loading import DraftingModel, list_bodies
from trencadis.core.launches.draft_runner import DraftRunner, EagleRunner
from trencadis.core.launches.encoder_data_parallel import GatheredRows, assign_images
from trencadis.core.launches.greedy_and_masked_sample_launches import launch_masked, launch_split
from trencadis.core.launches.host_block_copies import BlockCopies
from trencadis.core.launches.launch_splitter import (
    HEAD_ROWS,
    Launch,
    ahead_bucket,
    head_bucket,
    list_row_needs,
    list_wide_variants,
    part_of,
    pool_rows,
    record_step,
    sample_bucket,
    score_rows,
    split_step,
    wide_bucket,
)
from trencadis.core.launches.pending_step import PendingScores, PendingStep, PooledSlice
from trencadis.core.launches.pipeline_transfer import PipelineTransfer, runs_on_stage
from trencadis.core.launches.rank_input_batch import HeadNeeds, RankInputBatch
from trencadis.core.lora.adapter_store import AdapterStore
from trencadis.core.models.eagle3 import Eagle3Head
from trencadis.core.models.model_and_ops_api import Model, Persistent
from trencadis.core.request import AdapterRef
from trencadis.core.shapes.shape_need_recorder import NeedRecorder
from trencadis.core.startup_progress_and_warmup_pacing import Warming
from trencadis.core.step import DraftRow, Encode, Row, Step
from trencadis.core.step_output import HeadOutput
from trencadis.core.token_masks.matcher_manager import MatcherManager
from trencadis.core.vision_config import WINDOW_SLOTS


class ModelRunner:
    """Executes Steps of one rank on its backend, in order, on one stream."""

    def __init__(
        self, backend: Backend, model: Model, plan: Plan, observer: GraphObserver | None = None,
        draft: DraftingModel | None = None,
    ) -> None:  # fmt: skip
        self.backend = backend
        self.model = model
        self.plan = plan
        self.ragged = plan.policy.mixed
        """True if one launch holds all rows, the persistent ones first; False: launches are split by rows."""
        self.vocab = model.config.text.vocab
        bodies: dict[str, Callable[[Any], Any]] = {
            "text": model.text,
            "vision": self._vision,
            "greedy": partial(model.head, full=False),
            "masked": lambda t: model.masked_head(t),
            "draw": lambda t: model.drawn_head(t),
            "penalised": lambda t: model.penalised_head(t),
            "full": partial(model.head, full=True),
            "reset": model.reset,
            "pool": model.pool,
        }
        if plan.drafts:
            bodies[ahead_variant(plan.drafts)] = bodies["full"]
        for variant, size in list_wide_variants(self.vocab).items():
            bodies[variant] = partial(model.score_top, size)
        planned = bool(plan.policy.rules)
        if draft is not None and planned:
            bodies |= list_bodies(draft, f"-{DRAFT}")
        self.graphs = GraphManager(backend, bodies, plan, observer, None if draft is None else draft.backend)
        graphs = self.graphs if planned else None
        self._warmup: Warmup | None = None
        self.host_kv: BlockCopies | None = None
        self.host_states: BlockCopies | None = None
        self.adapters: AdapterStore | None = None
        """Set if requests may have LoRA adapters."""
        self.matchers = MatcherManager(self.vocab, model.config.eos)
        self.share = model.config.share
        self.gathered: GatheredRows | None = None
        """Set if each rank encodes a part of the images."""
        self.passage: PipelineTransfer | None = None
        """The transfer to and from other pipeline stages, if there are any."""
        self.draft = None if draft is None or isinstance(draft, Eagle3Head) else DraftRunner(draft, plan, graphs)
        """The model that drafts, if one does."""
        self.eagle = EagleRunner(draft, plan, graphs) if isinstance(draft, Eagle3Head) else None
        """The head that drafts, if one does."""
        self.changes: PlanChanges | None = None
        """Changes the plan while serving, on devices with planned shapes."""
        self.recorder: NeedRecorder | None = None
        """Counts which shapes the Steps need; None: nothing is recorded."""
        self._launched: list[tuple[Bucket, StepInputs]] = []
        self.batches = [RankInputBatch() for _ in range(self.share.stages)]
        self.batch = self.batches[0]
        self._everything = np.full((1, -(-self.vocab // 8)), 255, np.uint8)

    def execute(self, step: Step) -> PendingStep:
        """Launches ``step``; the device may still be running it on return."""
        pending = PendingStep(step.number, {}, self.plan.version)
        if step.moves:
            assert self.host_kv is not None
            self.host_kv.run(step.moves)
        if step.state_moves:
            assert self.host_states is not None
            self.host_states.run(step.state_moves)
        if step.uploads:
            assert self.adapters is not None
            self.adapters.upload(step.uploads)
        if self.share.ends and (step.closings or step.openings):
            self.matchers.apply(step.closings, step.openings)
        self.batch = self.batches[step.micro_batch]
        self.batch.apply(step.batch)
        self._launched.clear()
        whole = step if self.ragged else self.batch.with_all_rows(step)
        self._run_step(whole, pending)
        if self.eagle is not None and self._launched:  # a step may have images alone
            keys = self.batch.keys if self.ragged else ()
            pending.stats += self.eagle.read(whole, keys, self._launched, pending.samples, pending.head)
        if step.batch is not None:
            self.batch.advance(step.rows, step.batch.joins)
        if self.graphs.counted:
            self.graphs.count_recompiles()
        return pending

    def _run_step(self, step: Step, pending: PendingStep) -> None:
        adapters, needs = self.ragged and self.batch.has_adapters, [] if self.ragged else list_row_needs(step)
        if self.recorder is not None:
            record_step(self.recorder, step, needs, adapters)
        for launch in split_step(step, self.plan, adapters, needs):
            if self.share.stages == 1 or runs_on_stage(self.share, launch.bucket.stage):
                self._launch(step, launch, pending)
        if not self.share.ends:
            return
        self._sample(step, pending)
        if step.rows and any(row.targets is not None or row.pool is not None for row in step.rows):
            self._of_prompts(_last_rows(step), pending)

    def _of_prompts(self, last: list[tuple[Row, int]], pending: PendingStep) -> None:
        """Launches the scoring and pooling of prompt tokens."""
        self._score(last, pending)
        self._pool(last, pending)

    def connect_ranks(self, held: Persistent) -> None:
        """Sets up the exchange of rows with other pipeline stages and of image rows between ranks."""
        if self.model.config.encoder_data_parallel and self.share.starts:
            self.gathered = GatheredRows(self.backend, held, self.model.config.row_parts)
        pipe: Pipe | None = getattr(self.backend, "pipe", None)
        if pipe is not None:
            self.passage = PipelineTransfer(self.share, pipe, held)

    def change_plan(self, version: int, buckets: Sequence[Bucket]) -> None:
        """Begins the change to a plan with these buckets, which ``warm`` then runs piece by piece."""
        assert self.changes is not None, "a device without planned shapes cannot change them"
        self.changes.begin(self.plan, version, buckets)

    def set_plan(self, plan: Plan) -> None:
        """Sets the plan of the Steps from now on; its programs are ready."""
        self.plan = plan

    def warm(self) -> Warming | None:
        """Runs one unit of a change of plan, or of background warm-up; None: none is left on some pipeline stage."""
        if self.changes is not None and self.changes.running is not None:
            return self.changes.advance()
        if self._warmup is None:
            return None
        state = self._warmup.advance()
        if self.passage is None:
            return state
        (over,) = RankAgreement(self.backend).over_stages(int(state is None))
        return None if over else self._warmup.state

    def set_warmup(self, warmup: Warmup) -> None:
        """Sets the warm-up that ``warm`` advances."""
        self._warmup = warmup

    def propose(self, rows: Sequence[DraftRow]) -> list[tuple[int, ...]]:
        """Returns what the draft model or head expects to follow each row; called after the Steps in flight."""
        drafter = self.draft or self.eagle
        assert drafter is not None
        return drafter.propose(rows)

    def set_vocabulary(self, data: bytes | bytearray) -> None:
        """Takes a packed ``grammar_tokenizer_and_vocabulary.Vocabulary`` and returns at once.

        On the last stage, a thread decodes it; other stages ignore it.
        """
        if not self.share.ends:
            return
        self.matchers.grammars.set_vocabulary(data)

    def prepare(self, grammar: str) -> Future[str]:
        """Compiles a grammar in a thread; the result is an error message, or empty."""
        if not self.share.ends:
            done = Future[str]()
            done.set_result("")
            return done
        return self.matchers.grammars.prepare(grammar)

    def load_adapter(self, ref: AdapterRef, drop: tuple[str, ...]) -> Future[str]:
        """Reads an adapter in a thread and forgets others; the result is an error message, or empty."""
        assert self.adapters is not None
        return self.adapters.load(ref, drop)

    def _launch(self, step: Step, launch: Launch, pending: PendingStep) -> None:
        if launch.bucket.stage in (Stage.RESET, Stage.VISION):
            self._launch_reset_or_vision(step, launch, pending)
        elif self.passage is not None:
            self._run_with_transfer(self.passage, launch.bucket, self._text_inputs(step, launch), pending)
        else:
            inputs = self._text_inputs(step, launch)
            self._run(launch.bucket, inputs, len(inputs.tokens), pending)
            if self.eagle is not None:
                self._launched.append((launch.bucket, inputs))
            if self.draft is not None:
                pending.stats += self.draft.read(launch.bucket, inputs)

    def _launch_reset_or_vision(self, step: Step, launch: Launch, pending: PendingStep) -> None:
        """Runs a RESET or VISION launch."""
        if launch.bucket.stage is Stage.RESET:
            resets = [step.resets[i] for i in launch.items]
            self._run(launch.bucket, host.reset_inputs(resets, self.vocab), len(resets), pending)
            return
        images = [step.images[i] for i in launch.items]
        if self.gathered is not None:
            self._encode_own(self.gathered, images, launch.bucket.variant, pending)
        else:
            self._encode(images, launch.bucket, pending)

    def _vision(self, inputs: VisionTensors) -> None:
        """The body of VISION programs; a planned data-parallel launch ends by gathering the rows of all ranks."""
        self.model.vision(inputs)
        if self.gathered is not None and self.graphs.counted:
            self.gathered.gather_in_launch(inputs.rows)

    def _encode(self, images: Sequence[Encode], bucket: Bucket, pending: PendingStep) -> None:
        inputs = self.model.pack(images, bucket.dims[0]) if images else host.padding_vision_inputs(self.backend.slot)
        if any(image.adapter for image in images):
            host.add_image_adapters(inputs, images)
        needed = sum(image.slots for image in images)  # padding follows them
        self._run(bucket, inputs, int(inputs.count[: needed // WINDOW_SLOTS].sum()), pending)
        pending.stats[-1].items, pending.stats[-1].needed = len(images), needed

    def _encode_own(self, gathered: GatheredRows, images: list[Encode], variant: str, pending: PendingStep) -> None:
        """Runs VISION if each rank has a tower: encodes this rank's images, then exchanges the rows of all ranks."""
        comm = self.backend.comm
        shares = assign_images(images, comm.world)
        mine = shares[comm.rank]
        alike = self.graphs.counted
        if mine or alike:
            need = max(sum(i.slots for i in share) for share in (shares if alike else [mine]))
            self._encode(mine, self.plan.fit(Stage.VISION, (need,), variant), pending)
        if not alike:
            gathered.exchange(shares)

    def _run_with_transfer(
        self, passage: PipelineTransfer, bucket: Bucket, inputs: StepInputs, pending: PendingStep
    ) -> None:
        """Runs a text launch between receiving from the previous stage and sending to the next."""
        inputs = passage.inputs(inputs)
        passage.receive(bucket)
        self._run(bucket, inputs, len(inputs.tokens), pending)
        passage.send(bucket)

    def _text_inputs(self, step: Step, launch: Launch) -> StepInputs:
        """Returns the inputs of one text launch; a token's hidden row is its number in the Step in every launch."""
        if not self.ragged:
            return self._parts_inputs(step, launch)
        if not step.rows:
            return self.batch.inputs()
        step_rows = host.text_inputs(step.rows)
        return self.batch.inputs_with_borrowed_rows(step_rows) if step.persistent_count else step_rows

    def _parts_inputs(self, step: Step, launch: Launch) -> StepInputs:
        """Returns the inputs of a launch that holds parts of rows."""
        first = [last - len(row.tokens) + 1 for row, last in _last_rows(step)]
        parts = launch.parts(step)
        rows = [part_of(step.rows[p.row], p.start, p.stop, self.plan.block_size) for p in parts]
        return host.text_inputs(rows, [first[p.row] + p.start for p in parts])

    def _run(self, bucket: Bucket, inputs: Inputs, real: int, pending: PendingStep) -> Any:
        out, stats = self.graphs.run(bucket, inputs, real)
        pending.stats.append(stats)
        return out

    def _sample(self, step: Step, pending: PendingStep) -> None:
        """Launches SAMPLE for all rows that sample, whichever launches computed them."""
        persistent = step.persistent_count
        rows = self._list_sample_rows(step, pending) if step.rows else []
        if not persistent and not rows:
            return
        needs = self.batch.head_needs() if persistent else HeadNeeds()
        if rows:
            needs = needs.add([row.sample for row in rows])

        def part(inputs: HeadInputs, full: bool) -> Pending[HeadOutput]:
            count = len(inputs.slot)
            bucket = head_bucket(count, full, needs.best, self.plan, needs.logprobs, needs.cold)
            if full and inputs.ahead is not None:
                bucket = ahead_bucket(count, self.plan)
            return self.backend.fetch(self._run(bucket, inputs, count, pending), count)

        def apart(inputs: HeadInputs) -> Pending[HeadOutput]:
            if needs.every:
                return part(inputs, True)
            wanting = [r.sample.full for r in rows]
            return launch_split(
                inputs, np.array([*self.batch.rows_needing_full, *wanting] if persistent else wanting), part
            )

        launch = apart if needs.full and self.plan.policy.split_head else partial(part, full=needs.full)
        own = self.batch.head(self._everything) if persistent else None
        if rows and any(r.sample.handle for r in rows):
            pending.head, pending.pending_sample = launch_masked(rows, self.vocab, self.matchers, launch, own)
        elif rows:
            inputs = host.head_inputs(rows, self.vocab)
            pending.head = launch(inputs if own is None else host.join_head_inputs(own, inputs))
        elif own is not None:
            pending.head = launch(own)
        if rows and any(r.sample.scored or r.sample.wide for r in rows):
            self._score_chosen(rows, pending, persistent)

    def _list_sample_rows(self, step: Step, pending: PendingStep) -> list[host.SampleRow]:
        """Returns the samples of the Step's own rows, and records in ``pending`` where the first of each choice is."""
        rows: list[host.SampleRow] = []
        for row, last in _last_rows(step):
            drafts = row.samples[0].tokens_after if row.samples else 0
            for draw in row.samples:
                pending.samples.setdefault(draw.key, step.persistent_count + len(rows))
                ahead = _drafts_before(row, drafts, draw.tokens_after) if drafts else ()
                rows.append(host.SampleRow(last - draw.tokens_after, draw.slot, draw.sample, ahead))
        return rows

    def _score_chosen(self, rows: list[host.SampleRow], pending: PendingStep, persistent: int) -> None:
        """Launches SAMPLE for logprob_token_ids: one row per requested id, all with the hidden row that was sampled.

        A sample that reports more than MAX_LOGPROBS top ids has one row, whose own id does not matter.
        """
        for key, at in pending.samples.items():
            hidden, sample = rows[at - persistent].hidden_row, rows[at - persistent].sample
            ids = (0,) if sample.wide else sample.scored
            if ids:
                pending.scored += self._scores(key, [hidden] * len(ids), ids, range(len(ids)), pending, sample.wide)

    def _score(self, rows: list[tuple[Row, int]], pending: PendingStep) -> None:
        """Launches SAMPLE for prompt_logprobs: slices of the chunk, with each token's successor as its target."""
        for row, last in rows:
            if row.targets is None:
                continue
            first = last - len(row.tokens) + 1
            wanted = [i for i, t in enumerate(row.targets) if 0 <= t < self.vocab]  # special tokens may have no logit
            hidden, ids = [first + i for i in wanted], [int(row.targets[i]) for i in wanted]
            positions = [row.context + i + 1 for i in wanted]
            pending.targets += self._scores(row.key, hidden, ids, positions, pending, row.wide)

    def _scores(
        self,
        key: int,
        hidden: Sequence[int],
        ids: Sequence[int],
        positions: Sequence[int],
        pending: PendingStep,
        wide: int,
    ) -> list[PendingScores]:
        """Launches SAMPLE to score ``ids`` at rows of the hidden tensor, in slices that fit a planned bucket.

        Args:
            wide: number of top ids reported with each, if more than MAX_LOGPROBS; else 0.
        """
        made, size = [], min(score_rows(self.plan), WIDE_ROWS if wide else HEAD_ROWS)
        for at in range(0, len(ids), size):
            part = slice(at, at + size)
            inputs = host.target_inputs(hidden[part], ids[part], self.vocab)
            count = len(ids[part])
            bucket = wide_bucket(count, wide, self.vocab, self.plan) if wide else sample_bucket(count, True, self.plan)
            out = self._run(bucket, inputs, count, pending)
            made.append(PendingScores(key, list(positions[part]), self.backend.fetch(out, count)))
        return made

    def _pool(self, rows: list[tuple[Row, int]], pending: PendingStep) -> None:
        """Launches POOL over slices of the tokens that requests pool, whichever launches computed them."""
        taken = [
            (last - len(row.tokens) + 1 + at, row.key, row.pool.each)
            for row, last in rows
            if row.pool is not None
            for at in range(row.pool.start, row.pool.stop)
        ]
        size = pool_rows(self.plan)
        for start in range(0, len(taken), size):
            part = taken[start : start + size]
            keys: list[int] = []
            groups: list[int] = []
            for _, key, each in part:
                if each or not keys or keys[-1] != key:
                    keys.append(key)
                groups.append(len(keys))
            bucket = self.plan.fit(Stage.POOL, (len(part),))
            out = self._run(bucket, host.pool_inputs([at for at, *_ in part], groups), len(part), pending)
            apart = {key for _, key, each in part if each}
            pending.pools.append(PooledSlice(keys, apart, self.backend.fetch(out, len(keys))))


def _last_rows(step: Step) -> list[tuple[Row, int]]:
    """Returns each row with the hidden row of its last token; hidden rows count from 1, persistent rows first."""
    found, end = [], step.persistent_count
    for row in step.rows:
        end += len(row.tokens)
        found.append((row, end))
    return found


def _drafts_before(row: Row, drafts: int, after: int) -> tuple[int, ...]:
    """Returns the ids of a row's ``drafts`` drafts up to the one with ``after`` tokens after it."""
    count = len(row.tokens)
    return row.tokens[count - drafts : count - after]
