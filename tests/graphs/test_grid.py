"""Starts over a grid of utilisations, reserves, models and image limits: none fails because of graphs.

Each model and image limit starts once on an emulated card without values; then the whole start-up runs at every
utilisation and reserve on a card that books the bytes which that start recorded. What cannot fit is refused before
anything is loaded, with a setting that does start.
"""

from __future__ import annotations

import itertools
import random
import re
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fakes.meta_start import GIB, Started, card, config_of, on_paper, run
from tests.fakes.recorded_card import RecordedBackend, Records
from tests.traffic.launch_lines import GUIDE, model_of
from trencadis.backends.hpu.emulator.emulated_bridge import make_bridge
from trencadis.backends.hpu.shape_policy import SERVING
from trencadis.core.checkpoint.model_config import ImageNeeds, ModelConfig
from trencadis.core.device.backend import BackendConfig, ProgramState
from trencadis.core.engine.device_startup import DeviceStart
from trencadis.core.engine.startup_checks import quantise_model
from trencadis.core.errors import StartupError
from trencadis.core.shapes.bucket_options import BucketOptions
from trencadis.core.shapes.bucket_planner import make_plan
from trencadis.core.shapes.bucket_profile import write_profile
from trencadis.core.shapes.shape_need_histogram import RECORDED_STAGES, NeedHistogram
from trencadis.core.startup_progress_and_warmup_pacing import SilentProgress
from trencadis.multimodal.qwen2_vl.smart_resize import largest_slots

RECORDINGS = Path(__file__).resolve().parents[2] / ".bench" / "records"
UTILISATIONS = (0.30, 0.40, 0.50, 0.60, 0.70, 0.80, 0.90, 0.99)
RESERVES = (0.0, 0.1, 0.2, 0.4, 0.6)
MODELS = (
    (36, 2048, 16, 2, 11008, 1), (28, 1536, 12, 2, 8960, 1), (28, 3584, 28, 4, 18944, 1),
    (32, 4096, 32, 8, 14336, 1), (40, 5120, 40, 8, 13824, 1), (48, 5120, 40, 8, 13824, 1),
    (48, 5120, 40, 8, 13824, 2), (64, 5120, 40, 8, 27648, 1), (64, 5120, 40, 8, 27648, 2),
    (64, 5120, 40, 8, 27648, 4), (64, 5120, 40, 8, 27648, 8), (80, 8192, 64, 8, 29568, 2),
    (80, 8192, 64, 8, 29568, 4), (80, 8192, 64, 8, 29568, 8), (80, 8192, 64, 8, 28672, 4),
    (60, 7168, 56, 8, 20480, 1), (60, 7168, 56, 8, 20480, 4), (32, 4096, 32, 32, 11008, 1),
    (40, 5120, 40, 40, 13824, 1), (24, 2048, 16, 16, 5504, 1),
)  # fmt: skip
"""Layers, hidden, heads, KV heads, MLP columns, ranks: 2B to 72B."""

PIXELS = (50_176, 1_003_520, 12_845_056)
SHORT: dict[str, Any] = {"max_model_len": 1024, "max_num_seqs": 2, "max_num_batched_tokens": 256}
DRAFTED = {**SHORT, "speculative_config": {"method": "ngram", "num_speculative_tokens": 4}}


def of_sizes(index: int) -> tuple[ModelConfig, int]:
    """A model and its ranks."""
    layers, hidden, heads, kv, wide, ranks = MODELS[index]
    return model_of(hidden, layers, heads, kv, wide), ranks


