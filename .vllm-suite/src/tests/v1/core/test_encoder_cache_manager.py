# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
import pytest
import torch

from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core.encoder_cache_manager import (
    EncoderCacheManager,
    EncoderDecoderCacheManager,
)

pytestmark = pytest.mark.cpu_test


# ------------------ Mock Classes ------------------ #
class MockRequest:
    def __init__(self, request_id, mm_hashes, token_counts):
        self.request_id = request_id
        self._token_counts = token_counts
        self.mm_features = []
        for i, mm_hash in enumerate(mm_hashes):
            feature = MultiModalFeatureSpec(
                data=None,
                modality="image",
                identifier=mm_hash,
                mm_position=PlaceholderRange(offset=0, length=self._token_counts[i]),
            )
            self.mm_features.append(feature)

    def get_num_encoder_embeds(self, input_id: int) -> int:
        return self._token_counts[input_id]


# ------------------ Unit Tests ------------------ #
def test_basic_allocate_and_reuse():
    cache = EncoderCacheManager(cache_size=10)
    req = MockRequest("r1", ["imgA"], [4])

    assert not cache.check_and_update_cache(req, 0)
    assert cache.can_allocate(req, 0, int(1e9), 0)

    cache.allocate(req, 0)

    assert cache.check_and_update_cache(req, 0)
    assert "r1" in cache.cached["imgA"]
    assert cache.request_cached_ids["r1"] == {0}
    assert cache.num_free_slots == 6

    # Free twice to bring refcount to 0.
    cache.free_encoder_input(req, 0)
    cache.free_encoder_input(req, 0)

    assert not cache.cached["imgA"]
    assert "r1" not in cache.request_cached_ids
    assert "imgA" in cache.freeable
    assert cache.num_freeable_slots == 10
    assert cache.num_free_slots == 6


def test_freeing_decreases_refcount_and_moves_to_freeable():
    manager = EncoderCacheManager(cache_size=10)
    req = MockRequest("req2", ["img3"], [5])

    assert manager.can_allocate(req, 0, int(1e9), 0)
    manager.allocate(req, 0)

    assert len(manager.cached["img3"]) == 1
    assert manager.request_cached_ids["req2"] == {0}

    manager.free_encoder_input(req, 0)

    assert not manager.cached["img3"]
    assert "req2" not in manager.request_cached_ids
    assert "img3" in manager.freeable
    assert manager.num_freeable_slots == 10


def test_free_request_frees_all_inputs():
    manager = EncoderCacheManager(cache_size=10)
    req = MockRequest("req3", ["a", "b"], [2, 3])

    assert manager.can_allocate(req, 0, int(1e9), 0)
    manager.allocate(req, 0)

    assert manager.can_allocate(req, 1, int(1e9), 0)
    manager.allocate(req, 1)

    assert len(manager.cached["a"]) == 1
    assert len(manager.cached["b"]) == 1
    assert manager.request_cached_ids["req3"] == {0, 1}

    manager.free(req)

    assert not manager.cached["a"]
    assert not manager.cached["b"]
    assert "req3" not in manager.request_cached_ids
    assert "a" in manager.freeable
    assert "b" in manager.freeable
    assert manager.num_freeable_slots == 10


def test_eviction_when_cache_is_full():
    manager = EncoderCacheManager(cache_size=10)

    req1 = MockRequest("req1", ["x"], [6])
    req2 = MockRequest("req2", ["y"], [5])

    assert manager.can_allocate(req1, 0, int(1e9), 0)
    manager.allocate(req1, 0)
    manager.free_encoder_input(req1, 0)

    assert manager.can_allocate(req2, 0, int(1e9), 0)
    manager.allocate(req2, 0)

    # 'x' should have been evicted.
    assert "x" not in manager.cached
    assert "x" not in manager.num_embeds_by_hash
    assert "req1" not in manager.request_cached_ids
    assert "x" in manager.get_freed_mm_hashes()


def test_get_cached_input_ids():
    manager = EncoderCacheManager(cache_size=10)
    req = MockRequest("reqX", ["m", "n", "o"], [2, 4, 3])

    assert manager.can_allocate(req, 0, int(1e9), 0)
    manager.allocate(req, 0)

    assert manager.can_allocate(req, 2, int(1e9), 0)
    manager.allocate(req, 2)

    cached_ids = manager.get_cached_input_ids(req)
    assert cached_ids == {0, 2}


