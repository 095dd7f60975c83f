"""The stream of a chat completion: roles, deltas, finish reasons, usage."""

from __future__ import annotations

from typing import Protocol

from trencadis.server.prompts.answer_reader import AnswerPart, CallPart
from trencadis.server.prompts.generation_stream import Generation
from trencadis.server.prompts.output_processor import TextPiece
from trencadis.server.protocol.base_request import Usage, resolve_stream_usage
from trencadis.server.protocol.chat_completions import ChatChunk, ChatRequest, ChoiceLogprobs, ChunkChoice, DeltaMessage
from trencadis.server.routes.openai_output import make_chat_entries, make_delta
from trencadis.server.routes.serving_base import ServingState
from trencadis.server.routes.sse import (
    PieceStream,
    SseEventTemplate,
    encode,
    encode_event,
    make_number_mark,
    make_text_mark,
)
from trencadis.server.text.checkpoint_tokenizer import Tokenizer
from trencadis.server.tools.reasoning_parser import AnswerContent, ReasoningContent

Segment = ReasoningContent | AnswerContent | CallPart
_Kind = tuple[int, type[Segment] | None, int, int]
"""The key of an event's template: the index of the choice, the kind of its text, the number of the call, tokens from
the cache.
"""


class ChatAnswer(Protocol):
    """The running request that is streamed; ``serving_chat.RunningChat`` is one."""

    state: ServingState
    body: ChatRequest
    generation: Generation
    id: str
    model: str
    role: str
    echo: str
    created: int

    @property
    def usage(self) -> Usage:
        """Tokens so far."""
        ...

    @property
    def as_ids(self) -> bool:
        """True if log-probabilities name tokens by their ids."""
        ...

    def make_logprobs(self, piece: TextPiece) -> ChoiceLogprobs | None:
        """Returns the log-probabilities of a piece's tokens, if the request asks for them."""
        ...

    def get_finish_reason(self, index: int, piece: TextPiece) -> str | None:
        """Returns OpenAI's finish reason."""
        ...


