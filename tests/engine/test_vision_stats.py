"""What an engine reports about images: launches, slots, caches, seconds; and shapes above a user's list."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trencadis.core.buckets import Stage
from trencadis.core.engine.engine import Engine
from trencadis.core.engine.engine_builder import create_engine
from trencadis.core.engine_config import EngineConfig
from trencadis.core.media_spans import MediaSpan
from trencadis.core.request import Delta, Request, RequestStats, SamplingParams
from trencadis.multimodal.patch_packing import count_slots
from trencadis.multimodal.qwen2_vl.qwen2_and_qwen2_5_vision_config import PATCH_VALUES

FLAGS: dict[str, Any] = {
    "dtype": "float32", "max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 256,
    "mm_processor_kwargs": {"min_pixels": 56 * 56, "max_pixels": 336 * 336},
}  # fmt: skip

Make = Callable[..., Engine]


@pytest.fixture
def make(vl_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Make]:
    monkeypatch.setenv("TRENCADIS_HPU_EMULATOR", "1")
    monkeypatch.setenv("TRENCADIS_CACHE", str(tmp_path))
    made: list[Engine] = []

    def create(buckets: str = "", **flags: Any) -> Engine:
        if buckets:
            monkeypatch.setenv("VLLM_MULTIMODAL_BUCKETS", buckets)
        made.append(create_engine(EngineConfig(model=str(vl_checkpoint), **{**FLAGS, **flags})))
        return made[-1]

    yield create
    for engine in made:
        engine.close()


def shown(name: str, *grids: tuple[int, int]) -> Request:
    tokens, spans = [5] * 3, []
    for h, w in grids:
        spans.append(MediaSpan(len(tokens), h * w // 4, f"{h:04x}{w:04x}", (1, h, w), count_slots((1, h, w))))
        tokens += [7] * (h * w // 4)
    return Request(name, [*tokens, 5], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True), spans)


def run(engine: Engine, *requests: Request) -> dict[str, RequestStats]:
    """Statistics by request; pixels are made from the grid."""
    spans = {r.id: r.spans for r in requests}
    ended: dict[str, RequestStats] = {}
    for request in requests:
        engine.add(request)
    while len(ended) < len(requests):
        deltas: list[Delta] = engine.step()
        for delta in deltas:
            assert delta.finish != "error", delta.message
            if delta.finish and delta.stats is not None:
                ended[delta.id] = delta.stats
        for id, index in engine.needs():
            _, h, w = spans[id][index].grid
            pixels = np.random.default_rng(h * 64 + w).integers(0, 256, (h * w, PATCH_VALUES), dtype=np.uint8)
            engine.add_media(id, index, pixels)
    return ended


def test_counts_and_seconds(make: Make) -> None:
    engine = make()
    stats = run(engine, shown("a", (8, 8), (10, 6)), shown("b", (8, 8)))
    assert (stats["a"].images, stats["b"].images) == (2, 1)
    assert stats["a"].image_hits + stats["b"].image_hits == 1, "the image that they share is encoded once"
    assert stats["a"].encode > 0 and stats["a"].launches > 1 and stats["a"].misses == 0
    assert stats["a"].first_buckets and all("[" in name for name in stats["a"].first_buckets)
    assert [name.split("[")[0] for name in stats["a"].last_buckets] == ["decode"]
    vision = [use for use in engine.stats().buckets if use.stage == "vision"]
    assert sum(use.items for use in vision) == 2
    assert sum(use.needed for use in vision) == count_slots((1, 8, 8)) + count_slots((1, 10, 6))
    again = run(engine, shown("c", (8, 8)))["c"]
    assert (again.images, again.image_hits, again.encode) == (1, 1, 0.0)


def make_images(seed: int, count: int) -> list[Request]:
    """Requests of one or two images with sides of up to 24 patches."""
    rng = np.random.default_rng(seed)

    def grids() -> list[tuple[int, int]]:
        sides = 2 * rng.integers(2, 13, (int(rng.integers(1, 3)), 2))
        return [(int(h), int(w)) for h, w in sides if h * w <= 400]

    return [shown(f"r{i}", *grids()) for i in range(count)]


def test_the_default_list_has_no_misses_and_nothing_compiles(make: Make) -> None:
    engine = make(device="hpu", block_size=64)
    found = run(engine, *make_images(1, 24))
    stats = engine.stats()
    vision = [use for use in stats.buckets if use.stage == "vision"]
    assert vision and all(use.planned and not use.miss for use in stats.buckets)
    assert stats.graphs.lazy_compiles == stats.graphs.recompiles == 0 == sum(s.misses for s in found.values())
    assert sum(use.items for use in vision) > len(vision), "nothing was packed"


def test_above_a_users_list_only_escape_shapes_run_and_are_counted(make: Make) -> None:
    engine = make("64,128", device="hpu", block_size=64)
    requests = make_images(2, 24)
    plan = engine.executor._rank.plan  # type: ignore[attr-defined]
    found = run(engine, *requests)
    stats = engine.stats()
    vision = [use for use in stats.buckets if use.stage == "vision"]
    above = [use for use in vision if not use.planned]
    spans = {s.digest: s.slots for r in requests for s in r.spans}
    assert len(above) == sum(slots > 128 for slots in spans.values()) and all(use.items == 1 for use in above)
    escapes = {plan.fit(Stage.VISION, (slots,)).dims[0] for slots in spans.values() if slots > 128}
    assert {use.padded for use in above} == escapes and all(use.padded <= 128 for use in vision if use.planned)
    assert stats.graphs.lazy_compiles == len(escapes) and stats.graphs.recompiles == 0
    assert sum(s.misses for s in found.values()) > 0
