"""Scores of pairs, for the routes that score and rerank: a class head, label tokens, or cosines of embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from starlette.requests import Request

from trencadis.core.checkpoint.pooling import EMBED
from trencadis.core.errors import BadRequest
from trencadis.multimodal.gather import gather_or_cancel
from trencadis.multimodal.options import MediaScope
from trencadis.server.admission import Ticket
from trencadis.server.pooling.pairs import Content, Pair, check_scores, pair_prompt
from trencadis.server.pooling.params import PoolingParams
from trencadis.server.pooling.vectors import cosine, pair_score
from trencadis.server.prompts.prompt import Prompt
from trencadis.server.protocol.pooling.requests import PairRequest
from trencadis.server.routes.pooling.running import Pooled, pooling_of, run, together
from trencadis.server.routes.state import AppState

AT_ONCE = 128
"""Pairs whose prompts are held at a time: each holds the query again."""


class Scored(NamedTuple):
    """One score a pair, and the answer's id, time, model and usage."""

    scores: list[float]
    made: Pooled


async def scored(
    state: AppState,
    body: PairRequest,
    http: Request,
    ticket: Ticket,
    params: PoolingParams,
    pairs: Sequence[Pair],
    prefix: str,
    document_tokens: int = 0,
) -> Scored:
    """Scores all pairs.

    Raises:
        TrencadisError: the model gives pairs no score, a text or an image is at fault, or the engine fails.
    """
    pooling = pooling_of(state)
    check_scores(pooling)
    state.check_template(body.chat_template)
    scope = state.scope(body, http, ticket)
    if pooling.task == EMBED:
        if body.instruction:
            raise BadRequest("instruction is for chat models that judge (--convert classify).", param="instruction")
        return await _cosines(state, body, http, ticket, params, pairs, prefix, document_tokens, scope)
    variables = {**state.settings.config.default_chat_template_kwargs, **(body.chat_template_kwargs or {})}
    known: dict[str, list[int]] = {}
    parts = []
    for at in range(0, len(pairs), AT_ONCE):
        prompts = await gather_or_cancel(
            pair_prompt(
                state.service, pooling, pair, instruction=body.instruction or "", truncate=body.truncate_prompt_tokens,
                document_tokens=document_tokens, kwargs=variables, chat_template=body.chat_template, scope=scope,
                known=known,
            )
            for pair in pairs[at : at + AT_ONCE]
        )  # fmt: skip
        parts.append(await run(state, body, http, ticket, prompts, prefix, params))
    made = together(parts)
    return Scored([pair_score(v, pooling, params) for v in made.values], made)


async def _cosines(
    state: AppState, body: PairRequest, http: Request, ticket: Ticket, params: PoolingParams, pairs: Sequence[Pair],
    prefix: str, document_tokens: int, scope: MediaScope,
) -> Scored:  # fmt: skip
    """Each text or conversation is embedded once, in however many pairs it stands."""
    place: dict[Any, int] = {}
    sides: list[tuple[Content, int]] = []

    def number(content: Content, most: int) -> int:
        key = (content, most) if isinstance(content, str) else id(content)
        if key not in place:
            place[key] = len(sides)
            sides.append((content, most))
        return place[key]

    numbers = [(number(p.query, 0), number(p.document, document_tokens)) for p in pairs]
    prompts = await gather_or_cancel(_side(state, body, content, most, scope) for content, most in sides)
    made = await run(state, body, http, ticket, prompts, prefix, params)
    return Scored([cosine(made.values[a], made.values[b]) for a, b in numbers], made)


async def _side(state: AppState, body: PairRequest, content: Content, most: int, scope: MediaScope) -> Prompt:
    if isinstance(content, str):
        cut = most or body.truncate_prompt_tokens
        side = "right" if most else body.truncation_side or ""
        return await state.service.raw_prompt(content, truncate=cut, truncation_side=side)
    if state.service.template is None:
        raise BadRequest("This model has no chat template; it embeds texts alone.", param="documents")
    talk = [{"role": "user", "content": content}]
    return await state.service.chat_prompt(
        talk,
        add_generation_prompt=False,
        kwargs={**state.settings.config.default_chat_template_kwargs, **(body.chat_template_kwargs or {})},
        chat_template=body.chat_template,
        scope=scope,
    )
