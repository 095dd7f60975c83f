"""Attacks through tools, reasoning, templates and formats: refused, or served, at little cost and nobody else's."""

from __future__ import annotations

import asyncio
import json
import threading
import time
import tracemalloc
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from tests.fakes.scripted_app import ScriptedApp
from tests.hostile.call_attacks import CALL_ATTACKS, CallAttack, body_of
from tests.traffic.client_examples import scripted
from tests.traffic.scripted_server import fresh_app
from tests.traffic.tool_templates import HERMES
from trencadis.server.text.chat_template import ChatTemplate

SECONDS, BYTES = 2, 64 << 20
"""The bars of one request; a test waits five times as long."""
SAMPLE = Random(11).sample(sorted(CALL_ATTACKS), 8)
HELD = 0.01
"""Seconds that one request may hold up the streams of others: a token of a fast model."""
PIECE = 1 << 16
CHAT = "/v1/chat/completions"
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def attacked() -> Callable[[CallAttack], ScriptedApp]:
    """The application that an attack is for."""
    harness = fresh_app()
    harness.service.template = ChatTemplate(HERMES, harness.tokenizer)
    apps = {trusted: harness.app(trust_request_chat_template=trusted) for trusted in (False, True)}

    def get(attack: CallAttack) -> ScriptedApp:
        harness.made = apps[attack.trusted]
        harness.engine.submitted.clear()
        return harness

    return get


def refused_or_served(harness: ScriptedApp, name: str, body: bytes) -> Any:
    attack = CALL_ATTACKS[name]
    begun = time.process_time()
    response = harness.call(CHAT, method="POST", content=body, headers=JSON)
    assert time.process_time() - begun < 5 * SECONDS
    assert response.status_code in attack.statuses, f"{name}: {response.status_code} {response.text[:300]}"
    if response.status_code != 200:
        error = response.json()["error"]
        assert 0 < len(error["message"]) < 200 and "Traceback" not in error["message"]
    return response


@pytest.mark.parametrize("name", SAMPLE)
def test_a_sample_of_attacks_does_no_harm(attacked: Any, name: str) -> None:
    refused_or_served(attacked(CALL_ATTACKS[name]), name, body_of(CALL_ATTACKS[name]))


@pytest.mark.parametrize("name", ["a tool that spells control tokens", "reasoning that spells its end"])
def test_what_an_attack_spells_stays_text(attacked: Any, name: str) -> None:
    harness = attacked(CALL_ATTACKS[name])
    plain = harness.call(CHAT, {"messages": [{"role": "user", "content": "a"}], "tools": [{
        "type": "function", "function": {"name": "f", "description": "d"}}]})  # fmt: skip
    assert plain.status_code == 200
    assert refused_or_served(harness, name, body_of(CALL_ATTACKS[name])).status_code == 200
    first, second = (r.tokens for r, _ in harness.engine.submitted)
    special = harness.tokenizer.special_ids
    extra = 2 if "reasoning" in name else 0
    assert sum(t in special for t in second) <= sum(t in special for t in first) + extra
    shown = harness.tokenizer.decode(second, False)
    assert "49" not in shown and ("Obey." in shown or "reasoning" in name)


@pytest.mark.long
@pytest.mark.parametrize("name", CALL_ATTACKS)
def test_an_attack_takes_little_time_and_memory(attacked: Any, name: str) -> None:
    harness = attacked(CALL_ATTACKS[name])
    body = body_of(CALL_ATTACKS[name])
    tracemalloc.start()
    try:
        response = refused_or_served(harness, name, body)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    print(f"{name}: {response.status_code}, {peak / 2**20:.1f} MiB beside a body of {len(body) / 2**20:.1f} MiB")
    assert peak < BYTES


async def held(harness: ScriptedApp, body: bytes) -> float:
    """The longest that the event loop computed without a pause while a body arrived and was answered, in seconds."""
    longest = 0.0

    async def tick() -> None:
        nonlocal longest
        last = time.thread_time()
        while True:
            await asyncio.sleep(0.001)
            now = time.thread_time()
            longest, last = max(longest, now - last), now

    async def arriving() -> AsyncIterator[bytes]:
        for at in range(0, len(body), PIECE):
            yield body[at : at + PIECE]
            await asyncio.sleep(0)

    assert harness.made is not None
    transport = httpx.ASGITransport(harness.made)
    ticking = asyncio.create_task(tick())
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        await client.post(CHAT, content=arriving(), headers=JSON)
    ticking.cancel()
    return longest


@pytest.mark.long
def test_no_attack_holds_the_event_loop(attacked: Any) -> None:
    found = []
    for name, attack in CALL_ATTACKS.items():
        body = body_of(attack)
        times = [asyncio.run(held(attacked(attack), body)) for _ in range(3)]
        found.append((min(times), name))
    print("\n" + "\n".join(f"{seconds * 1000:.1f} ms: {name}" for seconds, name in sorted(found)[-5:]))
    assert max(found)[0] < 5 * HELD, max(found)


class Victim(threading.Thread):
    """A stream of others: the times between its events, in seconds."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.url, self.gaps = url, [0.0]

    def run(self) -> None:
        """Reads to the end."""
        body = {"messages": [{"role": "user", "content": "Hi"}], "stream": True, "ignore_eos": True, "max_tokens": 600}
        with (
            httpx.Client(trust_env=False, timeout=120) as http,
            http.stream("POST", self.url + CHAT, json=body) as response,
        ):
            last = 0.0
            for _ in response.iter_lines():
                now = time.monotonic()
                self.gaps += [now - last] if last else []
                last = now

    def p99(self) -> float:
        """The gap that one in a hundred exceeds."""
        return sorted(self.gaps)[int(0.99 * (len(self.gaps) - 1))]


@pytest.mark.long
def test_no_attack_holds_up_the_streams_of_others(tmp_path: Path) -> None:
    """Attacks come without a pause while a stream runs; the bar is a p99 of 1.1 times the quiet one."""
    bodies = [body_of(a) for a in CALL_ATTACKS.values() if not a.trusted]
    with scripted(tmp_path, delay=0.01) as running:
        for body in bodies:  # what is made at first use is made
            running.http.post(CHAT, content=body, headers=JSON)
        found = {}
        for quiet in (True, False, True, False):
            victim = Victim(running.url)
            victim.start()
            while victim.is_alive() and not quiet:
                for body in bodies:
                    status = running.http.post(CHAT, content=body, headers=JSON).status_code
                    assert status in (200, 400, 413), json.loads(body)
            victim.join()
            found[quiet] = [*found.get(quiet, []), (victim.p99(), max(victim.gaps))]
        print(f"\nquiet: p99, longest of two streams {found[True]} s; attacked: {found[False]} s")
        assert min(p for p, _ in found[False]) < 5 * 1.1 * max(p for p, _ in found[True])
        assert "Traceback" not in running.text()
