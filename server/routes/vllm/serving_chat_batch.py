"""/v1/chat/completions/batch: one choice for each conversation, all under one id."""

from __future__ import annotations

from dataclasses import dataclass

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from trencadis.core.errors import BadRequest, TrencadisError
from trencadis.multimodal.async_gather import gather_or_cancel
from trencadis.server.admission import Ticket
from trencadis.server.protocol.chat_batch_request import BatchChatRequest
from trencadis.server.protocol.chat_completions import ChatRequest, ChatResponse, Choice
from trencadis.server.routes.app_state import AppState, make_usage
from trencadis.server.routes.request_body import BodyRoute
from trencadis.server.routes.serving_base import run_request
from trencadis.server.routes.serving_chat import RunningChat, prepare
from trencadis.server.routes.sse import StreamFormat
from trencadis.server.routes.streams.piece_stream import PieceStream


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


async def prepare_all(state: AppState, body: BatchChatRequest, http: Request, ticket: Ticket) -> BatchChat:
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


def router(state: AppState) -> APIRouter:
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