def test_has_cache_restores_from_freeable():
    manager = EncoderCacheManager(cache_size=10)
    req = MockRequest("reqY", ["imgZ"], [4])

    assert manager.can_allocate(req, 0, int(1e9), 0)
    manager.allocate(req, 0)

    manager.free_encoder_input(req, 0)

    # Should restore from freeable.
    assert manager.check_and_update_cache(req, 0)
    assert len(manager.cached["imgZ"]) == 1
    assert manager.request_cached_ids["reqY"] == {0}
    assert "imgZ" not in manager.freeable
    assert manager.num_freeable_slots == 6


def test_get_freed_mm_hashes_clears_freed_list():
    manager = EncoderCacheManager(cache_size=10)
    req1 = MockRequest("reqA", ["a"], [5])
    req2 = MockRequest("reqB", ["b"], [6])

    assert manager.can_allocate(req1, 0, int(1e9), 0)
    manager.allocate(req1, 0)
    manager.free_encoder_input(req1, 0)

    # Should trigger eviction of 'a'.
    assert manager.can_allocate(req2, 0, int(1e9), 0)
    manager.allocate(req2, 0)

    freed = manager.get_freed_mm_hashes()
    assert "a" in freed
    assert manager.get_freed_mm_hashes() == []


def test_referencing_a_freeable_entry_protects_it_from_eviction():
    """A waiting request can hold an entry it is not scheduled for yet.

    Entries with no referent are evictable. A request that is deferred (e.g.
    by an EC connector waiting on another item) still needs the items it
    already has, and a connector that hands out one transfer per request
    cannot always produce the same item a second time.
    """
    manager = EncoderCacheManager(cache_size=10)
    owner = MockRequest("owner", ["a"], [5])
    waiter = MockRequest("waiter", ["a"], [5])
    newcomer = MockRequest("newcomer", ["b"], [6])

    manager.allocate(owner, 0)
    manager.free_encoder_input(owner, 0)
    assert "a" in manager.freeable

    # The waiting request references it; it is no longer reclaimable.
    assert manager.check_and_update_cache(waiter, 0)
    assert "a" not in manager.freeable

    # 'b' no longer fits, and 'a' must not be taken away to make room.
    assert not manager.can_allocate(newcomer, 0, int(1e9), 0)
    assert "a" in manager.cached
    assert manager.get_freed_mm_hashes() == []

    # Once the waiter is done with it, the entry is reclaimable again.
    manager.free_encoder_input(waiter, 0)
    assert manager.can_allocate(newcomer, 0, int(1e9), 0)
    assert manager.get_freed_mm_hashes() == ["a"]


def test_reallocated_hash_is_not_reported_as_freed():
    manager = EncoderCacheManager(cache_size=8)
    req_a = MockRequest("reqA", ["a"], [4])
    req_b = MockRequest("reqB", ["b"], [4])
    req_c = MockRequest("reqC", ["c"], [4])

    manager.allocate(req_a, 0)
    manager.allocate(req_b, 0)
    manager.free(req_a)
    manager.free(req_b)

    assert manager.can_allocate(req_c, 0, int(1e9), 0)
    manager.allocate(req_c, 0)
    assert manager.can_allocate(req_a, 0, int(1e9), 0)
    manager.allocate(req_a, 0)

    assert manager.get_freed_mm_hashes() == ["b"]


def test_schedule_request_multi_images_respect_space_limit():
    manager = EncoderCacheManager(cache_size=10)
    req = MockRequest("reqA", ["a", "b"], [5, 6])
    compute_budget = 100

    num_tokens_to_schedule = 0
    assert manager.can_allocate(req, 0, compute_budget, num_tokens_to_schedule)
    num_tokens_to_schedule += req.get_num_encoder_embeds(0)
    compute_budget -= req.get_num_encoder_embeds(0)

    assert not manager.can_allocate(req, 1, compute_budget, num_tokens_to_schedule)


def test_schedule_request_multi_images_respect_compute_limit():
    manager = EncoderCacheManager(cache_size=100)
    req = MockRequest("reqA", ["a", "b"], [5, 6])
    compute_budget = 10
    num_tokens_to_schedule = 0
    assert manager.can_allocate(req, 0, compute_budget, num_tokens_to_schedule)
    num_tokens_to_schedule += req.get_num_encoder_embeds(0)
    compute_budget -= req.get_num_encoder_embeds(0)

    assert not manager.can_allocate(req, 1, compute_budget, num_tokens_to_schedule)


