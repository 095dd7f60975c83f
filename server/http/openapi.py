"""``/openapi.json``: what each route answers, errors included, as the gate and the routes really do.

FastAPI knows the bodies that succeed. It would list its own 422 too, which this server never sends: a body that does
not validate is a 400 in OpenAI's envelope.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

from trencadis.server.protocol.base import ErrorResponse, Strict
from trencadis.server.routes.auth import OPEN

ERRORS = {
    400: "The request is wrong; `param` names the field.",
    401: "The API key is missing or wrong.",
    403: "Refused by the operator's rules: a template in a request, a media address, a path.",
    404: "No such model.",
    409: "A `uuid` already names other media.",
    413: "The body, or an image, is too large.",
    415: "Bytes that are no image or video of a known format.",
    422: "A media address did not answer.",
    429: "The queue is full; `Retry-After` says when to come back.",
    500: "A mistake of the server's.",
    501: "A form of a value that is not read, such as a data URL without base64.",
    503: "Loading, draining, or the engine ended; `Retry-After` says when to come back.",
}
BODY = (400, 413, 429)
"""Of whatever takes a body: its type and its JSON, its size, the room for all bodies."""
MEDIA = (403, 409, 415, 422, 501)
STATUSES: dict[tuple[str, str], tuple[int, ...]] = {
    ("post", "/v1/chat/completions"): (*BODY, 404, *MEDIA, 500, 503),
    ("post", "/v1/completions"): (*BODY, 404, 500, 503),
    ("post", "/tokenize"): (*BODY, 404, *MEDIA, 500),
    ("post", "/detokenize"): (*BODY, 404, 500),
    ("get", "/v1/models/{model}"): (404,),
    ("post", "/ping"): BODY,
}
"""Errors of each route beside 401, which every guarded route has."""
PROBES = ("/health", "/ready", "/ping")
STREAMS = ("/v1/chat/completions", "/v1/completions")
AGAIN = {"Retry-After": {"description": "Seconds to wait.", "schema": {"type": "integer"}}}
REF = "#/components/schemas/"


class ProbeProgress(Strict):
    """Loading, or warm-up beside serving."""

    phase: str
    done: int
    total: int
    percent: float
    eta_seconds: float


class Probe(Strict):
    """What a probe says, whether its answer is 200 or 503."""

    status: str
    phase: str
    accepting: bool
    ready: bool
    device: str | None = None
    progress: ProbeProgress | None = None


class LiveProbe(Strict):
    """Whether this process should be started again."""

    status: str


def describe(app: FastAPI) -> Callable[[], dict[str, Any]]:
    """A replacement for ``app.openapi``; made at the first call."""
    plain = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            made = plain()
            for path, methods in made["paths"].items():
                for method, operation in methods.items():
                    operation["responses"] = _responses(path, method, operation["responses"])
            schemas = made["components"]["schemas"]
            for name in ("HTTPValidationError", "ValidationError"):
                schemas.pop(name, None)
            for model in (ErrorResponse, Probe, LiveProbe):
                _add(schemas, model)
            app.openapi_schema = made
        return app.openapi_schema or {}

    return openapi


def _responses(path: str, method: str, found: dict[str, Any]) -> dict[str, Any]:
    good = dict(found["200"])
    out = {"200": good}
    if path == "/metrics":
        good["content"] = {"text/plain": {"schema": {"type": "string"}}}
    elif path in STREAMS:
        text = "With `stream`: events `data: {...}`, one for an error among them, closed by `data: [DONE]`."
        good["content"] = {**good["content"], "text/event-stream": {"schema": {"type": "string", "description": text}}}
    elif path in PROBES:
        good["content"] = _json("Probe")
        out["503"] = {"description": "Not yet, or no more.", "content": _json("Probe"), "headers": AGAIN}
    elif path == "/live":
        good["content"] = _json("LiveProbe")
        out["503"] = {"description": "The engine fails again and again.", "content": _json("LiveProbe")}
    errors = {*STATUSES.get((method, path), ()), *(() if path in OPEN else (401,))}
    for status in sorted(errors):
        out[str(status)] = {"description": ERRORS[status], "content": _json("ErrorResponse")}
        if status in (429, 503):
            out[str(status)]["headers"] = AGAIN
    return out


def _json(name: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": REF + name}}}


def _add(schemas: dict[str, Any], model: type[BaseModel]) -> None:
    made = model.model_json_schema(ref_template=REF + "{model}")
    schemas |= made.pop("$defs", {})
    schemas[model.__name__] = made
