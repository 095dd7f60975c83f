"""Builds the app of the API process from configuration, text service, media rules and routes."""

from __future__ import annotations

from fastapi import FastAPI

from trencadis.core.process.engine_messages import EngineInfo
from trencadis.server.config.resolve_settings import Settings
from trencadis.server.config.server_config import ServerConfig
from trencadis.server.engine.supervisor import Supervisor
from trencadis.server.http.fastapi_app import create_app
from trencadis.server.processes.multi_engine_client import Fleet
from trencadis.server.processes.remote_engine import RemoteEngines, RemoteFleet, RemoteReplica
from trencadis.server.prompts.media_frontends import MediaRules, make_text_service
from trencadis.server.routes.app_state import HttpSettings
from trencadis.server.routes.state_builder import make_state


def build_app(settings: Settings, supervisor: Supervisor | Fleet | RemoteEngines) -> FastAPI:
    """Builds the app over ``supervisor``'s engine, which may still be loading.

    Raises:
        StartupError: the checkpoint lacks something that the API side needs.
    """
    shared = supervisor.link.shared if isinstance(supervisor, RemoteReplica | RemoteFleet) else None
    service = make_text_service(
        settings.engine,
        make_media_rules(settings.server, 1 if shared is None else shared.count),
        chat_template=settings.server.chat_template,
        content_format=settings.server.chat_template_content_format,
    )

    def came_up(info: EngineInfo) -> None:
        service.max_model_len = info.max_model_len

    supervisor.on_info.append(came_up)
    http = HttpSettings(
        settings.server,
        settings.model_root or settings.engine.model,
        settings.engine.device,
        max_running=(settings.engine.max_num_seqs or 128) * settings.server.data_parallel_size,
        priorities=settings.engine.scheduling_policy == "priority",
        engine=settings.engine.without_secrets(),
        shared=shared,
    )
    if shared is not None:
        shared.share_media(service)
    state = make_state(http, supervisor, service)
    app = create_app(state)
    if isinstance(supervisor, RemoteReplica | RemoteFleet):
        supervisor.link.make_vocabulary = state.grammar_cache.pack_vocabulary
    else:
        supervisor.vocabulary = state.grammar_cache.pack_vocabulary
    return app


def make_media_rules(server: ServerConfig, share: int = 1) -> MediaRules:
    """Returns the operator's limits on media, for one of ``share`` processes."""
    return MediaRules(
        domains=tuple(server.allowed_media_domains),
        folder=server.allowed_local_media_path,
        max_bytes=server.max_media_bytes,
        max_pixels=server.max_image_pixels,
        image_timeout=server.image_fetch_timeout,
        video_timeout=server.video_fetch_timeout,
        max_frames=server.max_video_frames,
        max_seconds=server.max_video_seconds,
        redirects=server.media_redirects,
        share=share,
    )
