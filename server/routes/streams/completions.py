"""The stream of a completion; an echoed prompt starts the first event of its choice."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Protocol

from trencadis.server.prompts.generation import ChoicePiece, Generation, merged
from trencadis.server.prompts.logprobs import CompletionLogprobsBuilder
from trencadis.server.prompts.output import TextPiece
from trencadis.server.protocol.completions import (
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    CompletionResponse,
)
from trencadis.server.routes.sse import event
from trencadis.server.routes.state import AppState
from trencadis.server.routes.streams.pieces import PieceStream
from trencadis.server.text.event_template import EventTemplate, encode, mark, number


class CompletionAnswer(Protocol):
    """The running request that is streamed; ``routes.completions.Completion`` is one."""

    state: AppState
    body: CompletionRequest
    generations: list[Generation]

    @property
    def silent(self) -> bool:
        """Whether the answer is only the prompt."""
        ...

    @property
    def count(self) -> int:
        """Choices of each prompt."""
        ...

    def echo(self, prompt: int) -> str:
        """The text of a prompt, where the answer begins with it."""
        ...

    def response(self, choices: list[CompletionChoice], usage: bool) -> CompletionResponse:
        """An event."""
        ...


class CompletionStream(PieceStream):
    """The events of ``answer``. Those between the first and the last of a choice are filled into templates."""

    def __init__(self, answer: CompletionAnswer) -> None:
        super().__init__(answer.generations[0] if len(answer.generations) == 1 else None)
        self._answer, self._body = answer, answer.body
        options = self._body.stream_options
        forced = answer.state.settings.config.enable_force_include_usage
        self._total = forced or bool(options and options.include_usage)
        self._always = bool(options and options.continuous_usage_stats)
        self._scores = self._body.logprobs is not None
        self._ids = bool(self._body.return_token_ids)
        self._builders: dict[int, CompletionLogprobsBuilder] = {}
        self._templates: dict[tuple[int, int], EventTemplate] = {}

    def pieces(self) -> AsyncGenerator[ChoicePiece]:
        """See ``PieceStream``."""
        return super().pieces() if self._generation is not None else self._merged()

    async def _merged(self) -> AsyncGenerator[ChoicePiece]:
        async with aclosing(merged(self._answer.generations)) as pieces:
            async for prompt, choice, piece in pieces:
                yield ChoicePiece(prompt * self._answer.count + choice, piece)

    def said(self, index: int, piece: TextPiece) -> bytes:
        """See ``PieceStream``."""
        builder, head = self._builders.get(index), ""
        if builder is None:
            head = self._answer.echo(index // self._answer.count)
            builder = self._builders[index] = CompletionLogprobsBuilder(
                self._answer.state.service.tokenizer, self._body.logprobs or 0, self._answer.state.shows_ids(self._body)
            )
        elif piece.finish_reason is None and not self._answer.silent:
            return self._filled(index, piece, builder) if piece.text or piece.tokens else b""
        made = self._choice(index, head, piece, builder)
        shows = made.text or piece.tokens or piece.finish_reason
        return event(self._answer.response([made], self._always)) if shows else b""

    def ending(self) -> bytes:
        """See ``PieceStream``."""
        return event(self._answer.response([], True)) if self._total else b""

    def _choice(self, index: int, head: str, piece: TextPiece, builder: CompletionLogprobsBuilder) -> CompletionChoice:
        text = head + ("" if self._answer.silent else piece.text)
        made = CompletionChoice(index=index, text=text, logprobs=None, finish_reason=piece.finish_reason)
        if self._scores and piece.logprobs:
            made.logprobs = builder.build(piece.logprobs)
        if piece.finish_reason is not None:
            made.stop_reason = piece.stop_reason
        if self._ids:
            made.token_ids = piece.tokens
        return made

    def _filled(self, index: int, piece: TextPiece, builder: CompletionLogprobsBuilder) -> bytes:
        """The event of a piece between the first and the last of its choice."""
        timings = [g.timing for g in self._answer.generations] if self._always else []
        kind = index, sum(t.cached for t in timings)
        template = self._templates.get(kind)
        if template is None:
            template = self._templates[kind] = self._template(index)
        values = [encode(piece.text)]
        if self._scores:
            values.append(encode(builder.lists(piece.logprobs) if piece.logprobs else None))
        if self._ids:
            values.append(encode(piece.tokens))
        if self._always:
            made = sum(t.generated for t in timings)
            values += [b"%d" % (sum(t.prompt_tokens for t in timings) + made), b"%d" % made]
        return template.fill(*values)

    def _template(self, index: int) -> EventTemplate:
        text, score, tokens, total, made = mark(), mark(), number(), number(), number()
        choice = CompletionChoice(index=index, text=text, logprobs=None, finish_reason=None)
        marks = [encode(text)]
        if self._scores:
            choice.logprobs = CompletionLogprobs(text_offset=[], token_logprobs=[], tokens=[score], top_logprobs=[])
            marks.append(choice.logprobs.model_dump_json().encode())
        if self._ids:
            choice.token_ids = [tokens]
            marks.append(b"[%d]" % tokens)
        event_of = self._answer.response([choice], self._always)
        if event_of.usage is not None:
            event_of.usage = event_of.usage.model_copy(update={"total_tokens": total, "completion_tokens": made})
            marks += [b"%d" % total, b"%d" % made]
        return EventTemplate(event(event_of), marks)
