"""/v1/completions over a scripted engine."""

from __future__ import annotations

from typing import Any

import pytest

ANSWER = "Hello wörld, 日本!"


def test_answer(rig: Any) -> None:
    body = rig.complete().json()
    assert body["id"].startswith("cmpl-") and body["object"] == "text_completion"
    assert body["choices"][0]["text"] == ANSWER[: len(body["choices"][0]["text"])]
    assert rig.engine.submitted[0][0].params.max_tokens == 16
    assert body["usage"]["completion_tokens"] <= 16
    full = rig.complete(max_tokens=100).json()
    assert full["choices"][0]["text"] == ANSWER and full["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("ids", [False, True])
def test_list_of_prompts(rig: Any, ids: bool) -> None:
    prompts: Any = ["One", "Two words", "Three"]
    if ids:
        prompts = [rig.tokenizer.encode(p) for p in prompts]
    body = rig.complete(prompts, n=2, max_tokens=100).json()
    assert [c["index"] for c in body["choices"]] == list(range(6))
    assert {c["text"] for c in body["choices"]} == {ANSWER}
    assert body["usage"]["prompt_tokens"] == sum(len(rig.tokenizer.encode(p)) for p in ("One", "Two words", "Three"))
    chunks = rig.events(rig.complete(prompts, max_tokens=100, stream=True, stream_options={"include_usage": True}))
    texts = ["", "", ""]
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == [ANSWER] * 3 and chunks[-1]["usage"]["completion_tokens"] == 3 * (len(rig.engine.answer) + 1)


def test_one_prompt_of_ids(rig: Any) -> None:
    ids = rig.tokenizer.encode("One")
    assert rig.complete(ids).status_code == 200
    assert rig.engine.submitted[0][0].tokens == ids


def test_special_tokens_are_read(rig: Any) -> None:
    rig.complete("<|im_start|>user\nHi<|im_end|>")
    tokens = rig.engine.submitted[0][0].tokens
    assert tokens[0] == rig.tokenizer.token_id("<|im_start|>") and tokens[-1] == rig.tokenizer.token_id("<|im_end|>")


def test_echo_with_logprobs(rig: Any) -> None:
    body = rig.complete("Hi there", echo=True, logprobs=2, max_tokens=3).json()
    choice = body["choices"][0]
    logprobs = choice["logprobs"]
    assert choice["text"].startswith("Hi there")
    assert "".join(logprobs["tokens"]).startswith("Hi there") and len(logprobs["tokens"]) == 3 + len(
        rig.tokenizer.encode("Hi there")
    )
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    assert logprobs["token_logprobs"][1] == -0.5 and len(logprobs["top_logprobs"][1]) == 2
    offsets = logprobs["text_offset"]
    assert offsets == [sum(map(len, logprobs["tokens"][:i])) for i in range(len(offsets))]


def test_score_only(rig: Any) -> None:
    body = rig.complete("Hi there", echo=True, logprobs=0, max_tokens=0).json()
    choice = body["choices"][0]
    assert choice["text"] == "Hi there" and body["usage"]["completion_tokens"] == 0
    assert choice["logprobs"]["tokens"] == [
        rig.tokenizer.token_bytes(t).decode() for t in rig.tokenizer.encode("Hi there")
    ]
    texts = choice["logprobs"]["tokens"]
    assert choice["logprobs"]["top_logprobs"] == [None, *({t: -0.5} for t in texts[1:])]
    assert rig.complete("Hi there", echo=True, max_tokens=0).json()["choices"][0]["prompt_logprobs"] is None


@pytest.mark.parametrize("stream", [False, True])
def test_no_candidates_leaves_the_sampled_token(rig: Any, stream: bool) -> None:
    response = rig.complete(logprobs=0, max_tokens=2, stream=stream)
    parts = [c["choices"][0]["logprobs"] for c in (rig.events(response) if stream else [response.json()])]
    tokens = [t for p in parts for t in p["tokens"]]
    assert len(tokens) == 2 and [x for p in parts for x in p["token_logprobs"]] == [-0.5, -0.5]
    assert [x for p in parts for x in p["top_logprobs"]] == [{t: -0.5} for t in tokens]


@pytest.mark.parametrize(("fields", "most"), [({"logprobs": 2}, 2), ({"logprobs": 0}, 1), ({"prompt_logprobs": 3}, 3),
                                              ({"logprobs": 4, "prompt_logprobs": 2}, 2),
                                              ({"logprobs": 1, "prompt_logprobs": 4}, 4)])  # fmt: skip
def test_echo_scores_the_prompt(rig: Any, fields: dict[str, int], most: int) -> None:
    for n in (1, 2):
        for choice in rig.complete("Hi there", echo=True, max_tokens=2, n=n, **fields).json()["choices"]:
            tokens = rig.engine.submitted[-1][0].tokens
            table = choice["prompt_logprobs"]
            assert table[0] is None and len(table) == len(tokens)
            for token, entry in zip(tokens[1:], table[1:], strict=True):
                assert len(entry) == most and entry[str(token)]["logprob"] == -0.5
            if "logprobs" in fields:
                head = choice["logprobs"]["top_logprobs"][: len(tokens)]
                assert head[0] is None and all(len(x) == max(1, fields["logprobs"]) for x in head[1:])
    assert rig.complete("Hi there", logprobs=2).json()["choices"][0]["prompt_logprobs"] is None


def test_stream_logprobs_and_echo(rig: Any) -> None:
    chunks = rig.events(rig.complete("Hi", stream=True, logprobs=1, max_tokens=100))
    offsets = [o for c in chunks for o in c["choices"][0]["logprobs"]["text_offset"]]
    assert offsets == sorted(offsets) and len(offsets) == len(rig.engine.answer) + 1
    chunks = rig.events(rig.complete("Hi", stream=True, echo=True, max_tokens=100))
    assert "".join(c["choices"][0]["text"] for c in chunks) == "Hi" + ANSWER
    assert rig.complete("Hi", echo=True, prompt_logprobs=1).json()["choices"][0]["prompt_logprobs"][0] is None


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
def test_refused(rig: Any, fields: dict[str, Any], param: str, text: str) -> None:
    response = rig.call("/v1/completions", {"prompt": "Hi", **fields})
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"] == param and text in error["message"]
    assert len(error["message"]) < 200


def test_one_failure_ends_all(rig: Any) -> None:
    rig.engine.fail_at = 2
    response = rig.complete(["a", "b", "c"])
    assert response.status_code == 503
    assert {i for i, _ in rig.engine.aborted} == {r.id for r, _ in rig.engine.submitted}
    assert rig.made.state.trencadis.admission.inside == [0, 0, 0]


def test_more_tokens_than_the_context_are_counted(rig: Any) -> None:
    """A client counts in order to know how much must go."""
    rig.app()
    most, words = rig.service.max_model_len, "one two " * 3000
    ids = rig.tokenizer.encode(words)
    assert len(ids) > 2 * most and rig.complete(words).status_code == 400
    told = rig.call("/tokenize", {"prompt": words}).json()
    assert (told["tokens"], told["count"], told["max_model_len"]) == (ids, len(ids), most)
    talk = [{"role": "user", "content": words}]
    count = rig.call("/tokenize", {"messages": talk}).json()["count"]
    assert (
        count > len(ids) and rig.call("/v1/messages/count_tokens", {"messages": talk}).json()["input_tokens"] == count
    )
    endless = rig.call("/tokenize", {"prompt": words * 100})
    assert endless.status_code == 400 and endless.json()["error"]["param"] == "input_tokens"


def test_what_cannot_run_has_tokens_too(rig: Any) -> None:
    rig.app()
    assert rig.call("/tokenize", {"prompt": ""}).json()["tokens"] == []
    placeholder = rig.tokenizer.token(rig.service.config.placed)
    assert rig.call("/tokenize", {"prompt": placeholder}).json()["tokens"] == [rig.service.config.placed]
    assert rig.complete("").status_code == rig.complete(placeholder).status_code == 400
