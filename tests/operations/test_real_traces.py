"""Traces of a real server and model: a span a request, stages that add up, and what traces cost."""

from __future__ import annotations

import importlib.util
import math
import random
import re
import statistics
import time
from collections import Counter
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
from trencadis.assets import demo_path
from trencadis.server.metrics.request_trace_queue import EVERY

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
        image = Image.effect_noise((side, side), 20 + seed % 60).convert("RGB")
        content.append({"type": "image_url", "image_url": {"url": data_url(image)}})
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
    lengths, stages = dict.fromkeys(whole, 0), Counter[str]()
    for span in spans:
        if span.name != "llm_request":
            lengths[span.parent_span_id] += span.end_time_unix_nano - span.start_time_unix_nano
            stages[span.name] += span.end_time_unix_nano - span.start_time_unix_nano
    wholes = {id: s.end_time_unix_nano - s.start_time_unix_nano for id, s in whole.items()}
    shares = [lengths[id] / wholes[id] for id in whole]
    mean = statistics.mean(shares)
    each = ", ".join(f"{name} {length / sum(wholes.values()):.1%}" for name, length in stages.most_common())
    print(f"children are {min(shares):.1%} to {max(shares):.1%} of 200 requests, {mean:.1%} on average: {each}")
    assert min(shares) >= 0.95 and mean >= 0.98 and max(shares) <= 1.001
    engine = sum(stages[name] for name in ("queue", "encode", "prefill", "decode"))
    assert engine > 0.7 * sum(wholes.values()), "the stages, and not what lies between them, are the time"


ROUNDS, ASKED = 22, 12
"""Pairs of measurements, of which the first two warm up, and requests in each half of one."""


class Spent(NamedTuple):
    """CPU seconds of a server: of all its processes, of the one that makes traces, and of the traces alone."""

    whole: float
    api: float
    traces: float

    @classmethod
    def of(cls, server: FakeServer, http: httpx.Client) -> Spent:
        process = psutil.Process(server.process.pid)
        api, *others = map(on_cpu, (process, *process.children(recursive=True)))
        shown = http.get("/metrics").text
        found = re.search(r"^vllm:traces_cpu_seconds_total (\S+)", shown, re.M)
        assert found is not None
        return cls(api + sum(others), api, float(found[1]))


def on_cpu(process: psutil.Process) -> float:
    """CPU seconds of the threads that live, to the nanosecond: the system's sums have steps of ten milliseconds."""
    tasks = Path(f"/proc/{process.pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


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


def half(server: FakeServer, http: httpx.Client, on: bool) -> Spent:
    """What ``ASKED`` requests cost the server a request, with traces or without."""
    assert http.post("/switch", params={"on": on}).text == ("on" if on else "off")
    begun = Spent.of(server, http)
    for seed in range(ASKED):
        ask(http, seed, 64)
    time.sleep(1.5 * EVERY)  # traces are made of the last requests, too
    return Spent(*((b - a) / ASKED for a, b in zip(begun, Spent.of(server, http), strict=True)))


@pytest.mark.parametrize("answer", [None, slow, lying])
def test_a_collector_that_is_away_slow_or_lying_costs_nothing(
    tmp_path: Path, answer: Callable[[Any], None] | None
) -> None:
    """One server, with traces and without in turn: two differ by more than traces cost, from start to end.

    The difference says what requests cost more; the traces' own clock, of the thread that works on them, is sharper.
    """
    collector = Collector()
    collector.answer = answer or collector.take
    url = "http://127.0.0.1:9" if answer is None else collector.url
    words = (str(demo_path()), *MODEL, "--otlp-traces-endpoint", url)
    app = ("--app", "tests.operations.switched_traces:build_app")
    with FakeServer(*words, fakes=app, cwd=tmp_path) as server:
        server.wait_for("Uvicorn running on", 300)
        with httpx.Client(base_url=server.url, trust_env=False, timeout=300) as http:
            pairs = []
            for round in range(ROUNDS):
                first = half(server, http, bool(round % 2))
                second = half(server, http, not round % 2)
                pairs.append((first, second) if round % 2 else (second, first))
    collector.close()
    pairs = pairs[2:]
    whole = interval([traced.whole / plain.whole - 1 for traced, plain in pairs])
    api = interval([(traced.api - plain.api) / plain.whole for traced, plain in pairs])
    own = statistics.mean((traced.traces + plain.traces) / plain.whole for traced, plain in pairs)
    seconds = statistics.mean(plain.whole for _, plain in pairs)
    name = "away" if answer is None else answer.__name__
    print(f"collector {name}: traces take {own:.3%} of a request's CPU, which is {seconds * 1e3:.0f} ms without them")
    print(
        f"{len(pairs)} pairs: {whole[0]:+.2%} to {whole[1]:+.2%} more, in their process {api[0]:+.2%} to {api[1]:+.2%}"
    )
    assert own <= 0.01
    assert statistics.mean(whole) <= 0.01 and statistics.mean(api) <= 0.01
