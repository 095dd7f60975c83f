"""Every event of a stream: its order, its type in the clients' models, and that a whole answer is equal.

``python -m tests.dialects.test_events`` writes the golden files anew.
"""

from __future__ import annotations

import json
import re
import typing
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.calls.conftest import SPECIAL, templated_app
from tests.dialects.dialect_answers import SCRIPTS, Script
from tests.fakes.scripted_app import ScriptedApp, join_deltas
from tests.fakes.text_checkpoint import TEMPLATE, write_text_checkpoint

GOLDEN = Path(__file__).parent / "golden"
PATHS = {"responses": "/v1/responses", "messages": "/v1/messages"}
IDS = re.compile(r"\b(resp|msg|rs|fc|call|toolu)_[0-9a-f]{24,32}\b")
SHOWN = ("delta", "text", "thinking", "partial_json")


Apps = Callable[[str], ScriptedApp]


@pytest.fixture(scope="module")
def apps(tagged: Path) -> Apps:
    """An application for each template."""
    return cache(partial(templated_app, tagged))


def run(apps: Apps, api: str, script: Script, stream: bool) -> Any:
    harness = apps(script.template)
    harness.engine.answer, harness.engine.break_at = harness.tokenizer.encode(script.answer), script.breaks
    body = script.responses(stream=stream) if api == "responses" else script.messages(stream=stream)
    return harness.call(PATHS[api], body)


def events(response: Any) -> list[dict[str, Any]]:
    """The events' data, whose type is that of the event."""
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream")
    blocks = response.text.split("\n\n")
    assert blocks.pop() == ""
    made = []
    for block in blocks:
        name, data = block.split("\n")
        made.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {made[-1]['type']}"
    return made


def clean(value: Any) -> Any:
    """Without what is made anew every time."""
    names: dict[str, str] = {}
    text = IDS.sub(lambda m: names.setdefault(m[0], f"{m[1]}_{len(names)}"), json.dumps(value, ensure_ascii=False))
    text = re.sub(r'"(created_at|completed_at)": \d+', r'"\1": 0', text)
    return json.loads(re.sub(r'"request_id": "[0-9a-f]{32}"', '"request_id": "r"', text))


def written(found: list[dict[str, Any]]) -> Iterator[str]:
    """A line for each event; neighbouring deltas of a block share one, with their text in one piece."""

    def key(one: dict[str, Any]) -> Any:
        return (one["type"], one.get("output_index", one.get("index")), one.get("delta", {})) if not piece(one) else (
            one["type"], one.get("output_index", one.get("index")))  # fmt: skip

    for _, group in groupby(clean(found), key):
        some = list(group)
        first = {k: v for k, v in some[0].items() if k not in ("type", "sequence_number")}
        text = "".join(piece(one) for one in some)
        if text:
            holder = first["delta"] if isinstance(first["delta"], dict) else first
            holder[next(k for k in SHOWN if k in holder)] = text
            if "logprobs" in first:
                first["logprobs"] = [p["token"] for one in some for p in one["logprobs"]]
        times = f" x{len(some)}" if len(some) > 1 else ""
        yield f"{some[0]['type']}{times} {json.dumps(first, ensure_ascii=False)}"


def piece(one: dict[str, Any]) -> str:
    """The text that an event adds."""
    delta = one.get("delta")
    if isinstance(delta, dict):
        return str(next((delta[k] for k in SHOWN if k in delta), ""))
    return delta or ""


@cache
def models() -> dict[str, Any]:
    """The clients' models by the type of event."""
    from anthropic.types import RawMessageStreamEvent
    from openai.types.responses import ResponseStreamEvent

    found: dict[str, Any] = {}
    for union in (ResponseStreamEvent, RawMessageStreamEvent):
        for one in typing.get_args(typing.get_args(union)[0]):
            found[typing.get_args(one.model_fields["type"].annotation)[0]] = one
    return found


def check_typed(found: list[dict[str, Any]]) -> None:
    """Holds every event against its published type, without any conversion."""
    for one in found:
        if one["type"] not in ("ping", "error"):
            models()[one["type"]].model_validate(one, strict=True)


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("api", PATHS)
def test_events_are_those_of_the_golden_file(apps: Apps, api: str, name: str) -> None:
    found = events(run(apps, api, SCRIPTS[name], True))
    check_typed(found)
    lines = (GOLDEN / f"{api} {name}.txt".replace(" ", "_")).read_text().splitlines()
    assert list(written(found)) == lines
    if api == "responses":
        assert [one["sequence_number"] for one in found] == list(range(len(found)))


def uncounted(lines: list[str]) -> list[str]:
    """The lines of ``written`` without the numbers of deltas."""
    return [re.sub(r"^([\w.]+) x\d+ ", r"\1 ", line) for line in lines]


