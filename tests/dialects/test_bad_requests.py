"""What the two routes refuse: one line, in the words of their API, that names the field of the request."""

from __future__ import annotations

import json
import logging
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.calls.conftest import templated_app
from tests.fakes.scripted_app import ScriptedApp
from tests.fakes.text_checkpoint import TEMPLATE
from tests.hostile import odd_bodies
from tests.tenants.test_tenant_routes import key_file
from tests.traffic.tool_templates import HERMES, THINKING
from trencadis.core.errors import TooLarge
from trencadis.server.protocol.json_body_limits import BodyLimits, BodyScan
from trencadis.server.tenants.server_admission_and_byte_budgets import Bounds

USER = {"role": "user", "content": "a"}
FUNCTION = {"type": "function", "name": "f"}
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def harness(tagged: Path) -> ScriptedApp:
    """An application that no request gets through to."""
    return templated_app(tagged, HERMES)


def deep(levels: int) -> Any:
    return odd_bodies.nested(levels, True)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [3]}, "input[0]"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [USER, {"type": "web_search_call"}]}, "input[1].type"),
        ({"input": [{"role": "tool", "content": "a"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": 3}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]}, "input[0].content[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]}, "input[0].content[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "bad:x"}]}]},
         "input[0].content[0]"),
        ({"input": [{"role": "user", "content": [{"type": "nope"}]}]}, "input[0].content[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_text", "text": odd_bodies.LONE}]}]},
         "input[0].content[0].text"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{"}]}, "input[0]"),
        ({"input": [USER, {"type": "function_call", "call_id": "c", "name": "f"}]}, "input[1].arguments"),
        ({"input": [{"type": "function_call_output", "output": "5"}]}, "input[0].call_id"),
        ({"input": [{"type": "reasoning", "content": "x"}]}, "input[0].content"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [FUNCTION, {"type": "mcp"}]}, "tools[1].type"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tools": [FUNCTION, {**FUNCTION, "name": "g", "parameters": {"type": "array"}}]}, "tools[1].parameters.type"),
        ({"tools": [FUNCTION], "tool_choice": {"type": "file_search"}}, "tool_choice.type"),
        ({"tools": [FUNCTION], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice"),
        ({"tools": [FUNCTION], "tool_choice": {"type": "allowed_tools", "tools": [{"name": "g"}]}},
         "tool_choice.tools"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": {"id": "c"}}, "conversation"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"include": ["nope"]}, "include[0]"),
        ({"truncation": "left"}, "truncation"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"n": 2}, "n"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": "x"}, "max_output_tokens"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"temperature": 9}, "temperature"),
        ({"text": {"format": 3}}, "text.format"),
        ({"text": {"format": {"type": "nope"}}}, "text.format"),
        ({"reasoning": {"effort": "vast"}}, "reasoning.effort"),
        ({"input": "a " * 2000}, "input_tokens"),
        ({"tools": [deep(90)]}, "tools"),
    ],
)  # fmt: skip
def test_responses(harness: ScriptedApp, fields: dict[str, Any], param: str) -> None:
    body = json.dumps({"input": "a", **fields})
    response = harness.call("/v1/responses", method="POST", content=body, headers=JSON)
    error = response.json()["error"]
    assert response.status_code == 400 and f"{error['param']}.".startswith(f"{param}."), error
    assert len(error["message"]) < 200 and "\n" not in error["message"] and not harness.engine.submitted
    assert "messages[" not in error["message"] and "max_tokens" not in error["message"].split("_out")[0]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"max_tokens": None}, "max_tokens: "),
        ({"max_tokens": 0}, "max_tokens must be in [1, "),
        ({"messages": []}, "messages: "),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role must be"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content must be"),
        ({"messages": [USER, {"role": "user", "content": [{"type": "nope"}]}]}, "messages[1].content[0].type is"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "file", "file_id": "f"}}]}]},
         "messages[0].content[0].source.type must be"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "x:"}}]}]},
         "messages[0].content[0]: The URL"),
        ({"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "base64"}}]}]},
         "messages[0].content[0].source is a file"),
        ({"messages": [USER, {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f",
                                                               "input": "x"}]}]}, "messages[1].content[0].input must"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "bad"}}]}]}]},
         "messages[0].content[0].content[0]: "),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type is 'bash_20250124'"),
        ({"tools": [{"name": "f", "input_schema": {"type": "array"}}]}, "tools[0].input_schema.type must be"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name must have"),
        ({"tools": [{"name": "f", "input_schema": {}}], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice"),
        ({"tool_choice": {"type": "nope"}}, "tool_choice.type must be"),
        ({"thinking": {"type": "nope"}}, "thinking.type must be"),
        ({"thinking": {"type": "enabled", "budget_tokens": "x"}}, "thinking.budget_tokens must be"),
        ({"output_config": {"effort": "vast"}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "nope"}}}, "output_config.format"),
        ({"output_format": {"type": "nope"}}, "output_format"),
        ({"stop_sequences": ["x" * 5000]}, "stop_sequences: "),
        ({"system": [{"type": "image"}]}, "system[0] must be a text block"),
        ({"temperature": 9}, "temperature"),
        ({"n": 2}, "n must be 1"),
    ],
)  # fmt: skip
def test_messages(harness: ScriptedApp, fields: dict[str, Any], said: str) -> None:
    response = harness.call("/v1/messages", {"max_tokens": 5, "messages": [USER], **fields})
    body = response.json()
    assert (response.status_code, body["type"], body["error"]["type"]) == (400, "error", "invalid_request_error")
    message = body["error"]["message"]
    assert message.startswith(said) and "\n" not in message and not harness.engine.submitted
    assert body["request_id"] == response.headers["request-id"] == response.headers["x-request-id"]


