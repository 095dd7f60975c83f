"""Adds bounds and forms of messages and tools to ``/openapi.json``.

The types of a request do not have them: checks that name the JSON path of an error enforce them, so pydantic does not
know them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from trencadis.core.request import MAX_BIAS
from trencadis.core.shared_constants import EFFORTS
from trencadis.server.prompts.content_parts import TEXT_PARTS
from trencadis.server.prompts.sampling_params import MAX_STOPS
from trencadis.server.protocol.base_request import GenerateRequest, MediaRequest
from trencadis.server.routes.body_counts import COUNTS, MAX_TEMPLATE
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
SHARED: dict[str, dict[str, Any]] = {
    "ContentPart": PART, "ConversationMessage": MESSAGE, "FunctionTool": TOOL,
}  # fmt: skip
MESSAGES = "#/components/schemas/ConversationMessage"
BOUNDS: dict[str, dict[str, Any]] = {
    "messages": {"minItems": 1, "maxItems": COUNTS["messages"], "items": {"$ref": MESSAGES}},
    "tools": {"minItems": 1, "maxItems": COUNTS["tools"], "items": {"$ref": "#/components/schemas/FunctionTool"}},
    "prompt": {"minItems": 1, "minLength": 1},
    "documents": {"maxItems": COUNTS["documents"]},
    "modalities": {"maxItems": COUNTS["modalities"], "items": {"type": "string", "enum": ["text"]}},
    "reasoning_effort": {"enum": list(EFFORTS)},
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


def add_field_bounds(schemas: dict[str, Any]) -> None:
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
