"""Each form of each family gives transformers' tokens and logits, on every device, however it is scheduled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.fakes.hand_driven_model import HandDrivenModel
from tests.families.text_checkpoints import CASES, FORMS
from tests.oracles.transformers_model import Answer, assert_same, same_tokens
from trencadis import LLM, SamplingParams

BASE: dict[str, Any] = dict(dtype="float32", max_model_len=384, max_num_seqs=8, kv_cache_memory_bytes=16 << 20)
CPU = {
    "cpu": {},
    "chunks of 7, padded, depth 1": {"max_num_batched_tokens": 7, "policy": "padded", "async_depth": 1},
    "preemption without prefix cache": {
        "num_gpu_blocks_override": 30, "enable_prefix_caching": False, "max_num_batched_tokens": 64,
    },
}  # fmt: skip
CARDS: dict[str, dict[str, Any]] = {
    "cuda twin": {"device": "cuda", "policy": "twin", "warmup": "skip", "block_size": 16},
    "emulated hpu": {"device": "hpu", "warmup": "skip", "block_size": 64, "max_num_batched_tokens": 256},
}
VARIANTS = {
    **CPU, **CARDS, "chunks of 1": {"max_num_batched_tokens": 1}, "two ranks": {"tensor_parallel_size": 2},
    "compiled hpu": CARDS["emulated hpu"],
}  # fmt: skip
each_form = pytest.mark.parametrize(("family", "name"), CASES, ids=lambda value: value.replace(" ", "-"))


def prompts(count: int, longest: int) -> list[tuple[int, ...]]:
    """Of 1 to ``longest`` tokens; each second one begins as the one before, as chats do."""
    rng = np.random.default_rng(7)
    found: list[tuple[int, ...]] = []
    for i in range(count):
        length = 1 if i == 0 else int(rng.integers(2, longest + 1))
        shared = found[-1][: length // 2] if i % 2 else ()
        found.append((*shared, *rng.integers(0, 300, length - len(shared)).tolist()))
    return found


def answered(path: Path, requested: Sequence[tuple[int, ...]], length: int, **flags: Any) -> list[list[int]]:
    """Greedy tokens of one engine, asked all at once."""
    llm = LLM(str(path), **{**BASE, **flags})
    params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
    try:
        made = llm.generate([list(p) for p in requested], params, use_tqdm=False)
        llm.engine.scheduler.check()
        if "num_gpu_blocks_override" in flags and len(requested) > 8:
            assert llm.engine.scheduler.totals.preemptions > 0
        return [one.outputs[0].token_ids for one in made]
    finally:
        llm.close()


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert (got - want).abs().max() <= 1e-4 * want.abs().max()


@each_form
@pytest.mark.parametrize(("policy", "ops", "chunks"), [("serving", "fast", (1, 7, 90)), ("padded", "reference", (90,))])
def test_logits(form: Any, oracle: Any, family: str, name: str, policy: str, ops: str, chunks: tuple[int, ...]) -> None:
    path = form(family, name)
    ids = np.random.default_rng(0).integers(0, 300, 90).tolist()
    with torch.no_grad():
        want = oracle(path)(input_ids=torch.tensor([ids])).logits[0]
    harness = HandDrivenModel(path, policy, ops)
    for chunk in chunks:
        close(harness.prefill(ids, chunk), want)


def pairs(
    greedy: Callable[..., Answer], path: Path, requested: Sequence[tuple[int, ...]], length: int, **flags: Any
) -> list[tuple[list[int], Answer]]:
    ours = answered(path, requested, length, **flags)
    return [(one, greedy(path, p, length)) for one, p in zip(ours, requested, strict=True)]


@each_form
def test_tokens_on_the_cpu(form: Any, greedy: Any, family: str, name: str) -> None:
    """A share: each form under one schedule."""
    variant: Any = list(CPU.values())[CASES.index((family, name)) % len(CPU)]
    assert_same(pairs(greedy, form(family, name), prompts(5, 120), 6, **variant))


@pytest.mark.parametrize("device", CARDS)
@pytest.mark.parametrize("family", [
    pytest.param(family, marks=[pytest.mark.long] * (family == "lfm2")) for family in FORMS
])  # fmt: skip
def test_tokens_on_cards(form: Any, greedy: Any, monkeypatch: Any, family: str, device: str) -> None:
    """A share: one form of each family, another one on each card."""
    monkeypatch.setenv("TRENCADIS_HPU_EMULATOR", "1")
    names = list(FORMS[family])
    path = form(family, names[1 if device == "cuda twin" else 0])
    assert_same(pairs(greedy, path, prompts(4, 100), 4, **CARDS[device]))


def test_tokens_on_two_ranks(form: Any, greedy: Any) -> None:
    """A share: norms behind the sums, narrow tables, learned positions and plain MLPs, divided."""
    assert_same(pairs(greedy, form("opt", "350m"), prompts(3, 60), 4, **VARIANTS["two ranks"]))


@pytest.mark.long
def test_tokens_in_compile_mode(form: Any, greedy: Any, monkeypatch: Any) -> None:
    """A share: layers that leave nothing to be added to have no second tensor to cut."""
    monkeypatch.setenv("TRENCADIS_HPU_EMULATOR", "1")
    monkeypatch.setenv("PT_HPU_LAZY_MODE", "0")
    assert_same(pairs(greedy, form("opt", "350m"), prompts(2, 20), 2, **VARIANTS["compiled hpu"]))


@pytest.mark.long
@pytest.mark.parametrize("variant", VARIANTS)
@each_form
def test_tokens_long(form: Any, greedy: Any, monkeypatch: Any, family: str, name: str, variant: str) -> None:
    monkeypatch.setenv("TRENCADIS_HPU_EMULATOR", "1")
    if variant == "two ranks" and family in ("olmo2", "olmo3"):
        pytest.skip("refused: ranks cannot share its norms over all heads")
    if variant == "compiled hpu":
        monkeypatch.setenv("PT_HPU_LAZY_MODE", "0")
    requested = prompts({"two ranks": 8, "compiled hpu": 8, "chunks of 1": 10}.get(variant, 40), 300)
    found = pairs(greedy, form(family, name), requested, 32, **VARIANTS[variant])
    ties = sum(same_tokens(*one) == "tie" for one in found)
    print(f"\n{family}, {name}, {variant}: {len(found)} prompts, {ties} ties")
    assert_same(found)
