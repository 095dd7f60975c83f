"""What one request may hold: found out while it arrives, before anything is parsed; and the event loop stays free."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest

from tests.hostile import floods
from trencadis.core.errors import BadRequest, TooLarge, TrencadisError
from trencadis.core.json_types import Json
from trencadis.server.http import fastapi_app
from trencadis.server.protocol import base_request, json_body_limits
from trencadis.server.protocol.base_request import FieldContext
from trencadis.server.protocol.chat_completions import ChatRequest
from trencadis.server.protocol.json_body_limits import LONG, SLICE, BodyLimits, BodyScan
from trencadis.server.protocol.models_and_tokenize import DetokenizeRequest, TokenizeRequest
from trencadis.server.routes import json_io

JSON = {"content-type": "application/json"}


def scanned(data: bytes, step: int = SLICE, limits: BodyLimits | None = None) -> BodyScan:
    scan = BodyScan(limits or BodyLimits())
    for at in range(0, len(data), step):
        scan.feed(data[at : at + step])
    scan.finish()
    return scan


def read(data: bytes, step: int = SLICE) -> Any:
    scan = scanned(data, step)
    return json_io.parse_outline(scan.outline, [json_io.text_of(pieces) for pieces in scan.long])


def drawn(draw: random.Random, depth: int = 0) -> Any:
    """A JSON value with short and long strings of awkward characters."""
    kind = draw.random()
    if depth > 3 or kind < 0.4:
        size = draw.choice([0, 3, 50, LONG - 1, LONG, LONG + 1, 9000])
        return "".join(draw.choices('ab"\\\né日👩/,[]{}:', k=size))
    if kind < 0.5:
        return draw.choice([1, 2.5, None, True, -1e9])
    if kind < 0.75:
        return [drawn(draw, depth + 1) for _ in range(draw.randrange(4))]
    return {f'k{i}"': drawn(draw, depth + 1) for i in range(draw.randrange(4))}


@pytest.mark.parametrize("step", [61, 4096, SLICE])
def test_what_is_read_in_slices_is_what_the_parser_reads_whole(step: int) -> None:
    draw = random.Random(step)
    long = 0
    for i in range(25):
        value = [drawn(draw), drawn(draw)]
        data = json.dumps(value, ensure_ascii=i % 2 == 0, indent=i % 3 or None).encode()
        assert read(data, step) == value
        long += len(scanned(data).long)
    assert long > 20


def test_an_escaped_character_may_stand_in_two_slices() -> None:
    value = {"a": "👩" * 3000 + "\\" * 5001 + "\n" * 3000}
    for ascii_only in (True, False):
        data = json.dumps(value, ensure_ascii=ascii_only).encode()
        for step in (5, 997, 4093):
            assert read(data, step) == value


@pytest.mark.parametrize("bad", [b"\xff", b"\n", b"\\x", b"\\u12x", b"\\"])
def test_a_long_string_is_checked_like_a_short_one(bad: bytes) -> None:
    for text in (b"a" * LONG + bad, bad + b"a" * LONG, bad):
        with pytest.raises(ValueError):
            read(b'["' + text + b'"]')


def test_a_number_that_looks_like_a_placeholder_is_a_number() -> None:
    assert read(b'["' + b"a" * LONG + b'", 1.5, 0.0e1, 1e3]') == ["a" * LONG, 1.5, 0.0, 1000.0]


LIMITS = BodyLimits(values=10, members=4, containers=5, depth=3, outline=9000, text=10_000)


@pytest.mark.parametrize(
    ("data", "error", "text"),
    [
        (b"[" + b"1," * 11, BadRequest, "10 values"),
        (b"[]" * 6, BadRequest, "5 lists"),
        (b'{"a":1,"b":[":"],"c":1,"d":1,"e":1', BadRequest, "4 members"),
        (b"[[[[", BadRequest, "3 levels"),
        (b" " * 9001, TooLarge, "beside"),
        (b'["' + b"a" * 10_001, TooLarge, "texts"),
        (b'["' + b"a" * 6000 + b'","' + b"b" * 4500, TooLarge, "texts"),
        (b'{"' + b"k" * LONG + b'" : 1}', BadRequest, "key"),
        (b'{"data:' + b"k" * LONG + b'": 1}', BadRequest, "key"),
    ],
)
def test_each_bound_refuses_before_the_end(data: bytes, error: type[TrencadisError], text: str) -> None:
    for step in (100, SLICE):
        with pytest.raises(error, match=text):
            scanned(data, step, LIMITS)


@pytest.mark.parametrize("data", [b"[" * 100 + b"1,2" + b"]" * 99, b'["a', b"1" * (LONG - 1), b"," * (LONG - 1)])
def test_a_body_that_is_not_scanned_is_one_that_the_scan_lets_pass(data: bytes) -> None:
    assert json_body_limits.is_within_limits(data)
    scan = scanned(data)
    assert not scan.long and scan.outline in (data, b'["')
    for larger in (b"[" * 101, b"[{" * 51, data + b" " * LONG):
        assert not json_body_limits.is_within_limits(larger)


def test_what_stands_in_texts_is_not_counted_and_images_are_no_texts() -> None:
    scanned(b'["' + b"[{,:" * 400 + b'"]', limits=LIMITS)
    scanned(b'["data:image/png;base64,' + b"A" * 20_000 + b'"]', limits=LIMITS)
    scan = scanned(b'{"a":[1,2],"b":{}}', limits=LIMITS)
    assert (scan.values, scan.containers) == (5, 3)


LATER = ("a number of 3 million digits", "arguments of a million lists")
"""Floods that the parser refuses, and the reader of a conversation."""


@pytest.mark.parametrize("flood", [f for f in floods.BEYOND if f.name not in LATER], ids=lambda f: f.name)
def test_a_flood_is_refused_by_the_scan(flood: floods.Flood, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(floods, "MB", 20_000)
    small = BodyLimits(values=2000, containers=1000, outline=1_000_000, text=200_000)
    data = flood.make()
    with pytest.raises(TrencadisError) as caught:
        scanned(data, limits=small)
    assert caught.value.status == flood.status


@pytest.mark.parametrize("name", sorted(json_io.COUNTS))
def test_fields_have_a_most(harness: Any, name: str) -> None:
    most = json_io.COUNTS[name]
    few = {str(i): 1 for i in range(most)} if name.endswith(("s", "bias", "format")) else [1] * most
    json_io.check_counts({name: few})
    many: Any = {**few, "x": 1} if isinstance(few, dict) else [*few, 1]
    with pytest.raises(BadRequest, match=str(most)) as caught:
        json_io.check_counts({name: many})
    assert caught.value.param == name


def test_fields_prompts_and_templates_have_a_most(harness: Any) -> None:
    assert harness.chat(**{f"f{i}": 1 for i in range(json_io.MAX_FIELDS)}).status_code == 400
    assert harness.complete(["a"] * 1025).json()["error"]["param"] == "prompt"
    assert harness.complete([[1]] * 1025).json()["error"]["param"] == "prompt"
    assert harness.chat(chat_template="a" * (json_io.MAX_TEMPLATE + 1)).json()["error"]["param"] == "chat_template"
    call = {"function": {"name": "f", "arguments": "[" + "[]," * (1 << 14) + "[]]"}}
    messages = [{"role": "assistant", "tool_calls": [call]}, {"role": "user", "content": "x"}]
    answer = harness.call("/v1/chat/completions", {"messages": messages})
    assert answer.status_code == 400 and "lists and objects" in answer.text


def test_a_wrong_item_is_told_once(harness: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[int] = []
    plain = fastapi_app.format_validation_error
    monkeypatch.setattr(
        fastapi_app, "format_validation_error", lambda errors: reported.append(len(errors)) or plain(errors)
    )
    wrong = ["a"] * 900
    assert harness.chat(stop_token_ids=wrong).status_code == 400
    assert harness.complete([1, *wrong]).status_code == 400
    assert harness.call("/detokenize", {"tokens": wrong}).status_code == 400
    assert len(reported) == 3 and max(reported) <= 4


def test_names_of_unknown_fields_are_kept_and_values_are_not() -> None:
    for model, fields in (
        (ChatRequest, {"messages": []}), (TokenizeRequest, {"prompt": "a"}), (DetokenizeRequest, {"tokens": [1]}),
    ):  # fmt: skip
        made = model.model_validate({**fields, "big": [[1] * 50] * 50, "empty": None, "list": [], "no": False})
        assert made.model_extra == {"big": True, "empty": None, "list": [], "no": False}
    requested = ChatRequest.model_validate({"messages": [], "big": "x" * 100, "user": "me"})
    assert requested.list_ignored_fields(FieldContext()) == ["big", "user"]


@pytest.mark.parametrize("stream", [False, True])
def test_nothing_large_of_a_request_lives_as_long_as_its_answer(harness: Any, stream: bool) -> None:
    import gc

    harness.app()
    bodies = harness.made.state.trencadis.admission.bodies
    held: list[tuple[int, int]] = []
    plain = harness.engine.submit

    def submit(request: Any, pixels: Any) -> Any:
        found = sum(isinstance(o, list) and len(o) == 777 for o in gc.get_objects())
        held.append((bodies.inside, found))
        return plain(request, pixels)

    harness.engine.submit = submit
    text = json.dumps([[0]] * 777)
    chat = '{"messages":[{"role":"user","content":"Hi"}],"documents":[{"a":%s}],"chat_template_kwargs":{"b":%s},"u":%s'
    raw = '{"prompt":"Hi","u":%s'
    for path, fields in (
        ("/v1/chat/completions", chat % (text, text, text)), ("/v1/completions", raw % text),
    ):  # fmt: skip
        content = fields + (',"stream":true}' if stream else "}")
        answer = harness.call(path, method="POST", content=content, headers=JSON)
        assert answer.status_code == 200 and answer.headers["x-ignored-fields"].endswith("u")
    assert held == [(0, 0), (0, 0)]


def threads_of(harness: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the threads that encode or decode, in order."""
    seen: list[str] = []

    def noted(plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            seen.append(threading.current_thread().name)
            return plain(*args, **kwargs)

        return call

    for name in ("find_kept_end", "encode", "encode_marked", "decode"):
        monkeypatch.setattr(harness.tokenizer, name, noted(getattr(harness.tokenizer, name)))
    return seen


def test_long_texts_and_many_are_read_beside_the_event_loop(harness: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    harness.app()
    seen = threads_of(harness, monkeypatch)
    ids = [300] * 1020
    harness.service.max_model_len = harness.engine.info.max_model_len
    for call in (
        lambda: harness.chat("a " * 3000),
        lambda: harness.call("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}] * 1200}),
        lambda: harness.chat("a", chat_template_kwargs={"x": [[1]] * 5000}),
        lambda: harness.complete(["a b"] * 1000 + ["c " * 2000]),
        lambda: harness.call("/tokenize", {"prompt": "a " * 3000}),
        lambda: harness.call("/detokenize", {"tokens": ids}),
    ):
        seen.clear()
        reported = call().text[:200]
        assert seen and all(name.startswith(("text", "tokens")) for name in seen), (seen[:1], reported)
    seen.clear()
    assert harness.chat("Hi").status_code == harness.complete("Hi").status_code == 200
    assert set(seen) == {"MainThread"}


MANY: list[Json] = [["abc"]] * json_io.LARGE_VALUES


@pytest.mark.parametrize(
    "fields",
    [
        {"chat_template_kwargs": {"x": MANY}},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"x": MANY}}}]},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"x": MANY}}}},
        {"stop": ["é"] * json_io.LARGE_VALUES},
        {"cache_salt": "é" * json_io.LARGE_TEXT},
    ],
    ids=lambda fields: next(iter(fields)),
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/invocations"])
def test_the_values_of_a_large_body_are_checked_beside_the_event_loop(
    harness: Any, monkeypatch: pytest.MonkeyPatch, path: str, fields: dict[str, Any]
) -> None:
    seen, plain = set[str](), json_body_limits.find_fault

    def find_fault(value: Json) -> Any:
        seen.add(threading.current_thread().name)
        return plain(value)

    monkeypatch.setattr(base_request, "find_fault", find_fault)
    body = {"messages": [{"role": "user", "content": "a"}], **fields}
    harness.call(path, {**body, "max_tokens": "x"})
    assert seen and all(name.startswith("body") for name in seen), seen


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/responses", {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"x": MANY}}}}),
        ("/v1/responses", {"chat_template_kwargs": {"x": MANY}}),
        ("/v1/messages", {"chat_template_kwargs": {"x": MANY}}),
        ("/v1/messages", {"tools": [{"name": "f", "input_schema": {"x": MANY}}]}),
    ],
    ids=lambda one: one if isinstance(one, str) else next(iter(one)),
)
def test_a_large_request_of_another_api_is_checked_beside_the_event_loop(
    harness: Any, monkeypatch: pytest.MonkeyPatch, path: str, fields: dict[str, Any]
) -> None:
    seen, plain = set[str](), json_body_limits.find_fault

    def find_fault(value: Json) -> Any:
        if len(str(value)) > LONG:
            seen.add(threading.current_thread().name)
        return plain(value)

    harness.app()
    monkeypatch.setattr(base_request, "find_fault", find_fault)
    kind = "input" if path == "/v1/responses" else "messages"
    body = {kind: [{"role": "user", "content": "a"}], "max_tokens": 1, **fields}
    assert harness.call(path, body).status_code < 500
    assert "MainThread" not in seen and len(seen) > 1, seen


