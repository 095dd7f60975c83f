"""One HTTP connection: uvicorn's, with limits on what it holds and how long it may take before a request is there."""

from __future__ import annotations

import asyncio
import logging
import select
import time
from dataclasses import dataclass
from typing import Any

import h11
from uvicorn import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

log = logging.getLogger("trencadis.server")

HEADS = 32 << 20
"""Bytes of unfinished request heads, and of requests behind an open one, on all connections together."""
LOOKS = (0.02, 0.1, 0.25, 0.5)
"""Seconds after which a client that ended its side is looked at again; the last for ever."""
LATE = b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
CROWDED = b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


@dataclass
class SharedLimits:
    """What the connections of a server share.

    Args:
        seconds: in which the head of a request must have come, from the connection or its first byte on; 0: no limit.
            Also how long a body is still read, and dropped, after its request was answered.
        bound: most bytes that are held for requests that have not begun.
    """

    seconds: float = 20.0
    bound: int = HEADS
    held: int = 0
    said: float = -60.0

    def crowded(self) -> None:
        """Says so, once a minute at most."""
        if time.monotonic() - self.said >= 60.0:
            self.said = time.monotonic()
            log.warning("unfinished request heads hold %d bytes: more are refused", self.bound)


class Connection(H11Protocol):
    """A connection within ``shared``."""

    def __init__(
        self,
        shared: SharedLimits,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._shared = shared
        self._held = 0
        self._ended = False
        self._timer: asyncio.TimerHandle | None = None
        self._waits: type[h11.IDLE] | type[h11.SEND_BODY] | None = None
        """What the timer is for: a head, or the rest of a body that nobody reads."""
        self._look: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client is there; its head is waited for."""
        super().connection_made(transport)
        self._wait(h11.IDLE)

    def connection_lost(self, exc: Exception | None) -> None:
        """It is gone, and what it held."""
        self._hold(0)
        self._wait(None)
        if self._look is not None:
            self._look.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bytes of a head, a body, or of requests that come too early."""
        super().data_received(data)
        self._weigh()

    def on_response_complete(self) -> None:
        """An answer is out; a client that has ended its side sends no other request."""
        super().on_response_complete()
        self._weigh()
        if self._ended and self._idle():
            self.transport.close()

    def _idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _weigh(self) -> None:
        """What is held for a request that has not begun, and until when."""
        if self.transport.is_closing():
            return
        state = self.conn.their_state
        held = len(self.conn.trailing_data[0]) if state in (h11.IDLE, h11.DONE) else 0
        self._hold(held)
        if held and self._shared.held > self._shared.bound:
            self._shared.crowded()
            self._refuse(CROWDED)
        elif state is h11.IDLE and held:
            self._wait(h11.IDLE)
        elif state is h11.SEND_BODY and self._idle():
            self._wait(h11.SEND_BODY)
        else:
            self._wait(None)

    def _hold(self, count: int) -> None:
        self._shared.held += count - self._held
        self._held = count

    def _wait(self, what: type[h11.IDLE] | type[h11.SEND_BODY] | None) -> None:
        """Starts the timer, unless it runs for the same thing; None: nothing is waited for."""
        if what is self._waits:
            return
        self._waits = what
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if what is not None and self._shared.seconds:
            self._timer = self.loop.call_later(self._shared.seconds, self._late)

    def _late(self) -> None:
        if self._waits is h11.IDLE and self._held:
            self._refuse(LATE)
        else:
            self.transport.close()

    def _refuse(self, answer: bytes) -> None:
        if self._idle():
            self.transport.write(answer)
        self.transport.close()

    # --- clients that end their side ---

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """A client may end its side once its request is whole, and still gets its answer.

        One that closes for good looks the same, until it is sent something: then its system resets the connection.
        So it is sent what every client of HTTP/1.1 has to ignore, and looked at. TLS has no half-closed connections.
        """
        if self._idle() or self.cycle.more_body or self.scheme == "https" or self.scope["http_version"] != "1.1":
            return None
        if not self._ended:
            self._ended = True
            if not self.cycle.response_started:
                interim = h11.InformationalResponse(status_code=100, headers=[], reason="Continue")
                self.transport.write(self.conn.send(interim))
            self._look_again(0)
        return True

    def _look_again(self, times: int) -> None:
        self._look = self.loop.call_later(LOOKS[min(times, len(LOOKS) - 1)], self._gone, times)

    def _gone(self, times: int) -> None:
        if self.transport.is_closing() or self._idle():
            return
        poll = select.poll()
        poll.register(self.transport.get_extra_info("socket").fileno(), 0)
        if poll.poll(0):
            self.transport.abort()
        else:
            self._look_again(times + 1)
