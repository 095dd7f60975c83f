"""Collects the messages of a chat request from another API's items or blocks, with the name of every part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from trencadis.core.errors import BadRequest
from trencadis.core.json_types import Json, JsonMapping, JsonObject
from trencadis.server.protocol.chat_completions import MAX_MESSAGES, ChatRequest
from trencadis.server.routes.field_names import FieldNames, MessageNames

TEXT_SEPARATOR = "\n\n"
"""Separator of two texts that become one message."""


@dataclass(frozen=True, slots=True)
class InnerRequest:
    """A chat request, and the names of its parts in the request that it was converted from."""

    chat: ChatRequest
    names: FieldNames


@dataclass(slots=True)
class CollectedMessage:
    """A message under construction.

    Args:
        parts: content parts with their names.
        is_text: True if the content is one text, which then has no name of its own.
        calls: calls with their names.
        extra_fields: other fields.
    """

    role: str
    where: str
    parts: list[tuple[Json, str]] = field(default_factory=list)
    is_text: bool = True
    thoughts: list[str] = field(default_factory=list)
    calls: list[tuple[JsonObject, str]] = field(default_factory=list)
    extra_fields: JsonObject = field(default_factory=dict)

    def add(self, content: str | Sequence[tuple[Json, str]], gap: str = TEXT_SEPARATOR) -> None:
        """Adds content: a text, or parts with their names. ``gap`` separates two texts."""
        new = [(content, self.where)] if isinstance(content, str) else list(content)
        if not new:
            return
        self.is_text = self.is_text and isinstance(content, str)
        if self.parts and gap and _is_text(self.parts[-1][0]) and _is_text(new[0][0]):
            self.parts.append((gap, self.where))
        self.parts += new

    def build(self) -> tuple[JsonObject, MessageNames]:
        """Returns the message in chat's form, and its names."""
        message: JsonObject = {"role": self.role, **self.extra_fields}
        names = MessageNames(self.where, calls=[name for _, name in self.calls])
        if self.is_text:
            message["content"] = "".join(text for text, _ in self.parts)
        else:
            message["content"] = [{"type": "text", "text": p} if isinstance(p, str) else p for p, _ in self.parts]
            names.content = [name for _, name in self.parts]
        if self.thoughts:
            message["reasoning"] = TEXT_SEPARATOR.join(self.thoughts)
        if self.calls:
            message["tool_calls"] = [call for call, _ in self.calls]
        return message, names


def _is_text(part: Json) -> bool:
    return isinstance(part, str) or (isinstance(part, Mapping) and "text" in part)


class MessageCollector:
    """Collects chat messages that are built from another API's items or blocks."""

    def __init__(self) -> None:
        self.messages: list[CollectedMessage] = []
        self.names_by_call: dict[str, str] = {}

    @property
    def last(self) -> CollectedMessage | None:
        """The last message, or None."""
        return self.messages[-1] if self.messages else None

    def begin(self, role: str, where: str) -> CollectedMessage:
        """Begins a new message and returns it.

        Raises:
            BadRequest: there are too many messages.
        """
        if len(self.messages) >= MAX_MESSAGES:
            raise BadRequest(f"{where}: the conversation has more than {MAX_MESSAGES} messages.", param=where)
        self.messages.append(CollectedMessage(role, where))
        return self.messages[-1]

    def add_call(self, message: CollectedMessage, id: str, name: str, arguments: Json, where: str) -> None:
        """Adds a call to an assistant message."""
        made = {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
        message.calls.append((made, where))
        self.names_by_call[id] = name

    def add_result(self, id: str, where: str) -> CollectedMessage:
        """Begins a new message with the result of the call ``id``."""
        message = self.begin("tool", where)
        message.extra_fields["tool_call_id"] = id
        if id in self.names_by_call:
            message.extra_fields["name"] = self.names_by_call[id]
        return message

    def build_messages(self) -> tuple[list[JsonObject], list[MessageNames]]:
        """Returns the messages in chat's form, and their names."""
        pairs = [message.build() for message in self.messages]
        return [message for message, _ in pairs], [names for _, names in pairs]


def get_text_field(value: JsonMapping, name: str, where: str) -> str:
    """Returns a field of an item that must be a string.

    Raises:
        BadRequest: it is not a string.
    """
    found = value.get(name)
    if not isinstance(found, str):
        raise BadRequest(f"{where}.{name} must be a string.", param=f"{where}.{name}")
    return found


def check_objects(value: Json, where: str) -> list[JsonMapping]:
    """Checks that ``value`` is a list of objects and returns it.

    Raises:
        BadRequest: it is not.
    """
    if not isinstance(value, list):
        raise BadRequest(f"{where} must be a string or a list of objects.", param=where)
    for i, one in enumerate(value):
        if not isinstance(one, Mapping):
            raise BadRequest(f"{where}[{i}] must be an object with a type.", param=f"{where}[{i}]")
    return value


def make_function_tool(tool: JsonMapping, parameters: str) -> JsonObject:
    """Returns a tool in chat's form; only the fields that chat's clients send are kept, since templates print all of
    it.

    Args:
        parameters: the key of its schema.
    """
    keys = {"name": "name", "description": "description", "parameters": parameters}
    function = {key: tool[given] for key, given in keys.items() if tool.get(given) is not None}
    if tool.get("strict"):
        function["strict"] = True
    return {"type": "function", "function": function}
