"""The FastAPI application."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from trencadis import __version__
from trencadis.core.checkpoint.pooling import CLASSIFY, EMBED
from trencadis.core.cpus import available_cpus
from trencadis.core.errors import BadRequest, TrencadisError, from_status
from trencadis.multimodal.workers.pool import MAX_WORKERS
from trencadis.server.admission import Admission
from trencadis.server.engine.protocol import EngineClient
from trencadis.server.grammars.book import GrammarBook
from trencadis.server.http.door import TurnDoor
from trencadis.server.http.gate import Gate, error_response
from trencadis.server.http.openapi import describe
from trencadis.server.http.unserved import not_found
from trencadis.server.metrics.processes import ProcessesCollector
from trencadis.server.metrics.registry import Metrics, StatsLine, preemption_warning
from trencadis.server.metrics.sleep import SleepCollector
from trencadis.server.metrics.tenants import TenantCollector
from trencadis.server.metrics.traces import TraceCollector
from trencadis.server.page import routes as page_routes
from trencadis.server.prompts.answer_forms import AnswerForms
from trencadis.server.prompts.media import CacheCounters, ImageSource
from trencadis.server.prompts.service import TextService
from trencadis.server.records.tracing import Traces
from trencadis.server.routes import buckets, chat, completions, models, tokens
from trencadis.server.routes import ops as routes_ops
from trencadis.server.routes.auth import Keys
from trencadis.server.routes.dialects import messages, responses
from trencadis.server.routes.pooling import classify, embeddings, pooling, rerank, score
from trencadis.server.routes.pooling.elsewhere import elsewhere
from trencadis.server.routes.pooling.invocations import invocations
from trencadis.server.routes.settings import HttpSettings
from trencadis.server.routes.state import AppState
from trencadis.server.routes.vllm import batch, dev, info, sleep
from trencadis.server.tenants.account import Account
from trencadis.server.tenants.registry import Tenants
from trencadis.server.tenants.turns import Turns

log = logging.getLogger("trencadis.server")
GENERATING = (chat, batch, completions, responses, messages)
POOLING = (embeddings, pooling, classify, score, rerank)
_DEFAULT = {EMBED: "/v1/embeddings", CLASSIFY: "/classify"}
"""Where ``/invocations`` sends what a pooling server pools."""


class MethodNotAllowed(TrencadisError):
    """405: the path knows other methods."""

    status = 405
    type = "MethodNotAllowedError"


def create_app(
    settings: HttpSettings, engine: EngineClient, service: TextService, images: ImageSource | None = None
) -> FastAPI:
    """The application; ``app.state.trencadis`` is its AppState. The engine may still be loading.

    ``images`` is the source of images where ``service`` has none of its own.

    Raises:
        StartupError: a flag names a parser that there is not, or a key file that cannot be used.
    """
    _complete(service, engine, images)
    config, part = settings.config, settings.part
    admission = Admission(settings.bounds) if part is None else part.admission(settings.bounds)

    def processor_cache() -> CacheCounters | None:
        return service.images.cache if service.images is not None else None

    tenants, turns = _tenants(settings)
    metrics = Metrics(
        settings.name, service.max_model_len, engine, admission, processor_cache, settings.engine,
        config.show_hidden_metrics or bool(config.show_hidden_metrics_for_version),
        lambda: 0 if turns is None else turns.waiting, part is not None,
    )  # fmt: skip
    _collect(metrics, settings, engine, tenants)
    template = None if service.template is None else service.template.text
    forms = AnswerForms.choose(config.tool_call_parser, config.reasoning_parser, template)
    forms.claim(service.tokenizer)
    grammars = GrammarBook(service.tokenizer, service.config.text.vocab, service.eos)
    state = AppState(
        settings, engine, service, admission, metrics, int(time.time()), grammars, forms, tenants,
        _traces(config.otlp_traces_endpoint, metrics), turns,
    )  # fmt: skip

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        task = None if config.disable_log_stats else asyncio.create_task(_log_stats(state))
        yield
        if task is not None:
            task.cancel()

    docs = not config.disable_fastapi_docs
    # --root-path is uvicorn's, which puts it into each request's scope; FastAPI no longer takes one.
    app = FastAPI(
        title="Trencadis",
        version=__version__,
        lifespan=lifespan,
        docs_url="/docs" if docs else None,
        redoc_url="/redoc" if docs else None,
        openapi_url="/openapi.json" if docs else None,
        middleware=_middleware(state),
    )
    app.state.trencadis = state
    app.openapi = describe(app)  # type: ignore[method-assign]
    _include(app, state)
    if not config.disable_page:
        app.include_router(page_routes.router(config.root_path))
    app.add_exception_handler(TrencadisError, _on_error)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    return app


def _complete(service: TextService, engine: EngineClient, images: ImageSource | None) -> None:
    """Gives ``service`` a source of images where it has none, and the limit of an engine that is up already."""
    service.images = service.images or images
    if engine.info is not None:
        service.max_model_len = engine.info.max_model_len


def _collect(metrics: Metrics, settings: HttpSettings, engine: EngineClient, tenants: Tenants | None) -> None:
    """Figures beside the engine's: of tenants; of processes and of sleep, which the front of several tells."""
    if tenants is not None:
        metrics.registry.register(TenantCollector(tenants))
    if settings.part is not None:
        return
    metrics.registry.register(ProcessesCollector())
    if settings.config.enable_sleep_mode or settings.config.sleep_after:
        SleepCollector(metrics.registry, engine)


