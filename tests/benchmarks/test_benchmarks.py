"""The benchmarks' own parts: checkpoints that both sides can load, and sums that are right. Nothing here is timed."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks import serve
from benchmarks.grammars.masks import GrammarRuns, measure
from benchmarks.harness.checkpoints import SHAPES, SPECIALS, TINY, WORDS, checkpoint
from benchmarks.harness.compared_engines import Ours, Setup, TransformersEngine, Work, conversations, run
from benchmarks.harness.loadgen import EDIT, Answer, Load, body, drive, summary
from benchmarks.harness.server import memory_of
from benchmarks.memory import WORDS as WORDS_OF
from benchmarks.memory import mixed, slope
from benchmarks.run import NAMES, module
from benchmarks.startup import violations


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint("tiny", tmp_path_factory.mktemp("checkpoints"))


def test_tokenizer_knows_its_words_and_special_tokens(tiny: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tiny / "tokenizer.json"))
    assert [tokenizer.token_to_id(t) for t in SPECIALS] == list(range(TINY.base, TINY.base + len(SPECIALS)))
    assert tokenizer.decode(tokenizer.encode(" ".join(WORDS)).ids) == " ".join(WORDS)


def test_both_sides_give_the_same_tokens(tiny: Path) -> None:
    """Otherwise their speeds would not be comparable."""
    ours, reference = Ours(Setup(str(tiny))), TransformersEngine(Setup(str(tiny)))
    for work in (Work(1, 6, words=20), Work(3, 6, words=20, seed=1), Work(2, 6, words=8, images=1, seed=2)):
        a, b = run(ours, work), run(reference, work)
        assert a.prompt == b.prompt and a.tokens == b.tokens
    ours.llm.close()


@pytest.mark.part("api")
def test_the_cost_of_a_schema_is_measured_over_the_same_prompts(tiny: Path) -> None:
    runs = GrammarRuns(tiny, most=2, tokens=5, temperature=0.0)
    found = measure(runs, clients=2, repeats=1)
    runs.engine.close()
    assert all(value > 0 for value in found.values()) and runs.engine.scheduler.pool.used == 0


def test_work_is_made_from_its_seed() -> None:
    def texts(seed: int) -> list[str]:
        return [
            conversation[0]["content"][0]["text"] for conversation in conversations(Work(3, 1, words=20, seed=seed))
        ]

    assert texts(1) == texts(1) != texts(2)
    assert [len(t.split()) for t in texts(1)] == [20, 18, 15]


def test_requests_differ_and_hold_their_images() -> None:
    load = Load(1, 2, words=5, images=1, side=56)
    first, second = (json.loads(body("m", load, i)) for i in range(2))
    assert first["messages"] != second["messages"]
    assert [p["type"] for p in first["messages"][0]["content"]] == ["image_url", "text"]


def test_answers_of_a_checkpoint_of_cycles_repeat_and_are_guessed(tmp_path: Path) -> None:
    """In transformers as in ours, so that n-grams of two engines have the same to follow."""
    path = checkpoint("tiny-cycles", tmp_path)
    setup, work = Setup(str(path)), Work(1, 24, words=8)
    ours, reference = Ours(setup), TransformersEngine(setup)
    found = run(ours, work)
    assert found.tokens == run(reference, work).tokens
    (answer,) = found.tokens
    assert len({*answer}) == SHAPES["tiny-cycles"].cycle and answer[6:] == answer[:-6]
    assert ours.llm.engine.scheduler.totals.spec_accepted > 8, "n-grams are guessed by default"
    ours.llm.close()


def test_a_load_of_edited_text_asks_for_the_words_of_its_prompt() -> None:
    edited = dict(serve.loads([2], True, 448, ("edited",)))["edited"]
    plain = replace(edited, edited=False)
    asked, bare = (
        json.loads(body("m", load, 0))["messages"][0]["content"][0]["text"] for load in (edited, plain)
    )  # fmt: skip
    assert asked == EDIT + bare and len(bare.split()) == edited.words == 100 and edited.out > 64
    assert [kind for kind, _ in serve.loads([1, 8], False, 448)] == ["text", "image"] * 2, "as before, if not named"
    assert serve.kinds_of("edited,text") == ("edited", "text")
    with pytest.raises(argparse.ArgumentTypeError, match="loads are text, image, edited"):
        serve.kinds_of("editing")


def test_summary_of_a_load() -> None:
    answers = [Answer(0.0, [1.0, 2.0, 3.0], prompt=5, tokens=3), Answer(0.0, [], error="503")]
    found = summary(answers, Load(2, 2, images=1), 4.0)
    assert found["requests"] == 1 and found["errors"] == 1 and found["first_error"] == "503"
    assert found["ttft_p50_ms"] == 1000 and found["tpot_p50_ms"] == 1000 and found["itl_p99_ms"] == 1000
    assert found["tokens_per_second"] == 0.75 and found["images_per_second"] == 0.25


async def _abroad() -> None:
    await drive("http://192.0.2.1:8000", "m", Load(1, 1))


def test_load_goes_to_the_loopback_only() -> None:
    import asyncio

    with pytest.raises(ValueError, match="loopback"):
        asyncio.run(_abroad())


def test_mixed_requests_are_short_and_of_any_size() -> None:
    found = [json.loads(mixed("m", Load(1, 60, seed=3), i)) for i in range(60)]
    contents = [r["messages"][0]["content"] for r in found]
    texts = [parts[-1]["text"] for parts in contents]
    images = [parts[0]["image_url"]["url"] for parts in contents if len(parts) > 1]
    assert len(set(texts)) == 60 and {len(t.split()) for t in texts} <= set(range(WORDS_OF[0], WORDS_OF[1] + 1))
    assert 0 < len(set(images)) == len(images) < 30 and {r["temperature"] > 0 for r in found} == {True, False}


def test_what_a_process_holds_does_not_count_on_others() -> None:
    found = memory_of(os.getpid())
    assert 0 <= found["mapped"] <= found["own"] and found["pss"] > 0 and memory_of(2**22 + 1) == {}


def test_slope_is_per_thousand_requests() -> None:
    assert slope([50 * i for i in range(11)], [10.0 + i for i in range(11)]) == pytest.approx(20.0)


def test_forbidden_imports_are_named() -> None:
    clean = {"torch": False, "transformers": False}
    assert violations({"api": clean, "engine": {**clean, "torch": True}}) == []
    assert violations({"api": {**clean, "torch": True}, "engine": {**clean, "transformers": True}}) == [
        "engine imports transformers",
        "api imports torch",
    ]


def test_every_benchmark_that_make_bench_runs_has_a_module() -> None:
    assert [name for name in NAMES if find_spec(module(name)) is None] == []
