"""Measures one engine and writes JSON; ``benchmarks.hpu`` runs this for each model, dtype and device.

python -m benchmarks.hpu.engine_probe SETUP OUT [--figures answers,forced,...]
SETUP: a benchmarks.harness.compared_engines.Setup as JSON; ``kv`` 0 gives the cache what memory is left
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict
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


def decode_step(side: Ours, rows: int, out: int) -> dict[str, float]:
    """Median seconds between the tokens of ``rows`` requests that run together, and their mean context."""
    done = run(side, Work(rows, out, words=800, seed=99))
    gaps = [b - a for stamps in done.stamps for a, b in zip(stamps[out // 2 :], stamps[out // 2 + 1 :], strict=False)]
    return {"seconds": median(gaps), "rows": rows, "context": 1024}


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

    known: dict[str, Callable[[], Any]] = {
        "answers": lambda: [row["tokens"] for row in answers(side, samples, 16)],
        "forced": lambda: forced(side, conversations, True),
        "pools": lambda: pools(side),
        "ledger": lambda: ledger(side, backend),
        "tpot": lambda: tpot(side, 64 if samples > 2 else 12),
        "step_32": lambda: decode_step(side, 32 if samples > 2 else 2, 64 if samples > 2 else 8),
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
