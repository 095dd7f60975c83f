"""TTFT and TPOT of one engine over what the card can do at best in the same run, and the kernels of each load.

python -m benchmarks.gpu.paces SETUP OUT [--rows 1,16,17,32,64,256] [--prompts 2048,8192,32768] [--profile]
SETUP: a benchmarks.harness.compared_engines.Setup as JSON, of a checkpoint of benchmarks.harness.checkpoints

The roofline of a decoding step: its weights, keys and values at the bandwidth of a copy, or its operations at the rate
of a large product, whichever takes longer. That of a prompt: its products and its attention at that rate.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.gpu.probe import card_bandwidth, synchronizer
from benchmarks.harness.checkpoints import SHAPES, Shape, text_bytes
from benchmarks.harness.compared_engines import Ours, Setup, Work, run
from benchmarks.harness.engine_measurements import record_figure
from benchmarks.harness.reporting import median

ROWS, PROMPTS = (1, 16, 17, 32, 64, 256), (2048, 8192, 32_768)
OUT, WORDS = 48, 200
"""Tokens of an answer whose pace is measured, and words of its prompt."""
TEMPLATE = 64
"""Tokens that a chat's template takes, at most."""
LISTED = 20
"""Kernels of a load that are reported."""


def matmul_rate(device: str, wait: Callable[[], None]) -> float:
    """Operations a second of the fastest of five products in bfloat16."""
    import torch

    size = 8192 if device == "cuda" else 256
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))
    best = float("inf")
    for _ in range(5):
        wait()
        begun = time.perf_counter()
        a @ b
        wait()
        best = min(best, time.perf_counter() - begun)
    return 2 * size**3 / best


class Roofline:
    """Least seconds of steps of a shape in bfloat16, by a copy's bandwidth and a product's rate."""

    def __init__(self, shape: Shape, copy: float, flops: float) -> None:
        self.shape, self.copy, self.flops = shape, copy, flops
        self.weights = text_bytes(shape, 2)
        self.inner = text_bytes(shape, 1) - shape.vocab * shape.hidden
        """Weights of the layers alone: a prompt multiplies one token by the head."""
        self.d = shape.hidden // shape.heads

    def decode(self, rows: int, context: float) -> float:
        """Seconds of a decoding step."""
        keys = 2 * 2 * self.shape.layers * self.shape.kv_heads * self.d * rows * context
        return max((self.weights + keys) / self.copy, self.weights * rows / self.flops)

    def prompt(self, tokens: int) -> float:
        """Seconds of a prompt."""
        attention = 2 * tokens * tokens * self.shape.layers * self.shape.heads * self.d
        return (2 * self.inner * tokens + attention) / self.flops


def tpot(side: Ours, rows: int) -> tuple[float, float]:
    """(median seconds between tokens in the second half of ``rows`` answers at once, mean context there)."""
    run(side, Work(rows, 4, words=WORDS, seed=rows))
    done = run(side, Work(rows, OUT, words=WORDS, seed=1000 + rows))
    gaps = [b - a for s in done.stamps for a, b in zip(s[OUT // 2 :], s[OUT // 2 + 1 :], strict=False)]
    return median(gaps), sum(done.prompt) / len(done.prompt) + 0.75 * OUT


def ttft(side: Ours, tokens: int, repeats: int = 3) -> tuple[float, int]:
    """(least seconds from a prompt of about ``tokens`` tokens to its first token, its tokens)."""
    done = [run(side, Work(1, 1, words=tokens - TEMPLATE, seed=tokens + i)) for i in range(repeats)]
    return min(d.stamps[0][0] for d in done), done[0].prompt[0]


def kernels_of(call: Callable[[], object], device: str) -> list[dict[str, Any]]:
    """The kernels of ``call`` that take most, by torch.profiler: name, count, microseconds."""
    from torch.profiler import ProfilerActivity, profile

    kind = ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU
    with profile(activities=[kind]) as seen:
        call()

    def spent(event: Any) -> float:
        return float(getattr(event, "self_device_time_total", 0) or getattr(event, "self_cpu_time_total", 0))

    events = sorted(seen.key_averages(), key=spent, reverse=True)[:LISTED]
    return [{"name": e.key[:100], "count": e.count, "microseconds": spent(e)} for e in events]


def measure(setup: Setup, rows: Sequence[int], prompts: Sequence[int], profiles: bool, file: Path) -> None:
    """Measures every load; writes ``file`` after each and names failed ones in ``failed``."""
    side, wait = Ours(setup), synchronizer(setup)
    device = setup.torch_device
    roof = Roofline(SHAPES[Path(setup.model).name], card_bandwidth(device, wait), matmul_rate(device, wait))
    found: dict[str, Any] = {
        "setup": asdict(setup), "copy": roof.copy, "flops": roof.flops, "tpot": {}, "ttft": {}, "profiles": {},
        "failed": {},
    }  # fmt: skip

    def decoding(count: int) -> None:
        seconds, context = tpot(side, count)
        found["tpot"][str(count)] = {"seconds": seconds, "over": seconds / roof.decode(count, context)}

    def prompt(tokens: int) -> None:
        seconds, real = ttft(side, tokens)
        found["ttft"][str(tokens)] = {"seconds": seconds, "over": seconds / roof.prompt(real)}

    def profiled(name: str, work: Work) -> None:
        found["profiles"][name] = kernels_of(lambda: run(side, work), device)

    figures: dict[str, Callable[[], None]] = {f"{n} rows": lambda n=n: decoding(n) for n in rows}  # type: ignore[misc]
    figures |= {f"prompt of {n}": lambda n=n: prompt(n) for n in prompts}  # type: ignore[misc]
    if profiles:
        loads = {f"decode {n}": Work(n, 8, words=WORDS, seed=n) for n in rows}
        loads |= {f"prompt {n}": Work(1, 1, words=n - TEMPLATE, seed=n) for n in prompts}
        figures |= {n: lambda n=n, w=w: profiled(n, w) for n, w in loads.items()}  # type: ignore[misc]
    for name, take in figures.items():
        with record_figure(name, found, file):
            take()
    side.llm.close()


def main() -> None:
    """Runs the command line and writes OUT."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("setup")
    parser.add_argument("out", type=Path)
    parser.add_argument("--rows", default=",".join(map(str, ROWS)), help="rows of decoding steps")
    parser.add_argument("--prompts", default=",".join(map(str, PROMPTS)), help="tokens of prompts")
    parser.add_argument("--profile", action="store_true", help="list the kernels of each load, too")
    args = parser.parse_args()
    rows, prompts = ([int(n) for n in text.split(",")] for text in (args.rows, args.prompts))
    measure(Setup(**json.loads(args.setup)), rows, prompts, args.profile, args.out)


if __name__ == "__main__":
    main()
