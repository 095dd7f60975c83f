"""Routes that this server lacks because it was started for the other task: a 400 that names the task."""

from __future__ import annotations

from collections.abc import Iterable

from fastapi import APIRouter
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from trencadis.core.checkpoint.pooling_config import Pooling
from trencadis.core.errors import BadRequest

WRONG_TASK = "elsewhere"
"""Name of these routes, by which they are left out of the list of a server's routes."""


def make_wrong_task_router(routers: Iterable[APIRouter], pooling: Pooling | None) -> APIRouter:
    """Makes a router with the paths of ``routers``, each answered with 400.

    Args:
        pooling: the pooling settings of this server; None: it generates.
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
