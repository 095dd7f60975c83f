"""Routes for development, only with ``--server-dev-mode`` (VLLM_SERVER_DEV_MODE): caches, and server settings.

Sleep mode, with ``--enable-sleep-mode``: the engine's process ends, and another one starts at wake-up.
"""

from __future__ import annotations

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Literal

from fastapi import APIRouter, Query
from starlette.responses import JSONResponse, Response

from trencadis import __version__
from trencadis.core import envs
from trencadis.core.errors import BadRequest, TrencadisError
from trencadis.core.flag_declaration import options
from trencadis.core.json_types import Json, JsonObject
from trencadis.server.engine.engine_client_and_request_timing import EngineClient, get_replicas
from trencadis.server.routes.serving_base import ServingState

MASK = "****"
SECRET_WORDS = ("KEY", "TOKEN", "SECRET", "PASSWORD", "CREDENTIALS")
PACKAGES = ("torch", "numpy", "tokenizers", "llguidance", "fastapi", "uvicorn", "msgspec")


class NotOffered(TrencadisError):
    """501: a route of vLLM's that needs a flag."""

    status = 501
    type = "NotImplementedError"


def router(state: ServingState) -> APIRouter:
    """Makes the routes over ``state``; none without the flag."""
    routes = APIRouter(tags=["development"], include_in_schema=False)
    if not state.settings.config.server_dev_mode:
        return routes

    @routes.post("/reset_prefix_cache")
    async def reset_prefix_cache(reset_running_requests: bool = False, reset_external: bool = False) -> dict[str, bool]:
        """Blocks that were computed so far are not found again; running requests go on."""
        if reset_running_requests:
            raise BadRequest("Running requests keep their blocks.", param="reset_running_requests")
        state.check_accepting()
        state.engine.reset_prefix_cache()
        return {"success": True}

    @routes.post("/reset_mm_cache")
    async def reset_mm_cache() -> Response:
        """Forgets decoded images and videos."""
        shared = state.settings.shared
        if shared is not None:
            await shared.forget_media()
        elif state.service.images is not None:
            state.service.images.cache.clear()
        return Response()

    @routes.post("/reset_encoder_cache")
    async def reset_encoder_cache() -> Response:
        """Forgets the embeddings of images that no running request waits for."""
        state.check_accepting()
        state.engine.reset_encoder_cache()
        return Response()

    @routes.get("/server_info")
    async def server_info(config_format: Literal["text", "json"] = "text") -> Response:
        """Flags, variables and versions; secrets are masked."""
        config = get_settings(state)
        shown: Json = config if config_format == "json" else "\n".join(f"{k} = {v!r}" for k, v in config.items())
        return JSONResponse({"vllm_config": shown, "vllm_env": list_variables(), "system_env": describe_system(state)})

    if state.settings.config.enable_sleep_mode:
        return routes

    @routes.post("/sleep")
    @routes.post("/wake_up")
    @routes.get("/is_sleeping")
    async def sleep() -> Response:
        """Always 501: another flag brings these routes."""
        raise NotOffered("Start the server with --enable-sleep-mode.")

    return routes


def get_settings(state: ServingState) -> JsonObject:
    """Returns the value of every flag; secrets are masked."""
    made: JsonObject = {}
    for config in (state.settings.engine, state.settings.config):
        for one, option in options(config):
            value = getattr(config, one.name)
            made[one.name] = MASK if option.secret and value else value
    return made


def list_variables() -> dict[str, str]:
    """Returns the VLLM_ and TRENCADIS_ variables that are set; secrets are masked."""
    found = {name: text for name, text in sorted(os.environ.items()) if name.startswith(envs.PREFIXES)}
    return {name: MASK if any(w in name for w in SECRET_WORDS) else text for name, text in found.items()}


def describe_system(state: ServingState) -> JsonObject:
    """Returns versions, and the device once it is known."""
    info = state.engine.info
    made = {"trencadis": __version__, "python": sys.version.split()[0], "platform": platform.platform()}
    for name in PACKAGES:
        try:
            made[name] = version(name)
        except PackageNotFoundError:
            continue
    return made | ({} if info is None else {"device": info.device, "dtype": info.dtype})


Mode = Literal["wait", "abort", "keep"]
Tag = Literal["weights", "kv_cache", "scheduling"]
LEVELS = (1, 2)


def make_sleep_router(state: ServingState) -> APIRouter:
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
