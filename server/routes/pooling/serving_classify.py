"""/classify."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from trencadis.core.checkpoint.pooling_config import CLASSIFY, Pooling
from trencadis.server.admission import Ticket
from trencadis.server.pooling.pooler_output import Raw, convert_to_floats, finish_pooled
from trencadis.server.pooling.pooling_params import PoolingParams
from trencadis.server.protocol.pooling.pooling_requests import ClassifyRequest
from trencadis.server.protocol.pooling.pooling_responses import ClassifyResponse, ClassItem
from trencadis.server.routes.app_state import AppState
from trencadis.server.routes.pooling.pooling_base import (
    ItemList,
    check_pooling_request,
    enter_prompts,
    get_label,
    get_pooling,
    make_prompts,
    respond,
    run_prompts,
)
from trencadis.server.routes.request_body import BodyRoute


async def classify_prompts(
    state: AppState, body: ClassifyRequest, http: Request, ticket: Ticket, params: PoolingParams
) -> ItemList:
    """Makes the answer of a checked request."""
    prompts = await make_prompts(state, body, http, ticket)
    id, created, model, values, usage = await run_prompts(state, body, http, ticket, prompts, "classify", params)
    pooling = get_pooling(state)
    head = ClassifyResponse(id=id, created=created, model=model, data=[], usage=usage)
    return ItemList(head, (_make_item(i, v, pooling, params) for i, v in enumerate(values)))


def _make_item(index: int, raw: Raw, pooling: Pooling, params: PoolingParams) -> ClassItem:
    probs = finish_pooled(raw, pooling, params)
    return ClassItem(
        index=index, label=get_label(pooling, probs), probs=convert_to_floats(probs), num_classes=len(probs)
    )


def router(state: AppState) -> APIRouter:
    """Makes the route over ``state``."""
    routes = APIRouter(tags=["pooling"], route_class=BodyRoute)

    @routes.post("/classify", response_model=ClassifyResponse)
    async def classify(body: ClassifyRequest, http: Request) -> Response:
        """Probabilities of classes, of texts, ids or a conversation with images."""
        params, headers = check_pooling_request(state, body, CLASSIFY)
        ticket = enter_prompts(state, len(body.list_prompts()), "input")
        return await respond(http, ticket, classify_prompts(state, body, http, ticket, params), headers)

    return routes
