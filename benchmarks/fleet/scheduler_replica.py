"""A replica that runs the product's Scheduler over an executor that only tells time."""

from __future__ import annotations

import math

import numpy as np

from benchmarks.fleet.replica_costs import Machine
from benchmarks.fleet.trace_request import Job
from benchmarks.packing import NO_PIXELS, Done
from benchmarks.traces.sessions import Turn
from trencadis.core.engine.engine import Engine
from trencadis.core.engine_stats import EngineInfo
from trencadis.core.executor.uniproc_executor import UniprocExecutor
from trencadis.core.kv.block_pool import BlockPool, EvictionLog
from trencadis.core.media_spans import MediaSpan
from trencadis.core.request import Request, SamplingParams
from trencadis.core.scheduling.encoder_cache import EncoderCache
from trencadis.core.scheduling.encoder_scheduler import ImagePacker
from trencadis.core.scheduling.scheduler import Scheduler
from trencadis.core.scheduling.scheduler_limits import SchedulerLimits
from trencadis.core.step import Step
from trencadis.core.step_output import HeadOutput, StepOutput
from trencadis.server.processes.multi_engine_client import make_request_cost, read_keys
from trencadis.server.processes.replica_wait_prediction import RequestCost

ANSWER, IMAGE, FIRST = 1, 2, 10
"""Ids: of every answer's tokens, of placeholders; system prompts and messages have ids of their own from FIRST on."""
LONGEST = 32_768


class TimedRank:
    """Answers each Step at once with ``ANSWER``, and says how long the machine would have taken."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.seconds = 0.0

    def execute(self, step: Step) -> Done:
        """A row of one token decodes, or computes the last token of a prompt, which costs about the same."""
        rows = step.persistent_count + sum(len(row.tokens) == 1 for row in step.rows)
        slots = sum(image.slots for image in step.images)
        self.seconds += self.machine.seconds(step.tokens - rows, rows, slots)
        keys = [draw.key for row in step.rows for draw in row.samples]
        out = StepOutput(step.number, {key: step.persistent_count + i for i, key in enumerate(keys)})
        out.head = HeadOutput(np.full(step.persistent_count + len(keys), ANSWER, np.int32))
        return Done(out)


class ExactReplica:
    """One engine. Its steps are run when they start; what they produced counts when they end."""

    def __init__(self, machine: Machine) -> None:
        limits = SchedulerLimits(
            max_tokens=machine.tokens, max_rows=machine.rows, max_model_len=LONGEST, block_size=machine.block,
            encoder_slots=machine.encoder, vocab=1 << 30,
        )  # fmt: skip
        self.rank = TimedRank(machine)
        self.log = EvictionLog()
        pool, arena = BlockPool(machine.blocks), EncoderCache(machine.arena + 2)
        pool.log = arena.log = self.log
        scheduler = Scheduler(limits, pool, arena, machine.rows + 8, packer=ImagePacker(budget=machine.encoder))
        self.engine = Engine(scheduler, UniprocExecutor(self.rank, 0), EngineInfo("timed", "none", 0, 0, 0, 10, 0))  # type: ignore[arg-type]
        self._jobs: dict[str, Job] = {}
        self._added = 0
        self._end = math.inf
        self._begun: list[Job] = []
        self._ended: list[Job] = []

    def add(self, job: Job) -> None:
        """A request arrives."""
        self._added += 1
        request = request_of(job, f"r{self._added}")
        self._jobs[request.id] = job
        self.engine.add(request)

    def start(self, now: float) -> float:
        """Runs a step; returns its end, ``inf`` where there is nothing to do."""
        for _ in range(3):  # pixels that a step asks for are there in the next one, which may be the first with work
            self.rank.seconds = 0.0
            encoded = self.engine.scheduler.totals.images_encoded
            for delta in self.engine.step():
                job = self._jobs[delta.id]
                if delta.tokens and not job.ends:
                    job.ends = 1
                    job.hit = delta.cached_tokens
                    self._begun.append(job)
                if delta.finish is not None:
                    assert delta.finish == "length", delta.message
                    if delta.stats is not None:
                        job.encoded = delta.stats.images - delta.stats.image_hits
                    self._ended.append(self._jobs.pop(delta.id))
            requested = self.engine.needs()
            for id, index in requested:
                self.engine.add_media(id, index, NO_PIXELS)
            if self.rank.seconds or (not requested and encoded == self.engine.scheduler.totals.images_encoded):
                break
        self._end = now + self.rank.seconds if self.rank.seconds else math.inf
        return self._end

    def interrupt(self, now: float) -> float:
        """A step that runs is not cut short."""
        return self._end

    def finish(self) -> tuple[list[Job], list[Job]]:
        """What the step produced."""
        begun, ended, self._begun, self._ended = self._begun, self._ended, [], []
        return begun, ended

    def evictions(self) -> tuple[list[int], list[int]]:
        """Keys of KV blocks and of images that were evicted since the last call."""
        blocks, images = self.log.take()
        return list(read_keys(blocks)), list(read_keys(images))


def exact_job(turn: Turn, block: int) -> Job:
    """The request of a turn as the product's router sees it, keys and all."""
    job = Job(turn, RequestCost(turn.prompt), [], [])
    job.work = make_request_cost(request_of(job, ""), block)
    return job


def request_of(job: Job, id: str) -> Request:
    """The turn as tokens: a system prompt, images, then messages and answers in turn."""
    turn, session = job.turn, job.turn.session
    tokens, spans = [FIRST + session.system] * session.system_tokens, []
    for shown in session.images:
        spans.append(MediaSpan(shown.offset, shown.tokens, f"{shown.id:x}", (1, 2, 2 * shown.tokens), shown.slots))
        tokens += [IMAGE] * shown.tokens
    for i, length in enumerate(session.texts[: turn.texts]):
        tokens += [ANSWER if i % 2 else 1000 + session.number] * length
    assert len(tokens) == turn.prompt
    params = SamplingParams(temperature=0, max_tokens=turn.output, ignore_eos=True)
    return Request(id, tokens, params, spans)
