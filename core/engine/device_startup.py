"""Start-up of a device that captures graphs: weights, plan, arena, profile, memory split, KV cache, compile, capture,
validate.

A model that cannot fit is refused before its weights are loaded, by config.json alone. Each phase is charged with the
free memory that it used up, so that the ledger's rows sum to the device's total.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, cast

from trencadis.core.bucket_lookup import Plan
from trencadis.core.buckets import Bucket, Stage
from trencadis.core.checkpoint import model_registry
from trencadis.core.checkpoint.model_config import ImageNeeds, ModelConfig
from trencadis.core.cross_attention_inputs import planned_units
from trencadis.core.device.backend import Backend
from trencadis.core.device.communicators_and_rank_agreement import RankAgreement
from trencadis.core.engine.kv_offload_setup import OffloadLaunches, planned_copies, with_host_blocks
from trencadis.core.engine.pipeline_startup_plan import planned_stage
from trencadis.core.engine.startup_plan import DryRun, PlannedDevice, StartupPlan
from trencadis.core.engine_config import EngineConfig
from trencadis.core.errors import StartupError, format_error, is_out_of_memory
from trencadis.core.graphs.graph_capture_within_memory_budget import CaptureJournal, GraphCaptures
from trencadis.core.graphs.graph_manager import GraphManager, GraphObserver
from trencadis.core.graphs.graph_reporter import GraphReporter
from trencadis.core.graphs.live_plan_change import PlanChange, PlanChanges
from trencadis.core.graphs.warmup import Warmup
from trencadis.core.host_memory import gib
from trencadis.core.kv_cache_format import RESERVED_BLOCKS
from trencadis.core.launches.draft_loading import DraftingModel, HeldDraft, load_drafter
from trencadis.core.launches.kv_cache_and_state_allocation import (
    hidden_rows,
    image_arena,
    kv_cache,
    recurrent_states,
    sampler_state,
    stream_rows,
)
from trencadis.core.launches.model_runner import ModelRunner
from trencadis.core.launches.pipeline_transfer import LAST
from trencadis.core.lora.adapter_store import open_store
from trencadis.core.memory import graph_measurement_cache
from trencadis.core.memory.cache_plan import CachePlan, requested_kv_bytes
from trencadis.core.memory.draft_memory_estimate import with_draft_keys
from trencadis.core.memory.graph_selection import GraphPrice, prices_by
from trencadis.core.memory.launch_memory import costliest_buckets
from trencadis.core.memory.memory_division import MemoryInUse, MemorySplit, check_capacity, divide_memory
from trencadis.core.memory.weight_bytes import slot_sizes
from trencadis.core.models import model_loader
from trencadis.core.models.model_and_ops_api import HostLayering, Model, Persistent
from trencadis.core.shapes import bucket_options as bucket_env
from trencadis.core.shapes.shape_limits import ShapeLimits
from trencadis.core.spec.draft_checkpoint import Drafter, sizes_of
from trencadis.core.startup_progress_and_warmup_pacing import Progress, Throttle

PROFILE_BLOCKS = RESERVED_BLOCKS + 1
"""KV blocks during profiling: the reserved ones, which padding reads and writes, and one more."""

SHOWN_NOTES = (
    "max_model_len",
    "graphs:",
    "host memory: weights",
    "weights:",
    "recurrent state:",
    "KV cache:",
    "--kv-cache-dtype",
)
"""Prefixes of the dry run's notes that are shown to users."""


@dataclass(frozen=True)
class FixedMemory:
    """Everything of fixed size: the runner with all programs' inputs, the tensors, and the memory of profiled
    launches.
    """

    runner: ModelRunner
    tensors: Persistent
    activations: Mapping[Bucket, int]
    copies: OffloadLaunches | None = None
    draft: HeldDraft | None = None

    def set_kv(self, backend: Backend, blocks: int, block_size: int) -> None:
        """Allocates the KV cache of the model, and of what drafts, in place of earlier ones.

        The bodies hold a cache through their model.
        """
        model = self.runner.model
        self.tensors.kv = kv_cache(model.config, backend, blocks, block_size)
        model.bind(self.tensors)
        if self.draft is not None:
            self.draft.set_kv(blocks, block_size)


class DividedMemory(NamedTuple):
    """The division of the free memory, and the limits, whose model length may have been lowered to fit."""

    limits: ShapeLimits
    memory_split: MemorySplit


