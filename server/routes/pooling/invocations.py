"""/invocations, SageMaker's only route: forwards a body to the route whose fields it has."""

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

from trencadis.core.errors import BadRequest
from trencadis.server.routes.request_body import BodyRoute

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
    async def invoke(body: dict[str, Any], http: Request) -> Response:
        """Answers as the route does whose fields the body has."""
        found = (path for path, fields in FIELDS if path in known and all(body.get(f) is not None for f in fields))
        path = next(found, otherwise)
        if path not in known:
            raise BadRequest("The body fits no route of this server; give messages or prompt.")
        endpoint = known[path]
        return await endpoint(parse_request(endpoint, body), http)

    return made


def parse_request(endpoint: Endpoint, body: dict[str, Any]) -> BaseModel:
    """Returns the request that ``endpoint`` takes.

    Raises:
        RequestValidationError: the body is no such request.
    """
    kind: type[BaseModel] = get_type_hints(endpoint)[next(iter(signature(endpoint).parameters))]
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise RequestValidationError(error.errors()) from None
