# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from tests.v1.kv_connector.unit.utils import create_vllm_config
from vllm.config import KVEventsConfig, KVTransferConfig
from vllm.distributed.kv_events import (
    MEDIUM_CPU,
    BlockRemoved,
    BlockStored,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import (
    build_offloading_config,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.events import (
    OffloadingEventGroupSpec,
    OffloadingEventsTracker,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    GroupOffloadConfig,
    OffloadingConnectorScheduler,
)
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpecKind,
)
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingKVEventsConfig,
    OffloadKey,
    ReqContext,
    make_offload_key,
)
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

_CPU_MEDIUM = Medium.CPU
_FULL_ATTENTION_EVENT_SPEC = OffloadingEventGroupSpec(
    kv_cache_spec_kind=KVCacheSpecKind.FULL_ATTENTION.value,
    kv_cache_spec_sliding_window=None,
)


def _tracker(
    *,
    enable_kv_cache_events: bool = True,
    self_describing_kv_events: bool = True,
) -> OffloadingEventsTracker:
    return OffloadingEventsTracker(
        OffloadingKVEventsConfig(
            enable_kv_cache_events=enable_kv_cache_events,
            self_describing_kv_events=self_describing_kv_events,
        )
    )


def _hash(i: int) -> BlockHash:
    return BlockHash(str(i).encode())


def _wire_hash(block_hash: BlockHash):
    return maybe_convert_block_hash(block_hash)


def _request(*, block_hashes: list[BlockHash], token_count: int, req_id: str = "req"):
    req = MagicMock()
    req.request_id = req_id
    req.block_hashes = block_hashes
    req.all_token_ids = list(range(1, token_count + 1))
    req.lora_request = None
    return req


def _group_config(
    *,
    group_idx: int = 0,
    block_size: int = 4,
    blocks_per_chunk: int = 1,
    tokens_per_hash: int | None = None,
    sliding_window_size_in_chunks: int | None = None,
) -> GroupOffloadConfig:
    if tokens_per_hash is None:
        tokens_per_hash = block_size
    tokens_per_chunk = block_size * blocks_per_chunk
    assert tokens_per_chunk % tokens_per_hash == 0
    kv_spec = FullAttentionSpec(
        block_size=block_size,
        num_kv_heads=1,
        head_size=1,
        dtype=torch.float32,
    )
    manager_cls = KVCacheSpecRegistry.get_manager_class(kv_spec)
    assert manager_cls is not None
    return GroupOffloadConfig(
        group_idx=group_idx,
        tokens_per_block=block_size,
        tokens_per_chunk=tokens_per_chunk,
        hashes_per_chunk=tokens_per_chunk // tokens_per_hash,
        sliding_window_size_in_chunks=sliding_window_size_in_chunks,
        kv_cache_spec=kv_spec,
        manager_cls=manager_cls,
        kv_event_group_spec=_FULL_ATTENTION_EVENT_SPEC,
    )


def _record_chunks(
    tracker: OffloadingEventsTracker,
    req,
    group_config: GroupOffloadConfig,
    num_chunks: int,
) -> list[OffloadKey]:
    keys: list[OffloadKey] = []
    hbf = group_config.hashes_per_chunk
    for chunk_idx in range(num_chunks):
        tail_hash = req.block_hashes[(chunk_idx + 1) * hbf - 1]
        assert tail_hash is not None
        key = make_offload_key(tail_hash, group_config.group_idx)
        tracker.record_store(req, group_config, chunk_idx, key)
        keys.append(key)
    return keys


def _record_lookup_chunks(
    tracker: OffloadingEventsTracker,
    req,
    group_config: GroupOffloadConfig,
    num_chunks: int,
) -> list[OffloadKey]:
    keys: list[OffloadKey] = []
    hbf = group_config.hashes_per_chunk
    for chunk_idx in range(num_chunks):
        tail_hash = req.block_hashes[(chunk_idx + 1) * hbf - 1]
        assert tail_hash is not None
        key = make_offload_key(tail_hash, group_config.group_idx)
        tracker.record_lookup(
            req,
            group_config,
            chunk_idx,
            key,
        )
        keys.append(key)
    return keys


