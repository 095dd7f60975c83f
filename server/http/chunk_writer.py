"""Writes stream chunks directly to the connection, bypassing the ASGI layers, whose cost per token exceeds the system
call's.

Only events between the head of a response and its end are written this way. They keep their order with those that pass
through the layers, because the task that writes the latter waits for its next piece meanwhile
(``Generation.set_writer``).
"""

from __future__ import annotations

import asyncio
import time

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import RequestResponseCycle

from trencadis.server.records.request_record import RequestRecord


class ChunkWriter:
    """Writes chunks of the response of ``cycle``, whose head is written, and which has no length.

    Args:
        record: counts their bytes.
    """

    __slots__ = ("_closing", "_cycle", "_flow", "_record", "_write", "last_written")

    def __init__(
        self, transport: asyncio.Transport, flow: FlowControl, cycle: RequestResponseCycle, record: RequestRecord
    ) -> None:
        self._write, self._closing = transport.write, transport.is_closing
        self._flow, self._cycle, self._record = flow, cycle, record
        self.last_written = time.monotonic()

    def is_ready(self) -> bool:
        """True while the client is connected and the transport's buffer is not full."""
        return not (self._flow.write_paused or self._cycle.disconnected or self._closing())

    def write(self, data: bytes) -> None:
        """Writes one chunk."""
        self._write(b"%x\r\n%b\r\n" % (len(data), data))
        self._record.sent += len(data)
        self.last_written = time.monotonic()
