"""Builds an engine from its configuration, phase by phase. Everything here runs once.

Chooses the launcher of the ranks for a configuration.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import torch

from trencadis.core.bucket_lookup import Plan
from trencadis.core.buckets import Stage
from trencadis.core.checkpoint import model_registry
from trencadis.core.checkpoint.model_config import ImageNeeds, ModelConfig, reserved_rows
from trencadis.core.checkpoint.pooling_config_reader import load_model_config
from trencadis.core.device import backend as seam
from trencadis.core.device.backend import Backend, BackendConfig
from trencadis.core.device.communicators_and_rank_agreement import RankAgreement
from trencadis.core.device.packed_weights_file import packed_file
from trencadis.core.device_shape_policy import Policy
from trencadis.core.devices import choose
from trencadis.core.engine.bucket_learning import OFF, BucketLearning, LearningSettings, PlanAccess
from trencadis.core.engine.device_startup import DeviceStart
from trencadis.core.engine.engine import Engine
from trencadis.core.engine.kv_offload_setup import open_block_pool, open_state_pool, with_host_blocks
from trencadis.core.engine.startup_checks import check_chunking, check_start, format_notes
from trencadis.core.engine.startup_plan import shape_limits
from trencadis.core.engine.workload_trace_writer import RequestTrace
from trencadis.core.engine_config import ATTENTION_LIBRARIES, EngineConfig
from trencadis.core.engine_stats import EngineInfo
from trencadis.core.errors import StartupError
from trencadis.core.executor.executor_interface import Executor
from trencadis.core.executor.multi_node_launcher import NodesLauncher, open_listener
from trencadis.core.executor.rank_info_and_fingerprint import RankInfo, check_size, requested_threads, threads_of
from trencadis.core.executor.rank_launcher import Launcher, LocalLauncher
from trencadis.core.executor.rendezvous import serve_store
from trencadis.core.executor.uniproc_executor import UniprocExecutor
from trencadis.core.graphs.graph_manager import LaunchTimer
from trencadis.core.graphs.graph_reporter import GraphReporter
from trencadis.core.host_memory import free_host, gib
from trencadis.core.kv.block_pool import EvictionLog
from trencadis.core.launches.draft_loading import HeldDraft, load_drafter
from trencadis.core.launches.kv_cache_and_state_allocation import allocate_persistent
from trencadis.core.launches.model_runner import ModelRunner
from trencadis.core.links.rank_placement import RAY, Topology, topology
from trencadis.core.lora.adapter_store import open_store
from trencadis.core.memory import graph_measurement_cache, host_memory_offload
from trencadis.core.memory.cache_plan import CacheOptions, CachePlan, plan_cpu
from trencadis.core.memory.memory_estimator import SPARE_SLOTS, MemoryEstimator, arena_width, row_blocks
from trencadis.core.memory.weight_bytes import adapter_bytes, host_adapters, slot_sizes
from trencadis.core.models import model_loader
from trencadis.core.models.decoder import Decoder
from trencadis.core.models.decoder_layer import choose_timed_part
from trencadis.core.operator_files import expand_path
from trencadis.core.process import torch_detection
from trencadis.core.scheduling.draft_scheduler import DraftScheduler, ModelDrafts
from trencadis.core.scheduling.encoder_cache import EncoderCache
from trencadis.core.scheduling.encoder_scheduler import ImagePacker
from trencadis.core.scheduling.scheduler import Scheduler
from trencadis.core.scheduling.scheduler_limits import SchedulerLimits
from trencadis.core.shapes.bucket_options import read_bucket_options
from trencadis.core.shapes.bucket_profile import list_set_stages, read_profile
from trencadis.core.shapes.launch_costs import Costs, work_of
from trencadis.core.shapes.pipeline_partition import split_model
from trencadis.core.shapes.plan_from_recorded_needs import KEPT_STAGES
from trencadis.core.shapes.shape_limits import ShapeLimits
from trencadis.core.shapes.shape_need_recorder import NeedRecorder
from trencadis.core.shapes.step_times_and_chunk_budget import StepTimes, chunk_sizes
from trencadis.core.spec.draft_checkpoint import Drafter, find_drafter
from trencadis.core.spec.draft_count import StepSeconds, VerifyShapes
from trencadis.core.spec.spec_config import resolve_speculation
from trencadis.core.startup_progress_and_warmup_pacing import Progress, SilentProgress, WarmupPacing


def launcher_of(config: EngineConfig, topology: Topology, environ: Mapping[str, str]) -> Launcher:
    """Returns the launcher for a group of ranks with this placement.

    Raises:
        StartupError: an address, a key or a file is unusable.
    """
    if topology.backend == RAY:
        from trencadis.core.executor.ray_rank_launcher import RayLauncher  # needs the extra

        made = RayLauncher(config, topology, environ)
        try:
            made.rendezvous = serve_store(made.host, topology.world)
        except BaseException:
            made.close()
            raise
        return made
    if not topology.over_hosts:
        return LocalLauncher(config, topology.world)
    listener, key_file = open_listener(config, topology, environ)
    try:
        return NodesLauncher(config, topology, listener, serve_store(listener.address[0], topology.world), key_file)
    except BaseException:
        listener.close()
        raise


log = logging.getLogger("trencadis.engine")

PROBE_ROWS = 16
PROBE_REPEATS = 2


@dataclass(frozen=True)
class OpenedRank:
    """One rank that is ready to run Steps, and the facts that the engine needs; only bytes differ between ranks."""

    rank: ModelRunner
    plan: CachePlan
    limits: ShapeLimits
    watch: GraphReporter | None
    depth: int
    overlaps: bool
    step_seconds: float = 0.0
    static: Plan | None = None
    """The plan of the limits, on devices with planned shapes."""


def create_engine(config: EngineConfig, progress: Progress | None = None) -> Engine:
    """Loads ``config.model`` (a local folder) on its device and returns an engine that accepts requests.

    Rank 0 runs in this process.

    Raises:
        StartupError: something does not fit or is not supported; one line that names an alternative.
    """
    progress = progress or SilentProgress()
    config = dataclasses.replace(config, threads=requested_threads(config.threads, os.environ))
    started = time.perf_counter()
    layout = topology(config, os.environ)
    torch_detection.prepare_device_env(config.device, world=layout.here)
    progress("config", config.model)
    model_config = load_model_config(config)
    check_size(model_config, config.tensor_parallel_size)
    split_model(model_config, config.pipeline_parallel_size, config.pipeline_layer_partition)
    executor, opened = _executor(config, layout, progress)
    backend, limits, plan, watch = opened.rank.backend, opened.limits, opened.plan, opened.watch
    scheduler = Scheduler(
        _limits(config, model_config, plan, limits.max_tokens, limits.max_rows, backend.policy.mixed),
        open_block_pool(plan),
        EncoderCache(plan.arena_rows, reserved_rows(model_config)),
        limits.max_rows + SPARE_SLOTS,
        packer=ImagePacker(opened.rank.plan, backend.policy.encoder_slots),
        times=_times(config, model_config, opened.rank.plan, limits.max_tokens),
        states=open_state_pool(plan),
    )
    drafts = resolve_speculation(config, model_config, backend.policy, backend.label)
    if drafts is not None:
        scheduler.drafting = DraftScheduler(drafts, scheduler.limits, scheduler.totals)
        weigh_by_plan(scheduler.drafting, opened.rank.plan)
        if (opened.rank.draft or opened.rank.eagle) and isinstance(executor, UniprocExecutor):
            limits_of = scheduler.limits
            scheduler.drafting.model = ModelDrafts(executor.propose, limits_of.vocab, limits_of.block_size)
    if config.report_evictions:
        scheduler.pool.log = scheduler.arena.log = EvictionLog()
    info = _info(backend, plan, model_config, time.perf_counter() - started)
    info.graphs = None if watch is None else watch.plan()
    learning = _open_learning(config, model_config, opened)
    if info.graphs is not None and learning is not None:
        info.graphs.learning = learning.report()
    info.step_seconds = opened.step_seconds
    cpu_threads: Callable[[], int] | None = getattr(backend, "cpu_threads", None)
    pace = WarmupPacing(config.warmup_stall, config.warmup_slice)
    trace = RequestTrace(config.record_trace) if config.record_trace else None
    return Engine(scheduler, executor, info, watch, pace, cpu_threads, host_adapters(config), learning, trace)


def weigh_by_plan(drafting: DraftScheduler, plan: Plan) -> None:
    """Lets drafts be weighed by the planned launches: what they compute, and until steps were measured what they cost
    beside reading the weights.
    """
    if not plan.drafts:
        return
    sizes = plan.sizes(Stage.DECODE), plan.sizes(Stage.VERIFY)
    drafting.shapes = VerifyShapes(*sizes, plan.drafts + 1, plan.policy.mixed)
    if isinstance(plan.policy.cost, Costs):
        drafting.seconds = StepSeconds(1 / (plan.policy.cost.launch + 1))


def _open_learning(config: EngineConfig, model: ModelConfig, opened: OpenedRank) -> BucketLearning | None:
    """Records the needs of the traffic on rank 0.

    None: the device takes every size, nothing is to be recorded, or a draft model has launches of its own, which
    are not counted.
    """
    runner, static = opened.rank, opened.static
    if config.learn_buckets == OFF or static is None or not static.buckets or runner.changes is None or runner.draft:
        return None
    time, changes, graphs = static.policy.cost, runner.changes, runner.graphs
    if not isinstance(time, Costs):
        return None
    runner.recorder = NeedRecorder(static, config.bucket_half_life)
    profile = Path(config.bucket_profile)
    if config.bucket_profile and profile.exists():
        runner.recorder.add(read_profile(config.bucket_profile, static.policy, static.block_size))
    elif config.bucket_profile:
        if not os.access(profile.absolute().parent, os.W_OK):
            raise StartupError(f"--bucket-profile {profile}: there is no such file, and its folder cannot be written.")
        log.info("--bucket-profile %s: there is no such file yet; it is made from the traffic", profile)
    present = sum(b.stage not in KEPT_STAGES for b in runner.plan.buckets)
    settings = LearningSettings(
        static,
        config.max_graphs if config.bucket_profile else present,
        time,
        config.learn_buckets,
        config.bucket_profile,
        tuple(list_set_stages(static, read_bucket_options(os.environ))),
    )
    graphs.timer = LaunchTimer.of(graphs.backend)
    access = PlanAccess(
        lambda: runner.plan,
        lambda: changes.failure,
        lambda: graphs.timer.take() if graphs.timer is not None else [],
        graphs.hits.total,
        lambda: dict(graphs.took),
    )
    if opened.watch is not None and opened.watch.captures is not None:
        captures = opened.watch.captures
        access.making_seconds = captures.list_making_seconds
        access.graph_bytes, access.pools = captures.list_bytes, captures.list_learned_pools
        access.launch_times, access.keep_launches = captures.launches, captures.keep_launches
    return BucketLearning(settings, runner.recorder, access)


def _executor(config: EngineConfig, layout: Topology, progress: Progress) -> tuple[Executor, OpenedRank]:
    """Starts rank 0 in this process and the others in separate processes; returns the executor and rank 0."""
    if layout.world == 1 and layout.backend != RAY:
        opened = open_rank(config, RankInfo(), progress)
        return UniprocExecutor(opened.rank, opened.depth, opened.overlaps), opened
    if find_spec("msgspec") is None:
        raise StartupError("several ranks need the msgspec package: pip install msgspec")
    from trencadis.core.executor import multiproc_executor  # needs the codec, which one rank does without

    group = multiproc_executor.MultiprocExecutor(config, launcher=launcher_of(config, layout, os.environ))
    opened = group.start(lambda rank_info: open_rank(config, rank_info, progress))
    return group, opened


def rank_of(config: EngineConfig, rank_info: RankInfo, progress: Progress) -> OpenedRank:
    """Opens a rank other than 0, in its own process."""
    return open_rank(config, rank_info, progress)


def open_rank(config: EngineConfig, rank_info: RankInfo, progress: Progress) -> OpenedRank:
    """Starts one rank. The ranks of a group do this at the same time and agree on the sizes of their caches.

    Raises:
        StartupError: something does not fit or is not supported; one line that names an alternative.
    """
    model_config = split_model(load_model_config(config), rank_info.stages, config.pipeline_layer_partition)[
        rank_info.stage
    ]
    device, index, line = choose(config.device)
    if line and rank_info.rank == 0:
        log.info(line)
    make = seam.load(device)
    package = import_module(make.__module__)
    policy = package.pick_policy(config.policy)
    check_start(config, model_config, policy, device)
    drafter = find_drafter(config, model_config)
    if config.attention_backend in ATTENTION_LIBRARIES and not policy.attention and rank_info.rank == 0:
        log.info(f"--attention-backend {config.attention_backend} has no effect: {device} has its own attention")
    dtype: torch.dtype = package.pick_dtype(config.dtype, model_config.dtype)
    limits = shape_limits(config, model_config, policy, ImageNeeds())
    backend = make(backend_config(config, model_config, rank_info, policy, dtype, limits, index))
    watch: GraphReporter | None = None
    static: Plan | None = None
    if backend.policy.captures:
        start = DeviceStart.plan(config, model_config, backend, progress, drafter=drafter)
        runner, plan, limits, watch, _ = start.run()
        static = start.paper.static
        check_chunking(config, model_config, limits.max_tokens, limits.max_rows, plan.max_model_len)
    else:
        runner, plan = _host(config, model_config, backend, limits, progress, drafter)
    seconds = 0.0
    if not backend.policy.captures and isinstance(runner.model, Decoder):
        seconds = step_seconds(runner.model, limits.max_tokens)
    depth = backend.policy.depth if config.async_depth is None else config.async_depth
    if rank_info.stages > 1:
        depth = rank_info.stages - 1  # a Step for each stage
    return OpenedRank(runner, plan, limits, watch, depth, depth > 0 and backend.policy.overlaps, seconds, static)


def backend_config(
    config: EngineConfig,
    model: ModelConfig,
    rank_info: RankInfo,
    policy: Policy,
    dtype: torch.dtype,
    limits: ShapeLimits,
    index: int,
) -> BackendConfig:
    """Returns the configuration of a rank's backend; ``index``: index of the engine's first card."""
    full = model.text.full_heads
    estimator = MemoryEstimator(model, dtype.itemsize, rank_info.peers, quantised=policy.quantised, unit=policy.aligned)
    free = free_host() if rank_info.local_rank == 0 else None  # later ranks would measure the memory left by this one
    moved = host_memory_offload.plan_offload(config, estimator, free, rank_info.local_world)
    return BackendConfig(
        dtype=dtype,
        block_size=limits.block_size,
        max_tokens=max(limits.max_tokens, limits.max_rows),
        max_rows=limits.max_rows,
        vocab_size=model.text.vocab,
        index=index,
        max_blocks_per_row=row_blocks(model.text, limits.block_size),
        heads=model.text.heads,
        kv_heads=model.text.kv_heads,
        head_dim=model.text.head_dim,
        full_kv_heads=full.kv_heads if full is not None else 0,
        full_head_dim=full.head_dim if full is not None else 0,
        vision_head_dim=model.vision.head_dim if model.vision else 0,
        windows=model.text.windows,
        upto=model.text.upto,
        recurrent=model.text.recurrent is not None,
        sinks=model.text.sinks,
        batch_invariant=config.batch_invariant,
        rank=rank_info.peer,
        world=rank_info.peers,
        stage=rank_info.stage,
        stages=rank_info.stages,
        rendezvous=rank_info.rendezvous,
        host_layers=moved.layers,
        host_buffer=moved.buffer,
        local_rank=rank_info.card,
        local_world=rank_info.cards,
        packed=packed_file(config, rank_info.rank),
        kernel_trial=trial_folder(config),
        options={
            "card_named": "1" if ":" in config.device else "0",
            "policy": config.policy,
            "attention": config.attention_backend,
            "threads": str(threads_of(config.threads, rank_info.local_world)),
            "eager": "1" if config.enforce_eager else "0",
            **model_registry.family_options(model.architecture),
        },
    )


def trial_folder(config: EngineConfig) -> Path | None:
    """Returns the folder of measured kernels: that of packed weights, or of other measurements; None: none are used."""
    if not config.kernel_trial or config.batch_invariant:
        return None
    return expand_path(config.packed_weights_dir) if config.packed_weights_dir else graph_measurement_cache.folder()


def _host(
    config: EngineConfig, model_config: ModelConfig, backend: Backend, limits: ShapeLimits, progress: Progress,
    draft: Drafter | None,
) -> tuple[ModelRunner, CachePlan]:  # fmt: skip
    """Starts a device without graphs: activations are estimated by formula, every size is its own bucket."""
    plan = _cache_plan(config, model_config, backend, limits, draft)
    check_chunking(config, model_config, limits.max_tokens, limits.max_rows, plan.max_model_len)
    progress("weights", gib(plan.weights_bytes), 0.1)
    model = model_loader.load_model(model_config, backend, config)
    progress("caches", f"{plan.kv_tokens} tokens of KV cache", 0.9)
    made = allocate_persistent(
        model_config, backend, blocks=plan.num_blocks, block_size=plan.block_size, arena_rows=plan.arena_rows,
        seqs=limits.max_rows, tokens=limits.max_tokens, states=plan.states.slots,
    )  # fmt: skip
    model.bind(made)
    loaded = load_drafter(config, draft, model)
    if loaded is not None:
        HeldDraft(loaded, backend, made, plan.num_blocks, plan.block_size)
    runner = ModelRunner(backend, model, Plan(backend.policy, block_size=plan.block_size), draft=loaded)
    runner.connect_ranks(made)
    runner.adapters = open_store(slot_sizes(config), model, backend)
    return runner, with_host_blocks(config, runner, made, plan)


def _cache_plan(
    config: EngineConfig, model: ModelConfig, backend: Backend, limits: ShapeLimits, draft: Drafter | None
) -> CachePlan:
    asked = CacheOptions(
        block_size=limits.block_size,
        max_num_seqs=limits.max_rows,
        max_model_len=config.max_model_len,
        kv_bytes=config.kv_cache_memory_bytes,
        num_blocks=config.num_gpu_blocks_override,
        arena_images=config.encoder_cache_images,
    )
    images = model_registry.image_needs(model, config.mm_processor_kwargs, config.image_alignment)
    (available,) = RankAgreement(backend).over_stages(backend.memory.free())
    kept, size = backend.policy.quantised, backend.dtype.itemsize
    if (slots := slot_sizes(config)) is not None:
        available -= backend.comm.world * adapter_bytes(model, size, backend.comm.world, slots)
    plan = plan_cpu(model, asked, size, available, images.tokens, backend.comm.world, kept, config, draft)
    if plan.states.slots:
        sequences, snapshots = RankAgreement(backend).over_stages(plan.states.sequences, plan.states.snapshots)
        states = dataclasses.replace(plan.states, sequences=sequences, snapshots=snapshots)
        plan = dataclasses.replace(plan, states=states)
    return dataclasses.replace(plan, notes=(*format_notes(model, size, backend.policy), *plan.notes))


def _limits(
    config: EngineConfig, model: ModelConfig, plan: CachePlan, tokens: int, seqs: int, mixed: bool
) -> SchedulerLimits:
    return SchedulerLimits(
        max_tokens=tokens,
        max_rows=seqs,
        max_model_len=plan.max_model_len,
        block_size=plan.block_size,
        vocab=model.text.vocab,
        eos=model.eos,
        chunked=config.enable_chunked_prefill and model.text.causal,
        caching=config.enable_prefix_caching and model.text.causal,
        whole=not model.text.causal,
        bidirectional_images=model.text.bidirectional_images,
        fair=config.scheduling_policy == "fair",
        stages=config.pipeline_parallel_size,
        by_priority=config.scheduling_policy == "priority",
        aging=config.priority_aging,
        seed=config.seed,
        pooling=model.pooling is not None,
        slot_values=0 if model.vision is None else model.vision.slot.values,
        long_from=model.text.long_from,
        adapters=config.max_loras if config.enable_lora else 0,
        drafts_adapters=mixed,
    )


def _times(config: EngineConfig, model: ModelConfig, plan: Plan, tokens: int) -> StepTimes | None:
    """Returns the object that learns step durations if ``--itl-target`` is set.

    Each pipeline stage gets a part of the target.
    """
    if not config.itl_target:
        return None
    pair = work_of(model, plan.block_size or 1).pair
    target = config.itl_target / 1000 / config.pipeline_parallel_size
    return StepTimes(target, chunk_sizes(plan, tokens), plan.policy.mixed, pair)


def _info(backend: Backend, plan: CachePlan, model: ModelConfig, seconds: float) -> EngineInfo:
    row_bytes = model.row_parts * arena_width(model, backend.comm.world) * backend.dtype.itemsize
    arena_rows = max(plan.arena_rows - reserved_rows(model), 0)
    return EngineInfo(
        device=backend.label,
        dtype=str(backend.dtype).removeprefix("torch."),
        max_model_len=plan.max_model_len,
        block_size=plan.block_size,
        num_blocks=plan.num_blocks,
        vocab_size=model.text.vocab,
        arena_rows=arena_rows,
        weights_bytes=plan.weights_bytes,
        kv_bytes=plan.kv_bytes,
        arena_bytes=arena_rows * row_bytes,
        seconds=seconds,
        notes=list(plan.notes),
        host_blocks=plan.host_blocks,
        snapshots=plan.states.snapshots,
        snapshot_bytes=plan.states.slot_bytes,
    )


def step_seconds(model: Decoder, tokens: int) -> float:
    """Predicts the seconds of a step of ``tokens``: the time of one part of a layer, scaled to the bytes of the model.

    The supervisor distinguishes a slow step from a hang by it, times a factor, as attention is not counted.
    """
    timed = choose_timed_part(model.layers)
    x = torch.zeros(PROBE_ROWS, timed.width, dtype=model.backend.dtype, device=model.backend.device)
    taken = []
    with torch.inference_mode():
        for _ in range(1 + PROBE_REPEATS):  # the first call creates kernels
            started = time.perf_counter()
            timed.run(x)
            taken.append(time.perf_counter() - started)
    whole = model.nbytes() * model.config.text.layers / len(model.layers)
    return min(taken[1:]) / PROBE_ROWS * (whole / timed.bytes) * tokens
