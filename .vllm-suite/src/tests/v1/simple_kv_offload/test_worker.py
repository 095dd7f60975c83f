# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Worker-side unit tests for SimpleCPUOffloadConnector.

Covers the GPU->CPU store cross-stream synchronization: the store copy must be
ordered after the compute stream that writes the KV blocks, otherwise it can
read partially written / stale blocks and silently corrupt the CPU cache.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist

from vllm.platforms import current_platform

if not current_platform.is_cuda_alike():
    pytest.skip("Requires CUDA or ROCm", allow_module_level=True)

from tests.v1.attention.utils import dense_kv_cache_tensor, dense_kv_cache_views
from tests.v1.kv_connector.unit.test_kv_connector_lifecycle import (
    _make_empty_scheduler_output,
)
from vllm.config import CacheConfig
from vllm.distributed.kv_transfer.kv_connector.v1.simple_cpu_offload_connector import (
    SimpleCPUOffloadConnector,
)
from vllm.v1.core.kv_cache_planning import (
    get_kv_cache_config_from_groups,
    is_kv_cache_spec_uniform,
)
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheLayout,
    KVCacheSpec,
    KVCacheTensor,
    MLAAttentionSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.simple_kv_offload.copy_backend import DmaCopyBackend
from vllm.v1.simple_kv_offload.cuda_mem_ops import (
    CU_MEMCPY_SRC_ACCESS_ORDER_ANY,
    CU_MEMCPY_SRC_ACCESS_ORDER_STREAM,
    build_params,
)
from vllm.v1.simple_kv_offload.disk_backend import DiskBackend
from vllm.v1.simple_kv_offload.metadata import (
    SimpleCPUOffloadMetadata,
    SimpleCPUOffloadWorkerMetadata,
)
from vllm.v1.simple_kv_offload.sizing import sync_num_offload_blocks_across_workers
from vllm.v1.simple_kv_offload.worker import SimpleCPUOffloadWorker
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin
from vllm.v1.worker.utils import allocate_kv_cache

NUM_BLOCKS = 64
BLOCK_BYTES = 4096
ITERS = 30
# Keep the compute stream busy so the KV write lands late; this makes the
# store-vs-compute race deterministic instead of timing-dependent.
SLEEP_CYCLES = 50_000_000


def _make_worker(
    kv_cache_config: KVCacheConfig | None, cpu_capacity_bytes: int
) -> SimpleCPUOffloadWorker:
    return SimpleCPUOffloadWorker(None, kv_cache_config, cpu_capacity_bytes)


def _make_backend() -> tuple[DmaCopyBackend, torch.Tensor, torch.Tensor]:
    gpu = {"k": torch.zeros((NUM_BLOCKS, BLOCK_BYTES), dtype=torch.int8, device="cuda")}
    cpu = {
        "k": torch.zeros(
            (NUM_BLOCKS, BLOCK_BYTES), dtype=torch.int8, device="cpu", pin_memory=True
        )
    }
    low_pri, _ = torch.cuda.Stream.priority_range()
    backend = DmaCopyBackend()
    backend.init(
        gpu,
        cpu,
        gpu["k"].device,
        torch.cuda.Stream(priority=low_pri),
        torch.cuda.Stream(priority=low_pri),
    )
    return backend, gpu["k"], cpu["k"]


