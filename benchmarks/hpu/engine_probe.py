"""Measures one engine and writes JSON; ``benchmarks.hpu`` runs this for each model, dtype and device.

python -m benchmarks.hpu.engine_probe SETUP OUT [--figures answers,forced,...]
SETUP: a benchmarks.harness.compared_engines.Setup as JSON; ``kv`` 0 gives the cache what memory is left
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.accuracy import forced
from benchmarks.harness.compared_engines import Ours, Setup, Work, run
from benchmarks.harness.engine_measurements import UNUSED, answers, copy_bandwidth, formulas, record_figure, tpot
from benchmarks.harness.reporting import median
from trencadis.core.buckets import Stage
from trencadis.core.device.backend import Backend
from trencadis.core.executor.uniproc_executor import UniprocExecutor
from trencadis.core.launches.model_runner import ModelRunner


def runner_of(side: Ours) -> ModelRunner:
    """The runner of an engine of one rank in this process."""
    executor = side.llm.engine.executor
    assert isinstance(executor, UniprocExecutor)
    runner: Any = executor._rank
    return runner if isinstance(runner, ModelRunner) else runner.runner


def pools(side: Ours) -> dict[str, dict[str, float]]:
    """Bytes of the graphs of prompts and of decoding, as measured and by formula; empty without graphs."""
    from trencadis.core.memory import graph_selection as budget

    plan = side.llm.engine.info().graphs
    if plan is None or not any(b.state == "captured" for b in plan.buckets):
        return {}
    prices, rule = formulas(side)
    found: dict[str, dict[str, float]] = {}
    for name, stages in (("prompt", (Stage.FRESH, Stage.CONTEXT)), ("decode", (Stage.DECODE,))):
        wanted = {stage.name.lower() for stage in stages}
        held = {b.name: b.bytes for b in plan.buckets if b.state == "captured" and b.stage in wanted}
        predicted = budget.set_cost([p for p in prices if str(p.bucket) in held], rule)
        found[name] = {"measured": sum(held.values()), "predicted": predicted, "graphs": len(held)}
    return found


def ledger(side: Ours, backend: Backend) -> dict[str, int]:
    """Used bytes by the ledger and by the device."""
    stats = side.llm.engine.stats()
    plan = stats.plan or side.llm.engine.info().graphs
    assert plan is not None
    booked = sum(count for name, count in plan.ledger if name not in UNUSED)
    total = backend.memory.total()
    return {"booked": booked, "used": total - backend.memory.free(), "total": total}


def decode_step(side: Ours, rows: int, out: int, context: int) -> dict[str, float]:
    """Median seconds between the tokens of ``rows`` requests that run together, and their mean context.

    Args:
        context: tokens of a row, on average; the result has the exact mean.
    """
    done = run(side, Work(rows, out, words=context * 8 // 7, seed=99))
    gaps = [b - a for stamps in done.stamps for a, b in zip(stamps[out // 2 :], stamps[out // 2 + 1 :], strict=False)]
    return {"seconds": median(gaps), "rows": rows, "context": sum(done.prompt) // rows + 3 * out // 4}


def idle_share(runner: ModelRunner, step: dict[str, float]) -> float:
    """Percent of a measured step beyond its launches, which run one after the other without a host between them."""
    rows, each = int(step["rows"]), -(-int(step["context"]) // runner.backend.cfg.block_size)
    fitting = [
        min((b for b in runner.plan.buckets if b.stage is stage and b.variant == variant and fits(b)), default=None,
            key=lambda b: b.dims)
        for stage, variant, fits in (
            (Stage.DECODE, "", lambda b: b.dims[0] >= rows and b.dims[1] >= rows * each),
            (Stage.SAMPLE, "greedy", lambda b: b.dims[0] >= rows),
        )
    ]  # fmt: skip
    programs = [runner.graphs.program(bucket) for bucket in fitting if bucket is not None]
    taken = []
    for _ in range(3):
        runner.backend.synchronize()
        begun = time.perf_counter()
        for _ in range(10):
            for program in programs:
                program.replay()
        runner.backend.synchronize()
        taken.append((time.perf_counter() - begun) / 10)
    return 100 * max(0.0, 1 - median(taken) / step["seconds"])


def refused_images(runner: ModelRunner) -> int:
    """1 where the card's compiler refuses a new image launch in compile-only mode, and 0 where it takes it."""
    known = [bucket for bucket in runner.plan.buckets if bucket.stage is Stage.VISION]
    largest = max(known, key=lambda bucket: bucket.dims)
    program: Any = runner.graphs.make(replace(largest, dims=(largest.dims[0] + 64,)))
    program.compiles_for_real = False
    try:
        with program.compile_mode():
            program.run()
    except RuntimeError:
        return 1
    return 0


def probe(setup: Setup, figures: list[str], file: Path, samples: int, conversations: int, copied: int) -> None:
    """Measures ``figures`` on one engine. Writes ``file`` after each and names failed ones in ``failed``."""
    begun = time.perf_counter()
    side = Ours(setup)
    runner = runner_of(side)
    backend = runner.backend
    found: dict[str, Any] = {"setup": asdict(setup), "seconds": time.perf_counter() - begun, "failed": {}}
    found |= {"startup": side.phases.seconds, "device": side.llm.engine.info().device}
    found |= {"compiled": backend.compilations(), "bucket_seconds": median(runner.graphs.took.values())}

    def zeros() -> torch.Tensor:
        return backend.zeros((copied,), torch.uint8)

    few = (2, 8, 96)
    known: dict[str, Callable[[], Any]] = {
        "answers": lambda: [row["tokens"] for row in answers(side, samples, 16)],
        "forced": lambda: forced(side, conversations, True),
        "pools": lambda: pools(side),
        "ledger": lambda: ledger(side, backend),
        "tpot": lambda: tpot(side, 64 if samples > 2 else 12),
        "step_32": lambda: decode_step(side, *((32, 64, 1024) if samples > 2 else few)),
        "step_128": lambda: decode_step(side, *((128, 32, 4096) if samples > 2 else few)),
        "step_32_long": lambda: decode_step(side, *((32, 32, 4096) if samples > 2 else few)),
        "idle": lambda: idle_share(runner, found["step_32"]),
        "vision_refused": lambda: refused_images(runner),
        "graph_breaks": lambda: getattr(backend, "graph_breaks", int)(),
        "copy": lambda: copy_bandwidth(zeros(), zeros(), backend.synchronize),
        "fallbacks": lambda: getattr(backend, "fallbacks", int)(),
    }  # fmt: skip
    for name in figures:
        with record_figure(name, found, file):
            found[name] = known[name]()
    file.write_text(json.dumps(found))
    side.llm.close()


def main() -> None:
    """Writes OUT."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("setup")
    parser.add_argument("out", type=Path)
    parser.add_argument("--figures", default="", help="comma-separated; none: the start alone")
    parser.add_argument("--samples", type=int, default=16, help="texts, and as many images, that are answered")
    parser.add_argument("--talks", type=int, default=64, help="questions whose answers are forced")
    parser.add_argument("--copied", type=int, default=1 << 30, help="bytes of the copy that bandwidth is read from")
    args = parser.parse_args()
    setup = Setup(**json.loads(args.setup))
    probe(setup, [f for f in args.figures.split(",") if f], args.out, args.samples, args.talks, args.copied)


if __name__ == "__main__":
    main()
