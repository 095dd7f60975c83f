"""How well images share VISION launches: the real scheduler on the image trace, with the default buckets of Gaudi.

python -m benchmarks.packing [--requests 400] [--seed 7] [--quick]

Deterministic: nothing is computed, the executor answers every step with token 1. Clients send their next request when
the last one has ended. Costs and buckets are those of a 7B model; the trace is ``benchmarks/traces``' image chat.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.harness.reporting import report, table
from benchmarks.traces.generate import image_chat
from trencadis.backends.hpu.shape_policy import SERVING
from trencadis.core.bucket_lookup import Plan
from trencadis.core.buckets import Stage
from trencadis.core.checkpoint.model_config import ModelConfig, TextConfig
from trencadis.core.engine.engine import Engine
from trencadis.core.executor.uniproc_executor import UniprocExecutor
from trencadis.core.kv.block_pool import BlockPool
from trencadis.core.launches.rank_input_batch import RankInputBatch
from trencadis.core.media_spans import MediaSpan
from trencadis.core.process.engine_messages import EngineInfo
from trencadis.core.request import Request, SamplingParams
from trencadis.core.scheduling.encoder_cache import EncoderCache
from trencadis.core.scheduling.encoder_scheduler import ImagePacker
from trencadis.core.scheduling.scheduler import Scheduler
from trencadis.core.scheduling.scheduler_limits import SchedulerLimits
from trencadis.core.shapes.bucket_options import BucketOptions
from trencadis.core.shapes.bucket_planner import make_plan
from trencadis.core.shapes.shape_limits import ShapeLimits
from trencadis.core.step import Step
from trencadis.core.step_output import HeadOutput, StepOutput
from trencadis.multimodal.patch_packing import count_slots, count_tokens, patch_grid
from trencadis.multimodal.qwen2_vl.qwen2_and_qwen2_5_vision_config import PATCH_VALUES
from trencadis.multimodal.qwen2_vl.qwen2_and_qwen2_5_vision_config import Qwen25VisionConfig as VisionConfig
from trencadis.multimodal.qwen2_vl.smart_resize import largest_slots, smart_resize

CONCURRENT = (1, 4, 16, 64)
BARS = {1: 0.70, 16: 0.85}
LAUNCH_BAR = 0.5
"""Launches over images at 16 concurrent requests."""
LENGTH, BLOCK, ROWS, TOKENS = 32768, 128, 128, 8192
NO_PIXELS = np.zeros((0, PATCH_VALUES), np.uint8)


def qwen_7b() -> ModelConfig:
    """Qwen2.5-VL-7B's sizes."""
    text = TextConfig(3584, 28, 28, 4, 128, 18944, 152064, 1e-6, 1e6, LENGTH, True, False, (16, 24, 24))
    vision = VisionConfig(32, 1280, 16, 3420, 3584, (7, 15, 23, 31))
    return ModelConfig(Path(), "Qwen2_5_VLForConditionalGeneration", text, vision, "bfloat16", (0,), 2, 3, 4, 5)


def default_plan() -> Plan:
    """Gaudi's plan with default buckets."""
    limits = ShapeLimits(ROWS, TOKENS, LENGTH, BLOCK, largest_slots(3136, 12_845_056), 64)
    return make_plan(SERVING, limits, BucketOptions(), qwen_7b())


@dataclass
class Tally:
    """VISION launches of one run."""

    needed: int = 0
    launched: int = 0
    launches: int = 0
    images: int = 0
    steps: int = 0

    @property
    def efficiency(self) -> float:
        """Slots that images need over slots launched."""
        return self.needed / max(self.launched, 1)

    @property
    def share(self) -> float:
        """Launches per image."""
        return self.launches / max(self.images, 1)


