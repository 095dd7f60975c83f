"""Turns the messages of a chat request into what a template renders, and collects their media with JSON paths."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trencadis.core.errors import BadRequest
from trencadis.multimodal.errors import attach_param
from trencadis.multimodal.options import MediaPart
from trencadis.server.prompts.parts import read_part
from trencadis.server.protocol.body_scan import BodyLimits, BodyScan, scan_text
from trencadis.server.protocol.json_values import check_json
from trencadis.server.text.template import ROLES

ARGUMENTS = BodyLimits(values=1 << 16, containers=1 << 14, outline=4 << 20, text=4 << 20)
"""Limits of the arguments of all tool calls of a conversation, which are JSON inside JSON."""


PAIR_ROLES = ("query", "document")
"""Roles of the two sides of a pair, on a pooling server."""


@dataclass(slots=True)
class Conversation:
    """What a template renders.

    Args:
        messages: texts are scrubbed; media are ``{"type": "image"}`` or ``video`` parts, or placeholders in the text.
        media: in prompt order.
    """

    messages: list[dict[str, Any]] = field(default_factory=list)
    media: list[MediaPart] = field(default_factory=list)


def parse(
    messages: Sequence[Any],
    *,
    scrub: Callable[[Any], Any],
    placeholders: Mapping[str, str] | None = None,
    as_string: Collection[str] = (),
    most: Mapping[str, int] | None = None,
    developer: bool = False,
    pairs: bool = False,
    text_arguments: bool = False,
) -> Conversation:
    """Checks messages and collects their media.

    Args:
        scrub: removes this process's nonce from a value of the user.
        placeholders: marked text of each kind (``image``, ``video``), for templates that take content as a string.
        as_string: roles whose content the template takes as a string.
        most: most media of each kind in one prompt.
        text_arguments: whether the template takes arguments of calls as JSON text, not as objects.
        developer: whether the template knows that role; otherwise it becomes ``system``.
        pairs: whether ``PAIR_ROLES`` are roles too.

    Raises:
        BadRequest: ``param`` is the JSON path of the fault.
    """
    out, arguments = Conversation(), BodyScan(ARGUMENTS)
    for i, message in enumerate(messages):
        path = f"messages[{i}]"
        if not isinstance(message, Mapping):
            raise BadRequest(f"{path} must be an object with role and content.", param=path)
        check_json(message, path)
        role = message.get("role")
        if role not in ROLES and not (pairs and role in PAIR_ROLES):
            raise BadRequest(
                f"{path}.role is {str(role)[:40]!r}; one of {', '.join(ROLES)} is needed.", param=f"{path}.role"
            )
        made = {k: scrub(v) for k, v in message.items() if k not in ("content", "role") and v is not None}
        made["role"] = "system" if role == "developer" and not developer else role
        places = (placeholders or {}) if role in as_string else None
        made["content"] = _content(message.get("content"), path, out.media, scrub, places, most or {})
        calls = made.pop("tool_calls", None)
        if calls:
            made["tool_calls"] = scrub(_tool_calls(calls, path, arguments, text_arguments))
        thoughts = made.get("reasoning_content", made.get("reasoning"))
        if isinstance(thoughts, str):
            # Answers of this server have both names, and templates read either.
            made["reasoning_content"] = made["reasoning"] = thoughts
        out.messages.append(made)
    _counted(out.media, most or {})
    return out


def _counted(media: Sequence[MediaPart], most: Mapping[str, int]) -> None:
    for kind in ("image", "video"):
        allowed = most.get(kind, 0)
        if sum(part.kind == kind for part in media) > allowed:
            raise BadRequest(f"At most {allowed} {kind}(s) may be provided in one prompt.", param=kind)


def _content(
    content: Any,
    path: str,
    media: list[MediaPart],
    scrub: Callable[[Any], Any],
    placeholders: Mapping[str, str] | None,
    most: Mapping[str, int],
) -> str | list[dict[str, Any]]:
    if content is None:
        return ""
    if isinstance(content, str):
        return str(scrub(content))
    if not isinstance(content, list | tuple):
        raise BadRequest(f"{path}.content must be a string or a list of parts.", param=f"{path}.content")
    parts = []
    for j, part in enumerate(content):
        where = f"{path}.content[{j}]"
        found = read_part(part, where)
        if isinstance(found, str):
            parts.append({"type": "text", "text": scrub(found)})
        else:
            media.append(found)
            if len(media) > sum(most.values()):
                # Raises now: reading tens of thousands more would only cost time.
                _counted(media, most)
            parts.append({"type": found.kind})
    if placeholders is None:
        return parts
    shown = [placeholders.get(p["type"], "") for p in parts if p["type"] != "text"]
    return "\n".join(shown + [p["text"] for p in parts if p["type"] == "text"])


def _tool_calls(calls: Any, path: str, scan: BodyScan, as_text: bool) -> list[Any]:
    """Calls as transformers' users write them: clients send arguments as JSON text, templates expect an object.

    A call without arguments has an empty object, which templates can print.
    """
    where = f"{path}.tool_calls"
    if not isinstance(calls, list) or not all(isinstance(c, dict) for c in calls):
        raise BadRequest(f"{where} must be a list of objects.", param=where)
    for i, call in enumerate(calls):
        function = call.get("function")
        if isinstance(function, dict) and function.get("arguments") is None:
            function["arguments"] = {}
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            name = f"{where}[{i}].function.arguments"
            with attach_param(name):
                scan_text(scan, function["arguments"])
            try:
                function["arguments"] = json.loads(function["arguments"] or "{}")
            except (ValueError, RecursionError):
                raise BadRequest(f"{name} is not valid JSON.", param=where) from None
            check_json(function["arguments"], name)
        if as_text and isinstance(function, dict):
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    return calls
