"""The log's lines of a request: received, access, closing. Contents stand in them only if they are asked for."""

from __future__ import annotations

import json
import logging
from typing import Any
from urllib.parse import quote

from trencadis.core.request import SamplingParams
from trencadis.server.metrics.stages import closing, stage_seconds
from trencadis.server.records.record import RequestRecord

log = logging.getLogger("trencadis.server")
access = logging.getLogger("uvicorn.access")
LONGEST_PATH = 500
IDLE = "request %s: did not run, total %.3f s, %s%s"
PARAMS = ("max_tokens", "n", "temperature", "top_p", "top_k", "seed")


def say_access(record: RequestRecord, version: str) -> None:
    """The access line, in uvicorn's words, and what they lack: seconds until the answer begins, id and tenant."""
    if not access.isEnabledFor(logging.INFO) or not access.hasHandlers():
        return
    seconds = record.answered - record.begun
    # Without the query, where some clients put keys.
    path = quote(record.path[:LONGEST_PATH])
    access.info(
        '%s - "%s %s HTTP/%s" %d, %.3f s, request %s%s',
        record.client, record.method, path, version, record.status, seconds, record.id,
        f", tenant {record.tenant}" if record.tenant else "",
        extra={"fields": {
            "event": "access", "id": record.id, "tenant": record.tenant, "client": record.client,
            "method": record.method, "path": path, "status": record.status, "seconds": round(seconds, 6),
        }},
    )  # fmt: skip


def say_received(record: RequestRecord, tokens: int, media: int, params: SamplingParams, prompt: str | None) -> None:
    """The line of ``--enable-log-requests``; ``prompt``: its text, if the operator wants to see it."""
    shown = {name: getattr(params, name) for name in PARAMS if getattr(params, name) is not None}
    fields: dict[str, Any] = {
        "event": "received", "id": record.id, "answer": record.answer, "tenant": record.tenant,
        "prompt_tokens": tokens, "media": media, "params": shown,
    }  # fmt: skip
    text = ""
    if prompt is not None:
        fields["prompt"] = prompt
        text = f", prompt {json.dumps(prompt)}"
    words = ", ".join(f"{name} {value:g}" for name, value in shown.items())
    log.info(
        "request %s received: %d tokens, %d media, %s%s",
        record.answer, tokens, media, words, text, extra={"fields": fields},
    )  # fmt: skip


def say_closing(record: RequestRecord, most: int | None) -> None:
    """The line at the end of a request that came to a route which runs the model.

    Args:
        most: characters of an answer's text.
    """
    seconds = record.end - record.begun
    fields: dict[str, Any] = {
        "event": "closing", "id": record.id, "answer": record.answer, "tenant": record.tenant, "path": record.path,
        "status": record.status, "outcome": record.outcome, "seconds": round(seconds, 6),
    }  # fmt: skip
    named = record.answer or record.id
    tenant = f", tenant {record.tenant}" if record.tenant else ""
    timing, first, stats = record.timing, record.first, record.stats
    if timing is None:
        log.info(IDLE, named, seconds, record.outcome, tenant, extra={"fields": fields})
        return
    cached = sum(max((s.cached_tokens for s in t.streams), default=0) for t in record.timings)
    slowest = max(stats, key=lambda s: s.queue + s.prefill + s.decode, default=None)
    fields |= {
        "prompt_tokens": timing.prompt_tokens, "cached_tokens": cached, "image_tokens": timing.image_tokens,
        "generated_tokens": timing.generated, "media": timing.media,
        "first_token_seconds": None if first is None else round(first - record.begun, 6),
        "stages": {name: round(value, 6) for name, value in stage_seconds(timing).items()},
        "launches": sum(s.launches for s in stats), "unplanned": sum(s.misses for s in stats),
        "preemptions": sum(s.preemptions for s in stats),
        "buckets": {
            "first": slowest.first_buckets if slowest else [], "last": slowest.last_buckets if slowest else [],
        },
    }  # fmt: skip
    parts = [record.outcome + tenant, closing(timing)]
    if slowest:
        parts.append(f"buckets {_and(slowest.first_buckets)}, {_and(slowest.last_buckets)}")
    if record.said:
        fields["outputs"] = ["".join(pieces)[:most] for pieces in record.said]
        parts.append(f"answers {json.dumps(fields['outputs'])}")
    log.info(
        "request %s: %d prompt tokens (%d cached, %d image), %d generated, first token %s, total %.3f s, %s",
        named, timing.prompt_tokens, cached, timing.image_tokens, timing.generated,
        "-" if first is None else f"{first - record.begun:.3f} s", seconds, "; ".join(filter(None, parts)),
        extra={"fields": fields},
    )  # fmt: skip


def _and(names: list[str]) -> str:
    return "+".join(names) or "-"
