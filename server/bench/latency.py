"""``trencadis bench latency``: one batch of equal requests, repeated."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from trencadis.core.errors import StartupError
from trencadis.core.json_types import Json
from trencadis.server.bench import offline_options
from trencadis.server.bench.bench_flags import OneLineParser

LARGEST_ID = 10_000


def parser() -> OneLineParser:
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


def main(words: Sequence[str]) -> int:
    """Runs the benchmark.

    Raises:
        StartupError: a flag is wrong, or the engine cannot start.
    """
    # With its cache, a repeated batch would not compute its prompts.
    args, options = offline_options.parse_engine_args(parser(), words, enable_prefix_caching=False)
    if min(args.input_len, args.output_len, args.batch_size, args.n, args.num_iters) < 1:
        raise StartupError("lengths, --batch-size, --n and --num-iters must be at least 1.")
    from trencadis import BeamSearchParams, SamplingParams

    with offline_options.make_engine(options) as llm:
        offline_options.check_lengths(llm, args.input_len + args.output_len, "--input-len and --output-len")
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
    found = offline_options.compute_percentiles(took)
    print(f"Avg latency: {np.mean(took)} seconds")
    print(f"Std latency: {np.std(took)} seconds")
    for p, value in found.items():
        print(f"{p}% percentile latency: {value} seconds")
    made = {"avg_latency": float(np.mean(took)), "std_latency": float(np.std(took)), "latencies": took}
    offline_options.save(args.output_json, {**made, "percentiles": found})
    return 0
