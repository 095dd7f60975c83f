"""/v1/chat/completions.

/v1/chat/completions/batch: one choice for each conversation, all under one id.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import ClassVar

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from trencadis.core.errors import BadRequest, TrencadisError
from trencadis.core.json_types import JsonObject
from trencadis.core.request import SamplingParams, TokenLogprob
from trencadis.multimodal.media_timing_and_concurrency import gather_or_cancel
from trencadis.server.prompts.answer_grammar import RequestedCalls, add_answer_grammar
from trencadis.server.prompts.answer_reader import AnswerParsers
from trencadis.server.prompts.generation_stream import Generation
from trencadis.server.prompts.output_processor import PieceCollector, TextPiece
from trencadis.server.prompts.prompt_and_chat_messages import Prompt
from trencadis.server.prompts.sampling_params import make_sampling_params, rename_error_fields, resolve_output_limit
from trencadis.server.protocol.base_request import Usage
from trencadis.server.protocol.chat_completions import (
    BatchChatRequest,
    ChatRequest,
    ChatResponse,
    Choice,
    ChoiceLogprobs,
    TokenLogprobs,
    read_prediction,
)
from trencadis.server.protocol.tool_definitions import get_named_function, get_schemas
from trencadis.server.routes.chat_stream import ChatStream
from trencadis.server.routes.json_io import BodyRoute, forget_body, set_items
from trencadis.server.routes.openai_output import make_chat_logprobs, make_message, make_prompt_table, make_usage
from trencadis.server.routes.serving_base import ServingState, make_request_id, run_request
from trencadis.server.routes.sse import CHAT_STREAM_FORMAT, PieceStream, StreamFormat
from trencadis.server.tenants.server_admission_and_byte_budgets import AnswerShape, Ticket
from trencadis.server.text.chat_template import Rendering

NO_TOOL_PARSER = (
    "The chat template shows no known form of tool calls; start the server with --tool-call-parser, or send "
    "tool_choice 'none'."
)


@dataclass(slots=True)
class RunningChat:
    """A running request: its body and its generation. Other APIs' requests are translated to it and only written
    differently.
    """

    form: ClassVar[StreamFormat] = CHAT_STREAM_FORMAT
    state: ServingState
    body: ChatRequest
    generation: Generation
    id: str
    model: str
    role: str
    named: bool = False
    """True if the request names the function to be called: then the call is the answer."""
    echo: str = ""
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt, images included."""
        return len(self.generation.prompt.tokens)

    def estimate_output(self, usual: int) -> int:
        """Most tokens of its choices; ``usual`` of each if it has no limit."""
        params = self.generation.params
        most = params.max_tokens or 0
        return params.n * (min(usual, most) if self.body.limit[1] is None else most)

    @property
    def usage(self) -> Usage:
        """Tokens so far."""
        config = self.state.settings.config
        return make_usage([self.generation], self.body.return_image_sizes, config.enable_prompt_tokens_details)

    @property
    def as_ids(self) -> bool:
        """True if log-probabilities name tokens by their ids."""
        return self.state.shows_ids(self.body)

    async def complete(self, lazy: bool = False) -> ChatResponse:
        """Runs to the end and returns the whole answer; ``lazy``: see ``PreparedRequest``."""
        found = [PieceCollector(bool(self.body.return_token_ids)) for _ in self.generation.streams]
        async with aclosing(self.generation.stream_pieces()) as stream:
            async for index, piece in stream:
                found[index].add(piece)
        first = self.generation.streams[0].prompt_logprobs
        made = ChatResponse(
            id=self.id,
            created=self.created,
            model=self.model,
            choices=[self._make_choice(i, one.pieces, lazy) for i, one in enumerate(found)],
            system_fingerprint=self.state.settings.fingerprint,
            usage=self.usage,
            prompt_token_ids=self.generation.prompt.tokens if self.body.return_token_ids else None,
        )
        if first is not None:
            set_items(made, "prompt_logprobs", first, self._make_prompt_table, lazy)
        return made

    def _make_prompt_table(self, items: Sequence[TokenLogprob | None]) -> list[JsonObject | None]:
        return make_prompt_table(self.state.service.tokenizer, items, self.body.prompt_logprobs or 0)

    def _make_choice(self, index: int, pieces: list[TextPiece], lazy: bool) -> Choice:
        tokens = [t for p in pieces for t in p.tokens]
        merged = TextPiece("".join(p.text for p in pieces), tokens, [item for p in pieces for item in p.logprobs])
        message = make_message(self.role, merged.text, [p.answer for p in pieces if p.answer is not None])
        if self.echo:
            message.content = self.echo + (message.content or "")
        return Choice(
            index=index,
            message=message,
            logprobs=self.make_logprobs(merged, lazy),
            finish_reason=self.get_finish_reason(index, pieces[-1]),
            stop_reason=pieces[-1].stop_reason,
            token_ids=tokens if self.body.return_token_ids else None,
        )

    def stream(self) -> ChatStream:
        """Returns the stream of its events."""
        return ChatStream(self)

    def get_finish_reason(self, index: int, piece: TextPiece) -> str | None:
        """Returns OpenAI's finish reason; "tool_calls" replaces "stop" if the answer has calls."""
        calls = piece.finish_reason == "stop" and self.generation.streams[index].calls
        return "tool_calls" if calls and not self.named else piece.finish_reason

    def make_logprobs(self, piece: TextPiece, lazy: bool = False) -> ChoiceLogprobs | None:
        """The log-probabilities of a piece's tokens, if the request asks for them."""
        if not self.body.logprobs:
            return None
        tokenizer, top, as_ids = self.state.service.tokenizer, self.body.top_logprobs or 0, self.as_ids
        made = ChoiceLogprobs(content=[])

        def make(items: Sequence[TokenLogprob]) -> list[TokenLogprobs]:
            return make_chat_logprobs(tokenizer, items, top, as_ids).content or []

        set_items(made, "content", piece.logprobs, make, lazy)
        return made


