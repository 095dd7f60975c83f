"""A rank's process: ``python -P -m trencadis.core.executor.rank FD`` with one end of a socket pair.

A reader thread takes what comes down and ends the process with the engine, whatever the main thread waits for; the main
thread builds the rank and runs the Steps in their order.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import sys
import threading
from importlib import import_module
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NoReturn

from trencadis.core import logsetup
from trencadis.core.config import EngineConfig
from trencadis.core.errors import StartupError
from trencadis.core.executor import frames
from trencadis.core.executor.base import Rank
from trencadis.core.ranks import Place

log = logging.getLogger("trencadis.engine")


def build(factory: str, config: EngineConfig, place: Place) -> Rank:
    """``package.module:function`` called with the configuration and the place."""
    module, _, name = factory.partition(":")
    made: Any = getattr(import_module(module), name)
    rank: Rank = made(config, place)
    return rank


class Process:
    """One rank behind one socket."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.queue: SimpleQueue[frames.Down] = SimpleQueue()
        self.rendezvous = ""
        threading.Thread(target=self.read, name="reader", daemon=True).start()

    def read(self) -> None:
        """The reader thread. Nothing is worth finishing once the engine is gone."""
        try:
            while True:
                message = frames.decode_down(frames.receive(self.sock))
                if isinstance(message, frames.Begin):
                    self.rendezvous = message.place.rendezvous
                self.queue.put(message)
        except frames.Closed:
            self.end(0)
        except BaseException:
            log.exception("a frame from the engine could not be read")
            self.end(1)

    def end(self, code: int) -> NoReturn:
        """At once; an engine that was killed could not tidy up."""
        if self.rendezvous:
            shutil.rmtree(Path(self.rendezvous).parent, ignore_errors=True)
        os._exit(code)

    def send(self, message: frames.Up) -> None:
        self.sock.sendall(frames.frame(message))

    def serve(self) -> None:
        """Builds the rank and runs what comes."""
        begin = self.queue.get()
        assert isinstance(begin, frames.Begin)
        logsetup.setup("WARNING" if begin.config.log_level == "INFO" else begin.config.log_level)
        rank = build(begin.factory, begin.config, begin.place)
        self.send(frames.Ready())
        while True:
            match self.queue.get():
                case frames.Run(step):
                    output = rank.execute(step).result()
                    self.send(frames.Done(step.number, frames.digest(output)))
                case frames.Warm():
                    rank.warm()

    def main(self) -> int:
        """Serves until the engine ends it; the exit code of a rank that ends by itself."""
        try:
            self.serve()
        except StartupError as error:
            self.send(frames.Failed(str(error), 2))
            return 2
        except BaseException as error:
            log.debug("a rank failed", exc_info=True)
            self.send(frames.Failed(f"{type(error).__name__}: {error}"[:500]))
        return 1


def main() -> NoReturn:
    """Signals of the terminal reach every process of the group; the engine acts on them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    code = Process(socket.socket(fileno=int(sys.argv[1]))).main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Tear-down of device libraries must not decide the exit code, nor wait for ranks that are gone.
    os._exit(code)


if __name__ == "__main__":
    main()
