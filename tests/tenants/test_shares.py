"""Shares of two tenants through a real server, and what the policy costs."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import json
import multiprocessing
import random
import re
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest
from PIL import Image

from tests.engine.test_fairness import Driven
from tests.traffic.image_chats import data_url
from tests.traffic.server_process import RunningServer, server
from trencadis import LLM, SamplingParams
from trencadis.assets import demo_path

pytestmark = pytest.mark.long
WEIGHTS = {"one": 1, "three": 3}
SECONDS, SETTLED = 300.0, 15.0
"""How long both are busy, and from when on it counts."""
OPEN = 24
"""Requests that each tenant keeps open; eight run at a time."""


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("shares")
    keys = [
        {"name": name, "sha256": hashlib.sha256(f"key-{name}".encode()).hexdigest(), "weight": weight}
        for name, weight in WEIGHTS.items()
    ]
    file = folder / "keys.yaml"
    file.write_text(json.dumps({"keys": keys}))  # JSON is YAML
    file.chmod(0o600)
    flags = ("--api-key-file", str(file), "--scheduling-policy", "fair", "--max-num-seqs", "8", "--dtype", "float32",
             "--kv-cache-memory-bytes", "128MiB", "--threads", "1")  # fmt: skip
    with server(folder, *flags, seconds=600) as made:
        yield made


def body(rng: random.Random) -> dict[str, Any]:
    """A request of any length, with an image in every third."""
    words = " ".join(
        rng.choice(("red", "blue", "square", "circle", "left", "small")) for _ in range(rng.randint(3, 150))
    )
    parts: list[dict[str, Any]] = [{"type": "text", "text": f"{rng.random()} {words}"}]
    if rng.random() < 1 / 3:
        size = rng.choice((112, 168, 224)), rng.choice((112, 168, 224))
        image = Image.new("RGB", size, (rng.randrange(256), rng.randrange(256), rng.randrange(256)))
        parts.insert(0, {"type": "image_url", "image_url": {"url": data_url(image)}})
    return {
        "messages": [{"role": "user", "content": parts}], "max_tokens": rng.choice((4, 16, 48)), "ignore_eos": True,
        "temperature": 0,
    }  # fmt: skip


async def ask_on(url: str, name: str, seed: int, until: float, served: Counter[str], counted: float) -> None:
    """Asks one request after the other; tokens of those that end between ``counted`` and ``until`` count."""
    rng = random.Random(seed)
    async with httpx.AsyncClient(base_url=url, timeout=600, trust_env=False) as http:
        while time.monotonic() < until:
            answer = await http.post("/v1/chat/completions", json=body(rng), headers={"x-api-key": f"key-{name}"})
            assert answer.status_code == 200, answer.text
            if counted < time.monotonic() < until:
                usage = answer.json()["usage"]
                served[name] += usage["total_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
                served[f"requests of {name}"] += 1


def test_two_tenants_of_weights_one_and_three_are_served_so_for_five_minutes(running: RunningServer) -> None:
    served: Counter[str] = Counter()

    async def main() -> None:
        begun = time.monotonic()
        until, counted = begun + SECONDS, begun + SETTLED
        tasks = [
            ask_on(running.url, name, seed + 1000 * weight, until, served, counted)
            for name, weight in WEIGHTS.items()
            for seed in range(OPEN)
        ]
        await asyncio.gather(*tasks)

    asyncio.run(main())
    ratio = served["three"] / served["one"]
    print(f"{SECONDS:.0f} s: {dict(served)}, ratio {ratio:.3f}")
    assert ratio == pytest.approx(3.0, rel=0.1)


ROWS, STEPS, PAIRS = 128, 60, 60


def stream(policy: str) -> Iterator[float]:
    """CPU seconds of each block of ``STEPS`` steps of a full scheduler; tenants come and go."""
    made, rng, count = Driven(rows=ROWS, policy=policy, blocks=20_000), random.Random(1), 0
    while True:
        begun = time.process_time()
        for _ in range(STEPS):
            while len(made.life.requests) < 2 * ROWS:
                tenant = rng.randrange(40)
                made.add(f"r{count}", f"t{tenant}", 1.0 + tenant % 3, rng.choice((5, 20)), rng.choice((20, 60, 120)))
                count += 1
            made.step()
        yield time.process_time() - begun


def step_seconds() -> float:
    """CPU seconds of a whole step with ``ROWS`` rows of the demo model."""
    llm = LLM(str(demo_path()), dtype="float32", kv_cache_memory_bytes=128 << 20, max_num_seqs=ROWS)
    tokens = 24
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    llm.generate(["warm"] * 4, params, use_tqdm=False)
    begun = time.process_time()
    llm.generate([f"Count to {i}" for i in range(ROWS)], params, use_tqdm=False)
    spent = time.process_time() - begun
    llm.close()
    return spent / tokens


def test_the_policy_costs_next_to_nothing_at_128_rows() -> None:
    """The difference of two schedulers over one load, in alternating pairs, as a share of a step's CPU time."""
    fair, plain = stream("fair"), stream("fcfs")
    gc.disable()
    try:
        for made in (fair, plain):
            next(made), next(made)
        differences = []
        for i in range(PAIRS):
            first, second = (fair, plain) if i % 2 else (plain, fair)
            a, b = next(first), next(second)
            differences.append((a - b if i % 2 else b - a) / STEPS)
    finally:
        gc.enable()
    whole = step_seconds()
    mean = statistics.fmean(differences)
    half = 1.96 * statistics.stdev(differences) / PAIRS**0.5
    low, high = (100 * (mean + sign * half) / whole for sign in (-1, 1))
    print(f"fair: {1e6 * mean:.1f} us a step, {low:+.2f} to {high:+.2f} % of {1e3 * whole:.1f} ms (95 %)")
    assert low < 1.0, "the interval lies above the bar"


