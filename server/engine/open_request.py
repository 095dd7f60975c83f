"""An open request: queued deltas for its reader, its pixels and its unfinished choices."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from trencadis.core.request import Delta
from trencadis.server.engine.engine_client import DeltaCallback, Pixels


class OpenRequest:
    """One open request.

    A delta waits for its reader, which is a task: waking it takes longer than handling a token. So a reader may
    register a ``callback``, which is called at once instead while the reader waits and nothing is queued. The order is
    kept, since a reader waits only once it has handled all earlier deltas.

    Args:
        choices: its number of choices.
    """

    __slots__ = ("_deltas", "_reader", "callback", "pixels", "unfinished")

    def __init__(self, pixels: Sequence[Pixels], choices: int) -> None:
        self.pixels = pixels
        self.unfinished = set(range(choices))
        self.callback: DeltaCallback | None = None
        self._deltas: deque[Delta | Exception] = deque()
        self._reader: asyncio.Future[None] | None = None
        """Future that the waiting reader awaits."""

    def deliver(self, delta: Delta) -> None:
        """Delivers a delta: to the callback if the reader is idle, else to the reader's queue.

        The last delta of a choice is always queued.
        """
        reader = self._reader
        if self.callback is None or delta.finish is not None or reader is None or reader.done():
            self._put(delta)
            return
        try:
            taken = self.callback(delta)
        except Exception as error:
            # An error in one stream must not end the task that delivers the deltas of all streams.
            self.callback = None
            self._put(error)
            return
        if not taken:
            self._put(delta)

    def _put(self, item: Delta | Exception) -> None:
        self._deltas.append(item)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def next_delta(self) -> Delta:
        """Returns the next delta for the reader; called by one task only.

        Raises:
            Exception: the callback raised it.
        """
        while not self._deltas:
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        item = self._deltas.popleft()
        if isinstance(item, Exception):
            raise item
        return item
