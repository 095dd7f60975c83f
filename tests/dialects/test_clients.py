"""The official openai and anthropic clients against a real server: whole, streamed, sync, async, typed helpers."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from pydantic import BaseModel

from tests.calls.conftest import templated_app
from tests.dialects.dialect_answers import SCRIPTS
from tests.fakes.scripted_app import ScriptedApp
from tests.fakes.text_checkpoint import TEMPLATE
from tests.traffic.live_app import live
from trencadis.server.protocol.base_request import GenerateRequest

SCRIPT = SCRIPTS["all"]
CALLS = [("f", {"a": 1}), ("g", {})]
DEADLINE = 10.0
"""Seconds until the server must have noticed something."""


@pytest.fixture(scope="module")
def harness(tagged: Path) -> ScriptedApp:
    return templated_app(tagged, SCRIPT.template, SCRIPT.answer, api_key=["k"])


@pytest.fixture(scope="module")
def url(harness: ScriptedApp) -> Iterator[str]:
    with live(harness) as found:
        yield found


@pytest.fixture
def open_ai(url: str, harness: ScriptedApp) -> Iterator[openai.OpenAI]:
    harness.engine.break_at, harness.engine.delay = None, 0.0
    with openai.OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as client:
        yield client


@pytest.fixture
def claude(url: str, harness: ScriptedApp) -> Iterator[anthropic.Anthropic]:
    harness.engine.break_at, harness.engine.delay = None, 0.0
    with anthropic.Anthropic(base_url=url, api_key="k", max_retries=0) as client:
        yield client


def strict(value: Any) -> None:
    """Holds what a client built without validation against its published type."""
    type(value).model_validate(value.to_dict(), strict=True)


def check_response(made: Any) -> None:
    strict(made)
    assert [item.type for item in made.output] == ["reasoning", "message", "function_call", "function_call", "message"]
    assert made.output_text == "One.\nTwo." and made.status == "completed" and made.error is None
    assert [(c.name, json.loads(c.arguments)) for c in made.output if c.type == "function_call"] == CALLS
    assert made.output[0].content[0].text == "Hm."


def check_message(made: Any) -> None:
    strict(made)
    assert [b.type for b in made.content] == ["thinking", "text", "tool_use", "tool_use", "text"]
    assert [(b.name, b.input) for b in made.content if b.type == "tool_use"] == CALLS
    assert made.id.startswith("msg_") and made.stop_reason == "tool_use" and made.content[0].thinking == "Hm."


def test_openai(open_ai: openai.OpenAI) -> None:
    body: Any = SCRIPT.responses(instructions="Be brief.", metadata={"a": "b"}, tool_choice="auto", store=False)
    made = open_ai.responses.create(**body)
    check_response(made)
    assert (made.instructions, made.metadata, made.max_output_tokens) == ("Be brief.", {"a": "b"}, 200)
    kinds = [event.type for event in open_ai.responses.create(**body, stream=True)]
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed"
    check_response(open_ai.responses.parse(**body))
    with open_ai.responses.stream(**body) as stream:
        snapshots = [e.snapshot for e in stream if e.type == "response.function_call_arguments.delta"]
        check_response(stream.get_final_response())
    assert snapshots[-1] == "{}" and '{"a":  1}' in snapshots
    counted = open_ai.responses.input_tokens.count(model="m", input="Hi", instructions="Be brief.", tools=body["tools"])
    strict(counted)
    assert made.usage is not None and counted.input_tokens == made.usage.input_tokens


def test_async_openai(url: str, open_ai: openai.OpenAI) -> None:
    async def run() -> None:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as client:
            body: Any = SCRIPT.responses()
            check_response(await client.responses.create(**body))
            events = [event async for event in await client.responses.create(**body, stream=True)]
            assert [event.sequence_number for event in events] == list(range(len(events)))
            async with client.responses.stream(**body) as stream:
                check_response(await stream.get_final_response())
            check_response(await client.responses.parse(**body))

    asyncio.run(run())


def test_an_answer_goes_back_as_openai_gave_it(open_ai: openai.OpenAI, harness: ScriptedApp) -> None:
    tools: Any = SCRIPT.responses()["tools"]
    first = open_ai.responses.create(model="m", input="Hi", tools=tools)
    results = [
        {"type": "function_call_output", "call_id": c.call_id, "output": "5"}
        for c in first.output if c.type == "function_call"
    ]  # fmt: skip
    conversation: Any = [{"role": "user", "content": "Hi"}, *first.output, *results]
    open_ai.responses.create(model="m", input=conversation, tools=tools)
    check_turn(harness, [c.call_id for c in first.output if c.type == "function_call"])


def check_turn(harness: ScriptedApp, ids: list[str]) -> None:
    """The prompt is the one that chat makes of the same conversation."""
    tokens = harness.engine.submitted[-1][0].tokens
    functions = [{"name": name, "arguments": json.dumps(given)} for name, given in CALLS]
    calls = [{"id": id, "type": "function", "function": f} for id, f in zip(ids, functions, strict=True)]
    conversation = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "One.\nTwo.", "reasoning": "Hm.", "tool_calls": calls},
        *({"role": "tool", "tool_call_id": id, "content": "5"} for id in ids),
    ]
    tools = [{"type": "function", "function": {"name": t["name"], "parameters": t["parameters"]}}
             for t in SCRIPT.responses()["tools"]]  # fmt: skip
    headers = {"authorization": "Bearer k"}
    assert (
        harness.call("/v1/chat/completions", {"messages": conversation, "tools": tools}, headers=headers).status_code
        == 200
    )
    assert harness.tokenizer.decode(harness.engine.submitted[-1][0].tokens) == harness.tokenizer.decode(tokens)


class Parsed(BaseModel):
    """What an answer must be."""

    a: int


@pytest.mark.skipif("structured_outputs" not in GenerateRequest.model_fields, reason="needs structured outputs")
def test_typed_parsing(tagged: Path) -> None:
    with live(templated_app(tagged, TEMPLATE, '{"a": 5}')) as url:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as open_ai:
            parsed = open_ai.responses.parse(model="m", input="Hi", text_format=Parsed)
            assert parsed.output_parsed == Parsed(a=5)
            with open_ai.responses.stream(model="m", input="Hi", text_format=Parsed) as stream:
                assert stream.get_final_response().output_parsed == Parsed(a=5)
        with anthropic.Anthropic(base_url=url, api_key="k", max_retries=0) as claude:
            conversation: Any = [{"role": "user", "content": "Hi"}]
            message = claude.messages.parse(model="m", max_tokens=50, messages=conversation, output_format=Parsed)
            assert message.parsed_output == Parsed(a=5)


def test_what_openai_keeps_is_not_found(open_ai: openai.OpenAI) -> None:
    kept = open_ai.responses
    for call in (kept.retrieve, kept.delete, kept.cancel, kept.input_items.list):
        with pytest.raises(openai.NotFoundError, match="stateless"):
            call("resp_1")
    with pytest.raises(openai.NotFoundError, match="compact"):
        kept.compact(model="m", input="Hi")
    for fields in ({"previous_response_id": "resp_1"}, {"background": True}, {"conversation": "c"}):
        more: Any = fields
        with pytest.raises(openai.BadRequestError) as caught:
            kept.create(model="m", input="Hi", **more)
        assert caught.value.param == next(iter(fields))


def test_anthropic(claude: anthropic.Anthropic) -> None:
    body: Any = SCRIPT.messages(system="Be brief.", thinking={"type": "enabled", "budget_tokens": 1024})
    made = claude.messages.create(**body)
    check_message(made)
    assert made._request_id
    kinds = [event.type for event in claude.messages.create(**body, stream=True)]
    assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])
    with claude.messages.stream(**body) as stream:
        texts = list(stream.text_stream)
        final = stream.get_final_message()
    check_message(final)
    assert "".join(texts) == "One.\nTwo." and final.usage == made.usage
    count = claude.messages.count_tokens(model="m", messages=body["messages"], system="Be brief.", tools=body["tools"])
    strict(count)
    assert count.input_tokens == made.usage.input_tokens + (made.usage.cache_read_input_tokens or 0)
    beta: Any = claude.beta.messages.create(**body, betas=["made-up-2030-01-01"], context_management={"edits": []})
    assert beta.content[1].text == "One."


def test_async_anthropic(url: str, claude: anthropic.Anthropic) -> None:
    async def run() -> None:
        async with anthropic.AsyncAnthropic(base_url=url, auth_token="k", max_retries=0) as client:
            body: Any = SCRIPT.messages()
            check_message(await client.messages.create(**body))
            kinds = [event.type async for event in await client.messages.create(**body, stream=True)]
            assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 5
            async with client.messages.stream(**body) as stream:
                check_message(await stream.get_final_message())

    asyncio.run(run())


def test_an_answer_goes_back_as_anthropic_gave_it(claude: anthropic.Anthropic, harness: ScriptedApp) -> None:
    body: Any = SCRIPT.messages()
    first = claude.messages.create(**body)
    ids = [b.id for b in first.content if b.type == "tool_use"]
    results: Any = [{"type": "tool_result", "tool_use_id": id, "content": "5"} for id in ids]
    conversation = [
        *body["messages"],
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": results},
    ]
    claude.messages.create(**{**body, "messages": conversation})
    check_turn(harness, ids)


def test_errors_are_the_clients_own(
    url: str, open_ai: openai.OpenAI, claude: anthropic.Anthropic, harness: Any
) -> None:
    message: Any = SCRIPT.messages()
    with pytest.raises(anthropic.AuthenticationError):
        anthropic.Anthropic(base_url=url, api_key="wrong", max_retries=0).messages.create(**message)
    with pytest.raises(anthropic.NotFoundError, match="does not exist"):
        claude.messages.create(**{**message, "model": "nope"})
    with pytest.raises(anthropic.BadRequestError, match="web_search") as caught:
        claude.messages.create(**{**message, "tools": [{"type": "web_search_20250305", "name": "web_search"}]})
    assert caught.value.type == "invalid_request_error" and caught.value.request_id
    harness.engine.break_at = 3
    with pytest.raises(anthropic.APIStatusError, match="Internal server error"):
        list(claude.messages.create(**message, stream=True))
    with pytest.raises(anthropic.InternalServerError):
        claude.messages.create(**message)
    with open_ai.responses.stream(**SCRIPT.responses()) as stream:
        failed = list(stream)[-1]
    assert failed.type == "response.failed" and failed.response.error is not None
    assert failed.response.error.code == "server_error"
    harness.engine.break_at = None
    harness.engine.accepting = False
    try:
        with pytest.raises(anthropic.APIStatusError) as overloaded:
            claude.messages.create(**message)
        with pytest.raises(openai.InternalServerError):
            open_ai.responses.create(model="m", input="Hi")
    finally:
        harness.engine.accepting = True
    assert (overloaded.value.status_code, overloaded.value.type) == (529, "overloaded_error")


def test_a_client_that_leaves_aborts_the_request(
    open_ai: openai.OpenAI, claude: anthropic.Anthropic, harness: ScriptedApp
) -> None:
    harness.engine.delay = 0.05
    begin: Any = (
        lambda: open_ai.responses.create(**SCRIPT.responses(), stream=True),
        lambda: claude.messages.create(**SCRIPT.messages(), stream=True),
    )
    for begun in begin:
        harness.engine.aborted.clear()
        stream = begun()
        next(iter(stream))
        stream.close()
        end = time.monotonic() + DEADLINE
        while not harness.engine.aborted and time.monotonic() < end:
            time.sleep(0.01)
        assert harness.engine.aborted == [(harness.engine.submitted[-1][0].id, -1)]
