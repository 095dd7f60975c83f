"""A request's trace as plain numbers: what it was and where its time went. No tracing library."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from trencadis.server.prompts.generation import Timing
from trencadis.server.records.record import RequestRecord

Value = str | int | float | list[str]


class StageSpan(NamedTuple):
    """A stage: seconds since 1970 at which it begins and ends."""

    name: str
    begin: float
    end: float


@dataclass(slots=True)
class Trace:
    """One request, as ``spans`` makes spans of it; times in seconds since 1970.

    Args:
        parent: headers ``traceparent`` and ``tracestate``, as they came.
        error: the type of the error that it ended with.
    """

    begin: float
    end: float
    parent: dict[str, str]
    attributes: dict[str, Value]
    error: str = ""
    children: list[StageSpan] = field(default_factory=list)


def trace_of(record: RequestRecord) -> Trace:
    """The trace of a request that has ended."""
    made = Trace(record.at, record.at + record.end - record.begun, record.parent, _attributes(record), record.error)
    slowest = max(record.timings, key=lambda t: t.end or t.start, default=None)
    if slowest is not None:
        made.children = list(_children(record, slowest))
    return made


def _children(record: RequestRecord, timing: Timing) -> list[StageSpan]:
    """The stages of the slowest prompt's slowest choice, one after the other.

    The engine tells how long its stages took, not when: they follow each other from the request's submission on.
    """
    shift = record.at - record.begun
    before = timing.media_begun or timing.start
    came = record.begun + record.turn
    found = [StageSpan("turn", record.begun, came)] if record.turn else []
    found.append(StageSpan("prepare", came, before))
    if timing.media_begun:
        found.append(StageSpan("media", timing.media_begun, timing.media_ended))
    stats = max(
        (s.stats for s in timing.streams if s.stats is not None),
        key=lambda s: s.queue + s.prefill + s.decode, default=None,
    )  # fmt: skip
    at, last = timing.start, timing.end or record.end
    if stats is not None:
        stages = [("queue", stats.queue), ("encode", stats.encode), ("prefill", max(stats.prefill - stats.encode, 0.0))]
        for name, seconds in (*stages, ("decode", stats.decode)):
            if name != "encode" or timing.media:
                found.append(StageSpan(name, at, min(at + seconds, last)))
                at = found[-1].end
    elif timing.first is not None:
        # It was cut off, so the engine reported nothing.
        found += [StageSpan("prefill", at, timing.first), StageSpan("decode", timing.first, last)]
    found.append(StageSpan("answer", last, record.end))
    return [StageSpan(c.name, c.begin + shift, max(c.begin, c.end) + shift) for c in found]


def _attributes(record: RequestRecord) -> dict[str, Value]:
    """Attributes by vLLM's names; those that it has not begin with another word. No contents, no keys."""
    params, timings, stats = record.params, record.timings, record.stats
    found: dict[str, Value | None] = {
        "gen_ai.request.id": record.answer or record.id,
        "gen_ai.response.model": record.model or None,
        "gen_ai.usage.prompt_tokens": sum(t.prompt_tokens for t in timings),
        "gen_ai.usage.completion_tokens": sum(t.generated for t in timings),
        "gen_ai.usage.num_sequences": sum(t.n for t in timings),
        "gen_ai.latency.e2e": record.end - record.begun,
        "gen_ai.latency.time_to_first_token": None if record.first is None else record.first - record.begun,
        "http.request.method": record.method,
        "http.response.status_code": record.status,
        "url.path": record.path[:200],
        "trencadis.outcome": record.outcome,
        "trencadis.tenant": record.tenant or None,
    }
    if params is not None:
        found |= {
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.n": params.n,
        }
    if stats:
        slow = max(stats, key=lambda s: s.queue + s.prefill + s.decode)
        found |= {
            "gen_ai.latency.time_in_queue": slow.queue + record.turn,
            "gen_ai.latency.time_in_model_prefill": slow.prefill,
            "gen_ai.latency.time_in_model_decode": slow.decode,
            "gen_ai.latency.time_in_model_inference": slow.prefill + slow.decode,
            "trencadis.buckets.first": slow.first_buckets,
            "trencadis.buckets.last": slow.last_buckets,
        }
    return {name: value for name, value in found.items() if value is not None}
