"""Vision families on the CPU beside transformers, in float32: the encoder, and the time to the first token.

python -m benchmarks.vision [--family llava,qwen3_vl] [--threads N] [--rounds 5] [--smoke]

Random models of about half a billion parameters, images of 448 x 448 pixels. Both sides stay loaded and take turns,
with equal images. The encoder: from pixels that are prepared to rows for the decoder. The first token: from a decoded
image; transformers has the prompt's ids already, and prepares its pixels with Pillow.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.harness.compared_engines import random_image
from benchmarks.harness.reporting import Others, median, report, table
from benchmarks.vision.compared_vision_engines import Pair
from benchmarks.vision.vision_models import KINDS
from trencadis.core.cpu_affinity import available_cpus

ENCODER, FIRST = 0.95, {"qwen3_vl": 0.9, "llava": 0.9}
"""Bars: the least ratio of the encoders' rates, and by family the largest of the times to the first token."""
HEADER = ("family", "encoder s", "transformers", "ours is", "bar", "first token s", "transformers", "of theirs", "bar",
          "equal tokens")  # fmt: skip


def compare(family: str, threads: int, rounds: int, smoke: bool) -> dict[str, Any]:
    """Seconds of each round on both sides, and how many first tokens are equal."""
    found: dict[str, Any] = {name: [] for name in ("encoder", "their_encoder", "first", "their_first")}
    found["equal"] = 0
    with tempfile.TemporaryDirectory() as folder:
        pair = Pair(Path(folder), family, threads, smoke)
        try:
            for i in range(rounds + 1):
                image, seconds, tokens = random_image(i), dict[str, float](), list[int]()
                if not i:
                    pair.ours_first(image)  # the ids of the prompt
                sides = (
                    ("", pair.ours_encodes, pair.ours_first),
                    ("their_", pair.transformers_encode, pair.transformers_first_token),
                )
                for prefix, encode, first in sides if i % 2 else sides[::-1]:
                    seconds[f"{prefix}encoder"] = encode(image)
                    seconds[f"{prefix}first"], token = first(image)
                    tokens.append(token)
                if i:  # the first round warms up
                    found["equal"] += tokens[0] == tokens[1]
                    for name, one in seconds.items():
                        found[name].append(one)
        finally:
            pair.llm.close()
    return found


def row(family: str, found: dict[str, Any]) -> tuple[Any, ...]:
    """A line of the table."""
    ours, reference, first, their_first = (
        median(found[k]) for k in ("encoder", "their_encoder", "first", "their_first")
    )  # fmt: skip
    bar = f"<= {FIRST[family]}x" if family in FIRST else ""
    if family not in KINDS:
        return (family, ours, reference, f"{reference / ours:.2f}x", f">= {ENCODER}x", first, "", "", "", "")
    return (
        family, ours, reference, f"{reference / ours:.2f}x", f">= {ENCODER}x", first, their_first,
        f"{first / their_first:.2f}x", bar, f"{found['equal']}/{len(found['first'])}",
    )  # fmt: skip


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--family", default=",".join((*KINDS, "phi3_v")), help="names, with commas between them")
    parser.add_argument("--threads", type=int, default=available_cpus())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--smoke", action="store_true", help="small sizes: that it runs")
    args = parser.parse_args()
    others, figures, rows = Others(), dict[str, Any](), []
    for family in args.family.split(","):
        figures[family] = compare(family, args.threads, 1 if args.smoke else args.rounds, args.smoke)
        rows.append(row(family, figures[family]))
        print(table(HEADER, rows[-1:]), flush=True)
        gc.collect()
    result = {"families": figures, "threads": args.threads, "smoke": args.smoke, "others_cores": others.cores()}
    report("vision", result, table(HEADER, rows))


if __name__ == "__main__":
    main()
