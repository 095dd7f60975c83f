# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
from typing import cast
from unittest.mock import MagicMock

import pytest
import torch

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    TransferJob,
)
from vllm.platforms import current_platform
from vllm.utils.torch_utils import get_dtype_size
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import (
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheLayout,
    KVCacheTensor,
    MambaSpec,
    MLAAttentionSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingManager,
    OffloadingSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)

NUM_BLOCKS = 10
BLOCK_SIZE = 16
NUM_KV_HEADS = 4
HEAD_SIZE = 64
DTYPE = torch.float16
DEVICE_TYPE = current_platform.device_type

# Attention backends to test
ATTN_BACKENDS: list[str] = []
if current_platform.is_cuda():
    ATTN_BACKENDS = [
        "FLASH_ATTN",
        "FLEX_ATTENTION",
        "FLASHINFER",
        "TRITON_ATTN",
    ]
elif current_platform.is_rocm():
    ATTN_BACKENDS = ["TRITON_ATTN"]
elif current_platform.is_xpu():
    ATTN_BACKENDS = ["TRITON_ATTN", "FLASH_ATTN"]

# ---------------------------------------------------------------------------
# Helpers
# ---------------------------------------------------------------------------


def _allocate_kv_caches(
    kv_cache_config: KVCacheConfig,
    attn_groups: list[list],
    device: torch.device,
):
    """Allocate kv_caches exactly as the model runner does at startup."""
    from vllm.v1.worker.utils import allocate_kv_cache

    kernel_block_sizes = [BLOCK_SIZE] * len(kv_cache_config.kv_cache_groups)
    return allocate_kv_cache(
        kv_cache_config, device, KVCacheLayout.LBNHC, kernel_block_sizes
    )


def _single_rank_vllm_config(total_kv_heads: int):
    """A one-rank (TP=1) parallel config, as canonical mappings are derived
    from it."""
    vllm_config = MagicMock()
    parallel_config = vllm_config.parallel_config
    parallel_config.tensor_parallel_size = 1
    parallel_config.decode_context_parallel_size = 1
    parallel_config.prefill_context_parallel_size = 1
    parallel_config.cp_kv_cache_interleave_size = 1
    parallel_config.world_size = 1
    parallel_config.rank = 0
    vllm_config.model_config.get_total_num_kv_heads.return_value = total_kv_heads
    return vllm_config


def _make_worker(
    kv_cache_config: KVCacheConfig,
    replicated_layout: bool = False,
    rank: int = 0,
    canonical_layout: bool = False,
):
    """Create an OffloadingConnectorWorker with mocked dependencies."""
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import (
        OffloadingConnectorWorker,
    )

    spec = MagicMock(spec=OffloadingSpec)
    spec.replicated_layout = replicated_layout
    spec.config = MagicMock()
    spec.config.canonical_layout = canonical_layout
    spec.config.parallel.rank = rank
    spec.get_worker.return_value = MagicMock()

    worker = OffloadingConnectorWorker(
        spec=spec,
        vllm_config=_single_rank_vllm_config(NUM_KV_HEADS),
        kv_cache_config=kv_cache_config,
    )
    worker.worker = MagicMock()

    return worker, spec


def _store_metadata(job_id: int) -> OffloadingConnectorMetadata:
    return OffloadingConnectorMetadata(
        load_jobs={},
        store_jobs={
            job_id: TransferJob(
                req_id="req",
                src_spec=GPULoadStoreSpec([0], group_sizes=(1,), block_indices=(0,)),
                dst_spec=LoadStoreSpec(),
            )
        },
    )


def _load_metadata(job_id: int, sync: bool = False) -> OffloadingConnectorMetadata:
    return OffloadingConnectorMetadata(
        load_jobs={
            job_id: TransferJob(
                req_id="req",
                src_spec=LoadStoreSpec(),
                dst_spec=GPULoadStoreSpec([0], group_sizes=(1,), block_indices=(0,)),
                sync=sync,
            )
        },
        store_jobs={},
    )


def _empty_metadata() -> OffloadingConnectorMetadata:
    return OffloadingConnectorMetadata(load_jobs={}, store_jobs={})


