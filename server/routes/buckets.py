"""``GET /buckets``: every planned shape with its state, cost and use, and the device's ledger."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from trencadis.server.engine.protocol import replicas
from trencadis.server.metrics.bucket_table import shown_all
from trencadis.server.routes.state import AppState


def router(state: AppState) -> APIRouter:
    """The route over ``state``."""
    routes = APIRouter(tags=["operation"])

    @routes.get("/buckets", response_model=dict[str, Any])
    async def buckets() -> Any:
        """Counts since the start of the server; a device without planned shapes has counts by stage only.

        Several engines have an object each, in ``engines``.
        """
        part = state.settings.part
        if part is not None:
            return Response(await part.buckets(), media_type="application/json")
        return shown_all(replicas(state.engine), state.metrics.books)

    return routes
