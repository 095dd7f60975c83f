"""The bytes of answers are bounded before they run, and large answers are written in slices."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.fakes.scripted_app import ScriptedApp
from trencadis.core.errors import BadRequest, QueueFull
from trencadis.core.request import SamplingParams
from trencadis.server.engine.engine_client_and_request_timing import RequestTiming
from trencadis.server.prompts.output_processor import PieceCollector, TextPiece
from trencadis.server.protocol.chat_completions import ChatResponse
from trencadis.server.routes import json_io
from trencadis.server.routes.json_io import LazyItems, SlicedResponse, stream_json, write_json
from trencadis.server.tenants.server_admission_and_byte_budgets import FREE, AnswerBudget, AnswerShape

CHAT = AnswerShape(100, "top_logprobs", "max_tokens")


def sampled(**more: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 100, "n": 1, **more})


@pytest.mark.parametrize(
    ("params", "shape", "field"),
    [
        (sampled(n=64, max_tokens=500, logprobs=20), CHAT, "top_logprobs"),
        (sampled(n=128, max_tokens=30_000), CHAT, "max_tokens"),
        (sampled(prompt_logprobs=20), AnswerShape(32_000, "logprobs", "max_tokens"), "prompt_logprobs"),
        (sampled(logprobs=20), AnswerShape(32_000, "logprobs", "max_tokens", echo=True, repeats_prompt=True), "echo"),
        (sampled(prompt_logprobs=20), AnswerShape(32_000, "logprobs", "max_tokens", stream=True), "prompt_logprobs"),
    ],
)
def test_the_field_that_costs_most_is_named(params: SamplingParams, shape: AnswerShape, field: str) -> None:
    budget = AnswerBudget(4 << 20)
    with pytest.raises(BadRequest, match=f"at most {4 << 20} are allowed. Lower {field}") as refused:
        budget.fit(shape, params)
    assert refused.value.param == field
    assert AnswerBudget(1 << 40).fit(shape, params) > 4 << 20


def test_ordinary_answers_fit_the_default() -> None:
    for params in (sampled(max_tokens=32_000), sampled(max_tokens=4096, logprobs=20), sampled(n=128, max_tokens=4096)):
        assert AnswerBudget().fit(CHAT, params) <= 64 << 20


def test_a_limit_that_the_request_leaves_to_the_server_is_lowered() -> None:
    params = sampled(max_tokens=100_000, logprobs=20)
    size = AnswerBudget().fit(AnswerShape(10, "top_logprobs", ""), params)
    assert 20_000 < (params.max_tokens or 0) < 100_000 and size <= 64 << 20
    stream = sampled(max_tokens=100_000, logprobs=20)
    one = sampled(max_tokens=1, logprobs=20)
    size = AnswerBudget().fit(AnswerShape(10, "top_logprobs", ""), one)
    assert AnswerBudget().fit(AnswerShape(10, "top_logprobs", "", stream=True), stream) == size
    assert stream.max_tokens == 100_000, "a stream holds a token at a time"
    whole = sampled(max_tokens=100_000, logprobs=150_000, n=5, temperature=1.0)
    with pytest.raises(BadRequest, match="Lower top_logprobs or n"):
        AnswerBudget().fit(AnswerShape(10, "top_logprobs", "", stream=True), whole)


def test_prompts_of_one_request_share_the_budget() -> None:
    budget, shape = AnswerBudget(1 << 20), AnswerShape(1000, "logprobs", "max_tokens")
    size = budget.fit(shape, sampled(max_tokens=1, prompt_logprobs=5))
    assert budget.fit(shape, sampled(max_tokens=1, prompt_logprobs=5), 0) == size < 1 << 20
    with pytest.raises(BadRequest, match="prompt_logprobs"):
        budget.fit(shape, sampled(max_tokens=1, prompt_logprobs=5), size)


def test_large_answers_wait_for_each_other_and_small_ones_do_not() -> None:
    budget = AnswerBudget(8 << 20, 16 << 20)
    first, second = budget.hold(8 << 20), budget.hold(8 << 20)
    small = budget.hold(FREE)
    with pytest.raises(QueueFull):
        budget.hold(FREE + 1)
    first.release()
    first.release()
    third = budget.hold(4 << 20)
    joined = budget.hold(2 << 20, third)
    assert joined.size == 6 << 20 and budget.held == 14 << 20
    for charge in (second, small, third, joined):
        charge.release()
    assert budget.held == 0


ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "Hi"}], "logprobs": True, "top_logprobs": 3, "prompt_logprobs": 2,
        "n": 3, "temperature": 1.0, "max_tokens": 40, "return_token_ids": True,
    },
    "/v1/completions": {
        "prompt": ["One two", "three"], "logprobs": 3, "echo": True, "n": 2, "temperature": 1.0, "max_tokens": 40,
        "prompt_logprobs": 2, "return_token_ids": True,
    },
    "/v1/chat/completions/batch": {
        "messages": [[{"role": "user", "content": "Hi"}], [{"role": "user", "content": "Ho"}]], "logprobs": True,
        "top_logprobs": 3, "max_tokens": 40,
    },
    "/v1/responses": {
        "input": "Hi", "include": ["message.output_text.logprobs"], "top_logprobs": 3, "max_output_tokens": 40,
    },
}  # fmt: skip


@pytest.mark.parametrize("path", ASKED)
def test_a_large_answer_says_what_a_small_one_says(
    path: str, harness: ScriptedApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = harness.call(path, ASKED[path])
    assert small.status_code == 200, small.text
    monkeypatch.setattr("trencadis.server.tenants.server_admission_and_byte_budgets.FREE", 0)
    monkeypatch.setattr(json_io, "JSON_SLICE", 3)
    monkeypatch.setattr(json_io, "WRITE", 100)
    large = harness.call(path, ASKED[path])
    assert large.status_code == 200 and large.headers["content-type"] == "application/json"
    first, second = small.json(), large.json()
    for one in (first, second):
        for key in ("id", "created", "created_at", "completed_at"):
            one.pop(key, None)
        for item in one.get("output", ()):
            item.pop("id")
        one["usage"].pop("prompt_tokens_details", None)  # what was cached
    assert first == second and "top_logprobs" in large.text
    assert harness.made.state.trencadis.answers.held == 0


def test_a_stream_of_responses_tells_log_probabilities_again_at_its_end(harness: ScriptedApp) -> None:
    """Each of its last events has them all: they wait until then, and count."""
    asked = ASKED["/v1/responses"]
    answer = harness.call("/v1/responses", asked | {"stream": True}).text
    events = [json.loads(line[6:]) for line in answer.splitlines() if line.startswith("data: ")]
    found = {event["type"].removeprefix("response."): event for event in events}
    told = [one for event in events if event["type"].endswith("text.delta") for one in event["logprobs"]]
    whole = harness.call("/v1/responses", asked).json()["output"][0]["content"][0]["logprobs"]
    assert told == whole and len(told) > 3 and all(len(one["top_logprobs"]) == 3 for one in told)
    assert found["output_text.done"]["logprobs"] == found["content_part.done"]["part"]["logprobs"] == told
    assert found["output_item.done"]["item"]["content"][0]["logprobs"] == told
    assert found["completed"]["response"]["output"][0]["content"][0]["logprobs"] == told
    harness.app(max_answer_bytes=1 << 20)
    long = asked | {"max_output_tokens": 900, "top_logprobs": 10, "stream": True}
    refused = harness.call("/v1/responses", long).json()["error"]
    assert refused["param"] == "top_logprobs"
    assert harness.call("/v1/responses", long | {"stream": False}).status_code == 200
    assert harness.call("/v1/responses", long | {"include": [], "top_logprobs": 0}).status_code == 200
    assert harness.made.state.trencadis.answers.held == 0


def test_a_request_beyond_the_flag_is_refused_before_it_runs(harness: ScriptedApp) -> None:
    harness.app(max_answer_bytes=64 << 10)
    refused = harness.chat(max_tokens=1000, logprobs=True, top_logprobs=20)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "top_logprobs"
    assert not harness.engine.submitted
    refused = harness.call("/v1/completions", {"prompt": "a", "n": 8, "max_tokens": 2000, "temperature": 1.0})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "max_tokens"
    assert harness.chat(max_tokens=10).status_code == 200
    assert harness.made.state.trencadis.answers.held == 0


def test_slices_are_the_text_of_the_model() -> None:
    choice = {
        "index": 0, "message": {"role": "assistant", "content": 'a "choices":[] é'},
        "logprobs": {"content": [{"token": "é", "logprob": -1.5e-7, "bytes": [1], "top_logprobs": []}] * 200},
        "token_ids": list(range(500)),
    }  # fmt: skip
    made = ChatResponse.model_validate(
        {"id": "x", "created": 1, "model": "m", "choices": [choice] * 3, "usage": {"prompt_tokens": 1}}
    )
    written = b"".join(write_json(made))
    assert json.loads(written) == json.loads(made.model_dump_json())
    assert b"".join(write_json(LazyItems([], list))) == b"[]"


def test_slices_are_shorter_the_more_candidates_their_items_have() -> None:
    """64 tokens with 20 candidates each hold the event loop for milliseconds; a chat needs some twenty turns."""
    for candidates, size in ((0, 64), (20, 12), (600, 1)):
        made = list[int]()
        items = [{str(i): i for i in range(candidates)}] * 130

        def make(some: Sequence[Any], made: list[int] = made) -> Sequence[Any]:
            made.append(len(some))
            return some

        assert json.loads(b"".join(LazyItems(items, make).write())) == items
        assert max(made) == size and sum(made) == 130


def test_other_tasks_run_between_slices() -> None:
    """The largest answer of one choice: 32,000 tokens with 20 others each would hold the loop for seconds."""
    count, done, turns = 20_000, [], 0

    async def turn_round() -> None:
        nonlocal turns
        while not done:
            turns += 1
            await asyncio.sleep(0)

    async def write() -> int:
        other, size = asyncio.ensure_future(turn_round()), 0
        made = ChatResponse.model_validate(
            {"id": "x", "created": 1, "model": "m", "choices": [], "usage": {"prompt_tokens": 1}}
        )
        entry = {str(i): {"logprob": -1.0, "rank": i, "decoded_token": "word"} for i in range(21)}
        json_io.set_items(made, "prompt_logprobs", range(count), lambda some: [entry for _ in some], lazy=True)
        begun, longest = time.monotonic(), 0.0
        async for piece in stream_json(made):
            longest, begun = max(longest, time.monotonic() - begun), time.monotonic()
            size += len(piece)
        done.append(1)
        assert longest < 2.5, "a deadline of ten times what is usual"
        await other
        return size

    assert asyncio.run(write()) > 20 << 20 and turns > 200 and done == [1]


@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_client_that_leaves_releases_the_charge(after: int) -> None:
    """Before the head of the answer, before its first byte, and amid it."""

    async def leave() -> list[int]:
        released, sent = list[int](), list[Any]()
        made = ChatResponse.model_validate(
            {"id": "x", "created": 1, "model": "m", "choices": [], "usage": {"prompt_tokens": 1}}
        )
        json_io.set_items(made, "prompt_logprobs", range(100_000), list, lazy=True)

        async def send(message: Any) -> None:
            if len(sent) == after:
                raise OSError
            sent.append(message)

        async def receive() -> Any:
            await asyncio.sleep(60)

        response = SlicedResponse(made, lambda: released.append(1), {})
        with pytest.raises(Exception):  # noqa: B017  (starlette's own, whose name differs by version)
            await response({"type": "http", "asgi": {"spec_version": "2.4"}}, receive, send)
        return released

    assert asyncio.run(leave()) == [1]
    assert json.loads(b"".join(write_json(LazyItems(range(200), list)))) == list(range(200))


def test_a_long_answer_is_kept_in_few_pieces_and_few_gaps(
    harness: ScriptedApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Millions of tokens are legal (64 choices of 30,000 each); what is kept of each is its text."""
    most = [0, 0]
    usual, join = RequestTiming.add_tokens, PieceCollector.add

    def add(self: PieceCollector, piece: TextPiece) -> None:
        join(self, piece)
        most[0] = max(most[0], len(self._waiting))
        assert self._keeps_tokens or not any(one.tokens for one in self.pieces)

    def add_tokens(self: RequestTiming, choice: int, count: int) -> None:
        usual(self, choice, count)
        most[1] = max(most[1], len(self.gaps))

    monkeypatch.setattr(PieceCollector, "add", add)
    monkeypatch.setattr(RequestTiming, "add_tokens", add_tokens)
    asked = {"max_tokens": 900, "ignore_eos": True, "n": 2, "temperature": 1.0}
    whole = harness.chat(**asked).json()
    assert [len(harness.tokenizer.encode(one["message"]["content"])) for one in whole["choices"]] == [900, 900]
    assert most[0] < 64 and most[1] <= 512
    text = harness.call("/metrics").text
    assert re.search(r"vllm:inter_token_latency_seconds_count\{[^}]*\} 1798\.0", text)
    raw = harness.call("/v1/completions", {"prompt": ["a", "b"], **asked, "return_token_ids": True}).json()
    assert [len(one["token_ids"]) for one in raw["choices"]] == [900] * 4
    assert {one["text"] for one in raw["choices"]} == {whole["choices"][0]["message"]["content"]}


