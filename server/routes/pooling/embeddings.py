"""/v1/embeddings."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from trencadis.core.checkpoint.pooling import EMBED
from trencadis.server.admission import Ticket
from trencadis.server.pooling.params import PoolingParams
from trencadis.server.protocol.pooling.answers import EmbeddingItem, EmbeddingResponse
from trencadis.server.protocol.pooling.requests import EmbeddingRequest
from trencadis.server.routes.body import BodyRoute
from trencadis.server.routes.pooling.running import (
    Listed,
    checked,
    entered,
    pooling_of,
    prompts_of,
    respond,
    run,
    vector,
)
from trencadis.server.routes.state import AppState


async def embedded(
    state: AppState, body: EmbeddingRequest, http: Request, ticket: Ticket, params: PoolingParams
) -> Listed:
    """The answer of a checked request."""
    prompts = await prompts_of(state, body, http, ticket)
    id, created, model, values, usage = await run(state, body, http, ticket, prompts, "embd", params)
    pooling, form = pooling_of(state), body.encoding_format
    head = EmbeddingResponse(id=id, created=created, model=model, data=[], usage=usage)
    items = (EmbeddingItem(index=i, embedding=vector(v, pooling, params, form)) for i, v in enumerate(values))
    return Listed(head, items)


def router(state: AppState) -> APIRouter:
    """The route over ``state``."""
    routes = APIRouter(tags=["pooling"], route_class=BodyRoute)

    @routes.post("/v1/embeddings", response_model=EmbeddingResponse)
    async def embeddings(body: EmbeddingRequest, http: Request) -> Response:
        """Embeddings of texts, ids or a conversation with images."""
        params, headers = checked(state, body, EMBED)
        ticket = entered(state, len(body.prompts()), "input")
        return await respond(http, ticket, embedded(state, body, http, ticket, params), headers)

    return routes
