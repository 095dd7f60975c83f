"""Collects the messages of a chat request from another API's items or blocks, with the name of every part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trencadis.core.errors import BadRequest
from trencadis.server.dialects.names import MessageNames, Names
from trencadis.server.protocol.chat import MAX_MESSAGES, ChatRequest

GAP = "\n\n"
"""Stands between two texts that become one message."""


@dataclass(frozen=True, slots=True)
class InnerRequest:
    """A chat request, and what its parts are called in the request that it was made from."""

    chat: ChatRequest
    names: Names


@dataclass(slots=True)
class TalkMessage:
    """A message that is being put together.

    Args:
        parts: content, and the name of each part.
        plain: whether the content is one text, which then has no name of its own.
        calls: and the name of each.
        more: other fields.
    """

    role: str
    where: str
    parts: list[tuple[Any, str]] = field(default_factory=list)
    plain: bool = True
    thoughts: list[str] = field(default_factory=list)
    calls: list[tuple[dict[str, Any], str]] = field(default_factory=list)
    more: dict[str, Any] = field(default_factory=dict)

    def add(self, content: str | Sequence[tuple[Any, str]], gap: str = GAP) -> None:
        """Adds content: a text, or parts with their names. ``gap`` divides two texts."""
        new = [(content, self.where)] if isinstance(content, str) else list(content)
        if not new:
            return
        self.plain = self.plain and isinstance(content, str)
        if self.parts and gap and _is_text(self.parts[-1][0]) and _is_text(new[0][0]):
            self.parts.append((gap, self.where))
        self.parts += new

    def made(self) -> tuple[dict[str, Any], MessageNames]:
        """The message as chat takes it, and its names."""
        message: dict[str, Any] = {"role": self.role, **self.more}
        names = MessageNames(self.where, calls=[name for _, name in self.calls])
        if self.plain:
            message["content"] = "".join(text for text, _ in self.parts)
        else:
            message["content"] = [{"type": "text", "text": p} if isinstance(p, str) else p for p, _ in self.parts]
            names.content = [name for _, name in self.parts]
        if self.thoughts:
            message["reasoning"] = GAP.join(self.thoughts)
        if self.calls:
            message["tool_calls"] = [call for call, _ in self.calls]
        return message, names


def _is_text(part: Any) -> bool:
    return isinstance(part, str) or (isinstance(part, Mapping) and "text" in part)


class Talk:
    """The messages so far."""

    def __init__(self) -> None:
        self.messages: list[TalkMessage] = []
        self.called: dict[str, str] = {}

    @property
    def last(self) -> TalkMessage | None:
        """The message that was begun last."""
        return self.messages[-1] if self.messages else None

    def begin(self, role: str, where: str) -> TalkMessage:
        """A new message.

        Raises:
            BadRequest: there are too many; a block can be a message of its own.
        """
        if len(self.messages) >= MAX_MESSAGES:
            raise BadRequest(f"{where}: the conversation has more than {MAX_MESSAGES} messages.", param=where)
        self.messages.append(TalkMessage(role, where))
        return self.messages[-1]

    def call(self, message: TalkMessage, id: str, name: str, arguments: Any, where: str) -> None:
        """Adds a call to a message of the assistant."""
        made = {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
        message.calls.append((made, where))
        self.called[id] = name

    def result(self, id: str, where: str) -> TalkMessage:
        """A new message with the result of the call ``id``."""
        message = self.begin("tool", where)
        message.more["tool_call_id"] = id
        if id in self.called:
            message.more["name"] = self.called[id]
        return message

    def made(self) -> tuple[list[dict[str, Any]], list[MessageNames]]:
        """The messages as chat takes them, and their names."""
        pairs = [message.made() for message in self.messages]
        return [message for message, _ in pairs], [names for _, names in pairs]


def text_field(value: Mapping[str, Any], name: str, where: str) -> str:
    """A field of an item that must be a text.

    Raises:
        BadRequest: it is none.
    """
    found = value.get(name)
    if not isinstance(found, str):
        raise BadRequest(f"{where}.{name} must be a string.", param=f"{where}.{name}")
    return found


def objects(value: Any, where: str) -> list[Mapping[str, Any]]:
    """A list of objects.

    Raises:
        BadRequest: it is none.
    """
    if not isinstance(value, list):
        raise BadRequest(f"{where} must be a string or a list of objects.", param=where)
    for i, one in enumerate(value):
        if not isinstance(one, Mapping):
            raise BadRequest(f"{where}[{i}] must be an object with a type.", param=f"{where}[{i}]")
    return value


def function_tool(tool: Mapping[str, Any], parameters: str) -> dict[str, Any]:
    """A tool as chat has it; templates print all of it, so only what chat's clients send is kept.

    Args:
        parameters: the key of its schema.
    """
    keys = {"name": "name", "description": "description", "parameters": parameters}
    function = {key: tool[given] for key, given in keys.items() if tool.get(given) is not None}
    if tool.get("strict"):
        function["strict"] = True
    return {"type": "function", "function": function}
