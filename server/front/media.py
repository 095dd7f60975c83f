"""Prepared pictures and videos as bytes, for another API process whose client names one by its uuid."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from trencadis.multimodal.processor import Prepared, TakenRows
from trencadis.multimodal.videos.items import PreparedVideo


def pack(made: Prepared | PreparedVideo) -> bytes:
    """All of it, pixels included."""
    return msgspec.msgpack.encode(_video(made) if isinstance(made, PreparedVideo) else _picture(made))


def unpack(data: bytes) -> Prepared | PreparedVideo:
    """What ``pack`` was given."""
    found = msgspec.msgpack.decode(data)
    if "patches" not in found:
        return _to_picture(found)
    patches = tuple(map(_to_picture, found.pop("patches")))
    return PreparedVideo(**{**found, "indices": tuple(found["indices"])}, patches=patches)


def _video(made: PreparedVideo) -> dict[str, Any]:
    return {
        "digest": made.digest, "indices": made.indices, "fps": made.fps, "seconds": made.seconds,
        "frames": made.frames, "rate": made.rate, "patches": [_picture(one) for one in made.patches],
    }  # fmt: skip


def _picture(made: Prepared) -> dict[str, Any]:
    return {
        "digest": made.digest, "shape": made.pixels.shape, "pixels": np.ascontiguousarray(made.pixels).tobytes(),
        "grid": made.grid, "tokens": made.tokens, "slots": made.slots, "resized": made.resized,
        "original": made.original, "items": [_picture(one) for one in made.items],
        "layout": [one if isinstance(one, str) else [*one] for one in made.layout],
    }  # fmt: skip


def _to_picture(found: dict[str, Any]) -> Prepared:
    pixels = np.frombuffer(found["pixels"], np.uint8).reshape(found["shape"])
    return Prepared(
        found["digest"], pixels, tuple(found["grid"]), found["tokens"], found["slots"], tuple(found["resized"]),
        tuple(found["original"]), tuple(map(_to_picture, found["items"])),
        tuple(one if isinstance(one, str) else TakenRows(*one) for one in found["layout"]),
    )  # fmt: skip
