"""Limits the number of items in the fields of a request, on the parsed body, before validation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trencadis.core.errors import BadRequest
from trencadis.core.request import MAX_BIAS, MAX_SCORED
from trencadis.server.prompts.sampling_params import RequestLimits
from trencadis.server.protocol.chat_completions import MAX_MESSAGES

MAX_FIELDS = 256
COUNTS = {
    "messages": MAX_MESSAGES,
    "input": MAX_MESSAGES,
    "system": 1024,
    "include": 64,
    "metadata": 64,
    "stop_sequences": 1024,
    "tools": 1024,
    "documents": 4096,
    "stop_token_ids": 1024,
    "logprob_token_ids": MAX_SCORED,
    "logit_bias": MAX_BIAS,
    "chat_template_kwargs": 256,
    "mm_processor_kwargs": 64,
    "modalities": 16,
    "response_format": 64,
    "stream_options": 64,
}
"""Most items by field. ``BodyLimits`` counts the values inside items."""
LISTED = frozenset({"prompt", "input", "text_1", "text_2", "queries", "items", "data_1", "data_2"})
"""Fields of one prompt or several."""
MAX_TEMPLATE = 1 << 17
"""Most characters of a chat template in a request."""


def check_counts(body: Any) -> None:
    """Checks that no field of a body has too many items.

    Raises:
        BadRequest: a field has too many; the message names it.
    """
    if not isinstance(body, dict):
        return
    if len(body) > MAX_FIELDS:
        raise BadRequest(f"The request has {len(body)} fields; at most {MAX_FIELDS} are allowed.")
    for name, most in COUNTS.items():
        value = body.get(name)
        if isinstance(value, list | dict) and len(value) > most:
            raise BadRequest(f"{name} holds {len(value)} items; at most {most} are allowed.", param=name)
    if not LISTED.isdisjoint(body):
        _check_prompts(body)
    template = body.get("chat_template")
    if isinstance(template, str) and len(template) > MAX_TEMPLATE:
        raise BadRequest(f"chat_template has at most {MAX_TEMPLATE} characters.", param="chat_template")


def _check_prompts(body: Mapping[str, Any]) -> None:
    """Checks fields that take a prompt or a list of them."""
    for name in LISTED.intersection(body):
        given, most = body[name], RequestLimits.max_prompts
        if isinstance(given, list) and len(given) > most and not isinstance(given[0], int):
            raise BadRequest(f"At most {most} {name}s are allowed, got {len(given)}.".replace("ss ", "s "), param=name)