def _stored_event(
    keys: list[OffloadKey],
    medium: Medium = _CPU_MEDIUM,
    locality: Locality | None = None,
    ownership: str | None = None,
    removal_expected: bool = False,
) -> OffloadingEvent:
    return OffloadingEvent(
        keys=keys,
        medium=medium,
        removed=False,
        locality=locality,
        ownership=ownership,
        removal_expected=removal_expected,
    )


def _removed_event(
    keys: list[OffloadKey],
    medium: Medium = _CPU_MEDIUM,
    locality: Locality | None = None,
    ownership: str | None = None,
) -> OffloadingEvent:
    return OffloadingEvent(
        keys=keys,
        medium=medium,
        removed=True,
        locality=locality,
        ownership=ownership,
    )


def _lookup_chunk() -> tuple[
    OffloadingEventsTracker, MagicMock, GroupOffloadConfig, OffloadKey
]:
    tracker = _tracker()
    req = _request(block_hashes=[_hash(0)], token_count=4)
    group_config = _group_config()
    key = _record_lookup_chunks(
        tracker,
        req,
        group_config,
        num_chunks=1,
    )[0]
    return tracker, req, group_config, key


def test_take_events_forwards_locality_to_rich_store():
    tracker = _tracker()
    req = _request(block_hashes=[_hash(0)], token_count=4)
    key = _record_chunks(tracker, req, _group_config(), num_chunks=1)[0]

    events = list(
        tracker.take_events(
            [_stored_event([key], locality=Locality.LOCAL, medium=Medium.STORAGE)]
        )
    )

    assert len(events) == 1
    assert isinstance(events[0], BlockStored)
    assert events[0].token_ids == [1, 2, 3, 4]
    assert events[0].block_size == 4
    assert events[0].locality == "LOCAL"


def test_take_events_forwards_locality_to_placeholder_store():
    tracker = _tracker(self_describing_kv_events=False)
    req = _request(block_hashes=[_hash(0)], token_count=4)
    key = _record_chunks(tracker, req, _group_config(), num_chunks=1)[0]

    events = list(
        tracker.take_events(
            [_stored_event([key], locality=Locality.REMOTE, medium=Medium.STORAGE)]
        )
    )

    assert len(events) == 1
    assert isinstance(events[0], BlockStored)
    assert events[0].block_size == 0
    assert events[0].locality == "REMOTE"


@pytest.mark.parametrize(
    "kind,window", [("mamba", None), ("sliding_window", 16), (None, None)]
)
@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("self_describing", [False, True])
def test_placeholder_group_classification_survives_reset(
    kind, window, reset, self_describing
):
    tracker = OffloadingEventsTracker(
        OffloadingKVEventsConfig(True, self_describing),
        {0: OffloadingEventGroupSpec(kind, window)},
    )
    if reset:
        tracker.reset()
    key = make_offload_key(_hash(0), 0)
    # A removal can arrive before any store metadata is available.
    removed, stored = tracker.take_events(
        [_removed_event([key], ownership="kvcr"), _stored_event([key])]
    )
    assert (stored.block_size, stored.token_ids) == (0, [])
    assert (stored.kv_cache_spec_kind, stored.kv_cache_spec_sliding_window) == (
        (kind, window) if self_describing else (None, None)
    )
    # Removals stay group_idx + hash only; consumers classify from the store.
    assert removed.ownership == "kvcr"
    assert not hasattr(removed, "kv_cache_spec_kind")


def test_partial_tail_event_describes_hash_aligned_physical_block_prefix():
    tracker = _tracker()
    group_config = _group_config(block_size=16, blocks_per_chunk=1)._replace(
        hashes_per_chunk=4
    )
    req = _request(block_hashes=[_hash(i) for i in range(8)], token_count=32)
    key = make_offload_key(req.block_hashes[6], group_config.group_idx)

    tracker.record_partial_store(req, group_config, 28, key)
    [event] = tracker.take_events([_stored_event([key])])

    assert isinstance(event, BlockStored)
    assert event.block_hashes == [_wire_hash(_hash(i)) for i in range(4, 7)]
    assert event.parent_block_hash == _wire_hash(_hash(3))
    assert event.token_ids == list(range(17, 29))
    assert event.block_size == 4


