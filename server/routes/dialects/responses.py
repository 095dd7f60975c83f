"""/v1/responses, without a memory: nothing of a response is kept once it is sent."""

from __future__ import annotations

from collections.abc import Awaitable

from fastapi import APIRouter
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from trencadis.core.errors import NotFound
from trencadis.core.request import TokenLogprob
from trencadis.server.admission import Ticket
from trencadis.server.dialects.responses_input import inner_request
from trencadis.server.dialects.responses_output import ResponseWriter, begun
from trencadis.server.dialects.talk import InnerRequest
from trencadis.server.prompts.output import TextPiece
from trencadis.server.protocol.chat import TokenLogprobs
from trencadis.server.protocol.responses import ResponsesRequest
from trencadis.server.protocol.responses_output import InputTokens, ResponsesResponse
from trencadis.server.routes.body import BodyRoute
from trencadis.server.routes.chat import prepare
from trencadis.server.routes.dialects.running import DialectRun, answered, counted, translated
from trencadis.server.routes.sse import StreamForm
from trencadis.server.routes.state import AppState, request_id

KEPT = "/v1/responses/{response_id}"
POSTED = ("input_tokens", "compact")
"""Paths of this form that are no responses."""


def router(state: AppState) -> APIRouter:
    """The routes over ``state``."""
    routes = APIRouter(tags=["responses"], route_class=BodyRoute)

    async def inner_of(body: ResponsesRequest, http: Request) -> tuple[InnerRequest, dict[str, str]]:
        return await translated(state, body, http, lambda: inner_request(body, state.service.max_model_len), body.input)

    @routes.post("/v1/responses", response_model=ResponsesResponse)
    async def create(body: ResponsesRequest, http: Request) -> Response:
        """Continues a conversation."""
        state.check_accepting()
        inner, headers = await inner_of(body, http)

        def run(ticket: Ticket) -> Awaitable[DialectRun]:
            return prepared(state, body, inner, http, ticket)

        return await answered(state, http, inner, headers, run, bool(body.stream))

    @routes.post("/v1/responses/input_tokens", response_model=InputTokens)
    async def input_tokens(body: ResponsesRequest, http: Request) -> Response:
        """The tokens of a conversation, images included."""
        inner, headers = await inner_of(body, http)
        made = InputTokens(input_tokens=await counted(state, http, inner))
        return Response(made.model_dump_json(), headers=headers, media_type="application/json")

    @routes.post("/v1/responses/compact", include_in_schema=False)
    async def compact() -> None:
        raise NotFound("This server does not compact conversations.")

    @routes.get(KEPT, include_in_schema=False)
    @routes.delete(KEPT, include_in_schema=False)
    @routes.get(f"{KEPT}/input_items", include_in_schema=False)
    @routes.post(f"{KEPT}/cancel", include_in_schema=False)
    async def kept(response_id: str, http: Request) -> None:
        if response_id in POSTED and http.url.path == f"/v1/responses/{response_id}":
            raise HTTPException(405, headers={"allow": "POST"})
        raise NotFound("This server is stateless: it keeps no responses.", param="response_id")

    return routes


async def prepared(
    state: AppState, body: ResponsesRequest, inner: InnerRequest, http: Request, ticket: Ticket
) -> DialectRun:
    """The run of a checked request.

    Raises:
        TrencadisError: it cannot run.
    """
    id = request_id("resp", http, body.request_id, "_")
    chat = await prepare(state, inner.chat, http, ticket, id, fits=True)
    params = chat.generation.params

    def shown(items: list[TokenLogprob]) -> list[TokenLogprobs]:
        found = chat.logprobs(TextPiece("", logprobs=items)) if items else None
        return found.content or [] if found is not None else []

    writer = ResponseWriter(begun(body, id, chat.model, params.temperature, params.top_p), shown)

    def complete(piece: TextPiece, reason: str | None) -> BaseModel:
        return writer.complete(reason, chat.usage)

    return DialectRun(chat, writer, StreamForm(writer.failed, done=b""), complete)
