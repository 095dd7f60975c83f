"""``GET /buckets``: every planned shape with its state, cost and use, and the device's ledger."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from trencadis.server.engine.engine_client import get_replicas
from trencadis.server.metrics.bucket_table import describe_all_buckets
from trencadis.server.routes.app_state import AppState


def router(state: AppState) -> APIRouter:
    """Makes the route over ``state``."""
    routes = APIRouter(tags=["operation"])

    @routes.get("/buckets", response_model=dict[str, Any])
    async def buckets() -> Any:
        """Counts since the start of the server; a device without planned shapes has counts by stage only.

        Several engines have an object each, in ``engines``.
        """
        shared = state.settings.shared
        if shared is not None:
            return Response(await shared.fetch_buckets(), media_type="application/json")
        return describe_all_buckets(get_replicas(state.engine), state.metrics.bucket_metrics)

    return routes
