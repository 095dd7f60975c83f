"""The official openai client against tools and reasoning: sync and async, whole and streamed, typed helpers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel

from tests.calls.test_chat_tools import TOOLS, TWO
from tests.fakes.scripted_app import ScriptedApp
from tests.traffic.tool_templates import THINKING_HERMES

ANSWER = f"I look.\n</think>\n\nFirst.\n{TWO}"
MESSAGES: Any = [{"role": "user", "content": "Weather?"}]
CALLS = [("get_weather", {"city": "Köln", "days": 2}), ("now", {})]


@pytest.fixture
def harness(serve: Any) -> ScriptedApp:
    made: ScriptedApp = serve(THINKING_HERMES, ANSWER)
    return made


@pytest.fixture
def client(harness: ScriptedApp) -> Iterator[openai.OpenAI]:
    """The client over a transport that calls the application."""

    def send(request: httpx.Request) -> httpx.Response:
        response = harness.call(request.url.path, json.loads(request.content))
        return httpx.Response(response.status_code, headers=response.headers, content=response.content)

    with httpx.Client(transport=httpx.MockTransport(send)) as made:
        http: Any = made  # versions of the client name httpx's class differently
        yield openai.OpenAI(base_url="http://test/v1", api_key="k", http_client=http, max_retries=0)


def strict(value: Any) -> None:
    """Holds a value that the client built without validation against its published type."""
    type(value).model_validate(value.to_dict(), strict=True)


def called(message: Any) -> list[tuple[str, Any]]:
    assert all(c.type == "function" and c.id.startswith("call_") for c in message.tool_calls)
    return [(c.function.name, json.loads(c.function.arguments)) for c in message.tool_calls]


def check(answer: ChatCompletion) -> None:
    strict(answer)
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content == "First."
    assert called(choice.message) == CALLS
    assert choice.message.to_dict()["reasoning_content"] == "I look."
    assert answer.usage is not None and answer.usage.completion_tokens_details is not None
    assert 0 < (answer.usage.completion_tokens_details.reasoning_tokens or 0) < answer.usage.completion_tokens // 4


def add(chunks: list[ChatCompletionChunk]) -> None:
    calls: dict[int, list[str]] = {}
    text = thoughts = ""
    for chunk in chunks:
        strict(chunk)
        for choice in chunk.choices:
            text += choice.delta.content or ""
            thoughts += str(choice.delta.to_dict().get("reasoning", ""))
            for call in choice.delta.tool_calls or []:
                assert call.function is not None
                made = calls.setdefault(call.index, ["", ""])
                made[0] += call.function.name or ""
                made[1] += call.function.arguments or ""
    assert [(n, json.loads(a)) for n, a in calls.values()] == CALLS
    assert (text, thoughts) == ("First.", "I look.")
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "tool_calls"
    assert chunks[-1].usage is not None and not chunks[-1].choices


def test_whole_and_streamed_answers(client: openai.OpenAI) -> None:
    tools: Any = TOOLS
    check(client.chat.completions.create(model="m", messages=MESSAGES, tools=tools))
    some = client.chat.completions.create(
        model="m", messages=MESSAGES, tools=tools, tool_choice="auto", parallel_tool_calls=True, stream=True,
        stream_options={"include_usage": True}, reasoning_effort="low",
    )  # fmt: skip
    add(list(some))


def test_the_helpers_gather_the_same_answer(client: openai.OpenAI) -> None:
    tools: Any = TOOLS
    with client.chat.completions.stream(model="m", messages=MESSAGES, tools=tools) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert called(final.choices[0].message) == CALLS and final.choices[0].finish_reason == "tool_calls"
    assert kinds.count("tool_calls.function.arguments.done") == 2 and kinds.count("content.done") == 1


def test_async(harness: ScriptedApp) -> None:
    tools: Any = TOOLS

    async def run() -> None:
        transport = httpx.ASGITransport(harness.app())
        async with httpx.AsyncClient(transport=transport) as made:
            http: Any = made
            client = openai.AsyncOpenAI(base_url="http://test/v1", api_key="k", http_client=http, max_retries=0)
            check(await client.chat.completions.create(model="m", messages=MESSAGES, tools=tools))
            some = await client.chat.completions.create(
                model="m", messages=MESSAGES, tools=tools, stream=True, stream_options={"include_usage": True}
            )
            add([chunk async for chunk in some])

    asyncio.run(run())


def test_a_turn_goes_back_as_the_client_holds_it(client: openai.OpenAI, harness: ScriptedApp) -> None:
    tools: Any = TOOLS
    first = client.chat.completions.create(model="m", messages=MESSAGES, tools=tools).choices[0].message
    results = [{"role": "tool", "tool_call_id": c.id, "content": "5"} for c in first.tool_calls or []]
    conversation: Any = [*MESSAGES, first, *results]
    client.chat.completions.create(model="m", messages=conversation, tools=tools)
    shown = harness.tokenizer.decode(harness.engine.submitted[-1][0].tokens, False)
    assert '<tool_call>{"name": "get_weather", "arguments": {"city": "Köln", "days": 2}}</tool_call>' in shown
    assert shown.count("<tool_response>5</tool_response>") == 2


def test_calls_that_must_be_made_are_grammars(harness: ScriptedApp, client: openai.OpenAI) -> None:
    tools: Any = TOOLS
    harness.engine.answer = harness.tokenizer.encode(
        'Hm.</think>\n\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    )
    choices: list[Any] = ["required", {"type": "function", "function": {"name": "now"}}]
    for choice, reason in zip(choices, ("tool_calls", "stop"), strict=True):
        reported = client.chat.completions.create(
            model="m", messages=MESSAGES, tools=tools, tool_choice=choice
        ).choices[0]
        assert reported.finish_reason == reason and reported.message.tool_calls
        rule = harness.engine.submitted[-1][0].rule
        assert rule is not None and "arguments" in rule.grammar


def test_a_strict_tool_without_a_grammar_is_a_typed_error(client: openai.OpenAI) -> None:
    odd: Any = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    tools: Any = [{"type": "function", "function": {"name": "f", "parameters": odd, "strict": True}}]
    with pytest.raises(openai.BadRequestError, match="uniqueItems") as caught:
        client.chat.completions.create(model="m", messages=MESSAGES, tools=tools)
    assert caught.value.param == "tools[0].function.parameters.properties.a.uniqueItems"


def test_typed_parsing(harness: ScriptedApp, client: openai.OpenAI) -> None:
    class Event(BaseModel):
        name: str
        days: list[int]

    harness.engine.answer = harness.tokenizer.encode('Hm.</think>{"name": "x", "days": [1]}')
    reported = client.chat.completions.parse(model="m", messages=MESSAGES, response_format=Event)
    assert reported.choices[0].message.parsed == Event(name="x", days=[1])
    rule = harness.engine.submitted[-1][0].rule
    assert rule is not None and "days" in rule.grammar