WHOLE: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True, "top_logprobs": -1},
    "/v1/completions": {"prompt": "One two", "logprobs": -1, "echo": True},
    "/v1/responses": {"input": "Hi", "include": ["message.output_text.logprobs"], "top_logprobs": 500},
}


@pytest.mark.parametrize("path", WHOLE)
@pytest.mark.parametrize("wide", [5, 1000])
def test_the_whole_vocabulary_is_reported(
    path: str, wide: int, harness: ScriptedApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one piece, in slices and in a thread, and streamed."""
    limit = "max_output_tokens" if path.endswith("responses") else "max_tokens"
    body = WHOLE[path] | {limit: 3}
    assert harness.call(path, body).status_code == 400, "the default stays at 20"
    limits = harness.service.limits
    monkeypatch.setattr(harness.service, "limits", replace(limits, max_logprobs=-1))
    monkeypatch.setattr(json_io, "WIDE", wide)
    first = harness.call(path, body)
    assert first.status_code == 200, first.text
    assert harness.engine.submitted[-1][0].params.logprobs == (500 if path.endswith("responses") else limits.vocab)
    monkeypatch.setattr("trencadis.server.tenants.server_admission_and_byte_budgets.FREE", 0)
    sliced = harness.call(path, body)
    assert sliced.status_code == 200 and len(sliced.text) == pytest.approx(len(first.text), abs=20)
    assert sliced.text.count('"logprob') == first.text.count('"logprob')
    body.pop("echo", None)
    streamed = harness.call(path, body | {"stream": True}).text
    if "completions" not in path or "chat" in path:
        assert streamed.count('"bytes":') % first.text.count('"bytes":') == 0 < streamed.count('"bytes":')
    harness.app(max_answer_bytes=64 << 10)
    monkeypatch.setattr(harness.service, "limits", replace(limits, max_logprobs=-1))
    refused = harness.call(path, body)
    assert refused.status_code == 400 and "Lower" in refused.text
    for value in (-2, limits.vocab + 1):
        names = {"/v1/completions": "logprobs"}
        assert harness.call(path, body | {names.get(path, "top_logprobs"): value}).status_code == 400
