"""Prepared images by digest: an LRU bounded in bytes, in which concurrent requests for a key share the work."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from threading import Lock

from trencadis.core.errors import TrencadisError
from trencadis.multimodal.processor import Prepared


class _Abandoned(Exception):
    """The caller that prepared the image was cancelled; one of those that wait starts again."""


class Unshared(Exception):
    """Wraps an error about the preparing caller's own limits: only that caller sees it, those that wait start again."""

    def __init__(self, error: TrencadisError) -> None:
        super().__init__(error.message)
        self.error = error


class PreparedCache:
    """A byte-bounded LRU of ``Prepared``, safe across threads and event loops.

    Invariants: ``bytes`` is the sum of the kept images' ``nbytes`` and at most ``max_bytes``; a key is prepared by
    at most one caller at a time; an error is never kept.

    Args:
        max_bytes: bound of ``bytes``. 0 keeps nothing; concurrent requests for a key still share one preparation.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.bytes = 0
        self.hits = 0
        self.queries = 0
        self.evictions = 0
        self._kept: OrderedDict[str, Prepared] = OrderedDict()
        self._pending: dict[str, Future[Prepared]] = {}
        self._lock = Lock()
        self.elsewhere: Callable[[str], Awaitable[Prepared | None]] | None = None
        """Asks other processes for an image; ``find`` does, where this one has none."""

    def __len__(self) -> int:
        return len(self._kept)

    def forget(self) -> None:
        """Drops every image; what is being prepared stays with those who wait for it."""
        with self._lock:
            self._kept.clear()
            self.bytes = 0

    async def load(self, key: str, work: Callable[[], Awaitable[Prepared]]) -> Prepared:
        """Returns the image from the cache, from a caller that is preparing it, or from ``work``.

        Neither a cancelled caller nor ``Unshared`` fails the others.
        """
        first = True
        while True:
            found, pending = self._claim(key, first)
            first = False
            if found is not None:
                return found
            if pending is not None:
                await asyncio.wait([_mark_error_seen(asyncio.wrap_future(pending))])
                try:
                    return _shared_result(pending.exception(), pending)
                except _Abandoned:
                    continue
            try:
                image = await work()
            except Unshared as own:
                self._settle(key, own)
                raise own.error from None
            except BaseException as error:
                self._settle(key, error)
                raise
            self._settle(key, image)
            return image

    async def find(self, key: str) -> Prepared | None:
        """The image from the cache or from a caller that is preparing it, or None."""
        with self._lock:
            self.queries += 1
            found, pending = self._lookup(key), self._pending.get(key)
        if found is None and pending is not None:
            await asyncio.wait([_mark_error_seen(asyncio.wrap_future(pending))])
            with self._lock:
                found = self._lookup(key) or (pending.result() if pending.exception() is None else None)
        if found is None and self.elsewhere is not None:
            found = await self.elsewhere(key)
            if found is not None:
                with self._lock:
                    self._keep(key, found)
        return found

    def kept(self, key: str) -> Prepared | None:
        """The image from the cache, for another process; counts nothing."""
        with self._lock:
            return self._kept.get(key)

    def _claim(self, key: str, count: bool) -> tuple[Prepared | None, Future[Prepared] | None]:
        """Returns the cached image, or the future of one in preparation, or neither: then the caller must prepare and
        settle it."""
        with self._lock:
            self.queries += count
            found = self._lookup(key, count)
            if found is not None:
                return found, None
            pending = self._pending.get(key)
            if pending is not None:
                self.hits += count
                return None, pending
            self._pending[key] = Future()
            return None, None

    def _settle(self, key: str, result: Prepared | BaseException) -> None:
        with self._lock:
            pending = self._pending.pop(key)
            if not isinstance(result, BaseException):
                self._keep(key, result)
        if not isinstance(result, BaseException):
            pending.set_result(result)
        else:
            shared = isinstance(result, Exception) and not isinstance(result, Unshared)
            pending.set_exception(result if shared else _Abandoned())

    def _lookup(self, key: str, count: bool = True) -> Prepared | None:
        found = self._kept.get(key)
        if found is not None:
            self._kept.move_to_end(key)
            self.hits += count
        return found

    def _keep(self, key: str, image: Prepared) -> None:
        old = self._kept.pop(key, None)
        if old is not None:
            self.bytes -= old.nbytes
        if image.nbytes > self.max_bytes:
            return
        self._kept[key] = image
        self.bytes += image.nbytes
        while self.bytes > self.max_bytes:
            _, dropped = self._kept.popitem(last=False)
            self.bytes -= dropped.nbytes
            self.evictions += 1


def _mark_error_seen(waiter: asyncio.Future[Prepared]) -> asyncio.Future[Prepared]:
    """Retrieves the waiter's error: asyncio would log it as never retrieved if the waiter is cancelled."""
    waiter.add_done_callback(lambda done: done.cancelled() or done.exception())
    return waiter


def _shared_result(error: BaseException | None, pending: Future[Prepared]) -> Prepared:
    """The result of a shared preparation. An error is copied, because each waiter sets its own ``param``."""
    if isinstance(error, TrencadisError):
        raise type(error)(error.message, param=error.param, retry_after=error.retry_after)
    return pending.result()
