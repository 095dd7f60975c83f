"""Loaded by schemathesis (SCHEMATHESIS_HOOKS): bodies that reach beyond the first check, and a count of the answers.

Of some forty fields that a body may have, random ones nearly always contradict each other. So a body keeps a few of
them, and names a model that is served; one in eight stays as it was drawn.
"""

from __future__ import annotations

import random
from typing import Any

import schemathesis

KEPT = {"messages", "prompt", "input", "tokens", "query", "documents", "queries", "text_1", "text_2", "max_tokens"}
"""Fields that some route needs."""


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    """The body with at most four fields beside those that a route needs."""
    if not isinstance(body, dict):
        return body
    chance = random.Random(repr(sorted(map(repr, body)))[:2000])
    if chance.random() < 0.125:
        return body
    others = sorted(k for k in body if k not in KEPT)
    kept = set(chance.sample(others, min(len(others), chance.randrange(5))))
    made = {k: v for k, v in body.items() if k in KEPT or k in kept}
    if isinstance(made.get("model"), str):
        made["model"] = "scripted"
    if getattr(context.operation, "path", "") == "/tokenize":
        made = {k: v for k, v in made.items() if k not in ("prompt", "messages") or v is not None}
        if {"prompt", "messages"} <= set(made):
            del made[chance.choice(["prompt", "messages"])]
        elif not {"prompt", "messages"} & set(made):
            made["prompt"] = "x"
    for name in ("prompt", "tokens", "input", "stop_token_ids"):
        if name in made:
            made[name] = known(made[name])
    return made


def known(value: Any) -> Any:
    """Ids brought into the vocabulary."""
    if isinstance(value, list):
        return [known(one) for one in value]
    return value % 1000 if isinstance(value, int) and not isinstance(value, bool) else value
