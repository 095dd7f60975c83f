"""/v1/responses, without memory: a response is not stored once it is sent."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence

from fastapi import APIRouter
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from trencadis.core.errors import NotFound
from trencadis.core.request import TokenLogprob
from trencadis.server.prompts.logprob_format import TokenEntry, make_chat_entries
from trencadis.server.prompts.output_processor import TextPiece
from trencadis.server.protocol.responses import InputTokens, ResponsesRequest, ResponsesResponse
from trencadis.server.routes.app_state import AppState, make_request_id
from trencadis.server.routes.message_collector import InnerRequest
from trencadis.server.routes.request_body import BodyRoute
from trencadis.server.routes.responses_input import make_inner_request
from trencadis.server.routes.responses_output import RETOLD, ResponseWriter, make_initial_response
from trencadis.server.routes.serving_chat import prepare
from trencadis.server.routes.sse import StreamFormat
from trencadis.server.routes.translated_run import (
    TranslatedRun,
    count_prompt_tokens,
    respond_translated,
    translate_request,
)
from trencadis.server.tenants.admission import Ticket

KEPT = "/v1/responses/{response_id}"
POSTED = ("input_tokens", "compact")
"""Paths of this form that are no responses."""


def router(state: AppState) -> APIRouter:
    """Makes the routes over ``state``."""
    routes = APIRouter(tags=["responses"], route_class=BodyRoute)

    async def inner_of(body: ResponsesRequest, http: Request) -> tuple[InnerRequest, dict[str, str]]:
        return await translate_request(
            state, body, http, lambda: make_inner_request(body, state.service.max_model_len), body.input
        )

    @routes.post("/v1/responses", response_model=ResponsesResponse)
    async def create(body: ResponsesRequest, http: Request) -> Response:
        """Continues a conversation."""
        state.check_accepting()
        inner, headers = await inner_of(body, http)

        def run(ticket: Ticket) -> Awaitable[TranslatedRun]:
            return prepare_response(state, body, inner, http, ticket)

        return await respond_translated(state, http, inner, headers, run, bool(body.stream))

    @routes.post("/v1/responses/input_tokens", response_model=InputTokens)
    async def input_tokens(body: ResponsesRequest, http: Request) -> Response:
        """The tokens of a conversation, images included."""
        inner, headers = await inner_of(body, http)
        made = InputTokens(input_tokens=await count_prompt_tokens(state, http, inner))
        return Response(made.model_dump_json(), headers=headers, media_type="application/json")

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
    state: AppState, body: ResponsesRequest, inner: InnerRequest, http: Request, ticket: Ticket
) -> TranslatedRun:
    """Makes the run of a checked request.

    Raises:
        TrencadisError: the request cannot run.
    """
    id = make_request_id("resp", http, body.request_id, "_")
    chat = await prepare(state, inner.chat, http, ticket, id, fits=True, retold=RETOLD)
    params, tokenizer = chat.generation.params, state.service.tokenizer
    top = (chat.body.top_logprobs or 0) if chat.body.logprobs else None

    def make_entries(items: Sequence[TokenLogprob]) -> list[TokenEntry]:
        return [] if top is None else make_chat_entries(tokenizer, items, top, chat.as_ids)

    writer = ResponseWriter(make_initial_response(body, id, chat.model, params.temperature, params.top_p), make_entries)

    def complete(piece: TextPiece, reason: str | None) -> BaseModel:
        return writer.complete(reason, chat.usage)

    return TranslatedRun(chat, writer, StreamFormat(writer.make_failed_event, done=b""), complete)