async def make_prompt(state: ServingState, body: ChatRequest, http: Request, ticket: Ticket, most: int = 0) -> Prompt:
    """Makes the prompt of a conversation, with its media.

    Args:
        most: most tokens of the prompt; 0: as many as the context has room for.

    Raises:
        TrencadisError: a template, a tool, a message or a medium is wrong, or the prompt is too long.
    """
    how: Rendering = {"kwargs": state.settings.config.default_chat_template_kwargs}
    if not body.is_plain:
        how = _make_rendering(state, body)
    side, scope = body.truncation_side or "left", state.make_media_scope(body, http, ticket)
    try:
        return await state.service.make_chat_prompt(
            body.messages, truncate=body.truncate_prompt_tokens, truncation_side=side, scope=scope, keep_text=False,
            most=most, **how,
        )  # fmt: skip
    except TrencadisError as error:
        if "content[" in (error.param or ""):
            state.metrics.count_media_error(error.type)
        raise


def _make_rendering(state: ServingState, body: ChatRequest) -> Rendering:
    """Collects the fields of a request that change its prompt, apart from the messages.

    Raises:
        TrencadisError: a template of the request is not allowed, or the model's template does not know tools.
    """
    config = state.settings.config
    state.check_template(body.chat_template)
    if body.may_call and state.parsers.for_template(body.chat_template).tools is None:
        raise BadRequest(NO_TOOL_PARSER, param="tools")
    effort = body.get_effort_variables(
        lambda name: state.mentions(body.chat_template, name), config.reasoning_effort_map
    )
    return {
        "add_generation_prompt": body.opens_answer,
        "continue_final_message": body.continue_final_message,
        "tools": None if body.tool_choice == "none" and config.exclude_tools_when_tool_choice_none else body.tools,
        "documents": body.documents,
        "kwargs": {**config.default_chat_template_kwargs, **effort, **(body.chat_template_kwargs or {})},
        "chat_template": body.chat_template,
    }


