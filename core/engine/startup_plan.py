"""Start-up plan on paper: limits, shapes, ledger and graphs from config.json alone; nothing starts. Torch-free."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from trencadis.core.bucket_lookup import Plan
from trencadis.core.buckets import Bucket, Stage
from trencadis.core.checkpoint.model_config import ImageNeeds, ModelConfig
from trencadis.core.device_shape_policy import Policy, capturable
from trencadis.core.engine.startup_checks import check_chunking, check_start, format_notes, list_remedies, mode_notes
from trencadis.core.engine_config import EngineConfig
from trencadis.core.errors import StartupError
from trencadis.core.graph_and_bucket_learning_report import LedgerRow
from trencadis.core.host_memory import gib
from trencadis.core.kv_cache_format import RESERVED_BLOCKS
from trencadis.core.launches.launch_splitter import plan_wide_variants
from trencadis.core.launches.pipeline_transfer import own_plan
from trencadis.core.memory import draft_memory_estimate, host_memory_offload
from trencadis.core.memory import graph_selection as budget
from trencadis.core.memory.cache_plan import (
    NO_STATES,
    CacheOptions,
    CachePlan,
    StatePlan,
    arena_rows,
    arena_units,
    check_requested_kv,
    kv_flag,
    plan_cpu,
    plan_states,
    requested_kv_bytes,
)
from trencadis.core.memory.graph_measurement_cache import Measurements
from trencadis.core.memory.graph_selection import GraphPrice, GraphSelection
from trencadis.core.memory.launch_memory import attending, costliest_buckets
from trencadis.core.memory.memory_division import (
    DeviceTooSmall,
    GraphSettings,
    Ledger,
    MemoryInUse,
    MemorySplit,
    check_capacity,
    divide_memory,
    share_of,
    unused_line,
    usable_bytes,
    utilisation_that_fits,
)
from trencadis.core.memory.memory_estimator import MemoryEstimator, estimate_memory_in_use
from trencadis.core.memory.weight_bytes import slot_sizes
from trencadis.core.shapes.bucket_options import BucketOptions
from trencadis.core.shapes.bucket_planner import make_plan
from trencadis.core.shapes.bucket_profile import plan_by_profile
from trencadis.core.shapes.launch_costs import count_operations
from trencadis.core.shapes.shape_limits import ShapeLimits
from trencadis.core.spec.draft_checkpoint import Drafter
from trencadis.core.spec.spec_config import draft_flag, resolve_speculation

BUILT_FOR_FEW = 128, 2048
BUILT_FOR_MANY = 256, 8192
"""Defaults of max_num_seqs and max_num_batched_tokens: on a CPU, and on devices with graphs."""

ONE_RANK = "rows show one rank; the other ranks count as other use"


@dataclass(frozen=True)
class PlannedDevice:
    """One of ``ranks`` equal devices. ``total`` and ``others`` (used by other programs) in bytes."""

    name: str
    total: int
    others: int = 0
    ranks: int = 1
    itemsize: int = 2


@dataclass(frozen=True)
class StartupPlan:
    """The results of a dry run: everything known before weights are loaded.

    ``formula``: names of figures that were not measured. ``host``: host memory of all ranks.
    """

    plan: Plan
    limits: ShapeLimits
    estimator: MemoryEstimator
    ledger: Ledger
    settings: GraphSettings
    prices: tuple[GraphPrice, ...]
    selection: GraphSelection
    seconds: Mapping[Bucket, float]
    formula: tuple[str, ...]
    notes: tuple[str, ...] = field(default=())
    arena_rows: int = 0
    host: tuple[LedgerRow, ...] = ()
    states: StatePlan = NO_STATES
    static: Plan | None = None
    """The plan of the limits, if ``plan`` was chosen from needs."""

    @property
    def concurrency(self) -> float:
        """Number of maximum-length requests that the KV cache holds at the same time."""
        return self.ledger.memory_split.blocks * self.limits.block_size / self.limits.max_model_len


def graph_settings(config: EngineConfig, policy: Policy) -> GraphSettings:
    """Returns the graph flags as the ledger's settings; nothing is reserved if the device's mode has no graphs."""
    return GraphSettings(
        reserved=config.graph_reserved_mem,
        prompt=config.graph_prompt_ratio,
        text=config.graph_multimodal_prompt_ratio,
        prompt_strategy=config.graph_prompt_strategy,
        decode_strategy=config.graph_decode_strategy,
        eager=config.enforce_eager or bool(policy.graphless),
    )


def shape_limits(config: EngineConfig, model: ModelConfig, policy: Policy, images: ImageNeeds) -> ShapeLimits:
    """Returns the limits of a configuration, with defaults filled in.

    Raises:
        StartupError: the device does not support the block size, or the model does not support the length.
    """
    block = config.block_size or policy.block_sizes[0]
    if block not in policy.block_sizes:
        known = ", ".join(map(str, policy.block_sizes))
        raise StartupError(f"--block-size {block} is not supported here; use one of {known}.")
    longest = model.text.max_positions
    length = config.max_model_len or longest
    if length > longest:
        raise StartupError(f"--max-model-len {length} is more than the model supports; the largest is {longest}.")
    drafts = resolve_speculation(config, model, policy, config.device)
    together = max(config.limit_mm_per_prompt.get("image", 1), 1)
    seqs, tokens = BUILT_FOR_MANY if policy.captures else BUILT_FOR_FEW
    return ShapeLimits(
        max_rows=config.max_num_seqs or seqs,
        max_tokens=config.max_num_batched_tokens or (tokens if model.text.causal else max(tokens, length)),
        max_model_len=length,
        block_size=block,
        image_slots=images.slots,
        least_slots=max(images.least_slots, 1),
        image_tile=images.tile,
        squares=images.squares,
        images=tuple((one, low or together, high or together) for one, low, high in images.images),
        units=arena_units(model, config.encoder_cache_images, config.max_num_seqs or seqs) if images.slots else 0,
        drafts=drafts.drafts if policy.rules and drafts is not None else 0,
        adapters=config.max_loras if config.enable_lora else 0,
        wide=plan_wide_variants(model.text.vocab, config.max_logprobs, policy),
    )


@dataclass(frozen=True)
class DryRun:
    """Plans a start-up without loading anything.

    ``at_most``: the model length that other pipeline stages support, 0: any. ``states_at_most``: the sequences and
    snapshots that all ranks and stages hold states of; None: not known yet. ``draft``: ``find_drafter`` of ``config``.
    """

    config: EngineConfig
    model: ModelConfig
    policy: Policy
    bucket_options: BucketOptions
    images: ImageNeeds
    device: PlannedDevice
    measured: Measurements | None = None
    at_most: int = 0
    states_at_most: tuple[int, int] | None = None
    draft: Drafter | None = None

    @cached_property
    def estimator(self) -> MemoryEstimator:
        """The memory estimator of the model on one device; it keeps sizes that all buckets share."""
        device, policy, asked = self.device, self.policy, self.config
        block, inputs = asked.block_size or policy.block_sizes[0], attending(policy, asked.attention_backend)
        found = MemoryEstimator(
            self.model, device.itemsize, device.ranks, inputs, block, policy.graph_memory, policy.quantised,
            policy.aligned, policy.cross_attention_bytes, slot_sizes(asked, policy.joined_adapters), policy.decoded,
            policy.warmup,
        )  # fmt: skip
        if self.draft is None or not policy.rules:
            return found
        return draft_memory_estimate.with_draft_sizes(found, self.draft)

    @property
    def multimodal(self) -> bool:
        """True if text and VISION graphs share the bytes for prompts."""
        return self.model.encodes_images

    def plan_startup(self) -> StartupPlan:
        """Returns the plan and the ledger of one device.

        A model length that the user did not set is lowered to what the KV cache holds.

        Raises:
            StartupError: it does not fit; the message names a setting with which it would.
        """
        try:
            return self._plan_with_graphs()
        except DeviceTooSmall as error:
            line, otherwise = str(error), "more devices, or smaller image limits (max_pixels in --mm-processor-kwargs),"
            if self.draft is not None and self.policy.rules and dataclasses.replace(self, draft=None)._fits(1.0):
                limits = shape_limits(self.config, self.model, self.policy, self.images)
                line = draft_memory_estimate.describe_missing(self.estimator, self.draft, limits, error.missing)
                line, otherwise = f"{draft_flag(self.config)}: {line}", "a smaller one"
            remedy = self._remedy(error.blocks) or f"{otherwise} would be needed"
            raise StartupError(f"{line}; {remedy}.") from None

    def _remedy(self, blocks: int) -> str:
        """The mildest setting with which this start-up fits, at its own utilisation if it can; empty: none does."""
        limits = shape_limits(self.config, self.model, self.policy, self.images)
        for setting, start in list_remedies(self, limits, blocks):
            if start._fits(1.0):
                share = "" if start._fits(self.config.gpu_memory_utilization) else " --gpu-memory-utilization 1.0"
                return f"{setting}{share} fits"
        return ""

    def _fits(self, utilisation: float) -> bool:
        config = dataclasses.replace(self.config, gpu_memory_utilization=utilisation)
        try:
            dataclasses.replace(self, config=config)._plan_with_graphs()
        except StartupError:
            return False
        return True

    def _plan_with_graphs(self) -> StartupPlan:
        check_start(self.config, self.model, self.policy, self.device.name)
        limits = shape_limits(self.config, self.model, self.policy, self.images)
        if self.at_most:
            limits = dataclasses.replace(limits, max_model_len=min(self.at_most, limits.max_model_len))
        if not self.policy.rules:
            return self._plan_without_graphs(limits)
        static = self._plan(limits)
        plan = self._learn(static)
        settings = self._settings(plan)
        notes: list[str] = []
        if self.config.max_model_len is None:
            shorter = self._longest(limits, settings)
            if shorter.max_model_len < limits.max_model_len:
                notes.append(self._note_lowered_length(limits, static, settings, shorter.max_model_len))
                limits, static = shorter, self._plan(shorter)
                plan = self._learn(static)
        self._check_chunking(limits)
        ledger, states = self._ledger_without_graphs(plan, limits, settings), self._states(plan, limits)
        prices = self._prices(plan)
        wanted = [p for p in prices if capturable(plan.policy, p.bucket) and not settings.eager]
        selection = budget.select_graphs(wanted, ledger.memory_split, settings, self.policy.pool_cost)
        ledger = dataclasses.replace(ledger, spent=dict(selection.spent))
        notes += mode_notes(self.model, plan, self.policy, self.draft)
        advice = self._advice(limits, ledger, selection, wanted, settings)
        forms = format_notes(self.model, self.device.itemsize, self.policy)
        lines = (
            *plan.notes,
            *notes,
            *states.notes(limits.max_rows),
            *forms,
            *host_memory_offload.offload_notes(self.config, self.estimator, limits.block_size),
            *advice,
        )
        return StartupPlan(
            plan=plan,
            limits=limits,
            estimator=self.estimator,
            ledger=ledger,
            settings=settings,
            prices=tuple(prices),
            selection=selection,
            seconds=self._seconds(plan),
            formula=self._formula(plan, limits),
            notes=lines,
            arena_rows=self._arena_rows(limits),
            host=host_memory_offload.offload_rows(self.config, self.estimator, limits.block_size),
            states=states,
            static=static,
        )

    def _check_chunking(self, limits: ShapeLimits) -> None:
        check_chunking(self.config, self.model, limits.max_tokens, limits.max_rows, limits.max_model_len)

    def _plan(self, limits: ShapeLimits) -> Plan:
        plan = own_plan(make_plan(self.policy, limits, self.bucket_options, self.model), self.model.share)
        if self.draft is None or not self.policy.rules:
            return plan
        return draft_memory_estimate.with_drafting_buckets(plan, self.draft)

    def _learn(self, plan: Plan) -> Plan:
        """Returns the plan of ``--bucket-profile``; without one, or if it is still to be made, ``plan``."""
        config = self.config
        records = config.learn_buckets != "off" and config.pipeline_parallel_size == 1
        if not config.bucket_profile or (records and not Path(config.bucket_profile).exists()):
            return plan
        return plan_by_profile(config.bucket_profile, plan, self.bucket_options, config.max_graphs, self.model)

    def _settings(self, plan: Plan) -> GraphSettings:
        """Returns the configured shares, or with ``--graph-memory auto`` 1.1 x each pool's measured need."""
        settings = graph_settings(self.config, self.policy)
        known = self.measured.graphs if self.measured else {}
        if self.config.graph_memory != "auto" or not known or settings.eager:
            return settings
        prices = [p for p in self._prices(plan) if capturable(plan.policy, p.bucket) and self._is_worth_memory(p)]
        return budget.request_pools(settings, prices, self.policy.pool_cost)

    def _is_worth_memory(self, price: GraphPrice) -> bool:
        """Returns True if a graph takes under a thousandth of the device, or its launch is short."""
        most, small = self.policy.auto_operations * self.device.ranks, price.alone <= self.device.total // 1000
        return small or not most or count_operations(self.model, price.bucket, self.estimator.block_size) <= most

    def _prices(self, plan: Plan) -> list[GraphPrice]:
        """Returns the price of every planned graph: measured, or by a formula scaled by measurements."""
        rule, known = self.policy.pool_cost, self.measured.graphs if self.measured else {}
        formulas = [self.estimator.price(b, rule) for b in plan.buckets]
        return budget.prices_by(known, formulas, lambda b: self.estimator.price(b, rule).alone, rule)

    def _plan_without_graphs(self, limits: ShapeLimits) -> StartupPlan:
        """Returns the plan of a device without graphs, whose KV cache follows the CPU's rule."""
        wanted = CacheOptions(
            limits.block_size, limits.max_rows, self.config.max_model_len, self.config.kv_cache_memory_bytes,
            self.config.num_gpu_blocks_override, self.config.encoder_cache_images,
        )  # fmt: skip
        free = self.device.total - self.device.others
        form = self.policy.quantised
        images, ranks = self.images.tokens, self.device.ranks
        itemsize, draft = self.device.itemsize, self.draft
        found = plan_cpu(self.model, wanted, itemsize, free, images, ranks, form, self.config, draft)
        limits = dataclasses.replace(limits, max_model_len=found.max_model_len)
        self._check_chunking(limits)
        plan, settings = self._plan(limits), dataclasses.replace(graph_settings(self.config, self.policy), eager=True)
        ledger = self._host_ledger(plan, limits, found)
        selection = budget.select_graphs([], ledger.memory_split, settings, self.policy.pool_cost)
        notes, missing = [*plan.notes, *found.notes], -dict(ledger.rows())["margin"]
        notes += format_notes(self.model, self.device.itemsize, self.policy)
        notes += host_memory_offload.offload_notes(self.config, self.estimator, limits.block_size)
        if self.device.ranks > 1:
            notes.append(f"{self.device.ranks} ranks share this memory: {ONE_RANK}.")
        if missing > 0:
            notes.append(f"{gib(missing)} are missing: lower --max-num-batched-tokens or --kv-cache-memory-bytes.")
        return StartupPlan(
            plan=plan,
            limits=limits,
            estimator=self.estimator,
            ledger=ledger,
            settings=settings,
            prices=(),
            selection=selection,
            seconds={},
            formula=("activations",),
            notes=tuple(notes),
            arena_rows=found.arena_rows,
            states=found.states,
        )

    def _host_ledger(self, plan: Plan, limits: ShapeLimits, found: CachePlan) -> Ledger:
        """Returns the rows of one rank; the machine's other ranks use the same and count as other use."""
        taken = estimate_memory_in_use(
            self.estimator, plan, limits, self.device.total, self.device.others, found.arena_rows, found.states.slots
        )
        step = Bucket(Stage.PREFILL, (limits.max_tokens, limits.max_rows))
        taken = dataclasses.replace(taken, activations=self.estimator.activations(step, limits.block_size))
        held = found.num_blocks + RESERVED_BLOCKS
        kv = held * self.estimator.block_bytes(limits.block_size)
        if self.draft is not None:
            draft = draft_memory_estimate.drafting_estimator(self.estimator, self.draft)
            keys = held * draft.block_bytes(limits.block_size)
            taken = dataclasses.replace(taken, draft_weights=draft.weights(), draft_kv=keys)
        shared = (self.device.ranks - 1) * (taken.taken - taken.others + kv)
        taken = dataclasses.replace(taken, others=taken.others + shared)
        return Ledger(taken, MemorySplit(max(taken.free, 0), 0, kv, found.num_blocks, 0, 0, 0))

    def _ledger_without_graphs(self, plan: Plan, limits: ShapeLimits, settings: GraphSettings) -> Ledger:
        """Returns the ledger without graphs, whose KV cache holds one full-length request."""
        taken, block = self._memory_in_use(plan, limits), self.estimator.block_bytes(limits.block_size)
        args = (taken, self.config.gpu_memory_utilization, self.policy.utilisation_of, settings, block, self.multimodal)
        memory_split = check_capacity(*args, needed=limits.row_blocks, max_model_len=limits.max_model_len)
        asked = requested_kv_bytes(self.config, block)
        if asked is not None:
            flag = kv_flag(self.config)
            check_requested_kv(flag, asked, memory_split)
            memory_split = divide_memory(*args, kv_bytes=asked)
            if memory_split.blocks < limits.row_blocks:
                raise StartupError(
                    f"{flag} holds {memory_split.blocks} blocks; one request of --max-model-len {limits.max_model_len} "
                    f"needs {limits.row_blocks}, padding {RESERVED_BLOCKS} more."
                )
        return Ledger(taken, draft_memory_estimate.with_draft_keys(memory_split, self.estimator, limits.block_size))

    def _holds(self, limits: ShapeLimits, settings: GraphSettings) -> bool:
        """Returns True if the KV cache holds one full-length request under ``limits``."""
        taken, block = self._memory_in_use(self._plan(limits), limits), self.estimator.block_bytes(limits.block_size)
        utilisation, of = self.config.gpu_memory_utilization, self.policy.utilisation_of
        asked = requested_kv_bytes(self.config, block)
        return (
            divide_memory(taken, utilisation, of, settings, block, self.multimodal, asked).blocks >= limits.row_blocks
        )

    def _longest(self, limits: ShapeLimits, settings: GraphSettings) -> ShapeLimits:
        """Returns ``limits`` with the longest model length, in whole blocks, that fits the KV cache.

        Unchanged if none does.
        """
        if self._holds(limits, settings):
            return limits
        low, high = 0, limits.row_blocks
        while high - low > 1:
            middle = (low + high) // 2
            trial = dataclasses.replace(limits, max_model_len=middle * limits.block_size)
            low, high = (middle, high) if self._holds(trial, settings) else (low, middle)
        return dataclasses.replace(limits, max_model_len=low * limits.block_size) if low else limits

    def _arena_rows(self, limits: ShapeLimits) -> int:
        wanted = CacheOptions(limits.block_size, limits.max_rows, arena_images=self.config.encoder_cache_images)
        return arena_rows(self.model, wanted, self.images.tokens, limits.max_model_len)

    def _memory_in_use(self, plan: Plan, limits: ShapeLimits) -> MemoryInUse:
        rows = self._arena_rows(limits)
        taken = estimate_memory_in_use(self.estimator, plan, limits, self.device.total, self.device.others, rows)
        graphs, copying = not graph_settings(self.config, self.policy).eager, self._copying
        copies = self.estimator.copies(copying, limits.block_size, graphs)
        moved = host_memory_offload.plan_offload(self.config, self.estimator)
        taken = dataclasses.replace(taken, weights=taken.weights - moved.bytes, copies=copies + moved.buffers)
        taken = dataclasses.replace(taken, activations=self._activations(plan, limits)[0])
        taken = draft_memory_estimate.with_draft_memory(taken, self.estimator, plan, limits)
        return dataclasses.replace(taken, recurrent=self._plan_states(taken, limits).bytes)

    def _states(self, plan: Plan, limits: ShapeLimits) -> StatePlan:
        """Returns the plan of the recurrent state."""
        taken = self._memory_in_use(plan, limits)
        return self._plan_states(dataclasses.replace(taken, recurrent=0), limits)

    def _plan_states(self, taken: MemoryInUse, limits: ShapeLimits) -> StatePlan:
        """Plans the recurrent state in the memory that is left beside ``taken``, apart from that of graphs."""
        slot = self.estimator.slot_bytes()
        if self.model.text.recurrent is None:
            return NO_STATES
        utilisation, of = self.config.gpu_memory_utilization, self.policy.utilisation_of
        usable, settings = usable_bytes(taken, utilisation, of), graph_settings(self.config, self.policy)
        left = usable - (0 if settings.eager else share_of(usable, settings.reserved))
        asked = requested_kv_bytes(self.config, self.estimator.block_bytes(limits.block_size))
        found = plan_states(self.config, self.model, slot, limits.max_rows, left, left // 2 if asked is None else asked)
        most = self.states_at_most
        return found if most is None else dataclasses.replace(found, sequences=most[0], snapshots=most[1])

    @property
    def _copying(self) -> tuple[int, ...]:
        """Numbers of blocks of the launches that copy blocks to or from host memory; empty: there are none."""
        return self.policy.host_blocks if self.config.kv_offloading_size else ()

    def _activations(self, plan: Plan, limits: ShapeLimits) -> tuple[int, bool]:
        """Returns the peak bytes of the launches that a start profiles, and True if all of them were measured."""
        known = self.measured.activations if self.measured else {}

        def formula(bucket: Bucket) -> int:
            return self.estimator.activations(bucket, limits.block_size)

        chosen = costliest_buckets(plan, formula)
        most = max((known.get(b) or formula(b) for b in chosen), default=0)
        return max(most, self.estimator.copying(self._copying, limits.block_size)), all(b in known for b in chosen)

    def _note_lowered_length(self, limits: ShapeLimits, plan: Plan, settings: GraphSettings, length: int) -> str:
        taken, block = self._memory_in_use(plan, limits), self.estimator.block_bytes(limits.block_size)
        of = self.policy.utilisation_of
        larger = utilisation_that_fits(taken, of, settings, block, self.multimodal, limits.row_blocks)
        hint = f"; --gpu-memory-utilization {larger:.2f} would hold it" if larger else ""
        return f"max_model_len is lowered from {limits.max_model_len} to {length}, what the KV cache holds{hint}."

    def _advice(
        self,
        limits: ShapeLimits,
        ledger: Ledger,
        selection: GraphSelection,
        prices: list[GraphPrice],
        settings: GraphSettings,
    ) -> list[str]:
        """Returns lines about a graph budget that is too small or too large."""
        if settings.eager:
            return []
        block = self.estimator.block_bytes(limits.block_size)
        least = (limits.row_blocks + RESERVED_BLOCKS) * block
        rule = self.policy.pool_cost
        holds = budget.reserve_that_holds(prices, ledger.memory_split, settings, rule, self.multimodal, least)
        lines = [budget.exhausted_line(selection, holds, ledger.memory_split)]
        if settings.requested is None and holds is not None and not selection.missing:
            lines.append(unused_line(ledger, block, settings.reserved, holds))
        return [line for line in lines if line]

    def _seconds(self, plan: Plan) -> dict[Bucket, float]:
        """Returns the seconds to compile and capture each bucket."""
        known = self.measured.seconds if self.measured else {}
        return self.estimator.warmup_seconds(plan.buckets) | {b: known[b] for b in plan.buckets if b in known}

    def _formula(self, plan: Plan, limits: ShapeLimits) -> tuple[str, ...]:
        """Returns the names of the figures that were not measured."""
        m = self.measured or Measurements()
        activations = self._activations(plan, limits)[1]
        known = {"graphs": bool(m.graphs), "warm-up seconds": bool(m.seconds), "activations": activations}
        return tuple(name for name, value in known.items() if not value)
