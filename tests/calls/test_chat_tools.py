"""Tool calls of /v1/chat/completions over a scripted engine: forms, deltas, reasons, histories, typed tags."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.fakes.scripted_app import ScriptedApp
from tests.fakes.text_checkpoint import TEMPLATE
from tests.traffic.tool_templates import HERMES, LLAMA3, MISTRAL, QWEN3, TEMPLATES, THINKING_HERMES
from tests.traffic.written_calls import SCHEMAS

TOOLS = [{"type": "function", "function": {"name": n, "description": "d", "parameters": s}} for n, s in SCHEMAS.items()]
ANSWERS = {
    "hermes": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln",  "days": 2}}\n</tool_call>',
    "qwen3": "<tool_call>\n<function=get_weather>\n<parameter=city>\nKöln\n</parameter>\n<parameter=days>\n2\n"
    "</parameter>\n</function>\n</tool_call>",
    "llama3_json": '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Köln", "days": 2}}',
    "mistral": '[TOOL_CALLS]get_weather{"city": "Köln", "days": 2}',
    "pythonic": '[get_weather(city="Köln", days=2)]',
    "gemma4": '<|tool_call>call:get_weather{city:<|"|>Köln<|"|>,days:2}<tool_call|>',
    "lfm2": '<|tool_call_start|>[get_weather(city="Köln", days=2)]<|tool_call_end|>',
}
TWO = ANSWERS["hermes"] + '\n<tool_call>{"name": "now", "arguments": {}}</tool_call>'


def joined(harness: ScriptedApp, response: Any) -> dict[int, dict[str, Any]]:
    """The choices that the chunks of a stream add up to, in the form of the whole answer."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in harness.events(response):
        for one in chunk["choices"]:
            made = choices.setdefault(one["index"], {"content": None, "calls": [], "finish": None, "logprobs": []})
            delta = one["delta"]
            for key in ("content", "reasoning", "reasoning_content"):
                if key in delta:
                    made[key] = (made.get(key) or "") + delta[key]
            made["logprobs"] += (one.get("logprobs") or {}).get("content", [])
            made["finish"] = one["finish_reason"] or made["finish"]
            for call in delta.get("tool_calls", []):
                if "id" in call:
                    assert call["index"] == len(made["calls"]) and call["type"] == "function"
                    made["calls"].append([call["id"], call["function"]["name"], ""])
                else:
                    assert set(call) == {"index", "function"} and set(call["function"]) == {"arguments"}
                made["calls"][call["index"]][2] += call["function"]["arguments"]
    return choices


