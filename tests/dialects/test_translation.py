"""What requests to /v1/responses and /v1/messages mean as a chat request, part by part."""

from __future__ import annotations

from typing import Any

import pytest

from trencadis.server.protocol.anthropic_messages import BUDGET, MessagesRequest
from trencadis.server.protocol.responses import ResponsesRequest
from trencadis.server.routes import anthropic_conversion, responses_conversion
from trencadis.server.routes.message_translation import InnerRequest

URL = "data:image/png;base64,AAAA"
PNG = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
IMAGE = {"type": "image_url", "image_url": {"url": URL}}


def text(value: str) -> dict[str, str]:
    return {"type": "text", "text": value}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def called(id: str, arguments: Any, name: str = "f") -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def of_responses(**fields: Any) -> InnerRequest:
    body = ResponsesRequest(**fields)
    body.check()
    return responses_conversion.convert_responses(body, 1000)


def of_messages(known: tuple[str, ...] = (), **fields: Any) -> InnerRequest:
    body = MessagesRequest(**{"max_tokens": 9, **fields})
    body.check()
    return anthropic_conversion.convert_messages(body, lambda name: name in known, "enable_thinking" in known)


CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "5"}
RESULT = {"role": "tool", "tool_call_id": "c", "name": "f", "content": "5"}
SAID: dict[str, Any] = {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
        "content": [{"type": "output_text", "text": "b", "annotations": [], "logprobs": []}]}  # fmt: skip
THOUGHT = {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}