@pytest.mark.parametrize("use_v2", [False, True])
def test_no_forward_step_completes_cpu_store(monkeypatch, use_v2):
    """A finished request's final store must drain without another model step."""
    backend, gpu, cpu = _make_backend()
    worker = _make_worker(None, 0)
    worker._backend = backend
    connector = SimpleCPUOffloadConnector.__new__(SimpleCPUOffloadConnector)
    connector.worker_handler = worker
    output = _make_empty_scheduler_output()
    output.kv_connector_metadata = SimpleCPUOffloadMetadata(
        store_event=0, store_gpu_blocks=[0], store_cpu_blocks=[0]
    )
    module = "vllm.v1.worker.kv_connector_model_runner_mixin"
    monkeypatch.setattr(f"{module}.get_kv_transfer_group", lambda: connector)
    monkeypatch.setattr(f"{module}.set_forward_context", lambda *a: nullcontext())
    monkeypatch.setattr(f"{module}.get_forward_context", lambda: None)
    try:
        gpu.fill_(91)
        if use_v2:
            active = ActiveKVConnector.__new__(ActiveKVConnector)
            active.kv_connector = connector
            active._disabled = False
            active._pending_load_kwargs = None
            module = "vllm.v1.worker.gpu.kv_connector"
            monkeypatch.setattr(f"{module}.is_forward_context_available", lambda: True)
            monkeypatch.setattr(f"{module}.get_forward_context", lambda: None)
            result = active.no_forward(output)
        else:
            result = KVConnectorModelRunnerMixin.kv_connector_no_forward(output, None)
        completion = (
            result.kv_connector_output.kv_connector_worker_meta
            if result.kv_connector_output is not None
            else None
        )
        deadline = time.monotonic() + 5
        while completion is None and time.monotonic() < deadline:
            connector.get_finished(set())
            completion = connector.build_connector_worker_meta()
            time.sleep(0.001)
        assert completion is not None, "CPU store never completed on the empty step"
        assert isinstance(completion, SimpleCPUOffloadWorkerMetadata)
        assert completion.completed_store_events == {0: 1}
        assert torch.equal(cpu[0], gpu[0].cpu())
    finally:
        backend.shutdown()


def test_deferred_store_waits_for_draft_forward(monkeypatch):
    """Target completion must not submit the store before draft finalization."""
    backend, gpu, cpu = _make_backend()
    worker = _make_worker(None, 0)
    worker._backend = backend
    connector = SimpleCPUOffloadConnector.__new__(SimpleCPUOffloadConnector)
    connector.worker_handler = worker
    output = _make_empty_scheduler_output()
    output.kv_connector_metadata = SimpleCPUOffloadMetadata(
        store_event=0, store_gpu_blocks=[0], store_cpu_blocks=[0]
    )
    module = "vllm.v1.worker.kv_connector_model_runner_mixin"
    monkeypatch.setattr(f"{module}.get_kv_transfer_group", lambda: connector)
    monkeypatch.setattr(f"{module}.has_kv_transfer_group", lambda: True)
    monkeypatch.setattr(f"{module}.get_forward_context", lambda: None)
    launch = MagicMock(wraps=backend.launch_copy)
    monkeypatch.setattr(backend, "launch_copy", launch)
    try:
        with KVConnectorModelRunnerMixin._get_kv_connector_output(
            output, defer_finalize=True
        ):
            gpu.fill_(17)
        launch.assert_not_called()
        gpu.fill_(91)
        KVConnectorModelRunnerMixin.finalize_kv_connector()
        assert launch.call_count == 1
        completion = None
        deadline = time.monotonic() + 5
        while completion is None and time.monotonic() < deadline:
            connector.get_finished(set())
            completion = connector.build_connector_worker_meta()
            time.sleep(0.001)
        assert completion is not None
        assert completion.completed_store_events == {0: 1}
        assert torch.equal(cpu[0], gpu[0].cpu())
        assert launch.call_count == 1
    finally:
        backend.shutdown()


