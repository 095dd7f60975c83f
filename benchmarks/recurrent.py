"""Recurrent layers on the CPU: a Qwen3.5 of 0.8B's sizes beside a Qwen3 of about the same size, in one process.

python -m benchmarks.recurrent [--dtype bfloat16] [--rounds 5] [--threads N] [--smoke]

Decoding: milliseconds a token of one answer, as a multiple of the time in which its bytes (weights, and each state read
and written once) are read at the rate that is measured between the rounds. Prompts: tokens a second of both models, in
turn.
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
from benchmarks.harness.reporting import Others, machine, median, table
from trencadis import LLM, SamplingParams, TokensPrompt
from trencadis.core.cpu_affinity import available_cpus

BARS = {"decode": 1.15, "prompt": 0.9}
TEXT: dict[str, Any] = dict(
    vocab_size=248320,
    hidden_size=1024,
    tie_word_embeddings=True,
    max_position_embeddings=4096,
    eos_token_id=2,
    bos_token_id=1,
)
SMALL: dict[str, Any] = dict(vocab_size=512, hidden_size=128, num_hidden_layers=4, intermediate_size=256)
RECURRENT: dict[str, Any] = TEXT | dict(
    num_hidden_layers=24, num_attention_heads=8, num_key_value_heads=2, head_dim=256, intermediate_size=3584,
    linear_num_key_heads=16, linear_num_value_heads=16, linear_key_head_dim=128, linear_value_head_dim=128,
)  # fmt: skip
PLAIN: dict[str, Any] = TEXT | dict(
    num_hidden_layers=31, num_attention_heads=16, num_key_value_heads=8, head_dim=128, intermediate_size=3072,
)  # fmt: skip
MEMORY = 256 << 20
"""Bytes that are read to measure the rate."""


class Side(NamedTuple):
    """A loaded model, the bytes of its weights, and the bytes of its states."""

    llm: LLM
    weights: int
    states: int


def load(folder: Path, name: str, sizes: dict[str, Any], dtype: str, threads: int) -> Side:
    """Writes a random checkpoint of a family of transformers and loads it."""
    import transformers

    text = "Text" if name == "Qwen3_5" else ""
    config = getattr(transformers, f"{name}{text}Config")(**sizes, dtype=dtype)
    torch.manual_seed(0)
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        model: Any = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    finally:
        torch.set_default_dtype(torch.float32)
    model.generation_config = transformers.GenerationConfig(eos_token_id=2, pad_token_id=0, do_sample=False)
    model.save_pretrained(folder / name)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(DEMO / file, folder / name / file)
    weights = sum(p.nbytes for p in model.parameters())
    kinds = getattr(config, "layer_types", [])
    width = sizes.get("linear_num_value_heads", 0) * sizes.get("linear_key_head_dim", 0)
    states = 4 * width * sizes.get("linear_value_head_dim", 0) * sum(kind == "linear_attention" for kind in kinds)
    llm = LLM(
        str(folder / name), dtype=dtype, threads=threads, max_model_len=4096, enable_prefix_caching=False,
        kv_cache_memory_bytes=512 << 20, max_num_seqs=8,
        speculation=False,  # recurrent layers take no drafts, and a random model's loops would make the other side fast
    )  # fmt: skip
    return Side(llm, weights, states)


def seconds(side: Side, tokens: int, out: int, seed: int) -> float:
    """Time of one answer."""
    prompt = np.random.default_rng(seed).integers(3, 500, tokens).tolist()
    params = SamplingParams(temperature=0, max_tokens=out, ignore_eos=True, detokenize=False)
    begun = time.perf_counter()
    side.llm.generate([TokensPrompt(prompt_token_ids=prompt)], params, use_tqdm=False)
    return time.perf_counter() - begun


def decode(side: Side, out: int, seed: int, memory: torch.Tensor) -> tuple[float, float]:
    """Returns seconds a token, and the multiple of what its bytes need; rates are measured before and after."""
    before = max(read_rate(memory) for _ in range(3))
    time.sleep(CALM)
    taken = (seconds(side, 16, out + 1, seed) - seconds(side, 16, 1, seed)) / out
    rate = max(before, *(read_rate(memory) for _ in range(3)))
    return taken, taken * rate / (side.weights + 2 * side.states)


def main() -> None:
    """Prints medians of both models."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=available_cpus())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--smoke", action="store_true", help="small sizes: that it runs")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    small, out, tokens = (SMALL, 8, (64,)) if args.smoke else ({}, 48, (128, 512, 2048))
    memory, others = torch.ones(MEMORY // 4), Others()
    decoded: dict[str, list[tuple[float, float]]] = {}
    prompts: dict[tuple[str, int], list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        sides = {
            name: load(Path(folder), name, sizes | small, args.dtype, args.threads)
            for name, sizes in (("Qwen3_5", RECURRENT), ("Qwen3", PLAIN))
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
    print(machine())
    rows = []
    for name in sides:
        each, ratio = (median(found[i] for found in decoded[name]) for i in range(2))
        rows.append((name, f"{1000 * each:.1f}", f"{ratio:.2f}", *(f"{median(prompts[name, n]):.0f}" for n in tokens)))
    print(table(("model", "ms a token", "of memory", *(f"prompt of {n}: tokens/s" for n in tokens)), rows))
    shares = [median(a / b for a, b in zip(prompts["Qwen3_5", n], prompts["Qwen3", n], strict=True)) for n in tokens]
    print(f"prompts, of Qwen3's rate (bar {BARS['prompt']}):", *(f"{share:.2f}" for share in shares))
    print(f"bar of decoding: {BARS['decode']} of memory; others took {others.cores():.2f} cores")


if __name__ == "__main__":
    main()
