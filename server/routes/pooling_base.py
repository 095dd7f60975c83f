"""Prompts of a pooling request, their values from the engine, and the response."""

from __future__ import annotations

import asyncio
import json
import math
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from trencadis.core.checkpoint.pooling_description import CLASSIFY, Pooling
from trencadis.core.errors import BadRequest, TrencadisError
from trencadis.server.prompts.generation_stream import STARTS_PER_PASS, Generation
from trencadis.server.prompts.pooling_prompts import average_chunks, divide_prompts, make_pooling_request, run_pooling
from trencadis.server.prompts.prompt_and_chat_messages import Prompt
from trencadis.server.protocol.base_request import PromptTokensDetails, Usage
from trencadis.server.protocol.pooler_output import (
    Float32,
    Raw,
    encode_values,
    get_finished_shape,
    write_base64,
    write_bytes,
    write_numbers,
)
from trencadis.server.protocol.pooling import EmbeddingRequest, PoolingRequest, PromptedRequest
from trencadis.server.protocol.pooling_params import PoolingParams
from trencadis.server.routes.json_io import WRITE, ChargedResponse, forget_body
from trencadis.server.routes.serving_base import ServingState, make_request_id, mark_runs_model
from trencadis.server.routes.sse import run_until_disconnect
from trencadis.server.tenants.server_admission_and_byte_budgets import Ticket

Part = TypeVar("Part", str, bytes)
INPUTS = ("messages", "input", "documents", "texts", "images", "inputs", "data_1")
"""Fields of pooling requests that hold what is pooled, the longest first."""
PLACE = "<values>"
NOTHING: Raw = np.zeros(0, np.float32)
IN_LOOP = 16
"""Items of an answer that are written before the event loop serves other requests."""


class PooledValues(NamedTuple):
    """The engine's results: ``read_raw_values`` of each prompt, and the usage of all."""

    id: str
    created: int
    model: str
    values: list[Raw]
    usage: Usage

    def take_values(self) -> Iterator[tuple[int, Raw]]:
        """Yields each prompt's number and values, which are dropped once the next ones are taken."""
        for i in range(len(self.values)):
            yield i, self.values[i]
            self.values[i] = NOTHING


def get_pooling(state: ServingState) -> Pooling:
    """Returns the pooling settings of the model; called only by routes that exist if it pools."""
    assert state.service.config.pooling is not None
    return state.service.config.pooling


def check_pooling_request(
    state: ServingState, body: PoolingRequest, task: str = ""
) -> tuple[PoolingParams, dict[str, str]]:
    """Checks a request; returns its parameters and the response headers.

    Raises:
        TrencadisError: the request may not run.
    """
    mark_runs_model()
    state.check_accepting()
    state.check_model(body.model)
    body.check()
    headers = state.check_fields(body)
    params = body.make_params()
    params.task = params.task or task or None
    params.check(get_pooling(state), state.service.config.text.width)
    return params, headers


def enter_prompts(state: ServingState, count: int, param: str) -> Ticket:
    """Admits ``count`` prompts and returns their ticket.

    Raises:
        BadRequest: too many in one request.
        QueueFull: the server is full.
    """
    most = state.service.limits.max_prompts
    if count > most:
        raise BadRequest(f"At most {most} inputs are allowed, got {count}.", param=param)
    return state.admission.enter(max(count, 1))


def get_longest_input(state: ServingState, params: PoolingParams) -> int:
    """Most tokens of a text that may run in parts because it is longer than the model's length; 0: none may."""
    pooling = get_pooling(state)
    if not pooling.chunked or params.wants_token_values(pooling):
        return 0
    # One that is too long for --pooler-config is refused by that name, once its tokens are known.
    return max(pooling.longest, state.service.max_counted_tokens)


def check_input_lengths(pooling: Pooling, prompts: Sequence[Prompt]) -> None:
    """Raises BadRequest for a text above ``max_embed_len`` of ``--pooler-config``."""
    longest = max((len(p.tokens) for p in prompts), default=0)
    if 0 < pooling.longest < longest:
        raise BadRequest(f"input has {longest} tokens; this server embeds at most {pooling.longest}.", param="input")


