"""``trencadis bench throughput``: sends all requests at once to an engine in this process."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from trencadis.core.errors import StartupError
from trencadis.core.json_types import JsonObject
from trencadis.server.bench import bench_flags, offline_options
from trencadis.server.bench.datasets import BenchSample, make_samples

if TYPE_CHECKING:
    from trencadis import LLM


def parser() -> bench_flags.OneLineParser:
    """Returns the parser of the benchmark's own flags."""
    made = bench_flags.OneLineParser(
        "trencadis bench throughput", allow_abbrev=False,
        description="Requests and tokens a second. Flags of the engine (--model, --dtype ...) may follow.",
    )  # fmt: skip
    add = made.add_argument
    bench_flags.add_dataset_flags(add)
    add("--backend", choices=("vllm", "vllm-chat"), default="vllm", help="raw prompts, or messages")
    add("--n", type=int, default=1, help="answers to each prompt")
    add("--output-json", metavar="FILE", help="write the figures there")
    add("--disable-detokenize", action="store_true", help="make no text")
    add("--disable-tqdm", action="store_true", help="no progress bar")
    return made


class EngineCounter:
    """Counts tokens with the engine's tokenizer."""

    def __init__(self, llm: LLM) -> None:
        self._tokenizer = llm.service.tokenizer

    async def encode(self, text: str) -> list[int]:
        """See TokenCounter."""
        return self._tokenizer.encode(text)

    async def decode(self, tokens: list[int]) -> str:
        """See TokenCounter."""
        return self._tokenizer.decode(tokens)


def main(words: Sequence[str]) -> int:
    """Runs the benchmark.

    Raises:
        StartupError: a flag is wrong, or the engine cannot start.
    """
    args, options = offline_options.parse_engine_args(parser(), words)
    bench_flags.apply_length_flags(args)
    if min(args.num_prompts, args.n) < 1:
        raise StartupError("--num-prompts and --n must be at least 1.")
    with offline_options.make_engine(options) as llm:
        asked = asyncio.run(make_samples(args, EngineCounter(llm)))
        offline_options.check_lengths(llm, max(one.prompt_tokens + one.output_tokens for one in asked), "the requests")
        seconds, outputs = _run(args, llm, asked)
    given = sum(len(one.prompt_token_ids) for one in outputs)
    made = sum(len(choice.token_ids) for one in outputs for choice in one.outputs)
    rate, total = len(asked) / seconds, (given + made) / seconds
    print(f"Throughput: {rate:.2f} requests/s, {total:.2f} total tokens/s, {made / seconds:.2f} output tokens/s")
    print(f"Total num prompt tokens:  {given}")
    print(f"Total num output tokens:  {made}")
    found = {
        "elapsed_time": seconds, "num_requests": len(asked), "total_num_tokens": given + made,
        "requests_per_second": rate, "tokens_per_second": total, "output_tokens_per_second": made / seconds,
    }  # fmt: skip
    offline_options.save(args.output_json, found)
    return 0


def _run(args: argparse.Namespace, llm: LLM, asked: Sequence[BenchSample]) -> tuple[float, list[Any]]:
    """Runs all requests; returns the seconds and the outputs."""
    from trencadis import SamplingParams

    sampling = [
        SamplingParams(
            n=args.n, temperature=1.0, top_p=1.0, ignore_eos=True, max_tokens=one.output_tokens,
            detokenize=not args.disable_detokenize,
        )
        for one in asked
    ]  # fmt: skip
    bar = not args.disable_tqdm
    if args.backend == "vllm-chat" or any(one.images or one.messages for one in asked):
        conversations = [one.messages or [{"role": "user", "content": _parts(one)}] for one in asked]
        begun = time.perf_counter()
        return _with_elapsed(begun, llm.chat(conversations, sampling, use_tqdm=bar))
    prompts: list[Any] = [one.prompt for one in asked]
    begun = time.perf_counter()
    return _with_elapsed(begun, llm.generate(prompts, sampling, use_tqdm=bar))


def _parts(one: BenchSample) -> list[JsonObject]:
    images = [{"type": "image_url", "image_url": {"url": url}} for url in one.images]
    return [{"type": "text", "text": one.prompt}, *images]


def _with_elapsed(begun: float, outputs: list[Any]) -> tuple[float, list[Any]]:
    return time.perf_counter() - begun, outputs
