"""The families of 2026: greedy tokens of 200 prompts, half of them with images, equal transformers' on any schedule."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.families.text_checkpoints import FORMS, family_checkpoint
from tests.oracles.transformers_model import Answer, assert_same, conversation, same_tokens
from tests.vision import vision_checkpoints
from tests.vision.extra_families.minicpmv import minicpmv
from trencadis import LLM, SamplingParams
from trencadis.backends.conformance.check_model.transformers_oracle import TransformersAnswers
from trencadis.core.checkpoint.config_reader import load_config

LENGTH = 8
SMALL_GEMMA: dict[str, Any] = {
    "use_bidirectional_attention": None, "hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": 344,
    "num_kv_shared_layers": 2, "attention_k_eq_v": False, "use_double_wide_mlp": True,
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24,
}  # fmt: skip
TEXTS: dict[str, Callable[[Path], Path]] = {
    "gpt-oss": partial(family_checkpoint, family="gpt_oss", form="windows of 20 in every second layer"),
    "Nemotron-H": partial(family_checkpoint, family="nemotron_h", form="a part a layer, two groups"),
    "Nemotron-3": partial(family_checkpoint, family="nemotron_h", form="experts, two of four groups, a shared one"),
}
"""Families without images."""

WRITERS: dict[str, Callable[[Path], Path]] = TEXTS | {
    "Gemma-4": vision_checkpoints.gemma4,
    "Gemma-4 with experts": partial(vision_checkpoints.gemma4, **EXPERTS),
    "small Gemma-4": partial(vision_checkpoints.gemma4, **SMALL_GEMMA),
    "GLM-4.1V": vision_checkpoints.glm4v,
    "GLM-4.6V-Flash": partial(vision_checkpoints.glm4v, name="Glm46V"),
    "GLM-OCR": partial(vision_checkpoints.glm4v, name="GlmOcr"),
    "MiniCPM-V 4.6": minicpmv,
    "Qwen3.5": vision_checkpoints.qwen3_5,
    "Qwen3.5 with experts": partial(vision_checkpoints.qwen3_5, experts=True),
    "Qwen3-Next": partial(family_checkpoint, family="qwen3_next", form="interleaved projections"),
    "Granite 4": partial(family_checkpoint, family="granite_hybrid", form=next(iter(FORMS["granite_hybrid"]))),
    "LFM2": partial(family_checkpoint, family="lfm2", form=next(iter(FORMS["lfm2"]))),
}
SCHEDULES: dict[str, dict[str, Any]] = {
    "whole": {"max_num_batched_tokens": 1024}, "chunks of 64": {"max_num_batched_tokens": 64},
    "chunks of 7": {"max_num_batched_tokens": 7, "policy": "padded"}, "chunks of 1": {"max_num_batched_tokens": 1},
    "one by one": {"max_num_seqs": 1}, "emulated hpu": {"device": "hpu", "warmup": "skip", "block_size": 64},
    "cuda twin": {"device": "cuda", "policy": "twin", "warmup": "skip", "block_size": 16},
}  # fmt: skip
IMAGES_IN_ONE_LAUNCH = 96
"""Tokens of a launch that holds an image of Gemma-4 whose tokens see each other, and one token of each row."""


class Answers(TransformersAnswers):
    """transformers' greedy answers, with the distance of the two best logits at each token."""

    def ask(self, ids: list[int], images: list[Any]) -> Answer:
        prompt = torch.tensor([ids])
        marks = (prompt == self._token).long()
        given: dict[str, Any] = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}
        given |= {key: marks for key in ("token_type_ids", "mm_token_type_ids") if key in self._known}
        if images:
            made = dict(self._processor(images=images, return_tensors="pt", **self._arguments))
            given |= {key: value for key, value in made.items() if key in self._known}
        with torch.inference_mode():
            out = self._model.generate(
                **given, max_new_tokens=LENGTH, do_sample=False, eos_token_id=None, pad_token_id=0,
                return_dict_in_generate=True, output_logits=True,
            )  # fmt: skip
        logits = torch.stack([row[0].float() for row in out.logits])
        best = logits.topk(2).values
        return Answer(out.sequences[0, len(ids) :].tolist(), (best[:, 0] - best[:, 1]).tolist(), logits)


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """``asked(family)``: its folder, prompts of ids, chats with images, and transformers' answers by ids."""

    @cache
    def make(family: str) -> tuple[Path, list[list[int]], list[Any], Callable[..., Answer]]:
        path, rng = WRITERS[family](tmp_path_factory.mktemp("family")), np.random.default_rng(3)
        config = load_config(path)
        sees = config.vision is not None
        texts = [rng.integers(0, 300, int(rng.integers(1, 120))).tolist() for _ in range(100 if sees else 200)]
        chats = [conversation(np.random.default_rng(seed), most=2, high=160) for seed in range(160 if sees else 0)]
        some = [one for one in chats if one[1]][:100]
        known: dict[tuple[Any, ...], Answer] = {}
        oracle = Answers(path, config.image_token, ()) if sees else _text_answers(path)

        def answer(ids: list[int], images: list[Any]) -> Answer:
            key = (*ids, *(image.tobytes() for image in images))
            if key not in known:
                known[key] = oracle.ask(ids, images)
            return known[key]

        return path, texts, some, answer

    return make


def _text_answers(path: Path) -> Answers:
    """The same without an image processor."""
    from transformers import AutoModelForCausalLM

    made: Any = Answers.__new__(Answers)
    made._token, made._known = -1, {}
    made._model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    answers: Answers = made
    return answers


def up_to_placeholder(ours: list[int], theirs: Answer, token: int) -> tuple[list[int], Answer]:
    """Cuts both answers behind the first place where transformers drew the placeholder of images.

    There its Gemma-4 goes on as if an image without features stood there, ours as behind any other token.
    """
    end = theirs.tokens.index(token) + 1 if token in theirs.tokens else len(theirs.tokens)
    return ours[:end], Answer(theirs.tokens[:end], theirs.gaps[:end], theirs.logits[:end])


@pytest.mark.long
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("family", WRITERS)
def test_two_hundred_prompts(family: str, schedule: str, asked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRENCADIS_HPU_EMULATOR", "1")
    path, texts, chats, answer = asked(family)
    flags = {"max_num_seqs": 16, **SCHEDULES[schedule]}
    config = load_config(path)
    least = IMAGES_IN_ONE_LAUNCH if "Gemma" in family else 1
    if flags.get("max_num_batched_tokens", 1024) < least:
        chats, flags = [], {**flags, "limit_mm_per_prompt": {"image": 0}}  # an image is computed in one launch
    params = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)
    longest = min(1024, config.text.max_positions)
    llm = LLM(str(path), dtype="float32", max_model_len=longest, kv_cache_memory_bytes=64 << 20, **flags)
    try:
        found = llm.generate(texts, params, use_tqdm=False)
        pairs = [(list(one.outputs[0].token_ids), answer(ids, [])) for one, ids in zip(found, texts, strict=True)]
        if chats:
            shown = llm.chat([messages for messages, _ in chats], params, use_tqdm=False)
            pairs += [
                (list(one.outputs[0].token_ids), answer(list(one.prompt_token_ids), images))
                for one, (_, images) in zip(shown, chats, strict=True)
            ]
        llm.engine.scheduler.check()
    finally:
        llm.close()
    pairs = [up_to_placeholder(*one, config.image_token) for one in pairs]
    ties = sum(same_tokens(*one) == "tie" for one in pairs)
    print(f"\n{family}, {schedule}: {len(pairs)} prompts, {len(chats)} with images, {ties} ties")
    assert_same(pairs)
