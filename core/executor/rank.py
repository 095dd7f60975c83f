"""A rank's process: ``python -P -m trencadis.core.executor.rank FD`` with one end of a socket pair, over which it gets
Steps, or is told where to get them.

A reader thread receives messages and ends the process when the engine ends, whatever the main thread waits for; the
main thread builds the rank and runs the Steps in order.
"""

from __future__ import annotations

import logging
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, NoReturn

from trencadis.core.config import EngineConfig
from trencadis.core.errors import StartupError
from trencadis.core.executor import frames
from trencadis.core.executor.base import Rank, RankHandle
from trencadis.core.executor.dial import dialled
from trencadis.core.executor.facts import facts_of
from trencadis.core.executor.lane import SerialThread
from trencadis.core.executor.ranks import Place, folder_of
from trencadis.core.links.keyed import Pulse
from trencadis.core.links.link import Link, LinkClosed, PlainLink
from trencadis.core.process import children, function_trace, logsetup, settling, torch_build
from trencadis.core.process.heap import Tidier
from trencadis.core.progress import Progress, Silent
from trencadis.core.step import Step, StepOutput

if TYPE_CHECKING:
    from trencadis.core.backend import Pending

log = logging.getLogger("trencadis.engine")

LOST = 3
"""Exit code of a rank that has dialled and whose engine is gone without a goodbye."""

FAREWELL = 0.5
"""Seconds in which the report of a failure may leave a process that ends."""


class CaptureTeller(Silent):
    """Tells the engine which capture begins; all else is rank 0's to report."""

    def __init__(self, send: Callable[[frames.Up], None]) -> None:
        self._send = send

    def capture(self, bucket: str, begun: bool) -> None:
        """Before and after each."""
        self._send(frames.Capturing(bucket, begun))


def build(factory: str, config: EngineConfig, place: Place, progress: Progress) -> RankHandle:
    """Builds a rank: calls ``package.module:function`` with the configuration, the place and who is told of it."""
    module, _, name = factory.partition(":")
    made: Any = getattr(import_module(module), name)
    opened: RankHandle = made(config, place, progress)
    return opened


