"""The FastAPI application."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import partial

from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from trencadis import __version__
from trencadis.core.checkpoint.pooling_description import CLASSIFY, EMBED, Pooling
from trencadis.core.errors import BadRequest, TrencadisError, from_status
from trencadis.core.json_types import Json
from trencadis.server.http.fair_admission import FairAdmissionMiddleware
from trencadis.server.http.request_middleware import RequestMiddleware, describe_missing_path, make_error_response
from trencadis.server.metrics.prometheus import ThroughputLog, make_preemption_warning
from trencadis.server.metrics.request_record_logs_and_metrics import end_request
from trencadis.server.routes import (
    dev_mode,
    health_and_metrics,
    page_routes,
    serving_chat,
    serving_completion,
    serving_models,
    serving_pooling,
    serving_responses_messages,
    serving_score,
    serving_tokenization,
)
from trencadis.server.routes.api_keys_and_allowed_hosts import HostRules, Keys
from trencadis.server.routes.app_state import AppState
from trencadis.server.routes.openapi import cache_openapi, make_openapi
from trencadis.server.routes.serving_base import ServingState
from trencadis.server.routes.serving_pooling import make_router

WRONG_TASK = "elsewhere"
"""Name of the routes of the other task, by which they are left out of the list of a server's routes."""
log = logging.getLogger("trencadis.server")
GENERATING = (
    serving_chat.router,
    serving_chat.make_chat_batch_router,
    serving_completion.router,
    serving_responses_messages.make_responses_router,
    serving_responses_messages.make_messages_router,
)
POOLING = (
    serving_pooling.make_embedding_router,
    serving_pooling.make_cohere_embed_router,
    serving_pooling.router,
    serving_pooling.make_classify_router,
    serving_score.router,
    serving_score.make_rerank_router,
)
_DEFAULT = {EMBED: "/v1/embeddings", CLASSIFY: "/classify"}
"""Routes to which ``/invocations`` sends the requests of a pooling server, by the first task that it does; those of
other tasks go to /pooling.
"""


class MethodNotAllowed(TrencadisError):
    """Error 405: the path supports other methods."""

    status = 405
    type = "MethodNotAllowedError"


