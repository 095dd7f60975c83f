"""How long a decoding step would take on a card, by recorded launches and published figures: no card, no measurement.

python -m benchmarks.gpu.times [--card H100] [--rows 1,32,256] [--context 1024] [--json FILE]

3B, 7B and 72B as they are served: the 72B on four cards. ``trencadis plan --time`` says the same of any model.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from benchmarks.packing import qwen_7b
from trencadis.backends.cuda.timing import time_report
from trencadis.core.checkpoint.model_config import ModelConfig, TextConfig

LENGTH = 32_768


def text_of(hidden: int, layers: int, heads: int, kv_heads: int, inner: int, vocab: int, tied: bool) -> ModelConfig:
    """A Qwen2.5 text model of these sizes."""
    text = TextConfig(
        hidden, layers, heads, kv_heads, 128, inner, vocab, 1e-6, 1e6, LENGTH, True, tied, (16, 24, 24)
    )  # fmt: skip
    return ModelConfig(
        Path(f"{layers} layers of {hidden}"), "Qwen2ForCausalLM", text, None, "bfloat16", (0,), 2, 3, 4, 5
    )


MODELS = {
    "3B": (lambda: text_of(2048, 36, 16, 2, 11_008, 151_936, True), 1),
    "7B": (qwen_7b, 1),
    "72B": (lambda: text_of(8192, 80, 64, 8, 29_568, 152_064, False), 4),
}
"""Name -> (its sizes, cards that it is served on)."""


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--card", default="")
    parser.add_argument("--rows", default="1,32,256")
    parser.add_argument("--context", type=int, default=time_report.CONTEXT)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = [int(n) for n in args.rows.split(",")]
    found = {}
    for name, (make, ranks) in MODELS.items():
        found[name] = time_report.times(make(), ranks, args.card, rows, args.context)
        reported = [*time_report.lines(found[name])]
        print(name, *reported[: reported.index("  sources:")], sep="\n")
    print(*reported[reported.index("  sources:") :], sep="\n")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
