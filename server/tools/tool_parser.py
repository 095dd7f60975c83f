"""The base of tool parsers: content, calls, and the JSON that most models write calls in.

Arguments are sent unchanged. A call that was cut off stays incomplete.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from trencadis.core.errors import BadRequest
from trencadis.core.json_types import JsonMapping
from trencadis.server.grammars.lark_grammar_and_tool_functions import BETWEEN, GrammarWriter, ToolFunction
from trencadis.server.protocol.tool_definitions import NAME
from trencadis.server.text.incremental_parser import IncrementalParser, Wait

MOST_AGAIN = 1 << 20
"""Most characters that are read again because text that began like a call was none; beyond this, no text is taken as
a call.
"""
ARGUMENTS = ("arguments", "parameters")
BESIDE = ("type", "id", "index")
"""Keys that may occur next to name and arguments."""
_PLAIN = re.compile(r'[^"\[\]{}<]++')
_IN_STRING = re.compile(r'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)
_WORD = re.compile(r"[^\s\"'<>{}()\[\]=,;]*+")
_NUMBER = re.compile(r"[^\s,\]}<;]*+")


@dataclass(frozen=True, slots=True)
class AnswerText:
    """Text that is not part of a call."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStarted:
    """The beginning of a call. ``id``: the model's own, if it wrote one."""

    index: int
    name: str
    id: str = ""


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a call's arguments, a JSON text."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    """The end of a call that is complete, or that the text will not complete."""

    index: int


ToolEvent = AnswerText | CallStarted | CallArguments | CallEnded
Tools = Mapping[str, JsonMapping]
"""Names of the functions of a request, and the schemas of their parameters."""


