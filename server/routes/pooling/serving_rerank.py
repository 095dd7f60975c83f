"""/rerank, /v1/rerank and /v2/rerank, in the form of Jina and Cohere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from trencadis.server.admission import Ticket
from trencadis.server.pooling.pooling_params import PoolingParams
from trencadis.server.pooling.text_pairs import Content, Pair, read_content
from trencadis.server.protocol.pooling.pooling_requests import RerankRequest
from trencadis.server.protocol.pooling.pooling_responses import RankedDocument, RankedItem, RerankResponse
from trencadis.server.routes.app_state import AppState
from trencadis.server.routes.pooling.pair_scoring import score_pairs
from trencadis.server.routes.pooling.pooling_base import ItemList, check_pooling_request, enter_prompts, respond
from trencadis.server.routes.request_body import BodyRoute


async def rerank_documents(
    state: AppState, body: RerankRequest, http: Request, ticket: Ticket, params: PoolingParams, pairs: Sequence[Pair]
) -> ItemList:
    """Makes the answer of a checked request: the best document first, equal ones in the order of the request."""
    scores, made = await score_pairs(state, body, http, ticket, params, pairs, "rerank", body.max_tokens_per_doc)
    order = sorted(range(len(scores)), key=lambda i: -scores[i])
    head = RerankResponse(id=made.id, model=made.model, usage=made.usage, results=[])
    return ItemList(
        head,
        (
            RankedItem(
                index=i, document=_make_document(pairs[i].document) if body.return_documents else None,
                relevance_score=scores[i],
            )
            for i in order[: body.top_n or None]
        ),
    )  # fmt: skip


def _make_document(content: Content) -> RankedDocument:
    if isinstance(content, str):
        return RankedDocument(text=content)
    parts: list[Any] = [*content]
    return RankedDocument(multi_modal=parts)


def router(state: AppState) -> APIRouter:
    """Makes the routes over ``state``."""
    routes = APIRouter(tags=["pooling"], route_class=BodyRoute)

    @routes.post("/v2/rerank", response_model=RerankResponse)
    @routes.post("/v1/rerank", response_model=RerankResponse)
    @routes.post("/rerank", response_model=RerankResponse)
    async def rerank(body: RerankRequest, http: Request) -> Response:
        """Documents, sorted by how well they fit a query."""
        params, headers = check_pooling_request(state, body)
        query, documents = read_content(body.query, "query"), body.documents or []
        ticket = enter_prompts(state, len(documents), "documents")
        try:
            pairs = [Pair(query, read_content(d, "documents")) for d in documents]
        except BaseException:
            ticket.leave()
            raise
        return await respond(http, ticket, rerank_documents(state, body, http, ticket, params, pairs), headers)

    return routes