def test_a_large_body_is_refused_and_answered_as_a_small_one(harness: Any) -> None:
    found = []
    for some in ([["abc"]], MANY):
        kwargs = {"x": some}
        assert harness.chat("a", chat_template_kwargs=kwargs).status_code == 200
        body = {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": kwargs}
        answers = [
            harness.call("/v1/chat/completions", method="POST", content=json.dumps(body | fields), headers=JSON)
            for fields in ({"max_tokens": "x"}, {"stop": ["a", 5]}, {"tools": [5]}, {"stop_token_ids": [1, "x"]},
                           {"chat_template_kwargs": {**kwargs, "y": "\ud800"}})
        ]  # fmt: skip
        found.append([(answer.status_code, answer.text) for answer in answers])
    assert found[0] == found[1] and {status for status, _ in found[0]} == {400}


def test_half_of_a_pair_is_found_in_each_slice() -> None:
    for text in ("é" * 3 * SLICE, "😀" * SLICE, "a" * 3 * SLICE):
        assert not json_body_limits.has_lone_surrogate(text)
        for at in (0, SLICE - 1, SLICE, len(text) - 1):
            assert json_body_limits.has_lone_surrogate(f"{text[:at]}\ud800{text[at:]}")


def test_others_have_their_turn_while_a_body_is_read_and_its_prompts_start(harness: Any) -> None:
    """Counted in turns of the event loop, not in seconds."""
    served = harness.app()
    turns: list[int] = []

    async def run(content: bytes, path: str) -> int:
        async def count() -> None:
            while True:
                turns.append(1)
                await asyncio.sleep(0)

        async def receive() -> Any:
            if sent:
                await asyncio.sleep(3600)
            sent.append(1)
            return {"type": "http.request", "body": content, "more_body": False}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])

        sent: list[int] = []
        statuses: list[int] = []
        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "query_string": b""}
        watch = asyncio.create_task(count())
        await served(scope, receive, send)
        watch.cancel()
        return statuses[0]

    slices = 40
    assert asyncio.run(run(floods.beside(b'"x":"data:' + b"a" * slices * SLICE + b'"'), "/v1/chat/completions")) == 200
    assert len(turns) >= slices
    turns.clear()
    assert asyncio.run(run(floods.items(b'{"max_tokens":1,"prompt":[', b'"Hi"', 512), "/v1/completions")) == 200
    assert len(turns) >= 2 * 512 // 16