def test_partial_tail_lookup_does_not_overwrite_store_metadata():
    tracker = _tracker()
    group_config = _group_config()
    stored_req = _request(block_hashes=[_hash(0)], token_count=4)
    lookup_req = _request(block_hashes=[_hash(0)], token_count=4)
    lookup_req.all_token_ids = [9, 9, 9, 9]
    key = make_offload_key(stored_req.block_hashes[0], group_config.group_idx)

    tracker.record_partial_store(stored_req, group_config, 4, key)
    tracker.record_partial_lookup(lookup_req, group_config, 4, key)
    [event] = tracker.take_events([_stored_event([key])])

    assert isinstance(event, BlockStored)
    assert event.token_ids == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "record_method", ["record_partial_store", "record_partial_lookup"]
)
def test_partial_tail_sliding_window_event_uses_placeholder(record_method):
    tracker = _tracker()
    group_config = _group_config(sliding_window_size_in_chunks=1)
    req = _request(block_hashes=[_hash(0)], token_count=4)
    key = make_offload_key(req.block_hashes[0], group_config.group_idx)

    getattr(tracker, record_method)(req, group_config, 4, key)
    [event] = tracker.take_events([_stored_event([key])])

    assert isinstance(event, BlockStored)
    assert event.block_hashes == [_wire_hash(_hash(0))]
    assert event.token_ids == []
    assert event.block_size == 0


def test_take_events_forwards_locality_to_remove():
    tracker = _tracker()
    req = _request(block_hashes=[_hash(0)], token_count=4)
    key = _record_chunks(tracker, req, _group_config(), num_chunks=1)[0]

    events = list(
        tracker.take_events(
            [_removed_event([key], locality=Locality.LOCAL, medium=Medium.STORAGE)]
        )
    )

    assert len(events) == 1
    assert isinstance(events[0], BlockRemoved)
    assert events[0].locality == "LOCAL"


def test_take_events_publishes_routable_block_stored():
    block_size = 4
    tracker = _tracker()
    group_config = _group_config(block_size=block_size)
    req = _request(
        block_hashes=[_hash(i) for i in range(6)],
        token_count=block_size * 6,
    )
    keys = _record_chunks(tracker, req, group_config, num_chunks=6)

    batch1 = list(tracker.take_events([_stored_event(keys[:3])]))
    assert len(batch1) == 3

    for i, event in enumerate(batch1):
        assert isinstance(event, BlockStored)
        assert event.medium == _CPU_MEDIUM.value
        assert event.block_hashes == [_wire_hash(_hash(i))]
        assert event.block_size == block_size
        assert event.token_ids == list(
            range(i * block_size + 1, (i + 1) * block_size + 1)
        )
        if i == 0:
            assert event.parent_block_hash is None
        else:
            assert event.parent_block_hash == _wire_hash(_hash(i - 1))
        assert event.lora_id is None
        assert event.lora_name is None
        assert event.extra_keys is None
        assert event.group_idx == 0
        assert event.kv_cache_spec_kind == KVCacheSpecKind.FULL_ATTENTION.value
        assert event.kv_cache_spec_sliding_window is None

    batch2 = list(tracker.take_events([_stored_event(keys[3:])]))
    assert len(batch2) == 3
    assert batch2[0].parent_block_hash == batch1[-1].block_hashes[-1]

    assert len(tracker._pending_event_metadata) == 6


def test_promotion_emits_full_cpu_stored_event():
    tracker, _, _, key = _lookup_chunk()

    [event] = tracker.take_events([_stored_event([key])])

    assert isinstance(event, BlockStored)
    assert event.medium == MEDIUM_CPU
    assert event.block_hashes == [_wire_hash(_hash(0))]
    assert event.parent_block_hash is None
    assert event.token_ids == [1, 2, 3, 4]
    assert event.block_size == 4
    assert event.lora_id is None
    assert event.lora_name is None
    assert event.extra_keys is None
    assert event.group_idx == 0
    assert event.kv_cache_spec_kind == KVCacheSpecKind.FULL_ATTENTION.value
    assert event.kv_cache_spec_sliding_window is None


