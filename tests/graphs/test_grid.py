"""Starts over a grid of utilisations, reserves, models and image limits: none fails because of graphs.

What graphs really cost is the formula's bytes times a factor that the start-up does not know.
"""

from __future__ import annotations

import itertools
import random
import re
from dataclasses import replace
from typing import Any

import pytest
from fake_device import GIB, POLICY, FakeDevice
from launch_lines import model_of

from trencadis.backends.hpu.policy import SERVING
from trencadis.core.backend import State
from trencadis.core.bucket_env import BucketsAsked
from trencadis.core.buckets import Bucket
from trencadis.core.capture import Captures
from trencadis.core.config import EngineConfig
from trencadis.core.errors import StartupError
from trencadis.core.graphs import GraphManager
from trencadis.core.planning import Device, Images, Planned, Start
from trencadis.core.warmup import Warmup
from trencadis.multimodal.sizes import largest_slots

UTILISATIONS = (0.30, 0.40, 0.50, 0.60, 0.70, 0.80, 0.90, 0.99)
RESERVES = (0.0, 0.1, 0.2, 0.4, 0.6)
MODELS = [
    (layers, hidden, heads, kv, wide, ranks)
    for layers, hidden, heads, kv, wide, ranks in (
        (36, 2048, 16, 2, 11008, 1), (28, 1536, 12, 2, 8960, 1), (28, 3584, 28, 4, 18944, 1),
        (32, 4096, 32, 8, 14336, 1), (40, 5120, 40, 8, 13824, 1), (48, 5120, 40, 8, 13824, 1),
        (48, 5120, 40, 8, 13824, 2), (64, 5120, 40, 8, 27648, 1), (64, 5120, 40, 8, 27648, 2),
        (64, 5120, 40, 8, 27648, 4), (64, 5120, 40, 8, 27648, 8), (80, 8192, 64, 8, 29568, 2),
        (80, 8192, 64, 8, 29568, 4), (80, 8192, 64, 8, 29568, 8), (80, 8192, 64, 8, 28672, 4),
        (60, 7168, 56, 8, 20480, 1), (60, 7168, 56, 8, 20480, 4), (32, 4096, 32, 32, 11008, 1),
        (40, 5120, 40, 40, 13824, 1), (24, 2048, 16, 16, 5504, 1),
    )
]  # fmt: skip
PIXELS = (50_176, 1_003_520, 12_845_056)
GRID = list(itertools.product(UTILISATIONS, RESERVES, range(len(MODELS)), PIXELS))


def planned(utilisation: float, reserve: float, model: int, pixels: int, **flags: Any) -> Planned:
    """What the start-up knows before it loads."""
    layers, hidden, heads, kv, wide, ranks = MODELS[model]
    config = model_of(hidden, layers, heads, kv, wide)
    images = Images(largest_slots(3136, pixels), 64, pixels // 784)
    flags = {"max_model_len": 32768, "gpu_memory_utilization": utilisation, "graph_reserved_mem": reserve, **flags}
    return Start(
        EngineConfig(**flags), config, SERVING, BucketsAsked(), images,
        Device("hpu", 96 * GIB, 1 * GIB, ranks, 2),
    ).planned()  # fmt: skip


def start(found: Planned, seed: int) -> None:
    """The real captures and warm-up on an allocator with costs of its own; it must come up with books that add up."""
    rng = random.Random(seed)
    cost = {p.bucket: int(p.alone * rng.choice([0.3, 0.9, 1.0, 1.1, 3.0])) for p in found.prices}
    before, division = found.ledger.before, found.ledger.division
    device = FakeDevice(
        policy=replace(POLICY, cost=SERVING.cost), size=before.total, used=before.taken + division.kv,
        cost=cost.__getitem__, returned=rng.choice([0.0, 0.0, 0.5, 1.0]),
    )  # fmt: skip
    bodies: Any = dict.fromkeys(("text", "vision", "greedy", "full", "reset"))
    manager = GraphManager(device, bodies, found.plan)  # type: ignore[arg-type]
    captures = Captures(manager, before, division, found.settings, found.prices, multimodal=True)
    Warmup(manager, captures).full()
    assert all(manager.state(b) >= State.COMPILED for b in manager.planned)
    check(device, captures, found)


def check(device: FakeDevice, captures: Captures, found: Planned) -> None:
    rows = dict(captures.ledger.rows())
    assert sum(rows.values()) == device.size and device.free() >= 0
    assert device.used == device.size - rows["margin"] - rows["graph reserve unused"]
    assert rows["KV cache"] >= found.limits.row_blocks * found.sized.block_bytes(found.limits.block_size)
    taken: list[Bucket] = captures.graphs.captured()
    assert not (found.settings.reserved == 0 and taken)


def play(case: tuple[float, float, int, int], seed: int) -> str:
    """``starts``, or ``refused`` with a setting that does start, or ``too large`` where none does."""
    try:
        start(planned(*case), seed)
        return "starts"
    except StartupError as error:
        line = str(error)
    remedy = line.rpartition(";")[2]
    named = re.findall(r"--([a-z-]+) (\d+(?:\.\d+)?)", remedy)
    flags: dict[str, Any] = {n.replace("-", "_"): float(v) if "." in v else int(v) for n, v in named}
    if reserve := re.search(r"VLLM_GRAPH_RESERVED_MEM=(\d\.\d+)", remedy):
        flags["graph_reserved_mem"] = float(reserve[1])
    if not flags:
        assert "--tensor-parallel-size" in line, line
        return "too large"
    start(planned(*case, **flags), seed)
    return "refused"


def test_forty_starts() -> None:
    cases = random.Random(0).sample(GRID, 40)
    results = [play(case, i) for i, case in enumerate(cases)]
    assert results.count("starts") >= 25 and "refused" in results, results


@pytest.mark.long
def test_all_starts() -> None:
    results = [play(case, i) for i, case in enumerate(GRID)]
    print({r: results.count(r) for r in set(results)})
    assert len(results) == 2400 and results.count("starts") >= 1500
