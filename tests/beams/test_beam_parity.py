"""Beam search against transformers' ``generate(num_beams=w)``, float32: widths, penalties, early stopping, images."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.oracles.transformers_model import GAP, Oracle, conversation
from trencadis import LLM, BeamSearchParams, FlatLogprobs, SamplingParams
from trencadis.assets import demo_path
from trencadis.backends.cuda.cpu_twin.twin_runtime import TwinRuntime
from trencadis.core.request import BeamRule
from trencadis.offline_beam_search import EngineParams

LIMITS = {"min_pixels": 56 * 56, "max_pixels": 50_176}
BASE: dict[str, Any] = {
    "dtype": "float32", "max_model_len": 640, "max_num_seqs": 8, "max_num_batched_tokens": 256,
    "mm_processor_kwargs": LIMITS,
}  # fmt: skip
DEVICES: dict[str, dict[str, Any]] = {
    "cpu": {"kv_cache_memory_bytes": 64 << 20},
    "depth 1": {"kv_cache_memory_bytes": 64 << 20, "async_depth": 1},
    "preempted": {"num_gpu_blocks_override": 44, "async_depth": 1, "max_num_seqs": 24},
    "no prefix cache": {"num_gpu_blocks_override": 44, "enable_prefix_caching": False, "max_num_seqs": 24},
    "padded": {"policy": "padded", "kv_cache_memory_bytes": 64 << 20, "async_depth": 1, "max_num_seqs": 3},
    "hpu": {"device": "hpu", "block_size": 64, "warmup": "skip", "num_gpu_blocks_override": 40, "max_num_seqs": 4},
    "twin": {"device": "cuda", "policy": "twin", "warmup": "skip", "num_gpu_blocks_override": 60, "max_num_seqs": 4},
}


@dataclass
class Case:
    """A conversation, how it is searched, and transformers' answers with their scores."""

    messages: list[dict[str, Any]]
    inputs: dict[str, torch.Tensor]
    asked: EngineParams
    found: list[list[int]]
    scores: list[float]


def case(oracle: Oracle, seed: int) -> Case:
    """The same one for each seed; ids that end an answer beside EOS make beams end early."""
    rng = np.random.default_rng(seed)
    messages, images = conversation(rng, most=2, high=250)
    width, length = int(rng.integers(2, 8)), int(rng.integers(1, 17))
    rule = BeamRule(float(rng.choice([-0.5, 0.0, 0.7, 1.0, 2.0])), [False, True, None][int(rng.integers(3))])
    stops = sorted({int(t) for t in rng.integers(0, 300, int(rng.integers(0, 7)))})
    ignore = bool(rng.random() < 0.2) and not stops
    eos = oracle.model.generation_config.eos_token_id
    ends = [*stops, *(eos if isinstance(eos, list) else [eos])]
    inputs = oracle.inputs(messages, images)
    with torch.inference_mode():
        out = oracle.model.generate(
            **inputs, max_new_tokens=length, do_sample=False, num_beams=width, num_return_sequences=width,
            length_penalty=rule.length_penalty, early_stopping="never" if rule.early_stopping is None else
            rule.early_stopping, eos_token_id=[-7] if ignore else ends, return_dict_in_generate=True,
            output_scores=True,
        )  # fmt: skip
    found = [cut(row[inputs["input_ids"].shape[1] :].tolist(), [] if ignore else ends) for row in out.sequences]
    params = SamplingParams(n=width, temperature=0, max_tokens=length, stop_token_ids=stops, ignore_eos=ignore)
    return Case(messages, inputs, EngineParams(params, rule), found, out.sequences_scores.tolist())


def cut(tokens: list[int], ends: list[int]) -> list[int]:
    """A row of transformers' without its padding."""
    return next((tokens[: i + 1] for i, t in enumerate(tokens) if t in ends), tokens)


