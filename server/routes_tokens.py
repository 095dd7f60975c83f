"""/tokenize and /detokenize."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from trencadis.core.errors import BadRequest
from trencadis.multimodal.options import MediaScope
from trencadis.server.protocol.models import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from trencadis.server.service import Prompt
from trencadis.server.sse import until_gone
from trencadis.server.state import State


def router(state: State) -> APIRouter:
    """The routes over ``state``."""
    routes = APIRouter(tags=["tokens"])

    async def prompt_of(body: TokenizeRequest, scope: MediaScope) -> Prompt:
        if (body.prompt is None) == (body.messages is None):
            raise BadRequest("Give either prompt or messages.", param="prompt")
        if body.messages is None:
            special = body.add_special_tokens is not False
            return await state.service.raw_prompt(body.prompt or "", add_special_tokens=special)
        state.check_template(body.chat_template)
        return await state.service.chat_prompt(
            body.messages,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            tools=body.tools,
            kwargs={**state.settings.default_chat_template_kwargs, **(body.chat_template_kwargs or {})},
            chat_template=body.chat_template,
            scope=scope,
        )

    @routes.post("/tokenize", response_model_exclude_none=True)
    async def tokenize(body: TokenizeRequest, http: Request, response: Response) -> TokenizeResponse:
        """The ids of a raw prompt or of a conversation, its images' placeholders expanded."""
        state.check_model(body.model)
        body.check_salt()
        response.headers.update(state.check_fields(body))
        ticket = state.admission.enter()
        try:
            tokens = (await until_gone(http, prompt_of(body, state.scope(body, http, ticket)))).tokens
        finally:
            ticket.leave()
        names = [state.service.tokenizer.token(t) or "" for t in tokens] if body.return_token_strs else None
        return TokenizeResponse(count=len(tokens), max_model_len=state.max_model_len, tokens=tokens, token_strs=names)

    @routes.post("/detokenize")
    async def detokenize(body: DetokenizeRequest, response: Response) -> DetokenizeResponse:
        """The text of ids, special tokens included."""
        state.check_model(body.model)
        response.headers.update(state.check_fields(body))
        bad = next((t for t in body.tokens if not 0 <= t < state.service.limits.vocab), None)
        if bad is not None:
            raise BadRequest(f"Token id {bad} is out of vocabulary.", param="tokens")
        return DetokenizeResponse(prompt=state.service.tokenizer.decode(body.tokens, skip_special_tokens=False))

    return routes
