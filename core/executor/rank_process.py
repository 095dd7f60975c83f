"""A rank's process: ``python -P -m trencadis.core.executor.rank_process FD`` with one end of a socket pair.

Over the socket it receives Steps, or the address of the remote engine that sends them. A reader thread receives
messages and ends the process when the engine ends, even if the main thread is blocked; the main thread builds the rank
and runs the Steps in order.
"""

from __future__ import annotations

import logging
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, NoReturn

from trencadis.core.engine_config import EngineConfig
from trencadis.core.errors import StartupError
from trencadis.core.executor import rank_messages
from trencadis.core.executor.executor_interface import Rank, RankHandle, SerialThread
from trencadis.core.executor.headless_ranks import connect_to_engine
from trencadis.core.executor.rank_info_and_fingerprint import RankInfo, compute_rank_fingerprint, folder_of
from trencadis.core.links.authenticated_link import HeartbeatThread
from trencadis.core.links.message_link import Link, LinkClosed, PlainLink
from trencadis.core.process import child_process_environment_and_exit, function_trace, log_setup, torch_detection
from trencadis.core.process.heap_trimmer import HeapTrimmer
from trencadis.core.startup_progress_and_warmup_pacing import Progress, SilentProgress
from trencadis.core.step import Step
from trencadis.core.step_output import StepOutput

if TYPE_CHECKING:
    from trencadis.core.device.backend import Pending

log = logging.getLogger("trencadis.engine")

LOST = 3
"""Exit code of a rank whose remote engine ended without ``Shutdown``."""

FAREWELL = 0.5
"""Seconds to wait before exit, so that a failure report can be sent."""


class CaptureReporter(SilentProgress):
    """Reports only captures to the engine; all other progress is reported by rank 0."""

    def __init__(self, send: Callable[[rank_messages.Up], None]) -> None:
        self._send = send

    def capture(self, bucket: str, begun: bool) -> None:
        """Reports that the capture of ``bucket`` begins or has ended."""
        self._send(rank_messages.CaptureProgress(bucket, begun))


def build(factory: str, config: EngineConfig, rank_info: RankInfo, progress: Progress) -> RankHandle:
    """Builds a rank: calls ``package.module:function`` with configuration, rank info and progress receiver."""
    module, _, name = factory.partition(":")
    made: Any = getattr(import_module(module), name)
    opened: RankHandle = made(config, rank_info, progress)
    return opened


