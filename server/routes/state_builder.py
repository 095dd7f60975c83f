"""Builds the state of a server from its settings: bounds, tenants, metrics, parsers, grammars, adapters."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

from trencadis.core.cpu_affinity import available_cpus
from trencadis.multimodal.decode_workers.worker_pool import MAX_WORKERS
from trencadis.multimodal.images.processor_cache import CacheCounters
from trencadis.server.config.model_download import find_adapter_folder
from trencadis.server.engine.engine_client_and_request_timing import BACKLOG, EngineClient
from trencadis.server.grammars.grammar_cache import GrammarCache
from trencadis.server.metrics.process_tenant_and_sleep_collectors import (
    LogCollector,
    ProcessesCollector,
    SleepCollector,
    TenantCollector,
    TraceCollector,
)
from trencadis.server.metrics.prometheus import PrometheusMetrics
from trencadis.server.metrics.request_trace_queue import TraceQueue
from trencadis.server.prompts.adapter_registry import AdapterRegistry, change_adapters, parse_modules
from trencadis.server.prompts.answer_reader import AnswerParsers
from trencadis.server.prompts.multimodal_inputs import ImageSource
from trencadis.server.prompts.prompt_builder import TextService
from trencadis.server.routes.app_state import HttpSettings
from trencadis.server.routes.serving_base import ServingState
from trencadis.server.tenants.fair_queue import TenantFairQueue
from trencadis.server.tenants.server_admission_and_byte_budgets import Admission, AnswerBudget
from trencadis.server.tenants.tenant_registry import TenantAccount, TenantRegistry
from trencadis.server.text.off_event_loop import TemplateWorkers


def make_state(
    settings: HttpSettings, engine: EngineClient, service: TextService, image_source: ImageSource | None = None
) -> ServingState:
    """Builds the state of a server, whose engine may still be loading.

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
    parsers = AnswerParsers.choose(config.tool_call_parser, config.reasoning_parser, template)
    parsers.claim(service.tokenizer)
    return ServingState(
        settings=settings,
        engine=engine,
        service=service,
        admission=admission,
        metrics=metrics,
        created=int(time.time()),
        grammar_cache=GrammarCache(service.tokenizer, service.config.text.vocab, service.eos),
        parsers=parsers,
        tenants=tenants,
        traces=_make_traces(config.otlp_traces_endpoint, metrics),
        fair_queue=fair_queue,
        answers=_make_answer_budget(config.max_answer_bytes),
        adapters=make_adapters(settings, service),
    )


def _make_answer_budget(most: int) -> AnswerBudget:
    """Makes the budget of answers, which the unread deltas of streams share."""
    budget = AnswerBudget(most, unread=BACKLOG.count_held)
    BACKLOG.most, BACKLOG.total, BACKLOG.reserved = most, budget.total, lambda: budget.held
    return budget


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


def make_adapters(settings: HttpSettings, service: TextService) -> AdapterRegistry | None:
    """Reads the adapters of ``--lora-modules`` and ``--default-mm-loras``; None without ``--enable-lora``."""
    engine, config = settings.engine, settings.config
    if not engine.enable_lora:
        return None
    fetch = partial(find_adapter_folder, engine)
    made = AdapterRegistry(service.config, engine, settings.served_names, fetch, config.allowed_lora_path)
    for name, path, parent in ((one.name, one.path, one.parent) for one in parse_modules(config.lora_modules)):
        made.add(name, path, parent)
    made.set_defaults(config.default_mm_loras)
    if settings.shared is not None:
        settings.shared.share_adapters(partial(change_adapters, made))
    return made
