"""``/openapi.json``: describes the answers of each route, including the errors of the request middleware.

FastAPI describes successful answers. Its own 422 is removed: this server answers an invalid body with a 400 in OpenAI's
envelope, or in Anthropic's on its paths.

Adds bounds and forms of messages and tools to ``/openapi.json``.

The types of a request do not have them: checks that name the JSON path of an error enforce them, so pydantic does not
know them.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from trencadis.core.json_types import JsonObject
from trencadis.core.request import MAX_BIAS, REASONING_EFFORTS
from trencadis.server.prompts.prompt_and_chat_messages import TEXT_PARTS
from trencadis.server.prompts.sampling_params import MAX_STOPS
from trencadis.server.protocol.anthropic_messages import MessagesError
from trencadis.server.protocol.base_request import (
    ErrorResponse,
    GenerateRequest,
    MediaRequest,
    Strict,
    is_anthropic_path,
)
from trencadis.server.routes.api_keys_and_allowed_hosts import OPEN
from trencadis.server.routes.json_io import COUNTS, MAX_TEMPLATE
from trencadis.server.text.chat_template import ROLES

OBJECT = {"type": "object", "additionalProperties": True}
PART = {
    "description": "Also `input_image`, `video_url`, and the forms of qwen-vl-utils (`image`, `video`).",
    "anyOf": [
        {**OBJECT, "required": ["type", "text"],
         "properties": {"type": {"enum": list(TEXT_PARTS)}, "text": {"type": "string"}}},
        {**OBJECT, "required": ["image_url"],
         "properties": {"image_url": {"anyOf": [
             {"type": "string"}, {**OBJECT, "required": ["url"], "properties": {"url": {"type": "string"}}}]}}},
        OBJECT,
    ],
}  # fmt: skip
CALL = {
    **OBJECT,
    "properties": {
        "id": {"type": "string"},
        "function": {**OBJECT, "properties": {"name": {"type": "string"}, "arguments": {}}},
    },
}
MESSAGE = {
    **OBJECT,
    "required": ["role"],
    "properties": {
        "role": {"type": "string", "examples": list(ROLES)},
        "content": {"anyOf": [
            {"type": "string"},
            {"type": "array", "items": {"anyOf": [{"type": "string"}, {"$ref": "#/components/schemas/ContentPart"}]}},
            {"type": "null"},
        ]},
        "tool_calls": {"anyOf": [{"type": "array", "items": CALL}, {"type": "null"}]},
    },
}  # fmt: skip
TOOL = {
    **OBJECT,
    "required": ["function"],
    "properties": {
        "type": {"type": "string", "enum": ["function"]},
        "function": {
            **OBJECT,
            "required": ["name"],
            "properties": {
                "name": {"type": "string", "minLength": 1, "maxLength": 128},
                "description": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "parameters": {"anyOf": [OBJECT, {"type": "null"}]},
            },
        },
    },
}
SHARED: dict[str, JsonObject] = {
    "ContentPart": PART, "ConversationMessage": MESSAGE, "FunctionTool": TOOL,
}  # fmt: skip
MESSAGES = "#/components/schemas/ConversationMessage"
BOUNDS: dict[str, JsonObject] = {
    "messages": {"minItems": 1, "maxItems": COUNTS["messages"], "items": {"$ref": MESSAGES}},
    "tools": {"minItems": 1, "maxItems": COUNTS["tools"], "items": {"$ref": "#/components/schemas/FunctionTool"}},
    "prompt": {"minItems": 1, "minLength": 1},
    "documents": {"maxItems": COUNTS["documents"]},
    "modalities": {"maxItems": COUNTS["modalities"], "items": {"type": "string", "enum": ["text"]}},
    "reasoning_effort": {"enum": list(REASONING_EFFORTS)},
    "chat_template": {"maxLength": MAX_TEMPLATE},
    "temperature": {"minimum": 0, "maximum": 2},
    "top_p": {"exclusiveMinimum": 0, "maximum": 1},
    "top_k": {"minimum": -1, "maximum": 2**31 - 1},
    "min_p": {"minimum": 0, "maximum": 1},
    "n": {"minimum": 1, "maximum": 16384},
    "presence_penalty": {"minimum": -2, "maximum": 2},
    "frequency_penalty": {"minimum": -2, "maximum": 2},
    "repetition_penalty": {"exclusiveMinimum": 0, "maximum": 100},
    "logit_bias": {"maxProperties": MAX_BIAS, "propertyNames": {"pattern": "^[0-9]{1,19}$"}},
    "max_tokens": {"minimum": 0},
    "max_completion_tokens": {"minimum": 0},
    "min_tokens": {"minimum": 0},
    "stop": {"maxItems": MAX_STOPS},
    "stop_token_ids": {"maxItems": COUNTS["stop_token_ids"]},
    "top_logprobs": {"minimum": -1},
    "logprobs": {"minimum": -1},
    "prompt_logprobs": {"minimum": -1},
    "truncate_prompt_tokens": {"minimum": -1},
    "cache_salt": {"minLength": 1, "maxLength": 128},
    "request_id": {"maxLength": 128},
}  # fmt: skip
"""Field -> keywords; each is set if the field has the keyword's type."""
KINDS = {
    "minItems": "array", "maxItems": "array", "items": "array", "enum": "string", "minLength": "string",
    "maxLength": "string", "maxProperties": "object", "propertyNames": "object",
}  # fmt: skip
"""Keyword -> the type that it applies to; the others apply to numbers."""