class ChatStream(PieceStream):
    """The events of ``answer``. Events between the first and the last of a choice are made from templates."""

    def __init__(self, answer: ChatAnswer) -> None:
        super().__init__(answer.generation, answer.body.top_logprobs if answer.body.logprobs else None)
        self._answer, self._body, self._timing = answer, answer.body, answer.generation.timing
        forced = answer.state.settings.config.enable_force_include_usage
        usage = resolve_stream_usage(self._body.stream_options, forced)
        self._total, self._always = usage.final or self._body.return_image_sizes, usage.running
        self._scores = bool(self._body.logprobs)
        self._ids = bool(self._body.return_token_ids)
        self._plain = not (self._always or self._scores or self._ids)
        # The usage counts reasoning tokens one by one.
        self._fills = not (self._always and answer.generation.reasoning_tokens is not None)
        self._started = False
        self._templates: dict[_Kind, SseEventTemplate] = {}
        self._texts: dict[int, SseEventTemplate] = {}
        """Templates of plain text, by choice."""

    def make_events(self, index: int, piece: TextPiece) -> bytes:
        """See ``PieceStream``."""
        if piece.answer is None and piece.finish_reason is None and piece.text:
            template = self._texts.get(index)
            if template is not None:
                return template.fill(encode(piece.text))
        if not self._started:
            self._started = True
            return self._make_first_events() + self._make_event(index, piece)
        if piece.finish_reason is not None or not self._fills:
            return self._make_event(index, piece)
        if piece.answer is None:
            return self._fill_template(index, None, piece.text, piece) if piece.text or piece.tokens else b""
        if len(piece.answer.segments) == 1:
            (one,) = piece.answer.segments
            if not isinstance(one, CallPart):
                return self._fill_template(index, one, one.text, piece) if one.text else self._make_event(index, piece)
            if not one.id:  # the first part of a call has more fields than arguments
                return self._fill_template(index, one, one.arguments, piece)
        return self._make_event(index, piece)

    def make_final_events(self) -> bytes:
        """See ``PieceStream``."""
        return encode_event(self._make_chunk([], True)) if self._total else b""

    def _make_first_events(self) -> bytes:
        """The role of each choice, and what of the answer the request has said already; they have no tokens."""
        said = []
        for i in range(len(self._answer.generation.streams)):
            delta = DeltaMessage(role=self._answer.role, content="")
            said.append(ChunkChoice(index=i, delta=delta, logprobs=None, finish_reason=None))
            if self._answer.echo:
                said.append(ChunkChoice(index=i, delta=DeltaMessage(content=self._answer.echo)))
        return b"".join(encode_event(self._make_first_chunk(one)) for one in said)

    def _make_first_chunk(self, choice: ChunkChoice) -> ChatChunk:
        chunk = self._make_chunk([choice], self._always)
        if chunk.usage is not None:
            chunk.usage.completion_tokens, chunk.usage.total_tokens = 0, chunk.usage.prompt_tokens
            if chunk.usage.completion_tokens_details is not None:
                chunk.usage.completion_tokens_details.reasoning_tokens = 0
        if self._ids and choice.index == 0 and choice.delta.role is not None:
            chunk.prompt_token_ids = self._answer.generation.prompt.tokens
        return chunk

    # --- events made by models ---

    def _make_event(self, index: int, piece: TextPiece) -> bytes:
        """Makes the event of any piece; empty for one whose text a parser holds back."""
        if piece.finish_reason or piece.answer is None:
            shows = bool(piece.finish_reason or piece.text or piece.tokens)
        else:
            shows = bool(piece.answer.segments or self._scores or self._ids)
        return encode_event(self._make_chunk([self._make_choice(index, piece)], self._always)) if shows else b""

    def _make_choice(self, index: int, piece: TextPiece) -> ChunkChoice:
        delta = DeltaMessage(content=piece.text) if piece.answer is None else make_delta(piece.answer)
        logprobs, reason = self._answer.make_logprobs(piece), self._answer.get_finish_reason(index, piece)
        choice = ChunkChoice(index=index, delta=delta, logprobs=logprobs, finish_reason=reason)
        if piece.finish_reason is not None:
            choice.stop_reason = piece.stop_reason
        if self._ids:
            choice.token_ids = piece.tokens
        return choice

    def _make_chunk(self, choices: list[ChunkChoice], usage: bool) -> ChatChunk:
        chunk = ChatChunk(
            id=self._answer.id,
            object="chat.completion.chunk",
            created=self._answer.created,
            model=self._answer.model,
            choices=choices,
            system_fingerprint=self._answer.state.settings.fingerprint,
        )
        if usage:
            chunk.usage = self._answer.usage
        return chunk

    # --- events made from templates ---

    def _fill_template(self, index: int, segment: Segment | None, text: str, piece: TextPiece) -> bytes:
        """Makes the event of a piece that adds only ``text``; ``segment``: the parser's segment of the piece."""
        call = segment.index if isinstance(segment, CallPart) else 0
        cached = self._timing.cached if self._always else 0
        kind = index, None if segment is None else type(segment), call, cached
        template = self._templates.get(kind)
        if template is None:
            template = self._templates[kind] = self._make_template(kind)
        if self._plain:
            if segment is None:
                self._texts[index] = template
            return template.fill(encode(text))
        values = [encode(text)]
        if self._scores:
            entries = make_chat_entries(
                self._tokenizer, piece.logprobs, self._body.top_logprobs or 0, self._answer.as_ids
            )
            values.append(b'"logprobs":%b' % encode({"content": entries}))
        if self._ids:
            values.append(encode(piece.tokens))
        if self._always:
            made = self._timing.generated
            values += [b"%d" % (self._timing.prompt_tokens + made), b"%d" % made]
        return template.fill(*values)

    def _make_template(self, kind: _Kind) -> SseEventTemplate:
        text, tokens, total, made = make_text_mark(), make_number_mark(), make_number_mark(), make_number_mark()
        choice = ChunkChoice(index=kind[0], delta=_make_delta(kind, text), logprobs=None, finish_reason=None)
        marks = [encode(text)]
        if self._scores:
            marks.append(b'"logprobs":null')  # no text of an event contains a bare quote
        if self._ids:
            choice.token_ids = [tokens]
            marks.append(b"[%d]" % tokens)
        chunk = self._make_chunk([choice], self._always)
        if chunk.usage is not None:
            chunk.usage = chunk.usage.model_copy(update={"total_tokens": total, "completion_tokens": made})
            marks += [b"%d" % total, b"%d" % made]
        return SseEventTemplate(encode_event(chunk), marks)

    @property
    def _tokenizer(self) -> Tokenizer:
        return self._answer.state.service.tokenizer


def _make_delta(kind: _Kind, text: str) -> DeltaMessage:
    """Makes a delta that adds ``text`` as a segment of ``kind``."""
    _, segment, call, _ = kind
    if segment is None:
        return DeltaMessage(content=text)
    if segment is CallPart:
        return make_delta(AnswerPart([CallPart(call, arguments=text)]))
    return make_delta(AnswerPart([ReasoningContent(text) if segment is ReasoningContent else AnswerContent(text)]))
