"""Splits an answer into reasoning, content and function calls.

Chooses the parsers of this server's answers.
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from trencadis.core.json_types import JsonMapping
from trencadis.server.text.checkpoint_tokenizer import Tokenizer
from trencadis.server.tools.parser_registry import find_reasoning_format, find_tool_parser
from trencadis.server.tools.reasoning_parser import (
    AnswerContent,
    ReasoningContent,
    ReasoningFormat,
    ReasoningParser,
)
from trencadis.server.tools.tool_parser import AnswerText, CallArguments, CallEnded, CallStarted, ToolEvent, ToolParser

_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_LETTERS = string.ascii_letters + string.digits


@dataclass(slots=True)
class CallPart:
    """The part of a call that a piece of an answer adds. ``id`` and ``name`` come with its first part."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(slots=True)
class AnswerPart:
    """The segments that a piece of text adds to an answer, in the order in which they were written."""

    segments: list[ReasoningContent | AnswerContent | CallPart] = field(default_factory=list)

    @property
    def reasoning(self) -> str:
        """The reasoning in it."""
        return "".join(s.text for s in self.segments if isinstance(s, ReasoningContent))

    @property
    def content(self) -> str:
        """The content in it, without calls."""
        return "".join(s.text for s in self.segments if isinstance(s, AnswerContent))

    @property
    def calls(self) -> list[CallPart]:
        """The parts of calls in it."""
        return [s for s in self.segments if isinstance(s, CallPart)]

    def add_text(self, text: str) -> None:
        """Adds content."""
        last = self.segments[-1] if self.segments else None
        if isinstance(last, AnswerContent):
            self.segments[-1] = AnswerContent(last.text + text)
        elif text:
            self.segments.append(AnswerContent(text))

    def add_call(self, index: int, id: str = "", name: str = "", arguments: str = "") -> None:
        """Adds to the call ``index``, which is the last one or a new one."""
        last = self.segments[-1] if self.segments else None
        if isinstance(last, CallPart) and last.index == index:
            last.arguments += arguments
        else:
            self.segments.append(CallPart(index, id, name, arguments))

    def extend(self, later: AnswerPart) -> None:
        """Appends the segments of a later part."""
        for segment in later.segments:
            if isinstance(segment, CallPart):
                self.add_call(segment.index, segment.id, segment.name, segment.arguments)
            elif isinstance(segment, AnswerContent):
                self.add_text(segment.text)
            else:
                self.segments.append(segment)


class AnswerReader:
    """Passes the text of one choice through the reasoning parser and then the tool parser.

    Args:
        reasoning: None if the model does not reason, or its reasoning counts as content.
        tools: None if the request has no tools; calls are content then.
        shows_reasoning: reasoning is part of the answer.
        one_call: the answer ends after the first call.
    """

    def __init__(
        self,
        reasoning: ReasoningParser | None,
        tools: ToolParser | None,
        shows_reasoning: bool = True,
        one_call: bool = False,
    ) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._shows = shows_reasoning
        self._one = one_call
        self._part = AnswerPart()
        self._ids: set[str] = set()
        self.calls = 0
        self.complete = False

    @property
    def reasons(self) -> bool:
        """True if reasoning is separated from content."""
        return self._reasoning is not None

    @property
    def thinks(self) -> bool:
        """True if the text so far ends within the reasoning."""
        return self._reasoning is not None and self._reasoning.inside

    def feed(self, text: str) -> None:
        """Reads more of the answer; ignores text after ``complete``."""
        if self._reasoning is None:
            self._add_content(text)
        else:
            self._add_tool_events(self._reasoning.feed(text))

    def finish(self) -> None:
        """Reads the text that the parsers held back, once the answer has ended."""
        if self._reasoning is not None:
            self._add_tool_events(self._reasoning.finish())
        if self._tools is not None:
            self._add_call_events(self._tools.finish())

    def take_part(self) -> AnswerPart:
        """Returns the segments added since the last call of this method."""
        part, self._part = self._part, AnswerPart()
        return part

    def _add_tool_events(self, events: list[ReasoningContent | AnswerContent]) -> None:
        for event in events:
            if isinstance(event, AnswerContent):
                self._add_content(event.text)
            elif self._shows:
                self._part.segments.append(event)

    def _add_content(self, text: str) -> None:
        if self._tools is None:
            self._part.add_text(text)
        elif not self.complete:
            self._add_call_events(self._tools.feed(text))

    def _add_call_events(self, events: list[ToolEvent]) -> None:
        for event in events:
            if self.complete:
                return
            if isinstance(event, AnswerText):
                self._part.add_text(event.text)
            elif isinstance(event, CallStarted):
                self.calls += 1
                self._part.add_call(event.index, self._make_call_id(event.id), event.name)
            elif isinstance(event, CallArguments):
                self._part.add_call(event.index, arguments=event.text)
            elif isinstance(event, CallEnded):
                self.complete = self._one

    def _make_call_id(self, written: str) -> str:
        """Returns the model's own id if it is valid and unused, else a new one."""
        length = self._tools.id_length if self._tools is not None else 0
        fits = (
            _ID.fullmatch(written) is not None
            and written not in self._ids
            and len(written) in (length or len(written),)
        )
        if fits:
            made = written
        elif length:
            made = "".join(secrets.choice(_LETTERS) for _ in range(length))
        else:
            made = f"call_{secrets.token_hex(12)}"
        self._ids.add(made)
        return made


