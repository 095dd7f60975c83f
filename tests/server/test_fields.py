"""Every declared field of every request either changes something or is named in x-ignored-fields, or refused."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest

from trencadis.server.protocol.base_request import FieldContext, StreamOptions
from trencadis.server.protocol.chat_completions import BatchChatRequest, ChatRequest
from trencadis.server.protocol.completions import CompletionRequest
from trencadis.server.protocol.models_and_tokenize import DetokenizeRequest, TokenizeRequest
from trencadis.server.text.chat_template import ChatTemplate

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
TALK = [{"role": "user", "content": [{"type": "text", "text": "One two three four"}, IMAGE]}]
PLAIN = [{"role": "user", "content": "One two three four"}]
ANSWERED = [*PLAIN, {"role": "assistant", "content": "So"}]
TOOL = {"type": "function", "function": {"name": "f"}}
TOOLS: dict[str, Any] = {"tools": [TOOL], "tool_choice": "none"}
CUT = {"messages": PLAIN, "truncate_prompt_tokens": 3}
TEMPLATE = (
    "{% if tools %}<tools>{% endif %}{% if style %}{{ style }}{% endif %}"
    "{% for m in messages %}{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ p.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>{% endfor %}{% if add_generation_prompt %}assistant\n{% endif %}"
)

Sample = tuple[Any, dict[str, Any]]
"""A value that is not the default, and the fields beside which it may mean something."""

MEDIA: dict[str, Sample] = {
    "model": ("alias", {}),
    "cache_salt": ("s", {}),
    "mm_processor_kwargs": ({"max_pixels": 9000}, {}),
    "return_image_sizes": (True, {}),
}
GENERATE: dict[str, Sample] = MEDIA | {
    "temperature": (0.5, {}),
    "top_p": (0.5, {}),
    "top_k": (5, {}),
    "min_p": (0.5, {}),
    "n": (2, {}),
    "stop": ("rld", {}),
    "stop_token_ids": ([300], {}),
    "include_stop_str_in_output": (True, {"stop": "rld", "max_tokens": 100}),
    "ignore_eos": (True, {"max_tokens": 100}),
    "min_tokens": (2, {}),
    "seed": (3, {}),
    "presence_penalty": (0.5, {}),
    "frequency_penalty": (0.5, {}),
    "repetition_penalty": (1.5, {}),
    "logit_bias": ({"5": 1}, {}),
    "allowed_token_ids": ([5], {}),
    "bad_words": (["two"], {}),
    "thinking_token_budget": (5, {}),
    "repetition_detection": ({"max_pattern_size": 2, "min_count": 2}, {}),
    "use_beam_search": (True, {}),
    "length_penalty": (2.0, {"use_beam_search": True}),
    "early_stopping": (True, {"use_beam_search": True}),
    "best_of": (2, {}),
    "logprob_token_ids": ([5], {"logprobs": True}),
    "skip_reading_prefix_cache": (True, {}),
    "prompt_logprobs": (1, {}),
    "skip_special_tokens": (False, {}),
    "spaces_between_special_tokens": (False, {}),
    "truncate_prompt_tokens": (3, {}),
    "truncation_side": ("right", {"truncate_prompt_tokens": 3}),
    "stream": (True, {}),
    "stream_options": ({"include_usage": True}, {"stream": True}),
    "stream_interval": (3, {"stream": True}),
    "priority": (4, {}),
    "request_id": ("mine", {}),
    "return_token_ids": (True, {}),
    "return_tokens_as_token_ids": (True, {"logprobs": True, "top_logprobs": 2}),
    "response_format": ({"type": "json_object"}, {}),
    "structured_outputs": ({"choice": ["a"]}, {}),
    "guided_json": ({"type": "integer"}, {}),
    "guided_regex": ("a", {}),
    "guided_choice": (["a"], {}),
    "guided_grammar": ('root ::= "a"', {}),
    "guided_whitespace_pattern": (" ", {"guided_json": {"type": "object"}}),
    "guided_decoding_backend": ("xgrammar", {}),
    "structural_tag": ({"format": {"type": "const_string", "value": "a"}}, {}),
}
CHAT: dict[str, Sample] = GENERATE | {
    "messages": (PLAIN, {}),
    "max_tokens": (2, {}),
    "max_completion_tokens": (2, {}),
    "logprobs": (True, {}),
    "top_logprobs": (2, {"logprobs": True}),
    "tools": ([TOOL], {"tool_choice": "none"}),
    "tool_choice": ("auto", {}),
    "parallel_tool_calls": (False, TOOLS),
    "reasoning_effort": ("high", {}),
    "include_reasoning": (False, {}),
    "service_tier": ("flex", {}),
    "modalities": (["audio"], {}),
    "prediction": ({"type": "content", "content": "Some text"}, {}),
    "echo": (True, {"messages": ANSWERED}),
    "add_generation_prompt": (False, {}),
    "continue_final_message": (True, {"messages": ANSWERED}),
    "add_special_tokens": (True, {}),
    "documents": ([{"text": "d"}], {}),
    "chat_template": ("x", {}),
    "chat_template_kwargs": ({"style": "brief"}, {}),
    "truncate_prompt_tokens": (3, {"messages": PLAIN}),
    "truncation_side": ("right", CUT),
}
COMPLETION: dict[str, Sample] = GENERATE | {
    "prompt": ("Other", {}),
    "max_tokens": (2, {}),
    "logprobs": (1, {}),
    "echo": (True, {}),
    "suffix": ("x", {}),
    "add_special_tokens": (False, {}),
    "return_tokens_as_token_ids": (True, {"logprobs": 2}),
}
TOKENIZE: dict[str, Sample] = MEDIA | {
    "model": ("other", {}),
    "prompt": ("Other", {}),
    "messages": (PLAIN, {}),
    "add_special_tokens": (False, {}),
    "return_token_strs": (True, {}),
    "add_generation_prompt": (False, {}),
    "continue_final_message": (True, {"messages": ANSWERED, "add_generation_prompt": False}),
    "chat_template": ("x", {}),
    "chat_template_kwargs": ({"style": "brief"}, {}),
    "tools": ([TOOL], {}),
}


def _wrapped(fields: dict[str, Any]) -> dict[str, Any]:
    return {**fields, "messages": [fields["messages"]]} if "messages" in fields else fields


BATCH: dict[str, Sample] = {
    name: (([value] if name == "messages" else value), _wrapped(beside)) for name, (value, beside) in CHAT.items()
} | {
    "length_penalty": (2.0, {}),
    "early_stopping": (True, {}),
    "parallel_tool_calls": (False, {}),
    "stream_options": ({"include_usage": True}, {}),
    "stream_interval": (3, {}),
}

WALKS: dict[str, tuple[Any, str, dict[str, Any], dict[str, Sample], set[str]]] = {
    "chat": (
        ChatRequest, "/v1/chat/completions", {"messages": TALK}, CHAT,
        {"parallel_tool_calls", "reasoning_effort", "include_reasoning", "service_tier", "add_special_tokens",
         "documents", "guided_decoding_backend", "spaces_between_special_tokens"},
    ),
    "several chats": (
        BatchChatRequest, "/v1/chat/completions/batch", {"messages": [TALK]}, BATCH,
        {"length_penalty", "early_stopping", "parallel_tool_calls", "reasoning_effort", "include_reasoning",
         "service_tier", "add_special_tokens", "documents", "guided_decoding_backend", "spaces_between_special_tokens",
         "stream_interval"},
    ),
    "completions": (
        CompletionRequest, "/v1/completions", {"prompt": "One two three four"}, COMPLETION,
        {"mm_processor_kwargs", "return_image_sizes", "guided_decoding_backend", "spaces_between_special_tokens"},
    ),
    "tokenize messages": (
        TokenizeRequest, "/tokenize", {"messages": TALK}, TOKENIZE | {"add_special_tokens": (True, {})},
        {"add_special_tokens"},
    ),
    "tokenize a prompt": (
        TokenizeRequest, "/tokenize", {"prompt": "One two three four"}, TOKENIZE | {
            "continue_final_message": (True, {}),
        },
        {"add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs", "tools",
         "mm_processor_kwargs", "cache_salt", "return_image_sizes"},
    ),
    "detokenize": (
        DetokenizeRequest, "/detokenize", {"tokens": [65, 66]}, {"model": ("other", {}), "tokens": ([66], {})}, set(),
    ),
}  # fmt: skip


def observed(harness: Any, path: str, body: dict[str, Any]) -> tuple[Any, set[str]]:
    """All that a request leads to, and the fields that are named as ignored."""
    harness.engine.submitted.clear()
    harness.images.parts.clear()
    response = harness.call(path, body)
    text = re.sub(r'"created":\d+|"id":"(?![^"]*mine)[^"]*"', "", response.text)
    requests = [(r.tokens, r.params, r.salt, r.priority, r.rule, r.beams) for r, _ in harness.engine.submitted]
    media = [harness.images.scope, *harness.images.parts] if harness.images.parts else []
    ignored = set(filter(None, response.headers.get("x-ignored-fields", "").split(",")))
    return (response.status_code, response.headers["content-type"], text, requests, media), ignored


def prepared(harness: Any) -> None:
    harness.service.template = ChatTemplate(TEMPLATE, harness.tokenizer)
    encode = harness.tokenizer.encode

    def with_start(text: str, allow_special: bool = True, add_special_tokens: bool = False) -> list[int]:
        return [7] * add_special_tokens + encode(text, allow_special)

    harness.tokenizer.encode = with_start


@pytest.mark.parametrize("walk", WALKS)
def test_every_field_changes_something_or_is_named(harness: Any, walk: str) -> None:
    prepared(harness)
    harness.app(priorities=True)
    model, path, base, samples, expected = WALKS[walk]
    assert set(samples) == set(model.model_fields), "a field without a sample"
    named = set()
    for name, (value, beside) in samples.items():
        before, quiet = observed(harness, path, base | beside)
        after, ignored = observed(harness, path, base | beside | {name: value})
        assert not quiet, f"{quiet} is named although nobody asked for it"
        assert (before != after) != bool(ignored), f"{name}: {'both' if ignored else 'neither'} works and is named"
        named |= ignored
    assert named == expected


def test_every_stream_option_changes_something_or_is_named(harness: Any) -> None:
    def streamed(**options: bool) -> tuple[Any, set[str]]:
        return observed(
            harness, "/v1/chat/completions", {"messages": PLAIN, "stream": True, "stream_options": options or None}
        )

    for name in StreamOptions.model_fields:
        assert streamed(include_usage=name != "include_usage") != streamed(**{"include_usage": True, name: True})
    _, ignored = streamed(include_obfuscation=True)
    assert ignored == {"stream_options.include_obfuscation"}


@pytest.mark.parametrize(
    ("fields", "ignored"),
    [
        ({"max_tokens": 9, "max_completion_tokens": 2}, "max_tokens"),
        ({"truncation_side": "left"}, "truncation_side"),
        ({"return_tokens_as_token_ids": True}, "return_tokens_as_token_ids"),
        ({"chat_template_kwargs": {"style": "s", "enable_thinking": False}}, "chat_template_kwargs.enable_thinking"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"user": "u", "store": False, "metadata": {}}, "metadata,store,user"),
        ({"parallel_tool_calls": True, "service_tier": "auto"}, "parallel_tool_calls,service_tier"),
        ({"use_beam_search": False, "return_image_sizes": False, "add_special_tokens": False}, ""),
        ({"mm_processor_kwargs": {}, "documents": [], "chat_template_kwargs": {}, "tool_choice": "none"}, ""),
    ],
)
def test_fields_that_mean_nothing_beside_the_others_are_named(harness: Any, fields: Any, ignored: str) -> None:
    prepared(harness)
    assert harness.chat(**fields).headers.get("x-ignored-fields", "") == ignored


def test_unknown_fields_of_the_other_endpoints_are_named(harness: Any) -> None:
    assert harness.complete(nonsense=1).headers["x-ignored-fields"] == "nonsense"
    assert harness.call("/tokenize", {"prompt": "a", "nonsense": 1}).headers["x-ignored-fields"] == "nonsense"
    assert harness.call("/detokenize", {"tokens": [65], "nonsense": 1}).headers["x-ignored-fields"] == "nonsense"
    assert "x-ignored-fields" not in harness.call("/tokenize", {"prompt": "a"}).headers
    harness.app(strict_request_fields=True)
    assert harness.call("/tokenize", {"prompt": "a", "nonsense": 1}).json()["error"]["param"] == "nonsense"
    assert harness.call("/detokenize", {"tokens": [65], "nonsense": 1}).status_code == 400
    assert "no effect" in harness.chat(reasoning_effort="low").json()["error"]["message"]
    assert harness.chat(user="u").headers["x-ignored-fields"] == "user"


def test_priorities_count_where_the_scheduler_heeds_them(harness: Any) -> None:
    assert harness.chat(priority=1).headers["x-ignored-fields"] == "priority"
    harness.app(priorities=True)
    assert "x-ignored-fields" not in harness.chat(priority=1).headers
    assert harness.engine.submitted[-1][0].priority == 1


def test_a_tool_choice_needs_tools(harness: Any) -> None:
    for choice in ("auto", "required", {"type": "function", "function": {"name": "f"}}):
        error = harness.chat(tool_choice=choice).json()["error"]
        assert (error["param"], error["message"]) == ("tool_choice", "When using `tool_choice`, `tools` must be set.")


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_prompt_is_cut_on_the_side_that_is_asked_for(harness: Any, side: str) -> None:
    whole = harness.call("/tokenize", {"prompt": "One two three four"}).json()["tokens"]
    harness.complete("One two three four", truncate_prompt_tokens=3, truncation_side=side, echo=True)
    kept = whole[-3:] if side == "left" else whole[:3]
    assert harness.engine.submitted[-1][0].tokens == kept
    body = harness.complete(
        "One two three four", truncate_prompt_tokens=3, truncation_side=side, echo=True, max_tokens=0
    )
    assert body.json()["choices"][0]["text"] == harness.tokenizer.decode(kept), "what was cut is not echoed"
    harness.chat("One two", truncate_prompt_tokens=3, truncation_side=side)
    assert len(harness.engine.submitted[-1][0].tokens) == 3
    assert harness.complete(truncate_prompt_tokens=3, truncation_side="middle").status_code == 400


def test_a_prompt_with_images_is_not_cut(harness: Any) -> None:
    error = harness.chat([{"type": "text", "text": "See"}, IMAGE], truncate_prompt_tokens=3).json()["error"]
    assert error["param"] == "truncate_prompt_tokens" and "images or videos" in error["message"]
    assert harness.chat([IMAGE], truncate_prompt_tokens=500).status_code == 200


@pytest.mark.parametrize("flag", [False, True])
def test_logprobs_show_token_ids(harness: Any, flag: bool) -> None:
    harness.app(return_tokens_as_token_ids=flag)
    requested = {} if flag else {"return_tokens_as_token_ids": True}
    ids = [*harness.engine.answer, harness.engine.eos]
    content = harness.chat(logprobs=True, top_logprobs=2, **requested).json()["choices"][0]["logprobs"]["content"]
    assert [e["token"] for e in content] == [f"token_id:{t}" for t in ids]
    assert [e["top_logprobs"][1]["token"] for e in content] == ["token_id:300"] * len(ids)
    assert bytes(content[0]["bytes"]) == harness.tokenizer.get_token_bytes(ids[0])
    shown = harness.complete(logprobs=2, max_tokens=100, **requested).json()["choices"][0]["logprobs"]
    plain = harness.complete(logprobs=2, max_tokens=100, return_tokens_as_token_ids=False).json()["choices"][0][
        "logprobs"
    ]
    assert shown["tokens"] == [f"token_id:{t}" for t in ids] and shown["text_offset"] == plain["text_offset"]
    assert set(shown["top_logprobs"][0]) == {f"token_id:{ids[0]}", "token_id:300"}
    assert plain["tokens"][0] == harness.tokenizer.decode(ids[:1])
    chunks = harness.events(harness.chat(logprobs=True, stream=True, **requested))
    assert chunks[1]["choices"][0]["logprobs"]["content"][0]["token"] == f"token_id:{ids[0]}"


DRAWING: dict[str, list[Any]] = {
    "model": [None, "alias"], "max_tokens": [None, 0, 7], "temperature": [None, 0, 1.5], "top_p": [None, 0.5],
    "top_k": [-1, 5], "min_p": [0.0, 0.5], "n": [None, 0, 3], "stop": [None, "a", ["a", "b"]],
    "stop_token_ids": [None, [], [3]], "ignore_eos": [True, False], "seed": [None, -1, 5], "presence_penalty": [0, 2.5],
    "frequency_penalty": [None, -1], "repetition_penalty": [1, 0.5], "stream": [None, True, False],
}  # fmt: skip
"""Values of the fields that make a request plain."""


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest])
def test_a_plain_request_has_nothing_that_a_check_refuses_or_a_header_names(
    kind: type[ChatRequest] | type[CompletionRequest],
) -> None:
    requested = {"messages": PLAIN} if kind is ChatRequest else {"prompt": "One"}
    assert set(kind.plain) == {*DRAWING, *requested}
    rng = random.Random(7)
    nothing = FieldContext(mentions=lambda name: False)
    for _ in range(300):
        chosen = rng.sample(sorted(DRAWING), rng.randint(0, len(DRAWING)))
        body = kind(**requested, **{name: rng.choice(DRAWING[name]) for name in chosen})
        assert body.is_plain
        body.check()
        assert body.list_ignored_fields(nothing) == []
        body.drop_bulky_fields()
        assert body.is_plain or kind is CompletionRequest, "dropping a field must not look as if another were sent"
    for more in ({"user": "me"}, {"cache_salt": None}):
        assert not kind.model_validate({**requested, **more}).is_plain, (
            "an unknown field must be named, a salt be checked"
        )


def test_a_plain_request_has_a_prompt() -> None:
    assert not CompletionRequest(prompt=None).is_plain and not BatchChatRequest(messages=[PLAIN]).is_plain
