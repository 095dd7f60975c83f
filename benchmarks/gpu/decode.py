"""Decoded tokens against prompts of the same ids: what DECODE launches compute, PREFILL launches compute again.

python -m benchmarks.gpu.decode SETUP OUT [--rows 1,8,16,17,64] [--tokens 24]
SETUP: a benchmarks.harness.compared_engines.Setup as JSON

For each number of rows, that many prompts are answered greedily at once, without log-probabilities (the head that
serving takes) and with them. Prompts that consist of prompt and answer are then scored. A decoding step and a prompt
share neither attention kernel nor products nor the way to the cache, so that a mistake in one of them shows as another
token, or as a log-probability that differs by more than rounding.

The unit of differences is the engine type's own noise: how far the scores of the same ids are from those of an engine
in float32. The largest difference may be two of them, since both sides round; so may the mean, which is that of
thousands of values and finds what the largest hides.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness.checkpoints import WORDS
from benchmarks.harness.compared_engines import Ours, Setup

ROWS = (1, 8, 16, 17, 64)
"""One row; a few; the most of fused layers, and one more; a batch."""

LENGTHS = (5, 17, 33, 60, 16)
"""Words of the prompts in turn: below, at and above whole KV blocks."""

LONG = 700
"""Words of the first prompt of each batch, whose keys are cut among programs."""

BEST = 5

Chances = dict[int, float]
"""Token id -> log-probability."""


class Answer(NamedTuple):
    """One prompt, its greedy answer, and at each token of the answer the best ids' log-probabilities."""

    prompt: list[int]
    tokens: list[int]
    chances: list[Chances]


def prompts(llm: Any, rows: int, long: int, seed: int = 11) -> list[list[int]]:
    """Ids of ``rows`` prompts of words; the first has ``long`` words."""
    rng, tokenizer = random.Random(seed + rows), llm.get_tokenizer()
    lengths = [long, *(LENGTHS[i % len(LENGTHS)] for i in range(1, rows))]
    return [list(tokenizer.encode(" ".join(rng.choice(WORDS) for _ in range(n)))) for n in lengths]


def answer(llm: Any, given: Sequence[list[int]], tokens: int) -> tuple[list[Answer], int]:
    """Greedy answers of ``tokens`` tokens, all at once.

    Returns:
        (the answers, number of tokens that differ between the heads without and with log-probabilities).
    """
    from trencadis import SamplingParams

    asked = [{"prompt_token_ids": ids} for ids in given]
    plain = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    told = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=BEST)
    bare, full = (llm.generate(asked, params, use_tqdm=False) for params in (plain, told))
    made, differ = [], 0
    for ids, one, other in zip(given, bare, full, strict=True):
        out = other.outputs[0]
        differ += sum(a != b for a, b in zip(one.outputs[0].token_ids, out.token_ids, strict=True))
        made.append(Answer(ids, list(out.token_ids), [chances_of(x) for x in out.logprobs]))
    return made, differ


def chances_of(position: Any) -> Chances:
    """The log-probabilities of one position."""
    return {position.token: position.logprob, **dict(zip(position.top_ids, position.top_logprobs, strict=True))}


def score(llm: Any, answers: Sequence[Answer]) -> list[list[Chances]]:
    """Log-probabilities of each token of each answer, computed as the end of a prompt, best ids among them."""
    from trencadis import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=BEST)
    done = llm.generate([{"prompt_token_ids": a.prompt + a.tokens} for a in answers], params, use_tqdm=False)
    return [[chances_of(x) for x in d.prompt_logprobs[len(a.prompt) :]] for d, a in zip(done, answers, strict=True)]


def distances(one: Sequence[Chances], other: Sequence[Chances]) -> list[float]:
    """Differences of the log-probabilities that both sides give."""
    return [abs(a[i] - b[i]) for a, b in zip(one, other, strict=True) for i in a.keys() & b.keys()]


class Noise(NamedTuple):
    """Largest and mean difference of log-probabilities between the engine's type and float32."""

    largest: float
    mean: float


def noise_of(scored: Sequence[Sequence[Chances]], exact: Sequence[Sequence[Chances]]) -> Noise:
    """Noise of scores of the same ids."""
    found = [d for a, b in zip(scored, exact, strict=True) for d in distances(a, b)]
    return Noise(max(found), sum(found) / len(found))


def judge(answers: Sequence[Answer], scored: Sequence[Sequence[Chances]], noise: Noise) -> dict[str, float]:
    """How far one batch's decoding is from its scores.

    Returns:
        ``tokens``; ``top1``: tokens that the prompt would not choose, by more than both sides' noise; ``gap`` and
        ``mean``: largest and mean difference in units of ``noise``.
    """
    top1, far = 0, list[float]()
    for made, found in zip(answers, scored, strict=True):
        far += distances(made.chances, found)
        for token, at in zip(made.tokens, found, strict=True):
            top1 += max(at.values()) - at[token] > 2 * noise.largest
    units = max(noise.largest, 1e-7), max(noise.mean, 1e-8)
    count = sum(len(a.tokens) for a in answers)
    return {"tokens": count, "top1": top1, "gap": max(far) / units[0], "mean": sum(far) / len(far) / units[1]}


def worst(batches: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Sums of disagreements and worst figures over batches."""
    return {
        "top1": sum(b["top1"] + b["heads"] for b in batches.values()),
        "gap": max(b["gap"] for b in batches.values()), "mean": max(b["mean"] for b in batches.values()),
    }  # fmt: skip


def measure(setup: Setup, rows: Sequence[int], tokens: int, long: int, file: Path) -> None:
    """Answers and scores in the setup's type, then scores in float32; writes ``file`` after each batch."""
    begun, side = time.perf_counter(), Ours(setup)
    found: dict[str, Any] = {"setup": asdict(setup), "batches": {}, "failed": {}}
    kept: dict[int, tuple[list[Answer], list[list[Chances]], int]] = {}
    for count in rows:
        answers, differ = answer(side.llm, prompts(side.llm, count, long), tokens)
        kept[count] = answers, score(side.llm, answers), differ
        print(f"  {count} rows: {time.perf_counter() - begun:.1f} s", flush=True)
    side.llm.close()
    del side
    gc.collect()
    exact = Ours(replace(setup, dtype="float32", eager=True))
    few = kept[rows[min(2, len(rows) - 1)]]
    noise = noise_of(few[1], score(exact.llm, few[0]))
    exact.llm.close()
    found["noise"] = noise._asdict()
    for count, (answers, scored, differ) in kept.items():
        found["batches"][str(count)] = judge(answers, scored, noise) | {"heads": differ}
    found |= worst(found["batches"])
    file.write_text(json.dumps(found))


def main() -> None:
    """Runs the command line and writes OUT."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("setup")
    parser.add_argument("out", type=Path)
    parser.add_argument("--rows", default=",".join(map(str, ROWS)), help="rows of the batches")
    parser.add_argument("--tokens", type=int, default=24, help="tokens of each answer")
    parser.add_argument("--long", type=int, default=LONG, help="words of each batch's first prompt")
    args = parser.parse_args()
    rows = [int(n) for n in args.rows.split(",")]
    measure(Setup(**json.loads(args.setup)), rows, args.tokens, args.long, args.out)


if __name__ == "__main__":
    main()
