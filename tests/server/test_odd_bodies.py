"""Bodies with odd values: whatever a client sends, its mistake is a 400 that names the field, never a 500."""

from __future__ import annotations

import asyncio
import json
import logging
from random import Random
from typing import Any

import pytest

from tests.hostile.odd_bodies import BODIES, LONE, drawn, nested
from trencadis.core.errors import BadRequest
from trencadis.server.prompts.sampling_params import RequestLimits
from trencadis.server.text.chat_template import ChatTemplate

USER = [{"role": "user", "content": "Hi"}]
ELSEWHERE = {"input_tokens", "image", "video", "audio", "messages", "truncate_prompt_tokens"}
"""What a fault may be named by beside its own field: odd values make prompts too long or longer
than the cut that was asked for, are media, or a template's."""
PAIRS = {
    "tool_choice": {"tools"}, "logprobs": {"top_logprobs"}, "temperature": {"n"}, "stream": {"prompt_logprobs", "echo"},
    "max_tokens": {"min_tokens"}, "max_completion_tokens": {"min_tokens"}, "echo": {"max_tokens"},
    "add_generation_prompt": {"continue_final_message"}, "messages": {"prompt"}, "top_logprobs": {"logprobs"},
}  # fmt: skip
"""Fields of a contradiction are named by one of them."""


def sent(harness: Any, caplog: pytest.LogCaptureFixture, path: str, body: Any) -> Any:
    caplog.clear()
    response = harness.call(path, method="POST", content=json.dumps(body), headers={"content-type": "application/json"})
    assert response.status_code < 500 and not [r for r in caplog.records if r.exc_info], json.dumps(body)[:2000]
    if response.status_code != 200:
        error = response.json()["error"]
        assert len(error["message"]) < 200 and "\n" not in error["message"], error
    return response


def shape(response: Any) -> bool:
    """Whether the body was refused by its shape alone, before anybody knew its fields."""
    error = response.json()["error"]
    said = ("The request nests", "The request holds", "A key of")
    return error["param"] is None and error["message"].startswith(said)


def fuzzed(harness: Any, caplog: pytest.LogCaptureFixture, seed: int, count: int) -> list[int]:
    """Statuses of ``count`` odd bodies."""
    random, seen = Random(seed), []
    harness.service.limits = RequestLimits(1000, max_images=2, max_videos=1, max_choices=8)
    harness.app(trust_request_chat_template=True)
    caplog.set_level(logging.INFO)
    for _ in range(count):
        path = random.choice(list(BODIES))
        field, body = drawn(random, path)
        response = sent(harness, caplog, path, body)
        seen.append(response.status_code)
        if response.status_code == 400 and "parsing the body" not in response.text and not shape(response):
            param = response.json()["error"]["param"] or ""
            root = param.partition(".")[0].partition("[")[0]
            assert root in {field, *ELSEWHERE, *PAIRS.get(field, ())}, (field, response.text, json.dumps(body)[:2000])
    return seen


def test_odd_bodies_name_their_field(harness: Any, caplog: pytest.LogCaptureFixture) -> None:
    seen = fuzzed(harness, caplog, 25, 250)
    assert seen.count(200) > 25 and seen.count(400) > 100


@pytest.mark.long
@pytest.mark.parametrize("seed", range(8))
def test_many_odd_bodies_name_their_field(seed: int, harness: Any, caplog: pytest.LogCaptureFixture) -> None:
    seen = fuzzed(harness, caplog, seed, 5000)
    assert seen.count(200) > 500 and seen.count(400) > 2000


@pytest.mark.parametrize("body", BODIES["/v1/chat/completions"])
def test_the_bodies_are_good_ones(body: dict[str, Any], harness: Any) -> None:
    harness.app(trust_request_chat_template=True)
    for path, bodies in BODIES.items():
        for one in bodies:
            response = harness.call(path, one)
            assert response.status_code == 200, (path, response.text)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", LONE), ("stop", LONE), ("stop", ["a", LONE]), ("cache_salt", LONE), ("request_id", LONE),
        ("chat_template_kwargs", {"a": [LONE]}), ("chat_template_kwargs", {LONE: 1}),
        ("chat_template_kwargs", nested(90, True)), ("tools", [nested(90, True)]), ("documents", [{"a": LONE}]),
        ("logit_bias", {"--5": 1}), ("logit_bias", {"5" * 4000: 1}), ("logit_bias", {LONE: 1}),
        ("logit_bias", {"٣": 1}), ("response_format", {"type": LONE}), ("tool_choice", {"a": LONE}),
        ("mm_processor_kwargs", {LONE: 1}), ("mm_processor_kwargs", {"patch_size": nested(90, False)}),
    ],
)  # fmt: skip
def test_field(field: str, value: Any, harness: Any, caplog: pytest.LogCaptureFixture) -> None:
    response = sent(harness, caplog, "/v1/chat/completions", {"messages": USER, field: value})
    assert response.status_code == 400 and response.json()["error"]["param"].startswith(field)


