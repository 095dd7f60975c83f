"""What a stream does that is written past the app's layers: slow readers, clients and engines that go, mistakes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.scripted_app import ScriptedApp, scripted_app
from tests.fakes.text_checkpoint import write_text_checkpoint
from tests.streams.recorded_connection import HIGH, WiredClient, WiredEngine, score, settled, wired
from trencadis.core.errors import QueueFull
from trencadis.core.request import Delta, Request
from trencadis.server.engine import engine_client_and_request_timing, engine_process_link
from trencadis.server.engine.engine_process_link import RequestLink

CHAT = "/v1/chat/completions"
TALK: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 900}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
def harness(checkpoint: Path) -> ScriptedApp:
    return scripted_app(checkpoint)


class Streams:
    """Some clients that stream."""

    def __init__(self, harness: ScriptedApp, count: int = 1, version: str = "1.1", **body: Any) -> None:
        flags = body.pop("flags", {})
        self.rig, self.engine, self.version, self.asked = harness, WiredEngine(), version, TALK | body
        self.web = wired(harness, self.engine, **flags)
        self.clients = [WiredClient(self.web) for _ in range(count)]

    async def begin(self) -> None:
        for client in self.clients:
            client.ask(CHAT, self.asked, self.version)
        await settled(40 + 10 * len(self.clients))
        assert len(self.engine.submitted) == len(self.clients)

    async def say(self, text: str, finish: str | None = None) -> None:
        """A step that says a text, of one token or several."""
        await self.step(self.rig.tokenizer.encode(text), finish)

    async def step(self, tokens: list[int], finish: str | None = None) -> None:
        """A step that gives tokens to each choice of each client."""
        await self.engine.step(lambda request, choice: Delta(request.id, choice, [*tokens], finish=finish))

    def heard(self, client: int = 0) -> str:
        """The text that a client has got."""
        chunks = [e for e in self.clients[client].events if isinstance(e, dict) and e.get("choices")]
        return "".join(e["choices"][0]["delta"].get("content") or "" for e in chunks)


def run(body: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(body(), 300))


def test_a_token_is_written_before_the_loop_turns(harness: ScriptedApp) -> None:
    async def body() -> None:
        streams = Streams(harness)
        await streams.begin()
        await streams.say("one")
        await streams.say(" two")
        before = len(streams.clients[0].transport.written)
        (request, _), tokens = streams.engine.submitted[0], harness.tokenizer.encode(" x")
        streams.engine.link.deliver(Delta(request.id, 0, tokens))
        assert len(streams.clients[0].transport.written) == before + 1
        await streams.say(" end", "length")
        assert streams.heard() == "one two x end" and streams.clients[0].events[-1] == "[DONE]"

    run(body)


def test_a_slow_reader_is_bounded_and_loses_nothing(harness: ScriptedApp) -> None:
    async def body() -> None:
        streams = Streams(harness, 2)
        await streams.begin()
        await streams.say("a")
        slow, said = streams.clients[0].transport, "a"
        slow.full = True
        for i in range(3 * HIGH // 200):
            said += f" {i}"
            await streams.say(f" {i}")
        assert HIGH < slow.waits < HIGH + 1000, "no more waits in the socket than its bound and one event"
        assert streams.heard(1) == said, "the other client waits for nobody"
        slow.read_all()
        await settled(len(said))
        assert streams.heard() == said
        await streams.say(" and on")
        await streams.say(" end", "length")
        assert streams.heard() == said + " and on end" and streams.clients[0].events[-1] == "[DONE]"

    run(body)


@pytest.mark.parametrize(
    ("body", "most"),
    [
        ({"logprobs": True, "top_logprobs": 20}, 64 << 10), ({}, 64 << 10), ({"n": 4}, 256 << 10),
        ({"return_token_ids": True}, 64 << 10),
    ],
)  # fmt: skip
def test_a_stream_that_nothing_reads_ends_at_the_bound_of_answers(
    harness: ScriptedApp, body: dict[str, Any], most: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Its tokens would fill the memory of the server; those of a client that reads stay whole."""

    async def run_all() -> None:
        streams = Streams(harness, 2, **body, flags={"max_answer_bytes": most})
        await streams.begin()
        await streams.say("a")
        slow, backlog = streams.clients[0].transport, engine_client_and_request_timing.BACKLOG
        slow.full, steps = True, 0

        def make(request: Request, choice: int) -> Delta:
            return Delta(request.id, choice, [300], [score(300, 20)] if "logprobs" in body else None)

        for _ in range(3000):
            await streams.engine.step(make)
            assert backlog.held <= most + (4 << 10)
            if streams.engine.aborted_ids:
                break
            steps += 1
        lost = streams.engine.submitted[0][0].id
        assert streams.engine.aborted_ids == [(lost, -1)] and backlog.held == 0 and 20 < steps < 2990
        await streams.say(" end", "length")
        assert streams.heard(1).count("end") >= 1 and not streams.engine.link.requests
        slow.read_all()
        await settled(60)
        error, done = streams.clients[0].events[-2:]
        assert error["error"]["code"] == 429 and "read too slowly" in error["error"]["message"] and done == "[DONE]"

    try:
        run(run_all)
    finally:
        engine_client_and_request_timing.BACKLOG.most = 64 << 20
    assert [r.levelname for r in caplog.records if "too slowly" in r.getMessage()] == ["WARNING"]


