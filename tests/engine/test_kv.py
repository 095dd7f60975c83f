"""Pool, hash chain and arena on their own."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from trencadis.core.kv.block_pool import BlockHashChain, BlockPool
from trencadis.core.kv_cache_format import RESERVED_BLOCKS
from trencadis.core.media_spans import MediaSpan
from trencadis.core.request import AdapterRef, Request, SamplingParams
from trencadis.core.scheduling.encoder_cache import EncoderCache
from trencadis.multimodal.qwen2_vl.mrope import mrope_positions as rotary


@given(
    st.integers(1, 12), st.lists(st.tuples(st.sampled_from("tdsp"), st.integers(0, 9), st.integers(0, 5)), max_size=80)
)
@settings(deadline=None)
def test_pool_accounts_for_every_block(size: int, actions: list[tuple[str, int, int]]) -> None:
    pool, held = BlockPool(size), []
    for action, a, b in actions:
        if action == "t":
            free, got = pool.free, pool.take(b)
            assert (got is None) == (b > free)
            if got:
                assert min(got) >= RESERVED_BLOCKS and max(got) < size + RESERVED_BLOCKS
                held.append(got)
        elif action == "d" and held:
            pool.drop(held.pop(a % len(held)))
        elif action == "s":
            block = pool.find(bytes([a]))
            if block is not None:
                pool.share([block])
                held.append([block])
        elif action == "p" and held:
            pool.publish(held[a % len(held)][0], bytes([b]))
        pool.check(held)
        assert pool.used == len({x for h in held for x in h})


def test_freed_blocks_come_before_untouched_and_cached_ones_last() -> None:
    pool = BlockPool(4)
    first = pool.take(2) or []
    pool.publish(first[0], b"a")
    pool.drop(first)
    assert pool.take(1) == [first[1]], "a block without content is reused first"
    assert pool.take(2) == [4, 5], "then untouched ones"
    assert pool.find(b"a") == first[0]
    assert pool.take(1) == [first[0]] and pool.find(b"a") is None


def test_the_tail_of_a_prefix_is_evicted_before_its_head() -> None:
    pool = BlockPool(3)
    blocks = pool.take(3) or []
    for block, key in zip(blocks, (b"a", b"b", b"c"), strict=True):
        pool.publish(block, key)
    pool.drop(blocks)
    pool.take(1)
    assert pool.find(b"c") is None and pool.find(b"a") == blocks[0]


def request(**more: object) -> Request:
    values: dict[str, object] = {"id": "r", "tokens": list(range(8)), "params": SamplingParams()}
    return Request(**{**values, **more})  # type: ignore[arg-type]


def keys(r: Request, size: int = 4) -> list[bytes]:
    chain = BlockHashChain(r, size)
    chain.extend(r.tokens, len(r.tokens))
    return chain.keys


def spanned(digest: str = "aa", offset: int = 2, shift: int = 0) -> Request:
    positions = (np.stack([np.arange(8)] * 3) + shift).astype("<i4").tobytes()
    return request(spans=[MediaSpan(offset, 2, digest, (1, 2, 4), 64)], positions=positions, delta=shift)


def test_keys_tell_apart_what_kv_depends_on() -> None:
    base = spanned()
    assert keys(base) == keys(spanned())
    for other in (spanned("bb"), spanned(offset=1), spanned(shift=1), request()):
        assert keys(base)[0] != keys(other)[0]
    assert keys(request())[0] != keys(request(salt="x"))[0]
    assert keys(request())[1] != keys(request(tokens=[9, *range(1, 8)]))[1], "a key covers all blocks before its own"
    assert BlockHashChain(request(), 4).keys == []
    adapted = [request() for _ in range(3)]
    for one, digest in zip(adapted, ("aa", "bb", "bb"), strict=True):
        one.adapter = AdapterRef(digest, f"/{len(digest)}", "any name")
    first, second, again = (keys(one)[0] for one in adapted)
    assert len({first, second, keys(request())[0]}) == 3 and second == again


def test_an_image_is_keyed_only_in_the_blocks_it_touches() -> None:
    early = request(spans=[MediaSpan(5, 2, "aa", (1, 2, 4), 64)])
    late = request(spans=[MediaSpan(5, 2, "bb", (1, 2, 4), 64)])
    assert keys(early)[0] == keys(late)[0] and keys(early)[1] != keys(late)[1]


@given(st.integers(2, 20), st.lists(st.tuples(st.integers(0, 9), st.integers(1, 6), st.booleans()), max_size=60))
@settings(deadline=None)
def test_arena_never_gives_a_pinned_row_away(rows: int, actions: list[tuple[int, int, bool]]) -> None:
    arena, pinned = EncoderCache(rows), {}
    for name, size, keep in actions:
        key = str(name)
        if key in pinned:
            arena.unpin(key, 1)
            del pinned[key]
        elif key not in arena:
            fits = arena.fits(size)
            got = arena.put(key, size, 1)
            assert (got is not None) == fits
            if got is not None and keep:
                pinned[key] = got.tolist()
            elif got is not None:
                arena.unpin(key, 1)
        arena.check()
        for k, kept in pinned.items():
            found = arena.pin(k, 1)
            assert found is not None and found.tolist() == kept


def test_blocks_before_and_between_images_are_shared() -> None:
    """Keys follow what the KV depends on: later images change no earlier block, and an answer becomes a prompt."""

    def keys(tokens: int, spans: list[MediaSpan], prompt: int) -> list[bytes]:
        positions, delta = None, 0
        if spans:
            places, delta = rotary(prompt, spans, 2.0)
            positions = places.astype("<i4").tobytes()
        request = Request("r", [7] * prompt, SamplingParams(), spans, positions, delta)
        chain = BlockHashChain(request, 4)
        chain.extend([7] * tokens, tokens)
        return chain.keys

    first, second = MediaSpan(8, 4, "aa", (1, 4, 4), 64), MediaSpan(32, 16, "bb", (1, 8, 8), 64)
    text, one = keys(24, [], 24), keys(28, [first], 16)
    both, other = keys(56, [first, second], 56), keys(56, [MediaSpan(8, 4, "cc", (1, 4, 4), 64), second], 56)
    assert text[:2] == one[:2] == both[:2] == other[:2], "the text before the first image"
    assert one == both[:7], "the first turn, and the answer that was generated in it"
    assert not set(text[2:]) & set(one[2:]) and not set(both[2:]) & set(other[2:])


@given(st.lists(st.tuples(st.integers(0, 11), st.booleans()), max_size=12), st.integers(0, 8))
@settings(deadline=None)
def test_a_key_is_the_same_in_whatever_order_it_is_asked_for(requested: list[tuple[int, bool]], behind: int) -> None:
    tokens = list(range(50, 98))
    asking = request(tokens=tokens)
    wanted, chain, parent = keys(asking), BlockHashChain(asking, 4), BlockHashChain(asking, 4)
    parent.extend(tokens, 4 * behind - 1)
    chain.continue_from(parent, tokens, behind)
    for index, kept in requested:
        if kept:
            assert chain.extend(tokens, 4 * index + 3) == wanted[: len(chain.keys)] and len(chain.keys) >= index
        else:
            assert chain.key(tokens, index) == wanted[index] and chain.at == index + 1
