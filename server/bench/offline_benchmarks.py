"""Benchmarks of an engine in this process: ``trencadis bench latency`` and ``trencadis bench throughput``.

``latency`` repeats one batch of equal requests; ``throughput`` sends all requests at once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trencadis.core.errors import StartupError
from trencadis.core.flag_declaration import FlagValue
from trencadis.core.json_types import Json, JsonObject
from trencadis.server.bench import bench_command
from trencadis.server.bench.bench_command import OneLineParser
from trencadis.server.bench.datasets import BenchSample, make_samples
from trencadis.server.config import command_line_parser
from trencadis.server.config.flag_table_and_lookup import get_flag_table

if TYPE_CHECKING:
    from trencadis import LLM


PERCENTS = (10, 25, 50, 75, 90, 99)
PROMPTS = ("allowed_local_media_path", "allowed_media_domains", "chat_template", "chat_template_content_format")
"""Flags of the server that an engine in this process accepts too."""


def parse_engine_args(
    parser: OneLineParser, words: Sequence[str], **defaults: FlagValue
) -> tuple[argparse.Namespace, dict[str, FlagValue]]:
    """Parses the command line into the benchmark's own arguments and the options of the engine.

    Args:
        defaults: options of the engine that the command line may override.

    Raises:
        StartupError: a flag is unknown, or only for a server.
    """
    args, rest = parser.parse_known_args(list(words))
    given = command_line_parser.parse(rest)
    if given.config is not None:
        raise StartupError("--config is a file for a server; name the engine's flags themselves.")
    for name in given.values:
        if get_flag_table()[name].owner != "engine" and name not in PROMPTS:
            raise StartupError(f"--{name.replace('_', '-')} is a server's; this benchmark has none.")
    return args, {**defaults, **given.values}


def make_engine(options: dict[str, FlagValue]) -> LLM:
    """Makes an engine in this process; imports torch."""
    from trencadis import LLM

    chosen = dict(options)
    return LLM(chosen.pop("model", ""), **chosen)


def check_lengths(llm: LLM, longest: int, what: str) -> None:
    """Raises StartupError if requests of ``longest`` tokens do not fit the engine."""
    most = llm.service.max_model_len
    if longest > most:
        raise StartupError(f"{what} need {longest} tokens, but --max-model-len is {most}.")


def compute_percentiles(values: Sequence[float]) -> dict[int, float]:
    """Returns the reported percentiles of ``values``."""
    return {p: float(np.percentile(values, p)) for p in PERCENTS}


def save(name: str | None, made: JsonObject) -> None:
    """Writes ``--output-json``, if it is given.

    Raises:
        StartupError: it cannot be written.
    """
    if name:
        try:
            Path(name).expanduser().write_text(json.dumps(made, indent=4) + "\n")
        except OSError as error:
            raise StartupError(f"{name}: {error.strerror}.") from None


LARGEST_ID = 10_000


def make_latency_parser() -> OneLineParser:
    """Returns the parser of the benchmark's own flags."""
    made = OneLineParser(
        "trencadis bench latency", allow_abbrev=False,
        description="Seconds that one batch takes. Flags of the engine (--model, --dtype ...) may follow.",
    )  # fmt: skip
    add = made.add_argument
    add("--input-len", type=int, default=32, help="tokens of a prompt")
    add("--output-len", type=int, default=128, help="tokens of an answer")
    add("--batch-size", type=int, default=8, help="requests of a batch")
    add("--n", type=int, default=1, help="answers to each prompt")
    add("--use-beam-search", action="store_true", help="the --n best answers")
    add("--num-iters-warmup", type=int, default=10, help="batches before the clock starts")
    add("--num-iters", type=int, default=30, help="batches that are timed")
    add("--output-json", metavar="FILE", help="write the figures there")
    add("--disable-detokenize", action="store_true", help="make no text")
    return made


def measure_latency(words: Sequence[str]) -> int:
    """Runs the benchmark.

    Raises:
        StartupError: a flag is wrong, or the engine cannot start.
    """
    # With its cache, a repeated batch would not compute its prompts.
    args, options = parse_engine_args(make_latency_parser(), words, enable_prefix_caching=False)
    if min(args.input_len, args.output_len, args.batch_size, args.n, args.num_iters) < 1:
        raise StartupError("lengths, --batch-size, --n and --num-iters must be at least 1.")
    from trencadis import BeamSearchParams, SamplingParams

    with make_engine(options) as llm:
        check_lengths(llm, args.input_len + args.output_len, "--input-len and --output-len")
        special = llm.service.tokenizer.special_ids
        known = [i for i in range(min(LARGEST_ID, llm.service.config.text.vocab)) if i not in special]
        drawn = np.random.default_rng(0).choice(known, (args.batch_size, args.input_len))
        prompts: list[Json] = [{"prompt_token_ids": row} for row in drawn.tolist()]
        sampling = SamplingParams(
            n=args.n, temperature=1.0, top_p=1.0, ignore_eos=True, max_tokens=args.output_len,
            detokenize=not args.disable_detokenize,
        )  # fmt: skip
        beams = BeamSearchParams(args.n, args.output_len, ignore_eos=True) if args.use_beam_search else None

        def batch() -> float:
            begun = time.perf_counter()
            if beams is not None:
                llm.beam_search(prompts, beams)
            else:
                llm.generate(prompts, sampling, use_tqdm=False)
            return time.perf_counter() - begun

        for _ in range(args.num_iters_warmup):
            batch()
        took = [batch() for _ in range(args.num_iters)]
    found = compute_percentiles(took)
    print(f"Avg latency: {np.mean(took)} seconds")
    print(f"Std latency: {np.std(took)} seconds")
    for p, value in found.items():
        print(f"{p}% percentile latency: {value} seconds")
    made = {"avg_latency": float(np.mean(took)), "std_latency": float(np.std(took)), "latencies": took}
    save(args.output_json, {**made, "percentiles": found})
    return 0


def make_throughput_parser() -> bench_command.OneLineParser:
    """Returns the parser of the benchmark's own flags."""
    made = bench_command.OneLineParser(
        "trencadis bench throughput", allow_abbrev=False,
        description="Requests and tokens a second. Flags of the engine (--model, --dtype ...) may follow.",
    )  # fmt: skip
    add = made.add_argument
    bench_command.add_dataset_flags(add)
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


def measure_throughput(words: Sequence[str]) -> int:
    """Runs the benchmark.

    Raises:
        StartupError: a flag is wrong, or the engine cannot start.
    """
    args, options = parse_engine_args(make_throughput_parser(), words)
    bench_command.apply_length_flags(args)
    if min(args.num_prompts, args.n) < 1:
        raise StartupError("--num-prompts and --n must be at least 1.")
    with make_engine(options) as llm:
        asked = asyncio.run(make_samples(args, EngineCounter(llm)))
        check_lengths(llm, max(one.prompt_tokens + one.output_tokens for one in asked), "the requests")
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
    save(args.output_json, found)
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
