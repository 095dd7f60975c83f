"""/v1/completions: the route, and the stream of a completion.

An echoed prompt starts the first event of its choice.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, Protocol

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from trencadis.core.errors import BadRequest
from trencadis.core.request import SamplingParams
from trencadis.server.prompts.answer_grammar import add_answer_grammar
from trencadis.server.prompts.answer_reader import AnswerParsers
from trencadis.server.prompts.generation_stream import STARTS_PER_PASS, ChoicePiece, Generation, merge_generations
from trencadis.server.prompts.output_processor import PieceCollector, TextPiece
from trencadis.server.prompts.prompt_and_chat_messages import Prompt
from trencadis.server.prompts.sampling_params import check_prompt_length, make_sampling_params, resolve_output_limit
from trencadis.server.protocol.base_request import resolve_stream_usage
from trencadis.server.protocol.completions import (
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    CompletionResponse,
)
from trencadis.server.routes.json_io import BodyRoute, forget_body, off_event_loop, set_items
from trencadis.server.routes.openai_output import CompletionLogprobsBuilder, make_prompt_table, make_usage
from trencadis.server.routes.serving_base import ServingState, make_request_id, run_request
from trencadis.server.routes.sse import (
    CHAT_STREAM_FORMAT,
    PieceStream,
    SseEventTemplate,
    StreamFormat,
    encode,
    encode_event,
    make_number_mark,
    make_text_mark,
)
from trencadis.server.tenants.server_admission_and_byte_budgets import AnswerShape, Ticket
from trencadis.server.text.off_event_loop import Check


class CompletionAnswer(Protocol):
    """The running request that is streamed; ``serving_completion.RunningCompletion`` is one."""

    state: ServingState
    body: CompletionRequest
    generations: list[Generation]

    @property
    def silent(self) -> bool:
        """True if the answer is only the prompt."""
        ...

    @property
    def count(self) -> int:
        """Number of choices of each prompt."""
        ...

    def get_echo(self, prompt: int) -> str:
        """Returns the text of a prompt if the answer begins with it, else ""."""
        ...

    def make_response(self, choices: list[CompletionChoice], usage: bool) -> CompletionResponse:
        """Makes an event."""
        ...


class CompletionStream(PieceStream):
    """The events of ``answer``. Events between the first and the last of a choice are made from templates."""

    def __init__(self, answer: CompletionAnswer) -> None:
        single = answer.generations[0] if len(answer.generations) == 1 else None
        super().__init__(single, answer.body.logprobs)
        self._answer, self._body = answer, answer.body
        forced = answer.state.settings.config.enable_force_include_usage
        self._total, self._always = resolve_stream_usage(self._body.stream_options, forced)
        self._scores = self._body.logprobs is not None
        self._ids = bool(self._body.return_token_ids)
        self._builders: dict[int, CompletionLogprobsBuilder] = {}
        self._templates: dict[tuple[int, int], SseEventTemplate] = {}

    def stream_pieces(self) -> AsyncGenerator[ChoicePiece]:
        """See ``PieceStream``."""
        return super().stream_pieces() if self._generation is not None else self._merge_prompts()

    async def _merge_prompts(self) -> AsyncGenerator[ChoicePiece]:
        async with aclosing(merge_generations(self._answer.generations)) as pieces:
            async for prompt, choice, piece in pieces:
                yield ChoicePiece(prompt * self._answer.count + choice, piece)

    def make_events(self, index: int, piece: TextPiece) -> bytes:
        """See ``PieceStream``."""
        builder, head = self._builders.get(index), ""
        first = builder is None
        if builder is None:
            head = self._answer.get_echo(index // self._answer.count)
            builder = self._builders[index] = CompletionLogprobsBuilder(
                self._answer.state.service.tokenizer, self._body.logprobs or 0, self._answer.state.shows_ids(self._body)
            )
        elif piece.finish_reason is None and not self._answer.silent:
            return self._fill_template(index, piece, builder) if piece.text or piece.tokens else b""
        made = self._make_choice(index, head, piece, builder)
        if first and self._ids:
            made.prompt_token_ids = self._answer.generations[index // self._answer.count].prompt.tokens
        shows = made.text or piece.tokens or piece.finish_reason
        return encode_event(self._answer.make_response([made], self._always)) if shows else b""

    def make_final_events(self) -> bytes:
        """See ``PieceStream``."""
        return encode_event(self._answer.make_response([], True)) if self._total else b""

    def _make_choice(
        self, index: int, head: str, piece: TextPiece, builder: CompletionLogprobsBuilder
    ) -> CompletionChoice:
        text = head + ("" if self._answer.silent else piece.text)
        made = CompletionChoice(index=index, text=text, logprobs=None, finish_reason=piece.finish_reason)
        if self._scores and piece.logprobs:
            made.logprobs = builder.build(piece.logprobs)
        if piece.finish_reason is not None:
            made.stop_reason = piece.stop_reason
        if self._ids:
            made.token_ids = piece.tokens
        return made

    def _fill_template(self, index: int, piece: TextPiece, builder: CompletionLogprobsBuilder) -> bytes:
        """Makes the event of a piece between the first and the last of its choice."""
        timings = [g.timing for g in self._answer.generations] if self._always else []
        kind = index, sum(t.cached for t in timings)
        template = self._templates.get(kind)
        if template is None:
            template = self._templates[kind] = self._make_template(index)
        values = [encode(piece.text)]
        if self._scores:
            values.append(encode(builder.build_lists(piece.logprobs) if piece.logprobs else None))
        if self._ids:
            values.append(encode(piece.tokens))
        if self._always:
            made = sum(t.generated for t in timings)
            values += [b"%d" % (sum(t.prompt_tokens for t in timings) + made), b"%d" % made]
        return template.fill(*values)

    def _make_template(self, index: int) -> SseEventTemplate:
        text, score, tokens, total, made = (
            make_text_mark(),
            make_text_mark(),
            make_number_mark(),
            make_number_mark(),
            make_number_mark(),
        )
        choice = CompletionChoice(index=index, text=text, logprobs=None, finish_reason=None)
        marks = [encode(text)]
        if self._scores:
            choice.logprobs = CompletionLogprobs(text_offset=[], token_logprobs=[], tokens=[score], top_logprobs=[])
            marks.append(choice.logprobs.model_dump_json().encode())
        if self._ids:
            choice.token_ids = [tokens]
            marks.append(b"[%d]" % tokens)
        event_of = self._answer.make_response([choice], self._always)
        if event_of.usage is not None:
            event_of.usage = event_of.usage.model_copy(update={"total_tokens": total, "completion_tokens": made})
            marks += [b"%d" % total, b"%d" % made]
        return SseEventTemplate(encode_event(event_of), marks)


@dataclass(slots=True)
class RunningCompletion:
    """A running request; choice ``i`` of prompt ``p`` has the index ``p * n + i`` in the answer."""

    form: ClassVar[StreamFormat] = CHAT_STREAM_FORMAT
    state: ServingState
    body: CompletionRequest
    generations: list[Generation]
    id: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens of all prompts."""
        return sum(len(g.prompt.tokens) for g in self.generations)

    def estimate_output(self, usual: int) -> int:
        """Most tokens of its choices; ``usual`` of each if it has no limit."""
        every = [(g.params.n, g.params.max_tokens or 0) for g in self.generations]
        limited = self.body.max_tokens is not None
        return sum(n * (most if limited else min(usual, most)) for n, most in every)

    async def complete(self, lazy: bool = False) -> CompletionResponse:
        """Runs to the end and returns the whole answer; ``lazy``: see ``PreparedRequest``."""
        pieces: dict[tuple[int, int], PieceCollector] = {}
        async with aclosing(merge_generations(self.generations)) as stream:
            async for prompt, choice, piece in stream:
                if (prompt, choice) not in pieces:
                    pieces[prompt, choice] = PieceCollector(bool(self.body.return_token_ids))
                pieces[prompt, choice].add(piece)
        choices = []
        for p, c in sorted(pieces):
            some = pieces.pop((p, c)).pieces
            if lazy:
                choices.append(await off_event_loop.run(partial(self._make_lazy_choice, p, c, some)))
            else:
                choices.append(self._make_choice(p, c, some, lazy))
            if len(choices) % STARTS_PER_PASS == 0:
                await asyncio.sleep(0)
        return self.make_response(choices, usage=True)

    def _make_lazy_choice(self, prompt: int, choice: int, pieces: list[TextPiece], check: Check) -> CompletionChoice:
        return self._make_choice(prompt, choice, pieces, lazy=True)

    def _make_choice(self, prompt: int, choice: int, pieces: list[TextPiece], lazy: bool) -> CompletionChoice:
        generation = self.generations[prompt]
        scored = generation.streams[choice].prompt_logprobs or generation.streams[0].prompt_logprobs
        tokenizer = self.state.service.tokenizer
        quiet = self.silent
        tokens = [] if quiet else [t for p in pieces for t in p.tokens]
        text = "" if quiet else "".join(p.text for p in pieces)
        logprobs = None
        if self.body.logprobs is not None:
            items = [] if quiet else [item for p in pieces for item in p.logprobs]
            head = list(scored or []) if self.body.echo else []
            builder = CompletionLogprobsBuilder(tokenizer, self.body.logprobs, self.state.shows_ids(self.body))
            logprobs = builder.build([*head, *items], generation.prompt.tokens[0])
        wanted = self._scores
        made = CompletionChoice(
            index=prompt * self.count + choice,
            text=self.get_echo(prompt) + text,
            logprobs=logprobs,
            finish_reason=pieces[-1].finish_reason,
            stop_reason=pieces[-1].stop_reason,
            token_ids=tokens if self.body.return_token_ids else None,
            prompt_token_ids=generation.prompt.tokens if self.body.return_token_ids else None,
        )
        if scored is not None and wanted is not None:
            set_items(made, "prompt_logprobs", scored, lambda some: make_prompt_table(tokenizer, some, wanted), lazy)
        return made

    def stream(self) -> CompletionStream:
        """Returns the stream of its events."""
        return CompletionStream(self)

    @property
    def count(self) -> int:
        """Number of choices of each prompt."""
        return self.body.n or 1

    @property
    def _scores(self) -> int | None:
        """Number of candidates per prompt token; an echo with logprobs asks for them as well."""
        asked = self.body.prompt_logprobs
        return self.body.logprobs if asked is None and self.body.echo else asked

    @property
    def silent(self) -> bool:
        """True if the answer is only the prompt (max_tokens 0)."""
        return self.body.max_tokens == 0

    def get_echo(self, prompt: int) -> str:
        """Returns the text of a prompt if the answer begins with it, else ""."""
        if not self.body.echo:
            return ""
        made = self.generations[prompt].prompt
        return made.text if made.text is not None else self.state.service.tokenizer.decode(made.tokens)

    def make_response(self, choices: list[CompletionChoice], usage: bool) -> CompletionResponse:
        """Makes an answer, or (streaming) one event of it."""
        made = CompletionResponse(
            id=self.id,
            object="text_completion",
            created=self.created,
            model=self.model,
            choices=choices,
            system_fingerprint=self.state.settings.fingerprint,
        )
        if usage:
            made.usage = make_usage(self.generations, shown=self.state.settings.config.enable_prompt_tokens_details)
        return made


