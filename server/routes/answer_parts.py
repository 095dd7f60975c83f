"""The parts of an answer in OpenAI's form: a message, or the delta of a chunk."""

from __future__ import annotations

from collections.abc import Sequence

from trencadis.server.prompts.answer import AnswerPart, CallPart
from trencadis.server.protocol.chat import (
    CalledFunction,
    DeltaFunction,
    DeltaMessage,
    DeltaToolCall,
    Message,
    MessageToolCall,
)


def message_of(role: str, text: str, parts: Sequence[AnswerPart]) -> Message:
    """The message of a whole answer; ``text`` is its content if no parser has read it into ``parts``."""
    if not parts:
        return Message(role=role, content=text)
    whole = AnswerPart()
    for part in parts:
        whole.add(part)
    thoughts = whole.reasoning or None
    calls = [MessageToolCall(id=c.id, function=CalledFunction(name=c.name, arguments=c.arguments)) for c in whole.calls]
    content = whole.content or (None if calls or thoughts else "")
    return Message(role=role, content=content, tool_calls=calls, reasoning=thoughts, reasoning_content=thoughts)


def delta_of(part: AnswerPart) -> DeltaMessage:
    """What a chunk adds; only what there is is set."""
    delta = DeltaMessage()
    if part.reasoning:
        delta.reasoning = delta.reasoning_content = part.reasoning
    if part.content:
        delta.content = part.content
    if part.calls:
        delta.tool_calls = [_call(call) for call in part.calls]
    return delta


def _call(call: CallPart) -> DeltaToolCall:
    if not call.id:
        return DeltaToolCall(index=call.index, function=DeltaFunction(arguments=call.arguments))
    function = DeltaFunction(name=call.name, arguments=call.arguments)
    return DeltaToolCall(index=call.index, id=call.id, type="function", function=function)
