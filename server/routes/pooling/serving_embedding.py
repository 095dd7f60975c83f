"""/v1/embeddings."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from trencadis.core.checkpoint.pooling_config import EMBED
from trencadis.server.admission import Ticket
from trencadis.server.pooling.pooling_params import PoolingParams
from trencadis.server.protocol.pooling.pooling_requests import EmbeddingRequest
from trencadis.server.protocol.pooling.pooling_responses import EmbeddingItem, EmbeddingResponse
from trencadis.server.routes.app_state import AppState
from trencadis.server.routes.pooling.pooling_base import (
    PLACE,
    BytesAnswer,
    ItemList,
    check_pooling_request,
    enter_prompts,
    get_longest_input,
    get_pooling,
    make_bytes_answer,
    make_prompts,
    respond,
    run_prompts,
    write_item,
)
from trencadis.server.routes.request_body import BodyRoute


async def embed_prompts(
    state: AppState, body: EmbeddingRequest, http: Request, ticket: Ticket, params: PoolingParams
) -> ItemList | BytesAnswer:
    """The answer of a checked request."""
    prompts = await make_prompts(state, body, http, ticket, get_longest_input(state, params))
    made = await run_prompts(state, body, http, ticket, prompts, "embd", params)
    pooling = get_pooling(state)
    if body.as_bytes:
        return make_bytes_answer(made, body, pooling, params)
    head = EmbeddingResponse(id=made.id, created=made.created, model=made.model, data=[], usage=made.usage)
    items = (
        write_item(EmbeddingItem(index=i, embedding=PLACE), raw, pooling, params, body) for i, raw in made.take_values()
    )
    return ItemList(head, items)


def router(state: AppState) -> APIRouter:
    """Makes the route over ``state``."""
    routes = APIRouter(tags=["pooling"], route_class=BodyRoute)

    @routes.post("/v1/embeddings", response_model=EmbeddingResponse)
    async def embeddings(body: EmbeddingRequest, http: Request) -> Response:
        """Embeddings of texts, ids or a conversation with images."""
        params, headers = check_pooling_request(state, body, EMBED)
        ticket = enter_prompts(state, len(body.list_prompts()), "input")
        return await respond(http, ticket, embed_prompts(state, body, http, ticket, params), headers)

    return routes
