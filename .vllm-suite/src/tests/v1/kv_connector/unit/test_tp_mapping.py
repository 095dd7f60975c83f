# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Tests for TP mapping and transfer plan utilities.

These tests verify that TP mapping produces correct outputs
(source ranks, split handles, desc IDs).
No GPU or NIXL required.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from vllm.distributed.kv_transfer.kv_connector.utils import TransferTopology
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.tp_mapping import (
    TPMapping,
    compute_tp_mapping,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.worker import (
    NixlConnectorWorker,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

# ======================================================================
# Test fixtures / helpers
# ======================================================================


def _compute_mapping(
    tp_rank: int = 0,
    tp_size: int = 1,
    remote_tp_size: int = 1,
    is_mla: bool = False,
    num_kv_heads: int = 8,
    group_spec_types: tuple[type, ...] = (FullAttentionSpec,),
    dcp_size: int = 1,
    remote_dcp_size: int = 1,
    head_sharded_kv_heads: int | None = None,
) -> TPMapping:
    transfer_topology = object.__new__(TransferTopology)
    transfer_topology.tp_rank = tp_rank
    transfer_topology.tp_size = tp_size
    transfer_topology.is_mla = is_mla
    transfer_topology.total_num_kv_heads = num_kv_heads
    transfer_topology.dcp_size = dcp_size
    return compute_tp_mapping(
        transfer_topology=transfer_topology,
        remote_tp_size=remote_tp_size,
        group_spec_types=group_spec_types,
        remote_dcp_size=remote_dcp_size,
        head_sharded_kv_heads=head_sharded_kv_heads,
    )


# ======================================================================
# TP mapping structure tests
# ======================================================================


class TestTPMappingStructure:
    def test_source_ranks_homogeneous(self):
        m = _compute_mapping(tp_size=2, tp_rank=1, remote_tp_size=2)
        assert m.all_source_ranks == (1,)

    def test_source_ranks_d_gt_p(self):
        m = _compute_mapping(tp_size=4, tp_rank=2, remote_tp_size=2)
        assert m.all_source_ranks == (1,)

    def test_source_ranks_p_gt_d(self):
        m = _compute_mapping(tp_size=1, tp_rank=0, remote_tp_size=2)
        assert m.all_source_ranks == (0, 1)


@pytest.mark.parametrize(
    "tp_rank,tp_size,remote_tp_size,draft_kv_heads,expected_offset",
    [
        (3, 8, 1, 8, 3),  # one draft head per decode rank
        (5, 8, 2, 8, 1),  # rank 5 reads P rank 1, second head slot
        (5, 16, 1, 8, 2),  # D_TP > heads: two ranks share each head
    ],
)
def test_head_sharded_draft_under_mla_target_gets_gqa_offset(
    tp_rank, tp_size, remote_tp_size, draft_kv_heads, expected_offset
):
    """An MLA target's mapping reads every head at offset 0, which is wrong
    for a GQA draft's head-sharded KV. Mapping the draft as GQA with its own
    head count recovers each rank's slice from the same source rank."""
    mla = _compute_mapping(
        tp_rank=tp_rank,
        tp_size=tp_size,
        remote_tp_size=remote_tp_size,
        is_mla=True,
        num_kv_heads=1,
    )
    draft = _compute_mapping(
        tp_rank=tp_rank,
        tp_size=tp_size,
        remote_tp_size=remote_tp_size,
        is_mla=True,
        num_kv_heads=1,
        head_sharded_kv_heads=draft_kv_heads,
    )
    assert mla.rank_offset_factor == 0
    assert draft.rank_offset_factor == expected_offset
    assert draft.all_source_ranks == mla.all_source_ranks


@pytest.mark.parametrize(
    "tp_rank,tp_size,remote_tp_size,dcp_size,remote_dcp_size,expected_ranks",
    [
        (0, 1, 8, 1, 8, tuple(range(8))),
        (0, 4, 4, 1, 4, (0, 1, 2, 3)),
        (2, 4, 4, 4, 4, (2,)),
        (0, 2, 4, 2, 4, (0, 2)),
        (3, 4, 2, 4, 2, (1,)),
    ],
)
def test_mla_dcp_source_ranks(
    tp_rank,
    tp_size,
    remote_tp_size,
    dcp_size,
    remote_dcp_size,
    expected_ranks,
):
    mapping = _compute_mapping(
        tp_rank=tp_rank,
        tp_size=tp_size,
        remote_tp_size=remote_tp_size,
        is_mla=True,
        num_kv_heads=1,
        dcp_size=dcp_size,
        remote_dcp_size=remote_dcp_size,
    )

    assert mapping.all_source_ranks == expected_ranks


@pytest.mark.parametrize(
    "tp_size,remote_tp_size,dcp_size,remote_dcp_size",
    [
        (4, 2, 4, 2),
        (4, 4, 4, 4),
        (4, 1, 4, 1),
        (4, 4, 1, 4),
        (2, 4, 2, 4),
    ],
)
def test_dcp_consumer_count_matches_readers(
    tp_size, remote_tp_size, dcp_size, remote_dcp_size
):
    """Each producer waits for exactly the local ranks that read from it."""
    mappings = [
        _compute_mapping(
            tp_rank=tp_rank,
            tp_size=tp_size,
            remote_tp_size=remote_tp_size,
            is_mla=True,
            num_kv_heads=1,
            dcp_size=dcp_size,
            remote_dcp_size=remote_dcp_size,
        )
        for tp_rank in range(tp_size)
    ]

    for remote_rank in range(remote_tp_size):
        readers = [m for m in mappings if remote_rank in m.all_source_ranks]
        for mapping in readers:
            assert mapping.local_consumers == len(readers)


# ======================================================================
# Split handle tests
# ======================================================================


def _make_mock_worker_for_splits(group_spec_types):
    """Build a mock NixlConnectorWorker with _group_spec_types for split tests.

    No per-region replicate flags are configured (``block_len_per_layer`` empty
    and ``num_regions == 0``), so ``_build_local_splits_from_plan`` treats every
    FA descriptor as SPLIT, matching the legacy behavior these tests assert.
    """
    worker = object.__new__(NixlConnectorWorker)
    worker._group_spec_types = group_spec_types
    worker.transfer_topo = SimpleNamespace(virtually_split_kv_in_blocks=False)
    worker.block_len_per_layer = []
    worker.num_regions = 0
    worker._region_is_mla = []
    worker._conv_decomp = SimpleNamespace(local_conv_offsets=())
    worker._ssm_region_indices = [0] if MambaSpec in group_spec_types else []
    worker._ple_region_index = None
    return worker


class TestBuildSrcSplitHandles:
    @pytest.mark.parametrize("remote_tp_size", [2, 4])
    def test_build_src_split_handles(self, remote_tp_size):
        tp_rank = 0
        tp_size = 1

        plan = _compute_mapping(
            tp_rank=tp_rank,
            tp_size=tp_size,
            remote_tp_size=remote_tp_size,
        )

        worker = _make_mock_worker_for_splits((FullAttentionSpec,))
        # One region of 8 dense 1024-byte blocks as a single strided run.
        src_blocks_data = np.array([(0x2000, 1024, 0, 1024, 8)], dtype=np.uint64)
        num_descs = 8
        splits = list(
            worker._build_local_splits_from_plan(
                plan,
                src_blocks_data,
                num_descs,
            )
        )

        assert len(splits) == remote_tp_size
        for handle in splits:
            assert handle.shape == src_blocks_data.shape
            # The head slice shrinks the length; block stride and count are kept.
            assert handle[:, 1].tolist() == [1024 // remote_tp_size]
            assert handle[:, 3:].tolist() == [[1024, 8]]


class TestMambaPlanSplitHandles:
    """Verify split handles for Mamba with FA/SSM distinction."""

    def test_fa_and_ssm_different_split_factors(self):
        """Section 0 split by num_attn_reads, section 1 by abs_tp."""
        fa_readers = (0,)
        ssm_readers = (0, 1)
        plan = TPMapping(
            source_ranks_per_group=(fa_readers, ssm_readers),
            all_source_ranks=(0, 1),
            rank_to_attention_slot={0: 0, 1: 0},
            rank_offset_factor=0,
        )

        worker = _make_mock_worker_for_splits((FullAttentionSpec, MambaSpec))
        # 2 FA runs + 1 SSM run of one block each: (addr, len, dev, stride, count)
        src_blocks_data = np.array(
            [
                (1000, 200, 0, 200, 1),  # FA desc 0
                (2000, 200, 0, 200, 1),  # FA desc 1
                (3000, 400, 0, 400, 1),  # SSM desc 0
            ],
            dtype=np.uint64,
        )

        splits = list(worker._build_local_splits_from_plan(plan, src_blocks_data, 2))

        assert len(splits) == 2  # 2 source ranks

        # Rank 0 (FA source, p_idx=0):
        # FA: chunk=200//1=200, slot=0 → (1000, 200), (2000, 200)
        # SSM: chunk=400//2=200, idx=0 → (3000, 200); block stride stays 400
        assert splits[0].tolist() == [
            [1000, 200, 0, 200, 1],
            [2000, 200, 0, 200, 1],
            [3000, 200, 0, 400, 1],
        ]

        # Rank 1 (not FA source, p_idx=1):
        # FA: chunk=200//1=200, slot=0 (skip_fa) → (1000, 200), (2000, 200)
        # SSM: chunk=400//2=200, idx=1 → (3200, 200); block stride stays 400
        assert splits[1].tolist() == [
            [1000, 200, 0, 200, 1],
            [2000, 200, 0, 200, 1],
            [3200, 200, 0, 400, 1],
        ]

    def test_hetero_block_size_splits(self):
        """With a block-size ratio, single-source FA sub-block descs pass
        through whole; SSM descs are unexpanded and split per source."""
        plan = TPMapping(
            source_ranks_per_group=((0,), (0, 1)),
            all_source_ranks=(0, 1),
            rank_to_attention_slot={0: 0, 1: 0},
            rank_offset_factor=0,
        )

        worker = _make_mock_worker_for_splits((FullAttentionSpec, MambaSpec))
        # 2 FA blocks x ratio 2 sub-blocks (one run of 2 per block) + 1 SSM desc
        # (never expanded).
        src_blocks_data = np.array(
            [
                (1000, 100, 0, 100, 2),
                (2000, 100, 0, 100, 2),
                (3000, 400, 0, 400, 1),
            ],
            dtype=np.uint64,
        )

        splits = list(worker._build_local_splits_from_plan(plan, src_blocks_data, 4, 2))

        assert len(splits) == 2
        fa_passthrough = [[1000, 100, 0, 100, 2], [2000, 100, 0, 100, 2]]
        assert splits[0].tolist() == fa_passthrough + [[3000, 200, 0, 400, 1]]
        assert splits[1].tolist() == fa_passthrough + [[3200, 200, 0, 400, 1]]

    def test_hetero_block_size_head_sharded_asserts(self):
        """Head-sharded FA reads (multiple FA sources) are incompatible with
        a block-size mismatch and must fail loudly."""
        plan = TPMapping(
            source_ranks_per_group=((0, 1), (0, 1)),
            all_source_ranks=(0, 1),
            rank_to_attention_slot={0: 0, 1: 1},
            rank_offset_factor=0,
        )

        worker = _make_mock_worker_for_splits((FullAttentionSpec, MambaSpec))
        src_blocks_data = np.array(
            [(1000, 100, 0, 100, 2), (3000, 400, 0, 400, 1)],
            dtype=np.uint64,
        )

        with pytest.raises(AssertionError, match="Head-sharded"):
            list(worker._build_local_splits_from_plan(plan, src_blocks_data, 2, 2))


@pytest.mark.parametrize(
    ("total_kv_heads", "local_tp", "remote_tp", "compatible"),
    [
        # 2 heads: TP1 packs both heads into a page, TP >= 2 packs one.
        (2, 1, 2, False),
        (2, 2, 1, False),
        (2, 1, 1, True),
        (2, 2, 4, True),
        (2, 4, 2, True),
        # 4 heads: the boundary moves with the head count.
        (4, 2, 4, False),
        (4, 2, 2, True),
        (4, 4, 8, True),
    ],
)
def test_csa_linear_tp_layout_boundary(total_kv_heads, local_tp, remote_tp, compatible):
    worker = object.__new__(NixlConnectorWorker)
    worker.world_size = local_tp
    worker._is_csa_linear = True
    worker.transfer_topo = SimpleNamespace(total_num_kv_heads=total_kv_heads)

    if compatible:
        worker._validate_csa_linear_tp_layout(remote_tp)
    else:
        with pytest.raises(ValueError, match="KV-head sharding boundary"):
            worker._validate_csa_linear_tp_layout(remote_tp)