class RankProcess:
    """One rank, connected by one link.

    If this process connected to a remote engine (``target`` is given), versions are compared first, and the engine
    sends ``Shutdown`` when it ends normally.
    """

    def __init__(self, link: Link, target: rank_messages.ConnectInfo | None = None) -> None:
        self.link, self.connect_info = link, target
        self.queue: SimpleQueue[rank_messages.Down] = SimpleQueue()
        self.rendezvous = ""
        self.rank_info = RankInfo()
        self.steady = False
        HeartbeatThread(lambda: link.beat(self.steady))

    def listen(self, first: rank_messages.Down | None = None) -> None:
        """Starts the reader thread; ``first`` is a message that has already been received."""
        if first is not None:
            self.take(first)
        threading.Thread(target=self.read, name="reader", daemon=True).start()

    def take(self, message: rank_messages.Down) -> None:
        """Queues a message for the main thread."""
        if isinstance(message, rank_messages.StartRank):
            self.rendezvous = message.rank_info.rendezvous
        self.queue.put(message)

    def read(self) -> None:
        """Body of the reader thread; ends the process at once when the engine is gone."""
        try:
            while True:
                message = rank_messages.decode_down(self.link.receive())
                if isinstance(message, rank_messages.Shutdown):
                    self.end(0)
                self.take(message)
        except LinkClosed as why:
            if self.connect_info is not None and str(why):
                log.warning("rank %d: the engine is gone: %s", self.connect_info.rank, why)
            self.end(0 if self.connect_info is None else LOST)
        except BaseException:
            log.exception("a frame from the engine could not be read")
            self.end(1)

    def end(self, code: int) -> NoReturn:
        """Ends the process at once; removes the rendezvous folder, which a killed engine could not."""
        folder = folder_of(self.rendezvous)
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        child_process_environment_and_exit.exit_now(code)

    def send(self, message: rank_messages.Up) -> None:
        """Sends one message to the engine; may be called from several threads."""
        with suppress(LinkClosed):  # the reader thread ends the process
            self.link.send(rank_messages.encode(message))

    def await_start(self) -> rank_messages.StartRank:
        """Waits for the engine's first message and, on a TCP link, until all ranks have been compared."""
        begin = self.queue.get()
        assert isinstance(begin, rank_messages.StartRank)
        if self.connect_info is None:
            return begin
        own = self.connect_info
        begin.config = replace(begin.config, model=own.model or begin.config.model, threads=own.threads)
        begin.rank_info = replace(begin.rank_info, local=own.local, ranks_on_machine=own.local_world)
        self.send(rank_messages.RendezvousJoined(compute_rank_fingerprint(begin.config.model)))
        assert isinstance(self.queue.get(), rank_messages.RendezvousDone)
        return begin

    def serve(self) -> None:
        """Builds the rank, then runs Steps and units of warm-up as they arrive."""
        begin = self.await_start()
        self.rank_info = begin.rank_info
        level = "WARNING" if begin.config.log_level == "INFO" else begin.config.log_level
        log_setup.setup(level, begin.config.log_format)
        log_setup.apply_config_file(begin.config.log_config_file)
        function_trace.start_if_asked()
        torch_detection.prepare_device_env(begin.config.device, rank=begin.rank_info.card, world=begin.rank_info.cards)
        if begin.factory.startswith(f"{__package__.partition('.')[0]}."):
            torch_detection.import_torch()
        opened = build(begin.factory, begin.config, begin.rank_info, CaptureReporter(self.send))
        self.send(rank_messages.RankReady())
        self.steady = True
        run = self.run_overlapped(opened) if opened.overlaps else self.run_one_by_one(opened.rank)
        trimmer = HeapTrimmer()
        trimmer.begin()
        while True:
            try:
                message = self.queue.get(timeout=trimmer.wait())
            except Empty:
                trimmer.collect_and_trim()
                continue
            match message:
                case rank_messages.RunStep(step):
                    run(step)
                    trimmer.after_step()
                case rank_messages.SetVocabulary(data):
                    opened.rank.set_vocabulary(data)
                case rank_messages.CompileGrammar(number, grammar):
                    self.report_task(number, opened.rank.prepare(grammar))
                case rank_messages.LoadAdapter(number, ref, drop):
                    self.report_task(number, opened.rank.load_adapter(ref, drop))
                case rank_messages.RunWarmup():
                    self.warm(opened.rank)
                case rank_messages.ChangePlan(version, buckets):
                    opened.rank.change_plan(version, buckets)

    def warm(self, rank: Rank) -> None:
        """Runs one unit of warm-up with heartbeats marked as unsteady, since a compiler may hold the GIL for long."""
        self.steady = False
        self.link.beat(False)
        try:
            rank.warm()
        finally:
            self.steady = True

    def report_task(self, number: int, task: Future[str]) -> None:
        """Reports the result of a task that runs in a thread."""
        task.add_done_callback(lambda done: self.send(rank_messages.TaskDone(number, done.result())))

    def report_step(self, output: StepOutput) -> None:
        """Reports a finished Step if this rank is on the last stage."""
        if self.rank_info.answers:
            self.send(rank_messages.StepAnswer.of(output))
        elif self.rank_info.draws:
            self.send(rank_messages.StepDone(output.number, rank_messages.digest(output)))

    def run_one_by_one(self, rank: Rank) -> Callable[[Step], None]:
        """Returns a function that runs each Step to its end."""
        return lambda step: self.report_step(rank.execute(step).result())

    def run_overlapped(self, opened: RankHandle) -> Callable[[Step], None]:
        """Returns a function that launches Steps while another thread waits for results.

        As many Steps are in flight as on rank 0.
        """
        results, free = SerialThread("results"), threading.Semaphore(opened.depth + 1)

        def take(pending: Pending[StepOutput]) -> None:
            try:
                self.report_step(pending.result())
            except BaseException as error:
                self.end(self.report_failure(error))
            free.release()

        def run(step: Step) -> None:
            free.acquire()
            pending = opened.rank.execute(step)
            results.put(lambda: take(pending))

        return run

    def report_failure(self, error: BaseException) -> int:
        """Reports to the engine why this rank ends; returns the exit code."""
        user = isinstance(error, StartupError)
        log.debug("a rank failed", exc_info=error)
        self.send(
            rank_messages.RankFailure(str(error), 2)
            if user
            else rank_messages.RankFailure(f"{type(error).__name__}: {error}"[:500])
        )
        if self.connect_info is not None:
            time.sleep(FAREWELL)  # under TLS, another thread sends the report
        return 2 if user else 1

    def main(self) -> int:
        """Serves until the engine ends the process; returns the exit code if the rank fails."""
        try:
            self.serve()
        except BaseException as error:
            return self.report_failure(error)
        return 1


def main(sock: socket.socket) -> int:
    """Main loop of a rank process. The first message says whether to serve the parent or to connect to a remote
    engine.
    """
    parent = PlainLink(sock)
    try:
        first = rank_messages.decode_down(parent.receive())
    except LinkClosed:
        return 0
    if not isinstance(first, rank_messages.ConnectInfo):
        process = RankProcess(parent)
        process.listen(first)
        return process.main()
    threading.Thread(target=_exit_with_parent, args=(parent,), name="lifeline", daemon=True).start()
    try:
        link = connect_to_engine(first)
    except StartupError as error:
        with suppress(LinkClosed):
            parent.send(rank_messages.encode(rank_messages.RankFailure(str(error), 2)))
        return 2
    with suppress(LinkClosed):
        parent.send(rank_messages.encode(rank_messages.EngineReached()))
    process = RankProcess(link, first)
    process.listen()
    return process.main()


def _exit_with_parent(parent: PlainLink) -> NoReturn:
    """Ends this process when its parent process ends."""
    with suppress(LinkClosed):
        while True:
            parent.receive()
    os._exit(0)


if __name__ == "__main__":
    child_process_environment_and_exit.run(main)