async def prepare(
    state: ServingState,
    body: ChatRequest,
    http: Request,
    ticket: Ticket,
    id: str = "",
    fits: bool = False,
    logprob_repeats: int = 0,
) -> RunningChat:
    """Makes the prompt and the sampling parameters of a request, before the engine sees it.

    Args:
        id: id of the answer; "": a new one of a chat completion.
        fits: an output limit beyond the context is lowered to what the prompt leaves, not refused.
        logprob_repeats: events at the end of a stream that repeat all log-probabilities.

    Raises:
        TrencadisError: the request cannot run.
    """
    prompt = await make_prompt(state, body, http, ticket)
    sampling = _make_sampling_params(state, body, len(prompt.tokens), fits)
    shape = _describe_answer(body, prompt, logprob_repeats)
    ticket.answer = state.answers.hold(state.answers.fit(shape, sampling), ticket.answer)
    forms, role, echo, named = (
        state.parsers.for_template(body.chat_template),
        state.settings.config.response_role,
        "",
        False,
    )
    if not body.is_plain:
        await _add_grammar(forms, state, body, prompt)
        if body.prediction is not None and not body.use_beam_search:
            prompt.prediction = await state.service.encode_prediction(read_prediction(body.prediction))
        role = body.continued_role or role
        echo, named = body.get_echo_text(role), get_named_function(body.tool_choice) is not None
    if body.may_call or forms.reasoning is not None:
        _set_parsers(forms, state, body, prompt)
    body.drop_bulky_fields()
    forget_body(http)
    id = id or make_request_id("chatcmpl", http, body.request_id)
    generation = state.make_generation(id, prompt, sampling, body)
    return RunningChat(state, body, generation, id, state.check_model(body.model), role, named, echo)


def _describe_answer(body: ChatRequest, prompt: Prompt, logprob_repeats: int) -> AnswerShape:
    """Returns the parts that an answer to ``prompt`` is to hold."""
    name, asked = body.limit
    return AnswerShape(
        len(prompt.tokens),
        logprobs_field="top_logprobs" if body.top_logprobs else "logprobs",
        limit_field=name if asked is not None else "",
        ids=bool(body.return_token_ids),
        stream=bool(body.stream),
        logprob_repeats=logprob_repeats if body.stream else 0,
    )


def _make_sampling_params(state: ServingState, body: ChatRequest, prompt: int, fits: bool) -> SamplingParams:
    """Makes the parameters of answers to a prompt of ``prompt`` tokens; ``fits``: see ``prepare``."""
    name, asked = body.limit
    if fits and asked is not None:
        asked = min(asked, state.service.max_model_len)
    try:
        defaults, most = state.service.defaults, state.service.max_model_len
        limit = resolve_output_limit(name, asked, defaults.get_max_tokens(prompt), prompt, most, defaults.cap)
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        return make_sampling_params(body, state.service, limit, logprobs, body.prompt_logprobs)
    except BadRequest as error:
        raise rename_error_fields(error, max_tokens=name, logprobs="top_logprobs") from None


async def _add_grammar(forms: AnswerParsers, state: ServingState, body: ChatRequest, prompt: Prompt) -> None:
    """Gives ``prompt`` the grammar of its answers, if the request restricts their form."""
    calls = None
    if body.may_call:
        level = state.settings.config.tool_strict_level
        calls = RequestedCalls(body.tools or [], body.tool_choice, body.parallel_tool_calls is not False, level)
    await add_answer_grammar(
        state.grammar_cache,
        forms,
        state.service.tokenizer,
        prompt,
        state.get_requested_format(body),
        calls,
        continued=body.continue_final_message,
    )