async def prepare(state: ServingState, body: CompletionRequest, http: Request, ticket: Ticket) -> RunningCompletion:
    """Does everything before the engine.

    Raises:
        TrencadisError: the request cannot run.
    """
    prompts = await state.service.make_raw_prompts(
        body.list_prompts(),
        add_special_tokens=body.add_special_tokens,
        truncate=body.truncate_prompt_tokens,
        truncation_side=body.truncation_side or "left",
    )
    id = make_request_id("cmpl", http, body.request_id)
    generations = list[Generation]()
    size = 0
    # A raw prompt is no chat: what it continues has neither reasoning nor calls.
    asked = state.get_requested_format(body)
    for i, prompt in enumerate(prompts):
        await add_answer_grammar(state.grammar_cache, AnswerParsers(), state.service.tokenizer, prompt, asked)
        sampling = _make_sampling(state, body, prompt)
        size += state.answers.fit(_describe_answer(body, prompt), sampling, size)
        generations.append(state.make_generation(f"{id}-{i}", prompt, sampling, body))
        if i % STARTS_PER_PASS == STARTS_PER_PASS - 1:
            await asyncio.sleep(0)
    ticket.answer = state.answers.hold(size, ticket.answer)
    body.drop_bulky_fields()
    forget_body(http)
    return RunningCompletion(state, body, generations, id, state.check_model(body.model))


