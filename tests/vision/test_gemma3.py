"""Gemma-3 with images against transformers: pixels, the tower, chats whose images see themselves, mistakes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.hostile.altered_config import altered
from tests.oracles.transformers_model import Answer, assert_same, conversation, make_image
from tests.vision.family_harness import DEVICES, VARIANTS, FamilyHarness
from tests.vision.tiled_families import prepared, worst_row
from tests.vision.vision_checkpoints import GEMMA_TOKENS, IMAGE, gemma3
from trencadis import LLM, SamplingParams
from trencadis.core.checkpoint.config_reader import load_config
from trencadis.core.checkpoint.model_registry import image_needs, image_processor
from trencadis.core.errors import BadRequest, StartupError
from trencadis.core.shapes.rectangular_launches import shift_spans, uncut

BAR = 1e-5
LARGEST = 1024
BASE: dict[str, Any] = dict(
    dtype="float32", max_model_len=1024, max_num_seqs=4, kv_cache_memory_bytes=32 << 20, max_num_batched_tokens=256
)
FORMS: dict[str, dict[str, Any]] = {
    "16 of 256 patches": {"image": 224, "tokens": 16},
    "a window below an image": {"image": 224, "tokens": 64, "sliding_window": 8, "seed": 2},
    "untied, full layers": {
        "seed": 3, "tie_word_embeddings": False, "num_hidden_layers": 2, "layer_types": ["full_attention"] * 2,
    },
}  # fmt: skip
SCHEDULES = {
    name: {**flags, **({"max_num_batched_tokens": 66} if flags.get("max_num_batched_tokens") == 7 else {})}
    for name, flags in VARIANTS.items()
}
"""A chunk of 7 tokens would hold no image."""


@pytest.fixture(scope="module")
def form(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return cache(lambda name: gemma3(tmp_path_factory.mktemp("gemma3"), **FORMS[name]))


@pytest.fixture(scope="module")
def path(form: Callable[[str], Path]) -> Path:
    return form("16 of 256 patches")


def values_of(path: Path, images: list[Any]) -> torch.Tensor:
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    found: torch.Tensor = Gemma3ImageProcessorPil.from_pretrained(path)(images, return_tensors="pt")["pixel_values"]
    return found


def rows_of(path: Path, model: Any, image: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.model.get_image_features(values_of(path, [image])).pooler_output[0]
    return found


def packings(path: Path, harness: FamilyHarness, model: Any, count: int, seed: int) -> float:
    rng, worst = np.random.default_rng(seed), 0.0
    for _ in range(count):
        shown = [make_image(rng, high=700) for _ in range(int(rng.integers(1, 4)))]
        pairs = [(prepared(path, one), rows_of(path, model, one)) for one in shown]
        worst = max(worst, worst_row(harness, pairs, rng, 64 * int(rng.integers(0, 4))))
    return worst


@pytest.mark.parametrize("device", DEVICES)
def test_rows_of_the_tower_equal_transformers(device: str, path: Path, oracle: Any) -> None:
    worst = packings(path, FamilyHarness(path, device, LARGEST, 257), oracle(path), 2, 1)
    print(f"{device}: worst {worst:.1e} of the largest value")
    assert worst <= BAR


@pytest.mark.long
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("device", DEVICES)
def test_two_hundred_images(device: str, name: str, form: Any, oracle: Any) -> None:
    folder = form(name)
    side = load_config(folder).vision.side  # type: ignore[union-attr]
    harness = FamilyHarness(folder, device, LARGEST, side**2 + 1)
    worst = packings(folder, harness, oracle(folder), 15 if device == "twin" else 100, 4)
    print(f"{name}, {device}: worst {worst:.1e} of the largest value")
    assert worst <= BAR


def same_pixels(path: Path, count: int) -> None:
    ours = image_processor(load_config(path), {})
    for seed in range(count):
        image = make_image(np.random.default_rng(seed), high=900)
        want, found = values_of(path, [image])[0].numpy(), ours.prepare(image, "d")
        channel = np.repeat(np.arange(3), ours.patch**2)
        assert (
            ours.normalised_values[channel, found.items[0].pixels] == ours.cut_patches(want.transpose(1, 2, 0))
        ).all()
        assert found.tokens == ours.rows_per_tile and found.resized == (ours.image, ours.image)


def test_pixels_equal_the_processors_bit_for_bit(path: Path) -> None:
    same_pixels(path, 6)


@pytest.mark.long
def test_pixels_of_two_hundred_images(path: Path) -> None:
    same_pixels(path, 200)


class GemmaOracle:
    """A checkpoint in transformers, prompts written as its processor writes them."""

    def __init__(self, path: Path) -> None:
        from transformers import AutoModelForImageTextToText, AutoTokenizer

        self.path, self.tokens = path, load_config(path).vision.rows_per_tile  # type: ignore[union-attr]
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self.model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()

    def inputs(self, messages: Any, images: list[Any]) -> dict[str, torch.Tensor]:
        soft, begin, end = GEMMA_TOKENS
        text: Any = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        text = text.replace(begin, f"\n\n{begin}{soft * self.tokens}{end}\n\n")
        made = dict(self.tokenizer(text, return_tensors="pt", add_special_tokens=False))
        made = {name: made[name] for name in ("input_ids", "attention_mask")}
        made["token_type_ids"] = made["input_ids"].eq(IMAGE).int()
        return made | ({"pixel_values": values_of(self.path, images)} if images else {})

    def answer(self, inputs: dict[str, torch.Tensor], length: int) -> Answer:
        with torch.inference_mode():
            out: Any = self.model.generate(
                **inputs, max_new_tokens=length, do_sample=False, return_dict_in_generate=True, output_logits=True
            )
        logits = torch.stack([x[0].float() for x in out.logits])
        best = logits.topk(2).values
        tokens = out.sequences[0, inputs["input_ids"].shape[1] :].tolist()
        return Answer(tokens, (best[:, 0] - best[:, 1]).tolist(), logits)


def chats(folder: Path, seeds: range, **flags: Any) -> None:
    """Ids equal, and the same tokens as transformers; twice, so that prefixes end inside images."""
    oracle = GemmaOracle(folder)
    llm = LLM(str(folder), **{**BASE, **flags})
    try:
        requested = []
        for seed in seeds:
            messages, images = conversation(np.random.default_rng(seed), low=32, high=300)
            inputs = oracle.inputs(messages, images)
            requested.append((messages, inputs, oracle.answer(inputs, 6)))
        for _ in range(2):
            conversations = [m for m, _, _ in requested]
            got = llm.chat(conversations, SamplingParams(temperature=0, max_tokens=6), use_tqdm=False)
            for output, (_, inputs, _) in zip(got, requested, strict=True):
                assert output.prompt_token_ids == inputs["input_ids"][0].tolist()
            assert sum(o.num_image_tokens > 0 for o in got) >= len(got) // 2
            assert_same([(o.outputs[0].token_ids, answer) for o, (_, _, answer) in zip(got, requested, strict=True)])
        llm.engine.scheduler.check()
    finally:
        llm.close()


@pytest.mark.parametrize("variant", ["padded, chunks of 7", "emulated hpu"])
def test_chats_answer_as_transformers(variant: str, form: Any, monkeypatch: Any) -> None:
    """A share: two forms, each on one of the schedules and devices."""
    monkeypatch.setenv("TRENCADIS_HPU_EMULATOR", "1")
    name = list(FORMS)[list(SCHEDULES).index(variant) % len(FORMS)]
    chats(form(name), range(4), **{**SCHEDULES[variant], "max_num_seqs": 2})


@pytest.mark.long
@pytest.mark.parametrize("variant", SCHEDULES)
@pytest.mark.parametrize("name", FORMS)
def test_forty_chats(variant: str, name: str, form: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("TRENCADIS_HPU_EMULATOR", "1")
    chats(form(name), range(100, 140), **{**SCHEDULES[variant], "max_num_seqs": 2})


@pytest.mark.long
def test_forty_chats_on_two_ranks(path: Path) -> None:
    chats(path, range(100, 140), tensor_parallel_size=2)


def test_no_chunk_ends_inside_an_image(path: Path) -> None:
    """Three images under the least budget, whose steps would otherwise end anywhere."""
    rng = np.random.default_rng(1)
    parts: list[dict[str, Any]] = [{"type": "text", "text": "one two three four"}]
    for _ in range(3):
        parts += [{"type": "image", "image": make_image(rng, low=32, high=90)}, {"type": "text", "text": "and?"}]
    llm = LLM(str(path), **{**BASE, "max_num_batched_tokens": 18, "max_num_seqs": 2})
    seen: list[tuple[int, int]] = []
    all_images: list[tuple[int, int]] = []
    schedule = llm.engine.scheduler.schedule

    def watched() -> Any:
        step = schedule()
        for row in step.rows if step is not None else ():
            seen.append((row.context, row.context + len(row.tokens)))
            all_images.extend((row.context + s.start, row.context + s.stop) for s in row.spans)
        return step

    llm.engine.scheduler.schedule = watched  # type: ignore[method-assign]
    try:
        out = llm.chat([{"role": "user", "content": parts}], SamplingParams(max_tokens=3), use_tqdm=False)[0]
    finally:
        llm.close()
    ids = out.prompt_token_ids
    starts = [i for i, token in enumerate(ids) if token == IMAGE and ids[i - 1] != IMAGE]
    assert all_images == [(start, start + 16) for start in starts] and len(starts) == 3
    assert len([end for _, end in seen if end <= len(ids)]) > 4
    assert not any(start < end < start + 16 for _, end in seen for start in starts)


def test_launches_are_cut_between_images() -> None:
    spans = ((4, 20), (25, 41))
    assert [uncut(n, spans) for n in (3, 4, 5, 19, 20, 22, 30, 41)] == [3, 4, 4, 4, 20, 22, 25, 41]
    assert uncut(7, ((0, 16),)) == 16 and uncut(7, ((-3, 16),)) == 16
    assert shift_spans(spans, 10) == ((-6, 10), (15, 31)) and shift_spans(spans, 20) == ((5, 21),)


def test_a_budget_below_an_image_is_refused(path: Path) -> None:
    with pytest.raises(StartupError, match=r"--max-num-batched-tokens \(19\) must be at least 20, its 16 tokens"):
        LLM(str(path), **{**BASE, "max_num_batched_tokens": 19})


MISTAKES: dict[str, Callable[[Any], None]] = {}


def mistake(name: str) -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
    def note(plant: Callable[[Any], None]) -> Callable[[Any], None]:
        MISTAKES[name] = plant
        return plant

    return note


@mistake("nothing")
def _nothing(llm: Any) -> None:
    pass


@mistake("images causal")
def _causal(llm: Any) -> None:
    schedule = llm.engine.scheduler.schedule

    def blind() -> Any:
        step = schedule()
        return step and replace(step, rows=tuple(replace(row, spans=()) for row in step.rows))

    llm.engine.scheduler.schedule = blind


@mistake("rows scaled as embeddings")
def _scaled(llm: Any) -> None:
    llm.engine.executor._rank.model.enter.takes_images = False


@mistake("one layer too few")
def _fewer(llm: Any) -> None:
    llm.engine.executor._rank.model.blocks.pop()


@mistake("the norm's weight without its one")
def _norm(llm: Any) -> None:
    llm.engine.executor._rank.model.projector.cell_norm.weight.sub_(1)


@mistake("patches row by row")
def _raster(llm: Any) -> None:
    tower = llm.engine.executor._rank.model.tower
    object.__setattr__(tower, "patch_positions", np.arange(tower.side**2, dtype=np.int32))


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_shows(name: str, path: Path) -> None:
    oracle = GemmaOracle(path)
    rng = np.random.default_rng(3)
    image = make_image(rng, low=32, high=200)
    messages = [{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": "What?"}]}]
    answer = oracle.answer(oracle.inputs(messages, [image]), 1)
    llm = LLM(str(path), **BASE)
    try:
        MISTAKES[name](llm)
        got = llm.chat(messages, SamplingParams(temperature=0, max_tokens=1, logprobs=5), use_tqdm=False)[0]
        first = got.outputs[0].logprobs[0]  # type: ignore[index]
        want = answer.logits[0].log_softmax(-1)
        off = max(abs(one.logprob - float(want[token])) for token, one in first.items())
        assert (off > 1e-3) == (name != "nothing"), off
    finally:
        llm.close()


def test_a_raw_prompt_gets_its_newlines(path: Path) -> None:
    """As in vLLM's offline examples, with the text around read together with them."""
    image = make_image(np.random.default_rng(4), low=32, high=90)
    oracle = GemmaOracle(path)
    soft, begin, end = GEMMA_TOKENS
    text = f"user\n{begin}\nWhat is it?"
    whole = text.replace(begin, f"\n\n{begin}{soft * 16}{end}\n\n")
    want = oracle.tokenizer(whole, add_special_tokens=False)["input_ids"]
    llm = LLM(str(path), **BASE)
    try:
        got = llm.generate({"prompt": text, "multi_modal_data": {"image": image}}, SamplingParams(max_tokens=1))[0]
        assert got.prompt_token_ids == want
        with pytest.raises(BadRequest, match=r"without an image|placed"):
            llm.generate(text, SamplingParams(max_tokens=1))
        typed = [{"role": "user", "content": f"{begin} is text"}]
        plain = llm.chat(typed, SamplingParams(max_tokens=1), use_tqdm=False)[0].prompt_token_ids
        assert IMAGE + 1 not in plain
    finally:
        llm.close()


