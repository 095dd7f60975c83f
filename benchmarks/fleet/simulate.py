"""Discrete events over a fleet: arrivals of a trace and ends of steps. Time is the simulation's."""

from __future__ import annotations

import heapq
import math
import time
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from benchmarks.fleet.fast_replica import FastReplica
from benchmarks.fleet.policies import Policy
from benchmarks.fleet.replica_costs import Machine
from benchmarks.fleet.scheduler_replica import ExactReplica, exact_job
from benchmarks.fleet.trace_request import Job, job_of
from benchmarks.harness.reporting import quantile
from benchmarks.traces.sessions import Turn


class Replica(Protocol):
    """One engine. A caller never starts a step while another runs."""

    def add(self, job: Job) -> None: ...
    def start(self, now: float) -> float: ...
    def interrupt(self, now: float) -> float: ...
    def finish(self) -> tuple[list[Job], list[Job]]: ...
    def evictions(self) -> tuple[list[int], list[int]]:
        """Keys of KV blocks and of images that were evicted since the last call."""
        ...


@dataclass(slots=True)
class Outcome:
    """Figures of one run; times in seconds.

    Args:
        decisions: host seconds of each decision.
        examined: replicas that the router scored, of each decision.
    """

    ttft: array[float] = field(default_factory=lambda: array("d"))
    tokens: int = 0
    hits: int = 0
    encoded: int = 0
    ended: int = 0
    distinct: set[int] = field(default_factory=set)
    decisions: array[float] = field(default_factory=lambda: array("d"))
    examined: int = 0

    @property
    def hit_share(self) -> float:
        """Prompt tokens that a prefix cache held, over all."""
        return self.hits / max(self.tokens, 1)

    def quantile(self, share: float) -> float:
        """Of the times to a first token."""
        return quantile(self.ttft, share)


class Simulation:
    """A fleet under one policy.

    Args:
        make: a replica; ``read``: the request of a turn, given the size of a block.
    """

    def __init__(
        self,
        policy: Policy,
        machine: Machine,
        make: Callable[[Machine], Replica] = FastReplica,
        read: Callable[[Turn, int], Job] = job_of,
    ) -> None:
        self._read = read
        self.policy = policy
        self.machine = machine
        self.replicas = [make(machine) for _ in range(policy.replicas)]
        self.out = Outcome()
        self._ends = [math.inf] * policy.replicas
        self._events: list[tuple[float, int]] = []

    def run(self, turns: Iterable[Turn]) -> Outcome:
        """Runs a trace, in the order of arrival, to its end."""
        for turn in turns:
            self._advance(turn.arrival)
            self._arrive(turn)
        self._advance(math.inf)
        return self.out

    def _arrive(self, turn: Turn) -> None:
        now, job = turn.arrival, self._read(turn, self.machine.block)
        self.out.distinct.update(p.key for p in job.work.images)
        before = time.thread_time()
        job.ticket = self.policy.choose(job, now)
        self.out.decisions.append(time.thread_time() - before)
        self.out.examined = max(self.out.examined, self.policy.router.examined)
        at = job.ticket.replica
        self.replicas[at].add(job)
        if self._ends[at] == math.inf:
            self._begin(at, now)
        else:
            end = self.replicas[at].interrupt(now)
            if end != self._ends[at]:
                self._ends[at] = end
                heapq.heappush(self._events, (end, at))

    def _begin(self, at: int, now: float) -> None:
        self._ends[at] = self.replicas[at].start(now)
        if self._ends[at] < math.inf:
            heapq.heappush(self._events, (self._ends[at], at))

    def _advance(self, until: float) -> None:
        """Ends every step that ends by ``until``."""
        while self._events and self._events[0][0] <= until:
            now, at = heapq.heappop(self._events)
            if now == self._ends[at]:  # else a run of steps that was cut short
                begun, ended = self.replicas[at].finish()
                self._record(begun, ended, now)
                self.policy.router.on_evicted(at, *self.replicas[at].evictions())
                self._begin(at, now)

    def _record(self, begun: list[Job], ended: list[Job], now: float) -> None:
        for job in begun:
            assert job.ticket is not None
            self.policy.router.on_first_token(job.ticket, now)
            self.out.ttft.append(now - job.turn.arrival)
            self.out.hits += job.hit
            self.out.tokens += job.turn.prompt
        for job in ended:
            assert job.ticket is not None
            self.policy.ended(job.ticket, now)
            self.out.encoded += job.encoded
            self.out.ended += 1


def simulate(turns: Iterable[Turn], policy: Policy, machine: Machine) -> Outcome:
    """Runs a trace, in the order of arrival, to its end, by the fast model."""
    return Simulation(policy, machine).run(turns)


def simulate_exactly(turns: Iterable[Turn], policy: Policy, machine: Machine) -> Outcome:
    """The same with the product's scheduler, caches and keys in each replica."""
    return Simulation(policy, machine, ExactReplica, exact_job).run(turns)