def _describe_answer(body: CompletionRequest, prompt: Prompt) -> AnswerShape:
    """Returns the parts that an answer to ``prompt`` is to hold."""
    return AnswerShape(
        len(prompt.tokens),
        logprobs_field="logprobs",
        limit_field="max_tokens" if body.max_tokens is not None else "",
        table_field="prompt_logprobs" if body.prompt_logprobs is not None else "echo",
        repeats_prompt=True,
        echo=bool(body.echo),
        ids=bool(body.return_token_ids),
        stream=bool(body.stream),
    )


def _make_sampling(state: ServingState, body: CompletionRequest, prompt: Prompt) -> SamplingParams:
    """The parameters of answers to one prompt."""
    scored = body.prompt_logprobs
    if body.echo and body.logprobs is not None:
        scored = -1 if -1 in (body.logprobs, scored) else max(body.logprobs, scored or 0)
    limit = body.max_tokens
    if limit == 0:
        if not body.echo:
            raise BadRequest("max_tokens must be at least 1, got 0.", param="max_tokens")
        check_prompt_length(len(prompt.tokens), state.service.max_model_len)
        scored = scored or 0
    else:
        defaults, tokens = state.service.defaults, len(prompt.tokens)
        most = state.service.max_model_len
        limit = resolve_output_limit("max_tokens", limit, defaults.get_max_tokens(tokens), tokens, most, defaults.cap)
    return make_sampling_params(body, state.service, limit, body.logprobs, scored)


def router(state: ServingState) -> APIRouter:
    """Makes the route over ``state``."""
    routes = APIRouter(tags=["completions"], route_class=BodyRoute)

    @routes.post("/v1/completions", response_model=CompletionResponse)
    async def completions(body: CompletionRequest, http: Request) -> Response:
        """Continues raw prompts."""
        headers = state.check_request(body)
        count = len(body.list_prompts())
        limits = state.service.limits
        if count > limits.max_prompts:
            raise BadRequest(f"At most {limits.max_prompts} prompts are allowed, got {count}.", param="prompt")
        ticket = state.admission.enter(count * max(1, min(body.n or 1, limits.max_choices)))
        keep_alive = state.settings.config.sse_keep_alive_interval
        return await run_request(
            http, ticket, prepare(state, body, http, ticket), bool(body.stream), keep_alive, headers
        )

    return routes