class StartedDevice(NamedTuple):
    """A device that is ready to run Steps; ``captures`` has its ledger and the costs of its graphs."""

    runner: ModelRunner
    cache: CachePlan
    limits: ShapeLimits
    watch: GraphReporter
    captures: GraphCaptures


@dataclass(frozen=True)
class DeviceStart:
    """One start-up: the dry run's results, and the phases that follow, each of which returns a value.

    ``key``: the key under which its measurements are stored.
    """

    config: EngineConfig
    model_config: ModelConfig
    backend: Backend
    progress: Progress
    key: graph_measurement_cache.MeasurementKey
    paper: StartupPlan
    drafter: Drafter | None = None

    @classmethod
    def plan(
        cls,
        config: EngineConfig,
        model_config: ModelConfig,
        backend: Backend,
        progress: Progress,
        images: ImageNeeds | None = None,
        drafter: Drafter | None = None,
    ) -> DeviceStart:
        """Plans a start-up; nothing is allocated yet.

        Args:
            images: limits of images; None: those of the checkpoint's processor.
            drafter: what drafts, if anything does.

        Raises:
            StartupError: the model cannot fit, or the ranks planned different shapes.
        """
        images = images or model_registry.image_needs(model_config, config.mm_processor_kwargs, config.image_alignment)
        key = _key(config, model_config, backend, drafter)
        paper = _paper(config, model_config, backend, images, key, drafter)
        return cls(config, model_config, backend, progress, key, paper, drafter)

    def run(self) -> StartedDevice:
        """Runs all phases, and warm-up as configured.

        Existing objects are frozen (excluded from garbage collection), because each phase collects garbage before it is
        measured.
        """
        gc.collect()
        gc.freeze()
        try:
            return self._run()
        finally:
            gc.unfreeze()

    def _run(self) -> StartedDevice:
        meter = MemoryMeter(self.backend)
        self.progress("weights", gib(self.paper.estimator.weights()), 0.1)
        if self.config.cpu_offload_gb:
            cast(HostLayering, self.backend).host_layers.make()
            meter.charge("copies")
        model = model_loader.load_model(self.model_config, self.backend, self.config)
        meter.charge("weights")
        adapters = open_store(slot_sizes(self.config), model, self.backend)
        meter.charge("adapters")
        draft = load_drafter(self.config, self.drafter, model)
        meter.charge("draft_weights")
        self.progress("profiling", f"{len(self.paper.plan.buckets)} planned shapes", 0.6)
        fixed = self._allocate_fixed(model, draft, meter)
        fixed.runner.adapters = adapters
        limits, memory_split = self._divide(meter.memory_in_use())
        cache = self._allocate_kv(fixed, meter, limits, memory_split)
        cache = with_host_blocks(self.config, fixed.runner, fixed.tensors, cache, fixed.copies, not self._eager)
        meter.charge("copies")
        captures = self._captures(fixed, meter.memory_in_use(), limits, memory_split)
        if self.model_config.share.stages == 1 and draft is None:
            fixed.runner.changes = PlanChanges(lambda plan: self._change(fixed.runner, captures, plan))
        return StartedDevice(fixed.runner, cache, limits, self._warm(fixed.runner, captures), captures)

    def _allocate_fixed(self, model: Model, draft: DraftingModel | None, meter: MemoryMeter) -> FixedMemory:
        """Allocates the tensors of fixed size and all programs' inputs, and profiles with a KV cache of three
        blocks.
        """
        c, b, limits, plan = self.model_config, self.backend, self.paper.limits, self.paper.plan
        arena = image_arena(c, b, self.paper.arena_rows)
        meter.charge("arena")
        state = sampler_state(c, b, limits.max_rows)
        meter.charge("state")
        most = max(limits.max_tokens, limits.max_rows)
        hidden, stream = hidden_rows(c, b, most), stream_rows(c, b, most)
        meter.charge("hidden")
        recurrent = recurrent_states(c, b, self.paper.states.slots)
        meter.charge("recurrent")
        small = kv_cache(c, b, PROFILE_BLOCKS - RESERVED_BLOCKS, limits.block_size)
        meter.charge("profile")
        tensors = Persistent(small, hidden, arena, state, stream, recurrent)
        model.bind(tensors)
        own = None
        if draft is not None:
            own = HeldDraft(draft, b, tensors, PROFILE_BLOCKS - RESERVED_BLOCKS, limits.block_size, meter.charge)
        observer = GraphObserver(self.progress.enter, lazy=self.config.warmup == "skip")
        runner = ModelRunner(b, model, plan, observer, draft)
        runner.connect_ranks(tensors)
        for bucket in sorted(plan.buckets, key=lambda b: (-math.prod(b.dims), -planned_units(b.variant), b.variant)):
            runner.graphs.program(bucket)  # largest first, so that programs that share inputs allocate them once
        meter.charge("inputs")
        copies = planned_copies(self.config, b, tensors)
        meter.charge("copies")
        activations = self.paper.estimator.activations
        held = profile_activations(
            runner.graphs, costliest_buckets(plan, lambda bucket: activations(bucket, limits.block_size))
        )
        if copies is not None:
            copies.rehearse(tensors)
        meter.charge("activations")
        return FixedMemory(runner, tensors, held, copies, own)

    @property
    def _code(self) -> str:
        """The version of what decides the seconds of launches."""
        c, ops = self.config, type(self.backend.ops).__name__
        chosen = type(self.backend).__module__, self.backend.policy.graphless, ops
        kinds = c.quantization, c.kv_cache_dtype, c.attention_backend, c.enforce_eager
        return graph_measurement_cache.digest_code(*chosen, *kinds)

    @property
    def _eager(self) -> bool:
        """True if nothing is captured."""
        return self.paper.settings.eager

    def _divide(self, own: MemoryInUse) -> DividedMemory:
        """Divides the free memory of the fullest rank into KV cache and graph pools.

        The KV cache must hold one request of max_model_len.
        """
        agreement = RankAgreement(self.backend)
        total, free = agreement.least(own.total, own.free)
        in_use = dataclasses.replace(own, total=total, others=own.others + total - free - own.taken)
        in_use = dataclasses.replace(in_use, copies=max(own.copies, self.paper.ledger.memory_in_use.copies))
        config, limits, settings = self.config, self.paper.limits, self.paper.settings
        block = self.paper.estimator.block_bytes(limits.block_size)
        of, multimodal = self.backend.policy.utilisation_of, self.model_config.encodes_images
        args = (in_use, config.gpu_memory_utilization, of, settings, block, multimodal)
        memory_split = divide_memory(*args)
        fits = agreement.over_stages(memory_split.blocks)[0] * limits.block_size
        if config.max_model_len is None and 0 < fits < limits.max_model_len:
            limits = dataclasses.replace(limits, max_model_len=fits)
        else:
            memory_split = check_capacity(*args, needed=limits.row_blocks, max_model_len=limits.max_model_len)
        asked = requested_kv_bytes(config, block)
        memory_split = memory_split if asked is None else divide_memory(*args, kv_bytes=asked)
        (count,) = agreement.over_stages(memory_split.blocks)
        if count < memory_split.blocks:
            memory_split = divide_memory(*args, kv_bytes=(count + RESERVED_BLOCKS) * block)
        return DividedMemory(limits, with_draft_keys(memory_split, self.paper.estimator, limits.block_size))

    def _allocate_kv(
        self, fixed: FixedMemory, meter: MemoryMeter, limits: ShapeLimits, memory_split: MemorySplit
    ) -> CachePlan:
        """Allocates the KV cache, replacing the small one."""
        block = self.paper.estimator.block_bytes(limits.block_size)
        self.progress("caches", f"{memory_split.blocks} blocks, {gib(memory_split.kv)} of KV cache", 0.7)
        fixed.set_kv(self.backend, -RESERVED_BLOCKS, limits.block_size)
        meter.charge("profile")
        (held,) = RankAgreement(self.backend).over_stages(
            self.backend.kv_blocks(memory_split.blocks + RESERVED_BLOCKS, block)
        )
        held -= RESERVED_BLOCKS
        fixed.set_kv(self.backend, held, limits.block_size)
        meter.charge("kv")
        if held < limits.row_blocks:
            raise StartupError(
                f"one request of --max-model-len {limits.max_model_len} needs {limits.row_blocks} KV blocks and "
                f"{held} are held; --max-model-len {held * limits.block_size} fits"
            )
        return CachePlan(
            num_blocks=held,
            block_size=limits.block_size,
            max_model_len=limits.max_model_len,
            arena_rows=self.paper.arena_rows,
            kv_bytes=memory_split.kv,
            arena_bytes=meter.rows["arena"],
            weights_bytes=meter.rows["weights"],
            notes=(
                *self.backend.notes,
                *self.paper.plan.notes,
                *self._user_notes(),
                *_note_imitated_cache(held, memory_split.blocks),
            ),
            states=self.paper.states,
        )

    def _user_notes(self) -> list[str]:
        """Returns the dry run's notes that users must see, and the cost of a skipped warm-up if nothing is captured."""
        found = [n for n in self.paper.notes if n.startswith(SHOWN_NOTES)]
        mode, count = self.backend.policy.graphless, len(self.paper.plan.buckets)
        if mode and self.config.warmup == "skip":
            found.append(
                f"warm-up is skipped: in {mode} the first launch of each of {count} shapes waits for the compiler, "
                "seconds or more on a card; a recipe cache of an earlier start saves most of that"
            )
        return found

    def _captures(
        self, fixed: FixedMemory, in_use: MemoryInUse, limits: ShapeLimits, memory_split: MemorySplit
    ) -> GraphCaptures:
        block = self.paper.estimator.block_bytes(limits.block_size)
        known = (
            graph_measurement_cache.load(self.key, graph_measurement_cache.folder())
            or graph_measurement_cache.Measurements()
        )
        return GraphCaptures(
            fixed.runner.graphs,
            in_use,
            memory_split,
            self.paper.settings,
            self.paper.prices,
            multimodal=self.model_config.encodes_images,
            least_kv=(limits.row_blocks + RESERVED_BLOCKS) * block,
            block_bytes=block,
            journal=CaptureJournal(self.config.skip_captures, self.progress.capture, self.model_config.share.stage),
            keep=lambda captures: self._keep(captures, fixed.activations),
            launches=dict(known.launches) if known.launches and known.code == self._code else {},
        )

    def _change(self, runner: ModelRunner, captures: GraphCaptures, plan: Plan) -> PlanChange:
        """Prepares the change of a rank to another plan; graphs cost what was measured, or else their formula."""
        estimator, rule = self.paper.estimator, self.backend.policy.pool_cost

        def price(wanted: Plan) -> list[GraphPrice]:
            formulas = [estimator.price(b, rule) for b in wanted.buckets]
            return prices_by(captures.measured, formulas, lambda b: estimator.price(b, rule).alone, rule)

        return PlanChange(runner.graphs, captures, plan, price, runner.set_plan)

    def _warm(self, runner: ModelRunner, captures: GraphCaptures) -> GraphReporter:
        """Runs warm-up as configured; with ``skip`` every bucket is prepared at its first use."""
        mode = self.config.warmup
        warmed = getattr(self.backend, "warmed", lambda: None)
        warmup = Warmup(runner.graphs, captures, self.config.strict_warmup, Throttle(self.progress), warmed)
        watch = GraphReporter(runner.graphs, captures, mode, warmup if mode != "skip" else None)
        if mode == "full":
            warmup.run_all()
        elif mode == "background":
            runner.set_warmup(warmup)
        captures.observe()
        if mode != "full":
            captures.keep(captures)
        return watch

    def _keep(self, captures: GraphCaptures, profiled: Mapping[Bucket, int]) -> None:
        """Stores measurements for ``--graph-memory auto`` and ``trencadis plan``.

        After a full warm-up, the ledger's activations are final. Without one, other programs may have changed the
        device's free memory since, so that the profile's figures are kept.
        """
        if self.backend.comm.rank:
            return
        full = self.config.warmup == "full"
        settled, most = captures.ledger.memory_in_use.activations, max(profiled.values(), default=0)
        held = {b: settled if full and count == most else count for b, count in profiled.items()}
        seconds, launches = dict(captures.graphs.took), dict(captures.launches)
        new = graph_measurement_cache.Measurements(dict(captures.measured), seconds, held, launches, self._code)
        graph_measurement_cache.add_measurements(self.key, new, graph_measurement_cache.folder(), complete=full)


