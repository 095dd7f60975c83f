"""``--kv-offloading-size`` in whole engines: equal answers with and without it, and what is refused."""

from __future__ import annotations

import random
from operator import eq
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.traffic.requests import Traffic
from trencadis.backends.cuda import make_backend
from trencadis.core.device.backend import BackendConfig, LayerKV
from trencadis.core.engine.engine import Engine
from trencadis.core.engine.engine_builder import create_engine
from trencadis.core.engine_config import EngineConfig
from trencadis.core.errors import StartupError
from trencadis.core.launches.host_block_copies import HostKV, HostStates, block_parts
from trencadis.core.request import Request, SamplingParams
from trencadis.core.step import BlockMove

LENGTH = 64
FLAGS: dict[str, Any] = {
    "dtype": "float32", "max_model_len": LENGTH, "max_num_seqs": 4, "max_num_batched_tokens": 64, "block_size": 16,
    "num_gpu_blocks_override": 6, "encoder_cache_images": 2, "warmup": "skip",
    "mm_processor_kwargs": {"min_pixels": 56 * 56, "max_pixels": 112 * 112},
}  # fmt: skip
DEVICES: dict[str, dict[str, Any]] = {
    "cpu": {"device": "cpu", "policy": "padded", "threads": 1}, "cuda": {"device": "cuda", "policy": "twin"},
    "hpu": {"device": "hpu", "block_size": 16, "warmup": "full", "max_num_seqs": 2},
}  # fmt: skip
SOME = 4 / 1024
"""GiB of host memory: hundreds of blocks."""


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRENCADIS_CACHE", str(tmp_path))
    monkeypatch.setenv("VLLM_MULTIMODAL_BUCKETS", "64,128,256")


def answers(path: Path, device: str, count: int, **flags: Any) -> Traffic:
    """A run of random requests; its engine is closed."""
    engine = create_engine(EngineConfig(model=str(path), **{**FLAGS, **DEVICES[device], **flags}))
    run = Traffic(engine, 3, count, LENGTH, engine.info().vocab_size, most=8)
    run.run()
    engine.scheduler.check()
    engine.close()
    return run


@pytest.mark.usefixtures("settled")
def test_answers_are_equal_with_host_memory(vl_checkpoint: Path) -> None:
    """Preempted, forked, with images: blocks that come back serve as those that stayed."""
    compare(vl_checkpoint, "cpu", 1, 40)