def test_encoder_cache_with_is_embed_mask():
    class MockRequestWithMask(MockRequest):
        def get_num_encoder_embeds(self, input_id: int) -> int:
            return self.mm_features[input_id].mm_position.get_num_embeds()

    is_embed = torch.zeros(100, dtype=torch.bool)
    is_embed[torch.tensor([5, 15, 25, 35, 45, 55, 65, 75])] = True

    request = MockRequestWithMask("r1", ["img1"], [100])
    request.mm_features[0] = MultiModalFeatureSpec(
        data=None,
        modality="image",
        identifier="img1",
        mm_position=PlaceholderRange(offset=0, length=100, is_embed=is_embed),
    )

    manager = EncoderCacheManager(cache_size=100)
    manager.allocate(request, 0)

    assert manager.num_free_slots == 92
    assert "img1" in manager.cached
    assert manager.request_cached_ids["r1"] == {0}

    old_size = 100
    new_size = request.mm_features[0].mm_position.get_num_embeds()
    assert new_size == 8
    savings_ratio = old_size / new_size
    assert savings_ratio == 12.5


def test_encoder_cache_tracks_embedding_count_by_identifier():
    class MockRequestWithMask(MockRequest):
        def get_num_encoder_embeds(self, input_id: int) -> int:
            return self.mm_features[input_id].mm_position.get_num_embeds()

    is_embed = torch.tensor([False, True, True, False, True, False])
    request = MockRequestWithMask("owner", ["img1"], [len(is_embed)])
    request.mm_features[0] = MultiModalFeatureSpec(
        data=None,
        modality="image",
        identifier="img1",
        mm_position=PlaceholderRange(offset=0, length=6, is_embed=is_embed),
    )

    manager = EncoderCacheManager(cache_size=10)
    manager.allocate(request, 0)
    assert manager.get_cached_num_encoder_embeds(request, 0) == 3

    manager.free(request)
    assert manager.get_cached_num_encoder_embeds(request, 0) == 3

    manager.reset()
    assert manager.get_cached_num_encoder_embeds(request, 0) is None


def test_encoder_cache_mask_based_retrieval():
    class MockRequestWithMask(MockRequest):
        def get_num_encoder_embeds(self, input_id: int) -> int:
            return self.mm_features[input_id].mm_position.get_num_embeds()

    is_embed = torch.tensor(
        [False, False, True, True, False, True, True, True, False, False]
    )

    request = MockRequestWithMask("r1", ["img1"], [10])
    request.mm_features[0] = MultiModalFeatureSpec(
        data=None,
        modality="image",
        identifier="img1",
        mm_position=PlaceholderRange(offset=0, length=10, is_embed=is_embed),
    )

    manager = EncoderCacheManager(cache_size=50)
    manager.allocate(request, 0)

    assert request.mm_features[0].mm_position.get_num_embeds() == 5

    start_idx = 2
    end_idx = 8
    num_embeds_before = is_embed[:start_idx].sum().item()
    num_embeds_in_range = is_embed[start_idx:end_idx].sum().item()

    assert num_embeds_before == 0
    assert num_embeds_in_range == 5

    start_idx = 0
    end_idx = 5
    num_embeds_before = is_embed[:start_idx].sum().item() if start_idx > 0 else 0
    num_embeds_in_range = is_embed[start_idx:end_idx].sum().item()

    assert num_embeds_before == 0
    assert num_embeds_in_range == 2


def test_reset_clears_all_state():
    """Test that reset() clears all cached entries and restores capacity."""
    manager = EncoderCacheManager(cache_size=20)

    req1 = MockRequest("req1", ["img1", "img2"], [5, 3])
    req2 = MockRequest("req2", ["img3"], [4])

    manager.allocate(req1, 0)
    manager.allocate(req1, 1)
    manager.allocate(req2, 0)
    manager.free_encoder_input(req1, 0)

    req3 = MockRequest("req3", ["img4"], [10])
    manager.free_encoder_input(req1, 1)
    manager.free_encoder_input(req2, 0)
    manager.can_allocate(req3, 0, int(1e9), 0)
    manager.allocate(req3, 0)

    assert len(manager.cached) > 0
    assert manager.num_free_slots < 20

    manager.reset()

    assert len(manager.cached) == 0
    assert len(manager.num_embeds_by_hash) == 0
    assert len(manager.request_cached_ids) == 0
    assert len(manager.freeable) == 0
    assert len(manager.freed) == 0
    assert manager.num_free_slots == 20
    assert manager.num_freeable_slots == 20


def test_reset_allows_fresh_allocations():
    manager = EncoderCacheManager(cache_size=10)

    req1 = MockRequest("req1", ["img1"], [10])
    manager.allocate(req1, 0)
    assert manager.num_free_slots == 0

    manager.reset()

    req2 = MockRequest("req2", ["img2"], [8])
    assert manager.can_allocate(req2, 0, int(1e9), 0)
    manager.allocate(req2, 0)

    assert manager.num_free_slots == 2
    assert "img2" in manager.cached
    assert "img1" not in manager.cached
    assert manager.request_cached_ids["req2"] == {0}
    assert "req1" not in manager.request_cached_ids


