"""Tokens per second of a batch of requests with LoRA adapters, against the base model, in one process.

    python -m benchmarks.adapters CHECKPOINT --count 8 --rank 16 [--requests 8] [--device cpu] [--json FILE]

Rounds alternate between the base model, one adapter for all rows, and a different one for each row; the medians of
their ratios count. ``--plain`` also measures an engine without slots of adapters, in turn with the others.

``--loads`` measures instead how long steps take while adapters come: a request to an adapter that nobody has used yet
(its files are read, and it is copied to a slot), to one that waits in host memory (it is copied), and to one in a slot,
beside requests to the base model. Each such request has one token of prompt and of answer.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from trencadis import LLM, LoRARequest, SamplingParams

SUFFIXES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class Rate(NamedTuple):
    """Tokens per second of one round."""

    kind: str
    tokens: float


def write_adapter(checkpoint: Path, folder: Path, rank: int, seed: int) -> Path:
    """Writes a random adapter of all linear layers of the decoder, in 16 bits."""
    folder.mkdir(parents=True)
    generator, tensors = torch.Generator().manual_seed(seed), dict[str, torch.Tensor]()
    for file in checkpoint.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                module = name.removesuffix(".weight")
                if module.endswith(SUFFIXES) and "visual" not in name and name.endswith(".weight"):
                    outputs, inputs = opened.get_slice(name).get_shape()
                    for side, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
                        made = torch.randn(shape, generator=generator) * 0.01
                        tensors[f"base_model.model.{module}.lora_{side}.weight"] = made.to(torch.bfloat16)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))
    return folder


def measure(llm: LLM, kind: str, adapters: list[LoRARequest | None], length: int, seed: int) -> Rate:
    """Runs one round: as many prompts of 32 tokens as there are adapters, each with ``length`` new tokens."""
    rng = np.random.default_rng(seed)
    most = min(30_000, llm.engine.info().vocab_size)
    prompts = [rng.integers(0, most, 32).tolist() for _ in adapters]
    params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
    begun = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False, lora_request=adapters)
    return Rate(kind, len(adapters) * length / (time.perf_counter() - begun))


COMINGS = ("new", "in host memory", "in a slot")
"""States of an adapter when a request names it."""

APART = 12
"""Steps between two such requests, in which no adapter comes."""


class StepTime(NamedTuple):
    """Seconds of one step; ``coming``: one of ``COMINGS`` if an adapter was on its way, else empty."""

    coming: str
    seconds: float


def time_steps(llm: LLM, adapters: list[LoRARequest], rows: int) -> list[StepTime]:
    """Times the steps of ``rows`` requests to the base model, beside which each adapter is named three times."""
    engine, rng, times = llm.llm_engine, np.random.default_rng(0), list[StepTime]()
    one, endless = (SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (1, 900))
    order = [(coming, adapter) for coming in COMINGS[:2] for adapter in adapters]
    order += [(COMINGS[2], adapters[-1])] * len(adapters)
    for _, adapter in order[: len(adapters)]:
        engine.adapters.find(adapter)  # a server checks the files in another process
    for row in range(rows):
        engine.add_request(f"base {row}", {"prompt_token_ids": rng.integers(0, 900, 32).tolist()}, endless)

    def step(coming: str) -> bool:
        begun = time.perf_counter()
        made = engine.step()
        times.append(StepTime(coming, time.perf_counter() - begun))
        return any(one.request_id.startswith("own") for one in made)

    for number, (coming, adapter) in enumerate(order):
        for _ in range(APART):
            step("")
        engine.add_request(f"own {number}", {"prompt_token_ids": [1]}, one, lora_request=adapter)
        while not step(coming):
            pass
    engine.abort_request([f"base {row}" for row in range(rows)])
    return times[rows + APART :]


def report_steps(times: list[StepTime]) -> dict[str, float]:
    """Prints the median of undisturbed steps, and by how much steps with a coming adapter were longer; returns that of
    the longest of each kind, in milliseconds.
    """
    usual = statistics.median(seconds for coming, seconds in times if not coming)
    quiet = max(seconds for coming, seconds in times if not coming)
    print(f"steps without: median {1e3 * usual:.1f} ms, the longest {1e3 * quiet:.1f} ms")
    longest = dict[str, float]()
    for kind in COMINGS:
        own = [seconds - usual for coming, seconds in times if coming == kind]
        print(
            f"an adapter {kind}: {len(own)} steps, the longest {1e3 * max(own):+.1f} ms, median "
            f"{1e3 * statistics.median(own):+.1f} ms"
        )
        longest[kind] = 1e3 * max(own)
    return longest


def main() -> None:
    """Prints the rates of each round, and the medians of their ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    for name, value in (("count", 8), ("rank", 16), ("length", 48), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--loads", action="store_true")
    parser.add_argument("--requests", type=int, default=0, help="requests at a time; 0: one for each adapter")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--policy", default="", help="a test policy of the device: twin")
    parser.add_argument("--cache", type=int, default=1 << 28, help="bytes of the KV cache")
    parser.add_argument("--json", type=Path, help="file that gets the result")
    given = parser.parse_args()
    found = run(given)
    if given.json is not None:
        given.json.write_text(json.dumps(found))


def run(given: argparse.Namespace) -> dict[str, float]:
    """Returns the median ratio of each kind of round to the base's, or with ``--loads`` what ``report_steps`` does."""
    most = 1024 if given.loads else 512
    rows = given.requests or given.count
    options: dict[str, Any] = dict(
        dtype=given.dtype, max_model_len=most, max_num_seqs=rows + given.loads, kv_cache_memory_bytes=given.cache,
        device=given.device, policy=given.policy, **({"warmup": "skip"} if given.policy else {}),
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        made = [write_adapter(given.checkpoint, Path(folder) / str(i), given.rank, i) for i in range(given.count)]
        own: list[LoRARequest | None] = [LoRARequest(f"a{i}", 1, str(path)) for i, path in enumerate(made)]
        slots = {"max_loras": 1 if given.loads else given.count, "max_cpu_loras": given.count}
        llm = LLM(str(given.checkpoint), enable_lora=True, max_lora_rank=given.rank, **slots, **options)
        if given.loads:
            return report_steps(time_steps(llm, [one for one in own if one is not None], rows))
        plain = LLM(str(given.checkpoint), **options) if given.plain else None
        kinds: dict[str, list[LoRARequest | None]] = {
            "base": [None] * rows, "one adapter": own[:1] * rows, "own adapters": (own * rows)[:rows],
        }  # fmt: skip
        rates: list[Rate] = []
        for number in range(given.rounds + 1):
            for kind, adapters in kinds.items():
                rates.append(measure(llm, kind, adapters, given.length, number))
            if plain is not None:
                rates.append(measure(plain, "without slots", kinds["base"], given.length, number))
            print(*(f"{kind} {rate:.1f}" for kind, rate in rates[-4:]), flush=True)
        medians = dict[str, float]()
        by_kind = {kind: [r.tokens for r in rates if r.kind == kind][1:] for kind, _ in rates}
        for kind, values in by_kind.items():
            ratios = [a / b for a, b in zip(values, by_kind["base"], strict=True)]
            medians[kind] = statistics.median(ratios)
            print(f"{kind}: {statistics.median(values):.1f} tokens/s, {medians[kind]:.3f} of the base")
        return medians


if __name__ == "__main__":
    main()
