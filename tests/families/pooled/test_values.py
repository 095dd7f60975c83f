"""The models that pool, each against transformers in float32: on every device, alone and in batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.families.pooled.models import MODELS, STEP
from tests.families.pooled.pooled_case import PoolingModel
from tests.pooling.oracle import LEAST_COSINE, cosine
from trencadis import LLM, PoolingParams
from trencadis.backends.conformance.check_model.checkpoint_checks import CheckedModel, run
from trencadis.core.checkpoint import pooling_config_reader
from trencadis.core.errors import BadRequest

BASE: dict[str, Any] = dict(
    dtype="float32", max_model_len=160, max_num_seqs=16, max_num_batched_tokens=256, kv_cache_memory_bytes=32 << 20
)
DEVICES: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "cpu": ({}, {}),
    "padded": ({"policy": "padded"}, {}),
    "hpu": ({"device": "hpu", "block_size": 64}, {"TRENCADIS_HPU_EMULATOR": "1"}),
    "hpu, compiled": (
        {"device": "hpu", "block_size": 64},
        {"TRENCADIS_HPU_EMULATOR": "1", "PT_HPU_LAZY_MODE": "0"},
    ),
    "twin": ({"device": "cuda", "policy": "twin"}, {"TRENCADIS_CUDA_TWIN": "1"}),
}
Values = tuple[float, float]
BATCH = 16
LEAST = 1e-5
"""Of the largest value: how far from transformers' a value may be."""


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of one model's checkpoint, written once."""
    folders: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in folders:
            folders[name] = MODELS[name].make(tmp_path_factory.mktemp("pooled") / "model")
        return folders[name]

    return folder


@contextmanager
def engine(path: Path, model: PoolingModel, device: str, monkeypatch: Any, cache: Path) -> Iterator[LLM]:
    settings, environ = DEVICES[device]
    for name, value in {"TRENCADIS_CACHE": str(cache), **environ}.items():
        monkeypatch.setenv(name, value)
    with LLM(path, **{**BASE, **settings, **model.flags}) as llm:
        yield llm


def compilations(llm: LLM, run: Callable[[], Values]) -> tuple[Values, int]:
    """What ``run`` gives, and how much was compiled meanwhile: by the engine's count, and on Gaudi by the card's."""
    rank = llm.engine.executor._rank  # type: ignore[attr-defined]
    bridge = getattr(rank.backend, "bridge", None)
    with bridge.metric_localcontext("graph_compilation") if bridge is not None else nullcontext() as metric:
        found = run()
    compiled = 0 if bridge is None else int(bridge.compilations(metric))
    return found, compiled + rank.graphs.recompiles + rank.graphs.lazy_compiles


def prompts(seed: int, count: int) -> list[list[int]]:
    """Of 1 to 150 tokens, some of which end a step."""
    rng = np.random.default_rng(seed)
    found = [[int(t) for t in rng.integers(5, 300, int(np.exp(rng.uniform(0, np.log(150)))))] for _ in range(count)]
    for ids in found[::2]:
        ids += [STEP]
    return found


def worst(llm: LLM, path: Path, model: PoolingModel, requested: list[list[int]]) -> tuple[float, float]:
    """The largest difference to transformers as a share of the largest value, and the least cosine of a vector."""
    far, near = 0.0, 1.0
    batches = [requested[i : i + BATCH] for i in range(0, len(requested), BATCH)]
    alone = [llm.encode({"prompt_token_ids": ids}, use_tqdm=False)[0] for ids in requested]
    together = [o for b in batches for o in llm.encode([{"prompt_token_ids": ids} for ids in b], use_tqdm=False)]
    for ids, *outputs in zip(requested, alone, together, strict=True):
        want = model.wants(path, ids)
        for output in outputs:
            got = output.outputs.data
            assert got.shape == want.shape
            if want.size:
                far = max(far, float(np.abs(got - want).max() / max(np.abs(want).max(), 1.0)))
            if want.ndim == 1 and want.size > 8:
                near = min(near, cosine(got, want))
    return far, near


QUICK = {
    "e5-mistral": "cpu", "Qwen3-Embedding": "padded", "Qwen3-Reranker": "twin", "Qwen3-Reranker, converted": "padded",
    "Qwen2.5-Math-RM": "padded", "Qwen2.5-Math-PRM": "cpu",
    "bge": "padded", "MiniLM, old names": "cpu", "BERT reranker": "cpu", "bge-m3": "twin", "bge-reranker": "hpu",
}  # fmt: skip
"""The device of each model in `make test`."""


@pytest.mark.parametrize("name", QUICK)
def test_values_are_those_of_transformers(name: str, made: Any, monkeypatch: Any, tmp_path: Path) -> None:
    path, model = made(name), MODELS[name]
    with engine(path, model, QUICK[name], monkeypatch, tmp_path) as llm:
        (far, near), compiled = compilations(llm, lambda: worst(llm, path, model, prompts(1, 6)))
    assert far < LEAST and near > LEAST_COSINE and not compiled


@pytest.mark.long
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MODELS)
def test_200_prompts_have_the_values_of_transformers(
    name: str, device: str, made: Any, monkeypatch: Any, tmp_path: Path
) -> None:
    """400 requests, alone and in batches; on a card with graphs nothing is compiled after the warm-up."""
    path, model = made(name), MODELS[name]
    with engine(path, model, device, monkeypatch, tmp_path) as llm:
        (far, near), compiled = compilations(llm, lambda: worst(llm, path, model, prompts(2, 200)))
    print(f"\n{name}, {device}: off by {far:.1e} of the largest, cosine {near:.9f}, {compiled} compilations")
    assert far < LEAST and near > LEAST_COSINE and not compiled