def test_a_detokenize_request_has_a_ticket_and_a_most(harness: Any) -> None:
    from trencadis.server.tenants.server_admission_and_byte_budgets import Bounds

    harness.app(bounds=Bounds(requests=1))
    other = harness.made.state.trencadis.admission.enter()
    assert harness.call("/detokenize", {"tokens": [300]}).status_code == 429
    other.leave()
    assert harness.call("/detokenize", {"tokens": [300]}).status_code == 200
    assert harness.made.state.trencadis.admission.inside == [0, 0, 0]
    assert harness.call("/detokenize", {"tokens": [300] * 1025}).json()["error"]["param"] == "tokens"


def test_a_refused_body_is_read_to_its_end(harness: Any) -> None:
    """Who is cut off while sending often sees no answer."""
    served, left = harness.app(), [floods.items(b'{"messages":[', b"[]", 70_000, b""), *[b"x" * 1000] * 5]

    async def receive() -> Any:
        return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": headers, "query_string": b""}
    asyncio.run(served(scope, receive, send))
    assert sent[0]["status"] == 400 and not left


def test_a_mark_counts_as_the_token_that_it_is(harness: Any) -> None:
    marked = harness.tokenizer.mark("<|im_end|>") * 5000
    assert len(marked) > 1 << 17
    kept, count = harness.tokenizer.find_kept_end(marked, 5100, lambda: None, marked=True)
    assert kept == marked and 5000 <= count < 5100


def test_a_long_text_is_counted_first_and_its_end_is_kept_where_it_is_cut(harness: Any) -> None:
    most = harness.service.max_model_len
    text = "word and word, " * 20_000
    whole = harness.tokenizer.encode(text)
    assert len(whole) > 20 * most
    answer = harness.complete(text)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "input_tokens"
    assert harness.complete(text, truncate_prompt_tokens=500, max_tokens=1).status_code == 200
    assert harness.engine.submitted[-1][0].tokens == whole[-500:]
    assert json_body_limits.NONCE not in answer.text


def test_an_image_in_a_body_arrives_as_it_was_sent(harness: Any) -> None:
    harness.app()
    urls = [f"data:image/png;base64,{'QUJD' * size}" for size in (10, 100_000)]
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    assert harness.chat([{"type": "text", "text": "Hi"}, *parts]).status_code == 200
    assert [source for source, _ in harness.images.received] == urls
