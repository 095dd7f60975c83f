"""The server's app with a switch for its traces, so that a process with traces is compared with itself without."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.responses import PlainTextResponse

from trencadis.server.config.server_config import ServerConfig
from trencadis.server.routes.app_state import AppState


def build_app(settings: Any, engine: Any) -> FastAPI:
    from trencadis.server.processes.server_lifecycle import find_app

    app = find_app(ServerConfig().app)(settings, engine)
    state: AppState = app.state.trencadis
    traces = state.traces

    @app.post("/switch")
    async def switch(on: bool) -> PlainTextResponse:
        object.__setattr__(state, "traces", traces if on else None)
        return PlainTextResponse("on" if on else "off")

    return app