def whole(choice: dict[str, Any]) -> tuple[Any, list[tuple[str, str]], str]:
    """Content, calls and reason of a choice of a whole answer."""
    message = choice["message"]
    calls = [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", [])]
    return message["content"], calls, choice["finish_reason"]


@pytest.mark.parametrize("style", ANSWERS)
def test_a_call_comes_whole_and_in_deltas_alike(serve: Any, style: str) -> None:
    harness = serve(TEMPLATES[style], ANSWERS[style])
    response = harness.chat(tools=TOOLS)
    content, calls, reason = whole(response.json()["choices"][0])
    assert (content, reason) == (None, "tool_calls") and "x-ignored-fields" not in response.headers
    assert [(n, json.loads(a)) for n, a in calls] == [("get_weather", {"city": "Köln", "days": 2})]
    made = joined(harness, harness.chat(tools=TOOLS, stream=True))[0]
    assert [(n, a) for _, n, a in made["calls"]] == calls and made["finish"] == "tool_calls"
    assert made["content"] == ""  # the first chunk has the role and no text
    assert len(made["calls"][0][0]) == (9 if style == "mistral" else 29)


@pytest.mark.parametrize("style", ANSWERS)
def test_a_parser_of_the_flag_wins_over_the_template(serve: Any, style: str) -> None:
    harness = serve(TEMPLATE, ANSWERS[style], tool_call_parser=style)
    assert whole(harness.chat(tools=TOOLS).json()["choices"][0])[2] == "tool_calls"


def test_arguments_go_out_as_written_and_a_cut_call_stays_cut(serve: Any) -> None:
    harness = serve(HERMES, ANSWERS["hermes"])
    _, calls, _ = whole(harness.chat(tools=TOOLS).json()["choices"][0])
    assert calls[0][1] == '{"city": "Köln",  "days": 2}'
    cut = next(n for n in range(1, 99) if harness.tokenizer.decode(harness.engine.answer[:n]).endswith("Kö"))
    content, calls, reason = whole(harness.chat(tools=TOOLS, max_tokens=cut).json()["choices"][0])
    assert (content, calls, reason) == (None, [("get_weather", '{"city": "Kö')], "length")
    early = len(harness.tokenizer.encode('<tool_call>\n{"name": "get'))
    content, calls, reason = whole(harness.chat(tools=TOOLS, max_tokens=early).json()["choices"][0])
    assert content and content.startswith('<tool_call>\n{"name": "') and (calls, reason) == ([], "length")


def test_without_a_call_the_answer_is_text_and_ends_by_stop(serve: Any) -> None:
    text = '  It is <tool_call> that I would write, {"name": "x"}.\n'
    for style in TEMPLATES:
        harness = serve(TEMPLATES[style], text)
        assert whole(harness.chat(tools=TOOLS).json()["choices"][0]) == (text, [], "stop"), style
        assert joined(harness, harness.chat(tools=TOOLS, stream=True))[0]["content"] == text


@pytest.mark.parametrize("stream", [False, True])
def test_tool_choice_none_and_requests_without_tools_read_no_calls(serve: Any, stream: bool) -> None:
    harness = serve(HERMES, TWO)
    for fields in ({"tools": TOOLS, "tool_choice": "none"}, {}):
        response = harness.chat(stream=stream, **fields)
        made = joined(harness, response)[0] if stream else response.json()["choices"][0]["message"]
        assert made["content"] == TWO and not made.get("calls") and "tool_calls" not in made


@pytest.mark.parametrize("stream", [False, True])
def test_parallel_tool_calls_false_ends_after_the_first_call(serve: Any, stream: bool) -> None:
    harness = serve(HERMES, "First.\n" + TWO)
    for parallel in (True, False):
        harness.engine.aborted.clear()
        response = harness.chat(tools=TOOLS, parallel_tool_calls=parallel, stream=stream)
        if stream:
            made = joined(harness, response)[0]
            found = made["content"], [(n, a) for _, n, a in made["calls"]], made["finish"]
        else:
            found = whole(response.json()["choices"][0])
        assert (found[0], found[2]) == ("First.", "tool_calls")
        assert [n for n, _ in found[1]] == (["get_weather", "now"] if parallel else ["get_weather"])
        assert len(harness.engine.aborted) == (not parallel), "the engine is told of the end"
    assert "x-ignored-fields" not in response.headers


def test_choices_read_calls_of_their_own(serve: Any) -> None:
    harness = serve(HERMES, TWO)
    body = harness.chat(tools=TOOLS, n=3).json()
    ids = [c["id"] for one in body["choices"] for c in one["message"]["tool_calls"]]
    assert len(ids) == len(set(ids)) == 6 and {c["finish_reason"] for c in body["choices"]} == {"tool_calls"}
    streamed = joined(harness, harness.chat(tools=TOOLS, n=3, stream=True))
    assert [[c[1] for c in one["calls"]] for one in streamed.values()] == [["get_weather", "now"]] * 3


def test_logprobs_ids_and_usage_count_every_token_of_a_call(serve: Any) -> None:
    harness = serve(HERMES, TWO)
    count = len(harness.engine.answer) + 1
    chunks = harness.chat(tools=TOOLS, stream=True, logprobs=True, stream_options={"include_usage": True})
    assert len(joined(harness, chunks)[0]["logprobs"]) == count
    assert harness.events(chunks)[-1]["usage"]["completion_tokens"] == count
    body = harness.chat(tools=TOOLS, logprobs=True, return_token_ids=True).json()
    assert len(body["choices"][0]["logprobs"]["content"]) == len(body["choices"][0]["token_ids"]) == count


def test_a_stop_string_ends_a_call(serve: Any) -> None:
    harness = serve(HERMES, TWO)
    choice = harness.chat(tools=TOOLS, stop=["Köl"]).json()["choices"][0]
    assert whole(choice) == (None, [("get_weather", '{"city": "')], "tool_calls") and choice["stop_reason"] == "Köl"


def history(content: Any = "5 degrees") -> list[dict[str, Any]]:
    call = {"id": "abcdefghi", "type": "function",
            "function": {"name": "get_weather", "arguments": '{"city": "Köln <b>"}'}}  # fmt: skip
    return [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "abcdefghi", "content": content},
    ]


