"""/v1/responses and /v1/messages: run the chat request that a request of another API has become.

Responses are not stored once they are sent. /v1/messages and /v1/messages/count_tokens have the form of Anthropic's
clients.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol, TypeVar

from fastapi import APIRouter
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from trencadis.core.errors import BadRequest, NotFound, TrencadisError
from trencadis.core.request import TokenLogprob
from trencadis.server.prompts.output_processor import TextPiece
from trencadis.server.protocol.anthropic_messages import (
    CountTokensRequest,
    MessagesRequest,
    MessagesResponse,
    MessagesUsage,
    TokenCount,
)
from trencadis.server.protocol.base_request import TranslatedRequest, Usage
from trencadis.server.protocol.responses import InputTokens, ResponsesRequest, ResponsesResponse
from trencadis.server.routes.anthropic_conversion import PING, MessageWriter, convert_messages, encode_error_event
from trencadis.server.routes.json_io import BodyRoute, forget_json
from trencadis.server.routes.message_translation import BlockBuilder, BlockEvent, InnerRequest, translate_errors
from trencadis.server.routes.openai_output import TokenEntry, make_chat_entries
from trencadis.server.routes.responses_conversion import (
    LOGPROB_REPEATS,
    ResponseWriter,
    convert_responses,
    make_initial_response,
)
from trencadis.server.routes.serving_base import (
    ServingState,
    check_priority,
    make_request_id,
    mark_runs_model,
    run_request,
)
from trencadis.server.routes.serving_chat import RunningChat, make_prompt, prepare
from trencadis.server.routes.serving_tokenization import run_with_ticket
from trencadis.server.routes.sse import PieceStream, StreamFormat
from trencadis.server.tenants.server_admission_and_byte_budgets import Ticket
from trencadis.server.text.off_event_loop import OffEventLoop, is_small

_OFF_LOOP = OffEventLoop("dialect")
Body = TypeVar("Body", bound=TranslatedRequest)


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


Translate = Callable[[Body, Request], Awaitable[tuple[InnerRequest, dict[str, str]]]]
"""Makes the chat request of a body, and the response's headers, by ``translate_request``."""


async def respond_translated(
    state: ServingState, body: Body, http: Request, translate: Translate[Body],
    prepare: Callable[[ServingState, Body, InnerRequest, Request, Ticket], Awaitable[TranslatedRun]], stream: bool,
) -> Response:  # fmt: skip
    """Makes the response of a request of another API; errors name the fields that were sent.

    Args:
        prepare: makes the run, which is charged to the ticket.
    """
    state.check_accepting()
    inner, headers = await translate(body, http)
    mark_runs_model()
    ticket = state.admission.enter()
    keep_alive = state.settings.config.sse_keep_alive_interval
    with translate_errors(inner.names):
        run = prepare(state, body, inner, http, ticket)
        return await run_request(http, ticket, run, stream, keep_alive, headers)


async def respond_with_count(
    state: ServingState, body: Body, http: Request, translate: Translate[Body], make: Callable[[int], BaseModel]
) -> Response:
    """Makes the response that ``make`` makes of the number of tokens of the prompt, images included."""
    inner, headers = await translate(body, http)
    ticket = state.admission.enter()
    with translate_errors(inner.names):
        prompt = make_prompt(state, inner.chat, http, ticket, state.service.max_counted_tokens)
        count = len((await run_with_ticket(http, ticket, prompt)).tokens)
    return Response(make(count).model_dump_json(), headers=headers, media_type="application/json")


async def translate_request(
    state: ServingState, body: TranslatedRequest, http: Request, translate: Callable[[], InnerRequest]
) -> tuple[InnerRequest, dict[str, str]]:
    """Translates a request of another API to a chat request, checks it, and returns it with the response headers.

    Long requests are translated off the event loop: the chat request checks all values that it gets.

    Raises:
        TrencadisError: the request may not run; ``param`` names its own fields.
    """
    state.check_model(body.model)
    body.check()
    check_priority(body.priority)
    values = (getattr(body, name) for name in body.model_fields_set)
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


def make_messages_router(state: ServingState) -> APIRouter:
    """Makes the routes over ``state``."""
    routes = APIRouter(tags=["messages"], route_class=BodyRoute)

    async def translate(body: CountTokensRequest, http: Request) -> tuple[InnerRequest, dict[str, str]]:
        def convert() -> InnerRequest:
            reasons = state.parsers.for_template(body.chat_template).reasoning is not None
            return convert_messages(body, lambda name: state.mentions(body.chat_template, name), reasons)

        return await translate_request(state, body, http, convert)

    @routes.post("/v1/messages", response_model=MessagesResponse)
    async def create(body: MessagesRequest, http: Request) -> Response:
        """Continues a conversation."""
        return await respond_translated(state, body, http, translate, prepare_message, bool(body.stream))

    @routes.post("/v1/messages/count_tokens", response_model=TokenCount)
    async def count_tokens(body: CountTokensRequest, http: Request) -> Response:
        """The tokens of a conversation, images included."""
        return await respond_with_count(state, body, http, translate, lambda n: TokenCount(input_tokens=n))

    return routes


