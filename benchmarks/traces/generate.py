"""Synthetic traffic: chat, documents, image chat, scanned pages, a mix with video. One JSON object per line, the same
for the same seed.

    python benchmarks/traces/generate.py chat --seed 7 --requests 400 > chat.jsonl
    trencadis plan MODEL --device hpu --memory 96GiB --trace chat.jsonl

Lengths are log-normal, as published traces of chat services are; turns of a conversation find their past in the prefix
cache. Images have one of ten named sizes.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

IMAGES = (
    (224, 224), (336, 336), (448, 448), (512, 512), (640, 480), (800, 600), (1024, 768), (1280, 720), (1344, 1008),
    (1920, 1080),
)  # fmt: skip

Record = dict[str, Any]


def _lognormal(rng: random.Random, median: float, sigma: float, least: int, most: int) -> int:
    return min(max(round(median * 2.718281828 ** rng.gauss(0, sigma)), least), most)


def _arrivals(rng: random.Random, rate: float) -> Iterator[float]:
    now = 0.0
    while True:
        now += rng.expovariate(rate)
        yield round(now, 4)


def chat(seed: int, requests: int) -> Iterator[Record]:
    """Conversations of one to eight turns; each turn brings a short message after a growing past."""
    rng = random.Random(f"chat {seed}")
    times = _arrivals(rng, 4.0)
    made = 0
    while made < requests:
        past, start = 0, next(times)
        for _ in range(min(rng.choice((1, 1, 2, 3, 5, 8)), requests - made)):
            message = _lognormal(rng, 70, 1.1, 4, 6000)
            answer = _lognormal(rng, 160, 0.8, 4, 2000)
            if past + message + answer > 30_000:
                break
            yield {"arrival": round(start, 3), "prompt": past + message, "output": answer, "cached": past}
            past += message + answer
            start += 4 + rng.expovariate(0.1)
            made += 1


def documents(seed: int, requests: int) -> Iterator[Record]:
    """Long prompts with short answers; some ask again about the same document."""
    rng = random.Random(f"documents {seed}")
    times = _arrivals(rng, 0.8)
    made = 0
    while made < requests:
        length, start = _lognormal(rng, 6000, 0.9, 300, 31_000), next(times)
        for turn in range(min(rng.choice((1, 1, 1, 2, 4)), requests - made)):
            question = _lognormal(rng, 40, 0.7, 5, 400)
            answer = _lognormal(rng, 220, 0.7, 10, 1200)
            cached = length if turn else 0
            yield {"arrival": round(start, 3), "prompt": length + question, "output": answer, "cached": cached}
            start += 8 + rng.expovariate(0.08)
            made += 1


def image_chat(seed: int, requests: int) -> Iterator[Record]:
    """One to four images and a question; a third of the requests are text alone."""
    rng = random.Random(f"image chat {seed}")
    times = _arrivals(rng, 3.0)
    for _ in range(requests):
        count = rng.choice((0, 1, 1, 1, 2, 4))
        images = [list(rng.choice(IMAGES)) for _ in range(count)]
        yield {
            "arrival": next(times), "prompt": _lognormal(rng, 60, 0.9, 5, 3000),
            "output": _lognormal(rng, 140, 0.8, 4, 1500), "cached": 0, "images": images,
        }  # fmt: skip


PAGES = ((827, 1169), (1240, 1754), (1654, 2339))
"""Width and height of a page of A4 at 100, 150 and 200 dots per inch."""


def scans(seed: int, requests: int) -> Iterator[Record]:
    """Documents that were scanned: one to six pages of one resolution as images, a short question, a short answer."""
    rng = random.Random(f"scans {seed}")
    times = _arrivals(rng, 0.5)
    for _ in range(requests):
        size = rng.choice(PAGES)
        pages = min(rng.choice((1, 1, 1, 2, 2, 3, 4, 6)), 3 if size == PAGES[-1] else 6)
        yield {
            "arrival": next(times), "prompt": _lognormal(rng, 40, 0.7, 5, 400),
            "output": _lognormal(rng, 220, 0.7, 10, 1200), "cached": 0, "images": [list(size)] * pages,
        }  # fmt: skip


CLIPS = ((320, 240), (480, 360), (640, 360), (854, 480), (1280, 720))


def video_mix(seed: int, requests: int) -> Iterator[Record]:
    """A third text, a third one or two images, a third a clip of 8 to 48 frames, of which a large one has fewer."""
    rng = random.Random(f"video mix {seed}")
    times = _arrivals(rng, 1.5)
    for _ in range(requests):
        kind, size = rng.randrange(3), rng.choice(CLIPS)
        images = [list(rng.choice(IMAGES)) for _ in range(rng.choice((1, 1, 2)))] if kind == 1 else []
        frames = rng.choice((8, 16, 24, 32, 48))
        clip = [[*size, min(frames, 16 if size == CLIPS[-1] else frames)]] if kind == 2 else []
        yield {
            "arrival": next(times), "prompt": _lognormal(rng, 60, 0.9, 5, 3000),
            "output": _lognormal(rng, 140, 0.8, 4, 1500), "cached": 0, "images": images, "videos": clip,
        }  # fmt: skip


TRACES: dict[str, Callable[[int, int], Iterator[Record]]] = {
    "chat": chat,
    "documents": documents,
    "image-chat": image_chat,
}
"""``prompt`` counts text tokens; an image's tokens come on top."""

PICTURED: dict[str, Callable[[int, int], Iterator[Record]]] = {"scans": scans, "video-mix": video_mix}
"""Traces whose work is that of images above all."""


def main() -> None:
    """Writes one trace to the standard output, in order of arrival."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    traces = {**TRACES, **PICTURED}
    parser.add_argument("trace", choices=sorted(traces))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--requests", type=int, default=400)
    args = parser.parse_args()
    for record in sorted(traces[args.trace](args.seed, args.requests), key=lambda made: made["arrival"]):
        sys.stdout.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
