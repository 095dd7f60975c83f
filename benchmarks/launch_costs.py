"""Measures how well the cost model of learned shapes, and the planner's polynomial, predict the seconds of launches.

python -m benchmarks.launch_costs [--model demo|half] [--device cpu] [--requests 200] [--seeds 3] [--threads 2]

An engine serves random requests; every launch is measured on the device (``core/graphs/graph_manager.LaunchTimer``).
The model (``core/shapes/measured_launch_times.py``) is fitted to a random half of the launches, and the other half is
predicted.
*Polynomial* is that of the planner, scaled by the same launches. Errors are relative, of single launches.
"""

from __future__ import annotations

import argparse
import random
from typing import Any

from benchmarks.harness.checkpoints import checkpoint
from benchmarks.harness.reporting import Others, report, table
from trencadis.assets import demo_path
from trencadis.core.buckets import Stage
from trencadis.core.engine.engine import Engine
from trencadis.core.engine.engine_builder import create_engine
from trencadis.core.engine_config import EngineConfig
from trencadis.core.graphs.graph_manager import LaunchTimer
from trencadis.core.request import Request, SamplingParams
from trencadis.core.shapes.launch_costs import Costs, costs_of
from trencadis.core.shapes.measured_launch_times import LaunchTime, LaunchTimes, MeasuredCosts, Residual, residuals_of

RIDGE = 32.0
"""Operations that a CPU computes in the time to read one byte, where the policy does not say."""

HEADER = ("seed", "stage", "held out", "median", "95 %", "polynomial's median", "polynomial's 95 %")


def measure(engine: Engine, requests: int, seed: int) -> list[LaunchTime]:
    """Serves ``requests`` random requests, up to 16 at a time; returns the seconds of every launch."""
    rank: Any = getattr(engine.executor, "_rank")  # noqa: B009
    start = getattr(rank.graphs.backend, "start_stopwatch", None)
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


def predict_rest(polynomial: Costs, launches: list[LaunchTime], seed: int) -> list[tuple[Stage, Residual, Residual]]:
    """Returns, by stage, the errors of the model and of the polynomial for the launches that were not learned from."""
    launches = random.Random(seed).sample(launches, len(launches))
    half, times = len(launches) // 2, LaunchTimes(polynomial)
    for launch in launches[:half]:
        times.add(*launch)
    fitted = times.fit()
    assert fitted is not None, "too few launches"
    found = residuals_of(fitted, launches[half:])
    before = residuals_of(MeasuredCosts(polynomial, fitted.scale), launches[half:])
    return [(stage, residual, before[stage]) for stage, residual in found.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
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
            for stage, ours, before in predict_rest(polynomial, measure(engine, args.requests, seed), seed):
                rows.append((seed, stage.name.lower(), *ours, before.median, before.high))
    finally:
        engine.close()
    result = {"rows": [list(map(str, row)) for row in rows], "model": args.model, "others_cores": others.cores()}
    report("launch_costs", result, table(HEADER, rows))


if __name__ == "__main__":
    main()
