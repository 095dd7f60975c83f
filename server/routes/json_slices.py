"""Writes a large answer as JSON in slices, so that neither its writing holds the event loop nor all of it is in memory
twice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel
from pydantic_core import to_json
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from trencadis.server.text.off_event_loop import OffEventLoop

SLICE = 64
"""Items of a list that are made and written at once."""

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
        self.is_wide = any(is_wide(_count_candidates(item)) for item in self._items[-2:])

    def write(self) -> Iterator[bytes]:
        """The JSON text of the list."""
        comma, size = b"[", SLICE
        if self.is_wide:
            size = 1
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
        return len(value) > SLICE or (bool(value) and isinstance(value[0], BaseModel))
    if isinstance(value, BaseModel):
        return any(_is_long(getattr(value, name)) for name in type(value).model_fields)
    return isinstance(value, LazyItems)


async def stream_json(value: BaseModel) -> AsyncGenerator[bytes]:
    """``write_json`` in writes of ``WRITE`` bytes."""
    waiting, pieces, apart = bytearray(), write_json(value), _is_any_wide(value)
    while True:
        piece = await off_event_loop.run(lambda check: next(pieces, None)) if apart else next(pieces, None)
        if piece is None:
            break
        waiting += piece
        if len(waiting) >= WRITE:
            yield bytes(waiting)
            waiting.clear()
            await asyncio.sleep(0)
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
