"""Runs the chat request that a request of another API has become."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from trencadis.core.errors import BadRequest
from trencadis.server.prompts.output_processor import TextPiece
from trencadis.server.protocol.base_request import TranslatedRequest, Usage
from trencadis.server.routes.answer_blocks import BlockBuilder, BlockEvent
from trencadis.server.routes.app_state import AppState, check_priority, forget_json, mark_runs_model
from trencadis.server.routes.field_names import translate_errors
from trencadis.server.routes.message_collector import InnerRequest
from trencadis.server.routes.serving_base import run_request
from trencadis.server.routes.serving_chat import RunningChat, make_prompt
from trencadis.server.routes.serving_tokenization import run_with_ticket
from trencadis.server.routes.sse import PieceStream, StreamFormat
from trencadis.server.tenants.admission import Ticket
from trencadis.server.text.off_event_loop import OffEventLoop, is_small

_OFF_LOOP = OffEventLoop("dialect")


class AnswerWriter(Protocol):
    """Writes an answer in the form of one API."""

    def write_first_events(self, usage: Usage) -> Iterator[bytes]:
        """Yields the first events; ``usage``: the tokens so far, when the first token has arrived."""
        ...

    def write_events(self, change: BlockEvent) -> Iterator[bytes]:
        """Yields the events of a change."""
        ...

    def add_block(self, change: BlockEvent, lazy: bool = False) -> None:
        """Adds a change to an answer that is sent whole; ``lazy``: see ``PreparedRequest``."""
        ...

    def write_final_events(self) -> Iterator[bytes]:
        """Yields the last events, once the answer is complete."""
        ...


@dataclass(slots=True)
class TranslatedRun:
    """A running request.

    Args:
        chat: runs it; its one choice is the answer.
        complete_answer: completes the answer, given its last piece and OpenAI's finish reason, and returns it.
    """

    chat: RunningChat
    writer: AnswerWriter
    form: StreamFormat
    complete_answer: Callable[[TextPiece, str | None], BaseModel]

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt, images included."""
        return self.chat.prompt_tokens

    def estimate_output(self, usual: int) -> int:
        """Most tokens of the answer; ``usual`` if it has no limit."""
        return self.chat.estimate_output(usual)

    async def complete(self, lazy: bool = False) -> BaseModel:
        """Runs to the end and returns the whole answer; ``lazy``: see ``PreparedRequest``."""
        blocks, last = self.make_block_builder(), TextPiece("")
        async with aclosing(self.chat.generation.stream_pieces()) as pieces:
            async for _, last in pieces:
                for change in blocks.feed(last):
                    self.writer.add_block(change, lazy)
        reason = self.chat.get_finish_reason(0, last)
        for change in blocks.finish(reason == "length"):
            self.writer.add_block(change, lazy)
        return self.complete_answer(last, reason)

    def stream(self) -> TranslatedStream:
        """Returns the stream of its events."""
        return TranslatedStream(self)

    def make_block_builder(self) -> BlockBuilder:
        """Makes the builder of the answer's blocks."""
        return BlockBuilder(self.chat.state.service.eos | frozenset(self.chat.generation.params.stop_token_ids))


class TranslatedStream(PieceStream):
    """The events of ``run``, written by its writer."""

    def __init__(self, run: TranslatedRun) -> None:
        body = run.chat.body
        super().__init__(run.chat.generation, body.top_logprobs if body.logprobs else None)
        self._run, self._blocks = run, run.make_block_builder()
        self._last: TextPiece | None = None

    def make_events(self, index: int, piece: TextPiece) -> bytes:
        """See ``PieceStream``."""
        writer = self._run.writer
        made = [] if self._last is not None else [*writer.write_first_events(self._run.chat.usage)]
        self._last = piece
        for change in self._blocks.feed(piece):
            made += writer.write_events(change)
        return b"".join(made)

    def make_final_events(self) -> bytes:
        """See ``PieceStream``."""
        run, last = self._run, self._last or TextPiece("")
        reason = run.chat.get_finish_reason(0, last)
        made = [
            event for change in self._blocks.finish(reason == "length") for event in run.writer.write_events(change)
        ]
        run.complete_answer(last, reason)
        return b"".join([*made, *run.writer.write_final_events()])


async def respond_translated(
    state: AppState, http: Request, inner: InnerRequest, headers: dict[str, str],
    run: Callable[[Ticket], Awaitable[TranslatedRun]], stream: bool,
) -> Response:  # fmt: skip
    """Makes the response of a translated request; errors name the fields that were sent.

    Args:
        run: makes the run, which is charged to the ticket.
    """
    mark_runs_model()
    ticket = state.admission.enter()
    keep_alive = state.settings.config.sse_keep_alive_interval
    with translate_errors(inner.names):
        return await run_request(http, ticket, run(ticket), stream, keep_alive, headers)


async def count_prompt_tokens(state: AppState, http: Request, inner: InnerRequest) -> int:
    """Counts the tokens of a translated request's prompt, images included."""
    ticket = state.admission.enter()
    with translate_errors(inner.names):
        prompt = make_prompt(state, inner.chat, http, ticket, state.service.max_counted_tokens)
        return len((await run_with_ticket(http, ticket, prompt)).tokens)


async def translate_request(
    state: AppState, body: TranslatedRequest, http: Request, translate: Callable[[], InnerRequest], *values: object
) -> tuple[InnerRequest, dict[str, str]]:
    """Translates a request of another API to a chat request, checks it, and returns it with the response headers.

    Args:
        values: the values that ``translate`` converts; long ones are translated off the event loop.

    Raises:
        TrencadisError: the request may not run; ``param`` names its own fields.
    """
    state.check_model(body.model)
    body.check()
    check_priority(body.priority)
    try:
        inner = translate() if is_small(*values) else await _OFF_LOOP.run(lambda check: translate())
    except ValidationError as error:
        first = error.errors()[0]
        raise BadRequest(str(first["msg"]), param=".".join(map(str, first["loc"]))) from None
    with translate_errors(inner.names):
        inner.chat.check()
        headers = state.check_fields(body, inner.chat, inner.names.translate_path)
    body.drop_bulky_fields()
    forget_json(http)
    return inner, headers
