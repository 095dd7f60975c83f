"""Figures of one engine that mean the same on every device: pace, answers, encoding, the memory of graphs."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.harness.compared_engines import Ours, Work, conversations, run
from benchmarks.harness.reporting import median
from trencadis.core.buckets import Stage
from trencadis.core.step import Encode, Step
from trencadis.multimodal.patch_packing import count_slots
from trencadis.multimodal.qwen2_vl.qwen2_and_qwen2_5_vision_config import PATCH_VALUES

MOST_TOKENS = 512
"""Image tokens of the largest image whose encoding is timed."""


@contextmanager
def record_figure(name: str, found: dict[str, Any], file: Path) -> Iterator[None]:
    """Runs the block that measures ``name``, prints its seconds and writes ``found`` to ``file``.

    An exception of the block becomes an entry of ``found["failed"]``.
    """
    begun = time.perf_counter()
    try:
        yield
    except Exception as error:
        found["failed"][name] = f"{type(error).__name__}: {error}"
    print(f"  {name}: {time.perf_counter() - begun:.1f} s {found['failed'].get(name, '')}", flush=True)
    file.write_text(json.dumps(found))


UNUSED = ("margin", "graph reserve unused")
"""Ledger rows that are free memory."""


def copy_bandwidth(a: Any, b: Any, wait: Callable[[], None]) -> float:
    """Bytes read and written a second by the fastest of ten copies of tensor ``a`` to ``b``; ``wait`` ends a copy."""
    best = float("inf")
    for _ in range(10):
        wait()
        begun = time.perf_counter()
        b.copy_(a)
        wait()
        best = min(best, time.perf_counter() - begun)
    return 2 * a.nbytes / best  # type: ignore[no-any-return]


def tpot(side: Ours, out: int, repeats: int = 3) -> float:
    """Median seconds between the tokens of one request; 105 words in, ``out`` tokens out."""
    done = [run(side, Work(1, out, words=105, seed=70 + i)) for i in range(repeats)]
    gaps = [b - a for d in done for a, b in zip(d.stamps[0][2:], d.stamps[0][3:], strict=False)]
    return median(gaps)


def answers(side: Ours, count: int, out: int) -> list[dict[str, Any]]:
    """Greedy answers to ``count`` texts and as many images, all at once, with exact log-probabilities."""
    from trencadis import SamplingParams

    chats = [t for i in range(2) for t in conversations(Work(count, out, words=30, images=i, seed=90 + i))]
    params = SamplingParams(temperature=0, max_tokens=out, ignore_eos=True, logprobs=5)
    found = side.llm.chat(chats, params, use_tqdm=False)
    return [
        {"tokens": d.outputs[0].token_ids, "logprobs": [x.top_logprobs for x in d.outputs[0].logprobs or ()]}
        for d in found
    ]


def encoder(side: Ours, samples: int, wait: Callable[[], None]) -> list[float]:
    """Seconds of VISION launches of one image each, of sizes up to MOST_TOKENS tokens."""
    rng = random.Random(5)
    noise = np.random.default_rng(5).integers(0, 256, (4 * MOST_TOKENS, PATCH_VALUES), dtype=np.uint8)
    taken = []
    for i in range(samples + 3):
        height = 2 * rng.randint(2, 22)
        width = 2 * rng.randint(2, min(22, 4 * MOST_TOKENS // (2 * height)))
        rows = np.arange(2, 2 + height * width // 4, dtype=np.int32)
        grid = (1, height, width)
        image = Encode(str(i), grid, count_slots(grid), noise[: height * width], rows)
        wait()
        begun = time.perf_counter()
        side.llm.engine.executor.submit(Step(0, (), (image,))).result()
        wait()
        taken.append(time.perf_counter() - begun)
    return taken[3:]


def graph_memory(side: Ours) -> dict[str, float] | None:
    """Bytes of all graphs as measured and as the formulas say for the same graphs; None on a device without any."""
    plan = side.llm.engine.info().graphs
    if plan is None or not plan.buckets:
        return None
    from trencadis.core.memory import graph_selection as budget

    captured = {b.name for b in plan.buckets if b.state == "captured"}
    prices, rule = formulas(side)
    predicted = budget.set_cost([p for p in prices if str(p.bucket) in captured], rule)
    spent = sum(spent for _, spent, _ in plan.pools.values())
    vision = [b for b in plan.buckets if b.stage == Stage.VISION.name.lower()]
    return {
        "measured": spent, "predicted": predicted, "captured": len(captured), "planned": len(plan.buckets),
        "vision_captured": sum(b.state == "captured" for b in vision), "vision_planned": len(vision),
    }  # fmt: skip


class PlannedPrices(NamedTuple):
    """Prices of a plan's graphs, and how a pool adds them up."""

    prices: tuple[Any, ...]
    rule: str


def formulas(side: Ours) -> PlannedPrices:
    """Prices of the plan's graphs by formula alone, as ``trencadis plan`` makes them without measurements."""
    from trencadis.core.checkpoint import model_registry
    from trencadis.core.checkpoint.config_reader import load_config
    from trencadis.core.devices import TABLE
    from trencadis.core.engine.startup_plan import DryRun, PlannedDevice
    from trencadis.core.shapes import bucket_options as bucket_env

    config = side.llm.config
    name = config.device.split(":")[0]
    policy = import_module(TABLE[name].partition(":")[0]).pick_policy(config.policy)
    model = load_config(Path(config.model), config.quantization)
    total = sum(count for _, count in side.llm.engine.info().graphs.ledger)  # type: ignore[union-attr]
    images = model_registry.image_needs(model, config.mm_processor_kwargs, config.image_alignment)
    requested = bucket_env.read_bucket_options(os.environ)
    length = side.llm.engine.info().max_model_len
    start = DryRun(replace(config, max_model_len=length), model, policy, requested, images, PlannedDevice(name, total))
    return PlannedPrices(start.plan_startup().prices, policy.pool_cost)