def _drive_store(
    backend: DmaCopyBackend,
    gpu: torch.Tensor,
    cpu: torch.Tensor,
    *,
    with_barrier: bool,
) -> int:
    """Run ITERS store cycles; return how many landed corrupted in the CPU pool.

    Each cycle writes a unique value on a compute stream (after a deliberate
    delay) and then issues the GPU->CPU store. The store is issued *after* the
    write in host program order, mirroring the connector's deferred-store
    assumption. Only the compute-done event creates a real device-side
    happens-before edge.
    """
    block_ids = list(range(gpu.shape[0]))
    compute_stream = torch.cuda.Stream()
    corrupt = 0
    for it in range(ITERS):
        val = (it % 126) + 1  # 1..126; distinct from the zero-initialized pool
        with torch.cuda.stream(compute_stream):
            torch.cuda._sleep(SLEEP_CYCLES)
            gpu.fill_(val)

        wait_event = None
        if with_barrier:
            wait_event = torch.Event()
            wait_event.record(compute_stream)

        store_events: list[tuple[int, torch.Event]] = []
        backend.launch_copy(
            block_ids,
            block_ids,
            is_store=True,
            event_idx=it,
            events_list=store_events,
            wait_event=wait_event,
        )

        deadline = time.time() + 10.0
        while not store_events and time.time() < deadline:
            time.sleep(0.0005)
        assert store_events, "background copy was never enqueued"
        store_events[0][1].synchronize()

        if int((cpu[:, 0].to(torch.int32) != val).sum().item()):
            corrupt += 1

    # Drain the compute stream before returning: in the no-barrier control
    # phase the store never waits on compute, so the host loop runs far ahead
    # and leaves a backlog of sleep+fill kernels in flight. Without this, the
    # leftover control-phase fills race the barrier phase's fill->copy window
    # on the shared gpu tensor and flakily corrupt one iteration.
    compute_stream.synchronize()
    return corrupt


def test_store_orders_after_compute_write():
    """The store must wait for the compute event; without it, it races.

    Asserts both directions so the test is self-validating: the no-barrier
    control must actually corrupt (proving the race window is exercised), and
    the fixed path with the compute-done event must be clean.
    """
    backend, gpu, cpu = _make_backend()
    try:
        control = _drive_store(backend, gpu, cpu, with_barrier=False)
        fixed = _drive_store(backend, gpu, cpu, with_barrier=True)
    finally:
        backend.shutdown()

    assert control > 0, (
        "no-barrier store did not race the compute write; the test no longer "
        "exercises the hazard it is meant to guard"
    )
    assert fixed == 0, f"store raced compute even with the barrier: {fixed} corrupt"


class _RecordingBackend:
    """Captures launch_copy calls without touching the GPU."""

    def __init__(self) -> None:
        self.calls: list[dict] = []

    def launch_copy(
        self,
        src_blocks,
        dst_blocks,
        is_store,
        event_idx,
        events_list,
        wait_event=None,
    ) -> None:
        self.calls.append({"is_store": is_store, "wait_event": wait_event})


def test_transfer_hooks_pass_wait_event_for_store_only():
    """wait_for_save gates stores on a compute-done event; start_load_kv does not."""
    worker = _make_worker(
        kv_cache_config=None,
        cpu_capacity_bytes=0,
    )
    recording = _RecordingBackend()
    worker._backend = recording
    worker._connector_metadata = SimpleCPUOffloadMetadata(
        load_event=0,
        load_gpu_blocks=[0],
        load_cpu_blocks=[0],
        store_event=1,
        store_gpu_blocks=[1],
        store_cpu_blocks=[1],
    )

    worker.start_load_kv()
    worker.wait_for_save()

    store_calls = [c for c in recording.calls if c["is_store"]]
    load_calls = [c for c in recording.calls if not c["is_store"]]
    assert len(store_calls) == 1
    assert len(load_calls) == 1
    assert isinstance(store_calls[0]["wait_event"], torch.Event)
    assert load_calls[0]["wait_event"] is None


def test_build_params_src_access_order():
    """build_params defaults to ANY and honors an explicit STREAM override."""
    gpu = {"k": torch.zeros((4, 64), dtype=torch.int8, device="cuda")}
    cpu = {"k": torch.zeros((4, 64), dtype=torch.int8, device="cpu")}
    stream = torch.cuda.Stream()

    default = build_params(gpu, cpu, stream)
    assert default.attrs.srcAccessOrder == CU_MEMCPY_SRC_ACCESS_ORDER_ANY

    ordered = build_params(
        gpu, cpu, stream, src_access_order=CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
    )
    assert ordered.attrs.srcAccessOrder == CU_MEMCPY_SRC_ACCESS_ORDER_STREAM