class ToolParser(IncrementalParser[ToolEvent]):
    """Reads calls. Blanks around a call belong to it; every other character is content or part of a call.

    Args:
        tools: functions of the request.
    """

    tags: ClassVar[tuple[str, ...]] = ()
    """Texts that the parser must see, even if they are special tokens."""
    id_length: ClassVar[int] = 0
    """Characters of a call's id, for templates that require an exact number; 0: any."""
    stop_marks: ClassVar[tuple[str, ...]] = ()
    """Marks that end a call anywhere outside a string."""
    checks_names: ClassVar[bool] = False
    """True if only functions of the request are calls, because no mark distinguishes a call from text."""

    mark: ClassVar[str] = ""
    """Text that begins a call in the grammars that ``calls_rule`` and ``free_text_rule`` write."""
    call_separator: ClassVar[str] = BETWEEN
    """Separator of two calls there, in Lark."""

    def __init__(self, tools: Tools) -> None:
        self.tools = tools
        self.index = -1
        self._open = self._called = self._spoke = False
        self._blanks = ""
        self._again = 0
        super().__init__()

    @classmethod
    def call_rule(cls, writer: GrammarWriter, function: ToolFunction) -> str:
        """Writes the rule of one call after its mark, in the form that this parser reads.

        Raises:
            BadRequest: this form has no grammar, or none for such parameters.
        """
        raise BadRequest("Calls in this model's form have no grammar; use tool_choice 'auto'.", param="tool_choice")

    @classmethod
    def calls_rule(cls, writer: GrammarWriter, functions: Sequence[ToolFunction], many: bool) -> str:
        """Writes the rule of an answer that is a call, or ``many``."""
        each = writer.add_rule(" | ".join(cls.call_rule(writer, one) for one in functions))
        mark = writer.write_text(cls.mark) if cls.mark else ""
        one = writer.add_rule(f"{mark} {each}")
        return writer.add_rule(f"{one} ({cls.call_separator} {one})*") if many else one

    @classmethod
    def free_text_rule(cls, writer: GrammarWriter, functions: Sequence[ToolFunction], many: bool) -> str:
        """Writes the rule of free text in which the mark begins a call."""
        each = writer.add_rule(" | ".join(cls.call_rule(writer, one) for one in functions))
        return writer.add_rule(
            f"({writer.write_until(cls.mark)} {each}){'*' if many else '?'} {writer.write_free_text(cls.mark)}"
        )

    def add_content(self, text: str) -> None:
        """Adds content. Blanks at its end wait, because they belong to a call that may follow."""
        kept = text.rstrip()
        if not kept:
            self._blanks += text
            return
        before = self._blanks if self._spoke or self.index < 0 else ""
        self.events.append(AnswerText(before + kept))
        self._spoke, self._called, self._blanks = True, False, text[len(kept) :]

    def add_pending_blanks(self) -> None:
        """Adds the blanks that wait, unless they follow a call."""
        if self._blanks and not self._called:
            self.events.append(AnswerText(self._blanks))
        self._blanks = ""

    def start_call(self, name: str, id: str = "") -> None:
        """Begins a call."""
        self.index += 1
        self._open = self._called = True
        self.held = None
        self.events.append(CallStarted(self.index, name, id))

    def add_arguments(self, text: str) -> None:
        """Adds to the arguments of the call."""
        if text:
            self.events.append(CallArguments(self.index, text))

    def end_call(self) -> None:
        """Ends the call, if one is open."""
        if self._open:
            self._open = False
            self.events.append(CallEnded(self.index))

    def is_accepted_name(self, name: str) -> bool:
        """Returns True if a call may have this name."""
        return NAME.fullmatch(name) is not None and (not self.checks_names or name in self.tools)

    def read_content_until(self, *marks: str) -> Wait[str]:
        """Adds the text up to a mark as content, moves past the mark and returns it; "" at the end of the text."""
        while True:
            text, mark = yield from self.read_until(*marks)
            self.add_content(text)
            if mark:
                self.at += len(mark)
                return mark
            if self.ended and self.at == len(self.text):
                self.add_pending_blanks()
                return ""

    def try_calls(self, calls: Callable[[], Wait[bool]], mark: str, again: int = 0) -> Wait[bool]:
        """Tries to read calls after ``mark``. If there is none, the mark is content, and reading goes on after it.

        Args:
            again: characters at the end of the mark that ``calls`` reads too.
        """
        if self._again > MOST_AGAIN:
            self.add_content(mark)
            return False
        self.at -= again
        self.held = self.at
        found = yield from calls()
        if found:
            self.end_call()
            yield from self.read_run()
        else:
            start = (self.held or 0) + again
            self._again += max(0, self.at - start)
            self.at = start
            self.add_content(mark)
        self.held = None
        return found

    def read_call_objects(self) -> Wait[bool]:
        """Reads call objects, in a list or one after another, with blanks, commas or semicolons among them."""
        found = False
        yield from self.read_run()
        yield from self.take_literal("[")
        yield from self.read_run()
        while (yield from self.peek()) == "{":
            if not (yield from self.read_call_object()):
                if found:
                    self.at = self.held or 0
                break
            found = True
            # Models write one closing bracket too many as often as one too few.
            yield from self.read_run("]} \n\t\r")
            self.held = self.at
            yield from self.take_literal(",", ";")
            yield from self.read_run()
            if (yield from self.peek()) != "{":
                self.at = self.held
                break
        return found

    def read_call_object(self) -> Wait[bool]:
        """Reads ``{"name": ..., "arguments": ...}`` in any order. Returns True if it has become a call."""
        name: str | None = None
        early: str | None = None
        started = False
        self.at += 1
        while True:
            yield from self.read_run()
            head = yield from self.peek()
            if head == "}":
                break
            key = (yield from self.read_string()) if head == '"' else None
            if key is None or not (yield from self._skip_colon()):
                break
            if key == "name" and name is None:
                name = yield from self.read_string()
                if name is None or not self.is_accepted_name(name):
                    return started
                if early is not None:
                    self.start_call(name)
                    self.add_arguments(early)
                    started = True
            elif key in ARGUMENTS and not started and early is None:
                if name is None:
                    early = yield from self.collect_value()
                else:
                    self.start_call(name)
                    started = True
                    yield from self.read_value(self.add_arguments)
            elif started or key in BESIDE:
                yield from self.read_value(None)
            else:
                return False
            yield from self.read_run()
            if not (yield from self.take_literal(",")):
                break
        closed = bool((yield from self.take_literal("}")))
        if not started and closed and name is not None:
            self.start_call(name)
            self.add_arguments("{}")
            started = True
        self.end_call()
        return started

    def _skip_colon(self) -> Wait[bool]:
        yield from self.read_run()
        found = yield from self.take_literal(":")
        yield from self.read_run()
        return bool(found)

    def collect_value(self) -> Wait[str]:
        """Reads a value (``read_value``) and returns it in one piece."""
        pieces: list[str] = []
        yield from self.read_value(pieces.append)
        return "".join(pieces)

    def read_value(self, emit: Callable[[str], None] | None) -> Wait[None]:
        """Reads a JSON value and emits it as written: a string without quotes and escapes, null as {}."""
        head = yield from self.peek()
        put = emit or (lambda text: None)
        if head in ("{", "["):
            yield from self.read_composite(put)
        elif head == '"':
            pieces: list[str] = []
            yield from self._emit_string(pieces.append)
            text = parse_json_string("".join(pieces))
            put("".join(pieces) if text is None else text)
        else:
            text = yield from self._read_while(_NUMBER)
            put("{}" if text == "null" else text)

    def read_composite(self, emit: Callable[[str], None]) -> Wait[None]:
        """Emits an object or a list as it arrives, tracking strings and depth. A stop mark outside a string ends it."""
        depth = 0
        while True:
            head = yield from self.peek()
            if not head:
                return
            if (
                self.stop_marks
                and head in {w[0] for w in self.stop_marks}
                and (yield from self.match_literal(*self.stop_marks))
            ):
                return
            if head == '"':
                yield from self._emit_string(emit)
                continue
            plain = _PLAIN.match(self.text, self.at)
            end = self.at + 1 if plain is None else plain.end()
            emit(self.text[self.at : end])
            self.at = end
            depth += (head in "{[") - (head in "}]")
            if not depth:
                return

    def _emit_string(self, emit: Callable[[str], None]) -> Wait[None]:
        """Emits a string as it arrives."""
        emit('"')
        self.at += 1
        while True:
            match = _IN_STRING.match(self.text, self.at)
            assert match is not None  # it matches the empty text
            emit(match[0])
            self.at = match.end()
            if self.text[self.at : self.at + 1] == '"':
                emit('"')
                self.at += 1
                return
            if not (yield from self.wait()):
                emit(self.text[self.at :])  # a backslash at the very end
                self.at = len(self.text)
                return

    def read_string(self) -> Wait[str | None]:
        """Reads a JSON string; None if it is not a whole one (reading goes on after the part that was read)."""
        if (yield from self.peek()) != '"':
            return None
        pieces: list[str] = []
        yield from self._emit_string(pieces.append)
        return parse_json_string("".join(pieces))

    def read_word(self) -> Wait[str]:
        """Reads the characters of a name that come next."""
        return (yield from self._read_while(_WORD))

    def _read_while(self, pattern: re.Pattern[str]) -> Wait[str]:
        """Moves past all characters that ``pattern`` matches and returns them; the pattern matches any number of
        characters.
        """
        out = ""
        while True:
            match = pattern.match(self.text, self.at)
            assert match is not None
            out += match[0]
            self.at = match.end()
            if self.at < len(self.text) or not (yield from self.wait()):
                return out


def parse_json_string(literal: str) -> str | None:
    """Returns the text of a JSON string, in which control characters may stand unescaped; None if it is invalid."""
    try:
        text = str(json.loads(literal, strict=False))
        text.encode()
    except ValueError:
        return None
    return text