def test_a_path_below_responses_that_is_posted_to_is_no_response(serve: Any) -> None:
    harness: ScriptedApp = serve(TEMPLATE)
    refused = harness.call("/v1/responses/input_tokens")
    assert refused.status_code == 405 and refused.headers["allow"] == "POST"
    assert harness.call("/v1/responses/resp_1").status_code == 404


def test_every_error_of_these_paths_has_anthropics_form(serve: Any) -> None:
    harness: ScriptedApp = serve(TEMPLATE, api_key=["k"], max_body_bytes=2000)
    key = {"x-api-key": "k"}
    body = {"max_tokens": 5, "messages": [USER]}
    calls: list[tuple[Any, int, str]] = [
        (harness.call("/v1/messages", body), 401, "authentication_error"),
        (harness.call("/v1/messages", {**body, "system": "x" * 3000}, headers=key), 413, "request_too_large"),
        (harness.call("/v1/messages", {**body, "model": "nope"}, headers=key), 404, "not_found_error"),
        (harness.call("/v1/messages/nope", body, headers=key), 404, "not_found_error"),
        (harness.call("/v1/messages", headers=key), 405, "invalid_request_error"),
        (harness.call("/v1/messages", method="POST", content="{", headers=key | JSON), 400, "invalid_request_error"),
        (harness.call("/v1/messages", method="POST", content="a", headers=key), 400, "invalid_request_error"),
        (harness.call("/v1/messages/count_tokens", {}, headers=key), 400, "invalid_request_error"),
        (harness.call("/v1/messages", {**body, "chat_template": "x"}, headers=key), 403, "permission_error"),
    ]
    harness.engine.accepting = False
    calls.append((harness.call("/v1/messages", body, headers=key), 529, "overloaded_error"))
    full = serve(TEMPLATE, bounds=Bounds(requests=1))
    full.made.state.trencadis.admission.enter()
    calls.append((full.call("/v1/messages", body), 529, "overloaded_error"))
    for response, status, kind in calls:
        error = response.json()
        assert (response.status_code, error["type"], error["error"]["type"]) == (status, "error", kind), response.text
        assert set(error) == {"type", "error", "request_id"} and response.headers["request-id"] == error["request_id"]
    assert calls[-1][0].headers["retry-after"] and calls[-2][0].headers["retry-after"]
    assert "error" in harness.call("/v1/responses", body, headers=key).json(), "other paths keep OpenAI's form"
    assert "request-id" not in harness.call("/v1/models", headers=key).headers


