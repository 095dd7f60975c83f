"""What a grammar costs: the time of a token under a schema against the same requests without one, in one engine.

python -m benchmarks.grammars.masks [--model half] [--clients 1,8,32] [--tokens 48] [--repeats 3] [--temperature 0]
                                   [--smoke]

Runs with and without a schema take turns, and each pair gives a ratio, so that a disturbance of the machine hits both;
the median counts. ``CPU`` is the same ratio of CPU seconds, which others on a shared machine disturb less. The model is
random; the schema's text goes on for as many tokens as are asked for. ``--smoke``: a tiny model, to see that it runs.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from typing import Any, NamedTuple

import llguidance

from benchmarks.harness.checkpoints import SHAPES, checkpoint
from benchmarks.harness.reporting import median, report, table
from trencadis.core.engine.engine import Engine
from trencadis.core.engine.engine_builder import create_engine
from trencadis.core.engine_config import EngineConfig
from trencadis.core.output_constraints import Rule
from trencadis.core.request import Request, SamplingParams
from trencadis.server.grammars.grammar_cache import GrammarCache
from trencadis.server.text.checkpoint_tokenizer import Tokenizer

SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 400},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue", "a longer name"]}, "minItems": 9},
        "count": {"type": "integer"},
        "notes": {"type": "string", "minLength": 200},
    },
    "required": ["title", "tags", "count", "notes"],
    "additionalProperties": False,
}  # fmt: skip


class Spent(NamedTuple):
    """One run: seconds and CPU seconds of decoding, a token of one sequence."""

    tpot: float
    cpu: float


class GrammarRuns:
    """An engine with a vocabulary, and runs of it.

    Args:
        prompt: tokens of each prompt.
    """

    def __init__(self, path: Any, most: int, tokens: int, temperature: float, prompt: int = 32) -> None:
        self.tokens, self.temperature, self.prompt = tokens, temperature, prompt
        length = prompt + tokens + 16
        self.engine: Engine = create_engine(
            EngineConfig(
                model=str(path), device="cpu", dtype="float32", max_num_seqs=most, max_model_len=length,
                kv_cache_memory_bytes=512 << 20, enable_prefix_caching=False,
            )
        )  # fmt: skip
        info, eos = self.engine.info(), self.engine.scheduler.limits.eos
        book = GrammarCache(Tokenizer.from_checkpoint(path), info.vocab_size, eos)
        self.engine.set_vocabulary(asyncio.run(book.pack_vocabulary()))
        book.close()
        self.grammar = llguidance.LLMatcher.grammar_from_json_schema(SCHEMA)
        self.count = 0

    def run(self, clients: int, ruled: bool, seed: int = 0) -> Spent:
        """``clients`` requests at once; what their decoding took once all of them had a token."""
        rng = random.Random(seed)
        waiting = set()
        for _ in range(clients):
            self.count += 1
            id = f"r{self.count}"
            ids = [rng.randrange(1000) for _ in range(self.prompt)]
            params = SamplingParams(temperature=self.temperature, seed=1, max_tokens=self.tokens, ignore_eos=True)
            waiting.add(id)
            self.engine.add(Request(id, ids, params, rule=Rule(self.grammar) if ruled else None))
        got = dict.fromkeys(waiting, 0)
        begun: tuple[float, float, int] | None = None
        while not self.engine.idle():
            for delta in self.engine.step():
                got[delta.id] += len(delta.tokens)
                assert delta.finish in (None, "length"), f"{delta.finish}: {delta.message}"
            if begun is None and all(got.values()):
                begun = time.perf_counter(), time.process_time(), sum(got.values())
        assert begun is not None
        steps = (sum(got.values()) - begun[2]) / clients
        return Spent((time.perf_counter() - begun[0]) / steps, (time.process_time() - begun[1]) / steps)


def measure(runs: GrammarRuns, clients: int, repeats: int) -> dict[str, float]:
    """Medians over pairs of runs."""
    pairs = []
    for repeat in range(repeats):
        order = (False, True) if repeat % 2 == 0 else (True, False)
        found = {ruled: runs.run(clients, ruled, repeat) for ruled in order}
        pairs.append((found[False], found[True]))
    ms = 1000.0
    return {
        "plain_ms": ms * median(a.tpot for a, _ in pairs), "schema_ms": ms * median(b.tpot for _, b in pairs),
        "ratio": median(b.tpot / a.tpot for a, b in pairs), "cpu_ratio": median(b.cpu / a.cpu for a, b in pairs),
        "plain_cpu_ms": ms * median(a.cpu for a, _ in pairs), "schema_cpu_ms": ms * median(b.cpu for _, b in pairs),
    }  # fmt: skip


def arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="half", choices=sorted(SHAPES))
    parser.add_argument("--clients", default="1,8,32")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--smoke", action="store_true")
    return parser.parse_args()


def main() -> None:
    """Runs the command line."""
    args = arguments()
    if args.smoke:
        args.model, args.clients, args.tokens, args.repeats = "tiny", "1,2", 6, 1
    clients = [int(c) for c in args.clients.split(",")]
    runs = GrammarRuns(checkpoint(args.model), max(clients), args.tokens, args.temperature)
    runs.run(1, True)
    found = {f"c={c}": measure(runs, c, args.repeats) for c in clients}
    runs.engine.close()
    names = ("plain_ms", "schema_ms", "ratio", "cpu_ratio")
    shown = [(case, *(f"{f[n]:.3f}" for n in names)) for case, f in found.items()]
    text = table(("clients", "TPOT ms", "with a schema ms", "ratio", "CPU"), shown)
    settings = {n: getattr(args, n) for n in ("model", "tokens", "repeats", "temperature")}
    report("masks", {"settings": settings, "cases": found}, text)


if __name__ == "__main__":
    main()