@pytest.mark.parametrize(
    ("blocks_per_chunk", "expected_hash_indices"),
    [(1, [63]), (2, [63, 127])],
)
def test_event_hashes_use_group_block_size(
    blocks_per_chunk: int, expected_hash_indices: list[int]
):
    tokens_per_hash = 4
    block_size = 256
    hashes_per_block = block_size // tokens_per_hash
    tracker = _tracker()
    group_config = _group_config(
        block_size=block_size,
        blocks_per_chunk=blocks_per_chunk,
        tokens_per_hash=tokens_per_hash,
    )
    req = _request(
        block_hashes=[_hash(i) for i in range(hashes_per_block * blocks_per_chunk)],
        token_count=block_size * blocks_per_chunk,
    )
    [key] = _record_chunks(tracker, req, group_config, num_chunks=1)

    [event] = tracker.take_events([_stored_event([key])])

    assert isinstance(event, BlockStored)
    assert event.block_hashes == [_wire_hash(_hash(i)) for i in expected_hash_indices]
    assert event.block_size == block_size
    assert len(event.token_ids) == block_size * blocks_per_chunk


def test_lookup_promotion_factor_gt_1_store_and_remove():
    block_size = 4
    blocks_per_chunk = 2
    tracker = _tracker()
    group_config = _group_config(
        block_size=block_size, blocks_per_chunk=blocks_per_chunk
    )
    req = _request(
        block_hashes=[_hash(i) for i in range(4)],
        token_count=block_size * blocks_per_chunk * 2,
    )
    keys = _record_lookup_chunks(tracker, req, group_config, num_chunks=2)

    stored = list(tracker.take_events([_stored_event(keys)]))
    assert len(stored) == 2

    expected_hashes = []
    for chunk_idx, event in enumerate(stored):
        assert isinstance(event, BlockStored)
        expected_chunk_hashes = [
            _wire_hash(_hash(i))
            for i in range(
                chunk_idx * blocks_per_chunk,
                (chunk_idx + 1) * blocks_per_chunk,
            )
        ]
        assert event.block_hashes == expected_chunk_hashes
        assert event.block_size == block_size
        assert len(event.token_ids) == block_size * blocks_per_chunk
        if chunk_idx == 0:
            assert event.parent_block_hash is None
        else:
            assert event.parent_block_hash == _wire_hash(_hash(blocks_per_chunk - 1))
        expected_hashes.extend(expected_chunk_hashes)

    assert len(tracker._pending_event_metadata) == 2

    removed = list(tracker.take_events([_removed_event(keys)]))
    assert len(removed) == 1
    assert isinstance(removed[0], BlockRemoved)
    assert removed[0].block_hashes == expected_hashes
    assert removed[0].medium == _CPU_MEDIUM.value
    assert removed[0].group_idx == 0
    assert not tracker._pending_event_metadata


def test_take_events_factor_gt_1_store_is_order_independent():
    blocks_per_chunk = 3
    tracker = _tracker()
    group_config = _group_config(blocks_per_chunk=blocks_per_chunk)
    req = _request(
        block_hashes=[_hash(i) for i in range(6)],
        token_count=4 * blocks_per_chunk * 2,
    )
    keys = _record_chunks(tracker, req, group_config, num_chunks=2)
    unknown_key = make_offload_key(_hash(12345), 0)

    events = list(tracker.take_events([_stored_event([keys[1], unknown_key, keys[0]])]))

    assert len(events) == 3
    chunk1, placeholder, chunk0 = events
    assert [len(event.block_hashes) for event in events] == [3, 1, 3]
    assert placeholder.block_size == 0
    assert placeholder.token_ids == []
    assert chunk0.parent_block_hash is None
    assert chunk1.parent_block_hash == chunk0.block_hashes[-1]


def test_take_events_opt_out_keeps_placeholders():
    tracker = _tracker(self_describing_kv_events=False)
    group_config = _group_config()
    req = _request(block_hashes=[_hash(i) for i in range(3)], token_count=12)
    keys = _record_chunks(tracker, req, group_config, num_chunks=3)
    _record_lookup_chunks(tracker, req, group_config, num_chunks=3)

    assert not tracker.self_describing_enabled
    assert not tracker._pending_event_metadata

    events = list(
        tracker.take_events(
            [
                _stored_event(keys),
                _removed_event(keys),
            ]
        )
    )
    assert len(events) == 4
    for event in events[:3]:
        assert isinstance(event, BlockStored)
        assert event.block_size == 0
        assert event.token_ids == []
        assert event.parent_block_hash is None
    assert isinstance(events[3], BlockRemoved)
    assert len(events[3].block_hashes) == 3


