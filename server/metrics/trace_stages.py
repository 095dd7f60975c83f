"""A request's trace as plain numbers: its attributes and the times of its stages. Uses no tracing library.

On the request's path only ``summarise_request`` runs; the thread that sends traces makes the rest, if tracing is
enabled.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from trencadis.core.request import RequestStats
from trencadis.server.metrics.request_record import RequestRecord

Value = str | int | float | list[str]


class StageSpan(NamedTuple):
    """A stage: seconds since 1970 at which it begins and ends."""

    name: str
    begin: float
    end: float


class PromptSummary(NamedTuple):
    """The prompt that ended last, and the choice of it that took longest; times are ``time.monotonic``."""

    start: float
    end: float | None
    first: float | None
    media_begun: float
    media_ended: float
    stats: RequestStats | None


class RequestSummary(NamedTuple):
    """The facts of an ended request that its trace needs; holds no prompt, answer or pixels.

    Args:
        started_at: when it came, in seconds since 1970; ``begun`` is the same moment of ``time.monotonic``.
        first: when the first token came.
        params: max_tokens, temperature, top_p and n.
        counts: tokens of prompts, generated tokens, choices.
        slowest: statistics of the choice of all prompts that took longest.
    """

    started_at: float
    begun: float
    end: float
    first: float | None
    fair_queue_seconds: float
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
    prompt: PromptSummary | None
    slowest: RequestStats | None


@dataclass(slots=True)
class Trace:
    """One request in the form from which ``otel_spans`` makes spans; times in seconds since 1970.

    Args:
        parent: headers ``traceparent`` and ``tracestate``, unchanged.
        error: the type of the error that it ended with.
    """

    begin: float
    end: float
    parent: dict[str, str]
    attributes: dict[str, Value]
    error: str = ""
    children: list[StageSpan] = field(default_factory=list)


def summarise_request(record: RequestRecord) -> RequestSummary:
    """Collects the facts of a request that has ended."""
    whole, stats, p = record.timing, record.stats, record.params
    slowest, prompt = _find_slowest(stats), None
    if whole is not None:
        one = len(record.timings) == 1
        last = whole if one else max(record.timings, key=lambda t: t.end or t.start)
        of = slowest if one else _find_slowest([s.stats for s in last.streams if s.stats is not None])
        prompt = PromptSummary(last.start, last.end, last.first, last.media_begun, last.media_ended, of)
    return RequestSummary(
        record.started_at, record.begun, record.end, None if whole is None else whole.first, record.fair_queue_seconds,
        record.answer or record.id, record.model, record.method, record.path[:200], record.status, record.outcome,
        record.error, record.tenant, record.parent,
        None if p is None else (p.max_tokens, p.temperature, p.top_p, p.n),
        (0, 0, 0) if whole is None else (whole.prompt_tokens, whole.generated, whole.n),
        prompt, slowest,
    )  # fmt: skip


def _find_slowest(stats: list[RequestStats]) -> RequestStats | None:
    if len(stats) < 2:
        return stats[0] if stats else None
    return max(stats, key=lambda s: s.queue + s.prefill + s.decode)


def make_trace(summary: RequestSummary) -> Trace:
    """Makes the trace of a request."""
    end = summary.started_at + summary.end - summary.begun
    children = [] if summary.prompt is None else _make_children(summary, summary.prompt)
    return Trace(summary.started_at, end, summary.parent, _make_attributes(summary), summary.error, children)


def _make_children(summary: RequestSummary, prompt: PromptSummary) -> list[StageSpan]:
    """Returns the stages of one choice, one after the other; together they cover the whole time of the request."""
    shift = summary.started_at - summary.begun
    came = summary.begun + summary.fair_queue_seconds
    found = [StageSpan("turn", summary.begun, came)] if summary.fair_queue_seconds else []
    found.append(StageSpan("prepare", came, prompt.media_begun or prompt.start))
    if prompt.media_begun:
        found.append(StageSpan("media", prompt.media_begun, prompt.media_ended))
        found.append(StageSpan("place", prompt.media_ended, prompt.start))
    last = summary.end if prompt.end is None else prompt.end
    if prompt.stats is not None:
        found += _engine_stages(prompt, prompt.stats, last, shift)
    elif prompt.first is not None:
        # The request was cut off, so the engine reported nothing.
        found += [StageSpan("prefill", prompt.start, prompt.first), StageSpan("decode", prompt.first, last)]
    found.append(StageSpan("answer", last, summary.end))
    return [StageSpan(name, begin + shift, max(begin, end) + shift) for name, begin, end in found]


def _engine_stages(prompt: PromptSummary, stats: RequestStats, last: float, shift: float) -> list[StageSpan]:
    """Returns the engine's stages between ``prompt.start`` and ``last``, with the transfers to it and back.

    The engine reports how long its stages took and when the last one ended, by its own machine's clock. A clock that
    differs shifts them no further than ``prompt.start`` and ``last`` allow.
    """
    queue, decode = stats.queue, stats.decode
    prefill = max(stats.prefill - stats.encode, 0.0)
    spare = last - prompt.start - (queue + stats.encode + prefill + decode)
    back = min(max(last + shift - stats.ended, 0.0), max(spare, 0.0)) if stats.ended else 0.0
    at = prompt.start + max(spare - back, 0.0)
    found = [StageSpan("submit", prompt.start, at)]
    for name, seconds in (("queue", queue), ("encode", stats.encode), ("prefill", prefill), ("decode", decode)):
        if name != "encode" or prompt.media_begun:
            found.append(StageSpan(name, at, min(at + seconds, last)))
            at = found[-1].end
    found.append(StageSpan("deliver", at, last))
    return found


def _make_attributes(summary: RequestSummary) -> dict[str, Value]:
    """Returns attributes by vLLM's names; attributes that vLLM lacks have another prefix. No contents, no keys."""
    found: dict[str, Value | None] = {
        "gen_ai.request.id": summary.id,
        "gen_ai.response.model": summary.model or None,
        "gen_ai.usage.prompt_tokens": summary.counts[0],
        "gen_ai.usage.completion_tokens": summary.counts[1],
        "gen_ai.usage.num_sequences": summary.counts[2],
        "gen_ai.latency.e2e": summary.end - summary.begun,
        "gen_ai.latency.time_to_first_token": None if summary.first is None else summary.first - summary.begun,
        "http.request.method": summary.method,
        "http.response.status_code": summary.status,
        "url.path": summary.path,
        "trencadis.outcome": summary.outcome,
        "trencadis.tenant": summary.tenant or None,
    }
    if summary.params is not None:
        names = "max_tokens", "temperature", "top_p", "n"
        found |= {f"gen_ai.request.{name}": value for name, value in zip(names, summary.params, strict=True)}
    slow = summary.slowest
    if slow is not None:
        found |= {
            "gen_ai.latency.time_in_queue": slow.queue + summary.fair_queue_seconds,
            "gen_ai.latency.time_in_model_prefill": slow.prefill,
            "gen_ai.latency.time_in_model_decode": slow.decode,
            "gen_ai.latency.time_in_model_inference": slow.prefill + slow.decode,
            "trencadis.buckets.first": slow.first_buckets,
            "trencadis.buckets.last": slow.last_buckets,
        }
    return {name: value for name, value in found.items() if value is not None}
