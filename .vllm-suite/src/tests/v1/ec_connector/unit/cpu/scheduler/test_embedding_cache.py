# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Unit tests for EmbeddingCache.

Pure integer bookkeeping — no mmap, torch, or CUDA — so these run anywhere.
"""

import threading

import pytest

from vllm.distributed.ec_transfer.ec_connector.cpu.scheduler.embedding_cache import (
    EmbeddingCache,
)


def _cache(num_blocks: int = 8) -> EmbeddingCache:
    return EmbeddingCache(num_blocks)


# ── alloc ────────────────────────────────────────────────────────────────────


def test_alloc_returns_unique_ascending_block_ids():
    cache = _cache()
    entry = cache.alloc("a", 3)
    assert entry is not None
    assert len(entry.block_ids) == 3
    assert len(set(entry.block_ids)) == 3
    assert all(0 <= i < 8 for i in entry.block_ids)
    # Ascending order lets consumers detect which blocks are adjacent.
    assert list(entry.block_ids) == sorted(entry.block_ids)


def test_alloc_returns_tuple():
    cache = _cache()
    entry = cache.alloc("a", 2)
    assert entry is not None
    assert isinstance(entry.block_ids, tuple)


def test_alloc_returns_none_when_full():
    cache = _cache(num_blocks=4)
    cache.alloc("a", 4)
    assert cache.alloc("b", 1) is None


def test_alloc_asserts_duplicate_key():
    cache = _cache()
    cache.alloc("a", 2)
    with pytest.raises(AssertionError, match="duplicate alloc"):
        cache.alloc("a", 2)


def test_alloc_asserts_n_blocks_exceeds_capacity():
    cache = _cache(num_blocks=4)
    with pytest.raises(AssertionError, match="capacity"):
        cache.alloc("a", 5)


def test_alloc_zero_blocks():
    cache = _cache()
    entry = cache.alloc("a", 0)
    assert entry is not None
    assert entry.block_ids == ()


def test_alloc_starts_not_ready():
    cache = _cache()
    entry = cache.alloc("a", 2)
    assert entry is not None
    assert not entry.ready
    assert not entry.evictable


# ── get ──────────────────────────────────────────────────────────────────────


def test_get_missing_returns_none():
    cache = _cache()
    assert cache.get("a") is None


def test_get_returns_entry():
    cache = _cache()
    alloc_entry = cache.alloc("a", 2)
    got = cache.get("a")
    assert got is alloc_entry


def test_get_returns_not_ready_entry():
    cache = _cache()
    cache.alloc("a", 2)
    entry = cache.get("a")
    assert entry is not None
    assert not entry.ready


# ── mark_ready ───────────────────────────────────────────────────────────────


def test_mark_ready_transitions():
    cache = _cache()
    cache.alloc("a", 2)
    entry = cache.get("a")
    assert entry is not None
    assert not entry.ready
    cache.mark_ready("a")
    assert entry.ready
    assert entry.evictable


def test_mark_ready_asserts_already_ready():
    cache = _cache()
    cache.alloc("a", 2)
    cache.mark_ready("a")
    with pytest.raises(AssertionError, match="already-ready"):
        cache.mark_ready("a")


def test_mark_ready_asserts_missing_key():
    cache = _cache()
    with pytest.raises(KeyError):
        cache.mark_ready("nonexistent")


# ── pin / unpin ──────────────────────────────────────────────────────────────


def test_pin_asserts_not_ready():
    cache = _cache()
    cache.alloc("a", 2)
    with pytest.raises(AssertionError, match="not-ready"):
        cache.pin("a")


def test_pin_unpin_basic():
    cache = _cache()
    cache.alloc("a", 2)
    cache.mark_ready("a")
    cache.pin("a")
    entry = cache.get("a")
    assert entry is not None
    assert not entry.evictable
    cache.unpin("a")
    assert entry.evictable


def test_nested_pin():
    cache = _cache()
    cache.alloc("a", 2)
    cache.mark_ready("a")
    cache.pin("a")
    cache.pin("a")
    cache.unpin("a")
    entry = cache.get("a")
    assert entry is not None
    assert not entry.evictable  # still pinned (count=1)
    cache.unpin("a")
    assert entry.evictable


def test_unpin_asserts_on_unpinned():
    cache = _cache()
    cache.alloc("a", 2)
    cache.mark_ready("a")
    with pytest.raises(AssertionError, match="unpinned"):
        cache.unpin("a")


# ── has_held_entries ─────────────────────────────────────────────────────────


def test_has_held_entries_empty_cache():
    cache = _cache()
    assert cache.has_held_entries() is False


def test_has_held_entries_true_while_not_ready():
    cache = _cache()
    cache.alloc("a", 2)  # not ready → held
    assert cache.has_held_entries() is True
    cache.mark_ready("a")  # ready + unpinned → settled
    assert cache.has_held_entries() is False


def test_has_held_entries_true_while_pinned():
    cache = _cache()
    cache.alloc("a", 2)
    cache.mark_ready("a")
    assert cache.has_held_entries() is False
    cache.pin("a")  # pinned → held
    assert cache.has_held_entries() is True
    cache.unpin("a")
    assert cache.has_held_entries() is False


# ── eviction ─────────────────────────────────────────────────────────────────


def test_eviction_frees_ready_unpinned_fifo():
    cache = _cache(num_blocks=4)
    cache.alloc("a", 2)
    cache.mark_ready("a")
    cache.alloc("b", 2)
    cache.mark_ready("b")
    # Pool full. Alloc should evict "a" (oldest).
    entry_c = cache.alloc("c", 2)
    assert entry_c is not None
    assert cache.get("a") is None  # evicted
    assert cache.get("b") is not None  # still there


def test_eviction_skips_pinned():
    cache = _cache(num_blocks=4)
    cache.alloc("a", 2)
    cache.mark_ready("a")
    cache.pin("a")
    cache.alloc("b", 2)
    cache.mark_ready("b")
    # "a" is pinned, so "b" should be evicted instead.
    entry_c = cache.alloc("c", 2)
    assert entry_c is not None
    assert cache.get("a") is not None  # pinned, survived
    assert cache.get("b") is None  # evicted
    cache.unpin("a")


def test_eviction_skips_not_ready():
    cache = _cache(num_blocks=4)
    cache.alloc("a", 2)  # not ready
    cache.alloc("b", 2)
    cache.mark_ready("b")
    # "a" is not ready (non-evictable), "b" is evictable.
    entry_c = cache.alloc("c", 2)
    assert entry_c is not None
    assert cache.get("a") is not None  # not ready, survived
    assert cache.get("b") is None  # evicted
    cache.mark_ready("a")  # clean up


def test_eviction_returns_none_if_all_non_evictable():
    cache = _cache(num_blocks=4)
    cache.alloc("a", 2)
    cache.mark_ready("a")
    cache.pin("a")
    cache.alloc("b", 2)  # not ready
    # Both entries are non-evictable (a=pinned, b=not-ready).
    assert cache.alloc("c", 1) is None
    # Fail-fast: nothing was evicted.
    assert cache.get("a") is not None
    assert cache.get("b") is not None
    cache.unpin("a")


def test_fail_fast_no_wasted_eviction():
    cache = _cache(num_blocks=6)
    cache.alloc("a", 2)
    cache.mark_ready("a")  # evictable: 2 blocks
    cache.alloc("b", 2)  # not ready
    cache.alloc("c", 2)  # not ready
    # free=0, evictable=2, need 3 -> cannot succeed
    assert cache.alloc("d", 3) is None
    # "a" was NOT evicted despite being evictable
    assert cache.get("a") is not None


def test_eviction_multiple_entries():
    cache = _cache(num_blocks=6)
    cache.alloc("a", 2)
    cache.mark_ready("a")
    cache.alloc("b", 2)
    cache.mark_ready("b")
    cache.alloc("c", 2)
    cache.mark_ready("c")
    # Need 4 blocks: must evict both "a" and "b".
    entry_d = cache.alloc("d", 4)
    assert entry_d is not None
    assert cache.get("a") is None
    assert cache.get("b") is None
    assert cache.get("c") is not None


# ── thread safety ────────────────────────────────────────────────────────────


def test_concurrent_pin_unpin():
    cache = _cache(num_blocks=8)
    cache.alloc("a", 4)
    cache.mark_ready("a")
    errors: list[Exception] = []
    barrier = threading.Barrier(8)

    def worker():
        barrier.wait()
        try:
            for _ in range(500):
                cache.pin("a")
                cache.unpin("a")
        except Exception as exc:
            errors.append(exc)

    threads = [threading.Thread(target=worker) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()

    assert not errors, errors
    entry = cache.get("a")
    assert entry is not None
    assert entry.evictable  # all pins balanced


def test_concurrent_alloc_evict():
    cache = _cache(num_blocks=4)
    errors: list[Exception] = []
    barrier = threading.Barrier(4)
    counter = {"i": 0}
    counter_lock = threading.Lock()

    def worker():
        barrier.wait()
        try:
            for _ in range(200):
                with counter_lock:
                    key = f"k{counter['i']}"
                    counter["i"] += 1
                entry = cache.alloc(key, 1)
                if entry is not None:
                    cache.mark_ready(key)
        except Exception as exc:
            errors.append(exc)

    threads = [threading.Thread(target=worker) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()

    assert not errors, errors


# ── discard ──────────────────────────────────────────────────────────────────


def test_discard_not_ready_returns_blocks():
    cache = EmbeddingCache(num_blocks=4)
    entry = cache.alloc("h", 3)
    assert entry is not None
    cache.discard("h")
    assert cache.get("h") is None
    # All blocks reclaimed: a fresh 4-block alloc now fits.
    assert cache.alloc("h2", 4) is not None


def test_discard_rejects_ready_entry():
    cache = EmbeddingCache(num_blocks=4)
    cache.alloc("h", 1)
    cache.mark_ready("h")
    with pytest.raises(AssertionError):
        cache.discard("h")


def test_discard_rejects_absent_key():
    cache = EmbeddingCache(num_blocks=4)
    with pytest.raises(KeyError):
        cache.discard("nope")


# ── pin_if_ready ─────────────────────────────────────────────────────────────


def test_pin_if_ready_pins_and_returns_entry():
    cache = EmbeddingCache(num_blocks=4)
    cache.alloc("h", 2)
    cache.mark_ready("h")
    entry = cache.pin_if_ready("h")
    assert entry is not None and entry.ready and len(entry.block_ids) == 2
    assert cache.alloc("h2", 4) is None  # pinned ⇒ not evictable


def test_pin_if_ready_none_when_absent():
    cache = EmbeddingCache(num_blocks=4)
    assert cache.pin_if_ready("nope") is None


def test_pin_if_ready_returns_unpinned_entry_when_not_ready():
    """The producer needs "present but not ready" told apart from "absent":
    the first is NACKed as retryable, the second as a miss."""
    cache = EmbeddingCache(num_blocks=4)
    cache.alloc("h", 1)  # not-ready
    entry = cache.pin_if_ready("h")
    assert entry is not None and not entry.ready
    assert cache.alloc("h2", 4) is None  # not-ready ⇒ still not evictable
