"""The smallest app over a supervisor: health, and counted tokens as a stream, as events, or in one piece."""

from __future__ import annotations

import asyncio
import itertools

from fastapi import APIRouter, FastAPI
from fastapi.responses import JSONResponse, StreamingResponse

from trencadis.core.errors import from_status
from trencadis.core.request import Request, SamplingParams
from trencadis.server.http.request_middleware import RequestMiddleware
from trencadis.server.routes.api_keys_and_allowed_hosts import Keys
from trencadis.server.routes.sse import EventStream


def build_app(settings, supervisor):
    app = FastAPI()
    app.add_middleware(RequestMiddleware, keys=Keys(()), max_body=1 << 20, observe=lambda *_: None)
    ids = itertools.count()

    @app.get("/health")
    async def health():
        return JSONResponse({"phase": supervisor.phase}, 200 if supervisor.healthy else 503)

    router = APIRouter()

    @router.get("/count")
    async def count(kind: int = 1, tokens: int = 3):
        request = Request(f"r{next(ids)}", [kind], SamplingParams(max_tokens=tokens))

        async def lines():
            async for delta in supervisor.submit(request, ()):
                yield f"{delta.tokens} {delta.finish}\n"

        return StreamingResponse(lines())

    async def tokens_of(kind, tokens):
        request = Request(f"r{next(ids)}", [kind], SamplingParams(max_tokens=tokens))
        async for delta in supervisor.submit(request, ()):
            if delta.finish == "error":
                raise from_status(delta.status, delta.message)
            yield b"data: %d\n\n" % delta.tokens[0]

    @router.get("/events")
    async def events(kind: int, tokens: int):
        return EventStream(tokens_of(kind, tokens))

    @router.get("/whole")
    async def whole(kind: int, tokens: int):
        return len([t async for t in tokens_of(kind, tokens)])

    fetching = []

    @router.get("/fetch")
    async def fetch():
        """A request that is not in the engine yet."""
        fetching.append(1)
        await asyncio.sleep(600)

    @router.get("/inside")
    async def inside():
        return supervisor.open_requests + len(fetching)

    app.include_router(router)
    return app
