# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock, call

import pytest
import torch

from tests.v1.kv_connector.unit.offloading_connector.test_config import (
    _make_mamba_hybrid_kv_cache_config,
    _make_vllm_config,
)
from tests.v1.kv_connector.unit.offloading_connector.utils import (
    MockOffloadingSpec,
    generate_store_output,
    to_keys,
)
from tests.v1.kv_connector.unit.utils import (
    EOS_TOKEN_ID,
    create_model_runner_output,
    create_request,
    create_scheduler,
    create_vllm_config,
)
from vllm.config import KVEventsConfig, KVTransferConfig
from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored
from vllm.distributed.kv_transfer.kv_connector.v1.offloading import (
    scheduler as scheduler_module,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import (
    build_offloading_config,
    get_sliding_window_size_in_chunks,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
    _ConnectorMetricName,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
    RequestOffloadState,
    _create_req_context,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import (
    OffloadingConnector,
)
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    KVCacheBlock,
    KVCacheBlockCopy,
    make_block_hash_with_group_id,
)
from vllm.v1.core.sched.output import (
    KVConnectorBlockState,
    NewRequestData,
    SchedulerOutput,
)
from vllm.v1.core.single_type_kv_cache_manager import (
    FullAttentionManager,
    SlidingWindowManager,
)
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry
from vllm.v1.kv_hints import KvHintsEnvelope
from vllm.v1.kv_offload.base import (
    GPULoadStoreSpec,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingKVEventsConfig,
    OffloadingManager,
    OffloadKey,
    OffloadPolicy,
    ReqContext,
    RequestOffloadingContext,
    get_offload_block_hash,
    get_offload_group_idx,
    make_offload_key,
)
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.example.manager import ExampleSecondaryTierManager
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import RequestStatus


def _as_mock(value: object) -> MagicMock:
    assert isinstance(value, MagicMock)
    return value


@pytest.mark.parametrize(
    "window,extra_retained", [(128, 0), (128, 3), (256, 1), (256, 3)]
)
@pytest.mark.parametrize("boundary", [3840, 3904, 3968])
@pytest.mark.parametrize("eagle", [False, True])
@pytest.mark.parametrize("left_state", ["present", "missing", "pending", "loading"])
def test_swa_offload_window_covers_unaligned_hit(
    boundary, eagle, left_state, window, extra_retained
):
    """A smaller SWA group can move the hit inside another group's CPU chunk."""
    groups = []
    for i, (block_size, group_window) in enumerate(
        [(256, None), (64, window), (8, 128)]
    ):
        kwargs = dict(
            block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.float32
        )
        kv_spec = (
            FullAttentionSpec(**kwargs)
            if group_window is None
            else SlidingWindowSpec(
                **kwargs,
                sliding_window=group_window,
                extra_retained_tokens=extra_retained if i == 1 else 0,
            )
        )
        groups.append(
            KVCacheGroupSpec([f"layer{i}"], kv_spec, is_eagle_group=eagle and i == 1)
        )
    manager = CPUOffloadingManager(num_chunks=100)
    spec = SimpleNamespace(
        config=SimpleNamespace(
            groups=tuple(
                SimpleNamespace(
                    group_id=i,
                    tokens_per_block=group.kv_cache_spec.block_size,
                    sliding_window_size_in_chunks=get_sliding_window_size_in_chunks(
                        group.kv_cache_spec, group.kv_cache_spec.block_size * 4
                    ),
                )
                for i, group in enumerate(groups)
            )
        ),
        tokens_per_block=(256, 64, 8),
        tokens_per_hash=8,
        blocks_per_chunk=4,
        offload_prompt_only=True,
        extra_config={},
        kv_events_config=OffloadingKVEventsConfig(
            enable_kv_cache_events=False, self_describing_kv_events=False
        ),
        get_manager=lambda: manager,
    )
    config = SimpleNamespace(
        speculative_config=None,
        cache_config=SimpleNamespace(
            enable_prefix_caching=True, prefix_cache_retention_interval=None
        ),
        parallel_config=SimpleNamespace(world_size=1, decode_context_parallel_size=1),
    )
    sched = OffloadingConnectorScheduler(
        spec,
        config,
        KVCacheConfig(num_blocks=256, kv_cache_tensors=[], kv_cache_groups=groups),
    )
    request = MagicMock()
    request.request_id = "unaligned"
    request.kv_transfer_params = None
    request.num_tokens = request.num_prompt_tokens = 4353
    request.block_hashes = [BlockHash(f"h{i}".encode()) for i in range(544)]
    request.skip_reading_prefix_cache = False
    sched.on_new_request(request)
    state = sched._req_status[request.request_id]
    state.update_offload_keys()
    fa, swa, short = (g.offload_keys for g in state.group_states)
    end = (boundary + 255) // 256
    left_key = swa[end - 2]
    ready = fa[:4] + swa[end - 1 : end + int(eagle)]
    ready += short[boundary // 32 - 4 : boundary // 32]
    if left_state in ("present", "loading"):
        ready.append(left_key)
    store = manager.prepare_store(ready, state.req_context)
    assert store is not None and not store.evicted_keys
    manager.complete_store(store.keys_to_store, state.req_context)
    if left_state == "pending":
        assert manager.prepare_store([left_key], state.req_context) is not None
    if left_state == "loading":
        assert sched._chunks_being_loaded is not None
        sched._chunks_being_loaded.add(left_key)

    external, load_async = sched.get_num_new_matched_tokens(request, 0)
    first_retained_block = (boundary - window + 1 - extra_retained) // 64
    needs_left = first_retained_block // 4 < end - 1
    if needs_left and left_state != "present":
        assert external == (0 if left_state == "missing" else None)
        assert not load_async
        return
    assert external == boundary and load_async
    pool = BlockPool(256, enable_caching=True, hash_block_size=8)
    managers = []
    for i, group in enumerate(groups):
        cls = FullAttentionManager if i == 0 else SlidingWindowManager
        m = cls(
            kv_cache_spec=group.kv_cache_spec,
            block_pool=pool,
            enable_caching=True,
            kv_cache_group_id=i,
            scheduler_block_size=256,
        )
        m.add_local_computed_blocks(request.request_id, [], 0, external)
        managers.append(m)
    for m in managers:
        m.allocate_external_computed_blocks(request.request_id, 0, external)
    blocks = KVCacheBlocks(tuple(m.req_to_blocks[request.request_id] for m in managers))
    sched.update_state_after_alloc(request, blocks, external)
    assert len(sched._jobs) == 1
    job = next(iter(sched._jobs.values()))
    if needs_left:
        assert {left_key, swa[end - 1]} <= job.keys
    manager.complete_load(job.keys, state.req_context)


def _make_partial_tail_scheduler(
    recurrent_only: bool = False,
    eagle: bool = False,
    cache_hit_alignment_tokens: int | None = 4,
) -> OffloadingConnectorScheduler:
    vllm_config = _make_vllm_config(extra_config={"self_describing_kv_events": True})
    vllm_config.cache_config.prefix_match_unit = None if recurrent_only else 4
    vllm_config.speculative_config = None
    vllm_config.kv_events_config = KVEventsConfig(
        enable_kv_cache_events=True, publisher="null"
    )
    kv_cache_config = _make_mamba_hybrid_kv_cache_config()
    # Core resolves fine-grained hits for this layout at prefix_match_unit.
    kv_cache_config.cache_hit_alignment_tokens = cache_hit_alignment_tokens
    # The drafter shares the full-attention group, as in Qwen3-Next MTP.
    kv_cache_config.kv_cache_groups[0].is_eagle_group = eagle
    if recurrent_only:
        kv_cache_config.kv_cache_groups = kv_cache_config.kv_cache_groups[1:]
    spec = MockOffloadingSpec(build_offloading_config(vllm_config, kv_cache_config))
    return OffloadingConnectorScheduler(spec, vllm_config, kv_cache_config)


def _make_partial_tail_request(
    scheduler: OffloadingConnectorScheduler,
    kv_transfer_params: dict[str, Any] | None = None,
    request_id: str = "req",
) -> MagicMock:
    request = MagicMock()
    request.request_id = request_id
    request.kv_transfer_params = kv_transfer_params
    request.kv_hints = None
    request.num_prompt_tokens = 30
    request.num_tokens = 30
    request.block_hashes = [BlockHash(f"h{i}".encode()) for i in range(7)]
    request.all_token_ids = list(range(30))
    request.lora_request = None
    request.skip_reading_prefix_cache = False
    request.is_finished.return_value = False
    scheduler.on_new_request(request)
    return request


def test_create_req_context_preserves_kv_hints():
    kv_hints = KvHintsEnvelope(
        protocol_version="0.1",
        message_id="message-1",
        actions=[],
    )
    request = MagicMock(
        request_id="req",
        kv_transfer_params=None,
        kv_hints=kv_hints,
    )

    assert _create_req_context(request).kv_hints is kv_hints


def _reduce_kv_connector_stats(runner):
    reduced: dict[str, int | float] = {}
    for payload in runner.kv_connector_stats:
        stats = (
            payload
            if hasattr(payload, "reduce")
            else OffloadingConnectorStats(data=payload)
        )
        for key, value in stats.reduce().items():
            reduced[key] = reduced.get(key, 0) + value
    return reduced


def test_partial_tail_store_uses_attention_and_recurrent_cow_sources():
    scheduler = _make_partial_tail_scheduler()
    _make_partial_tail_request(scheduler)
    req_status = scheduler._req_status["req"]
    req_status.group_states[0].block_ids[:] = [11, 12]
    req_status.group_states[1].block_ids[:] = [0, 21]
    _as_mock(scheduler.manager.prepare_store).side_effect = lambda keys, req_context: (
        generate_store_output(keys)
    )

    output = SimpleNamespace(
        kv_connector_block_state=KVConnectorBlockState(
            req_ids=set(),
            resolve_block_ids={}.__getitem__,
            boundary_state_offloads={"req": [(1, 99, 28)]},
        )
    )
    jobs = scheduler._build_partial_tail_store_jobs(output)

    assert len(jobs) == 1
    offered_keys = _as_mock(scheduler.manager.prepare_store).call_args.args[0]
    req_context = scheduler._req_status["req"].req_context
    assert all(req_context.get_offload_key_position(key) == 28 for key in offered_keys)
    [job_id] = jobs
    src_spec = jobs[job_id].src_spec
    assert isinstance(src_spec, GPULoadStoreSpec)
    assert src_spec.block_ids.tolist() == [12, 99]
    assert src_spec.group_sizes == [1, 1]
    assert src_spec.block_indices == [1, 1]
    assert scheduler._block_id_to_pending_jobs == {
        12: {job_id},
        99: {job_id},
    }
    assert scheduler.config.supports_partial_tail

    events = list(
        scheduler._events_tracker.take_events(
            [
                OffloadingEvent(
                    keys=list(scheduler._jobs[job_id].keys),
                    medium=Medium.CPU,
                    removed=False,
                )
            ]
        )
    )
    assert len(events) == 2
    assert all(isinstance(event, BlockStored) for event in events)
    assert {event.group_idx for event in events} == {0, 1}
    events_by_group = {event.group_idx: event for event in events}
    full_attention_event = events_by_group[0]
    assert full_attention_event.block_size == 4
    assert full_attention_event.token_ids == list(range(16, 28))
    assert len(full_attention_event.block_hashes) == 3
    assert full_attention_event.parent_block_hash is not None

    recurrent_event = events_by_group[1]
    assert recurrent_event.block_size == 0
    assert recurrent_event.token_ids == []
    assert recurrent_event.kv_cache_spec_kind == "mamba"
    assert len(recurrent_event.block_hashes) == 1
    assert recurrent_event.parent_block_hash is None


def test_aligned_boundary_store_uses_exact_source_with_partial_tail():
    scheduler = _make_partial_tail_scheduler()
    _make_partial_tail_request(scheduler)
    req_status = scheduler._req_status["req"]
    req_status.group_states[0].block_ids[:] = [11, 12]
    req_status.group_states[1].block_ids[:] = [0, 21]
    _as_mock(scheduler.manager.prepare_store).side_effect = lambda keys, req_context: (
        generate_store_output(keys)
    )

    output = SimpleNamespace(
        kv_connector_block_state=KVConnectorBlockState(
            req_ids=set(),
            resolve_block_ids={}.__getitem__,
            boundary_state_offloads={"req": [(1, 98, 16), (1, 99, 28)]},
        )
    )
    jobs = scheduler._build_partial_tail_store_jobs(output)

    assert len(jobs) == 2
    src_specs = [
        job.src_spec
        for job in jobs.values()
        if isinstance(job.src_spec, GPULoadStoreSpec)
        and len(job.src_spec.block_ids) == 1
    ]
    [src_spec] = src_specs
    assert src_spec.block_ids.tolist() == [98]
    assert src_spec.group_sizes == [0, 1]
    assert src_spec.block_indices == [0, 0]


def test_aligned_boundary_store_maps_sparse_group_id_to_dense_transfer_slot():
    scheduler = _make_partial_tail_scheduler()
    indexer_config = scheduler.config.kv_group_configs[1]
    scheduler.config = scheduler.config._replace(kv_group_configs=(indexer_config,))
    _make_partial_tail_request(scheduler)
    _as_mock(scheduler.manager.prepare_store).side_effect = lambda keys, req_context: (
        generate_store_output(keys)
    )

    jobs = scheduler._build_aligned_boundary_store_jobs({"req": [(1, 98, 16)]})

    [job] = jobs.values()
    assert isinstance(job.src_spec, GPULoadStoreSpec)
    assert job.src_spec.group_sizes == [1]
    assert job.src_spec.block_indices == [0]


@pytest.mark.parametrize("cow_reuse", [False, True])
def test_aligned_boundary_store_flushes_before_block_reuse(cow_reuse):
    scheduler = _make_partial_tail_scheduler()
    _make_partial_tail_request(scheduler)
    _as_mock(scheduler.manager.prepare_store).side_effect = lambda keys, req_context: (
        generate_store_output(keys)
    )

    output = SchedulerOutput.make_empty()
    output.kv_connector_block_state = KVConnectorBlockState(
        req_ids=set(),
        resolve_block_ids={}.__getitem__,
        boundary_state_offloads={"req": [(1, 99, 16)]},
    )
    meta = scheduler.build_connector_meta(output)
    assert isinstance(meta, OffloadingConnectorMetadata)
    [job_id] = meta.store_jobs

    output = SchedulerOutput.make_empty()
    if cow_reuse:
        output.kv_cache_block_copies = [KVCacheBlockCopy(98, 99)]
    else:
        output.scheduled_cached_reqs.req_ids = ["req"]
        output.scheduled_cached_reqs.new_block_ids = [([], [99])]
    meta = scheduler.build_connector_meta(output)
    assert isinstance(meta, OffloadingConnectorMetadata)

    assert meta.jobs_to_flush == {job_id}


def test_normal_store_excludes_align_mode_mamba_sources():
    scheduler = _make_partial_tail_scheduler()
    request = _make_partial_tail_request(scheduler)
    request.num_computed_tokens = 0
    request.status = RequestStatus.RUNNING
    req_status = scheduler._req_status["req"]
    req_status.group_states[0].block_ids[:] = [11]
    req_status.group_states[1].block_ids[:] = [99]
    req_status.update_offload_keys()
    for group_config, group_state in zip(
        scheduler.config.kv_group_configs, req_status.group_states
    ):
        assert (
            req_status.req_context.get_offload_key_position(group_state.offload_keys[0])
            == group_config.tokens_per_chunk
        )
    _as_mock(scheduler.manager.prepare_store).side_effect = lambda keys, req_context: (
        generate_store_output(keys)
    )

    output = SimpleNamespace(
        num_scheduled_tokens={"req": 16},
        finished_req_ids=set(),
    )
    jobs = scheduler._build_store_jobs(output)

    assert len(jobs) == 1
    [job] = jobs.values()
    src_spec = job.src_spec
    assert isinstance(src_spec, GPULoadStoreSpec)
    assert src_spec.block_ids.tolist() == [11]
    assert src_spec.group_sizes == [1, 0]


def test_partial_lookup_returns_exact_boundary_and_group_load_keys():
    scheduler = _make_partial_tail_scheduler()
    request = _make_partial_tail_request(scheduler)
    req_status = scheduler._req_status["req"]
    req_status.num_locally_computed_tokens = 0
    req_status.update_offload_keys()

    _as_mock(scheduler.manager.lookup).return_value = LookupResult.HIT
    assert scheduler._lookup(req_status) == 28

    assert req_status.partial_tail_boundary == 28

    scheduler.update_state_after_alloc(
        request,
        KVCacheBlocks(
            (
                [KVCacheBlock(31), KVCacheBlock(32)],
                [KVCacheBlock(0, is_null=True), KVCacheBlock(41)],
            )
        ),
        num_external_tokens=28,
    )
    [load_job] = scheduler._current_batch_load_jobs.values()
    dst_spec = load_job.dst_spec
    assert isinstance(dst_spec, GPULoadStoreSpec)
    assert dst_spec.block_ids.tolist() == [31, 32, 41]
    assert dst_spec.group_sizes == [2, 1]
    assert dst_spec.block_indices == [0, 1]
    assert req_status.partial_tail_boundary is None


def test_sync_partial_tail_load_targets_hashed_blocks():
    """A sync load's blocks are hashed at allocation; the partial-tail load
    must still target them, matching the async case."""
    scheduler = _make_partial_tail_scheduler()
    scheduler.config = scheduler.config._replace(sync_load_budget_bytes=1 << 40)
    request = _make_partial_tail_request(scheduler)
    req_status = scheduler._req_status["req"]
    scheduler.manager.lookup.return_value = LookupResult.HIT

    assert scheduler.get_num_new_matched_tokens(request, 0) == (28, False)
    assert "req" in scheduler._current_batch_sync_loads
    assert req_status.partial_tail_boundary == 28

    full_blocks = [KVCacheBlock(31), KVCacheBlock(32)]
    mamba_blocks = [KVCacheBlock(0, is_null=True), KVCacheBlock(41)]
    for i, block in enumerate(full_blocks + mamba_blocks[1:]):
        block.set_block_hash(make_block_hash_with_group_id(BlockHash(bytes([i])), 0))

    scheduler.update_state_after_alloc(
        request,
        KVCacheBlocks((full_blocks, mamba_blocks)),
        num_external_tokens=28,
    )
    [load_job] = scheduler._current_batch_load_jobs.values()
    assert load_job.sync
    dst_spec = load_job.dst_spec
    assert isinstance(dst_spec, GPULoadStoreSpec)
    assert dst_spec.block_ids.tolist() == [31, 32, 41]
    assert dst_spec.group_sizes == [2, 1]
    assert dst_spec.block_indices == [0, 1]
    # Sync-load keys are not held back for other requests.
    assert not scheduler._chunks_being_loaded


def test_sync_load_budget_is_shared_per_step():
    """Sync loads share one per-step byte budget: a hit that does not fit
    stays async."""
    scheduler = _make_partial_tail_scheduler()
    hit_bytes = 28 * scheduler.config.kv_bytes_per_token
    assert hit_bytes > 0
    scheduler.config = scheduler.config._replace(sync_load_budget_bytes=hit_bytes)
    first = _make_partial_tail_request(scheduler, request_id="a")
    second = _make_partial_tail_request(scheduler, request_id="b")
    scheduler.manager.lookup.return_value = LookupResult.HIT

    assert scheduler.get_num_new_matched_tokens(first, 0) == (28, False)
    assert scheduler.get_num_new_matched_tokens(second, 0) == (28, True)
    assert scheduler._current_batch_sync_loads == {"a"}


def test_lookup_cap_stops_at_authoritative_prefix_boundary():
    scheduler = _make_partial_tail_scheduler()
    request = _make_partial_tail_request(scheduler)
    request.skip_reading_prefix_cache = False
    _as_mock(scheduler.manager.lookup).return_value = LookupResult.HIT

    tokens, load_async = scheduler.get_num_new_matched_tokens(
        request, 0, max_num_new_tokens=20
    )

    assert (tokens, load_async) == (20, True)
    assert scheduler._req_status["req"].partial_tail_boundary == 20


def test_max_load_tokens_zero_skips_partial_tail_lookup():
    scheduler = _make_partial_tail_scheduler()
    request = _make_partial_tail_request(
        scheduler, kv_transfer_params={"max_load_tokens": 0}
    )
    _as_mock(scheduler.manager.lookup).return_value = LookupResult.HIT

    assert scheduler.get_num_new_matched_tokens(request, 16) == (0, False)
    _as_mock(scheduler.manager.lookup).assert_not_called()
    assert all(
        state.num_hit_chunks == 1 for state in scheduler._req_status["req"].group_states
    )


def test_max_load_tokens_caps_tokens_beyond_gpu_prefix():
    scheduler = _make_partial_tail_scheduler()
    request = _make_partial_tail_request(
        scheduler, kv_transfer_params={"max_load_tokens": 8}
    )
    _as_mock(scheduler.manager.lookup).return_value = LookupResult.HIT

    assert scheduler.get_num_new_matched_tokens(request, 16) == (8, True)
    assert scheduler._req_status["req"].partial_tail_boundary == 24


def test_max_load_tokens_rounds_down_without_partial_tail():
    scheduler = _make_partial_tail_scheduler()
    scheduler.config = scheduler.config._replace(supports_partial_tail=False)
    request = _make_partial_tail_request(
        scheduler, kv_transfer_params={"max_load_tokens": 20}
    )
    _as_mock(scheduler.manager.lookup).return_value = LookupResult.HIT

    assert scheduler.get_num_new_matched_tokens(request, 0) == (16, True)


@pytest.mark.parametrize("value", ["8", 8.5, -1, True])
def test_invalid_max_load_tokens_is_ignored(value):
    scheduler = _make_partial_tail_scheduler()
    request = _make_partial_tail_request(
        scheduler, kv_transfer_params={"max_load_tokens": value}
    )
    _as_mock(scheduler.manager.lookup).return_value = LookupResult.HIT

    assert scheduler.get_num_new_matched_tokens(request, 0) == (28, True)


def test_recurrent_group_unhashed_block_does_not_truncate_load_boundary():
    """A recurrent group may hold unhashed blocks inside the computed prefix.

    A recurrent (Mamba / GDN) group has no per-token KV: it carries a fixed-size
    state, so most positions point at the null sentinel and the one real block
    holding the state is legitimately not full-and-cached. Sliding-window groups
    are similar -- neither is required to retain the whole prefix, so a non-null,
    unhashed block can sit *below* the locally-computed mark. Scanning the
    block list from index 0 treated such a block as the start of the freshly
    allocated region, dragging the load boundary below that mark -- which loads the
    wrong keys into the wrong destination blocks, and asserts on the way.

    Geometry: tokens_per_block = tokens_per_chunk = 16, blocks_per_chunk = 1.
    16 tokens are already computed (block 0) and 16 are loaded (block 1), so the
    fresh region must start at index 1. The Mamba group's block 0 is non-null and
    unhashed and must be ignored rather than taken as the boundary.
    """
    scheduler = _make_partial_tail_scheduler()

    request = MagicMock()
    request.request_id = "req"
    request.kv_transfer_params = None
    request.num_prompt_tokens = 64
    request.num_tokens = 64
    request.block_hashes = [BlockHash(f"b{i}".encode()) for i in range(16)]
    request.all_token_ids = list(range(64))
    request.lora_request = None
    request.is_finished.return_value = False
    scheduler.on_new_request(request)

    req_status = scheduler._req_status["req"]
    req_status.num_locally_computed_tokens = 16
    req_status.update_offload_keys()

    full_blocks = [KVCacheBlock(31), KVCacheBlock(32)]
    mamba_blocks = [KVCacheBlock(41), KVCacheBlock(42)]
    full_blocks[0].set_block_hash(
        make_block_hash_with_group_id(BlockHash(b"h0"), 0), 16
    )
    # Both Mamba blocks are non-null and unhashed -- the shape a recurrent group
    # produces for a prefix it does not retain.
    for b in mamba_blocks:
        assert b.block_hash is None and not b.is_null

    scheduler.update_state_after_alloc(
        request,
        KVCacheBlocks((full_blocks, mamba_blocks)),
        num_external_tokens=16,
    )

    [load_job] = scheduler._current_batch_load_jobs.values()
    assert isinstance(load_job.dst_spec, GPULoadStoreSpec)
    loaded = list(load_job.dst_spec.block_ids)
    # The fresh region starts at index 1, so the sparse group's block 0 (id 41) is
    # not a load destination. Before the fix the boundary collapsed to 0.
    assert 41 not in loaded
    assert 42 in loaded


@pytest.mark.parametrize(
    ("recurrent_source", "expected"),
    [
        ("host", {CacheHitSource.P2P: 16, CacheHitSource.HOST: 12}),
        ("p2p", {CacheHitSource.P2P: 28}),
        (None, {CacheHitSource.P2P: 16, CacheHitSource.HOST: 12}),
    ],
)
def test_external_cache_hit_sources_preserve_partial_tail_origin(
    recurrent_source, expected
):
    """Recurrent state covers the whole prefix; the outermost tier wins."""
    scheduler = _make_partial_tail_scheduler()
    request = _make_partial_tail_request(scheduler)
    req_status = scheduler._req_status["req"]
    req_status.update_offload_keys()

    _as_mock(scheduler.manager.lookup).return_value = LookupResult.HIT
    assert scheduler._lookup(req_status) == 28

    def get_load_source(key, req_context):
        if get_offload_group_idx(key) == 1:
            assert recurrent_source is not None
            return recurrent_source
        block_hash = get_offload_block_hash(key)
        return "p2p" if block_hash == b"h3" else "host"

    _as_mock(scheduler.manager.get_load_source).side_effect = get_load_source

    recurrent_block = KVCacheBlock(41)
    if recurrent_source is None:
        recurrent_block.set_block_hash(
            make_block_hash_with_group_id(BlockHash(b"cached"), 1), 12
        )
    scheduler.update_state_after_alloc(
        request,
        KVCacheBlocks(
            (
                [KVCacheBlock(31), KVCacheBlock(32)],
                [KVCacheBlock(0, is_null=True), recurrent_block],
            )
        ),
        num_external_tokens=28,
    )
    assert req_status.partial_tail_boundary is None
    assert scheduler.get_external_cache_hit_sources(request, 28) == expected


@pytest.mark.parametrize(
    ("second_source", "expected"),
    [
        ("host", {CacheHitSource.HOST: 4, CacheHitSource.DISK: 4}),
        ("p2p", {CacheHitSource.P2P: 4, CacheHitSource.DISK: 4}),
    ],
)
def test_external_cache_hit_sources_reconcile_different_group_chunk_sizes(
    request_runner,
    second_source,
    expected,
):
    """Groups with different chunk sizes overlap; the outermost tier wins."""
    block_size = 4
    groups = [
        KVCacheGroupSpec(
            [f"layer{group_idx}"],
            FullAttentionSpec(
                block_size=block_size * (group_idx + 1),
                num_kv_heads=1,
                head_size=1,
                dtype=torch.float32,
            ),
        )
        for group_idx in range(2)
    ]
    runner = request_runner(
        block_size=block_size,
        num_gpu_blocks=100,
        async_scheduling=False,
        kv_cache_groups=groups,
    )
    scheduler = runner.connector_scheduler
    request = MagicMock(request_id="mixed")
    req_status = RequestOffloadState(
        config=scheduler.config,
        req=request,
        req_context=ReqContext(req_id=request.request_id),
        offloading_context=RequestOffloadingContext(policy=OffloadPolicy.CHUNK_LEVEL),
    )
    for group_idx, group_state in enumerate(req_status.group_states):
        group_state.offload_keys = [
            make_offload_key(f"h{chunk_idx}".encode(), group_idx)
            for chunk_idx in range(2 // (group_idx + 1))
        ]
    scheduler._req_status[request.request_id] = req_status
    runner.manager.get_load_source.side_effect = lambda key, req_context: (
        ("host" if get_offload_block_hash(key) == b"h0" else "disk")
        if get_offload_group_idx(key) == 0
        else second_source
    )
    scheduler.update_state_after_alloc(
        request,
        KVCacheBlocks(([KVCacheBlock(1), KVCacheBlock(2)], [KVCacheBlock(3)])),
        2 * block_size,
    )

    assert scheduler.get_external_cache_hit_sources(request, 2 * block_size) == expected


@pytest.mark.parametrize(
    ("ranges", "expected"),
    [
        pytest.param(
            [(8, 12, "host"), (0, 8, "host"), (4, 10, "host")],
            {CacheHitSource.HOST: 8, CacheHitSource.EXTERNAL_UNSPECIFIED: 4},
            id="overlapping-same-source-and-adjacent-endpoints",
        ),
        pytest.param(
            [(10, 20, "p2p"), (6, 10, "disk"), (0, 8, "host"), (4, 12, "host")],
            {CacheHitSource.HOST: 2, CacheHitSource.DISK: 4, CacheHitSource.P2P: 6},
            id="nested-tiers-and-clipped-ranges",
        ),
        pytest.param(
            [(0, 4, "disk"), (16, 20, "disk"), (8, 8, "disk")],
            {CacheHitSource.EXTERNAL_UNSPECIFIED: 12},
            id="no-covering-ranges",
        ),
    ],
)
def test_external_cache_hit_sources_range_boundaries(ranges, expected):
    scheduler = _make_partial_tail_scheduler()
    request = _make_partial_tail_request(scheduler)
    state = scheduler._req_status[request.request_id]
    state.num_locally_computed_tokens = 4
    for idx, (lo, hi, source) in enumerate(ranges):
        key = make_offload_key(str(idx).encode(), 0)
        state.load_key_ranges.append((lo, hi, key))
    _as_mock(scheduler.manager.get_load_source).side_effect = lambda key, ctx: ranges[
        int(get_offload_block_hash(key))
    ][2]

    result = scheduler.get_external_cache_hit_sources(request, 12)
    assert result == expected
    assert sum(result.values()) == 12


@pytest.mark.parametrize("source", ["host", "disk", "p2p", "external_unspecified"])
def test_external_cache_hit_sources_recurrent_only_state(source):
    scheduler = _make_partial_tail_scheduler(recurrent_only=True)
    request = _make_partial_tail_request(scheduler)
    request.num_prompt_tokens = request.num_tokens = 64
    request.block_hashes = [BlockHash(f"h{i}".encode()) for i in range(4)]
    request.all_token_ids = list(range(64))
    state = scheduler._req_status[request.request_id]
    state.update_offload_keys()
    _as_mock(scheduler.manager.lookup).return_value = LookupResult.HIT
    assert scheduler._lookup(state) == 48
    _as_mock(scheduler.manager.get_load_source).return_value = source
    scheduler.update_state_after_alloc(
        request,
        KVCacheBlocks(
            (
                [
                    KVCacheBlock(0, is_null=True),
                    KVCacheBlock(0, is_null=True),
                    KVCacheBlock(41),
                ],
            )
        ),
        48,
    )
    assert scheduler.get_external_cache_hit_sources(request, 48) == {
        CacheHitSource(source): 48
    }
    _as_mock(scheduler.manager.get_load_source).assert_called_once()


@pytest.mark.parametrize("sparse_kind", ["sliding", "chunked_local"])
@pytest.mark.parametrize("blocks_per_chunk", [1, 2])
@pytest.mark.parametrize("local_tokens", [0, 4])
@pytest.mark.parametrize("full_attention", [False, True])
@pytest.mark.parametrize(
    "sparse_source", ["host", "disk", "p2p", "external_unspecified", "mixed"]
)
def test_external_cache_hit_sources_use_loaded_attention_ranges(
    sparse_kind,
    blocks_per_chunk,
    local_tokens,
    full_attention,
    sparse_source,
):
    """SWA/local attention affects only loaded positions, not omitted history."""
    block_size = 4
    chunk_size = block_size * blocks_per_chunk
    spec_kwargs = dict(
        block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.float32
    )
    sparse_spec = (
        SlidingWindowSpec(**spec_kwargs, sliding_window=2 * chunk_size)
        if sparse_kind == "sliding"
        else ChunkedLocalAttentionSpec(
            **spec_kwargs, attention_chunk_size=2 * chunk_size
        )
    )
    groups = [KVCacheGroupSpec(["sparse"], sparse_spec)]
    if full_attention:
        groups.insert(0, KVCacheGroupSpec(["full"], FullAttentionSpec(**spec_kwargs)))
    vllm_config = _make_vllm_config(extra_config={"block_size": chunk_size})
    vllm_config.cache_config.block_size = block_size
    vllm_config.speculative_config = None
    kv_cache_config = KVCacheConfig(
        num_blocks=100,
        kv_cache_tensors=[],
        kv_cache_groups=groups,
    )
    spec = MockOffloadingSpec(build_offloading_config(vllm_config, kv_cache_config))
    scheduler = OffloadingConnectorScheduler(spec, vllm_config, kv_cache_config)
    request = MagicMock(request_id="sparse")
    req_status = RequestOffloadState(
        config=scheduler.config,
        req=request,
        req_context=ReqContext(req_id=request.request_id),
        offloading_context=RequestOffloadingContext(policy=OffloadPolicy.CHUNK_LEVEL),
        num_locally_computed_tokens=local_tokens,
    )
    scheduler._req_status[request.request_id] = req_status
    block_groups = []
    for group_idx, state in enumerate(req_status.group_states):
        state.offload_keys = [
            make_offload_key(str(i).encode(), group_idx) for i in range(4)
        ]
        block_groups.append(
            [
                KVCacheBlock(
                    0
                    if group_idx == len(groups) - 1 and i < 2 * blocks_per_chunk
                    else 1 + group_idx * 100 + i,
                    is_null=group_idx == len(groups) - 1 and i < 2 * blocks_per_chunk,
                )
                for i in range(4 * blocks_per_chunk)
            ]
        )

    def get_load_source(key, req_context):
        chunk_idx = int(get_offload_block_hash(key))
        if get_offload_group_idx(key) == len(groups) - 1:
            assert chunk_idx >= 2  # Earlier sparse keys were not loaded.
            if sparse_source == "mixed":
                return "host" if chunk_idx == 2 else "disk"
            return sparse_source
        return "host"

    _as_mock(scheduler.manager.get_load_source).side_effect = get_load_source
    count = 4 * chunk_size - local_tokens
    scheduler.update_state_after_alloc(
        request, KVCacheBlocks(tuple(block_groups)), count
    )
    expected: dict[CacheHitSource, int] = {}

    def expect(source: CacheHitSource, num_tokens: int) -> None:
        expected[source] = expected.get(source, 0) + num_tokens

    expect(
        CacheHitSource.HOST if full_attention else CacheHitSource.EXTERNAL_UNSPECIFIED,
        2 * chunk_size - local_tokens,
    )
    for chunk_idx in range(2, 4):
        source = (
            ("host" if chunk_idx == 2 else "disk")
            if sparse_source == "mixed"
            else sparse_source
        )
        expect(CacheHitSource(source), chunk_size)
    result = scheduler.get_external_cache_hit_sources(request, count)
    assert result == expected
    assert sum(result.values()) == count
    assert scheduler.get_external_cache_hit_sources(request, 0) == {}


def test_partial_lookup_requires_every_cache_group():
    scheduler = _make_partial_tail_scheduler()
    _make_partial_tail_request(scheduler)
    req_status = scheduler._req_status["req"]
    req_status.update_offload_keys()

    def lookup(key, req_context):
        if get_offload_group_idx(key) == 1 and get_offload_block_hash(key) != b"h3":
            return LookupResult.MISS
        return LookupResult.HIT

    _as_mock(scheduler.manager.lookup).side_effect = lookup
    assert scheduler._lookup(req_status) == 16
    assert req_status.partial_tail_boundary is None


def _key_tokens(scheduler: OffloadingConnectorScheduler, keys) -> dict[int, int]:
    req_context = scheduler._req_status["req"].req_context
    return {
        get_offload_group_idx(key): req_context.get_offload_key_position(key)
        for key in keys
    }


@pytest.mark.parametrize(
    ("cache_hit_alignment_tokens", "proof_tokens"), [(4, 28), (16, 40), (None, 40)]
)
def test_eagle_proof_margin_follows_core_hit_alignment(
    cache_hit_alignment_tokens, proof_tokens
):
    """Core drops one hash unit past a fine-grained hit, else one block."""
    scheduler = _make_partial_tail_scheduler(
        eagle=True, cache_hit_alignment_tokens=cache_hit_alignment_tokens
    )
    attention, mamba = scheduler.config.kv_group_configs
    assert scheduler._partial_tail_key_tokens(attention, 24) == proof_tokens
    assert scheduler._partial_tail_key_tokens(mamba, 24) == 24


def test_eagle_partial_tail_store_keys_attention_at_proof():
    """The EAGLE group stores its tail block under the hash one unit later.

    With EAGLE block drop, core puts the Mamba checkpoint of a 30-token prompt
    at 24. Core matches the attention group up to 28 and then drops 4 tokens,
    so the attention block is stored under the hash that ends at 28.
    """
    scheduler = _make_partial_tail_scheduler(eagle=True)
    request = _make_partial_tail_request(scheduler)
    request.num_computed_tokens = 30
    req_status = scheduler._req_status["req"]
    req_status.loaded_from_offload = True
    req_status.group_states[0].block_ids[:] = [11, 12]
    req_status.group_states[1].block_ids[:] = [0, 21]
    scheduler.manager.prepare_store.side_effect = lambda keys, req_context: (
        generate_store_output(keys)
    )

    output = SimpleNamespace(
        num_scheduled_tokens={},
        kv_connector_block_state=KVConnectorBlockState(
            req_ids=set(),
            resolve_block_ids={}.__getitem__,
            boundary_state_offloads={"req": [(1, 99, 24)]},
        ),
    )
    jobs = scheduler._build_partial_tail_store_jobs(output)

    [job_id] = jobs
    offered_keys = scheduler.manager.prepare_store.call_args.args[0]
    assert _key_tokens(scheduler, offered_keys) == {0: 28, 1: 24}
    assert [get_offload_block_hash(key) for key in offered_keys] == [b"h6", b"h5"]
    src_spec = jobs[job_id].src_spec
    assert isinstance(src_spec, GPULoadStoreSpec)
    assert src_spec.block_ids.tolist() == [12, 99]
    assert src_spec.block_indices == [1, 1]

    events = list(
        scheduler._events_tracker.take_events(
            [
                OffloadingEvent(
                    keys=list(scheduler._jobs[job_id].keys),
                    medium=Medium.CPU,
                    removed=False,
                )
            ]
        )
    )
    events_by_group = {event.group_idx: event for event in events}
    assert events_by_group[0].token_ids == list(range(16, 28))


@pytest.mark.parametrize(
    ("num_prompt_tokens", "num_computed_tokens", "num_scheduled_tokens", "stored"),
    [
        (30, 24, 0, False),
        (30, 27, 0, False),
        (30, 24, 3, False),
        # The step computes the proof token 28 exactly.
        (30, 24, 4, True),
        # Tokens past the prompt end at 26 do not compute the proof.
        (26, 24, 6, False),
    ],
)
def test_eagle_partial_tail_store_needs_proof_in_prompt(
    num_prompt_tokens, num_computed_tokens, num_scheduled_tokens, stored
):
    """Store the tail only if this step computes the proof at 28 in the prompt."""
    scheduler = _make_partial_tail_scheduler(eagle=True)
    request = _make_partial_tail_request(scheduler)
    request.num_prompt_tokens = num_prompt_tokens
    request.num_computed_tokens = num_computed_tokens
    req_status = scheduler._req_status["req"]
    req_status.loaded_from_offload = True
    req_status.group_states[0].block_ids[:] = [11, 12]
    req_status.group_states[1].block_ids[:] = [0, 21]
    scheduler.manager.prepare_store.side_effect = lambda keys, req_context: (
        generate_store_output(keys)
    )

    output = SimpleNamespace(
        num_scheduled_tokens={"req": num_scheduled_tokens},
        kv_connector_block_state=KVConnectorBlockState(
            req_ids=set(),
            resolve_block_ids={}.__getitem__,
            boundary_state_offloads={"req": [(1, 99, 24)]},
        ),
    )

    assert bool(scheduler._build_partial_tail_store_jobs(output)) == stored
    assert scheduler.manager.prepare_store.called == stored


@pytest.mark.parametrize("missing", [None, b"h6", b"h3"])
def test_eagle_partial_lookup_loads_attention_proof(missing):
    """An EAGLE partial hit needs the proof key and the popped chunk.

    The complete-chunk lookup pops the only EAGLE chunk (0-16), so the hit at
    24 lies in the second block after the complete boundary. It needs the
    attention chunk 0-16, the attention proof at 28 and the Mamba state at 24.
    """
    scheduler = _make_partial_tail_scheduler(eagle=True)
    request = _make_partial_tail_request(scheduler)
    req_status = scheduler._req_status["req"]
    req_status.num_locally_computed_tokens = 0
    req_status.update_offload_keys()

    def lookup(key, req_context):
        block_hash = get_offload_block_hash(key)
        if get_offload_group_idx(key) == 1:
            ready = block_hash == b"h5"
        else:
            ready = block_hash != missing
        return LookupResult.HIT if ready else LookupResult.MISS

    scheduler.manager.lookup.side_effect = lookup
    if missing is not None:
        assert scheduler._lookup(req_status) == 0
        assert req_status.partial_tail_boundary is None
        return
    assert scheduler._lookup(req_status) == 24
    assert req_status.partial_tail_boundary == 24

    scheduler.update_state_after_alloc(
        request,
        KVCacheBlocks(
            (
                [KVCacheBlock(31), KVCacheBlock(32)],
                [KVCacheBlock(0, is_null=True), KVCacheBlock(41)],
            )
        ),
        num_external_tokens=24,
    )
    [load_job_id] = scheduler._current_batch_load_jobs
    load_job = scheduler._current_batch_load_jobs[load_job_id]
    assert {
        (get_offload_group_idx(key), get_offload_block_hash(key))
        for key in scheduler._jobs[load_job_id].keys
    } == {(0, b"h3"), (0, b"h6"), (1, b"h5")}
    dst_spec = load_job.dst_spec
    assert isinstance(dst_spec, GPULoadStoreSpec)
    assert dst_spec.block_ids.tolist() == [31, 32, 41]
    assert dst_spec.group_sizes == [2, 1]


@pytest.mark.parametrize(
    ("attention_missing", "expected_hit", "expected_lookups"),
    [
        # The complete-chunk lookup of h3 also serves the boundaries 24 and 20.
        (None, 20, ["0h3", "0h6", "1h5", "0h5", "1h4"]),
        # A missing chunk h3 is looked up once more and skips the boundaries
        # 24, 20 and 16.
        (b"h3", 0, ["0h3", "0h3", "0h3", "0h2", "1h1", "0h1", "1h0"]),
    ],
)
def test_eagle_partial_lookup_probes_popped_chunk_once(
    attention_missing, expected_hit, expected_lookups
):
    """Boundaries past the popped EAGLE chunk reuse its complete-chunk lookup.

    The Mamba state is stored only at 20 (h4). Before this lookup was shared,
    the same hits took 7 and 9 lookups.
    """
    scheduler = _make_partial_tail_scheduler(eagle=True)
    _make_partial_tail_request(scheduler)
    req_status = scheduler._req_status["req"]
    req_status.num_locally_computed_tokens = 0
    req_status.update_offload_keys()
    lookups = []

    def lookup(key, req_context):
        group_idx = get_offload_group_idx(key)
        block_hash = get_offload_block_hash(key)
        lookups.append(f"{group_idx}{block_hash.decode()}")
        ready = (
            block_hash == b"h4" if group_idx == 1 else block_hash != attention_missing
        )
        return LookupResult.HIT if ready else LookupResult.MISS

    scheduler.manager.lookup.side_effect = lookup
    assert scheduler._lookup(req_status) == expected_hit
    assert lookups == expected_lookups


def test_eagle_partial_lookup_after_recurrent_group_tightens_hit():
    """A recurrent group can lower the hit after the EAGLE group pops a chunk.

    The 62-token prompt has attention chunks h3, h7 and h11. The EAGLE group
    hits all three and pops h11. The Mamba group has a complete state only at
    16 (h3), so the complete hit drops to 16. The EAGLE lookup still confirmed
    h7, so the partial hit at 36 loads h7 without another lookup of it.
    """
    scheduler = _make_partial_tail_scheduler(eagle=True)
    request = _make_partial_tail_request(scheduler)
    request.num_prompt_tokens = request.num_tokens = 62
    request.block_hashes = [BlockHash(f"h{i}".encode()) for i in range(15)]
    request.all_token_ids = list(range(62))
    req_status = scheduler._req_status["req"]
    req_status.num_locally_computed_tokens = 0
    req_status.update_offload_keys()
    lookups = []

    def lookup(key, req_context):
        group_idx = get_offload_group_idx(key)
        block_hash = get_offload_block_hash(key)
        lookups.append(f"{group_idx}{block_hash.decode()}")
        ready = group_idx == 0 or block_hash in (b"h3", b"h8")
        return LookupResult.HIT if ready else LookupResult.MISS

    scheduler.manager.lookup.side_effect = lookup
    assert scheduler._lookup(req_status) == 36
    assert req_status.partial_tail_boundary == 36
    assert lookups.count("0h7") == 1

    scheduler.update_state_after_alloc(
        request,
        KVCacheBlocks(
            (
                [KVCacheBlock(31), KVCacheBlock(32), KVCacheBlock(33)],
                [
                    KVCacheBlock(0, is_null=True),
                    KVCacheBlock(0, is_null=True),
                    KVCacheBlock(41),
                ],
            )
        ),
        num_external_tokens=36,
    )
    [load_job_id] = scheduler._current_batch_load_jobs
    assert {
        (get_offload_group_idx(key), get_offload_block_hash(key))
        for key in scheduler._jobs[load_job_id].keys
    } == {(0, b"h3"), (0, b"h7"), (0, b"h9"), (1, b"h8")}


@pytest.mark.parametrize("cow_on_proof_step", [False, True])
def test_eagle_partial_tail_round_trip_serves_mamba_checkpoint(cow_on_proof_step):
    """Store, finish and resend a 30-token prompt with an EAGLE group.

    The resend hits the Mamba checkpoint at 24 only through the EAGLE
    group's proof key at 28. With ``cow_on_proof_step``, the steps follow core:
    the prefill stops at 24, and the CoW hand-off arrives on the step that
    computes tokens 24-30. The producer models a turn that loaded its prefix
    from the offload tier, so that its tail is stored.
    """
    scheduler = _make_partial_tail_scheduler(eagle=True)
    stored: set = set()
    scheduler.manager.lookup.side_effect = lambda key, req_context: (
        LookupResult.HIT if key in stored else LookupResult.MISS
    )
    scheduler.manager.prepare_store.side_effect = lambda keys, req_context: (
        generate_store_output(keys)
    )

    def run_step(num_scheduled_tokens, handoffs=None, finished=()):
        output = SchedulerOutput.make_empty()
        output.num_scheduled_tokens = num_scheduled_tokens
        output.finished_req_ids = set(finished)
        if handoffs is not None:
            output.kv_connector_block_state = KVConnectorBlockState(
                req_ids=set(),
                resolve_block_ids={}.__getitem__,
                boundary_state_offloads=handoffs,
            )
        meta = scheduler.build_connector_meta(output)
        for job_id in meta.store_jobs:
            stored.update(scheduler._jobs[job_id].keys)
        scheduler.update_connector_output(
            KVConnectorOutput(
                kv_connector_worker_meta=OffloadingWorkerMetadata(
                    completed_jobs={job_id: 1 for job_id in meta.store_jobs}
                )
            )
        )

    producer = _make_partial_tail_request(scheduler)
    producer.num_computed_tokens = 0
    producer.status = RequestStatus.RUNNING
    assert scheduler.get_num_new_matched_tokens(producer, 0) == (0, False)
    producer_status = scheduler._req_status["req"]
    producer_status.loaded_from_offload = True
    producer_status.group_states[0].block_ids[:] = [11, 12]
    producer_status.group_states[1].block_ids[:] = [0, 21]
    if cow_on_proof_step:
        run_step({"req": 24})
        producer.num_computed_tokens = 24
        run_step({"req": 6}, handoffs={"req": [(1, 99, 24)]})
        producer.num_computed_tokens = 30
    else:
        run_step({"req": 30})
        producer.num_computed_tokens = 30
        run_step({"req": 1}, handoffs={"req": [(1, 99, 24)]})
    producer.is_finished.return_value = True
    scheduler.request_finished(producer)
    run_step({}, finished={"req"})

    stored_positions = {
        (get_offload_group_idx(key), get_offload_block_hash(key)) for key in stored
    }
    assert stored_positions == {(0, b"h3"), (0, b"h6"), (1, b"h5")}

    consumer = _make_partial_tail_request(scheduler, request_id="resend")
    assert scheduler.get_num_new_matched_tokens(consumer, 0) == (24, True)
    scheduler.update_state_after_alloc(
        consumer,
        KVCacheBlocks(
            (
                [KVCacheBlock(31), KVCacheBlock(32)],
                [KVCacheBlock(0, is_null=True), KVCacheBlock(41)],
            )
        ),
        num_external_tokens=24,
    )
    [load_job_id] = scheduler._current_batch_load_jobs
    assert scheduler._jobs[load_job_id].keys == stored


@pytest.mark.parametrize("host_hit", [False, True])
def test_eagle_partial_tail_store_needs_offload_load(host_hit):
    """Store an EAGLE partial tail only after a load from the offload tier.

    Without a host hit, the GPU prefix cache keeps the tail, and the hand-off
    that computes the proof at 28 stores nothing. After the request loads 24
    tokens from the offload tier, the same hand-off stores the tail.
    """
    scheduler = _make_partial_tail_scheduler(eagle=True)
    scheduler.manager.lookup.side_effect = lambda key, req_context: (
        LookupResult.HIT
        if host_hit
        and (get_offload_group_idx(key) == 0 or get_offload_block_hash(key) == b"h5")
        else LookupResult.MISS
    )
    scheduler.manager.prepare_store.side_effect = lambda keys, req_context: (
        generate_store_output(keys)
    )
    request = _make_partial_tail_request(scheduler)
    num_external_tokens = 24 if host_hit else 0
    assert scheduler.get_num_new_matched_tokens(request, 0) == (
        num_external_tokens,
        host_hit,
    )
    scheduler.update_state_after_alloc(
        request,
        KVCacheBlocks(
            (
                [KVCacheBlock(11), KVCacheBlock(12)],
                [KVCacheBlock(0, is_null=True), KVCacheBlock(21)],
            )
        ),
        num_external_tokens=num_external_tokens,
    )
    req_status = scheduler._req_status["req"]
    req_status.group_states[0].block_ids[:] = [11, 12]
    req_status.group_states[1].block_ids[:] = [0, 21]
    request.num_computed_tokens = 24

    output = SimpleNamespace(
        num_scheduled_tokens={"req": 6},
        kv_connector_block_state=KVConnectorBlockState(
            req_ids=set(),
            resolve_block_ids={}.__getitem__,
            boundary_state_offloads={"req": [(1, 99, 24)]},
        ),
    )

    assert bool(scheduler._build_partial_tail_store_jobs(output)) == host_hit
    assert scheduler.manager.prepare_store.called == host_hit


def _make_tiering_engine_scheduler(secondary_tiers: list[dict[str, Any]]):
    """A real engine scheduler whose OffloadingConnector runs the real
    TieringOffloadingSpec manager; tests play the workers' reports."""
    vllm_config = create_vllm_config(block_size=4, max_num_batched_tokens=64)
    vllm_config.scheduler_config.async_scheduling = False
    vllm_config.kv_transfer_config = KVTransferConfig(
        kv_connector="OffloadingConnector",
        kv_role="kv_both",
        kv_connector_extra_config={
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": 16 * SharedOffloadRegion.BLOCK_SIZE_ALIGNMENT,
            "secondary_tiers": secondary_tiers,
        },
    )
    scheduler = create_scheduler(vllm_config, num_blocks=64)
    connector = scheduler.connector
    assert isinstance(connector, OffloadingConnector)
    assert connector.connector_scheduler is not None
    return scheduler, connector.connector_scheduler.manager


def _store_in_flight(scheduler) -> set[int]:
    """Finish a request whose store jobs no worker has reported yet."""
    request = create_request(num_tokens=16, block_size=4, max_tokens=1)
    scheduler.add_request(request)
    store_jobs: set[int] = set()
    for reqs in ([request], []):
        output = scheduler.schedule()
        meta = output.kv_connector_metadata
        assert isinstance(meta, OffloadingConnectorMetadata)
        store_jobs |= meta.store_jobs.keys()
        scheduler.update_from_output(output, create_model_runner_output(reqs))
    assert store_jobs and not scheduler.has_unfinished_requests()
    return store_jobs


def _report_jobs(scheduler, output, job_ids: set[int]) -> None:
    scheduler.update_from_output(
        output,
        create_model_runner_output(
            [],
            kv_connector_worker_meta=OffloadingWorkerMetadata(
                completed_jobs=dict.fromkeys(job_ids, 1)
            ),
        ),
    )


@pytest.mark.parametrize("promotes", [True, False])
def test_cache_reset_holds_promotions_until_flushed_jobs_report(promotes):
    # A flushed job may still write its released chunk until every worker
    # reports it (a late DMA), so the manager promotes into no chunk meanwhile.
    scheduler, manager = _make_tiering_engine_scheduler(
        [{"type": "example"}] if promotes else []
    )
    try:
        flushed = _store_in_flight(scheduler)
        ctx = ReqContext(req_id="peer")
        manager.on_new_request(ctx)
        key = make_offload_key(b"secondary-only", 0)
        if promotes:
            secondary = manager.secondary_tiers[0]
            assert isinstance(secondary, ExampleSecondaryTierManager)
            secondary.chunks[key] = True

        assert scheduler.reset_prefix_cache(reset_connector=True)

        # The engine must keep stepping until the flushed jobs report, even
        # with no request left: the flush still has to reach the workers.
        assert scheduler.has_requests()
        assert manager.lookup(key, ctx) is LookupResult.MISS
        output = scheduler.schedule()
        meta = output.kv_connector_metadata
        assert isinstance(meta, OffloadingConnectorMetadata)
        assert meta.jobs_to_flush == flushed
        _report_jobs(scheduler, output, flushed)

        assert not scheduler.has_requests()
        promoted = manager.lookup(key, ctx) is not LookupResult.MISS
        assert promoted is promotes
        manager.on_request_finished(ctx)
    finally:
        scheduler.shutdown()


def test_cache_reset_fence_ignores_reports_of_other_jobs():
    scheduler, manager = _make_tiering_engine_scheduler([{"type": "example"}])
    try:
        reported = _store_in_flight(scheduler)
        output = scheduler.schedule()
        _report_jobs(scheduler, output, reported)
        flushed = _store_in_flight(scheduler)

        assert scheduler.reset_prefix_cache(reset_connector=True)
        output = scheduler.schedule()
        # A late duplicate of a report from before the reset.
        _report_jobs(scheduler, output, reported)
        assert scheduler.has_requests()

        output = scheduler.schedule()
        _report_jobs(scheduler, output, flushed)
        assert not scheduler.has_requests()
    finally:
        scheduler.shutdown()


def test_cache_reset_without_in_flight_jobs_holds_nothing():
    scheduler, _ = _make_tiering_engine_scheduler([{"type": "example"}])
    try:
        stored = _store_in_flight(scheduler)
        output = scheduler.schedule()
        _report_jobs(scheduler, output, stored)
        # Step until the stored chunks have cascaded to the secondary tier.
        for _ in range(10):
            if not scheduler.has_requests():
                break
            output = scheduler.schedule()
            scheduler.update_from_output(output, create_model_runner_output([]))
        assert not scheduler.has_requests()

        assert scheduler.reset_prefix_cache(reset_connector=True)

        assert not scheduler.has_requests()
    finally:
        scheduler.shutdown()


def test_cache_reset_fence_held_too_long_warns_on_idle_steps(monkeypatch):
    """The warning must fire on the empty steps an idle engine takes while the
    fence is held, since no lookup runs there."""
    now = [1000.0]
    monkeypatch.setattr(
        scheduler_module, "time", SimpleNamespace(monotonic=lambda: now[0])
    )
    scheduler, _ = _make_tiering_engine_scheduler([{"type": "example"}])
    logger = MagicMock()
    monkeypatch.setattr(scheduler_module, "logger", logger)
    try:
        _store_in_flight(scheduler)
        assert scheduler.reset_prefix_cache(reset_connector=True)
        assert scheduler.has_requests()

        now[0] += scheduler_module._RESET_FENCE_WARN_S
        scheduler.schedule()
        logger.warning_once.assert_not_called()

        now[0] += 1
        assert scheduler.has_requests()
        output = scheduler.schedule()
        assert output.total_num_scheduled_tokens == 0
        logger.warning_once.assert_called_once()
    finally:
        scheduler.shutdown()


def test_scheduler_reports_allocation_failure(request_runner):
    runner = request_runner(
        block_size=4,
        num_gpu_blocks=10,
        async_scheduling=False,
    )
    runner.new_request(token_ids=[0] * 4)
    runner.manager.prepare_store.side_effect = lambda keys, req_context: None

    runner.run(decoded_tokens=[EOS_TOKEN_ID])

    reduced = _reduce_kv_connector_stats(runner)
    # Two attempts: once while running (block becomes full during prefill),
    # once from finished_req_ids on the next step.
    assert reduced[_ConnectorMetricName.ALLOCATION_FAILURE] == 2


@pytest.mark.parametrize("async_scheduling", [True, False])
@pytest.mark.parametrize("prompt_offset", [-1, -2])
def test_final_sampled_token_does_not_complete_an_offloaded_block(
    request_runner, async_scheduling: bool, prompt_offset: int
):
    """A block whose last slot holds the final sampled token is not stored.

    That token came out of the previous position's forward pass; its own KV
    slot is never written, and under spec decode it holds the first rejected
    draft's KV. Storing the block would publish it under a content hash that
    the GPU prefix cache itself declines to commit, so a later request with
    the same tokens would load the unwritten slot.

    prompt = 2 * block_size + prompt_offset tokens. Block 0 is filled by
    prefill and stored either way. At prompt_offset=-1 the EOS fills block 1,
    which the finishing step must still decline; at -2 block 1 stays partial.
    """
    block_size = 4
    runner = request_runner(
        block_size=block_size,
        num_gpu_blocks=10,
        async_scheduling=async_scheduling,
    )
    runner.new_request(token_ids=[0] * (2 * block_size + prompt_offset))
    runner.manager.prepare_store.side_effect = lambda keys, req_context: (
        generate_store_output(list(keys))
    )
    runner.run(decoded_tokens=[EOS_TOKEN_ID], expected_stored=(0,))

    cs = runner.connector_scheduler
    # After the full run completes, req_status is cleaned up.
    assert "0" not in cs._req_status


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_abort_queued_request_does_not_build_store_job(
    request_runner, async_scheduling: bool
):
    """Aborting a never-scheduled request must not store unallocated KV."""
    block_size = 4
    runner = request_runner(
        block_size=block_size,
        num_gpu_blocks=8,
        async_scheduling=async_scheduling,
    )

    runner.new_request(token_ids=[0] * (block_size * 4))
    runner.scheduler.schedule()

    runner.new_request(token_ids=[1] * (block_size * 4))
    queued_req_id = str(runner.req_id)
    assert any(
        request.request_id == queued_req_id for request in runner.scheduler.waiting
    )

    runner.scheduler.finish_requests(queued_req_id, RequestStatus.FINISHED_ABORTED)
    req_status = runner.connector_scheduler._req_status[queued_req_id]
    assert all(group_state.offload_keys for group_state in req_status.group_states)
    assert all(not group_state.block_ids for group_state in req_status.group_states)

    scheduler_output = runner.scheduler.schedule()

    metadata = scheduler_output.kv_connector_metadata
    assert isinstance(metadata, OffloadingConnectorMetadata)
    assert all(job.req_id != queued_req_id for job in metadata.store_jobs.values())
    assert queued_req_id not in runner.connector_scheduler._req_status


def test_store_jobs_wait_for_missing_offload_key(request_runner):
    """Allocated chunks must wait until their block hash becomes available."""
    block_size = 4
    runner = request_runner(
        block_size=block_size,
        num_gpu_blocks=8,
        async_scheduling=False,
    )
    runner.manager.prepare_store.side_effect = lambda keys, req_context: None
    runner.new_request(token_ids=[0] * (block_size * 2))
    runner.run(decoded_tokens=[1])

    req_id = str(runner.req_id)
    req_status = runner.connector_scheduler._req_status[req_id]
    req = req_status.req
    group_state = req_status.group_states[0]
    assert len(group_state.block_ids) >= 2
    assert len(group_state.offload_keys) == 2

    missing_hash = req.block_hashes.pop()
    group_state.offload_keys.pop()
    runner.manager.prepare_store.side_effect = lambda keys, req_context: (
        generate_store_output(keys)
    )
    scheduler_output = SimpleNamespace(
        num_scheduled_tokens={req_id: 0}, finished_req_ids=set()
    )

    jobs = runner.connector_scheduler._build_store_jobs(scheduler_output)
    assert len(jobs) == 1
    assert group_state.next_stored_chunk_idx == 1

    req.block_hashes.append(missing_hash)
    req_status.update_offload_keys()
    jobs = runner.connector_scheduler._build_store_jobs(scheduler_output)
    assert len(jobs) == 1
    assert group_state.next_stored_chunk_idx == 2


def test_scheduler_reports_lookup_sync_delay(request_runner):
    runner = request_runner(
        block_size=4,
        num_gpu_blocks=10,
        async_scheduling=False,
    )
    runner.new_request(token_ids=[1] * 4)
    runner.manager.prepare_store.side_effect = lambda keys, req_context: (
        generate_store_output([])
    )

    runner.run(decoded_tokens=[EOS_TOKEN_ID])

    reduced = _reduce_kv_connector_stats(runner)
    assert reduced[f"{_ConnectorMetricName.LOOKUP_SYNC_DELAY}_count"] == 1
    assert reduced[f"{_ConnectorMetricName.LOOKUP_SYNC_DELAY}_sum"] > 0


def test_on_schedule_end_is_the_last_manager_call_of_a_step(request_runner):
    """on_schedule_end must run after every other manager call of the step.

    Callers bound a step's exclusive access to the manager by releasing at
    on_schedule_end, so anything issued after it — notably prepare_store, which
    evicts — would fall outside that window.
    """
    block_size = 4
    runner = request_runner(
        block_size=block_size,
        num_gpu_blocks=8,
        async_scheduling=False,
    )
    runner.manager.prepare_store.side_effect = lambda keys, req_context: (
        generate_store_output([])
    )

    connector_scheduler = runner.connector_scheduler
    build_meta = connector_scheduler.build_connector_meta
    windows: list[list[str]] = []

    def spy(scheduler_output):
        first = len(runner.manager.mock_calls)
        meta = build_meta(scheduler_output)
        # Entering and exiting manager.lock brackets the step; only the state
        # operations it guards are ordered relative to on_schedule_end.
        windows.append(
            [
                name
                for name, _, _ in runner.manager.mock_calls[first:]
                if not name.startswith("lock.")
            ]
        )
        return meta

    connector_scheduler.build_connector_meta = spy

    runner.new_request(token_ids=[0] * (block_size * 2))
    runner.run(decoded_tokens=[EOS_TOKEN_ID])

    assert windows, "build_connector_meta was never called"
    assert any("prepare_store" in w for w in windows), (
        "step must exercise the calls that follow on_schedule_end today"
    )
    assert any("on_request_finished" in w for w in windows)
    for names in windows:
        assert names[-1] == "on_schedule_end", (
            f"on_schedule_end must be the last manager call of a step, got {names}"
        )


def test_step_releases_the_manager_before_the_model_runs(request_runner):
    """The step-scoped region must close when build_connector_meta returns.

    Everything after it -- the model future above all -- runs with the manager
    free, which is the only window another thread has to use it.
    """
    runner = request_runner(
        block_size=4,
        num_gpu_blocks=10,
        async_scheduling=False,
    )
    runner.manager.prepare_store.side_effect = lambda keys, req_context: (
        generate_store_output([])
    )

    runner.new_request(token_ids=[1] * 4)
    runner.run(decoded_tokens=[EOS_TOKEN_ID])

    scheduler = runner.connector_scheduler
    assert scheduler._step_region is None
    lock = runner.manager.lock
    assert lock.__enter__.call_count > 0
    assert lock.__enter__.call_count == lock.__exit__.call_count


def test_has_pending_push_work_does_not_open_the_step_region(request_runner):
    """It must take a short region, never the step-scoped one.

    The engine asks this before schedule() and returns early when the answer is
    False, so a step-scoped acquire here would never reach the release in
    build_connector_meta and would hold the manager for good.
    """
    runner = request_runner(
        block_size=4,
        num_gpu_blocks=10,
        async_scheduling=False,
    )
    scheduler = runner.connector_scheduler
    runner.manager.has_pending_work.return_value = False

    assert scheduler.has_pending_push_work() is False
    assert scheduler._step_region is None
    lock = runner.manager.lock
    assert lock.__enter__.call_count == lock.__exit__.call_count


def test_take_events_drains_the_manager_inside_the_region(request_runner):
    """take_events must not hold the manager across its own iteration.

    manager.take_events() is a generator whose backing list is cleared once
    exhausted, so draining it lazily would both pin the manager for as long as
    the consumer takes and lose events appended in the meantime.
    """
    runner = request_runner(
        block_size=4,
        num_gpu_blocks=10,
        async_scheduling=False,
    )
    scheduler = runner.connector_scheduler
    runner.manager.take_events.return_value = iter(())
    runner.manager.reset_mock()

    events = list(scheduler.take_events())

    assert events == []
    assert runner.manager.take_events.call_count == 1
    assert scheduler._step_region is None
    lock = runner.manager.lock
    assert lock.__enter__.call_count == 1
    assert lock.__exit__.call_count == 1


def test_scheduler_reports_lookup_async_delay_on_resolve(request_runner):
    """A deferred lookup reports its async delay once it resolves."""
    runner = request_runner(
        block_size=4,
        num_gpu_blocks=10,
        async_scheduling=False,
    )
    runner.manager.lookup.side_effect = [LookupResult.RETRY, LookupResult.MISS]
    runner.manager.prepare_store.side_effect = lambda keys, req_context: (
        generate_store_output([])
    )

    runner.new_request(token_ids=[1] * 4)
    runner.run(decoded_tokens=[EOS_TOKEN_ID])

    reduced = _reduce_kv_connector_stats(runner)
    assert reduced[f"{_ConnectorMetricName.LOOKUP_ASYNC_DELAY}_count"] == 1
    assert reduced[f"{_ConnectorMetricName.LOOKUP_ASYNC_DELAY}_sum"] > 0


def test_max_offload_tokens_zero_does_not_record_pending_lookups(request_runner):
    runner = request_runner(
        block_size=4,
        num_gpu_blocks=10,
        async_scheduling=False,
    )
    runner.manager.lookup.return_value = LookupResult.RETRY
    runner.manager.take_events.return_value = []
    runner.manager.prepare_store.side_effect = lambda keys, req_context: (
        generate_store_output(keys)
    )

    runner.new_request(
        token_ids=[1] * 12,
        kv_transfer_params={"max_offload_tokens": 0},
    )
    runner.run(decoded_tokens=[])

    tracker = runner.connector_scheduler._events_tracker
    assert runner.manager.lookup.call_count == 3
    assert not tracker._pending_event_metadata
    assert list(runner.connector_scheduler.take_events()) == []

    runner.manager.lookup.return_value = LookupResult.MISS
    runner.run(decoded_tokens=[EOS_TOKEN_ID])

    assert not tracker._pending_event_metadata
    assert list(runner.connector_scheduler.take_events()) == []


def test_abort_before_hit_uses_placeholder_then_later_hit_heals_removal(
    request_runner,
):
    runner = request_runner(
        block_size=4,
        num_gpu_blocks=10,
        async_scheduling=False,
        blocks_per_chunk=2,
    )
    raw_events: list[OffloadingEvent] = []

    def take_raw_events():
        yield from raw_events
        raw_events.clear()

    runner.manager.lookup.return_value = LookupResult.RETRY
    runner.manager.take_events.side_effect = take_raw_events
    runner.manager.prepare_store.side_effect = lambda keys, req_context: (
        generate_store_output([])
    )

    runner.new_request(token_ids=[1] * 8)
    runner.run(decoded_tokens=[])

    tracker = runner.connector_scheduler._events_tracker
    assert not tracker._pending_event_metadata
    key = runner.manager.lookup.call_args.args[0]
    req_id = str(runner.req_id)
    req_status = runner.connector_scheduler._req_status[req_id]

    runner.scheduler.finish_requests((req_id,), RequestStatus.FINISHED_ABORTED)

    assert not tracker._pending_event_metadata

    raw_events.append(OffloadingEvent(keys=[key], medium=Medium.CPU, removed=False))
    events = list(runner.connector_scheduler.take_events())
    assert len(events) == 1
    assert isinstance(events[0], BlockStored)
    assert events[0].block_size == 0
    assert events[0].token_ids == []

    runner.manager.lookup.return_value = LookupResult.HIT
    group_config = runner.connector_scheduler.config.kv_group_configs[0]
    assert (
        runner.connector_scheduler._maximal_prefix_lookup(
            [key],
            req_status.req_context,
            req_status.req,
            group_config,
            0,
        )
        == 1
    )
    assert key in tracker._pending_event_metadata

    raw_events.append(OffloadingEvent(keys=[key], medium=Medium.CPU, removed=True))
    [event] = runner.connector_scheduler.take_events()
    assert isinstance(event, BlockRemoved)
    assert event.medium == MEDIUM_CPU
    assert len(event.block_hashes) == 2
    assert key not in tracker._pending_event_metadata


@pytest.mark.parametrize("blocks_per_chunk", [1, 2])
def test_promotion_hit_precedes_stored_event_translation(
    request_runner,
    blocks_per_chunk: int,
):
    runner = request_runner(
        block_size=4,
        num_gpu_blocks=10,
        async_scheduling=False,
        blocks_per_chunk=blocks_per_chunk,
    )
    token_ids = [1] * 4 * blocks_per_chunk

    runner.manager.prepare_store.side_effect = lambda keys, req_context: (
        generate_store_output(keys)
    )
    runner.new_request(token_ids=token_ids)
    runner.run(
        decoded_tokens=[EOS_TOKEN_ID],
        expected_stored=tuple(range(blocks_per_chunk)),
    )
    runner.scheduler.reset_prefix_cache()
    runner.connector_scheduler._events_tracker.reset()

    raw_events: list[OffloadingEvent] = []

    def lookup(key, req_context):
        raw_events.append(OffloadingEvent(keys=[key], medium=Medium.CPU, removed=False))
        return LookupResult.HIT

    def take_raw_events():
        yield from raw_events
        raw_events.clear()

    runner.manager.lookup.side_effect = lookup
    runner.manager.take_events.side_effect = take_raw_events
    runner.manager.prepare_store.side_effect = lambda keys, req_context: (
        generate_store_output([])
    )
    publisher = MagicMock()
    runner.scheduler.kv_event_publisher = publisher

    runner.new_request(token_ids=token_ids)
    runner.run(
        decoded_tokens=[],
        expected_loaded=tuple(range(blocks_per_chunk)),
    )

    events = [
        event
        for publish_call in publisher.publish.call_args_list
        for event in publish_call.args[0].events
        if isinstance(event, BlockStored) and event.medium == MEDIUM_CPU
    ]
    assert len(events) == 1
    assert len(events[0].block_hashes) == blocks_per_chunk
    assert events[0].block_size == 4
    assert events[0].token_ids == token_ids


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_streaming_session_stores_new_chunks(request_runner, async_scheduling: bool):
    """A streaming session resumed for its next input chunk arrives with its
    full block table, so its new chunks must be stored from their own blocks."""
    runner = request_runner(
        block_size=4, num_gpu_blocks=100, async_scheduling=async_scheduling
    )
    runner.manager.prepare_store.side_effect = lambda keys, req_context: (
        generate_store_output(keys)
    )

    runner.new_request(token_ids=list(range(1, 9)), req_id="s", resumable=True)
    runner.run(decoded_tokens=[100, EOS_TOKEN_ID], expected_stored=(0, 1))

    runner.new_request(token_ids=list(range(200, 212)), req_id="s", resumable=True)
    runner.run(decoded_tokens=[300, EOS_TOKEN_ID], expected_stored=(2, 3, 4))


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_offloading_connector(request_runner, async_scheduling: bool):
    block_size = 4
    blocks_per_chunk = 3
    tokens_per_chunk = block_size * blocks_per_chunk
    num_gpu_blocks = 100

    runner = request_runner(
        block_size=block_size,
        num_gpu_blocks=num_gpu_blocks,
        async_scheduling=async_scheduling,
        blocks_per_chunk=blocks_per_chunk,
    )

    # 3 blocks, store just the middle block (skip first and last)
    # blocks = [0, 1, 2], [3, 4, 5], [6, 7, 8]
    runner.new_request(token_ids=[0] * tokens_per_chunk * 3)
    runner.manager.prepare_store.side_effect = lambda keys, req_context: (
        generate_store_output(list(keys)[1:2])
    )
    runner.run(decoded_tokens=[0])

    # add block missing 1 token -> no offload
    runner.run(
        decoded_tokens=[0] * (tokens_per_chunk - 1),
        expected_stored=(3, 4, 5),
    )
    runner.manager.touch.assert_not_called()

    # +1 token -> single block, fail prepare_store
    runner.manager.prepare_store.side_effect = lambda keys, req_context: None
    runner.run(decoded_tokens=[0])
    runner.manager.prepare_store.assert_called()

    # 1 more block (+ token for async scheduling)
    # now set block_hashes_to_store = []
    runner.manager.prepare_store.side_effect = lambda keys, req_context: (
        generate_store_output([])
    )
    runner.run(decoded_tokens=[0] * (tokens_per_chunk + 1))

    # 1 more block (+ token for kicking off offloading)
    runner.manager.prepare_store.side_effect = lambda keys, req_context: (
        generate_store_output(keys)
    )
    runner.run(
        decoded_tokens=[0] * (tokens_per_chunk + 1),
        expected_stored=(15, 16, 17),
    )

    # terminate request
    runner.run(decoded_tokens=[EOS_TOKEN_ID])

    # create a new request differing only on the last token
    runner.new_request(token_ids=[0] * (tokens_per_chunk * 6 - 1) + [1])
    runner.run(decoded_tokens=[0])
    runner.manager.touch.assert_not_called()

    # terminate request
    runner.run(
        decoded_tokens=[EOS_TOKEN_ID],
        expected_stored=tuple(range(6 * blocks_per_chunk)),
    )

    # full_block_tokens - num_computed_tokens < tokens_per_chunk
    runner.new_request(
        token_ids=[0] * block_size + [1] * (tokens_per_chunk - block_size)
    )
    runner.manager.prepare_store.side_effect = lambda keys, req_context: (
        generate_store_output([])
    )
    runner.run(decoded_tokens=[EOS_TOKEN_ID])
    runner.manager.lookup.assert_not_called()

    # single block lookup with no hits
    runner.new_request(token_ids=[1] * tokens_per_chunk)
    runner.manager.prepare_store.side_effect = lambda keys, req_context: (
        generate_store_output([])
    )
    runner.run(decoded_tokens=[EOS_TOKEN_ID])
    runner.manager.lookup.assert_called_once()

    # single block lookup with a hit
    runner.scheduler.reset_prefix_cache()
    runner.new_request(token_ids=[0] * tokens_per_chunk)
    runner.manager.prepare_store.side_effect = lambda keys, req_context: (
        generate_store_output([])
    )
    runner.connector_scheduler._maximal_prefix_lookup = lambda keys, ctx, *_: 1
    runner.run(decoded_tokens=[EOS_TOKEN_ID], expected_loaded=(0, 1, 2))

    # single block lookup with a hit in a middle block
    runner.new_request(token_ids=[0] * tokens_per_chunk * 2 + [1] * tokens_per_chunk)
    runner.manager.prepare_store.side_effect = lambda keys, req_context: (
        generate_store_output([])
    )
    runner.connector_scheduler._maximal_prefix_lookup = lambda keys, ctx, *_: 1
    runner.run(decoded_tokens=[EOS_TOKEN_ID], expected_loaded=(3, 4, 5))


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_small_hit_loads_synchronously(request_runner, async_scheduling: bool):
    block_size = 4
    blocks_per_chunk = 3
    tokens_per_chunk = block_size * blocks_per_chunk

    runner = request_runner(
        block_size=block_size,
        num_gpu_blocks=100,
        async_scheduling=async_scheduling,
        blocks_per_chunk=blocks_per_chunk,
    )
    # Budget for exactly one chunk per step.
    config = runner.connector_scheduler.config
    runner.connector_scheduler.config = config._replace(
        sync_load_budget_bytes=tokens_per_chunk * config.kv_bytes_per_token
    )

    def store_all():
        runner.connector_scheduler._maximal_prefix_lookup = lambda keys, ctx, *_: 0
        runner.manager.prepare_store.side_effect = lambda keys, req_context: (
            generate_store_output(keys)
        )

    def store_none():
        runner.manager.prepare_store.side_effect = lambda keys, req_context: (
            generate_store_output([])
        )

    matched: list[tuple[int | None, bool]] = []
    get_num_new_matched_tokens = runner.connector_scheduler.get_num_new_matched_tokens

    def record_matched(*args, **kwargs):
        result = get_num_new_matched_tokens(*args, **kwargs)
        matched.append(result)
        return result

    runner.connector_scheduler.get_num_new_matched_tokens = record_matched

    # Offload one chunk, then drop it from the GPU prefix cache.
    store_all()
    runner.new_request(token_ids=[0] * tokens_per_chunk + [1])
    runner.run(decoded_tokens=[EOS_TOKEN_ID], expected_stored=(0, 1, 2))
    runner.scheduler.reset_prefix_cache()

    # A one-chunk hit fits the budget and loads in the same step. The mock worker
    # records the worker's wait on it as a flush.
    store_none()
    matched.clear()
    runner.connector_scheduler._maximal_prefix_lookup = lambda keys, ctx, *_: 1
    runner.new_request(token_ids=[0] * tokens_per_chunk + [1] * tokens_per_chunk)
    runner.run(
        decoded_tokens=[EOS_TOKEN_ID],
        expected_loaded=(0, 1, 2),
        expected_flushed=(0, 1, 2),
    )
    assert matched == [(tokens_per_chunk, False)]

    # Offload two chunks, then drop them from the GPU prefix cache.
    store_all()
    runner.new_request(token_ids=[2] * tokens_per_chunk * 2 + [3])
    runner.run(decoded_tokens=[EOS_TOKEN_ID], expected_stored=tuple(range(6)))
    runner.scheduler.reset_prefix_cache()

    # A two-chunk hit exceeds the budget and stays an async load.
    store_none()
    matched.clear()
    runner.connector_scheduler._maximal_prefix_lookup = lambda keys, ctx, *_: 2
    runner.new_request(token_ids=[2] * tokens_per_chunk * 2 + [3] * tokens_per_chunk)
    runner.run(decoded_tokens=[EOS_TOKEN_ID], expected_loaded=tuple(range(6)))
    assert matched[0] == (tokens_per_chunk * 2, True)

    # A hit covering the whole prompt stays async: nothing would be left to compute.
    matched.clear()
    runner.new_request(token_ids=[0] * tokens_per_chunk)
    runner.run(decoded_tokens=[EOS_TOKEN_ID], expected_loaded=(0, 1, 2))
    assert matched[0] == (tokens_per_chunk, True)


@pytest.mark.parametrize("async_scheduling", [True, False])
@pytest.mark.parametrize("cpu_hit", [True, False])
def test_request_preemption(request_runner, async_scheduling: bool, cpu_hit: bool):
    """Resume reloads the chunks, or re-stores them if the CPU tier lost them."""
    block_size = 4
    blocks_per_chunk = 3
    tokens_per_chunk = block_size * blocks_per_chunk
    num_gpu_blocks = 100

    runner = request_runner(
        block_size=block_size,
        num_gpu_blocks=num_gpu_blocks,
        async_scheduling=async_scheduling,
        blocks_per_chunk=blocks_per_chunk,
    )

    free_block_queue = runner.scheduler.kv_cache_manager.block_pool.free_block_queue
    num_free_blocks_empty = free_block_queue.num_free_blocks

    # 2 blocks, store all, without flushing
    # blocks = [0, 1, 2], [3, 4, 5]
    runner.new_request(token_ids=[0] * tokens_per_chunk * 2)
    runner.manager.prepare_store.side_effect = lambda keys, req_context: (
        generate_store_output(keys)
    )
    runner.run(
        decoded_tokens=[0],
        complete_transfers=False,
    )

    # decode 2 more blocks - 1 gpu block, storing [6, 7, 8] (no flush)
    runner.manager.prepare_store.side_effect = lambda keys, req_context: (
        generate_store_output(keys)
    )
    runner.run(
        decoded_tokens=[0] * (2 * tokens_per_chunk - block_size),
        complete_transfers=False,
    )

    # simulate KV cache running out of space
    free_block_queue.num_free_blocks = 0

    # request should be preempted now
    runner.run(
        decoded_tokens=[],
        complete_transfers=False,
        expected_flushed=(0, 1, 2, 3, 4, 5, 6, 7, 8),
        expected_stored=(0, 1, 2, 3, 4, 5, 6, 7, 8),
    )

    # restore KV cache space and reset GPU prefix cache
    free_block_queue.num_free_blocks = num_free_blocks_empty
    runner.scheduler.reset_prefix_cache()

    runner.manager.prepare_store.side_effect = lambda keys, req_context: (
        generate_store_output(keys)
    )
    if cpu_hit:
        # request should now return from preemption
        # re-load [0, ..., 8] from the CPU and store [9, 10, 11]
        runner.connector_scheduler._maximal_prefix_lookup = lambda keys, ctx, *_: 3
        runner.run(
            decoded_tokens=[0] * block_size,
            expected_loaded=(0, 1, 2, 3, 4, 5, 6, 7, 8),
        )
    else:
        # lookup misses: recompute and re-store [0, ..., 8], then store [9, 10, 11]
        runner.run(
            decoded_tokens=[0] * block_size,
            expected_stored=(0, 1, 2, 3, 4, 5, 6, 7, 8),
        )

    runner.run(
        decoded_tokens=[EOS_TOKEN_ID],
        expected_stored=(9, 10, 11),
    )

    # All stores completed before request_finished -> fence index empty.
    assert runner.connector_scheduler._block_id_to_pending_jobs == {}


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_on_request_finished_not_deferred_until_store_completion(
    request_runner, async_scheduling: bool
):
    """on_request_finished fires after the last prepare_store is submitted.

    The manager contract guarantees no more submit-side calls (prepare_store)
    after on_request_finished. However, complete_store callbacks for
    already-submitted transfers may still arrive afterward.
    """
    block_size = 4
    blocks_per_chunk = 3
    tokens_per_chunk = block_size * blocks_per_chunk

    runner = request_runner(
        block_size=block_size,
        num_gpu_blocks=100,
        async_scheduling=async_scheduling,
        blocks_per_chunk=blocks_per_chunk,
    )

    # Record the order of per-request connector calls on the (mocked) manager.
    # The external list survives manager.reset_mock() between run() calls.
    calls: list[tuple[str, str]] = []
    runner.manager.on_request_finished.side_effect = lambda req_context: calls.append(
        ("on_request_finished", req_context.req_id)
    )
    runner.manager.complete_store.side_effect = (
        lambda keys, req_context, *args, **kwargs: calls.append(
            ("complete_store", req_context.req_id)
        )
    )
    runner.manager.prepare_store.side_effect = lambda keys, req_context: (
        generate_store_output(keys)
    )

    # Decode a couple of blocks, keeping every transfer in flight
    # (complete_transfers=False) so no store completes while the request runs.
    runner.new_request(token_ids=[0] * tokens_per_chunk * 2)
    runner.run(decoded_tokens=[0], complete_transfers=False)
    runner.run(
        decoded_tokens=[0] * (2 * tokens_per_chunk),
        complete_transfers=False,
    )

    # Finish the request while its stores are still in flight. The hook fires
    # once the last prepare_store is issued (on the next schedule step), even
    # though complete_store has not yet been called.
    runner.run(
        decoded_tokens=[EOS_TOKEN_ID],
        complete_transfers=False,
    )

    req_id = str(runner.req_id)

    assert calls == [("on_request_finished", req_id)], calls

    # Drain the stores afterward. complete_store is allowed after the hook.
    runner.run(
        decoded_tokens=[],
        complete_transfers=True,
        expected_stored=tuple(range(4 * blocks_per_chunk)),
    )

    # on_request_finished is issued exactly once.
    assert calls.count(("on_request_finished", req_id)) == 1, calls

    finished_idx = calls.index(("on_request_finished", req_id))
    store_indices = [i for i, c in enumerate(calls) if c == ("complete_store", req_id)]

    # complete_store arrives after on_request_finished, as allowed by the contract.
    assert store_indices, calls
    assert finished_idx < min(store_indices), calls


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_on_request_finished_fires_after_final_block_store(
    request_runner, async_scheduling: bool
):
    """on_request_finished fires after the final prepare_store of the request.

    request_finished() keeps req_status alive so _build_store_jobs can retry a
    block on the next step; the retry must be issued before the manager is told
    the request is over. Every attempt made before the request finishes is
    declined here, so the store that succeeds is the one from the finishing
    step and the ordering has something to order.
    """
    block_size = 4
    runner = request_runner(
        block_size=block_size,
        num_gpu_blocks=10,
        async_scheduling=async_scheduling,
    )

    calls: list[tuple[str, str]] = []
    runner.manager.on_request_finished.side_effect = lambda req_context: calls.append(
        ("on_request_finished", req_context.req_id)
    )

    runner.new_request(token_ids=[0] * block_size)
    request = runner.scheduler.requests[str(runner.req_id)]

    def prepare_store(keys, req_context):
        finished = request.is_finished()
        calls.append(
            ("stored_after_finish" if finished else "prepare_store", req_context.req_id)
        )
        return generate_store_output(keys) if finished else None

    runner.manager.prepare_store.side_effect = prepare_store

    runner.run(decoded_tokens=[EOS_TOKEN_ID], expected_stored=(0,))

    req_id = str(runner.req_id)
    assert calls.count(("on_request_finished", req_id)) == 1, calls
    assert calls.count(("stored_after_finish", req_id)) == 1, calls

    finished_idx = calls.index(("on_request_finished", req_id))
    store_indices = [
        i
        for i, c in enumerate(calls)
        if c in (("prepare_store", req_id), ("stored_after_finish", req_id))
    ]
    assert finished_idx > max(store_indices), calls


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_concurrent_lookups_of_the_same_prefix(request_runner, async_scheduling: bool):
    block_size = 4
    blocks_per_chunk = 3
    tokens_per_chunk = block_size * blocks_per_chunk
    num_gpu_blocks = 100

    runner = request_runner(
        block_size=block_size,
        num_gpu_blocks=num_gpu_blocks,
        async_scheduling=async_scheduling,
        blocks_per_chunk=blocks_per_chunk,
    )

    # store 1 blocks
    runner.new_request(token_ids=[0] * tokens_per_chunk)
    runner.manager.prepare_store.side_effect = lambda keys, req_context: (
        generate_store_output(keys)
    )
    runner.run(
        decoded_tokens=[EOS_TOKEN_ID],
        expected_stored=(0, 1, 2),
    )

    # start a request to load the first block, but don't complete
    runner.scheduler.reset_prefix_cache()
    runner.new_request(token_ids=[0] * tokens_per_chunk)
    runner.connector_scheduler._maximal_prefix_lookup = lambda keys, ctx, *_: 1
    runner.run(
        decoded_tokens=[],
        complete_transfers=False,
    )

    # request triggered a load
    transfer_jobs = list(runner.offloading_spec.handler.transfer_specs)
    assert transfer_jobs

    # start a new request to load the same first block
    runner.new_request(token_ids=[0] * tokens_per_chunk)
    runner.connector_scheduler._maximal_prefix_lookup = lambda keys, ctx, *_: 1
    runner.run(
        decoded_tokens=[],
        complete_transfers=False,
    )

    # request did not trigger a load
    assert transfer_jobs == list(runner.offloading_spec.handler.transfer_specs)

    # complete transfers
    runner.manager.prepare_store.side_effect = lambda keys, req_context: (
        generate_store_output([])
    )
    runner.run(
        decoded_tokens=[EOS_TOKEN_ID],
        expected_loaded=(0, 1, 2),
    )

    # second request will use the GPU prefix cache
    assert transfer_jobs == list(runner.offloading_spec.handler.transfer_specs)

    # Fence index drained: stores completed before request_finished ran.
    assert runner.connector_scheduler._block_id_to_pending_jobs == {}


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_abort_loading_requests(request_runner, async_scheduling: bool):
    block_size = 4
    blocks_per_chunk = 3
    tokens_per_chunk = block_size * blocks_per_chunk
    num_gpu_blocks = 100

    runner = request_runner(
        block_size=block_size,
        num_gpu_blocks=num_gpu_blocks,
        async_scheduling=async_scheduling,
        blocks_per_chunk=blocks_per_chunk,
    )

    # store 1 blocks
    runner.new_request(token_ids=[0] * tokens_per_chunk)
    runner.manager.prepare_store.side_effect = lambda keys, req_context: (
        generate_store_output(keys)
    )
    runner.run(
        decoded_tokens=[EOS_TOKEN_ID],
        expected_stored=(0, 1, 2),
    )

    # start a request to load the first block, but don't complete
    runner.scheduler.reset_prefix_cache()
    runner.new_request(token_ids=[0] * tokens_per_chunk)
    runner.connector_scheduler._maximal_prefix_lookup = lambda keys, ctx, *_: 1
    runner.run(
        decoded_tokens=[],
        complete_transfers=False,
    )

    # request triggered a load
    transfer_jobs = list(runner.offloading_spec.handler.transfer_specs)
    assert transfer_jobs

    # abort request
    req_id = str(runner.req_id)
    runner.scheduler.finish_requests((req_id,), RequestStatus.FINISHED_ABORTED)

    # verify request is not deleted
    assert req_id in runner.scheduler.requests

    # complete loading request
    runner.run(
        decoded_tokens=[],
        expected_loaded=(0, 1, 2),
    )

    # assert request is deleted
    assert req_id not in runner.scheduler.requests


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_two_groups_full_and_sliding_window(request_runner, async_scheduling: bool):
    block_size = 4
    num_gpu_blocks = 100
    # sliding_window=8 -> 2 offloaded chunks (blocks_per_chunk=1)
    sliding_window = 8

    kv_cache_groups = [
        KVCacheGroupSpec(
            ["layer0"],
            FullAttentionSpec(
                block_size=block_size,
                num_kv_heads=1,
                head_size=1,
                dtype=torch.float32,
            ),
        ),
        KVCacheGroupSpec(
            ["layer1"],
            SlidingWindowSpec(
                block_size=block_size,
                num_kv_heads=1,
                head_size=1,
                dtype=torch.float32,
                sliding_window=sliding_window,
            ),
        ),
    ]

    runner = request_runner(
        block_size=block_size,
        num_gpu_blocks=num_gpu_blocks,
        async_scheduling=async_scheduling,
        kv_cache_groups=kv_cache_groups,
    )

    # Verify group configs: group 0 = full attention, group 1 = sliding window
    kv_group_configs = runner.connector_scheduler.config.kv_group_configs
    assert len(kv_group_configs) == 2
    assert kv_group_configs[0].sliding_window_size_in_chunks is None
    assert kv_group_configs[1].sliding_window_size_in_chunks == 2

    # Blocks [0, 1, 2] miss
    runner.new_request(token_ids=[0] * block_size * 3)
    runner.manager.prepare_store.side_effect = lambda keys, req_context: (
        generate_store_output(keys)
    )
    runner.run(decoded_tokens=[0])
    runner.manager.touch.assert_not_called()

    # store 3 more block
    runner.manager.prepare_store.side_effect = lambda keys, req_context: (
        generate_store_output(keys)
    )
    runner.run(
        decoded_tokens=[0] * (block_size * 3 + 2),
        expected_stored=(0, 1, 2, 3, 4, 5),
    )

    runner.manager.touch.assert_not_called()

    # EOS lands in the last slot of the 7th block (offset 6). No forward pass
    # writes that slot, so the finishing step declines the block.
    runner.run(decoded_tokens=[EOS_TOKEN_ID])

    runner.scheduler.reset_prefix_cache()

    # full 3 blocks hit [0, 1, 2]
    runner.new_request(token_ids=[0] * (block_size * 3 + 1))
    runner.manager.lookup.return_value = LookupResult.HIT
    runner.run(
        decoded_tokens=[EOS_TOKEN_ID],
        # Group 0 (full attn): prefix lookup hits 3 → loads blocks 0,1,2
        # Group 1 (sliding window, window=2): only the last 2 blocks
        #   are within the window → loads blocks 1,2
        expected_loaded=((0, 0), (0, 1), (0, 2), (1, 1), (1, 2)),
    )
    runner.manager.touch.assert_not_called()

    # 3 blocks are hit on GPU [0, 1, 2]
    # 1 block loaded [3,]
    runner.new_request(token_ids=[0] * (block_size * 4 + 1))
    runner.manager.lookup.return_value = LookupResult.HIT
    runner.run(
        decoded_tokens=[EOS_TOKEN_ID],
        # Group 0 (full attn): prefix lookup hits 3 → loads blocks 0,1,2
        # Group 1 (sliding window, window=2): only the last 2 blocks
        #   are within the window → loads blocks 1,2
        expected_loaded=((0, 3), (1, 3)),
    )


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_sliding_window_chunk_with_null_block_is_not_stored(
    request_runner, async_scheduling: bool
):
    block_size = 4
    spec_kwargs: dict[str, Any] = dict(
        block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.float32
    )
    kv_cache_groups = [
        KVCacheGroupSpec(["layer0"], FullAttentionSpec(**spec_kwargs)),
        KVCacheGroupSpec(
            ["layer1"],
            SlidingWindowSpec(**spec_kwargs, sliding_window=2 * block_size),
        ),
    ]
    runner = request_runner(
        block_size=block_size,
        num_gpu_blocks=100,
        async_scheduling=async_scheduling,
        blocks_per_chunk=2,
        kv_cache_groups=kv_cache_groups,
    )

    stored_keys: set[OffloadKey] = set()

    def store(keys, req_context):
        stored_keys.update(keys)
        return generate_store_output(keys)

    runner.manager.lookup.side_effect = lambda key, req_context: (
        LookupResult.HIT if key in stored_keys else LookupResult.MISS
    )

    runner.manager.prepare_store.side_effect = lambda keys, req_context: (
        generate_store_output([])
    )
    runner.new_request(token_ids=[0] * (3 * block_size))
    runner.run(decoded_tokens=[EOS_TOKEN_ID])

    # B's GPU hit leaves sliding-window block 0 null, inside chunk 0.
    runner.manager.prepare_store.side_effect = store
    runner.new_request(token_ids=[0] * (3 * block_size) + [1])
    runner.run(decoded_tokens=[EOS_TOKEN_ID], expected_stored=((0, 0), (0, 1)))

    runner.scheduler.reset_prefix_cache()
    runner.new_request(token_ids=[0] * (2 * block_size) + [2] * (block_size + 1))
    runner.run(
        decoded_tokens=[EOS_TOKEN_ID],
        expected_stored=((0, 0), (0, 1), (1, 0), (1, 1)),
    )


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_two_groups_different_block_sizes(request_runner, async_scheduling: bool):
    tokens_per_hash = 4
    num_gpu_blocks = 100

    # Group 0: block_size=12 (tokens_per_chunk=12)
    # Group 1: block_size=16 (tokens_per_chunk=16)
    kv_cache_groups = [
        KVCacheGroupSpec(
            ["layer0"],
            FullAttentionSpec(
                block_size=tokens_per_hash * 3,
                num_kv_heads=1,
                head_size=1,
                dtype=torch.float32,
            ),
        ),
        KVCacheGroupSpec(
            ["layer1"],
            FullAttentionSpec(
                block_size=tokens_per_hash * 4,
                num_kv_heads=1,
                head_size=1,
                dtype=torch.float32,
            ),
        ),
    ]

    runner = request_runner(
        block_size=tokens_per_hash,
        num_gpu_blocks=num_gpu_blocks,
        async_scheduling=async_scheduling,
        kv_cache_groups=kv_cache_groups,
    )

    # Verify group configs
    kv_group_configs = runner.connector_scheduler.config.kv_group_configs
    assert len(kv_group_configs) == 2
    assert kv_group_configs[0].tokens_per_block == 12
    assert kv_group_configs[0].tokens_per_chunk == 12
    assert kv_group_configs[1].tokens_per_block == 16
    assert kv_group_configs[1].tokens_per_chunk == 16

    # Prompt: 25 tokens, unaligned to both block sizes.
    # Group 0 blocks: [0, 1], ending_token_offset = 24
    # Group 1 blocks: [0,], ending_token_offset = 16
    runner.new_request(token_ids=[0] * 25)
    runner.manager.prepare_store.side_effect = lambda keys, req_context: (
        generate_store_output(keys)
    )
    runner.run(decoded_tokens=[0])
    runner.manager.touch.assert_not_called()

    # Get to 31 tokens
    # No further blocks offloaded
    runner.run(decoded_tokens=[0] * 6, expected_stored=((0, 0), (0, 1), (1, 0)))

    # Get to 32 tokens
    # Group 0 blocks: [0, 1], ending_token_offset = 24
    # Group 1 blocks: [0, 1], ending_token_offset = 32
    runner.run(decoded_tokens=[0])
    runner.manager.touch.assert_not_called()

    # Get to 35 tokens
    # No further blocks offloaded
    runner.run(decoded_tokens=[0] * 3, expected_stored=((1, 1),))

    # Get to 36 tokens
    # Group 0 blocks: [0, 1, 2], ending_token_offset = 36
    # Group 1 blocks: [0, 1], ending_token_offset = 32
    runner.run(decoded_tokens=[0])
    runner.manager.touch.assert_not_called()

    # Get to 47 tokens
    # No further blocks offloaded
    runner.run(decoded_tokens=[0] * 11, expected_stored=((0, 2),))

    # Get to 48 tokens
    # Group 0 blocks: [0, 1, 2, 3], ending_token_offset = 4
    # Group 1 blocks: [0, 1, 2], ending_token_offset = 48
    runner.run(decoded_tokens=[0])
    runner.manager.touch.assert_not_called()

    runner.run(decoded_tokens=[0], expected_stored=((0, 3), (1, 2)))

    # Get to 96 tokens
    runner.run(
        decoded_tokens=[0] * 47 + [EOS_TOKEN_ID],
        expected_stored=((0, 4), (0, 5), (0, 6), (0, 7), (1, 3), (1, 4), (1, 5)),
    )

    runner.scheduler.reset_prefix_cache()

    # Request with 48 matching tokens
    # will match 48 tokens (4 block) from the first group
    # 48 tokens (3 block) from the second group
    # Total 48 tokens can be loaded
    runner.new_request(token_ids=[0] * 48)
    runner.manager.lookup.return_value = LookupResult.HIT
    runner.manager.prepare_store.side_effect = lambda keys, req_context: (
        generate_store_output([])
    )
    runner.run(
        decoded_tokens=[0],
        expected_loaded=((0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1), (1, 2)),
    )
    runner.run(decoded_tokens=[EOS_TOKEN_ID])

    # Request with 48+37 matching tokens
    # 48 tokens will be hit on GPU
    # extra 32 tokens will be loaded
    # extra tokens [0, 36] (blocks [4, 5, 6]) from the first group
    # extra tokens [0, 32] (block [3, 4]) from the second group
    runner.new_request(token_ids=[0] * (48 + 37))
    runner.manager.lookup.return_value = LookupResult.HIT
    runner.manager.prepare_store.side_effect = lambda keys, req_context: (
        generate_store_output([])
    )
    runner.run(
        decoded_tokens=[0],
        expected_loaded=((0, 4), (0, 5), (0, 6), (1, 3), (1, 4)),
    )
    runner.run(decoded_tokens=[EOS_TOKEN_ID])


# ---------------------------------------------------------------------------
# Unit tests for _maximal_prefix_lookup / _sliding_window_lookup
# ---------------------------------------------------------------------------


def _make_scheduler_with_lookup(
    lookup_results: dict[int, LookupResult],
    default: LookupResult = LookupResult.MISS,
) -> OffloadingConnectorScheduler:
    """Create an OffloadingConnectorScheduler with a mocked manager.lookup.

    Keys are addressed by their integer hash; `default` answers anything else.
    """
    manager = MagicMock(spec=OffloadingManager)

    def lookup(key, req_context):
        block_hash = get_offload_block_hash(key)
        if not block_hash.isdigit():
            return default
        return lookup_results.get(int(block_hash.decode()), default)

    manager.lookup.side_effect = lookup

    scheduler = object.__new__(OffloadingConnectorScheduler)
    scheduler.manager = manager
    scheduler._events_tracker = MagicMock()
    return scheduler


_EMPTY_REQ_CTX = ReqContext(req_id="")
_LOOKUP_REQ = MagicMock()
_LOOKUP_REQ.request_id = "req"
_LOOKUP_GROUP_CONFIG = MagicMock()


def _maximal_lookup(sched, keys, start_chunk_idx: int = 0):
    return sched._maximal_prefix_lookup(
        keys,
        _EMPTY_REQ_CTX,
        _LOOKUP_REQ,
        _LOOKUP_GROUP_CONFIG,
        start_chunk_idx,
    )


# Lookups issued, and end index returned, by a window-1 scan over 3 keys all
# resolving to the same result. A result that keeps the streak alive ends the
# scan at the first key; one that resets it makes the scan walk every key,
# which is what widens the demanded set. A new member has to be added here.
_SCAN_BEHAVIOR = {
    LookupResult.HIT: (1, 3),
    LookupResult.HIT_PENDING: (1, None),
    LookupResult.RETRY: (3, None),
    LookupResult.MISS: (3, 0),
}


@pytest.mark.parametrize("result", list(LookupResult))
def test_scan_behavior_declared_for_every_lookup_result(result: LookupResult):
    """Whether a result keeps a sliding-window streak alive decides how wide
    the demanded chunk set gets, so every member needs deliberate behavior."""
    assert result in _SCAN_BEHAVIOR, f"{result} has no declared scan behavior"
    expected_lookups, expected_end = _SCAN_BEHAVIOR[result]

    keys = to_keys([1, 2, 3])
    sched = _make_scheduler_with_lookup(dict.fromkeys([1, 2, 3], result))

    assert sched._sliding_window_lookup(keys, 1, _EMPTY_REQ_CTX) == expected_end
    assert len(_as_mock(sched.manager.lookup).call_args_list) == expected_lookups


@pytest.mark.parametrize(
    ("middle", "expected"),
    [
        (LookupResult.MISS, 2),
        (LookupResult.RETRY, None),
        (LookupResult.HIT_PENDING, None),
        (LookupResult.HIT, 5),
    ],
)
def test_sliding_window_unaligned_initial_run(middle, expected):
    sched = _make_scheduler_with_lookup({3: middle}, default=LookupResult.HIT)
    # If the larger rightmost window misses, the earlier aligned window only
    # needs the usual two chunks. Pending/uncertain keys must still defer.
    assert (
        sched._sliding_window_lookup(
            to_keys([1, 2, 3, 4, 5]), 2, _EMPTY_REQ_CTX, initial_window_size=3
        )
        == expected
    )


class TestMaximalPrefixLookup:
    def test_all_hit(self):
        sched = _make_scheduler_with_lookup({1: LookupResult.HIT, 2: LookupResult.HIT})
        assert _maximal_lookup(sched, to_keys([1, 2])) == 2

    def test_records_absolute_chunk_indices(self):
        keys = to_keys([1, 2])
        sched = _make_scheduler_with_lookup({1: LookupResult.HIT, 2: LookupResult.HIT})

        assert _maximal_lookup(sched, keys, start_chunk_idx=3) == 2
        assert _as_mock(sched._events_tracker.record_lookup).call_args_list == [
            call(
                _LOOKUP_REQ,
                _LOOKUP_GROUP_CONFIG,
                3,
                keys[0],
            ),
            call(
                _LOOKUP_REQ,
                _LOOKUP_GROUP_CONFIG,
                4,
                keys[1],
            ),
        ]

    def test_all_miss(self):
        sched = _make_scheduler_with_lookup({})
        assert _maximal_lookup(sched, to_keys([1, 2])) == 0
        _as_mock(sched._events_tracker.record_lookup).assert_not_called()

    def test_partial_prefix(self):
        sched = _make_scheduler_with_lookup({1: LookupResult.HIT, 2: LookupResult.HIT})
        assert _maximal_lookup(sched, to_keys([1, 2, 3])) == 2

    def test_miss_then_hit(self):
        sched = _make_scheduler_with_lookup({2: LookupResult.HIT})
        assert _maximal_lookup(sched, to_keys([1, 2])) == 0

    def test_single_hit(self):
        sched = _make_scheduler_with_lookup({1: LookupResult.HIT})
        assert _maximal_lookup(sched, to_keys([1])) == 1

    def test_empty(self):
        sched = _make_scheduler_with_lookup({})
        assert _maximal_lookup(sched, []) == 0

    @pytest.mark.parametrize(
        "pending_result",
        [LookupResult.RETRY, LookupResult.HIT_PENDING],
    )
    def test_pending_result_records_only_allocated_primary(
        self,
        pending_result: LookupResult,
    ):
        sched = _make_scheduler_with_lookup({1: pending_result})

        assert _maximal_lookup(sched, to_keys([1])) is None
        if pending_result is LookupResult.HIT_PENDING:
            _as_mock(sched._events_tracker.record_lookup).assert_called_once_with(
                _LOOKUP_REQ, _LOOKUP_GROUP_CONFIG, 0, to_keys([1])[0]
            )
        else:
            _as_mock(sched._events_tracker.record_lookup).assert_not_called()

    def test_retry_defers(self):
        keys = to_keys([1, 2])
        sched = _make_scheduler_with_lookup(
            {1: LookupResult.RETRY, 2: LookupResult.HIT}
        )
        assert _maximal_lookup(sched, keys) is None
        assert _as_mock(sched.manager.lookup).call_count == 2
        _as_mock(sched._events_tracker.record_lookup).assert_called_once_with(
            _LOOKUP_REQ,
            _LOOKUP_GROUP_CONFIG,
            1,
            keys[1],
        )

    def test_retry_after_hit_defers(self):
        keys = to_keys([1, 2])
        sched = _make_scheduler_with_lookup(
            {1: LookupResult.HIT, 2: LookupResult.RETRY}
        )
        assert _maximal_lookup(sched, keys) is None
        _as_mock(sched._events_tracker.record_lookup).assert_called_once_with(
            _LOOKUP_REQ,
            _LOOKUP_GROUP_CONFIG,
            0,
            keys[0],
        )

    def test_hit_pending_defers(self):
        keys = to_keys([1, 2])
        sched = _make_scheduler_with_lookup(
            {1: LookupResult.HIT_PENDING, 2: LookupResult.HIT}
        )
        assert _maximal_lookup(sched, keys) is None
        assert _as_mock(sched.manager.lookup).call_count == 2
        assert _as_mock(sched._events_tracker.record_lookup).call_args_list == [
            call(_LOOKUP_REQ, _LOOKUP_GROUP_CONFIG, i, key)
            for i, key in enumerate(keys)
        ]

    def test_hit_pending_does_not_stop_scan(self):
        """HIT_PENDING defers but does not break — scan continues until miss."""
        sched = _make_scheduler_with_lookup(
            {1: LookupResult.HIT_PENDING, 2: LookupResult.MISS, 3: LookupResult.HIT}
        )
        assert _maximal_lookup(sched, to_keys([1, 2, 3])) is None
        assert _as_mock(sched.manager.lookup).call_count == 2
        _as_mock(sched._events_tracker.record_lookup).assert_called_once_with(
            _LOOKUP_REQ, _LOOKUP_GROUP_CONFIG, 0, to_keys([1])[0]
        )

    def test_retry_stops_at_miss(self):
        """RETRY is treated as hit for iteration, but miss stops the scan."""
        sched = _make_scheduler_with_lookup(
            {1: LookupResult.RETRY, 2: LookupResult.MISS, 3: LookupResult.HIT}
        )
        assert _maximal_lookup(sched, to_keys([1, 2, 3])) is None
        # lookup should have been called for blocks 1 and 2 (stops at miss)
        assert _as_mock(sched.manager.lookup).call_count == 2
        _as_mock(sched._events_tracker.record_lookup).assert_not_called()


class TestSlidingWindowLookup:
    def test_pending_chunk_behind_gap_does_not_defer(self):
        """A pending suffix too short for the window cannot improve the hit."""
        sched = _make_scheduler_with_lookup(
            {1: LookupResult.HIT, 2: LookupResult.HIT, 4: LookupResult.HIT_PENDING}
        )
        assert (
            sched._sliding_window_lookup(to_keys([1, 2, 3, 4]), 2, _EMPTY_REQ_CTX) == 2
        )

    def test_all_hit_exact_window(self):
        sched = _make_scheduler_with_lookup({1: LookupResult.HIT, 2: LookupResult.HIT})
        assert sched._sliding_window_lookup(to_keys([1, 2]), 2, _EMPTY_REQ_CTX) == 2

    def test_all_miss(self):
        sched = _make_scheduler_with_lookup({})
        assert sched._sliding_window_lookup(to_keys([1, 2, 3]), 1, _EMPTY_REQ_CTX) == 0

    def test_window_at_end(self):
        sched = _make_scheduler_with_lookup({2: LookupResult.HIT, 3: LookupResult.HIT})
        assert sched._sliding_window_lookup(to_keys([1, 2, 3]), 2, _EMPTY_REQ_CTX) == 3

    def test_window_in_middle(self):
        sched = _make_scheduler_with_lookup({2: LookupResult.HIT, 3: LookupResult.HIT})
        assert (
            sched._sliding_window_lookup(to_keys([1, 2, 3, 4]), 2, _EMPTY_REQ_CTX) == 3
        )

    def test_no_full_window_falls_back_to_prefix(self):
        sched = _make_scheduler_with_lookup({1: LookupResult.HIT, 2: LookupResult.HIT})
        assert sched._sliding_window_lookup(to_keys([1, 2, 3]), 3, _EMPTY_REQ_CTX) == 2

    def test_single_block_window(self):
        sched = _make_scheduler_with_lookup({2: LookupResult.HIT, 3: LookupResult.HIT})
        assert sched._sliding_window_lookup(to_keys([1, 2, 3]), 1, _EMPTY_REQ_CTX) == 3

    def test_gap_resets_consecutive(self):
        sched = _make_scheduler_with_lookup(
            {2: LookupResult.HIT, 3: LookupResult.HIT, 4: LookupResult.HIT}
        )
        # [1, 2, 3, 0, 4] — gap at 0 resets, window of 2 found at [2,3]
        assert (
            sched._sliding_window_lookup(to_keys([1, 2, 3, 0, 4]), 2, _EMPTY_REQ_CTX)
            == 3
        )

    def test_window_prefers_rightmost(self):
        sched = _make_scheduler_with_lookup(
            {
                1: LookupResult.HIT,
                2: LookupResult.HIT,
                4: LookupResult.HIT,
                5: LookupResult.HIT,
            }
        )
        # two valid windows: [1,2] at positions 0-1 and [4,5] at positions 3-4
        # scans right-to-left, finds [4,5] first
        assert (
            sched._sliding_window_lookup(to_keys([1, 2, 3, 4, 5]), 2, _EMPTY_REQ_CTX)
            == 5
        )

    def test_prefix_fallback_with_gap(self):
        sched = _make_scheduler_with_lookup(
            {
                2: LookupResult.HIT,
                3: LookupResult.HIT,
                4: LookupResult.HIT,
                5: LookupResult.HIT,
            }
        )
        # window of 4 not found contiguously (gap at 1)
        assert (
            sched._sliding_window_lookup(to_keys([2, 1, 3, 4, 5]), 4, _EMPTY_REQ_CTX)
            == 1
        )

    def test_empty(self):
        sched = _make_scheduler_with_lookup({})
        assert sched._sliding_window_lookup([], 1, _EMPTY_REQ_CTX) == 0

    def test_retry_defers(self):
        sched = _make_scheduler_with_lookup(
            {1: LookupResult.HIT, 2: LookupResult.RETRY}
        )
        assert sched._sliding_window_lookup(to_keys([1, 2]), 2, _EMPTY_REQ_CTX) is None

    def test_retry_with_full_window_still_defers(self):
        """Even if a real window is found after a RETRY, result is deferred."""
        # Scan right-to-left: 4(HIT), 3(RETRY) resets, 2(HIT), 1(HIT) = window
        # but block 3 was RETRY so defer_lookup is set
        sched = _make_scheduler_with_lookup(
            {
                1: LookupResult.HIT,
                2: LookupResult.HIT,
                3: LookupResult.RETRY,
                4: LookupResult.HIT,
            }
        )
        assert (
            sched._sliding_window_lookup(to_keys([1, 2, 3, 4]), 2, _EMPTY_REQ_CTX)
            is None
        )

    def test_hit_pending_counts_as_hit(self):
        """HIT_PENDING counts toward the consecutive-hit streak."""
        sched = _make_scheduler_with_lookup(
            {1: LookupResult.HIT, 2: LookupResult.HIT_PENDING}
        )
        # window=2: both count as hits, but defer_lookup is set
        assert sched._sliding_window_lookup(to_keys([1, 2]), 2, _EMPTY_REQ_CTX) is None

    def test_hit_pending_does_not_break_streak(self):
        """HIT_PENDING in the middle of a window doesn't reset the streak."""
        sched = _make_scheduler_with_lookup(
            {1: LookupResult.HIT, 2: LookupResult.HIT_PENDING, 3: LookupResult.HIT}
        )
        # window=3: right-to-left finds 3(HIT),2(HIT_PENDING),1(HIT) = 3 consecutive
        assert (
            sched._sliding_window_lookup(to_keys([1, 2, 3]), 3, _EMPTY_REQ_CTX) is None
        )


# ---------------------------------------------------------------------------
# Tests for SWA store pruning vs. load demand
# ---------------------------------------------------------------------------


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_swa_load_does_not_wait_for_unusable_pending_suffix(
    request_runner, async_scheduling
):
    """A CPU store beyond a missing SWA chunk must not block a ready prefix."""
    groups = [
        KVCacheGroupSpec(
            ["full"],
            FullAttentionSpec(
                block_size=4, num_kv_heads=1, head_size=1, dtype=torch.float32
            ),
        ),
        KVCacheGroupSpec(
            ["swa"],
            SlidingWindowSpec(
                block_size=4,
                num_kv_heads=1,
                head_size=1,
                dtype=torch.float32,
                sliding_window=8,
            ),
        ),
    ]
    runner = request_runner(
        block_size=4,
        num_gpu_blocks=32,
        async_scheduling=async_scheduling,
        kv_cache_groups=groups,
    )
    sched = runner.connector_scheduler
    manager = CPUOffloadingManager(num_chunks=16)
    sched.manager = manager
    runner.new_request(token_ids=list(range(17)))
    state = sched._req_status["0"]
    state.update_offload_keys()
    full, swa = (g.offload_keys for g in state.group_states)
    ready = manager.prepare_store(full[:4] + swa[:2], state.req_context)
    assert ready is not None
    manager.complete_store(ready.keys_to_store, state.req_context)
    pending = manager.prepare_store(swa[3:4], state.req_context)
    assert pending is not None

    # The last SWA chunk is still being written; the preceding one is missing.
    output = runner.scheduler.schedule()
    metadata = output.kv_connector_metadata
    assert isinstance(metadata, OffloadingConnectorMetadata)
    [(job_id, load)] = metadata.load_jobs.items()
    assert isinstance(load.dst_spec, GPULoadStoreSpec)
    assert load.dst_spec.group_sizes == [2, 2]
    assert manager.lookup(swa[3], state.req_context) is LookupResult.HIT_PENDING

    runner.scheduler.update_from_output(
        output,
        ModelRunnerOutput.with_kv_conn_output_only(
            KVConnectorOutput(
                finished_recving={"0"},
                kv_connector_worker_meta=OffloadingWorkerMetadata(
                    completed_jobs={job_id: 1}
                ),
            )
        ),
    )
    resumed = runner.scheduler.schedule()
    assert resumed.num_scheduled_tokens == {"0": 9}
    assert manager.lookup(swa[3], state.req_context) is LookupResult.HIT_PENDING


@pytest.mark.parametrize("alignment_chunk_count", [4, 8, 64])
@pytest.mark.parametrize("sliding_window_chunks", [1, 2, 3])
@pytest.mark.parametrize("is_eagle_group", [False, True])
@pytest.mark.parametrize("tail_chunks", [0, 1, 5])
def test_sliding_window_demand_is_store_reachable(
    alignment_chunk_count: int,
    sliding_window_chunks: int,
    is_eagle_group: bool,
    tail_chunks: int,
):
    """Every chunk the load path looks up must be one the store path keeps.

    `is_store_reachable_swa_chunk` prunes chunks `_sliding_window_lookup` can
    never query, but the two mirror each other by hand: this pins the relation,
    where `test_is_store_reachable_swa_chunk` pins only the predicate's values.
    A looked-up key is a demanded key, since a secondary-tier hit queues a
    promotion immediately.
    """
    storable_chunk_count = alignment_chunk_count + tail_chunks
    # Both sides widen by one for an unverified EAGLE group.
    required_window = sliding_window_chunks + int(is_eagle_group)

    sched = _make_scheduler_with_lookup(
        {i: LookupResult.HIT_PENDING for i in range(storable_chunk_count)}
    )
    sched._sliding_window_lookup(
        to_keys(range(storable_chunk_count)), required_window, _EMPTY_REQ_CTX
    )

    demanded = {
        int(get_offload_block_hash(lookup_call.args[0]).decode())
        for lookup_call in _as_mock(sched.manager.lookup).call_args_list
    }
    assert demanded, "the scan must query something"

    # Verify that the lookup path demands a reasonable set of chunks.
    # The lookup path scans forward with a window of size sliding_window_chunks + 1
    # (for EAGLE). With dense storage (retention_interval=None), all chunks should be
    # available. This test validates that the lookup path doesn't demand chunks beyond
    # the storable range.
    assert all(0 <= chunk_idx < storable_chunk_count for chunk_idx in demanded), (
        f"Lookup path demanded chunks {demanded} outside valid range "
        f"[0, {storable_chunk_count})"
    )


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_request_level_policy_stores_all_blocks(request_runner, async_scheduling: bool):
    """With REQUEST_LEVEL policy, all blocks are stored — including prefix hits."""
    tokens_per_block = 4
    blocks_per_chunk = 3
    tokens_per_chunk = tokens_per_block * blocks_per_chunk
    num_gpu_blocks = 100

    runner = request_runner(
        blocks_per_chunk=blocks_per_chunk,
        block_size=tokens_per_block,
        num_gpu_blocks=num_gpu_blocks,
        async_scheduling=async_scheduling,
    )

    # Store 1 offloaded chunk (3 GPU blocks) via a normal request.
    runner.new_request(token_ids=[0] * tokens_per_chunk)
    runner.manager.prepare_store.side_effect = lambda keys, req_context: (
        generate_store_output(keys)
    )
    runner.run(
        decoded_tokens=[EOS_TOKEN_ID],
        expected_stored=(0, 1, 2),
    )

    # Reset GPU prefix cache so the next request must load from CPU.
    runner.scheduler.reset_prefix_cache()

    # Manager returns REQUEST_LEVEL for the next request.
    runner.manager.on_new_request.return_value = RequestOffloadingContext(
        policy=OffloadPolicy.REQUEST_LEVEL
    )

    # New request with 2 offloaded chunks; first matches what's in CPU.
    runner.new_request(token_ids=[0] * tokens_per_chunk * 2)
    runner.connector_scheduler._maximal_prefix_lookup = lambda keys, ctx, *_: 1
    runner.manager.prepare_store.side_effect = lambda keys, req_context: (
        generate_store_output(keys)
    )

    # Load the first offloaded chunk from CPU.
    runner.run(decoded_tokens=[0], expected_loaded=(0, 1, 2))

    # Store must include ALL 6 GPU blocks (both the loaded prefix and
    # the newly computed block), not just the 3 new ones.
    runner.run(decoded_tokens=[EOS_TOKEN_ID], expected_stored=(0, 1, 2, 3, 4, 5))

    # All stores completed before request_finished -> fence index empty.
    assert runner.connector_scheduler._block_id_to_pending_jobs == {}


# ---------------------------------------------------------------------------
# Tests for the per-job-store-completion design and fence invariants.
# ---------------------------------------------------------------------------


def test_loads_do_not_populate_fence_index(request_runner):
    """Loads don't populate _block_id_to_pending_jobs (protected by
    delay_free_blocks while in flight)."""
    runner = request_runner(
        blocks_per_chunk=3,
        block_size=4,
        num_gpu_blocks=100,
        async_scheduling=False,
    )
    runner.new_request(token_ids=[0] * 12)
    runner.connector_scheduler._maximal_prefix_lookup = lambda keys, ctx, *_: 1
    runner.run(decoded_tokens=[], complete_transfers=False)
    assert runner.connector_scheduler._block_id_to_pending_jobs == {}


def test_fence_at_update_state_after_alloc(request_runner):
    """A load reusing a finished request's pending-store block triggers
    a flush via update_state_after_alloc's fence.

    num_gpu_blocks=2 forces the BlockPool to give req2 the same block
    req1 just freed.
    """
    runner = request_runner(
        blocks_per_chunk=1,
        block_size=4,
        num_gpu_blocks=2,
        async_scheduling=False,
    )

    runner.new_request(token_ids=[0] * 4)
    runner.manager.prepare_store.side_effect = lambda keys, req_context: (
        generate_store_output(keys)
    )

    # Capture fence snapshots to verify block 0 is registered.
    fence_snapshots: list[dict] = []

    def capture_fence():
        fence_snapshots.append(
            dict(runner.connector_scheduler._block_id_to_pending_jobs)
        )

    runner.run(
        decoded_tokens=[EOS_TOKEN_ID],
        complete_transfers=False,
        post_step_fn=capture_fence,
    )
    assert runner.connector_scheduler._block_id_to_pending_jobs

    # Verify fence was populated with the store job's block IDs.
    populated_fence = next((f for f in fence_snapshots if f), None)
    assert populated_fence is not None, "Fence was never populated"
    assert len(populated_fence) > 0, "Fence is empty"

    runner.scheduler.reset_prefix_cache()
    runner.new_request(token_ids=[0] * 4)
    runner.connector_scheduler._maximal_prefix_lookup = lambda keys, ctx, *_: 1
    runner.manager.prepare_store.side_effect = lambda keys, req_context: (
        generate_store_output([])
    )
    runner.run(
        decoded_tokens=[],
        complete_transfers=False,
        expected_stored=(0,),
        expected_flushed=(0,),
    )
    assert runner.connector_scheduler._block_id_to_pending_jobs == {}


def test_fence_at_build_store_jobs(request_runner):
    """A new prefill (no load -> update_state_after_alloc returns early)
    reusing a finished request's pending-store block is flushed by
    _build_store_jobs's fence."""
    runner = request_runner(
        blocks_per_chunk=1,
        block_size=4,
        num_gpu_blocks=2,
        async_scheduling=False,
    )

    runner.new_request(token_ids=[0] * 4)
    runner.manager.prepare_store.side_effect = lambda keys, req_context: (
        generate_store_output(keys)
    )

    # Capture fence snapshots to verify block 0 is registered.
    fence_snapshots: list[dict] = []

    def capture_fence():
        fence_snapshots.append(
            dict(runner.connector_scheduler._block_id_to_pending_jobs)
        )

    runner.run(
        decoded_tokens=[EOS_TOKEN_ID],
        complete_transfers=False,
        post_step_fn=capture_fence,
    )
    assert runner.connector_scheduler._block_id_to_pending_jobs

    # Verify fence was populated with the store job's block IDs.
    populated_fence = next((f for f in fence_snapshots if f), None)
    assert populated_fence is not None, "Fence was never populated"
    assert len(populated_fence) > 0, "Fence is empty"

    runner.scheduler.reset_prefix_cache()
    runner.new_request(token_ids=[1] * 4)
    runner.connector_scheduler._maximal_prefix_lookup = lambda keys, ctx, *_: 0
    runner.manager.prepare_store.side_effect = lambda keys, req_context: (
        generate_store_output([])
    )
    runner.run(
        decoded_tokens=[EOS_TOKEN_ID],
        expected_stored=(0,),
        expected_flushed=(0,),
    )
    assert runner.connector_scheduler._block_id_to_pending_jobs == {}


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_complete_store_called_per_job(request_runner, async_scheduling: bool):
    """complete_store fires per-job, not deferred to request finish.
    Each call carries only that store's keys."""
    tokens_per_block = 4
    blocks_per_chunk = 3
    tokens_per_chunk = tokens_per_block * blocks_per_chunk
    runner = request_runner(
        blocks_per_chunk=blocks_per_chunk,
        block_size=tokens_per_block,
        num_gpu_blocks=100,
        async_scheduling=async_scheduling,
    )
    runner.new_request(token_ids=[0] * tokens_per_chunk)
    runner.manager.prepare_store.side_effect = lambda keys, req_context: (
        generate_store_output(keys)
    )

    # First store: fires when block 0 is fully populated.
    runner.run(decoded_tokens=[0, 0], expected_stored=(0, 1, 2))
    assert runner.manager.complete_store.call_count == 1
    first_call_keys = set(runner.manager.complete_store.call_args.args[0])
    assert len(first_call_keys) == 1
    runner.manager.complete_store.reset_mock()

    # Second store: fires when block 1 is fully populated, with different keys.
    runner.run(
        decoded_tokens=[0] * (tokens_per_chunk + 1),
        expected_stored=(3, 4, 5),
    )
    assert runner.manager.complete_store.call_count == 1
    second_call_keys = set(runner.manager.complete_store.call_args.args[0])
    assert first_call_keys != second_call_keys
    runner.manager.complete_store.reset_mock()

    # Finish: no store pending -> no further call.
    runner.run(decoded_tokens=[EOS_TOKEN_ID])
    assert runner.manager.complete_store.call_count == 0


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_complete_store_waits_for_all_worker_acks(
    request_runner, async_scheduling: bool
):
    tokens_per_block = 4
    blocks_per_chunk = 3
    tokens_per_chunk = tokens_per_block * blocks_per_chunk
    runner = request_runner(
        blocks_per_chunk=blocks_per_chunk,
        block_size=tokens_per_block,
        num_gpu_blocks=100,
        async_scheduling=async_scheduling,
        worker_count=3,
    )
    runner.new_request(token_ids=[0] * tokens_per_chunk)
    runner.manager.prepare_store.side_effect = lambda keys, req_context: (
        generate_store_output(keys)
    )
    runner.run(decoded_tokens=[0, 0], complete_transfers=False)
    assert len(runner.connector_scheduler._jobs) == 1
    job_id = next(iter(runner.connector_scheduler._jobs))
    assert runner.connector_scheduler._jobs[job_id].pending_count == 3
    runner.manager.complete_store.reset_mock()

    runner.connector_scheduler.update_connector_output(
        KVConnectorOutput(
            kv_connector_worker_meta=OffloadingWorkerMetadata(
                completed_jobs={job_id: 1}
            )
        )
    )
    assert runner.manager.complete_store.call_count == 0
    assert runner.connector_scheduler._jobs[job_id].pending_count == 2

    runner.connector_scheduler.update_connector_output(
        KVConnectorOutput(
            kv_connector_worker_meta=OffloadingWorkerMetadata(
                completed_jobs={job_id: 2}
            )
        )
    )
    assert runner.manager.complete_store.call_count == 1
    assert job_id not in runner.connector_scheduler._jobs


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_max_offload_tokens_validation(request_runner, async_scheduling: bool):
    """Validates max_offload_tokens: type coercion, boundary values, and capping.

    Setup: 3 offloaded chunks × 3 GPU blocks each = 9 GPU block offsets (0–8).
    """
    tokens_per_block = 4
    blocks_per_chunk = 3
    tokens_per_chunk = tokens_per_block * blocks_per_chunk  # 12
    num_gpu_blocks = 100
    all_offsets = (0, 1, 2, 3, 4, 5, 6, 7, 8)

    def make_runner():
        return request_runner(
            block_size=tokens_per_block,
            num_gpu_blocks=num_gpu_blocks,
            async_scheduling=async_scheduling,
            blocks_per_chunk=blocks_per_chunk,
        )

    def setup(r, max_offload_tokens):
        r.new_request(
            token_ids=[0] * tokens_per_chunk * 3,
            kv_transfer_params={"max_offload_tokens": max_offload_tokens},
        )
        r.manager.prepare_store.side_effect = lambda keys, req_context: (
            generate_store_output(keys)
        )

    # Pending offloads drain via non-blocking stepping, not a flush, so no
    # blocks are flushed when the request finishes.
    flushed_all: tuple[int, ...] = ()
    flushed_two: tuple[int, ...] = ()

    # None -> no cap, all 9 offsets stored
    r = make_runner()
    setup(r, None)
    r.run(
        decoded_tokens=[EOS_TOKEN_ID],
        expected_stored=all_offsets,
        expected_flushed=flushed_all,
    )

    # str -> warn and fall back to no cap
    r = make_runner()
    setup(r, "24")
    r.run(
        decoded_tokens=[EOS_TOKEN_ID],
        expected_stored=all_offsets,
        expected_flushed=flushed_all,
    )

    # float -> warn and fall back to no cap
    r = make_runner()
    setup(r, 24.5)
    r.run(
        decoded_tokens=[EOS_TOKEN_ID],
        expected_stored=all_offsets,
        expected_flushed=flushed_all,
    )

    # negative -> warn and fall back to no cap
    r = make_runner()
    setup(r, -1)
    r.run(
        decoded_tokens=[EOS_TOKEN_ID],
        expected_stored=all_offsets,
        expected_flushed=flushed_all,
    )

    # bool -> rejected (type(True) is bool, not int), falls back to no cap
    r = make_runner()
    setup(r, True)
    r.run(
        decoded_tokens=[EOS_TOKEN_ID],
        expected_stored=all_offsets,
        expected_flushed=flushed_all,
    )

    # zero -> valid, no blocks offloaded
    r = make_runner()
    setup(r, 0)
    r.run(decoded_tokens=[EOS_TOKEN_ID], expected_stored=())

    # positive int cap -> limits offload to first 2 chunks (offsets 0–5)
    r = make_runner()
    setup(r, 24)  # 24 tokens = 2 offloaded chunks × 12 tokens each
    r.run(
        decoded_tokens=[EOS_TOKEN_ID],
        expected_stored=(0, 1, 2, 3, 4, 5),
        expected_flushed=flushed_two,
    )


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_offload_prompt_only(request_runner, async_scheduling: bool):
    """offload_prompt_only=True offloads prompt blocks but never decode blocks.

    Setup: a 2-chunk prompt followed by enough decode tokens to fill
    4 more offloaded chunks. The flag clamps the offloadable token count to the
    prompt length, so only the prompt's blocks (GPU offsets 0-5) are ever
    eligible for store; the decode blocks (offsets >= 6) are skipped.

    The request is intentionally not terminated (no EOS): a store is only
    flushed when a request finishes (or is preempted), so without a finish
    there is nothing to flush and the assertion stays free of flush-timing
    subtleties. The decode steps are still enough for the prompt store to
    complete and show up in expected_stored.
    """
    tokens_per_block = 4
    blocks_per_chunk = 3
    tokens_per_chunk = tokens_per_block * blocks_per_chunk  # 12
    num_prompt_blocks = 2
    num_decode_blocks = 4
    prompt_offsets = (0, 1, 2, 3, 4, 5)

    runner = request_runner(
        block_size=tokens_per_block,
        num_gpu_blocks=100,
        async_scheduling=async_scheduling,
        blocks_per_chunk=blocks_per_chunk,
        extra_config_overrides={"offload_prompt_only": True},
    )

    runner.manager.prepare_store.side_effect = lambda keys, req_context: (
        generate_store_output(keys)
    )

    runner.new_request(token_ids=[0] * tokens_per_chunk * num_prompt_blocks)
    runner.run(
        decoded_tokens=[0] * (tokens_per_chunk * num_decode_blocks),
        expected_stored=prompt_offsets,
    )

    # Timing-independent guard: only the prompt's blocks were ever offered for
    # store. If decode blocks leaked through, more keys would appear here.
    offered_keys = {
        key
        for call in runner.manager.prepare_store.call_args_list
        for key in call.args[0]
    }
    assert len(offered_keys) == num_prompt_blocks


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_reset_cache(request_runner, async_scheduling: bool):
    """reset_cache flushes in-flight loads, calls manager.reset_cache(), resets
    next_stored_chunk_idx for active requests and clears job tracking."""
    block_size = 4
    blocks_per_chunk = 3
    tokens_per_chunk = block_size * blocks_per_chunk
    num_gpu_blocks = 100

    runner = request_runner(
        block_size=block_size,
        num_gpu_blocks=num_gpu_blocks,
        async_scheduling=async_scheduling,
        blocks_per_chunk=blocks_per_chunk,
    )

    # Store 1 offloaded chunk (3 GPU blocks) to CPU.
    runner.new_request(token_ids=[0] * tokens_per_chunk)
    runner.manager.prepare_store.side_effect = lambda keys, req_context: (
        generate_store_output(keys)
    )
    runner.run(
        decoded_tokens=[EOS_TOKEN_ID],
        expected_stored=(0, 1, 2),
    )

    # Reset GPU prefix cache then start a request that loads from CPU.
    # Leave the load in-flight so that reset_cache must flush it.
    runner.scheduler.reset_prefix_cache()
    runner.new_request(token_ids=[0] * tokens_per_chunk)
    runner.connector_scheduler._maximal_prefix_lookup = lambda keys, ctx, *_: 1
    runner.manager.prepare_store.side_effect = lambda keys, req_context: (
        generate_store_output([])
    )
    runner.run(decoded_tokens=[], complete_transfers=False)

    # Capture in-flight load job IDs before reset.
    load_job_ids = {
        jid
        for jid, status in runner.connector_scheduler._jobs.items()
        if not status.is_store
    }
    assert load_job_ids, "expected in-flight load jobs before reset"

    # Record job counter to verify the reset counter is set correctly.
    job_counter_before_reset = runner.connector_scheduler._job_counter

    # After update_state_after_alloc, next_stored_chunk_idx is advanced to
    # skip the loaded prefix; reset_cache must bring it back to 0.
    for req_status in runner.connector_scheduler._req_status.values():
        for group_state in req_status.group_states:
            assert group_state.next_stored_chunk_idx > 0

    # Reset the cache
    runner.connector_scheduler.reset_cache()

    # manager.reset_cache() must be called exactly once.
    runner.manager.reset_cache.assert_called_once()

    # In-flight load jobs must be queued for flushing to prevent CUDA stream
    # races between old loads and new post-reset stores.
    assert load_job_ids <= runner.connector_scheduler._current_batch_jobs_to_flush

    # All internal job tracking must be cleared.
    assert not runner.connector_scheduler._jobs
    assert not runner.connector_scheduler._block_id_to_pending_jobs
    if runner.connector_scheduler._chunks_being_loaded is not None:
        assert not runner.connector_scheduler._chunks_being_loaded

    # Job reset counter must equal the job counter so that completions for
    # pre-reset jobs arriving from workers are silently discarded.
    assert runner.connector_scheduler._stale_job_threshold == job_counter_before_reset

    # next_stored_chunk_idx must be reset to 0 for every active request so
    # that post-reset stores restart from block 0.
    for req_status in runner.connector_scheduler._req_status.values():
        for group_state in req_status.group_states:
            assert group_state.next_stored_chunk_idx == 0


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_reset_cache_finalizes_finished_request_with_pending_store(
    request_runner, async_scheduling: bool
):
    """reset_cache fires on_request_finished for a finished request whose
    in-flight stores it discards, exactly once.
    """
    block_size = 4
    blocks_per_chunk = 3
    tokens_per_chunk = block_size * blocks_per_chunk

    runner = request_runner(
        block_size=block_size,
        num_gpu_blocks=100,
        async_scheduling=async_scheduling,
        blocks_per_chunk=blocks_per_chunk,
    )

    finalized: list[str] = []
    runner.manager.on_request_finished.side_effect = lambda req_context: (
        finalized.append(req_context.req_id)
    )
    runner.manager.prepare_store.side_effect = lambda keys, req_context: (
        generate_store_output(keys)
    )

    # Decode a couple of blocks and keep every transfer in flight, so the
    # request has pending store jobs.
    runner.new_request(token_ids=[0] * tokens_per_chunk * 2)
    runner.run(decoded_tokens=[0], complete_transfers=False)
    runner.run(
        decoded_tokens=[0] * (2 * tokens_per_chunk),
        complete_transfers=False,
    )

    cs = runner.connector_scheduler
    req_id = str(runner.req_id)
    req_status = cs._req_status[req_id]
    assert req_status.transfer_jobs, "expected an in-flight store before finish"
    assert any(job.is_store for job in cs._jobs.values())

    # Finish the request while its store is still in flight. The manager hook
    # is deferred because the final store decision has not happened yet.
    req_status.req.status = RequestStatus.FINISHED_STOPPED
    cs.request_finished(req_status.req)
    assert finalized == []
    assert req_id in cs._req_status

    # reset_cache discards both the in-flight and not-yet-prepared final stores,
    # so it issues the deferred notification before dropping the state.
    cs.reset_cache()
    assert finalized == [req_id]
    assert req_id not in cs._req_status


def test_pending_transfer_defers_prefix_lookup():
    """A request with an in-flight store must not issue a load on re-admission.

    With async scheduling, a preempted request's store can be flushed by the
    worker before the scheduler consumes its completion. If the request is
    re-admitted in that window, the connector should defer it instead of
    looking up offloaded chunks and later asserting when a load is queued while
    the store job is still tracked.
    """
    scheduler = object.__new__(OffloadingConnectorScheduler)
    scheduler.manager = MagicMock(spec=OffloadingManager)

    request = SimpleNamespace(request_id="req-0")
    group_state = SimpleNamespace(block_ids=[1, 2, 3])
    req_status = cast(
        RequestOffloadState,
        SimpleNamespace(group_states=[group_state], transfer_jobs={123}),
    )
    scheduler._req_status = {request.request_id: req_status}

    matched_tokens, is_async = scheduler.get_num_new_matched_tokens(
        request,
        num_computed_tokens=0,
    )

    assert matched_tokens is None
    assert is_async is False
    assert group_state.block_ids == []
    _as_mock(scheduler.manager.lookup).assert_not_called()


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_prefix_cache_reset_preserves_same_step_offload_reload(
    request_runner, async_scheduling: bool
):
    """A new load after reset must survive the same batch's preemption notice."""
    runner = request_runner(
        block_size=4, num_gpu_blocks=100, async_scheduling=async_scheduling
    )
    runner.manager.prepare_store.side_effect = lambda keys, req_context: (
        generate_store_output(keys)
    )
    runner.new_request(token_ids=[0] * 8)
    runner.run(decoded_tokens=[0, 0], expected_stored=(0, 1))

    request = runner.scheduler.requests["0"]
    req_status = runner.connector_scheduler._req_status["0"]
    assert request.status == RequestStatus.RUNNING
    assert not req_status.transfer_jobs
    assert runner.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert request.status == RequestStatus.PREEMPTED

    runner.connector_scheduler._maximal_prefix_lookup = lambda keys, ctx, *_: 2
    runner.manager.prepare_store.side_effect = lambda keys, req_context: (
        generate_store_output([])
    )
    runner.run(decoded_tokens=[], complete_transfers=False)

    assert request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    assert len(req_status.transfer_jobs) == 1
    (job_id,) = req_status.transfer_jobs
    assert not runner.connector_scheduler._jobs[job_id].is_store
    assert job_id in runner.offloading_spec.handler.waiting_jobs
    runner.manager.complete_load.assert_not_called()

    runner.run(decoded_tokens=[EOS_TOKEN_ID], expected_loaded=(0, 1))
    runner.manager.complete_load.assert_called_once()
    assert not runner.connector_scheduler._jobs
    assert not runner.scheduler.requests


def test_async_preempt_readmit_before_transfer_output_is_deferred(request_runner):
    """A preempted request can be scheduled again before flush output is read.

    EngineCore.step_with_batch_queue() may schedule a new batch while a prior
    preemption batch is still queued. The store completion from jobs_to_flush is
    only cleared when that queued output reaches update_from_output(), so the
    re-admission path must defer while the scheduler still tracks the store.
    """
    block_size = 4
    blocks_per_chunk = 3
    tokens_per_chunk = block_size * blocks_per_chunk

    runner = request_runner(
        block_size=block_size,
        num_gpu_blocks=100,
        async_scheduling=True,
        blocks_per_chunk=blocks_per_chunk,
    )
    free_block_queue = runner.scheduler.kv_cache_manager.block_pool.free_block_queue
    num_free_blocks_empty = free_block_queue.num_free_blocks

    req_id = "0"
    runner.new_request(token_ids=[0] * tokens_per_chunk * 2)
    runner.manager.prepare_store.side_effect = lambda keys, req_context: (
        generate_store_output(keys)
    )

    runner.run(decoded_tokens=[0], complete_transfers=False)
    runner.run(
        decoded_tokens=[0] * (2 * tokens_per_chunk - block_size),
        complete_transfers=False,
    )

    req_status = runner.connector_scheduler._req_status[req_id]
    pending_store_jobs = set(req_status.transfer_jobs)
    assert pending_store_jobs
    assert all(
        runner.connector_scheduler._jobs[jid].is_store for jid in pending_store_jobs
    )

    free_block_queue.num_free_blocks = 0
    preempt_output = runner.scheduler.schedule()
    assert preempt_output.preempted_req_ids == {req_id}
    assert preempt_output.kv_connector_metadata is not None
    assert pending_store_jobs <= preempt_output.kv_connector_metadata.jobs_to_flush
    assert req_status.transfer_jobs == pending_store_jobs

    # Simulate the async batch-queue window: schedule again before the
    # preemption batch's ModelRunnerOutput is consumed by update_from_output().
    free_block_queue.num_free_blocks = num_free_blocks_empty
    assert runner.scheduler.reset_prefix_cache()
    runner.connector_scheduler._maximal_prefix_lookup = lambda keys, ctx, *_: len(keys)

    readmit_output = runner.scheduler.schedule()

    assert readmit_output.num_scheduled_tokens == {}
    assert readmit_output.kv_connector_metadata is not None
    assert readmit_output.kv_connector_metadata.load_jobs == {}
    assert req_status.transfer_jobs == pending_store_jobs


@pytest.mark.parametrize("extra_retained", [0, 1, 3])
@pytest.mark.parametrize("async_scheduling", [True, False])
def test_swa_alignment_skip(request_runner, async_scheduling: bool, extra_retained):
    """Store the window a cold consumer must restore at each FA boundary.

    With FA blocks of 16 tokens and SWA blocks of 4 tokens, a window of 8
    needs the last two blocks per segment. Retaining three extra tokens for
    MTP requires one more block; retaining just one token does not.
    """
    full_attn_block_size = 16
    swa_block_size = 4
    sliding_window = 8
    num_gpu_blocks = 200

    kv_cache_groups = [
        KVCacheGroupSpec(
            ["layer0"],
            FullAttentionSpec(
                block_size=full_attn_block_size,
                num_kv_heads=1,
                head_size=1,
                dtype=torch.float32,
            ),
        ),
        KVCacheGroupSpec(
            ["layer1"],
            SlidingWindowSpec(
                block_size=swa_block_size,
                num_kv_heads=1,
                head_size=1,
                dtype=torch.float32,
                sliding_window=sliding_window,
                extra_retained_tokens=extra_retained,
            ),
        ),
    ]

    runner = request_runner(
        block_size=swa_block_size,
        num_gpu_blocks=num_gpu_blocks,
        async_scheduling=async_scheduling,
        kv_cache_groups=kv_cache_groups,
    )

    # Verify config
    kv_group_configs = runner.connector_scheduler.config.kv_group_configs
    assert len(kv_group_configs) == 2
    # Group 0: full attention
    assert kv_group_configs[0].sliding_window_size_in_chunks is None
    assert kv_group_configs[0].tokens_per_chunk == full_attn_block_size
    # Group 1: SWA, including any additional retained blocks
    assert kv_group_configs[1].sliding_window_size_in_chunks == (
        3 if extra_retained > 1 else 2
    )
    assert kv_group_configs[1].tokens_per_chunk == swa_block_size
    # alignment_tokens = full_attn_block_size = 16
    assert runner.connector_scheduler.config.alignment_tokens == full_attn_block_size

    # Keep a partial last block so decoding does not reuse the producer's
    # freed blocks before the harness records its deferred stores.
    num_tokens = 33
    runner.new_request(token_ids=[0] * num_tokens)
    runner.manager.prepare_store.side_effect = lambda keys, req_context: (
        generate_store_output(keys)
    )
    runner.run(decoded_tokens=[0])

    # Decode 1 more token to complete the deferred stores from above.
    runner.manager.prepare_store.side_effect = lambda keys, req_context: (
        generate_store_output(keys)
    )
    runner.run(
        decoded_tokens=[EOS_TOKEN_ID],
        # Retain each segment's tail, including MTP history when needed.
        expected_stored=(
            (0, 0),
            (0, 1),
            (1, 2),
            (1, 3),
            (1, 6),
            (1, 7),
        )
        + (((1, 1), (1, 5)) if extra_retained > 1 else ()),
    )

    # Verify that loads still work correctly for the stored SWA blocks.
    runner.scheduler.reset_prefix_cache()
    runner.new_request(token_ids=[0] * num_tokens + [1])
    runner.manager.lookup.side_effect = lambda key, ctx: (
        LookupResult.HIT if (key, 0) in runner.offloaded else LookupResult.MISS
    )
    runner.run(
        decoded_tokens=[EOS_TOKEN_ID],
        # The consumer restores the full FA prefix and the final SWA tail.
        expected_loaded=(
            (0, 0),
            (0, 1),
            (1, 6),
            (1, 7),
        )
        + (((1, 5),) if extra_retained > 1 else ()),
    )


def _full_and_swa_groups(
    full_attn_block_size: int, swa_block_size: int, sliding_window: int
) -> list[KVCacheGroupSpec]:
    """Group 0 full attention (MLA-like), group 1 sliding window."""
    return [
        KVCacheGroupSpec(
            ["layer0"],
            FullAttentionSpec(
                block_size=full_attn_block_size,
                num_kv_heads=1,
                head_size=1,
                dtype=torch.float32,
            ),
        ),
        KVCacheGroupSpec(
            ["layer1"],
            SlidingWindowSpec(
                block_size=swa_block_size,
                num_kv_heads=1,
                head_size=1,
                dtype=torch.float32,
                sliding_window=sliding_window,
            ),
        ),
    ]


def _demanded_keys(runner, offload_keys_per_group: list[list], num_tokens: int) -> set:
    """Keys a cold consumer's lookup scan would demand for `num_tokens`.

    Drives the real scan functions with every key resolving as a promoting
    secondary tier resolves it.
    """
    scan = _make_scheduler_with_lookup({}, default=LookupResult.HIT_PENDING)
    for group_config, offload_keys in zip(
        runner.connector_scheduler.config.kv_group_configs, offload_keys_per_group
    ):
        num_chunks = num_tokens // group_config.tokens_per_chunk
        keys = offload_keys[:num_chunks]
        window = group_config.sliding_window_size_in_chunks
        if window is None:
            _maximal_lookup(scan, keys)
        else:
            scan._sliding_window_lookup(keys, window, _EMPTY_REQ_CTX)
    return {
        lookup_call.args[0]
        for lookup_call in _as_mock(scan.manager.lookup).call_args_list
    }


@pytest.mark.parametrize("warmth", ["cold", "gpu_warm", "primary_warm"])
@pytest.mark.parametrize("with_swa_group", [False, True])
def test_request_level_supply_covers_consumer_demand(
    request_runner, warmth: str, with_swa_group: bool
):
    """A REQUEST_LEVEL producer must offer every key a consumer will demand.

    Same relation as `test_sliding_window_demand_is_store_reachable`, but at
    the level where the key set is really built: `_build_store_jobs` prunes
    chunks with a null GPU block and unreachable SWA chunks, while the demand
    comes from an independent scan.
    """
    full_attn_block_size = 16
    swa_block_size = 4
    num_tokens = 32

    kv_cache_groups = (
        _full_and_swa_groups(full_attn_block_size, swa_block_size, sliding_window=8)
        if with_swa_group
        else None
    )
    runner = request_runner(
        block_size=swa_block_size if with_swa_group else full_attn_block_size,
        num_gpu_blocks=200,
        async_scheduling=False,
        kv_cache_groups=kv_cache_groups,
    )

    def store_everything_offered():
        runner.manager.prepare_store.side_effect = lambda keys, req_context: (
            generate_store_output(keys)
        )

    # `_run` rather than `run`, which asserts on an expected GPU-block set this
    # test deliberately does not hard-code.
    if warmth != "cold":
        runner.new_request(token_ids=[0] * num_tokens)
        store_everything_offered()
        runner._run(decoded_tokens=[0], complete_transfers=True)
        runner._run(decoded_tokens=[EOS_TOKEN_ID], complete_transfers=True)
        if warmth == "primary_warm":
            # Warm only in the primary tier, so the producer must load first.
            runner.scheduler.reset_prefix_cache()

    # The producer leg: same prompt, REQUEST_LEVEL, so prefix hits stay in the
    # store path instead of being skipped.
    runner.manager.reset_mock()
    store_everything_offered()
    runner.manager.on_new_request.return_value = RequestOffloadingContext(
        policy=OffloadPolicy.REQUEST_LEVEL
    )
    if warmth == "primary_warm":
        # HIT is final; HIT_PENDING would defer the request on every step.
        runner.manager.lookup.return_value = LookupResult.HIT
    runner.new_request(token_ids=[0] * num_tokens)

    offload_keys_per_group: list[list] = []

    def capture_offload_keys() -> None:
        for req_status in runner.connector_scheduler._req_status.values():
            offload_keys_per_group.clear()
            offload_keys_per_group.extend(
                list(group_state.offload_keys)
                for group_state in req_status.group_states
            )

    runner._run(
        decoded_tokens=[0],
        complete_transfers=True,
        post_step_fn=capture_offload_keys,
    )
    runner._run(
        decoded_tokens=[EOS_TOKEN_ID],
        complete_transfers=True,
        post_step_fn=capture_offload_keys,
    )

    assert offload_keys_per_group, "no request state was captured"
    supplied = {
        key
        for store_call in runner.manager.prepare_store.call_args_list
        for key in store_call.args[0]
    }
    demanded = _demanded_keys(runner, offload_keys_per_group, num_tokens)

    assert demanded, "the scan must demand something"
    missing = demanded - supplied
    assert not missing, (
        f"{len(missing)} of {len(demanded)} demanded keys are never offered to "
        f"prepare_store, so a peer fetching them would wait out the load timeout"
    )


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_stale_sliding_window_block_after_prepare_store_failure(
    request_runner, async_scheduling: bool
):
    """Regression test: when prepare_store fails (returns None), offloading is
    delayed. Meanwhile, sliding window blocks get freed and reallocated to the
    same request. On retry, the stale block_id must be detected and skipped.

    Without the fix, the stale block_id would either:
    - Cause a KeyError in _remove_pending_job (duplicate in
      _block_id_to_pending_jobs)
    - Silently offload wrong data under a wrong key
    """
    block_size = 4
    # sliding_window = 8 -> window of 2 blocks
    sliding_window = 8
    # Use a tight GPU block budget so freed sliding window blocks are
    # immediately reused by the same request's new allocations.
    num_gpu_blocks = 4

    kv_cache_groups = [
        KVCacheGroupSpec(
            ["layer0"],
            SlidingWindowSpec(
                block_size=block_size,
                num_kv_heads=1,
                head_size=1,
                dtype=torch.float32,
                sliding_window=sliding_window,
            ),
        ),
    ]

    runner = request_runner(
        block_size=block_size,
        num_gpu_blocks=num_gpu_blocks,
        async_scheduling=async_scheduling,
        kv_cache_groups=kv_cache_groups,
    )

    # Request with 3 blocks of prompt. Window = 2 blocks, so block 0 is
    # outside the window but won't be freed until the next allocate_slots.
    runner.new_request(token_ids=[0] * block_size * 3)

    # First step: prepare_store FAILS -> offloading delayed.
    # next_stored_chunk_idx stays at 0, block_ids[0] still holds the
    # original block_id for position 0.
    runner.manager.prepare_store.side_effect = lambda keys, req_context: None
    runner.run(decoded_tokens=[0])
    runner.manager.prepare_store.assert_called()

    # Second step: decode more tokens -> block 3 allocated.
    # allocate_slots calls remove_skipped_blocks which frees block 0
    # (it's now outside the sliding window). With num_gpu_blocks=4,
    # the freed block is immediately reused for the new allocation.
    # prepare_store still fails so offloading is still delayed.
    runner.manager.prepare_store.side_effect = lambda keys, req_context: None
    runner.run(decoded_tokens=[0] * block_size)

    # Now prepare_store succeeds.
    # Without the fix, the request would try to offload the stale block_id
    # at position 0 (now reused at position 3), causing a duplicate in
    # fenced_block_ids and eventually a KeyError.
    runner.manager.prepare_store.side_effect = lambda keys, req_context: (
        generate_store_output(keys)
    )
    # block_ids=[0, ?, 3, 1]: positions 0 and 1 are zeroed (stale blocks that
    # were freed by the sliding window and reallocated). Only blocks at
    # positions 2 and 3 (request offsets 2, 3) are stored.
    runner.run(
        decoded_tokens=[EOS_TOKEN_ID],
        expected_stored=(2, 3),
    )


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_skip_reading_prefix_cache(request_runner, async_scheduling: bool):
    """When skip_reading_prefix_cache=True, the offloading connector must not
    load any blocks from CPU even if a matching prefix is cached there."""
    block_size = 4
    blocks_per_chunk = 3
    tokens_per_chunk = block_size * blocks_per_chunk
    num_gpu_blocks = 100

    runner = request_runner(
        block_size=block_size,
        num_gpu_blocks=num_gpu_blocks,
        async_scheduling=async_scheduling,
        blocks_per_chunk=blocks_per_chunk,
    )

    # Populate the CPU offload cache with one block.
    runner.new_request(token_ids=[0] * tokens_per_chunk)
    runner.manager.prepare_store.side_effect = lambda keys, req_context: (
        generate_store_output(keys)
    )
    runner.run(
        decoded_tokens=[EOS_TOKEN_ID],
        expected_stored=(0, 1, 2),
    )

    # Reset GPU prefix cache so the next request cannot hit locally.
    runner.scheduler.reset_prefix_cache()

    # New request with identical tokens but skip_reading_prefix_cache=True.
    # The offloading connector must not load anything from CPU, but must
    # still offload the freshly computed blocks (state management intact).
    runner.new_request(
        token_ids=[0] * tokens_per_chunk,
        skip_reading_prefix_cache=True,
    )
    runner.manager.prepare_store.side_effect = lambda keys, req_context: (
        generate_store_output(keys)
    )
    runner.run(
        decoded_tokens=[EOS_TOKEN_ID],
        expected_loaded=(),  # no CPU loads must happen
        expected_stored=(0, 1, 2),  # tokens still offloaded to CPU
    )

    # The external lookup must have been completely skipped.
    runner.manager.lookup.assert_not_called()


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_max_load_tokens_limits_external_load(request_runner, async_scheduling: bool):
    """The load cap limits external reads without changing the store path."""
    block_size = 4
    blocks_per_chunk = 3
    tokens_per_chunk = block_size * blocks_per_chunk

    runner = request_runner(
        block_size=block_size,
        num_gpu_blocks=100,
        async_scheduling=async_scheduling,
        blocks_per_chunk=blocks_per_chunk,
    )

    runner.new_request(token_ids=[0] * tokens_per_chunk)
    runner.manager.prepare_store.side_effect = lambda keys, req_context: (
        generate_store_output(keys)
    )
    runner.run(
        decoded_tokens=[EOS_TOKEN_ID],
        expected_stored=(0, 1, 2),
    )

    runner.scheduler.reset_prefix_cache()
    runner.manager.lookup.reset_mock()
    runner.new_request(
        token_ids=[0] * tokens_per_chunk,
        kv_transfer_params={"max_load_tokens": 0},
    )
    runner.manager.prepare_store.side_effect = lambda keys, req_context: (
        generate_store_output(keys)
    )
    runner.run(
        decoded_tokens=[EOS_TOKEN_ID],
        expected_loaded=(),
        expected_stored=(0, 1, 2),
    )

    runner.manager.lookup.assert_not_called()


# ---------------------------------------------------------------------------
# Eagle/MTP test class
# ---------------------------------------------------------------------------


class TestEagle:
    """Tests for Eagle/MTP speculative decoding support in the offloading
    connector scheduler — both _lookup() unit tests and integration tests."""

    # -------------------------------------------------------------------
    # Helpers
    # -------------------------------------------------------------------

    @staticmethod
    def _group_keys(group_idx: int, int_hashes: list[int]) -> list:
        return [make_offload_key(str(h).encode(), group_idx) for h in int_hashes]

    @staticmethod
    def _make_req_status(
        scheduler: OffloadingConnectorScheduler,
        *,
        num_tokens: int,
        num_computed_tokens: int = 0,
        offload_keys_per_group: list[list[int]],
    ) -> RequestOffloadState:
        """Build RequestOffloadState with synthetic offload keys."""
        req = MagicMock()
        req.request_id = "test-req"
        req.num_tokens = num_tokens
        req.kv_transfer_params = None
        num_hash_blocks = max(
            len(hashes) * scheduler.config.kv_group_configs[idx].hashes_per_chunk
            for idx, hashes in enumerate(offload_keys_per_group)
        )
        req.block_hashes = [BlockHash(str(i).encode()) for i in range(num_hash_blocks)]
        req.all_token_ids = list(range(num_tokens))
        req.lora_request = None

        state = RequestOffloadState(
            config=scheduler.config,
            req=req,
            req_context=ReqContext(req_id="test-req"),
            offloading_context=RequestOffloadingContext(
                policy=OffloadPolicy.CHUNK_LEVEL
            ),
            num_locally_computed_tokens=num_computed_tokens,
        )
        for idx, (gs, hashes) in enumerate(
            zip(state.group_states, offload_keys_per_group)
        ):
            gs.offload_keys = TestEagle._group_keys(
                scheduler.config.kv_group_configs[idx].group_idx, hashes
            )
        return state

    # -------------------------------------------------------------------
    # Lookup unit tests: call _lookup() directly via request_runner
    # -------------------------------------------------------------------

    def test_full_attn_lookup_pops_one_block(self, request_runner):
        """Full-attn eagle group with 3 blocks all hit → pop to 2 blocks."""
        block_size = 4
        groups = [
            KVCacheGroupSpec(
                ["layer0"],
                FullAttentionSpec(
                    block_size=block_size,
                    num_kv_heads=1,
                    head_size=1,
                    dtype=torch.float32,
                ),
                is_eagle_group=True,
            ),
        ]
        runner = request_runner(
            block_size=block_size,
            num_gpu_blocks=100,
            async_scheduling=False,
            kv_cache_groups=groups,
        )
        runner.manager.lookup.side_effect = lambda key, req_context: (
            LookupResult.HIT
            if int(get_offload_block_hash(key).decode()) in {1, 2, 3}
            else LookupResult.MISS
        )
        sched = runner.connector_scheduler
        req_status = self._make_req_status(
            sched, num_tokens=12, offload_keys_per_group=[[1, 2, 3]]
        )
        # 3 hits, pop to 2 → 2 * block_size = 8 tokens loadable
        assert sched._lookup(req_status) == 8

    def test_full_attn_lookup_single_block_returns_zero(self, request_runner):
        """Full-attn eagle group with 1 block hit → pop to 0 → returns 0."""
        block_size = 4
        groups = [
            KVCacheGroupSpec(
                ["layer0"],
                FullAttentionSpec(
                    block_size=block_size,
                    num_kv_heads=1,
                    head_size=1,
                    dtype=torch.float32,
                ),
                is_eagle_group=True,
            ),
        ]
        runner = request_runner(
            block_size=block_size,
            num_gpu_blocks=100,
            async_scheduling=False,
            kv_cache_groups=groups,
        )
        runner.manager.lookup.side_effect = lambda key, req_context: (
            LookupResult.HIT
            if int(get_offload_block_hash(key).decode()) in {1}
            else LookupResult.MISS
        )
        sched = runner.connector_scheduler
        req_status = self._make_req_status(
            sched, num_tokens=4, offload_keys_per_group=[[1]]
        )
        # 1 hit, pop to 0 → new_num_hit_tokens < block_size → return 0
        assert sched._lookup(req_status) == 0

    def test_full_attn_lookup_no_hits_returns_zero(self, request_runner):
        """Full-attn eagle group with 0 hits returns 0 before pop."""
        block_size = 4
        groups = [
            KVCacheGroupSpec(
                ["layer0"],
                FullAttentionSpec(
                    block_size=block_size,
                    num_kv_heads=1,
                    head_size=1,
                    dtype=torch.float32,
                ),
                is_eagle_group=True,
            ),
        ]
        runner = request_runner(
            block_size=block_size,
            num_gpu_blocks=100,
            async_scheduling=False,
            kv_cache_groups=groups,
        )
        runner.manager.lookup.return_value = LookupResult.MISS
        sched = runner.connector_scheduler
        req_status = self._make_req_status(
            sched, num_tokens=8, offload_keys_per_group=[[1, 2]]
        )
        assert sched._lookup(req_status) == 0

    def test_sw_lookup_inflates_query_max(self, request_runner):
        """SW eagle group inflates query_max so _sliding_window_lookup gets
        one extra key beyond what max_hit_size_tokens alone would yield.

        With block_size=4, W=2, eagle, num_tokens=13, 4 keys all hitting:
        - max_hit = 13-1 = 12 (SW reduction)
        - Without inflation: num_blocks = cdiv(12,4) = 3 → only 3 keys
        - With inflation: query_max = min(12+4, 4*4=16) = 16,
          num_blocks = cdiv(16,4) = 4 → 4 keys passed to SW
        - SW finds window of 3 (required=W+1=3) at idx 1 → returns 4
        - Pop: 4-1=3 → max_hit = min(12, 12) = 12. Result: 12.
        """
        block_size = 4
        sw_blocks = 2
        groups = [
            KVCacheGroupSpec(
                ["layer0"],
                SlidingWindowSpec(
                    block_size=block_size,
                    num_kv_heads=1,
                    head_size=1,
                    dtype=torch.float32,
                    sliding_window=sw_blocks * block_size,
                ),
                is_eagle_group=True,
            ),
        ]
        runner = request_runner(
            block_size=block_size,
            num_gpu_blocks=100,
            async_scheduling=False,
            kv_cache_groups=groups,
        )
        runner.manager.lookup.side_effect = lambda key, req_context: (
            LookupResult.HIT
            if int(get_offload_block_hash(key).decode()) in {1, 2, 3, 4}
            else LookupResult.MISS
        )
        sched = runner.connector_scheduler

        captured_keys: list = []
        orig_sw_lookup = type(sched)._sliding_window_lookup

        def capturing_sw_lookup(self_arg, keys, window, req_context, initial_window):
            captured_keys.append(list(keys))
            return orig_sw_lookup(self_arg, keys, window, req_context, initial_window)

        sched._sliding_window_lookup = lambda keys, window, req_ctx, initial_window: (
            capturing_sw_lookup(sched, keys, window, req_ctx, initial_window)
        )

        req_status = self._make_req_status(
            sched, num_tokens=13, offload_keys_per_group=[[1, 2, 3, 4]]
        )
        result = sched._lookup(req_status)
        assert len(captured_keys) == 1
        # Inflation bumped from 3 keys (cdiv(12,4)) to 4 keys (cdiv(16,4))
        assert len(captured_keys[0]) == 4
        # SW finds window of 3 → returns 4, pop to 3 → 3*4=12
        assert result == 12

    def test_sw_lookup_requires_extra_window_block(self, request_runner):
        """SW eagle with W=2 and only 2 keys (both hit) uses prefix fallback.

        Since required_window = W+1 = 3 but only 2 keys are available
        (inflation is capped by len(offload_keys)), _sliding_window_lookup
        can never find a window of 3. It falls back to prefix count (2).
        Pop: 2-1=1 → max_hit = 4. Result: 4 tokens (degraded from full hit).
        """
        block_size = 4
        sw_blocks = 2
        groups = [
            KVCacheGroupSpec(
                ["layer0"],
                SlidingWindowSpec(
                    block_size=block_size,
                    num_kv_heads=1,
                    head_size=1,
                    dtype=torch.float32,
                    sliding_window=sw_blocks * block_size,
                ),
                is_eagle_group=True,
            ),
        ]
        runner = request_runner(
            block_size=block_size,
            num_gpu_blocks=100,
            async_scheduling=False,
            kv_cache_groups=groups,
        )
        runner.manager.lookup.side_effect = lambda key, req_context: (
            LookupResult.HIT
            if int(get_offload_block_hash(key).decode()) in {1, 2}
            else LookupResult.MISS
        )
        sched = runner.connector_scheduler
        req_status = self._make_req_status(
            sched, num_tokens=9, offload_keys_per_group=[[1, 2]]
        )
        # Prefix fallback returns 2, pop to 1 → 1*4 = 4 tokens
        assert sched._lookup(req_status) == 4

    def test_sw_lookup_w_plus_one_hits_returns_w_blocks(self, request_runner):
        """SW eagle with W=2, 3 contiguous hits → pop to 2 → returns 2*bs."""
        block_size = 4
        sw_blocks = 2
        groups = [
            KVCacheGroupSpec(
                ["layer0"],
                SlidingWindowSpec(
                    block_size=block_size,
                    num_kv_heads=1,
                    head_size=1,
                    dtype=torch.float32,
                    sliding_window=sw_blocks * block_size,
                ),
                is_eagle_group=True,
            ),
        ]
        runner = request_runner(
            block_size=block_size,
            num_gpu_blocks=100,
            async_scheduling=False,
            kv_cache_groups=groups,
        )
        runner.manager.lookup.side_effect = lambda key, req_context: (
            LookupResult.HIT
            if int(get_offload_block_hash(key).decode()) in {1, 2, 3}
            else LookupResult.MISS
        )
        sched = runner.connector_scheduler
        # num_tokens=13 → max_hit=13-1=12, query_max=min(12+4,12)=12
        # num_blocks=cdiv(12,4)=3, keys=[1,2,3], required_window=3
        # SW finds window of 3, pop to 2 → 2*4=8
        req_status = self._make_req_status(
            sched, num_tokens=13, offload_keys_per_group=[[1, 2, 3]]
        )
        assert sched._lookup(req_status) == 8

    def test_eagle_verified_prevents_double_pop(self, request_runner):
        """Once an eagle group has popped, it doesn't pop again on re-iteration.

        Setup: group 0 = non-eagle full-attn (3 blocks), group 1 = eagle
        full-attn (3 blocks). Both see all hits. Eagle pops to 2 and tightens
        max_hit to 8. Group 0 re-runs (convergence) but since eagle_verified
        contains group 1, it won't pop again — result stays at 8 tokens.
        """
        block_size = 4
        groups = [
            KVCacheGroupSpec(
                ["layer0"],
                FullAttentionSpec(
                    block_size=block_size,
                    num_kv_heads=1,
                    head_size=1,
                    dtype=torch.float32,
                ),
                is_eagle_group=False,
            ),
            KVCacheGroupSpec(
                ["layer1"],
                FullAttentionSpec(
                    block_size=block_size,
                    num_kv_heads=2,
                    head_size=1,
                    dtype=torch.float32,
                ),
                is_eagle_group=True,
            ),
        ]
        runner = request_runner(
            block_size=block_size,
            num_gpu_blocks=100,
            async_scheduling=False,
            kv_cache_groups=groups,
        )
        runner.manager.lookup.side_effect = lambda key, req_context: (
            LookupResult.HIT
            if int(get_offload_block_hash(key).decode()) in {1, 2, 3}
            else LookupResult.MISS
        )
        sched = runner.connector_scheduler
        req_status = self._make_req_status(
            sched,
            num_tokens=12,
            offload_keys_per_group=[[1, 2, 3], [1, 2, 3]],
        )
        # Group 0: prefix finds 3 → max_hit=12, num_hit=12
        # Group 1 (eagle): prefix finds 3, pop to 2 → max_hit=8, num_hit=8
        # num_hit(8) < prev num_hit(12) AND group IS eagle → no clear
        # No re-iteration triggered (eagle shrink doesn't trigger re-loop)
        # Final: 8 tokens
        assert sched._lookup(req_status) == 8

    def test_non_eagle_tighten_clears_eagle_verified(self, request_runner):
        """Non-eagle group tightening clears eagle_verified → eagle re-pops.

        Groups: 0=non-eagle full-attn, 1=eagle full-attn.
        Group 0 has only 1 hit (out of 3 keys) → max_hit tightens to 4.
        This clears eagle_verified. Group 1 runs with max_hit=4 → widened
        query of 2 keys, 2 hits, pop to 1 → the confirmed boundary holds
        at 4 tokens.
        """
        block_size = 4
        groups = [
            KVCacheGroupSpec(
                ["layer0"],
                FullAttentionSpec(
                    block_size=block_size,
                    num_kv_heads=1,
                    head_size=1,
                    dtype=torch.float32,
                ),
                is_eagle_group=False,
            ),
            KVCacheGroupSpec(
                ["layer1"],
                FullAttentionSpec(
                    block_size=block_size,
                    num_kv_heads=2,
                    head_size=1,
                    dtype=torch.float32,
                ),
                is_eagle_group=True,
            ),
        ]
        runner = request_runner(
            block_size=block_size,
            num_gpu_blocks=100,
            async_scheduling=False,
            kv_cache_groups=groups,
        )
        # Group 0 keys [10,11,12]: only 10 hits.
        # Group 1 keys [1,2,3]: all hit.
        runner.manager.lookup.side_effect = lambda key, req_context: (
            LookupResult.HIT
            if int(get_offload_block_hash(key).decode()) in {10, 1, 2, 3}
            else LookupResult.MISS
        )
        sched = runner.connector_scheduler
        req_status = self._make_req_status(
            sched,
            num_tokens=12,
            offload_keys_per_group=[[10, 11, 12], [1, 2, 3]],
        )
        # Group 0 (non-eagle FA): prefix finds 1 hit → max_hit=4, num_hit=4
        # Group 1 (eagle FA): max_hit=4, widened query → keys=[1, 2].
        #   Finds 2 hits, pop to 1 → boundary stays at 4 tokens. Before the
        #   #52735 fix the query was not widened for full-attention groups,
        #   so the pop landed on the only queried chunk and zeroed the
        #   whole request.
        assert sched._lookup(req_status) == 4

    # -------------------------------------------------------------------
    # Integration tests: store and load via request_runner
    # -------------------------------------------------------------------

    @pytest.mark.parametrize("async_scheduling", [True, False])
    def test_full_attn_store_excludes_trailing_decode_block(
        self, request_runner, async_scheduling: bool
    ):
        """Eagle full-attention group excludes the trailing chunk only while
        decoding.

        Setup: 2 groups — group 0 is normal full-attention, group 1 is
        eagle full-attention. With a 3-block prompt, group 1 stores all 3
        prompt blocks at the end of prefill (the trailing prompt block is
        stable), but skips block 3 once it fills with decoded tokens (its
        draft-layer KV is volatile until the next block starts).
        """
        block_size = 4
        blocks_per_chunk = 1
        tokens_per_chunk = block_size * blocks_per_chunk
        num_gpu_blocks = 100

        kv_cache_groups = [
            KVCacheGroupSpec(
                ["layer0"],
                FullAttentionSpec(
                    block_size=block_size,
                    num_kv_heads=1,
                    head_size=1,
                    dtype=torch.float32,
                ),
            ),
            KVCacheGroupSpec(
                ["layer1"],
                FullAttentionSpec(
                    block_size=block_size,
                    num_kv_heads=2,
                    head_size=1,
                    dtype=torch.float32,
                ),
                is_eagle_group=True,
            ),
        ]

        runner = request_runner(
            block_size=block_size,
            num_gpu_blocks=num_gpu_blocks,
            async_scheduling=async_scheduling,
            kv_cache_groups=kv_cache_groups,
            blocks_per_chunk=blocks_per_chunk,
        )

        kv_group_configs = runner.connector_scheduler.config.kv_group_configs
        assert len(kv_group_configs) == 2
        assert not kv_group_configs[0].is_eagle_group
        assert kv_group_configs[1].is_eagle_group

        runner.new_request(token_ids=[0] * tokens_per_chunk * 3)
        runner.manager.prepare_store.side_effect = lambda keys, req_context: (
            generate_store_output(keys)
        )
        # 4 decoded tokens fill block 3; the extra decode steps let its store
        # job complete within this run under both scheduling modes. The
        # eagle group holds back its volatile trailing block (1, 3) while the
        # request is still decoding, while the normal group stores (0, 3).
        runner.run(
            decoded_tokens=[1, 1, 1, 1, 1, 1, 1],
            expected_stored=(
                (0, 0),
                (0, 1),
                (0, 2),
                (0, 3),
                (1, 0),
                (1, 1),
                (1, 2),
            ),
        )
        # Once the request finishes, no spec rejection can rewrite the tail,
        # so the exclusion is lifted (issue #52735): the held-back (1, 3) and
        # the just-completed block 4 are stored for both groups.
        runner.run(
            decoded_tokens=[EOS_TOKEN_ID],
            expected_stored=((1, 3),),
        )

    @pytest.mark.parametrize("async_scheduling", [True, False])
    def test_sw_store_excludes_trailing_decode_block(
        self, request_runner, async_scheduling: bool
    ):
        """Eagle sliding-window group stores all prompt blocks but excludes
        the trailing chunk while decoding."""
        block_size = 4
        sliding_window = 8
        num_gpu_blocks = 100

        kv_cache_groups = [
            KVCacheGroupSpec(
                ["layer0"],
                SlidingWindowSpec(
                    block_size=block_size,
                    num_kv_heads=1,
                    head_size=1,
                    dtype=torch.float32,
                    sliding_window=sliding_window,
                ),
                is_eagle_group=True,
            ),
        ]

        runner = request_runner(
            block_size=block_size,
            num_gpu_blocks=num_gpu_blocks,
            async_scheduling=async_scheduling,
            kv_cache_groups=kv_cache_groups,
        )

        kv_group_configs = runner.connector_scheduler.config.kv_group_configs
        assert len(kv_group_configs) == 1
        assert kv_group_configs[0].is_eagle_group
        assert kv_group_configs[0].sliding_window_size_in_chunks == 2

        runner.new_request(token_ids=[0] * block_size * 3)
        runner.manager.prepare_store.side_effect = lambda keys, req_context: (
            generate_store_output(keys)
        )
        # 4 decoded tokens fill block 3 entirely with decode tokens. The
        # eagle group holds back its volatile trailing block while decoding.
        runner.run(
            decoded_tokens=[1, 1, 1, 1],
            expected_stored=((0, 0), (0, 1), (0, 2)),
        )
        # Finish lifts the exclusion; the tail block is stored (issue #52735).
        runner.run(
            decoded_tokens=[EOS_TOKEN_ID],
            expected_stored=((0, 3),),
        )

    @pytest.mark.parametrize("async_scheduling", [True, False])
    def test_single_block_stored_at_end_of_prefill(
        self, request_runner, async_scheduling: bool
    ):
        """An eagle group with a single-block prompt stores it at the end of
        prefill: prompt blocks are stable, so no tail is held back."""
        block_size = 4
        blocks_per_chunk = 1
        tokens_per_chunk = block_size * blocks_per_chunk
        num_gpu_blocks = 100

        kv_cache_groups = [
            KVCacheGroupSpec(
                ["layer0"],
                FullAttentionSpec(
                    block_size=block_size,
                    num_kv_heads=1,
                    head_size=1,
                    dtype=torch.float32,
                ),
                is_eagle_group=True,
            ),
        ]

        runner = request_runner(
            block_size=block_size,
            num_gpu_blocks=num_gpu_blocks,
            async_scheduling=async_scheduling,
            kv_cache_groups=kv_cache_groups,
            blocks_per_chunk=blocks_per_chunk,
        )

        runner.new_request(token_ids=[0] * tokens_per_chunk)
        runner.manager.prepare_store.side_effect = lambda keys, req_context: (
            generate_store_output(keys)
        )
        runner.run(decoded_tokens=[EOS_TOKEN_ID], expected_stored=((0, 0),))

    @pytest.mark.parametrize("async_scheduling", [True, False])
    def test_multichunk_store_no_interior_holes(
        self, request_runner, async_scheduling: bool
    ):
        """Eagle store must not drop interior blocks across prefill chunks.

        Regression: the trailing-block exclusion (num_blocks - 1) was applied
        when collecting keys, but next_stored_chunk_idx advanced by the
        non-decremented count, so the trailing chunk of every chunked-prefill
        chunk was skipped and never re-considered. With the harness chunk budget
        (1000 tokens) and block_size 4, a prompt longer than one chunk lost the
        block at the chunk boundary, leaving a permanent gap that caps prefix
        reuse at the first hole. Only the trailing decode block may be held
        back; all other blocks must be stored exactly once (no duplicates from
        next_stored_chunk_idx regressing at the prefill->decode transition).
        """
        block_size = 4
        blocks_per_chunk = 1
        tokens_per_chunk = block_size * blocks_per_chunk
        num_gpu_blocks = 1000

        kv_cache_groups = [
            KVCacheGroupSpec(
                ["layer0"],
                FullAttentionSpec(
                    block_size=block_size,
                    num_kv_heads=1,
                    head_size=1,
                    dtype=torch.float32,
                ),
                is_eagle_group=True,
            ),
        ]
        runner = request_runner(
            block_size=block_size,
            num_gpu_blocks=num_gpu_blocks,
            async_scheduling=async_scheduling,
            kv_cache_groups=kv_cache_groups,
            blocks_per_chunk=blocks_per_chunk,
        )
        assert runner.connector_scheduler.config.kv_group_configs[0].is_eagle_group

        # Prompt spans more than one prefill chunk (chunk budget 1000 tokens).
        num_blocks = 256
        runner.new_request(token_ids=[0] * tokens_per_chunk * num_blocks)
        runner.manager.prepare_store.side_effect = lambda keys, req_context: (
            generate_store_output(keys)
        )
        # Decode a few non-EOS tokens so prefill completes across both chunks
        # before the request finishes.
        runner._run([1, 1, 1, 1, EOS_TOKEN_ID], complete_transfers=True)

        offsets = sorted(
            b.request_block_offset
            for t in runner.completed_stores
            for b in t.gpu_blocks
        )
        # The stored blocks must be contiguous from 0: no interior block is
        # dropped at a chunk boundary. (The bug left a gap at offloaded chunk
        # 249, the tail of the first 1000-token chunk.)
        assert offsets == list(range(len(offsets))), (
            f"interior hole in stored blocks: {offsets}"
        )

    @pytest.mark.skip_global_cleanup
    @pytest.mark.parametrize(
        "abort_after_first_step,async_scheduling,store_horizon_tokens",
        [
            pytest.param(False, False, 1200, id="completed-prompt"),
            pytest.param(True, False, 1000, id="aborted-sync"),
            pytest.param(True, True, 1000, id="aborted-async"),
        ],
    )
    def test_chunked_prefill_uses_final_swa_store_horizon(
        self,
        request_runner,
        abort_after_first_step: bool,
        async_scheduling: bool,
        store_horizon_tokens: int,
    ):
        """SWA stores must use the completed or aborted request horizon."""
        full_attn_block_size = 36
        swa_block_size = 4
        sliding_window = 16
        num_tokens = 1200

        kv_cache_groups = [
            KVCacheGroupSpec(
                ["layer0"],
                FullAttentionSpec(
                    block_size=full_attn_block_size,
                    num_kv_heads=1,
                    head_size=1,
                    dtype=torch.float32,
                ),
            ),
            KVCacheGroupSpec(
                ["layer1"],
                SlidingWindowSpec(
                    block_size=swa_block_size,
                    num_kv_heads=1,
                    head_size=1,
                    dtype=torch.float32,
                    sliding_window=sliding_window,
                ),
            ),
        ]
        runner = request_runner(
            block_size=swa_block_size,
            num_gpu_blocks=1000,
            async_scheduling=async_scheduling,
            kv_cache_groups=kv_cache_groups,
        )

        runner.new_request(token_ids=[0] * num_tokens)
        runner.manager.prepare_store.side_effect = lambda keys, req_context: (
            generate_store_output(keys)
        )

        def abort_after_prefill_step() -> None:
            if runner.scheduler.running:
                runner.scheduler.finish_requests(
                    (str(runner.req_id),), RequestStatus.FINISHED_ABORTED
                )

        runner._run(
            [1] if abort_after_first_step else [1, 1, EOS_TOKEN_ID],
            complete_transfers=True,
            post_step_fn=(abort_after_prefill_step if abort_after_first_step else None),
        )

        stored_swa_chunks = sorted(
            block.request_block_offset
            for transfer in runner.completed_stores
            for block in transfer.gpu_blocks
            if block.group_idx == 1
        )
        store_horizon_chunks = store_horizon_tokens // swa_block_size
        alignment_chunks = full_attn_block_size // swa_block_size
        sliding_window_chunks = sliding_window // swa_block_size
        expected_swa_chunks = []
        for chunk in range(store_horizon_chunks):
            segment_start = chunk - chunk % alignment_chunks
            segment_length = min(alignment_chunks, store_horizon_chunks - segment_start)
            if chunk % alignment_chunks >= segment_length - sliding_window_chunks:
                expected_swa_chunks.append(chunk)
        assert stored_swa_chunks == expected_swa_chunks

    @pytest.mark.skip_global_cleanup
    def test_active_decode_does_not_advance_swa_final_horizon(self, request_runner):
        """Active decode chunks are not final partial SWA segments."""
        full_attn_block_size = 36
        swa_block_size = 4
        prompt_tokens = 1200
        kv_cache_groups = [
            KVCacheGroupSpec(
                ["layer0"],
                FullAttentionSpec(
                    block_size=full_attn_block_size,
                    num_kv_heads=1,
                    head_size=1,
                    dtype=torch.float32,
                ),
            ),
            KVCacheGroupSpec(
                ["layer1"],
                SlidingWindowSpec(
                    block_size=swa_block_size,
                    num_kv_heads=1,
                    head_size=1,
                    dtype=torch.float32,
                    sliding_window=16,
                ),
            ),
        ]
        runner = request_runner(
            block_size=swa_block_size,
            num_gpu_blocks=1000,
            async_scheduling=False,
            kv_cache_groups=kv_cache_groups,
        )
        runner.new_request(token_ids=[0] * prompt_tokens)
        runner.manager.prepare_store.side_effect = lambda keys, req_context: (
            generate_store_output(keys)
        )

        runner._run([1] * 12, complete_transfers=True)

        assert runner.scheduler.running
        stored_swa_chunks = {
            block.request_block_offset
            for transfer in runner.completed_stores
            for block in transfer.gpu_blocks
            if block.group_idx == 1
        }
        first_decode_chunk = prompt_tokens // swa_block_size
        assert first_decode_chunk not in stored_swa_chunks

    def test_dcp_abort_reconsiders_final_swa_tail(self):
        """DCP-expanded SWA blocks are not scaled twice during abort."""
        vllm_config = _make_vllm_config(
            extra_config={"offload_prompt_only": False},
            tensor_parallel_size=2,
            decode_context_parallel_size=2,
        )
        vllm_config.speculative_config = None
        vllm_config.kv_events_config = KVEventsConfig(
            enable_kv_cache_events=True, publisher="null"
        )
        kv_cache_config = KVCacheConfig(
            num_blocks=0,
            kv_cache_tensors=[],
            kv_cache_groups=[
                KVCacheGroupSpec(
                    ["full"],
                    FullAttentionSpec(
                        block_size=36,
                        num_kv_heads=1,
                        head_size=1,
                        dtype=torch.float32,
                    ),
                ),
                KVCacheGroupSpec(
                    ["swa"],
                    SlidingWindowSpec(
                        block_size=4,
                        num_kv_heads=1,
                        head_size=1,
                        dtype=torch.float32,
                        sliding_window=16,
                    ),
                ),
            ],
        )
        spec = MockOffloadingSpec(build_offloading_config(vllm_config, kv_cache_config))
        scheduler = OffloadingConnectorScheduler(spec, vllm_config, kv_cache_config)
        _as_mock(scheduler.manager.prepare_store).side_effect = (
            lambda keys, req_context: (generate_store_output(keys))
        )

        request = MagicMock()
        request.request_id = "req"
        request.kv_transfer_params = None
        request.num_prompt_tokens = 1200
        request.num_tokens = 1200
        request.num_computed_tokens = 0
        request.block_hashes = [BlockHash(f"h{i}".encode()) for i in range(150)]
        request.all_token_ids = list(range(1200))
        request.lora_request = None
        request.shared_prefix_boundary = 0
        request.status = RequestStatus.RUNNING
        request.is_finished.return_value = False
        scheduler.on_new_request(request)

        full_block_ids = list(range(1, 15))
        swa_block_ids = list(range(1001, 1126))
        first_output = SchedulerOutput.make_empty()
        first_output.scheduled_new_reqs = [
            NewRequestData(
                req_id="req",
                prompt_token_ids=[],
                mm_features=[],
                sampling_params=None,
                pooling_params=None,
                block_ids=(full_block_ids, swa_block_ids),
                num_computed_tokens=0,
                lora_request=None,
            )
        ]
        first_output.num_scheduled_tokens = {"req": 1000}
        first_output.total_num_scheduled_tokens = 1000
        scheduler.build_connector_meta(first_output)

        request.num_computed_tokens = 1000
        request.status = RequestStatus.FINISHED_ABORTED
        request.is_finished.return_value = True
        abort_output = SchedulerOutput.make_empty()
        abort_output.finished_req_ids = {"req"}
        abort_meta = scheduler.build_connector_meta(abort_output)
        assert isinstance(abort_meta, OffloadingConnectorMetadata)

        assert len(abort_meta.store_jobs) == 1
        [store_job] = abort_meta.store_jobs.values()
        assert isinstance(store_job.src_spec, GPULoadStoreSpec)
        assert store_job.src_spec.block_ids.tolist() == [swa_block_ids[123]]
        assert store_job.src_spec.group_sizes == [0, 1]
        assert store_job.src_spec.block_indices == [0, 123]

    @pytest.mark.parametrize("async_scheduling", [True, False])
    def test_full_attn_store_then_load(self, request_runner, async_scheduling: bool):
        """Eagle group constrains load: convergence tightens both groups.

        Store 3 offloaded chunks per group (all prompt chunks, so the eagle
        group stores all 3 as well). Then a new request loads from CPU. The
        eagle group pops its trailing hit block on load, tightening the hit
        to 2 blocks for both groups.
        """
        block_size = 4
        blocks_per_chunk = 1
        tokens_per_chunk = block_size * blocks_per_chunk
        num_gpu_blocks = 100

        kv_cache_groups = [
            KVCacheGroupSpec(
                ["layer0"],
                FullAttentionSpec(
                    block_size=block_size,
                    num_kv_heads=1,
                    head_size=1,
                    dtype=torch.float32,
                ),
            ),
            KVCacheGroupSpec(
                ["layer1"],
                FullAttentionSpec(
                    block_size=block_size,
                    num_kv_heads=2,
                    head_size=1,
                    dtype=torch.float32,
                ),
                is_eagle_group=True,
            ),
        ]

        runner = request_runner(
            block_size=block_size,
            num_gpu_blocks=num_gpu_blocks,
            async_scheduling=async_scheduling,
            kv_cache_groups=kv_cache_groups,
            blocks_per_chunk=blocks_per_chunk,
        )

        runner.new_request(token_ids=[0] * tokens_per_chunk * 3)
        runner.manager.prepare_store.side_effect = lambda keys, req_context: (
            generate_store_output(keys)
        )
        runner.run(
            decoded_tokens=[EOS_TOKEN_ID],
            expected_stored=(
                (0, 0),
                (0, 1),
                (0, 2),
                (1, 0),
                (1, 1),
                (1, 2),
            ),
        )

        runner.scheduler.reset_prefix_cache()

        runner.new_request(token_ids=[0] * tokens_per_chunk * 3 + [1])
        runner.manager.lookup.return_value = LookupResult.HIT
        runner.manager.prepare_store.side_effect = lambda keys, req_context: (
            generate_store_output([])
        )
        runner.run(
            decoded_tokens=[EOS_TOKEN_ID],
            expected_loaded=(
                (0, 0),
                (0, 1),
                (1, 0),
                (1, 1),
            ),
        )


# ---------------------------------------------------------------------------
# Tests for request_finished fence population with in-flight pending stores.
# ---------------------------------------------------------------------------


def test_request_finished_with_pending_stores_populates_fence(request_runner):
    """When a request finishes with in-flight store jobs, the fence index
    (_block_id_to_pending_jobs) is correctly populated with the store jobs'
    deferred_fence_block_ids.

    This prevents data corruption when a subsequent request reuses the same
    GPU blocks before the store completes.
    """
    block_size = 4
    blocks_per_chunk = 1
    tokens_per_chunk = block_size * blocks_per_chunk

    # Use 2 GPU blocks so the second run reuses the same blocks,
    # triggering a fence-based flush of the in-flight job from run 1.
    runner = request_runner(
        block_size=block_size,
        num_gpu_blocks=2,
        async_scheduling=False,
        blocks_per_chunk=blocks_per_chunk,
    )

    # 4 prompt tokens → 1 GPU block (block 0)
    runner.new_request(token_ids=[0] * tokens_per_chunk)
    runner.manager.prepare_store.side_effect = lambda keys, req_context: (
        generate_store_output(keys)
    )

    # Capture fence state at each step to verify it was populated.
    fence_snapshots: list[dict] = []
    job_block_ids: set[int] = set()

    def capture_fence():
        fence_snapshots.append(
            dict(runner.connector_scheduler._block_id_to_pending_jobs)
        )
        for js in runner.connector_scheduler._jobs.values():
            if js.is_store:
                job_block_ids.update(js.deferred_fence_block_ids or [])

    # Run 1: create store job, finish request, populate fence.
    # With non-blocking drain (#45595), the job stays in-flight.
    runner.run(
        decoded_tokens=[EOS_TOKEN_ID],
        complete_transfers=False,
        post_step_fn=capture_fence,
    )

    # Verify fence was populated at some point during the run.
    assert len(job_block_ids) > 0, "No store job was created"
    populated_fence = next((f for f in fence_snapshots if len(f) > 0), None)
    assert populated_fence is not None, "Fence was never populated"

    # Verify fence contained the job's non-SW block IDs.
    for bid in job_block_ids:
        assert bid in populated_fence, f"Block {bid} not in fence: {populated_fence}"

    # Run 2: block reuse triggers fence-based flush → cleanup.
    runner.scheduler.reset_prefix_cache()
    runner.new_request(token_ids=[0] * tokens_per_chunk)
    runner.manager.prepare_store.side_effect = lambda keys, req_context: (
        generate_store_output(keys)
    )
    runner.run(
        decoded_tokens=[EOS_TOKEN_ID],
        expected_stored=(0,),
        expected_flushed=(0,),
    )

    # Verify fence is empty after full lifecycle (cleanup happened).
    assert runner.connector_scheduler._block_id_to_pending_jobs == {}
    # req_status should be removed.
    req_id = str(runner.req_id)
    assert req_id not in runner.connector_scheduler._req_status


def test_multiple_in_flight_stores_all_flushed_by_fence(request_runner):
    """When a request finishes with multiple in-flight store jobs,
    ALL jobs are flushed when a new request reuses their blocks.

    Uses three runner.run() calls:
    - Run 1: decode fills a block → job_0 created
    - Run 2: decode fills another block + EOS → job_1 created, request finishes
    - Run 3: block reuse → both jobs flushed via fence
    """
    block_size = 4
    blocks_per_chunk = 1
    tokens_per_chunk = block_size * blocks_per_chunk

    # 4 GPU blocks: block 0 is null, blocks 1-3 are usable.
    runner = request_runner(
        block_size=block_size,
        num_gpu_blocks=4,
        async_scheduling=False,
        blocks_per_chunk=blocks_per_chunk,
    )

    # Prompt: 4 tokens → block 1
    runner.new_request(token_ids=[0] * tokens_per_chunk)
    runner.manager.prepare_store.side_effect = lambda keys, req_context: (
        generate_store_output(keys)
    )

    # Run 1: 4 decoded tokens → block 2 full → job_0 created for block 1.
    runner.run(
        decoded_tokens=[0] * tokens_per_chunk,
        complete_transfers=False,
    )
    assert len(runner.connector_scheduler._jobs) >= 1

    # Run 2: 4 more tokens + EOS → block 3 full → more jobs created.
    # Request finishes → all jobs registered in fence.
    runner.run(
        decoded_tokens=[0] * tokens_per_chunk + [EOS_TOKEN_ID],
        complete_transfers=False,
    )
    num_jobs = len(runner.connector_scheduler._jobs)
    assert num_jobs >= 2, f"Expected multiple in-flight jobs, got {num_jobs}"

    # Run 3: block reuse → fence flushes both jobs.
    runner.scheduler.reset_prefix_cache()
    runner.new_request(token_ids=[0] * tokens_per_chunk * 3)
    runner.manager.prepare_store.side_effect = lambda keys, req_context: (
        generate_store_output(keys)
    )
    runner.run(
        decoded_tokens=[EOS_TOKEN_ID],
        expected_stored=(0, 1, 2),
        expected_flushed=(0, 1, 2),
    )

    # Post-condition: fence cleaned up, all jobs gone.
    assert runner.connector_scheduler._block_id_to_pending_jobs == {}
    assert len(runner.connector_scheduler._jobs) == 0


def test_request_finished_mixed_full_attn_and_sliding_window(
    request_runner,
):
    """With both FullAttention and SlidingWindow groups, a single store job
    has both deferred_fence_block_ids and fenced_block_ids.

    request_finished only registers non-SW blocks in the fence.
    SW blocks were already registered at store creation time.
    """
    block_size = 4
    sliding_window = 8  # 2 blocks

    kv_cache_groups = [
        KVCacheGroupSpec(
            ["layer0"],
            FullAttentionSpec(
                block_size=block_size,
                num_kv_heads=1,
                head_size=1,
                dtype=torch.float32,
            ),
        ),
        KVCacheGroupSpec(
            ["layer1"],
            SlidingWindowSpec(
                block_size=block_size,
                num_kv_heads=1,
                head_size=1,
                dtype=torch.float32,
                sliding_window=sliding_window,
            ),
        ),
    ]

    # Use 4 GPU blocks (2 per group) so run 2 reuses the same blocks,
    # triggering a fence-based flush.
    runner = request_runner(
        block_size=block_size,
        num_gpu_blocks=4,
        async_scheduling=False,
        kv_cache_groups=kv_cache_groups,
    )

    # 1 block of prompt (4 tokens) — 1 block per group.
    runner.new_request(token_ids=[0] * block_size)
    runner.manager.prepare_store.side_effect = lambda keys, req_context: (
        generate_store_output(keys)
    )

    # Capture fence state and job block IDs at each step.
    fence_snapshots: list[dict] = []
    sw_block_ids: set[int] = set()
    non_sw_block_ids: set[int] = set()

    def capture_fence():
        fence_snapshots.append(
            dict(runner.connector_scheduler._block_id_to_pending_jobs)
        )
        for js in runner.connector_scheduler._jobs.values():
            if js.is_store:
                sw_block_ids.update(js.fenced_block_ids or [])
                non_sw_block_ids.update(js.deferred_fence_block_ids or [])

    # Run 1: create store job, finish request, populate fence.
    runner.run(
        decoded_tokens=[EOS_TOKEN_ID],
        complete_transfers=False,
        post_step_fn=capture_fence,
    )

    # Verify job had both SW and non-SW blocks.
    assert len(sw_block_ids) > 0, "No SW blocks in store job"
    assert len(non_sw_block_ids) > 0, "No non-SW blocks in store job"

    # Find the fence snapshot where both SW and non-SW blocks were present.
    # SW blocks should appear at creation time, non-SW at request_finished.
    populated_fence = None
    for fence in fence_snapshots:
        has_sw = all(bid in fence for bid in sw_block_ids)
        has_non_sw = all(bid in fence for bid in non_sw_block_ids)
        if has_sw and has_non_sw:
            populated_fence = fence
            break

    assert populated_fence is not None, (
        f"Fence never contained both SW {sw_block_ids} and "
        f"non-SW {non_sw_block_ids} blocks. Snapshots: {fence_snapshots}"
    )

    # Run 2: block reuse triggers fence-based flush of the old job.
    runner.scheduler.reset_prefix_cache()
    runner.new_request(token_ids=[0] * block_size)
    runner.manager.prepare_store.side_effect = lambda keys, req_context: (
        generate_store_output(keys)
    )
    runner.run(
        decoded_tokens=[EOS_TOKEN_ID],
        expected_stored=((0, 0), (1, 0)),
        expected_flushed=((1, 0),),
    )

    # Verify fence is empty after full lifecycle (cleanup happened).
    assert runner.connector_scheduler._block_id_to_pending_jobs == {}
    assert len(runner.connector_scheduler._jobs) == 0


def test_chunked_local_attention_reports_its_chunk_window():
    """Llama 4 uses chunked local attention, which used to trip the
    FullAttentionSpec assert and kill the engine at startup."""
    spec = ChunkedLocalAttentionSpec(
        block_size=16,
        num_kv_heads=2,
        head_size=64,
        dtype=torch.bfloat16,
        attention_chunk_size=8192,
    )

    assert get_sliding_window_size_in_chunks(spec, tokens_per_chunk=1024) == 8
    # Partial chunks round up, so the reachable tail is never understated.
    assert get_sliding_window_size_in_chunks(spec, tokens_per_chunk=3000) == 3


@pytest.mark.parametrize("blocks_per_chunk", [1, 2, 3])
def test_reachable_block_mask_chunk_to_block_index_conversion(
    blocks_per_chunk: int,
):
    """reachable_block_mask operates in KV-block coordinates, but the
    offloading scheduler works in chunk coordinates. Verify that the
    index conversion (chunk -> block -> chunk) produces the same
    filtering result regardless of blocks_per_chunk.

    Uses a SWA spec with alignment_tokens large enough to create
    unreachable blocks (alignment_tokens > sliding_window).
    """
    block_size = 4
    sliding_window = 8
    alignment_tokens = 16 * blocks_per_chunk

    swa_spec = SlidingWindowSpec(
        block_size=block_size,
        num_kv_heads=1,
        head_size=1,
        dtype=torch.float32,
        sliding_window=sliding_window,
    )

    num_chunks = 8
    start_chunk_idx = 0

    manager_cls = KVCacheSpecRegistry.get_manager_class(swa_spec)
    assert manager_cls is not None

    block_mask = manager_cls.reachable_block_mask(
        start_block=start_chunk_idx * blocks_per_chunk,
        end_block=num_chunks * blocks_per_chunk,
        alignment_tokens=alignment_tokens,
        kv_cache_spec=swa_spec,
        use_eagle=False,
    )

    if block_mask is None:
        return

    assert len(block_mask) == num_chunks * blocks_per_chunk

    reachable_chunks = []
    for chunk_idx in range(num_chunks):
        if any(
            block_mask[chunk_idx * blocks_per_chunk + b]
            for b in range(blocks_per_chunk)
        ):
            reachable_chunks.append(chunk_idx)

    # The tail of each alignment segment should be reachable.
    # sliding_window=8 with block_size=4 -> need=2 blocks.
    # With blocks_per_chunk=1: alignment has 16 blocks, tail 2 reachable.
    # With blocks_per_chunk=2: alignment has 16 blocks, tail 2 -> 1 chunk.
    # With blocks_per_chunk=3: alignment has 16 blocks, tail 2 -> 1 chunk.
    assert len(reachable_chunks) > 0
    assert len(reachable_chunks) < num_chunks


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_retention_interval_sparsifies_swa_stores(
    request_runner, async_scheduling: bool
):
    """retention_interval reduces the number of SWA chunks stored.

    Uses the same hybrid architecture as test_swa_alignment_skip but with
    retention_interval=32 (read from kv_connector_extra_config).  With
    alignment_tokens=16 the default stores a 2-block SWA tail per 16-token
    segment.  retention_interval=32 widens segments to 32 tokens (8 SWA
    blocks), so only the trailing 2 of each 8-block segment are stored.

    With 64 tokens (4 full-attn blocks, 16 SWA blocks):
      - Group 0 (full attn): stores all 4 blocks
      - Group 1 (SWA) without retention: 4 segments of 4 -> 8 stored
      - Group 1 (SWA) with retention_interval=32: 2 segments of 8 -> 4 stored
    """
    full_attn_block_size = 16
    swa_block_size = 4
    sliding_window = 8
    num_gpu_blocks = 200

    kv_cache_groups = [
        KVCacheGroupSpec(
            ["layer0"],
            FullAttentionSpec(
                block_size=full_attn_block_size,
                num_kv_heads=1,
                head_size=1,
                dtype=torch.float32,
            ),
        ),
        KVCacheGroupSpec(
            ["layer1"],
            SlidingWindowSpec(
                block_size=swa_block_size,
                num_kv_heads=1,
                head_size=1,
                dtype=torch.float32,
                sliding_window=sliding_window,
            ),
        ),
    ]

    runner = request_runner(
        block_size=swa_block_size,
        num_gpu_blocks=num_gpu_blocks,
        async_scheduling=async_scheduling,
        kv_cache_groups=kv_cache_groups,
        retention_interval=32,
    )

    assert runner.connector_scheduler.config.retention_interval == 32

    num_tokens = 64
    runner.new_request(token_ids=[0] * num_tokens)
    runner.manager.prepare_store.side_effect = lambda keys, req_context: (
        generate_store_output(keys)
    )
    runner.run(decoded_tokens=[0])

    runner.manager.prepare_store.side_effect = lambda keys, req_context: (
        generate_store_output(keys)
    )
    runner.run(
        decoded_tokens=[EOS_TOKEN_ID],
        # Group 0 (full attn, block_size=16): 4 blocks stored
        # Group 1 (SWA, block_size=4): 16 blocks total, retention_interval=32
        #   Dense segment tails (per_segment=32/4=8, need=2):
        #     blocks 6, 7 and 14, 15
        #   Replay boundary (num_prompt_tokens-1=63, aligned to 48):
        #     end=48/4=12, tail blocks 10, 11
        expected_stored=(
            (0, 0),
            (0, 1),
            (0, 2),
            (0, 3),
            (1, 6),
            (1, 7),
            (1, 10),
            (1, 11),
            (1, 14),
            (1, 15),
        ),
    )


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_retention_interval_zero_stores_only_replay_boundary(
    request_runner, async_scheduling: bool
):
    """retention_interval=0 stores only the replay boundary SWA blocks.

    Same hybrid architecture.  With retention_interval=0, no dense segment
    tails are stored — only blocks reachable from the replay boundary
    (num_prompt_tokens - 1).
    """
    full_attn_block_size = 16
    swa_block_size = 4
    sliding_window = 8
    num_gpu_blocks = 200

    kv_cache_groups = [
        KVCacheGroupSpec(
            ["layer0"],
            FullAttentionSpec(
                block_size=full_attn_block_size,
                num_kv_heads=1,
                head_size=1,
                dtype=torch.float32,
            ),
        ),
        KVCacheGroupSpec(
            ["layer1"],
            SlidingWindowSpec(
                block_size=swa_block_size,
                num_kv_heads=1,
                head_size=1,
                dtype=torch.float32,
                sliding_window=sliding_window,
            ),
        ),
    ]

    runner = request_runner(
        block_size=swa_block_size,
        num_gpu_blocks=num_gpu_blocks,
        async_scheduling=async_scheduling,
        kv_cache_groups=kv_cache_groups,
        retention_interval=0,
    )

    assert runner.connector_scheduler.config.retention_interval == 0

    num_tokens = 64
    runner.new_request(token_ids=[0] * num_tokens)
    runner.manager.prepare_store.side_effect = lambda keys, req_context: (
        generate_store_output(keys)
    )
    runner.run(decoded_tokens=[0])

    runner.manager.prepare_store.side_effect = lambda keys, req_context: (
        generate_store_output(keys)
    )
    runner.run(
        decoded_tokens=[EOS_TOKEN_ID],
        # Group 0 (full attn): all 4 blocks stored
        # Group 1 (SWA): retention_interval=0 -> only replay boundary
        #   replay boundary = num_prompt_tokens - 1 = 63
        #   aligned to alignment_tokens=16 -> 48, end=48/4=12
        #   tail = ceil(8/4) = 2 blocks -> blocks 10, 11
        expected_stored=(
            (0, 0),
            (0, 1),
            (0, 2),
            (0, 3),
            (1, 10),
            (1, 11),
        ),
    )


def _shared_kv_mtp_config():
    """Speculative config for a shared-group MTP model: eagle-family method
    whose drafter layer merges into a target KV-cache group, so no group
    self-identifies as a drafter group (issue #52735)."""
    spec = MagicMock(name="shared_kv_mtp_spec")
    spec.use_eagle.return_value = True
    spec.use_eagle_block_drop.return_value = True
    spec.use_multi_module_mtp.return_value = False
    spec.num_speculative_tokens_per_batch_size = None
    spec.max_num_new_slots_for_drafting = 0
    spec.num_speculative_tokens = 1
    return spec


class TestSharedGroupMTPOffload:
    """Regression tests for issue #52735: OffloadingConnector must keep
    serving when speculative decoding is enabled but no KV-cache group is
    annotated as a drafter group (shared-group MTP models)."""

    def test_no_annotation_marks_no_groups(self, request_runner):
        """Spec decode on + zero annotated groups must NOT mark every group
        as a drafter group; the full store->load roundtrip must match the
        non-speculative behavior of test_two_groups_full_and_sliding_window."""
        block_size = 4
        kv_cache_groups = [
            KVCacheGroupSpec(
                ["layer0"],
                FullAttentionSpec(
                    block_size=block_size,
                    num_kv_heads=1,
                    head_size=1,
                    dtype=torch.float32,
                ),
            ),
            KVCacheGroupSpec(
                ["layer1"],
                SlidingWindowSpec(
                    block_size=block_size,
                    num_kv_heads=1,
                    head_size=1,
                    dtype=torch.float32,
                    sliding_window=8,
                ),
            ),
        ]
        runner = request_runner(
            block_size=block_size,
            num_gpu_blocks=100,
            async_scheduling=True,
            kv_cache_groups=kv_cache_groups,
            speculative_config=_shared_kv_mtp_config(),
        )
        kv_group_configs = runner.connector_scheduler.config.kv_group_configs
        assert [c.is_eagle_group for c in kv_group_configs] == [False, False]

        runner.new_request(token_ids=[0] * block_size * 3)
        runner.manager.prepare_store.side_effect = lambda keys, req_context: (
            generate_store_output(keys)
        )
        runner.run(decoded_tokens=[0])
        runner.run(
            decoded_tokens=[0] * (block_size * 3 + 2),
            expected_stored=(0, 1, 2, 3, 4, 5),
        )
        runner.run(decoded_tokens=[EOS_TOKEN_ID])

        runner.scheduler.reset_prefix_cache()

        runner.new_request(token_ids=[0] * (block_size * 3 + 1))
        runner.manager.lookup.return_value = LookupResult.HIT
        runner.run(
            decoded_tokens=[EOS_TOKEN_ID],
            expected_loaded=((0, 0), (0, 1), (0, 2), (1, 1), (1, 2)),
        )


class TestMambaHybridOffloadServing:
    """Store->finish->lookup flows on a full-attention + mamba-align hybrid,
    with a manager that only HITs keys that were actually stored. Guards the
    two collapse routes of issue #52735."""

    BLOCK = 4
    MAMBA_BLOCK = 16
    PROMPT_TOKENS = 28  # 7 hash blocks; 1 full mamba chunk

    def _make_scheduler(self, speculative_config, mamba_eagle=False):
        vllm_config = _make_vllm_config(
            extra_config={"self_describing_kv_events": True}
        )
        vllm_config.cache_config.block_size = self.BLOCK
        vllm_config.cache_config.prefix_match_unit = self.BLOCK
        vllm_config.speculative_config = speculative_config
        vllm_config.kv_events_config = KVEventsConfig(
            enable_kv_cache_events=True, publisher="null"
        )
        kv_cache_config = KVCacheConfig(
            num_blocks=64,
            kv_cache_tensors=[],
            kv_cache_groups=[
                KVCacheGroupSpec(
                    ["full_layer"],
                    FullAttentionSpec(
                        block_size=self.BLOCK,
                        num_kv_heads=1,
                        head_size=1,
                        dtype=torch.float32,
                    ),
                    is_eagle_group=mamba_eagle,
                ),
                KVCacheGroupSpec(
                    ["mamba_layer"],
                    MambaSpec(
                        block_size=self.MAMBA_BLOCK,
                        shapes=((1, 1),),
                        dtypes=(torch.float32,),
                        mamba_cache_mode="align",
                    ),
                ),
            ],
        )
        spec = MockOffloadingSpec(build_offloading_config(vllm_config, kv_cache_config))
        return OffloadingConnectorScheduler(spec, vllm_config, kv_cache_config)

    def _roundtrip_served_tokens(self, scheduler) -> int:
        """Request A: prompt-only store, finish; request A2: served tokens."""
        stored: set = set()
        _as_mock(scheduler.manager.lookup).side_effect = lambda key, ctx: (
            LookupResult.HIT if key in stored else LookupResult.MISS
        )
        _as_mock(scheduler.manager.prepare_store).side_effect = lambda keys, ctx: (
            generate_store_output(list(keys))
        )

        def complete_all_jobs():
            job_ids = list(scheduler._jobs.keys())
            for jid in job_ids:
                stored.update(scheduler._jobs[jid].keys)
            if job_ids:
                scheduler.update_connector_output(
                    KVConnectorOutput(
                        kv_connector_worker_meta=OffloadingWorkerMetadata(
                            completed_jobs={jid: 1 for jid in job_ids}
                        )
                    )
                )

        def make_request(req_id):
            request = MagicMock()
            request.request_id = req_id
            request.kv_transfer_params = None
            request.num_prompt_tokens = self.PROMPT_TOKENS
            request.num_tokens = self.PROMPT_TOKENS
            request.num_computed_tokens = 0
            request.block_hashes = [
                BlockHash(f"h{i}".encode())
                for i in range(self.PROMPT_TOKENS // self.BLOCK)
            ]
            request.all_token_ids = list(range(self.PROMPT_TOKENS))
            request.lora_request = None
            request.is_finished.return_value = False
            request.status = None
            scheduler.on_new_request(request)
            return request

        req = make_request("A")
        req_status = scheduler._req_status["A"]
        req_status.num_locally_computed_tokens = 0
        req_status.update_offload_keys()
        assert scheduler._lookup(req_status) == 0  # cold

        n_full = self.PROMPT_TOKENS // self.BLOCK
        n_mamba = self.PROMPT_TOKENS // self.MAMBA_BLOCK
        req_status.group_states[0].block_ids[:] = list(range(1, n_full + 1))
        req_status.group_states[1].block_ids[:] = list(range(101, 101 + n_mamba + 1))

        out = SimpleNamespace(
            num_scheduled_tokens={"A": self.PROMPT_TOKENS},
            finished_req_ids=set(),
            kv_connector_block_state=KVConnectorBlockState(
                req_ids=set(),
                resolve_block_ids={}.__getitem__,
                boundary_state_offloads={"A": [(1, 101, self.MAMBA_BLOCK)]},
            ),
        )
        scheduler._build_partial_tail_store_jobs(out)
        scheduler._build_store_jobs(out)
        complete_all_jobs()

        req.num_computed_tokens = self.PROMPT_TOKENS
        req.num_tokens = self.PROMPT_TOKENS + 1
        req.is_finished.return_value = True
        req_status.update_offload_keys()
        scheduler.request_finished(req)
        out2 = SimpleNamespace(num_scheduled_tokens={}, finished_req_ids={"A"})
        scheduler._build_store_jobs(out2)
        complete_all_jobs()

        make_request("A2")
        rs2 = scheduler._req_status["A2"]
        rs2.num_locally_computed_tokens = 0
        rs2.update_offload_keys()
        served = scheduler._lookup(rs2)
        return served if served is not None else 0

    def test_shared_group_mtp_serves_like_non_speculative(self):
        """Route 1 of #52735: with spec decode on and no drafter annotation,
        serving must equal the non-speculative baseline (was 0 before the
        fix: the all-groups fallback marked the mamba group as a drafter and
        the volatile-tail pop consumed its only servable chunk)."""
        baseline = self._roundtrip_served_tokens(self._make_scheduler(None))
        assert baseline == 16
        served = self._roundtrip_served_tokens(
            self._make_scheduler(_shared_kv_mtp_config())
        )
        assert served == baseline

    def test_annotated_eagle_group_does_not_starve_coarse_sibling(self):
        """Route 2 of #52735 (F1): a genuinely annotated eagle full-attention
        group must not drag the confirmed boundary below a coarser sibling's
        chunk granularity. The widened query makes the volatile-tail pop
        land on an extra queried chunk, holding the boundary at 16 tokens
        (was 0 before the fix: 4 hits -> pop -> 12 tokens < mamba chunk)."""
        scheduler = self._make_scheduler(None, mamba_eagle=True)
        assert [c.is_eagle_group for c in scheduler.config.kv_group_configs] == [
            True,
            False,
        ]
        assert self._roundtrip_served_tokens(scheduler) == 16
