"""Reads request bodies for FastAPI, and writes large answers as JSON in slices.

Bodies are scanned on arrival, long strings are decoded off the event loop, the rest is parsed; a body that is too small
to exceed a limit is parsed without a scan. The number of items in the fields of a request is limited on the parsed
body, before validation.

A large answer is written in slices, so that neither its writing holds the event loop nor all of it is in memory twice.
"""

from __future__ import annotations

import asyncio
import codecs
import json
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Callable,
    Coroutine,
    Iterator,
    Mapping,
    Sequence,
)
from typing import Any, Protocol, TypeVar

from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from trencadis.core.errors import BadRequest, TrencadisError
from trencadis.core.json_types import Json, JsonMapping, JsonObject
from trencadis.core.request import MAX_BIAS, MAX_SCORED
from trencadis.server.prompts.sampling_params import RequestLimits
from trencadis.server.protocol.chat_completions import MAX_MESSAGES
from trencadis.server.protocol.json_body_limits import LONG, SLICE, BodyScan, get_placeholder_index, is_within_limits
from trencadis.server.text.off_event_loop import Check, OffEventLoop, no_check

T = TypeVar("T")
MAX_FIELDS = 256
COUNTS = {
    "messages": MAX_MESSAGES,
    "input": MAX_MESSAGES,
    "system": 1024,
    "include": 64,
    "metadata": 64,
    "stop_sequences": 1024,
    "tools": 1024,
    "documents": 4096,
    "stop_token_ids": 1024,
    "logprob_token_ids": MAX_SCORED,
    "logit_bias": MAX_BIAS,
    "chat_template_kwargs": 256,
    "mm_processor_kwargs": 64,
    "modalities": 16,
    "response_format": 64,
    "stream_options": 64,
}
"""Most items by field. ``BodyLimits`` counts the values inside items."""
LISTED = frozenset({"prompt", "input", "text_1", "text_2", "queries", "items", "data_1", "data_2"})
"""Fields of one prompt or several."""
MAX_TEMPLATE = 1 << 17
"""Most characters of a chat template in a request."""


def check_counts(body: Json) -> None:
    """Checks that no field of a body has too many items.

    Raises:
        BadRequest: a field has too many; the message names it.
    """
    if not isinstance(body, dict):
        return
    if len(body) > MAX_FIELDS:
        raise BadRequest(f"The request has {len(body)} fields; at most {MAX_FIELDS} are allowed.")
    for name, most in COUNTS.items():
        value = body.get(name)
        if isinstance(value, list | dict) and len(value) > most:
            raise BadRequest(f"{name} holds {len(value)} items; at most {most} are allowed.", param=name)
    if not LISTED.isdisjoint(body):
        _check_prompts(body)
    template = body.get("chat_template")
    if isinstance(template, str) and len(template) > MAX_TEMPLATE:
        raise BadRequest(f"chat_template has at most {MAX_TEMPLATE} characters.", param="chat_template")


def _check_prompts(body: JsonMapping) -> None:
    """Checks fields that take a prompt or a list of them."""
    for name in LISTED.intersection(body):
        given, most = body[name], RequestLimits.max_prompts
        if isinstance(given, list) and len(given) > most and not isinstance(given[0], int):
            raise BadRequest(f"At most {most} {name}s are allowed, got {len(given)}.".replace("ss ", "s "), param=name)


IN_LOOP = 1 << 18
"""Most bytes of long strings that are decoded in the event loop."""
LARGE_VALUES = 4096
"""Most values of a body that is validated in the event loop, which takes a few milliseconds."""
LARGE_TEXT = 1 << 20
"""Most bytes of its long texts."""
NO_JSON = "The request body is not valid JSON."
_OFF_LOOP = OffEventLoop("body")


class BodyRoute(APIRoute):
    """A route that limits and parses the body itself, before FastAPI reads it."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Returns FastAPI's handler, which runs after the body has been read."""
        handle = super().get_route_handler()

        async def handler(request: Request) -> Response:
            if self.body_field is not None:
                # Starlette's caches of ``json()`` and ``body()``.
                request._json = await read_request(request, self.body_field)
                request._body = b"" if request._json is None else b"{}"
            return await handle(request)

        return handler


