"""A link over TCP with numbered frames that are authenticated with keyed BLAKE2, and a relay between it and a socket.

A frame is a header of 16 bytes (uint32 size, uint8 kind, 3 zero bytes, uint64 number; little-endian) and its tag of 16
bytes; then, unless the size is 0, the message and its tag of 16 bytes, which covers header and message. Each direction
has its own key, derived from the group's key and both challenges (``handshake.py``), and its own numbers from 0. So a
frame that is altered, dropped, replayed, reflected or moved to another link is detected before its message is used. The
size is trusted only after the header's tag has been checked, and only up to ``most``.
"""

from __future__ import annotations

import hashlib
import hmac
import socket
import struct
import threading
import time
from collections.abc import Callable

from trencadis.core.links.message_link import BEAT, LinkClosed, Pieces, SendQueue, shut_socket
from trencadis.core.links.tcp_and_tls_stream import ByteStream

HEADER = struct.Struct("<IB3xQ")
TAG = 16
FULL = HEADER.size + TAG

MESSAGE, BEAT_LOADING, BEAT_STEADY = range(3)
"""Kinds of frames.

A loading process may hold the interpreter's lock for long, so its heartbeats do not promise that the next one arrives
in time.
"""

BEATS_WITHOUT_READER = 4
"""Flag added to a heartbeat: nothing has been received since the last one.

A connection may be broken in one direction only.
"""

MISSED = 10
"""Number of missing heartbeats after which the other process counts as dead."""

PATIENT = 120.0
"""Seconds of silence allowed for a process that is still loading."""

MOST = 1 << 30
"""Largest message in bytes."""

PIECE = 256 << 10
"""Most bytes of a socket that a relay forwards as one message."""

BACKLOG = 16
"""Number of waiting messages above which a relay does not read its socket, so that its writer blocks."""

PAUSE = 0.001
FLUSH = 5.0
"""Seconds in which a relay may send the last messages after the socket has ended."""


class KeyedLink:
    """A ``core.links.message_link.Link`` over a stream whose two ends have completed the handshake.

    Args:
        seal, check: taggers of the two directions (``tagger``), which do not reveal their keys.
        most: largest message in bytes that is accepted.
    """

    def __init__(self, stream: ByteStream, seal: hashlib.blake2b, check: hashlib.blake2b, most: int = MOST) -> None:
        self.stream, self._most = stream, most
        self._seal_with, self._check_with = seal, check
        self._sent = self._received = 0
        self._steady = self._promised = self._heard = False
        self._deaf = 0
        self._send_queue = SendQueue(stream.send_now, stream.send_all)

    def send(self, body: bytes) -> None:
        """Sends one message."""
        if len(body) > MOST:
            raise ValueError(f"a message of {len(body)} bytes; a link takes {MOST}")
        if not self._send_queue.put(lambda: self._seal(MESSAGE, body), len(body)):
            raise LinkClosed("the connection is closed")

    def beat(self, steady: bool) -> None:
        """Sends a heartbeat, unless messages are waiting to be sent, which serve as one."""
        self._promised = steady
        if self._send_queue.idle:
            kind = (BEAT_STEADY if steady else BEAT_LOADING) + (0 if self._heard else BEATS_WITHOUT_READER)
            self._heard = False
            self._send_queue.put(lambda: self._seal(kind, b""), 0)

    def receive(self) -> bytearray:
        """Returns the next message.

        Silence of ``MISSED`` heartbeats, or any frame that was not received as sent, closes the link and raises
        LinkClosed.
        """
        try:
            while True:
                kind, body = self._frame()
                self._heard = True
                if kind == MESSAGE:
                    return body
                self._steady = kind & ~BEATS_WITHOUT_READER == BEAT_STEADY
                self._deaf = self._deaf + 1 if kind & BEATS_WITHOUT_READER and self._promised else 0
                if self._deaf >= MISSED:
                    raise LinkClosed(f"it hears nothing for {MISSED * BEAT:g} s")
        except LinkClosed:
            self.close()
            raise

    @property
    def backlog(self) -> int:
        """Number of frames that wait to be sent."""
        return self._send_queue.backlog

    def close(self) -> None:
        """Closes both directions."""
        self._send_queue.end()
        self.stream.close()

    # Frames

    def _seal(self, kind: int, body: bytes) -> Pieces:
        header = HEADER.pack(len(body), kind, self._sent)
        self._sent += 1
        head = header + _tag(self._seal_with, header)
        return (head,) if not body else (head, body, _tag(self._seal_with, header, body))

    def _frame(self) -> tuple[int, bytearray]:
        head = self._receive_exactly(FULL)
        header = bytes(head[: HEADER.size])
        if not hmac.compare_digest(_tag(self._check_with, header), head[HEADER.size :]):
            raise LinkClosed("a frame was altered")
        size, kind, number = HEADER.unpack(header)
        if number != self._received:
            raise LinkClosed(f"frame {number} came where {self._received} was due")
        if size > self._most:
            raise LinkClosed(f"a message of {size} bytes is announced; {self._most} are taken")
        self._received += 1
        if not size:
            return kind, bytearray()
        body = self._receive_exactly(size)
        if not hmac.compare_digest(_tag(self._check_with, header, body), self._receive_exactly(TAG)):
            raise LinkClosed("a frame was altered")
        return kind, body

    def _receive_exactly(self, size: int) -> bytearray:
        data = bytearray(size)
        left, missed = memoryview(data), 0
        while left:
            limit = MISSED * BEAT if self._steady else PATIENT
            try:
                got = self.stream.receive_into(left, BEAT)
            except TimeoutError:
                missed += 1  # counted one by one, because the clock may advance while the machine is suspended
                if missed * BEAT >= limit:
                    raise LinkClosed(f"no sign of life for {limit:g} s") from None
                continue
            except ConnectionResetError:
                got = 0
            except OSError as error:
                raise LinkClosed(error.strerror or "the connection broke") from None
            if not got:
                raise LinkClosed("it closed its connection")
            left, missed = left[got:], 0
        return data


