"""/v1/chat/completions over a scripted engine: answers, streams, usage, images."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from trencadis.server.text.chat_template import ChatTemplate

ANSWER = "Hello wörld, 日本!"
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def test_answer(harness: Any) -> None:
    response = harness.chat(model="alias")
    body = response.json()
    assert response.status_code == 200
    assert body["id"].startswith("chatcmpl-") and body["object"] == "chat.completion" and body["model"] == "alias"
    assert body["system_fingerprint"].startswith("trencadis-")
    choice = body["choices"][0]
    absent = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "reasoning"))
    assert choice["message"] == {"role": "assistant", "content": ANSWER, **absent}
    assert (choice["index"], choice["finish_reason"], choice["stop_reason"], choice["logprobs"]) == (
        0,
        "stop",
        None,
        None,
    )
    usage, request = body["usage"], harness.engine.submitted[0][0]
    assert usage["prompt_tokens"] == len(request.tokens)
    assert usage["completion_tokens"] == len(harness.engine.answer) + 1
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 3, "image_tokens": 0}
    assert request.params.max_tokens == 1024 - len(request.tokens) and request.params.temperature == 1.0
    assert not harness.engine.aborted


def test_stream(harness: Any) -> None:
    chunks = harness.events(harness.chat(stream=True))
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all(c["object"] == "chat.completion.chunk" and "usage" not in c for c in chunks)
    assert all(set(c["choices"][0]["delta"]) == {"content"} for c in chunks[1:])
    assert "".join(c["choices"][0]["delta"]["content"] for c in chunks) == ANSWER
    assert [c["choices"][0]["finish_reason"] for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop" and "stop_reason" in chunks[-1]["choices"][0]
    assert len({c["id"] for c in chunks}) == 1


def test_stream_usage(harness: Any) -> None:
    chunks = harness.events(harness.chat(stream=True, stream_options={"include_usage": True}))
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == len(harness.engine.answer) + 1
    assert all("usage" not in c for c in chunks[:-1])
    chunks = harness.events(
        harness.chat(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True})
    )
    counts = [c["usage"]["completion_tokens"] for c in chunks]
    assert counts == sorted(counts) and all("usage" in c for c in chunks)
    harness.app(enable_force_include_usage=True)
    assert harness.events(harness.chat(stream=True))[-1]["choices"] == []


def test_n(harness: Any) -> None:
    body = harness.chat(n=3).json()
    assert [c["index"] for c in body["choices"]] == [0, 1, 2]
    assert {c["message"]["content"] for c in body["choices"]} == {ANSWER}
    chunks = harness.events(harness.chat(n=2, stream=True))
    texts = ["", ""]
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["delta"].get("content", "")
    assert texts == [ANSWER, ANSWER]
    assert sum(c["choices"][0]["finish_reason"] is not None for c in chunks) == 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("include", [False, True])
def test_stop_string_across_tokens(harness: Any, stream: bool, include: bool) -> None:
    response = harness.chat(stop=["rld, "], stream=stream, include_stop_str_in_output=include)
    if stream:
        chunks = harness.events(response)
        text = "".join(c["choices"][0]["delta"]["content"] for c in chunks)
        last = chunks[-1]["choices"][0]
    else:
        last = response.json()["choices"][0]
        text = last["message"]["content"]
    assert text == "Hello wörld, "[: 13 if include else 8]
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", "rld, ")
    assert harness.engine.aborted == [(harness.engine.submitted[0][0].id, 0)]


def test_stop_token_and_length(harness: Any) -> None:
    token = harness.engine.answer[2]
    choice = harness.chat(stop_token_ids=[token]).json()["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", token)
    assert ANSWER.startswith(choice["message"]["content"])
    assert harness.tokenizer.decode(harness.engine.answer[:2]) == choice["message"]["content"]
    body = harness.chat(max_completion_tokens=2, max_tokens=5).json()
    assert body["choices"][0]["finish_reason"] == "length" and body["usage"]["completion_tokens"] == 2
    # a character that the limit cuts reads as the replacement character
    cut = next(i for i, t in enumerate(harness.engine.answer) if harness.tokenizer.get_token_bytes(t)[-1] >= 0xC0)
    assert harness.chat(max_tokens=cut + 1).json()["choices"][0]["message"]["content"].endswith("�")


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(harness: Any, stream: bool) -> None:
    response = harness.chat(logprobs=True, top_logprobs=5, stream=stream)
    if stream:
        content = [e for c in harness.events(response) for e in (c["choices"][0]["logprobs"] or {}).get("content", [])]
    else:
        content = response.json()["choices"][0]["logprobs"]["content"]
    assert len(content) == len(harness.engine.answer) + 1
    assert bytes(b for e in content[:-1] for b in e["bytes"]).decode() == ANSWER
    assert all(len(e["top_logprobs"]) == 5 and e["logprob"] == -0.5 for e in content)
    assert content[0]["top_logprobs"][4]["logprob"] == -9999.0
    assert set(content[0]) == {"token", "logprob", "bytes", "top_logprobs"}
    plain = harness.chat(logprobs=True).json()["choices"][0]["logprobs"]["content"]
    assert all(e["top_logprobs"] == [] for e in plain)


def test_prompt_logprobs_and_ids(harness: Any) -> None:
    body = harness.chat(prompt_logprobs=1, return_token_ids=True).json()
    tokens = harness.engine.submitted[0][0].tokens
    assert body["prompt_token_ids"] == tokens and body["choices"][0]["token_ids"] == [
        *harness.engine.answer,
        harness.engine.eos,
    ]
    assert body["prompt_logprobs"][0] is None and len(body["prompt_logprobs"]) == len(tokens)
    assert body["prompt_logprobs"][1][str(tokens[1])]["rank"] == 1


@pytest.mark.parametrize(
    "part",
    [
        IMAGE,
        {"type": "image_url", "image_url": "data:image/png;base64,AAAA"},
        {"type": "input_image", "image_url": "data:image/png;base64,AAAA"},
        {"type": "input_image", "image_url": {"url": "data:image/png;base64,AAAA"}, "detail": "low"},
        {"type": "image", "image": "data:image/png;base64,AAAA"},
    ],
)
def test_image(harness: Any, part: Any) -> None:
    body = harness.chat([{"type": "text", "text": "<|image_pad|> see"}, part], return_image_sizes=True).json()
    request, pixels = harness.engine.submitted[0]
    assert [s.offset for s in request.spans] == [request.tokens.index(harness.service.config.image_token)]
    assert request.tokens.count(harness.service.config.image_token) == 6
    assert request.positions == b"p" and request.delta == -2 and pixels[0].shape == (24, 1176)
    assert harness.images.received == [("data:image/png;base64,AAAA", "messages[0].content[1]")]
    details = body["usage"]["prompt_tokens_details"]
    assert details["image_tokens"] == 6
    seen = {"width": 84, "height": 56, "grid": [1, 4, 6], "tokens": 6, "original_width": 90, "original_height": 60}
    assert details["images"] == [seen]


def test_text_template_takes_images(harness: Any) -> None:
    source = "{% for m in messages %}{{ m.content + '<|im_end|>' }}{% endfor %}"
    harness.service.template = ChatTemplate(source, harness.tokenizer)
    assert harness.service.template.content_format == "string"
    assert harness.chat([{"type": "text", "text": "a"}, IMAGE, {"type": "text", "text": "b"}]).status_code == 200
    tokens = harness.engine.submitted[0][0].tokens
    assert (
        harness.tokenizer.decode(tokens, False)
        == "<|vision_start|>" + "<|image_pad|>" * 6 + "<|vision_end|>\na\nb<|im_end|>"
    )


def test_a_template_of_parts_alone_shows_contents_that_are_strings(harness: Any) -> None:
    """As vLLM has it: a text of any role is a list with one part for such a template."""
    source = "{% for m in messages %}{% for p in m.content %}{{ p.text + '<|im_end|>' }}{% endfor %}{% endfor %}"
    harness.service.template = ChatTemplate(source, harness.tokenizer)
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    shown = []
    for messages in (said, [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in said]):
        assert harness.call("/v1/chat/completions", {"messages": messages}).status_code == 200
        shown.append(harness.tokenizer.decode(harness.engine.submitted[-1][0].tokens, False))
    assert shown == ["Be brief.<|im_end|>Hi<|im_end|>"] * 2


def test_parameters_reach_the_engine(harness: Any) -> None:
    harness.chat(
        temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, seed=11, presence_penalty=0.5, frequency_penalty=-0.5,
        repetition_penalty=1.1, logit_bias={"5": 500}, min_tokens=2, max_tokens=9, ignore_eos=True, priority=3,
        cache_salt="s", skip_special_tokens=False,
    )  # fmt: skip
    request = harness.engine.submitted[0][0]
    p = request.params
    assert (p.temperature, p.top_p, p.top_k, p.min_p, p.seed) == (0.5, 0.9, 7, 0.1, 11)
    assert (p.presence_penalty, p.frequency_penalty, p.repetition_penalty) == (0.5, -0.5, 1.1)
    assert (p.logit_bias, p.min_tokens, p.max_tokens, p.ignore_eos) == ({5: 100.0}, 2, 9, True)
    assert (request.priority, request.salt) == (3, "s")


@pytest.mark.parametrize("stream", [False, True])
def test_special_tokens_inside_an_answer_are_kept_on_request_and_its_end_is_not(harness: Any, stream: bool) -> None:
    harness.engine.answer = [
        *harness.engine.answer[:2],
        harness.tokenizer.find_token_id("<|vision_pad|>"),
        *harness.engine.answer[2:],
    ]
    begun = harness.tokenizer.decode(harness.engine.answer[:2])

    def text(**fields: Any) -> str:
        response = harness.chat(stream=stream, **fields)
        if not stream:
            return str(response.json()["choices"][0]["message"]["content"])
        return "".join(c["choices"][0]["delta"]["content"] for c in harness.events(response))

    kept = f"{begun}<|vision_pad|>{ANSWER[len(begun) :]}"
    assert text() == ANSWER and text(skip_special_tokens=False) == kept
    assert text(skip_special_tokens=False, include_stop_str_in_output=True) == f"{kept}<|im_end|>"


def test_continue_and_tools(harness: Any) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "The answer"}]
    body = harness.call("/v1/chat/completions", {"messages": messages, "continue_final_message": True}).json()
    assert harness.tokenizer.decode(harness.engine.submitted[0][0].tokens, False).endswith("assistant\nThe answer")
    assert body["choices"][0]["message"]["role"] == "assistant"
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert harness.chat(tools=tools, tool_choice="none").status_code == 200
    roles = [{"role": r, "content": None} for r in ("developer", "user", "assistant", "tool")]
    assert harness.call("/v1/chat/completions", {"messages": roles}).status_code == 200


def test_ignored_fields_are_named(harness: Any) -> None:
    response = harness.chat(user="u", nonsense=1, made_up="x", parallel_tool_calls=True)
    assert response.status_code == 200
    assert response.headers["x-ignored-fields"] == "made_up,nonsense,parallel_tool_calls,user"
    assert "x-ignored-fields" not in harness.chat().headers
    harness.app(strict_request_fields=True)
    assert harness.chat(nonsense=1).json()["error"]["param"] == "nonsense"


def test_an_output_limit_ends_where_the_context_does(harness: Any) -> None:
    """A client that always asks for the same number is served until its prompt fills the context."""
    harness.app()
    most = harness.service.max_model_len
    for fields in ({"max_tokens": most}, {"max_completion_tokens": most - 1}):
        assert harness.chat(**fields).status_code == 200
        request = harness.engine.submitted[-1][0]
        assert request.params.max_tokens == most - len(request.tokens)
    assert harness.complete([300] * (most - 3)).status_code == 200, "16 is the default, which nobody asked for"
    assert harness.engine.submitted[-1][0].params.max_tokens == 3
    harness.service.defaults = replace(harness.service.defaults, cap=5)
    for path, fields in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/completions", {"prompt": "a"}),
    ):
        for requested, given in ((3, 3), (100, 5)):
            assert harness.call(path, {**fields, "max_tokens": requested}).status_code == 200
            assert harness.engine.submitted[-1][0].params.max_tokens == given
