# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project

"""Unit tests for the Muse ATEM tool parser and reasoning parser.

Muse writes every turn as a sequence of channel-scoped messages rather
than JSON, so the two parsers are tested together: the reasoning parser strips
the reasoning span and forwards the remaining channels as content, and the tool
parser reads ATEM markup out of those channels.

Five areas, in order:

  1. non-streaming tool-call extraction, including channel scoping (an
     ``<atem:invoke>`` echoed inside reasoning must never become a call);
  2. the reasoning -> tool-parser handoff, which regressed once by returning
     ``content=None`` and starving the tool parser;
  3. channel routing: ``to=commentary`` is content, a recipient-less
     ``<|message|>`` is reasoning, ``to=developer`` is dropped, and a tool
     header written without the closing ``<|eom|>`` still ends the reasoning;
  4. streaming, where markers routinely straddle chunk boundaries, plus
     truncation isolation for an unterminated ``to=self`` block;
  5. tool-name normalization against the tools registered on the request.

These drive the parsers directly and need no checkpoint. The tests that require
a real tokenizer live in ``test_muse_parse_delta.py``.
"""

import json
from contextlib import suppress
from types import SimpleNamespace
from typing import cast

import pytest

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.reasoning.muse_reasoning_parser import MuseReasoningParser
from vllm.tool_parsers.muse_glimmer_tool_parser import MuseGlimmerToolParser
from vllm.tool_parsers.muse_tool_parser import MuseToolParser

R: MuseReasoningParser
T: MuseToolParser


@pytest.fixture(autouse=True)
def _fresh_parsers():
    """Give each test request-scoped parser state through the real constructors."""
    global R, T
    R = MuseReasoningParser(object())
    T = MuseToolParser(object())


# Any framing token that must NEVER appear in surfaced reasoning/content.
_FRAMING = [
    "<|start|>",
    "<|message|>",
    "<|eom|>",
    "<|eot|>",
    "to=self",
    "to=user",
    "to=read.read",
    "<atem:",
]


class _FakeReq:
    """Minimal ChatCompletionRequest stand-in (no registered tools)."""

    tools = None


def _fake_req() -> ChatCompletionRequest:
    return cast(ChatCompletionRequest, _FakeReq())


# The parsers accept a missing request at runtime.
_NO_REQ = cast(ChatCompletionRequest, None)


def _req(*names: str) -> ChatCompletionRequest:
    """A request with ``names`` registered as tools."""
    return cast(
        ChatCompletionRequest,
        SimpleNamespace(
            tools=[SimpleNamespace(function=SimpleNamespace(name=n)) for n in names]
        ),
    )


def _call(name):
    """One tool-call turn invoking ``name``."""
    return (
        f"<|start|>assistant to={name}<|message|>"
        f'<atem:function_calls>\n<atem:invoke name="{name}">\n'
        f'<atem:parameter name="city">Paris</atem:parameter>\n'
        f"</atem:invoke>\n</atem:function_calls>"
    )


# ---------------------------------------------------------------- tool calls


def test_single_tool_call_after_reasoning():
    raw = (
        "to=self<|message|>Let me check the weather.<|eom|>"
        "<|start|>assistant to=weather.get<|message|>"
        '<atem:function_calls>\n<atem:invoke name="weather.get">\n'
        '<atem:parameter name="city">Paris</atem:parameter>\n'
        '<atem:parameter name="units">celsius</atem:parameter>\n'
        "</atem:invoke>\n</atem:function_calls><|eot|>"
    )
    out = MuseToolParser.extract_tool_calls(T, raw, _NO_REQ)
    assert out.tools_called and len(out.tool_calls) == 1
    assert out.tool_calls[0].function.name == "weather.get"
    assert json.loads(out.tool_calls[0].function.arguments) == {
        "city": "Paris",
        "units": "celsius",
    }


