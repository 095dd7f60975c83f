"""Our engine against transformers' ``generate``, and vLLM if installed: same checkpoint, one run.

python -m benchmarks.engine [--model half] [--device cpu|cuda] [--dtype float32] [--repeats 5] [--quick]
                               [--only text-1,text-8,ttft,image-1] [--sides ours,eager,theirs,vllm]

Each side runs in its own process, so that no side affects another's allocator, thread pool or caches. All stay loaded
and take turns, case by case and repeat by repeat, so that a disturbance of the machine hits all; a side that waits
sleeps on a pipe. Prompts and images differ between repeats and are the same for all sides. Wall time counts; on a
shared machine look at the ratio of CPU seconds (with --threads 1: threads that wait for a preempted one spin, which is
CPU time too). ``eager`` is our engine without graphs.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from typing import Any

from benchmarks.harness.checkpoints import SHAPES, checkpoint
from benchmarks.harness.compared_engines import SIDES, Done, Setup, Work
from benchmarks.harness.plots import bars
from benchmarks.harness.reporting import RESULTS, Others, environment, median, quantile, report, table
from trencadis.core.cpu_affinity import available_cpus

CLIENTS = (1, 8, 32, 128)
CASES = {
    "ttft": ("448x448 image, first token", Work(1, 1, words=17, images=1)),
    **{f"text-{c}": (f"96 to 128 tokens in, 64 out, c={c}", Work(c, 64, words=105)) for c in CLIENTS},
    **{f"image-{c}": (f"448x448 image, 32 out, c={c}", Work(c, 32, words=17, images=1)) for c in CLIENTS},
}
ON_CPU = ("text-1", "text-8", "ttft", "image-1", "image-8")
"""The default cases on a CPU; together they take minutes."""


class Worker:
    """A running side."""

    def __init__(self, side: str, setup: Setup) -> None:
        env = environment() | {"OMP_NUM_THREADS": str(setup.threads), "MKL_NUM_THREADS": str(setup.threads)}
        self.side = side
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by end
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "benchmarks.harness.compared_engines", side, json.dumps(asdict(setup))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, env=env, text=True,
        )  # fmt: skip

    def receive(self) -> dict[str, Any]:
        """The next line of it, or its last words as an error."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.log.seek(0)
            raise RuntimeError(f"the side {self.side!r} ended:\n{self.log.read()[-3000:]}")
        found: dict[str, Any] = json.loads(line)
        return found

    def run(self, work: Work) -> Done:
        """One piece of work, waited for."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(asdict(work)) + "\n")
        self.process.stdin.flush()
        return Done(**self.receive())

    def end(self) -> None:
        """Closes its input and waits."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.log.close()


@contextmanager
def workers(setup: Setup, sides: Sequence[str]) -> Iterator[tuple[dict[str, Worker], dict[str, Any]]]:
    """All sides, loaded and warmed up, and the phases of their start-ups."""
    with ExitStack() as stack:
        made, startup = dict[str, Worker](), dict[str, Any]()
        for side in sides:  # one after another: ours measures how much free memory its graphs take
            made[side] = Worker(side, setup)
            stack.callback(made[side].end)
            startup[side] = made[side].receive()["startup"]
        for worker in made.values():
            worker.run(Work(1, 2, words=8, images=1, seed=999999))
        yield made, startup


def measure(made: dict[str, Worker], name: str, repeats: int) -> dict[str, Any]:
    """Runs one case on all sides: medians, repeats, latencies, rates, and how many answers equal ours."""
    work, sides = CASES[name][1], tuple(made)
    runs: dict[str, list[Done]] = {side: [] for side in sides}
    others = Others()
    for repeat in range(repeats):
        seed = 1000 * repeat + list(CASES).index(name)  # no two runs share an image: the engine caches encoded ones
        for side in sides if repeat % 2 == 0 else sides[::-1]:
            runs[side].append(made[side].run(replace(work, seed=seed)))
    found: dict[str, Any] = {"case": CASES[name][0], "others_cores": others.cores(), "sides": {}}
    for side, done in runs.items():
        found["sides"][side] = summary(work, done, runs[sides[0]])
    return found


def summary(work: Work, done: Sequence[Done], ours: Sequence[Done]) -> dict[str, Any]:
    """One side of a case. Latencies in ms over all tokens of all repeats; rates from the median repeat."""
    assert all(a.prompt == b.prompt for a, b in zip(done, ours, strict=True)), "the prompts differ"
    same = sum(a == b for d, o in zip(done, ours, strict=True) for a, b in zip(d.tokens, o.tokens, strict=True))
    seconds = median(d.seconds for d in done)
    stamps = [s for d in done for s in d.stamps]
    gaps = [b - a for s in stamps for a, b in itertools.pairwise(s)]
    padding: dict[str, list[int]] = {}
    for d in done:
        for stage, (real, padded) in d.padding.items():
            at = padding.setdefault(stage, [0, 0])
            at[0], at[1] = at[0] + real, at[1] + padded
    ms = 1000.0
    return {
        "seconds": [d.seconds for d in done], "cpu_seconds": [d.cpu for d in done], "median": seconds,
        "tokens_per_second": work.count * work.out / seconds,
        "images_per_second": work.count * work.images / seconds,
        "ttft_p50_ms": ms * median(s[0] for s in stamps), "ttft_p99_ms": ms * quantile((s[0] for s in stamps), 0.99),
        "tpot_p50_ms": ms * median((s[-1] - s[0]) / max(1, len(s) - 1) for s in stamps),
        "itl_p50_ms": ms * median(gaps), "itl_p99_ms": ms * quantile(gaps, 0.99),
        "same_answers": f"{same}/{work.count * len(done)}", "padding": padding,
    }  # fmt: skip


