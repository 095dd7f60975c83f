"""What the engine counts of prompts and of its queue, through the scheduler."""

from __future__ import annotations

import random

import pytest

from tests.engine.test_fairness import EOS, Driven
from trencadis.core.media_spans import MediaSpan
from trencadis.core.request import Request, SamplingParams

PARAMS = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)


def added(made: Driven, id: str, tokens: list[int], n: int = 1, salt: str = "") -> None:
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, n=n)
    made.owners[id] = "t"
    made.life.add(Request(id, tokens, params, salt=salt, arrival=made.now))


def test_prompts_count_once_they_are_done_and_by_where_they_came_from() -> None:
    made = Driven()
    prompt = [2 + i % 50 for i in range(100)]
    added(made, "a", prompt)
    assert (made.life.totals.prompt_tokens, made.life.totals.prompt_cached) == (0, 0), "nothing is computed yet"
    while made.step():
        pass
    assert (made.life.totals.prompt_tokens, made.life.totals.prompt_cached) == (100, 0)
    added(made, "b", prompt, n=3)
    added(made, "c", prompt, salt="another")
    while made.step():
        pass
    assert (made.life.totals.prompt_tokens, made.life.totals.prompt_cached) == (300, 96), "six blocks of b, none of c"


def test_neither_count_ever_falls() -> None:
    rng = random.Random(7)
    made = Driven(rows=3, blocks=40)
    last = (0, 0, 0)
    for i in range(60):
        start = [2 + j % 9 for j in range(rng.choice((16, 48)))]
        added(made, f"r{i}", [*start, *(2 + rng.randrange(90) for _ in range(rng.randint(1, 30)))])
        for _ in range(rng.randint(0, 3)):
            made.step()
            if rng.random() < 0.1:
                made.life.abort(f"r{rng.randint(0, i)}")
            life = made.life
            now = (
                life.totals.prompt_tokens,
                life.totals.prompt_cached,
                life.totals.prompt_tokens - life.totals.prompt_cached,
            )
            assert all(a >= b for a, b in zip(now, last, strict=True))
            last = now
    assert last[1] > 0 and made.scheduler.totals.preemptions >= 0


@pytest.mark.parametrize("image", [False, True])
def test_a_request_without_its_image_waits_for_that_and_not_for_room(image: bool) -> None:
    made = Driven(rows=1)
    made.owners["a"] = made.owners["b"] = "t"
    spans = [MediaSpan(0, 8, "digest", (1, 4, 8), 64)] if image else []
    tokens = [EOS + 1] * 20
    made.life.add(Request("a", tokens, PARAMS, spans, arrival=0.0))
    made.life.add(Request("b", [EOS + 2] * 20, PARAMS, arrival=1.0))
    made.step()
    # With an image whose pixels are not here, a keeps its place in the queue and b runs; without, a runs and b waits.
    assert [seq.request.id for seq in made.scheduler.waiting] == (["a"] if image else ["b"])
    assert made.scheduler.held_back == int(image)
