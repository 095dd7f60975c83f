"""Traces of a real server and model: a span a request, stages that add up, and what traces cost."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import random
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil
import pytest
from PIL import Image

from tests.operations.fake_server import FakeServer
from tests.operations.otlp_collector import Collector
from tests.traffic.image_chats import data_url
from trencadis.server.records.tracing import EVERY

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        importlib.util.find_spec("opentelemetry.exporter") is None, reason="needs OpenTelemetry (trencadis[otel])"
    ),
]
MODEL = ("--device", "cpu", "--threads", "1", "--kv-cache-memory-bytes", "64MiB", "--disable-uvicorn-access-log")


def ask(http: httpx.Client, seed: int, tokens: int = 32) -> None:
    rng = random.Random(seed)
    content: list[dict[str, Any]] = [{"type": "text", "text": "What is this? " * rng.choice((1, 20))}]
    if rng.random() < 0.5:
        side = 112 * rng.choice((1, 2))
        picture = Image.effect_noise((side, side), 20 + seed % 60).convert("RGB")
        content.append({"type": "image_url", "image_url": {"url": data_url(picture)}})
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": tokens, "ignore_eos": True}
    assert http.post("/v1/chat/completions", json=body | {"stream": rng.random() < 0.5}).status_code == 200


def test_children_sum_to_the_whole(tmp_path: Path) -> None:
    collector = Collector()
    with FakeServer(*MODEL, "--otlp-traces-endpoint", collector.url, fakes=(), cwd=tmp_path) as server:
        server.wait_for("Uvicorn running on", 300)
        with httpx.Client(base_url=server.url, trust_env=False, timeout=300) as http, ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda seed: ask(http, seed), range(200)))
        server.process.terminate()
        assert server.end() == 0
    spans = collector.spans()
    collector.close()
    whole = {s.span_id: s for s in spans if s.name == "llm_request"}
    assert len(whole) == 200, "those of the last second were sent while the server left"
    lengths = dict.fromkeys(whole, 0)
    for span in spans:
        if span.name != "llm_request":
            lengths[span.parent_span_id] += span.end_time_unix_nano - span.start_time_unix_nano
    shares = [lengths[id] / (s.end_time_unix_nano - s.start_time_unix_nano) for id, s in whole.items()]
    mean = statistics.mean(shares)
    print(f"children are {min(shares):.1%} to {max(shares):.1%} of 200 requests, {mean:.1%} on average")
    assert 0.95 <= mean <= 1.0 and max(shares) <= 1.001


ROUNDS, ASKED = 22, 20
"""Pairs of measurements, of which the first two warm up, and requests to each server in one."""


class Spent(NamedTuple):
    """CPU seconds of a server: of all its processes, and of the one that makes traces."""

    whole: float
    api: float

    @classmethod
    def of(cls, server: FakeServer) -> Spent:
        process = psutil.Process(server.process.pid)
        api, *others = (sum(p.cpu_times()[:2]) for p in (process, *process.children(recursive=True)))
        return cls(api + sum(others), api)


def interval(values: list[float]) -> tuple[float, float]:
    """The mean's, of 95 %."""
    half = 2.09 * statistics.stdev(values) / math.sqrt(len(values))
    return statistics.mean(values) - half, statistics.mean(values) + half


def slow(handler: Any) -> None:
    time.sleep(30)


def lying(handler: Any) -> None:
    handler.send_response(200)
    handler.end_headers()
    handler.wfile.write(b"<html>" * 10000)


@pytest.mark.parametrize("answer", [None, slow, lying])
def test_a_collector_that_is_away_slow_or_lying_costs_nothing(
    tmp_path: Path, answer: Callable[[Any], None] | None
) -> None:
    collector = Collector()
    collector.answer = answer or collector.take
    url = "http://127.0.0.1:9" if answer is None else collector.url
    with contextlib.ExitStack() as stack:
        pair = [
            stack.enter_context(FakeServer(*MODEL, *words, fakes=(), cwd=tmp_path))
            for words in ((), ("--otlp-traces-endpoint", url))
        ]
        clients = []
        for server in pair:
            server.wait_for("Uvicorn running on", 300)
            clients.append(stack.enter_context(httpx.Client(base_url=server.url, trust_env=False, timeout=300)))
        ratios, api = [], []
        for round in range(ROUNDS):
            begun = [Spent.of(server) for server in pair]
            for which in (0, 1) if round % 2 else (1, 0):
                for seed in range(ASKED):
                    ask(clients[which], seed, 64)
            time.sleep(1.5 * EVERY)  # traces are made of the last requests, too
            plain, traced = (
                Spent(*(b - a for a, b in zip(before, Spent.of(server), strict=True)))
                for before, server in zip(begun, pair, strict=True)
            )
            ratios.append(traced.whole / plain.whole - 1)
            api.append((traced.api - plain.api) / plain.whole)
        name = "away" if answer is None else answer.__name__
        whole, own = interval(ratios[2:]), interval(api[2:])
        print(
            f"collector {name}: CPU a request {whole[0]:+.2%} to {whole[1]:+.2%} of {plain.whole / ASKED:.3f} s "
            f"without traces, of that {own[0]:+.2%} to {own[1]:+.2%} in the process that makes them"
        )
        assert whole[0] <= 0.01 and own[0] <= 0.01, "the interval lies above the bar"
    collector.close()