@dataclass
class Idle:
    """A rank that computes nothing, answers at once, and records every Step."""

    plan: Plan
    seen: Callable[[Step], None] = lambda step: None
    tally: Tally = field(default_factory=Tally)
    batch: RankInputBatch = field(default_factory=RankInputBatch)

    def execute(self, step: Step) -> Done:
        """Returns token 1 for every draw."""
        self.batch.apply(step.batch)
        change, own = step.batch, step.rows
        step = self.batch.with_all_rows(step)
        if change is not None:
            self.batch.advance(own, change.joins)
        self.seen(step)
        self.tally.steps += 1
        if step.images:
            need = sum(i.slots for i in step.images)
            self.tally.needed += need
            self.tally.launched += self.plan.fit(Stage.VISION, (need,)).dims[0]
            self.tally.launches += 1
            self.tally.images += len(step.images)
        keys = [draw.key for row in step.rows for draw in row.samples]
        out = StepOutput(step.number, {key: i for i, key in enumerate(keys)})
        out.head = HeadOutput(np.ones(len(keys), np.int32))
        return Done(out)


@dataclass
class Done:
    """A finished Step."""

    output: StepOutput

    def done(self) -> bool:
        """Always."""
        return True

    def result(self) -> StepOutput:
        """What the step produced."""
        return self.output


def engine_of(
    plan: Plan, rank: Idle, depth: int = 1, tokens: int = TOKENS, rows: int = ROWS, bidirectional_images: bool = False
) -> Engine:
    """The real scheduler in front of ``rank``; ``bidirectional_images``: tokens of an image see each other."""
    limits = SchedulerLimits(
        max_tokens=tokens,
        max_rows=rows,
        max_model_len=LENGTH,
        block_size=BLOCK,
        vocab=10,
        caching=False,
        bidirectional_images=bidirectional_images,
    )
    slots = rows + 8
    scheduler = Scheduler(limits, BlockPool(64 * LENGTH // BLOCK), EncoderCache(65536), slots, packer=ImagePacker(plan))
    return Engine(scheduler, UniprocExecutor(rank, depth), EngineInfo("idle", "none", 0, 0, 0, 10, 0))  # type: ignore[arg-type]


def requests_of(records: Sequence[dict[str, object]], longest: int = 1 << 20) -> Iterator[Request]:
    """The trace's requests, each with new images. ``longest``: most tokens of an answer."""
    number = 0
    for at, record in enumerate(records):
        tokens, spans = [5] * 16, []
        for width, height in record["images"]:  # type: ignore[attr-defined]
            grid = patch_grid(*smart_resize(height, width))
            spans.append(MediaSpan(len(tokens), count_tokens(grid), f"{number:08x}", grid, count_slots(grid)))
            tokens += [2] * count_tokens(grid) + [5, 5]
            number += 1
        tokens += [5] * int(str(record["prompt"]))
        output = min(int(str(record["output"])), longest)
        yield Request(f"r{at}", tokens, SamplingParams(temperature=0, max_tokens=output, ignore_eos=True), spans)


def drive(engine: Engine, requests: Iterator[Request], concurrent: int) -> None:
    """A closed loop of ``concurrent`` clients until all requests have ended."""
    live = 0
    while True:
        while live < concurrent and (request := next(requests, None)) is not None:
            engine.add(request)
            live += 1
        if not live:
            return
        live -= sum(delta.finish is not None for delta in engine.step())
        for id, index in engine.needs():
            engine.add_media(id, index, NO_PIXELS)


def measure(concurrent: int, count: int, seed: int, plan: Plan, longest: int = 1 << 20) -> Tally:
    """Runs one closed loop over the trace."""
    rank = Idle(plan)
    drive(engine_of(plan, rank), requests_of(list(image_chat(seed, count)), longest), concurrent)
    return rank.tally


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="80 requests")
    args = parser.parse_args()
    count, plan, rows = 80 if args.quick else args.requests, default_plan(), []
    begun = time.perf_counter()
    for longest, what in ((1 << 20, "whole answers"), (1, "first token only")):
        for concurrent in CONCURRENT:
            t = measure(concurrent, count, args.seed, plan, longest)
            rows.append((what, concurrent, t.images, t.launches, t.images / t.launches, t.efficiency, t.share))
    header = ("traffic", "concurrent", "images", "launches", "images/launch", "needed/launched", "launches/images")
    result = {"requests": count, "seed": args.seed, "rows": rows, "seconds": time.perf_counter() - begun}
    report("packing", result, table(header, rows))


if __name__ == "__main__":
    main()
