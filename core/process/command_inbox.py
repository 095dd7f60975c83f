"""The engine process's reader thread: decodes frames into commands, and receives pixels directly into their final
buffers.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trencadis.core.config import EngineConfig
from trencadis.core.process import engine_messages


@dataclass(slots=True)
class ReceivedPixels:
    """The complete bytes of media ``index`` of request ``id``."""

    id: str
    index: int
    data: NDArray[np.uint8]


@dataclass(slots=True)
class PackedVocabulary:
    """The complete packed vocabulary."""

    data: bytearray


log = logging.getLogger("trencadis.engine")

Resets = engine_messages.ResetPrefixCache | engine_messages.ResetEncoderCache
RareCommand = (
    engine_messages.Abort | engine_messages.MediaFailed | engine_messages.Drain | engine_messages.LearnBuckets | Resets
)
Command = engine_messages.Add | RareCommand | ReceivedPixels | PackedVocabulary


class InboxClosed(Exception):
    """The other end has closed the socket."""


class Inbox:
    """Commands that have arrived but have not been taken yet.

    Args:
        pong: called on the reader thread for each ping.
        ended: called on the reader thread with 0 when the socket ends, 1 when a frame cannot be decoded.
    """

    def __init__(self, sock: socket.socket, pong: Callable[[int], None], ended: Callable[[int], None]) -> None:
        self.sock = sock
        self.pong = pong
        self.ended = ended
        self.changed = threading.Condition()
        self.commands: deque[Command] = deque()
        self.config: EngineConfig | None = None
        self.known: set[str] = set()  # requests whose pixels may arrive
        self.partial: dict[tuple[str, int], tuple[NDArray[np.uint8], int]] = {}
        self.vocabulary = bytearray()
        self.header = memoryview(bytearray(engine_messages.HEADER.size))
        self.waste = memoryview(bytearray(engine_messages.CHUNK))
        threading.Thread(target=self.run, name="reader", daemon=True).start()

    def start(self) -> EngineConfig:
        """Waits for the first message and returns its configuration."""
        with self.changed:
            self.changed.wait_for(lambda: self.config is not None)
        assert self.config is not None
        return self.config

    def take(self, wait: bool, seconds: float | None = None) -> list[Command]:
        """Returns all commands in order; with ``wait``, waits for at least one, at most ``seconds`` long."""
        with self.changed:
            if wait:
                self.changed.wait_for(lambda: bool(self.commands), seconds)
            taken = list(self.commands)
            self.commands.clear()
        return taken

    def forget(self, id: str) -> None:
        """Drops the chunks of an ended request, including those that arrive later."""
        with self.changed:
            self.known.discard(id)
            for key in [k for k in self.partial if k[0] == id]:
                del self.partial[key]

    def run(self) -> None:
        """Body of the reader thread."""
        try:
            while True:
                self.receive()
        except (InboxClosed, OSError):
            self.ended(0)
        except BaseException:
            # Without its reader the process could not be stopped.
            log.exception("a frame from the API process could not be read")
            self.ended(1)

    def receive(self) -> None:
        """Receives and handles one frame."""
        self.fill(self.header)
        size, extra = engine_messages.HEADER.unpack(self.header)
        assert size <= engine_messages.MAX_MESSAGE and extra <= engine_messages.CHUNK, "frame out of bounds"
        body = memoryview(bytearray(size))
        self.fill(body)
        message = engine_messages.decode_down(body)
        match message:
            case engine_messages.Ping(n):
                self.pong(n)
            case engine_messages.Media():
                self.receive_pixels(message, extra)
            case engine_messages.Add():
                if message.request.spans:
                    self.known.add(message.request.id)
                self.push(message)
            case _:
                self.receive_rare(message, extra)

    def receive_rare(
        self, message: engine_messages.VocabularyPart | engine_messages.Start | RareCommand, extra: int
    ) -> None:
        """Handles a frame that is rare; ``extra``: bytes of its payload."""
        match message:
            case engine_messages.VocabularyPart():
                self.receive_vocabulary(message, extra)
            case engine_messages.Start(config):
                with self.changed:
                    self.config = config
                    self.changed.notify()
            case _:
                self.push(message)

    def receive_pixels(self, chunk: engine_messages.Media, size: int) -> None:
        """Receives one chunk of pixels. Chunks arrive in order; offset 0 starts or restarts the item."""
        key = (chunk.id, chunk.index)
        with self.changed:
            buffer, done = self.partial.get(key, (None, 0))
            if chunk.offset == 0 and chunk.id in self.known:
                buffer, done = np.empty(chunk.total, np.uint8), 0
        if buffer is None or chunk.offset != done or done + size > buffer.size:
            self.fill(self.waste[:size])
            return
        self.fill(buffer.data[done : done + size])
        done += size
        with self.changed:
            if chunk.id not in self.known:
                return
            if done < buffer.size:
                self.partial[key] = (buffer, done)
                return
            self.partial.pop(key, None)
        self.push(ReceivedPixels(chunk.id, chunk.index, buffer))

    def receive_vocabulary(self, chunk: engine_messages.VocabularyPart, size: int) -> None:
        """Receives one chunk of the vocabulary; chunks arrive in order."""
        assert chunk.total <= engine_messages.MAX_MESSAGE and chunk.offset + size <= chunk.total, "frame out of bounds"
        if chunk.offset == 0:
            self.vocabulary = bytearray(chunk.total)
        self.fill(memoryview(self.vocabulary)[chunk.offset : chunk.offset + size])
        if chunk.offset + size == chunk.total:
            whole, self.vocabulary = self.vocabulary, bytearray()
            self.push(PackedVocabulary(whole))

    def push(self, command: Command) -> None:
        """Adds a command and wakes the main thread."""
        with self.changed:
            self.commands.append(command)
            self.changed.notify()

    def fill(self, target: memoryview) -> None:
        """Receives exactly as many bytes as ``target`` holds; raises InboxClosed at the end of the stream."""
        while target:
            got = self.sock.recv_into(target)
            if not got:
                raise InboxClosed
            target = target[got:]