MISTAKES: dict[str, tuple[str, dict[str, Any]]] = {
    "the first token": ("e5-mistral", {"kind": "first"}),
    "the mean": ("e5-mistral", {"kind": "mean"}),
    "not normalised": ("e5-mistral", {"normalize": False}),
    "the mean of Qwen3": ("Qwen3-Embedding", {"kind": "mean"}),
    "Qwen3 not normalised": ("Qwen3-Embedding", {"normalize": False}),
    "Qwen3 cut": ("Qwen3-Embedding", {"dimensions": (), "default_dimensions": 63}),
    "words the wrong way": ("Qwen3-Reranker", {"label_tokens": (65, 64)}),
    "a sigmoid of each word": ("Qwen3-Reranker", {"activation": "sigmoid"}),
    "scores of the first token": ("Qwen3-Reranker, converted", {"kind": "first"}),
    "logits for probabilities": ("Qwen3-Reranker, converted", {"activation": "identity"}),
    "a bias too many": ("Qwen3-Reranker, converted", {"bias": 0.1}),
    "tanh for relu": ("Qwen2.5-Math-RM", {"inner": "tanh"}),
    "biases dropped": ("Qwen2.5-Math-RM", {"biased": False}),
    "rewards squeezed": ("Qwen2.5-Math-RM", {"activation": "sigmoid"}),
    "another step": ("Qwen2.5-Math-PRM", {"step_tag": STEP + 1}),
    "steps not squeezed": ("Qwen2.5-Math-PRM", {"activation": "identity"}),
}
"""What a checkpoint's pooling could be mistaken for."""


SAMPLE = {name: mistake for mistake, (name, _) in reversed(MISTAKES.items())}.values()
"""One of each model, in `make test`."""


@pytest.mark.parametrize("mistake", [pytest.param(m, marks=() if m in SAMPLE else pytest.mark.long) for m in MISTAKES])
def test_a_mistake_in_the_settings_shows(mistake: str, made: Any, monkeypatch: Any, tmp_path: Path) -> None:
    name, wrong = MISTAKES[mistake]
    path, model, right = made(name), MODELS[name], pooling_config_reader.pooling_of

    def mistaken(config: Any, found: Any) -> Any:
        pooling = right(config, found)
        assert pooling is not None
        changed = replace(pooling, **wrong)
        assert changed != pooling
        return changed

    monkeypatch.setattr(pooling_config_reader, "pooling_of", mistaken)
    requested = [[*range(20 + i, 60), STEP, STEP + 1, 9, 8] for i in range(2)]
    with engine(path, model, "cpu", monkeypatch, tmp_path) as llm:
        for ids in requested:
            got = llm.encode({"prompt_token_ids": ids}, use_tqdm=False)[0].outputs.data
            want = model.wants(path, ids)
            assert got.shape != want.shape or np.abs(got - want).max() > 1e-3 * np.abs(want).max()


def test_every_token_of_an_embedding_model_has_its_own_row(made: Any, monkeypatch: Any, tmp_path: Path) -> None:
    """In chunks of 7 tokens, beside requests for one vector: the last row is that vector."""
    path, model = made("e5-mistral"), MODELS["e5-mistral"]
    ids = [int(t) for t in np.random.default_rng(3).integers(5, 300, 60)]
    small = PoolingModel(model.make, model.wants, {"max_num_batched_tokens": 7})
    with engine(path, small, "cpu", monkeypatch, tmp_path) as llm:
        requested = [{"prompt_token_ids": ids[:n]} for n in (60, 31)]
        params = [PoolingParams(task="token_embed"), PoolingParams()]
        rows, last = (o.outputs.data for o in llm.encode(requested, params, use_tqdm=False))
        assert rows.shape == (60, 64) and last.shape == (64,)
        assert cosine(rows[30], last) > LEAST_COSINE and cosine(rows[59], model.wants(path, ids)) > LEAST_COSINE
        with pytest.raises(BadRequest, match="does 'embed' and 'token_embed'"):
            llm.reward("a")


def test_reward_is_a_call_of_its_own(made: Any, monkeypatch: Any, tmp_path: Path) -> None:
    path, model = made("Qwen2.5-Math-RM"), MODELS["Qwen2.5-Math-RM"]
    with engine(path, model, "cpu", monkeypatch, tmp_path) as llm:
        (output,) = llm.reward({"prompt_token_ids": [5, 6, 7]}, use_tqdm=False)
        assert np.abs(output.outputs.data - model.wants(path, [5, 6, 7])).max() < LEAST
        for call in (llm.embed, llm.classify):
            with pytest.raises(BadRequest, match="does 'token_classify'"):
                call("a")
        with pytest.raises(BadRequest, match="token_classify"):
            llm.score("a", "b")


@pytest.mark.long
@pytest.mark.parametrize("name", [n for n in MODELS if "Math" not in n])
def test_check_model_passes(name: str, made: Any) -> None:
    """transformers has no class of the reward models, whose code lies in their repositories."""
    path = made(name)
    results = run(CheckedModel(path, path)).results
    print(f"\n{name}:", ", ".join(f"{r.name} {r.status}" for r in results))
    assert not [r for r in results if r.status == "fail"] and sum(r.status == "pass" for r in results) >= 6