@pytest.mark.parametrize(
    "sliding_window_size_in_chunks",
    [1, 2],
    ids=["ssm", "sliding-window"],
)
def test_event_metadata_skips_non_full_attention_group(
    sliding_window_size_in_chunks: int,
):
    tracker = _tracker()
    group_config = _group_config(
        sliding_window_size_in_chunks=sliding_window_size_in_chunks
    )
    req = _request(block_hashes=[_hash(i) for i in range(3)], token_count=12)
    keys = _record_chunks(tracker, req, group_config, num_chunks=3)
    _record_lookup_chunks(tracker, req, group_config, num_chunks=3)

    assert not tracker._pending_event_metadata

    events = list(tracker.take_events([_stored_event(keys[:1])]))
    assert len(events) == 1
    assert isinstance(events[0], BlockStored)
    assert events[0].block_size == 0


@pytest.mark.parametrize("secondary_removal_in_same_batch", [False, True])
def test_primary_removal_preserves_metadata_for_same_batch_kvcr_store(
    secondary_removal_in_same_batch,
):
    """A removal must not drop the payload a later store in the same batch
    still needs, and must still drop it once no residency is left."""
    tracker = _tracker()
    group_config = _group_config(block_size=64, blocks_per_chunk=2)
    req = _request(block_hashes=[_hash(i) for i in range(4)], token_count=256)
    key = _record_chunks(tracker, req, group_config, num_chunks=2)[1]
    secondary_removal = _removed_event([key], ownership="kvcr")

    batch = [
        _removed_event([key]),
        _stored_event([key], ownership="kvcr", removal_expected=True),
    ]
    if secondary_removal_in_same_batch:
        batch.append(secondary_removal)
    events = list(tracker.take_events(batch))
    if not secondary_removal_in_same_batch:
        events += tracker.take_events([secondary_removal])
    removed, stored, final_removal = events

    hashes = [_wire_hash(_hash(2)), _wire_hash(_hash(3))]
    assert isinstance(removed, BlockRemoved)
    assert removed.block_hashes == hashes
    assert stored.block_size == 64
    assert stored.token_ids == list(range(129, 257))
    assert stored.parent_block_hash == _wire_hash(_hash(1))
    assert stored.block_hashes == hashes
    assert stored.ownership == "kvcr"
    assert final_removal.block_hashes == hashes

    # Nothing holds a residency now, so the payload is gone.
    [after_eviction] = tracker.take_events([_stored_event([key], ownership="kvcr")])
    assert after_eviction.block_size == 0


@pytest.mark.parametrize(
    "history", ["never_seen", "evicted", "retained", "secondary_only"]
)
@pytest.mark.parametrize("success", [False, True])
def test_pending_promotion_captures_payload_before_inventory(history, success):
    tracker = _tracker()
    req = _request(block_hashes=[_hash(0)], token_count=1600)
    group = _group_config(block_size=1600)
    key = make_offload_key(_hash(0), 0)
    if history != "never_seen":
        tracker.record_store(req, group, 0, key)
        if history == "evicted":
            list(tracker.take_events([_removed_event([key])]))
        elif history == "secondary_only":
            list(
                tracker.take_events(
                    [
                        _stored_event([key], ownership="kvcr", removal_expected=True),
                        _removed_event([key]),
                    ]
                )
            )

    primary = CPUOffloadingManager(num_chunks=1, enable_events=True)
    ctx = ReqContext(req_id="promotion")
    primary.prepare_store([key], ctx)
    scheduler = SimpleNamespace(manager=primary, _events_tracker=tracker)
    assert (
        OffloadingConnectorScheduler._maximal_prefix_lookup(
            scheduler, [key], ctx, req, group, 0
        )
        is None
    )
    assert primary.lookup(key, ctx) is LookupResult.HIT_PENDING
    assert list(tracker.take_events(primary.take_events())) == []

    if history == "secondary_only":
        list(tracker.take_events([_removed_event([key], ownership="kvcr")]))

    if success:
        [event] = tracker.take_events(
            [_stored_event([key], ownership="kvcr", removal_expected=True)]
        )
        assert event.ownership == "kvcr"
        assert event.block_size == 1600
        assert event.token_ids == req.all_token_ids
        assert event.block_hashes == [_wire_hash(_hash(0))]

    primary.complete_store([key], ctx, success=success)
    events = list(tracker.take_events(primary.take_events()))
    if success:
        assert primary.lookup(key, ctx) is LookupResult.HIT
        assert len(events) == 1 and isinstance(events[0], BlockStored)
        assert events[0].block_size == 1600
        list(
            tracker.take_events(
                [_removed_event([key]), _removed_event([key], ownership="kvcr")]
            )
        )
    else:
        assert primary.lookup(key, ctx) is LookupResult.MISS
        assert events == []
    assert key not in tracker._pending_event_metadata