def add_field_bounds(schemas: JsonObject) -> None:
    """Adds bounds and forms to the schemas of requests that generate, in place."""
    schemas |= SHARED
    raw = schemas.get("CompletionRequest")  # absent on a server that pools
    if raw is not None:
        raw["required"] = ["prompt"]
        raw["properties"]["prompt"]["anyOf"] = [b for b in raw["properties"]["prompt"]["anyOf"] if b["type"] != "null"]
    generating = {*_list_request_schemas(GenerateRequest)}
    for name in _list_request_schemas(MediaRequest):
        for field, schema in schemas.get(name, {}).get("properties", {}).items():
            # /tokenize passes tools to the template as given, and accepts an empty prompt.
            known = BOUNDS.get(field, {}) if field not in ("tools", "prompt") or name in generating else {}
            for keyword, value in known.items():
                for branch in schema.get("anyOf", [schema]):
                    if keyword == "items" and branch.get("items", {}).get("type") == "array":
                        branch["items"] |= known  # a list of conversations: the keywords apply to each
                        continue
                    if branch.get("type") in (KINDS.get(keyword), *(() if keyword in KINDS else ("integer", "number"))):
                        branch[keyword] = value


def _list_request_schemas(kind: type[BaseModel]) -> Iterator[str]:
    yield kind.__name__
    for one in kind.__subclasses__():
        yield from _list_request_schemas(one)


ERRORS = {
    400: "The request is wrong; `param` names the field.",
    401: "The API key is missing or wrong.",
    403: "Refused by the operator's rules: a host or origin, a template in a request, a media address, a path.",
    404: "No such model.",
    409: "A `uuid` already names other media.",
    413: "The body, or an image, is too large.",
    415: "The bytes are not an image or video of a known format.",
    422: "A media address did not answer.",
    429: "The queue is full; `Retry-After` says when to try again.",
    431: "More header fields than `--h11-max-header-count` allows.",
    500: "Internal server error.",
    501: "This form of a value is not supported, such as a data URL without base64.",
    503: "The engine loads, drains or has stopped; `Retry-After` says when to try again.",
    504: "The request did not end within `--request-timeout` or its own `x-request-timeout`.",
    529: "The queue is full, or the engine loads, drains or has stopped; `Retry-After` says when to try again.",
}
BODY = (400, 413, 429)
"""Errors of every route with a body: wrong type or JSON, too large, no room for more bodies."""
WORK = (*BODY, 504)
"""Errors of a route that may take a while."""
MEDIA = (403, 409, 415, 422, 501)
POOLED = (
    "/v1/embeddings", "/v2/embed", "/pooling", "/classify",
    "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank",
)  # fmt: skip
STATUSES: dict[tuple[str, str], tuple[int, ...]] = {
    ("post", "/v1/chat/completions"): (*WORK, 404, *MEDIA, 500, 503),
    ("post", "/v1/chat/completions/batch"): (*WORK, 404, *MEDIA, 500, 503),
    ("post", "/v1/completions"): (*WORK, 404, 500, 503),
    ("post", "/v1/responses"): (*WORK, 404, *MEDIA, 500, 503),
    ("post", "/v1/responses/input_tokens"): (*WORK, 404, *MEDIA, 500),
    ("post", "/v1/messages"): (*WORK, 404, *MEDIA, 500, 529),
    ("post", "/v1/messages/count_tokens"): (*WORK, 404, *MEDIA, 500, 529),
    **dict.fromkeys([("post", path) for path in POOLED], (*WORK, 404, *MEDIA, 500, 503)),
    ("post", "/tokenize"): (*WORK, 404, *MEDIA, 500),
    ("post", "/detokenize"): (*WORK, 404, 500),
    ("get", "/v1/models/{model}"): (404,),
    ("post", "/ping"): BODY,
}
"""Errors of each route, besides 403 and 431, which every route has, and 401, which every guarded one has."""
BYTES = ("/v1/embeddings", "/pooling")
PROBES = ("/health", "/ready", "/ping")
STREAMS = {
    "/v1/chat/completions": "events `data: {...}`, then `data: [DONE]`; an error is an event.",
    "/v1/completions": "events `data: {...}`, then `data: [DONE]`; an error is an event.",
    "/v1/responses": "events by name, with sequence numbers; an error is `response.failed`.",
    "/v1/messages": "events by name; an error is `error`.",
}
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
    """The answer of a probe, with status 200 or 503."""

    status: str
    phase: str
    accepting: bool
    ready: bool
    device: str | None = None
    progress: ProbeProgress | None = None


