"""The smallest app over a supervisor: health, and counted tokens as a stream."""

from __future__ import annotations

import itertools

from fastapi import APIRouter, FastAPI
from fastapi.responses import JSONResponse, StreamingResponse

from trencadis.core.request import Request, SamplingParams


def build_app(settings, supervisor):
    app = FastAPI()
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

    app.include_router(router)
    return app
