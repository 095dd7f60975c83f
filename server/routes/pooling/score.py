"""/score and /v1/score."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from trencadis.server.admission import Ticket
from trencadis.server.pooling.pairs import Pair, content_of
from trencadis.server.pooling.params import PoolingParams
from trencadis.server.protocol.pooling.answers import ScoreItem, ScoreResponse
from trencadis.server.protocol.pooling.requests import ScoreRequest
from trencadis.server.routes.body import BodyRoute
from trencadis.server.routes.pooling.pairs import scored
from trencadis.server.routes.pooling.running import Listed, checked, entered, respond
from trencadis.server.routes.state import AppState


async def answered(
    state: AppState, body: ScoreRequest, http: Request, ticket: Ticket, params: PoolingParams, pairs: Sequence[Pair]
) -> Listed:
    """The answer of a checked request."""
    scores, made = await scored(state, body, http, ticket, params, pairs, "score")
    head = ScoreResponse(id=made.id, created=made.created, model=made.model, data=[], usage=made.usage)
    return Listed(head, (ScoreItem(index=i, score=score) for i, score in enumerate(scores)))


def router(state: AppState) -> APIRouter:
    """The routes over ``state``."""
    routes = APIRouter(tags=["pooling"], route_class=BodyRoute)

    @routes.post("/v1/score", response_model=ScoreResponse)
    @routes.post("/score", response_model=ScoreResponse)
    async def score(body: ScoreRequest, http: Request) -> Response:
        """How well pairs of texts fit."""
        params, headers = checked(state, body)
        queries, documents = body.sides()
        ticket = entered(state, len(documents), "text_2")
        try:
            pairs = [
                Pair(content_of(q, "text_1"), content_of(d, "text_2")) for q, d in zip(queries, documents, strict=True)
            ]
        except BaseException:
            ticket.leave()
            raise
        return await respond(http, ticket, answered(state, body, http, ticket, params, pairs), headers)

    return routes
