"""Puts the parts of the API process together: configuration, text side, pictures, routes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fastapi import FastAPI

from trencadis.core.checkpoint.model_config import ModelConfig, load_config
from trencadis.core.errors import StartupError
from trencadis.core.process.wire import EngineInfo
from trencadis.multimodal.images.cache import PreparedCache
from trencadis.multimodal.images.frontend import ImageFrontend, ImageLimits
from trencadis.multimodal.images.limits import server_options
from trencadis.multimodal.images.processor import ImageProcessor
from trencadis.multimodal.sources.loader import FETCH_TIMEOUT, MediaLoader
from trencadis.multimodal.videos.frontend import FETCH_TIMEOUT as VIDEO_TIMEOUT
from trencadis.multimodal.videos.frontend import VideoFrontend, VideoLimits
from trencadis.server.config.settings import Settings
from trencadis.server.engine.supervisor import Supervisor
from trencadis.server.http.app import create_app
from trencadis.server.prompts.service import TextService
from trencadis.server.routes.settings import HttpSettings


def build_app(settings: Settings, supervisor: Supervisor) -> FastAPI:
    """The app over ``supervisor``; the engine may still be loading.

    Raises:
        StartupError: the checkpoint lacks something that the API side needs.
    """
    config = load_config(Path(settings.engine.model))
    images = image_side(settings, config) if config.vision is not None else None
    videos = video_side(settings, images) if images is not None and config.video_token >= 0 else None
    service = TextService.load(
        config,
        settings.engine,
        images=images,
        videos=videos,
        chat_template=settings.server.chat_template,
        content_format=settings.server.chat_template_content_format,
    )

    def came_up(info: EngineInfo) -> None:
        service.max_model_len = info.max_model_len

    supervisor.on_info.append(came_up)
    http = HttpSettings(
        settings.server,
        settings.engine.model,
        settings.engine.device,
        running=settings.engine.max_num_seqs or 128,
        priorities=settings.engine.scheduling_policy == "priority",
    )
    return create_app(http, supervisor, service)


def image_side(settings: Settings, config: ModelConfig) -> ImageFrontend:
    """What loads and prepares pictures."""
    engine, server = settings.engine, settings.server
    root = Path(server.allowed_local_media_path) if server.allowed_local_media_path else None
    if root is not None and not root.is_dir():
        raise StartupError(f"--allowed-local-media-path {root} is no folder.")
    limits = ImageLimits(images=engine.limit_mm_per_prompt.get("image", ImageLimits.images))
    if server.max_image_pixels is not None:
        limits = replace(limits, max_pixels=server.max_image_pixels)
    timeout = FETCH_TIMEOUT if server.image_fetch_timeout is None else server.image_fetch_timeout
    return ImageFrontend(
        ImageProcessor.from_checkpoint(config.path, engine.mm_processor_kwargs, engine.image_alignment),
        MediaLoader(server.allowed_media_domains, root, server.max_media_bytes, timeout),
        PreparedCache(int(engine.mm_processor_cache_gb * 2**30)),
        limits,
    )


def video_side(settings: Settings, images: ImageFrontend) -> VideoFrontend:
    """What loads and prepares videos; cache and decode workers are the pictures'."""
    server = settings.server
    root = Path(server.allowed_local_media_path) if server.allowed_local_media_path else None
    timeout = VIDEO_TIMEOUT if server.video_fetch_timeout is None else server.video_fetch_timeout
    loader = MediaLoader(server.allowed_media_domains, root, server.max_media_bytes, timeout)
    most = settings.engine.limit_mm_per_prompt.get("video", VideoLimits.videos)
    limits = VideoLimits(most, server.max_video_frames, server.max_video_seconds)
    options = server_options(settings.engine.mm_processor_kwargs).videos
    return VideoFrontend(images.processor, loader, images.cache, images.decoder, limits, images.uuids, options)
