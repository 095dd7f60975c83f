"""A token of a stream: its bytes are those of its model, and what it costs the API process does not grow unseen."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.scripted_app import ScriptedApp, scripted_app
from tests.fakes.text_checkpoint import write_text_checkpoint
from tests.host.instruction_counts import instructions
from tests.streams.recorded_connection import WiredClient, WiredEngine, score, settled, wired
from tests.streams.test_same_events import KINDS
from trencadis.core.request import Delta
from trencadis.server.protocol.chat_completions import ChatChunk, ChunkChoice, DeltaMessage
from trencadis.server.routes.sse import SseEventTemplate, encode, encode_event, make_text_mark


def chunk(index: int, text: str) -> bytes:
    choice = ChunkChoice(index=index, delta=DeltaMessage(content=text), logprobs=None, finish_reason=None)
    name = 'a "model" of 100 % that says content'
    return encode_event(ChatChunk(id="c", object="chat.completion.chunk", created=1, model=name, choices=[choice]))


@given(st.lists(st.tuples(st.integers(0, 2), st.text(st.characters(exclude_categories=["Cs"])))))
@settings(max_examples=40, deadline=None)
def test_a_text_between_cut_ends_is_the_event_of_its_model(said: list[tuple[int, str]]) -> None:
    hole = make_text_mark()
    templates = [SseEventTemplate(chunk(index, hole), [encode(hole)]) for index in range(3)]
    for index, text in [*said, (0, "".join(map(chr, range(0x300))))]:
        assert templates[index].fill(encode(text)) == chunk(index, text)


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> ScriptedApp:
    made = scripted_app(write_text_checkpoint(tmp_path_factory.mktemp("checkpoint")))
    made.app()
    return made


def streamed(harness: ScriptedApp, path: str, body: dict[str, Any]) -> list[bytes]:
    """The chunks of one answer; the application is called without a client's library."""
    said: list[bytes] = []

    async def run() -> None:
        requested, never = [json.dumps({"model": "m", "stream": True, **body}).encode()], asyncio.Event()

        async def receive() -> dict[str, Any]:
            if not requested:
                await never.wait()
            return {"type": "http.request", "body": requested.pop(), "more_body": False}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body":
                said.append(message["body"])

        headers = [(b"content-type", b"application/json"), (b"host", b"test")]
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
            "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "", "headers": headers,
            "client": ("127.0.0.1", 1), "server": ("test", 80),
        }  # fmt: skip
        assert harness.made is not None
        await harness.made(scope, receive, send)

    asyncio.run(run())
    return said


CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
ASKED: dict[str, dict[str, Any]] = {CHAT: {"messages": [{"role": "user", "content": "Hi"}]}, PLAIN: {"prompt": "Hi"}}


@pytest.mark.parametrize("path", ASKED)
def test_streams_say_the_same_from_bytes_as_from_models(harness: ScriptedApp, path: str) -> None:
    """``continuous_usage_stats`` needs a model for each event; without its usage it must be the same stream."""
    options = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}

    def events(**more: Any) -> list[dict[str, Any]]:
        found = [part for part in b"".join(streamed(harness, path, ASKED[path] | more)).split(b"\n\n") if part]
        assert found.pop() == b"data: [DONE]"
        return [json.loads(part[6:]) for part in found]

    quick, slow = events(max_tokens=9, n=2, ignore_eos=True), events(max_tokens=9, n=2, ignore_eos=True, **options)
    assert len(quick) > 15 and slow.pop()["choices"] == []
    for a, b in zip(quick, slow, strict=True):
        b.pop("usage")
        assert {**a, "id": "", "created": 0} == {**b, "id": "", "created": 0} and list(a) == list(b)


@pytest.mark.parametrize(("path", "most"), [(CHAT, 1300), (PLAIN, 1300)])
def test_a_streamed_token_costs_few_instructions(harness: ScriptedApp, path: str, most: int) -> None:
    """From the engine's delta to the bytes that are sent; the scripted engine and the event loop take 350 of them."""

    def cost(tokens: int) -> int:
        body = ASKED[path] | {"max_tokens": tokens, "ignore_eos": True}
        return instructions(lambda: streamed(harness, path, body))

    cost(5)
    token = (cost(260) - cost(60)) / 200
    print(f"{path}: {token:.0f} instructions a token")
    assert token < most


MOST = {
    "chat": 450, "running usage": 580, "stop string": 760, "logprobs": 880, "tools": 1200, "completions": 530,
    "completions with all": 1000, "responses": 1150, "messages": 1330,
}  # fmt: skip
"""Instructions of Python that a token of a stream may take in the API process, from its delta to its bytes."""


@pytest.mark.parametrize("kind", MOST)
def test_a_token_that_is_written_at_once_costs_few_instructions(harness: ScriptedApp, kind: str) -> None:
    path, body = KINDS[kind]
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    body = {name: value for name, value in body.items() if name != "n"} | {limit: 900}
    engine, tokens = WiredEngine(), harness.tokenizer.encode("so it is, and we have done things. ")

    async def run() -> float:
        client = WiredClient(wired(harness, engine, tool_call_parser="hermes", served_model_name=["m"]))
        client.ask(path, body)
        await settled(40)
        ((request, _),) = engine.submitted

        def deltas(count: int) -> list[Delta]:
            top, some = request.params.logprobs, [tokens[i % len(tokens)] for i in range(count)]
            scores = [None if top is None else [score(token, top)] for token in some]
            return [Delta(request.id, 0, [t], s) for t, s in zip(some, scores, strict=True)]

        await engine.link.deliver_all(deltas(20))
        await settled()
        before, made = len(client.transport.written), deltas(100)
        count = instructions(lambda: [engine.link.deliver(delta) for delta in made])
        # Parsers hold back blanks, which may stand before a call.
        assert len(client.transport.written) >= before + 80, "they are written at once"
        client.leave()
        await settled()
        return count / len(made)

    token = asyncio.run(run())
    print(f"{kind}: {token:.0f} instructions a token")
    assert token < MOST[kind]
