"""Runs several ranks: rank 0 on threads of this process, the others wherever a launcher starts them.

All ranks run the same Steps. A caller waits for rank 0 or for the failure of any rank, never for a collective whose
partner has gone. Once a rank has failed, every later call raises.

Errors of ranks. Torch-free.
"""

from __future__ import annotations

import logging
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from trencadis.core.buckets import Bucket
from trencadis.core.engine_config import EngineConfig
from trencadis.core.errors import StartupError
from trencadis.core.executor import rank_messages
from trencadis.core.executor.executor_interface import Rank, RankHandle, SerialThread
from trencadis.core.executor.rank_info_and_fingerprint import RankInfo, compute_rank_fingerprint, describe_differences
from trencadis.core.executor.rank_launcher import PATIENCE, Launcher, LocalLauncher, RemoteRankState, name_ranks
from trencadis.core.executor.rendezvous import leave_group
from trencadis.core.executor.uniproc_executor import SubmittedWork
from trencadis.core.launches.pipeline_transfer import StageOutputs
from trencadis.core.links.authenticated_link import HeartbeatThread
from trencadis.core.links.message_link import Link, LinkClosed
from trencadis.core.links.rank_placement import world_of
from trencadis.core.request import AdapterRef
from trencadis.core.startup_progress_and_warmup_pacing import Warming
from trencadis.core.step import Step
from trencadis.core.step_output import StepOutput

if TYPE_CHECKING:
    from trencadis.core.device.backend import Pending


class RankFailed(RuntimeError):
    """A rank died, raised, or sampled other tokens or had another plan than rank 0."""


class RankDied(RankFailed):
    """A rank ended without reporting why.

    Args:
        capture: the bucket whose capture was in progress and may be the cause; empty: none.
    """

    def __init__(self, message: str, capture: str = "") -> None:
        super().__init__(message)
        self.capture = capture


@dataclass(order=True)
class RankError:
    """A failure of a rank. The lowest one is reported as the cause.

    A StartupError has weight 0, a death without report 1, other errors 2; ``order`` breaks ties.
    """

    weight: int
    order: int
    error: Exception = field(compare=False)


log = logging.getLogger("trencadis.engine")

FACTORY = "trencadis.core.engine.engine_builder:rank_of"
SETTLE = 0.3
"""Seconds to wait for the cause of a failure: when a rank dies, the other ranks' collective errors may arrive first."""

COMING = 1800.0
"""Seconds in which ranks of other machines must connect."""

REMINDED = 30.0
"""Seconds between two log lines about missing ranks."""

GOODBYE = 1.0
"""Seconds to wait until ranks of other machines have received ``Shutdown``."""

T = TypeVar("T")
O = TypeVar("O", bound=RankHandle)  # noqa: E741


@dataclass
class RankTask:
    """A grammar that ``left`` ranks are still compiling, or an adapter that they are reading."""

    future: Future[str]
    left: int
    problem: str = ""


