"""Several ranks: rank 0 on threads of this process, the others wherever a launcher starts them; all run the same Steps.

A caller waits for rank 0 or for the failure of any rank, never for a collective whose partner is gone. Once a rank has
failed, every later call raises.
"""

from __future__ import annotations

import logging
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from trencadis.core.config import EngineConfig
from trencadis.core.errors import StartupError
from trencadis.core.executor import frames
from trencadis.core.executor.base import Rank, RankHandle
from trencadis.core.executor.facts import differences, facts_of
from trencadis.core.executor.groups import leave
from trencadis.core.executor.lane import SerialThread
from trencadis.core.executor.launcher import PATIENCE, Child, Launcher, LocalLauncher, named
from trencadis.core.executor.ranks import Place
from trencadis.core.executor.trouble import RankDied, RankFailed, Trouble
from trencadis.core.executor.uniproc import Submitted
from trencadis.core.launches.outcomes import Outcomes
from trencadis.core.links.keyed import Pulse
from trencadis.core.links.link import Link, LinkClosed
from trencadis.core.links.topology import world_of
from trencadis.core.progress import Warming
from trencadis.core.step import Step, StepOutput

if TYPE_CHECKING:
    from trencadis.core.backend import Pending

log = logging.getLogger("trencadis.engine")

FACTORY = "trencadis.core.startup.build:rank_of"
SETTLE = 0.3
"""Seconds to wait for the cause of a failure: when a rank dies, errors of the others' collectives may arrive first."""

COMING = 1800.0
"""Seconds in which ranks of other machines must come."""

REMINDED = 30.0
"""Seconds between two lines about ranks that have not come."""

GOODBYE = 1.0
"""Seconds in which ranks of other machines may say that they have heard of the end."""

T = TypeVar("T")
O = TypeVar("O", bound=RankHandle)  # noqa: E741


@dataclass
class Compiling:
    """A grammar that ``left`` ranks still compile."""

    future: Future[str]
    left: int
    problem: str = ""


