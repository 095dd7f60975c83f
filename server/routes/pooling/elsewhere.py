"""Routes that this server has not, because it was started for the other kind of answer: a 404 that names the flag."""

from __future__ import annotations

from collections.abc import Iterable

from fastapi import APIRouter
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from trencadis.core.errors import NotFound

ELSEWHERE = "elsewhere"
"""Name of these routes, by which the list of a server's routes leaves them out."""


def elsewhere(routers: Iterable[APIRouter], pools: bool) -> APIRouter:
    """The paths of ``routers``, each answered with 404.

    Args:
        pools: whether this server pools.
    """
    made = APIRouter()
    line = "this server pools; --runner generate" if pools else "this server generates; --runner pooling"

    async def refuse(http: Request) -> Response:
        raise NotFound(f"{http.url.path[:100]}: {line} serves it.")

    for one in routers:
        for route in one.routes:
            if isinstance(route, APIRoute):
                made.add_api_route(
                    route.path, refuse, methods=sorted(route.methods or ()), include_in_schema=False, name=ELSEWHERE
                )
    return made
