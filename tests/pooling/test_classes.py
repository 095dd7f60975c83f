"""Class heads, yes/no logits and cosines against transformers in float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.oracles.transformers_model import make_image
from tests.pooling.oracle import LEAST_COSINE, PooledOracle, class_logits, cosine
from trencadis import LLM, PoolingParams
from trencadis.assets import demo_path
from trencadis.core.errors import BadRequest

BASE: dict[str, Any] = dict(dtype="float32", max_model_len=512, max_num_seqs=4, max_num_batched_tokens=64)
PAIRS = [("a red circle", "The circle is red."), ("where is it", "nowhere, 2026"), ("x", "y")]


def softmax(x: Any) -> Any:
    e = np.exp(x - np.max(x))
    return e / e.sum()


def sigmoid(x: float) -> float:
    return float(1 / (1 + np.exp(-x)))


@pytest.mark.parametrize("kind", ["Qwen2", "Llama"])
def test_classes_are_those_of_transformers(kind: str, checkpoint: Callable[..., Path]) -> None:
    path = checkpoint("classifier", family=kind)
    rng = np.random.default_rng(0)
    prompts = [[int(t) for t in rng.integers(5, 250, n)] for n in (1, 9, 90)]
    wanted = [class_logits(path, p) for p in prompts]
    with LLM(path, **BASE) as llm:
        assert llm.service.config.pooling is not None
        made = llm.classify([{"prompt_token_ids": p} for p in prompts], use_tqdm=False)
        plain = PoolingParams(use_activation=False)
        raw = llm.encode([{"prompt_token_ids": p} for p in prompts], plain, use_tqdm=False)
        with pytest.raises(BadRequest, match="one class"):
            llm.score("a", "b")
        with pytest.raises(BadRequest, match="classify"):
            llm.embed("a")
    for output, values, logits in zip(made, raw, wanted, strict=True):
        assert output.outputs.num_classes == 3
        np.testing.assert_allclose(output.outputs.probs, softmax(logits), atol=1e-6)
        assert cosine(values.outputs.data, logits) > LEAST_COSINE


def test_a_head_with_one_class_scores_pairs(checkpoint: Callable[..., Path]) -> None:
    path = checkpoint("classifier", labels=1)
    with LLM(path, **BASE) as llm:
        made = llm.score([q for q, _ in PAIRS], [d for _, d in PAIRS], use_tqdm=False)
        encode = llm.get_tokenizer().encode
        for (query, document), output in zip(PAIRS, made, strict=True):
            assert output.prompt_token_ids == encode(query) + encode(document)
            (logit,) = class_logits(path, output.prompt_token_ids)
            assert abs(output.outputs.score - sigmoid(logit)) < 1e-6
        cut = llm.score("a b c", "d e f", truncate_prompt_tokens=3, use_tqdm=False)
        assert len(cut[0].prompt_token_ids) == 3


def test_a_decoder_without_a_head_embeds_as_the_same_model_with_one_does(checkpoint: Callable[..., Path]) -> None:
    """Names without a prefix, and no runner named: the checkpoint can do nothing else."""
    path = checkpoint("bare")
    tokens = [9, 8, 7, 100, 6]
    with LLM(path, **BASE) as llm:
        (made,) = llm.embed({"prompt_token_ids": tokens}, use_tqdm=False)
    from transformers import AutoModel

    model = AutoModel.from_pretrained(path, dtype=torch.float32).eval()
    with torch.inference_mode():
        wanted = model(input_ids=torch.tensor([tokens])).last_hidden_state[0, -1]
    assert cosine(made.outputs.embedding, wanted) > LEAST_COSINE


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("hpu", marks=pytest.mark.long), pytest.param("cuda", marks=pytest.mark.long)]
)
@pytest.mark.parametrize("count", [2, pytest.param(100, marks=pytest.mark.long)])
def test_a_chat_model_scores_by_its_yes_and_no(
    device: str, count: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The demo, whose words are No and Yes, with images on either side: the logits that transformers has there."""
    for name, value in {"TRENCADIS_HPU_EMULATOR": "1", "TRENCADIS_CUDA_TWIN": "1", "TRENCADIS_CACHE": tmp_path}.items():
        monkeypatch.setenv(name, str(value))
    oracle, rng, least = PooledOracle(demo_path(), max_pixels=50_176), np.random.default_rng(3), 0.0
    options: dict[str, Any] = {"device": device} | ({"policy": "twin"} if device == "cuda" else {})
    with LLM(demo_path(), convert="classify", **BASE, **options, mm_processor_kwargs={"max_pixels": 50_176}) as llm:
        pooling = llm.service.config.pooling
        assert pooling is not None and pooling.labels == ("No", "Yes")
        no, yes = pooling.label_tokens
        for i in range(count):
            image = make_image(rng, low=28, high=200)
            query: Any = {"content": [{"type": "image", "image": image}]} if i % 2 else "Is there a red circle?"
            document: Any = "a red circle" if i % 2 else {"content": [{"type": "image", "image": image}]}
            (made,) = llm.score(query, document, use_tqdm=False)
            logits = oracle.logits(with_image(oracle, made.prompt_token_ids, image))
            least = max(least, abs(made.outputs.score - sigmoid(logits[yes] - logits[no])))
    print(f"{device}: {count} pairs, scores differ by at most {least:.2e}")
    assert least < 2e-5


def with_image(oracle: PooledOracle, tokens: list[int], image: Image.Image) -> dict[str, torch.Tensor]:
    made = oracle.images(images=[image], return_tensors="pt", **oracle.pixels)
    ids = torch.tensor([tokens])
    pad: Any = oracle.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    assert int(ids.eq(pad).sum()) == int(made["image_grid_thw"][0].prod()) // 4
    return {
        "input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": ids.eq(pad).int(),
        "pixel_values": made["pixel_values"], "image_grid_thw": made["image_grid_thw"],
    }  # fmt: skip


def test_embeddings_score_by_their_cosine(checkpoint: Callable[..., Path]) -> None:
    with LLM(checkpoint("qwen2"), runner="pooling", **BASE) as llm:
        vectors = {t: llm.embed(t, use_tqdm=False)[0].outputs.embedding for pair in PAIRS for t in pair}
        made = llm.score(PAIRS[0][0], [d for _, d in PAIRS], use_tqdm=False)
        for (_, document), output in zip(PAIRS, made, strict=True):
            assert abs(output.outputs.score - cosine(vectors[PAIRS[0][0]], vectors[document])) < 1e-6
        cut = llm.embed("a b c d e f", tokenization_kwargs={"truncate_prompt_tokens": 2}, use_tqdm=False)
        assert len(cut[0].prompt_token_ids) == 2
        with pytest.raises(BadRequest, match="2 queries"):
            llm.score(["a", "b"], ["a", "b", "c"])
        with pytest.raises(BadRequest, match="generate"):
            llm.generate("a")
