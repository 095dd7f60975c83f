"""/v1/messages and /v1/messages/count_tokens, in the form of Anthropic's clients."""

from __future__ import annotations

from collections.abc import Awaitable

from fastapi import APIRouter
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from trencadis.core.errors import TrencadisError
from trencadis.server.prompts.output_processor import TextPiece
from trencadis.server.protocol.anthropic_messages import (
    CountTokensRequest,
    MessagesRequest,
    MessagesResponse,
    MessagesUsage,
    TokenCount,
)
from trencadis.server.routes.anthropic_input import make_inner_request
from trencadis.server.routes.anthropic_output import PING, MessageWriter, encode_error_event
from trencadis.server.routes.app_state import AppState, make_request_id
from trencadis.server.routes.message_collector import InnerRequest
from trencadis.server.routes.request_body import BodyRoute
from trencadis.server.routes.serving_chat import RunningChat, prepare
from trencadis.server.routes.sse import StreamFormat
from trencadis.server.routes.translated_run import (
    TranslatedRun,
    count_prompt_tokens,
    respond_translated,
    translate_request,
)
from trencadis.server.tenants.admission import Ticket


def router(state: AppState) -> APIRouter:
    """Makes the routes over ``state``."""
    routes = APIRouter(tags=["messages"], route_class=BodyRoute)

    async def inner_of(body: CountTokensRequest, http: Request) -> tuple[InnerRequest, dict[str, str]]:
        def translate() -> InnerRequest:
            reasons = state.parsers.for_template(body.chat_template).reasoning is not None
            return make_inner_request(body, lambda name: state.mentions(body.chat_template, name), reasons)

        return await translate_request(state, body, http, translate, body.messages, body.system, body.tools)

    @routes.post("/v1/messages", response_model=MessagesResponse)
    async def create(body: MessagesRequest, http: Request) -> Response:
        """Continues a conversation."""
        state.check_accepting()
        inner, headers = await inner_of(body, http)

        def run(ticket: Ticket) -> Awaitable[TranslatedRun]:
            return prepare_message(state, body, inner, http, ticket)

        return await respond_translated(state, http, inner, headers, run, bool(body.stream))

    @routes.post("/v1/messages/count_tokens", response_model=TokenCount)
    async def count_tokens(body: CountTokensRequest, http: Request) -> Response:
        """The tokens of a conversation, images included."""
        inner, headers = await inner_of(body, http)
        made = TokenCount(input_tokens=await count_prompt_tokens(state, http, inner))
        return Response(made.model_dump_json(), headers=headers, media_type="application/json")

    return routes


async def prepare_message(
    state: AppState, body: MessagesRequest, inner: InnerRequest, http: Request, ticket: Ticket
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