def test_free_request_with_duplicate_mm_hashes():
    """Freeing a request whose two inputs share the same mm_hash must fully
    clean up request_cached_ids. After the first free_encoder_input call,
    cached[mm_hash] becomes empty; the second call must still remove the
    remaining input_id from request_cached_ids."""
    manager = EncoderCacheManager(cache_size=20)

    req = MockRequest("r1", ["imgA", "imgA"], [4, 4])

    manager.allocate(req, 0)
    # input 1 has the same hash, so it's already cached.
    assert manager.check_and_update_cache(req, 1)
    assert manager.request_cached_ids["r1"] == {0, 1}

    manager.free(req)
    assert "r1" not in manager.request_cached_ids


def test_duplicate_mm_hash_stays_referenced_until_last_free():
    """`cached` holds one reference per request, not per position, so freeing
    the first of two occurrences must not release the entry."""
    manager = EncoderCacheManager(cache_size=20)
    req = MockRequest("r1", ["imgA", "imgA"], [4, 4])

    manager.allocate(req, 0)
    assert manager.check_and_update_cache(req, 1)

    manager.free_encoder_input(req, 0)
    assert manager.cached["imgA"] == {"r1"}
    assert "imgA" not in manager.freeable
    assert manager.num_freeable_slots == 16

    manager.free_encoder_input(req, 1)
    assert not manager.cached["imgA"]
    assert manager.freeable["imgA"] == 4
    assert manager.num_freeable_slots == 20


def test_duplicate_mm_hash_is_not_evicted_before_last_use():
    """An item repeated within one request (an image carried across
    conversation turns) must not become reclaimable capacity while a later
    occurrence still has to be spliced in, or the encoder recomputes it."""
    manager = EncoderCacheManager(cache_size=8)
    req = MockRequest("r1", ["imgA", "imgA"], [4, 4])
    other = MockRequest("r2", ["imgB"], [8])

    manager.allocate(req, 0)
    assert manager.check_and_update_cache(req, 1)
    manager.free_encoder_input(req, 0)

    assert not manager.can_allocate(other, 0, int(1e9), 0)
    assert manager.check_and_update_cache(req, 1)
    assert manager.get_freed_mm_hashes() == []


def test_many_inputs_release_each_hash_at_its_last_occurrence():
    """A request with many items, one repeated, releases every entry exactly
    once its last cached occurrence is freed."""
    num_items = 64
    hashes = [f"img{i}" for i in range(num_items)] + ["img0"]
    manager = EncoderCacheManager(cache_size=num_items)
    req = MockRequest("r1", hashes, [1] * len(hashes))

    for i in range(num_items):
        manager.allocate(req, i)
    assert manager.check_and_update_cache(req, num_items)

    manager.free_encoder_input(req, 0)
    assert "img0" not in manager.freeable
    for i in range(1, num_items):
        manager.free_encoder_input(req, i)
        assert manager.freeable[f"img{i}"] == 1

    manager.free_encoder_input(req, num_items)
    assert manager.freeable["img0"] == 1
    assert manager.num_freeable_slots == num_items
    assert "r1" not in manager.request_cached_ids
    assert "r1" not in manager.request_hash_refs


def test_encoder_decoder_cache_manager_reset():
    manager = EncoderDecoderCacheManager(cache_size=20)

    req1 = MockRequest("req1", ["img1"], [5])
    req2 = MockRequest("req2", ["img2"], [3])

    manager.allocate(req1, 0)
    manager.allocate(req2, 0)
    manager.free(req1)
    manager.get_freed_mm_hashes()

    assert manager.num_free_slots < 20

    manager.reset()

    assert len(manager.allocated) == 0
    assert len(manager.to_free) == 0
    assert manager.num_free_slots == 20


def test_encoder_decoder_cache_manager_reset_allows_fresh_allocations():
    manager = EncoderDecoderCacheManager(cache_size=10)

    req1 = MockRequest("req1", ["img1"], [10])
    manager.allocate(req1, 0)
    assert manager.num_free_slots == 0

    manager.reset()

    req2 = MockRequest("req2", ["img2"], [8])
    assert manager.can_allocate(req2, 0, int(1e9), 0)
    manager.allocate(req2, 0)

    assert manager.num_free_slots == 2
    assert "img2" in manager.allocated
