"""Each family, quantised weights and caches: greedy answers with drafts are those without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.fakes.checkpoints import llama, qwen2
from tests.families.test_same_tokens import prompts
from tests.families.text_checkpoints import CASES, family_checkpoint
from tests.oracles.transformers_model import GAP, make_image
from tests.speculation.test_cpu_answers import draft_by, engine_of
from tests.traffic.predicted_answers import predict
from tests.vision.all_families.family_list import WRITERS
from trencadis import LLM
from trencadis import SamplingParams as Params
from trencadis.core.engine.engine import Engine
from trencadis.core.request import Request, SamplingParams, TokenLogprob

FLAGS: dict[str, Any] = {
    "batch_invariant": False, "max_model_len": 384, "num_gpu_blocks_override": 200, "max_num_batched_tokens": 256,
    "encoder_cache_images": None, "mm_processor_kwargs": {},
}  # fmt: skip
SOME = [("mistral", "window"), ("mixtral", ""), ("gemma3", ""), ("gemma4", "earlier"), ("phi3", "long")]
IMAGES: dict[str, Any] = {
    "dtype": "float32", "max_model_len": 2048, "max_num_seqs": 4, "kv_cache_memory_bytes": 32 << 20,
    "max_num_batched_tokens": 512, "limit_mm_per_prompt": {"image": 1},
}  # fmt: skip
FORMATS: list[dict[str, Any]] = [
    {"quantization": "int8"}, {"quantization": "int4"}, {"kv_cache_dtype": "int8"}, {"kv_cache_dtype": "fp8"},
    {"dtype": "bfloat16"},
]  # fmt: skip


def answers(engine: Engine, length: int, count: int = 6) -> dict[tuple[str, int], list[int]]:
    """Greedy tokens of random prompts, all at once; the engine is closed."""
    found: dict[tuple[str, int], list[int]] = {}
    params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
    for number, prompt in enumerate(prompts(count, 90)):
        engine.add(Request(f"r{number}", list(prompt), params))
    while not engine.idle():
        for delta in engine.step():
            assert delta.finish != "error", delta.message
            found.setdefault((delta.id, delta.choice), []).extend(delta.tokens)
    engine.scheduler.check()
    engine.close()
    return found


def gap_at(engine: Engine, prompt: list[int], output: list[int]) -> float:
    """By how much the best log-probability after these tokens is above the second best; the engine is closed."""
    engine.add(Request("r", [*prompt, *output], SamplingParams(temperature=0, max_tokens=1, logprobs=2)))
    told: list[TokenLogprob] = []
    while not engine.idle():
        told += [one for delta in engine.step() for one in delta.logprobs or []]
    engine.close()
    return told[0].top_logprobs[0] - told[0].top_logprobs[1]


def compare(path: Path, length: int = 40, gap: float = GAP, **flags: Any) -> None:
    """Drafts of a script that is wrong in every third place, and n-grams."""
    requested = {**FLAGS, **flags}
    plain = answers(engine_of(path, speculation=False, **requested), length)
    for kind in ("mixed", "ngram"):
        engine = engine_of(path, spec_always=True, **requested)
        if kind == "mixed":
            draft_by(engine, plain, kind, 4)
        drafted = answers(engine, length)
        assert kind == "ngram" or engine.scheduler.totals.spec_accepted > 20
        for number, prompt in enumerate(prompts(6, 90)):
            a, b = plain[f"r{number}", 0], drafted[f"r{number}", 0]
            if a != b:  # a tie of the two best ids
                at = next(i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)
                assert gap_at(engine_of(path, speculation=False, **requested), list(prompt), a[:at]) < gap, kind


@pytest.mark.parametrize(("family", "word"), SOME)
def test_a_family_answers_the_same_with_drafts(family: str, word: str, tmp_path: Path) -> None:
    name = next(form for one, form in CASES if one == family and word in form)
    compare(family_checkpoint(tmp_path / "m", family=family, form=name))


@pytest.mark.long
@pytest.mark.parametrize(("family", "name"), CASES)
def test_every_form_of_each_family_answers_the_same_with_drafts(family: str, name: str, tmp_path: Path) -> None:
    compare(family_checkpoint(tmp_path / "m", family=family, form=name), 100)
    compare(family_checkpoint(tmp_path / "n", family=family, form=name), 60, policy="padded", async_depth=1)


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_other_formats_answer_the_same_with_drafts(format: dict[str, Any], tmp_path: Path) -> None:
    """In bfloat16, ids are ties at larger distances than in float32, and so they are where activations are rounded to 8
    bits: the last bits of a sum differ with a launch's rows unless --batch-invariant, and a rounding enlarges them.
    """
    rounded = {"dtype", "quantization"} & {*format}
    compare(qwen2(tmp_path / "m"), 30, 0.02 if rounded else 2e-3, **format)


def test_llamas_scaled_positions_are_those_of_drafts_too(tmp_path: Path) -> None:
    compare(llama(tmp_path / "m"), 40)


CARDS: dict[str, dict[str, Any]] = {
    "cpu": {}, "padded": {"policy": "padded"},
    "cuda twin": {"device": "cuda", "policy": "twin", "warmup": "skip", "block_size": 16},
    "emulated hpu": {"device": "hpu", "warmup": "skip", "block_size": 64},
}  # fmt: skip
INVARIANT = ("cpu", "padded")
"""Devices on which every bit is that of an answer without drafts, also of draws."""

SEEN = 2
"""Images of the conversations; the last conversation has none."""


def seen_answers(path: Path, card: str, predicted: list[list[int]] | None, **flags: Any) -> tuple[list[list[int]], int]:
    """Tokens of three conversations, and how many drafts were accepted."""
    rng = np.random.default_rng(1)
    chats: list[list[dict[str, Any]]] = []
    for number in range(SEEN + 1):
        parts: list[dict[str, Any]] = [{"type": "text", "text": "What is here, " * number + "please?"}]
        if number < SEEN:
            parts.insert(number, {"type": "image", "image": make_image(rng, low=60, high=150, aspect=2)})
        chats.append([{"role": "user", "content": parts}])
    drafting: dict[str, Any] = {"spec_method": "ngram", "spec_tokens": 4, "spec_always": True}
    llm = LLM(str(path), **{**IMAGES, **CARDS[card], **flags, **(drafting if predicted else {"speculation": False})})
    if predicted:
        predict(llm, predicted)
    drawn: dict[str, Any] = {"temperature": 1.0, "top_p": 0.9, "frequency_penalty": 0.2}
    drawn = drawn if card in INVARIANT else {"temperature": 0}
    ways: list[dict[str, Any]] = [{"temperature": 0}, drawn, drawn]
    params = [Params(max_tokens=32, ignore_eos=True, seed=seed, **way) for seed, way in enumerate(ways)]
    made = llm.chat(chats, params, use_tqdm=False)
    llm.engine.scheduler.check()
    accepted = llm.engine.scheduler.totals.spec_accepted
    llm.close()
    return [one.outputs[0].token_ids for one in made], accepted


QUICK = {("qwen3_vl", "cpu"), ("gemma3", "cpu"), ("mllama", "cpu")}
REFUSED = {"minicpmv": (*CARDS,), "mllama": ("cuda twin", "emulated hpu")}
"""Recurrent layers are not drafted, and on cards none that attend to images: starts say so in one line."""

PAIRS = [(family, card) for family in WRITERS for card in CARDS if card not in REFUSED.get(family, ())]


@pytest.mark.parametrize(
    ("family", "card"), [p if p in QUICK else pytest.param(*p, marks=pytest.mark.long) for p in PAIRS]
)
def test_answers_about_images_are_those_without_drafts(
    family: str, card: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a prediction that is wrong in every tenth place. Layers that attend to images verify texts alone."""
    monkeypatch.setenv("TRENCADIS_HPU_EMULATOR", "1")
    path = WRITERS[family](tmp_path / "m")
    flags = {"batch_invariant": card in INVARIANT and family != "mllama"}
    plain, none = seen_answers(path, card, None, **flags)
    drafted, accepted = seen_answers(path, card, plain, **flags)
    assert none == 0 and drafted == plain
    assert accepted > 20 * (1 if family == "mllama" else SEEN + 1), accepted
