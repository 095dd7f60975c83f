"""Content parts of a message: texts, images and videos, in OpenAI's form and in qwen-vl-utils'.

OpenAI's form names a URL (``image_url``, ``video_url``). The form of qwen-vl-utils (``image``, ``video``) also takes
bare paths, PIL images and, for a video, a list of frames.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from trencadis.core.errors import BadRequest, TrencadisError
from trencadis.core.json_types import Json, JsonMapping
from trencadis.multimodal.media_options import MediaPart, part_options, part_uuid

TEXT_PARTS = ("text", "input_text", "output_text", "refusal", "thinking")
IMAGE_KEYS = ("image_url", "image", "image_pil")
IMAGE_PARTS = (*IMAGE_KEYS, "input_image")
VIDEO_KEYS = ("video_url", "video")
VIDEO_PARTS = (*VIDEO_KEYS, "input_video")
PATH_KEYS = ("image", "video")
"""Keys whose values may be bare paths."""
GUESSED = ("text", "image_url", "image", "video_url", "video")
"""Keys that determine the kind of a part without a type, in this order."""
LATER_PARTS = {
    "audio_url": "At most 0 audio(s) may be provided in one prompt",
    "input_audio": "At most 0 audio(s) may be provided in one prompt",
    "image_embeds": "image_embeds are not supported",
    "video_embeds": "video_embeds are not supported",
    "file": "files are not supported",
}
_SCHEME = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*:")


class NotImplementedYet(TrencadisError):
    """501: this server does not support this form of a value."""

    status = 501
    type = "NotImplementedError"


def read_part(part: Json, where: str) -> str | MediaPart:
    """Returns the text of a part, or its image or video.

    Raises:
        BadRequest: ``param`` is ``where``, the part's JSON path, or a field below it.
        NotImplementedYet: a data URL without base64.
    """
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise BadRequest(f"{where} must be an object with a type.", param=where)
    kind = part.get("type") or next((k for k in GUESSED if k in part), None)
    if kind in TEXT_PARTS:
        text = part.get("text", part.get(str(kind)))
        if not isinstance(text, str):
            raise BadRequest(f"{where}.text must be a string.", param=f"{where}.text")
        return text
    return _read_media(part, kind, where)


def _read_media(part: JsonMapping, kind: Json, where: str) -> MediaPart:
    """Returns the image or video of a part of type ``kind``, which is not text."""
    if kind in IMAGE_PARTS:
        uuid = part_uuid(part, where)
        source = _read_image(part, where, uuid is not None)
        return MediaPart(source, where, part_options(part, where), uuid=uuid)
    return _read_video_part(part, kind, where)


def _read_video_part(part: JsonMapping, kind: Json, where: str) -> MediaPart:
    """Returns the video of a part of type ``kind``, which is neither text nor image."""
    if kind in VIDEO_PARTS:
        uuid = part_uuid(part, where)
        return MediaPart(_read_video(part, where, uuid is not None), where, part_options(part, where), "video", uuid)
    if isinstance(kind, str) and kind in LATER_PARTS:
        audio = kind.endswith(("audio", "audio_url"))
        raise BadRequest(f"{LATER_PARTS[kind]}.", param="audio" if audio else where)
    raise BadRequest(f"{where} has the unknown type {str(kind)[:40]!r}; text or image_url is needed.", param=where)


def _read_image(part: JsonMapping, where: str, named: bool) -> object:
    """Returns a URL, path, bytes or PIL image; None if ``named`` (the part has a uuid) and there is no data."""
    key, value = _find_value(part, IMAGE_KEYS)
    if value is None and named:
        return None
    source = _read_source(value, key, where)
    if source is None:
        raise BadRequest(f"{where} needs an image_url with a url.", param=where)
    return source


def _read_video(part: JsonMapping, where: str, named: bool) -> object:
    """Returns a URL, path, bytes, array of frames, or list of images; None if ``named`` (the part has a uuid) and
    there is no data.
    """
    key, value = _find_value(part, VIDEO_KEYS)
    if value is None and named:
        return None
    if isinstance(value, list | tuple):
        return [_read_frame(frame, f"{where}.{key}[{i}]", where) for i, frame in enumerate(value)]
    # An array of frames has a ``resize`` too, so that ``_read_source`` returns it unchanged.
    source = _read_source(value, key, where)
    if source is None:
        raise BadRequest(f"{where} needs a video_url with a url, or a video with a path or frames.", param=where)
    return source


def _read_frame(value: Json, field: str, where: str) -> Json:
    if isinstance(value, Mapping):
        value = _find_value(value, (*IMAGE_KEYS, "url"))[1]
    source = _read_source(value, "image", where)
    if source is None:
        raise BadRequest(f"{field} must be a URL, a path or an image.", param=where)
    return source


def _find_value(part: JsonMapping, keys: tuple[str, ...]) -> tuple[str, Json]:
    """Returns the first key that is present, and its value or the ``url`` inside it."""
    for key in keys:
        value = part.get(key)
        if isinstance(value, Mapping):
            value = value.get("url")
        if value is not None:
            return key, value
    return keys[0], None


def _read_source(value: Json, key: str, where: str) -> object:
    """Returns a source that the media loader takes, or None."""
    if isinstance(value, str):
        return _read_url(value.strip(), key, where)
    return value if isinstance(value, bytes | Path) or hasattr(value, "resize") else None


def _read_url(url: str, key: str, where: str) -> str | Path:
    if url and key in PATH_KEYS and "\0" not in url and not _SCHEME.match(url):
        return Path(url)
    scheme = url.partition(":")[0].lower()
    if scheme not in ("http", "https", "data", "file"):
        raise BadRequest("The URL must be either a HTTP, data or file URL.", param=where)
    if scheme == "data" and ";base64" not in url[:200].partition(",")[0].lower():
        raise NotImplementedYet("Only base64 data URLs are supported for now.", param=where)
    return url
