"""The server's media options (``--mm-processor-kwargs``) and the pixel limits that follow from them.

Torch-free and without numpy: ``trencadis plan``, the engine and the API process all use these limits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from trencadis.core.errors import BadRequest, StartupError
from trencadis.core.json_types import JsonMapping, JsonObject
from trencadis.multimodal.media_options import (
    ACCEPTED_KEYS,
    CHECKPOINT_KEYS,
    KNOWN_KEYS,
    NO_OPTIONS,
    VIDEO_NAMES,
    MediaOptions,
    request_options,
)

FLAG = "--mm-processor-kwargs"
REQUEST_ONLY_KEYS = ("resized_height", "resized_width", "video_start", "video_end")
"""Options that are valid only for single requests."""


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """The options in ``--mm-processor-kwargs``.

    Args:
        pixels: min_pixels and max_pixels, if given.
        videos: defaults for the videos of every request.
        checkpoint: keys whose values the checkpoint fixes; the server checks that they are equal.
        tiles: num_crops, if given.
    """

    pixels: dict[str, int] = field(default_factory=dict)
    videos: MediaOptions = NO_OPTIONS
    checkpoint: JsonObject = field(default_factory=dict)
    tiles: int | None = None


def server_options(kwargs: JsonMapping) -> ServerOptions:
    """Reads ``--mm-processor-kwargs``, which accepts the keys of transformers' image and video processors.

    Raises:
        StartupError: a key is unknown (the message lists the accepted ones), or a value is not supported.
    """
    outer = {k: v for k, v in kwargs.items() if k not in ("images_kwargs", "videos_kwargs")}
    groups = [("", outer)]
    groups += [
        (f".{name}", kwargs[name]) for name in ("images_kwargs", "videos_kwargs") if kwargs.get(name) is not None
    ]
    fixed: JsonObject = {}
    found: dict[str, MediaOptions] = {}
    for key, some in groups:
        if not isinstance(some, Mapping):
            raise StartupError(f"{FLAG}{key} must be an object.")
        fixed |= {k: v for k, v in some.items() if k in CHECKPOINT_KEYS and v is not None}
        found[key] = _read_options({k: v for k, v in some.items() if k not in CHECKPOINT_KEYS}, f"{FLAG}{key}")
    both, for_images = found[""], found.get(".images_kwargs", NO_OPTIONS).merge_over(found[""])
    pixels = {name: value for name, value in for_images.given.items() if name in ("min_pixels", "max_pixels")}
    clips = MediaOptions(**{name: value for name, value in both.given.items() if name in VIDEO_NAMES})
    return ServerOptions(pixels, found.get(".videos_kwargs", NO_OPTIONS).merge_over(clips), fixed, for_images.num_crops)


def _read_options(kwargs: JsonMapping, where: str) -> MediaOptions:
    wrong = next((name for name in kwargs if name not in KNOWN_KEYS or name in REQUEST_ONLY_KEYS), None)
    if wrong is not None:
        what = "the key of a request" if wrong in REQUEST_ONLY_KEYS else "the unknown key"
        some = ", ".join(name for name in ACCEPTED_KEYS if name not in REQUEST_ONLY_KEYS)
        raise StartupError(f"{where} has {what} {wrong[:40]!r}; accepted are {some}")
    try:
        return request_options(kwargs, where)
    except BadRequest as error:
        raise StartupError(f"{where}: {error.message}") from None


def refuse_num_crops(tiles: int | None, param: str | None = None) -> None:
    """Raises an error if ``num_crops`` is given for a model that does not use it.

    Raises:
        BadRequest: it came from a request field, ``param``.
        StartupError: it came from the command line, which has no ``param``.
    """
    if tiles is None:
        return
    if param is None:
        raise StartupError(f"{FLAG}: num_crops does not apply, this model cuts no image by it")
    raise BadRequest("num_crops does not apply to this model.", param=f"{param}.num_crops")


def check_pixel_limits(least: int, most: int, factor: int) -> None:
    """Checks that some image fits the limits, in pixels; the sides of images are multiples of ``factor``.

    Raises:
        StartupError: no image fits.
    """
    if not 0 < least <= most or most < factor**2:
        raise StartupError(
            f"min_pixels={least} and max_pixels={most} contradict each other "
            f"(0 < min_pixels <= max_pixels, max_pixels >= {factor**2})"
        )