@pytest.mark.parametrize(("file", "key", "value", "named"), [
    ("config.json", "mm_tokens_per_image", 9, "mm_tokens_per_image"),
    ("config.json", "mm_tokens_per_image", 15, "mm_tokens_per_image"),
    ("config.json", "vision_config.model_type", "clip_vision_model", "model_type"),
    ("config.json", "text_config.model_type", "gemma2", "model_type"),
    ("config.json", "vision_config.num_attention_heads", 5, "num_attention_heads"),
    ("config.json", "vision_config.image_size", 225, "patch_size"),
    ("config.json", "image_token_index", 10**6, "image_token_index"),
    ("config.json", "boi_token_index", -1, "boi_token_index"),
    ("preprocessor_config.json", "do_pan_and_scan", True, "do_pan_and_scan"),
    ("preprocessor_config.json", "size", {"height": 224, "width": 112}, "width"),
    ("preprocessor_config.json", "resample", 3, "resample"),
    ("preprocessor_config.json", "image_seq_length", 256, "image_seq_length"),
])  # fmt: skip
def test_a_value_that_is_not_implemented_is_refused(
    file: str, key: str, value: Any, named: str, path: Path, tmp_path: Path
) -> None:
    folder = altered(path, tmp_path / "altered", file, key, value)
    with pytest.raises(StartupError) as refused:
        image_processor(load_config(folder), {})
    assert named in str(refused.value) and "\n" not in str(refused.value)


def test_every_image_is_a_tile(path: Path) -> None:
    needs = image_needs(load_config(path), {})
    assert (needs.slots, needs.tile, needs.tokens) == (256, 256, 16)
    with pytest.raises(StartupError, match="max_pixels does not apply"):
        image_needs(load_config(path), {"max_pixels": 50_000})
