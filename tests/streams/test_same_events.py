"""Events are the same, whether a callback writes them to the connection or a task through the app's layers, and whether
a template is filled in or a model is written."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.scripted_app import ScriptedApp, scripted_app
from tests.fakes.text_checkpoint import write_text_checkpoint
from tests.streams.recorded_connection import WiredClient, WiredEngine, score, settled, wired
from trencadis.core.request import Delta, Request, RequestStats
from trencadis.server.http.h11_connection import ChunkWriter
from trencadis.server.routes import anthropic_conversion
from trencadis.server.routes.chat_stream import ChatStream
from trencadis.server.routes.responses_conversion import ResponseWriter
from trencadis.server.routes.serving_completion import CompletionStream
from trencadis.server.routes.sse import encode_event

CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
TALK: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
USAGE = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
TOOLS = {"tools": [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "K\u00f6ln", "days": [1, 2, 3]}}\n</tool_call>'
SAID = 'A "quoted" 100 % family 👩‍👩‍👧, 日本語,\n\ttabs and \\ and \x7f; then STOP and more of it.'
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, TALK),
    "choices": (CHAT, TALK | {"n": 3}),
    "usage": (CHAT, TALK | {"stream_options": {"include_usage": True}}),
    "running usage": (CHAT, TALK | USAGE | {"n": 2}),
    "stop string": (CHAT, TALK | {"stop": ["STOP"], "n": 2}),
    "interval": (CHAT, TALK | {"stream_interval": 3, "n": 2}),
    "logprobs": (CHAT, TALK | USAGE | {"logprobs": True, "top_logprobs": 2}),
    "ids": (CHAT, TALK | {"logprobs": True, "return_token_ids": True, "return_tokens_as_token_ids": True}),
    "tools": (CHAT, TALK | TOOLS | {"n": 2}),
    "tools with usage": (CHAT, TALK | TOOLS | USAGE | {"logprobs": True}),
    "completions": (PLAIN, {"prompt": "Hi"}),
    "echo": (PLAIN, {"prompt": "Hi", "echo": True, "n": 2, "stop": "STOP"}),
    "completions with all": (PLAIN, {"prompt": "Hi", "logprobs": 2, "return_token_ids": True, "n": 2} | USAGE),
    "several prompts": (PLAIN, {"prompt": ["Hi", "Ho"], "n": 2}),
    "responses": ("/v1/responses", {"input": "Hi"} | {"include": ["message.output_text.logprobs"], "top_logprobs": 1}),
    "responses with tools": ("/v1/responses", {"input": "Hi", "tools": [{"type": "function", "name": "weather"}]}),
    "messages": ("/v1/messages", TALK | {"tools": [{"name": "weather", "input_schema": {"type": "object"}}]}),
}
IDS = re.compile(r'"(id|item_id|call_id)":"[^"]*"|"(created|created_at|completed_at)":\d+')


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_checkpoint(tmp_path_factory.mktemp("checkpoint"))


def streamed(harness: ScriptedApp, kind: str, straight: bool, sizes: Callable[[], int] = lambda: 1) -> str:
    """The body of an answer that thinks, speaks and calls; ``sizes``: how many tokens the next step has."""
    path, body = KINDS[kind]
    tokens = harness.tokenizer.encode(f"<think>Well: 🤔 it\u2019s so.</think>{SAID}{CALL}")
    limit = {"max_output_tokens" if path == "/v1/responses" else "max_tokens": len(tokens)}
    engine = WiredEngine(straight)

    async def run() -> bytes:
        client = WiredClient(wired(harness, engine, tool_call_parser="hermes", reasoning_parser="qwen3"))
        client.ask(path, body | limit)
        await settled(40)
        at = 0
        while at < len(tokens):
            part = tokens[at : at + sizes()]
            at += len(part)

            def made(request: Request, choice: int, part: list[int] = part, last: bool = at == len(tokens)) -> Delta:
                top = request.params.logprobs
                return Delta(
                    request.id, choice, [*part], None if top is None else [score(token, top) for token in part],
                    finish="length" if last else None, cached_tokens=2, stats=RequestStats() if last else None,
                )  # fmt: skip

            await engine.step(made)
        await settled(40)
        return client.body

    return asyncio.run(run()).decode()


def alike(said: str) -> list[Any]:
    """Its lines without what is new in each answer, objects with their order; a number may be written in two ways."""
    lines = IDS.sub('"new":0', said).split("\n")
    return [json.loads(line[6:], object_pairs_hook=list) if line.startswith("data: {") else line for line in lines]


@pytest.mark.parametrize("kind", KINDS)
def test_a_callback_and_a_task_write_the_same(checkpoint: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[bytes] = []
    plain = ChunkWriter.write

    def write(self: ChunkWriter, data: bytes) -> None:
        written.append(data)
        plain(self, data)

    monkeypatch.setattr(ChunkWriter, "write", write)
    by_task = streamed(scripted_app(checkpoint), kind, straight=False)
    assert not written and by_task.count("\n\n") > 10
    by_callback = streamed(scripted_app(checkpoint), kind, straight=True)
    assert bool(written) == (kind != "several prompts"), "the pieces of several prompts come from tasks"
    ours, reference = alike(by_callback), alike(by_task)
    if kind == "several prompts":
        ours, reference = sorted(map(repr, ours)), sorted(map(repr, reference))
    assert ours == reference


@pytest.mark.parametrize("kind", KINDS)
def test_a_template_and_a_model_say_the_same(checkpoint: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    filled = streamed(scripted_app(checkpoint), kind, straight=True)
    monkeypatch.setattr(
        ChatStream, "_fill_template", lambda self, index, segment, text, piece: self._make_event(index, piece)
    )

    def modelled(self: Any, index: int, piece: Any, builder: Any) -> bytes:
        return encode_event(self._answer.make_response([self._make_choice(index, "", piece, builder)], self._always))

    monkeypatch.setattr(CompletionStream, "_fill_template", modelled)
    monkeypatch.setattr(
        anthropic_conversion.MessageWriter,
        "_write_block_delta",
        lambda self, change: anthropic_conversion._make_block_delta(change),
    )
    monkeypatch.setattr(ResponseWriter, "_write_delta", ResponseWriter._write_delta_event)
    assert alike(streamed(scripted_app(checkpoint), kind, straight=True)) == alike(filled)


NEW = {"id", "item_id", "call_id", "created", "created_at", "completed_at", "sequence_number", "obfuscation"}
"""Keys of values that are new in each answer or count its events."""
ADDED = {"content", "reasoning", "reasoning_content", "arguments", "text", "delta", "thinking", "partial_json"}
"""Keys of texts that events add to those before them."""


def without_new(value: Any) -> Any:
    """A value without ``NEW`` keys at any depth."""
    if isinstance(value, dict):
        return {key: without_new(part) for key, part in value.items() if key not in NEW}
    return [*map(without_new, value)] if isinstance(value, list) else value


def sums(said: str) -> dict[Any, Any]:
    """What the events of a stream add up to: texts joined, lists extended, other values as they change."""
    found: dict[Any, Any] = {}

    def add(where: tuple[Any, ...], value: Any) -> None:
        if isinstance(value, dict):
            for key, part in value.items():
                if key not in NEW:
                    add((*where, key), part)
        elif isinstance(value, list) and any(isinstance(one, dict) and "index" in one for one in value):
            for one in value:
                add((*where, one["index"]), one)
        elif isinstance(value, list) and where[-1] != "output":
            found.setdefault(where, []).extend(map(without_new, value))
        elif isinstance(value, str) and where[-1] in ADDED:
            found[where] = found.get(where, "") + value
        elif "usage" in where:
            found[where] = value
        elif (value := without_new(value)) is not None and found.setdefault(where, [value])[-1] != value:
            found[where].append(value)

    for line in said.split("\n"):
        if line.startswith("data: {"):
            event = json.loads(line[6:])
            at = [event.get(key) for key in ("type", "output_index", "content_index", "index", "summary_index")]
            add(tuple(at), event)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_steps_of_several_tokens_add_up_to_the_same(checkpoint: Path, kind: str) -> None:
    """Steps that accept drafts: texts, calls, scores, ids, reasons and the last usage are those of single tokens."""
    single = sums(streamed(scripted_app(checkpoint), kind, straight=True))
    assert any(isinstance(value, str) and "日本語" in value for value in single.values())
    for seed, straight in product(range(3), (False, True)):
        draw, most = random.Random(seed).randint, 2 + 4 * seed
        found = sums(streamed(scripted_app(checkpoint), kind, straight, partial(draw, 1, most)))
        assert found == single, [key for key in {*found, *single} if found.get(key) != single.get(key)]
