"""What ``--itl-target`` does: the gaps of running answers beside long prompts, and how long the prompts wait for it.

python -m benchmarks.itl [--model demo|half] [--targets 0,250,150] [--prompts 6] [--words 1500] [--threads 2]

Four answers run; prompts come one after another, the next one when the last has its first token. All targets take
turns with the same prompts, each in an engine of its own; the first prompt of each is not counted, it teaches costs.
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import dataclass, field

from benchmarks.harness.checkpoints import checkpoint
from benchmarks.harness.reporting import Others, median, quantile, report, table
from trencadis.assets import demo_path
from trencadis.core.cpu_affinity import available_cpus
from trencadis.core.engine.engine import Engine
from trencadis.core.engine.engine_builder import create_engine
from trencadis.core.engine_config import EngineConfig
from trencadis.core.request import Request, SamplingParams

ANSWERS = 4


@dataclass
class Seen:
    """Seconds between the tokens of answers while a prompt was computed, and to the first token of each prompt."""

    gaps: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)


def engine_of(model: str, dtype: str, threads: int, target: float) -> Engine:
    """The CPU engine under a bound of ``target`` milliseconds."""
    path = demo_path() if model == "demo" else checkpoint(model)
    return create_engine(
        EngineConfig(
            model=str(path), dtype=dtype, max_model_len=4096, max_num_seqs=16, threads=threads, device="cpu",
            kv_cache_memory_bytes=1 << 30, itl_target=target,
        )
    )  # fmt: skip


def beside(engine: Engine, prompts: int, words: int) -> Seen:
    """Runs the answers, and ``prompts`` of ``words`` tokens beside them."""
    rng, seen, last = random.Random(11), Seen(), dict[str, float]()
    vocab = engine.info().vocab_size
    endless = SamplingParams(temperature=0, max_tokens=4000, ignore_eos=True)
    for number in range(ANSWERS):
        engine.add(Request(f"a{number}", [rng.randrange(5, 900) for _ in range(20)], endless))
    while len(last) < ANSWERS:
        last.update({d.id: time.perf_counter() for d in engine.step() if d.tokens})
    for number in range(prompts):
        tokens = [rng.randrange(5, min(vocab, 900)) for _ in range(words)]
        engine.add(Request(f"p{number}", tokens, SamplingParams(temperature=0, max_tokens=1)))
        begun, waiting = time.perf_counter(), True
        while waiting:
            for delta in engine.step():
                now = time.perf_counter()
                if delta.id.startswith("p"):
                    waiting = False
                    seen.first += [now - begun] if number else []
                elif delta.tokens:
                    seen.gaps += [now - last[delta.id]] if number else []
                    last[delta.id] = now
    for number in range(ANSWERS):
        engine.abort(f"a{number}")
    while not engine.idle():
        engine.step()
    return seen


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default="demo", choices=("demo", "half"))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--targets", default="0,250,150", help="milliseconds; 0: no bound")
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--words", type=int, default=1500)
    parser.add_argument("--threads", type=int, default=available_cpus())
    parser.add_argument("--quick", action="store_true", help="two prompts")
    args = parser.parse_args()
    others, rows, found = Others(), [], {}
    for target in map(float, args.targets.split(",")):
        engine = engine_of(args.model, args.dtype, args.threads, target)
        seen = found[target] = beside(engine, 2 if args.quick else args.prompts, args.words)
        engine.close()
        rows.append(
            (f"{target:g}" if target else "none", median(seen.gaps), quantile(seen.gaps, 0.99), max(seen.gaps),
             median(seen.first), max(seen.first))
        )  # fmt: skip
    head = ("bound, ms", "ITL median s", "p99 s", "largest s", "TTFT median s", "largest s")
    result = {f"{target:g}": {"gaps": seen.gaps, "first": seen.first} for target, seen in found.items()}
    report("itl", {"model": args.model, "targets": result, "others_cores": others.cores()}, table(head, rows))


if __name__ == "__main__":
    main()