class RankProcess:
    """One rank behind one link.

    Args:
        dial: how the link was made, if this process has dialled: then versions are compared first, and the engine says
            goodbye where it ends as it should.
    """

    def __init__(self, link: Link, dial: frames.Dial | None = None) -> None:
        self.link, self.dial = link, dial
        self.queue: SimpleQueue[frames.Down] = SimpleQueue()
        self.rendezvous = ""
        self.place = Place()
        self.steady = False
        if dial is not None:
            Pulse(lambda: link.beat(self.steady))

    def listen(self, first: frames.Down | None = None) -> None:
        """Starts the reader thread; ``first`` has been received already."""
        if first is not None:
            self.take(first)
        threading.Thread(target=self.read, name="reader", daemon=True).start()

    def take(self, message: frames.Down) -> None:
        """Queues a message."""
        if isinstance(message, frames.Begin):
            self.rendezvous = message.place.rendezvous
        self.queue.put(message)

    def read(self) -> None:
        """The reader thread. It ends the process at once when the engine is gone."""
        try:
            while True:
                message = frames.decode_down(self.link.receive())
                if isinstance(message, frames.End):
                    self.end(0)
                self.take(message)
        except LinkClosed as why:
            if self.dial is not None and str(why):
                log.warning("rank %d: the engine is gone: %s", self.dial.rank, why)
            self.end(0 if self.dial is None else LOST)
        except BaseException:
            log.exception("a frame from the engine could not be read")
            self.end(1)

    def end(self, code: int) -> NoReturn:
        """Ends the process at once; removes the rendezvous folder, which a killed engine could not."""
        folder = folder_of(self.rendezvous)
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(code)

    def send(self, message: frames.Up) -> None:
        """Sends one message to the engine; several threads call it."""
        with suppress(LinkClosed):  # the reader thread ends the process
            self.link.send(frames.encode(message))

    def begun(self) -> frames.Begin:
        """What the engine starts with; where this process has dialled, once all ranks have been compared."""
        begin = self.queue.get()
        assert isinstance(begin, frames.Begin)
        if self.dial is None:
            return begin
        own = self.dial
        begin.config = replace(begin.config, model=own.model or begin.config.model, threads=own.threads)
        begin.place = replace(begin.place, local=own.local, beside=own.beside)
        self.send(frames.Met(facts_of(begin.config.model)))
        assert isinstance(self.queue.get(), frames.Go)
        return begin

    def serve(self) -> None:
        """Builds the rank, then runs Steps and pieces of warm-up as they arrive."""
        begin = self.begun()
        self.place = begin.place
        level = "WARNING" if begin.config.log_level == "INFO" else begin.config.log_level
        logsetup.setup(level, begin.config.log_format)
        function_trace.start_if_asked()
        settling.settle(begin.config.device, rank=begin.place.card, world=begin.place.cards)
        if begin.factory.startswith(f"{__package__.partition('.')[0]}."):
            torch_build.load()
        opened = build(begin.factory, begin.config, begin.place, CaptureTeller(self.send))
        self.send(frames.RankReady())
        self.steady = True
        run = self.overlapped(opened) if opened.overlaps else self.one_by_one(opened.rank)
        tidier = Tidier()
        tidier.begin()
        while True:
            try:
                message = self.queue.get(timeout=tidier.wait())
            except Empty:
                tidier.tidy()
                continue
            match message:
                case frames.Run(step):
                    run(step)
                    tidier.stepped()
                case frames.Words(data):
                    opened.rank.vocabulary(data)
                case frames.Compile(number, grammar):
                    self.compile(opened.rank, number, grammar)
                case frames.Warm():
                    self.warm(opened.rank)

    def warm(self, rank: Rank) -> None:
        """Runs a piece of warm-up; a compiler may hold the interpreter's lock for long, so beats promise nothing."""
        self.steady = False
        self.link.beat(False)
        try:
            rank.warm()
        finally:
            self.steady = True

    def compile(self, rank: Rank, number: int, grammar: str) -> None:
        """Compiles a grammar in a thread and reports it."""
        rank.prepare(grammar).add_done_callback(lambda done: self.send(frames.Compiled(number, done.result())))

    def done(self, output: StepOutput) -> None:
        """Reports a finished Step, where tokens are drawn."""
        if self.place.answers:
            self.send(frames.StepAnswer.of(output))
        elif self.place.draws:
            self.send(frames.Done(output.number, frames.digest(output)))

    def one_by_one(self, rank: Rank) -> Callable[[Step], None]:
        """Runs each Step to its end before the next."""
        return lambda step: self.done(rank.execute(step).result())

    def overlapped(self, opened: RankHandle) -> Callable[[Step], None]:
        """Waits for results on another thread, with as many Steps in flight as rank 0 has."""
        results, free = SerialThread("results"), threading.Semaphore(opened.depth + 1)

        def take(pending: Pending[StepOutput]) -> None:
            try:
                self.done(pending.result())
            except BaseException as error:
                self.end(self.failed(error))
            free.release()

        def run(step: Step) -> None:
            free.acquire()
            pending = opened.rank.execute(step)
            results.put(lambda: take(pending))

        return run

    def failed(self, error: BaseException) -> int:
        """Reports why this rank ends; returns the exit code."""
        user = isinstance(error, StartupError)
        log.debug("a rank failed", exc_info=error)
        self.send(
            frames.RankFailure(str(error), 2) if user else frames.RankFailure(f"{type(error).__name__}: {error}"[:500])
        )
        if self.dial is not None:
            time.sleep(FAREWELL)  # under TLS a thread sends it
        return 2 if user else 1

    def main(self) -> int:
        """Serves until the engine ends the process; returns the exit code of a rank that fails."""
        try:
            self.serve()
        except BaseException as error:
            return self.failed(error)
        return 1


def main(sock: socket.socket) -> int:
    """Serves as a rank of whoever started this process, or of the engine to which it says to dial."""
    parent = PlainLink(sock)
    try:
        first = frames.decode_down(parent.receive())
    except LinkClosed:
        return 0
    if not isinstance(first, frames.Dial):
        process = RankProcess(parent)
        process.listen(first)
        return process.main()
    threading.Thread(target=_lifeline, args=(parent,), name="lifeline", daemon=True).start()
    try:
        link = dialled(first)
    except StartupError as error:
        with suppress(LinkClosed):
            parent.send(frames.encode(frames.RankFailure(str(error), 2)))
        return 2
    with suppress(LinkClosed):
        parent.send(frames.encode(frames.Linked()))
    process = RankProcess(link, first)
    process.listen()
    return process.main()


def _lifeline(parent: PlainLink) -> NoReturn:
    """Ends the process with the one that started it."""
    with suppress(LinkClosed):
        while True:
            parent.receive()
    os._exit(0)


if __name__ == "__main__":
    children.run(main)
