"""`--batch-invariant`: the same bits, log-probabilities included, alone and in company, in any chunks and policy."""

from __future__ import annotations

import functools
import os
from typing import Any

import numpy as np
import pytest
import torch

from tests import kernel_kinds
from tests.oracles.transformers_model import conversation
from trencadis import LLM, SamplingParams
from trencadis.assets import demo_path
from trencadis.backends.cpu.batch_invariant import InvariantOps
from trencadis.backends.cpu.native.kernel_choice_by_cpu import EMULATED, VARIABLE
from trencadis.core.errors import StartupError

LENGTH = 8
BASE: dict[str, Any] = {
    "kv_cache_memory_bytes": 64 << 20, "max_num_seqs": 32, "mm_processor_kwargs": {"max_pixels": 50_176},
    "max_model_len": 2048, "batch_invariant": True,
}  # fmt: skip
GREEDY = SamplingParams(temperature=0, max_tokens=LENGTH, logprobs=20, ignore_eos=True)
SEEDED = SamplingParams(temperature=1.0, top_p=0.9, seed=11, max_tokens=LENGTH, logprobs=20, ignore_eos=True)

VARIANTS: dict[str, dict[str, Any]] = {
    "whole": {},
    "chunks of 7": {"max_num_batched_tokens": 7},
    "chunks of 50, depth 1": {"max_num_batched_tokens": 50, "async_depth": 1},
    "padded policy, no prefix cache": {"policy": "padded", "enable_prefix_caching": False},
    "one thread": {"threads": 1},
}


def chats(seeds: range) -> list[list[dict[str, Any]]]:
    return [conversation(np.random.default_rng(s), high=300)[0] for s in seeds]


def bits(outputs: Any) -> list[tuple[list[int], list[tuple[float, ...]]]]:
    """Tokens and the 20 best log-probabilities of each, as they are."""
    found = []
    for out in (o.outputs[0] for o in outputs):
        assert out.logprobs is not None
        found.append((out.token_ids, [(x.logprob, *x.top_logprobs) for x in out.logprobs]))
    return found


ResponseForm = tuple[SamplingParams, list[Any]]


@functools.cache
def alone(dtype: str, seeds: range) -> list[ResponseForm]:
    """Each chat answered with nothing beside it, greedily and drawn."""
    llm = LLM(str(demo_path()), **BASE, dtype=dtype)
    found = [(p, [bits(llm.chat([c], p))[0] for c in chats(seeds)]) for p in (GREEDY, SEEDED)]
    llm.close()
    return found


def compare(name: str, dtype: str, seeds: range, company: int) -> int:
    expected, requested = alone(dtype, seeds), chats(seeds)
    llm = LLM(str(demo_path()), **{**BASE, **VARIANTS[name]}, dtype=dtype)
    for params, answers in expected:
        for start in range(0, len(requested), company):
            part = slice(start, start + company)
            for i, (got, want) in enumerate(zip(bits(llm.chat(requested[part], params)), answers[part], strict=True)):
                assert got == want, f"chat {seeds[start + i]} differs"
    llm.close()
    return len(requested)


@pytest.mark.parametrize(
    ("name", "dtype"), [("chunks of 7", "float32"), ("padded policy, no prefix cache", "bfloat16")]
)
def test_same_bits(name: str, dtype: str) -> None:
    compare(name, dtype, range(3), 3)


@pytest.mark.long
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_same_bits_long(name: str, dtype: str) -> None:
    count = compare(name, dtype, range(int(os.environ.get("TRENCADIS_TEST_PROMPTS", "200"))), 32)
    print(f"{name}, {dtype}: {count} prompts, greedy and sampled, alone and among 31 others: bit-equal")


def compare_kinds(kind: str, form: str, count: int, company: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy answers alone, and among others in chunks of 50, by one kind of CPU kernels and one type of weights."""
    monkeypatch.setenv(VARIABLE, kind)
    coded = form.startswith("int")
    dtype, quantization = ("bfloat16", form) if coded else (form, None)
    found, requested = [], chats(range(count))
    for others, tokens in ((1, 2048), (company, 50)):
        llm = LLM(str(demo_path()), **BASE, dtype=dtype, quantization=quantization, max_num_batched_tokens=tokens)
        found.append([x for i in range(0, count, others) for x in bits(llm.chat(requested[i : i + others], GREEDY))])
        llm.close()
    assert found[0] == found[1]


@pytest.mark.part("any-cpu")
@pytest.mark.skipif(not kernel_kinds.EMULATIONS, reason="own kernels are not built here")
def test_same_bits_by_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16 on a CPU with AMX, whose tiles are plain C here."""
    compare_kinds(EMULATED, "bfloat16", 2, 2, monkeypatch)


@pytest.mark.long
@pytest.mark.parametrize("form", ["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("kind", kernel_kinds.EVERY)
def test_same_bits_by_every_kind_long(kind: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """200 prompts, alone and among 31 others."""
    compare_kinds(kind, form, int(os.environ.get("TRENCADIS_TEST_PROMPTS", "200")), 32, monkeypatch)


def test_the_fast_ops_do_not_promise_it() -> None:
    """The check has teeth: a product whose bits depend on the number of rows is refused."""

    class Careless(InvariantOps):
        def linear(self, x: torch.Tensor, w: Any) -> torch.Tensor:
            return super().linear(x, w) * (1 + 1e-6 * (len(x) % 64 != 0))

    with pytest.raises(StartupError, match="--batch-invariant: on this device"):
        Careless().pack_weight(torch.randn(64, 48))


def test_a_device_without_the_promise_says_so() -> None:
    with pytest.raises(StartupError, match="--batch-invariant: hpu does not promise it; --device cpu does"):
        LLM(str(demo_path()), **BASE, device="hpu")