def score(oracle: Oracle, one: Case, tokens: list[int]) -> float:
    """What transformers ranks an answer by."""
    start = one.inputs["input_ids"].shape[1]
    grown = torch.cat([one.inputs["input_ids"], torch.tensor([tokens])], 1)
    inputs = dict(one.inputs, input_ids=grown, attention_mask=torch.ones_like(grown))
    if "mm_token_type_ids" in inputs:
        pad = torch.zeros(1, len(tokens), dtype=torch.int32)
        inputs["mm_token_type_ids"] = torch.cat([inputs["mm_token_type_ids"], pad], 1)
    with torch.inference_mode():
        logprobs = oracle.model(**inputs).logits[0, start - 1 : -1].float().log_softmax(-1)
    total = logprobs.gather(1, torch.tensor(tokens)[:, None]).sum().item()
    assert one.asked.beams is not None
    return total / len(tokens) ** one.asked.beams.length_penalty


def check(llm: LLM, oracle: Oracle, cases: list[Case]) -> int:
    """All at a time; equal, or (one in a hundred, but always one) as good as transformers' within ``GAP``; how many."""
    prompts = [llm._wait(llm.service.make_chat_prompt(c.messages)) for c in cases]
    outputs = llm._run(prompts, [c.asked for c in cases], use_tqdm=False)
    ties = 0
    for i, (one, output) in enumerate(zip(cases, outputs, strict=True)):
        assert output.prompt_token_ids == one.inputs["input_ids"][0].tolist()
        ours = [o.token_ids for o in output.outputs]
        if ours != one.found:
            ties += 1
            scores = [score(oracle, one, tokens) for tokens in ours]
            assert np.allclose(scores, one.scores, atol=GAP), f"answer {i}: {ours} is not {one.found}"
    assert ties <= max(1, len(cases) // 100)
    llm.engine.scheduler.check()
    assert llm.engine.scheduler.pool.used == 0
    return ties


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Path, str], LLM]:
    """``started(checkpoint, "hpu")``: an engine of ``DEVICES``."""

    def start(path: Path, name: str) -> LLM:
        monkeypatch.setenv("TRENCADIS_CACHE", str(tmp_path))
        if name == "hpu":
            monkeypatch.setenv("TRENCADIS_HPU_EMULATOR", "1")
        if name == "twin":
            monkeypatch.setattr(TwinRuntime, "standing", None)
        return LLM(str(path), **{**BASE, **DEVICES[name]})

    return start


def oracle_of(path: Path) -> Oracle:
    return Oracle(path, min_pixels=LIMITS["min_pixels"], max_pixels=LIMITS["max_pixels"])


@pytest.fixture(scope="module")
def demo_cases() -> tuple[Oracle, list[Case]]:
    oracle = oracle_of(demo_path())
    return oracle, [case(oracle, seed) for seed in range(4)]


@pytest.mark.parametrize("name", ["cpu", "padded"])
def test_answers_equal_transformers(name: str, started: Any, demo_cases: tuple[Oracle, list[Case]]) -> None:
    oracle, cases = demo_cases
    llm = started(demo_path(), name)
    check(llm, oracle, cases)
    llm.close()


@pytest.fixture(scope="module")
def hundred(vl_checkpoint: Path) -> Callable[[str], tuple[Path, Oracle, list[Case]]]:
    """``hundred("random")``: a checkpoint and its cases, made once."""

    @cache
    def make(kind: str) -> tuple[Path, Oracle, list[Case]]:
        path = demo_path() if kind == "demo" else vl_checkpoint
        oracle = oracle_of(path)
        return path, oracle, [case(oracle, seed) for seed in range(100)]

    return make


@pytest.mark.long
@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("kind", ["demo", "random"])
def test_a_hundred_answers_equal_transformers(kind: str, name: str, started: Any, hundred: Any) -> None:
    path, oracle, cases = hundred(kind)
    llm = started(path, name)
    ties = sum(check(llm, oracle, cases[start : start + 20]) for start in range(0, 100, 20))
    preemptions = llm.engine.scheduler.totals.preemptions
    print(f"{kind}, {name}: 100 prompts, {ties} of them equally good, {preemptions} preemptions")
    assert preemptions > 0 or name != "preempted"
    llm.close()