@pytest.mark.parametrize("layout", list(KVCacheLayout))
def test_register_shared_kv_cache_storage(monkeypatch, layout: KVCacheLayout):
    num_blocks = 4
    num_layers = 2
    spec = FullAttentionSpec(
        block_size=2,
        num_kv_heads=2,
        head_size=2,
        dtype=torch.float16,
    )
    raw = torch.zeros(
        num_blocks * num_layers * spec.page_size_bytes,
        dtype=torch.int8,
        device="cuda",
    )
    caches = dense_kv_cache_views(raw, spec, num_blocks, num_layers, layout)
    layer_names = [f"layer.{i}" for i in range(num_layers)]
    cache_config = MagicMock(
        num_blocks=num_blocks,
        kv_cache_tensors=[
            dense_kv_cache_tensor(
                raw, spec, num_blocks, num_layers, layout, layer_names
            )
        ],
    )
    worker = _make_worker(
        kv_cache_config=cache_config,
        cpu_capacity_bytes=raw.nbytes,
    )
    worker._backend = MagicMock()
    monkeypatch.setattr("vllm.v1.simple_kv_offload.worker.PIN_MEMORY", False)

    worker.register_kv_caches(
        {f"layer.{layer_idx}": cache for layer_idx, cache in enumerate(caches)}
    )

    assert worker.gpu_kv_caches is not None
    if layout.is_layer_compact and not layout.is_block_compact:
        expected_regions = num_layers * spec.num_heads
        expected_block_bytes = spec.page_size_bytes // spec.num_heads
    elif layout.is_layer_compact:
        expected_regions = num_layers
        expected_block_bytes = spec.page_size_bytes
    else:
        expected_regions = 1
        expected_block_bytes = spec.page_size_bytes * num_layers
    assert len(worker.gpu_kv_caches) == expected_regions
    assert {cache.shape for cache in worker.gpu_kv_caches.values()} == {
        (num_blocks, expected_block_bytes)
    }


@pytest.mark.parametrize("num_layers", [1, 2])
def test_explicit_cpu_blocks_bound_live_worker_allocation(monkeypatch, num_layers):
    """Different live KV strides must honor the same explicit CPU pool size."""
    num_blocks = 4
    names = [f"layer.{i}" for i in range(num_layers)]
    raw = torch.zeros(
        num_layers * num_blocks * BLOCK_BYTES, dtype=torch.int8, device="cuda"
    )
    config = KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[
            KVCacheTensor(
                size=raw.nbytes,
                layers=names,
                layer_stride=num_blocks * BLOCK_BYTES,
                block_stride=BLOCK_BYTES,
            )
        ],
        kv_cache_groups=[],
    )
    caches = dict(zip(names, raw.view(num_layers, num_blocks, BLOCK_BYTES)))
    worker = SimpleCPUOffloadWorker(None, config, 8 * BLOCK_BYTES, num_cpu_blocks=4)
    monkeypatch.setattr("vllm.v1.simple_kv_offload.worker.PIN_MEMORY", False)
    try:
        worker.register_kv_caches(caches)
        assert worker.num_cpu_blocks == 4
        assert worker.cpu_kv_caches is not None
        assert all(t.shape[0] == 4 for t in worker.cpu_kv_caches.values())
        assert sum(t.nbytes for t in worker.cpu_kv_caches.values()) <= 8 * BLOCK_BYTES
    finally:
        if worker._backend is not None:
            worker._backend.shutdown()


