"""Converts the messages of a chat request for the template, and collects their media with JSON paths."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from trencadis.core.errors import BadRequest, attach_param
from trencadis.core.json_types import Json, JsonMapping, JsonObject
from trencadis.multimodal.media_options import MediaPart
from trencadis.server.prompts.content_parts import read_part
from trencadis.server.protocol.body_scan import BodyLimits, BodyScan, scan_text
from trencadis.server.protocol.json_values import check_json
from trencadis.server.text.chat_template import ROLES

ARGUMENTS = BodyLimits(values=1 << 16, containers=1 << 14, outline=4 << 20, text=4 << 20)
"""Limits of the arguments of all tool calls of a conversation, which are JSON inside JSON."""


LONGEST_ROLE = 64
"""Most characters of a role."""

PAIR_ROLES = ("query", "document")
"""Roles of the two sides of a pair, on a pooling server."""


@dataclass(frozen=True, slots=True)
class MessageRules:
    """The limits of messages and the template's expectations.

    Args:
        scrub: removes this process's nonce from a value of the user.
        roles: what the template calls each role that is known here; a user's own stays as it is.
        placeholders: marked text of each kind (``image``, ``video``), for templates that take content as a string.
        as_string: known roles whose content the template takes as a string; a user's own is taken as ``user`` is.
        most: most media of each kind in one prompt.
        text_arguments: the template takes arguments of calls as JSON text, not as objects.
    """

    scrub: Callable[[Json], Json]
    roles: Mapping[str, str]
    placeholders: Mapping[str, str] = field(default_factory=dict)
    as_string: Collection[str] = ()
    most: Mapping[str, int] = field(default_factory=dict)
    text_arguments: bool = False


@dataclass(slots=True)
class Conversation:
    """The messages that a template renders, with their media.

    Args:
        messages: texts are scrubbed; media are ``{"type": "image"}`` or ``video`` parts, or placeholders in the text.
        media: in prompt order.
        arguments: counts the values and characters in the arguments of all calls.
    """

    messages: list[JsonObject] = field(default_factory=list)
    media: list[MediaPart] = field(default_factory=list)
    arguments: BodyScan = field(default_factory=lambda: BodyScan(ARGUMENTS))


def parse_messages(messages: Sequence[Json], rules: MessageRules) -> Conversation:
    """Checks messages and collects their media.

    Raises:
        BadRequest: ``param`` is the JSON path of the fault.
    """
    out = Conversation()
    for i, message in enumerate(messages):
        out.messages.append(_convert_message(message, f"messages[{i}]", rules, out))
    if out.media:
        _check_media_counts(out.media, rules.most)
    return out


def _convert_message(message: Json, path: str, rules: MessageRules, conversation: Conversation) -> JsonObject:
    """Converts a message for the template; its media and arguments are counted in ``conversation``."""
    if not isinstance(message, Mapping):
        raise BadRequest(f"{path} must be an object with role and content.", param=path)
    check_json(message, path)
    role = _read_role(message.get("role"), f"{path}.role")
    made = {k: rules.scrub(v) for k, v in message.items() if k not in ("content", "role") and v is not None}
    made["role"] = rules.roles[role] if role in rules.roles else rules.scrub(role)
    as_string = (role if role in rules.roles else "user") in rules.as_string
    made["content"] = _convert_content(message.get("content"), path, conversation.media, rules, as_string)
    if len(made) > 2:
        _add_calls(made, path, rules, conversation)
    return made


def _read_role(role: Json, where: str) -> str:
    """The role of a message, also one of the user's own: the template decides what it makes of it.

    Raises:
        BadRequest: it is no short text, or not of one line: templates end what they say of a message with one.
    """
    if not isinstance(role, str) or not 0 < len(role) <= LONGEST_ROLE or not role.isprintable():
        shown = role[:40] if isinstance(role, str) else role if role is None else type(role).__name__
        raise BadRequest(
            f"{where} is {shown!r}; give a line of at most {LONGEST_ROLE} characters, such as {', '.join(ROLES)}.",
            param=where,
        )
    return role


def _add_calls(made: JsonObject, path: str, rules: MessageRules, conversation: Conversation) -> None:
    """Adds a message's calls and reasoning in the form that templates read."""
    calls = made.pop("tool_calls", None)
    if calls:
        made["tool_calls"] = rules.scrub(_convert_tool_calls(calls, path, conversation.arguments, rules.text_arguments))
    thoughts = made.get("reasoning_content", made.get("reasoning"))
    if isinstance(thoughts, str):
        # Answers of this server have both names, and templates read either.
        made["reasoning_content"] = made["reasoning"] = thoughts


def _check_media_counts(media: Sequence[MediaPart], most: Mapping[str, int]) -> None:
    for kind in ("image", "video"):
        allowed = most.get(kind, 0)
        if sum(part.kind == kind for part in media) > allowed:
            raise BadRequest(f"At most {allowed} {kind}(s) may be provided in one prompt.", param=kind)


def _convert_content(
    content: Json, path: str, media: list[MediaPart], rules: MessageRules, as_string: bool
) -> str | list[JsonObject]:
    if content is None:
        return ""
    if isinstance(content, str):
        return str(rules.scrub(content))
    if not isinstance(content, list | tuple):
        raise BadRequest(f"{path}.content must be a string or a list of parts.", param=f"{path}.content")
    parts = [_convert_part(part, f"{path}.content[{j}]", media, rules) for j, part in enumerate(content)]
    return _join_as_text(parts, rules) if as_string else parts


def _join_as_text(parts: Sequence[JsonMapping], rules: MessageRules) -> str:
    """Joins content for a template that takes it as a string: placeholders, then texts."""
    shown = [rules.placeholders.get(p["type"], "") for p in parts if p["type"] != "text"]
    return "\n".join(shown + [p["text"] for p in parts if p["type"] == "text"])


def _convert_part(part: Json, where: str, media: list[MediaPart], rules: MessageRules) -> JsonObject:
    found = read_part(part, where)
    if isinstance(found, str):
        return {"type": "text", "text": rules.scrub(found)}
    return _convert_media_part(found, media, rules)


def _convert_media_part(part: MediaPart, media: list[MediaPart], rules: MessageRules) -> JsonObject:
    """Adds an image or a video to ``media`` and returns its part for the template."""
    media.append(part)
    if len(media) > sum(rules.most.values()):
        # Raises now: reading tens of thousands more would only cost time.
        _check_media_counts(media, rules.most)
    return {"type": part.kind}


def _convert_tool_calls(calls: Json, path: str, scan: BodyScan, as_text: bool) -> list[Json]:
    """Converts calls to transformers' form: clients send arguments as JSON text, templates expect an object.

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
