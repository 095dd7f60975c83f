"""How long a decoding step and a prompt would take on a card, by recorded launches and published figures: no card, no
measurement.

python -m benchmarks.gpu.times [--card H100] [--rows 1,32,256] [--context 1024] [--json FILE] | --published | --table

3B, 7B, 72B and 30B-A3B as they are served: the 72B on four cards. ``trencadis plan --time`` says the same of any model.
``--published`` compares the same estimate, op by op, with what others measured of their engines; ``--table`` prints the
table of docs/benchmarks.md, with an estimate of vLLM beside each.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from benchmarks.gpu.times_table import table_lines
from benchmarks.packing import qwen_7b
from trencadis.backends.cuda.time_estimates import time_report
from trencadis.backends.cuda.time_estimates.kernel_times import DEFAULT, card, step_time, time_of
from trencadis.backends.cuda.time_estimates.meta_launch_recorder import DecodeRecorder
from trencadis.core.checkpoint.decoder_layer_config import ExpertsConfig
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


def qwen3_30b_a3b() -> ModelConfig:
    """The sizes of Qwen3-30B-A3B, whose MLPs are experts."""
    made = text_of(2048, 48, 32, 4, 6144, 151_936, False)
    experts = ExpertsConfig(128, 8, 768, True)
    text = replace(made.text, qkv_bias=False, qk_norm=True, mrope_section=None, experts=experts)
    return replace(made, architecture="Qwen3MoeForCausalLM", text=text)


MODELS = {
    "3B": (lambda: text_of(2048, 36, 16, 2, 11_008, 151_936, True), 1),
    "7B": (qwen_7b, 1),
    "72B": (lambda: text_of(8192, 80, 64, 8, 29_568, 152_064, False), 4),
    "30B-A3B": (qwen3_30b_a3b, 1),
}
"""Name -> (its sizes, cards that it is served on)."""


class Published(NamedTuple):
    """One figure of another engine: ``seconds`` of a decoding step of ``rows`` rows, or to the first token of a prompt
    of ``prompt`` tokens."""

    engine: str
    model: str
    card: str
    seconds: float
    source: str
    rows: int = 0
    context: int = 0
    prompt: int = 0
    ranks: int = 1


LLAMA_1B = text_of(2048, 16, 32, 8, 8192, 128_256, True)
LLAMA_1B = replace(LLAMA_1B, text=replace(LLAMA_1B.text, head_dim=64, mrope_section=None))
OTHERS = {
    "Llama-3.2-1B": LLAMA_1B,
    "Llama-2-7B": text_of(4096, 32, 32, 32, 11_008, 32_000, False),
    "Llama-2-13B": text_of(5120, 40, 40, 40, 13_824, 32_000, False),
    "Llama-2-70B": text_of(8192, 80, 64, 8, 28_672, 32_000, False),
}
_LMDEPLOY = "github.com/InternLM/lmdeploy, its benchmark on A100 in FP16"
_TENSORRT = "github.com/NVIDIA/TensorRT-LLM, the performance page of 0.6.1: first token latency on A100 in FP16"
PUBLISHED = (
    Published("SGLang", "Llama-3.2-1B", "H100", 2 * 1.236e9 / (0.5 * 3.35e12),
              "hazyresearch.stanford.edu/blog/2025-05-27-no-bubbles: at most half of the bandwidth", 1, 96),
    Published("LMDeploy 0.1", "Llama-2-7B", "A100", 1 / 98.92, _LMDEPLOY, 1, 128 + 1024),
    Published("LMDeploy 0.1", "Llama-2-13B", "A100", 1 / 55.29, _LMDEPLOY, 1, 128 + 1024),
    Published("LMDeploy 0.1", "Llama-2-7B", "A100", 0.139, _LMDEPLOY, prompt=2048),
    Published("LMDeploy 0.1", "Llama-2-13B", "A100", 0.242, _LMDEPLOY, prompt=2048),
    Published("TensorRT-LLM 0.5", "Llama-2-7B", "A100", 0.133, _TENSORRT, prompt=2048),
    Published("TensorRT-LLM 0.5", "Llama-2-70B", "A100", 0.377, _TENSORRT, prompt=2048, ranks=4),
)  # fmt: skip
"""Figures that the estimate was not made from, of loads that keep a card busy."""

SHORT = (
    Published("TensorRT-LLM 0.5", "Llama-2-7B", "A100", 0.016, _TENSORRT, prompt=128),
    Published("TensorRT-LLM 0.5", "Llama-2-70B", "A100", 0.047, _TENSORRT, prompt=128, ranks=4),
)
"""Prompts whose first token takes the engine's host longer than the estimate knows: it is too low by a third."""


def estimate(figure: Published) -> float:
    """Seconds by the simulator, every layer op by op."""
    on = card(figure.card)
    recorder = DecodeRecorder(OTHERS[figure.model], figure.ranks, int(on.processors), whole_layers=False)
    if figure.prompt:
        launches = recorder.prompt(figure.prompt)
        return sum(time_of(kernels, on).total for kernels in launches) + on.graph
    return step_time(recorder.step(figure.rows, figure.context), figure.rows, on)[1].step


def published_lines() -> Iterator[str]:
    """The table of docs/benchmarks.md."""
    yield "| engine | model, card | load | published, ms | estimate, ms | over published |"
    yield "|---|---|---|---|---|---|"
    for one in (*PUBLISHED, *SHORT):
        found = estimate(one)
        load = f"prompt of {one.prompt:,}" if one.prompt else f"{one.rows} row, context {one.context:,}"
        cards = f"{one.ranks} x {one.card}" if one.ranks > 1 else one.card
        yield (
            f"| {one.engine} | {one.model}, {cards} | {load} | {1e3 * one.seconds:.2f} | {1e3 * found:.2f} | "
            f"{found / one.seconds:.2f} |"
        )


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--card", default="")
    parser.add_argument("--rows", default="1,32,256")
    parser.add_argument("--context", type=int, default=time_report.CONTEXT)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--published", action="store_true", help="compare with figures of other engines")
    parser.add_argument("--table", action="store_true", help="print the table of docs/benchmarks.md")
    args = parser.parse_args()
    if args.table:
        models = {name: (make(), ranks) for name, (make, ranks) in MODELS.items()}
        print(*table_lines(models, args.card or DEFAULT, args.context), sep="\n")
        return
    if args.published:
        print(*published_lines(), sep="\n")
        return
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
