"""TTFT of a new question about an image that the server has just answered about, beside its first question.

python -m benchmarks.harness.repeated_question [--model DIR] [--repeats 5] [--side 448]

Every repeat takes a new image: its first question is cold, its second finds the prepared image, the encoded one
and the blocks of the prompt up to the question.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import random
import sys
from typing import Any

import httpx

from benchmarks.harness.checkpoints import checkpoint
from benchmarks.harness.compared_engines import random_image, words
from benchmarks.harness.loadgen import Answer, ask
from benchmarks.harness.reporting import Others, median, report, table
from benchmarks.harness.server import serving

BAR = 0.3


def question(model: str, url: str, seed: int) -> bytes:
    """A request body: an image, then a dozen words."""
    parts = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": words(random.Random(seed), 12)},
    ]
    return json.dumps(
        {
            "model": model, "messages": [{"role": "user", "content": parts}], "temperature": 0, "max_tokens": 4,
            "ignore_eos": True, "stream": True,
        }
    ).encode()  # fmt: skip


async def pair(url: str, model: str, number: int, side: int) -> tuple[Answer, Answer]:
    """Asks a first and a second question about image ``number``."""
    data = io.BytesIO()
    random_image(1000 + number, side).save(data, "PNG", compress_level=1)
    shown = "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()
    async with httpx.AsyncClient(base_url=url, timeout=300, trust_env=False) as client:
        cold = await ask(client, question(model, shown, 2 * number))
        warm = await ask(client, question(model, shown, 2 * number + 1))
    if cold.error or warm.error:
        raise RuntimeError(cold.error or warm.error)
    return cold, warm


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="", help="checkpoint folder (default: the 0.5B one of the benchmarks)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--side", type=int, default=448, help="pixels of the image's side")
    parser.add_argument("--quick", action="store_true", help="one repeat")
    args = parser.parse_args()
    others, path = Others(), args.model or str(checkpoint("half"))
    found: list[dict[str, Any]] = []
    with serving("--model", path, "--dtype", "float32", "--max-model-len", "4096") as server:
        asyncio.run(pair(server.url, server.model(), -1, args.side))
        for number in range(1 if args.quick else args.repeats):
            cold, warm = asyncio.run(pair(server.url, server.model(), number, args.side))
            found.append({"cold": cold.ttft, "again": warm.ttft, "ratio": warm.ttft / cold.ttft})
            print(found[-1], file=sys.stderr, flush=True)
    ratio = median(f["ratio"] for f in found)
    rows = [(name, median(f[name] for f in found), min(f[name] for f in found), max(f[name] for f in found))
            for name in ("cold", "again", "ratio")]  # fmt: skip
    text = table(("TTFT, s", "median", "least", "most"), rows) + f"\n\nbar: ratio at most {BAR}"
    report("again", {"side": args.side, "pairs": found, "ratio": ratio, "others_cores": others.cores()}, text)
    if ratio > BAR:
        sys.exit(f"the ratio is above {BAR}")


if __name__ == "__main__":
    main()
