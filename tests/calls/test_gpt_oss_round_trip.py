"""A gpt-oss with random weights: calls and reasoning go to the official clients and back, through all three routes.

Answers are forced by the grammar of required calls, and the last ones by a regular expression.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from tokenizers import AddedToken, Tokenizer

from tests.calls.conftest import templated_app
from tests.families.text_checkpoints import family_checkpoint
from tests.traffic.server_process import RunningServer, server
from trencadis.server.tools.harmony_parser import MARKS

TEMPLATE = """\
{%- if tools %}{{- '<|start|>developer<|message|># Tools\\n' }}{%- for t in tools %}{{- t | tojson }}{%- endfor %}
{{- '<|end|>' }}{%- endif %}
{%- for m in messages %}
{%- if m.role == 'assistant' and 'tool_calls' in m %}
{%- if m.content and m.thinking %}{{- raise_exception('Cannot pass both content and thinking with tool calls!') }}
{%- elif m.thinking %}{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{%- endif %}
{%- set call = m.tool_calls[0].function %}
{{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
{{- call.arguments | tojson }}{{- '<|call|>' }}
{%- elif m.role == 'assistant' %}{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}
{%- elif m.role == 'tool' %}{{- '<|start|>functions.f to=assistant<|channel|>commentary<|message|>' }}
{{- m.content | tojson }}{{- '<|end|>' }}
{%- else %}{{- '<|start|>' + m.role + '<|message|>' }}
{%- if m.content is string %}{{- m.content }}{%- else %}{%- for p in m.content %}{{- p.text }}{%- endfor %}{%- endif %}
{{- '<|end|>' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""
"""The part of gpt-oss' chat template that writes the messages; its system message is left out."""

SCHEMA: dict[str, Any] = {
    "type": "object", "properties": {"city": {"enum": ["Bonn", "Ulm"]}}, "required": ["city"],
    "additionalProperties": False,
}  # fmt: skip
FUNCTION: Any = {"name": "f", "description": "Weather of a city.", "parameters": SCHEMA}
USER: Any = {"role": "user", "content": "Weather?"}
FORCED: Any = {"structured_outputs": {"regex": "(sun|rain)"}, "thinking_token_budget": 6}
REASONS: Any = {"logit_bias": {"64": 100}, "thinking_token_budget": 6}
"""Lets an answer begin with the channel ``analysis``, whose first letter is id 64, and ends it after some letters."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random gpt-oss whose tokenizer has harmony's marks."""
    folder = tmp_path_factory.mktemp("gpt_oss")
    path = family_checkpoint(folder, family="gpt_oss", form="windows of 20 in every second layer")
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS])
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "chat_template.jinja").write_text(TEMPLATE)
    held = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps({**held, "chat_template": TEMPLATE}))
    return path


@pytest.fixture(scope="module")
def running(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    flags = (
        "--model", str(checkpoint), "--served-model-name", "m", "--dtype", "float32", "--max-model-len", "1024",
        "--kv-cache-memory-bytes", "64MiB", "--max-num-seqs", "4", "--enable-auto-tool-choice",
        "--tool-call-parser", "openai", "--reasoning-parser", "openai_gptoss",
    )  # fmt: skip
    with server(tmp_path_factory.mktemp("server"), *flags) as made:
        yield made


@pytest.fixture
def open_ai(running: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="k", max_retries=0) as client:
        yield client


def prompt_of(running: RunningServer, messages: list[Any]) -> str:
    """The text that the template makes of a chat."""
    tools = [{"type": "function", "function": FUNCTION}]
    ids = running.http.post("/tokenize", json={"model": "m", "messages": messages, "tools": tools}).json()["tokens"]
    return str(running.http.post("/detokenize", json={"model": "m", "tokens": ids}).json()["prompt"])


def second_turn(reasoning: str, name: str, arguments: str, number: str) -> list[Any]:
    """The chat after a first answer with one call, and its result."""
    call = {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}
    said = {"role": "assistant", "content": None, "reasoning": reasoning, "tool_calls": [call]}
    return [USER, said, {"role": "tool", "tool_call_id": number, "content": "sun"}]


def check_prompt(running: RunningServer, messages: list[Any], reasoning: str, arguments: str) -> int:
    """Holds the second turn's prompt to the first answer; returns its tokens."""
    city = json.loads(arguments)["city"]
    assert reasoning and set(reasoning) == {"a"} and city in ("Bonn", "Ulm")
    text = prompt_of(running, messages)
    assert f"<|channel|>analysis<|message|>{reasoning}<|end|><|start|>assistant to=functions.f" in text
    assert f'<|message|>{{"city": "{city}"}}<|call|>' in text and text.endswith("<|start|>assistant")
    body = {"model": "m", "messages": messages, "tools": [{"type": "function", "function": FUNCTION}]}
    return len(running.http.post("/tokenize", json=body).json()["tokens"])


@pytest.mark.long
@pytest.mark.parametrize("stream", [False, True])
def test_chat(open_ai: openai.OpenAI, running: RunningServer, stream: bool) -> None:
    asked: Any = {"model": "m", "tools": [{"type": "function", "function": FUNCTION}], "max_tokens": 200}
    made: Any = open_ai.chat.completions.create(
        **asked, messages=[USER], tool_choice="required", parallel_tool_calls=False, extra_body=REASONS, stream=stream
    )
    reasoning, name, arguments = "", "", ""
    for one in made if stream else [made]:
        part = one.choices[0].delta if stream else one.choices[0].message
        reasoning += part.to_dict().get("reasoning") or ""
        for call in part.tool_calls or []:
            name, arguments = name + (call.function.name or ""), arguments + (call.function.arguments or "")
    turn = second_turn(reasoning, name, arguments, "call_1")
    count = check_prompt(running, turn, reasoning, arguments)
    last: Any = open_ai.chat.completions.create(**asked, messages=turn, tool_choice="none", extra_body=FORCED)
    assert last.choices[0].message.content in ("sun", "rain") and last.usage.prompt_tokens == count


@pytest.mark.long
def test_responses(open_ai: openai.OpenAI, running: RunningServer) -> None:
    asked: Any = {"model": "m", "tools": [{"type": "function", **FUNCTION}], "max_output_tokens": 300}
    made: Any = open_ai.responses.create(
        **asked, input=[USER], tool_choice="required", parallel_tool_calls=False, extra_body=REASONS
    )
    (call,) = [item for item in made.output if item.type == "function_call"]
    reasoning = "".join(c.text for i in made.output if i.type == "reasoning" for c in i.content or [])
    turn = second_turn(reasoning, call.name, call.arguments, call.call_id)
    count = check_prompt(running, turn, reasoning, call.arguments)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sun"}
    back: Any = [USER, *made.output, result]
    last: Any = open_ai.responses.create(**asked, input=back, tool_choice="none", extra_body=FORCED)
    assert last.output_text in ("sun", "rain") and last.usage.input_tokens == count


@pytest.mark.long
def test_messages(running: RunningServer) -> None:
    tool = {"name": "f", "description": FUNCTION["description"], "input_schema": SCHEMA}
    asked: Any = {"model": "m", "tools": [tool], "max_tokens": 300}
    with anthropic.Anthropic(base_url=running.url, api_key="k", max_retries=0) as client:
        only: Any = {"type": "any", "disable_parallel_tool_use": True}
        made: Any = client.messages.create(**asked, messages=[USER], tool_choice=only, extra_body=REASONS)
        (call,) = [block for block in made.content if block.type == "tool_use"]
        reasoning = "".join(block.thinking for block in made.content if block.type == "thinking")
        assert made.stop_reason == "tool_use"
        result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "sun"}]}
        back: Any = [USER, {"role": "assistant", "content": made.content}, result]
        last: Any = client.messages.create(**asked, messages=back, tool_choice={"type": "none"}, extra_body=FORCED)
    turn = second_turn(reasoning, call.name, json.dumps(call.input), call.id)
    count = check_prompt(running, turn, reasoning, json.dumps(call.input))
    tokens = last.usage.input_tokens + (last.usage.cache_read_input_tokens or 0)
    assert last.content[-1].text in ("sun", "rain") and tokens == count


def test_reasoning_before_a_call_reaches_the_template(checkpoint: Path) -> None:
    """The key ``thinking`` has the reasoning, but not beside content: the template refuses both."""
    harness = templated_app(checkpoint, TEMPLATE, "")
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"city": "Bonn"}'}}
    for content, seen in ((None, True), ("First.", False)):
        said = {"role": "assistant", "content": content, "reasoning": "Hm.", "tool_calls": [call]}
        turn = [USER, said, {"role": "tool", "tool_call_id": "call_1", "content": "sun"}]
        made = harness.call("/v1/chat/completions", {"model": "m", "messages": turn, "max_tokens": 5})
        assert made.status_code == 200, made.text
        text = harness.tokenizer.decode(harness.engine.submitted[-1][0].tokens, False)
        assert ("<|channel|>analysis<|message|>Hm.<|end|>" in text) == seen
