"""Many requests to a model with recurrent layers and images on devices with planned shapes.

Nothing compiles after warm-up, every launch is planned, the ledger holds to the byte, and slots of state are all
accounted for.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.speculation.test_planned_devices import check_ledger, graphs_of
from tests.traffic.requests import Pixels, Traffic, pixels
from tests.vision.vision_checkpoints import qwen3_5
from trencadis.core.engine.engine import Engine
from trencadis.core.engine.engine_builder import create_engine
from trencadis.core.engine_config import EngineConfig
from trencadis.core.media_spans import MediaSpan
from trencadis.core.request import Request
from trencadis.multimodal.patch_packing import count_slots

MANY = int(os.environ.get("TRENCADIS_TEST_REQUESTS", "10000"))
SEED = int(os.environ.get("TRENCADIS_TEST_SEED", "3"))
"""Requests of the long run, which may be made in pieces."""
LENGTH = 256
FLAGS: dict[str, Any] = {
    "dtype": "bfloat16", "threads": 1, "max_model_len": LENGTH, "max_num_seqs": 8, "max_num_batched_tokens": 192,
    "block_size": 16, "num_gpu_blocks_override": 60, "encoder_cache_images": 4, "state_snapshot_memory": 0.3,
    "mm_processor_kwargs": {"min_pixels": 64 * 64, "max_pixels": 128 * 128},
}  # fmt: skip
DEVICES: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "twin": ({"device": "cuda", "policy": "twin"}, {}),
    "lazy": ({"device": "hpu"}, {"PT_HPU_LAZY_MODE": "1"}),
    "compiled": ({"device": "hpu"}, {"PT_HPU_LAZY_MODE": "0"}),
}
"""Flags and variables."""
VALUES = 1536
"""Values of a patch of Qwen3.5."""

Make = Callable[..., Engine]


class MixedTraffic(Traffic):
    """Half the requests have images; some are answered by beams, in choices or with log-probabilities, or aborted."""

    def request(self, rng: random.Random) -> Request:
        """Request number ``sent``, whose images count as this family counts them."""
        made = super().request(rng)
        spans = [replace(span, slots=count_slots(span.grid, windows=False)) for span in made.spans]
        return replace(made, spans=spans)

    def draw(self, span: MediaSpan) -> Pixels:
        return pixels(span, VALUES)


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Make]:
    """``make("twin")``: an engine of a small random Qwen3.5; closed with the test."""
    monkeypatch.setenv("TRENCADIS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("VLLM_MULTIMODAL_BUCKETS", "64,128")
    monkeypatch.setenv("TRENCADIS_HPU_EMULATOR", "1")
    made: list[Engine] = []

    def create(device: str, **flags: Any) -> Engine:
        own, variables = DEVICES[device]
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        path = qwen3_5(tmp_path / "model", num_hidden_layers=3)
        made.append(create_engine(EngineConfig(**{"model": str(path), **FLAGS, **own, **flags})))
        return made[-1]

    yield create
    for engine in made:
        engine.close()


def serve(engine: Engine, count: int, seed: int, **fields: Any) -> MixedTraffic:
    """Runs ``count`` requests and asserts what holds after them."""
    graphs, before = graphs_of(engine), graphs_of(engine).backend.compilations()
    length = engine.scheduler.limits.max_model_len
    traffic = MixedTraffic(engine, seed, count, length, engine.info().vocab_size, most=8, extras=0.1, **fields)
    traffic.run()
    stats, scheduler = engine.stats(), engine.scheduler
    assert (stats.graphs.recompiles, stats.graphs.lazy_compiles) == (0, 0)
    assert graphs.backend.compilations() == before and set(graphs.hits) <= graphs.planned
    scheduler.check()
    assert scheduler.pool.used == 0 and scheduler.states is not None
    check_ledger(engine)
    return traffic


@pytest.mark.parametrize(
    "device", ["twin", *(pytest.param(one, marks=pytest.mark.long) for one in ("lazy", "compiled"))]
)
def test_nothing_compiles_after_warm_up(device: str, make: Make) -> None:
    serve(make(device, max_model_len=128, max_num_batched_tokens=96), 30, 1)


@pytest.mark.long
@pytest.mark.parametrize("device", DEVICES)
def test_nothing_compiles_in_many_requests(device: str, make: Make) -> None:
    """With prefixes that later requests share, preemption, aborts, beams, choices and log-probabilities."""
    begun = time.monotonic()
    engine = make(device)
    ready, done = time.monotonic(), 0
    while done < MANY:
        count = min(500, MANY - done)
        serve(engine, count, SEED * 1000 + done, together=24)
        done += count
        print(f"{device}: {done} requests, {time.monotonic() - ready:.0f} s", flush=True)
    totals, states = engine.scheduler.totals, engine.scheduler.states
    assert states is not None
    assert totals.preemptions and totals.prefix_hits and totals.images_encoded and states.pool.hits
    print(
        f"{device}: {MANY} requests, {sum(graphs_of(engine).hits.values())} launches, 0 compiled; {totals.preemptions} "
        f"preemptions, {states.pool.hits} starts with a snapshot, {states.pool.evictions} dropped; started in "
        f"{ready - begun:.0f} s, answered in {time.monotonic() - ready:.0f} s"
    )
