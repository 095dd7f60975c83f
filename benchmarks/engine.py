"""Our engine against transformers' ``generate``: same checkpoint, same threads, float32, one run.

python -P -m benchmarks.engine [--quick] [--repeats 5] [--only text-1,text-8,ttft,image-1,image-8]

Each side lives in a process of its own, so that neither finds the other's allocator, thread pool or caches; both stay
loaded and take turns, case by case and repeat by repeat, so that what disturbs the machine meets both. A side that
waits for its turn sleeps on a pipe. Prompts and images differ between repeats and are the same for both sides.
Wall time is what counts; the ratio of CPU seconds beside it is the figure to look at where the machine was shared
(with --threads 1: threads that wait for a preempted one spin, and that is CPU time too).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from typing import Any

from benchmarks.checkpoints import checkpoint
from benchmarks.common import Others, environment, median, report, table
from benchmarks.sides import Done, Work
from trencadis.core.cpus import available_cpus

CASES = {
    "text-1": ("128 tokens in, 64 out, c=1", Work(1, 64, words=105)),
    "text-8": ("96 to 128 tokens in, 64 out, c=8", Work(8, 64, words=105)),
    "ttft": ("448x448 image, first token", Work(1, 1, words=17, images=1)),
    "image-1": ("448x448 image, 32 out, c=1", Work(1, 32, words=17, images=1)),
    "image-8": ("448x448 image, 32 out, c=8", Work(8, 32, words=17, images=1)),
}
SIDES = ("ours", "theirs")


class Worker:
    """A running side."""

    def __init__(self, side: str, model: str, threads: int) -> None:
        env = environment() | {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by end
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "benchmarks.sides", side, model, str(threads)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, env=env, text=True,
        )  # fmt: skip

    def receive(self) -> dict[str, Any]:
        """The next line of it, or its last words as an error."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.log.seek(0)
            raise RuntimeError(f"a side ended:\n{self.log.read()[-3000:]}")
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
def workers(model: str, threads: int) -> Iterator[dict[str, Worker]]:
    """Both sides, loaded and warmed up."""
    with ExitStack() as stack:
        made = {}
        for side in SIDES:
            made[side] = Worker(side, model, threads)
            stack.callback(made[side].end)
        for worker in made.values():
            worker.receive()
        for worker in made.values():
            worker.run(Work(1, 2, words=8, images=1, seed=999999))
        yield made


def measure(both: dict[str, Worker], name: str, repeats: int) -> dict[str, Any]:
    """One case: medians, each repeat, tokens/s, and how many answers are the same tokens."""
    work = CASES[name][1]
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    cpu: dict[str, list[float]] = {side: [] for side in SIDES}
    same = answers = 0
    others = Others()
    for repeat in range(repeats):
        done = {}
        order = SIDES if repeat % 2 == 0 else SIDES[::-1]
        seed = 1000 * repeat + list(CASES).index(name)  # no two runs share an image: encoded images are kept
        for side in order:
            done[side] = both[side].run(replace(work, seed=seed))
            seconds[side].append(done[side].seconds)
            cpu[side].append(done[side].cpu)
        assert done["ours"].prompt == done["theirs"].prompt, "the prompts differ"
        same += sum(a == b for a, b in zip(done["ours"].tokens, done["theirs"].tokens, strict=True))
        answers += work.count
    middle = {side: median(seconds[side]) for side in SIDES}
    total = work.count * work.out
    return {
        "case": CASES[name][0], "seconds": seconds, "median": middle, "same_answers": f"{same}/{answers}",
        "tokens_per_second": {side: total / middle[side] for side in SIDES},
        "speedup": middle["theirs"] / middle["ours"], "others_cores": others.cores(), "cpu_seconds": cpu,
        "cpu_ratio": median(cpu["ours"]) / median(cpu["theirs"]),
    }  # fmt: skip


def rows(cases: dict[str, dict[str, Any]]) -> Iterator[tuple[Any, ...]]:
    """Table rows: tokens/s, or seconds to the first token."""
    for name, c in cases.items():
        if name == "ttft":
            ours, theirs, unit = c["median"]["ours"], c["median"]["theirs"], "s to first token"
        else:
            ours, theirs, unit = *(c["tokens_per_second"][s] for s in SIDES), "output tokens/s"
        ratios = f"{ours / theirs:.2f}x", f"{c['cpu_ratio']:.2f}x"
        yield c["case"], unit, ours, theirs, *ratios, c["same_answers"], c["others_cores"]


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="half", help="a checkpoint of benchmarks.checkpoints")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one repeat, without the cases of eight images")
    parser.add_argument("--only", default="", help="cases, comma-separated: " + ", ".join(CASES))
    parser.add_argument("--threads", type=int, default=available_cpus())
    args = parser.parse_args()
    names = args.only.split(",") if args.only else [c for c in CASES if not (args.quick and c == "image-8")]
    repeats = 1 if args.quick else args.repeats
    others, cases = Others(), {}
    with workers(str(checkpoint(args.model)), args.threads) as both:
        for name in names:
            cases[name] = measure(both, name, repeats)
            print(*next(rows({name: cases[name]})), sep=" | ", file=sys.stderr, flush=True)
    header = ("case", "unit", "ours", "transformers", "ratio", "CPU time", "same answers", "others' cores")
    text = table(header, rows(cases))
    settings = {"model": args.model, "repeats": repeats, "threads": args.threads, "dtype": "float32"}
    report("engine", {"settings": settings, "cases": cases, "others_cores": others.cores()}, text)


if __name__ == "__main__":
    main()