@pytest.mark.parametrize(
    ("items", "messages"),
    [
        ("a", [user("a")]),
        ([{"role": "user", "content": "a"}], [user("a")]),
        ([{"role": "developer", "content": "a"}], [{"role": "developer", "content": "a"}]),
        ([user([{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": URL, "detail": "low"}])],
         [user([{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": URL, "detail": "low"}])]),
        ([THOUGHT, SAID, CALL, OUTPUT],
         [{"role": "assistant", "content": SAID["content"], "reasoning": "hm", "tool_calls": [called("c", "{}")]},
          RESULT]),
        ([CALL, SAID, OUTPUT], [{"role": "assistant", "content": SAID["content"], "tool_calls": [called("c", "{}")]},
                                RESULT]),
        ([SAID, CALL, SAID, OUTPUT],
         [{"role": "assistant", "content": SAID["content"] * 2, "tool_calls": [called("c", "{}")]}, RESULT]),
        ([SAID, SAID], [{"role": "assistant", "content": SAID["content"]}] * 2),
        ([THOUGHT, OUTPUT | {"output": [{"type": "input_image", "image_url": URL}]}],
         [{"role": "assistant", "content": "", "reasoning": "hm"},
          {"role": "tool", "tool_call_id": "c", "content": [{"type": "input_image", "image_url": URL}]}]),
        ([{"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "s"}]}, user("a")],
         [{"role": "assistant", "content": "", "reasoning": "s"}, user("a")]),
        ([{"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "x"}, user("a")], [user("a")]),
    ],
)  # fmt: skip
def test_items(items: Any, messages: Any) -> None:
    assert of_responses(input=items).chat.messages == messages


def test_instructions_and_leading_instructions_are_one_system_message() -> None:
    items = [{"role": "developer", "content": "b"}, user("c"), {"role": "developer", "content": "d"}]
    assert of_responses(input=items, instructions="a").chat.messages == [
        {"role": "system", "content": "a\n\nb"}, user("c"), {"role": "developer", "content": "d"}
    ]  # fmt: skip


def test_fields_of_responses() -> None:
    tools = [{"type": "function", "name": n, "parameters": {}, "strict": False, "description": None} for n in "abc"]
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "b"}]}
    inner = of_responses(
        input="a", tools=tools, tool_choice=choice, parallel_tool_calls=False, max_output_tokens=7, temperature=0.5,
        top_p=0.9, top_k=3, seed=1, stop="x", include=["message.output_text.logprobs"], top_logprobs=2,
        truncation="auto", reasoning={"effort": "low"}, stream=True, chat_template_kwargs={"x": 1},
        text={"format": {"type": "json_schema", "name": "n", "schema": {"a": 1}, "strict": True}}, n=1,
    )  # fmt: skip
    assert {k: v for k, v in inner.chat.model_dump(exclude_unset=True).items() if k != "messages"} == {
        "tools": [{"type": "function", "function": {"name": "b", "parameters": {}}}], "tool_choice": "auto",
        "parallel_tool_calls": False, "max_tokens": 7, "temperature": 0.5, "top_p": 0.9, "top_k": 3, "seed": 1,
        "stop": "x", "logprobs": True, "top_logprobs": 2, "truncate_prompt_tokens": 993, "reasoning_effort": "low",
        "stream": True, "chat_template_kwargs": {"x": 1},
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"a": 1}, "strict": True}},
    }  # fmt: skip
    assert inner.names.translate_path("tools[0].function.parameters.type") == "tools[1].parameters.type"
    bare = of_responses(input="a", tools=[], tool_choice="auto", top_logprobs=3).chat
    assert bare.tools is None and bare.tool_choice is None and (bare.logprobs, bare.top_logprobs) == (True, 3)


USE = {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}}
HM = {"type": "thinking", "thinking": "hm", "signature": "s"}
MADE = called("c", {"a": 1})


@pytest.mark.parametrize(
    ("given", "messages"),
    [
        ([user("a"), user("b")], [user("a\n\nb")]),
        ([user([text("a") | {"cache_control": {"type": "ephemeral"}}, {"type": "image", "source": PNG}])],
         [user([text("a"), IMAGE])]),
        ([user([{"type": "image", "source": {"type": "url", "url": "https://a/b.png"}}])],
         [user([{"type": "image_url", "image_url": {"url": "https://a/b.png"}}])]),
        ([user("a"), {"role": "assistant", "content": [HM, text("b"), USE]},
          user([{"type": "tool_result", "tool_use_id": "c", "content": [text("5"), {"type": "image", "source": PNG}]},
                text("and")])],
         [user("a"), {"role": "assistant", "content": "b", "reasoning": "hm", "tool_calls": [MADE]},
          RESULT | {"content": [text("5"), IMAGE]}, user([text("and")])]),
        ([user("a"), {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}, USE]},
          user([{"type": "tool_result", "tool_use_id": "c", "content": "no", "is_error": True}])],
         [user("a"), {"role": "assistant", "content": "", "tool_calls": [MADE]}, RESULT | {"content": "Error: no"}]),
        ([user([text("b"), {"type": "tool_result", "tool_use_id": "c"}])],
         [user([text("b")]), {"role": "tool", "tool_call_id": "c", "content": ""}]),
        ([user([{"type": "document", "title": "T", "source": {"type": "text", "data": "d"}}]),
          {"role": "system", "content": [text("s")]}],
         [user([text("T\n"), text("d")]), {"role": "system", "content": "s"}]),
        ([user([{"type": "search_result", "title": "T", "source": "u", "content": [text("d")]}])],
         [user([text("T\nu\nd")])]),
    ],
)  # fmt: skip
def test_blocks(given: Any, messages: Any) -> None:
    assert of_messages(messages=given).chat.messages == messages


def test_system_as_text_or_blocks_without_what_differs_every_time() -> None:
    blocks = [text("x-anthropic-billing-header: cch=1;"), text("a") | {"cache_control": {}}, text("b")]
    for system, made in (("a", "a"), (blocks, "a\n\nb")):
        messages = of_messages(messages=[user("u")], system=system).chat.messages
        assert messages == [{"role": "system", "content": made}, user("u")]
    assert of_messages(messages=[user("u")], system="").chat.messages == [user("u")]


def test_an_answer_that_the_client_has_begun_goes_on() -> None:
    chat = of_messages(messages=[user("u"), {"role": "assistant", "content": "I "}]).chat
    assert chat.continue_final_message and not chat.opens_answer
    for last in (user("b"), {"role": "assistant", "content": [text("x"), USE]}):
        assert of_messages(messages=[user("u"), last]).chat.opens_answer


@pytest.mark.parametrize(
    ("thinking", "known", "kwargs"),
    [
        ({"type": "enabled", "budget_tokens": 1024}, ("enable_thinking", "thinking"), {"enable_thinking": True}),
        ({"type": "disabled"}, ("thinking",), {"thinking": False}),
        ({"type": "adaptive"}, ("enable_thinking",), {"enable_thinking": True}),
        ({"type": "adaptive"}, (), None),
        ({"type": "disabled"}, (), {"enable_thinking": False}),
        (None, ("enable_thinking",), None),
    ],
)
def test_thinking(thinking: Any, known: tuple[str, ...], kwargs: Any) -> None:
    chat = of_messages(known, messages=[user("u")], thinking=thinking).chat
    assert chat.chat_template_kwargs == kwargs
    budget = (thinking or {}).get("budget_tokens") if BUDGET in type(chat).model_fields else None
    assert getattr(chat, BUDGET, None) == budget


@pytest.mark.parametrize(
    ("choice", "made"),
    [
        (None, (None, None)),
        ({"type": "auto", "disable_parallel_tool_use": True}, (None, False)),
        ({"type": "any"}, ("required", None)),
        ({"type": "none"}, ("none", None)),
        ({"type": "tool", "name": "f"}, ({"type": "function", "function": {"name": "f"}}, None)),
    ],
)
def test_choices_of_tools(choice: Any, made: Any) -> None:
    tools = [{"name": "f", "description": "d", "input_schema": {"type": "object"}, "cache_control": {}, "strict": True}]
    chat = of_messages(messages=[user("u")], tools=tools, tool_choice=choice).chat
    assert (chat.tool_choice, chat.parallel_tool_calls) == made
    function = {"name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}
    assert chat.tools == [{"type": "function", "function": function}]


def test_fields_of_messages() -> None:
    schema = {"type": "json_schema", "schema": {"a": 1}}
    chat = of_messages(
        messages=[user("u")], stop_sequences=["x"], top_k=3, temperature=0.5, metadata={"user_id": "u"},
        output_config={"effort": "low", "format": schema}, thinking={"type": "adaptive", "display": "omitted"},
        made_up={"a": 1}, cache_salt="s",
    ).chat  # fmt: skip
    assert {k: v for k, v in chat.model_dump(exclude_unset=True).items() if k != "messages"} == {
        "max_tokens": 9, "stop": ["x"], "top_k": 3, "temperature": 0.5, "reasoning_effort": "low",
        "include_reasoning": False, "cache_salt": "s",
        "response_format": {
            "type": "json_schema", "json_schema": {"name": "output", "schema": {"a": 1}, "strict": True}
        },
    }  # fmt: skip
    assert of_messages(messages=[user("u")], output_format=schema).chat.response_format == chat.response_format
