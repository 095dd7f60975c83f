"""``--mm-encoder-tp-mode data``: images are dealt to ranks by slots, and every rank reads the rows of all."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.fakes.meta_start import GIB, card, config_of, on_paper, run
from tests.oracles.transformers_model import assert_same
from tests.parallel.test_same_tokens import BASE, EMULATED, Wanted, answered, same_of_many
from tests.vision.test_plans import BEFORE, HUB, LAYERED, SMALL, prices
from tests.vision.vision_checkpoints import qwen3_vl
from trencadis import LLM
from trencadis.assets import demo_path
from trencadis.backends.cpu.ops import CpuOps
from trencadis.backends.hpu.shape_policy import SERVING
from trencadis.core.checkpoint.config_reader import load_config
from trencadis.core.checkpoint.model_registry import image_needs
from trencadis.core.checkpoint.pooling_config_reader import load_model_config
from trencadis.core.engine_config import EngineConfig
from trencadis.core.errors import StartupError
from trencadis.core.executor.rank_info_and_fingerprint import can_share
from trencadis.core.launches.encoder_data_parallel import GatheredRows, assign_images
from trencadis.core.media_spans import SINK_ROW
from trencadis.core.memory.cache_plan import weights_bytes
from trencadis.core.shapes.pipeline_partition import check_ranks
from trencadis.core.step import Encode

DATA: dict[str, Any] = dict(tensor_parallel_size=2, mm_encoder_tp_mode="data")


def image(name: str, slots: int) -> Encode:
    rows = np.arange(slots // 4, dtype=np.int32)
    return Encode(name, (1, 8, slots // 8), slots, np.zeros((slots, 4), np.uint8), rows)


def test_images_are_dealt_by_slots() -> None:
    images = [image(str(i), slots) for i, slots in enumerate([64, 512, 128, 320, 64])]
    found = assign_images(images, 2)
    assert [sorted(i.digest for i in share) for share in found] == [["1", "4"], ["0", "2", "3"]]
    assert assign_images(images, 2) == found and [len(s) for s in assign_images(images[:1], 3)] == [1, 0, 0]


def test_two_ranks_with_towers_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens of one rank; the rank in this process encodes some of the images, and some launches none."""
    one = LLM(str(demo_path()), **BASE)
    wanted, _ = answered(one, range(6))
    one.close()
    llm = LLM(str(demo_path()), **BASE, **DATA)
    try:
        runner: Any = llm.engine.executor._rank  # type: ignore[attr-defined]
        packed, pack = list[int](), runner.model.pack

        def noted(images: Any, slots: int) -> Any:
            packed.append(len(images))
            return pack(images, slots)

        monkeypatch.setattr(runner.model, "pack", noted)
        ours, _ = answered(llm, range(6))
        assert_same([(a.tokens, b) for a, b in zip(ours, wanted, strict=True)])
        encoded = llm.engine.scheduler.totals.images_encoded
        assert 0 < sum(packed) < encoded
        assert runner.model.tower.blocks[0].width == runner.model.config.vision.hidden
    finally:
        llm.close()


def test_what_towers_cost_and_where_there_are_none() -> None:
    flags: dict[str, Any] = dict(model=str(demo_path()), device="cpu", tensor_parallel_size=2)
    shared, own = (
        load_model_config(EngineConfig(**flags)),
        load_model_config(EngineConfig(**flags, mm_encoder_tp_mode="data")),
    )
    assert own.encoder_data_parallel and not shared.encoder_data_parallel and own.vision is not None
    assert weights_bytes(own, 4, 2) - weights_bytes(shared, 4, 2) == 4 * own.vision.count_weights()
    assert can_share(own, 2)
    with pytest.raises(StartupError, match=r"--mm-encoder-tp-mode data: ranks of the hpu backend gather no rows"):
        check_ranks(own, "hpu", dataclasses.replace(SERVING, encoder_data_parallel=False))
    check_ranks(own, "hpu", SERVING)
    assert not load_model_config(EngineConfig(model=str(demo_path()), mm_encoder_tp_mode="data")).encoder_data_parallel


class Meeting:
    """Collectives of ranks that are threads."""

    def __init__(self, world: int) -> None:
        self.world, self._parts, self._barrier = world, dict[int, torch.Tensor](), Barrier(world, timeout=20)

    def of(self, rank: int) -> Any:
        def all_gather(x: torch.Tensor) -> torch.Tensor:
            self._parts[rank] = x.clone()
            self._barrier.wait()
            found = torch.cat([self._parts[i] for i in range(self.world)], -1)
            self._barrier.wait()
            return found

        return SimpleNamespace(rank=rank, world=self.world, all_gather=all_gather)


@pytest.mark.parametrize("parts", [1, 3])
def test_a_planned_launch_ends_with_the_rows_of_all_ranks(parts: int) -> None:
    """Ranks that encode nothing, or less than others, give rows of the sink; each row comes with all its parts."""
    rows = [[4, 7, 5], [9], []]
    meeting, count = Meeting(3), 4
    arenas = [torch.zeros(12 * parts, 2) for _ in rows]
    for rank, mine in enumerate(rows):
        for row in mine:
            arenas[rank].view(12, -1)[row] = float(10 * row + rank)

    def end(rank: int) -> None:
        backend: Any = SimpleNamespace(comm=meeting.of(rank), ops=CpuOps(), device=torch.device("cpu"))
        held: Any = SimpleNamespace(arena=arenas[rank])
        padded = [*rows[rank], *[SINK_ROW] * (count - len(rows[rank]))]
        GatheredRows(backend, held, parts).gather_in_launch(torch.tensor(padded))

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(end, range(3)))
    wanted = torch.zeros(12, 2 * parts)
    for rank, mine in enumerate(rows):
        wanted[mine] = torch.tensor([10.0 * row + rank for row in mine])[:, None]
    for arena in arenas:
        assert torch.equal(arena.view(12, -1)[2:], wanted[2:])