def test_parallel_calls_across_eom_boundaries():
    raw = (
        "<|start|>assistant to=math.add<|message|>"
        '<atem:function_calls>\n<atem:invoke name="math.add">\n'
        '<atem:parameter name="a">1</atem:parameter>\n'
        '<atem:parameter name="b">2</atem:parameter>\n'
        "</atem:invoke>\n</atem:function_calls><|eom|>"
        "<|start|>assistant to=math.mul<|message|>"
        '<atem:function_calls>\n<atem:invoke name="math.mul">\n'
        '<atem:parameter name="a">3</atem:parameter>\n'
        '<atem:parameter name="b">4</atem:parameter>\n'
        "</atem:invoke>\n</atem:function_calls><|eot|>"
    )
    out = MuseToolParser.extract_tool_calls(T, raw, _NO_REQ)
    assert out.tools_called and len(out.tool_calls) == 2, len(out.tool_calls)
    assert [t.function.name for t in out.tool_calls] == ["math.add", "math.mul"]
    # JSON-typed values decode to ints
    assert json.loads(out.tool_calls[0].function.arguments) == {"a": 1, "b": 2}


def test_echoed_invoke_in_reasoning_is_not_parsed():
    """Channel scoping: an invoke quoted inside reasoning is not a call."""
    raw = (
        'to=self<|message|>I could call <atem:invoke name="evil.fn">'
        '<atem:parameter name="x">1</atem:parameter></atem:invoke> '
        "but I will not.<|eom|>"
        "<|start|>assistant to=user<|message|>The answer is 42.<|eot|>"
    )
    out = MuseToolParser.extract_tool_calls(T, raw, _NO_REQ)
    assert not out.tools_called, "channel scoping failed -- echoed invoke parsed!"
    assert out.content == "The answer is 42.", repr(out.content)


def test_plain_answer_yields_no_tool_calls():
    out = MuseToolParser.extract_tool_calls(
        T, "to=user<|message|>Just a plain answer.<|eot|>", _NO_REQ
    )
    assert not out.tools_called


def test_json_object_array_and_bool_params_decode():
    raw = (
        "<|start|>assistant to=api.call<|message|>"
        '<atem:function_calls>\n<atem:invoke name="api.call">\n'
        '<atem:parameter name="payload">{"nested": [1, 2, 3]}</atem:parameter>\n'
        '<atem:parameter name="flag">true</atem:parameter>\n'
        "</atem:invoke>\n</atem:function_calls><|eot|>"
    )
    out = MuseToolParser.extract_tool_calls(T, raw, _NO_REQ)
    assert json.loads(out.tool_calls[0].function.arguments) == {
        "payload": {"nested": [1, 2, 3]},
        "flag": True,
    }


# ------------------------------------------------- reasoning -> tool handoff


def test_reasoning_to_toolcall_handoff():
    """The regression: content=None here starved the tool parser."""
    raw = (
        " to=self<|message|>Let me call the tool.<|eom|>"
        "<|start|>assistant to=weather.get<|message|>"
        '<atem:function_calls>\n<atem:invoke name="weather.get">\n'
        '<atem:parameter name="city">Paris</atem:parameter>\n'
        "</atem:invoke>\n</atem:function_calls>"
    )
    reasoning, content = MuseReasoningParser.extract_reasoning(R, raw, _NO_REQ)
    assert reasoning == "Let me call the tool.", repr(reasoning)
    assert content is not None and "<atem:invoke" in content, repr(content)
    out = MuseToolParser.extract_tool_calls(T, content, _NO_REQ)
    assert out.tools_called and len(out.tool_calls) == 1
    assert out.tool_calls[0].function.name == "weather.get"


def test_reasoning_then_user_answer():
    raw = (
        " to=self<|message|>thinking<|eom|>"
        "<|start|>assistant to=user<|message|>The answer is 42.<|eot|>"
    )
    reasoning, content = MuseReasoningParser.extract_reasoning(R, raw, _NO_REQ)
    assert reasoning == "thinking", repr(reasoning)
    assert content == "The answer is 42.", repr(content)
    assert not MuseToolParser.extract_tool_calls(T, content, _NO_REQ).tools_called


def test_plain_content_without_framing_passes_through():
    reasoning, content = MuseReasoningParser.extract_reasoning(
        R, "Just a direct answer.", _NO_REQ
    )
    assert reasoning is None and content == "Just a direct answer.", (
        reasoning,
        content,
    )


def test_reasoning_then_parallel_calls():
    raw = (
        " to=self<|message|>need two calls<|eom|>"
        "<|start|>assistant to=math.add<|message|>"
        '<atem:function_calls>\n<atem:invoke name="math.add">\n'
        '<atem:parameter name="a">1</atem:parameter>\n</atem:invoke>\n'
        "</atem:function_calls><|eom|>"
        "<|start|>assistant to=math.mul<|message|>"
        '<atem:function_calls>\n<atem:invoke name="math.mul">\n'
        '<atem:parameter name="a">3</atem:parameter>\n</atem:invoke>\n'
        "</atem:function_calls><|eot|>"
    )
    reasoning, content = MuseReasoningParser.extract_reasoning(R, raw, _NO_REQ)
    assert reasoning == "need two calls", repr(reasoning)
    assert content is not None
    out = MuseToolParser.extract_tool_calls(T, content, _NO_REQ)
    assert [t.function.name for t in out.tool_calls] == ["math.add", "math.mul"], (
        out.tool_calls
    )


