"""Items, media and spans: tiles beside each other, constant rows, equal tiles, and what names them in prefix keys."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.engine.test_schedules import play
from tests.oracles.shadow_engine import ScheduleDriver, shadow_engine
from trencadis.core.kv.block_pool import BlockHashChain
from trencadis.core.media_spans import RESERVED_ROWS, MediaSpan, TokenRun, rows_at_once
from trencadis.core.request import Request, SamplingParams
from trencadis.core.scheduling.encoder_cache import EncoderCache, rows_of_run
from trencadis.multimodal.placeholders import expand_placeholders
from trencadis.multimodal.processor_interface import ImageGeometry, PlaceholderRun, encoder_items
from trencadis.server.prompts.multimodal_inputs import ExpandedPrompt
from trencadis.server.prompts.prompt_and_chat_messages import Prompt, render_prompt

IMAGE = 59


def beside(at: int, digests: list[str], lines: int = 2, width: int = 2) -> list[MediaSpan]:
    """Spans of tiles beside each other from token ``at`` on: line by line, each with a constant row behind it."""
    runs: list[list[TokenRun]] = [[] for _ in digests]
    for line in range(lines):
        for own in runs:
            own.append(TokenRun(at, width, line * width))
            at += width
        runs[-1].append(TokenRun(at, 1, 0, 0))
        at += 1
    return [
        MediaSpan(
            own[0].offset, own[-1].offset + own[-1].length - own[0].offset, d, (1, 2, 2), 64, lines * width, (*own,)
        )
        for d, own in zip(digests, runs, strict=True)
    ]


def tiled(request: Request, rng: random.Random) -> Request:
    """``request`` with an image of one to three tiles a row of tiles behind its text, where there is room."""
    tokens, spans = list(request.tokens), list(request.spans)
    for _ in range(rng.randint(0, 2)):
        tokens += [rng.randrange(1, 9)] * rng.randint(0, 3)
        count = rng.randint(1, 2)
        names = [f"{rng.randrange(3):02x}ff" for _ in range(count)]
        if len(tokens) + 2 * (2 * count + 1) > 40:
            break
        spans += beside(len(tokens), names)
        tokens += [0] * (2 * (2 * count + 1))
    made = replace(request, tokens=[*tokens, 7], spans=spans)
    if request.positions is not None:
        base = np.arange(len(made.tokens), dtype=np.int32)
        made.positions = np.stack([base, base // 2, base % 5]).astype("<i4").tobytes()
    return made


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("seed", range(4))
def test_random_schedules_of_tiles(seed: int, depth: int) -> None:
    """Chunks, preemption, aborts, shared prefixes and an arena of about two tiles change no answer."""
    play(seed, 60, depth, tiled)


@pytest.mark.long
@pytest.mark.parametrize("depth", [0, 1])
def test_ten_thousand_requests_of_tiles(depth: int) -> None:
    preempted = sum(play(500 + s, 400, depth, tiled).engine.scheduler.totals.preemptions for s in range(25))
    assert preempted > 100


def test_a_tile_that_two_images_share_is_encoded_once() -> None:
    engine, _ = shadow_engine(blocks=40, size=8, rows=40, depth=1)
    driver = ScheduleDriver(engine, random.Random(0), 96)
    params = SamplingParams(temperature=0, max_tokens=4)
    for i, names in enumerate((["a1", "b2"], ["b2", "c3"], ["b2", "b2"])):
        prompt = [1 + i] * 3 + [0] * 10 + [5]
        driver.add(Request(f"r{i}", prompt, params, beside(3, names)))
    driver.finish()
    driver.verify()
    assert engine.scheduler.totals.images_encoded == 3
    assert engine.scheduler.totals.mm_queries == 6, "tiles are counted one by one"


def test_equal_tiles_of_one_image_stay_pinned_until_the_last_ends() -> None:
    """The one that ends first must not end the pin of the other, whose rows a later chunk reads."""
    engine, _ = shadow_engine(blocks=60, size=8, rows=6, depth=0, tokens=5, caching=False)
    driver = ScheduleDriver(engine, random.Random(1), 96, media_delay=0)
    params = SamplingParams(temperature=0, max_tokens=2)
    first = MediaSpan(0, 4, "aa", (1, 2, 2), 64, 4, (TokenRun(0, 2, 0), TokenRun(2, 2, 2)))
    again = MediaSpan(3, 20, "aa", (1, 2, 2), 64, 4, (TokenRun(4, 2, 0), TokenRun(21, 2, 2)))
    driver.add(Request("r", [0] * 24, params, [first, again]))
    seq = engine.life.requests["r"][0]
    held = 0
    while engine.life.requests:
        driver.run_step()
        if 4 <= seq.computed < 23:
            assert [k for k, entry in engine.scheduler.arena._entries.items() if seq.key in entry.pins] == ["aa"]
            held += 1
    assert held > 1
    driver.add(Request("s", [0] * 6, params, beside(0, ["bb"])))
    driver.finish()
    driver.verify()
    assert engine.scheduler.totals.images_encoded == 2


def test_rows_that_a_token_needs_together() -> None:
    assert rows_at_once([]) == 0
    assert rows_at_once([MediaSpan(0, 5, "a", (1, 1, 5), 64), MediaSpan(9, 3, "b", (1, 1, 3), 64)]) == 5
    assert rows_at_once(beside(0, ["a", "b", "c"])) == 12
    # Lines of the first two overlap, and the third begins behind them.
    assert rows_at_once([*beside(0, ["a", "b"]), *beside(10, ["c"])]) == 8


def test_an_image_whose_tiles_do_not_fit_together_is_refused() -> None:
    engine, _ = shadow_engine(blocks=40, size=8, rows=2 + 7, depth=0)
    engine.add(Request("r", [0] * 12, SamplingParams(), beside(0, ["a1", "b2"])))
    ended = engine.step()[0]
    assert (ended.finish, ended.status) == ("error", 413) and "7 rows" in ended.message


def keys(spans: list[MediaSpan], size: int = 4) -> list[bytes]:
    chain = BlockHashChain(Request("r", [0] * 16, SamplingParams(), spans), size)
    chain.extend([0] * 16, 16)
    return chain.keys


def test_prefix_keys_name_item_row_and_place() -> None:
    base = beside(0, ["a1", "b2"])
    assert keys(base) == keys(beside(0, ["a1", "b2"]))
    others = {
        "another tile": beside(0, ["a1", "c3"]),
        "the tiles changed": beside(0, ["b2", "a1"]),
        "another place": beside(1, ["a1", "b2"]),
        "another row": [base[0], replace(base[1], runs=(TokenRun(2, 2, 2), *base[1].runs[1:]))],
        "no constant row": [base[0], replace(base[1], runs=(base[1].runs[0], TokenRun(4, 1, 3), *base[1].runs[2:]))],
    }
    for name, other in others.items():
        assert keys(other)[1] != keys(base)[1], name
    later = [base[0], replace(base[1], runs=(*base[1].runs[:-2], TokenRun(7, 2, 0), base[1].runs[-1]))]
    assert keys(later)[0] == keys(base)[0] and keys(later)[1] != keys(base)[1], "a block knows only its own runs"


def test_a_constant_row_is_never_handed_out() -> None:
    arena = EncoderCache(RESERVED_ROWS + 3 + 4, RESERVED_ROWS + 3)
    rows = arena.put("a", 4, 1)
    assert rows is not None and sorted(rows.tolist()) == [5, 6, 7, 8] and arena.put("b", 1, 1) is None
    assert rows_of_run(TokenRun(0, 3, 0, 2), rows).tolist() == [RESERVED_ROWS + 2] * 3
    assert rows_of_run(TokenRun(0, 2, 1), rows).tolist() == rows[1:3].tolist()


LAYOUT = (
    "<a>",
    PlaceholderRun(0, 0, 2),
    PlaceholderRun(1, 0, 2),
    PlaceholderRun(1, 0, 1, 0),
    PlaceholderRun(0, 2, 2),
    PlaceholderRun(1, 2, 2),
    PlaceholderRun(1, 0, 1, 0),
    "<b>",
)


def test_a_layout_becomes_tokens_and_spans() -> None:
    outline = ImageGeometry((28, 56), (2, 2, 2), 10, 128, 0, 4, LAYOUT)
    pixels = np.arange(8 * 12, dtype=np.uint8).reshape(8, 12)
    one = outline.make_prepared(pixels, "d", (30, 60))
    assert [i.tokens for i in one.items] == [4, 4] and one.tokens == 10 and outline.patches == 8
    assert one.items[0].digest != one.items[1].digest and (one.items[1].pixels == pixels[4:]).all()
    text = {"<a>": [50, 51], "<b>": [52]}
    out, spans = expand_placeholders([1, IMAGE, 2], IMAGE, [one], [1], -1, text.__getitem__)
    assert out == [1, 50, 51, *[IMAGE] * 10, 52, 2]
    assert [s.list_runs() for s in spans] == [
        (TokenRun(3, 2, 0), TokenRun(8, 2, 2)),
        (TokenRun(5, 2, 0), TokenRun(7, 1, 0, 0), TokenRun(10, 2, 2), TokenRun(12, 1, 0, 0)),
    ]
    assert [(s.offset, s.length, s.arena_rows, s.slots) for s in spans] == [(3, 7, 4, 64), (5, 8, 4, 64)]
    assert [i.digest for i in encoder_items([one])] == [s.digest for s in spans]


def test_tiles_one_behind_the_other_have_one_run() -> None:
    """Such spans are those of whole images, which cost a step nothing more."""
    outline = ImageGeometry((28, 56), (2, 2, 2), 8, 128, 0, 4, (PlaceholderRun(0, 0, 4), PlaceholderRun(1, 0, 4)))
    one = outline.make_prepared(np.zeros((8, 12), np.uint8), "d", (30, 60))
    _, spans = expand_placeholders([IMAGE], IMAGE, [one], [0])
    assert [(s.offset, s.length, s.runs, s.rows) for s in spans] == [(0, 4, (), 0), (4, 4, (), 0)]
    assert spans[0].digest == spans[1].digest, "equal tiles are one item of the arena"


def test_the_log_shows_an_image_of_tiles_once() -> None:
    class Words:
        def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
            return " ".join(map(str, ids))

    words: Any = Words()
    tokens = [1, *[IMAGE] * 10, 2, IMAGE, IMAGE, 3]
    spans = [*beside(1, ["a1", "b2"]), MediaSpan(12, 2, "c", (1, 2, 2), 64)]
    prompt = Prompt(tokens, expanded=ExpandedPrompt(tokens, spans))
    assert render_prompt(prompt, words, None) == f"1 {IMAGE} 2 {IMAGE} 3"
