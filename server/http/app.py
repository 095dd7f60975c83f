"""The FastAPI application."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from trencadis import __version__
from trencadis.core.checkpoint.pooling_config import CLASSIFY, EMBED
from trencadis.core.cpu_affinity import available_cpus
from trencadis.core.errors import BadRequest, TrencadisError, from_status
from trencadis.core.json_types import Json
from trencadis.multimodal.decode_workers.worker_pool import MAX_WORKERS
from trencadis.server.engine.engine_client import EngineClient
from trencadis.server.engine.request_link import BACKLOG
from trencadis.server.grammars.grammar_cache import GrammarCache
from trencadis.server.http.fair_admission import FairAdmissionMiddleware
from trencadis.server.http.host_rules import HostRules
from trencadis.server.http.openapi import make_openapi
from trencadis.server.http.request_middleware import RequestMiddleware, describe_missing_path, make_error_response
from trencadis.server.metrics.http_metrics import TenantCollector, TraceCollector
from trencadis.server.metrics.process_metrics import LogCollector, ProcessesCollector
from trencadis.server.metrics.prometheus import PrometheusMetrics, ThroughputLog, make_preemption_warning
from trencadis.server.metrics.sleep_metrics import SleepCollector
from trencadis.server.metrics.tracing import TraceQueue
from trencadis.server.prompts.answer_reader import AnswerParsers
from trencadis.server.prompts.multimodal_inputs import CacheCounters, ImageSource
from trencadis.server.prompts.template_workers import TemplateWorkers
from trencadis.server.prompts.text_service import TextService
from trencadis.server.routes import (
    dev_mode,
    health_and_metrics,
    page_routes,
    serving_adapters,
    serving_chat,
    serving_completion,
    serving_embedding,
    serving_messages,
    serving_models,
    serving_pooling,
    serving_responses,
    serving_score,
    serving_tokenization,
)
from trencadis.server.routes.app_state import AppState
from trencadis.server.routes.auth import Keys
from trencadis.server.routes.http_settings import HttpSettings
from trencadis.server.routes.serving_adapters import make_adapters
from trencadis.server.routes.serving_pooling import make_router
from trencadis.server.routes.wrong_task import make_wrong_task_router
from trencadis.server.tenants.admission import Admission
from trencadis.server.tenants.answer_budget import AnswerBudget
from trencadis.server.tenants.fair_queue import TenantFairQueue
from trencadis.server.tenants.rate_limits import TenantAccount
from trencadis.server.tenants.tenant_registry import TenantRegistry

log = logging.getLogger("trencadis.server")
GENERATING = (
    serving_chat.router,
    serving_chat.make_chat_batch_router,
    serving_completion.router,
    serving_responses.router,
    serving_messages.router,
)
POOLING = (
    serving_embedding.router,
    serving_embedding.make_cohere_embed_router,
    serving_pooling.router,
    serving_pooling.make_classify_router,
    serving_score.router,
    serving_score.make_rerank_router,
)
_DEFAULT = {EMBED: "/v1/embeddings", CLASSIFY: "/classify"}
"""Routes to which ``/invocations`` sends the requests of a pooling server, by task."""


class MethodNotAllowed(TrencadisError):
    """Error 405: the path supports other methods."""

    status = 405
    type = "MethodNotAllowedError"


def create_app(
    settings: HttpSettings, engine: EngineClient, service: TextService, image_source: ImageSource | None = None
) -> FastAPI:
    """Builds the application; ``app.state.trencadis`` is its AppState. The engine may still be loading.

    ``image_source`` is used if ``service`` has no source of images.

    Raises:
        StartupError: a flag names an unknown parser, or a key file that cannot be used.
    """
    _complete_service(service, engine, image_source)
    config, shared = settings.config, settings.shared
    admission = Admission(settings.bounds) if shared is None else shared.make_admission(settings.bounds)

    def processor_cache() -> CacheCounters | None:
        return service.images.cache if service.images is not None else None

    tenants, fair_queue = _make_tenants(settings)
    metrics = PrometheusMetrics(
        settings.name, service.max_model_len, engine, admission, processor_cache, settings.engine,
        config.show_hidden_metrics or bool(config.show_hidden_metrics_for_version),
        lambda: 0 if fair_queue is None else fair_queue.waiting, shared is not None,
    )  # fmt: skip
    _register_collectors(metrics, settings, engine, tenants)
    template = None if service.template is None else service.template.text
    forms = AnswerParsers.choose(config.tool_call_parser, config.reasoning_parser, template)
    forms.claim(service.tokenizer)
    grammars = GrammarCache(service.tokenizer, service.config.text.vocab, service.eos)
    state = AppState(
        settings, engine, service, admission, metrics, int(time.time()), grammars, forms, tenants,
        _make_traces(config.otlp_traces_endpoint, metrics), fair_queue, _make_answer_budget(config.max_answer_bytes),
        make_adapters(settings, service),
    )  # fmt: skip

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
    _include_routes(app, state)
    app.add_exception_handler(TrencadisError, _on_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    return app


def _complete_service(service: TextService, engine: EngineClient, images: ImageSource | None) -> None:
    """Sets the source of images of ``service`` if it has none, and the length limit of an engine that is already up."""
    service.template_workers = TemplateWorkers()
    service.images = service.images or images
    if engine.info is not None:
        service.max_model_len = engine.info.max_model_len


def _register_collectors(
    metrics: PrometheusMetrics, settings: HttpSettings, engine: EngineClient, tenants: TenantRegistry | None
) -> None:
    """Registers metrics besides the engine's: of tenants; of processes and of sleep, unless a front process reports
    them.
    """
    metrics.registry.register(LogCollector())
    if tenants is not None:
        metrics.registry.register(TenantCollector(tenants))
    if settings.shared is not None:
        return
    metrics.registry.register(ProcessesCollector())
    if settings.config.enable_sleep_mode or settings.config.sleep_after:
        SleepCollector(metrics.registry, engine)


def _make_traces(endpoint: str, metrics: PrometheusMetrics) -> TraceQueue | None:
    """Makes the queue that sends traces to ``endpoint``, and registers its metrics; None without an endpoint."""
    if not endpoint:
        return None
    made = TraceQueue.for_endpoint(endpoint)
    metrics.registry.register(TraceCollector(made))
    return made


def _make_answer_budget(most: int) -> AnswerBudget:
    """Makes the budget of answers, which the unread deltas of streams share."""
    budget = AnswerBudget(most, unread=lambda: BACKLOG.held)
    BACKLOG.most, BACKLOG.total, BACKLOG.reserved = most, budget.total, lambda: budget.held
    return budget


def _make_tenants(settings: HttpSettings) -> tuple[TenantRegistry | None, TenantFairQueue | None]:
    """Reads the tenants of the key file, and makes their fair queue if the scheduling policy is ``fair``."""
    if not settings.config.api_key_file:
        return None, None
    shared, count = settings.shared, 1 if settings.shared is None else settings.shared.count
    tenants = TenantRegistry(
        Path(settings.config.api_key_file), account=TenantAccount if shared is None else shared.make_account
    )
    if settings.engine.scheduling_policy != "fair":
        return tenants, None
    # Each of several processes gets an equal part of the rows and of the workers.
    return tenants, TenantFairQueue.for_engines(
        -(-settings.max_running // count), max(min(MAX_WORKERS, available_cpus()) // count, 1)
    )


def _include_routes(app: FastAPI, state: AppState) -> None:
    """Adds the routes of a generating or of a pooling server, and the web page; paths of the other kind answer with
    the flag that enables them.
    """
    how = state.service.config.pooling
    routers = [make(state) for make in GENERATING], [make(state) for make in POOLING]
    other, own = routers if how is not None else routers[::-1]
    common = (
        serving_models.router,
        serving_tokenization.router,
        health_and_metrics.router,
        health_and_metrics.make_bucket_router,
        serving_models.make_load_router,
        serving_adapters.router,
        dev_mode.make_sleep_router,
        dev_mode.router,
    )
    for router in (*own, *(make(state) for make in common)):
        app.include_router(router)
    app.include_router(make_router(own, "" if how is None else _DEFAULT[how.task]))
    app.include_router(make_wrong_task_router(other, how))
    if not state.settings.config.disable_page:
        app.include_router(page_routes.router(state.settings.config.root_path))


def _make_middleware(state: AppState) -> list[Middleware]:
    config = state.settings.config
    public = frozenset() if config.disable_page else page_routes.list_open_paths()
    guards_metrics = config.metrics_auth or (state.tenants is not None and not config.metrics_open)
    keys = Keys(config.api_key, guards_metrics, public, state.tenants)

    gate = Middleware(
        RequestMiddleware, keys=keys, max_body=config.max_body_bytes, observe=state.metrics.http.observe,
        bodies=state.admission.bodies, receive_timeout=config.receive_timeout, request_timeout=config.request_timeout,
        most_headers=config.h11_max_header_count, ended=state.on_request_ended, load=state.make_load_header,
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
