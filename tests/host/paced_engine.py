"""The counting engine for the demo's vocabulary: a prompt that begins with ``PACED`` gets a token every 20 ms."""

from __future__ import annotations

import time
from collections.abc import Sequence

from tests.fakes.counting_engine import CountingEngine
from trencadis.core.process.engine_messages import EngineStats
from trencadis.core.request import Delta

PACED = 7
SECONDS = 0.02
FIRST = 100
"""Tokens are counted from here on, so that none of them ends an answer."""


class PacedEngine(CountingEngine):
    """Steps at a pace, and counts what it produces."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = 0

    def step(self) -> Sequence[Delta]:
        """See CountingEngine."""
        if any(self.requests[id].tokens[0] == PACED for id, _ in self.made):
            time.sleep(SECONDS)
        out: list[Delta] = super().step()
        self.tokens += len(out)
        for delta in out:
            delta.tokens = [FIRST + token % 800 for token in delta.tokens]
        return out

    def stats(self) -> EngineStats:
        """See CountingEngine."""
        return EngineStats(running=len(self.made), steps=self.steps, kv_total=512, generation_tokens=self.tokens)
