"""Which tokens see which images, against transformers' masks; launches and prefix keys that follow from it."""

from __future__ import annotations

from typing import Any

import numpy as np

from trencadis.core.cross_attention_inputs import (
    ENDLESS,
    CrossAttentionSpans,
    compute_cross_attention,
    make_cross_attention_inputs,
    planned_unit_counts,
    variant_of,
)
from trencadis.core.kv.block_pool import BlockHashChain
from trencadis.core.media_spans import RESERVED_ROWS, MediaSpan, TokenRun
from trencadis.core.request import Request, SamplingParams


def spans_at(places: list[int], shown: list[int], held: int) -> list[MediaSpan]:
    return [
        MediaSpan(0, ENDLESS, f"d{i}", (1, 1, 1), 64, held, (TokenRun(place, 1),), rows)
        for i, (place, rows) in enumerate(zip(places, shown, strict=True))
    ]


def visible_to_transformers(ids: list[int], tiles: list[int], drawn: int) -> Any:
    """bool [tokens, images, 4]: tiles that tokens see, and drawn ones as the last; all False: they see everything."""
    from transformers.models.mllama import processing_mllama as p

    mask = p.convert_sparse_cross_attention_mask_to_dense(
        [p.get_cross_attention_token_mask(ids, 7)], [tiles], max_num_tiles=4, length=len(ids)
    )[0].astype(bool)
    return np.concatenate([mask, np.repeat(mask[-1:], drawn, 0)])


def check_visible(rng: np.random.Generator) -> None:
    """A drawn prompt, cut anywhere, sees what transformers' masks say; drawn tokens as well."""
    ids = np.where(rng.random(int(rng.integers(1, 20))) < 0.35, 7, 1).tolist()
    places = [i for i, token in enumerate(ids) if token == 7]
    if not places:
        return
    tiles, drawn = rng.integers(1, 5, len(places)).tolist(), 3
    want = visible_to_transformers(ids, tiles, drawn)
    order = rng.permutation(len(places))
    spans = spans_at(places, [5 * t for t in tiles], 20)
    start = 0
    while start < len(want):
        stop = min(start + int(rng.integers(1, 8)), len(want))
        found = compute_cross_attention(spans, [RESERVED_ROWS + 20 * int(u) for u in order], start, stop)
        cut = int(rng.integers(0, stop - start))
        for one, first, last in ((found, start, stop), (found.restrict(cut, stop - start), start + cut, stop)):
            got = make_cross_attention_inputs([one], [last - first])
            for i in range(first, last):
                blind = not want[i].any()
                rows = [20 if blind else 5 * int(want[i, j].sum()) for j in range(len(places))]
                assert got is not None and got.gate[i - first] == (1 if blind else 2)
                columns = {int(unit): column for column, unit in enumerate(got.units)}
                for j, unit in enumerate(order.tolist()):
                    reach = got.reach[i - first, columns[unit]] if unit in columns else 0
                    assert reach == rows[j], (ids, tiles, i, j)
        start = stop


def test_tokens_see_the_images_that_transformers_shows_them() -> None:
    for seed in range(100):
        check_visible(np.random.default_rng(seed))


def test_equal_images_are_one_unit_that_counts_twice() -> None:
    found = compute_cross_attention(
        spans_at([1, 2, 3], [5, 5, 10], 20), [RESERVED_ROWS, RESERVED_ROWS, RESERVED_ROWS + 20], 0, 5
    )
    got = make_cross_attention_inputs([CrossAttentionSpans(), found], [2, 5])
    assert got is not None and got.units.tolist() == [0, 1]
    assert got.times.tolist() == [[0, 0], [0, 0], [2, 1], [1, 0], [2, 0], [2, 1], [2, 1]]
    assert got.reach.tolist() == [[0, 0], [0, 0], [20, 20], [5, 0], [5, 0], [5, 10], [5, 10]]
    assert got.gate.tolist() == [0, 0, 1, 2, 2, 2, 2]


def test_launches_are_planned_for_few_numbers_of_images() -> None:
    assert [planned_unit_counts(n) for n in (1, 2, 4, 5, 16)] == [(1,), (1, 2), (1, 4), (1, 4, 5), (1, 4, 16)]
    assert [variant_of(n, 16) for n in (0, 1, 3, 5)] == ["", "pictures1", "pictures4", "pictures16"]
    assert variant_of(3) == "pictures3"


def keys_of(digests: list[str], places: list[int]) -> list[bytes]:
    spans = [s for d, p in zip(digests, places, strict=True) for s in [spans_at([p], [5], 20)[0]]]
    named = [MediaSpan(0, ENDLESS, d, s.grid, 64, 20, s.runs, 5) for d, s in zip(digests, spans, strict=True)]
    request = Request("r", list(range(64)), SamplingParams(), named)
    chain = BlockHashChain(request, 16)
    chain.extend(request.tokens, 64)
    return chain.keys


def test_a_prefix_is_shared_only_among_requests_of_the_same_images() -> None:
    """Keys and values of the first tokens depend on all images, those that come much later too."""
    whole = keys_of(["a", "b"], [40, 50])
    assert whole == keys_of(["a", "b"], [40, 50])
    for other in (keys_of(["a", "c"], [40, 50]), keys_of(["b", "a"], [40, 50]), keys_of(["a"], [40]), keys_of([], [])):
        assert whole[0] != other[0]
    assert whole[2] != keys_of(["a", "b"], [41, 50])[2]
