"""Chooses the parsers of this server's answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trencadis.server.prompts.answer_reader import AnswerReader
from trencadis.server.text.checkpoint_tokenizer import Tokenizer
from trencadis.server.tools.reasoning_parser import ReasoningFormat, find_reasoning_format
from trencadis.server.tools.tool_parser import ToolParser
from trencadis.server.tools.tool_parser_registry import find_tool_parser


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
        return tags + list(self.reasoning.tags if self.reasoning is not None else ())

    def make_readers(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        tools: Mapping[str, Mapping[str, Any]] | None,
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