def _key(
    config: EngineConfig, model_config: ModelConfig, backend: Backend, drafter: Drafter | None
) -> graph_measurement_cache.MeasurementKey:
    return graph_measurement_cache.MeasurementKey(
        graph_measurement_cache.fingerprint(model_config, None if drafter is None else sizes_of(drafter)),
        backend.label,
        f"{8 * backend.dtype.itemsize} bit",
        backend.comm.world,
        config.block_size or backend.policy.block_sizes[0],
    )


def _paper(
    config: EngineConfig,
    model_config: ModelConfig,
    backend: Backend,
    images: ImageNeeds,
    key: graph_measurement_cache.MeasurementKey,
    drafter: Drafter | None,
) -> StartupPlan:
    """Runs the dry run with the memory of the fullest rank of this stage.

    The model length is what all stages support.
    """
    agreement, comm, memory = RankAgreement(backend), backend.comm, backend.memory
    total, free = agreement.least(memory.total(), memory.free())
    device = PlannedDevice(backend.name, total, total - free, comm.world, backend.dtype.itemsize)
    asked = bucket_env.read_bucket_options(os.environ)
    known = graph_measurement_cache.load(key, graph_measurement_cache.folder())
    start = DryRun(config, model_config, backend.policy, asked, images, device, known, draft=drafter)
    paper = planned_stage(start)
    (length,) = agreement.over_stages(paper.limits.max_model_len)
    if length < paper.limits.max_model_len:
        paper = planned_stage(dataclasses.replace(start, at_most=length))
    if model_config.text.recurrent is not None:
        held = agreement.over_stages(*agreement.least(paper.states.sequences, paper.states.snapshots))
        paper = planned_stage(dataclasses.replace(start, at_most=length, states_at_most=(held[0], held[1])))
    mine = zlib.crc32(repr((paper.plan.buckets, paper.limits, paper.settings, paper.arena_rows)).encode())
    text = tuple(b for b in paper.plan.buckets if b.stage not in (Stage.VISION, *LAST))
    common = zlib.crc32(repr((text, paper.limits, paper.arena_rows)).encode())
    least, most = agreement.over_stages(common, -common)
    if len({*agreement.least(mine), *agreement.most(mine)}) > 1 or least != -most:
        raise StartupError("the ranks planned different shapes: a file of buckets or measurements has just changed")
    return paper