async def make_prompts(
    state: ServingState, body: PromptedRequest, http: Request, ticket: Ticket, longest: int = 0
) -> list[Prompt]:
    """The prompts of ``input``, of at most ``longest`` tokens where that is not 0, or of ``messages``.

    Raises:
        TrencadisError: one of them cannot be made; ``param`` names the field.
    """
    side = body.truncation_side or ""
    if body.messages is None:
        try:
            return await state.service.make_raw_prompts(
                body.list_prompts(), add_special_tokens=body.add_special_tokens, truncate=body.truncate_prompt_tokens,
                truncation_side=side, longest=longest,
            )  # fmt: skip
        except BadRequest as error:
            raise BadRequest(error.message, param="input" if error.param == "prompt" else error.param) from None
    state.check_template(body.chat_template)
    try:
        made = await state.service.make_chat_prompt(
            body.messages,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            kwargs={**state.settings.config.default_chat_template_kwargs, **(body.chat_template_kwargs or {})},
            chat_template=body.chat_template,
            truncate=body.truncate_prompt_tokens,
            truncation_side=side or "left",
            scope=state.make_media_scope(body, http, ticket),
        )
    except TrencadisError as error:
        if "content[" in (error.param or ""):
            state.metrics.count_media_error(error.type)
        raise
    return [made]


async def run_prompts(
    state: ServingState, body: PoolingRequest, http: Request, ticket: Ticket, prompts: Sequence[Prompt], prefix: str,
    params: PoolingParams,
) -> PooledValues:  # fmt: skip
    """Pools all prompts on the engine.

    Raises:
        TrencadisError: the engine failed, or the server is full.
    """
    ticket.charge(tokens=sum(len(p.tokens) for p in prompts))
    forget_body(http)
    check_input_lengths(get_pooling(state), prompts)
    chunks = divide_prompts(prompts, state.service.config.text, state.service.max_model_len)
    _charge_answer(state, body, ticket, chunks.prompts, params)
    id = make_request_id(prefix, http, body.request_id)
    generations: list[Generation] = []
    pooling = get_pooling(state)
    for i, prompt in enumerate(chunks.prompts):
        made = make_pooling_request(
            f"{id}-{i}-{uuid.uuid4().hex[:8]}", prompt, pooling, params, arrival=time.time(),
            salt=body.cache_salt or "", priority=body.priority,
        )  # fmt: skip
        made.replica = state.get_pinned_replica()
        made.adapter = state.find_adapter(body.model, prompt)
        made_of = Generation(state.engine, state.service, made, prompt, state.metrics.record_finished)
        generations.append(state.record_generation(made_of))
        if i % STARTS_PER_PASS == STARTS_PER_PASS - 1:
            await asyncio.sleep(0)
    values: list[Raw] = [*await run_pooling(generations, pooling, params)]
    if len(chunks.prompts) > len(prompts):
        values = [*average_chunks(chunks, values)]
    return PooledValues(id, int(time.time()), state.check_model(body.model), values, _make_usage(generations))


def _charge_answer(
    state: ServingState, body: PoolingRequest, ticket: Ticket, prompts: Sequence[Prompt], params: PoolingParams
) -> None:
    """Counts the float32 values that are held until the answer is written.

    Raises:
        BadRequest: they are more than ``--max-answer-bytes``.
        QueueFull: other large answers leave no room.
    """
    pooling = get_pooling(state)
    rows = sum(len(p.tokens) for p in prompts) if params.wants_token_values(pooling) else len(prompts)
    size = 4 * rows * (pooling.classes or state.service.config.text.width)
    field = next((name for name in INPUTS if getattr(body, name, None)), "input")
    state.answers.check_values(size, field)
    ticket.answer = state.answers.hold(size, ticket.answer)


def _make_usage(generations: Sequence[Generation]) -> Usage:
    tokens = sum(len(g.prompt.tokens) for g in generations)
    details = PromptTokensDetails(
        cached_tokens=sum(g.timing.cached for g in generations),
        image_tokens=sum(g.prompt.count_media_tokens(videos=False) for g in generations),
        video_tokens=sum(g.prompt.count_media_tokens(videos=True) for g in generations),
    )
    return Usage(prompt_tokens=tokens, total_tokens=tokens, prompt_tokens_details=details)


def write_item(
    item: BaseModel, raw: Raw, pooling: Pooling, params: PoolingParams, body: EmbeddingRequest
) -> Iterator[str]:
    """Writes ``item`` with one prompt's values, numbers or base64, in the place of the text ``PLACE``."""
    before, _, after = item.model_dump_json().partition(f'"{PLACE}"')
    yield before
    if body.encoding_format == "base64":
        yield from write_base64(raw, pooling, params, *body.value_format)
    else:
        yield from write_numbers(raw, pooling, params)
    yield after


def get_label(pooling: Pooling, probs: Float32) -> str | None:
    """Returns the name of the likeliest class."""
    assert pooling.task == CLASSIFY
    best = int(probs.argmax())
    return pooling.labels[best] if best < len(pooling.labels) else None