@pytest.mark.parametrize(
    "capacity_bytes, count, local_capacity",
    [(8 * BLOCK_BYTES, 5, 4), (BLOCK_BYTES, 1, 0)],
)
def test_explicit_cpu_blocks_reject_heavier_worker_before_allocation(
    capacity_bytes, count, local_capacity
):
    """A count that fits the scheduler's stage must fail on a smaller worker."""
    names = ["layer.0", "layer.1"]
    raw = torch.zeros(2 * 4 * BLOCK_BYTES, dtype=torch.int8, device="cuda")
    config = KVCacheConfig(
        num_blocks=4,
        kv_cache_tensors=[
            KVCacheTensor(
                size=raw.nbytes,
                layers=names,
                layer_stride=4 * BLOCK_BYTES,
                block_stride=BLOCK_BYTES,
            )
        ],
        kv_cache_groups=[],
    )
    worker = SimpleCPUOffloadWorker(None, config, capacity_bytes, num_cpu_blocks=count)
    caches = dict(zip(names, raw.view(2, 4, BLOCK_BYTES)))
    with pytest.raises(ValueError, match=f"local offload capacity {local_capacity}"):
        worker.register_kv_caches(caches)
    assert worker.cpu_kv_caches is None


def test_register_kv_cache_storage_with_trailing_padding(monkeypatch):
    num_blocks = 4
    block_bytes = 32
    cache_bytes = num_blocks * block_bytes
    raw = torch.zeros(4096, dtype=torch.int8, device="cuda")
    cache = raw[:cache_bytes].view(num_blocks, block_bytes)
    worker = _make_worker(
        kv_cache_config=MagicMock(
            num_blocks=num_blocks,
            kv_cache_tensors=[
                KVCacheTensor(
                    size=cache_bytes,
                    layers=["layer.0"],
                    layer_stride=cache_bytes,
                    block_stride=block_bytes,
                )
            ],
        ),
        cpu_capacity_bytes=cache_bytes,
    )
    worker._backend = MagicMock()
    monkeypatch.setattr("vllm.v1.simple_kv_offload.worker.PIN_MEMORY", False)

    worker.register_kv_caches({"layer.0": cache})

    assert worker.gpu_kv_caches is not None
    assert list(worker.gpu_kv_caches) == ["layer.0"]
    assert worker.gpu_kv_caches["layer.0"].shape == (num_blocks, block_bytes)


def test_register_separate_kv_head_groups(monkeypatch):
    # LHBNC hoists the K/V head groups outside the block dim, so each layer's
    # blocks are registered as one region per group (K, V).
    layout = KVCacheLayout.LHBNC
    num_blocks = 4
    num_layers = 2
    spec = FullAttentionSpec(
        block_size=2,
        num_kv_heads=2,
        head_size=2,
        dtype=torch.float16,
        num_head_slots=2,
        state_content_bytes=2 * 2 * 2,
    )
    raw = torch.zeros(
        num_blocks * num_layers * spec.page_size_bytes,
        dtype=torch.int8,
        device="cuda",
    )
    caches = dense_kv_cache_views(raw, spec, num_blocks, num_layers, layout)
    layer_names = [f"layer.{i}" for i in range(num_layers)]
    worker = _make_worker(
        kv_cache_config=MagicMock(
            num_blocks=num_blocks,
            kv_cache_tensors=[
                dense_kv_cache_tensor(
                    raw, spec, num_blocks, num_layers, layout, layer_names
                )
            ],
        ),
        cpu_capacity_bytes=raw.nbytes,
    )
    worker._backend = MagicMock()
    monkeypatch.setattr("vllm.v1.simple_kv_offload.worker.PIN_MEMORY", False)

    worker.register_kv_caches(
        {f"layer.{layer_idx}": cache for layer_idx, cache in enumerate(caches)}
    )

    assert worker.gpu_kv_caches is not None
    assert len(worker.gpu_kv_caches) == num_layers * spec.num_heads
    per_group_block_bytes = (
        spec.num_kv_heads * spec.block_size * spec.head_size * spec.dtype.itemsize
    )
    assert {cache.shape for cache in worker.gpu_kv_caches.values()} == {
        (num_blocks, per_group_block_bytes)
    }


