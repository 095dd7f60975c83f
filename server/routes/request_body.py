"""Reads request bodies for FastAPI: scans them on arrival, decodes long strings off the event loop, parses the rest.

A body that is too small to exceed a limit is parsed without a scan.

Limits the number of items in the fields of a request, on the parsed body, before validation.
"""

from __future__ import annotations

import asyncio
import codecs
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from trencadis.core.errors import BadRequest, TrencadisError
from trencadis.core.json_types import Json, JsonMapping
from trencadis.core.request import MAX_BIAS, MAX_SCORED
from trencadis.server.prompts.sampling_params import RequestLimits
from trencadis.server.protocol.chat_completions import MAX_MESSAGES
from trencadis.server.protocol.json_checks import LONG, SLICE, BodyScan, get_placeholder_index, is_within_limits
from trencadis.server.text.off_event_loop import Check, OffEventLoop, no_check

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
NO_JSON = "The request body is not valid JSON."
_OFF_LOOP = OffEventLoop("body")


class BodyRoute(APIRoute):
    """A route that limits and parses the body itself, before FastAPI reads it."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Returns FastAPI's handler, which runs after the body has been read."""
        handle = super().get_route_handler()

        async def handler(request: Request) -> Response:
            if self.body_field is not None:
                found = await read_body(request)
                # Starlette's caches of ``json()`` and ``body()``.
                request._json = found
                request._body = b"" if found is None else b"{}"
            return await handle(request)

        return handler


async def read_body(request: Request) -> Json:
    """Returns the parsed body; None if it is empty.

    Raises:
        TrencadisError: the body is not JSON, or exceeds the limits of a request.
    """
    chunks, body = request.stream(), b""
    async for chunk in chunks:
        body += chunk
        if len(body) >= LONG:
            break
    if not body:
        return None
    try:
        found = (
            json.loads(body.decode("utf-8-sig"))
            if is_within_limits(body)
            else await _parse_long_body(_chain_chunks(body, chunks))
        )
    except (ValueError, RecursionError):
        raise BadRequest(NO_JSON) from None
    check_counts(found)
    # Validation takes as long as parsing, so other tasks run between them.
    await asyncio.sleep(0)
    return found


async def _chain_chunks(start: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yields ``start``, then ``rest``."""
    yield start
    async for chunk in rest:
        yield chunk


async def _parse_long_body(chunks: AsyncIterator[bytes]) -> Json:
    """Parses a body that is long or nested."""
    scan = await _scan_body(chunks)
    return parse_outline(scan.outline, await decode_long_strings(scan.long) if scan.long else [])


async def _scan_body(chunks: AsyncIterator[bytes]) -> BodyScan:
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