class HeartbeatThread:
    """Sends heartbeats on all links of a process from its own thread, until ``end``."""

    def __init__(self, beat: Callable[[], None]) -> None:
        self._ended = threading.Event()
        self._beat = beat
        threading.Thread(target=self._run, name="pulse", daemon=True).start()

    def _run(self) -> None:
        due = time.monotonic()
        while not self._ended.wait(max(due - time.monotonic(), 0.0)):
            self._beat()
            due = max(due + BEAT, time.monotonic())

    def end(self) -> None:
        """Stops the heartbeats."""
        self._ended.set()


class Relay:
    """Forwards bytes between a local socket and a link, so that a remote process can be used like a local one.

    It runs on its own threads until the socket or the link ends; then it closes both.

    Args:
        sock: one end of a stream; the relay takes ownership of it and of the link.
        ended: called once, on one of these threads, with the link's reason.
    """

    def __init__(self, sock: socket.socket, link: KeyedLink, ended: Callable[[str], None] = lambda why: None) -> None:
        self._sock, self._link, self._on_end = sock, link, ended
        self._lock = threading.Lock()
        self._over = False
        self._pulse = HeartbeatThread(lambda: link.beat(True))
        for work in (self._out, self._back):
            threading.Thread(target=work, name="relay", daemon=True).start()

    def close(self) -> None:
        """Closes the socket and the link."""
        self._end("")

    def _out(self) -> None:
        try:
            while piece := self._sock.recv(PIECE):
                self._link.send(piece)
                while self._link.backlog > BACKLOG:
                    time.sleep(PAUSE)
        except (OSError, LinkClosed):
            pass
        end = time.monotonic() + FLUSH
        while self._link.backlog and not self._over and time.monotonic() < end:
            time.sleep(PAUSE)
        self._end("")

    def _back(self) -> None:
        why = ""
        try:
            while True:
                self._sock.sendall(self._link.receive())
        except LinkClosed as closed:
            why = str(closed)
        except OSError:
            pass
        self._end(why)

    def _end(self, why: str) -> None:
        with self._lock:
            first, self._over = not self._over, True
        if first:
            self._pulse.end()
            self._link.close()
            shut_socket(self._sock)
            self._on_end(why)


def tagger(key: bytes) -> hashlib.blake2b:
    """Returns a BLAKE2b state keyed with ``key``, which is copied for each tag."""
    return hashlib.blake2b(key=key, digest_size=TAG)


def _tag(base: hashlib.blake2b, *parts: bytes | bytearray) -> bytes:
    made = base.copy()
    for part in parts:
        made.update(part)
    return made.digest()
