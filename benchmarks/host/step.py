"""Host CPU of one decode step, from schedule to update, with a device that computes nothing.

python -m benchmarks.host.step [--rows 1,32,256] [--contexts 1024,32768] [--waiting 0,10000] [--greedy] [--depth 1]
                               [--begin 8] [--pairs 60]

The scheduler, the runner and the CPU backend's inputs are the real ones; the model's bodies return at once. Times are
CPU seconds of the thread: the mean over steps in which each row passes the ends of eight blocks and of a batch of
random numbers, as rows that began together come there together; of such means the median, and of steps the least.
``inputs`` is what the runner does beside ``fill``, which pads a launch's arrays and makes tensors of them.

Rows begin ``--begin`` at a time, whatever their context, because those come to the ends of blocks together. With
``--pairs`` each load is compared with the first one of as many rows: both take turns of 16 steps, in which each row
passes the end of one block, and the median of the ratios is reported with its quartiles. ``least`` is the ratio of the
least times of each step between two ends of blocks, which neighbours on the machine disturb least.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.reporting import report, table
from trencadis.backends.cpu.backend import CpuBackend
from trencadis.core.bucket_lookup import Plan
from trencadis.core.checkpoint.model_config import ModelConfig, TextConfig
from trencadis.core.device.backend import BackendConfig, HeadTensors, HeadTensorsOut
from trencadis.core.kv.block_pool import BlockPool
from trencadis.core.launches.model_runner import ModelRunner
from trencadis.core.request import MAX_LOGPROBS, Request, SamplingParams
from trencadis.core.scheduling.encoder_cache import EncoderCache
from trencadis.core.scheduling.request_lifecycle import Lifecycle
from trencadis.core.scheduling.scheduler import Scheduler
from trencadis.core.scheduling.scheduler_limits import SchedulerLimits
from trencadis.core.scheduling.sequence import AHEAD

VOCAB, BLOCK = 151936, 16
ROOM = 2000
"""Tokens for which each row has memory beyond its context."""
MOST_PAIRS = (ROOM - 200) // (BLOCK + 1)
PARTS = ("schedule", "inputs", "fill", "update")
PAIRED = ("rows", "context", "waiting", "ratio", "low", "high", "least", "least ms of the first", "least ms")
HEADER = ("rows", "context", "waiting", *(f"{part} ms" for part in PARTS), "all ms", "least ms")


@dataclass(frozen=True)
class Load:
    """``rows`` sequences that decode after ``context`` tokens each, while ``waiting`` requests queue.

    ``begin``: of how many a step takes the prompts.
    """

    rows: int
    context: int = 1024
    waiting: int = 0
    greedy: bool = False
    depth: int = 1
    begin: int = 8


class NoModel:
    """Bodies that compute nothing; every draw is token 7."""

    def __init__(self) -> None:
        text = TextConfig(64, 1, 1, 1, 64, 64, VOCAB, 1e-6, 1e6, 1 << 20, True, False, (16, 8, 8))
        self.config = ModelConfig(Path(), "Qwen2ForCausalLM", text, None, "float32", (0,), 2, 3, 4, 5)
        self.masked_head = self.vision = self.reset = self.pool = self.score_top = self.text

    def text(self, inputs: Any) -> None:
        """Nothing."""

    def head(self, inputs: HeadTensors, full: bool) -> HeadTensorsOut:
        """Token 7 for each row."""
        rows = len(inputs.slot)
        token = torch.full((rows,), 7, dtype=torch.int32)
        if not full:
            return HeadTensorsOut(token, None, None, None, None)
        ids, values = torch.zeros((rows, MAX_LOGPROBS), dtype=torch.int32), torch.zeros((rows, MAX_LOGPROBS))
        return HeadTensorsOut(token, values[:, 0], ids[:, 0], ids, values)


class HostSteps:
    """A scheduler and a runner under ``load``, and the CPU seconds of each part of their steps.

    Args:
        spare: blocks beside those that the rows need.
        limits: further fields of ``SchedulerLimits``.
    """

    def __init__(
        self, load: Load, clock: Callable[[], float] = time.thread_time, spare: int = 64, **limits: Any
    ) -> None:
        self.load, self.clock = load, clock
        length = load.context + 100_000
        blocks = (load.rows + 1) * (load.context + ROOM) // BLOCK + spare
        made = SchedulerLimits(
            max_tokens=load.begin * load.context + load.rows, max_rows=load.rows, max_model_len=length,
            block_size=BLOCK, vocab=VOCAB, eos=(0,),
        )  # fmt: skip
        self.scheduler = Scheduler(replace(made, **limits), BlockPool(blocks), EncoderCache(16), load.rows + 8)
        self.life = Lifecycle(self.scheduler)
        backend = CpuBackend(BackendConfig(block_size=BLOCK, vocab_size=VOCAB, options={"threads": "1"}))
        self.runner = ModelRunner(backend, NoModel(), Plan(backend.policy, block_size=BLOCK))  # type: ignore[arg-type]
        self.filled = 0.0
        fill = backend.fill

        def timed(*args: Any) -> None:
            start = self.clock()
            fill(*args)
            self.filled += self.clock() - start

        backend.fill = timed  # type: ignore[method-assign]
        self.flying: deque[Any] = deque()
        self._queue()

    def _queue(self) -> None:
        """Adds the requests; those that decode are taken through their prompts first."""
        rng, load = random.Random(1), self.load
        params = SamplingParams(temperature=0.0 if load.greedy else 0.8, top_p=0.95, top_k=50, max_tokens=90_000)
        for number in range(load.rows):
            first = rng.randrange(1 << 20)
            tokens = [1 + (first + i) % 100_000 for i in range(load.context)]
            self.life.add(Request(f"r{number}", tokens, replace(params, seed=number)))
        while any(seq.outputs < 2 for seq in self.scheduler.running) or self.scheduler.waiting:
            self.step()
        for number in range(load.waiting):
            self.life.add(Request(f"w{number}", [1 + number % 1000] * 32, replace(params, seed=number)))

    def step(self) -> dict[str, float]:
        """One step; CPU seconds of its parts."""
        self.filled, clock = 0.0, self.clock
        start = clock()
        step = self.scheduler.schedule()
        scheduled = clock()
        if step is not None:
            self.flying.append(self.runner.execute(step))
        launched = clock()
        if step is None or len(self.flying) > self.load.depth:
            output = self.flying.popleft().result()
            self.life.update(output)
        self.life.collect()
        end = clock()
        inputs = launched - scheduled - self.filled
        return dict(zip(PARTS, (scheduled - start, inputs, self.filled, end - launched), strict=True))


def measure(loads: list[Load], repeats: int) -> list[dict[str, float]]:
    """Milliseconds under each of ``loads``, which take turns: medians of means, of each part and all, and the least."""
    hosts = [HostSteps(load) for load in loads]
    for _ in range(40):
        for host in hosts:
            host.step()
    gc.collect()
    gc.freeze()
    done: list[list[list[dict[str, float]]]] = [[] for _ in hosts]
    for _ in range(repeats):
        for host, rounds in zip(hosts, done, strict=True):
            host.step()
            rounds.append([host.step() for _ in range(AHEAD)])
    gc.unfreeze()
    return [_figures(rounds) for rounds in done]


def compare(loads: list[Load], pairs: int) -> list[dict[str, float]]:
    """Each of ``loads`` against the first: the median ratio of ``pairs`` turns, its quartiles, that of the least."""
    first, *others = loads
    return [_compared(HostSteps(first), HostSteps(other), pairs) for other in others]


def _compared(a: HostSteps, b: HostSteps, pairs: int) -> dict[str, float]:
    for _ in range(40):
        a.step()
        b.step()
    gc.collect()
    gc.freeze()
    took: dict[HostSteps, list[list[float]]] = {a: [], b: []}
    for turn in range(pairs):
        for host in (a, b) if turn % 2 else (b, a):
            host.step()  # brings back what the other has driven from the caches
            took[host].append([sum(host.step().values()) for _ in range(BLOCK)])
    gc.unfreeze()
    low, middle, high = statistics.quantiles((sum(y) / sum(x) for x, y in zip(took[a], took[b], strict=True)), n=4)
    least = [sum(map(min, _by_age(rounds))) / BLOCK for rounds in took.values()]
    ms = {"least ms of the first": 1000 * least[0], "least ms": 1000 * least[1]}
    return {"ratio": middle, "low": low, "high": high, "least": least[1] / least[0]} | ms


def _by_age(rounds: list[list[float]]) -> list[list[float]]:
    """The steps of turns, each of BLOCK + 1 steps, by where they stand between two ends of blocks."""
    found: list[list[float]] = [[] for _ in range(BLOCK)]
    for turn, steps in enumerate(rounds):
        for i, seconds in enumerate(steps):
            found[(turn + i) % BLOCK].append(seconds)
    return found


def _figures(rounds: list[list[dict[str, float]]]) -> dict[str, float]:
    means = [{part: statistics.mean(step[part] for step in steps) for part in PARTS} for steps in rounds]
    found = {part: 1000 * statistics.median(mean[part] for mean in means) for part in PARTS}
    whole = statistics.median(sum(mean.values()) for mean in means)
    return found | {"all": 1000 * whole, "least": 1000 * min(sum(step.values()) for steps in rounds for step in steps)}


def numbers(text: str) -> list[int]:
    """Comma-separated integers."""
    return [int(part) for part in text.split(",")]


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=numbers, default=[1, 32, 256])
    parser.add_argument("--contexts", type=numbers, default=[1024, 32768])
    parser.add_argument("--waiting", type=numbers, default=[0, 10_000])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--depth", type=int, default=1)
    parser.add_argument("--greedy", action="store_true")
    parser.add_argument("--begin", type=int, default=8)
    parser.add_argument("--pairs", type=int, default=0)
    args = parser.parse_args()
    if args.pairs > MOST_PAIRS:
        parser.error(f"after {MOST_PAIRS} pairs memory is full")
    if args.pairs:
        _compare(args)
        return
    found = list[tuple[Load, dict[str, float]]]()
    for count in args.rows:  # what is compared takes turns
        loads = [Load(count, c, w, args.greedy, args.depth, args.begin) for c in args.contexts for w in args.waiting]
        found += zip(loads, measure(loads, args.repeats), strict=True)
    rows = [(load.rows, load.context, load.waiting, *(round(ms, 3) for ms in f.values())) for load, f in found]
    cases = {f"{load.rows}/{load.context}/{load.waiting}": f for load, f in found}
    report("host_step", {"settings": vars(args), "cases": cases}, table(HEADER, rows))


def _compare(args: argparse.Namespace) -> None:
    """``--pairs``."""
    found = list[tuple[Load, dict[str, float]]]()
    for count in args.rows:
        loads = [Load(count, c, w, args.greedy, args.depth, args.begin) for c in args.contexts for w in args.waiting]
        found += zip(loads[1:], compare(loads, args.pairs), strict=True)
    rows = [(load.rows, load.context, load.waiting, *(round(x, 3) for x in f.values())) for load, f in found]
    cases = {f"{load.rows}/{load.context}/{load.waiting}": f for load, f in found}
    report("host_step_pairs", {"settings": vars(args), "cases": cases}, table(PAIRED, rows))


if __name__ == "__main__":
    main()
