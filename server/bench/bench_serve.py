"""``trencadis bench serve``: puts load on a running server and reports latencies and rates.

Requests are sent all at once, at a rate, or at a growing rate. The delays of the client's own event loop are measured
meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import math
import os
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from trencadis.core.errors import StartupError
from trencadis.core.json_types import Json, JsonObject
from trencadis.server.bench import bench_command, bench_metrics
from trencadis.server.bench.bench_metrics import compute_request_timing
from trencadis.server.bench.datasets import BenchSample, make_counter, make_samples
from trencadis.server.bench.http_client import BenchClient, Exchange


def make_rates(count: int, rate: float, ramp: str = "", start: float = 0.0, end: float = 0.0) -> list[float]:
    """Returns the request rate at each request, per second: constant, or from ``start`` to ``end`` (``linear`` or
    ``exponential``).
    """
    if not ramp:
        return [rate] * count
    shares = [i / max(count - 1, 1) for i in range(count)]
    if ramp == "linear":
        return [start + (end - start) * share for share in shares]
    return [start * (end / start) ** share for share in shares]


def make_send_times(given: list[float], burstiness: float, seed: int, fixed: bool) -> list[float]:
    """Returns the seconds after the start at which requests are sent.

    The gaps are drawn from gamma distributions of shape ``burstiness`` around 1 / rate: 1 is a Poisson process, less
    has bursts, infinity none. With ``fixed`` the whole is scaled to take count / rate seconds, so that runs with
    different seeds offer the same load.
    """
    rng = np.random.default_rng(seed)
    gaps = []
    for rate in given:
        if math.isinf(rate) or rate <= 0:
            gaps.append(0.0)
        elif math.isinf(burstiness):
            gaps.append(1.0 / rate)
        else:
            gaps.append(float(rng.gamma(burstiness, 1.0 / (rate * burstiness))))
    found = np.cumsum(gaps)
    if fixed and len(found) and found[-1] > 0:
        found *= len(given) / given[0] / found[-1]
    return [float(one) for one in found]


TICK = 0.01


@dataclass(slots=True)
class RequestLoad:
    """Requests as bytes, the seconds at which they are sent, and the maximum that run at a time (0: any number)."""

    requests: Sequence[bytes]
    times: Sequence[float]
    most: int = 0


@dataclass
class ClientCost:
    """Figures of the client itself: CPU seconds, received pieces, and delays of its event loop.

    ``delays`` has a value every 10 ms: the seconds by which a timer came after its time. Data that arrived meanwhile
    was recorded late by as much.
    """

    cpu: float = 0.0
    pieces: int = 0
    delays: list[float] = field(default_factory=list)

    def summarise(self) -> dict[str, float]:
        """Returns the figures for the report."""
        late = sorted(self.delays) or [0.0]

        def at(share: float) -> float:
            return 1000 * late[min(len(late) - 1, int(share * len(late)))]

        return {
            "client_cpu_seconds": self.cpu,
            "client_cpu_us_per_piece": 1e6 * self.cpu / max(1, self.pieces),
            "client_loop_lag_p50_ms": at(0.5),
            "client_loop_lag_p99_ms": at(0.99),
            "client_loop_lag_max_ms": 1000 * late[-1],
        }


class LoadResult(NamedTuple):
    """A load that has run: the exchanges in the requests' order, the total seconds, and the client's own figures."""

    exchanges: list[Exchange]
    seconds: float
    cost: ClientCost


async def run_load(
    client: BenchClient, load: RequestLoad, ended: Callable[[Exchange], None] = lambda exchange: None
) -> LoadResult:
    """Runs a load.

    Args:
        ended: called with each exchange at its end.
    """
    slots: contextlib.AbstractAsyncContextManager[object] = contextlib.nullcontext()
    if load.most:
        slots = asyncio.Semaphore(load.most)

    async def one(request: bytes, exchange: Exchange) -> None:
        async with slots:
            await client.run(request, exchange)
        ended(exchange)

    made = [Exchange() for _ in load.requests]
    own, tasks = ClientCost(), []
    gc.collect()
    gc.freeze()
    watch = asyncio.create_task(_measure_loop_delay(own))
    cpu, begun = sum(os.times()[:2]), time.perf_counter()
    try:
        for request, exchange, at in zip(load.requests, made, load.times, strict=True):
            pause = begun + at - time.perf_counter()
            if pause > 0:
                await asyncio.sleep(pause)
            exchange.started = time.perf_counter()
            tasks.append(asyncio.create_task(one(request, exchange)))
        await asyncio.gather(*tasks)
    finally:
        watch.cancel()
        for task in tasks:
            task.cancel()
        gc.unfreeze()
    seconds = time.perf_counter() - begun
    own.cpu, own.pieces = sum(os.times()[:2]) - cpu, sum(len(one.pieces) for one in made)
    return LoadResult(made, seconds, own)


async def _measure_loop_delay(own: ClientCost) -> None:
    while True:
        due = time.perf_counter() + TICK
        await asyncio.sleep(TICK)
        own.delays.append(max(0.0, time.perf_counter() - due))


KEYS = ("VLLM_API_KEY", "OPENAI_API_KEY")
READY_PAUSE = 1.0


def main(words: Sequence[str]) -> int:
    """Runs a benchmark: exit code 0, or 1 if every request failed.

    Raises:
        StartupError: the benchmark cannot begin.
    """
    args = bench_command.parse_serve_args(words)
    return asyncio.run(_run(args))


async def _run(args: argparse.Namespace) -> int:
    key = next((os.environ[name] for name in KEYS if os.environ.get(name)), "")
    headers = ({"authorization": f"Bearer {key}"} if key else {}) | {k.lower(): v for k, v in args.headers.items()}
    client = BenchClient(args.url, headers, not args.insecure)
    try:
        name, root = await _find_model(args, client)
        counter, counted_by = await make_counter(client, name, root, args.tokenizer or "")
        print(f"model {name} at {args.url}{args.endpoint}; prompts counted by: {counted_by}", flush=True)
        asked = await make_samples(args, counter)
        found = await _measure(args, client, name, asked)
    finally:
        client.close()
    for line in bench_metrics.format_failures(found["errors"]):
        print(line)
    print("\n".join(bench_metrics.format_lines(args, found)))
    if warning := bench_metrics.format_client_delay(found):
        print(warning, file=sys.stderr)
    made = bench_metrics.make_result_object(args, found, name, counted_by)
    if args.save_result or args.append_result:
        path = bench_metrics.make_result_path(args, name, made["date"])
        bench_metrics.save(path, made, args.append_result)
        print(f"saved as {path}")
    return 0 if found["completed"] else 1


async def _find_model(args: argparse.Namespace, client: BenchClient) -> tuple[str, str]:
    """Asks the server for the model's name in the API and its path or id (``root``).

    Raises:
        StartupError: no server answers.
    """
    end, given = time.monotonic() + args.ready_check_timeout_sec, args.served_model_name or args.model
    while True:
        try:
            listed = (await client.fetch("/v1/models"))["data"]
            first = next((one for one in listed if one.get("id") == given), listed[0])
            return given or str(first["id"]), str(first.get("root") or "")
        except (ConnectionError, KeyError, IndexError, TypeError) as error:
            if given and "answers" in str(error):
                return given, ""
            if time.monotonic() >= end:
                raise StartupError(f"no server answers at {args.url} ({str(error)[:80]}).") from None
            await asyncio.sleep(READY_PAUSE)


def make_body(args: argparse.Namespace, model: str, sample: BenchSample) -> JsonObject:
    """Returns the JSON body of a request."""
    made: JsonObject = {"model": model, "stream": True, "stream_options": {"include_usage": True}}
    if args.backend == "openai-chat":
        content: Json = [{"type": "text", "text": sample.prompt}]
        content += [{"type": "image_url", "image_url": {"url": url}} for url in sample.images]
        made["messages"] = sample.messages or [{"role": "user", "content": content}]
        limit = "max_completion_tokens"
    else:
        made["prompt"], limit = sample.prompt, "max_tokens"
    if sample.output_tokens:
        made[limit] = sample.output_tokens
    if args.logprobs is not None:
        made |= {"logprobs": True, "top_logprobs": args.logprobs} if "messages" in made else {"logprobs": args.logprobs}
    if args.ignore_eos:
        made["ignore_eos"] = True
    made |= {name: value for name in bench_command.SAMPLING if (value := getattr(args, name)) is not None}
    return {**made, **args.extra_body}


def make_requests(
    args: argparse.Namespace, client: BenchClient, model: str, asked: Sequence[BenchSample]
) -> list[bytes]:
    """Returns the bytes of all requests, made before the clock starts."""
    prefix = args.request_id_prefix or f"bench-{uuid.uuid4().hex[:8]}-"
    return [
        client.make_request(
            args.endpoint, json.dumps(make_body(args, model, one)).encode(), f"x-request-id: {prefix}{i}\r\n"
        )
        for i, one in enumerate(asked)
    ]


async def _measure(
    args: argparse.Namespace, client: BenchClient, model: str, asked: Sequence[BenchSample]
) -> JsonObject:
    if args.backend != "openai-chat" and any(one.images or one.messages for one in asked):
        raise StartupError("images and messages need --backend openai-chat.")
    made = make_requests(args, client, model, asked)
    if args.num_warmups:
        warm = await run_load(
            client, RequestLoad([made[0]] * args.num_warmups, [0.0] * args.num_warmups, args.max_concurrency or 0)
        )
        if all(compute_request_timing(one, 0).error for one in warm.exchanges):
            raise StartupError(f"every warm-up request failed: {compute_request_timing(warm.exchanges[0], 0).error}.")
    given = make_rates(
        len(made),
        args.request_rate,
        args.ramp_up_strategy or "",
        args.ramp_up_start_rps or 0,
        args.ramp_up_end_rps or 0,
    )
    when = make_send_times(given, args.burstiness, args.seed, not args.ramp_up_strategy)
    with _show_progress_bar(len(made), not args.disable_tqdm) as step:
        exchanges, seconds, own = await run_load(client, RequestLoad(made, when, args.max_concurrency or 0), step)
    read = [compute_request_timing(one, sample.prompt_tokens) for one, sample in zip(exchanges, asked, strict=True)]
    return bench_metrics.compute_result(read, seconds, args.metrics, args.percentiles, args.goals) | own.summarise()


@contextlib.contextmanager
def _show_progress_bar(total: int, wanted: bool) -> Iterator[Callable[[Exchange], None]]:
    """Yields a function to call with each finished exchange; shows a bar on a terminal."""
    if not (wanted and sys.stderr.isatty()):
        yield lambda exchange: None
        return
    from tqdm import tqdm

    with tqdm(total=total, dynamic_ncols=True, unit="req") as bar:

        def step(exchange: Exchange) -> None:
            bar.update(1)

        yield step
