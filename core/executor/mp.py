"""Several ranks: rank 0 on threads of this process, the others in processes of their own; all run the same Steps.

A caller waits for rank 0 or for the failure of any rank, never for a collective whose partner is gone. Once a rank has
failed, every later call raises.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from trencadis.core.config import EngineConfig
from trencadis.core.errors import StartupError
from trencadis.core.executor import frames
from trencadis.core.executor.base import Rank, RankHandle
from trencadis.core.executor.groups import leave
from trencadis.core.executor.lane import SerialThread
from trencadis.core.executor.outcomes import Outcomes
from trencadis.core.executor.ranks import Place, threads_of
from trencadis.core.executor.uniproc import Submitted
from trencadis.core.process.children import environment
from trencadis.core.progress import Warming
from trencadis.core.step import Step, StepOutput

if TYPE_CHECKING:
    from trencadis.core.backend import Pending

log = logging.getLogger("trencadis.engine")

FACTORY = "trencadis.core.startup.build:rank_of"
SETTLE = 0.3
"""Seconds to wait for the cause of a failure: when a rank dies, errors of the others' collectives may arrive first."""

PATIENCE = 5.0
"""Seconds that ranks have to end by themselves before they are killed."""

T = TypeVar("T")
O = TypeVar("O", bound=RankHandle)  # noqa: E741


class RankFailed(RuntimeError):
    """A rank died, raised, or sampled other tokens than rank 0."""


class RankDied(RankFailed):
    """A rank ended without reporting why."""


@dataclass(order=True)
class Trouble:
    """A failure of a rank. The least is taken as the cause: a StartupError, then a silent death, then other errors."""

    weight: int
    order: int
    error: Exception = field(compare=False)


@dataclass
class Child:
    """Another rank's process and our end of its socket."""

    number: int
    process: subprocess.Popen[bytes]
    sock: socket.socket
    ready: Future[None] = field(default_factory=Future)


@dataclass
class Compiling:
    """A grammar that ``left`` ranks still compile."""

    future: Future[str]
    left: int
    problem: str = ""