def test_failed_pending_chunk_does_not_remove_shared_ready_prefix():
    tracker = _tracker()
    group = _group_config(block_size=1600, blocks_per_chunk=2)
    ready_req = _request(block_hashes=[_hash(0), _hash(1)], token_count=3200)
    failed_req = _request(block_hashes=[_hash(0), _hash(2)], token_count=3200)
    ready_key, failed_key = [make_offload_key(_hash(i), 0) for i in (1, 2)]
    primary = CPUOffloadingManager(num_chunks=2, enable_events=True)
    ctx = ReqContext(req_id="shared-prefix")
    primary.prepare_store([ready_key], ctx)
    tracker.record_store(ready_req, group, 0, ready_key)
    primary.complete_store([ready_key], ctx)
    [stored] = tracker.take_events(primary.take_events())
    assert stored.block_hashes == [_wire_hash(_hash(0)), _wire_hash(_hash(1))]

    primary.prepare_store([failed_key], ctx)
    scheduler = SimpleNamespace(manager=primary, _events_tracker=tracker)
    assert (
        OffloadingConnectorScheduler._maximal_prefix_lookup(
            scheduler, [failed_key], ctx, failed_req, group, 0
        )
        is None
    )
    primary.complete_store([failed_key], ctx, success=False)
    assert list(tracker.take_events(primary.take_events())) == []
    assert primary.lookup(ready_key, ctx) is LookupResult.HIT
    assert ready_key in tracker._pending_event_metadata
    assert failed_key not in tracker._pending_event_metadata


@pytest.mark.parametrize("success", [False, True])
def test_failed_pending_retry_preserves_replacement_metadata(success):
    tracker = _tracker()
    req = _request(block_hashes=[_hash(0)], token_count=1600)
    group = _group_config(block_size=1600)
    key = make_offload_key(_hash(0), 0)
    primary = CPUOffloadingManager(num_chunks=1, enable_events=True)
    ctx = ReqContext(req_id="retry")
    scheduler = SimpleNamespace(manager=primary, _events_tracker=tracker)
    for attempt in range(2):
        primary.prepare_store([key], ctx)
        assert (
            OffloadingConnectorScheduler._maximal_prefix_lookup(
                scheduler, [key], ctx, req, group, 0
            )
            is None
        )
        if attempt == 0:
            primary.complete_store([key], ctx, success=False)
    # Drain the old failure only after the retry captured its metadata.
    old_cleanup = list(tracker.take_events(primary.take_events()))
    [inventory] = tracker.take_events(
        [_stored_event([key], ownership="kvcr", removal_expected=True)]
    )
    assert inventory.block_size == 1600
    assert inventory.token_ids == req.all_token_ids
    assert old_cleanup == []
    assert primary.lookup(key, ctx) is LookupResult.HIT_PENDING
    primary.complete_store([key], ctx, success=success)
    events = list(tracker.take_events(primary.take_events()))
    assert len(events) == int(success)
    assert key in tracker._pending_event_metadata
    removals = [_removed_event([key], ownership="kvcr")]
    if success:
        removals.append(_removed_event([key]))
    list(tracker.take_events(removals))
    assert key not in tracker._pending_event_metadata


