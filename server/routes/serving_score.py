"""/score and /v1/score.

Scores of pairs, for the routes that score and rerank: from a class head, label tokens, or cosines of embeddings.

/rerank, /v1/rerank and /v2/rerank, in the form of Jina and Cohere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from trencadis.core.checkpoint.pooling_description import EMBED
from trencadis.core.errors import BadRequest
from trencadis.core.json_types import Json
from trencadis.multimodal.media_parts_and_mm_processor_kwargs import MediaScope
from trencadis.multimodal.media_timing_and_concurrency import gather_or_cancel
from trencadis.server.prompts.pooling_prompts import Content, Pair, check_scores, make_pair_prompt, read_content
from trencadis.server.prompts.prompt_and_chat_messages import Prompt
from trencadis.server.protocol.pooler_output import compute_pair_score, cosine_similarity
from trencadis.server.protocol.pooling import (
    PairRequest,
    RankedDocument,
    RankedItem,
    RerankRequest,
    RerankResponse,
    ScoreItem,
    ScoreRequest,
    ScoreResponse,
)
from trencadis.server.protocol.pooling_params import PoolingParams
from trencadis.server.routes.json_io import BodyRoute
from trencadis.server.routes.pooling_base import (
    ItemList,
    PooledValues,
    check_pooling_request,
    enter_prompts,
    get_pooling,
    merge_pooled,
    respond,
    run_prompts,
)
from trencadis.server.routes.serving_base import ServingState
from trencadis.server.tenants.server_admission_and_byte_budgets import Ticket

AT_ONCE = 128
"""Pairs whose prompts are held in memory at a time: each holds a copy of the query."""


class PairScores(NamedTuple):
    """One score per pair, and the answer's id, time, model and usage."""

    scores: list[float]
    made: PooledValues


async def score_pairs(
    state: ServingState,
    body: PairRequest,
    http: Request,
    ticket: Ticket,
    params: PoolingParams,
    pairs: Sequence[Pair],
    prefix: str,
    document_tokens: int = 0,
) -> PairScores:
    """Scores all pairs.

    Raises:
        TrencadisError: the model gives pairs no score, a text or an image is at fault, or the engine fails.
    """
    pooling = get_pooling(state)
    check_scores(pooling)
    state.check_template(body.chat_template)
    scope = state.make_media_scope(body, http, ticket)
    if pooling.task == EMBED:
        if body.instruction:
            raise BadRequest("instruction is for chat models that judge (--convert classify).", param="instruction")
        return await _score_cosines(state, body, http, ticket, params, pairs, prefix, document_tokens, scope)
    variables = {**state.settings.config.default_chat_template_kwargs, **(body.chat_template_kwargs or {})}
    known: dict[str, list[int]] = {}
    parts = []
    for at in range(0, len(pairs), AT_ONCE):
        prompts = await gather_or_cancel(
            make_pair_prompt(
                state.service, pooling, pair, instruction=body.instruction or "", truncate=body.truncate_prompt_tokens,
                document_tokens=document_tokens, kwargs=variables, chat_template=body.chat_template, scope=scope,
                known=known,
            )
            for pair in pairs[at : at + AT_ONCE]
        )  # fmt: skip
        parts.append(await run_prompts(state, body, http, ticket, prompts, prefix, params))
    made = merge_pooled(parts)
    return PairScores([compute_pair_score(v, pooling, params) for v in made.values], made)


async def _score_cosines(
    state: ServingState, body: PairRequest, http: Request, ticket: Ticket, params: PoolingParams, pairs: Sequence[Pair],
    prefix: str, document_tokens: int, scope: MediaScope,
) -> PairScores:  # fmt: skip
    """Scores pairs by the cosine of their embeddings; a text in several pairs is embedded once."""
    index_of: dict[Json, int] = {}
    sides: list[tuple[Content, int]] = []

    def number(content: Content, most: int) -> int:
        key = (content, most) if isinstance(content, str) else id(content)
        if key not in index_of:
            index_of[key] = len(sides)
            sides.append((content, most))
        return index_of[key]

    numbers = [(number(p.query, 0), number(p.document, document_tokens)) for p in pairs]
    prompts = await gather_or_cancel(_make_side_prompt(state, body, content, most, scope) for content, most in sides)
    made = await run_prompts(state, body, http, ticket, prompts, prefix, params)
    return PairScores([cosine_similarity(made.values[a], made.values[b]) for a, b in numbers], made)


async def _make_side_prompt(
    state: ServingState, body: PairRequest, content: Content, most: int, scope: MediaScope
) -> Prompt:
    if isinstance(content, str):
        cut = most or body.truncate_prompt_tokens
        side = "right" if most else body.truncation_side or ""
        return await state.service.make_raw_prompt(content, truncate=cut, truncation_side=side)
    if state.service.template is None:
        raise BadRequest("This model has no chat template; it embeds texts alone.", param="documents")
    messages = [{"role": "user", "content": content}]
    return await state.service.make_chat_prompt(
        messages,
        add_generation_prompt=False,
        kwargs={**state.settings.config.default_chat_template_kwargs, **(body.chat_template_kwargs or {})},
        chat_template=body.chat_template,
        scope=scope,
    )


async def make_score_response(
    state: ServingState, body: ScoreRequest, http: Request, ticket: Ticket, params: PoolingParams, pairs: Sequence[Pair]
) -> ItemList:
    """Makes the answer of a checked request."""
    scores, made = await score_pairs(state, body, http, ticket, params, pairs, "score")
    head = ScoreResponse(id=made.id, created=made.created, model=made.model, data=[], usage=made.usage)
    return ItemList(head, (ScoreItem(index=i, score=score) for i, score in enumerate(scores)))


def router(state: ServingState) -> APIRouter:
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


async def rerank_documents(
    state: ServingState,
    body: RerankRequest,
    http: Request,
    ticket: Ticket,
    params: PoolingParams,
    pairs: Sequence[Pair],
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
    parts: list[Json] = [*content]
    return RankedDocument(multi_modal=parts)


def make_rerank_router(state: ServingState) -> APIRouter:
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