class LiveProbe(Strict):
    """Whether an orchestrator should restart this process."""

    status: str


def make_openapi(app: FastAPI) -> Callable[[], JsonObject]:
    """Returns a replacement for ``app.openapi``, which builds the description at the first call."""
    plain = app.openapi

    def openapi() -> JsonObject:
        if app.openapi_schema is None:
            made = plain()
            for path, methods in made["paths"].items():
                for method, operation in methods.items():
                    operation["responses"] = _make_responses(path, method, operation["responses"])
            schemas = made["components"]["schemas"]
            for name in ("HTTPValidationError", "ValidationError"):
                schemas.pop(name, None)
            for model in (ErrorResponse, MessagesError, Probe, LiveProbe):
                _add(schemas, model)
            add_field_bounds(schemas)
            app.openapi_schema = made
        return app.openapi_schema or {}

    return openapi


def cache_openapi(app: FastAPI) -> None:
    """Replaces FastAPI's route of the description: it is written once, in a thread, which takes half a second."""
    if app.openapi_url is None:
        return
    pages: dict[str, bytes] = {}
    lock = threading.Lock()

    def write(root: str) -> bytes:
        with lock:
            if root not in pages:
                made = app.openapi()
                servers: JsonObject = {"servers": [{"url": root}]} if root else {}
                pages[root] = json.dumps({**made, **servers}, ensure_ascii=False).encode()
        return pages[root]

    async def describe(request: Request) -> Response:
        root = request.scope.get("root_path", "").rstrip("/")
        page = pages.get(root) or await asyncio.to_thread(write, root)
        return Response(page, media_type="application/json")

    app.router.routes = [route for route in app.router.routes if getattr(route, "path", "") != app.openapi_url]
    app.add_route(app.openapi_url, describe, include_in_schema=False)


def _make_responses(path: str, method: str, found: JsonObject) -> JsonObject:
    good = dict(found["200"])
    out = {"200": good}
    if path == "/metrics":
        good["content"] = {"text/plain": {"schema": {"type": "string"}}}
    elif path in STREAMS:
        # Without a type, since some readers apply the schema to the whole text, others to each event.
        described = {"description": f"With `stream`: {STREAMS[path]}"}
        good["content"] = {**good["content"], "text/event-stream": {"schema": described}}
    elif path in BYTES:
        described = {
            "type": "string",
            "format": "binary",
            "description": "With `encoding_format` `bytes` or `bytes_only`.",
        }
        good["content"] = {**good["content"], "application/octet-stream": {"schema": described}}
    elif path in PROBES:
        good["content"] = _make_json_content("Probe")
        out["503"] = {
            "description": "Loading, draining or stopped.",
            "content": _make_json_content("Probe"),
            "headers": AGAIN,
        }
    elif path == "/live":
        good["content"] = _make_json_content("LiveProbe")
        out["503"] = {"description": "The engine fails again and again.", "content": _make_json_content("LiveProbe")}
    envelope = "MessagesError" if is_anthropic_path(path) else "ErrorResponse"
    errors = {403, 431, *STATUSES.get((method, path), ()), *(() if path in OPEN else (401,))}
    for status in sorted(errors):
        out[str(status)] = {"description": ERRORS[status], "content": _make_json_content(envelope)}
        if status in (429, 503, 529):
            out[str(status)]["headers"] = AGAIN
    return out


def _make_json_content(name: str) -> JsonObject:
    return {"application/json": {"schema": {"$ref": REF + name}}}


def _add(schemas: JsonObject, model: type[BaseModel]) -> None:
    made = model.model_json_schema(ref_template=REF + "{model}")
    schemas |= made.pop("$defs", {})
    schemas[model.__name__] = made