def _offloading_config(rank: int = 0) -> OffloadingConfig:
    return OffloadingConfig(
        groups=(),
        worker_kv_bytes_per_block=0,
        enable_kv_cache_events=False,
        extra_config={},
        engine_id="test-engine",
        model=OffloadingModelConfig(name="test-model", dtype="float16"),
        cache=OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1),
        parallel=OffloadingParallelConfig(
            rank=rank,
            world_size=2,
            tp_size=2,
            pp_size=1,
            pcp_size=1,
            dcp_size=1,
            data_parallel_index=0,
            data_parallel_size=1,
            data_parallel_rank_local=None,
            is_parallelism_agnostic=False,
        ),
    )


class BareExternalOffloadingSpec(OffloadingSpec):
    def get_manager(self) -> OffloadingManager:
        raise NotImplementedError

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        raise NotImplementedError


# ---------------------------------------------------------------------------
# Tests
# ---------------------------------------------------------------------------


def test_prepare_store_kv_non_writer_marks_completed_without_submit():
    worker, _ = _make_worker(
        KVCacheConfig(num_blocks=0, kv_cache_tensors=[], kv_cache_groups=[]),
        replicated_layout=True,
        rank=1,
    )

    worker.prepare_store_kv(_store_metadata(7))
    worker.start_kv_transfers(_empty_metadata())

    assert worker._unsubmitted_store_jobs == []
    assert worker.worker is not None
    worker.worker.submit_store.assert_not_called()
    meta = worker.build_connector_worker_meta()
    assert meta is not None
    assert meta.completed_jobs == {7: 1}


@pytest.mark.parametrize("rank,canonical_layout", [(0, False), (0, True), (1, True)])
def test_prepare_store_kv_writer_submits_store(rank, canonical_layout):
    worker, _ = _make_worker(
        KVCacheConfig(num_blocks=0, kv_cache_tensors=[], kv_cache_groups=[]),
        replicated_layout=True,
        rank=rank,
        canonical_layout=canonical_layout,
    )

    worker.prepare_store_kv(_store_metadata(8))
    assert worker.build_connector_worker_meta() is None
    worker.start_kv_transfers(_empty_metadata())

    assert worker.worker is not None
    worker.worker.submit_store.assert_called_once()


def test_prepare_store_kv_non_replicated_rank_gt_zero_queues_store():
    worker, _ = _make_worker(
        KVCacheConfig(num_blocks=0, kv_cache_tensors=[], kv_cache_groups=[]),
        replicated_layout=False,
        rank=1,
    )

    worker.prepare_store_kv(_store_metadata(9))
    assert worker.build_connector_worker_meta() is None
    assert len(worker._unsubmitted_store_jobs) == 1

    worker.start_kv_transfers(_empty_metadata())

    assert worker.worker is not None
    worker.worker.submit_store.assert_called_once()
    assert worker._unsubmitted_store_jobs == []


def test_handle_preemptions_non_writer_acks_flushed_store():
    worker, _ = _make_worker(
        KVCacheConfig(num_blocks=0, kv_cache_tensors=[], kv_cache_groups=[]),
        replicated_layout=True,
        rank=1,
    )
    metadata = _store_metadata(10)
    metadata.jobs_to_flush = {10}

    worker.handle_preemptions(metadata)

    assert worker.worker is not None
    worker.worker.submit_store.assert_not_called()
    worker.worker.wait.assert_called_once_with({10})
    assert metadata.store_jobs == {}
    meta = worker.build_connector_worker_meta()
    assert meta is not None
    assert meta.completed_jobs == {10: 1}


def test_start_kv_transfers_non_writer_still_submits_load():
    worker, _ = _make_worker(
        KVCacheConfig(num_blocks=0, kv_cache_tensors=[], kv_cache_groups=[]),
        replicated_layout=True,
        rank=1,
    )

    worker.start_kv_transfers(_load_metadata(10))

    assert worker.worker is not None
    worker.worker.submit_load.assert_called_once()
    assert worker.build_connector_worker_meta() is None


@pytest.mark.parametrize("sync", [False, True])
def test_load_completion(sync: bool):
    """Sync loads are submitted expedited and waited on, skip
    finished_recving, and count as loads."""
    worker, _ = _make_worker(
        KVCacheConfig(num_blocks=0, kv_cache_tensors=[], kv_cache_groups=[])
    )

    worker.start_kv_transfers(_load_metadata(11, sync=sync))

    assert worker.worker is not None
    worker.worker.submit_load.assert_called_once()
    expedited = worker.worker.submit_load.call_args.kwargs.get("expedited", False)
    assert expedited == sync
    if sync:
        worker.worker.wait.assert_called_once_with({11})
    else:
        worker.worker.wait.assert_not_called()

    worker.worker.get_finished.return_value = [
        TransferResult(job_id=11, success=True, transfer_size=64, transfer_time=0.5)
    ]
    assert worker.get_finished(set()) == (set(), set() if sync else {"req"})
    meta = worker.build_connector_worker_meta()
    assert meta is not None
    assert meta.completed_jobs == {11: 1}
    assert meta.transfer_stats.load.bytes == 64
    assert meta.transfer_stats.store.is_empty()


