"""/v1/models."""

from __future__ import annotations

from fastapi import APIRouter

from trencadis.server.protocol.models_and_tokenize import ModelCard, ModelList, Permission
from trencadis.server.routes.app_state import AppState


def router(state: AppState) -> APIRouter:
    """Makes the routes over ``state``."""
    routes = APIRouter(tags=["models"])

    def card(name: str) -> ModelCard:
        return ModelCard(
            id=name,
            created=state.created,
            root=state.settings.model_root or name,
            max_model_len=state.service.max_model_len,
            permission=[Permission(id=f"modelperm-{name}", created=state.created)],
        )

    @routes.get("/v1/models")
    async def models() -> ModelList:
        """The served names."""
        return ModelList(data=[card(name) for name in state.settings.served_names])

    @routes.get("/v1/models/{model:path}")
    async def model(model: str) -> ModelCard:
        """One served name."""
        return card(state.check_model(model))

    return routes
