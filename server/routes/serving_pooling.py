"""/pooling, /classify, /v1/embeddings and Cohere's /v2/embed: pooled values of every task.

/invocations, SageMaker's only route, forwards a body to the route whose fields it has.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from inspect import signature
from typing import Any, get_type_hints

import numpy as np
from fastapi import APIRouter
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from trencadis.core.checkpoint.pooling_description import CLASSIFY, EMBED, Pooling
from trencadis.core.errors import BadRequest
from trencadis.core.json_types import Json, JsonMapping, JsonObject
from trencadis.multimodal.media_parts_and_mm_processor_kwargs import MediaScope
from trencadis.multimodal.media_timing_and_concurrency import gather_or_cancel
from trencadis.server.prompts.pooling_prompts import get_input_prompt, read_input_prompts
from trencadis.server.prompts.prompt_and_chat_messages import Prompt
from trencadis.server.protocol.base_request import Usage
from trencadis.server.protocol.pooler_output import Float32, Raw, convert_to_floats, encode_base64, finish_pooled
from trencadis.server.protocol.pooling import (
    ClassifyRequest,
    ClassifyResponse,
    ClassItem,
    CohereEmbedRequest,
    CohereEmbedResponse,
    EmbeddingItem,
    EmbeddingRequest,
    EmbeddingResponse,
    PoolingItem,
    PoolingResponse,
    PoolRequest,
)
from trencadis.server.protocol.pooling_params import PoolingParams
from trencadis.server.routes.json_io import BodyRoute, validate_off_loop
from trencadis.server.routes.pooling_base import (
    PLACE,
    BytesAnswer,
    ItemList,
    JsonParts,
    check_pooling_request,
    enter_prompts,
    get_label,
    get_longest_input,
    get_pooling,
    make_bytes_answer,
    make_prompts,
    respond,
    run_prompts,
    write_item,
)
from trencadis.server.routes.serving_base import ServingState
from trencadis.server.tenants.server_admission_and_byte_budgets import Ticket
from trencadis.server.text.off_event_loop import is_small


async def pool_prompts(
    state: ServingState, body: EmbeddingRequest, http: Request, ticket: Ticket, params: PoolingParams
) -> ItemList | BytesAnswer:
    """The answer of a checked request, in the form of its route."""
    prompts = await make_prompts(state, body, http, ticket, get_longest_input(state, params))
    embeds = not isinstance(body, PoolRequest)
    made = await run_prompts(state, body, http, ticket, prompts, "embd" if embeds else "pooling", params)
    pooling = get_pooling(state)
    if body.as_bytes:
        return make_bytes_answer(made, body, pooling, params)
    form = EmbeddingResponse if embeds else PoolingResponse
    head = form(id=made.id, created=made.created, model=made.model, data=[], usage=made.usage)

    def write(index: int, raw: Raw) -> Iterator[str]:
        item = EmbeddingItem(index=index, embedding=PLACE) if embeds else PoolingItem(index=index, data=PLACE)
        return write_item(item, raw, pooling, params, body)

    return ItemList(head, (write(i, raw) for i, raw in made.take_values()))


def router(state: ServingState) -> APIRouter:
    """Makes the route over ``state``."""
    routes = APIRouter(tags=["pooling"], route_class=BodyRoute)

    @routes.post("/pooling", response_model=PoolingResponse)
    async def pooling(body: PoolRequest, http: Request) -> Response:
        """Embeddings or probabilities, as the server makes them."""
        params, headers = check_pooling_request(state, body)
        ticket = enter_prompts(state, len(body.list_prompts()), "input")
        return await respond(http, ticket, pool_prompts(state, body, http, ticket, params), headers)

    return routes


async def classify_prompts(
    state: ServingState, body: ClassifyRequest, http: Request, ticket: Ticket, params: PoolingParams
) -> ItemList:
    """Makes the answer of a checked request."""
    prompts = await make_prompts(state, body, http, ticket)
    id, created, model, values, usage = await run_prompts(state, body, http, ticket, prompts, "classify", params)
    pooling = get_pooling(state)
    head = ClassifyResponse(id=id, created=created, model=model, data=[], usage=usage)
    return ItemList(head, (_make_item(i, v, pooling, params) for i, v in enumerate(values)))


def _make_item(index: int, raw: Raw, pooling: Pooling, params: PoolingParams) -> ClassItem:
    probs = finish_pooled(raw, pooling, params)
    return ClassItem(
        index=index, label=get_label(pooling, probs), probs=convert_to_floats(probs), num_classes=len(probs)
    )


def make_classify_router(state: ServingState) -> APIRouter:
    """Makes the route over ``state``."""
    routes = APIRouter(tags=["pooling"], route_class=BodyRoute)

    @routes.post("/classify", response_model=ClassifyResponse)
    async def classify(body: ClassifyRequest, http: Request) -> Response:
        """Probabilities of classes, of texts, ids or a conversation with images."""
        params, headers = check_pooling_request(state, body, CLASSIFY)
        ticket = enter_prompts(state, len(body.list_prompts()), "input")
        return await respond(http, ticket, classify_prompts(state, body, http, ticket, params), headers)

    return routes


Endpoint = Callable[[Any, Request], Awaitable[Response]]

FIELDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("/v1/chat/completions", ("messages",)),
    ("/v1/completions", ("prompt",)),
    ("/rerank", ("query", "documents")),
    ("/score", ("text_1",)),
    ("/score", ("queries",)),
    ("/score", ("data_1",)),
    ("/pooling", ("task",)),
)
"""Paths, and the fields that a body for them has; other bodies go to a pooling server's first route. """