def test_a_limit_of_the_key_is_429_and_its_priorities_hold(serve: Any, tmp_path: Path) -> None:
    path = key_file(tmp_path, "  requests_per_minute: 1\n  priority: [0, 5]\n")
    harness = serve(TEMPLATE, "a", api_key_file=path, priorities=True)
    key, body = {"x-api-key": "key-a"}, {"max_tokens": 5, "messages": [USER]}
    refused = harness.call("/v1/messages", body | {"priority": 9}, headers=key)
    assert (refused.status_code, refused.json()["error"]["type"]) == (403, "permission_error")
    assert harness.call("/v1/messages", body, headers=key).status_code == 200
    limited = harness.call("/v1/messages", body, headers=key)
    assert (limited.status_code, limited.json()["error"]["type"]) == (429, "rate_limit_error")
    assert limited.headers["retry-after"] and limited.headers["x-ratelimit-limit-requests"] == "1"


def test_what_has_no_effect_is_named_in_the_words_of_the_request(serve: Any) -> None:
    harness = serve(THINKING.replace("enable_thinking", "nothing").replace("reasoning_effort", "nothing"))
    response = harness.call("/v1/responses", {
        "input": "a", "store": True, "include": ["reasoning.encrypted_content"], "text": {"verbosity": "low"},
        "reasoning": {"effort": "low", "summary": "auto"}, "made_up": 1, "return_token_ids": True, "max_tool_calls": 2,
    })  # fmt: skip
    assert response.headers["x-ignored-fields"] == (
        "include.reasoning.encrypted_content,made_up,max_tool_calls,reasoning.effort,reasoning.summary,"
        "return_token_ids,store,text.verbosity"
    )
    response = harness.call("/v1/messages", {
        "max_tokens": 5, "messages": [USER], "metadata": {"user_id": "u"}, "mcp_servers": [1],
        "thinking": {"type": "disabled"}, "output_config": {"effort": "low"}, "cache_control": {"type": "ephemeral"},
    })  # fmt: skip
    assert response.headers["x-ignored-fields"] == "mcp_servers,metadata,output_config.effort,thinking"
    harness.app(strict_request_fields=True)
    assert harness.call("/v1/messages", {"max_tokens": 5, "messages": [USER], "mcp_servers": [1]}).status_code == 400
    assert harness.call("/v1/messages", {"max_tokens": 5, "messages": [USER], "metadata": {}}).status_code == 200


def test_an_answer_that_the_context_cuts_off_says_so(serve: Any) -> None:
    harness = serve(TEMPLATE, "a b c d")
    harness.engine.answer *= 300
    for limit, reason in ((100_000, "model_context_window_exceeded"), (5, "max_tokens")):
        made = harness.call("/v1/messages", {"max_tokens": limit, "messages": [USER]}).json()
        assert made["stop_reason"] == reason
    made = harness.call("/v1/responses", {"input": "a", "max_output_tokens": 100_000}).json()
    assert made["incomplete_details"] == {"reason": "max_output_tokens"} and made["max_output_tokens"] == 100_000
    harness.service.defaults = replace(harness.service.defaults, cap=5)
    made = harness.call("/v1/messages", {"max_tokens": 100_000, "messages": [USER]}).json()
    assert (made["stop_reason"], made["usage"]["output_tokens"]) == ("max_tokens", 5), "the operator's limit"


def test_truncation_drops_the_beginning(serve: Any) -> None:
    harness = serve(TEMPLATE, "a")
    response = harness.call("/v1/responses", {"input": "a " * 2000, "truncation": "auto", "max_output_tokens": 24})
    assert response.status_code == 200 and len(harness.engine.submitted[0][0].tokens) == 1000


def test_a_count_is_the_prompts_with_its_images(serve: Any) -> None:
    harness = serve(TEMPLATE, "a")
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    conversation = [{"role": "user", "content": [{"type": "text", "text": "a"}, image]}]
    counted = harness.call("/v1/messages/count_tokens", {"messages": conversation, "system": "s"}).json()
    usage = harness.call("/v1/messages", {"max_tokens": 5, "messages": conversation, "system": "s"}).json()["usage"]
    assert counted == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}
    assert harness.images.received[0] == ("data:image/png;base64,AAAA", "messages[1].content[1]")
    items = [{"role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64,AAAA"}]}]
    counted = harness.call("/v1/responses/input_tokens", {"input": items}).json()
    usage = harness.call("/v1/responses", {"input": items}).json()["usage"]
    assert counted == {"object": "response.input_tokens", "input_tokens": usage["input_tokens"]}


