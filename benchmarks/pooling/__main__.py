"""Concurrent single embeddings against one request with all texts, and against transformers, over HTTP.

python -m benchmarks.pooling [--model encoder|decoder] [--clients 20] [--texts 60] [--tokens 32] [--repeats 3]
                             [--layers 24] [--threads 1]

decoder: the sizes of Qwen2.5-0.5B, last token; encoder: those of bge-large, first token; random weights, float32. The
sides take turns. Wall time counts; on a shared machine look at the CPU seconds. transformers runs batches of as
many texts as there are clients; all have equal lengths, so that it computes no padding.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil

from benchmarks.harness.reporting import BENCH, RESULTS, Others, machine, median, table
from benchmarks.harness.server import serving
from trencadis.assets import demo_path

BARS = {"one batch": 0.9, "transformers": 1.0}
"""Least rate of concurrent single requests, as a share of another side's."""

VOCAB = 8192
SIZES: dict[str, tuple[str, dict[str, Any]]] = {
    "decoder": (
        "Qwen2",
        {
            "hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
            "intermediate_size": 4864,
        },
    ),
    "encoder": (
        "Bert",
        {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096},
    ),
}  # fmt: skip
"""Kind of model and its sizes; the table of the vocabulary is small, since an embedding only looks rows up."""


def checkpoint(kind: str, layers: int) -> Path:
    """The folder of a random checkpoint, which is made if missing."""
    import torch
    import transformers

    folder = BENCH / "checkpoints" / f"embedding-{kind}-{layers}"
    if not (folder / "done").exists():
        name, sizes = SIZES[kind]
        torch.manual_seed(0)
        config = getattr(transformers, f"{name}Config")(vocab_size=VOCAB, **{**sizes, "num_hidden_layers": layers})
        getattr(transformers, f"{name}Model")(config).save_pretrained(folder)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(demo_path() / file, folder / file)
        (folder / "done").touch()
    return folder


class Clients:
    """Requests to a server, in a loop of its own."""

    def __init__(self, url: str, model: str, count: int) -> None:
        self.url, self.model, self.count = url, model, count

    def singles(self, texts: list[list[int]]) -> None:
        """One text a request, ``count`` requests at a time."""

        async def run() -> None:
            queue = list(texts)
            async with httpx.AsyncClient(timeout=600, trust_env=False) as http:

                async def one() -> None:
                    while queue:
                        await self._post(http, queue.pop())

                await asyncio.gather(*(one() for _ in range(self.count)))

        asyncio.run(run())

    def batch(self, texts: list[list[int]]) -> None:
        """All texts in one request."""

        async def run() -> None:
            async with httpx.AsyncClient(timeout=600, trust_env=False) as http:
                await self._post(http, texts)

        asyncio.run(run())

    async def _post(self, http: httpx.AsyncClient, given: Any) -> None:
        answer = await http.post(f"{self.url}/v1/embeddings", json={"model": self.model, "input": given})
        answer.raise_for_status()


def run_transformers(folder: Path, size: int, threads: int) -> Callable[[list[list[int]]], None]:
    """transformers' embeddings in batches of ``size``."""
    import torch
    import transformers

    torch.set_num_threads(threads)
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()

    def run(texts: list[list[int]]) -> None:
        with torch.inference_mode():
            for at in range(0, len(texts), size):
                found: Any = model(input_ids=torch.tensor(texts[at : at + size]))
                torch.nn.functional.normalize(found.last_hidden_state[:, -1], dim=-1).tolist()

    return run


def cpu_seconds(pids: Sequence[int]) -> float:
    """CPU time of the server's processes and this one so far."""
    times = [psutil.Process(pid).cpu_times() for pid in (os.getpid(), *pids)]
    return sum(t.user + t.system for t in times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=tuple(SIZES), default="decoder")
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--texts", type=int, default=60)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    folder, others = checkpoint(args.model, args.layers), Others()
    flags = ("--model", str(folder), "--runner", "pooling", "--dtype", "float32", "--threads", str(args.threads),
             "--max-model-len", "512", "--no-enable-prefix-caching", "--max-num-seqs", "64")  # fmt: skip
    rng, seconds, work = np.random.default_rng(0), dict[str, list[float]](), dict[str, list[float]]()
    with serving(*flags) as server:
        clients = Clients(server.url, server.model(), args.clients)
        sides: dict[str, Callable[[list[list[int]]], None]] = {
            "concurrent": clients.singles,
            "one batch": clients.batch,
            "transformers": run_transformers(folder, args.clients, args.threads),
        }
        for repeat in range(-1, args.repeats):  # the first one warms up
            for name, run in sides.items():
                count = args.clients if repeat < 0 else args.texts
                texts = [[int(t) for t in rng.integers(5, VOCAB, args.tokens)] for _ in range(count)]
                begun, before = time.perf_counter(), cpu_seconds(server.pids())
                run(texts)
                if repeat >= 0:
                    seconds.setdefault(name, []).append(time.perf_counter() - begun)
                    work.setdefault(name, []).append(cpu_seconds(server.pids()) - before)
    rates = {name: args.texts / median(found) for name, found in seconds.items()}
    cpu = {name: median(found) for name, found in work.items()}
    rows = [
        (name, rate, rates["concurrent"] / rate, cpu[name] / cpu["concurrent"], BARS.get(name, ""))
        for name, rate in rates.items()
    ]
    print(table(("side", "texts/s", "concurrent is", "by CPU time", "bar"), rows))
    print(f"{args.texts} texts of {args.tokens} tokens, {args.clients} clients, {others.cores()} cores used by others")
    RESULTS.mkdir(parents=True, exist_ok=True)
    made = {
        "machine": machine(),
        "arguments": vars(args),
        "seconds": seconds,
        "cpu": work,
        "others_cores": others.cores(),
    }
    (RESULTS / f"embeddings-{args.model}.json").write_text(json.dumps(made, indent=1))


if __name__ == "__main__":
    main()