def _note_imitated_cache(held: int, booked: int) -> list[str]:
    """Returns the note about a simulated card, whose KV cache is smaller than in its ledger."""
    return [] if held == booked else [f"{booked} KV blocks are booked; the host backs {held} of them."]


class MemoryMeter:
    """The rows of the ledger before graphs. ``others`` is the memory in use when the meter was created."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.total = backend.memory.total()
        self._free = backend.memory.free()
        self.rows: dict[str, int] = {"others": self.total - self._free}

    def charge(self, row: str) -> int:
        """Charges ``row`` with the bytes used since the last call; returns them."""
        gc.collect()
        self._backend.synchronize()
        free = self._backend.memory.free()
        taken, self._free = self._free - free, free
        self.rows[row] = self.rows.get(row, 0) + taken
        return taken

    def memory_in_use(self) -> MemoryInUse:
        """Returns the bytes in use before the KV cache is allocated."""
        names = (
            *("others", "weights", "arena", "state", "hidden", "inputs", "activations", "copies"),
            *("recurrent", "adapters", "draft_weights"),
        )
        return MemoryInUse(self.total, *(self.rows.get(name, 0) for name in names))


def profile_activations(graphs: GraphManager, buckets: list[Bucket]) -> dict[Bucket, int]:
    """Runs ``buckets`` on padding with temporary programs, because the later KV cache has another shape.

    Returns, for each bucket, the bytes that are in use on the device after its run.

    Raises:
        StartupError: one line if a bucket's run does not fit the device's memory.
    """
    taken, free = {}, graphs.backend.memory.free
    graphs.backend.synchronize()
    before = free()
    for bucket in buckets:
        program = graphs.make(bucket)
        try:
            program.rehearse()
            graphs.backend.synchronize()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise StartupError(
                f"{bucket}, one of the largest launches, does not fit the device ({format_error(error)}): lower "
                "--max-num-batched-tokens, --max-num-seqs, or max_pixels of --mm-processor-kwargs"
            ) from None
        del program
        gc.collect()
        taken[bucket] = max(before - free(), 0)
    graphs.accept_compilations()
    return taken
