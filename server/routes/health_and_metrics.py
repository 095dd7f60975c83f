"""Probes, version and metrics. They only read counters; none runs the model.

``GET /buckets``: every planned shape with its state, cost and use, and the device's ledger.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import TypedDict

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import JSONResponse, Response

from trencadis import __version__
from trencadis.core.errors import Forbidden
from trencadis.core.json_types import Json, JsonObject
from trencadis.core.process.engine_messages import Phase
from trencadis.core.startup_progress_and_warmup_pacing import Warming
from trencadis.server.engine.engine_client_and_request_timing import EngineClient, get_replicas
from trencadis.server.metrics.bucket_metrics import describe_all_buckets
from trencadis.server.protocol.base_request import Strict
from trencadis.server.routes.serving_base import ServingState

CACHE_SECONDS = 1.0
FRESH_PAGES = 4
"""Pages of /metrics made in a second at most; requests beyond that get the last one."""
RENDER_SHARE = 0.05
"""CPU seconds of the event loop's thread for pages in a second, after which no further one is made in it: with many
tenants a page takes long."""


class ServerLoad(Strict):
    """Requests inside the server: choices count one each."""

    server_load: int


def router(state: ServingState) -> APIRouter:
    """Makes the routes over ``state``."""
    routes = APIRouter(tags=["operation"])
    engine = state.engine
    pages = PageCache(partial(_render_metrics, state))

    @routes.get("/health")
    async def health() -> Response:
        """200 if the server accepts requests; 503 while it loads or drains, or its engine is dead or stalled."""
        return make_health_report(engine, engine.accepting and engine.healthy)

    async def ping() -> Response:
        """``/health`` under SageMaker's name."""
        return make_health_report(engine, engine.accepting and engine.healthy)

    # its 405 response lists both methods
    routes.add_api_route("/ping", ping, methods=["GET", "POST"], include_in_schema=False)
    routes.get("/ping")(ping)
    routes.post("/ping")(ping)

    @routes.get("/live")
    async def live() -> Response:
        """200 unless the engine fails again and again."""
        failing = engine.failing
        return JSONResponse({"status": "failing" if failing else "ok"}, 503 if failing else 200)

    @routes.get("/ready")
    async def ready() -> Response:
        """200 if the server accepts requests and warm-up is done, as far as ``--warmup`` asks for it."""
        return make_health_report(engine, engine.ready and engine.healthy)

    @routes.get("/version")
    async def version() -> dict[str, str]:
        """The version, and the device once it is known."""
        info = engine.info
        return {"version": __version__} | ({"device": info.device} if info is not None else {})

    @routes.get("/stats")
    async def stats() -> JsonObject:
        """What the engine holds and has done, as JSON; /metrics has the same for Prometheus."""
        engines = get_replicas(engine)
        each = {"engines": [make_stats(e) for e in engines]} if len(engines) > 1 else {}
        turned = state.fair_queued
        whole = {**make_stats(engine), "takes_images": state.service.images is not None, **each}
        return whole | {"waiting": whole["waiting"] + turned, "waiting_for_turn": turned}

    @routes.get("/load", response_model=ServerLoad)
    async def load() -> ServerLoad:
        """How many choices the server works on or has in its queue."""
        return ServerLoad(server_load=state.admission.inside[0])

    @routes.get("/metrics")
    async def metrics() -> Response:
        """Prometheus' text format; any of several API processes tells the figures of all."""
        text = await pages.get()
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    return routes


async def _render_metrics(state: ServingState) -> bytes:
    shared = state.settings.shared
    return state.metrics.format_text() if shared is None else await shared.fetch_metrics()


@dataclass(slots=True)
class MadePage:
    """When a page was begun, and how many CPU seconds of this thread passed until it was made."""

    began: float
    seconds: float = 0.0