class BodyField(Protocol):
    """The parameter of a route that takes the body, as FastAPI has it."""

    def validate(
        self, value: Json, values: JsonObject, *, loc: tuple[int | str, ...]
    ) -> tuple[object, Sequence[JsonMapping]]:
        """Returns the route's model of a parsed body, and pydantic's errors."""
        ...


async def read_request(request: Request, field: BodyField) -> object:
    """Returns the parsed body, or the route's model of it, which FastAPI takes as it is; None if it is empty.

    A large body is validated in a thread: its values are checked one by one in Python, a quarter of a second for all
    that a body may hold.

    Raises:
        TrencadisError: the body is not JSON, or exceeds the limits of a request.
        RequestValidationError: a large body does not fit the route.
    """
    found, is_large = await _read_body(request)
    # Validation takes as long as parsing, so other tasks run between them.
    await asyncio.sleep(0)
    if not is_large:
        return found
    made, errors = await validate_off_loop(lambda: field.validate(found, {}, loc=("body",)))
    if errors:
        raise RequestValidationError(errors)
    return made


async def validate_off_loop(validate: Callable[[], T]) -> T:
    """Returns the result of ``validate``, which runs in a thread."""
    return await _OFF_LOOP.run(lambda check: validate())


async def _read_body(request: Request) -> tuple[Json, bool]:
    """Returns the parsed body, None if it is empty, and True if it is to be validated in a thread.

    Raises:
        TrencadisError: the body is not JSON, or exceeds the limits of a request.
    """
    chunks, body = request.stream(), b""
    async for chunk in chunks:
        body += chunk
        if len(body) >= LONG:
            break
    if not body:
        return None, False
    is_large = False
    try:
        if is_within_limits(body):
            found = json.loads(body.decode("utf-8-sig"))
        else:
            scan = await _scan_body(_chain_chunks(body, chunks))
            is_large = scan.values > LARGE_VALUES or scan.text > LARGE_TEXT
            found = parse_outline(scan.outline, await decode_long_strings(scan.long) if scan.long else [])
    except (ValueError, RecursionError):
        raise BadRequest(NO_JSON) from None
    check_counts(found)
    return found, is_large


