"""Mixed requests after warm-up: graphs captured, kernels compiled and launches outside the plan are counted.

python -m benchmarks.gpu.mixed SETUP OUT [--requests 10000] [--seconds 600]
SETUP: a benchmarks.harness.compared_engines.Setup as JSON
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.compared_engines import Setup
from trencadis.core.engine.engine import Engine
from trencadis.core.graph_and_bucket_learning_report import GraphPlan
from trencadis.core.media_spans import MediaSpan
from trencadis.core.request import Request, SamplingParams
from trencadis.multimodal.patch_packing import count_slots
from trencadis.multimodal.qwen2_vl.qwen2_and_qwen2_5_vision_config import PATCH_VALUES

WAYS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0}, {"temperature": 0.0, "logprobs": 3}, {"temperature": 0.8, "top_p": 0.9}, {"top_k": 20},
    {"min_p": 0.05, "seed": 7}, {"temperature": 0.7, "repetition_penalty": 1.1}, {"presence_penalty": 0.5, "n": 2},
    {"temperature": 0.0, "logit_bias": {9: 2.0}},
)  # fmt: skip
"""Every feature of the sampler, greedy rows among them."""


class Traffic:
    """Requests from a seed: 1 to ``longest`` tokens of text, a third with images of sides up to ``side`` patches."""

    def __init__(self, vocab: int, longest: int, side: int, seed: int = 1) -> None:
        self.rng, self.vocab, self.longest, self.side = random.Random(seed), vocab, longest, side
        noise = np.random.default_rng(seed)
        self.noise = noise.integers(0, 256, (side * side, PATCH_VALUES), dtype=np.uint8)

    def request(self, number: int) -> Request:
        """The next one."""
        rng = self.rng
        length = round(self.longest ** rng.random())
        tokens, spans = [rng.randrange(self.vocab) for _ in range(length)], list[MediaSpan]()
        for i in range(rng.choice((0, 0, 0, 0, 1, 2))):
            grid = (1, 2 * rng.randint(1, self.side // 2), 2 * rng.randint(1, self.side // 2))
            count = grid[1] * grid[2] // 4
            spans.append(MediaSpan(len(tokens), count, f"{number:08x}{i:08x}", grid, count_slots(grid)))
            tokens += [0] * count + [1]
        params = SamplingParams(**rng.choice(WAYS), max_tokens=rng.randint(1, 24), ignore_eos=rng.random() < 0.5)
        return Request(str(number), tokens, params, spans, arrival=float(number))

    def pixels(self, span: MediaSpan) -> Any:
        """uint8 [patches, PATCH_VALUES]."""
        return self.noise[: span.grid[1] * span.grid[2]]


class Watch:
    """Sums up what ``Engine.stats`` reports."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.launches, self.misses = engine, 0, Counter[str]()
        self.real, self.padded = 0, 0
        engine.stats()
        self.plan: GraphPlan | None = engine.info().graphs
        self.captured = self._captured()
        self.counters = engine.stats().graphs

    def _captured(self) -> set[str]:
        return {b.name for b in self.plan.buckets if b.state == "captured"} if self.plan else set()

    def look(self) -> None:
        """Adds what happened since the last call."""
        stats = self.engine.stats()
        self.plan, self.now = stats.plan or self.plan, stats.graphs
        for use in stats.buckets:
            self.launches += 1
            self.real, self.padded = self.real + use.real, self.padded + use.padded
            if use.miss:
                self.misses[use.miss] += 1

    def result(self) -> dict[str, Any]:
        """New captures, compilations that the engine counted, launches by miss, and padding."""
        self.look()
        compiled = self.now.lazy_compiles - self.counters.lazy_compiles
        return {
            "captured": len(self.captured), "new_captures": len(self._captured() - self.captured),
            "lazy_compiles": compiled, "recompiles": self.now.recompiles - self.counters.recompiles,
            "launches": self.launches, "misses": dict(self.misses), "real": self.real, "padded": self.padded,
        }  # fmt: skip


def drive(engine: Engine, traffic: Traffic, requests: int, live: int, end: float) -> tuple[int, Counter[str]]:
    """Sends ``requests`` requests, at most ``live`` at a time, none after ``end`` (``time.perf_counter``).

    Returns:
        How many it sent, and how their answers ended.
    """
    ended, open_choices, spans = Counter[str](), dict[str, int](), dict[str, list[MediaSpan]]()
    sent = reported = 0
    while sent < requests or open_choices:
        if time.perf_counter() > end:
            requests = sent
        if sent >= reported + 1000:
            reported = sent
            print(f"  {sent} requests sent", flush=True)
        while sent < requests and len(open_choices) < live:
            request = traffic.request(sent)
            open_choices[request.id], spans[request.id] = request.params.n, request.spans
            engine.add(request)
            sent += 1
        for delta in engine.step():
            if delta.finish is None:
                continue
            ended[delta.finish] += 1
            open_choices[delta.id] -= 1
            if delta.finish == "error":
                ended[f"{delta.status} {delta.message}"[:80]] += 1
            if not open_choices[delta.id]:
                del open_choices[delta.id]
        for id, index in engine.needs():
            engine.add_media(id, index, traffic.pixels(spans[id][index]))
    return sent, ended


def jit_counter(setup: Setup) -> Any:
    """Counts Triton's compilations in this process from now on; None off a card."""
    if setup.torch_device == "cpu":
        return None
    from trencadis.backends.cuda.cuda_runtime import CompileCounter

    return CompileCounter()


def measure(setup: Setup, requests: int, live: int, longest: int, side: int, most: float) -> dict[str, Any]:
    """Runs it all; counts from the end of warm-up."""
    from trencadis import LLM

    llm = LLM(
        setup.model, dtype=setup.dtype, threads=setup.threads, device=setup.device, policy=setup.policy,
        **setup.limits(),
    )  # fmt: skip
    engine, watch, jit = llm.engine, Watch(llm.engine), jit_counter(setup)
    begun = time.perf_counter()
    traffic = Traffic(engine.info().vocab_size - 64, longest, side)
    sent, ended = drive(engine, traffic, requests, live, begun + most)
    seconds = time.perf_counter() - begun
    found = watch.result()
    found |= {"setup": asdict(setup), "requests": sent, "seconds": seconds, "ended": dict(ended)}
    found["jit"] = jit.count() if jit is not None else found["lazy_compiles"] + found["recompiles"]
    found["jit_names"] = jit.names() if jit is not None else {}
    llm.close()
    return found


def main() -> None:
    """Runs the command line and writes OUT."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("setup")
    parser.add_argument("out", type=Path)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--live", type=int, default=256)
    parser.add_argument("--longest", type=int, default=700, help="tokens of text in a prompt")
    parser.add_argument("--side", type=int, default=32, help="most patches along a side of an image")
    parser.add_argument("--seconds", type=float, default=600.0, help="send no new requests after so long")
    args = parser.parse_args()
    setup = Setup(**json.loads(args.setup))
    found = measure(setup, args.requests, args.live, args.longest, args.side, args.seconds)
    args.out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
