"""Which parsers read the answers of this server."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trencadis.server.prompts.answer import AnswerReader
from trencadis.server.reasoning.forms import ReasoningForm, reasoning_form
from trencadis.server.text.tokenizer import Tokenizer
from trencadis.server.tools.forms import tool_form
from trencadis.server.tools.parser import ToolParser


@dataclass(frozen=True, slots=True)
class AnswerForms:
    """How the model writes calls and reasoning, as ``--tool-call-parser`` and ``--reasoning-parser`` say.

    Args:
        tools: None if neither the flag nor the template names a form.
        reasoning: likewise; None also for ``none``.
        asked: the two flags.
    """

    tools: type[ToolParser] | None = None
    reasoning: ReasoningForm | None = None
    asked: tuple[str, str] = ("auto", "auto")

    @classmethod
    def choose(cls, tools: str, reasoning: str, template: str | None) -> AnswerForms:
        """The forms of the flags and the template's text.

        Raises:
            StartupError: a flag names no parser.
        """
        return cls(tool_form(tools, template), reasoning_form(reasoning, template), (tools, reasoning))

    def of(self, template: str | None) -> AnswerForms:
        """The forms of a request that brings a template of its own."""
        return self if template is None else self.choose(*self.asked, template)

    def claim(self, tokenizer: Tokenizer) -> None:
        """Keeps users from typing the tags of these forms as tokens."""
        tokenizer.claim("\n".join(self._tags(True)))

    def shown(self, tokenizer: Tokenizer, calls: bool) -> frozenset[int]:
        """Special tokens that the parsers must see. ``calls``: whether the request has tools."""
        return frozenset(tokenizer.special[tag] for tag in self._tags(calls) if tag in tokenizer.special)

    def _tags(self, calls: bool) -> list[str]:
        tags = list(self.tools.tags) if self.tools is not None and calls else []
        return tags + list(self.reasoning.tags if self.reasoning is not None else ())

    def readers(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        tools: Mapping[str, Mapping[str, Any]] | None,
        *,
        continued: bool = False,
        shows_reasoning: bool = True,
        one_call: bool = False,
    ) -> Callable[[], AnswerReader] | None:
        """Makes the reader of each choice; None if there is nothing to read but content.

        Args:
            prompt: ids.
            tools: schemas by name; None if calls are content.
            continued: the prompt ends within a message of the assistant.
            shows_reasoning: whether reasoning is part of the answer.
            one_call: whether an answer ends after its first call.
        """
        kind = self.tools if tools is not None else None
        if kind is None and self.reasoning is None:
            return None

        def make() -> AnswerReader:
            thoughts = self.reasoning.parser(tokenizer, prompt, continued) if self.reasoning is not None else None
            calls = kind(tools or {}) if kind is not None else None
            return AnswerReader(thoughts, calls, shows_reasoning, one_call)

        return make