def test_offloading_connector_worker_accepts_plugin_spec_default_layout():
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import (
        OffloadingConnectorWorker,
    )

    spec = BareExternalOffloadingSpec(_offloading_config(rank=1))

    OffloadingConnectorWorker(
        spec=spec,
        vllm_config=_single_rank_vllm_config(NUM_KV_HEADS),
        kv_cache_config=KVCacheConfig(
            num_blocks=0, kv_cache_tensors=[], kv_cache_groups=[]
        ),
    )

    assert spec.replicated_layout is False


@pytest.mark.parametrize("backend", ATTN_BACKENDS)
def test_register_kv_caches(backend):
    """Test register_kv_caches with multiple groups covering all layer types.

    Creates one FullAttention group, one MLA group, one Mamba group, and
    one Mamba-padded group. Each group has GROUP_SIZE layers.

    KVCacheTensors mirror the real allocation in kv_cache_utils.py: each group is one
    run of the shared allocation starting at offset 0, so layer i of every group
    aliases the same bytes.

    Uses the real GPUModelRunner.initialize_kv_cache_tensors to produce
    the raw per-layer kv_caches registered by the connector.

    Verifies that the canonicalized CanonicalKVCaches has the correct
    block tensors, tensor_idx references, and page sizes across all groups.
    """
    from vllm.v1.attention.backend import AttentionBackend
    from vllm.v1.attention.backends.mla.indexer import (
        DeepseekV32IndexerBackend,
    )
    from vllm.v1.worker.utils import AttentionGroup

    MLA_HEAD_SIZE = NUM_KV_HEADS * HEAD_SIZE * 2

    # padded mamba (missing HEAD_SIZE)
    CONV_STATE_SHAPE = (BLOCK_SIZE * NUM_KV_HEADS, HEAD_SIZE)
    UNALIGNED_SSM_STATE_SHAPE = (BLOCK_SIZE * NUM_KV_HEADS - 1, HEAD_SIZE)

    PAGE_SIZE_BYTES = 2 * BLOCK_SIZE * NUM_KV_HEADS * HEAD_SIZE * get_dtype_size(DTYPE)
    unaligned_mamba_page_size = PAGE_SIZE_BYTES - HEAD_SIZE * get_dtype_size(DTYPE)

    # unpadded mamba (fills page exactly)
    ALIGNED_SSM_STATE_SHAPE = (BLOCK_SIZE * NUM_KV_HEADS, HEAD_SIZE)

    backend_cls = AttentionBackendEnum[backend].get_class()
    indexer_backend_cls = cast(type[AttentionBackend], DeepseekV32IndexerBackend)

    attn_spec = FullAttentionSpec(
        block_size=BLOCK_SIZE,
        num_kv_heads=NUM_KV_HEADS,
        head_size=HEAD_SIZE,
        dtype=DTYPE,
    )
    mla_spec = MLAAttentionSpec(
        block_size=BLOCK_SIZE,
        num_kv_heads=1,
        head_size=MLA_HEAD_SIZE,
        dtype=DTYPE,
    )
    unaligned_mamba_spec = MambaSpec(
        block_size=BLOCK_SIZE,
        shapes=(CONV_STATE_SHAPE, UNALIGNED_SSM_STATE_SHAPE),
        dtypes=(DTYPE, DTYPE),
        page_size_padded=PAGE_SIZE_BYTES,
    )
    aligned_mamba_spec = MambaSpec(
        block_size=BLOCK_SIZE,
        shapes=(CONV_STATE_SHAPE, ALIGNED_SSM_STATE_SHAPE),
        dtypes=(DTYPE, DTYPE),
        page_size_padded=PAGE_SIZE_BYTES,
    )

    assert attn_spec.page_size_bytes == PAGE_SIZE_BYTES
    assert mla_spec.page_size_bytes == PAGE_SIZE_BYTES
    assert unaligned_mamba_spec.page_size_bytes == PAGE_SIZE_BYTES
    assert aligned_mamba_spec.page_size_bytes == PAGE_SIZE_BYTES

    GROUP_SIZE = 3

    # -- Build per-group layer info ----------------------------------------
    layer_idx = 0

    attn_layer_names = []
    for _ in range(GROUP_SIZE):
        attn_layer_names.append(f"model.layers.{layer_idx}.self_attn")
        layer_idx += 1

    mla_layer_names = []
    for _ in range(GROUP_SIZE):
        mla_layer_names.append(f"model.layers.{layer_idx}.self_attn")
        layer_idx += 1

    unaligned_mamba_layer_names = []
    for _ in range(GROUP_SIZE):
        unaligned_mamba_layer_names.append(f"model.layers.{layer_idx}.mamba_unpadded")
        layer_idx += 1

    aligned_mamba_layer_names = []
    for _ in range(GROUP_SIZE - 1):
        aligned_mamba_layer_names.append(f"model.layers.{layer_idx}.mamba_padded")
        layer_idx += 1

    layer_groups = [
        attn_layer_names,
        mla_layer_names,
        unaligned_mamba_layer_names,
        aligned_mamba_layer_names,
    ]

    kv_cache_tensors: list[KVCacheTensor] = [
        KVCacheTensor(
            size=PAGE_SIZE_BYTES * NUM_BLOCKS * GROUP_SIZE,
            layers=group_layer_names,
            layer_stride=PAGE_SIZE_BYTES * NUM_BLOCKS,
            block_stride=PAGE_SIZE_BYTES,
        )
        for group_layer_names in layer_groups
    ]

    kv_cache_groups = [
        KVCacheGroupSpec(layer_names=attn_layer_names, kv_cache_spec=attn_spec),
        KVCacheGroupSpec(layer_names=mla_layer_names, kv_cache_spec=mla_spec),
        KVCacheGroupSpec(
            layer_names=unaligned_mamba_layer_names, kv_cache_spec=unaligned_mamba_spec
        ),
        KVCacheGroupSpec(
            layer_names=aligned_mamba_layer_names, kv_cache_spec=aligned_mamba_spec
        ),
    ]

    attn_groups = [
        [
            AttentionGroup(
                backend=backend_cls,
                layer_names=attn_layer_names,
                kv_cache_spec=attn_spec,
                kv_cache_group_id=0,
            ),
            AttentionGroup(
                backend=indexer_backend_cls,
                layer_names=mla_layer_names,
                kv_cache_spec=mla_spec,
                kv_cache_group_id=1,
            ),
            AttentionGroup(
                backend=indexer_backend_cls,  # unused for mamba
                layer_names=unaligned_mamba_layer_names,
                kv_cache_spec=unaligned_mamba_spec,
                kv_cache_group_id=2,
            ),
            AttentionGroup(
                backend=indexer_backend_cls,  # unused for mamba
                layer_names=aligned_mamba_layer_names,
                kv_cache_spec=aligned_mamba_spec,
                kv_cache_group_id=3,
            ),
        ]
    ]

    kv_cache_config = KVCacheConfig(
        num_blocks=NUM_BLOCKS,
        kv_cache_tensors=kv_cache_tensors,
        kv_cache_groups=kv_cache_groups,
    )

    kv_caches = _allocate_kv_caches(
        kv_cache_config,
        attn_groups,
        device=torch.device(f"{DEVICE_TYPE}:0"),
    )

    worker, spec = _make_worker(kv_cache_config)
    worker.register_kv_caches(kv_caches)

    canonical = spec.get_worker.call_args[0][0]
    assert isinstance(canonical, CanonicalKVCaches)

    # -- Expected block tensors ----------------------------------------------
    # All tensors have the same padded page size (PAGE_SIZE_BYTES).
    # Tensor 0: shared by attn[0], mla[0], mamba_unaligned[0], mamba_aligned[0]
    # Tensor 1: shared by attn[1], mla[1], mamba_unaligned[1], mamba_aligned[1]
    # Tensor 2: shared by attn[2], mla[2], mamba_unaligned[2]
    #           (mamba_aligned has only GROUP_SIZE-1 = 2 layers)
    expected_tensors = [
        (NUM_BLOCKS, PAGE_SIZE_BYTES),
        (NUM_BLOCKS, PAGE_SIZE_BYTES),
        (NUM_BLOCKS, PAGE_SIZE_BYTES),
    ]

    # -- Expected group data refs (order matches kv_cache_groups) -------------
    ref = CanonicalKVCacheRef
    expected_group_refs = [
        # attn group: layers attn[0..2] → tensors 0,1,2 with full page size
        [
            ref(tensor_idx=0, page_size_bytes=PAGE_SIZE_BYTES),
            ref(tensor_idx=1, page_size_bytes=PAGE_SIZE_BYTES),
            ref(tensor_idx=2, page_size_bytes=PAGE_SIZE_BYTES),
        ],
        # mla group: layers mla[0..2] → tensors 0,1,2 with full page size
        [
            ref(tensor_idx=0, page_size_bytes=PAGE_SIZE_BYTES),
            ref(tensor_idx=1, page_size_bytes=PAGE_SIZE_BYTES),
            ref(tensor_idx=2, page_size_bytes=PAGE_SIZE_BYTES),
        ],
        # unaligned mamba group: layers [0..2] → tensors 0,1,2 with unaligned page
        [
            ref(tensor_idx=0, page_size_bytes=unaligned_mamba_page_size),
            ref(tensor_idx=1, page_size_bytes=unaligned_mamba_page_size),
            ref(tensor_idx=2, page_size_bytes=unaligned_mamba_page_size),
        ],
        # aligned mamba group: layers [0..1] → tensors 0,1 with full page size
        [
            ref(tensor_idx=0, page_size_bytes=PAGE_SIZE_BYTES),
            ref(tensor_idx=1, page_size_bytes=PAGE_SIZE_BYTES),
        ],
    ]

    # Verify block tensors
    assert len(canonical.tensors) == len(expected_tensors)
    for block_tensor, (exp_num_blocks, exp_page_size) in zip(
        canonical.tensors, expected_tensors
    ):
        tensor = block_tensor.tensor
        assert tensor.dtype == torch.int8
        assert tensor.shape == (exp_num_blocks, exp_page_size)
        assert block_tensor.page_size_bytes == exp_page_size

    # Verify group data refs
    assert len(canonical.group_data_refs) == len(expected_group_refs)
    for actual_refs, exp_refs in zip(canonical.group_data_refs, expected_group_refs):
        assert len(actual_refs) == len(exp_refs)
        for actual, expected in zip(actual_refs, exp_refs):
            assert actual.tensor_idx == expected.tensor_idx
            assert actual.page_size_bytes == expected.page_size_bytes
            # Every layer gets a canonical mapping, certified or opaque
            assert actual.mapping is not None