HEADER = (
    *("case", "side", "tokens/s", "images/s", "TTFT ms", "p99", "TPOT ms", "ITL p50 ms", "p99 "),
    *("ours is", "CPU time", "same answers", "real/padded"),
)


def rows(cases: dict[str, dict[str, Any]]) -> Iterator[tuple[Any, ...]]:
    """One row per side. ``ours is``: how many times as fast ours is; ``CPU time``: ours over theirs."""
    figures = ("tokens_per_second", "images_per_second", "ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms")
    for c in cases.values():
        ours = next(iter(c["sides"].values()))
        for side, s in c["sides"].items():
            times = "" if s is ours else f"{s['median'] / ours['median']:.2f}x"
            cpu = "" if s is ours else f"{median(ours['cpu_seconds']) / median(s['cpu_seconds']):.2f}x"
            real, padded = (sum(p[i] for p in s["padding"].values()) for i in (0, 1))
            share = f"{real / padded:.2f}" if padded else ""
            shown = [s[f] or "" for f in (*figures, "itl_p50_ms", "itl_p99_ms")]
            yield c["case"], side, *shown, times, cpu, s["same_answers"], share


def startup_table(startup: dict[str, dict[str, float]]) -> str:
    """Seconds of each phase of each side's start-up."""
    listed = ((side, name, seconds) for side, phases in startup.items() for name, seconds in phases.items())
    return table(("side", "start-up phase", "seconds"), listed)


def compare(setup: Setup, names: Sequence[str], sides: Sequence[str], repeats: int) -> dict[str, Any]:
    """Runs the cases ``names``, all sides taking turns; the first side is the baseline."""
    others, cases = Others(), {}
    with workers(setup, sides) as (made, startup):
        for name in names:
            cases[name] = measure(made, name, repeats)
            for row in rows({name: cases[name]}):
                print(*row, sep=" | ", file=sys.stderr, flush=True)
    settings = {"repeats": repeats, "sides": list(sides), **asdict(setup)}
    return {"settings": settings, "startup": startup, "cases": cases, "others_cores": others.cores()}


def arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="half", help=f"a checkpoint's folder, or one of {', '.join(SHAPES)}")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="", help="default: float32 on a CPU, bfloat16 on a card")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one repeat; on a CPU, skip the case of eight images")
    parser.add_argument("--only", default="", help="cases, comma-separated: " + ", ".join(CASES))
    parser.add_argument("--sides", default="", help="default: ours,theirs, and vllm if installed")
    parser.add_argument("--enforce-eager", action="store_true", help="add our engine without graphs as a side")
    parser.add_argument("--threads", type=int, default=available_cpus())
    return parser.parse_args()


def main() -> None:
    """Runs the command line."""
    args = arguments()
    on_cpu = args.device == "cpu"
    known = [c for c in (ON_CPU if on_cpu else CASES) if not (args.quick and on_cpu and c == "image-8")]
    sides = ["ours", "theirs", *(["vllm"] if importlib.util.find_spec("vllm") and not on_cpu else [])]
    sides = args.sides.split(",") if args.sides else sides
    if args.enforce_eager and "eager" not in sides:
        sides.insert(1, "eager")
    names = args.only.split(",") if args.only else known
    for given, allowed in ((names, CASES), (sides, SIDES)):
        if wrong := sorted(set(given) - set(allowed)):
            sys.exit(f"unknown {wrong[0]!r}; known: {', '.join(allowed)}")
    model = str(checkpoint(args.model)) if args.model in SHAPES else args.model
    dtype = args.dtype or ("float32" if on_cpu else "bfloat16")
    setup = Setup(model, args.threads, args.device, dtype, kv=(1 if on_cpu else 16) << 30)
    found = compare(setup, names, sides, 1 if args.quick else args.repeats)
    shown = [(f"{c['case']}, {side}", s["tokens_per_second"]) for c in found["cases"].values()
             for side, s in c["sides"].items()]  # fmt: skip
    bars(RESULTS / "engine.png", "output tokens a second", shown)
    report("engine", found, table(HEADER, rows(found["cases"])) + "\n\n" + startup_table(found["startup"]))


if __name__ == "__main__":
    main()
