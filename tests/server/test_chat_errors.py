"""The golden table of refused chat requests: status, envelope, one short line, the place."""

from __future__ import annotations

from typing import Any

import pytest

from trencadis.core.errors import QueueFull, Unavailable
from trencadis.server.tenants.server_admission_and_byte_budgets import Bounds

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
USER = [{"role": "user", "content": "Hi"}]
TOO_LONG = "This model's maximum context length is 1024 tokens. However, your prompt contains at least "
PART = "messages[0].content[1]"
NAMED = {"type": "function", "function": {"name": "f"}}


def tool(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **fields}}


def allowed(mode: str, tools: list[Any]) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


TOOL = tool()

FIELDS = [
    ({"messages": []}, "messages",
     "Cannot apply chat template to an empty conversation. Provide at least one message."),
    ({"messages": "Hi"}, "messages", "list"),
    ({"messages": [5]}, "messages[0]", "object"),
    ({"messages": [{"role": 7, "content": "x"}]}, "messages[0].role", "'int'"),
    ({"messages": [{"role": "", "content": "x"}]}, "messages[0].role", "such as system"),
    ({"messages": [{"role": "r" * 65, "content": "x"}]}, "messages[0].role", "at most 64 characters"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "string"),
    ({"max_tokens": 5000}, "max_tokens",
     "max_tokens=5000 cannot be greater than max_model_len=1024. Please request fewer output tokens."),
    ({"max_tokens": 0}, "max_tokens", "max_tokens"),
    ({"max_tokens": "x"}, "max_tokens", "max_tokens: Input should be a valid integer"),
    ({"n": 0}, "n", "n must"),
    ({"n": 2, "temperature": 0}, "n", "n must be 1 when using greedy sampling"),
    ({"n": 9}, "n", "n must be at most 8"),
    ({"temperature": 2.5}, "temperature", "temperature must be in [0, 2]"),
    ({"temperature": -1}, "temperature", "temperature"),
    ({"top_p": 0}, "top_p", "top_p must be in (0, 1]"),
    ({"stop": [""]}, "stop", "empty"),
    ({"stop": [5]}, "stop", "stop"),
    ({"top_logprobs": 3}, "top_logprobs", "logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "top_logprobs must be between 0 and 20"),
    ({"prompt_logprobs": 21}, "prompt_logprobs", "prompt_logprobs must be between 0 and 20"),
    ({"top_k": 2**31}, "top_k", "top_k must be in [-1, 2147483647]"),
    ({"repetition_penalty": 101}, "repetition_penalty", "repetition_penalty must be in (0, 100]"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream=True"),
    ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs", "stream=True"),
    ({"logit_bias": {"1000": 1}}, "logit_bias", "out-of-vocab"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "not a token id"),
    ({"stop_token_ids": [1000]}, "stop_token_ids", "outside the vocabulary"),
    ({"min_tokens": 9, "max_tokens": 3}, "min_tokens", "cannot be greater"),
    ({"max_tokens": -1}, "max_tokens", "max_tokens must be in [1,"),
    ({"max_completion_tokens": -1}, "max_completion_tokens", "max_completion_tokens must be in [1,"),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "max_completion_tokens must be in [1,"),
    ({"max_completion_tokens": 3, "max_tokens": 50, "min_tokens": 9}, "min_tokens", "than max_completion_tokens=3."),
    ({"seed": 2**64}, "seed", "seed"),
    ({"response_format": {"type": "yaml"}}, "response_format.type", "none of text, json_object"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "a name and a schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "response_format.json_schema.schema",
     "missing"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"not": {}}}}},
     "response_format.json_schema.schema.not", "not supported"),
    ({"response_format": {"type": "json_object", "schema": {"not": {}}}}, "response_format.schema.not",
     "not supported"),
    ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex", "Only one form"),
    ({"structured_outputs": {"json": {}, "choice": ["a"]}}, "structured_outputs.choice", "Only one form"),
    ({"structured_outputs": {"yaml": 1}}, "structured_outputs.yaml", "no field"),
    ({"structured_outputs": {"json": {"type": "array", "uniqueItems": True}}}, "structured_outputs.json.uniqueItems",
     "'uniqueItems' is not supported"),
    ({"structured_outputs": {"json": {"$ref": "http://a/b"}}}, "structured_outputs.json.$ref", "within the schema"),
    ({"structured_outputs": {"json": {"type": "object", "required": ["a"], "additionalProperties": False}}},
     "structured_outputs.json", "makes no grammar: Unsatisfiable schema"),
    ({"structured_outputs": {"regex": "(?=a)"}}, "structured_outputs.regex", "lookahead"),
    ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex", "makes no grammar"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "a list of texts"),
    ({"structured_outputs": {"grammar": "root ::= x"}}, "structured_outputs.grammar", "no rule"),
    ({"structured_outputs": {"structural_tag": {}}}, "structured_outputs.structural_tag", "needs 'format'"),
    ({"structured_outputs": {"json": {}, "whitespace_pattern": "x*"}}, "structured_outputs.whitespace_pattern",
     "regex of blanks"),
    ({"guided_json": "{"}, "guided_json", "no JSON"),
    ({"guided_regex": "a" * (300 << 10)}, "guided_regex", "exceeds 256 KB"),
    ({"tools": []}, "tools", "empty"),
    ({"tools": [TOOL], "tool_choice": {**NAMED, "function": {"name": "g"}}}, "tool_choice", "which tools lack"),
    ({"tools": [TOOL], "tool_choice": "sometimes"}, "tool_choice", "must be"),
    ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice", "must be"),
    ({"tools": [TOOL], "tool_choice": allowed("required", [])}, "tool_choice.allowed_tools", "functions by name"),
    ({"tools": [TOOL], "tool_choice": allowed("never", [NAMED])}, "tool_choice.allowed_tools", "must hold a mode"),
    ({"tools": [TOOL], "tool_choice": allowed("auto", [5])}, "tool_choice.allowed_tools", "functions by name"),
    ({"tools": [TOOL], "tool_choice": allowed("auto", [{**NAMED, "function": {"name": "g"}}])}, "tool_choice",
     "which tools lack"),
    ({"tools": [TOOL]}, "tools", "--tool-call-parser"),
    ({"tools": [{"type": "function"}]}, "tools[0].function", "needs a function with a name"),
    ({"tools": [TOOL, {"type": "function", "function": {}}]}, "tools[1].function.name", "1 to 128 characters"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "without blanks"),
    ({"tools": [{"type": "function", "function": {"name": "f" * 129}}]}, "tools[0].function.name", "1 to 128"),
    ({"tools": [TOOL, TOOL]}, "tools[1].function.name", "Two tools are named 'f'"),
    ({"tools": [{"type": "retrieval"}]}, "tools[0].type", "only 'function'"),
    ({"tools": [tool(parameters=[])]}, "tools[0].function.parameters", "must be a JSON schema"),
    ({"tools": [tool(parameters={"type": "strin"})]}, "tools[0].function.parameters.type", "must be 'object'"),
    ({"tools": [tool(parameters={"properties": []})]}, "tools[0].function.parameters.properties", "an object"),
    ({"tools": [tool(description=5)]}, "tools[0].function.description", "must be a text"),
    ({"tools": [tool(strict="yes")]}, "tools[0].function.strict", "true or false"),
    ({"tools": [TOOL] * 1025}, "tools", "at most 1024"),
    ({"reasoning_effort": "huge"}, "reasoning_effort", "must be one of none, minimal"),
    ({"n": 11, "use_beam_search": True}, "n", "keeps 1 to 10 beams"),
    ({"use_beam_search": True, "stream": True}, "stream", "cannot be streamed"),
    ({"use_beam_search": True, "stop": "x"}, "stop", "cannot be combined"),
    ({"use_beam_search": True, "logit_bias": {"5": 1}}, "logit_bias", "cannot be combined"),
    ({"use_beam_search": True, "tool_choice": "required", "tools": [TOOL]}, "tool_choice", "cannot be combined"),
    ({"use_beam_search": True, "response_format": {"type": "json_object"}}, "response_format", "cannot be combined"),
    ({"use_beam_search": True, "length_penalty": 11}, "length_penalty", "must be in"),
    ({"use_beam_search": True, "n": 10, "stop_token_ids": [*range(20)]}, "n", "keeps 1 to"),
    ({"best_of": 2}, "best_of", "must equal n"),
    ({"typical_p": 0.5}, "typical_p", "not supported"),
    ({"prompt_embeds": "x"}, "prompt_embeds", "pickle"),
    ({"logprob_token_ids": [1]}, "logprob_token_ids", "needs logprobs"),
    ({"logprobs": True, "logprob_token_ids": [99999]}, "logprob_token_ids", "outside the vocabulary"),
    ({"logprobs": True, "logprob_token_ids": [*range(129)]}, "logprob_token_ids", "at most 128"),
    ({"stop": ["x"] * 17}, "stop", "At most 16"),
    ({"modalities": ["audio"]}, "modalities", "text"),
    ({"cache_salt": "a/b"}, "cache_salt", "cache_salt"),
    ({"mm_processor_kwargs": {"min_pixels": 0}}, "mm_processor_kwargs.min_pixels", "whole number"),
    ({"mm_processor_kwargs": {"crop": 3}}, "mm_processor_kwargs.crop", "unknown key"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message", "both"),
]  # fmt: skip
PARTS = [
    ([{"type": "text", "text": "a"}, {"type": "hologram"}], PART, "hologram"),
    ([{"type": "text", "text": "a"}, {"type": "text"}], PART + ".text", "string"),
    ([{"type": "text", "text": "a"}, 5], PART, "object"),
    ([{"type": "text", "text": "a"}, {"type": "image_url"}], PART, "url"),
    ([{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": ""}}], PART, "HTTP, data or file URL"),
    ([{"type": "text", "text": "a"}, {"type": "image_url", "image_url": "ftp://x/y"}], PART,
     "The URL must be either a HTTP, data or file URL."),
    ([{"type": "text", "text": "a"}, {"type": "image_url", "image_url": "data:;base64,bad"}], PART, "decoded"),
    ([{"type": "text", "text": "a"}, {"type": "video_url", "video_url": {"url": "x"}}], PART, "HTTP, data or file URL"),
    ([{"type": "text", "text": "a"}, {"type": "video"}], PART, "needs a video_url"),
    ([{"type": "text", "text": "a"}, {"type": "video", "video": ["a.png", 5]}], PART, "video[1]"),
    ([{"type": "text", "text": "a"}, {"type": "video", "video": "a.mp4", "fps": 1, "nframes": 4}], PART + ".fps",
     "exclude"),
    ([{"type": "text", "text": "a"}, {"type": "video", "video": "a.mp4"}], "video", "At most 0 video(s)"),
    ([{"type": "input_audio"}], "audio", "At most 0 audio(s) may be provided in one prompt"),
    ([IMAGE, IMAGE, IMAGE], "image", "At most 2 image(s) may be provided in one prompt."),
]  # fmt: skip


def check(response: Any, status: int, param: str | None, text: str) -> None:
    error = response.json()["error"]
    assert response.status_code == status == error["code"], error
    assert set(error) == {"message", "type", "param", "code"}
    assert text in error["message"] and len(error["message"]) < 200 and "\n" not in error["message"]
    assert error["param"] == param and error["type"].endswith("Error")


@pytest.mark.parametrize(("fields", "param", "text"), FIELDS)
def test_field(harness: Any, fields: dict[str, Any], param: str, text: str) -> None:
    check(harness.call("/v1/chat/completions", {"messages": USER, **fields}), 400, param, text)
    assert not harness.engine.submitted and harness.made.state.trencadis.admission.inside == [0, 0, 0]


@pytest.mark.parametrize(("parts", "param", "text"), PARTS)
def test_part(harness: Any, parts: Any, param: str, text: str) -> None:
    check(harness.chat(parts), 400, param, text)


def test_other_statuses(harness: Any) -> None:
    check(harness.chat(model="nope"), 404, "model", "The model `nope` does not exist. Valid aliases: m, alias")
    check(harness.chat(chat_template="x"), 403, "chat_template", "--trust-request-chat-template")
    data = {"type": "image_url", "image_url": "data:text/plain,abc"}
    check(harness.chat([data]), 501, "messages[0].content[0]", "Only base64 data URLs are supported for now.")
    harness.service.template = None
    check(harness.chat(), 400, "messages", "no chat template")


def test_too_long(harness: Any) -> None:
    check(harness.chat("word " * 3000), 400, "input_tokens", TOO_LONG)
    check(harness.chat("w" * 1_000_000), 400, "input_tokens", TOO_LONG)
    assert harness.chat("word " * 3000, truncate_prompt_tokens=-1, max_tokens=1).status_code == 200


def test_engine_refuses(harness: Any) -> None:
    harness.engine.refuse = QueueFull("full", retry_after=7)
    response = harness.chat()
    check(response, 429, None, "full")
    assert response.headers["retry-after"] == "7"
    harness.engine.refuse = Unavailable("gone")
    check(harness.chat(stream=True), 503, None, "gone")
    harness.engine.accepting, harness.engine.phase = False, "loading"
    check(harness.chat(), 503, None, "loading")


def test_error_before_and_after_the_first_byte(harness: Any) -> None:
    harness.engine.fail_at = 0
    check(harness.chat(stream=True), 503, None, "The engine stopped.")
    harness.engine.fail_at = 3
    check(harness.chat(), 503, None, "The engine stopped.")
    events = harness.events(harness.chat(stream=True))
    assert events[-1]["error"] == {
        "message": "The engine stopped.", "type": "ServiceUnavailableError", "param": None, "code": 503,
    }  # fmt: skip


@pytest.mark.parametrize("keep_alive", [0.0, 5.0])
@pytest.mark.parametrize("n", [1, 2])
def test_a_mistake_of_ours_ends_a_stream_in_form(
    harness: Any, n: int, keep_alive: float, caplog: pytest.LogCaptureFixture
) -> None:
    harness.app(sse_keep_alive_interval=keep_alive)
    harness.engine.break_at = 3
    for ask in (
        lambda: harness.chat(n=n, stream=True),
        lambda: harness.call("/v1/completions", {"prompt": ["a", "b"], "n": n, "stream": True}),
    ):
        caplog.clear()
        before = len(harness.engine.submitted)
        events = harness.events(ask())
        assert len(events) > 1 and events[-1]["error"] == {
            "message": "Internal server error.", "type": "InternalServerError", "param": None, "code": 500,
        }  # fmt: skip
        assert [r.exc_info[0] for r in caplog.records if r.exc_info] == [RuntimeError]
        assert {(r.id, -1) for r, _ in harness.engine.submitted[before:]} <= set(harness.engine.aborted)
        assert harness.made.state.trencadis.admission.inside == [0, 0, 0]
    assert 'finished_reason="error"' in harness.call("/metrics").text


def test_a_mistake_while_a_piece_is_made_ends_the_request_in_the_engine(
    harness: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from trencadis.server.prompts.output_processor import ChoiceStream

    feed, fed = ChoiceStream.feed, []

    def broken(self: ChoiceStream, delta: Any) -> Any:
        fed.append(delta)
        return feed(self, delta) if len(fed) % 4 else 1 / 0

    monkeypatch.setattr(ChoiceStream, "feed", broken)
    assert harness.events(harness.chat(stream=True))[-1]["error"]["code"] == 500
    check(harness.chat(), 500, None, "Internal server error.")
    fed.extend(fed[: 3 - len(fed) % 4])
    check(harness.chat(stream=True), 500, None, "Internal server error.")  # nothing was sent: a plain answer
    assert sum(r.exc_info is not None for r in caplog.records) == 3
    assert harness.engine.aborted == [(r.id, -1) for r, _ in harness.engine.submitted]


def test_admission(harness: Any) -> None:
    harness.app(bounds=Bounds(requests=2, tokens=50, pixels=6000))
    check(harness.chat(n=3), 400, None, "max_num_queued_reqs")
    check(harness.chat("word " * 60), 400, None, "max_num_queued_tokens")
    check(harness.chat([IMAGE, IMAGE]), 400, None, "max_num_queued_pixels")
    admission = harness.made.state.trencadis.admission
    ticket = admission.enter(1)
    response = harness.chat(n=2)
    check(response, 429, None, "max_num_queued_reqs")
    assert int(response.headers["retry-after"]) >= 1
    ticket.leave()
    assert harness.chat(n=2).status_code == 200 and harness.chat(n=2, stream=True).status_code == 200
    assert admission.inside == [0, 0, 0]