def test_full_block_inside_reasoning_is_not_parsed_end_to_end():
    """Serving runs the reasoning parser first; a full block in to=self stays inert."""
    raw = (
        'to=self<|message|><atem:function_calls><atem:invoke name="evil.fn">'
        '<atem:parameter name="x">1</atem:parameter></atem:invoke>'
        "</atem:function_calls><|eom|>"
        "<|start|>assistant to=user<|message|>The answer is 42.<|eot|>"
    )
    reasoning, content = MuseReasoningParser.extract_reasoning(R, raw, _NO_REQ)
    assert reasoning is not None and 'name="evil.fn"' in reasoning
    assert content == "The answer is 42.", repr(content)
    out = MuseToolParser.extract_tool_calls(T, content, _NO_REQ)
    assert not out.tools_called, "channel scoping failed -- echoed invoke parsed!"


# ---------------------------------------------------------- channel routing

RAW_COMMENTARY_TOOLCALL = (
    " to=self<|message|>Plan the lookup.<|eom|>"
    "<|start|>assistant to=commentary<|message|>Checking the weather.<|eom|>"
    + _call("weather.get")
)

RAW_COMMENTARY_ANSWER = (
    " to=self<|message|>Plan.<|eom|>"
    "<|start|>assistant to=commentary<|message|>Working on it. <|eom|>"
    "<|start|>assistant to=user<|message|>Done.<|eot|>"
)

# The model skips <|eom|> and writes the tool header right after its reasoning.
RAW_MISSING_EOM_TOOLCALL = (
    " to=self<|message|>Need the time. to=time.now<|message|>"
    '<atem:function_calls>\n<atem:invoke name="time.now">\n</atem:invoke>\n'
    "</atem:function_calls><|eom|>"
    "<|start|>assistant to=user<|message|>It is noon.<|eot|>"
)


def test_commentary_before_tool_call_is_content():
    reasoning, content = MuseReasoningParser.extract_reasoning(
        R, RAW_COMMENTARY_TOOLCALL, _NO_REQ
    )
    assert reasoning == "Plan the lookup.", repr(reasoning)
    assert content is not None
    out = MuseToolParser.extract_tool_calls(T, content, _NO_REQ)
    assert [t.function.name for t in out.tool_calls] == ["weather.get"]
    assert out.content == "Checking the weather.", repr(out.content)


def test_commentary_and_answer_join_as_content():
    reasoning, content = MuseReasoningParser.extract_reasoning(
        R, RAW_COMMENTARY_ANSWER, _NO_REQ
    )
    assert reasoning == "Plan.", repr(reasoning)
    assert content == "Working on it. Done.", repr(content)


def test_recipient_less_message_is_reasoning():
    raw = (
        "<|message|>Thinking.<|eom|><|start|>assistant to=user<|message|>Answer.<|eot|>"
    )
    reasoning, content = MuseReasoningParser.extract_reasoning(R, raw, _NO_REQ)
    assert reasoning == "Thinking.", repr(reasoning)
    assert content == "Answer.", repr(content)


def test_developer_channel_is_dropped():
    raw = (
        " to=developer<|message|>internal note<|eom|>"
        "<|start|>assistant to=user<|message|>Answer.<|eot|>"
    )
    reasoning, content = MuseReasoningParser.extract_reasoning(R, raw, _NO_REQ)
    assert reasoning is None and content == "Answer.", (reasoning, content)
    out = MuseToolParser.extract_tool_calls(T, raw, _NO_REQ)
    assert not out.tools_called and out.content == "Answer.", out


def test_missing_eom_before_tool_header_keeps_tool_call():
    reasoning, content = MuseReasoningParser.extract_reasoning(
        R, RAW_MISSING_EOM_TOOLCALL, _NO_REQ
    )
    assert reasoning == "Need the time. ", repr(reasoning)
    assert content is not None
    out = MuseToolParser.extract_tool_calls(T, content, _NO_REQ)
    assert [t.function.name for t in out.tool_calls] == ["time.now"]
    assert out.content == "It is noon.", repr(out.content)


