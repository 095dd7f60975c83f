"""Cache of prepared images by digest, an LRU bounded in bytes; concurrent requests for a key share the work."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import suppress
from threading import Lock
from typing import Protocol

from trencadis.core.errors import TrencadisError
from trencadis.multimodal.processor_interface import PreparedImage


class CacheCounters(Protocol):
    """The counters of a cache of prepared media."""

    @property
    def hits(self) -> int: ...
    @property
    def queries(self) -> int: ...
    @property
    def evictions(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    @property
    def max_bytes(self) -> int: ...
    def clear(self) -> None:
        """Empties the cache."""
        ...


class _Abandoned(Exception):
    """The caller that prepared the image was cancelled; one of the waiting callers starts again."""


class Unshared(Exception):
    """Wraps an error about the preparing caller's own limits: only that caller gets it, waiting callers start again."""

    def __init__(self, error: TrencadisError) -> None:
        super().__init__(error.message)
        self.error = error


class ProcessorCache:
    """A byte-bounded LRU of ``PreparedImage``, safe across threads and event loops.

    Invariants: ``bytes`` is the sum of the kept images' ``nbytes`` and at most ``max_bytes``; a key is prepared by at
    most one caller at a time; an error is never kept.

    Args:
        max_bytes: limit of ``bytes``. With 0 nothing is kept, but concurrent requests for a key still share one
            preparation.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.bytes = 0
        self.hits = 0
        self.queries = 0
        self.evictions = 0
        self._images: OrderedDict[str, PreparedImage] = OrderedDict()
        self._pending: dict[str, Future[PreparedImage]] = {}
        self._lock = Lock()
        self.find_in_other_process: Callable[[str], Awaitable[PreparedImage | None]] | None = None
        """Looks up an image in other processes; used by ``find`` if this process has none."""

    def __len__(self) -> int:
        return len(self._images)

    def clear(self) -> None:
        """Drops every image; images in preparation are still delivered to waiting callers."""
        with self._lock:
            self._images.clear()
            self.bytes = 0

    async def load(self, key: str, work: Callable[[], Awaitable[PreparedImage]]) -> PreparedImage:
        """Returns the image from the cache, from a caller that is preparing it, or from ``work``.

        A cancelled caller or an ``Unshared`` error does not fail the others.
        """
        found, pending = self._claim(key, True)
        if pending is not None:
            return await self._wait_for_other(key, pending, work)
        return await self._prepare(key, work) if found is None else found

    async def _wait_for_other(
        self, key: str, pending: Future[PreparedImage] | None, work: Callable[[], Awaitable[PreparedImage]]
    ) -> PreparedImage:
        """Returns the image that another caller is preparing; prepares it here if that caller gives up."""
        found = None
        while pending is not None:
            await asyncio.wait([_retrieve_error(asyncio.wrap_future(pending))])
            with suppress(_Abandoned):
                return _shared_result(pending.exception(), pending)
            found, pending = self._claim(key, False)
        return await self._prepare(key, work) if found is None else found

    async def _prepare(self, key: str, work: Callable[[], Awaitable[PreparedImage]]) -> PreparedImage:
        """Prepares the image with ``work`` and delivers it to all waiting callers."""
        try:
            image = await work()
        except BaseException as error:
            self._fail(key, error)
            if isinstance(error, Unshared):
                raise error.error from None
            raise
        with self._lock:
            self._store(key, image)
            pending = self._pending.pop(key)
        pending.set_result(image)
        return image

    def _fail(self, key: str, error: BaseException) -> None:
        """Fails the pending preparation: waiting callers get the error, or start again if it concerns only the
        first caller.
        """
        with self._lock:
            pending = self._pending.pop(key)
        shared = isinstance(error, Exception) and not isinstance(error, Unshared)
        pending.set_exception(error if shared else _Abandoned())

    async def find(self, key: str) -> PreparedImage | None:
        """Returns the image from the cache or from a caller that is preparing it, or None."""
        with self._lock:
            self.queries += 1
            found, pending = self._lookup(key), self._pending.get(key)
        if found is None and pending is not None:
            await asyncio.wait([_retrieve_error(asyncio.wrap_future(pending))])
            with self._lock:
                found = self._lookup(key) or (pending.result() if pending.exception() is None else None)
        if found is None and self.find_in_other_process is not None:
            found = await self.find_in_other_process(key)
            if found is not None:
                with self._lock:
                    self._store(key, found)
        return found

    def peek(self, key: str) -> PreparedImage | None:
        """Returns a cached image for another process, without counting a query or a hit."""
        with self._lock:
            return self._images.get(key)

    def _claim(self, key: str, count: bool) -> tuple[PreparedImage | None, Future[PreparedImage] | None]:
        """Returns the cached image, or the future of one in preparation, or neither.

        If neither, the caller must prepare the image and settle its future.
        """
        with self._lock:
            self.queries += count
            found = self._lookup(key, count)
            pending = self._pending.get(key) if found is None else None
            if found is None and pending is None:
                self._pending[key] = Future()
            self.hits += count and pending is not None
            return found, pending

    def _lookup(self, key: str, count: bool = True) -> PreparedImage | None:
        found = self._images.get(key)
        if found is not None:
            self._images.move_to_end(key)
            self.hits += count
        return found

    def _store(self, key: str, image: PreparedImage) -> None:
        old = self._images.pop(key, None)
        if old is not None:
            self.bytes -= old.nbytes
        if image.nbytes > self.max_bytes:
            return
        self._images[key] = image
        self.bytes += image.nbytes
        while self.bytes > self.max_bytes:
            self._evict()

    def _evict(self) -> None:
        """Drops the least recently used image."""
        _, dropped = self._images.popitem(last=False)
        self.bytes -= dropped.nbytes
        self.evictions += 1


def _retrieve_error(waiter: asyncio.Future[PreparedImage]) -> asyncio.Future[PreparedImage]:
    """Marks the waiter's error as retrieved; asyncio would log it otherwise if the waiter is cancelled."""
    waiter.add_done_callback(lambda done: done.cancelled() or done.exception())
    return waiter


def _shared_result(error: BaseException | None, pending: Future[PreparedImage]) -> PreparedImage:
    """Returns the result of a shared preparation. An error is copied, because each waiter sets its own ``param``."""
    if isinstance(error, TrencadisError):
        raise type(error)(error.message, param=error.param, retry_after=error.retry_after)
    return pending.result()
