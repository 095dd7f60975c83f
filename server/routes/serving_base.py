"""State of the routes, and the steps of every generating route: checks, the generation, the run and its response."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from pydantic import BaseModel
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from trencadis.core.checkpoint.pooling_description import EMBED
from trencadis.core.errors import BadRequest, Forbidden, NotFound, Unavailable
from trencadis.core.request import AdapterRef, Request, SamplingParams
from trencadis.multimodal.media_parts_and_mm_processor_kwargs import MediaScope
from trencadis.server.engine.engine_client_and_request_timing import RequestTiming, get_replicas
from trencadis.server.grammars.grammar_cache import GrammarCache
from trencadis.server.grammars.response_format import OPTIONS, RequestedFormat, find_requested_format
from trencadis.server.metrics.request_record_logs_and_metrics import RECORD, RequestRecord, log_received
from trencadis.server.prompts.adapter_registry import AdapterRegistry
from trencadis.server.prompts.answer_grammar import add_rule
from trencadis.server.prompts.answer_reader import AnswerParsers
from trencadis.server.prompts.generation_stream import Generation, wait_for_first
from trencadis.server.prompts.prompt_and_chat_messages import Prompt, render_prompt
from trencadis.server.prompts.prompt_builder import TextService
from trencadis.server.protocol.base_request import (
    HARMLESS,
    Body,
    FieldContext,
    GenerateRequest,
    MediaRequest,
)
from trencadis.server.protocol.beam_search_fields import make_beam_rule
from trencadis.server.routes.api_keys_and_allowed_hosts import UNSAFE
from trencadis.server.routes.app_state import AppState
from trencadis.server.routes.json_io import SlicedResponse, mark_prepared
from trencadis.server.routes.sse import EventStream, PieceStream, StreamFormat, run_until_disconnect
from trencadis.server.tenants.server_admission_and_byte_budgets import AnswerBudget, Ticket
from trencadis.server.tenants.tenant_registry import CURRENT, TenantAccount


@dataclass(frozen=True, kw_only=True)
class ServingState(AppState):
    """What routes that run the model use besides: texts, grammars, parsers, bounds of answers, adapters."""

    service: TextService
    grammar_cache: GrammarCache
    parsers: AnswerParsers = field(default_factory=AnswerParsers)
    answers: AnswerBudget = field(default_factory=AnswerBudget)
    adapters: AdapterRegistry | None = None

    def check_accepting(self) -> None:
        """Checks that requests of this task may run now.

        Raises:
            Unavailable: the engine is loading, draining or down.
            BadRequest: the request is pinned to an engine that does not exist.
        """
        if not self.engine.accepting:
            raise Unavailable(f"The server is not accepting requests: {self.engine.phase}.", retry_after=5)
        self.get_pinned_replica()

    def get_pinned_replica(self) -> int:
        """Returns the engine that the header ``X-data-parallel-rank`` of this task's request names; -1: any.

        Raises:
            BadRequest: there is no such engine.
        """
        record = RECORD.get()
        return -1 if record is None or not record.rank else self._parse_replica(record.rank.strip())

    def _parse_replica(self, text: str) -> int:
        count = len(get_replicas(self.engine))
        if text and (not text.isdecimal() or len(text) > 6 or int(text) >= count):
            known = "the only one is 0" if count == 1 else f"there are 0 to {count - 1}"
            raise BadRequest(
                f"X-data-parallel-rank must be the number of an engine, and {known}, got {text[:20]!r}.",
                param="X-data-parallel-rank",
            )
        return int(text) if text else -1

    def check_model(self, model: str | None) -> str:
        """Returns the model name for the answer.

        Raises:
            NotFound: there is no such model; the message lists the names.
        """
        names = self.settings.served_names
        if model in names or (self.adapters is not None and model in self.adapters.served):
            return model
        if model and not self.settings.config.skip_model_name_validation:
            known = [*names, *(self.adapters.served if self.adapters is not None else ())]
            message = f"The model `{model[:60]}` does not exist. Valid aliases: {', '.join(known)}"
            raise NotFound(message[:199], param="model")
        return names[0]

    def check_request(self, request: GenerateRequest) -> dict[str, str]:
        """Checks that a request may run; returns response headers, which name ignored fields.

        Raises:
            TrencadisError: the request may not run.
        """
        mark_runs_model()
        self.check_accepting()
        self.check_model(request.model)
        if self.tenants is not None:
            check_priority(request.priority)
        if request.is_plain:
            return {}
        request.check()
        return self.check_fields(request)

    def check_fields(
        self, request: Body, inner: Body | None = None, name: Callable[[str], str] = str
    ) -> dict[str, str]:
        """Returns response headers that name the fields without effect.

        Args:
            inner: the chat request that a request of another API has become.
            name: maps a field of ``inner`` to its name in ``request``.

        Raises:
            BadRequest: there are some, and ``--strict-request-fields`` is set.
        """
        template = getattr(request, "chat_template", None)
        how = self.service.config.pooling
        context = FieldContext(
            lambda name: self.mentions(template, name),
            self.settings.priorities,
            self.parsers.for_template(template).reasoning is not None,
            how is not None and how.task == EMBED,
        )
        ignored = request.list_ignored_fields(context)
        if inner is not None:
            ignored = sorted({*ignored, *map(name, inner.list_ignored_fields(context))})
        refused = next((one for one in ignored if one not in HARMLESS), "")[:60]
        if refused and self.settings.config.strict_request_fields:
            known = refused.partition(".")[0] in type(request).model_fields
            raise BadRequest(
                f"{refused!r} has no effect here." if known else f"Unknown field {refused!r}.", param=refused
            )
        names = ",".join(UNSAFE.sub("?", one)[:64] for one in ignored[:32])
        return {"x-ignored-fields": names} if names else {}

    def mentions(self, template: str | None, name: str) -> bool:
        """Returns True if the template that renders a request contains the name of a variable."""
        if template is not None:
            return name in template
        return self.service.template is not None and self.service.template.mentions(name)

    def check_template(self, template: str | None) -> None:
        """Raises Forbidden if a request has a template and the operator does not trust such templates."""
        if template is not None and not self.settings.config.trust_request_chat_template:
            raise Forbidden(
                "chat_template in a request needs a server started with --trust-request-chat-template.",
                param="chat_template",
            )

    def shows_ids(self, request: GenerateRequest) -> bool:
        """Returns True if log-probabilities show ids for tokens: the request's value, else the operator's."""
        asked = request.return_tokens_as_token_ids
        return self.settings.config.return_tokens_as_token_ids if asked is None else asked

    def get_requested_format(self, request: GenerateRequest) -> RequestedFormat | None:
        """Returns the form of answer that a request asks for.

        Raises:
            BadRequest: it asks for two forms, or for an unknown one.
        """
        config = self.settings.config
        usual = {name: True for name in OPTIONS if getattr(config, name, False)}
        return find_requested_format(request.response_format, request.structured_outputs, request.guided, usual)

    def make_media_scope(self, request: MediaRequest, http: HttpRequest, ticket: Ticket) -> MediaScope:
        """Makes the tenant, salt and options of a request's media; their pixels are charged to ``ticket``.

        Raises:
            BadRequest: mm_processor_kwargs are unknown or wrong.
        """
        salt, tenant = request.cache_salt or "", str(http.scope.get("trencadis.tenant", ""))
        scope = MediaScope(
            salt, tenant, charge=lambda n: ticket.charge(pixels=n), on_fetch=partial(mark_prepared, http)
        )
        return scope.with_kwargs(request.mm_processor_kwargs) if request.mm_processor_kwargs else scope

    def make_generation(
        self, id: str, prompt: Prompt, sampling: SamplingParams, request: GenerateRequest
    ) -> Generation:
        """Makes the generation of one prompt. Its id has a random suffix, because clients may repeat ids."""
        if not request.is_plain:
            self._add_token_rules(prompt, sampling, request)
        own, salt = f"{id}-{uuid.uuid4().hex[:8]}", request.cache_salt or ""
        made = prompt.make_request(own, sampling, arrival=time.time(), salt=salt, priority=request.priority)
        made.beams = make_beam_rule(request) if request.use_beam_search else None
        made.replica = self.get_pinned_replica()
        if self.adapters is not None:
            made.adapter = self.find_adapter(request.model, prompt)
        if request.stream:
            prompt.interval = request.stream_interval or self.settings.config.stream_interval
        account = CURRENT.get()
        finished = self.metrics.record_finished if account is None else self._charge_tenant(account, made)
        return self.record_generation(Generation(self.engine, self.service, made, prompt, finished))

    def find_adapter(self, model: str | None, prompt: Prompt) -> AdapterRef | None:
        """Returns the adapter that answers a prompt: that of the model's name, or the default of its media."""
        if self.adapters is None:
            return None
        found = self.adapters.find(model)
        if found is not None or not prompt.media:
            return found
        kinds = {"image": prompt.images, "video": prompt.clips}
        return self.adapters.find_default({kind for kind, items in kinds.items() if items})

    def _add_token_rules(self, prompt: Prompt, sampling: SamplingParams, request: GenerateRequest) -> None:
        """Adds the restrictions of ``sampling`` to the rule of ``prompt``."""
        reasoning = self.parsers.for_template(getattr(request, "chat_template", None)).reasoning
        continued = bool(getattr(request, "continue_final_message", False))
        add_rule(prompt, sampling, self.service.tokenizer, self.service.limits.vocab, reasoning, continued)

    def _charge_tenant(self, account: TenantAccount, request: Request) -> Callable[[RequestTiming], None]:
        """Sets the tenant of ``request``; returns the callback that charges its tokens when it has finished."""
        request.tenant, request.weight = account.tenant.name, account.tenant.weight

        def on_finished(timing: RequestTiming) -> None:
            account.record_answer(timing.generated, timing.n)
            self.metrics.record_finished(timing)

        return on_finished

    def record_generation(self, generation: Generation) -> Generation:
        """Adds ``generation`` to the record of the request that this task serves, and returns it."""
        record, config = RECORD.get(), self.settings.config
        generation.on_gaps = self.metrics.observe_gaps
        if record is not None:
            record.model = self.settings.name
            record.params = record.params or generation.params
            record.timings.append(generation.timing)
            generation.timing.fair_queue_seconds = record.fair_queue_seconds
            if config.enable_log_requests or config.enable_log_outputs:
                self._log_received(record, generation)
        return generation

    def _log_received(self, record: RequestRecord, generation: Generation) -> None:
        config, prompt = self.settings.config, generation.prompt
        shown = None
        if config.enable_log_outputs:
            generation.said = [[] for _ in generation.streams]
            record.texts += generation.said
            shown = render_prompt(prompt, self.service.tokenizer, config.max_log_len)
        log_received(record, len(prompt.tokens), len(prompt.media), generation.params, shown)


