"""Times an all-reduce between two cards, and answers with both.

python -m benchmarks.hpu.ranks_probe SETUP OUT [--rounds 200] [--samples 16]
SETUP: a benchmarks.harness.compared_engines.Setup as JSON
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.harness.compared_engines import Setup, Work, conversations
from benchmarks.harness.reporting import median

WIDTH, ROWS = 8192, 64
"""One row of hidden values of a 72B, and the rows of a decoding step."""


FORMS = ("functional", "eager")
"""Values of ``TRENCADIS_HPU_COLLECTIVES``; in lazy mode both are the same."""


def reduce_times(rank: int, rendezvous: str, rounds: int, file: str, form: str) -> None:
    """One rank: microseconds of each all-reduce; rank 0 writes the median, and the form that ran."""
    os.environ["TRENCADIS_HPU_COLLECTIVES"] = form
    import torch

    from trencadis.core.device.backend import BackendConfig, load

    backend: Any = load("hpu")(BackendConfig(torch.bfloat16, 128, rank=rank, world=2, rendezvous=rendezvous))
    x, taken = backend.zeros((ROWS, WIDTH), torch.bfloat16), []

    def halve_and_add(x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = backend.comm.all_reduce(x * 0.5)
        return out

    for _ in range(rounds):
        backend.synchronize()
        begun = time.perf_counter()
        backend.ops.region(halve_and_add, x)
        backend.ops.cut("collective")
        backend.synchronize()
        taken.append(time.perf_counter() - begun)
    if rank == 0:
        Path(file).write_text(json.dumps([1e6 * median(taken[rounds // 10 :]), backend.comm.form or form]))


def all_reduce_us(rounds: int, form: str) -> float:
    """Median microseconds of a launch with an all-reduce between two cards.

    Args:
        form: one of ``FORMS``.

    Raises:
        RuntimeError: a rank failed, or the backend took the other form, since this one does not work here.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/times"
        ranks = [context.Process(target=reduce_times, args=(r, f"{folder}/meet", rounds, file, form)) for r in range(2)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            raise RuntimeError(f"ranks ended with {[p.exitcode for p in ranks]}")
        took, ran = json.loads(Path(file).read_text())
        if ran != form:
            raise RuntimeError(f"the {form} form does not work here: sums ran in the {ran} form")
        return float(took)


def answers(setup: Setup, ranks: int, count: int) -> list[list[int]]:
    """Greedy tokens to ``count`` texts and as many images."""
    from trencadis import LLM, SamplingParams

    llm = LLM(
        setup.model, dtype=setup.dtype, threads=setup.threads, device=setup.device, tensor_parallel_size=ranks,
        **setup.limits(),
    )  # fmt: skip
    chats = [t for i in range(2) for t in conversations(Work(count, 16, words=30, images=i, seed=90 + i))]
    done = llm.chat(chats, SamplingParams(temperature=0, max_tokens=16, ignore_eos=True), use_tqdm=False)
    tokens = [list(d.outputs[0].token_ids) for d in done]
    llm.close()
    return tokens


def main() -> None:
    """Writes OUT."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("setup")
    parser.add_argument("out", type=Path)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--samples", type=int, default=16)
    args = parser.parse_args()
    setup = Setup(**json.loads(args.setup))
    found: dict[str, Any] = {"failed": {}}
    for form in FORMS:
        name = "all_reduce" if form == FORMS[0] else f"all_reduce_{form}"
        try:
            found[f"{name}_us"] = all_reduce_us(args.rounds, form)
        except Exception as error:
            found["failed"][name] = f"{type(error).__name__}: {error}"
    args.out.write_text(json.dumps(found))
    two, one = answers(setup, 2, args.samples), answers(setup, 1, args.samples)
    found["differ"] = sum(a != b for a, b in zip(two, one, strict=True))
    found["answers"] = len(two)
    args.out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
