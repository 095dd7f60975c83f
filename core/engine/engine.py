"""The engine's loop: schedule, execute, update.

It takes requests and returns Deltas; the executor abstracts devices.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from trencadis.core.engine.bucket_learning import BucketLearning
from trencadis.core.engine.workload_trace_writer import RequestTrace
from trencadis.core.engine_stats import BucketUse, EngineInfo, EngineStats
from trencadis.core.executor.executor_interface import Executor
from trencadis.core.graph_and_bucket_learning_report import GraphPlan
from trencadis.core.request import Delta, Request
from trencadis.core.scheduling.encoder_scheduler import ImagePacker
from trencadis.core.scheduling.request_lifecycle import Lifecycle
from trencadis.core.scheduling.scheduler import Scheduler
from trencadis.core.scheduling.step_builder_and_adapter_slots import AdapterLoads, EvictionCounts, log_launches
from trencadis.core.scheduling.step_builder_and_adapter_slots import log as decisions
from trencadis.core.shapes.step_times_and_chunk_budget import chunk_sizes
from trencadis.core.startup_progress_and_warmup_pacing import WarmupPacing
from trencadis.core.step import PixelNeed, Step, UInt8
from trencadis.core.step_output import StepOutput

if TYPE_CHECKING:
    from trencadis.core.device.backend import Pending
    from trencadis.core.graphs.graph_reporter import GraphReporter


RANKS_WAIT = 0.005
"""Seconds that an idle engine waits per step for a grammar or an adapter."""


@dataclass(frozen=True, slots=True)
class AwaitedRequest:
    """A request whose grammar the ranks compile, or whose adapter they read; other requests continue meanwhile."""

    request: Request
    compiled: Pending[str] | None
    loaded: Pending[str] | None

    def is_ready(self) -> bool:
        """Returns True if the request can be queued or refused."""
        return all(one is None or one.done() for one in (self.compiled, self.loaded))

    def find_problem(self) -> str:
        """Returns why the request cannot run; empty if it can, or if that is not known yet."""
        for one, what in ((self.compiled, "The grammar does not compile"), (self.loaded, "The adapter is not usable")):
            if one is not None and one.done() and one.result():
                return f"{what}: {one.result()}"
        return ""

    def wait(self, seconds: float) -> None:
        """Waits until the request can be queued, at most ``seconds``."""
        end = time.monotonic() + seconds
        while not self.is_ready() and time.monotonic() < end:
            time.sleep(seconds / 10)


class Engine:
    """Serves requests step by step; only one thread may call its methods.

    ``core.engine.engine_builder.create_engine`` builds an engine from a configuration.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        info: EngineInfo,
        watch: GraphReporter | None = None,
        pace: WarmupPacing | None = None,
        cpu_threads: Callable[[], int] | None = None,
        host_adapters: int = 0,
        learning: BucketLearning | None = None,
        trace: RequestTrace | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.life = Lifecycle(scheduler)
        self._info = info
        self._flying: deque[Pending[StepOutput]] = deque()
        self._awaiting: list[AwaitedRequest] = []
        self._adapters = (
            AdapterLoads(executor.load_adapter, host_adapters, self._list_used_adapters) if host_adapters else None
        )
        self._quiet = True
        self._watch = watch
        self._evictions = EvictionCounts()
        self._cpu_threads = cpu_threads or (lambda: 0)
        self._pace = pace or WarmupPacing(0.0)
        self._warming = watch is not None and watch.background
        self._counted = info.graphs is not None
        self._learning, self._trace = learning, trace
        self._reported_version = (watch.version if watch is not None else 0, 0)

    def info(self) -> EngineInfo:
        """Returns the sizes that the engine started with."""
        return self._info

    # Requests

    def add(self, request: Request) -> None:
        """Queues a request, once its grammar is compiled and its adapter read; errors are Deltas of ``step``."""
        self._quiet = False
        if self._trace is not None:
            self._trace.begin(request, self.scheduler.clock())
        if (request.rule is not None and request.rule.grammar) or request.adapter is not None:
            self._prepare_first(request)
        else:
            self.life.add(request)

    def _prepare_first(self, request: Request) -> None:
        """Holds a request back until its grammar is compiled and its adapter read."""
        request.arrival = request.arrival or self.scheduler.clock()
        compiled = loaded = None
        if request.adapter is not None:
            if self._adapters is None:
                self.life.refuse(request, 400, "this engine has no adapters (--enable-lora)")
                return
            loaded = self._adapters.load(request.adapter)
        if request.rule is not None and request.rule.grammar:
            compiled = self.executor.prepare(request.rule.grammar)
        self._awaiting.append(AwaitedRequest(request, compiled, loaded))
        self._admit()

    def _list_used_adapters(self) -> set[str]:
        """Returns the digests of adapters that requests or slots of the device use."""
        live = [entry.request for entry in self._awaiting]
        live += [sequences[0].request for sequences in self.life.requests.values()]
        return {r.adapter.digest for r in live if r.adapter is not None} | {*self.scheduler.adapters.digests}

    def abort(self, request_id: str, choice: int = -1) -> None:
        """Ends a request, or one choice of it; does nothing if it has already ended."""
        self._quiet = False
        self._admit(request_id)
        self.life.abort(request_id, choice)

    def add_media(self, request_id: str, index: int, pixels: UInt8) -> None:
        """Accepts pixels that ``needs`` listed: uint8, flat or [slots, values]."""
        self._quiet = False
        self.life.add_media(request_id, index, pixels)

    def media_failed(self, request_id: str, index: int, status: int, message: str) -> None:
        """Ends a request whose pixels cannot be delivered, with this error."""
        self._quiet = False
        self.life.fail(request_id, status, message)

    def reset_prefix_cache(self) -> None:
        """Drops all cached blocks; running requests continue."""
        self.scheduler.pool.forget()
        if self.scheduler.states is not None:
            self.scheduler.states.pool.forget()

    def set_vocabulary(self, data: bytes | bytearray) -> None:
        """Sends the packed bytes of each token to every rank.

        Must be called before the first request with a grammar.
        """
        self.executor.set_vocabulary(data)

    def reset_encoder_cache(self) -> None:
        """Drops the embeddings of images that no running request pins."""
        self.scheduler.arena.empty()

    def needs(self) -> list[PixelNeed]:
        """Returns the pixels that have become needed since the last call."""
        queue = self.scheduler.pixel_queue
        needs, queue.outbox = queue.outbox, []
        return needs

    # The loop

    def step(self) -> list[Delta]:
        """Submits a Step and takes the results of the oldest one that is due; returns its Deltas, possibly none."""
        if self._learning is not None:
            self._learn(self._learning)
        deltas = self._step_and_warm() if self._warming else self._step()
        if self._trace is not None and deltas:
            self._trace.take(deltas)
        return deltas

    def learn_buckets(self, force: bool = False) -> None:
        """Starts a search for better shapes; ``force``: changes to them, whatever they gain."""
        self._quiet = False
        if self._learning is not None:
            self._learning.request(force)

    def _learn(self, learning: BucketLearning) -> None:
        """Lets the learning do what is due, and begins a change that it has decided on."""
        learning.tick()
        if learning.busy and self._quiet and not self._flying and not self._warming:
            learning.wait(RANKS_WAIT)
        if learning.pending is None or learning.changing or self._warming:
            return
        self._finish_flying()
        self._plan_before = learning.present()
        self.executor.change_plan(self._plan_before.version + 1, learning.begin_change()).result()
        self._warming = True

    def _end_change(self, learning: BucketLearning) -> None:
        """Lets the scheduler use the plan that has just been published, or learns that it was not."""
        learning.end_change(self._plan_before)
        plan, s = learning.present(), self.scheduler
        s.encoder.packer = ImagePacker(plan, plan.policy.encoder_slots)
        if s.times is not None:
            s.times.sizes = chunk_sizes(plan, s.limits.max_tokens)

    def _finish_flying(self) -> None:
        while self._flying:
            self._take(self._flying.popleft().result())

    def _step_and_warm(self) -> list[Delta]:
        """Runs a step, preceded by some background warm-up if the pacing allows it."""
        start = time.monotonic()
        loaded = not self.idle()
        if self._pace.allows(loaded):
            self._warm(loaded)
        deltas = self._step()
        if loaded:
            self._pace.add_loaded_time(time.monotonic() - start)
        return deltas

    def _warm(self, loaded: bool) -> None:
        """Runs one unit of background warm-up with nothing in flight, and more as ``WarmupPacing`` allows."""
        self._finish_flying()
        start = now = time.monotonic()
        while True:
            self._warming = self.executor.warm().result() is not None
            begun, now = now, time.monotonic()
            self._pace.add_work(now - begun, loaded)
            if not self._warming and self._learning is not None and self._learning.changing:
                self._end_change(self._learning)
            if not self._warming or not self._pace.allows_another(now - start, loaded):
                return

    def _admit(self, now: str = "") -> None:
        """Queues requests that the ranks are ready for, and request ``now`` in any case."""
        for entry in [e for e in self._awaiting if e.request.id == now or e.is_ready()]:
            self._awaiting.remove(entry)
            problem = entry.find_problem()
            if problem:
                self.life.refuse(entry.request, 400, problem)
            else:
                self.life.add(entry.request)

    def _step(self) -> list[Delta]:
        if self._awaiting:
            self._await_ranks()
        step = self.scheduler.schedule()
        if step is not None:
            self._submit(step)
        if self._flying and (step is None or len(self._flying) > self.executor.depth):
            self._take(self._flying.popleft().result())
            self._quiet = False
        else:
            self._quiet = step is None
        return self.life.collect()

    def _await_ranks(self) -> None:
        if self._quiet and not self._flying:
            self._awaiting[0].wait(RANKS_WAIT)  # there is nothing else to do
        self._admit()

    def _submit(self, step: Step) -> None:
        # A choice's first token is drawn with the prompt's last and never counted as computed when the choice ends.
        scheduler = self.scheduler
        scheduler.totals.step_tokens.append(step.tokens + scheduler.first_draws)
        scheduler.first_draws = 0
        if decisions.isEnabledFor(logging.DEBUG):
            self._evictions.log(step.number, scheduler.pool.evictions, scheduler.arena.evictions)
        self._flying.append(self.executor.submit(step))

    def _take(self, output: StepOutput) -> None:
        for s in output.stats:
            stage, name = s.bucket.stage.name.lower(), str(s.bucket) if self._counted else ""
            state = s.state.lower()
            use = BucketUse(stage, s.real, s.padded, s.seconds, name, state, s.planned, s.miss, s.items, s.needed)
            self.scheduler.totals.buckets.append(use)
        if decisions.isEnabledFor(logging.DEBUG):
            log_launches(output.number, output.stats)
        self.life.update(output)

    def busy(self) -> bool:
        """Returns True if ``step`` has work to do; False also while all requests wait for pixels."""
        learning = self._learning is not None and self._learning.busy
        return self._warming or not self._quiet or bool(self._awaiting) or learning

    def idle(self) -> bool:
        """Returns True if there is no request and no step in flight."""
        return not self.life.requests and not self._flying and not self._awaiting

    def stats(self) -> EngineStats:
        """Returns counters and gauges; lists hold the events since the last call."""
        s = self.scheduler
        made = replace(
            s.totals,
            running=len(s.running),
            waiting=len(s.waiting) + len(self._awaiting),
            deferred=min(s.held_back, len(s.waiting)) + len(self._awaiting),
            kv_used=s.pool.used,
            kv_cached=s.pool.cached,
            kv_evictions=s.pool.evictions,
            steps=s.steps,
            cpu_threads=self._cpu_threads(),
            arena_used=s.arena.used,
            image_evictions=s.arena.evictions,
        )
        s.totals.step_tokens, s.totals.buckets = [], []
        if s.states is not None:
            states = s.states.pool
            made.snapshot_hits, made.snapshot_misses = states.hits, states.misses
            made.snapshot_evictions, made.snapshots = states.evictions, states.snapshots
            if states.host is not None:
                made.states_kept, made.states_resumed = states.host.stored, states.host.restored
        if self._adapters is not None:
            made.running_adapters, made.waiting_adapters = self._name_adapters()
        if s.pool.host is not None or s.pool.log is not None or self._watch is not None:
            self._add_rare(made)
        return made

    def _name_adapters(self) -> tuple[list[str], list[str]]:
        """Returns the names of adapters of running requests, and of waiting ones."""
        running = {one.request.adapter.name for one in self.scheduler.running if one.request.adapter is not None}
        queued = [seq.request for seq in self.scheduler.waiting] + [entry.request for entry in self._awaiting]
        waiting = {request.adapter.name for request in queued if request.adapter is not None}
        return sorted(running), sorted(waiting)

    def _add_rare(self, made: EngineStats) -> None:
        """Adds the values that exist only with a host memory tier, an eviction log or graphs."""
        pool = self.scheduler.pool
        if pool.host is not None:
            made.host_used, made.host_total = pool.host.used, pool.host.size
        if pool.log is not None:
            made.evicted_blocks, made.evicted_images = pool.log.take()
        if self._watch is not None:
            made.graphs, made.plan = self._watch.counters(), self._take_changed_plan(self._watch)

    def _take_changed_plan(self, watch: GraphReporter) -> GraphPlan | None:
        """Returns the plan if a program's state, or what was learned, changed since the last call; else None."""
        version = watch.version, self._learning.revision if self._learning is not None else 0
        if version == self._reported_version:
            return None
        self._reported_version = version
        plan = watch.plan()
        if plan is not None and self._learning is not None:
            plan.learning = self._learning.report()
        return plan

    def close(self) -> None:
        """Closes the executor once the steps in flight have finished."""
        while self._flying:
            self._flying.popleft().result()
        self.save()
        self.executor.close()

    def save(self) -> None:
        """Writes what the traffic needed to the files that were asked for."""
        if self._learning is not None:
            self._learning.save()
        if self._trace is not None:
            self._trace.close()
