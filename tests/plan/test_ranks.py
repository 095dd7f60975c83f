"""``trencadis plan`` with several ranks and on the twin of a card: the rows and the KV pool of what then starts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from trencadis import LLM
from trencadis.assets import demo_path
from trencadis.backends.cuda.launches.buffers import Rooms
from trencadis.core.checkpoint.reading import load_config
from trencadis.core.config import EngineConfig
from trencadis.core.launches.runner import Runner
from trencadis.core.startup.dry_run import Planned
from trencadis.server.plan.command import plan_for

BEFORE = ("weights", "image arena", "sampler state", "hidden rows", "static inputs", "KV cache")
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


def on_paper(total: int, others: int = 0, **flags: Any) -> Planned:
    config = EngineConfig(model=str(demo_path()), **{**SMALL, **flags})
    return plan_for(config, load_config(demo_path()), total, others)


def first_rank(llm: LLM) -> Runner:
    rank: Runner = llm.engine.executor._rank  # type: ignore[attr-defined]
    return rank


def booked(llm: LLM) -> dict[str, int]:
    """The ledger of the first rank of a start-up."""
    watch = llm.engine._watch
    assert watch is not None and watch.captures is not None
    return dict(watch.captures.ledger.rows())


def held(llm: LLM) -> dict[str, int]:
    """What the tensors of the first rank take, where no ledger is kept."""
    model: Any = first_rank(llm).model
    own, tower = model.persistent, model.tower
    text = model.enter.rotary
    tables = (text.inv_freq, text.axis, *tower.enter.angles, *tower.enter.colours)
    return {
        "weights": model.nbytes() + sum(t.nbytes for t in tables),
        "image arena": own.arena.nbytes,
        "sampler state": sum(t.nbytes for t in own.state),
        "hidden rows": own.hidden.nbytes,
        "static inputs": 0,
        "KV cache": sum(t.nbytes for layer in own.kv for t in layer if t is not None),
    }


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_ranks_on_the_cpu(start: Start, ranks: int) -> None:
    """Each rank holds its heads, and one KV head where there are fewer; all share the machine."""
    llm = start(tensor_parallel_size=ranks)
    planned = on_paper(64 << 30, 1 << 30, device="cpu", tensor_parallel_size=ranks)
    rows = dict(planned.ledger.rows())
    assert {n: rows[n] for n in BEFORE} == held(llm)
    assert planned.ledger.division.blocks == llm.engine.info().num_blocks
    assert sum(rows.values()) == 64 << 30
    each = sum(rows[n] for n in BEFORE) + rows["activations and workspace"]
    assert rows["used by others"] == (1 << 30) + (ranks - 1) * each


@pytest.mark.parametrize("device", ["hpu", "cuda"])
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_ranks_on_cards(start: Start, device: str, ranks: int) -> None:
    flags: dict[str, Any] = dict(device=device, tensor_parallel_size=ranks, **ON_CARDS)
    llm = start(**flags)
    rows, memory = booked(llm), first_rank(llm).backend.memory
    planned = on_paper(memory.total(), **flags)
    paper = dict(planned.ledger.rows())
    # The twin books what the backend asks for: packed weights, not the tables and norms that torch allocates.
    names = [n for n in BEFORE if device == "hpu" or n != "weights"]
    assert {n: paper[n] for n in names} == {n: rows[n] for n in names}
    assert set(planned.plan.buckets) == set(first_rank(llm).graphs.planned)
    assert planned.ledger.division.blocks == llm.engine.info().num_blocks


PLANS: dict[str, dict[str, Any]] = {
    "small": {},
    "many rows": {"max_num_seqs": 40, "max_num_batched_tokens": 200},
    "blocks of 16, long": {
        "block_size": 16, "max_model_len": 4096, "max_num_batched_tokens": 512, "kv_cache_memory_bytes": 32 << 20,
    },
    "pictures": {"mm_processor_kwargs": {"max_pixels": 400 * 400}, "max_num_batched_tokens": 300},
    "blocks of 128": {"block_size": 128, "max_num_seqs": 7},
}  # fmt: skip
QUICK = ("small", "blocks of 16, long", "pictures")


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.long) for n in PLANS])
def test_inputs_of_a_card(start: Start, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """On paper, in the start-up's ledger, and in the memory that the stages' buckets share."""
    flags: dict[str, Any] = {**ON_CARDS, "device": "cuda", **PLANS[name]}
    llm = start(**flags)
    backend: Any = first_rank(llm).backend
    shared: Rooms = backend._rooms
    taken = sum(room.flat.nbytes for room in shared._shared.values())
    programs: Any = first_rank(llm).graphs._programs.values()
    assert all(program.buffers.room in shared._shared.values() for program in programs)
    paper = dict(on_paper(backend.memory.total(), **flags).ledger.rows())
    assert booked(llm)["static inputs"] == paper["static inputs"] == taken