async def prepare_message(
    state: ServingState, body: MessagesRequest, inner: InnerRequest, http: Request, ticket: Ticket
) -> TranslatedRun:
    """Makes the run of a checked request.

    Raises:
        TrencadisError: the request cannot run.
    """
    id = make_request_id("msg", http, body.request_id, "_")
    chat = await prepare(state, inner.chat, http, ticket, id, fits=True)
    usage = MessagesUsage(input_tokens=chat.prompt_tokens, output_tokens=0)
    writer = MessageWriter(MessagesResponse(id=id, model=chat.model, usage=usage))

    def complete(piece: TextPiece, reason: str | None) -> BaseModel:
        return writer.complete(*stop_reason(chat, piece, body.max_tokens), chat.usage)

    def make_failed_event(error: TrencadisError) -> bytes:
        return encode_error_event(error, http.scope.get("trencadis.request_id.shown"))

    return TranslatedRun(chat, writer, StreamFormat(make_failed_event, done=b"", keep_alive=PING), complete)


def stop_reason(chat: RunningChat, last: TextPiece, asked: int) -> tuple[str, str | None]:
    """Returns Anthropic's stop reason, and the stop sequence that has ended the answer.

    Args:
        asked: the client's limit of the answer's tokens; the context may hold fewer, the operator may allow fewer.
    """
    if last.finish_reason == "length":
        limit = chat.generation.params.max_tokens or asked
        full = limit < asked and chat.prompt_tokens + limit >= chat.state.service.max_model_len
        return "model_context_window_exceeded" if full else "max_tokens", None
    if chat.generation.streams[0].calls:
        return "tool_use", None
    if isinstance(last.stop_reason, str):
        return "stop_sequence", last.stop_reason
    return "end_turn", None


KEPT = "/v1/responses/{response_id}"
POSTED = ("input_tokens", "compact")
"""Paths of this form that are no responses."""


def make_responses_router(state: ServingState) -> APIRouter:
    """Makes the routes over ``state``."""
    routes = APIRouter(tags=["responses"], route_class=BodyRoute)

    async def translate(body: ResponsesRequest, http: Request) -> tuple[InnerRequest, dict[str, str]]:
        return await translate_request(state, body, http, lambda: convert_responses(body, state.service.max_model_len))

    @routes.post("/v1/responses", response_model=ResponsesResponse)
    async def create(body: ResponsesRequest, http: Request) -> Response:
        """Continues a conversation."""
        return await respond_translated(state, body, http, translate, prepare_response, bool(body.stream))

    @routes.post("/v1/responses/input_tokens", response_model=InputTokens)
    async def input_tokens(body: ResponsesRequest, http: Request) -> Response:
        """The tokens of a conversation, images included."""
        return await respond_with_count(state, body, http, translate, lambda n: InputTokens(input_tokens=n))

    @routes.post("/v1/responses/compact", include_in_schema=False)
    async def compact() -> None:
        raise NotFound("This server does not compact conversations.")

    @routes.get(KEPT, include_in_schema=False)
    @routes.delete(KEPT, include_in_schema=False)
    @routes.get(f"{KEPT}/input_items", include_in_schema=False)
    @routes.post(f"{KEPT}/cancel", include_in_schema=False)
    async def refuse_stored_response(response_id: str, http: Request) -> None:
        if response_id in POSTED and http.url.path == f"/v1/responses/{response_id}":
            raise HTTPException(405, headers={"allow": "POST"})
        raise NotFound("This server is stateless: it keeps no responses.", param="response_id")

    return routes


async def prepare_response(
    state: ServingState, body: ResponsesRequest, inner: InnerRequest, http: Request, ticket: Ticket
) -> TranslatedRun:
    """Makes the run of a checked request.

    Raises:
        TrencadisError: the request cannot run.
    """
    id = make_request_id("resp", http, body.request_id, "_")
    chat = await prepare(state, inner.chat, http, ticket, id, fits=True, logprob_repeats=LOGPROB_REPEATS)
    params, tokenizer = chat.generation.params, state.service.tokenizer
    top = (chat.body.top_logprobs or 0) if chat.body.logprobs else None

    def make_entries(items: Sequence[TokenLogprob]) -> list[TokenEntry]:
        return [] if top is None else make_chat_entries(tokenizer, items, top, chat.as_ids)

    writer = ResponseWriter(make_initial_response(body, id, chat.model, params.temperature, params.top_p), make_entries)

    def complete(piece: TextPiece, reason: str | None) -> BaseModel:
        return writer.complete(reason, chat.usage)

    return TranslatedRun(chat, writer, StreamFormat(writer.make_failed_event, done=b""), complete)