def test_streams_that_wait_share_the_bytes_of_large_answers() -> None:
    async def body() -> None:
        backlog = engine_client_and_request_timing.Backlog(1 << 20, 1 << 20, lambda: 256 << 10)
        first, second, small = (engine_process_link.OpenRequest([], 1, backlog) for _ in range(3))
        small.deliver(Delta("c", 0, [5]))
        assert backlog.held == 0, "what all readers have waiting is not counted"
        while backlog.held < 600 << 10:
            assert first.deliver(Delta("a", 0, [5], [score(5, 20)]))
        while second.deliver(Delta("b", 0, [5], [score(5, 20)])):
            assert backlog.held <= 768 << 10
        with pytest.raises(QueueFull, match="read too slowly"):
            await second.next_delta()
        assert small.deliver(Delta("c", 0, [5])), "only what waits is ended"
        held = backlog.held
        await first.next_delta()
        assert backlog.held < held
        first.drop()
        assert backlog.held == 0

    run(body)


def test_a_client_that_goes_aborts_its_request_and_no_other(harness: ScriptedApp) -> None:
    async def body() -> None:
        streams = Streams(harness, 3, n=2)
        await streams.begin()
        await streams.say("a")
        await streams.say("b")
        gone = streams.engine.submitted[1][0].id
        written = len(streams.clients[1].transport.written)
        streams.clients[1].leave()
        # Deltas of this step meet a connection that is closing, and one whose loss nobody has told yet.
        streams.engine.link.deliver(Delta(gone, 0, [300]))
        await streams.say("c")
        assert streams.engine.aborted_ids == [(gone, -1)]
        assert len(streams.clients[1].transport.written) == written
        await streams.say("d", "length")
        assert streams.heard(0) == streams.heard(2) == "aabbccdd"
        assert not streams.engine.link.requests

    run(body)


def test_many_that_go_in_one_step_are_all_aborted(harness: ScriptedApp) -> None:
    async def body() -> None:
        streams = Streams(harness, 24)
        await streams.begin()
        await streams.say("a")
        for client in streams.clients:
            client.leave()
        await streams.say("b")
        await settled(200)
        ids = {request.id for request, _ in streams.engine.submitted}
        assert {id for id, _ in streams.engine.aborted_ids} == ids and len(streams.engine.aborted_ids) == 24

    run(body)


def test_a_stop_string_across_tokens_ends_its_choice_and_is_not_said(harness: ScriptedApp) -> None:
    async def body() -> None:
        streams = Streams(harness, stop=["END OF"], n=2)
        await streams.begin()
        id = streams.engine.submitted[0][0].id
        await streams.say("go E")
        for choice, text in [(0, "N"), (0, "D"), (1, "X"), (0, " O"), (0, "F it"), (0, " more")]:
            streams.engine.link.deliver(Delta(id, choice, harness.tokenizer.encode(text)))
        await settled()
        assert (id, 0) in streams.engine.aborted_ids and (id, 1) not in streams.engine.aborted_ids
        events = streams.clients[0].events
        own = [[e["choices"][0] for e in events if e["choices"][0]["index"] == choice] for choice in (0, 1)]
        text, other = ("".join(c["delta"].get("content") or "" for c in one) for one in own)
        assert text == "go " and other == "go EX"
        assert own[0][-1]["finish_reason"] == "stop" and own[0][-1]["stop_reason"] == "END OF"
        await streams.say(" end", "length")
        assert streams.clients[0].events[-1] == "[DONE]" and not streams.engine.link.requests

    run(body)


def test_the_last_choice_may_end_by_a_stop_string(harness: ScriptedApp) -> None:
    async def body() -> None:
        streams = Streams(harness, stop="STOP", stream_options={"include_usage": True})
        await streams.begin()
        for text in ("a", " b", " STOP", " c"):
            await streams.say(text)
        events = streams.clients[0].events
        assert streams.heard() == "a b " and events[-1] == "[DONE]" and events[-2]["usage"]["completion_tokens"] > 2
        assert not streams.engine.link.requests

    run(body)