class MultiprocExecutor:
    """An ``Executor`` (core/executor/executor_interface.py) for several ranks.

    Args:
        factory: builds each of the other ranks (``module:function``, see ``rank_process.build``).
        launcher: starts the other ranks; None: as processes of this machine.
    """

    def __init__(self, config: EngineConfig, factory: str = FACTORY, launcher: Launcher | None = None) -> None:
        self.depth = 0
        self._config, self._factory = config, factory
        self.world, self.stages = world_of(config), config.pipeline_parallel_size
        self._outcomes = StageOutputs(self._settle)
        self._launcher = launcher or LocalLauncher(config, self.world)
        self._lock = threading.Lock()
        self._troubles: list[RankError] = []
        self._failure: Exception | None = None
        self._open: set[Future[Any]] = set()
        self._digests: dict[int, tuple[int, int]] = {}
        self._tasks: dict[int, RankTask] = {}
        self._task_count = 0
        self._closing = self._steady = self._overlaps = False
        self._pulse: HeartbeatThread | None = None
        self._launches, self._results = SerialThread("rank 0"), SerialThread("rank 0 results")
        self._rank: Rank
        self.children: list[RemoteRankState] = []
        try:
            for number in range(1, self.world):
                self.children.append(self._launcher.launch(number))
        except BaseException:
            self.close()
            raise
        self._open.update(f for child in self.children for f in (child.ready, child.fingerprint))
        for child in self.children:
            if not child.remote:
                self._begin(child, child.linked.result())
            threading.Thread(target=self._watch, args=(child,), name=f"rank {child.number}", daemon=True).start()
        if any(child.remote for child in self.children):
            self._pulse = HeartbeatThread(self._beat)

    def _begin(self, child: RemoteRankState, link: Link) -> None:
        """Sends a rank its first message: configuration, rank info and factory."""
        with suppress(LinkClosed):
            link.send(
                rank_messages.encode(
                    rank_messages.StartRank(self._config.without_secrets(), child.rank_info, self._factory)
                )
            )

    # Methods that the engine calls

    def start(self, own: Callable[[RankInfo], O]) -> O:
        """Builds rank 0 with ``own`` and waits for the others.

        Raises:
            StartupError: raised by any rank, with its message.
            RankFailed: a rank died.
        """
        try:
            self._await_rendezvous([child for child in self.children if child.remote])
            opened = self._call(self._launches, lambda: own(self._launcher.describe_rank(0))).result()
            for child in self.children:
                child.ready.result()
        except BaseException:
            self.close()
            raise
        self._rank, self.depth, self._overlaps = opened.rank, opened.depth, opened.overlaps
        self._steady = True
        return opened

    def _await_rendezvous(self, others: list[RemoteRankState]) -> None:
        """Waits for the ranks of other machines and compares their versions and checkpoints with those of rank 0.

        Raises:
            StartupError: they do not connect in time, or differ.
        """
        if not others:
            return
        begun, ours = time.monotonic(), compute_rank_fingerprint(self._config.model)
        while waiting := [child for child in others if not child.fingerprint.done()]:
            try:
                waiting[0].fingerprint.result(REMINDED if all(child.link is None for child in waiting) else 1.0)
            except FutureTimeout:
                if time.monotonic() - begun < COMING:
                    if waiting[0].link is None:
                        log.info("waiting at %s for %s", self._launcher.location_note, name_ranks(waiting))
                    continue
                raise StartupError(
                    f"{name_ranks(waiting)} did not come to {self._launcher.location_note} in {COMING:g} s"
                ) from None
        for child in others:
            differs = describe_differences(ours, child.fingerprint.result())
            if differs:
                raise StartupError(f"rank {child.number}{child.at} does not belong to this engine: {differs}.")
        go = rank_messages.encode(rank_messages.RendezvousDone())
        for child in others:
            self._send(child, go)

    def submit(self, step: Step) -> Pending[StepOutput]:
        """Starts ``step`` on every rank; Steps run in the order of their submission."""
        if self.stages > 1:
            return self._submit_along(step)
        self._broadcast_step(step)
        if not self._overlaps:
            return SubmittedWork(self._call(self._launches, lambda: self._result(self._rank.execute(step))))
        launched = self._call(self._launches, lambda: self._rank.execute(step))
        return SubmittedWork(self._call(self._results, lambda: self._result(launched.result())))

    def _submit_along(self, step: Step) -> Pending[StepOutput]:
        """Starts ``step`` on every pipeline stage; the result comes from the last one."""
        future = self._open_future()
        if not future.done():
            self._outcomes.expect(step.number, future)
            self._broadcast_step(step)
            launched = self._call(self._launches, lambda: self._rank.execute(step))
            thread = self._results if self._overlaps else self._launches
            self._call(thread, lambda: self._outcomes.from_first(launched.result().result()))
        return SubmittedWork(future)

    def _open_future(self) -> Future[Any]:
        """Returns a new future that fails as soon as any rank fails."""
        future: Future[Any] = Future()
        with self._lock:
            if self._failure is not None:
                future.set_exception(self._failure)
            else:
                self._open.add(future)
        return future

    def warm(self) -> Pending[Warming | None]:
        """Runs one unit of background warm-up on every rank; the result is rank 0's."""
        self._broadcast(rank_messages.RunWarmup())
        return SubmittedWork(self._call(self._launches, self._warm))

    def _warm(self) -> Warming | None:
        """Runs one unit of warm-up with heartbeats marked as unsteady.

        A compiler may hold the interpreter's lock for long, so that regular heartbeats cannot be guaranteed.
        """
        self._steady = False
        self._beat()
        try:
            return self._rank.warm()
        finally:
            self._steady = True

    def change_plan(self, version: int, buckets: Sequence[Bucket]) -> Pending[None]:
        """Begins a change of plan on every rank."""
        self._broadcast(rank_messages.ChangePlan(version, tuple(buckets)))
        return SubmittedWork(self._call(self._launches, lambda: self._rank.change_plan(version, buckets)))

    def set_vocabulary(self, data: bytes | bytearray) -> None:
        """Sends a packed ``grammar_tokenizer_and_vocabulary.Vocabulary`` to every rank; must precede the first
        grammar.
        """
        self._broadcast(rank_messages.SetVocabulary(bytes(data)))
        self._rank.set_vocabulary(data)

    def prepare(self, grammar: str) -> Pending[str]:
        """Compiles a grammar on every rank while Steps continue; the result is an error message, or empty."""
        return self._run_on_ranks(
            lambda number: rank_messages.CompileGrammar(number, grammar), lambda: self._rank.prepare(grammar)
        )

    def load_adapter(self, ref: AdapterRef, drop: tuple[str, ...]) -> Pending[str]:
        """Has every rank read an adapter while Steps continue; the result is an error message, or empty."""
        return self._run_on_ranks(
            lambda number: rank_messages.LoadAdapter(number, ref, drop), lambda: self._rank.load_adapter(ref, drop)
        )

    def _run_on_ranks(
        self, message: Callable[[int], rank_messages.Down], own: Callable[[], Future[str]]
    ) -> Pending[str]:
        """Sends a task to the other ranks and starts rank 0's ``own``; the result is the first error, or empty."""
        self._task_count += 1
        number, future = self._task_count, Future[str]()
        with self._lock:
            if self._failure is not None:
                future.set_exception(self._failure)
                return SubmittedWork(future)
            self._open.add(future)
            self._tasks[number] = RankTask(future, self.world)
        self._broadcast(message(number))
        own().add_done_callback(lambda done: self._note_task_done(number, done.result()))
        return SubmittedWork(future)

    def _note_task_done(self, number: int, problem: str) -> None:
        """Counts a rank that has finished a task; resolves the future when all have."""
        with self._lock:
            entry = self._tasks[number]
            entry.left -= 1
            entry.problem = entry.problem or problem
            if entry.left:
                return
            del self._tasks[number]
        self._settle(entry.future, entry.problem)

    def close(self) -> None:
        """Ends the other ranks after rank 0 has run all submitted Steps."""
        if self._closing:
            return
        self._closing, well = True, self._failure is None
        if well:
            self._launches.put(lambda: leave_group(self._launcher.describe_rank(0).rendezvous))
        for thread in (self._results, self._launches):
            thread.end(PATIENCE if well else 0.0)  # a thread stuck in a collective without its partner never ends
        if well:
            self._say_goodbye()
        if self._pulse is not None:
            self._pulse.end()
        for child in self.children:
            if child.link is not None:
                child.link.close()
            elif child.remote:
                child.process.kill()
        for child in self.children:
            try:
                child.process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                child.process.kill()
                child.process.wait()
        self._launcher.close()

    def _say_goodbye(self) -> None:
        """Tells ranks of other machines that the engine ends normally."""
        others, end = [c for c in self.children if c.remote and c.link is not None], time.monotonic() + GOODBYE
        for child in others:
            self._send(child, rank_messages.encode(rank_messages.Shutdown()))
        for child in others:
            child.gone.wait(max(end - time.monotonic(), 0.0))

    # Rank 0

    def _call(self, thread: SerialThread, work: Callable[[], T]) -> Future[T]:
        """Runs ``work`` on a thread of rank 0; the returned future fails as soon as any rank fails."""
        future: Future[T] = self._open_future()
        if future.done():
            return future

        def run() -> None:
            try:
                result = work()
            except Exception as error:
                self._note_failure(0, error)
            else:
                self._settle(future, result)

        thread.put(run)
        return future

    def _result(self, pending: Pending[StepOutput]) -> StepOutput:
        output = pending.result()
        self._compare(0, output.number, rank_messages.digest(output))
        return output

    def _settle(self, future: Future[T], result: T) -> None:
        with self._lock:
            self._open.discard(future)
        with suppress(InvalidStateError):
            future.set_result(result)

    # The other ranks

    def _broadcast(self, message: rank_messages.Down) -> None:
        """Sends a message to every other rank."""
        data = rank_messages.encode(message)
        for child in self.children:
            self._send(child, data)

    def _broadcast_step(self, step: Step) -> None:
        """Sends a Step to every other rank; pixels go only to ranks that encode."""
        data = rank_messages.encode(rank_messages.RunStep(step))
        lean = data
        if step.images and not all(child.rank_info.encodes for child in self.children):
            lean = rank_messages.encode(rank_messages.RunStep(rank_messages.without_pixels(step)))
        for child in self.children:
            self._send(child, data if child.rank_info.encodes else lean)

    def _send(self, child: RemoteRankState, data: bytes) -> None:
        """Sends one message. Send errors are ignored: the watcher thread reports dead ranks."""
        link = child.link
        if link is not None:
            with suppress(LinkClosed):
                link.send(data)

    def _beat(self) -> None:
        for child in self.children:
            link = child.link
            if link is not None and child.remote:  # local ranks end with the socket
                link.beat(self._steady)

    def _watch(self, child: RemoteRankState) -> None:
        """Receives one rank's messages until it ends, and reports its death."""
        try:
            link = child.linked.result()
            if child.remote:
                self._begin(child, link)
            self._handle_message(child, link)
        except (LinkClosed, CancelledError) as error:
            child.gone.set()
            if not self._closing and self._failure is None:
                how = child.describe_end(str(error))
                self._note_failure(
                    child.number, RankDied(f"rank {child.number}{child.at} died: {how}", child.capturing)
                )
        finally:
            child.gone.set()

    def _handle_message(self, child: RemoteRankState, link: Link) -> None:
        while True:
            match rank_messages.decode_up(link.receive()):
                case rank_messages.RankReady():
                    self._settle(child.ready, None)
                case rank_messages.RendezvousJoined(fingerprint):
                    self._settle(child.fingerprint, fingerprint)
                case rank_messages.CaptureProgress(bucket, begun):
                    child.capturing = bucket if begun else ""
                case rank_messages.TaskDone(number, problem):
                    self._note_task_done(number, problem)
                case rank_messages.StepDone(number, digest):
                    self._compare(child.number, number, digest)
                case rank_messages.StepAnswer() as answer:
                    self._compare(child.number, answer.number, answer.digest)
                    self._outcomes.from_last(answer.output())
                case rank_messages.RankFailure(message, code):
                    kind = StartupError if code == 2 else RankFailed
                    return self._note_failure(child.number, kind(f"rank {child.number}{child.at}: {message}"))

    def _compare(self, rank: int, number: int, digest: int) -> None:
        """Checks that all ranks have sampled the same tokens, which the next step reads on each device, by one plan."""
        with self._lock:
            said, count = self._digests.get(number, (digest, 0))
            self._digests[number] = said, count + 1
            if count + 1 == self.world // self.stages:
                del self._digests[number]
        if said != digest:
            why = f"rank {rank} sampled other tokens in step {number} than other ranks, or by another plan"
            self._note_failure(rank, RankFailed(why))

    # Failure

    def _note_failure(self, rank: int, error: Exception) -> None:
        """Records a failure; after the first one, waits for others that may be its cause, then ends the group."""
        weight = 0 if isinstance(error, StartupError) else 1 if isinstance(error, RankDied) else 2
        with self._lock:
            first = not self._troubles
            order = rank if weight == 0 else len(self._troubles)
            self._troubles.append(RankError(weight, order, error))
        if first:
            time.sleep(SETTLE)
            self._fail_group()

    def _fail_group(self) -> None:
        """Kills the other ranks and fails every open future with the most likely cause."""
        with self._lock:
            failure = self._failure = min(self._troubles).error
            waiting, self._open = self._open, set()
        if self._pulse is not None:
            self._pulse.end()
        for child in self.children:
            child.process.kill()
        self._launcher.close()  # the engine may exit without close()
        for future in waiting:
            with suppress(InvalidStateError):
                future.set_exception(failure)
