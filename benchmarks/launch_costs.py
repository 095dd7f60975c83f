"""Measures how well the cost model of learned shapes, and the planner's polynomial, predict the seconds of launches.

python -m benchmarks.launch_costs [--model demo|half] [--device cpu] [--requests 200] [--seeds 3] [--threads 2]
    [--cpu-time]

An engine serves random requests; every launch is measured on the device (``core/graphs/graph_manager.LaunchTimer``).
The model (``core/shapes/measured_launch_times.py``) is fitted to a random half of the launches, and the other half is
predicted.
*Polynomial* is that of the planner, scaled by the same launches. Errors are relative, of single launches. *Repeated* is
the error of the median of the bucket's own launches in the learned half, below which no function of the bucket can be.

``--cpu-time`` counts the CPU seconds of the process instead of elapsed ones: beside other processes, preempted launches
are most of the error of elapsed seconds.

It also measures what recording adds to a step: the table of needs, the timer of launches and the engine's ``tick``.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from benchmarks.harness.checkpoints import checkpoint
from benchmarks.harness.reporting import Others, report, table
from trencadis.assets import demo_path
from trencadis.backends.cuda import shape_policy as ragged
from trencadis.backends.hpu import shape_policy as rectangular
from trencadis.core.buckets import Bucket, Stage
from trencadis.core.device_shape_policy import Policy
from trencadis.core.engine.engine import Engine
from trencadis.core.engine.engine_builder import create_engine
from trencadis.core.engine_config import EngineConfig
from trencadis.core.graphs.graph_manager import LaunchTimer, WallStopwatch
from trencadis.core.launches.launch_splitter import list_row_needs, record_step
from trencadis.core.request import Request, SamplingParams
from trencadis.core.shapes.bucket_options import BucketOptions
from trencadis.core.shapes.bucket_planner import make_plan
from trencadis.core.shapes.launch_costs import Costs, costs_of
from trencadis.core.shapes.measured_launch_times import LaunchTime, LaunchTimes, MeasuredCosts, Residual
from trencadis.core.shapes.shape_limits import ShapeLimits
from trencadis.core.shapes.shape_need_recorder import NeedRecorder
from trencadis.core.step import BatchChange, Row, Step

RIDGE = 32.0
"""Operations that a CPU computes in the time to read one byte, where the policy does not say."""

HEADER = (
    "seed", "stage", "held out", "median", "95 %", "polynomial's median", "polynomial's 95 %",
    "repeated: median", "repeated: 95 %",
)  # fmt: skip

RECORDING = ("launches of", "us of recording in a step of 128 rows", "% of a step of 5 ms")
RECORDED_ROWS = 128
RECORDED_STEPS = 2000
STEP_SECONDS = 5e-3
"""Seconds of a step to which recording is compared: the weights of a 7B model read at 3 TB/s, without its KV cache."""

TICK_STEPS = 50
LIMITS = ShapeLimits(max_rows=128, max_tokens=32768, max_model_len=32768, block_size=128)


class CpuStopwatch:
    """Measures the CPU seconds of this process."""

    def __init__(self) -> None:
        self._begun = self._ended = time.process_time()

    def stop(self) -> None:
        self._ended = time.process_time()

    def read(self) -> float | None:
        return self._ended - self._begun


def measure(engine: Engine, requests: int, seed: int, cpu_time: bool = False) -> list[LaunchTime]:
    """Serves ``requests`` random requests, up to 16 at a time; returns the seconds of every launch."""
    rank: Any = getattr(engine.executor, "_rank")  # noqa: B009
    start = CpuStopwatch if cpu_time else getattr(rank.graphs.backend, "start_stopwatch", None)
    assert start is not None, "this device cannot measure its launches"
    rank.graphs.timer = timer = LaunchTimer(start, every=1)
    rng, vocab, found, sent = random.Random(seed), engine.info().vocab_size, list[LaunchTime](), 0
    while sent < requests or not engine.idle():
        few = len(engine.scheduler.running) + len(engine.scheduler.waiting) < 16
        if sent < requests and few and rng.random() < 0.3:
            tokens = [rng.randrange(5, min(vocab, 900)) for _ in range(round(8 * 2 ** rng.uniform(0, 6)))]
            params = SamplingParams(temperature=0, max_tokens=rng.randint(2, 60), ignore_eos=True)
            engine.add(Request(f"{seed}-{sent}", tokens, params))
            sent += 1
        engine.step()
        found += timer.take()
    return found


class StageErrors(NamedTuple):
    """Relative errors for held-out launches of one stage: of the model, of the polynomial, and of repeated launches.

    ``stage``: its name, or ``all``.
    """

    stage: str
    model: Residual
    polynomial: Residual
    repeated: Residual


def predict_rest(polynomial: Costs, launches: list[LaunchTime], seed: int) -> list[StageErrors]:
    """Returns the errors for the launches that were not learned from, by stage and in all."""
    launches = random.Random(seed).sample(launches, len(launches))
    half, times = len(launches) // 2, LaunchTimes(polynomial)
    for launch in launches[:half]:
        times.add(*launch)
    fitted, medians = times.fit(), times.medians()
    assert fitted is not None, "too few launches"
    plain = MeasuredCosts(polynomial, fitted.scale)
    found = list[StageErrors]()
    for name in (*sorted({launch.bucket.stage.name for launch in launches}), ""):
        held = [one for one in launches[half:] if one.bucket.stage.name == name or not name]
        known = [one for one in held if one.bucket in medians]
        errors = find_errors(fitted, held), find_errors(plain, held), find_errors(medians.__getitem__, known)
        found.append(StageErrors(name.lower() or "all", *errors))
    return found


def find_errors(predict: Callable[[Bucket], float], launches: Iterable[LaunchTime]) -> Residual:
    """Returns the relative errors of predicted seconds over launches."""
    errors = [abs(predict(bucket) / seconds - 1) for bucket, seconds in launches]
    return Residual(len(errors), *map(float, np.quantile(errors or [np.nan], (0.5, 0.95))))


def measure_recording(policy: Policy) -> float:
    """Returns the CPU seconds that recording adds to a step of ``RECORDED_ROWS`` decoding rows and two launches.

    The needs of the rows are counted, one launch in 61 is timed, and every 0.25 seconds of load the engine takes both.
    """
    now = 0.0
    recorder = NeedRecorder(make_plan(policy, LIMITS, BucketOptions()), clock=lambda: now)
    timer, bucket, rng = LaunchTimer(WallStopwatch), Bucket(Stage.SAMPLE, (RECORDED_ROWS,)), random.Random(1)
    positions = np.zeros((3, 1), np.int32)
    contexts = [rng.randint(1, 3000) for _ in range(RECORDED_ROWS)]
    nothing = np.zeros((2, 0), np.int32), np.zeros(0, np.float32)
    steps = [
        Step(i, (), batch=BatchChange(i, RECORDED_ROWS, (), *nothing)) if policy.mixed else
        Step(i, tuple(Row(r, r + 1, n + i, (5,), (1,), positions) for r, n in enumerate(contexts)))
        for i in range(RECORDED_STEPS)
    ]  # fmt: skip
    needs = [list_row_needs(step) for step in steps]  # launches are cut by them in any case
    begun = time.thread_time()
    for i, (step, rows) in enumerate(zip(steps, needs, strict=True)):
        now += STEP_SECONDS
        record_step(recorder, step, rows)
        for _ in range(2):
            if (watch := timer.begin()) is not None:
                timer.end(bucket, watch)
        if i % TICK_STEPS == 0:
            recorder.collect()
            timer.take()
    return (time.thread_time() - begun) / len(steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cpu-time", action="store_true")
    args = parser.parse_args()
    path = demo_path() if args.model == "demo" else checkpoint(args.model)
    others, rows = Others(), list[tuple[Any, ...]]()
    engine = create_engine(
        EngineConfig(
            model=str(path), device=args.device, dtype="bfloat16", max_model_len=1024, max_num_seqs=16,
            threads=args.threads, kv_cache_memory_bytes=1 << 30, max_num_batched_tokens=1024,
        )
    )  # fmt: skip
    rank: Any = getattr(engine.executor, "_rank")  # noqa: B009
    policy, model = rank.graphs.backend.policy, rank.model.config
    polynomial = policy.cost if isinstance(policy.cost, Costs) else costs_of(model, 16, policy.ridge or RIDGE)
    try:
        measure(engine, 20, 999)
        for seed in range(args.seeds):
            launches = measure(engine, args.requests, seed, args.cpu_time)
            for stage, ours, before, again in predict_rest(polynomial, launches, seed):
                rows.append((seed, stage, *ours, *before[1:], *again[1:]))
    finally:
        engine.close()
    result = {"rows": [list(map(str, row)) for row in rows], "model": args.model, "others_cores": others.cores()}
    recording = [(name, 1e6 * (took := measure_recording(policy)), 100 * took / STEP_SECONDS) for name, policy in
                 (("hpu", rectangular.SERVING), ("cuda", ragged.SERVING))]  # fmt: skip
    result["recording"] = [list(map(str, row)) for row in recording]
    report("launch_costs", result, table(HEADER, rows) + "\n" + table(RECORDING, recording))


if __name__ == "__main__":
    main()
