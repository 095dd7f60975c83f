"""The stream of a completion; an echoed prompt starts the first event of its choice."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Protocol

from trencadis.server.prompts.generation import ChoicePiece, Generation, merge_generations
from trencadis.server.prompts.logprob_format import CompletionLogprobsBuilder
from trencadis.server.prompts.output_processor import TextPiece
from trencadis.server.protocol.base_request import resolve_stream_usage
from trencadis.server.protocol.completions import (
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    CompletionResponse,
)
from trencadis.server.routes.app_state import AppState
from trencadis.server.routes.sse import (
    PieceStream,
    SseEventTemplate,
    encode,
    encode_event,
    make_number_mark,
    make_text_mark,
)


class CompletionAnswer(Protocol):
    """The running request that is streamed; ``serving_completion.RunningCompletion`` is one."""

    state: AppState
    body: CompletionRequest
    generations: list[Generation]

    @property
    def silent(self) -> bool:
        """True if the answer is only the prompt."""
        ...

    @property
    def count(self) -> int:
        """Number of choices of each prompt."""
        ...

    def get_echo(self, prompt: int) -> str:
        """Returns the text of a prompt if the answer begins with it, else ""."""
        ...

    def make_response(self, choices: list[CompletionChoice], usage: bool) -> CompletionResponse:
        """Makes an event."""
        ...


class CompletionStream(PieceStream):
    """The events of ``answer``. Events between the first and the last of a choice are made from templates."""

    def __init__(self, answer: CompletionAnswer) -> None:
        single = answer.generations[0] if len(answer.generations) == 1 else None
        super().__init__(single, answer.body.logprobs)
        self._answer, self._body = answer, answer.body
        forced = answer.state.settings.config.enable_force_include_usage
        self._total, self._always = resolve_stream_usage(self._body.stream_options, forced)
        self._scores = self._body.logprobs is not None
        self._ids = bool(self._body.return_token_ids)
        self._builders: dict[int, CompletionLogprobsBuilder] = {}
        self._templates: dict[tuple[int, int], SseEventTemplate] = {}

    def stream_pieces(self) -> AsyncGenerator[ChoicePiece]:
        """See ``PieceStream``."""
        return super().stream_pieces() if self._generation is not None else self._merge_prompts()

    async def _merge_prompts(self) -> AsyncGenerator[ChoicePiece]:
        async with aclosing(merge_generations(self._answer.generations)) as pieces:
            async for prompt, choice, piece in pieces:
                yield ChoicePiece(prompt * self._answer.count + choice, piece)

    def make_events(self, index: int, piece: TextPiece) -> bytes:
        """See ``PieceStream``."""
        builder, head = self._builders.get(index), ""
        first = builder is None
        if builder is None:
            head = self._answer.get_echo(index // self._answer.count)
            builder = self._builders[index] = CompletionLogprobsBuilder(
                self._answer.state.service.tokenizer, self._body.logprobs or 0, self._answer.state.shows_ids(self._body)
            )
        elif piece.finish_reason is None and not self._answer.silent:
            return self._fill_template(index, piece, builder) if piece.text or piece.tokens else b""
        made = self._make_choice(index, head, piece, builder)
        if first and self._ids:
            made.prompt_token_ids = self._answer.generations[index // self._answer.count].prompt.tokens
        shows = made.text or piece.tokens or piece.finish_reason
        return encode_event(self._answer.make_response([made], self._always)) if shows else b""

    def make_final_events(self) -> bytes:
        """See ``PieceStream``."""
        return encode_event(self._answer.make_response([], True)) if self._total else b""

    def _make_choice(
        self, index: int, head: str, piece: TextPiece, builder: CompletionLogprobsBuilder
    ) -> CompletionChoice:
        text = head + ("" if self._answer.silent else piece.text)
        made = CompletionChoice(index=index, text=text, logprobs=None, finish_reason=piece.finish_reason)
        if self._scores and piece.logprobs:
            made.logprobs = builder.build(piece.logprobs)
        if piece.finish_reason is not None:
            made.stop_reason = piece.stop_reason
        if self._ids:
            made.token_ids = piece.tokens
        return made

    def _fill_template(self, index: int, piece: TextPiece, builder: CompletionLogprobsBuilder) -> bytes:
        """Makes the event of a piece between the first and the last of its choice."""
        timings = [g.timing for g in self._answer.generations] if self._always else []
        kind = index, sum(t.cached for t in timings)
        template = self._templates.get(kind)
        if template is None:
            template = self._templates[kind] = self._make_template(index)
        values = [encode(piece.text)]
        if self._scores:
            values.append(encode(builder.build_lists(piece.logprobs) if piece.logprobs else None))
        if self._ids:
            values.append(encode(piece.tokens))
        if self._always:
            made = sum(t.generated for t in timings)
            values += [b"%d" % (sum(t.prompt_tokens for t in timings) + made), b"%d" % made]
        return template.fill(*values)

    def _make_template(self, index: int) -> SseEventTemplate:
        text, score, tokens, total, made = (
            make_text_mark(),
            make_text_mark(),
            make_number_mark(),
            make_number_mark(),
            make_number_mark(),
        )
        choice = CompletionChoice(index=index, text=text, logprobs=None, finish_reason=None)
        marks = [encode(text)]
        if self._scores:
            choice.logprobs = CompletionLogprobs(text_offset=[], token_logprobs=[], tokens=[score], top_logprobs=[])
            marks.append(choice.logprobs.model_dump_json().encode())
        if self._ids:
            choice.token_ids = [tokens]
            marks.append(b"[%d]" % tokens)
        event_of = self._answer.make_response([choice], self._always)
        if event_of.usage is not None:
            event_of.usage = event_of.usage.model_copy(update={"total_tokens": total, "completion_tokens": made})
            marks += [b"%d" % total, b"%d" % made]
        return SseEventTemplate(encode_event(event_of), marks)