def test_register_packed_kv_caches_skips_scratch_group():
    attn_spec = FullAttentionSpec(
        block_size=BLOCK_SIZE,
        num_kv_heads=NUM_KV_HEADS,
        head_size=HEAD_SIZE,
        dtype=DTYPE,
    )
    page = attn_spec.page_size_bytes
    layers = ["layer0", "layer1"]
    kv_cache_config = KVCacheConfig(
        num_blocks=NUM_BLOCKS,
        kv_cache_tensors=[
            KVCacheTensor(
                size=2 * page * NUM_BLOCKS,
                layers=layers,
                layer_stride=page,
                block_stride=2 * page,
            )
        ],
        kv_cache_groups=[
            KVCacheGroupSpec(layers, attn_spec),
            KVCacheGroupSpec(
                ["scratch"],
                CircularBufferSpec(
                    block_size=4, num_kv_heads=1, head_size=1, dtype=DTYPE
                ),
            ),
        ],
    )
    kv_caches = _allocate_kv_caches(
        kv_cache_config, [], device=torch.device(f"{DEVICE_TYPE}:0")
    )
    worker, spec = _make_worker(kv_cache_config)
    worker.register_kv_caches(kv_caches)

    canonical = spec.get_worker.call_args[0][0]
    assert len(canonical.tensors) == 1
    assert canonical.tensors[0].tensor.shape == (NUM_BLOCKS, 2 * page)
    assert canonical.group_data_refs == [[CanonicalKVCacheRef(0, 2 * page)]]


