"""/pooling: returns pooled values of every task.

/classify.

/invocations, SageMaker's only route: forwards a body to the route whose fields it has.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from inspect import signature
from typing import Any, get_type_hints

from fastapi import APIRouter
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from trencadis.core.checkpoint.pooling_config import CLASSIFY, Pooling
from trencadis.core.errors import BadRequest
from trencadis.core.json_types import JsonObject
from trencadis.server.protocol.pooler_output import Raw, convert_to_floats, finish_pooled
from trencadis.server.protocol.pooling_params import PoolingParams
from trencadis.server.protocol.pooling_requests import ClassifyRequest, PoolRequest
from trencadis.server.protocol.pooling_responses import ClassifyResponse, ClassItem, PoolingItem, PoolingResponse
from trencadis.server.routes.app_state import AppState
from trencadis.server.routes.pooling_base import (
    PLACE,
    BytesAnswer,
    ItemList,
    check_pooling_request,
    enter_prompts,
    get_label,
    get_longest_input,
    get_pooling,
    make_bytes_answer,
    make_prompts,
    respond,
    run_prompts,
    write_item,
)
from trencadis.server.routes.request_body import BodyRoute
from trencadis.server.tenants.admission import Ticket


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


def make_classify_router(state: AppState) -> APIRouter:
    """Makes the route over ``state``."""
    routes = APIRouter(tags=["pooling"], route_class=BodyRoute)

    @routes.post("/classify", response_model=ClassifyResponse)
    async def classify(body: ClassifyRequest, http: Request) -> Response:
        """Probabilities of classes, of texts, ids or a conversation with images."""
        params, headers = check_pooling_request(state, body, CLASSIFY)
        ticket = enter_prompts(state, len(body.list_prompts()), "input")
        return await respond(http, ticket, classify_prompts(state, body, http, ticket, params), headers)

    return routes


Endpoint = Callable[[Any, Request], Awaitable[Response]]

FIELDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("/v1/chat/completions", ("messages",)),
    ("/v1/completions", ("prompt",)),
    ("/rerank", ("query", "documents")),
    ("/score", ("text_1",)),
    ("/score", ("queries",)),
    ("/score", ("data_1",)),
    ("/pooling", ("task",)),
)
"""Paths, and the fields that a body for them has; other bodies go to a pooling server's first route. """


def make_router(routers: Iterable[APIRouter], otherwise: str) -> APIRouter:
    """Makes the route over the endpoints of ``routers``; ``otherwise``: the path for a body with no known field."""
    known: Mapping[str, Endpoint] = {
        route.path: route.endpoint for one in routers for route in one.routes if isinstance(route, APIRoute)
    }
    made = APIRouter(tags=["operation"], route_class=BodyRoute)

    @made.post("/invocations", include_in_schema=False)
    async def invoke(body: JsonObject, http: Request) -> Response:
        """Answers as the route does whose fields the body has."""
        found = (path for path, fields in FIELDS if path in known and all(body.get(f) is not None for f in fields))
        path = next(found, otherwise)
        if path not in known:
            raise BadRequest("The body fits no route of this server; give messages or prompt.")
        endpoint = known[path]
        return await endpoint(parse_request(endpoint, body), http)

    return made


def parse_request(endpoint: Endpoint, body: JsonObject) -> BaseModel:
    """Returns the request that ``endpoint`` takes.

    Raises:
        RequestValidationError: the body is no such request.
    """
    kind: type[BaseModel] = get_type_hints(endpoint)[next(iter(signature(endpoint).parameters))]
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise RequestValidationError(error.errors()) from None
