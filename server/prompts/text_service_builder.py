"""Builds the text service with its image and video frontends, for the server and for offline use."""

from __future__ import annotations

import logging

from trencadis.core.checkpoint.pooling_resolver import load_model_config
from trencadis.core.engine_config import EngineConfig
from trencadis.server.prompts.media_frontends import MediaRules, make_image_frontend, make_video_frontend
from trencadis.server.prompts.text_service import TextService

log = logging.getLogger("trencadis.server")


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
