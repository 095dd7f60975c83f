"""Parsers of harmony, the form in which gpt-oss answers: messages, each with a channel and sometimes a recipient.

``<|channel|>analysis<|message|>...<|end|>`` is reasoning, the channel ``final`` is the answer, and
``<|channel|>commentary to=functions.name <|constrain|>json<|message|>{...}<|call|>`` is a call. The first message has
no ``<|start|>assistant``, which the prompt ends with.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from trencadis.server.grammars.lark_grammar_and_tool_functions import GrammarWriter, ToolFunction, quoted
from trencadis.server.text.checkpoint_tokenizer import Tokenizer
from trencadis.server.text.incremental_parser import Wait
from trencadis.server.tools.reasoning_parser import (
    TAIL,
    AnswerContent,
    ReasoningContent,
    ReasoningFormat,
    ReasoningParser,
)
from trencadis.server.tools.tool_parser import ToolParser

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, RETURN, CALL = "<|end|>", "<|return|>", "<|call|>"
MARKS = (START, CHANNEL, MESSAGE, CONSTRAIN, END, RETURN, CALL)
FUNCTION = "functions."
"""Prefix of the recipients that are functions of a request."""

CALL_MARK = f"{CHANNEL}commentary to={FUNCTION}"
ROLE = f"{START}assistant"
ANALYSIS, FINAL = "analysis", "final"
_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")


@dataclass(frozen=True, slots=True)
class MessageHeader:
    """What precedes the text of a message."""

    channel: str = FINAL
    recipient: str = ""

    @property
    def is_call(self) -> bool:
        """True if the message calls a function of the request."""
        return self.recipient.startswith(FUNCTION)


class HarmonyReasoningParser(ReasoningParser):
    """Splits messages by channel. Calls become content that ``HarmonyToolParser`` reads, in one form."""

    def parse(self) -> Wait[None]:
        """Reads messages; text that begins with no header is an answer."""
        head = yield from self.match_literal(CHANNEL, START, " to=")
        message = (yield from self._read_header()) if head else MessageHeader()
        while message is not None:
            message = yield from self._read_message(message)

    def _read_header(self) -> Wait[MessageHeader | None]:
        """Reads a header; None if the text ends before its end."""
        header = ""
        while True:
            text, mark = yield from self.read_until(MESSAGE)
            header += text
            if mark:
                self.at += len(mark)
                channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
                return MessageHeader(channel[1] if channel else FINAL, recipient[1] if recipient else "")
            if self.ended and self.at == len(self.text):
                return None

    def _read_message(self, header: MessageHeader) -> Wait[MessageHeader | None]:
        """Reads the text of a message, and the header of the next one, if there is one."""
        self.inside = header.channel == ANALYSIS and not header.is_call
        kind = ReasoningContent if self.inside else AnswerContent
        if header.is_call:
            name = header.recipient.removeprefix(FUNCTION)
            self.events.append(AnswerContent(f"{CALL_MARK}{name}{MESSAGE}"))
        while True:
            text, mark = yield from self.read_until(END, RETURN, CALL, START, CHANNEL)
            if text:
                self.events.append(kind(text))
            ended = self.ended and self.at == len(self.text)
            if not mark and not ended:
                continue
            self.inside = self.inside and ended
            if header.is_call:
                self.events.append(AnswerContent(CALL))
            if mark in (END, RETURN, CALL):
                self.at += len(mark)
            return (yield from self._read_header()) if mark else None


class HarmonyFormat(ReasoningFormat):
    """The channels of harmony; ``start`` and ``end`` enclose the reasoning of an answer whose form is restricted."""

    @property
    def marks(self) -> tuple[str, ...]:
        """The texts that the parser must see."""
        return MARKS

    def find_state(self, tokenizer: Tokenizer, prompt: Sequence[int], continued: bool = False) -> tuple[bool, bool]:
        """Returns the state as other formats do, but a prompt that ends with the assistant's role closes no reasoning,
        though that role also ends ``end``.
        """
        if not continued and tokenizer.decode(prompt[-TAIL:], False).rstrip().endswith(ROLE):
            return False, False
        return ReasoningFormat.find_state(self, tokenizer, prompt, continued)

    def make_parser(self, tokenizer: Tokenizer, prompt: Sequence[int], continued: bool = False) -> ReasoningParser:
        """Makes the parser of an answer to ``prompt``."""
        return HarmonyReasoningParser(self.start, self.end, *self.find_state(tokenizer, prompt, continued))


class HarmonyToolParser(ToolParser):
    """Reads messages whose recipient is a function; their text is JSON."""

    tags = MARKS
    stop_marks = (CALL,)
    mark = CALL_MARK
    call_separator = quoted(f"{END}{ROLE}")

    @classmethod
    def call_rule(cls, writer: GrammarWriter, function: ToolFunction) -> str:
        """Writes the rest of the header and the arguments; the token after them ends the answer."""
        head = writer.write_text(f"{function.name} {CONSTRAIN}json{MESSAGE}")
        return writer.add_rule(f"{head} {writer.add_json(function.schema)}")

    def parse(self) -> Wait[None]:
        """Reads content, with calls between marks."""
        while True:
            mark = yield from self.read_content_until(CALL_MARK)
            if not mark:
                return
            yield from self.try_calls(self._read_call, mark)

    def _read_call(self) -> Wait[bool]:
        name = yield from self.read_word()
        _, mark = yield from self.read_until(MESSAGE)
        if not mark or not self.is_accepted_name(name):
            return False
        self.at += len(mark)
        self.start_call(name)
        yield from self.read_run()
        yield from self.read_value(self.add_arguments)
        yield from self.read_run()
        yield from self.take_literal(CALL, END)
        yield from self.take_literal(ROLE)
        return True


HARMONY = HarmonyFormat(f"{CHANNEL}{ANALYSIS}{MESSAGE}", f"{END}{ROLE}", content=f"{CHANNEL}{FINAL}{MESSAGE}")