async def first_token(http: httpx.AsyncClient, name: str, made: dict[str, Any]) -> float:
    """Seconds until the first token of a streamed answer, which is read to its end."""
    begun, first = time.monotonic(), 0.0
    async with http.stream("POST", "/v1/chat/completions", json=made, headers={"x-api-key": f"key-{name}"}) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if not first and '"content":"' in line and '"content":""' not in line:
                first = time.monotonic() - begun
    return first


async def ask_by_four(url: str, seed: int, count: int) -> list[float]:
    """TTFT of a tenant with four clients that ask one question after the other, ``count`` each."""
    found: list[float] = []

    async def client(number: int, http: httpx.AsyncClient) -> None:
        rng = random.Random(seed + number)
        for _ in range(count):
            found.append(await first_token(http, "three", body(rng) | {"stream": True}))

    async with AsyncExitStack() as stack:
        # All before the first asks: each makes a TLS context, which holds this loop for 20 ms and would stand in the
        # others' time.
        made = [httpx.AsyncClient(base_url=url, timeout=600, trust_env=False) for _ in range(4)]
        for http in made:
            await stack.enter_async_context(http)
        await asyncio.gather(*(client(number, http) for number, http in enumerate(made)))
    return found


FLOOD, ASKED = 2000, 60
"""Requests of the flood, and of each client beside it."""


async def _flood(url: str) -> None:
    rng = random.Random(7)
    limits = httpx.Limits(max_connections=FLOOD, max_keepalive_connections=100)
    async with httpx.AsyncClient(base_url=url, timeout=1800, trust_env=False, limits=limits) as http:
        await asyncio.gather(*(first_token(http, "one", body(rng) | {"stream": True}) for _ in range(FLOOD)))


def flood(url: str) -> float:
    """``FLOOD`` requests at once, in a process of their own: they must not delay the clock of the others."""
    begun = time.monotonic()
    asyncio.run(_flood(url))
    return time.monotonic() - begun


def test_a_flood_by_one_tenant_leaves_the_others_first_tokens(running: RunningServer) -> None:
    asyncio.run(ask_by_four(running.url, 1, 5))
    alone = sorted(asyncio.run(ask_by_four(running.url, 100, ASKED)))
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        sent = pool.submit(flood, running.url)
        waiting, end = 0, time.monotonic() + 120
        while waiting < FLOOD // 20 and time.monotonic() < end:
            found = re.search(r"^vllm:num_requests_waiting\{.*\} (\d+)", running.http.get("/metrics").text, re.M)
            waiting = int(found.group(1)) if found else 0
        beside = sorted(asyncio.run(ask_by_four(running.url, 500, ASKED)))
        ended = sent.done()
        took = sent.result()
    assert waiting >= FLOOD // 20 and not ended, "the flood ended before the other tenant had asked: it proves nothing"
    a, b = (values[int(0.99 * (len(values) - 1))] for values in (alone, beside))
    medians = [round(1000 * values[len(values) // 2]) for values in (alone, beside)]
    slowest = [[round(1000 * value) for value in values[-6:]] for values in (alone, beside)]
    print(f"TTFT p99 {1000 * a:.0f} ms alone, {1000 * b:.0f} ms beside {FLOOD} requests ({took:.0f} s)")
    print(f"{medians=}, {slowest=}")
    assert b <= 2 * a