class PageCache:
    """Text that is expensive to make and that anybody may request.

    Once ``FRESH_PAGES`` of them were made within a second, or took ``RENDER_SHARE`` of it, the last one is sent again
    until a second has passed since the first of them.
    """

    def __init__(
        self,
        make: Callable[[], Awaitable[bytes]],
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._make, self._clock, self._cpu_clock = make, clock, cpu_clock
        self._made: deque[MadePage] = deque()
        self._last = b""

    async def get(self) -> bytes:
        """The text, at most a second old."""
        now = self._clock()
        while self._made and now - self._made[0].began >= CACHE_SECONDS:
            self._made.popleft()
        taken = sum(page.seconds for page in self._made)
        if len(self._made) < FRESH_PAGES and taken <= RENDER_SHARE * CACHE_SECONDS:
            page, begun = MadePage(now), self._cpu_clock()
            self._made.append(page)
            self._last = await self._make()
            page.seconds = self._cpu_clock() - begun
        return self._last or await self._make()


def make_health_report(engine: EngineClient, good: bool) -> Response:
    """Makes the report on the server and each engine; its status is 503 unless ``good``."""
    body: JsonObject = {
        "status": "ok" if good else "unavailable",
        "phase": engine.phase,
        "accepting": engine.accepting,
        "ready": engine.ready,
    }
    if engine.info is not None:
        body["device"] = engine.info.device
    if (going := get_warmup_progress(engine)) is not None:
        body["progress"] = going
    if len(engines := get_replicas(engine)) > 1:
        body["engines"] = [
            {"phase": e.phase, "accepting": e.accepting, "ready": e.ready, "restarts": e.restarts} for e in engines
        ]
    headers = {} if good else {"retry-after": "5"}
    return JSONResponse(body, 200 if good else 503, headers)


def make_stats(engine: EngineClient) -> JsonObject:
    """Returns the fields of ``/stats``: gauges as of the last step; counters since the engine's start."""
    now, info = engine.stats, engine.info
    return {
        "device": info.device if info is not None else None,
        "dtype": info.dtype if info is not None else None,
        "max_model_len": info.max_model_len if info is not None else None,
        "running": now.running,
        "waiting": now.waiting,
        "steps": now.steps,
        "preemptions": now.preemptions,
        "prompt_tokens": now.prompt_tokens,
        "generation_tokens": now.generation_tokens,
        "kv_blocks": {
            "used": now.kv_used, "total": now.kv_total, "cached": now.kv_cached, "evictions": now.kv_evictions,
            "tokens_each": info.block_size if info is not None else None,
        },
        "prefix_cache": {"queries": now.prefix_queries, "hits": now.prefix_hits},
        "speculation": {
            "drafts": now.spec_drafts, "draft_tokens": now.spec_draft_tokens, "accepted_tokens": now.spec_accepted,
        },
        "image_arena": {
            "used": now.arena_used, "total": now.arena_total, "queries": now.mm_queries, "hits": now.mm_hits,
            "encoded": now.images_encoded, "evictions": now.image_evictions,
        },
        "restarts": engine.restarts,
    }  # fmt: skip


class WarmupProgress(TypedDict):
    """Progress of loading or warm-up: units of work done and in all, and the estimated seconds left."""

    phase: str
    done: int
    total: int
    percent: float
    eta_seconds: float


def get_warmup_progress(engine: EngineClient) -> WarmupProgress | None:
    """Returns the progress of loading or background warm-up: phase, work done, percent, seconds left; None if
    neither runs.
    """
    now: Warming | Phase | None
    if engine.info is None or not engine.accepting or engine.sleep_level:
        now = engine.progress
        name, share = (now.name, now.fraction) if now is not None else ("", 0.0)
    else:
        now = engine.stats.graphs.warming
        if now is None and engine.plan is not None and engine.plan.warmup == "background":
            now = Warming(total=2 * len(engine.plan.buckets))
        name, share = (now.phase, now.fraction) if now is not None else ("", 0.0)
    if now is None or name == "warm":
        return None
    return {
        "phase": name, "done": now.done, "total": now.total, "percent": round(100 * share, 1),
        "eta_seconds": round(now.eta, 1),
    }  # fmt: skip


def make_bucket_router(state: ServingState) -> APIRouter:
    """Makes the route over ``state``."""
    routes = APIRouter(tags=["operation"])

    @routes.get("/buckets", response_model=JsonObject)
    async def buckets() -> Json:
        """Counts since the start of the server; a device without planned shapes has counts by stage only.

        Several engines have an object each, in ``engines``.
        """
        shared = state.settings.shared
        if shared is not None:
            return Response(await shared.fetch_buckets(), media_type="application/json")
        return describe_all_buckets(get_replicas(state.engine), state.metrics.bucket_metrics)

    @routes.post("/buckets/learn", include_in_schema=False)
    async def learn(force: bool = False) -> dict[str, str]:
        """Searches shapes for the traffic so far, and has them judged by later traffic; ``/buckets`` shows the outcome.

        ``force`` (with ``--server-dev-mode``): the shapes change to what is found, whatever it gains.
        """
        if force and not state.settings.config.server_dev_mode:
            raise Forbidden("force needs --server-dev-mode.")
        state.check_accepting()
        await state.engine.learn_buckets(force)
        return {"status": "searching"}

    return routes
