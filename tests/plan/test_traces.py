"""Our plan on three kinds of traffic, on seeds that it was not chosen with, beside other plans."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from benchmarks.traces.generate import TRACES
from tests.traffic.launch_lines import model_of
from trencadis.backends.hpu.shape_policy import SERVING
from trencadis.core.buckets import Stage
from trencadis.core.checkpoint.model_config import ImageNeeds, ModelConfig
from trencadis.core.engine.startup_plan import DryRun, PlannedDevice, StartupPlan
from trencadis.core.engine_config import EngineConfig
from trencadis.core.scheduling.encoder_scheduler import ImagePacker
from trencadis.core.shapes.bucket_options import BucketOptions
from trencadis.server.plan.trace_plan_comparison import (
    StepNeeds,
    Traffic,
    compare_plans,
    list_vision_launches,
    read_request,
    read_trace,
    replay_needs,
    replay_steps,
)

MODEL = model_of(3584, 28, 28, 4, 18944)


def planned(model: ModelConfig = MODEL) -> StartupPlan:
    config = EngineConfig(max_num_seqs=128, max_num_batched_tokens=32768, max_model_len=32768)
    return DryRun(
        config, model, SERVING, BucketOptions(), ImageNeeds(65536, 64, 16384), PlannedDevice("hpu", 96 << 30)
    ).plan_startup()


def check(name: str, seed: int, count: int, model: ModelConfig = MODEL) -> None:
    start = planned(model)
    found = compare_plans(replay_needs([read_request(r) for r in TRACES[name](seed, count)], start), start, model)
    plans = found["plans"]
    ours, *others = (plan for name, plan in plans.items() if not name.startswith(("learned", "linear")))
    assert ours["unplanned"] == 0 and plans["linear"]["graphs"] > 4 * ours["graphs"]
    for learned in (plan for name, plan in plans.items() if name.startswith("learned")):
        assert 1.0 <= learned["least_padding"] <= learned["cost"] / found["real"]["cost"]
    for other in others:
        assert ours["graphs"] <= other["graphs"] and ours["cost"] < other["cost"], (name, seed, plans)


@pytest.mark.parametrize("seed", [101, pytest.param(102, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", TRACES)
def test_ours_costs_least_at_no_more_graphs(name: str, seed: int) -> None:
    check(name, seed, 120)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(201, 211))
@pytest.mark.parametrize("name", TRACES)
def test_ours_costs_least_on_many_seeds(name: str, seed: int) -> None:
    check(name, seed, 400)


@pytest.mark.long
@pytest.mark.parametrize("sizes", [(256, 4, 4, 2, 512), (896, 24, 14, 2, 4864), (2048, 36, 16, 2, 11008)])
@pytest.mark.parametrize("name", TRACES)
def test_small_models_too(name: str, sizes: tuple[int, int, int, int, int]) -> None:
    """Their plans lose buckets to stay under 220."""
    for seed in (201, 202, 203):
        check(name, seed, 120, model_of(*sizes))


def test_the_reference_plan_is_the_one_that_costs_519_graphs() -> None:
    """128 requests, 32768 tokens, blocks of 128, 8294 KV blocks."""
    from trencadis.server.plan.trace_plan_comparison import make_exponential_plan

    p = planned()
    plan, graphs = make_exponential_plan(p.plan, p.limits, 8294)
    assert graphs == 519 and len(plan.buckets) <= graphs


@pytest.mark.parametrize("name", TRACES)
def test_traces_are_the_same_for_the_same_seed(name: str) -> None:
    assert list(TRACES[name](5, 40)) == list(TRACES[name](5, 40)) != list(TRACES[name](6, 40))
    assert len(list(TRACES[name](5, 40))) == 40


def test_steps_compute_every_token_once() -> None:
    limits = planned().limits
    traffic = [read_request(r) for r in TRACES["image-chat"](7, 60)]
    needs = list(replay_steps(traffic, limits))
    done = sum(n.tokens for s in needs for n in s.rows)
    assert done == sum(t.prompt + t.output - 1 for t in traffic)
    assert sum(sum(s.images) for s in needs) == sum(sum(t.images) for t in traffic)
    for step in needs:
        assert sum(n.tokens for n in step.rows) <= limits.max_tokens and len(step.rows) <= limits.max_rows


def test_images_share_launches_as_the_scheduler_shares_them() -> None:
    """One launch a step of what waits: the packer's choice each time, and the rest after the last step."""
    plan = planned().plan
    rng = random.Random(3)
    needs = [StepNeeds((), tuple(64 * rng.randint(1, 150) for _ in range(rng.randint(0, 6)))) for _ in range(30)]
    packer, waiting, wanted = ImagePacker(plan, plan.policy.encoder_slots), [], []
    for images in [*(s.images for s in needs), *[()] * 200]:
        waiting += images
        chosen = [waiting[i] for i in packer.choose(waiting)]
        for slots in chosen:
            waiting.remove(slots)
        wanted += [plan.fit(Stage.VISION, (sum(chosen),))] if chosen else []
    found = list(list_vision_launches(needs, plan))
    assert found == wanted and not waiting
    alone = [plan.fit(Stage.VISION, (n,)) for s in needs for n in s.images]
    assert len(found) < len(alone)


def test_a_long_prompt_is_chunked_and_a_cached_one_starts_later() -> None:
    limits = planned().limits
    needs = list(replay_steps([Traffic(0.0, 40_000, 2, 0), Traffic(0.0, 1000, 1, 900)], limits))
    assert [(n.context, n.tokens) for n in needs[0].rows] == [(0, 32767), (896, 1)]


def test_videos_run_as_images_of_two_frames_and_slots_are_taken_as_they_are() -> None:
    image = read_request({"arrival": 0, "prompt": 5, "output": 1, "images": [[640, 480]]})
    video = read_request({"arrival": 0, "prompt": 5, "output": 1, "videos": [[640, 480, 7]]})
    assert video.images == image.images * 4 and video.prompt - 5 == 4 * (image.prompt - 5)
    slots = read_request({"arrival": 0, "prompt": 99, "output": 1, "slots": [64, 128]})
    assert slots.images == (64, 128) and slots.prompt == 99


def test_trace_files_are_refused_by_line(tmp_path: Path) -> None:
    from trencadis.core.errors import StartupError

    path = tmp_path / "trace"
    for text in (
        '{"arrival": 0, "prompt": 5, "output": 1}\n{"prompt": 5}',
        '{"arrival": 0, "prompt": 0, "output": 1}',
        '{"arrival": 5, "prompt": 5, "output": 1}\n{"arrival": 4.9, "prompt": 5, "output": 1}',
        '{"arrival": 0, "prompt": 5, "output": 1, "lunch": 1}',
        '{"arrival": NaN, "prompt": 5, "output": 1}',
        '{"arrival": 0, "prompt": 1e9, "output": 1}',
        '{"arrival": 0, "prompt": 5, "output": 1, "cached": -1}',
        '{"arrival": 0, "prompt": 5, "output": 1, "slots": [0]}',
        '{"arrival": 0, "prompt": 5, "output": 1, "videos": [[64, 64]]}',
        "[]",
    ):
        path.write_text(text)
        with pytest.raises(StartupError, match="line"):
            read_trace(str(path))
    path.write_text("\n")
    with pytest.raises(StartupError, match=r"not a request|holds no request"):
        read_trace(str(path))
    with pytest.raises(StartupError, match="No such file"):
        read_trace(str(tmp_path / "none"))
