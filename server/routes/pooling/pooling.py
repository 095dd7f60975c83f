"""/pooling: what the engine pools, whatever that is."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from trencadis.server.admission import Ticket
from trencadis.server.pooling.params import PoolingParams
from trencadis.server.protocol.pooling.answers import PoolingItem, PoolingResponse
from trencadis.server.protocol.pooling.requests import PoolRequest
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


async def answered(state: AppState, body: PoolRequest, http: Request, ticket: Ticket, params: PoolingParams) -> Listed:
    """The answer of a checked request."""
    prompts = await prompts_of(state, body, http, ticket)
    id, created, model, values, usage = await run(state, body, http, ticket, prompts, "pool", params)
    pooling, form = pooling_of(state), body.encoding_format
    head = PoolingResponse(id=id, created=created, model=model, data=[], usage=usage)
    return Listed(head, (PoolingItem(index=i, data=vector(v, pooling, params, form)) for i, v in enumerate(values)))


def router(state: AppState) -> APIRouter:
    """The route over ``state``."""
    routes = APIRouter(tags=["pooling"], route_class=BodyRoute)

    @routes.post("/pooling", response_model=PoolingResponse)
    async def pooling(body: PoolRequest, http: Request) -> Response:
        """Embeddings or probabilities, as the server makes them."""
        params, headers = checked(state, body)
        ticket = entered(state, len(body.prompts()), "input")
        return await respond(http, ticket, answered(state, body, http, ticket, params), headers)

    return routes