# ----------------------------------------------------------------- streaming


def _stream(raw: str, chunk: int):
    """Feed ``raw`` incrementally in ``chunk``-char steps through BOTH streaming
    parsers; return (reasoning, content, tool_calls)."""
    reasoning, content, toolcalls = [], [], []
    prev = ""
    i = 0
    while i < len(raw):
        cur = raw[: i + chunk]
        delta = cur[len(prev) :]
        dm = MuseReasoningParser.extract_reasoning_streaming(
            R, prev, cur, delta, [], [], []
        )
        if dm is not None:
            if dm.reasoning:
                reasoning.append(dm.reasoning)
            content_delta = getattr(dm, "content", None)
            # Tool-channel content is an internal handoff to the tool parser,
            # not client-visible content from the unified parser.
            if content_delta and "<atem:function_calls>" not in content_delta:
                content.append(content_delta)
        dt = MuseToolParser.extract_tool_calls_streaming(
            T, prev, cur, delta, [], [], [], _fake_req()
        )
        if dt is not None and dt.tool_calls:
            toolcalls.extend(dt.tool_calls)
        prev = cur
        i += chunk
    return "".join(reasoning), "".join(content), toolcalls


def _fn_of(tc):
    fn = tc.function
    if isinstance(fn, dict):
        return fn.get("name"), fn.get("arguments")
    return fn.name, fn.arguments


RAW_TOOLCALL = (
    " to=self<|message|>I should read the hostname file to answer.<|eom|>"
    "<|start|>assistant to=read.read<|message|>"
    '<atem:function_calls>\n<atem:invoke name="read.read">\n'
    '<atem:parameter name="path">/etc/hostname</atem:parameter>\n'
    "</atem:invoke>\n</atem:function_calls>"
)

RAW_ANSWER = (
    " to=self<|message|>Think about it.<|eom|>"
    "<|start|>assistant to=user<|message|>The answer is 42.<|eot|>"
)

# NO closing <|eom|> -> truncated CoT
RAW_TRUNCATED = (
    " to=self<|message|>Maybe I should call "
    '<atem:function_calls>\n<atem:invoke name="read.read">\n'
    '<atem:parameter name="path">/etc/hostname</atem:parameter>\n'
    "</atem:invoke>\n</atem:function_calls> but wait"
)


# 1 is the worst case: markers arrive one char at a time (mid-marker deltas).
@pytest.mark.parametrize("chunk", [1, 3, 17])
def test_streaming_toolcall(chunk):
    reasoning, content, tcs = _stream(RAW_TOOLCALL, chunk)
    # (a) no framing token leaks into reasoning or content
    for f in _FRAMING:
        assert f not in reasoning, (
            f"framing {f!r} leaked into reasoning (chunk={chunk})"
        )
        assert f not in content, f"framing {f!r} leaked into content (chunk={chunk})"
    # (b) exactly one tool_call with correct name + args
    assert len(tcs) == 1, f"expected 1 tool_call, got {len(tcs)} (chunk={chunk})"
    name, args = _fn_of(tcs[0])
    assert name == "read.read", name
    assert json.loads(args) == {"path": "/etc/hostname"}, args
    assert tcs[0].index == 0 and tcs[0].type == "function" and tcs[0].id
    # (c) reasoning captured separately and clean
    assert reasoning == "I should read the hostname file to answer.", repr(reasoning)
    assert content == "", repr(content)


def test_streaming_reasoning_then_content():
    reasoning, content, tcs = _stream(RAW_ANSWER, 3)
    for f in _FRAMING:
        assert f not in reasoning and f not in content, f
    assert reasoning == "Think about it.", repr(reasoning)
    assert content == "The answer is 42.", repr(content)
    assert tcs == []


def test_streaming_commentary_and_answer():
    reasoning, content, tcs = _stream(RAW_COMMENTARY_ANSWER, 3)
    for f in _FRAMING:
        assert f not in reasoning and f not in content, f
    assert reasoning == "Plan.", repr(reasoning)
    assert content == "Working on it. Done.", repr(content)
    assert tcs == []


