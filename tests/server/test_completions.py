"""/v1/completions over a scripted engine."""

from __future__ import annotations

from typing import Any

import pytest

from trencadis.core.request import TokenLogprob
from trencadis.server.routes.openai_output import CompletionLogprobsBuilder

ANSWER = "Hello wörld, 日本!"


def test_answer(harness: Any) -> None:
    body = harness.complete().json()
    assert body["id"].startswith("cmpl-") and body["object"] == "text_completion"
    assert body["choices"][0]["text"] == ANSWER[: len(body["choices"][0]["text"])]
    assert harness.engine.submitted[0][0].params.max_tokens == 16
    assert body["usage"]["completion_tokens"] <= 16
    full = harness.complete(max_tokens=100).json()
    assert full["choices"][0]["text"] == ANSWER and full["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("ids", [False, True])
def test_list_of_prompts(harness: Any, ids: bool) -> None:
    prompts: Any = ["One", "Two words", "Three"]
    if ids:
        prompts = [harness.tokenizer.encode(p) for p in prompts]
    body = harness.complete(prompts, n=2, max_tokens=100).json()
    assert [c["index"] for c in body["choices"]] == list(range(6))
    assert {c["text"] for c in body["choices"]} == {ANSWER}
    assert body["usage"]["prompt_tokens"] == sum(
        len(harness.tokenizer.encode(p)) for p in ("One", "Two words", "Three")
    )
    chunks = harness.events(
        harness.complete(prompts, max_tokens=100, stream=True, stream_options={"include_usage": True})
    )
    texts = ["", "", ""]
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == [ANSWER] * 3 and chunks[-1]["usage"]["completion_tokens"] == 3 * (len(harness.engine.answer) + 1)


def test_one_prompt_of_ids(harness: Any) -> None:
    ids = harness.tokenizer.encode("One")
    assert harness.complete(ids).status_code == 200
    assert harness.engine.submitted[0][0].tokens == ids


def test_special_tokens_are_read(harness: Any) -> None:
    harness.complete("<|im_start|>user\nHi<|im_end|>")
    tokens = harness.engine.submitted[0][0].tokens
    assert tokens[0] == harness.tokenizer.find_token_id("<|im_start|>") and tokens[
        -1
    ] == harness.tokenizer.find_token_id("<|im_end|>")


def test_echo_with_logprobs(harness: Any) -> None:
    body = harness.complete("Hi there", echo=True, logprobs=2, max_tokens=3).json()
    choice = body["choices"][0]
    logprobs = choice["logprobs"]
    assert choice["text"].startswith("Hi there")
    assert "".join(logprobs["tokens"]).startswith("Hi there") and len(logprobs["tokens"]) == 3 + len(
        harness.tokenizer.encode("Hi there")
    )
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    assert logprobs["token_logprobs"][1] == -0.5 and len(logprobs["top_logprobs"][1]) == 2
    offsets = logprobs["text_offset"]
    assert offsets == [sum(map(len, logprobs["tokens"][:i])) for i in range(len(offsets))]


def test_score_only(harness: Any) -> None:
    body = harness.complete("Hi there", echo=True, logprobs=0, max_tokens=0).json()
    choice = body["choices"][0]
    assert choice["text"] == "Hi there" and body["usage"]["completion_tokens"] == 0
    assert choice["logprobs"]["tokens"] == [
        harness.tokenizer.get_token_bytes(t).decode() for t in harness.tokenizer.encode("Hi there")
    ]
    texts = choice["logprobs"]["tokens"]
    assert choice["logprobs"]["top_logprobs"] == [None, *({t: -0.5} for t in texts[1:])]
    assert harness.complete("Hi there", echo=True, max_tokens=0).json()["choices"][0]["prompt_logprobs"] is None


def test_the_token_itself_comes_before_its_candidates(harness: Any) -> None:
    """Also one that is among them: clients of vLLM take the first entry as the token of the prompt or answer."""
    builder = CompletionLogprobsBuilder(harness.tokenizer, 2, as_ids=True)
    first, second = builder.build_lists(
        [TokenLogprob(300, -3.0, 9, [301, 302], [-0.1, -2.0]), TokenLogprob(302, -2.0, 2, [301, 302], [-0.1, -2.0])]
    )["top_logprobs"]
    assert [*(first or {}).items()] == [("token_id:300", -3.0), ("token_id:301", -0.1), ("token_id:302", -2.0)]
    assert [*(second or {}).items()] == [("token_id:302", -2.0), ("token_id:301", -0.1)]


@pytest.mark.parametrize("stream", [False, True])
def test_no_candidates_leaves_the_sampled_token(harness: Any, stream: bool) -> None:
    response = harness.complete(logprobs=0, max_tokens=2, stream=stream)
    parts = [c["choices"][0]["logprobs"] for c in (harness.events(response) if stream else [response.json()])]
    tokens = [t for p in parts for t in p["tokens"]]
    assert len(tokens) == 2 and [x for p in parts for x in p["token_logprobs"]] == [-0.5, -0.5]
    assert [x for p in parts for x in p["top_logprobs"]] == [{t: -0.5} for t in tokens]


@pytest.mark.parametrize(("fields", "most"), [({"logprobs": 2}, 2), ({"logprobs": 0}, 1), ({"prompt_logprobs": 3}, 3),
                                              ({"logprobs": 4, "prompt_logprobs": 2}, 2),
                                              ({"logprobs": 1, "prompt_logprobs": 4}, 4)])  # fmt: skip
def test_echo_scores_the_prompt(harness: Any, fields: dict[str, int], most: int) -> None:
    for n in (1, 2):
        for choice in harness.complete("Hi there", echo=True, max_tokens=2, n=n, **fields).json()["choices"]:
            tokens = harness.engine.submitted[-1][0].tokens
            table = choice["prompt_logprobs"]
            assert table[0] is None and len(table) == len(tokens)
            for token, entry in zip(tokens[1:], table[1:], strict=True):
                assert len(entry) == most and entry[str(token)]["logprob"] == -0.5
            if "logprobs" in fields:
                head = choice["logprobs"]["top_logprobs"][: len(tokens)]
                assert head[0] is None and all(len(x) == max(1, fields["logprobs"]) for x in head[1:])
    assert harness.complete("Hi there", logprobs=2).json()["choices"][0]["prompt_logprobs"] is None


def test_stream_logprobs_and_echo(harness: Any) -> None:
    chunks = harness.events(harness.complete("Hi", stream=True, logprobs=1, max_tokens=100))
    offsets = [o for c in chunks for o in c["choices"][0]["logprobs"]["text_offset"]]
    assert offsets == sorted(offsets) and len(offsets) == len(harness.engine.answer) + 1
    chunks = harness.events(harness.complete("Hi", stream=True, echo=True, max_tokens=100))
    assert "".join(c["choices"][0]["text"] for c in chunks) == "Hi" + ANSWER
    assert harness.complete("Hi", echo=True, prompt_logprobs=1).json()["choices"][0]["prompt_logprobs"][0] is None


@pytest.mark.parametrize(
    ("fields", "param", "text"),
    [
        ({"suffix": "x"}, "suffix", "suffix is not currently supported."),
        ({"prompt": []}, "prompt", "non-empty"),
        ({"prompt": ""}, "prompt", "non-empty"),
        ({"prompt": ["a", ""]}, "prompt", "non-empty"),
        ({"prompt": None}, "prompt", "required"),
        ({"prompt": {"a": 1}}, "prompt", "prompt"),
        ({"prompt": [1000]}, "prompt", "out of vocabulary"),
        ({"prompt": [-1]}, "prompt", "out of vocabulary"),
        ({"prompt": "a <|image_pad|> b"}, "prompt", "without an image"),
        ({"prompt": ["a"] * 1025}, "prompt", "At most 1024 prompts"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens"),
        ({"max_tokens": 2000}, "max_tokens", "cannot be greater than max_model_len=1024"),
        ({"logprobs": 30}, "logprobs", "between 0 and 20"),
        ({"stream": True, "echo": True, "logprobs": 1}, "echo", "streamed"),
        ({"prompt": "word " * 2000}, "input_tokens", "maximum context length is 1024"),
    ],
)
def test_refused(harness: Any, fields: dict[str, Any], param: str, text: str) -> None:
    response = harness.call("/v1/completions", {"prompt": "Hi", **fields})
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"] == param and text in error["message"]
    assert len(error["message"]) < 200


def test_one_failure_ends_all(harness: Any) -> None:
    harness.engine.fail_at = 2
    response = harness.complete(["a", "b", "c"])
    assert response.status_code == 503
    assert {i for i, _ in harness.engine.aborted} == {r.id for r, _ in harness.engine.submitted}
    assert harness.made.state.trencadis.admission.inside == [0, 0, 0]


def test_more_tokens_than_the_context_are_counted(harness: Any) -> None:
    """A client counts in order to know how much must go."""
    harness.app()
    most, words = harness.service.max_model_len, "one two " * 3000
    ids = harness.tokenizer.encode(words)
    assert len(ids) > 2 * most and harness.complete(words).status_code == 400
    reported = harness.call("/tokenize", {"prompt": words}).json()
    assert (reported["tokens"], reported["count"], reported["max_model_len"]) == (ids, len(ids), most)
    conversation = [{"role": "user", "content": words}]
    count = harness.call("/tokenize", {"messages": conversation}).json()["count"]
    assert (
        count > len(ids)
        and harness.call("/v1/messages/count_tokens", {"messages": conversation}).json()["input_tokens"] == count
    )
    endless = harness.call("/tokenize", {"prompt": words * 100})
    assert endless.status_code == 400 and endless.json()["error"]["param"] == "input_tokens"


def test_what_cannot_run_has_tokens_too(harness: Any) -> None:
    harness.app()
    assert harness.call("/tokenize", {"prompt": ""}).json()["tokens"] == []
    placeholder = harness.tokenizer.get_token(harness.service.config.placeholder_token)
    assert harness.call("/tokenize", {"prompt": placeholder}).json()["tokens"] == [
        harness.service.config.placeholder_token
    ]
    assert harness.complete("").status_code == harness.complete(placeholder).status_code == 400
