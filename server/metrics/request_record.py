"""The record of one HTTP request, from its head to the end of its answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field

from trencadis.core.request import RequestStats, SamplingParams
from trencadis.server.prompts.generation import RequestTiming

CLIENT_CLOSED = 499
"""Status of a request whose client disconnected before it was answered."""


@dataclass(slots=True)
class RequestRecord:
    """Record of one HTTP request, filled by the layers that handle it; times are ``time.monotonic``.

    Args:
        id: what the answer's header ``x-request-id`` says.
        started_at: when it came, in seconds since 1970.
        client: address and port, as a trusted proxy names them.
        parent: the headers ``traceparent`` and ``tracestate``, if the client sent them.
        tenant: its name in the key file; never a key.
        rank: the header ``X-data-parallel-rank``, which pins it to one of several engines.
        deadline: the time by which it must have ended; None: no deadline.
        timer: cancels the running work at the deadline.
        fair_queue_seconds: seconds that it waited in the fair queue.
        runs_model: whether it came to a route that runs the model.
        sent: bytes of the answer's body so far.
        answer: the id in the answer.
        error: the type of the error that it ended with.
        params: of its first generation.
        texts: pieces of each choice's text, if the log shows them.
    """

    id: str
    method: str = ""
    path: str = ""
    client: str = ""
    parent: dict[str, str] = field(default_factory=dict)
    begun: float = field(default_factory=time.monotonic)
    started_at: float = field(default_factory=time.time)
    tenant: str = ""
    rank: str = ""
    deadline: float | None = None
    timer: asyncio.Timeout | None = None
    fair_queue_seconds: float = 0.0
    runs_model: bool = False
    answer: str = ""
    model: str = ""
    status: int = 0
    answered: float = 0.0
    sent: int = 0
    end: float = 0.0
    error: str = ""
    params: SamplingParams | None = None
    timings: list[RequestTiming] = field(default_factory=list)
    texts: list[list[str]] = field(default_factory=list)

    @property
    def outcome(self) -> str:
        """The reason why it ended: the type of its error, else the finish reasons of its choices, else its status."""
        reasons = [reason for timing in self.timings for reason in timing.finish]
        if self.error or reasons:
            return self.error or ",".join(dict.fromkeys(reasons))
        return "abort" if self.status in (0, CLIENT_CLOSED) else str(self.status)

    @property
    def timing(self) -> RequestTiming | None:
        """The timings of all its prompts combined into one; None if none ran."""
        return join_timings(self.timings) if len(self.timings) > 1 else next(iter(self.timings), None)

    @property
    def stats(self) -> list[RequestStats]:
        """The engine's statistics of each choice that it has ended."""
        return [stats for timing in self.timings for stats in timing.stats]

    @property
    def cached(self) -> int:
        """Tokens of its prompts that came from the prefix cache."""
        return sum(timing.cached for timing in self.timings)


RECORD: ContextVar[RequestRecord | None] = ContextVar("request_record", default=None)
"""The record of the request that this task serves."""


def join_timings(timings: Sequence[RequestTiming]) -> RequestTiming:
    """Combines the timings of one request's prompts: sums, the earliest start, the latest end."""
    first = timings[0]
    return RequestTiming(
        first.id,
        min(t.start for t in timings),
        sum(t.prompt_tokens for t in timings),
        sum(t.image_tokens for t in timings),
        sum(t.max_tokens for t in timings),
        sum(t.n for t in timings),
        first=min((t.first for t in timings if t.first is not None), default=None),
        end=max((t.end for t in timings if t.end is not None), default=None),
        generated=sum(t.generated for t in timings),
        finish=[reason for t in timings for reason in t.finish],
        streams=[stream for t in timings for stream in t.streams],
        media=sum(t.media for t in timings),
        prepared=sum(t.prepared for t in timings),
        fair_queue_seconds=first.fair_queue_seconds,
        media_seconds={stage: sum(t.media_seconds.get(stage, 0.0) for t in timings) for stage in first.media_seconds},
    )