class Multiproc:
    """``core.executor.base.Executor`` over several ranks.

    Args:
        factory: builds each other rank (``module:function``, called with a configuration and a place).
        launcher: starts the other ranks; None: as processes of this machine.
    """

    def __init__(self, config: EngineConfig, factory: str = FACTORY, launcher: Launcher | None = None) -> None:
        self.depth = 0
        self._config, self._factory = config, factory
        self.world, self.stages = world_of(config), config.pipeline_parallel_size
        self._outcomes = Outcomes(self._settle)
        self._launcher = launcher or LocalLauncher(config, self.world)
        self._lock = threading.Lock()
        self._troubles: list[Trouble] = []
        self._failure: Exception | None = None
        self._open: set[Future[Any]] = set()
        self._digests: dict[int, tuple[int, int]] = {}
        self._compiling: dict[int, Compiling] = {}
        self._grammars = 0
        self._closing = self._steady = self._overlaps = False
        self._pulse: Pulse | None = None
        self._launches, self._results = SerialThread("rank 0"), SerialThread("rank 0 results")
        self._rank: Rank
        self.children: list[Child] = []
        try:
            for number in range(1, self.world):
                self.children.append(self._launcher.launch(number))
        except BaseException:
            self.close()
            raise
        self._open.update(f for child in self.children for f in (child.ready, child.met))
        for child in self.children:
            if not child.remote:
                self._begin(child, child.linked.result())
            threading.Thread(target=self._watch, args=(child,), name=f"rank {child.number}", daemon=True).start()
        if any(child.remote for child in self.children):
            self._pulse = Pulse(self._beat)

    def _begin(self, child: Child, link: Link) -> None:
        """Sends a rank what it starts with."""
        with suppress(LinkClosed):
            link.send(frames.encode(frames.Begin(self._config.without_secrets(), child.place, self._factory)))

    # What the engine calls

    def start(self, own: Callable[[Place], O]) -> O:
        """Builds rank 0 by ``own`` and waits for the others.

        Raises:
            StartupError: of any rank, in its words.
            RankFailed: a rank died.
        """
        try:
            self._meet([child for child in self.children if child.remote])
            opened = self._call(self._launches, lambda: own(self._launcher.place(0))).result()
            for child in self.children:
                child.ready.result()
        except BaseException:
            self.close()
            raise
        self._rank, self.depth, self._overlaps = opened.rank, opened.depth, opened.overlaps
        self._steady = True
        return opened

    def _meet(self, others: list[Child]) -> None:
        """Waits for ranks of other machines, and compares what they would load with what is here.

        Raises:
            StartupError: they do not come, or differ.
        """
        if not others:
            return
        begun, ours = time.monotonic(), facts_of(self._config.model)
        while waiting := [child for child in others if not child.met.done()]:
            try:
                waiting[0].met.result(REMINDED if all(child.link is None for child in waiting) else 1.0)
            except FutureTimeout:
                if time.monotonic() - begun < COMING:
                    if waiting[0].link is None:
                        log.info("waiting at %s for %s", self._launcher.where, named(waiting))
                    continue
                raise StartupError(f"{named(waiting)} did not come to {self._launcher.where} in {COMING:g} s") from None
        for child in others:
            differs = differences(ours, child.met.result())
            if differs:
                raise StartupError(f"rank {child.number}{child.at} does not belong to this engine: {differs}.")
        go = frames.encode(frames.Go())
        for child in others:
            self._send(child, go)

    def submit(self, step: Step) -> Pending[StepOutput]:
        """Starts ``step`` on every rank; Steps run in the order of their submission."""
        if self.stages > 1:
            return self._submit_along(step)
        self._tell_step(step)
        if not self._overlaps:
            return Submitted(self._call(self._launches, lambda: self._result(self._rank.execute(step))))
        launched = self._call(self._launches, lambda: self._rank.execute(step))
        return Submitted(self._call(self._results, lambda: self._result(launched.result())))

    def _submit_along(self, step: Step) -> Pending[StepOutput]:
        """Starts ``step`` on every pipeline stage; its result comes from the last."""
        future = self._opened()
        if not future.done():
            self._outcomes.expect(step.number, future)
            self._tell_step(step)
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
        return Submitted(self._call(self._launches, self._warm))

    def _warm(self) -> Warming | None:
        """A compiler may hold the interpreter's lock for long, so that beats promise nothing meanwhile."""
        self._steady = False
        self._beat()
        try:
            return self._rank.warm()
        finally:
            self._steady = True

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
        self._closing, well = True, self._failure is None
        if well:
            self._launches.put(lambda: leave(self._launcher.place(0).rendezvous))
        for thread in (self._results, self._launches):
            thread.end(PATIENCE if well else 0.0)  # one that waits in a collective whose partner is gone stays there
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
        """Tells ranks of other machines, which would take a closed connection for an accident."""
        others, end = [c for c in self.children if c.remote and c.link is not None], time.monotonic() + GOODBYE
        for child in others:
            self._send(child, frames.encode(frames.End()))
        for child in others:
            child.gone.wait(max(end - time.monotonic(), 0.0))

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
        """Sends a message to every other rank."""
        data = frames.encode(message)
        for child in self.children:
            self._send(child, data)

    def _tell_step(self, step: Step) -> None:
        """Sends a Step; its pixels go to ranks that encode."""
        data = frames.encode(frames.Run(step))
        lean = data
        if step.images and not all(child.place.encodes for child in self.children):
            lean = frames.encode(frames.Run(frames.without_pixels(step)))
        for child in self.children:
            self._send(child, data if child.place.encodes else lean)

    def _send(self, child: Child, data: bytes) -> None:
        """Sends one message; a rank that is gone is its watcher's business."""
        link = child.link
        if link is not None:
            with suppress(LinkClosed):
                link.send(data)

    def _beat(self) -> None:
        for child in self.children:
            link = child.link
            if link is not None:
                link.beat(self._steady)

    def _watch(self, child: Child) -> None:
        """Receives one rank's messages until it is gone."""
        try:
            link = child.linked.result()
            if child.remote:
                self._begin(child, link)
            self._hear(child, link)
        except (LinkClosed, CancelledError) as error:
            child.gone.set()
            if not self._closing and self._failure is None:
                how = child.how(str(error))
                self._trouble(child.number, RankDied(f"rank {child.number}{child.at} died: {how}", child.capturing))
        finally:
            child.gone.set()

    def _hear(self, child: Child, link: Link) -> None:
        while True:
            match frames.decode_up(link.receive()):
                case frames.RankReady():
                    self._settle(child.ready, None)
                case frames.Met(facts):
                    self._settle(child.met, facts)
                case frames.Capturing(bucket, begun):
                    child.capturing = bucket if begun else ""
                case frames.Compiled(number, problem):
                    self._compiled(number, problem)
                case frames.Done(number, digest):
                    self._compare(child.number, number, digest)
                case frames.StepAnswer() as answer:
                    self._compare(child.number, answer.number, answer.digest)
                    self._outcomes.from_last(answer.output())
                case frames.RankFailure(message, code):
                    kind = StartupError if code == 2 else RankFailed
                    return self._trouble(child.number, kind(f"rank {child.number}{child.at}: {message}"))

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
        if self._pulse is not None:
            self._pulse.end()
        for child in self.children:
            child.process.kill()
        self._launcher.close()  # the engine may end without close()
        for future in waiting:
            with suppress(InvalidStateError):
                future.set_exception(failure)
