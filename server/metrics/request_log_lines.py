"""The log lines of a request: received, access, closing. They include contents only if the operator asks for them."""

from __future__ import annotations

import json
import logging
from functools import partial
from urllib.parse import quote

from trencadis.core.json_types import JsonObject
from trencadis.core.request import SamplingParams
from trencadis.server.metrics.request_record import RequestRecord
from trencadis.server.metrics.stage_metrics import format_closing, get_stage_seconds

log = logging.getLogger("trencadis.server")
access = logging.getLogger("uvicorn.access")
LONGEST_PATH = 500
IDLE = "request %s: did not run, total %.3f s, %s"
PARAMS = ("max_tokens", "n", "temperature", "top_p", "top_k", "seed")


def log_access(record: RequestRecord, version: str) -> None:
    """Logs the access line in uvicorn's format, with additional fields: seconds until the answer begins, id and
    tenant.
    """
    if not access.isEnabledFor(logging.INFO) or not access.hasHandlers():
        return
    access.info(
        '%s - "%s %s HTTP/%s" %d, %.3f s, request %s%s',
        record.client, record.method, _get_path(record), version, record.status, record.answered - record.begun,
        record.id,
        f", tenant {record.tenant}" if record.tenant else "",
        extra={"fields": partial(_make_access_fields, record)},
    )  # fmt: skip


def _get_path(record: RequestRecord) -> str:
    """Returns the path without the query, where some clients put keys."""
    return quote(record.path[:LONGEST_PATH])


def _make_access_fields(record: RequestRecord) -> JsonObject:
    """Returns the fields of the access line for ``--log-format json``."""
    return {
        "event": "access", "id": record.id, "tenant": record.tenant, "client": record.client,
        "method": record.method, "path": _get_path(record), "status": record.status,
        "seconds": round(record.answered - record.begun, 6),
    }  # fmt: skip


def log_received(record: RequestRecord, tokens: int, media: int, params: SamplingParams, prompt: str | None) -> None:
    """Logs the line of ``--enable-log-requests``; ``prompt``: its text, if the operator asks for contents."""
    shown = {name: getattr(params, name) for name in PARAMS if getattr(params, name) is not None}
    fields: JsonObject = {
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
        record.answer, tokens, media, words, text, extra={"fields": lambda: fields},
    )  # fmt: skip


def log_closing(record: RequestRecord, most: int | None) -> None:
    """Logs the line at the end of a request to a route that runs the model.

    Args:
        most: most characters of an answer's text.
    """
    named, seconds, timing = record.answer or record.id, record.end - record.begun, record.timing
    ended = f"{record.outcome}, tenant {record.tenant}" if record.tenant else record.outcome
    extra = {"fields": partial(_make_closing_fields, record, most)}
    if timing is None:
        log.info(IDLE, named, seconds, ended, extra=extra)
        return
    parts = [ended, format_closing(timing)]
    if record.texts:
        parts.append(f"answers {json.dumps(_join_texts(record, most))}")
    log.info(
        "request %s: %d prompt tokens (%d cached, %d image), %d generated, first token %s, total %.3f s, %s",
        named, timing.prompt_tokens, record.cached, timing.image_tokens, timing.generated,
        "-" if timing.first is None else f"{timing.first - record.begun:.3f} s", seconds,
        "; ".join(filter(None, parts)), extra=extra,
    )  # fmt: skip


def _make_closing_fields(record: RequestRecord, most: int | None) -> JsonObject:
    """Returns the fields of the closing line for ``--log-format json``."""
    fields: JsonObject = {
        "event": "closing", "id": record.id, "answer": record.answer, "tenant": record.tenant, "path": record.path,
        "status": record.status, "outcome": record.outcome, "seconds": round(record.end - record.begun, 6),
    }  # fmt: skip
    timing, stats = record.timing, record.stats
    if timing is None:
        return fields
    slowest = timing.slowest
    fields |= {
        "prompt_tokens": timing.prompt_tokens, "cached_tokens": record.cached, "image_tokens": timing.image_tokens,
        "generated_tokens": timing.generated, "media": timing.media,
        "first_token_seconds": None if timing.first is None else round(timing.first - record.begun, 6),
        "stages": {name: round(value, 6) for name, value in get_stage_seconds(timing).items()},
        "launches": sum(s.launches for s in stats), "unplanned": sum(s.misses for s in stats),
        "preemptions": sum(s.preemptions for s in stats),
        "drafted_tokens": sum(s.drafted for s in stats), "accepted_tokens": sum(s.accepted for s in stats),
        "buckets": {
            "first": slowest.first_buckets if slowest else [], "last": slowest.last_buckets if slowest else [],
        },
    }  # fmt: skip
    if record.texts:
        fields["outputs"] = _join_texts(record, most)
    return fields


def _join_texts(record: RequestRecord, most: int | None) -> list[str]:
    """Returns the texts of all choices, at most ``most`` characters of each."""
    return ["".join(pieces)[:most] for pieces in record.texts]