def test_offline_answers_have_vllms_shape() -> None:
    llm = LLM(str(demo_path()), **BASE, **DEVICES["cpu"])
    prompt = llm.get_tokenizer().encode("The picture shows")
    params = BeamSearchParams(beam_width=3, max_tokens=6, length_penalty=0.0)
    (found,) = llm.beam_search([{"prompt_token_ids": prompt}], params, concurrency_limit=1)
    assert [s.cum_logprob for s in found.sequences] == sorted((s.cum_logprob for s in found.sequences), reverse=True)
    for one in found.sequences:
        assert one.tokens[: len(prompt)] == prompt and one.text == llm.get_tokenizer().decode(
            one.tokens, skip_special_tokens=False
        )
        assert all(len(place) == 6 for place in one.logprobs) and one.finish_reason in ("stop", "length")
        total = sum(place.logprob for place in one.logprobs)
        assert abs(total - one.cum_logprob) < 1e-6
    searched, drawn = llm.generate([prompt, prompt], [params, SamplingParams(max_tokens=2)], use_tqdm=False)
    ends = llm.service.eos
    kept = [o.token_ids[:-1] if o.token_ids[-1] in ends else o.token_ids for o in searched.outputs]
    assert [prompt + k for k in kept] == [s.tokens for s in found.sequences] and len(drawn.outputs[0].token_ids) <= 2
    long = [list(range(40, 90))]
    for skips, cached in ((None, 0), (None, 48), (True, 0)):
        (again,) = llm.generate(long, SamplingParams(max_tokens=1, skip_reading_prefix_cache=skips), use_tqdm=False)
        assert again.num_cached_tokens == cached
    shapes = [
        SamplingParams(max_tokens=3, logprobs=2, prompt_logprobs=1, seed=1, flat_logprobs=f) for f in (False, True)
    ]
    plain, flat = llm.generate([prompt, prompt], shapes, use_tqdm=False)
    for usual, flattened in (
        (plain.outputs[0].logprobs, flat.outputs[0].logprobs), (plain.prompt_logprobs, flat.prompt_logprobs),
    ):  # fmt: skip
        assert usual is not None and isinstance(flattened, FlatLogprobs) and len(flattened) == len(usual)
        for place, same in zip(usual, flattened, strict=True):
            assert {t: one.logprob for t, one in (place or {}).items()} == {t: one.logprob for t, one in same.items()}
        assert [*flattened[1:]] == [*flattened][1:] and flattened.start_indices[0] == 0
    greedy = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=6), use_tqdm=False)
    alone = llm.generate([prompt], BeamSearchParams(1, 6), use_tqdm=False)
    assert alone[0].outputs[0].token_ids == greedy[0].outputs[0].token_ids
    llm.close()


def test_chosen_ids_have_the_log_probabilities_of_all(demo_cases: tuple[Oracle, list[Case]]) -> None:
    """``logprob_token_ids``: more ids than one SAMPLE has rows, on a step that also draws for others."""
    llm = LLM(str(demo_path()), **{**BASE, **DEVICES["padded"]})
    wanted = list(range(5, 105))
    requested = SamplingParams(temperature=0, max_tokens=3, logprob_token_ids=wanted)
    plain = SamplingParams(temperature=0, max_tokens=3, logprobs=20)
    prompt = "The picture shows"
    chosen, best = llm.generate([prompt, prompt], [requested, plain], use_tqdm=False)
    oracle, _ = demo_cases
    ids = torch.tensor([[*chosen.prompt_token_ids, *chosen.outputs[0].token_ids]])
    with torch.inference_mode():
        logits = oracle.model(input_ids=ids).logits[0, len(chosen.prompt_token_ids) - 1 : -1].float()
    reference = logits.log_softmax(-1)
    assert chosen.outputs[0].token_ids == best.outputs[0].token_ids and chosen.outputs[0].logprobs is not None
    for at, place in enumerate(chosen.outputs[0].logprobs):
        assert place.top_ids == wanted and set(place) == {*wanted, place.token}
        assert (torch.tensor(place.top_logprobs) - reference[at, wanted]).abs().max() < 1e-3
        for token in wanted[:5]:
            assert place[token].rank == int((reference[at] > reference[at, token]).sum()) + 1
    llm.close()