def test_streaming_missing_eom_before_tool_header():
    reasoning, _, tcs = _stream(RAW_MISSING_EOM_TOOLCALL, 1)
    assert reasoning == "Need the time. ", repr(reasoning)
    assert [_fn_of(tc)[0] for tc in tcs] == ["time.now"], tcs


def test_truncated_cot_no_toolcall_nonstreaming():
    out = MuseToolParser.extract_tool_calls(T, RAW_TRUNCATED, _fake_req())
    assert not out.tools_called and out.tool_calls == []
    # partial reasoning must still be recovered by the reasoning parser
    reasoning, _ = MuseReasoningParser.extract_reasoning(R, RAW_TRUNCATED, _fake_req())
    assert reasoning and "Maybe I should call" in reasoning, repr(reasoning)


def test_truncated_cot_no_toolcall_streaming():
    _, _, tcs = _stream(RAW_TRUNCATED, 3)
    assert tcs == [], f"truncated CoT invoke leaked as streaming tool call: {tcs}"


# ------------------------------------------------------- name normalization
#
# Muse emits `get_weather.get_weather` for a bare-registered
# `get_weather`, and `weather.get` verbatim for a namespaced one. The parser
# normalizes against the tools actually registered on the request.


def test_doubled_bare_name_collapses():
    out = MuseToolParser.extract_tool_calls(
        T, _call("get_weather.get_weather"), _req("get_weather")
    )
    assert out.tools_called and out.tool_calls[0].function.name == "get_weather", (
        out.tool_calls[0].function.name
    )


def test_namespaced_name_preserved():
    out = MuseToolParser.extract_tool_calls(
        T, _call("weather.get"), _req("weather.get")
    )
    assert out.tool_calls[0].function.name == "weather.get"


def test_unregistered_namespace_is_preserved():
    # Suffix-only matching can silently dispatch a tool from the wrong namespace.
    out = MuseToolParser.extract_tool_calls(
        T, _call("foo.get_weather"), _req("get_weather")
    )
    assert out.tool_calls[0].function.name == "foo.get_weather"


def test_trailing_segment_ambiguous_left_alone():
    # two registered tools share leaf 'get' -> ambiguous -> do NOT rewrite
    out = MuseToolParser.extract_tool_calls(
        T, _call("x.get"), _req("weather.get", "time.get")
    )
    assert out.tool_calls[0].function.name == "x.get"


def test_no_registered_tools_passthrough():
    out = MuseToolParser.extract_tool_calls(
        T, _call("get_weather.get_weather"), _NO_REQ
    )
    assert out.tool_calls[0].function.name == "get_weather.get_weather"


def test_exact_match_kept():
    out = MuseToolParser.extract_tool_calls(
        T, _call("get_weather"), _req("get_weather")
    )
    assert out.tool_calls[0].function.name == "get_weather"


def test_adjust_request_forces_skip_special_tokens_off():
    req = SimpleNamespace(tools=None, tool_choice=None, skip_special_tokens=True)
    MuseToolParser.adjust_request(T, cast(ChatCompletionRequest, req))
    assert req.skip_special_tokens is False


def test_named_custom_tool_choice_skips_structured_outputs():
    # Custom tools ride the function shim; a named custom choice must skip
    # the base adjust_request like a named function choice does.
    request = ResponsesRequest(
        input="hi",
        tools=[{"type": "custom", "name": "emit_command"}],
        tool_choice={"type": "custom", "name": "emit_command"},
    )
    T.adjust_request(request)
    assert request.structured_outputs is None


@pytest.mark.parametrize(
    ("raw", "reasoning", "content"),
    [
        ("<|message|>Thinking.<|eot|>", "Thinking.", None),
        ("to=developer<|message|>internal note<|eom|>", None, None),
        (
            "to=commentary<|message|>Checking. "
            "to=developer<|message|>internal note<|eom|>",
            None,
            "Checking. ",
        ),
        (
            "<|message|>Think.<|start|>assistant to=user<|message|>Done.<|eot|>",
            "Think.",
            "Done.",
        ),
        (
            "to=self<|message|>First.<|eom|>"
            "<|start|>assistant<|message|>Second.<|eot|>",
            "First.Second.",
            None,
        ),
    ],
)
def test_channel_boundaries_match_streaming(raw, reasoning, content):
    """Hidden channels and message boundaries must not leak in either path."""
    assert R.extract_reasoning(raw, _NO_REQ) == (reasoning, content)
    for chunk in (1, 3, len(raw)):
        parser = MuseReasoningParser(object())
        reasons, contents = [], []
        for end in range(chunk, len(raw) + chunk, chunk):
            previous = raw[: max(0, end - chunk)]
            current = raw[:end]
            delta = parser.extract_reasoning_streaming(
                previous, current, current[len(previous) :], [], [], []
            )
            if delta:
                reasons.append(delta.reasoning or "")
                contents.append(delta.content or "")
        assert "".join(reasons) == (reasoning or "")
        assert "".join(contents) == (content or "")


