"""/tokenize, /detokenize and /tokenizer_info."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from fastapi import APIRouter
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from trencadis.core.checkpoint.json_fields import read_json
from trencadis.core.errors import BadRequest, NotFound
from trencadis.core.json_types import JsonObject
from trencadis.multimodal.media_parts_and_mm_processor_kwargs import MediaScope
from trencadis.server.prompts.prompt_and_chat_messages import Prompt
from trencadis.server.protocol.models_and_tokenize import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from trencadis.server.routes.json_io import BodyRoute
from trencadis.server.routes.openai_output import list_image_details, list_video_details
from trencadis.server.routes.serving_base import ServingState
from trencadis.server.routes.sse import run_until_disconnect
from trencadis.server.tenants.server_admission_and_byte_budgets import Ticket
from trencadis.server.text.off_event_loop import Check, OffEventLoop, no_check

T = TypeVar("T")
TOKENIZER_CONFIG = "tokenizer_config.json"
IN_LOOP = 1000
"""Most tokens of an answer that is written in the event loop."""
_OFF_LOOP = OffEventLoop("tokens")


def router(state: ServingState) -> APIRouter:
    """Makes the routes over ``state``."""
    routes = APIRouter(tags=["tokens"], route_class=BodyRoute)

    async def prompt_of(body: TokenizeRequest, scope: MediaScope) -> Prompt:
        if (body.prompt is None) == (body.messages is None):
            raise BadRequest("Give either prompt or messages.", param="prompt")
        if body.messages is None:
            special, most = body.add_special_tokens is not False, state.service.max_counted_tokens
            return await state.service.make_raw_prompt(body.prompt or "", add_special_tokens=special, most=most)
        state.check_template(body.chat_template)
        return await state.service.make_chat_prompt(
            body.messages,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            tools=body.tools,
            kwargs={**state.settings.config.default_chat_template_kwargs, **(body.chat_template_kwargs or {})},
            chat_template=body.chat_template,
            scope=scope,
            most=state.service.max_counted_tokens,
        )

    async def make_tokenize_response(body: TokenizeRequest, scope: MediaScope, headers: dict[str, str]) -> Response:
        prompt = await prompt_of(body, scope)
        sizes = body.return_image_sizes and body.messages is not None

        def build_body(check: Check) -> BaseModel:
            return build_tokenize_response(state, prompt, names=bool(body.return_token_strs), sizes=sizes)

        return await write_response(build_body, len(prompt.tokens), headers)

    @routes.post("/tokenize", response_model=TokenizeResponse)
    async def tokenize(body: TokenizeRequest, http: Request) -> Response:
        """The ids of a raw prompt or a conversation, placeholders of images expanded; also of more than the context."""
        state.check_model(body.model)
        body.check_salt()
        headers = state.check_fields(body)
        ticket = state.admission.enter()
        return await run_with_ticket(
            http, ticket, make_tokenize_response(body, state.make_media_scope(body, http, ticket), headers)
        )

    @routes.post("/detokenize", response_model=DetokenizeResponse)
    async def detokenize(body: DetokenizeRequest, http: Request) -> Response:
        """The text of ids, special tokens included; at most max_model_len ids."""
        state.check_model(body.model)
        headers = state.check_fields(body)
        most = state.service.max_model_len
        if len(body.tokens) > most:
            raise BadRequest(f"tokens holds at most {most} ids, got {len(body.tokens)}.", param="tokens")
        return await run_with_ticket(
            http, state.admission.enter(), make_detokenize_response(state, body.tokens, headers)
        )

    return routes


def build_tokenize_response(state: ServingState, prompt: Prompt, *, names: bool, sizes: bool) -> TokenizeResponse:
    """Returns the ids of ``prompt``; with ``names`` also each token's text, with ``sizes`` those of its images."""
    token = state.service.tokenizer.get_token
    return TokenizeResponse(
        count=len(prompt.tokens),
        max_model_len=state.service.max_model_len,
        tokens=prompt.tokens,
        token_strs=[token(t) or "" for t in prompt.tokens] if names else None,
        images=list_image_details(prompt) if sizes else None,
        videos=(list_video_details(prompt) or None) if sizes else None,
    )


async def make_detokenize_response(state: ServingState, tokens: list[int], headers: dict[str, str]) -> Response:
    """Makes the response with the text of ``tokens``."""

    def build_body(check: Check) -> BaseModel:
        bad = next((t for t in tokens if not 0 <= t < state.service.limits.vocab), None)
        if bad is not None:
            raise BadRequest(f"Token id {bad} is out of vocabulary.", param="tokens")
        return DetokenizeResponse(prompt=state.service.tokenizer.decode(tokens, skip_special_tokens=False))

    return await write_response(build_body, len(tokens), headers)


async def run_with_ticket(http: Request, ticket: Ticket, work: Awaitable[T]) -> T:
    """Returns the result of ``work``, which is cancelled if the client disconnects; releases the ticket."""
    try:
        return await run_until_disconnect(http, work)
    finally:
        ticket.leave()


async def write_response(made: Callable[[Check], BaseModel], tokens: int, headers: dict[str, str]) -> Response:
    """Makes the response with the body that ``made`` builds from ``tokens`` tokens."""

    def write(check: Check) -> str:
        return made(check).model_dump_json()

    text = write(no_check) if tokens <= IN_LOOP else await _OFF_LOOP.run(write)
    return Response(text, media_type="application/json", headers=headers)


def make_tokenizer_info_router(state: ServingState) -> APIRouter:
    """Makes the route of the tokenizer's settings; none unless ``--enable-tokenizer-info-endpoint`` is given."""
    routes = APIRouter(tags=["tokens"])
    if state.settings.config.enable_tokenizer_info_endpoint:

        @routes.get("/tokenizer_info", include_in_schema=False)
        async def tokenizer_info() -> Response:
            """The checkpoint's tokenizer_config.json, with the chat template in use."""
            return JSONResponse(_get_tokenizer_settings(state))

    return routes


def _get_tokenizer_settings(state: ServingState) -> JsonObject:
    """Returns the settings that the tokenizer was made from.

    Raises:
        NotFound: the checkpoint has no such file.
    """
    folder = state.service.tokenizer.folder
    found = None if folder is None else read_json(folder / TOKENIZER_CONFIG)
    if not isinstance(found, dict):
        raise NotFound(f"The checkpoint has no {TOKENIZER_CONFIG}.")
    template = state.service.template
    shown = {**found, "tokenizer_class": str(found.get("tokenizer_class") or "PreTrainedTokenizerFast")}
    return shown if template is None else {**shown, "chat_template": template.text}
