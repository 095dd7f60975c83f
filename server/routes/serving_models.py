"""/v1/models; /v1/load_lora_adapter and /v1/unload_lora_adapter.

Adapters are loaded and unloaded with VLLM_ALLOW_RUNTIME_LORA_UPDATING only.
"""

from __future__ import annotations

import asyncio

from fastapi import APIRouter
from starlette.responses import PlainTextResponse, Response

from trencadis.core.json_types import JsonObject
from trencadis.server.prompts.adapter_registry import change_adapters
from trencadis.server.protocol.models_and_tokenize import (
    LoadAdapterRequest,
    ModelCard,
    ModelList,
    Permission,
    UnloadAdapterRequest,
)
from trencadis.server.routes.serving_base import ServingState


def router(state: ServingState) -> APIRouter:
    """Makes the routes over ``state``."""
    routes = APIRouter(tags=["models"])

    def card(name: str) -> ModelCard:
        served = None if state.adapters is None else state.adapters.served.get(name)
        return ModelCard(
            id=name,
            created=state.created if served is None else served.created,
            root=(state.settings.model_root or name) if served is None else served.root,
            parent=None if served is None else served.parent,
            max_model_len=state.service.max_model_len,
            permission=[Permission(id=f"modelperm-{name}", created=state.created)],
        )

    @routes.get("/v1/models")
    async def models() -> ModelList:
        """The served names: the model, then its adapters."""
        adapters = () if state.adapters is None else state.adapters.served
        return ModelList(data=[card(name) for name in (*state.settings.served_names, *adapters)])

    @routes.get("/v1/models/{model:path}")
    async def model(model: str) -> ModelCard:
        """One served name."""
        return card(state.check_model(model))

    return routes


def make_adapters_router(state: ServingState) -> APIRouter:
    """Makes the routes over ``state``; none unless adapters may be changed at run time."""
    routes = APIRouter(tags=["adapters"])
    registry, shared = state.adapters, state.settings.shared
    if registry is None or not state.settings.config.allow_runtime_lora_updating:
        return routes
    changing = asyncio.Lock()

    async def apply_change(change: JsonObject) -> None:
        async with changing:
            if shared is not None:
                await shared.change_adapters(change)
            else:
                await change_adapters(registry, change)

    @routes.post("/v1/load_lora_adapter")
    async def load_lora_adapter(body: LoadAdapterRequest) -> Response:
        """Loads an adapter, which requests then name as their model."""
        await apply_change(
            {
                "name": body.lora_name, "path": body.lora_path, "parent": body.base_model_name or "",
                "replace": body.load_inplace,
            }
        )  # fmt: skip
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    @routes.post("/v1/unload_lora_adapter")
    async def unload_lora_adapter(body: UnloadAdapterRequest) -> Response:
        """Unloads an adapter; requests that run finish with it."""
        await apply_change({"name": body.lora_name})
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    return routes