def mark_runs_model() -> None:
    """Marks in this task's record that its request came to a route that runs the model."""
    record = RECORD.get()
    if record is not None:
        record.runs_model = True


def check_priority(priority: int) -> None:
    """Raises Forbidden if the tenant of this task may not ask for ``priority``."""
    account = CURRENT.get()
    if account is not None:
        low, high = account.tenant.priorities
        if not low <= priority <= high:
            raise Forbidden(f"This key may use priorities {low} to {high}, not {priority}.", param="priority")


def make_request_id(prefix: str, http: HttpRequest, given: str | None = None, mark: str = "-") -> str:
    """Returns ``prefix``, ``mark``, and the client's id without unsafe characters, or the id in the answer's header."""
    wanted = UNSAFE.sub("", given or str(http.scope.get("trencadis.request_id.shown", "")))[:128]
    id = f"{prefix}{mark}{wanted or uuid.uuid4().hex}"
    record = RECORD.get()
    if record is not None:
        record.answer = id
    return id


class PreparedRequest(Protocol):
    """A prepared request."""

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens of all its prompts."""
        ...

    def estimate_output(self, usual: int) -> int:
        """Most tokens of its answers, or ``usual`` of each whose length it does not limit."""
        ...

    @property
    def form(self) -> StreamFormat:
        """The events for keep-alive, errors and the end of its stream."""
        ...

    async def complete(self, lazy: bool = False) -> BaseModel:
        """Runs to the end and returns the whole answer; ``lazy``: its long lists may be ``json_slices.LazyItems``."""
        ...

    def stream(self) -> PieceStream:
        """Returns the stream of its events; called once."""
        ...


async def run_request(
    http: HttpRequest,
    ticket: Ticket,
    begun: Awaitable[PreparedRequest],
    stream: bool,
    keep_alive: float,
    headers: Mapping[str, str],
) -> Response:
    """Runs a request and makes its response; the ticket is released at its end, or by an error before it.

    Args:
        begun: the work before generation, which returns the prepared request.
        keep_alive: seconds of silence after which a stream sends a comment; 0: never.

    Raises:
        TrencadisError: the request cannot run, or fails before anything is sent.
        ClientGone: the client has disconnected.
    """
    if stream:
        return await _start_stream(http, ticket, begun, keep_alive, headers)
    try:
        whole = await run_until_disconnect(http, _run_to_end(ticket, begun))
        charge = ticket.take_answer()
        if charge is None:
            return Response(whole.model_dump_json(), headers=headers, media_type="application/json")
        return SlicedResponse(whole, charge.release, headers)
    finally:
        ticket.leave()


async def _run_to_end(ticket: Ticket, prepared: Awaitable[PreparedRequest]) -> BaseModel:
    """Runs the prepared request to its end and returns the whole answer."""
    work = await prepared
    _charge_tokens(ticket, work)
    return await work.complete(lazy=ticket.answer is not None and ticket.answer.is_large)


def _charge_tokens(ticket: Ticket, work: PreparedRequest) -> None:
    """Charges the prompts, and to a tenant the answers too: what starts at once would exceed its rate many times."""
    account = ticket.account
    output = 0 if account is None else work.estimate_output(math.ceil(account.usual_length))
    ticket.charge(tokens=work.prompt_tokens, output=output)


async def _start_stream(
    http: HttpRequest,
    ticket: Ticket,
    prepared: Awaitable[PreparedRequest],
    keep_alive: float,
    headers: Mapping[str, str],
) -> Response:
    """Returns the stream, once its first event has arrived."""
    try:
        work = await run_until_disconnect(http, prepared)
        _charge_tokens(ticket, work)
        stream = work.stream()
        events = await run_until_disconnect(http, wait_for_first(stream.stream_events()))
    except BaseException:
        ticket.leave()
        raise
    return EventStream(events, keep_alive, ticket.leave, headers, work.form, stream.set_writer)