def test_pending_cpu_removal_consumes_hit_backfill_until_next_hit():
    tracker = _tracker()
    block_hashes = [_hash(0), _hash(1)]
    req = _request(block_hashes=block_hashes, token_count=8)
    group_config = _group_config(blocks_per_chunk=2)
    key = _record_chunks(tracker, req, group_config, num_chunks=1)[0]
    confirmed_meta = tracker._pending_event_metadata[key]
    lookup_req = _request(
        block_hashes=block_hashes,
        token_count=8,
        req_id="new-request",
    )

    tracker.record_lookup(
        lookup_req,
        group_config,
        0,
        key,
    )
    assert tracker._pending_event_metadata[key] is confirmed_meta

    list(
        tracker.take_events([_stored_event([key], Medium.STORAGE, ownership="custom")])
    )
    removed = list(tracker.take_events([_removed_event([key])]))
    assert len(removed) == 1
    assert removed[0].block_hashes == [
        _wire_hash(_hash(0)),
        _wire_hash(_hash(1)),
    ]

    stored = list(tracker.take_events([_stored_event([key])]))
    assert len(stored) == 1
    assert stored[0].block_size == 0
    assert stored[0].token_ids == []

    tracker.record_lookup(lookup_req, group_config, 0, key)
    removed = list(tracker.take_events([_removed_event([key])]))
    assert removed[0].block_hashes == [
        _wire_hash(_hash(0)),
        _wire_hash(_hash(1)),
    ]


@pytest.mark.parametrize(
    ("record_method", "position"),
    [("record_store", 0), ("record_partial_store", 4)],
)
def test_reoffload_preserves_secondary_residency(record_method, position):
    tracker, req, group_config, key = _lookup_chunk()
    [stored] = tracker.take_events(
        [
            _stored_event(
                [key],
                Medium.STORAGE,
                ownership="custom",
                removal_expected=True,
            )
        ]
    )

    getattr(tracker, record_method)(req, group_config, position, key)

    assert tracker._pending_event_metadata[key].active_residencies == {
        (Medium.CPU, None),
        (Medium.STORAGE, "custom"),
    }
    [removed] = tracker.take_events(
        [_removed_event([key], Medium.STORAGE, ownership="custom")]
    )

    assert stored.token_ids == [1, 2, 3, 4]
    assert stored.ownership == removed.ownership == "custom"
    assert key in tracker._pending_event_metadata


def test_take_events_groups_removed_hashes_by_kv_group():
    tracker = _tracker()
    group0_config = _group_config(group_idx=0, blocks_per_chunk=2)
    group1_config = _group_config(group_idx=1, blocks_per_chunk=2)
    req0 = _request(block_hashes=[_hash(0), _hash(1)], token_count=8)
    req1 = _request(block_hashes=[_hash(10), _hash(11)], token_count=8)
    key0 = _record_chunks(tracker, req0, group0_config, num_chunks=1)[0]
    key1 = _record_chunks(tracker, req1, group1_config, num_chunks=1)[0]

    removed = list(tracker.take_events([_removed_event([key0, key1])]))

    assert len(removed) == 2
    by_group = {event.group_idx: event.block_hashes for event in removed}
    assert by_group == {
        0: [_wire_hash(_hash(0)), _wire_hash(_hash(1))],
        1: [_wire_hash(_hash(10)), _wire_hash(_hash(11))],
    }


def test_take_events_supports_restore_after_eviction():
    block_size = 4
    tracker = _tracker()
    group_config = _group_config(block_size=block_size)
    req = _request(block_hashes=[_hash(0)], token_count=block_size)
    key = _record_chunks(tracker, req, group_config, num_chunks=1)[0]

    first_store = list(tracker.take_events([_stored_event([key])]))
    assert len(first_store) == 1
    assert isinstance(first_store[0], BlockStored)
    assert first_store[0].token_ids == [1, 2, 3, 4]

    removed = list(tracker.take_events([_removed_event([key])]))
    assert len(removed) == 1
    assert isinstance(removed[0], BlockRemoved)
    assert not tracker._pending_event_metadata

    req.all_token_ids = [5, 6, 7, 8]
    tracker.record_store(req, group_config, chunk_idx=0, offload_key=key)

    second_store = list(tracker.take_events([_stored_event([key])]))
    assert len(second_store) == 1
    assert isinstance(second_store[0], BlockStored)
    assert second_store[0].token_ids == [5, 6, 7, 8]


def test_reset_cache_clears_side_table():
    tracker = _tracker()
    group_config = _group_config()
    req = _request(block_hashes=[_hash(i) for i in range(3)], token_count=12)
    _record_lookup_chunks(tracker, req, group_config, num_chunks=3)

    assert tracker._pending_event_metadata

    tracker.reset()

    assert not tracker._pending_event_metadata