@pytest.mark.parametrize(
    "value", ["25", "true", "null", "[1,2]", '{"x":1}', "3%", "1,500", " 25 "]
)
@pytest.mark.parametrize("request_kind", ["chat", "responses"])
@pytest.mark.parametrize("parser_class", [MuseToolParser, MuseGlimmerToolParser])
def test_string_parameter_schema_preserves_raw_text(value, request_kind, parser_class):
    """String schemas disambiguate ATEM values; Glimmer keeps legacy decoding."""
    parameters = {
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "count": {"type": "integer"},
            "items": {"type": "array", "items": {"type": "integer"}},
        },
    }
    function = {"name": "echo", "parameters": parameters}
    if request_kind == "chat":
        request = ChatCompletionRequest(
            model="test",
            messages=[],
            tools=[{"type": "function", "function": function}],
        )
    else:
        request = ResponsesRequest(input="hi", tools=[{"type": "function", **function}])
    raw = (
        'to=echo.echo<|message|><atem:function_calls><atem:invoke name="echo.echo">'
        f'<atem:parameter name="text">{value}</atem:parameter>'
        '<atem:parameter name="count">25</atem:parameter>'
        '<atem:parameter name="items">[1,2]</atem:parameter>'
        "</atem:invoke></atem:function_calls><|eot|>"
    )
    expected_text = value
    if parser_class is MuseGlimmerToolParser:
        with suppress(ValueError):
            expected_text = json.loads(value)
    expected = {"text": expected_text, "count": 25, "items": [1, 2]}
    parser = parser_class(object())
    calls = parser.extract_tool_calls(raw, request).tool_calls
    assert len(calls) == 1
    assert calls[0].function.name == "echo"
    assert json.loads(calls[0].function.arguments) == expected

    for chunk in (1, 17, len(raw)):
        parser = parser_class(object())
        calls = []
        for end in range(chunk, len(raw) + chunk, chunk):
            previous, current = raw[: end - chunk], raw[:end]
            delta = parser.extract_tool_calls_streaming(
                previous, current, current[len(previous) :], [], [], [], request
            )
            if delta and delta.tool_calls:
                calls.extend(delta.tool_calls)
        assert len(calls) == 1
        name, arguments = _fn_of(calls[0])
        assert name == "echo"
        assert json.loads(arguments) == expected


# --------------------------------------------------- reasoning token counting

_SPECIALS = ["<|message|>", "<|start|>", "<|eom|>", "<|eot|>"]


class _CharTokenizer:
    """Char-level stub: specials are single ids, other chars are ``ord()``."""

    def __init__(self):
        self._id_of = {s: 200100 + i for i, s in enumerate(_SPECIALS)}
        self._str_of = {v: k for k, v in self._id_of.items()}

    def get_vocab(self) -> dict[str, int]:
        return dict(self._id_of)

    def encode(self, text: str) -> list[int]:
        ids = []
        i = 0
        while i < len(text):
            for s in _SPECIALS:
                if text.startswith(s, i):
                    ids.append(self._id_of[s])
                    i += len(s)
                    break
            else:
                ids.append(ord(text[i]))
                i += 1
        return ids

    def decode(self, ids) -> str:
        return "".join(self._str_of.get(t, chr(t)) for t in ids)


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        # Every reasoning block counts; commentary, tool and answer bodies don't.
        (RAW_COMMENTARY_ANSWER + " to=self<|message|>more", len("Plan.more")),
        (RAW_TOOLCALL, len("I should read the hostname file to answer.")),
        ("<|message|>bare<|eom|><|start|>assistant to=user<|message|>x", 4),
        # A body cut off by the token budget counts to the end.
        (" to=self<|message|>cut off", len("cut off")),
    ],
)
def test_count_reasoning_tokens(raw, expected):
    tok = _CharTokenizer()
    parser = MuseReasoningParser(tok)
    assert parser.count_reasoning_tokens(tok.encode(raw)) == expected
