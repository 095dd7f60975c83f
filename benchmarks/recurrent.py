"""Recurrent layers on the CPU: a Qwen3.5 of 0.8B's sizes beside a Qwen3 of about the same size, in one process.

python -m benchmarks.recurrent [--dtype bfloat16] [--rounds 5] [--threads N] [--parts speed,prefix] [--smoke]

Decoding: milliseconds a token of one answer, as a multiple of the time in which its bytes (weights, and each state read
and written once) are read at the rate that is measured between the rounds. Prompts: tokens a second of both models, in
turn. ``prefix``: time to the first token of a request whose first 2,000 tokens an earlier one had too, of Qwen3.5.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.decode_attention import CALM, read_rate
from benchmarks.harness.checkpoints import DEMO
from benchmarks.harness.recurrent_checkpoints import SHAPES, state_bytes, weight_bytes, write_model
from benchmarks.harness.reporting import Others, machine, median, table
from trencadis import LLM, SamplingParams, TokensPrompt
from trencadis.core.cpu_affinity import available_cpus

BARS = {"decode": 1.15, "prompt": 0.9, "prefix": 0.2}
SMALL: dict[str, Any] = dict(
    vocab_size=512, hidden_size=128, num_hidden_layers=4, intermediate_size=256, bos_token_id=1, eos_token_id=2
)  # fmt: skip
SHARED, OWN, OTHERS = 2000, 40, 62
"""Tokens that all requests of ``prefix`` begin with, tokens of each alone, and requests after the first one."""
MEMORY = 256 << 20
"""Bytes that are read to measure the rate."""


class Side(NamedTuple):
    """A loaded model, the bytes of its weights, and the bytes of its states."""

    llm: LLM
    weights: int
    states: int


def load(folder: Path, name: str, sizes: dict[str, Any], dtype: str, threads: int, **flags: Any) -> Side:
    """Writes a random checkpoint of a family of transformers and loads it; ``flags``: further ones of the engine."""
    path = write_model(folder / name, name, sizes, dtype)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(DEMO / file, path / file)
    llm = LLM(
        str(path), dtype=dtype, threads=threads, max_model_len=4096,
        kv_cache_memory_bytes=512 << 20, max_num_seqs=8,
        speculation=False,  # recurrent layers take no drafts, and a random model's loops would make the other side fast
        **{"enable_prefix_caching": False, **flags},
    )  # fmt: skip
    return Side(llm, weight_bytes(path), state_bytes(path))


def first_token(llm: LLM, prompt: list[int], out: int = 1) -> float:
    """Seconds of one answer of ``out`` tokens."""
    params = SamplingParams(temperature=0, max_tokens=out, ignore_eos=True, detokenize=False)
    begun = time.perf_counter()
    llm.generate([TokensPrompt(prompt_token_ids=prompt)], params, use_tqdm=False)
    return time.perf_counter() - begun


def seconds(side: Side, tokens: int, out: int, seed: int) -> float:
    """Time of one answer to a random prompt."""
    return first_token(side.llm, np.random.default_rng(seed).integers(3, 500, tokens).tolist(), out)


def decode(side: Side, out: int, seed: int, memory: torch.Tensor) -> tuple[float, float]:
    """Returns seconds a token, and the multiple of what its bytes need; rates are measured before and after."""
    before = max(read_rate(memory) for _ in range(3))
    time.sleep(CALM)
    taken = (seconds(side, 16, out + 1, seed) - seconds(side, 16, 1, seed)) / out
    rate = max(before, *(read_rate(memory) for _ in range(3)))
    return taken, taken * rate / (side.weights + 2 * side.states)


def compare_speed(args: argparse.Namespace) -> None:
    """Prints medians of both models."""
    small, out, tokens = (SMALL, 8, (64,)) if args.smoke else ({}, 48, (128, 512, 2048))
    memory, others = torch.ones(MEMORY // 4), Others()
    decoded: dict[str, list[tuple[float, float]]] = {}
    prompts: dict[tuple[str, int], list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        sides = {
            name: load(Path(folder), name, sizes | small, args.dtype, args.threads) for name, sizes in SHAPES.values()
        }
        for number in range(args.rounds + 1):
            for name, side in [*sides.items()][:: 1 if number % 2 else -1]:
                found = decode(side, out, number, memory)
                rates = [(count, count / seconds(side, count, 1, number)) for count in tokens]
                if number:  # the first round warms up
                    decoded.setdefault(name, []).append(found)
                    for count, rate in rates:
                        prompts.setdefault((name, count), []).append(rate)
        for side in sides.values():
            side.llm.close()
    rows = []
    for name in sides:
        each, ratio = (median(found[i] for found in decoded[name]) for i in range(2))
        rows.append((name, f"{1000 * each:.1f}", f"{ratio:.2f}", *(f"{median(prompts[name, n]):.0f}" for n in tokens)))
    print(table(("model", "ms a token", "of memory", *(f"prompt of {n}: tokens/s" for n in tokens)), rows))
    shares = [median(a / b for a, b in zip(prompts["Qwen3_5", n], prompts["Qwen3", n], strict=True)) for n in tokens]
    print(f"prompts, of Qwen3's rate (bar {BARS['prompt']}):", *(f"{share:.2f}" for share in shares))
    print(f"bar of decoding: {BARS['decode']} of memory; others took {others.cores():.2f} cores")


def compare_prefix(args: argparse.Namespace) -> None:
    """Prints the time to the first token of requests that share a prefix, of that of the first one.

    All of it a few times with other prefixes, so that one disturbance does not make the figure.
    """
    small, shared, count, rounds = (SMALL, 200, 3, 1) if args.smoke else ({}, SHARED, OTHERS, args.rounds)
    others, ratios = Others(), []
    with tempfile.TemporaryDirectory() as folder:
        name, sizes = SHAPES["qwen35"]
        side = load(Path(folder), name, sizes | small, args.dtype, args.threads, enable_prefix_caching=True)
        for number in range(rounds + 1):
            rng = np.random.default_rng(number)
            prefix = rng.integers(3, 500, shared).tolist()
            prompts = [[*prefix, *rng.integers(3, 500, OWN).tolist()] for _ in range(1 + count)]
            cold, *after = (first_token(side.llm, prompt) for prompt in prompts)
            if number:  # the first round warms up
                ratios.append(median(after) / cold)
                print(
                    f"prefix of {shared} tokens: first token after {1000 * cold:.0f} ms, of {count} others after "
                    f"{1000 * median(after):.0f} ms (most {1000 * max(after):.0f}), {ratios[-1]:.3f} of it"
                )
        side.llm.close()
    print(f"median {median(ratios):.3f} (bar {BARS['prefix']}); others took {others.cores():.2f} cores")


PARTS = {"speed": compare_speed, "prefix": compare_prefix}


def main() -> None:
    """Measures the parts that are named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=available_cpus())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--parts", default=",".join(PARTS), help="parts of the benchmark, with commas between them")
    parser.add_argument("--smoke", action="store_true", help="small sizes: that it runs")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(machine())
    for name in args.parts.split(","):
        PARTS[name](args)


if __name__ == "__main__":
    main()