def test_tiering_accepts_self_describing_kv_events():
    vllm_config = create_vllm_config(
        block_size=4,
        max_num_batched_tokens=16,
        disable_hybrid_kv_cache_manager=False,
    )
    vllm_config.kv_transfer_config = KVTransferConfig(
        kv_connector="OffloadingConnector",
        kv_role="kv_both",
        kv_connector_extra_config={
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": 1 << 20,
            "self_describing_kv_events": True,
            "secondary_tiers": [{"type": "example"}],
        },
    )
    vllm_config.kv_events_config = KVEventsConfig(
        enable_kv_cache_events=True,
        publisher="null",
    )
    kv_cache_config = KVCacheConfig(
        num_blocks=0,
        kv_cache_tensors=[],
        kv_cache_groups=[
            KVCacheGroupSpec(
                ["layer"],
                FullAttentionSpec(
                    block_size=4,
                    num_kv_heads=1,
                    head_size=1,
                    dtype=torch.float32,
                ),
            )
        ],
    )

    spec = TieringOffloadingSpec(build_offloading_config(vllm_config, kv_cache_config))
    tracker = OffloadingEventsTracker(spec.kv_events_config)

    assert spec.kv_events_config.enable_kv_cache_events
    assert spec.kv_events_config.self_describing_kv_events
    assert tracker.self_describing_enabled


def _build_tiering_spec(secondary_tiers, *, top_level_backpressure=None):
    vllm_config = create_vllm_config(
        block_size=4,
        max_num_batched_tokens=16,
        disable_hybrid_kv_cache_manager=False,
    )
    extra_config = {
        "spec_name": "TieringOffloadingSpec",
        "cpu_bytes_to_use": 1 << 20,
        "secondary_tiers": secondary_tiers,
    }
    if top_level_backpressure is not None:
        extra_config["backpressure"] = top_level_backpressure
    vllm_config.kv_transfer_config = KVTransferConfig(
        kv_connector="OffloadingConnector",
        kv_role="kv_both",
        kv_connector_extra_config=extra_config,
    )
    kv_cache_config = KVCacheConfig(
        num_blocks=0,
        kv_cache_tensors=[],
        kv_cache_groups=[
            KVCacheGroupSpec(
                ["layer"],
                FullAttentionSpec(
                    block_size=4,
                    num_kv_heads=1,
                    head_size=1,
                    dtype=torch.float32,
                ),
            )
        ],
    )
    return TieringOffloadingSpec(build_offloading_config(vllm_config, kv_cache_config))


def test_partial_tier_backpressure_inherits_top_level_defaults():
    """A partial tier override still inherits missing fields.

    Field-by-field merge means an override that sets only ``high_water_s``
    keeps ``backpressure_cls`` (and any other field) from the top-level
    default, so the resolved dict reaching the factory is complete.
    """
    spec = _build_tiering_spec(
        [{"type": "example", "backpressure": {"high_water_s": 0.1}}],
        top_level_backpressure={
            "backpressure_cls": "EMABackpressureDetector",
            "high_water_s": 0.5,
            "low_water_s": 0.05,
        },
    )

    resolved = spec.secondary_tier_configs[0]["backpressure"]
    # Tier override wins for the field it sets.
    assert resolved["high_water_s"] == 0.1
    # Missing fields fall back to the top-level default.
    assert resolved["backpressure_cls"] == "EMABackpressureDetector"
    assert resolved["low_water_s"] == 0.05


def test_tier_override_wins_over_top_level():
    """Precedence is tier override > top-level default, field-by-field."""
    spec = _build_tiering_spec(
        [
            {
                "type": "example",
                "backpressure": {"high_water_s": 0.1, "low_water_s": 0.02},
            }
        ],
        top_level_backpressure={
            "backpressure_cls": "EMABackpressureDetector",
            "high_water_s": 0.5,
            "low_water_s": 0.05,
        },
    )

    resolved = spec.secondary_tier_configs[0]["backpressure"]
    # Tier override wins for the fields it sets.
    assert resolved["high_water_s"] == 0.1
    assert resolved["low_water_s"] == 0.02
    # Fields only in top-level still fill in.
    assert resolved["backpressure_cls"] == "EMABackpressureDetector"


def test_tier_without_backpressure_stays_unconfigured():
    spec = _build_tiering_spec([{"type": "example"}])
    assert "backpressure" not in spec.secondary_tier_configs[0]