def images_of(pixels: int) -> ImageNeeds:
    return ImageNeeds(largest_slots(3136, pixels), 64, pixels // 784)


def recorded(sizes: tuple[ModelConfig, int], pixels: int, line: dict[str, Any]) -> tuple[Records, float]:
    """One start of everything on a card that holds it, and its seconds."""
    model, ranks = sizes
    begun = time.perf_counter()
    config = config_of(**line, graph_reserved_mem=0.5)
    started = run(model, config, images_of(pixels), card(65536 * GIB), ranks)
    records = Records()
    records.take(started)
    return records, time.perf_counter() - begun


class Grid:
    """Starts of one model under one image limit."""

    def __init__(
        self, model: tuple[ModelConfig, int], images: ImageNeeds, line: dict[str, Any], records: Records,
        total: int = 96 * GIB,
    ) -> None:  # fmt: skip
        self.total, self.images, self.line = total, images, line
        self.model, self.ranks = model
        self.records: dict[tuple[int, tuple[tuple[str, Any], ...]], Records] = {(self.ranks, ()): records}

    def start(self, seed: int, ranks: int, **flags: Any) -> str:
        """``starts``, or the line of a refusal that came before loading; anything else fails."""
        config = config_of(**{**self.line, **flags})
        other = tuple((k, v) for k, v in flags.items() if k.startswith("max_"))
        records = self.known(ranks, other)
        device = card(self.total)
        cfg = BackendConfig(
            dtype=torch.bfloat16, block_size=128, max_tokens=config.max_num_batched_tokens or 0,
            max_rows=config.max_num_seqs or 0, vocab_size=self.model.text.vocab, world=ranks,
            recurrent=self.model.text.recurrent is not None,
        )  # fmt: skip
        back, slot = random.Random(seed).choice([0.0, 0.5, 1.0]), self.model.vision.slot if self.model.vision else None
        backend = RecordedBackend(cfg, device, make_bridge(device), records, back, slot)
        try:
            start = DeviceStart.plan(config, self.model, backend, SilentProgress(), self.images)
        except StartupError as error:
            assert device.allocator.used["tensors"] == 0
            return str(error)
        check(Started(start, *start.run(), device))
        return "starts"

    def known(self, ranks: int, other: tuple[tuple[str, Any], ...]) -> Records:
        """What is recorded of so many ranks with these limits."""
        return self.records.setdefault((ranks, other), Records())

    def play(self, utilisation: float, reserve: float, seed: int) -> str:
        """``starts``, ``refused`` with a setting that does start, or ``too large`` where none can."""
        requested = {"gpu_memory_utilization": utilisation, "graph_reserved_mem": reserve}
        line = self.start(seed, self.ranks, **requested)
        if line == "starts":
            return line
        remedy = line.rpartition(";")[2]
        named = re.findall(r"--([a-z-]+) (\d+(?:\.\d+)?)", remedy)
        flags: dict[str, Any] = {n.replace("-", "_"): float(v) if "." in v else int(v) for n, v in named}
        if share := re.search(r"VLLM_GRAPH_RESERVED_MEM=(\d\.\d+)", remedy):
            flags["graph_reserved_mem"] = float(share[1])
        ranks = flags.pop("tensor_parallel_size", self.ranks)
        if made := re.search(r"--quantization (\w+)", remedy):  # its weights are not recorded
            usual = requested | {k: v for k, v in flags.items() if k == "gpu_memory_utilization"}
            config = config_of(**{**self.line, **usual}, quantization=made[1])
            on_paper(quantise_model(self.model, made[1]), config, self.images, self.total, self.ranks)
            return "refused"
        assert flags or ranks != self.ranks, f"no setting is named: {line}"
        assert self.start(seed, ranks, **{**requested, **flags}) == "starts", line
        return "refused"


def check(started: Started) -> None:
    """Up, every bucket compiled, books that add up, a KV cache for one request, no graph without a reserve."""
    start, rows, card_ = started.start, started.rows, started.card
    graphs = started.runner.graphs
    assert all(graphs.state(b) >= ProgramState.COMPILED for b in graphs.planned)
    assert sum(rows.values()) == card_.allocator.total and card_.allocator.free >= 0
    assert card_.allocator.free == rows["margin"] + rows["graph reserve unused"]
    limits, block = started.limits, start.paper.estimator.block_bytes(started.limits.block_size)
    assert rows["KV cache"] >= limits.row_blocks * block and started.cache.num_blocks >= limits.row_blocks
    assert start.config.graph_reserved_mem > 0 or not graphs.list_captured()


@pytest.fixture(autouse=True)
def first_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every start is a model's first."""
    monkeypatch.setenv("TRENCADIS_CACHE", "/dev/null/none")


@pytest.mark.parametrize(("every", "layers"), [(9, 4), pytest.param(1, 28, marks=pytest.mark.long)])
@pytest.mark.parametrize("line", [SHORT, pytest.param(DRAFTED, marks=pytest.mark.long)], ids=["plain", "drafts"])
def test_forty_starts(every: int, layers: int, line: dict[str, Any]) -> None:
    """Every utilisation and reserve once, or a ninth of them with fewer layers, with a short launch line that is
    recorded here.

    Every fourth on a large card, the others where 96 MiB are left for KV cache and graphs of 28 layers: one request
    needs 37 MiB.
    """
    _, hidden, heads, kv, wide, ranks = MODELS[1]
    sizes = model_of(hidden, layers, heads, kv, wide), ranks
    records, _ = recorded(sizes, 50_176, line)
    taken = on_paper(sizes[0], config_of(**line), images_of(50_176), 96 * GIB).ledger.memory_in_use.taken
    totals = 96 * GIB, taken + (96 << 20) * layers // 28
    large, small = (Grid(sizes, images_of(50_176), line, records, total) for total in totals)
    cases = list(enumerate(itertools.product(UTILISATIONS, RESERVES)))[::every]
    found = [(small if i % 4 else large).play(*case, i) for i, case in cases]
    assert found.count("starts") >= 15 // every and found.count("refused") >= 10 // every, found
    assert len(found) == -(-40 // every)


@pytest.mark.long
@pytest.mark.parametrize("index", range(len(MODELS)))
def test_starts_with_a_profile(index: int, tmp_path: Path) -> None:
    """Every utilisation and reserve, with 40 shapes for needs that were drawn at random."""
    static, needs, rng = (
        make_plan(SERVING, GUIDE, BucketOptions(), of_sizes(index)[0]),
        NeedHistogram(),
        random.Random(index),
    )
    for _ in range(200):
        bucket = rng.choice([b for b in static.buckets if b.stage in RECORDED_STAGES])
        needs.add(bucket.stage, [rng.randint(1, d) for d in bucket.dims], rng.expovariate(1))
    write_profile(str(tmp_path / "needs.json"), needs, 128)
    line = {"bucket_profile": str(tmp_path / "needs.json"), "max_graphs": 40}
    grid = Grid(of_sizes(index), images_of(PIXELS[index % 3]), line, Records())
    found = Counter(grid.play(*case, i) for i, case in enumerate(itertools.product(UTILISATIONS, RESERVES)))
    print(f"{MODELS[index]} {PIXELS[index % 3]}: {dict(found)}")
    assert sum(found.values()) == 40


@pytest.mark.long
@pytest.mark.parametrize("pixels", PIXELS)
@pytest.mark.parametrize("index", range(len(MODELS)))
def test_all_starts(index: int, pixels: int) -> None:
    """40 of the 2,400; recordings are kept beside the benchmarks, so a run that was broken off goes on."""
    path = RECORDINGS / f"{'-'.join(map(str, MODELS[index]))}-{pixels}.json"
    took = 0.0
    if not path.exists():
        records, took = recorded(of_sizes(index), pixels, {})
        records.save(path)
    begun = time.perf_counter()
    grid = Grid(of_sizes(index), images_of(pixels), {}, Records.load(path))
    found = Counter(grid.play(*case, i) for i, case in enumerate(itertools.product(UTILISATIONS, RESERVES)))
    seconds = time.perf_counter() - begun
    print(f"{MODELS[index]} {pixels}: {dict(found)}; recorded in {took:.1f} s, 40 starts in {seconds:.1f} s")
    assert sum(found.values()) == 40
