"""Prepared images and videos as bytes, for another API process whose client refers to one by its uuid."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from trencadis.multimodal.processor import PlaceholderRun, PreparedImage
from trencadis.multimodal.videos.prepared_video import PreparedVideo


def pack_media(made: PreparedImage | PreparedVideo) -> bytes:
    """Encodes a prepared image or video, including pixels."""
    return msgspec.msgpack.encode(_encode_video(made) if isinstance(made, PreparedVideo) else _encode_image(made))


def unpack_media(data: bytes) -> PreparedImage | PreparedVideo:
    """Decodes the result of ``pack_media``."""
    found = msgspec.msgpack.decode(data)
    if "patches" not in found:
        return _decode_image(found)
    patches = tuple(map(_decode_image, found.pop("patches")))
    return PreparedVideo(**{**found, "indices": tuple(found["indices"])}, patches=patches)


def _encode_video(made: PreparedVideo) -> dict[str, Any]:
    return {
        "digest": made.digest, "indices": made.indices, "fps": made.fps, "seconds": made.seconds,
        "frames": made.frames, "rate": made.rate, "patches": [_encode_image(one) for one in made.patches],
    }  # fmt: skip


def _encode_image(made: PreparedImage) -> dict[str, Any]:
    return {
        "digest": made.digest, "shape": made.pixels.shape, "pixels": np.ascontiguousarray(made.pixels).tobytes(),
        "grid": made.grid, "tokens": made.tokens, "slots": made.slots, "resized": made.resized,
        "original": made.original, "items": [_encode_image(one) for one in made.items],
        "layout": [one if isinstance(one, str) else [*one] for one in made.layout],
    }  # fmt: skip


def _decode_image(found: dict[str, Any]) -> PreparedImage:
    pixels = np.frombuffer(found["pixels"], np.uint8).reshape(found["shape"])
    return PreparedImage(
        found["digest"], pixels, tuple(found["grid"]), found["tokens"], found["slots"], tuple(found["resized"]),
        tuple(found["original"]), tuple(map(_decode_image, found["items"])),
        tuple(one if isinstance(one, str) else PlaceholderRun(*one) for one in found["layout"]),
    )  # fmt: skip
