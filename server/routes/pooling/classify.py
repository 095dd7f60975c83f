"""/classify."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from trencadis.core.checkpoint.pooling import CLASSIFY, Pooling
from trencadis.server.admission import Ticket
from trencadis.server.pooling.params import PoolingParams
from trencadis.server.pooling.vectors import Float64, as_floats, finished
from trencadis.server.protocol.pooling.answers import ClassifyResponse, ClassItem
from trencadis.server.protocol.pooling.requests import ClassifyRequest
from trencadis.server.routes.body import BodyRoute
from trencadis.server.routes.pooling.running import (
    Listed,
    checked,
    entered,
    label_of,
    pooling_of,
    prompts_of,
    respond,
    run,
)
from trencadis.server.routes.state import AppState


async def classified(
    state: AppState, body: ClassifyRequest, http: Request, ticket: Ticket, params: PoolingParams
) -> Listed:
    """The answer of a checked request."""
    prompts = await prompts_of(state, body, http, ticket)
    id, created, model, values, usage = await run(state, body, http, ticket, prompts, "classify", params)
    pooling = pooling_of(state)
    head = ClassifyResponse(id=id, created=created, model=model, data=[], usage=usage)
    return Listed(head, (_item(i, v, pooling, params) for i, v in enumerate(values)))


def _item(index: int, raw: Float64, pooling: Pooling, params: PoolingParams) -> ClassItem:
    probs = finished(raw, pooling, params)
    return ClassItem(index=index, label=label_of(pooling, probs), probs=as_floats(probs), num_classes=len(probs))


def router(state: AppState) -> APIRouter:
    """The route over ``state``."""
    routes = APIRouter(tags=["pooling"], route_class=BodyRoute)

    @routes.post("/classify", response_model=ClassifyResponse)
    async def classify(body: ClassifyRequest, http: Request) -> Response:
        """Probabilities of classes, of texts, ids or a conversation with images."""
        params, headers = checked(state, body, CLASSIFY)
        ticket = entered(state, len(body.prompts()), "input")
        return await respond(http, ticket, classified(state, body, http, ticket, params), headers)

    return routes
