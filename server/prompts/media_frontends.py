"""Makes the image and video frontends of a model by the rules for media, and the text service that has them."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from trencadis.core.checkpoint.model_config import ModelConfig
from trencadis.core.checkpoint.model_registry import image_processor
from trencadis.core.checkpoint.pooling_config_reader import load_model_config
from trencadis.core.engine_config import EngineConfig
from trencadis.core.errors import StartupError
from trencadis.core.host_memory import limited_budget
from trencadis.multimodal.images.image_frontend import ImageFrontend, ImageLimits
from trencadis.multimodal.images.processor_cache import ProcessorCache
from trencadis.multimodal.media_parts_and_mm_processor_kwargs import server_options
from trencadis.multimodal.sources.http_fetch import MAX_REDIRECTS
from trencadis.multimodal.sources.media_loader import FETCH_TIMEOUT, MAX_MEDIA_BYTES, MediaLoader
from trencadis.multimodal.videos.video_frontend import FETCH_TIMEOUT as VIDEO_TIMEOUT
from trencadis.multimodal.videos.video_frontend import VideoFrontend, VideoLimits
from trencadis.server.prompts.prompt_builder import TextService

if TYPE_CHECKING:
    from trencadis.multimodal.processor_interface import VideoProcessor

log = logging.getLogger("trencadis.server")
CACHE_SHARE = 1 / 12
"""Largest share of the memory of this machine or container for decoded images that are kept."""


@dataclass(frozen=True, slots=True)
class MediaRules:
    """The allowed sources and sizes of media; None is the frontends' default.

    Args:
        domains: hosts that media may be fetched from; empty: every public one.
        folder: that ``file://`` may read from; empty: none.
        any_path: a bare path may name any file, because the caller is the operator.
        max_bytes: of one file.
        max_pixels: of one image before it is resized.
        image_timeout: seconds of one download, as is ``video_timeout``.
        max_frames: taken of one video.
        max_seconds: that a video may last.
        redirects: HTTP redirects are followed.
        share: processes among which the cache, the workers and the concurrent preparations are divided.
    """

    domains: tuple[str, ...] = ()
    folder: str = ""
    any_path: bool = False
    max_bytes: int = MAX_MEDIA_BYTES
    max_pixels: int | None = None
    image_timeout: float | None = None
    video_timeout: float | None = None
    max_frames: int | None = None
    max_seconds: float | None = None
    redirects: bool = True
    share: int = 1

    def make_loader(self, timeout: float) -> MediaLoader:
        """Makes a loader that applies these rules.

        Raises:
            StartupError: ``folder`` is not a folder.
        """
        root = Path(self.folder) if self.folder else None
        if root is not None and not root.is_dir():
            raise StartupError(f"--allowed-local-media-path {root} is not a folder.")
        hops = MAX_REDIRECTS if self.redirects else 0
        return MediaLoader(self.domains, root, self.max_bytes, timeout, hops, any_path=self.any_path)


def make_image_frontend(config: EngineConfig, media: MediaRules, model: ModelConfig) -> ImageFrontend:
    """Makes the image frontend of ``model``.

    Raises:
        StartupError: the rules name a folder that does not exist.
    """
    limits = ImageLimits(images=config.limit_mm_per_prompt.get("image", ImageLimits.images))
    if media.max_pixels is not None:
        limits = replace(limits, max_pixels=media.max_pixels)
    if media.share > 1:
        limits = limits.divide(media.share)
    return ImageFrontend(
        image_processor(model, config.mm_processor_kwargs, config.image_alignment),
        media.make_loader(FETCH_TIMEOUT if media.image_timeout is None else media.image_timeout),
        ProcessorCache(limited_budget(int(config.mm_processor_cache_gb * 2**30), CACHE_SHARE) // media.share),
        limits,
    )


def make_video_frontend(config: EngineConfig, media: MediaRules, images: ImageFrontend) -> VideoFrontend:
    """Makes the video frontend, which shares the cache and the decode workers of images."""
    loader = media.make_loader(VIDEO_TIMEOUT if media.video_timeout is None else media.video_timeout)
    limits = VideoLimits(config.limit_mm_per_prompt.get("video", VideoLimits.videos))
    if media.max_frames is not None:
        limits = replace(limits, frames=media.max_frames)
    if media.max_seconds is not None:
        limits = replace(limits, seconds=media.max_seconds)
    options = server_options(config.mm_processor_kwargs).videos
    processor = cast("VideoProcessor", images.processor)  # the processor of a model that has a video token
    return VideoFrontend(processor, loader, images.cache, images.decoder, limits, images.uuids, options)


def make_text_service(
    config: EngineConfig, media: MediaRules, *, chat_template: str = "", content_format: str = "auto"
) -> TextService:
    """Makes the text service of the checkpoint in ``config.model``, with image and video frontends if the model takes
    such media.

    Raises:
        StartupError: the checkpoint lacks a file that the service needs, or the rules name a folder that does not
        exist.
    """
    model = load_model_config(config)
    if model.unread:
        log.warning(
            "config.json has keys that nothing here knows: %s; they are ignored.", ", ".join(model.unread)[:400]
        )
    if model.pooling is not None:
        log.info("pooling: %s", model.pooling.line)
    images = make_image_frontend(config, media, model) if model.vision is not None else None
    videos = make_video_frontend(config, media, images) if images is not None and model.video_token >= 0 else None
    return TextService.load(
        model, config, images=images, videos=videos, chat_template=chat_template, content_format=content_format
    )


def close_frontends(service: TextService) -> None:
    """Ends the decode workers and threads of both frontends."""
    for side in (service.images, service.videos):
        if isinstance(side, ImageFrontend | VideoFrontend):
            side.close()