class ItemList(NamedTuple):
    """The head of an answer without its items, and the items, which are made and written a few at a time.

    An item may be its JSON text, in pieces.
    """

    head: BaseModel
    items: Iterable[BaseModel | Iterator[str]]


class BytesAnswer(NamedTuple):
    """An answer whose body is bytes: a header that describes it, or none, and the parts of the body."""

    metadata: str
    parts: Iterable[bytes]


class JsonParts(NamedTuple):
    """An answer whose JSON text comes in parts."""

    parts: Iterable[str]


def make_bytes_answer(
    made: PooledValues, body: EmbeddingRequest, pooling: Pooling, params: PoolingParams
) -> BytesAnswer:
    """The answer of ``encoding_format`` ``bytes`` or ``bytes_only``."""
    dtype, order = body.value_format
    items: list[dict[str, Any]] = []
    start, size = 0, len(encode_values(np.zeros(1, np.float32), dtype, order))
    for i, raw in enumerate(made.values):
        shape = get_finished_shape(raw, pooling, params)
        end = start + size * math.prod(shape)
        items.append({"index": i, "embed_dtype": dtype, "endianness": order, "start": start, "end": end,
                      "shape": [*shape]})  # fmt: skip
        start = end
    taken = (raw for _, raw in made.take_values())
    parts = (part for raw in taken for part in write_bytes(raw, pooling, params, dtype, order))
    if body.encoding_format == "bytes_only":
        return BytesAnswer("", parts)
    usage = {"prompt_tokens": made.usage.prompt_tokens, "total_tokens": made.usage.total_tokens}
    head = {"id": made.id, "created": made.created, "model": made.model, "data": items, "usage": usage}
    return BytesAnswer(json.dumps(head, separators=(",", ":")), parts)


async def respond(
    http: Request, ticket: Ticket, work: Awaitable[ItemList | BytesAnswer | JsonParts], headers: dict[str, str]
) -> Response:
    """The response; releases the ticket. The work is cancelled if the client disconnects.

    A thousand embeddings are tens of megabytes of JSON, so the text is made while it is sent.
    """
    try:
        made = await run_until_disconnect(http, work)
        charge = ticket.take_answer()
    finally:
        ticket.leave()
    done = (lambda: None) if charge is None else charge.release
    if isinstance(made, BytesAnswer):
        described = {"metadata": made.metadata} if made.metadata else {}
        return ChargedResponse(_write_parts(made.parts), done, {**headers, **described}, "application/octet-stream")
    if isinstance(made, JsonParts):
        return ChargedResponse(_write_parts(made.parts), done, headers)
    key = '"results":[' if "results" in type(made.head).model_fields else '"data":['
    before, _, after = made.head.model_dump_json().partition(key)
    return ChargedResponse(_write_json(before + key, made.items, after), done, headers)


async def _write_parts(parts: Iterable[Part]) -> AsyncIterator[Part]:
    """The parts; the event loop serves others after ``IN_LOOP`` of them."""
    for i, part in enumerate(parts):
        yield part
        if i % IN_LOOP == IN_LOOP - 1:
            await asyncio.sleep(0)


async def _write_json(before: str, items: Iterable[BaseModel | Iterator[str]], after: str) -> AsyncIterator[str]:
    """Yields the JSON text in pieces of ``WRITE`` characters, between which the event loop serves others."""
    text, comma = before, ""
    for i, item in enumerate(items):
        text += comma
        comma = ","
        for piece in [item.model_dump_json()] if isinstance(item, BaseModel) else item:
            text += piece
            if len(text) >= WRITE:
                yield text
                text = ""
                await asyncio.sleep(0)
        if i % IN_LOOP == IN_LOOP - 1:
            await asyncio.sleep(0)
    yield text + after


def merge_pooled(parts: Sequence[PooledValues]) -> PooledValues:
    """Combines the results of several runs of one request."""
    first, whole = parts[0], Usage(prompt_tokens_details=PromptTokensDetails())
    assert whole.prompt_tokens_details is not None
    for part in parts:
        whole.prompt_tokens += part.usage.prompt_tokens
        whole.total_tokens += part.usage.total_tokens
        details = part.usage.prompt_tokens_details
        assert details is not None
        for name in ("cached_tokens", "image_tokens", "video_tokens"):
            sum_of = getattr(whole.prompt_tokens_details, name) + getattr(details, name)
            setattr(whole.prompt_tokens_details, name, sum_of)
    return first._replace(values=[v for part in parts for v in part.values], usage=whole)
