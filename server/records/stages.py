"""A request's trace as plain numbers: what it was and where its time went. No tracing library.

On the request's path only ``facts_of`` runs: what is made of them is made by whoever sends traces, if anybody does.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from trencadis.core.request import RequestStats
from trencadis.server.records.record import RequestRecord

Value = str | int | float | list[str]


class StageSpan(NamedTuple):
    """A stage: seconds since 1970 at which it begins and ends."""

    name: str
    begin: float
    end: float


class PromptFacts(NamedTuple):
    """The prompt that ended last, and the choice of it that took longest; times are ``time.monotonic``."""

    start: float
    end: float | None
    first: float | None
    media_begun: float
    media_ended: float
    stats: RequestStats | None


class RequestFacts(NamedTuple):
    """What a trace needs of a request that has ended: nothing of it holds a prompt, an answer or pixels.

    Args:
        at: when it came, in seconds since 1970; ``begun`` is the same moment of ``time.monotonic``.
        first: when the first token came.
        params: max_tokens, temperature, top_p and n.
        counts: tokens of prompts, generated tokens, choices.
        slowest: of the choice of all prompts that took longest.
    """

    at: float
    begun: float
    end: float
    first: float | None
    turn: float
    id: str
    model: str
    method: str
    path: str
    status: int
    outcome: str
    error: str
    tenant: str
    parent: dict[str, str]
    params: tuple[int | None, float, float, int] | None
    counts: tuple[int, int, int]
    prompt: PromptFacts | None
    slowest: RequestStats | None


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


def facts_of(record: RequestRecord) -> RequestFacts:
    """The facts of a request that has ended."""
    whole, stats, p = record.timing, record.stats, record.params
    slowest, prompt = _slowest(stats), None
    if whole is not None:
        one = len(record.timings) == 1
        last = whole if one else max(record.timings, key=lambda t: t.end or t.start)
        of = slowest if one else _slowest([s.stats for s in last.streams if s.stats is not None])
        prompt = PromptFacts(last.start, last.end, last.first, last.media_begun, last.media_ended, of)
    return RequestFacts(
        record.at, record.begun, record.end, None if whole is None else whole.first, record.turn,
        record.answer or record.id, record.model, record.method, record.path[:200], record.status, record.outcome,
        record.error, record.tenant, record.parent,
        None if p is None else (p.max_tokens, p.temperature, p.top_p, p.n),
        (0, 0, 0) if whole is None else (whole.prompt_tokens, whole.generated, whole.n),
        prompt, slowest,
    )  # fmt: skip


def _slowest(stats: list[RequestStats]) -> RequestStats | None:
    if len(stats) < 2:
        return stats[0] if stats else None
    return max(stats, key=lambda s: s.queue + s.prefill + s.decode)


def trace_of(facts: RequestFacts) -> Trace:
    """The trace of a request."""
    end = facts.at + facts.end - facts.begun
    children = [] if facts.prompt is None else _children(facts, facts.prompt)
    return Trace(facts.at, end, facts.parent, _attributes(facts), facts.error, children)


def _children(facts: RequestFacts, prompt: PromptFacts) -> list[StageSpan]:
    """The stages of one choice, one after the other; they leave no time of the request out."""
    shift = facts.at - facts.begun
    came = facts.begun + facts.turn
    found = [("turn", facts.begun, came)] if facts.turn else []
    found.append(("prepare", came, prompt.media_begun or prompt.start))
    if prompt.media_begun:
        found += [("media", prompt.media_begun, prompt.media_ended), ("place", prompt.media_ended, prompt.start)]
    last = facts.end if prompt.end is None else prompt.end
    if prompt.stats is not None:
        found += _in_engine(prompt, prompt.stats, last, shift)
    elif prompt.first is not None:
        # It was cut off, so the engine reported nothing.
        found += [("prefill", prompt.start, prompt.first), ("decode", prompt.first, last)]
    found.append(("answer", last, facts.end))
    return [StageSpan(name, begin + shift, max(begin, end) + shift) for name, begin, end in found]


def _in_engine(prompt: PromptFacts, stats: RequestStats, last: float, shift: float) -> list[tuple[str, float, float]]:
    """What the engine did between ``prompt.start`` and ``last``, and the ways to it and back.

    The engine tells how long its stages took and when the last one ended, by its own machine's clock. A clock that
    differs moves them no further than both ends allow.
    """
    queue, decode = stats.queue, stats.decode
    prefill = max(stats.prefill - stats.encode, 0.0)
    spare = last - prompt.start - (queue + stats.encode + prefill + decode)
    back = min(max(last + shift - stats.ended, 0.0), max(spare, 0.0)) if stats.ended else 0.0
    at = prompt.start + max(spare - back, 0.0)
    found = [("submit", prompt.start, at)]
    for name, seconds in (("queue", queue), ("encode", stats.encode), ("prefill", prefill), ("decode", decode)):
        if name != "encode" or prompt.media_begun:
            found.append((name, at, min(at + seconds, last)))
            at = found[-1][2]
    found.append(("deliver", at, last))
    return found


def _attributes(facts: RequestFacts) -> dict[str, Value]:
    """Attributes by vLLM's names; those that it has not begin with another word. No contents, no keys."""
    found: dict[str, Value | None] = {
        "gen_ai.request.id": facts.id,
        "gen_ai.response.model": facts.model or None,
        "gen_ai.usage.prompt_tokens": facts.counts[0],
        "gen_ai.usage.completion_tokens": facts.counts[1],
        "gen_ai.usage.num_sequences": facts.counts[2],
        "gen_ai.latency.e2e": facts.end - facts.begun,
        "gen_ai.latency.time_to_first_token": None if facts.first is None else facts.first - facts.begun,
        "http.request.method": facts.method,
        "http.response.status_code": facts.status,
        "url.path": facts.path,
        "trencadis.outcome": facts.outcome,
        "trencadis.tenant": facts.tenant or None,
    }
    if facts.params is not None:
        names = "max_tokens", "temperature", "top_p", "n"
        found |= {f"gen_ai.request.{name}": value for name, value in zip(names, facts.params, strict=True)}
    slow = facts.slowest
    if slow is not None:
        found |= {
            "gen_ai.latency.time_in_queue": slow.queue + facts.turn,
            "gen_ai.latency.time_in_model_prefill": slow.prefill,
            "gen_ai.latency.time_in_model_decode": slow.decode,
            "gen_ai.latency.time_in_model_inference": slow.prefill + slow.decode,
            "trencadis.buckets.first": slow.first_buckets,
            "trencadis.buckets.last": slow.last_buckets,
        }
    return {name: value for name, value in found.items() if value is not None}
