"""How well seconds of launches are predicted on the emulator, whose clock has constants that the model does not see.

An engine serves random requests once, on a clock that counts what each launch does. Seconds are these counts times
constants that are drawn at random; the model knows sizes and seconds of half of the launches, and predicts the rest.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.traffic.requests import Traffic
from trencadis.backends.hpu.emulator import emulated_recipe_cache
from trencadis.backends.hpu.emulator.emulated_recipe_cache import LaunchCounts, LaunchRates
from trencadis.core.buckets import Bucket, Stage
from trencadis.core.engine.engine import Engine
from trencadis.core.engine.engine_builder import create_engine
from trencadis.core.engine_config import EngineConfig
from trencadis.core.graphs.graph_manager import LaunchTimer
from trencadis.core.shapes.launch_costs import Costs
from trencadis.core.shapes.measured_launch_times import (
    LEAST_LAUNCHES,
    LaunchTime,
    LaunchTimes,
    MeasuredCosts,
    residuals_of,
)

SMALL: dict[str, Any] = {
    "max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 64, "num_gpu_blocks_override": 64,
    "mm_processor_kwargs": {"min_pixels": 56 * 56, "max_pixels": 112 * 112},
}  # fmt: skip
LARGE: dict[str, Any] = {
    "max_model_len": 192, "max_num_seqs": 8, "max_num_batched_tokens": 192, "num_gpu_blocks_override": 96,
    "mm_processor_kwargs": {"min_pixels": 56 * 56, "max_pixels": 224 * 224},
}  # fmt: skip
CONSTANTS = LaunchRates((-5.0, -4.0), (-8.0, -6.0), (-12.0, -10.0), (-12.0, -10.0))  # type: ignore[arg-type]
"""Powers of ten between which the seconds of a launch, an operation, a multiplication and a byte are drawn.

So each of them may be most of what a launch takes, or nothing of it.
"""

Counts = NDArray[np.float64]


class Work:
    """Sums over launches: the number of launches, operations, multiplications and bytes moved."""

    def __init__(self, *counts: float) -> None:
        self.counts: Counts = np.array(counts, dtype=np.float64)

    def __add__(self, other: Work | float) -> Work:
        return Work(*self.counts + (other.counts if isinstance(other, Work) else other))

    __radd__ = __add__

    def __sub__(self, other: Work | float) -> Work:
        return Work(*self.counts - (other.counts if isinstance(other, Work) else other))


class CountingRates:
    """In the place of ``LaunchRates``: the clock shows work instead of seconds."""

    launch = Work(1, 0, 0, 0)

    def seconds(self, work: LaunchCounts) -> Work:
        return Work(1, *work)


class Launches(NamedTuple):
    """The policy's cost, and the counts of each launch of a served traffic."""

    paper: Costs
    found: list[tuple[Bucket, Counts]]


def serve(engine: Engine, requests: int) -> Launches:
    """Serves random requests with and without images."""
    rank: Any = getattr(engine.executor, "_rank")  # noqa: B009
    timer = rank.graphs.timer = LaunchTimer(rank.graphs.backend.start_stopwatch, every=1)
    found, step, info = list[tuple[Bucket, Counts]](), engine.step, engine.info()

    def step_and_take() -> Any:
        done = step()
        taken: Any = timer.take()  # their seconds are work
        found.extend((bucket, work.counts) for bucket, work in taken)
        return done

    engine.step = step_and_take  # type: ignore[method-assign]
    Traffic(engine, 1, requests, info.max_model_len, info.vocab_size, most=info.max_model_len // 12).run()
    return Launches(rank.plan.policy.cost, found)


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, vl_checkpoint: Path, tmp_path: Path) -> Iterator[Any]:
    """Makes an engine on the emulated card, whose clock counts."""
    monkeypatch.setenv("TRENCADIS_HPU_EMULATOR", "1")
    monkeypatch.setenv("TRENCADIS_CACHE", str(tmp_path))
    monkeypatch.setenv("PT_HPU_LAZY_MODE", "1")
    monkeypatch.setenv("VLLM_MULTIMODAL_BUCKETS", "64,128,256,512")
    monkeypatch.setattr(emulated_recipe_cache, "LaunchRates", CountingRates)
    made: list[Engine] = []

    def create(**flags: Any) -> Engine:
        config = EngineConfig(
            model=str(vl_checkpoint), device="hpu", dtype="float32", block_size=16, learn_buckets="off",
            encoder_cache_images=2, **flags,
        )  # fmt: skip
        made.append(create_engine(config))
        return made[-1]

    yield create
    for engine in made:
        engine.close()


class Errors(NamedTuple):
    """Relative errors of one draw of the constants: median and 95th percentile of the model's and the policy's."""

    median: float
    high: float
    paper_median: float
    paper_high: float


def draw(launches: Launches, seed: int) -> tuple[Errors, dict[Stage, Errors]]:
    """Draws constants, learns half of the launches, and returns the errors for the others, in all and by stage."""
    rng = random.Random(seed)
    rates = np.array([10 ** rng.uniform(*ends) for ends in CONSTANTS])  # type: ignore[misc]
    timed = [LaunchTime(bucket, float(counts @ rates)) for bucket, counts in launches.found]
    rng.shuffle(timed)
    half, held = LaunchTimes(launches.paper), timed[len(timed) // 2 :]
    for launch in timed[: len(timed) // 2]:
        half.add(*launch)
    fitted = half.fit()
    assert fitted is not None
    models = fitted, MeasuredCosts(launches.paper, fitted.scale)
    whole = [np.quantile([abs(m(b) / s - 1) for b, s in held], (0.5, 0.95)) for m in models]
    ours, paper = (residuals_of(model, held) for model in models)
    stages = {stage: Errors(*found[1:], *paper[stage][1:]) for stage, found in ours.items()}
    return Errors(*map(float, np.concatenate(whole))), stages


def check(launches: Launches, draws: int) -> None:
    """At most 10 and 25 % in every draw; prints a table of stages with the policy's figures."""
    assert len(launches.found) >= 2 * LEAST_LAUNCHES
    table = defaultdict[str, list[Errors]](list)
    for seed in range(draws):
        whole, stages = draw(launches, seed)
        for name, errors in {**{stage.name.lower(): found for stage, found in stages.items()}, "all": whole}.items():
            table[name].append(errors)
    print(f"\n{len(launches.found)} launches, {draws} draws: mean (worst) of the errors' median and 95th percentile")
    for name, rows in table.items():
        means, worst = np.mean(rows, axis=0), np.max(rows, axis=0)
        print(f"{name:8}" + "".join(f"  {mean:6.3f} ({most:6.3f})" for mean, most in zip(means, worst, strict=True)))
    assert max(e.median for e in table["all"]) <= 0.1 and max(e.high for e in table["all"]) <= 0.25


def test_seconds_of_launches_are_predicted_on_the_emulator(make: Any) -> None:
    check(serve(make(**SMALL), 60), 10)


@pytest.mark.long
def test_seconds_of_launches_are_predicted_in_many_draws(make: Any) -> None:
    check(serve(make(**LARGE), 200), 1000)
