"""Measures one engine of ours and writes JSON; ``benchmarks.gpu`` runs this with graphs and without.

python -m benchmarks.gpu.probe SETUP OUT [--samples 200]      SETUP: a benchmarks.harness.compared_engines.Setup as JSON
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.accuracy import forced
from benchmarks.harness.compared_engines import Ours, Setup
from benchmarks.harness.engine_measurements import (
    UNUSED,
    answers,
    copy_bandwidth,
    encoder,
    graph_memory,
    record_figure,
    tpot,
)


def synchronizer(setup: Setup) -> Callable[[], None]:
    """A function that waits for the device; on a CPU it does nothing."""
    if setup.torch_device == "cpu":
        return lambda: None
    import torch

    return torch.cuda.synchronize


def card_bandwidth(device: str, wait: Callable[[], None]) -> float:
    """``copy_bandwidth`` of 1 GiB on a card and 64 MiB on a CPU."""
    import torch

    size = 1 << 30 if device == "cuda" else 1 << 26
    a, b = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    return copy_bandwidth(a, b, wait)


def ledger(side: Ours) -> dict[str, int] | None:
    """Used bytes by the ledger and by the driver; None without a card."""
    import torch

    stats = side.llm.engine.stats()
    plan = stats.plan or side.llm.engine.info().graphs
    if plan is None or not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info()
    booked = sum(count for name, count in plan.ledger if name not in UNUSED)
    return {"booked": booked, "used": total - free, "total": total}


def probe(setup: Setup, samples: int, out: int, conversations: int, own_answers: bool, file: Path) -> None:
    """Measures everything on one engine. Writes ``file`` after each figure and names failed ones in ``failed``."""
    begun = time.perf_counter()
    side, wait = Ours(setup), synchronizer(setup)
    found: dict[str, Any] = {"setup": asdict(setup), "seconds": time.perf_counter() - begun, "failed": {}}
    found["startup"], found["device"] = side.phases.seconds, side.llm.engine.info().device
    print("  start-up:", ", ".join(f"{n} {s:.1f} s" for n, s in side.phases.seconds.items()), flush=True)
    figures: dict[str, Callable[[], Any]] = {
        "ledger": lambda: ledger(side), "graphs": lambda: graph_memory(side),
        "answers": lambda: answers(side, 2 if samples < 50 else 16, out // 4), "tpot": lambda: tpot(side, out),
        "copy": lambda: card_bandwidth(setup.torch_device, wait), "encoder": lambda: encoder(side, samples, wait),
    }  # fmt: skip
    if not setup.eager:
        figures["forced"] = lambda: forced(side, conversations, not own_answers)
    for name, measure in figures.items():
        with record_figure(name, found, file):
            found[name] = measure()
    side.llm.close()


def main() -> None:
    """Writes OUT."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("setup")
    parser.add_argument("out", type=Path)
    parser.add_argument("--samples", type=int, default=200, help="images whose encoding is timed")
    parser.add_argument("--tokens", type=int, default=128, help="of the answer whose pace is measured")
    parser.add_argument("--talks", type=int, default=64, help="questions whose answers are forced")
    parser.add_argument(
        "--own-answers", action="store_true", help="the forced answers are the model's, no random words"
    )
    args = parser.parse_args()
    setup = Setup(**json.loads(args.setup))
    probe(setup, args.samples, args.tokens, args.talks, args.own_answers, args.out)


if __name__ == "__main__":
    main()