def make_router(routers: Iterable[APIRouter], otherwise: str) -> APIRouter:
    """Makes the route over the endpoints of ``routers``; ``otherwise``: the path for a body with no known field."""
    known: Mapping[str, Endpoint] = {
        route.path: route.endpoint for one in routers for route in one.routes if isinstance(route, APIRoute)
    }
    made = APIRouter(tags=["operation"], route_class=BodyRoute)

    @made.post("/invocations", include_in_schema=False)
    async def invoke(body: JsonObject, http: Request) -> Response:
        """Answers as the route does whose fields the body has."""
        found = (path for path, fields in FIELDS if path in known and all(body.get(f) is not None for f in fields))
        path = next(found, otherwise)
        if path not in known:
            raise BadRequest("The body fits no route of this server; give messages or prompt.")
        endpoint = known[path]
        if is_small(body):
            return await endpoint(parse_request(endpoint, body), http)
        return await endpoint(await validate_off_loop(lambda: parse_request(endpoint, body)), http)

    return made


def parse_request(endpoint: Endpoint, body: JsonObject) -> BaseModel:
    """Returns the request that ``endpoint`` takes.

    Raises:
        RequestValidationError: the body is no such request.
    """
    kind: type[BaseModel] = get_type_hints(endpoint)[next(iter(signature(endpoint).parameters))]
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise RequestValidationError(error.errors()) from None


def make_embedding_router(state: ServingState) -> APIRouter:
    """Makes the route over ``state``."""
    routes = APIRouter(tags=["pooling"], route_class=BodyRoute)

    @routes.post("/v1/embeddings", response_model=EmbeddingResponse)
    async def embeddings(body: EmbeddingRequest, http: Request) -> Response:
        """Embeddings of texts, ids or a conversation with images."""
        params, headers = check_pooling_request(state, body, EMBED)
        ticket = enter_prompts(state, len(body.list_prompts()), "input")
        return await respond(http, ticket, pool_prompts(state, body, http, ticket, params), headers)

    return routes


LONG = "{} has {} tokens, above max_tokens={} with truncate NONE; START or END cut it."


async def embed_inputs(
    state: ServingState, body: CohereEmbedRequest, http: Request, ticket: Ticket, params: PoolingParams, prefix: str
) -> JsonParts:
    """The answer of a checked request; ``prefix`` stands before each text."""
    prompts = await _make_prompts(state, body, http, ticket, params, prefix)
    name = "texts" if body.texts else "images" if body.images else "inputs"
    longest = max(len(p.tokens) for p in prompts)
    if body.truncate == "NONE" and body.max_tokens is not None and longest > body.max_tokens:
        raise BadRequest(LONG.format(name, longest, body.max_tokens), param=name)
    texts, types = body.texts, body.types
    made = await run_prompts(state, body, http, ticket, prompts, "embd", params)
    meta = {"api_version": {"version": "2"}, "billed_units": _count_billed(made.usage),
            "tokens": {"input_tokens": made.usage.prompt_tokens}}  # fmt: skip
    head = {"id": made.id, "response_type": "embeddings_by_type"}
    tail = ({"texts": texts} if texts else {}) | {"meta": meta}
    return JsonParts(_write_answer(head, types, made.values, tail, get_pooling(state), params))


def _count_billed(usage: Usage) -> dict[str, int]:
    """Returns Cohere's counts: the tokens of texts, or those of inputs with images."""
    seen = usage.prompt_tokens_details is not None and bool(usage.prompt_tokens_details.image_tokens)
    return {"input_tokens": 0 if seen else usage.prompt_tokens, "image_tokens": usage.prompt_tokens if seen else 0}


