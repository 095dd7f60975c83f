"""Splits an answer into reasoning and content, by the tags around a model's reasoning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trencadis.server.text.checkpoint_tokenizer import Tokenizer
from trencadis.server.text.incremental_parser import IncrementalParser, Wait


@dataclass(frozen=True, slots=True)
class ReasoningContent:
    """Text of the reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class AnswerContent:
    """Text of the answer after it."""

    text: str


class ReasoningParser(IncrementalParser[ReasoningContent | AnswerContent]):
    """Splits off the reasoning at the beginning of an answer, between ``start`` and ``end``; later tags are text.

    Blanks around a tag belong to it. Reasoning without an ``end`` lasts to the end of the text.

    Args:
        inside: the text begins inside the reasoning, because the prompt ends with ``start`` or the model writes none.
        over: there is no reasoning, because the prompt has closed it.
    """

    def __init__(self, start: str, end: str, inside: bool = False, over: bool = False) -> None:
        self._start, self._end = start, end
        self.inside = inside and not over
        self._over = over
        super().__init__()

    def parse(self) -> Wait[None]:
        """Reads [blanks] [start] [reasoning end] the rest."""
        if not self._over:
            blanks = yield from self.read_run()
            opened = yield from self.take_literal(self._start)
            if opened or self.inside:
                self.inside = True
                yield from self._read_thoughts()
                yield from self.read_run()
            else:
                self._add_text(blanks)
        while self.at < len(self.text) or (yield from self.wait()):
            self._add_text(self.text[self.at :])
            self.at = len(self.text)

    def _read_thoughts(self) -> Wait[None]:
        yield from self.read_run()
        blanks, said = "", False
        while True:
            text, mark = yield from self.read_until(self._end)
            kept = text.rstrip()
            if kept:
                self.events.append(ReasoningContent(blanks + kept))
                said = True
            # Blanks at the end may stand before the tag.
            blanks = text[len(kept) :] if kept else blanks + text
            if mark:
                self.at += len(mark)
                self.inside = False
                return
            if self.ended and self.at == len(self.text):
                if blanks and said:
                    self.events.append(ReasoningContent(blanks))
                return

    def _add_text(self, text: str) -> None:
        if text:
            self.events.append(AnswerContent(text))


TAIL = 64
"""Number of tokens at the end of a prompt that are searched for the template's tag."""


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The tags around a model's reasoning.

    Args:
        always: an answer begins inside the reasoning unless the prompt has closed it.
        content: text before the content of an answer whose form is restricted.
    """

    start: str
    end: str
    always: bool = False
    content: str = ""

    @property
    def tags(self) -> tuple[str, ...]:
        """The texts around the reasoning."""
        return self.start, self.end

    @property
    def marks(self) -> tuple[str, ...]:
        """The texts that the parser must see, even if they are special tokens."""
        return self.tags

    def make_parser(self, tokenizer: Tokenizer, prompt: Sequence[int], continued: bool = False) -> ReasoningParser:
        """Makes the parser of an answer to ``prompt``, whose end shows whether the answer begins inside the reasoning.

        Args:
            prompt: ids; only the template writes its end, so that no text of a user opens the reasoning.
            continued: the prompt ends within a message of the assistant, in which the last tag counts.
        """
        return ReasoningParser(self.start, self.end, *self.find_state(tokenizer, prompt, continued))

    def find_state(self, tokenizer: Tokenizer, prompt: Sequence[int], continued: bool = False) -> tuple[bool, bool]:
        """Returns (the answer to ``prompt`` begins inside the reasoning, the answer has no reasoning); see
        ``make_parser``.
        """
        tail = tokenizer.decode(prompt[-TAIL:], False).rstrip()
        if continued:
            tail = tokenizer.decode(self._get_tail(tokenizer, prompt), False)
            inside = tail.rfind(self.start) > tail.rfind(self.end)
            return inside, not inside
        over = tail.endswith(self.end)
        return tail.endswith(self.start.rstrip()) or self.always, over

    def _get_tail(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> Sequence[int]:
        """Returns the ids after the last special token that is no tag."""
        tags = {tokenizer.find_token_id(tag) for tag in self.tags}
        for i in range(len(prompt) - 1, -1, -1):
            if prompt[i] in tokenizer.special_ids and prompt[i] not in tags:
                return prompt[i + 1 :]
        return prompt


THINK = ReasoningFormat("<think>", "</think>")
"""The tags of most models that reason."""
