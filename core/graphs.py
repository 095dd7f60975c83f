"""Programs by bucket: made when first needed, kept while they are used."""

from __future__ import annotations

from collections import OrderedDict

from trencadis.core.backend import Backend, Body, Program
from trencadis.core.buckets import Bucket

KEPT = 256
"""Programs kept where every size is its own bucket; the least recently used goes first."""


class Programs:
    """One Program per bucket of one backend.

    Args:
        kept: programs kept at most; never fewer than are planned, so that no planned one is given up.
    """

    def __init__(self, backend: Backend, bodies: dict[str, Body], kept: int = KEPT) -> None:
        self._backend = backend
        self._bodies = bodies
        self._kept = kept
        self._programs: OrderedDict[Bucket, Program] = OrderedDict()

    def get(self, bucket: Bucket, body: str) -> Program:
        """The program of ``bucket``, running the body of that name."""
        program = self._programs.get(bucket)
        if program is None:
            program = self._backend.program(bucket, self._bodies[body])
            self._programs[bucket] = program
            if len(self._programs) > self._kept:
                self._programs.popitem(last=False)[1].release()
        else:
            self._programs.move_to_end(bucket)
        return program
