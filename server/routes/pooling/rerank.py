"""/rerank, /v1/rerank and /v2/rerank, as Jina and Cohere have them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from trencadis.server.admission import Ticket
from trencadis.server.pooling.pairs import Content, Pair, content_of
from trencadis.server.pooling.params import PoolingParams
from trencadis.server.protocol.pooling.answers import RankedDocument, RankedItem, RerankResponse
from trencadis.server.protocol.pooling.requests import RerankRequest
from trencadis.server.routes.body import BodyRoute
from trencadis.server.routes.pooling.pairs import scored
from trencadis.server.routes.pooling.running import Listed, checked, entered, respond
from trencadis.server.routes.state import AppState


async def answered(
    state: AppState, body: RerankRequest, http: Request, ticket: Ticket, params: PoolingParams, pairs: Sequence[Pair]
) -> Listed:
    """The answer of a checked request: the best document first, equal ones in the order of the request."""
    scores, made = await scored(state, body, http, ticket, params, pairs, "rerank", body.max_tokens_per_doc)
    order = sorted(range(len(scores)), key=lambda i: -scores[i])
    head = RerankResponse(id=made.id, model=made.model, usage=made.usage, results=[])
    return Listed(
        head,
        (
            RankedItem(
                index=i, document=_shown(pairs[i].document) if body.return_documents else None,
                relevance_score=scores[i],
            )
            for i in order[: body.top_n or None]
        ),
    )  # fmt: skip


def _shown(content: Content) -> RankedDocument:
    if isinstance(content, str):
        return RankedDocument(text=content)
    parts: list[Any] = [*content]
    return RankedDocument(multi_modal=parts)


def router(state: AppState) -> APIRouter:
    """The routes over ``state``."""
    routes = APIRouter(tags=["pooling"], route_class=BodyRoute)

    @routes.post("/v2/rerank", response_model=RerankResponse)
    @routes.post("/v1/rerank", response_model=RerankResponse)
    @routes.post("/rerank", response_model=RerankResponse)
    async def rerank(body: RerankRequest, http: Request) -> Response:
        """Documents, sorted by how well they fit a query."""
        params, headers = checked(state, body)
        query, documents = content_of(body.query, "query"), body.documents or []
        ticket = entered(state, len(documents), "documents")
        try:
            pairs = [Pair(query, content_of(d, "documents")) for d in documents]
        except BaseException:
            ticket.leave()
            raise
        return await respond(http, ticket, answered(state, body, http, ticket, params, pairs), headers)

    return routes
