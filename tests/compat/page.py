"""Asks an application what it does with each field, and writes docs/api.md from the answers."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from tests.compat import fields, more_fields
from tests.compat.fields import TALK, Case, Cases
from tests.fakes.scripted_app import ScriptedApp
from tests.traffic.scripted_server import fresh_app
from trencadis.core.checkpoint.pooling_description import CLASSIFY, Pooling
from trencadis.core.request import Delta, Request
from trencadis.server.text.chat_template import ChatTemplate

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
ANSWER = f"<think>\nI look.\n</think>\n\nAn answer.\n{CALL}\n{CALL}"
TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools> by <tool_call>{name, arguments}</tool_call>{% endif %}"
    "{% if style %}{{ style }}{% endif %}{% if reasoning_effort %}E={{ reasoning_effort }}{% endif %}"
    "{% for d in documents or [] %}{{ d.text }}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{% if p.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}{# <think></think> #}"
)
VARYING = re.compile(
    r'"(?:created|created_at|completed_at)":[\d.]+|"(?:id|item_id|response_id|call_id)":"(?![^"]*mine)[^"]*"'
)
"""What differs between two equal requests."""
OWN = ("id", "arrival")
"""Fields of an engine's request that differ in any case."""
WORKS, IGNORED, SILENT = "works", "ignored", "SILENT"
JSON = {"content-type": "application/json"}


class Route(NamedTuple):
    """A route, a body that it takes, and the fields that are tried beside it."""

    path: str
    base: Mapping[str, Any]
    cases: Cases
    kind: str = "generate"
    """Of the server; others answer 404."""


ROUTES = (
    Route("/v1/chat/completions", {"messages": TALK}, fields.CHAT),
    Route("/v1/completions", {"prompt": "One two three four"}, fields.COMPLETIONS),
    Route("/v1/responses", {"input": "One two three four"}, more_fields.RESPONSES),
    Route("/v1/messages", {"messages": TALK, "max_tokens": 100}, more_fields.MESSAGES),
    Route("/v1/messages/count_tokens", {"messages": TALK}, more_fields.COUNTED),
    Route("/tokenize", {"messages": TALK}, fields.TOKENIZE),
    Route("/detokenize", {"tokens": [65]}, fields.DETOKENIZE),
    Route("/v1/embeddings", {"input": "One two three four"}, more_fields.VECTORS, "embed"),
    Route("/v2/embed", {"texts": ["One two three four"]}, more_fields.COHERE, "embed"),
    Route("/pooling", {"input": "One two three four"}, more_fields.POOLING, "embed"),
    Route("/classify", {"input": "One two three four"}, more_fields.CLASSIFY, "classify"),
    Route("/score", {"queries": "One two three four", "documents": "Five six seven"}, more_fields.SCORE, "embed"),
    Route(
        "/rerank",
        {"query": "One two three four", "documents": ["Five six seven", "Eight nine"]},
        more_fields.RERANK,
        "embed",
    ),
)


@dataclass
class Asker:
    """Applications over a scripted engine, one for each set of flags."""

    rig: ScriptedApp = field(default_factory=lambda: prepared(fresh_app()))
    made: dict[str, Any] = field(default_factory=dict)
    before: dict[str, Any] = field(default_factory=dict)

    def ask(self, path: str, body: Any, flags: Mapping[str, Any], method: str = "POST") -> tuple[Any, Any]:
        """The response, and all that the request leads to."""
        key = repr(flags)
        if key not in self.made:
            self.made[key] = self.rig.app(**flags)
        self.rig.made = self.made[key]
        self.rig.engine.submitted.clear()
        self.rig.images.parts.clear()
        content = None if body is None else json.dumps(body).encode()
        response = self.rig.call(path, method=method, content=content, headers=JSON if method == "POST" else {})
        text = VARYING.sub("", response.text)
        requests = [{k: v for k, v in vars_of(r).items() if k not in OWN} for r, _ in self.rig.engine.submitted]
        media = [self.rig.images.scope, *self.rig.images.parts] if self.rig.images.parts else []
        return response, (response.status_code, text, repr(requests), repr(media))

    def verdict(self, route: Route, name: str, case: Case) -> str:
        """What becomes of a field: ``works``, ``ignored``, a status with its message, or a word that says why nothing
        changes. ``SILENT`` where none of these holds: the field is taken and does nothing, and nobody says so."""
        beside = {k: v for k, v in {**route.base, **case.beside}.items() if v is not None}
        key = repr((route.path, beside, case.flags))
        if key not in self.before:
            self.before[key] = self.ask(route.path, beside, case.flags)[1]
        response, after = self.ask(route.path, {**beside, name: case.value}, case.flags)
        if response.status_code >= 400:
            return f"{response.status_code}: {message(response)}"
        named = response.headers.get("x-ignored-fields", "").split(",")
        if any(n.partition(".")[0] == name for n in named):
            return IGNORED
        if after != self.before[key]:
            return WORKS
        return case.same or SILENT


