"""``trencadis plan`` with several ranks and on the twin of a card: the rows and the KV pool of what then starts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.plan.planned_rows import (
    assert_as_planned_on_a_card,
    assert_as_planned_on_the_cpu,
    booked,
    first_rank,
    on_paper,
)
from trencadis import LLM
from trencadis.assets import demo_path
from trencadis.backends.cuda.launches.input_buffers import StageBuffers

SMALL: dict[str, Any] = dict(
    dtype="float32", max_model_len=256, max_num_seqs=3, max_num_batched_tokens=64, kv_cache_memory_bytes=8 << 20,
    mm_processor_kwargs={"min_pixels": 56 * 56, "max_pixels": 112 * 112}, encoder_cache_images=2,
)  # fmt: skip
ON_CARDS: dict[str, Any] = dict(block_size=64, warmup="skip")

Start = Callable[..., LLM]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Start]:
    """``start(**flags)``: the demo on the CPU, an emulated card or the twin of one."""
    for name in ("TRENCADIS_HPU_EMULATOR", "TRENCADIS_CUDA_TWIN"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("TRENCADIS_CACHE", str(tmp_path))
    made: list[LLM] = []

    def one(**flags: Any) -> LLM:
        made.append(LLM(str(demo_path()), **{**SMALL, **flags}))
        return made[-1]

    yield one
    for llm in made:
        llm.close()


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_on_the_cpu(start: Start, ranks: int) -> None:
    """tests/parallel/test_same_tokens.py looks at the two ranks that it starts; here with other flags."""
    assert_as_planned_on_the_cpu(start(tensor_parallel_size=ranks), **SMALL, device="cpu", tensor_parallel_size=ranks)


@pytest.mark.long
@pytest.mark.parametrize("device", ["hpu", "cuda"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_on_cards(start: Start, device: str, ranks: int) -> None:
    flags: dict[str, Any] = dict(device=device, tensor_parallel_size=ranks, **ON_CARDS)
    assert_as_planned_on_a_card(start(**flags), **SMALL, **flags)


PLANS: dict[str, dict[str, Any]] = {
    "small": {},
    "many rows": {"max_num_seqs": 40, "max_num_batched_tokens": 200},
    "blocks of 16, long": {
        "block_size": 16, "max_model_len": 4096, "max_num_batched_tokens": 512, "kv_cache_memory_bytes": 32 << 20,
    },
    "pictures": {"mm_processor_kwargs": {"max_pixels": 400 * 400}, "max_num_batched_tokens": 300},
    "blocks of 128": {"block_size": 128, "max_num_seqs": 7},
}  # fmt: skip
QUICK = ("blocks of 16, long", "pictures")


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.long) for n in PLANS])
def test_inputs_of_a_card(start: Start, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """On paper, in the start-up's ledger, and in the memory that the stages' buckets share."""
    flags: dict[str, Any] = {**ON_CARDS, "device": "cuda", **PLANS[name]}
    llm = start(**flags)
    backend: Any = first_rank(llm).backend
    shared: StageBuffers = backend._rooms
    taken = sum(room.flat.nbytes for room in shared._shared.values())
    programs: Any = first_rank(llm).graphs._programs.values()
    assert all(program.buffers.buffer in shared._shared.values() for program in programs)
    paper = dict(on_paper(backend.memory.total(), **{**SMALL, **flags}).ledger.rows())
    assert booked(llm)["static inputs"] == paper["static inputs"] == taken
