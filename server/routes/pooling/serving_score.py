"""/score and /v1/score."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from trencadis.server.admission import Ticket
from trencadis.server.pooling.pooling_params import PoolingParams
from trencadis.server.pooling.text_pairs import Pair, read_content
from trencadis.server.protocol.pooling.pooling_requests import ScoreRequest
from trencadis.server.protocol.pooling.pooling_responses import ScoreItem, ScoreResponse
from trencadis.server.routes.app_state import AppState
from trencadis.server.routes.pooling.pair_scoring import score_pairs
from trencadis.server.routes.pooling.pooling_base import ItemList, check_pooling_request, enter_prompts, respond
from trencadis.server.routes.request_body import BodyRoute


async def make_score_response(
    state: AppState, body: ScoreRequest, http: Request, ticket: Ticket, params: PoolingParams, pairs: Sequence[Pair]
) -> ItemList:
    """Makes the answer of a checked request."""
    scores, made = await score_pairs(state, body, http, ticket, params, pairs, "score")
    head = ScoreResponse(id=made.id, created=made.created, model=made.model, data=[], usage=made.usage)
    return ItemList(head, (ScoreItem(index=i, score=score) for i, score in enumerate(scores)))


def router(state: AppState) -> APIRouter:
    """Makes the routes over ``state``."""
    routes = APIRouter(tags=["pooling"], route_class=BodyRoute)

    @routes.post("/v1/score", response_model=ScoreResponse)
    @routes.post("/score", response_model=ScoreResponse)
    async def score(body: ScoreRequest, http: Request) -> Response:
        """How well pairs of texts fit."""
        params, headers = check_pooling_request(state, body)
        queries, documents = body.get_sides()
        ticket = enter_prompts(state, len(documents), "text_2")
        try:
            pairs = [
                Pair(read_content(q, "text_1"), read_content(d, "text_2"))
                for q, d in zip(queries, documents, strict=True)
            ]
        except BaseException:
            ticket.leave()
            raise
        return await respond(http, ticket, make_score_response(state, body, http, ticket, params, pairs), headers)

    return routes
