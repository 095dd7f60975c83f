"""Runs work off the event loop: in threads of its own, or in worker processes for the templates of requests.

With threads of its own for each kind of work, a busy pool delays only work of the same kind.

The template of a request is a program of a client. The sandbox bounds each of its steps, but not well enough for a
process that serves others: it is compiled and rendered where it can only end its own worker, under limits of time and
memory.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from trencadis.core.errors import BadRequest, Unavailable
from trencadis.multimodal.decode_workers.worker_pool import Job, WorkerPool
from trencadis.server.text.chat_template import PreparedRendering, cut_at

T = TypeVar("T")
Check = Callable[[], None]
"""Function that long work calls between its steps; raises once the caller has been cancelled."""
MEDIUM = 1 << 20
"""Length from which a data URL counts too: it may stand in a field that the server reads as text."""
SMALL = 4096
"""Most characters or items of a value that is processed in the event loop, which takes a few milliseconds."""


class OffEventLoop:
    """Runs functions in threads. Each call that they make must be short or release the interpreter's lock.

    Args:
        threads: at most two; the event loop may wait a switch interval for each.
    """

    def __init__(self, name: str, threads: int = 2) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)

    async def run(self, work: Callable[[Check], T]) -> T:
        """Returns the result of ``work``. If the caller is cancelled, the work does not start, or ends at its next
        check.
        """
        left = threading.Event()

        def check() -> None:
            if left.is_set():
                raise asyncio.CancelledError

        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, work, check)
        finally:
            left.set()


def no_check() -> None:
    """Does nothing: the check of work on the event loop, which always runs to its end."""


def is_small(*values: object, budget: int = SMALL) -> bool:
    """Returns True if JSON values are small enough to process in the event loop. Data URLs do not count."""
    todo = list(values)
    while todo and budget >= 0:
        one = todo.pop()
        if isinstance(one, str):
            budget -= 0 if one.startswith("data:") and len(one) < MEDIUM else len(one)
        elif isinstance(one, Mapping | list | tuple):
            budget -= len(one)
            if budget >= 0:
                todo.extend(one.values() if isinstance(one, Mapping) else one)
    return budget >= 0


WORKERS = 2
SECONDS = 2.0
"""Limit of one rendering, compilation included."""
MEMORY = 256 << 20
REPLY = 64 << 20
"""Limit of a rendered text, in bytes."""
JOBS = {"template": "trencadis.server.text.template_sandbox:render_template"}
TOO_MUCH = "The request's chat template takes too long or too much memory."


class TemplateWorkers:
    """Worker processes that render templates of requests; the first starts with the first such request.

    Args:
        pool: None: two workers.
    """

    def __init__(self, pool: WorkerPool | None = None) -> None:
        self._pool = pool

    async def render(self, prepared: PreparedRendering) -> str:
        """The marked text of a conversation.

        Raises:
            BadRequest: the template is wrong, refuses the conversation, or exceeds its limits.
            Unavailable: no worker starts.
        """
        if self._pool is None:
            self._pool = WorkerPool(WORKERS, jobs=JOBS)
        data = json.dumps(prepared._asdict()).encode()
        try:
            done = await self._pool.run(Job("template", {}, SECONDS, MEMORY, REPLY, retry=False), data)
        except Unavailable:
            raise Unavailable("Templates cannot be rendered at the moment.", retry_after=1) from None
        except Exception:  # the worker died, or was ended: it has no words of its own
            raise BadRequest(TOO_MUCH, param="chat_template") from None
        if "error" in done.values:
            raise BadRequest(str(done.values["error"]), param=str(done.values["param"]))
        text = bytes(done.buffers[0]).decode("utf-8", "surrogatepass") if done.buffers else ""
        return cut_at(prepared.tag, text)

    def close(self) -> None:
        """Ends the workers."""
        if self._pool is not None:
            self._pool.close()
