"""A relay between a rank and its engine that does one wrong thing to one frame, or to all that follow."""

from __future__ import annotations

import random
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from trencadis.core.links.authenticated_link import FULL, HEADER, TAG
from trencadis.core.links.handshake import CLAIM, MARK, NONCE, PROOF

FAULTS = ("flip", "cut", "replay", "skip", "swap", "huge", "drop")


class Relay:
    """Forwards connections to ``target``; frame ``at`` of the chosen direction meets ``fault``.

    Args:
        down: the direction: from the engine to the rank, or back.
    """

    def __init__(self, target: tuple[str, int], fault: str, at: int, down: bool, rng: random.Random) -> None:
        self.fault, self.at, self.down, self.rng = fault, at, down, rng
        self.done = threading.Event()
        self.when = 0.0
        self._target = target
        self._socks: list[socket.socket] = []
        self._held = b""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        for sock in (self._listener, *self._socks):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                rank, _ = self._listener.accept()
                engine = socket.create_connection(self._target)
                self._socks += [rank, engine]
                for down, source, sink in ((True, engine, rank), (False, rank, engine)):
                    threading.Thread(target=self._pump, args=(down, source, sink), daemon=True).start()

    def _pump(self, down: bool, source: socket.socket, sink: socket.socket) -> None:
        faulty = down == self.down
        with suppress(OSError, EOFError):
            for size in (len(MARK) + NONCE, PROOF) if down else (CLAIM,):
                sink.sendall(_read(source, size))
            number = 0
            while True:
                head = _read(source, FULL)
                (size,) = struct.unpack_from("<I", head)
                frame = head + (_read(source, size + TAG) if size else b"")
                for piece in self.altered(frame, number) if faulty else (frame,):
                    sink.sendall(piece)
                if self.fault == "cut" and self.done.is_set():
                    break
                number += 1
        for sock in (source, sink):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def altered(self, frame: bytes, number: int) -> tuple[bytes, ...]:
        """What is forwarded in place of a frame."""
        if self.fault == "swap" and number == self.at + 1:
            self._now()
            return frame, self._held
        if number < self.at or (number > self.at and self.fault != "drop"):
            return (frame,)
        ways: dict[str, Callable[[bytes], tuple[bytes, ...]]] = {
            "flip": self._flip,
            "cut": lambda f: (f[: self.rng.randrange(len(f))],),
            "replay": lambda f: (f, f),
            "skip": lambda f: (),
            "swap": self._hold,
            "huge": lambda f: (HEADER.pack(0xFFFFFFFF, 0, number) + f[HEADER.size :],),
            "drop": lambda f: (),
        }
        made = ways[self.fault](frame)
        if self.fault != "swap":
            self._now()
        return made

    def _now(self) -> None:
        if not self.done.is_set():
            self.when = time.monotonic()
            self.done.set()

    def _flip(self, frame: bytes) -> tuple[bytes, ...]:
        data = bytearray(frame)
        data[self.rng.randrange(len(data))] ^= 1 << self.rng.randrange(8)
        return (bytes(data),)

    def _hold(self, frame: bytes) -> tuple[bytes, ...]:
        self._held = frame
        return ()


def _read(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        got = sock.recv(size - len(data))
        if not got:
            raise EOFError
        data += got
    return data
