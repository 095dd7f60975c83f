"""The fast model of a replica: the scheduler's rules over counts of tokens, with runs of equal steps in one event.

What it leaves out: preemption, block by block allocation (a request takes all its blocks when it enters), pins of
embeddings. ``--exact`` runs the scheduler itself; a test holds the two together.
"""

from __future__ import annotations

import heapq
import math
from collections import deque

from benchmarks.fleet.replica_caches import BlockCache, ImageCache
from benchmarks.fleet.replica_costs import Machine
from benchmarks.fleet.trace_request import Job
from trencadis.core.scheduling.encoder_scheduler import WORTH_A_ROW

AHEAD = 128
"""Waiting requests whose images are looked at."""


class FastReplica:
    """One replica. The caller calls ``start`` where nothing runs, and ``finish`` at the time that it gave."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.kv = BlockCache(machine.blocks)
        self.arena = ImageCache(machine.arena)
        self.waiting: deque[Job] = deque()
        self.prefilling: list[Job] = []
        self.decoding: list[tuple[int, int, Job]] = []
        """A heap by the number of the step that draws the last token."""
        self.steps = 0
        self.encoded = 0
        self.begun: list[Job] = []
        self._count = 0
        self._run = 1
        self._since = self._each = 0.0
        self._had_vision = self._starved = False

    def add(self, job: Job) -> None:
        """A request arrives."""
        self.waiting.append(job)

    def start(self, now: float) -> float:
        """Starts a step, or a run of equal ones; returns its end, ``inf`` where there is nothing to do."""
        m, self._since = self.machine, now
        if not self.waiting and not self.prefilling:
            if not self.decoding:
                return math.inf
            self._run = self.decoding[0][0] - self.steps
            self._each = m.seconds(0, len(self.decoding), 0)
            return now + self._run * self._each
        tokens, slots = self._schedule()
        if not tokens and not slots and not self.decoding:
            tokens, slots = self._schedule()  # the pixels that were asked for are there
            if not tokens and not slots:
                return math.inf
        self._run, self._each = 1, m.seconds(tokens, len(self.decoding), slots)
        return now + self._each

    def interrupt(self, now: float) -> float:
        """A request has come: a run of steps ends with the step that runs now. Returns the new end."""
        if self._run > 1:
            self._run = min(max(math.ceil((now - self._since) / self._each), 1), self._run)
        return self._since + self._run * self._each

    def finish(self) -> tuple[list[Job], list[Job]]:
        """The step or run has ended: requests that had their first token, and those that have ended."""
        self.steps += self._run
        begun, self.begun, ended = self.begun, [], []
        for job in begun:
            self._count += 1
            job.ends = self.steps + job.turn.output - 1
            heapq.heappush(self.decoding, (job.ends, self._count, job))
        while self.decoding and self.decoding[0][0] <= self.steps:
            job = heapq.heappop(self.decoding)[2]
            self.kv.own -= len(job.later)
            job.room -= len(job.later)
            self.kv.hold(job.later, 0)
            self.kv.drop([*job.keys, *job.later], job.room)
            ended.append(job)
        return begun, ended

    # One step, by the scheduler's rules

    def _schedule(self) -> tuple[int, int]:
        """(tokens of prompts, VISION slots) of the next step; the requests in it move on."""
        m = self.machine
        left = m.tokens - len(self.decoding)
        chosen = self._chosen()
        slots, tokens, has_images = 0, 0, False
        for job in tuple(self.prefilling):
            if left <= tokens:
                break
            count, more = self._advance(job, left - tokens, chosen)
            tokens, slots = tokens + count, slots + more
            has_images |= count > 1 and bool(job.work.images)
        count, more, shown = self._admit(left - tokens, chosen)
        tokens, slots, has_images = tokens + count, slots + more, has_images or shown
        for key, (job, extra) in chosen.items():
            if key not in self.arena:
                slots += self._encode(job, key, extra)
        for job in (*self.prefilling, *self.waiting):
            job.asked = True
        self._had_vision = slots > 0
        self._starved = left <= tokens and has_images and any(not j.work.images for j in self.waiting)
        return tokens, slots

    def _admit(self, budget: int, chosen: dict[int, tuple[Job, int]]) -> tuple[int, int, bool]:
        """Starts waiting requests: (tokens, slots, whether one with images computes a prompt)."""
        m, tokens, slots, has_images = self.machine, 0, 0, False
        at, rows = 0, len(self.decoding) + len(self.prefilling) + len(self.begun)
        while at < len(self.waiting) and budget > tokens and rows < m.rows:
            job = self.waiting[at]
            hits = self.kv.hits(job.keys[: (job.turn.prompt - 1) // m.block])
            if self._held_back(job, hits * m.block, chosen, rows == 0 and at == 0):
                at += 1
                continue
            need = -(-(job.turn.prompt + job.turn.output) // m.block) - hits
            if need > self.kv.free - self.kv.idle(job.keys[:hits]):
                break
            del self.waiting[at]
            rows += 1
            job.done = job.hit = hits * m.block
            job.room = need - (len(job.keys) - hits)
            self.kv.hold(job.keys, job.room)
            self.prefilling.append(job)
            count, more = self._advance(job, budget - tokens, chosen)
            tokens, slots = tokens + count, slots + more
            has_images |= count > 1 and bool(job.work.images)
        return tokens, slots, has_images

    def _chosen(self) -> dict[int, tuple[Job, int]]:
        """Images of this step's VISION launch: their keys, whom they are for, and their slots."""
        m, room = self.machine, self.machine.encoder
        chosen: dict[int, tuple[Job, int]] = {}
        if self._starved or (self._had_vision and any(not j.work.images for j in self.waiting)):
            return {}
        for job in (*self.prefilling, *list(self.waiting)[:AHEAD]):
            if not job.work.images or not job.asked:
                continue
            start = job.done or self.kv.hits(job.keys[: (job.turn.prompt - 1) // m.block]) * m.block
            for key, slots, end in job.work.images:
                if end > start and key not in self.arena and key not in chosen and (slots <= room or not chosen):
                    chosen[key] = job, slots
                    room -= slots
        return chosen

    def _held_back(self, job: Job, start: int, chosen: dict[int, tuple[Job, int]], first: bool) -> bool:
        for key, slots, end in job.work.images:
            if end - slots // 4 > start + WORTH_A_ROW:
                return False
            if end > start:
                if key not in self.arena and key not in chosen:
                    return True
                if first:
                    return False
        return False

    def _advance(self, job: Job, budget: int, chosen: dict[int, tuple[Job, int]]) -> tuple[int, int]:
        """(tokens, slots) that a request gets in this step."""
        stop, slots = min(job.turn.prompt, job.done + budget), 0
        for shown, (key, size, end) in zip(job.turn.session.images, job.work.images, strict=True):
            if shown.offset >= stop:
                break
            if end <= job.done:
                continue
            if key in self.arena:
                self.arena.use(key)
            elif key in chosen:
                slots += self._encode(job, key, size)
            else:
                stop = max(shown.offset, job.done)
                break
        count = stop - job.done
        job.done = stop
        if stop == job.turn.prompt:
            self.prefilling.remove(job)
            self.begun.append(job)
        return count, slots

    def _encode(self, job: Job, key: int, slots: int) -> int:
        self.arena.put(key, next(s.tokens for s in job.turn.session.images if s.id == key))
        job.encoded += 1
        self.encoded += 1
        return slots

    def evictions(self) -> tuple[list[int], list[int]]:
        """Keys of KV blocks and of images that were evicted since the last call."""
        blocks, self.kv.evicted = self.kv.evicted, []
        images, self.arena.evicted = self.arena.evicted, []
        return blocks, images
