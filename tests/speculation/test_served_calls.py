"""A server that drafts: tool calls of its answers, streamed and not, are those that the model writes."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.fakes import scripted_draws
from tests.traffic.server_process import RunningServer, server
from tests.traffic.written_calls import SCHEMAS, WrittenAnswer, written
from trencadis.assets import demo_path

TOOLS = [{"type": "function", "function": {"name": n, "description": "d", "parameters": s}} for n, s in SCHEMAS.items()]
NAME = "demo"
COUNT = 60
ANSWERS = [written("hermes", random.Random(seed)) for seed in range(COUNT)]
TAGS = "<tool_call>", "</tool_call>"
LONGEST = 300


def is_plain(answer: WrittenAnswer) -> bool:
    """Returns True for a text of no more than LONGEST characters in which only calls have tags: the tokenizer would
    read others as such, too.
    """
    return len(answer.text) <= LONGEST and all(answer.text.count(tag) == len(answer.calls) for tag in TAGS)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Drafts of n-grams, of which the prompt's list of tools and the example of its template have many."""
    folder = tmp_path_factory.mktemp("calls")
    (folder / "scripts.json").write_text(json.dumps([answer.text for answer in ANSWERS]), encoding="utf-8")
    flags = (
        "--model", str(demo_path()), "--served-model-name", NAME, "--dtype", "float32", "--max-num-seqs", "8",
        "--kv-cache-memory-bytes", "128MiB", "--max-model-len", "2048",
        "--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--spec-method", "ngram", "--spec-tokens", "5",
        "--ngram-prompt-lookup-min", "1", "--spec-always", *scripted_draws.FLAGS,
    )  # fmt: skip
    environ: Any = {scripted_draws.SCRIPTS: str(folder / "scripts.json")}
    with server(folder, *flags, **environ) as running:
        yield running


def ask(running: RunningServer, number: int, **fields: Any) -> Any:
    """Answer ``number`` of the script, which the model chooses to give."""
    body = {
        "model": NAME, "messages": [{"role": "user", "content": "What is the weather?"}], "seed": number,
        "tools": TOOLS, "tool_choice": "auto", "max_tokens": 2 * LONGEST, **fields,
    }  # fmt: skip
    response = running.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    return response


def whole(running: RunningServer, number: int) -> tuple[str, list[tuple[str, str]], str]:
    """Content, calls and reason of an answer that comes whole."""
    (choice,) = ask(running, number).json()["choices"]
    message = choice["message"]
    calls = [(one["function"]["name"], one["function"]["arguments"]) for one in message.get("tool_calls") or []]
    return message["content"] or "", calls, choice["finish_reason"]


def streamed(running: RunningServer, number: int) -> tuple[tuple[str, list[tuple[str, str]], str], int]:
    """The same of a stream, and the most tokens of one of its events."""
    content, calls, reason, most, before = "", list[tuple[str, str]](), "", 0, 0
    options = {"include_usage": True, "continuous_usage_stats": True}
    for line in ask(running, number, stream=True, stream_options=options).text.split("\n\n"):
        if not line.startswith("data: {"):
            continue
        event = json.loads(line.removeprefix("data: "))
        tokens = event["usage"]["completion_tokens"]
        most, before = max(most, tokens - before), tokens
        for choice in event["choices"]:
            delta, reason = choice["delta"], choice["finish_reason"] or reason
            content += delta.get("content") or ""
            for call in delta.get("tool_calls") or []:
                if "id" in call:
                    calls.append((call["function"]["name"], ""))
                name, arguments = calls[call["index"]]
                calls[call["index"]] = name, arguments + (call["function"].get("arguments") or "")
    return (content, calls, reason), most


def decoded(arguments: str) -> Any:
    """The value of a call's arguments, which may be JSON in a string."""
    value = json.loads(arguments or "{}")
    return json.loads(value) if isinstance(value, str) else value


def test_calls_under_drafts_are_those_that_the_model_writes(running: RunningServer) -> None:
    """Eight answers at a time, with one or several calls, text before and after them, or none."""
    numbers = [number for number, answer in enumerate(ANSWERS) if is_plain(answer)]
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda number: whole(running, number), numbers))
        events = list(pool.map(lambda number: streamed(running, number), numbers))
    called = 0
    for number, (content, calls, reason), (stream, _) in zip(numbers, made, events, strict=True):
        answer = ANSWERS[number]
        assert stream == (content, calls, reason), number
        assert [(name, decoded(arguments)) for name, arguments in calls] == answer.calls, answer.text
        assert content.strip() == answer.content.strip() and reason == ("tool_calls" if calls else "stop")
        called += len(calls)
    accepted = sum(
        float(line.split()[-1])
        for line in running.http.get("/metrics").text.splitlines()
        if line.startswith("vllm:spec_decode_num_accepted_tokens_total")
    )
    print(f"{len(numbers)} answers twice with {called} calls, {accepted:.0f} drafts accepted")
    assert called > 30 and accepted > 200 and max(most for _, most in events) > 1