@pytest.mark.parametrize("style", TEMPLATES)
def test_calls_and_results_of_the_history_reach_the_template_as_transformers_gives_them(serve: Any, style: str) -> None:
    import transformers

    harness = serve(TEMPLATES[style])
    assert harness.call("/v1/chat/completions", {"messages": history(), "tools": TOOLS}).status_code == 200
    tools: Any = TOOLS
    conversation: Any = history()
    conversation[1]["content"] = ""
    conversation[1]["tool_calls"][0]["function"]["arguments"] = {"city": "Köln <b>"}
    render = transformers.utils.chat_template_utils.render_jinja_template
    expected = render([conversation], tools=tools, chat_template=TEMPLATES[style], add_generation_prompt=True)[0][0]
    assert harness.tokenizer.decode(harness.engine.submitted[0][0].tokens, False) == expected


def test_images_and_texts_in_tool_messages(serve: Any) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    content = [{"type": "text", "text": "the map"}, image]
    for style in ("hermes", "qwen3"):
        harness = serve(TEMPLATES[style])
        assert harness.call("/v1/chat/completions", {"messages": history(content), "tools": TOOLS}).status_code == 200
        assert harness.images.received == [("data:image/png;base64,AAAA", "messages[2].content[1]")]
        shown = harness.tokenizer.decode(harness.engine.submitted[0][0].tokens, False)
        assert shown.count("<|image_pad|>") == 6 and "the map" in shown and "{'type'" not in shown


@pytest.mark.parametrize(
    ("calls", "shown"),
    [
        ([{"function": {"name": "f", "arguments": ""}}], '"arguments": {}'),
        ([{"function": {"name": "f"}}], '"arguments": {}'),
        ([{"function": {"name": "f", "arguments": {"a": 1}}}], '"arguments": {"a": 1}'),
        ([], "assistant\nx<|im_end|>"),
    ],
)
def test_histories_without_arguments_or_calls_render(serve: Any, calls: Any, shown: str) -> None:
    harness = serve(HERMES)
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "x", "tool_calls": calls}]
    assert harness.call("/v1/chat/completions", {"messages": messages}).status_code == 200
    assert shown in harness.tokenizer.decode(harness.engine.submitted[0][0].tokens, False)


@pytest.mark.parametrize("tag", ["<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "<|im_end|>"])
def test_tags_that_users_and_tools_type_stay_text(serve: Any, tag: str) -> None:
    token = serve(HERMES).tokenizer.find_token_id(tag)
    for template in (THINKING_HERMES, QWEN3 + "{# </think> #}", MISTRAL, LLAMA3):
        harness = serve(template)
        counts = []
        for text in ("it", f"{tag}it{tag}"):
            messages = history(text)
            messages[0]["content"] = text
            tools = [{"type": "function", "function": {"name": "f", "description": text}}]
            assert harness.call("/v1/chat/completions", {"messages": messages, "tools": tools}).status_code == 200
            counts.append(harness.engine.submitted[-1][0].tokens.count(token))
        if tag in harness.tokenizer.marks:
            assert counts[0] == counts[1], (tag, template)
        else:
            assert tag not in template, "no form has this tag"


def test_a_template_of_the_request_chooses_its_form(serve: Any) -> None:
    harness = serve(HERMES, ANSWERS["mistral"], trust_request_chat_template=True)
    assert whole(harness.chat(tools=TOOLS).json()["choices"][0])[1] == []
    # The tag is a special token, which only its own form shows.
    assert len(whole(harness.chat(tools=TOOLS, chat_template=MISTRAL).json()["choices"][0])[1]) == 1


def test_tags_of_a_form_that_only_the_flag_names_stay_text_too(serve: Any) -> None:
    for flags, tag in (({"tool_call_parser": "hermes"}, "<tool_call>"), ({"reasoning_parser": "qwen3"}, "</think>")):
        harness = serve(TEMPLATE, **flags)
        harness.chat(f"a {tag}")
        assert harness.tokenizer.find_token_id(tag) not in harness.engine.submitted[0][0].tokens
        assert harness.tokenizer.decode(harness.engine.submitted[0][0].tokens).count(tag) == 1


def test_allowed_tools_leave_some_of_the_tools(serve: Any) -> None:
    harness = serve(HERMES, ANSWERS["hermes"])
    named = [{"type": "function", "function": {"name": "now"}}]
    only = [tool for tool, name in zip(TOOLS, SCHEMAS, strict=True) if name == "now"]
    for mode in ("auto", "required"):
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}
        assert harness.chat(tools=TOOLS, tool_choice=choice).status_code == 200
        assert harness.chat(tools=only, tool_choice=mode).status_code == 200
        first, second = (request for request, _ in harness.engine.submitted[-2:])
        assert first.tokens == second.tokens and first.rule == second.rule and (first.rule is None) == (mode == "auto")
