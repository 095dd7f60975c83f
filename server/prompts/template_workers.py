"""Renders the templates of requests in worker processes, under limits of time and memory.

Such a template is a program of a client. The sandbox bounds each of its steps, but not well enough for a process that
serves others: it is compiled and rendered where it can only end its own worker.
"""

from __future__ import annotations

import json

from trencadis.core.errors import BadRequest, Unavailable
from trencadis.multimodal.decode_workers.worker_pool import Job, WorkerPool
from trencadis.server.text.chat_template import PreparedRendering, cut_at

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
