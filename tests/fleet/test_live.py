"""``serve --data-parallel-size`` with real engines of the demo model: answers, engines that die, images encoded."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import os
import random
import signal
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from tests.traffic.server_process import RunningServer, server

pytestmark = pytest.mark.long

FLAGS = (
    "--device", "cpu", "--max-num-seqs", "16", "--max-model-len", "2048", "--kv-cache-memory-bytes", "256MiB",
    "--mm-processor-kwargs", '{"max_pixels": 200704}', "--threads", "4",
)  # fmt: skip
TEXTS = [f"Tell me {n} things about a {what}." for n in range(2, 8) for what in ("boat", "mill", "bridge")]


def make_image(number: int) -> str:
    """One of any number of different images, as a data URL."""
    pixels = np.random.default_rng(number).integers(0, 256, (8, 8, 3), np.uint8).repeat(49, 0).repeat(49, 1)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}"


def body(text: str, **more: Any) -> dict[str, Any]:
    """A chat request; its seed makes its answer that of any engine."""
    messages = [{"role": "user", "content": text}]
    return {"messages": messages, "max_tokens": 24, "temperature": 0.8, "seed": len(text), **more}


def said(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


async def all_answers(running: RunningServer, kills: int = 0) -> list[httpx.Response]:
    """Every text asked four times at once, while engines are killed one after the other."""
    async with httpx.AsyncClient(base_url=running.url, timeout=240, trust_env=False) as http:
        calls = [
            asyncio.create_task(http.post("/v1/chat/completions", json=body(text), headers={"x-request-id": text[:40]}))
            for text in TEXTS * 4
        ]
        for i in range(kills):
            await asyncio.sleep(1.5)
            with contextlib.suppress(ProcessLookupError):
                pids = await asyncio.to_thread(running.engine_pids)
                os.kill(pids[i % len(pids)], signal.SIGKILL)
            await asyncio.to_thread(running.wait, "/health")
        return await asyncio.gather(*calls)


def test_answers_of_four_engines_are_those_of_one_also_when_engines_die(tmp_path: Path) -> None:
    with server(tmp_path, *FLAGS, seconds=240) as running:
        expected = {t: said(running.http.post("/v1/chat/completions", json=body(t))) for t in TEXTS}
    with server(tmp_path, *FLAGS, "-dp", "4", seconds=240) as running:
        assert len(running.engine_pids()) == 4
        calm = asyncio.run(all_answers(running))
        assert [said(a) for a in calm] == [expected[t] for t in TEXTS * 4]
        stormy = asyncio.run(all_answers(running, kills=3))
        # No token has reached a client before the answer is whole, but the engine may have drawn some.
        assert {a.status_code for a in stormy} <= {200, 503}
        good = [(said(a), expected[t]) for a, t in zip(stormy, TEXTS * 4, strict=True) if a.status_code == 200]
        assert all(a == b for a, b in good) and len(good) >= len(stormy) // 2
        print(f"{len(good)} of {len(stormy)} answered under 3 kills; restarts {running.text().count('restart in')}")


def test_images_of_64_sessions_over_four_engines_are_encoded_about_once(tmp_path: Path) -> None:
    rng = random.Random(4)
    shown = {s: 0 if s % 8 == 0 else 1 + rng.randrange(24) for s in range(64)}
    urls = {n: make_image(n) for n in set(shown.values())}

    def turn(session: int, past: list[dict[str, Any]]) -> dict[str, Any]:
        content = [
            {"type": "text", "text": f"Session {session}."},
            {"type": "image_url", "image_url": {"url": urls[shown[session]]}},
        ]
        return {"messages": [{"role": "user", "content": content}, *past], "max_tokens": 8, "temperature": 0}

    async def one(http: httpx.AsyncClient, session: int, limit: asyncio.Semaphore) -> None:
        past: list[dict[str, Any]] = []
        for number in range(3):
            async with limit:
                answer = await http.post("/v1/chat/completions", json=turn(session, past))
            past += [
                {"role": "assistant", "content": said(answer)},
                {"role": "user", "content": f"And then, {number}?"},
            ]

    async def everything(url: str) -> None:
        limit = asyncio.Semaphore(4)
        async with httpx.AsyncClient(base_url=url, timeout=240, trust_env=False) as http:
            await asyncio.gather(*(one(http, s, limit) for s in shown))

    with server(tmp_path, *FLAGS, "-dp", "4", "--encoder-cache-images", "32", seconds=240) as running:
        asyncio.run(everything(running.url))
        stats = running.http.get("/stats").json()
        encoded = [e["image_arena"]["encoded"] for e in stats["engines"]]
        hits = stats["prefix_cache"]["hits"] / stats["prefix_cache"]["queries"]
        distinct = len(urls)
        print(f"{sum(encoded)} encoded of {distinct} distinct by engine {encoded}, prefix hits {hits:.2f}")
        assert sum(encoded) <= 1.15 * distinct
        assert sum(n > 0 for n in encoded) == 4, "one engine had all the work"
