"""The parts of an answer in OpenAI's form: a message, or the delta of a chunk."""

from __future__ import annotations

from collections.abc import Sequence

from trencadis.server.prompts.answer_reader import AnswerPart, CallPart
from trencadis.server.protocol.chat_completions import (
    CalledFunction,
    DeltaFunction,
    DeltaMessage,
    DeltaToolCall,
    Message,
    MessageToolCall,
)


def make_message(role: str, text: str, parts: Sequence[AnswerPart]) -> Message:
    """Makes the message of a whole answer; ``text`` is its content if no parser has read it into ``parts``."""
    return _read_message(role, parts) if parts else Message(role=role, content=text)


def _read_message(role: str, parts: Sequence[AnswerPart]) -> Message:
    thoughts = "".join(part.reasoning for part in parts) or None
    calls = _make_calls(parts)
    content = "".join(part.content for part in parts) or (None if calls or thoughts else "")
    return Message(role=role, content=content, tool_calls=calls, reasoning=thoughts, reasoning_content=thoughts)


def _make_calls(parts: Sequence[AnswerPart]) -> list[MessageToolCall]:
    found: dict[int, tuple[CallPart, list[str]]] = {}
    for part in parts:
        for call in part.calls:
            found.setdefault(call.index, (call, []))[1].append(call.arguments)
    return [
        MessageToolCall(id=first.id, function=CalledFunction(name=first.name, arguments="".join(arguments)))
        for first, arguments in found.values()
    ]


def make_delta(part: AnswerPart) -> DeltaMessage:
    """Makes the delta that a chunk adds; only fields with a value are set."""
    delta = DeltaMessage()
    if thoughts := part.reasoning:
        delta.reasoning = delta.reasoning_content = thoughts
    if content := part.content:
        delta.content = content
    if calls := part.calls:
        delta.tool_calls = [_make_call_delta(call) for call in calls]
    return delta


def _make_call_delta(call: CallPart) -> DeltaToolCall:
    if not call.id:
        return DeltaToolCall(index=call.index, function=DeltaFunction(arguments=call.arguments))
    function = DeltaFunction(name=call.name, arguments=call.arguments)
    return DeltaToolCall(index=call.index, id=call.id, type="function", function=function)
