"""/pooling: returns pooled values of every task."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from trencadis.server.admission import Ticket
from trencadis.server.pooling.pooling_params import PoolingParams
from trencadis.server.protocol.pooling.pooling_requests import PoolRequest
from trencadis.server.protocol.pooling.pooling_responses import PoolingItem, PoolingResponse
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


async def pool_prompts(
    state: AppState, body: PoolRequest, http: Request, ticket: Ticket, params: PoolingParams
) -> ItemList | BytesAnswer:
    """The answer of a checked request."""
    prompts = await make_prompts(state, body, http, ticket, get_longest_input(state, params))
    made = await run_prompts(state, body, http, ticket, prompts, "pooling", params)
    pooling = get_pooling(state)
    if body.as_bytes:
        return make_bytes_answer(made, body, pooling, params)
    head = PoolingResponse(id=made.id, created=made.created, model=made.model, data=[], usage=made.usage)
    items = (write_item(PoolingItem(index=i, data=PLACE), raw, pooling, params, body) for i, raw in made.take_values())
    return ItemList(head, items)


def router(state: AppState) -> APIRouter:
    """Makes the route over ``state``."""
    routes = APIRouter(tags=["pooling"], route_class=BodyRoute)

    @routes.post("/pooling", response_model=PoolingResponse)
    async def pooling(body: PoolRequest, http: Request) -> Response:
        """Embeddings or probabilities, as the server makes them."""
        params, headers = check_pooling_request(state, body)
        ticket = enter_prompts(state, len(body.list_prompts()), "input")
        return await respond(http, ticket, pool_prompts(state, body, http, ticket, params), headers)

    return routes
