"""Each adapter answers as the checkpoint that it is merged into, in any company and on any schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.lora.conftest import Adapter, Base
from tests.oracles.transformers_model import Answer, assert_same
from trencadis import LLM, EngineArgs, LLMEngine, SamplingParams
from trencadis.core.engine_config import EngineConfig
from trencadis.core.engine_stats import EngineStats
from trencadis.core.errors import BadRequest, StartupError
from trencadis.offline_adapters import LoRARequest
from trencadis.server.metrics.cache_metrics import make_adapter_families

BASE: dict[str, Any] = dict(
    dtype="float32", max_model_len=384, max_num_seqs=8, kv_cache_memory_bytes=16 << 20, enable_lora=True
)
ATTENTION = r".*layers\.\d+\.self_attn\.[qo]_proj"
FAMILIES = ("llama", "qwen2_5_vl", "qwen3", "mistral", "gemma3", "phi3", "gemma4")
VARIANTS: dict[str, dict[str, Any]] = {
    "chunks of 7, padded, depth 1": {"max_num_batched_tokens": 7, "policy": "padded", "async_depth": 1},
    "preemption": {
        "num_gpu_blocks_override": 24,
        "enable_prefix_caching": False,
        "max_num_batched_tokens": 64,
        "async_depth": 1,
    },
    "two ranks": {"tensor_parallel_size": 2},
    "two stages": {"pipeline_parallel_size": 2},
}
Greedy = Callable[[Path, tuple[int, ...], int], Answer]
Merged = Callable[[Path, Path], Path]
Rows = Sequence[tuple[tuple[int, ...], Path | None]]
"""Prompts, each with the adapter that answers it."""


def prompts(count: int, longest: int, seed: int = 7) -> list[tuple[int, ...]]:
    """Of 1 to ``longest`` tokens; each second one begins as the one before, as chats do."""
    rng = np.random.default_rng(seed)
    found: list[tuple[int, ...]] = []
    for i in range(count):
        length = 1 if i == 0 else int(rng.integers(2, longest + 1))
        shared = found[-1][: length // 2] if i % 2 else ()
        found.append((*shared, *rng.integers(0, 300, length - len(shared)).tolist()))
    return found


def request_of(adapter: Path | None) -> LoRARequest | None:
    return None if adapter is None else LoRARequest(adapter.name, 1, str(adapter))


def generate(llm: LLM, rows: Rows, length: int) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
    made = llm.generate(
        [list(p) for p, _ in rows], params, use_tqdm=False, lora_request=[request_of(one) for _, one in rows]
    )
    llm.engine.scheduler.check()
    return [one.outputs[0].token_ids for one in made]


def compare(checkpoint: Path, rows: Rows, length: int, greedy: Greedy, merged: Merged, **flags: Any) -> list[list[int]]:
    """Asserts that all rows, requested at once, are answered as by the merged checkpoints; returns the answers."""
    llm = LLM(str(checkpoint), **{**BASE, "max_loras": 2, **flags})
    try:
        ours = generate(llm, rows, length)
        if "num_gpu_blocks_override" in flags:
            assert llm.engine.scheduler.totals.preemptions > 0
    finally:
        llm.close()
    folders = [checkpoint if one is None else merged(checkpoint, one) for _, one in rows]
    assert_same([(o, greedy(f, p, length)) for o, f, (p, _) in zip(ours, folders, rows, strict=True)])
    return ours


def mixed(checkpoint: Path, adapter: Adapter, count: int, longest: int = 60) -> Rows:
    """Prompts that the base and two adapters answer in turn, each the same ones."""
    kinds = [None, adapter(checkpoint, seed=1), adapter(checkpoint, seed=2, rank=3, pattern=ATTENTION)]
    return [(p, kind) for p in prompts(count, longest) for kind in kinds]


@pytest.mark.parametrize("family", FAMILIES)
def test_an_adapter_answers_as_the_merged_checkpoint(
    base: Base, adapter: Adapter, greedy: Greedy, merged: Merged, family: str
) -> None:
    checkpoint = base(family)
    ours = compare(checkpoint, mixed(checkpoint, adapter, 3), 5, greedy, merged)
    assert len({tuple(tokens) for tokens in ours}) > 5, "adapters change the answers"


@pytest.mark.parametrize("variant", VARIANTS)
def test_on_any_schedule(base: Base, adapter: Adapter, greedy: Greedy, merged: Merged, variant: str) -> None:
    checkpoint = base("llama")
    longest, length = (120, 30) if variant == "preemption" else (60, 5)
    compare(checkpoint, mixed(checkpoint, adapter, 3, longest), length, greedy, merged, **VARIANTS[variant])


def test_ten_adapters_and_the_base_in_one_batch(base: Base, adapter: Adapter, greedy: Greedy, merged: Merged) -> None:
    """More adapters than slots: some wait until others have finished."""
    checkpoint = base("llama")
    ten = [adapter(checkpoint, seed=i, rank=1 + i) for i in range(10)]
    prompt = prompts(2, 40)[1]
    rows = [(prompt, one) for one in (*ten, None, *ten)]
    ours = compare(checkpoint, rows, 4, greedy, merged, max_loras=3, max_cpu_loras=10, max_num_seqs=6)
    assert ours[:10] == ours[11:] and len({tuple(tokens) for tokens in ours}) > 5


def test_adapters_return_to_host_memory_that_is_too_small_for_all(base: Base, adapter: Adapter) -> None:
    """Four take turns where two fit: the ranks hold two, and one that left and is read again answers as before."""
    checkpoint = base("llama")
    four, prompt = [adapter(checkpoint, seed=i) for i in range(4)], prompts(2, 40)[1]
    llm = LLM(str(checkpoint), **{**BASE, "max_loras": 1, "max_cpu_loras": 2})
    store, found = llm.engine.executor._rank.adapters, []  # type: ignore[attr-defined]
    for _ in range(2):
        for one in four:
            found += generate(llm, [(prompt, one)], 4)
            assert len(store._held) <= 2
    llm.close()
    assert found[:4] == found[4:] and len({tuple(tokens) for tokens in found}) == 4


def test_the_adapters_of_running_and_waiting_requests_are_named(base: Base, adapter: Adapter) -> None:
    """In the metric that has them as labels; one slot, so that the second one waits."""
    checkpoint = base("llama")
    engine = LLMEngine.from_engine_args(EngineArgs(model=str(checkpoint), **{**BASE, "max_loras": 1}))
    config = EngineConfig(enable_lora=True, max_loras=1)

    def named() -> tuple[str, str]:
        (family,) = make_adapter_families(("m", "0"), engine.engine.stats(), config)
        (sample,) = family.samples
        assert sample.name == "vllm:lora_requests_info" and sample.labels["max_lora"] == "1"
        return sample.labels["running_lora_adapters"], sample.labels["waiting_lora_adapters"]

    assert named() == ("", "")
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    for i, name in enumerate(("first", "second", "second")):
        request = LoRARequest(name, 1 + i, str(adapter(checkpoint, seed=1 + (i > 0))))
        engine.add_request(str(i), "A robot may not", params, lora_request=request)
    seen = list[tuple[str, str]]()
    while engine.has_unfinished_requests():
        engine.step()
        seen.append(named())
    engine.close()
    assert ("first", "second") in seen and ("second", "") in seen and seen[-1] == ("", "")
    assert not list(make_adapter_families(("m", "0"), EngineStats(), EngineConfig()))


def test_a_name_with_other_weights_meets_no_earlier_blocks(base: Base, adapter: Adapter, tmp_path: Path) -> None:
    checkpoint, folder = base("llama"), tmp_path / "a"
    llm = LLM(str(checkpoint), **BASE)
    prompt, found = list(prompts(4, 60)[3]) * 2, []
    for seed in (1, 2, 1):
        source = adapter(checkpoint, seed=seed)
        folder.mkdir(exist_ok=True)
        for file in source.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        asked = LoRARequest("a", 1, str(folder), load_inplace=True)
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        (one,) = llm.generate([prompt], params, use_tqdm=False, lora_request=asked)
        found.append((one.outputs[0].token_ids, one.num_cached_tokens))
    llm.close()
    assert found[0][0] == found[2][0] != found[1][0]
    assert [cached for _, cached in found][:2] == [0, 0] and found[2][1] > 0


def test_changed_files_are_noticed(base: Base, adapter: Adapter, tmp_path: Path) -> None:
    checkpoint, folder = base("llama"), tmp_path / "a"
    folder.mkdir()
    llm = LLM(str(checkpoint), **BASE)
    for seed in (1, 2):
        for file in adapter(checkpoint, seed=seed).iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        if seed == 1:
            ref = llm.llm_engine.adapters.find(LoRARequest("a", 1, str(folder)))
    assert ref is not None
    with pytest.raises(BadRequest, match="have changed since"):
        llm.generate([[1, 2]], lora_request=LoRARequest("a", 1, str(folder)), use_tqdm=False)
    llm.close()


def test_requests_that_no_adapter_answers_are_refused(base: Base, adapter: Adapter, tmp_path: Path) -> None:
    checkpoint = base("llama")
    with pytest.raises(StartupError, match="max-cpu-loras 1 is less"):
        LLM(str(checkpoint), **{**BASE, "max_loras": 2, "max_cpu_loras": 1})
    with pytest.raises(StartupError, match="--batch-invariant"):
        LLM(str(checkpoint), **{**BASE, "batch_invariant": True})
    wide = adapter(checkpoint, seed=1, rank=32)
    for flags, path, why in (
        ({"enable_lora": False}, wide, "enable_lora=True"),
        ({}, wide, "has rank 32; --max-lora-rank 32 would"),
        ({}, tmp_path, "holds no LoRA adapter"),
        ({}, adapter(base("gemma3"), seed=1), "is for another model"),
    ):
        llm = LLM(str(checkpoint), **{**BASE, **flags})
        with pytest.raises(BadRequest, match=why):
            llm.generate([[1, 2]], lora_request=LoRARequest("x", 1, str(path)), use_tqdm=False)
        assert llm.generate([[1, 2]], use_tqdm=False)
        llm.close()
