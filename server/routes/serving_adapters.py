"""/v1/load_lora_adapter and /v1/unload_lora_adapter, with VLLM_ALLOW_RUNTIME_LORA_UPDATING."""

from __future__ import annotations

import asyncio
from functools import partial

from fastapi import APIRouter
from starlette.responses import PlainTextResponse, Response

from trencadis.core.errors import BadRequest, NotFound, StartupError
from trencadis.core.json_types import JsonObject
from trencadis.server.config.hub import find_adapter_folder
from trencadis.server.prompts.adapter_registry import AdapterRegistry, UnknownAdapter, parse_modules
from trencadis.server.prompts.text_service import TextService
from trencadis.server.protocol.models_and_tokenize import LoadAdapterRequest, UnloadAdapterRequest
from trencadis.server.routes.app_state import AppState
from trencadis.server.routes.http_settings import HttpSettings


def router(state: AppState) -> APIRouter:
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


async def change_adapters(registry: AdapterRegistry, change: JsonObject) -> None:
    """Loads the adapter with ``path``, or unloads the one without.

    Raises:
        BadRequest: it cannot be loaded.
        NotFound: it cannot be unloaded because it is not loaded.
    """
    name = change["name"]
    try:
        if "path" not in change:
            registry.remove(name)
            return
        registry.check(name, change["replace"])
        registry.put(await asyncio.to_thread(registry.read, name, change["path"], change["parent"], True))
    except UnknownAdapter as error:
        raise NotFound(f"{str(error)[:1].upper()}{str(error)[1:]}.", param="lora_name") from None
    except StartupError as error:
        raise BadRequest(f"The adapter cannot be loaded: {error}", param="lora_path") from None


def make_adapters(settings: HttpSettings, service: TextService) -> AdapterRegistry | None:
    """Reads the adapters of ``--lora-modules`` and ``--default-mm-loras``; None without ``--enable-lora``."""
    engine, config = settings.engine, settings.config
    if not engine.enable_lora:
        return None
    fetch = partial(find_adapter_folder, engine)
    made = AdapterRegistry(service.config, engine, settings.served_names, fetch, config.allowed_lora_path)
    for name, path, parent in ((one.name, one.path, one.parent) for one in parse_modules(config.lora_modules)):
        made.add(name, path, parent)
    made.set_defaults(config.default_mm_loras)
    if settings.shared is not None:
        settings.shared.share_adapters(partial(change_adapters, made))
    return made