def test_a_character_over_several_tokens_comes_whole(harness: ScriptedApp) -> None:
    async def body() -> None:
        streams = Streams(harness)
        await streams.begin()
        await streams.say("a")
        tokens = harness.tokenizer.encode("👩‍👧")
        assert len(tokens) > 4
        for token in tokens:
            await streams.step([token])
            assert "\ufffd" not in streams.heard()
        await streams.say("b", "length")
        assert streams.heard() == "a👩‍👧b"

    run(body)


def test_an_engine_that_dies_ends_the_stream_with_an_error(harness: ScriptedApp) -> None:
    async def body() -> None:
        streams = Streams(harness, 2)
        await streams.begin()
        await streams.say("a")
        await streams.say("b")
        streams.engine.link.fail_all()
        await settled(40)
        for client in streams.clients:
            *_, error, done = client.events
            assert error["error"]["code"] == 503 and done == "[DONE]"
            assert client.raw.endswith(b"0\r\n\r\n")

    run(body)


def test_a_mistake_in_one_stream_ends_no_other(
    harness: ScriptedApp, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def body() -> None:
        streams = Streams(harness, 2)
        await streams.begin()
        await streams.say("a")
        wrong: Any = ["no id"]
        first, second = (request.id for request, _ in streams.engine.submitted)
        await streams.engine.link.deliver_all([Delta(first, 0, wrong), Delta(second, 0, [300])])
        await settled(40)
        error, done = streams.clients[0].events[-2:]
        assert error["error"]["code"] == 500 and done == "[DONE]"
        assert (first, -1) in streams.engine.aborted_ids and second in streams.engine.link.requests
        await streams.say("c", "length")
        assert streams.clients[1].events[-1] == "[DONE]"

    with caplog.at_level(logging.CRITICAL, "trencadis.server"):
        run(body)


def test_a_client_of_http_1_0_gets_no_chunks(harness: ScriptedApp) -> None:
    async def body() -> None:
        streams = Streams(harness, version="1.0")
        await streams.begin()
        for text in ("a", "b", "c"):
            await streams.say(text)
        await streams.say("d", "length")
        head, _, rest = streams.clients[0].raw.partition(b"\r\n\r\n")
        assert b"chunked" not in head.lower() and rest.startswith(b"data: ") and rest.endswith(b"data: [DONE]\n\n")
        assert rest.count(b"\n\n") == 6

    run(body)


def test_a_stream_whose_time_is_up_ends_while_tokens_come(harness: ScriptedApp) -> None:
    async def body() -> None:
        streams = Streams(harness, flags={"request_timeout": 0.3})
        await streams.begin()
        for _ in range(200):
            await streams.say("a")
            await asyncio.sleep(0.005)
            if streams.clients[0].events[-1] == "[DONE]":
                break
        error = streams.clients[0].events[-2]
        assert error["error"]["code"] == 504 and len(streams.engine.aborted_ids) == 1

    run(body)


def test_bytes_are_counted_and_silence_is_not_filled_while_tokens_come(harness: ScriptedApp) -> None:
    async def body() -> None:
        streams = Streams(harness, flags={"sse_keep_alive_interval": 0.2})
        await streams.begin()
        for _ in range(60):
            await streams.say("a")
            await asyncio.sleep(0.01)
        assert b"keep-alive" not in streams.clients[0].body
        await asyncio.sleep(0.5)
        assert b"keep-alive" in streams.clients[0].body
        await streams.say("b", "length")
        sent = len(streams.clients[0].body)
        assert harness.made is not None
        text = harness.made.state.trencadis.metrics.format_text().decode()
        name = "http_response_size_bytes_sum"
        (found,) = [line for line in text.splitlines() if line.startswith(name) and CHAT in line]
        assert float(found.split()[-1]) == sent

    run(body)


@pytest.mark.parametrize(("seconds", "turn"), [(0.0, 20.0), (0.0002, engine_process_link.DELIVERY_SLICE)])
def test_other_work_has_its_turn_within_a_step_of_deltas_that_take_long(
    seconds: float, turn: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A delta that is written at once takes its time; the front, which only sorts deltas, sends a step in one frame."""
    monkeypatch.setattr(engine_process_link, "DELIVERY_SLICE", turn)
    turns: list[int] = []

    class Counting(RequestLink):
        """Notes how many deltas came before each turn of another task."""

        given = 0

        def deliver(self, delta: Delta) -> None:
            self.given += 1
            if seconds:
                time.sleep(seconds)

    async def body() -> None:
        link = Counting()

        async def other() -> None:
            while link.given < 320:
                turns.append(link.given)
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        await asyncio.sleep(0)
        await link.deliver_all([Delta("r")] * 320)
        await task

    run(body)
    most = max(b - a for a, b in pairwise([*turns, 320]))
    assert most == 320 if not seconds else most <= 2 * engine_process_link.CLOCK_INTERVAL
