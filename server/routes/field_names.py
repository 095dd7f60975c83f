"""Names of the parts of a chat request in the request that it was converted from, for error messages."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from trencadis.core.errors import TrencadisError

_MESSAGE = re.compile(r"messages\[(\d+)\](?:\.content\[(\d+)\]|\.tool_calls(?:\[(\d+)\](?:\.function)?)?|\.content\b)?")
_TOOL = re.compile(r"tools\[(\d+)\](?:\.function)?(\.parameters\b)?")
_PATH = re.compile(r"\b(?:messages|tools)\[\d+\](?:\.?\w+|\[\d+\])*")


@dataclass(slots=True)
class MessageNames:
    """Names of the parts of one message.

    Args:
        where: name of the message itself.
        content: names of the content parts; empty if the content is one text.
        calls: names of the calls.
    """

    where: str
    content: list[str] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)


@dataclass(slots=True)
class FieldNames:
    """Names of the parts of a chat request.

    Args:
        fields: names by field of the chat request, or by path of a part of a field.
        messages: names per message.
        tools: index of each tool in the original request.
        parameters: name of the schema of a tool.
        arguments: name of the arguments of a call.
    """

    fields: Mapping[str, str]
    messages: list[MessageNames] = field(default_factory=list)
    tools: list[int] = field(default_factory=list)
    parameters: str = "parameters"
    arguments: str = "arguments"

    def translate_path(self, path: str) -> str:
        """Returns the original name of the part at ``path`` of the chat request."""
        found = _MESSAGE.match(path)
        if found and int(found[1]) < len(self.messages):
            rest = path[found.end() :].replace(".arguments", f".{self.arguments}")
            return self._translate_message_path(self.messages[int(found[1])], found) + rest
        found = _TOOL.match(path)
        if found and int(found[1]) < len(self.tools):
            schema = f".{self.parameters}" if found[2] else ""
            return f"tools[{self.tools[int(found[1])]}]{schema}{path[found.end() :]}"
        for inner, outer in self.fields.items():
            if path == inner or path.startswith((f"{inner}.", f"{inner}[")):
                return outer + path[len(inner) :]
        return path

    def _translate_message_path(self, names: MessageNames, found: re.Match[str]) -> str:
        if found[2] is not None and int(found[2]) < len(names.content):
            return names.content[int(found[2])]
        if found[3] is not None and int(found[3]) < len(names.calls):
            return names.calls[int(found[3])]
        if "tool_calls" in found[0]:
            return names.calls[0] if names.calls else names.where
        return names.where + found[0].partition("]")[2]

    def translate_message(self, text: str) -> str:
        """Replaces paths and names of fields in a message by the original ones; ordinary words are kept."""
        text = _PATH.sub(lambda m: self.translate_path(m[0]), text)
        for inner, outer in self.fields.items():
            if "_" in inner:
                text = re.sub(rf"(?<![\w.]){inner}\b", outer, text)
        return text


@contextmanager
def translate_errors(names: FieldNames) -> Iterator[None]:
    """Context manager: errors raised inside name the fields of the request that the client sent."""
    try:
        yield
    except TrencadisError as error:
        if error.param is not None:
            error.param = names.translate_path(error.param)
        error.message = names.translate_message(error.message)
        error.args = (error.message,)
        raise