def _traces(endpoint: str, metrics: Metrics) -> Traces | None:
    """What sends traces to ``endpoint``, if there is one; its figures are in ``metrics``."""
    if not endpoint:
        return None
    made = Traces.to(endpoint)
    metrics.registry.register(TraceCollector(made))
    return made


def _tenants(settings: HttpSettings) -> tuple[Tenants | None, Turns | None]:
    """The tenants of the key file, and their turns if the scheduler gives them shares."""
    if not settings.config.api_key_file:
        return None, None
    part, count = settings.part, 1 if settings.part is None else settings.part.count
    tenants = Tenants(Path(settings.config.api_key_file), account=Account if part is None else part.account)
    if settings.engine.scheduling_policy != "fair":
        return tenants, None
    # Each of several processes has an equal part of the rows and of the workers.
    return tenants, Turns.over(-(-settings.running // count), max(min(MAX_WORKERS, available_cpus()) // count, 1))


def _include(app: FastAPI, state: AppState) -> None:
    """The routes of a server that generates, or of one that pools; the others' paths say which flag serves them."""
    how = state.service.config.pooling
    routers = [module.router(state) for module in GENERATING], [module.router(state) for module in POOLING]
    other, own = routers if how is not None else routers[::-1]
    for router in (*own, *(module.router(state) for module in (models, tokens, routes_ops, buckets, info, sleep, dev))):
        app.include_router(router)
    app.include_router(invocations(own, "" if how is None else _DEFAULT[how.task]))
    app.include_router(elsewhere(other, how))


def _middleware(state: AppState) -> list[Middleware]:
    config = state.settings.config
    public = frozenset() if config.disable_page else page_routes.open_paths()
    keys = Keys(config.api_key, config.metrics_auth, public, state.tenants)

    gate = Middleware(
        Gate, keys=keys, max_body=config.max_body_bytes, observe=state.metrics.http.observe,
        bodies=state.admission.bodies, receive_timeout=config.receive_timeout, request_timeout=config.request_timeout,
        most_headers=config.h11_max_header_count, ended=state.ended,
    )  # fmt: skip
    inner = [gate]
    if state.turns is not None:
        inner.append(Middleware(TurnDoor, turns=state.turns, admission=state.admission))
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
    # CORS wraps the gate, so that pages of an allowed origin can read refusals too.
    return [cors, *inner]


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, TrencadisError)
    return error_response(error, request.scope)


async def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    headers = dict(error.headers or {})
    if error.status_code == 404:
        return error_response(from_status(404, not_found(request.url.path)), request.scope, headers)
    if error.status_code == 405:
        message = f"{request.method} is not allowed on {request.url.path[:100]}."
        return error_response(MethodNotAllowed(message), request.scope, headers)
    return error_response(from_status(error.status_code, str(error.detail)), request.scope, headers)


async def _on_invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    message, param = one_line(error.errors())
    return error_response(BadRequest(message, param=param), request.scope)


def one_line(errors: Sequence[Any]) -> tuple[str, str | None]:
    """A short message about pydantic's first error, and its JSON path."""
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
            break  # pydantic names the branch of a union here, which is not part of the request
        else:
            path += f".{part}" if path else str(part)
    if not path:
        return "The request body must be a JSON object.", None
    return f"{path}: {first['msg']}"[:199], path[:100]


async def _log_stats(state: AppState) -> None:
    writer, preempted = StatsLine(), 0
    while True:
        await asyncio.sleep(state.settings.config.log_stats_interval)
        warning = preemption_warning(preempted, state.engine.stats.preemptions)
        preempted = state.engine.stats.preemptions
        if warning is not None:
            log.warning("%s", warning)
        info = state.engine.info
        device = info.device if info is not None else state.settings.device
        line = writer.line(state.engine.stats, device, state.engine.restarts, state.outside)
        if line is not None:
            log.info("%s", line)
