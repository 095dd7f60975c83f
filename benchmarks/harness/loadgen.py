"""A small closed-loop load generator for the chat API: loopback only, bounded in requests and in time."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx

from benchmarks.harness.compared_engines import random_image, words
from benchmarks.harness.reporting import median, quantile

LOOPBACK = ("127.0.0.1", "::1", "localhost")


EDIT = "Write this text once more, word for word, and correct what is misspelt:\n\n"


@dataclass(frozen=True)
class Load:
    """A closed loop: each of ``clients`` sends its next request when answered, up to ``requests`` or the time limit."""

    clients: int
    requests: int
    words: int = 100
    images: int = 0
    side: int = 448
    out: int = 32
    seed: int = 0
    seconds: float = 300.0
    edited: bool = False
    """The request asks for its own words again, so that the answer repeats what the prompt holds."""
    plain: bool = False
    """The words alone go to /v1/completions: no chat template, whose ids a random model's vocabulary may lack."""


@dataclass
class Answer:
    """One request: when it was sent, when pieces arrived, what the server counted."""

    sent: float
    pieces: list[float] = field(default_factory=list)
    prompt: int = 0
    tokens: int = 0
    error: str = ""

    @property
    def ttft(self) -> float:
        return self.pieces[0] - self.sent

    @property
    def tpot(self) -> float:
        """Mean seconds per token after the first."""
        return (self.pieces[-1] - self.pieces[0]) / max(1, self.tokens - 1)


def body(model: str, load: Load, number: int) -> bytes:
    """The ``number``-th request; no two hold the same words or images."""
    rng = random.Random((load.seed << 20) + number)
    shared = {
        "model": model, "temperature": 0, "max_tokens": load.out, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    if load.plain:
        return json.dumps(shared | {"prompt": words(rng, load.words)}).encode()
    parts: list[dict[str, Any]] = []
    for _ in range(load.images):
        data = io.BytesIO()
        random_image(rng.randrange(1 << 30), load.side).save(data, "PNG", compress_level=1)
        url = "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()
        parts.append({"type": "image_url", "image_url": {"url": url}})
    parts.append({"type": "text", "text": EDIT * load.edited + words(rng, load.words)})
    return json.dumps(shared | {"messages": [{"role": "user", "content": parts}]}).encode()


async def ask(client: httpx.AsyncClient, request: bytes, plain: bool = False) -> Answer:
    """Sends one request, of a ``plain`` load or a chat, and reads its stream."""
    answer = Answer(time.perf_counter())
    route = "/v1/completions" if plain else "/v1/chat/completions"
    headers = {"content-type": "application/json"}
    try:
        async with client.stream("POST", route, content=request, headers=headers) as response:
            if response.status_code != 200:
                answer.error = f"{response.status_code} {(await response.aread())[:200]!r}"
                return answer
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    _take(answer, json.loads(line[6:]))
    except httpx.HTTPError as error:
        answer.error = repr(error)
    if not answer.error and not answer.pieces:
        answer.error = "an answer without a token"
    return answer


def _take(answer: Answer, event: dict[str, Any]) -> None:
    usage = event.get("usage")
    if usage:
        answer.prompt, answer.tokens = usage["prompt_tokens"], usage["completion_tokens"]
    if "error" in event:
        answer.error = str(event["error"])
    for choice in event.get("choices") or ():
        if choice.get("text") or choice.get("delta", {}).get("content"):
            answer.pieces.append(time.perf_counter())


async def drive(
    url: str,
    model: str,
    load: Load,
    make: Callable[[str, Load, int], bytes] = body,
    after: Callable[[int], None] = lambda count: None,
) -> dict[str, Any]:
    """Runs the load and returns its summary.

    Args:
        make: the body of a request, by its number.
        after: called with the number of answers after each.

    Raises:
        ValueError: ``url`` is not the loopback.
    """
    if urlsplit(url).hostname not in LOOPBACK:
        raise ValueError("the load generator only talks to the loopback")
    answers: list[Answer] = []
    numbers = iter(range(load.requests))
    begun = time.perf_counter()
    limits = httpx.Limits(max_connections=load.clients)
    async with httpx.AsyncClient(base_url=url, timeout=load.seconds, limits=limits, trust_env=False) as client:

        async def one() -> None:
            for number in numbers:
                if time.perf_counter() - begun > load.seconds:
                    return
                answers.append(await ask(client, await asyncio.to_thread(make, model, load, number), load.plain))
                after(len(answers))

        await asyncio.gather(*(one() for _ in range(load.clients)))
    return summary(answers, load, time.perf_counter() - begun)


def summary(answers: list[Answer], load: Load, seconds: float) -> dict[str, Any]:
    """Latencies in ms, rates per second of wall time."""
    good = [a for a in answers if not a.error]
    gaps = [b - a for x in good for a, b in zip(x.pieces, x.pieces[1:], strict=False)]
    tokens = sum(a.tokens for a in good)
    ms = 1000.0
    return {
        "clients": load.clients, "requests": len(good), "seconds": seconds,
        "errors": len(answers) - len(good), "first_error": next((a.error for a in answers if a.error), ""),
        "prompt_tokens": median(a.prompt for a in good),
        "ttft_p50_ms": ms * median(a.ttft for a in good), "ttft_p99_ms": ms * quantile((a.ttft for a in good), 0.99),
        "tpot_p50_ms": ms * median(a.tpot for a in good),
        "itl_p50_ms": ms * median(gaps), "itl_p99_ms": ms * quantile(gaps, 0.99),
        "tokens_per_second": tokens / seconds, "images_per_second": load.images * len(good) / seconds,
    }  # fmt: skip
