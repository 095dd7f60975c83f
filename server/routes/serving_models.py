"""/v1/models.

/load and /tokenizer_info.
"""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from trencadis.core.checkpoint.json_fields import read_json
from trencadis.core.errors import NotFound
from trencadis.core.json_types import JsonObject
from trencadis.server.protocol.base_request import Strict
from trencadis.server.protocol.models_and_tokenize import ModelCard, ModelList, Permission
from trencadis.server.routes.app_state import AppState


def router(state: AppState) -> APIRouter:
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


TOKENIZER_CONFIG = "tokenizer_config.json"


class ServerLoad(Strict):
    """Requests inside the server: choices count one each."""

    server_load: int


def make_load_router(state: AppState) -> APIRouter:
    """Makes the routes over ``state``."""
    routes = APIRouter(tags=["operation"])

    @routes.get("/load", response_model=ServerLoad)
    async def load() -> ServerLoad:
        """How many choices the server works on or has in its queue."""
        return ServerLoad(server_load=state.admission.inside[0])

    if state.settings.config.enable_tokenizer_info_endpoint:

        @routes.get("/tokenizer_info", include_in_schema=False)
        async def tokenizer_info() -> Response:
            """The checkpoint's tokenizer_config.json, with the chat template in use."""
            return JSONResponse(get_tokenizer_settings(state))

    return routes


def get_tokenizer_settings(state: AppState) -> JsonObject:
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
