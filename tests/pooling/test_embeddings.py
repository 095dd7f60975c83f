"""Embeddings against transformers in float32: every device, batched or alone, in chunks, cached or not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.pooling.oracle import LEAST_COSINE, PooledOracle, ask, cosine
from trencadis import LLM
from trencadis.assets import demo_path
from trencadis.core.buckets import Stage
from trencadis.core.errors import StartupError

KINDS = {"last": "LAST", "mean": "MEAN", "first": "CLS"}
BASE: dict[str, Any] = dict(
    runner="pooling", dtype="float32", max_model_len=512, max_num_seqs=4, max_num_batched_tokens=256,
    mm_processor_kwargs={"max_pixels": 50_176}, kv_cache_memory_bytes=64 << 20,
)  # fmt: skip
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "cpu": ({}, {}),
    "chunks of 7, depth 1": ({"max_num_batched_tokens": 7, "async_depth": 1}, {}),
    "padded": ({"policy": "padded", "max_num_batched_tokens": 33}, {}),
    "hpu": ({"device": "hpu", "block_size": 64}, {"TRENCADIS_HPU_EMULATOR": "1"}),
    "hpu, compiled": (
        {"device": "hpu", "block_size": 64}, {"TRENCADIS_HPU_EMULATOR": "1", "PT_HPU_LAZY_MODE": "0"},
    ),
    "twin": ({"device": "cuda", "policy": "twin"}, {"TRENCADIS_CUDA_TWIN": "1"}),
}  # fmt: skip
QUICK = ("chunks of 7, depth 1", "padded", "twin")
"""The emulated card is started once in `make test`, by the test of mixed requests."""


@cache
def oracle(path: Path) -> PooledOracle:
    return PooledOracle(path, max_pixels=50_176)


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., LLM]]:
    """``start(path, "hpu", pooler_config=...)``: an engine that pools, on a device."""
    made: list[LLM] = []

    def make(path: Path, variant: str, **options: Any) -> LLM:
        settings, environ = VARIANTS[variant]
        for name, value in {"TRENCADIS_CACHE": str(tmp_path), "VLLM_MULTIMODAL_BUCKETS": "256", **environ}.items():
            monkeypatch.setenv(name, value)
        made.append(LLM(path, **{**BASE, **settings, **options}))
        return made[-1]

    yield make
    for llm in made:
        llm.close()


def check(llm: LLM, path: Path, kind: str, seeds: range, high: int = 200) -> float:
    """Alone, together and (for the last token) from the prefix cache; returns the least cosine to transformers."""
    prompts, inputs = zip(*(ask(oracle(path), seed, high) for seed in seeds), strict=True)
    wanted = [oracle(path).pooled(one, kind) for one in inputs]
    rounds = [llm.embed([p], use_tqdm=False)[0] for p in prompts], llm.embed(list(prompts), use_tqdm=False)
    for made in rounds:
        for output, one in zip(made, inputs, strict=True):
            assert output.prompt_token_ids == one["input_ids"][0].tolist()
            assert abs(np.linalg.norm(output.outputs.embedding) - 1) < 1e-6
    cached = sum(o.num_cached_tokens for o in rounds[1])
    if llm.engine.info().block_size < 64:
        assert (cached > 0) == (kind == "last"), "pooling over the whole prompt reads no prefix"
    llm.engine.scheduler.check()
    return min(cosine(o.outputs.embedding, w) for made in rounds for o, w in zip(made, wanted, strict=True))


@pytest.mark.parametrize("variant", QUICK)
def test_embeddings_are_those_of_transformers(variant: str, vl_checkpoint: Path, start: Callable[..., LLM]) -> None:
    """The mean where the prompt comes in chunks, the last token where it comes from the cache too."""
    kind = "mean" if variant == "chunks of 7, depth 1" else "last"
    llm = start(vl_checkpoint, variant, pooler_config={"pooling_type": KINDS[kind]})
    assert check(llm, vl_checkpoint, kind, range(5)) > LEAST_COSINE
    runner = llm.engine.executor._rank  # type: ignore[attr-defined]
    if runner.plan.buckets:
        assert runner.plan.of(Stage.POOL) and not runner.plan.of(Stage.SAMPLE) and not runner.plan.of(Stage.RESET)
        assert runner.graphs.recompiles == 0 and runner.graphs.lazy_compiles == 0


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_300_embeddings_of_the_demo_are_those_of_transformers(
    variant: str, kind: str, start: Callable[..., LLM]
) -> None:
    llm = start(demo_path(), variant, pooler_config={"pooling_type": KINDS[kind]})
    least = check(llm, demo_path(), kind, range(300), high=300)
    print(f"{variant}, {kind}: cosine at least {least:.9f}")
    assert least > LEAST_COSINE


@pytest.mark.parametrize("count", [40, pytest.param(2000, marks=pytest.mark.long)])
def test_mixed_requests_compile_nothing_and_miss_no_bucket_after_warm_up(
    count: int, vl_checkpoint: Path, start: Callable[..., LLM]
) -> None:
    """Must hold on an emulated card: texts and images of all lengths, alone and together."""
    llm = start(vl_checkpoint, "hpu")
    assert check(llm, vl_checkpoint, "last", range(4)) > LEAST_COSINE
    llm.engine.stats()
    runner = llm.engine.executor._rank  # type: ignore[attr-defined]
    bridge, rng, done, misses, launches = runner.backend.bridge, np.random.default_rng(0), 0, 0, 0
    with bridge.metric_localcontext("graph_compilation") as metric:
        while done < count:
            some = [prompt(rng, vl_checkpoint) for _ in range(int(rng.integers(1, 12)))]
            llm.embed(some, use_tqdm=False)
            used = llm.engine.stats().buckets
            misses += sum(bool(use.miss) or not use.planned for use in used)
            launches += len(used)
            done += len(some)
    print(f"{done} requests, {launches} launches, {bridge.compilations(metric)} compilations, {misses} misses")
    assert launches > done / 4 and bridge.compilations(metric) == 0 and misses == 0
    assert runner.graphs.recompiles == 0 and runner.graphs.lazy_compiles == 0


def prompt(rng: np.random.Generator, path: Path) -> dict[str, Any]:
    """Ids of any length, or a chat with images."""
    if rng.random() < 0.3:
        return ask(oracle(path), int(rng.integers(1 << 30)), 200, most=1)[0]
    length = int(np.exp(rng.uniform(0, np.log(500))))
    return {"prompt_token_ids": [int(t) for t in rng.integers(0, 250, length)]}


@pytest.mark.parametrize("kind", KINDS)
def test_preempted_prompts_are_pooled_once(kind: str, checkpoint: Callable[..., Path]) -> None:
    """Rows of 16 tokens a step and too few blocks for all: prompts lose their place in the middle and begin again."""
    path = checkpoint("qwen2")
    model, rng = PooledOracle(path, vision=False), np.random.default_rng(1)
    prompts = [[int(t) for t in rng.integers(5, 250, n)] for n in (150, 140, 130, 120, 100)]
    options = {k: v for k, v in BASE.items() if k != "mm_processor_kwargs"} | {"max_model_len": 160, "async_depth": 1}
    with LLM(path, **options, num_gpu_blocks_override=24, pooler_config={"pooling_type": KINDS[kind]}) as llm:
        scheduler = llm.engine.scheduler
        scheduler.limits = replace(scheduler.limits, chunk=16)
        made = llm.embed([{"prompt_token_ids": p} for p in prompts], use_tqdm=False)
        assert scheduler.totals.preemptions > 0 and scheduler.pool.used == 0
    for output, tokens in zip(made, prompts, strict=True):
        wanted = model.pooled({"input_ids": torch.tensor([tokens])}, kind)
        assert cosine(output.outputs.embedding, wanted) > LEAST_COSINE


def test_a_prompt_that_is_cached_whole_computes_its_last_token(checkpoint: Callable[..., Path]) -> None:
    path, tokens = checkpoint("qwen2"), [*range(5, 70)]
    model = PooledOracle(path, vision=False)
    with LLM(path, **{k: v for k, v in BASE.items() if k != "mm_processor_kwargs"}) as llm:
        for length, cached in ((31, 16), (32, 16), (33, 32), (64, 48)):
            for _ in range(2):
                (output,) = llm.embed({"prompt_token_ids": tokens[:length]}, use_tqdm=False)
                wanted = model.pooled({"input_ids": torch.tensor([tokens[:length]])}, "last")
                assert cosine(output.outputs.embedding, wanted) > LEAST_COSINE
            assert output.num_cached_tokens == cached


def test_batch_invariance_holds_for_the_last_token_and_is_refused_for_sums(checkpoint: Callable[..., Path]) -> None:
    path, prompts = checkpoint("qwen2"), [{"prompt_token_ids": [*range(5, 9 + 7 * i)]} for i in range(4)]
    options = {k: v for k, v in BASE.items() if k != "mm_processor_kwargs"} | {"batch_invariant": True}
    with LLM(path, **options) as llm:
        together = llm.embed(prompts, use_tqdm=False)
        for prompt, output in zip(prompts, together, strict=True):
            assert llm.embed(prompt, use_tqdm=False)[0].outputs.embedding == output.outputs.embedding
    with pytest.raises(StartupError, match="--batch-invariant holds for embeddings of the last or first token"):
        LLM(path, **options, pooler_config={"pooling_type": "MEAN"})


def test_a_value_that_is_not_finite_fails_its_own_request_alone(checkpoint: Callable[..., Path]) -> None:
    """A row of NaN in the embedding table; its neighbours in the batch are answered."""
    path = checkpoint("qwen2")
    with LLM(path, **{k: v for k, v in BASE.items() if k != "mm_processor_kwargs"}) as llm:
        table = llm.engine.executor._rank.model.embedding.table  # type: ignore[attr-defined]
        table[77] = float("nan")
        fine = [{"prompt_token_ids": [5 + i, 6, 7]} for i in range(3)]
        alone = [o.outputs.embedding for o in llm.embed(fine, use_tqdm=False)]
        with pytest.raises(Exception, match="finite"):
            llm.embed([*fine, {"prompt_token_ids": [5, 77]}], use_tqdm=False)
        assert [cosine(o.outputs.embedding, a) > LEAST_COSINE
                for o, a in zip(llm.embed(fine, use_tqdm=False), alone, strict=True)] == [True] * 3  # fmt: skip