@pytest.mark.parametrize("backend", ATTN_BACKENDS)
def test_register_kv_caches_uniform_type(backend):
    """Test register_kv_caches with UniformTypeKVCacheSpecs.

    Two attention layers use the same backend but different num_kv_heads,
    giving them different per-layer page sizes. Each has its own
    KVCacheTensor and are wrapped in a UniformTypeKVCacheSpecs group.
    Verifies that each layer gets the correct tensor_idx and
    page_size_bytes in its block data ref.
    """
    from vllm.v1.worker.utils import AttentionGroup

    backend_cls = AttentionBackendEnum[backend].get_class()

    layer_a = "model.layers.0.self_attn"
    layer_b = "model.layers.1.self_attn"
    spec_a = FullAttentionSpec(
        block_size=BLOCK_SIZE,
        num_kv_heads=NUM_KV_HEADS,
        head_size=HEAD_SIZE,
        dtype=DTYPE,
    )
    spec_b = FullAttentionSpec(
        block_size=BLOCK_SIZE,
        num_kv_heads=NUM_KV_HEADS * 2,
        head_size=HEAD_SIZE,
        dtype=DTYPE,
    )
    assert spec_a.page_size_bytes != spec_b.page_size_bytes

    uniform_spec = UniformTypeKVCacheSpecs(
        block_size=BLOCK_SIZE,
        kv_cache_specs={layer_a: spec_a, layer_b: spec_b},
    )

    # The group packs its two layers densely, one run each as their pages differ:
    # layer_a occupies the first page of every block, layer_b the rest.
    window = spec_a.page_size_bytes + spec_b.page_size_bytes
    kv_cache_config = KVCacheConfig(
        num_blocks=NUM_BLOCKS,
        kv_cache_tensors=[
            KVCacheTensor(
                size=window * NUM_BLOCKS,
                layers=[layer_a],
                layer_stride=spec_a.page_size_bytes * NUM_BLOCKS,
                block_stride=spec_a.page_size_bytes,
            ),
            KVCacheTensor(
                size=window * NUM_BLOCKS,
                layers=[layer_b],
                layer_stride=spec_b.page_size_bytes * NUM_BLOCKS,
                block_stride=spec_b.page_size_bytes,
                offset=spec_a.page_size_bytes * NUM_BLOCKS,
            ),
        ],
        kv_cache_groups=[
            KVCacheGroupSpec(
                layer_names=[layer_a, layer_b],
                kv_cache_spec=uniform_spec,
            )
        ],
    )

    attn_groups = [
        [
            AttentionGroup(
                backend=backend_cls,
                layer_names=[layer_a],
                kv_cache_spec=spec_a,
                kv_cache_group_id=0,
            ),
            AttentionGroup(
                backend=backend_cls,
                layer_names=[layer_b],
                kv_cache_spec=spec_b,
                kv_cache_group_id=0,
            ),
        ]
    ]

    kv_caches = _allocate_kv_caches(
        kv_cache_config,
        attn_groups,
        device=torch.device(f"{DEVICE_TYPE}:0"),
    )

    worker, spec = _make_worker(kv_cache_config)
    worker.register_kv_caches(kv_caches)

    canonical = spec.get_worker.call_args[0][0]
    assert isinstance(canonical, CanonicalKVCaches)

    for block_tensor in canonical.tensors:
        assert block_tensor.tensor.dtype == torch.int8

    # Single group with refs from both layers
    assert len(canonical.group_data_refs) == 1
    group_refs = canonical.group_data_refs[0]
    assert len(group_refs) == 2

    assert len(canonical.tensors) == 2
    assert canonical.tensors[0].page_size_bytes == spec_a.page_size_bytes
    assert canonical.tensors[1].page_size_bytes == spec_b.page_size_bytes
    assert canonical.tensors[0].tensor.shape == (NUM_BLOCKS, spec_a.page_size_bytes)
    assert canonical.tensors[1].tensor.shape == (NUM_BLOCKS, spec_b.page_size_bytes)

    for ref, expected_tensor_idx, expected_spec in (
        (group_refs[0], 0, spec_a),
        (group_refs[1], 1, spec_b),
    ):
        assert ref.tensor_idx == expected_tensor_idx
        assert ref.page_size_bytes == expected_spec.page_size_bytes
        assert ref.mapping is not None

    # Only layer_a matches the model's total KV head count, so layer_b gets an
    # opaque mapping rather than a certified, parallelism-agnostic one
    layer_a_mapping = group_refs[0].mapping
    layer_b_mapping = group_refs[1].mapping
    assert layer_a_mapping is not None
    assert layer_b_mapping is not None
    assert layer_a_mapping.parallelism_agnostic
    assert not layer_b_mapping.parallelism_agnostic