@pytest.mark.parametrize("value", [nested(900, True), nested(900, False), {"5" * 5000: 1}])
def test_shapes_are_refused_before_fields_are_known(value: Any, harness: Any, caplog: pytest.LogCaptureFixture) -> None:
    response = sent(harness, caplog, "/v1/chat/completions", {"messages": USER, "logit_bias": value})
    assert response.status_code == 400 and shape(response)


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user", "content": LONE}, "messages[0].content"),
        ({"role": LONE, "content": "x"}, "messages[0].role"),
        ({"role": nested(90, False), "content": "x"}, "messages[0].role"),
        ({"role": "user", "content": "x", LONE: 1}, "messages[0]"),
        ({"role": "user", "content": "x", "name": nested(90, False)}, "messages[0].name"),
        ({"role": "user", "content": [{"type": "text", "text": LONE}]}, "messages[0].content[0].text"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": LONE}]}, "messages[0].content[0].image_url"),
        ({"role": "user", "content": [{"type": [1]}]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": {"a": 1}, "text": "x"}]}, "messages[0].content[0]"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_message(message: Any, param: str, path: str, harness: Any, caplog: pytest.LogCaptureFixture) -> None:
    response = sent(harness, caplog, path, {"messages": [message]})
    found = response.json()["error"]["param"]
    assert response.status_code == 400 and (found == param or found.startswith(f"{param}["))


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a": "\\ud800"}', json.dumps(nested(900, True)), "1" * 5000])
def test_arguments(text: str, harness: Any, caplog: pytest.LogCaptureFixture) -> None:
    calls = [{"function": {"name": "f", "arguments": text}}]
    body = {"messages": [{"role": "assistant", "content": "x", "tool_calls": calls}]}
    response = sent(harness, caplog, "/v1/chat/completions", body)
    assert response.status_code == 400 and response.json()["error"]["param"].startswith("messages[0].tool_calls")


def test_escapes_in_arguments_hide_no_mark(harness: Any) -> None:
    nonce = harness.tokenizer.nonce
    escaped = f"{nonce[:-1]}\\u{ord(nonce[-1]):04x}"
    hidden = json.dumps({"a": harness.tokenizer.marks["<|im_end|>"]}).replace(nonce, escaped)
    calls = [{"function": {"name": "f", "arguments": hidden}}]
    harness.app(trust_request_chat_template=True)
    body = {
        "messages": [{"role": "assistant", "content": "x", "tool_calls": calls}],
        "chat_template": "{{ messages[0].tool_calls[0].function.arguments.a }}",
    }
    response = harness.call("/v1/chat/completions", body)
    assert response.status_code == 200, response.text
    assert harness.tokenizer.special_ids.isdisjoint(harness.engine.submitted[0][0].tokens)


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
@pytest.mark.parametrize("prompt", [LONE, "a\udfff b"])
def test_prompt(path: str, prompt: str, harness: Any, caplog: pytest.LogCaptureFixture) -> None:
    response = sent(harness, caplog, path, {"prompt": prompt})
    assert response.status_code == 400 and response.json()["error"]["param"] == "prompt"


def test_a_field_named_by_half_a_pair_is_refused_in_words(harness: Any, caplog: pytest.LogCaptureFixture) -> None:
    harness.app(strict_request_fields=True)
    response = sent(harness, caplog, "/v1/chat/completions", {"messages": USER, LONE: 1})
    assert response.status_code == 400 and response.json()["error"]["param"] == "\\ud800"


def test_an_error_quotes_only_what_has_a_utf8_form() -> None:
    error = BadRequest(LONE * 500, param=f"a.{LONE}")
    assert error.message.isascii() and len(error.message) < 200 and error.param == "a.\\ud800"


def test_a_prompt_that_no_route_has_checked_is_refused_in_words(harness: Any) -> None:
    """As offline, or where a template makes half a pair."""
    harness.service.template = ChatTemplate("{{ '%c' | format(55296) }}", harness.tokenizer, "string")
    for prompt in (harness.service.make_raw_prompt(LONE), harness.service.make_chat_prompt(USER)):
        with pytest.raises(BadRequest, match="surrogate"):
            asyncio.run(prompt)