def _set_parsers(forms: AnswerParsers, state: ServingState, body: ChatRequest, prompt: Prompt) -> None:
    """Sets the parsers of answers to ``prompt``."""
    tokenizer = state.service.tokenizer
    prompt.shown = forms.list_visible_specials(tokenizer, body.may_call)
    prompt.reader = forms.make_readers(
        tokenizer,
        prompt.tokens,
        get_schemas(body.tools) if body.may_call else None,
        continued=body.continue_final_message,
        shows_reasoning=body.include_reasoning,
        one_call=body.parallel_tool_calls is False,
    )


def router(state: ServingState) -> APIRouter:
    """Makes the route over ``state``."""
    routes = APIRouter(tags=["chat"], route_class=BodyRoute)

    @routes.post("/v1/chat/completions", response_model=ChatResponse)
    async def chat_completions(body: ChatRequest, http: Request) -> Response:
        """Continues a conversation."""
        headers = state.check_request(body)
        ticket = state.admission.enter(max(1, min(body.n or 1, state.service.limits.max_choices)))
        keep_alive = state.settings.config.sse_keep_alive_interval
        return await run_request(
            http, ticket, prepare(state, body, http, ticket), bool(body.stream), keep_alive, headers
        )

    return routes


@dataclass(slots=True)
class BatchChat:
    """The running requests of a batch, one for each conversation."""

    works: list[RunningChat]

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens of all prompts."""
        return sum(work.prompt_tokens for work in self.works)

    @property
    def form(self) -> StreamFormat:
        """The stream format of its conversations."""
        return self.works[0].form

    def estimate_output(self, usual: int) -> int:
        """Most tokens of all answers; ``usual`` of each if they have no limit."""
        return sum(work.estimate_output(usual) for work in self.works)

    async def complete(self, lazy: bool = False) -> ChatResponse:
        """Runs all to the end; the choice of conversation ``i`` has the index ``i``."""
        whole = await gather_or_cancel(work.complete(lazy) for work in self.works)
        choices: list[Choice] = []
        for i, response in enumerate(whole):
            choices += response.choices
            choices[-1].index = i
        first, body = whole[0], self.works[0].body
        usage = make_usage([work.generation for work in self.works], body.return_image_sizes)
        return first.model_copy(update={"choices": choices, "usage": usage, "prompt_token_ids": None})

    def stream(self) -> PieceStream:
        """Raises BadRequest: a batch is not streamed."""
        raise BadRequest("stream is not available for several conversations.", param="stream")


async def prepare_all(state: ServingState, body: BatchChatRequest, http: Request, ticket: Ticket) -> BatchChat:
    """Makes the prompts of all conversations.

    Raises:
        TrencadisError: one of them cannot run; ``param`` begins with its index.
    """

    async def one(index: int, request: ChatRequest) -> RunningChat:
        try:
            return await prepare(state, request, http, ticket)
        except TrencadisError as error:
            if error.param is not None and error.param.startswith("messages"):
                error.param = f"messages[{index}]{error.param.removeprefix('messages')}"
            raise

    return BatchChat(await gather_or_cancel(one(i, request) for i, request in enumerate(body.split())))


def make_chat_batch_router(state: ServingState) -> APIRouter:
    """Makes the route over ``state``."""
    routes = APIRouter(tags=["chat"], route_class=BodyRoute)

    @routes.post("/v1/chat/completions/batch", response_model=ChatResponse)
    async def chat_batch(body: BatchChatRequest, http: Request) -> Response:
        """Continues several conversations."""
        headers = state.check_request(body)
        count, most = len(body.messages), state.service.limits.max_prompts
        if count > most:
            raise BadRequest(f"At most {most} conversations are allowed, got {count}.", param="messages")
        ticket = state.admission.enter(count)
        return await run_request(http, ticket, prepare_all(state, body, http, ticket), False, 0.0, headers)

    return routes