def create_app(state: ServingState) -> FastAPI:
    """Builds the application over ``state``, which is its ``app.state.trencadis``."""
    config = state.settings.config

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        task = None if config.disable_log_stats else asyncio.create_task(_log_stats(state))
        yield
        if task is not None:
            task.cancel()

    docs = not config.disable_fastapi_docs
    # --root-path is passed to uvicorn, which adds it to each request's scope; FastAPI no longer accepts one.
    app = FastAPI(
        title="Trencadis",
        version=__version__,
        lifespan=lifespan,
        docs_url="/docs" if docs else None,
        redoc_url="/redoc" if docs else None,
        openapi_url="/openapi.json" if docs else None,
        middleware=_make_middleware(state),
    )
    app.state.trencadis = state
    app.openapi = make_openapi(app)  # type: ignore[method-assign]
    cache_openapi(app)
    _include_routes(app, state)
    app.add_exception_handler(TrencadisError, _on_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    return app


def _include_routes(app: FastAPI, state: ServingState) -> None:
    """Adds the routes of a generating or of a pooling server, and the web page; paths of the other kind answer with
    the flag that enables them.
    """
    how = state.service.config.pooling
    routers = [make(state) for make in GENERATING], [make(state) for make in POOLING]
    other, own = routers if how is not None else routers[::-1]
    common = (
        serving_models.router,
        serving_tokenization.router,
        serving_tokenization.make_tokenizer_info_router,
        health_and_metrics.router,
        health_and_metrics.make_bucket_router,
        serving_models.make_adapters_router,
        dev_mode.make_sleep_router,
        dev_mode.router,
    )
    for router in (*own, *(make(state) for make in common)):
        app.include_router(router)
    app.include_router(make_router(own, "" if how is None else _DEFAULT.get(how.tasks[0], "/pooling")))
    app.include_router(make_wrong_task_router(other, how))
    if not state.settings.config.disable_page:
        app.include_router(page_routes.router(state.settings.config.root_path))


def _make_middleware(state: AppState) -> list[Middleware]:
    config = state.settings.config
    public = frozenset() if config.disable_page else page_routes.list_open_paths()
    guards_metrics = config.metrics_auth or (state.tenants is not None and not config.metrics_open)
    keys = Keys(config.api_key, guards_metrics, public, state.tenants)

    ended = partial(end_request, max_log_len=config.max_log_len, traces=state.traces)
    gate = Middleware(
        RequestMiddleware, keys=keys, max_body=config.max_body_bytes, observe=state.metrics.http.observe,
        bodies=state.admission.bodies, receive_timeout=config.receive_timeout, request_timeout=config.request_timeout,
        most_headers=config.h11_max_header_count, ended=ended, load=state.make_load_header,
        host_rules=HostRules.from_config(config), count_refusal=state.metrics.http.count_refusal,
    )  # fmt: skip
    inner = [gate]
    if state.fair_queue is not None:
        inner.append(Middleware(FairAdmissionMiddleware, queue=state.fair_queue, admission=state.admission))
    if not config.allowed_origins:
        return inner
    cors = Middleware(
        CORSMiddleware,
        allow_origins=config.allowed_origins,
        allow_methods=config.allowed_methods,
        allow_headers=config.allowed_headers,
        allow_credentials=config.allow_credentials,
        expose_headers=["x-request-id", "request-id", "x-ignored-fields", "retry-after"],
    )
    # CORS wraps the request middleware, so that pages of an allowed origin can read refusals too.
    return [cors, *inner]


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, TrencadisError)
    return make_error_response(error, request.scope)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    headers = dict(error.headers or {})
    if error.status_code == 404:
        return make_error_response(from_status(404, describe_missing_path(request.url.path)), request.scope, headers)
    if error.status_code == 405:
        message = f"{request.method} is not allowed on {request.url.path[:100]}."
        return make_error_response(MethodNotAllowed(message), request.scope, headers)
    return make_error_response(from_status(error.status_code, str(error.detail)), request.scope, headers)


async def _on_validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    message, param = format_validation_error(error.errors())
    return make_error_response(BadRequest(message, param=param), request.scope)


def format_validation_error(errors: Sequence[Json]) -> tuple[str, str | None]:
    """Returns a short message about pydantic's first error, and its JSON path."""
    if not errors:
        return "The request is not valid.", None
    first = errors[0]
    where = [p for p in first["loc"] if p != "body"]
    if first["type"] == "json_invalid":
        return "The request body is not valid JSON.", None
    if first["type"] == "string_unicode" and not where:
        name = str(first["input"])[:60]
        return f"The field name {name!r} is not Unicode text.", name
    path = ""
    for i, part in enumerate(where):
        if isinstance(part, int):
            path += f"[{part}]"
        elif i and ("[" in str(part) or str(part) in ("str", "int", "float", "bool")):
            break  # pydantic adds the branch of a union, which is not part of the request
        else:
            path += f".{part}" if path else str(part)
    if not path:
        return "The request body must be a JSON object.", None
    return f"{path}: {first['msg']}"[:199], path[:100]


async def _log_stats(state: AppState) -> None:
    writer, preempted = ThroughputLog(), 0
    while True:
        await asyncio.sleep(state.settings.config.log_stats_interval)
        warning = make_preemption_warning(preempted, state.engine.stats.preemptions)
        preempted = state.engine.stats.preemptions
        if warning is not None:
            log.warning("%s", warning)
        info = state.engine.info
        device = info.device if info is not None else state.settings.device
        line = writer.format_line(state.engine.stats, device, state.engine.restarts, state.fair_queued)
        if line is not None:
            log.info("%s", line)


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
