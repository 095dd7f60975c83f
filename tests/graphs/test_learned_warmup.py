"""Warm-up and memory of the shapes of a profile on the emulator, beside those of the shapes of the limits."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from benchmarks.traces.generate import PICTURED, TRACES
from tests.fakes.meta_start import GIB, Started, card, config_of, on_paper, run
from tests.traffic.launch_lines import GUIDE, model_of
from trencadis.backends.hpu.emulator.emulated_recipe_cache import RecipeCacheConfig, SavedRecipes
from trencadis.backends.hpu.shape_policy import SERVING
from trencadis.core.checkpoint.model_config import ImageNeeds
from trencadis.core.engine import device_startup
from trencadis.core.engine.device_startup import profile_activations
from trencadis.core.memory import graph_measurement_cache
from trencadis.core.memory.graph_measurement_cache import Measurements
from trencadis.core.shapes.bucket_options import BucketOptions
from trencadis.core.shapes.bucket_planner import make_plan
from trencadis.core.shapes.bucket_profile import write_profile
from trencadis.server.plan.trace_plan_comparison import read_request, record_needs, replay_steps

MODEL = model_of(3584, 28, 28, 4, 18944)
IMAGES = ImageNeeds(65536, 64, 16384)
KEY = graph_measurement_cache.MeasurementKey(
    graph_measurement_cache.fingerprint(MODEL), "hpu (emulated)", "16 bit", 1, 128
)


class Compiled(NamedTuple):
    """A start, and its seconds of compilation: all of them, and those of its warm-up."""

    started: Started
    seconds: float
    warmup: float


def start(folder: Path, **flags: object) -> Compiled:
    """The guide's line with the sizes of 7B on an empty card, with the recipes of ``folder``.

    Before warm-up the largest launches are compiled, whose activations are measured.
    """
    on, before = card(96 * GIB), list[float]()
    on.clock.saved = SavedRecipes(RecipeCacheConfig(folder), "release")

    def profile(*args: Any) -> Any:
        found = profile_activations(*args)
        before.append(on.clock.seconds)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_startup, "profile_activations", profile)
        started = run(MODEL, config_of(**flags), IMAGES, on)
    return Compiled(started, on.clock.seconds, on.clock.seconds - before[-1])


@pytest.mark.long
def test_a_profile_compiles_a_quarter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """40 shapes of text and images instead of 173; a second start finds their recipes."""
    monkeypatch.setenv("TRENCADIS_CACHE", str(tmp_path / "cache"))
    static = start(tmp_path / "recipes")
    plan = make_plan(SERVING, GUIDE, BucketOptions(), MODEL)
    for name, generate in {"chat": TRACES["chat"], **PICTURED}.items():
        traffic = [read_request(r) for seed in (201, 202, 203) for r in generate(seed, 400)]
        path = tmp_path / f"{name}.json"
        write_profile(str(path), record_needs(replay_steps(traffic, GUIDE), plan), 128)
        flags = {"bucket_profile": str(path), "max_graphs": 40}
        first, second = (start(tmp_path / name, **flags) for _ in range(2))
        ratio, warmup, again = (
            first.seconds / static.seconds,
            first.warmup / static.warmup,
            second.seconds / static.seconds,
        )
        runner = first.started.runner
        print(
            f"{name}: {len(runner.plan.buckets)} shapes, {ratio:.3f} of a start's seconds, {warmup:.3f} of those of"
            f" warm-up ({first.warmup:.0f} of {static.warmup:.0f}), then {again:.3f}"
        )
        assert warmup <= 0.25 and ratio <= 0.255
        assert again <= 0.1 and len(runner.graphs.planned) <= 56


@pytest.mark.long
@pytest.mark.parametrize(("name", "least"), [("chat", 4.0), ("scans", 1.0), ("video-mix", 3.5)])
def test_a_profile_leaves_more_memory_for_the_kv_cache(
    name: str, least: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ``--graph-memory auto``, once a start has measured the graphs of all shapes."""
    monkeypatch.setenv("TRENCADIS_CACHE", str(tmp_path / "cache"))
    plan = make_plan(SERVING, GUIDE, BucketOptions(), MODEL)
    traffic = [read_request(r) for seed in (201, 202, 203) for r in {**TRACES, **PICTURED}[name](seed, 400)]
    path = tmp_path / "needs.json"
    write_profile(str(path), record_needs(replay_steps(traffic, GUIDE), plan), 128)
    found = []
    for flags in ({}, {"bucket_profile": str(path), "max_graphs": 40}):
        formulas = on_paper(MODEL, config_of(**flags), IMAGES, 96 * GIB).prices
        measured = Measurements({p.bucket: p.alone for p in formulas})
        graph_measurement_cache.store(KEY, measured, graph_measurement_cache.folder())
        planned = on_paper(MODEL, config_of(graph_memory="auto", **flags), IMAGES, 96 * GIB)
        graphs = sum(len(taken) for taken in planned.selection.taken.values())
        found.append(planned.ledger.memory_split.kv / GIB)
        print(f"{name}: {len(planned.prices)} shapes, {graphs} graphs, {found[-1]:.2f} GiB of KV cache")
    assert found[1] - found[0] >= least
