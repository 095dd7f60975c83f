"""The product's router, and what it is compared with."""

from __future__ import annotations

import hashlib
import math
from bisect import bisect
from collections.abc import Callable, Collection, Sequence

from benchmarks.fleet.replica_costs import Machine
from benchmarks.fleet.trace_request import Job
from trencadis.server.processes.replica_router import RANDOM_REPLICAS, PrefixAffinityRouter
from trencadis.server.processes.replica_wait_prediction import Assignment

POINTS = 64
"""Places of a replica on the ring of hashes."""
BOUNDED = 1.25
"""ReplicaLoad over the mean at which bounded-load hashing goes on to the next replica."""


def at(value: object) -> int:
    """A place on the ring, the same in every run."""
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=8).digest())


class Policy:
    """A choice that knows loads alone; subclasses know more.

    Args:
        replicas: how many there are, all open.
        machine: what they are.
    """

    def __init__(self, replicas: int, machine: Machine, seed: int) -> None:
        self.router = PrefixAffinityRouter(
            replicas, lambda i: machine.costs(), machine.rows, machine.blocks * machine.block, seed=seed
        )
        for i in range(replicas):
            self.router.open(i)
        self.replicas = replicas

    def choose(self, job: Job, now: float) -> Assignment:
        """The replica of a request, charged."""
        return self.router.assign(self._replica(job), job.work, now)

    def ended(self, ticket: Assignment, now: float) -> None:
        """A request has ended."""
        self.router.on_ended(ticket, now)

    def _replica(self, job: Job) -> int:
        raise NotImplementedError

    def drawn(self) -> Collection[int]:
        """``RANDOM_REPLICAS`` replicas at random."""
        return [int(self.router._random() * self.replicas) for _ in range(RANDOM_REPLICAS)]


class Scored(Policy):
    """The product's router."""

    def choose(self, job: Job, now: float) -> Assignment:
        """Returns the choice of ``PrefixAffinityRouter.choose``."""
        ticket = self.router.choose(job.work, now)
        assert ticket is not None
        return ticket


class Random(Policy):
    """Any replica."""

    def _replica(self, job: Job) -> int:
        return int(self.router._random() * self.replicas)


class LeastLoaded(Policy):
    """Of ``RANDOM_REPLICAS`` replicas drawn at random, the one with the fewest open requests; the oldest load wins
    ties.
    """

    def _replica(self, job: Job) -> int:
        return min(self.drawn(), key=lambda i: (self.router.loads[i].open, self.router.loads[i].tokens))


class Hashed(Policy):
    """Consistent hashing: of the first image, else of the session's first message, so that a session stays."""

    def __init__(self, replicas: int, machine: Machine, seed: int) -> None:
        super().__init__(replicas, machine, seed)
        ring = sorted((at((i, p)), i) for i in range(replicas) for p in range(POINTS))
        self._places: Sequence[int] = [place for place, _ in ring]
        self._owners = [i for _, i in ring]

    def _start(self, job: Job) -> int:
        s = job.turn.session
        return bisect(self._places, at(("p", s.images[0].id) if s.images else ("s", s.number)))

    def _replica(self, job: Job) -> int:
        return self._owners[self._start(job) % len(self._owners)]


class BoundedHash(Hashed):
    """The same, but a replica with more than ``BOUNDED`` times the mean of open requests is passed over."""

    def __init__(self, replicas: int, machine: Machine, seed: int) -> None:
        super().__init__(replicas, machine, seed)
        self._inside = 0

    def choose(self, job: Job, now: float) -> Assignment:
        """Counts it too."""
        self._inside += 1
        return super().choose(job, now)

    def ended(self, ticket: Assignment, now: float) -> None:
        """Counts it too."""
        self._inside -= 1
        super().ended(ticket, now)

    def _replica(self, job: Job) -> int:
        start, loads = self._start(job), self.router.loads
        bound = math.ceil(BOUNDED * self._inside / self.replicas)
        for i in range(len(self._owners)):
            owner = self._owners[(start + i) % len(self._owners)]
            if loads[owner].open < bound:
                return owner
        return self._owners[start % len(self._owners)]


POLICIES: dict[str, Callable[[int, Machine, int], Policy]] = {
    "random": Random,
    "least loaded": LeastLoaded,
    "plain hash": Hashed,
    "bounded hash": BoundedHash,
    "router": Scored,
}