class Multiproc:
    """``core.executor.base.Executor`` over the ranks of one machine.

    Args:
        factory: builds each other rank (``module:function``, called with a configuration and a place).
    """

    def __init__(self, config: EngineConfig, factory: str = FACTORY) -> None:
        self.depth = 0
        self._config, self._factory = config, factory
        self.world, self.stages = config.ranks, config.pipeline_parallel_size
        self._outcomes = Outcomes(self._settle)
        self._folder = Path(tempfile.mkdtemp(prefix="trencadis-ranks-"))
        self._lock = threading.Lock()
        self._troubles: list[Trouble] = []
        self._failure: Exception | None = None
        self._open: set[Future[Any]] = set()
        self._digests: dict[int, tuple[int, int]] = {}
        self._compiling: dict[int, Compiling] = {}
        self._grammars = 0
        self._closing = False
        self._launches, self._results = SerialThread("rank 0"), SerialThread("rank 0 results")
        self._rank: Rank
        self._overlaps = False
        self.children = [self._spawn(number) for number in range(1, self.world)]
        self._open.update(child.ready for child in self.children)
        for child in self.children:
            threading.Thread(target=self._watch, args=(child,), name=f"rank {child.number}", daemon=True).start()

    def _place(self, number: int) -> Place:
        return Place(number, self.world, str(self._folder / "store"), self.stages)

    def _spawn(self, number: int) -> Child:
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "trencadis.core.executor.rank", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                env=environment(os.environ, threads_of(self._config.threads, self.world), True),
            )
        with suppress(OSError):
            ours.sendall(frames.frame(frames.Begin(self._config.without_secrets(), self._place(number), self._factory)))
        return Child(number, process, ours)

    # What the engine calls

    def start(self, own: Callable[[Place], O]) -> O:
        """Builds rank 0 by ``own`` and waits for the others.

        Raises:
            StartupError: of any rank, in its words.
            RankFailed: a rank died.
        """
        try:
            opened = self._call(self._launches, lambda: own(self._place(0))).result()
            for child in self.children:
                child.ready.result()
        except BaseException:
            self.close()
            raise
        self._rank, self.depth, self._overlaps = opened.rank, opened.depth, opened.overlaps
        return opened

    def submit(self, step: Step) -> Pending[StepOutput]:
        """Starts ``step`` on every rank; Steps run in the order of their submission."""
        if self.stages > 1:
            return self._submit_along(step)
        self._tell(frames.Run(step))
        if not self._overlaps:
            return Submitted(self._call(self._launches, lambda: self._result(self._rank.execute(step))))
        launched = self._call(self._launches, lambda: self._rank.execute(step))
        return Submitted(self._call(self._results, lambda: self._result(launched.result())))

    def _submit_along(self, step: Step) -> Pending[StepOutput]:
        """Starts ``step`` on every pipeline stage; its result comes from the last."""
        future = self._opened()
        if not future.done():
            self._outcomes.expect(step.number, future)
            self._tell(frames.Run(step))
            launched = self._call(self._launches, lambda: self._rank.execute(step))
            thread = self._results if self._overlaps else self._launches
            self._call(thread, lambda: self._outcomes.from_first(launched.result().result()))
        return Submitted(future)

    def _opened(self) -> Future[Any]:
        """A future that fails as soon as any rank does."""
        future: Future[Any] = Future()
        with self._lock:
            if self._failure is not None:
                future.set_exception(self._failure)
            else:
                self._open.add(future)
        return future

    def warm(self) -> Pending[Warming | None]:
        """Runs one piece of background warm-up on every rank; the result is rank 0's."""
        self._tell(frames.Warm())
        return Submitted(self._call(self._launches, lambda: self._rank.warm()))

    def vocabulary(self, data: bytes | bytearray) -> None:
        """Gives every rank a packed ``core.masks.vocabulary.Vocabulary``, before the first grammar."""
        self._tell(frames.Words(bytes(data)))
        self._rank.vocabulary(data)

    def prepare(self, grammar: str) -> Pending[str]:
        """Every rank compiles a grammar beside its Steps."""
        self._grammars += 1
        number, future = self._grammars, Future[str]()
        with self._lock:
            if self._failure is not None:
                future.set_exception(self._failure)
                return Submitted(future)
            self._open.add(future)
            self._compiling[number] = Compiling(future, self.world)
        self._tell(frames.Compile(number, grammar))
        self._rank.prepare(grammar).add_done_callback(lambda done: self._compiled(number, done.result()))
        return Submitted(future)

    def _compiled(self, number: int, problem: str) -> None:
        """A rank has compiled a grammar; the last one settles it."""
        with self._lock:
            entry = self._compiling[number]
            entry.left -= 1
            entry.problem = entry.problem or problem
            if entry.left:
                return
            del self._compiling[number]
        self._settle(entry.future, entry.problem)

    def close(self) -> None:
        """Ends the other ranks once rank 0 has run all submitted Steps."""
        if self._closing:
            return
        self._closing = True
        if self._failure is None:
            self._launches.put(lambda: leave(self._place(0).rendezvous))
            self._results.end(PATIENCE)
            self._launches.end(PATIENCE)
        for child in self.children:
            with suppress(OSError):
                child.sock.shutdown(socket.SHUT_RDWR)  # close() alone would wake neither its watcher nor the rank
            child.sock.close()
        for child in self.children:
            try:
                child.process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                child.process.kill()
                child.process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    # Rank 0

    def _call(self, thread: SerialThread, work: Callable[[], T]) -> Future[T]:
        """Runs ``work`` on a thread of rank 0. The future fails as soon as any rank does."""
        future: Future[T] = self._opened()
        if future.done():
            return future

        def run() -> None:
            try:
                result = work()
            except Exception as error:
                self._trouble(0, error)
            else:
                self._settle(future, result)

        thread.put(run)
        return future

    def _result(self, pending: Pending[StepOutput]) -> StepOutput:
        output = pending.result()
        self._compare(0, output.number, frames.digest(output))
        return output

    def _settle(self, future: Future[T], result: T) -> None:
        with self._lock:
            self._open.discard(future)
        with suppress(InvalidStateError):
            future.set_result(result)

    # The other ranks

    def _tell(self, message: frames.Down) -> None:
        """Sends a message to every other rank; a rank that is gone is its watcher's business."""
        data = frames.frame(message)
        for child in self.children:
            with suppress(OSError):
                child.sock.sendall(data)

    def _watch(self, child: Child) -> None:
        """Receives one rank's messages until it is gone."""
        try:
            while True:
                match frames.decode_up(frames.receive(child.sock)):
                    case frames.RankReady():
                        self._settle(child.ready, None)
                    case frames.Compiled(number, problem):
                        self._compiled(number, problem)
                    case frames.Done(number, digest):
                        self._compare(child.number, number, digest)
                    case frames.StepAnswer() as answer:
                        self._compare(child.number, answer.number, answer.digest)
                        self._outcomes.from_last(answer.output())
                    case frames.RankFailure(message, code):
                        kind = StartupError if code == 2 else RankFailed
                        return self._trouble(child.number, kind(f"rank {child.number}: {message}"))
        except frames.LinkClosed:
            if not self._closing and self._failure is None:
                self._trouble(child.number, RankDied(f"rank {child.number} died: {_how(child.process)}"))

    def _compare(self, rank: int, number: int, digest: int) -> None:
        """Checks that all ranks have drawn the same tokens, because the next step reads them on each device."""
        with self._lock:
            said, count = self._digests.get(number, (digest, 0))
            self._digests[number] = said, count + 1
            if count + 1 == self.world // self.stages:
                del self._digests[number]
        if said != digest:
            self._trouble(rank, RankFailed(f"rank {rank} sampled other tokens in step {number} than other ranks"))

    # Failure

    def _trouble(self, rank: int, error: Exception) -> None:
        """Notes a failure; the first one waits for others that may be its cause, then ends the group."""
        weight = 0 if isinstance(error, StartupError) else 1 if isinstance(error, RankDied) else 2
        with self._lock:
            first = not self._troubles
            order = rank if weight == 0 else len(self._troubles)
            self._troubles.append(Trouble(weight, order, error))
        if first:
            time.sleep(SETTLE)
            self._fail()

    def _fail(self) -> None:
        """Ends the group: kills the other ranks, and every open future fails."""
        with self._lock:
            failure = self._failure = min(self._troubles).error
            waiting, self._open = self._open, set()
        for child in self.children:
            child.process.kill()
        shutil.rmtree(self._folder, ignore_errors=True)  # killed ranks cannot, and the engine may end without close()
        for future in waiting:
            with suppress(InvalidStateError):
                future.set_exception(failure)


def _how(process: subprocess.Popen[bytes]) -> str:
    """How a process that closed its socket has ended."""
    try:
        code = process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        return "it closed its connection"
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
