"""An engine over the shadow model, and a driver that feeds it and compares every answer with the oracle's."""

from __future__ import annotations

import random
from typing import Any, cast

import numpy as np

from tests.oracles.shadow_model import SHADOW_RESERVED, ShadowRank, beam_oracle, oracle
from trencadis.core.engine.engine import Engine
from trencadis.core.executor.uniproc_executor import UniprocExecutor
from trencadis.core.kv.block_pool import BlockPool, HostBlockPool
from trencadis.core.process.engine_messages import EngineInfo
from trencadis.core.request import Delta, Request
from trencadis.core.scheduling.draft_scheduler import DraftScheduler
from trencadis.core.scheduling.encoder_cache import EncoderCache
from trencadis.core.scheduling.scheduler import Scheduler
from trencadis.core.scheduling.scheduler_limits import SchedulerLimits
from trencadis.core.spec.spec_config import SpeculationConfig
from trencadis.core.step import Step
from trencadis.core.token_masks.matcher_manager import MatcherManager

VOCAB = 60
EOS = (0,)
INFO = EngineInfo("shadow", "none", 0, 0, 0, VOCAB, 0)


class Clock:
    """Virtual seconds: one per call of ``tick``."""

    now = 1.0

    def __call__(self) -> float:
        return self.now

    def tick(self) -> None:
        self.now += 1.0


def shadow_engine(
    *,
    blocks: int,
    size: int,
    rows: int,
    depth: int,
    seqs: int = 8,
    tokens: int = 64,
    length: int = 96,
    host: int = 0,
    **more: Any,
) -> tuple[Engine, ShadowRank]:
    """An engine of real scheduling over a shadow model's rank; ``more`` are further limits, and what is drafted."""
    overlaps = bool(more.pop("overlaps", False))
    speculation: SpeculationConfig | None = more.pop("speculation", None)
    make_source, states = more.pop("make_source", None), more.pop("states", None)
    limits = SchedulerLimits(
        max_tokens=tokens, max_rows=seqs, max_model_len=length, block_size=size, vocab=VOCAB, eos=EOS,
        encoder_slots=256, **more,
    )  # fmt: skip
    slots = seqs + 8
    rank = ShadowRank(
        blocks, size, rows + 1, slots, VOCAB,
        matchers=MatcherManager(VOCAB, EOS), host_blocks=host, stages=limits.stages,
        host_state_slots=states.host.size if states is not None and states.host is not None else 0,
    )  # fmt: skip
    pool = BlockPool(blocks, HostBlockPool(host) if host else None)
    scheduler = Scheduler(limits, pool, EncoderCache(rows + 1, SHADOW_RESERVED), slots, Clock(), states=states)
    if speculation is not None:
        scheduler.drafting = DraftScheduler(speculation, limits, scheduler.totals, make_source)
    _compare_batches(scheduler, rank)
    executor = UniprocExecutor(cast(Any, rank), depth, overlaps)  # it never warms
    return Engine(scheduler, executor, INFO), rank


def _compare_batches(scheduler: Scheduler, rank: ShadowRank) -> None:
    """Lets the rank compare its copy of the batch with the scheduler's behind every Step."""
    schedule = scheduler.schedule

    def noted() -> Step | None:
        step = schedule()
        if step is not None:
            rows = scheduler.micro_batches.batch.sequences
            rank.expected_rows[step.number] = [(seq.key, seq.slot, seq.computed, list(seq.blocks)) for seq in rows]
        return step

    scheduler.schedule = noted  # type: ignore[method-assign]


class ScheduleDriver:
    """Feeds requests, pixels and aborts into an engine and checks what comes out."""

    def __init__(self, engine: Engine, rng: random.Random, length: int, media_delay: float = 0.3) -> None:
        self.engine, self.rng, self.length = engine, rng, length
        self.delay = media_delay
        clock = engine.scheduler.clock
        assert isinstance(clock, Clock)
        self.clock = clock
        self.requests: dict[str, Request] = {}
        self.got: dict[tuple[str, int], list[int]] = {}
        self.ended: dict[tuple[str, int], str] = {}
        self.wanted: list[tuple[str, int]] = []

    def add(self, request: Request) -> None:
        self.requests[request.id] = request
        for i in range(request.params.n):
            self.got[request.id, i] = []
        self.engine.add(request)

    def run_step(self) -> None:
        self.clock.tick()
        self.take(self.engine.step())
        self.wanted += self.engine.needs()
        for item in list(self.wanted):
            if self.rng.random() >= self.delay:
                self.wanted.remove(item)
                self.engine.add_media(*item, np.zeros((4, 1176), np.uint8))

    def take(self, deltas: list[Delta]) -> None:
        for d in deltas:
            key = (d.id, d.choice)
            assert key not in self.ended, "a choice spoke after its end"
            self.got[key] += d.tokens
            if d.finish:
                self.ended[key] = d.finish
                assert d.finish != "error", d.message

    def finish(self, turns: int = 200_000) -> None:
        while not self.engine.idle():
            self.run_step()
            turns -= 1
            assert turns, "a request starved"
        self.take(self.engine.step())

    def verify(self) -> None:
        """Every choice ended once, with the oracle's tokens (a prefix of them where it was aborted)."""
        self.engine.scheduler.check()
        assert self.engine.scheduler.pool.used == 0
        assert set(self.ended) == set(self.got)
        for (request_id, choice), tokens in self.got.items():
            request = self.requests[request_id]
            seed = request.params.seed or 0
            if request.beams is not None:
                expected = beam_oracle(request, EOS, VOCAB, self.length)[choice]
            else:
                expected = oracle(request, choice, seed, EOS, VOCAB, self.length)
            if self.ended[request_id, choice] == "abort":
                assert tokens == expected[: len(tokens)]
            else:
                assert tokens == expected, f"{request_id}/{choice} {self.ended[request_id, choice]}"