def compare(folder: Path, name: str, ranks: int) -> None:
    """A first start with towers of its own equals the plan; the next plan equals it in every row."""
    (folder / "config.json").write_text(json.dumps(HUB[name]))
    more = {"max_num_batched_tokens": 512} if name.startswith("gemma") else {}
    config = config_of(graph_reserved_mem=0.3, **{**SMALL, **more})
    model = dataclasses.replace(load_config(folder), encoder_data_parallel=True)
    needs = image_needs(model, {"max_pixels": 200_704} if name.startswith("Qwen") else {})
    first = on_paper(model, config, needs, 96 * GIB, ranks)
    started = run(model, config, needs, card(96 * GIB), ranks)
    paper = dict(first.ledger.rows())
    assert {n: paper[n] for n in BEFORE} == {n: started.rows[n] for n in BEFORE}
    assert started.rows["activations and workspace"] <= paper["activations and workspace"] * 1.01
    captured, costs = set(started.runner.graphs.list_captured()), prices(first)
    assert costs.keys() <= captured
    second = on_paper(model, config, needs, 96 * GIB, ranks)
    assert dict(second.ledger.rows()) == started.rows and not second.formula
    measured = prices(second)
    off = {str(b): round(costs[b] / measured[b] - 1, 4) for b in costs if b.stage in LAYERED}
    print(f"\n{name}, {ranks} ranks: prices off by {min(off.values()):+.4f} to {max(off.values()):+.4f}")
    assert off and all(abs(share) < 0.025 for share in off.values()), off


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", HUB)
def test_a_plan_with_towers_of_their_own_is_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, ranks: int
) -> None:
    monkeypatch.setenv("TRENCADIS_CACHE", str(tmp_path))
    compare(tmp_path, name, ranks)


LONG: dict[str, dict[str, Any]] = {
    "cpu": DATA,
    "hpu, all captured": {**DATA, **EMULATED, "warmup": "full"},
    "hpu, background, 4 ranks": {**DATA, **EMULATED, "warmup": "background", "tensor_parallel_size": 4},
    "hpu, 2 stages of 2 ranks": {**DATA, **EMULATED, "warmup": "full", "pipeline_parallel_size": 2},
    "twin of a card, all captured": {**DATA, "device": "cuda", "warmup": "full"},
}  # fmt: skip


@pytest.fixture(scope="module")
def wanted() -> Iterator[Wanted]:
    llm = LLM(str(demo_path()), **BASE)
    yield cache(lambda seeds: answered(llm, seeds))
    llm.close()


@pytest.mark.long
@pytest.mark.parametrize("name", LONG)
def test_two_hundred_prompts(name: str, wanted: Wanted, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is compiled after a full warm-up, and VISION launches replay."""
    monkeypatch.setenv("TRENCADIS_HPU_EMULATOR", "1")
    monkeypatch.setenv("TRENCADIS_CUDA_TWIN", "1")
    llm = LLM(str(demo_path()), **{**BASE, **LONG[name]})
    try:
        figures = same_of_many(llm, wanted)
        graphs = llm.engine.stats().graphs
        print(f"\n{name}: {figures}; compiled late {graphs.lazy_compiles}, again {graphs.recompiles}")
        assert graphs.recompiles == 0
        if LONG[name].get("warmup") == "full":
            assert graphs.lazy_compiles == 0
    finally:
        llm.close()


@pytest.mark.long
@pytest.mark.parametrize("device", ["cpu", "hpu", "compiled hpu", "cuda"])
def test_rows_of_several_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Qwen3-VL's, whose deeper layers give parts of a row; the tokens are those of one rank."""
    monkeypatch.setenv("TRENCADIS_HPU_EMULATOR", "1")
    monkeypatch.setenv("TRENCADIS_CUDA_TWIN", "1")
    if device == "compiled hpu":
        monkeypatch.setenv("PT_HPU_LAZY_MODE", "0")
    path, base = qwen3_vl(tmp_path), {**BASE, "mm_processor_kwargs": {"min_pixels": 4096, "max_pixels": 40_960}}
    flags = {"cpu": {}, "cuda": {"device": "cuda", "warmup": "skip"}}.get(device, EMULATED)
    found = []
    for more in ({}, {**DATA, **flags}):
        llm = LLM(str(path), **{**base, **more})
        found.append(answered(llm, range(2 if device == "compiled hpu" else 6))[0])
        llm.close()
    assert_same([(b.tokens, a) for a, b in zip(*found, strict=True)])


@pytest.mark.long
def test_rows_of_several_parts_on_the_first_of_two_stages(tmp_path: Path) -> None:
    """The last stage has no tower, and gets no parts of rows."""
    path = qwen3_vl(tmp_path, num_hidden_layers=4)
    base = {**BASE, "mm_processor_kwargs": {"min_pixels": 4096, "max_pixels": 40_960}}
    found = []
    for more in ({}, {"pipeline_parallel_size": 2}):
        llm = LLM(str(path), **{**base, **more})
        found.append(answered(llm, range(4))[0])
        llm.close()
    assert_same([(b.tokens, a) for a, b in zip(*found, strict=True)])
