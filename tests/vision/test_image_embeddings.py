"""Embeddings of images and texts against transformers: GME and VLM2Vec on Qwen2-VL, Qwen3-VL-Embedding."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.oracles.transformers_model import QUESTIONS, Oracle, make_image
from tests.pooling.oracle import LEAST_COSINE, PooledOracle, cosine
from tests.traffic.image_chats import Chat, wire
from tests.traffic.server_process import server
from tests.vision.vision_checkpoints import qwen3_vl
from trencadis import LLM
from trencadis.core.checkpoint.pooling_config_reader import load_model_config
from trencadis.core.engine_config import EngineConfig

TEMPLATES = Path(__file__).resolve().parent.parent.parent / "examples" / "templates"
KINDS = {"gme": "gme_qwen2_vl.jinja", "vlm2vec": "vlm2vec.jinja", "qwen3": ""}
INSTRUCTION = "Represent the user's input."
PIXELS: dict[str, Any] = {"min_pixels": 4096, "max_pixels": 50_176}
BASE: dict[str, Any] = dict(
    runner="pooling", dtype="float32", max_model_len=512, max_num_seqs=4, max_num_batched_tokens=64,
    mm_processor_kwargs=PIXELS, kv_cache_memory_bytes=32 << 20,
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def made(kind: str) -> Path:
        if kind == "qwen3":
            return qwen3_vl(tmp_path_factory.mktemp(kind), experts=True)
        return checkpoint("qwen2_vl")

    return made


def message(rng: np.random.Generator, kind: str) -> Chat:
    """One side of a pair: a text, an image, or both."""
    what = int(rng.integers(3))
    parts: list[dict[str, Any]] = []
    if what:
        parts.append({"type": "image", "image": make_image(rng, low=32, high=250)})
    if what != 1 or kind == "vlm2vec":
        parts.append({"type": "text", "text": QUESTIONS[int(rng.integers(len(QUESTIONS)))]})
    requested: Chat = [{"role": "user", "content": parts}]
    return [{"role": "system", "content": INSTRUCTION}, *requested] if kind == "qwen3" else requested


def pairs(kind: str, count: int) -> list[tuple[Chat, Chat]]:
    rng = np.random.default_rng(len(kind))
    return [(message(rng, kind), message(rng, kind)) for _ in range(count)]


def template(kind: str) -> str | None:
    return (TEMPLATES / KINDS[kind]).read_text(encoding="utf-8") if KINDS[kind] else None


def wanted(oracle: PooledOracle, conversation: Chat, kind: str) -> tuple[list[int], Any]:
    """Ids and the last token's hidden row in transformers."""
    render, own = oracle.tokenizer.apply_chat_template, template(kind)

    def as_ours(messages: Any, **_: Any) -> str:
        return str(render(messages, chat_template=own, tokenize=False, add_generation_prompt=kind == "qwen3"))

    images = [part["image"] for part in conversation[-1]["content"] if part["type"] == "image"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(oracle.tokenizer, "apply_chat_template", as_ours)
        inputs = Oracle.inputs(oracle, conversation, images)
    return inputs["input_ids"][0].tolist(), oracle.pooled(inputs, "last")


@pytest.mark.parametrize("kind", ["qwen3", pytest.param("gme", marks=pytest.mark.long)])
def test_embeddings_of_images_are_those_of_transformers(kind: str, folder: Any) -> None:
    """A share, offline and in chunks: prompts as the template renders them."""
    path = folder(kind)
    oracle = PooledOracle(path, **PIXELS)
    conversations = [conversation for pair in pairs(kind, 3) for conversation in pair]
    prompts = []
    for conversation in conversations:
        text: Any = oracle.tokenizer.apply_chat_template(
            conversation, chat_template=template(kind), tokenize=False, add_generation_prompt=kind == "qwen3"
        )
        images = [part["image"] for part in conversation[-1]["content"] if part["type"] == "image"]
        prompts.append({"prompt": text, **({"multi_modal_data": {"image": images}} if images else {})})
    with LLM(path, **BASE) as llm:
        made = llm.embed(prompts, use_tqdm=False)
        for output, conversation in zip(made, conversations, strict=True):
            ids, row = wanted(oracle, conversation, kind)
            assert output.prompt_token_ids == ids
            assert cosine(output.outputs.embedding, row) > LEAST_COSINE
        assert llm.engine.info().arena_bytes % (4 * 64 * (3 if kind == "qwen3" else 1)) == 0


@pytest.mark.long
@pytest.mark.parametrize("device", ["cpu", "hpu"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_hundred_pairs_over_http(kind: str, device: str, folder: Any, tmp_path: Path) -> None:
    """``/v1/embeddings`` with ``messages`` whose images are data URLs."""
    path, own = folder(kind), template(kind)
    oracle, worst = PooledOracle(path, **PIXELS), 1.0
    flags = ["--runner", "pooling", "--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "4"]
    flags += ["--max-num-batched-tokens", "64", "--mm-processor-kwargs", json.dumps(PIXELS), "--device", device]
    flags += ["--block-size", "64"] if device == "hpu" else ["--kv-cache-memory-bytes", str(32 << 20)]
    flags += ["--chat-template", str(TEMPLATES / KINDS[kind])] if own else []
    environ: dict[str, Any] = {"TRENCADIS_HPU_EMULATOR": "1", "TRENCADIS_CACHE": str(tmp_path)}
    with server(tmp_path, *flags, "--model", str(path), **environ) as running:
        for pair in pairs(kind, 100):
            for conversation in pair:
                body = {
                    "messages": wire(conversation),
                    "add_generation_prompt": kind == "qwen3",
                    "encoding_format": "float",
                }
                answer = running.http.post("/v1/embeddings", json=body)
                assert answer.status_code == 200, answer.text
                ids, row = wanted(oracle, conversation, kind)
                assert answer.json()["usage"]["prompt_tokens"] == len(ids)
                worst = min(worst, cosine(answer.json()["data"][0]["embedding"], row))
    print(f"\n{kind}, {device}: least cosine of 200 embeddings {worst:.9f}")
    assert worst > LEAST_COSINE


def test_a_transformer_of_the_repositorys_own_counts_as_one(folder: Any, tmp_path: Path) -> None:
    """GME's modules.json names a class of its own, which embeds what the template here does not say."""
    path = folder("gme")
    for one in path.iterdir():
        (tmp_path / one.name).symlink_to(one)
    modules = [
        {"path": "", "type": "custom_st.MultiModalTransformer"},
        {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
        {"path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
    ]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode_lasttoken": true}')
    pooling = load_model_config(EngineConfig(model=str(tmp_path))).pooling
    assert pooling is not None and pooling.kind == "last" and pooling.normalize