def test_many_results_and_large_images_are_bounded_as_in_chat(harness: ScriptedApp) -> None:
    results = [{"type": "tool_result", "tool_use_id": "c", "content": "a"}] * 9000
    body = {"max_tokens": 5, "messages": [{"role": "user", "content": results}]}
    error = harness.call("/v1/messages", body).json()["error"]["message"]
    assert error == "messages[0].content[8192]: the conversation has more than 8192 messages."
    for head, fits in ((b"/9j/", True), (b"text", False)):
        scan = BodyScan(BodyLimits(text=1 << 17))
        with nullcontext() if fits else pytest.raises(TooLarge):
            for piece in (b'{"data":"' + head, *[b"A" * (1 << 16)] * 4, b'"}'):
                scan.feed(piece)


IMAGE = {"type": "input_image", "image_url": odd_bodies.IMAGE, "detail": "low"}
ITEMS = [
    {"role": "developer", "content": "b"},
    {"role": "user", "content": [{"type": "input_text", "text": "a"}, IMAGE]},
    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": [IMAGE]},
]
BLOCKS = [
    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image", "source": {
        "type": "base64", "media_type": "image/png", "data": "AAAA"}}]},
    {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": "s"},
                                      {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "is_error": True, "content": [
        {"type": "document", "title": "t", "source": {"type": "text", "data": "d"}}]}]},
]  # fmt: skip
SHARED = {k: v for k, v in odd_bodies.SHARED.items() if k not in ("max_tokens", "prompt_logprobs")}
BODIES: dict[str, list[dict[str, Any]]] = {
    "/v1/responses": [{
        **SHARED, "input": ITEMS, "instructions": "i", "tools": [{"type": "function", "name": "f", "parameters": {}}],
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
        "text": {"format": {"type": "text"}}, "reasoning": {"effort": "low"}, "max_output_tokens": 3,
        "include": ["message.output_text.logprobs"], "top_logprobs": 2, "metadata": {"a": "b"}, "truncation": "auto",
    }],
    "/v1/messages": [{
        **SHARED, "max_tokens": 3, "messages": BLOCKS, "system": [{"type": "text", "text": "s"}], "top_k": 4,
        "tools": [{"name": "f", "input_schema": {"type": "object"}}], "tool_choice": {"type": "auto"},
        "thinking": {"type": "enabled", "budget_tokens": 1024}, "output_config": {"effort": "low"},
        "stop_sequences": ["a"], "metadata": {"user_id": "u"},
    }],
}  # fmt: skip


def fuzzed(serve: Any, caplog: pytest.LogCaptureFixture, seed: int, count: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(odd_bodies, "BODIES", BODIES)
    caplog.set_level(logging.INFO)
    random, harness, seen = Random(seed), serve(HERMES, "a"), []
    for path, bodies in BODIES.items():
        assert harness.call(path, bodies[0]).status_code == 200
    for _ in range(count):
        path = random.choice(list(BODIES))
        _, body = odd_bodies.drawn(random, path)
        caplog.clear()
        response = harness.call(path, method="POST", content=json.dumps(body), headers=JSON)
        seen.append(response.status_code)
        assert seen[-1] < 500 and not [r for r in caplog.records if r.exc_info], json.dumps(body)[:2000]
        if seen[-1] != 200 and not body.get("stream"):
            message = response.json()["error"]["message"]
            assert len(message) < 320 and "\n" not in message
    assert seen.count(200) > count / 10 and seen.count(400) > count / 4


def test_odd_bodies_are_refused_in_words(serve: Any, caplog: Any, monkeypatch: Any) -> None:
    fuzzed(serve, caplog, 5, 80, monkeypatch)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
def test_many_odd_bodies_are_refused_in_words(serve: Any, caplog: Any, monkeypatch: Any, seed: int) -> None:
    fuzzed(serve, caplog, seed, 5000, monkeypatch)
