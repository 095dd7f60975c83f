"""Image throughput of the vision tower on a CPU by images per launch, and how an image flood slows running answers.

python -m benchmarks.encoder [--model demo|half] [--images 16] [--threads 1] [--quick]

Batch sizes take turns, round by round, so that a disturbance of the machine hits all; ratios are to one per launch.
ITL is the time between two tokens of four running answers, first alone, then beside eight clients that send images.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from benchmarks.harness.checkpoints import checkpoint
from benchmarks.harness.reporting import Others, median, quantile, report, table
from trencadis.assets import demo_path
from trencadis.core.cpu_affinity import available_cpus
from trencadis.core.engine.engine import Engine
from trencadis.core.engine.engine_builder import create_engine
from trencadis.core.engine_config import EngineConfig
from trencadis.core.media_spans import MediaSpan
from trencadis.core.request import Request, SamplingParams
from trencadis.core.step import Encode, Step
from trencadis.multimodal.patch_packing import count_slots
from trencadis.multimodal.qwen2_vl.qwen2_and_qwen2_5_vision_config import PATCH_VALUES

SIDE = 32
"""Patches along a side of 448 pixels."""
SLOTS, TOKENS = count_slots((1, SIDE, SIDE)), SIDE * SIDE // 4
MIXES = (1, 2, 3, 4, 8, 12)
"""Images per launch."""
ANSWER = 150
"""Tokens of each answer whose ITL is measured."""


def engine_of(model: str, threads: int) -> Engine:
    """The CPU engine, configured as for serving."""
    path = demo_path() if model == "demo" else checkpoint(model)
    config = EngineConfig(model=str(path), dtype="float32", max_model_len=2048, max_num_seqs=16, threads=threads)
    return create_engine(replace(config, device="cpu"))


def images(count: int, seed: int) -> list[Encode]:
    """Random images of 448 x 448 pixels, each with its own arena rows."""
    rng = np.random.default_rng(seed)
    rows = [np.arange(2 + i * TOKENS, 2 + (i + 1) * TOKENS, dtype=np.int32) for i in range(count)]
    pixels = [rng.integers(0, 256, (SIDE * SIDE, PATCH_VALUES), dtype=np.uint8) for _ in range(count)]
    return [Encode(str(i), (1, SIDE, SIDE), SLOTS, p, r) for i, (p, r) in enumerate(zip(pixels, rows, strict=True))]


def throughput(engine: Engine, count: int, repeats: int) -> dict[int, list[float]]:
    """Images per second by images per launch, one figure per repeat."""
    shown, found = images(count, 0), dict[int, list[float]]()
    for mix in [m for m in MIXES if m <= count] * repeats:
        begun = time.perf_counter()
        for at in range(0, count, mix):
            engine.executor.submit(Step(0, (), tuple(shown[at : at + mix]))).result()
        found.setdefault(mix, []).append(count / (time.perf_counter() - begun))
    return found


def image_request(name: str, images: int, output: int) -> Request:
    """A request with ``images`` new images."""
    tokens, spans = [5] * 20, []
    for i in range(images):
        spans.append(MediaSpan(len(tokens), TOKENS, f"{name}{i}".encode().hex(), (1, SIDE, SIDE), SLOTS))
        tokens += [7] * TOKENS
    return Request(name, [*tokens, 5], SamplingParams(temperature=0, max_tokens=output, ignore_eos=True), spans)


def token_gaps(engine: Engine, flood: int) -> tuple[list[float], int]:
    """Seconds between tokens of four answers, and how many of the flood's requests ended meanwhile."""
    pixels = images(1, 1)[0].pixels
    running = {f"t{flood}-{i}" for i in range(4)}
    for name in sorted(running):
        engine.add(image_request(name, 0, ANSWER))
    last, gaps, sent, live, ended = dict[str, float](), list[float](), 0, 0, 0
    while running:
        while live < flood and len(last) == 4:
            engine.add(image_request(f"f{sent}", 1, 2))
            sent, live = sent + 1, live + 1
        for delta in engine.step():
            now = time.perf_counter()
            if not delta.id.startswith("t"):
                live, ended = live - (delta.finish is not None), ended + (delta.finish is not None)
                continue
            if delta.id in last and delta.tokens:
                gaps.append(now - last[delta.id])
            last[delta.id] = now
            if delta.finish:
                running.discard(delta.id)
        for id, index in engine.needs():
            engine.add_media(id, index, pixels)
    for i in range(sent):
        engine.abort(f"f{i}")
    while not engine.idle():
        engine.step()
    return gaps, ended


def rows_of(found: dict[int, list[float]]) -> Sequence[tuple[object, ...]]:
    """Median images per second by images per launch, and the ratio to one per launch."""
    base = median(found[1])
    return [(f"{mix} per launch", median(v), median(v) / base) for mix, v in found.items()]


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default="demo", choices=("demo", "half"))
    parser.add_argument("--images", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=available_cpus())
    parser.add_argument("--quick", action="store_true", help="one repeat")
    args = parser.parse_args()
    others, engine = Others(), engine_of(args.model, args.threads)
    found = throughput(engine, args.images, 1 if args.quick else args.repeats)
    text = table(("mix", "images/s", "over one at a time"), rows_of(found))
    gaps_by_flood = []
    for flood in (0, 8):
        gaps, ended = token_gaps(engine, flood)
        gaps_by_flood.append((f"{flood} clients with images", median(gaps), quantile(gaps, 0.99), max(gaps), ended))
    text += "\n\n" + table(("beside", "ITL median s", "p99 s", "largest s", "images answered"), gaps_by_flood)
    result = {"model": args.model, "images_per_second": found, "itl": gaps_by_flood, "others_cores": others.cores()}
    report("encoder", result, text)
    engine.close()


if __name__ == "__main__":
    main()
