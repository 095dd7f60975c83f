"""Conversions of values of vLLM's flags to values of ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from trencadis.core.config import ATTENTION, ATTENTION_LIBRARIES, OLDER_ATTENTION
from trencadis.core.errors import StartupError

Values = Mapping[str, Any]
FRAMES = (("video", "num_frames"), ("video", "fps"))
USUAL = (("image", "image_mode", "RGB"), ("video", "video_backend", "opencv"))
"""Media options of vLLM whose value describes what this server does anyway."""


def set_when_on(name: str, value: Any) -> Callable[[Any, Values], Values]:
    """Returns a conversion that sets our flag to ``value`` if the switch is on."""
    return lambda given, now: {name: value} if given else {}


def set_opposite(name: str) -> Callable[[Any, Values], Values]:
    """Returns a conversion that sets our switch to the opposite of vLLM's."""
    return lambda given, now: {name: not given}


def copy_unless_given(name: str) -> Callable[[Any, Values], Values]:
    """Returns a conversion to our flag with the same values; if that is given too, it wins."""
    return lambda given, now: {} if name in now else {name: given}


def take_smaller(name: str) -> Callable[[Any, Values], Values]:
    """Returns a conversion to our flag with the same meaning as a bound: the smaller value wins."""

    def to(given: Any, now: Values) -> Values:
        other = now.get(name)
        return {name: given if other is None else min(given, other)}

    return to


def convert_async_scheduling(given: Any, now: Values) -> Values:
    """Converts ``--async-scheduling``: one step in flight beyond the one that is scheduled."""
    return {"async_depth": int(bool(given))}


def forbid_media(given: Any, now: Values) -> Values:
    """Sets the limits of images and videos per request to 0."""
    return {"limit_mm_per_prompt": {"image": 0, "video": 0}} if given else {}


def disable_graphs_at(*least: Any) -> Callable[[Any, Values], Values]:
    """Returns a conversion of values that disable graphs; other values, which tune graph capture, have no effect."""
    return lambda given, now: {"enforce_eager": True} if str(given).upper() in map(str, least) else {}


def convert_attention_backend(given: Any, now: Values) -> Values:
    """Converts ``--attention-config.backend``.

    Raises:
        StartupError: the value names no attention backend.
    """
    word = str(given).upper().removesuffix(OLDER_ATTENTION)
    if word in ATTENTION:
        return {"attention_backend": ""}
    if word not in ATTENTION_LIBRARIES:
        known = " and ".join(ATTENTION_LIBRARIES)
        raise StartupError(f"--attention-config.backend: {str(given)[:60]!r} is no attention; libraries are {known}")
    return {"attention_backend": word}


def convert_video_frames(given: Any, now: Values) -> Values:
    """Converts ``{"video": {"num_frames": 32, "fps": 2}}`` to options of videos.

    Raises:
        StartupError: there is another key.
    """
    if not isinstance(given, Mapping):
        raise StartupError(f"--media-io-kwargs: {str(given)[:60]!r} is not a JSON object.")
    videos: dict[str, Any] = {}
    for kind, options in given.items():
        for name, value in (options or {}).items():
            if (kind, name) in FRAMES and value != -1:
                videos[name] = value
            elif (kind, name, value) not in USUAL and (kind, name) not in FRAMES:
                raise StartupError(
                    f"--media-io-kwargs.{kind}.{name} is refused: it takes video.num_frames and video.fps; "
                    "--mm-processor-kwargs has more options of images and videos."
                )
    own = dict(now.get("mm_processor_kwargs", {}))
    return {"mm_processor_kwargs": own | {"videos_kwargs": videos | own.get("videos_kwargs", {})}} if videos else {}


def convert_log_level(given: Any, now: Values) -> Values:
    """Converts to a level of ``--log-level``, which wins if it is given."""
    return {} if "log_level" in now else {"log_level": str(given).upper()}