async def _chain_chunks(start: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yields ``start``, then ``rest``."""
    yield start
    async for chunk in rest:
        yield chunk


async def _scan_body(chunks: AsyncIterator[bytes]) -> BodyScan:
    """Scans a body that is long or nested."""
    scan, fault = BodyScan(), None
    async for chunk in chunks:
        for at in range(0, len(chunk), SLICE):
            if fault is None:
                try:
                    scan.feed(chunk[at : at + SLICE])
                except TrencadisError as error:
                    # Reads and drops the rest: a client whose connection is closed while it sends often sees no answer.
                    fault, scan = error, BodyScan()
            if len(chunk) > SLICE:
                await asyncio.sleep(0)
    if fault is not None:
        raise fault
    scan.finish()
    return scan


async def decode_long_strings(long: list[list[bytes]]) -> list[str]:
    """Returns the texts of long strings; frees their pieces.

    Raises:
        BadRequest: one of them is not a JSON string.
    """
    size = sum(len(piece) for pieces in long for piece in pieces)

    def work(check: Check) -> list[str]:
        try:
            return [text_of(pieces, check) for pieces in long]
        except ValueError:
            raise BadRequest(NO_JSON) from None

    return work(no_check) if size <= IN_LOOP else await _OFF_LOOP.run(work)


def text_of(pieces: list[bytes], check: Check = no_check) -> str:
    """Returns the text of a JSON string, from the pieces between its quotes. Empties ``pieces``.

    Raises:
        ValueError: the string is not UTF-8, or has a control character or a malformed escape.
    """
    utf8 = codecs.getincrementaldecoder("utf-8")()
    out: list[str] = []
    rest = ""
    pieces.reverse()
    while pieces:
        check()
        text = rest + utf8.decode(pieces.pop(), not pieces)
        end = _count_complete(text) if pieces else len(text)
        rest = text[end:]
        found = str(json.loads(f'"{text[:end]}"'))
        if out and "\ud800" <= out[-1][-1:] <= "\udbff" and "\udc00" <= found[:1] <= "\udfff":
            out[-1], found = _join_surrogates(out[-1], found)
        if found:
            out.append(found)
    return "".join(out)


def _join_surrogates(text: str, found: str) -> tuple[str, str]:
    """Joins two pieces of a text between which a surrogate pair was cut; the pair goes to the first."""
    pair = (text[-1] + found[0]).encode("utf-16", "surrogatepass").decode("utf-16")
    return text[:-1] + pair, found[1:]


def _count_complete(text: str) -> int:
    """Returns the length of an escaped text without an incomplete escape at its end."""
    last = text.rfind("\\", max(0, len(text) - 6))
    if last < 0 or (last + 1 - len(text[: last + 1].rstrip("\\"))) % 2 == 0:
        return len(text)
    return len(text) if last + (6 if text[last + 1 : last + 2] == "u" else 2) <= len(text) else last


def parse_outline(outline: bytes, texts: list[str]) -> Json:
    """Parses an outline and puts its long strings in place.

    Raises:
        ValueError: the outline is not JSON in UTF-8.
    """
    text = outline.decode("utf-8-sig")
    if not texts:
        return json.loads(text)

    def number(literal: str) -> Json:
        index = get_placeholder_index(literal)
        return float(literal) if index is None else texts[index]

    return json.loads(text, parse_float=number)


def forget_json(http: Request) -> None:
    """Frees the parsed body of a request; fields that were read from it stay."""
    parsed = getattr(http, "_json", None)
    if isinstance(parsed, dict):
        parsed.clear()


def forget_body(http: Request) -> None:
    """Frees the body of a parsed request: two copies of its data URLs would live until the answer ends."""
    forget_json(http)
    if hasattr(http, "_body"):
        http._body = b""
    body = http.scope.get("trencadis.body")
    if body is not None:
        body.leave()
    if "trencadis.turn" in http.scope:
        mark_prepared(http)


def mark_prepared(http: Request) -> None:
    """Releases the request's slot in the fair queue, so that the next request can be prepared."""
    entry = http.scope.get("trencadis.turn")
    if entry is not None:
        entry.mark_prepared()


JSON_SLICE = 64
"""Most items of a list that are made and written at once."""

SLICE_CANDIDATES = 256
"""Most log-probabilities of such items, unless a single item has more: their JSON takes about half a millisecond."""

PASS = 0.001
"""Seconds of making JSON after which the event loop serves others, so that a large answer takes short turns."""

WIDE = 1000
"""Log-probabilities of one token from which its JSON is made in a thread."""

WRITE = 64 << 10
"""Bytes that are written at once; the event loop serves others between two writes."""


off_event_loop = OffEventLoop("wide-json")
"""Makes the JSON of tokens with many log-probabilities."""


class LazyItems:
    """A list of an answer whose items are made when they are written, a few at a time; it can be written once.

    Args:
        items: what they are made of; dropped as they are written.
        make: makes the JSON values of some of them.
    """

    def __init__(self, items: Sequence[Any], make: Callable[[Sequence[Any]], Sequence[Any]]) -> None:
        self._items, self._make = list(items), make
        self._candidates = max((_count_candidates(item) for item in self._items[-2:]), default=0)
        self.is_wide = is_wide(self._candidates)

    def write(self) -> Iterator[bytes]:
        """The JSON text of the list."""
        comma, size = b"[", max(min(JSON_SLICE, SLICE_CANDIDATES // (1 + self._candidates)), 1)
        for start in range(0, len(self._items), size):
            made = self._make(self._items[start : start + size])
            self._items[start : start + size] = [None] * len(made)
            yield comma + to_json(made)[1:-1]
            comma = b","
        yield b"[]" if comma == b"[" else b"]"


def _count_candidates(item: object) -> int:
    """Returns the log-probabilities of one token, before its JSON is made or as an object of it."""
    return len(item) if isinstance(item, dict) else len(getattr(item, "top_ids", ()))


def is_wide(top: int | None) -> bool:
    """Returns True if the JSON of a token with ``top`` log-probabilities (-1: all) is made in a thread."""
    return top is not None and not 0 <= top <= WIDE


def set_items(
    model: BaseModel, name: str, items: Sequence[Any], make: Callable[[Sequence[Any]], Sequence[Any]], lazy: bool
) -> None:
    """Sets the list ``name`` of ``model`` to what ``make`` makes of ``items``; ``lazy``: when it is written."""
    model.__dict__[name] = LazyItems(items, make) if lazy else make(items)


def write_json(value: object) -> Iterator[bytes]:
    """The JSON text of ``value``, piece by piece; ``LazyItems`` may stand in the place of a list.

    A model is written as ``model_dump_json`` writes it, but its long fields come last.
    """
    if isinstance(value, LazyItems):
        yield from value.write()
    elif isinstance(value, BaseModel):
        long = [name for name in type(value).model_fields if _is_long(getattr(value, name))]
        text = value.model_dump_json(exclude=set(long)).encode()[:-1]
        for name in long:
            yield text + (b"" if text == b"{" else b",") + to_json(name) + b":"
            yield from write_json(getattr(value, name))
            text = b""
        yield text + b"}"
    elif isinstance(value, list) and value and isinstance(value[0], BaseModel):
        comma = b"["
        for one in value:
            yield comma
            yield from write_json(one)
            comma = b","
        yield b"]"
    elif isinstance(value, list):
        yield from LazyItems(value, list).write()
    else:
        yield to_json(value)


def _is_any_wide(value: object) -> bool:
    """Returns True if items of a list in ``value`` take long to make."""
    if isinstance(value, BaseModel):
        return any(_is_any_wide(getattr(value, name)) for name in type(value).model_fields)
    if isinstance(value, list):
        return bool(value) and isinstance(value[0], BaseModel) and any(map(_is_any_wide, value))
    return isinstance(value, LazyItems) and value.is_wide


def _is_long(value: object) -> bool:
    """True for what is written in several pieces."""
    if isinstance(value, list):
        return len(value) > JSON_SLICE or (bool(value) and isinstance(value[0], BaseModel))
    if isinstance(value, BaseModel):
        return any(_is_long(getattr(value, name)) for name in type(value).model_fields)
    return isinstance(value, LazyItems)


async def stream_json(value: BaseModel) -> AsyncGenerator[bytes]:
    """``write_json`` in writes of ``WRITE`` bytes; the event loop serves others at least every ``PASS`` seconds."""
    waiting, pieces, apart, begun = bytearray(), write_json(value), _is_any_wide(value), time.monotonic()
    while True:
        piece = await off_event_loop.run(lambda check: next(pieces, None)) if apart else next(pieces, None)
        if piece is None:
            break
        waiting += piece
        if len(waiting) >= WRITE:
            yield bytes(waiting)
            waiting.clear()
        elif time.monotonic() - begun < PASS:
            continue
        await asyncio.sleep(0)
        begun = time.monotonic()
    yield bytes(waiting)


class ChargedResponse(StreamingResponse):
    """An answer that is written in pieces.

    Args:
        done: called at its end, also where the client has left before the first byte: a generator that never began
            would run no ``finally``.
    """

    def __init__(
        self,
        content: AsyncIterable[str] | AsyncIterable[bytes],
        done: Callable[[], None],
        headers: Mapping[str, str],
        media_type: str = "application/json",
    ) -> None:
        super().__init__(content, headers=headers, media_type=media_type)
        self._done = done

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the answer."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._done()


class SlicedResponse(ChargedResponse):
    """A large answer, written by ``stream_json``."""

    def __init__(self, value: BaseModel, done: Callable[[], None], headers: Mapping[str, str]) -> None:
        super().__init__(stream_json(value), done, headers)
