"""Families on the CPU: tokens a second against transformers, with equal prompts, all at once; the sides take turns.

python -m benchmarks.families [--family experts] [--clients 8] [--threads N] [--rounds 5] [--smoke]

Random models of about half a billion parameters in float32: experts (Qwen3-MoE with 64 experts of which a token takes
8), qwen3, gemma3 (windows of 512) and gpt2.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.harness.checkpoints import DEMO
from benchmarks.harness.reporting import Others, machine, median, table
from trencadis.core.cpu_affinity import available_cpus

TEXT: dict[str, Any] = {"vocab_size": 32000, "eos_token_id": 2, "bos_token_id": 1}
SMALL: dict[str, Any] = {"hidden_size": 128, "num_hidden_layers": 2, "vocab_size": 512}


class Kind(NamedTuple):
    """A family's model in transformers, its sizes, and what its smoke run has instead."""

    name: str
    sizes: dict[str, Any]
    smoke: dict[str, Any]


KINDS = {
    "experts": Kind("Qwen3Moe", TEXT | dict(
        hidden_size=1024, num_hidden_layers=8, num_attention_heads=16, num_key_value_heads=4, head_dim=64,
        intermediate_size=1024, moe_intermediate_size=256, num_experts=64, num_experts_per_tok=8, norm_topk_prob=True,
        max_position_embeddings=1024,
    ), SMALL | {"moe_intermediate_size": 32}),
    "qwen3": Kind("Qwen3", TEXT | dict(
        hidden_size=1024, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8, head_dim=128,
        intermediate_size=3072, max_position_embeddings=1024,
    ), SMALL),
    "gemma3": Kind("Gemma3", TEXT | dict(
        hidden_size=1152, num_hidden_layers=26, num_attention_heads=4, num_key_value_heads=1, head_dim=256,
        intermediate_size=6912, sliding_window=512, max_position_embeddings=1024,
    ), SMALL),
    "gpt2": Kind("GPT2", TEXT | dict(n_embd=1280, n_layer=24, n_head=20, n_positions=1024),
                 {"n_embd": 128, "n_layer": 2, "n_head": 4, "vocab_size": 512}),
}  # fmt: skip
PROMPT, BARS = 100, {1: 1.1, 8: 1.3}
"""Tokens of a prompt, and the least ratio of the rates by the number of requests at a time."""


def made(folder: Path, family: str, smoke: bool) -> Any:
    """transformers' model, which is also written to ``folder``."""
    import torch
    import transformers

    kind = KINDS[family]
    text = "TextConfig" if family == "gemma3" else "Config"
    config = getattr(transformers, kind.name + text)(**kind.sizes | (kind.smoke if smoke else {}), dtype="float32")
    torch.manual_seed(0)
    head = "GPT2LMHeadModel" if family == "gpt2" else f"{kind.name}ForCausalLM"
    model: Any = getattr(transformers, head)(config).eval()
    model.generation_config = transformers.GenerationConfig(eos_token_id=2, pad_token_id=0, do_sample=False)
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(DEMO / file, folder / file)
    return model


class Sides:
    """Both engines over one checkpoint."""

    def __init__(self, folder: Path, family: str, threads: int, smoke: bool) -> None:
        from trencadis import LLM

        self.theirs = made(folder, family, smoke)
        self.llm = LLM(
            str(folder), dtype="float32", threads=threads, max_model_len=512, enable_prefix_caching=False,
            kv_cache_memory_bytes=256 << 20,
        )  # fmt: skip

    def ours_seconds(self, prompts: list[list[int]], out: int) -> tuple[float, list[list[int]]]:
        """Wall seconds and the answers."""
        from trencadis import SamplingParams, TokensPrompt

        params = SamplingParams(temperature=0, max_tokens=out, ignore_eos=True, detokenize=False)
        begun = time.perf_counter()
        found = self.llm.generate([TokensPrompt(prompt_token_ids=p) for p in prompts], params, use_tqdm=False)
        return time.perf_counter() - begun, [list(one.outputs[0].token_ids) for one in found]

    def transformers_seconds(self, prompts: list[list[int]], out: int) -> tuple[float, list[list[int]]]:
        """As ``ours_seconds``."""
        import torch

        requested = torch.tensor(prompts)
        begun = time.perf_counter()
        with torch.inference_mode():
            found = self.theirs.generate(
                requested, attention_mask=torch.ones_like(requested), max_new_tokens=out, min_new_tokens=out
            )
        return time.perf_counter() - begun, found[:, requested.shape[1] :].tolist()


def compare(family: str, clients: int, threads: int, rounds: int, smoke: bool) -> str:
    """The table: medians, their ratio, and how many answers are equal."""
    import torch

    out, others, same = 4 if smoke else 32, Others(), 0
    with tempfile.TemporaryDirectory() as folder:
        sides = Sides(Path(folder), family, threads, smoke)
        torch.set_num_threads(threads)
        ours, reference = list[float](), list[float]()
        try:
            for i in range(rounds + 1):
                drawn = np.random.default_rng(i).integers(3, 500, (clients, PROMPT)).tolist()
                turns = [(sides.ours_seconds, ours), (sides.transformers_seconds, reference)]
                answers = []
                for run, kept in turns if i % 2 else turns[::-1]:
                    seconds, tokens = run(drawn, out)
                    answers.append(tokens)
                    if i:  # the first round warms up
                        kept.append(seconds)
                same += sum(a == b for a, b in zip(*answers, strict=True))
        finally:
            sides.llm.close()
    rates = [clients * out / median(kept) for kept in (ours, reference)]
    rows = [("ours", f"{rates[0]:.1f}"), ("transformers", f"{rates[1]:.1f}")]
    bar = f" (bar {BARS[clients]}x)" if clients in BARS else ""
    tail = f"{family}: ours is {rates[0] / rates[1]:.2f}x{bar}; {same} of {clients * (rounds + 1)} answers equal"
    return f"{table(('side', f'tokens/s, c={clients}'), rows)}\n{tail}; others took {others.cores():.2f} cores"


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--family", choices=KINDS, default="experts")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--threads", type=int, default=available_cpus())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--smoke", action="store_true", help="small sizes: that it runs")
    args = parser.parse_args()
    print(machine())
    print(compare(args.family, args.clients, args.threads, 1 if args.smoke else args.rounds, args.smoke))


if __name__ == "__main__":
    main()