async def _make_prompts(
    state: ServingState, body: CohereEmbedRequest, http: Request, ticket: Ticket, params: PoolingParams, prefix: str
) -> list[Prompt]:
    cut, side = body.truncation
    if body.texts:
        longest = 0 if cut is not None and cut > 0 else get_longest_input(state, params)
        try:
            return await state.service.make_raw_prompts(
                [prefix + text for text in body.texts], add_special_tokens=body.add_special_tokens,
                truncate=None if longest else cut, truncation_side=side, longest=longest,
            )  # fmt: skip
        except BadRequest as error:
            raise _name_field(error, "texts") from None
    if state.service.template is None:
        raise BadRequest("This model has no chat template; it embeds texts alone.", param="images")
    state.check_template(body.chat_template)
    given = [[{"type": "image_url", "image_url": url}] for url in body.images or []] or [
        _read_parts(one, f"inputs[{i}]") for i, one in enumerate(body.inputs or [])
    ]
    scope = state.make_media_scope(body, http, ticket)
    made = (_make_conversation(state, body, parts, prefix, scope, cut, side) for parts in given)
    return list(await gather_or_cancel(made))


def _read_parts(given: Json, where: str) -> list[Json]:
    """The parts of one of ``inputs``."""
    parts = given.get("content") if isinstance(given, dict) else None
    if not isinstance(parts, list) or not parts:
        raise BadRequest(f"{where} must be an object with content, a list of parts.", param=where)
    return parts


async def _make_conversation(
    state: ServingState, body: CohereEmbedRequest, parts: Sequence[Json], prefix: str, scope: MediaScope,
    cut: int | None, side: str,
) -> Prompt:  # fmt: skip
    """The prompt of one input; ``prefix`` becomes its system message."""
    messages: list[Json] = [{"role": "system", "content": prefix}] if prefix else []
    has_media = any(isinstance(part, dict) and part.get("type") != "text" for part in parts)
    return await state.service.make_chat_prompt(
        [*messages, {"role": "user", "content": parts}],
        add_generation_prompt=False,
        kwargs={**state.settings.config.default_chat_template_kwargs, **(body.chat_template_kwargs or {})},
        chat_template=body.chat_template,
        truncate=None if has_media else cut,
        truncation_side=side,
        scope=scope,
    )


def _name_field(error: BadRequest, name: str) -> BadRequest:
    return BadRequest(error.message, param=name if error.param == "prompt" else error.param)


def _write_answer(
    head: JsonMapping, types: Sequence[str], values: Sequence[Raw], tail: JsonMapping,
    pooling: Pooling, params: PoolingParams,
) -> Iterator[str]:  # fmt: skip
    """The JSON text of an answer, one embedding at a time."""
    yield json.dumps(head)[:-1] + ', "embeddings": {'
    for i, form in enumerate(types):
        yield f'{", " if i else ""}"{form}": ['
        for j, text in enumerate(_format_all(form, (finish_pooled(v, pooling, params) for v in values))):
            yield ("," if j else "") + text
        yield "]"
    yield "}, " + json.dumps(tail)[1:]


def _format_all(form: str, vectors: Iterable[Float32]) -> Iterator[str]:
    for vector in vectors:
        match form:
            case "float":
                yield json.dumps(convert_to_floats(vector))
            case "base64":
                yield json.dumps(encode_base64(vector))
            case _:
                bits = np.packbits(vector >= 0)
                yield json.dumps((bits if form == "ubinary" else bits.astype(np.int16) - 128).tolist())


def make_cohere_embed_router(state: ServingState) -> APIRouter:
    """The route over ``state``."""
    routes = APIRouter(tags=["pooling"], route_class=BodyRoute)
    known = {} if state.service.config.pooling is None else read_input_prompts(state.service.config.path)

    @routes.post("/v2/embed", response_model=CohereEmbedResponse)
    async def cohere_embed(body: CohereEmbedRequest, http: Request) -> Response:
        """Embeddings of texts, images or both, in the forms of Cohere's API."""
        params, headers = check_pooling_request(state, body, EMBED)
        prefix = get_input_prompt(known, body.input_type)
        size = params.dimensions or get_pooling(state).default_dimensions or state.service.config.text.width
        if size % 8 and any(form.endswith("binary") for form in body.types):
            raise BadRequest(f"Binary embeddings need a multiple of 8 dimensions, not {size}.", param="embedding_types")
        ticket = enter_prompts(state, body.count, "texts")
        return await respond(http, ticket, embed_inputs(state, body, http, ticket, params, prefix), headers)

    return routes
