"""The engine's process: ``python -P -m trencadis.core.process.engine_process FD`` with one end of a socket pair.

A reader thread decodes messages, receives pixels directly into their buffers and answers pings; the main thread loads
the engine and steps it. Torch is imported by the engine's factory, which the configuration names.
"""

from __future__ import annotations

import gc
import importlib
import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from trencadis.core.checkpoint import weight_prefetch
from trencadis.core.device.packed_weights_file import packed_file
from trencadis.core.engine_config import EngineConfig
from trencadis.core.errors import StartupError, TrencadisError, is_out_of_memory
from trencadis.core.links.rank_placement import topology
from trencadis.core.process import (
    child_process_environment_and_exit,
    engine_messages,
    function_trace,
    heap_trimmer,
    log_setup,
    torch_detection,
)
from trencadis.core.request import Delta, Request
from trencadis.core.startup_progress_and_warmup_pacing import Progress
from trencadis.core.step import PixelNeed


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


STATS_EVERY = 0.25
BORN = time.monotonic()


class EngineLike(Protocol):
    """The part of ``Engine`` that this process uses."""

    def info(self) -> engine_messages.EngineInfo: ...
    def add(self, request: Request) -> None: ...
    def abort(self, id: str, choice: int = -1) -> None: ...
    def add_media(self, id: str, index: int, pixels: NDArray[np.uint8]) -> None: ...
    def media_failed(self, id: str, index: int, status: int, message: str) -> None: ...
    def step(self) -> Sequence[Delta]: ...
    def busy(self) -> bool: ...
    def needs(self) -> Sequence[PixelNeed]: ...
    def reset_prefix_cache(self) -> None: ...
    def set_vocabulary(self, data: bytes | bytearray) -> None: ...
    def reset_encoder_cache(self) -> None: ...
    def learn_buckets(self, force: bool = False) -> None: ...
    def save(self) -> None: ...
    def stats(self) -> engine_messages.EngineStats: ...


Factory = Callable[[EngineConfig, Progress], EngineLike]


def find_factory(entry: str) -> Factory:
    """Imports the object that ``package.module:name.attribute`` refers to."""
    module, _, path = entry.partition(":")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return cast(Factory, found)


