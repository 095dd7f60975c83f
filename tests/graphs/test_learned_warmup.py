"""Warm-up of the shapes of a profile on the emulator's clock, beside that of the shapes of the limits."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.traces.generate import PICTURED, TRACES
from tests.fakes.meta_start import GIB, Started, card, config_of, run
from tests.traffic.launch_lines import GUIDE, model_of
from trencadis.backends.hpu.emulator.emulated_recipe_cache import RecipeCacheConfig, SavedRecipes
from trencadis.backends.hpu.shape_policy import SERVING
from trencadis.core.checkpoint.model_config import ImageNeeds
from trencadis.core.shapes.bucket_options import BucketOptions
from trencadis.core.shapes.bucket_planner import make_plan
from trencadis.core.shapes.bucket_profile import write_profile
from trencadis.server.plan.trace_plan_comparison import read_request, record_needs, replay_steps

MODEL = model_of(3584, 28, 28, 4, 18944)
IMAGES = ImageNeeds(65536, 64, 16384)
BEFORE_WARMUP = 15.0
"""Most seconds of compilation before warm-up, of the launches whose activations are measured."""


def start(folder: Path, **flags: object) -> Started:
    """The guide's line with the sizes of 7B on an empty card, with the recipes of ``folder``."""
    on = card(96 * GIB)
    on.clock.saved = SavedRecipes(RecipeCacheConfig(folder), "release")
    return run(MODEL, config_of(**flags), IMAGES, on)


@pytest.mark.long
def test_a_profile_compiles_a_quarter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """40 shapes of text and images instead of 173; a second start finds their recipes."""
    monkeypatch.setenv("TRENCADIS_CACHE", str(tmp_path / "cache"))
    static = start(tmp_path / "recipes").card.clock.seconds
    plan = make_plan(SERVING, GUIDE, BucketOptions(), MODEL)
    for name, generate in {"chat": TRACES["chat"], **PICTURED}.items():
        traffic = [read_request(r) for seed in (201, 202, 203) for r in generate(seed, 400)]
        path = tmp_path / f"{name}.json"
        write_profile(str(path), record_needs(replay_steps(traffic, GUIDE), plan), 128)
        flags = {"bucket_profile": str(path), "max_graphs": 40}
        first, second = (start(tmp_path / name, **flags) for _ in range(2))
        ratio, again = (found.card.clock.seconds / static for found in (first, second))
        print(f"{name}: {len(first.runner.plan.buckets)} shapes, {ratio:.3f} of the seconds, then {again:.3f}")
        assert (first.card.clock.seconds - BEFORE_WARMUP) / (static - BEFORE_WARMUP) <= 0.25 and ratio <= 0.255
        assert again <= 0.1 and len(first.runner.graphs.planned) <= 56