def vars_of(request: Request) -> dict[str, Any]:
    """The fields of a request."""
    return {f.name: getattr(request, f.name) for f in dataclasses.fields(request)}


def prepared(harness: ScriptedApp) -> ScriptedApp:
    """A model that thinks, in a template that reads what templates may read."""
    harness.service.template = ChatTemplate(TEMPLATE, harness.tokenizer)
    harness.engine.answer = harness.tokenizer.encode(ANSWER)
    encode = harness.tokenizer.encode
    object.__setattr__(harness.tokenizer, "encode", lambda text, allow_special=True, add_special_tokens=False: (
        [7] * add_special_tokens + encode(text, allow_special)
    ))  # fmt: skip
    return harness


def askers() -> dict[str, Asker]:
    """One for each kind of server that there is."""
    found = {"generate": Asker()}
    heads = {
        "embed": Pooling(dimensions=(8, 16)),
        "classify": Pooling(CLASSIFY, classes=3, labels=("red", "green", "blue")),
    }
    for kind, head in heads.items():
        harness = prepared(fresh_app())
        vars(harness.service)["config"] = dataclasses.replace(harness.service.config, pooling=head)
        harness.service.min_output_tokens = 0
        vars(harness.engine)["_deltas"] = partial(pooled, head.classes or 16)
        found[kind] = Asker(harness)
    return found


async def pooled(width: int, request: Request) -> AsyncIterator[Delta]:
    """What a scripted engine pools of a prompt."""
    count = len(request.tokens) if request.pool == "all" else 1
    values = np.random.default_rng(sum(request.tokens)).standard_normal((count, width)).astype("<f4")
    pool: dict[str, Any] = {"pooled": values.tobytes()}
    yield Delta(request.id, finish="stop", **pool)


def message(response: Any) -> str:
    """The words of an error."""
    error = response.json().get("error", {})
    return str(error.get("message", error))


def page(found: Mapping[str, Asker] | None = None) -> str:
    """The text of docs/api.md."""
    found = found or askers()
    asker = found["generate"]
    lines = HEAD.split("\n")
    for method, path, what in more_fields.PLAIN:
        response = asker.ask(path, {} if method == "POST" else None, {}, method)[0]
        lines.append(f"| `{method} {path}` | {response.status_code} | {what} |")
    for route in ROUTES:
        response = asker.ask(route.path, dict(route.base), {})[0]
        lines += ["", f"## POST {route.path}", ""]
        if response.status_code == 400 and "this server's task is" in message(response):
            lines += [f"Answers 400 on a server of a model that generates: {escaped(message(response))}", ""]
            if route.kind not in found or route.kind == "generate":
                lines.pop()
                continue
        lines += ["| field | value | answer |", "|---|---|---|"]
        for name, cases in route.cases.items():
            lines += [row(found[route.kind], route, name, case) for case in cases]
    return "\n".join(lines) + "\n"


def row(asker: Asker, route: Route, name: str, case: Case) -> str:
    """A line of a table."""
    flags = "".join(f", `--{f.replace('_', '-')}`" for f in case.flags)
    flags = flags.replace("`--priorities`", "`--scheduling-policy priority`")
    shown = f"`{case.shown}`" if case.shown.startswith("{") else case.shown
    shown = shown or f"`{json.dumps(case.value, ensure_ascii=False)}`"
    return f"| `{name}` | {escaped(shown)}{flags} | {escaped(asker.verdict(route, name, case))} |"


def escaped(text: str) -> str:
    """``text`` as a cell of a table; what stands in backticks stays as it is."""
    parts = re.sub(r"\s+", " ", text).replace("|", "\\|").split("`")
    return "`".join(p if i % 2 else re.sub(r"([<>*_\[\]{}])", r"\\\1", p) for i, p in enumerate(parts))


HEAD = """# What the API takes

Routes and fields of OpenAI's, Anthropic's and vLLM's requests, and what this server does with each. The page is written
by `tools/gen_api.py`, which asks an application about every value and looks at what changes; a test holds it against
the code.

* **works**: the prompt, the engine's request or the answer differs from those without the field.
* **ignored**: served, and the header `x-ignored-fields` names the field; `--strict-request-fields` makes it a 400, but
  for those that concern no answer (`user`, `metadata` and the like).
* A number is the status of an error, with its message.
* Other words say why nothing changes.

The model that was asked thinks in `<think>` tags and calls tools as Hermes does.

## Routes

404 stands where there is no such path, or where the path needs a flag or a server of another kind.

| route | status | |
|---|---|---|"""