class EngineProcess:
    """Runs one engine, connected by one socket."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.sending = threading.Lock()
        self.phase = "starting"
        self.step = 0
        self.since: float | None = BORN
        self.open: dict[str, set[int]] = {}
        """Unfinished choices of each request.

        Needed because the finish and the abort of a choice may be sent at the same time.
        """
        self.draining = False
        self.stepped = False
        self.last_report = 0.0
        self.heap_trimmer = heap_trimmer.HeapTrimmer()
        # Last, because its thread calls back at once.
        self.inbox = Inbox(sock, self.pong, self.reader_ended)

    def send(self, message: engine_messages.Up) -> None:
        """Sends one frame; called from both threads."""
        with self.sending:
            self.sock.sendall(engine_messages.frame(message))

    def pong(self, n: int) -> None:
        """Answers a ping; called from the reader thread."""
        since = self.since
        self.send(engine_messages.Pong(n, self.phase, self.step, 0.0 if since is None else time.monotonic() - since))

    def reader_ended(self, code: int) -> None:
        """Ends the process at once, because there is no client left to serve; called by the reader thread."""
        child_process_environment_and_exit.exit_now(code)

    def __call__(
        self, name: str, detail: str = "", fraction: float = 0.0, done: int = 0, total: int = 0, eta: float = 0.0
    ) -> None:
        """Reports a phase of loading, or of work between steps (compiling); implements ``Progress``."""
        self.phase = name
        self.send(engine_messages.Phase(name, detail, time.monotonic() - BORN, fraction, done, total, eta))

    def capture(self, bucket: str, begun: bool) -> None:
        """Reports a capture before it begins, so that the parent knows about it if this process dies."""
        self.send(engine_messages.Capture(bucket, begun))

    def enter(self, phase: str) -> str:
        """Sets the phase that health checks report; returns the previous one. Each phase has its own time limit."""
        before, self.phase = self.phase, phase
        return before

    def load(self, config: EngineConfig) -> EngineLike:
        """Loads the engine and reports that it is ready."""
        self("importing")
        with heap_trimmer.pause_gc():
            factory = self.import_factory(config)
        self("loading")
        engine = factory(config, self)
        self.heap_trimmer.begin()
        info = engine.info()
        info.seconds = info.seconds or time.monotonic() - BORN
        self.phase, self.since = "idle", None
        self.send(engine_messages.Ready(info))
        return engine

    def import_factory(self, config: EngineConfig) -> Factory:
        """Imports torch, unless a test names another engine, and the engine's factory."""
        if config.engine != EngineConfig().engine:
            return find_factory(config.engine)
        for line in torch_detection.prepare_device_env(config.device, world=topology(config, os.environ).here).lines:
            log.debug("%s", line)  # the server has already printed it
        kept = packed_file(config)
        weight_prefetch.start_prefetch(config.model, config.load_format, None if kept is None else kept.path)
        self("importing", "torch")
        torch_detection.import_torch()
        factory = find_factory(config.engine)
        # Start-up collects garbage whenever it measures memory; frozen objects (here torch's) are not traversed.
        gc.freeze()
        return factory

    def serve(self, engine: EngineLike) -> None:
        """Steps the engine until it is drained."""
        while True:
            waiting = not engine.busy() and not self.is_drained()
            commands = self.inbox.take(waiting, self.heap_trimmer.wait() if waiting else None)
            if waiting and not commands:
                self.heap_trimmer.collect_and_trim()
            if commands:
                self.since = time.monotonic()  # handling may hang just like a step
            for command in commands:
                self.handle(engine, command)
            self.since = None
            if self.is_drained():
                engine.save()
                return
            if commands or engine.busy():
                self.advance(engine)

    def is_drained(self) -> bool:
        """Returns True if a drain was requested and no request is left."""
        return self.draining and not self.open

    def advance(self, engine: EngineLike) -> None:
        """Runs one step and sends its outputs."""
        self.step += 1
        self.phase, self.since = "serving", time.monotonic()
        items = list(engine.step())
        self.phase, self.since, self.stepped = "idle", None, True
        self.heap_trimmer.after_step()
        for need in engine.needs():
            self.send(engine_messages.NeedMedia(*need))
        self.report(engine, items)

    def report(self, engine: EngineLike, items: list[Delta]) -> None:
        """Sends a step's Deltas with the counters; counters alone every STATS_EVERY seconds and before idling."""
        for delta in items:
            if delta.finish is not None:
                self.note_finished(delta.id, {delta.choice})
        now = time.monotonic()
        if items or (self.stepped and (now - self.last_report > STATS_EVERY or not engine.busy())):
            self.last_report, self.stepped = now, False
            self.send(engine_messages.Deltas(items, engine.stats()))

    def note_finished(self, id: str, choices: set[int]) -> None:
        """Records that choices of a request have ended."""
        left = self.open.get(id)
        if left is not None:
            left -= choices
            if not left:
                del self.open[id]
                if id in self.inbox.known:
                    self.inbox.forget(id)

    def handle(self, engine: EngineLike, command: Command) -> None:
        """Handles one message of the API process."""
        match command:
            case engine_messages.Add(request):
                self.add(engine, request)
            case ReceivedPixels(id, index, data):
                if id in self.open:
                    engine.add_media(id, index, data)  # flat; the engine knows the number of values of a slot
            case _:
                self.handle_rare(engine, command)

    def abort(self, engine: EngineLike, ids: Sequence[str], choice: int) -> None:
        """Aborts requests, or one choice of each; -1: all."""
        for id in ids:
            if id in self.open:
                engine.abort(id, choice)
                self.note_finished(id, {choice} if choice >= 0 else set(self.open[id]))

    def handle_rare(self, engine: EngineLike, command: Command) -> None:
        """Handles a message that is rare."""
        match command:
            case engine_messages.Abort(ids, choice):
                self.abort(engine, ids, choice)
            case engine_messages.MediaFailed(id, index, status, message):
                if id in self.open:
                    engine.media_failed(id, index, status, message)
            case PackedVocabulary(data):
                engine.set_vocabulary(data)
            case engine_messages.ResetPrefixCache():
                engine.reset_prefix_cache()
            case engine_messages.ResetEncoderCache():
                engine.reset_encoder_cache()
            case engine_messages.LearnBuckets(force):
                engine.learn_buckets(force)
            case engine_messages.Drain():
                self.draining = True

    def add(self, engine: EngineLike, request: Request) -> None:
        """Adds a request; if the engine rejects it, the request ends with that error."""
        self.open[request.id] = set(range(request.params.n))
        try:
            engine.add(request)
        except TrencadisError as error:
            self.refuse(request, error)

    def refuse(self, request: Request, error: TrencadisError) -> None:
        """Ends each choice of a request with an error."""
        choices = range(request.params.n)
        ended = [Delta(request.id, i, finish="error", status=error.status, message=error.message) for i in choices]
        self.note_finished(request.id, set(choices))
        self.send(engine_messages.Deltas(ended))

    def main(self) -> int:
        """Loads the engine and serves; returns the exit code."""
        try:
            config = self.inbox.start()
            log_setup.setup(config.log_level, config.log_format)
            log_setup.apply_config_file(config.log_config_file)
            function_trace.start_if_asked()
            self.serve(self.load(config))
        except StartupError as error:
            self.send(engine_messages.Fatal(str(error), 2))
            return 2
        except BaseException as error:
            if is_out_of_memory(error):  # no traceback says more
                log.error(
                    "the engine failed in phase %s, step %d: %s", self.phase, self.step, " ".join(str(error).split())
                )
            else:
                log.exception("the engine failed in phase %s, step %d", self.phase, self.step)
            self.send(engine_messages.Fatal(f"{type(error).__name__}: {error}"[:500], 1, getattr(error, "capture", "")))
            return 1
        return 0


if __name__ == "__main__":
    child_process_environment_and_exit.run(lambda sock: EngineProcess(sock).main())
