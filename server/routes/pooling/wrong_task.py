"""Routes that this server has not, because it was started for the other kind of answer: a 400 that names the task."""

from __future__ import annotations

from collections.abc import Iterable

from fastapi import APIRouter
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from trencadis.core.checkpoint.pooling_config import Pooling
from trencadis.core.errors import BadRequest

WRONG_TASK = "elsewhere"
"""Name of these routes, by which the list of a server's routes leaves them out."""


def make_wrong_task_router(routers: Iterable[APIRouter], pooling: Pooling | None) -> APIRouter:
    """The paths of ``routers``, each answered with 400.

    Args:
        pooling: how this server pools; None: it generates.
    """
    made = APIRouter()
    line = "this server's task is generate; --runner pooling"
    if pooling is not None:
        line = f"this server's task is {pooling.tasks[0]}; --runner generate"

    async def refuse(http: Request) -> Response:
        raise BadRequest(f"{http.url.path[:100]}: {line} serves it.")

    for one in routers:
        for route in one.routes:
            if isinstance(route, APIRoute):
                made.add_api_route(
                    route.path, refuse, methods=sorted(route.methods or ()), include_in_schema=False, name=WRONG_TASK
                )
    return made