@dataclass(frozen=True, slots=True)
class AnswerParsers:
    """The formats of calls and reasoning, chosen by ``--tool-call-parser`` and ``--reasoning-parser``.

    Args:
        tools: None if neither the flag nor the template names a form.
        reasoning: likewise; None also for ``none``.
        flags: the two flags.
    """

    tools: type[ToolParser] | None = None
    reasoning: ReasoningFormat | None = None
    flags: tuple[str, str] = ("auto", "auto")

    @classmethod
    def choose(cls, tools: str, reasoning: str, template: str | None) -> AnswerParsers:
        """Chooses the formats from the flags and the template's text.

        Raises:
            StartupError: a flag names no parser.
        """
        return cls(find_tool_parser(tools, template), find_reasoning_format(reasoning, template), (tools, reasoning))

    def for_template(self, template: str | None) -> AnswerParsers:
        """Returns the formats for a request that has its own chat template; None: the server's template."""
        return self if template is None else self.choose(*self.flags, template)

    def claim(self, tokenizer: Tokenizer) -> None:
        """Registers the tags of these formats with the tokenizer, so that users' text cannot contain them as tokens."""
        tokenizer.claim("\n".join(self._list_tags(True)))

    def list_visible_specials(self, tokenizer: Tokenizer, calls: bool) -> frozenset[int]:
        """Returns the special tokens that the parsers must see. ``calls``: the request has tools."""
        return frozenset(tokenizer.special[tag] for tag in self._list_tags(calls) if tag in tokenizer.special)

    def _list_tags(self, calls: bool) -> list[str]:
        tags = list(self.tools.tags) if self.tools is not None and calls else []
        return tags + list(self.reasoning.marks if self.reasoning is not None else ())

    def make_readers(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        tools: Mapping[str, JsonMapping] | None,
        *,
        continued: bool = False,
        shows_reasoning: bool = True,
        one_call: bool = False,
    ) -> Callable[[], AnswerReader] | None:
        """Returns a function that makes the reader of each choice; None if answers are content only.

        Args:
            prompt: ids.
            tools: schemas by name; None if calls are content.
            continued: the prompt ends within a message of the assistant.
            shows_reasoning: reasoning is part of the answer.
            one_call: an answer ends after its first call.
        """
        kind = self.tools if tools is not None else None
        if kind is None and self.reasoning is None:
            return None

        def make() -> AnswerReader:
            thoughts = self.reasoning.make_parser(tokenizer, prompt, continued) if self.reasoning is not None else None
            calls = kind(tools or {}) if kind is not None else None
            return AnswerReader(thoughts, calls, shows_reasoning, one_call)

        return make