@pytest.mark.usefixtures("settled")
def test_a_gaudi_takes_prompts_from_host_memory_and_compiles_nothing(
    vl_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Emulated, behind a full warm-up: prompts that others made room for come back, with equal answers."""
    gaudi(vl_checkpoint, 1, 8, monkeypatch)


@pytest.mark.long
@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("lazy", ["1", "0"])
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("cache", ["auto", "int8", "fp8"])
def test_a_gaudi_takes_prompts_from_host_memory_and_compiles_nothing_long(
    depth: int, cache: str, lazy: str, vl_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PT_HPU_LAZY_MODE", lazy)
    gaudi(vl_checkpoint, depth, 100, monkeypatch, kv_cache_dtype=cache)
    compare(vl_checkpoint, "hpu", depth, 150, kv_cache_dtype=cache)


def gaudi(path: Path, depth: int, count: int, monkeypatch: pytest.MonkeyPatch, **flags: Any) -> None:
    """``count`` requests over four prompts of three blocks, which take turns in six blocks."""
    monkeypatch.setenv("TRENCADIS_HPU_EMULATOR", "1")
    rng = random.Random(1)
    prompts = [[rng.randrange(100, 200) for _ in range(49)] for _ in range(4)]
    found = []
    for size in (0.0, SOME):
        requested = {**FLAGS, **DEVICES["hpu"], "async_depth": depth, "kv_offloading_size": size, **flags}
        engine = create_engine(EngineConfig(model=str(path), **requested))
        rank: Any = engine.executor._rank  # type: ignore[attr-defined]
        before, answers = rank.backend.compilations(), []
        for number in range(count):
            params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
            engine.add(Request(f"r{number}", list(prompts[number % 4]), params))
            while not engine.idle():
                answers += [token for delta in engine.step() for token in delta.tokens]
        assert rank.backend.compilations() == before and rank.backend.fallbacks() == 0
        engine.scheduler.check()
        info = engine.info()
        rows = dict(info.graphs.ledger) if info.graphs is not None else {}
        assert ("copies of host memory" in rows) == bool(size) and (info.host_blocks > 0) == bool(size)
        assert engine.stats().host_hits == (48 * (count - 4) if size else 0)
        found.append(answers)
        engine.close()
    assert found[0] == found[1] and len(found[0]) == 3 * count


@pytest.mark.long
@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("device", DEVICES)
def test_answers_are_equal_with_host_memory_long(device: str, depth: int, vl_checkpoint: Path) -> None:
    stats = compare(vl_checkpoint, device, depth, 400).stats()
    print(f"{device}, depth {depth}: {stats.prefix_hits} tokens cached, {stats.host_hits} of them in host memory")


def compare(path: Path, device: str, depth: int, count: int, **flags: Any) -> Engine:
    """Equal answers with and without; the engine with it. What is aborted, and when, depends on the steps."""
    without = answers(path, device, count, async_depth=depth, **flags)
    run = answers(path, device, count, async_depth=depth, kv_offloading_size=SOME, **flags)
    engine = run.engine
    host, stats = engine.scheduler.pool.host, engine.stats()
    assert host is not None and stats.host_total == host.size > 100
    assert stats.host_hits >= 16 and stats.prefix_hits >= stats.host_hits and host.stored and host.restored
    gone = without.gone | run.gone
    assert len(gone) < count // 4
    for key in without.tokens | run.tokens:
        got, want = run.tokens.get(key, []), without.tokens.get(key, [])
        assert got == want or (key[0] in gone and all(map(eq, got, want))), key
    assert any(note.startswith(f"host memory: {host.size} KV blocks") for note in engine.info().notes)
    return engine


class Now:
    """Copies at once."""

    def host_memory(self, shape: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype)

    def in_order(self, copies: Any) -> None:
        copies()


@pytest.mark.parametrize("flat", [False, True])
def test_copies_hold_every_layer_in_the_order_that_was_asked(flat: bool) -> None:
    """A block goes out, is overwritten, and comes back elsewhere; a slot is overwritten after it was read."""
    generator = torch.Generator().manual_seed(0)
    shape = (6 * 4, 2, 8) if flat else (6, 4, 2, 8)
    kv = [
        LayerKV(torch.randn(shape, generator=generator), torch.randn(shape, generator=generator).half()) for _ in "ab"
    ]
    parts = block_parts(kv, 6)
    whole = torch.cat(parts, 1).clone()
    host = HostKV(Now(), parts, 2, torch.empty(whole.shape[1], dtype=torch.uint8))
    assert torch.equal(torch.cat(parts, 1), whole)
    host.run([BlockMove(2, 0, True), BlockMove(3, 1, True), BlockMove(4, 1, False), BlockMove(5, 1, True)])
    host.run([BlockMove(2, 1, False), BlockMove(5, 0, False)])
    want = whole[[0, 1, 5, 3, 3, 2]]
    assert torch.equal(torch.cat(parts, 1), want)


def test_states_of_preempted_sequences_come_back_into_any_slot() -> None:
    conv, state = torch.randn(5, 3, 4).bfloat16(), torch.randn(5, 2, 4, 4)
    before = conv.clone(), state.clone()
    host = HostStates(Now(), [conv, state], 2)
    host.run([BlockMove(1, 0, True), BlockMove(2, 1, True), BlockMove(3, 0, False), BlockMove(4, 0, True)])
    host.run([BlockMove(1, 1, False), BlockMove(2, 0, False)])
    for now, was in zip((conv, state), before, strict=True):
        assert torch.equal(now, was[[0, 2, 4, 1, 4]])


def test_a_card_copies_in_the_order_of_its_launches() -> None:
    """On the twin: one submission to the stream of programs for a list of copies, and what they leave."""
    backend: Any = make_backend(BackendConfig(options={"policy": "twin"}))
    kv = [LayerKV(*(backend.zeros((6, 4, 2, 8), torch.float32) for _ in "kv")) for _ in "ab"]
    for layer in kv:
        for tensor in layer[:2]:
            tensor.copy_(torch.arange(6).view(6, 1, 1, 1))
    parts = block_parts(kv, 6)
    host = HostKV(backend, parts, 2, backend.zeros((sum(part.shape[1] for part in parts),), torch.uint8))
    launched = backend.runtime.counts["launch"]
    host.run([BlockMove(2, 0, True), BlockMove(3, 1, True), BlockMove(2, 1, False), BlockMove(5, 0, False)])
    assert backend.runtime.counts["launch"] == launched + 1
    assert all(tensor[:, 0, 0, 0].tolist() == [0, 1, 3, 3, 4, 2] for layer in kv for tensor in layer[:2])


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize(
    ("flags", "part"),
    [
        ({"policy": ""}, "lies in host memory already; --kv-cache-memory-bytes"),
        ({"enable_prefix_caching": False}, "leave out --no-enable-prefix-caching"),
        ({"kv_offloading_size": 2.0**20}, "of host memory are free"),
        ({"kv_offloading_size": 2.0**-30}, "a KV block of all ranks takes"),
        ({"max_num_batched_tokens": 4, "max_num_seqs": 4}, "--max-num-batched-tokens 32 holds one"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(flags: dict[str, Any], part: str, vl_checkpoint: Path) -> None:
    requested = {**FLAGS, **DEVICES["cpu"], "kv_offloading_size": SOME, **flags}
    with pytest.raises(StartupError) as refused:
        create_engine(EngineConfig(model=str(vl_checkpoint), **requested))
    line = str(refused.value)
    assert line.startswith("--kv-offloading-size ") and part in line and "\n" not in line, line