@pytest.mark.parametrize("count", [2, 5, 1000])
@pytest.mark.parametrize("name", [n for n, s in SCRIPTS.items() if s.breaks is None])
@pytest.mark.parametrize("api", PATHS)
def test_deltas_of_several_tokens_have_the_events_of_the_golden_file(
    tagged: Path, api: str, name: str, count: int
) -> None:
    """But for their number: the text of a block, and all events around it, are those of deltas of one token."""

    def apps(template: str) -> ScriptedApp:
        harness = templated_app(tagged, template)
        join_deltas(harness.engine, count)
        return harness

    found = events(run(apps, api, SCRIPTS[name], True))
    check_typed(found)
    lines = (GOLDEN / f"{api} {name}.txt".replace(" ", "_")).read_text().splitlines()
    assert uncounted(list(written(found))) == uncounted(lines)
    single = events(run(cache(partial(templated_app, tagged)), api, SCRIPTS[name], True))
    assert len(found) < len(single) or sum(map(bool, map(piece, single))) <= 3


def content(body: dict[str, Any]) -> Any:
    """An answer without usage, with the ids counted."""
    return clean({k: v for k, v in body.items() if k != "usage"}), body["usage"]


@pytest.mark.parametrize("name", [n for n, s in SCRIPTS.items() if s.breaks is None])
def test_a_stream_and_a_whole_answer_are_equal(apps: Apps, name: str) -> None:
    whole = run(apps, "responses", SCRIPTS[name], False).json()
    found = events(run(apps, "responses", SCRIPTS[name], True))
    assert content(found[-1]["response"]) == content(whole)
    items = [one["item"] for one in found if one["type"] == "response.output_item.done"]
    assert items == found[-1]["response"]["output"]
    usage = whole["usage"]
    assert usage["input_tokens"] + usage["output_tokens"] == usage["total_tokens"]
    assert usage["output_tokens_details"]["reasoning_tokens"] <= usage["output_tokens"]

    from anthropic.types import Message

    message = run(apps, "messages", SCRIPTS[name], False).json()
    Message.model_validate(message, strict=True)
    stream = events(run(apps, "messages", SCRIPTS[name], True))
    made = joined(stream)
    assert content(made) == content(message)
    assert made["usage"]["input_tokens"] + made["usage"]["cache_read_input_tokens"] == usage["input_tokens"]
    assert made["usage"]["output_tokens"] == usage["output_tokens"]


def joined(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a stream adds up to; every delta must be of its block's kind, in the block that is open."""
    kinds = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "thinking",
             "input_json_delta": "tool_use"}  # fmt: skip
    message: dict[str, Any] = {}
    block: dict[str, Any] = {}
    for one in found:
        match one["type"]:
            case "message_start":
                message = one["message"]
            case "content_block_start":
                assert one["index"] == len(message["content"]) and not block
                block = {**one["content_block"], "json": ""}
                message["content"].append(block)
            case "content_block_delta":
                delta = dict(one["delta"])
                assert kinds[delta.pop("type")] == block["type"] and one["index"] == len(message["content"]) - 1
                key, text = delta.popitem()
                key = "json" if key == "partial_json" else key
                block[key] = block[key] + text
            case "content_block_stop":
                given = block.pop("json")
                if block["type"] == "tool_use":
                    try:
                        block["input"] = json.loads(given)
                    except ValueError:
                        block["input"] = {"INVALID_JSON": given}
                if block["type"] == "text":
                    block["citations"] = None
                block = {}
            case "message_delta":
                message |= one["delta"]
                message["usage"] = one["usage"]
    assert found[-1]["type"] == "message_stop" and not block
    return message


def test_silence_is_filled_in_the_words_of_the_api(serve: Callable[..., ScriptedApp]) -> None:
    harness = serve(TEMPLATE, "ö", sse_keep_alive_interval=0.02)
    harness.engine.delay = 0.1
    kinds = [one["type"] for one in events(harness.call(PATHS["messages"], SCRIPTS["text"].messages(stream=True)))]
    assert kinds.count("ping") > 1 and kinds[0] == "message_start"
    assert ": keep-alive\n\n" in harness.call(PATHS["responses"], SCRIPTS["text"].responses(stream=True)).text


def rewrite() -> None:
    """Writes the golden files anew."""
    with TemporaryDirectory() as folder:
        apps = partial(templated_app, write_text_checkpoint(Path(folder), SPECIAL))
        for api in PATHS:
            for name, script in SCRIPTS.items():
                lines = written(events(run(apps, api, script, True)))
                (GOLDEN / f"{api} {name}.txt".replace(" ", "_")).write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    rewrite()
