"""A rank's process: ``python -P -m trencadis.core.executor.rank FD`` with one end of a socket pair.

A reader thread receives messages and ends the process when the engine ends, whatever the main thread waits for; the
main thread builds the rank and runs the Steps in order.
"""

from __future__ import annotations

import logging
import os
import shutil
import socket
import threading
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, NoReturn

from trencadis.core.config import EngineConfig
from trencadis.core.errors import StartupError
from trencadis.core.executor import frames
from trencadis.core.executor.base import Rank, RankHandle
from trencadis.core.executor.lane import SerialThread
from trencadis.core.executor.ranks import Place
from trencadis.core.process import children, function_trace, logsetup, settling, torch_build
from trencadis.core.process.heap import Tidier
from trencadis.core.step import Step, StepOutput

if TYPE_CHECKING:
    from trencadis.core.backend import Pending

log = logging.getLogger("trencadis.engine")


def build(factory: str, config: EngineConfig, place: Place) -> RankHandle:
    """Builds a rank: calls ``package.module:function`` with the configuration and the place."""
    module, _, name = factory.partition(":")
    made: Any = getattr(import_module(module), name)
    opened: RankHandle = made(config, place)
    return opened


class RankProcess:
    """One rank behind one socket."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.queue: SimpleQueue[frames.Down] = SimpleQueue()
        self.sending = threading.Lock()
        self.rendezvous = ""
        self.place = Place()
        threading.Thread(target=self.read, name="reader", daemon=True).start()

    def read(self) -> None:
        """The reader thread. It ends the process at once when the engine is gone."""
        try:
            while True:
                message = frames.decode_down(frames.receive(self.sock))
                if isinstance(message, frames.Begin):
                    self.rendezvous = message.place.rendezvous
                self.queue.put(message)
        except frames.LinkClosed:
            self.end(0)
        except BaseException:
            log.exception("a frame from the engine could not be read")
            self.end(1)

    def end(self, code: int) -> NoReturn:
        """Ends the process at once; removes the rendezvous folder, which a killed engine could not."""
        if self.rendezvous:
            shutil.rmtree(Path(self.rendezvous).parent, ignore_errors=True)
        os._exit(code)

    def send(self, message: frames.Up) -> None:
        """Sends one message to the engine; several threads call it."""
        with self.sending:
            self.sock.sendall(frames.frame(message))

    def serve(self) -> None:
        """Builds the rank, then runs Steps and pieces of warm-up as they arrive."""
        begin = self.queue.get()
        assert isinstance(begin, frames.Begin)
        self.place = begin.place
        level = "WARNING" if begin.config.log_level == "INFO" else begin.config.log_level
        logsetup.setup(level, begin.config.log_format)
        function_trace.start_if_asked()
        settling.settle(begin.config.device, rank=begin.place.rank, world=begin.place.world)
        if begin.factory.startswith(f"{__package__.partition('.')[0]}."):
            torch_build.load()
        opened = build(begin.factory, begin.config, begin.place)
        self.send(frames.RankReady())
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
                    opened.rank.warm()

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
        return 2 if user else 1

    def main(self) -> int:
        """Serves until the engine ends the process; returns the exit code of a rank that fails."""
        try:
            self.serve()
        except BaseException as error:
            return self.failed(error)
        return 1


if __name__ == "__main__":
    children.run(lambda sock: RankProcess(sock).main())