def test_sync_num_cpu_blocks_across_workers_noop_when_dist_uninitialized(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "vllm.v1.simple_kv_offload.sizing.dist.is_initialized",
        lambda: False,
    )
    assert sync_num_offload_blocks_across_workers(42) == 42


def test_sync_num_cpu_blocks_across_workers_noop_when_world_size_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class FakeGroup:
        world_size = 1

    monkeypatch.setattr(
        "vllm.v1.simple_kv_offload.sizing.dist.is_initialized",
        lambda: True,
    )
    monkeypatch.setattr(
        "vllm.distributed.parallel_state.get_world_group",
        lambda: FakeGroup(),
    )
    assert sync_num_offload_blocks_across_workers(42) == 42


def test_sync_num_cpu_blocks_across_workers_all_reduce_min(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class FakeGroup:
        world_size = 4
        cpu_group = object()

    def fake_all_reduce(tensor, group, op) -> None:
        assert op is dist.ReduceOp.MIN
        tensor.fill_(5)

    monkeypatch.setattr(
        "vllm.v1.simple_kv_offload.sizing.dist.is_initialized",
        lambda: True,
    )
    monkeypatch.setattr(
        "vllm.distributed.parallel_state.get_world_group",
        lambda: FakeGroup(),
    )
    monkeypatch.setattr(
        "vllm.v1.simple_kv_offload.sizing.dist.all_reduce",
        fake_all_reduce,
    )
    assert sync_num_offload_blocks_across_workers(10) == 5


def _dsa_specs(num_layers: int, block_size: int) -> dict[str, KVCacheSpec]:
    """A DSA model's per-layer specs (DeepSeek-V3.2, GLM-5.2).

    Each decoder layer contributes an MLA latent cache and the indexer's key
    cache, whose pages differ in size (``MLAAttentionSpec`` off ``head_size``:
    512 + 64 for the latent, 128 fp8 keys + one fp32 scale per 128 elements for
    the indexer). Both are ``MLAAttentionSpec`` with the same block size, so the
    hybrid allocator puts them in one ``UniformTypeKVCacheSpecs`` cache group.
    See ``DeepseekV32IndexerCache.get_kv_cache_spec`` and
    ``MLAAttention.get_kv_cache_spec``.
    """
    specs: dict[str, KVCacheSpec] = {}
    for i in range(num_layers):
        specs[f"model.layers.{i}.self_attn.attn"] = MLAAttentionSpec(
            block_size=block_size,
            num_kv_heads=1,
            head_size=512 + 64,
            dtype=torch.uint8,
            cache_dtype_str="fp8",
        )
        specs[f"model.layers.{i}.self_attn.indexer.k_cache"] = MLAAttentionSpec(
            block_size=block_size,
            num_kv_heads=1,
            head_size=128 + 128 // 128 * 4,
            dtype=torch.uint8,
        )
    return specs


def test_register_mixed_page_sizes_in_one_cache_group(monkeypatch):
    """Sparse-MLA models mix page sizes inside one cache group.

    The MLA latent and indexer key caches of a layer have different page sizes,
    so the allocation has no single per-layer block size to reinterpret it with:
    ``num_layers * (mla_page + indexer_page)`` is not a multiple of either page.
    Registration must derive each region from the placement metadata instead.
    """
    num_layers = 4
    block_size = 64
    specs = _dsa_specs(num_layers, block_size)
    # Differing head sizes make the specs non-identical but same-type, which is
    # what lands both caches of a layer in one group.
    assert not is_kv_cache_spec_uniform(specs)
    assert UniformTypeKVCacheSpecs.is_uniform_type(specs)
    group = KVCacheGroupSpec(
        list(specs),
        UniformTypeKVCacheSpecs(block_size=block_size, kv_cache_specs=specs),
    )

    # DEEPSEEK_V32_INDEXER declares no supported layouts, so resolution lands on
    # the default preference: layer-outermost, one region per layer.
    layout = KVCacheLayout.LBNHC
    vllm_config = MagicMock()
    vllm_config.cache_config = CacheConfig()
    vllm_config.cache_config.kv_cache_layout = layout.name
    vllm_config.cache_config.num_gpu_blocks_override = None
    vllm_config.attention_config.hisparse_config = None
    vllm_config.kv_transfer_config = None

    pages = [spec.page_size_bytes for spec in specs.values()]
    num_blocks = 4
    kv_cache_config = get_kv_cache_config_from_groups(
        vllm_config, [group], sum(pages) * num_blocks
    )
    assert kv_cache_config.num_blocks == num_blocks
    assert len(set(pages)) > 1, "the mixed page sizes are what this test covers"

    kv_caches = allocate_kv_cache(kv_cache_config, torch.device("cuda"), layout)
    worker = _make_worker(
        kv_cache_config=kv_cache_config,
        cpu_capacity_bytes=sum(pages) * num_blocks,
    )
    worker._backend = MagicMock()
    monkeypatch.setattr("vllm.v1.simple_kv_offload.worker.PIN_MEMORY", False)

    worker.register_kv_caches(kv_caches)

    assert worker.gpu_kv_caches is not None
    # One region per layer, each with that layer's own page as its block stride.
    assert sorted(worker.gpu_kv_caches) == sorted(specs)
    assert {name: cache.shape[1] for name, cache in worker.gpu_kv_caches.items()} == {
        name: spec.page_size_bytes for name, spec in specs.items()
    }
    assert all(cache.shape[0] == num_blocks for cache in worker.gpu_kv_caches.values())

    # Every registered region must alias the bytes the model writes through, or
    # offloaded blocks would be copied from the wrong place.
    for name, cache in kv_caches.items():
        region = worker.gpu_kv_caches[name]
        assert region.data_ptr() == cache.data_ptr()
        assert region.stride(0) == specs[name].page_size_bytes


@pytest.mark.parametrize("rank_blocks", [1, 5])
def test_register_mixed_page_sizes_odd_block_counts(monkeypatch, rank_blocks):
    """Registration holds at block counts that are not powers of two.

    ``num_blocks`` comes out of ``available_memory // bytes_per_block``, so
    any integer is reachable. Registration derives regions from the config's
    own block count and strides, and the CPU pool rounds down from the same
    per-block byte total; none of it assumes anything about how the count
    was reached.
    """
    num_layers = 4
    block_size = 64
    specs = _dsa_specs(num_layers, block_size)
    group = KVCacheGroupSpec(
        list(specs),
        UniformTypeKVCacheSpecs(block_size=block_size, kv_cache_specs=specs),
    )
    layout = KVCacheLayout.LBNHC
    vllm_config = MagicMock()
    vllm_config.cache_config = CacheConfig()
    vllm_config.cache_config.kv_cache_layout = layout.name
    vllm_config.cache_config.num_gpu_blocks_override = None
    vllm_config.attention_config.hisparse_config = None
    vllm_config.kv_transfer_config = None

    pages = [spec.page_size_bytes for spec in specs.values()]
    kv_cache_config = get_kv_cache_config_from_groups(
        vllm_config, [group], sum(pages) * rank_blocks
    )
    assert kv_cache_config.num_blocks == rank_blocks

    kv_caches = allocate_kv_cache(kv_cache_config, torch.device("cuda"), layout)
    worker = _make_worker(
        kv_cache_config=kv_cache_config,
        cpu_capacity_bytes=sum(pages) * rank_blocks,
    )
    worker._backend = MagicMock()
    monkeypatch.setattr("vllm.v1.simple_kv_offload.worker.PIN_MEMORY", False)

    worker.register_kv_caches(kv_caches)

    assert worker.gpu_kv_caches is not None
    assert {n: c.shape for n, c in worker.gpu_kv_caches.items()} == {
        name: (rank_blocks, spec.page_size_bytes) for name, spec in specs.items()
    }
    assert worker.num_cpu_blocks == rank_blocks


def test_mixed_page_byte_placement_is_dcp_invariant():
    """DCP scales a block's token span, not its byte placement.

    ``get_kv_cache_config_from_groups`` never reads
    ``decode_context_parallel_size``, so every placement field registration
    derives regions from is identical at dcp=1 and dcp=2. What DCP scales is
    the block's token span, reported by ``resolve_kv_cache_block_sizes``;
    checking that it doubles proves DCP was actually in effect, or the
    identity above would be trivially true.
    """
    specs = _dsa_specs(4, block_size=128)

    placements = []
    for dcp_size in (1, 2):
        group = KVCacheGroupSpec(
            list(specs),
            UniformTypeKVCacheSpecs(block_size=128, kv_cache_specs=specs),
        )
        vllm_config = MagicMock()
        vllm_config.cache_config = CacheConfig()
        vllm_config.cache_config.block_size = 128
        vllm_config.cache_config.kv_cache_layout = KVCacheLayout.LBNHC.name
        vllm_config.cache_config.num_gpu_blocks_override = None
        vllm_config.parallel_config.decode_context_parallel_size = dcp_size
        vllm_config.attention_config.hisparse_config = None
        vllm_config.kv_transfer_config = None

        page_bytes = sum(spec.page_size_bytes for spec in specs.values())
        config = get_kv_cache_config_from_groups(vllm_config, [group], page_bytes * 4)
        scheduler_block_size, _ = resolve_kv_cache_block_sizes(config, vllm_config)
        assert scheduler_block_size == 128 * dcp_size
        placements.append(
            [
                (t.size, tuple(t.layers), t.layer_stride, t.block_stride, t.offset)
                for t in config.kv_cache_tensors
            ]
        )

    assert placements[0] == placements[1]


@pytest.mark.parametrize(
    ("block_bytes", "use_page_cache", "expect_ok"),
    [
        (4096, True, True),  # aligned control
        (3 * 512, True, True),  # 512-aligned only: fine for buffered I/O
        (3 * 512, False, False),  # O_DIRECT keeps enforcing 4096 alignment
    ],
)
def test_disk_backend_alignment_only_required_for_direct_io(
    tmp_path, monkeypatch, block_bytes: int, use_page_cache: bool, expect_ok: bool
):
    """The 4096 stride assert belongs to O_DIRECT; page-cache I/O must not hit it.

    Hybrid models (e.g. 101 per-rank cache tensors) sum to a block stride that
    is 512- but not 4096-aligned, which previously made disk offload unbootable
    even with use_page_cache=True.
    """
    # Host pinning is a separate lifecycle concern with its own tests; the
    # alignment gate must not depend on registration state, so stub both ends.
    monkeypatch.setattr(
        "vllm.v1.simple_kv_offload.disk_backend.pin_tensor", lambda t: None
    )
    monkeypatch.setattr(
        "vllm.v1.simple_kv_offload.disk_backend.unpin_tensor",
        lambda t: None,
        raising=False,  # harmless on branches without teardown-side unpins
    )
    num_blocks = 4
    gpu = {"k": torch.zeros((num_blocks, block_bytes), dtype=torch.int8, device="cuda")}
    backend = DiskBackend()
    disk_path = tmp_path / "kv-offload.bin"

    def _init() -> None:
        backend.init(
            gpu,
            gpu["k"].device,
            torch.cuda.Stream(),
            torch.cuda.Stream(),
            str(disk_path),
            num_blocks,
            block_bytes,
            use_page_cache=use_page_cache,
        )

    if not expect_ok:
        with pytest.raises(AssertionError, match="not aligned"):
            _init()
        return

    _init()
    try:
        assert disk_path.stat().st_size == num_blocks * block_bytes
    finally:
        backend.shutdown()
