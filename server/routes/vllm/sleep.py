"""Sleep mode, with ``--enable-sleep-mode``: the engine's process ends, and another one starts at wake-up."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Query
from starlette.responses import JSONResponse, Response

from trencadis.core.errors import BadRequest
from trencadis.server.engine.engine_client import EngineClient, get_replicas
from trencadis.server.routes.app_state import AppState

Mode = Literal["wait", "abort", "keep"]
Tag = Literal["weights", "kv_cache", "scheduling"]
LEVELS = (1, 2)


def router(state: AppState) -> APIRouter:
    """Makes the routes over ``state``; none without the flag."""
    routes = APIRouter(tags=["operation"], include_in_schema=False)
    if not state.settings.config.enable_sleep_mode:
        return routes

    def select_engines(rank: int) -> EngineClient:
        engines = get_replicas(state.engine)
        if rank >= len(engines):
            raise BadRequest(f"rank must be below {len(engines)}, the number of engines.", param="rank")
        return state.engine if rank < 0 else engines[rank]

    @routes.post("/sleep")
    async def sleep(level: int = 1, mode: Mode = "wait", rank: int = -1) -> Response:
        """Answers once all memory of the device is free. Requests that run are finished first, or aborted.

        ``rank``: one of several engines; new requests go to the others meanwhile.
        """
        if level not in LEVELS:
            raise BadRequest("level must be 1 or 2; both end the engine's process.", param="level")
        if mode == "keep":
            raise BadRequest("Requests that run cannot be kept: mode is wait or abort.", param="mode")
        await select_engines(rank).sleep(level, mode == "abort")
        return JSONResponse({"status": "sleeping", "level": level})

    @routes.post("/wake_up")
    async def wake_up(tags: Annotated[list[Tag] | None, Query()] = None, rank: int = -1) -> Response:
        """Answers once the engine takes requests; weights and blocks come back together, whatever the tags."""
        await select_engines(rank).wake()
        return JSONResponse({"status": "awake", "tags": tags})

    @routes.get("/is_sleeping")
    async def is_sleeping() -> dict[str, bool]:
        """Whether the engine sleeps; one that falls asleep or wakes up does."""
        return {"is_sleeping": state.engine.sleep_level > 0}

    return routes
